"""`verify_plan`: compile a plan, of one program or a pipeline."""

from __future__ import annotations

from pathlib import Path

from ..cost import PlannedStep
from ._pipeline import verify_pipeline
from ._process import Progress
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
    """
    verify = verify_pipeline if step.plan.is_pipeline else verify_program
    return verify(step, target=target, progress=progress, cache=cache)
