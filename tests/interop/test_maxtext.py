"""MaxText's own training step under exported settings; MaxText has to be on `PYTHONPATH`
(`make maxtext-test`).
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import aliquot as aq

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def specs():
    """The benchmark that compares the splits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("maxtext_specs")


@pytest.fixture(scope="module")
def compiled(specs):
    """MaxText's arrays under each layout, compiled in one process."""
    if importlib.util.find_spec("maxtext") is None:
        pytest.skip("MaxText is not installed: make maxtext-test MAXTEXT=its-folder")
    texts = {name: specs.exported(name).text for name in specs.CASES}
    return specs.compiled(texts, python=sys.executable)


@pytest.mark.parametrize("layout", ["dp", "tp", "fsdp + tp", "ep"])
def test_maxtext_splits_every_array_as_the_plan(layout, specs, compiled):
    equal, others = specs.compared(compiled[layout], specs.exported(layout).plan_splits)
    assert others == {}
    assert equal >= 63


@pytest.mark.parametrize("layout", ["fsdp", "cp"])
def test_maxtext_splits_every_array_as_export_says(layout, specs, compiled):
    equal, others = specs.compared(compiled[layout], specs.exported(layout).rules_split)
    assert others == {}
    assert equal == 63


@pytest.mark.parametrize("layout", ["fsdp", "cp"])
def test_a_plan_with_the_splits_that_export_says_is_said_whole_and_costs_the_same(layout, specs):
    """Rules go by the names of dims: gate and down, both of `embed` and `mlp`, are split alike."""
    named = specs.exported(layout)
    assert named.rules_split != named.plan_splits
    again = specs.exported(layout, named.rules_split)
    assert {path: [*map(list, dims)] for path, dims in again.rules_split.items()} == (
        again.plan_splits
    )
    assert again.rules_split == named.rules_split
    assert again.lost == ()
    now, then = again.plan.prediction, named.plan.prediction
    assert now.step_time_s <= 1.01 * then.step_time_s
    assert now.peak_memory_bytes <= then.peak_memory_bytes


def test_only_rules_say_splits(specs):
    text = aq.export(specs.exported("dp").plan, "accelerate", allow_loss=True)
    assert text.splits == {}
