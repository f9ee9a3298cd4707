"""The interface of runners: one program on one mesh, or the stages of a pipeline."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding

from ..graph import Graph
from ..plans import ArrayInterface, Trace
from .compiled import Stats


class AbstractRunner(abc.ABC):
    """A step on flat arrays: one for each input of the step as the user wrote it, and one for each
    result.

    Attributes:
        graph: that step, on its whole batch.
    """

    graph: Graph

    @property
    @abc.abstractmethod
    def meshes(self) -> tuple[Mesh, ...]:
        """The devices of each stage; one mesh without a pipeline."""

    @property
    @abc.abstractmethod
    def shardings(self) -> Mapping[str, NamedSharding]:
        """Sharding of each input, by path; of an input that several stages read, that on the first
        of them.

        An input in pieces on several stages has a path for each piece, such as `params.w[0:4]` and
        `params.w[4:8]`.
        """

    @property
    @abc.abstractmethod
    def interface(self) -> tuple[ArrayInterface, ...]:
        """The step's inputs."""

    @abc.abstractmethod
    def compile(self) -> None:
        """Compile all programs, unless that was done. With several processes all must call it."""

    @abc.abstractmethod
    def run(self, leaves: Sequence[Any], *, keep: bool) -> list[Any]:
        """One step, compiled if need be.

        Args:
            keep: leave all arguments as they are; otherwise state that the step replaces is
                donated.
        """

    @abc.abstractmethod
    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs with the shardings that the step needs."""

    @abc.abstractmethod
    def input_shardings(self) -> list[NamedSharding]:
        """The sharding of each input; of one that lies on several stages, that on the first of
        them.
        """

    @abc.abstractmethod
    def stats(self) -> Stats:
        """Memory, collectives and compile times, stage by stage. Compiles if need be."""

    @abc.abstractmethod
    def lower(self) -> Any:
        """The programs before the compiler's optimizations: that of one program, or a dict of them
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
    """A step's inputs as plans write them."""
    return tuple(
        ArrayInterface(path=i.path, shape=v.shape, dtype=v.dtype, role=i.role.value)
        for i in graph.inputs
        for v in [graph.values[i.value]]
    )
