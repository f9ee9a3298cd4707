"""Tokens in the batches that a model of the zoo takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ..core import InputError
from ..data import Split, TokenFile, Windows, is_token_file, read_text, standard_library
from ._config import AbstractTextConfig
from ._t5_config import T5Config

if TYPE_CHECKING:
    from ._step import Workload

BYTE_VOCABULARY = 256
"""Number of token ids of text as bytes, not counting the mask."""

_MASKED_SHARE = 0.15


def tokens_of(paths: Sequence[str | Path] | None) -> TokenFile | NDArray[Any]:
    """The tokens in a file that `aliquot data` wrote, or the bytes of files and folders of text;
    None for the first 8 MB of the Python standard library's own `.py` files.

    Raises:
        InputError: a path is missing, unreadable or empty, or token files are among several paths.
    """
    if paths is None:
        return standard_library()
    written = [path for path in paths if is_token_file(path)]
    if written and len(paths) > 1:
        raise InputError(
            f"--data takes one file of tokens or any number of texts, and {written[0]} of"
            f" {len(paths)} paths is a file of tokens. Make one of all texts: aliquot data TEXT..."
            " --out tokens.bin"
        )
    return TokenFile.open(written[0]) if written else read_text(paths)


def text_for(
    workload: Workload,
    tokens: TokenFile | NDArray[Any],
    *,
    seed: int = 0,
    split: Split | None = None,
    part: str = "train",
) -> Windows:
    """Text in the batches that a workload takes: for BERT with 15 % of the tokens masked, for T5
    with the continuation as targets.

    Args:
        tokens: as from `tokens_of`.
        seed: decides the order of the windows, and what is masked.
        split: the parts of the text; None for all of it.
        part: "train", of which each epoch has another order, "validation" or "test".

    Raises:
        InputError: the model takes no text, its vocabulary is too small for the tokens, or the part
            is shorter than one sequence.
    """
    config = workload.config
    if not isinstance(config, AbstractTextConfig):
        raise InputError(
            f"{config.name} reads {config.examples}, and the data here are text. Train it from"
            f" Python on batches of your own ({', '.join(workload.batch)}): step ="
            " aliquot.parallelize(workload.train_step, plan)."
        )
    is_file = isinstance(tokens, TokenFile)
    vocabulary = tokens.vocabulary if isinstance(tokens, TokenFile) else BYTE_VOCABULARY
    known_mask = tokens.mask if isinstance(tokens, TokenFile) else None
    is_masked = config.family == "bert"
    mask = vocabulary if known_mask is None else known_mask
    needed = max(vocabulary, mask + 1) if is_masked else vocabulary
    if config.vocab_size < needed:
        with_mask = " with a mask" if is_masked else ""
        what = (
            f"{tokens.path} by tokenizer {tokens.tokenizer}"
            if isinstance(tokens, TokenFile)
            else "text as bytes"
        )
        raise InputError(
            f"{config.name} knows {config.vocab_size} tokens, and {what}{with_mask} has {needed}."
            f" Plan it with --set vocab_size={needed} or more"
            f"{', or give text of another tokenizer' if is_file else ''}."
        )
    row = tokens.tokens if isinstance(tokens, TokenFile) else tokens
    source = str(tokens.path) if isinstance(tokens, TokenFile) else "the text"
    if split is not None:
        first, last = split.bounds(len(row), part)
        source = f"the part of {source} for {part} (--split {split} of {len(row)} tokens)"
        row = row[first:last]
    return Windows(
        tokens=row,
        seq_len=config.seq_len,
        batch=workload.settings["global_batch"],
        seed=seed,
        shuffled=part == "train",
        masked_share=_MASKED_SHARE if is_masked else 0.0,
        mask=mask,
        vocabulary=vocabulary,
        known=vocabulary,
        target_len=config.target_len if isinstance(config, T5Config) else 0,
        source=source,
        tokenizer=tokens.tokenizer_sha256 if isinstance(tokens, TokenFile) else "bytes",
    )
