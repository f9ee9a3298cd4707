"""Roles of inputs: quantized weights are parameters as floating-point ones are; positions, masks,
keys and permutations are not, and frozen weights are no batch.
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


def read_by_products(frozen, x):
    for w in frozen.values():
        x = jnp.tanh(x @ w.T.astype(x.dtype).T)
    return x


def scaled(frozen, x):
    for w in frozen.values():
        x = jnp.tanh(x @ (w * 0.5 + w))
    return x


def read_by_a_scan(frozen, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([*frozen.values()]))[0]


def stacked(frozen, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["a"] @ w["b"]), None), x, frozen)[0]


def looked_up(frozen, x):
    return x + sum(table[jnp.arange(len(x)) % 3] for table in frozen.values())


def as_kernels(frozen, x):
    for kernel in frozen.values():
        x = jax.lax.conv_general_dilated(x[:, None], kernel, (1,), "SAME")[:, 0]
    return x


MANY = {
    "products": (read_by_products, {k: of(8, 8) for k in "abc"}),
    "scaled": (scaled, {k: of(8, 8) for k in "abc"}),
    "a scan": (read_by_a_scan, {k: of(8, 8) for k in "abc"}),
    "stacked layers": (stacked, {k: of(3, 8, 8) for k in "ab"}),
    "tables": (looked_up, {k: of(32, 8) for k in "abc"}),
    "kernels": (as_kernels, {k: of(1, 1, 3) for k in "abc"}),
    # As many rows as examples.
    "as long as the batch": (scaled, {k: of(8, 8) for k in "abc"}),
}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((name, "frozen first") for name in MANY),
        # Arrays of as many rows that come behind the batch may belong to it.
        *((name, "batch first") for name in MANY if name != "as long as the batch"),
    ],
)
def test_frozen_weights_in_an_argument_of_their_own_are_no_batch(name, order):
    """Even where they are more arrays than those of the batch."""
    model, frozen = MANY[name]
    rows = 8 if name == "as long as the batch" else 4

    def step(w, frozen, batch):
        def loss(w):
            return jnp.square(model(frozen, batch["x"]) @ w - batch["y"]).mean()

        value, slope = jax.value_and_grad(loss)(w)
        return w - 0.1 * slope, value

    def other_order(w, batch, frozen):
        return step(w, frozen, batch)

    batch = {"x": of(rows, 8), "y": of(rows, 8)}
    if order == "frozen first":
        found = roles(step, of(8, 8), frozen, batch)
    else:
        found = roles(other_order, of(8, 8), batch, frozen)
    assert {found[f"frozen.{k}"] for k in frozen} == {"parameter"}
    assert found["batch.x"] == found["batch.y"] == "batch"


def test_nodes_of_a_graph_belong_to_the_batch():
    """Although a product contracts their rows."""

    def step(w, edges, nodes):
        value, slope = jax.value_and_grad(lambda w: jnp.square((edges @ nodes) @ w).mean())(w)
        return w - 0.1 * slope, value

    found = roles(step, of(8, 8), of(16, 16), of(16, 8))
    assert found == {"w": "parameter", "edges": "batch", "nodes": "batch"}


def test_a_mask_whose_rows_are_summed_by_a_product_belongs_to_the_batch():
    def step(w, scales, batch):
        def loss(w):
            each = jnp.square(batch["x"] @ w - batch["y"]).mean(1)
            return each @ batch["mask"] * scales.max()

        value, slope = jax.value_and_grad(loss)(w)
        return w - 0.1 * slope, value

    batch = {"x": of(4, 8), "y": of(4, 8), "mask": of(4)}
    found = roles(step, of(8, 8), of(3), batch)
    assert {found[f"batch.{k}"] for k in batch} == {"batch"} and found["scales"] != "batch"
