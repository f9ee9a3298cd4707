"""Options that shape a model of the zoo, alike in all verbs that plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ..core import InputError, parse_bytes, shortened
from ._groups import option
from ._options import read_settings

if TYPE_CHECKING:
    from ._model import ZooOptions

SeqLen = Annotated[int | None, option("Tokens in a sequence; short for --set seq_len=N.")]
Dtype = Annotated[
    str | None,
    option(
        "float32, bf16 (bf16-master: parameters and gradients, too, beside a float32 copy that the"
        " optimizer updates), fp8 (linear layers multiply in 8 bits, scaled by the last step's"
        " maxima; fp8-tensor and fp8-rows: by their own, of arrays or of rows), float16 or float64;"
        " by default bf16, or float16 where that is faster."
    ),
]
Settings = Annotated[
    list[str] | None,
    option(
        "Override a model setting, such as seq_len=4096, or give an argument to a factory;"
        " repeatable.",
        names="--set",
        metavar="NAME=VALUE",
    ),
]
MemoryLimit = Annotated[
    str | None,
    option(
        "Memory that a plan may use on each device, such as 40GiB; by default what its runtime"
        " leaves to programs.",
        metavar="SIZE",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of all verbs that make a model of the zoo."""

    title: ClassVar[str] = "Model"

    global_batch: int | None = option(
        "Sequences in a step, over all devices. A factory is told if it has an argument"
        " global_batch."
    )
    seq_len: SeqLen = None
    dtype: Dtype = None
    recompute: str | None = option(
        "What layers compute again in the backward pass: none, fused, minimal, narrow, save_qkv,"
        " save_attention, block, or auto, the fastest of these; block:2 is for every"
        " second layer. By default auto; block in verbs that do not search for a plan."
    )
    attention: str | None = option(
        "auto, fused or plain. Fused is the kernel of the device's library: cuDNN's on GPUs from"
        " Ampere on, splash attention on TPUs. By default auto: fused where that is possible."
    )
    scan: bool = option("Loop over stacked layers instead of writing them out.", False)
    settings: Settings = None
    tokens_per_step: int | None = option(
        "Tokens of the whole batch, where package.module:factory makes one that hides them.", min=1
    )

    def read(self, update: Mapping[str, Any] | None = None) -> ZooOptions:
        """The options with all settings by name.

        Args:
            update: arguments of the optimizer; see `OptimizerOptions` and `RateOptions`.

        Raises:
            InputError: Any of them cannot be read, or a size is given twice.
        """
        from ._model import ZooOptions

        if self.global_batch is not None and self.global_batch < 1:
            raise InputError(f"--global-batch must be at least 1, got {self.global_batch}.")
        overrides = read_settings(self.settings or [])
        if self.seq_len is not None:
            if "seq_len" in overrides:
                raise InputError(
                    "--seq-len and --set seq_len=... say the same thing; leave one out."
                )
            overrides["seq_len"] = str(self.seq_len)
        return ZooOptions(
            global_batch=self.global_batch,
            dtype=self.dtype,
            recompute=self.recompute,
            attention=self.attention,
            scan=self.scan,
            overrides=overrides,
            update=update or {},
            tokens_per_step=self.tokens_per_step,
        )


def read_memory_limit(text: str | None) -> float | None:
    """Bytes from text such as `40GiB`.

    Raises:
        InputError: It is no size, has no unit, or is nothing.
    """
    if text is None:
        return None
    if text.strip().replace(".", "", 1).isdecimal() and float(text) > 0:
        raise InputError(
            f"--memory-limit {shortened(text, 60)} has no unit: write {shortened(text, 20)}GiB, or"
            f" {shortened(text, 20)}GB (10**9 bytes)."
        )
    try:
        limit = parse_bytes(text)
    except InputError as error:
        raise InputError(f"--memory-limit: {error}") from None
    if limit <= 0:
        raise InputError(f"--memory-limit must be positive, got {text}.")
    return float(limit)
