"""Masks over choices: the splits that a fixed method may take.

References: S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models", SC 2020 (stages 2 and 3); Y. Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2
(sharding within a group, replicating across).
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....core import InputError, counted, divisors, nearest, shortened
from ....cost import Priced, Problem, enumerate_choices, shards
from ....graph import Phase, Role, source_line
from ....sharding import NodeGraph, Spec, axes_of, project, spec_from_dims

# Brackets in patterns of paths: what is inside an index, and a range of digits.
_BRACKETS = re.compile(r"\[([^\[\]]+)\]")
_INDEX = re.compile(r"\d+|\*|'.*'|\".*\"")
_RANGE = re.compile(r"\d-\d")

Masks: TypeAlias = list[NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Nodes by role: parameters, those of them that the step casts to a narrower type, values that
    only the update touches and that hold no examples, inputs of the batch.
    """

    parameters: frozenset[int]
    cast: frozenset[int]
    update: frozenset[int]
    batch_inputs: frozenset[int]

    def split_by_zero(self, stage: int, *, gathers_once: bool) -> frozenset[int]:
        """Nodes that a stage of ZeRO splits; see `batch_restriction`."""
        if stage < 2:
            return frozenset()
        return self.update | (
            self.parameters if stage >= 3 else self.cast if gathers_once else frozenset()
        )


def kinds_of(problem: Problem) -> Kinds:
    """The kinds of all nodes of a step."""
    by_role: dict[Role, set[int]] = {role: set() for role in Role}
    for item, port in zip(problem.graph.inputs, problem.nodes.input_ports, strict=True):
        by_role[item.role].add(port.node)
    update = set(by_role[Role.OPTIMIZER_STATE])
    for node, node_work in zip(problem.nodes.nodes, problem.work, strict=True):
        # A node without work, such as an array that is only passed on, belongs to no phase.
        phases = {work.phase for work in node_work}
        on_examples = bool(problem.nodes.batch_factors[node.index])
        if phases and phases <= {Phase.UPDATE} and not on_examples:
            update.add(node.index)
    parameters = by_role[Role.PARAMETER]
    return Kinds(
        parameters=frozenset(parameters - {-1}),
        cast=frozenset({edge.source for edge in problem.nodes.edges if edge.cast} & parameters),
        # A parameter is updated too, but its storage has a rule of its own.
        update=frozenset(update - parameters - {-1}),
        batch_inputs=frozenset(by_role[Role.BATCH] - {-1}),
    )


def everything(priced: Priced) -> Masks:
    """No restriction."""
    return [np.ones(len(node.choices), bool) for node in priced.nodes]


def data_axes_restriction(
    nodes: NodeGraph, choices: Sequence[NDArray[np.int64]], kinds: Kinds, axes: frozenset[int]
) -> Masks | None:
    """Masks under which the given axes split only the batch in the forward and backward pass; None
    if they do not divide it.

    Args:
        choices: for each node, `(choices, axes)`.
    """
    masks = []
    for node, rows in zip(nodes.nodes, choices, strict=True):
        mask = np.ones(len(rows), bool)
        # State is updated once in a step and may be split over any axis.
        if axes and node.index not in kinds.parameters and node.index not in kinds.update:
            batch = nodes.batch_factors[node.index]
            mask = _splits_batch_alone(rows.tobytes(), rows.shape[1], axes, batch)
        if not mask.any():
            return None
        masks.append(mask)
    return masks


def regular_choices(
    nodes: NodeGraph, kinds: Kinds, axis_sizes: Sequence[int], data_axes: frozenset[int]
) -> list[NDArray[np.int64]] | None:
    """Choices of a data-parallel mesh: `data_axes` split only the batch, the others split
    parameters as far as possible.

    Values that only the update touches have all choices. None if the axes do not divide the batch.
    """
    regular = []
    for node in nodes.nodes:
        choices = enumerate_choices(node, axis_sizes)
        if node.index in kinds.parameters:
            choices = _furthest_split(choices.tobytes(), tuple(axis_sizes), data_axes)
        elif node.index not in kinds.update:
            choices = _batch_alone(
                choices.tobytes(), len(axis_sizes), data_axes, nodes.batch_factors[node.index]
            )
        if not len(choices):
            return None
        regular.append(choices)
    return regular


# Cached, because many nodes have the same choices.
@functools.lru_cache(maxsize=1 << 10)
def _furthest_split(
    choices_of_int64: bytes, axis_sizes: tuple[int, ...], data_axes: frozenset[int]
) -> NDArray[np.int64]:
    choices = np.frombuffer(choices_of_int64, np.int64).reshape(-1, len(axis_sizes))
    # Data axes do not split parameters.
    sizes = [1 if a in data_axes else n for a, n in enumerate(axis_sizes)]
    pieces = shards(choices, [True] * (int(choices.max(initial=-1)) + 1), sizes)
    return np.asarray(choices[pieces == pieces.max()], np.int64)


@functools.lru_cache(maxsize=1 << 10)
def _batch_alone(
    choices_of_int64: bytes, num_axes: int, data_axes: frozenset[int], batch: frozenset[int]
) -> NDArray[np.int64]:
    choices = np.frombuffer(choices_of_int64, np.int64).reshape(-1, num_axes)
    mask = _splits_batch_alone(choices_of_int64, num_axes, data_axes, batch)
    return np.asarray(choices[mask], np.int64)


@functools.lru_cache(maxsize=1 << 10)
def _splits_batch_alone(
    choices_of_int64: bytes, num_axes: int, data_axes: frozenset[int], batch: frozenset[int]
) -> NDArray[np.bool_]:
    choices = np.frombuffer(choices_of_int64, np.int64).reshape(-1, num_axes)
    mask = np.ones(len(choices), bool)
    for a in data_axes:
        mask &= np.isin(choices[:, a], list(batch)) if batch else choices[:, a] == -1
    # The mask is shared by many nodes through the cache.
    mask.flags.writeable = False
    return mask


def batch_restriction(
    problem: Problem,
    priced: Priced,
    kinds: Kinds,
    *,
    zero_stage: int,
    gathers_once: bool = False,
    shard_axes: frozenset[int],
) -> Masks:
    """Masks of ZeRO: all axes split the batch, `shard_axes` the optimizer state (stage 2) and
    parameters (stage 3; with `gathers_once` those of stage 2 that the step casts).

    Raises:
        InputError: the batch cannot be split over all devices.
    """
    if np.prod(priced.axis_sizes) == 1:
        # Nothing is split, whatever the batch is.
        return [_unsplit(table.choices) for table in priced.nodes]
    masks = []
    all_axes = frozenset(range(len(priced.axis_sizes)))
    sharded = kinds.split_by_zero(zero_stage, gathers_once=gathers_once)
    # A stage inside a pipeline reads what the stage before it sends instead of the batch.
    fed_by = kinds.batch_inputs or range(len(priced.graph.batch_factors))
    if not any(priced.graph.batch_factors[n] for n in fed_by):
        _refuse_batch(problem, priced, kinds)
    for node, table in zip(priced.graph.nodes, priced.nodes, strict=True):
        choices = table.choices
        batch = priced.graph.batch_factors[node.index]
        if node.index in sharded:
            # Those that split over the shard axes alone, as far as possible.
            outside = [a for a in range(len(priced.axis_sizes)) if a not in shard_axes]
            is_regular = (choices[:, outside] == -1).all(axis=1)
            pieces = shards(choices, [True] * (int(choices.max(initial=-1)) + 1), priced.axis_sizes)
            masks.append(np.asarray(is_regular & (pieces == pieces[is_regular].max())))
        elif node.index in kinds.parameters or node.index in kinds.update:
            masks.append(_unsplit(choices))
        elif batch:
            on_batch = np.isin(choices, list(batch))
            is_regular = (on_batch | (choices == -1)).all(axis=1)
            most = is_regular & (on_batch.sum(axis=1) == on_batch[is_regular].sum(axis=1).max())
            if node.index in kinds.batch_inputs and not on_batch[most].all():
                _refuse_batch(problem, priced, kinds)
            masks.append(most)
        else:
            outside = [a for a in all_axes if a not in shard_axes or zero_stage < 2]
            masks.append((choices[:, outside] == -1).all(axis=1))
    return masks


def _unsplit(choices: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray((choices == -1).all(axis=1))


def _refuse_batch(problem: Problem, priced: Priced, kinds: Kinds) -> None:
    graph = problem.graph
    inputs = [
        (item, port)
        for item, port in zip(graph.inputs, priced.graph.input_ports, strict=True)
        if item.role is Role.BATCH and graph.values[item.value].shape
    ]
    if not inputs:
        raise InputError(
            "This method splits the batch, and the step takes no batch. Use method shard or auto."
        )
    batch, dim = inputs[0][0], 0
    for item, port in inputs:
        if port.node >= 0 and (factors := priced.graph.batch_factors[port.node]):
            batch, dim = item, min(port.projection[f] for f in factors)
            break
    shape = graph.values[batch.value].shape
    size = shape[dim]
    devices = int(np.prod(priced.axis_sizes))
    # Micro-batches are cut along the leading dim.
    count = 1 if dim else problem.num_micro_batches
    total = size * count
    per = f" in each of {count} micro-batches" if count > 1 else ""
    where = f" in dim {dim}, as a loop runs over the {shape[0]} before it" if dim else ""
    asked = (
        f"A batch of {total} ({batch.path} has {counted(size, 'row')}{where}{per}) cannot be split"
        f" over {devices} devices"
    )
    if not size:
        raise InputError(
            f"{batch.path} has no rows, so that there is nothing to split over {devices} devices."
            f" Pass a batch of the size that the step will run with, such as {devices}."
        )
    if size % devices == 0:
        raise InputError(_why_regrouped(problem, priced, kinds, asked, devices))
    below = total - total % (devices * count)
    sizes = " or ".join(str(n) for n in (below, below + devices * count) if n)
    fewer = next((n for n in range(count - 1, 0, -1) if total % (devices * n) == 0), None)
    advice = [
        f"a global batch that is a multiple of {devices * count}, such as {sizes}",
        *([f"{fewer} micro-batch{'es' if fewer > 1 else ''}"] if fewer else []),
        "fewer devices",
        "method shard or auto",
    ]
    raise InputError(
        f"{asked}, and this method splits nothing else. Use {', '.join(advice[:-1])}, or"
        f" {advice[-1]}."
    )


def _why_regrouped(problem: Problem, priced: Priced, kinds: Kinds, asked: str, devices: int) -> str:
    """The refusal of a batch that the devices divide, but not all that the step makes of it."""
    factors = []
    for n in sorted(kinds.batch_inputs):
        for f in priced.graph.batch_factors[n]:
            factors.append(priced.graph.nodes[n].factors[f])
    short = [f for f in factors if f.size % devices and f.shortest is not None]
    if not short:
        return (
            f"{asked}: the step needs it whole, as a loop runs over it or an operator mixes its"
            " rows. This method splits nothing else. Use method shard or auto."
        )
    least = min(short, key=lambda factor: factor.size)
    op = problem.graph.ops[least.shortest or 0]
    where = source_line(op)
    fewer = divisors(least.size, most=devices - 1)[-1]
    count = problem.num_micro_batches
    # With fewer micro-batches, each has more of these rows.
    longer = [n for n in divisors(count)[:-1] if least.size * count // n % devices == 0]
    larger = f"{counted(longer[-1], 'micro-batch')}, " if longer else ""
    return (
        f"{asked}: `{op.name}`{f' at {where}' if where else ''} makes {least.size} rows or groups"
        f" of it, which {devices} devices do not divide. This method splits nothing but the batch."
        f" Use {larger}{counted(fewer, 'device')}, a step that makes a multiple of"
        f" {devices} there, or method shard or auto."
    )


def pinned(
    problem: Problem,
    priced: Priced,
    patterns: Mapping[str, Sequence[Any]],
    axis_names: Sequence[str],
    *,
    where_possible: bool = False,
) -> Masks:
    """Masks that give each input whose path matches a pattern the split that the pattern states.

    Args:
        where_possible: pass over splits that inputs cannot have, beside what earlier patterns say.

    Raises:
        InputError: lists every pattern that matches nothing, names an unknown axis, or asks for an
            impossible split.
    """
    masks = everything(priced)
    faults = []
    paths = [i.path for i in problem.graph.inputs]
    for pattern, partition in patterns.items():
        matching = [k for k, path in enumerate(paths) if _matches(pattern, path)]
        if not matching:
            faults.append(f"`{pattern}` matches no input: {nearest(pattern, paths)}")
        for k in matching:
            fault, is_wrong = _pin(problem, priced, masks, k, pattern, partition, axis_names)
            if fault and (is_wrong or not where_possible):
                faults.append(fault)
    if faults:
        raise InputError(
            "The manual plan cannot be followed:\n  " + "\n  ".join(dict.fromkeys(faults))
        )
    return masks


def matching(problem: Problem, patterns: Mapping[str, Sequence[Any]]) -> list[int]:
    """Positions of the inputs that some pattern matches."""
    found = []
    for k, item in enumerate(problem.graph.inputs):
        if (
            any(_matches(pattern, item.path) for pattern in patterns)
            and problem.nodes.input_ports[k].node >= 0
        ):
            found.append(k)
    return found


def _pin(
    problem: Problem,
    priced: Priced,
    masks: Masks,
    k: int,
    pattern: str,
    partition: Sequence[Any],
    axis_names: Sequence[str],
) -> tuple[str, bool]:
    """Narrow the masks to the split that a pattern states for an input. Returns why that cannot be,
    or nothing; and whether the pattern could hold for no input at all.
    """
    item, port = problem.graph.inputs[k], priced.graph.input_ports[k]
    shape = problem.graph.values[item.value].shape
    dims = [axes_of(entry) for entry in partition]
    named = [a for axes in dims for a in axes]
    unknown = [a for a in named if a not in axis_names]
    if unknown:
        known = ", ".join(axis_names)
        return f"`{pattern}` names the axis {unknown[0]!r}; the mesh has {known}", True
    if len(set(named)) < len(named):
        twice = next(a for a in named if named.count(a) > 1)
        return f"`{pattern}` names the axis {twice!r} twice; an axis splits one dim", True
    if len(dims) > len(shape):
        return f"`{pattern}` splits {len(dims)} dims, {item.path} has {len(shape)}", True
    # Dims that the pattern does not name stay whole, as in a `PartitionSpec`.
    spec: Spec = spec_from_dims([*dims, *[()] * (len(shape) - len(dims))], axis_names)
    # Scalars and arrays without elements have one split only.
    if port.node < 0 or 0 in shape:
        return "", False
    choices = priced.nodes[port.node].choices
    fits = np.array([project(tuple(c), port.projection) == spec for c in choices.tolist()])
    if (fits & masks[port.node]).any():
        masks[port.node] &= fits
        return "", False
    fault = (
        f"{item.path} of shape {shape} cannot be split as {tuple(partition)} on a mesh"
        f" {priced.mesh}"
    )
    if fits.any():
        paths = [each.path for each in problem.graph.inputs]
        ports = zip(paths, priced.graph.input_ports, strict=True)
        tied = [path for path, other in ports if other.node == port.node and path != item.path]
        fault += (
            f" unless {shortened(' and '.join(tied), 200)} is split alike: the step combines them"
            " element by element"
        )
    return fault, False


def _matches(pattern: str, path: str) -> bool:
    """True if a shell pattern matches a path. Brackets with a number, a quoted key or `*` are those
    of an index; with other characters, such as `[qkv]`, any one of these; with a range of digits
    either.

    >>> _matches("*attn.[qkv].kernel", "params.layers[0].attn.q.kernel")
    True
    >>> _matches("params.layers[0-3].*", "params.layers[2].w"), _matches("w[1]", "w1")
    (True, False)
    """

    def glob(ranges: str) -> str:
        def of(match: re.Match[str]) -> str:
            inside = match[1]
            if _INDEX.fullmatch(inside):
                return f"[[]{inside}[]]"
            return ranges.format(inside) if _RANGE.fullmatch(inside) else f"[{inside}]"

        return _BRACKETS.sub(of, pattern)

    return any(fnmatch.fnmatchcase(path, glob(ranges)) for ranges in ("[[][{}][]]", "[{}]"))
