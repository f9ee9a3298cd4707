"""What may be split, how a split propagates, and what it costs to change it."""

from . import rules as rules
from ._rule import DimRule as DimRule
from ._rule import dim_rule as dim_rule
from ._rule import register_dim_rule as register_dim_rule
from ._rule import registered_primitives as registered_primitives
from ._rule import rule as rule
from ._rule import whole as whole
from ._spec import PARTIAL as PARTIAL
from ._spec import REPLICATED as REPLICATED
from ._spec import Spec as Spec
from ._spec import dims_of as dims_of
from ._spec import divides as divides
from ._spec import format_spec as format_spec
from ._spec import num_shards as num_shards
from ._spec import spec_from_dims as spec_from_dims
from ._spec import without_partial as without_partial
