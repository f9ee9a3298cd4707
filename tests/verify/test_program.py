"""Programs written down for platforms that are not here."""

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.cost import PlannedStep, make_problem
from aliquot.graph import capture
from aliquot.verification import portable_program


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def step_with_a_call(w, x):
    x = jax.ffi.ffi_call("kernels.of_ones$own", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    return w + jnp.sum(x)


SHAPES = [jax.ShapeDtypeStruct((32, 64), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)]


def written(fn, platform, cluster="8xH100"):
    where = Cluster.preset(cluster)
    plan = aq.plan(
        fn, *SHAPES, cluster=where, method=aq.DataParallel(), on_missing_rule="replicate"
    )
    graph = capture(fn, *SHAPES)
    problem = make_problem(graph, where, on_missing_rule="replicate")
    return portable_program(PlannedStep.of_program(plan, graph, problem), platform)


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
def test_no_device_of_the_platform_is_needed(platform):
    program = written(step, platform, cluster="8x8xH100")
    exported = jax.export.deserialize(bytearray(program.module))
    assert exported.platforms == (platform,)
    assert (exported.nr_devices, program.num_devices, program.mesh_shape) == (64, 64, (64,))
    assert program.donated == (0,)
    assert (
        program.in_dims[0] in ((), ((), ()))
        and jax.config.jax_export_ignore_forward_compatibility is False
    )


def test_the_fingerprint_tells_programs_apart():
    programs = [
        written(*each)
        for each in ((step, "cuda"), (step, "cuda"), (step, "tpu"), (step, "cuda", "4xH100"))
    ]
    first, same, *others = [program.fingerprint for program in programs]
    assert first == same and first not in others and len(set(others)) == 2


def test_calls_without_promises_are_written_down_too():
    module = written(step_with_a_call, "cuda").module
    assert b"kernels.of_ones$own" in module
