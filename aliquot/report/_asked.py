"""What a page answers: the model, the batch, the cluster and the command, before any answer."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from html import escape

from ..cluster import Cluster
from ..core import AliquotError, version_of
from ..plans import Plan, examples_per_step, layers_recompute, plan_devices, tokens_per_step


def asked_facts(plans: Sequence[Plan], date: str = "") -> Iterator[tuple[str, str]]:
    """Names and texts of what was asked, from plans that answer one question.

    Args:
        date: on which the page is written; left out where empty.
    """
    first = plans[0]
    yield "model", first.model.name or "step"
    rows, tokens = examples_per_step(first), tokens_per_step(first)
    if rows and tokens and tokens % rows == 0:
        yield "batch", f"{rows} sequences of {tokens // rows} tokens"
    elif rows:
        yield "batch", f"{rows} examples"
    yield "dtype", first.model.flops_dtype or str(first.model.settings.get("dtype", ""))
    devices = []
    for plan in plans:
        devices.append(f"{plan.cluster.get('name', 'a cluster')} ({plan_devices(plan)} devices)")
    yield "cluster", ", ".join(dict.fromkeys(devices))
    yield "method", ", ".join(dict.fromkeys(plan.method for plan in plans))
    yield "date", date
    yield "version", f"aliquot {version_of('aliquot')}"


def command_of(plan: Plan) -> str:
    """The command that asks for a plan again; empty for steps that were passed as functions."""
    if plan.model.kind == "closure":
        return ""
    words = ["aliquot", "plan", plan.model.name, "--cluster", _typed(plan)]
    words += _model_words(plan)
    how = layers_recompute(plan)
    words += ["--recompute", str(how)] if isinstance(how, str) else []
    words += ["--method", plan.method] if plan.method != "auto" else []
    if plan.num_micro_batches > 1 and plan.method != "auto":
        words += ["--micro-batches", str(plan.num_micro_batches)]
    return shlex.join(words)


def comparing_command(plans: Sequence[Plan], methods: Sequence[str]) -> str:
    """The command that compares plans again; empty for steps that were passed as functions."""
    if plans[0].model.kind == "closure":
        return ""
    clusters = list(dict.fromkeys(map(_typed, plans)))
    where = "--cluster" if len(clusters) == 1 else "--clusters"
    words = ["aliquot", "compare", plans[0].model.name, where, ",".join(clusters)]
    words += _model_words(plans[0])
    # Commas separate methods, and degrees in their names.
    named = [method.replace(",", "-") for method in methods]
    return shlex.join([*words, "--methods", ",".join(named)])


def command_block(command: str) -> str:
    """HTML of a command to copy; empty for none."""
    return f'<pre class="command"><code>{escape(command)}</code></pre>' if command else ""


def _typed(plan: Plan) -> str:
    """A cluster as it is typed: a preset's name, or a file to write first."""
    name = str(plan.cluster.get("name", ""))
    with contextlib.suppress(AliquotError):
        return Cluster.preset(name).name
    return "cluster.toml"


def _model_words(plan: Plan) -> Iterator[str]:
    """Options that shape the model."""
    settings = plan.model.settings
    if plan.model.kind != "zoo":
        for name, value in settings.items():
            yield from ("--set", f"{name}={value}")
        return
    yield from ("--global-batch", str(settings.get("global_batch", examples_per_step(plan))))
    overrides = settings.get("overrides")
    for name, value in (overrides if isinstance(overrides, dict) else {}).items():
        yield from ("--set", f"{name}={value}")
    dtype = settings.get("dtype")
    if isinstance(dtype, str) and dtype != "bf16":
        yield from ("--dtype", dtype)
    if settings.get("scan") is True:
        yield "--scan"
