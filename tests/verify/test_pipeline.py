"""Pipelines through the compiler, stage by stage: what is verified is what runs."""

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.cluster import Cluster


def train_step(params, batch):
    """Equal layers between a first and a last one that are different, and a norm that all stages must know."""

    def loss(params):
        x = batch["x"] @ params["first"]
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w) @ w.T
        return jnp.mean((x @ params["last"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1.0), params, grads), value


def arguments():
    shape = jax.ShapeDtypeStruct
    layers = [shape((64, 64), jnp.float32)] * 4
    params = {"first": shape((32, 64), jnp.float32), "layers": layers, "last": shape((64, 8), jnp.float32)}
    return params, {"x": shape((64, 32), jnp.float32), "y": shape((64, 8), jnp.float32)}


def planned(**options):
    method = aq.PipeshardParallel(**{"num_micro_batches": 4, **options})
    return aq.plan(train_step, *arguments(), cluster=Cluster.preset("8xcpu"), method=method)


def totals(collectives):
    found = {}
    for each in collectives:
        count, num_bytes = found.get((each.kind, each.axes), (0, 0))
        found[each.kind, each.axes] = count + each.count, num_bytes + each.num_bytes
    return found


@pytest.mark.parametrize("options", [{"num_stages": 2, "schedule": "1f1b"}])
def test_what_is_verified_is_what_runs(options, tmp_path):
    plan = planned(**options)
    lines = []
    found = aq.verify(plan, train_step, *arguments(), cache=tmp_path, progress=lines.append)
    here = aq.parallelize(train_step, plan).prepare(*arguments()).stats()
    for stage, running in zip(found.stages, here.stages, strict=True):
        assert stage.compiled_bytes == running.peak_bytes > 0
        assert totals(stage.compiled.collectives) == totals(running.collectives)
