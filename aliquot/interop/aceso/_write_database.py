"""Writer of databases in the format of Aceso's profiler, which `load_database` reads."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from ...core import InputError
from ._database import COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """The figures of one operator for one micro-batch of one data-parallel rank; sizes are MiB on
    each device. See `COLUMNS`.
    """

    name: str
    forward_us: float
    backward_us: float
    input_mb: float
    output_mb: float
    weights_mb: float
    activations_mb: float
    forward_working_mb: float
    backward_working_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseContent:
    """The contents of a database of one model.

    Attributes:
        operators: by micro-batch, tensor degree and algorithm.
        collectives: milliseconds by kind and number of devices, then by whole MiB.
        within_nodes, between_nodes: GB/s of transfers by MiB.
    """

    operators: Mapping[tuple[int, int, int], Sequence[OperatorRow]]
    collectives: Mapping[tuple[str, int], Mapping[int, float]]
    within_nodes: Mapping[float, float]
    between_nodes: Mapping[float, float] | None


def write_database(folder: Path, model: str, content: DatabaseContent) -> None:
    """Write a database into a new or empty folder: all of its files, or none.

    Args:
        model: model and size, such as `gpt_1_3B`.

    Raises:
        InputError: the folder is not empty, or cannot be created.
    """
    try:
        if folder.exists() and any(folder.iterdir()):
            raise InputError(
                f"{folder} is not empty. Give a new folder, so that no measurements are mixed."
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            for name, text in _files(model, content).items():
                (Path(scratch) / name).write_text(text)
            shutil.copytree(scratch, folder, dirs_exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}.") from None


def _files(model: str, content: DatabaseContent) -> dict[str, str]:
    files = {}
    header = ",".join(("op_name", *COLUMNS))
    for (batch, tensor, algorithm), rows in content.operators.items():
        lines = [",".join([row.name, *map("{:.3f}".format, astuple(row)[1:])]) for row in rows]
        files[f"{model}_mbs{batch}_tp{tensor}_algo{algorithm}.csv"] = _joined([header, *lines])
    for (kind, count), times in content.collectives.items():
        lines = [f"{size},{milliseconds:.6f}" for size, milliseconds in times.items()]
        files[f"prim_{model}_{kind}_{count}gpus.csv"] = _joined(["data_size(MB),time(ms)", *lines])
    for name, speeds in (
        ("p2p_intra_node", content.within_nodes),
        ("p2p_inter_node", content.between_nodes),
    ):
        if speeds is not None:
            lines = [
                ",".join(f"{size:g}" for size in speeds),
                ",".join(f"{speed:.4f}" for speed in speeds.values()),
            ]
            files[f"{name}.csv"] = _joined(lines)
    return files


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
