"""Windows of tokens as batches."""

import itertools

import numpy as np
import pytest

from aliquot.core import InputError
from aliquot.data import Windows, read_text, standard_library


def windows(count=256, **options):
    return Windows(tokens=np.arange(count), **({"seq_len": 16, "batch": 8, "seed": 3} | options))


def test_batches_are_windows_shifted_by_one():
    for batch in itertools.islice(windows().batches(), 5):
        assert batch["inputs"].shape == batch["targets"].shape == (8, 16)
        assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
        assert (batch["targets"] == batch["inputs"] + 1).all()


def test_each_epoch_has_every_window_once_in_an_order_of_its_own():
    data = windows(10 * 16 + 1, batch=4)
    assert data.num_windows == 10
    # Ten steps of four are four epochs of ten; the third step is in two of them.
    firsts = np.concatenate([data.batch_at(k)["inputs"][:, 0] for k in range(10)]).reshape(4, 10)
    assert (np.sort(firsts, axis=1) == np.arange(10) * 16).all()
    assert len({tuple(epoch) for epoch in firsts.tolist()}) == 4
    again = windows(10 * 16 + 1, batch=4, seed=4)
    assert (again.batch_at(0)["inputs"] != data.batch_at(0)["inputs"]).any()


def test_without_shuffling_windows_come_in_order():
    data = windows(10 * 16 + 1, batch=4, shuffled=False)
    assert data.batch_at(1)["inputs"][:, 0].tolist() == [64, 80, 96, 112]
    assert data.batch_at(2)["inputs"][:, 0].tolist() == [128, 144, 0, 16]


def test_masked_tokens_are_the_only_targets():
    tokens = np.random.default_rng(0).integers(0, 256, 2**17)
    options = {"tokens": tokens, "seq_len": 512, "batch": 64, "seed": 3}
    data = Windows(**options, masked_share=0.15)
    inputs, targets = (data.batch_at(2)[name] for name in ("inputs", "targets"))
    assert inputs.dtype == targets.dtype == np.int32
    chosen = targets >= 0
    whole = np.where(chosen, targets, inputs).reshape(-1)
    rows = tokens[: 256 * 512].reshape(256, 512)
    assert {*map(bytes, whole.reshape(64, 512))} <= {*map(bytes, rows.astype(np.int32))}
    assert (targets[~chosen] == -1).all()
    assert chosen.mean() == pytest.approx(0.15, abs=0.01)
    assert (inputs[chosen] == 256).mean() == pytest.approx(0.8, abs=0.03)
    assert (inputs[chosen] == targets[chosen]).mean() == pytest.approx(0.1, abs=0.03)
    assert (data.batch_at(2)["inputs"] == inputs).all()


def test_targets_with_a_length_of_their_own_are_how_the_text_goes_on():
    data = windows(target_len=4)
    assert data.tokens_per_step == 8 * 20
    for batch in itertools.islice(data.batches(), 5):
        assert (batch["inputs"].shape, batch["targets"].shape) == ((8, 16), (8, 4))
        assert (np.diff(np.hstack([batch["inputs"], batch["targets"]])) == 1).all()
    batch = windows(6, seq_len=4, batch=1, target_len=2).batch_at(0)
    assert batch["targets"][0].tolist() == [4, 5]
    with pytest.raises(InputError, match=r"seq_len=4 with target_len=3 needs at least 7"):
        windows(6, seq_len=4, target_len=3)
    with pytest.raises(InputError, match=r"target_len=2 must be.*masked_share=0\.5"):
        windows(target_len=2, masked_share=0.5)


def test_any_step_can_be_asked_for():
    data = windows(1000, batch=2)
    fourth = next(itertools.islice(data.batches(), 3, None))
    assert (data.batch_at(3)["inputs"] == fourth["inputs"]).all()
    assert (next(data.batches(start=3))["inputs"] == fourth["inputs"]).all()


@pytest.mark.parametrize("options", [{}, {"masked_share": 0.5}, {"target_len": 4}])
def test_only_the_rows_that_are_asked_for_are_read(options):
    class Watched(np.ndarray):
        read = 0

        def __getitem__(self, index):
            Watched.read += np.size(index)
            return np.asarray(super().__getitem__(index))

    data = windows(4096, **options)
    whole = data.batch_at(7)
    partial = Windows(
        tokens=np.arange(4096).view(Watched), seq_len=16, batch=8, seed=3, **options
    ).batch_at(7, slice(2, 5))
    assert Watched.read == 3 * (data.window)
    for name, array in whole.items():
        assert partial[name].shape == array.shape
        assert (partial[name][2:5] == array[2:5]).all()


def test_shortest_text_gives_its_only_window():
    batch = windows(4, seq_len=3, batch=1).batch_at(0)
    assert batch["inputs"][0].tolist() == [0, 1, 2] and batch["targets"][0].tolist() == [1, 2, 3]
    with pytest.raises(InputError, match=r"text has 4 tokens; .*seq_len=4 needs at least 5"):
        windows(4, seq_len=4, batch=1)


def test_impossible_sizes():
    with pytest.raises(InputError, match=r"masked_share must be between 0 and 1, got 1\.5"):
        windows(masked_share=1.5)
    with pytest.raises(InputError, match="seq_len=0, batch=0, seed=-1"):
        windows(seq_len=0, batch=0, seed=-1)


def test_standard_library_is_found_and_deterministic():
    text = standard_library()
    assert 1_000_000 < len(text) <= 8_000_000
    assert (standard_library() == text).all()
    assert b"def " in text.tobytes()


def test_folders_are_read_in_order_of_name(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b").write_bytes(b"second")
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "sub" / "c").write_bytes(b"third")
    assert read_text((tmp_path,)).tobytes() == b"first\nsecond\nthird"


def test_all_bad_paths_are_named(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError) as error:
        read_text((tmp_path / "missing", tmp_path / "empty", tmp_path / "folder"))
    for part in (
        "missing cannot be read (No such file or directory)",
        "empty is empty",
        "folder is empty",
    ):
        assert part in str(error.value)
    with pytest.raises(InputError, match="no path was given"):
        read_text(())


def test_ids_that_a_model_does_not_know_are_named_before_they_are_used():
    tokens = np.zeros(20, np.uint32)
    tokens[[7, 13]] = 50, 2**31 + 5
    windows = Windows(tokens=tokens, seq_len=4, batch=2, shuffled=False, known=50, source="t.bin")
    assert windows.batch_at(0, slice(0, 1))["inputs"].max() == 0
    with pytest.raises(InputError, match="t.bin: token 7 has id 50, and ids are below 50"):
        windows.batch_at(0)
    with pytest.raises(InputError, match=f"token 13 has id {2**31 + 5}"):
        windows.batch_at(1)
