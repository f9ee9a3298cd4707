"""Images with the numbers of their classes as batches: files in a folder for each class, or arrays.

Files of images are decoded by Pillow, which is needed for them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import InputError, counted
from ._split import Split
from ._windows import order_of_epoch

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm")
_KINDS = (
    "Give a folder that has a folder of images for each class, a folder with images.npy and"
    " labels.npy, or an .npz file with images and labels."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Images:
    """Batches of images, reproducible from `seed` and the number of the step.

    A batch is `{"images", "labels"}`: floating point numbers of shape `(batch, height, width, 3)`,
    and int32 of shape `(batch,)`. Numbers of 8 bits become -1 to 1; others stay as they are. In
    each epoch every image is used once, in an order drawn from the seed and the number of the
    epoch.

    Args:
        pixels: the images at given places of `labels`, an array of shape `(n, height, width, 3)`.
        labels: the class of each image, shape `(count,)`.
        places: the images that are used, by their numbers.
        batch: images per step.
        dtype: of the images of a batch.
        seed: decides the order.
        shuffled: False to take the images as they come, in every epoch alike.
        source: what messages call the images.
    """

    pixels: Callable[[NDArray[Any]], NDArray[Any]] = field(repr=False)
    labels: NDArray[Any] = field(repr=False)
    places: NDArray[Any] = field(repr=False)
    batch: int
    dtype: Any = np.dtype(np.float32)
    seed: int = 0
    shuffled: bool = True
    source: str = "the images"

    def __post_init__(self) -> None:
        if not len(self.places):
            raise InputError(f"{self.source} has no image. Give more images, or another split.")

    @property
    def tokens_per_step(self) -> int:
        """0: images have no tokens."""
        return 0

    @property
    def num_windows(self) -> int:
        """Examples of an epoch."""
        return len(self.places)

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the batches, as plain data, to be kept with checkpoints."""
        return {
            "source": self.source,
            "images": len(self.places),
            "batch": self.batch,
            "seed": self.seed,
        }

    def part(self, split: Split, part: str) -> Images:
        """The images of a part. Files stand in order of their classes, so parts are drawn, always
        alike.
        """
        first, last = split.bounds(len(self.labels), part)
        drawn = np.random.default_rng(0).permutation(len(self.labels))
        return replace(
            self,
            places=drawn[first:last],
            shuffled=part == "train",
            source=f"the part of {self.source} for {part} (--split {split} of {len(self.labels)}"
            " images)",
        )

    def batch_at(self, step: int, rows: slice | None = None) -> dict[str, NDArray[Any]]:
        """The batch of that step, counted from 0.

        Args:
            rows: the rows to read; all others of the whole batch are zero.

        Raises:
            InputError: a file cannot be decoded.
        """
        wanted = rows or slice(None)
        epochs, ranks = np.divmod(step * self.batch + np.arange(self.batch), len(self.places))
        if self.shuffled:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                ranks[here] = order_of_epoch(self.seed, int(epoch), len(self.places))[ranks[here]]
        places = self.places[ranks]
        pixels = self.pixels(places[wanted])
        if pixels.dtype == np.uint8:
            pixels = pixels.astype(np.float32) / 127.5 - 1
        images = np.zeros((self.batch, *pixels.shape[1:]), self.dtype)
        images[wanted] = pixels
        return {"images": images, "labels": self.labels[places].astype(np.int32)}

    def batches(self, start: int = 0) -> Iterator[dict[str, NDArray[Any]]]:
        """Batches from step `start` on, without end."""
        step = start
        while True:
            yield self.batch_at(step)
            step += 1


def read_images(path: str | Path, *, size: int, batch: int, seed: int = 0) -> Images:
    """The images of a folder or a file.

    Args:
        path: a folder with a folder of images for each class, whose classes are numbered in order
            of name; a folder with `images.npy` and `labels.npy`; or an `.npz` file with `images`
            and `labels`. Arrays have the shapes `(count, size, size, 3)` and `(count,)`.
        size: of the sides in points. Files are scaled until the shorter side has it, and cut to the
            middle; arrays must have it.
        batch: images per step.
        seed: decides the order.

    Raises:
        InputError: there are no images, or the arrays have other shapes or dtypes.
    """
    path = Path(path)
    arrays = _arrays(path)
    if arrays is None:
        files, labels = _files(path)

        def pixels(places: NDArray[Any]) -> NDArray[Any]:
            chosen = [files[place] for place in places]
            with ThreadPoolExecutor() as pool:
                decoded = list(pool.map(lambda file: _decoded(file, size), chosen))
            return np.stack(decoded) if decoded else np.zeros((0, size, size, 3), np.uint8)

    else:
        images, labels = arrays
        faults = []
        if images.shape != (len(labels), size, size, 3) or labels.ndim != 1:
            faults.append(
                f"images have the shape {images.shape} and labels {labels.shape}, and"
                f" ({len(labels)}, {size}, {size}, 3) and ({len(labels)},) are wanted"
            )
        if images.dtype.kind != "f" and images.dtype != np.uint8:
            faults.append(f"images are of {images.dtype}, and uint8 or floating point is wanted")
        if labels.dtype.kind not in "iu":
            faults.append(f"labels are of {labels.dtype}, and whole numbers are wanted")
        if faults:
            raise InputError(f"{path}: {'; '.join(faults)}. Other sizes: --set image_size=N.")

        def pixels(places: NDArray[Any]) -> NDArray[Any]:
            taken: NDArray[Any] = images[places]
            return taken

    return Images(
        pixels=pixels,
        labels=labels,
        places=np.arange(len(labels)),
        batch=batch,
        seed=seed,
        source=str(path),
    )


def _arrays(path: Path) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Images and labels as arrays, if a path has them."""
    try:
        if path.suffix == ".npz" and path.is_file():
            with np.load(path, allow_pickle=False) as found:
                missing = [name for name in ("images", "labels") if name not in found]
                if missing:
                    raise InputError(
                        f"{path} has no {' and no '.join(missing)}, but"
                        f" {', '.join(found.files) or 'nothing'}. {_KINDS}"
                    )
                return found["images"], found["labels"]
        names = [path / "images.npy", path / "labels.npy"]
        if not all(name.is_file() for name in names):
            return None
        images, labels = (np.load(name, mmap_mode="r", allow_pickle=False) for name in names)
        return images, np.asarray(labels)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {error}. {_KINDS}") from None


def _files(path: Path) -> tuple[Sequence[Path], NDArray[Any]]:
    """The files of a folder for each class, and the numbers of their classes."""
    files: list[Path] = []
    labels: list[int] = []
    try:
        folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
        for label, folder in enumerate(folders):
            found = sorted(f for f in folder.rglob("*") if f.suffix.lower() in _SUFFIXES)
            files += found
            labels += [label] * len(found)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}. {_KINDS}") from None
    if not files:
        raise InputError(f"{path} has no images in its {counted(len(folders), 'folder')}. {_KINDS}")
    return files, np.asarray(labels)


def _decoded(path: Path, size: int) -> NDArray[Any]:
    """An image scaled until its shorter side has `size` points, and cut to the middle."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise InputError(
            f"{path} is decoded by Pillow, which is not installed: pip install pillow. Arrays in"
            " images.npy and labels.npy need none."
        ) from None
    try:
        with Image.open(path) as image:
            return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size)))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is no image that can be read: {error}.") from None
