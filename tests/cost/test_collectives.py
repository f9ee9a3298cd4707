"""Collectives and products against figures worked out by hand."""

import dataclasses
import functools
import math
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import aliquot.cost._priced as priced_module
from aliquot.cluster import TARGETS, Cluster, Device, Link, LogicalMesh, SumCollective
from aliquot.cost import Work, collective_line
from aliquot.cost._collectives import move_line, through_copies, widening
from aliquot.cost._evaluate import hidden_seconds
from aliquot.graph import Phase
from aliquot.sharding import PARTIAL, reshard

BYTES = 80e6
INTRA = Link(latency_s=2e-6, bandwidth_bytes_per_s=100e9)
INTER = Link(latency_s=20e-6, bandwidth_bytes_per_s=40e9)
TARGET = dataclasses.replace(
    TARGETS["gpu"], collective_efficiency=0.5, all_to_all_efficiency=0.5, collective_overhead_s=1e-5
)


def cluster(hosts=1, per_host=8, kind="gpu"):
    device = Device(
        name="test",
        kind=kind,
        peak_flops_per_s={"float32": 1e12, "bfloat16": 4e12},
        memory_bytes=2**30,
        memory_bandwidth_bytes_per_s=1e11,
        source="",
    )
    return Cluster(
        name="test",
        device=device,
        num_hosts=hosts,
        devices_per_host=per_host,
        intra=INTRA,
        inter=INTER,
    )


def seconds(kind, shape, axes, hosts=1, group=None):
    mesh = LogicalMesh(shape=shape, cluster=cluster(hosts, math.prod(shape) // hosts))
    latency, per_byte = collective_line(kind, axes, mesh, TARGET, group)
    return latency + per_byte * BYTES


@pytest.mark.parametrize(
    ("kind", "steps", "times"),
    [
        ("all-reduce", 2 * 3, 2 * 7 / 8),
        ("all-gather", 7, 7),
        ("reduce-scatter", 7, 7 / 8),
        ("all-to-all", 7, 7 / 8),
        ("collective-permute", 1, 1),
    ],
)
def test_inside_a_host(kind, steps, times):
    """Eight devices, 50 GB/s reached: 80 MB take 1.6 ms for each time that all of it passes a
    link.
    """
    assert seconds(kind, (8,), (0,)) == pytest.approx(1e-5 + steps * 2e-6 + times * 1.6e-3)


def test_a_gather_undoes_a_scatter():
    """Both halves of an all-reduce move what it moves: the bytes that enter a gather are an
    eighth.
    """
    mesh = LogicalMesh(shape=(8,), cluster=cluster())
    lines = {
        k: collective_line(k, (0,), mesh, TARGET)[1]
        for k in ("all-reduce", "reduce-scatter", "all-gather")
    }
    assert lines["reduce-scatter"] + lines["all-gather"] / 8 == pytest.approx(lines["all-reduce"])


def test_axes_that_cross_hosts():
    """Two hosts of four devices: along x four rings share a host's 40 GB/s, along both axes one
    ring has them all.
    """
    assert seconds("all-gather", (2, 4), (1,), hosts=2) == pytest.approx(
        1e-5 + 3 * 2e-6 + 3 * 1.6e-3
    )
    assert seconds("all-gather", (2, 4), (0,), hosts=2) == pytest.approx(1e-5 + 20e-6 + BYTES / 5e9)
    both = 1e-5 + 20e-6 + 6 * 2e-6 + 7 * BYTES / 20e9
    assert seconds("all-gather", (2, 4), (0, 1), hosts=2) == pytest.approx(both)
    # All to all: four of the seven messages of each device leave the host, whose devices share its
    # network.
    across = 0.5 * 40e9 / 4 * 7 / 4
    exchange = 1e-5 + 20e-6 + 6 * 2e-6 + 7 / 8 * BYTES / across
    assert seconds("all-to-all", (2, 4), (0, 1), hosts=2) == pytest.approx(exchange)


def test_groups_smaller_than_an_axis():
    assert seconds("all-gather", (8,), (0,), group=2) == pytest.approx(1e-5 + 2e-6 + 1.6e-3)
    assert seconds("all-reduce", (8,), (0,), group=1) == 0
    assert seconds("all-reduce", (1,), (0,)) == 0


def test_narrow_types_travel_as_float32_on_some_targets():
    assert [widening(d, TARGETS["cpu"]) for d in ("bfloat16", "float16", "float32", "int32")] == [
        2,
        2,
        1,
        1,
    ]
    assert [widening(d, TARGETS["gpu"]) for d in ("bfloat16", "float32")] == [1, 1]
    # Running totals are sent in the dtype in which the step has them.
    totals = ("bfloat16", "float32", "float32"), ("bfloat16", "bfloat16", "float32")
    for of, (gpu, cpu) in zip(zip(*totals, strict=True), ((1, 2), (2, 2), (1, 1)), strict=True):
        total_dtype, dtype = of
        assert widening(dtype, TARGETS["gpu"], total_dtype) == gpu, of
        assert widening(dtype, TARGETS["cpu"], total_dtype) == cpu, of


@pytest.mark.parametrize(
    ("kind", "on_pieces", "masked", "total", "expected"),
    [
        ("gpu", False, False, False, True),
        ("gpu", True, False, True, True),
        ("gpu", False, True, False, False),
        ("cpu", True, False, False, True),
        ("cpu", True, False, True, False),
        ("cpu", False, False, False, False),
    ],
)
def test_sums_are_scattered_by_the_compiler_or_behind_products(
    kind, on_pieces, masked, total, expected
):
    edge = SimpleNamespace(on_pieces=on_pieces, masked=masked)
    sums = priced_module.sum_collective(edge, TARGETS[kind], total=total)
    assert (sums is SumCollective.REDUCE_SCATTER) is expected


def test_roofline():
    """The longer of arithmetic and traffic, then the launches, which no split makes fewer."""
    mesh = LogicalMesh(shape=(4,), cluster=cluster(per_host=4))
    target = dataclasses.replace(
        TARGETS["gpu"],
        matmul_efficiency=0.5,
        bandwidth_efficiency=0.25,
        kernel_overhead_s=1e-6,
        float32_product_dtype="",
    )
    choices = np.array([[-1], [0], [1]])
    work = Work(
        phase=Phase.FORWARD,
        split_by=(True, True),
        flops=1e9,
        dtype="bfloat16",
        arrays=((1e7, (True, False)), (2e7, (False, False))),
        kernels=3,
    )
    found = priced_module.work_seconds(work, (8, 8), choices, mesh, target)
    traffic = np.array([3e7, 2.25e7, 3e7]) / 25e9
    arithmetic = np.array([1e9, 0.25e9, 0.25e9]) / 2e12
    assert found == pytest.approx(np.maximum(traffic, arithmetic) + 3e-6)
    heavy = dataclasses.replace(work, flops=1e13)
    assert priced_module.work_seconds(heavy, (8, 8), choices, mesh, target)[0] == pytest.approx(
        1e13 / 2e12 + 3e-6
    )


@pytest.mark.parametrize(
    ("in_passes", "once", "beside", "last", "hidden"),
    [(0, 4, 20, 10, 4), (0, 4, 20, 1, 1), (3, 4, 20, 1, 4), (9, 4, 8, 3, 8), (30, 0, 20, 10, 20)],
)
def test_what_is_summed_once_hides_behind_the_last_backward_pass(
    in_passes, once, beside, last, hidden
):
    assert hidden_seconds(in_passes, once, beside_s=beside, last_s=last) == hidden


def test_groups_of_measured_sizes_reach_their_own_share():
    target = dataclasses.replace(TARGET, collective_shares=((2, 0.25), (4, 0.75)))
    mesh = LogicalMesh(shape=(2, 4), cluster=cluster(per_host=8))
    found = {
        axes: collective_line("all-gather", axes, mesh, target)[1] for axes in ((0,), (1,), (0, 1))
    }
    plain = {axes: collective_line("all-gather", axes, mesh, TARGET)[1] for axes in found}
    ratios = {axes: plain[axes] / found[axes] for axes in found}
    assert ratios == pytest.approx({(0,): 0.5, (1,): 1.5, (0, 1): 1.5})
    # Between hosts the network decides, and rings of one host say nothing about it.
    across = LogicalMesh(shape=(2, 4), cluster=cluster(per_host=4, hosts=2))
    assert collective_line("all-gather", (0,), across, target) == collective_line(
        "all-gather", (0,), across, TARGET
    )


def test_halves_of_an_all_reduce_reach_their_own_share():
    """Where shared memory is the network, one of each takes longer than an all-reduce."""
    mesh = LogicalMesh(shape=(8,), cluster=cluster())
    target = dataclasses.replace(TARGET, scatter_gather_share=0.8)
    slopes = {
        kind: [collective_line(kind, (0,), mesh, t)[1] for t in (TARGET, target)]
        for kind in ("all-reduce", "reduce-scatter", "all-gather")
    }
    assert slopes["all-reduce"][1] == slopes["all-reduce"][0]
    for kind in ("reduce-scatter", "all-gather"):
        assert slopes[kind][1] == pytest.approx(slopes[kind][0] / 0.8)
    whole, (scattered, gathered) = (
        slopes["all-reduce"],
        (slopes["reduce-scatter"], slopes["all-gather"]),
    )
    for each, ratio in ((0, 1.0), (1, 1.25)):
        assert scattered[each] + gathered[each] / 8 == pytest.approx(ratio * whole[each])


@pytest.mark.parametrize(("source", "copied"), [((0,), False), ((1,), True), ((2,), True)])
def test_a_gather_of_an_inner_dim_pays_for_two_copies(source, copied):
    """80 MB enter on each of eight devices and 640 MB leave: read and written once more at 80
    GB/s.
    """
    target = dataclasses.replace(TARGET, copies_inner_dims=True, bandwidth_efficiency=0.8)
    mesh = LogicalMesh(shape=(8,), cluster=cluster())
    (move,) = reshard(source, (-1,), (8,), SumCollective.REDUCE_SCATTER)
    assert through_copies(move, source, (-1,), target) == copied
    assert not through_copies(move, source, (-1,), TARGET)
    latency, per_byte = move_line(move, copied, mesh, target)
    plain = collective_line("all-gather", (0,), mesh, target)
    copies_s = 2 * (BYTES + 8 * BYTES) / 80e9 if copied else 0.0
    assert per_byte * BYTES == pytest.approx(plain[1] * BYTES + copies_s)
    assert latency == pytest.approx(plain[0] + (2 * target.kernel_overhead_s if copied else 0.0))


@pytest.mark.parametrize(("wanted", "copied"), [((0,), False), ((1,), True), ((2,), True)])
def test_a_scattering_of_an_inner_dim_pays_for_two_copies(wanted, copied):
    """80 MB enter on each of eight devices and 10 MB leave: read and written once more at 80
    GB/s.
    """
    target = dataclasses.replace(TARGET, copies_inner_dims=True, bandwidth_efficiency=0.8)
    mesh = LogicalMesh(shape=(8,), cluster=cluster())
    (move,) = reshard((PARTIAL,), wanted, (8,), SumCollective.REDUCE_SCATTER)
    assert through_copies(move, (PARTIAL,), wanted, target) == copied
    assert not through_copies(move, (PARTIAL,), wanted, TARGET)
    latency, per_byte = move_line(move, copied, mesh, target)
    plain = collective_line("reduce-scatter", (0,), mesh, target)
    copies_s = 2 * (BYTES + BYTES / 8) / 80e9 if copied else 0.0
    assert per_byte * BYTES == pytest.approx(plain[1] * BYTES + copies_s)
    assert latency == pytest.approx(plain[0] + (2 * target.kernel_overhead_s if copied else 0.0))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_this_backend_brings_a_scattered_dim_in_front(dim, mesh):
    """What the table says of scatterings: the layout of what enters, too, has the scattered dim
    first.
    """

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh(8),
        in_specs=P("x"),
        out_specs=P(*[None] * dim, "x"),
        check_vma=False,
    )
    def scatter(x):
        return jax.lax.psum_scatter(x[0] * 2, "x", scatter_dimension=dim, tiled=True) + 1

    text = scatter.lower(jax.ShapeDtypeStruct((8, 8, 16, 32), np.float32)).compile().as_text()
    (line,) = [line for line in text.splitlines() if " reduce-scatter(" in line]
    order = re.search(r"f32\[[\d,]+\]\{([\d,]+)\}", line)[1].split(",")
    assert int(order[-1]) == dim
    assert TARGETS["cpu"].copies_inner_dims


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_this_backend_brings_a_gathered_dim_in_front(dim, mesh):
    """What the table says of gathers, in a program compiled here: the layout of the result has the
    gathered dim first.
    """

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh(8),
        in_specs=P(*[None] * dim, "x"),
        out_specs=P(),
        axis_names={"x"},
        check_vma=False,
    )
    def gather(x):
        return jax.lax.all_gather(x * 2, "x", axis=dim, tiled=True) + 1

    text = gather.lower(jax.ShapeDtypeStruct((8, 16, 32), np.float32)).compile().as_text()
    (line,) = [line for line in text.splitlines() if " all-gather(" in line]
    order = re.search(r"f32\[8,16,32\]\{([\d,]+)\}", line)[1].split(",")
    assert int(order[-1]) == dim
    assert TARGETS["cpu"].copies_inner_dims
