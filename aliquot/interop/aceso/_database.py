"""Reader of Aceso's databases: CSV files with measured times and sizes of operators, collectives
and transfers.

Operators have one file for each micro-batch, tensor degree and algorithm,
`MODEL_SIZE_mbsB_tpT_algoA.csv`; collectives one for each kind and number of devices,
`prim_MODEL_SIZE_KIND_Ngpus.csv`; transfers one for those within and one for those between nodes.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core import InputError

COLUMNS = (
    "forward-compute",
    "backward-compute",
    "input_size",
    "output_size",
    "weights",
    "activations",
    "fwd_reserved",
    "bwd_reserved",
)
"""Columns of an operator file: microseconds, then MiB on each device, for one micro-batch of one
data-parallel rank.
"""

_OPERATOR_FILE = re.compile(r"(?P<model>.+)_mbs(?P<mbs>\d+)_tp(?P<tp>\d+)_algo(?P<algo>\d+)\.csv")
_COLLECTIVE_FILE = re.compile(
    r"prim_(?P<model>.+)_(?P<kind>all_gather|all_reduce|reduce_scatter|all_to_all)_(?P<n>\d+)gpus\.csv"
)
# Written by Aceso's profiler for an operator or a collective that failed or was too large to try.
_FAILED = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Bandwidths of transfers in GB/s for sizes of messages in MiB, which are powers of two from 1
    on.
    """

    sizes_mb: tuple[float, ...]
    bandwidths_gb_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Database:
    """The measurements of one model of one size.

    Attributes:
        model: model and size, such as `gpt_1_3B`.
        operators: position of each operator in `table`.
        micro_batches, tensor_degrees, algorithms: the measured settings, ascending.
        table: by operator, micro-batch, tensor degree, algorithm and column; NaN where nothing was
            measured.
        collectives: milliseconds by kind and number of devices, then by whole MiB.
        within_nodes, between_nodes: transfers from stage to stage.
        missing: combinations of micro-batch, tensor degree and algorithm without a file, or with
            rows that failed.
    """

    model: str
    operators: Mapping[str, int]
    micro_batches: tuple[int, ...]
    tensor_degrees: tuple[int, ...]
    algorithms: tuple[int, ...]
    table: NDArray[np.float64]
    collectives: Mapping[tuple[str, int], Mapping[int, float]]
    within_nodes: Transfers
    between_nodes: Transfers
    missing: tuple[str, ...]


def models_in(folder: Path) -> tuple[str, ...]:
    """The models, with their sizes, that a folder has operator files of. Raises `InputError` if
    there are none.
    """
    models = {
        match["model"] for path in _files(folder) if (match := _OPERATOR_FILE.fullmatch(path.name))
    }
    if not models:
        raise InputError(
            f"{folder} is no database of Aceso's: it has no files such as"
            " gpt_1_3B_mbs1_tp1_algo0.csv. Give the folder that Aceso's profiler wrote, such as"
            " profiled-time-eurosys."
        )
    return tuple(sorted(models))


def load_database(folder: Path, model: str) -> Database:
    """The measurements of one model.

    Args:
        model: model and size, such as `gpt_1_3B`.

    Raises:
        InputError: the folder lacks the model, or a file is malformed; names line and column.
    """
    models = models_in(folder)
    if model not in models:
        raise InputError(f"{folder} has no measurements of {model}. It has {', '.join(models)}.")
    files = {}
    for path in _files(folder):
        match = _OPERATOR_FILE.fullmatch(path.name)
        if match and match["model"] == model:
            files[int(match["mbs"]), int(match["tp"]), int(match["algo"])] = path
    rows = {key: dict(_operator_rows(path)) for key, path in files.items()}
    all_names = dict.fromkeys(itertools.chain.from_iterable(rows.values()))
    names = {name: k for k, name in enumerate(all_names)}
    axes = [tuple(sorted(set(values))) for values in zip(*files, strict=True)]
    table = np.full((len(names), *map(len, axes), len(COLUMNS)), np.nan)
    missing = []
    for mbs, tp, algo in np.ndindex(*map(len, axes)):
        key = axes[0][mbs], axes[1][tp], axes[2][algo]
        if key not in rows:
            missing.append(
                f"micro-batch {key[0]}, tensor degree {key[1]}, algorithm {key[2]}: no file"
            )
            continue
        for name, numbers in rows[key].items():
            if max(numbers) >= _FAILED:
                missing.append(
                    f"micro-batch {key[0]}, tensor degree {key[1]}, algorithm {key[2]}: {name}"
                    " failed"
                )
            else:
                table[names[name], mbs, tp, algo] = numbers
    within = _transfers(folder / "p2p_intra_node.csv")
    between = folder / "p2p_inter_node.csv"
    return Database(
        model=model,
        operators=names,
        micro_batches=axes[0],
        tensor_degrees=axes[1],
        algorithms=axes[2],
        table=table,
        collectives=dict(_collectives(folder, model)),
        within_nodes=within,
        between_nodes=_transfers(between) if between.exists() else within,
        missing=tuple(missing),
    )


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder} cannot be read as a database: {error.strerror}.") from None


def _operator_rows(path: Path) -> Iterator[tuple[str, tuple[float, ...]]]:
    lines = _lines(path)
    header = ("op_name", *COLUMNS)
    if tuple(lines[0]) != header:
        raise InputError(
            f"{path}, line 1: the columns must be {','.join(header)}, got {','.join(lines[0])!r}."
        )
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(header):
            raise InputError(
                f"{path}, line {number}: {len(header)} columns are needed, got {len(line)}."
            )
        yield (
            line[0],
            tuple(
                _number(path, number, c, text) for c, text in zip(COLUMNS, line[1:], strict=True)
            ),
        )


def _collectives(folder: Path, model: str) -> Iterator[tuple[tuple[str, int], dict[int, float]]]:
    for path in _files(folder):
        match = _COLLECTIVE_FILE.fullmatch(path.name)
        if match is None or match["model"] != model:
            continue
        times = {}
        for number, line in enumerate(_lines(path)[1:], start=2):
            if len(line) != 2:
                raise InputError(f"{path}, line {number}: 2 columns are needed, got {len(line)}.")
            size, milliseconds = (
                _number(path, number, c, t)
                for c, t in zip(("data_size", "time"), line, strict=True)
            )
            if milliseconds < _FAILED:
                times[int(size)] = milliseconds
        yield (match["kind"], int(match["n"])), times


def _transfers(path: Path) -> Transfers:
    lines = _lines(path)
    if len(lines) < 2 or len(lines[0]) != len(lines[1]):
        raise InputError(
            f"{path}: two lines of equal length are needed, sizes in MiB and bandwidths in GB/s."
        )

    def numbers(line: int) -> tuple[float, ...]:
        texts = enumerate(lines[line - 1], start=1)
        return tuple(_number(path, line, str(column), text) for column, text in texts)

    return Transfers(sizes_mb=numbers(1), bandwidths_gb_per_s=numbers(2))


def _lines(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None
    if not lines:
        raise InputError(f"{path} is empty.")
    return lines


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (value >= 0 and np.isfinite(value)):
        raise InputError(
            f"{path}, line {line}, column {column}: a number of at least 0 is needed, got"
            f" {text.strip()!r}."
        )
    return value
