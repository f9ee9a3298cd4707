"""Names of layouts with their degrees: `tp:8`, `megatron:dp4,tp8,pp2`."""

from __future__ import annotations

import contextlib
import re

from ..core import InputError, counted
from ._megatron import SEQUENCE, ZERO_STAGES, Megatron, TensorParallel
from ._method import AbstractMethod
from .intra import ATTENTION_WAYS

LAYOUTS = {"tp": "tp:8", "megatron": "megatron:dp4,tp8,pp2"}
"""Names that take degrees after a colon, each with an example."""

_DEGREES = ("dp", "tp", "pp", "vpp", "ep", "cp")
_SEPARATORS = re.compile(r"[,\-+]")
_DEGREE = re.compile(rf"({'|'.join(_DEGREES)})(\d{{1,6}})")
# Of at most so many runs of at most so many stages: files are not trusted.
_LAYERS = re.compile(r"layers\d{1,4}(x\d{1,3})?(\.\d{1,4}(x\d{1,3})?){0,200}")


def layout_by_name(
    name: str, num_micro_batches: int | None = None, layers: str | int | None = None
) -> AbstractMethod:
    """The layout that `tp:8` or `megatron:dp4,tp8,pp2` names. Degrees may also be joined by "-",
    for lists of methods.

    Raises:
        InputError: lists every part that cannot be read, and the valid ones.
    """
    kind, _, words = name.partition(":")
    if kind not in LAYOUTS or not words:
        raise InputError(f"Unknown layout {name!r}: type {' or '.join(LAYOUTS.values())}.")
    if kind == "tp":
        if not words.isdecimal() or not 0 < int(words) < 1 << 20:
            raise InputError(f"{name}: tensor parallelism takes its degree, such as tp:8.")
        return TensorParallel(degree=int(words))
    degrees: dict[str, int] = {}
    stage_layers: tuple[int, ...] = ()
    zero: list[str] = []
    ways: list[str] = []
    sequence = False
    faults, unknown = [], []
    # In a list of methods, commas separate methods, so other separators join degrees.
    for word in filter(None, map(str.strip, _SEPARATORS.split(words))):
        degree = _DEGREE.fullmatch(word)
        if degree and degree[1] in degrees:
            faults.append(f"{degree[1]} is given twice")
        elif degree and int(degree[2]) < 1:
            faults.append(f"{word}: a degree is at least 1")
        elif degree:
            degrees[degree[1]] = int(degree[2])
        elif word == SEQUENCE:
            sequence = True
        elif _LAYERS.fullmatch(word):
            runs = [map(int, run.split("x")) for run in word.removeprefix("layers").split(".")]
            stage_layers = tuple(n for n, *times in runs for _ in range(times[0] if times else 1))
        elif word in ZERO_STAGES:
            zero.append(word)
        elif word in ATTENTION_WAYS:
            ways.append(word)
        else:
            unknown.append(word)
    if unknown and words != _as_typed_here(words) and (meant := layout_like(words)):
        devices = _devices_of(layout_by_name(meant))
        raise InputError(f"{name} cannot be read: type {meant}, which takes {devices}.")
    if unknown:
        faults.append(f"{', '.join(map(repr, unknown))}: no part of a layout")
    faults += [
        f"{' and '.join(words)} exclude each other" for words in (zero, ways) if len(words) > 1
    ]
    if ways and degrees.get("cp", 1) == 1:
        faults.append(f"{ways[0]} is a way to split a sequence, which cp does")
    if faults or not (degrees or zero):
        raise InputError(
            f"{name} cannot be read: {'; '.join(faults) or 'it has no degrees'}. A layout is such"
            f" as {LAYOUTS['megatron']} (megatron:dp4-tp8-pp2 in a list of methods). Known:"
            f" {', '.join(f'{degree}N' for degree in _DEGREES)}; {SEQUENCE}, with tp;"
            " layers5.7.7.5, the layers of unequal stages, with pp;"
            f" {', '.join(filter(None, ZERO_STAGES))}; {', '.join(ATTENTION_WAYS)}, with cp."
        )
    return Megatron(
        data=degrees.get("dp"),
        tensor=degrees.get("tp", 1),
        sequence=sequence,
        pipeline=degrees.get("pp", 1),
        chunks=degrees.get("vpp", 1),
        stage_layers=stage_layers,
        expert=degrees.get("ep", 1),
        context=degrees.get("cp", 1),
        attention=ways[0] if ways else None,
        zero_stage=ZERO_STAGES[zero[0]] if zero else 0,
        num_micro_batches=num_micro_batches,
        layers=layers,
    )


def _devices_of(layout: AbstractMethod) -> str:
    """How many devices a layout takes, in words."""
    assert isinstance(layout, Megatron)
    others = layout.tensor * layout.context * layout.pipeline
    if layout.data is None:
        return f"{others} devices or a multiple"
    return counted(layout.data * others, "device")


def layout_like(text: str) -> str:
    """The layout that is meant by degrees in another spelling; empty if none is.

    >>> layout_like("tp=8,pp=4"), layout_like("dp2xTP4"), layout_like("zero9")
    ('megatron:tp8,pp4', 'megatron:dp2,tp4', '')
    """
    name = f"megatron:{_as_typed_here(text)}"
    with contextlib.suppress(InputError):
        layout_by_name(name)
        return name
    return ""


def _as_typed_here(text: str) -> str:
    """Degrees in another spelling, as they are typed here.

    >>> _as_typed_here("tp=8 PP4")
    'tp8,pp4'
    """
    words = re.split(r"[,;+\-/_ ]|(?<=\d)x(?=[a-z])", text.lower())
    return ",".join(word.replace("=", "").replace(":", "") for word in words if word)


def method_names(text: str) -> list[str]:
    """The methods of a list such as `auto,tp:8,megatron:dp1,tp8`: a bare degree belongs to the
    layout before it.

    >>> method_names("auto, megatron:dp1,tp8,zero1, fsdp, tp:8")
    ['auto', 'megatron:dp1,tp8,zero1', 'fsdp', 'tp:8']
    """
    names: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        # `fsdp` and `zero2` are also methods: after a comma they start a new one.
        if (
            names
            and names[-1].startswith("megatron:")
            and (_DEGREE.fullmatch(part) or _LAYERS.fullmatch(part) or part in ("zero1", SEQUENCE))
        ):
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names
