"""Search over several meshes for the best decision: first a lower bound for each, then a full
search of each in the order of these bounds, pruned by the incumbent.

A mesh is pruned if its bound shows that it cannot beat the incumbent by more than the accepted gap.
Meshes of one axis are solved first: their programs are small, and their solutions are upper bounds
for the others. First bounds are computed in threads while further meshes are priced; no result
depends on which thread ends first.

Each mesh is an `Entry`, and a `_Runner` takes it through the race: `start` (first bound), `bound`
(bound under the memory limit, first solution), `finish` (improvement). See `AbstractSearch`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ..cluster import LogicalMesh
from ..core import InfeasibleError, InputError, counted, format_bytes, format_seconds
from ..cost import Problem
from ..plans import GIVEN_LAYOUT, name_of_part
from ._advice import what_may_fit
from ._base import Candidate, Decision, Interrupted, Progress, StageDecision, TooSlowError
from ._neighbourhood import FEW_AXES
from ._quick_bounds import never_fits
from .intra import AbstractIntra, AbstractSearch, IntraSolution, NotSearched, Space, TooLarge

_SLOWER = "slower"
_NO_BETTER = "no faster by more than the gap"
_AS_FAST = "as fast as the chosen"
_BEST = "best without a pipeline"
_GAVE_UP = "work limit reached"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A participant of the race: the choices on a mesh, and the planner that chooses among them.

    Attributes:
        notes: for a plan that it makes.
        growing_axis: the axis of the mesh that more devices would lengthen.
    """

    space: Space | TooLarge
    intra: AbstractIntra
    notes: tuple[str, ...] = ()
    growing_axis: int = 0

    @property
    def mesh(self) -> LogicalMesh:
        """The mesh of the space."""
        return self.space.mesh


RaceInParts: TypeAlias = Generator[Decision | None, float, Decision]
"""A race that may pause once, if memory makes it long, and yields its best decision so far: other
plans, such as pipelines, may be found sooner. It is sent the step time to beat from then on."""


# Of two ways to sum gradients, the one that holds this many times the memory of the other must be
# faster by this share.
_MUCH_MEMORY = 1.25
_MUCH_FASTER = 0.02


def goes_first(mesh: LogicalMesh) -> bool:
    """True if a mesh is solved before others begin, so that its result is an upper bound for them.

    These are meshes of one axis, whose integer programs are small, and the mesh of hosts by
    devices, which divides more dims evenly than one long axis and often fits where that does not.
    """
    return len(mesh.shape) == 1 or mesh.shape == (
        mesh.cluster.num_hosts,
        mesh.cluster.devices_per_host,
    )


def _priced_meanwhile(coming: Iterator[Entry], work: Future[None]) -> list[Entry]:
    """Take entries from `coming`, which prices them, while `work` runs; returns them once it is
    done.
    """
    ahead = []
    try:
        while not work.done() and (entry := next(coming, None)) is not None:
            ahead.append(entry)
    finally:
        # An error of the work is raised here, also after Ctrl-C.
        work.result()
    return ahead


def _better(
    best: tuple[_Runner, IntraSolution] | None, runner: _Runner
) -> tuple[_Runner, IntraSolution] | None:
    """The faster of the best solution so far and the first solution of a runner."""
    if runner.incumbent and (best is None or runner.incumbent.step_time_s < best[1].step_time_s):
        return runner, runner.incumbent
    return best


def _salvage(runners: Sequence[_Runner]) -> tuple[_Runner, IntraSolution] | None:
    """The best solution to hand over after Ctrl-C: among the first solutions of the first entry and
    of all others whose first bound is done or in progress.
    """
    for k, runner in enumerate(runners):
        # First bounds that no thread has begun are cancelled, so that the race ends soon.
        if not runner.outcome and (k == 0 or not runner.first_bound_s.cancel()):
            runner.bound(-np.inf)
    incumbents = [(r, r.incumbent) for r in runners if r.incumbent is not None]
    return min(incumbents, key=lambda pair: pair[1].step_time_s, default=None)


@dataclass(slots=True, kw_only=True, eq=False)
class _Runner:
    """An entry in the race, and the state of its search.

    Attributes:
        first_bound_s: the bound of its relaxation, from a thread; see `AbstractSearch.start`.
        bound_s: the bound under the memory limit; None before `bound`, or if nothing fits.
        incumbent: the first solution that fits.
        improved: a better solution, from `finish`.
        outcome: the result in words, as plans list it; empty before `bound`.
    """

    entry: Entry
    search: AbstractSearch
    first_bound_s: Future[float | None]
    bound_s: float | None = None
    incumbent: IntraSolution | None = None
    improved: IntraSolution | None = None
    outcome: str = ""

    @classmethod
    def start(
        cls,
        entry: Entry,
        problem: Problem,
        pool: ThreadPoolExecutor,
        ceiling_s: float,
        notes: dict[str, Any],
        faster_than_s: float = math.inf,
    ) -> _Runner:
        begin = functools.partial(
            entry.intra.begin,
            problem,
            memory_limit_bytes=problem.memory_limit_bytes,
            ceiling_s=ceiling_s,
            notes=notes,
        )
        space = entry.space
        search: AbstractSearch
        if isinstance(space, TooLarge):
            search = NotSearched(space, begin, None)
        elif math.isfinite(faster_than_s) and (least_s := _least_s(space)) >= faster_than_s:
            is_too_large = never_fits(problem, space.priced.use, space.choices, space.allowed)
            search = NotSearched(space, begin, None if is_too_large else least_s)
        else:
            search = begin(space)
        return cls(entry=entry, search=search, first_bound_s=pool.submit(search.start))

    @property
    def solution(self) -> IntraSolution | None:
        """The best solution so far."""
        return self.improved or self.incumbent

    def is_open(self, cutoff_s: float) -> bool:
        """True if this entry may still have a solution below `cutoff_s`, better than its first."""
        if self.bound_s is None or self.bound_s >= cutoff_s:
            return False
        return self.incumbent is None or self.incumbent.status != "optimal"

    def bound(self, cutoff_s: float) -> None:
        """Find a bound under the memory limit, raised no further than to `cutoff_s` (minus
        infinity: not raised at all), and a first solution.
        """
        self.first_bound_s.result()
        self.bound_s = self.search.bound(cutoff_s)
        self.incumbent = self.search.incumbent() if self.bound_s is not None else None
        self.outcome = "does not fit" if self.bound_s is None else "not searched to the end"

    def finish(self, best: IntraSolution | None, cutoff_s: float) -> IntraSolution | None:
        """Search for a solution below `cutoff_s`; None if there is none."""
        assert self.bound_s is not None
        if self.bound_s >= cutoff_s:
            is_best = best is not None and best is self.incumbent
            self.outcome = "optimal within the gap" if is_best else _SLOWER
            return None
        self.improved = self.search.improve(cutoff_s)
        self.bound_s = self.search.lower_bound_s
        self.outcome = _GAVE_UP if self.search.gave_up else _SLOWER
        if self.improved:
            self.outcome = self.improved.status
        return self.improved

    def outcome_beside(self, winner: _Runner, step_time_s: float) -> str:
        """What became of the entry. Neither the winner nor its equals are listed as slower."""
        if self.outcome != _SLOWER or isinstance(self.search, NotSearched):
            return self.outcome
        if self is winner:
            return _BEST
        is_equal = self.solution is not None and self.solution.step_time_s == step_time_s
        # Without a solution, only a bound is known: it may lie below the best by less than the gap.
        if self.solution is None and self.bound_s is not None and self.bound_s < step_time_s:
            return _NO_BETTER
        return _AS_FAST if is_equal else _SLOWER


def _least_s(space: Space) -> float:
    """A lower bound that needs no search: the cheapest choice of each node, and nothing for what is
    converted between nodes.
    """
    return sum(
        float(np.where(mask, node.exposed_s, np.inf).min())
        for node, mask in zip(space.priced.nodes, space.allowed, strict=True)
    )


def finished(race: RaceInParts) -> Decision:
    """The decision of a race that does not pause."""
    try:
        next(race)
    except StopIteration as end:
        decision: Decision = end.value
        return decision
    raise AssertionError("the race pauses")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Race:
    """A race for the best decision about a problem.

    Attributes:
        method: the name of the method whose plans take part.
        intra: the planner that decides; entries that cannot improve on the best by a larger share
            than its gap are not searched further.
        planner: how plans name it, where they say more than its name.
        states_bound: whether the plan states the lower bound; fixed methods state none.
    """

    problem: Problem
    method: str
    intra: AbstractIntra
    planner: str = ""
    states_bound: bool = False
    progress: Progress | None = None

    def best(self, entries: Iterable[Entry], faster_than_s: float = math.inf) -> Decision:
        """As `in_parts`, without a pause."""
        return finished(self.in_parts(entries, faster_than_s=faster_than_s, pauses=False))

    def best_of_ways(self, entries: Sequence[Entry]) -> Decision:
        """As `best`, among ways to sum the gradients of micro-batches: one that needs much more
        memory than another is not taken for a few milliseconds.
        """
        best = self.best(entries)
        limit_s = best.step_time_s * (1 + _MUCH_FASTER)
        for entry in entries:
            if entry.space.priced is best.picked.priced:
                continue
            try:
                other = self.best([entry], limit_s)
            except (InfeasibleError, TooSlowError):
                continue
            except Interrupted as interrupted:
                raise Interrupted(best) from interrupted
            times = best.picked.memory.peak_bytes / other.picked.memory.peak_bytes
            if other.step_time_s <= limit_s and times > _MUCH_MEMORY:
                passed_over = f"hardly faster, and needs {times:.1f} times the memory"
                candidates = []
                for c in best.candidates:
                    if c.name != entry.space.name:
                        candidates.append(
                            replace(c, outcome=passed_over)
                            if c.step_time_s == best.step_time_s
                            else c
                        )
                return replace(other, candidates=(*other.candidates, *candidates))
        return best

    def in_parts(
        self,
        entries: Iterable[Entry],
        *,
        expected: int = 1,
        faster_than_s: float = math.inf,
        pauses: bool = True,
    ) -> RaceInParts:
        """The best decision among all entries, with a bound that holds for all of them.

        Args:
            entries: may be an iterator that prices them one by one.
            expected: about how many entries there are, for `progress`.
            faster_than_s: entries that cannot take less are not searched further; the answer may
                then be any plan that fits. After a pause it is the time that was sent, and these
                entries are not searched at all.
            pauses: whether the race pauses if memory makes it long.

        Raises:
            InfeasibleError: no entry fits in memory; describes the smallest plan and remedies.
            TooSlowError: no plan that fits was found, and some entry was not searched further
                because it cannot be fast enough.
            Interrupted: on Ctrl-C, with the best decision so far.
        """
        problem = self.problem
        runners: list[_Runner] = []
        notes: dict[str, Any] = {}
        best: tuple[_Runner, IntraSolution] | None = None
        sent_s = math.inf
        report = self.progress or (lambda what, done, of: None)

        def cutoff_s(best: tuple[_Runner, IntraSolution] | None) -> float:
            """The step time that a solution must stay below to be of use."""
            # Improvements within the accepted gap do not count.
            improved_s = best[1].step_time_s / (1 + self.intra.relative_gap) if best else np.inf
            return min(improved_s, faster_than_s, sent_s)

        def unfinished() -> Decision | None:
            return best and self._decision(best, runners, "interrupted")

        # HiGHS releases Python's global lock while it solves, so threads run in parallel.
        pool = ThreadPoolExecutor(max_workers=os.cpu_count())
        try:
            upcoming: Iterator[Entry] = iter(entries)
            while (entry := next(upcoming, None)) is not None:
                k = len(runners)
                report(f"{entry.space.name} on {entry.mesh}", k, max(expected, k + 1))
                # The fastest plan known to fit is an upper bound for this search.
                ceiling_s = min(best[1].step_time_s if best else np.inf, sent_s)
                runner = _Runner.start(entry, problem, pool, ceiling_s, notes, faster_than_s)
                runners.append(runner)
                # The race pauses only after the meshes of one axis: their integer programs are
                # small, and their solutions limit other searches.
                if pauses and goes_first(entry.mesh) and len(entry.mesh.shape) > 1:
                    ahead = _priced_meanwhile(upcoming, pool.submit(runner.bound, -np.inf))
                    upcoming, best = itertools.chain(ahead, upcoming), _better(best, runner)
                    if runner.is_open(cutoff_s(best)):
                        pauses = False
                        sent_s = yield unfinished()
                if goes_first(entry.mesh):
                    ahead = _priced_meanwhile(upcoming, pool.submit(runner.bound, cutoff_s(best)))
                    upcoming, best = itertools.chain(ahead, upcoming), _better(best, runner)
            unsolved = sorted(
                # The meshes with the lowest bounds come first.
                (r for r in runners if not r.outcome),
                key=lambda r: r.first_bound_s.result() or 0.0,
            )
            for runner in unsolved:
                # Bounds are not raised yet: a rounded solution of any mesh limits how far that is
                # useful for all.
                runner.bound(-np.inf)
                best = _better(best, runner)
            if pauses and any(runner.is_open(cutoff_s(best)) for runner in runners):
                sent_s = yield unfinished()
            lift_to_s = cutoff_s(best)
            for runner, lifted in [(r, pool.submit(r.bound, lift_to_s)) for r in unsolved]:
                lifted.result()
                best = _better(best, runner)
            # In the order of their bounds, so that most are pruned without branching.
            for runner in sorted(
                (r for r in runners if r.bound_s is not None), key=lambda r: r.bound_s or 0.0
            ):
                report(
                    f"{runner.entry.space.name} on {runner.entry.mesh}", len(runners), len(runners)
                )
                improved = runner.finish(best and best[1], cutoff_s(best))
                # In a tie the improved solution is taken, because its status says how its search
                # ended.
                if improved and (best is None or improved.step_time_s <= best[1].step_time_s):
                    best = runner, improved
            useless = [
                r for r in runners if isinstance(r.search, NotSearched) and r.bound_s is not None
            ]
            if best is None and useless:
                # One of those that are too slow tells by how much.
                known = min(useless, key=lambda r: r.bound_s or 0.0)
                runner = _Runner.start(known.entry, problem, pool, np.inf, notes)
                runner.bound(-np.inf)
                runners[runners.index(known)], best = runner, _better(best, runner)
                runner.outcome = _SLOWER
        except KeyboardInterrupt as error:
            best = best or _salvage(runners)
            raise Interrupted(unfinished()) from error
        finally:
            pool.shutdown(cancel_futures=True)
        if best is None:
            enough_s = min(faster_than_s, sent_s)
            if any(r.bound_s is not None and r.bound_s >= enough_s for r in runners):
                raise TooSlowError(
                    f"No plan of method {self.method} takes less than {format_seconds(enough_s)}."
                )
            raise self._infeasible(runners)
        return self._decision(best, runners, best[1].status)

    def _decision(
        self, best: tuple[_Runner, IntraSolution], runners: Sequence[_Runner], status: str
    ) -> Decision:
        """The decision of the winner, with the bound of all entries, the status that both prove,
        and all entries as candidates.
        """
        runner, solution, problem = *best, self.problem
        bounds_s = [r.bound_s for r in runners if r.bound_s is not None]
        # An interrupted race has not bounded all entries.
        complete = self.states_bound and status != "interrupted"
        # A bound of zero says that nothing is proved.
        bound_s = min([*bounds_s, solution.step_time_s]) or None if complete else None
        scope = ""
        # The winner's status holds for its own mesh. For all meshes, the gap to their common bound
        # decides; a layout that was given is compared with none.
        if not self.states_bound and status in ("optimal", "optimal within the gap", "rounded"):
            status = GIVEN_LAYOUT
        if bound_s is not None and status in ("optimal", "optimal within the gap", "rounded"):
            gap_s = solution.step_time_s - bound_s
            # The second term allows for rounding errors if bound and step time are nearly equal.
            is_within_gap = gap_s <= self.intra.relative_gap * bound_s + 1e-9 * solution.step_time_s
            # A mesh whose search was given up may have a better solution.
            otherwise = _GAVE_UP if any(r.search.gave_up for r in runners) else "rounded"
            if gap_s <= 1e-9 * bound_s:
                status = "optimal"
            else:
                status = "optimal within the gap" if is_within_gap else otherwise
        if complete:
            scope = (
                "gap_within_folded_space" if problem.nodes.folded else "all copies of all layers"
            )
            scope = runner.entry.intra.bound_holds_for or scope
            if any(len(r.entry.mesh.shape) > FEW_AXES for r in runners):
                scope = "gap_within_neighbourhood"
        return Decision(
            method=self.method,
            planner=self.planner or self.intra.name,
            stages=(StageDecision(problem=problem, picked=solution.picked),),
            step_time_s=solution.step_time_s,
            lower_bound_s=bound_s,
            bound_holds_for=scope,
            status=status,
            candidates=tuple(
                Candidate(
                    name=r.entry.space.name,
                    mesh=str(r.entry.mesh),
                    lower_bound_s=r.bound_s,
                    step_time_s=r.solution.step_time_s if r.solution else None,
                    outcome=r.outcome_beside(runner, solution.step_time_s),
                )
                for r in runners
            ),
            notes=runner.entry.notes,
        )

    def _infeasible(self, runners: Sequence[_Runner]) -> InfeasibleError | InputError:
        """The error if nothing fits. It names the smallest plan, the parts of its memory, and
        remedies.
        """
        problem, method = self.problem, self.method
        # Meshes of few axes split arrays into as many pieces, and their smallest plan is found
        # quickly.
        axes = min(len(runner.entry.mesh.shape) for runner in runners)
        small = [(r, r.search.least_memory()) for r in runners if len(r.entry.mesh.shape) == axes]
        runner, picked = min(small, key=lambda pair: pair[1].memory.peak_bytes)
        peak_bytes, parts = picked.memory.peak_bytes, picked.memory.peak_parts
        limit_bytes = problem.memory_limit_bytes
        gave_up = any(r.search.gave_up for r in runners)
        # There are too few choices, not too little memory: advice on memory would be wrong.
        if peak_bytes <= limit_bytes and not gave_up:
            names = " or ".join(dict.fromkeys(r.entry.intra.name for r in runners))
            return InputError(
                f"{names} has no plan among the choices that method {method} leaves open, though"
                " memory would suffice.\n  Leave more choices open, such as inputs without pinned"
                " splits, or use another planner, such as ILP()."
            )
        claim = f"No plan of method {method} fits"
        if gave_up:
            claim = (
                f"Within the limits of the search no plan of method {method} was found that fits"
            )
        listed = ", ".join(
            f"{format_bytes(v)} {name_of_part(k)}" for k, v in list(parts.items())[:5]
        )
        spaces = [r.entry.space for r in runners]
        changes, remark = what_may_fit(problem, picked, spaces, runner.entry.growing_axis)
        return InfeasibleError(
            f"{claim} {problem.cluster.name} ({format_bytes(limit_bytes)} usable on each device).\n"
            f"  The smallest found, on a mesh {runner.entry.mesh}, needs"
            f" {format_bytes(peak_bytes)} on each: {listed}.{remark}",
            advice=changes,
            required_bytes=int(peak_bytes),
            available_bytes=int(limit_bytes),
            parts=parts,
            found_with=[counted(problem.num_micro_batches, "micro-batch")],
        )
