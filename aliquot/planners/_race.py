"""Search several meshes for one best decision: bounds of all first, then branching in their order, pruning by the best.

What cannot be better than the best by more than the accepted gap is not looked into. Meshes of one axis come first and are
solved at once: they are small, and what fits on them limits what the others need consider. Relaxations of those are solved in
threads of their own, while further meshes are priced; nothing depends on which of them ends first.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import LogicalMesh
from ..core import InfeasibleError, format_bytes
from ..cost import Priced, Problem, known_memory, peak_memory
from ._base import Candidate, Decision, Interrupted, Progress
from ._neighbourhood import FEW_AXES
from .intra.ilp import Search, Solution


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One thing to try: a method's name, a priced problem, and the choices that the method leaves open."""

    name: str
    priced: Priced
    allowed: Sequence[NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How hard to try: accepted relative gap, and nodes of a branch-and-bound tree for each mesh."""

    relative_gap: float = 1e-3
    node_limit: int = 2000


def race(
    problem: Problem,
    entries: Iterable[Entry],
    *,
    method: str,
    planner: str,
    limits: Limits,
    exact_space: bool,
    expected: int = 1,
    progress: Progress | None = None,
) -> Decision:
    """The best decision among all entries, with a bound that holds for all of them.

    Args:
        entries: may be priced as they are asked for; `expected` is about how many there are.
        exact_space: whether the entries span a space whose bound is worth stating (a fixed method's is not).

    Raises:
        InfeasibleError: no entry fits in memory; says the smallest found and what would make it fit.
        Interrupted: on Ctrl-C, with the best so far.
    """
    runners: list[_Runner] = []
    best: tuple[_Runner, Solution] | None = None
    report = progress or (lambda what, done, of: None)
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        coming: Iterator[Entry] = iter(entries)
        while (entry := next(coming, None)) is not None:
            k = len(runners)
            report(f"{entry.name} on {entry.priced.mesh}", k, max(expected, k + 1))
            ceiling_s = best[1].step_time_s if best else np.inf
            runners.append(runner := _Runner.start(entry, problem, limits, pool, ceiling_s))
            if goes_first(entry.priced.mesh):
                ahead = _priced_meanwhile(coming, pool.submit(runner.bound, _cutoff_s(best and best[1], limits)))
                coming, best = itertools.chain(ahead, coming), _better(best, runner)
        waiting = sorted((r for r in runners if not r.outcome), key=lambda r: r.first.result() or 0.0)
        for runner in waiting:
            # What fits as it is limits how far the bounds of the others are lifted.
            runner.bound(-np.inf)
            best = _better(best, runner)
        cutoff_s = _cutoff_s(best and best[1], limits)
        for runner, lifted in [(r, pool.submit(r.bound, cutoff_s)) for r in waiting]:
            lifted.result()
            best = _better(best, runner)
        for runner in sorted((r for r in runners if r.bound_s is not None), key=lambda r: r.bound_s or 0.0):
            report(f"{runner.entry.name} on {runner.entry.priced.mesh}", len(runners), len(runners))
            found = runner.finish(best and best[1], _cutoff_s(best and best[1], limits))
            if found and (best is None or found.step_time_s <= best[1].step_time_s):
                best = runner, found
    except KeyboardInterrupt as error:
        best = best or _salvage(runners)
        decision = (
            _decision(best, runners, problem, method, planner, exact_space, "interrupted", limits) if best else None
        )
        raise Interrupted(decision) from error
    finally:
        pool.shutdown(cancel_futures=True)
    if best is None:
        raise _infeasible(problem, runners, method)
    return _decision(best, runners, problem, method, planner, exact_space, best[1].status, limits)


def goes_first(mesh: LogicalMesh) -> bool:
    """Whether a search on this mesh ends before others begin, to which what it finds is a ceiling.

    One axis makes small programs. Hosts by devices leaves fewer dims without a split than one long axis, and often fits where
    that does not.
    """
    return len(mesh.shape) == 1 or mesh.shape == (mesh.cluster.num_hosts, mesh.cluster.devices_per_host)


def _priced_meanwhile(coming: Iterator[Entry], work: Future[None]) -> list[Entry]:
    """Entries that are priced until a piece of work is done, which is waited for; prices depend on nothing else."""
    ahead = []
    try:
        while not work.done() and (entry := next(coming, None)) is not None:
            ahead.append(entry)
    finally:
        work.result()
    return ahead


def _better(best: tuple[_Runner, Solution] | None, runner: _Runner) -> tuple[_Runner, Solution] | None:
    if runner.rounded and (best is None or runner.rounded.step_time_s < best[1].step_time_s):
        return runner, runner.rounded
    return best


def _salvage(runners: Sequence[_Runner]) -> tuple[_Runner, Solution] | None:
    """The best rounding of the first relaxation and of those begun since."""
    for k, runner in enumerate(runners):
        if not runner.outcome and (k == 0 or not runner.first.cancel()):
            runner.bound(-np.inf)
    rounded = [(r, r.rounded) for r in runners if r.rounded is not None]
    return min(rounded, key=lambda found: found[1].step_time_s, default=None)


def _cutoff_s(best: Solution | None, limits: Limits) -> float:
    return best.step_time_s / (1 + limits.relative_gap) if best else np.inf


@dataclass(slots=True, kw_only=True, eq=False)
class _Runner:
    entry: Entry
    search: Search
    first: Future[float | None]
    bound_s: float | None = None
    rounded: Solution | None = None
    found: Solution | None = None
    outcome: str = ""

    @classmethod
    def start(
        cls, entry: Entry, problem: Problem, limits: Limits, pool: ThreadPoolExecutor, ceiling_s: float
    ) -> _Runner:
        search = Search(
            entry.priced,
            entry.allowed,
            limit_bytes=problem.memory_limit_bytes,
            relative_gap=limits.relative_gap,
            node_limit=limits.node_limit,
            ceiling_s=ceiling_s,
        )
        return cls(entry=entry, search=search, first=pool.submit(search.start))

    def bound(self, cutoff_s: float) -> None:
        """The relaxation with its memory rows, and its rounding."""
        self.first.result()
        self.bound_s = self.search.relax(cutoff_s)
        self.rounded = self.search.rounded() if self.bound_s is not None else None
        self.outcome = "does not fit" if self.bound_s is None else "bounded"

    def finish(self, best: Solution | None, cutoff_s: float) -> Solution | None:
        """Look for something better than `best` by more than the gap; None if there is nothing."""
        assert self.bound_s is not None
        if self.bound_s >= cutoff_s:
            self.outcome = "pruned by its bound" if best is not self.rounded else "within the gap of its bound"
            return None
        self.found = self.search.branch(cutoff_s)
        self.bound_s = self.search.lower_bound_s
        self.outcome = self.found.status if self.found else "pruned by its bound"
        return self.found


def _decision(
    best: tuple[_Runner, Solution],
    runners: Sequence[_Runner],
    problem: Problem,
    method: str,
    planner: str,
    exact_space: bool,
    status: str,
    limits: Limits,
) -> Decision:
    runner, solution = best
    bounds = [r.bound_s for r in runners if r.bound_s is not None]
    complete = exact_space and status != "interrupted"
    bound = min([*bounds, solution.step_time_s]) if complete else None
    space = ""
    if bound is not None and status in ("optimal", "optimal within the gap", "rounded"):
        gap = solution.step_time_s - bound
        small = gap <= limits.relative_gap * bound + 1e-9 * solution.step_time_s
        status = "optimal" if gap <= 1e-9 * bound else "optimal within the gap" if small else status
    if complete:
        space = "gap_within_folded_space" if problem.nodes.folded else "all copies of all layers"
        if any(len(r.entry.priced.mesh.shape) > FEW_AXES for r in runners):
            space = "gap_within_neighbourhood"
    return Decision(
        method=method,
        planner=planner,
        priced=runner.entry.priced,
        picks=solution.picks,
        step_time_s=solution.step_time_s,
        lower_bound_s=bound,
        bound_holds_for=space,
        status=status,
        candidates=tuple(
            Candidate(
                name=r.entry.name,
                mesh=_mesh_name(r.entry.priced.mesh),
                lower_bound_s=r.bound_s,
                step_time_s=(r.found or r.rounded).step_time_s if (r.found or r.rounded) else None,  # type: ignore[union-attr]
                outcome=r.outcome,
            )
            for r in runners
        ),
    )


def _mesh_name(mesh: LogicalMesh) -> str:
    return "x".join(str(n) for n in mesh.shape)


def _infeasible(problem: Problem, runners: Sequence[_Runner], method: str) -> InfeasibleError:
    """The answer when nothing fits: the smallest plan, its parts, and what would make it fit."""
    smallest: tuple[float, dict[str, float], _Runner] | None = None
    # On few axes that is found soon, and they split as far as many do.
    axes = min(len(runner.entry.priced.mesh.shape) for runner in runners)
    for runner in (r for r in runners if len(r.entry.priced.mesh.shape) == axes):
        picks = runner.search.least_memory()
        peak, _, parts = peak_memory(known_memory(runner.entry.priced, picks), runner.entry.priced, picks)
        if smallest is None or peak < smallest[0]:
            smallest = peak, parts, runner
    assert smallest is not None
    peak, parts, runner = smallest
    limit = problem.memory_limit_bytes
    said = f"No plan of method {method} fits"
    if any(r.search.gave_up for r in runners):
        said = f"Within the node limit of the search no plan of method {method} was found that fits"
    listed = ", ".join(f"{format_bytes(v)} {k}" for k, v in list(parts.items())[:5])
    return InfeasibleError(
        f"{said} {problem.cluster.name} ({format_bytes(limit)} usable on each device).\n"
        f"  The smallest found, on a mesh {_mesh_name(runner.entry.priced.mesh)}, needs {format_bytes(peak)}: "
        f"{listed}.\n"
        f"  {_remedy(problem, peak, parts, limit, method)}",
        required_bytes=int(peak),
        available_bytes=int(limit),
        parts=parts,
    )


def _remedy(problem: Problem, peak: float, parts: dict[str, float], limit: float, method: str) -> str:
    """What would make it fit."""
    fixed = sum(v for k, v in parts.items() if k in ("parameters", "optimizer state", "gradients", "other state"))
    moving = peak - fixed
    advice = []
    if fixed < limit and moving > 0:
        factor = 2
        while fixed + moving / factor > limit and factor < 1024:
            factor *= 2
        advice.append(f"{problem.num_micro_batches * factor} micro-batches (now {problem.num_micro_batches})")
    if method in ("dp", "zero2"):
        advice.append("method zero3, shard or auto, which split parameters too")
    if method != "dp":
        # With plain data parallelism every device holds the whole state, however many there are.
        devices = problem.cluster.num_devices
        needed = int(np.ceil(devices * peak / limit))
        advice.append(f"about {max(needed, devices + 1)} such devices (now {devices})")
    return "It could fit with " + ", or ".join(advice) + "."
