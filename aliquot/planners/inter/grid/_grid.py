"""`Grid` and `EqualStages`: the same degrees of data and tensor parallelism in all stages, searched
for or given, as experts set them by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ....core import InfeasibleError, InputError, counted, format_bytes
from ....cost import (
    AbstractChain,
    ChainPlan,
    StageChoice,
    chain_in_flight,
    find_stage_faults,
    judge_stages,
)
from ....plans import GIVEN_LAYOUT, SCHEDULES, name_of_part
from ..._helper import HelperProcess
from .._base import NO_LIMITS, AbstractInter, StageLimits, check_chains, proposed
from .._less_recomputed import recomputing_less
from .._simulated import fastest, simulated, worth_simulating

GRID_SCHEDULE = "1f1b"
# A numbered module, as layers are named by their parameters: "params.layers[3]", "h_3".
_NUMBERED = re.compile(r"(\S*?)(\d+)\]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(AbstractInter):
    """A regular grid dp x tp x pp as in Megatron-LM: equal stages with the same degrees, scheduled
    by 1f1b.

    All options that state `dp` and `tp` are tried, without recomputation, with it, and with it in
    so many stages as do not fit otherwise, with every number of
    micro-batches given. Stages have equal numbers of layers (see `layer_starts`); where their
    number does not divide the layers, later stages have one more. A baseline: it proves no bound.

    Attributes:
        simulated: the number of best plans by closed form that are simulated; the fastest is the
            answer.

    Reference: Narayanan et al., Efficient large-scale language model training on GPU clusters using
    Megatron-LM, 2021.
    """

    simulated: int = 3

    of_whole_layers = True

    method = "grid"

    @property
    def own_way(self) -> str:
        return f"has a schedule of its own, {GRID_SCHEDULE}"

    def check_limits(self, limits: StageLimits) -> None:
        """A number of stages is kept to."""
        AbstractInter.check_limits(self, replace(limits, num_stages=None))

    def solve(
        self,
        chains: Sequence[AbstractChain],
        *,
        limits: StageLimits = NO_LIMITS,
        helper: HelperProcess | None = None,
        start: ChainPlan | None = None,
    ) -> ChainPlan:
        """It tries every grid and ignores `start`."""
        self.check_limits(limits)
        check_chains(chains)
        every = [(plan, chain) for chain in chains for plan in layouts(chain)]
        plans = [entry for entry in every if limits.num_stages in (None, len(entry[0].stages))]
        if every and not plans:
            known = sorted({len(plan.stages) for plan, _ in every})
            raise InputError(
                f"No grid has {limits.num_stages} stages; there are some of"
                f" {', '.join(map(str, known))}."
            )
        if not plans:
            chain = chains[0]
            raise InputError(
                f"None of the {len(chain.options)} options forms a grid over"
                f" {chain.num_hosts}x{chain.devices_per_host} devices with {chain.num_units}"
                " units.\n  A grid wants options that state their degrees dp and tp, whose product"
                " divides the number of devices."
            )
        fitting = [
            (plan, chain) for plan, chain in plans if plan.peak_bytes <= chain.memory_limit_bytes
        ]
        fitting.sort(key=lambda pair: pair[0].closed_form_s)
        best = fastest(
            [simulated(chains, plan) for plan in worth_simulating(fitting, max(self.simulated, 1))]
        )
        if best is None:
            raise nothing_fits(plans)
        return best


def layouts(
    chain: AbstractChain,
    schedule: str = GRID_SCHEDULE,
    chunks: int = 1,
    stage_layers: Sequence[int] = (),
) -> Iterator[ChainPlan]:
    """All regular plans that can run, with or without enough memory. Those that recompute and fit
    are followed by a plan in which only so many stages recompute as have to.

    Args:
        chunks: stages of each submesh; where layers are too few for that, the last submeshes have
            one less.
        stage_layers: layers of each stage, which make up those of the step; empty for equal stages.
    """
    layers = layer_starts(chain.unit_names)
    for k, option in enumerate(chain.options):
        # Only options that state their degrees form a grid.
        if option.dp is None or option.tp is None:
            continue
        submeshes, remainder = divmod(chain.num_devices, option.num_devices)
        fewest = submeshes if chunks == 1 else submeshes * (chunks - 1) + 1
        # With fewer layers than stages, stages begin at any unit.
        starts = layers if len(layers) >= fewest else range(chain.num_units)
        if remainder or len(starts) < fewest:
            continue
        count = min(submeshes * chunks, len(starts))
        before = [sum(stage_layers[:stage]) for stage in range(len(stage_layers))]
        firsts = before or [stage * len(starts) // count for stage in range(count)]
        edges = [*(starts[first] for first in firsts), chain.num_units]
        stages = _equal_stages(chain, k, edges, schedule, submeshes)
        if stages and not find_stage_faults(
            chain, stages, schedule, num_submeshes=submeshes, check_memory=False
        ):
            plan = judge_stages(chain, stages, schedule, num_submeshes=submeshes)
            yield plan
            yield from recomputing_less(chain, plan)


def layer_starts(unit_names: Sequence[str]) -> Sequence[int]:
    """The units at which layers begin. Modules that are numbered count as layers, as in
    Megatron-LM: what precedes the first, such as an embedding, belongs to it, and what follows a
    layer, such as norm and head, to that layer. Every unit is a layer if no modules are numbered.

    >>> layer_starts(["embed", "layers[0]", "layers[1]", "layers[1]", "layer 4", "norm", "head"])
    [0, 2]
    """
    found = [_NUMBERED.fullmatch(name) for name in unit_names]
    numbers: dict[str, set[str]] = {}
    for match in found:
        if match:
            numbers.setdefault(match[1], set()).add(match[2])
    layers: dict[str, int] = {}
    for unit, match in enumerate(found):
        if match and len(numbers[match[1]]) > 1:
            layers.setdefault(match[0], unit)
    return [0, *list(layers.values())[1:]] if layers else range(len(unit_names))


def _equal_stages(
    chain: AbstractChain, option: int, edges: Sequence[int], schedule: str, submeshes: int
) -> list[StageChoice]:
    """Stages between edges under one option, within the memory limit if possible; none if the
    option cannot run them.
    """
    count = len(edges) - 1
    in_flight = chain_in_flight(schedule, chain.num_micro_batches, count, submeshes)
    placement = SCHEDULES[schedule].placement(count, submeshes)
    size = chain.options[option].num_devices
    stages = []
    for stage, (first, last) in enumerate(zip(edges, edges[1:])):
        choice = proposed(
            chain,
            option,
            first,
            last,
            first_device=placement[stage] * size,
            in_flight=float(in_flight[stage]),
            chunks=-(-count // submeshes),
        )
        if choice is None:
            return []
        stages.append(choice)
    return stages


def nothing_fits(
    plans: Sequence[tuple[ChainPlan, AbstractChain]], what: str = "grid", *, is_given: bool = False
) -> InfeasibleError:
    """The error to raise if all plans need too much memory; describes the smallest plan, but for
    degrees that were given.
    """
    plan, chain = min(plans, key=lambda pair: pair[0].peak_bytes)
    option = chain.options[plan.stages[0].option]
    k = max(range(plan.num_submeshes), key=lambda k: plan.submesh_bytes[k])
    # Grids deal stages out in turn.
    mine = plan.figures[k :: plan.num_submeshes]
    parts = {
        "state": sum(f.state_bytes for f in mine),
        "activations in flight": sum(f.held_bytes for f in mine),
        "working memory": max(f.working_bytes for f in mine),
    }
    listed = ", ".join(f"{format_bytes(v)} {name_of_part(name)}" for name, v in parts.items())
    where = f"stage {k}" if len(mine) == 1 else f"submesh {k}"
    return InfeasibleError(
        f"No {what} fits {chain.num_hosts}x{chain.devices_per_host} devices"
        f" ({format_bytes(chain.memory_limit_bytes)} usable on each).\n  The smallest,"
        f" {counted(len(plan.stages), 'stage')}{'' if is_given else f' of {option.name}'} with"
        f" {counted(plan.num_micro_batches, 'micro-batch')}, needs"
        f" {format_bytes(plan.peak_bytes)} on {where}: {listed}.",
        advice=[
            "stages that differ (StageDP)",
            "options that recompute or split more",
            "more micro-batches",
        ],
        required_bytes=int(plan.peak_bytes),
        available_bytes=int(chain.memory_limit_bytes),
        parts=parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualStages(AbstractInter):
    """Stages of equal depth with given degrees of data and tensor parallelism, 1f1b or, with
    several stages on each submesh, interleaved-1f1b: a layout that is given, not searched.

    As in `Grid`, layers are numbered modules, with what precedes the first and follows the last. If
    the number of stages does not divide the layers, later stages have one more. If there are more
    stages than layers, the last submeshes have one stage less. So many stages recompute as do not
    fit otherwise, and of several numbers of micro-batches the fastest is taken.

    Attributes:
        data, expert, context, tensor: degrees inside each stage.
        num_submeshes: how many submeshes, the pipeline's degree.
        chunks: stages of each.
        stage_layers: layers of each stage in the order of the layers, where they are not equal.
        name: the method's name, as plans show it.
    """

    data: int
    tensor: int
    num_submeshes: int
    chunks: int = 1
    expert: int = 1
    context: int = 1
    stage_layers: tuple[int, ...] = ()
    name: str = "megatron"

    of_whole_layers = True

    @property
    def method(self) -> str:
        return self.name

    @property
    def own_way(self) -> str:
        kind = "given" if self.stage_layers else "equal"
        return f"has {self.num_submeshes * self.chunks} {kind} stages, with {self._schedule}"

    def solve(
        self,
        chains: Sequence[AbstractChain],
        *,
        limits: StageLimits = NO_LIMITS,
        helper: HelperProcess | None = None,
        start: ChainPlan | None = None,
    ) -> ChainPlan:
        """The layout is given, whatever there is to start from."""
        self.check_limits(limits)
        check_chains(chains)
        layers, given = len(layer_starts(chains[0].unit_names)), sum(self.stage_layers)
        if self.stage_layers and given != layers:
            raise InputError(
                f"The stages of {self.name} have {given} layers, and the step can be cut into"
                f" {layers}: give stages that make up {layers} layers."
            )
        plans = []
        for chain in chains:
            for plan in layouts(chain, self._schedule, self.chunks, self.stage_layers):
                if self._is_asked_for(plan, chain):
                    plans.append((plan, chain))
        if not plans:
            raise InputError(self._refusal(chains[0]))
        fitting = [
            (plan, chain) for plan, chain in plans if plan.peak_bytes <= chain.memory_limit_bytes
        ]
        fitting.sort(key=lambda pair: pair[0].closed_form_s)
        best = fastest(
            [simulated(chains, plan) for plan in worth_simulating(fitting, len(fitting))]
        )
        if best is None:
            raise nothing_fits(plans, f"plan of layout {self._degrees}", is_given=True)
        return replace(best, status=GIVEN_LAYOUT)

    @property
    def _schedule(self) -> str:
        return GRID_SCHEDULE if self.chunks == 1 else "interleaved-1f1b"

    @property
    def _degrees(self) -> str:
        expert = f"ep{self.expert}," if self.expert > 1 else ""
        context = f"cp{self.context}," if self.context > 1 else ""
        chunks = f",vpp{self.chunks}" if self.chunks > 1 else ""
        return f"dp{self.data},{expert}{context}tp{self.tensor},pp{self.num_submeshes}{chunks}"

    def _is_asked_for(self, plan: ChainPlan, chain: AbstractChain) -> bool:
        option = chain.options[plan.stages[0].option]
        others = self.expert * self.context * self.tensor
        degrees = option.dp, option.tp, plan.num_submeshes
        return degrees == (self.data, others, self.num_submeshes)

    def _refusal(self, chain: AbstractChain) -> str:
        if self.num_submeshes > chain.num_units == 1:
            return (
                f"{self.num_submeshes} stages were asked for, and no place was found where the step"
                " can be cut into stages: a pipeline needs layers that follow one another, outside"
                " of loops that run them all. If the step accumulates gradients in a loop of its"
                " own, take that loop out and give num_micro_batches (--micro-batches) instead;"
                " otherwise use pp1."
            )
        if self.num_submeshes > chain.num_units:
            return (
                f"{self.num_submeshes} stages were asked for, and the step can be cut into"
                f" {chain.num_units} at most. Use pp{chain.num_units} or fewer."
            )
        most = -(-chain.num_units // self.num_submeshes)
        if self.chunks > most:
            return (
                f"pp{self.num_submeshes},vpp{self.chunks} makes"
                f" {self.num_submeshes * self.chunks} stages, and the step can be cut into"
                f" {chain.num_units} at most, which would leave every submesh a chunk without a"
                f" layer. Use vpp{most} or fewer."
            )
        hosts, per_host = chain.num_hosts, chain.devices_per_host
        return (
            f"{self._degrees} cannot be laid out over"
            f" {hosts}x{per_host} devices: in a pipeline tp must divide the {per_host} devices of a"
            " host, and a stage takes whole hosts or a part of one."
        )
