"""Training steps that join, cut, repeat or regroup their batch, at small and at real size.

Each maker returns `(step, state, batch)` for some rows of width `d`; `arrays=False` gives shapes.
"""

import jax
import jax.numpy as jnp
import optax

DEPTH = 4


def network(params, x):
    """Residual blocks of two products each."""
    for block in params:
        x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
    return x


def scores(params, ids):
    """Log-probabilities of each sequence under a model of its tokens."""
    x = network(params["blocks"], params["tokens"][ids[:, :-1]])
    logits = jax.nn.log_softmax(x @ params["tokens"].T)
    return jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0].sum(1)


def preferences(params, batch):
    """Preference pairs: the sequences that were chosen, then those that were rejected."""
    both = jnp.concatenate([batch["chosen"], batch["rejected"]])
    found = scores(params, both)
    n = len(batch["chosen"])
    margin = found[:n] - found[n:] - batch["reference"]
    return -jax.nn.log_sigmoid(0.1 * margin).mean()


def views(params, batch):
    """Two views of each example, with the NT-Xent loss over all pairs."""
    n = len(batch["x"])
    both = jnp.concatenate([batch["x"], batch["y"]])
    z = network(params["blocks"], both)
    z = z / jnp.sqrt((z**2).sum(1, keepdims=True) + 1e-6)
    alike = z @ z.T / 0.5 - 1e9 * jnp.eye(2 * n, dtype=z.dtype)
    other = jnp.roll(jnp.arange(2 * n), n)
    return optax.softmax_cross_entropy_with_integer_labels(alike, other).mean()


def real_and_generated(params, batch):
    """A discriminator that sees real examples and generated ones in one batch."""
    made = network(params["blocks"][: DEPTH // 2], batch["x"])
    both = jnp.concatenate([batch["y"], made])
    judged = network(params["blocks"][DEPTH // 2 :], both).mean(1)
    is_real = jnp.concatenate([jnp.ones_like(judged, shape=len(made)), jnp.zeros(len(made))])
    real, fake = jnp.split(judged, 2)
    return optax.sigmoid_binary_cross_entropy(judged, is_real).mean() + (fake - real).mean()


def stacked(params, batch):
    """Two arrays stacked, flattened, and unstacked."""
    both = jnp.stack([batch["x"], batch["y"]])
    z = network(params["blocks"], both.reshape(-1, both.shape[-1])).reshape(both.shape)
    return ((z[0] - z[1]) ** 2).mean() + z.var(0).mean()


def tiled_labels(params, batch):
    """One set of labels for two views."""
    both = jnp.concatenate([batch["x"], batch["y"]])
    z = network(params["blocks"], both)
    labels = jnp.tile(batch["label"], 2)
    return optax.softmax_cross_entropy_with_integer_labels(z, labels).mean()


def rolled(params, batch):
    """Each example's negative is its neighbour."""
    z = network(params["blocks"], batch["x"])
    positive, negative = (z * batch["y"]).sum(1), (z * jnp.roll(batch["y"], 1, 0)).sum(1)
    against = (jnp.roll(z, 1, 0) * batch["y"]).sum(1)
    return jax.nn.softplus((negative + against - positive) * 0.1).mean()


def grouped_rewards(params, batch, group=8):
    """Rewards normalised within groups of neighbours."""
    reward = batch["reward"].reshape(-1, group)
    gain = reward - reward.mean(1, keepdims=True)
    gain = (gain / (reward.std(1, keepdims=True) + 1e-4)).reshape(-1)
    ratio = jnp.exp(scores(params, batch["chosen"]) * 0.01 - batch["reference"])
    return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()


def patches(params, batch, parts=4):
    """Each example is cut into patches, which are rows of their own, and put together again."""
    n, d = batch["x"].shape[0], batch["x"].shape[1] // parts
    rows = batch["x"].reshape(n, parts, d).reshape(n * parts, d)
    z = network(params["narrow"], rows).reshape(n, parts * d)
    return ((network(params["blocks"], z) - batch["y"]) ** 2).mean()


def beams(params, batch, width=4):
    """Beams of each example are rows of one batch; the best of each counts."""
    n = batch["label"].shape[0]
    rows = jnp.repeat(batch["x"], width, 0) + jnp.tile(params["start"][:width], (n, 1))
    found = network(params["blocks"], rows).reshape(n, width, -1)
    best = jax.nn.softmax(found.mean(-1), -1)
    return ((best[..., None] * found).sum(1) - batch["y"]).mean() ** 2


def chunked(params, batch, chunks=4):
    """A loss over chunks of the batch, one after another, so that its logits are never whole."""
    z = network(params["blocks"], batch["x"])

    def add(total, chunk):
        logits = jax.nn.log_softmax(chunk[0] @ params["tokens"].T)
        return total - jnp.take_along_axis(logits, chunk[1][:, None], 1).sum(), None

    rows = z.reshape(chunks, -1, z.shape[-1]), batch["label"].reshape(chunks, -1)
    total, _ = jax.lax.scan(jax.checkpoint(add), jnp.zeros((), z.dtype), rows)
    return total / len(z)


def token_groups(params, batch, rows=2):
    """The tokens of two sequences are a group, and each place of an expert takes of all of them."""
    x = params["tokens"][batch["chosen"][:, :-1]]
    groups = x.reshape(-1, rows * x.shape[1], x.shape[2])
    sent = jax.nn.softmax(groups @ params["gate"], axis=1)
    taken = jnp.einsum("gse,gsm->gem", sent, groups)
    made = jnp.einsum("gse,gem->gsm", sent, network(params["blocks"], taken))
    return ((x + made.reshape(x.shape)) ** 2).mean()


LOSSES = {
    f.__name__: f
    for f in (
        preferences,
        views,
        real_and_generated,
        stacked,
        tiled_labels,
        rolled,
        grouped_rewards,
        patches,
        beams,
        chunked,
        token_groups,
    )
}


def joined(name, *, rows=32, d=16, length=6, vocabulary=32, dtype=jnp.float64, arrays=True):
    """`(step, state, batch)` of one of `LOSSES`."""
    tx = optax.adamw(1e-3, eps=1e-4)
    loss_fn = LOSSES[name]

    def step(state, batch):
        params, moments = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    def make():
        keys = iter(jax.random.split(jax.random.key(0), 64))

        def normal(*shape):
            return 0.3 * jax.random.normal(next(keys), shape, dtype)

        def blocks(count, width):
            return [
                {"up": normal(width, 2 * width), "down": normal(2 * width, width)}
                for _ in range(count)
            ]

        def ids(*shape):
            return jax.random.randint(next(keys), shape, 0, vocabulary)

        params = {"blocks": blocks(DEPTH, d)}
        batch = {}
        if name in ("preferences", "grouped_rewards", "token_groups"):
            batch |= {"chosen": ids(rows, length), "reference": normal(rows)}
        else:
            batch |= {"x": normal(rows, d)}
        if name in ("views", "real_and_generated", "stacked", "rolled", "patches", "beams"):
            batch["y"] = normal(rows, d)
        if name == "tiled_labels":
            batch |= {"y": normal(rows, d), "label": ids(rows) % d}
        if name == "token_groups":
            params["gate"] = normal(d, max(d // 4, 8))
        if name in ("preferences", "grouped_rewards", "chunked", "token_groups"):
            params["tokens"] = normal(vocabulary, d)
        if name == "preferences":
            batch["rejected"] = ids(rows, length)
        if name == "grouped_rewards":
            batch["reward"] = normal(rows)
        if name == "patches":
            params["narrow"] = blocks(2, d // 4)
        if name == "beams":
            params["start"] = normal(4, d)
            batch["label"] = ids(rows)
        if name == "chunked":
            batch["label"] = ids(rows)
        return (params, tx.init(params)), batch

    state, batch = make() if arrays else jax.eval_shape(make)
    return step, state, batch


# Rows of each step at real size; those of sequences have 1,024 tokens each.
_ROWS = {
    "preferences": 128,
    "token_groups": 256,
    "grouped_rewards": 256,
    "views": 32768,
    "chunked": 262144,
}


def real_size(name, times=1):
    """`joined` at the size of a real model on eight large devices, as shapes; `times` as many
    rows.
    """
    return joined(
        name,
        rows=times * _ROWS.get(name, 65536),
        d=4096,
        length=1025,
        vocabulary=32000,
        dtype=jnp.float32,
        arrays=False,
    )
