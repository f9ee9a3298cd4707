"""Table of the backends' compilers and what they do with a plan: the only place where backends
differ.

A plan is made for a target, and these facts change what it costs or whether it fits. Code above
asks the table; it never asks which backend it is on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ..core import ClusterError
from ._attention import Attention, attention_of
from ._calibration import Products, measured_figures
from ._device import KINDS, Device


class SumCollective(StrEnum):
    """The collective that finishes a partial sum whose result is split."""

    REDUCE_SCATTER = "reduce-scatter"
    # Of the whole array: each device then slices its piece off.
    ALL_REDUCE = "all-reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How one compiler implements plans, and the share of each peak that its programs reach.

    Args:
        kind: The device kind it compiles for.
        reduce_scatter: Whether the compiler makes a reduce-scatter of a partial sum that becomes
            split. Otherwise it makes an all-reduce and a local slice, except for the sums of
            products, which the runtime reduce-scatters itself.
        merges_partial_sums: Whether the sum of several partial products is reduced once; otherwise
            each product is reduced by itself.
        widened_dtypes: Dtypes whose collectives run in float32.
        float32_product_dtype: Dtype in which float32 products run at default precision, if the
            device has a figure for it.
        repeats_cheap_work: Whether each kernel recomputes the elementwise results that it needs,
            where that moves fewer bytes than storing them.
        held_product_bytes: Bytes that a float32 element takes in memory in arrays that only
            products read, and in parameters that are cast once before loops of products; 0 if
            operands are held as they are and cast where they are read.
        zeroes_early: Whether the buffers of backward loops' results are zeroed, and so held, before
            the forward loop's results are used.
        zeroes_stacks: Whether the stacks that loops fill row by row are zeroed beforehand. False
            too where no compiled program was looked at.
        copies_rows: Whether products in loops, as calls of a library, read copies of the rows of
            stacks. For GPUs the compiler of JAX 0.10 copies them; that of JAX 0.12 reads rows
            where they lie, so that such loops are priced somewhat too slow with it. False too
            where no compiled program was looked at.
        groups_products: Whether a grouped product (`ragged_dot`) multiplies each row by the matrix
            of its group alone; otherwise by those of all groups.
        gathered_ahead: Share of the parameters that are gathered before anything else happens,
            outside of loops, 0 to 1.
        gathers_leading_dim: Whether arrays are gathered along their first dim alone: where another
            dim is split, the gather reads a transposed copy and writes another.
        combined_bytes: Threshold up to which equal collectives are combined, in bytes that they
            leave on a device; gradients then wait for each other. 0 if none are combined.
        library_convolves: Whether convolutions are calls of a library. It reads kernels with their
            output features first, so that others are copied into this order, and reverses them by
            itself.
        maxpool_gradient_stores_indices: Whether gradients of maxima over windows are scattered by
            positions found beforehand.
        reads_host_memory: Whether kernels outside of loops read arrays in host memory themselves,
            without a copy in device memory.
        hides_latency: Whether the scheduler of operators prefers work beside collectives to low
            memory: products that only the update needs are then deferred. Otherwise only those are
            whose results take more memory than their operands free.
        slow_result_bytes: Bytes of a bfloat16 element where several kernels need the result of a
            slow function, such as tanh: it is stored, in float32 if no kernels compute in bfloat16.
            0 if each kernel computes it again.
        overlaps_all_reduces: Whether other work can run beside an all-reduce; otherwise only beside
            other collectives.
        overlaps_transfers: Whether devices compute while they send and receive what crosses between
            stages of a pipeline.
        copies_inner_dims: Whether a gather or reduce-scatter along another dim than the first
            copies its operand and its result, so that this dim comes first.
        overlap_fraction: Share of the time of collectives that sum gradients or gather parameters
            that can hide behind compute, 0 to 1.
        gradient_overlap_between_hosts: The most of that share for sums of gradients over several
            hosts, 0 to 1.
        activation_overlap: The same share of collectives that sum or gather activations, as of
            tensor and sequence parallelism.
        matmul_efficiency: Reached share of the peak in large products, 0 to 1.
        float32_product_share: Share of `matmul_efficiency` that float32 products reach in the
            narrower type in which they run, 0 to 1: they read twice the bytes.
        sustained_share: Share of the speed of single products that the products of a whole step
            sustain, 0 to 1: clocks fall under load, and layouts differ.
        bandwidth_efficiency: Reached share of memory bandwidth in elementwise code, 0 to 1.
        collective_efficiency: Reached share of link bandwidth in large collectives, 0 to 1.
        all_to_all_efficiency: The same in large all-to-alls, 0 to 1.
        scatter_gather_share: Share of `collective_efficiency` that reduce-scatters and all-gathers
            reach, 0 to 1: below 1 where an all-reduce costs less than one of each.
        kernel_overhead_s: Least time that any operator takes.
        collective_overhead_s: Time to start any collective, on top of its links' latencies.
        usable_memory_fraction: Share of device memory that a program may plan with, 0 to 1.
        compact_above: Share of device memory above which the compiler orders operators so that they
            take less memory, and computes some of them again, 0 to 1; 1 if it never does.
        memory_advice: What to set so that the program really gets that share, or empty.
        source: Where the figures come from.
        products: How much slower products of other shapes are than large ones.
        collective_shares: Pairs of a group size and the `collective_efficiency` among at least so
            many devices of one host, smallest size first; empty where it was not measured by size.
        attention: The kernel of fused attention; None if the device has none.

    Raises:
        ClusterError: A share outside its range, or a negative time.
    """

    kind: str
    reduce_scatter: bool
    merges_partial_sums: bool
    widened_dtypes: tuple[str, ...]
    float32_product_dtype: str
    repeats_cheap_work: bool
    held_product_bytes: int
    zeroes_early: bool
    zeroes_stacks: bool
    copies_rows: bool
    groups_products: bool
    gathered_ahead: float
    gathers_leading_dim: bool
    combined_bytes: int
    library_convolves: bool
    maxpool_gradient_stores_indices: bool
    reads_host_memory: bool
    hides_latency: bool
    slow_result_bytes: int
    overlaps_all_reduces: bool
    overlaps_transfers: bool
    copies_inner_dims: bool
    overlap_fraction: float
    gradient_overlap_between_hosts: float
    activation_overlap: float
    matmul_efficiency: float
    bandwidth_efficiency: float
    collective_efficiency: float
    all_to_all_efficiency: float
    scatter_gather_share: float
    kernel_overhead_s: float
    collective_overhead_s: float
    usable_memory_fraction: float
    compact_above: float
    memory_advice: str
    source: str
    products: Products = Products()
    float32_product_share: float = 1.0
    sustained_share: float = 1.0
    collective_shares: tuple[tuple[int, float], ...] = ()
    attention: Attention | None = None

    def __post_init__(self) -> None:
        shares = (
            "matmul_efficiency",
            "float32_product_share",
            "sustained_share",
            "bandwidth_efficiency",
            "collective_efficiency",
            "all_to_all_efficiency",
            "scatter_gather_share",
            "usable_memory_fraction",
            "compact_above",
        )
        problems = [
            f"{name} must be above 0 and at most 1"
            for name in shares
            if not 0 < getattr(self, name) <= 1
        ]
        for name in (
            "overlap_fraction",
            "gradient_overlap_between_hosts",
            "activation_overlap",
            "gathered_ahead",
        ):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"{name} must be from 0 to 1")
        if self.combined_bytes < 0:
            problems.append("combined_bytes must not be negative")
        for name in ("kernel_overhead_s", "collective_overhead_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                problems.append(f"{name} must not be negative")
        if self.kind not in KINDS:
            problems.append(f"kind {self.kind!r} is none of {', '.join(KINDS)}")
        if problems:
            raise ClusterError(problems, asked=f"target {self.kind!r}")

    @property
    def sum_collective(self) -> SumCollective:
        """The collective that the compiler makes of a partial sum whose result is split."""
        return SumCollective.REDUCE_SCATTER if self.reduce_scatter else SumCollective.ALL_REDUCE

    @property
    def delays_gradients(self) -> bool:
        """True if the compiler may defer products that only the update needs."""
        return self.hides_latency or self.combined_bytes > 0

    def gradient_overlap(self, crosses_hosts: bool) -> float:
        """Share of the time of a sum of gradients that can hide behind compute."""
        if crosses_hosts:
            return min(self.overlap_fraction, self.gradient_overlap_between_hosts)
        return self.overlap_fraction

    @property
    def hides_collectives(self) -> bool:
        """True if any collective can run beside compute."""
        return self.overlap_fraction > 0 or self.activation_overlap > 0

    @property
    def rows_above_bytes(self) -> float:
        """Size from which stacks of new parameters are gathered row by row; smaller ones are
        combined with others.
        """
        return self.combined_bytes / 2 if self.gathers_leading_dim else math.inf

    @property
    def runs_latest(self) -> bool:
        """True if products run as late as their readers allow, as under a scheduler that works
        backwards from the end.
        """
        return self.hides_latency and self.overlaps_all_reduces

    def figure(self, name: str) -> float:
        """One of the figures `CALIBRATED` by its name; `attention_share` is 0 without a kernel."""
        if name.startswith("product_"):
            return float(getattr(self.products, name.removeprefix("product_")))
        if name == "attention_share":
            return 0.0 if self.attention is None else self.attention.share
        return float(getattr(self, name))

    def collective_share(self, size: int) -> float:
        """Share of link bandwidth that large collectives among `size` devices of a host reach."""
        shares = [share for least, share in self.collective_shares if least <= size]
        return shares[-1] if shares else self.collective_efficiency

    def product_flops_per_s(self, device: Device, dtype: str) -> float:
        """Speed that large products in `dtype` reach on `device`, in FLOP/s: its peak times
        `matmul_efficiency` and `sustained_share`.

        Float32 at default precision runs in the narrower type that the device offers for it, at
        `float32_product_share` of that speed.
        """
        share = self.matmul_efficiency * self.sustained_share
        narrower = self.float32_product_dtype
        if dtype == "float32" and narrower in device.peak_flops_per_s:
            dtype = narrower
            share *= self.float32_product_share if narrower != "float32" else 1.0
        return device.peak(dtype) * share

    def memory_bytes_per_s(self, device: Device) -> float:
        """Memory bandwidth that programs reach on `device`, in bytes/s."""
        return device.memory_bandwidth_bytes_per_s * self.bandwidth_efficiency

    def usable_bytes(self, device: Device) -> int:
        """Memory of `device` that a plan may fill, in bytes."""
        return int(device.memory_bytes * self.usable_memory_fraction)


# Two virtual devices share cores, so nothing overlaps. Collectives, dtypes and remat as seen in
# programs compiled by XLA's CPU backend (JAX 0.10): no all-reduce and slice becomes a
# reduce-scatter, bfloat16 and float16 are reduced in float32, optimization barriers are dropped, a
# gather or reduce-scatter along a dim that is not the first gets that dim in front by its layout,
# with a copy on either side; loops zero their stacks, and copy rows before products read them.
# Devices of a host read each other's arrays from shared memory: up to 256 KiB a reduce-scatter and
# an all-gather take 0.9 to 1.9 times as long as an all-reduce, and are priced at 1.3 times. Shares
# and overheads: measured by benchmarks/calibrate_cpu.py on a 2-core machine, for sizes of small
# models.
_CPU = Target(
    kind="cpu",
    reduce_scatter=False,
    merges_partial_sums=False,
    widened_dtypes=("bfloat16", "float16"),
    float32_product_dtype="float32",
    repeats_cheap_work=False,
    held_product_bytes=0,
    zeroes_early=False,
    zeroes_stacks=True,
    copies_rows=True,
    groups_products=False,
    gathered_ahead=0.0,
    gathers_leading_dim=False,
    combined_bytes=0,
    library_convolves=False,
    maxpool_gradient_stores_indices=False,
    reads_host_memory=True,
    hides_latency=False,
    slow_result_bytes=0,
    overlaps_all_reduces=True,
    overlaps_transfers=False,
    copies_inner_dims=True,
    overlap_fraction=0.0,
    gradient_overlap_between_hosts=0.0,
    activation_overlap=0.0,
    matmul_efficiency=0.75,
    bandwidth_efficiency=0.8,
    collective_efficiency=0.5,
    all_to_all_efficiency=0.15,
    scatter_gather_share=0.77,
    kernel_overhead_s=2e-6,
    collective_overhead_s=50e-6,
    usable_memory_fraction=0.8,
    compact_above=1.0,
    memory_advice="",
    source=(
        "XLA CPU as of JAX 0.10: compiled programs; shares fitted by benchmarks/calibrate_steps.py"
        " and calibrate_cpu.py"
    ),
)

# Collectives and remat as in programs compiled by XLA for H100. Products: large GEMMs reach 60 to
# 75 % of the dense peak on A100 and H100, and whole transformer layers about half (D. Narayanan et
# al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021,
# section 5: 44 to 52 % end to end). Memory: STREAM-like kernels reach 80 to 90 %. Collectives:
# NCCL's own tests report about 80 % of one-way NVLink bandwidth in large all-reduces (A100: 235 of
# 300 GB/s). Overlap: reported steps on 8 to 2,048 devices take about the same time, and the median
# error is least with 90 % of ZeRO-3's collectives beside compute. Of sums of activations 40 %:
# layouts of one model with more and with less tensor parallelism are then off by the least (nine
# reported steps on B200, four on H100). Of sums of gradients over several hosts 60 %: steps of one
# micro-batch on 128 to 1,024 A100 (InternEvo) are then 2 to 12 % too fast (6 to 26 with 90 %), FSDP
# on 96 H100 (fms-fsdp) 5 and 7 % (16 and 21), but FSDP on 128 A100 22 and 27 % too slow (17 and
# 15); some of these rows are held out. Transfers between stages: Megatron-LM sends while it
# computes (D. Narayanan et al., 2021), and its reported steps are shorter than tasks and transfers
# one after the other. Launch: about 2 us within a CUDA graph, more outside. Usable memory: CUDA
# context, NCCL buffers and fragmentation take the rest; JAX by itself preallocates only 75 %.
# Loops: bytes of zeroes and of copied rows are those of programs compiled for V100, A100 and H100.
# Memory: repeated work, zeroes, transposed copies, what convolutions and maxima hold, and what
# waits, as in the buffers that XLA assigns for H100 and A100 (JAX 0.10,
# benchmarks/memory_deviceless.py; Wide-ResNet by `aliquot verify`). Combined: XLA's default
# threshold for all-reduces, all-gathers and reduce-scatters, 30 MiB. Ahead: fitted to one half of
# that benchmark's plans. Compact: XLA's default aim, 0.95 of the 80 % of memory that it is told of.
# Latency: by default it is hidden only where XLA has a model of kernels and
# collectives (`_HIDE_LATENCY`).
_GPU = Target(
    kind="gpu",
    reduce_scatter=True,
    merges_partial_sums=True,
    widened_dtypes=(),
    float32_product_dtype="tf32",
    repeats_cheap_work=True,
    held_product_bytes=0,
    zeroes_early=True,
    zeroes_stacks=True,
    copies_rows=True,
    groups_products=False,
    gathered_ahead=0.75,
    gathers_leading_dim=True,
    combined_bytes=30 * 2**20,
    library_convolves=True,
    maxpool_gradient_stores_indices=True,
    reads_host_memory=True,
    hides_latency=False,
    slow_result_bytes=4,
    overlaps_all_reduces=True,
    overlaps_transfers=True,
    copies_inner_dims=False,
    overlap_fraction=0.9,
    gradient_overlap_between_hosts=0.6,
    activation_overlap=0.4,
    matmul_efficiency=0.6,
    bandwidth_efficiency=0.8,
    collective_efficiency=0.8,
    all_to_all_efficiency=0.8,
    scatter_gather_share=1.0,
    kernel_overhead_s=3.7e-6,
    collective_overhead_s=10e-6,
    usable_memory_fraction=0.9,
    compact_above=0.76,
    memory_advice="set XLA_CLIENT_MEM_FRACTION=0.9; by default JAX preallocates only 75%",
    source=(
        "XLA GPU as of JAX 0.10: compiled programs; Megatron-LM (2021), NCCL tests; overlap:"
        " publicly reported steps"
    ),
)

# Float32 products take one bfloat16 pass at default precision (JAX documentation of
# `jax.lax.Precision`). Products: 70 % of peak, as the best published training runs reach 55 to 65 %
# of it overall (MaxText results on v5e). ICI at 90 % and asynchronous by default ("How to Scale
# Your Model", Google DeepMind, 2025). Merging of partial sums happens in the partitioner that GPUs
# use too. Memory: repeated work, and what is held for products, as in the buffers that XLA assigns
# for v5e and v5p (libtpu 0.0.42, benchmarks/memory_deviceless.py): in float32 steps, stacks of what
# products read are bfloat16, and casts of weights stand before the loops. Zeroes for backward loops
# are made right before these, after the loss. Products whose results are reduce-scattered stand
# behind all backward layers, those that are all-reduced in their layer. Sums of activations beside
# compute: as on GPUs; reported steps of TPUs with tensor parallelism are explained as well without.
_TPU = Target(
    kind="tpu",
    reduce_scatter=True,
    merges_partial_sums=True,
    widened_dtypes=(),
    float32_product_dtype="bfloat16",
    repeats_cheap_work=True,
    held_product_bytes=2,
    zeroes_early=False,
    zeroes_stacks=False,
    copies_rows=False,
    groups_products=True,
    gathered_ahead=0.0,
    gathers_leading_dim=False,
    combined_bytes=0,
    library_convolves=False,
    maxpool_gradient_stores_indices=False,
    reads_host_memory=False,
    hides_latency=True,
    slow_result_bytes=0,
    overlaps_all_reduces=False,
    overlaps_transfers=True,
    copies_inner_dims=False,
    overlap_fraction=0.9,
    gradient_overlap_between_hosts=0.9,
    activation_overlap=0.4,
    matmul_efficiency=0.7,
    bandwidth_efficiency=0.85,
    collective_efficiency=0.9,
    all_to_all_efficiency=0.9,
    scatter_gather_share=1.0,
    kernel_overhead_s=1e-6,
    collective_overhead_s=2e-6,
    usable_memory_fraction=0.95,
    compact_above=1.0,
    memory_advice="",
    source=(
        "JAX and Google Cloud TPU documentation, MaxText; XLA TPU as of JAX 0.10: compiled"
        " programs; overlap: publicly reported steps"
    ),
)

# Neuron's compiler takes programs from the partitioner that TPUs use. What it then does was not
# looked at: shares of peaks are those of TPUs, memory is counted as the program has it, no
# collective is hidden but for sums of gradients and gathers of parameters, half of which are.
_NEURON = replace(
    _TPU,
    kind="neuron",
    float32_product_dtype="float32",
    held_product_bytes=0,
    hides_latency=False,
    overlaps_all_reduces=True,
    overlap_fraction=0.5,
    gradient_overlap_between_hosts=0.5,
    activation_overlap=0.0,
    bandwidth_efficiency=0.8,
    collective_efficiency=0.8,
    all_to_all_efficiency=0.8,
    kernel_overhead_s=2e-6,
    collective_overhead_s=15e-6,
    usable_memory_fraction=0.9,
    source="assumptions: shares of the peaks as on other accelerators, nothing measured",
)

TARGETS: dict[str, Target] = {target.kind: target for target in (_CPU, _GPU, _TPU, _NEURON)}
"""One target per device kind."""


# XLA orders operators by its latency-hiding scheduler where it has a model of kernels and
# collectives (Hopper and Blackwell), and elsewhere to save memory, as seen in the order of programs
# compiled for H100 and A100 (JAX 0.10).
_HIDE_LATENCY = frozenset({"H100", "H100-96GB", "H200", "B200", "B300", "GB200", "GB300"})
# Which GPUs have instructions that add and multiply bfloat16 (compute capability 9.0), as XLA's
# `GpuFloatSupport` has it.
_ADD_BFLOAT16 = _HIDE_LATENCY


def target_for(device: Device) -> Target:
    """The target that compiles for `device`, with the figures of the device's calibration file if
    it has one.

    >>> target_for(Device(name="a", kind="tpu", peak_flops_per_s={"float32": 1.0}, memory_bytes=1,
    ...                   memory_bandwidth_bytes_per_s=1.0, source="")).reduce_scatter
    True
    """
    target = TARGETS[device.kind]
    hides_latency = target.hides_latency or device.name in _HIDE_LATENCY
    known = replace(
        target,
        hides_latency=hides_latency,
        slow_result_bytes=2 if device.name in _ADD_BFLOAT16 else target.slow_result_bytes,
        attention=attention_of(device),
        **measured_figures(device.name),
    )
    return _calibrated(known, device) if device.calibration else known


def _calibrated(target: Target, device: Device) -> Target:
    """A target with the figures of a device's own calibration."""
    figures: dict[str, Any] = dict(device.calibration)
    shapes = {
        name.removeprefix("product_"): figures.pop(name)
        for name in list(figures)
        if name.startswith("product_")
    }
    if "tile" in shapes:
        shapes["tile"] = int(shapes["tile"])
    if "collective_efficiency" in figures:
        # A fitted efficiency replaces the shares by group size.
        figures["collective_shares"] = ()
    attention, share = target.attention, figures.pop("attention_share", None)
    if attention is not None and share is not None:
        attention = replace(attention, share=share, source="the device's own calibration")
    return replace(
        target, attention=attention, products=replace(target.products, **shapes), **figures
    )
