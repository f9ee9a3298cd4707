"""`MegatronSplit`: the choices of data, expert and tensor parallelism as Megatron-LM computes them;
and when a method of fixed splits sums the gradients of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ....core import InputError, counted, divisors, listing
from ....cost import Problem, enumerate_choices, shards
from ....sharding import Node
from .._base import AbstractIntra, AbstractRule
from ..ilp import ILP
from ._context_split import context_faults, context_split, split_by
from ._fixed import Fixed
from ._restrict import Kinds, kinds_of
from ._state_split import split_state
from ._tensor_split import TensorSplit, expert_split, tensor_split

Ints = NDArray[np.int64]
CONTEXT = "context"
DATA_AXES = ("replica", "data")
MEGATRON_AXES = (*DATA_AXES, "expert", CONTEXT, "tensor")
"""The axes of its meshes, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSplit(AbstractRule):
    """Split the batch over a data axis, the sequence over a context axis and products with weights
    over a tensor axis; another planner decides what is then left.

    Attributes:
        data: devices along the data axes.
        replicas: of these, groups that each share one replica of the state; more than 1 where all
            cannot share it, see `for_step`.
        expert: devices along the expert axis, which splits the experts where these compute, and the
            batch everywhere else.
        context: devices along the context axis, which splits the sequence.
        attention: how attention is computed where the sequence is split: "ring", "gather" or
            "ulysses", see `Megatron`; None for what `rest` finds best.
        tensor: devices along the tensor axis.
        sequence: whether the tensor axis splits the sequence of residual streams and norms, between
            the products that it splits.
        zero_stage: what the data and the context axis split besides batch and sequence: 0 nothing,
            2 optimizer state and gradients, 3 parameters too.
        gathers_once: see `Fixed`.
        rest: the planner that decides what the rule leaves open, such as how temporary values of
            the update are split.
    """

    data: int = 1
    replicas: int = 1
    expert: int = 1
    context: int = 1
    attention: str | None = None
    tensor: int = 1
    sequence: bool = False
    zero_stage: int = 0
    gathers_once: bool = False
    rest: AbstractIntra = field(default_factory=ILP)

    name = "megatron"

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes that split anything; one of a single device where none
        does.
        """
        degrees = self.replicas, self.data // self.replicas, self.expert, self.context, self.tensor
        sizes = zip(MEGATRON_AXES, degrees, strict=True)
        return tuple((name, size) for name, size in sizes if size > 1) or (("data", 1),)

    def choices(self, problem: Problem, axis_names: Sequence[str]) -> list[Ints]:
        """For each node the choices that follow the rule.

        Args:
            axis_names: which axis of the mesh is which of `MEGATRON_AXES`; others split nothing.

        Raises:
            InputError: The batch does not divide.
        """
        kinds = kinds_of(problem)
        place = {name: axis_names.index(name) for name in MEGATRON_AXES if name in axis_names}
        sizes = [dict(self.axes).get(name, 1) for name in axis_names]
        tensor = tensor_split(problem.nodes, kinds, self.tensor if "tensor" in place else 1)
        experts = expert_split(problem.nodes, kinds) if "expert" in place else {}
        tokens = "context" in place or ("tensor" in place and self.sequence)
        tokens_split = context_split(problem.graph, problem.nodes, kinds) if tokens else None
        context = tokens_split if "context" in place else None
        split = tensor.factors if "tensor" in place else {}
        state = kinds.parameters | kinds.update
        chosen = []
        for node in problem.nodes.nodes:
            choices = enumerate_choices(node, sizes)
            if "tensor" in place:
                factors = split.get(node.index, frozenset())
                if self.sequence and tokens_split and node.index in tensor.streams:
                    factors = tokens_split.tokens.get(node.index, frozenset())
                choices = split_by(choices, place["tensor"], factors)
            batch_axes = [place[name] for name in (*DATA_AXES, "expert") if name in place]
            gathered = self.gathers_once and node.index in kinds.cast
            if node.index in experts:
                choices = split_by(choices, place["expert"], {experts[node.index]})
                batch_axes.remove(place["expert"])
            elif gathered and "expert" in place:
                # Casts are gathered once over the axes over which gradients wait, and over this one
                # they would be in each micro-batch.
                choices = split_by(choices, place["expert"], frozenset())
                batch_axes.remove(place["expert"])
            if context is not None and node.index in state:
                # All tokens share parameters, so that ZeRO may shard them over this axis, too.
                batch_axes.append(place["context"])
            elif context is not None:
                factors = context.factors(node.index, self.attention)
                choices = split_by(choices, place["context"], factors)
            chosen.append(self._on_batch_axes(problem, kinds, node, choices, batch_axes, sizes))
        return chosen

    def for_step(self, problem: Problem) -> tuple[MegatronSplit, tuple[str, ...]]:
        """This rule with as many replicas of the state as the dims of the arrays ask for, and
        notes on what the degrees do not split.

        Refuses a step that has nothing for the tensor or the expert axis to split, or whose
        weights, experts, heads or sequence the degrees do not divide.

        Raises:
            InputError: Says what cannot be split, and what to use instead.
        """
        kinds = kinds_of(problem)
        tensor = tensor_split(problem.nodes, kinds, self.tensor)
        experts = expert_split(problem.nodes, kinds) if self.expert > 1 else {}
        if self.tensor > 1 and not tensor.factors:
            raise InputError(
                f"Tensor parallelism of degree {self.tensor} splits pairs of products with weights,"
                " the first along what it makes and the second along what it takes, and"
                f" {problem.graph.name} has no such pair. Use method dp, fsdp or auto."
            )
        if self.expert > 1 and not experts:
            raise InputError(
                f"Expert parallelism of degree {self.expert} splits weights that come once for each"
                f" expert, and {problem.graph.name} has none. Leave ep out, or use method auto."
            )
        self._refuse_what_does_not_divide(problem, kinds, tensor, experts)
        whole = []
        for kept in tensor.kept_whole:
            whole.append(
                f"{kept.label} has {counted(kept.size, 'output feature')}, fewer than tp"
                f" {self.tensor}: it stays whole on each of these devices, and all compute its"
                " products."
            )
        taken = {}
        for n in (*tensor.factors, *experts):
            taken[n] = tensor.factors.get(n, frozenset()) | (
                {experts[n]} if n in experts else set()
            )
        sharded = kinds.split_by_zero(self.zero_stage, gathers_once=self.gathers_once)
        split = split_state(problem, sharded, self.data, beside=self.context, taken=taken)
        replicas = self.data // split.axes[-1]
        # Expert ranks share what is outside of experts, too: more devices than were counted.
        notes = split.notes if self.expert == 1 else ()
        return replace(self, replicas=replicas), (*dict.fromkeys(whole), *notes)

    @property
    def ways_beside_tensor(self) -> int:
        return self.expert * self.context

    def stage_axes(self, shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        data, others = shape
        tensor, rest = divmod(others, self.expert * self.context)
        if rest or data % self.replicas:
            # A mesh that this layout does not use.
            return ("data", data), ("tensor", others)
        sizes = self.replicas, data // self.replicas, self.expert, self.context, tensor
        return tuple(zip(MEGATRON_AXES, sizes, strict=True))

    def stage_choices(
        self, problem: Problem, mesh_shape: tuple[int, ...], data_axes: frozenset[int]
    ) -> list[Ints] | None:
        """Choices of the nodes of a stage: those for its own mesh, none for any other."""
        axes = dict(self.axes)
        # A mesh of other degrees belongs to another layout.
        is_mine = mesh_shape == tuple(axes.values()) and bool(data_axes) == (self.data > 1)
        chosen = self.choices(problem, tuple(axes)) if is_mine else []
        return chosen if all(map(len, chosen)) else []

    def _on_batch_axes(
        self,
        problem: Problem,
        kinds: Kinds,
        node: Node,
        choices: Ints,
        axes: Sequence[int],
        sizes: Sequence[int],
    ) -> Ints:
        """Choices that split the batch, or as a stage of ZeRO does, over the given axes."""
        columns = choices[:, list(axes)]
        batch = problem.nodes.batch_factors[node.index]
        unsplit = (columns == -1).all(axis=1)
        is_parameter, is_update = node.index in kinds.parameters, node.index in kinds.update
        if is_parameter or is_update:
            gathered = self.gathers_once and node.index in kinds.cast
            if self.zero_stage < (3 if is_parameter and not gathered else 2):
                return _rows(choices, unsplit)
            # If two axes split one dim of a vector, its gradient, which one of them splits, would
            # have to move between devices.
            others = np.delete(choices, list(axes), axis=1)
            apart = ~((columns[:, :, None] == others[:, None, :]) & (columns >= 0)[:, :, None]).any(
                axis=(1, 2)
            )
            # Among choices that keep the axes apart, the finest, as ZeRO shards as far as possible.
            pieces = np.where(apart, shards(choices, [True] * len(node.factors), sizes), 0.0)
            return _rows(choices, pieces == pieces.max())
        if not batch:
            return choices if self.zero_stage >= 2 else _rows(choices, unsplit)
        mine = np.isin(columns, list(batch))
        clean = (mine | (columns == -1)).all(axis=1)
        most = clean & (mine.sum(axis=1) == mine[clean].sum(axis=1).max())
        # A batch that only some axes divide would repeat work on the others.
        if node.index in kinds.batch_inputs and not mine[most].all():
            self._refuse_batch(problem, node)
        return _rows(choices, most)

    def _refuse_what_does_not_divide(
        self, problem: Problem, kinds: Kinds, tensor: TensorSplit, experts: dict[int, int]
    ) -> None:
        too_fine = tensor.too_fine
        faults = []
        for fine in too_fine:
            faults.append(
                f"{fine.label}: {fine.size} rows or columns"
                + (
                    f" in {fine.parts} parts that stay together, such as heads,"
                    if fine.parts < fine.size
                    else ""
                )
                + f" cannot be split over tp {self.tensor}"
            )
        counts = sorted(
            {
                problem.nodes.nodes[n].factors[f].size
                for n, f in experts.items()
                if n in kinds.parameters
            }
        )
        for count in counts:
            if count % self.expert:
                faults.append(f"{count} experts cannot be split over ep {self.expert}")
        of_context: list[str] = []
        ranks = self.context * self.tensor
        uneven = [n for n in self._sequences(problem, kinds, tensor) if n % ranks]
        for size in uneven:
            faults.append(
                f"a sequence of {size} cannot be split over {ranks} devices (cp x tp), as sp does"
            )
        if self.context > 1:
            split = context_split(problem.graph, problem.nodes, kinds)
            if not split.tokens:
                raise InputError(
                    f"Context parallelism of degree {self.context} splits the dim of the batch's"
                    f" arrays behind the batch dim, and {problem.graph.name} has none that could"
                    " be. Leave cp out, or use method auto."
                )
            heads_over = {
                n: self.tensor for n in split.heads if split.heads[n] & tensor.factors.get(n, set())
            }
            more, of_context = context_faults(
                split, problem.nodes, self.context, self.attention, heads_over
            )
            faults += more
        if not faults:
            return
        advice = []
        if too_fine:
            common = math.gcd(*(fine.parts for fine in too_fine))
            degrees = divisors(math.gcd(common, self.tensor), most=self.tensor - 1)[1:]
            advice = (
                [f"a tensor degree that divides them, such as tp:{degrees[-1]}"]
                if degrees
                else ["method fsdp or auto"]
            )
            sizes = {fine.size for fine in too_fine}
            # Where widths or heads do not divide either, a larger vocabulary changes nothing.
            if len(sizes) == 1 and all(fine.parts == fine.size for fine in too_fine):
                size = sizes.pop()
                advice.append(
                    f"{size} padded to {-(-size // self.tensor) * self.tensor}, as is usual for"
                    " vocabularies"
                )
        if any(count % self.expert for count in counts):
            common = math.gcd(*counts)
            fitting = [str(n) for n in divisors(common)[1:]]
            advice.append(
                f"an expert degree that divides {common}: {' or '.join(fitting)}"
                if fitting
                else "no ep, as the numbers of experts have no common divisor"
            )
        if uneven:
            advice.append(f"no sp, or sequences of a multiple of {ranks}")
        advice += of_context
        raise InputError(
            listing(
                "This layout does not apply to the step",
                list(dict.fromkeys(faults)),
                f"Use {', or '.join(advice)}.",
            )
        )

    def _sequences(self, problem: Problem, kinds: Kinds, tensor: TensorSplit) -> list[int]:
        """Lengths of the sequences of residual streams that the tensor axis is to split.

        Raises:
            InputError: it is to split some, and there are none.
        """
        if not self.sequence:
            return []
        tokens = context_split(problem.graph, problem.nodes, kinds).tokens
        streams = []
        for n in sorted(tensor.streams):
            for f in tokens.get(n, ()):
                streams.append((n, f))
        if not streams:
            raise InputError(
                "Sequence parallelism (sp) splits residual streams along the dim of the batch's"
                f" arrays behind the batch dim, and {problem.graph.name} has none that could be."
                " Leave sp out."
            )
        return list(dict.fromkeys(problem.nodes.nodes[n].factors[f].size for n, f in streams))

    def _refuse_batch(self, problem: Problem, node: Node) -> None:
        ways = self.data * self.expert
        count = problem.num_micro_batches
        rows = node.factors[next(iter(problem.nodes.batch_factors[node.index]), 0)].size
        per = f" in each of {count} micro-batches" if count > 1 else ""
        raise InputError(
            f"A batch of {rows * count} ({node.label} has {rows} rows{per}) cannot be split over dp"
            f" {ways}. Use a global batch that is a multiple of {ways * count}, or a smaller data"
            " degree."
        )


def _rows(choices: Ints, wanted: NDArray[np.bool_]) -> Ints:
    return np.asarray(choices[wanted], np.int64)


_Rule = TypeVar("_Rule", Fixed, MegatronSplit)


def ways_to_sum(
    rule: _Rule, waiting: Sequence[frozenset[int]], *, splits: bool, repeats: int
) -> Iterator[tuple[frozenset[int], _Rule]]:
    """The ways in which gradients may be summed, each with the axes over which they wait for the
    last micro-batch, and the rule of that way.

    Gradients that wait accumulate whole. If these do not fit, each micro-batch adds to accumulators
    that are sharded; then parameters are not gathered once either.

    Args:
        waiting: axes over which gradients may wait; none if the step cannot.
        splits: whether the method shards gradients where they do not wait.
        repeats: number of micro-batches.
    """
    for axes in waiting:
        yield axes, rule
    if splits or not waiting:
        yield frozenset(), replace(rule, gathers_once=rule.gathers_once and repeats == 1)
