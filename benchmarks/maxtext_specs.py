"""Does MaxText's own training step split its arrays as the plan whose settings it was given?

    PYTHONPATH=MAXTEXT/src python benchmarks/maxtext_specs.py [--python PYTHON] [--platform v5e-8]

A small Llama (for `ep` a small Mixtral) is planned for 8 devices, exported, and MaxText compiles
its step with these settings. Every parameter and both of Adam's moments are compared, dim by dim.
Rules go by the names of dims, so that the storage of an array may be split along another dim than
in a plan that was searched freely: then the same step is planned again with the splits that
`aq.export` says (`ManualParallel`), and exported again. `make maxtext-test MAXTEXT=...` makes the
environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _results import Report, options

import aliquot as aq
from aliquot.interop.frameworks import maxtext_axes
from aliquot.planners import method_by_name
from aliquot.plans import ModelReference, Plan
from aliquot.zoo import MixtralConfig, ModelConfig, build

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_size": 32,
    "ffn_size": 512,
    "vocab_size": 512,
    "seq_len": 128,
}
DENSE = ModelConfig(name="tiny", family="llama", tied_embedding=False, **SIZES)
SPARSE = MixtralConfig(name="tiny-experts", num_experts=4, top_k=2, **SIZES)
CASES: dict[str, tuple[str, ModelConfig | MixtralConfig]] = {
    "dp": ("dp", DENSE),
    "fsdp": ("fsdp", DENSE),
    "tp": ("megatron:dp2,tp4", DENSE),
    "fsdp + tp": ("megatron:dp4,tp2,fsdp", DENSE),
    "ep": ("megatron:dp2,ep4", SPARSE),
    "cp": ("megatron:dp4,cp2,gather,fsdp", DENSE),
}
# What MaxText calls the sizes.
MODEL = {
    "base_emb_dim": 256,
    "base_num_query_heads": 8,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 512,
    "base_num_decoder_layers": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
EXPERTS = {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "megablox": "false",
    "sparse_matmul": "false",
    "base_moe_mlp_dim": 512,
}
# Patterns of MaxText's paths, the endings of the zoo's, and MaxText's dims of the zoo's, where it
# has heads and their width apart.
ARRAYS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    (r"token_embedder.*embedding", "embed.embedding", ()),
    (r"logits_dense.*kernel", "head.kernel", ()),
    (r"self_attention.*query.*kernel", "attn.q.kernel", (0, 1)),
    (r"self_attention.*key.*kernel", "attn.k.kernel", (0, 1)),
    (r"self_attention.*value.*kernel", "attn.v.kernel", (0, 1)),
    (r"self_attention.*out.*kernel", "attn.out.kernel", (0, 2)),
    (r"mlp.*wi_0.*kernel", "mlp.gate.kernel", ()),
    (r"mlp.*wi_1.*kernel", "mlp.up.kernel", ()),
    (r"mlp.*wo.*kernel", "mlp.down.kernel", ()),
    (r"pre_self_attention_layer_norm.*scale", "norm1.scale", ()),
    (r"post_self_attention_layer_norm.*scale", "norm2.scale", ()),
    (r"decoder_norm.*scale", "norm.scale", ()),
    (r"MoeBlock_0'\]\['gate'\]\['kernel", "moe.router", ()),
    (r"MoeBlock.*wi_0", "moe.gate", ()),
    (r"MoeBlock.*wi_1", "moe.up", ()),
    (r"MoeBlock.*wo", "moe.down", ()),
)
Splits = Mapping[str, Sequence[Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan and its settings for MaxText; splits are in MaxText's axes."""

    plan: Plan
    text: str
    rules_split: Splits
    plan_splits: Splits
    lost: tuple[str, ...]


def exported(name: str, splits: Splits | None = None) -> Exported:
    """The plan of a case, or of the same step with given splits of its parameters."""
    layout, config = CASES[name]
    made = build(config, 16, dtype="bf16", recompute="minimal", attention="plain")

    def plan(method: Any) -> Plan:
        model = ModelReference(kind="zoo", name=config.name, settings=made.settings)
        arguments = {"cluster": aq.Cluster.preset("8xcpu"), "method": method, "model": model}
        return aq.plan(made.train_step, made.state, made.batch, **arguments, num_micro_batches=1)

    named = plan(method_by_name(layout))
    stage = named.stages[0]
    if splits is not None:
        # Moments end as the parameters that they belong to.
        specs: dict[str, Any] = {
            "*" + path.removeprefix("state.params"): [tuple(axes) or None for axes in dims]
            for path, dims in splits.items()
        }
        axes = maxtext_axes(named)
        for array in named.inputs:
            if array.role == "batch":
                dims = stage.shardings[array.path]
                specs[array.path] = [tuple(axes[each] for each in dim) or None for dim in dims]
        named = plan(
            aq.ManualParallel(
                specs=specs,
                mesh_shape=stage.mesh_shape,
                axis_names=tuple(axes[axis] for axis in stage.axis_names),
            )
        )
    written = aq.export(named, "maxtext")
    axes = maxtext_axes(named)
    plan_splits = {
        array.path: [[axes[axis] for axis in dim] for dim in named.stages[0].shardings[array.path]]
        for array in named.inputs
        if array.role == "parameter"
    }
    return Exported(
        plan=named,
        text=written.text,
        rules_split=written.splits,
        plan_splits=plan_splits,
        lost=written.lost,
    )


def compiled(settings: Mapping[str, str], *, python: str, platform: str = "cpu") -> dict[str, Any]:
    """By case, the arrays of MaxText's state with their splits.

    Args:
        settings: by case, settings as text; a case begins with the name of one of `CASES`.
        python: of the environment in which MaxText is.
        platform: "cpu", or a topology of TPUs that the compiler in that environment knows.
    """
    with tempfile.TemporaryDirectory() as folder:
        cases = {}
        for index, (name, text) in enumerate(settings.items()):
            path = Path(folder) / f"case{index}.yml"
            path.write_text(text)
            cases[name] = {
                "settings": str(path),
                "more": EXPERTS if CASES[name.partition(",")[0]][1] is SPARSE else {},
            }
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"platform": platform, "model": MODEL, "cases": cases}))
        script = Path(__file__).with_name("_maxtext_arrays.py")
        done = subprocess.run(
            [python, str(script), str(job)], capture_output=True, text=True, cwd=folder
        )
    if done.returncode:
        raise SystemExit(f"MaxText did not compile:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def compared(arrays: Mapping[str, Any], splits: Splits) -> tuple[int, dict[str, Any]]:
    """How many of MaxText's arrays are split as given, and both splits of each other array."""
    equal, others = 0, {}
    for path, array in arrays.items():
        if not array["shape"]:
            continue
        layer = re.search(r"layers_(\d+)", path)
        inside = f"layers[{layer[1]}]." if layer else "params."
        found = next((row for row in ARRAYS if re.search(row[0], path)), None)
        want = splits.get(f"state.params.{inside if layer else ''}{found[1]}") if found else None
        if found is None or want is None:
            others[path] = {"no array of the plan": array["shape"]}
            continue
        dims = found[2] or range(len(array["axes"]))
        got = [sorted(array["axes"][dim]) for dim in dims]
        rest = [array["axes"][dim] for dim in range(len(array["axes"])) if dim not in dims]
        wanted = [sorted(axes) for axes in want]
        wanted += [[]] * (len(got) - len(wanted))
        if got == wanted and not any(rest):
            equal += 1
        else:
            others[path] = {"MaxText": got, "plan": wanted}
    return equal, others


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more)
    if chosen.platform != "cpu":
        chosen.hardware += f"-{chosen.platform}"
    report = Report(
        name="maxtext_specs",
        question="MaxText's own step compiled with exported settings: splits of all arrays",
        bar=(
            f"all arrays as in the plan, {len(CASES)} of {len(CASES)} layouts; where rules cannot"
            " say a plan, as in the one that they say"
        ),
        method=(
            f"MaxText's train_step, compiled for {_devices(chosen.platform)}, from the file that"
            " `aq.export` wrote and the sizes of a model of 2 layers. Counted are all arrays of its"
            " state with dims: parameters and both moments of AdamW. Where rules split the storage"
            " of some arrays along another dim, `with the rules' splits` is the same step planned"
            " with what `aq.export` says (ManualParallel)."
        ),
    )
    plans = {name: exported(name) for name in CASES}
    again = {
        f"{name}, with the rules' splits": exported(name, one.rules_split)
        for name, one in plans.items()
        if {**one.rules_split} != {p: tuple(map(tuple, d)) for p, d in one.plan_splits.items()}
    }
    both = {**plans, **again}
    arrays = compiled(
        {name: one.text for name, one in both.items()},
        python=chosen.python,
        platform=chosen.platform,
    )
    rows, whole = [], dict[str, bool]()
    for name, one in both.items():
        layout = name.partition(",")[0]
        equal, others = compared(arrays[name], one.plan_splits)
        as_said, _ = compared(arrays[name], one.rules_split)
        now, named = one.plan.prediction, plans[layout].plan.prediction
        rows.append(
            {
                "layout": name,
                "method": one.plan.method,
                "arrays": equal + len(others),
                "as in the plan": equal,
                "as export says": as_said,
                "step, beside the named plan's": now.step_time_s / named.step_time_s,
                "memory, beside it": now.peak_memory_bytes / named.peak_memory_bytes,
            }
        )
        whole[name] = not others
    report.tables["Layouts"] = rows
    as_named = sum(whole[name] for name in plans)
    met = sum(any(whole[n] for n in whole if n.partition(",")[0] == name) for name in plans)
    report.summary |= {
        "all arrays as in the plan of that name": f"{as_named} of {len(CASES)}",
        "all arrays as in that plan, or in one with the rules' splits": f"{met} of {len(CASES)}",
        "all arrays as aq.export says": (
            f"{sum(row['as export says'] == row['arrays'] for row in rows)} of {len(rows)}"
        ),
    }
    return report.finish(chosen, met=met == len(CASES))


def _devices(platform: str) -> str:
    return "8 virtual CPU devices" if platform == "cpu" else f"{platform} without devices"


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", default=sys.executable, help="of MaxText's environment")
    parser.add_argument("--platform", default="cpu", help="cpu, or a topology such as v5e-8")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    raise SystemExit(main())
