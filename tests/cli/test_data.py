"""`aliquot data`: texts to a file of tokens."""

import json

from command_line import refused, run

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
