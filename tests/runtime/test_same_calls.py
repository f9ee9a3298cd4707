"""Processes compare what they run, hold and pass: each kind of difference is said by all of them,
and what may differ is not.
"""

import threading

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from runtime.call_cost import call_cost

from aliquot.core import PlanMismatchError
from aliquot.graph import capture
from aliquot.runtime._same_calls import _shortened
from aliquot.runtime.transport import _comparison, describe
from aliquot.runtime.transport._calls import END, Call, Calls
from aliquot.runtime.transport._describe import describe_whole, digest
from aliquot.runtime.transport._given import Given, differences
from aliquot.runtime.transport._settings import settings_lines


def in_processes(monkeypatch, *functions):
    """The message that each of these functions raises, each in a process of its own: in a thread,
    with exchanges through memory.
    """
    count, here = len(functions), threading.local()
    barrier, passed = threading.Barrier(count, timeout=60), [b""] * count

    def exchange(value, kind):
        passed[here.process] = msgspec.msgpack.encode(value)
        barrier.wait()
        values = [msgspec.msgpack.decode(data, type=kind) for data in passed]
        barrier.wait()
        return values

    monkeypatch.setattr(_comparison, "exchange", exchange)
    said = [""] * count

    def run(process):
        here.process = process
        try:
            functions[process]()
        except PlanMismatchError as error:
            said[process] = str(error)
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def trace(rate=0.1, mask=1.0, activation=jnp.tanh, rows=8, path="x", decay=0.0):
    held = np.full(4, mask, np.float32)

    def train_step(w, batch):
        loss = lambda w: jnp.mean((activation(batch[path] @ w) * held) ** 2)  # noqa: E731
        return w - rate * (jax.grad(loss)(w) + decay * w), loss(w)

    return capture(train_step, np.ones((4, 4), np.float32), {path: np.ones((rows, 4), np.float32)})


STEPS = [
    ({}, []),
    (
        {"rate": 0.2},
        ["other operators in its traced step", "mul of 0.1, float32", "of 0.2,", "train_step"],
    ),
    ({"decay": 0.5}, ["operators in its traced step", "mul of 0.5, float32"]),
    ({"activation": jnp.sin}, ["tanh of float32[8, 4]", "sin of float32[8, 4]"]),
    ({"mask": 2.0}, ["arrays that its step holds", "beginning 1.0, 1.0", "beginning 2.0, 2.0"]),
    ({"rows": 16}, ["takes batch.x as float32[8, 4]", "takes batch.x as float32[16, 4]"]),
    ({"path": "z"}, ["arguments or results", "batch.x", "batch.z"]),
]


@pytest.mark.parametrize(("other", "words"), STEPS, ids=lambda case: str(case)[:40])
def test_traced_steps_are_compared_with_their_constants(other, words, monkeypatch):
    graphs = [trace(), trace(**other), trace()]
    said = in_processes(
        monkeypatch, *[lambda g=g: _comparison.agree_on_step(g, None) for g in graphs]
    )
    assert said[0] == said[1] == said[2]
    assert all(word in said[0] for word in words) and bool(said[0]) == bool(words)
    assert "process 2" not in said[0] and (not words or "process 1 has other" in said[0])


def make(key, scale):
    return jax.random.normal(key, (4, 4)) * scale


def make_otherwise(key, scale):
    return jax.random.uniform(key, (4, 4)) * scale


INITS = [
    ((make, 0, 1.0), []),
    (
        (make_otherwise, 0, 1.0),
        ["in what it calls in step.init", "jit(_normal) of key<fry>[] at test_same_calls.py"],
    ),
    ((make, 1, 1.0), ["the key of process 1", "beginning 0, 0", "beginning 0, 1"]),
    ((make, 0, 2.0), ["that are no arrays", "scale = 1.0", "scale = 2.0"]),
]


@pytest.mark.parametrize(("other", "words"), INITS, ids=["same", "function", "key", "number"])
def test_functions_that_make_the_state_are_compared(other, words, monkeypatch):
    def compare(fn, seed, scale):
        key = jax.random.key(seed)
        traced = jax.make_jaxpr(lambda key: fn(key, 1.0))(key)
        _comparison.agree_on_init(None, traced, {"the key": key}, {"scale": scale})

    said = in_processes(monkeypatch, lambda: compare(make, 0, 1.0), lambda: compare(*other))
    assert said[0] == said[1] and bool(said[0]) == bool(words)
    assert all(word in said[0] for word in words)


class Decided:
    """Stands for a plan: these are its decisions."""

    def __init__(self, *lines):
        self._lines = lines

    def decisions(self):
        return self._lines


@pytest.mark.parametrize(
    ("axis", "is_traced", "words"),
    [
        # The first call compares the rest.
        ("x", True, []),
        ("y", True, ["num_micro_batches = 4", "= (y)", "tanh of", "sin of"]),
        ("y", False, ["num_micro_batches = 4", "= (y)"]),
    ],
    ids=["not elsewhere", "elsewhere", "elsewhere, of a plan that was loaded"],
)
def test_why_states_would_lie_elsewhere_is_said_before_they_are_made(
    axis, is_traced, words, monkeypatch
):
    traced = jax.make_jaxpr(lambda: jnp.ones(4))()

    def compare(graph, micro_batches, axis):
        plan = Decided(f"num_micro_batches = {micro_batches}", f"stages[0].shardings.w = ({axis})")
        _comparison.agree_on_init(plan, traced, {}, {}, graph)

    said = in_processes(
        monkeypatch,
        lambda: compare(trace(), 2, "x"),
        lambda: compare(trace(activation=jnp.sin) if is_traced else None, 4, axis),
    )
    assert said[0] == said[1] and bool(said[0]) == bool(words)
    assert all(word in said[0] for word in words)
    assert ("operators in its traced step" in said[0]) == ("tanh of" in words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_default_prng_impl", "rbg"),
        ("jax_threefry_partitionable", False),
        ("jax_enable_x64", True),
        ("jax_default_matmul_precision", "highest"),
        ("jax_random_seed_offset", 3),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_disable_jit", True),
    ],
)
def test_settings_that_change_numbers_are_compared(name, value):
    plain, before = settings_lines(), getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        found = [line for line in settings_lines() if line not in plain]
        assert found == [f"{name} = {getattr(jax.config, name)}"] or before == value
    finally:
        jax.config.update(name, before)


def test_settings_of_a_context_and_of_xla_are_compared(monkeypatch):
    plain = settings_lines()
    with jax.default_matmul_precision("float32"), jax.threefry_partitionable(False):
        assert len({*settings_lines()} - {*plain}) == 2
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_a=2 --xla_b --xla_dump_to=/here")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert [line for line in settings_lines() if line not in plain] == [
        "0 = set (in NVIDIA_TF32_OVERRIDE)",
        "--xla_a = 2 (in XLA_FLAGS)",
        "--xla_b = set (in XLA_FLAGS)",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_debug_nans", True),
        ("jax_log_compiles", True),
        ("jax_compilation_cache_dir", "/nowhere"),
        ("jax_traceback_filtering", "off"),
        ("jax_enable_checks", True),
    ],
)
def test_settings_that_change_no_numbers_may_differ(name, value):
    plain, before = settings_lines(), getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        assert settings_lines() == plain
    finally:
        jax.config.update(name, before)


def test_lines_in_another_order_and_long_texts_are_said(monkeypatch):
    said = in_processes(
        monkeypatch,
        lambda: _comparison.agree({"order": ["a", "b"], "long": [f"a {k}" for k in range(99)]}),
        lambda: _comparison.agree({"order": ["b", "a"], "long": ["b" * 9999], "new": ["c"]}),
    )
    assert said[0] == said[1] and "has other order than process 0: the same in another" in said[0]
    assert "process 0: a 0; a 1; a 2; ...; process 1: bbb" in said[0] and len(said[0]) < 1700
    assert "has other new than process 0: process 1: c" in said[0]


X = np.arange(12, dtype=np.float32).reshape(4, 3)


def one_device(x=X):
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), "d"), PartitionSpec())


def given(x, *, is_state=False, in_full=False, dtype=np.float32, shape=X.shape):
    return describe(x, shape, dtype, (one_device(),), is_state=is_state, in_full=in_full)


OTHER = X + (X == 11)
PASSED = [
    ("the same", X, X.copy(), False),
    ("another order in memory", X, np.asfortranarray(X), False),
    ("not contiguous", X, np.repeat(X, 2, axis=0)[::2], False),
    ("64 bits that JAX converts", X, X.astype(np.float64), False),
    ("an array of JAX", X, jnp.asarray(X), False),
    ("one other number", X, OTHER, True),
    ("another order of rows", X, X[::-1], True),
    ("half of it", X, X[:2], True),
    ("not a number", X, np.where(X == 5, np.nan, X).astype(np.float32), True),
    ("an array of JAX with other numbers", X, jnp.asarray(OTHER), True),
]


@pytest.mark.parametrize(
    ("a", "b", "differ"), [case[1:] for case in PASSED], ids=[case[0] for case in PASSED]
)
@pytest.mark.parametrize("in_full", [False, True])
def test_host_arrays_are_compared_by_what_the_step_gets(a, b, differ, in_full):
    jax.block_until_ready(b)
    found = differences({0: {"x": given(a, in_full=in_full)}, 1: {"x": given(b, in_full=in_full)}})
    assert bool(found) == differ
    if differ:
        assert found[0].startswith("x of process 1 is not that of process 0: process 0: float32[4,")


def test_of_large_arrays_elements_over_all_of_it_are_read():
    large = np.zeros((512, 1024), np.float32)
    other = large.copy()
    other[:, 500:600] = 1
    assert digest(large) != digest(other) and digest(large, 2**18) != digest(other, 2**18)
    assert digest(large, 2**18) == digest(np.asfortranarray(large), 2**18)
    assert digest(np.array(["a"], object)) != digest(np.array(["b"], object))


def test_keys_of_other_numbers_or_kinds_differ():
    keys = [jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg")]
    same, other, kind = [{"key": describe_whole(key)} for key in keys]
    assert not differences({0: same, 1: same})
    assert "beginning 0, 1" in differences({0: same, 1: other})[0]
    assert "key<rbg>[]" in differences({0: same, 1: kind})[0]


def rows(which, text="", place="0:2,0:3"):
    return Given(kind="float32[2, 3]", rows=which, digests={place: text} if text else {})


@pytest.mark.parametrize(
    ("passed", "words"),
    [
        # Each its own rows: nothing is the same but where several hold the same rows.
        ([rows("own", "a", "0:2,0:3"), rows("own", "b", "2:4,0:3")], []),
        ([rows("own", "a"), rows("own", "a"), rows("own", "b", "2:4,0:3")], []),
        ([rows("own", "a"), rows("own", "b")], ["x of process 1 is not that of process 0"]),
        ([rows("own", "a"), rows("own", "c", "2:4,0:3"), rows("own", "b")], ["of process 2"]),
        ([rows("all"), rows("own")], ["all of it", "as its own part"]),
        ([rows("all"), rows(""), rows("own")], ["x of process 2 is not that of process 0"]),
        ([rows("all", "a")] * 2 + [rows("all", "b")] * 2, ["x of processes 2, 3 is not that of"]),
        ([rows("all", "a"), rows("all", "a")], []),
        ([rows("all"), rows("all", "a")], []),
        ([rows("all", "b"), rows("all", "a")], ["(and differs later)"]),
    ],
)
def test_own_rows_are_compared_where_several_hold_them(passed, words):
    found = differences({k: {"x": given} for k, given in enumerate(passed)})
    assert bool(found) == bool(words) and all(word in found[0] for word in words)


def test_a_state_from_the_host_is_passed_by_all_or_none():
    state, x = given(X, is_state=True), given(X)
    assert state.is_restored and not x.is_restored
    assert not differences({0: {"w": state, "x": x}, 1: {"w": state, "x": x}})
    (found,) = differences({0: {"x": x}, 1: {"w": state, "x": x}, 2: {"x": x}})
    assert found.startswith("process 1 passes a state from the host, such as w = float32[4, 3]")
    assert "processes 0, 2 what the last call or step.init returned" in found
    # What a call left on the devices is not read again.
    home = one_device()
    placed = jax.device_put(X, home)
    assert describe(placed, X.shape, X.dtype, (home,), is_state=True, in_full=False) is None


def noted(*calls):
    """The messages that come of calls `(process, what, given)`."""
    record = Calls(2)
    return [record.note(k, Call(what=what, given=given)) for k, what, given in calls], record


def test_calls_are_compared_in_their_order_whoever_comes_first():
    a, b = {"x": given(X)}, {"x": given(OTHER)}
    said, record = noted(
        (0, "f", a), (0, "f", b), (1, "f", a), (0, "g", {}), (1, "f", b), (1, "g", {})
    )
    assert not any(said) and record.settle(0)
    said, record = noted((1, "f", a), (0, "f", a), (1, "f", a))
    assert not any(said) and not record.settle(0)
    assert "the same (f): x of process 1 is not" in record.note(0, Call(what="f", given=b))


@pytest.mark.parametrize("first", [0, 1])
def test_other_calls_and_early_ends_are_said(first):
    calls = [(0, "train_step", {}), (1, END, {})]
    said, _ = noted(calls[first], calls[1 - first])
    assert said[0] == ""
    assert (
        "process 1 goes on with the end of its run, process 0 with train_step" in said[1]
        and "in the same order, and start all again" in said[1]
    )


def test_many_arrays_from_the_host_fit_into_one_report():
    state = {f"params.layers[{k}].attention.query": given(X, is_state=True) for k in range(3000)}
    batch = {"batch.x": given(X)}
    odd = {"params.layers[7].attention.query": given(OTHER, is_state=True)}
    here, there, other = [
        _shortened(passed) for passed in (state | batch, state | odd | batch, state | batch)
    ]
    assert len(msgspec.msgpack.encode(Call(what="step", given=here))) < 20_000
    assert not differences({0: here, 1: other})
    (found,) = differences({0: here, 1: there})
    assert found.startswith(
        "one of 2937 arrays from params.layers[0].attention.query on of process"
    )
    (found,) = differences({0: here, 1: batch})
    assert "process 0 passes a state from the host" in found
    own = {f"batch[{k}]": rows("own", str(k)) for k in range(99)}
    assert len(_shortened(own)) == 64 and _shortened(batch) == batch


def test_a_call_of_a_demo_costs_less_than_a_millisecond():
    """On a machine in use half of it; other tests use the machine as well."""
    assert min(call_cost(30)[0] for _ in range(3)) < 1e-3
