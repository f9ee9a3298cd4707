"""Micro-batches: the test that a step can be cut into them, the cut, and how their results
combine.
"""

from ._cut_state import in_stages as in_stages
from ._independent import Phased as Phased
from ._micro_batches import SEMANTICS as SEMANTICS
from ._micro_batches import MicroBatchPlan as MicroBatchPlan
from ._micro_batches import plan_micro_batches as plan_micro_batches
from ._micro_batches import runs_in_groups as runs_in_groups
from ._micro_batches import traces_in_groups as traces_in_groups
from ._micro_calls import indexed_dims as indexed_dims
from ._micro_calls import phase_of as phase_of
from ._own_loop import without_own_loop as without_own_loop
from ._time_specs import Action as Action
from ._time_specs import Conversion as Conversion
from ._time_specs import TimeKind as TimeKind
from ._time_specs import TimeSpec as TimeSpec
from ._traces import trace_part as trace_part
