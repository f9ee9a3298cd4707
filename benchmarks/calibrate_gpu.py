"""What V100s reach in products, elementwise code and collectives, fitted to published measurements
of single operators.

The measurements are those of the Aceso artifact (EuroSys 2024, MIT): operators of GPTs from 350
million to 13 billion parameters in float16, 1 to 8 samples of 2048 tokens, on 1 to 8 V100s of one
host. Operators below 100 us are left out, as there the framework that measured them shows; the
others count by the time they take. Whole training steps take no part.

    python benchmarks/calibrate_gpu.py FOLDER [--quick]

FOLDER holds the artifact's `profiled-time-eurosys`. Writes `aliquot/cluster/calibration/v100.toml`.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _results import Report, options
from scipy.optimize import least_squares

import aliquot
from aliquot.cluster import DEVICES, LogicalMesh, Products
from aliquot.cluster._presets import wire

DEVICE = DEVICES["V100-32GB"]
SEQUENCE, LEAST_S, LEAST_BYTES = 2048, 100e-6, 64 * 2**20
MODELS = {
    "350M": (1024, 16),
    "1_3B": (2048, 32),
    "2_6B": (2560, 32),
    "6_7B": (4096, 32),
    "13B": (5120, 40),
}
PROCESSORS = 80  # streaming multiprocessors: NVIDIA V100 data sheet
TILES = (64, 128, 192, 256)
# In these files two GPUs share two links (42 GB/s from one to the other, `p2p_intra_node.csv`);
# four and eight form the rings of a hybrid cube mesh. Two devices of our preset have one link, so
# this pair counts double.
DOUBLE_PAIR = {2: 2.0, 4: 1.0, 8: 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Products `(batch, rows, columns, depth)` that were timed together. `transposed` is the
    slowest memory layout.
    """

    operator: str
    products: tuple[tuple[int, int, int, int], ...]
    seconds: float
    transposed: bool


def main() -> int:
    """Fit, and write or print the figures."""
    chosen = options(__doc__, lambda parser: parser.add_argument("folder", type=Path))
    report = Report(
        name="calibrate_gpu",
        question="Speeds of a V100, from published measurements of operators",
        bar="none: these are the constants of V100 clusters",
        method=__doc__.split("\n\n")[1],
    )
    timed = list(_products(chosen.folder))
    fits = {tile: _fit(timed, tile) for tile in TILES}
    tile = min(fits, key=lambda t: fits[t].cost)
    errors = np.abs(np.expm1(_residuals(fits[tile].x, timed, tile)))
    efficiency, depth, traffic, _, slower = fits[tile].x
    bandwidth = np.median([_gelu_bytes_per_s(chosen.folder)])
    shares = {
        kind: _collective_shares(chosen.folder, kind) for kind in ("all-reduce", "all-to-all")
    }
    by_size = [[n, round(share, 3)] for n, share in shares["all-reduce"].items()]
    # With recomputation a weight is multiplied four times: forward twice, and for the gradients of
    # both operands. Each of the three has a memory layout of its own, and in row-major programs the
    # slowest is one of the gradients.
    figures: dict[str, tuple[Any, str]] = {
        "matmul_efficiency": (
            4 * efficiency / (3 + slower),
            "mean of the layouts in a training step with recomputation",
        ),
        "product_tile": (tile, f"the best fit of {', '.join(map(str, TILES))}"),
        "product_processors": (PROCESSORS, "streaming multiprocessors, NVIDIA V100 data sheet"),
        "product_depth": (depth, "fitted with matmul_efficiency"),
        "product_traffic": (
            traffic * DEVICE.memory_bandwidth_bytes_per_s / bandwidth,
            "fitted with matmul_efficiency",
        ),
        "bandwidth_efficiency": (
            bandwidth / DEVICE.memory_bandwidth_bytes_per_s,
            "a bias and a GELU in one kernel, reading and writing at least 64 MiB, median",
        ),
        "collective_efficiency": (
            float(np.median(list(shares["all-reduce"].values()))),
            "as collective_shares, median; NCCL itself counts 20 of 25 GB/s per link",
        ),
        "collective_shares": (
            by_size,
            "slope of time over bytes in all-reduces among 2, 4 and 8 GPUs",
        ),
        "all_to_all_efficiency": (
            float(np.median(list(shares["all-to-all"].values()))),
            "slope of time over bytes in all-to-alls among 2, 4 and 8 GPUs, median",
        ),
    }
    report.summary = {name: _rounded(value) for name, (value, _) in figures.items()} | {
        "products": len(timed),
        "error of products, median and 90 %": (
            float(np.median(errors)),
            float(np.quantile(errors, 0.9)),
        ),
        "slowest layout over the others": float(slower),
    }
    report.tables["Collectives, share of the rings' nominal bandwidth by group size"] = [
        {"kind": kind, **{str(n): share for n, share in by_size.items()}}
        for kind, by_size in shares.items()
    ]
    report.tables["Products, predicted over measured"] = _by_operator(timed, fits[tile].x, tile)
    if not chosen.quick:
        path = Path(aliquot.__file__).parent / "cluster" / "calibration" / "v100.toml"
        path.write_text(_toml(figures))
    return report.finish(chosen, met=None)


def _products(folder: Path) -> Iterator[Timed]:
    for size, samples, ways, rows in _operator_files(folder):
        hidden, heads = MODELS[size]
        tokens, head, batch = samples * SEQUENCE, hidden // heads, samples * heads // ways
        shapes = {
            "enc-attention-score": (batch, SEQUENCE, SEQUENCE, head),
            "enc-attention-context": (batch, SEQUENCE, head, SEQUENCE),
            "enc-MLP-GEMM-1": (1, tokens, 4 * hidden // ways, hidden),
        }
        if ways == 1:
            # Split, these hold an all-reduce as well; so do the backward passes of split GEMMs.
            shapes["enc-attention-dense"] = (1, tokens, hidden, hidden)
            shapes["enc-MLP-GEMM-2"] = (1, tokens, hidden, 4 * hidden)
        for name, (b, m, n, k) in shapes.items():
            weight = b == 1
            forward, backward = (
                float(rows[name][f"{way}-compute"]) * 1e-6 for way in ("forward", "backward")
            )
            if forward >= LEAST_S:
                yield Timed(
                    operator=f"{name}, forward",
                    products=((b, m, n, k),),
                    seconds=forward,
                    transposed=weight,
                )
            if backward >= 2 * LEAST_S and (not weight or ways == 1):
                both = ((b, m, k, n), (b, k, n, m))
                yield Timed(
                    operator=f"{name}, backward", products=both, seconds=backward, transposed=False
                )


def _operator_files(folder: Path) -> Iterator[tuple[str, int, int, dict[str, dict[str, str]]]]:
    for path in sorted(folder.glob("gpt_*_algo0.csv")):
        named = re.fullmatch(r"gpt_(\w+)_mbs(\d+)_tp(\d+)_algo0\.csv", path.name)
        if named and named[1] in MODELS:
            with path.open(newline="") as stream:
                rows = {row["op_name"]: row for row in csv.DictReader(stream)}
            yield named[1], int(named[2]), int(named[3]), rows


def _seconds(product: tuple[int, int, int, int], values: Any, tile: int, slower: float) -> float:
    """As `aliquot.cost` has it, for a whole product on one device."""
    efficiency, depth, traffic, launch = values
    b, m, n, k = product
    tiles = max(b * np.ceil(m / tile) * np.ceil(n / tile), PROCESSORS)
    arithmetic = 2 * tiles * tile**2 * (k + depth) / (DEVICE.peak("float16") * efficiency) * slower
    moved = 2 * b * (m * k + k * n + m * n) / (DEVICE.memory_bandwidth_bytes_per_s * traffic)
    return float(max(arithmetic, moved) + launch)


def _residuals(values: Any, timed: list[Timed], tile: int) -> Any:
    found = [
        sum(_seconds(p, values[:4], tile, values[4] if t.transposed else 1.0) for p in t.products)
        for t in timed
    ]
    return np.log(np.array(found) / [t.seconds for t in timed])


def _fit(timed: list[Timed], tile: int) -> Any:
    bounds = ([0.3, 0, 0.3, 0, 0.8], [1, 1000, 0.95, 3e-5, 1.6])
    start = [0.75, 150, 0.7, 5e-6, 1.1]
    # Relative errors count as much as the product takes: steps add up seconds.
    weights = np.sqrt([t.seconds for t in timed]) / np.sqrt(np.mean([t.seconds for t in timed]))
    return least_squares(
        lambda values: weights * _residuals(values, timed, tile),
        start,
        bounds=bounds,
        loss="soft_l1",
        x_scale=[0.1, 50, 0.1, 1e-6, 0.1],
    )


def _by_operator(timed: list[Timed], values: Any, tile: int) -> list[dict[str, Any]]:
    ratios: dict[str, list[float]] = {}
    for t, r in zip(timed, _residuals(values, timed, tile), strict=True):
        ratios.setdefault(t.operator, []).append(float(np.exp(r)))
    return [
        {
            "operator": name,
            "timed": len(found),
            "least": min(found),
            "median": float(np.median(found)),
            "most": max(found),
        }
        for name, found in sorted(ratios.items())
    ]


def _gelu_bytes_per_s(folder: Path) -> float:
    found = []
    for size, samples, ways, rows in _operator_files(folder):
        array = samples * SEQUENCE * 4 * MODELS[size][0] // ways * 2
        if array >= LEAST_BYTES:
            found.append(2 * array / (float(rows["enc-MLP-gelu"]["forward-compute"]) * 1e-6))
    return float(np.median(found))


def _collective_shares(folder: Path, kind: str) -> dict[int, float]:
    shares = {}
    for n, double in DOUBLE_PAIR.items():
        link = LogicalMesh(shape=(8 // n, n), cluster=wire("host", DEVICE.name, 1, 8)).link(("y",))
        nominal = (
            link.bandwidth_bytes_per_s
            if kind == "all-reduce"
            else link.all_to_all_bandwidth_bytes_per_s
        )
        sent = (2 if kind == "all-reduce" else 1) * (n - 1) / n
        timed = []
        for path in sorted(folder.glob(f"prim_gpt_*_{kind.replace('-', '_')}_{n}gpus.csv")):
            with path.open(newline="") as stream:
                for mebibytes, milliseconds in list(csv.reader(stream))[1:]:
                    if float(milliseconds) < 1e6:  # above stands for a failure
                        timed.append((float(mebibytes) * 2**20, float(milliseconds) * 1e-3))
        num_bytes, seconds = np.array(timed).T
        # Time is a start and a slope, fitted in relative errors.
        terms = np.stack([1 / seconds, num_bytes / seconds], axis=1)
        (_, slope), *_ = np.linalg.lstsq(terms, np.ones(len(seconds)))
        shares[n] = float(sent / slope / (nominal * double))
    return shares


def _rounded(value: Any) -> Any:
    return value if isinstance(value, int | list) else round(float(value), 3)


def _toml(figures: dict[str, tuple[Any, str]]) -> str:
    origin = (
        "Aceso artifact (EuroSys 2024), operators and collectives of GPTs in float16 on V100-32GB"
    )
    lines = [f"# Written by benchmarks/calibrate_gpu.py from the measurements of the {origin}."]
    Products(
        **{
            name.removeprefix("product_"): v
            for name, (v, _) in figures.items()
            if name.startswith("product_")
        }
    )
    for name, (value, how) in figures.items():
        shown = _rounded(value)
        origin_of = how if "data sheet" in how else f"{how}; {origin}"
        lines += ["", f"[{name}]", f"value = {shown}", f'source = "{origin_of}"']
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
