"""What H100, B200 and A100 reach in products and collectives, fitted to published measurements of
single operators.

H100 and B200: OpenXLA's performance tables (Apache-2.0), products of bfloat16 and collectives among
2, 4 and 8 devices of one host. A100: products of bfloat16 as SimuMax (Apache-2.0) measured them on
an A100 PCIe. Products below 20 us are left out, as there the launch of a kernel shows. Every second
product is fitted, the others are held out. Whole training steps take no part. Of TPUs no table by
shape is public: their files get the side of the matrix unit, to which products are padded, and the
rest from whole steps (`public_steps.py`).

    python benchmarks/calibrate_operators.py FOLDER [--quick]

FOLDER holds `openxla-products.json`, `openxla-collectives.json` and `simumax-a100-pcie.json`.
Writes the files in `aliquot/cluster/calibration`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _calibration_files import rounded, update
from _results import Report, options
from numpy.typing import NDArray
from scipy.optimize import least_squares

from aliquot.cluster import DEVICES, Device
from aliquot.cluster._presets import WIRINGS

Floats = NDArray[np.float64]
LEAST_S, LEAST_BYTES = 20e-6, 2**20
TILES = (64, 128, 256)
MATRIX_UNITS = {"v5e": 128, "v5p": 128, "v6e": 256}
OPENXLA = "OpenXLA performance tables (Apache-2.0)"
SIMUMAX = "SimuMax, configs/system/a100_pcie.json (Apache-2.0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device whose operators were measured: the key of its tables, and its processors.

    `memory_bytes_per_s` is that of the card that was measured, which may be another edition.
    """

    file: str
    device: Device
    processors: int
    table: str
    memory_bytes_per_s: float


CARDS = (
    Card(
        file="h100",
        device=DEVICES["H100"],
        processors=132,
        table="sm_90",
        memory_bytes_per_s=DEVICES["H100"].memory_bandwidth_bytes_per_s,
    ),
    Card(
        file="b200",
        device=DEVICES["B200"],
        processors=148,
        table="sm_100_B200",
        memory_bytes_per_s=DEVICES["B200"].memory_bandwidth_bytes_per_s,
    ),
    # An A100 PCIe 80GB, whose memory moves 1,935 GB/s.
    Card(
        file="a100",
        device=DEVICES["A100-80GB"],
        processors=108,
        table="",
        memory_bytes_per_s=1935e9,
    ),
)


def main() -> int:
    """Fit, and write or print the figures."""
    chosen = options(__doc__, lambda parser: parser.add_argument("folder", type=Path))
    report = Report(
        name="calibrate_operators",
        question="Speeds of H100, B200 and A100, from published measurements of operators",
        bar="none: these are the constants of clusters of these devices",
        method=__doc__.split("\n\n")[1],
    )
    rows = []
    for card in CARDS:
        timed = _products(card, chosen.folder)
        used, held = timed[::2], timed[1::2]
        fits = {tile: _fit(used, card, tile) for tile in TILES}
        tile = min(fits, key=lambda t: fits[t].cost)
        share, depth, traffic, _ = fits[tile].x
        origin = OPENXLA if card.table else SIMUMAX
        fitted = f"fitted to {len(used)} products of bfloat16 above 20 us; {origin}"
        bandwidth = 0.85
        figures: dict[str, tuple[Any, str]] = {
            "matmul_efficiency": (share, fitted),
            "product_tile": (tile, f"the best fit of {', '.join(map(str, TILES))}; {origin}"),
            "product_processors": (
                card.processors,
                f"streaming multiprocessors, NVIDIA {card.device.name.split('-')[0]} data sheet",
            ),
            "product_depth": (depth, fitted),
            "product_traffic": (min(traffic / bandwidth, 1.0), fitted),
            "bandwidth_efficiency": (
                bandwidth,
                "large copies; XLA's own model of elementwise kernels within 2 %",
            ),
        }
        if card.table:
            figures |= _float32_products(card, chosen.folder)
            figures |= _collectives(card, chosen.folder)
        errors = np.abs(np.expm1(_residuals(fits[tile].x, held, card, tile)))
        rows.append(
            {
                "device": card.device.name,
                "products held out": len(held),
                "median error": float(np.median(errors)),
                "90 %": float(np.quantile(errors, 0.9)),
            }
            | {name: rounded(value) for name, (value, _) in figures.items()}
        )
        if not chosen.quick:
            update(card.file, figures)
    for file, side in MATRIX_UNITS.items():
        known = "Google Cloud TPU documentation, system architecture"
        if not chosen.quick:
            update(
                file,
                {
                    "matmul_efficiency": (1.0, "the peak; what whole steps sustain stands beside"),
                    "product_tile": (side, f"side of the matrix unit; {known}"),
                    "product_processors": (1, f"one product at a time; {known}"),
                    "product_depth": (0.0, "an assumption: no table by shape is public"),
                    "product_traffic": (1.0, "an assumption: no table by shape is public"),
                },
            )
    report.tables["Figures, and errors on products that were not fitted"] = rows
    return report.finish(chosen, met=None)


def _products(card: Card, folder: Path) -> Floats:
    """Measured products, `(products, 5)`: batch, rows, columns, depth and seconds."""
    found = []
    if card.table:
        for b, m, n, k, speeds in json.loads((folder / "openxla-products.json").read_text())[
            card.table
        ]:
            if speed := speeds.get("bf16xbf16->bf16"):
                found.append((b, m, n, k, 2 * b * m * n * k / speed))
    else:
        system = json.loads((folder / "simumax-a100-pcie.json").read_text())
        products = system["accelerator"]["op"]["matmul"]
        for text, share in products["accurate_efficient_factor"].items():
            size = dict(part.split("=") for part in text.split(", "))
            b, m, n, k = (int(size[name]) for name in "bmnk")
            found.append((b, m, n, k, 2 * b * m * n * k / (products["tflops"] * 1e12 * share)))
    timed = np.array(found, np.float64)
    return timed[timed[:, 4] >= LEAST_S]


def _float32_products(card: Card, folder: Path) -> dict[str, tuple[Any, str]]:
    """How much less of their peak, that of TF32, products of float32 reach than those of bfloat16
    of the same shapes.
    """
    table = json.loads((folder / "openxla-products.json").read_text())[card.table]
    peaks = card.device.peak("bfloat16") / card.device.peak("tf32")
    shares = [
        peaks * speeds["f32xf32->f32"] / speeds["bf16xbf16->bf16"]
        for b, m, n, k, speeds in table[::2]
        if 2 * b * m * n * k / speeds["bf16xbf16->bf16"] >= LEAST_S
    ]
    return {
        "float32_product_share": (
            min(float(np.median(shares)), 1.0),
            f"median over {len(shares)} shapes above 20 us in bfloat16; {OPENXLA}",
        )
    }


def _residuals(values: Floats, timed: Floats, card: Card, tile: int) -> Floats:
    """Logarithm of modelled over measured seconds; the model is that of `aliquot.cost`."""
    share, depth, traffic, launch_s = values
    b, m, n, k, seconds = timed.T
    tiles = np.maximum(b * np.ceil(m / tile) * np.ceil(n / tile), card.processors)
    arithmetic = 2 * tiles * tile**2 * (k + depth) / (card.device.peak("bfloat16") * share)
    moved = 2 * b * (m * k + k * n + m * n) / (card.memory_bytes_per_s * traffic)
    return np.asarray(np.log((np.maximum(arithmetic, moved) + launch_s) / seconds), np.float64)


def _fit(timed: Floats, card: Card, tile: int) -> Any:
    return least_squares(
        _residuals,
        [0.75, 150, 0.7, 4e-6],
        bounds=([0.2, 0, 0.3, 0], [1, 1000, 1, 3e-5]),
        loss="soft_l1",
        f_scale=0.05,
        x_scale=[0.1, 50, 0.1, 1e-6],
        args=(timed, card, tile),
    )


def _collectives(card: Card, folder: Path) -> dict[str, tuple[Any, str]]:
    """Shares of the links' one-way bandwidth, and the time to start a collective."""
    table = json.loads((folder / "openxla-collectives.json").read_text())[card.table]
    link = WIRINGS[card.device.name].intra
    lines: dict[str, dict[int, tuple[float, float]]] = {}
    for kind in ("all-reduce", "all-gather", "all-to-all"):
        lines[kind] = {}
        for groups, size in ((4, 2), (2, 4), (1, 8)):
            some = np.array(
                [(r[2], r[2] / r[4]) for r in table if r[0] == kind and r[3] == [groups, size]]
            )
            num_bytes, seconds = some[some[:, 0] >= LEAST_BYTES].T
            # Time is a start and a slope, fitted in relative errors.
            terms = np.stack([1 / seconds, num_bytes / seconds], axis=1)
            (start, slope), *_ = np.linalg.lstsq(terms, np.ones(len(seconds)), rcond=None)
            sent = (2 if kind == "all-reduce" else 1) * (size - 1) / size
            lines[kind][size] = float(sent / slope / link.bandwidth_bytes_per_s), float(start)
    shares = {kind: {n: share for n, (share, _) in by.items()} for kind, by in lines.items()}
    gathers = [shares["all-gather"][n] / shares["all-reduce"][n] for n in (2, 4, 8)]
    steps = {2: 2, 4: 4, 8: 6}
    starts = [lines["all-reduce"][n][1] - steps[n] * link.latency_s for n in (2, 4, 8)]
    slope_of = "slope of time over bytes from 1 MiB to 512 MiB in"
    return {
        "collective_efficiency": (
            float(np.median(list(shares["all-reduce"].values()))),
            f"as collective_shares, median; {OPENXLA}",
        ),
        "collective_shares": (
            [[n, rounded(share)] for n, share in shares["all-reduce"].items()],
            f"{slope_of} all-reduces among 2, 4 and 8 devices; {OPENXLA}",
        ),
        "scatter_gather_share": (
            min(float(np.median(gathers)), 1.0),
            f"{slope_of} all-gathers over that of all-reduces, median; {OPENXLA}",
        ),
        "all_to_all_efficiency": (
            float(np.median(list(shares["all-to-all"].values()))),
            f"{slope_of} all-to-alls, median; {OPENXLA}",
        ),
        "collective_overhead_s": (
            max(float(np.median(starts)), 0.0),
            f"start of all-reduces less the links' latencies, median; {OPENXLA}",
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
