"""Plan the training of PyTorch modules, and split them as a plan says.

Needs PyTorch (`pip install torch`), which nothing else here imports.
"""

from ..core import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError:
    raise MissingExtraError("torch", "torch") from None

from ._apply import Applied as Applied
from ._apply import apply as apply
from ._operators import operator as operator
from ._plan import TorchStep as TorchStep
from ._plan import plan as plan
from ._plan import training_step as training_step
