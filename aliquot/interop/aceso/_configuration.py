"""Aceso's configurations: stages, with the degrees, algorithm and recomputation of each
operator.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core import InputError, shortened, write_atomic

_MOST_SHOWN = 12
_LISTS = {
    "tensor": "model_parallel_size_of_each_op",
    "data": "data_parallel_size_of_each_op",
    "recompute": "recompute_ops",
    "algorithm": "algo_of_each_op",
}


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
        content = json.loads(path.read_text(), object_pairs_hook=unique)
    except RecursionError:
        raise InputError(
            f"{path} is no configuration of Aceso's: it has lists or objects too deep in each"
            " other."
        ) from None
    except OSError as error:
        raise InputError(f"The configuration {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise InputError(f"The configuration {path} is no JSON: {error}.") from None
    faults = repeated or _faults(content)
    if faults:
        raise InputError(f"{path} is no configuration of Aceso's:\n" + "\n".join(_shown(faults)))
    stages = tuple(
        StageConfiguration(
            num_devices=content["num_gpus"][k],
            tensor=tuple(content[_LISTS["tensor"]][k]),
            data=tuple(content[_LISTS["data"]][k]),
            algorithm=tuple(content[_LISTS["algorithm"]][k]),
            recompute=tuple(map(bool, content[_LISTS["recompute"]][k])),
        )
        for k in range(content["num_stages"])
    )
    known_keys = {
        "model_name",
        "model_size",
        "global_batch_size",
        "micro_batch_size",
        "num_stages",
        "num_gpus",
    }
    known_keys |= {
        "num_ops_in_each_stage",
        "checkpoint_activations",
        "resharding_stages",
        *_LISTS.values(),
    }
    return Configuration(
        model_name=str(content["model_name"]),
        model_size=str(content["model_size"]),
        global_batch=content["global_batch_size"],
        micro_batch=content["micro_batch_size"],
        stages=stages,
        settings={key: value for key, value in content.items() if key not in known_keys},
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


def _shown(faults: list[str]) -> list[str]:
    more = [f"  and {len(faults) - _MOST_SHOWN} more"] if len(faults) > _MOST_SHOWN else []
    return [f"  - {fault}" for fault in faults[:_MOST_SHOWN]] + more


def _faults(content: Any) -> list[str]:
    if not isinstance(content, dict):
        return ["it must be an object"]
    needed = (
        "model_name",
        "model_size",
        "global_batch_size",
        "micro_batch_size",
        "num_stages",
        "num_gpus",
    )
    missing = [
        key for key in (*needed, "num_ops_in_each_stage", *_LISTS.values()) if key not in content
    ]
    if missing:
        return [f"{key} is missing" for key in missing]
    numbers = ("global_batch_size", "micro_batch_size", "num_stages")
    faults = [
        f"{key} must be a positive number, got {content[key]!r}"
        for key in numbers
        if type(content[key]) is not int or content[key] < 1
    ]
    if faults:
        return faults
    count = content["num_stages"]
    for key in ("num_gpus", "num_ops_in_each_stage", *_LISTS.values()):
        if not isinstance(content[key], list) or len(content[key]) != count:
            faults.append(f"{key} must be a list of {count}, one for each stage")
    if faults:
        return faults
    for k in range(count):
        faults += _stage_faults(content, k)
    return faults


def _stage_faults(content: Mapping[str, Any], k: int) -> list[str]:
    devices, operators = content["num_gpus"][k], content["num_ops_in_each_stage"][k]
    if type(devices) is not int or type(operators) is not int or min(devices, operators) < 1:
        return [
            f"stage {k} needs at least one device and one operator, got {devices!r} and"
            f" {operators!r}"
        ]
    faults = []
    for key in _LISTS.values():
        entries = content[key][k]
        if not isinstance(entries, list) or len(entries) != operators:
            length = len(entries) if isinstance(entries, list) else repr(entries)
            faults.append(
                f"{key} of stage {k} has {length} entries, and the stage {operators} operators"
            )
        elif not all(type(x) in (int, bool) and x >= 0 for x in entries):
            faults.append(f"{key} of stage {k} must hold numbers of at least 0")
        elif key == _LISTS["recompute"] and not all(x in (0, 1) for x in entries):
            faults.append(f"{key} of stage {k} must hold 0 or 1")
    if not faults:
        degrees = zip(content[_LISTS["tensor"]][k], content[_LISTS["data"]][k], strict=True)
        wrong = [(i, t, d) for i, (t, d) in enumerate(degrees) if t * d != devices]
        faults += [
            f"operator {i} of stage {k} has tensor degree {t} times data degree {d}, and the stage"
            f" {devices} devices"
            for i, t, d in wrong[:3]
        ]
    return faults
