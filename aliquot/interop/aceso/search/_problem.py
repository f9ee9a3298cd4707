"""Search problems, which are a chain with its measurements and the devices with their memory, and
the results of searches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ....core import InputError, OutOfTime, TimeLimit
from .._chain import OperatorChain
from .._configuration import Configuration, StageConfiguration
from .._database import Database
from .._judge import Judge
from .._performance import Estimate, evaluate_configuration
from ._space import StageSpace, make_space


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProblem:
    """A chain to be cut into stages, with its measurements and devices.

    Attributes:
        chain, database: the operators of the model in order, and their measurements.
        model_name, model_size, settings: copied into configurations.
        num_nodes, gpus_per_node: the devices. No stage spans nodes.
        global_batch: samples in a step.
        micro_batches: sizes of micro-batches to choose from, in samples of all data-parallel ranks.
        memory_limit_mb: MiB that a device may use.
        judge: the performance model.
    """

    chain: OperatorChain
    database: Database
    model_name: str
    model_size: str
    settings: dict[str, object] = field(default_factory=dict)
    num_nodes: int
    gpus_per_node: int
    global_batch: int
    micro_batches: tuple[int, ...]
    memory_limit_mb: float
    judge: Judge
    # Planners that run one after another ask for the same spaces.
    _spaces: dict[int, dict[int, StageSpace]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def max_stages(self) -> int:
        """The most stages of a configuration; Aceso tries no more than 16."""
        return min(self.num_devices, 16, len(self.chain.operators))

    def stage_sizes(self) -> tuple[int, ...]:
        """Numbers of devices that a stage may have: powers of two within a node."""
        return tuple(2**k for k in range(10) if 2**k <= self.gpus_per_node)

    def num_micro_batches(self, micro_batch: int) -> int:
        """Number of micro-batches in a step."""
        return self.judge.num_micro_batches(self.global_batch, micro_batch)

    def in_flight(self, micro_batch: int, behind: int) -> int:
        """Number of micro-batches that a stage holds if so many stages come after it."""
        return self.judge.in_flight(behind, self.num_micro_batches(micro_batch))

    def spaces(self, micro_batch: int) -> dict[int, StageSpace]:
        """Spaces of a stage by number of devices; numbers without measurements are left out."""
        if micro_batch not in self._spaces:
            made = {
                n: make_space(
                    self.chain,
                    self.database,
                    n,
                    micro_batch,
                    gpus_per_node=self.gpus_per_node,
                    judge=self.judge,
                    num_micro_batches=self.num_micro_batches(micro_batch),
                )
                for n in self.stage_sizes()
            }
            self._spaces[micro_batch] = {n: each for n, each in made.items() if each is not None}
        return self._spaces[micro_batch]

    def evaluate(self, configuration: Configuration) -> Estimate:
        """The judge's figures for a configuration."""
        return evaluate_configuration(
            configuration,
            self.chain,
            self.database,
            gpus_per_node=self.gpus_per_node,
            judge=self.judge,
        )

    def configuration(
        self, micro_batch: int, stages: tuple[StageConfiguration, ...]
    ) -> Configuration:
        """A configuration with these stages."""
        return Configuration(
            model_name=self.model_name,
            model_size=self.model_size,
            global_batch=self.global_batch,
            micro_batch=micro_batch,
            stages=stages,
            settings=self.settings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a search.

    Attributes:
        best_ms, bound_ms: iteration time of the best configuration so far, and a lower bound on
            all.
        scored: number of configurations and stages that were judged.
        elapsed_s: seconds since the search began.
    """

    best_ms: float
    bound_ms: float
    scored: int
    elapsed_s: float


OnProgress = Callable[[Progress], None]

MOST_OPERATORS = 1000
"""Chains with more operators are searched for cuts between layers alone, so that tables of all
stretches are small; they are bounded for cuts at any operator all the same."""

BUDGET_SPENT = "the time allowed was up"
"""`SearchResult.ended` of a search that took all the time that it may take."""

INTERRUPTED = "interrupted"
"""`SearchResult.ended` of a search that the user stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best configurations that a search found.

    Attributes:
        best: distinct configurations with their estimates, the fastest first.
        lower_bound_ms: no configuration of `space` is faster; 0 if the planner gives no bound.
        space: the configurations that the bound holds for, in words.
        scored: number of configurations and stages that were judged.
        search_s, best_found_at_s: wall time of the search, and up to its best configuration.
        ended: reason why the search ended.
    """

    best: tuple[tuple[Configuration, Estimate], ...]
    lower_bound_ms: float
    space: str
    scored: int
    search_s: float
    best_found_at_s: float
    ended: str

    @property
    def gap(self) -> float:
        """The most by which the optimum can be faster, as a share of the best time; NaN without a
        bound.
        """
        if not self.best or not self.lower_bound_ms:
            return float("nan")
        return max(1 - self.lower_bound_ms / self.best[0][1].iteration_time_ms, 0.0)


class SearchPlanner(Protocol):
    """A search for configurations."""

    def search(
        self,
        problem: SearchProblem,
        *,
        start: Sequence[Configuration] = (),
        on_progress: OnProgress | None = None,
    ) -> SearchResult:
        """Search from known configurations."""


def limit_of(budget_s: float | None) -> TimeLimit:
    """The time limit of a search that begins now; None for no limit."""
    return TimeLimit() if budget_s is None else TimeLimit(seconds=budget_s)


def why_ended(error: KeyboardInterrupt) -> str:
    """Why a search ended that was stopped."""
    return BUDGET_SPENT if isinstance(error, OutOfTime) else INTERRUPTED


class Incumbents:
    """The best configurations found so far, all distinct, judged in full, and within the memory
    limit.
    """

    def __init__(self, problem: SearchProblem, limit: TimeLimit, *, keep: int = 1) -> None:
        self._problem, self._limit, self._keep = problem, limit, keep
        self._kept: list[tuple[float, Configuration, Estimate]] = []
        self.scored = 0
        self.found_at_s = 0.0

    @property
    def best_us(self) -> float:
        """Iteration time of the best; infinite if there is none."""
        return self._kept[0][0] * 1000 if self._kept else float("inf")

    @property
    def worst_us(self) -> float:
        """Iteration time of the slowest to be kept; infinite while there are fewer."""
        return self._kept[-1][0] * 1000 if len(self._kept) == self._keep else float("inf")

    def offer(self, configuration: Configuration) -> bool:
        """Judge a configuration; True if it is the best so far."""
        self.scored += 1
        estimate = self._problem.evaluate(configuration)
        fits = max(s.memory_mb for s in estimate.stages) <= self._problem.memory_limit_mb + 1e-6
        if not fits or any(configuration == kept for _, kept, _ in self._kept):
            return False
        better = estimate.iteration_time_ms * 1000 < self.best_us * (1 - 1e-12)
        kept = [*self._kept, (estimate.iteration_time_ms, configuration, estimate)]
        # At once, as a search may be stopped between any two lines.
        self._kept = sorted(kept, key=lambda entry: entry[0])[: self._keep]
        if better:
            self.found_at_s = self._limit.elapsed_s
        return better

    def results(self) -> tuple[tuple[Configuration, Estimate], ...]:
        """The configurations, the fastest first."""
        return tuple((configuration, estimate) for _, configuration, estimate in self._kept)


def judge_each(
    problem: SearchProblem,
    configurations: Callable[[Incumbents], Iterable[Configuration]],
    *,
    space: str,
    start: Sequence[Configuration],
    keep: int,
    budget_s: float | None,
    on_progress: OnProgress | None,
) -> SearchResult:
    """A search that judges one configuration after another, without a bound.

    Args:
        configurations: those to judge, given the best so far; it may end where no other can be
            among these.
        space: what they are, in words.
        start: configurations that are known, judged first.
        keep: number of distinct configurations to return.
        budget_s: seconds after which the search ends.
    """
    limit = limit_of(budget_s)
    best = Incumbents(problem, limit, keep=keep)
    ended = "every point of the grid was judged"
    try:
        for configuration in start:
            best.offer(configuration)
        with limit.ringing():
            for configuration in configurations(best):
                limit.check()
                best.offer(configuration)
                if on_progress is not None:
                    on_progress(
                        Progress(
                            best_ms=best.best_us / 1000,
                            bound_ms=0.0,
                            scored=best.scored,
                            elapsed_s=limit.elapsed_s,
                        )
                    )
    except KeyboardInterrupt as error:
        ended = why_ended(error)
    return SearchResult(
        best=best.results(),
        lower_bound_ms=0.0,
        space=space,
        scored=best.scored,
        search_s=limit.elapsed_s,
        best_found_at_s=best.found_at_s,
        ended=ended,
    )


def require_measured(problem: SearchProblem) -> tuple[SearchProblem, tuple[str, ...]]:
    """The problem without micro-batches that cannot be run, and a line for each of these.

    Raises:
        InputError: an operator of the chain was not measured, or no micro-batch can be run.
    """
    database = problem.database
    unknown = sorted({o.name for o in problem.chain.operators} - set(database.operators))
    if unknown:
        more = f" and {len(unknown) - 5} more operators" if len(unknown) > 5 else ""
        raise InputError(
            f"{database.model} has no measurements of {', '.join(unknown[:5])}{more}"
            " of the chain. Profile them, or describe another chain with --chain."
        )
    left_out = []
    usable = []
    for micro_batch in problem.micro_batches:
        if micro_batch > problem.global_batch:
            left_out.append(
                f"micro-batch {micro_batch}: larger than the global batch of {problem.global_batch}"
            )
        elif not problem.spaces(micro_batch):
            measured = ", ".join(map(str, database.micro_batches))
            left_out.append(
                f"micro-batch {micro_batch}: not measured on any rank; measured per rank are"
                f" {measured}"
            )
        else:
            usable.append(micro_batch)
    if not usable:
        raise InputError(
            "None of the micro-batches can be run with these measurements:\n"
            + "\n".join(f"  - {x}" for x in left_out)
        )
    return replace(problem, micro_batches=tuple(usable)), tuple(left_out)


def space_name(problem: SearchProblem) -> str:
    """The configurations that a bound holds for, in words."""
    sizes = ", ".join(map(str, problem.stage_sizes()))
    batches = ", ".join(map(str, problem.micro_batches))
    degrees = "tensor degree, data degree, algorithm and recomputation of each operator"
    if not problem.chain.resharding:
        degrees = (
            "one tensor and data degree for each stage; algorithm and recomputation of each"
            " operator"
        )
    return (
        f"at most {problem.max_stages} stages of {sizes} GPUs within a node, cut at any operator;"
        f" {degrees}; micro-batches of {batches}"
    )
