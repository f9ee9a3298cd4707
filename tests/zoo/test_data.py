"""Bytes as training data."""

import itertools

import numpy as np
import pytest

from aliquot.core import InputError
from aliquot.zoo import BYTE_VOCABULARY, ByteData


def test_standard_library_is_found_and_deterministic():
    data = ByteData(seq_len=64, batch=4, seed=1)
    assert 1_000_000 < len(data.text) <= 8_000_000
    assert ByteData(seq_len=64, batch=4, seed=1).text == data.text
    assert b"def " in data.text
    assert data.text.decode("utf-8", errors="ignore").isprintable() is False


def test_batches_are_windows_shifted_by_one(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)))
    data = ByteData(paths=(file,), seq_len=16, batch=8, seed=3)
    for batch in itertools.islice(data.batches(), 5):
        assert batch["inputs"].shape == batch["targets"].shape == (8, 16)
        assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
        assert (batch["targets"] == batch["inputs"] + 1).all()
        assert batch["targets"].max() < BYTE_VOCABULARY


def test_masked_bytes_are_the_only_targets():
    data = ByteData(seq_len=512, batch=64, seed=3, masked_share=0.15)
    inputs, targets = (data.batch_at(2)[name] for name in ("inputs", "targets"))
    assert inputs.dtype == targets.dtype == np.int32
    plain = ByteData(seq_len=512, batch=64, seed=3).batch_at(2)["inputs"]
    chosen = targets >= 0
    assert (np.where(chosen, targets, inputs) == plain).all() and (targets[~chosen] == -1).all()
    assert chosen.mean() == pytest.approx(0.15, abs=0.01)
    assert (inputs[chosen] == BYTE_VOCABULARY).mean() == pytest.approx(0.8, abs=0.03)
    assert (inputs[chosen] == targets[chosen]).mean() == pytest.approx(0.1, abs=0.03)
    assert (data.batch_at(2)["inputs"] == inputs).all()


def test_targets_with_a_length_of_their_own_are_how_the_text_goes_on(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)))
    data = ByteData(paths=(file,), seq_len=16, batch=8, seed=3, target_len=4)
    assert data.tokens == 8 * 20
    for batch in itertools.islice(data.batches(), 5):
        assert (batch["inputs"].shape, batch["targets"].shape) == ((8, 16), (8, 4))
        assert (np.diff(np.hstack([batch["inputs"], batch["targets"]])) == 1).all()
    file.write_bytes(b"abcdef")
    batch = ByteData(paths=(file,), seq_len=4, batch=1, target_len=2).batch_at(0)
    assert bytes(batch["targets"][0].tolist()) == b"ef"
    with pytest.raises(InputError, match=r"seq_len=4 with target_len=3 needs at least 7"):
        ByteData(paths=(file,), seq_len=4, batch=1, target_len=3)
    with pytest.raises(InputError, match=r"target_len=2 must be.*masked_share=0\.5"):
        ByteData(paths=(file,), seq_len=4, batch=1, target_len=2, masked_share=0.5)


def test_any_step_can_be_asked_for(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)) * 5)
    data = ByteData(paths=(str(file),), seq_len=16, batch=2, seed=3)
    fourth = next(itertools.islice(data.batches(), 3, None))
    assert (data.batch_at(3)["inputs"] == fourth["inputs"]).all()
    assert (next(data.batches(start=3))["inputs"] == fourth["inputs"]).all()
    other = ByteData(paths=(file,), seq_len=16, batch=2, seed=4)
    assert not (other.batch_at(3)["inputs"] == fourth["inputs"]).all()


def test_shortest_text_gives_its_only_window(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"abcd")
    batch = ByteData(paths=(file,), seq_len=3, batch=1).batch_at(0)
    assert (
        bytes(batch["inputs"][0].tolist()) == b"abc"
        and bytes(batch["targets"][0].tolist()) == b"bcd"
    )
    with pytest.raises(InputError, match=r"text has 4 bytes; .*seq_len=4 needs at least 5"):
        ByteData(paths=(file,), seq_len=4, batch=1)


def test_folders_are_read_in_order_of_name(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b").write_bytes(b"second")
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "sub" / "c").write_bytes(b"third")
    assert ByteData(paths=(tmp_path,), seq_len=2, batch=1).text == b"first\nsecond\nthird"


def test_all_bad_paths_are_named(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError) as error:
        ByteData(
            paths=(tmp_path / "missing", tmp_path / "empty", tmp_path / "folder"),
            seq_len=2,
            batch=1,
        )
    for part in (
        "missing cannot be read (No such file or directory)",
        "empty is empty",
        "folder is empty",
    ):
        assert part in str(error.value)
    with pytest.raises(InputError, match="no path was given"):
        ByteData(paths=(), seq_len=2, batch=1)


def test_impossible_sizes():
    with pytest.raises(InputError, match=r"masked_share must be between 0 and 1, got 1\.5"):
        ByteData(seq_len=4, batch=1, masked_share=1.5)
    with pytest.raises(InputError, match="seq_len=0, batch=0, seed=-1"):
        ByteData(seq_len=0, batch=0, seed=-1)
