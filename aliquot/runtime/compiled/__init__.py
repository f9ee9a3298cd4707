"""Compiled programs: their collectives, memory and figures."""

from ._hlo import CompiledCollective as CompiledCollective
from ._hlo import add_up as add_up
from ._hlo import find_collectives as find_collectives
from ._stats import CompiledMemory as CompiledMemory
from ._stats import StageStats as StageStats
from ._stats import Stats as Stats
from ._stats import compiled_memory as compiled_memory
from ._stats import compiled_stats as compiled_stats
