"""Which links a collective sees, checked against groups counted by hand and by numpy."""

import math

import numpy as np
import pytest

from aliquot.cluster import Cluster, LogicalMesh, logical_mesh_shapes
from aliquot.core import ClusterError, InputError

CLUSTER = Cluster.preset("4x8xA100-80GB")
INTRA, INTER = 300e9, 50e9


@pytest.mark.parametrize(
    ("shape", "axes", "size", "ring", "all_to_all", "crosses"),
    [
        ((4, 8), ("y",), 8, INTRA, INTRA, False),
        (
            (4, 8),
            ("x",),
            4,
            INTER / 8,
            INTER / 8,
            True,
        ),  # 8 rings of one member per host share each network
        ((4, 8), ("x", "y"), 32, INTER, INTER / 8 * 31 / 24, True),
        ((32,), ("x",), 32, INTER, INTER / 8 * 31 / 24, True),
        ((8, 4), ("x",), 8, INTER / 4, INTER / 8 * 7 / 6, True),  # two members per host
        ((8, 4), ("y",), 4, INTRA, INTRA, False),
        ((2, 16), ("y",), 16, INTER, INTER / 8 * 15 / 8, True),
        ((2, 16), ("x",), 2, INTER / 8, INTER / 8, True),
        ((8, 4), (), 1, INTRA, INTRA, False),
        ((2, 2, 8), ("x", "z"), 16, INTER, INTER / 8 * 15 / 8, True),
    ],
)
def test_link(shape, axes, size, ring, all_to_all, crosses):
    link = LogicalMesh(shape=shape, cluster=CLUSTER).link(axes)
    assert (link.size, link.crosses_hosts) == (size, crosses)
    assert link.bandwidth_bytes_per_s == pytest.approx(ring)
    assert link.all_to_all_bandwidth_bytes_per_s == pytest.approx(all_to_all)


def test_latency_averages_hops():
    mesh = LogicalMesh(shape=(4, 8), cluster=CLUSTER)
    inter, intra = CLUSTER.inter.latency_s, CLUSTER.intra.latency_s
    assert mesh.link(("x",)).latency_s == inter
    assert mesh.link(("y",)).latency_s == intra
    assert mesh.link(("x", "y")).latency_s * 31 == pytest.approx(3 * inter + 28 * intra)
    assert mesh.link(()).latency_s == 0


@pytest.mark.parametrize("hosts_and_devices", [(2, 3), (3, 4), (2, 6), (4, 2)])
def test_uneven_groups_count_the_busiest_host(hosts_and_devices):
    hosts, per_host = hosts_and_devices
    cluster = Cluster.preset(f"{hosts}x{per_host}xA100-80GB")
    for shape in logical_mesh_shapes(cluster.num_devices, 3):
        mesh = LogicalMesh(shape=shape, cluster=cluster)
        host = (np.arange(cluster.num_devices) // per_host).reshape(shape)
        for position, axis in enumerate(mesh.axis_names):
            groups = np.moveaxis(host, position, -1).reshape(-1, shape[position])
            rings = [sum(len(set(g)) > 1 and h in g for g in groups) for h in range(hosts)]
            want = min(INTRA, INTER / max(rings)) if max(rings) else INTRA
            link = mesh.link((axis,))
            assert link.bandwidth_bytes_per_s == pytest.approx(want)
            assert link.crosses_hosts == (max(rings) > 0)


def test_a_slice_is_as_wide_between_hosts_as_inside():
    mesh = LogicalMesh(shape=(4, 4), cluster=Cluster.preset("v5e-16"))
    assert mesh.link(("x",)).bandwidth_bytes_per_s == mesh.link(("y",)).bandwidth_bytes_per_s
    assert mesh.link(("x",)).crosses_hosts


def test_order_of_axes_does_not_matter_and_links_are_kept():
    mesh = LogicalMesh(shape=(4, 8), cluster=CLUSTER)
    assert mesh.link(("x", "y")) is mesh.link(("y", "x"))


def test_names():
    mesh = LogicalMesh(shape=(4, 8), axis_names=("data", "model"), cluster=CLUSTER)
    assert (mesh.axis_sizes, mesh.size(("model",)), mesh.num_devices, str(mesh)) == (
        {"data": 4, "model": 8},
        8,
        32,
        "4x8",
    )
    assert LogicalMesh(shape=(2, 2, 8), cluster=CLUSTER).axis_names == ("x", "y", "z")
    with pytest.raises(InputError, match="did you mean 'model'"):
        mesh.link(("modle",))
    with pytest.raises(InputError, match="twice"):
        mesh.size(("data", "data"))


@pytest.mark.parametrize(
    ("shape", "names"),
    [((4, 4), ()), ((), ()), ((4, 8), ("a",)), ((4, 8), ("a", "a")), ((-4, -8), ())],
)
def test_bad_meshes(shape, names):
    with pytest.raises(ClusterError):
        LogicalMesh(shape=shape, axis_names=names, cluster=CLUSTER)


def test_shapes():
    assert logical_mesh_shapes(1) == [(1,)]
    assert logical_mesh_shapes(7) == [(7,)]
    assert logical_mesh_shapes(12) == [(12,), (6, 2), (4, 3), (3, 4), (2, 6)]
    assert logical_mesh_shapes(8, 3) == [(8,), (4, 2), (2, 4), (2, 2, 2)]
    assert logical_mesh_shapes(8, 1) == [(8,)]
    shapes = logical_mesh_shapes(512, 3)
    assert len(set(shapes)) == len(shapes) == 1 + 8 + 28 and all(
        math.prod(shape) == 512 for shape in shapes
    )
    with pytest.raises(InputError):
        logical_mesh_shapes(0)
