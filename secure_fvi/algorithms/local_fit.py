"""A silo's local fit in partitioned VI and its baselines: q(Z_G) against cavity x the silo's own likelihood, by steps
that need no exchange (Ashman et al. 2022, sections 3.1 to 3.3).

    q(Z_G)           Newton's steps by many draws, natural gradients or any torch optimiser by one draw a step
    q(Z_L | Z_G)     a silo's own latents, relative to a mean of Z_G that moves from step to step and from fit to fit
    without noise    closed form, fixed-point and gradient steps, for models without local latents

It meets no site and no message: an algorithm says against which cavity, and what becomes of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from secure_fvi.aggregation.base import Block, FloatArray
from secure_fvi.algorithms.base import Broadcast, LocalFit, Problem, SiloView
from secure_fvi.algorithms.eliminated import eliminates, joint_of, nearer_mode, silo_params, solved, to_mode
from secure_fvi.algorithms.natural import (
    Natural,
    distance,
    draws,
    fixed_noise,
    from_moments,
    matching,
    packed_size,
    quadratic,
    times,
    unpack,
)
from secure_fvi.algorithms.refining import Refiner
from secure_fvi.algorithms.stationarity import SiloSlope, silo_inputs
from secure_fvi.algorithms.weighing import Weigher, points
from secure_fvi.compiled import Traced, over_draws, waiting
from secure_fvi.density import LogDensity
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.families import Amortised, Conditional, Full, LocalFamily, Params, global_family
from secure_fvi.families.conditional import ENCODER
from secure_fvi.families.gaussian import INITIAL_SCALE, eta_of, lower, unit_lower
from secure_fvi.objective import SiloFunction, SiloGradient, silo_gradient, vjp
from secure_fvi.optimizers import Optimizer, local_units
from secure_fvi.options import SCHEDULES, Bound, Count, Part, Positive, Share, Spread, check
from secure_fvi.randomness import start_draws
from secure_fvi.trees import merge, part, take, write

#: Local optimisers that are no `torch.optim` class.
CLOSED_FORM, NATURAL, FIXED_POINT, GRADIENT = "closed_form", "natural", "fixed_point", "gradient"
#: Those without noise of their own, for models without local latents.
EXACT = (CLOSED_FORM, FIXED_POINT, GRADIENT)
#: A silo's first fit takes so many times the steps, since its own latents start from nothing.
FIRST_FIT = 4
#: The default rate of natural gradients of a full covariance of n dimensions is at most this over n + 1.
_RATE_BY_SIZE = 2.0
#: The block of a change of q, and how many times the bound of other numbers it may take.
CHANGE, _ROOM = "change", 2.0**10
#: In a broadcast: in what such changes are stated; and the largest power of two of one.
UNITS, _MOST_UNITS = "units", 200
#: Longest natural step: of a mean and its gains, in sds (by dimension), and of a log sd, or half the log covariance.
_MEAN_STEP, _SCALE_STEP = 0.5, 0.3
#: How far from the mean a first fit begins, in sds of its tight scale.
_ASIDE = 0.1
#: Least and largest precision after one of Newton's steps, of that before.
_PRECISIONS = (0.25, 16.0)


@dataclass(frozen=True, kw_only=True)
class LocalFitOptions:
    """How a silo fits q(Z_G), and its own latents, by steps that need no exchange. All by keyword."""

    family: Literal["auto", "diagonal", "full"] = "auto"
    """Of q(Z_G); "auto" is full up to 256 dimensions, diagonal above."""
    importance_samples: Count = 1
    """K; 1 is the ELBO."""
    start_spread: Spread = 0.0
    """A silo's first fit begins at the mean of q plus this share of its standard deviations times draws that all silos
    share (0.1 for networks, whose hidden units are all alike at the prior's mean)."""
    local_steps: Count = 1000
    """Of the local fit in a round, at most; a silo's first fit takes four times as many. Newton's steps, which
    "natural" takes of up to 128 dimensions, end when q has settled, after some 25."""
    local_optimizer: str = NATURAL
    """"natural" (natural gradients on q, as always on the silo's own latents), a `torch.optim` class, or, without local
    latents, "closed_form" (a likelihood that is Gaussian in Z_G), "fixed_point" and "gradient" (steps in natural
    parameters with expectations over fixed draws; few dimensions, since they take second derivatives)."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    """Of the `torch.optim` class."""
    learning_rate: Positive | None = None
    """First step of the local fit: share of the natural gradient, or torch's rate in posterior standard deviations,
    which fall to a twentieth over the round, Newton's when q has settled; constant for "fixed_point", whose damping it
    is, and "gradient". None: 0.3 (of Newton's 1), 0.05, 0.5 and 0.1."""
    scale_rate: Share = 1.0
    """Of "natural", share of the learning rate by which q's scales move. For networks, where a draw of thousands of
    weights says little about the curvature of one: 0.1 or so. Scales that follow its noise come out too small, since
    the noise of a logarithm raises the mean of what it is the logarithm of."""
    decay: Share = 1.0
    """Factor of the learning rate of q from fit to fit, so that rounds end with less noise than they began with."""
    local_learning_rate: Positive = 0.05
    """Of the silo's latents, a sixth of the share of their natural gradient, beside Newton's steps a tenth, and Adam's
    for an encoder or a dense scale."""
    theta_learning_rate: Positive = 0.1
    """Of `pyro.param`s, by Adam, a step a round."""
    alpha: Part = 0.0
    """Of power EP (Algorithm 2), whose limit 0 is the variational fit; above 0 with "closed_form" only, since the
    moments of other tilted distributions have no closed form. It matters to a diagonal family."""
    sampling_rate: Share = 1.0
    """Share of records in a local step, drawn without replacement."""
    bound: Bound = 2.0**30
    """Largest absolute value of any element of a contribution; past it a silo refuses."""
    local_family: Conditional | Amortised = field(default_factory=Conditional)
    """Of a record's latents given the global ones."""
    silo_family: Conditional = field(default_factory=Conditional)
    """Of a silo's own."""

    def __post_init__(self) -> None:
        if self.family not in ("auto", "diagonal", "full"):
            raise InputError(f"family '{self.family}' has no sites; choose auto, diagonal or full")
        check(self)
        chosen, exact = self.local_optimizer, self.local_optimizer in EXACT
        if self.scale_rate < 1 and chosen != NATURAL:
            raise InputError(f"scale_rate is for local_optimizer = '{NATURAL}', not '{chosen}'")
        if self.decay < 1 and exact:
            raise InputError(f"local_optimizer '{chosen}' has no noise that a decay would lower")
        if not exact and chosen != NATURAL:
            Optimizer(chosen, self.first_rate, self.optimizer_options)
        elif self.optimizer_options:
            raise InputError(f"local_optimizer '{chosen}' takes no optimizer_options")
        if chosen in (NATURAL, FIXED_POINT) and self.first_rate > 1:
            raise InputError(f"learning_rate must be at most 1 for {chosen}, not {self.learning_rate}")
        if exact and self.sampling_rate < 1:
            raise InputError(f"local_optimizer '{chosen}' takes all records; use sampling_rate = 1")
        if self.alpha and chosen != CLOSED_FORM:
            raise InputError(f"alpha must lie in [0, 1], and above 0 needs '{CLOSED_FORM}', not {self.alpha}")

    @property
    def first_rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return {NATURAL: 0.3, FIXED_POINT: 0.5, GRADIENT: 0.1}.get(self.local_optimizer, 0.05)

    @property
    def by_steps(self) -> bool:
        """Whether privacy's noise is in each step of a fit."""
        return False

    def traced_calls(self, fits: int) -> int:
        """Traced calls of a silo without latents of its own that makes so many local fits."""
        return 1 if self.local_optimizer in EXACT else fits * self.local_steps // self.steps_in_a_call

    @property
    def steps_in_a_call(self) -> int:
        """Without latents the longest that fits the steps of a fit without a rest; with them, one."""
        return max(length for length in range(1, _LONGEST + 1) if self.local_steps % length == 0)

    def newton_calls(self, problem: Problem) -> tuple[int, int] | None:
        """Traced calls of a silo's fits where they take Newton's steps, about, and draws of q in each. None: of others
        `traced_calls` tells."""
        families = Families(self, problem)
        return (_FITS * _NEWTON_STEPS, families.draws) if families.newton else None


#: Antithetic pairs of draws in a step of `NewtonSteps`, at least, and more than latents that records share; dimensions
#: of these up to which there are such steps, and numbers of records in all draws of one up to which a silo makes them.
_PAIRS, _SPARE, _NEWTON_TO, _AT_ONCE = 16, 8, 128, 4_000_000
#: Newton's steps of one fit, about: they end when q has settled; and fits of a run.
_NEWTON_STEPS, _FITS = 25, 10


class Families:
    """What follows from the options of a local fit and the model: dimensions, and the families of q(Z_G) and of a
    silo's own latents. Every party builds the same one."""

    def __init__(self, config: LocalFitOptions, problem: Problem) -> None:
        """Raises InputError for what the model does not allow."""
        self.config, self.problem = config, problem
        layout, samples = problem.layout, config.importance_samples
        self.n, self.n_record, self.n_silo = (layout.size(r) for r in ("global", "record", "silo"))
        self.shared = global_family(config.family, self.n)
        self.full = self.shared.name == "full"
        self.local = config.local_family.build(self.n_record, self.n + self.n_silo, samples, marginal=True)
        self.silo = config.silo_family.build(self.n_silo, self.n, 1, marginal=True)
        self.samples = samples if self.n_record else 1
        #: Of own latents, for what natural gradients are not taken of.
        self.optimizer = Optimizer("adam", config.local_learning_rate)
        self.by_row = config.sampling_rate < 1
        whole = self.full and not self.by_row and not config.by_steps and config.local_optimizer == NATURAL
        private = problem.privacy is not None
        #: Whether a silo's latents are integrated out around their mode, rather than fitted.
        self.eliminates = whole and eliminates(problem) and config.silo_family == Conditional()
        #: Whether steps are Newton's, by many draws, rather than along the gradient at one.
        self.newton = self.eliminates or (
            whole and self.samples == 1 and self.n + self.n_silo <= _NEWTON_TO
            and isinstance(config.local_family, Conditional)
            and not self.local.couples_records and not self.silo.couples_records
            and not (private and self.has_latents)
        )  # fmt: skip
        spare = _SPARE + self.n_silo if self.has_latents and not self.eliminates else 0
        self.draws = 2 * max(_PAIRS, self.n + spare) if self.newton else 1
        self.packed = packed_size(self.n, self.full)
        self._check()

    def _check(self) -> None:
        chosen = self.config.local_optimizer
        if any(name.startswith(ENCODER) for name in self.problem.start.theta):
            raise InputError(f"no pyro.param may start with '{ENCODER}'")
        if self.local.couples_records and self.by_row:
            raise InputError(
                "a dense local scale couples all records of a silo; use sampling_rate = 1 or another scale"
            )
        if chosen in EXACT and self.has_latents:
            raise InputError(f"local_optimizer = '{chosen}' is for models without local latents; use '{NATURAL}'")
        if chosen == CLOSED_FORM and self.problem.start.theta:
            raise InputError(f"local_optimizer = '{CLOSED_FORM}' learns no pyro.param; use '{NATURAL}'")

    @property
    def has_latents(self) -> bool:
        """Whether a silo has latents of its own."""
        return bool(self.n_record or self.n_silo)

    def first_rate(self, newton: bool) -> float:
        """Of natural gradients. By default all of Newton's step, and of one by a single draw, which has n noisy
        directions for each that it learns, the less for a full covariance the more dimensions it has."""
        if self.config.learning_rate is not None or not (newton or self.full):
            return self.config.first_rate
        return 1.0 if newton else min(0.3, _RATE_BY_SIZE / (self.n + 1))

    @property
    def gradient(self) -> SiloFunction:
        """Of a silo's bound."""
        if self.eliminates:
            return marginal_gradient(self.problem.density)
        return silo_gradient(self.problem.density, self.local, self.silo, self.samples)

    @property
    def change(self) -> Block:
        """Of a change of q, packed. First changes on raw scales are large; a silo does not send a share of one that it
        alone knows."""
        room = _ROOM if self.problem.privacy is None else 1.0
        return Block(CHANGE, (self.packed,), self.config.bound * room)

    def units(self, q: Natural) -> Tensor:
        """(n,) the units in which silos state changes of Z_G: powers of two near q's sds, so that nothing is rounded.

        A sum has a bound and a resolution, and parameters on raw scales have precisions of 1e10 beside others of 1e-8.
        Ones under differential privacy, where changes are clipped as they are.
        """
        if self.problem.privacy is not None:
            return torch.ones(self.n, dtype=torch.float64)
        return torch.exp2(q.stddev().log2().round().clamp(-_MOST_UNITS, _MOST_UNITS))

    def told_per_unit(self, message: Broadcast, silo: str) -> Tensor:
        """`per_unit` of the units that are sent: a silo whose own rounding is another may be off by a factor of two."""
        units, own = message.tensors[UNITS].to("cpu", torch.float64), self.units(self.unpack(message.tensors["q"]))
        if not bool(((units == own) | (units == 2 * own) | (units == own / 2)).all()):
            raise ProtocolError(f"silo '{silo}': the units of a change are not those of the q that was sent")
        return self.per_unit(units)

    def stated(self, message: Broadcast, change: FloatArray) -> Natural:
        """The total of changes (packed,) that silos stated in the units of `message`."""
        return self.unpack(torch.from_numpy(change) / self.per_unit(message.tensors[UNITS].to("cpu", torch.float64)))

    def per_unit(self, units: Tensor) -> Tensor:
        """(packed,) factors of a packed factor of z that make it one of z / units."""
        return torch.cat([units, lower(torch.outer(units, units)) if self.full else units.square()])

    def unpack(self, flat: Tensor) -> Natural:
        return unpack(flat.to("cpu", torch.float64), self.n, self.full)

    def sent(self, message: Broadcast, silo: str) -> Natural:
        """The q that a broadcast names. Raises ProtocolError for what is no distribution: no data could answer that."""
        q = self.unpack(message.tensors["q"])
        if not q.proper:
            raise ProtocolError(f"silo '{silo}': the q that the server names is no distribution")
        return q

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.problem.device, self.problem.dtype)


def first_start(q: Natural, spread: float, seed: int) -> Natural:
    """q with its mean moved by `spread` of its standard deviations times standard normal draws of the seed, the same at
    all silos; `spread` = 0 is q itself. Everyone may see it.

    At the prior's mean all hidden units of a network are alike, and the gradient that would tell them apart is zero.
    Starts that differed from silo to silo would number the units differently, and their average would be no network.
    """
    if not spread:
        return q
    moved = q.mean() + spread * q.stddev() * start_draws(seed, q.n)
    return q._replace(shift=times(q.precision, moved))


# ---- the fit ----

#: The last share of local steps, over which q and the gradient of theta are averaged.
_TAIL = 0.25
#: Least share of any rate within a fit. Those of own parameters also fall as 1 / visits, from the first rate: their
#: jitter makes q too narrow.
_LEAST = 0.05
#: Steps over which draws are stratified, and numbers drawn ahead for them at most.
STRATA, _AHEAD = 16, 4_000_000
#: Shares of the configured rate at which a fit is tried, one after the other, until one does not run off.
_RATES = (1.0, 0.1, 0.01)
LEAST_RATE = _RATES[-1]
#: Half of Newton's steps over which q is seen to have settled, and in how many sds of their noise; those that are
#: averaged after them, and their length.
_HALF, _SURE, _ENDING, _SHORT = 5, 2.5, 12, 0.3
#: Sds, and nats as a share, within which nothing has moved.
_REST = 1e-9
#: Share of the steps after which the silo's latents are at their least rate: their noise biases q's scale sites.
_SETTLED_AT = 0.6
#: Share of a first fit over which their rate rises: until q has found its width, gains mean nothing.
_WARM = 0.1


class OwnState(NamedTuple):
    """What a silo keeps from fit to fit, but for its site. Never leaves the silo."""

    record: Params  # variational parameters of its records, (N + 1, ...) each
    silo: Params  # of its silo-level latents, (1, ...) each
    phi: Params  # weights of its own encoder, for amortised families
    moments: dict[str, Params]  # of the optimiser, for the three above
    anchor: Tensor  # (n_global,) the mean of Z_G that `record` and `silo` are relative to
    visits: int
    share: float  # of the configured rate of q at which its fits run


class Fitted(NamedTuple):
    """Where a local fit ended."""

    q: Natural
    value: float  # E_q[log p(y, Z_L | Z_G) - log q(Z_L | Z_G)], or its importance-weighted bound; nats
    theta: Params  # gradient
    own: OwnState
    touched: Tensor  # (n,) whether the silo's term has ever had a gradient in this dimension of Z_G

    @property
    def sane(self) -> bool:
        return self.q.proper and math.isfinite(self.value)


def _far(q: Natural, end: Natural) -> float:
    """How far a fit went: the largest of its mean's way and of its sd, in sds of where it began. It may narrow at will,
    as fits on raw scales do."""
    sd = q.stddev()
    return float(torch.maximum((end.mean() - q.mean()).abs() / sd, end.stddev() / sd).max())


def _definite(covariance: Tensor) -> bool:
    """Whether (n, n), or (n,) variances, are a normal's to their rounding: those of a fit that runs off may be finite
    and none."""
    if covariance.dim() == 1:
        return bool((covariance > 0).all())
    return int(torch.linalg.cholesky_ex(covariance).info) == 0


def from_fit(loc: Tensor, covariance: Tensor) -> Natural | None:
    """q of this mean (n,) and covariance (n, n), or variances (n,); None where a fit that ran off left none."""
    finite = bool(torch.isfinite(loc).all() and torch.isfinite(covariance).all())
    return from_moments(loc, covariance) if finite and _definite(covariance) else None


def settled(states: list[Tensor]) -> bool:
    """Whether means, sds and the bound, (2 n + 1,) after each of some steps, are in the second half of these where they
    were in the first, but for these steps' noise, or a twentieth of an sd, or nat."""
    if len(states) < 2 * _HALF:
        return False
    seen = torch.stack(states[-2 * _HALF :])
    loc, sd, value = seen.tensor_split([seen.shape[1] // 2, seen.shape[1] - 1], 1)
    way = torch.cat([(loc - loc[-1]) / sd[-1], (sd / sd[-1]).log(), value - value[-1]], 1)
    noise = (way.diff(dim=0).square().mean(0) / _HALF).sqrt()  # of the difference of two means
    moved = way[:_HALF].mean(0) - way[_HALF:].mean(0)
    return bool((moved.abs() <= (_SURE * noise).clamp(min=0.05)).all())


def at_rest(states: list[Tensor]) -> bool:
    """Whether the last two steps, each by draws of its own, moved nothing: as of a normal target, at which no step by
    any draws does. States as in `settled`."""
    if len(states) < 3:
        return False
    before, last = torch.stack(states[-3:-1]), states[-1]
    n = len(last) // 2
    by = torch.cat([last[n : 2 * n], last[n : 2 * n], last[-1:].abs() + 1])
    return bool(((before - last).abs() <= _REST * by).all())


class SiloFit:
    """The local fits of all silos of a process; it holds no data, so that they share its traces."""

    def __init__(self, families: Families) -> None:
        self.families, self.config, self.problem = families, families.config, families.problem
        self.exact = ExactFit(families) if self.config.local_optimizer in EXACT else None
        self.block = StepBlock(families, families.newton) if self.exact is None else None
        self._slope = SiloSlope(self.problem, families.local, families.silo, families.samples, families.gradient)
        self.weigher = Weigher(self.problem, families.local, families.silo)

    def init(self, view: SiloView) -> OwnState:
        """Before the first fit."""
        families, start = self.families, view.start
        z_record, z_silo = start.z_record, start.z_silo
        if self.problem.privacy is not None:  # a start that the silo's data had a part in would be a release unnoised
            z_record, z_silo = self.problem.start.z_record[:1].expand_as(z_record), self.problem.start.z_silo
        record = families.local.init(families.move(z_record))
        silo = families.silo.init(families.move(z_silo).unsqueeze(0))
        phi = {name: families.move(v) for name, v in families.local.init_theta(self.problem.dtype).items()}
        moments = {
            "record": families.optimizer.init(record, by_row=families.by_row),
            "silo": families.optimizer.init(silo),
            "phi": families.optimizer.init(phi),
        }
        return OwnState(record, silo, phi, moments, start.z_global.to("cpu", torch.float64), 0, 1.0)

    def local_fit(self, own: OwnState) -> LocalFit:
        """What a silo's state says of its own latents."""
        families = self.families
        anchor = families.move(own.anchor)
        records = {**own.record, **own.phi, Anchored.ANCHOR: anchor}
        silos = {**own.silo, Anchored.ANCHOR: anchor} if own.silo else {}
        local, silo = Anchored(families.local, families.n), Anchored(families.silo, families.n)
        return LocalFit(local, records, silo, silos, families.samples)

    def begin(self, q: Natural, own: OwnState) -> Natural:
        """Where the next fit starts from when the server has sent `q`."""
        return q if own.visits else first_start(q, self.config.start_spread, self.problem.seed)

    def __call__(self, turn: int, theta: Params, q: Natural, cavity: Natural, own: OwnState, view: SiloView) -> Fitted:
        """q fitted to cavity x likelihood, from q. `turn` names the draws: the silo's own count.

        A fit that runs off is begun again at a tenth of the rate, and once more; the silo keeps the rate that worked.
        """
        shares = [share for share in _RATES if share <= own.share] if self.exact is None else [1.0]
        for share in shares:
            fitted = self._at(share, turn, theta, q, cavity, own, view)
            if fitted.sane and _far(q, fitted.q) < self.config.bound:
                break
        return fitted

    def _at(
        self, share: float, turn: int, theta: Params, q: Natural, cavity: Natural, own: OwnState, view: SiloView
    ) -> Fitted:
        """A fit at `share` of the configured rate of q."""
        if self.exact is not None:
            end, value, gradient = self.exact(q, cavity, theta, view)
            anchor = end.mean() if end.proper else own.anchor
            own = own._replace(anchor=anchor, visits=own.visits + 1)
            return Fitted(end, value, gradient, own, torch.ones(q.n, dtype=torch.bool))
        families, moments, block = self.families, own.moments, self._block(view)
        if self.problem.privacy is None:
            self.problem.density.often(view.start, theta, view.rows)
        q_steps = block.steps
        silo, moved = reanchored_silo(own.silo, families.move(q.mean() - own.anchor), families.n_silo)
        record = reanchored_records(own.record, moved)
        if families.eliminates and own.visits == 0:
            silo = at_mean(self.problem.density, families.move(q.mean()), theta, silo, view.rows, view.weights)
        current = q_steps.init(q, tight=own.visits == 0)
        average = block.observed(current, moved.new_zeros(()), theta, moved[: families.n])
        steps = self.config.local_steps * (FIRST_FIT if own.visits == 0 else 1)
        first_key = turn * self.config.local_steps * FIRST_FIT
        batches = self._batches(first_key, steps, view)
        carry = Carry(
            current, record, moments["record"], silo, moments["silo"], own.phi, moments["phi"], average, moved
        )
        records = None if batches is None or not record else Trailing(record, moments["record"], steps, len(moved))
        tilted = (families.move(cavity.shift), families.move(cavity.precision))
        how = (steps, own.visits, share)
        pace = self._until_settled(*how) if block.newton else self._as_planned(*how, block.length)
        noise = self._draws(first_key, steps, block, batches, view)
        for k, eps in enumerate(noise):
            batch = None if batches is None else batches[k * block.length : (k + 1) * block.length]
            rows, weights = self._rows(batch, view)
            rates = pace(carry)
            if rates is None:
                break
            inputs = Inputs(tilted, theta, rows, weights, *eps, rates)
            if records is None or batch is None:
                carry = block(carry, inputs)
            else:
                at = torch.from_numpy(batch[0]).to(self.problem.device)
                carry = records.put(at, block(records.taken(carry, at), inputs))
        carry = carry if records is None else records.ended(carry)
        average = carry.average
        loc, covariance = (average[name].to("cpu", torch.float64) for name in ("loc", "covariance"))
        ended = all(bool(torch.isfinite(v).all()) for v in average.values()) and _definite(covariance)
        anchor, silo = q_steps.loc(carry.q), carry.silo
        if families.eliminates and ended:
            silo = at_mean(self.problem.density, anchor, theta, silo, view.rows, view.weights)
        after = OwnState(
            carry.record,
            silo,
            carry.phi,
            {"record": carry.record_moments, "silo": carry.silo_moments, "phi": carry.phi_moments},
            anchor.to("cpu", torch.float64),
            own.visits + 1,
            share,
        )
        return Fitted(
            from_moments(loc, covariance) if ended else cavity,
            float(average["value"]) if ended else math.nan,
            {name: average[f"theta/{name}"] for name in theta},
            after,
            average["touched"].to("cpu") != 0,
        )

    def at_the_end(
        self, eps: Tensor, key: int, theta: Params, q: Natural, own: OwnState, view: SiloView, weighs: bool
    ) -> FloatArray:
        """The silo's terms of `stationarity` at q, for the draws `eps`, and, where it `weighs`, of `weighing`; `key` as
        in a fit. In minibatches each draw of the first has one."""
        count = eps.shape[0] * eps.shape[1]
        silo, moved = reanchored_silo(own.silo, self.families.move(q.mean() - own.anchor), self.families.n_silo)
        record = reanchored_records(own.record, moved)
        first_key = key * self.config.local_steps * FIRST_FIT
        batches = self._batches(first_key, count, view) if self.exact is None else None
        inputs = silo_inputs(self.families, record, view, range(first_key, first_key + count), batches)
        theta = {**theta, **own.phi}
        slope = self._slope(q, eps, theta, silo, inputs)
        if not weighs:
            return slope
        at = points(self.problem, q)
        return np.concatenate([slope, self.weigher(q, at, theta, record, silo, view, first_key + count)])

    def refined(
        self, refiner: Refiner, message: Broadcast, theta: Params, q: Natural, own: OwnState, view: SiloView
    ) -> FloatArray:
        """The silo's terms of `refining` at q and the draws that `message` names."""
        silo, moved = reanchored_silo(own.silo, self.families.move(q.mean() - own.anchor), self.families.n_silo)
        record = reanchored_records(own.record, moved)
        return refiner.nats(message, q, {**theta, **own.phi}, record, silo, view)

    def _block(self, view: SiloView) -> StepBlock:
        """The steps of a silo of so many records."""
        assert self.block is not None
        if self.families.eliminates or view.size * self.block.draws <= _AT_ONCE:
            return self.block
        return self._one_draw

    @cached_property
    def _one_draw(self) -> StepBlock:
        return StepBlock(self.families, False)

    def _rows(self, batch: npt.NDArray[np.int64] | None, view: SiloView) -> tuple[Params, Tensor]:
        """Rows and weights of a block, for its batches (S, B)."""
        if batch is None:
            return view.rows, view.weights
        at = torch.from_numpy(batch.reshape(-1)).to(self.problem.device)
        rows = {name: v.unflatten(0, batch.shape) for name, v in take(view.rows, at).items()}
        return rows, view.weights.new_full((batch.shape[1],), view.size / batch.shape[1])

    def _draws(
        self, key: int, steps: int, block: StepBlock, batches: npt.NDArray[np.int64] | None, view: SiloView
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """eps_G (S, noise), eps_L (S, K, B, n_record) and eps_S (S, 1, n_silo) of each block.

        Stratified over some steps: what a fit reports is an average over many, and the noise of 300 records' draws in
        a scale site is what keeps it from its target. Minibatches draw eps_L anew, a record at a time.
        """
        families, length = self.families, block.length
        half, n = max(1, block.draws // 2), families.n_record
        samples = half if block.newton else families.samples
        of_q = half * families.shared.noise_size
        of_silo = (block.draws if families.eliminates else half) * families.n_silo
        width = of_q + of_silo
        count = len(view.weights) if batches is None else batches.shape[1]
        most = STRATA if batches is not None else min(STRATA, _AHEAD // max(1, count * samples * n))
        chunk = length * max(1, most // length)
        for start in range(0, steps, chunk):
            rounds = min(chunk, steps - start)
            noise = families.move(view.silo_draws.stratified(key + start, width, rounds))
            eps_silo, eps = noise.split([of_silo, of_q], 2)
            ahead: Tensor | None = None
            if n and batches is None:
                ahead = view.record_draws.stratified(key + start, samples * n, rounds)
            for first in range(0, rounds, length):
                now = slice(first, first + length)
                drawn = torch.empty(length, count, 0)
                if ahead is not None:
                    drawn = ahead[now]
                elif n and batches is not None:  # a block is one step then
                    drawn = view.record_draws.normals(key + start + first, samples * n, batches[start + first])[None]
                eps_record = drawn.reshape(length, count, samples, n).transpose(1, 2).contiguous()
                yield eps[now, 0], families.move(eps_record), eps_silo[now]

    def _as_planned(self, steps: int, visits: int, share: float, length: int) -> Callable[[Carry], Tensor | None]:
        """What gives the rates of the next block of so many steps."""
        planned = iter(self.schedule(steps, visits, share).split(length))
        return lambda carry: next(planned, None)

    def _until_settled(self, steps: int, visits: int, share: float) -> Callable[[Carry], Tensor | None]:
        """What gives the rates of Newton's next step, a row of `schedule`, from where the last ended: full steps until
        these go nowhere but to and fro, at most `steps`, then short ones, which are averaged; None when they are
        made, or all further ones would be the same. Under privacy the data have no say in how many there are."""
        rate, count = share * self.config.decay**visits, min(_ENDING, steps // 4)
        most, private = steps - count, self.problem.privacy is not None
        if private:
            pace = rate * self.families.first_rate(True) * self.config.scale_rate  # 0 after long decay
            most = min(most, math.ceil(_NEWTON_STEPS * (1 if visits else FIRST_FIT) / max(pace, 1e-9)))
        seen: list[Tensor] = []
        ending = iter(range(count))

        def rates(carry: Carry) -> Tensor | None:
            loc, sd, value = carry.q["loc"], carry.q["factor"].norm(dim=1), carry.average["value"]
            if len(seen) < most and (private or not settled(seen)):
                seen.append(torch.cat([loc, sd, value]))
                alone = self.families.eliminates or not self.families.has_latents
                if alone and not private and at_rest(seen):
                    return None
                return loc.new_tensor([[rate, 1.0 if visits else _FIRST, 1.0]])
            last = next(ending, None)
            return None if last is None else loc.new_tensor([[_SHORT * rate, _SHORT, 1.0 / (last + 1)]])

        return rates

    def schedule(self, steps: int, visits: int, share: float) -> Tensor:
        """(steps, 3): shares of the first learning rates, of q and of the silo's own parameters, and the weight of the
        iterate after a step in the average of the last ones."""
        cosine = SCHEDULES["cosine"]
        first = steps - max(1, math.floor(_TAIL * steps))
        rows = []
        for step in range(steps):
            done = step / steps
            own = max(_LEAST, cosine(min(1.0, done / _SETTLED_AT))) / (1 + visits)
            own *= 1.0 if visits else min(1.0, done / _WARM)
            rate = share * max(_LEAST, cosine(done)) * self.config.decay**visits
            rows.append((rate, own, 1.0 / (max(0, step - first) + 1)))
        return self.families.move(torch.tensor(rows, dtype=torch.float64))

    def _batches(self, key: int, steps: int, view: SiloView) -> npt.NDArray[np.int64] | None:
        """Rows of every step's minibatch (steps, B), None for all: consecutive pieces of shuffles of the silo's
        records, which follow from its secret."""
        size = max(2, math.ceil(self.config.sampling_rate * view.size))
        if size >= view.size:
            return None
        pieces = view.size // size
        orders = [
            np.argsort(view.batch_draws.uniforms(key + first, 1)[0, : view.size, 0])[: pieces * size]
            for first in range(0, steps, pieces)
        ]
        batches: npt.NDArray[np.int64] = np.concatenate(orders).reshape(-1, size)[:steps]
        return batches


class Trailing:
    """A silo's records in minibatches. A block takes its own rows and writes them back where they lie; records that are
    in no batch only move along with the means of Z_G and Z_S, which is made up for when they are next in one."""

    def __init__(self, record: Params, moments: Params, blocks: int, width: int) -> None:
        self._record, self._moments = ({name: v.clone() for name, v in p.items()} for p in (record, moments))
        one = next(iter(record.values()))
        #: (blocks + 1, n_global + n_silo) how far the means have come, and (N + 1,) to which of these a row refers.
        self._ways, self._done = one.new_zeros(blocks + 1, width), 0
        self._seen = torch.zeros(len(one), dtype=torch.int64, device=one.device)

    def taken(self, carry: Carry, at: Tensor) -> Carry:
        """With the records at these rows."""
        return carry._replace(record=self._moved_on(at), record_moments=take(self._moments, at))

    def put(self, at: Tensor, carry: Carry) -> Carry:
        """After a block of these rows."""
        self._ways[self._done + 1] = self._ways[self._done] + carry.moved
        self._done += 1
        self._seen[at] = self._done
        write(self._record, at, carry.record)
        write(self._moments, at, carry.record_moments)
        return carry

    def ended(self, carry: Carry) -> Carry:
        """With all records."""
        return carry._replace(record=self._moved_on(None), record_moments=self._moments)

    def _moved_on(self, at: Tensor | None) -> Params:
        """The records at these rows, None for all, relative to the means as they are."""
        record, seen = take(self._record, at), self._seen if at is None else self._seen[at]
        return reanchored_records(record, self._ways[self._done] - self._ways[seen])


# ---- consecutive steps as one pure function, traced and compiled: calls cost more than small steps do ----

#: Steps in a block at most. Latents stay out of longer blocks: those of a batch's records would have to be written back
#: first, and a step with a silo's is long enough, so that five of them take minutes to compile.
_LONGEST = 5
#: Gains of N records' latents go this over N times as far: with full steps their jitters add up, in the gradient of
#: Z_G, to more than its own, q narrows by chance, and gains that are as of white noise grow as it does.
_QUIET = 4.0
#: Natural gradients of a silo's latents go so many times as far as its learning rate says, which is Adam's.
_NATURAL = 6.0
#: By many draws: half the way, at the default, and gains a share of that; twice that, in the first fit.
_NEWTON, _GAINS, _FIRST = 10.0, 0.3, 2.0


class Carry(NamedTuple):
    """What goes from step to step."""

    q: Params  # state of the optimiser of q(Z_G)
    record: Params  # of the batch's records, (B, ...) each
    record_moments: Params
    silo: Params  # (1, ...) each
    silo_moments: Params
    phi: Params  # weights of the silo's own encoder
    phi_moments: Params
    average: Params  # of what a fit reports, over its last iterates
    moved: Tensor  # (n_global + n_silo,) by which the means of Z_G and Z_S went on in this block


class Inputs(NamedTuple):
    """What a block of S steps takes besides; in minibatches each step has its own rows."""

    cavity: tuple[Tensor, Tensor]  # shift (n_global,) and precision
    theta: Params
    rows: Params  # (N + 1, ...) each, or (S, B, ...) in minibatches
    weights: Tensor  # (N + 1,) or (B,)
    eps: Tensor  # (S, noise of q(Z_G)), or, of several draws, of one of each antithetic pair after the other
    eps_record: Tensor  # (S, K, B, n_record)
    eps_silo: Tensor  # (S, 1, n_silo), of all draws
    schedule: Tensor  # (S, 3): shares of the rates of q and of own latents, weight of the iterate in the average

    def only(self, k: int, minibatch: bool) -> Inputs:
        """Those of the block's step k, as a block of one."""
        one = slice(k, k + 1)
        rows = {name: value[one] for name, value in self.rows.items()} if minibatch else self.rows
        eps, eps_record, eps_silo, schedule = (v[one] for v in self[4:])
        return self._replace(rows=rows, eps=eps, eps_record=eps_record, eps_silo=eps_silo, schedule=schedule)


class StepBlock:
    """Local steps of one model and configuration. A block is one call where it is compiled, since calls cost more than
    its steps; where it is traced each step is one, since a trace takes as long as the steps in it."""

    def __init__(self, families: Families, newton: bool) -> None:
        config, problem = families.config, families.problem
        self.n, self.n_silo, self.newton = families.n, families.n_silo, newton
        self.draws = families.draws if newton else 1
        self.minibatch, self.optimizer = families.by_row, families.optimizer
        self.steps: NewtonSteps | NaturalSteps | TorchSteps
        if newton:
            self.steps = NewtonSteps(families)
        else:
            self.steps = NaturalSteps(families) if config.local_optimizer == NATURAL else TorchSteps(families)
        self.length = 1 if families.has_latents or newton else config.steps_in_a_call
        self._gradient, self._eliminates = families.gradient, families.eliminates
        by_shape = families.local.couples_records
        record, rows, noise = (None, None, None) if by_shape else (0, int(self.minibatch), 2)
        axes = (None, record, record, *[None] * 8, rows, record, None, noise, None, None)  # of Carry, then Inputs
        self._traced = Traced(self._run, axes, problem.mode, by_shape)
        # A graph of one step is traced in a fifth of the time; only what compiles or maps a call gains by a longer one.
        self._one_by_one = self.length > 1 and problem.mode == "traced"
        self._traced_step = Traced(self._run, axes, problem.mode, by_shape)

    def __call__(self, carry: Carry, inputs: Inputs) -> Carry:
        if not self._one_by_one or waiting(self._traced) is not None:
            return Carry(*self._traced(*carry, *inputs))
        for k in range(self.length):
            carry = Carry(*self._traced_step(*carry, *inputs.only(k, self.minibatch)))
        return carry

    def _own(
        self,
        params: Params,
        gradient: Params,
        moments: Params,
        rates: tuple[Tensor, Tensor],
        root: Tensor,
        silo: Params | None = None,
    ) -> tuple[Params, Params]:
        """The parameters of latents, and the optimiser's state, after a step. rates: of all, and the share for gains.

        Its gains are those of white noise, w in w R^-1 d with R = `root` of q(Z_G), so that a step means the same
        whatever the units of Z_G: in raw units it is nothing to a narrow one, and tears a wide one apart. silo: of
        Z_S, which is a part of d to records.
        """
        spread = silo["log_scale"][0].exp() if silo else root.new_ones(0)
        if not params:
            return params, moments
        back = torch.linalg.inv(root) if root.dim() == 2 else 1 / root
        params = _gains_times(params, root, spread)
        gradient = _gains_times(gradient, back.mT if root.dim() == 2 else back, 1 / spread)
        if "dense" in params:
            params, moments = self.optimizer.step(params, gradient, moments, rates[0], local_units(params))
        else:
            rate = (_NEWTON if self.newton else _NATURAL) * self.optimizer.learning_rate * rates[0]
            params = natural_step(params, gradient, rate, rates[1], not self.newton)
        return _gains_times(params, back, 1 / spread), moments

    def observed(self, q: Params, value: Tensor, theta: Params, gradient: Tensor) -> Params:
        """What a fit reports, averaged over its last iterates. gradient: of the silo's term in Z_G (n,)."""
        root = self.steps.root(q)
        covariance = root @ root.mT if root.dim() == 2 else root.square()
        seen = {"loc": self.steps.loc(q), "covariance": covariance, "value": value.reshape(1)}
        seen |= {"touched": gradient.abs()}
        return seen | {f"theta/{name}": gradient for name, gradient in theta.items()}

    def _run(self, *args: object) -> Carry:
        n = len(Carry._fields)
        carry, inputs = Carry(*args[:n]), Inputs(*args[n:])  # type: ignore[arg-type]
        carry = carry._replace(moved=torch.zeros_like(carry.moved))
        for k in range(len(inputs.eps)):
            rows = {name: value[k] for name, value in inputs.rows.items()} if self.minibatch else inputs.rows
            carry = self._one(carry, inputs, rows, k)
        return carry

    def _one(self, carry: Carry, inputs: Inputs, rows: Params, k: int) -> Carry:
        if self.newton:
            return self._newton(carry, inputs, k)
        q, record, silo, phi = carry.q, carry.record, carry.silo, carry.phi
        z = self.steps.draw(q, inputs.eps[k])
        g = self._gradient(
            z, z - self.steps.loc(q), {**inputs.theta, **phi}, record, silo, rows, inputs.weights,
            inputs.eps_record[k], inputs.eps_silo[k],
        )  # fmt: skip
        shift, precision = inputs.cavity
        held = shift - times(precision, z)
        own_rate = inputs.schedule[k, 1]
        after = self.steps.step(q, inputs.eps[k], g.direct + g.path + held, inputs.schedule[k, 0])
        root = self.steps.root(q)
        local = {name: _by_record(value, inputs.weights) for name, value in g.local.items()}
        gains = _QUIET / inputs.weights.square().sum().clamp(min=_QUIET)
        record, record_moments = self._own(record, local, carry.record_moments, (own_rate, gains), root, silo)
        silo, silo_moments = self._own(silo, g.silo, carry.silo_moments, (own_rate, torch.ones_like(gains)), root)
        # The silo's latents move along with the mean of Z_G, as their conditionals say they do: held back, they would
        # turn a Newton step on the marginal likelihood into a step of EM, which is slow where much is unobserved.
        silo, moved = reanchored_silo(silo, self.steps.loc(after) - self.steps.loc(q), self.n_silo)
        record = reanchored_records(record, moved)
        shared = {name: v for name, v in g.theta.items() if name in inputs.theta}
        of_encoder = {name: v for name, v in g.theta.items() if name not in inputs.theta}
        phi, phi_moments = self.optimizer.step(phi, of_encoder, carry.phi_moments, own_rate)
        seen = self.observed(after, g.value, shared, g.direct + g.path)
        average = {name: torch.lerp(old, seen[name], inputs.schedule[k, 2]) for name, old in carry.average.items()}
        return Carry(after, record, record_moments, silo, silo_moments, phi, phi_moments, average, carry.moved + moved)

    def _newton(self, carry: Carry, inputs: Inputs, k: int) -> Carry:
        """A step by many draws."""
        q, record, silo, theta = carry.q, carry.record, carry.silo, inputs.theta
        loc, (shift, precision) = self.steps.loc(q), inputs.cavity

        def of(eps: Tensor, eps_silo: Tensor, eps_record: Tensor) -> tuple[Any, ...]:
            z = self.steps.draw(q, eps)
            g = self._gradient(
                z, z - loc, theta, record, silo, inputs.rows, inputs.weights, eps_record[None], eps_silo[None]
            )
            slope = g.direct + g.path
            return g.value, slope, slope + shift - precision @ z, g.theta, g.local, g.silo

        eps, *others = self._drawn(inputs, k)
        value, of_silo, of_tilted, *own = over_draws(of, eps, *others)
        theta_slope, on_record, on_silo = ({name: v.mean(0) for name, v in part.items()} for part in own)
        after = self.steps.step(q, eps, of_tilted, inputs.schedule[k, 0])
        if self._eliminates:
            silo = on_silo
        else:
            rates, root = (inputs.schedule[k, 1], torch.full_like(value[0], _GAINS)), self.steps.root(q)
            record = self._own(record, on_record, carry.record_moments, rates, root, silo)[0]
            silo = self._own(silo, on_silo, carry.silo_moments, rates, root)[0]
        silo, moved = reanchored_silo(silo, self.steps.loc(after) - loc, self.n_silo)
        record = reanchored_records(record, moved)
        seen = self.observed(after, value.mean(), theta_slope, of_silo.abs().mean(0))
        average = {name: torch.lerp(old, seen[name], inputs.schedule[k, 2]) for name, old in carry.average.items()}
        return carry._replace(q=after, record=record, silo=silo, average=average, moved=carry.moved + moved)

    def _drawn(self, inputs: Inputs, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """(S, n_global), (S, n_silo) and (S, B, n_record): antithetic pairs, second moments exactly the normal's, so
        that of a normal target the step that they make is exact too."""
        count, on_record = self.draws // 2, inputs.eps_record[k]
        half, on_silo = (
            inputs.eps[k].reshape(count, self.n),
            inputs.eps_silo[k].reshape(1 + self._eliminates, count, self.n_silo),
        )
        if self._eliminates:
            return _pairs(_balanced(half)), on_silo.flatten(0, 1), _pairs(on_record)
        shared = _balanced(torch.cat([half, on_silo[0]], 1))
        if on_record.shape[-1]:
            along = torch.einsum("hd,hbr->dbr", shared, on_record) / len(shared)
            on_record = _balanced((on_record - torch.einsum("hd,dbr->hbr", shared, along)).transpose(0, 1))
            on_record = on_record.transpose(0, 1)
        return _pairs(shared[:, : self.n]), _pairs(shared[:, self.n :]), _pairs(on_record)


def _balanced(draws: Tensor) -> Tensor:
    """(..., S, n) draws, S >= n, scaled and turned so that their mean square is the identity."""
    root = torch.linalg.cholesky_ex(draws.mT @ draws / draws.shape[-2])[0]
    return torch.linalg.solve_triangular(root.mT, draws, upper=True, left=False)


def _pairs(half: Tensor) -> Tensor:
    return torch.cat([half, -half])


def _by_record(gradient: Tensor, weights: Tensor) -> Tensor:
    """A gradient of records' own parameters (B, ...) as of all records, where a batch stands for more than it has."""
    return gradient / weights.clamp(min=1.0).reshape(-1, *[1] * (gradient.dim() - 1))


# ---- steps of q(Z_G) ----
#
# Both take one draw Z_G = f(eps), the gradients of the silo's term in Z_G (`objective.SiloGradient`: with the silo's
# latents held, and along them) and the cavity's gradient there, and subtract log q's: sticking the landing, so that the
# noise vanishes where q meets the tilted distribution. Pure functions that can be traced; a state is a dict of tensors.


def _tight(q: Natural) -> tuple[Tensor, Tensor]:
    """Mean of q, and the scale at most 1 of a first step."""
    sd = q.stddev().clamp(max=1.0)
    return q.mean(), torch.diag(sd) if q.full else sd


class NaturalSteps:
    """Natural gradients (paper, section 3.3, damped), by the exponential map in the coordinates Z_G = loc + F eps.

    With the whitened score s = F' grad log (tilted / q), E[s] and E[eps s'] are the natural gradients of mean and
    covariance; loc += rate F s and F <- F exp(rate / 2 sym(eps s')). To first order this is the update of natural
    parameters; unlike it, it keeps the covariance positive definite (Glasmachers et al. 2010), and it needs no inverse.
    """

    newton = False

    def __init__(self, families: Families) -> None:
        self.rate, self.scale_rate = families.first_rate(self.newton), families.config.scale_rate
        self.move = families.move

    def init(self, q: Natural, tight: bool) -> Params:
        """Start at q, or, on the first visit, at its mean with a tight scale."""
        loc, factor = _tight(q) if tight else (q.mean(), q.factor())
        return {"loc": self.move(loc), "factor": self.move(factor * (INITIAL_SCALE if tight else 1.0))}

    def loc(self, state: Params) -> Tensor:
        """The mean (n,)."""
        return state["loc"]

    def root(self, state: Params) -> Tensor:
        """R with covariance R R', (n, n), or (n,) standard deviations."""
        return state["factor"]

    def draw(self, state: Params, eps: Tensor) -> Tensor:
        """Z_G (n,)."""
        return state["loc"] + times(state["factor"], eps)

    def step(self, state: Params, eps: Tensor, gradient: Tensor, scale: Tensor) -> Params:
        """The next state, from the gradient of log (cavity x likelihood) in Z_G (n,); `scale`: share of the first
        rate."""
        factor, rate = state["factor"], scale * self.rate
        score = times(factor.mT if factor.dim() == 2 else factor, gradient) + eps
        if factor.dim() == 1:
            mean_step = (rate * score).clamp(-_MEAN_STEP, _MEAN_STEP)
            grow = self.scale_rate * (0.5 * rate * eps * score).clamp(-_SCALE_STEP, _SCALE_STEP)
            return {"loc": state["loc"] + factor * mean_step, "factor": factor * grow.exp()}
        outer = torch.outer(eps, score)
        mean_step = rate * score
        longest = _MEAN_STEP * len(score) ** 0.5
        mean_step = mean_step * (longest / mean_step.norm().clamp(min=longest))
        grow = 0.25 * rate * (outer + outer.mT)
        grow = self.scale_rate * grow * (_SCALE_STEP / grow.norm().clamp(min=_SCALE_STEP))
        return {
            "loc": state["loc"] + factor @ mean_step,
            "factor": factor + factor @ (grow + 0.5 * grow @ grow),
        }


class NewtonSteps(NaturalSteps):
    """The same natural gradients, at many draws at once, as the update of natural parameters that they are (Khan and
    Nielsen 2018): with P = 1 - E[eps s'] the tilted distribution's precision in q's own coordinates, averaged over q,

        M = (1 - rate) + rate P,    loc += rate F M^-1 E[s],    F <- F M^(-1/2).

    At rate 1 this is Newton's step, exact for a normal target and balanced draws. M is held to `_PRECISIONS`, and the
    mean to a way that grows while the slope at its end still points on, and falls when it points back. Where the
    target is not finite at a draw, the last step is taken back and q made narrower.
    """

    newton = True

    def __init__(self, families: Families) -> None:
        super().__init__(families)
        self.aside = _ASIDE * self.move(start_draws(families.problem.seed, families.n))

    def init(self, q: Natural, tight: bool) -> Params:
        """A first fit begins beside the mean, all silos' to the same side: draws in pairs would never leave a place
        between two signs that are alike."""
        state = super().init(q, tight)
        if tight:
            state["loc"] = state["loc"] + state["factor"] @ self.aside
        return {**state, "last": torch.zeros_like(state["loc"]), "way": self.move(torch.zeros(1, dtype=torch.float64))}

    def step(self, state: Params, eps: Tensor, gradient: Tensor, scale: Tensor) -> Params:
        """The next state, from gradients at draws (S, n)."""
        factor, rate, least = state["factor"], scale * self.rate, _MEAN_STEP * eps.shape[-1] ** 0.5
        finite = torch.isfinite(gradient).all()
        slope = torch.where(finite, gradient, 0.0)
        outer = torch.where(finite, eps.mT @ (slope @ factor + eps) / len(eps), 0.0)
        bent, axes = torch.linalg.eigh(0.5 * (outer + outer.mT))
        precision = (1 - self.scale_rate * rate * bent).clamp(*_PRECISIONS)
        slope = slope.mean(0)
        on = torch.where(slope @ state["last"] > 0, 2.0, 0.5)
        most = torch.where(finite, on * state["way"], 0.25 * state["way"]).clamp(min=least)
        step = axes @ ((axes.mT @ (factor.mT @ slope)) * rate / precision)
        step = step * (most / step.norm().clamp(min=most))
        moved = torch.where(finite, factor @ step, -state["last"])
        narrower = torch.where(finite, precision.rsqrt(), 0.5)
        return {
            "loc": state["loc"] + moved,
            "factor": factor @ (axes * narrower) @ axes.mT,
            "last": torch.where(finite, moved, 0.0),
            "way": torch.where(finite, step.norm(), most),
        }


class TorchSteps:
    """A torch optimiser on the parameters of q in coordinates whitened by the q that was sent; functions as above.

    Steps then have the size of posterior standard deviations, whatever the units of the model.
    """

    def __init__(self, families: Families) -> None:
        config = families.config
        self.move, self.family = families.move, families.shared
        self.optimizer = Optimizer(config.local_optimizer, config.first_rate, config.optimizer_options)

    def init(self, q: Natural, tight: bool) -> Params:
        loc, base = _tight(q) if tight else (q.mean(), q.factor())
        eta = self.family.init(self.move(torch.zeros_like(loc)))
        if not tight:
            eta["log_scale"] = torch.zeros_like(eta["log_scale"])
        return merge(base={"loc": self.move(loc), "factor": self.move(base)}, eta=eta, moments=self.optimizer.init(eta))

    def loc(self, state: Params) -> Tensor:
        return state["base/loc"] + times(state["base/factor"], state["eta/loc"])

    def root(self, state: Params) -> Tensor:
        base, eta = state["base/factor"], part(state, "eta")
        if isinstance(self.family, Full):
            return base @ self.family.root(eta)
        return base * self.family.stddev(eta)

    def draw(self, state: Params, eps: Tensor) -> Tensor:
        u = self.family.transform(part(state, "eta"), eps)
        return state["base/loc"] + times(state["base/factor"], u)

    def step(self, state: Params, eps: Tensor, gradient: Tensor, scale: Tensor) -> Params:
        eta, base = part(state, "eta"), state["base/factor"]
        back = base.mT if base.dim() == 2 else base
        u, transform_vjp = vjp(lambda eta: self.family.transform(eta, eps), eta)
        log_q, log_q_vjp = vjp(lambda u: self.family.log_prob(eta, u), u)
        (q_score,) = log_q_vjp(torch.ones_like(log_q))
        (eta_gradient,) = transform_vjp(times(back, gradient) - q_score)
        eta, moments = self.optimizer.step(eta, eta_gradient, part(state, "moments"), scale)
        return merge(base=part(state, "base"), eta=eta, moments=moments)


# ---- a silo's own latents: q(Z_L | Z_G) is relative to a mean of Z_G that changes from fit to fit ----

#: Largest change of a log sd with one sd of Z_G: a fit that begins far off learns any slope from its way.
_GAIN = 0.7


def reanchored_silo(silo: Params, moved: Tensor, n_silo: int) -> tuple[Params, Tensor]:
    """q(Z_S | Z_G) relative to a mean of Z_G that lies by `moved` (n_global,) further on, and `moved` with what that
    does to the mean of Z_S appended, (n_global + n_silo,). Scales stay: what they follow Z_G by holds near its mean."""
    new = dict(silo)
    silo_moved = moved.new_zeros(n_silo)
    if "coupling" in silo:
        silo_moved = (silo["coupling"] @ moved).reshape(-1)
        new["loc"] = silo["loc"] + silo_moved
    return new, torch.cat([moved, silo_moved])


def reanchored_records(record: Params, moved: Tensor) -> Params:
    """q(Z_L | Z_G, Z_S) relative to means that lie by `moved` (n_global + n_silo,), or (B, n_global + n_silo) of each
    record, further on."""
    if "coupling" not in record:
        return dict(record)
    gains = record["coupling"]
    further = gains @ moved if moved.dim() == 1 else (gains @ moved.unsqueeze(-1)).squeeze(-1)
    return {**record, "loc": record["loc"] + further}


def _gains_times(params: Params, root: Tensor, spread: Tensor) -> Params:
    """Parameters of q(Z_L | Z_G, Z_S), or their gradient, with every gain, by which a mean or log sd follows
    d = (Z_G - mu, Z_S - m), times `root` (n, n), or (n,) of a diagonal one, and `spread`, as many as d has of Z_S."""
    new = dict(params)
    for name in ("coupling", "scale_coupling"):
        if name in params:
            on_global, on_silo = params[name].split([root.shape[0], spread.shape[0]], -1)
            new[name] = torch.cat([on_global @ root if root.dim() == 2 else on_global * root, on_silo * spread], -1)
    return new


def natural_step(params: Params, gradient: Params, rate: Tensor, gains: Tensor, one_draw: bool = True) -> Params:
    """All of q(Z_L | Z_G, Z_S), a row a record, after a step along the natural gradient, gains as of white noise and at
    that share of the rate; no longer than `_MEAN_STEP` sds for a mean and its gains, and `_SCALE_STEP` in logs for a
    scale and its own.

    With white noise u in Z_L = m + L u, Fisher's information is 1 for L^-1 dm and what dm follows Z_G by, and 1 below
    and 2 on the diagonal of L^-1 dL. Steps so need nothing to learn their lengths from, and come to rest where
    gradients that stick the landing do.
    """
    sd = params["log_scale"].exp().unsqueeze(-1)
    n = sd.shape[-2]
    if one_draw and "coupling" in params:  # of one direction of d: along it all gains move at once, and would overshoot
        rate = rate / (1 + rate * params["coupling"].shape[-1])
    unit = unit_lower(params["lower"], n) if "lower" in params else None
    slopes: Params = {"loc": gradient["loc"].unsqueeze(-1)}
    slopes |= {name: gradient[name] for name in ("coupling", "scale_coupling") if name in params}
    means: Params = {"loc": rate * _turned(sd * slopes["loc"], unit, True)}
    if "coupling" in slopes:
        means["coupling"] = rate * gains * _turned(sd * slopes["coupling"], unit, True)
    scales: Params = {"factor": rate * _factor_slope(gradient, params, unit)}
    if "scale_coupling" in slopes:
        scales["scale_coupling"] = rate * gains * slopes["scale_coupling"] / _scale_information(unit)
    new = dict(params)
    for name, step in _shortened(means, _MEAN_STEP).items():
        new[name] = params[name] + (sd * _turned(step, unit, False)).reshape(params[name].shape)
    scales = _shortened(scales, _SCALE_STEP)
    if unit is None:
        new["log_scale"] = params["log_scale"] + scales["factor"].squeeze(-1)
    else:
        step = scales["factor"]
        grown = (unit + unit @ torch.tril(step, -1)) * step.diagonal(dim1=-2, dim2=-1).exp().unsqueeze(-2)
        found = eta_of(new["loc"], grown)
        new["log_scale"], new["lower"] = params["log_scale"] + found["log_scale"], found["lower"]
    if "scale_coupling" in scales:
        gain = params["scale_coupling"] + scales["scale_coupling"]
        new["scale_coupling"] = gain * (_GAIN / gain.norm(dim=-1, keepdim=True).clamp(min=_GAIN))
    return new


def _factor_slope(gradient: Params, params: Params, unit: Tensor | None) -> Tensor:
    """The natural gradient of L^-1 dL: (N, n, 1), its diagonal, where latents are independent, else (N, n, n)."""
    if unit is None:
        return 0.5 * gradient["log_scale"].unsqueeze(-1)
    below = torch.tril(unit_lower(gradient["lower"], unit.shape[-1]), -1)  # of T in L = D T; of L over D, row by row
    on = gradient["log_scale"] - (below * unit).sum(-1)
    slope = torch.tril(unit.mT @ (below + torch.diag_embed(on)))
    return slope - 0.5 * torch.diag_embed(slope.diagonal(dim1=-2, dim2=-1))


def _scale_information(unit: Tensor | None) -> Tensor | float:
    """(N, n, 1) Fisher's information of each log sd alone: 1 + its variance times its precision."""
    if unit is None:
        return 2.0
    eye = torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device).expand_as(unit)
    back = torch.linalg.solve_triangular(unit, eye, upper=False, unitriangular=True)
    return (1 + unit.square().sum(-1) * back.square().sum(-2)).unsqueeze(-1)


def _turned(value: Tensor, factor: Tensor | None, transposed: bool) -> Tensor:
    """T or T' times (N, n, d)."""
    if factor is None:
        return value
    return (factor.mT if transposed else factor) @ value


def _shortened(steps: Params, longest: float) -> Params:
    """Steps (N, ...) that are together no longer than that by latent, sqrt(n) times that by record."""
    n = next(iter(steps.values())).shape[-2]
    most = longest * n**0.5
    length = torch.cat([step.flatten(-2) for step in steps.values()], -1).norm(dim=-1)[:, None, None]
    return {name: step * (most / length.clamp(min=most)) for name, step in steps.items()}


class Anchored:
    """A local family whose parameters hold the mean of Z_G that they are relative to, and the encoder's weights.

    It is what `LocalPosterior` draws from: q's final mean is not the one that the silo fitted against.
    """

    ANCHOR = "anchor"

    def __init__(self, family: LocalFamily, n_global: int) -> None:
        self.family, self.n_global = family, n_global
        self.couples_records, self.sees_shift = family.couples_records, family.sees_shift

    def init(self, loc: Tensor) -> Params:
        return self.family.init(loc)

    def init_theta(self, dtype: torch.dtype) -> Params:
        return self.family.init_theta(dtype)

    def moments(
        self, params: Params, theta: Params, rows: Mapping[str, Tensor], z_global: Tensor, shift: Tensor
    ) -> Params:
        if self.ANCHOR in params:
            shift = torch.cat([z_global - params[self.ANCHOR], shift[self.n_global :]])
        inner = {name: value for name, value in params.items() if name != self.ANCHOR}
        return self.family.moments(inner, {**theta, **inner}, rows, z_global, shift)


# ---- fits without noise of their own, for models without local latents: expectations are over draws that are the same
# at every silo and in every step ----

_CHUNK = 32  # draws whose second derivatives are held at once
#: Standard deviations of a step from which on iterations change nothing.
_STILL = 1e-12
_NOT_QUADRATIC = "local_optimizer = 'closed_form' is for Gaussian likelihoods with known variance"


class ExactFit:
    """q for a silo, from its cavity and likelihood; the same call gives the same answer."""

    def __init__(self, families: Families) -> None:
        self.families, self.config, self.problem = families, families.config, families.problem
        self._eps = fixed_noise(self.problem.seed, families.n)
        self._moments = Traced(self._moments_function, (None, None, 0, 0), self.problem.mode)
        if self.config.local_optimizer == CLOSED_FORM:
            self._check_made()

    def __call__(self, q: Natural, cavity: Natural, theta: Params, view: SiloView) -> tuple[Natural, float, Params]:
        """The fitted q, E_q[log p(y)] in nats, and its gradient in theta."""
        if self.config.local_optimizer == CLOSED_FORM:
            end, value = self._closed_form(q, cavity, view)
            return end, value, {}
        end = q
        for _ in range(self.config.local_steps):
            before, end = end, self._stepped(end, cavity, theta, view)
            if not end.proper or distance(before, end) < _STILL:
                break
        if not end.proper:
            return end, math.nan, theta
        z, likelihood = self._draws(end), self.likelihood(view)
        value = float(vmap(lambda z: likelihood(z, theta))(z).mean())
        gradients = vmap(lambda z: grad(lambda theta: likelihood(z, theta))(theta))(z) if theta else {}
        return end, value, {name: v.mean(0) for name, v in gradients.items()}

    def target(self, q: Natural, theta: Params, view: SiloView) -> Natural:
        """What the site of a fixed point at q is (paper, equation 3)."""
        parts = [self._moments(z, theta, view.rows, view.weights) for z in self._draws(q).split(_CHUNK)]
        slope, curvature = (torch.stack(p).mean(0).to("cpu", torch.float64) for p in zip(*parts, strict=True))
        return matching(q, slope, curvature)

    def _moments_function(self, z: Tensor, theta: Params, rows: Params, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Mean gradient (n,) and Hessian (n, n) of log p(y) over draws z (S, n)."""

        def log_likelihood(z: Tensor) -> Tensor:
            return self._log_likelihood(z, theta, rows, weights)

        return vmap(grad(log_likelihood))(z).mean(0), vmap(jacrev(grad(log_likelihood)))(z).mean(0)

    def _stepped(self, q: Natural, cavity: Natural, theta: Params, view: SiloView) -> Natural:
        """One damped fixed-point step of the site (equation 4), or one of gradient ascent on the local free energy in
        q's natural parameters, which is the same residual times the Fisher information."""
        residual = self.target(q, theta, view).minus(q.minus(cavity))
        if self.config.local_optimizer != FIXED_POINT:
            residual = fisher_times(q, residual)
        return q.plus(residual, self.config.first_rate)

    def _draws(self, q: Natural) -> Tensor:
        """(S, n) of q."""
        return self.families.move(draws(q, self._eps))

    def likelihood(self, view: SiloView) -> Callable[[Tensor, Params], Tensor]:
        """log p(y) of a silo, of Z_G (n,) and theta."""
        return lambda z, theta: self._log_likelihood(z, theta, view.rows, view.weights)

    def _log_likelihood(self, z: Tensor, theta: Params, rows: Params, weights: Tensor) -> Tensor:
        records = self.problem.density.evaluate(z, z.new_zeros(0), z.new_zeros(len(weights), 0), theta, rows).records
        return (weights * records).sum()

    def _check_made(self) -> None:
        """Raises InputError where the likelihood is not quadratic on made data: at all parties alike, and before a job
        under privacy could do no more than send noise."""
        problem, move = self.problem, self.families.move
        made = problem.schema.dummy_rows(2).items()
        rows = {name: move(v) if v.is_floating_point() else v.to(problem.device) for name, v in made}
        at, weights = move(problem.start.z_global), move(torch.ones(2))
        if quadratic(lambda z: self._log_likelihood(z, {}, rows, weights), at, True, problem.dtype) is None:
            raise InputError(f"the log likelihood is not quadratic in the global latents; {_NOT_QUADRATIC}")

    def _closed_form(self, q: Natural, cavity: Natural, view: SiloView) -> tuple[Natural, float]:
        """The silo's likelihood is a Gaussian factor: q is cavity x likelihood, or its diagonal approximation, by
        divergence KL(q || .) or, for alpha > 0, by power EP's moments (paper, Algorithm 2 with damping 1)."""
        log_likelihood, full = self.likelihood(view), self.families.full
        at = self.families.move(self.problem.start.z_global)
        likelihood = quadratic(lambda z: log_likelihood(z, {}), at, True, self.problem.dtype)
        if likelihood is None:
            raise InputError(
                f"silo '{view.silo}': its log likelihood is not quadratic in the global latents; {_NOT_QUADRATIC}"
            )
        if full:
            end = cavity.plus(likelihood)
        elif self.config.alpha:
            site = q.minus(cavity)
            replaced = likelihood.minus(Natural(site.shift, torch.diag(site.precision)))
            tilted = Natural(q.shift, torch.diag(q.precision)).plus(replaced, self.config.alpha)
            matched = from_moments(tilted.mean(), tilted.covariance().diagonal())
            end = q.plus(matched.minus(q), 1 / self.config.alpha)
        else:
            tilted = Natural(cavity.shift, torch.diag(cavity.precision)).plus(likelihood)
            diagonal = tilted.precision.diagonal()
            end = Natural(diagonal * tilted.mean(), diagonal)
        if not end.proper:
            return end, math.nan
        mean, covariance = end.mean(), end.covariance()
        spread = covariance if full else torch.diag(covariance)
        value = float(log_likelihood(self.families.move(mean), {}))
        return end, value - 0.5 * float((likelihood.precision * spread).sum())


def fisher_times(q: Natural, change: Natural) -> Natural:
    """The Fisher information of q in natural parameters times a change of them: the derivative of its mean parameters
    (E[z], -E[z z'] / 2) along the change. It turns a natural gradient into a gradient."""

    def mean_parameters(shift: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        if not q.full:
            mean = shift / precision
            return mean, -0.5 * (1 / precision + mean.square())
        covariance = torch.linalg.inv(precision)
        mean = covariance @ shift
        return mean, -0.5 * (covariance + torch.outer(mean, mean))

    shift, precision = jvp(mean_parameters, (q.shift, q.precision), (change.shift, change.precision))[1]
    return Natural(shift, precision)


# ---- where silos' own latents are integrated out (`eliminated`) ----


def marginal_gradient(density: LogDensity) -> SiloFunction:
    """As `objective.silo_gradient`, of log p(y_j | Z_G) itself. `silo` of what it gives is no gradient but q(Z_S | Z_G)
    as it is around this Z_G, relative to the mean of Z_G that what it was given is relative to.

    The slope of log det H is the mean of that of w' H w over w = H^(-1/2) signs (Hutchinson 1990), at the signs of
    eps_S: without noise where groups are apart from each other, as nested ones are, and at the cost of one latent.
    """

    def run(
        z_global: Tensor, shift: Tensor, theta: Params, local_params: Params, silo: Params, rows: Params,
        weights: Tensor, eps_local: Tensor, eps_silo: Tensor,
    ) -> SiloGradient:  # fmt: skip
        start = silo["loc"][0] + (silo["coupling"][0] @ shift if "coupling" in silo else 0.0)
        at, found = nearer_mode(joint_of(density, theta, rows, weights), start, z_global, silo)
        signs = torch.where(eps_silo[0] < 0, -1.0, 1.0).to(at).unsqueeze(-1)
        w = torch.linalg.solve_triangular(found.lower.mT, signs, upper=True).squeeze(-1)

        def slope_of(z_global: Tensor, theta: Params) -> tuple[Tensor, Tensor]:
            joint = joint_of(density, theta, rows, weights)
            slope = torch.func.grad(joint)(at, z_global)
            mode = at + solved(found.lower, slope)  # whose derivatives in Z_G and theta are the mode's
            height = joint(mode, z_global)
            pull = torch.func.vjp(lambda z: torch.func.grad(joint)(z, z_global), mode)[1]
            return height + 0.5 * (pull(w)[0] * w).sum(), height

        of_global, of_theta, height = _slopes(slope_of, z_global, theta)
        value = height - found.lower.diagonal().log().sum() + 0.5 * len(at) * math.log(2 * math.pi)
        new = silo_params(at, found, silo)
        if "coupling" in new:
            new["loc"] = new["loc"] - new["coupling"][0] @ shift
        return SiloGradient(value, of_global, torch.zeros_like(of_global), of_theta, {}, new)

    return run


def _slopes(
    fn: Callable[[Tensor, Params], tuple[Tensor, Tensor]], z: Tensor, theta: Params
) -> tuple[Tensor, Params, Tensor]:
    """The gradient of the first of what `fn` gives, in both, and the second."""
    (of_z, of_theta), second = torch.func.grad(fn, argnums=(0, 1), has_aux=True)(z, theta)
    return of_z, of_theta, second


def at_mean(density: LogDensity, mean: Tensor, theta: Params, silo: Params, rows: Params, weights: Tensor) -> Params:
    """q(Z_S | Z_G) around that mean of Z_G, from parameters that are relative to it."""
    at, found = to_mode(joint_of(density, theta, rows, weights), silo["loc"][0], mean)
    return silo_params(at, found, silo)
