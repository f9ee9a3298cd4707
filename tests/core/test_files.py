"""A file is whole or untouched."""

import os
import stat

import pytest

from aliquot.core import InputError, write_atomic


def test_writes_text_and_bytes(tmp_path):
    path = tmp_path / "plan.json"
    write_atomic(path, "grün")
    assert path.read_text(encoding="utf-8") == "grün"
    write_atomic(str(path), b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_an_interruption_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        write_atomic(tmp_path / "plan.json", "new")
    assert os.listdir(tmp_path) == []


def test_missing_folder_and_folder_in_the_way(tmp_path):
    with pytest.raises(InputError, match="no folder"):
        write_atomic(tmp_path / "absent" / "plan.json", "x")
    with pytest.raises(InputError, match="is a folder"):
        write_atomic(tmp_path, "x")


def test_others_may_read_as_the_umask_says(tmp_path):
    old = os.umask(0o022)
    try:
        write_atomic(tmp_path / "a", "x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_follows_a_link_and_keeps_it(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_devices_are_written_to_directly():
    write_atomic("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_pipe_without_a_path_of_its_own_is_written():
    # As `/dev/stdout` is before `| less`, and what a shell gives for `>(less)`.
    reader, writer = os.pipe()
    try:
        write_atomic(f"/dev/fd/{writer}", "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
        os.close(writer)
