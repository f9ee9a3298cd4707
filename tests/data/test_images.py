"""Images as batches: files in a folder for each class, and arrays."""

import numpy as np
import pytest

from aliquot.core import InputError
from aliquot.data import Split, read_images

SIZE = 8


def arrays(folder, count=20, size=SIZE, dtype=np.uint8, labels=None):
    images = np.arange(count, dtype=dtype)[:, None, None, None] * np.ones(3, dtype)
    images = np.broadcast_to(images, (count, size, size, 3))
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", np.arange(count) % 4 if labels is None else labels)
    return folder


def files(folder, classes=("cat", "dog"), count=5, size=(20, 12)):
    from PIL import Image

    for number, name in enumerate(classes):
        (folder / name).mkdir()
        for k in range(count):
            image = Image.new("RGB", size, (number * 100, k * 10, 255))
            image.save(folder / name / f"{k}.png")
    return folder


def test_each_epoch_has_every_image_once_with_its_label(tmp_path):
    images = read_images(arrays(tmp_path), size=SIZE, batch=5, seed=3)
    seen = [images.batch_at(k) for k in range(8)]
    numbers = np.concatenate([(b["images"][:, 0, 0, 0] + 1) * 127.5 for b in seen])
    numbers = numbers.round().astype(int)
    assert (np.concatenate([b["labels"] for b in seen]) == numbers % 4).all()
    assert (np.sort(numbers.reshape(2, 20), axis=1) == np.arange(20)).all()
    assert (numbers[:20] != numbers[20:]).any()
    assert seen[0]["images"].shape == (5, SIZE, SIZE, 3) and seen[0]["labels"].dtype == np.int32


def test_processes_read_the_rows_of_one_batch(tmp_path):
    images = read_images(arrays(tmp_path), size=SIZE, batch=6)
    whole, part = images.batch_at(3), images.batch_at(3, slice(2, 4))
    assert (part["images"][2:4] == whole["images"][2:4]).all()
    assert (part["labels"] == whole["labels"]).all()


def test_parts_share_no_image_and_hold_every_class(tmp_path):
    images = read_images(arrays(tmp_path, 400, labels=np.arange(400) // 100), size=SIZE, batch=4)
    split = Split.read("3,1")
    train, validation = images.part(split, "train"), images.part(split, "validation")
    assert (train.num_windows, validation.num_windows) == (300, 100)
    assert not {*train.places} & {*validation.places}
    assert {*validation.labels[validation.places]} == {0, 1, 2, 3}


def test_npz_and_numbers_in_floating_point_stay_as_they_are(tmp_path):
    pixels = np.random.default_rng(0).normal(size=(6, SIZE, SIZE, 3)).astype(np.float32)
    np.savez(tmp_path / "all.npz", images=pixels, labels=np.arange(6))
    images = read_images(tmp_path / "all.npz", size=SIZE, batch=6)
    found = images.batch_at(0)
    assert (found["images"] == pixels[found["labels"]]).all()


def test_files_are_scaled_and_their_folders_are_classes(tmp_path):
    images = read_images(files(tmp_path), size=SIZE, batch=10)
    found = images.batch_at(0)
    assert found["images"].shape == (10, SIZE, SIZE, 3)
    red = (found["images"][:, 0, 0, 0] + 1) * 127.5
    assert (red.round() == found["labels"] * 100).all()
    assert {*found["labels"]} == {0, 1}


def refused(path, *parts, batch=2):
    with pytest.raises(InputError) as error:
        read_images(path, size=SIZE, batch=batch).batch_at(0)
    for part in parts:
        assert part in str(error.value)


def test_what_cannot_be_read_is_refused(tmp_path):
    refused(tmp_path / "none", "cannot be read", "images.npy")
    refused(tmp_path, "no images in its 0 folders")
    refused(arrays(tmp_path, size=4), "(20, 4, 4, 3)", "(20, 8, 8, 3)", "--set image_size")
    refused(arrays(tmp_path, dtype=np.int64), "images are of int64")
    refused(arrays(tmp_path, labels=np.ones(20)), "labels are of float64")
    refused(arrays(tmp_path, labels=np.ones(7, int)), "(20, 8, 8, 3) and labels (7,)")
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    refused(tmp_path / "a.npz", "no images and no labels", "but x")
    objects = np.array([{}], dtype=object)
    np.savez(tmp_path / "b.npz", images=objects, labels=objects)
    refused(tmp_path / "b.npz", "cannot be read")
    broken = tmp_path / "broken"
    (broken / "cat").mkdir(parents=True)
    (broken / "cat" / "1.png").write_bytes(b"no image")
    refused(broken, "1.png", "no image that can be read")
