"""`--attention`: what models of the zoo get by default, what plans record, and what is refused."""

import json

import pytest
from command_line import refused, run

from aliquot.plans import Plan

SIZES = "num_layers=2 hidden_size=64 num_heads=4 vocab_size=256 seq_len=128".split()
SMALL = [
    *"gpt-125m --global-batch 8 --scan".split(),
    *(part for size in SIZES for part in ("--set", size)),
]


def planned(path, cluster, *options):
    found = run("plan", *SMALL, "--cluster", cluster, "--method", "dp", "--out", path, *options)
    assert found.exit_code == 0, found.stderr
    return found, Plan.load(path)


@pytest.mark.parametrize(
    ("cluster", "kernel", "why"),
    [
        ("2xH100", "cudnn", "fused attention of cuDNN, on H100"),
        pytest.param(
            "v5e-4",
            "splash",
            "splash attention in Pallas, on v5e",
            marks=pytest.mark.slow,
        ),
        ("2xV100-16GB", "plain", "no fused kernel: V100-16GB has none"),
        ("2xcpu", "plain", "no fused kernel: cpu has none"),
    ],
)
def test_the_default_is_told_and_recorded(tmp_path, cluster, kernel, why):
    path = tmp_path / "plan.json"
    found, plan = planned(path, cluster)
    assert f"attention on {cluster}: {kernel} ({why}" in found.stderr
    assert plan.model.settings["attention"] == kernel
    assert ("no scores in memory" in found.stdout) == (kernel != "plain")
    # The same step is built again.
    explained = run("explain", path, "--no-alternatives")
    assert explained.exit_code == 0, explained.stderr
    assert f"attention='{kernel}'" in explained.stdout


def test_plain_attention_may_be_asked_for_and_is_that_of_plans_without_a_word(tmp_path):
    path = tmp_path / "plan.json"
    found, plan = planned(path, "2xH100", "--attention", "plain")
    assert plan.model.settings["attention"] == "plain" and "(as asked for)" in found.stderr
    data = json.loads(path.read_text())
    del data["model"]["settings"]["attention"]
    path.write_text(json.dumps(data))
    explained = run("explain", path, "--no-alternatives")
    assert explained.exit_code == 0, explained.stderr


@pytest.mark.parametrize(
    ("cluster", "options", "said"),
    [
        ("2xV100-16GB", ("fused",), "V100-16GB has none"),
        ("2xH100", ("fused", "--dtype", "float32"), "the model in float32"),
        ("2xH100", ("fused", "--set", "head_size=20"), "those of the model have 20"),
        ("2xH100", ("flash",), "Known: auto, fused, plain"),
    ],
)
def test_what_is_impossible_is_refused(cluster, options, said):
    refused(run("plan", *SMALL, "--cluster", cluster, "--attention", *options), said)


def test_factories_decide_by_themselves():
    refused(
        run("plan", "json:dumps", "--cluster", "2xH100", "--attention", "fused"),
        "--attention: only for models of the zoo",
    )


def test_devices_without_the_kernel_are_refused(tmp_path):
    path, text = tmp_path / "plan.json", tmp_path / "text"
    text.write_text("words " * 1000)
    planned(path, "2xH100")
    refused(run("verify", path, "--target", "cpu"), "cuDNN's attention", "--attention plain")
    refused(
        run("train", "gpt-125m", "--data", text, "--plan", path, "--steps", "1", "--devices", "2"),
        "cuDNN's attention",
        "these are cpu devices",
    )


def test_each_cluster_has_its_own_attention():
    found = run("compare", *SMALL, "--clusters", "2xH100,2xV100-16GB", "--methods", "ddp", "--json")
    assert found.exit_code == 0, found.stderr
    rows = json.loads(found.stdout)["candidates"]
    assert [row["cluster"] for row in rows] == ["2xH100", "2xV100-16GB"]
    assert "2xH100: cudnn" in found.stderr and "2xV100-16GB: plain" in found.stderr
