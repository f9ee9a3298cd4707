"""Aceso's database, configurations and performance model, on numbers that were added up by hand."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from command_line import refused, run
from interop.aceso_files import write_chain, write_database, write_toy_configuration

from aliquot.core import InputError
from aliquot.interop.aceso import (
    Faults,
    Judge,
    built_in_chains,
    configuration_to_dict,
    evaluate_configuration,
    load_database,
    make_chain,
    measured_size,
    models_in,
    read_chain,
    read_configuration,
    write_configuration,
)


@pytest.fixture
def files(tmp_path):
    return (
        write_database(tmp_path / "measured"),
        write_chain(tmp_path / "chain.toml"),
        write_toy_configuration(tmp_path / "configuration.json"),
    )


def judged(files, **mended):
    database, chain, configuration = files
    read = read_configuration(configuration)
    return evaluate_configuration(
        read,
        make_chain(read_chain(chain), read.settings),
        load_database(database, "toy_1B"),
        gpus_per_node=4,
        judge=Judge(name="aceso", faults=Faults(**mended)),
    )


def test_times_are_those_of_the_formulas(files):
    found = judged(files)
    first, second = found.stages
    # Half of 410 + 820 us on two GPUs; on one, norm and mix once more for the recomputation.
    assert first.compute_ms == pytest.approx(0.615)
    assert second.compute_ms == pytest.approx((310 + 620 + 310) / 1000)
    # 1 MiB at 1 GB/s and 8 at 4, and the gather of what `mix` takes cut; then 8 MiB twice at the
    # next smaller bandwidth.
    assert first.transfer_ms == pytest.approx(1.0 + 8 / 4 + 0.5)
    assert second.transfer_ms == pytest.approx(2 * 8 / 4)
    whole = sum(stage.compute_ms + stage.transfer_ms for stage in found.stages)
    slowest = max(stage.compute_ms + stage.transfer_ms for stage in found.stages)
    assert found.iteration_time_ms == pytest.approx(7 * slowest + whole)
    assert found.missing == ()


def test_memory_is_that_of_the_formulas(files):
    first, second = judged(files).stages
    assert first.state_mb == pytest.approx(8 * 15)
    # Two micro-batches in flight: what enters and half of 22 MiB of activations.
    assert first.activations_mb == pytest.approx(2 * (1 + 11))
    # Without the last operator 1 + 4 MiB, less than the weights.
    assert first.reserved_mb == pytest.approx(15)
    # `norm` is worked out again: it is not kept, and alive once.
    assert second.activations_mb == pytest.approx(8 + 18 - 6 + 6)


@pytest.mark.parametrize("fault", [field.name for field in fields(Faults)])
def test_each_fault_is_mended_alone(files, fault):
    before, after = judged(files), judged(files, **{fault: False})
    changes = {"coarse_bandwidths", "last_reserved_ignored"}
    assert (before != after) == (fault in changes)


def test_a_collective_that_was_not_measured_is_reported_and_interpolated_if_asked(files):
    database, *_ = files
    (database / "prim_toy_1B_all_gather_2gpus.csv").write_text(
        "data_size(MB),time(ms)\n4,0.3\n16,0.9\n"
    )
    found = judged(files)
    assert found.missing == ("all_gather of 8 MiB over 2 devices",)
    assert found.stages[0].transfer_ms > 100_000
    assert judged(files, exact_collectives=False).stages[0].transfer_ms == pytest.approx(
        1.0 + 2.0 + 0.5
    )


def test_missing_files_are_named(files):
    database, *_ = files
    (database / "toy_1B_mbs2_tp2_algo0.csv").unlink()
    assert load_database(database, "toy_1B").missing == (
        "micro-batch 2, tensor degree 2, algorithm 0: no file",
    )


def test_a_configuration_survives_writing(files, tmp_path):
    _, _, path = files
    read = read_configuration(path)
    write_configuration(read, tmp_path / "again.json")
    assert read_configuration(tmp_path / "again.json") == read
    assert configuration_to_dict(read) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("family", "sizes", "count"),
    [
        ("gpt", {"num_layers": 24}, 315),
        ("t5", {"num_layers": 24}, 821),
        ("resnet", {"num_layers": [3, 4, 6, 3]}, 134),
    ],
)
def test_built_in_chains_have_as_many_operators_as_acesos(family, sizes, count):
    assert len(make_chain(built_in_chains()[family], sizes).operators) == count


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            {"recompute_ops": [[0, 0], [1, 1]]},
            ["recompute_ops of stage 0 has 2 entries, and the stage 3 operators"],
        ),
        (
            {"num_gpus": [4, 1]},
            [
                "operator 0 of stage 0 has tensor degree 2 times data degree 1, and the stage 4"
                " devices"
            ],
        ),
        ({"micro_batch_size": 0}, ["`micro_batch_size`: expected `int` >= 1, got 0"]),
        (
            {"num_stages": 3},
            ["num_gpus must be a list of 3", "algo_of_each_op must be a list of 3"],
        ),
        (
            {"micro_batch_size": 4},
            ["stage 0 needs micro-batch per data-parallel rank 4; measured are 1, 2"],
        ),
    ],
)
def test_impossible_configurations_are_refused_with_every_fault(files, change, messages):
    database, chain, path = files
    write_toy_configuration(path, **change)
    options = (
        "--database",
        database,
        "--chain",
        chain,
        "--gpus-per-node",
        3 if "num_gpus" not in change else 5,
    )
    refused(run("aceso", "evaluate", path, *options), *messages)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("norm,1,2,3,4,5,6,7", "line 2: 9 columns are needed, got 8"),
        (
            "norm,1,2,3,oops,5,6,7,8",
            "line 2, column output_size: a number of at least 0 is needed, got 'oops'",
        ),
        (
            "norm,1,2,3,-4,5,6,7,8",
            "line 2, column output_size: a number of at least 0 is needed, got '-4'",
        ),
    ],
)
def test_corrupt_rows_are_named_by_file_line_and_column(files, text, message):
    database, *_ = files
    path = database / "toy_1B_mbs1_tp1_algo0.csv"
    path.write_text("\n".join([path.read_text().splitlines()[0], text]))
    with pytest.raises(InputError, match=message) as error:
        load_database(database, "toy_1B")
    assert str(path) in str(error.value)


def test_a_folder_without_a_database_is_refused(tmp_path):
    with pytest.raises(InputError, match="is no database of Aceso's"):
        models_in(tmp_path)
    with pytest.raises(InputError, match="cannot be read as a database"):
        models_in(tmp_path / "nowhere")


def test_an_unknown_model_is_refused_with_a_list_of_models(files):
    with pytest.raises(InputError, match=r"no measurements of toy_9B. It has toy_1B\."):
        load_database(files[0], "toy_9B")


def test_the_command_line_shows_and_evaluates(files):
    database, chain, configuration = files
    shown = json.loads(run("aceso", "show", database, "--json").stdout)
    assert shown["toy_1B"]["micro_batches"] == [1, 2]
    assert "toy_1B" in run("aceso", "show", database).stdout
    options = ("--database", database, "--chain", chain, "--gpus-per-node", 3)
    answer = json.loads(run("aceso", "evaluate", configuration, *options, "--json").stdout)
    assert (
        answer["iteration_time_ms"] == pytest.approx(max(answer["stage_time_ms"]))
        and answer["judge"] == "aceso"
    )
    found = run("aceso", "evaluate", configuration, *options, "--memory-limit-mb", 100)
    assert found.exit_code == 1 and "does not fit" in found.stdout


def test_a_size_may_be_evaluated_by_the_measurements_of_another(files, tmp_path):
    database, chain, configuration = files
    chain.write_text(chain.read_text() + '\n[sizes]\n"2B" = { measured_as = "1B" }\n')
    deeper = write_toy_configuration(tmp_path / "deeper.json", model_size="2B")
    options = ("--database", database, "--chain", chain, "--gpus-per-node", 3, "--json")
    own, other = (run("aceso", "evaluate", path, *options) for path in (configuration, deeper))
    assert json.loads(own.stdout) == json.loads(other.stdout)
    assert measured_size(built_in_chains()["t5"], "22B") == "11B"


def test_a_model_without_a_built_in_chain_is_refused_with_advice(files):
    database, _, configuration = files
    found = run("aceso", "evaluate", configuration, "--database", database, "--gpus-per-node", 3)
    refused(found, "operators of 'toy'", "--chain")
