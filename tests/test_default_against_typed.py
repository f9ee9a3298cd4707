"""No plan that can be typed is faster than the default one: `benchmarks/default_against_typed.py`
in small, where memory is so short that the number of micro-batches matters.
"""

import functools
import importlib
import re
from pathlib import Path

import pytest

from aliquot.core import RECOMPUTE

FOLDER = Path(__file__).parents[1] / "benchmarks"
POLICIES = set(RECOMPUTE)
SMALL = {"num_layers": "1", "hidden_size": "64", "seq_len": "64"}
CLUSTERS = {"2xA100-80GB": (8, "1.5MiB"), "2x1xH100": (4, "1MiB")}


@pytest.fixture(scope="module")
def answers():
    """The benchmark, and its answer for a cluster, found once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        benchmark = importlib.import_module("default_against_typed")

    @functools.cache
    def answer(cluster):
        batch, limit = CLUSTERS[cluster]
        setup = benchmark.SetUp(
            model="gpt-10m",
            cluster=cluster,
            global_batch=batch,
            settings=SMALL,
            memory_limit=limit,
            devices_in_group=2,
        )
        return benchmark.answer(setup)

    return benchmark, answer


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_typed_plan_is_faster_than_the_default(cluster, answers):
    benchmark, answer = answers
    found = answer(cluster)
    assert benchmark.ratio_of(found) >= benchmark.LEAST_RATIO, found["best"]
    typed = [benchmark.Typed(**each) for each in found["typed"]]
    assert {each.method for each in typed} >= {"fsdp", "zero2", "shard"}
    assert found["default"]["num_micro_batches"] > 1
    for method in ("fsdp", "zero2"):
        ours = [each for each in typed if each.method == method]
        assert {each.policy for each in ours} == POLICIES
        # The whole batch does not fit with every policy, and other numbers do.
        if method == "fsdp":
            assert any(each.step_time_s is None and each.count == 1 for each in ours)
            assert any(each.step_time_s and each.count > 1 for each in ours)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_typed_plan_is_below_the_bound_of_the_default(cluster, answers):
    benchmark, answer = answers
    found = answer(cluster)
    assert found["default"]["lower_bound_s"] > 0 and not found["below_the_bound"]
    # Bounds that are stated too high would be noticed.
    best = benchmark.Typed(**found["best"])
    high = found["default"] | {
        "lower_bound_s": 2 * best.step_time_s,
        "recompute": best.policy,
        "num_micro_batches": best.count,
    }
    assert benchmark.is_below_bound(best, high)
    assert not benchmark.is_below_bound(best, high | {"recompute": "another"})
    assert not benchmark.is_below_bound(best, high | {"num_stages": 2})


def test_what_a_typed_plan_that_is_faster_says(answers):
    benchmark, _ = answers
    found = {"default": {"step_time_s": 2.0}, "best_by_the_command_s": 1.0}
    assert benchmark.ratio_of(found) == 0.5
    assert benchmark.ratio_of(found | {"default": {"step_time_s": None}}) == 0.0
    neither = {"default": {"step_time_s": None}, "best_by_the_command_s": None}
    assert benchmark.ratio_of(neither) is None
    for best_s, met in ((1.0, False), (1.98, False), (1.991, True), (2.0, True)):
        asked = found | {"best_by_the_command_s": best_s, "below_the_bound": []}
        assert benchmark.is_met(asked) == met
        assert not benchmark.is_met(asked | {"below_the_bound": [{}]})


@pytest.mark.parametrize("page", ["README.md", "docs/choosing-a-method.md"])
def test_pages_say_how_many_typed_plans_were_compared(page):
    (record,) = (FOLDER / "results").glob("default_against_typed_*.md")
    (fit,) = re.findall(r"^\* that fit: (\d+)$", record.read_text(), re.MULTILINE)
    assert f"{int(fit):,}" in (FOLDER.parent / page).read_text()
