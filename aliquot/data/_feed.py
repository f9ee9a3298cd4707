"""The batches of any source, one after the other, and the position in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import InputError


class Feed:
    """Batches of a source, from a step on.

    A source is an object with `batch_at(step)`, for which the number of the step is the position;
    or an iterator with `get_state()` and `set_state(state)`, whose state is part of the position,
    such as `iter(...)` of a `grain.MapDataset`.

    >>> class Squares:
    ...     def batch_at(self, step):
    ...         return {"x": step**2}
    >>> feed = Feed(Squares(), step=3)
    >>> next(feed), next(feed), feed.position
    ({'x': 9}, {'x': 16}, {'step': 5})
    """

    def __init__(
        self,
        source: Any,
        *,
        step: int = 0,
        position: Mapping[str, Any] | None = None,
        rows: slice | None = None,
    ) -> None:
        """
        Args:
            source: see above.
            step: the number of the first batch. An iterator is taken as it stands.
            position: of an earlier feed, to go on from there, instead of `step`.
            rows: what this process needs of each batch (`Step.local_rows`), for sources whose
                `batch_at` takes `rows`; None for all.

        Raises:
            InputError: the source is neither, or the position is not one of it.
        """
        self._source, self._rows = source, rows
        self._is_numbered = hasattr(source, "batch_at")
        self._step = step
        if not self._is_numbered and not all(
            hasattr(source, name) for name in ("__next__", "get_state", "set_state")
        ):
            raise InputError(
                f"{type(source).__name__} is no source of batches: it needs batch_at(step), or must"
                " be an iterator with get_state() and set_state(state), so that training can"
                " resume where it stopped."
            )
        if position is not None:
            self._step = int(position["step"])
            if not self._is_numbered:
                if "iterator" not in position:
                    raise InputError(
                        f"{type(source).__name__} is an iterator, and the checkpoint was written"
                        " with a source that has batch_at(step): it does not say where the iterator"
                        " was."
                    )
                source.set_state(position["iterator"])

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        if not self._is_numbered:
            batch = next(self._source)
        elif self._rows is None:
            batch = self._source.batch_at(self._step)
        else:
            batch = self._source.batch_at(self._step, self._rows)
        self._step += 1
        return batch

    @property
    def step(self) -> int:
        """The number of the next batch."""
        return self._step

    @property
    def position(self) -> dict[str, Any]:
        """The position before the next batch, as plain data for a checkpoint."""
        if self._is_numbered:
            return {"step": self._step}
        return {"step": self._step, "iterator": self._source.get_state()}
