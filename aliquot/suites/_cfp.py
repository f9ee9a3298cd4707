"""The cases of CFP's artifact: layers planned from ParallelBlocks, beside what was published.

Reference: arXiv 2504.00598 and the scripts and the description of its artifact.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..cluster import Cluster
from ..core import InfeasibleError, InputError
from ..cost import Picked, evaluate, make_problem, price
from ..graph import capture
from ..planners import ILP, DataParallel, IntraSolution, Progress
from ..profiling import (
    SegmentedStep,
    compile_part,
    compose,
    priced_combinations,
    segment_step,
    time_part,
)
from ..zoo import build_layers, configure
from ._results import Results


@dataclass(frozen=True, slots=True)
class CfpCase:
    """A model with some of its layers, as the artifact's scripts run it: batch of a step, devices.

    Attributes:
        published_s, published_flops, published_alpa_s: seconds and operations of a step that the
            artifact's description shows, and seconds of Alpa; None where it shows none.
    """

    title: str
    model: str
    num_layers: int
    global_batch: int
    num_devices: int
    seq_len: int = 1024
    published_s: float | None = None
    published_flops: float | None = None
    published_alpa_s: float | None = None

    @property
    def name(self) -> str:
        """Such as `GPT gpt-6.7b: batch 16, 4 layers, 8 devices`."""
        return (
            f"{self.title} {self.model}: batch {self.global_batch}, {self.num_layers} layers,"
            f" {self.num_devices} devices"
        )


# Sizes of the scripts. Published figures are of A100 GPUs on PCIe.
CFP_CASES = (
    CfpCase("MoE", "moe-7.1b", 4, 32, 4),
    CfpCase("MoE", "moe-7.1b", 4, 64, 4, published_s=0.4479, published_flops=52.989e12),
    CfpCase("MoE", "moe-7.1b", 2, 96, 4),
    CfpCase("MoE", "moe-7.1b", 2, 128, 4),
    CfpCase("GPT", "gpt-6.7b", 4, 16, 8),
    CfpCase(
        *("GPT", "gpt-6.7b", 2, 24, 8),
        published_s=0.2920,
        published_flops=59.3736e12,
        published_alpa_s=0.3769,
    ),
    CfpCase("GPT", "gpt-6.7b", 2, 32, 8, published_flops=79.165e12),
    *(
        CfpCase("BERT", "bert-760m", layers, batch, 8)
        for batch, layers in ((8, 8), (16, 4), (32, 2))
    ),
    *(CfpCase("Llama", "llama-7b", 4, batch, 4, 128) for batch in (32, 64, 80)),
    *(CfpCase("Llama", "llama-11b", 2, batch, 8, 128) for batch in (16, 64, 96, 128)),
)
_SMALL = {"hidden_size": 64, "num_heads": 4, "seq_len": 32, "vocab_size": 256}
_SMALL_BATCH = 16
_ALPAS_RULE = {
    "collective_efficiency": 1.0,
    "all_to_all_efficiency": 1.0,
    "scatter_gather_share": 1.0,
    "collective_overhead_s": 0.0,
    "overlap_fraction": 0.0,
    "activation_overlap": 0.0,
}


def find_cfp_cases(only: str, numbers: Sequence[int]) -> tuple[CfpCase, ...]:
    """Those with a text in their title or model, and of these the ones with some numbers, from 1;
    an empty text and no numbers are all.

    Raises:
        InputError: there are none.
    """
    most = len(CFP_CASES)
    wrong = ", ".join(str(number) for number in numbers if not 1 <= number <= most)
    if wrong:
        raise InputError(f"--case {wrong}: there are cases 1 to {most}.")
    chosen = [CFP_CASES[number - 1] for number in dict.fromkeys(numbers)] or CFP_CASES
    found = tuple(c for c in chosen if only.lower() in f"{c.title} {c.model}".lower())
    if not found:
        titles = ", ".join(dict.fromkeys(case.title for case in chosen))
        raise InputError(f"--only {only}: there are {titles}.")
    return found


def make_cfp_rows(
    cases: Sequence[CfpCase],
    device: str,
    cluster_of: Callable[[int], Cluster],
    results: Results,
    *,
    measure: Callable[[CfpCase], dict[str, Any]] | None,
    mode: str,
    progress: Progress,
) -> list[dict[str, Any]]:
    """What is predicted of each case, and measured of its small form, as plain data; shown as a
    table and a chart.

    Args:
        cluster_of: so many devices of the kind that is planned for.
        measure: runs a case in its small form; None if none is run.
        mode: how it is run: rows of other modes are others.
    """
    rows = []
    for done, case in enumerate(cases):
        progress(case.name, done, len(cases))
        cluster = cluster_of(case.num_devices)
        predict = functools.partial(predicted_blocks, case, cluster)
        row = results.row(f"predicted for {device}: {case}", predict)
        if measure is not None:
            row = row | results.row(f"{mode}: {case}", functools.partial(measure, case))
        rows.append(row)
    _deliver(device, rows, results)
    return rows


def predicted_blocks(case: CfpCase, cluster: Cluster) -> dict[str, Any]:
    """The best composed of segments, judged as a whole step beside `DataParallel` and what Alpa's
    rule chooses.
    """
    step, flops = cfp_step(case, cluster)
    combinations = priced_combinations(step)
    composed = compose(
        step, combinations, memory_limit_bytes=step.problem.memory_limit_bytes, most=5
    )
    whole = [(c, s) for c in composed if (s := step.whole(c.options)) is not None]
    best, solution = min(whole, key=lambda pair: pair[1].step_time_s) if whole else (None, None)
    data_parallel_s: float | None = None
    try:
        data_parallel_s = evaluate(DataParallel().solve(step.problem).picked).total_s
    except InfeasibleError:
        # It does not fit, and has no step time.
        pass
    return {
        "case": dataclasses.asdict(case),
        "num_programs": step.num_programs,
        "options": [list(o) for o in best.options if o] if best else None,
        "step_time_s": solution.step_time_s if solution else None,
        "memory_bytes": solution.peak_bytes if solution else None,
        "flops": flops,
        "flops_per_s": flops / solution.step_time_s if solution else None,
        "data_parallel_s": data_parallel_s,
        "alpa_s": _alpas_s(step),
    }


def _alpas_s(step: SegmentedStep) -> float | None:
    """Step time, by the same judge, of the splits that Alpa's rule prefers: a collective costs its
    bytes over the links' bandwidth, whatever its kind, and nothing is hidden. None if none fits.

    Reference: L. Zheng et al., "Alpa: automating inter- and intra-operator parallelism for
    distributed deep learning", OSDI 2022, section 4.
    """
    cluster, priced = step.mesh.cluster, step.space.priced
    device = dataclasses.replace(
        cluster.device, calibration={**cluster.device.calibration, **_ALPAS_RULE}
    )
    mesh = dataclasses.replace(step.mesh, cluster=dataclasses.replace(cluster, device=device))
    by_rule = price(step.problem, mesh, choices=[node.choices for node in priced.nodes])
    space = dataclasses.replace(step.space, priced=by_rule)
    limit_bytes = step.problem.memory_limit_bytes
    chosen = ILP().solve(step.problem, space, memory_limit_bytes=limit_bytes)
    if chosen is None:
        return None
    return evaluate(Picked(priced=priced, picks=chosen.picked.picks)).total_s


def measured_blocks(case: CfpCase, devices: Sequence[Any]) -> dict[str, Any]:
    """The best of the cost model and data parallelism at a very small size, run on the first of
    some devices.

    Raises:
        InputError: there are too few.
    """
    if len(devices) < case.num_devices:
        raise InputError(
            f"{case.name}: all processes together have {len(devices)} devices. Start more of them,"
            " give each more (--num-devices-per-host), or choose cases for fewer, such as --only"
            " MoE for 4."
        )

    def seconds(step: SegmentedStep, solution: IntraSolution | None) -> float | None:
        if solution is None:
            return None
        choices = solution.picked.choices
        part = compile_part(step.problem, choices, step.mesh.shape, step.mesh.axis_names)
        return time_part(part).seconds

    small = dataclasses.replace(case, num_layers=2, global_batch=_SMALL_BATCH)
    sizes = {**_SMALL, **({"num_experts": 8} if case.title == "MoE" else {})}
    step, _ = cfp_step(small, Cluster.detect(devices[: case.num_devices]), sizes)
    (best,) = compose(step, priced_combinations(step), most=1)
    parallel = step.whole([(0,) * len(kind.blocks) for kind in step.kinds])
    return {
        "small_options": [list(o) for o in best.options if o],
        "small_measured_s": seconds(step, step.whole(best.options)),
        "small_data_parallel_s": seconds(step, parallel),
    }


def cfp_step(
    case: CfpCase, cluster: Cluster, sizes: Mapping[str, Any] | None = None
) -> tuple[SegmentedStep, float]:
    """The step of a case in segments, and its operations as the artifact counts them.

    Args:
        sizes: changed ones of the model.
    """
    settings = {"num_layers": case.num_layers, "seq_len": case.seq_len, **(sizes or {})}
    if case.title == "MoE":
        # With one place for each token the model has the artifact's operations.
        settings["capacity_factor"] = 1.0
    layers = build_layers(case.model, case.global_batch, overrides=settings)
    graph = capture(layers.train_step, layers.state, layers.batch)
    problem = make_problem(graph, cluster)
    flops = 0.0
    for node, works in zip(problem.nodes.nodes, problem.work, strict=True):
        if node.kind == "product":
            for work in works:
                flops += work.flops
    config: Any = configure(case.model, **settings)
    # The artifact counts no products of two activations in attention: two forward, four backward.
    attention = case.num_layers * config.num_heads * config.head_dim * config.seq_len**2
    return segment_step(problem, (case.num_devices,)), flops - 12.0 * case.global_batch * attention


# The bars of each case, by the columns of their table.
_BARS = {
    "predicted": "Predicted (s)",
    "data parallel": "Data Parallel (s)",
    "Alpa's way": "Alpa's Way (s)",
    "published": "Published (s)",
    "Alpa, published": "Published Alpa (s)",
}


def _deliver(device: str, rows: Sequence[Mapping[str, Any]], results: Results) -> None:
    cases, table = [], []
    for row in rows:
        case, strategy = CfpCase(**row["case"]), "does not fit"
        if row["options"] is not None:
            strategy = " | ".join(" ".join(map(str, each)) for each in row["options"])
        cases.append(case)
        table.append(
            {
                "Case": case.name,
                "Strategy": strategy,
                "Predicted (s)": row["step_time_s"],
                "Published (s)": case.published_s,
                "Predicted Mem (GB)": row["memory_bytes"] and row["memory_bytes"] / 1e9,
                "Operations": row["flops"],
                "Published Operations": case.published_flops,
                "Predicted TFLOPs": row["flops_per_s"] and row["flops_per_s"] / 1e12,
                "Data Parallel (s)": row["data_parallel_s"],
                "Alpa's Way (s)": row["alpa_s"],
                "Published Alpa (s)": case.published_alpa_s,
                "Small: Measured (s)": row.get("small_measured_s"),
                "Small: Data Parallel (s)": row.get("small_data_parallel_s"),
                "Reason": row.get("reason"),
            }
        )
    results.bars(
        "rows",
        f"CFP's cases on {device}",
        "seconds of a step",
        [f"{case.title} {case.global_batch}" for case in cases],
        {name: [row[head] for row in table] for name, head in _BARS.items()},
    )
    results.table(
        "rows",
        f"CFP's cases on {device}",
        table,
        "Layers without embedding and head in float32, no recomputation, all devices on one axis."
        " Operations are those of products with parameters, throughput is of all devices. Times are"
        " predicted; published ones were measured on A100 on PCIe. Options of a block: 0 batch (of"
        " experts the expert), then contraction and output.",
        shown=[head for head in table[0] if any(row[head] is not None for row in table)],
        tabs=True,
    )
    results.write_page()
