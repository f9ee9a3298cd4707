"""Advice of plans and errors, taken: each change that is said to help is planned again as a
command would, and must give what was promised.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from _relation_cases import METHODS, ZOO, Case, cluster_of, step_of

import aliquot as aq
from aliquot.core import InfeasibleError, format_seconds
from aliquot.plans import Plan

GAP = 0.002
ROUNDING = 1e-9
_BUDGET_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Figures of a plan, or that none fits."""

    step_s: float | None
    memory_bytes: float | None = None

    @property
    def text(self) -> str:
        """As a reader sees it."""
        return "does not fit" if self.step_s is None else format_seconds(self.step_s)


_OPTIONS = {
    "pipeshard, 1 stage": {"--method": "pipeshard", "--stages": "1"},
    "pipeshard, 2 stages": {"--method": "pipeshard", "--stages": "2"},
    "pipeshard, 1f1b": {"--method": "pipeshard", "--schedule": "1f1b"},
}
"""Options of the command line for methods that are more than a name."""


def advice_of_refusal(case: Case, asked: dict[str, Any], error: InfeasibleError) -> list[Any]:
    """Advice where nothing fits: one row for each remedy, and one for the memory that is said to be
    needed, which must be more than there is.

    Args:
        asked: keywords of `aliquot.plan`, without the method.
    """
    # Without a given limit a plan of any size may be the answer, as none is made that does not fit.
    limit = asked["memory_limit_bytes"] or error.available_bytes or math.inf
    method = METHODS[case.method]
    remedies = aq.find_remedies(
        *step_of(case).arguments, method=method, budget_s=_BUDGET_S, **asked
    )
    rows = []
    for each in remedies:
        if each.is_known:
            promised = each.plan.prediction.step_time_s if each.plan else None
            changed = case_with(case, asked, each.change)
            rows.append(taken(each.change, Answer(step_s=promised), answer(*changed), limit))
    if error.required_bytes is not None:
        says = f"needs {error.required_bytes} bytes"
        holds = error.required_bytes > limit
        rows.append({"says": says, "found": f"{limit} are there", "holds": holds})
    return rows


def case_with(case: Case, asked: dict[str, Any], change: str) -> tuple[Case, dict[str, Any]]:
    """The case and the keywords that options of the command line lead to."""
    option, value, *_ = change.split()
    if option == "--micro-batches":
        return case, {**asked, "num_micro_batches": int(value)}
    if option == "--method":
        return replace(case, method=value), asked
    if option == "--cluster":
        return case, {**asked, "cluster": aq.Cluster.preset(value)}
    raise AssertionError(f"no remedy is known to change {option}")


def answer(case: Case, asked: dict[str, Any]) -> Answer:
    """The plan of a case with these keywords."""
    try:
        plan = aq.plan(*step_of(case).arguments, method=METHODS[case.method], **asked)
    except InfeasibleError:
        return Answer(step_s=None)
    p = plan.prediction
    return Answer(step_s=p.step_time_s, memory_bytes=p.peak_memory_bytes)


def taken(change: str, promised: Answer, found: Answer, limit_bytes: float) -> dict[str, Any]:
    """A row about a change: what fits as promised must fit, and be no slower; what does not fit
    must not.
    """
    if promised.step_s is None or found.step_s is None:
        holds = promised.step_s is found.step_s
    else:
        fits = found.memory_bytes is None or found.memory_bytes <= limit_bytes * (1 + ROUNDING)
        holds = fits and found.step_s <= promised.step_s * (1 + GAP)
    return {"says": f"{change}: {promised.text}", "found": found.text, "holds": holds}


def advice_of_plan(case: Case, asked: dict[str, Any], plan: Plan) -> Iterator[dict[str, Any]]:
    """The batch sizes that a plan says its devices would divide: so they must, and a plan of one
    program with such a batch must not say that they do not.
    """
    for note in plan.notes:
        for size in map(int, re.findall(r"a size of (\d+)", note)):
            devices = int(note.split()[0])
            row = {"says": f"{devices} devices divide {size}", "found": "", "holds": True}
            if size % devices:
                row |= {"found": "they do not", "holds": False}
            elif case.method in ("dp", "zero2", "zero3", "shard", "program"):
                other = replace(case, batch=size * plan.num_micro_batches)
                again = aq.plan(*step_of(other).arguments, method=METHODS[case.method], **asked)
                odd = [n for n in again.notes if "do not divide" in n]
                row |= {"found": "; ".join(odd), "holds": not odd}
            yield row


def advice_of_command(case: Case) -> list[dict[str, Any]]:
    """Remedies that `aliquot plan` prints for a model of the zoo with too little memory, each typed
    as it says.
    """
    settings = [f"--set={name}={value}" for name, value in ZOO[case.model].items()]
    limit = (case.memory_share or 1.0) * cluster_of(case).device.memory_bytes
    options = {
        "--cluster": case.cluster,
        "--global-batch": str(case.batch),
        **_OPTIONS.get(case.method, {"--method": case.method}),
        "--dtype": "bf16",
        "--memory-limit": f"{int(limit)}B",
    }
    options |= {"--micro-batches": str(case.count)} if case.count else {}
    flags = [*(["--scan"] if case.scanned else []), *settings]
    first = _typed(case.model, options, flags)
    rows = []
    for each in first.get("remedies", []):
        if each["fits"] is None:
            continue
        option, value, *without = each["change"].split()
        kept = {name: given for name, given in options.items() if name not in without}
        found = _typed(case.model, kept | {option: value}, [*flags, "--no-remedies"])
        rows.append(
            taken(
                each["change"],
                Answer(step_s=each["step_time_s"] if each["fits"] else None),
                Answer(step_s=found["step_time_s"], memory_bytes=found["peak_memory_bytes"]),
                limit,
            )
        )
    return rows


def _typed(model: str, options: dict[str, str], flags: list[str]) -> dict[str, Any]:
    pairs = [word for pair in options.items() for word in pair]
    words = [sys.executable, "-m", "aliquot", "plan", model, *pairs, *flags, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(words)} said: {done.stderr}")
    answered: dict[str, Any] = json.loads(done.stdout)
    return answered
