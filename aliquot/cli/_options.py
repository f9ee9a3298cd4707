"""Values of options that several verbs read, from text to what they mean."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cluster import Cluster
from ..core import InputError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
ModelOfPlan = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="The model that the plan is for, where the plan file must not or cannot say: package.module:factory.",
    ),
]
TrustPlan = Annotated[
    bool, typer.Option("--trust-plan", help="Call the function that the plan file names to make its step.")
]


def read_cluster(spec: str) -> Cluster:
    """A cluster from a preset's name, the path of a TOML file, or `detect`.

    Raises:
        ClusterError: Everything that is wrong with it.
    """
    if spec == "detect":
        return Cluster.detect()
    if spec.endswith(".toml") or os.sep in spec or Path(spec).is_file():
        return Cluster.load(spec)
    return Cluster.preset(spec)


def read_mesh(text: str | None) -> tuple[int, ...] | None:
    """The shape of a mesh from text such as `4x2`.

    Raises:
        InputError: Anything else.
    """
    if text is None:
        return None
    sizes = text.lower().split("x")
    if not all(size.isdecimal() and int(size) >= 1 for size in sizes):
        raise InputError(f"--mesh {text!r} is no mesh: write the devices along each axis, such as 8, 4x2 or 2x2x2.")
    return tuple(int(size) for size in sizes)


def read_micro_batches(text: str | None) -> int | None:
    """A number of micro-batches; None if it is `auto` or not given.

    Raises:
        InputError: Anything else, or a number below 1.
    """
    if text is None or text == "auto":
        return None
    if not text.lstrip("-").isdecimal():
        raise InputError(f"--micro-batches {text!r} is neither a number nor auto.")
    if int(text) < 1:
        raise InputError(f"--micro-batches must be at least 1, got {text}.")
    return int(text)


def read_layers(text: str | None) -> str | int | None:
    """A number of layers, or a pattern of parameters' paths."""
    return int(text) if text is not None and text.lstrip("-").isdecimal() else text


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings from texts such as `num_layers=4`.

    Raises:
        InputError: All texts that have no such form, and all names that occur twice.
    """
    settings: dict[str, Any] = {}
    faults = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (equals and name.strip() and value.strip()):
            faults.append(f"{pair!r} is not of the form name=value")
        elif name.strip() in settings:
            faults.append(f"{name.strip()!r} is set twice")
        else:
            settings[name.strip()] = value.strip()
    if faults:
        raise InputError(f"--set: {'; '.join(faults)}. Write for example --set num_layers=4 --set seq_len=512.")
    return settings


def check_destination(path: Path | None, option: str = "--out") -> None:
    """Find out before the work whether its result can be written.

    Raises:
        InputError: It cannot.
    """
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise InputError(f"{option} {str(path)!r} is a folder. Give the name of a file in it.")
    if not folder.is_dir():
        raise InputError(f"{option} {str(path)!r}: there is no folder {str(folder)!r}. Create it first.")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{option} {str(path)!r}: the folder {str(folder)!r} cannot be written to. Choose another.")
