"""A step under a plan: the user's signature, the plain step's numbers, donated state, one exchange
of gradients.
"""

import copy
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from runtime.planned import build, parallel

import aliquot as aq
from aliquot import zoo
from aliquot.core import InputError, PlanMismatchError
from aliquot.graph import capture
from aliquot.planners import DataParallel, ShardParallel, Zero2Parallel, Zero3Parallel

SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "vocab_size": 32, "seq_len": 8}
WIDTHS = (12, 16, 8)


def model(name, *, dtype="float64", scan=False, recompute="block", rows=32, optimizer="sgd"):
    config = zoo.configure(
        name, **SMALL, **({"num_kv_heads": 2} if name.startswith("llama") else {})
    )
    return zoo.build(config, rows, dtype=dtype, scan=scan, recompute=recompute, optimizer=optimizer)


def tokens(work, seed=0):
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 32, x.shape).astype(x.dtype) for name, x in work.batch.items()}


def state_of(work):
    random = np.random.default_rng(2)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape) / 5, x.dtype), work.state)


def mlp_params():
    random = np.random.default_rng(0)
    return [
        {"w": random.normal(size=(a, b)).astype(np.float32) / 4, "b": np.zeros(b, np.float32)}
        for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)
    ]


def mlp_batch(rows=16):
    random = np.random.default_rng(1)
    return {
        name: random.normal(size=(rows, n)).astype(np.float32) for name, n in (("x", 12), ("y", 8))
    }


def train_mlp(params, batch, *, rate=0.1):
    """One step of gradient descent."""

    def loss_fn(params):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), {"loss": loss}


@pytest.fixture(scope="module")
def mlp_step():
    return parallel(train_mlp, mlp_params(), mlp_batch(), method=DataParallel())


# Each model, form, mesh, method and number of micro-batches at least once.
# Zero2Parallel leaves each device a single example at a time.
COVER = [
    pytest.param("gpt-125m", True, ShardParallel(mesh_shape=(4, 2)), 1, marks=pytest.mark.slow),
    ("gpt-125m", False, Zero2Parallel(), 4),
    ("llama-7b", True, ShardParallel(mesh_shape=(4, 2)), 4),
    ("llama-7b", True, Zero3Parallel(), 2),
]


@pytest.mark.parametrize(("name", "scan", "method", "num_micro_batches"), COVER)
def test_the_plain_numbers(name, scan, method, num_micro_batches, x64):
    work = model(name, scan=scan)
    step = build(capture(work.train_step, work.state, work.batch), method, num_micro_batches)
    state = state_of(work)
    check = step.check(state, tokens(work))
    # The bias of attention's keys has no gradient but rounding.
    off = [leaf for leaf in check.leaves if leaf.largest > 1e-12 * max(leaf.magnitude, 1e-6)]
    assert not off
    # The arguments of a check stay as they are.
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_gradients_cross_once_behind_the_loop():
    work = model("gpt-125m", dtype="float32", scan=True)
    step = build(capture(work.train_step, work.state, work.batch), DataParallel(), 4)
    reduces = [c for c in step.stats().collectives if c.kind in ("all-reduce", "reduce-scatter")]
    assert [(c.axes, c.in_loop) for c in reduces] == [(("x",), False)]
    moved = sum(c.num_bytes for c in step.stats().collectives)
    assert moved <= 4 * work.num_parameters + 64
    assert step.plan.stages[0].data_axes == ("x",)


def test_without_micro_batches_there_is_no_loop(mlp_step):
    assert " while(" not in mlp_step.as_text()
    assert (
        "while"
        in parallel(
            train_mlp, mlp_params(), mlp_batch(), method=DataParallel(), num_micro_batches=2
        ).as_text()
    )


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def remats(jaxpr):
    return sum(eqn.primitive.name in ("remat2", "checkpoint", "remat") for eqn in equations(jaxpr))


def barriers(jaxpr):
    return sum(
        bool(eqn.params.get("prevent_cse")) and bool(eqn.params.get("differentiated"))
        for eqn in equations(jaxpr)
    )


@pytest.mark.parametrize(("scan", "num_micro_batches"), [(False, 1), (True, 1), (False, 2)])
def test_as_many_optimization_barriers_as_the_plain_step(scan, num_micro_batches):
    work = model("gpt-125m", dtype="float32", scan=scan)
    step = build(
        capture(work.train_step, work.state, work.batch), DataParallel(), num_micro_batches
    )
    found = jax.make_jaxpr(step.runner.program.jitted)(*jax.tree.leaves((work.state, work.batch)))
    plain = jax.make_jaxpr(work.train_step)(work.state, work.batch)
    # Inside a scan nothing can be merged, and the model asks for no barriers.
    assert barriers(found.jaxpr) == barriers(plain.jaxpr) == (0 if scan else SMALL["num_layers"])
    assert remats(found.jaxpr) == remats(plain.jaxpr) > 0
    assert scan or "optimization_barrier" in step.lower().as_text()


def test_state_is_donated_and_aliased():
    work = model("llama-7b", dtype="float32", scan=True, optimizer="adamw")
    step = build(capture(work.train_step, work.state, work.batch), Zero3Parallel())
    state = step.init(work.init, jax.random.key(0))
    memory = step.stats().memory
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards[:1]
    )
    assert memory.alias_bytes == held
    new, metrics = step(state, tokens(work))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert metrics["loss"].shape == ()
    again, _ = step(new, tokens(work, 1))
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_state_is_born_where_it_belongs():
    work = model("llama-7b", dtype="float32", scan=True, optimizer="adamw")
    step = build(capture(work.train_step, work.state, work.batch), Zero3Parallel())
    state = step.init(work.init, jax.random.key(0))
    plain = jax.jit(work.init)(jax.random.key(0))
    paths = {i: s for i, s in step.shardings.items() if i.startswith("state.params")}
    assert state["params"]["head"]["kernel"].sharding == paths["state.params.head.kernel"]
    assert any(s.spec != jax.sharding.PartitionSpec(*[()] * len(s.spec)) for s in paths.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, plain)


def test_an_init_of_another_structure_is_told_where(mlp_step):
    with pytest.raises(
        PlanMismatchError, match=re.escape("params[0].b is made as float32[3]")
    ) as error:
        mlp_step.init(lambda: [{**layer, "b": jnp.zeros(3)} for layer in mlp_params()])
    assert len(error.value.violations) == 2
    with pytest.raises(PlanMismatchError, match=r"params\[1\]\.b is missing"):
        mlp_step.init(lambda: mlp_params()[:1])


def test_plain_arrays_stay_the_users(mlp_step):
    params = jax.tree.map(jnp.asarray, mlp_params())
    batch = mlp_batch()
    want, want_loss = train_mlp(params, batch)
    for _ in range(2):  # the same arguments again
        found, loss = mlp_step(params, batch)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, want
        )
        assert float(loss["loss"]) == pytest.approx(float(want_loss["loss"]), rel=1e-6)
    assert mlp_step.__name__ == "train_mlp"
    assert mlp_step.__doc__ == "One step of gradient descent."


def test_one_array_in_two_places(mlp_step):
    params, batch = mlp_step.place(mlp_params(), mlp_batch())
    params[0]["b"].block_until_ready()
    shared = [params[0], {"w": params[1]["w"], "b": params[1]["b"]}]
    new, _ = mlp_step(shared, batch)
    assert np.isfinite(np.asarray(new[0]["w"])).all()


def test_other_arguments_are_refused_all_at_once(mlp_step):
    batch = mlp_batch(8)
    batch["y"] = batch["y"].astype(np.int32)
    with pytest.raises(PlanMismatchError) as error:
        mlp_step(mlp_params(), batch)
    assert error.value.violations == (
        "batch.x is (8, 12), planned (16, 12)",
        "batch.y is int32, planned float32",
        "batch.y is (8, 8), planned (16, 8)",
    )
    with pytest.raises(PlanMismatchError, match=r"params\[2\]\.w is new"):
        mlp_step([*mlp_params(), mlp_params()[0]], mlp_batch())


def test_a_number_that_changes_is_an_argument_like_any_other():
    step = parallel(train_mlp, mlp_params(), mlp_batch(), rate=0.5, method=DataParallel())
    step(mlp_params(), mlp_batch(), rate=0.5)
    got, _ = step(mlp_params(), mlp_batch(), rate=0.25)
    expected, _ = train_mlp(mlp_params(), mlp_batch(), rate=0.25)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_lists_in_place_of_an_array_and_keys_without_type(mlp_step):
    lists = mlp_batch() | {"x": mlp_batch()["x"].tolist()}
    with pytest.raises(PlanMismatchError, match=r": batch\.x was one array and now holds 192 "):
        mlp_step(mlp_params(), lists)

    def noisy(params, batch, key):
        noise = jax.random.normal(key, batch["x"].shape)
        return train_mlp(params, batch | {"x": batch["x"] + noise})

    step = parallel(noisy, mlp_params(), mlp_batch(), jax.random.key(0), method=DataParallel())
    for key in (0, jax.random.PRNGKey(0)):
        with pytest.raises(PlanMismatchError, match=r"(?s)planned key.*as key: jax\.random\.key"):
            step(mlp_params(), mlp_batch(), key)


def test_a_whole_number_in_place_of_a_float():
    step = parallel(train_mlp, mlp_params(), mlp_batch(), rate=0.5, method=DataParallel())
    with pytest.raises(PlanMismatchError, match=r"(?s)rate is int32, planned.*Write rate as 1\.0"):
        step(mlp_params(), mlp_batch(), rate=1)
    with pytest.raises(PlanMismatchError, match=r"(?s)rate is bool, planned.*Plan it again"):
        step(mlp_params(), mlp_batch(), rate=np.bool_(True))


def test_a_static_argument_that_changes():
    by_rate = jax.jit(train_mlp, static_argnames="rate")
    step = parallel(by_rate, mlp_params(), mlp_batch(), rate=0.5, method=DataParallel())
    step(mlp_params(), mlp_batch(), rate=0.5)
    with pytest.raises(PlanMismatchError, match=r"rate, which is no array, was 0\.5 and is 0\.25"):
        step(mlp_params(), mlp_batch(), rate=0.25)


def test_too_few_devices():
    with pytest.raises(PlanMismatchError, match="the plan is for 8 devices .* there are 2"):
        build(
            capture(train_mlp, mlp_params(), mlp_batch()), DataParallel(), devices=jax.devices()[:2]
        )


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(12, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x))))


def train_in_place(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
    optimizer.update(model, grads)
    return loss


# Its functions belong to the identity of a call, so all networks share them.
ADAM = optax.adam(1e-2)


def make_net():
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, ADAM, wrt=nnx.Param)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_nnx_objects_change_in_place(num_micro_batches):
    net, optimizer = make_net()
    step = parallel(
        train_in_place,
        net,
        optimizer,
        mlp_batch(),
        method=DataParallel(),
        num_micro_batches=num_micro_batches,
    )
    plain, plain_optimizer = make_net()
    for _ in range(3):
        loss = step(net, optimizer, mlp_batch())
        want = train_in_place(plain, plain_optimizer, mlp_batch())
        assert float(loss) == pytest.approx(float(want), rel=1e-5)
    for a, b in zip(
        jax.tree.leaves(nnx.state(net, nnx.Param)),
        jax.tree.leaves(nnx.state(plain, nnx.Param)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert int(net.dropout.rngs.count[...]) == int(plain.dropout.rngs.count[...])


def test_nnx_objects_are_born_sharded():
    step = parallel(train_in_place, *make_net(), mlp_batch(), method=Zero3Parallel())
    net, optimizer = step.init(make_net)
    assert isinstance(net, Net)
    losses = [float(step(net, optimizer, mlp_batch())) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_metadata_does_not_wait(mlp_step):
    new, metrics = mlp_step(mlp_params(), mlp_batch())
    assert new[0]["w"].shape == (12, 16)
    assert metrics["loss"].dtype == jnp.float32
    assert new[0]["w"].sharding == mlp_step.shardings["params[0].w"]
    assert "all-reduce over x" in str(mlp_step.stats())


def test_changes_of_split_gather_nothing_on_the_way(capfd):
    """Asked for another split at once, the compiler replicates some arrays, and says so."""
    sizes = {
        "num_layers": 1,
        "hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 8,
        "ffn_size": 2048,
    }
    work = zoo.build(
        "llama-7b", 8, overrides=sizes | {"vocab_size": 2048, "seq_len": 32}, dtype="float32"
    )
    step = parallel(
        work.train_step, work.state, work.batch, method=ShardParallel(mesh_shape=(4, 2))
    )
    sides: list[dict] = [{}, {}]
    for side, uses in zip(
        sides, (step.plan.prediction.collectives, step.stats().collectives), strict=True
    ):
        for use in uses:
            side[use.kind, use.axes] = side.get((use.kind, use.axes), 0.0) + use.num_bytes
    # Of the planned sums over the vocabulary, one number for each of 8 x 32 tokens, the compiled
    # program has one less.
    sides[0]["all-reduce", ("x", "y")] -= 4 * 8 * 32
    assert sides[1] == pytest.approx(sides[0], rel=0.02)
    assert "rematerialization" not in capfd.readouterr().err


class Trainer:
    """A class with a training step of its own, and one that was written elsewhere."""

    elsewhere = aq.parallelize(train_mlp, method=DataParallel())

    def __init__(self, rate):
        self.rate = rate

    @aq.parallelize(method=DataParallel())
    def step(self, params, batch):
        return train_mlp(params, batch, rate=self.rate)


class Hurried(Trainer):
    @aq.parallelize(method=Zero3Parallel())
    def step(self, params, batch):
        return train_mlp(params, batch, rate=2 * self.rate)

    def slower(self, params, batch):
        return super().step(params, batch)


def test_decorated_methods_are_planned_for_each_object():
    def moved_by(step):
        after, _ = step(mlp_params(), mlp_batch())
        return float(jnp.abs(after[0]["w"] - mlp_params()[0]["w"]).sum())

    once = moved_by(lambda params, batch: train_mlp(params, batch, rate=0.1))
    trainer = Trainer(0.1)
    assert moved_by(trainer.step) == pytest.approx(once, rel=1e-4)
    assert moved_by(trainer.elsewhere) == pytest.approx(once, rel=1e-4)
    for other, times in ((copy.copy(trainer), 5), (copy.deepcopy(trainer), 7), (Trainer(0.1), 3)):
        other.rate = 0.1 * times
        assert moved_by(other.step) == pytest.approx(once * times, rel=1e-4)
        assert other.step is other.step is not trainer.step
    hurried = Hurried(0.1)
    assert moved_by(hurried.step) == pytest.approx(once * 2, rel=1e-4)
    assert moved_by(hurried.slower) == pytest.approx(once, rel=1e-4)
    assert hurried.step is hurried.step and hurried.step.plan.method == "zero3"


def test_an_object_that_cannot_keep_a_step_says_so():
    class Slotted:
        __slots__ = ()

        @aq.parallelize(method=DataParallel())
        def step(self, params, batch):
            return train_mlp(params, batch)

    with pytest.raises(InputError, match=r"__slots__ .*aliquot\.parallelize\(an_object\.step\)"):
        _ = Slotted().step
