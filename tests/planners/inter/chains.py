"""Random chains, and the least step time of all their stages, found by trying them one by one.

The trying is written from the definitions, in plain loops, without anything of the planners or of
the judge.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from aliquot.cluster import Link
from aliquot.core import InfeasibleError
from aliquot.cost import Chain, StageOption
from aliquot.planners.inter import StageDP
from aliquot.plans import make_schedule

GEOMETRIES = ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1))


def random_chain(
    rng: np.random.Generator, *, num_units: int, geometry: tuple[int, int], most_options: int = 4
) -> Chain:
    """A chain with figures of similar sizes, some entries infeasible, some options on the same
    submesh.
    """
    hosts, per_host = geometry
    submeshes = [(1, n) for n in range(1, per_host + 1)] + [
        (h, per_host) for h in range(2, hosts + 1)
    ]
    picked = [
        submeshes[k] for k in rng.integers(len(submeshes), size=rng.integers(1, most_options + 1))
    ]
    options = tuple(
        StageOption(name=f"option {k}", submesh=s, mesh_shape=(s[0] * s[1],))
        for k, s in enumerate(picked)
    )
    shape = (num_units, len(options))
    devices = np.array([o.num_devices for o in options])

    def draw(scale: float) -> np.ndarray:
        return (
            rng.uniform(0.2, 1.8, (num_units, 1))
            * scale
            * rng.uniform(0.7, 1.3, shape)
            / devices**0.8
        )

    forward = draw(1.0)
    if rng.random() < 0.3:
        forward[rng.integers(num_units), rng.integers(shape[1])] = np.inf
    backward = draw(2.0)
    return Chain(
        unit_names=tuple(f"unit {k}" for k in range(num_units)),
        options=options,
        num_micro_batches=int(rng.choice([1, 2, 3, 4, 7, 16])),
        forward_s=forward,
        backward_s=backward,
        weight_gradient_s=backward * rng.uniform(0.1, 0.9, shape),
        once_s=draw(float(rng.choice([0.0, 0.5, 5.0]))),
        state_bytes=draw(4.0),
        in_flight_bytes=draw(1.0),
        working_bytes=draw(2.0),
        boundary_bytes=rng.uniform(0, 1, num_units)
        * rng.choice([0.0, 1.0], num_units, p=[0.1, 0.9]),
        memory_limit_bytes=1e9,
        num_hosts=hosts,
        devices_per_host=per_host,
        intra=Link(latency_s=0.01, bandwidth_bytes_per_s=float(rng.uniform(2, 20))),
        inter=Link(latency_s=0.05, bandwidth_bytes_per_s=float(rng.uniform(0.5, 5))),
        overlaps_transfers=bool(rng.random() < 0.5),
        recomputed_bytes=draw(float(rng.choice([0.0, 1.0]))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One way to cut: its step time, the memory of its fullest device, how many stages it has, with
    which options, and how far a stage's share of the compute is from its share of the devices.
    """

    step_time_s: float
    peak_bytes: float
    num_stages: int
    options: tuple[int, ...]
    imbalance: float


def try_all(chain: Chain, schedule: str, most_chunks: int = 4) -> list[Tried]:
    """Every way to cut the chain that can run at all."""
    layouts = _rounds(chain, most_chunks) if schedule == "interleaved-1f1b" else _straight(chain)
    return [_price(chain, schedule, *layout) for layout in layouts]


def _cuts(num_units: int, count: int) -> Iterator[list[tuple[int, int]]]:
    for inner in itertools.combinations(range(1, num_units), count - 1):
        edges = [0, *inner, num_units]
        yield list(zip(edges, edges[1:]))


def _runs(chain: Chain, span: tuple[int, int], option: int) -> bool:
    return bool(np.isfinite(chain.forward_s[span[0] : span[1], option]).all())


def _straight(chain: Chain) -> Iterator[tuple[list, list, list, int]]:
    """(spans, options, first devices, number of submeshes)."""
    per_host, total = chain.devices_per_host, chain.num_hosts * chain.devices_per_host
    for count in range(1, min(chain.num_units, total) + 1):
        for options in itertools.product(range(len(chain.options)), repeat=count):
            starts, d, good = [], 0, True
            for o in options:
                hosts, used = chain.options[o].submesh
                good &= d % per_host + used <= per_host if hosts == 1 else d % per_host == 0
                starts.append(d)
                d += hosts * used
            if good and d == total:
                for spans in _cuts(chain.num_units, count):
                    if all(_runs(chain, span, o) for span, o in zip(spans, options)):
                        yield spans, list(options), starts, count


def _rounds(chain: Chain, most_chunks: int) -> Iterator[tuple[list, list, list, int]]:
    total = chain.num_hosts * chain.devices_per_host
    for submeshes in range(2, total + 1):
        for chunks in range(2, most_chunks + 1):
            count, size = submeshes * chunks, total // submeshes
            if total % submeshes or count > chain.num_units:
                continue
            if size < chain.devices_per_host and chain.devices_per_host % size:
                continue
            if size > chain.devices_per_host and size % chain.devices_per_host:
                continue
            fitting = [o for o, option in enumerate(chain.options) if option.num_devices == size]
            starts = [k % submeshes * size for k in range(count)]
            for options in itertools.product(fitting, repeat=count):
                for spans in _cuts(chain.num_units, count):
                    if all(_runs(chain, span, o) for span, o in zip(spans, options)):
                        yield spans, list(options), starts, submeshes


def _edge(chain: Chain, unit: int, left: tuple[int, int], right: tuple[int, int]) -> float:
    """Seconds to bring what crosses behind a unit from devices to devices; each side as (first, how
    many).
    """
    size = float(chain.boundary_bytes[unit])
    if size == 0:
        return 0.0
    hosts = {
        d // chain.devices_per_host for first, n in (left, right) for d in range(first, first + n)
    }
    n = min(left[1], right[1])
    if len(hosts) == 1:
        return size / (n * chain.intra.bandwidth_bytes_per_s) + chain.intra.latency_s
    networks = max(1, n // chain.devices_per_host) * chain.inter.bandwidth_bytes_per_s
    return size / min(networks, n * chain.intra.bandwidth_bytes_per_s) + chain.inter.latency_s


@functools.cache
def _most_alive(tasks: tuple, stage: int) -> int:
    """The most forward passes of a stage whose backward pass has not ended, along its submesh's
    tasks.
    """
    alive = [0]
    for task in tasks:
        if task.stage == stage:
            alive += [alive[-1] + 1] if task.kind == "forward" else [alive[-1] - 1]
    return max(alive)


def _price(
    chain: Chain, schedule: str, spans: list, options: list, starts: list, submeshes: int
) -> Tried:
    count, m = len(spans), chain.num_micro_batches
    chunks = count // submeshes
    f, b, e, once, x, peak = [], [], [], [], [], []
    for k, ((i, j), o) in enumerate(zip(spans, options)):
        f.append(sum(chain.forward_s[u, o] for u in range(i, j)))
        b.append(sum(chain.backward_s[u, o] for u in range(i, j)))
        exposed = 0.0
        for u in range(i, j):
            fu, wu = chain.forward_s[u, o], chain.weight_gradient_s[u, o]
            iu = chain.backward_s[u, o] - wu
            exposed += fu + iu - min(wu, fu, iu)
        e.append(exposed)
        once.append(sum(chain.once_s[u, o] for u in range(i, j)))
        here = starts[k], chain.options[o].num_devices
        x.append(
            _edge(chain, i - 1, (starts[k - 1], chain.options[options[k - 1]].num_devices), here)
            if k
            else 0.0
        )
        if schedule == "gpipe":
            kept = m
        elif schedule == "interleaved-1f1b":
            kept = _most_alive(make_schedule(schedule, count, m, submeshes).lists[k % submeshes], k)
        elif schedule == "1f1b-overlap-friendly":
            kept = min(m, 2 * (count - k) - 1)
        elif schedule == "zero-bubble":
            kept = min(m, count)
        else:
            kept = min(m, count - k)
        held = sum(
            chain.state_bytes[u, o] + kept * chain.in_flight_bytes[u, o] for u in range(i, j)
        )
        working = max(chain.working_bytes[u, o] for u in range(i, j))
        again = sum(chain.recomputed_bytes[u, o] for u in range(i, j))
        peak.append(chunks * (held + working + again))
    t = [a + c for a, c in zip(f, b)]
    lay = chain.overlaps_transfers

    def worst(values: list, ways: int) -> float:
        return max(max(v, s) if lay else v + ways * s for v, s in zip(values, x))

    total = sum(t) + 2 * sum(x)
    if schedule in ("1f1b", "1f1b-overlap-friendly"):
        step = total + (m - 1) * worst(t, 2)
    elif schedule == "gpipe":
        step = total + (m - 1) * (worst(f, 1) + worst(b, 1))
    elif schedule == "zero-bubble":
        rest = [m * a - c for a, c in zip(t, e)]
        weigh = [max(r, (m - 1) * s) if lay else r + 2 * (m - 1) * s for r, s in zip(rest, x)]
        step = sum(e) + 2 * sum(x) + max(weigh)
    else:
        step = total / chunks + (m * chunks - 1) * worst(t, 2)
    return Tried(
        step_time_s=step + chunks * max(once),
        peak_bytes=max(peak),
        num_stages=count,
        options=tuple(options),
        imbalance=max(
            _imbalance(chain, span, option) for span, option in zip(spans, options, strict=True)
        ),
    )


def _imbalance(chain: Chain, span: tuple[int, int], option: int) -> float:
    """What cannot run with an option is no compute with it."""
    seconds = [
        float(f + b) if np.isfinite(f) else 0.0
        for f, b in zip(chain.forward_s[:, option], chain.backward_s[:, option], strict=True)
    ]
    share = sum(seconds[slice(*span)]) / sum(seconds)
    total = chain.num_hosts * chain.devices_per_host
    fair = chain.options[option].num_devices / total
    return max(share / fair, fair / share) - 1 if share else np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """StageDP against all cuts of one random chain at one memory limit; `best_s` is None where
    nothing fits.

    `difference` is relative, and infinite where one finds something and the other does not;
    `breaks_limits` says whether StageDP found something better, which is not allowed then; `binds`
    says whether the limit excludes the best of all cuts.
    """

    seed: int
    schedule: str
    num_tried: int
    best_s: float | None
    difference: float
    bound_exceeds: bool
    breaks_limits: bool
    binds: bool


def compare(
    seed: int,
    schedule: str,
    num_stages: int | None = None,
    most_units: int = 6,
    imbalance: float = np.inf,
    without: int | None = None,
) -> list[Comparison]:
    """One random chain without a limit, at two limits that exclude some of its cuts, and at one
    that excludes all.

    Args:
        imbalance: restricts the stages, and `without` leaves out an option.
    """
    rng = np.random.default_rng(seed)
    geometry = GEOMETRIES[seed % len(GEOMETRIES)]
    # Chunks take more units before there is a choice, and few options, as each may have any of
    # them.
    rounds = schedule == "interleaved-1f1b"
    chain = random_chain(
        rng,
        num_units=int(rng.integers(5 if rounds else 2, most_units + 1 + rounds)),
        geometry=geometry,
        most_options=2 if rounds else 4,
    )
    if num_stages is not None and num_stages > chain.num_units:
        return []
    tried = [
        t
        for t in try_all(chain, schedule)
        if num_stages in (None, t.num_stages)
        and t.imbalance <= imbalance * (1 + 1e-9)
        and without not in t.options
    ]
    kept = [k for k in range(len(chain.options)) if k != without]
    if not kept:
        return []
    chain = replace(cut_options(chain, kept), most_imbalance=imbalance)
    peaks = sorted(t.peak_bytes for t in tried)
    limits = [1e9]
    if peaks:
        limits += [peaks[0] * 0.999, peaks[0] * 1.0001, peaks[len(peaks) // 4] * 1.0001]
    planner = StageDP(schedules=(schedule,), num_stages=num_stages, relative_gap=1e-12, simulated=1)
    least = min((t.step_time_s for t in tried), default=None)
    compared = []
    for limit in limits:
        best = min((t.step_time_s for t in tried if t.peak_bytes <= limit), default=None)
        try:
            plan = planner.solve([replace(chain, memory_limit_bytes=limit)])
        except InfeasibleError:
            difference, exceeds, breaks = (0.0 if best is None else np.inf), False, False
        else:
            difference = np.inf if best is None else abs(plan.closed_form_s - best) / best
            breaks = best is None or plan.closed_form_s < best * (1 - 1e-9)
            exceeds = best is not None and (plan.lower_bound_s or 0.0) > best * (1 + 1e-9)
        compared.append(
            Comparison(
                seed=seed,
                schedule=schedule,
                num_tried=len(tried),
                best_s=best,
                difference=float(difference),
                bound_exceeds=bool(exceeds),
                breaks_limits=bool(breaks),
                binds=bool(best is not None and best > least * (1 + 1e-9)),
            )
        )
    return compared


def cut_options(chain: Chain, kept: list[int]) -> Chain:
    """The chain with some of its options alone."""
    figures = {
        name: value[:, kept]
        for name in Chain.__dataclass_fields__
        if isinstance(value := getattr(chain, name), np.ndarray) and value.ndim == 2
    }
    return replace(chain, options=tuple(chain.options[k] for k in kept), **figures)


def even_chain(num_units: int, *, devices: int, micro_batches: int = 4) -> Chain:
    """Equal units on one host, with one option for each power of two of devices; on one device 1 s
    forward, 2 s back.

    Per unit on one device: 4 bytes of state, 1 for each micro-batch in flight, 1 while it runs.
    """
    sizes = [1 << k for k in range(devices.bit_length()) if 1 << k <= devices]
    options = tuple(
        StageOption(name=f"dp {n}", submesh=(1, n), mesh_shape=(n,), dp=n, tp=1)
        for k, n in enumerate(sizes)
    )
    ones = np.ones((num_units, 1)) / np.array(sizes) ** 0.9
    return Chain(
        unit_names=tuple(f"layers[{k}]" for k in range(num_units)),
        options=options,
        num_micro_batches=micro_batches,
        forward_s=ones,
        backward_s=2 * ones,
        weight_gradient_s=ones,
        once_s=0.1 * ones,
        state_bytes=4 * np.ones_like(ones),
        in_flight_bytes=ones,
        working_bytes=ones,
        boundary_bytes=np.full(num_units, 0.01),
        memory_limit_bytes=1e9,
        num_hosts=1,
        devices_per_host=devices,
        intra=Link(latency_s=0.0, bandwidth_bytes_per_s=1.0),
        inter=Link(latency_s=0.0, bandwidth_bytes_per_s=1.0),
    )
