"""What to type next: said by `aliquot` alone and at the end of the demo."""

from __future__ import annotations

from pathlib import Path

_STEPS = (
    (
        "aliquot plan gpt-2.6b --cluster 8xH100 --global-batch 64",
        "a plan for GPUs that you do not have",
    ),
    ("aliquot plan my_module:factory --cluster 8xH100", "a plan for your own step, see below"),
    ("aliquot explain {plan}", "why a plan is as it is, and what other choices cost"),
)
_OWN = "my_module:factory is a function that returns (train_step, state, batch) as shapes."


def next_steps(plan_file: Path | None = None) -> str:
    """Three commands to type next.

    Args:
        plan_file: a plan that there is.
    """
    steps = [(typed.format(plan=plan_file or "plan.json"), why) for typed, why in _STEPS]
    width = max(len(typed) for typed, _ in steps)
    lines = [f"  {typed:{width}}  # {why}" for typed, why in steps]
    return "\n".join(["Type next:", *lines, f"  {_OWN}"])
