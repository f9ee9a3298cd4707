"""Models to plan, train and measure: GPT and Llama of the usual sizes in Flax NNX, and text to train them on.

Importing this needs neither Flax nor JAX; `build` does.
"""

from ._config import MODELS as MODELS
from ._config import ModelConfig as ModelConfig
from ._config import configure as configure
from ._data import BYTE_VOCABULARY as BYTE_VOCABULARY
from ._data import ByteData as ByteData
from ._step import Workload as Workload
from ._step import build as build
