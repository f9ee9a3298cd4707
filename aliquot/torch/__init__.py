"""Plan the training of PyTorch modules, and split them as a plan says.

Nothing else here imports PyTorch. The exports are listed in `__init__.pyi`, and each is imported
when it is first used.
"""

from typing import Any

from ..core import MissingExtraError, lazy_exports

_exported, __dir__, __all__ = lazy_exports(__name__)


def __getattr__(name: str) -> Any:
    try:
        return _exported(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingExtraError("torch", "torch") from None
