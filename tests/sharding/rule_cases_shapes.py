"""Rules of operators that move elements: shapes, sorting, gathers and scatters."""

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
from jax import lax
from sharding.rule_case import Case, X, adder, floats, ints

CASES: list[Case] = []
case = adder(CASES)


def reshaped(before, after, label):
    case("reshape", label, lambda x: lax.reshape(x, after), floats(*before))


reshaped((4, 32), (4, 8, 4), "split heads")
reshaped((4, 8, 4), (4, 32), "merge heads")
reshaped((8, 8, 4), (64, 4), "merge batch")
reshaped((64, 4), (8, 8, 4), "split batch")
reshaped((24,), (8, 3), "split odd")
reshaped((12, 4), (8, 6), "gcd")
reshaped((6, 4), (4, 6), "gcd of two")
reshaped((8, 3, 8), (8, 8, 3), "kept major")
reshaped((8, 1, 4), (1, 8, 4, 1), "ones")
reshaped((8, 4), (32,), "flat")
case("reshape", "another order", lambda x: lax.reshape(x, (8, 32), (1, 0, 2)), floats(4, 8, 8))
reshaped((4, 8, 8), (4, 4, 2, 8), "split inside")
reshaped((4, 2, 8), (8, 8), "merge two")
reshaped((1,), (), "scalar")
reshaped((8, 0, 3), (8, 0), "empty")
reshaped((3, 5), (5, 3), "nothing shared")
case("broadcast_in_dim", "scalar", lambda x: jnp.broadcast_to(x, (8, 4)), np.float32(2))
case("broadcast_in_dim", "new dims", lambda x: lax.broadcast_in_dim(x, (4, 8, 8), (1,)), floats(8))
case(
    "broadcast_in_dim", "from one", lambda x: lax.broadcast_in_dim(x, (8, 8), (0, 1)), floats(8, 1)
)
case("broadcast_in_dim", "to ones", lambda x: lax.broadcast_in_dim(x, (1, 8, 1), (1,)), floats(8))
case("squeeze", "", lambda x: lax.squeeze(x, (1,)), floats(8, 1, 4))
case("transpose", "", lambda x: lax.transpose(x, (2, 0, 1)), floats(4, 8, 8))
case("transpose", "rows stay first", lambda x: lax.transpose(x, (0, 2, 1)), floats(8, 4, 8))
case("rev", "", lambda x: lax.rev(x, (1,)), floats(8, 8))
case("slice", "first", lambda x: lax.slice(x, (0, 0), (8, 4)), floats(8, 8))
case("slice", "strided", lambda x: lax.slice(x, (0, 0), (8, 8), (1, 2)), floats(8, 8))
case("pad", "", lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1, 3, 0))), floats(8, 4))
case("pad", "shifted", lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1, -1, 0))), floats(8, 8))
case("pad", "inside", lambda x: lax.pad(x, 0.5, ((0, 1, 1), (0, 0, 0))), floats(4, 8))
case("concatenate", "columns", lambda x, y: lax.concatenate((x, y), 1), floats(8, 4), floats(8, 8))
case("concatenate", "many", lambda x: lax.concatenate([x] * 30, 0), floats(4, 8))
case("split", "", lambda x: lax.split(x, (4, 4, 8), 1), floats(8, 16))
case("stack", "", lambda x, y: jnp.stack([x, y], 1), floats(8, 4), floats(8, 4))
case("unstack", "", lambda x: jnp.unstack(x, axis=1), floats(8, 2, 4))
case("tile", "", lambda x: lax.tile(x, (1, 2, 8)), floats(8, 4, 1))
case(
    "dynamic_slice",
    "",
    lambda x, i: lax.dynamic_slice(x, (i, 0), (4, 8)),
    floats(8, 8),
    np.int32(3),
)
case(
    "dynamic_slice",
    "all dims",
    lambda x, i: lax.dynamic_slice(x, (0, i, i), (8, 1, 2)),
    floats(8, 4, 8),
    np.int32(2),
)
case(
    "dynamic_update_slice",
    "",
    lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)),
    floats(8, 8),
    floats(8, 4),
    np.int32(3),
)
case("iota", "", lambda: lax.broadcasted_iota(jnp.int32, (8, 8), 1))
case("empty", "", lambda: lax.empty((8, 4), jnp.float32), runs=False)
case(
    "empty2",
    "",
    lambda: jax.extend.core.primitives.empty2_p.bind(
        dtype=np.dtype("float32"), memory_space=jax.memory.Space.Device
    ),
    runs=False,
)
case("bitcast_convert_type", "same width", lambda x: lax.bitcast_convert_type(x, jnp.int32), X)
case("bitcast_convert_type", "narrower", lambda x: lax.bitcast_convert_type(x, jnp.uint8), X)
case(
    "bitcast_convert_type",
    "wider",
    lambda x: lax.bitcast_convert_type(x, jnp.float32),
    ints(8, 4, 2).astype(np.int16),
)
case("sort", "one", lambda x: lax.sort(x, dimension=1), floats(8, 8))
case("sort", "with index", lambda x, i: lax.sort((x, i), dimension=0), floats(8, 8), ints(8, 8))
case(
    "top_k",
    "",
    lambda x: lax.top_k(x, 2),
    floats(8, 4, 8),
    unplanned="all-gather",
    why="the compiler takes its own top-k kernel for indivisible, though every row is on its own",
)
case("approx_top_k", "", lambda x: lax.approx_max_k(x, 2), floats(8, 16), runs=False)


case("gather", "embedding", lambda t, i: t[i], floats(8, 8), ints(8))
case(
    "gather",
    "embedding of sequences",
    lambda t, i: t.at[i].get(mode="promise_in_bounds"),
    floats(16, 8),
    ints(4, 8),
)
case("gather", "clipped", lambda t, i: t.at[i].get(mode="clip"), floats(8, 8), ints(8, high=12))
case(
    "gather",
    "filled",
    lambda t, i: t.at[i].get(mode="fill", fill_value=3.0),
    floats(8, 8),
    ints(8, high=12),
)
case("gather", "last dim", lambda t, i: t[:, i], floats(8, 8), ints(8))
case("gather", "along axis", lambda t, i: jnp.take_along_axis(t, i, 1), floats(8, 8), ints(8, 4))
case(
    "gather",
    "labels",
    lambda t, i: jnp.take_along_axis(t, i[..., None], -1),
    floats(4, 8, 8),
    ints(4, 8),
)
case("gather", "two indices", lambda t, i, j: t[i, j], floats(8, 8, 8), ints(8), ints(8))
case(
    "gather",
    "window",
    lambda t, i: jax.vmap(lambda i: lax.dynamic_slice(t, (i, 0), (4, 8)))(i),
    floats(8, 8),
    ints(8),
)
case(
    "gather",
    "windows of each",
    jax.vmap(lambda t, i: lax.dynamic_slice(t, (i, 0), (4, 8))),
    floats(8, 8, 8),
    ints(8),
)
case("gather", "integers", lambda t, i: t[i], ints(8, 8), ints(8))

UPDATES = {
    "add": "scatter-add",
    "subtract": "scatter-sub",
    "multiply": "scatter-mul",
    "min": "scatter-min",
    "max": "scatter-max",
    "set": "scatter",
}
for method, primitive in UPDATES.items():

    def update(t, i, u, method=method):
        return getattr(t.at[i], method)(u)

    case(primitive, "rows", update, floats(8, 8), ints(8, low=0, high=8), floats(8, 8))
    case(primitive, "elements", update, floats(16), ints(8), floats(8))
case(
    "scatter-add",
    "gradient of embedding",
    jax.grad(lambda t, i: jnp.sum(t[i] ** 2)),
    floats(16, 8),
    ints(4, 8),
)
case(
    "scatter-add",
    "gradient along axis",
    jax.grad(lambda t, i: jnp.sum(jnp.take_along_axis(t, i, 1) ** 2)),
    floats(8, 8),
    ints(8, 4),
)
case(
    "scatter-add",
    "two indices",
    lambda t, i, j, u: t.at[i, j].add(u),
    floats(8, 8),
    ints(8),
    ints(16)[8:],
    floats(8),
)
case(
    "scatter-add", "columns", lambda t, i, u: t.at[:, i].add(u), floats(8, 8), ints(4), floats(8, 4)
)
case(
    "scatter",
    "cache",
    jax.vmap(lambda c, new, at: lax.dynamic_update_slice_in_dim(c, new, at, 0)),
    floats(8, 8, 4),
    floats(8, 1, 4),
    ints(8),
)
case("scatter", "column", lambda t, u: t.at[:, 3].set(u), floats(8, 8), floats(8))
