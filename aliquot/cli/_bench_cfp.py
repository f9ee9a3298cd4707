"""`aliquot bench cfp`: the cases of CFP's artifact, planned from ParallelBlocks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import InputError
from ._devices import use_devices, use_host_only, use_virtual_devices
from ._groups import option
from ._launch_options import LaunchOptions, joined, launch_again
from ._options import Json, read_cluster
from ._own_process import RunsHere, row_of_own_process
from ._progress import search_progress
from ._session import session

if TYPE_CHECKING:
    from ..suites import CfpCase

_SMALL, _VIRTUAL = "small", 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _CaseOptions:
    """Which cases are planned, for which devices, and where rows are written."""

    device: str = option("Devices to plan for; the artifact's are A100 on PCIe.", "A100-PCIe")
    only: str = option("Cases with this in their title or model.", "")
    case: list[int] | None = option("Only this one of all cases, from 1; repeatable.")
    small: bool = option(
        "Also run every case at a very small size on virtual CPU devices, or on those of --launch.",
        False,
    )
    out: Path | None = option(
        "Folder for rows as TSV, a chart and a page; rows that are there are not made again.",
        metavar="DIR",
    )
    runs_here: RunsHere = ""


def cfp(launch_options: LaunchOptions, of_cases: _CaseOptions, as_json: Json = False) -> None:
    """Search the cases of CFP's artifact, layers without embedding and head at full size: strategy,
    predicted step time, memory, operations and TFLOP/s, beside what was published.
    """
    launch = launch_options.launch
    with session(as_json) as say:
        launch_options.check(devices=None, has_plan=False)
        if launch is not None and not of_cases.small:
            raise InputError(
                f"--launch {launch}: only what runs needs several processes. Add --small."
            )
        environment = dict(os.environ)
        if launch is None or not of_cases.runs_here:
            use_host_only()
        from ..suites import (
            CFP_CASES,
            Results,
            find_cfp_cases,
            make_cfp_rows,
            measured_blocks,
            mode_of,
        )

        cases = find_cfp_cases(of_cases.only, tuple(of_cases.case or ()))
        if of_cases.runs_here:
            if launch_options.starts_others:
                launch_again(launch_options, None, say, all_say_the_same=True)
                return
            with joined(launch_options, ends_at_signals=True):
                devices = use_virtual_devices(_VIRTUAL) if launch is None else use_devices(None)
                say.finish({"row": measured_blocks(cases[0], devices)})
            return

        def measure(case: CfpCase) -> dict[str, Any]:
            found = row_of_own_process(CFP_CASES.index(case) + 1, _SMALL, environment)
            return {"outcome": "failed", "reason": found} if isinstance(found, str) else found

        with search_progress(say) as report:
            rows = make_cfp_rows(
                cases,
                of_cases.device,
                lambda count: read_cluster(f"{count}x{of_cases.device}"),
                Results(of_cases.out, say.show, title="aliquot beside CFP"),
                measure=measure if of_cases.small else None,
                mode=mode_of(True, launch),
                progress=report,
            )
        say.finish({"device": of_cases.device, "rows": rows})
