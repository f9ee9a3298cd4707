"""Files of tokens: what they hold, and what is said of those that are not whole."""

import dataclasses
import json
import os

import numpy as np
import pytest

from aliquot.core import InputError
from aliquot.data import (
    TokenFile,
    Tokenizer,
    byte_tokenizer,
    documents,
    is_token_file,
    read_gpt2_tokenizer,
    read_text,
    read_tokenizer,
    text_files,
    write_tokens,
)


def counting(vocabulary):
    """A tokenizer whose ids are those of the bytes, spread over its vocabulary."""
    return Tokenizer(
        encode=lambda text: np.frombuffer(text, np.uint8) * np.uint32(vocabulary // 256),
        decode=lambda ids: bytes(k * 256 // vocabulary for k in ids),
        name="spread",
        sha256="0" * 64,
        vocabulary=vocabulary,
        end=vocabulary - 1,
    )


def test_tokens_come_back(tmp_path):
    path = tmp_path / "tokens.bin"
    write_tokens(path, [b"one", b"two"], byte_tokenizer())
    found = TokenFile.open(path)
    assert isinstance(found.tokens, np.memmap) and found.tokens.tobytes() == b"one\ntwo\n"
    assert (found.vocabulary, found.documents, found.tokenizer) == (256, 2, "bytes")
    assert is_token_file(path) and not is_token_file(__file__) and not is_token_file(tmp_path)
    header = json.loads(path.read_bytes().splitlines()[0])
    assert header["count"] == 8 and header["dtype"] == "uint8"
    assert len(header["tokenizer_sha256"]) == 64


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(256, "uint8"), (257, "uint16"), (2**16, "uint16"), (2**17, "uint32")]
)
def test_ids_take_as_few_bytes_as_they_need(tmp_path, vocabulary, dtype):
    found = write_tokens(tmp_path / "t", [bytes([0, 255])], counting(vocabulary))
    assert found.tokens.dtype == dtype
    assert found.tokens.tolist() == [0, 255 * (vocabulary // 256), vocabulary - 1]


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    def interrupted():
        yield b"one"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "t", interrupted(), byte_tokenizer())
    with pytest.raises(InputError, match="no tokens"):
        write_tokens(tmp_path / "t", [], byte_tokenizer())
    assert list(tmp_path.iterdir()) == []


def test_bad_files_are_refused_with_what_to_type(tmp_path):
    path = tmp_path / "tokens.bin"
    write_tokens(path, [b"some text"], byte_tokenizer())
    whole = path.read_bytes()
    line, rest = whole[:1024], whole[1024:]
    header = json.loads(line)

    def refused(content, *parts):
        path.write_bytes(content)
        with pytest.raises(InputError) as error:
            TokenFile.open(path)
        for part in (str(path), *parts):
            assert part in str(error.value)

    def with_header(**changes):
        return json.dumps(header | changes).encode().ljust(1023) + b"\n" + rest

    again = f"aliquot data TEXT... --out {path}"
    refused(whole[:-1], "cut short", "(1033 bytes)", "have 1034", again)
    refused(whole + b"x", "too long", again)
    refused(b"plain text", "is no file of tokens", again)
    refused(b"\xff\xfe\x00", "is no file of tokens", again)
    refused(b"", "is no file of tokens", again)
    refused(with_header(count=-1), "header", again)
    refused(with_header(dtype="float32"), "uint16", again)
    refused(with_header(version=2), "of version 2", "Update aliquot")
    refused(with_header(version=-1), "header", "version", again)
    refused(with_header(end=-9), "header", "end", again)
    refused(with_header(mask=256), "says mask 256, and ids are below 256", again)
    refused(with_header(vocabulary=116), "token 5 has id 116, and ids are below 116", again)
    refused(b"[" * 60_000, "is no file of tokens", again)
    with pytest.raises(InputError, match="No such file"):
        TokenFile.open(tmp_path / "missing")


def test_ids_that_a_vocabulary_does_not_have_are_not_written(tmp_path):
    odd = dataclasses.replace(
        counting(512), encode=lambda text: np.frombuffer(text, np.uint8) * np.uint32(5)
    )
    with pytest.raises(InputError, match=r"spread, document 2: token 1 has id 605, .* below 512"):
        write_tokens(tmp_path / "t", [b"abc", b"fyz"], odd)
    assert list(tmp_path.iterdir()) == []


def test_tokens_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    write_tokens(tmp_path / "t.bin", [b"two"], byte_tokenizer())
    assert text_files([tmp_path]) == ([tmp_path / "a.txt"], [tmp_path / "t.bin"])
    assert list(documents([tmp_path])) == [b"one"]
    with pytest.raises(InputError, match=r"t\.bin is a file of tokens and no text"):
        list(documents([tmp_path / "a.txt", tmp_path / "t.bin"]))
    with pytest.raises(InputError, match=r"t\.bin among the texts holds tokens"):
        read_text([tmp_path])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match=r"t\.bin hold tokens and no text"):
        list(documents([tmp_path]))


def test_pipes_that_nobody_may_write_to_are_refused_at_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not is_token_file(pipe)
    with pytest.raises(InputError, match="is a named pipe, for which nobody may ever write"):
        text_files([pipe])
    with pytest.raises(InputError, match="is a pipe or a device"):
        write_tokens(pipe, [b"one"], byte_tokenizer())
    with pytest.raises(InputError, match="is no file"):
        TokenFile.open(pipe)
    with pytest.raises(InputError, match="is no file"):
        read_tokenizer(pipe)
    # One that a shell has opened is read.
    reading, writing = os.pipe()
    os.write(writing, b"one")
    os.close(writing)
    assert list(documents([f"/dev/fd/{reading}"])) == [b"one"]
    os.close(reading)


def test_lines_of_json_are_documents(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one", "id": 1}\n\n{"text": "zwölf"}\n')
    assert list(documents([path])) == [b"one", "zwölf".encode()]
    (tmp_path / "plain.txt").write_text("three")
    assert len(list(documents([tmp_path]))) == 3
    with pytest.raises(InputError, match=r"line 1 .*under 'body'.*text, id.*--json-key"):
        list(documents([path], json_key="body"))
    path.write_text("{'text'}")
    with pytest.raises(InputError, match="line 1 is no JSON"):
        list(documents([path]))
    path.write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(InputError, match="line 1 is JSON that is nested too deeply"):
        list(documents([path]))


@pytest.fixture
def bpe(tmp_path):
    """The files of a small tokenizer of GPT-2's kind: one JSON file, and the pair."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(
        ["the cat sat on the mat, the cat"] * 3,
        vocab_size=270,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    made.save_model(str(tmp_path))
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_and_its_pair_of_files_give_the_same_ids(bpe, tmp_path):
    whole = read_tokenizer(bpe / "tokenizer.json")
    pair = read_gpt2_tokenizer(bpe / "vocab.json", bpe / "merges.txt")
    text = "the cat sat\n\non a mät".encode()
    assert whole.encode(text).tolist() == pair.encode(text).tolist()
    assert len(whole.encode(text)) < len(text)
    vocabulary = json.loads((bpe / "vocab.json").read_text())
    assert whole.vocabulary == pair.vocabulary == len(vocabulary)
    assert whole.end == pair.end == vocabulary["<|endoftext|>"]
    assert len({whole.sha256, pair.sha256, byte_tokenizer().sha256}) == 3
    found = write_tokens(tmp_path / "t", [text, text], pair)
    assert (found.tokens == pair.end).sum() == 2 and found.tokens.dtype == "uint16"


def test_files_that_are_no_tokenizer(bpe, tmp_path):
    with pytest.raises(InputError, match=r"no token '<end>'.*--end-of-text"):
        read_tokenizer(bpe / "tokenizer.json", end="<end>")
    empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    (tmp_path / "empty").write_text(json.dumps(empty))
    with pytest.raises(InputError, match="empty has an empty vocabulary"):
        read_tokenizer(tmp_path / "empty")
    (tmp_path / "odd").write_text("{}")
    with pytest.raises(InputError, match=r"not read as a tokenizer.*--vocab-file with --merge"):
        read_tokenizer(tmp_path / "odd")
    with pytest.raises(InputError, match=r"a cannot be read .*; .*b cannot be read"):
        read_gpt2_tokenizer(tmp_path / "a", tmp_path / "b")
