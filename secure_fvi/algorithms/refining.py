"""From q to the posterior: draws of a wider distribution near q, weighed by the likelihood of all records.

Where `weighing` shows that q is off, the weights that show it can put it right. So the sum is asked again, at draws of
a proposal that matches the last weighted moments, up to `SUMS` times:

    proposal     a normal of the weighted mean and covariance, of three widths (`_WIDTHS`), so that tails of the
                 posterior are heavier than its own nowhere near
    draws        Sobol's sequence, shifted by a public hash of the broadcast. A silo answers a proposal near q alone
                 (`near`): a server chooses where q and the proposal lie, and with that, roughly, where draws are
    a silo adds  log p(y_j | z), its own latents integrated out, relative to that at q's mean; that there, once; and,
                 where it has latents, a quarter of the draws again on other nodes
    weights      p(y, z) / mixture of all proposals so far (Owen and Zhou 2000), Pareto-smoothed (Vehtari et al. 2024)

The weighted draws are the answer where k-hat, the effective sample size, standard errors and the error of integration
say that they are (`Found.against`). All of that is necessary, none sufficient: where no draw lies, no weight tells of
it. So nothing is refined where another mode was found, nor far from where modes were looked for. A q that was close to
begin with is asked for one such sum too, and stays the answer where the wider draws agree.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, FloatArray
from secure_fvi.algorithms import hiding
from secure_fvi.algorithms.base import ITERATION, Broadcast, Phase, Problem, Refined, SiloView, Verdict
from secure_fvi.algorithms.kit import Sum, Totals
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.stationarity import Rest
from secure_fvi.algorithms.weighing import CLOSE, UP_TO_NATS, Weigher, errors, points, reported
from secure_fvi.compiled import over_draws
from secure_fvi.disclosure import Sums
from secure_fvi.errors import ProtocolError
from secure_fvi.families import Params
from secure_fvi.families.gaussian import LOG_2PI
from secure_fvi.randomness import LARGEST, server_draws

#: The phase after the final sum, and what a silo adds in it.
REFINE, REFINED = "refine", "refined"
#: The tensor of its broadcast that says where draws are from: see `packed`.
PROPOSAL = "proposal"
#: Sums at most, draws of each, and each how many-eth is evaluated on other nodes too.
SUMS, DRAWS, _AGAIN = 3, 1024, 4
_DISCLOSED = (
    f"the log-likelihood at q's mean, and, relative to that, at {DRAWS} draws of a wider distribution near q, which "
    "all parties derive from the broadcast; of numbers out of range, that they are"
)
#: Shares of the draws, and by how much these are wider than the proposal, in one dimension.
_WIDTHS = ((0.5, 0.0), (0.3, 1.2), (0.2, 3.0))
#: Why a sum is of no use.
OUT_OF_RANGE = "at some draw the likelihood at a silo is out of all range, or no number"
ABSENT = "a silo was missing from a sum at them; run it again"
#: Nodes of latents are the same in all sums, so that their error is nearly one constant; the numbers of their draws.
_NODES = LARGEST - 2
#: What the weighted draws have to reach: effective sample size; standard errors of means, in posterior sds, and of the
#: logs of sds; the error of integration, nats.
LEAST_ESS, PRECISE, INTEGRATED = 200, 0.07, 0.2
#: k-hat has to be under this, or under 1 - 1 / log10(draws) (Vehtari et al. 2024).
LARGEST_KHAT = 0.7
#: Over this one more sum is worth it.
EASY = 0.5
#: How far from q's mean the refined one may lie, in sds of q, and how many times as wide or narrow: beyond, nobody has
#: looked for other modes.
_MOVED, _WIDENED = 4.0, 5.0
#: How far from q's mean a proposal may lie, in sds of q, and how many times as wide or narrow as q in any direction. A
#: silo answers no other: at a point or along a line of a server's own a total tells more than a posterior.
_FROM_Q, _LIKE_Q = 2 * _MOVED, 10.0
#: The effective sample size, a dimension, that a proposal's moments rest on; weights are evened out until it is so.
_ENOUGH = 6
#: Why some models' q stays as it is.
_NESTED = (
    "q is not refined where silos have latents above those of records; integrate one of the two out in the program, if "
    "that can be"
)
#: How much nearer to its mean the next proposal is, where of the last one's draws some were out of range.
_NEARER = 0.5
#: Weights below the largest by more than so many nats count as that.
_NOTHING = 700.0


class Found(NamedTuple):
    """What the draws of all sums so far say. Everyone may see it."""

    weights: Tensor  # (S,) of the draws, adding up to 1
    khat: float = math.inf  # of the weights
    khat_sd: float = math.inf  # the largest, of the weights times squares of a reported number
    ess: float = 0.0
    mean_error: float = math.inf  # largest standard error of a mean, posterior sds
    sd_error: float = math.inf  # largest standard error of the log of an sd
    integration_error: float = 0.0  # sd over draws of the total log-likelihood's difference on other nodes, nats
    log_evidence: float = math.nan  # log p(y), nats
    moved: float = 0.0  # of the mean from q's, in sds of q
    widened: float = 1.0  # the largest ratio of sds to q's, or of q's to them
    of_q: tuple[float, float] = (math.inf, math.inf)  # largest errors of q's means, in sds, and of the logs of its sds

    @property
    def easy(self) -> bool:
        """Whether another sum would better little."""
        return max(self.khat, self.khat_sd) < EASY and max(self.mean_error, self.sd_error) < PRECISE / math.sqrt(2)

    @property
    def agrees(self) -> bool:
        """Whether q is as close as can be told."""
        mean, sd = self.of_q
        return mean <= CLOSE + 2 * self.mean_error and sd <= CLOSE + 2 * self.sd_error

    def against(self) -> str | None:
        """Why these draws are no answer; None: they are."""
        largest = min(LARGEST_KHAT, 1 - 1 / math.log10(max(len(self.weights), 11)))
        if not self.khat < largest or not self.khat_sd < largest:
            return f"Pareto k-hat of its weights is {max(self.khat, self.khat_sd):.2f} (over {largest:.2f})"
        if self.ess < LEAST_ESS:
            return f"its effective sample size is {self.ess:.0f} (under {LEAST_ESS})"
        if not self.mean_error <= PRECISE or not self.sd_error <= PRECISE:
            return f"its means and sds are known to {max(self.mean_error, self.sd_error):.2g} sds alone"
        if not self.integration_error <= INTEGRATED:
            return f"latents are integrated out with an error of {self.integration_error:.2g} nats"
        if self.moved > _MOVED or self.widened > _WIDENED:
            return (
                f"it lies {self.moved:.2g} sds from q and is {self.widened:.2g} times as wide, where no mode was sought"
            )
        return None


class Refining(NamedTuple):
    """The server's state. All of it follows from broadcasts and totals."""

    sums: int  # made so far
    proposal: Tensor  # `packed`, of the sum to come; () before there is one
    proposals: Tensor  # (sums, packed)
    z: Tensor  # (S, n) draws of all of them
    joint: Tensor  # (S,) log p(y, z), nats relative to log p(y | q's mean)
    other: Tensor  # (S / _AGAIN,) the same on other nodes; () where there are no latents
    at_mean: float  # log p(y | q's mean), nats
    found: Found
    lost: str  # why a sum was of no use
    checks: bool  # whether q was close already, so that it stays the answer unless the draws say otherwise

    @property
    def sound(self) -> bool:
        """Whether the weighted draws are the posterior."""
        return bool(len(self.z)) and self.found.against() is None

    @property
    def answer(self) -> Refined | None:
        """The weighted draws, where they are in place of q."""
        found = self.found
        if not self.sound or (self.checks and found.agrees):
            return None
        khat = max(found.khat, found.khat_sd)
        return Refined(self.z, found.weights, khat, found.ess, found.log_evidence, found.integration_error)

    @property
    def done(self) -> bool:
        """Whether no more sums are worth it."""
        enough = self.found.easy or (self.checks and self.found.agrees)
        return self.sums >= SUMS or (self.sound and enough)

    def against(self) -> str | None:
        """Why the draws are no answer although they were tried; None: they are, or were not."""
        if not self.sums or self.sound:
            return None
        times = f"{self.sums} sum{'s' * (self.sums != 1)}"
        return f"q could not be refined by {times} at draws near it: {self.lost or self.found.against()}"

    def reason(self) -> str:
        """Of an answer, in words."""
        found = self.found
        return (
            f"{len(found.weights)} draws near q, weighed by the likelihood of all records, are the result: Pareto "
            f"k-hat {max(found.khat, found.khat_sd):.2f}, effective sample size {found.ess:.0f}, means known to "
            f"{found.mean_error:.2g} sds"
        )

    def details(self) -> dict[str, float | None]:
        if not len(self.z):
            return {}
        found = self.found
        numbers = {
            "refined_sums": float(self.sums), "khat": max(found.khat, found.khat_sd), "ess": found.ess,
            "log_evidence": found.log_evidence, "integration_error": found.integration_error,
            "refined_mean_error_sd": found.mean_error, "refined_sd_error_log": found.sd_error,
        }  # fmt: skip
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def start() -> Refining:
    """Before there is anything to refine."""
    none = torch.zeros(0, dtype=torch.float64)
    return Refining(0, none, none, none, none, none, math.nan, Found(none), "", False)


def declared(silos: int) -> Sums:
    """The sums, as an algorithm declares them."""
    return Sums(REFINE, SUMS, f"{_DISCLOSED}; its number of records", silos, besides=True, likelihood=True)


def worthwhile(rest: Rest) -> bool:
    """Whether draws of q say where the posterior is, and no other mode was found."""
    seen = rest.seen
    return seen is not None and seen.apart is None and bool(torch.isfinite(seen.log_weights).any())


def verdict(of_q: Verdict, state: Refining, fits: bool = True) -> Verdict:
    """Of a run whose q was judged as `of_q`. fits: `Refiner.fits`."""
    if of_q.converged is False and not fits:
        return of_q._replace(reason=f"{of_q.reason}; {_NESTED}")
    details = {**of_q.details, **state.details()}
    if state.answer is not None:
        rests = "tables are of these draws; q, on which the silos' own latents rest alone, is not as near"
        own = "" if of_q.converged else f"; {rests}: {of_q.reason}"
        return Verdict(True, f"{state.reason()}{own}", details)
    against = state.against()
    if against is None:
        return of_q._replace(details=details)
    doubts = bool(len(state.z)) and not (state.found.khat < LARGEST_KHAT and state.found.agrees)
    return Verdict(bool(of_q.converged) and not doubts, f"{of_q.reason}; {against}", details)


def near(q: Natural, proposal: Tensor) -> bool:
    """Whether a proposal, `packed`, is where and as wide as refining a posterior near q needs it."""
    loc, at = (t.to("cpu", torch.float64) for t in (q.mean(), q.factor()))
    at = at.diag() if at.dim() == 1 else at
    mean, factor = unpacked(proposal.to(loc), len(loc))
    if not bool(proposal.isfinite().all()) or not bool((factor.diagonal() > 0).all()):
        return False
    off = torch.linalg.solve_triangular(at, (mean - loc)[:, None], upper=False).norm()
    like = torch.linalg.svdvals(torch.linalg.solve_triangular(at, factor, upper=False))
    return bool(off <= _FROM_Q) and bool(like.max() <= _LIKE_Q) and bool(like.min() >= 1 / _LIKE_Q)


class Refiner:
    """Both halves for one problem; it holds no data."""

    def __init__(self, problem: Problem, weigher: Weigher) -> None:
        self.problem, self.weigher, self.n = problem, weigher, problem.layout.size("global")
        # Nodes of latents of silos above latents of records do not follow their modes, and cost minutes a sum.
        self.fits = not (weigher.n_record and weigher.n_silo)
        self._again = DRAWS // _AGAIN if weigher.n_record or weigher.n_silo else 0
        self.block: Block = hiding.block(REFINED, (1 + DRAWS + self._again,), UP_TO_NATS / len(problem.silos))

    def sum(self, rounds: range, sent: Mapping[str, Tensor | tuple[int, ...]], *others: Block) -> Sum:
        """Of the phase that follows the final sum, whose broadcast is `sent`."""
        when = Phase(rounds, SUMS, range(SUMS), ends=True, counts=False)
        packed = self.n + self.n * (self.n + 1) // 2
        return Sum((self.block, *others), when, {**sent, PROPOSAL: (packed,)}, scalars=(ITERATION,))

    # ---- silo ----

    def nats(
        self, message: Broadcast, q: Natural, theta: Params, record: Params, silo: Params, view: SiloView
    ) -> FloatArray:
        """A silo's log p(y_j | z) at q's mean and all draws, and at some again, for `told`. record, silo: parameters
        around q's mean."""
        if not near(q, message.tensors[PROPOSAL].to("cpu", torch.float64)):
            raise ProtocolError(
                f"silo '{view.silo}': the draws that the server names are not near q: its mean is more than "
                f"{_FROM_Q:.0f} sds off, or they are more than {_LIKE_Q:.0f} times as wide or narrow"
            )
        z = self.draws(message)

        def over(z: Tensor, which: int) -> Tensor:
            return self.weigher.at(q, z, which, _NODES + which, theta, record, silo, view)

        found = over(torch.cat([q.mean()[None], z]), 0)
        return torch.cat([found, over(z[::_AGAIN], 1)] if self._again else [found]).numpy()

    def told(self, nats: FloatArray, view: SiloView) -> FloatArray:
        """As they leave: relative to those at q's mean, which come first; if one is out of range, all are hidden."""
        with np.errstate(invalid="ignore"):
            relative = np.append(nats[:1], nats[1:] - nats[0])
        far = np.full(len(nats), hiding.past(relative, hiding.told_up_to(self.block)).any())
        sent = hiding.hidden(relative, far, self.block, hiding.uniforms(view, 2 * len(nats)))
        return sent.reshape(self.block.shape)

    # ---- all ----

    def draws(self, message: Broadcast) -> Tensor:
        """(DRAWS, n) of the proposal that `message` names, the same at all parties."""
        mean, factor = unpacked(message.tensors[PROPOSAL].to("cpu", torch.float64), self.n)
        shift = torch.from_numpy(server_draws(_seed(self.problem.seed, message)).uniforms(0, self.n + 1)[0])
        even = torch.quasirandom.SobolEngine(self.n + 1).draw(DRAWS, dtype=torch.float64)
        u = ((even + shift) % 1.0).clamp(2.0**-53, 1 - 2.0**-53)
        edges = torch.tensor([share for share, _ in _WIDTHS], dtype=torch.float64).cumsum(0)[:-1]
        width = torch.tensor(_wider(self.n), dtype=torch.float64)[torch.bucketize(u[:, -1].contiguous(), edges)]
        return mean + (width[:, None] * torch.special.ndtri(u[:, :-1])) @ factor.mT

    # ---- server ----

    def begun(self, q: Natural, rest: Rest, converged: bool) -> Refining:
        """Before the first sum: near q itself, where that has converged and is close, else by the weights of its
        draws."""
        assert rest.seen is not None
        if converged and rest.seen.close:
            return start()._replace(proposal=packed(q.mean(), q.factor()), checks=True)
        at = points(self.problem, q)
        found = matched(at.draws, rest.seen.log_weights, q.mean(), q.factor())
        return start()._replace(proposal=found if near(q, found) else packed(q.mean(), q.factor()))

    def step(
        self, state: Refining, message: Broadcast, sums: Totals, q: Natural, theta: Params,
        log_prior: Callable[[Tensor], Tensor],
    ) -> Refining:  # fmt: skip
        """After a sum over all silos."""
        total = sums[REFINED]
        state = state._replace(sums=state.sums + 1)
        mean, factor = unpacked(message.tensors[PROPOSAL].to("cpu", torch.float64), self.n)
        if hiding.unreadable(total, self.block).any():  # nearer to q's mean it need not be
            nearer = packed(mean, factor * _NEARER)
            return state._replace(
                lost="" if state.sums < SUMS else OUT_OF_RANGE,
                proposal=nearer if near(q, nearer) else packed(mean, factor),
            )
        nats, z = torch.from_numpy(hiding.read(total, self.block)), self.draws(message)
        prior = over_draws(log_prior, z)
        joint = (nats[1 : 1 + DRAWS] + prior).nan_to_num(nan=-math.inf)
        other = (nats[1 + DRAWS :] + prior[::_AGAIN]) if self._again else nats[:0]
        made = message.tensors[PROPOSAL].to("cpu", torch.float64)[None]
        first = not len(state.z)
        state = state._replace(
            proposals=made if first else torch.cat([state.proposals, made]),
            z=z if first else torch.cat([state.z, z]),
            joint=joint if first else torch.cat([state.joint, joint]),
            other=other if first else torch.cat([state.other, other]),
            at_mean=float(nats[0]) if first else state.at_mean,
        )
        log_w = state.joint - self._log_density(state.proposals, state.z)
        if not bool(torch.isfinite(log_w).any()):
            return state._replace(lost="no draw has a likelihood")
        found = matched(state.z, log_w, mean, factor)
        return state._replace(
            found=self._found(state, log_w, q, theta),
            proposal=found if near(q, found) else packed(mean, factor),
        )

    def _log_density(self, proposals: Tensor, z: Tensor) -> Tensor:
        """(S,) of the mixture of all proposals."""
        parts = [
            math.log(share / len(proposals)) + self._log_of(*unpacked(each, self.n), z, width)
            for each in proposals
            for (share, _), width in zip(_WIDTHS, _wider(self.n), strict=True)
        ]
        return torch.logsumexp(torch.stack(parts), 0)

    def _log_of(self, mean: Tensor, factor: Tensor, z: Tensor, width: float = 1.0) -> Tensor:
        """(S,) of a normal, so many times as wide."""
        eps = torch.linalg.solve_triangular(width * factor, (z - mean).mT, upper=False).mT
        return -0.5 * (eps.square() + LOG_2PI).sum(-1) - (width * factor.diagonal()).log().sum()

    def _found(self, state: Refining, log_w: Tensor, q: Natural, theta: Params) -> Found:
        weights, khat = smoothed(log_w)
        values = reported(self.problem, state.z, theta)
        mean = weights @ values
        centred = values - mean
        sd = (weights @ centred.square()).sqrt()
        parts = weights[:, None] * (centred / sd), weights[:, None] * ((centred / sd).square() - 1) / 2
        of_mean, of_sd = (float(p.square().sum(0).sqrt().max().nan_to_num(nan=math.inf)) for p in parts)
        tails = [smoothed(log_w + 2 * c.abs().log())[1] for c in centred.mT]
        at = weights @ state.z
        log_q = self._log_of(q.mean(), q.factor(), state.z)
        of_q = [float(e.abs().max()) for e in errors(values, log_w, log_q - (state.joint - log_w))]
        wide = (weights @ (state.z - at).square()).sqrt() / q.stddev()
        return Found(
            weights, khat, max(tails), float(1 / weights.square().sum()), of_mean, of_sd,
            integration_error=self._integration_error(state, weights),
            log_evidence=state.at_mean + float(torch.logsumexp(log_w, 0)) - math.log(len(log_w)),
            moved=float(((at - q.mean()) / q.stddev()).abs().max()),
            widened=float(torch.maximum(wide, 1 / wide).max()),
            of_q=(of_q[0], of_q[1]),
        )  # fmt: skip

    def _integration_error(self, state: Refining, weights: Tensor) -> float:
        """Over the draws that were evaluated twice, weighed by both, so that none that one misses is left out."""
        if not len(state.other):
            return 0.0
        difference = state.other - state.joint[::_AGAIN]
        log_share = weights[::_AGAIN].log() + difference.clamp(-10, 10) / 2
        share = log_share.softmax(0)
        error = (share @ (difference - share @ difference).square()).sqrt()
        return float(error.nan_to_num(nan=math.inf))


def packed(mean: Tensor, factor: Tensor) -> Tensor:
    """(n + n (n + 1) / 2,): a proposal, the factor of its covariance by its lower half."""
    rows, cols = torch.tril_indices(len(mean), len(mean))
    return torch.cat([mean, factor[rows, cols]])


def unpacked(proposal: Tensor, n: int) -> tuple[Tensor, Tensor]:
    rows, cols = torch.tril_indices(n, n)
    factor = proposal.new_zeros(n, n)
    factor[rows, cols] = proposal[n:]
    return proposal[:n], factor


def matched(z: Tensor, log_w: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
    """The proposal of the moments of draws (S, n) weighed by exp `log_w`, drawn to the last one's mean and covariance
    the more, the fewer of them count. Weights are evened out until `_ENOUGH` do: that goes part of the way."""
    n = len(mean)
    least = min(len(z) / 4, max(30.0, _ENOUGH * n))
    log_w = log_w.clamp(min=float(log_w.max()) - _NOTHING)
    for power in torch.linspace(1.0, 0.02, 50).tolist():
        share = (power * log_w).softmax(0)
        ess = float(1 / share.square().sum())
        if ess >= least:
            break
    at = share @ z
    spread = (z - at).mT @ (share[:, None] * (z - at))
    kept = n / (n + ess)
    covariance = (1 - kept) * spread + kept * factor @ factor.mT
    root, info = torch.linalg.cholesky_ex(0.5 * (covariance + covariance.mT))
    return packed(at, root) if not int(info) else packed(mean, factor)


def smoothed(log_w: Tensor) -> tuple[Tensor, float]:
    """Pareto-smoothed weights (S,), adding up to 1, and k-hat."""
    from arviz_stats.base.array import array_stats  # a second to import

    log_w = log_w.nan_to_num(nan=-math.inf)
    log_w = log_w.clamp(min=float(log_w.max()) - _NOTHING)
    found, khat = array_stats.psislw(-log_w.numpy())  # it takes ratios by what leaves a record out
    return torch.from_numpy(np.asarray(found)).softmax(0), float(khat)


def _wider(n: int) -> list[float]:
    return [1 + by / math.sqrt(n) for _, by in _WIDTHS]


def _seed(seed: int, message: Broadcast) -> int:
    """A hash of the job's seed and of all that the broadcast says of q and the proposal."""
    digest = hashlib.sha256(b"secure-fvi/refine/1" + seed.to_bytes(16, "big", signed=True))
    for name in sorted(message.tensors):
        digest.update(name.encode() + message.tensors[name].detach().to("cpu", torch.float64).numpy().tobytes())
    digest.update(int(message.scalars[ITERATION]).to_bytes(4, "big"))
    return int.from_bytes(digest.digest()[:15], "big")
