"""Plan files: what is written is read again, and whatever is no plan is refused with all that is
wrong.
"""

import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import PREDICTION, PROVENANCE, STAGE, sample_pipeline, sample_plan

from aliquot.core import InputError, PlanFileError
from aliquot.plans import ArrayInterface, MemoryCurve, Plan

GOLDEN = Path(__file__).with_name("golden_plan.json")
GOLDEN_FILES = {
    GOLDEN: sample_plan(),
    Path(__file__).with_name("golden_pipeline.json"): sample_pipeline(2),
}
times = st.floats(0, 1e6, allow_subnormal=False)
names = st.text(max_size=12)


@st.composite
def plans(draw):
    compute, communication, gradient = draw(times), draw(times), draw(times)
    parts = draw(st.dictionaries(names, st.floats(0, 1e12), max_size=4))
    prediction = msgspec.structs.replace(
        PREDICTION,
        compute_s=compute,
        communication_s=communication,
        gradient_s=gradient,
        hidden_s=0.0,
        step_time_s=compute + communication + gradient,
        memory_bytes=parts,
        peak_memory_bytes=sum(parts.values(), 0.0),
        peak_moment=draw(names),
    )
    return sample_plan(
        method=draw(names),
        num_micro_batches=draw(st.sampled_from([1, 2, 4, 8])),
        notes=tuple(draw(st.lists(names, max_size=3))),
        interface_fingerprint=draw(names),
        prediction=prediction,
    )


@given(plans())
def test_round_trip(plan):
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    untimed = msgspec.structs.replace(plan.provenance, search_s=0.0, trace_s=0.0)
    assert again.provenance == untimed
    assert again.to_json() == text


def test_how_long_the_search_took_is_not_in_the_file():
    slower = sample_plan(provenance=msgspec.structs.replace(PROVENANCE, search_s=9.0, trace_s=8.0))
    assert slower.to_json() == sample_plan().to_json()


def test_a_layer_is_a_line():
    """A diff of two files shows the arrays of a layer once, not each dim of each array."""
    paths = [f"state.layers[{k}].{name}" for k in range(4) for name in ("up.w", "down.w", "norm")]
    arrays = tuple(
        ArrayInterface(path=path, shape=(64, 32), dtype="float32", role="parameter")
        for path in paths
    )
    stage = msgspec.structs.replace(STAGE, shardings=dict.fromkeys(paths, (("x",), ())))
    text = sample_plan(inputs=arrays, stages=(stage,)).to_json()
    lines = text.splitlines()
    of_layer = [line for line in lines if "state.layers[2]." in line]
    assert len(of_layer) == 2 and all(line.count("layers[2]") == 3 for line in of_layer)
    # An array of numbers is one line, however long.
    curve = MemoryCurve(phases=("forward",) * 90, parts={"parameters": (3000.0,) * 90})
    over_time = msgspec.structs.replace(PREDICTION, memory_over_time=curve)
    more = sample_plan(inputs=arrays, stages=(stage,), prediction=over_time).to_json()
    assert len(more.splitlines()) <= len(lines) + 6
    assert Plan.from_json(more).prediction.memory_over_time == curve


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_golden_file_still_loads(path):
    assert Plan.load(path) == GOLDEN_FILES[path]


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", [1, 2])
def test_files_of_earlier_versions_still_load(path, version):
    assert Plan.load(path.with_stem(f"{path.stem}_{version}")) == GOLDEN_FILES[path]


def test_version_2_said_only_whether_a_stage_recomputes():
    data = json.loads(Path(__file__).with_name("golden_pipeline_2.json").read_text())
    data["stages"][0]["recompute"] = True
    assert [stage.recompute for stage in Plan.from_json(json.dumps(data)).stages] == [
        "stage",
        "none",
    ]
    data["stages"][0]["recompute"] = "often"
    with pytest.raises(PlanFileError, match="stage 0 recomputes 'often'"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_golden_file_is_what_is_written_today(path):
    assert GOLDEN_FILES[path].to_json() == path.read_text()


def test_files_from_before_there_were_measurements_still_load():
    data = json.loads(sample_plan().to_json())
    for name in ("measured_share", "measured_compute_share", "measured_error"):
        del data["prediction"][name]
    del data["provenance"]["profiles"]
    assert Plan.from_json(json.dumps(data)) == sample_plan()


def test_files_from_before_there_were_pipelines_still_load():
    data = json.loads(sample_plan().to_json())
    for name in ("num_submeshes", "layers", "scan_bounds"):
        del data[name]
    for name in ("first_device", "first_layer", "layer_names", "recompute", "prediction"):
        del data["stages"][0][name]
    del data["prediction"]["bubble_s"]
    assert Plan.from_json(json.dumps(data)) == sample_plan()


def test_provenance_is_not_compared():
    slower = msgspec.structs.replace(PROVENANCE, search_s=99.0)
    assert sample_plan(provenance=slower) == sample_plan()
    assert sample_plan(method="dp") != sample_plan()


def test_save_and_load(tmp_path):
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    assert Plan.load(path) == sample_plan()
    assert os.listdir(tmp_path) == ["plan.json"]
    assert max(map(len, path.read_text().splitlines())) < 250


def test_infinite_numbers_are_refused():
    with pytest.raises(InputError, match=r"plan\.prediction\.compute_s must be finite"):
        sample_plan(
            prediction=msgspec.structs.replace(PREDICTION, compute_s=float("inf"))
        ).to_json()


def test_a_candidate_that_did_not_fit_is_written_without_a_time():
    provenance = msgspec.structs.replace(
        PROVENANCE, candidates=({"method": "dp", "step_time_s": float("inf")},)
    )
    plan = Plan.from_json(sample_plan(provenance=provenance).to_json())
    assert plan.provenance.candidates[0]["step_time_s"] is None


def _edited(**changes):
    return json.dumps({**json.loads(GOLDEN.read_text()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        (GOLDEN.read_text()[:300], r"ends in the middle, at line \d+, column \d+; it was cut off"),
        ('{\n  "version": one\n}', "invalid character at line 2, column 14"),
        ("[1, 2]", "no plan: it has no `version`"),
        ("{}", "no plan: it has no `version`"),
        (_edited(version=4), "has version 4, and this aliquot reads 1, 2, 3. Update it"),
        (_edited(version=0), "has version 0, which is no version; this aliquot reads 1"),
        (_edited(version="1"), "has version '1', which is no version"),
        (_edited(colour="red"), "`plan.colour`: there is no such field"),
        (_edited(method=3), "`plan.method`: expected `str`, got `int`"),
        (_edited(stages=[{}]), "`plan.stages[0].mesh_shape`: is missing"),
        (_edited(stages=5), "`plan.stages`: expected `array`, got `int`"),
        (_edited(prediction=[]), "`plan.prediction`: expected an object"),
        (
            _edited(inputs=[{"path": "a", "shape": [1, "b"], "dtype": "f"}]),
            "`plan.inputs[0].shape[1]`: expected `int`",
        ),
        (_edited(num_micro_batches=0), "num_micro_batches is 0"),
        (_edited(stages=[]), "the plan has no stages"),
        (_edited(cluster={}), "cluster: "),
    ],
)
def test_files_that_are_no_plans_are_refused(text, message):
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(text)
    plain = message.replace("\\", "")
    found = str(caught.value)
    assert plain in found or re.search(message, found), found
    assert caught.value.exit_code == 2


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(_edited(method=3, schedule=4, colour="red"))
    assert "3 problems" in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(PlanFileError, match=r"no\.json' cannot be read: No such file"):
        Plan.load(tmp_path / "no.json")


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFileError, match="is not text"):
        Plan.load(path)


def test_equality_and_inequality_of_plans_agree():
    plan = sample_plan()
    same = Plan.from_json(plan.to_json())
    assert same == plan and not same != plan


def test_the_repr_of_a_plan_is_one_line():
    assert repr(sample_plan()).startswith("<Plan of ") and len(repr(sample_pipeline())) < 200
