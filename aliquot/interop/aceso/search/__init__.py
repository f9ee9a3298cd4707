"""Searches for the best configuration over a measured database."""

from ._auto import Auto as Auto
from ._bottleneck import Bottleneck as Bottleneck
from ._exact import Exact as Exact
from ._grid import Grid as Grid
from ._measured_chain import MeasuredChain as MeasuredChain
from ._megatron import Megatron as Megatron
from ._need import Need as Need
from ._need import smallest_need as smallest_need
from ._planners import PLANNERS as PLANNERS
from ._problem import BUDGET_SPENT as BUDGET_SPENT
from ._problem import INTERRUPTED as INTERRUPTED
from ._problem import Incumbents as Incumbents
from ._problem import OnProgress as OnProgress
from ._problem import Progress as Progress
from ._problem import SearchPlanner as SearchPlanner
from ._problem import SearchProblem as SearchProblem
from ._problem import SearchResult as SearchResult
from ._problem import require_measured as require_measured
from ._setup import read_problem as read_problem
