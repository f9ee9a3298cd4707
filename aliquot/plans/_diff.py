"""Comparison of two plans, term by term: differences of decisions and of predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ._arrays import format_dims
from ._facts import is_pipeline
from ._plan import PREDICTED_FIGURES, CollectiveUse, Plan
from ._stage_text import device_range, short_layers

Term = str | int | float | None

_FINGERPRINT = 12
_OF_STAGES = (
    "forward_s",
    "backward_s",
    "update_s",
    "transfer_s",
    "transfer_back_s",
    "bubble",
    "in_flight",
    "peak_memory_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One term that differs. None stands for a term that one of the plans does not have.

    Attributes:
        section: `"decision"` or `"prediction"`.
        subject: what the term is about: a field, an array's path, an operator, a kind of
            collective.
        before, after: its value in the first and in the second plan; in the unit that the subject
            names: `_s`, `_bytes`, `_bytes_per_s`, `flops_per_s`.
    """

    section: str
    subject: str
    before: Term
    after: Term


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """All terms in which two plans differ, decisions first. How they were found, and how fast, is
    ignored.

    Attributes:
        changes: one for each term.
        roles: of the inputs of either plan by path, such as `"parameter"`.
    """

    changes: tuple[Change, ...]
    roles: Mapping[str, str]

    @property
    def identical(self) -> bool:
        """True if the plans decide and predict the same."""
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
        return {"identical": self.identical, "changes": list(map(asdict, self.changes))}


def diff(before: Plan, after: Plan) -> PlanDiff:
    """Compare two plans, also of different models, clusters or methods.

    Operators inside stages are compared only if both plans cut the step into the same stages;
    otherwise operators with the same name may be different ones.
    """
    cuts = []
    for plan in (before, after):
        cuts.append([stage.layer_names for stage in plan.stages])
    same_cut = cuts[0] == cuts[1]
    changes = [*_changes("decision", _decisions(before, same_cut), _decisions(after, same_cut))]
    changes += _changes("prediction", _predictions(before), _predictions(after))
    roles = {array.path: array.role for plan in (before, after) for array in plan.inputs}
    return PlanDiff(changes=tuple(changes), roles=roles)


def _changes(
    section: str, before: Mapping[str, Term], after: Mapping[str, Term]
) -> Iterator[Change]:
    for subject in dict.fromkeys([*before, *after]):
        if before.get(subject) != after.get(subject):
            yield Change(
                section=section,
                subject=subject,
                before=before.get(subject),
                after=after.get(subject),
            )


def _decisions(plan: Plan, operators: bool) -> dict[str, Term]:
    """Decisions of a plan by subject.

    Args:
        operators: whether to include those about operators inside stages.
    """
    terms: dict[str, Term] = {
        "model": plan.model.name,
        **_flat("setting", plan.model.settings),
        "interface": plan.interface_fingerprint[:_FINGERPRINT],
        "graph": plan.graph_fingerprint[:_FINGERPRINT],
        **_flat("cluster", plan.cluster),
        "idle_hosts": plan.idle_hosts,
        "method": plan.method,
        "num_micro_batches": plan.num_micro_batches,
        "micro_batch_semantics": plan.micro_batch_semantics,
        "schedule": plan.schedule,
        "num_stages": len(plan.stages),
        "num_submeshes": plan.num_submeshes,
        "layers": plan.layers or "every good place",
        "scan_bounds": ", ".join(map(str, plan.scan_bounds)) or "none",
    }
    for what, arrays in (("input", plan.inputs), ("output", plan.outputs)):
        for array in arrays:
            terms[f"interface of {what} {array.path}"] = (
                f"{array.dtype}[{', '.join(map(str, array.shape))}]"
            )
    for index, stage in enumerate(plan.stages):
        prefix = f"stage {index} " if is_pipeline(plan) else ""
        terms[f"{prefix}mesh"] = "x".join(map(str, stage.mesh_shape))
        terms[f"{prefix}axes"] = ", ".join(stage.axis_names)
        terms[f"{prefix}data_axes"] = ", ".join(stage.data_axes)
        terms[f"{prefix}context_axes"] = ", ".join(stage.context_axes)
        if is_pipeline(plan):
            start, stop = device_range(stage)
            terms |= {
                f"{prefix}layers": short_layers(stage.layer_names),
                f"{prefix}devices": f"{start}-{stop - 1}" if stop > start + 1 else str(start),
                f"{prefix}recompute": stage.recompute if stage.recompute != "none" else "no",
            }
        # Nodes are numbered in each stage: in other stages the same name is another operator.
        for op in stage.interior if operators else ():
            split = (
                ", ".join(f"{axis}: {factor}" for axis, factor in op.splits.items())
                or "nothing split"
            )
            terms[f"{prefix}operator {op.node}"] = (
                f"{split} ({op.copies} copies){', recomputed' if op.recompute else ''}"
            )
    # Splits of arrays by path, whichever stage holds them: plans with different stages may still
    # split arrays alike.
    by_path: dict[str, dict[str, None]] = {}
    for stage in plan.stages:
        for what, splits in (("input", stage.shardings), ("output", stage.outputs)):
            for path, dims in splits.items():
                by_path.setdefault(f"{what} {path}", {})[format_dims(dims)] = None
    terms |= {subject: " or ".join(sorted(splits)) for subject, splits in by_path.items()}
    terms |= {f"combine {path}": how for path, how in plan.combine.items()}
    terms |= {f"note: {note}": "noted" for note in plan.notes}
    return terms


def _predictions(plan: Plan) -> dict[str, Term]:
    """Predictions of a plan by subject."""
    p = plan.prediction
    terms: dict[str, Term] = {
        **{name: getattr(p, name) for name in PREDICTED_FIGURES},
        "peak_moment": p.peak_moment,
        **{f"{part} memory_bytes": value for part, value in p.memory_bytes.items()},
        **{f"{part} host_memory_bytes": value for part, value in p.host_memory_bytes.items()},
    }
    for index, stage in enumerate(plan.stages):
        if prediction := stage.prediction:
            prefix = f"stage {index}"
            terms |= {f"{prefix} {name}": getattr(prediction, name) for name in _OF_STAGES}
    by_kind: dict[str, list[CollectiveUse]] = {}
    for use in plan.prediction.collectives:
        by_kind.setdefault(f"{use.kind} over {'.'.join(use.axes)}", []).append(use)
    for name, uses in by_kind.items():
        terms[f"{name} count"] = sum(use.count for use in uses)
        terms[f"{name} num_bytes"] = sum(use.num_bytes for use in uses)
        terms[f"{name} time_s"] = sum(use.seconds for use in uses)
    return terms


def _flat(name: str, value: Any) -> dict[str, Term]:
    """Nested mappings as single terms with dotted names."""
    if isinstance(value, Mapping):
        found = {}
        for key, item in value.items():
            for path, term in _flat(f"{name}.{key}", item).items():
                found[path] = term
        return found
    return {name: value if isinstance(value, str | int | float | None) else str(value)}
