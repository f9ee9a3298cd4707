"""The interface of runners: one program on one mesh, or the stages of a pipeline."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding

from ..graph import Graph
from ..plans import ArrayInterface, Trace
from ._in_place import InPlace
from .compiled import Stats


class AbstractRunner(abc.ABC):
    """Runs a step on flat arrays: takes one for each input of the step as the user wrote it, and
    returns one for each result.

    Attributes:
        graph: that step, on its whole batch.
        in_place: the arrays that the next call may pass without checks; None if it checks all.
    """

    graph: Graph
    in_place: InPlace | None

    @property
    @abc.abstractmethod
    def meshes(self) -> tuple[Mesh, ...]:
        """The mesh of each stage; a single mesh if the plan is no pipeline."""

    @property
    @abc.abstractmethod
    def shardings(self) -> Mapping[str, NamedSharding]:
        """Sharding of each input, by path. Of an input that several stages read, it is the one on
        the first of these stages.

        An input in pieces on several stages has a path for each piece, such as `params.w[0:4]` and
        `params.w[4:8]`.
        """

    @property
    @abc.abstractmethod
    def interface(self) -> tuple[ArrayInterface, ...]:
        """The step's inputs."""

    @abc.abstractmethod
    def compile(self) -> None:
        """Compile all programs, unless they are compiled already. With several processes all must
        call it.
        """

    @abc.abstractmethod
    def run(
        self, leaves: Sequence[Any], *, keep: bool, unknown: Sequence[int] | None = None
    ) -> list[Any]:
        """Run one step. Compiles it if need be.

        Args:
            leaves: the arrays.
            keep: leave all arguments usable; otherwise state that the step replaces is donated.
            unknown: positions of the arrays that are not `in_place`; by default all.
        """

    @abc.abstractmethod
    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs, moved to the devices and shardings that the step needs."""

    @abc.abstractmethod
    def input_homes(self) -> list[tuple[NamedSharding, ...]]:
        """The shardings of each input on all stages that read it, the first stage's first."""

    @abc.abstractmethod
    def stats(self) -> Stats:
        """Memory, collectives and compile times, stage by stage. Compiles if need be."""

    @abc.abstractmethod
    def lower(self) -> Any:
        """The programs before the compiler's optimizations: a single one, or for a pipeline a dict
        by name.
        """

    @abc.abstractmethod
    def as_text(self) -> str:
        """The optimized programs, as the compiler prints them."""

    @abc.abstractmethod
    def trace(self, leaves: Sequence[Any], title: str) -> Trace:
        """Run one step program by program, each after the one before has ended, and record when
        each began and ended.
        """


def interface_of(graph: Graph) -> tuple[ArrayInterface, ...]:
    """A step's inputs in the form in which plans store them."""
    found = []
    for i in graph.inputs:
        v, role = graph.values[i.value], i.role.value
        found.append(
            ArrayInterface(
                path=i.path, shape=v.shape, dtype=v.dtype, role=role, memory=v.memory.value
            )
        )
    return tuple(found)
