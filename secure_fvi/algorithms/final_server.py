"""At the server: what the final sum says of q. `Rest`: how far from a stationary point of the bound it is
(`stationarity`); `Weighed`: how far from the posterior (`weighing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms import hiding
from secure_fvi.algorithms.base import Problem, Verdict
from secure_fvi.algorithms.natural import Natural, distance, times
from secure_fvi.algorithms.stationarity import CURVE, SLOPE, TOLD_TOGETHER, VALUE, blocks, packed
from secure_fvi.algorithms.weighing import (
    APART,
    UP_TO,
    VALLEY,
    WEIGHED,
    Part,
    Points,
    block_of,
    finite,
    mirrored,
    points,
    q_part,
    sds_from,
    wide,
)
from secure_fvi.compiled import over_draws
from secure_fvi.families import Params
from secure_fvi.families.gaussian import LOG_2PI, from_lower, lower

#: A run may be called converged where one step from its q would go at most so far, in posterior sds.
AT_REST = 0.15
#: And where the step's Monte-Carlo error, 3 standard errors, is at most so large.
SLOPE_PRECISE = 0.3
#: What a run that is at rest says where nobody looked how near to the posterior the best q is: of variances of many
#: groups, say, the best has been seen with means .6 sds off and sds a third of what they are.
UNWEIGHED = (
    f"q was not weighed, as one of a full covariance and at most {UP_TO} dimensions is: nobody has looked whether the "
    "best of its family is near the posterior, and it may have means off and sds far too small, of scales and their "
    "effects most of all. Fewer dimensions, or groups that are each at one silo, are weighed; compare with a full "
    "covariance where q has another"
)
#: A run may be called converged where means are at most so far off, in posterior sds, sds so much too small or too
#: large, in logs, and where the standard error of these is no larger.
MEAN_WITHIN, SD_WITHIN, PRECISE = 0.15, (-0.14, 0.12), 0.1
#: What is farther off than this, a mean in posterior sds or the log of an sd, is worth refining.
CLOSE = 0.05
_REMEDY = (
    "raise local_steps where a silo has latents of its own, or write the model in parameters whose posterior is nearer "
    "to normal (non-centred effects, sums in place of products); in a formula, let groups be local where each is at "
    "one silo, or give their sds priors that rule out what cannot be"
)
_BEGIN = (
    "begin at the mode that holds most: by the model's start, or, in PVI, by priors that are as narrow as that mode"
)
#: Farther than `APART` + sqrt(n) sds from q's mean they may hold so much of the mass. By Markov's inequality tails
#: that have m of it there are taken for that in about m / _MISSED of runs at most.
_MISSED = 0.05
#: A point d sds, `APART` at least, from q's mean is another mode, if its density is at least exp(-_LOWER) of that
#: there, or `_MATTERS` / d^2, so that a mode as wide as q adds that share to the variance, with a valley of
#: exp(-VALLEY) between.
_LOWER, _MATTERS = 5.0, 0.3


class Rest(NamedTuple):
    """What the final sum tells of q. Everyone may see it."""

    step: float = math.inf  # posterior sds, or log sds, by which an undamped step would move q; infinite: it has no end
    error: float = math.inf  # the step's Monte-Carlo error, one standard error
    objective: float = math.nan  # the bound at q, nats, by all silos; NaN before it is known
    weighed: Weighed | None = None  # None: too many dimensions, or a family that is not full
    far: bool = False  # whether some silo's part was too large to tell, or no number

    @property
    def known(self) -> bool:
        """Whether all silos have answered."""
        return self.far or not math.isnan(self.objective)

    @property
    def bound(self) -> float | None:
        return None if math.isnan(self.objective) else self.objective

    @property
    def stationary(self) -> bool:
        return math.isfinite(self.step) and self.step <= AT_REST + 2 * self.error and 3 * self.error <= SLOPE_PRECISE

    def details(self) -> dict[str, float | None]:
        finite = math.isfinite(self.step) and math.isfinite(self.error)
        found = {"step_sd": self.step if finite else None, "step_error_sd": self.error if finite else None}
        return found if self.seen is None else {**found, **self.seen.details()}

    @property
    def seen(self) -> Weighed | None:
        """`weighed`; a checkpoint, which is read by what it was before the first round, gives its numbers alone."""
        return None if self.weighed is None else Weighed(*self.weighed)


def verdict(rest: Rest, settled: str | None, found: str, advice: str) -> Verdict:
    """Of a run that stops by itself. settled: what is against it, None where nothing is. found: what is for it."""
    if settled is not None:
        return unsettled(rest, settled, advice)
    if not rest.known:
        return unsettled(rest, "a silo was missing when the final q was checked", "run it again")
    if rest.far:
        what = "at the final q some silo's part of the bound, or of its slope, is out of all range, or no number"
        return unsettled(rest, f"{found}, but {what}", advice)
    against = rest.seen and rest.seen.against()
    if rest.stationary and rest.seen and against:
        return Verdict(False, f"{found}, but {against}", rest.details(), remedy=rest.seen.remedy)
    if rest.stationary:
        slope = f"at the final q the slope of the bound over all records would move it by {rest.step:.2g} sds"
        if rest.seen is None:
            return Verdict(None, f"{found}, and {slope}, but {UNWEIGHED}", rest.details())
        return Verdict(True, f"{found}, and {slope}", rest.details())
    if math.isinf(rest.step):
        what = "at the final q the bound over all records is not even curved downwards: q is far from any optimum"
        return unsettled(rest, f"{found}, but {what}", advice)
    if rest.step <= AT_REST + 2 * rest.error:
        what = f"the slope of the bound at the final q is too noisy to tell (error {rest.error:.2g} sds)"
        return unsettled(rest, what, advice)
    what = f"at the final q the slope of the bound over all records would still move it by {rest.step:.2g} sds"
    return unsettled(rest, f"{found}, but {what}", advice)


def unsettled(rest: Rest, reason: str, remedy: str) -> Verdict:
    """Of a run that ended elsewhere than at rest, for this `reason`: what was found far from q goes with it, since more
    rounds alone do not lead there."""
    seen = rest.seen
    if seen is not None and seen.apart is not None:
        reason, remedy = f"{reason}; besides, {seen.against()}", f"{remedy}; {seen.remedy}"
    return Verdict(False, reason, rest.details(), remedy=remedy)


def at_rest(
    problem: Problem,
    q: Natural,
    theta: Params,
    log_prior: Callable[[Tensor], Tensor],
    eps: Tensor,
    sums: Mapping[str, FloatArray],
    most: float,
) -> Rest:
    """What the silos' total says, with the server's own part: the prior and q. most: of `blocks`."""
    mine = {block.name: block for block in blocks(q.n, q.full, most)}
    far, steep = (any(hiding.unreadable(sums[b], mine[b]).any() for b in group) for group in TOLD_TOGETHER)
    told = {name: hiding.read(sums[name], block) for name, block in mine.items()}
    z = q.mean() + times(q.factor(), eps.flatten(0, 1))
    gradient, value = over_draws(torch.func.grad_and_value(log_prior), z)
    own_slope, own_curve = packed(q, eps, gradient.reshape(eps.shape))
    outer = torch.stack([lower(e.mT @ e / len(e)) if q.full else e.square().mean(0) for e in eps])
    slopes = torch.from_numpy(told[SLOPE] + own_slope.reshape(2, -1)) + eps.mean(1)
    curves = torch.from_numpy(told[CURVE] + own_curve.reshape(2, -1)) + outer
    log_q = -0.5 * eps.square().sum(-1).mean() - 0.5 * q.n * math.log(2 * math.pi) - _log_det(q)
    objective = math.nan if far else float(told[VALUE]) + float(value.mean() - log_q)
    if steep:
        return Rest(objective=objective, far=True)
    end = _end(q, slopes.mean(0), curves.mean(0))
    error = distance(_end(q, slopes[0], curves[0]), _end(q, slopes[1], curves[1])) / 2
    found = Rest(distance(q, end), error, objective, far=far)
    if WEIGHED not in sums:
        return found
    at = points(problem, q)
    return found._replace(weighed=weighed(problem, q, theta, at, sums[WEIGHED], log_prior))


def _log_det(q: Natural) -> Tensor:
    factor = q.factor()
    return (factor.diagonal() if q.full else factor).log().sum()


def _end(q: Natural, slope: Tensor, curve: Tensor) -> Natural:
    """Where an undamped step ends; improper where it has no end."""
    mean, factor = q.mean(), q.factor()
    if not q.full:
        precision = (1 - curve) / factor.square()
        return Natural(slope / factor + precision * mean, precision)
    white = torch.eye(q.n, dtype=torch.float64) - from_lower(curve, q.n, True)
    back = torch.linalg.solve_triangular(factor, torch.eye(q.n, dtype=torch.float64), upper=False)
    precision = back.mT @ white @ back
    precision = 0.5 * (precision + precision.mT)
    return Natural(back.mT @ slope + precision @ mean, precision)


class Weighed(NamedTuple):
    """What the likelihood at draws of q and far from them says. Everyone may see it."""

    mean: float  # largest error of a reported mean, in posterior sds
    sd: float  # largest error of a reported sd, in logs: below zero, it is too small
    error: float  # of these two, one standard error
    apart: float | None = None  # sds of q from its mean to another mode; None: none was found
    log_weights: Tensor = torch.zeros(0)  # (2 HALF,) of the draws, up to a constant
    nats: float = 0.0  # by which that mode is likelier than q's mean
    share: float | None = None  # of the posterior's mass that scouts find away from q, where they found the mode
    where: str = ""  # values of the sites there
    joint: Tensor = torch.zeros(0)  # (points,) log p(y, z) at all of them, up to a constant; -inf: out of range

    def against(self) -> str | None:
        """Why q is not the posterior; None: within tolerance."""
        if self.apart is not None:
            by = f"{abs(self.nats):.0f} nats {'more' if self.nats > 0 else 'less'} likely"
            likely = "about as likely" if abs(self.nats) < _LOWER else by
            if self.share is not None:
                return (
                    f"points all over the prior find {self.share:.0%} of the posterior's mass elsewhere: near "
                    f"{self.where}, {self.apart:.0f} sds of q from its mean, a point is {likely}"
                )
            return (
                f"another mode of the posterior, {likely}, lies {self.apart:.0f} sds of q away, near {self.where}, and "
                "q covers one alone"
            )
        if not self.finite or self.error > PRECISE:
            return (
                "weighed by the likelihood of all records, draws of q do not even tell its means and sds: q is far "
                "from the posterior"
            )
        if self.mean <= MEAN_WITHIN and SD_WITHIN[0] <= self.sd <= SD_WITHIN[1]:
            return None
        return (
            f"weighed by the likelihood of all records, its means are {self.mean:.2g} sds off and its sds "
            f"{math.exp(self.sd):.2g} times what they should be (each at worst): no Gaussian is near the posterior, "
            "or q has not settled"
        )

    @property
    def remedy(self) -> str:
        """What to try where `against` says something."""
        if self.apart is None:
            return _REMEDY
        if self.share is not None:
            return _BEGIN
        return (
            "write the model so that it has one mode (a sign fixed, components in order, an angle cut where no data "
            f"are), or {_BEGIN}"
        )

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self[:3]))

    @property
    def close(self) -> bool:
        """Whether nothing would be gained by weighing more draws."""
        return self.finite and self.mean <= CLOSE and abs(self.sd) <= CLOSE

    def details(self) -> dict[str, float | None]:
        mean, sd, error = self[:3] if self.finite else (None, None, None)
        other = {"other_mode_sd": self.apart, "mass_elsewhere": self.share}
        return {"mean_error_sd": mean, "sd_error_log": sd, "weighing_error_sd": error, **other}


def weighed(
    problem: Problem, q: Natural, theta: Params, at: Points, total: FloatArray, log_prior: Callable[[Tensor], Tensor]
) -> Weighed:
    """What the silos' total at `at.all` says, with the server's own part: the prior and q."""
    prior = over_draws(log_prior, at.all)
    block = block_of(problem)
    told = np.where(hiding.unreadable(total, block), -math.inf, hiding.read(total, block))
    joint = torch.from_numpy(told) + finite(prior)
    log_q, by = -0.5 * at.eps.square().sum(-1), wide(q.n)
    log_drawn = torch.logaddexp(log_q, log_q / by**2 - q.n * math.log(by))
    log_w, log_v = joint[1 : 1 + len(at.draws)] - log_drawn, log_q - log_drawn
    values = reported(problem, at.draws, theta)
    half = len(at.draws) // 2
    halves = [errors(values[part], log_w[part], log_v[part]) for part in (slice(0, half), slice(half, None))]
    mean, sd = errors(values, log_w, log_v)
    error = max(float((a - b).abs().max()) / 2 for a, b in zip(*halves, strict=True))
    scout = elsewhere(at, joint, *_of_draws(q, at, joint))
    others = [scout] if scout is not None else line_modes(at, joint, [q_part(q)])
    found = Weighed(float(mean.abs().max()), float(sd[sd.abs().argmax()]), error, log_weights=log_w, joint=joint)
    if not others:
        return found
    other = max(others, key=lambda o: o.nats)
    return found._replace(apart=other.sds, nats=other.nats, share=other.share, where=named(problem, other.z, theta))


def named(problem: Problem, z: Tensor, theta: Params) -> str:
    """The first few sites' values at z (n,), in words."""
    values = problem.density.constrain(z.to(problem.device, problem.dtype), theta)[0]
    some = [f"{name} = {', '.join(f'{v:.3g}' for v in value.flatten()[:4].tolist())}" for name, value in values.items()]
    return ", ".join(some[:4])


def reported(problem: Problem, z: Tensor, theta: Params) -> Tensor:
    """(S, numbers) of the global sites as a result gives them, but those that are constant (zeros of a triangle)."""
    values = over_draws(lambda z: problem.density.constrain(z, theta)[0], z.to(problem.device, problem.dtype))
    found = torch.cat([value.reshape(len(z), -1) for value in values.values()], 1).to("cpu", torch.float64)
    return found[:, (found != found[:1]).any(0)]


def errors(values: Tensor, log_w: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor]:
    """By how much q's means are off, in posterior sds, and its sds, in logs; infinite where it cannot be told. log_w,
    log_v: weights of the draws that make them the posterior's, and q's."""
    (mean, sd), (own_mean, own_sd) = _moments(values, log_w), _moments(values, log_v)
    return ((own_mean - mean) / sd).nan_to_num(nan=math.inf), (own_sd / sd).log().nan_to_num(nan=math.inf)


def _moments(values: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    share = log_w.softmax(0)
    mean = share @ values
    return mean, (share @ (values - mean).square()).sqrt()


class Other(NamedTuple):
    """Another mode, or a point near it."""

    sds: float  # from the nearest part's mean
    nats: float  # by which it is likelier than q's mean
    z: Tensor  # (n,)
    share: float | None = None  # as in `Weighed`
    line: int = -1  # on which it lies


def line_modes(at: Points, joint: Tensor, parts: list[Part]) -> list[Other]:
    """Other modes along lines, the likeliest of each, that are far from all `parts`."""
    here, found, start = float(joint[0]), [], 1 + len(at.draws)
    for line, z in enumerate(at.lines):
        values, start = joint[start : start + len(z)], start + len(z)
        far = sds_from(parts, z)
        lowest = torch.cat([torch.full((1,), here, dtype=values.dtype), values]).cummin(0).values[:-1]
        least = here - (2 * far.log() - math.log(_MATTERS)).clamp(min=_LOWER)
        other = (far > APART) & (values > least) & (lowest < torch.clamp(values, max=here) - VALLEY)
        if bool(other.any()):
            k = int(torch.where(other, values, -math.inf).argmax())
            found.append(Other(float(far[k]), float(values[k]) - here, z[k], line=line))
    return found


def _of_draws(q: Natural, at: Points, joint: Tensor) -> tuple[list[Part], Tensor, Tensor, Tensor]:
    """The arguments of `elsewhere` for q and its own draws."""
    part, by = q_part(q), wide(q.n)
    square = sds_from([part], torch.cat([at.draws, at.scouts])).square()
    log_q = -0.5 * square - 0.5 * q.n * LOG_2PI - part.factor.diagonal().log().sum()
    log_wide = log_q + 0.5 * square * (1 - by**-2) - q.n * math.log(by)
    log_drawn = torch.logaddexp(log_q, log_wide) - math.log(2)
    return [part], at.draws, joint[1 : 1 + len(at.draws)], log_drawn


def elsewhere(
    at: Points, joint: Tensor, parts: list[Part], draws: Tensor, told: Tensor, log_drawn: Tensor
) -> Other | None:
    """The scout that holds most of the posterior's mass of those far from all `parts`, where all such hold `_MISSED` of
    it and more. told: log p(y, z) at `draws`; log_drawn: the log density of what these were drawn from, at them and
    the scouts.

    By the balance heuristic: each point, a draw or a scout, is weighed by the density of all of them together.
    """
    shares = _shares_of_scouts(at, joint, parts, draws, told, log_drawn)
    if not float(shares.sum()) > _MISSED:  # not so either where there are none, or none could be told
        return None
    best = int(shares.argmax())
    z = at.scouts[best]
    far, nats = float(sds_from(parts, z[None])), float(joint[best - len(at.scouts)] - joint[0])
    return Other(far, nats, z, float(shares.sum()))


def _shares_of_scouts(
    at: Points, joint: Tensor, parts: list[Part], draws: Tensor, told: Tensor, log_drawn: Tensor
) -> Tensor:
    """(scouts,) of the mass; 0 of those near a part."""
    if not len(at.scouts):
        return at.scouts.new_zeros(0)
    z, n = torch.cat([draws, at.scouts]), draws.shape[1]
    inside = ((z >= at.box[0]) & (z <= at.box[1])).all(1)
    log_scouts = math.log(len(at.scouts)) - (at.box[1] - at.box[0]).log().sum()
    by = torch.logaddexp(log_drawn + math.log(len(draws)), torch.where(inside, log_scouts, -math.inf))
    shares = (torch.cat([told, joint[-len(at.scouts) :]]) - by).softmax(0)[len(draws) :]
    return torch.where(sds_from(parts, at.scouts) > APART + math.sqrt(n), shares, 0.0)


def modes(problem: Problem, q: Natural, seen: Weighed, most: int) -> list[Part] | None:
    """q, and a part of its size at each other mode that the final sum found, images of images among them; None: these
    are more than `most`."""
    at, own = points(problem, q), q_part(q)
    found = _likeliest(own, line_modes(at, seen.joint, [own]))
    straight, parts, maps, met = len(at.lines) - len(at.mirrors), [own], [], [own]
    for by in (at.mirrors[o.line - straight] for o in found if o.line >= straight):
        image = mirrored(by, own)
        if float(sds_from(met, image.mean[None])) > APART:  # of maps to one mode the first alone: the simplest
            maps.append(by)
            met.append(image)
    for part in parts:  # which grows
        for image in (mirrored(by, part) for by in maps):
            if float(sds_from(parts, image.mean[None])) > APART:
                parts.append(image)
        if len(parts) > most:
            return None
    shares = _shares_of_scouts(at, seen.joint, *_of_draws(q, at, seen.joint))
    heavy = [at.scouts[k] for k in shares.argsort(descending=True).tolist() if float(shares[k]) > _MISSED / most]
    for z in [o.z for o in sorted(found, key=lambda o: -o.nats) if o.line < straight] + heavy:
        if float(sds_from(parts, z[None])) > APART:
            parts.append(Part(z, own.factor))
    return parts[:most]


def _likeliest(own: Part, found: list[Other]) -> list[Other]:
    """Without those that are on the slope of a likelier one, far nearer to it than to q: components that change places
    without their shares, say."""

    def on_slope(o: Other) -> bool:
        above = [p.z for p in found if p.nats > o.nats + 1]
        return bool(above) and float(sds_from([own._replace(mean=o.z)], torch.stack(above)).min()) < o.sds / 4

    return [o for o in found if not on_slope(o)]
