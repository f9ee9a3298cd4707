"""Batches of several texts, each with its share of the examples."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import InputError, listing
from ._windows import Batch, Windows

# Shares are exact to one of so many examples.
_CYCLE = 2**16
_ALIKE = ("seq_len", "batch", "masked_share", "mask", "target_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Batches whose examples come from several texts, in given shares.

    The examples of a text are spread evenly over those of the mixture. Each text is used in an
    order of its own and begins its next epoch when it is used up, whatever the others do. As with
    `Windows`, the number of a step alone decides its batch.

    >>> texts = [Windows(tokens=np.full(99, k), seq_len=4, batch=8) for k in (1, 2)]
    >>> Mixture(texts=tuple(texts), weights=(3, 1)).batch_at(0)["inputs"][:, 0]
    array([1, 1, 2, 1, 1, 1, 2, 1], dtype=int32)

    Args:
        texts: alike in all but their tokens.
        weights: the share of each, of which only the ratios count.

    Raises:
        InputError: everything that is wrong with them.
    """

    texts: tuple[Windows, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        faults = []
        if not self.texts or len(self.texts) != len(self.weights):
            faults.append(f"there are {len(self.texts)} texts and {len(self.weights)} weights")
        if not all(0 < weight < float("inf") for weight in self.weights):
            faults.append(f"weights must be positive, got {self.weights}")
        for name in _ALIKE:
            found = dict.fromkeys(getattr(text, name) for text in self.texts)
            if len(found) > 1:
                faults.append(f"texts differ in {name}: {', '.join(map(str, found))}")
        if faults:
            raise InputError(listing("These texts make no mixture", faults))

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return self.texts[0].batch

    @property
    def tokens_per_step(self) -> int:
        """As of `Windows`."""
        return self.texts[0].tokens_per_step

    @property
    def num_windows(self) -> int:
        """Windows in all texts together."""
        return sum(text.num_windows for text in self.texts)

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the batches, as plain data, to be kept with checkpoints."""
        parts = [text.facts for text in self.texts]
        total = sum(self.weights)
        return parts[0] | {
            "source": ", ".join(
                f"{weight / total:.4g} of {part['source']}"
                for weight, part in zip(self.weights, parts, strict=True)
            ),
            "tokens": sum(part["tokens"] for part in parts),
        }

    def batch_at(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of that step, counted from 0.

        Args:
            rows: the rows to read; all others of the whole batch are zero, or stand for nothing.

        Raises:
            InputError: as `Windows.batch_at` raises.
        """
        first = self.texts[0]
        text_of, rank, counts = _cycle(self.weights)
        examples = (step * self.batch + np.arange(self.batch))[rows or slice(None)]
        cycles, places = np.divmod(examples, len(text_of))
        chosen = text_of[places]
        own = cycles * counts[chosen] + rank[places]
        windows = np.zeros((len(examples), first.window), np.int32)
        for number, text in enumerate(self.texts):
            if (here := chosen == number).any():
                windows[here] = text.windows_at(own[here])
        whole = np.zeros((self.batch, first.window), np.int32)
        whole[rows or slice(None)] = windows
        return first.as_batch(whole, step)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Batches from step `start` on, without end."""
        step = start
        while True:
            yield self.batch_at(step)
            step += 1


@functools.lru_cache(maxsize=4)
def _cycle(weights: tuple[float, ...]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The text of each example of a cycle, its number among the examples of that text, and how many
    of each text are in a cycle.
    """
    exact = np.asarray(weights) / sum(weights) * _CYCLE
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    # Those that lost most by rounding get the rest.
    for number in np.argsort(counts - exact, kind="stable")[: max(0, _CYCLE - counts.sum())]:
        counts[number] += 1
    moments = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    order = np.argsort(moments, kind="stable")
    text_of = np.repeat(np.arange(len(counts)), counts)[order]
    rank = np.concatenate([np.arange(count) for count in counts])[order]
    return text_of, rank, counts
