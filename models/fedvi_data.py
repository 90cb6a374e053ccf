"""Images of many clients: what the loaders for FedVI return, and how one pool of images is dealt out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset

IntArray = npt.NDArray[np.int64]


class Client(NamedTuple):
    """One client's images. `x` (N, C, H, W) uint8, `y` (N,) int64; `test_x`, `test_y` likewise, not trained on."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def train(self) -> dict[str, Tensor]:
        """What `fit` takes."""
        return {"x": self.x, "y": self.y}

    def mirrored(self) -> Client:
        """With the mirror image of each training image beside it."""
        return self._replace(x=torch.cat([self.x, self.x.flip(-1)]), y=torch.cat([self.y, self.y]))


def split_off(x: Tensor, y: Tensor, test_share: float) -> Client:
    """The first records to train on, the last round(test_share x N) to test."""
    kept = len(y) - round(test_share * len(y))
    return Client(x[:kept], y[:kept], x[kept:], y[kept:])


def as_dataset(clients: Sequence[Client], split: str) -> Dataset:
    """The clients' "train" or "test" records one after the other, with the client of each."""
    if split not in ("train", "test"):
        raise InputError(f"split = '{split}' is unknown; choose train, test")
    chosen = [(c.x, c.y) if split == "train" else (c.test_x, c.test_y) for c in clients]
    owner = torch.cat([torch.full((len(y),), k) for k, (_, y) in enumerate(chosen)])
    x, y = (torch.cat([pair[i] for pair in chosen]) for i in range(2))
    return Dataset({"x": x, "y": y}, torch.arange(len(y)), owner)


def pachinko(
    coarse: IntArray, fine: IntArray, clients: int, size: int, alpha: float = 0.1, beta: float = 10.0, seed: int = 0
) -> list[IntArray]:
    """Rows by client, `size` each, no row twice: Pachinko allocation (Li and McCallum 2006) as TFF deals CIFAR-100.

    coarse, fine (N,): two levels of labels, each fine label under one coarse one. A client draws shares of the coarse
    labels from Dirichlet(alpha) and, within each, of the fine labels from Dirichlet(beta); each of its rows is drawn by
    them. A label that runs out is left out from then on, the others' shares scaled up.
    """
    if not 1 <= clients * size <= len(fine):
        raise InputError(f"{clients} clients of {size} records need {clients * size}; there are {len(fine)}")
    rng = np.random.default_rng([abs(seed), 1])
    parents = {int(f): int(coarse[fine == f][0]) for f in np.unique(fine)}
    left = {f: list(rng.permutation(np.flatnonzero(fine == f))) for f in parents}
    children = {c: [f for f, parent in parents.items() if parent == c] for c in sorted(set(parents.values()))}
    tops = np.array(list(children))
    parts = []
    for _ in range(clients):
        top = rng.dirichlet(np.full(len(tops), alpha))
        below = {c: rng.dirichlet(np.full(len(children[c]), beta)) for c in children}
        rows = []
        for _ in range(size):
            c = int(tops[_draw(rng, top, [any(left[f] for f in children[c]) for c in children])])
            f = children[c][_draw(rng, below[c], [bool(left[f]) for f in children[c]])]
            rows.append(left[f].pop())
        parts.append(np.array(rows, np.int64))
    return parts


def _draw(rng: np.random.Generator, shares: npt.NDArray[np.float64], open_: Sequence[bool]) -> int:
    """One of the open places by their shares, or by equal ones where these have none left."""
    p = shares * np.array(open_)
    p = p if p.sum() > 0 else np.array(open_, float)
    return int(rng.choice(len(p), p=p / p.sum()))


def pooled(images: npt.NDArray[np.uint8], pool: int) -> npt.NDArray[np.uint8]:
    """(N, C, H, W) to (N, C, H / pool, W / pool), means of squares, rounded."""
    n, channels, height, width = images.shape
    if type(pool) is not int or pool < 1 or height % pool or width % pool:
        raise InputError(f"pool = {pool!r}: must divide the {height} x {width} pixels of an image")
    if pool == 1:
        return images
    squares = images.reshape(n, channels, height // pool, pool, width // pool, pool)
    return np.rint(squares.mean((3, 5))).astype(np.uint8)
