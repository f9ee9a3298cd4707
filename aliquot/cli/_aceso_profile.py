"""`aliquot aceso profile | accuracy`: databases in Aceso's format from our cost model, and how well
its own predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import InputError
from ._bench_aceso import PublishedTables, accuracy_rows
from ._devices import use_host_only
from ._groups import takes_groups
from ._model_options import SeqLen, Settings
from ._options import DescribedCluster, Json, ProfilesOfAny, read_cluster, read_settings
from ._session import Session, session

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..interop.aceso import GPTShape
    from ..zoo import ModelConfig

_FAMILIES = ("gpt",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DatabaseOptions:
    """The options that say what a database is about and where it is written."""

    model: Annotated[
        str, typer.Argument(help="A GPT of the zoo, such as gpt-1.3b.", show_default=False)
    ]
    cluster: DescribedCluster
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="A new folder for the CSV files.", show_default=False),
    ]
    micro_batch_sizes: Annotated[
        str, typer.Option(help="Samples of a micro-batch on each rank.")
    ] = "1,2,4,8"
    seq_len: SeqLen = None
    settings: Settings = None


@takes_groups
def profile(
    options: _DatabaseOptions,
    size: Annotated[
        str | None,
        typer.Option(help="How the files name the size; by default as the model, such as 1_3B."),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use what this database holds; see aliquot profile run."),
    ] = None,
    profiles_of_any: ProfilesOfAny = False,
    as_json: Json = False,
) -> None:
    """Write a database of a model in Aceso's format: operators, collectives and transfers, as our
    cost model prices them, or as they were measured.
    """
    with session(as_json) as say:
        use_host_only()
        _write(options, size, profiles, profiles_of_any, say)


@takes_groups
def export(
    database: Annotated[
        Path, typer.Argument(metavar="DATABASE", help="A profile database.", show_default=False)
    ],
    options: _DatabaseOptions,
    profiles_of_any: ProfilesOfAny = False,
    as_json: Json = False,
) -> None:
    """Write what was measured as a database in Aceso's format, for a model of the zoo."""
    with session(as_json) as say:
        if options.cluster != "detect":
            use_host_only()
        _write(options, None, database, profiles_of_any, say)


def _write(
    options: _DatabaseOptions,
    size: str | None,
    profiles: Path | None,
    profiles_of_any: bool,
    say: Session,
) -> None:
    """See `profile`."""
    where, out = read_cluster(options.cluster), options.out
    batches = _read_batches(options.micro_batch_sizes)
    from ..interop.aceso import gpt_database, write_database

    config, shape = _gpt_shape(options, where)
    if profiles is not None:
        from .._profiles import with_profiles

        where = with_profiles(where, profiles, of_any=profiles_of_any)
    named = size or config.name.partition("-")[2].replace(".", "_").upper()
    content = gpt_database(shape, where, micro_batches=batches)
    write_database(out, f"gpt_{named}", content)
    degrees = sorted({tensor for _, tensor, _ in content.operators})
    source = getattr(where.measured, "source", "")
    basis = f"measured: {source}" if source else "modelled: nothing of it was measured"
    say.show(
        f"written: {out}, gpt_{named} for micro-batches {batches} and tensor degrees {degrees}"
        f" ({basis})"
    )
    known = f"--model gpt --size {named} --num-layers {config.num_layers}"
    say.show(
        f"Search it: aliquot aceso search --database {out} {known} --nodes {where.num_hosts} "
        f"--gpus-per-node {where.devices_per_host} --global-batch 512 --memory-limit-mb 28000 "
        f"--micro-batch-sizes {','.join(map(str, batches))}"
    )
    answer = {"database": str(out), "model": f"gpt_{named}", "num_layers": config.num_layers}
    say.finish(
        {**answer, "micro_batches": batches, "tensor_degrees": degrees, "profiles": source or None}
    )


def _read_batches(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise InputError(
            f"--micro-batch-sizes {text!r} must be numbers of at least 1, such as 1,2,4,8."
        )
    return sizes


def _gpt_shape(options: _DatabaseOptions, where: Cluster) -> tuple[ModelConfig, GPTShape]:
    from ..interop.aceso import GPTShape
    from ..zoo import ModelConfig, configure

    overrides: dict[str, Any] = read_settings(options.settings or [])
    if options.seq_len is not None:
        overrides["seq_len"] = str(options.seq_len)
    config = configure(options.model, **overrides)
    if not isinstance(config, ModelConfig) or config.family not in _FAMILIES:
        raise InputError(
            f"{options.model} is no GPT: Aceso names the operators of its own models, of which this"
            " command writes those of GPTs (gpt-..., scale-layer-...). Plan other models with"
            " aliquot plan."
        )
    device = where.device
    dtype = "float16" if device.peak("float16") > device.peak("bfloat16") else "bfloat16"
    shape = GPTShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        ffn_size=config.ffn_size,
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
        max_positions=config.seq_len,
        dtype=dtype,
    )
    return config, shape


def accuracy(
    published: Annotated[
        Path,
        typer.Option(
            "--published", metavar="DIR", help="CSV files of the figures of Aceso's artifact."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Tabulate how well Aceso's performance model predicts time and memory, beside what was
    measured.
    """
    from ..report import columns

    with session(as_json) as say:
        rows = accuracy_rows(PublishedTables(published))
        if not rows:
            raise InputError(
                f"{published} has no predicted and measured times (perf_model_time_large_*.csv)."
                " Give the folder of the artifact's figures."
            )
        shown = [
            tuple(f"{v:,.4g}" if isinstance(v, float) else str(v or "") for v in row.values())
            for row in rows
        ]
        say.show(
            columns(
                "Aceso's performance model", tuple(rows[0]), shown, right=range(1, len(rows[0]))
            )
        )
        say.show(
            "Iteration time, and memory of the first stage with what the allocator reserves, as"
            " published."
        )
        say.finish({"rows": rows})
