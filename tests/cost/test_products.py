"""What the shape of a product costs, counted by hand: 4 processors with tiles of 10 x 10 and 5
steps around each.
"""

import dataclasses

import numpy as np
import pytest

from aliquot.cluster import TARGETS, Cluster, LogicalMesh, Products, target_for
from aliquot.cost import Work
from aliquot.cost import _priced as priced_module
from aliquot.graph import Phase

MESH = LogicalMesh(shape=(4,), cluster=Cluster.preset("4xH100"))
TARGET = dataclasses.replace(
    TARGETS["gpu"],
    matmul_efficiency=0.5,
    kernel_overhead_s=0.0,
    products=Products(tile=10, processors=4, depth=5.0, traffic=0.5),
)
SPEED = 989.4e12 / 2
# Factors: batch, rows, columns, contracted.
LEFT, RIGHT, RESULT = (
    (True, True, False, True),
    (True, False, True, True),
    (True, True, True, False),
)


def seconds(sizes, choice=-1, *, copies=1, num_bytes=0.0, target=TARGET):
    batch, rows, columns, depth = sizes
    work = Work(
        phase=Phase.FORWARD,
        split_by=(True,) * 4,
        flops=2.0 * batch * rows * columns * depth * copies,
        dtype="bfloat16",
        arrays=((num_bytes, LEFT), (num_bytes, RIGHT), (num_bytes, RESULT)),
        kernels=copies,
    )
    return float(priced_module.work_seconds(work, sizes, np.array([[choice]]), MESH, target)[0])


@pytest.mark.parametrize(
    ("sizes", "choice", "tiles", "steps"),
    [
        ((1, 40, 40, 100), -1, 16, 105),
        ((1, 41, 40, 100), -1, 20, 105),  # what stands out is computed whole
        ((8, 40, 5, 100), -1, 32, 105),
        ((1, 10, 20, 100), -1, 4, 105),  # two tiles take as long as four
        ((1, 40, 40, 100), 1, 4, 105),  # 10 rows on each device
        ((1, 40, 44, 100), 2, 8, 105),  # 11 columns take two tiles
        ((4, 20, 20, 100), 0, 4, 105),
        ((1, 40, 40, 100), 3, 16, 30),  # 25 steps and 5 around them
    ],
)
def test_tiles_and_steps(sizes, choice, tiles, steps):
    assert seconds(sizes, choice) == pytest.approx(2 * tiles * 100 * steps / SPEED)


def test_copies_are_products_of_their_own():
    assert seconds((1, 40, 40, 100), copies=7) == pytest.approx(7 * seconds((1, 40, 40, 100)))


def test_products_read_and_write_slower_than_elementwise_code():
    traffic = 3 * 1e9 / (TARGET.memory_bytes_per_s(MESH.cluster.device) * 0.5)
    assert seconds((1, 40, 40, 100), num_bytes=1e9) == pytest.approx(traffic)


def test_without_figures_only_operations_count():
    flat = dataclasses.replace(TARGET, products=Products())
    assert seconds((1, 7, 3, 11), target=flat) == pytest.approx(2 * 7 * 3 * 11 / SPEED)


def test_v100_reaches_in_each_shape_what_was_published():
    """Products of GPTs as timed for the Aceso artifact (EuroSys 2024): forward, and one and a half
    times both gradients, which are two products in faster memory layouts.
    """
    mesh = LogicalMesh(shape=(1,), cluster=Cluster.preset("1xV100-32GB"))
    published = {
        (1, 8192, 8192, 2048): 4 * 2 * 8192 * 8192 * 2048 / (3311e-6 + 1.5 * 5600e-6),
        (1, 8192, 2048, 8192): 4 * 2 * 8192 * 8192 * 2048 / (3234e-6 + 1.5 * 5590e-6),
        (128, 2048, 2048, 64): 2 * 128 * 2048 * 2048 * 64 / 2157e-6,
    }
    for (batch, rows, columns, depth), flops_per_s in published.items():
        flops = 2.0 * batch * rows * columns * depth
        arrays = tuple(
            (2.0 * n, by)
            for n, by in (
                (batch * rows * depth, LEFT),
                (batch * columns * depth, RIGHT),
                (batch * rows * columns, RESULT),
            )
        )
        work = Work(
            phase=Phase.FORWARD,
            split_by=(True,) * 4,
            flops=flops,
            dtype="float16",
            arrays=arrays,
            kernels=1.0,
        )
        target = target_for(mesh.cluster.device)
        found = priced_module.work_seconds(
            work, (batch, rows, columns, depth), np.array([[-1]]), mesh, target
        )
        assert flops / found[0] == pytest.approx(flops_per_s, rel=0.08)


def test_the_positions_of_an_image_are_rows_of_the_product():
    """A convolution of 40 examples at 100 positions each takes as long as a product of 4000
    rows.
    """
    examples, positions, columns, depth = 40, 100, 40, 9000
    work = Work(
        phase=Phase.FORWARD,
        split_by=(True,) * 4,
        flops=2.0 * examples * positions * columns * depth,
        dtype="bfloat16",
        arrays=((0.0, LEFT), (0.0, RIGHT), (2.0 * examples * positions * columns, RESULT)),
        kernels=1,
    )
    found = priced_module.work_seconds(
        work, (1, examples, columns, depth), np.array([[-1]]), MESH, TARGET
    )
    assert float(found[0]) == pytest.approx(seconds((1, examples * positions, columns, depth)))
