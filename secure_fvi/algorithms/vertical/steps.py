"""A round's mathematics: pure functions of one silo's columns, and at the server of totals and the response.

    draw      silo: theta_j, eta_j, z_j from q; z_j is what it adds to the first secure sum
    gamma     server: a draw of the shared parameters from q(gamma), broadcast with every round
    respond   augmented, server: dlog p(y | s, gamma)/ds, the same (N, C) for all silos, and the gradient in gamma
    slope     power, silo: d_j = w_j dlog p / d predictor at eta_j + s - z_j, for the second sum
    update    silo: one or several ascent steps on q, given the pull on z_j: dlog p(y | s)/ds in the augmented-variable
              model, D - d_j with D = sum_k d_k in the power-likelihood model; server: a step on q(gamma)

(Hassan et al. 2024, Algorithms 1 and 2, eqs. 11 to 17; the derivative of g in (12) and (16) is in psi.) Silos never
see each other's z_k or d_k, only s and D; the server learns s, D, the gradient in gamma and the bound's terms in sum.
Gradients stick the landing. Several steps answer one pull; in between the likelihood stands in by the quadratic that
bounds it from below, pull (z' - z) - h/2 (z' - z)^2, all draws held fixed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.algorithms.kit import Rows, evaluated
from secure_fvi.algorithms.vertical.likelihoods import Likelihood, slopes
from secure_fvi.algorithms.vertical.predictors import Predictor, each_alone, log_normal
from secure_fvi.compiled import Calls, Mode, TracedOnMade, by_itself, flatten, structure
from secure_fvi.errors import SecureFVIWarning, UntestedOperation, one_line
from secure_fvi.families import GlobalFamily, global_family
from secure_fvi.families.gaussian import Point
from secure_fvi.optimizers import Optimizer, local_units, mean_units
from secure_fvi.privacy.gate import MOST_ROWS
from secure_fvi.trees import Params, merge, part

if TYPE_CHECKING:
    from secure_fvi.algorithms.vertical.vertical import Vertical

# ---- What q, a product over the silos and gamma, leaves out ----


def led(family: GlobalFamily, eta: Params, gradient: Tensor, eps: Tensor) -> Tensor:
    """(2, n): how far from q's mean the other parties' draws of a round lead each mean, and one's own draw by `eps`, in
    q's sds. gradient (n,): of the means, sticking the landing, so that the own draw has no part in it where q is the
    conditional."""
    if not family.noise_size:  # a point
        return torch.zeros_like(gradient).expand(2, -1)
    at = gradient.new_zeros(family.noise_size)

    def transform(eps: Tensor) -> Tensor:
        return family.transform(eta, eps)

    (own,) = torch.func.vjp(transform, at)[1](gradient)
    moved = torch.func.jvp(transform, (at,), (own,))[1]
    return torch.stack([moved, transform(eps) - eta["loc"]]) / family.stddev(eta)


#: Up to which mean product of the own draw q's sds are at rest.
_AT_REST = 0.4


class Led(NamedTuple):
    """What `led` was over the rounds that are averaged."""

    last: Tensor  # (n,)
    square: Tensor  # (n,) its variance, from differences of rounds: the means drift meanwhile
    own: Tensor  # (n,) its mean product with the own draw: 0 where q's sds are at rest, less where they are too large

    def then(self, moved: Tensor, averaged: int) -> Led:
        """After a round, the `averaged`-th of those; moved: `led`."""
        by, own = moved
        one = 1.0 / max(averaged, 1)
        square, product = (by - self.last).square() / 2, by * own
        return Led(by, torch.lerp(self.square, square, one), torch.lerp(self.own, product, one))

    def widening(self) -> Tensor:
        """(n,) roughly how many times a posterior's sds are q's: q has a conditional's variance, and what its mean
        moves with the others comes to that. Of two parties a share 1 - square of the precision is left, and more are at
        least as far off; past .9, where a mean over rounds is too rough for that, variances add up. 1 where q's own sds
        are not at rest, which moves it as well."""
        found = torch.maximum(1 / (1 - self.square.clamp(max=0.9)), 1 + self.square).sqrt()
        return torch.where(self.own.abs() > _AT_REST, 1.0, found)

    def too_wide(self) -> Tensor:
        """(n,) roughly how many times q's sds are those at which it would rest; 1 where they nearly are."""
        return torch.where(self.own < -_AT_REST, (1 - self.own).clamp(min=1).sqrt(), 1.0)


# ---- A silo's half ----


class SiloParams(NamedTuple):
    """q's parameters. They never leave the silo."""

    shared: Params  # "theta/...": of q(theta_j); "z/...": of q(z_j | theta_j); "point/...": pyro.params
    record: Params  # (N, C) each: of q(z_j) in the mean field, a row a record


class Moments(NamedTuple):
    """The optimiser's state for `SiloParams`."""

    shared: Params
    record: Params


class Response(NamedTuple):
    """What is known of the response where it is known; both (N,)."""

    y: Tensor
    offset: Tensor


class Noise(NamedTuple):
    """Standard normals of one round, from the silo's own generator."""

    theta: Tensor  # (noise_size,)
    z: Tensor  # (N, C)


class Draw(NamedTuple):
    """One draw from q. `z` and `local` are contributed; the rest stays."""

    theta: Tensor  # (n,)
    eta: Tensor  # (N, C)
    z: Tensor  # (N, C)
    local: Tensor  # () log p(z | eta) / q(z | theta), weighted, + log p(theta) / q(theta), nats


class Incoming(NamedTuple):
    """What an update answers. All of it follows from broadcasts and what the silo sent itself."""

    pull: Tensor  # (N, C) derivative of the likelihood terms in z_j, unweighted
    curvature: Tensor  # () h, a bound on minus its second derivative
    others: Tensor  # (N, C) s - z_j; used by the power-likelihood model only
    gamma: Tensor  # (n_gamma,); likewise
    share: Tensor  # () w_j; likewise


class VerticalSilo:
    """A configuration bound to one silo's predictor. `response` arguments are () where the response is private."""

    def __init__(
        self, config: Vertical, likelihood: Likelihood, predictor: Predictor, silos: int, optimizer: Optimizer
    ) -> None:
        self.config, self.likelihood, self.predictor, self.optimizer = config, likelihood, predictor, optimizer
        self.silos, self.kept, self.log_rho = silos, config.kept(silos), math.log(config.rho)
        self.family = global_family(config.family_in_use, predictor.n)
        self._sees = config.response == "shared"
        example = torch.zeros(1, dtype=predictor.start.dtype)
        width = likelihood.features(example).shape[-1] if self._sees else 0
        self.auxiliary = config.auxiliary.build(likelihood.columns, width, config.rho)

    def init(self, records: int, generator: torch.Generator) -> tuple[SiloParams, Moments]:
        """q at its start: theta_j at the centre of its prior."""
        theta = self.family.init(self.predictor.start)
        z, record = self.auxiliary.init(records, generator, self.predictor.start.dtype)
        params = SiloParams(merge(theta=theta, z=z, point=self.predictor.points), record)
        by_row = self.config.batch_size is not None
        return params, Moments(self.optimizer.init(params.shared), self.optimizer.init(record, by_row))

    def draw(self, params: SiloParams, rows: Params, response: Any, weights: Tensor, noise: Noise) -> Draw:
        """Phase 1. rows (N, ...), weights (N,): records / batch size, 0 for padding."""
        return self._draw(params, params, rows, response, weights, noise)

    def slope(
        self, draw: Draw, response: Response, weights: Tensor, predictor_sum: Tensor, gamma: Tensor, share: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Phase 2 of the power-likelihood model, from s (N, C) and w_j (): d_j (N, C), unweighted by record; the
        gradient in gamma and the value w_j log p, weighted."""
        at = draw.eta + predictor_sum - draw.z
        found = slopes(self.likelihood, response.y, response.offset, at, gamma, weights)
        return share * found.predictor, share * found.gamma, share * found.value

    def gradient(
        self,
        params: SiloParams,
        rows: Params,
        response: Any,
        weights: Tensor,
        noise: Noise,
        sent: Tensor,
        incoming: Incoming,
    ) -> SiloParams:
        """Sticking-the-landing gradient of the bound in q's parameters; `sent` (N, C) is the z_j of `draw`."""

        def bound(free: SiloParams) -> Tensor:
            draw = self._draw(free, params, rows, response, weights, noise)
            moved = draw.z - sent
            pulled = (incoming.pull * moved - 0.5 * incoming.curvature * moved.square()).sum(-1)
            if self.config.is_power:
                at = draw.eta + incoming.others + response.offset.unsqueeze(-1)
                pulled = pulled + incoming.share * self.likelihood.log_prob(response.y, at, incoming.gamma)
            return draw.local + (weights * pulled).sum()

        return torch.func.grad(bound)(params)

    def draw_by_record(self, params: SiloParams, rows: Params, response: Any, noise: Noise) -> Tensor:
        """z (N, C) of `draw`, each row evaluated alone: it follows from that person's columns, whatever the program
        does with a batch."""

        def record(own: Params, row: Params, y: Any, z: Tensor) -> Tensor:
            one = SiloParams(params.shared, own)
            return self._draw_one(one, one, row, y, Noise(noise.theta, z)).z.squeeze(0)

        mapped = each_alone(record, (0, 0, 0 if response else None, 0), len(noise.z))
        found: Tensor = mapped(params.record, rows, response, noise.z)
        return found

    def gradient_by_record(
        self, params: SiloParams, rows: Params, response: Any, noise: Noise, sent: Tensor, incoming: Incoming
    ) -> SiloParams:
        """The parts of the same gradient (augmented-variable model): each record's own, unweighted, with a first axis
        (N, ...) throughout, each row evaluated alone. What depends on no record is `prior_gradient`."""

        def record(free: SiloParams, row: Params, y: Any, z: Tensor, sent: Tensor, pull: Tensor) -> Tensor:
            held = SiloParams(params.shared, {k: v.detach() for k, v in free.record.items()})
            draw = self._draw_one(free, held, row, y, Noise(noise.theta, z))
            moved = draw.z - sent
            pulled = (pull * moved - 0.5 * incoming.curvature * moved.square()).sum()
            return draw.local + pulled

        axes = (SiloParams(None, 0), 0, 0 if response else None, 0, 0, 0)  # type: ignore[arg-type]
        mapped = each_alone(torch.func.grad(record), axes, len(sent))
        return SiloParams(*mapped(params, rows, response, noise.z, sent, incoming.pull))

    def prior_gradient(self, params: SiloParams, noise_theta: Tensor) -> Params:
        """Of log p(theta) / q(theta) in `params.shared`, from made data."""

        def prior(free: Params) -> Tensor:
            theta = self.family.transform(part(free, "theta"), noise_theta)
            log_prior = self.predictor.log_prior(theta, part(free, "point"))
            return log_prior - self.family.log_prob(part(params.shared, "theta"), theta)

        return torch.func.grad(prior)(params.shared)

    def made(self, count: int) -> tuple[Params, Params, Any, Tensor]:
        """What `count` made records have of their own, of which none is anybody's: a row of q at its start, of the
        columns and of the response where silos know it, and noise (count, C)."""
        start, generator = self.predictor.start, torch.Generator().manual_seed(0)
        record = {k: v.to(start) for k, v in self.init(count, generator)[0].record.items()}
        z = torch.randn(count, self.likelihood.columns, generator=generator, dtype=torch.float64).to(start)
        response = Response(z.new_zeros(count), z.new_zeros(count)) if self._sees else ()
        return record, self.predictor.made(count), response, z

    def update(
        self,
        params: SiloParams,
        moments: Moments,
        rows: Params,
        response: Any,
        weights: Tensor,
        noise: Noise,
        incoming: Incoming,
        scale: Tensor,
    ) -> tuple[SiloParams, Moments, Tensor]:
        """The local steps of one round, `scale` () times the learning rate each; and `led` of theta_j, (2, n)."""
        sent = self.draw(params, rows, response, weights, noise).z
        new, first = params, part(params.shared, "theta")["loc"]
        for step in range(self.config.local_steps):
            found = self.gradient(new, rows, response, weights, noise, sent, incoming)
            first = first if step else found.shared["theta/loc"]
            new, moments = self.ascend(new, moments, found, self.units(new), scale)
        moved = led(self.family, part(params.shared, "theta"), first, noise.theta)
        if self.kept == 1:
            return new, moments, moved
        return SiloParams(*(self._mix(a, b) for a, b in zip(params, new, strict=True))), moments, moved

    def ascend(
        self, params: SiloParams, moments: Moments, gradient: SiloParams, units: SiloParams, scale: Tensor
    ) -> tuple[SiloParams, Moments]:
        """One step of the optimiser: element by element, so that silos of equal shape can be stacked."""
        shared, m_shared = self.optimizer.step(params.shared, gradient.shared, moments.shared, scale, units.shared)
        record, m_record = self.optimizer.step(params.record, gradient.record, moments.record, scale, units.record)
        return SiloParams(shared, record), Moments(m_shared, m_record)

    def units(self, params: SiloParams) -> SiloParams:
        """Means take longer steps where q is wide (`optimizers.mean_units`)."""
        record = local_units(params.record)
        return SiloParams({"theta/loc": mean_units(self.family.stddev(part(params.shared, "theta")))}, record)

    def _draw_one(self, free: SiloParams, held: SiloParams, row: Params, y: Any, noise: Noise) -> Draw:
        """`_draw` of one record, without the prior; everything of the record comes without an axis of records."""
        free, held = (p._replace(record={k: v.unsqueeze(0) for k, v in p.record.items()}) for p in (free, held))
        one_row = {k: v.unsqueeze(0) for k, v in row.items()}
        seen = Response(*(v.unsqueeze(0) for v in y)) if y else ()
        z = noise.z.unsqueeze(0)
        return self._draw(free, held, one_row, seen, z.new_ones(1), Noise(noise.theta, z), prior=False)

    def _draw(
        self,
        free: SiloParams,
        held: SiloParams,
        rows: Params,
        response: Any,
        weights: Tensor,
        noise: Noise,
        prior: bool = True,
    ) -> Draw:
        """A draw along `free`, with the densities of q taken at `held`: equal but for their derivatives."""
        theta = self.family.transform(part(free.shared, "theta"), noise.theta)
        eta, log_prior = self.predictor.evaluate(theta, part(free.shared, "point"), rows)
        log_q = self.family.log_prob(part(held.shared, "theta"), theta) if prior else 0.0
        log_prior = log_prior if prior else torch.zeros_like(log_prior)
        if self.auxiliary.integrated:
            return Draw(theta, eta, eta, log_prior - log_q)
        features = self.likelihood.features(response.y) if self._sees else eta[:, :0]
        loc, log_scale = self.auxiliary.moments(part(free.shared, "z"), free.record, eta, features)
        z = loc + log_scale.exp() * noise.z
        loc, log_scale = self.auxiliary.moments(part(held.shared, "z"), held.record, eta, features)
        log_ratio = log_normal(z, eta, torch.full_like(eta, self.log_rho)) - log_normal(z, loc, log_scale)
        return Draw(theta, eta, z, (weights * log_ratio).sum() + log_prior - log_q)

    def _mix(self, old: Params, new: Params) -> Params:
        return {name: torch.lerp(value, new[name], self.kept) for name, value in old.items()}


# ---- The server's half ----


class ServerParams(NamedTuple):
    """q(gamma) and the optimiser's state for it. Follows from broadcasts and totals; everyone may see it."""

    eta: Params
    moments: Params


class Answer(NamedTuple):
    """The server's view of one s in the augmented-variable model."""

    pull: Tensor  # (N, C) dlog p(y | s, gamma)/ds, unweighted; broadcast: it gives labels away
    curvature: Tensor  # () bound on minus the second derivative; broadcast
    gamma: Tensor  # (n_gamma,) weighted gradient of log p in gamma
    value: Tensor  # () weighted log p(y | s, gamma), nats


class VerticalServer:
    """The halves of a round at the server, for one likelihood."""

    def __init__(self, likelihood: Likelihood, optimizer: Optimizer, dtype: torch.dtype, family: str = "auto") -> None:
        """`family` as in `families.global_family`, or "point" for a point estimate of gamma."""
        self.likelihood, self.optimizer, self.dtype = likelihood, optimizer, dtype
        n = likelihood.gamma_size
        self.family: GlobalFamily = Point(n) if family == "point" else global_family(family, n)

    def init(self) -> ServerParams:
        eta = self.family.init(torch.zeros(self.likelihood.gamma_size, dtype=self.dtype))
        return ServerParams(eta, self.optimizer.init(eta))

    def gamma(self, eta: Params, eps: Tensor) -> Tensor:
        """(n_gamma,) from public noise eps (noise_size,)."""
        return self.family.transform(eta, eps)

    def respond(self, response: Response, predictor_sum: Tensor, gamma: Tensor, weights: Tensor) -> Answer:
        """From s (N, C), the records' weights (N,) and the response, which the server holds."""
        found = slopes(self.likelihood, response.y, response.offset, predictor_sum, gamma, weights)
        return Answer(found.predictor, self.curvature(response.offset, predictor_sum, gamma), found.gamma, found.value)

    def curvature(self, offset: Tensor, predictor_sum: Tensor, gamma: Tensor) -> Tensor:
        """The bound that several local steps use; any party can compute it from s."""
        return self.likelihood.curvature(predictor_sum + offset.unsqueeze(-1), gamma)

    def update(
        self, params: ServerParams, gamma_gradient: Tensor, eps: Tensor, scale: Tensor
    ) -> tuple[ServerParams, Tensor, Tensor]:
        """q(gamma) after one step, log p(gamma) / q(gamma) before it, () nats, and `led` of gamma, (2, n_gamma)."""
        gradient, value = self.gradient(params.eta, gamma_gradient, eps)
        moved = led(self.family, params.eta, gradient["loc"], eps)
        return self.ascend(params, gradient, self.units(params.eta), scale), value, moved

    def gradient(self, eta: Params, gamma_gradient: Tensor, eps: Tensor) -> tuple[Params, Tensor]:
        """Sticking-the-landing gradient of the bound in eta, and log p(gamma) / q(gamma), () nats."""

        def bound(free: Params) -> tuple[Tensor, Tensor]:
            gamma = self.family.transform(free, eps)
            value = self.likelihood.log_prior(gamma) - self.family.log_prob(eta, gamma)
            return value + gamma @ gamma_gradient, value

        return torch.func.grad(bound, has_aux=True)(eta)

    def ascend(self, params: ServerParams, gradient: Params, units: Params, scale: Tensor) -> ServerParams:
        """One step of the optimiser: element by element, so that runs can be stacked."""
        return ServerParams(*self.optimizer.step(params.eta, gradient, params.moments, scale, units))

    def units(self, eta: Params) -> Params:
        """Means take longer steps where q is wide (`optimizers.mean_units`)."""
        return {"loc": mean_units(self.family.stddev(eta))}


# ---- under record privacy ----


class ByRecord:
    """A function of shared values and a batch of records that evaluates each record alone (`each_alone`).

    function: (shared, records) -> found, both nested; records and found have an axis (B, ...) of records throughout.
    made: so many made records, which hold nobody's values. what: of whom a warning speaks.
    """

    def __init__(self, function: Callable[[Any, Any], Any], made: Callable[[int], Any], mode: Mode, what: str) -> None:
        self.function, self.made, self.what = function, made, what
        self.traced = TracedOnMade(function, lambda shared, records: (shared, records), mode)
        self._like, self._build = list[Tensor](), structure([])  # what is found of made records
        self._warned = False

    def check(self, shared: Any) -> None:
        """Evaluate made records; raises what the function raises or catches. Call it before any record is evaluated."""
        with Calls() as calls:
            found = self.function(shared, self.made(2))
        if calls.failed:
            raise UntestedOperation(f"it catches that {', '.join(sorted(calls.failed))} fails, and goes another way")
        self._like, self._build = flatten(found), structure(found)

    def __call__(self, shared: Any, records: Any) -> Any:
        """What is found of each record (B, ...), not a number where the function raises on it."""
        with by_itself():
            count = len(flatten(records)[0])
            ways = self._together if self.traced.traced or self._can_be_together(shared) else self._one_by_one
            step, blocks = ways(shared, records, count)
            found: list[Tensor] = [v.new_full((count, *v.shape[1:]), math.nan) for v in self._like]
            for block in blocks:
                new, rows, _ = evaluated(block, step, count)
                if new is not None:
                    kept = np.flatnonzero(rows < count)
                    for into, value in zip(found, flatten(new), strict=True):
                        into[rows[kept]] = value.detach()[kept]
            return self._build(iter(found))

    def _can_be_together(self, shared: Any) -> bool:
        """Whether made records can, with what is shared now."""
        try:
            self.check(shared)
            return True
        except Exception as error:  # the program is the user's
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self.what} fails on made records ({type(error).__name__}: {one_line(error)}): under record "
                    "privacy those of people are then evaluated one by one, which is slow. Write it with other "
                    "operations",
                    SecureFVIWarning,
                    stacklevel=2,
                )
            return False

    def _together(self, shared: Any, records: Any, count: int) -> tuple[Callable[[Rows], Any], Iterator[Rows]]:
        """Blocks of one shape; the last one is filled up with the spare record, of number `count`."""
        blocks = -(-count // MOST_ROWS)
        size = -(-count // blocks)
        run, take = self.traced.ready(shared, self.made(size)), _places(records, self.made(1))
        filled = np.append(np.arange(count), np.full(blocks * size - count, count)).reshape(blocks, size)
        return lambda rows: run(shared, take(rows)), iter(filled)

    def _one_by_one(self, shared: Any, records: Any, count: int) -> tuple[Callable[[Rows], Any], Iterator[Rows]]:
        take = _places(records, self.made(1))
        return lambda rows: self.function(shared, take(rows)), iter(np.arange(count).reshape(count, 1))


def _places(records: Any, spare: Any) -> Callable[[Rows], Any]:
    """Records by number, with the spare one after the last: copies, which lie in memory alike whoever they are."""
    leaves = [torch.cat([own, made.to(own)]) for own, made in zip(flatten(records), flatten(spare), strict=True)]
    build = structure(records)

    def take(rows: Rows) -> Any:
        at = torch.from_numpy(rows)
        return build(iter([leaf[at.to(leaf.device)] for leaf in leaves]))

    return take
