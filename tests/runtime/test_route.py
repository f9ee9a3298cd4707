"""Arrays taken apart at one end and put together at the other: the same values, whatever the ends
are.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aliquot.runtime.transport import _route
from aliquot.runtime.transport._arrays import struct
from aliquot.runtime.transport._route import plan_route

_ENDS = [*itertools.permutations((1, 2, 3, 4), 2), (2, 2), (4, 4), (2, 6), (6, 2), (5, 3)]


def _mesh(devices, axes):
    return Mesh(np.array(devices), axes)


@pytest.mark.parametrize("cut_above", [0, 2**20], ids=["cut", "whole"])
@pytest.mark.parametrize(("n", "m"), _ENDS)
def test_arrays_arrive_as_they_were(n, m, cut_above, monkeypatch):
    """Even and uneven dims, scalars, empty arrays, narrow types and random keys."""
    monkeypatch.setattr(_route, "WORTH_CUTTING_BYTES", cut_above)
    devices = jax.devices()
    ends = [
        NamedSharding(_mesh(own, ("x",)), PartitionSpec()) for own in (devices[:n], devices[-m:])
    ]
    looks = [
        ((12, 5), "float32"),
        ((5, 12), "bfloat16"),
        ((7, 5), "int8"),
        ((), "bool"),
        ((0, 4), "float32"),
    ]
    random = np.random.default_rng(0)
    hosts = [jnp.asarray(random.integers(0, 2, shape).astype(dtype)) for shape, dtype in looks]
    arrays = jax.device_put([*hosts, jax.random.split(jax.random.key(0), 6)], ends[0])
    structs = [struct(a.shape, a.dtype, ends[0]) for a in arrays]
    moved = plan_route(structs, [ends[1]] * len(arrays))(*arrays)
    for mine, array in zip(moved, arrays, strict=True):
        assert mine.sharding.is_equivalent_to(ends[1], mine.ndim) and mine.dtype == array.dtype
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            mine, array = jax.random.key_data(mine), jax.random.key_data(array)
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(array))


def test_splits_change_on_the_way(monkeypatch):
    monkeypatch.setattr(_route, "WORTH_CUTTING_BYTES", 0)
    devices = jax.devices()
    source = NamedSharding(
        _mesh(np.reshape(devices[:4], (2, 2)), ("a", "b")), PartitionSpec(("a", "b"))
    )
    target = NamedSharding(_mesh(devices[6:], ("c",)), PartitionSpec(None, "c"))
    array = jax.device_put(jnp.arange(48.0).reshape(8, 6), source)
    (moved,) = plan_route([struct(array.shape, array.dtype, source)], [target])(array)
    assert moved.sharding.is_equivalent_to(target, 2)
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(array))
