"""Models to plan, train and measure: GPT, BERT, Llama, MoE, T5, Wide-ResNet and U-Net of the usual
sizes in Flax NNX, and text in the batches that they take.

Importing this package needs neither Flax nor JAX; calling `build` does.
"""

from ._config import ROUTINGS as ROUTINGS
from ._config import AbstractConfig as AbstractConfig
from ._config import AbstractTextConfig as AbstractTextConfig
from ._config import ModelConfig as ModelConfig
from ._config import MoEConfig as MoEConfig
from ._data import BYTE_VOCABULARY as BYTE_VOCABULARY
from ._data import images_for as images_for
from ._data import text_for as text_for
from ._data import tokens_of as tokens_of
from ._fused import AttentionChoice as AttentionChoice
from ._fused import choose_attention as choose_attention
from ._hugging_face import from_config as from_config
from ._image_config import WideResNetConfig as WideResNetConfig
from ._inference import Inference as Inference
from ._inference import build_inference as build_inference
from ._mixtral_config import MixtralConfig as MixtralConfig
from ._precision import precision_name as precision_name
from ._recompute import recompute_faults as recompute_faults
from ._schedule import DECAYS as DECAYS
from ._schedule import learning_rate as learning_rate
from ._settings import settings_faults as settings_faults
from ._sizes import MODELS as MODELS
from ._sizes import as_fields as as_fields
from ._sizes import configure as configure
from ._sizes import from_fields as from_fields
from ._sizes import other_architecture as other_architecture
from ._sizes import typed_setting as typed_setting
from ._step import LayersWorkload as LayersWorkload
from ._step import Workload as Workload
from ._step import build as build
from ._step import build_layers as build_layers
from ._t5_config import T5Config as T5Config
from ._unet_config import NUM_TIMES as NUM_TIMES
from ._unet_config import UNetConfig as UNetConfig
from ._weights import is_hugging_face as is_hugging_face
from ._weights import read_weights as read_weights
