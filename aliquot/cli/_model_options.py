"""Options that shape a model of the zoo, alike in all verbs that plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..core import InputError, parse_bytes
from ._options import read_settings

if TYPE_CHECKING:
    from ._model import ZooOptions

BatchSize = Annotated[
    int | None, typer.Option("--global-batch", help="Sequences in a step, over all devices.")
]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", help="Tokens in a sequence; short for --set seq_len=N.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bf16, float16 or float64; by default bf16, or float16 where that is faster.",
    ),
]
Recompute = Annotated[
    str | None,
    typer.Option(
        "--recompute", help="none, block (the default) or, in aliquot plan, auto: the faster."
    ),
]
Scan = Annotated[
    bool, typer.Option("--scan", help="Loop over stacked layers instead of writing them out.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Override a model setting, such as seq_len=4096; repeatable.",
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help=(
            "Memory that a plan may use on each device, such as 40GiB; by default what its runtime"
            " leaves to programs."
        ),
    ),
]


def model_options(
    global_batch: int | None,
    seq_len: int | None,
    dtype: str | None,
    recompute: str | None,
    scan: bool,
    settings: list[str] | None,
    memory_limit: str | None,
) -> tuple[ZooOptions, float | None]:
    """The model's options, and the limit in bytes.

    Raises:
        InputError: Any of them cannot be read, or a size is given twice.
    """
    from ._model import ZooOptions

    if global_batch is not None and global_batch < 1:
        raise InputError(f"--global-batch must be at least 1, got {global_batch}.")
    overrides = read_settings(settings or [])
    if seq_len is not None:
        if "seq_len" in overrides:
            raise InputError("--seq-len and --set seq_len=... say the same thing; leave one out.")
        overrides["seq_len"] = str(seq_len)
    options = ZooOptions(
        global_batch=global_batch, dtype=dtype, recompute=recompute, scan=scan, overrides=overrides
    )
    return options, read_memory_limit(memory_limit)


def read_memory_limit(text: str | None) -> float | None:
    """Bytes from text such as `40GiB`.

    Raises:
        InputError: It is no size, or nothing.
    """
    if text is None:
        return None
    try:
        limit = parse_bytes(text)
    except InputError as error:
        raise InputError(f"--memory-limit: {error}") from None
    if limit <= 0:
        raise InputError(f"--memory-limit must be positive, got {text}.")
    return float(limit)
