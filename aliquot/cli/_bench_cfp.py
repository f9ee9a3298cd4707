"""`aliquot bench cfp`: the cases of CFP's artifact, planned from ParallelBlocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..core import InputError
from ._devices import use_devices, use_host_only, use_virtual_devices
from ._groups import takes_groups
from ._launch_options import Engine, LaunchOptions, joined, launch_again, starts_others
from ._options import Json, read_cluster
from ._progress import search_progress
from ._session import Session, session


@dataclass(frozen=True, slots=True)
class _Case:
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


# Sizes of the scripts of arXiv 2504.00598.
_SIZES = (
    *[
        _Case("MoE", "moe-7.1b", layers, batch, 4)
        for batch, layers in ((32, 4), (64, 4), (96, 2), (128, 2))
    ],
    *[_Case("GPT", "gpt-6.7b", layers, batch, 8) for batch, layers in ((16, 4), (24, 2), (32, 2))],
    *[_Case("BERT", "bert-760m", layers, batch, 8) for batch, layers in ((8, 8), (16, 4), (32, 2))],
    *[_Case("Llama", "llama-7b", 4, batch, 4, 128) for batch in (32, 64, 80)],
    *[_Case("Llama", "llama-11b", 2, batch, 8, 128) for batch in (16, 64, 96, 128)],
)
# Measured on A100 GPUs on PCIe, by the description of the same artifact.
_PUBLISHED = {
    ("MoE", 64): (0.4479, 52.989e12, None),
    ("GPT", 24): (0.2920, 59.3736e12, 0.3769),
    ("GPT", 32): (None, 79.165e12, None),
}
_CASES = tuple(
    dataclasses.replace(case, published_s=own_s, published_flops=flops, published_alpa_s=alpa_s)
    for case in _SIZES
    for own_s, flops, alpa_s in [
        _PUBLISHED.get((case.title, case.global_batch), (None, None, None))
    ]
)
_SMALL = {"hidden_size": 64, "num_heads": 4, "seq_len": 32, "vocab_size": 256}
_BATCH = 16


@takes_groups
def cfp(
    launch_options: LaunchOptions,
    device: Annotated[
        str, typer.Option(help="Devices to plan for; the artifact's are A100 on PCIe.")
    ] = "A100-PCIe",
    only: Annotated[str, typer.Option(help="Cases with this in their title or model.")] = "",
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help=(
                "Also run every case at a very small size on virtual CPU devices, or on those of"
                " --launch."
            ),
        ),
    ] = False,
    launch: Engine = None,
    as_json: Json = False,
) -> None:
    """Search the cases of CFP's artifact, layers without embedding and head at full size: strategy,
    predicted step time, memory, operations and TFLOP/s, beside what was published.
    """
    with session(as_json) as say:
        cases = [c for c in _CASES if only.lower() in f"{c.title} {c.model}".lower()]
        if not cases:
            raise InputError(
                f"--only {only}: there are {', '.join(dict.fromkeys(c.title for c in _CASES))}."
            )
        launch_options.check(launch, devices=None, has_plan=False)
        if launch is not None and not run:
            raise InputError(
                f"--launch {launch}: only what runs needs several processes. Add --run."
            )
        if launch is not None and starts_others(launch):
            launch_again(
                launch, launch_options, None, say, kept="the beginning", all_say_the_same=True
            )
            return
        with joined(launch, ends_at_signals=True):
            needed = max(c.num_devices for c in cases)
            if launch is not None:
                _require(needed, len(use_devices(None)))
            elif run:
                use_virtual_devices(needed)
            else:
                use_host_only()
            rows = _rows(cases, device, run, say)
        from ..report import cfp_text

        answer = {"device": device, "rows": rows}
        if all("case" in row for row in rows):
            say.show(cfp_text(answer))
        say.finish(answer)


def _require(needed: int, found: int) -> None:
    """Raise InputError if the processes have too few devices together."""
    if found < needed:
        raise InputError(
            f"the cases need {needed} devices, and all processes together have {found}. Start more"
            " of them, give each more (--num-devices-per-host), or choose cases for fewer, such as"
            " --only MoE for 4."
        )


def _rows(cases: Sequence[_Case], device: str, run: bool, say: Session) -> list[dict[str, Any]]:
    """What is predicted of each case, in process 0, and measured by all."""
    from ..profiling import leads

    rows = []
    with search_progress(say) as report:
        for done, case in enumerate(cases):
            report(
                f"{case.title}, batch {case.global_batch}, {case.num_layers} layers",
                done,
                len(cases),
            )
            row = _predicted(case, device) if leads() else {}
            rows.append(row | (_measured(case) if run else {}))
    return rows


def _predicted(case: _Case, device: str) -> dict[str, Any]:
    """The best composed of segments, judged as a whole step beside data parallelism and Alpa's way,
    the integer program without profiles.
    """
    from ..planners import ILP
    from ..profiling import compose, priced_combinations

    step, flops = _step(case, f"{case.num_devices}x{device}", {})
    combinations = priced_combinations(step)
    composed = compose(
        step, combinations, memory_limit_bytes=step.problem.memory_limit_bytes, most=5
    )
    whole = [(c, s) for c in composed if (s := step.whole(c.options)) is not None]
    best, solution = min(whole, key=lambda pair: pair[1].step_time_s) if whole else (None, None)
    parallel = step.whole([(0,) * len(kind.blocks) for kind in step.kinds])
    exact = ILP().solve(
        step.problem, step.space, memory_limit_bytes=step.problem.memory_limit_bytes
    )
    return {
        "case": dataclasses.asdict(case),
        "num_programs": step.num_programs,
        "options": [list(o) for o in best.options if o] if best else None,
        "step_time_s": solution.step_time_s if solution else None,
        "memory_bytes": solution.peak_bytes if solution else None,
        "flops": flops,
        "flops_per_s": flops / solution.step_time_s if solution else None,
        "data_parallel_s": parallel.step_time_s if parallel else None,
        "integer_program_s": exact.step_time_s if exact else None,
    }


def _measured(case: _Case) -> dict[str, Any]:
    """The best of the cost model and data parallelism at a very small size, run on virtual
    devices.
    """
    from ..cost import picked_choices
    from ..planners import IntraSolution
    from ..profiling import SegmentedStep, compile_part, compose, priced_combinations, time_part

    def seconds(step: SegmentedStep, solution: IntraSolution | None) -> float | None:
        if solution is None:
            return None
        choices = picked_choices(step.space.priced, solution.picks)
        part = compile_part(step.problem, choices, step.mesh.shape, step.mesh.axis_names)
        return time_part(part).seconds

    small = {**_SMALL, **({"num_experts": 8} if case.title == "MoE" else {})}
    step, _ = _step(dataclasses.replace(case, num_layers=2, global_batch=_BATCH), "detect", small)
    (best,) = compose(step, priced_combinations(step), most=1)
    return {
        "small_options": [list(o) for o in best.options if o],
        "small_measured_s": seconds(step, step.whole(best.options)),
        "small_data_parallel_s": seconds(
            step, step.whole([(0,) * len(kind.blocks) for kind in step.kinds])
        ),
    }


def _step(case: _Case, cluster: str, overrides: dict[str, Any]) -> tuple[Any, float]:
    import jax

    from ..cluster import Cluster
    from ..cost import make_problem
    from ..graph import capture
    from ..profiling import segment_step
    from ..zoo import build_layers, configure

    settings = {"num_layers": case.num_layers, "seq_len": case.seq_len} | overrides
    if case.title == "MoE":
        # With one place for each token the model has the artifact's operations.
        settings["capacity_factor"] = 1.0
    graph = capture(*build_layers(case.model, case.global_batch, overrides=settings))
    where = (
        Cluster.detect(jax.devices()[: case.num_devices])
        if cluster == "detect"
        else read_cluster(cluster)
    )
    problem = make_problem(graph, where)
    flops = sum(
        work.flops
        for node, works in zip(problem.nodes.nodes, problem.work, strict=True)
        for work in works
        if node.kind == "product"
    )
    config: Any = configure(case.model, **settings)
    # The artifact counts no products of two activations in attention: two forward, four backward.
    attention = case.num_layers * config.num_heads * config.head_dim * config.seq_len**2
    return segment_step(problem, (case.num_devices,)), flops - 12.0 * case.global_batch * attention
