"""Clusters from names, files, dictionaries and devices; everything wrong is said at once."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from aliquot.cluster import DEVICES, Cluster, Link, LogicalMesh, parse_toml
from aliquot.core import ClusterError


@pytest.mark.parametrize(
    ("spec", "device", "hosts", "per_host", "inter_bytes_per_s"),
    [
        ("8xH100", "H100", 1, 8, 400e9),
        ("4x8xA100-80GB", "A100-80GB", 4, 8, 50e9),
        ("8x8xV100-16GB", "V100-16GB", 8, 8, 3.125e9),
        ("8xv100-32gb", "V100-32GB", 1, 8, 12.5e9),
        ("H200", "H200", 1, 1, 400e9),
        ("v5e-16", "v5e", 4, 4, 360e9),
        ("v5e-8", "v5e", 1, 8, 720e9),
        ("v5p-64", "v5p", 8, 4, 720e9),
        ("v4-8", "v4", 1, 4, 360e9),
        ("2x4xv6e", "v6e", 2, 4, 720e9),
        ("8xB300", "B300", 1, 8, 800e9),
        ("72xGB200", "GB200", 1, 72, 3600e9),
        ("2x72xGB300", "GB300", 2, 72, 7200e9),
        ("18x4xGB200", "GB200", 18, 4, 200e9),
        ("2x8xMI300X", "MI300X", 2, 8, 400e9),
        ("4x16xtrn1", "trn1", 4, 16, 100e9),
        ("16xTrn2", "trn2", 1, 16, 400e9),
        ("8xcpu", "cpu", 1, 8, 1.25e9),
    ],
)
def test_presets(spec, device, hosts, per_host, inter_bytes_per_s):
    cluster = Cluster.preset(spec)
    assert (cluster.name, cluster.device, cluster.topology != "") == (spec, DEVICES[device], True)
    assert (cluster.num_hosts, cluster.devices_per_host, cluster.num_devices) == (
        hosts,
        per_host,
        hosts * per_host,
    )
    assert cluster.inter.bandwidth_bytes_per_s == inter_bytes_per_s
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert spec in cluster.describe()


@pytest.mark.parametrize(
    ("spec", "taken_as"),
    [
        ("64xH100", "8x8xH100"),
        ("512xh100", "64x8xH100"),
        ("32xA100-40GB", "2x16xA100-40GB"),
        ("16xA100-40GB", "16xA100-40GB"),
        ("1x64xH100", "1x64xH100"),
        ("72xGB200", "72xGB200"),
        ("144xGB200", "2x72xGB200"),
        ("256xGB300", "4x64xGB300"),
        ("64xtrn2", "4x16xtrn2"),
        ("64xcpu", "64xcpu"),
    ],
)
def test_more_devices_than_a_host_has_are_several_hosts(spec, taken_as):
    cluster = Cluster.preset(spec)
    assert cluster == Cluster.preset(taken_as) and cluster.name == taken_as


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("8xH10", "did you mean 'H100'"),
        ("72xGB20", "did you mean 'GB200'"),
        ("8xMI300", "did you mean 'MI300X'"),
        ("74xGB200", "at most 72 GB200, and 74 do not fill hosts of 72"),
        ("8xA100", "did you mean 'A100-40GB', 'A100-PCIe' or 'A100-80GB'"),
        ("0xH100", "devices must be at least 1"),
        ("0x8xA110", "hosts must be at least 1"),
        ("v3-256", r"lists all\.\s+Write hosts .* TOML file: docs/clusters.md"),
        ("12xH100", "at most 8 H100, and 12 do not fill hosts of 8"),
        ("v5e-0", "empty"),
        ("v5p-7", "two to a chip"),
        ("v5e-18", "do not fill hosts"),
        ("v6e-7", "no slice of one host has 7 chips.*\n?.*Write v6e-4 or v6e-8"),
        ("", "no preset"),
        ("-1xH100", "no preset"),
        ("2x2x2xH100", "no preset"),
    ],
)
def test_bad_presets(spec, message):
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.preset(spec)
    assert repr(spec) in str(caught.value)


def test_a_domain_of_nvlink_is_one_host_whose_network_grows_with_it():
    rack, trays = Cluster.preset("72xGB200"), Cluster.preset("2x36xGB200")
    assert rack.intra == trays.intra and rack.inter.latency_s == trays.inter.latency_s
    assert rack.inter.bandwidth_bytes_per_s == 2 * trays.inter.bandwidth_bytes_per_s
    link = LogicalMesh(shape=(2, 72), cluster=Cluster.preset("144xGB200")).link(("y",))
    assert not link.crosses_hosts and link.bandwidth_bytes_per_s == 900e9


def test_links_between_each_two_form_three_rings_both_ways():
    link = LogicalMesh(shape=(8,), cluster=Cluster.preset("8xMI300X")).link(("x",))
    assert link.bandwidth_bytes_per_s == 2 * 3 * 64e9


def test_another_network():
    preset = Cluster.preset("4x8xA100-80GB")
    selene = preset.with_network(1600)
    assert selene.inter == Link(latency_s=preset.inter.latency_s, bandwidth_bytes_per_s=200e9)
    assert (selene.intra, selene.device, selene.name) == (preset.intra, preset.device, preset.name)
    # The preset's note names another network.
    assert "400 Gbps" not in selene.describe() and "1600 Gbps" in selene.describe()
    assert Cluster.from_dict(selene.to_dict()) == selene


@pytest.mark.parametrize("gbps", [0, -1600, float("nan"), float("inf"), 1e9])
def test_networks_that_cannot_be(gbps):
    with pytest.raises(ClusterError, match=rf"(?s)not {gbps}.*such as 1600"):
        Cluster.preset("4x8xA100-80GB").with_network(gbps)


def test_chips_that_join_their_hosts_have_no_network():
    with pytest.raises(ClusterError, match=r"(?s)ICI.*\[inter\]"):
        Cluster.preset("v5e-16").with_network(1600)


def test_a_file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('[cluster]\ndevice = "H100"\nhosts = 2\ndevices_per_host = 8\n')
    cluster = Cluster.load(path)
    assert (cluster.num_devices, cluster.name) == (16, "H100")
    assert cluster.inter == Cluster.preset("2x8xH100").inter


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[cluster", "not TOML"),
        (b"\xff\xfe", "UTF-8"),
        (None, "No such file"),
        (b"", "`cluster.devices_per_host`: is missing"),
    ],
)
def test_unusable_files(tmp_path, content, message):
    path = tmp_path / "cluster.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.load(path)
    assert "cluster.toml" in str(caught.value)


def test_toml_reports_everything():
    text = """
    speed = 3
    [cluster]
    name = 7
    device = "H10O"
    hosts = 0
    devices_per_host = true
    colour = "red"
    [intra]
    latency = "10 apples"
    bandwidth = "0GB/s"
    [inter]
    latency = "1us"
    bandwidth = "-25Gbps"
    """
    with pytest.raises(ClusterError) as caught:
        parse_toml(text)
    message = str(caught.value)
    for part in (
        "`speed`: there is no such field",
        "`cluster.name`: expected `str`, got `int`",
        "did you mean 'H100'",
        "`cluster.hosts`: expected `int` >= 1, got 0",
        "`cluster.devices_per_host`: expected `int`, got `bool`",
        "`cluster.colour`: there is no such field",
        "`intra.latency`: '10 apples' is not a time",
        "`intra.bandwidth`: expected `float` >= 1.0, got '0GB/s'",
        "`inter.bandwidth`: '-25Gbps'",
    ):
        assert part in message


def test_toml_says_what_a_figure_without_a_unit_lacks():
    text = """
    [cluster]
    devices_per_host = 2
    [device]
    name = "card"
    kind = "fpga"
    memory = "48"
    memory_bandwidth = "864GB/s"
    peak = { float32 = 91 }
    [intra]
    latency = "6us"
    bandwidth = "32GB/s"
    """
    with pytest.raises(ClusterError) as caught:
        parse_toml(text)
    message = str(caught.value)
    assert "`device.kind`: there is no 'fpga': Known: gpu, tpu, neuron, cpu." in message
    assert "`device.memory`: expected `int` >= 1048576, got '48': write its unit" in message
    assert "got 91: write its unit, such as 91TFLOP/s" in message


def test_toml_zero_bandwidth_names_its_link():
    text = (
        '[cluster]\ndevice = "H100"\ndevices_per_host = 8\n[intra]\nlatency = "1us"\nbandwidth ='
        ' "0GB/s"\n'
    )
    with pytest.raises(ClusterError, match=r"`intra.bandwidth`: expected `float` >= 1.0, got"):
        parse_toml(text)


OWN = """
[cluster]
name = "box"
hosts = {hosts}
devices_per_host = 2
[device]
name = "card"
kind = "gpu"
memory = "48GB"
memory_bandwidth = "864GB/s"
peak = {{ {peak} = "91TFLOP/s" }}
"""


def test_a_device_of_ones_own_needs_its_links():
    with pytest.raises(ClusterError) as caught:
        parse_toml(OWN.format(hosts=2, peak="float32"))
    assert ["[intra]" in caught.value.violations[0], "[inter]" in caught.value.violations[1]] == [
        True,
        True,
    ]


def test_a_device_of_ones_own_is_checked():
    with pytest.raises(ClusterError, match="`device.peak.float32`: is missing") as caught:
        parse_toml(OWN.format(hosts=1, peak="bfloat16"))
    assert any("[intra]" in violation for violation in caught.value.violations)


def test_device_named_twice_or_never():
    with pytest.raises(ClusterError, match="keep one"):
        parse_toml(OWN.format(hosts=1, peak="float32").replace('name = "box"', 'device = "H100"'))
    with pytest.raises(ClusterError, match=r"no \[device\] table"):
        parse_toml("[cluster]\ndevices_per_host = 1\n")


@pytest.mark.parametrize(
    "text", ["cluster = 3", "[cluster]\ndevice = 4\ndevices_per_host = 1", "intra = 'fast'"]
)
def test_tables_of_the_wrong_shape(text):
    with pytest.raises(ClusterError):
        parse_toml(text)


def test_dictionaries_report_everything():
    data = Cluster.preset("8xH100").to_dict()
    data["num_hosts"] = -1
    data["intra"] = {"latency_s": -1.0, "bandwidth_bytes_per_s": 0}
    data["device"]["memory_bytes"] = "much"
    data["device"]["peak_flops_per_s"] = None
    data["color"] = 1
    del data["inter"]
    with pytest.raises(ClusterError) as caught:
        Cluster.from_dict(data)
    assert len(caught.value.violations) == 7


@pytest.mark.parametrize("data", [None, [], {}, {"device": 3, "intra": None}])
def test_dictionaries_of_the_wrong_shape(data):
    with pytest.raises(ClusterError):
        Cluster.from_dict(data)


def test_values_refuse_nonsense():
    with pytest.raises(ClusterError) as caught:
        Link(latency_s=float("nan"), bandwidth_bytes_per_s=float("inf"))
    assert len(caught.value.violations) == 2
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1.0)
    with pytest.raises(ClusterError) as caught:
        Cluster(
            name="a",
            device=DEVICES["cpu"],
            num_hosts=0,
            devices_per_host=-1,
            intra=link,
            inter=link,
        )
    assert len(caught.value.violations) == 2


def fakes(kind, platform, hosts, per_host, **attributes):
    return [
        SimpleNamespace(device_kind=kind, platform=platform, process_index=host, **attributes)
        for host in range(hosts)
        for _ in range(per_host)
    ]


@pytest.mark.parametrize(
    ("kind", "platform", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "gpu", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "gpu", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "gpu", "A100-PCIe"),
        ("Tesla V100-SXM2-16GB", "gpu", "V100-16GB"),
        ("NVIDIA H100 80GB HBM3", "gpu", "H100"),
        ("NVIDIA H200", "gpu", "H200"),
        ("NVIDIA B200", "gpu", "B200"),
        ("NVIDIA GB200", "gpu", "GB200"),
        ("NVIDIA GB300", "gpu", "GB300"),
        ("NVIDIA B300 SXM6 AC", "gpu", "B300"),
        ("AMD Instinct MI300X", "gpu", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "gpu", "RTX-4090"),
        ("NVIDIA L4", "gpu", "L4"),
        ("TPU v4", "tpu", "v4"),
        ("TPU v5 lite", "tpu", "v5e"),
        ("TPU v5", "tpu", "v5p"),
        ("TPU v6 lite", "tpu", "v6e"),
    ],
)
def test_detect_knows_what_backends_call_them(kind, platform, name):
    cluster = Cluster.detect(fakes(kind, platform, 2, 4))
    assert (cluster.name, cluster.device) == (f"2x4x{name}", DEVICES[name])
    assert cluster.inter == Cluster.preset(f"2x4x{name}").inter


@pytest.mark.parametrize(
    "kind", ["NVIDIA H100 PCIe", "NVIDIA L40S", "NVIDIA GeForce RTX 4090 Laptop GPU", "TPU v9"]
)
def test_detect_does_not_guess(kind):
    with pytest.raises(ClusterError, match="TOML"):
        Cluster.detect(fakes(kind, "gpu", 1, 1))


def test_detect_joins_processes_of_one_gpu_each():
    devices = [
        SimpleNamespace(
            device_kind="NVIDIA H200", platform="gpu", process_index=i, slice_index=i // 4
        )
        for i in range(8)
    ]
    assert Cluster.detect(devices).name == "2x4xH200"


def test_detect_wants_equal_hosts_and_kinds():
    mixed = fakes("TPU v4", "tpu", 1, 4) + fakes("TPU v5", "tpu", 2, 2)
    with pytest.raises(ClusterError) as caught:
        Cluster.detect(mixed)
    assert len(caught.value.violations) == 2
    with pytest.raises(ClusterError, match="no devices"):
        Cluster.detect([])


def test_detect_this_machine():
    import jax

    cluster = Cluster.detect(jax.devices("cpu"))
    assert cluster.num_devices == len(jax.devices("cpu"))
    assert cluster.device.kind == "cpu" and cluster.device.memory_bytes > 2**20
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_describing_a_cluster_needs_no_jax():
    code = (
        "import sys; from aliquot.cluster import Cluster, LogicalMesh, target_for;"
        "c = Cluster.preset('4x8xH100'); c.describe(); target_for(c.device);"
        "LogicalMesh(shape=(4, 8), cluster=c).link(('x',)); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
