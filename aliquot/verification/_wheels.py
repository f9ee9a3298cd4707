"""Detection of installed compilers, and whether they fit the installed JAX."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..core import AliquotError, how_to_install, with_xla_flags
from ._targets import CompileTarget

_GPU_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


class CompilerMissingError(AliquotError):
    """A target whose compiler is not installed, or is of another release than JAX; says what to
    install.
    """


def require_compiler(target: CompileTarget) -> Mapping[str, str]:
    """Environment variables with which a process finds the target's compiler.

    Raises:
        CompilerMissingError: it is not there; the message is the command that installs it.
    """
    if target.kind == "gpu":
        jax_version = version("jax")
        fitting = (
            f"jax-cuda12-plugin=={jax_version} jax-cuda12-pjrt=={jax_version} nvidia-cuda-nvcc-cu12"
        )
        versions, missing = {}, []
        for name in _GPU_PACKAGES:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                missing.append(name)
        if missing:
            raise _missing(target, ", ".join(missing), "verify-gpu", f"--no-deps {fitting}")
        wrong = []
        for name in _GPU_PACKAGES[:2]:
            if versions[name] != jax_version:
                wrong.append(f"{name} {versions[name]}")
        if wrong:
            raise CompilerMissingError(
                f"the compiler for {target.name} is {' and '.join(wrong)}, and JAX is"
                f" {jax_version}: they must be the same release.\n  Run: pip install --no-deps"
                f" {fitting}"
            )
        places: Iterable[str] = ()
        with contextlib.suppress(ModuleNotFoundError):
            module_spec = importlib.util.find_spec("nvidia.cuda_nvcc")
            places = (module_spec and module_spec.submodule_search_locations) or ()
        folder = next((p for p in map(Path, places) if (p / "bin" / "ptxas").is_file()), None)
        if folder is None:
            what = "the assembler of nvidia-cuda-nvcc-cu12"
            raise _missing(target, what, "verify-gpu", f"--no-deps {fitting}")
        flags = _UNTUNED | (_MODELLED if target.name in _WITH_TABLES else {})
        return {"XLA_FLAGS": with_xla_flags(f"--xla_gpu_cuda_data_dir={folder}", flags)}
    if target.kind == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise _missing(target, "libtpu", "verify-tpu", f"'jax[tpu]=={version('jax')}'")
        return {"TPU_SKIP_MDS_QUERY": "1"}
    return {}


# Without a GPU nothing is tuned. The compiler then writes a kernel of its own for every product,
# with tiles that it guesses: a third of its time, and for some shapes it finds none and gives up.
# Tuned, large products are mostly calls of cuBLAS, and this makes all of them that. Collectives
# stay the same; memory grows by a workspace (22 MiB of 9.6 GiB for GPT-1.3B on 8 H100).
_UNTUNED = {"--xla_gpu_enable_triton_gemm": "false"}
# Writes what XLA expects each kernel to take into the program's text. It needs XLA's tables of
# measured products, and ends the compilation for other GPUs.
_MODELLED = {"--xla_gpu_collect_cost_model_stats": "true"}
_WITH_TABLES = ("H100", "H200", "B200")


def _missing(target: CompileTarget, what: str, extra: str, packages: str) -> CompilerMissingError:
    return CompilerMissingError(
        f"compiling for {target.name} needs its compiler, which is not installed (missing:"
        f" {what}).\n  Run: {how_to_install(extra)}   (or only the compiler: pip install"
        f" {packages})"
    )
