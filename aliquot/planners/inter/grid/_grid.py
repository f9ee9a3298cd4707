"""`Grid`: the same degrees of data, tensor and pipeline parallelism everywhere, as experts set them by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....core import InfeasibleError, InputError, format_bytes
from ....cost import Chain, ChainPlan, StageChoice, Stretches, find_stage_faults, judge_stages
from .._base import AbstractInter, check_chains
from .._simulated import fastest, simulated, worth_simulating

_SCHEDULE = "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(AbstractInter):
    """Megatron-LM's way: dp x tp x pp, every stage with the same option and as many units as the others, 1f1b.

    All options that state `dp` and `tp` are tried, recomputing or not, with every number of micro-batches given. Where
    the units cannot be dealt out equally, later stages have one more. It proves nothing: a baseline.

    Attributes:
        simulated: how many of the best plans by closed form are simulated; the fastest of them is the answer.

    Reference: Narayanan et al., Efficient large-scale language model training on GPU clusters using Megatron-LM, 2021.
    """

    simulated: int = 3

    def solve(self, chains: Sequence[Chain]) -> ChainPlan:
        """See `AbstractInter.solve`."""
        check_chains(chains)
        plans = [(plan, chain) for chain in chains for plan in layouts(chain)]
        if not plans:
            chain = chains[0]
            raise InputError(
                f"None of the {len(chain.options)} options forms a grid over {chain.num_hosts}x{chain.devices_per_host} "
                f"devices with {chain.num_units} units.\n"
                "  A grid wants options that state their degrees dp and tp, whose product divides the number of devices."
            )
        fitting = [(plan, chain) for plan, chain in plans if plan.peak_bytes <= chain.memory_limit_bytes]
        fitting.sort(key=lambda found: found[0].closed_form_s)
        best = fastest([simulated(chains, plan) for plan in worth_simulating(fitting, max(self.simulated, 1))])
        if best is None:
            raise _nothing_fits(plans)
        return best


def layouts(chain: Chain) -> Iterator[ChainPlan]:
    """Every regular plan that can run, whatever its memory."""
    tables = Stretches.of(chain)
    for k, option in enumerate(chain.options):
        if option.dp is None or option.tp is None:
            continue
        size = option.num_devices
        count, rest = divmod(chain.num_devices, size)
        if rest or count > chain.num_units:
            continue
        edges = [stage * chain.num_units // count for stage in range(count + 1)]
        stages = [
            StageChoice(first_unit=first, last_unit=last, option=k, first_device=stage * size)
            for stage, (first, last) in enumerate(zip(edges, edges[1:]))
        ]
        if not find_stage_faults(chain, stages, _SCHEDULE, check_memory=False, tables=tables):
            yield judge_stages(chain, stages, _SCHEDULE, tables=tables)


def _nothing_fits(plans: Sequence[tuple[ChainPlan, Chain]]) -> InfeasibleError:
    plan, chain = min(plans, key=lambda found: found[0].peak_bytes)
    option = chain.options[plan.stages[0].option]
    k = max(range(len(plan.figures)), key=lambda k: plan.figures[k].peak_bytes)
    figures = plan.figures[k]
    parts = {
        "state": figures.state_bytes,
        "activations in flight": figures.held_bytes,
        "working memory": figures.working_bytes,
    }
    listed = ", ".join(f"{format_bytes(v)} {name}" for name, v in parts.items())
    return InfeasibleError(
        f"No grid fits {chain.num_hosts}x{chain.devices_per_host} devices ({format_bytes(chain.memory_limit_bytes)} "
        f"usable on each).\n"
        f"  The smallest, {len(plan.stages)} stages of {option.name} with {plan.num_micro_batches} micro-batches, needs "
        f"{format_bytes(figures.peak_bytes)} on stage {k}: {listed}.\n"
        "  It could fit with stages that differ (StageDP), options that recompute or split more, or more micro-batches.",
        required_bytes=int(figures.peak_bytes),
        available_bytes=int(chain.memory_limit_bytes),
        parts=parts,
    )
