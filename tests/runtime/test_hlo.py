"""Collectives read from compiled text: real programs, and snippets of the forms that other
compilers print.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from aliquot.runtime import add_up, find_collectives
from aliquot.runtime.compiled._device_groups import device_groups
from aliquot.runtime.compiled._hlo import num_bytes


def entry(*lines: str) -> str:
    return (
        "ENTRY %main (p: f32[8]) -> f32[8] {\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"
    )


def one(line: str, names=("x", "y"), sizes=(2, 2)):
    (found,) = find_collectives(entry(line), names, sizes)
    return found.kind, found.axes, found.num_bytes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            (
                "%a = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}},"
                " use_global_device_ids=true, to_apply=%add"
            ),
            ("all-reduce", ("y",), 32),
        ),
        (
            "%a = f32[8]{0} all-reduce(%p), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add",
            ("all-reduce", ("x",), 32),
        ),
        (
            "%a = f32[8]{0} all-reduce(%p), replica_groups=[1,4]<=[4], to_apply=%add",
            ("all-reduce", ("x", "y"), 32),
        ),
        (
            "%a = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add",
            ("all-reduce", ("x", "y"), 32),
        ),
        (
            (
                "%a = (f32[8]{0}, bf16[4,2]{1,0}) all-reduce(%p, %q), replica_groups=[2,2]<=[4],"
                " to_apply=%add"
            ),
            ("all-reduce", ("y",), 48),
        ),
        (
            (
                "%a = (f32[4]{0:T(128)}, f32[8]{0:T(128)}) all-gather-start(%p),"
                " replica_groups=[2,2]<=[4], dimensions={0}"
            ),
            ("all-gather", ("y",), 32),
        ),
        (
            (
                "%a = ((f32[4]{0}, f32[2]{0}), (f32[8]{0}, f32[4]{0})) all-gather-start(%p, %q), "
                "replica_groups=[2,2]<=[4], dimensions={0}"
            ),
            ("all-gather", ("y",), 48),
        ),
        (
            "%a = f32[8]{0} all-reduce-start(%p), replica_groups=[2,2]<=[4], to_apply=%add",
            ("all-reduce", ("y",), 32),
        ),
        (
            (
                "%a = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%p),"
                " replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add"
            ),
            ("all-reduce", ("y",), 32),
        ),
        (
            (
                "%a = (f32[8]{0}, f32[4]{0}) all-reduce-start(%p, %q), replica_groups=[2,2]<=[4],"
                " to_apply=%add"
            ),
            ("all-reduce", ("y",), 48),
        ),
        (
            (
                "%a = ((f32[8]{0}), f32[4]{0}, u32[]) reduce-scatter-start(%p),"
                " replica_groups=[2,2]<=[4], dimensions={0}"
            ),
            ("reduce-scatter", ("y",), 16),
        ),
        (
            (
                "%a = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), "
                "source_target_pairs={{0,2},{2,0},{1,3},{3,1}}"
            ),
            ("collective-permute", ("x",), 32),
        ),
        (
            "%a = pred[3]{0} all-to-all(%p), replica_groups=[2,2]<=[4], dimensions={0}",
            ("all-to-all", ("y",), 3),
        ),
    ],
)
def test_one_instruction(line, expected):
    assert one(line) == expected


def test_only_the_start_of_an_asynchronous_pair_counts():
    text = entry(
        "%s = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[2,2]<=[4],"
        " dimensions={0}",
        "%d = f32[8]{0} all-gather-done(%s)",
    )
    assert len(find_collectives(text, ("x", "y"), (2, 2))) == 1


def test_wrapped_asynchronous_operators_are_found_in_their_own_computation():
    text = (
        "%wrapped (q: f32[8]) -> f32[4] {\n  ROOT %r = f32[4]{0} reduce-scatter(%q),"
        " replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%add\n}\n"
        + entry("%s = ((f32[8]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%wrapped")
    )
    (found,) = find_collectives(text, ("x", "y"), (2, 2))
    assert (found.kind, found.num_bytes) == ("reduce-scatter", 16)


@pytest.mark.parametrize("known", [True, False])
def test_a_loop_multiplies(known):
    config = ', backend_config={"known_trip_count":{"n":"6"}}' if known else ""
    text = (
        "%body (q: f32[8]) -> f32[8] {\n"
        "  ROOT %r = f32[8]{0} all-reduce(%q), replica_groups=[2,2]<=[4], to_apply=%add\n}\n"
        "%condition (q: f32[8]) -> pred[] {\n  %n = s32[] constant(6)\n}\n"
        + entry(f"%w = f32[8]{{0}} while(%p), condition=%condition, body=%body{config}")
    )
    (found,) = find_collectives(text, ("x", "y"), (2, 2))
    assert (found.count, found.num_bytes, found.in_loop) == (6, 6 * 32, True)


def test_bytes_of_odd_types():
    assert num_bytes("s4[3]{0}") == 2
    assert num_bytes("f8e4m3fn[5]{0}") == 5
    assert num_bytes("c64[2]{0}") == 16
    assert num_bytes("token[]") == 0
    assert num_bytes("f32[]") == 4


def test_groups_over_three_dims():
    assert device_groups("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", 8) == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
    ]


def test_a_compiled_loop_over_a_mesh(mesh):
    grid = mesh(4, 2)

    def constrain(x, *dims):
        return jax.lax.with_sharding_constraint(x, NamedSharding(grid, P(*dims)))

    def f(w, x):
        def body(x, w):
            return (
                jnp.tanh(constrain(constrain(x, "x", "y") @ constrain(w, "y", None), "x", None)),
                None,
            )

        return jax.lax.scan(body, x, w)[0].sum()

    compiled = jax.jit(f).lower(jnp.ones((5, 16, 16)), jnp.ones((4, 16))).compile()
    found = find_collectives(compiled.as_text(), ("x", "y"), (4, 2))
    reduces = [c for c in found if c.kind == "all-reduce" and c.in_loop]
    assert [(c.axes, c.count, c.num_bytes) for c in reduces] == [(("y",), 5, 5 * 16 * 4)]
    (total,) = add_up(reduces)
    assert (total.count, total.dtype) == (5, "f32")


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("mesh['a'=1,'b'=2,'c'=2] {'c'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
        ("mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
    ],
)
def test_groups_in_every_form(groups, expected):
    assert device_groups(f"replica_groups={groups}, x=1", 4) == expected
