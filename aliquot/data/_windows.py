"""Windows of tokens as batches. The number of a step decides its batch: it is the whole state."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import InputError

Batch = dict[str, NDArray[np.int32]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """Batches of windows of a row of tokens, reproducible from `seed` and the number of the step.

    The tokens are cut into windows one behind the other. In each epoch every window is used once,
    in an order drawn from the seed and the number of the epoch.

    A batch is `{"inputs", "targets"}`, int32 of shape `(batch, seq_len)`; each target is the token
    after its input. Step `i` gives the same batch whether or not earlier batches were requested, so
    training may resume anywhere, and several processes may each read their rows of it.

    With a `masked_share`, the model is to restore inputs instead: this share of the tokens is
    chosen at random and is the target; at all other positions the target is -1. In the inputs, 80 %
    of the chosen tokens are replaced by the mask, 10 % by a random token, and 10 % stay.

    With a `target_len`, a window is longer by so many tokens, and these are the targets: the
    continuation of the inputs.

    References: Devlin et al., "BERT", 2019, section 3.1, task 1. Raffel et al., "Exploring the
    Limits of Transfer Learning", 2020, section 3.3.1, prefix language modeling.

    Args:
        tokens: one row of ids; may be a `numpy.memmap`, of which only the windows are read.
        seq_len: Tokens per sequence.
        batch: Sequences per step.
        seed: Decides the order.
        shuffled: False to take the windows as they come, in every epoch alike.
        masked_share: Share of the tokens to be restored, up to 1; with 0 the next token is the
            target.
        mask: The id of the mask.
        vocabulary: Random tokens are below this number.
        known: So are all ids of the tokens, or a batch is refused; None for no such check.
        target_len: Tokens after a sequence that are its target; 0 for other targets.
        source: What messages call the tokens.
        tokenizer: Digest of what made the tokens, for `facts`.

    Raises:
        InputError: A size is out of range, or the tokens are fewer than one window.
    """

    tokens: NDArray[Any] = field(repr=False)
    seq_len: int
    batch: int
    seed: int = 0
    shuffled: bool = True
    masked_share: float = 0.0
    mask: int = 256
    vocabulary: int = 256
    known: int | None = None
    target_len: int = 0
    source: str = "the text"
    tokenizer: str = ""

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.batch < 1 or self.seed < 0:
            raise InputError(
                "Training data needs seq_len and batch of at least 1 and a seed of at least 0, "
                f"got seq_len={self.seq_len}, batch={self.batch}, seed={self.seed}."
            )
        if not 0 <= self.masked_share <= 1:
            raise InputError(f"masked_share must be between 0 and 1, got {self.masked_share}.")
        if self.target_len < 0 or (self.target_len and self.masked_share):
            raise InputError(
                f"target_len={self.target_len} must be at least 0, and 0 where tokens are masked "
                f"(masked_share={self.masked_share})."
            )
        if not self.num_windows:
            target = f" with target_len={self.target_len}" if self.target_len else ""
            raise InputError(
                f"{self.source} has {len(self.tokens)} tokens; a sequence of"
                f" seq_len={self.seq_len}{target} needs at least {self.window}. Give more text, or"
                " a smaller seq_len."
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a model computes in a step: the inputs and, with `target_len`, the
        targets.
        """
        return self.batch * (self.seq_len + self.target_len)

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the batches, as plain data, to be kept with checkpoints."""
        return {
            "source": self.source,
            "tokens": len(self.tokens),
            "tokenizer": self.tokenizer,
            "seq_len": self.seq_len,
            "batch": self.batch,
            "seed": self.seed,
        }

    @property
    def num_windows(self) -> int:
        """Windows in the tokens: examples of an epoch."""
        overlap = self.window - self._stride
        return max(0, len(self.tokens) - overlap) // self._stride

    @property
    def _stride(self) -> int:
        return self.seq_len + self.target_len

    @property
    def window(self) -> int:
        """Tokens of a window."""
        # The target of the last input is the first token of the next window.
        return self._stride + (not self.masked_share and not self.target_len)

    def batch_at(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of that step, counted from 0.

        Args:
            rows: the rows to read; all others of the whole batch are zero, or stand for nothing.

        Raises:
            InputError: an id is not below `known`.
        """
        wanted = rows or slice(None)
        examples = step * self.batch + np.arange(self.batch)
        windows = np.zeros((self.batch, self.window), np.int32)
        windows[wanted] = self.windows_at(examples[wanted])
        return self.as_batch(windows, step)

    def windows_at(self, examples: NDArray[Any]) -> NDArray[np.int32]:
        """The windows of examples, which are counted on from epoch to epoch.

        Raises:
            InputError: an id is not below `known`.
        """
        epochs, places = np.divmod(examples, self.num_windows)
        if self.shuffled:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                order = order_of_epoch(self.seed, int(epoch), self.num_windows)
                places[here] = order[places[here]]
        starts = places[:, None] * self._stride
        windows: NDArray[np.int32] = self.tokens[starts + np.arange(self.window)].astype(np.int32)
        ids = windows.view(np.uint32)
        if self.known is not None and windows.size and ids.max() >= self.known:
            row, column = np.argwhere(ids >= self.known)[0]
            place = places[row] * self._stride + column
            raise InputError(
                f"{self.source}: token {place} has id {self.tokens[place]}, and ids are below"
                f" {self.known}: the model would have no embedding for it. Make the tokens again."
            )
        return windows

    def as_batch(self, windows: NDArray[np.int32], step: int) -> Batch:
        """The inputs and targets in the windows of a whole batch, that of a step."""
        if self.masked_share:
            return self._masked(windows, np.random.default_rng((self.seed, step)))
        first = self.seq_len if self.target_len else 1
        return {"inputs": windows[:, : self.seq_len].copy(), "targets": windows[:, first:].copy()}

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Batches from step `start` on, without end."""
        step = start
        while True:
            yield self.batch_at(step)
            step += 1

    def _masked(self, tokens: NDArray[np.int32], random: np.random.Generator) -> Batch:
        is_chosen = random.random(tokens.shape) < self.masked_share
        fate = random.random(tokens.shape)
        others = random.integers(0, self.vocabulary, tokens.shape, np.int32)
        replaced = np.where(fate < 0.8, np.int32(self.mask), np.where(fate < 0.9, others, tokens))
        return {
            "inputs": np.where(is_chosen, replaced, tokens),
            "targets": np.where(is_chosen, tokens, np.int32(-1)),
        }


@functools.lru_cache(maxsize=4)
def order_of_epoch(seed: int, epoch: int, count: int) -> NDArray[Any]:
    """The order in which an epoch takes its examples."""
    order: NDArray[Any] = np.arange(count, dtype=np.uint32 if count < 2**32 else np.uint64)
    np.random.default_rng((seed, epoch)).shuffle(order)
    return order
