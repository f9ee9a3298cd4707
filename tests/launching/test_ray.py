"""The launcher on a Ray cluster: two raylets on this machine, which are two hosts to Ray."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
from command_line import refused, run

import aliquot as aq
from aliquot.core import with_xla_flags
from aliquot.launching import RayHost, RayHosts, cluster_of
from aliquot.launching._host import Host
from aliquot.launching._ray import RayCluster, _require_equal_versions

HERE = Path(__file__).parent
PLAIN = str(HERE / "plain_worker.py")


def on_two_hosts(*cases, timeout_s=300, settings=None):
    """What came of each launch."""
    done = subprocess.run(
        [sys.executable, str(HERE / "launch_worker.py"), json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), **(settings or {})},
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


def test_an_address_without_a_cluster_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "aliquot", "cluster", "ray", "--address", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no Ray cluster answers at 127.0.0.1:1: " in done.stderr
    assert "ray start --head --port=6379" in done.stderr


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
    assert "pip install jax==0.10.2 jaxlib==0.10.2, and in the folder of aliquot 0.1.0" in said


def test_a_host_tells_its_versions(monkeypatch):
    found = Host().versions()
    assert found == {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "aliquot": aq.__version__,
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
    }
    # One without the package, or with another one of that name.
    monkeypatch.delitem(sys.modules, "aliquot.core")
    for other in (None, types.ModuleType("aliquot")):
        monkeypatch.setitem(sys.modules, "aliquot", other)
        assert Host().versions()["aliquot"] == ""


def host(ip="10.0.0.1", **has):
    counts = {"num_cpus": 16, "num_gpus": 0, "num_tpus": 0, "kind": "", **has}
    return RayHost(node=ip, ip=ip, memory_bytes=2**30, **counts)


def hosts_of(*hosts):
    return RayHosts(address="10.0.0.1:6379", hosts=hosts)


def test_the_hosts_that_are_alive_are_known_by_what_ray_says_of_them():
    def node(ip, alive, **has):
        return {"NodeID": ip, "NodeManagerAddress": ip, "Alive": alive, "Resources": has}

    gpus = {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H100": 1.0, "memory": 2.0**30}
    nodes = [
        node("10.0.0.10", True, **gpus),
        node("10.0.0.9", True, CPU=16.0, memory=2.0**30),
        node("10.0.0.1", False, **gpus),
    ]
    cluster = object.__new__(RayCluster)
    cluster.ray = types.SimpleNamespace(nodes=lambda: nodes)
    assert cluster.hosts() == [host("10.0.0.9"), host("10.0.0.10", num_gpus=8, kind="H100")]


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


# Processes that start again find what was compiled before.
CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def trained(folder, method, steps=20, **launch):
    """The losses of a run by one process, or by a launch that is disturbed, and what came of it."""
    folder.mkdir()
    case = {"method": method, "steps": steps, "pause_s": 0.7 if launch else 0}
    cache = {**CACHE, "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache")}
    if launch:
        command = [str(HERE / "train_worker.py"), str(folder), json.dumps(case)]
        (found,) = on_two_hosts({"command": command, **launch}, timeout_s=1200, settings=cache)
    else:
        flags = with_xla_flags(
            os.environ["XLA_FLAGS"], {"--xla_force_host_platform_device_count": "8"}
        )
        subprocess.run(
            [sys.executable, str(HERE / "train_worker.py"), str(folder), json.dumps(case)],
            env={
                **os.environ,
                **cache,
                "PYTHONPATH": str(HERE.parents[1]),
                "XLA_FLAGS": flags,
            },
            check=True,
        )
        found = None
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "num_processes", "method"),
    [
        ({"engine": "local:2", "harms": [["SIGKILL", 8], ["SIGSTOP", 5]]}, 2, "pipeline"),
        (
            {"engine": "ray", "harms": [["SIGSTOP", 8], ["remove", 5], ["SIGKILL", 5]]},
            2,
            "pipeline",
        ),
        ({"engine": "ray", "hosts": 2, "harms": [["remove", 8]]}, 1, "zero3"),
    ],
    ids=["local", "ray", "fewer"],
)
def test_a_disturbed_run_has_the_losses_of_one_process(launch, num_processes, method, tmp_path):
    """Killed, stopped, its host removed: with another host in its place, or on fewer hosts."""
    options = {"max_restarts": len(launch["harms"]), "num_devices_per_host": 4}
    if launch["engine"] == "ray":
        options |= {"num_hosts": 2, "min_hosts": num_processes}
    (expected, _) = trained(tmp_path / "plain", method)
    found, came = trained(
        tmp_path / "disturbed", method, **{"hosts": 3, **launch, "options": options}
    )
    assert came["error"] == "" and came["num_processes"] == num_processes
    assert len(came["failures"]) == len(launch["harms"])
    assert {number for number, _ in found} == set(range(20))
    for number, loss in found:
        assert loss == pytest.approx(expected[number][1], rel=1e-12)
