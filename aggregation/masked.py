"""Masked sums as the user configures them: double masking after Bonawitz et al. (2017), made multi-round.

    silo                                server
    signed X25519 key         ->        key set                  once a session
    sealed seeds, shares      ->        shares to their holders  once a batch of indices
    input + masks             ->        survivors, stored        every sum
    (signed by the silo)
    signature on survivors    ->        T signatures             every sum, with the consistency check
    shares of b or of e       ->        masks removed, total     every sum

What it protects against whom: docs/threat-model.md.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from secure_fvi.aggregation.base import BlockTable, Form, Seat, SumSilo, check_silo_ids
from secure_fvi.aggregation.graph import least_signatures, neighbourhood
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Roster
from secure_fvi.errors import InputError
from secure_fvi.options import Count, Fraction, Says, Whole, check


@dataclass(frozen=True)
class Masked:
    """Sums of which the server learns the total alone, with recovery from dropouts.

    `min_cohort`: fewer survivors get no sum. `max_missing`: silos of a sum's cohort that may be missing from its total;
    with 0 there is a total of all that were asked, or none, and no server can have one silo's term as the difference of
    two totals by declaring it lost. `max_differences`: sums of a job between sites without differential privacy that
    may lack any; the same for all of its silos, so that none is left out more often than its own site allows.
    `bits`: width of the ring, 32 or 64. `consistency_check`: survivors are signed by T = floor(2n/3)+1 silos before
    anything is revealed, which a lying server cannot get round with fewer than n/3 colluders; without it the server is
    trusted to tell all silos the same.
    `batch`: indices whose secrets are shared at once (None: chosen by the number of silos). `corrupt`,
    `lost`: the shares of the silos that the k-regular graph of a large roster is to withstand.
    """

    min_cohort: Whole = 3
    max_missing: Whole = 0
    max_differences: Whole = 0
    bits: Annotated[Literal[32, 64], Says("must be 32 or 64")] = 64
    consistency_check: bool = True
    batch: Count | None = None
    corrupt: Fraction = 0.1
    lost: Fraction = 0.1

    def __post_init__(self) -> None:
        check(self)
        if self.min_cohort < 2:
            raise InputError(f"min_cohort must be at least 2, not {self.min_cohort}; a sum of one is no sum")

    @property
    def kind(self) -> str:
        return "masked"

    def roster(self, identity_keys: Mapping[str, bytes], session: bytes | None = None) -> Roster:
        """The roster of `identity_keys` (Ed25519 public keys by silo id), of a fresh session by default.

        Raises InputError when there are fewer silos than `min_cohort`.
        """
        ids = check_silo_ids(identity_keys)
        holders = min(neighbourhood(len(ids), self.corrupt, self.lost).k + 1, len(ids))
        return Roster(
            session=session or os.urandom(32),
            members=tuple((silo, identity_keys[silo]) for silo in ids),
            min_cohort=self.min_cohort,
            max_missing=self.max_missing,
            bits=self.bits,
            consistency_check=self.consistency_check,
            batch=max(4, min(64, 2048 // holders)) if self.batch is None else self.batch,
            corrupt=self.corrupt,
            lost=self.lost,
        )

    @property
    def form(self) -> Form:
        return "masked" if self.consistency_check else "masked-unchecked"

    def withstands(self, silos: int, recovers: bool) -> int:
        """Silos in league with a lying server to whom sums of so many show no single term (docs/threat-model.md).
        recovers: totals may lack silos, or there is a key holder; otherwise sums are whole."""
        graph = neighbourhood(silos, self.corrupt, self.lost)
        if recovers and not self.consistency_check:  # the server names the members, and of few it takes one colluder
            return 0
        if not graph.complete:
            return math.floor(self.corrupt * silos)
        if not recovers:
            return silos - 1  # where all others collude, the total is the term
        return min(graph.threshold - 1, 2 * least_signatures(silos) - silos - 1)

    def codec(self, silos: int) -> Callable[[BlockTable], Ring]:
        """Elements of the ring of the integers modulo 2^`bits`."""
        return lambda table: Ring(table, self.bits, silos)

    def beneath(self, bits: Literal[32, 64]) -> Masked:
        """These sums themselves."""
        return self

    def at_silo(self, seat: Seat) -> SumSilo:
        """One silo's half."""
        roster, silo, identity, store, least, missing, questions = seat
        assert roster is not None
        return MaskedSilo(roster, silo, identity, store, least, max_missing=missing, questions=questions)
