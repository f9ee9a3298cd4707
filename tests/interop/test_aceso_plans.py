"""Aceso's configurations as plans."""

from __future__ import annotations

import functools
import itertools
import json

import jax
import numpy as np
import pytest
from command_line import refused, run
from runtime.equality import largest

import aliquot as aq
from aliquot import Plan, zoo
from aliquot.cost import estimate_stages
from aliquot.graph import Phase, capture
from aliquot.interop.aceso import built_in_chains, make_chain
from aliquot.planners import apply_plan
from aliquot.sharding.programs import Part

SHAPE = [
    "hidden_size=32",
    "num_heads=4",
    "ffn_size=64",
    "vocab_size=64",
    "num_layers=4",
    "seq_len=16",
]
TINY = [
    "gpt-10m",
    "--global-batch",
    8,
    "--cluster",
    "8xcpu",
    *(part for s in SHAPE for part in ("--set", s)),
]


@functools.cache
def names_of(num_layers):
    chain = make_chain(built_in_chains()["gpt"], {"num_layers": num_layers})
    return [operator.name for operator in chain.operators]


NAMES = names_of(4)


def configuration(path, stages, *, names=NAMES, micro=4, **changes):
    """A configuration for the small model.

    Args:
        stages: for each how many operators, how many GPUs, and a function from an operator's number
            and name to its tensor degree, algorithm and recomputation.
        names: the operators.
    """
    rows, first = [], 0
    for count, devices, layout in stages:
        rows.append([(*layout(o, names[o]), devices) for o in range(first, first + count)])
        first += count
    content = {
        "model_name": "gpt",
        "model_size": "10M",
        "num_layers": 4,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "global_batch_size": 8,
        "micro_batch_size": micro,
        "num_stages": len(stages),
        "num_gpus": [devices for _, devices, _ in stages],
        "checkpoint_activations": [any(again for _, _, again, _ in row) for row in rows],
        "resharding_stages": [False for _ in stages],
        "num_ops_in_each_stage": [count for count, _, _ in stages],
        "model_parallel_size_of_each_op": [[tensor for tensor, _, _, _ in row] for row in rows],
        "data_parallel_size_of_each_op": [
            [devices // tensor for tensor, _, _, devices in row] for row in rows
        ],
        "recompute_ops": [[again for _, _, again, _ in row] for row in rows],
        "algo_of_each_op": [[algorithm for _, algorithm, _, _ in row] for row in rows],
    }
    path.write_text(json.dumps(content | changes))
    return path


def degrees(tensor, *, algorithm=0, again=0):
    return lambda o, name: (tensor, algorithm, again)


def swapped(o, name):
    """Algorithm 1 wherever there is one."""
    return (
        2,
        int(
            name in ("enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2")
        ),
        0,
    )


def attention_finer(o, name):
    """Attention on all four devices, all else on the examples."""
    return (4 if "attention" in name and "post" not in name else 1), 0, 0


def mlp_by_tensors(o, name):
    return (2 if "MLP" in name else 1), 0, 0


def three_degrees(o, name):
    """Tensor degree 4 for attention, 2 for the first product behind it, 1 for all else."""
    return (
        (4 if "attention" in name and "post" not in name else 2 if name == "enc-MLP-GEMM-1" else 1),
        0,
        0,
    )


def attention_again(o, name):
    """Recompute from the scores to the product behind them, and the activation of the MLP."""
    kept = ("qkv", "dense", "post", "layernorm", "embedding", "GEMM-2")
    return 2, 0, int(not any(part in name for part in kept))


def first_layers_again(o, name):
    """Everything in the first layer, and in the second from the scores to the product behind
    them.
    """
    return 2, 0, int(0 < o < 14 or 16 <= o < 20)


def layers_by_turns(o, name):
    """Tensor degree 2 in even layers, 4 in odd ones, and recomputation in some."""
    return (4 if (o - 1) // 13 % 2 else 2), 0, int(14 <= o < 27)


IMPORTED = {
    "uniform": [(27, 4, degrees(2)), (28, 4, degrees(4))],
    "one stage": [(55, 8, degrees(2))],
    "unequal stages": [(17, 2, degrees(1)), (20, 4, degrees(4)), (18, 2, degrees(2))],
    # Behind the queries, inside the softmax, and behind the activation of the feed-forward layer.
    "cut anywhere": [
        (3, 2, degrees(2)),
        (14, 2, degrees(1)),
        (21, 2, degrees(2)),
        (17, 2, degrees(1)),
    ],
    "algorithm 1": [(27, 4, swapped), (28, 4, swapped)],
    "mixed": [(27, 4, attention_finer), (28, 4, mlp_by_tensors)],
    "mixed, cut inside a layer": [(24, 4, attention_finer), (31, 4, attention_finer)],
    "three degrees": [(55, 8, three_degrees)],
    "recomputed": [(27, 4, attention_again), (28, 4, degrees(2, again=1))],
    "some layers recomputed": [(27, 4, first_layers_again), (28, 4, degrees(1, again=1))],
    "layers that differ": [(40, 4, layers_by_turns), (15, 4, degrees(2))],
    "micro-batches of one": [(15, 2, degrees(2)), (14, 2, degrees(2)), (26, 4, degrees(4))],
}
MICRO_BATCHES = {"three degrees": 8, "micro-batches of one": 1}
# The others combine what these hold one by one.
QUICK = {"three degrees", "recomputed", "micro-batches of one"}


def imported(folder, stages, *options, num_layers=4, **settings):
    out = folder / "plan.json"
    config = configuration(
        folder / "config.json",
        stages,
        names=names_of(num_layers),
        **{"num_layers": num_layers} | settings,
    )
    model = [TINY[0], *TINY[3:]]
    model[model.index("num_layers=4")] = f"num_layers={num_layers}"
    done = run("aceso", "import", config, "--model", *model, "--out", out, *options)
    assert done.exit_code == 0, done.output
    return Plan.load(out)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """From the name of a configuration its plan and the folder that has both files, imported
    once.
    """

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("case")
        micro = MICRO_BATCHES.get(name, 4)
        return imported(folder, IMPORTED[name], "--dtype", "float64", micro=micro), folder

    return make


@functools.cache
def plain_steps(settings):
    """A workload, its first state, three batches, and the last state and the losses that the
    plain step makes of them. Called in double precision.
    """
    work = zoo.build(**json.loads(settings))
    start = jax.device_get(jax.jit(work.init)(jax.random.key(0)))
    random = np.random.default_rng(0)
    batches = [
        {name: random.integers(0, 64, x.shape, np.int32) for name, x in work.batch.items()}
        for _ in range(3)
    ]
    plain, wanted, losses = jax.jit(work.train_step), start, []
    for batch in batches:
        wanted, expected = plain(wanted, batch)
        losses.append(float(expected["loss"]))
    return work, start, batches, jax.device_get(wanted), losses


def check_equal(plan):
    """Three steps of a plan are those of the plain step, in float64."""
    with jax.enable_x64(True):
        work, start, batches, wanted, losses = plain_steps(json.dumps(plan.model.settings))
        step = aq.parallelize(work.train_step, plan)
        found = start
        for batch, expected in zip(batches, losses, strict=True):
            found, metrics = step(found, batch)
            assert abs(float(metrics["loss"]) - expected) <= 1e-9 * expected
        leaf, path = largest("float64", start, jax.device_get(found), wanted)
        assert leaf <= 1e-9, path
        predicted = aq.estimate(plan, work.train_step, work.state, work.batch)
    assert predicted == plan.prediction
    return work


@pytest.mark.slow
def test_an_imported_configuration_takes_the_whole_of_an_update(tmp_path):
    options = ("--clip-grad", 0.1, "--weight-decay", 0.01, "--dtype", "float64")
    plan = imported(tmp_path, IMPORTED["recomputed"], *options)
    settings = plan.model.settings
    assert (settings["clip_norm"], settings["weight_decay"]) == (0.1, 0.01)
    check_equal(plan)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in IMPORTED],
)
def test_imported_configurations_run_as_the_plain_step(case, name):
    plan, _ = case(name)
    assert [len(s.layer_names) for s in plan.stages] == [1] * len(IMPORTED[name])
    check_equal(plan)


@pytest.mark.parametrize(
    "name",
    [
        "algorithm 1",
        "three degrees",
        "micro-batches of one",
        pytest.param("uniform", marks=pytest.mark.slow),
        pytest.param("mixed", marks=pytest.mark.slow),
    ],
)
def test_degrees_come_back_as_they_were(case, name):
    _, folder = case(name)
    done = run("aceso", "export", folder / "plan.json", "--out", folder / "again.json")
    assert done.exit_code == 0, done.output
    before, after = (json.loads((folder / f).read_text()) for f in ("config.json", "again.json"))
    for key in ("num_gpus", "num_ops_in_each_stage", "algo_of_each_op", "micro_batch_size"):
        assert before[key] == after[key], key
    first = 0
    for k, count in enumerate(before["num_ops_in_each_stage"]):
        key = "model_parallel_size_of_each_op"
        differ = {NAMES[first + o] for o in range(count) if before[key][k][o] != after[key][k][o]}
        # Dropout is none of the model's, and the last dropout of the MLP is on the residual
        # stream.
        assert differ <= ({"enc-post-MLP-dropout"} if name == "mixed" else set()), (
            name,
            differ,
        )
        first += count


def products_again(plan, k):
    """How many products a stage works out again."""
    return sum(entry.copies for entry in plan.stages[k].interior if entry.recompute)


def test_products_are_recomputed_where_they_and_the_next_operator_say_so(case):
    plan, _ = case("recomputed")
    assert [stage.recompute for stage in plan.stages] == ["operators", "operators"] and plan.stages[
        0
    ].folded
    # Of both layers scores and the first product of the MLP; the run of the scores ends with the
    # product behind them.
    assert products_again(plan, 0) == 2 * 2
    # All of both layers but the last product of each, behind which a layer ends, and not the head,
    # behind which nothing recomputes.
    assert products_again(plan, 1) == 2 * 7
    plan, _ = case("some layers recomputed")
    assert not plan.stages[0].folded and plan.stages[1].folded
    # All products of the first layer but the last, with three for queries, keys and values, and the
    # scores alone of the second.
    assert products_again(plan, 0) == 8
    assert [entry.copies for entry in plan.stages[0].interior] == [1] * len(plan.stages[0].interior)


def test_recomputed_runs_wait_for_their_gradients(tmp_path):
    plan = imported(
        tmp_path, [(40, 4, degrees(2, again=1)), (15, 4, degrees(2))], "--dtype", "float32", micro=2
    )
    # Three layers in the first stage: of what is worked out again one layer is there at once.
    before = imported(
        tmp_path, [(40, 4, degrees(2)), (15, 4, degrees(2))], "--dtype", "float32", micro=2
    )
    work = zoo.build(**before.model.settings)
    graph = capture(work.train_step, work.state, work.batch)
    held = estimate_stages(apply_plan(before, graph)).costs[0]
    each = (held.in_flight_bytes + held.recomputed_bytes) / 3
    more = plan.stages[0].prediction.memory_bytes["working memory"] - held.working_bytes
    assert 0 < more < 1.5 * each
    work = zoo.build(**plan.model.settings)
    step = apply_plan(plan, capture(work.train_step, work.state, work.batch))
    (graph,) = [
        p.graph for p in step.cut().programs.programs if (p.stage, p.part) == (0, Part.BACKWARD)
    ]
    order = [graph.ops[k] for k in graph.body.items if isinstance(k, int)]
    barriers = [k for k, op in enumerate(order) if op.name == "optimization_barrier"]
    # Backward operators run between one layer's barrier and the next.
    assert len(barriers) >= 3
    assert all(
        any(op.phase is Phase.BACKWARD for op in order[a:b])
        for a, b in itertools.pairwise(barriers)
    )


def dropouts_again(o, name):
    """What Aceso recomputes first: the dropout inside attention, and the product behind it."""
    return 2, 0, int(name in ("enc-attention-dropout", "enc-attention-context"))


def test_a_recomputed_dropout_frees_the_softmax_by_working_out_the_scores_again(tmp_path):
    kept, again = (
        imported(tmp_path, [(27, 4, layout), (28, 4, degrees(2))], "--dtype", "float16")
        for layout in (degrees(2), dropouts_again)
    )
    assert [products_again(plan, 0) for plan in (kept, again)] == [0, 2]
    assert [products_again(plan, 1) for plan in (kept, again)] == [0, 0]
    held = [p.stages[0].prediction.memory_bytes["activations in flight"] for p in (kept, again)]
    assert held[1] < held[0]


@pytest.mark.slow
def test_recomputation_takes_time_and_keeps_less(tmp_path):
    kept, again = (
        imported(
            tmp_path,
            [(27, 4, degrees(2, again=flag)), (2, 4, degrees(2))],
            "--dtype",
            "float32",
            micro=2,
            num_layers=2,
        )
        for flag in (0, 1)
    )
    before, after = kept.stages[0].prediction, again.stages[0].prediction
    assert after.forward_s == before.forward_s
    assert 1.2 < after.backward_s / before.backward_s < 1.7
    held = [p.memory_bytes["activations in flight"] / p.in_flight for p in (before, after)]
    # Two layers' ends, and what enters and leaves the stage.
    assert held[1] < 0.25 * held[0]
    assert after.peak_memory_bytes < before.peak_memory_bytes
    # The compiler's programs hand over less, too.
    work = zoo.build(**kept.model.settings)
    parts = [
        aq.verify(plan, work.train_step, work.state, work.batch).to_dict()["stages"][0]["parts"][
            "compiled"
        ]
        for plan in (kept, again)
    ]
    assert parts[1]["residuals"] < 0.3 * parts[0]["residuals"]


@pytest.mark.parametrize(
    "name",
    [
        "recomputed",
        pytest.param("some layers recomputed", marks=pytest.mark.slow),
        pytest.param("layers that differ", marks=pytest.mark.slow),
    ],
)
def test_recomputation_comes_back(tmp_path, case, name):
    plan, folder = case(name)
    done = run("aceso", "export", folder / "plan.json", "--out", tmp_path / "again.json")
    assert done.exit_code == 0, done.output
    out = tmp_path / "plan2.json"
    done = run(
        *("aceso", "import", tmp_path / "again.json", "--model", *TINY[:1], *TINY[3:]),
        *("--dtype", "float64", "--out", out),
    )
    assert done.exit_code == 0, done.output
    assert Plan.load(out).decisions() == plan.decisions(), name


def test_imported_plans_are_split_as_their_degrees_say(tmp_path, case):
    plan, _ = case("mixed")
    first, second = plan.stages
    assert (first.mesh_shape, first.axis_names) == ((4,), ("mixed",))
    assert (second.mesh_shape, second.axis_names, second.data_axes) == (
        (2, 2),
        ("data", "mixed"),
        ("data",),
    )
    assert first.shardings["state.params.layers[0].attn.q.kernel"] == ((), ("mixed",))
    assert first.shardings["state.params.layers[0].mlp.up.kernel"] == ((), ())
    assert first.shardings["batch.inputs"] == (("mixed",), ())
    assert second.shardings["state.params.layers[3].mlp.down.kernel"] == (("mixed",), ())
    assert second.shardings["state.params.layers[3].attn.out.kernel"] == ((), ())
    assert "no lower bound; cheapest found within a configuration of Aceso's" in str(plan)
    # Norms and sums of a stage have the degree of most of its operators.
    config = imported(
        tmp_path, [(27, 4, degrees(2)), (28, 4, lambda o, name: (4 if o < 40 else 2, 0, 0))]
    )
    (note,) = [note for note in config.notes if note.startswith("stage 1:")]
    assert "are split over data degree 2; operators 27, 34, 35, 39 asked for another" in note


def test_all_that_does_not_fit_is_said_at_once(tmp_path):
    config = configuration(
        tmp_path / "config.json",
        [(27, 4, degrees(1)), (26, 2, degrees(2)), (1, 1, degrees(1))],
        micro=3,
        hidden_size=64,
        seq_length=32,
        model_name="t5",
    )
    refused(
        run(
            *("aceso", "import", config, "--model", "gpt-10m", *TINY[3:]),
            *("--out", tmp_path / "plan.json"),
        ),
        "it is of a model of family 't5'",
        "seq_length is 32, and the model's 16: add --set seq_len=32",
        "hidden_size is 64, and the model's 32: add --set hidden_size=64",
        "it has 54 operators, and the model's chain 55",
        "micro-batches of 3 do not make up a global batch of 8",
        "it is for 7 GPUs, and 8xcpu has 8: give a --cluster of 7",
        "stage 0, operator 0, encoder-embedding and 26 more: micro-batches of 3 samples cannot be"
        " split over data degree 4",
    )
    assert not (tmp_path / "plan.json").exists()


def test_degrees_that_do_not_divide_and_stages_without_work(tmp_path):
    out = ("--out", tmp_path / "plan.json")
    many = [(27, 4, degrees(4)), (28, 4, degrees(1))]
    config = configuration(tmp_path / "config.json", many, num_attention_heads=2)
    fewer_heads = [str(part).replace("num_heads=4", "num_heads=2") for part in TINY[3:]]
    refused(
        run("aceso", "import", config, "--model", "gpt-10m", *fewer_heads, *out),
        "stage 0, operator 3, enc-attention-score: its arrays (dot_general",
        "cannot be split, 2 into 4",
    )
    algorithm = [(27, 4, degrees(2, algorithm=2)), (28, 4, degrees(2))]
    config = configuration(tmp_path / "config.json", algorithm)
    refused(
        run("aceso", "import", config, "--model", "gpt-10m", *TINY[3:], *out),
        "stage 0, operator 2, enc-attention-qkv: there is no algorithm 2, only 0, 1",
    )
    empty = [(5, 4, degrees(1)), (1, 2, degrees(1)), (49, 2, degrees(1))]
    config = configuration(tmp_path / "config.json", empty)
    refused(
        run("aceso", "import", config, "--model", "gpt-10m", *TINY[3:], *out),
        "stage 1 has only enc-attention-dropout, of which the model computes nothing",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "too deep in each other"),
        ("{", "is no JSON"),
        ("1" * 5000, "is no JSON"),
        ("null", "it: expected an object, got None"),
        ('{"num_gpus": [1], "num_gpus": [2]}', "num_gpus stands 2 times in one object"),
    ],
    ids=["deep", "truncated", "long", "null", "twice"],
)
def test_files_that_are_no_configurations(tmp_path, text, message):
    config = tmp_path / "config.json"
    config.write_text(text)
    out = tmp_path / "plan.json"
    refused(run("aceso", "import", config, "--model", "gpt-10m", *TINY[3:], "--out", out), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size must be a positive number, got '32'"),
        ({"micro_batch_size": float("nan")}, "`micro_batch_size`: expected `int`, got `float`"),
        ({"num_stages": 10**9}, "num_gpus must be a list of 1000000000"),
        ({"recompute_ops": [[7] * 27, [0] * 28]}, "`recompute_ops[0][0]`: expected `int` <= 1"),
        (
            {"num_gpus": [4, 2]},
            (
                "operator 0 of stage 1 has tensor degree 2 times data degree 2, and the stage 2"
                " devices"
            ),
        ),
        ({"global_batch_size": 10**30}, "`global_batch_size`: "),
        ({"model_name": "x" * 10**5}, "family 'xxx"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configurations_with_odd_values(tmp_path, changes, message):
    config = configuration(
        tmp_path / "config.json", [(27, 4, degrees(2)), (28, 4, degrees(2))], **changes
    )
    found = run(
        "aceso", "import", config, "--model", "gpt-10m", *TINY[3:], "--out", tmp_path / "plan.json"
    )
    refused(found, message)
    assert max(map(len, found.stderr.splitlines())) < 400


def test_memory_that_is_short(tmp_path):
    config = configuration(tmp_path / "config.json", IMPORTED["uniform"])
    done = run(
        *("aceso", "import", config, "--model", "gpt-10m", *TINY[3:], "--memory-limit", "200KiB"),
        *("--out", tmp_path / "plan.json"),
    )
    refused(
        done,
        "The configuration does not fit, with 200.0 KiB on each device",
        "- stage 0 needs",
        code=1,
    )
