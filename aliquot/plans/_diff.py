"""Two plans compared term by term: what they decide differently, and what they predict differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ._arrays import format_dims
from ._plan import CollectiveUse, Plan

Term = str | int | float | None

_FINGERPRINT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One term that differs. None stands for a term that one of the plans does not have.

    Attributes:
        section: `"decision"` or `"prediction"`.
        subject: what the term is about: a field, an array's path, an operator, a kind of collective.
        before, after: its value in the first and in the second plan; seconds where the subject ends in `_s`, bytes
            where it ends in `_bytes`.
    """

    section: str
    subject: str
    before: Term
    after: Term


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """All terms in which two plans differ, decisions first. How and how fast they were found does not count."""

    changes: tuple[Change, ...]

    @property
    def identical(self) -> bool:
        """Whether the plans decide and predict the same."""
        return not self.changes

    @property
    def decisions(self) -> tuple[Change, ...]:
        """The changes of what the plan does."""
        return tuple(change for change in self.changes if change.section == "decision")

    @property
    def predictions(self) -> tuple[Change, ...]:
        """The changes of what it is expected to cost."""
        return tuple(change for change in self.changes if change.section == "prediction")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"identical": self.identical, "changes": [asdict(change) for change in self.changes]}


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Compare two plans, also of different models, clusters or methods."""
    changes = [*_changes("decision", _decisions(before), _decisions(after))]
    changes += _changes("prediction", _predictions(before), _predictions(after))
    return PlanDiff(changes=tuple(changes))


def _changes(section: str, before: Mapping[str, Term], after: Mapping[str, Term]) -> Iterator[Change]:
    for subject in dict.fromkeys([*before, *after]):
        if before.get(subject) != after.get(subject):
            yield Change(section=section, subject=subject, before=before.get(subject), after=after.get(subject))


def _decisions(plan: Plan) -> dict[str, Term]:
    terms: dict[str, Term] = {
        "model": plan.model.name,
        **_flat("setting", plan.model.settings),
        "interface": plan.interface_fingerprint[:_FINGERPRINT],
        "graph": plan.graph_fingerprint[:_FINGERPRINT],
        **_flat("cluster", plan.cluster),
        "method": plan.method,
        "num_micro_batches": plan.num_micro_batches,
        "micro_batch_semantics": plan.micro_batch_semantics,
        "schedule": plan.schedule,
        "num_stages": len(plan.stages),
    }
    for what, arrays in (("input", plan.inputs), ("output", plan.outputs)):
        terms |= {
            f"interface of {what} {array.path}": f"{array.dtype}[{', '.join(map(str, array.shape))}]"
            for array in arrays
        }
    for index, stage in enumerate(plan.stages):
        prefix = f"stage {index} " if len(plan.stages) > 1 else ""
        terms[f"{prefix}mesh"] = "x".join(map(str, stage.mesh_shape))
        terms[f"{prefix}axes"] = ", ".join(stage.axis_names)
        terms[f"{prefix}data_axes"] = ", ".join(stage.data_axes)
        terms |= {f"{prefix}input {path}": format_dims(dims) for path, dims in stage.shardings.items()}
        terms |= {f"{prefix}output {path}": format_dims(dims) for path, dims in stage.outputs.items()}
        for op in stage.interior:
            split = ", ".join(f"{axis}: {factor}" for axis, factor in op.splits.items()) or "nothing split"
            terms[f"{prefix}operator {op.node}"] = f"{split} ({op.copies} copies)"
    terms |= {f"combine {path}": how for path, how in plan.combine.items()}
    terms |= {f"note: {note}": "noted" for note in plan.notes}
    return terms


def _predictions(plan: Plan) -> dict[str, Term]:
    p = plan.prediction
    terms: dict[str, Term] = {
        "step_time_s": p.step_time_s,
        "compute_s": p.compute_s,
        "communication_s": p.communication_s,
        "gradient_s": p.gradient_s,
        "hidden_s": p.hidden_s,
        "peak_memory_bytes": p.peak_memory_bytes,
        "memory_limit_bytes": p.memory_limit_bytes,
        "peak_moment": p.peak_moment,
        **{f"{part} memory_bytes": value for part, value in p.memory_bytes.items()},
    }
    for name, uses in _collectives(plan).items():
        terms[f"{name} count"] = sum(use.count for use in uses)
        terms[f"{name} num_bytes"] = sum(use.num_bytes for use in uses)
        terms[f"{name} time_s"] = sum(use.seconds for use in uses)
    return terms


def _collectives(plan: Plan) -> dict[str, list[CollectiveUse]]:
    found: dict[str, list[CollectiveUse]] = {}
    for use in plan.prediction.collectives:
        found.setdefault(f"{use.kind} over {'.'.join(use.axes)}", []).append(use)
    return found


def _flat(name: str, value: Any) -> dict[str, Term]:
    """Nested mappings as single terms with dotted names."""
    if isinstance(value, Mapping):
        return {path: term for key, item in value.items() for path, term in _flat(f"{name}.{key}", item).items()}
    return {name: value if isinstance(value, str | int | float | None) else str(value)}
