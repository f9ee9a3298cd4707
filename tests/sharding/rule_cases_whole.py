"""Rules of random numbers, and of operators that pass arrays on or run whole."""

import equinox.internal
import jax
import jax.experimental
import jax.export
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas
from jax.experimental.custom_partitioning import custom_partitioning
from sharding.rule_case import Case, X, adder, floats, ints, keys, words

CASES: list[Case] = []
case = adder(CASES)


case("random_bits", "one key", lambda raw: jax.random.bits(keys(raw), (8, 4)), words())
case("random_bits", "a key each", jax.vmap(lambda raw: jax.random.bits(keys(raw), (8,))), words(8))
case("random_split", "", lambda raw: jax.random.split(keys(raw), 8), words())
case("random_wrap", "", keys, words(8))
case("random_unwrap", "", lambda raw: jax.random.key_data(keys(raw)), words(8))
case("random_seed", "", jax.vmap(jax.random.key), ints(8))
case("random_clone", "", lambda raw: jax.random.clone(keys(raw)), words(8))
case(
    "random_fold_in",
    "",
    jax.vmap(lambda raw, i: jax.random.fold_in(keys(raw), i)),
    words(8),
    ints(8),
)
case(
    "random_fold_in",
    "one key",
    lambda raw, i: jax.random.fold_in(keys(raw), i),
    words(),
    np.int32(2),
)
case("threefry2x32", "", lambda raw: jax.extend.random.threefry_2x32(raw, raw), words(4)[0])
case("random_gamma", "", lambda raw: jax.random.gamma(keys(raw), 2.0, (4,)), words(), runs=False)
case(
    "rng_bit_generator",
    "",
    lambda raw: lax.rng_bit_generator(raw, (4,)),
    np.zeros(4, np.uint32),
    runs=False,
)
case("rng_uniform", "", lambda: lax.rng_uniform(0.0, 1.0, (4,)), runs=False)


case(
    "optimization_barrier",
    "",
    lambda x, y: lax.optimization_barrier((x, y)),
    floats(8, 4),
    floats(16),
)
case("device_put", "", lambda x: jax.device_put(x, jax.memory.Space.Host), floats(8, 4))


@custom_partitioning
def partitioned(x):
    return x + 1


partitioned.def_partition(
    infer_sharding_from_operands=lambda mesh, operands, result: operands[0].sharding,
    partition=lambda mesh, operands, result: (
        mesh,
        lambda x: x + 1,
        result.sharding,
        (operands[0].sharding,),
    ),
    sharding_rule="i j -> i j",
)


def kernel(x_ref, y_ref):
    y_ref[...] = 2 * x_ref[...]


def opaque(primitive, fn, *args):
    case(primitive, "", fn, *args, runs=False)


DEVICES = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
S = np.eye(4, dtype=np.float32)
opaque("after_all", lambda x: (lax.after_all(lax.create_token()), x)[1], X)
opaque("create_token", lambda x: (lax.create_token(), x)[1], X)
opaque("custom_partitioning", partitioned, floats(8, 4))
opaque("debug_callback", lambda x: jax.debug.callback(lambda x: None, x), X)
opaque("debug_print", lambda x: jax.debug.print("{}", x), X)
opaque("ffi_call", jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct((8,), np.float32)), X)
opaque(
    "io_callback",
    lambda x: jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    X,
)
opaque(
    "pallas_call",
    pallas.pallas_call(kernel, jax.ShapeDtypeStruct((8,), np.float32), interpret=True),
    X,
)
opaque("noinline", equinox.internal.noinline(jnp.sin), X)
opaque("call_exported", jax.export.export(jax.jit(jnp.sin))(X).call, X)
opaque("platform_index", lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), X)
opaque(
    "pure_callback",
    lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    X,
)
opaque(
    "shard_map", jax.shard_map(jnp.sin, mesh=DEVICES, in_specs=jax.P("x"), out_specs=jax.P("x")), X
)
