"""Who masks with whom and who holds whose shares: complete, or k-regular (Bell et al. 2020).

In the k-regular graph (a Harary ring over a random order) each silo shares with its k neighbours, threshold
t = floor(2k/3) + 1. A neighbourhood fails
- in secrecy when a server that lies to its halves can collect t shares of both of a silo's secrets: the c
  colluders give both, the others one each, so c + k >= 2t;
- in recovery when fewer than t neighbours are left;
- in masking when the honest survivors' graph falls apart: k/2 consecutive places without an honest survivor.
Who is lost may be chosen by an adversary that knows the order, so that no chance helps with masking: silos refuse
survivors of whom some window of k/2 consecutive places has no more than colluders may fill (`least_in_window`).
Tails are hypergeometric and computed with exact integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from secure_fvi.aggregation.shamir import MAX_HOLDERS
from secure_fvi.errors import InputError

#: Up to this many silos the graph is complete.
COMPLETE_UP_TO = 32
SECRECY_BITS = 40
RECOVERY_BITS = 30


class Neighbourhood(NamedTuple):
    """Degree k and share threshold t, with what they guarantee (log2 of failure probabilities; printed)."""

    silos: int
    k: int
    threshold: int
    complete: bool
    log2_secrecy: float  # one neighbourhood's secrecy; -inf where it is not a matter of chance
    log2_recovery: float  # any neighbourhood of the session cannot recover
    log2_disconnected: float  # survivors that silos accept, chosen by an adversary, have masks that split into groups
    least_in_window: int  # survivors that each k/2 consecutive places must keep; 0 where the graph is complete
    log2_refused: float  # random losses of the assumed share leave fewer in some window

    def __str__(self) -> str:
        kind = "complete" if self.complete else f"{self.k}-regular"
        text = (
            f"{self.silos} silos, {kind} graph: k = {self.k}, t = {self.threshold}, failure of secrecy 2^"
            f"{self.log2_secrecy:.1f} a neighbourhood, of recovery 2^{self.log2_recovery:.1f}, of masking 2^"
            f"{self.log2_disconnected:.1f}"
        )
        if self.complete:
            return text
        return (
            f"{text} whatever survivors are named: each {self.k // 2} consecutive silos must keep "
            f"{self.least_in_window}, which random losses miss with 2^{self.log2_refused:.1f}"
        )


def complete_threshold(silos: int) -> int:
    """Shares needed where all hold one: floor(2n/3)+1, but a majority and, from 3 silos on, one to spare."""
    return max(silos // 2 + 1, min(2 * silos // 3 + 1, silos - 1))


def least_signatures(silos: int) -> int:
    """T = floor(2n/3) + 1: two sets of so many signatures share an honest silo below 2T - n colluders (n/3)."""
    return 2 * silos // 3 + 1


def _log2_ratio(numerator: int, denominator: int) -> float:
    """log2 of a ratio of integers of any size."""
    if numerator == 0:
        return -math.inf
    shift_n, shift_d = max(numerator.bit_length() - 64, 0), max(denominator.bit_length() - 64, 0)
    return math.log2(numerator >> shift_n) - math.log2(denominator >> shift_d) + shift_n - shift_d


def log2_hypergeometric_tail(population: int, marked: int, draws: int, at_least: int) -> float:
    """log2 P[X >= at_least], X the marked among `draws` without replacement."""
    ways = sum(
        math.comb(marked, x) * math.comb(population - marked, draws - x)
        for x in range(max(at_least, 0), min(draws, marked) + 1)
    )
    return _log2_ratio(ways, math.comb(population, draws))


@lru_cache(maxsize=1024)
def least_in_window(members: int, colluders: int, width: int, orders: int = 1) -> int:
    """Survivors that each `width` consecutive places of a ring in random order must keep; more than `width` if none do.

    One more than the colluders of any window, except with 2^-40 over all windows of so many `orders`: one of them is
    then honest, and honest survivors less than `width` + 1 places apart all the way round share masks in one connected
    graph.
    """
    places = math.log2(members) + math.log2(orders)
    least = 1
    while least <= width and places + log2_hypergeometric_tail(members, colluders, width, least) > -SECRECY_BITS:
        least += 1
    return least


@lru_cache(maxsize=64)
def neighbourhood(silos: int, corrupt: float, lost: float, orders: int = 1) -> Neighbourhood:
    """The smallest even k for `silos` of which the given shares are corrupt and lost; else complete.

    Secrecy fails with at most 2^-40 a neighbourhood, masking with 2^-40 whatever losses an adversary chooses, and
    whichever of so many `orders` of the ring; random losses end recovery, or thin a window out, with 2^-30 over all of
    them. Raises InputError when no k within 255 does.
    """
    if not (0 <= corrupt < 1 / 3 and 0 <= lost < 1 / 3):
        raise InputError(f"corrupt and lost must lie in [0, 1/3), got {corrupt:g} and {lost:g}")
    others, bad, gone = silos - 1, math.floor(corrupt * silos), math.floor(lost * silos)
    complete = Neighbourhood(
        silos,
        others,
        complete_threshold(silos),
        True,
        -math.inf,
        -math.inf if silos else 0.0,
        -math.inf,
        0,
        -math.inf,
    )
    if silos <= COMPLETE_UP_TO:
        return complete
    for k in range(2, min(others, MAX_HOLDERS + 1), 2):
        t = 2 * k // 3 + 1
        secrecy = log2_hypergeometric_tail(others, min(bad, others), k, 2 * t - k)
        recovery = math.log2(silos) + log2_hypergeometric_tail(others, min(gone, others), k, k - t + 1)
        # Each silo corrupt or lost by itself: this keeps k from shrinking where few are corrupt in all.
        share_gone = corrupt + lost
        alone = math.log2(silos) + (k // 2) * math.log2(share_gone) if share_gone else -math.inf
        if max(secrecy, alone) > -SECRECY_BITS or recovery > -RECOVERY_BITS:
            continue
        width = k // 2
        least = least_in_window(silos, bad, width, orders)
        disconnected = math.log2(silos) + math.log2(orders) + log2_hypergeometric_tail(silos, bad, width, least)
        refused = math.log2(silos) + log2_hypergeometric_tail(silos, gone, width, width - least + 1)
        if least <= width and refused <= -RECOVERY_BITS:
            return Neighbourhood(silos, k, t, False, secrecy, recovery, disconnected, least, refused)
    if silos <= MAX_HOLDERS:
        return complete
    raise InputError(
        f"no neighbourhood of at most {MAX_HOLDERS} silos withstands {corrupt:.0%} corrupt and {lost:.0%} "
        f"lost of {silos}; assume less"
    )


def ring_neighbours(order: Sequence[int], at: int, k: int) -> tuple[int, ...]:
    """The k neighbours (sorted) of the member at place `at` of the circular `order`: k/2 before it, k/2 after."""
    n = len(order)
    if k >= n - 1:
        return tuple(sorted(set(order) - {order[at]}))
    return tuple(sorted(order[(at + step) % n] for step in range(-(k // 2), k // 2 + 1) if step))
