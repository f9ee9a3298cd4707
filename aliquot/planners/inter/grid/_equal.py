"""`EqualStages`: a given number of stages with equally many layers, or with given ones, and the
given degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....core import InputError
from ....cost import AbstractChain, ChainPlan
from ....plans import GIVEN_LAYOUT
from ..._helper import HelperProcess
from .._base import NO_LIMITS, AbstractInter, StageLimits, check_chains
from .._simulated import fastest, simulated, worth_simulating
from ._grid import GRID_SCHEDULE, layer_starts, layouts, nothing_fits


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

    @property
    def of_whole_layers(self) -> bool:
        return True

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
        plans = [
            (plan, chain)
            for chain in chains
            for plan in layouts(chain, self._schedule, self.chunks, self.stage_layers)
            if self._is_asked_for(plan, chain)
        ]
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
