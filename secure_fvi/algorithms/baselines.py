"""What partitioned VI is compared with (Ashman et al. 2022, sections 4.3 and 5), in the same frame: no site is kept.

    q(Z_G) <- q(Z_G) x product over the silos asked of q_j(Z_G) / c_j(Z_G)

where silo j fits q_j to c_j x its own likelihood, by the local fit of PVI, and contributes the change from c_j to q_j:

    BCM, same       all silos at once     c_j = prior                the committee machine of Tresp (2000)
    BCM, split      all silos at once     c_j = prior^(N_j / N)
    VCL             one after the other   c_j = q                    Nguyen et al. (2018)
    streaming VB    the same, in passes   c_j = q, with j's own data in it from the second pass on

Without sites nothing lets the silos' approximations come to an agreement, and more passes count the records again: use
PVI. A prior that is not Gaussian in unconstrained space enters as its Gaussian approximation, which is not refitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from secure_fvi.aggregation.base import Block
from secure_fvi.algorithms.base import (
    ROUND_PHASE,
    Broadcast,
    LocalFit,
    Pending,
    Phase,
    Posterior,
    Problem,
    SiloView,
    Step,
    Verdict,
)
from secure_fvi.algorithms.kit import Answer, Program, Sum, Totals
from secure_fvi.algorithms.local_fit import CHANGE, FIRST_FIT, UNITS, Families, LocalFitOptions, OwnState, SiloFit
from secure_fvi.algorithms.natural import Natural, nothing, to_eta
from secure_fvi.algorithms.prior import Prior
from secure_fvi.disclosure import Declaration, Sums
from secure_fvi.errors import BoundError, DataError, InputError, ProtocolError, SecureFVIError
from secure_fvi.options import Count

#: The phase before the first round, once: a split of the prior whose N is not public.
COUNT = "count"
RECORDS, SKIPPED = "records", "skipped"
_WHAT = "the change of q by its own fit, in natural parameters, its number of records, and whether it could fit"
_KEEPS = "its own latents' posterior"


@dataclass(frozen=True, kw_only=True)
class Baseline(LocalFitOptions):
    """What all baselines share; the options are those of the local fit. Use BCM, VCL or StreamingVB."""

    name: ClassVar[str]
    #: Whether all silos answer in the one round that there is, or one after the other.
    at_once: ClassVar[bool] = False

    @property
    def visits(self) -> int:
        """To each silo."""
        return 1

    @property
    def expected_calls(self) -> int:
        return self.traced_calls(self.visits + FIRST_FIT - 1)

    @property
    def splits(self) -> bool:
        """Whether silos share the prior out."""
        return False

    @property
    def public_records(self) -> int | None:
        """N, where the job states it."""
        return None

    def declare(self, silos: int, private: bool) -> Declaration:
        """Of what visits one silo after the other: a visit is a round, and a sum of one silo."""
        rounds = self.visits * silos
        sums = (Sums(ROUND_PHASE, rounds, _WHAT, 1, "sequential"),)
        return Declaration(rounds, sums, _KEEPS, False, self.sampling_rate, "reveal_changes = true")

    def server(self, problem: Problem) -> BaselineProgram:
        """Raises InputError for what the model or its privacy do not allow."""
        return BaselineProgram(self, problem)

    silo = server


@dataclass(frozen=True, kw_only=True)
class BCM(Baseline):
    """Bayesian committee machine: one secure sum, no damping and no safeguard. Where the product of the silos'
    approximations is improper the run fails. Options of the local fit are `LocalFitOptions`."""

    prior: Literal["same", "split"] = "same"
    """"same", every silo has the whole prior, which is taken out of the product again; "split", silo j has the prior to
    the power N_j / N."""
    total_records: Count | None = None
    """N for "split", where it is public; otherwise it is counted by one more secure sum."""

    name = "bcm"
    at_once = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_records is not None and self.prior == "same":
            raise InputError("total_records is what prior = 'split' divides the prior by; leave it out")

    @property
    def splits(self) -> bool:
        return self.prior == "split"

    @property
    def public_records(self) -> int | None:
        return self.total_records

    def declare(self, silos: int, private: bool) -> Declaration:
        sums = [Sums(ROUND_PHASE, 1, _WHAT, silos)]
        if self.splits and self.total_records is None and not private:
            sums.insert(0, Sums(COUNT, 1, "its number of records", silos, besides=True))
        return Declaration(1, tuple(sums), _KEEPS, share=self.sampling_rate)


@dataclass(frozen=True, kw_only=True)
class VCL(Baseline):
    """Variational continual learning: one pass over the silos, each with the last one's q for a prior.

    The server sees each silo's change of q, its posterior alone: it takes a plain sum, since any other would hide it in
    name only. A visit is a round. Options of the local fit are `LocalFitOptions`.
    """

    reveal_changes: bool = False
    """Accepts what the server sees: needed."""

    name = "vcl"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_revealed(self.name, self.reveal_changes)


@dataclass(frozen=True, kw_only=True)
class StreamingVB(Baseline):
    """Streaming variational Bayes: passes of VCL. What the server sees is as there, and a visit is a round. Options of
    the local fit are `LocalFitOptions`."""

    passes: Count = 10
    """Over the silos; every record counts so many times."""
    reveal_changes: bool = False
    """Accepts what the server sees: needed."""

    name = "streaming-vb"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_revealed(self.name, self.reveal_changes)

    @property
    def visits(self) -> int:
        return self.passes


def _check_revealed(name: str, reveal_changes: bool) -> None:
    if not reveal_changes:
        raise InputError(
            f"{name} visits one silo after the other and shows the server each one's change of q, from which it can "
            "compute that silo's own posterior; say reveal_changes = true to accept this, or use pvi or bcm"
        )


class BaselineState(NamedTuple):
    """The server's state. All of it follows from totals."""

    round: int  # sums of changes used
    q: Natural  # the prior, times what silos changed so far
    records: int  # N; 0 where it is not known, or not yet
    skipped: int  # rounds in which some local fit ran off
    lost: bool  # whether a silo that was asked is missing in q


class BaselineProgram(Program):
    """A baseline on one problem: the server's half, and the silos', whose state is that of their own latents."""

    no_record_privacy = "; use SiloDP, whose unit is the silo, or SFVI"

    def setup(self) -> None:
        config, problem = self.config, self.problem
        if problem.start.theta:
            raise InputError(f"{config.name} learns no pyro.param; use PVI")
        self.counts_first = config.splits and config.public_records is None
        if self.counts_first and problem.privacy is not None:
            raise InputError(
                f"under silo privacy {config.name} with prior = 'split' needs total_records, a public figure for all "
                "silos' records together, since counting them would release their number"
            )
        self.families = Families(config, problem)
        self.fit = SiloFit(self.families)

    def cohort(self, round_: int) -> tuple[str, ...]:
        silos = self.problem.silos
        return silos if self.config.at_once else (silos[round_ % len(silos)],)

    def sums(self) -> dict[str, Sum]:
        config, change = self.config, self.families.change
        records = Block(RECORDS, (), 2.0**31, integer=True)
        # Whether some silo's local fit ran off: it changes nothing.
        skipped = Block(SKIPPED, (), 1.0, integer=True, rows="some")
        # A single silo's number of records is nobody's business; all silos' tells whether one was lost.
        counts = (records, skipped) if config.at_once else (skipped,)
        sent: dict[str, Tensor | tuple[int, ...]] = {"q": change.shape, UNITS: (self.families.n,)}
        split: dict[str, Any] = {}
        if config.splits:
            split = {"scalars": (RECORDS,), "known": {RECORDS: config.public_records}}
        rounds = Phase(range(self.most_rounds))
        each = Sum((change, *counts), rounds, sent, frozenset({CHANGE}), **split)
        if not self.counts_first:
            return {ROUND_PHASE: each}
        return {COUNT: Sum((records,), Phase(range(1)), sent, **split), ROUND_PHASE: each}

    # ---- server ----

    def init(self) -> BaselineState:
        prior = Prior(self.problem, self.families.full).start({}, self.config.name)
        return BaselineState(0, prior, self.config.public_records or 0, 0, False)

    def broadcast(self, state: BaselineState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        phase = COUNT if self.counts_first and not state.records else ROUND_PHASE
        scalars = {RECORDS: float(state.records)} if self.config.splits else {}
        cohort = self.asked(state.round, phase)
        tensors = {"q": state.q.pack(), UNITS: self.families.units(state.q)}
        return Broadcast(state.round, index, accepted, cohort, scalars, tensors, phase)

    def step(self, state: BaselineState, message: Broadcast, sums: Totals, scale: float) -> tuple[BaselineState, Step]:
        if message.phase == COUNT:
            state = state._replace(records=round(scale * float(sums[RECORDS])))
            return state, Step(math.nan, 1.0, None, COUNT, False)
        q = state.q.plus(self.families.stated(message, sums[CHANGE]))
        if not q.proper:
            raise SecureFVIError(
                f"{self.config.name}, round {state.round + 1}: the product of the silos' approximations is no "
                "distribution, and nothing here damps it; use PVI"
            )
        state = BaselineState(
            round=state.round + 1,
            q=q,
            records=state.records,
            skipped=state.skipped + int(sums.get(SKIPPED, 0)),
            lost=state.lost or scale > len(self.problem.silos) / len(message.cohort),
        )
        return state, Step(math.nan, 1.0, None, self.config.name, state.round >= self.most_rounds)

    def posterior(self, state: BaselineState) -> Posterior:
        eta = {name: self.move(value) for name, value in to_eta(state.q).items()}
        return Posterior(self.families.shared, eta, {})

    def verdict(self, state: BaselineState) -> Verdict:
        """Not whether q is good: there is nothing to converge to. Whether every silo's part is in it."""
        name, details = self.config.name, self.metrics(state)
        if state.skipped or state.lost:
            part = "a local fit ran off and changed nothing" if state.skipped else "a silo that was asked is missing"
            advice = "lower learning_rate, standardise the columns, or use pvi" if state.skipped else "run it again"
            return Verdict(False, f"{part}; {advice}", details)
        once = self.config.visits == 1
        what = "one pass over the silos, approximate by construction" if once else "passes that count records anew"
        return Verdict(None, f"{name} is {what}; nothing in it tells how far q is from the posterior: use pvi", details)

    def metrics(self, state: BaselineState) -> dict[str, float | None]:
        return {"skipped_rounds": state.skipped}

    # ---- silo ----

    def init_local(self, view: SiloView) -> OwnState:
        most = self.config.public_records
        # Under privacy nobody is to hear of it (`_prior`); else before the first round: later it would tell more.
        if most is not None and not self.terms and view.size > most:
            raise DataError(f"silo '{view.silo}': total_records = {most}, but this silo alone has more records")
        return self.fit.init(view)

    def answer(self, message: Broadcast, local: OwnState, view: SiloView) -> Answer:
        if message.phase == COUNT:
            return Answer({RECORDS: view.size}, local)
        prior, per_unit = self._prior(message, view), self.families.told_per_unit(message, view.silo)
        fitted = self.fit(view.turn + 1, {}, self.fit.begin(prior, local), prior, local, view)
        if not self.terms and self.config.at_once and not fitted.sane:
            # A zero in its place would make the total the others'.
            raise BoundError(
                f"silo '{view.silo}': its local fit ran off; lower learning_rate, standardise the columns, or use pvi"
            )
        change = fitted.q.minus(prior) if fitted.sane else nothing(prior.n, prior.full)
        counts = {RECORDS: view.size, SKIPPED: float(not fitted.sane)}
        return Answer({CHANGE: change.pack() * per_unit, **counts}, fitted.own if fitted.sane else local)

    def commit(self, local: OwnState, pending: Pending, accepted: int) -> OwnState:
        """The pending state in any case: own latents are where a silo's last fit left them, used or not."""
        kept: OwnState = pending.local
        return kept

    def local_fit(self, local: OwnState) -> LocalFit:
        return self.fit.local_fit(local)

    def _prior(self, message: Broadcast, view: SiloView) -> Natural:
        """c_j: q as it was sent, or this silo's share of it."""
        q = self.families.sent(message, view.silo)
        if not self.config.splits:
            return q
        records = message.scalars[RECORDS]
        if not records >= 1:
            raise ProtocolError("the broadcast's number of records is none")
        # A silo that alone has more records than the server names says nothing of it.
        return nothing(q.n, q.full).plus(q, min(1.0, view.size / records))
