"""Small plans to test with, consistent in all their parts: two layers on a 4x2 mesh, and pipelines
of equal stages.
"""

from typing import Any

from aliquot.cluster import Cluster
from aliquot.plans import (
    ArrayInterface,
    CollectiveUse,
    ModelReference,
    OpSharding,
    Plan,
    Prediction,
    Provenance,
    StagePlan,
    StagePrediction,
)

SPLITS = {
    "state.params.layers[0].w": (("x",), ("y",)),
    "state.params.layers[1].w": (("x",), ("y",)),
    "state.step": (),
    "batch.inputs": (("x",), ()),
}
INPUTS = (
    ArrayInterface(
        path="state.params.layers[0].w", shape=(64, 32), dtype="float32", role="parameter"
    ),
    ArrayInterface(
        path="state.params.layers[1].w", shape=(64, 32), dtype="float32", role="parameter"
    ),
    ArrayInterface(path="state.step", shape=(), dtype="int32", role="state"),
    ArrayInterface(path="batch.inputs", shape=(8, 16), dtype="int32", role="batch"),
)
OUTPUTS = (ArrayInterface(path="[1]['loss']", shape=(), dtype="float32"),)
STAGE = StagePlan(
    mesh_shape=(4, 2),
    axis_names=("x", "y"),
    shardings=SPLITS,
    outputs={"[1]['loss']": ()},
    interior=(OpSharding(node="dot_general", splits={"x": "batch", "y": "free"}, copies=2),),
    data_axes=("x",),
)
PREDICTION = Prediction(
    step_time_s=0.011,
    compute_s=0.008,
    communication_s=0.002,
    gradient_s=0.003,
    hidden_s=0.002,
    peak_memory_bytes=3000.0,
    memory_limit_bytes=10000.0,
    memory_bytes={"parameters": 2048.0, "activations": 952.0},
    peak_moment="dot_general in the backward pass",
    collectives=(
        CollectiveUse(
            kind="all-reduce",
            axes=("x",),
            count=2.0,
            num_bytes=2048.0,
            seconds=0.003,
            label="gradients",
        ),
        CollectiveUse(
            kind="all-gather",
            axes=("y",),
            count=4.0,
            num_bytes=512.0,
            seconds=0.002,
            label="layers[*].w",
        ),
    ),
)
PROVENANCE = Provenance(
    planner="ilp",
    version="0.1.0",
    trace_s=1.5,
    search_s=2.25,
    lower_bound_s=0.01,
    gap=0.1,
    bound_holds_for="all splits of mesh 4x2",
    status="optimal",
    candidates=(
        {
            "name": "dp",
            "mesh": "8",
            "lower_bound_s": None,
            "step_time_s": 0.02,
            "outcome": "optimal",
        },
    ),
)


def _cluster(preset: str) -> dict[str, Any]:
    """A cluster as plans of the first release describe it: without its hosts' memory, and without
    a peak for 8-bit floats.
    """
    described = {k: v for k, v in Cluster.preset(preset).to_dict().items() if k != "host"}
    device = dict(described["device"])
    device["peak_flops_per_s"] = {
        dtype: peak for dtype, peak in device["peak_flops_per_s"].items() if dtype != "float8"
    }
    return {**described, "device": device}


def sample_plan(**changes: Any) -> Plan:
    """The plan, with some of its fields replaced."""
    fields: dict[str, Any] = {
        "model": ModelReference(
            kind="zoo", name="gpt-10m", settings={"model": "gpt-10m", "global_batch": 8}
        ),
        "inputs": INPUTS,
        "outputs": OUTPUTS,
        "interface_fingerprint": "i1",
        "graph_fingerprint": "g1",
        "cluster": _cluster("8xH100"),
        "method": "shard",
        "num_micro_batches": 2,
        "combine": {"[1]['loss']": "sum"},
        "stages": (STAGE,),
        "notes": ("state.step is not split: it has no dims",),
        "prediction": PREDICTION,
        "provenance": PROVENANCE,
    }
    return Plan(**{**fields, **changes})


FORWARD_S, BACKWARD_S, WEIGHT_S, UPDATE_S = 0.001, 0.002, 0.0008, 0.0005
STAGE_MEMORY = {"state": 4e9, "activations in flight": 2e9, "working memory": 1e9}
GRADIENTS = CollectiveUse(
    kind="all-reduce", axes=("x",), count=2.0, num_bytes=2048.0, seconds=0.0002, label="layers[*].w"
)


def sample_stage(index: int, bubble: float = 0.25, **changes: Any) -> StagePlan:
    """A stage with the layer of its number on two devices of its own, before the next one."""
    path = f"state.params.layers[{index}].w"
    prediction = StagePrediction(
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        weight_gradient_s=WEIGHT_S,
        update_s=UPDATE_S,
        transfer_s=0.0,
        bubble=bubble,
        in_flight=2,
        peak_memory_bytes=sum(STAGE_MEMORY.values()),
        memory_bytes=STAGE_MEMORY,
        collectives=(GRADIENTS,),
    )
    fields: dict[str, Any] = {
        "mesh_shape": (2,),
        "axis_names": ("x",),
        "shardings": {path: (("x",), ())},
        "outputs": {f"[0].params.layers[{index}].w": (("x",), ())},
        "interior": (
            OpSharding(node=f"layers[{index}] dot_general", splits={"x": "batch"}, copies=1),
        ),
        "data_axes": ("x",),
        "first_device": 2 * index,
        "first_layer": index,
        "layer_names": (f"state.params.layers[{index}]",),
        "prediction": prediction,
    }
    return StagePlan(**{**fields, **changes})


def sample_pipeline(num_stages: int = 4, num_micro_batches: int = 4, **changes: Any) -> Plan:
    """1F1B with a layer, two devices and no transfers for each stage. By its closed form, with S
    stages and M micro-batches, a step takes (S + M - 1) (forward + backward) + update.
    """
    layers = range(num_stages)
    busy_s = num_micro_batches * (FORWARD_S + BACKWARD_S) + UPDATE_S
    bubble_s = (num_stages - 1) * (FORWARD_S + BACKWARD_S)
    stages = [sample_stage(index, bubble=bubble_s / (busy_s + bubble_s)) for index in layers]
    stages[0].shardings["batch.inputs"] = (("x",), ())
    stages[-1].outputs["[1]['loss']"] = ()
    fields: dict[str, Any] = {
        "model": ModelReference(
            kind="zoo", name="gpt-10m", settings={"model": "gpt-10m", "global_batch": 8}
        ),
        "inputs": (
            *(
                ArrayInterface(
                    path=f"state.params.layers[{i}].w",
                    shape=(64, 32),
                    dtype="float32",
                    role="parameter",
                )
                for i in layers
            ),
            INPUTS[-1],
        ),
        "outputs": (
            *(
                ArrayInterface(path=f"[0].params.layers[{i}].w", shape=(64, 32), dtype="float32")
                for i in layers
            ),
            *OUTPUTS,
        ),
        "interface_fingerprint": "i2",
        "graph_fingerprint": "g2",
        "cluster": _cluster("8xH100" if num_stages <= 4 else f"{num_stages // 4}x8xH100"),
        "method": "pipeshard",
        "num_micro_batches": num_micro_batches,
        "combine": {"[1]['loss']": "sum"},
        "schedule": "1f1b",
        "num_submeshes": num_stages,
        "stages": tuple(stages),
        "prediction": Prediction(
            step_time_s=busy_s + bubble_s,
            compute_s=busy_s - 0.0003,
            communication_s=0.0001,
            gradient_s=0.0002,
            hidden_s=0.0,
            bubble_s=bubble_s,
            peak_memory_bytes=sum(STAGE_MEMORY.values()),
            memory_limit_bytes=70e9,
            memory_bytes=STAGE_MEMORY,
            peak_moment="stage 0, with 2 micro-batches in flight",
            collectives=(GRADIENTS,) * num_stages,
        ),
        "provenance": Provenance(
            planner="StageDP over ilp",
            version="0.1.0",
            trace_s=1.5,
            search_s=2.25,
            lower_bound_s=0.02,
            gap=0.0,
            bound_holds_for="closed forms of all stages",
            status="optimal",
        ),
    }
    return Plan(**{**fields, **changes})
