"""`aliquot models`: the models that can be named."""

from __future__ import annotations

from typing import Any

from ..core import format_flops
from ._options import Json
from ._session import session


def models(as_json: Json = False) -> None:
    """List the models of the zoo with their sizes."""
    with session(as_json) as say:
        from ..report import columns
        from ..zoo import MODELS

        entries = [_model(name) for name in MODELS]
        rows = [
            (
                row["name"],
                _both_sides(row["num_layers"], row["target_len"] and row["num_layers"]),
                str(row["width"]),
                _both_sides(row["num_experts"]),
                _both_sides(row["seq_len"], row["target_len"]),
                _both_sides(row["vocab_size"]),
                format_flops(row["flops_per_example"]),
                row["examples"],
            )
            for row in entries
        ]
        header = ("model", "layers", "width", "MoE", "tokens", "vocab", "FLOPs each", "examples")
        say.show(
            columns(
                "Models of the zoo, by family and size",
                header,
                rows,
                right=(1, 2, 3, 4, 5, 6),
                narrow=True,
            )
        )
        say.show("MoE: experts in a layer. 24+24: of the encoder and of the decoder. FLOPs each:")
        say.show("operations to train on one example, forward and backward. Change a size with")
        say.show("--set NAME=VALUE. Your own model: package.module:factory.")
        say.finish({"models": entries})


def _model(name: str) -> dict[str, Any]:
    from ..zoo import MODELS

    config: Any = MODELS[name]
    return {
        "name": name,
        "family": config.family,
        "num_layers": config.num_layers,
        "width": getattr(config, "hidden_size", None) or getattr(config, "num_channels", None),
        "num_experts": getattr(config, "num_experts", None),
        "seq_len": getattr(config, "seq_len", None),
        "target_len": getattr(config, "target_len", None),
        "vocab_size": getattr(config, "vocab_size", None),
        "examples": config.examples,
        "flops_per_example": config.flops_per_example,
    }


def _both_sides(size: int | None, of_decoder: int | None = None) -> str:
    """A size, and that of the decoder if there is one."""
    return "+".join(str(each) for each in (size, of_decoder) if each is not None)
