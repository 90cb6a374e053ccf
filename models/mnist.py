"""MNIST: handwritten digits, 60,000 to train and 10,000 to test, 28 x 28 pixels of 0 to 255.

Data: Y. LeCun, C. Cortes and C. J. C. Burges. Reads the four files as published (IDX format), gzipped or not, from the
folder `mnist`. Pixels are divided by 255, a fixed scale: one estimated from the records would be a release of its own.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset, Program, data_folder
from secure_fvi.models.bnn import bayesian_network

#: Images and labels by split.
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CLASSES = 10
#: An IDX file begins with two zero bytes, the type of its numbers (8: unsigned bytes) and how many dimensions it has.
_UNSIGNED_BYTES = 8
_LARGEST = 255.0


def load(
    data_dir: Path | None = None, split: str = "train", count: int | None = None, seed: int = 0, pool: int = 1
) -> Dataset:
    """`x` (N, D) float64 in [0, 1], an image's pixels row by row, and `y` (N,) int64, its digit.

    `split`: "train" or "test". `count`: so many images, drawn by `seed` without replacement, in the file's order; None:
    all. `pool`: mean over squares of so many pixels a side, 2 for 14 x 14. A record's id is its place in its file.
    Raises InputError for a file that is missing, truncated or in another format, and for options that do not fit.
    """
    if split not in FILES:
        raise InputError(f"split = '{split}' is unknown; choose {', '.join(FILES)}")
    folder = data_folder("mnist", data_dir)
    images, labels = (read_idx(found_file(folder, name), size) for name, size in zip(FILES[split], (3, 1), strict=True))
    if len(images) != len(labels):
        raise InputError(f"{folder}: {len(images)} images and {len(labels)} labels in '{split}'")
    if int(labels.max(initial=0)) >= CLASSES:
        raise InputError(f"{found_file(folder, FILES[split][1])}: a label of {int(labels.max())}; digits go up to 9")
    rows = _drawn(len(labels), count, seed)
    x = _pooled(images[rows], pool) / _LARGEST
    y = torch.from_numpy(labels[rows].astype(np.int64))
    return Dataset({"x": torch.from_numpy(x.reshape(len(x), -1)), "y": y}, torch.from_numpy(rows))


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """An IDX file of unsigned bytes with so many dimensions, gzipped if its name ends in ".gz".

    Raises InputError for one that is not, or that holds fewer or more bytes than its header says.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path}: not a whole gzip file; download it again") from None
    start = 4 * (1 + dimensions)
    if len(content) < start:
        raise InputError(f"{path}: truncated, {len(content)} bytes where the header alone has {start}")
    magic, *shape = struct.unpack(f">{1 + dimensions}I", content[:start])
    expected = _UNSIGNED_BYTES << 8 | dimensions
    if magic != expected:
        raise InputError(f"{path}: begins with {magic:#010x}; an IDX file of this kind begins with {expected:#010x}")
    if len(content) - start != math.prod(shape):
        what = "truncated" if len(content) - start < math.prod(shape) else "too long"
        raise InputError(f"{path}: {what}, {len(content) - start} bytes for {' x '.join(map(str, shape))} numbers")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def found_file(folder: Path, name: str) -> Path:
    """The file, gzipped or not; raises InputError where there is none."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise InputError(f"no file '{name}' or '{name}.gz' in {folder}")


def _drawn(size: int, count: int | None, seed: int) -> npt.NDArray[np.int64]:
    """Rows, sorted."""
    if count is None:
        return np.arange(size)
    if type(count) is not int or not 1 <= count <= size:
        raise InputError(f"count = {count!r}: must be a whole number from 1 to {size}")
    return np.sort(torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count].numpy())


def _pooled(images: npt.NDArray[np.uint8], pool: int) -> npt.NDArray[np.float64]:
    """(N, H, W) to (N, H / pool, W / pool)."""
    n, height, width = images.shape
    if type(pool) is not int or pool < 1 or height % pool or width % pool:
        raise InputError(f"pool = {pool!r}: must divide the {height} x {width} pixels of an image; 2 gives 14 x 14")
    squares = images.reshape(n, height // pool, pool, width // pool, pool)
    return squares.mean((2, 4), dtype=np.float64)


PROGRAM = Program(
    name="mnist",
    description="Bayesian neural network with 32 hidden units for handwritten digits (MNIST, 60,000 images)",
    model=bayesian_network(hidden=32, classes=CLASSES),
    load=load,
)
