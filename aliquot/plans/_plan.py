"""The contract between planners and the runtime: plain data, no jax objects, one JSON file.

Planners write plans and the runtime reads them; neither knows the other. Decisions, predictions and
provenance (how a plan was found) are kept apart: two plans are equal if they decide and predict the
same, whoever found them and however long that took.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ._schedule import Schedule
from ._schedules import make_schedule

if TYPE_CHECKING:
    from jax.sharding import Mesh

PLAN_VERSION = 3
DEVICE_MEMORY, HOST_MEMORY = "device", "host"
"""Values of `ArrayInterface.memory`."""
SINGLE = "single"
"""The schedule of a plan of one program."""
RECOMPUTE_OF_STAGES = ("none", "stage", "operators")
"""Values of `StagePlan.recompute`."""
PREDICTED_FIGURES = (
    "step_time_s",
    "compute_s",
    "communication_s",
    "gradient_s",
    "hidden_s",
    "host_transfer_s",
    "host_hidden_s",
    "bubble_s",
    "peak_memory_bytes",
    "memory_limit_bytes",
)
"""Fields of `Prediction` that hold seconds or bytes."""
_HOW_FOUND = ("provenance", "compiled")


class ArrayInterface(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One array that the step takes or returns: path, shape, dtype and, for inputs, role; and the
    memory in which it lies, "device" or "host".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str = ""
    memory: str = DEVICE_MEMORY


class ModelReference(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Reference by which the step can be built again.

    `kind` is "zoo" (`settings` are those of `aliquot.zoo.build`), "factory" (`name` is
    `package.module:function`), or "closure": the step was passed as a function and can only be
    passed again. `flops_per_step` are the floating-point operations of the model's forward and
    backward pass over the whole batch, without recomputation; 0 if they are unknown. Where they
    were counted in the step, `flops_dtype` is the dtype of most of them. `tokens_per_step` are the
    tokens of the whole batch where its arrays do not show them; 0 to count its integers.
    """

    kind: str
    name: str
    settings: dict[str, Any] = {}
    flops_per_step: float = 0.0
    flops_dtype: str = ""
    tokens_per_step: Annotated[int, msgspec.Meta(ge=0)] = 0


class OpSharding(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The decision for one distinct operator or group of arrays: which of its factors each mesh
    axis splits.

    `copies` is the number of equal operators or groups in the step for which the decision stands.
    Axes that split nothing are left out. `recompute` says whether the backward pass may recompute
    the operator, if its stage recomputes operators.
    """

    node: str
    splits: dict[str, str]
    copies: int
    recompute: bool = False


class AxisUse(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What one mesh axis splits of a stage's work: of the parameters that products of the forward
    pass read, and of gradients, as bytes of whole arrays.

    Attributes:
        reads: bytes of parameters by what the axis splits in the product that reads them:
            "examples" of the batch or "positions" of a sequence, for which a device needs all that
            other axes leave of the parameter; "pieces" of the parameter; "models", which have both
            parameters and examples of their own; or "nothing".
        expert_reads: the same of parameters of experts.
        gradients: bytes of gradients by how the axis splits them: "split" from their sums on,
            "split at last", after whole totals over all micro-batches, or "whole".
        batch: what it splits of the batch's arrays: "examples", "positions".
        exchanges: whether devices along it exchange activations.
    """

    reads: dict[str, float] = {}
    expert_reads: dict[str, float] = {}
    gradients: dict[str, float] = {}
    batch: tuple[str, ...] = ()
    exchanges: bool = False


class CollectiveUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Collectives of one kind over some mesh axes in one step: their number, the bytes of their
    results on each device, and their time.
    """

    kind: str
    axes: tuple[str, ...]
    count: float
    num_bytes: float
    seconds: float
    label: str = ""


class InferredRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inferred rule of a primitive for which none is declared.

    `rule` has a letter for each dim that may be split and "." for each that stays whole, as in
    `"a.,.->a."`. `count` is how many operators of the step follow it.
    """

    primitive: str
    rule: str
    count: int


class StagePrediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Estimated cost of one stage of a pipeline on each of its devices.

    Attributes:
        forward_s, backward_s, weight_gradient_s: for one micro-batch; the last is the part of the
            backward pass whose results nothing needs before the update.
        update_s: once a step, gradient synchronisation included.
        transfer_s: of activations to the next stage, for one micro-batch.
        transfer_back_s: of their gradients from the next stage; None in files without this figure,
            and then equal to `transfer_s`.
        bubble: the share of the step in which the stage's devices wait.
        in_flight: the most micro-batches whose residuals it keeps.
        peak_memory_bytes: the sum of `memory_bytes`, which are by part.
        collectives: those of a step.
        host_memory_bytes: what a device's arrays take in the memory of its host, by part.
    """

    forward_s: float
    backward_s: float
    weight_gradient_s: float
    update_s: float
    transfer_s: float
    bubble: float
    in_flight: int
    peak_memory_bytes: float
    memory_bytes: dict[str, float]
    collectives: tuple[CollectiveUse, ...]
    transfer_back_s: float | None = None
    host_memory_bytes: dict[str, float] = {}


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage of the pipeline; a plan without a pipeline has one.

    Attributes:
        mesh_shape, axis_names: its logical mesh.
        shardings: for each input path the mesh axes that split each dim, as in a `PartitionSpec`.
        outputs: the same for each output path.
        interior: the decisions inside the step, once for each distinct segment.
        data_axes: axes that split nothing but the batch.
        context_axes: the axis that splits the sequence, if gradients wait for the last of several
            micro-batches over it as they do over `data_axes`; at most one.
        first_device: where its submesh begins in the cluster; it takes consecutive devices.
        first_layer, layer_names: the layers that it runs; none without a pipeline.
        recompute: what the backward pass recomputes besides cheap operators: "none"; "stage" for
            all operators, from the inputs of the stage; or "operators" for the products that
            `interior` marks with `recompute`.
        casts_once: whether parameters are cast to the narrower type in which the step computes once
            a step, and these casts kept, instead of once for each micro-batch.
        gathers_once: whether these casts are also gathered over `data_axes` and `context_axes` once
            a step, so that parameters are stored as optimizer state is, and every device keeps
            casts that these axes do not split: stages 1 and 2 of ZeRO in mixed precision.
        updates_early: whether the stage's parameters are updated right after its own last backward
            task, not after that of the last stage on its devices.
        folded: whether equal layers share one decision; otherwise `interior` has an entry for each
            operator.
        like: an earlier stage with the same operators, whose `interior` this stage shares; None for
            a stage with its own.
        prediction: its predicted cost; None without a pipeline, where `Plan.prediction` says all.
        parallelism: by axis of more than one device, what it splits of the work; not in files of
            earlier versions.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    shardings: dict[str, tuple[tuple[str, ...], ...]]
    outputs: dict[str, tuple[tuple[str, ...], ...]]
    interior: tuple[OpSharding, ...]
    data_axes: tuple[str, ...] = ()
    context_axes: tuple[str, ...] = ()
    first_device: int = 0
    first_layer: int = 0
    layer_names: tuple[str, ...] = ()
    recompute: str = "none"
    casts_once: bool = False
    gathers_once: bool = False
    updates_early: bool = False
    folded: bool = True
    like: int | None = None
    prediction: StagePrediction | None = None
    parallelism: dict[str, AxisUse] | msgspec.UnsetType = msgspec.UNSET


class MemoryCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted bytes on each device over the course of a step, at moments spread evenly over its
    time (in older files, over its operators).

    Each moment stands for a stretch of operators: the figures are those of the operator in it at
    which the most memory is taken.

    Attributes:
        phases: for each moment the phase of the step: "forward", "backward" or "update".
        parts: the bytes of each part, such as "parameters" or "activations", at each moment.
        seconds: for each moment the predicted time at which it comes, the last at the end of the
            step; empty in older files.
    """

    phases: tuple[str, ...]
    parts: dict[str, tuple[float, ...]]
    seconds: tuple[float, ...] = ()


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Estimated cost of the plan on each device.

    The step takes `compute_s + communication_s + gradient_s - hidden_s + host_transfer_s -
    host_hidden_s + bubble_s`. `host_transfer_s` are copies between device and host memory, of which
    `host_hidden_s` run beside compute. For a pipeline,
    these are figures of its busiest submesh, and `bubble_s` is the time for which it waits for
    others and for transfers; memory is that of the submesh of its fullest stage. `memory_bytes` are
    the parts that are alive at the peak; they add up to `peak_memory_bytes`.

    A share `measured_share` of the seconds of compute and communication is based on measurements of
    operators of about the same sizes, and another share `measured_compute_share` on measurements of
    one device alone; `measured_error` is the mean relative error of both. The rest is modelled.
    `host_memory_bytes` is what a device's arrays take in the memory of its host, by part; of a
    pipeline, in the stage where this is most. `memory_over_time` is the memory over the course of
    the step; None for a pipeline.
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
    bubble_s: float = 0.0
    measured_share: float = 0.0
    measured_error: float = 0.0
    measured_compute_share: float = 0.0
    host_transfer_s: float = 0.0
    host_hidden_s: float = 0.0
    host_memory_bytes: dict[str, float] = {}
    memory_over_time: MemoryCurve | None = None


GIVEN_LAYOUT = "given"
"""The status of a plan whose layout was asked for by name or by hand, so that no other plan was
compared with it: the rest was searched to the end.
"""


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Origin of a plan: planner, bound, search time. Ignored when plans are compared.

    `lower_bound_s` is a lower bound on the step time of all plans in the space that
    `bound_holds_for` names. `status` says how the search ended: "optimal", within what limit, or
    `GIVEN_LAYOUT`. `profiles` says which measurements the plan was made from. `trace_s` and
    `search_s` are 0 in plans from files, which do not hold them.
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
    profiles: str = ""


class CompiledFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of the compiled plan, in bytes on each device. Ignored when plans are compared.

    `memory_bytes` are arguments, outputs, temporaries and aliases (outputs that take the place of
    arguments). `unintended` are collectives that the plan does not explain, a line for each.
    `compile_s` is 0 in plans from files.
    """

    target: str
    fits: bool
    peak_memory_bytes: float
    memory_bytes: dict[str, float]
    unintended: tuple[str, ...]
    compile_s: float


class Plan(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    eq=False,
    weakref=True,
):
    """Everything that was decided about running a step on a cluster.

    Attributes:
        version: of the file format.
        model: how to build the step again.
        inputs, outputs: the step's interface, in order.
        interface_fingerprint: of inputs and outputs; must match the step that runs.
        graph_fingerprint: of the traced operators; may change with a library's release, and the
            interior is then planned anew.
        cluster: the cluster that it runs on, as `Cluster.to_dict` gives it.
        idle_hosts: number of hosts of the planned cluster, after those in `cluster`, that are left
            idle because the step is faster without them.
        method: the planner's short name.
        recompute: what the layers of the step compute again in their backward pass, by a name of
            `core.RECOMPUTE`, such as "minimal" or "block:2"; "none" to do as the step itself does.
        num_micro_batches: number of parts into which a step's batch is cut.
        micro_batch_semantics: "exact", or "independent" if each micro-batch is a step of its own.
        combine: for each output path how micro-batches combine ("sum", "concatenate 0", "equal",
            "mean", "handed on"); empty for one.
        schedule: order of stages and micro-batches, see `SCHEDULES`; "single" for one program.
        overlaps_transfers: whether the prediction assumes that transfers between stages overlap
            with compute.
        num_submeshes: fewer than stages if these are interleaved; the schedule places the stages on
            them.
        layers: how the step was cut into layers: a path pattern, a number, the places of
            operators, or nothing for every good place.
        scan_bounds: where loops over layers are cut, from 0 to their length; empty if they stay
            whole.
        stages: see `StagePlan`.
        inferred_rules: rules that were inferred for primitives without a declared one.
        notes: remarks for the reader, such as dims that could not be split.
        prediction, provenance: see `Prediction` and `Provenance`.
        compiled: see `CompiledFigures`; None if the plan was not compiled.
    """

    version: int = PLAN_VERSION
    model: ModelReference
    inputs: tuple[ArrayInterface, ...]
    outputs: tuple[ArrayInterface, ...]
    interface_fingerprint: str
    graph_fingerprint: str
    cluster: dict[str, Any]
    idle_hosts: int = 0
    method: str
    recompute: str = "none"
    num_micro_batches: int = 1
    micro_batch_semantics: str = "exact"
    combine: dict[str, str] = {}
    schedule: str = SINGLE
    num_submeshes: int = 1
    overlaps_transfers: bool = False
    layers: str = ""
    scan_bounds: tuple[int, ...] = ()
    stages: tuple[StagePlan, ...]
    inferred_rules: tuple[InferredRule, ...] = ()
    notes: Annotated[tuple[str, ...], msgspec.Meta(max_length=10_000)] = ()
    prediction: Prediction
    provenance: Provenance
    compiled: CompiledFigures | None = None

    @property
    def is_pipeline(self) -> bool:
        """True if its step runs as stages, each a program of its own."""
        return self.schedule != SINGLE

    @property
    def sums_gradients_once(self) -> bool:
        """True if data-parallel groups sum their gradients once, after the last of several
        micro-batches. They share each independent micro-batch, and sum its gradients.
        """
        return self.num_micro_batches > 1 and self.micro_batch_semantics == "exact"

    @property
    def tasks(self) -> Schedule:
        """The order of the tasks of a pipeline."""
        return make_schedule(
            self.schedule,
            len(self.stages),
            self.num_micro_batches,
            self.num_submeshes,
            frozenset(k for k, stage in enumerate(self.stages) if stage.updates_early),
        )

    @property
    def num_layers(self) -> int | None:
        """The number of layers that the step was to be cut into; None where `layers` is a pattern
        or nothing.
        """
        return int(self.layers) if self.layers.isdecimal() and len(self.layers) < 10 else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._decisions() == other._decisions()

    def __ne__(self, other: object) -> bool:
        # The compiled base class has its own `__ne__`, which compares every field.
        return not self == other

    def __hash__(self) -> int:
        # A few fields suffice: dicts cannot be hashed, and equal plans agree in these.
        return hash((self.interface_fingerprint, self.method, self.num_micro_batches))

    def decisions(self) -> tuple[str, ...]:
        """Everything that decides what runs, as lines of text: equal for plans that run the same,
        whatever they predict or are called.
        """
        # Provenance, names and predictions do not decide what runs.
        data = msgspec.to_builtins(self)
        for name in (*_HOW_FOUND, "prediction", "notes", "model", "cluster", "graph_fingerprint"):
            data.pop(name, None)
        return tuple(_as_lines(data, ""))

    def _decisions(self) -> tuple[Any, ...]:
        found = []
        for name in self.__struct_fields__:
            if name not in _HOW_FOUND:
                found.append(getattr(self, name))
        return tuple(found)

    def __repr__(self) -> str:
        from ._facts import headline

        return f"<Plan of {headline(self)}>"

    def __str__(self) -> str:
        return self.describe()

    def describe(self, *, every: bool = False) -> str:
        """The text of `print(plan)`: what to do, what it takes, why, and what else was tried.

        Args:
            every: also the largest arrays with their shardings, and the most expensive
                collectives.
        """
        from ._describe import describe

        return describe(self, every=every)

    def to_json(self) -> str:
        """The text of its plan file.

        Raises:
            InputError: A number is infinite or not a number; the message names each.
        """
        from ._file import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str, *, source: str = "the plan") -> Plan:
        """The reverse of `to_json`; `source` is what messages call the text.

        Raises:
            PlanFileError: The text is no valid plan; everything that is wrong with it is listed.
        """
        from ._file import from_json

        return from_json(text, source=source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plan file, whole or not at all.

        Raises:
            InputError: The place cannot be written to.
        """
        from ._file import save

        save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read and check a plan file.

        Raises:
            PlanFileError: It is missing, truncated, of another version, or edited into something
                that is no plan.
        """
        from ._file import load

        return load(path)

    def partition_specs(self, tree: Any = None, *, path: str | None = None) -> Any:
        """The `jax.sharding.PartitionSpec`s of the step's inputs, for a training loop of one's own.

        Args:
            tree: an argument of the step, or a part of one, as arrays or shapes; the result is a
                tree like it. Without a tree, the result is a dict from every input path to its
                spec.
            path: the tree's place in the arguments, such as `"state.params"`; needed only if the
                tree fits in several places.

        Raises:
            InputError: the tree is no part of what was planned.
        """
        from ._partition_specs import partition_specs, spec_tree

        return partition_specs(self) if tree is None else spec_tree(self, tree, path)

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh over the first of `devices`, by default those that JAX sees.

        Raises:
            InputError: the plan is a pipeline, whose stages have a mesh each.
            PlanMismatchError: there are too few devices.
        """
        from ._partition_specs import make_mesh

        return make_mesh(self, devices)

    def shardings(self, tree: Any, *, mesh: Mesh | None = None, path: str | None = None) -> Any:
        """A tree like `tree`, an argument of the step or a part of one, with a
        `jax.sharding.NamedSharding` for each array.

        `jax.jit(step, in_shardings=(plan.shardings(state), plan.shardings(batch)))` takes them as
        they are, and so does `jax.device_put(state, plan.shardings(state))`. How arrays within the
        step are split, and its micro-batches, are then the compiler's choice; with
        `aliquot.constrain(step, plan)` they are the plan's.

        Args:
            mesh: by default `plan.mesh()`.
            path: as in `partition_specs`.

        Raises:
            InputError: the tree is no part of what was planned, or the plan is a pipeline.
            PlanMismatchError: there are too few devices.
        """
        from ._partition_specs import sharding_tree

        return sharding_tree(self, tree, self.mesh() if mesh is None else mesh, path)

    def _repr_html_(self) -> str:
        from html import escape

        from ._answer import spoken
        from ._picture import mesh_picture

        what, *rest = map(escape, spoken(self))
        picture = mesh_picture(self) if len(self.stages) == 1 else ""
        text = f"<pre style='line-height:1.3'>{escape(str(self))}</pre>"
        return (
            f"<p><b>{what}</b><br>{'<br>'.join(rest)}</p>{picture}"
            f"<details><summary>why, and where time and memory go</summary>{text}</details>"
        )


def _as_lines(data: Any, path: str) -> Iterator[str]:
    """Nested values, one line each."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from _as_lines(value, f"{path}.{name}" if path else str(name))
    elif isinstance(data, list | tuple) and any(isinstance(item, dict) for item in data):
        for number, value in enumerate(data):
            yield from _as_lines(value, f"{path}[{number}]")
    else:
        yield f"{path} = {data}"
