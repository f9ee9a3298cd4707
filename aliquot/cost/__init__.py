"""Time and memory of a step under a plan: one formula each, with its source, and the one judge that adds them up."""

from ._choices import distinct_specs as distinct_specs
from ._choices import enumerate_choices as enumerate_choices
from ._choices import shards as shards
from ._collectives import collective_line as collective_line
from ._evaluate import StepTime as StepTime
from ._evaluate import conversions as conversions
from ._evaluate import evaluate as evaluate
from ._memory import MemoryModel as MemoryModel
from ._memory import converted as converted
from ._memory import memory_model as memory_model
from ._memory import timeline as timeline
from ._priced import Priced as Priced
from ._priced import PricedEdge as PricedEdge
from ._priced import PricedNode as PricedNode
from ._priced import price as price
