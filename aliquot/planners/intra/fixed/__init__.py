"""Splits that an expert writes by hand, as restrictions on the choices that a solver may take."""

from ._context_split import ATTENTION_WAYS as ATTENTION_WAYS
from ._context_split import context_split as context_split
from ._fixed import Fixed as Fixed
from ._megatron import CONTEXT as CONTEXT
from ._megatron import DATA_AXES as DATA_AXES
from ._megatron import MegatronSplit as MegatronSplit
from ._megatron import ways_to_sum as ways_to_sum
from ._restrict import Kinds as Kinds
from ._restrict import Masks as Masks
from ._restrict import batch_restriction as batch_restriction
from ._restrict import data_axes_restriction as data_axes_restriction
from ._restrict import everything as everything
from ._restrict import kinds_of as kinds_of
from ._restrict import matching as matching
from ._restrict import pinned as pinned
from ._restrict import regular_choices as regular_choices
from ._state_split import split_state as split_state
