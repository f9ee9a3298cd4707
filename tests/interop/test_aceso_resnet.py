"""Aceso's configurations of Wide-ResNets as plans, and the reverse."""

import functools
import json

import jax
import numpy as np
import pytest
from command_line import refused, run
from interop.test_aceso_plans import configuration, degrees
from runtime.equality import largest

import aliquot as aq
from aliquot import Plan, zoo
from aliquot.interop.aceso import built_in_chains, make_chain

SHAPE = ["num_channels=4", "width_factor=2", "image_size=32", "num_classes=16"]
TINY = [
    "wide-resnet-500m",
    "--cluster",
    "8xcpu",
    "--dtype",
    "float64",
    *(part for s in SHAPE for part in ("--set", s)),
]
LAYERS = {(1, 1, 1, 1): 14, (2, 2, 2, 2): 26}


def names_of(blocks):
    chain = make_chain(built_in_chains()["resnet"], {"num_layers": list(blocks)})
    return [operator.name for operator in chain.operators]


def is_block_convolution(name):
    """True for convolutions in blocks; the shortcut of a second block is none."""
    return name.startswith("block") and ("conv" in name or name.endswith("-0-downsample"))


def swapped(o, name):
    """Algorithm 1 for convolutions in blocks."""
    return 2, int(is_block_convolution(name)), 0


def in_turn(o, name):
    """Convolutions of the first section by output channels, of the second by input channels, all
    else on the examples.
    """
    return (
        (2 if is_block_convolution(name) else 1),
        int(name.startswith("block-1") and is_block_convolution(name)),
        0,
    )


def sections_apart(o, name):
    """Tensor degree 4 in the first section, 2 behind it."""
    return (4 if name.startswith("block-0") else 2), 0, 0


def blocks_again(o, name):
    """Everything that Aceso may recompute."""
    again = name.startswith("block") and not name.endswith(("-conv1", "-relu"))
    return 2, 0, int(again)


def first_block_of_stage_again(o, name):
    return 1, 0, int(name.startswith("block-2-0") and not name.endswith("-conv1"))


ONE, TWO = (1, 1, 1, 1), (2, 2, 2, 2)
IMPORTED = {
    "data parallel": (ONE, [(38, 8, degrees(1))]),
    "uniform": (ONE, [(20, 4, degrees(2)), (18, 4, degrees(4))]),
    "two blocks in each section": (TWO, [(70, 8, swapped)]),
    "mixed": (ONE, [(38, 8, in_turn)]),
    "sections apart": (ONE, [(20, 4, sections_apart), (18, 4, swapped)]),
    # Behind the second normalisation of a block, and before the last rectifier of another.
    "cut anywhere": (ONE, [(8, 2, degrees(2)), (11, 2, degrees(1)), (19, 4, degrees(2))]),
    "recomputed": (ONE, [(20, 4, blocks_again), (18, 4, first_block_of_stage_again)]),
}
"""For each the blocks of each section, and the stages; see `configuration`."""
QUICK = {"recomputed"}


def imported(folder, blocks, stages, *options, micro=8, **changes):
    sizes = {"num_layers": list(blocks), "in_channels": 4, "width_factor": 2}
    config = configuration(
        folder / "config.json",
        stages,
        names=names_of(blocks),
        micro=micro,
        model_name="resnet",
        **sizes | changes,
    )
    of_text = ("seq_length", "max_position_embeddings", "num_attention_heads", "hidden_size")
    content = json.loads(config.read_text())
    config.write_text(json.dumps({k: v for k, v in content.items() if k not in of_text}))
    layers = ("--set", f"num_layers={LAYERS[blocks]}")
    out = ("--out", folder / "plan.json")
    return run("aceso", "import", config, "--model", *TINY, *layers, *out, *options)


@functools.cache
def plain_steps(settings):
    """A workload, its first state, three batches, and the last state and the losses that the
    plain step makes of them. Called in double precision.
    """
    work = zoo.build(**json.loads(settings))
    start = jax.device_get(jax.jit(work.init)(jax.random.key(0)))
    random = np.random.default_rng(0)
    batches = [
        {
            "images": random.normal(size=work.batch["images"].shape),
            "labels": random.integers(0, 16, work.batch["labels"].shape, np.int32),
        }
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
            assert abs(float(metrics["loss"]) / expected - 1) <= 1e-9
        leaf, path = largest("float64", start, jax.device_get(found), wanted)
        assert leaf <= 1e-9, path
        predicted = aq.estimate(plan, work.train_step, work.state, work.batch)
    assert predicted == plan.prediction


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in IMPORTED],
)
def test_configurations_of_wide_resnets_come_back(tmp_path, name):
    done = imported(tmp_path, *IMPORTED[name])
    assert done.exit_code == 0, done.output
    done = run("aceso", "export", tmp_path / "plan.json", "--out", tmp_path / "again.json")
    assert done.exit_code == 0, done.output
    before, after = (json.loads((tmp_path / f).read_text()) for f in ("config.json", "again.json"))
    for key in ("model_name", "num_gpus", "num_ops_in_each_stage", "algo_of_each_op", "num_layers"):
        assert before[key] == after[key], key
    assert before["model_parallel_size_of_each_op"] == after["model_parallel_size_of_each_op"]


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPORTED)
def test_configurations_of_wide_resnets_run_as_the_plain_step(tmp_path, name):
    done = imported(tmp_path, *IMPORTED[name])
    assert done.exit_code == 0, done.output
    check_equal(Plan.load(tmp_path / "plan.json"))


def test_micro_batches_have_statistics_of_their_own(tmp_path):
    done = imported(tmp_path, *IMPORTED["data parallel"], micro=4)
    refused(done, "micro-batches of 4 samples cannot be split over data degree 8")
    stages = [(20, 4, degrees(2)), (18, 4, degrees(2))]
    done = imported(tmp_path, ONE, stages, micro=4)
    assert done.exit_code == 0, done.output
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.micro_batch_semantics == "independent" and plan.num_micro_batches == 2
    done = run("aceso", "export", tmp_path / "plan.json", "--out", tmp_path / "again.json")
    assert done.exit_code == 0, done.output
    before, after = (json.loads((tmp_path / f).read_text()) for f in ("config.json", "again.json"))
    assert {**before, "model_size": "500M"} == after | {"checkpoint_activations": [False, False]}


def test_what_aceso_has_no_terms_for_is_said(tmp_path):
    done = imported(tmp_path, ONE, [(38, 8, lambda o, name: (2, 1, 0))])
    refused(
        done,
        "operator 0, conv1: there is no algorithm 1, only 0",
        "operator 37, fc: there is no algorithm 1, only 0",
    )
    done = imported(tmp_path, ONE, [(38, 8, degrees(1))], num_layers=[3, 4, 6, 3])
    refused(
        done,
        "num_layers is [3, 4, 6, 3], and the model's [1, 1, 1, 1]: choose another --model, or its"
        " number of layers with --set num_layers=...",
    )


def test_plans_of_wide_resnets_are_written(tmp_path):
    plan = tmp_path / "plan.json"
    layers = ("--set", "num_layers=14", "--global-batch", 8, "--out", plan)
    done = run("plan", *TINY, *layers, "--method", "dp")
    assert done.exit_code == 0, done.output
    done = run("aceso", "export", plan, "--out", tmp_path / "again.json")
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "again.json").read_text())
    assert config["data_parallel_size_of_each_op"] == [[8] * 38]
