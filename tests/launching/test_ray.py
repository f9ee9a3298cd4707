"""The launcher on a Ray cluster: two raylets on this machine, which are two hosts to Ray."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import aliquot as aq
from aliquot.launching._ray import _require_equal_versions

HERE = Path(__file__).parent
PLAIN = str(HERE / "plain_worker.py")


def on_two_hosts(*cases, timeout_s=300):
    """What came of each launch."""
    done = subprocess.run(
        [sys.executable, str(HERE / "ray_worker.py"), json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "RAY_DEDUP_LOGS": "0"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_processes_are_placed_on_hosts_and_started_again():
    told, killed, many = on_two_hosts(
        {"command": [PLAIN, "tell"], "options": {"num_devices_per_host": 4}},
        {"command": [PLAIN, "fail", "SIGKILL"], "options": {"max_restarts": 1}},
        {"command": [PLAIN, "tell"], "options": {"num_hosts": 3}},
    )
    assert told["error"] == killed["error"] == ""
    words = sorted(line.split() for _, line in told["lines"])
    assert [each[:2] for each in words] == [["0", "1"], ["1", "1"]]
    assert words[0][2:] == words[1][2:] and words[0][3] == "2"
    (note,) = (text for _, text in told["notes"])
    assert note.startswith("Ray: 2 processes with 4 virtual CPU devices each, on ")
    (failure,) = killed["failures"]
    assert "process 1 of 2, on " in failure and "was killed by SIGKILL" in failure
    assert "  | about to fail" in failure and killed["num_processes"] == 2
    assert many["error"].startswith("InputError: 3 hosts with 1 CPU each were asked for")
    assert "has 2 of them:" in many["error"]
    assert "type: ray start --address=" in many["error"] and "--num-hosts 2" in many["error"]


def test_hosts_with_other_versions_are_refused():
    own = {"python": "3.11", "aliquot": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2"}
    others = {**own, "jax": "0.9.0", "aliquot": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aliquot.launching._host.Host.versions", lambda self: own)
        _require_equal_versions([("10.0.0.1", own)])
        with pytest.raises(aq.InputError) as caught:
            _require_equal_versions([("10.0.0.1", own), ("10.0.0.2", others)])
    said = str(caught.value)
    assert "10.0.0.2 has jax 0.9.0, this machine 0.10.2" in said
    assert "10.0.0.2 has no aliquot" in said and "10.0.0.1" not in said
    assert "pip install aliquot==0.1.0 jax==0.10.2 jaxlib==0.10.2" in said
