"""Sections of a plan: candidates that the search tried, stages, memory, arrays, communication,
inferred rules and notes. `print`, `aliquot explain` and the HTML page show the same sections and
differ only in the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core import format_bytes, format_seconds
from ._arrays import ArrayGroup, format_dims, grouped_arrays, without_moments
from ._collective_text import collective_table, stage_collective_table
from ._facts import is_pipeline, told_parts
from ._plan import Plan
from ._section import Section, SectionKind
from ._stage_text import equal_stages, stage_numbers, stage_table
from ._summary import chosen_candidate, is_as_fast, mesh_of

_MOMENTS_LEFT_OUT = "; optimizer state sharded like its parameters is left out"

# Methods whose names are neither those of a layout, such as zero3, nor followed by their stages.
_METHODS = {
    "shard": "every operator and array split as an integer program finds fastest (data, tensor,"
    " sequence and ZeRO-style splits together)",
    "blocks": "as shard, with one decision for all products through which a split passes without"
    " communication",
    "pipeshard": "pipeline stages, each planned as by shard, or no pipeline where that is faster",
    "program": "one program without pipeline stages, the fastest of dp, zero2, zero3 and shard",
}
# What else may stand in a name, behind its method.
_REMARKS = {
    "only for the batch": "that axis of the mesh (x is its first number, y its second) splits the"
    " batch, and parameters at rest as FSDP does, nothing else; gradients are reduced over it once,"
    " after the last micro-batch",
    "only for the sequence": "that axis of the mesh splits the sequence, and parameters at rest",
    "parameters gathered once": "sharded parameters are gathered once a step and kept, not again"
    " in each micro-batch",
    "in each micro-batch": "gradients are reduced over devices in each micro-batch: more"
    " communication, and less memory where they are sharded",
    "after the last micro-batch": "each device adds up whole gradients, which are reduced once",
}
_SPLITS = (
    "sharding: for each dim of an array the mesh axis that splits it, - for none; on each device:"
    " all of the count together"
)

# Differences of step times below this share would be told as 0.00%.
_LEAST_TOLD = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """The most rows that are shown in each section of a plan.

    Attributes:
        tried: plans that the search tried.
        arrays, arrays_of_stage: groups of arrays of a program, and of each kind of stage.
        kinds_of_stages: kinds of stages whose arrays are listed.
        collectives: kinds of communication.
        notes: all of them if None.
    """

    tried: int
    arrays: int
    arrays_of_stage: int
    kinds_of_stages: int
    collectives: int
    notes: int | None


BRIEF = Detail(tried=5, arrays=0, arrays_of_stage=0, kinds_of_stages=0, collectives=0, notes=0)
PRINTED = Detail(tried=8, arrays=8, arrays_of_stage=4, kinds_of_stages=4, collectives=5, notes=6)
EXPLAINED = Detail(
    tried=20, arrays=12, arrays_of_stage=6, kinds_of_stages=6, collectives=10, notes=None
)


def sections(plan: Plan, detail: Detail) -> Iterator[Section]:
    """The sections of a plan that follow its facts, in reading order."""
    if plan.provenance.candidates:
        yield _tried(plan, detail.tried)
    if is_pipeline(plan):
        yield stage_table(plan)
    p = plan.prediction
    parts = told_parts(plan)
    sizes = [*parts, ("total", p.peak_memory_bytes)]
    limit = p.memory_limit_bytes
    rows = []
    for name, size in sizes:
        rows.append((name, format_bytes(size), f"{size / limit:.1%}" if limit else ""))
    yield Section(
        kind=SectionKind.MEMORY,
        title=f"Memory on each device at its peak: {p.peak_moment} (predicted)",
        header=("part", "size", "of the limit"),
        rows=(*rows, ("limit", format_bytes(limit), "")),
        right=(1, 2),
        amounts=tuple(size for _, size in parts),
    )
    if is_pipeline(plan):
        # Sections of the largest arrays, one for each set of stages that hold equal arrays.
        kinds = list(equal_stages(plan))
        for numbers, groups in kinds[: detail.kinds_of_stages]:
            which = (
                f"Stage {numbers[0]}"
                if len(numbers) == 1
                else f"Stages {stage_numbers(numbers)}, each"
            )
            title = (
                f"{which}: sharding of the largest of {sum(group.count for group in groups)} arrays"
            )
            yield _arrays(groups, detail.arrays_of_stage, title)
        others: list[int] = []
        for numbers, _ in kinds[detail.kinds_of_stages :]:
            others += numbers
        others.sort()
        if others:
            who = (
                f"Stage {others[0]} holds"
                if len(others) == 1
                else f"Stages {stage_numbers(others)} hold"
            )
            yield Section(
                kind=SectionKind.ARRAYS, title=f"{who} other arrays: see `aliquot explain --json`."
            )
        yield stage_collective_table(plan).first(detail.collectives)
    else:
        for stage in plan.stages:
            groups = grouped_arrays(plan.inputs, stage, stage.shardings)
            title = f"Sharding of the largest of {len(plan.inputs)} arrays"
            yield _arrays(groups, detail.arrays, title)
        yield collective_table(plan).first(detail.collectives)
    if plan.inferred_rules:
        yield Section(
            kind=SectionKind.INFERRED,
            title="Inferred, as no rule is declared",
            header=("primitive", "operators", "rule", "what may be split"),
            rows=tuple(
                (each.primitive, str(each.count), each.rule, _splits(each.rule))
                for each in plan.inferred_rules
            ),
            right=(1,),
        )
    if plan.notes:
        shown = plan.notes[: detail.notes]
        left = len(plan.notes) - len(shown)
        more = (f"and {left} more",) if left else ()
        yield Section(kind=SectionKind.NOTES, title="Notes", remarks=(*shown, *more))


def _tried(plan: Plan, most: int) -> Section:
    """Plans that the search tried: the fastest first, those that it did not price last."""
    chosen = chosen_candidate(plan)
    priced = []
    for number, c in enumerate(plan.provenance.candidates):
        priced.append((_number(c.get("step_time_s")), _told(plan, c, number == chosen)))
    # What was not searched may promise less than the plan, and is none.
    priced.sort(
        key=lambda pair: (
            str(pair[1].get("outcome", "")).startswith("not searched"),
            float("inf") if pair[0] is None else pair[0],
        )
    )
    rows = []
    for step_time_s, candidate in priced:
        rows.append(
            (
                str(candidate.get("name", "")),
                mesh_of(candidate),
                _seconds(step_time_s),
                _seconds(_number(candidate.get("lower_bound_s"))),
                str(candidate.get("outcome", "")),
            )
        )
    section = Section(
        kind=SectionKind.TRIED,
        title="Tried in the search (predicted)"
        + (f", the first {most} of {len(rows)}" if len(rows) > most else ""),
        header=("method", "mesh", "step time", "lower bound", "outcome"),
        rows=tuple(rows),
        right=(2, 3),
        amounts=tuple(seconds for seconds, _ in priced if seconds is not None),
    ).first(most)
    section = replace(section, remarks=tuple(explained_names(row[0] for row in section.rows)))
    has_bounds = any(row[3] for row in section.rows)
    return section if has_bounds else section.columns((0, 1, 2, 4))


def _told(plan: Plan, candidate: dict[str, Any], is_chosen: bool) -> dict[str, Any]:
    """A candidate with its outcome as it is told: none is slower by what times do not show."""
    step_s = _number(candidate.get("step_time_s"))
    if is_chosen:
        return {**candidate, "outcome": "chosen"}
    if step_s and candidate.get("outcome") == "slower" and is_as_fast(plan, step_s):
        return {**candidate, "outcome": "as fast as the chosen"}
    chosen_s = plan.prediction.step_time_s
    if step_s and candidate.get("outcome") == "slower" and _seconds(step_s) == _seconds(chosen_s):
        return {**candidate, "outcome": f"slower by {step_s / chosen_s - 1:.2%}"}
    least_s = _number(candidate.get("lower_bound_s"))
    if step_s is None and least_s and candidate.get("outcome") == "slower":
        more = least_s / chosen_s - 1
        how = f"at least {more:.2%} slower" if more >= _LEAST_TOLD else "not faster"
        return {**candidate, "outcome": f"not planned further: {how}"}
    name = str(candidate.get("name", ""))
    if name.startswith("--recompute block") and candidate.get("outcome") == "slower":
        return {**candidate, "outcome": "slower: runs each block's forward pass twice"}
    return candidate


def explained_names(names: Iterable[str]) -> list[str]:
    """What the names of candidates in a table mean, where they do not say so: a line for each
    method, and for each remark behind one.
    """
    names = list(names)
    words = dict.fromkeys(name.partition(",")[0].partition(" ")[0] for name in names)
    lines = [f"{word}: {_METHODS[word]}." for word in words if word in _METHODS]
    told = []
    for remark in _REMARKS:
        if any(remark in name for name in names):
            told.append(remark)
    return lines + [f"{remark}: {_REMARKS[remark]}." for remark in told]


def _arrays(groups: Sequence[ArrayGroup], most: int, title: str) -> Section:
    listed = without_moments(groups)
    return Section(
        kind=SectionKind.ARRAYS,
        title=f"{title}{_MOMENTS_LEFT_OUT if len(listed) < len(groups) else ''}",
        header=("array", "count", "each, whole", "sharding", "on each device"),
        rows=tuple(
            (
                group.pattern,
                str(group.count),
                f"{group.dtype}[{', '.join(map(str, group.shape))}]",
                format_dims(group.dims),
                format_bytes(group.local_bytes),
            )
            for group in listed[:most]
        ),
        right=(1, 4),
        remarks=(_SPLITS,) if listed[:most] else (),
    )


def _splits(rule: str) -> str:
    """The splits that an inferred rule allows, in words: the dims of its first result that its
    short form does not mark as whole.
    """
    first = rule.partition("->")[2].partition(",")[0]
    split = [str(d) for d, letter in enumerate(first) if letter != "."]
    if not split:
        return "nothing: it runs whole on every device"
    return f"dim{'' if len(split) == 1 else 's'} {', '.join(split)} of its result"


def _number(value: object) -> float | None:
    # Candidates in plan files are not validated, so any value may stand there.
    return float(value) if isinstance(value, int | float) else None


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)
