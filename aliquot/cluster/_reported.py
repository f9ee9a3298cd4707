"""How far predicted step times were from those that others reported.

`benchmarks/public_steps.py` plans each reported step as a user plans it and writes its errors into
`reported_steps.json`, with a digest of the figures of each device. The texts of plans and of
`aliquot cluster` read that file and nothing else.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..core import counted
from ._calibration import chip_of
from ._device import DEVICES
from ._presets import wire
from ._target import target_for

_FILE = "reported_steps.json"
_MANY = 10
_ENOUGH = 5
_SHOWN = 2
# What is no figure.
_WORDS = ("source", "memory_advice")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedSteps:
    """Reported steps of one framework, device and kind of parallelism beside what is predicted.

    Attributes:
        framework: that ran them.
        reason: why its steps take another time than those of a JAX program; empty for JAX programs.
        device: of the catalogue; several, with commas between them.
        kind: of parallelism, such as "data, FSDP" or "pipeline, interleaved, 8 bits".
        errors: predicted over reported time, less 1, of each step, least first.
        unfit: number of steps that ran, and that are predicted not to fit the device's memory.
    """

    framework: str
    reason: str
    device: str
    kind: str
    errors: tuple[float, ...]
    unfit: int = 0

    @property
    def is_jax(self) -> bool:
        """Whether a JAX program ran, as a plan's is."""
        return not self.reason

    @property
    def median_error(self) -> float:
        """Median of the sizes of the errors."""
        return statistics.median(map(abs, self.errors))

    @property
    def most_error(self) -> float:
        """The size that nine of ten errors do not exceed; of fewer than ten steps, the largest."""
        sizes = sorted(map(abs, self.errors))
        return sizes[-1] if len(sizes) < _MANY else statistics.quantiles(sizes, n=10)[-1]

    @property
    def slower(self) -> float:
        """How much longer steps took than predicted, in the median: 0.1 for 10 %."""
        return 1 / (1 + statistics.median(self.errors)) - 1

    def __str__(self) -> str:
        count = len(self.errors)
        steps = f"{counted(count, 'step')} of {self.framework} on {self.device}"
        if self.is_jax:
            worst = f"worst {max(map(abs, self.errors)):.0%}"
            if count >= _MANY:
                worst = f"90th percentile {self.most_error:.0%}, {worst}"
            text = f"{steps}: median {self.median_error:.0%}, {worst}"
            if count == 1:
                text = f"{steps} was off by {self.median_error:.0%}"
        else:
            slow, fast = 1 / (1 + self.errors[0]) - 1, 1 / (1 + self.errors[-1]) - 1
            text = f"{steps} ({self.reason}): "
            if count > 1:
                least = _longer(fast)
                if least.split()[1] == _longer(slow).split()[1]:
                    least = least.split()[0]
                text += f"median {_longer(self.slower)} than predicted, {least} to {_longer(slow)}"
            else:
                text += f"{_longer(self.slower)} than predicted"
        if self.unfit:
            text += f"; {self.unfit} more ran and {'is' if self.unfit == 1 else 'are'} predicted"
            text += " not to fit"
        return text


def _longer(share: float) -> str:
    """How much longer a step took than predicted.

    >>> _longer(0.07), _longer(-0.03), _longer(-0.001)
    ('7% slower', '3% faster', '0% slower')
    """
    return f"{abs(share):.0%} {'faster' if round(share, 2) < 0 else 'slower'}"


def reported_steps(device_name: str, kind: str | None = None) -> tuple[ReportedSteps, ...]:
    """Reported steps on a kind of device, or on others with the same chip: of JAX programs if there
    are any, else those of the frameworks with most of them.

    Args:
        device_name: of the catalogue.
        kind: of parallelism; if the device has no steps of it, those of all devices are taken. None
            takes all steps of the device, whatever they split, of all frameworks.
    """
    chip = chip_of(device_name)
    here = [
        steps
        for steps in _record()
        if steps.errors
        and (chip_of(steps.device) if chip else steps.device) == (chip or device_name)
    ]
    if kind is None:
        return tuple(sorted(here, key=lambda steps: (not steps.is_jax, -len(steps.errors))))
    found = [steps for steps in here if steps.kind == kind]
    if not found and here:
        found = [steps for steps in _record() if steps.errors and steps.kind == kind]
    ours = [steps for steps in found if steps.is_jax]
    return tuple(_together(ours or found)[:_SHOWN])


def same_chip(one: str, other: str) -> bool:
    """Whether two devices of the catalogue, by name, are the same or have the same chip."""
    return one == other or (chip_of(one) is not None and chip_of(one) == chip_of(other))


def steps_reported_by(frameworks: Sequence[str]) -> tuple[ReportedSteps, ...]:
    """Reported steps of frameworks by name, on all devices and of all kinds, those of most steps
    first.
    """
    found = [steps for steps in _record() if steps.framework in frameworks and steps.errors]
    return tuple(_together(found))


def said_of_reported(found: Sequence[ReportedSteps]) -> str:
    """What is printed of reported steps."""
    return "; ".join(map(str, found))


def most_error(found: Sequence[ReportedSteps]) -> float | None:
    """How far a prediction may be off by what is known of JAX programs, 0.1 for 10 %; None if
    nothing is.
    """
    return max((steps.most_error for steps in found if steps.is_jax), default=None)


def usual_error(found: Sequence[ReportedSteps]) -> float | None:
    """The median error of a prediction by what is known of JAX programs; None if nothing is."""
    return next((steps.median_error for steps in found if steps.is_jax), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheetRange:
    """How long steps took on devices without calibration, beside what was predicted from their data
    sheets: the narrowest range that holds eight of ten.

    Attributes:
        low, high: reported over predicted time.
        held, steps: reported steps in the range, and all.
        devices: on which they ran, by name.
    """

    low: float
    high: float
    held: int
    steps: int
    devices: tuple[str, ...]

    def of(self, step_s: float) -> tuple[float, float]:
        """The range of a predicted step time, in seconds."""
        return self.low * step_s, self.high * step_s


def data_sheet_range() -> DataSheetRange | None:
    """The range of steps on devices that are known by their data sheets alone; None if too few were
    reported.
    """
    found = [steps for steps in _record() if steps.errors and not chip_of(steps.device)]
    errors = itertools.chain(*(steps.errors for steps in found))
    longer = sorted(1 / (1 + error) for error in errors)
    if len(longer) < _ENOUGH:
        return None
    low, high = narrowest(longer)
    held = sum(low <= each <= high for each in longer)
    devices = tuple(sorted({steps.device for steps in found}))
    return DataSheetRange(low=low, high=high, held=held, steps=len(longer), devices=devices)


def narrowest(values: Sequence[float], share: float = 0.8) -> tuple[float, float]:
    """The ends of the narrowest range, by the ratio of its ends, that holds a share of some values
    above 0.

    >>> narrowest([0.1, 1.0, 1.2, 1.3, 9.0], share=0.6)
    (1.0, 1.3)
    """
    ordered = sorted(values)
    held = math.ceil(share * len(ordered) - 1e-9)
    starts = range(len(ordered) - held + 1)
    first = min(starts, key=lambda k: ordered[k + held - 1] / ordered[k])
    return ordered[first], ordered[first + held - 1]


def said_of_data_sheet() -> str:
    """What is printed of devices without calibration: where the range of their step times comes
    from.
    """
    text = "the speeds are those of a data sheet"
    found = data_sheet_range()
    if found is None:
        return f"not known: {text}, and no measurement was compared"
    return (
        f"{text}; {found.held} of {found.steps} reported steps on devices known by theirs alone"
        f" ({', '.join(found.devices)}) took {found.low:.2f} to {found.high:.2f} times as long as"
        " predicted"
    )


def _together(found: Iterable[ReportedSteps]) -> list[ReportedSteps]:
    """Steps of one framework on several devices as one, those with most steps first."""
    joined: dict[str, ReportedSteps] = {}
    for steps in found:
        known = joined.get(steps.framework)
        joined[steps.framework] = (
            steps
            if known is None
            else replace(
                known,
                device=", ".join(dict.fromkeys([*known.device.split(", "), steps.device])),
                errors=tuple(sorted(known.errors + steps.errors)),
                unfit=known.unfit + steps.unfit,
            )
        )
    return sorted(joined.values(), key=lambda steps: -len(steps.errors))


def figures_digest(device_name: str) -> str:
    """A digest of all figures with which steps on a device of the catalogue are priced: those of
    the device, of its links, and what its compiler does.
    """
    device = DEVICES[device_name]
    cluster = wire(device_name, device_name, 2, 4 if device.kind == "tpu" else 8)
    facts = [asdict(target_for(device)), cluster.to_dict()]
    text = json.dumps(_figures_alone(facts), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _figures_alone(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _figures_alone(v) for k, v in value.items() if k not in _WORDS}
    return [_figures_alone(v) for v in value] if isinstance(value, list | tuple) else value


def recorded_digests() -> dict[str, str]:
    """The digest of the figures of each device with which the record was made."""
    figures: dict[str, str] = _read()["figures"]
    return figures


def write_reported_steps(found: Sequence[ReportedSteps], figures: Mapping[str, str]) -> Path:
    """Write the record, with the digest of the figures of each of its devices."""
    path = Path(__file__).with_name(_FILE)
    rows = ",\n".join(f"  {json.dumps(asdict(steps))}" for steps in found)
    path.write_text(
        '{\n "about": "Written by benchmarks/public_steps.py: predicted over reported step time,'
        f' less 1.",\n "figures": {json.dumps(dict(figures))},\n "steps": [\n{rows}\n ]\n}}\n',
        encoding="utf-8",
    )
    _read.cache_clear()
    _record.cache_clear()
    return path


@lru_cache(maxsize=1)
def _read() -> dict[str, Any]:
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@lru_cache(maxsize=1)
def _record() -> tuple[ReportedSteps, ...]:
    return tuple(
        ReportedSteps(**{**steps, "errors": tuple(steps["errors"])}) for steps in _read()["steps"]
    )
