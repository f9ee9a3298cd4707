"""Do training steps of other packages run in parallel as they are, with the numbers of the plain
step?

Every step of the tables in `_third_party_*.py` under data parallelism and the integer program on
eight virtual CPU devices, whole and in two micro-batches, and as a pipeline where it has layers.
Needs the packages: `pip install '.[third-party]'`; those that are missing are named.

    python benchmarks/third_party_steps.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, use_eight_devices, with_rows

use_eight_devices(fast_code=False)
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["KERAS_BACKEND"] = "jax"

import _third_party_equinox  # noqa: E402, F401
import _third_party_haiku_flax  # noqa: E402, F401
import _third_party_optimizers  # noqa: E402, F401
import jax  # noqa: E402
import numpy as np  # noqa: E402
from _third_party import NUM_STEPS, ROWS, STEPS, ThirdPartyStep  # noqa: E402

import aliquot as aq  # noqa: E402
from aliquot.cluster import Link  # noqa: E402
from aliquot.core import CaptureError  # noqa: E402

_CELLS: dict[str, tuple[Any, int]] = {
    "dp": (aq.DataParallel(), 1),
    "shard": (aq.ShardParallel(), 1),
    "dp, 2 micro-batches": (aq.DataParallel(), 2),
    "shard, 2 micro-batches": (aq.ShardParallel(), 2),
    "pipeline": (aq.PipeshardParallel(num_stages=2), 2),
}
_PACKAGES = (
    "dm-haiku",
    "equinox",
    "diffrax",
    "optimistix",
    "numpyro",
    "keras",
    "distrax",
    "qwix",
    "e3nn-jax",
)
# So slow, and with links so fast, that splitting work on few numbers pays.
_SLOW = replace(
    (_preset := aq.Cluster.preset("8xcpu")),
    device=replace(
        _preset.device,
        peak_flops_per_s={"float64": 1e5, "float32": 1e5},
        memory_bandwidth_bytes_per_s=1e5,
    ),
    intra=Link(latency_s=1e-9, bandwidth_bytes_per_s=1e9),
)
# Below this a leaf is rounding alone, and has no digits to agree in.
_FLOOR = 1e-4


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    report = Report(
        name="third_party_steps",
        question="Training steps of other packages",
        bar=(
            "every step runs under every method that it allows, and every leaf of state and metrics"
            " is within its tolerance (1e-9 unless the table says otherwise) of the plain step's,"
            " relative to the leaf's largest magnitude"
        ),
        method=(
            f"{NUM_STEPS} steps on {ROWS} examples in float64, from one state over the same"
            " batches, on eight virtual CPU devices that are planned for as slow ones with fast"
            " links, so that small arrays are split; the largest relative difference of any leaf"
            " of any result. A dash: not asked for, as the step has no layers for a pipeline."
            " Independent: under `micro_batch_semantics='independent'`, as a loop ends when its"
            f" examples are done. Leaves below {_FLOOR:g} are measured against that. One run each."
        ),
    )
    journal = Journal(chosen.journal)
    names = [name for name in STEPS if chosen.only in name]
    names = names[::6] if chosen.quick else names
    missing = sorted({module for name in names for module in STEPS[name].missing()})
    every = [
        journal.row(name, functools.partial(_row, name))
        for name in names
        if not STEPS[name].missing()
    ]
    rows = [row for row in every if "plain" not in row]
    report.summary["steps"] = len(rows)
    report.summary["runs equal to the plain step"] = sum(
        _is_equal(row[cell]) for row in rows for cell in _CELLS
    )
    report.summary["runs that the step's mathematics refuse"] = _count(rows, "refused")
    report.summary["runs that differ"] = _count(rows, "DIFFERS")
    report.summary["runs that fail"] = _count(rows, "FAILS")
    report.summary["packages"] = ", ".join(map(_version, _PACKAGES))
    report.summary["left out, as not installed"] = ", ".join(missing) or "none"
    report.tables = {
        "Steps": rows,
        "Steps that fail without aliquot, too": [row for row in every if "plain" in row],
    }
    return report.finish(chosen, met=all(row["met"] for row in rows))


def _count(rows: list[dict[str, Any]], word: str) -> int:
    return sum(str(row[cell]).startswith(word) for row in rows for cell in _CELLS)


def _is_equal(found: Any) -> bool:
    return isinstance(found, float) or str(found).endswith("independent")


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} missing"


def _row(name: str) -> dict[str, Any]:
    started = time.perf_counter()
    row: dict[str, Any] = {"step": name}
    try:
        step = STEPS[name].make()
        wanted = _results(jax.jit(step.fn), step)
    except (
        Exception
    ) as error:  # What other packages raise on a release of JAX that they do not know.
        return {**row, "plain": _line(error)}
    for cell, (method, micro_batches) in _CELLS.items():
        row[cell] = (
            _compare(step, wanted, method, micro_batches)
            if cell != "pipeline" or step.layers
            else "-"
        )
    failed = any(str(row[cell]).startswith(("DIFFERS", "FAILS")) for cell in _CELLS)
    return {
        **row,
        "tolerance": step.tolerance,
        "seconds": round(time.perf_counter() - started, 1),
        "met": not failed,
    }


def _compare(
    step: ThirdPartyStep, wanted: Any, method: Any, micro_batches: int, semantics: str = "exact"
) -> float | str:
    """The largest difference, or what happened instead.

    A loop that ends when all examples of a batch are done may end sooner for a part of them: their
    numbers are the same, but rules cannot tell. Such steps are run under independent semantics, and
    must give the plain step's numbers all the same.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = aq.plan(
                step.fn,
                _copied(step.state),
                step.batches[0],
                cluster=_SLOW,
                method=method,
                num_micro_batches=micro_batches,
                micro_batch_semantics=semantics,
            )
            found = _results(aq.parallelize(step.fn, plan), step)
    except CaptureError as error:
        if step.mixes and micro_batches > 1:
            return f"refused: {step.mixes}"
        if "it ends when the batch says so" in str(error) and semantics == "exact":
            again = _compare(step, wanted, method, micro_batches, "independent")
            return f"{again:.1e}, independent" if isinstance(again, float) else again
        return f"FAILS: {_line(error)}"
    except Exception as error:
        if os.environ.get("TRACE"):
            raise
        return f"FAILS: {_line(error)}"
    difference, path = _largest(found, wanted)
    return difference if difference <= step.tolerance else f"DIFFERS by {difference:.1e} at {path}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".replace("|", "/")


def _copied(tree: Any) -> Any:
    """Arrays of their own, as states are donated."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array | np.ndarray) else x, tree)


def _results(fn: Any, step: ThirdPartyStep) -> list[Any]:
    state, results = _copied(step.state), []
    for batch in step.batches:
        state, metrics = fn(state, batch)
        results.append(jax.tree.map(_on_host, (state, metrics)))
    return results


def _on_host(x: Any) -> Any:
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.array(x)


def _largest(found: Any, wanted: Any) -> tuple[float, str]:
    worst = (0.0, "")
    have = jax.tree.leaves(found)
    want = jax.tree_util.tree_flatten_with_path(wanted)[0]
    for a, (path, b) in zip(have, want, strict=True):
        if b.size:
            x, y = a.astype(np.float64), b.astype(np.float64)
            difference = float(np.abs(x - y).max() / max(np.abs(y).max(), _FLOOR))
            worst = max(
                worst,
                (difference if difference == difference else np.inf, jax.tree_util.keystr(path)),
            )
    return worst


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
