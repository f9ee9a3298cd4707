"""The launcher on a Ray cluster: two raylets on this machine, which are two hosts to Ray."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refused, run

import aliquot as aq
from aliquot.launching import RayHost, RayHosts, cluster_of
from aliquot.launching._ray import _require_equal_versions

HERE = Path(__file__).parent
PLAIN = str(HERE / "plain_worker.py")


def on_two_hosts(*cases, timeout_s=300):
    """What came of each launch."""
    done = subprocess.run(
        [sys.executable, str(HERE / "launch_worker.py"), json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "RAY_DEDUP_LOGS": "0"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_processes_are_placed_on_hosts_and_started_again():
    told, killed, many = on_two_hosts(
        {"engine": "ray", "command": [PLAIN, "tell"], "options": {"num_devices_per_host": 4}},
        {"engine": "ray", "command": [PLAIN, "fail", "SIGKILL"], "options": {"max_restarts": 1}},
        {"engine": "ray", "command": [PLAIN, "tell"], "options": {"num_hosts": 3}},
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


def host(ip="10.0.0.1", **has):
    counts = {"num_cpus": 16, "num_gpus": 0, "num_tpus": 0, "kind": "", **has}
    return RayHost(node=ip, ip=ip, memory_bytes=2**30, **counts)


def hosts_of(*hosts):
    return RayHosts(address="10.0.0.1:6379", hosts=hosts)


def test_the_cluster_of_hosts_is_that_of_their_devices():
    gpus = [host(ip, num_gpus=8, kind="H100") for ip in ("10.0.0.1", "10.0.0.2")]
    assert cluster_of(hosts_of(*gpus)) == aq.Cluster.preset("2x8xH100")
    assert cluster_of(hosts_of(host("10.0.0.9"), *gpus), 4) == aq.Cluster.preset("2x4xH100")
    assert cluster_of(hosts_of(host(), host("10.0.0.2")), 4) == aq.Cluster.preset("2x4xcpu")


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([host(num_cpus=0)], "no host has a GPU or a CPU"),
        ([host(num_tpus=4, kind="TPU-V4")], "--cluster v5e-16"),
        ([host(num_gpus=8, kind="A100")], "Ray calls its devices 'A100'"),
        (
            [host(num_gpus=8, kind="H100"), host("10.0.0.2", num_gpus=4, kind="H100")],
            "10.0.0.1 has 8 H100s and 16 CPUs; 10.0.0.2 has 4 H100s and 16 CPUs",
        ),
        ([host(num_gpus=2, kind="H100")], "2 H100s and 16 CPUs, and 4 devices"),
    ],
)
def test_hosts_that_are_no_cluster_are_refused(hosts, message):
    with pytest.raises(aq.ClusterError) as caught:
        cluster_of(hosts_of(*hosts), 4 if "4 devices" in message else None)
    assert message in str(caught.value)


def test_the_command_line_shows_a_ray_cluster(monkeypatch):
    found = hosts_of(host(), host("10.0.0.2"))
    monkeypatch.setattr("aliquot.launching._ray.find_hosts", lambda address: found)
    shown = run("cluster", "ray", "--num-devices-per-host", 4)
    assert shown.stdout.startswith("2x4xcpu: 2 hosts x 4 devices = 8 x cpu")
    assert "host 10.0.0.2" in shown.stdout and "16 CPUs" in shown.stdout
    data = json.loads(run("cluster", "ray", "--json").stdout)
    assert data["num_devices"] == 2 and data["ray"]["hosts"][1]["ip"] == "10.0.0.2"
    refused(run("cluster", "8xH100", "--address", "10.0.0.1:6379"), "Type: aliquot cluster ray")
