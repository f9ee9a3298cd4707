"""Eight virtual CPU devices for every test, and a maker of meshes over them."""

import gc
import os

from aliquot.core import with_xla_flags

# All of this must stand before JAX is first imported. Workers share few cores, so each keeps its
# kernels on one thread. Programs of tests run a few times on a few numbers: fast machine code would
# cost more than it saves, and so would the emitters of fusions, which take half of the time to
# compile, and parts of a program for each core. What XLA makes of a program and its collectives do
# not depend on that, and its memory by less than a hundredth.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_cpu_multi_thread_eigen": "false",
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_use_fusion_emitters": "false",
    "--xla_cpu_parallel_codegen_split_count": "1",
}
os.environ["XLA_FLAGS"] = with_xla_flags(os.environ.get("XLA_FLAGS", ""), _FLAGS)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_X64"] = "0"
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# Texts are as wide as the terminal, which some tests set and none inherits.
os.environ.pop("COLUMNS", None)
# Traces are many objects that stay. Looking for garbage among them as often as usual takes a tenth
# of the time.
gc.set_threshold(100_000, 50, 100)

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# How fast examples are drawn says more of what else the machine does than of the tests.
hypothesis.settings.register_profile(
    "aliquot", suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("aliquot")


# Tables of tests, where they are asked for.
pytest_plugins = ["report_rows"]


def pytest_addoption(parser):
    parser.addoption("--record", action="store_true", help="record the texts of tests/golden anew")


# Each compiled program takes a few memory maps, of which Linux grants a process 65,530. Compilers
# crash beyond.
_MOST_MAPS = 10_000


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Forget compiled programs behind a module of tests, once a process holds many of them."""
    yield
    try:
        with open("/proc/self/maps") as maps:
            count = sum(1 for _ in maps)
    except OSError:
        return
    if count > _MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def mesh():
    """Maker of meshes: `mesh(4, 2)` has axes `x` and `y` over eight devices, `mesh(2)` one axis
    over the first two.
    """
    import math

    import jax

    def make(*shape: int, axis_names: tuple[str, ...] | None = None) -> jax.sharding.Mesh:
        names = axis_names or tuple("xyzw"[: len(shape)])
        kinds = (jax.sharding.AxisType.Auto,) * len(shape)
        return jax.make_mesh(
            shape, names, axis_types=kinds, devices=jax.devices()[: math.prod(shape)]
        )

    return make


@pytest.fixture
def x64():
    """Double precision for one test."""
    import jax

    with jax.enable_x64(True):
        yield
