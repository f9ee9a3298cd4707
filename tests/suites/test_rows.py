"""Rows: Alpa's columns, then ours."""

from dataclasses import fields

import pytest

from aliquot.suites import (
    GIVEN,
    HEADINGS,
    OURS,
    Row,
    alpa_suites,
    as_cells,
    throughput_series,
)
from aliquot.suites._rows import row_of

MANUAL = alpa_suites()["gpt.perf_test_manual"].cases


def test_columns_are_those_of_alpa_then_ours():
    (cells,) = as_cells([row_of(MANUAL[0], GIVEN, outcome="failed")])
    assert list(cells)[:11] == [
        "Type",
        "Model Config",
        "#Microbatch",
        "#GPU",
        "Parallel Config",
        "Mean Time (s)",
        "Std Time (s)",
        "#Params (Billion)",
        "TFLOPs",
        "Peak Mem (GB)",
        "Metadata",
    ]
    assert {field.name for field in fields(Row)} == set(HEADINGS)


def test_seconds_give_throughput_beside_the_published_one():
    row = row_of(MANUAL[2], GIVEN, outcome="predicted", predicted_s=2.454)
    assert row.predicted_to_published == pytest.approx(1.0)
    assert row.predicted_tflops == pytest.approx(row.published_tflops)
    assert row.tflops is None and row.mean_s is None


def test_the_chart_has_the_highest_throughput_of_each_kind():
    rows = [
        row_of(MANUAL[1], GIVEN, outcome="predicted", predicted_s=5.0),
        row_of(MANUAL[2], GIVEN, outcome="predicted", predicted_s=2.5),
        row_of(MANUAL[2], GIVEN, outcome="predicted", predicted_s=2.0),
        row_of(MANUAL[2], OURS, outcome="does not fit", predicted_s=1.0),
    ]
    points, series = throughput_series(rows)
    assert points == [4, 8] and "ours, predicted" not in series
    assert series["the case's plan, predicted"][1] == pytest.approx(8 * rows[2].predicted_tflops)
    assert series["published"][0] is None
