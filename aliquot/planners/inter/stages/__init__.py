"""The best stages by dynamic programming, with a bound."""

from ._solve import StageDP as StageDP
from ._streaming import Streaming as Streaming
