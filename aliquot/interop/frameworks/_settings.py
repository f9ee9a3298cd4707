"""How a model is trained, in words that frameworks share: what a file of settings says, and what a
plan can be written as.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core import InputError
from ...planners import layers_word
from ._table import Table

ZERO_WORDS = {0: "", 1: "zero1", 2: "zero2", 3: "fsdp"}
"""The words of layouts for the stages of ZeRO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Degrees of parallelism, batch, recomputation and precision of a training run.

    Attributes:
        data: ranks with rows of their own, those that split experts included; None for all devices
            that the other degrees leave.
        expert: of these ranks, how many split the experts between them.
        tensor, sequence, context, attention, pipeline, chunks, zero_stage: as for
            `aliquot.Megatron`.
        shard_within: ranks that hold one copy of the state between them, with `zero_stage` 2 or 3;
            None for all.
        stage_layers: layers of each chunk of the pipeline, in the order of the layers; empty for
            equal ones.
        schedule: of the pipeline: "1f1b", "interleaved-1f1b", "gpipe" or "zero-bubble"; empty if
            there is none.
        micro_batch: sequences that a data rank computes at once; None if it is not said.
        global_batch: sequences of a step; None if it is not said.
        num_micro_batches: None if it is not said.
        recompute: as for `aliquot.zoo.build`.
        dtype: as for `aliquot.zoo.build`; empty if it is not said.
        seq_len: tokens of a sequence; None if it is not said.
    """

    data: int | None = None
    expert: int = 1
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    attention: str | None = None
    pipeline: int = 1
    chunks: int = 1
    zero_stage: int = 0
    shard_within: int | None = None
    stage_layers: tuple[int, ...] = ()
    schedule: str = ""
    micro_batch: int | None = None
    global_batch: int | None = None
    num_micro_batches: int | None = None
    recompute: str = "none"
    dtype: str = ""
    seq_len: int | None = None

    @property
    def model_ranks(self) -> int:
        """Devices that share the rows of one data rank."""
        return self.tensor * self.context * self.pipeline

    @property
    def name(self) -> str:
        """The layout as `--method` takes it, where it has a name."""
        if self.shard_within is not None and self.model_ranks * self.expert == 1:
            return f"{'zero2' if self.zero_stage == 2 else 'hsdp'}:{self.shard_within}"
        if self.model_ranks * self.expert == 1 and self.zero_stage in (0, 2, 3):
            return {0: "dp", 2: "zero2", 3: "fsdp"}[self.zero_stage]
        degrees = {
            "dp": None if self.data is None else self.data // self.expert,
            "ep": self.expert,
            "cp": self.context,
            "tp": self.tensor,
            "pp": self.pipeline,
            "vpp": self.chunks,
        }
        words = [f"{word}{n}" for word, n in degrees.items() if n and (n > 1 or word == "dp")]
        layers = layers_word(self.stage_layers) if self.stage_layers else ""
        sequence = "sp" if self.sequence else ""
        more = (layers, sequence, self.attention, ZERO_WORDS[self.zero_stage])
        return f"megatron:{','.join([*words, *filter(None, more)])}"

    def on(self, num_devices: int) -> Settings:
        """With the degree of data parallelism and the micro-batches that this many devices leave.

        Raises:
            InputError: the degrees do not make up that many devices, or the batch does not divide;
                all of that is listed.
        """
        faults = list(self.faults(num_devices))
        if faults:
            raise InputError(f"on {num_devices} devices: {'; '.join(faults)}.")
        data = self.data or num_devices // self.model_ranks
        micro_batch, batch, count = self.micro_batch, self.global_batch, self.num_micro_batches
        if count is None and batch and micro_batch:
            count = batch // (micro_batch * data)
        if batch is None and micro_batch:
            batch = micro_batch * data * (count or 1)
        if micro_batch is None and batch and count:
            micro_batch = batch // (count * data)
        return replace(
            self,
            data=data,
            micro_batch=micro_batch,
            global_batch=batch,
            num_micro_batches=count,
        )

    def faults(self, num_devices: int) -> Iterator[str]:
        """Why the degrees or the batch do not fit that many devices."""
        degrees = f"tp{self.tensor} x cp{self.context} x pp{self.pipeline}"
        if num_devices % self.model_ranks:
            yield f"{degrees} = {self.model_ranks} does not divide them"
            return
        data = self.data or num_devices // self.model_ranks
        if data * self.model_ranks != num_devices:
            yield (
                f"dp{data} x {degrees} = {data * self.model_ranks}; {num_devices} need"
                f" dp{num_devices // self.model_ranks}"
            )
        if data % self.expert:
            yield f"expert parallelism over {self.expert} does not divide the {data} data ranks"
        if self.shard_within and data % self.shard_within:
            yield f"groups of {self.shard_within} do not divide the {data} data ranks"
        rows = (self.micro_batch or 1) * data
        if self.global_batch and self.global_batch % rows:
            near = max(1, self.global_batch // rows) * rows
            yield (
                f"a batch of {self.global_batch} is not a multiple of micro-batch"
                f" {self.micro_batch or 1} x {data} data ranks: take {near} or {near + rows}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What files of one framework say.

    Attributes:
        table: whose settings they are.
        settings: the layout, batch, recomputation and precision.
        nothing_recomputed: what no recomputation is there, as `settings.recompute` says it.
        model: fields of the zoo's configuration that the files give; `like` names a model of the
            zoo whose other fields hold, and is absent if none is named.
        num_devices, num_hosts: of the whole run, where the files say it.
        said: name, value and place of each setting that was understood.
        assumed: what the files do not say, and what was taken for it.
        lost: what they say and a plan cannot, with what it means for memory or time.
        unknown: settings that the table of this version does not have.
        advice: what to change, and why.
    """

    table: Table
    settings: Settings
    nothing_recomputed: str = "none"
    model: Mapping[str, Any] = field(default_factory=dict)
    num_devices: int | None = None
    num_hosts: int | None = None
    said: tuple[tuple[str, Any, str], ...] = ()
    assumed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def framework(self) -> str:
        """The name of the framework."""
        return self.table.framework

    @property
    def offloads(self) -> bool:
        """Whether the host holds arrays of a run that stay on the devices in a plan."""
        return any(re.search("stays? on the devices", text) for text in self.lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A plan as settings of a framework.

    Attributes:
        text: what the file holds.
        file_name: what it is usually called.
        pairs: the same as names with values.
        lost: what the plan decides and the framework cannot be told.
        splits: where rules say the splits, the axes of the framework over which they split each
            dim of each parameter, by the plan's path. The storage of an array may be split along
            another dim than in the plan; `aliquot.ManualParallel` plans with these.
        left_open: what the file leaves to the script, by the names of `aliquot.read`.
    """

    framework: str
    version: str
    text: str
    file_name: str
    pairs: tuple[tuple[str, Any], ...] = ()
    lost: tuple[str, ...] = ()
    splits: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    left_open: Mapping[str, Any] = field(default_factory=dict)


def even_layers(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each of so many chunks, as even as they can be; the first have more.

    >>> even_layers(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(num_layers // chunks + (i < num_layers % chunks) for i in range(chunks))


def is_even(stage_layers: Sequence[int]) -> bool:
    """Whether all chunks have equally many layers."""
    return len(set(stage_layers)) <= 1


def ceil_to(value: int, multiple: int) -> int:
    """The next multiple that is no smaller."""
    return math.ceil(value / multiple) * multiple
