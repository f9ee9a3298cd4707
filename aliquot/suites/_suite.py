"""Suites of benchmarks: tables of cases, read from TOML; a list in a case stands for all its
combinations.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..core import InputError, faults_of, listing, nearest, read_file, shortened
from ..zoo import MODELS, AbstractConfig, configure

_MOST_BYTES = 1_000_000
_MOST_CASES = 10_000
_Count = Annotated[int, Meta(ge=1, le=1_000_000)]
_Figure = Annotated[float, Meta(gt=0)]
_MESH = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")


class _Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layers: _Count
    mesh: str
    times: _Count = 1
    forced: bool = True


class _Fields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a case says; what it leaves out, its suite may say for all of its cases."""

    model: str | tuple[str, ...] | None = None
    devices: _Count | None = None
    batch: _Count | tuple[_Count, ...] | None = None
    micro_batches: _Count | tuple[_Count, ...] | None = None
    set: dict[str, int | float | str | bool] | None = None
    dtype: str | None = None
    recompute: bool | None = None
    optimizer: Literal["adamw", "adafactor", "sgd"] | None = None
    momentum: Annotated[float, Meta(ge=0, lt=1)] | None = None
    reduce_scatter: bool | None = None
    semantics: Literal["exact", "independent"] | None = None
    forward_only: bool | None = None
    embedding: bool | None = None
    stages: tuple[_Stage, ...] | None = None
    data: _Count | tuple[_Count, ...] | None = None
    tensor: _Count | tuple[_Count, ...] | None = None
    pipeline: _Count | tuple[_Count, ...] | None = None
    mesh: str | tuple[str, ...] | None = None
    layers: _Count | tuple[_Count, ...] | None = None
    published_tflops: _Figure | None = None
    published_s: _Figure | None = None
    not_expressible: str | None = None


class _Suite(_Fields, frozen=True, kw_only=True):
    about: str = ""
    cases: tuple[_Fields, ...]


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    suite: dict[str, _Suite]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenStage:
    """A stage of a plan that is given: its share of the layers, and its mesh of data and tensor
    parallelism.

    Attributes:
        layers: how many of the equal groups of blocks that the case counts in.
        forced: whether the first axis splits the batch. If not, the mesh is one axis on which a
            solver may split the batch in one operator and parameters in the next.
    """

    layers: int
    mesh: tuple[int, int]
    forced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a batch and a number of devices, with the way to plan it: stages that are given, a
    layout, a mesh, or, without any of these, a search.

    Attributes:
        suite, number: its name: cases of a suite count from 1.
        overrides: changed sizes of the zoo's model.
        recompute: whether each block computes its activations again in the backward pass.
        optimizer, momentum: as for `aliquot.zoo.build`.
        reduce_scatter: whether optimizer state is split over the data axis, as in ZeRO-2.
        forward_only: whether it is the forward pass alone.
        embedding: whether the model has its embedding and head, or is its layers alone, from hidden
            states to hidden states.
        layout: degrees of data, tensor and pipeline parallelism.
        num_layers: of a search, the groups of blocks between which stages may be cut.
        published_tflops, published_s: what was published for it: 1e12 operations per second on each
            device, as the suite counts operations, or seconds.
        not_expressible: why it cannot be planned; empty if it can.
    """

    suite: str
    number: int
    model: str
    num_devices: int
    global_batch: int
    num_micro_batches: int = 1
    overrides: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    recompute: bool = True
    optimizer: str = "adamw"
    momentum: float = 0.0
    reduce_scatter: bool = True
    semantics: str = "exact"
    forward_only: bool = False
    embedding: bool = True
    stages: tuple[GivenStage, ...] = ()
    layout: tuple[int, int, int] | None = None
    mesh_shape: tuple[int, int] | None = None
    num_layers: int | None = None
    published_tflops: float | None = None
    published_s: float | None = None
    not_expressible: str = ""

    @property
    def searches(self) -> bool:
        """True if nothing of its plan is given."""
        return not (self.stages or self.layout or self.mesh_shape)

    @property
    def config(self) -> AbstractConfig:
        """The model's sizes. Raises `InputError` if it has none of the changed ones."""
        return configure(self.model, **self.overrides)

    @property
    def precision(self) -> str:
        """The dtype that it computes in: by default the model's usual one, or else float16, as in
        Alpa's suites.
        """
        return self.dtype or self.config.usual_dtype or "float16"

    @property
    def parallel(self) -> str:
        """The given plan in a few words, such as `(2, 2, 2), reduce-scatter`, or `search, 8
        layers`.
        """
        if self.stages:
            groups = itertools.groupby(self.stages)
            said = ", ".join(
                f"{len(list(same))} x ({stage.layers} layers on {_text(stage.mesh)})"
                for stage, same in groups
            )
        elif self.layout:
            said = f"dp{self.layout[0]} tp{self.layout[1]} pp{self.layout[2]}"
        elif self.mesh_shape:
            said = f"mesh {_text(self.mesh_shape)}"
        else:
            return "search" if self.num_layers is None else f"search, {self.num_layers} layers"
        return f"{said}, reduce-scatter" if self.reduce_scatter and not self.forward_only else said


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Cases under a name, such as `gpt.perf_test_auto`."""

    name: str
    about: str
    cases: tuple[Case, ...]

    @property
    def kind(self) -> str:
        """How its cases are planned, for lists."""
        first = self.cases[0]
        if first.not_expressible:
            return "not expressible"
        if first.stages:
            return "given stages"
        return "search" if first.searches else "given layout" if first.layout else "given mesh"


@functools.cache
def alpa_suites() -> Mapping[str, Suite]:
    """The suites of Alpa's repository, by name."""
    text = files(__package__).joinpath("alpa.toml").read_text()
    return parse_suites(text, asked="the table of Alpa's suites")


def load_suites(path: Path) -> Mapping[str, Suite]:
    """The suites of a TOML file.

    Raises:
        InputError: it cannot be read, or everything that is wrong with it.
    """
    asked = f"suites file {shortened(str(path))!r}"
    try:
        return parse_suites(read_file(path, _MOST_BYTES).decode(), asked=asked)
    except UnicodeDecodeError:
        raise InputError(f"{asked}: it is not text in UTF-8.") from None
    except InputError as error:
        said = str(error)
        raise InputError(said if said.startswith(asked) else f"{asked}: {said}") from None


def parse_suites(text: str, *, asked: str) -> Mapping[str, Suite]:
    """Suites from TOML text. Raises `InputError`: see `load_suites`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{asked} is no TOML: {error}.") from None
    faults = list(faults_of(data, _File, ""))
    if not faults:
        found = {}
        for name, suite in msgspec.convert(data, _File).suite.items():
            found[name] = _read(name, suite, faults)
        if not faults:
            return found
    raise InputError(listing(f"{asked} cannot be used", faults, "See docs/benchmarks.md."))


def _read(name: str, suite: _Suite, faults: list[str]) -> Suite:
    cases: list[Case] = []
    for row, fields in enumerate(suite.cases, 1):
        said = {}
        for key in _Fields.__struct_fields__:
            own = getattr(fields, key)
            said[key] = getattr(suite, key) if own is None else own
        where = f"`suite.{name}.cases`, row {row}"
        lists = [key for key, value in said.items() if isinstance(value, tuple) and key != "stages"]
        for chosen in itertools.product(*(said[key] for key in lists)):
            values = {**said, **dict(zip(lists, chosen, strict=True))}
            case, wrong = _case(name, len(cases) + 1, values)
            faults += [f"{where}: {fault}" for fault in wrong if f"{where}: {fault}" not in faults]
            if case is not None:
                cases.append(case)
            if len(cases) > _MOST_CASES:
                faults.append(f"{where}: the suite has more than {_MOST_CASES} cases")
                return Suite(name=name, about=suite.about, cases=tuple(cases))
    if not suite.cases:
        faults.append(f"`suite.{name}`: it has no cases")
    return Suite(name=name, about=suite.about, cases=tuple(cases))


def _case(suite: str, number: int, said: Mapping[str, Any]) -> tuple[Case | None, list[str]]:
    """The case of a row, and all that is wrong with it."""
    degrees = [said[name] for name in ("data", "tensor", "pipeline")]
    found = []
    for stage in said["stages"] or ():
        for _ in range(stage.times):
            found.append(
                GivenStage(layers=stage.layers, mesh=_mesh(stage.mesh), forced=stage.forced)
            )
    stages = tuple(found)
    mesh = _mesh(said["mesh"]) if said["mesh"] else None
    layout = (degrees[0] or 1, degrees[1] or 1, degrees[2] or 1) if any(degrees) else None
    ways = {"stages": stages, "data, tensor, pipeline": layout, "mesh": mesh}
    given = [name for name, value in ways.items() if value]
    sizes = [math.prod(stage.mesh) for stage in stages]
    counted = sum(sizes) or math.prod(layout or mesh or (0,))
    written = [*(stage.mesh for stage in said["stages"] or ()), *filter(None, [said["mesh"]])]
    faults = []
    for text in dict.fromkeys(written):
        if not _MESH.fullmatch(text):
            faults.append(f"`mesh` {shortened(text, 60)!r} is no mesh of two axes, such as 4x2")
    if said["not_expressible"] is None and len(given) > 1:
        faults.append(f"{' and '.join(given)} exclude each other")
    if not (counted or said["devices"]):
        faults.append("`devices` is missing: nothing else says how many there are")
    elif counted and said["devices"] not in (None, counted):
        faults.append(f"`devices` is {said['devices']}, and {given[0]} make {counted}")
    faults += [f"`{key}` is missing" for key in ("model", "batch") if said[key] is None]
    count = said["micro_batches"] or 1
    if said["batch"] and said["batch"] % count:
        faults.append(f"{count} micro-batches do not divide a batch of {said['batch']}")
    if said["model"] is not None and said["not_expressible"] is None:
        if said["model"] not in MODELS:
            known = nearest(said["model"], MODELS, "aliquot models")
            faults.append(f"there is no model {shortened(said['model'], 60)!r}: {known}")
        else:
            try:
                configure(said["model"], **(said["set"] or {}))
            except InputError as error:
                faults.append(str(error))
    if said["embedding"] is False and not said["forward_only"]:
        faults.append("`embedding = false` is for `forward_only = true`")
    if said["momentum"] and said["optimizer"] != "sgd":
        faults.append('`momentum` is for `optimizer = "sgd"`: others have moments of their own')
    if faults:
        return None, faults
    case = Case(
        suite=suite,
        number=number,
        model=said["model"],
        num_devices=counted or said["devices"],
        global_batch=said["batch"],
        num_micro_batches=count,
        overrides=said["set"] or {},
        stages=stages,
        layout=layout,
        mesh_shape=mesh,
        num_layers=said["layers"],
        not_expressible=said["not_expressible"] or "",
    )
    optional = (
        "dtype",
        "recompute",
        "optimizer",
        "momentum",
        "reduce_scatter",
        "semantics",
        "forward_only",
        "embedding",
        "published_tflops",
        "published_s",
    )
    return replace(case, **{k: said[k] for k in optional if said[k] is not None}), []


def _mesh(text: str) -> tuple[int, int]:
    """Devices along both axes; `(0, 0)` for a text that says none."""
    found = _MESH.fullmatch(text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _text(mesh: tuple[int, int]) -> str:
    return "x".join(map(str, mesh))


def find_cases(suite: Suite, numbers: tuple[int, ...]) -> tuple[Case, ...]:
    """Cases by their numbers, or all of them if there are none.

    Raises:
        InputError: no such case; lists all of them.
    """
    wrong = [number for number in numbers if not 1 <= number <= len(suite.cases)]
    if wrong:
        raise InputError(
            f"{suite.name} has no case {', '.join(map(str, wrong))}: they count from 1 to"
            f" {len(suite.cases)}. `aliquot bench list {suite.name}` shows them."
        )
    return tuple(suite.cases[n - 1] for n in dict.fromkeys(numbers)) if numbers else suite.cases


def find_suite(name: str, suites: Mapping[str, Suite]) -> Suite:
    """A suite by its name; a family alone, such as `gpt`, is its full search.

    Raises:
        InputError: there is none; says which are near.
    """
    full = f"{name}.grid_search_auto" if "." not in name else name
    if full not in suites:
        raise InputError(
            f"there is no suite {shortened(name, 60)!r}: {nearest(name, suites)} `aliquot bench"
            " list` says what each is."
        )
    return suites[full]
