"""Databases in Aceso's format, from our cost model and from measurements."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from command_line import refused, run

from aliquot import Plan
from aliquot.cluster import Cluster
from aliquot.interop.aceso import (
    TransformerShape,
    load_database,
    modelled_database,
    write_database,
)
from aliquot.profiling import LAUNCH, Measurement, Operator, ProfileDatabase, ProgramKey

CLUSTER = Cluster.preset("2x4xV100-32GB")
# GPT of 1.3 billion parameters, as Aceso has it.
SHAPE = TransformerShape(
    hidden_size=2048,
    num_heads=32,
    ffn_size=8192,
    vocab_size=51200,
    seq_len=2048,
    max_positions=2048,
    dtype="float16",
)
MODEL = ["gpt-125m", "--cluster", "1x4xV100-32GB", "--micro-batch-sizes", "1,2"]


def measurements(path, num_devices, *more):
    """A profile database of V100 that holds a launch, and perhaps other operators."""
    with ProfileDatabase(path) as known:
        for operator, seconds in ((LAUNCH, 1e-9), *more):
            key = ProgramKey(
                program=str(operator),
                device="Tesla V100-SXM2-32GB",
                num_devices=num_devices,
                mesh=str(num_devices),
                jax_version=jax.__version__,
            )
            known.put(key, Measurement(seconds=seconds))
    return path


def exported(profiles, *options):
    return run("profile", "export", profiles, *options)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aceso") / "database"
    content = modelled_database(SHAPE, CLUSTER, micro_batches=[1, 2, 4])
    write_database(folder, "gpt_1_3B", content)
    return load_database(folder, "gpt_1_3B")


def numbers(database, operator, *, batch=1, tensor=1, algorithm=0):
    at = database.micro_batches.index(batch), database.tensor_degrees.index(tensor), algorithm
    return database.table[(database.operators[operator], *at)]


@pytest.mark.parametrize(
    ("operator", "tensor", "algorithm", "mib"),
    [
        # Input, output, weights and activations, worked out by hand: a hidden state is 8 MiB,
        # scores are 256 MiB.
        ("encoder-embedding", 2, 0, (0.008, 8, 108, 12)),
        ("enc-attention-qkv", 2, 0, (16, 20, 12, 12)),
        ("enc-attention-qkv", 2, 1, (12, 32, 12, 24)),
        ("enc-attention-score", 1, 0, (32, 272, 0, 256)),
        ("enc-attention-dropout", 2, 0, (140, 140, 0, 192)),
        ("enc-attention-dense", 2, 0, (12, 16.004, 4, 8)),
        ("enc-MLP-GEMM-1", 4, 0, (16, 16.004, 8, 8)),
        ("enc-MLP-GEMM-2", 1, 0, (40, 16.004, 32, 8)),
        ("gpt-post-process", 4, 0, (8, 0, 50, 100)),
    ],
)
def test_sizes_are_those_of_the_operator(database, operator, tensor, algorithm, mib):
    found = numbers(database, operator, tensor=tensor, algorithm=algorithm)[2:6]
    np.testing.assert_allclose(found, mib, atol=0.001)


def test_times_follow_the_work(database):
    assert not database.missing and database.tensor_degrees == (1, 2, 4)
    for operator in database.operators:
        times = np.array([numbers(database, operator, batch=b)[:2] for b in (1, 2, 4)])
        assert (np.diff(times, axis=0) > 0).all(), operator
    for operator in ("enc-attention-score", "enc-attention-softmax", "enc-MLP-gelu"):
        times = np.array([numbers(database, operator, tensor=t)[:2] for t in (1, 2, 4)])
        assert (np.diff(times, axis=0) < 0).all(), operator
    qkv, split = (
        numbers(database, "enc-attention-qkv"),
        numbers(database, "enc-attention-qkv", tensor=4),
    )
    # Columns split: no collective forward, the sum of the input's gradient backward.
    assert split[0] < 0.35 * qkv[0] and split[1] > 0.3 * qkv[1]
    assert all(times[16] > times[8] > times[1] > 0 for times in database.collectives.values())
    assert database.collectives["all_gather", 2][16] == pytest.approx(
        database.collectives["all_gather", 2][8] * 2, rel=0.2
    )
    assert (
        database.between_nodes.bandwidths_gb_per_s[-1]
        < database.within_nodes.bandwidths_gb_per_s[-1]
    )


def test_measured_products_replace_modelled_ones(tmp_path):
    product = Operator("product", "float16", (1, 1024, 3072, 768)), 0.01
    found = {}
    for name, more in (("plain", ()), ("measured", (product,))):
        profiles = measurements(tmp_path / f"{name}.sqlite", 4, *more)
        done = exported(profiles, *MODEL, "--out", tmp_path / name)
        assert done.exit_code == 0, done.output
        found[name] = numbers(load_database(tmp_path / name, "gpt_125M"), "enc-MLP-GEMM-1")
    assert found["measured"][0] == pytest.approx(1e4) and found["plain"][0] < 1e3


def test_a_written_database_is_searched(tmp_path):
    out = tmp_path / "database"
    done = exported(measurements(tmp_path / "p.sqlite", 4), *MODEL, "--out", out, "--json")
    answer = json.loads(done.stdout)
    assert "1 of" in answer.pop("profiles") or True
    assert answer == {
        "database": str(out),
        "model": "gpt_125M",
        "num_layers": 12,
        "micro_batches": [1, 2],
        "tensor_degrees": [1, 2, 4],
    }
    found = run(
        *(
            "aceso",
            "search",
            "--database",
            out,
            "--model",
            "gpt",
            "--size",
            "125M",
            "--num-layers",
            "12",
            "--json",
        ),
        *(
            "--nodes",
            "1",
            "--gpus-per-node",
            "4",
            "--global-batch",
            "32",
            "--memory-limit-mb",
            "28000",
        ),
        *("--micro-batch-sizes", "1,2"),
    )
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert answer["gap"] < 0.05 and answer["config"]["num_layers"] == 12 and not answer["missing"]


@pytest.fixture(scope="module", params=["t5-770m", "wide-resnet-500m"])
def written(request, tmp_path_factory):
    """A database of the size that Aceso measured."""
    folder = tmp_path_factory.mktemp("written") / "database"
    batches = "1" if request.param.startswith("t5") else "16"
    more = ("--seq-len", 2048) if request.param.startswith("t5") else ()
    profiles = measurements(folder.with_name("p.sqlite"), 2)
    where = ("--cluster", "1x2xV100-32GB", "--out", folder)
    done = exported(profiles, request.param, *where, "--micro-batch-sizes", batches, *more)
    assert done.exit_code == 0, done.output
    model = "t5_770M" if request.param.startswith("t5") else "resnet_500M"
    return load_database(folder, model)


# Input, output, weights and activations in MiB, worked out by hand: of the T5 a hidden state of the
# encoder is 4 MiB and one of the decoder 1 MiB, of the ResNet 3.0625 MiB are 16 images of 224
# channels of 14 points each way.
BY_HAND = {
    "t5_770M": [
        ("decoder-embedding", 2, 0, (4, 5, 33.875, 1.5)),
        ("dec-attention-qkv-1", 2, 0, (6, 6.5, 3, 1.5)),
        ("dec-attention-qkv-2", 2, 0, (6, 9.5, 3, 4.5)),
        ("dec-attention-score-2", 2, 0, (9.5, 23, 0, 16)),
        ("dec-attention-context-2", 2, 0, (23, 5.5, 0, 0.5)),
        ("dec-MLP-GEMM-2", 1, 0, (9, 6.002, 8, 1)),
        ("dec-final-layernorm", 1, 0, (5, 5, 0, 1.004)),
        ("t5-post-process", 2, 0, (1, 0, 29.875, 29.875)),
    ],
    "resnet_500M": [
        ("conv1", 2, 1, (9.1875, 171.5, 0.063, 171.5)),
        ("maxpool", 1, 0, (171.5, 42.875, 0, 128.625)),
        ("block-0-0-conv1", 2, 0, (42.875, 85.75, 0.096, 42.875)),
        ("block-0-0-conv1", 2, 1, (42.875, 85.75, 0.096, 64.3125)),
        ("block-1-0-conv2", 1, 0, (257.25, 214.375, 13.781, 42.875)),
        ("block-0-1-downsample", 1, 0, (343, 171.5, 0, 171.5)),
        ("block-3-2-relu", 1, 0, (21.4375, 21.4375, 0, 21.4375)),
        ("fc", 2, 0, (0.4375, 0.0625, 28.004, 0.0625)),
    ],
}


def test_sizes_of_other_families_are_those_of_their_operators(written):
    assert not written.missing
    for operator, tensor, algorithm, mib in BY_HAND[written.model]:
        found = numbers(
            written,
            operator,
            batch=written.micro_batches[0],
            tensor=tensor,
            algorithm=algorithm,
        )
        np.testing.assert_allclose(found[2:6], mib, atol=0.002, err_msg=operator)


@pytest.mark.parametrize(
    ("model", "found_as", "options", "dtype", "batches"),
    [
        ("t5-770m", ("t5", "770M", 2), ("--set", "num_layers=2"), "float16", "4,8"),
        pytest.param(
            "wide-resnet-4b",
            ("resnet", "4B", "1,1,1,1"),
            ("--set", "num_layers=14"),
            "float32",
            "32,64",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_the_search_finds_in_a_written_database_costs_about_as_much_as_a_plan(
    tmp_path, model, found_as, options, dtype, batches
):
    database, config, plan = (tmp_path / name for name in ("database", "config.json", "plan.json"))
    cluster = ("--cluster", "1x4xV100-32GB")
    profiles = measurements(tmp_path / "p.sqlite", 4)
    sizes = ("--micro-batch-sizes", batches, "--out", database)
    done = exported(profiles, model, *options, *cluster, *sizes)
    assert done.exit_code == 0, done.output
    family, size, num_layers = found_as
    search = (
        *("--database", database, "--model", family, "--size", size, "--num-layers", num_layers),
        *("--nodes", 1, "--gpus-per-node", 4, "--global-batch", 256, "--memory-limit-mb", 28000),
        *("--micro-batch-sizes", batches, "--judge", "aliquot", "--out", config, "--json"),
    )
    done = run("aceso", "search", *search)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["gap"] < 0.05 and not answer["missing"]
    done = run(
        *("aceso", "import", config, "--model", model, *options, *cluster, "--dtype", dtype),
        *("--out", plan),
    )
    assert done.exit_code == 0, done.output
    judged = Plan.load(plan).prediction.step_time_s
    # The database has the kernels of Aceso's runtime, the plan those of XLA. Narrower convolutions
    # differ by more: a plan's gradients of small weights occupy few processors.
    assert answer["iteration_time_ms"] / 1e3 == pytest.approx(judged, rel=0.4), judged


def test_what_cannot_be_written_is_refused(tmp_path):
    here = ["--cluster", "1x4xV100-32GB", "--out", tmp_path / "database"]
    profiles = measurements(tmp_path / "p.sqlite", 4)
    refused(exported(profiles, "llama-7b", *here), "llama-7b is no GPT, T5 or Wide-ResNet")
    refused(
        exported(profiles, "gpt-125m", *here, "--micro-batch-sizes", "1,x"),
        "--micro-batch-sizes '1,x'",
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.csv").write_text("kept")
    refused(exported(profiles, *MODEL, "--out", tmp_path / "full"), "is not empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "p.sqlite"]
