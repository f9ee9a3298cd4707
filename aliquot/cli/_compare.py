"""`aliquot compare`: methods or clusters for one model, in one table."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..core import InputError, write_atomic
from ._devices import use_host_only
from ._groups import option
from ._model_options import MemoryLimit, ModelOptions, read_memory_limit
from ._options import (
    Json,
    ModelName,
    NetworkGbps,
    check_destination,
    read_cluster,
    read_micro_batches,
)
from ._plan_options import Objective
from ._progress import search_progress
from ._session import session
from ._size import origin_of

if TYPE_CHECKING:
    from ..cluster import Cluster, HostPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComparedOptions:
    """What is compared, and by what."""

    cluster: str | None = option("A preset such as 8xH100, a TOML file, or detect.")
    clusters: str | None = option("Compare these clusters instead of methods.", metavar="C1,C2")
    methods: str | None = option(
        "Methods as in aliquot plan, such as auto,tp:8; by default the usual ones.",
        names="--methods --method",
        metavar="M1,M2",
    )
    micro_batches: str | None = option(
        "Number of micro-batches; by default auto and pipeshard search it, others have 1; with"
        " auto all search it.",
        metavar="N|auto",
    )
    network_gbps: NetworkGbps = None
    memory_limit: MemoryLimit = None
    objective: Objective = None
    prices: Path | None = option(
        "CSV: device, devices per host, price per hour; then costs are compared, too.",
        metavar="FILE",
    )
    html: Path | None = option("Write one page for the decision to this file.", metavar="FILE")


def compare(
    model: ModelName, model_options: ModelOptions, asked: _ComparedOptions, as_json: Json = False
) -> None:
    """Plan a model by several methods or for several clusters, and say where each loses: "why not
    FSDP?".
    """
    with session(as_json) as say:
        names = [asked.cluster] if asked.cluster else []
        if asked.clusters:
            names = [part.strip() for part in asked.clusters.split(",") if part.strip()]
        if not names or (asked.cluster and (asked.clusters or "," in asked.cluster)):
            raise InputError("compare needs --cluster C, or --clusters C1,C2 to compare several.")
        check_destination(asked.html, "--html")
        if "detect" not in names:
            use_host_only()
        where = [read_cluster(name, asked.network_gbps) for name in names]
        table = _prices_of(where, asked.prices)
        parts = "auto" if asked.micro_batches == "auto" else read_micro_batches(asked.micro_batches)
        from .._questions import compare_built
        from ..planners import method_names
        from ..report import compare_page, comparison_table
        from ._model import user_code
        from ._recomputation import builder

        limit = read_memory_limit(asked.memory_limit)
        with user_code(model), search_progress(say) as report:
            comparison = compare_built(
                builder(model, model_options.read(), say),
                clusters=where,
                methods=method_names(asked.methods or ""),
                num_micro_batches=parts,
                memory_limit_bytes=limit,
                objective=asked.objective,
                progress=report,
            )
        if asked.prices is not None:
            comparison = replace(
                comparison, prices=table, prices_from=origin_of(asked.prices, table)
            )
        if asked.html is not None:
            date = datetime.date.today().isoformat()
            write_atomic(asked.html, compare_page(comparison, date=date))
        say.show(comparison_table(comparison))
        if asked.html is not None:
            say.show(f"The page is in {asked.html}.")
        say.finish({**comparison.to_dict(), "html_file": str(asked.html) if asked.html else None})
        if comparison.best is None:
            raise typer.Exit(1)


def _prices_of(clusters: Sequence[Cluster], path: Path | None) -> tuple[HostPrice, ...]:
    """The prices in a file; hosts that have none are shown without.

    Raises:
        InputError: They cannot be read, or have none for any cluster's hosts.
    """
    if path is None:
        return ()
    from ..cluster import load_prices

    table = load_prices(path)
    known = {(price.device, price.devices_per_host) for price in table}
    hosts = dict.fromkeys((c.device.name, c.devices_per_host) for c in clusters)
    missing = [f"{device}, {each}, PRICE" for device, each in hosts if (device, each) not in known]
    if len(missing) == len(hosts):
        raise InputError(
            f"--prices {path} has no price for hosts of this comparison: add the line"
            f"{'s' if len(missing) > 1 else ''} {'; '.join(missing)}."
        )
    return tuple(price for price in table if (price.device, price.devices_per_host) in hosts)
