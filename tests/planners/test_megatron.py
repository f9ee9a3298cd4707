"""Layouts by name: products split as in Megatron-LM, what that communicates, and what is said where
it cannot be.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from planners.small_steps import array, mlp, momentum_step

import aliquot as aq
from aliquot import zoo
from aliquot.core import InputError
from aliquot.planners import PipelineOptions, Task, method_by_name, method_names
from aliquot.planners._layout_names import layout_by_name

ROWS, SEQ, HIDDEN, FFN, VOCAB, LAYERS = 16, 32, 64, 256, 512, 2
SIZES = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_heads": 8,
    "ffn_size": FFN,
    "vocab_size": VOCAB,
    "seq_len": SEQ,
}
COLUMNS = ("attn.q.kernel", "attn.k.kernel", "attn.v.kernel", "mlp.up.kernel")
ROWS_SPLIT = ("attn.out.kernel", "mlp.down.kernel")
CLUSTER = aq.Cluster.preset("8xH100")
TENSOR = ("tensor",)


@functools.cache
def gpt(
    recompute: str = "none",
    scan: bool = False,
    dtype: str = "bf16",
    clip_norm: float | None = None,
    **changes: int,
) -> Any:
    return zoo.build(
        zoo.configure("gpt-125m", **{**SIZES, **changes}),
        ROWS,
        dtype=dtype,
        recompute=recompute,
        scan=scan,
        clip_norm=clip_norm,
    )


@functools.cache
def planned(
    name: str, cluster: str = "8xH100", micro_batches: int = 1, recompute: str = "none"
) -> aq.Plan:
    work = gpt(recompute)
    return aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset(cluster),
        method=method_by_name(name),
        num_micro_batches=micro_batches,
    )


def over_tensor(plan: aq.Plan) -> list[Any]:
    """Sums of whole activations over the tensor axis; those of the loss are of single numbers for
    each token.
    """
    local = (
        ROWS // plan.stages[0].mesh_shape[plan.stages[0].axis_names.index("data")] * SEQ * HIDDEN
    )
    uses = [
        use
        for use in plan.prediction.collectives
        if use.axes == TENSOR and use.num_bytes / use.count >= local
    ]
    assert {use.kind for use in uses} == {"all-reduce"}
    return uses


FORMS: dict[str, dict[str, Any]] = {
    "unrolled": {},
    "scan": {"scan": True},
    "clipped": {"clip_norm": 1.0},
    # With a loss scale, and so with a test of whether gradients are finite.
    "float16": {"dtype": "float16"},
}


@pytest.mark.parametrize("form", FORMS)
def test_which_weights_are_split_by_columns_and_which_by_rows(form):
    work = gpt(**FORMS[form])
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=CLUSTER,
        method=aq.Megatron(data=2, tensor=4),
    )
    (stage,) = plan.stages
    assert (stage.mesh_shape, stage.axis_names) == ((2, 4), ("data", "tensor"))
    lead = ((),) if form == "scan" else ()
    for array_ in plan.inputs:
        if array_.role not in ("parameter", "optimizer_state") or not array_.shape:
            continue
        path = array_.path
        if path.endswith(COLUMNS):
            wanted = (*lead, (), TENSOR)
        elif path.endswith(ROWS_SPLIT):
            wanted = (*lead, TENSOR, ())
        elif path.endswith(("q.bias", "k.bias", "v.bias", "up.bias")):
            wanted = (*lead, TENSOR)
        elif path.endswith("embed.embedding"):
            wanted = (TENSOR, ())
        else:
            wanted = ((),) * len(array_.shape)
        assert stage.shardings[path] == wanted, path
    assert all(
        stage.shardings[f"batch.{name}"] == (("data",), ()) for name in ("inputs", "targets")
    )


@pytest.mark.parametrize(("data", "tensor"), [(1, 8), (2, 4), (4, 2)])
def test_two_all_reduces_of_activations_forward_and_two_backward_in_each_layer(data, tensor):
    """Narayanan et al., 2021, section 3.2; besides, the sum behind the lookup of tokens, and that
    of the head's gradient.
    """
    plan = planned(f"megatron:dp{data},tp{tensor}") if data > 1 else planned("megatron:dp1,tp8")
    local = ROWS // data * SEQ * HIDDEN * 2
    if data == 1:
        uses = [
            use for use in plan.prediction.collectives if use.num_bytes / use.count >= local / 2
        ]
    else:
        uses = over_tensor(plan)
    assert sum(use.count for use in uses) == 4 * LAYERS + 2
    in_layers = [use for use in uses if use.count == LAYERS]
    assert sum(use.num_bytes for use in in_layers) == 4 * LAYERS * local


def test_recomputation_sums_once_more_behind_attention():
    kept = sum(use.count for use in over_tensor(planned("megatron:dp2,tp4")))
    again = sum(use.count for use in over_tensor(planned("megatron:dp2,tp4", recompute="block")))
    assert again - kept == LAYERS


def test_gradients_are_summed_over_data_alone():
    plan = planned("megatron:dp2,tp4")
    gradients = [use for use in plan.prediction.collectives if use.label.startswith("gradient")]
    assert gradients and {(use.kind, use.axes) for use in gradients} == {("all-reduce", ("data",))}
    of_weights = sum(use.num_bytes for use in gradients if use.label.endswith("kernel"))
    # Products make them in the dtype of their operands.
    assert of_weights == LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN) // 4 * 2


@pytest.mark.parametrize(
    ("name", "parameters", "others", "moments"),
    [("", False, False, False), (",zero1", True, False, True), (",fsdp", True, True, True)],
)
def test_what_the_data_axis_splits_besides(name, parameters, others, moments):
    """`parameters` are those of which the step reads casts, `others` are read as they are."""
    stage = planned(f"megatron:dp2,tp4{name}").stages[0]
    up = stage.shardings["state.params.layers[0].mlp.up.kernel"]
    mu = stage.shardings["state.opt_state[0].mu.layers[0].mlp.up.kernel"]
    assert ("data" in sum(up, ())) is parameters and "tensor" in sum(up, ())
    assert ("data" in sum(mu, ())) is moments and "tensor" in sum(mu, ())
    assert ("data" in sum(stage.shardings["state.params.position"], ())) is others


def test_tensor_parallelism_takes_the_other_devices_for_data():
    plan = planned("tp:4", "2x8xH100")
    assert plan.stages[0].mesh_shape == (4, 4) and plan.method == "tp:4"
    assert planned("tp:1").stages[0].axis_names == ("data",)


@pytest.mark.parametrize(
    "name",
    [
        "tp:4",
        "megatron:dp2,tp4,zero1",
        "megatron:dp4,tp2,fsdp",
        "hsdp:4",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp:2", "tp:8", "zero2:8")),
    ],
)
def test_auto_is_never_slower(name):
    assert planned("auto").prediction.step_time_s <= planned(name).prediction.step_time_s * 1.002


def test_hybrid_fsdp_shards_over_a_part_and_replicates_over_the_rest():
    plan = planned("hsdp:4", "2x8xH100")
    assert plan.stages[0].mesh_shape == (4, 4)
    kernel = plan.stages[0].shardings["state.params.layers[0].mlp.up.kernel"]
    axes = {axis for dims in kernel for axis in dims}
    assert axes == {plan.stages[0].axis_names[1]}
    whole, parts = planned("fsdp", "2x8xH100"), planned("hsdp:16", "2x8xH100")
    assert parts.prediction.step_time_s == whole.prediction.step_time_s


def test_zero_2_in_groups_splits_moments_over_a_part_and_keeps_parameters_whole():
    plan = planned("zero2:4", "2x8xH100")
    assert (plan.method, plan.stages[0].mesh_shape) == ("zero2:4", (4, 4))
    splits, inside = plan.stages[0].shardings, plan.stages[0].axis_names[1]
    moment = next(
        dims for path, dims in splits.items() if path.endswith("mu.layers[0].mlp.up.kernel")
    )
    assert {axis for dims in moment for axis in dims} == {inside}
    assert method_by_name("zero2:4") == aq.Zero2Parallel(shard_within=4)


@pytest.mark.parametrize(("cluster", "name"), [("2x8xH100", "zero2:8"), ("8x1xH100", "zero2")])
def test_zero_2_in_hosts_is_called_as_it_is_typed(cluster, name):
    """On hosts of one device, all share one state."""
    work = gpt("none")
    method, where = aq.Zero2Parallel(shard_within="host"), aq.Cluster.preset(cluster)
    plan = aq.plan(work.train_step, work.state, work.batch, cluster=where, method=method)
    again = planned(name, cluster)
    assert plan.method == again.method == name
    assert plan.stages[0].shardings == again.stages[0].shardings


@pytest.mark.parametrize("size", [3, 32, pytest.param(0, marks=pytest.mark.slow)])
def test_hybrid_fsdp_refuses_groups_that_do_not_divide_the_devices(size):
    with pytest.raises(
        InputError, match=f"={size}:.* divide the 16 devices .* Use one of 2, 4, 8, 16"
    ):
        planned(f"hsdp:{size}", "2x8xH100")


def test_hybrid_fsdp_refuses_groups_of_one_device_and_options_of_pipelines():
    with pytest.raises(InputError, match="groups of one device split nothing.*method dp"):
        planned("hsdp:1", "2x8xH100")
    with pytest.raises(InputError, match="--stages: only for pipelines, and hsdp:8"):
        method_by_name("hsdp:8", pipeline=PipelineOptions(stages=2))
    with pytest.raises(InputError, match="--mesh"):
        method_by_name("hsdp:8", (4, 4))


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [
        ("megatron:dp2,tp2,pp2", 4),
        pytest.param("megatron:tp4,pp2,zero1", 2, marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_of_equal_stages(name, micro_batches):
    plan = planned(name, micro_batches=micro_batches)
    assert (plan.schedule, len(plan.stages), plan.num_micro_batches) == ("1f1b", 2, micro_batches)
    assert {stage.mesh_shape for stage in plan.stages} == {(2, 2) if "dp2" in name else (4,)}
    # Embedding in front, norm and head behind: as many layers in each stage.
    numbered = [[n for n in stage.layer_names if "layers[" in n] for stage in plan.stages]
    assert numbered == [["state.params.layers[0]"], ["state.params.layers[1]"]]
    assert len(plan.stages[1].layer_names) > 2
    split = {path: dims for stage in plan.stages for path, dims in stage.shardings.items()}
    for layer in range(LAYERS):
        assert all(
            split[f"state.params.layers[{layer}].{path}"] == ((), TENSOR) for path in COLUMNS
        )
        assert all(
            split[f"state.params.layers[{layer}].{path}"] == (TENSOR, ()) for path in ROWS_SPLIT
        )


def test_experts_are_split_by_their_axis_and_tokens_sent_to_them():
    sizes = {**SIZES, "num_layers": 2, "num_experts": 4, "group_size": SEQ}
    work = zoo.build(zoo.configure("moe-380m", **sizes), ROWS, dtype="bf16")
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=CLUSTER,
        method=method_by_name("megatron:ep4,tp2"),
    )
    stage = plan.stages[0]
    assert stage.shardings["state.params.layers[0].moe.up"] == (("expert",), (), TENSOR)
    assert stage.shardings["state.params.layers[0].moe.down"] == (("expert",), TENSOR, ())
    assert stage.shardings["state.params.layers[0].moe.gate"] == ((), ())
    assert stage.shardings["batch.inputs"] == (("expert",), ())
    sent = [use for use in plan.prediction.collectives if use.kind == "all-to-all"]
    assert sent and {use.axes for use in sent} == {("expert",)}
    assert "experts" in str(plan)


def bert() -> Any:
    """Post-norm blocks, heads as a dim of the weights, three embeddings, a pooled classifier."""
    heads, size = 4, 8

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def loss(p, batch):
        x = p["words"][batch["ids"]] + p["positions"][None] + p["kinds"][batch["kinds"]]
        for layer in p["layers"]:
            q, k, v = (jnp.einsum("bsh,hnd->bsnd", x, layer[name]) for name in "qkv")
            weights = jax.nn.softmax(jnp.einsum("bsnd,btnd->bnst", q, k))
            x = norm(x + jnp.einsum("bnst,btnd,ndh->bsh", weights, v, layer["out"]))
            x = norm(x + jax.nn.gelu(x @ layer["up"]) @ layer["down"])
        return jnp.mean((jnp.tanh(x[:, 0] @ p["pool"]) @ p["classes"]) ** 2)

    width = heads * size
    layer = {name: array(width, heads, size) for name in "qkv"}
    layer |= {"out": array(heads, size, width), "up": array(width, 128), "down": array(128, width)}
    params = {
        "words": array(64, width),
        "positions": array(16, width),
        "kinds": array(2, width),
        "layers": [layer, layer],
        "pool": array(width, width),
        "classes": array(width, 2),
    }
    return momentum_step(
        loss, params, {"ids": array(8, 16, dtype=jnp.int32), "kinds": array(8, 16, dtype=jnp.int32)}
    )


def test_an_encoder_with_heads_in_its_weights():
    plan = aq.plan(*bert(), cluster=CLUSTER, method=aq.TensorParallel(degree=4))
    split = {
        path.removeprefix("state.params."): dims for path, dims in plan.stages[0].shardings.items()
    }
    for layer in ("layers[0]", "layers[1]"):
        assert [split[f"{layer}.{name}"] for name in "qkv"] == [((), TENSOR, ())] * 3
        assert split[f"{layer}.out"] == (TENSOR, (), ())
        assert (split[f"{layer}.up"], split[f"{layer}.down"]) == (((), TENSOR), (TENSOR, ()))
    assert (split["words"], split["positions"], split["kinds"]) == (
        (TENSOR, ()),
        ((), ()),
        ((), ()),
    )
    assert (split["pool"], split["classes"]) == (((), TENSOR), (TENSOR, ()))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("tp:8", aq.TensorParallel(degree=8)),
        ("megatron:dp4,tp8", aq.Megatron(data=4, tensor=8)),
        (
            "megatron:dp2,pp4,layers1.2x2.3",
            aq.Megatron(data=2, pipeline=4, stage_layers=(1, 2, 2, 3)),
        ),
        ("megatron:dp4-tp8-pp2", aq.Megatron(data=4, tensor=8, pipeline=2)),
        ("megatron:tp8,pp2,zero1", aq.Megatron(tensor=8, pipeline=2, zero_stage=1)),
        ("megatron:dp2, ep4, fsdp", aq.Megatron(data=2, expert=4, zero_stage=3)),
    ],
)
def test_names(name, wanted):
    assert method_by_name(name) == wanted


def test_lists_of_names():
    assert method_names("auto,tp:8,megatron:dp1,tp8") == ["auto", "tp:8", "megatron:dp1,tp8"]
    assert method_names("megatron:dp1-tp8-fsdp, fsdp ,megatron:tp4,pp2,zero1,zero2") == [
        "megatron:dp1-tp8-fsdp",
        "fsdp",
        "megatron:tp4,pp2,zero1",
        "zero2",
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tp:", "tp:8"),
        ("tp:x", "tp:x: tensor parallelism takes its degree, such as tp:8"),
        ("tp:0", "takes its degree"),
        ("megatron:", "megatron:dp4,tp8,pp2"),
        ("megatron:,", "it has no degrees"),
        ("megatron:dp0,foo,tp8,tp4", "dp0: a degree is at least 1; tp is given twice; 'foo'"),
        ("megatron:tp=8,pp=4", "type megatron:tp8,pp4, which takes 32 devices or a multiple"),
        ("megatron:dp2xTP4", "type megatron:dp2,tp4, which takes 8 devices"),
        ("megatron:zero1-fsdp", "zero1 and fsdp exclude each other"),
        ("megatro:dp2", "Unknown method 'megatro:dp2'"),
    ],
)
def test_names_that_cannot_be_read(name, said):
    with pytest.raises(InputError, match=said):
        method_by_name(name)


def test_options_that_do_not_go_with_a_layout():
    with pytest.raises(
        InputError,
        match="--mesh, --stages, --schedule: megatron:dp4,tp2 says how devices are laid out",
    ):
        method_by_name("megatron:dp4,tp2", (4, 2), PipelineOptions(stages=2, schedule="gpipe"))
    with pytest.raises(InputError, match="--layers: only for pipelines"):
        method_by_name("tp:2", None, PipelineOptions(layers=4))
    given = method_by_name("megatron:tp4,pp2", None, PipelineOptions(layers=4, micro_batches=8))
    assert given == aq.Megatron(tensor=4, pipeline=2, layers=4, num_micro_batches=8)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        (
            aq.Megatron(data=4, tensor=4),
            {},
            "dp4 x tp4 makes 16 devices, and 8xH100 has 8. Use dp2, or leave dp out",
        ),
        (aq.Megatron(tensor=3), {}, "must divide the number of devices: use one of 1, 2, 4, 8"),
        (
            aq.TensorParallel(degree=8),
            {"num_heads": 4},
            (
                r"(?s)attn.q.kernel: 64 rows or columns in 4 parts that stay together, such as"
                r" heads.*tp:4"
            ),
        ),
        (
            aq.TensorParallel(degree=8),
            {"vocab_size": 510},
            r"(?s)embed.embedding: 510 rows .*tp:2, or 510 padded to 512",
        ),
        (
            aq.TensorParallel(degree=8),
            {"vocab_size": 510, "num_heads": 4},
            r"(?s)embed.embedding: 510 rows .*in 4 parts .*such as tp:2\.$",
        ),
        (
            aq.Megatron(data=4, expert=2),
            {},
            "weights that come once for each expert, and .* has none",
        ),
    ],
)
def test_layouts_that_do_not_apply(method, changes, said):
    work = gpt(**changes)
    with pytest.raises(InputError, match=said):
        aq.plan(work.train_step, work.state, work.batch, cluster=CLUSTER, method=method)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_all_degrees_that_do_not_divide_are_said_at_once(pipeline):
    sizes = {**SIZES, "num_layers": 2, "num_experts": 6, "num_kv_heads": 2, "ffn_size": 30}
    work = zoo.build(zoo.configure("mixtral-8x7b", **sizes), 2 * ROWS, dtype="bf16")
    layout = aq.Megatron(expert=4, tensor=4, pipeline=pipeline)
    with pytest.raises(InputError) as refusal:
        aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=aq.Cluster.preset("4x8xH100"),
            method=layout,
        )
    for said in (
        "6 experts cannot be split over ep 4",
        "an expert degree that divides 6: 2 or 3 or 6",
        "cannot be split over tp 4",
    ):
        assert said in str(refusal.value)


def test_a_batch_that_does_not_divide():
    work = gpt()
    with pytest.raises(
        InputError,
        match=r"of 16 \(.* has 4 rows in each of 4 micro-batches\) cannot be split over dp 8."
        " Use a global batch that is a multiple of 32",
    ):
        aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=CLUSTER,
            method=aq.Megatron(data=8),
            num_micro_batches=4,
        )


def test_more_stages_than_layers():
    work = gpt()
    with pytest.raises(
        InputError, match="8 stages were asked for, and the step can be cut into .* at most"
    ):
        aq.plan(
            work.train_step, work.state, work.batch, cluster=CLUSTER, method=aq.Megatron(pipeline=8)
        )


def test_stages_of_a_step_that_accumulates_gradients_in_a_loop():
    step, state, batch = mlp((64, 256, 64), 32)

    def train_step(state, batch):
        micro = jax.tree.map(lambda x: x.reshape(4, 8, *x.shape[1:]), batch)
        return jax.lax.scan(step, state, micro)

    with pytest.raises(InputError, match=r"no place was found .* give num_micro_batches \(--micro"):
        aq.plan(train_step, state, batch, cluster=CLUSTER, method=aq.Megatron(pipeline=2))


def test_a_plain_network_alternates_columns_and_rows():
    plan = aq.plan(*mlp((64, 256, 64), 32), cluster=CLUSTER, method=aq.TensorParallel(degree=8))
    assert plan.stages[0].shardings["state.params[0]"] == ((), TENSOR)
    assert plan.stages[0].shardings["state.params[1]"] == (TENSOR, ())


def test_nothing_to_split():
    def loss(params, batch):
        return jnp.mean((batch["x"] * params["scale"]) ** 2)

    step = momentum_step(loss, {"scale": array(64)}, {"x": array(32, 64)})
    with pytest.raises(InputError, match="has no such pair. Use method dp, fsdp or auto"):
        aq.plan(*step, cluster=CLUSTER, method=layout_by_name("tp:8"))


def test_an_output_head_is_split_by_vocabulary_and_what_stands_before_it_stays_whole():
    sizes = {**SIZES, "num_layers": 1}
    work = zoo.build(zoo.configure("bert-base", **sizes), ROWS, dtype="bf16")
    plan = aq.plan(
        work.train_step, work.state, work.batch, cluster=CLUSTER, method=method_by_name("tp:4")
    )
    split = {
        path.removeprefix("state.params."): dims for path, dims in plan.stages[0].shardings.items()
    }
    assert (split["embed.embedding"], split["bias"]) == ((TENSOR, ()), (TENSOR,))
    assert split["transform.kernel"] == ((), ())


def test_keys_and_values_of_fewer_heads():
    sizes = {**SIZES, "num_kv_heads": 4}
    work = zoo.build(zoo.configure("llama-70b", **sizes), ROWS, dtype="bf16", scan=True)
    plan = aq.plan(
        work.train_step, work.state, work.batch, cluster=CLUSTER, method=method_by_name("tp:4")
    )
    assert plan.stages[0].shardings["state.params.layers.attn.k.kernel"] == ((), (), TENSOR)
    with pytest.raises(
        InputError, match=r"(?s)attn.k.kernel: 32 rows or columns in 4 parts.*such as tp:4"
    ):
        aq.plan(
            work.train_step, work.state, work.batch, cluster=CLUSTER, method=method_by_name("tp:8")
        )


@pytest.mark.slow
def test_a_pipeline_tries_numbers_of_micro_batches():
    work = gpt()
    layout = method_by_name("megatron:dp2,tp2,pp2")
    plan = aq.plan(work.train_step, work.state, work.batch, cluster=CLUSTER, method=layout)
    tried = [planned("megatron:dp2,tp2,pp2", micro_batches=n) for n in (4, 8)]
    assert plan.prediction.step_time_s <= min(t.prediction.step_time_s for t in tried) * 1.001
    text = str(plan)
    assert "Tried in the search" in text
    names = {candidate["name"] for candidate in plan.provenance.candidates}
    assert "megatron:dp2,tp2,pp2, 2 stages, 1f1b, 8 micro-batches" in names
    assert (
        "pipeline: 2 stages, 1f1b; data (2): data parallel: parameters replicated; tensor (2):"
        " tensor parallel: parameters sharded (98% of bytes), batch replicated"
        in " ".join(text.split())
    )
    with pytest.raises(
        InputError, match="A batch of 16 cannot be split over dp2 in each of 3 micro-batches"
    ):
        aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=CLUSTER,
            method=layout,
            num_micro_batches=3,
        )


def test_stages_that_are_alike_keep_their_own_layers():
    work = gpt(num_layers=8)
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=CLUSTER,
        method=method_by_name("megatron:dp2,pp4"),
        num_micro_batches=4,
    )
    assert [stage.like for stage in plan.stages] == [None, None, 1, None]
    for stage in plan.stages:
        layers = {name for name in stage.layer_names if "layers[" in name}
        kept = {
            path.split(".attn")[0]
            for path in stage.shardings
            if path.startswith("state.params.layers")
        }
        assert layers == {path.split(".norm")[0].split(".mlp")[0] for path in kept}


def test_a_layout_that_does_not_fit_is_told_by_the_degrees_that_were_asked_for():
    work = gpt()
    with pytest.raises(aq.InfeasibleError) as refused:
        aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=CLUSTER,
            method=method_by_name("megatron:dp2,tp2,pp2"),
            num_micro_batches=2,
            memory_limit_bytes=2**20,
        )
    text = " ".join(str(refused.value).split())
    assert "No plan of layout dp2,tp2,pp2 fits 1x8 devices" in text
    assert "The smallest, 2 stages with 2 micro-batches, needs" in text


def test_ranks_take_any_number_of_rows_that_divides_theirs():
    """Numbers between powers of two, too: 12 rows of a rank make 12, 6, 4, 3, 2 or 1 parts."""
    task = Task(graph=aq.capture(*mlp((16, 32, 16), 24)), cluster=aq.Cluster.preset("1x2xH100"))
    assert aq.Megatron(data=2)._counts(task) == [12, 6, 4, 3, 2, 1]
