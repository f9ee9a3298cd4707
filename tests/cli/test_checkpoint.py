"""`aliquot checkpoint show`."""

import json

import numpy as np
import pytest
from command_line import refused, run

import aliquot as aq


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two checkpoints, and one whose writing was broken off."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tree = {"layers": [{"w": np.zeros((4, 2), np.float32)} for _ in range(20)], "n": np.int32(3)}
    with aq.Checkpoints(folder) as checkpoints:
        checkpoints.save(None, tree, 100, meta={"text": "a [b]"})
        checkpoints.save(None, tree, 200, meta={"position": 7})
    (folder / "300.orbax-checkpoint-tmp").mkdir()
    return folder


def test_the_newest_is_shown(folder):
    shown = run("checkpoint", "show", folder).stdout
    assert f"2 checkpoints in {folder}" in shown
    assert "Arrays of checkpoint 200, the first 12 of 21" in shown and "layers[11].w" in shown
    assert "layers[12].w" not in shown and '{"position": 7}' in shown
    assert "300.orbax-checkpoint-tmp was not written to its end" in shown


def test_one_is_shown_in_full(folder):
    for named in ((folder, "--number", "100"), (folder / "100",)):
        shown = run("checkpoint", "show", *named, "--arrays").stdout
        assert "Arrays of checkpoint 100" in shown and "layers[19].w" in shown and "4 x 2" in shown
        assert '{"text": "a [b]"}' in shown


def test_those_of_a_run_are_shown(folder, tmp_path):
    (tmp_path / "checkpoints").symlink_to(folder)
    shown = run("checkpoint", "show", tmp_path).stdout
    assert f"2 checkpoints in {tmp_path / 'checkpoints'}" in shown


def test_as_json(folder):
    answer = json.loads(run("checkpoint", "show", folder, "--json").stdout)
    assert [row["number"] for row in answer["checkpoints"]] == [100, 200]
    assert answer["checkpoints"][0]["elements"] == 161
    assert answer["shown"]["arrays"][-1] == {"path": "n", "shape": [], "dtype": "int32"}
    assert answer["unfinished"] == ["300.orbax-checkpoint-tmp"]


def test_what_is_not_usable_is_said(folder, tmp_path):
    for number, text in ((1, "{"), (2, json.dumps({"format": 99}))):
        (tmp_path / str(number) / "meta").mkdir(parents=True)
        (tmp_path / str(number) / "meta" / "metadata").write_text(text)
    shown = run("checkpoint", "show", tmp_path).stdout
    assert "1 is not usable" in shown and "damaged record" in shown
    assert "2 is not usable" in shown and "format 99" in shown
    refused(run("checkpoint", "show", tmp_path, "--number", "2"), "format 99")


def test_what_is_not_there_is_refused(folder, tmp_path):
    refused(run("checkpoint", "show", folder, "--number", "5"), "no checkpoint 5", "100, 200")
    refused(run("checkpoint", "show", tmp_path / "none"), "there is no folder")
    assert "holds no complete checkpoint" in run("checkpoint", "show", tmp_path).stdout
