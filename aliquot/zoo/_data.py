"""Batches of text as bytes, for language models whose vocabulary begins with the 256 byte values.

By default the text is one that every machine with Python has: the sources of the standard library.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..core import InputError
from ._config import AbstractTextConfig
from ._t5_config import T5Config

if TYPE_CHECKING:
    from ._step import Workload

BYTE_VOCABULARY = 256
"""Number of token ids in the batches of `ByteData`, not counting the mask."""

_MASK = BYTE_VOCABULARY
_MASKED_SHARE = 0.15
_STDLIB_BYTES = 8_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteData:
    """Random windows of a text, reproducible from `seed` and the number of the step.

    A batch is `{"inputs", "targets"}`, int32 of shape `(batch, seq_len)`; each target is the byte
    after its input. Step `i` gives the same batch whether or not earlier batches were requested, so
    training may resume anywhere, and several processes may each take their rows of it.

    With a `masked_share`, the model is to restore inputs instead: this share of the bytes is chosen
    at random and is the target; at all other positions the target is -1. In the inputs, 80 % of the
    chosen bytes are replaced by 256, the mask, 10 % by a random byte, and 10 % stay as they are.

    With a `target_len`, a window is longer by so many bytes, and these are the targets: the
    continuation of the inputs.

    References: Devlin et al., "BERT", 2019, section 3.1, task 1. Raffel et al., "Exploring the
    Limits of Transfer Learning", 2020, section 3.3.1, prefix language modeling.

    Args:
        paths: Files, or folders whose files are all read in order of name; None for the first 8 MB
            of the Python standard library's own `.py` files.
        seq_len: Tokens per sequence.
        batch: Sequences per step.
        seed: Decides the windows.
        masked_share: Share of the bytes to be restored, up to 1; with 0 the next byte is the
            target.
        target_len: Tokens after a sequence that are its target; 0 for other targets.

    Raises:
        InputError: a path is missing, unreadable or empty (every such path is named), or the text
            is shorter than one sequence and the bytes that it needs after it.
    """

    paths: tuple[str | Path, ...] | None = None
    seq_len: int
    batch: int
    seed: int = 0
    masked_share: float = 0.0
    target_len: int = 0
    text: bytes = field(init=False, repr=False, compare=False)

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
                f"target_len={self.target_len} must be at least 0, and 0 where bytes are masked "
                f"(masked_share={self.masked_share})."
            )
        text = _standard_library() if self.paths is None else _read_all(self.paths)
        if len(text) < self._window:
            source = (
                "the standard library" if self.paths is None else ", ".join(map(str, self.paths))
            )
            target = f" with target_len={self.target_len}" if self.target_len else ""
            raise InputError(
                f"The text in {source} has {len(text)} bytes; a sequence of"
                f" seq_len={self.seq_len}{target} needs at least {self._window}. Give more text, or"
                " a smaller seq_len."
            )
        object.__setattr__(self, "text", text)

    @property
    def tokens(self) -> int:
        """Tokens that a model computes in a step: the inputs and, with `target_len`, the
        targets.
        """
        return self.batch * (self.seq_len + self.target_len)

    @property
    def _window(self) -> int:
        return self.seq_len + (self.target_len or 1)

    def batch_at(self, step: int) -> dict[str, NDArray[np.int32]]:
        """The batch of that step, counted from 0."""
        tokens = np.frombuffer(self.text, np.uint8)
        random = np.random.default_rng((self.seed, step))
        starts = random.integers(0, len(tokens) - self._window + 1, size=self.batch)
        windows = tokens[starts[:, None] + np.arange(self._window)].astype(np.int32)
        if self.masked_share:
            return _masked(windows[:, :-1], self.masked_share, random)
        first = self.seq_len if self.target_len else 1
        return {"inputs": windows[:, : self.seq_len].copy(), "targets": windows[:, first:].copy()}

    def batches(self, start: int = 0) -> Iterator[dict[str, NDArray[np.int32]]]:
        """Batches from step `start` on, without end."""
        step = start
        while True:
            yield self.batch_at(step)
            step += 1


def text_for(
    workload: Workload, *, paths: tuple[str | Path, ...] | None = None, seed: int = 0
) -> ByteData:
    """Text in the batches that a workload takes: for BERT with 15 % of the bytes masked, for T5
    with the continuation as targets.

    Raises:
        InputError: the model takes no text, or its vocabulary is too small for bytes; or as for
            `ByteData`.
    """
    config = workload.config
    if not isinstance(config, AbstractTextConfig):
        raise InputError(
            f"{config.name} reads {config.examples}, and the data here are text. Train it from"
            f" Python on batches of your own ({', '.join(workload.batch)}): step ="
            " aliquot.parallelize(workload.train_step, plan)."
        )
    is_masked = config.family == "bert"
    needed = BYTE_VOCABULARY + is_masked
    if config.vocab_size < needed:
        mask = " with a mask" if is_masked else ""
        raise InputError(
            f"{config.name} knows {config.vocab_size} tokens, and text as bytes{mask} has {needed}."
            f" Plan it with --set vocab_size={needed} or more."
        )
    return ByteData(
        paths=paths,
        seq_len=config.seq_len,
        batch=workload.settings["global_batch"],
        seed=seed,
        masked_share=_MASKED_SHARE if is_masked else 0.0,
        target_len=config.target_len if isinstance(config, T5Config) else 0,
    )


def _masked(
    tokens: NDArray[np.int32], share: float, random: np.random.Generator
) -> dict[str, NDArray[np.int32]]:
    is_chosen = random.random(tokens.shape) < share
    fate = random.random(tokens.shape)
    others = random.integers(0, BYTE_VOCABULARY, tokens.shape, np.int32)
    replaced = np.where(fate < 0.8, np.int32(_MASK), np.where(fate < 0.9, others, tokens))
    return {
        "inputs": np.where(is_chosen, replaced, tokens),
        "targets": np.where(is_chosen, tokens, np.int32(-1)),
    }


def _standard_library() -> bytes:
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    chunks: list[bytes] = []
    size_bytes = 0
    for path in sorted(folder.rglob("*.py"), key=lambda p: p.relative_to(folder).as_posix()):
        if size_bytes >= _STDLIB_BYTES:
            break
        if skipped.intersection(path.relative_to(folder).parts):
            continue
        try:
            chunks.append(path.read_bytes())
        except OSError:
            continue
        size_bytes += len(chunks[-1])
    if not chunks:
        raise InputError(
            f"No readable .py file in {folder}, where Python's own sources should be. Give files of"
            " text."
        )
    return b"\n".join(chunks)[:_STDLIB_BYTES]


def _read_all(paths: tuple[str | Path, ...]) -> bytes:
    chunks: list[bytes] = []
    faults: list[str] = [] if paths else ["no path was given"]
    for path in map(Path, paths):
        try:
            files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
            text = b"\n".join(file.read_bytes() for file in files)
        except OSError as error:
            faults.append(f"{path} cannot be read ({error.strerror or error})")
            continue
        if not text:
            faults.append(f"{path} is empty")
        chunks.append(text)
    if faults:
        raise InputError(
            f"Training data: {'; '.join(faults)}. Give files, or folders of files, that hold text."
        )
    return b"\n".join(chunks)
