"""Who decides: methods, the race between them, and what they write into a plan."""

from ._base import AbstractMethod as AbstractMethod
from ._base import Candidate as Candidate
from ._base import Decision as Decision
from ._base import Interrupted as Interrupted
from ._base import Progress as Progress
from ._follow import OtherSplit as OtherSplit
from ._follow import find_alternatives as find_alternatives
from ._follow import follow as follow
from ._methods import ILP as ILP
from ._methods import Auto as Auto
from ._methods import DataParallel as DataParallel
from ._methods import ManualParallel as ManualParallel
from ._methods import ShardParallel as ShardParallel
from ._methods import Zero2Parallel as Zero2Parallel
from ._methods import Zero3Parallel as Zero3Parallel
from ._pipeshard import PipelineDecision as PipelineDecision
from ._pipeshard import PipeshardParallel as PipeshardParallel
from ._pipeshard import solve_pipeline as solve_pipeline
from ._registry import METHODS as METHODS
from ._registry import method_by_name as method_by_name
from ._write import write_plan as write_plan
from ._write_pipeline import write_pipeline as write_pipeline
from .inter import AbstractInter as AbstractInter
from .inter import Grid as Grid
from .inter import ManualStages as ManualStages
from .inter import StageDP as StageDP
