"""Programs compiled for the devices of this process, and the keys under which a database stores
their measurements; `_timing.py` runs them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from ..cluster import num_hosts
from ..core import num_cores
from ..cost import Problem
from ..graph import Graph, graph_fingerprint
from ..runtime import build_program, compiled_stats, make_mesh
from ..sharding import Choice, make_pins
from ._database import Measurement, ProgramKey, mesh_text
from ._together import from_all


def program_key(graph: Graph, choices: Sequence[Choice], mesh_shape: tuple[int, ...]) -> ProgramKey:
    """The key of a part of a step under the given choices, on this process's devices."""
    return key_of(f"{graph_fingerprint(graph)} {list(choices)}", mesh_shape)


def key_of(text: str, mesh_shape: tuple[int, ...]) -> ProgramKey:
    """The key of a program on this process's devices, from a long text that describes it."""
    return device_key(hashlib.sha256(text.encode()).hexdigest(), mesh_shape)


def device_key(program: str, mesh_shape: tuple[int, ...]) -> ProgramKey:
    """The key of a program on the first of all devices."""
    devices = jax.devices()[: math.prod(mesh_shape)]
    device = devices[0]
    return ProgramKey(
        program=program,
        device=host_device() if device.platform == "cpu" else device.device_kind,
        num_devices=math.prod(mesh_shape),
        mesh=mesh_text(mesh_shape, num_hosts(devices)),
        jax_version=jax.__version__,
    )


def host_device() -> str:
    """The database's name for this machine's CPU, with the number of cores that this process may
    use, because virtual devices share them.
    """
    cores = num_cores()
    return f"cpu, {cores} core{'' if cores == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledPart:
    """A program, compiled for the first of all devices.

    Attributes:
        arguments: shapes, dtypes and shardings of its arguments.
        successors: for each donated argument, the position of the result that takes its place.
        compiled: None if the compiler found that it does not fit in memory, or failed.
        memory_bytes: memory on each device.
        label: name for readers.
        failure: the compiler's message if it failed for another reason than memory.
        times: how often one run does what is measured.
    """

    arguments: tuple[jax.ShapeDtypeStruct, ...]
    successors: Mapping[int, int]
    compiled: Any
    memory_bytes: float
    label: str
    failure: str = ""
    times: int = 1


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
        label: stored with the measurement.
    """
    graph = problem.graph
    pins = make_pins(graph, problem.nodes, choices, mesh_shape, problem.target)
    program = build_program(graph, pins, make_mesh(mesh_shape, axis_names, None))
    successors: dict[int, int] = {}
    for position in program.donated:
        successor = graph.inputs[position].output
        assert successor is not None
        successors[position] = successor
    values = [graph.values[item.value] for item in graph.inputs]
    return compile_program(
        program.jitted,
        [
            jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
            for value, sharding in zip(values, program.in_shardings, strict=True)
        ],
        mesh_shape,
        axis_names,
        successors=successors,
        label=label,
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
    """Compile a jitted function; for a process that has none of the devices, an empty one. May be
    called in several threads.

    Args:
        arguments, successors, label: see `CompiledPart`.
    """
    if not takes_part(jax.devices()[: math.prod(mesh_shape)]):
        return idle_part(label)
    compiled, memory_bytes, failure = None, 0.0, ""
    try:
        compiled = jitted.lower(*arguments).compile()
        memory_bytes = float(compiled_stats(compiled, axis_names, mesh_shape).memory.peak_bytes)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            failure = str(error)
    return CompiledPart(
        arguments=tuple(arguments),
        successors=successors or {},
        compiled=compiled,
        memory_bytes=memory_bytes,
        label=label,
        failure=failure,
    )


def takes_part(devices: Iterable[Any]) -> bool:
    """Whether this process has one of these devices."""
    return any(device.process_index == jax.process_index() for device in devices)


def idle_part(label: str) -> CompiledPart:
    """The part of a process that has no devices of a program, while others run it."""
    return CompiledPart(
        arguments=(), successors={}, compiled=lambda: (), memory_bytes=0.0, label=label
    )


def measure_in_turn(
    parts: Iterable[Callable[[], CompiledPart]], time_one: Callable[[CompiledPart], Measurement]
) -> Iterator[Measurement]:
    """Measurements of programs, one after another; compilation runs in threads, several programs at
    a time.

    Accelerators are timed while the next programs are compiled. CPU devices are timed only while
    nothing is compiled.

    Args:
        parts: functions that compile one program each.
        time_one: `time_part` with its options.
    """
    # As many in all processes, which must run the same programs in the same order.
    workers = min(from_all(num_cores(), int))
    # On CPUs, compilation would take the cores that are timed.
    alone = jax.devices()[0].platform == "cpu"
    with ThreadPoolExecutor(max_workers=workers) as pool:
        left = iter(parts)

        def begin() -> list[Future[CompiledPart]]:
            return [pool.submit(part) for part in tuple(itertools.islice(left, workers))]

        waiting = begin()
        while waiting:
            ready = [future.result() for future in waiting] if alone else waiting
            waiting = [] if alone else begin()
            for one in ready:
                yield time_one(one if isinstance(one, CompiledPart) else one.result())
            if alone:
                waiting = begin()


def is_out_of_memory(error: Exception) -> bool:
    """True if an error of the compiler or of a device says that memory does not suffice."""
    # JAX has no public class for this.
    return "RESOURCE_EXHAUSTED" in str(error)
