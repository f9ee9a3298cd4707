"""The best stages by dynamic programming, with a bound."""

from ._infeasible import no_layout as no_layout
from ._solve import StageDP as StageDP
from ._streaming import Streaming as Streaming
