"""`aliquot profile export`: what was measured as a database in Aceso's format."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import InputError
from ._aceso_models import aceso_family, aceso_settings, aceso_size
from ._devices import use_host_only
from ._groups import argument, option
from ._measuring import DatabaseFile
from ._model_options import SeqLen, Settings
from ._options import (
    DescribedCluster,
    Json,
    NetworkGbps,
    ProfilesOfAny,
    read_cluster,
    read_settings,
)
from ._session import session

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..interop.aceso import ModelShape
    from ..zoo import AbstractConfig

_USUAL_BATCHES = {"resnet": "16,32,48,64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _DatabaseOptions:
    """The options that say what a database is about and where it is written."""

    model: str = argument("A GPT, T5 or Wide-ResNet of the zoo, such as gpt-1.3b.")
    cluster: DescribedCluster
    out: Path = option("A new folder for the CSV files.", ..., metavar="DIR")
    micro_batch_sizes: str | None = option(
        "Samples of a micro-batch on each rank; by default 1,2,4,8, and 16,32,48,64 for"
        " Wide-ResNets."
    )
    network_gbps: NetworkGbps = None
    seq_len: SeqLen = None
    settings: Settings = None


def export(
    *,
    database: DatabaseFile,
    options: _DatabaseOptions,
    profiles_of_any: ProfilesOfAny = False,
    as_json: Json = False,
) -> None:
    """Write what was measured as a database in Aceso's format, for a model of the zoo: operators,
    collectives and transfers. What was not measured is priced by our cost model.
    """
    with session(as_json) as say:
        if options.cluster != "detect":
            use_host_only()
        from .._profiles import with_profiles
        from ..interop.aceso import built_in_chains, modelled_database, write_database
        from ..zoo import configure

        where, out = read_cluster(options.cluster, options.network_gbps), options.out
        overrides: dict[str, Any] = read_settings(options.settings or [])
        if options.seq_len is not None:
            overrides["seq_len"] = str(options.seq_len)
        config = configure(options.model, **overrides)
        family = aceso_family(config)
        text = options.micro_batch_sizes or _USUAL_BATCHES.get(family, "1,2,4,8")
        try:
            batches = sorted({int(part) for part in text.split(",")})
        except ValueError:
            batches = []
        if not batches or batches[0] < 1:
            raise InputError(
                f"--micro-batch-sizes {text!r} must be numbers of at least 1, such as 1,2,4,8."
            )
        where = with_profiles(where, database, of_any=profiles_of_any)
        named = aceso_size(config)
        content = modelled_database(_shape(config, where), where, micro_batches=batches)
        write_database(out, f"{family}_{named}", content)
        degrees = sorted({tensor for _, tensor, _ in content.operators})
        source = getattr(where.measured, "source", "")
        say.show(
            f"written: {out}, {family}_{named} for micro-batches {batches} and tensor degrees"
            f" {degrees} (measured: {source})"
        )
        num_layers = aceso_settings(config)["num_layers"]
        known = f"--model {family} --size {named}"
        if built_in_chains()[family]["sizes"].get(named, {}).get("num_layers") != num_layers:
            shown = num_layers if isinstance(num_layers, list) else [num_layers]
            known += f" --num-layers {','.join(map(str, shown))}"
        say.show(
            f"Search it: aliquot aceso search --database {out} {known} --nodes {where.num_hosts} "
            f"--gpus-per-node {where.devices_per_host} --global-batch {64 * batches[-1]} "
            f"--memory-limit-mb 28000 --micro-batch-sizes {','.join(map(str, batches))}"
        )
        say.finish(
            {
                "database": str(out),
                "model": f"{family}_{named}",
                "num_layers": num_layers,
                "micro_batches": batches,
                "tensor_degrees": degrees,
                "profiles": source,
            }
        )


def _shape(config: AbstractConfig, where: Cluster) -> ModelShape:
    """The sizes of a model, in the dtype that Aceso's runtime trains it in."""
    from ..interop.aceso import BlockShape, ResNetShape, TransformerShape
    from ..zoo import ModelConfig, T5Config, WideResNetConfig

    if isinstance(config, WideResNetConfig):
        blocks = [
            BlockShape(
                channels_in=b.channels_in,
                channels=b.channels,
                wide_channels=b.wide_channels,
                channels_out=b.channels_out,
                size_in=b.size_in,
                size_out=b.size_out,
                projects=b.projects,
            )
            for b in config.bottlenecks()
        ]
        ends = list(itertools.accumulate(config.section_lengths))
        return ResNetShape(
            sections=tuple(tuple(blocks[a:b]) for a, b in itertools.pairwise([0, *ends])),
            channels=config.num_channels,
            image_size=config.image_size,
            num_classes=config.num_classes,
            dtype="float32",
        )
    assert isinstance(config, ModelConfig | T5Config)
    device = where.device
    return TransformerShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        ffn_size=config.ffn_size,
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
        max_positions=config.seq_len,
        dtype="float16" if device.peak("float16") > device.peak("bfloat16") else "bfloat16",
        head_size=config.head_dim,
        target_len=config.target_len if isinstance(config, T5Config) else 0,
    )
