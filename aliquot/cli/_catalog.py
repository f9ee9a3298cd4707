"""`aliquot models`: the models that can be named."""

from __future__ import annotations

from typing import Any

from ..core import format_flops
from ._options import Json
from ._session import session


def models(as_json: Json = False) -> None:
    """List the models of the zoo with their sizes."""
    with session(as_json) as say:
        from ..report import Column, table
        from ..zoo import MODELS

        entries = []
        for name in MODELS:
            config: Any = MODELS[name]
            width = getattr(config, "hidden_size", None) or getattr(config, "num_channels", None)
            entry = {
                "name": name,
                "family": config.family,
                "num_layers": config.num_layers,
                "width": width,
                "num_experts": getattr(config, "num_experts", None),
                "seq_len": getattr(config, "seq_len", None),
                "target_len": getattr(config, "target_len", None),
                "vocab_size": getattr(config, "vocab_size", None),
                "examples": config.examples,
                "flops_per_example": config.flops_per_example,
            }
            entries.append(entry)
        say.show(
            table(
                "Models of the zoo, by family and size",
                entries,
                Column("model", "name"),
                Column("layers", _layers, number=True),
                Column("width", "width", number=True),
                Column("MoE", "num_experts", number=True),
                Column("tokens", _tokens, number=True),
                Column("vocab", "vocab_size", number=True),
                Column("FLOPs each", "flops_per_example", format_flops, number=True),
                Column("examples", "examples"),
                narrow=True,
            )
        )
        say.show("MoE: experts in a layer. 24+24: of the encoder and of the decoder. FLOPs each:")
        say.show("operations to train on one example, forward and backward. Change a size with")
        say.show("--set NAME=VALUE. Your own model: package.module:factory.")
        say.finish({"models": entries})


def _layers(row: dict[str, Any]) -> str:
    """Of the encoder and of the decoder, if there is one."""
    return "{0}+{0}".format(row["num_layers"]) if row["target_len"] else str(row["num_layers"])


def _tokens(row: dict[str, Any]) -> str:
    return "+".join(str(row[name]) for name in ("seq_len", "target_len") if row[name] is not None)
