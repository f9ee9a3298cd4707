"""`aliquot bench cfp`: cases of the paper, planned, and run at a small size."""

import json
import subprocess
import sys

import pytest
from command_line import refused, run

import aliquot as aq
from aliquot.planners import ILP
from aliquot.suites import CFP_CASES, CfpCase, _cfp, cfp_step
from aliquot.zoo import build_layers, configure


def _data_parallel_s(case):
    """The step time of `DataParallel()`, as a user asks for it."""
    settings = {"num_layers": case.num_layers, "seq_len": case.seq_len}
    step = build_layers(case.model, case.global_batch, overrides=settings)
    cluster = aq.Cluster.preset(f"{case.num_devices}xA100-PCIe")
    asked = (step.train_step, step.state, step.batch)
    plan = aq.plan(*asked, cluster=cluster, method=aq.DataParallel(), num_micro_batches=1)
    return plan.prediction.step_time_s


def _searched_s(case):
    step, _ = cfp_step(case, aq.Cluster.preset(f"{case.num_devices}xA100-PCIe"))
    limit_bytes = step.problem.memory_limit_bytes
    return ILP().solve(step.problem, step.space, memory_limit_bytes=limit_bytes).step_time_s


def test_cases_are_planned_drawn_and_not_planned_again(monkeypatch, tmp_path):
    case = CfpCase("GPT", "gpt-10m", 1, 4, 2, 16, published_s=1.0)
    monkeypatch.setattr(_cfp, "CFP_CASES", (case,))
    found = run("bench", "cfp", "--only", "gpt", "--out", tmp_path, "--json")
    assert found.exit_code == 0, found.output
    (row,) = json.loads(found.stdout)["rows"]
    assert row["num_programs"] > 0 and row["flops_per_s"] > 0
    assert row["step_time_s"] <= row["data_parallel_s"] * (1 + 1e-9)
    assert row["data_parallel_s"] == pytest.approx(_data_parallel_s(case))
    # What Alpa's rule chooses is priced by the judge of all, which no other splits please more than
    # those of its own search.
    assert row["alpa_s"] >= _searched_s(case) * (1 - 2e-3)
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert "rows.png" in (tmp_path / "index.html").read_text()
    heads, line = (tmp_path / "rows.tsv").read_text().splitlines()
    cells = dict(zip(heads.split("\t"), line.split("\t"), strict=True))
    assert cells["Published (s)"] == "1.0"
    assert float(cells["Predicted (s)"]) == row["step_time_s"]
    monkeypatch.setattr(_cfp, "predicted_blocks", lambda case, cluster: pytest.fail("again"))
    again = run("bench", "cfp", "--out", tmp_path, "--json")
    assert json.loads(again.stdout)["rows"] == [row]
    refused(run("bench", "cfp", "--only", "resnet"), "--only resnet", "there are GPT")
    refused(run("bench", "cfp", "--case", "2"), "--case 2: there are cases 1 to 1")


@pytest.mark.slow
@pytest.mark.parametrize("launch", [(), ("--launch", "local:2", "--num-devices-per-host", "4")])
def test_a_small_case_runs_in_processes_of_its_own(launch, tmp_path):
    command = [sys.executable, "-m", "aliquot", "bench", "cfp", "--case", "10", "--small", *launch]
    found = subprocess.run([*command, "--out", str(tmp_path), "--json"], capture_output=True)
    (row,) = json.loads(found.stdout)["rows"]
    assert row["small_measured_s"] > 0 and row["small_data_parallel_s"] > 0, row


@pytest.mark.slow
def test_a_case_without_its_devices_is_a_row_with_the_reason(tmp_path):
    command = [sys.executable, "-m", "aliquot", "bench", "cfp", "--case", "10", "--small"]
    command += ["--launch", "local:2", "--num-devices-per-host", "2", "--json"]
    found = subprocess.run(command, capture_output=True)
    (row,) = json.loads(found.stdout)["rows"]
    assert row["outcome"] == "failed" and "together have 4 devices" in row["reason"]
    assert row["step_time_s"] > 0


def test_cases_run_in_several_processes_only_if_they_run():
    refused(run("bench", "cfp", "--launch", "local:2"), "--launch local:2", "Add --small")
    refused(run("bench", "cfp", "--small", "--launch", "loal:2"), "did you mean 'local:2'?")


def test_the_models_of_the_paper_have_its_operations():
    """Exactly for GPT, and within 1% for MoE, whose gate and dispatch it counts otherwise."""
    for case in CFP_CASES:
        if case.published_flops:
            cluster = aq.Cluster.preset(f"{case.num_devices}xA100-PCIe")
            step, flops = cfp_step(case, cluster)
            error = abs(flops / case.published_flops - 1)
            assert error < (0.01 if case.title == "MoE" else 1e-4), (case, flops)
            assert all(kind.blocks for kind in step.kinds[1:])


def test_every_case_of_the_paper_is_a_model_of_the_zoo():
    for case in CFP_CASES:
        configure(case.model, num_layers=case.num_layers, seq_len=case.seq_len)
