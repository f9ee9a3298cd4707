"""The other process: compiles programs for their target and writes down what the compiler says.

Run as `python -m aliquot.verification._worker`. Folders are read from standard input, one a line,
until it ends; each holds `request.json` and `module.bin`, and gets `result.json`. Flags and
platforms were set by the parent in this process's environment.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ._text import (
    compiled_collectives,
    estimated_cycles,
    modelled_compute_s,
    reported_bytes,
    unpriced_calls,
)

_REPORT = "*.after_optimizations-memory-usage-report.txt"


def main(folders: Iterable[Path]) -> None:
    """Compile what each folder asks for. If the compiler refuses, its words are the result."""
    for folder in folders:
        request = json.loads((folder / "request.json").read_text())
        reports = folder.parent / "reports"
        if request["platform"] == "tpu":
            # The compiler writes down the memory that it assigns if this flag is set when it is
            # loaded; a folder that the user has set is kept.
            flags = os.environ.get("XLA_FLAGS", "")
            if "--xla_dump_to" not in flags:
                os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={reports}".strip()
        try:
            answer = _answer(request, (folder / "module.bin").read_bytes())
            _correct_temporaries(answer["memory"], reports)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        # The parent polls for the file, and a rename shows it all or nothing.
        partial = folder / "result.partial"
        partial.write_text(json.dumps(answer))
        partial.rename(folder / "result.json")


def _correct_temporaries(memory: dict[str, int], reports: Path) -> None:
    """Replace the temporaries by those that the compiler counts against a chip's memory.

    For TPUs, `memory_analysis` has a figure up to a fifth higher (libtpu 0.0.42): programs compile
    within limits below it, and where one is refused, the compiler names the sum of its report.
    """
    totals = []
    for path in reports.glob(_REPORT):
        if (total := reported_bytes(path.read_text())) is not None:
            totals.append(total)
    if totals:
        held = memory["argument_bytes"] + memory["output_bytes"] - memory["alias_bytes"]
        memory["temp_bytes"] = max(max(totals) - held, 0)
    shutil.rmtree(reports, ignore_errors=True)


def _answer(request: dict[str, Any], module: bytes) -> dict[str, Any]:
    """Compile a program, and collect what the compiler says of it."""
    import jax
    from jax import export
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", request["x64"])
    exported = export.deserialize(bytearray(module))
    mesh = _mesh(request)

    def shardings(arrays: Any, kinds: Any) -> tuple[NamedSharding | None, ...]:
        found = []
        for dims, kind in zip(arrays, kinds, strict=True):
            found.append(
                None
                if dims is None
                else NamedSharding(
                    mesh, PartitionSpec(*[tuple(axes) or None for axes in dims]), memory_kind=kind
                )
            )
        return tuple(found)

    jitted = jax.jit(
        exported.call,
        in_shardings=shardings(request["in_dims"], request["in_kinds"]),
        out_shardings=list(shardings(request["out_dims"], request["out_kinds"])),
        donate_argnums=tuple(request["donated"]),
        # Arguments keep their positions, by which they are donated and named as causes.
        keep_unused=True,
    )
    lowered = jitted.lower(*exported.in_avals)
    middle = time.perf_counter()
    compiled: Any = lowered.compile()
    compile_s = time.perf_counter() - middle
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    names, sizes = request["axis_names"], request["mesh_shape"]
    return {
        "memory": {
            "argument_bytes": int(memory.argument_size_in_bytes),
            "output_bytes": int(memory.output_size_in_bytes),
            "temp_bytes": int(memory.temp_size_in_bytes),
            "alias_bytes": int(memory.alias_size_in_bytes),
            "live_bytes": int(getattr(memory, "peak_memory_in_bytes", 0)),
            "host_bytes": int(
                memory.host_argument_size_in_bytes
                + memory.host_output_size_in_bytes
                - memory.host_alias_size_in_bytes
                + memory.host_temp_size_in_bytes
            ),
        },
        "collectives": list(map(asdict, compiled_collectives(text, names, sizes))),
        "out_dims": list(map(_dims, compiled.output_shardings)),
        "out_bytes": [
            # Host memory is counted by itself.
            0
            if sharding.memory_kind == "pinned_host"
            else math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize
            for sharding, aval in zip(compiled.output_shardings, exported.out_avals, strict=True)
        ],
        "cycles": estimated_cycles(text),
        "modelled_compute_s": modelled_compute_s(text),
        "unpriced_calls": unpriced_calls(text),
        "compile_s": compile_s,
    }


def _dims(sharding: Any) -> list[list[str]] | None:
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return None
    found = []
    for axes in spec:
        found.append([] if axes is None else [axes] if isinstance(axes, str) else list(axes))
    return found


def _mesh(request: dict[str, Any]) -> Any:
    """A mesh of the target's devices, as its topology describes them; of virtual devices for
    CPUs.
    """
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    platform, topology = request["platform"], request["topology"]
    if platform == "cpu":
        devices: Any = jax.devices("cpu")
    elif platform == "cuda":
        described = topologies.get_topology_desc(
            "aliquot", platform, topology=topology, target_config=request["description"]
        )
        devices = described.devices
    else:
        devices = topologies.get_topology_desc(topology, platform).devices
    shape = tuple(request["mesh_shape"])
    grid = np.array(list(devices)[: int(np.prod(shape))], dtype=object).reshape(shape)
    return Mesh(grid, tuple(request["axis_names"]), axis_types=(AxisType.Auto,) * len(shape))


if __name__ == "__main__":
    # While the first program is still being made.
    import jax  # noqa: F401

    main(Path(line.rstrip("\n")) for line in sys.stdin)
