"""Checkpoints that are not what was written, and folders into which another run writes."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from runtime.planned import parallel

import aliquot as aq
from aliquot.core import AliquotWarning, InputError

FORMAT_1 = Path(__file__).parent / "format_1.zip"


def tree_of(number):
    """Noise, which cannot be compressed: nothing but a checksum tells when it changes."""
    noise = np.random.default_rng(number)
    # Chunks of one size in every checkpoint.
    words = noise.integers(0, 2**32, (512, 256), np.uint32)
    return {"words": words, "w": noise.normal(size=(256, 512)).astype("f"), "b": np.zeros(5)}


def equal(found, wanted):
    return all(
        np.array_equal(np.asarray(mine), theirs)
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints 3 and 4, whose arrays are cut into rows over four devices."""
    folder = tmp_path_factory.mktemp("written")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    with aq.Checkpoints(folder) as checkpoints:
        for number in (3, 4):
            tree = tree_of(number)
            cut = jax.device_put([tree["words"], tree["w"]], rows)
            stored = {**tree, "words": cut[0], "w": cut[1]}
            checkpoints.save(None, stored, number, meta={"position": number})
    return folder


@pytest.fixture
def folder(written, tmp_path):
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy"


def refused(folder, *parts, into=None):
    """Checkpoint 4 is refused, and 3 is taken in its stead, with the reason."""
    with aq.Checkpoints(folder) as checkpoints:
        with pytest.raises(InputError) as error:
            checkpoints.restore(into, 4)
        restored = checkpoints.restore(into)
    assert restored.number == 3 and equal(restored.state, tree_of(3))
    (skipped,) = restored.skipped
    for part in ("checkpoint 4", *parts):
        assert part in str(error.value) and part in skipped
    assert "holds 3, 4: restore another one by its number" in str(error.value)


def values(folder, number=4):
    """The file in which the chunks of a checkpoint lie."""
    (path,) = (folder / str(number) / "state" / "ocdbt.process_0" / "d").iterdir()
    return path


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_chunks_that_are_not_what_was_written_are_never_restored(folder, mesh, capfd):
    path = values(folder)
    whole = path.read_bytes()
    assert len(whole) > 900_000
    columns = NamedSharding(mesh(2), PartitionSpec(None, "x"))
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=columns if x.ndim > 1 else None),
        tree_of(4),
    )
    draw = random.Random(0)
    for turn in range(12):
        place = draw.randrange(2**17, len(whole) - 2**17)
        if turn % 3:
            flip(path, place)
        else:
            path.write_bytes(whole[:place] + bytes(4096) + whole[place + 4096 :])
        # Far from the ends of the file only the chunks themselves tell.
        refused(folder, "cannot be read: w", into=target if turn % 2 else None)
        path.write_bytes(whole)
    restored = aq.Checkpoints(folder).restore(target)
    assert restored.number == 4 and restored.meta == {"position": 4} and not restored.notes
    assert equal(restored.state, tree_of(4))
    assert "Event loop is closed" not in capfd.readouterr().err


def test_only_what_is_read_is_checked(folder):
    size = values(folder).stat().st_size
    flip(values(folder), size // 4)
    arrays = []
    for name, wanted in tree_of(4).items():
        with aq.Checkpoints(folder) as checkpoints:
            try:
                found = checkpoints.restore({name: np.zeros_like(wanted)}, 4, partly=True)
            except InputError as error:
                assert f"cannot be read: {name}: " in str(error)
                arrays.append(name)
            else:
                assert equal(found.state[name], wanted)
    assert len(arrays) == 1


def test_the_arrays_of_another_checkpoint_are_refused(folder):
    shutil.rmtree(folder / "4" / "state")
    shutil.copytree(folder / "3" / "state", folder / "4" / "state")
    refused(folder, "is not complete, or damaged: 4/state/")
    shutil.rmtree(folder / "4" / "state")
    (folder / "4" / "state").symlink_to("../3/state")
    refused(folder, "is not complete, or damaged: 4/state/")


def test_chunks_of_another_checkpoint_in_the_same_places_are_refused(folder):
    values(folder).write_bytes(values(folder, 3).read_bytes())
    refused(folder, "ocdbt.process_0/d/")


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        ("meta/metadata", '"position": 4', '"position": 9'),
        ("state/_METADATA", '"skip_deserialize": false', '"skip_deserialize": true'),
        ("checksums.json", '{"meta', '{"mete'),
        ("checksums.json", "{", "["),
        ("checksums.json", '{"meta', "[" * 100_000),
    ],
)
def test_files_beside_the_arrays_are_checked_too(folder, part, old, new):
    path = folder / "4" / part
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    refused(folder, "is not complete, or damaged: 4/")
    path.unlink()
    refused(folder)


def test_a_folder_has_the_number_of_its_record(folder):
    shutil.rmtree(folder / "4")
    for name in ("4", str(10**30), "007", "٣"):
        shutil.copytree(folder / "3", folder / name)
    with aq.Checkpoints(folder) as checkpoints:
        assert checkpoints.numbers() == (3, 4, 10**30)
        restored = checkpoints.restore()
        assert restored.number == 3 and len(restored.skipped) == 2
        assert all("is checkpoint 3 by its own record" in line for line in restored.skipped)
        # They are out of the way of what the run writes next.
        checkpoints.save(None, tree_of(4), 4)
        assert checkpoints.numbers() == (3, 4)
    assert (folder / f"{10**30}.damaged" / "meta").is_dir()


@pytest.mark.parametrize("written_format", [0, -1])
def test_a_format_that_never_was_is_refused(folder, written_format):
    path = folder / "4" / "meta" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": written_format}))
    refused(folder, "has a damaged record: `format`")


def test_a_run_goes_on_after_a_damaged_checkpoint_and_keeps_what_it_writes(folder):
    flip(values(folder), values(folder).stat().st_size // 2)
    with aq.Checkpoints(folder, keep=1) as checkpoints:
        for name in ("4", "4"):
            shutil.copytree(folder / "4", folder / "7", dirs_exist_ok=True)
            assert checkpoints.restore().number == 3, name
        # 4 is replaced, and 7 is no longer the newest.
        checkpoints.save(None, tree_of(4), 4)
        assert checkpoints.numbers() == (4,)
        restored = checkpoints.restore()
        assert restored.number == 4 and restored.skipped == () and equal(restored.state, tree_of(4))
    assert (folder / "7.damaged").is_dir()


def test_a_step_that_restores_an_older_state_warns(tmp_path):
    def descend(params, batch):
        loss, gradient = jax.value_and_grad(lambda w: jax.numpy.mean((batch @ w) ** 2))(params)
        return params - gradient, loss

    params, batch = np.ones((4, 2), np.float32), np.ones((8, 4), np.float32)
    step = parallel(descend, params, batch, method=aq.DataParallel())
    for number in (1, 2):
        params, _ = step(params, batch)
        step.save(params, tmp_path, number=number)
    (tmp_path / "2" / "checksums.json").unlink()
    with pytest.warns(AliquotWarning, match=r"2/checksums.json is missing. It is skipped"):
        step.restore(tmp_path)


def test_checkpoints_without_checksums_are_restored_with_a_note(tmp_path):
    shutil.unpack_archive(FORMAT_1, tmp_path / "old")
    wanted = {"params": {"w": np.zeros((3, 4), np.float32)}, "key": jax.random.key(0)}
    restored = aq.Checkpoints(tmp_path / "old").restore(wanted)
    assert restored.state["params"]["w"].ravel().tolist() == list(range(12))
    assert jax.random.key_data(restored.state["key"]).tolist() == [0, 3]
    assert restored.meta == {"position": 7} and restored.skipped == ()
    (note,) = restored.notes
    assert "checkpoint 3" in note and "without checksums" in note
    # Whatever the store stumbles over is an error of ours.
    path = tmp_path / "old" / "3" / "state" / "_METADATA"
    path.write_text(path.read_text().replace('"key_metadata"', '"other"'))
    with pytest.raises(InputError, match="checkpoint 3 .* cannot be read"):
        aq.Checkpoints(tmp_path / "old").restore(wanted, 3)


HOLDS = """
import sys
from pathlib import Path
from aliquot.runtime.checkpoints import lock_folder
lock_folder(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_run_in_a_folder_is_told_who_writes_there(folder):
    before = sorted(os.listdir(folder))
    command = [sys.executable, "-c", HOLDS, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        (folder / "5.orbax-checkpoint-tmp").mkdir()
        with aq.Checkpoints(folder, on_error=print) as checkpoints:
            # Who reads disturbs nobody.
            assert checkpoints.restore(None).number == 4
            for ask in (
                checkpoints.claim,
                lambda: checkpoints.save(None, tree_of(5), 5),
                lambda: checkpoints.drop_later(3),
            ):
                with pytest.raises(InputError, match=f"another run .*: process {other.pid} on "):
                    ask()
        assert sorted(os.listdir(folder)) == [".writer", *before, "5.orbax-checkpoint-tmp"]
        other.kill()
        other.wait()
        # The lock of a process that is gone is none, and this process has it as often as it likes.
        with aq.Checkpoints(folder) as checkpoints, aq.Checkpoints(folder) as again:
            checkpoints.claim()
            again.claim()
            checkpoints.save(None, tree_of(5), 5)
            assert checkpoints.numbers() == again.numbers() == (3, 4, 5)
    assert sorted(os.listdir(folder)) == [*before, "5"]
