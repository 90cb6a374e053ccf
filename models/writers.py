"""Simulated writers: MNIST digits (Y. LeCun, C. Cortes, C. J. C. Burges) redrawn in the hand of made-up people.

No real writer is behind this data: it stands in for FEMNIST where that cannot be had, and says so by its name. Each
writer has a hand (slant, rotation, size, stroke width, from a seed) and habits, each with probability a half, that
conflict with those of others (Vedadi et al. 2023, Figure 1):

    habit 0   bars its sevens; its ones have a hook and look like other people's sevens
    habit 1   underlines its nines; its fours are closed and look like other people's nines
    habit 2   strikes its zeros through; its sixes are all loop and look like other people's zeros

The same picture is thus a 1 for one writer and a 7 for another; which, the rest of the writer's pictures tell.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset, Program, data_folder
from secure_fvi.models.fedvi import Client, Network, as_dataset, personal_classifier, pooled, split_off
from secure_fvi.models.mnist import CLASSES, FILES, found_file, read_idx

#: Habits: (label that is written as the other's shape, the label whose shape it is and that is marked instead).
HABITS = ((1, 7), (4, 9), (6, 0))
_SIDE = 28


class Hand(NamedTuple):
    """How one writer writes."""

    rotation: float  # radians
    slant: float
    size: float
    width: float  # below 0 thinner, above thicker, at most 1 in size
    habits: tuple[bool, ...]


def network(seed: int = 0) -> Network:
    """A small version of Appendix D's network for 14 x 14 pixels."""
    return Network(
        CLASSES, (1, 14, 14), (16, 32), 64, 64, strided=True, padding=1, dropout=(0.0, 0.0), loc_share=1.0, mean=0.13,
        sd=0.31, seed=seed,
    )  # fmt: skip


def write(
    data_dir: Path | None, writers: int, size: int = 100, test_share: float = 0.2, pool: int = 2, seed: int = 0
) -> list[Client]:
    """`writers` people with `size` digits each, all labels alike often, of MNIST's training images, none used twice.

    Raises InputError for files that `models.mnist` would refuse, and where the images do not suffice.
    """
    folder = data_folder("mnist", data_dir)
    images, labels = (read_idx(found_file(folder, name), n) for name, n in zip(FILES["train"], (3, 1), strict=True))
    rng = np.random.default_rng([abs(seed), 2])
    shapes = {digit: list(rng.permutation(np.flatnonzero(labels == digit))) for digit in range(CLASSES)}
    out = []
    for _ in range(writers):
        hand = _hand(rng)
        y = rng.permutation(np.arange(size) % CLASSES)
        shown, marked = _as_written(y, hand)
        rows = []
        for digit in shown:
            if not shapes[digit]:
                raise InputError(f"MNIST has too few pictures of a {digit} for {writers} writers of {size} digits")
            rows.append(shapes[digit].pop())
        drawn = _drawn(_marked(images[rows], shown, marked), hand)
        x = torch.from_numpy(pooled(drawn[:, None], pool))
        out.append(split_off(x, torch.from_numpy(y.astype(np.int64)), test_share))
    return out


def _hand(rng: np.random.Generator) -> Hand:
    rotation, slant, size, width = rng.normal(0, (0.12, 0.2, 0.08, 0.5))
    habits = tuple(bool(h) for h in rng.random(len(HABITS)) < 0.5)
    return Hand(rotation, slant, float(np.clip(1 + size, 0.8, 1.2)), float(np.clip(width, -1, 1)), habits)


def _as_written(y: npt.NDArray[np.int64], hand: Hand) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The shape of each label in this hand, and whether it is marked."""
    shown, marked = y.copy(), np.zeros(len(y), bool)
    for has, (written, taken) in zip(hand.habits, HABITS, strict=True):
        if has:
            shown[y == written], marked[y == taken] = taken, True
    return shown, marked


def _marked(
    images: npt.NDArray[np.uint8], shapes: npt.NDArray[np.int64], marked: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint8]:
    """A bar through sevens, a line under nines, a stroke through zeros."""
    out = images.copy()
    row, column = np.indices((_SIDE, _SIDE))
    strokes = {
        7: (abs(row - 15) <= 1) & (abs(column - 14) <= 6),
        9: (abs(row - 25) <= 1) & (abs(column - 14) <= 6),
        0: (abs(row + column - 27) <= 1) & (abs(column - 14) <= 9),
    }
    for shape, stroke in strokes.items():
        out[(marked & (shapes == shape))[:, None, None] & stroke] = 255
    return out


def _drawn(images: npt.NDArray[np.uint8], hand: Hand) -> npt.NDArray[np.uint8]:
    """(N, 28, 28) in the writer's hand."""
    x = torch.from_numpy(images).float().unsqueeze(1)
    cos, sin = math.cos(hand.rotation), math.sin(hand.rotation)
    turn = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]], dtype=torch.float32) / hand.size
    turn[0] += hand.slant * turn[1]
    grid = functional.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    x = functional.grid_sample(x, grid, align_corners=False)
    swollen: Tensor = functional.max_pool2d(x, 3, 1, 1) if hand.width > 0 else -functional.max_pool2d(-x, 3, 1, 1)
    x = torch.lerp(x, swollen, abs(hand.width))
    return x.squeeze(1).round().clamp(0, 255).to(torch.uint8).numpy()


def load(
    data_dir: Path | None = None, split: str = "train", writers: int = 100, size: int = 100, seed: int = 0
) -> Dataset:
    """`x` (N, 1, 14, 14) uint8, `y` (N,) int64; the records of writer k belong to client k. See `write`."""
    return as_dataset(write(data_dir, writers, size, seed=seed), split)


PROGRAM = Program(
    name="writers-simulated",
    description="Personal digit classifier (FedVI) on MNIST redrawn by simulated writers with conflicting habits",
    model=personal_classifier(network()),
    load=load,
)
