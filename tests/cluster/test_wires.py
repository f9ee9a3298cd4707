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
    assert LogicalMesh(shape=(4,), cluster=Cluster.preset("4xV100-16GB")).link(("x",)).bandwidth_bytes_per_s == 100e9
    # Sixteen V100s in a host are joined by switches.
    assert Cluster.preset("16xV100-32GB").wires == Cluster.preset("1xV100-16GB").wires == ()


def test_between_hosts_the_network_is_slower_than_any_ring():
    cluster = Cluster.preset("2x8xV100-16GB")
    mesh = LogicalMesh(shape=(2, 8), cluster=cluster)
    assert mesh.link(("x",)).bandwidth_bytes_per_s == pytest.approx(cluster.inter.bandwidth_bytes_per_s / 8)
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
        ([[0.0, "fast"], [1.0, 0.0]], "expected a number"),
        (3, "rows of numbers"),
    ],
)
def test_impossible_wires_are_refused(wires, words):
    data = {**Cluster.preset("2xV100-16GB").to_dict(), "wires": wires}
    with pytest.raises(ClusterError, match=words):
        Cluster.from_dict(data)
