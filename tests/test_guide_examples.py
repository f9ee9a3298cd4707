"""Figures that guides of others print, predicted as `guide_examples.py` recorded them."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("guide_examples")


@pytest.mark.parametrize(
    "part", ["alpa", "cfp, layouts", "cfp, GPT", pytest.param("cfp, MoE", marks=pytest.mark.slow)]
)
def test_no_figure_moved_without_a_new_record(part, benchmark):
    path = max((FOLDER / "results").glob("guide_examples_*.json"), key=lambda file: file.stem[-7:])
    rows = benchmark.PARTS[part]()
    assert rows and benchmark.moved_rows(rows, benchmark.recorded(path)) == []


def test_a_figure_that_moved_by_more_than_a_hundredth_is_told(benchmark):
    row = {"what": "a step", "unit": "s", "predicted": 1.02, "printed": 1.0, "error": 0.02}
    assert benchmark.moved_rows([row], {"a step": 1.015}) == []
    (told,) = benchmark.moved_rows([row], {"a step": 1.0})
    assert told == "a step: 1 s was recorded, 1.02 is predicted"
    assert benchmark.moved_rows([row], {}) == ["a step: None was recorded, 1.02 is predicted"]
