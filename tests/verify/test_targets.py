"""What can be compiled for, and how each target is asked for."""

import pytest

from aliquot.cluster import DEVICES, Cluster
from aliquot.core import InputError
from aliquot.verification import GPU_DESCRIPTIONS, TPU_DIMS, resolve_target


@pytest.mark.parametrize(
    ("name", "cluster", "expected"),
    [
        (None, "8xH100", ("H100", "gpu", "1x1x8")),
        (None, "4x8xA100-80GB", ("A100-80GB", "gpu", "4x1x8")),
        ("V100-16GB", "8xH100", ("V100-16GB", "gpu", "1x1x8")),
        (None, "v5e-8", ("v5e", "tpu", "v5e:2x4")),
        (None, "v5p-16", ("v5p", "tpu", "v5p:2x2x2")),
        ("v6e", "16xH100", ("v6e", "tpu", "v6e:4x4")),
        (None, "4xcpu", ("cpu", "cpu", "")),
        ("cpu", "8xH100", ("cpu", "cpu", "")),
    ],
)
def test_a_target_and_its_devices(name, cluster, expected):
    where = Cluster.preset(cluster)
    target = resolve_target(name, where)
    topology = target.topology(where.num_devices, where.devices_per_host)
    assert (target.name, target.kind, topology) == expected
    assert target.limit_bytes < DEVICES[target.name].memory_bytes


def test_a_plan_s_own_limit_holds_for_its_own_device_only():
    where = Cluster.preset("8xH100")
    assert resolve_target(None, where, limit_bytes=5.0).limit_bytes == 5.0
    assert resolve_target("H200", where, limit_bytes=5.0).limit_bytes > 100e9


def test_every_description_is_of_a_known_device():
    assert set(GPU_DESCRIPTIONS) | set(TPU_DIMS) <= set(DEVICES)
    for name, described in GPU_DESCRIPTIONS.items():
        assert described.device_memory_size == DEVICES[name].memory_bytes
        assert described.memory_bandwidth == pytest.approx(
            DEVICES[name].memory_bandwidth_bytes_per_s, rel=0.01
        )


@pytest.mark.parametrize(
    ("name", "cluster", "messages"),
    [
        ("H10", "8xH100", ("did you mean 'H100'", "--target path")),
        (None, "8xA10G", ("A10G cannot be compiled for", "A100-40GB")),
        ("missing/gpu.txtpb", "8xH100", ("cannot be read",)),
    ],
)
def test_unknown_targets(name, cluster, messages):
    with pytest.raises(InputError) as refusal:
        resolve_target(name, Cluster.preset(cluster))
    assert all(message in str(refusal.value) for message in messages)


def test_a_gpu_of_ones_own(tmp_path):
    path = tmp_path / "mine.txtpb"
    path.write_text(GPU_DESCRIPTIONS["A100-40GB"].text())
    target = resolve_target(str(path), Cluster.preset("8xH100"))
    assert (target.name, target.kind) == ("mine", "gpu")
    assert target.limit_bytes < 42_331_013_120
    path.write_text("name: 'A100'")
    with pytest.raises(InputError, match="no description of a GPU"):
        resolve_target(str(path), Cluster.preset("8xH100"))
