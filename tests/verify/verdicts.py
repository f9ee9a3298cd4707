"""What a compiler might say of a plan."""

from aliquot.plans import Plan
from aliquot.verification import (
    CompiledProgram,
    CompileTarget,
    StageVerification,
    UnintendedCollective,
    Verification,
)

TARGET = CompileTarget(name="H100", kind="gpu", limit_bytes=1000.0)
ODD = UnintendedCollective(
    kind="all-to-all", axes=("x",), count=2, num_bytes=64, dtype="f32", cause="dot at a.py:3 (f)"
)


def verified(
    plan: Plan, compiled_bytes: int, limit_bytes: float | None = TARGET.limit_bytes
) -> Verification:
    """What a compiler that needs so many bytes says of a plan."""
    compiled = CompiledProgram(target=TARGET, temp_bytes=compiled_bytes, compile_s=1.0)
    stage = StageVerification(
        predicted_bytes=plan.prediction.peak_memory_bytes,
        predicted_parts={},
        argument_bytes=0.0,
        compiled=compiled,
        collectives=(),
        unintended=(ODD,),
    )
    return Verification(
        target=TARGET,
        num_devices=8,
        limit_bytes=limit_bytes,
        predicted_step_time_s=1.0,
        predicted_compute_s=1.0,
        stages=(stage,),
    )
