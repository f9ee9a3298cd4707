"""What cannot be captured says so; what the user's own code raises comes through as it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph.step_base import batch, mlp_params, mse, sgd

import aliquot as aq
from aliquot.core import CaptureError, InputError
from aliquot.graph import capture, evaluate


def train_step(params, batch):
    return sgd(params, jax.grad(mse)(params, batch))


def test_no_function():
    with pytest.raises(CaptureError, match="must be a function, got a dict"):
        capture({"a": 1}, jnp.ones(3))


def test_no_arrays():
    with pytest.raises(CaptureError, match="train_step was given no arrays"):
        capture(train_step)


def test_arrays_that_cannot_be_are_refused_by_name():
    wrong = {
        "x": jax.ShapeDtypeStruct(("16", 65), jnp.float32),
        "y": jax.ShapeDtypeStruct((-1, 65), jnp.float32),
        "z": np.array(["a"]),
    }
    with pytest.raises(CaptureError) as caught:
        capture(train_step, mlp_params(), wrong)
    for said in (
        "batch.x has the shape ('16', 65); sizes are whole numbers from 0",
        "batch.y has the shape (-1, 65)",
        "batch.z has the dtype <U1, which JAX does not have",
        "such as jax.ShapeDtypeStruct((16, 65), jnp.float32)",
    ):
        assert said in str(caught.value)
    with pytest.raises(CaptureError, match=r"w has the shape \(2\.0,\)"):
        aq.parallelize(train_step, method=aq.DataParallel())(
            {"w": jax.ShapeDtypeStruct((2.0,), "float32")}, batch()
        )


def test_a_note_says_what_the_step_was_given():
    with pytest.raises(TypeError) as caught:
        capture(train_step, mlp_params(), {"x": jnp.ones((3, 5)), "y": "text"})
    (note,) = [note for note in caught.value.__notes__ if "aliquot" in note]
    assert note.endswith("batch.x float32[3, 5]; batch.y, a str and no array.")


def test_a_batch_without_rows_has_nothing_to_split():
    none = jax.tree.map(lambda a: jax.ShapeDtypeStruct((0, *a.shape[1:]), a.dtype), batch())
    with pytest.raises(InputError, match="has no rows, .* over 8 devices. Pass .* such as 8"):
        aq.plan(
            train_step,
            mlp_params(),
            none,
            cluster=aq.Cluster.preset("8xcpu"),
            method=aq.DataParallel(),
        )


def test_collectives_over_devices():
    def averaged(params, batch):
        return sgd(params, jax.lax.pmean(jax.grad(mse)(params, batch), "devices"))

    with pytest.raises(NameError, match="devices") as caught:
        capture(averaged, mlp_params(), batch())
    assert any("Take out collectives over devices" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_users_own_error(wrap):
    class OwnError(Exception):
        pass

    error = OwnError("mine")

    def broken(params, batch):
        raise error

    with pytest.raises(OwnError) as caught:
        capture(wrap(broken), mlp_params(), batch())
    assert caught.value is error


def test_users_own_error_with_numbers_among_the_arguments():
    def broken(state):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(broken, {"w": jnp.ones(3), "rate": 0.1})


def test_a_string_is_no_array():
    def named(params):
        return {"loss": params["w"].sum(), "info": ("fine", {"name": "run", "more": b"x"})}

    with pytest.raises(CaptureError) as caught:
        capture(named, {"w": jnp.ones(3)})
    message = str(caught.value)
    assert "named returns something that is no array" in message
    for part in (".info[0] is a str", ".info[1].name is a str", ".info[1].more is a bytes"):
        assert part in message


def test_a_lone_string_is_no_array():
    with pytest.raises(CaptureError, match="the result itself is a str"):
        capture(lambda x: "done", jnp.ones(3))


def test_wrong_number_of_arrays():
    graph = capture(train_step, mlp_params(), batch())
    with pytest.raises(InputError, match="takes 6 arrays and is given 1"):
        evaluate(graph, [jnp.ones(3)])


def test_other_arguments():
    graph = capture(train_step, mlp_params(), batch())
    with pytest.raises(CaptureError, match=r"\(params, batch\).*\(params\)"):
        graph.calling.flatten((mlp_params(),), {})
