"""Hosts wired pair by pair, against rings found by hand in the drawing of a hybrid cube mesh."""

import pytest

from aliquot.cluster import Cluster, LogicalMesh, parse_toml
from aliquot.core import ClusterError

HOST = Cluster.preset("8xV100-16GB")


@pytest.mark.parametrize(
    ("shape", "axes", "ring_links", "all_to_all_links"),
    [
        ((8,), "x", 6, 7 * 0.5),  # three tours both ways; 0 and 5 are not neighbours
        ((4, 2), "y", 1, 1),  # 0 and 1 share one link
        ((4, 2), "x", 2, 3 * 0.5),  # 0 2 6 4: one tour, 0 and 6 are not neighbours
        ((2, 4), "y", 4, 3),
        ((2, 4), "x", 1, 1),  # 0 and 4 share two links, 2 and 6 one: the slowest counts
        ((2, 2, 2), "xz", 2, 3 * 0.5),  # 0 1 5 4
        ((8, 1), "y", 6, 6),
    ],
)
def test_a_group_uses_the_rings_among_its_own_links(shape, axes, ring_links, all_to_all_links):
    link = LogicalMesh(shape=shape, cluster=HOST).link(tuple(axes))
    assert link.bandwidth_bytes_per_s == pytest.approx(ring_links * 25e9)
    assert link.all_to_all_bandwidth_bytes_per_s == pytest.approx(all_to_all_links * 25e9)


def test_every_device_has_six_links_and_smaller_hosts_keep_their_own():
    assert [sum(row) for row in HOST.wires] == [150e9] * 8
    assert Cluster.preset("4xV100-16GB").wires == tuple(row[:4] for row in HOST.wires[:4])
    assert (
        LogicalMesh(shape=(4,), cluster=Cluster.preset("4xV100-16GB"))
        .link(("x",))
        .bandwidth_bytes_per_s
        == 100e9
    )
    # Sixteen V100s in a host are joined by switches.
    assert Cluster.preset("16xV100-32GB").wires == Cluster.preset("1xV100-16GB").wires == ()


def test_between_hosts_the_network_is_slower_than_any_ring():
    cluster = Cluster.preset("2x8xV100-16GB")
    mesh = LogicalMesh(shape=(2, 8), cluster=cluster)
    assert mesh.link(("x",)).bandwidth_bytes_per_s == pytest.approx(
        cluster.inter.bandwidth_bytes_per_s / 8
    )
    assert mesh.link(("y",)).bandwidth_bytes_per_s == 150e9


def test_wires_survive_a_plan_file_and_yield_to_links_of_ones_own():
    assert Cluster.from_dict(HOST.to_dict()) == HOST
    assert "wires" not in Cluster.preset("8xH100").to_dict()
    usual = '[cluster]\ndevice = "V100-16GB"\ndevices_per_host = 8\n'
    assert parse_toml(usual).wires == HOST.wires
    assert parse_toml(usual + '[intra]\nlatency = "2us"\nbandwidth = "150GB/s"\n').wires == ()


@pytest.mark.parametrize(
    ("wires", "words"),
    [
        ([[0.0, 1.0]], "2 rows of 2"),
        ([[0.0, 1.0], [2.0, 0.0]], "both ways"),
        ([[1.0, 1.0], [1.0, 0.0]], "itself"),
        ([[0.0, 0.0], [0.0, 0.0]], "no two devices"),
        ([[0.0, "fast"], [1.0, 0.0]], "expected `float`, got `str`"),
        (3, "`wires`: expected `array`, got `int`"),
    ],
)
def test_impossible_wires_are_refused(wires, words):
    data = {**Cluster.preset("2xV100-16GB").to_dict(), "wires": wires}
    with pytest.raises(ClusterError, match=words):
        Cluster.from_dict(data)


PAIRS = """
[cluster]
device = "A100-40GB"
devices_per_host = 4
[intra]
latency = "2us"
bandwidth = "300GB/s"
wires = {wires}
"""


def test_a_file_says_how_a_host_is_wired():
    wires = '[[0, "300GB/s", 0, 0], ["300GB/s", 0, 0, 0], [0, 0, 0, "2400Gbps"], [0, 0, 300e9, 0]]'
    cluster = parse_toml(PAIRS.format(wires=wires))
    assert [sum(row) for row in cluster.wires] == [300e9] * 4
    mesh = LogicalMesh(shape=(2, 2), cluster=cluster)
    # Partners have a link of their own; others pass through a third device or the host.
    assert mesh.link(("y",)).bandwidth_bytes_per_s == 300e9
    assert mesh.link(("x",)).bandwidth_bytes_per_s == 150e9
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize(
    ("wires", "words"),
    [
        ("[[0, 1], [1, 0]]", "4 rows of 4"),
        ("[[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [2, 1, 1, 0]]", "both ways"),
        ('[[0, "10 apples"]]', r"`intra.wires\[0\]\[1\]`: '10 apples' is not a bandwidth"),
        ('[[0, "-1GB/s"]]', r"`intra.wires\[0\]\[1\]`: '-1GB/s'"),
        ('"switch"', "`intra.wires`: expected `array`, got `str`"),
    ],
)
def test_impossible_wires_in_a_file_are_refused(wires, words):
    with pytest.raises(ClusterError, match=words) as caught:
        parse_toml(PAIRS.format(wires=wires), asked="cluster file 'box.toml'")
    assert "box.toml" in str(caught.value)


def test_wires_matter_only_inside_a_host():
    text = '[cluster]\ndevice = "H100"\nhosts = 2\ndevices_per_host = 2\n'
    network = '[inter]\nlatency = "9us"\nbandwidth = "1GB/s"\nwires = [[0, 1], [1, 0]]\n'
    with pytest.raises(ClusterError, match="`inter.wires`: there is no such field"):
        parse_toml(text + network)
