"""Fitting of the cost model's figures to measured operators; the result is written as a cluster
file.

Every second size is fitted; the others are held out and show how well the figures predict.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ..cluster import CALIBRATED, DEVICES, Cluster, target_for
from ..core import InputError
from ._database import Measurement, ProfileDatabase, ProgramKey
from ._measured import fit_line, fitting_rows, modelled_operator, without_launch
from ._operators import COLLECTIVES, LAUNCH, TRANSFER, Operator

_Row = tuple[Operator, ProgramKey, Measurement]
# Rows, and columns, of the tiles that products are assumed to have on GPUs.
_TILE = 128
# Range of fitted shares; those of a peak may exceed 1, and the peak is then raised.
_LEAST, _MOST = 1e-3, 1.0
_HIGHEST = 100.0
# With fewer sizes than this, none is held out.
_FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fitted figures of a cluster.

    Attributes:
        cluster: the cluster with the fitted figures; `to_toml` writes it.
        figures: for each figure by name, its `value`, its value `before`, and the `source`.
        errors: for each kind of operator, the number of sizes that were held out, and the median
            error on them with the figures before and with the fitted ones.
    """

    cluster: Cluster
    figures: Mapping[str, Mapping[str, Any]]
    errors: Sequence[Mapping[str, Any]]


def fit_profiles(database: ProfileDatabase, cluster: Cluster) -> Fit:
    """Fit the cost model of a cluster to a database's measurements of its devices.

    Raises:
        InputError: it holds too few.
    """
    rows, _ = fitting_rows(
        database,
        cluster,
        advice="To fit what was measured, name its devices, such as --cluster 4xcpu.",
    )
    # Fitted figures must explain measurements, not repeat corrections made from them.
    plain = replace(cluster, measured=None)
    launches = [row for row in rows if row[0] == LAUNCH]
    timed = []
    for row in rows:
        seconds = without_launch(row, launches) if row[0].kind != TRANSFER else None
        if seconds is not None:
            timed.append((row, seconds))
    used, held_out = _halves(timed)
    target = target_for(cluster.device)
    figures: dict[str, tuple[float, str]] = {}
    figures |= _fit_products(used, plain)
    figures |= _fit_traffic(used, plain)
    figures |= _fit_collectives(used, plain)
    if not figures:
        raise InputError(
            f"{database.path} holds too few operators to fit anything: a fit needs products,"
            " traffic, or collectives of at least two sizes. Measure more: aliquot profile run"
            " MODEL."
        )
    fitted = _with_figures(plain, {name: value for name, (value, _) in figures.items()})
    described = {}
    for name, (value, source) in figures.items():
        if name in _PEAKS and value > 1:
            times = f"{value:.3g} times what the cluster said"
            source = f"{source}; {_PEAKS[name]} was raised, to {times}"
        calibrated = fitted.device.calibration[name]
        described[name] = {"value": calibrated, "before": target.figure(name), "source": source}
    return Fit(cluster=fitted, figures=described, errors=_errors(held_out, plain, fitted))


def _halves(
    timed: Sequence[tuple[_Row, float]],
) -> tuple[list[tuple[_Row, float]], list[tuple[_Row, float]]]:
    """The measurements to fit, every second size of each kind of operator, and those to hold out;
    if there are few sizes, all are fitted.
    """
    groups: defaultdict[tuple[str, str, tuple[int, ...]], list[tuple[_Row, float]]] = defaultdict(
        list
    )
    for row, seconds in timed:
        groups[row[0].kind, row[1].mesh, row[0].axes].append((row, seconds))
    used, held_out = [], []
    for some in groups.values():
        some.sort(key=lambda each: each[0][0].sizes)
        used += some[::2] if len(some) >= _FEW else some
        held_out += some[1::2] if len(some) >= _FEW else []
    return used, held_out


# The peak to which each share refers. A share above 1 means that the cluster understates it.
_PEAKS = {
    "matmul_efficiency": "the peak",
    "bandwidth_efficiency": "the memory bandwidth",
    "collective_efficiency": "the links' bandwidth",
}


def _with_figures(cluster: Cluster, figures: Mapping[str, float]) -> Cluster:
    """The cluster with fitted figures beside those that it has. Where more than a peak was
    measured, the peak is raised and the share becomes 1.
    """
    scale = {name: max(figures.get(name, 1.0), 1.0) for name in _PEAKS}
    shares = {name: value / scale.get(name, 1.0) for name, value in figures.items()}
    device = replace(
        cluster.device,
        peak_flops_per_s={
            d: scale["matmul_efficiency"] * p for d, p in cluster.device.peak_flops_per_s.items()
        },
        memory_bandwidth_bytes_per_s=scale["bandwidth_efficiency"]
        * cluster.device.memory_bandwidth_bytes_per_s,
        calibration={**cluster.device.calibration, **shares},
    )
    links = scale["collective_efficiency"]
    intra = replace(
        cluster.intra, bandwidth_bytes_per_s=links * cluster.intra.bandwidth_bytes_per_s
    )
    if "all_to_all_efficiency" in figures:
        # This share refers to the bandwidth of the same links, which was raised.
        shares["all_to_all_efficiency"] = float(
            np.clip(figures["all_to_all_efficiency"] / links, _LEAST, _MOST)
        )
        device = replace(device, calibration={**device.calibration, **shares})
    return replace(cluster, device=device, intra=intra)


def _fit_products(
    timed: Sequence[tuple[_Row, float]], cluster: Cluster
) -> dict[str, tuple[float, str]]:
    """Efficiency of large products, and the figures that say how much slower small ones are; see
    `Products`.
    """
    some = [(row, seconds) for row, seconds in timed if row[0].kind == "product"]
    if len(some) < 3:
        return {}
    # Only GPUs pad products to tiles.
    tile = _TILE if cluster.device.kind == "gpu" else 1
    names = ["matmul_efficiency", "product_traffic", *(["product_depth"] if tile > 1 else [])]
    # With logarithms relative errors count, so that large products do not dominate the fit.
    measured = np.log([seconds for _, seconds in some])

    def figures(values: NDArray[np.float64]) -> dict[str, float]:
        found = dict(zip(names, map(float, values), strict=True))
        return {**found, **({"product_tile": float(tile)} if tile > 1 else {})}

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        calibrated = _with_figures(cluster, figures(values))
        modelled = [modelled_operator(row[0], row[1], calibrated)[2] for row, _ in some]
        return np.log(modelled) - measured

    low, high = np.full(len(names), _LEAST), np.full(len(names), _MOST)
    # A peak may be understated; the shares cannot exceed 1.
    high[0] = _HIGHEST
    start = np.full(len(names), 0.5)
    if tile > 1:
        low[2], high[2], start[2] = 0.0, 4096.0, 128.0
    found = least_squares(residuals, start, bounds=(low, high), loss="soft_l1")
    source = f"{len(some)} products of {_where(some)}"
    return {name: (value, source) for name, value in figures(found.x).items()}


def _fit_traffic(
    timed: Sequence[tuple[_Row, float]], cluster: Cluster
) -> dict[str, tuple[float, str]]:
    some = [(row, seconds) for row, seconds in timed if row[0].kind == "traffic"]
    if len(some) < 2:
        return {}
    _, slope, _ = _line(some)
    share = 1 / slope / cluster.device.memory_bandwidth_bytes_per_s
    return {
        "bandwidth_efficiency": (
            _share([share], _HIGHEST),
            f"a line through elementwise traffic of {_where(some)}",
        )
    }


def _fit_collectives(
    timed: Sequence[tuple[_Row, float]], cluster: Cluster
) -> dict[str, tuple[float, str]]:
    """Shares of the links' bandwidth that collectives reach, and their time to start, from lines
    through the measured sizes.

    The shares relate these lines to those of the cost model with all shares 1: the most that the
    links could do.
    """
    ideal = {
        "collective_efficiency": 1.0,
        "all_to_all_efficiency": 1.0,
        "scatter_gather_share": 1.0,
        "collective_overhead_s": 0.0,
    }
    best = replace(cluster, device=replace(cluster.device, calibration=ideal))
    groups: defaultdict[tuple[str, str, tuple[int, ...]], list[tuple[_Row, float]]] = defaultdict(
        list
    )
    for row, seconds in timed:
        if row[0].kind in COLLECTIVES:
            groups[row[0].kind, row[1].mesh, row[0].axes].append((row, seconds))
    shares: defaultdict[str, list[float]] = defaultdict(list)
    overheads = []
    for (kind, *_), some in groups.items():
        if len({row[0].sizes[0] for row, _ in some}) < 2:
            continue
        sizes, slope, start = _line(some)
        (least, _), (most, _) = some[sizes.argmin()], some[sizes.argmax()]
        _, _, least_s = modelled_operator(least[0], least[1], best)
        _, _, most_s = modelled_operator(most[0], most[1], best)
        fastest = (most_s - least_s) / (sizes.max() - sizes.min())
        # A line without slope shows no limit of bandwidth, so its share is the highest.
        shares[kind].append(fastest / slope if slope > 0 else _MOST)
        overheads.append(max(start - (least_s - fastest * sizes.min()), 0.0))
    figures: dict[str, tuple[float, str]] = {}
    if not shares:
        return figures
    of = _where(list(itertools.chain(*groups.values())))
    source = f"lines through collectives of {of}"
    rings = shares["all-reduce"] or shares["collective-permute"]
    if rings:
        figures["collective_efficiency"] = _share(rings, _HIGHEST), source
        gathers = [*shares["all-gather"], *shares["reduce-scatter"]]
        if gathers:
            figures["scatter_gather_share"] = (
                _share([_share(gathers, _HIGHEST) / _share(rings, _HIGHEST)]),
                source,
            )
    if shares["all-to-all"]:
        figures["all_to_all_efficiency"] = _share(shares["all-to-all"], _HIGHEST), source
    figures["collective_overhead_s"] = float(np.median(overheads)), source
    return figures


def _line(some: Sequence[tuple[_Row, float]]) -> tuple[NDArray[np.float64], float, float]:
    """Sizes of operators, and the line through their seconds: by its slope and its start."""
    sizes = np.array([row[0].sizes[0] for row, _ in some], np.float64)
    return sizes, *fit_line(sizes, np.array([seconds for _, seconds in some]))


def _share(shares: Sequence[float], most: float = _MOST) -> float:
    return float(np.clip(np.median(shares), _LEAST, most))


def _where(some: Sequence[tuple[_Row, float]]) -> str:
    return ", ".join(sorted({f"{key.num_devices} x {key.device}" for (_, key, _), _ in some}))


def _errors(
    timed: Sequence[tuple[_Row, float]], before: Cluster, after: Cluster
) -> list[dict[str, Any]]:
    found: defaultdict[str, list[list[float]]] = defaultdict(list)
    for (operator, key, _), seconds in timed:
        if operator == LAUNCH:
            continue
        both = [modelled_operator(operator, key, cluster)[2] for cluster in (before, after)]
        found[operator.kind].append([abs(modelled / seconds - 1) for modelled in both])
    rows = []
    for kind, errors in sorted(found.items()):
        old, new = np.median(errors, axis=0).tolist()
        rows.append({"table": kind, "sizes": len(errors), "before": old, "after": new})
    return rows


def to_toml(fit: Fit) -> str:
    """A cluster file with the fitted figures, which `Cluster.load` reads."""
    cluster, device = fit.cluster, fit.cluster.device
    plain = replace(device, calibration={})
    lines = [
        "# Written by aliquot profile fit: figures fitted to measured operators.",
        "",
        "[cluster]",
    ]
    lines += [f"name = {_text(cluster.name)}"]
    known = DEVICES.get(device.name) == plain
    lines += [f"device = {_text(device.name)}"] if known else []
    lines += [f"hosts = {cluster.num_hosts}", f"devices_per_host = {cluster.devices_per_host}"]
    if not known:
        peaks = ", ".join(f"{dtype} = {peak!r}" for dtype, peak in device.peak_flops_per_s.items())
        lines += ["", "[device]", f"name = {_text(device.name)}", f"kind = {_text(device.kind)}"]
        lines += [
            f"memory = {device.memory_bytes}",
            f"memory_bandwidth = {device.memory_bandwidth_bytes_per_s!r}",
        ]
        lines += [f"source = {_text(device.source)}", f"peak = {{ {peaks} }}"]
    for name, link in (("intra", cluster.intra), ("inter", cluster.inter)):
        lines += [
            "",
            f"[{name}]",
            f"latency = {link.latency_s!r}",
            f"bandwidth = {link.bandwidth_bytes_per_s!r}",
        ]
        if name == "intra" and cluster.wires:
            rows = ", ".join(f"[{', '.join(map(repr, row))}]" for row in cluster.wires)
            lines.append(f"wires = [{rows}]")
    lines += ["", "[calibration]"]
    for name in CALIBRATED:
        if name in fit.figures:
            row = fit.figures[name]
            value = row["value"]
            figure = float(f"{value:.4g}") if math.isfinite(value) else value
            lines += [
                f"# {row['source']}; {row['before']:.4g} before",
                f"{name} = {figure!r}",
            ]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
