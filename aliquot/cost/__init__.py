"""Time and memory of a step under a plan: one formula each, with its source, and the one judge that
adds them up.

The exports are listed in `__init__.pyi`. Chains and the planners of stages need no JAX, which other
files import.
"""

from ..core import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
