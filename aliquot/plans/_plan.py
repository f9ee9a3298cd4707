"""The contract between planners and the runtime: plain data, no jax objects, one JSON file.

Planners write plans and the runtime reads them; neither knows the other. What was decided, what it is predicted to do, and
how it was found are kept apart: two plans are equal if they decide and predict the same, whoever found them and however
long that took.
"""

from __future__ import annotations

from typing import Any

import msgspec

PLAN_VERSION = 1


class _Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a plan."""


class ArrayInterface(_Frozen):
    """One array that the step takes or returns: path, shape, dtype and, for inputs, role."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str = ""


class ModelReference(_Frozen):
    """How to build the step again.

    `kind` is "zoo" (`settings` are those of `aliquot.zoo.build`), "factory" (`name` is `package.module:function`), or
    "closure": the step was passed as a function and can only be passed again.
    """

    kind: str
    name: str
    settings: dict[str, Any] = {}


class OpSharding(_Frozen):
    """The decision for one distinct operator or group of arrays: which of its factors each mesh axis splits.

    `copies` is how many equal ones of the step it stands for. Axes that split nothing are left out.
    """

    node: str
    splits: dict[str, str]
    copies: int


class CollectiveUse(_Frozen):
    """Collectives of one kind over some mesh axes in one step: how many, and how many bytes they return on each device."""

    kind: str
    axes: tuple[str, ...]
    count: float
    num_bytes: float
    seconds: float
    label: str = ""


class StagePlan(_Frozen):
    """One stage of the pipeline; a plan without a pipeline has one.

    Attributes:
        mesh_shape, axis_names: its logical mesh.
        shardings: for each input path the mesh axes that split each dim, as in a `PartitionSpec`.
        outputs: the same for each output path.
        interior: the decisions inside, once for each distinct segment.
        data_axes: axes that split nothing but the batch.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    shardings: dict[str, tuple[tuple[str, ...], ...]]
    outputs: dict[str, tuple[tuple[str, ...], ...]]
    interior: tuple[OpSharding, ...]
    data_axes: tuple[str, ...] = ()


class Prediction(_Frozen):
    """What the plan is estimated to cost on each device. `compute_s + communication_s + gradient_s - hidden_s` is the step.

    `memory_bytes` are the parts alive at the worst moment and add up to `peak_memory_bytes`.
    """

    step_time_s: float
    compute_s: float
    communication_s: float
    gradient_s: float
    hidden_s: float
    peak_memory_bytes: float
    memory_limit_bytes: float
    memory_bytes: dict[str, float]
    peak_moment: str
    collectives: tuple[CollectiveUse, ...]


class Provenance(_Frozen):
    """How the plan was found. Not part of a comparison.

    `lower_bound_s` bounds the best step time from below, within the space that `bound_holds_for` names.
    """

    planner: str
    version: str
    trace_s: float
    search_s: float
    lower_bound_s: float | None
    gap: float | None
    bound_holds_for: str
    status: str
    candidates: tuple[dict[str, Any], ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """Everything that was decided about running a step on a cluster.

    Attributes:
        version: of the file format.
        model: how to build the step again.
        inputs, outputs: the step's interface, in order.
        interface_fingerprint: of the two; must match the step that runs.
        graph_fingerprint: of the traced operators; may drift with a library's release, and the interior is then planned anew.
        cluster: its description, as `Cluster.to_dict` gives it.
        method: the planner's short name.
        num_micro_batches: into how many parts a step's batch is cut.
        micro_batch_semantics: "exact", or "independent" if parts of the step see one micro-batch alone.
        combine: for each output path how micro-batches combine ("sum", "concatenate 0", "equal"); empty for one.
        schedule: order of stages and micro-batches; "none" without a pipeline.
        stages: see `StagePlan`.
        notes: remarks for the reader, such as dims that could not be split.
        prediction, provenance: see there.
    """

    version: int = PLAN_VERSION
    model: ModelReference
    inputs: tuple[ArrayInterface, ...]
    outputs: tuple[ArrayInterface, ...]
    interface_fingerprint: str
    graph_fingerprint: str
    cluster: dict[str, Any]
    method: str
    num_micro_batches: int = 1
    micro_batch_semantics: str = "exact"
    combine: dict[str, str] = {}
    schedule: str = "none"
    stages: tuple[StagePlan, ...]
    notes: tuple[str, ...] = ()
    prediction: Prediction
    provenance: Provenance

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._decisions() == other._decisions()

    def __hash__(self) -> int:
        return hash((self.interface_fingerprint, self.method, self.num_micro_batches))

    def _decisions(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name != "provenance")
