"""What is said of predicted beside reported step times, and that it is of the figures shipped."""

import dataclasses
from pathlib import Path

import pytest

from aliquot.cluster import (
    DEVICES,
    TARGETS,
    ReportedSteps,
    data_sheet_range,
    figures_digest,
    is_calibrated,
    most_error,
    recorded_digests,
    reported_steps,
    said_of_data_sheet,
    said_of_reported,
)
from aliquot.cluster import _reported as reported

ROOT = Path(__file__).parents[2]
MAKE_ANEW = "make the record anew: python benchmarks/public_steps.py FOLDER"


def steps(*errors, **changes):
    facts = {"framework": "MaxText", "reason": "", "device": "H100", "kind": "data, FSDP"}
    return ReportedSteps(**(facts | changes), errors=tuple(sorted(errors)))


def test_the_record_was_made_with_the_figures_that_are_shipped():
    for device, digest in recorded_digests().items():
        assert digest == figures_digest(device), f"figures of {device} changed: {MAKE_ANEW}"
    assert {found.device for found in reported._record()} <= set(recorded_digests())


@pytest.mark.parametrize(
    "change", [{"overlap_fraction": 0.8}, {"sustained_share": 0.99}, {"kernel_overhead_s": 1e-6}]
)
def test_a_figure_that_changes_changes_the_digest(change, monkeypatch):
    # H100 has a sustained share of its own, MI300X that of all GPUs.
    before = figures_digest("MI300X"), figures_digest("v5e")
    monkeypatch.setitem(TARGETS, "gpu", dataclasses.replace(TARGETS["gpu"], **change))
    assert figures_digest("MI300X") != before[0] and figures_digest("v5e") == before[1]


def test_words_are_no_figures(monkeypatch):
    before = figures_digest("MI300X")
    monkeypatch.setitem(TARGETS, "gpu", dataclasses.replace(TARGETS["gpu"], source="a book"))
    assert figures_digest("MI300X") == before
    faster = dataclasses.replace(DEVICES["MI300X"], memory_bandwidth_bytes_per_s=9e12)
    monkeypatch.setitem(DEVICES, "MI300X", faster)
    assert figures_digest("MI300X") != before


def test_jax_programs_are_off_by_an_error_and_others_are_slower():
    ours = steps(-0.02, 0.05, -0.08)
    assert str(ours) == "3 steps of MaxText on H100: median 5%, worst 8%"
    assert str(steps(-0.02)) == "1 step of MaxText on H100 was off by 2%"
    many = steps(*(0.01 * n for n in range(1, 12)))
    assert str(many) == "11 steps of MaxText on H100: median 6%, 90th percentile 11%, worst 11%"
    assert str(steps(-0.2, framework="torchtitan", reason="PyTorch of 2024")) == (
        "1 step of torchtitan on H100 (PyTorch of 2024): 25% slower than predicted"
    )
    assert str(steps(-0.2, -0.2, 0.25, framework="nanotron", reason="PyTorch", unfit=1)) == (
        "3 steps of nanotron on H100 (PyTorch): median 25% slower than predicted, 20% faster to 25%"
        " slower; 1 more ran and is predicted not to fit"
    )
    assert str(steps(-0.2, 0.001, framework="nanotron", reason="PyTorch")).endswith(
        "than predicted, 0% to 25% slower"
    )
    assert most_error([ours, many]) == pytest.approx(0.108, abs=0.003)
    # How long other programs take says nothing about the error of this one.
    slow = steps(-0.5, framework="torchtitan", reason="PyTorch of 2024")
    assert most_error([ours, slow]) == 0.08 and most_error([slow]) is most_error([]) is None


def test_nothing_is_called_a_percentile_under_ten_steps():
    for found in reported._record():
        told = found.is_jax and len(found.errors) >= 10
        assert not found.errors or ("percentile" in str(found)) == told, found


def test_jax_programs_are_told_before_others_and_devices_of_one_chip_together(monkeypatch):
    known = (
        steps(-0.1, framework="NeMo", reason="Transformer Engine"),
        steps(0.04, device="H200"),
        steps(0.02),
        steps(0.5, kind="context", device="v5e"),
        steps(device="A100-80GB", unfit=2),
        steps(0.3, device="B200", kind="tensor", framework="NeMo", reason="Transformer Engine"),
    )
    monkeypatch.setattr(reported, "_record", lambda: known)
    (found,) = reported_steps("H100", "data, FSDP")
    assert found.errors == (0.02, 0.04) and set(found.device.split(", ")) == {"H100", "H200"}
    assert {each.framework for each in reported_steps("H200")} == {"NeMo", "MaxText"}
    # Of a kind that the device has no steps of, those of all devices are told.
    (elsewhere,) = reported_steps("H100", "context")
    assert elsewhere.device == "v5e"
    (other,) = reported_steps("H100", "tensor")
    assert not other.is_jax and "on B200" in said_of_reported([other])
    # Where no step of the device has a time, nothing is known.
    assert reported_steps("A100-80GB") == reported_steps("A100-40GB", "tensor") == ()


def test_devices_known_by_data_sheets_alone_have_the_range_of_others(monkeypatch):
    errors = [1 / (0.8 + 0.05 * n) - 1 for n in (-9, *range(9), 20)]
    known = (steps(*errors[:6], device="GB200"), steps(*errors[6:], device="B300"), steps(9.0))
    monkeypatch.setattr(reported, "_record", lambda: known)
    found = data_sheet_range()
    assert (found.held, found.steps, found.devices) == (9, 11, ("B300", "GB200"))
    assert (found.low, found.high) == pytest.approx((0.8, 1.2))
    assert found.of(2.0) == pytest.approx((1.6, 2.4))
    assert said_of_data_sheet() == (
        "the speeds are those of a data sheet; 9 of 11 reported steps on devices known by theirs"
        " alone (B300, GB200) took 0.80 to 1.20 times as long as predicted"
    )
    monkeypatch.setattr(reported, "_record", lambda: (steps(0.1, 0.2, device="GB200"),))
    assert data_sheet_range() is None
    assert said_of_data_sheet().endswith("and no measurement was compared")


def test_the_shipped_range_is_of_the_devices_that_have_no_calibration():
    found = data_sheet_range()
    assert found is not None and found.held >= 0.8 * found.steps
    assert {"B300", "GB300"} <= set(found.devices)
    assert not any(is_calibrated(device) for device in found.devices)


def _table(title):
    text = (ROOT / "docs" / "accuracy.md").read_text().partition(f"## {title}\n")[2]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_the_tables_of_the_documentation_are_the_record():
    record = {(s.framework, s.device, s.kind): s for s in reported._record()}
    rows = _table("JAX programs") + _table("Programs of other frameworks")
    told = {
        (row["framework"], row["device"], row["parallelism"]): row
        for row in rows
        if row["half"] == "held out"
    }
    assert told.keys() == record.keys()
    for key, row in told.items():
        known = record[key]
        assert (int(row["steps"]), int(row["do not fit"])) == (len(known.errors), known.unfit)
        if not known.errors:
            continue
        if known.is_jax:
            assert row["median"] == f"{known.median_error:.0%}", key
            assert row["worst"] == f"{max(known.errors, key=abs):+.0%}", key
        else:
            assert row["slower than predicted, median"] == f"{known.slower:+.0%}", key


def test_what_pages_say_of_errors_is_the_record():
    (index, readme) = (
        " ".join((ROOT / name).read_text().split()) for name in ("docs/index.md", "README.md")
    )
    everywhere = steps(*(e for s in reported._record() if s.is_jax for e in s.errors))
    assert f"{len(everywhere.errors)} steps of JAX programs" in readme
    assert f"{everywhere.median_error:.0%} in the median" in readme
    assert f"{max(map(abs, everywhere.errors)):.0%} at worst" in readme
    assert said_of_reported(reported_steps("A100-40GB", "data, FSDP")) in index
