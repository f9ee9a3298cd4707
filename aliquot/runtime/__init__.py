"""Run plans: one program over one mesh, on this machine or together with others."""

from ._check import LeafDifference as LeafDifference
from ._check import StepCheck as StepCheck
from ._hlo import CompiledCollective as CompiledCollective
from ._hlo import add_up as add_up
from ._hlo import find_collectives as find_collectives
from ._hosts import initialize as initialize
from ._hosts import shutdown as shutdown
from ._lazy import LazyStep as LazyStep
from ._lowering import AbstractLowering as AbstractLowering
from ._lowering import ConstraintLowering as ConstraintLowering
from ._pipeline_stats import PipelineStats as PipelineStats
from ._pipeline_stats import StageStats as StageStats
from ._pipeline_step import PipelineStep as PipelineStep
from ._plan_pipeline import build_plan_pipeline as build_plan_pipeline
from ._plan_program import build_plan_program as build_plan_program
from ._spmd import Program as Program
from ._spmd import build_program as build_program
from ._state import gather as gather
from ._state import local_part as local_part
from ._state import place as place
from ._stats import CompiledMemory as CompiledMemory
from ._stats import Stats as Stats
from ._stats import compiled_stats as compiled_stats
from ._step import ParallelStep as ParallelStep
from ._step import make_mesh as make_mesh
