"""One program over one mesh: the graph of a micro-batch, constraints on its arrays, and totals over
micro-batches.
"""

from ._apart import kept_apart as kept_apart
from ._lowering import AbstractLowering as AbstractLowering
from ._lowering import ConstraintLowering as ConstraintLowering
from ._lowering import partition as partition
from ._mesh import axis_names as axis_names
from ._mesh import make_mesh as make_mesh
from ._mesh import require_kernels as require_kernels
from ._plan_program import build_plan_program as build_plan_program
from ._plan_program import stage_pins as stage_pins
from ._spmd import Program as Program
from ._spmd import build_program as build_program
from ._totals import Totals as Totals
