"""`aliquot report`: what a report of a fault needs, without a person's name and folders."""

import json
from pathlib import Path

import pytest
from command_line import refused, run
from sample_plans import sample_plan

import aliquot
from aliquot.cli import _report


def test_versions_devices_and_the_plan(tmp_path):
    sample_plan().save(tmp_path / "plan.json")
    found = run("report", "--plan", tmp_path / "plan.json")
    assert found.exit_code == 0, found.stderr
    for part in (aliquot.__version__, "8 x cpu", "jax ", "gpt-10m on 8xH100", "all-reduce"):
        assert part in found.stdout
    answer = json.loads(run("report", "--json").stdout)
    assert answer["plan"] is None and answer["versions"]["aliquot"] == aliquot.__version__


@pytest.mark.parametrize("user", ["ada.lovelace", "root"])
def test_folders_and_the_users_name_are_left_out(tmp_path, monkeypatch, user):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", lambda: Path("/people/ada.lovelace"))
    monkeypatch.setattr(_report.getpass, "getuser", lambda: user)
    said = _report.redacted(f"{tmp_path}/plan.json of ada.lovelace in /people/ada.lovelace/runs")
    assert "/people/ada" not in said and str(tmp_path) not in said and "./plan.json" in said
    assert ("ada.lovelace" in said) == (user == "root")


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    refused(run("report", "--plan", tmp_path / "plan.json"), "no `version`")
