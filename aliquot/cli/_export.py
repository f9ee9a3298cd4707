"""`aliquot export`: a plan as settings of another framework."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..core import format_bytes, format_seconds, write_atomic
from ._devices import use_host_only
from ._groups import option
from ._options import Json, PlanFile, check_destination, read_plan
from ._session import session

if TYPE_CHECKING:
    from ..interop.frameworks import Written
    from ..plans import Plan


def export(
    plan_file: PlanFile,
    to: str = option(
        "megatron, bridge, torchtitan (or torchtitan-0.3, torchtitan-0.2 for TOML), maxtext,"
        " accelerate, deepspeed or flax.",
        ...,
        metavar="NAME",
    ),
    out: Path | None = option(
        "Write the settings here; by default they are printed.", metavar="FILE"
    ),
    allow_loss: bool = option("Write what the framework can say, and list what it cannot.", False),
    as_json: Json = False,
) -> None:
    """Write a plan as settings of Megatron-LM, Megatron-Bridge, torchtitan, MaxText, accelerate,
    DeepSpeed or Flax. What these cannot express is listed, and is an error (exit code 4) unless
    --allow-loss is given.
    """
    with session(as_json) as say:
        use_host_only()
        check_destination(out)
        from .._reading import export as export_plan

        plan = read_plan(plan_file)
        written = export_plan(plan, to, allow_loss=allow_loss)
        for text in written.lost:
            say.note(f"lost: {text}")
        if out is None:
            say.show(written.text)
        else:
            write_atomic(out, written.text)
            say.show(f"Written to {out}, for {written.framework} {written.version}.")
        say.note(_predicted(plan, written, out))
        say.finish(
            {
                "framework": written.framework,
                "version": written.version,
                "text": written.text,
                "file": str(out) if out else None,
                "usual_name": written.file_name,
                "lost": list(written.lost),
            }
        )


def _predicted(plan: Plan, written: Written, out: Path | None) -> str:
    """Whether the plan's time and memory are those of the settings, too."""
    p = plan.prediction
    figures = (
        f"{format_seconds(p.step_time_s)} a step and {format_bytes(p.peak_memory_bytes)} on each"
        " device are predicted for the plan"
    )
    if not written.lost:
        return f"{figures}, all of which these settings say."
    said = f"{figures}. Without what is lost both may differ"
    if written.framework == "flax":
        return f"{said}."
    model = f" --model {plan.model.name}" if plan.model.kind == "zoo" else ""
    options = [f" --{name.replace('_', '-')} {value}" for name, value in written.left_open.items()]
    asked = f"{out or 'FILE'}{model} --cluster {plan.cluster.get('name')}{''.join(options)}"
    return f"{said}: aliquot read {asked} predicts them."
