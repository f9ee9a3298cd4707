"""Batches that are joined, taken apart, or cut into chunks, in exact micro-batches: the numbers of
the plain step, or a refusal.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime.pipelines import pipeline
from runtime.planned import loop_results

import aliquot as aq
from aliquot.core import CaptureError
from aliquot.graph import capture
from aliquot.runtime._check import compare
from aliquot.sharding import plan_micro_batches

from .joined_batches import LOSSES, joined

# They set examples against others, or square their mean.
REFUSED = {"views", "rolled", "beams"}
ACCEPTED = [name for name in LOSSES if name not in REFUSED]
METHODS = {
    "dp": aq.DataParallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(),
    "pipe": aq.PipeshardParallel(num_stages=2),
}


def slow_except(quick, cases):
    return [pytest.param(*c, marks=() if c in quick else pytest.mark.slow) for c in cases]


def assert_same(found, wanted):
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    check = compare([str(k) for k in range(len(wanted))], found, wanted)
    off = {leaf.path: leaf.largest for leaf in check.leaves if leaf.relative > 1e-9}
    assert not off, off


@pytest.mark.parametrize(
    ("name", "count", "groups"),
    slow_except(
        {("preferences", 2, 2), ("chunked", 4, 1)},
        [(name, *((2, 1), (4, 1), (2, 2))[k % 3]) for k, name in enumerate(ACCEPTED)],
    ),
)
def test_blocks_of_examples_are_cut_alike(name, count, groups, x64):
    step, state, batch = joined(name)
    graph = capture(step, state, batch)
    found = loop_results(
        graph, jax.tree.leaves((state, batch)), num_micro_batches=count, groups=groups
    )
    assert_same(found, jax.jit(step)(state, batch))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_examples_that_meet_others_are_refused(name, x64):
    step, state, batch = joined(name, arrays=False)
    with pytest.raises(CaptureError, match="does not decompose"):
        plan_micro_batches(capture(step, state, batch), 2)


def test_chunks_that_micro_batches_do_not_share_evenly_are_refused():
    def step(w, x):
        def loss(w):
            tokens = jnp.tanh(x @ w).reshape(-1, 3)

            def add(total, chunk):
                return total + jnp.sum(chunk**2), None

            return jax.lax.scan(add, 0.0, tokens.reshape(8, -1, 3))[0] / len(x)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    w, x = jax.ShapeDtypeStruct((3, 3), jnp.float32), jax.ShapeDtypeStruct((16, 4, 3), jnp.float32)
    graph = capture(step, w, x)
    assert plan_micro_batches(graph, 2).combine["[1]"] == "sum"
    with pytest.raises(CaptureError, match="8 chunks.* only if it is a multiple of 32 examples"):
        plan_micro_batches(graph, 4)


@pytest.mark.parametrize(
    ("name", "sizes", "schedule"),
    slow_except(
        {("stacked", (2, 4), "1f1b"), ("chunked", (1, 1), "zero-bubble")},
        [
            # Each two choices once.
            (name, sizes, ("1f1b", "zero-bubble")[(k + j) % 2])
            for k, name in enumerate(("stacked", "preferences", "chunked"))
            for j, sizes in enumerate(((2, 4), (1, 1), (4, 2)))
        ],
    ),
)
def test_stages_exchange_blocks(name, sizes, schedule, x64):
    step, state, batch = joined(name)
    wanted = jax.device_get(jax.jit(step)(state, batch))
    run = pipeline(
        step, state, batch, sizes=sizes, micro_batches=2, schedule=schedule, anywhere=True
    )
    assert_same(run(state, batch), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "count"),
    [
        (name, method, (2, 4)[(k + j) % 2])
        for k, name in enumerate(("preferences", "stacked", "tiled_labels", "chunked"))
        for j, method in enumerate(METHODS)
    ],
)
def test_methods_run_blocks_in_micro_batches(name, method, count, x64):
    step, state, batch = joined(name, rows=128)
    plan = aq.plan(
        step,
        state,
        batch,
        cluster=aq.Cluster.preset("8xcpu"),
        method=METHODS[method],
        num_micro_batches=count,
    )
    check = aq.parallelize(step, plan).check(state, batch)
    off = {leaf.path: leaf.relative for leaf in check.leaves if leaf.relative > 1e-9}
    assert not off, off


N, D = 32, 3


def random_moves(seed):
    """A step that moves its examples about at random, and what it does."""
    random = np.random.default_rng(seed)
    weights = jnp.asarray(random.normal(size=(D, D)))
    batch = {k: jnp.asarray(random.normal(size=(N, D))) for k in "xy"}
    choices = [(str(random.choice(MOVES)), random.integers(1 << 30)) for _ in range(3)]

    def step(w, b):
        def loss(w):
            pool = [b["x"] @ w, b["y"], jnp.tanh(b["y"] @ w)]
            for name, number in choices:
                pool.append(move(name, int(number), pool))
            total = sum(jnp.sum(jnp.sin(a) * (k + 1)) for k, a in enumerate(pool))
            return total / N, pool[-1]

        (value, rows), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * grads, value, rows

    return step, weights, batch, [name for name, _ in choices]


MOVES = (
    "join", "join", "halve", "halve", "stack", "split", "roll", "chunks", "scan", "flip", "place",
    "tile", "fill", "add", "add", "mask", "turn", "odd", "own",
)  # fmt: skip


def move(name, number, pool):
    a, b = pool[number % len(pool)], pool[number // 7 % len(pool)]
    n, c = len(a), (2, 4)[number % 2]
    same = [p for p in pool if p.shape == a.shape]
    match name:
        case "join":
            return jnp.concatenate([a, b])
        case "halve":
            return a[: n // 2] if number % 2 else a[n // 2 :]
        case "stack":
            return jnp.stack([a, same[number % len(same)]]).reshape(-1, D)
        case "split":
            return jnp.split(a, 2)[number % 2] * 2.0
        case "roll":
            return jnp.roll(a, n // 2 if number % 3 else 1, 0)
        case "chunks":
            parts = jnp.tanh(a.reshape(c, n // c, D)) * jnp.arange(1.0, c + 1)[:, None, None]
            return parts.reshape(n, D)
        case "scan":

            def body(total, rows):
                return total + rows.sum(0), rows * total

            return jax.lax.scan(body, a[0] * 0, a.reshape(c, n // c, D))[1].reshape(n, D)
        case "flip":
            return a[::-1] if number % 3 == 0 else a[:, ::-1]
        case "place":
            return a * jnp.arange(1.0, n + 1)[:, None] / n
        case "tile":
            return jnp.tile(a, (2, 1))
        case "fill":
            return jnp.pad(a, ((0, n), (0, 0))) if number % 2 else jnp.pad(a, ((n, 0), (0, 0)))
        case "add":
            return a * 0.5 + same[number // 3 % len(same)]
        case "mask":
            return jnp.where(jnp.arange(n)[:, None] < n // 2, a, 2.0)
        case "turn":
            return a.reshape(n // 2, 2, D).swapaxes(0, 1).reshape(n, D)
        case "odd":
            return a[number % 2 :: 2]
        case _:
            return jnp.zeros((n, D)).at[jnp.arange(n), jnp.arange(n) % D].add(a[:, 0])


@pytest.mark.parametrize(
    "seed", [pytest.param(k, marks=() if k < 3 else pytest.mark.slow) for k in range(25)]
)
def test_random_moves_are_the_plain_step_or_refused(seed, x64):
    step, weights, batch, names = random_moves(seed)
    graph = capture(step, weights, batch)
    wanted = jax.jit(step)(weights, batch)
    for count, groups in ((2, 1), (2, 2)):
        try:
            plan_micro_batches(graph, count, num_groups=groups)
        except CaptureError:
            continue
        leaves = jax.tree.leaves((weights, batch))
        found = loop_results(graph, leaves, num_micro_batches=count, groups=groups)
        try:
            assert_same(found, wanted)
        except AssertionError as error:
            error.add_note(f"{names}, {count} micro-batches, {groups} groups")
            raise


@pytest.mark.slow
def test_most_kinds_of_random_moves_are_accepted():
    accepted = set()
    for seed in range(25):
        step, weights, batch, names = random_moves(seed)
        try:
            plan_micro_batches(capture(step, weights, batch), 2)
        except CaptureError:
            continue
        accepted |= set(names)
    assert accepted >= {"join", "halve", "stack", "split", "chunks", "tile", "fill", "add"}
