"""Results of the searches for the largest batch and for the fewest or cheapest hosts: as values,
tables and plain data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..cluster import NO_PRICE, Cluster, most_error, said_of_reported
from ..core import counted, format_count, format_seconds
from ..plans import (
    UNKNOWN_ERROR,
    Plan,
    chosen_candidate,
    examples_per_step,
    expected_error,
    explained_names,
    figures,
    how_recomputed,
    is_pipeline,
    meshes,
    name_on_mesh,
    rate,
    said_error,
    tokens_per_step,
)
from ._comparison import memory_said, rate_said
from ._tables import Column, table

_DAY_S = 86_400.0
# From this ratio on, percentages are harder to read than multiples.
_MANY = 10
# An option that costs up to this share more, and is done this many times sooner, is named, too.
_LITTLE, _MUCH_SOONER = 0.05, 1.5
# A smaller batch with this share of the highest throughput is named beside it.
_ENOUGH = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """A global batch that was planned: its plan, or why there is none."""

    global_batch: int
    plan: Plan | None
    refusal: str = ""

    @property
    def num_micro_batches(self) -> int:
        """The number in the plan; 0 without a plan."""
        return self.plan.num_micro_batches if self.plan else 0

    @property
    def micro_batch(self) -> int:
        """Examples in a micro-batch; 0 without a plan."""
        return self.global_batch // self.num_micro_batches if self.plan else 0

    @property
    def examples_per_s(self) -> float:
        """Predicted throughput; 0 without a plan."""
        return self.global_batch / self.plan.prediction.step_time_s if self.plan else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSearch:
    """The batches of different sizes that were tried on one cluster.

    Attributes:
        trials: ordered by size.
        unit: all batches are multiples of this.
        is_limited: whether a batch larger by one `unit` than the largest that fits was tried and
            does not fit. Otherwise the search ended at its own limit, and larger ones may fit.
    """

    model: str
    cluster: str
    trials: tuple[BatchTrial, ...]
    unit: int
    is_limited: bool

    @property
    def largest(self) -> BatchTrial | None:
        """The largest batch that fits; None if none does."""
        return max((t for t in self.trials if t.plan), key=lambda t: t.global_batch, default=None)

    @property
    def fastest(self) -> BatchTrial | None:
        """The batch with the highest throughput among those tried."""
        return max(
            (t for t in self.trials if t.plan),
            # Ties go to the smallest batch, which needs the least memory.
            key=lambda t: (t.examples_per_s, -t.global_batch),
            default=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        largest, fastest = self.largest, self.fastest
        return {
            "model": self.model,
            "cluster": self.cluster,
            "feasible": largest is not None,
            "largest_batch": largest.global_batch if largest else None,
            "is_limited_by_memory": self.is_limited,
            "multiple_of": self.unit,
            "fastest_batch": fastest.global_batch if fastest else None,
            "trials": [
                {
                    "global_batch": t.global_batch,
                    "feasible": t.plan is not None,
                    **figures(t.plan),
                    "num_micro_batches": t.plan.num_micro_batches if t.plan else None,
                    "reason": t.refusal,
                }
                for t in self.trials
            ],
        }

    def __str__(self) -> str:
        from ._tables import as_text

        return as_text(batch_table(self), width=100)


def batch_table(search: BatchSearch) -> Group:
    """Table of the batches that were tried, headed by the largest and the fastest."""
    largest, fastest = search.largest, search.fastest
    lines: list[RenderableType] = [
        Text(f"{search.model} on {search.cluster} (predicted)", style="bold")
    ]
    if largest is None or fastest is None or fastest.plan is None:
        lines.append(
            Text(
                "  No batch fits: "
                + (search.trials[0].refusal if search.trials else "none was tried")
            )
        )
        return Group(*lines)
    end = "; larger ones were not tried and may fit"
    if search.is_limited:
        end = f"; {largest.global_batch + search.unit} does not fit"
    elif largest.num_micro_batches > 1:
        end = (
            f", in {largest.num_micro_batches} accumulated micro-batches of {largest.micro_batch};"
            " larger batches take more micro-batches, and were not tried"
        )
    at_once = [t for t in search.trials if t.plan and t.num_micro_batches == 1]
    if at_once and largest.num_micro_batches > 1:
        most = max(at_once, key=lambda t: t.global_batch)
        lines.append(Text(f"  largest batch in one pass      {most.global_batch}"))
    lines.append(Text(f"  largest batch tried that fits  {largest.global_batch}{end}"))
    per_s, what = rate(fastest.plan)
    highest = f"{format_count(float(round(per_s)))} {what}/s"
    enough = min(
        (t for t in search.trials if t.examples_per_s >= _ENOUGH * fastest.examples_per_s),
        key=lambda t: t.global_batch,
    )
    if enough.global_batch < fastest.global_batch:
        share = enough.examples_per_s / fastest.examples_per_s
        highest += f"; {enough.global_batch} reaches {share:.1%} of it"
    lines.append(Text(f"  highest throughput of these    {fastest.global_batch}, {highest}"))
    lines.append(Text(""))
    rows = []
    for row, trial in zip(search.to_dict()["trials"], search.trials, strict=True):
        row["step"] = format_seconds(row["step_time_s"]) if trial.plan else "does not fit"
        rows.append({**row, "recompute": how_recomputed(trial.plan) if trial.plan else None})
    tried = table(
        "Tried",
        rows,
        Column("batch", "global_batch", number=True),
        Column("step", "step", number=True),
        Column("MFU", "mfu", "{:.1%}".format, number=True),
        Column(f"{what}/s", f"{what}_per_s", rate_said, number=True),
        Column("memory", memory_said, number=True),
        Column("micro-batches", "num_micro_batches", number=True),
        Column("recompute", "recompute", number=True),
        narrow=True,
    )
    return Group(*lines, tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOption:
    """A cluster on which a training run was planned.

    Attributes:
        cluster: its name.
        num_hosts, devices_per_host: its size.
        plan: None if there is none; `refusal` says why.
        training_s: predicted time to train on all tokens; None without a plan.
        price_per_hour: price of all hosts together; None if not known.
    """

    cluster: str
    num_hosts: int
    devices_per_host: int
    plan: Plan | None
    training_s: float | None = None
    price_per_hour: float | None = None
    refusal: str = ""

    @property
    def cost(self) -> float | None:
        """Cost of the whole training run, in the currency of the prices; None if not known."""
        if self.training_s is None or self.price_per_hour is None:
            return None
        return self.price_per_hour * self.training_s / 3600

    @property
    def per_device(self) -> float | None:
        """Tokens, or else examples, per second of each device; None without a plan."""
        if self.plan is None or not self.plan.prediction.step_time_s:
            return None
        return rate(self.plan)[0] / (self.num_hosts * self.devices_per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Clusters for a training run with a deadline.

    Attributes:
        tokens, by_s: tokens to train on, and the seconds within which that must be done.
        global_batch: number of examples.
        options: all clusters that were planned for, by device and number of hosts.
        prices, currency: where the prices come from, and their currency; empty without prices.
        goodput: the share of the time in which training moves on.
        max_hosts: the most hosts that were to be tried.
        is_complete: whether all of them were, before an interrupt.
    """

    model: str
    tokens: float
    by_s: float
    global_batch: int
    options: tuple[ClusterOption, ...]
    prices: str = ""
    currency: str = ""
    goodput: float = 1.0
    max_hosts: int = 64
    is_complete: bool = True

    @property
    def first_in_time(self) -> int | None:
        """Where nothing that was planned is in time: the fewest hosts above `max_hosts` that divide
        the batch and would be, if more hosts computed as fast each as those that were planned. None
        if something is in time, or if none would be.
        """
        planned = [o for o in self.options if o.training_s is not None]
        if not planned or self.in_time():
            return None
        work_s = min(o.num_hosts * (o.training_s or 0.0) for o in planned)
        least = max(math.ceil(work_s / self.by_s), self.max_hosts + 1)
        counts = range(least, max(self.global_batch, least) + 1)
        return next((n for n in counts if not self.global_batch % n), None)

    def in_time(self, slower: float = 1.0) -> list[ClusterOption]:
        """Options that meet the deadline if steps take `slower` times the predicted time."""
        found = []
        for o in self.options:
            if o.training_s is not None and o.training_s * slower <= self.by_s:
                found.append(o)
        return found

    def choice(self, slower: float = 1.0) -> ClusterOption | None:
        """The cheapest option that meets the deadline; without prices, the one with the fewest
        hosts.
        """
        return min(
            self.in_time(slower),
            # Options without a price come after all that have one.
            key=lambda o: (o.cost is None, (o.cost or 0.0) * slower, o.num_hosts, o.training_s),
            default=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        sensitivity = []
        for slower in SLOWER:
            option = self.choice(slower)
            named = option.cluster if option else None
            time_s = option.training_s * slower if option and option.training_s else None
            cost = option.cost * slower if option and option.cost is not None else None
            sensitivity.append(
                {"slower": slower, "choice": named, "training_s": time_s, "cost": cost}
            )
        return {
            "model": self.model,
            "tokens": self.tokens,
            "by_s": self.by_s,
            "global_batch": self.global_batch,
            "goodput": self.goodput,
            "prices": self.prices or None,
            "currency": self.currency or None,
            "first_in_time": self.first_in_time,
            "is_complete": self.is_complete,
            "choice": chosen.cluster if (chosen := self.choice()) else None,
            "sensitivity": sensitivity,
            "options": [
                {
                    "cluster": o.cluster,
                    "num_hosts": o.num_hosts,
                    "devices_per_host": o.devices_per_host,
                    "global_batch": examples_per_step(o.plan) if o.plan else None,
                    "feasible": o.plan is not None,
                    **figures(o.plan),
                    "method": _method(o.plan) if o.plan else None,
                    "tokens_per_s_per_device": o.per_device,
                    "training_s": o.training_s,
                    "in_time": o.training_s is not None and o.training_s <= self.by_s,
                    "price_per_hour": o.price_per_hour,
                    "cost": o.cost,
                    "reason": o.refusal,
                }
                for o in self.options
            ],
        }

    def __str__(self) -> str:
        from ._tables import as_text

        return as_text(sizing_table(self), width=100)


SLOWER = (0.8, 1.0, 1.25, 1.5)
"""Multiples of the predicted step times for which the report repeats the choice."""


def sizing_table(sizing: Sizing) -> Group:
    """The choice, the choices if predictions are off, and a table of all options."""
    goal = (
        f"{sizing.model}: {format_count(sizing.tokens)} tokens in {_span(sizing.by_s)},"
        f" batch {sizing.global_batch}"
    )
    goal += f", goodput {sizing.goodput:.0%}" if sizing.goodput < 1 else ""
    lines: list[RenderableType] = [Text(f"{goal} (predicted)", style="bold")]
    if not sizing.is_complete:
        lines.append(
            Text(
                "  interrupted: other clusters, which were not planned, may be better. --device"
                " NAME plans those of one device"
            )
        )
    choice, money = sizing.choice(), sizing.currency
    meets = "that meets" if sizing.prices else "that meet"
    best = f"{'cheapest' if sizing.prices else 'fewest hosts'} {meets} the deadline"
    if choice:
        lines.append(Text(f"  {best}  {_named(choice, money)}"))
    for line in _beside(choice, sizing) if choice else _none_in_time(sizing):
        lines.append(Text(f"  {line}"))
    lines += [Text(""), Text("If a step takes more or less than predicted", style="bold")]
    for slower in SLOWER:
        if slower != 1.0:
            option = sizing.choice(slower)
            text = (
                _named(option, money, slower)
                if option
                else "none that was tried meets the deadline"
            )
            lines.append(Padding(Text(f"{slower:g}x as long: {text}"), (0, 0, 0, 2)))
    lines.append(Text(""))
    priced = any(o.cost is not None for o in sizing.options)
    unit = f" ({money})" if money else ""
    batches = {examples_per_step(o.plan) for o in sizing.options if o.plan}
    varies = batches - {sizing.global_batch}
    rows = sizing.to_dict()["options"]
    for row in rows:
        row["method"] = row["method"] or "does not fit"
        row["in_time"] = "yes" if row["in_time"] else "no" if row["feasible"] else ""
        price = row["price_per_hour"]
        row["price_per_hour"] = NO_PRICE if price is None else _money(price)
    what = "examples"
    if any(o.plan and tokens_per_step(o.plan) for o in sizing.options):
        what = "tokens"
    planned = table(
        "Planned",
        rows,
        Column("cluster", "cluster"),
        Column("batch", "global_batch", number=True, shown=varies),
        Column("method", "method"),
        Column("step", "step_time_s", format_seconds, number=True),
        Column(f"{what}/s per device", "tokens_per_s_per_device", rate_said, number=True),
        Column("MFU", "mfu", "{:.1%}".format, number=True),
        Column("days", "training_s", lambda s: f"{s / _DAY_S:.1f}", number=True),
        Column("in time", "in_time"),
        Column(f"per hour{unit}", "price_per_hour", number=True, shown=priced),
        Column(f"cost{unit}", lambda row: row["cost"] or None, _rounded, number=True, shown=priced),
        narrow=True,
    )
    rest = list(map(Text, explained_names(row["method"] for row in rows)))
    rest += map(Text, _unknown_errors(sizing))
    if choice:
        rest.append(
            Text(
                "Left out: numbers of hosts that do not divide the batch"
                f"{' or one within 12% of it' if varies else ''}, and fewer hosts, which could not"
                " be in time."
            )
        )
    rest += [Text(f"Prices: {sizing.prices}")] if sizing.prices else []
    return Group(*lines, planned, *rest)


def _unknown_errors(sizing: Sizing) -> Iterator[str]:
    """The devices for which nothing tells how far predictions are off, or only steps on others."""
    by_device: dict[str, set[str]] = {}
    for option in sizing.options:
        if option.plan:
            device = Cluster.from_dict(option.plan.cluster).device.name
            by_device.setdefault(device, set()).add(said_error(option.plan))
    unknown = [device for device, said in by_device.items() if said == {UNKNOWN_ERROR}]
    if unknown:
        yield f"{', '.join(unknown)}: {UNKNOWN_ERROR}; no measured step was compared."
    for device, said in by_device.items():
        known = sorted(said - {UNKNOWN_ERROR})
        if known and UNKNOWN_ERROR in said:
            yield f"{device}: {'; '.join(known)}; not known of its other plans."
        elif any(" by " in each for each in known):
            yield f"{device}: {'; '.join(known)}; none of its own was compared."


def _beside(choice: ClusterOption, sizing: Sizing) -> Iterator[str]:
    """The option that is done much sooner at little more cost, and how much longer steps of the
    choice may take before the deadline is missed, beside the expected error.
    """
    if not choice.training_s:
        return
    dearest, longest_s = (1 + _LITTLE) * (choice.cost or 0.0), choice.training_s / _MUCH_SOONER
    others = []
    for o in sizing.in_time():
        if o.cost is not None and o.cost <= dearest and (o.training_s or math.inf) <= longest_s:
            others.append(o)
    if others and choice.cost:
        other = min(others, key=lambda each: each.training_s or math.inf)
        more = max((other.cost or 0.0) / choice.cost - 1, 0.0)
        yield f"much sooner for {more:.1%} more: {_named(other, sizing.currency)}"
    if choice.plan is None:
        return
    slack = sizing.by_s / choice.training_s - 1
    known = expected_error(choice.plan)
    much = f"{slack:.0%} longer" if slack < _MANY else f"{1 + slack:.0f} times as long"
    text = f"{choice.cluster} is in time even if steps take {much}"
    error, most = f"the expected error ({said_of_reported(known)})", most_error(known)
    if most is None:
        yield f"{text}; how far predictions are off here is not known"
    elif slack <= most:
        yield f"{text}, which is less than {error}. The choice for 1.25x is safer"
    else:
        yield f"{text}, which is more than {error}"


def _span(seconds: float) -> str:
    """A time in days, or in hours where it is less than two days."""
    if seconds < 2 * _DAY_S:
        hours = f"{seconds / 3600:g}"
        return f"{hours} hour{'' if hours == '1' else 's'}"
    return f"{seconds / _DAY_S:g} days"


def _none_in_time(sizing: Sizing) -> list[str]:
    """What to do where nothing that was planned is in time."""
    hosts = counted(sizing.max_hosts, "host")
    planned = [o for o in sizing.options if o.training_s is not None]
    if not planned:
        return [f"It fits on none of up to {hosts}: --max-hosts tries more."]
    fastest = min(planned, key=lambda o: o.training_s or 0.0)
    first = sizing.first_in_time
    lines = [
        f"none of up to {hosts} meets the deadline; the fastest: {_named(fastest, sizing.currency)}"
    ]
    if first:
        lines.append(
            f"About {first} hosts would meet it, if each computed as fast: try --max-hosts {first}"
        )
    else:
        lines.append(
            "No more hosts that divide the batch would meet it: allow more time with --by, or use"
            " a larger batch."
        )
    return lines


def option_line(option: ClusterOption) -> str:
    """One line for a cluster that was just planned."""
    if option.plan is None:
        return f"{option.cluster}: does not fit"
    step = format_seconds(option.plan.prediction.step_time_s)
    return f"{option.cluster}: {step} a step, {(option.training_s or 0.0) / _DAY_S:.1f} days"


def _method(plan: Plan) -> str:
    """What was chosen, by a name that can be typed."""
    if is_pipeline(plan):
        return f"pipeshard, {len(plan.stages)} stages, {plan.schedule}"
    chosen = chosen_candidate(plan)
    known = {"name": plan.method} if chosen is None else plan.provenance.candidates[chosen]
    return name_on_mesh({**known, "mesh": meshes(plan).removeprefix("mesh ").partition(" ")[0]})


def _named(option: ClusterOption, currency: str = "", slower: float = 1.0) -> str:
    days = (
        f", {option.training_s * slower / _DAY_S:.1f} days" if option.training_s is not None else ""
    )
    amount = None if option.cost is None else _rounded(option.cost * slower)
    cost = f", cost {f'{currency} ' if currency else ''}{amount}" if amount else ""
    return (
        f"{option.cluster} ({option.num_hosts}"
        f" host{'' if option.num_hosts == 1 else 's'}){days}{cost}"
    )


def _rounded(cost: float) -> str:
    """A predicted cost, to three digits: predictions are not known better."""
    return _money(float(f"{cost:.3g}"))


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def sorted_options(
    options: Sequence[ClusterOption], devices: Sequence[str]
) -> tuple[ClusterOption, ...]:
    """The options ordered by device, in the order of `devices`, and then by number of hosts."""
    order = {name: k for k, name in reversed([*enumerate(devices)])}
    return tuple(sorted(options, key=lambda o: (order[o.cluster.rpartition("x")[2]], o.num_hosts)))
