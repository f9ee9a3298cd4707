"""`aliquot profile`, on a GPT of one layer, whose products take longer than a launch, and virtual
devices.
"""

from __future__ import annotations

import json

import pytest
from command_line import refused, run

from aliquot.cluster import Cluster

MODEL = [
    "gpt-10m",
    "--global-batch",
    "8",
    "--set",
    "num_layers=1",
    "--set",
    "hidden_size=256",
    "--set",
    "num_heads=4",
]
MODEL += ["--seq-len", "128", "--dtype", "float32"]
FEW = ["--repeats", "1", "--warm-up", "1", "--least-s", "0", "--retries", "0"]


def answer_of(*args):
    found = run(*args, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """Two shares, as two hosts would measure them, merged."""
    folder = tmp_path_factory.mktemp("profiles")
    shares = []
    for k in (1, 2):
        answer = answer_of(
            *(
                "profile",
                "run",
                *MODEL,
                "--devices",
                "8",
                "--mesh",
                "8",
                "--database",
                folder / f"{k}.sqlite",
            ),
            *("--share", f"{k}/2"),
            *FEW,
        )
        assert answer["missing"] == 0 and answer["measured"] == answer["operators"] > 5
        shares.append(answer["operators"])
    merged = answer_of(
        "profile", "merge", folder / "1.sqlite", folder / "2.sqlite", "--into", folder / "p.sqlite"
    )
    assert merged["total"] == sum(shares) and list(merged["new"].values()) == shares
    return folder / "p.sqlite"


@pytest.mark.slow
def test_two_shares_are_all_there_is(profiles):
    again = answer_of(
        "profile", "run", *MODEL, "--devices", "8", "--mesh", "8", "--database", profiles
    )
    assert again["measured"] == again["missing"] == 0 and again["known"] == again["operators"]


def test_show_lists_kinds_curves_and_corrections(profiles, tmp_path):
    answer = answer_of(
        "profile", "show", profiles, "--cluster", "detect", "--plots", tmp_path / "plots"
    )
    kinds = {row["kind"] for row in answer["kinds"]}
    assert {"launch", "product float32", "traffic float32", "all-reduce"} <= kinds
    assert {"products", "traffic", "all-reduce"} <= {curve["file"] for curve in answer["curves"]}
    assert all(
        (tmp_path / "plots" / f"{curve['file']}.png").stat().st_size > 5000
        for curve in answer["curves"]
    )
    shown = run("profile", "show", profiles)
    assert shown.exit_code == 0 and "Programs" in shown.stdout and "Corrections" not in shown.stdout


def test_plan_check_and_explain_use_the_same_measurements(profiles, tmp_path):
    plan = tmp_path / "plan.json"
    here = ("--cluster", "detect", "--method", "zero3", "--profiles", profiles)
    args = ["plan", *MODEL, *here]
    planned = answer_of(*args, "--out", plan)
    checked = answer_of("profile", "check", plan, "--database", profiles)
    assert (
        checked["step_time_s"] == planned["step_time_s"]
        and checked["measured_share"] == planned["measured_share"]
    )
    assert checked["missing"] == 0 and checked["operators"] > 5
    assert "8 x cpu" in planned["profiles"]
    other = ["float16" if arg == "float32" else arg for arg in args]
    refused(run(*other, "--require-measured", "0.9"), "90% is required", "--measure")
    without = run("explain", plan)
    assert without.exit_code == 0 and "Give the same database: --profiles FILE" in without.stdout
    answer = answer_of("explain", plan, "--profiles", profiles)
    assert answer["alternatives"] and answer["alternatives_remark"] is None


def test_fit_writes_a_cluster_to_plan_for(profiles, tmp_path):
    out = tmp_path / "fitted.toml"
    answer = answer_of("profile", "fit", profiles, "--out", out)
    named = tmp_path / "named.toml"
    assert answer_of("profile", "fit", profiles, "--cluster", "8xcpu", "--out", named)["figures"]
    assert {"matmul_efficiency", "collective_overhead_s"} <= set(answer["figures"]) and answer[
        "errors"
    ]
    assert Cluster.load(out).device.calibration.keys() == answer["figures"].keys()
    assert answer_of("plan", *MODEL, "--cluster", out, "--method", "dp")["feasible"]


CPUS = '[cluster]\ndevice = "cpu"\ndevices_per_host = 4\n'


def test_one_device_measures_the_computing_of_a_cluster(tmp_path):
    cluster, database = tmp_path / "cpus.toml", tmp_path / "one.sqlite"
    cluster.write_text(CPUS)
    here = ["profile", "run", *MODEL, "--devices", "1", "--mesh", "4", "--database", database]
    answer = answer_of(*here, *FEW, "--cluster", cluster)
    assert answer["measured"] == answer["operators"] > 5 and answer["missing"] == 0
    shown = answer_of("profile", "show", database)
    kinds = {row["kind"] for row in shown["kinds"]}
    assert kinds == {"launch", "product float32", "traffic float32"}
    assert {row["grade"] for row in shown["kinds"]} == {"measured-compute"}
    there = ("--cluster", cluster, "--method", "zero3", "--profiles", database)
    planned = answer_of("plan", *MODEL, *there)
    assert planned["measured_share"] == 0.0 < planned["measured_compute_share"] <= 1.0
    assert "measured on one alone (grade measured-compute)" in planned["profiles"]
    refused(
        run(*here, "--cluster", "8xH100"),
        "--cluster 8xH100 is made of H100",
        "can only stand for others of its kind",
    )


def test_bad_input_is_refused(profiles, tmp_path):
    here = ["profile", "run", *MODEL, "--devices", "8", "--database", tmp_path / "p.sqlite"]
    refused(run(*here, "--share", "3/2"), "--share 3/2")
    refused(run(*here, "--mesh", "3x2"), "--mesh 3x2 has 6 devices")
    refused(run("profile", "show", tmp_path / "none.sqlite"), "There is no profile database")
    refused(
        run("profile", "merge", tmp_path / "none.sqlite", "--into", tmp_path / "p.sqlite"),
        "Nothing was merged",
    )
    assert not (tmp_path / "p.sqlite").exists()
    refused(
        run("profile", "fit", profiles, "--cluster", "8xH100", "--out", tmp_path / "c.toml"),
        "8 x H100",
    )
    # Advice that the command can take.
    refused(
        run("profile", "fit", profiles, "--cluster", "4xcpu", "--out", tmp_path / "c.toml"),
        "name its devices, such as --cluster 4xcpu",
    )
    assert not (tmp_path / "c.toml").exists()


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (("--launch", "loal:2"), ["did you mean 'local:2'?"]),
        (("--num-hosts", 2), ["--num-hosts: say what starts the processes"]),
        (("--launch", "local:2", "--devices", 8), ["type --num-devices-per-host 8"]),
        (("--launch", "ray", "--cluster", "8xH100"), ["--cluster 8xH100", "Leave one of them out"]),
    ],
)
def test_bad_launches_are_refused_before_anything_starts(options, messages, tmp_path):
    refused(run("profile", "run", *MODEL, "--database", tmp_path / "p.sqlite", *options), *messages)
    assert not (tmp_path / "p.sqlite").exists()
