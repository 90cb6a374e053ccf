"""CIFAR-100 (A. Krizhevsky 2009): 60,000 colour images of 32 x 32 pixels, 100 fine labels under 20 coarse ones.

Where to get it: https://www.cs.toronto.edu/~kriz/cifar.html, "CIFAR-100 python version"; put cifar-100-python.tar.gz
into the folder `cifar100` of the data folder, packed as it is. Where it is missing a subset in the folder
`cifar100_subset` will do: cifar100_20k.npz with `images` (N, 3, 32, 32) uint8, `fine_labels` and `coarse_labels` (N,).
The archive's files are pickles. They are not unpickled: their pixels and labels are read off the opcodes.
"""

from __future__ import annotations

import io
import pickletools
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset, Program
from secure_fvi.models.fedvi import Client, Network, as_dataset, pachinko, personal_classifier, pooled, split_off

ARCHIVE, SUBSET = "cifar-100-python.tar.gz", "cifar100_20k.npz"
CLASSES, COARSE = 100, 20
_IMAGE = 3 * 32 * 32
Labelled = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Images(NamedTuple):
    images: npt.NDArray[np.uint8]  # (N, 3, 32, 32)
    fine: npt.NDArray[np.int64]  # (N,)
    coarse: npt.NDArray[np.int64]


def network(seed: int = 0) -> Network:
    """Another version of Appendix D's network, for 16 x 16 pixels: fewer convolutions, and so few local features that
    beta is little more than which classes the client has."""
    return Network(
        CLASSES, (3, 16, 16), (64, 128), 256, 128, strided=True, padding=1, dropout=(0.0, 0.5), global_share=0.98,
        loc_share=1.0, mean=0.48, sd=0.25, seed=seed,
    )  # fmt: skip


def read_images(data_dir: Path | None) -> Images:
    """The archive's 60,000 images, training ones first, or those of the subset. Raises InputError where neither can be
    read."""
    if data_dir is None:
        raise InputError("this program reads CIFAR-100 from a folder: give --data DIR or set SECURE_FVI_DATA")
    archive, subset = data_dir / "cifar100" / ARCHIVE, data_dir / "cifar100_subset" / SUBSET
    if archive.is_file():
        return read_archive(archive)
    if subset.is_file():
        return read_subset(subset)
    raise InputError(
        f"neither {archive} nor {subset}; download {ARCHIVE} from https://www.cs.toronto.edu/~kriz/cifar.html"
    )


def read_archive(path: Path) -> Images:
    """Both files of the archive. Raises InputError for one that is not what it should be."""
    parts = []
    try:
        with tarfile.open(path) as archive:
            for name in ("train", "test"):
                member = archive.extractfile(f"cifar-100-python/{name}")
                if member is None:
                    raise KeyError(name)
                parts.append(read_pickle(member.read(), f"{path}: {name}"))
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise InputError(f"{path}: not the python archive of CIFAR-100; download it again") from error
    images, fine, coarse = (np.concatenate([p[i] for p in parts]) for i in range(3))
    return Images(images, fine, coarse)


def read_pickle(content: bytes, source: str) -> Labelled:
    """Images, fine and coarse labels of one file, from its opcodes: nothing in it is executed."""
    labels: dict[str, list[int]] = {"fine_labels": [], "coarse_labels": []}
    key, pixels = "", b""
    try:
        for opcode, value, _ in pickletools.genops(io.BytesIO(content)):
            if isinstance(value, str | bytes) and "STRING" in opcode.name:
                text = value.encode("latin-1") if isinstance(value, str) else value
                key = text.decode("latin-1") if len(text) < 100 else key
                pixels = max(pixels, text, key=len)
            elif isinstance(value, int) and opcode.name == "BININT1" and key in labels:
                labels[key].append(value)
    except ValueError as error:
        raise InputError(f"{source}: not a file of CIFAR-100") from error
    fine, coarse = (np.array(labels[k], np.int64) for k in ("fine_labels", "coarse_labels"))
    if not len(fine) or len(coarse) != len(fine) or len(pixels) != _IMAGE * len(fine):
        raise InputError(f"{source}: {len(pixels)} bytes of pixels, {len(fine)} fine and {len(coarse)} coarse labels")
    return _checked(np.frombuffer(pixels, np.uint8).reshape(-1, 3, 32, 32), fine, coarse, source)


def read_subset(path: Path) -> Images:
    """The npz file. Raises InputError for one that is not what it should be."""
    try:
        with np.load(path) as arrays:  # refuses pickles
            images, fine, coarse = (arrays[k] for k in ("images", "fine_labels", "coarse_labels"))
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not an npz file of images, fine_labels and coarse_labels") from error
    if images.dtype != np.uint8 or images.shape != (len(fine), 3, 32, 32) or len(coarse) != len(fine):
        raise InputError(f"{path}: images must be (N, 3, 32, 32) uint8 with a fine and a coarse label each")
    return Images(*_checked(images, fine.astype(np.int64), coarse.astype(np.int64), str(path)))


def _checked(
    images: npt.NDArray[np.uint8], fine: npt.NDArray[np.int64], coarse: npt.NDArray[np.int64], source: str
) -> Labelled:
    if fine.min() < 0 or fine.max() >= CLASSES or coarse.min() < 0 or coarse.max() >= COARSE:
        raise InputError(f"{source}: a label outside 0 to {CLASSES - 1}, or a coarse one outside 0 to {COARSE - 1}")
    return images, fine, coarse


def deal(
    pool_of: Images, clients: int, size: int = 100, test_share: float = 0.2, pool: int = 2, seed: int = 0
) -> list[Client]:
    """`clients` with `size` images each, by hierarchical LDA over coarse and fine labels."""
    small = pooled(pool_of.images, pool)
    parts = pachinko(pool_of.coarse, pool_of.fine, clients, size, seed=seed)
    return [split_off(torch.from_numpy(small[r]), torch.from_numpy(pool_of.fine[r]), test_share) for r in parts]


def load(
    data_dir: Path | None = None, split: str = "train", clients: int = 200, size: int = 100, seed: int = 0
) -> Dataset:
    """`x` (N, 3, 16, 16) uint8, `y` (N,) int64; see `deal`."""
    return as_dataset(deal(read_images(data_dir), clients, size, seed=seed), split)


PROGRAM = Program(
    name="cifar100",
    description="Personal classifier (FedVI) of CIFAR-100, clients by hierarchical LDA over coarse labels",
    model=personal_classifier(network()),
    load=load,
)
