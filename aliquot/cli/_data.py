"""`aliquot data`: from text to a file of tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..core import InputError, format_bytes, format_count, format_seconds
from ._groups import argument, option
from ._interrupts import leaving_at_sigterm
from ._options import Json, check_destination
from ._session import session

if TYPE_CHECKING:
    from ..data import Tokenizer

VocabFile = Annotated[Path | None, option("GPT-2's vocab.json; with --merge-file.", metavar="FILE")]
MergeFile = Annotated[Path | None, option("GPT-2's merges.txt; with --vocab-file.", metavar="FILE")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenizerOptions:
    """The tokenizer, and the texts of lines of JSON."""

    tokenizer: Path | None = option("JSON file of the tokenizers library.", metavar="FILE")
    vocab_file: VocabFile = None
    merge_file: MergeFile = None
    end_of_text: str | None = option(
        "Token behind each document; by default the tokenizer's own, such as <|endoftext|>.",
        metavar="TOKEN",
    )
    json_key: str = option("Key of the text in the lines of *.jsonl.", "text", metavar="KEY")


def data(
    *,
    texts: list[Path] = argument(
        "Files, or folders of files; each file is a document, and each line of *.jsonl.",
        metavar="TEXT...",
    ),
    out: Path = option("File to write the tokens to.", ...),
    by: _TokenizerOptions,
    as_json: Json = False,
) -> None:
    """Write the tokens of texts to one file, which training reads from the disk. Without a
    tokenizer, tokens are bytes.
    """
    with session(as_json) as say, leaving_at_sigterm():
        check_destination(out)
        from ..data import documents_of, listed, text_files, write_tokens

        chosen = chosen_tokenizer(by.tokenizer, by.vocab_file, by.merge_file, by.end_of_text)
        files, tokens = text_files(texts)
        for file in (*files, by.tokenizer, by.vocab_file, by.merge_file):
            if file is not None and out.exists() and out.samefile(file):
                raise InputError(
                    f"--out {out} is one of the files that are read ({file}), and its text would be"
                    " lost. Name another file."
                )
        if tokens:
            say.note(f"note: left out, as they hold tokens and no text: {listed(tokens)}")
        started = time.perf_counter()
        written = write_tokens(out, documents_of(files, json_key=by.json_key), chosen)
        seconds = time.perf_counter() - started
        count, dtype = len(written.tokens), written.tokens.dtype.name
        noun = "document" if written.documents == 1 else "documents"
        say.show(
            f"{out}: {format_count(count)} tokens of {format_count(written.documents)} {noun} by"
            f" {written.tokenizer}, {format_count(written.vocabulary)} ids,"
            f" {format_bytes(out.stat().st_size)} as {dtype}, in {format_seconds(seconds)}"
        )
        say.finish(
            {
                "file": str(out.resolve()),
                "tokens": count,
                "documents": written.documents,
                "vocabulary": written.vocabulary,
                "dtype": dtype,
                "tokenizer": written.tokenizer,
                "tokenizer_sha256": written.tokenizer_sha256,
            }
        )


def chosen_tokenizer(
    file: Path | None, vocab: Path | None, merges: Path | None, end: str | None = None
) -> Tokenizer:
    """The tokenizer that is asked for.

    Raises:
        InputError: the options do not go together; or as reading it raises.
    """
    from ..data import byte_tokenizer, read_gpt2_tokenizer, read_tokenizer

    if (vocab is None) != (merges is None):
        raise InputError("--vocab-file and --merge-file make one tokenizer: give both, or neither.")
    if file is not None and vocab is not None:
        raise InputError("--tokenizer and --vocab-file each name a tokenizer: leave one out.")
    if file is not None:
        return read_tokenizer(file, end=end)
    if vocab is not None and merges is not None:
        return read_gpt2_tokenizer(vocab, merges, end=end)
    if end is not None:
        raise InputError(
            f"--end-of-text {end!r}: tokens are bytes without a tokenizer, with a new line behind"
            " each document. Leave it out, or add --tokenizer."
        )
    return byte_tokenizer()
