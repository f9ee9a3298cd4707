"""Compilation of programs for a target in a process of its own, so that flags, platforms and memory
do not stay in the user's.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from ..core import version_of
from ..runtime import CompiledCollective
from ._cache import account_of, default_cache, keep_answer, read_answer
from ._process import CompilerProcess, Progress
from ._program import Dims, PortableProgram
from ._targets import CompileTarget
from ._wheels import require_compiler

_FORMAT = "5"
_REQUESTED: tuple[str, ...] = ("platform", "mesh_shape", "axis_names", "in_dims", "out_dims")
_REQUESTED += ("in_kinds", "out_kinds", "donated", "x64")
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """A compiler's account of a program, in bytes on each device.

    Attributes:
        target: what it was compiled for.
        argument_bytes, output_bytes, temp_bytes, alias_bytes: as the compiler assigned them;
            `alias_bytes` of the outputs live in donated arguments.
        out_dims, out_bytes: of each result the mesh axes that split its dims, and its bytes. None
            instead of axes where the compiler's choice has no such form.
        live_bytes: the most that is in use at any moment, holes between buffers not counted; 0 if
            unknown.
        host_bytes: what arguments, results and temporaries take in the memory of the device's host.
        collectives: every collective instruction; labels name causes.
        cycles: what a TPU's compiler expects a step to take; 0 for others.
        modelled_compute_s: what XLA's models of a GPU's kernels expect a step's compute to take at
            full clock, without calls of cuDNN, of which there are `unpriced_calls`; 0 for others.
        compile_s: seconds that the compiler took.
        refusal: the compiler's message if it found that the program does not fit. Then only
            `needed_bytes` is known.
        cached: whether the answer was in the cache already.
        remark: what else went wrong, such as a cache that cannot be written.
    """

    target: CompileTarget
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0
    live_bytes: int = 0
    host_bytes: int = 0
    out_dims: tuple[Dims | None, ...] = ()
    out_bytes: tuple[int, ...] = ()
    needed_bytes: float | None = None
    collectives: tuple[CompiledCollective, ...] = ()
    cycles: float = 0.0
    modelled_compute_s: float = 0.0
    unpriced_calls: float = 0.0
    compile_s: float = 0.0
    refusal: str = ""
    cached: bool = False
    remark: str = ""

    @property
    def peak_bytes(self) -> float:
        """Memory that must be free on a device: arguments, outputs that reuse no argument's memory,
        and temporaries.
        """
        if self.needed_bytes is not None:
            return self.needed_bytes
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


class Compiler:
    """Compiles programs for a target, one after another, in one process; answers are cached, so
    that no program is compiled twice.

    The process starts with the first program; `start` starts it earlier. Leaving the `with` block
    ends it.

    Args:
        target: what to compile for.
        num_devices: the most that a program runs on.
        progress: called several times a second with a line about what is going on.
        cache: folder of earlier answers; by default `default_cache()`.

    Raises:
        CompilerMissingError: the target's compiler is not installed.
    """

    def __init__(
        self,
        target: CompileTarget,
        *,
        num_devices: int,
        progress: Progress | None = None,
        cache: Path | None = None,
    ) -> None:
        self._target = target
        self._folder = cache or default_cache()
        self._environment = _environment(target, num_devices)
        self._progress = progress or (lambda line: None)
        self._process = CompilerProcess(target, self._environment, self._progress)

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: Any) -> None:
        self._process.close()

    def start(self) -> None:
        """Start the process now, while the first program is still made."""
        self._process.start()

    def compile(
        self, program: PortableProgram, *, devices_per_host: int, name: str = ""
    ) -> CompiledProgram:
        """The compiler's account of a program.

        Args:
            program: lowered for the target's platform.
            devices_per_host: how many of the program's devices are in one host.
            name: what the progress line calls it.

        Raises:
            CompileError: the compiler refuses the program, or was stopped because memory ran out.
            InputError: there is no room for the program on disk, or the target's description is of
                another release.
        """
        target = self._target
        topology = target.topology(program.num_devices, devices_per_host)
        parts = [
            _FORMAT,
            *map(version_of, ("jax", "jaxlib", "aliquot")),
            program.fingerprint,
            target.platform,
            target.description,
            topology,
            self._environment["XLA_FLAGS"],
        ]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        what = f"compiling {name} for {program.num_devices} x {target.name}".replace("  ", " ")
        kept = read_answer(self._folder, key)
        if kept is not None:
            if name:
                self._progress(f"{what}: kept from an earlier run")
            return _compiled(target, kept, cached=True)
        request = {name: getattr(program, name) for name in _REQUESTED}
        request |= {"description": target.description, "topology": topology}
        answer = self._process.compile(
            program, request, what=what, report=self._folder / f"{key[:16]}.txt"
        )
        # Refusals too: the same program would be refused again, after as long a time.
        remark = keep_answer(self._folder, key, answer)
        return _compiled(target, answer, remark=remark)


def _environment(target: CompileTarget, num_devices: int) -> dict[str, str]:
    """The compiling process's environment: the user's own flags for the compiler stay, as they
    would on the cluster.
    """
    variables = require_compiler(target)
    # Of a flag that is given twice the last counts.
    flags = variables.get("XLA_FLAGS", "").split()
    flags += [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if flag.split("=")[0] != _DEVICE_COUNT
    ]
    if target.kind == "cpu":
        flags.append(f"{_DEVICE_COUNT}={num_devices}")
    # The new process must find this package and the compiler where this one did.
    paths = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))
    return {
        **os.environ,
        **variables,
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": paths,
    }


def _compiled(
    target: CompileTarget, answer: Mapping[str, Any], *, cached: bool = False, remark: str = ""
) -> CompiledProgram:
    said = structs.asdict(account_of(answer))
    if memory := said.pop("memory", None):
        said |= structs.asdict(memory)
    return CompiledProgram(target=target, cached=cached, remark=remark, **said)
