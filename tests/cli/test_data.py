"""`aliquot data`: texts to a file of tokens."""

import json
import os
import signal

from command_line import refused, run

import aliquot.data
from aliquot.data import TokenFile


def test_texts_become_a_file_of_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"body": "two"}\n{"body": "three"}\n')
    out = tmp_path / "tokens.bin"
    texts = (tmp_path / "a.txt", tmp_path / "b.jsonl", "--json-key", "body")
    found = run("data", *texts, "--out", out)
    assert found.exit_code == 0, found.output
    assert "14 tokens of 3 documents by bytes, 256 ids" in found.stdout
    assert TokenFile.open(out).tokens.tobytes() == b"one\ntwo\nthree\n"
    assert "4 tokens of 1 document by bytes" in run("data", texts[0], "--out", out).stdout
    answer = json.loads(run("data", *texts, "--out", out, "--json").stdout)
    assert (answer["tokens"], answer["documents"], answer["dtype"]) == (14, 3, "uint8")


def test_what_cannot_be_read_or_written(tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "tokens.bin"
    text.write_text("one")
    refused(run("data", tmp_path / "no", "--out", out), "cannot be read")
    refused(run("data", text, "--out", tmp_path), "is a folder")
    refused(run("data", text, "--out", out, "--vocab-file", text), "give both, or neither")
    pair = ("--vocab-file", text, "--merge-file", text)
    refused(run("data", text, "--out", out, *pair), "not read as a tokenizer")
    refused(run("data", text, "--out", out, *pair, "--tokenizer", text), "leave one out")
    refused(run("data", text, "--out", out, "--end-of-text", "<end>"), "bytes without a tokenizer")
    assert not out.exists()


def test_a_text_is_never_replaced_by_its_tokens(tmp_path):
    text, folder = tmp_path / "texts" / "a.txt", tmp_path / "texts"
    folder.mkdir()
    text.write_text("one")
    (tmp_path / "symlink").symlink_to(text)
    (tmp_path / "hardlink").hardlink_to(text)
    for given in (text, folder):
        for out in (text, tmp_path / "symlink", tmp_path / "hardlink"):
            refused(run("data", given, "--out", out), "is one of the files that are read", "lost")
    assert text.read_text() == "one"


def test_the_tokens_of_a_folder_in_it_are_no_text_the_second_time(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    out = tmp_path / "tokens.bin"
    for left_out in ("", f"note: left out, as they hold tokens and no text: {out}"):
        found = run("data", tmp_path, "--out", out)
        assert found.exit_code == 0 and left_out in found.stderr
        assert TokenFile.open(out).tokens.tobytes() == b"one\n"


def test_empty_files_of_a_folder_hold_no_document(tmp_path):
    """A package of Python has many of them."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "__init__.py").touch()
    (texts / "lines.jsonl").touch()
    refused(run("data", texts, "--out", tmp_path / "tokens.bin"), "texts is empty")
    (texts / "a.py").write_text("one")
    found = run("data", texts, "--out", tmp_path / "tokens.bin")
    assert "4 tokens of 1 document by bytes" in found.stdout


def test_pipes_are_refused_at_once(tmp_path):
    pipe, text = tmp_path / "pipe", tmp_path / "a.txt"
    os.mkfifo(pipe)
    text.write_text("one")
    refused(run("data", pipe, "--out", tmp_path / "t"), "is a named pipe")
    refused(run("data", text, "--out", pipe), "is a pipe or a device")


def test_sigterm_leaves_nothing_half_written(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one")

    def endless(*_, **__):
        yield b"one"
        assert len(list(tmp_path.iterdir())) == 2
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            yield b"more"

    monkeypatch.setattr(aliquot.data, "documents_of", endless)
    before = signal.getsignal(signal.SIGTERM)
    assert run("data", tmp_path / "a.txt", "--out", tmp_path / "t").exit_code == 143
    assert os.listdir(tmp_path) == ["a.txt"]
    assert signal.getsignal(signal.SIGTERM) is before
