"""Searches over measured databases: optimal on small random chains, and never above other
planners.
"""

from __future__ import annotations

import itertools
import json
import signal
from dataclasses import replace

import numpy as np
import pytest
from command_line import refused, run
from interop.aceso_files import write_chain, write_database

from aliquot.core import InputError
from aliquot.interop.aceso import (
    JUDGES,
    Configuration,
    StageConfiguration,
    built_in_chains,
    make_chain,
    read_configuration,
)
from aliquot.interop.aceso import _database as databases
from aliquot.interop.aceso.search import (
    PLANNERS,
    Exact,
    Grid,
    Incumbents,
    SearchProblem,
    read_problem,
)
from aliquot.interop.aceso.search._evenly import possible_cuts, spread_evenly_us
from aliquot.interop.aceso.search._measured_chain import MeasuredChain
from aliquot.interop.aceso.search._megatron import first_of_layers
from aliquot.interop.aceso.search._quotes import quote_all
from aliquot.planners.inter.bottleneck import Neighbours, Variant

_OPTIONS = (
    "--model",
    "toy",
    "--size",
    "1B",
    "--nodes",
    1,
    "--gpus-per-node",
    2,
    "--global-batch",
    8,
)


def random_problem(seed, *, judge="aceso"):
    """Three to five operators with two algorithms on two devices, and a memory limit that most
    configurations exceed.
    """
    rng = np.random.default_rng(seed)
    num = int(rng.integers(3, 5))
    names = [f"op{k}" for k in range(num)]
    algorithms = int(rng.integers(1, 3)) if num == 3 else 1
    layouts = {
        name: [
            [["tp", "dp", "1", "1"], ["1", "dp", "tp", "1"]],
            [["1", "dp", "tp", "1"], ["tp", "dp", "1", "1"]],
        ][:algorithms]
        for name in names[:2]
    }
    chain = make_chain(
        {
            "groups": [{"operators": names}],
            "layout": ["tp", "dp", "1", "1"],
            "layouts": layouts,
            "layer_starts": [name for name in names if rng.random() < 0.3],
            "resharding": bool(rng.random() < 0.7),
        },
        {},
    )
    table = rng.uniform(0.5, 1.0, (num, 2, 2, algorithms, len(databases.COLUMNS)))
    table[..., :2] *= 1000 * rng.uniform(0.5, 4, (num, 1, 1, 1, 2))
    table[:, 1] *= 1.6
    table[:, :, 1, :, :2] *= 0.6
    table[..., 2:4] = np.round(
        rng.choice([1.0, 2.0, 8.0], (num, 1, 1, 1, 2)) * np.array([1, 2])[:, None, None, None]
    )
    table[..., 4] *= 10 / np.array([1, 2])[:, None]
    table[..., 5] *= 60 * rng.uniform(0.2, 2, (num, 1, 1, 1))
    table[..., 6:] *= 20
    sizes = range(17)
    measured = databases.Database(
        model="random",
        operators={name: k for k, name in enumerate(names)},
        micro_batches=(1, 2),
        tensor_degrees=(1, 2),
        algorithms=tuple(range(algorithms)),
        table=table,
        collectives={
            (kind, 2): {s: 0.05 * s for s in sizes}
            for kind in ("all_gather", "all_to_all", "all_reduce")
        },
        within_nodes=databases.Transfers(
            sizes_mb=(1.0, 2.0, 4.0, 8.0), bandwidths_gb_per_s=(5.0, 8.0, 10.0, 12.0)
        ),
        between_nodes=databases.Transfers(
            sizes_mb=(1.0, 2.0, 4.0, 8.0), bandwidths_gb_per_s=(1.0, 2.0, 2.0, 3.0)
        ),
        missing=(),
    )
    problem = SearchProblem(
        chain=chain,
        database=measured,
        model_name="random",
        model_size="0",
        num_nodes=1,
        gpus_per_node=2,
        global_batch=int(rng.choice([4, 16])),
        micro_batches=(1, 2),
        memory_limit_mb=1e9,
        judge=JUDGES[judge],
    )
    return problem, rng


def all_configurations(problem):
    """Every configuration of the space that a bound holds for."""
    num = len(problem.chain.operators)
    database = problem.database

    def stages(devices, count, micro_batch):
        degrees = [
            (tp, devices // tp)
            for tp in database.tensor_degrees
            if devices % tp == 0
            and micro_batch % (devices // tp) == 0
            and micro_batch // (devices // tp) in database.micro_batches
        ]
        return [(t, d) for t, d in degrees]

    for micro_batch in problem.micro_batches:
        splits = [((0, num), (2,))] + [((0, cut, num), (1, 1)) for cut in range(1, num)]
        for cuts, devices in splits:
            parts = []
            for first, last, n in zip(cuts, cuts[1:], devices, strict=False):
                choices = []
                for k in range(first, last):
                    operator = problem.chain.operators[k]
                    algorithms = database.algorithms if operator.chooses_algorithm else (0,)
                    choices.append(
                        [
                            (t, d, a, r)
                            for t, d in stages(n, last - first, micro_batch)
                            for a in algorithms
                            for r in (False, True)
                        ]
                    )
                parts.append(
                    [
                        StageConfiguration(
                            num_devices=n,
                            tensor=tuple(c[0] for c in chosen),
                            data=tuple(c[1] for c in chosen),
                            algorithm=tuple(c[2] for c in chosen),
                            recompute=tuple(c[3] for c in chosen),
                        )
                        for chosen in itertools.product(*choices)
                        # Without resharding between operators, all of a stage have the same
                        # degrees.
                        if problem.chain.resharding or len({c[:2] for c in chosen}) == 1
                    ]
                )
            for chosen in itertools.product(*parts):
                yield problem.configuration(micro_batch, chosen)


def judged_by_stage(problem):
    """Times and memory of all configurations; infinite where a collective was never measured."""
    figures = []
    for configuration in all_configurations(problem):
        estimate = problem.evaluate(configuration)
        memory = max(stage.memory_mb for stage in estimate.stages)
        figures.append((estimate.iteration_time_ms if not estimate.missing else np.inf, memory))
    return np.array(figures)


@pytest.mark.parametrize(
    "block", [pytest.param(k, marks=() if k < 6 else pytest.mark.slow) for k in range(9)]
)
def test_the_exact_search_finds_what_brute_force_finds(block):
    for seed in range(10 * block, 10 * block + 10):
        problem, rng = random_problem(seed, judge="aceso" if seed % 3 else "aliquot")
        times, memory = judged_by_stage(problem).T
        limit = float(np.quantile(memory, rng.uniform(0.02, 0.5)))
        problem = replace(problem, memory_limit_mb=limit)
        wanted = times[memory <= limit + 1e-6].min()
        result = Exact(gap=1e-9, max_labels=20_000).search(problem)
        assert result.best[0][1].iteration_time_ms == pytest.approx(wanted, rel=1e-9), seed
        assert result.lower_bound_ms <= wanted * (1 + 1e-9), seed
        assert result.lower_bound_ms >= wanted * (1 - 1e-3), seed


@pytest.mark.parametrize("seed", range(12))
def test_a_known_configuration_rules_out_no_faster_one(seed):
    problem, rng = random_problem(seed, judge="aceso" if seed % 2 else "aliquot")
    times, memory = judged_by_stage(problem).T
    problem = replace(problem, memory_limit_mb=float(np.quantile(memory, rng.uniform(0.1, 0.5))))
    fitting = np.where(memory <= problem.memory_limit_mb + 1e-6, times, np.inf)
    ranked = np.argsort(fitting, kind="stable")
    slower = ranked[fitting[ranked] > fitting.min() * (1 + 1e-6)][0]
    known = next(itertools.islice(all_configurations(problem), int(slower), None))
    result = Exact(gap=1e-9, max_labels=20_000).search(problem, start=[known])
    assert result.best[0][1].iteration_time_ms == pytest.approx(fitting.min(), rel=1e-9)


def test_a_good_start_leaves_few_places_for_cuts():
    spaces = random_problem(0)[0].spaces(1)
    operators = len(next(iter(spaces.values())).kinds)
    even_us = spread_evenly_us(spaces, num_devices=2, memory_limit_mb=1e9) / 2
    within = [
        possible_cuts(spaces, num_devices=2, memory_limit_mb=1e9, stage_us=factor * even_us)
        for factor in (1.2, 1e6)
    ]
    assert within[1][1].sum() == operators - 1
    assert within[0][1].sum() < operators - 1
    assert not (within[0] & ~within[1]).any()


@pytest.mark.parametrize("seed", range(6))
def test_no_planner_is_faster_than_the_bound_and_every_answer_fits(seed):
    problem, rng = random_problem(seed)
    memory = judged_by_stage(problem)[:, 1]
    problem = replace(problem, memory_limit_mb=float(np.quantile(memory, rng.uniform(0.3, 0.8))))
    bound = Exact(gap=1e-9).search(problem).lower_bound_ms
    for name, planner in PLANNERS.items():
        result = planner(keep=3).search(problem) if name != "auto" else planner().search(problem)
        for configuration, estimate in result.best:
            assert estimate == problem.evaluate(configuration)
            assert (
                max(stage.memory_mb for stage in estimate.stages) <= problem.memory_limit_mb + 1e-6
            )
            assert estimate.iteration_time_ms >= bound * (1 - 1e-9), name
        times = [estimate.iteration_time_ms for _, estimate in result.best]
        assert times == sorted(times) and len({str(c) for c, _ in result.best}) == len(times)


@pytest.mark.parametrize("seed", range(6))
def test_the_grid_keeps_its_best_although_it_does_not_judge_every_point(seed):
    problem, _ = random_problem(seed)
    judged = Grid(keep=10_000).search(problem)
    few = Grid(keep=3).search(problem)
    times = [estimate.iteration_time_ms for _, estimate in judged.best[:3]]
    assert [estimate.iteration_time_ms for _, estimate in few.best] == times
    assert few.scored <= judged.scored


@pytest.mark.parametrize("name", PLANNERS)
def test_searches_are_deterministic(name):
    problem, _ = random_problem(3)
    first, second = (PLANNERS[name]().search(problem) for _ in range(2))
    assert first.best == second.best and first.lower_bound_ms == second.lower_bound_ms


def test_the_update_is_counted_once_in_a_step():
    problem, _ = random_problem(1, judge="aliquot")
    stage = StageConfiguration(
        num_devices=2, tensor=(1,) * 3, data=(2,) * 3, algorithm=(0,) * 3, recompute=(False,) * 3
    )
    num = len(problem.chain.operators)
    stage = replace(
        stage,
        **{f: getattr(stage, f)[:1] * num for f in ("tensor", "data", "algorithm", "recompute")},
    )
    configuration = problem.configuration(2, (stage,))
    without = replace(problem, judge=replace(problem.judge, counts_update=False))
    added = (
        problem.evaluate(configuration).iteration_time_ms
        - without.evaluate(configuration).iteration_time_ms
    )
    weights = problem.database.table[:, 0, 0, 0, databases.COLUMNS.index("weights")].sum()
    # An all-reduce of 16 MiB takes 0.8 ms; the optimizer reads and writes 8 copies of the weights
    # at 750 GB/s.
    assert added == pytest.approx(weights * (0.8 / 16 + 2 * 8 / 750), rel=1e-9)


@pytest.fixture
def toy(tmp_path):
    return write_database(tmp_path / "measured"), write_chain(tmp_path / "chain.toml")


def options(toy, **changes):
    database, chain = toy
    given = {
        "--database": database,
        "--chain": chain,
        "--num-layers": 4,
        "--memory-limit-mb": 900,
        "--micro-batch-sizes": "1,2,4",
        **dict(zip(_OPTIONS[::2], _OPTIONS[1::2], strict=True)),
        **changes,
    }
    return [text for key, value in given.items() if value is not None for text in (key, value)]


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_written_configuration_evaluates_to_the_printed_time(toy, tmp_path, planner):
    out = tmp_path / "best.json"
    answer = json.loads(
        run(
            "aceso",
            "search",
            *options(toy),
            "--planner",
            planner,
            "--top",
            2,
            "--out",
            out,
            "--json",
        ).stdout
    )
    wanted = {
        "iteration_time_ms",
        "stage_time_ms",
        "stage_memory_mb",
        "lower_bound_ms",
        "gap",
        "search_s",
        "configurations_scored",
        "best_found_at_s",
        "config",
        "missing",
        "judge",
    }
    assert wanted <= set(answer)
    database, chain = toy
    evaluated = run(
        "aceso",
        "evaluate",
        out,
        "--database",
        database,
        "--chain",
        chain,
        "--gpus-per-node",
        2,
        "--json",
    )
    judged = json.loads(evaluated.stdout)
    assert judged["iteration_time_ms"] == answer["iteration_time_ms"]
    assert judged["stage_memory_mb"] == answer["stage_memory_mb"]
    assert read_configuration(out).settings == {"num_layers": 4}
    assert out.with_name("best.2.json").exists()


def test_the_command_prints_the_gap_to_the_bound(toy):
    shown = run("aceso", "search", *options(toy)).stdout
    assert "lower bound" in shown and "cut at any operator" in shown and "search" in shown


def test_if_nothing_fits_the_smallest_need_is_printed(toy):
    found = run("aceso", "search", *options(toy, **{"--memory-limit-mb": 100}))
    assert found.exit_code == 1
    assert "optimizer state" in found.stderr and "--memory-limit-mb" in found.stderr
    limit = int(found.stderr.split("--memory-limit-mb ")[1].split()[0])
    assert run("aceso", "search", *options(toy, **{"--memory-limit-mb": limit})).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--micro-batch-sizes": "1,two"}, "numbers with commas"),
        ({"--micro-batch-sizes": "64"}, "micro-batch 64"),
        ({"--planner": "magic"}, "auto, exact, bottleneck, grid"),
        ({"--judge": "nobody"}, "aceso, aliquot"),
        ({"--num-layers": None}, "--num-layers"),
        ({"--chain": None}, "--chain"),
        ({"--size": "2B"}, "toy_1B"),
        ({"--nodes": 0}, "number of nodes must be at least 1"),
    ],
)
def test_bad_options_are_refused_with_advice(toy, changes, message):
    refused(run("aceso", "search", *options(toy, **changes)), message)


def test_micro_batches_that_were_not_measured_are_left_out_and_named(toy):
    answer = json.loads(run("aceso", "search", *options(toy), "--json").stdout)
    other = json.loads(
        run(
            "aceso", "search", *options(toy, **{"--micro-batch-sizes": "1,2,4,64"}), "--json"
        ).stdout
    )
    assert any("micro-batch 64" in line for line in other["missing"])
    assert other["iteration_time_ms"] == answer["iteration_time_ms"]


def toy_problem(toy, *, gpus_per_node, num_layers, memory_limit_mb):
    database, chain = toy
    problem, _ = read_problem(
        database,
        model="toy",
        size="1B",
        num_nodes=1,
        gpus_per_node=gpus_per_node,
        global_batch=8,
        memory_limit_mb=memory_limit_mb,
        micro_batches=(1,),
        judge=JUDGES["aceso"],
        chain=chain,
        num_layers=num_layers,
    )
    return problem


def test_a_quoted_stage_fits_and_takes_the_quoted_time(toy):
    problem = toy_problem(toy, gpus_per_node=1, num_layers=12, memory_limit_mb=1e9)
    uniform = quote_all(problem, 1)[1]
    num = len(problem.chain.operators)
    first, last, held, links = np.array([0]), np.array([num]), np.array([1]), np.zeros((1, 2), int)
    layer_us = float(uniform.space.again_us.sum())
    shares = set()
    for limit in np.linspace(2250, 2500, 60):
        (time_us,), (memory_mb,), (level,), (share,) = uniform.quote(
            np.array([0]), first, last, held, links, limit
        )
        shares.add(float(share))
        stage = StageConfiguration(
            num_devices=1,
            tensor=(1,) * num,
            data=(1,) * num,
            algorithm=(0,) * num,
            recompute=tuple(uniform.flags(0, int(level), float(share), 0, num).tolist()),
        )
        (judged,) = problem.evaluate(problem.configuration(1, (stage,))).stages
        judged_us = 1000 * (judged.compute_ms + judged.transfer_ms)
        assert judged.memory_mb <= max(memory_mb, limit) + 1e-6
        assert time_us * (1 - 1e-9) <= judged_us <= time_us + layer_us
    assert len(shares) > 3


def begun_with(problem):
    """Numbers of devices of the stages that relief begins with."""
    variant = Variant(number=0, chain=MeasuredChain.make(problem, 1), schedule="1f1b")
    around = Neighbours([variant], most_stages=problem.max_stages)
    return {tuple(around.sizes[0][option] for option in c.options) for c in around.balanced()}


def test_relief_begins_with_every_way_to_share_out_the_devices(toy):
    problem = toy_problem(toy, gpus_per_node=4, num_layers=6, memory_limit_mb=1e9)
    begun = begun_with(problem)
    assert begun == {(2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1, 1)}


def test_devices_of_a_large_node_are_shared_out_evenly(toy):
    problem = toy_problem(toy, gpus_per_node=16, num_layers=18, memory_limit_mb=1e9)
    begun = begun_with(problem)
    assert begun == {(2,) * 8, (1,) * 16}


def test_operators_that_were_not_measured_are_named(toy, tmp_path):
    chain = tmp_path / "other.toml"
    chain.write_text('[[groups]]\noperators = ["embed", "conv"]\n')
    with pytest.raises(InputError, match="conv"):
        read_problem(
            toy[0],
            model="toy",
            size="1B",
            num_nodes=1,
            gpus_per_node=2,
            global_batch=8,
            memory_limit_mb=1000,
            micro_batches=(1,),
            judge=JUDGES["aceso"],
            chain=chain,
        )


def test_an_interrupted_search_returns_its_best_so_far():
    problem, _ = random_problem(5)

    def interrupt(progress):
        if progress.best_ms < np.inf:
            raise KeyboardInterrupt

    result = PLANNERS["exact"](gap=0.0).search(problem, on_progress=interrupt)
    assert result.ended == "interrupted" and result.best
    assert isinstance(result.best[0][0], Configuration)


def test_megatrons_grid_is_searched_whole(toy):
    problem = toy_problem(toy, gpus_per_node=4, num_layers=4, memory_limit_mb=700.0)
    operators = problem.chain.operators
    layers = [k for k, operator in enumerate(operators) if operator.name == "norm"]
    times = []
    for stages, tensor, recomputed in itertools.product((1, 2, 4), (1, 2), (False, True)):
        devices = 4 // stages
        if devices % tensor:
            continue
        cuts = [0, *layers[4 // stages :: 4 // stages], len(operators)]
        made = problem.configuration(
            devices // tensor,
            tuple(
                StageConfiguration(
                    num_devices=devices,
                    tensor=(tensor,) * (b - a),
                    data=(devices // tensor,) * (b - a),
                    algorithm=(0,) * (b - a),
                    recompute=tuple(
                        recomputed and k not in (0, len(operators) - 1) for k in range(a, b)
                    ),
                )
                for a, b in itertools.pairwise(cuts)
            ),
        )
        judged = problem.evaluate(made)
        if max(stage.memory_mb for stage in judged.stages) <= problem.memory_limit_mb:
            times.append(judged.iteration_time_ms)
    found = PLANNERS["megatron"](keep=100).search(problem)
    assert 1 < len(times) < 10
    assert sorted(times) == [estimate.iteration_time_ms for _, estimate in found.best]
    stages = found.best[0][0].stages
    assert len({(stage.num_devices, stage.tensor[0]) for stage in stages}) == 1


def test_layers_of_every_family_are_found():
    chains = built_in_chains()
    counts = {
        "gpt": {"num_layers": 5},
        "t5": {"num_layers": 5},
        "resnet": {"num_layers": [3, 4, 6, 3]},
    }
    found = {
        family: len(first_of_layers(make_chain(chains[family], sizes)))
        for family, sizes in counts.items()
    }
    assert found == {"gpt": 5, "t5": 10, "resnet": 16}


def test_after_sigterm_the_best_so_far_is_the_answer(toy, tmp_path, monkeypatch):
    offer = Incumbents.offer

    def offer_and_stop(self, configuration):
        better = offer(self, configuration)
        signal.raise_signal(signal.SIGTERM)
        return better

    monkeypatch.setattr(Incumbents, "offer", offer_and_stop)
    before = signal.getsignal(signal.SIGTERM)
    database, chain = toy
    out = tmp_path / "best.json"
    found = run(
        "aceso",
        "search",
        "--database",
        database,
        "--chain",
        chain,
        "--num-layers",
        4,
        *_OPTIONS,
        *("--memory-limit-mb", 1e6, "--micro-batch-sizes", 1, "--planner", "grid", "--out", out),
    )
    assert found.exit_code == 143
    assert "interrupted; this is the best so far." in found.stderr
    assert "ended: interrupted" in found.stdout
    assert read_configuration(out).stages
    assert signal.getsignal(signal.SIGTERM) is before
