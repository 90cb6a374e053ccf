"""Partitioned variational inference (Ashman et al. 2022, Algorithm 1), few rounds instead of thousands.

    q(Z_G) = p(Z_G) x product over silos j of t_j(Z_G)

    server:  sends q
    silo:    takes its site out, q / t_j (the cavity), and fits q to cavity x its own likelihood by many steps that need
             no exchange; contributes the change of its site, in natural parameters
    server:  adds the damped sum of changes to q

"Structured" PVI: where a silo has latents of its own, its site stands for its marginal likelihood: the local fit
maximises E_q[log p(y_j, Z_L | Z_G) - log q(Z_L | Z_G)] - KL(q || cavity) over q and q(Z_L | Z_G) together. A fixed
point is a local optimum of global VI (Property 2.2), whatever the partition.

At rest. A run is at rest once, in the last rounds, every silo took part, none failed or tempered its cavity, and none's
own undamped change moves q past the tolerance. The sum says of each whether some silo's did, so that opposite changes
do not hide each other and a sum of nothing is no rest; how many, it does not, since each turns at a silo's own site.
Then, in one more phase, all silos evaluate the bound and its slope at the final q (`stationarity`): a run has converged
only if that slope would not move q either.

Sites stay at the silos. A change counts only once the server has said, in a later broadcast, that its sum was used and
with which damping, and the server may say another damping later: it takes a step back that left a silo without a proper
cavity. Whatever is lost in between, q stays the prior times the product of sites. Dampings are named by sum, not by
silo: all changes of one total are taken in alike, whatever a server says. Were one silo's alone to count, the next
total would lack just that one.

Tempering. A silo whose cavity q / t is improper, or whose fit against it runs off, fits against a tempered one,
q / t^a, in which the smallest precision relative to q's is `MARGIN`. The site that a fit arrives at is q* / (q / t^a):
the Gaussian that stands for the silo's likelihood at q*, whatever cavity led there, so that nothing of the old site is
kept. With a < 1 q* has counted part of the likelihood twice and is too narrow; the silo says so, and no run ends there
as converged.

Virtual clients under record privacy have one site for all, of all silos: what the totals so far say of all records,
over the number of parts (averaged EP: Li, Hernandez-Lobato and Turner 2015). It is broadcast, so that nothing that a
part answers follows from another part's records, nor from any silo's own share of the noise. Where likelihoods are
Gaussian q is still exact; else a part is fitted against all others' average in place of their own sites, which differ
the less the more parts there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable, FloatArray
from secure_fvi.algorithms import checking, refining, stationarity, weighing
from secure_fvi.algorithms.base import (
    FINISH,
    ITERATION,
    PRIVATE,
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
    choose_cohort,
    fixed_length,
)
from secure_fvi.algorithms.kit import LENGTHS, NOT_TWICE, Answer, FitAnswer, Program, Sum, Totals
from secure_fvi.algorithms.local_fit import CHANGE, EXACT, NATURAL, UNITS, Families, LocalFitOptions, OwnState, SiloFit
from secure_fvi.algorithms.natural import MOST_LOST, Natural, accept, distance, nothing, to_eta
from secure_fvi.algorithms.prior import Prior
from secure_fvi.algorithms.refining import REFINE, REFINED, Refiner
from secure_fvi.algorithms.stationarity import as_sent, final_draws
from secure_fvi.algorithms.weighing import DISCLOSED, DISCLOSED_OF_SLOPE, q_part
from secure_fvi.compiled import by_itself
from secure_fvi.disclosure import Cohort, Declaration, Sums
from secure_fvi.errors import BoundError, InputError, ProtocolError
from secure_fvi.families import Params
from secure_fvi.later import Later
from secure_fvi.objective import Lengths
from secure_fvi.optimizers import Optimizer
from secure_fvi.options import Count, Fraction, Positive, Says, Share
from secure_fvi.privacy.gate import NoisedSum
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.trees import to_numpy

if TYPE_CHECKING:
    from secure_fvi.algorithms import final_server, noise_aware, noised_fit, refining_server
else:
    noised_fit = Later("secure_fvi.algorithms.noised_fit")
    final_server = Later("secure_fvi.algorithms.final_server")
    noise_aware = Later("secure_fvi.algorithms.noise_aware")
    refining_server = Later("secure_fvi.algorithms.refining_server")

#: What befell some silo of a sum, and which were in it: the secure sum shows the server that anyway, and a silo has to
#: know whether its change was used.
SKIPPED, TEMPERED, MOVING, PRESENT = "skipped", "tempered", "moving", "present"
OBJECTIVE, RECORDS = "objective", "records"
#: Of scales, under `private = "steps"`, at most.
_STEADY = 0.5
#: In a broadcast: the site that all parts have.
SITE = "site"

Damping = Annotated[Share | Literal["auto"], Says("must be 'auto' or lie in (0, 1]")]


@dataclass(frozen=True, kw_only=True)
class PVI(LocalFitOptions):
    """Options of partitioned VI. Those of a silo's local fit are `LocalFitOptions`."""

    rounds: Count | None = None
    """Secure sums to make; under "sequential" one silo's visit is a round. None: until no site moves q by `tolerance`
    posterior standard deviations, at most `max_rounds`."""
    max_rounds: Count = 60
    """See `rounds`."""
    tolerance: Positive = 0.05
    """See `rounds`."""
    schedule: Literal["synchronous", "sequential", "asynchronous"] = "synchronous"
    """"synchronous", all silos a round; "asynchronous", `buffer` silos a round, so that the rest may be busy or away;
    "sequential", one after the other. A sequential schedule shows the server each silo's change of its site, which is
    its posterior alone: it needs `reveal_changes = True` and a sum that admits a cohort of one."""
    buffer: Count = 3
    """Silos of an asynchronous round."""
    reveal_changes: bool = False
    """Accepts what a sequential schedule shows, or what exact sums of an asynchronous one tell, masked or not: they are
    equations for each silo's changes."""
    damping: Damping = "auto"
    """Share of the change that is taken. "auto" begins at one over the silos asked, which keeps q proper whatever they
    send, grows while successive changes point the same way and halves when they turn; a step after which q is improper
    is cut back."""
    virtual_clients: Count = 1
    """Disjoint parts of a silo's records, each with a site of its own, under `RecordDP` with one for all; for models
    without local latents."""
    private: Literal["changes", "steps"] = "changes"
    """Under `RecordDP`, what is noised: each round's change, or each local step's sum of records' gradients, over a
    Poisson sample of `sampling_rate`, by each silo in full ("steps"; DP-SGD). A round, the first as well, is then
    `local_steps` sums and is charged as these, and so is each of the `retries`; scales that follow the noise come out
    wrong, so that `scale_rate` must be 0.5 or less. For models without local latents and `pyro.param`s."""
    lengths_share: Fraction = 0.01
    """As in `SFVI`, of `private = "steps"`."""
    replicates: Count | None = None
    """Of a formula's tables, in a predictive check over all silos by one more sum (`checking`); None: there is none."""
    least_information: Positive | None = None
    """As in `SFVI`; of sites as they are clipped."""

    name = "pvi"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "sequential" and not self.reveal_changes:
            raise InputError(
                "a sequential schedule shows the server each silo's change of its site, from which it can compute that "
                "silo's own posterior; say reveal_changes = true to accept this, or use schedule = 'synchronous'"
            )
        if self.private == "steps" and self.local_optimizer == NATURAL and self.scale_rate > _STEADY:
            raise InputError(
                f"private = 'steps' takes a scale_rate of at most {_STEADY:g}, 0.2 by measurement: scales that follow "
                "the noise of single steps take means with them"
            )

    @property
    def most_rounds(self) -> int:
        return self.rounds or self.max_rounds

    @property
    def expected_calls(self) -> int:
        return self.traced_calls(self.rounds or 10)

    @property
    def by_steps(self) -> bool:
        return self.private == "steps"

    def asked(self, silos: int) -> int:
        """Silos of a round, of so many."""
        return {"synchronous": silos, "sequential": 1, "asynchronous": self.buffer}[self.schedule]

    def declare(self, silos: int, private: bool) -> Declaration:
        by_steps = private and self.by_steps
        names: dict[str, Cohort] = {"synchronous": "all", "sequential": "sequential", "asynchronous": "asynchronous"}
        parts = self.virtual_clients
        what = "the change of its site" if parts == 1 else f"the change of its sites of {parts} parts, added up"
        what += ", in natural parameters, its part of the bound and its number of records"
        if by_steps:
            what = "the change of its site, in natural parameters, without noise of its own: it follows from "
            what += f"{self.local_steps} sums over records that the silo noises in full, one for each step of its fit"
            what += "; by these sums, how many records' gradients are how long" if self.lengths_share else ""
        asked = min(self.asked(silos), silos)
        sums: tuple[Sums, ...] = (Sums(ROUND_PHASE, self.most_rounds, what, asked, names[self.schedule]),)
        if not private:
            counts = (
                "; whether it could not fit, tempered its cavity, or would move q further, which totals say of some "
            )
            counts += "silo or none"
            weighed = self.rounds is None
            final = f"{DISCLOSED if weighed else DISCLOSED_OF_SLOPE}; its number of records"
            finish = Sums(FINISH, 1, final, silos, besides=True, likelihood=weighed)
            refine = (refining.declared(silos),) if weighed else ()
            sums = (dataclasses.replace(sums[0], what=what + counts), finish, *refine)
        sums = (*sums, *checking.declared(self.replicates, silos))
        because = f"schedule = '{self.schedule}'"
        if self.schedule == "asynchronous":
            because += f", buffer = {self.buffer}"
        keeps = "its site and its own latents' posterior"
        return Declaration(
            self.most_rounds, sums, keeps, False, self.sampling_rate, because, self.reveal_changes,
            follows=frozenset({"silo"} if self.virtual_clients > 1 else {"record", "silo"}), within=by_steps,
        )  # fmt: skip

    def server(self, problem: Problem) -> Program:
        """Raises InputError for what the model or its privacy do not allow."""
        if self.replicates is not None:
            return checking.CheckedProgram(self, problem)
        return PVIProgram(self, problem)

    silo = server


# ---- how much of the silos' changes q takes: found during the run, and cut back where q would be improper ----
#
# One over the silos asked is an average of their local posteriors, hence proper, and slow. The paper searched for more
# by hand (section 5.3, E.3).

#: Shares of the agreement with the change before last under which a step is halved, and from which the next is longer.
_TURNING, _ALIKE = 0.75, 0.95
#: An agreement under _NOISE tells nothing. Changes that shrink to a share of _SHRINKING allow a longer step too; that
#: they grow says little, since they are measured in standard deviations of a q that sharpens.
_NOISE, _SHRINKING = 0.2, 0.8
#: By so much a step is made longer of which a change leaves almost all.
_LONGER = 4.0


def pace(q: Natural, now: Natural, last: Natural, earlier: Natural) -> float:
    """By which factor the damping should change, from the sums of changes of this round and of the two before.

    A step that is too long turns the next change round in some directions, long before q becomes improper. Noise of the
    local fits hides that in the cosine with the last change, but not in its ratio to the cosine with the one before:
    noise lowers both alike, while what turns round twice agrees again.
    """
    mean, scale = _coordinates(q, now)
    mean_last, scale_last = _coordinates(q, last)
    first, second = _cosine(mean, mean_last), _cosine(mean, _coordinates(q, earlier)[0])
    told = second > _NOISE
    if first < (_TURNING * second if told else -_NOISE):
        return 0.5
    both, both_last = torch.cat([mean, scale]), torch.cat([mean_last, scale_last])
    alike = first > _ALIKE * (second if told else 1.0)
    # Were sites what they are whatever q is, a share d of a change would leave 1 - d of it to the next. Where most is
    # left, and the same way, a longer step is short of that still.
    if alike and 1 - 1 / _LONGER < float(both @ both_last / both_last.square().sum()) < 1:
        return _LONGER
    if first >= 0 and both.norm() < _SHRINKING * both_last.norm():
        return 2.0
    return 1.25 if alike else 1.0


def moved_by(q: Natural, change: Natural, damping: float) -> Natural:
    """q after a step of `damping`, which takes at most `MOST_LOST` of its precision along any direction of the step.

    Where silos need not take the same step, what noise takes along one is no reason to leave what others tell."""
    after = q.plus(change, damping)
    if not q.full:
        return after._replace(precision=torch.maximum(after.precision, (1 - MOST_LOST) * q.precision))
    factor = q.factor()
    relative = factor.mT @ change.precision @ factor
    values, vectors = torch.linalg.eigh(0.5 * damping * (relative + relative.mT))
    back = torch.linalg.inv(factor).mT @ vectors
    taken = (back * values.clamp(min=-MOST_LOST)) @ back.mT
    return Natural(after.shift, q.precision + 0.5 * (taken + taken.mT))


def distance_moved(q: Natural, change: Natural, taken: float) -> float:
    """Standard deviations by which the whole change moves q: in a straight line from the share that was taken, where q
    would be improper; infinite where none was."""
    whole = distance(q, q.plus(change))
    if math.isfinite(whole) or not taken:
        return whole
    return distance(q, q.plus(change, taken)) / taken


def _coordinates(q: Natural, change: Natural) -> tuple[Tensor, Tensor]:
    """A small change of q in natural parameters as one of its mean, in standard deviations (n,), and of its scale."""
    mean, factor = q.mean(), q.factor()
    if not q.full:
        return factor * (change.shift - change.precision * mean), change.precision * factor.square() / math.sqrt(2)
    moved = factor.mT @ (change.shift - change.precision @ mean)
    return moved, (factor.mT @ change.precision @ factor).flatten() / math.sqrt(2)


def _cosine(a: Tensor, b: Tensor) -> float:
    """1 where either is nothing."""
    lengths = float(a.norm() * b.norm())
    return float(a @ b) / lengths if lengths else 1.0


# ---- sites ----

#: How often a step is shortened before the silos' tempered answers are taken.
_SHORTER = 3
#: A cavity is tempered where in some direction it has no more than `IMPROPER` of q's precision (a silo that alone knows
#: a parameter leaves but the prior's, a ten-thousandth perhaps), and then has `MARGIN` of it.
IMPROPER, MARGIN = 1e-9, 0.05


def tempered(q: Natural, site: Natural, least: float = IMPROPER) -> tuple[Natural, float]:
    """The cavity q / t^a and a: 1 where that leaves more than `least` of q's precision in every direction, else the
    largest that leaves `MARGIN` of it. A cavity is proper whatever the site."""
    if site.full:
        factor = q.factor()
        most = float(torch.linalg.eigvalsh(factor.mT @ site.precision @ factor).max())
    else:
        most = float((site.precision / q.precision).max())
    cavity = q.minus(site)
    if most < 1 - least and cavity.proper:
        return cavity, 1.0
    share = min(1.0, (1 - MARGIN) / most) if most > 0 else 1.0
    return q.plus(site, -share), share


def damping_of(message: Broadcast, index: int, silo: str) -> float:
    """With which q took the changes of sum `index`, at every `silo`; 0: it was left."""
    return named(message.tensors["sums"], message.tensors["dampings"]).get(index, 0.0)


def check_dampings(message: Broadcast, local: PVILocal, silo: str) -> None:
    """Raises ProtocolError where `message` names for a sum another damping than this `silo` heard for it before, or one
    for a sum that was left then: who was not asked before would take its change in by it, unlike all others.

    Only the last step may be shorter since, by `_SHORTER` halves at most, and not once this silo's answer after it was
    taken.
    """
    before, now = named(local.sums, local.dampings), named(message.tensors["sums"], message.tensors["dampings"])
    last = 0.0 if local.used and now.get(local.used) else max(before, default=0.0)
    shorter = [0.5**k for k in range(_SHORTER + 1)]
    gone = {float(message.accepted.get(s, 0)) for s in message.cohort} & before.keys() - now.keys()
    other = gone | {
        index for index, damping in now.items()
        if (index < local.heard if index not in before
            else damping not in [before[index] * k for k in (shorter if index == last else shorter[:1])])
    }  # fmt: skip
    if other:
        raise ProtocolError(
            f"silo '{silo}': the server names another damping for sum {max(other):.0f} than before; all of its changes "
            "are taken in alike"
        )


def named(sums: Tensor, dampings: Tensor) -> dict[float, float]:
    """Dampings by sum, of those that were not left: the first entry counts, as for who takes changes in."""
    found: dict[float, float] = {}
    for index, damping in zip(sums.tolist(), dampings.tolist(), strict=True):
        found.setdefault(index, damping)
    return {index: damping for index, damping in found.items() if index and damping}


def _product(factors: list[Natural]) -> Natural:
    return functools.reduce(Natural.plus, factors)


# ---- virtual clients: a silo's records in disjoint parts, each with a site of its own (Appendix B.6) ----

#: The draw that assigns records to parts; minibatches use others.
_ASSIGNMENT = 2**31
#: Times that an averaged site would be what parts say, by "auto" over all rounds: the first noise is then forgotten.
_TURNOVERS = 4.0
#: Share of the rounds before those that count for the noise-aware posterior: in these the averaged site is on its way.
_SETTLING = 0.3
#: Noise in the averaged site, in clipping norms, up to which its parts' changes are not cut for that alone: beside the
#: half norm that each may have. Of 60 fits a cell at .21 and less intervals of 95% cover .945 and more, at .25 .93, at
#: .31 .84 to .89, at .42 .72 (`bench pvi-modes`' regression, 60 to 240 parts).
MOST_SITE_NOISE = 0.2


def site_noise(variance: float, n: int, damping: float, parts: int) -> float:
    """Root mean square length of the noise in the site that so many parts have in common: of noise of `variance` in
    each of the n numbers of a round's total, of which a round forgets the share `damping`."""
    return math.sqrt(variance * n * damping / (2 - damping)) / parts


def part_views(view: SiloView, parts: int) -> list[SiloView]:
    """The silo's view of each part, which may be empty. Which is a record's follows from secret and own id alone, so
    that a record which joins or leaves moves no other into another part."""
    if parts == 1:
        return [view]
    chosen = np.floor(parts * view.batch_draws.uniforms(_ASSIGNMENT, 1)[0, : view.size, 0]).astype(np.int64)
    views = []
    for part in range(parts):
        at = np.append(np.flatnonzero(chosen == part), view.size)  # with the spare row
        rows = torch.from_numpy(at).to(view.weights.device)
        views.append(
            view._replace(
                rows={name: value.index_select(0, rows) for name, value in view.rows.items()},
                weights=view.weights.index_select(0, rows),
                size=len(at) - 1,
                start=view.start._replace(z_record=view.start.z_record[at]),
                record_draws=view.record_draws.subset(at),
                batch_draws=view.batch_draws.subset(at),
            )
        )
    return views


# ---- states ----

#: Quiet rounds in a row after which a run is at rest, all silos in each; of other schedules one round of each silo.
QUIET = 2
#: And in all: a silo whose cavity is improper at the fixed point itself stays so, however short the steps.
_MOST_UNDONE = 8
#: How often in a job a silo says anew that it tempered its cavity, or would move q; it says so ever after then. Where
#: totals turn is the site of the silo whose own is the most precise, or is the furthest off: a server that leaves all
#: changes would search for it, with a q a round. Not of moves by fits along one draw, whose noise turns them in every
#: run, and tells no more than that noise lets.
_MOST_TURNS = 2


class Counts(NamedTuple):
    """Of one round's sum: silos that were absent, and what befell some silo (1) or none (0). Everyone may see it."""

    absent: int = 0
    skipped: int = 0
    tempered: int = 0
    moving: int = 0

    @property
    def quiet(self) -> bool:
        return not any(self)


class PVIState(NamedTuple):
    """The server's state. All of it follows from totals."""

    round: int
    q: Natural  # the prior's factor times all sites
    prior: Natural  # the prior's factor, or the site that stands for it
    theta: Params
    theta_moments: Params
    took: Tensor  # (J,) the sum of each silo's last change that q took; 0: none
    kept: Tensor  # (J,) and that sum's damping, which the server may have halved since
    moved: Tensor  # (J,) standard deviations by which each silo's last change, undamped, would have moved q
    damping: float  # the share to be taken next, under "auto"; 0 before the first round
    residual: Natural  # the last sum of changes of all silos
    earlier: Natural  # the one before
    skipped: int  # rounds in which some silo's fit failed
    tempered: int  # and in which some silo fitted against a tempered cavity
    undone: int  # steps taken back by half, since they left a silo without a proper cavity
    last: Counts  # of the last round
    quiet: Tensor  # (J,) rounds in a row that a silo was in the total of and that were quiet
    stepped: Tensor  # (J,) one for silos whose changes the last step was made of; all zero: it cannot be shortened
    shortened: int  # times that the last step was
    theta_moved: float  # by the last step of theta, relative to 1 + |theta|
    phase: str  # of the sum to come
    rest: final_server.Rest  # what the final sum told
    checked: bool  # whether all silos were in it
    refining: refining_server.Refining  # and what those after it did
    halvings: int  # of steps after which q would have been improper, or would have lost most of its precision
    first: Tensor  # (packed,) under privacy, the mean over rounds of what a total says of all sites; (0,) otherwise
    firsts: int  # and how many there were
    counted: Tensor  # sums over rounds of what totals tell of lengths, and rounds; (0,) where they tell nothing


class Finished(NamedTuple):
    """A finished local fit. Never leaves the silo but as a change, in a sum."""

    site: Natural  # what t_j should be
    value: float  # see `Fitted`
    theta: Params
    usable: bool  # False where the fit failed: the site stays as it is
    tempered: bool  # whether it was fitted against a tempered cavity
    lengths: Tensor | None = None  # what a fit by noised steps told of them


class Part(NamedTuple):
    """A silo, or one of its virtual clients. Never leaves the silo."""

    site: Natural  # t_j, without the change that is on its way
    change: Natural  # as it was released with the last sum
    taken: Natural  # the change that the site took in last, whole
    own: OwnState


class PVILocal(NamedTuple):
    """A silo's state. Never leaves the silo."""

    parts: tuple[Part, ...]
    used: int  # the sum that the changes were released with, where the server has used it; 0: it has not
    took: int  # the sum of the change that the sites took in last; 0: none yet
    factor: float  # the damping with which they took it
    heard: int  # the sum of the broadcast that was answered last; 0: none yet
    sums: Tensor  # (J,) and what that said of all silos
    dampings: Tensor  # (J,)
    asked: Tensor  # (packed,) the q of the last round that was answered; (0,): none was
    flags: Tensor  # (2,) one where it tempered its cavity, and where it would have moved q, in that round
    turned: Tensor  # (2,) how often each became one

    @property
    def site(self) -> Natural:
        """The product of all parts' sites."""
        return _product([part.site for part in self.parts])

    @property
    def change(self) -> Natural:
        return _product([part.change for part in self.parts])


class PVIProgram(Program):
    """PVI on one problem: the server's half, and the silos'."""

    def setup(self) -> None:
        config, problem = self.config, self.problem
        #: Whether all parts of all silos have one site, which is broadcast: no part's numbers may follow another's.
        self.averaged = self.by_record and config.virtual_clients > 1
        self.families = Families(config, problem._replace(mode="alone") if self.averaged else problem)
        self.theta_start = dict(problem.start.theta)
        self._check()
        self.fit = SiloFit(self.families)
        if self.by_steps:
            if (share := config.lengths_share) and problem.privacy is not None:
                norm = problem.privacy.clipping_norm
                self.lengths = Lengths(norm * math.sqrt(1 - share), norm * math.sqrt(share))
            self.noised_fit, self.noised_steps = noised_fit.NoisedFit(self.fit, self.lengths), config.local_steps
            self.told_steps = config.local_steps - self.noised_fit.told_from
            self.sampled, self.hidden = config.sampling_rate, self.families.n + self.told
        self.refiner = Refiner(problem, self.fit.weigher)
        self.optimizer = Optimizer("adam", config.theta_learning_rate)
        self._one = nothing(self.families.n, self.families.full)

    @property
    def by_steps(self) -> bool:
        """Whether noise is in the steps of local fits rather than in changes."""
        return bool(self.config.by_steps)

    def _check(self) -> None:
        config, privacy = self.config, self.problem.privacy
        if self.by_steps:
            self._check_steps()
        if isinstance(privacy, RecordDP) and privacy.objective_share:
            raise InputError("PVI under RecordDP releases no objective; use objective_share = 0")
        if config.virtual_clients > 1 and self.families.has_latents:
            raise InputError("virtual_clients are for models without local latents; use virtual_clients = 1")
        if privacy is not None and config.rounds is None:
            raise InputError("under differential privacy give rounds: a job is charged for all its rounds beforehand")
        if privacy is None and config.least_information is not None:
            raise InputError(noise_aware.NO_NOISE)
        if config.asked(len(self.problem.silos)) > len(self.problem.silos):
            raise InputError(f"buffer = {config.buffer} of {len(self.problem.silos)} silos")

    def _check_steps(self) -> None:
        config, privacy = self.config, self.problem.privacy
        if not isinstance(privacy, RecordDP):
            raise InputError("private = 'steps' noises gradients record by record: it goes with RecordDP alone")
        if self.families.has_latents or self.theta_start:
            raise InputError(
                "private = 'steps' is for models without local latents and pyro.params; integrate latents out in the "
                "program, or use private = 'changes', or sfvi"
            )
        if config.virtual_clients > 1:
            raise InputError("private = 'steps' noises records' gradients, and takes no parts: use virtual_clients = 1")
        if config.local_optimizer in EXACT:
            raise InputError(f"private = 'steps' makes steps, and local_optimizer = '{config.local_optimizer}' none")

    def sums(self) -> dict[str, Sum]:
        config, families, silos = self.config, self.families, len(self.problem.silos)
        thetas = {f"theta/{name}": tuple(v.shape) for name, v in sorted(self.theta_start.items())}
        shapes = thetas if self.lengths is None else {LENGTHS: (self.told,)}
        changes = (families.change, *(Block(name, shape, config.bound) for name, shape in shapes.items()))
        present = Block(PRESENT, (silos,), 1.0, integer=True, rows="presence")
        records = Block(RECORDS, (), 2.0**31, integer=True)
        flags = tuple(Block(name, (), 1.0, integer=True, rows="some") for name in (SKIPPED, TEMPERED, MOVING))
        sent: dict[str, Tensor | tuple[int, ...]] = {"q": (families.packed,), UNITS: (families.n,)}
        sent |= {SITE: (families.packed,)} if self.averaged else {"sums": (silos,), "dampings": (silos,)}
        sent |= thetas
        most = config.most_rounds
        last = Phase(range(1, most + 1), ends=True)
        protected = frozenset(block.name for block in changes)
        each = (*changes, Block(OBJECTIVE, (), config.bound), records, *flags, present)
        found = {
            ROUND_PHASE: Sum(each, Phase(range(most)), sent, protected),
            FINISH: Sum((*self.final_blocks(), present, records), last, sent),
        }
        if weighing.asked(BlockTable(found[FINISH].blocks)):
            found[REFINE] = self.refiner.sum(last.rounds, sent, present, records)
        return found

    def final_blocks(self) -> tuple[Block, ...]:
        """What is asked of the final q: the bound and its slope, and, where the run stops by itself, the likelihood."""
        families = self.families
        slope = stationarity.blocks(families.n, families.full, self.config.bound)
        if self.config.rounds is not None:
            return slope
        return slope + weighing.blocks(self.problem, families.shared.name, families.local)

    def cohort(self, round_: int) -> tuple[str, ...]:
        """The silos asked in a round."""
        silos = self.problem.silos
        if self.config.schedule == "sequential":
            return (silos[round_ % len(silos)],)
        return choose_cohort(silos, self.cohort_size, self.problem.seed, round_)

    # ---- server ----

    @functools.cached_property
    def prior(self) -> Prior:
        return Prior(self.problem, self.families.full)

    def _begins(self) -> tuple[Natural, Params]:
        theta = {name: self.move(value) for name, value in self.theta_start.items()}
        return self.prior.start(theta, "PVI"), theta

    def blank(self) -> Posterior:
        return self._at(*self._begins())

    def init(self) -> PVIState:
        prior, theta = self._begins()
        none = torch.zeros(len(self.problem.silos), dtype=torch.float64)
        moved = torch.full_like(none, math.inf)
        moments = self.optimizer.init(theta)
        return PVIState(
            round=0, q=prior, prior=prior, theta=theta, theta_moments=moments, took=none, kept=none, moved=moved,
            damping=0.0, residual=self._one, earlier=self._one, skipped=0, tempered=0, undone=0, last=Counts(),
            quiet=none, stepped=none, shortened=0, theta_moved=0.0, phase=ROUND_PHASE, checked=False,
            rest=final_server.Rest(), refining=refining_server.start(), halvings=0, firsts=0,
            first=torch.zeros(0 if self._uncounted else self.families.packed, dtype=torch.float64),
            counted=self.none_counted,
        )  # fmt: skip

    def broadcast(self, state: PVIState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        tensors = {"q": state.q.pack(), UNITS: self.families.units(state.q)}
        if self.averaged:
            tensors[SITE] = self._all_sites(state).pack() / (len(self.problem.silos) * self.config.virtual_clients)
        else:
            tensors |= {"sums": state.took, "dampings": state.kept}
        tensors |= {f"theta/{name}": value for name, value in state.theta.items()}
        scalars = {}
        if state.phase == REFINE:
            tensors[refining.PROPOSAL] = state.refining.proposal
            scalars[ITERATION] = float(state.refining.sums)
        cohort = self.asked(state.round, state.phase)
        return Broadcast(state.round, index, accepted, cohort, scalars, tensors, state.phase)

    def step(self, state: PVIState, message: Broadcast, sums: Totals, scale: float) -> tuple[PVIState, Step]:
        present = self._present(message, sums.get(PRESENT), scale)
        if message.phase == FINISH:
            return self._checked(state, present, sums)
        if message.phase == REFINE:
            return self._refined(state, message, present, sums)
        counts = Counts(
            len(message.cohort) - int(present.sum()), *(int(sums.get(n, 0)) for n in (SKIPPED, TEMPERED, MOVING))
        )
        if self._may_shorten(state, counts):
            return self._shortened(state, counts, message)
        change = self.families.stated(message, sums[CHANGE])
        asked = int(present.sum())
        if not asked:
            change = self._one
        damping = float(self.config.damping) if self.config.damping != "auto" else self._chosen(state, change, asked)
        if self.averaged:
            q, taken, halvings = moved_by(state.q, change, damping), damping, 0
        else:
            q, taken, halvings = accept(state.q, change, damping, self._safe(asked))
        moved = torch.where(present > 0, distance_moved(state.q, change, taken), state.moved)
        objective = math.nan
        if OBJECTIVE in sums and asked == len(self.problem.silos):
            objective = float(sums[OBJECTIVE]) + self.prior.minus_kl(q, state.theta)
        theta, moments = self._theta_step(state, q, sums, scale)
        by_silos = q
        q, prior = self.prior.refit(q, state.prior, theta)
        moved = torch.maximum(moved, moved.new_tensor(distance(by_silos, q)))  # no silo's move, and not at rest either
        moves = [((theta[n] - v).abs() / (1 + v.abs())).max() for n, v in state.theta.items() if v.numel()]
        theta_moved = float(torch.stack(moves).max()) if moves else 0.0
        quiet = counts.quiet and theta_moved < self.config.tolerance
        first, firsts = self._first(state, change, asked)
        after = PVIState(
            round=state.round + 1,
            first=first,
            firsts=firsts,
            counted=self.count(state.counted, sums, scale),
            q=q,
            prior=prior,
            theta=theta,
            theta_moments=moments,
            took=torch.where(present * taken > 0, float(message.sum_index), state.took),
            kept=torch.where(present * taken > 0, taken, state.kept),
            moved=moved,
            damping=taken or damping / 2,
            residual=change,
            earlier=state.residual,
            skipped=state.skipped + counts.skipped,
            tempered=state.tempered + counts.tempered,
            undone=state.undone,
            last=counts,
            quiet=state.quiet + present if quiet else torch.zeros_like(state.quiet),
            stepped=present if taken and not counts.skipped and not counts.tempered else torch.zeros_like(present),
            shortened=0,
            theta_moved=theta_moved,
            phase=ROUND_PHASE,
            rest=final_server.Rest(),
            checked=False,
            refining=state.refining,
            halvings=state.halvings + halvings,
        )
        return self._ended(after, message, Step(objective, taken, None, self.config.schedule, False))

    def posterior(self, state: PVIState) -> Posterior:
        return self._at(state.q, state.theta)._replace(refined=state.refining.answer)

    def _at(self, q: Natural, theta: Params) -> Posterior:
        return Posterior(self.families.shared, {name: self.move(value) for name, value in to_eta(q).items()}, theta)

    def _all_sites(self, state: PVIState) -> Natural:
        """What the totals so far say of all records."""
        return state.q.minus(state.prior)

    @property
    def _uncounted(self) -> str | None:
        """Why no posterior of this job can count the noise of privacy; "" where there is none."""
        if not self.terms:
            return ""
        if self.by_steps:
            return "it is in the steps of silos' own fits, and how far it moved them is not in what they send"
        if self.families.has_latents:
            return "silos' own latents follow the noised q, and how far is not in the totals"
        if self.theta_start:
            return "the pyro.params have no prior, and follow the noise with q"
        if not self.families.full:
            return "a diagonal family sends no site's correlations"
        if self.cohort_size < len(self.problem.silos):
            return f"not all silos are in {'a' if self.averaged else 'the first'} round"
        if self.families.n > noise_aware.UP_TO:
            return f"{self.families.n} global dimensions are more than {noise_aware.UP_TO}"
        return None

    def _first(self, state: PVIState, change: Natural, asked: int) -> tuple[Tensor, int]:
        """The total of the first round is all silos' sites and noise. Later changes answer the noise of the sites that
        came of it, which is longer than what clipping leaves of them, so that they tell little. Parts that have one
        site for all have little of that noise each: with that site put back, the total of any round in which few are
        cut is all parts' sites and noise."""
        used = not state.took.any()
        if self.averaged:
            used = state.round >= int(_SETTLING * self.config.most_rounds)
        if self._uncounted is not None or not used or asked < len(self.problem.silos):
            return state.first, state.firsts
        said = change.plus(self._all_sites(state)) if self.averaged else change
        firsts = state.firsts + 1
        return state.first + (said.pack() - state.first) / firsts, firsts

    @functools.cached_property
    def uncounted(self) -> str | None:
        if self._uncounted is not None:
            return self._uncounted
        if self.prior.exact({}) is None:
            return noise_aware.NOT_NORMAL
        line = noise_aware.straight(self.problem)
        if not line:
            return NOT_TWICE if line is None else noise_aware.NO_PARABOLA
        if self.averaged and self.config.most_rounds > 1:
            parts = len(self.problem.silos) * self.config.virtual_clients
            noise = site_noise(self._each, self.families.packed, self._share, parts)
            noise /= self.terms[ROUND_PHASE].settings.clipping_norm
            if noise > MOST_SITE_NOISE:
                return (
                    f"the noise in the site that all parts have in common is {noise:.2g} of the clipping norm "
                    f"({MOST_SITE_NOISE:g} at most), so that changes are cut whatever the data are; take more "
                    "virtual_clients, or a larger epsilon"
                )
        return None

    @property
    def _each(self) -> float:
        """Variance of the noise in each number of a round's total."""
        terms = self.terms[ROUND_PHASE]
        return terms.variance(len(self.problem.silos), terms.settings.clipping_norm)

    def noise_aware(self, state: PVIState) -> noise_aware.NoiseAware | str:
        if (why := self.uncounted) is not None:
            return why
        if not state.firsts:
            return "a silo was missing in " + ("every round that counts" if self.averaged else "the first round")
        if self.terms[ROUND_PHASE].adaptive and state.firsts > 1:
            return "the clipping norm moved before any step was taken"
        prior = self.prior.exact({})
        assert prior is not None
        first, variance = self.families.unpack(state.first), self._each / state.firsts
        return noise_aware.of_sites(first, variance, prior, self.config.least_information)

    def at_rest(self, state: PVIState) -> bool:
        """Whether every silo was in quiet rounds, none after a round that was not, and their sum does not move q."""
        needed = QUIET if self.cohort_size == len(self.problem.silos) else 1
        return bool((state.quiet >= needed).all()) and float(state.moved.max()) < self.config.tolerance

    def verdict(self, state: PVIState) -> Verdict:
        """What the last rounds and the final sums say together."""
        return refining_server.verdict(self._of_q(state), state.refining, self.refiner.fits)

    def _of_q(self, state: PVIState) -> Verdict:
        config, rest, details = self.config, state.rest, {**self._counts(state), **state.rest.details()}
        if self.terms:
            return Verdict(None, PRIVATE, details, float(state.moved.max()) >= 1.0)
        if config.rounds is not None:
            far = float(state.moved.max()) >= 1.0
            seen = ", and q was still moving by more than a standard deviation" if far else ""
            return fixed_length("rounds", config.rounds, seen, self._counts(state), far)
        trouble = self._trouble(state)
        if trouble is not None:
            return final_server.unsettled(rest, *trouble)._replace(details=details)
        advice = (
            f"lower learning_rate (now {self._rate:.2g}) or raise local_steps (now {config.local_steps}), "
            "standardise the columns, or use sfvi"
        )
        found = f"all {len(self.problem.silos)} silos were at rest in the last rounds"
        return final_server.verdict(rest, None, found, advice)._replace(details=details)

    def _counts(self, state: PVIState) -> dict[str, float | None]:
        absent, *some = state.last._asdict().items()
        return {f"silos_{absent[0]}": float(absent[1]), **{f"some_{name}": float(value) for name, value in some}}

    def _trouble(self, state: PVIState) -> tuple[str, str] | None:
        """What kept the rounds from coming to rest, and what to try."""
        last, config = state.last, self.config
        if self.at_rest(state):
            return None if state.checked else ("a silo was missing when the final q was checked", "run it again")
        scale, more = "standardise the columns, or use sfvi", f"raise max_rounds (now {config.max_rounds})"
        if last.skipped:
            return (
                "some silo could not fit in the last round, its local steps ran off",
                f"lower learning_rate (now {self._rate:.2g}), {scale}",
            )
        if last.tempered:
            return (
                "some silo had an improper cavity in the last round (the other silos' sites together are no "
                "distribution), so that q counts its records wrongly",
                f"set a lower damping (now {self._damping(state)}), {scale}",
            )
        if last.absent:
            return f"{last.absent} of the silos that were asked were absent from the last round", "run it again"
        if last.moving:
            return (
                f"some silo would still move q by more than {config.tolerance:g} sds after {state.round} rounds",
                f"{more} or local_steps (now {config.local_steps}), lower learning_rate (now {self._rate:.2g}), "
                f"{scale}",
            )
        if state.theta_moved >= config.tolerance:
            return "the pyro.params were still moving", more
        return "q was at rest for too short a time", more

    @property
    def _rate(self) -> float:
        """Of the local fits."""
        natural, newton = self.config.local_optimizer == NATURAL, self.families.newton
        return self.families.first_rate(newton) if natural else self.config.first_rate

    def _damping(self, state: PVIState) -> str:
        return f"{state.damping:.2g}, found by itself" if self.config.damping == "auto" else f"{self.config.damping:g}"

    def _ended(self, state: PVIState, message: Broadcast, step: Step) -> tuple[PVIState, Step]:
        """After the round of `message`: whether it was the last, and whether the final q has to be looked at, and will
        be."""
        done = state.round >= self.config.most_rounds or (self.config.rounds is None and self.at_rest(state))
        if done and FINISH in self.tables and self._follows(state.q, message.tensors["q"]):
            return state._replace(phase=FINISH), step
        return state, step._replace(finished=done)

    def _follows(self, q: Natural, asked: Tensor) -> bool:
        """Whether silos answer a final sum at q that were asked at `asked` (packed,) last: near there, where the sum
        asks for likelihoods at many points, so that a server which names a q of its own has asked a round of it.

        Of schedules that do not ask all in each round no silo can tell; their rounds' totals tell each silo's term."""
        if REFINE not in self.tables or self.config.schedule != "synchronous":
            return True
        return bool(len(asked)) and refining.near(q_part(q), q_part(self.families.unpack(asked)))

    def _checked(self, state: PVIState, present: Tensor, sums: Totals) -> tuple[PVIState, Step]:
        """After the final sum."""
        whole, rest = int(present.sum()) == len(self.problem.silos), final_server.Rest()
        if whole:
            rest = final_server.at_rest(
                self.problem, state.q, state.theta, self._log_prior(state), self._final_draws(), sums, self.config.bound
            )
        state = state._replace(phase=ROUND_PHASE, rest=rest, checked=whole)
        if REFINE in self.tables and whole and (not state.theta or self.at_rest(state)):
            begun = self._judge.begun(state.q, rest, self._of_q(state).converged is True)
            if begun is not None:
                state = state._replace(phase=REFINE, refining=begun)
        finished = state.phase == ROUND_PHASE
        return state, Step(rest.objective, state.damping, None, FINISH, finished)

    @property
    def _judge(self) -> refining_server.Refiner:
        return refining_server.Refiner(self.problem, self.fit.weigher)

    def _refined(self, state: PVIState, message: Broadcast, present: Tensor, sums: Totals) -> tuple[PVIState, Step]:
        """After one more sum at draws near q."""
        absent = int(present.sum()) < len(self.problem.silos)
        after = self._judge.step(state.refining, message, sums, state.q, state.theta, self._log_prior(state), absent)
        step = Step(state.rest.objective, state.damping, None, REFINE, after.done)
        return state._replace(refining=after, phase=ROUND_PHASE if after.done else REFINE), step

    def _log_prior(self, state: PVIState) -> Callable[[Tensor], Tensor]:
        return lambda z: self.prior.log_prob(z, state.theta)

    def _may_shorten(self, state: PVIState, counts: Counts) -> bool:
        """Whether silos lost their proper cavity by the last step, which can be taken back by half."""
        return bool(
            counts.tempered and state.stepped.any() and state.shortened < _SHORTER and state.undone < _MOST_UNDONE
        )

    def _shortened(self, state: PVIState, counts: Counts, message: Broadcast) -> tuple[PVIState, Step]:
        """Half the last step; what the silos answered to the whole one is left."""
        mine = state.stepped > 0
        taken = float(state.kept[mine].max()) / 2
        q = state.q.plus(state.residual, -taken)
        if not q.proper:  # as it may be where the prior's site has moved since; then the step stays
            q, taken, mine = state.q, 2 * taken, torch.zeros_like(mine)
        after = state._replace(
            round=state.round + 1,
            q=q,
            kept=torch.where(mine, taken, state.kept),
            damping=min(state.damping, taken),
            tempered=state.tempered + counts.tempered,
            undone=state.undone + 1,
            last=counts,
            quiet=torch.zeros_like(state.quiet),
            stepped=mine.double(),
            shortened=state.shortened + 1,
        )
        return self._ended(after, message, Step(math.nan, after.damping, None, self.config.schedule, False))

    def metrics(self, state: PVIState) -> dict[str, float | None]:
        moved = float(state.moved.max())
        return {
            "last_change_sd": moved if math.isfinite(moved) else None,
            "damping": state.damping,
            "bound": state.rest.bound,
            "skipped_rounds": state.skipped,
            "tempered_rounds": state.tempered,
            "undone_steps": state.undone,
            "halvings": state.halvings,
        }

    def _present(self, message: Broadcast, shown: FloatArray | None, scale: float) -> Tensor:
        """(J,) one for silos in the total. Under silo privacy they are not counted, so a sum that lost one is left."""
        silos = self.problem.silos
        if shown is not None:
            return torch.from_numpy(shown > 0.5).double()
        whole = round(len(silos) / scale) == len(message.cohort)
        return torch.tensor([float(whole and name in message.cohort) for name in silos], dtype=torch.float64)

    def _safe(self, asked: int) -> float:
        """One over the clients asked, virtual ones counted."""
        return 1.0 / max(asked * self.config.virtual_clients, 1)

    @property
    def _share(self) -> float:
        """The damping of rounds with one site for all parts."""
        chosen = self.config.damping
        return min(1.0, _TURNOVERS / self.config.most_rounds) if chosen == "auto" else float(chosen)

    def _chosen(self, state: PVIState, change: Natural, asked: int) -> float:
        """One over the silos asked; more than that only where all silos were, in this round as in the last."""
        if self.averaged:
            return self._share
        safe = self._safe(asked)
        if asked < len(self.problem.silos) or not state.damping:
            return safe
        return min(1.0, max(safe, state.damping * pace(state.q, change, state.residual, state.earlier)))

    def _theta_step(self, state: PVIState, q: Natural, sums: Totals, scale: float) -> tuple[Params, Params]:
        """A step of Adam along the gradient of the free energy (paper, Appendix A)."""
        if not state.theta:
            return state.theta, state.theta_moments
        own = self.prior.theta_gradient(q, state.theta)
        total = {name: scale * torch.from_numpy(sums[f"theta/{name}"]) for name in state.theta}
        gradient = {name: self.move(total[name]) + own[name] for name in state.theta}
        return self.optimizer.step(state.theta, gradient, state.theta_moments, self.move(torch.tensor(1.0)))

    def _final_draws(self) -> Tensor:
        families = self.families
        return final_draws(self.problem.seed, families.n, families.full, self.config.rounds is not None)

    # ---- silo ----

    def init_local(self, view: SiloView) -> PVILocal:
        one = self._one
        views = part_views(view, self.config.virtual_clients)
        nobody = torch.zeros(len(self.problem.silos), dtype=torch.float64)
        parts = tuple(Part(one, one, one, self.fit.init(v)) for v in views)
        flags = torch.tensor([0.0, 1.0], dtype=torch.float64)
        return PVILocal(parts, 0, 0, 0.0, 0, nobody, nobody, nobody[:0], flags, torch.zeros_like(flags))

    def answer(self, message: Broadcast, local: PVILocal, view: SiloView) -> Answer | FitAnswer:
        if self.by_steps:
            return FitAnswer(lambda noised_sum: self._answer(message, local, view, noised_sum))
        return self._answer(message, local, view)

    def _answer(
        self, message: Broadcast, local: PVILocal, view: SiloView, noised_sum: NoisedSum | None = None
    ) -> Answer:
        """noised_sum: of a fit by noised steps."""
        q = self.families.sent(message, view.silo)
        local, views = self._settled(message, local, view.silo), part_views(view, self.config.virtual_clients)
        own = {PRESENT: [float(name == view.silo) for name in self.problem.silos], RECORDS: view.size}
        if message.phase == FINISH:
            if not self._follows(q, local.asked):
                raise ProtocolError(
                    f"silo '{view.silo}': the final q is not near the one of the last round that was answered, or none "
                    f"was: it is more than {refining.FROM_Q:.0f} sds off, or more than {refining.LIKE_Q:.0f} times as "
                    "wide or narrow"
                )
            return Answer({**own, **self._at_the_end(message, local, view, views)}, local)
        if message.phase == REFINE:
            return Answer({**own, REFINED: self._near(message, local, view, views)}, local)
        per_unit, local = self.families.told_per_unit(message, view.silo), local._replace(asked=message.tensors["q"])
        with by_itself() if self.averaged else contextlib.nullcontext():
            answered = [self._answered(message, k, part, views[k], noised_sum) for k, part in enumerate(local.parts)]
        parts, fits = [part for part, _, _ in answered], [fit for _, fit, _ in answered]
        each = [
            {CHANGE: to_numpy(part.change.pack() * per_unit)}
            | {f"theta/{name}": to_numpy(fit.theta[name]) for name in self.theta_start}
            | ({} if fit.lengths is None else {LENGTHS: to_numpy(fit.lengths)})
            for part, fit in zip(parts, fits, strict=True)
        ]
        changes = {name: sum(of_part[name] for of_part in each) for name in each[0]}
        reported = self._reported(message, parts, fits)
        flags = torch.tensor([reported[TEMPERED], reported[MOVING]], dtype=torch.float64)
        local = local._replace(flags=flags, turned=local.turned + (flags > local.flags))
        steady = self.fit.exact is not None or self.families.newton
        ever = {TEMPERED: local.turned[0] > _MOST_TURNS, MOVING: steady and local.turned[1] > _MOST_TURNS}
        reported |= {name: 1.0 for name, said in ever.items() if said}

        def released(said: FloatArray) -> PVILocal:
            return local._replace(parts=self._as_released(parts, torch.from_numpy(said)), used=0)

        after = local._replace(parts=tuple(parts), used=0)
        blocks, dropped = {**own, **changes, **reported}, sum(failed for _, _, failed in answered)
        if self.averaged:
            return Answer(blocks, after, dropped, parts=tuple(each))
        return Answer(blocks, after, dropped, released)

    def _at_the_end(
        self, message: Broadcast, local: PVILocal, view: SiloView, views: list[SiloView]
    ) -> dict[str, FloatArray]:
        """The silo's part of the bound, and of its slope, at the final q."""
        q, theta, eps = self.families.unpack(message.tensors["q"]), self._theta(message), self._final_draws()
        keys = range((view.turn + 1) * len(views), (view.turn + 2) * len(views))
        table = BlockTable(self.final_blocks())
        found = [
            self.fit.at_the_end(eps, key, theta, q, part.own, of, weighing.asked(table))
            for key, part, of in zip(keys, local.parts, views, strict=True)
        ]
        return table.split(as_sent(self.problem, table, np.sum(found, 0), view))

    def named_q(self, message: Broadcast) -> Natural:
        """The q that a final sum's broadcast names, or one that repeats its parameters."""
        return self.families.unpack(message.tensors["q"])

    def _near(self, message: Broadcast, local: PVILocal, view: SiloView, views: list[SiloView]) -> FloatArray:
        """The silo's log-likelihood at draws near the final q."""
        q, theta = self.families.unpack(message.tensors["q"]), self._theta(message)
        found = [
            self.fit.refined(self.refiner, message, theta, q, part.own, of)
            for part, of in zip(local.parts, views, strict=True)
        ]
        return self.refiner.told(np.sum(found, 0), view)

    def _theta(self, message: Broadcast) -> Params:
        return {name: self.move(message.tensors[f"theta/{name}"]) for name in self.theta_start}

    def _answered(
        self, message: Broadcast, k: int, part: Part, view: SiloView, noised_sum: NoisedSum | None = None
    ) -> tuple[Part, Finished, int]:
        """The k-th part with its change, the fit that the change is from, and how many fits failed."""
        if noised_sum is not None:
            (fit, own), failed = self._fitted_by_steps(message, part, view, noised_sum), 0
        else:
            fit, own, failed = self._fitted(message, k, part, view)
        change = self._one.plus(fit.site.minus(part.site)) if fit.usable else self._one
        return part._replace(change=change, own=own), fit, failed

    def _fitted(self, message: Broadcast, k: int, part: Part, view: SiloView) -> tuple[Finished, OwnState, int]:
        """The local fit against the q of `message`, the silo's latents after it, and whether it failed."""
        q, theta, failed = self.families.unpack(message.tensors["q"]), self._theta(message), 0
        turn = (view.turn + 1) * self.config.virtual_clients + k
        begin = self.fit.begin(q, part.own)
        try:
            for least in (IMPROPER, MARGIN):
                cavity, share = tempered(q, part.site, least)
                if least == MARGIN and share == 1:
                    break  # tempering would change nothing
                fitted = self.fit(turn, theta, begin, cavity, part.own, view)
                if fitted.sane:
                    site = fitted.q.minus(cavity).within(fitted.touched)
                    return Finished(site, fitted.value, fitted.theta, True, share < 1), fitted.own, 0
                if share < 1:
                    break
        except Exception:
            # Under privacy to fail on data would tell of them, without noise: the change is nothing, and noised.
            if not self.terms:
                raise
            failed = 1
        if not self.terms and self.cohort_size > 1:
            # A zero in its place would make the total the others', and later totals this silo's.
            raise BoundError(
                f"silo '{view.silo}': its local fit ran off in round {message.round}; lower learning_rate (now "
                f"{self._rate:.2g}), standardise the columns, or use sfvi"
            )
        zeros = {name: torch.zeros_like(v) for name, v in theta.items()}
        own = part.own._replace(visits=part.own.visits + 1)
        return Finished(self._one, 0.0, zeros, False, False), own, failed

    def _fitted_by_steps(
        self, message: Broadcast, part: Part, view: SiloView, noised_sum: NoisedSum
    ) -> tuple[Finished, OwnState]:
        """As `_fitted`, once: all but the sums follows from them and from broadcasts, and so does what a fit that ran
        off answers, a change of nothing."""
        q = self.families.unpack(message.tensors["q"])
        cavity, share = tempered(q, part.site)
        begin = self.fit.begin(q, part.own)
        fitted, lengths = self.noised_fit(view.turn + 1, begin, cavity, part.own, view, noised_sum)
        site = fitted.q.minus(cavity) if fitted.sane else self._one
        return Finished(site, 0.0, {}, fitted.sane, share < 1, lengths), fitted.own

    def where(self, message: Broadcast) -> Tensor | None:
        return self.families.unpack(message.tensors["q"]).mean() if "q" in message.tensors else None

    def commit(self, local: PVILocal, pending: Pending, accepted: int) -> PVILocal:
        """The pending state in any case, with the server's word on its change: with which damping it was used stands in
        a later broadcast, which may come rounds after where not all silos are asked in every round."""
        kept: PVILocal = pending.local
        return kept._replace(used=accepted if pending.sum_index == accepted else 0)

    def local_fit(self, local: PVILocal) -> LocalFit:
        return self.fit.local_fit(local.parts[0].own)  # models with local latents have one part

    def site(self, local: PVILocal, message: Broadcast, silo: str) -> Natural:
        """t_j as of a broadcast. For the silo's own eyes."""
        return self._settled(message, local, silo).site

    def _counted(self, own: OwnState) -> OwnState:
        """Of what a part that has the site of all kept from fit to fit the number of its fits alone, in which no record
        has a say: parts are dealt anew where a run goes on under another secret, and a record that was in one before
        would else move its fits as well as those of the part that it is in."""
        return own._replace(anchor=self.problem.start.z_global.to("cpu", torch.float64), share=1.0)

    def _settled(self, message: Broadcast, local: PVILocal, silo: str) -> PVILocal:
        """With the changes that were sent taken into the sites, if the server has said that it used them, and with the
        last change as short as the server says that it is by now."""
        if self.averaged:
            site, one = self.families.unpack(message.tensors[SITE]), self._one
            parts = [Part(site, one, one, self._counted(part.own)) for part in local.parts]
            return local._replace(parts=tuple(parts), heard=message.sum_index)
        if not bool(((message.tensors["dampings"] >= 0) & (message.tensors["dampings"] <= 1)).all()):
            raise ProtocolError(f"silo '{silo}': a change is taken in with a damping between 0 and 1")
        check_dampings(message, local, silo)
        one, took, factor = self._one, local.took, local.factor
        parts, new = [p._replace(change=one) for p in local.parts], damping_of(message, local.used, silo)
        if new > 0:
            parts = [p._replace(site=p.site.plus(p.change, new), taken=p.change, change=one) for p in local.parts]
            took, factor = local.used, new
        kept = damping_of(message, took, silo)
        if kept > 0 and kept != factor:
            parts = [p._replace(site=p.site.plus(p.taken, kept - factor)) for p in parts]
            factor = kept
        said = message.tensors["sums"].double(), message.tensors["dampings"].double()
        sums, dampings = said
        return local._replace(
            parts=tuple(parts), used=0, took=took, factor=factor, heard=message.sum_index, sums=sums, dampings=dampings
        )

    def _reported(self, message: Broadcast, parts: list[Part], fits: list[Finished]) -> dict[str, float]:
        """The silo's part of the bound, and what befell it."""
        q = self.families.unpack(message.tensors["q"])
        return {
            OBJECTIVE: float(sum(fit.value for fit in fits)),
            SKIPPED: float(not all(fit.usable for fit in fits)),
            TEMPERED: float(any(fit.tempered for fit in fits)),
            MOVING: float(any(distance(q, q.plus(p.change)) > self.config.tolerance for p in parts)),
        }

    def _as_released(self, parts: list[Part], said: Tensor) -> tuple[Part, ...]:
        """What counts is what was released: the change of the one part, or, where what is protected is the silo, each
        part's own change and an even share of the rest."""
        total = said[: self.families.packed]
        changes = total.unsqueeze(0)
        if len(parts) > 1:
            own = torch.stack([part.change.pack() for part in parts])
            changes = own + (total - own.sum(0)) / len(parts)
        return tuple(part._replace(change=self.families.unpack(row)) for part, row in zip(parts, changes, strict=True))
