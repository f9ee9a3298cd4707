"""Inter planners: they cut a step into stages and give each its devices, option and schedule."""

from ._base import NO_LIMITS as NO_LIMITS
from ._base import AbstractInter as AbstractInter
from ._base import NoFasterStages as NoFasterStages
from ._base import StageLimits as StageLimits
from ._base import check_chains as check_chains
from ._manual import ManualStages as ManualStages
from .bottleneck import Bottleneck as Bottleneck
from .grid import EqualStages as EqualStages
from .grid import Grid as Grid
from .grid import layer_starts as layer_starts
from .stages import StageDP as StageDP
from .stages import Streaming as Streaming
