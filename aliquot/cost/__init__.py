"""Time and memory of a step under a plan: one formula each, with its source, and the one judge that adds them up."""

from ._choices import distinct_specs as distinct_specs
from ._choices import enumerate_choices as enumerate_choices
from ._choices import shards as shards
from ._collectives import collective_line as collective_line
from ._estimate import collective_uses as collective_uses
from ._estimate import decode_interior as decode_interior
from ._estimate import encode_interior as encode_interior
from ._estimate import estimate as estimate
from ._estimate import find_picks as find_picks
from ._estimate import peak_memory as peak_memory
from ._estimate import predict as predict
from ._evaluate import StepTime as StepTime
from ._evaluate import conversions as conversions
from ._evaluate import evaluate as evaluate
from ._memory import Conversion as Conversion
from ._memory import MemoryModel as MemoryModel
from ._memory import converted as converted
from ._memory import memory_model as memory_model
from ._memory import timeline as timeline
from ._priced import Priced as Priced
from ._priced import PricedEdge as PricedEdge
from ._priced import PricedNode as PricedNode
from ._priced import price as price
from ._problem import Problem as Problem
from ._problem import make_problem as make_problem
