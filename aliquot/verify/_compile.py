"""Compile a program for a target in a process of its own, so that no flag, platform or memory stays in the user's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from ..core import AliquotError, InputError, format_bytes, format_seconds
from ..runtime import CompiledCollective
from ._cache import default_cache, keep_answer, read_answer
from ._program import PortableProgram
from ._targets import CompileTarget
from ._wheels import require_compiler

Progress: TypeAlias = Callable[[str], None]
"""Called with a line about what is going on."""

_FORMAT = "1"
_POLL_S = 0.1
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_OUT_OF_MEMORY = re.compile(
    r"(?:Used|total hbm usage >=|requires?|allocat\w+) +([\d.]+)([KMGT])(?:i?B)? of", re.IGNORECASE
)


class CompileError(AliquotError):
    """A program that its compiler refuses, or that needs more memory to compile than there is."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """What a compiler says about a program, in bytes on each device.

    Attributes:
        target: what it was compiled for.
        argument_bytes, output_bytes, temp_bytes, alias_bytes: as the compiler assigned them; `alias_bytes` of the outputs
            live in donated arguments.
        live_bytes: the most that is in use at any moment, holes between buffers not counted; 0 if unknown.
        collectives: every collective instruction; labels name causes.
        cycles: what a TPU's compiler expects a step to take; 0 for others.
        compile_s: seconds that the compiler took.
        refusal: if the compiler found that it does not fit: its words. Then only `needed_bytes` is known.
        cached: whether the answer was there already.
        remark: what went wrong besides.
    """

    target: CompileTarget
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0
    live_bytes: int = 0
    needed_bytes: float | None = None
    collectives: tuple[CompiledCollective, ...] = ()
    cycles: float = 0.0
    compile_s: float = 0.0
    refusal: str = ""
    cached: bool = False
    remark: str = ""

    @property
    def peak_bytes(self) -> float:
        """What must be free on a device: arguments, outputs that take nobody's place, and temporaries."""
        if self.needed_bytes is not None:
            return self.needed_bytes
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def compile_program(
    program: PortableProgram,
    target: CompileTarget,
    *,
    devices_per_host: int,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> CompiledProgram:
    """Compile a program and return the compiler's account of it.

    Args:
        program: lowered for the target's platform.
        target: what to compile for.
        devices_per_host: how the devices are shared out.
        progress: told what is going on, several times a second.
        cache: folder of earlier answers; by default `default_cache()`.

    Raises:
        CompilerMissingError: the target's compiler is not installed.
        CompileError: the compiler refuses the program, or was stopped for want of memory.
        InputError: there is no room for the program on disk, or the target's description is of another release.
    """
    environment = _environment(target, program)
    topology = target.topology(program.num_devices, devices_per_host)
    key = _key(program, target, topology, environment)
    folder = cache or default_cache()
    kept = read_answer(folder, key)
    if kept is not None:
        return _compiled(target, kept, cached=True)
    request = {
        "platform": program.platform,
        "description": target.description,
        "topology": topology,
        "mesh_shape": program.mesh_shape,
        "axis_names": program.axis_names,
        "in_dims": program.in_dims,
        "out_dims": program.out_dims,
        "donated": program.donated,
        "x64": program.x64,
    }
    place = _place(program, request)
    try:
        answer = _run(place, program, target, environment, progress or (lambda line: None), folder / f"{key[:16]}.txt")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    remark = keep_answer(folder, key, answer)
    return _compiled(target, answer, remark=remark)


def _environment(target: CompileTarget, program: PortableProgram) -> dict[str, str]:
    """The compiling process's environment: the user's own flags for the compiler stay, as they would on the cluster."""
    own = require_compiler(target)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.split("=")[0] != _DEVICE_COUNT]
    if target.kind == "cpu":
        flags.append(f"{_DEVICE_COUNT}={program.num_devices}")
    flags += own.get("XLA_FLAGS", "").split()
    # Where this package and the compiler were found, they must be found again.
    paths = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))
    return {**os.environ, **own, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}


def _key(program: PortableProgram, target: CompileTarget, topology: str, environment: Mapping[str, str]) -> str:
    parts = [
        _FORMAT,
        version("jax"),
        version("jaxlib"),
        version("aliquot"),
        program.fingerprint,
        target.platform,
        target.description,
        topology,
        environment["XLA_FLAGS"],
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _place(program: PortableProgram, request: Mapping[str, Any]) -> Path:
    try:
        place = Path(tempfile.mkdtemp(prefix="aliquot-verify-"))
        try:
            (place / "request.json").write_text(json.dumps(request))
            (place / "module.bin").write_bytes(program.module)
        except OSError:
            shutil.rmtree(place, ignore_errors=True)
            raise
    except OSError as error:
        raise InputError(
            f"the program ({format_bytes(len(program.module))}) cannot be written to {tempfile.gettempdir()!r} for its "
            f"compiler: {error.strerror or error}. Free some space, or set TMPDIR to another folder."
        ) from None
    return place


def _run(
    place: Path,
    program: PortableProgram,
    target: CompileTarget,
    environment: Mapping[str, str],
    progress: Progress,
    report: Path,
) -> dict[str, Any]:
    started, most = time.monotonic(), 0
    log = place / "log.txt"
    with log.open("wb") as stream:
        command = [sys.executable, "-m", f"{__package__}._worker", str(place)]
        process = subprocess.Popen(
            command, env=dict(environment), stdout=stream, stderr=stream, stdin=subprocess.DEVNULL
        )
        try:
            while process.poll() is None:
                most = max(most, _memory_bytes(process.pid))
                spent = format_seconds(time.monotonic() - started)
                progress(f"compiling for {program.num_devices} x {target.name} ({spent})")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    words = log.read_text(errors="replace")
    try:
        answer: dict[str, Any] = json.loads((place / "result.json").read_text())
    except (OSError, ValueError):
        raise _died(process.returncode, most, words, program, target, report) from None
    if "error" in answer:
        return _refused(str(answer["error"]), str(answer["message"]), words, target, report)
    return answer


def _died(
    code: int, most: int, words: str, program: PortableProgram, target: CompileTarget, report: Path
) -> CompileError:
    size = f"a program of {format_bytes(len(program.module))}"
    if code == -9 or "bad_alloc" in words or "MemoryError" in words:
        return CompileError(
            f"compiling {size} for {target.name} was stopped when it had taken {format_bytes(most)} of memory, most "
            f"likely because there was no more.\n  Free memory, or plan the model with --scan: loops compile smaller."
        )
    lines = [line for line in words.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    return CompileError(
        f"the compiler for {target.name} ended with code {code} on {size}: {last:.200}\n  {_filed(report, words)}"
    )


def _refused(error: str, message: str, words: str, target: CompileTarget, report: Path) -> dict[str, Any]:
    """The answer if the program is too big for the device; otherwise an error."""
    found = _OUT_OF_MEMORY.search(message)
    if "RESOURCE_EXHAUSTED" in message and found:
        scale = 1024 ** ("KMGT".index(found.group(2).upper()) + 1)
        return {"refusal": message.strip().partition("\n")[0][:300], "needed_bytes": float(found.group(1)) * scale}
    first = message.strip().partition("\n")[0]
    if target.description and ("target_config" in message or "TextFormat" in words or "GpuTargetConfig" in message):
        raise InputError(
            f"the description of {target.name} is not understood by the compiler of JAX {version('jax')}: {first:.200}\n"
            "  It may be of another release; take the file that this release of OpenXLA has."
        )
    everything = f"{message}\n\n{words}"
    raise CompileError(
        f"the program does not compile for {target.name}: {error}: {first:.300}\n  {_filed(report, everything)}"
    )


def _filed(report: Path, text: str) -> str:
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(text)
    except OSError as error:
        return f"All that it said could not be written to {report}: {error.strerror}."
    return f"All that it said is in {report}"


def _memory_bytes(pid: int) -> int:
    """Most memory that a process has held so far; 0 where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found.group(1)) * 1024 if found else 0


def _compiled(
    target: CompileTarget, answer: Mapping[str, Any], *, cached: bool = False, remark: str = ""
) -> CompiledProgram:
    if "refusal" in answer:
        return CompiledProgram(
            target=target,
            refusal=answer["refusal"],
            needed_bytes=answer["needed_bytes"],
            cached=cached,
            remark=remark,
        )
    memory = answer["memory"]
    return CompiledProgram(
        target=target,
        argument_bytes=memory["argument_bytes"],
        output_bytes=memory["output_bytes"],
        temp_bytes=memory["temp_bytes"],
        alias_bytes=memory["alias_bytes"],
        live_bytes=memory["live_bytes"],
        collectives=tuple(CompiledCollective(**{**c, "axes": tuple(c["axes"])}) for c in answer["collectives"]),
        cycles=answer["cycles"],
        compile_s=answer["compile_s"],
        cached=cached,
        remark=remark,
    )
