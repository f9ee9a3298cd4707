"""`aliquot size`: how many hosts a training run needs, and which are the cheapest in time."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..core import ClusterError, InputError, nearest, shortened
from ._devices import use_host_only
from ._groups import option
from ._interrupts import INTERRUPTED
from ._model_options import MemoryLimit, ModelOptions, read_memory_limit
from ._options import Json, ModelName, read_cluster
from ._progress import search_progress
from ._session import session

if TYPE_CHECKING:
    from .._variants import Variants
    from ..cluster import Cluster, HostPrice

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_TIMES_S = {"h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SizeOptions:
    """What is to be trained, by when, and on what."""

    device: str | None = option(
        "Such as H100 or H100,B200; by default all that have a price.", metavar="N1,N2"
    )
    devices_per_host: int = option("Devices in a host of which no price is given.", 8, min=1)
    tokens: str = option("Number of tokens to train on, such as 300B or 2T.", "", metavar="N")
    by: str = option("Time that the training may take, such as 30d, 12h or 6w.", "", metavar="TIME")
    prices: Path | None = option(
        "CSV: device, devices per host, price per hour, source. By default samples, each with"
        " its source and day."
    )
    goodput: float = option(
        "Share of the time in which training moves on, without failures and restarts.", 1.0
    )
    max_hosts: int = option("Try no more hosts than this.", 64, min=1, max=1024)
    memory_limit: MemoryLimit = None


def size(
    model: ModelName, model_options: ModelOptions, asked: _SizeOptions, as_json: Json = False
) -> None:
    """Find the clusters that train a model in time: the cheapest, or the fewest hosts."""
    with session(as_json) as say:
        needed = (("--tokens", asked.tokens, "2T"), ("--by", asked.by, "30d"))
        if lacks := [f"{option} {such_as}" for option, given, such_as in needed if not given]:
            raise InputError(
                "aliquot size needs the tokens to train on and the time that they may take: add"
                f" {' '.join(lacks)}, for example."
            )
        wanted, by_s = read_count(asked.tokens), read_duration(asked.by)
        from ..cluster import HostPrice, load_prices

        table = load_prices(asked.prices)
        use_host_only()
        kinds = _kinds(asked.device, asked.devices_per_host, table, given=asked.prices is not None)
        from .._size import Goal, Outlook, SizingInterrupted, size_built
        from ..report import ClusterOption, option_line, sizing_table
        from ._model import user_code
        from ._recomputation import builder

        options, limit = model_options.read(), read_memory_limit(asked.memory_limit)
        priced = [kind for kind in kinds if isinstance(kind, HostPrice)]

        @functools.cache
        def of_batch(batch: int) -> Callable[[Cluster], Variants]:
            return builder(model, replace(options, global_batch=batch))

        def rebuild(cluster: Cluster, batch: int) -> Variants:
            return of_batch(batch)(cluster)

        def tell(option: ClusterOption, outlook: Outlook) -> None:
            left = str(outlook)
            say.note(f"{option_line(option)}{f' ({left})' if left else ''}")

        try:
            with user_code(model), search_progress(say) as report:
                goal = Goal(
                    hosts=kinds,
                    tokens=wanted,
                    by_s=by_s,
                    prices=origin_of(asked.prices, priced) if priced else "",
                    goodput=asked.goodput,
                    max_hosts=asked.max_hosts,
                )
                sizing = size_built(
                    builder(model, options, say),
                    goal,
                    found=tell,
                    rebuild=None if options.global_batch is None or ":" in model else rebuild,
                    memory_limit_bytes=limit,
                    progress=report,
                )
        except SizingInterrupted as stopped:
            sizing = stopped.sizing
        say.show(sizing_table(sizing))
        say.finish(sizing.to_dict())
        if not sizing.is_complete:
            raise typer.Exit(INTERRUPTED)
        if sizing.choice() is None:
            raise typer.Exit(1)


def origin_of(prices: Path | None, hosts: Sequence[HostPrice]) -> str:
    """Where the prices of hosts come from, and of which date they are."""
    named = "; ".join(f"{host.device}: {host.source}" for host in hosts if host.source)
    if prices is None:
        return f"samples, no offer: pass yours as --prices FILE. {named}"
    written = datetime.fromtimestamp(prices.stat().st_mtime)
    return f"{prices}, written on {written:%Y-%m-%d}{f'. {named}' if named else ''}"


def read_count(text: str) -> float:
    """A number of tokens from text such as `2T`.

    Raises:
        InputError: It is none.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmbt]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise InputError(
            f"--tokens {shortened(text, 30)!r}: say how many to train on, such as 300B or 2T."
        )
    return float(match[1]) * _COUNTS[match[2]]


def read_duration(text: str) -> float:
    """Seconds from text such as `30d`.

    Raises:
        InputError: It is no duration.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([hdw])", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise InputError(
            f"--by {shortened(text, 30)!r}: say how long it may take, such as 12h, 30d or 6w."
        )
    return float(match[1]) * _TIMES_S[match[2]]


def _kinds(
    device: str | None, devices_per_host: int, table: tuple[HostPrice, ...], *, given: bool
) -> Sequence[HostPrice | tuple[str, int]]:
    """The hosts to plan for: those with a price, of some devices if they are named."""
    if device is None:
        return list(table)
    hosts: list[HostPrice | tuple[str, int]] = []
    for said in filter(None, map(str.strip, device.split(","))):
        try:
            name = read_cluster(said).device.name
        except ClusterError:
            if not re.fullmatch(r"[A-Za-z][\w-]*", said):
                raise
            from ..cluster import DEVICES

            raise InputError(
                f"--device {said}: there is no such device:"
                f" {nearest(said, DEVICES, listed_by='aliquot cluster')}"
            ) from None
        priced = [host for host in table if host.device == name]
        if given and not priced:
            raise InputError(f"--device {name}: the prices have none for it.")
        # Of a device without a price there is one host.
        hosts += priced or [(name, devices_per_host)]
    return hosts
