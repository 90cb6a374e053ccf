"""Who answers when in asynchronous PVI (Ashman et al. 2022, section 2.4.3), simulated from the seed.

Silo j's local fit takes d_j rounds. The server makes a sum of the first `buffer` silos whose fits are done, and waits
where fewer are. With the broadcast of its turn a silo gets the q for its next fit; what it adds to the sum was fitted
against the q of the turn before, unless d_j = 0: such a silo fits while the server waits. A secure sum is bound to one
broadcast, so a late change joins the sum of a later round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Keeps the draw of delays apart from that of ties.
_DELAYS = 2**32


class Turns(NamedTuple):
    """The simulated clock, in rounds. Everyone may see it."""

    clock: float  # time of the last round
    free: Tensor  # (J,) time at which each silo's fit is done
    last: Tensor  # (J,) round of each silo's last turn; -1: none yet


def delays(silos: int, longest: int, seed: int) -> Tensor:
    """(J,) rounds that the silos' fits take, drawn from 0 to `longest`."""
    drawn = np.random.default_rng([abs(seed), _DELAYS]).integers(0, longest + 1, silos)
    return torch.from_numpy(drawn).double()


def first_turns(silos: int) -> Turns:
    """Nobody is busy."""
    none = torch.zeros(silos, dtype=torch.float64)
    return Turns(0.0, none, none - 1)


def next_cohort(turns: Turns, buffer: int, seed: int, round_: int) -> list[int]:
    """The `buffer` silos whose fits are done first, in order of index; ties by a public coin."""
    coin = np.random.default_rng([abs(seed), round_]).permutation(len(turns.free))
    return sorted(np.lexsort((coin, turns.free.numpy()))[:buffer].tolist())


def after_turn(turns: Turns, cohort: list[int], delay: Tensor, round_: int) -> Turns:
    """Once the silos of `cohort` have answered in `round_` and begun their next fits."""
    at = torch.tensor(cohort)
    clock = max(turns.clock + 1, float(turns.free[at].max()))
    free = turns.free.index_put((at,), clock + delay[at].clamp(min=1))
    return Turns(clock, free, turns.last.index_put((at,), torch.tensor(float(round_), dtype=torch.float64)))


def weight(age: int) -> float:
    """Share of a change that was computed against the q of `age` rounds ago."""
    return 1.0 / (1 + age)
