"""Measured figures: where they are read from, what they replace, and that each says where it comes
from.
"""

import dataclasses
import tomllib
from importlib import resources

import pytest

from aliquot.cluster import (
    DEVICES,
    TARGETS,
    Products,
    attention_of,
    is_calibrated,
    target_for,
)
from aliquot.core import ClusterError

FILES = sorted(
    p
    for p in resources.files("aliquot.cluster").joinpath("calibration").iterdir()
    if p.name.endswith("toml")
)


def test_a_measured_device_has_its_own_figures_and_its_backends_habits():
    gpu, v100 = TARGETS["gpu"], target_for(DEVICES["V100-16GB"])
    assert v100 == target_for(DEVICES["V100-32GB"]) != gpu
    assert v100.products.processors == 80
    assert v100.overlap_fraction < gpu.overlap_fraction
    assert gpu.overlaps_transfers and not v100.overlaps_transfers
    habits = ("reduce_scatter", "combined_bytes", "usable_memory_fraction")
    assert all(getattr(v100, name) == getattr(gpu, name) for name in habits)


def test_changes_of_a_backend_apply_to_its_calibrated_devices(monkeypatch):
    changed = dataclasses.replace(TARGETS["gpu"], combined_bytes=7, matmul_efficiency=0.1)
    monkeypatch.setitem(TARGETS, "gpu", changed)
    v100 = target_for(DEVICES["V100-16GB"])
    assert (v100.combined_bytes, target_for(DEVICES["A10G"]).matmul_efficiency) == (7, 0.1)
    assert v100.matmul_efficiency > 0.5


def of_backend(device, **known):
    """The figures of a device's backend, with the attention of the device."""
    return dataclasses.replace(TARGETS[device.kind], attention=attention_of(device), **known)


def test_other_devices_keep_the_figures_of_their_backend():
    renamed = dataclasses.replace(DEVICES["V100-16GB"], name="my card")
    for device in (DEVICES["MI300X"], DEVICES["v4"], renamed):
        assert target_for(device) == of_backend(device)
    assert attention_of(renamed) is None


@pytest.mark.parametrize("name", ["H100", "H200", "B200", "B300", "GB200", "GB300"])
def test_some_gpus_are_scheduled_to_hide_latency(name):
    assert target_for(DEVICES[name]).hides_latency
    assert not target_for(DEVICES["A100-80GB"]).hides_latency


@pytest.mark.parametrize(("first", "second"), [("A100-40GB", "A100-80GB"), ("H100", "H200")])
def test_cards_with_the_same_chip_share_their_figures(first, second):
    one, other = target_for(DEVICES[first]), target_for(DEVICES[second])
    assert one.products == other.products != TARGETS["gpu"].products
    assert one.matmul_efficiency == other.matmul_efficiency


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint4", "float4_e2m1fn"]
)
def test_narrow_types_are_never_slower_than_16_bits(dtype):
    for device in DEVICES.values():
        assert device.peak(dtype) >= max(device.peak("bfloat16"), device.peak("float16"))


def test_8_bit_floats_have_the_peaks_of_the_data_sheets():
    assert DEVICES["H100"].peak("float8_e4m3fn") == pytest.approx(1978.9e12)
    assert DEVICES["A100-80GB"].peak("float8_e4m3fn") == DEVICES["A100-80GB"].peak("bfloat16")


def test_devices_on_pcie_have_the_figures_of_their_chip_and_of_their_bus():
    chip, on_bus = target_for(DEVICES["A100-80GB"]), target_for(DEVICES["A100-PCIe"])
    assert chip.products == on_bus.products and chip.sustained_share == on_bus.sustained_share
    assert on_bus.collective_share(8) < 0.65 * chip.collective_share(8)
    assert on_bus.overlap_fraction == 0.0 < chip.overlap_fraction
    # Of others on PCIe, that alone was measured.
    other = target_for(DEVICES["L4"])
    assert other.collective_share(8) == on_bus.collective_share(8)
    assert other.products == TARGETS["gpu"].products and not is_calibrated("L4")


def test_neither_amd_nor_trainium_has_cudnn():
    assert [attention_of(DEVICES[name]) for name in ("MI300X", "trn1", "trn2")] == [None] * 3


def test_a_sustained_share_slows_all_products():
    device = DEVICES["H100"]
    whole = dataclasses.replace(device, calibration={"sustained_share": 1.0})
    half = dataclasses.replace(device, calibration={"sustained_share": 0.5})
    speeds = [target_for(d).product_flops_per_s(d, "bfloat16") for d in (whole, half)]
    assert speeds[0] == pytest.approx(2 * speeds[1])


def test_a_device_may_have_an_attention_of_its_own_speed():
    device = DEVICES["H100"]
    slow = dataclasses.replace(device, calibration={"attention_share": 0.31})
    kernels = [target_for(d).attention for d in (device, slow)]
    assert kernels[0].share == pytest.approx(2 * kernels[1].share)
    assert target_for(slow).figure("attention_share") == 0.31
    for name in ("V100-16GB", "cpu"):  # They have no kernel whose speed could be told.
        without = dataclasses.replace(DEVICES[name], calibration={"attention_share": 0.31})
        assert target_for(without).attention is None
        assert target_for(without).figure("attention_share") == 0.0


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_figure_has_a_source(path):
    fields = {f.name for f in dataclasses.fields(TARGETS["gpu"])} | {
        f"product_{f.name}" for f in dataclasses.fields(Products)
    }
    for name, entry in tomllib.loads(path.read_text()).items():
        assert name in fields and set(entry) == {"value", "source"} and len(entry["source"]) > 10


@pytest.mark.parametrize(
    ("values", "words"),
    [({"tile": 0}, "tile"), ({"depth": -1.0}, "depth"), ({"traffic": 1.5}, "traffic")],
)
def test_impossible_products_are_refused(values, words):
    with pytest.raises(ClusterError, match=words):
        Products(**values)
