"""Roles of integers: quantized weights are parameters as floating-point ones are; positions, masks,
keys and permutations are not.
"""

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq

WIDTH, ROWS, GROUP = 64, 16, 16
S = jax.ShapeDtypeStruct


def of(*shape, dtype=jnp.float32):
    return S(shape, dtype)


def int8_by_column(base):
    return base["q"].astype(jnp.float32) * base["scale"]


def int8_by_group(base):
    groups = base["q"].reshape(-1, GROUP, WIDTH).astype(jnp.float32)
    return ((groups - base["zero"][:, None, :]) * base["scale"][:, None, :]).reshape(WIDTH, WIDTH)


def packed(base):
    """Two numbers in each byte."""
    low, high = base["q"] & 15, base["q"] >> 4
    numbers = jnp.stack([low, high], axis=1).reshape(WIDTH, WIDTH).astype(jnp.float32)
    return (numbers - 8) * base["scale"]


def packed_in_words(base):
    shifts = 4 * jnp.arange(8, dtype=jnp.int32)
    numbers = (base["q"][:, None, :] >> shifts[None, :, None]) & 15
    return numbers.reshape(WIDTH, WIDTH).astype(jnp.float32) * base["scale"]


def codes(base):
    """Each code stands for a number in a small table."""
    return base["table"][base["q"].astype(jnp.int32)] * base["scale"]


SCALE = of(WIDTH)
QUANTIZED = {
    "int8": (int8_by_column, {"q": of(WIDTH, WIDTH, dtype=jnp.int8), "scale": SCALE}),
    "int4": (int8_by_column, {"q": of(WIDTH, WIDTH, dtype=jnp.int4), "scale": SCALE}),
    "groups": (
        int8_by_group,
        {
            "q": of(WIDTH, WIDTH, dtype=jnp.int8),
            "zero": of(WIDTH // GROUP, WIDTH),
            "scale": of(WIDTH // GROUP, WIDTH),
        },
    ),
    "packed": (packed, {"q": of(WIDTH // 2, WIDTH, dtype=jnp.uint8), "scale": SCALE}),
    "words": (packed_in_words, {"q": of(WIDTH // 8, WIDTH, dtype=jnp.int32), "scale": SCALE}),
    "codes": (
        codes,
        {"q": of(WIDTH, WIDTH, dtype=jnp.uint8), "table": of(16), "scale": SCALE},
    ),
}


def adapted(weights):
    """A step that trains a small addition to frozen weights."""

    def step(model, x):
        def loss(lora):
            return jnp.square(x @ weights(model["base"]) + (x @ lora["a"]) @ lora["b"]).mean()

        value, grads = jax.value_and_grad(loss)(model["lora"])
        return jax.tree.map(lambda w, g: w - 0.1 * g, model["lora"], grads), value

    return step


LORA = {"a": of(WIDTH, 4), "b": of(4, WIDTH)}


def roles(step, *args):
    return {item.path: item.role.value for item in aq.capture(step, *args).inputs}


@pytest.mark.parametrize("form", QUANTIZED)
def test_quantized_weights_are_parameters(form):
    weights, base = QUANTIZED[form]
    args = {"lora": LORA, "base": base}, of(ROWS, WIDTH)
    found = roles(adapted(weights), *args)
    assert found.pop("x") == "batch"
    assert set(found.values()) == {"parameter"}
    plan = aq.plan(
        adapted(weights),
        *args,
        cluster=aq.Cluster.preset("8xcpu"),
        method=aq.Zero3Parallel(),
    )
    assert any(plan.partition_specs()["model.base.q"])


def test_quantized_weights_in_the_state_are_parameters():
    """Frozen ones come back as they were; those that are trained depend on the gradients."""

    def step(state, x):
        def loss(w):
            return jnp.square((x @ int8_by_column(state["frozen"])) @ w).mean()

        w = int8_by_column(state["trained"])
        new = w - jax.grad(loss)(w)
        scale = jnp.abs(new).max(axis=0) / 127
        trained = {"q": jnp.round(new / scale).astype(jnp.int8), "scale": scale}
        return {"frozen": state["frozen"], "trained": trained, "count": state["count"] + 1}

    base = QUANTIZED["int8"][1]
    state = {"frozen": base, "trained": base, "count": of(dtype=jnp.int32)}
    found = roles(step, state, of(ROWS, WIDTH))
    assert found.pop("x") == "batch"
    assert found.pop("state.count") != "parameter"
    assert set(found.values()) == {"parameter"}


def test_rows_of_a_quantized_table_are_weights_and_a_table_of_rows_is_not():
    def step(w, tables, batch):
        def loss(w):
            ids = tables["order"][batch["ids"]]
            near = tables["neighbours"][ids]
            x = tables["q"][near].astype(jnp.float32).sum(axis=1) * tables["scale"]
            return jnp.square(x @ w).mean()

        return w - jax.grad(loss)(w)

    tables = {
        "order": of(100, dtype=jnp.int32),
        "neighbours": of(100, 3, dtype=jnp.int32),
        "q": of(100, WIDTH, dtype=jnp.int8),
        "scale": SCALE,
    }
    found = roles(step, of(WIDTH, WIDTH), tables, {"ids": of(ROWS, dtype=jnp.int32)})
    assert found == {
        "w": "parameter",
        "tables.order": "other",
        "tables.neighbours": "other",
        "tables.q": "parameter",
        "tables.scale": "parameter",
        "batch.ids": "batch",
    }


def sines(positions):
    return jnp.sin(positions[:, None] / 10.0 ** jnp.arange(WIDTH))


PLACES = of(WIDTH, dtype=jnp.int32)
INTEGERS = {
    "positions of a table": (lambda w, n, x: (x + w[n].mean(axis=0)) @ w, PLACES),
    "positions of sines": (lambda w, n, x: x @ (sines(n) @ w), PLACES),
    "rows in another order": (lambda w, n, x: x @ w[n], PLACES),
    "columns in another order": (lambda w, n, x: x[:, n] @ w, PLACES),
    "rows that are summed": (lambda w, n, x: x @ jnp.zeros_like(w).at[n].add(w), PLACES),
    "where a slice begins": (
        lambda w, n, x: x[:, :8] @ jax.lax.dynamic_slice(w, (n[0], n[1]), (8, WIDTH)),
        of(2, dtype=jnp.int32),
    ),
    "mask of activations": (
        lambda w, n, x: jnp.where(n, x, 0) @ w,
        of(WIDTH, dtype=jnp.bool_),
    ),
    "raw key": (
        lambda w, n, x: x @ (w + jax.random.normal(n, w.shape)),
        of(2, dtype=jnp.uint32),
    ),
    "temperature": (lambda w, n, x: x @ (w * n), of(dtype=jnp.int32)),
}


@pytest.mark.parametrize("form", INTEGERS)
def test_other_integers_are_no_parameters(form):
    apply, integers = INTEGERS[form]

    def step(model, x):
        def loss(params):
            return jnp.square(apply(params["w"], model["n"], x)).mean()

        grads = jax.grad(loss)(model["params"])
        return jax.tree.map(lambda w, g: w - g, model["params"], grads)

    model = {"params": {"w": of(WIDTH, WIDTH)}, "n": integers}
    found = roles(step, model, of(ROWS, WIDTH))
    assert found == {"model.params.w": "parameter", "model.n": "other", "x": "batch"}
