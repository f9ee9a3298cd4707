"""Does one question have one answer, whichever command is asked?

What `compare`, `size`, `plan --max-batch` and the remedies of a refusal say is asked again of
`plan`, as a reader would type it. Each row of a table must be the plan of its method, cluster and
batch, with the same step time. The largest batch must have a plan, and the next one none. Each
change that is said to help must help, and each that is said not to must not.

    python benchmarks/one_answer.py [--journal FILE] [--quick] [--only TEXT]
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from _results import Journal, Report, options, with_rows
from typer.testing import CliRunner

from aliquot.cli._app import app

# Step times of remedies are searched with this gap.
_GAP = 0.02
_ROUNDING = 1e-9
_MODELS = {
    "gpt": "gpt-125m num_layers=1 vocab_size=512 hidden_size=96 seq_len=256",
    "two layers": "gpt-125m num_layers=2 vocab_size=512 hidden_size=96 seq_len=256",
    "llama": "llama-7b num_layers=2 hidden_size=256 num_heads=4 vocab_size=512 seq_len=128",
    "experts": (
        "moe-380m num_layers=2 hidden_size=16 num_heads=2 vocab_size=32 seq_len=8 num_experts=4"
        " group_size=32"
    ),
    "gpt-2.6b": "gpt-2.6b",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command of which `plan` is asked the same."""

    kind: str
    model: str
    options: str

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.kind}: {self.model}, {self.options}"


_CASES = [
    Case(kind=kind, model=model, options=text)
    for kind, model, text in (
        ("compare", "gpt", "--cluster 4xH100 --global-batch 8 --methods auto,ddp,zero2,fsdp,tp:2"),
        ("max-batch", "gpt", "--cluster 4xH100 --method ddp --memory-limit 150MiB"),
        ("size", "gpt", "--device H100 --devices-per-host 2 --global-batch 8 --max-hosts 2"),
        ("remedies", "gpt", "--cluster 4xH100 --global-batch 64 --method ddp --memory-limit 24MiB"),
        ("compare", "two layers", "--cluster 4xH100 --global-batch 16 --methods pipeshard,auto"),
        (
            "compare",
            "gpt",
            "--cluster 2x2xA100-80GB --global-batch 32 --methods auto,ddp,hsdp,program"
            " --memory-limit 100MiB",
        ),
        ("compare", "gpt", "--clusters 4xV100-32GB,2x2xH100,4xv5e --global-batch 8"),
        (
            "compare",
            "llama",
            "--cluster 4xA100-80GB --global-batch 16 --scan --methods fsdp,tp:4,shard",
        ),
        (
            "compare",
            "llama",
            "--cluster 4xA100-80GB --global-batch 32 --micro-batches auto --methods ddp,fsdp"
            " --memory-limit 100MiB",
        ),
        ("compare", "experts", "--cluster 4xV100-16GB --global-batch 16 --methods auto,zero2,ddp"),
        ("max-batch", "gpt", "--cluster 4xH100 --method fsdp --memory-limit 150MiB"),
        (
            "max-batch",
            "gpt",
            "--cluster 4xH100 --method ddp --micro-batches 4 --memory-limit 90MiB",
        ),
        ("max-batch", "gpt", "--cluster 4xH100 --memory-limit 60MiB"),
        ("max-batch", "gpt", "--cluster 4xH100 --memory-limit 5MiB"),
        (
            "max-batch",
            "llama",
            "--cluster 2x2xA100-40GB --scan --method zero2 --memory-limit 120MiB",
        ),
        ("max-batch", "llama", "--cluster 4xA100-40GB --method tp:2 --memory-limit 90MiB"),
        ("max-batch", "experts", "--cluster 2xH100 --method dp --memory-limit 500KiB"),
        ("max-batch", "experts", "--cluster 2xH100 --memory-limit 400KiB"),
        (
            "size",
            "llama",
            "--device A100-80GB --devices-per-host 4 --global-batch 16 --max-hosts 4",
        ),
        (
            "size",
            "gpt",
            "--device V100-16GB --devices-per-host 2 --global-batch 32 --memory-limit 40MiB"
            " --max-hosts 4",
        ),
        (
            "remedies",
            "gpt",
            "--cluster 4xH100 --global-batch 64 --method fsdp --memory-limit 16MiB",
        ),
        ("remedies", "gpt", "--cluster 4xH100 --global-batch 32 --memory-limit 4MiB"),
        (
            "remedies",
            "llama",
            "--cluster 2x2xA100-40GB --global-batch 64 --method zero2 --recompute none"
            " --memory-limit 30MiB",
        ),
        (
            "remedies",
            "gpt",
            "--cluster 4xH100 --global-batch 64 --method tp:4 --memory-limit 12MiB",
        ),
        ("compare", "gpt-2.6b", "--cluster 8xH100 --global-batch 64 --methods auto,fsdp"),
    )
]


def ask(*arguments: str) -> dict[str, Any]:
    """The answer of `aliquot *arguments --json`, with what is wrong as "error"."""
    done = CliRunner().invoke(app, [*arguments, "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
    return answer if answer else {"error": done.stderr.strip().partition("\n")[0]}


def planned(words: list[str]) -> float | None:
    """The step time of the plan that a command finds; None if it finds none."""
    seconds: float | None = ask("plan", *words, "--no-remedies").get("step_time_s")
    return seconds


def changed(words: list[str], change: str) -> list[str]:
    """The words of a command after a change that a remedy names."""
    more, _, without = change.partition(" without ")
    for option in [*more.split()[::2], *without.split(" and ")]:
        if option in words:
            k = words.index(option)
            words = words[:k] + words[k + 2 :]
    return [*words, *more.split()]


def without(words: list[str], *names: str) -> list[str]:
    """The words of a command without some options, each of which has a value."""
    for name in names:
        if name in words:
            k = words.index(name)
            words = words[:k] + words[k + 2 :]
    return words


def words_of(case: Case) -> list[str]:
    """The model with its settings, and the options."""
    name, *settings = _MODELS[case.model].split()
    return [name, *(w for each in settings for w in ("--set", each)), *case.options.split()]


def questions(case: Case) -> Iterator[dict[str, Any]]:
    """What a command answers, each with what `plan` says to it."""
    words = words_of(case)
    if case.kind == "compare":
        base = without(words, "--methods", "--clusters", "--cluster")
        for row in ask("compare", *words)["candidates"]:
            asked = ["--cluster", row["cluster"], "--method", row["method"]]
            said = f"{row['method']} on {row['cluster']}"
            yield same(said, row["step_time_s"], planned([*base, *asked]))
    elif case.kind == "size":
        base = without(words, "--device", "--devices-per-host", "--max-hosts")
        for row in ask("size", *words, "--tokens", "1T", "--by", "1d")["options"]:
            found = planned([*base, "--cluster", row["cluster"]])
            yield same(row["cluster"], row["step_time_s"], found)
    elif case.kind == "max-batch":
        answer = ask("plan", *words, "--max-batch")
        at = {each["global_batch"]: each["step_time_s"] for each in answer["trials"]}
        largest, unit = answer["largest_batch"], answer["multiple_of"]
        sizes = [largest, largest + unit] if answer["is_limited_by_memory"] else [largest or unit]
        for size in sizes:
            yield same(f"batch {size}", at[size], planned([*words, "--global-batch", str(size)]))
    else:
        for each in ask("plan", *words).get("remedies", []):
            if each["fits"] is not None:
                found = planned(changed(words, each["change"]))
                yield same(each["change"], each["step_time_s"], found, gap=_GAP)


def same(said: str, here_s: float | None, plan_s: float | None, gap: float = 0.0) -> dict[str, Any]:
    """A question, both answers, and whether they contradict each other."""
    if here_s is None or plan_s is None:
        agree = here_s is plan_s
    else:
        agree = plan_s <= here_s * (1 + _ROUNDING) and plan_s * (1 + gap + _ROUNDING) >= here_s
    return {"of": said, "step s": here_s, "plan: step s": plan_s, "agree": agree}


def _row(case: Case) -> dict[str, Any]:
    started = time.process_time()
    found = list(questions(case))
    return {"questions": found, "cpu_s": time.process_time() - started}


def _shown(seconds: float | None) -> str:
    return "none" if seconds is None or math.isnan(seconds) else f"{seconds * 1e3:.4g} ms"


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    journal = Journal(chosen.journal)
    cases = [case for case in _CASES[: 4 if chosen.quick else None] if chosen.only in case.name]
    answers = {case: journal.row(case.name, lambda case=case: _row(case)) for case in cases}  # type: ignore[misc]
    rows = [
        {
            "asked": case.kind,
            "model": case.model,
            "options": case.options,
            "of": each["of"],
            "answer": _shown(each["step s"]),
            "plan": _shown(each["plan: step s"]),
            "contradiction": "" if each["agree"] else "yes",
        }
        for case, answer in answers.items()
        for each in answer["questions"]
    ]
    wrong = sum(row["contradiction"] == "yes" for row in rows)
    report = Report(
        name="one_answer",
        question="One question, one answer: compare, size, max-batch and remedies beside plan",
        bar="0 contradictions in at least 50 questions",
        method=(
            "Commands of `aliquot` in one process. Each answer of `compare`, `size` and"
            " `plan --max-batch` is asked again of `plan`, with the same options: the step time"
            " must be the same, and where none fits, none may fit. Of the largest batch and of the"
            " next one both are asked. Remedies are typed as they are advised; they are searched"
            " with a gap of 2 %, by which plan may be faster."
        ),
        summary={
            "questions": len(rows),
            "contradictions": wrong,
            **{
                f"of {kind}": sum(row["asked"] == kind for row in rows)
                for kind in ("compare", "size", "max-batch", "remedies")
            },
            "processor time s": round(sum(each["cpu_s"] for each in answers.values()), 1),
        },
        tables={"Questions": rows},
    )
    return report.finish(chosen, met=len(rows) >= 50 and wrong == 0)


if __name__ == "__main__":
    raise SystemExit(main())
