"""At the server: from weighed draws to the posterior, or to why they are none (`refining`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.algorithms import hiding, refining
from secure_fvi.algorithms.base import Broadcast, Refined, Verdict
from secure_fvi.algorithms.final_server import (
    CLOSE,
    Rest,
    elsewhere,
    errors,
    line_modes,
    modes,
    named,
    reported,
)
from secure_fvi.algorithms.kit import Totals
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.refining import (
    AGAIN,
    MOVED,
    PROPOSAL,
    REFINED,
    WIDENED,
    WIDTHS,
    Mixture,
    allowed,
    mixture,
    unmixed,
    wider,
)
from secure_fvi.algorithms.weighing import Part, Points, finite, first_log_prior, lines_of, points, q_part, sds_from
from secure_fvi.compiled import over_draws
from secure_fvi.families import Params
from secure_fvi.families.gaussian import LOG_2PI, from_lower
from secure_fvi.randomness import server_draws

#: Why a sum is of no use.
OUT_OF_RANGE = "at some draw the likelihood at a silo is out of all range, or no number"
ABSENT = "a silo was missing from a sum at them"
#: What the weighted draws have to reach: effective sample size; standard errors of means, in posterior sds, and of the
#: logs of sds, at most; the error of integration, nats.
LEAST_ESS, PRECISE, INTEGRATED = 200, 0.07, 0.2
#: What the largest error of all means is under with even chance, posterior sds, were each as uncertain as the worst.
_LARGEST_ERROR = 0.1
#: k-hat has to be under this, or under 1 - 1 / log10(draws) (Vehtari et al. 2024).
LARGEST_KHAT = 0.7
#: Over this one more sum is worth it.
EASY = 0.5
#: Sums in place of q: a proposal that misses a tail tells nothing of it, the next one is made for tails.
_CONFIRMED = 2
#: The effective sample size, a dimension, that a proposal's moments rest on; weights are evened out until it is so.
_ENOUGH = 6
#: Why some models' q stays as it is.
_NESTED = (
    "q is not refined where silos have latents above those of records, but for one of each; integrate one of the two "
    "out in the program, if that can be"
)
#: A mode that was found has to have a draw within so many sds of q, on the way and beside it, that is less likely by so
#: many nats at most than its place beside that way makes it.
_VISITED, _AS_LIKELY = 4.0, 3.0
#: Over so many dimensions sds along lines may be so many times those of the draws: there a tail is too far from most
#: draws for k-hat to tell of it.
_BY_LINES, _ALONG = 30, 1.08
#: Where a normal has less of the weight than this, nobody asks how far it has moved.
_SOME = 0.02
#: Iterations of the fit of a mixture, and the least share of a normal.
_EM, _LEAST_SHARE = 30, 0.05
#: Dimensions up to which scouts have looked wherever draws may have moved to.
_LOOKED = 3
#: Nats, relative to those at q's mean, up to which a line is far from out of range, as a power of two; how far from a
#: normal's mean its widest draws lie, in their own sds; and the least by which it is made narrower.
_SAFE, _FARTHEST, _NARROWEST = 20, 3.5, 0.15
#: What a variance is taken to be where one draw has all the weight.
_LEAST_VARIANCE = 1e-100
#: By how much a prior's curvature changes, in units of q's sds, where it does; draws a number of the normal that stands
#: for the likelihood; how much of the weights of draws is alike where that is like it.
_CURVED, _FIT, _ALIKE = 1e-6, 2, 0.5
#: Times that such a posterior is drawn from at most, the effective size that is enough, and how often each of its draws
#: is completed. Where a precision's smallest pivot is a smaller share of the largest, it is rounding.
_TRIES, _KNOWN_BY, _OFTEN, _LEAST_PIVOT = 8, 1000, 4, 1e-6
#: The share of the mass beyond the slices of a funnel, at either end; how near to what silos answer is within.
_ENDS, _INSIDE = 0.02, 0.99
#: By how much means, logs of sds, 5 and 95% quantiles may be off there, posterior sds.
_WITHIN = {"mean": 0.1, "sd": 0.1, "5% quantile": 0.15, "95% quantile": 0.15}
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
    moved: float = 0.0  # of the mean from q's, in sds of q; of several modes the farthest from where one was found; 0
    widened: float = 1.0  # and 1 where scouts have looked there; the largest ratio of sds to q's, or of q's to them
    of_q: tuple[float, float] = (math.inf, math.inf)  # largest errors of q's means, in sds, and of the logs of its sds
    missed: str = ""  # where the posterior has mass that no draw is near, in words
    funnel: str = ""  # what these draws say wrongly of a posterior of which all is known (`StandIn`), in words
    precise: float = PRECISE  # what `mean_error` and `sd_error` may be
    along: float = 1.0  # largest ratio of a dimension's sd along the final sum's lines to that of the draws

    @property
    def worst_khat(self) -> float:
        return max(self.khat, self.khat_sd)

    @property
    def reach(self) -> bool:
        """Whether draws are as wide as the posterior along each dimension."""
        return self.along <= _ALONG

    @property
    def easy(self) -> bool:
        """Whether another sum would better little."""
        return self.worst_khat < EASY and max(self.mean_error, self.sd_error) < self.precise / math.sqrt(2)

    @property
    def hopeful(self) -> bool:
        """Whether more sums than a few are worth it: the weights are sound, and what is missing is more draws, or ones
        in a tail."""
        return self.khat < LARGEST_KHAT and self.integration_error <= INTEGRATED

    @property
    def agrees(self) -> bool:
        """Whether q is as close as can be told."""
        mean, sd = self.of_q
        return mean <= CLOSE + 2 * self.mean_error and sd <= CLOSE + 2 * self.sd_error

    def against(self) -> str | None:
        """Why these draws are no answer; None: they are."""
        largest = min(LARGEST_KHAT, 1 - 1 / math.log10(max(len(self.weights), 11)))
        if not self.khat < largest or not self.khat_sd < largest:
            return f"Pareto k-hat of its weights is {self.worst_khat:.2f} (over {largest:.2f})"
        if self.missed:
            return f"its draws miss {self.missed}"
        if self.funnel:
            return (
                "its draws miss a part of a funnel of the prior, its neck or its mouth: with a normal in place of the "
                f"likelihood, where all is known, they say a {self.funnel}"
            )
        if not self.reach:
            return (
                f"along one dimension the posterior's sd is {self.along:.3g} times that of its draws, which miss a "
                "tail there"
            )
        if self.ess < LEAST_ESS:
            return f"its effective sample size is {self.ess:.0f} (under {LEAST_ESS})"
        if not self.mean_error <= self.precise or not self.sd_error <= self.precise:
            return f"its means and sds are known to {max(self.mean_error, self.sd_error):.2g} sds alone"
        if not self.integration_error <= INTEGRATED:
            return f"latents are integrated out with an error of {self.integration_error:.2g} nats"
        if self.moved > MOVED or self.widened > WIDENED:
            return (
                f"it lies {self.moved:.2g} sds from where a mode was found and is {self.widened:.2g} times as wide: "
                "nobody looked there"
            )
        return None


#: What it means that weighted draws are no answer, and what to do.
_REMEDY = (
    "the posterior has not the form of a few normals near q (tails, modes apart, a bend, an edge): write the model in "
    "other terms (non-centred, on the log scale, with what is alike in an order), or with priors that rule out what "
    "cannot be"
)


class Refining(NamedTuple):
    """The server's state. All of it follows from broadcasts and totals."""

    sums: int  # made so far
    proposal: Tensor  # `mixture`, of the sum to come; () before there is one
    proposals: Tensor  # (sums, PARTS, packed)
    around: Tensor  # `mixture`: q, or a normal of its size at each mode that was found
    seen: Tensor  # (points,) log p(y, z) at those of the final sum, up to a constant
    z: Tensor  # (S, n) draws of all of them
    joint: Tensor  # (S,) log p(y, z), nats relative to log p(y | q's mean)
    other: Tensor  # (S / AGAIN,) the same on other nodes; () where there are no latents
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
        return Refined(self.z, found.weights, found.worst_khat, found.ess, found.log_evidence, found.integration_error)

    @property
    def done(self) -> bool:
        """Whether no more sums are worth it."""
        enough = (self.found.easy and self.sums >= _CONFIRMED) or (self.checks and self.found.agrees)
        most = refining.MORE if self.found.hopeful and not self.sound else refining.SUMS
        return bool(self.lost) or self.sums >= most or (self.sound and enough)

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
            f"{len(found.weights)} draws, weighed by the likelihood of all records, are the result: Pareto "
            f"k-hat {found.worst_khat:.2f}, effective sample size {found.ess:.0f}, means known to "
            f"{found.mean_error:.2g} sds"
        )

    def details(self) -> dict[str, float | None]:
        if not len(self.z):
            return {}
        found = self.found
        numbers = {
            "refined_sums": float(self.sums), "khat": found.worst_khat, "ess": found.ess,
            "log_evidence": found.log_evidence, "integration_error": found.integration_error,
            "refined_mean_error_sd": found.mean_error, "refined_sd_error_log": found.sd_error,
        }  # fmt: skip
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def start() -> Refining:
    """Before there is anything to refine."""
    none = torch.zeros(0, dtype=torch.float64)
    return Refining(0, none, none, none, none, none, none, none, math.nan, Found(none), "", False)


def worthwhile(rest: Rest) -> bool:
    """Whether draws of q say where the posterior is."""
    return rest.seen is not None and bool(torch.isfinite(rest.seen.log_weights).any())


def verdict(of_q: Verdict, state: Refining, fits: bool = True) -> Verdict:
    """Of a run whose q was judged as `of_q`. fits: `Refiner.fits`."""
    if of_q.converged is False and not fits:
        return of_q._replace(remedy=f"{of_q.remedy}; {_NESTED}")
    details = {**of_q.details, **state.details()}
    if state.answer is not None:
        rests = "tables are of these draws; q, on which latents of silos or records, if any, rest alone, is not as near"
        own = "" if of_q.converged else f"; {rests}: {of_q.reason}"
        return Verdict(True, f"{state.reason()}{own}", details)
    against = state.against()
    if against is None:
        return of_q._replace(details=details)
    known = state.found.worst_khat < LARGEST_KHAT and state.found.reach  # means, and sds
    doubts = bool(len(state.z)) and not (known and state.found.agrees and not state.found.funnel)
    own = {"": _REMEDY, ABSENT: "run it again"}.get(state.lost, "")
    remedy = "; ".join(part for part in (of_q.remedy, own) if part)
    return Verdict(bool(of_q.converged) and not doubts, f"{of_q.reason}; {against}", details, remedy=remedy)


class Refiner(refining.Refiner):
    """The server's half, for one problem."""

    def begun(self, q: Natural, rest: Rest, converged: bool) -> Refining | None:
        """Before the first sum: near q itself, where that has converged and is close; where other modes were found near
        all of them; else by the weights of q's draws. None: draws of q say nothing of where the posterior is, there are
        too many modes, or q is close and a sum is dear."""
        if not (self.fits and worthwhile(rest)) or (self.nested and converged):
            return None
        seen, own = rest.seen, q_part(q)
        assert seen is not None
        parts = [own] if seen.apart is None else modes(self.problem, q, seen, refining.PARTS)
        if parts is None:
            return None
        around, at = mixture([(1 / len(parts), part) for part in parts]), points(self.problem, q)
        state = start()._replace(around=around, seen=seen.joint, checks=converged and seen.close)
        found = around
        if not state.checks and len(parts) == 1:
            found = matched(at.draws, seen.log_weights, [(1.0, own)], twins=2)
        return state._replace(proposal=self._asked(state, q, at, found, around))

    def _asked(self, state: Refining, q: Natural, at: Points, proposal: Tensor, instead: Tensor) -> Tensor:
        """What is asked for: the proposal, so narrow that no draw should be out of range; where a silo would not answer
        it, that drawn in to what it does, or what stands in for it: the last proposal once more learns nothing of a
        tail."""
        drawn_in = within(q, proposal, torch.cat([*at.lines, at.scouts]))
        nats = state.seen - first_log_prior(self.problem, at.all)  # what theta has become changes no range
        tried = (in_range(q_part(q), at, nats, each) for each in (proposal, drawn_in, instead))
        return next((each for each in tried if allowed(self.problem, q, each)), instead)

    def step(
        self, state: Refining, message: Broadcast, sums: Totals, q: Natural, theta: Params,
        log_prior: Callable[[Tensor], Tensor], absent: bool,
    ) -> Refining:  # fmt: skip
        """After a sum; absent: whether a silo was."""
        if absent:
            return state._replace(sums=refining.SUMS, lost=ABSENT)
        total = sums[REFINED]
        state = state._replace(sums=state.sums + 1)
        made = message.tensors[PROPOSAL].to("cpu", torch.float64)
        parts = unmixed(made, self.n)
        if hiding.unreadable(total, self.block).any():  # and a silo that hid one answer hides all that follow
            return state._replace(lost=OUT_OF_RANGE)
        nats, z = torch.from_numpy(hiding.read(total, self.block)), self.draws(message)
        prior = finite(over_draws(log_prior, z))
        joint = (nats[1 : 1 + refining.DRAWS] + prior).nan_to_num(nan=-math.inf)
        other = (nats[1 + refining.DRAWS :] + prior[::AGAIN]) if self.again else nats[:0]
        first, at = not len(state.z), points(self.problem, q)
        if first and not self.again:  # latents are integrated out on other nodes there
            scouts = told_scouts(at, state.seen)
            state = state._replace(z=scouts.z, joint=scouts.joint)
        state = state._replace(
            proposals=torch.cat([state.proposals, made[None]]),
            z=torch.cat([state.z, z]),
            joint=torch.cat([state.joint, joint]),
            other=torch.cat([state.other, other]),
            at_mean=float(nats[0]) if first else state.at_mean,
        )
        log_w = state.joint - log_drawn(state, at)
        if not bool(torch.isfinite(log_w).any()):
            return state._replace(lost="no draw has a likelihood")
        found, stand = self._found(state, at, log_w, q, theta), self._stand_in(state, log_w, q, log_prior)
        if stand is not None:
            found = found._replace(funnel=self._funnel(stand, state, log_w, theta))
        state = state._replace(found=found)
        if stand is None:
            made_of = matched(state.z, aimed(log_w, reported(self.problem, state.z, theta)), parts, refining.PARTS)
        else:
            aim = aimed(stand.log_w, reported(self.problem, stand.z, theta))
            made_of = within(q, matched(stand.z, aim, slices(stand, refining.PARTS), refining.PARTS))
        return state._replace(proposal=self._asked(state, q, at, made_of, made))

    def _stand_in(
        self, state: Refining, log_w: Tensor, q: Natural, log_prior: Callable[[Tensor], Tensor]
    ) -> StandIn | None:
        """Where the prior is a funnel, and a normal is like the likelihood as far as draws tell."""
        least = _FIT * (self.n + 1) * (self.n + 2) // 2
        near = normal_of(state.z, share := evened(log_w, least))
        if least > len(state.z) or near is None or self.problem.dtype != torch.float64:  # else all changes by rounding
            return None
        try:
            known = scales(log_prior, torch.stack([q.mean(), state.z[log_w.argmax()]]), q.stddev())
            if known is None:
                return None
            nats = state.joint - over_draws(log_prior, state.z)
            likelihood = normal_like(state.z, nats, share, near)
            instead = (log_w - nats + likelihood(state.z)).nan_to_num(nan=-math.inf)
            if not float(torch.minimum(log_w.softmax(0), instead.softmax(0)).sum()) > _ALIKE:
                return None
            return stand_in(log_prior, likelihood, known, near, self.problem.seed)
        except RuntimeError:  # NotImplementedError is one: a program without second derivatives, or singular matrices
            return None

    def _funnel(self, stand: StandIn, state: Refining, log_w: Tensor, theta: Params) -> str:
        """`Found.funnel`."""
        values = reported(self.problem, torch.cat([stand.z, state.z]), theta)
        known, drawn = values.split([len(stand.z), len(state.z)])
        right = spread(known, smoothed(stand.log_w)[0])
        said = spread(drawn, smoothed(log_w - state.joint + stand.log_density(state.z))[0])
        off = {name: ((said[name] - value) / right["sd"]).abs() for name, value in right.items()}
        off["sd"] = (said["sd"] / right["sd"]).log().abs()
        by = {name: float(o.max().nan_to_num(nan=math.inf)) for name, o in off.items()}
        worst = max(by, key=lambda name: by[name] / _WITHIN[name])
        return f"{worst} that is {by[worst]:.2g} sds off" if by[worst] > _WITHIN[worst] else ""

    def _found(self, state: Refining, at: Points, log_w: Tensor, q: Natural, theta: Params) -> Found:
        weights, khat = smoothed(log_w)
        values = reported(self.problem, state.z, theta)
        mean = weights @ values
        centred = values - mean
        sd = (weights @ centred.square()).sqrt()
        parts = weights[:, None] * (centred / sd), weights[:, None] * ((centred / sd).square() - 1) / 2
        of_mean, of_sd = (float(p.square().sum(0).sqrt().max().nan_to_num(nan=math.inf)) for p in parts)
        log_q = _log_of(q_part(q), state.z)
        of_q = [float(e.abs().max()) for e in errors(values, log_w, log_q - (state.joint - log_w))]
        looked = self.n <= _LOOKED and len(told_scouts(at, state.seen).z) == len(at.scouts)
        moved, widened = (0.0, 1.0) if looked else self._moved(state, weights)
        return Found(
            weights, khat, max(tails(log_w, centred)), float(1 / weights.square().sum()), of_mean, of_sd,
            integration_error=self._integration_error(state, weights),
            log_evidence=state.at_mean + float(torch.logsumexp(log_w, 0)) - math.log(len(log_w)),
            moved=moved, widened=widened, of_q=(of_q[0], of_q[1]), missed=self._missed(state, at, q, theta),
            precise=precise(values.shape[1]), along=self._along(state, weights, at, q),
        )  # fmt: skip

    def _along(self, state: Refining, weights: Tensor, at: Points, q: Natural) -> float:
        """`Found.along`. A line goes through q's mean by what q makes of the others: along it log p(y, z) is the
        dimension's marginal, up to a constant, where the posterior is normal, or has independent dimensions; that of a
        scale of many is wider."""
        if self.n <= _BY_LINES:
            return 1.0
        steps, first = lines_of(at, state.seen)
        share = first.nan_to_num(nan=-math.inf).softmax(1)
        mean = share @ steps
        wide = (share * (steps - mean[:, None]).square()).sum(1).sqrt()
        own = (weights @ (state.z - weights @ state.z).square()).sqrt() / q.stddev()
        return float((wide / own).max().nan_to_num(nan=math.inf))

    def _moved(self, state: Refining, weights: Tensor) -> tuple[float, float]:
        """`Found.moved` and `Found.widened`: of the draws that are nearest to each mode that was found."""
        around = [part for _, part in unmixed(state.around, self.n)]
        nearest = torch.stack([sds_from([part], state.z) for part in around]).argmin(0)
        moved, widened = 0.0, 1.0
        for k, part in enumerate(around):
            own = torch.where(nearest == k, weights, 0.0)
            if float(own.sum()) < _SOME:
                continue
            own, sd = own / own.sum(), part.factor.norm(dim=1)
            at = own @ state.z
            wide = (own @ (state.z - at).square()).sqrt() / sd
            moved = max(moved, float(((at - part.mean) / sd).abs().max()))
            widened = max(widened, float(torch.maximum(wide, 1 / wide).max()))
        return moved, widened

    def _missed(self, state: Refining, at: Points, q: Natural, theta: Params) -> str:
        """`Found.missed`: what the final sum found, and no draw is near."""
        own = q_part(q)
        drawn, joint = (x[-refining.DRAWS * len(state.proposals) :] for x in (state.z, state.joint))
        for other in line_modes(at, state.seen, [own]):
            if not bool(_visits(own, other.z, drawn, joint - other.nats - state.seen[0]).any()):
                return f"a mode near {named(self.problem, other.z, theta)}"
        parts = [part for each in state.proposals for _, part in unmixed(each, self.n)]
        z = torch.cat([drawn, at.scouts])
        scout = elsewhere(at, state.seen, parts, drawn, joint, _log_mixed(state.proposals, z))
        if scout is None or scout.share is None:
            return ""
        return f"{scout.share:.0%} of the posterior's mass, near {named(self.problem, scout.z, theta)}"

    def _integration_error(self, state: Refining, weights: Tensor) -> float:
        """Over the draws that were evaluated twice, weighed by both, so that none that one misses is left out."""
        if not len(state.other):
            return 0.0
        difference = state.other - state.joint[::AGAIN]
        log_share = weights[::AGAIN].log() + difference.clamp(-10, 10) / 2
        share = log_share.softmax(0)
        error = (share @ (difference - share @ difference).square()).sqrt()
        return float(error.nan_to_num(nan=math.inf))


def _visits(own: Part, mode: Tensor, z: Tensor, nats: Tensor) -> Tensor:
    """(S,) whether draws z (S, n), so much likelier than a `mode` (n,), are at it, and not on the way there: of a mode
    in n dimensions all draws lie about sqrt(n) sds beside that way, and are n / 2 nats less likely for it."""
    off = torch.cat([(mode - own.mean)[None], z - mode])
    way, off = torch.linalg.solve_triangular(own.factor, off.mT, upper=False).mT.split([1, len(z)])
    far = float(way.norm())
    along = off @ way[0] / far
    beside = (off.square().sum(1) - along.square()).clamp(min=0)
    near = (along.abs() <= min(_VISITED, far / 2)) & (beside.sqrt() <= _VISITED + math.sqrt(len(mode) - 1))
    return near & (nats > -_AS_LIKELY - beside / 2)


def precise(numbers: int) -> float:
    """The standard error, posterior sds, with which the largest error of so many means is under `_LARGEST_ERROR` as
    often as not; `PRECISE` at most."""
    return min(PRECISE, _LARGEST_ERROR / NormalDist().inv_cdf(1 - 0.25 / max(numbers, 1)))


def aimed(log_w: Tensor, values: Tensor) -> Tensor:
    """(S,) logarithms of weights that are half the posterior's and half those of its squares of `values` (S, numbers),
    standardised: draws that follow them tell sds as well as means, where a posterior has a tail of little mass, as that
    of an sd of few groups. Of those numbers alone whose sds draws do not tell well yet, where there are such: the share
    of one among all is a handful of draws."""
    share = smoothed(log_w)[0]
    centred = values - share @ values
    squares = centred.square() / (share @ centred.square()).clamp(min=_LEAST_VARIANCE)
    hard = torch.tensor([k >= EASY for k in tails(log_w, centred)])
    return torch.logaddexp(log_w, log_w + squares[:, hard if bool(hard.any()) else ~hard].mean(1).log())


def tails(log_w: Tensor, centred: Tensor) -> list[float]:
    """k-hat of the weights times the square of each number of `centred` (S, numbers)."""
    return [smoothed(log_w + 2 * c.abs().log())[1] for c in centred.mT]


def matched(z: Tensor, log_w: Tensor, last: Mixture, most: int = 1, twins: int = 1) -> Tensor:
    """The proposal of up to `most` normals, or as many as the `last` had, that fits draws (S, n) weighed by exp `log_w`
    best, by expectation-maximisation, drawn to the ones that it begins with (`_drawn_to`). twins: how many draws are
    one up to a sign. Weights are evened out until `_ENOUGH` a dimension do: that goes part of the way."""
    least = min(len(z) / 4, max(30.0, _ENOUGH * z.shape[1]))
    share = evened(log_w, least)
    ess = float(1 / share.square().sum())
    parts = _begun(z, share, last, min(most, int(ess / least)))
    targets = [part for _, part in parts]
    for _ in range(_EM if len(parts) > 1 else 1):
        logs = torch.stack([math.log(of_part) + _log_of(part, z) for of_part, part in parts])
        own, parts = share * logs.softmax(0), []
        for each, target in zip(own, targets, strict=True):
            mass = float(each.sum())
            part = _drawn_to(target, z, each / max(mass, 1e-300), twins)
            if part is None:
                return mixture(last)
            parts.append((max(mass, _LEAST_SHARE), part))
        total = sum(of_part for of_part, _ in parts)
        parts = [(of_part / total, part) for of_part, part in parts]
    return mixture(parts)


def _drawn_to(target: Part, z: Tensor, share: Tensor, twins: int) -> Part | None:
    """The normal of the weighted draws' mean and covariance, shrunk to the `target`'s, in units of its sds, by the
    share of their distance that is their own noise (James and Stein 1961; Ledoit and Wolf 2004), or more where few
    draws count, whose noise cannot be seen. None: it is no normal.

    Unshrunk, a covariance of m draws in n dimensions is off by so much that log weights of the next ones vary by
    n^2 / 2m: by 3 of 50 dimensions and 400 draws, of which one draw in twenty counts.
    """
    n, squares = z.shape[1], share.square()
    white = torch.linalg.solve_triangular(target.factor, (z - target.mean).mT, upper=False).mT
    at, eye = share @ white, torch.eye(n, dtype=z.dtype)
    white = white - at
    long = white.square().sum(1)
    spread = white.mT @ (share[:, None] * white)
    noise = long.square() - 2 * ((white @ spread) * white).sum(1) + spread.square().sum()

    def noisy(noise: Tensor, off: Tensor) -> float:
        return min(1.0, twins * float(noise) / max(float(off), 1e-300))

    few = n / (n + float(1 / squares.sum().clamp(min=1e-300)))
    by = max(few, noisy(squares @ noise, (spread - eye).square().sum()))
    root, info = torch.linalg.cholesky_ex((1 - by) * 0.5 * (spread + spread.mT) + by * eye)
    if int(info) or not bool(root.isfinite().all()):
        return None
    moved = (1 - noisy(squares @ long, at.square().sum())) * at
    return Part(target.mean + target.factor @ moved, target.factor @ root)


def _begun(z: Tensor, share: Tensor, last: Mixture, most: int) -> Mixture:
    """The `last` normals, and more, one after the other where weighted draws are farthest from all."""
    parts, at = list(last), share @ z
    spread = (z - at).mT @ (share[:, None] * (z - at))
    root, info = torch.linalg.cholesky_ex(spread)
    while len(parts) < most and not int(info):
        far = sds_from([part for _, part in parts], z)
        parts.append((1.0, Part(z[(share * far.square()).argmax()], root / 2)))
    total = sum(of_part for of_part, _ in parts)
    return [(of_part / total, part) for of_part, part in parts]


class Scouts(NamedTuple):
    """Those that the final sum told of: uniform in a box, of which no other scout is told."""

    z: Tensor  # (m, n)
    joint: Tensor  # (m,) log p(y, z), nats relative to log p(y | q's mean)
    box: Tensor  # (2, n)


def told_scouts(at: Points, joint: Tensor) -> Scouts:
    """joint: at all points of the final sum. A shell with a likelihood out of all range is hidden as a whole, and those
    around it are left out with it."""
    nats, width = joint[len(joint) - len(at.scouts) :], at.box[1] - at.box[0]
    count = int(nats.isfinite().long().cumprod(0).sum()) if len(nats) else 0
    off = ((at.scouts - at.box[0]) / width - 0.5).abs().amax(1)  # ascending
    share = 2 * off[count] if count < len(nats) else off.new_ones(())
    centre = at.box.mean(0)
    return Scouts(
        at.scouts[:count], nats[:count], torch.stack([centre - share * width / 2, centre + share * width / 2])
    )


def log_drawn(state: Refining, at: Points) -> Tensor:
    """(S,) of the mixture of all that `state.z` is drawn from, at these: all proposals and, where scouts come first,
    the box that they lie in, which bounds the weights of a tail, or mode, that no proposal reaches."""
    found, drawn = _log_mixed(state.proposals, state.z), refining.DRAWS * len(state.proposals)
    if len(state.z) == drawn:
        return found
    box = told_scouts(at, state.seen).box
    inside = ((state.z >= box[0]) & (state.z <= box[1])).all(1)
    uniform = torch.where(inside, -(box[1] - box[0]).log().sum(), -math.inf)
    share = drawn / len(state.z)
    return torch.logaddexp(found + math.log(share), uniform + math.log(1 - share))


def _log_mixed(proposals: Sequence[Tensor] | Tensor, z: Tensor) -> Tensor:
    """(S,) of the mixture of all proposals (`mixture`), each in all widths, at z (S, n)."""
    n = z.shape[1]
    widest = _log_along if n > refining.JOINTLY else _log_of
    parts = [
        math.log(share * of_part / len(proposals)) + density(part, z, width)
        for each in proposals
        for of_part, part in unmixed(each, n)
        for (share, _), width, density in zip(WIDTHS, wider(n), (_log_of, _log_of, widest), strict=True)
    ]
    return torch.logsumexp(torch.stack(parts), 0)


def _log_of(part: Part, z: Tensor, width: float = 1.0) -> Tensor:
    """(S,) of a normal, so many times as wide, at z (S, n)."""
    square = (sds_from([part], z) / width).square()
    return -0.5 * square - 0.5 * z.shape[1] * LOG_2PI - (width * part.factor.diagonal()).log().sum()


def _log_along(part: Part, z: Tensor, width: float) -> Tensor:
    """(S,) of a normal that is so many times as wide along one dimension, which is any, at z (S, n)."""
    by = ((z - part.mean) / part.factor.norm(dim=1)).square()
    return _log_of(part, z) + torch.logsumexp(0.5 * (1 - width**-2) * by, 1) - math.log(width * z.shape[1])


def smoothed(log_w: Tensor) -> tuple[Tensor, float]:
    """Pareto-smoothed weights (S,), adding up to 1, and k-hat, infinite where a tail has no spread to fit."""
    from arviz_stats.base.array import array_stats  # a second to import

    log_w = log_w.nan_to_num(nan=-math.inf)
    log_w = log_w.clamp(min=float(log_w.max()) - _NOTHING)
    with np.errstate(divide="ignore", invalid="ignore"):
        try:
            found, khat = array_stats.psislw(-log_w.numpy())  # it takes ratios by what leaves a record out
        except ValueError:  # all of a tail are the same
            return log_w.softmax(0), math.inf
    if not np.isfinite(found).all() or not math.isfinite(khat):
        return log_w.softmax(0), math.inf
    return torch.from_numpy(np.asarray(found)).softmax(0), float(khat)


# ---- a stand-in for the posterior, of which all is known ----


class StandIn(NamedTuple):
    """Prior times a normal in place of the likelihood."""

    z: Tensor  # (S, n) draws
    log_w: Tensor  # (S,) logarithms of their weights
    narrow: Tensor  # (S,) log density at the top of what is normal given the others
    log_density: Callable[[Tensor], Tensor]  # (S, n) to (S,) nats, up to a constant


def scales(log_prior: Callable[[Tensor], Tensor], at: Tensor, sd: Tensor) -> Tensor | None:
    """(n,) which dimensions have to be known for the others to be normal under the prior, found by how its curvature
    changes around each of at (S, n), by `sd` (n,) along one dimension after the other. None: those others are normal,
    or nothing, whatever these are, so that there is no funnel."""
    n = len(sd)
    around = torch.cat([torch.zeros(1, n, dtype=sd.dtype), sd.diag()])
    curved = over_draws(torch.func.jacrev(torch.func.grad(log_prior)), (at[:, None] + around).flatten(0, 1))
    curved = curved.unflatten(0, (-1, 1 + n)) * sd * sd[:, None]
    changes = (curved[:, 1:] - curved[:, :1]).abs() > _CURVED * (1 + curved[:, :1].abs())
    changes, known = changes.any(0), torch.zeros(n, dtype=torch.bool)
    left = changes
    while bool(left.any()):
        most = left.sum((1, 2)) + left.sum((0, 2)) + left.sum((0, 1))
        known[most.argmax()] = True
        rest = ~known
        left = changes & rest[:, None, None] & rest[:, None] & rest
    return known if bool(changes[known][:, ~known][:, :, ~known].any()) else None


class Likelihood(NamedTuple):
    """A normal in its place: nats at `at`, slope there, and minus the curvature, which is never negative."""

    at: Tensor  # (n,)
    value: Tensor
    slope: Tensor  # (n,)
    precision: Tensor  # (n, n)

    def __call__(self, z: Tensor) -> Tensor:
        off = z - self.at
        return self.value + off @ self.slope - 0.5 * ((off @ self.precision) * off).sum(1)


def normal_like(z: Tensor, nats: Tensor, share: Tensor, near: Part) -> Likelihood:
    """The one that fits nats (S,) best at draws z (S, n) of this `share` (S,), by least squares in coordinates in which
    the normal `near` is a standard one."""
    n, told = z.shape[1], (share > 0) & nats.isfinite()
    rows, cols = torch.tril_indices(n, n)
    white = torch.linalg.solve_triangular(near.factor, (z[told] - near.mean).mT, upper=False).mT
    columns = torch.cat([white.new_ones(len(white), 1), white, white[:, rows] * white[:, cols]], 1)
    by = share[told].sqrt()[:, None]
    value, slope, curve = (
        torch.linalg.lstsq(by * columns, by * nats[told][:, None]).solution[:, 0].split([1, n, len(rows)])
    )
    half = from_lower(-curve, n)
    values, vectors = torch.linalg.eigh(half + half.mT)
    back = torch.linalg.solve_triangular(near.factor, torch.eye(n, dtype=z.dtype), upper=False)
    half = values.clamp(min=0).sqrt()[:, None] * vectors.mT @ back
    return Likelihood(near.mean, value, back.mT @ slope, half.mT @ half)


def stand_in(
    log_prior: Callable[[Tensor], Tensor], likelihood: Likelihood, known: Tensor, near: Part, seed: int
) -> StandIn | None:
    """Draws of it. Given the `known` dimensions (n,) the others are normal; the known ones are sampled as the posterior
    is, beginning where the normal `near` has them. None: that did not tell."""
    at, others, unit = likelihood.at, ~known, near.factor.norm(dim=1)
    inner = others[:, None] & others

    def given(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The log density of the known ones at s (S, k), z with the others at their mean, and the root of the others'
        precision, in `unit`s."""
        z = at.repeat(len(s), 1)
        z[:, known] = s
        for _ in range(2):  # once more from near their mean: far from it huge numbers cancel
            curved, slope, value = over_draws(_curved(log_prior), z)
            slope = ((slope + likelihood.slope - (z - at) @ likelihood.precision) * unit)[:, others]
            precision = ((likelihood.precision - curved) * torch.outer(unit, unit))[:, inner]
            root, info = torch.linalg.cholesky_ex(precision.unflatten(1, slope.shape[1:] * 2))
            step = torch.cholesky_solve(slope[..., None], root)[..., 0]
            log = finite(value) + likelihood(z) + 0.5 * (slope * step).sum(1)
            z[:, others] += step * unit[others]
        sizes = root.diagonal(dim1=1, dim2=2)
        told = (info == 0) & (sizes.amin(1) > _LEAST_PIVOT * sizes.amax(1))
        return torch.where(told, finite(log - sizes.log().sum(1)), -math.inf), z, root

    covariance = (near.factor @ near.factor.mT)[known][:, known]
    start = Part(near.mean[known], torch.linalg.cholesky(covariance))
    if (found := sampled(lambda s: given(s)[0], start, seed)) is None:
        return None
    _, z, root = given(found[0])
    z, root, log_w = (t.repeat(_OFTEN, *[1] * (t.dim() - 1)) for t in (z, root, found[1]))
    eps = server_draws(seed).normals(_TRIES, len(z) * int(others.sum()))[0].reshape(len(z), -1)
    z[:, others] += torch.linalg.solve_triangular(root.mT, eps[..., None], upper=True)[..., 0] * unit[others]
    narrow, told = root.diagonal(dim1=1, dim2=2).log().sum(1), z.isfinite().all(1) & log_w.isfinite()
    return StandIn(z[told], log_w[told], narrow[told], lambda z: finite(over_draws(log_prior, z)) + likelihood(z))


def _curved(log_prior: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Second derivatives, first ones and the value, at one point (n,)."""

    def slope(z: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first, value = torch.func.grad_and_value(log_prior)(z)
        return first, (first, value)

    def at(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        second, (first, value) = torch.func.jacrev(slope, has_aux=True)(z)
        return second, first, value

    return at


def within(q: Natural, proposal: Tensor, told: Tensor | None = None) -> Tensor:
    """A proposal with its normals no farther from q, or from the nearest of points (m, n) of the final sum, no wider
    and no narrower than a silo answers."""
    own, parts = q_part(q), []
    places = own.mean[None] if told is None else torch.cat([own.mean[None], told])
    for share, part in unmixed(proposal, q.n):
        left, by, _ = torch.linalg.svd(torch.linalg.solve_triangular(own.factor, part.factor, upper=False))
        most = refining.LIKE_Q * _INSIDE
        wide = own.factor @ left * by.clamp(1 / most, most)
        at = places[sds_from([part._replace(factor=own.factor)], places).argmin()]
        far = float(sds_from([own._replace(mean=at)], part.mean[None]))
        mean = at + (part.mean - at) / max(1.0, far / (refining.FROM_Q * _INSIDE))
        parts.append((share, Part(mean, torch.linalg.cholesky(wide @ wide.mT))))
    return mixture(parts)


def in_range(own: Part, at: Points, nats: Tensor, proposal: Tensor) -> Tensor:
    """A proposal with its normals so narrow along each dimension's line that no draw lies beyond where the likelihood
    falls out of all range. nats: log p(y | z) at the final sum's points; a prior falls farther, down a funnel's neck,
    and no silo is asked for it. Where it does far off, as that of counts of nothing does on one side, the other side's
    tail is told all the same."""
    steps, along = lines_of(at, nats)
    told = (along > nats[0] - 2.0**_SAFE)[:, 1:].reshape(len(along), 2, -1).long().cummin(2).values.sum(2)
    limits = torch.where(told == int(steps.max()), math.inf, told.to(along))  # (n, 2) sds of q
    ways = own.factor / own.factor.norm(dim=1, keepdim=True)  # (n, n) a row a line, in coordinates in which q is round
    reach, parts = _FARTHEST * max(wider(len(ways))), []
    for share, part in unmixed(proposal, len(ways)):
        white = torch.linalg.solve_triangular(
            own.factor, torch.cat([(part.mean - own.mean)[:, None], part.factor], 1), upper=False
        )
        mean, factor, narrowed = white[:, 0], white[:, 1:], False
        for way, (ahead, behind) in zip(ways, limits, strict=True):
            room = torch.minimum(ahead - way @ mean, behind + way @ mean) / (reach * (way @ factor).norm())
            if 0 < float(room) < 1:  # a mode beyond, as mirrors find them, is on no line that was looked at
                factor = factor - (1 - room.clamp(min=_NARROWEST)) * torch.outer(way, way @ factor)
                narrowed = True
        if narrowed:
            wide = own.factor @ factor
            part = part._replace(factor=torch.linalg.cholesky(wide @ wide.mT))
        parts.append((share, part))
    return mixture(parts)


def slices(stand: StandIn, most: int) -> Mixture:
    """A normal for each stretch of a funnel, from its neck to its mouth."""
    share, order = smoothed(stand.log_w)[0], stand.narrow.argsort()
    below = share[order].cumsum(0)
    first, last = (float(stand.narrow[order][int((below < p).sum())]) for p in (_ENDS, 1 - _ENDS))
    which = torch.bucketize(stand.narrow, torch.linspace(first, last, most + 1, dtype=torch.float64)[1:-1].contiguous())
    found = [
        (float(own.sum()), normal_of(stand.z, own / own.sum())) for own in (share * (which == k) for k in range(most))
    ]
    parts = [(of_part, part) for of_part, part in found if part is not None]
    total = sum(of_part for of_part, _ in parts)
    return [(of_part / total, part) for of_part, part in parts]


def spread(values: Tensor, share: Tensor) -> dict[str, Tensor]:
    """What `_WITHIN` names, of each of values (S, k)."""
    mean, order = share @ values, values.argsort(0)
    below, values_up = share[order].cumsum(0), values.gather(0, order)
    low, high = (values_up.gather(0, (below < p).sum(0, keepdim=True))[0] for p in (0.05, 0.95))
    sd = (share @ (values - mean).square()).sqrt()
    return dict(zip(_WITHIN, (mean, sd, low, high), strict=True))


def sampled(log_density: Callable[[Tensor], Tensor], start: Part, seed: int) -> tuple[Tensor, Tensor] | None:
    """Draws (S, n) of a density that costs no sum, and the logarithms of their weights, by proposals that follow one
    another from `start` on as in `Refiner.step`. None: they do not tell it well."""
    parts, proposals, z, log = [(1.0, start)], list[Tensor](), start.mean.new_zeros(0, len(start.mean)), start.mean[:0]
    for k in range(_TRIES):
        new = refining.drawn(parts, refining.DRAWS, seed + k)
        proposals, z, log = [*proposals, mixture(parts)], torch.cat([z, new]), torch.cat([log, log_density(new)])
        log_w = log - _log_mixed(proposals, z)
        if not bool(torch.isfinite(log_w).any()):
            return None
        share, khat = smoothed(log_w)
        if max(khat, *tails(log_w, z - share @ z)) < EASY and float(1 / share.square().sum()) > _KNOWN_BY:
            return z, log_w
        parts = unmixed(matched(z, aimed(log_w, z), parts, refining.PARTS), len(start.mean))
    return None


def normal_of(z: Tensor, share: Tensor) -> Part | None:
    at = share @ z
    root, info = torch.linalg.cholesky_ex((z - at).mT @ (share[:, None] * (z - at)))
    return None if int(info) else Part(at, root)


def evened(log_w: Tensor, least: float) -> Tensor:
    """(S,) shares that follow exp `log_w` as far as an effective `least` of them do."""
    log_w = log_w.clamp(min=float(log_w.max()) - _NOTHING)
    for power in torch.linspace(1.0, 0.02, 50).tolist():
        share = (power * log_w).softmax(0)
        if float(1 / share.square().sum()) >= least:
            break
    return share
