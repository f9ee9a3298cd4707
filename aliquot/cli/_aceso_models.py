"""Models of the zoo as Aceso names them: family, size, shape and operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core import InputError

if TYPE_CHECKING:
    from ..graph import Graph
    from ..interop.aceso import OperatorMap
    from ..zoo import AbstractConfig

# By family of the zoo.
_FAMILIES = {"gpt": "gpt", "t5": "t5", "wide-resnet": "resnet"}


def aceso_family(config: AbstractConfig) -> str:
    """Aceso's name of a model's family. Raises `InputError` for other models."""
    if config.family not in _FAMILIES:
        raise InputError(
            f"{config.name} is no GPT, T5 or Wide-ResNet: Aceso names the operators of its own"
            " models, and this command knows those of GPTs (gpt-..., scale-layer-...), T5s"
            " (t5-...) and Wide-ResNets (wide-resnet-...). Plan other models with aliquot plan."
        )
    return _FAMILIES[config.family]


def aceso_chain(config: AbstractConfig) -> Mapping[str, Any]:
    """Aceso's chain of a model's family, as `chains.toml` describes it."""
    from ..interop.aceso import built_in_chains

    described: Mapping[str, Any] = built_in_chains()[aceso_family(config)]
    return described


def aceso_names(config: AbstractConfig) -> list[str]:
    """Names of the operators of Aceso's chain of a model, in order."""
    from ..interop.aceso import make_chain

    return [o.name for o in make_chain(aceso_chain(config), aceso_settings(config)).operators]


def aceso_operators(graph: Graph, config: AbstractConfig) -> OperatorMap:
    """The operator of the chain that each operator of a captured model belongs to."""
    from ..interop.aceso import map_operators

    return map_operators(graph, aceso_names(config), aceso_chain(config))


def aceso_settings(config: AbstractConfig) -> dict[str, Any]:
    """The model's shape as Aceso's runtime reads it."""
    shape: Any = config
    sizes = {key: getattr(shape, name) for key, name in aceso_chain(config)["settings"].items()}
    if aceso_family(config) == "resnet":
        return sizes | {"num_layers": list(shape.section_lengths)}
    if "kv_channels" in sizes:
        sizes["kv_channels"] = shape.head_dim
    return {**sizes, "max_position_embeddings": shape.seq_len}


def aceso_size(config: AbstractConfig) -> str:
    """The size of a model as Aceso's files name it, such as `1_3B`."""
    if config.name.startswith("scale-layer"):
        return "scale-layer"
    return config.name.removeprefix(f"{config.family}-").replace(".", "_").upper()
