"""Aceso's configurations: stages, with the degrees, algorithm and recomputation of each
operator.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...core import InputError, faults_of, read_file, shortened, write_atomic

_MOST_SHOWN = 12
_MOST_BYTES = 64 * 2**20
_LISTS = {
    "tensor": "model_parallel_size_of_each_op",
    "data": "data_parallel_size_of_each_op",
    "recompute": "recompute_ops",
    "algorithm": "algo_of_each_op",
}


Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Entry = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Flag = Annotated[int, Meta(ge=0, le=1)] | bool


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """What Aceso's JSON holds, besides settings of the model."""

    model_name: Any
    model_size: Any
    global_batch_size: Positive
    micro_batch_size: Positive
    num_stages: Positive
    num_gpus: list[Positive]
    num_ops_in_each_stage: list[Positive]
    model_parallel_size_of_each_op: list[list[Entry]]
    data_parallel_size_of_each_op: list[list[Entry]]
    recompute_ops: list[list[Flag]]
    algo_of_each_op: list[list[Entry]]

    def faults(self, k: int) -> list[str]:
        """What does not go together in a stage."""
        devices, operators = self.num_gpus[k], self.num_ops_in_each_stage[k]
        faults = [
            f"{key} of stage {k} has {len(getattr(self, key)[k])} entries, and the stage"
            f" {operators} operators"
            for key in _LISTS.values()
            if len(getattr(self, key)[k]) != operators
        ]
        if faults:
            return faults
        tensor, data = self.model_parallel_size_of_each_op[k], self.data_parallel_size_of_each_op[k]
        wrong = [i for i in range(operators) if tensor[i] * data[i] != devices]
        return [
            f"operator {i} of stage {k} has tensor degree {tensor[i]} times data degree {data[i]},"
            f" and the stage {devices} devices"
            for i in wrong[:3]
        ]


_KNOWN = {*_File.__struct_fields__, "checkpoint_activations", "resharding_stages"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfiguration:
    """The configuration of one stage. Tuples have one entry for each of its operators.

    Attributes:
        num_devices: tensor degree times data degree of each of its operators.
        tensor, data: tensor and data degrees.
        algorithm: how tensor parallelism splits the operator.
        recompute: whether the backward pass recomputes the operator.
    """

    num_devices: int
    tensor: tuple[int, ...]
    data: tuple[int, ...]
    algorithm: tuple[int, ...]
    recompute: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A whole configuration.

    Attributes:
        model_name, model_size: as in the names of the database's files.
        global_batch: samples in a step.
        micro_batch: samples in a micro-batch, summed over the data-parallel ranks of a stage.
        stages: in order; together they hold every operator once.
        settings: the remaining keys of the file, such as `num_layers`.
    """

    model_name: str
    model_size: str
    global_batch: int
    micro_batch: int
    stages: tuple[StageConfiguration, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_operators(self) -> int:
        """Operators of all stages."""
        return sum(len(stage.tensor) for stage in self.stages)


def read_configuration(path: Path) -> Configuration:
    """Read a configuration from Aceso's JSON. Raises `InputError` that lists every fault."""
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        repeated.extend(
            f"{shortened(key, 60)} stands {n} times in one object"
            for key, n in counts.items()
            if n > 1
        )
        return dict(pairs)

    try:
        text = read_file(path, _MOST_BYTES).decode()
        content = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise InputError(
            f"{path} is no configuration of Aceso's: it has lists or objects too deep in each"
            " other."
        ) from None
    except InputError as error:
        raise InputError(f"The configuration {path} cannot be read: {error}.") from None
    except ValueError as error:
        raise InputError(f"The configuration {path} is no JSON: {error}.") from None
    faults = repeated or list(faults_of(content, _File, ""))
    if not faults:
        file = msgspec.convert(content, _File)
        faults = [
            f"{key} must be a list of {file.num_stages}, one for each stage"
            for key in ("num_gpus", "num_ops_in_each_stage", *_LISTS.values())
            if len(getattr(file, key)) != file.num_stages
        ] or list(itertools.chain(*map(file.faults, range(file.num_stages))))
    if faults:
        more = [f"  and {len(faults) - _MOST_SHOWN} more"] if len(faults) > _MOST_SHOWN else []
        raise InputError(
            f"{path} is no configuration of Aceso's:\n"
            + "\n".join([f"  - {fault}" for fault in faults[:_MOST_SHOWN]] + more)
        )
    return Configuration(
        model_name=str(file.model_name),
        model_size=str(file.model_size),
        global_batch=file.global_batch_size,
        micro_batch=file.micro_batch_size,
        stages=tuple(
            StageConfiguration(
                num_devices=file.num_gpus[k],
                tensor=tuple(file.model_parallel_size_of_each_op[k]),
                data=tuple(file.data_parallel_size_of_each_op[k]),
                algorithm=tuple(file.algo_of_each_op[k]),
                recompute=tuple(map(bool, file.recompute_ops[k])),
            )
            for k in range(file.num_stages)
        ),
        settings={key: value for key, value in content.items() if key not in _KNOWN},
    )


def configuration_to_dict(configuration: Configuration) -> dict[str, Any]:
    """The configuration as the keys and values that Aceso's runtime reads."""
    stages = configuration.stages
    return {
        "model_name": configuration.model_name,
        "model_size": configuration.model_size,
        **configuration.settings,
        "global_batch_size": configuration.global_batch,
        "micro_batch_size": configuration.micro_batch,
        "num_stages": len(stages),
        "num_gpus": [s.num_devices for s in stages],
        "checkpoint_activations": [any(s.recompute) for s in stages],
        "resharding_stages": [
            len(set(zip(s.tensor, s.data, s.algorithm, strict=True))) > 1 for s in stages
        ],
        "num_ops_in_each_stage": [len(s.tensor) for s in stages],
        _LISTS["tensor"]: [list(s.tensor) for s in stages],
        _LISTS["data"]: [list(s.data) for s in stages],
        _LISTS["recompute"]: [list(map(int, s.recompute)) for s in stages],
        _LISTS["algorithm"]: [list(s.algorithm) for s in stages],
    }


def write_configuration(configuration: Configuration, path: Path) -> None:
    """Write a configuration in the form that Aceso's runtime reads."""
    write_atomic(path, json.dumps(configuration_to_dict(configuration), indent=4) + "\n")
