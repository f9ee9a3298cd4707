"""A small plan to test with: two layers on a 4x2 mesh, consistent in all its parts."""

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
)

SPLITS = {
    "state.params.layers[0].w": (("x",), ("y",)),
    "state.params.layers[1].w": (("x",), ("y",)),
    "state.step": (),
    "batch.inputs": (("x",), ()),
}
INPUTS = (
    ArrayInterface(path="state.params.layers[0].w", shape=(64, 32), dtype="float32", role="parameter"),
    ArrayInterface(path="state.params.layers[1].w", shape=(64, 32), dtype="float32", role="parameter"),
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
        CollectiveUse(kind="all-reduce", axes=("x",), count=2.0, num_bytes=2048.0, seconds=0.003, label="gradients"),
        CollectiveUse(kind="all-gather", axes=("y",), count=4.0, num_bytes=512.0, seconds=0.002, label="layers[*].w"),
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
    candidates=({"name": "dp", "mesh": "8", "lower_bound_s": None, "step_time_s": 0.02, "outcome": "optimal"},),
)


def sample_plan(**changes: Any) -> Plan:
    """The plan, with some of its fields replaced."""
    fields: dict[str, Any] = {
        "model": ModelReference(kind="zoo", name="gpt-10m", settings={"model": "gpt-10m", "global_batch": 8}),
        "inputs": INPUTS,
        "outputs": OUTPUTS,
        "interface_fingerprint": "i1",
        "graph_fingerprint": "g1",
        "cluster": Cluster.preset("8xH100").to_dict(),
        "method": "shard",
        "num_micro_batches": 2,
        "combine": {"[1]['loss']": "sum"},
        "stages": (STAGE,),
        "notes": ("state.step is not split: it has no dims",),
        "prediction": PREDICTION,
        "provenance": PROVENANCE,
    }
    return Plan(**{**fields, **changes})
