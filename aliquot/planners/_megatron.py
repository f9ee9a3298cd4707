"""Layouts that experts write by hand: degrees of data, expert, context, tensor and pipeline
parallelism.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..cluster import Cluster, LogicalMesh
from ..core import InfeasibleError, InputError, divisors
from ..cost import MeshUse, Problem, price
from ._base import Decision, Progress, Task
from ._method import AbstractMethod
from ._pipelines import Pipelines
from ._pipeshard import PipeshardParallel
from ._race import Entry, Race
from ._search import AbstractFamily, Search
from .inter import EqualStages
from .intra import ATTENTION_WAYS, MegatronSplit, Space, fixed

ZERO_STAGES = {"": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""Words for what a layout splits over its data axis besides the batch, each with its stage of ZeRO.
"""

SEQUENCE = "sp"
"""The word for sequence parallelism between the products that a layout splits."""

# The most rows of a micro-batch that each rank takes.
_MOST_ROWS_OF_A_RANK = 16


def layers_word(stage_layers: Sequence[int]) -> str:
    """The word of a layout for the layers of its stages; several equal ones in a row are counted.

    >>> layers_word((5, 7, 7, 6)), layers_word((2,) * 5 + (1,))
    ('layers5.7x2.6', 'layers2x5.1')
    """
    runs = [(count, len([*same])) for count, same in itertools.groupby(stage_layers)]
    texts = [f"{count}x{times}" if times > 1 else f"{count}" for count, times in runs]
    return f"layers{'.'.join(texts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron(AbstractMethod):
    """Data, expert, context, tensor and pipeline parallelism of given degrees, with products
    computed as in Megatron-LM.

    Of two products in a row the first is split by columns and the second by rows, attention by
    heads, experts inside, embedding and output head by vocabulary; activations are all-reduced
    after every second product. Stages are equally deep, unless their layers are given, and run
    1f1b, or interleaved.

    Attributes:
        data: degree of data parallelism; None takes all devices that the other degrees leave.
        tensor: degree of tensor parallelism, over neighbouring devices of a host.
        sequence: whether residual streams, norms and what else lies between the products that are
            split over the tensor ranks is split there along the sequence (sequence parallelism):
            activations are then gathered before and reduce-scattered after these products, and no
            rank repeats another's norms.
        pipeline: number of stages; 1 makes one program.
        chunks: virtual stages of each stage of the pipeline (`vpp` in names): devices run so many
            chunks of layers each, interleaved, which divides the bubble and multiplies transfers.
            Where layers are too few, the last stages have one chunk less.
        stage_layers: layers of each stage, or of each chunk of one, in the order of the layers
            (`layers` in names); empty makes them equal.
        expert: degree of expert parallelism: these devices split the experts of an MoE model, and
            the batch everywhere else.
        context: degree of context parallelism: these devices split the sequence, from the lookup
            of tokens to the loss.
        attention: how attention is computed to a sequence that is split: "gather" collects the keys
            and values of all its parts, with "ring" they travel from device to device while scores
            are computed, and "ulysses" splits heads instead of the sequence there, with an
            all-to-all before and after. None takes whichever is fastest in each place.
        zero_stage: 0 keeps the whole state on every data and context rank, 1 and 2 split optimizer
            state (2 gradients too, in every micro-batch) and parameters of which the step reads
            casts to 16 bits, 3 all parameters.
        num_micro_batches: None means 1 for one program; for a pipeline, it tries micro-batches of
            1, 2, 4, ... rows on each data rank.
        layers: where a pipeline may be cut, see `PipeshardParallel`.

    References: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters
    using Megatron-LM", SC 2021.
    """

    data: int | None = None
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    chunks: int = 1
    stage_layers: tuple[int, ...] = ()
    expert: int = 1
    context: int = 1
    attention: str | None = None
    zero_stage: int = 0
    num_micro_batches: int | None = None
    layers: str | int | None = None

    def __post_init__(self) -> None:
        degrees = {
            "data": self.data,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "chunks": self.chunks,
            "expert": self.expert,
            "context": self.context,
        }
        faults = [f"{name}={n}" for name, n in degrees.items() if n is not None and n < 1]
        if faults:
            raise InputError(f"A layout has degrees of at least 1, got {', '.join(faults)}.")
        if self.zero_stage not in ZERO_STAGES.values():
            raise InputError(f"zero_stage={self.zero_stage}: pass 0, 1, 2 or 3.")
        if self.chunks > 1 and self.pipeline == 1:
            raise InputError(
                f"chunks={self.chunks} (vpp) interleaves the stages of a pipeline, and pipeline=1"
                " (pp) has none: give pp2 or more."
            )
        stages = self.pipeline * self.chunks
        if self.stage_layers and (len(self.stage_layers) != stages or min(self.stage_layers) < 1):
            raise InputError(
                f"stage_layers={self.stage_layers}: give at least 1 layer to each of the {stages}"
                f" stages of pipeline={self.pipeline} x chunks={self.chunks} (pp, vpp)."
            )
        if self.sequence and self.tensor == 1:
            raise InputError(
                "sequence=True (sp) splits the sequence over the devices that split products, and"
                " tensor=1 (tp) has none: give tp2 or more."
            )
        if self.attention is not None and (
            self.attention not in ATTENTION_WAYS or self.context == 1
        ):
            raise InputError(
                f"attention={self.attention!r}: a layout with a context degree of at least 2 takes"
                f" {', '.join(ATTENTION_WAYS)} or None."
            )

    @property
    def name(self) -> str:
        """The name as it is typed: `megatron:dp4,tp8,pp2`."""
        zero = next(word for word, stage in ZERO_STAGES.items() if stage == self.zero_stage)
        sequence = SEQUENCE if self.sequence else ""
        words = filter(None, (sequence, self.attention, zero))
        layers = [layers_word(self.stage_layers)] if self.stage_layers else []
        return f"megatron:{','.join([*self._words, *layers, *words])}"

    @property
    def _words(self) -> list[str]:
        """The degrees as they are typed."""
        degrees = {
            "dp": self.data,
            "ep": self.expert,
            "cp": self.context,
            "tp": self.tensor,
            "pp": self.pipeline,
            "vpp": self.chunks,
        }
        return [f"{word}{n}" for word, n in degrees.items() if n and (n > 1 or word == "dp")]

    def on(self, cluster: Cluster) -> Megatron:
        """The layout with every degree given. Raises `InputError` where they do not make up the
        cluster's devices.
        """
        others = self.expert * self.context * self.tensor * self.pipeline
        data = self.data or cluster.num_devices // others
        if data * others != cluster.num_devices:
            raise InputError(self._refusal(cluster))
        return replace(self, data=data)

    def decide(self, task: Task) -> Decision:
        laid_out = self.on(task.cluster)
        if laid_out.pipeline == 1:
            count = task.num_micro_batches or (self.num_micro_batches or 1) * task.own_turns
            decision = laid_out.solve(task.problem(count), task.progress)
            return replace(decision, combine=task.combine(count))
        # Report faults of the layout before anything is searched.
        rule, notes = laid_out._rule.for_step(task.problem(1))
        return replace(laid_out._fastest_pipeline(task, rule), notes=notes)

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        laid_out = self.on(problem.cluster)
        if laid_out.pipeline > 1:
            raise InputError(
                f"{laid_out.name} makes a pipeline, and one program was asked for. Leave pp out."
            )
        return laid_out._solved(problem, progress, laid_out.name)

    def _fastest_pipeline(self, task: Task, rule: MegatronSplit) -> Decision:
        """The pipeline with the requested number of micro-batches, or else the fastest:
        micro-batches start at one row on each data rank, and are doubled as long as that helps.
        """
        pipeline = PipeshardParallel(
            inter=EqualStages(
                data=self.data or 1,
                expert=self.expert,
                context=self.context,
                tensor=self.tensor,
                num_submeshes=self.pipeline,
                chunks=self.chunks,
                stage_layers=self.stage_layers,
                name=self.name,
            ),
            intra=rule,
            layers=self.layers,
        )
        counts = self._counts(task)
        if task.num_micro_batches is None and self.num_micro_batches is None and 1 not in counts:
            # The last resort of a step that does not decompose into micro-batches.
            counts = [*counts, 1]
        search = Search(task=task)
        layouts = _SmallestMicroBatchesFirst(task=task, method=pipeline, counts=counts)
        decision = search.run([layouts], self.name)
        if decision is None:
            raise search.refusals[-1][1]
        return decision

    def _counts(self, task: Task) -> list[int]:
        """Numbers of micro-batches to try. Raises `InputError` where the batch does not divide."""
        data = (self.data or 1) * self.expert
        asked = task.num_micro_batches or self.num_micro_batches
        rows = math.gcd(*task.graph.batch_sizes)
        if rows % (data * (asked or 1)):
            per = f" in each of {asked} micro-batches" if asked else ""
            over = f"dp{self.data or 1}" + (f" x ep{self.expert}" if self.expert > 1 else "")
            raise InputError(
                f"A batch of {rows} cannot be split over {over}{per}. Use a global batch that is"
                f" a multiple of {data * (asked or 1)}, fewer micro-batches, or a smaller data"
                " degree."
            )
        if asked or not rows:
            return [asked or 1]
        most = rows // data
        return [most // each for each in divisors(most, most=_MOST_ROWS_OF_A_RANK)]

    @property
    def _rule(self) -> MegatronSplit:
        # If gradients are reduced after the last micro-batch, stages 1 and 2 of ZeRO split the same
        # arrays.
        stage = 2 if self.zero_stage == 1 else self.zero_stage
        return MegatronSplit(
            data=self.data or 1,
            expert=self.expert,
            context=self.context,
            attention=self.attention,
            tensor=self.tensor,
            sequence=self.sequence,
            zero_stage=stage,
            gathers_once=stage == 2,
        )

    def _solved(self, problem: Problem, progress: Progress | None, name: str) -> Decision:
        rule, notes = self._rule.for_step(problem)
        race = Race(problem=problem, method=name, intra=rule, progress=progress)
        return replace(race.best(list(self._entries(problem, rule, name))), notes=notes)

    def _entries(self, problem: Problem, rule: MegatronSplit, name: str) -> Iterator[Entry]:
        names, sizes = zip(*rule.axes, strict=True)
        mesh = LogicalMesh(shape=sizes, axis_names=names, cluster=problem.cluster)
        data, context = (
            frozenset(names.index(name) for name in some if name in names)
            for some in (fixed.DATA_AXES, (fixed.CONTEXT,))
        )
        can_wait = (
            problem.num_micro_batches > 1
            and bool(data | context)
            and problem.runs_in_groups(math.prod(sizes[a] for a in data))
        )
        waiting = [data | context] if can_wait else []
        ways = fixed.ways_to_sum(
            rule, waiting, splits=self.zero_stage >= 2, repeats=problem.num_micro_batches
        )
        for axes, way in ways:
            use = MeshUse(
                mesh=mesh,
                data_axes=axes & data,
                context_axes=axes & context,
                gathers_once=way.gathers_once,
            )
            choices = way.choices(problem, names)
            priced = price(problem, use, repeats=problem.num_micro_batches, choices=choices)
            each = problem.num_micro_batches > 1 and not axes
            label = f"{name}, gradients summed in each micro-batch" if each else name
            space = Space.whole(label, priced)
            yield Entry(space=space, intra=way)

    def _refusal(self, cluster: Cluster) -> str:
        others = self.expert * self.context * self.tensor * self.pipeline
        given = self.data or 1
        product = " x ".join(w for w in self._words if not w.startswith("vpp")) or "dp1"
        mismatch = (
            f"{product} makes {given * others} devices, and {cluster.name} has"
            f" {cluster.num_devices}."
        )
        if cluster.num_devices % others == 0:
            return f"{mismatch} Use dp{cluster.num_devices // others}, or leave dp out."
        return (
            f"{mismatch} The product of the degrees ep, cp, tp and pp, {others}, must divide the"
            f" number of devices: use one of {', '.join(map(str, divisors(cluster.num_devices)))}."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _SmallestMicroBatchesFirst(AbstractFamily):
    """Pipelines of one layout. Larger micro-batches mean less overhead and a larger bubble, so the
    step time first falls and then rises: the first rise ends the search.

    Attributes:
        counts: numbers of micro-batches that are left.
        best: the best plan with the numbers before.
    """

    task: Task
    method: PipeshardParallel
    counts: Sequence[int]
    best: Decision | None = None

    def open(self, search: Search) -> Iterable[AbstractFamily]:
        last_refusal = search.refusals[-1][1] if search.refusals else None
        # A step may decompose into fewer micro-batches, or into a single one.
        is_open = search.best is None and not isinstance(last_refusal, InfeasibleError | InputError)
        if not self.counts or not (is_open or search.best is not self.best):
            return ()
        count, *left = self.counts
        pipelines = Pipelines(task=self.task, method=replace(self.method, num_micro_batches=count))
        return (pipelines, replace(self, counts=left, best=search.best))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel(AbstractMethod):
    """Tensor parallelism of a degree as in Megatron-LM, and data parallelism over the other
    devices.

    Attributes:
        degree: number of devices that share each weight, neighbours in a host if they fit there.
    """

    degree: int

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise InputError(
                f"degree={self.degree}: tensor parallelism has a degree of at least 1."
            )

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        return (
            Megatron(tensor=self.degree)
            .on(problem.cluster)
            ._solved(problem, progress, f"tp:{self.degree}")
        )
