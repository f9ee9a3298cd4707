"""`verify_plan`: compile a plan, of one program or a pipeline."""

from __future__ import annotations

from pathlib import Path

from ..cluster import Cluster
from ..core import InputError
from ..cost import PlannedStep
from ..graph import missing_kernels, plain_context
from ._pipeline import verify_pipeline
from ._process import Progress
from ._targets import resolve_target
from ._verify import Verification, verify_program


def verify_plan(
    step: PlannedStep,
    *,
    target: str | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> Verification:
    """Compile the programs of a plan for a target that need not be here, and put the result beside
    the prediction.

    Args:
        target: see `resolve_target`; by default the device that the plan was made for.
        progress, cache: see `Compiler`.

    Raises:
        CompilerMissingError, CompileError, InputError: as `Compiler` and `resolve_target` do.
        InputError: the target lacks a kernel of the step.
    """
    wanted = resolve_target(target, Cluster.from_dict(step.plan.cluster))
    if missing := missing_kernels(step.graph, wanted.platform):
        raise InputError(
            f"the step calls {missing}, so it cannot be compiled for {wanted.name}. Leave out"
            " --target, or plan a step without them: for a model of the zoo, --attention plain."
        )
    verify = verify_pipeline if step.plan.is_pipeline else verify_program
    with plain_context():
        return verify(step, target=target, progress=progress, cache=cache)
