"""The catalogue is complete and the values refuse nonsense."""

import pytest

from aliquot.cluster import DEVICES, TARGETS, Device, target_for
from aliquot.cluster._presets import WIRINGS
from aliquot.core import ClusterError


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_is_complete(name):
    device = DEVICES[name]
    assert device.name == name and device.source and name in WIRINGS
    assert {"float32", "bfloat16", "float16", "float64"} <= device.peak_flops_per_s.keys()
    assert device.peak("float16") <= device.peak("bfloat16") or name.startswith("V100")
    assert target_for(device).kind == device.kind
    assert hash(device) == hash(device)


def test_all_problems_at_once():
    with pytest.raises(ClusterError) as caught:
        Device(
            name="",
            kind="fpga",
            peak_flops_per_s={"int3": 0.0},
            memory_bytes=0,
            memory_bandwidth_bytes_per_s=-1.0,
            source="",
        )
    assert len(caught.value.violations) == 7


def test_peaks_fall_back():
    peaks = {"float32": 8.0, "bfloat16": 32.0}
    device = Device(
        name="a",
        kind="gpu",
        peak_flops_per_s=peaks,
        memory_bytes=1,
        memory_bandwidth_bytes_per_s=1.0,
        source="",
    )
    assert [device.peak(dtype) for dtype in ("bfloat16", "float16", "int32", "float64")] == [
        32.0,
        8.0,
        8.0,
        4.0,
    ]
    peaks["float32"] = 1.0
    assert device.peak("float32") == 8.0


def test_float32_products_run_narrower_where_the_backend_does_so():
    speeds = {
        name: (
            target_for(device).product_flops_per_s(device, "float32")
            / (target_for(device).matmul_efficiency * target_for(device).sustained_share)
        )
        for name, device in DEVICES.items()
    }
    assert speeds["A100-80GB"] == pytest.approx(156e12)  # tf32
    assert speeds["V100-16GB"] == pytest.approx(15.7e12)  # has none
    assert speeds["v5e"] == pytest.approx(197e12)  # one bfloat16 pass
    assert speeds["cpu"] == pytest.approx(DEVICES["cpu"].peak("float32"))
    # Of H100 it was measured that they reach less of their peak than products of bfloat16.
    share = target_for(DEVICES["H100"]).float32_product_share
    assert 0.8 < share < 0.9 and speeds["H100"] == pytest.approx(share * 494.5e12, rel=1e-3)


def test_targets_differ_where_compiled_programs_do():
    cpu, gpu, tpu = TARGETS["cpu"], TARGETS["gpu"], TARGETS["tpu"]
    assert (cpu.reduce_scatter, gpu.reduce_scatter, tpu.reduce_scatter) == (False, True, True)
    assert (cpu.merges_partial_sums, gpu.merges_partial_sums) == (False, True)
    assert cpu.overlap_fraction == 0.0
    assert "bfloat16" in cpu.widened_dtypes and "int32" not in cpu.widened_dtypes
    assert gpu.usable_bytes(DEVICES["H100"]) < DEVICES["H100"].memory_bytes
    assert gpu.memory_bytes_per_s(DEVICES["H100"]) < 3.35e12
