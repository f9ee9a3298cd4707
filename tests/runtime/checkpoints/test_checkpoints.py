"""Checkpoints in one process: what is saved under one plan is restored under others, as NumPy, and
by Orbax alone; what does not fit is refused.
"""

import asyncio
import errno
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from runtime.pipeline_worker import batch_of, init, train_step
from runtime.pipelines import pipeline
from runtime.planned import parallel
from runtime.test_pipeline_scan import in_stages

import aliquot as aq
from aliquot.core import InputError, MissingExtraError
from aliquot.runtime import PiecedArray
from aliquot.runtime.checkpoints import _handler, chunk_shape, leaf_of

BAR = 1e-12


def shapes():
    return jax.eval_shape(init, jax.random.key(0))


def trained(step, state, first, stop):
    losses = []
    for number in range(first, stop):
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def stored(leaf):
    """An array as a checkpoint holds it."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_equal(found, wanted):
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert len(found) == len(wanted)
    for mine, theirs in zip(map(stored, found), map(stored, wanted), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        np.testing.assert_array_equal(mine, theirs)


def test_a_run_goes_on_under_any_plan_as_if_it_had_never_stopped(tmp_path, x64):
    """ZeRO-3 on eight devices, then all of them with the batch alone, then two stages, then three
    in reverse, and the plain step at last.
    """
    plain, wanted = trained(jax.jit(train_step), init(jax.random.key(0)), 0, 5)
    step = parallel(train_step, shapes(), batch_of(0), method=aq.Zero3Parallel())
    state, losses = trained(step, step.init(init, jax.random.key(0)), 0, 1)
    others = [
        parallel(train_step, shapes(), batch_of(0), method=aq.DataParallel()),
        pipeline(train_step, shapes(), batch_of(0), sizes=(2, 2), layers=4),
        pipeline(train_step, shapes(), batch_of(0), sizes=(1, 1, 2), layers=4, backwards=True),
    ]
    for number, other in enumerate(others, 1):
        step.save(state, tmp_path, number=number)
        step, saved = other, state
        state = step.restore(tmp_path)
        assert_equal(state, saved)
        places = step.shardings
        assert state["params"]["embed"].sharding == places["state.params.embed"]
        state, more = trained(step, state, number, number + 1)
        losses += more
    step.save(state, tmp_path, number=4)
    restored = aq.Checkpoints(tmp_path).restore(shapes())
    assert_equal(restored.state, state)
    assert isinstance(restored.state["params"]["embed"], np.ndarray)
    key = jax.random.wrap_key_data(jnp.asarray(restored.state["key"]))
    state, more = trained(jax.jit(train_step), restored.state | {"key": key}, 4, 5)
    assert losses + more == pytest.approx(wanted, rel=BAR)
    assert jax.tree.structure(state) == jax.tree.structure(plain)


def scanned(state, batch):
    """Three layers of a stack, with momentum."""

    def loss_of(params):
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])[0]
        return jnp.mean((x @ params["head"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    speed = jax.tree.map(lambda v, g: 0.9 * v + g, state["speed"], gradients)
    params = jax.tree.map(lambda p, v: p - 0.1 * v, state["params"], speed)
    return {"params": params, "speed": speed}, {"loss": loss}


def test_an_array_in_pieces_is_stored_as_one_and_restored_in_other_pieces(tmp_path):
    random = np.random.default_rng(0)
    params = {
        "layers": random.normal(size=(5, 4, 4)).astype("f"),
        "head": random.normal(size=(4, 2)).astype("f"),
    }
    state = {"params": params, "speed": jax.tree.map(np.zeros_like, params)}
    batch = random.normal(size=(8, 4)).astype("f")
    two = in_stages(scanned, state, batch, bounds=(0, 2, 5), sizes=(2, 1))
    after, _ = two(state, batch)
    assert isinstance(after["params"]["layers"], PiecedArray)
    two.save(after, tmp_path)
    three = in_stages(scanned, state, batch, bounds=(0, 1, 4, 5), sizes=(1, 2, 1))
    again = three.restore(tmp_path)
    assert again["params"]["layers"].bounds == (0, 1, 4, 5)
    assert_equal(again, after)
    whole = aq.Checkpoints(tmp_path).restore().state
    assert_equal(whole, after)
    more = {"params": {**again["params"], "adapter": np.ones(3)}}
    partly = aq.Checkpoints(tmp_path).restore(more, partly=True)
    assert partly.new == ("params.adapter",)
    assert_equal(partly.state["params"]["layers"].pieces, again["params"]["layers"].pieces)
    wanted, found = two(after, batch)[1], three(again, batch)[1]
    assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-6)


def mixed(mesh):
    """Arrays of many types and shapes, spread over devices and on the host."""
    rows = NamedSharding(mesh(4, 2), PartitionSpec("x", "y"))
    random = np.random.default_rng(0)
    return {
        "bfloat16": jax.device_put(random.normal(size=(8, 6)).astype(jnp.bfloat16), rows),
        "int8": jax.device_put(random.integers(-9, 9, (4, 2)).astype(np.int8), rows),
        "flags": [np.array([True, False]), jnp.asarray(3, jnp.int32)],
        "none": np.zeros((0, 3), np.float32),
        "keys": jax.random.split(jax.random.key(3), 4),
        "rbg": jax.random.key(1, impl="rbg"),
    }


def test_types_come_back_as_they_were(tmp_path, mesh):
    tree = mixed(mesh)
    columns = NamedSharding(mesh(2), PartitionSpec(None, "x"))
    with aq.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(None, tree, 7, meta={"place": [1, 2]})
        restored = checkpoints.restore(tree)
        assert restored.number == 7 and restored.meta == {"place": [1, 2]}
        assert_equal(restored.state, tree)
        assert restored.state["rbg"].dtype == tree["rbg"].dtype
        moved = checkpoints.restore(
            {**tree, "bfloat16": jax.ShapeDtypeStruct((8, 6), jnp.bfloat16, sharding=columns)}
        )
        assert_equal(moved.state, tree)
        assert moved.state["bfloat16"].sharding == columns
        record = checkpoints.record(7)
    assert [str(a) for a in record.arrays if a.path == "keys"] == ["key<fry>[4]"]
    assert record.versions.keys() == {"python", "aliquot", "jax", "orbax-checkpoint"}


def test_orbax_alone_reads_what_a_pipeline_wrote(tmp_path, mesh):
    step = pipeline(train_step, shapes(), batch_of(0), sizes=(2, 2), layers=4)
    state, _ = trained(step, step.init(init, jax.random.key(0)), 0, 1)
    step.save(state, tmp_path, number=3)
    whole = NamedSharding(mesh(8), PartitionSpec())
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes()
    )
    with ocp.CheckpointManager(tmp_path, item_names=("state", "meta")) as manager:
        assert manager.latest_step() == 3
        found = manager.restore(
            3,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore()
            ),
        )
    assert_equal(found.state, state)
    assert found.meta["number"] == 3
    assert found.state["key"].dtype == state["key"].dtype


def test_nnx_objects_are_saved_as_their_arrays(tmp_path):
    def train(model, batch):
        gradient = nnx.grad(lambda model: jnp.mean(model(batch) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), gradient))
        return {"sum": jnp.sum(batch)}

    model, batch = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), np.ones((8, 4), np.float32)
    step = parallel(train, model, batch, method=aq.Zero3Parallel())
    step(model, batch)
    step.save(model, tmp_path)
    kernel = np.asarray(model.kernel[...])
    step(model, batch)
    restored = step.restore(tmp_path)
    assert isinstance(restored, nnx.Linear)
    np.testing.assert_array_equal(np.asarray(restored.kernel[...]), kernel)
    assert aq.Checkpoints(tmp_path).restore().state.keys() == {"bias", "kernel"}


def pair(params, moment, batch):
    """A step with two state arguments."""
    loss, gradient = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)
    moment = {"w": 0.9 * moment["w"] + gradient["w"]}
    return {"w": params["w"] - moment["w"]}, moment, loss


def test_a_state_of_several_arguments_is_a_tuple(tmp_path):
    state = ({"w": np.ones((4, 4), np.float32)}, {"w": np.zeros((4, 4), np.float32)})
    batch = np.ones((8, 4), np.float32)
    step = parallel(pair, *state, batch, method=aq.DataParallel())
    *after, _ = step(*state, batch)
    step.save(tuple(after), tmp_path)
    restored = step.restore(tmp_path)
    assert isinstance(restored, tuple)
    assert_equal(restored, after)
    assert aq.Checkpoints(tmp_path).restore().state.keys() == {"params", "moment"}


def test_numbers_are_kept_skipped_replaced_and_dropped(tmp_path):
    tree = {"w": np.arange(3.0, dtype=np.float32)}
    with aq.Checkpoints(tmp_path / "new", every=2, keep=2) as checkpoints:
        assert checkpoints.restore(tree) is None
        saved = [checkpoints.save(None, tree, number) for number in range(7)]
        assert saved == [True, False] * 3 + [True]
        assert checkpoints.numbers() == (4, 6)
        assert checkpoints.save(None, {"w": tree["w"] + 1}, 6)
        assert checkpoints.restore(tree).state["w"].tolist() == [1, 2, 3]
        assert checkpoints.save(None, tree, 7, force=True)
        assert checkpoints.numbers() == (6, 7)
        with pytest.raises(InputError, match=r"holds later ones \(7\).*drop_later\(6\)"):
            checkpoints.save(None, tree, 6)
        with pytest.raises(InputError, match=r"there is no checkpoint 5: .* holds 6, 7"):
            checkpoints.restore(tree, 5)
        assert checkpoints.drop_later(6) == (7,)
        assert checkpoints.save(None, tree, 6)
        assert checkpoints.numbers() == (6,)


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    step = parallel(train_step, shapes(), batch_of(0), method=aq.Zero3Parallel())
    state, _ = trained(step, step.init(init, jax.random.key(0)), 0, 1)
    wanted = jax.tree.map(stored, state)
    with aq.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, state, 1)
        trained(step, state, 1, 3)
        with pytest.raises(InputError, match="no longer exists: a call has replaced moments"):
            checkpoints.save(step, state, 2)
        assert_equal(checkpoints.restore(step).state, wanted)


def test_another_state_is_refused_with_both_shapes(tmp_path):
    tree = {"params": {"w": np.zeros((4, 4), np.float32), "b": np.zeros(4, np.float32)}}
    with aq.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(None, tree, 1)
        other = {"params": {"w": np.zeros((8, 4), np.float32), "c": np.zeros(4, np.int32)}}
        with pytest.raises(InputError) as caught:
            checkpoints.restore(other)
    text = str(caught.value)
    assert "params.w is float32[4, 4] in the checkpoint and float32[8, 4] here" in text
    assert "params.c (int32[4]) is not in the checkpoint" in text
    assert "params.b (float32[4]) is in the checkpoint and not here" in text


def test_what_a_checkpoint_has_of_a_tree_is_restored_and_the_rest_stays(tmp_path, mesh):
    rows = NamedSharding(mesh(4, 2), PartitionSpec("x"))
    base = [np.full((4, 2), k, np.float32) for k in (1, 2)]
    with aq.Checkpoints(tmp_path) as checkpoints:
        saved = {"params": {"base": base, "head": np.ones(3)}, "opt": (np.zeros(9), 5)}
        checkpoints.save(None, saved, 7, meta={"name": "base"})
        adapters = [jnp.zeros((4, 1)), jnp.ones((1, 2))]
        into = {"base": [jax.device_put(x * 0, rows) for x in base], "adapters": adapters}
        found = checkpoints.restore({"params": into}, partly=True)
        assert (found.number, found.meta) == (7, {"name": "base"})
        assert_equal(found.state["params"], {"base": base, "adapters": adapters})
        assert all(x.sharding == rows for x in found.state["params"]["base"])
        assert found.new == ("params.adapters[0]", "params.adapters[1]")
        assert set(found.left_out) == {"params.head", "opt[0]", "opt[1]"}
        # No more than it needs.
        assert found.read_bytes == sum(x.nbytes for x in base)
        into["base"][1], into["adapters"] = jnp.zeros((4, 3)), jnp.zeros(2, "bfloat16")
        with pytest.raises(InputError, match=r"params.base\[1\] is float32\[4, 2\] in .*\[4, 3\]"):
            checkpoints.restore({"params": into}, partly=True)
        with pytest.raises(InputError, match=r"none of the arrays.*\n.*wanted are params.x"):
            checkpoints.restore({"params": {"x": adapters[0]}}, partly=True)
        with pytest.raises(InputError, match="partly into a tree of arrays"):
            checkpoints.restore(partly=True)


def test_floats_of_another_width_are_converted_and_that_is_said(tmp_path, mesh):
    rows = NamedSharding(mesh(4, 2), PartitionSpec("x"))
    w = np.random.default_rng(0).standard_normal((4, 2), np.float32)
    saved = {"w": w, "half": w.astype("bfloat16"), "count": np.arange(3), "key": jax.random.key(1)}
    with aq.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(None, saved, 1)
        into = {
            "w": jax.device_put(jnp.zeros((4, 2), jnp.bfloat16), rows),
            "half": np.zeros((4, 2), np.float32),
            "count": np.zeros(3, int),
            "key": jax.random.key(0),
        }
        found = checkpoints.restore(into, partly=True)
        assert found.state["w"].sharding == rows
        np.testing.assert_array_equal(found.state["w"], w.astype("bfloat16"))
        np.testing.assert_array_equal(found.state["half"], w.astype("bfloat16").astype("float32"))
        np.testing.assert_array_equal(found.state["count"], np.arange(3))
        words = [jax.random.key_data(key) for key in (found.state["key"], saved["key"])]
        np.testing.assert_array_equal(*words)
        assert found.notes == ("1 array rounded from float32 to bfloat16: w.",)
        with pytest.raises(InputError, match="count is int64"):
            checkpoints.restore({**into, "count": np.zeros(3)}, partly=True)
        # A run goes on with the numbers that it had.
        with pytest.raises(InputError, match="w is float32"):
            checkpoints.restore(into)


def test_a_state_that_the_step_does_not_take_is_not_saved(tmp_path):
    step = pipeline(train_step, shapes(), batch_of(0), sizes=(1, 1), layers=4)
    with pytest.raises(InputError, match="cannot save a state that train_step does not take"):
        step.save({"params": init(jax.random.key(0))["params"]}, tmp_path)


def test_an_unprepared_step_is_told_to_prepare(tmp_path):
    aq.Checkpoints(tmp_path).restore()
    tree = {"w": np.zeros(3, np.float32)}
    with aq.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(None, tree, 1)
    with pytest.raises(InputError, match=r"step.prepare\(...\) with arrays or shapes"):
        aq.parallelize(train_step).restore(tmp_path)


def edited(folder, number, **changes):
    path = folder / str(number) / "meta" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_not_complete_is_skipped_and_said(tmp_path):
    tree = {"w": np.arange(3.0, dtype=np.float32)}
    with aq.Checkpoints(tmp_path) as checkpoints:
        for number in (1, 2, 3):
            checkpoints.save(None, tree, number)
        checkpoints.wait()
        (tmp_path / "4.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
        (tmp_path / "3" / "meta" / "metadata").write_text("{")
        (tmp_path / "2" / "state" / "manifest.ocdbt").unlink()
        assert checkpoints.unfinished() == ("4.orbax-checkpoint-tmp",)
        restored = checkpoints.restore(tree)
        assert restored.number == 1
        unfinished, damaged, incomplete = restored.skipped
        assert "4.orbax-checkpoint-tmp" in unfinished and "not written to its end" in unfinished
        assert "checkpoint 3" in damaged and "damaged record" in damaged
        assert "checkpoint 2" in incomplete and "2/state/manifest.ocdbt is missing" in incomplete
        with pytest.raises(InputError, match="checkpoint 2 .* is not complete"):
            checkpoints.restore(tree, 2)
        (tmp_path / "1" / "state" / "_METADATA").unlink()
        with pytest.raises(InputError, match="no checkpoint can be restored, 4 problems"):
            checkpoints.restore(tree)


def test_a_newer_format_is_refused(tmp_path):
    tree = {"w": np.arange(3.0, dtype=np.float32)}
    with aq.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(None, tree, 1)
        checkpoints.save(None, tree, 2)
        checkpoints.wait()
        edited(tmp_path, 2, format=99, versions={"aliquot": "9.1"})
        with pytest.raises(InputError, match=r"format 99, and was written by aliquot 9.1"):
            checkpoints.restore(tree)
        assert checkpoints.restore(tree, 1).number == 1


def test_damaged_arrays_are_an_error_that_names_the_others(tmp_path):
    tree = {"w": np.random.default_rng(0).normal(size=(64, 64))}
    with aq.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(None, tree, 1)
        checkpoints.save(None, tree, 2)
        checkpoints.wait()
        (data,) = (tmp_path / "2" / "state" / "ocdbt.process_0" / "d").iterdir()
        data.write_bytes(data.read_bytes()[:-5000])
        with pytest.raises(InputError, match="checkpoint 2 .* is not complete.*holds 1, 2"):
            checkpoints.restore(tree, 2)


def test_a_folder_that_cannot_be_written_is_said_at_every_save(tmp_path):
    (tmp_path / "file").write_text("")
    tree, said = {"w": np.zeros(3, np.float32)}, []
    checkpoints = aq.Checkpoints(tmp_path / "file" / "deeper", on_error=said.append)
    assert not checkpoints.save(None, tree, 1)
    assert not checkpoints.save(None, tree, 2)
    assert len(said) == 2 and "cannot save checkpoint 2" in said[1] and "Not a directory" in said[1]
    assert checkpoints.failures == tuple(said)
    with pytest.raises(
        InputError, match="the last checkpoint is missing: cannot save checkpoint 2"
    ):
        checkpoints.close()
    with pytest.raises(InputError, match="cannot save checkpoint 1 .*: it is a file"):
        aq.Checkpoints(tmp_path / "file").save(None, tree, 1)


def test_a_disk_that_fills_up_costs_only_that_checkpoint(tmp_path, monkeypatch):
    written, full = _handler._write_one, [False]

    async def write(*given):
        await asyncio.sleep(0)
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        await written(*given)

    monkeypatch.setattr(_handler, "_write_one", write)
    tree, said = {"w": np.zeros(3, np.float32)}, []
    with aq.Checkpoints(tmp_path, on_error=said.append) as checkpoints:
        for number in range(4):
            full[0] = number in (1, 2)
            assert checkpoints.save(None, tree, number)
            checkpoints.wait()
        assert len(said) == 2 and "checkpoint 2" in said[1] and "No space left on device" in said[1]
        assert checkpoints.numbers() == (0, 3) and checkpoints.unfinished() == ()
    full[0] = True
    with aq.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.save(None, tree, 4)
        with pytest.raises(InputError, match="cannot save checkpoint 4 .*No space left"):
            checkpoints.save(None, tree, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"number": -1}, "must not be negative"),
        ({"number": 1, "meta": {"x": object()}}, "must be plain data"),
        ({"number": 1, "meta": {"x": float("nan")}}, "must be plain data"),
    ],
)
def test_bad_arguments_of_save(tmp_path, given, message):
    with pytest.raises(InputError, match=message):
        aq.Checkpoints(tmp_path).save(None, {"w": np.zeros(3)}, **given)
    assert list(tmp_path.iterdir()) == []


def test_without_orbax_a_run_does_not_begin(monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.*\[train\]'"):
        aq.Checkpoints("x")


def test_bad_arguments():
    for given in ({"every": 0}, {"keep": 0}):
        with pytest.raises(InputError, match="must be at least 1"):
            aq.Checkpoints("x", **given)
    with pytest.raises(InputError, match=r"(?s)label is a str.*Save the rest as its `meta`"):
        aq.Checkpoints("x").save(None, {"w": np.zeros(3), "label": "a"}, 1)


@pytest.mark.parametrize(
    ("shape", "ends", "wanted"),
    [
        ((), [], ()),
        ((0, 3), [{0}, {0, 3}], (1, 3)),
        # Stages of unequal rows, on meshes of two and three devices.
        ((12, 6), [{0, 4, 6, 8, 10, 12}, {0, 6}], (2, 6)),
        ((1000, 7), [{0, 1000}, {0, 7}], (1000, 7)),
        ((4096, 1024), [{0, 4096}, {0, 1024}], (512, 128)),
        ((50257, 1024), [{0, 50257}, {0, 1024}], (1733, 128)),
    ],
)
def test_chunks_lie_within_blocks_and_are_many(shape, ends, wanted):
    assert chunk_shape(shape, ends, 4) == wanted


def test_each_block_is_written_once_by_the_processes_in_turn(mesh):
    spread = NamedSharding(mesh(4, 2), PartitionSpec("y"))
    array = jax.device_put(np.arange(8.0), spread)
    for turn in (0, 3):
        leaf = leaf_of(array, turn)
        assert sorted(block for block, _ in leaf.blocks) == [((0, 4),), ((4, 8),)]
        for ((first, last),), data in leaf.blocks:
            np.testing.assert_array_equal(np.asarray(data), np.arange(8.0)[first:last])
            assert data.device == list(mesh(4, 2).devices[turn])[first // 4]
    assert leaf.chunks == (4,) and leaf.nbytes == array.nbytes


def test_many_arrays_are_few_files(tmp_path):
    tree = [np.full((100, 10), k, np.float32) for k in range(300)]
    with aq.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(None, tree, 1)
        checkpoints.wait()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) <= 12
        assert checkpoints.restore(tree).state[17][0, 0] == 17
