"""Fitting of the cost model to measured steps: what is found again, what is kept, what is
refused.
"""

import json

import pytest

from aliquot import InputError
from aliquot._fit_steps import MeasuredStep, _planned, at_share, fit_steps, read_steps
from aliquot.cluster import Cluster, target_for

CLUSTER = Cluster.preset("8xH100")
SIZES = {"num_layers": 1, "hidden_size": 1024, "num_heads": 8, "seq_len": 512, "vocab_size": 4096}
BATCHES = (64, 96, 128, 192)


def step(global_batch, step_s=1.0, **fields):
    return MeasuredStep(
        model="gpt-125m",
        global_batch=global_batch,
        step_s=step_s,
        overrides=SIZES,
        scan=True,
        **fields,
    )


@pytest.fixture(scope="module")
def truth():
    """Steps that take what a device with another sustained share would take."""
    tables = [_planned(step(batch), CLUSTER) for batch in BATCHES]
    return [
        step(batch, float(at_share(table, 0.5)[4]))
        for batch, table in zip(BATCHES, tables, strict=True)
    ]


def test_the_figures_behind_measured_steps_are_found(truth):
    fit = fit_steps(truth, CLUSTER)
    assert fit.figures["sustained_share"]["value"] == pytest.approx(0.5, abs=0.02)
    (errors,) = fit.errors
    assert errors["after"] < 0.02 < errors["before"] and errors["sizes"] == 2
    assert target_for(fit.cluster.device).sustained_share == pytest.approx(0.5, abs=0.02)


def test_figures_on_which_the_steps_do_not_depend_stay():
    """One device sends nothing, so its steps say nothing about what collectives hide behind."""
    one = Cluster.preset("1xH100")
    tables = [_planned(step(batch), one) for batch in BATCHES]
    rows = [
        step(batch, float(at_share(table, 0.5)[0]))
        for batch, table in zip(BATCHES, tables, strict=True)
    ]
    figures = fit_steps(rows, one).figures
    assert figures["sustained_share"]["value"] == pytest.approx(0.5, abs=0.02)
    assert figures["overlap_fraction"]["value"] == target_for(one.device).overlap_fraction


def test_figures_that_predict_no_better_are_not_taken(truth):
    """The held-out steps contradict the others, so that the figures before are better."""
    before = target_for(CLUSTER.device).sustained_share
    table = _planned(step(BATCHES[1]), CLUSTER)
    as_before = float(at_share(table, before)[4])
    held = [step(BATCHES[1], as_before), step(BATCHES[1], as_before)]
    fit = fit_steps([truth[0], held[0], truth[2], held[1]], CLUSTER)
    assert fit.figures["sustained_share"]["value"] == before
    assert "no better" in fit.figures["sustained_share"]["source"]


def test_faults_of_all_rows_are_listed(tmp_path):
    file = tmp_path / "rows.json"
    rows = [
        {"model": "gpt-125m", "global_batch": 8, "step_s": 0.1},
        {"model": "gpt-125m", "global_batch": 8, "step_s": -1},
        {"model": "gpt-125m", "batch": 8, "step_s": 1},
        7,
    ]
    file.write_text(json.dumps(rows))
    wanted = r"row 2\.step_s.*row 3\.batch.*row 3\.global_batch`: is missing.*row 4"
    with pytest.raises(InputError, match=wanted):
        read_steps(file)
    file.write_text(json.dumps(rows[:1]))
    assert [s.global_batch for s in read_steps(file)] == [8]


@pytest.mark.parametrize("text", ["", "{}", "[]", "[" * 50_000, "nonsense"])
def test_files_without_steps_are_refused(tmp_path, text):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"rows\.json"):
        read_steps(file)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"micro_batches": 3}, "3 micro-batches do not divide its batch of 64"),
        ({"method": "pipeshard"}, "pipeshard makes pipelines"),
        ({"method": "megatron:dp4,pp2"}, "makes a pipeline"),
        ({"method": "zero4"}, "Unknown method"),
    ],
)
def test_steps_that_cannot_be_fitted_are_named(fields, why):
    with pytest.raises(InputError, match=rf"row 1 \(gpt-125m\): .*{why}"):
        fit_steps([step(64, **fields)] * 4, CLUSTER)


def test_too_few_steps_and_other_devices_are_refused():
    with pytest.raises(InputError, match="at least 4 are needed"):
        fit_steps([step(8)], CLUSTER)
    other = step(8, cluster="8xA100-80GB")
    with pytest.raises(InputError, match="row 1 .*ran on A100-80GB, and H100 is fitted"):
        fit_steps([other] * 4, CLUSTER)
