"""Suites: what they hold, how files are read, and cases made small."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from aliquot.core import InputError
from aliquot.suites import (
    GivenStage,
    alpa_suites,
    build_case,
    find_cases,
    find_suite,
    operations,
    parse_suites,
    small_case,
    stage_bounds,
)
from aliquot.suites._suite import _Fields

# How many cases there are, and for how many devices: as in Alpa's repository.
SIZES = {
    "gpt.perf_test_auto": (7, 64),
    "moe.perf_test_auto": (7, 64),
    "wresnet.perf_test_auto": (7, 64),
    "unet.perf_test_auto": (3, 8),
    "unet.grid_search_auto": (1, 4),
    "gpt.grid_search_auto": (28, 64),
    "moe.grid_search_auto": (24, 64),
    "wresnet.grid_search_auto": (13, 64),
    "gpt.perf_test_manual": (4, 64),
    "gpt.perf_test_fast_2d": (3, 8),
    "moe.perf_test_fast_2d": (4, 8),
    "wresnet.perf_test_2d": (7, 8),
    "gpt_inference.profile": (420, 256),
    "gpt_no_embedding_inference.profile": (420, 256),
    "moe_inference.profile": (400, 128),
}
ALL = [case for suite in alpa_suites().values() for case in suite.cases]
EXPRESSIBLE = [case for case in ALL if not case.not_expressible]


def test_every_suite_has_its_cases():
    found = {
        name: (len(suite.cases), max(case.num_devices for case in suite.cases))
        for name, suite in alpa_suites().items()
    }
    assert found == SIZES


def test_every_case_is_a_model_whose_batch_divides():
    for case in EXPRESSIBLE:
        assert case.global_batch % (case.num_micro_batches * case.config.batch_multiple) == 0 or (
            case.forward_only
        )
        assert operations(case) > 0


@pytest.mark.parametrize(
    ("suite", "number", "seconds", "tflops"),
    [("gpt.perf_test_manual", 3, 2.464, 37.01), ("gpt.perf_test_auto", 1, 71.11, 46.2)],
)
def test_operations_are_counted_as_published(suite, number, seconds, tflops):
    """Throughput of published seconds is the published throughput."""
    case = alpa_suites()[suite].cases[number - 1]
    assert operations(case) / seconds / case.num_devices / 1e12 == pytest.approx(tflops, rel=2e-3)


@pytest.mark.parametrize("suite", ["gpt.perf_test_auto", "moe.perf_test_auto"])
def test_layers_are_counted_once_for_each_pass(suite):
    case = alpa_suites()[suite].cases[0]
    config = case.config
    tokens = case.global_batch * config.seq_len
    vocabulary = 6 * tokens * config.hidden_size * config.vocab_size
    forward, plain, again = (
        operations(replace(case, **how)) - vocabulary
        for how in ({"forward_only": True}, {"recompute": False}, {"recompute": True})
    )
    assert (plain / forward, again / forward) == pytest.approx((3, 4))


def test_small_cases_keep_the_kind_of_plan_and_fit_eight_devices():
    for case in EXPRESSIBLE:
        small = small_case(case)
        assert small.num_devices <= 8 and small.num_devices <= case.num_devices
        assert small.config.batch_multiple <= small.global_batch // small.num_micro_batches
        assert small.searches == case.searches and bool(small.layout) == bool(case.layout)
        assert sum(math.prod(stage.mesh) for stage in small.stages) in (0, small.num_devices)
        assert small.num_micro_batches <= 4


def test_stages_of_single_devices_are_joined_where_they_are_too_many():
    (case,) = find_cases(alpa_suites()["gpt.perf_test_auto"], (7,))
    assert small_case(case).stages == (GivenStage(layers=1, mesh=(1, 1)),) * 8
    (case,) = find_cases(alpa_suites()["gpt.perf_test_auto"], (4,))
    assert [(s.layers, s.mesh) for s in small_case(case).stages] == [
        (1, (2, 1)),
        (1, (2, 1)),
        (2, (4, 1)),
    ]


def test_blocks_are_shared_out_as_layers_say():
    names = ["embed", *(f"layers[{k}]" for k in range(6)), "head"]
    assert stage_bounds([1, 2], names) == ((0, 3), (3, 8))
    # Rounding leaves every stage a block.
    assert stage_bounds([1, 1, 1, 97], names) == ((0, 2), (2, 3), (3, 4), (4, 8))
    with pytest.raises(InputError, match="7 stages need as many blocks, and there are 6"):
        stage_bounds([1] * 7, names)


def test_lists_stand_for_all_combinations():
    text = """
    [suite."mine.own"]
    model = "gpt-350m"
    tensor = 2
    cases = [{ batch = [8, 16], pipeline = [1, 2, 4] }, { devices = 3, tensor = 3, batch = 9 }]
    """
    cases = parse_suites(text, asked="it")["mine.own"].cases
    assert [(c.number, c.global_batch, c.layout) for c in cases[:3]] == [
        (1, 8, (1, 2, 1)),
        (2, 8, (1, 2, 2)),
        (3, 8, (1, 2, 4)),
    ]
    assert len(cases) == 7 and cases[-1].layout == (1, 3, 1)


def test_everything_wrong_with_a_file_is_listed():
    unknown = """
    [suite.a]
    bach = 3
    cases = [{ model = "gpt-350m", stages = [{ layer = 2, mesh = "2x1" }] }]
    """
    with pytest.raises(InputError) as refused:
        parse_suites(unknown, asked="it")
    assert "`suite.a.bach`: there is no such field: did you mean 'batch'?" in str(refused.value)
    assert "`suite.a.cases[0].stages[0].layer`" in str(refused.value)
    wrong = """
    [suite.a]
    cases = [
      { model = "gpt-350n", batch = 3, micro_batches = 2, data = 2, devices = 4 },
      { model = "gpt-350m", batch = 8, mesh = "2by1", tensor = 2 },
      { model = "gpt-350m", batch = 8 },
    ]
    [suite.b]
    cases = []
    """
    with pytest.raises(InputError) as refused:
        parse_suites(wrong, asked="it")
    for fault in (
        "row 1: there is no model 'gpt-350n': did you mean",
        "row 1: 2 micro-batches do not divide a batch of 3",
        "row 1: `devices` is 4, and data, tensor, pipeline make 2",
        "row 2: `mesh` '2by1' is no mesh of two axes, such as 4x2",
        "row 2: data, tensor, pipeline and mesh exclude each other",
        "row 3: `devices` is missing",
        "`suite.b`: it has no cases",
    ):
        assert fault in str(refused.value)


def test_cases_have_the_optimizers_that_they_ran_with():
    suites = alpa_suites()
    found = {
        name: {(case.optimizer, case.momentum) for case in suites[name].cases}
        for name in ("gpt.perf_test_auto", "moe.perf_test_auto", "wresnet.grid_search_auto")
    }
    assert list(found.values()) == [{("adamw", 0.0)}, {("adafactor", 0.0)}, {("sgd", 0.9)}]
    built = build_case(small_case(suites["moe.perf_test_auto"].cases[1]))
    assert built.reference.settings["optimizer"] == "adafactor"
    text = """
    [suite.a]
    cases = [
      { model = "gpt-350m", batch = 8, devices = 2, momentum = 0.9 },
      { model = "gpt-350m", batch = 8, devices = 2, optimizer = "adam" },
    ]
    """
    with pytest.raises(InputError, match="optimizer"):
        parse_suites(text, asked="it")
    with pytest.raises(InputError, match="others have moments of their own"):
        parse_suites(text.replace('"adam"', '"sgd"'), asked="it")


def test_unknown_suites_and_cases_are_told_the_nearest():
    with pytest.raises(InputError, match=r"did you mean 'gpt\.perf_test_auto'"):
        find_suite("gpt.perf_test_atuo", alpa_suites())
    with pytest.raises(InputError, match="count from 1 to 4"):
        find_cases(alpa_suites()["gpt.perf_test_manual"], (5,))
    assert find_suite("gpt", alpa_suites()).name == "gpt.grid_search_auto"


def test_suites_of_the_documentation_are_read():
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    (shown,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    suite = parse_suites(shown, asked="it")["mine.layouts"]
    assert [case.parallel.split(",")[0] for case in suite.cases][3:] == [
        "dp2 tp2 pp2",
        "mesh 4x2",
        "1 x (1 layers on 2x1)",
        "search",
    ]
    assert set(_Fields.__struct_fields__) == set(re.findall(r"`(\w+)`", _column(text)))


def _column(text: str) -> str:
    """The names in the first column of the table of fields."""
    table = text[text.index("| field | meaning |") :].splitlines()
    return " ".join(line.split("|")[1] for line in table if line.startswith("|"))
