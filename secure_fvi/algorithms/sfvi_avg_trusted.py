"""The trusted path of SFVI-Avg's merge: the server sees every silo's own q(Z_G), and POT takes the barycenter at once.

Each silo has a row of its own in the blocks of the sum, zero for all others, so that the total of a plain sum is the
list of what silos sent. Seen by the server: each silo's number of records (its weight), mean and covariance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from secure_fvi.aggregation.barycenter import Gaussian, pack_symmetric, trusted_barycenter, unpack_symmetric
from secure_fvi.aggregation.base import Block, FloatArray
from secure_fvi.errors import AggregationError
from secure_fvi.families import GlobalFamily, Params
from secure_fvi.trees import to_numpy

WEIGHTS, MEANS, SPREADS = "weights", "means", "spreads"
#: POT takes dense matrices, whatever the family.
LARGEST = 512


def trusted_blocks(silos: int, n: int, full: bool, bound: float) -> tuple[Block, ...]:
    """A row a silo: its weight, mean (n,), and covariance as a packed triangle or, for diagonal families, sds (n,)."""
    spread = n * (n + 1) // 2 if full else n
    return (
        Block(WEIGHTS, (silos,), 2.0**31, integer=True, rows="silo"),
        Block(MEANS, (silos, n), bound, rows="silo"),
        Block(SPREADS, (silos, spread), bound, rows="silo"),
    )


def own_row(family: GlobalFamily, eta: Params, weight: int, silo: str, silos: Sequence[str]) -> dict[str, Any]:
    """What a silo puts into these blocks."""
    mine = np.array([name == silo for name in silos], np.float64)
    spread = pack_symmetric(to_numpy(family.covariance(eta))) if family.name == "full" else to_numpy(family.stddev(eta))
    return {
        WEIGHTS: weight * mine,
        MEANS: np.outer(mine, to_numpy(eta["loc"])),
        SPREADS: np.outer(mine, spread),
    }


def merged(blocks: Mapping[str, FloatArray], full: bool) -> Gaussian:
    """The barycenter of the silos that answered, by POT. Raises AggregationError where none has a weight."""
    weights = blocks[WEIGHTS]
    there = np.flatnonzero(weights > 0)
    if not len(there):
        raise AggregationError("the weights of a merge add up to nothing")
    means, spreads = blocks[MEANS][there], blocks[SPREADS][there]
    gaussians = [
        Gaussian(mean, unpack_symmetric(spread, len(mean)) if full else np.diag(spread**2))
        for mean, spread in zip(means, spreads, strict=True)
    ]
    return trusted_barycenter(gaussians, weights[there] / weights[there].sum())


def diagonal_parameters(loc: Tensor, covariance: FloatArray) -> Params:
    """eta of the diagonal family with this mean (n,) and the diagonal of this covariance (n, n)."""
    sd = np.sqrt(np.diag(covariance))
    return {"loc": loc, "log_scale": loc.new_tensor(np.log(sd))}
