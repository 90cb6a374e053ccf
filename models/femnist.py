"""FEMNIST: handwritten characters of 62 classes, 28 x 28 pixels, by who wrote them (Caldas et al. 2019).

Where to get it, into the folder `femnist` of the data folder, one of:
- LEAF: github.com/TalwalkarLab/leaf, data/femnist, `./preprocess.sh -s niid --sf 1.0 -k 0 -t sample`; put the folders
  data/train and data/test there, with their all_data_*.json files;
- TensorFlow Federated: https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2, unpacked:
  fed_emnist_train.h5 and fed_emnist_test.h5 (3,400 writers; needs `pip install h5py`).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset, Program, data_folder
from secure_fvi.models.fedvi import Network, personal_classifier
from secure_fvi.models.fedvi_data import Client, as_dataset

CLASSES = 62
HDF5 = "fed_emnist_{split}.h5"
_WHERE = "see the head of secure_fvi/models/femnist.py for where to get it"
Part = tuple[Tensor, Tensor]


def network(seed: int = 0) -> Network:
    """Appendix D's."""
    return Network(CLASSES, (1, 28, 28), (32, 64), mean=0.96, sd=0.16, seed=seed)


def read_clients(data_dir: Path | None, most: int | None = None) -> list[Client]:
    """Every writer with records in both parts, at most `most`, in order of their ids. Raises InputError for files that
    are missing or malformed."""
    folder = data_folder("femnist", data_dir)
    train, test = (_part(folder, split) for split in ("train", "test"))
    ids = sorted(train.keys() & test.keys())[:most]
    if not ids:
        raise InputError(f"{folder}: no writer has both training and test records")
    return [Client(*train[i], *test[i]) for i in ids]


def _part(folder: Path, split: str) -> dict[str, Part]:
    file = folder / HDF5.format(split=split)
    if file.is_file():
        return dict(_hdf5(file))
    files = sorted((folder / split).glob("*.json"))
    if files:
        return {user: part for path in files for user, part in _leaf(path)}
    raise InputError(f"neither {file.name} nor {split}/*.json in {folder}; {_WHERE}")


def _leaf(path: Path) -> Iterator[tuple[str, Part]]:
    try:
        table = json.loads(path.read_text())["user_data"]
        for user, data in table.items():
            yield user, _checked(np.asarray(data["x"], float), np.asarray(data["y"]), path, user)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a JSON file of LEAF, {{'user_data': {{user: {{'x', 'y'}}}}}}") from error


def _hdf5(path: Path) -> Iterator[tuple[str, Part]]:
    try:
        h5py: Any = importlib.import_module("h5py")
    except ImportError:
        raise InputError(f"{path.name} needs h5py: pip install h5py, or use the JSON files of LEAF") from None
    try:
        with h5py.File(path) as file:
            for user, data in file["examples"].items():
                yield user, _checked(np.asarray(data["pixels"], float), np.asarray(data["label"]), path, user)
    except (KeyError, OSError) as error:
        raise InputError(f"{path}: not an HDF5 file of TensorFlow Federated") from error


def _checked(x: Any, y: Any, path: Path, user: str) -> Part:
    """Pixels of 0 to 1 as bytes, (N, 1, 28, 28), and labels (N,)."""
    if len(x) != len(y) or x.size != 784 * len(y) or not len(y):
        raise InputError(f"{path}: writer '{user}' has {len(y)} labels and {x.size} pixels; 784 a label are needed")
    if not (np.isfinite(x).all() and x.min() >= 0 and x.max() <= 1):
        raise InputError(f"{path}: writer '{user}' has a pixel outside 0 to 1")
    labels = torch.from_numpy(y.astype(np.int64).reshape(-1))
    if int(labels.min()) < 0 or int(labels.max()) >= CLASSES:
        raise InputError(f"{path}: writer '{user}' has a label outside 0 to {CLASSES - 1}")
    return torch.from_numpy(np.rint(255 * x).astype(np.uint8).reshape(-1, 1, 28, 28)), labels


def load(data_dir: Path | None = None, split: str = "train", clients: int | None = None) -> Dataset:
    """`x` (N, 1, 28, 28) uint8, `y` (N,) int64; the records of a writer belong to one client."""
    return as_dataset(read_clients(data_dir, clients), split)


PROGRAM = Program(
    name="femnist",
    description="Personal character classifier (FedVI) on FEMNIST, a client a writer",
    model=personal_classifier(network()),
    load=load,
)
