"""What this machine's cores do when eight virtual devices share them: the figures behind detected
CPU clusters.

Every program runs on all eight devices at once, as a step does. Products and elementwise code are
timed over several repetitions inside one program. Each kind of collective is timed at several
sizes, along whole and half meshes, and its time fitted as `fixed + seconds per byte`, where the
bytes are those that the package's formula counts.

    python benchmarks/calibrate_cpu.py [--quick]
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _results import Report, options, say, use_eight_devices

use_eight_devices()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

DEVICES = 8
PRODUCTS = [(128, 256, 256), (128, 256, 1024), (512, 256, 256), (512, 512, 512), (64, 32, 64)]
KIB = [4, 64, 256, 1024, 4096]
CHAIN = 8
"""Repetitions inside one program, so that what starting it costs is spread."""


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__)
    repeats = 5 if chosen.quick else 20
    report = Report(
        name="calibrate_cpu",
        question="Speeds of eight virtual devices that share a CPU",
        bar="none: these are the constants of detected CPU clusters",
        method=(
            f"Lower quartile of {repeats} runs after two for warm-up, each of {CHAIN} dependent"
            " repetitions in one program on all eight devices; totals over the devices."
        ),
    )
    report.tables["Products, float32"] = [_product(shape, repeats) for shape in PRODUCTS]
    report.tables["Elementwise, float32"] = [_elementwise(kib, repeats) for kib in KIB]
    rows = [_collective(kind, n, kib, repeats) for kind in _KINDS for n in (8, 4, 2) for kib in KIB]
    report.tables["Collectives"] = rows
    amid = [_amid_work(kind, n, repeats) for kind in _KINDS for n in (8, 4, 2)]
    report.tables["Small collectives between products"] = amid
    report.tables["Fits"] = [_fit(kind, n, rows) for kind in _KINDS for n in (8, 4, 2)]
    report.summary = {
        "cores": len(os.sched_getaffinity(0)),
        "products GFLOP/s, all devices": [
            row["GFLOP/s"] for row in report.tables["Products, float32"]
        ],
        "elementwise GB/s, all devices": [
            row["GB/s"] for row in report.tables["Elementwise, float32"]
        ],
    }
    return report.finish(chosen, met=None)


def _seconds(run: Callable[..., Any], array: Any, repeats: int) -> float:
    times = []
    for k in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(run(array))
        if k >= 2:
            times.append(time.perf_counter() - start)
    return float(np.quantile(times, 0.25)) / CHAIN


def _everywhere(
    body: Callable[[Any], Any], mesh: Mesh, shape: tuple[int, ...]
) -> tuple[Callable[..., Any], Any]:
    """A program that applies `body` repeatedly to each device's own array, with that array."""
    lead = P(tuple(mesh.axis_names))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=lead, out_specs=lead, check_vma=False)
    def run(x: Any) -> Any:
        # A loop, for the compiler would fuse what is written out.
        return jax.lax.fori_loop(0, CHAIN, lambda _, y: body(y), x[0])[None]

    array = jax.device_put(np.full((DEVICES, *shape), 1e-3, np.float32), NamedSharding(mesh, lead))
    return run, array


def _mesh(group: int) -> Mesh:
    return Mesh(np.array(jax.devices(), dtype=object).reshape(DEVICES // group, group), ("x", "y"))


def _product(shape: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    rows, inner, columns = shape
    weights = (
        jnp.full((inner, columns), 1e-3, jnp.float32),
        jnp.full((columns, inner), 1e-3, jnp.float32),
    )

    def there_and_back(x: Any) -> Any:
        return (x @ weights[0]) @ weights[1]

    run, array = _everywhere(there_and_back, _mesh(8), (rows, inner))
    seconds = _seconds(run, array, repeats)
    flops = DEVICES * 4 * rows * inner * columns
    return {"rows, inner, columns": shape, "us": seconds * 1e6, "GFLOP/s": flops / seconds / 1e9}


def _elementwise(kib: int, repeats: int) -> dict[str, Any]:
    run, array = _everywhere(lambda x: x * 1.5 + 0.25, _mesh(8), (kib * 256,))
    seconds = _seconds(run, array, repeats)
    return {
        "KiB on each": kib,
        "us": seconds * 1e6,
        "GB/s": 2 * DEVICES * kib * 1024 / seconds / 1e9,
    }


def _all_to_all(x: Any) -> Any:
    return jax.lax.all_to_all(x.reshape(8, -1), "y", 0, 1, tiled=True).reshape(-1)


# Each gets and returns an array of one size, so that it can be repeated.
_KINDS: dict[str, Callable[[Any], Any]] = {
    "all-reduce": lambda x: jax.lax.psum(x, "y") * 0.1,
    "all-gather": lambda x: jax.lax.all_gather(x, "y", tiled=True)[: x.shape[0]],
    "reduce-scatter and all-gather": lambda x: jax.lax.all_gather(
        jax.lax.psum_scatter(x, "y", tiled=True) * 0.1, "y", tiled=True
    ),
    "all-to-all": _all_to_all,
    "collective-permute": lambda x: jax.lax.ppermute(x, "y", [(0, 1), (1, 0)]),
}


def _collective(kind: str, group: int, kib: int, repeats: int) -> dict[str, Any]:
    run, array = _everywhere(_KINDS[kind], _mesh(group), (kib * 256,))
    seconds = _seconds(run, array, repeats)
    say(f"{kind} among {group}, {kib} KiB: {seconds * 1e6:.0f} us")
    return {"kind": kind, "group": group, "KiB": kib, "us": seconds * 1e6}


def _amid_work(kind: str, group: int, repeats: int) -> dict[str, Any]:
    """A small collective between products, where devices do not arrive at the same time, less the
    products alone.
    """
    weights = jnp.full((256, 256), 1e-3, jnp.float32)

    def alone(x: Any) -> Any:
        return jnp.tanh(x @ weights)

    def among(x: Any) -> Any:
        y = alone(x)
        return jnp.concatenate([_KINDS[kind](y[:8].reshape(-1)).reshape(8, -1), y[8:]])

    times = []
    for body in (among, alone):
        run, array = _everywhere(body, _mesh(group), (128, 256))
        times.append(_seconds(run, array, 4 * repeats))
    return {
        "kind": kind,
        "group": group,
        "KiB": 8,
        "us": (times[0] - times[1]) * 1e6,
        "products us": times[1] * 1e6,
    }


def _factor(kind: str, n: int) -> float:
    """Bytes that the package's formula sends for each byte that enters a collective."""
    ring = (n - 1) / n
    return {
        "all-reduce": 2 * ring,
        "all-gather": float(n - 1),
        "reduce-scatter and all-gather": 2 * ring,
        "all-to-all": ring,
        "collective-permute": 1.0,
    }[kind]


def _fit(kind: str, group: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [r for r in rows if r["kind"] == kind and r["group"] == group]
    sizes = np.array([r["KiB"] * 1024 * _factor(kind, group) for r in mine])
    seconds = np.array([r["us"] * 1e-6 for r in mine])
    # Relative errors count, or the largest size alone would decide.
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (fixed, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    return {
        "kind": kind,
        "group": group,
        "fixed us": fixed * 1e6,
        "GB/s on each device": 1e-9 / per_byte,
    }


if __name__ == "__main__":
    sys.exit(main())
