"""Planners: methods, the race between them, and the plans that they write.

The exports are listed in `__init__.pyi`. Chains and the planners of stages need no JAX, which other
files import.
"""

from ..core import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
