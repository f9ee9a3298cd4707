"""One accelerator as its maker describes it, and a small catalogue of them.

Peaks and sizes only, from public documents. How much of a peak a compiler reaches is a matter of
the target (`_target.py`), and how devices are joined is a matter of the machine (`_presets.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core import ClusterError

KINDS = ("gpu", "tpu", "neuron", "cpu")
CALIBRATED = (
    "matmul_efficiency",
    "float32_product_share",
    "sustained_share",
    "product_tile",
    "product_depth",
    "product_traffic",
    "bandwidth_efficiency",
    "collective_efficiency",
    "all_to_all_efficiency",
    "scatter_gather_share",
    "collective_overhead_s",
    "kernel_overhead_s",
    "overlap_fraction",
    "gradient_overlap_between_hosts",
    "activation_overlap",
    "attention_share",
)
"""Figures of a target that a device may have values of its own for; see `Target` and `Products` for
what they mean.
"""
DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64", "float8", "float8_fnuz")
_NARROW = re.compile(r"bool|u?int[248]|float[48]_.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator: how fast it may compute, how much it can hold, how fast it reads that.

    Args:
        name: As users write it, e.g. `"A100-80GB"`.
        kind: `"gpu"`, `"tpu"`, `"neuron"` or `"cpu"`: which compiler target it belongs to.
        peak_flops_per_s: Dense peak by dtype in FLOP/s. `"float32"` is required and means full
            float32 precision; `"tf32"` is what float32 products may run in instead; `"float8"`
            stands for all types of 8-bit floats but those without infinities and negative zero
            (`float8_e4m3fnuz`), for which `"float8_fnuz"` does.
        memory_bytes: Device memory.
        memory_bandwidth_bytes_per_s: Peak of reading and writing together.
        source: Where the figures come from.
        calibration: What its programs reach, as fitted to measurements (`aliquot profile fit`):
            figures of its target by name, which replace those that `target_for` knows; see
            `CALIBRATED`.

    Raises:
        ClusterError: All values that cannot be right.
    """

    name: str
    kind: str
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    source: str
    calibration: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops_per_s", dict(self.peak_flops_per_s))
        problems = []
        if not self.name:
            problems.append("a device needs a name")
        if self.kind not in KINDS:
            problems.append(f"device kind {self.kind!r} is none of {', '.join(KINDS)}")
        if "float32" not in self.peak_flops_per_s:
            problems.append(
                "peak_flops_per_s has no float32, against which every other dtype falls back"
            )
        for dtype, peak in self.peak_flops_per_s.items():
            if dtype not in DTYPES:
                problems.append(
                    f"peak_flops_per_s has {dtype!r}, which is none of {', '.join(DTYPES)}"
                )
            if not (math.isfinite(peak) and peak > 0):
                problems.append(f"peak of {dtype} must be positive, got {peak} FLOP/s")
        if self.memory_bytes <= 0:
            problems.append(f"device memory must be positive, got {self.memory_bytes} bytes")
        if not (
            math.isfinite(self.memory_bandwidth_bytes_per_s)
            and self.memory_bandwidth_bytes_per_s > 0
        ):
            problems.append(
                f"memory bandwidth must be positive, got {self.memory_bandwidth_bytes_per_s}"
                " bytes/s"
            )
        object.__setattr__(self, "calibration", dict(self.calibration))
        for name, value in self.calibration.items():
            if name not in CALIBRATED:
                problems.append(
                    f"calibration has {name!r}, which is none of {', '.join(CALIBRATED)}"
                )
            if not (math.isfinite(value) and value >= 0):
                problems.append(f"{name} must not be negative, got {value}")
        if problems:
            raise ClusterError(problems, asked=f"device {self.name!r}")

    def peak(self, dtype: str) -> float:
        """Peak in FLOP/s for arithmetic in `dtype`.

        A dtype without a figure of its own counts as float32, float64 as half of it. Types narrower
        than 16 bits count as the faster 16-bit float unless the device has a figure for 8-bit
        floats.
        """
        peaks = self.peak_flops_per_s
        if dtype in peaks:
            return peaks[dtype]
        family = "float8_fnuz" if dtype.endswith("fnuz") else "float8"
        if dtype.startswith("float8_") and family in peaks:
            return peaks[family]
        if _NARROW.fullmatch(dtype):
            return max(self.peak("bfloat16"), self.peak("float16"))
        return peaks["float32"] * (0.5 if dtype == "float64" else 1.0)


def _gpu(
    name: str,
    peaks_tflops: tuple[float, float | None, float, float, float, float | None],
    memory_bytes: int,
    gb_per_s: float,
    source: str,
    kind: str = "gpu",
    fnuz_tflops: float | None = None,
) -> Device:
    peaks = {
        dtype: peak * 1e12
        for dtype, peak in zip(DTYPES, (*peaks_tflops, fnuz_tflops), strict=True)
        if peak is not None
    }
    return Device(
        name=name,
        kind=kind,
        peak_flops_per_s=peaks,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=gb_per_s * 1e9,
        source=source,
    )


def _tpu(name: str, bfloat16_tflops: float, memory_gb: int, gb_per_s: float, source: str) -> Device:
    # Google publishes bfloat16 (and int8) only. The matrix unit reaches full float32 precision in
    # six bfloat16 passes (`jax.lax.Precision.HIGHEST`); float16 is computed as float32 would be;
    # float64 is emulated in software by pairs of float32, an order of magnitude slower, for which
    # there is no published figure.
    bfloat16 = bfloat16_tflops * 1e12
    return Device(
        name=name,
        kind="tpu",
        peak_flops_per_s={
            "float32": bfloat16 / 6,
            "bfloat16": bfloat16,
            "float16": bfloat16 / 6,
            "float64": bfloat16 / 60,
        },
        memory_bytes=memory_gb * 2**30,
        memory_bandwidth_bytes_per_s=gb_per_s * 1e9,
        source=source + "; float32 as six bfloat16 passes, float64 an assumption",
    )


_XLA = "; memory size: OpenXLA's target description"
_VOLTA = (
    "NVIDIA V100 data sheet and Volta architecture paper (SXM2; no bfloat16 units: computed as"
    " float32)" + _XLA
)
_AMPERE = "NVIDIA A100 data sheet (SXM4, dense; float64 on tensor cores)" + _XLA
_AMPERE_PCIE = "NVIDIA A100 data sheet (PCIe, 40 GB, dense; float64 on tensor cores)" + _XLA
_HOPPER = (
    "data sheet (SXM, dense: half of the printed sparse figures; float64 on tensor cores)" + _XLA
)
# Superchips are no SXM modules.
_SUPERCHIP = _HOPPER.replace("SXM, ", "")
_GEFORCE_F64 = "; float64 at 1/64 of float32"
_NEURON = "AWS Neuron documentation (per chip); float64 an assumption: an eighth of float32"

# GPUs and Trainium: (float32, tf32, bfloat16, float16, float64, float8) in TFLOP/s, memory in
# bytes, bandwidth in GB/s.
_CATALOGUE = (
    _gpu("V100-16GB", (15.7, None, 15.7, 125.0, 7.8, None), 16_935_682_048, 900, _VOLTA),
    _gpu("V100-32GB", (15.7, None, 15.7, 125.0, 7.8, None), 34_089_730_048, 900, _VOLTA),
    _gpu("A100-40GB", (19.5, 156.0, 312.0, 312.0, 19.5, None), 42_331_013_120, 1555, _AMPERE),
    _gpu("A100-PCIe", (19.5, 156.0, 312.0, 312.0, 19.5, None), 42_331_013_120, 1555, _AMPERE_PCIE),
    _gpu("A100-80GB", (19.5, 156.0, 312.0, 312.0, 19.5, None), 85_100_068_864, 2039, _AMPERE),
    _gpu(
        "H100",
        (67.0, 494.7, 989.4, 989.4, 67.0, 1978.9),
        84_942_979_072,
        3350,
        "NVIDIA H100 " + _HOPPER,
    ),
    _gpu(
        "H100-96GB",
        (67.0, 494.7, 989.4, 989.4, 67.0, 1978.9),
        96 * 10**9,
        2400,
        "NVIDIA H100 data sheet (dense), with 96 GB of HBM2e at 2.4 TB/s; its limit of 500 W, where"
        " the SXM module has 700 W, is in no figure but the share of the peak that is assumed",
    ),
    _gpu(
        "H200",
        (67.0, 494.7, 989.4, 989.4, 67.0, 1978.9),
        151_397_597_184,
        4800,
        "NVIDIA H200 " + _HOPPER,
    ),
    _gpu(
        "B200",
        (75.0, 1125.0, 2250.0, 2250.0, 37.0, 4500.0),
        191_514_411_008,
        7700,
        "NVIDIA HGX B200 " + _HOPPER,
    ),
    _gpu(
        "B300",
        (75.0, 1125.0, 2250.0, 2250.0, 1.25, 4500.0),
        297_021_865_984,
        7700,
        "NVIDIA HGX B300 " + _HOPPER,
    ),
    _gpu(
        "GB200",
        (80.0, 1250.0, 2500.0, 2500.0, 40.0, 5000.0),
        197_897_748_480,
        8000,
        "NVIDIA GB200 NVL72 " + _SUPERCHIP,
    ),
    _gpu(
        "GB300",
        (80.0, 1250.0, 2500.0, 2500.0, 1.39, 5000.0),
        297_021_079_552,
        8000,
        "NVIDIA GB300 NVL72 " + _SUPERCHIP,
    ),
    _gpu(
        "MI300X",
        (163.4, 653.7, 1307.4, 1307.4, 163.4, None),
        192 * 10**9,
        5300,
        "AMD Instinct MI300X data sheet (dense; matrix cores)",
        fnuz_tflops=2614.9,
    ),
    _gpu(
        "A10G",
        (35.0, 35.0, 70.0, 70.0, 0.55, None),
        24 * 10**9,
        600,
        "NVIDIA A10G data sheet (dense)" + _GEFORCE_F64,
    ),
    _gpu(
        "L4",
        (30.3, 60.0, 121.0, 121.0, 0.47, 242.5),
        24 * 10**9,
        300,
        "NVIDIA L4 data sheet (dense)" + _GEFORCE_F64,
    ),
    _gpu(
        "RTX-4090",
        (82.6, 82.6, 165.2, 165.2, 1.29, 330.3),
        24 * 10**9,
        1008,
        "NVIDIA Ada GPU architecture paper (dense, float32 accumulation)" + _GEFORCE_F64,
    ),
    _gpu("trn1", (47.5, 190.0, 190.0, 190.0, 5.9, 190.0), 32 * 2**30, 880, _NEURON, "neuron"),
    _gpu("trn2", (181.0, 667.0, 667.0, 667.0, 22.6, 1299.0), 96 * 2**30, 2900, _NEURON, "neuron"),
    _tpu("v4", 275.0, 32, 1228, "Google Cloud TPU v4 documentation (per chip)"),
    _tpu("v5e", 197.0, 16, 819, "Google Cloud TPU v5e documentation (per chip)"),
    _tpu("v5p", 459.0, 95, 2765, "Google Cloud TPU v5p documentation (per chip)"),
    _tpu("v6e", 918.0, 32, 1640, "Google Cloud TPU v6e documentation (per chip)"),
    Device(
        name="cpu",
        kind="cpu",
        peak_flops_per_s={"float32": 10e9, "bfloat16": 5e9, "float16": 5e9, "float64": 5e9},
        memory_bytes=4 * 2**30,
        memory_bandwidth_bytes_per_s=4e9,
        source=(
            "an assumption: one of several virtual devices that share a laptop's cores; detection"
            " replaces it"
        ),
    ),
)

DEVICES: dict[str, Device] = {device.name: device for device in _CATALOGUE}
"""Known devices by name."""
