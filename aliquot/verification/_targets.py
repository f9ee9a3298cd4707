"""Targets of compilation: GPUs by their descriptions, TPUs by their slices, virtual CPU devices.

A GPU's description is the text from which XLA builds its model of the device: limits of its
kernels, memory, caches.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..cluster import DEVICES, Cluster, target_for
from ..core import InputError, nearest, read_file

_LIMITS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
"""The same on every GPU of the table. Source: CUDA C++ Programming Guide, "Technical specifications
per compute capability".
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUDescription:
    """One GPU as its compiler must know it; fields are named as in XLA's target description.

    `capability` is the compute capability, `accelerated` whether features of this very architecture
    may be used.
    """

    name: str
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    l2_cache_size: int
    device_memory_size: int
    memory_bandwidth: int
    clock_rate_ghz: float
    capability: tuple[int, int]
    accelerated: bool

    def text(self) -> str:
        """The description as XLA reads it (a text proto)."""
        figures = {}
        for name in (
            "core_count",
            "fpus_per_core",
            "shared_memory_per_core",
            "shared_memory_per_block_optin",
            "l2_cache_size",
            "device_memory_size",
            "memory_bandwidth",
            "clock_rate_ghz",
        ):
            figures[name] = getattr(self, name)
        fields = " ".join(f"{name}: {value}" for name, value in {**_LIMITS, **figures}.items())
        extension = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        major, minor = self.capability
        capability = (
            f"cuda_compute_capability {{ major: {major} minor: {minor} feature_extension:"
            f" {extension} }}"
        )
        return (
            f'gpu_device_info {{ {fields} {capability} }} platform_name: "CUDA" dnn_version_info {{'
            f' major: 9 minor: 10 patch: 0 }} device_description_str: "{self.name}"'
        )


def _gpu(
    name: str,
    cores: tuple[int, int],
    shared: tuple[int, int],
    memory: tuple[int, int, int],
    clock_rate_ghz: float,
    capability: tuple[int, int],
    accelerated: bool,
) -> GPUDescription:
    return GPUDescription(
        name=name,
        core_count=cores[0],
        fpus_per_core=cores[1],
        shared_memory_per_core=shared[0],
        shared_memory_per_block_optin=shared[1],
        l2_cache_size=memory[0],
        device_memory_size=memory[1],
        memory_bandwidth=memory[2],
        clock_rate_ghz=clock_rate_ghz,
        capability=capability,
        accelerated=accelerated,
    )


_VOLTA = ((80, 64), (98_304, 98_304))
_AMPERE = ((108, 64), (167_936, 166_912))
_HOPPER = ((132, 128), (233_472, 232_448))

# (cores, units per core), (shared memory per core, per block), (L2, memory, bandwidth in bytes/s),
# clock, capability. Source: the target descriptions that OpenXLA publishes with its compiler
# (`xla/backends/gpu/target_config/specs`).
_DESCRIPTIONS = (
    _gpu("V100-16GB", *_VOLTA, (6_291_456, 16_935_682_048, 898_048_000_000), 1.53, (7, 0), False),
    _gpu("V100-32GB", *_VOLTA, (6_291_456, 34_089_730_048, 898_048_000_000), 1.53, (7, 0), False),
    _gpu(
        "A100-40GB", *_AMPERE, (41_943_040, 42_331_013_120, 1_555_200_000_000), 1.41, (8, 0), False
    ),
    _gpu(
        "A100-80GB", *_AMPERE, (41_943_040, 85_100_068_864, 2_039_040_000_000), 1.41, (8, 0), False
    ),
    _gpu("H100", *_HOPPER, (52_428_800, 84_942_979_072, 3_352_320_000_000), 1.98, (9, 0), True),
    _gpu("H200", *_HOPPER, (52_428_800, 151_397_597_184, 4_800_000_000_000), 1.98, (9, 0), True),
    _gpu(
        "B200",
        (148, 128),
        (233_472, 232_448),
        (132_644_864, 191_514_411_008, 7_672_320_000_000),
        1.965,
        (10, 0),
        True,
    ),
)

GPU_DESCRIPTIONS: dict[str, GPUDescription] = {each.name: each for each in _DESCRIPTIONS}
"""Described GPUs by the names of the catalogue of devices."""

# Dims of a slice's torus.
TPU_DIMS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}
"""TPUs that can be compiled for, with the number of dims of their torus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileTarget:
    """A kind of device to compile for, without having one.

    Attributes:
        name: as users write it.
        kind: `"gpu"`, `"tpu"` or `"cpu"`.
        limit_bytes: what a program may take on each device; None if unknown.
        description: of a GPU; empty for others.
    """

    name: str
    kind: str
    limit_bytes: float | None
    description: str = ""

    @property
    def platform(self) -> str:
        """JAX's name for the kind of device."""
        return "cuda" if self.kind == "gpu" else self.kind

    def topology(self, num_devices: int, devices_per_host: int) -> str:
        """The arrangement of the devices, as the compiler is told."""
        if self.kind == "gpu":
            inside = min(devices_per_host, num_devices)
            hosts, rest = divmod(num_devices, inside)
            return f"{hosts}x1x{inside}" if not rest else f"{num_devices}x1x1"
        if self.kind == "tpu":
            # The most even slice of so many chips.
            sides = min(_factorisations(num_devices, TPU_DIMS[self.name]), key=sum)
            return f"{self.name}:{'x'.join(map(str, sides))}"
        return ""


def resolve_target(
    name: str | None, cluster: Cluster, *, limit_bytes: float | None = None
) -> CompileTarget:
    """The target to compile for.

    Args:
        name: a described GPU, a TPU, `"cpu"`, or the path of a file with a GPU's description; by
            default the cluster's device.
        cluster: what the plan was made for.
        limit_bytes: what a plan may fill of the cluster's own device; by default what its target
            leaves usable.

    Raises:
        InputError: the name is unknown, or the file is no description.
    """
    chosen = cluster.device.name if name is None else name
    limit: float | None
    if chosen == cluster.device.name:
        limit = (
            limit_bytes
            if limit_bytes is not None
            else target_for(cluster.device).usable_bytes(cluster.device)
        )
    else:
        device = DEVICES.get(chosen)
        limit = target_for(device).usable_bytes(device) if device else None
    if chosen in GPU_DESCRIPTIONS:
        return CompileTarget(
            name=chosen, kind="gpu", limit_bytes=limit, description=GPU_DESCRIPTIONS[chosen].text()
        )
    if chosen in TPU_DIMS:
        return CompileTarget(name=chosen, kind="tpu", limit_bytes=limit)
    if chosen == "cpu" or (name is None and cluster.device.kind == "cpu"):
        return CompileTarget(name="cpu", kind="cpu", limit_bytes=limit)
    if name is not None and (os.sep in name or Path(name).is_file()):
        return _from_file(Path(name))
    known = [*GPU_DESCRIPTIONS, *TPU_DIMS, "cpu"]
    raise InputError(
        f"{chosen} cannot be compiled for: {nearest(chosen, known)} "
        "For another GPU give a file with XLA's description of it: --target path/to/gpu.txtpb"
    )


def _from_file(path: Path) -> CompileTarget:
    """The target that a file with a GPU's description describes."""
    try:
        text = read_file(path, 2**20).decode()
    except (InputError, UnicodeDecodeError) as error:
        raise InputError(f"the target description {str(path)!r} cannot be read: {error}.") from None
    size = re.search(r"\bdevice_memory_size\s*:\s*(\d+)", text)
    if "gpu_device_info" not in text or size is None:
        raise InputError(
            f"{str(path)!r} is no description of a GPU: it needs `gpu_device_info {{ ..."
            " device_memory_size: N ... }`, as in the files of"
            " xla/backends/gpu/target_config/specs in OpenXLA's sources."
        )
    share = target_for(DEVICES["H100"]).usable_memory_fraction
    return CompileTarget(
        name=path.stem, kind="gpu", limit_bytes=int(size.group(1)) * share, description=text
    )


def _factorisations(number: int, parts: int, least: int = 1) -> list[tuple[int, ...]]:
    """Ascending factors of a number, as many as there are parts, none below the least.

    >>> _factorisations(8, 2), min(_factorisations(16, 3), key=sum)
    ([(1, 8), (2, 4)], (2, 2, 4))
    """
    if parts == 1:
        return [(number,)] if number >= least else []
    factorisations = []
    for side in range(least, math.isqrt(number) + 1):
        if number % side == 0:
            factorisations += [
                (side, *rest) for rest in _factorisations(number // side, parts - 1, side)
            ]
    return factorisations
