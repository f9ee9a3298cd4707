"""Reported steps are planned as users plan: `public_steps.py` of `benchmarks` with tiny models."""

import importlib
from pathlib import Path

import pytest

import aliquot as aq
from aliquot.core import InfeasibleError, InputError
from aliquot.zoo import build

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("public_steps")


def row(**changes):
    """A reported step of a tiny GPT on eight H100, as the database holds it."""
    model = {
        "name": "tiny",
        "layers": 2,
        "hidden": 64,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 32,
        "ffn": 128,
        "vocab": 256,
        "seq": 64,
        "mlp": "gelu",
        "tied_embeddings": True,
        **dict.fromkeys(("experts", "experts_per_token", "moe_ffn", "shared_experts", "note")),
    }
    degrees = dict.fromkeys(("dp", "tp", "pp", "vp", "cp", "ep", "sequence_parallel", "schedule"))
    facts = {
        "id": "tiny-8",
        "model": model,
        "cluster": {"device": "H100", "devices": 8, "devices_per_host": 8, "network": None},
        "parallelism": {**degrees, "fsdp": 8, "zero": 3},
        "batch": {
            "global_sequences": 16,
            "micro_batch_sequences": None,
            "num_micro_batches": 2,
        },
        "precision": "bf16",
        "recompute": "none",
        "attention": "flash",
        "framework": "llm-foundry / PyTorch FSDP",
        "measured": {"step_s": 0.001, "peak_memory_gib": None},
        "source": {"repo": "someone/somewhere"},
        "flags": [],
    }
    return facts | changes


def test_a_row_is_what_a_users_plan_says(benchmark):
    case = benchmark.express(row())
    assert case.cluster == aq.Cluster.preset("1x8xH100") and not case.cluster.device.calibration
    found = benchmark.plan_row(case)
    work = build(**case.settings, device=case.cluster.device)
    plan = aq.plan(
        *(work.train_step, work.state, work.batch),
        cluster=aq.Cluster.preset("1x8xH100"),
        method=aq.Zero3Parallel(),
        num_micro_batches=2,
    )
    assert found.step_s == plan.prediction.step_time_s and found.fits
    assert found.error == pytest.approx(1e3 * found.step_s - 1, abs=1e-4)
    (steps,) = benchmark.reported([found]) or (None,)
    assert steps is None or steps.errors == (found.error,)


def test_a_row_that_does_not_fit_is_counted_and_has_no_time(benchmark):
    batch = {"global_sequences": 2**23, "micro_batch_sequences": None, "num_micro_batches": 1}
    parallel = {**row()["parallelism"], "cp": 1, "tp": 2, "fsdp": 4}
    case = benchmark.express(row(batch=batch, parallelism=parallel, framework="NeMo / Megatron"))
    found = benchmark.plan_row(case)
    assert not found.fits and found.step_s is None
    assert found.needed_bytes > case.cluster.device.memory_bytes
    tables = benchmark.make_tables([found])
    (told,) = tables["Steps that ran and are predicted not to fit"]
    assert told["row"] == "tiny-8"
    assert tables["Programs of other frameworks"][0]["do not fit"] == 1


@pytest.mark.parametrize(
    ("framework", "said", "planned"),
    [
        ("Megatron-LM 23e00ed0", "none", "fused"),
        ("NeMo / Megatron", "", "fused"),
        ("NeMo / Megatron", "full", "block"),
        ("fms-fsdp (PyTorch FSDP, compiled)", "none", "fused"),
        ("llm-foundry / PyTorch FSDP", "none", "none"),
        ("MaxText", "none", "none"),
    ],
)
def test_kernels_that_fuse_keep_less_without_recomputation(framework, said, planned, benchmark):
    case = benchmark.express(row(framework=framework, recompute=said))
    assert case.settings["recompute"] == planned


def test_layers_are_looped_over_where_a_step_fits_only_so(benchmark, monkeypatch):
    asked = []

    def refuse(case):
        asked.append(case.settings["scan"])
        raise InfeasibleError("no room")

    monkeypatch.setattr(benchmark, "plan_case", refuse)
    for framework in ("NeMo / Megatron", "MaxText", "MaxText, scan off"):
        assert not benchmark.plan_row(benchmark.express(row(framework=framework))).fits
    assert asked == [False, True, True, False, True]


def test_layers_recompute_what_the_row_says_and_nothing_more(benchmark, monkeypatch):
    """Without a word on it `aliquot.plan` takes the fastest way to recompute."""
    asked = []
    monkeypatch.setattr(benchmark.aq, "plan", lambda *step, **options: asked.append(options))
    for recompute in ("none", "full"):
        benchmark.plan_case(benchmark.express(row(recompute=recompute)))
    assert [options["recompute"] for options in asked] == ["none", "none"]


def test_devices_without_calibration_have_a_table_of_their_own(benchmark):
    def of(device, step_s):
        where = {"device": device, "devices": 8, "devices_per_host": 8, "network": None}
        known = {"step_s": step_s, "reason": "", "needed_bytes": 1.0, "fits": True}
        parallel = {**row()["parallelism"], "cp": 2, "fsdp": None, "dp": 4}
        case = benchmark.express(row(cluster=where, parallelism=parallel))
        return benchmark.Row(case=case, **known, parts={}, cpu_s=0.0)

    # Reported: 0.001 s.
    rows = [of("B300", 0.001 / t) for t in (1.0, 1.1, 1.2, 1.3, 3.0)]
    rows += [of("MI300X", 0.001 / 1.15), of("H100", 0.0001)]
    b300, mi300x = benchmark.make_tables(rows)[benchmark._SHEETS]
    assert (b300["device"], b300["steps"], b300["in that of all"]) == ("B300", 5, 4)
    assert (mi300x["range of the others"], mi300x["in that of the others"]) == ("1.00 to 1.30", 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recompute": "custom: offload decoder_layer_input"}, "arrays in host memory"),
        ({"zoo": {"model": {"family": "bert"}}}, "a model that is not in the zoo"),
        ({"precision": "NVFP4 (fp4)"}, "products of 4 bits"),
        ({"flags": ["optimizer states are split inside a host and repeated"]}, ""),
    ],
)
def test_what_cannot_be_expressed_is_named(changes, said, benchmark):
    if said:
        with pytest.raises(InputError, match=said):
            benchmark.express(row(**changes))
        return
    data = {**row()["parallelism"], "fsdp": None, "dp": 8}
    case = benchmark.express(row(**changes, parallelism=data))
    assert case.method == aq.Zero2Parallel(shard_within="host")
    with pytest.raises(InputError, match="inside a host beside tensor parallelism"):
        benchmark.express(row(**changes, parallelism={**data, "tp": 2}))
