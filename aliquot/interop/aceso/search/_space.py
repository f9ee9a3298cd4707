"""The choices of one stage: measurements of every operator in every state, as arrays.

A state is a tensor degree, a data degree and an algorithm. Arrays have a row for each kind of
operator and a column for each state; times of states that cannot be run are infinite.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .._chain import Layout, OperatorChain
from .._database import COLUMNS, Database, Transfers
from .._judge import Faults, Judge
from .._performance import collective_ms, collectives_between, transfer_us

Floats = NDArray[np.float64]
_COLUMN = {name: k for k, name in enumerate(COLUMNS)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSpace:
    """The states of the operators of a stage on so many devices with a micro-batch of one size.

    Attributes:
        num_devices: of the stage.
        micro_batch: samples, summed over data-parallel ranks.
        states: tensor degree, data degree and algorithm of each column.
        kinds: for each operator of the chain, its row.
        valid: the states that an operator may have.
        busy_us: forward and backward time of one micro-batch.
        again_us: additional time if it is recomputed.
        weights_mb, kept_mb: weights, and activations kept for the backward pass.
        forward_reserved_mb, backward_reserved_mb: further memory of the allocator.
        peak_mb: memory of its recomputation; 0 for single operators.
        enters_mb: size of its input, which is transferred if a stage begins with it.
        enters_us: time of that transfer: within a node, between nodes.
        leaves_us: time of the transfer of its output if a stage ends with it: within a node,
            between nodes; then by tensor degree of the stage's first operator.
        tensor_degrees: those of the last axis of `leaves_us`.
        edges_us: time to change the layout between neighbours, by pair of operators, state of the
            first and of the second.
        edge_of: for each operator of the chain, the row of `edges_us` of it and the one before it.
        fused: for each operator of the chain, whether recomputing it and the one before it saves
            that one's activations.
        state_copies: bytes of parameters, gradients and optimizer state, in units of the weights'
            own.
        counts_last_reserved: whether the reserved memory of the last operator counts.
    """

    num_devices: int
    micro_batch: int
    states: tuple[tuple[int, int, int], ...]
    kinds: NDArray[np.int64]
    valid: NDArray[np.bool_]
    busy_us: Floats
    again_us: Floats
    weights_mb: Floats
    kept_mb: Floats
    forward_reserved_mb: Floats
    backward_reserved_mb: Floats
    peak_mb: Floats
    enters_mb: Floats
    enters_us: Floats
    leaves_us: Floats
    tensor_degrees: tuple[int, ...]
    edges_us: Floats
    edge_of: NDArray[np.int64]
    fused: NDArray[np.bool_]
    state_copies: float
    counts_last_reserved: bool


def make_space(
    chain: OperatorChain,
    database: Database,
    num_devices: int,
    micro_batch: int,
    *,
    gpus_per_node: int,
    judge: Judge,
    num_micro_batches: int,
) -> StageSpace | None:
    """The space of a stage; None if no state was measured."""
    faults = judge.faults
    degrees = [
        (tp, num_devices // tp)
        for tp in database.tensor_degrees
        if num_devices % tp == 0
        and tp <= gpus_per_node
        and micro_batch % (num_devices // tp) == 0
        and micro_batch // (num_devices // tp) in database.micro_batches
    ]
    if not degrees:
        return None
    pairs = itertools.product(degrees, database.algorithms)
    states = tuple((tp, dp, algorithm) for (tp, dp), algorithm in pairs)
    names = list(dict.fromkeys(o.name for o in chain.operators))
    by_name = {o.name: o for o in chain.operators}
    kind_of = {name: k for k, name in enumerate(names)}
    kinds = np.array([kind_of[o.name] for o in chain.operators])
    rows = np.array([database.operators[name] for name in names])
    operators = [by_name[name] for name in names]
    tp_at = {tp: k for k, tp in enumerate(database.tensor_degrees)}
    index = (
        rows[:, None],
        np.array([database.micro_batches.index(micro_batch // dp) for _, dp, _ in states])[None],
        np.array([tp_at[tp] for tp, _, _ in states])[None],
        np.array([database.algorithms.index(a) for _, _, a in states])[None],
    )
    table = database.table[index]
    first = min(database.algorithms)
    chooses = np.array([o.chooses_algorithm for o in operators])
    valid = ~np.isnan(table).any(axis=-1) & (
        chooses[:, None] | np.array([a == first for *_, a in states])[None]
    )
    if not valid.any(axis=1).all():
        return None

    def column(name: str) -> Floats:
        return np.where(valid, table[..., _COLUMN[name]], 0.0)

    tensor_degrees = tuple(dict.fromkeys(tp for tp, _, _ in states))
    exits = np.full((len(names), len(states), len(tensor_degrees)), np.nan)
    for t, tp in enumerate(tensor_degrees):
        at = (
            index[0],
            index[1],
            np.full_like(index[2], tp_at[tp]),
            index[3],
            _COLUMN["output_size"],
        )
        exits[:, :, t] = (
            database.table[at] if faults.exit_by_first_degree else column("output_size")
        )
    busy = column("forward-compute") + column("backward-compute")
    if judge.counts_update:
        per_mb = np.array(
            [judge.update_us_per_mb(database, dp, chain.copies_of_weights) for _, dp, _ in states]
        )
        busy = busy + column("weights") * per_mb / num_micro_batches
    edges, edge_of = _edges(chain, database, states, valid, column("input_size"), kinds, faults)
    links = (database.within_nodes, database.between_nodes)
    shares = np.array([o.kept_share for o in operators])
    return StageSpace(
        num_devices=num_devices,
        micro_batch=micro_batch,
        states=states,
        kinds=kinds,
        valid=valid,
        busy_us=np.where(valid, busy, np.inf),
        again_us=column("forward-compute"),
        weights_mb=column("weights"),
        kept_mb=column("activations") * shares[:, None],
        forward_reserved_mb=column("fwd_reserved"),
        backward_reserved_mb=column("bwd_reserved"),
        peak_mb=np.zeros(valid.shape),
        enters_mb=column("input_size"),
        enters_us=np.stack([_transfer_times(column("input_size"), link, faults) for link in links]),
        leaves_us=np.stack([_transfer_times(exits, link, faults) for link in links]),
        tensor_degrees=tensor_degrees,
        edges_us=edges,
        edge_of=edge_of,
        fused=np.array([False, *(not o.starts_layer for o in chain.operators[1:])]),
        state_copies=chain.copies_of_weights,
        counts_last_reserved=not faults.last_reserved_ignored,
    )


def _transfer_times(sizes: Floats, link: Transfers, faults: Faults) -> Floats:
    distinct = np.unique(sizes[~np.isnan(sizes)])
    times = np.array([transfer_us(float(size), link, faults) for size in distinct])
    return np.where(
        np.isnan(sizes),
        np.inf,
        times[np.searchsorted(distinct, np.nan_to_num(sizes, nan=distinct[0]))],
    )


def _edges(
    chain: OperatorChain,
    database: Database,
    states: tuple[tuple[int, int, int], ...],
    valid: NDArray[np.bool_],
    enters_mb: Floats,
    kinds: NDArray[np.int64],
    faults: Faults,
) -> tuple[Floats, NDArray[np.int64]]:
    """Time of every change of state between neighbours; infinite without a collective, or a
    measurement of it.
    """
    pairs = list(zip([-1, *kinds[:-1].tolist()], kinds.tolist(), strict=True))
    rows = {pair: k for k, pair in enumerate(dict.fromkeys(pairs))}
    by_kind = dict(zip(kinds.tolist(), chain.operators, strict=True))
    edges = np.full((len(rows), len(states), len(states)), np.inf)
    measured = replace(faults, exact_collectives=True)
    costs: dict[tuple[tuple[int, ...], tuple[int, ...], float], float] = {}

    def cost_us(source: tuple[int, ...], target: tuple[int, ...], size_mb: float) -> float:
        if source == target:
            return 0.0
        if sum(a != b for a, b in zip(source, target, strict=True)) != 2:
            return math.inf
        total = 0.0
        for kind, devices in collectives_between(source, target):
            missing: list[str] = []
            judge = measured if not database.collectives.get((kind, devices)) else faults
            total += collective_ms(database, kind, devices, size_mb, judge, missing)
            if missing and judge.exact_collectives:
                return math.inf
        return 1000 * total

    for (before, after), row in rows.items():
        if before < 0:
            edges[row] = 0.0
            continue
        for p, q in np.ndindex(len(states), len(states)):
            if not (valid[before, p] and valid[after, q]):
                continue
            if not chain.resharding:
                if states[p][:2] == states[q][:2]:
                    edges[row, p, q] = 0.0
                continue
            source = laid_out(by_kind[before].layouts, states[p], 1)
            target = laid_out(by_kind[after].layouts, states[q], 0)
            key = source, target, float(enters_mb[after, q])
            if key not in costs:
                costs[key] = cost_us(*key)
            edges[row, p, q] = costs[key]
    return edges, np.array([rows[pair] for pair in pairs])


def laid_out(
    layouts: tuple[tuple[Layout, Layout], ...], state: tuple[int, int, int], side: int
) -> tuple[int, ...]:
    """Layout of an operator's input (side 0) or output (side 1): replicas, then parts of each
    dim.
    """
    tensor, data, algorithm = state
    degrees = {"1": 1, "tp": tensor, "dp": data}
    return tuple(degrees[part] for part in layouts[min(algorithm, len(layouts) - 1)][side])
