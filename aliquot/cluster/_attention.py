"""Fused attention: the library's kernel for each device, what it can compute, and how fast."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ..core import ClusterError
from ._device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A kernel that computes attention without writing the scores to memory.

    Of the peak, `share` is reached by the arithmetic of the scores that a mask keeps, where there
    are many of them. Queries are computed in blocks, and few blocks leave processors idle. At the
    edge of a mask, scores are computed that do not count.

    Args:
        kernel: `"cudnn"` or `"splash"`.
        title: What it is, for readers.
        dtypes: In which it computes.
        head_sizes: A number that divides the size of every head, and the largest size.
        tokens: A number that divides the length of every sequence.
        share: Reached share of the device's peak in a forward pass, 0 to 1.
        backward: Reached share in a backward pass, as a part of `share`.
        rows: Queries on a device, of all its heads and examples, with which half of `share` is
            reached.
        keys: Scores of each query that are computed in vain.
        source: Where the figures come from.

    Raises:
        ClusterError: A value out of its range.
    """

    kernel: str
    title: str
    dtypes: tuple[str, ...]
    head_sizes: tuple[int, int]
    tokens: int = 1
    share: float
    backward: float = 0.85
    rows: float = 0.0
    keys: float = 0.0
    source: str

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be above 0 and at most 1"
            for name in ("share", "backward")
            if not 0 < getattr(self, name) <= 1
        ]
        for name in ("rows", "keys"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                problems.append(f"{name} must not be negative")
        if problems:
            raise ClusterError(problems, asked=f"attention by {self.kernel}")

    def lacks(self, dtype: str, head_size: int, lengths: Collection[int]) -> list[str]:
        """Reasons why it cannot compute attention; empty if it can.

        Args:
            dtype: of queries, keys and values.
            lengths: of the sequences of queries and of keys.
        """
        multiple, largest = self.head_sizes
        reasons = []
        if dtype not in self.dtypes:
            reasons.append(
                f"{self.title} computes in {' or '.join(self.dtypes)}, and the model in {dtype}"
            )
        if head_size % multiple or head_size > largest:
            reasons.append(
                f"{self.title} takes heads of up to {largest} elements, in multiples of"
                f" {multiple}, and those of the model have {head_size}"
            )
        odd = sorted({length for length in lengths if length % self.tokens})
        if odd:
            reasons.append(
                f"{self.title} takes sequences of a multiple of {self.tokens} tokens, and those of"
                f" the model have {' and '.join(map(str, odd))}"
            )
        return reasons

    def seconds_per_flop(self, peak_flops_per_s: float, *, is_backward: bool) -> float:
        """Time of one operation in a large kernel."""
        share = self.share * (self.backward if is_backward else 1.0)
        return 1.0 / (peak_flops_per_s * share)


_FITTED = "fitted to half of the publicly reported training steps of this device (dense, bfloat16)"
_BY_ROWS = (
    "rows: measured by SimuMax (configs/system, 2026), 4 to 128 heads of 4,096 tokens; keys: half a"
    " block of 128"
)
_CUDNN = (
    "fitted to 12 forward kernels of cuDNN with heads of 128, causal and not, 512 to 16,384 tokens"
    " (J. Shah et al., FlashAttention-3, 2024, figure 5)"
)
# Share, rows, and origin. Shares are those of many rows of many keys; the fitted ones are larger by
# 11 to 23 % than the mean share in steps of 2,048 tokens, where 1,024 keys count. Those of Hopper
# and Blackwell are cuDNN's: FlashAttention 2, which frameworks of before 2025 run, uses none of
# what is new in them.
_GPU_FIGURES = {
    "A100-40GB": (0.37, 24_000, f"{_FITTED}; {_BY_ROWS}"),
    "A100-80GB": (0.37, 24_000, f"{_FITTED}; {_BY_ROWS}"),
    "A100-PCIe": (0.37, 24_000, "as A100-40GB"),
    "H100": (0.62, 34_000, f"{_CUDNN}; rows: two blocks of 128 for each processor, assumed"),
    **dict.fromkeys(("H100-96GB", "H200"), (0.62, 34_000, "as H100")),
    "B200": (0.55, 78_000, _BY_ROWS),
    **dict.fromkeys(("B300", "GB200", "GB300"), (0.55, 78_000, "as B200, assumed")),
}
_OTHER_GPU = (0.37, 24_000, "as A100, assumed")
_TPU_FIGURES = {
    "v5e": (0.39, _FITTED),
    "v6e": (0.38, _FITTED),
}
_OTHER_TPU = (0.40, "as v5e and v6e, assumed")
# cuDNN's largest head, on Hopper and Blackwell and before (as JAX checks it).
_LARGEST_HEAD, _LARGEST_BEFORE = 256, 128
_LARGE_HEADS = frozenset({"H100", "H100-96GB", "H200", "B200", "B300", "GB200", "GB300"})
# GPUs of another maker than NVIDIA.
_WITHOUT_CUDNN = frozenset({"MI300X"})
_LARGEST_ON_TPU = 256


def attention_of(device: Device | None) -> Attention | None:
    """The kernel of a device; None without a device, and if no library has one: for CPUs, Trainium,
    and GPUs before Ampere or of AMD.

    >>> from aliquot.cluster import DEVICES
    >>> [a.kernel if (a := attention_of(DEVICES[name])) else "" for name in ("H100", "v5e", "cpu")]
    ['cudnn', 'splash', '']
    """
    if device is None:
        return None
    # Ampere is the first generation of GPUs with units for bfloat16.
    has_cudnn = device.kind == "gpu" and device.name not in _WITHOUT_CUDNN
    if has_cudnn and device.peak("bfloat16") > device.peak("float32"):
        share, rows, source = _GPU_FIGURES.get(device.name, _OTHER_GPU)
        largest = _LARGEST_HEAD if device.name in _LARGE_HEADS else _LARGEST_BEFORE
        return Attention(
            kernel="cudnn",
            title="fused attention of cuDNN",
            dtypes=("bfloat16", "float16"),
            head_sizes=(8, largest),
            share=share,
            rows=rows,
            keys=64,
            source=source,
        )
    if device.kind == "tpu":
        share, source = _TPU_FIGURES.get(device.name, _OTHER_TPU)
        # Kernels in Pallas are counted as they are: whole blocks, one after another.
        return Attention(
            kernel="splash",
            title="splash attention in Pallas",
            dtypes=("bfloat16",),
            head_sizes=(8, _LARGEST_ON_TPU),
            tokens=128,
            share=share,
            source=source,
        )
    return None


def why_no_attention(device: Device) -> str:
    """Why a device has no kernel of `attention_of`."""
    if device.name in _WITHOUT_CUDNN:
        return (
            f"JAX itself calls none on {device.name}; AMD's own (CK, Triton) need Transformer"
            " Engine for ROCm, and a step with them takes less time and memory than is predicted"
            " here"
        )
    return (
        f"{device.name} has none, as cuDNN's is for GPUs from Ampere on, and splash attention for"
        " TPUs"
    )
