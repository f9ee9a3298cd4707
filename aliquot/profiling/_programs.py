"""Run a part of a step on the devices at hand, and time it."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cluster import Target
from ..cost import Problem
from ..graph import Graph, Input, graph_fingerprint
from ..runtime import Program, build_program, compiled_stats, make_mesh
from ..sharding import Choice, make_pins
from ._database import Measurement, ProgramKey

_EARLY_STOP = 1.5
_LARGER_THAN_CACHES_BYTES = 1 << 28
_MOST_SETS = 64


def program_key(graph: Graph, choices: Sequence[Choice], mesh_shape: tuple[int, ...]) -> ProgramKey:
    """The key of a part of a step under the given choices, on this process's devices."""
    return key_of(f"{graph_fingerprint(graph)} {list(choices)}", mesh_shape)


def key_of(text: str, mesh_shape: tuple[int, ...]) -> ProgramKey:
    """The key of a program that a long text describes, on this process's devices."""
    return device_key(hashlib.sha256(text.encode()).hexdigest(), mesh_shape)


def device_key(program: str, mesh_shape: tuple[int, ...]) -> ProgramKey:
    """The key of a program on this process's devices."""
    device = jax.devices()[0]
    return ProgramKey(
        program=program,
        device=host_device() if device.platform == "cpu" else device.device_kind,
        num_devices=math.prod(mesh_shape),
        mesh="x".join(map(str, mesh_shape)),
        jax_version=jax.__version__,
    )


def host_device() -> str:
    """What the database calls this machine's CPU: virtual devices share its cores."""
    return f"cpu, {os.cpu_count()} cores"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledPart:
    """A program, compiled for the first devices of this process.

    Attributes:
        arguments: shapes, dtypes and shardings of what it takes.
        successors: for each donated argument the position of the result that takes its place.
        compiled: None where the compiler found that it does not fit in memory.
        memory_bytes: of each device.
        label: for people.
    """

    arguments: tuple[jax.ShapeDtypeStruct, ...]
    successors: Mapping[int, int]
    compiled: Any
    memory_bytes: float
    label: str


def compile_part(
    problem: Problem,
    choices: Sequence[Choice],
    mesh_shape: tuple[int, ...],
    axis_names: tuple[str, ...],
    *,
    label: str = "",
) -> CompiledPart:
    """Compile a part of a step. May be called in several threads.

    Args:
        problem: the part.
        choices: one for each of its nodes.
        mesh_shape, axis_names: of the mesh that the choices are for.
        label: kept with what is measured.
    """
    graph = problem.graph
    program = _program(graph, problem, choices, mesh_shape, axis_names, problem.target)
    successors = {position: _successor(graph.inputs[position]) for position in program.donated}
    return compile_program(
        program.jitted, _shapes(graph, program), mesh_shape, axis_names, successors=successors, label=label
    )


def compile_program(
    jitted: Any,
    arguments: Sequence[jax.ShapeDtypeStruct],
    mesh_shape: tuple[int, ...],
    axis_names: tuple[str, ...],
    *,
    successors: Mapping[int, int] | None = None,
    label: str = "",
) -> CompiledPart:
    """Compile a jitted function. May be called in several threads.

    Args:
        arguments, successors, label: see `CompiledPart`.
    """
    compiled, memory_bytes = None, 0.0
    try:
        compiled = jitted.lower(*arguments).compile()
        memory_bytes = float(compiled_stats(compiled, axis_names, mesh_shape).memory.peak_bytes)
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
    return CompiledPart(
        arguments=tuple(arguments),
        successors=successors or {},
        compiled=compiled,
        memory_bytes=memory_bytes,
        label=label,
    )


def time_part(
    part: CompiledPart,
    *,
    warm_up: int = 2,
    repeats: int = 5,
    least_s: float = 0.2,
    best_s: float = math.inf,
    evicts: bool = False,
) -> Measurement:
    """Run a part of a step, and time it.

    Args:
        warm_up: runs before any is timed.
        repeats: how many runs are timed at least.
        least_s: short programs are repeated for so long.
        best_s: of programs that do the same work; one whose best run before the timed ones takes 1.5
            times as long is not repeated.
        evicts: take turns with other arguments of the same shapes, so that none is in a cache when its turn comes: as it is
            with single operators in a step. Not for programs with donated arguments.

    Reference: arXiv 2504.00598, whose profiler stops at the same factor.
    """
    if part.compiled is None:
        return Measurement(seconds=None, repeats=0, outcome="out of memory", label=part.label)
    try:
        leaves = [_filled(shape) for shape in part.arguments]
        more = [[jnp.copy(leaf) for leaf in leaves] for _ in range(_sets(part, evicts) - 1)]
        turns = itertools.cycle([leaves, *more])
        before = [_run(part, next(turns)) for _ in range(warm_up)]
        if min(before, default=0.0) > _EARLY_STOP * best_s:
            return Measurement(
                seconds=min(before), memory_bytes=part.memory_bytes, outcome="stopped early", label=part.label
            )
        times: list[float] = []
        while len(times) < repeats or sum(times) < least_s:
            times.append(_run(part, next(turns)))
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        return Measurement(
            seconds=None, repeats=0, memory_bytes=part.memory_bytes, outcome="out of memory", label=part.label
        )
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return Measurement(
        seconds=median,
        spread=(high - low) / 2 / median,
        repeats=len(times),
        memory_bytes=part.memory_bytes,
        label=part.label,
    )


def _sets(part: CompiledPart, evicts: bool) -> int:
    """How many arguments take turns."""
    if not evicts:
        return 1
    num_bytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in part.arguments)
    return int(min(max(math.ceil(_LARGER_THAN_CACHES_BYTES / max(num_bytes, 1)), 1), _MOST_SETS))


def measure_in_turn(
    parts: Iterable[Callable[[], CompiledPart]], time_one: Callable[[CompiledPart], Measurement]
) -> Iterator[Measurement]:
    """Measurements of parts, one after the other, which are compiled some at a time.

    Accelerators run one while the next are compiled; CPU devices only run while nothing is.

    Args:
        parts: compile a part each.
        time_one: `time_part` with its options.
    """
    workers = os.cpu_count() or 1
    alone = jax.devices()[0].platform == "cpu"
    with ThreadPoolExecutor(max_workers=workers) as pool:
        batches = _batched(parts, workers)
        waiting = [pool.submit(part) for part in next(batches, ())]
        while waiting:
            ready = [future.result() for future in waiting] if alone else waiting
            waiting = [] if alone else [pool.submit(part) for part in next(batches, ())]
            for one in ready:
                yield time_one(one if isinstance(one, CompiledPart) else one.result())
            if alone:
                waiting = [pool.submit(part) for part in next(batches, ())]


def _batched(parts: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    iterator = iter(parts)
    while batch := tuple(itertools.islice(iterator, size)):
        yield batch


def _run(part: CompiledPart, leaves: list[Any]) -> float:
    start = time.perf_counter()
    results = jax.block_until_ready(part.compiled(*leaves))
    seconds = time.perf_counter() - start
    # A donated input is used up; its successor takes its place.
    for position, result in part.successors.items():
        leaves[position] = results[result]
    return seconds


def _successor(item: Input) -> int:
    assert item.output is not None
    return item.output


def _is_out_of_memory(error: Exception) -> bool:
    # JAX has no public class for this.
    return "RESOURCE_EXHAUSTED" in str(error)


def _shapes(graph: Graph, program: Program) -> list[jax.ShapeDtypeStruct]:
    values = [graph.values[item.value] for item in graph.inputs]
    return [
        jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        for value, sharding in zip(values, program.in_shardings, strict=True)
    ]


def _program(
    graph: Graph,
    problem: Problem,
    choices: Sequence[Choice],
    mesh_shape: tuple[int, ...],
    axis_names: tuple[str, ...],
    target: Target,
) -> Program:
    pins = make_pins(
        graph,
        problem.nodes,
        choices,
        mesh_shape,
        reduce_scatter=target.reduce_scatter,
        data_axes=[],
        rows_above_bytes=target.rows_above_bytes,
    )
    return build_program(graph, pins, make_mesh(mesh_shape, axis_names, None))


def _filled(shape: jax.ShapeDtypeStruct) -> Any:
    """An array of small numbers: zeros may be faster, and denormal numbers slower, than what training has."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.device_put(jnp.broadcast_to(jax.random.key(0), shape.shape), shape.sharding)

    def fill() -> Any:
        if jnp.issubdtype(shape.dtype, jnp.floating):
            flat = jnp.sin(jnp.arange(math.prod(shape.shape), dtype=jnp.float32)) * 0.1 + 0.2
            return flat.reshape(shape.shape).astype(shape.dtype)
        return jnp.zeros(shape.shape, shape.dtype)

    return jax.jit(fill, out_shardings=shape.sharding)()
