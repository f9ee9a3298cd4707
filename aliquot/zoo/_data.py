"""Tokens and images in the batches that a model of the zoo takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy.typing import NDArray

from ..core import InputError
from ..data import (
    Images,
    Mixture,
    Split,
    TokenFile,
    Windows,
    is_indexed,
    is_token_file,
    open_indexed,
    read_images,
    read_text,
    standard_library,
)
from ._config import AbstractTextConfig
from ._image_config import WideResNetConfig
from ._t5_config import T5Config

if TYPE_CHECKING:
    from ._step import Workload

BYTE_VOCABULARY = 256
"""Number of token ids of text as bytes, not counting the mask."""

_MASKED_SHARE = 0.15


Text: TypeAlias = TokenFile | NDArray[Any]
"""Tokens: of a file, or bytes."""

_WEIGHTED = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?):(.+)", re.DOTALL)


def tokens_of(paths: Sequence[str | Path] | None) -> Text | tuple[tuple[float, Text], ...]:
    """The tokens in a file that `aliquot data` wrote, in indexed data of Megatron-LM, or the bytes
    of files and folders of text; None for the first 8 MB of the Python standard library's own
    `.py` files.

    Several files of tokens, and paths with weights such as `0.3:web.bin`, are a mixture: for each
    its weight and its tokens. Files without weights weigh as much as they have tokens.

    Raises:
        InputError: a path is missing, unreadable or empty, some paths have weights and others none,
            or text is among several files of tokens.
    """
    if paths is None:
        return standard_library()
    weights: list[float | None] = []
    plain: list[Path] = []
    for path in map(str, paths):
        match = None if Path(path).exists() else _WEIGHTED.fullmatch(path)
        weights.append(float(match[1]) if match else None)
        plain.append(Path(match[2] if match else path))
    without = [str(path) for path, weight in zip(plain, weights, strict=True) if weight is None]
    if without and len(without) < len(plain):
        raise InputError(
            f"--data has weights for some paths and none for {', '.join(without)}. Write"
            " WEIGHT:PATH for each, or for none."
        )
    written = [path for path in plain if is_token_file(path) or is_indexed(path)]
    if without and not written:
        return read_text(plain)
    if without and len(written) < len(plain):
        raise InputError(
            f"--data takes files of tokens or texts, and {written[0]} of {len(plain)} paths is a"
            " file of tokens. Make tokens of the texts: aliquot data TEXT... --out tokens.bin"
        )
    texts = [
        TokenFile.open(path)
        if is_token_file(path)
        else open_indexed(path)
        if is_indexed(path)
        else read_text([path])
        for path in plain
    ]
    if len(texts) == 1:
        return texts[0]
    return tuple(
        (float(len(_ids(text))) if weight is None else weight, text)
        for weight, text in zip(weights, texts, strict=True)
    )


def text_for(
    workload: Workload,
    tokens: Text | Sequence[tuple[float, Text]],
    *,
    seed: int = 0,
    split: Split | None = None,
    part: str = "train",
) -> Windows | Mixture:
    """Text in the batches that a workload takes: for BERT with 15 % of the tokens masked, for T5
    with the continuation as targets.

    Args:
        tokens: as from `tokens_of`.
        seed: decides the order of the windows, and what is masked.
        split: the parts of each text; None for all of it.
        part: "train", of which each epoch has another order, "validation" or "test".

    Raises:
        InputError: the model takes no text, its vocabulary is too small for the tokens, texts of a
            mixture are of several tokenizers, or a part is shorter than one sequence.
    """
    config = workload.config
    if not isinstance(config, AbstractTextConfig):
        has_images = isinstance(config, WideResNetConfig)
        raise InputError(
            f"{config.name} reads {config.examples}, and the data here are text."
            f" {'Give it aliquot.zoo.images_for, or train' if has_images else 'Train'} it from"
            f" Python on batches of your own ({', '.join(workload.batch)}): step ="
            " aliquot.parallelize(workload.train_step, plan)."
        )
    mixed = tokens if isinstance(tokens, Sequence) else ((1.0, tokens),)
    kinds = dict.fromkeys(_tokenizer(text) for _, text in mixed)
    if len(kinds) > 1:
        raise InputError(
            "texts of a mixture have several tokenizers, whose ids mean different tokens:"
            f" {', '.join(name or 'one that Megatron-LM does not name' for name, _ in kinds)}. Make"
            " the tokens of all with one."
        )
    is_masked = config.family == "bert"
    vocabulary = max(_vocabulary(text) for _, text in mixed)
    known_mask = next((t.mask for _, t in mixed if isinstance(t, TokenFile)), None)
    mask = vocabulary if known_mask is None else known_mask
    texts, faults = [], []
    for _, text in mixed:
        needed = max(_vocabulary(text), mask + 1) if is_masked else _vocabulary(text)
        if config.vocab_size < needed:
            faults.append(_too_small(config, text, needed, is_masked))
            continue
        row = _ids(text)
        source = str(text.path) if isinstance(text, TokenFile) else "the text"
        if split is not None:
            first, last = split.bounds(len(row), part)
            source = f"the part of {source} for {part} (--split {split} of {len(row)} tokens)"
            row = row[first:last]
        # Where nobody says how many ids there are, the model decides.
        is_said = not isinstance(text, TokenFile) or bool(text.tokenizer_sha256)
        try:
            made = Windows(
                tokens=row,
                seq_len=config.seq_len,
                batch=workload.settings["global_batch"],
                seed=seed,
                shuffled=part == "train",
                masked_share=_MASKED_SHARE if is_masked else 0.0,
                mask=mask,
                vocabulary=vocabulary,
                known=_vocabulary(text) if is_said else config.vocab_size,
                target_len=config.target_len if isinstance(config, T5Config) else 0,
                source=source,
                tokenizer=_tokenizer(text)[1],
            )
        except InputError as error:
            faults.append(str(error))
            continue
        texts.append(made)
    if faults:
        raise InputError("\n  ".join(faults))
    if len(texts) == 1:
        return texts[0]
    return Mixture(texts=tuple(texts), weights=tuple(weight for weight, _ in mixed))


def images_for(
    workload: Workload,
    path: str | Path,
    *,
    seed: int = 0,
    split: Split | None = None,
    part: str = "train",
) -> Images:
    """Images in the batches that a workload takes.

    Args:
        path: as `aliquot.data.read_images` takes it.
        seed: decides the order.
        split: the parts of the images; None for all of them.
        part: "train", of which each epoch has another order, "validation" or "test".

    Raises:
        InputError: the model takes no images, it knows fewer classes than there are, or as
            `read_images` raises.
    """
    config = workload.config
    if not isinstance(config, WideResNetConfig):
        raise InputError(f"{config.name} reads {config.examples}, and the data here are images.")
    batch = workload.settings["global_batch"]
    images = read_images(path, size=config.image_size, batch=batch, seed=seed)
    least, most = int(images.labels.min()), int(images.labels.max())
    if least < 0 or most >= config.num_classes:
        wrong = least if least < 0 else most
        raise InputError(
            f"{path} has an image of class {wrong}, and {config.name} knows {config.num_classes},"
            f" counted from 0. Plan it with --set num_classes={most + 1} or more."
        )
    images = replace(images, dtype=workload.batch["images"].dtype)
    return images if split is None else images.part(split, part)


def _ids(text: Text) -> NDArray[Any]:
    return text.tokens if isinstance(text, TokenFile) else text


def _vocabulary(text: Text) -> int:
    return text.vocabulary if isinstance(text, TokenFile) else BYTE_VOCABULARY


def _tokenizer(text: Text) -> tuple[str, str]:
    """The name of the tokenizer and its digest."""
    if isinstance(text, TokenFile):
        return text.tokenizer, text.tokenizer_sha256
    return "bytes", "bytes"


def _too_small(config: AbstractTextConfig, text: Text, needed: int, is_masked: bool) -> str:
    with_mask = " with a mask" if is_masked else ""
    if not isinstance(text, TokenFile):
        what = f"text as bytes{with_mask} has"
    elif text.tokenizer_sha256:
        what = f"{text.path} by tokenizer {text.tokenizer}{with_mask} has"
    else:
        what = f"{text.path} (Megatron-LM's, {text.tokens.dtype.name}){with_mask} needs at least"
    return (
        f"{config.name} knows {config.vocab_size} tokens, and {what} {needed}. Plan it with --set"
        f" vocab_size={needed} or more"
        f"{', or give text of another tokenizer' if isinstance(text, TokenFile) else ''}."
    )
