"""A silo of a vertical run as `algorithms.base.SiloProgram`: it finishes its last round, then draws z_j anew.

One exchange a round in the augmented-variable model: the broadcast of round r carries the pull on what silos sent
before, so that a silo first takes that round's steps, its noise replayed from its own keyed generator, and then sends
a new z_j. An absent silo does the same later, for the round it was last in. In the power-likelihood model a second
exchange sums d_j, and what the update needs of it waits in the silo's state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms import stopping
from secure_fvi.algorithms.base import Broadcast, Pending, adopt_if_used
from secure_fvi.algorithms.by_record import ByRecord
from secure_fvi.algorithms.vertical.config import SLOPE_PHASE, Vertical
from secure_fvi.algorithms.vertical.frame import HIDDEN_PHASE, VerticalFrame, VerticalProblem, VerticalView
from secure_fvi.algorithms.vertical.predictors import Predictor
from secure_fvi.algorithms.vertical.silo import Draw, Incoming, Moments, Noise, Response, SiloParams, VerticalSilo
from secure_fvi.algorithms.vertical.weights import logit_step, share
from secure_fvi.compiled import Traced, TracedOnMade
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.optimizers import Optimizer
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.trees import Params, part, put, running_average, take, to_numpy


class Answered(NamedTuple):
    """Power likelihood: what the sum of slopes left for the update."""

    own: Tensor  # (B, C) d_j
    others: Tensor  # (B, C) s - z_j
    gamma: Tensor  # (n_gamma,)
    share: Tensor  # () w_j
    log_likelihood: Tensor  # () l_j, nats


class VerticalLocal(NamedTuple):
    """A silo's state. It never leaves the silo."""

    params: SiloParams
    moments: Moments
    average: Params  # of params.shared, over the last rounds
    averaged: int
    sent_round: int  # the round whose z_j the server has, -1 before the first
    turn: int  # of the silo's own count when it drew that z_j: its noise is replayed from there
    sent: Tensor  # (N, C) that z_j under staleness, (0, C) otherwise
    logit: Tensor  # () of the likelihood weight
    answered: Answered
    monitor: stopping.Monitor  # of q(theta_j)


class VerticalSiloProgram:
    """One silo's program: predictors differ between silos, so that each has its own."""

    def __init__(self, config: Vertical, problem: VerticalProblem, predictor: Predictor) -> None:
        self.config, self.problem, self.predictor = config, problem, predictor
        self.frame = VerticalFrame(config, problem)
        self.tables, self.terms, self.order = self.frame.tables, self.frame.terms, self.frame.order
        optimizer = Optimizer(config.optimizer, config.learning_rate)
        self.core = VerticalSilo(config, problem.likelihood, predictor, len(problem.silos), optimizer)
        mode = problem.mode
        self._draw = Traced(self.core.draw, (None,) * 5, mode, by_shape=True)
        self._slope = Traced(self.core.slope, (None,) * 6, mode, by_shape=True)
        self._update = Traced(self.core.update, (None,) * 8, mode, by_shape=True)
        if self.terms:
            self._draws = ByRecord(self._draw_function, self.core.made, mode, "the predictor")
            self._gradients = ByRecord(self._gradient_function, self._made_answered, mode, "the predictor's gradient")
            self._prior_gradient = Traced(self.core.prior_gradient, (None,) * 2, mode, by_shape=True)
            self._ascend = TracedOnMade(self._ascend_function, self._made_ascent, mode)
            self._check_alone()

    def init_local(self, view: VerticalView) -> VerticalLocal:
        generator = torch.Generator().manual_seed(view.start_seed)
        params, moments = self.core.init(view.size, generator)
        params, moments = SiloParams(*map(self._moved, params)), Moments(*map(self._moved, moments))
        zero = self.frame.move(torch.zeros(0, self.frame.columns))
        sent = zero.new_zeros(view.size, self.frame.columns) if self.config.max_staleness else zero
        gamma, scalar = zero.new_zeros(self.frame.gamma_size), zero.new_zeros(())
        answered = Answered(zero, zero, gamma, scalar, scalar)
        return VerticalLocal(params, moments, params.shared, 0, -1, 0, sent, scalar, answered, stopping.start())

    def contribute(
        self, message: Broadcast, local: VerticalLocal, view: VerticalView, gate: Gate
    ) -> tuple[Release, VerticalLocal]:
        if message.phase == SLOPE_PHASE:
            return self._contribute_slope(message, local, view, gate)
        if local.sent_round >= 0:
            local = self._finish_round(message, local, view, gate)
        local = local._replace(sent_round=message.round, turn=view.turn)
        if self.terms:
            return gate.release_rows(self._rows_alone(local, self._record_params(local), view).detach()), local
        draw = self._draw_at(local, view)
        z = draw.z
        if self.config.max_staleness:
            z, local = draw.z - local.sent, local._replace(sent=draw.z)
        blocks = {"auxiliary": z, "local": draw.local, "unsettled": torch.tensor(float(not _settled(local)))}
        if self.config.weight_concentration is not None:
            blocks["mass"] = local.logit.exp()
        return gate.release(self._flat(message.phase, blocks)), local

    def commit(self, local: VerticalLocal, pending: Pending, accepted: int) -> VerticalLocal:
        return adopt_if_used(local, pending, accepted)

    def local_fit(self, local: VerticalLocal) -> Params:
        """q(theta_j) and the fitted `pyro.param`s, averaged over the last rounds: "theta/...", "point/..."."""
        return local.average if local.averaged else local.params.shared

    def thetas(self, local: VerticalLocal, n: int, seed: int) -> Tensor:
        """`n` draws of theta_j (n, n_theta), unconstrained. For the silo's own eyes."""
        family, eta = self.core.family, part(self.local_fit(local), "theta")
        eps = torch.randn(n, family.noise_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return torch.func.vmap(lambda e: family.transform(eta, e))(eps.to(eta["loc"]))

    def _contribute_slope(
        self, message: Broadcast, local: VerticalLocal, view: VerticalView, gate: Gate
    ) -> tuple[Release, VerticalLocal]:
        s, gamma = self.frame.move(message.tensors["sum"]), self.frame.move(message.tensors["gamma"])
        weight = s.new_tensor(1.0 / len(self.problem.silos))
        if self.config.weight_concentration is not None:
            weight = share(local.logit, s.new_tensor(message.scalars["mass"]))
        if local.sent_round != message.round:
            raise ProtocolError(f"silo '{view.silo}': slopes of round {message.round}, whose sum it is not in")
        draw = self._draw_at(local, view)
        response = self._response(message.round, view)
        assert isinstance(response, Response)
        own, in_gamma, value, alone = self._slope(draw, response, self.frame.weights(), s, gamma, weight)
        answered = Answered(own, s - draw.z, gamma, weight, alone)
        flat = self._flat(message.phase, {"slope": own, "gamma": in_gamma, "value": value})
        return gate.release(flat), local._replace(answered=answered)

    def _finish_round(self, message: Broadcast, local: VerticalLocal, view: VerticalView, gate: Gate) -> VerticalLocal:
        """The steps of the round whose z_j was sent last, now that the pull on it is known."""
        round_, pull = local.sent_round, self.frame.move(message.tensors["pull"])
        h, scale = self.frame.move(message.tensors["curvature"]), pull.new_tensor(message.scalars["scale"])
        logit = local.logit
        if self.config.is_power:
            a = local.answered
            incoming = Incoming(pull - a.own, h * (1 - a.share), a.others, a.gamma, a.share)
            if self.config.weight_concentration is not None:
                mean, silos = pull.new_tensor(message.scalars["value"]), len(self.problem.silos)
                logit = logit_step(
                    logit, a.share, a.log_likelihood, mean, self.config.weight_concentration, silos, scale
                )
        else:
            incoming = Incoming(
                pull, h, torch.zeros_like(pull), pull.new_zeros(self.frame.gamma_size), torch.ones_like(h)
            )
        at, params = self.frame.batch(round_), self._record_params(local)
        moments = Moments(local.moments.shared, take(local.moments.record, at))
        new, new_moments = self._steps(local, params, moments, view, incoming, scale, gate)
        local = local._replace(
            params=SiloParams(new.shared, put(local.params.record, at, new.record)),
            moments=Moments(new_moments.shared, put(local.moments.record, at, new_moments.record)),
            logit=logit,
        )
        averaged = local.averaged + 1 if message.scalars["averaging"] else 0
        theta = {k.removeprefix("theta/"): v for k, v in new.shared.items() if k.startswith("theta/")}
        log_sd = np.log(to_numpy(self.core.family.stddev(theta)))
        return local._replace(
            average=running_average(local.average, new.shared, averaged),
            averaged=averaged,
            monitor=stopping.watch(stopping.observe(local.monitor, to_numpy(theta["loc"]), log_sd)),
        )

    def _steps(
        self,
        local: VerticalLocal,
        params: SiloParams,
        moments: Moments,
        view: VerticalView,
        incoming: Incoming,
        scale: Tensor,
        gate: Gate,
    ) -> tuple[SiloParams, Moments]:
        rows, response = self._rows(local.sent_round, view), self._response(local.sent_round, view)
        noise, weights = self._noise(local, view), self.frame.weights()
        if not self.terms:
            found = self._update(params, moments, rows, response, weights, noise, incoming, scale)
            return SiloParams(*found[0]), Moments(*found[1])
        sent = self._rows_alone(local, params, view)
        shared = (params.shared, noise.theta, incoming.curvature)
        by_record = SiloParams(*self._gradients(shared, (params.record, rows, response, noise.z, sent, incoming.pull)))
        data_free = self._prior_gradient(params._replace(record={}), noise.theta)
        # theta_j follows from everyone's values, so that its gradient is noised before any row of z_j depends on it.
        names = sorted(data_free)
        together = torch.cat([by_record.shared[n].reshape(len(sent), -1) for n in names], 1)
        total = self.frame.move(gate.hidden_sum(HIDDEN_PHASE, together)) * self.frame.weight
        parts = total.split([data_free[n].numel() for n in names])
        noised = {n: p.reshape(data_free[n].shape) + data_free[n] for n, p in zip(names, parts, strict=True)}
        # A record that cannot be computed stays where it is.
        record = {k: v.nan_to_num(0.0, 0.0, 0.0) for k, v in by_record.record.items()}
        return self._ascend(params, moments, SiloParams(noised, record), scale)

    # ---- a record at a time: one on which the program fails is not a number, which the gate counts as nothing ----

    def _rows_alone(self, local: VerticalLocal, params: SiloParams, view: VerticalView) -> Tensor:
        """z_j (B, C) of the round that `local` is in."""
        rows, response = self._rows(local.sent_round, view), self._response(local.sent_round, view)
        noise = self._noise(local, view)
        found: Tensor = self._draws((params.shared, noise.theta), (params.record, rows, response, noise.z))
        return found

    def _draw_function(self, shared: Any, records: Any) -> Tensor:
        (q, theta), (own, rows, response, z) = shared, records
        return self.core.draw_by_record(SiloParams(q, own), rows, response, Noise(theta, z))

    def _gradient_function(self, shared: Any, records: Any) -> SiloParams:
        (q, theta, curvature), (own, rows, response, z, sent, pull) = shared, records
        incoming = Incoming(pull, curvature, torch.zeros_like(pull), pull[:0, 0], torch.ones_like(curvature))
        return self.core.gradient_by_record(SiloParams(q, own), rows, response, Noise(theta, z), sent, incoming)

    def _made_answered(self, count: int) -> Any:
        """`VerticalSilo.made`, and what the made records sent and were answered."""
        made = self.core.made(count)
        return *made, torch.zeros_like(made[-1]), torch.ones_like(made[-1])

    def _made_ascent(self, params: SiloParams, moments: Moments, gradient: SiloParams, scale: Tensor) -> Any:
        """What `_ascend_function` was called with, made records in place of the silo's own."""
        made = self.core.init(self.frame.batch_records, torch.Generator().manual_seed(0))
        own, its = ({k: v.to(scale) for k, v in part.record.items()} for part in made)
        zero = {name: torch.zeros_like(value) for name, value in gradient.record.items()}
        return params._replace(record=own), moments._replace(record=its), gradient._replace(record=zero), scale

    def _ascend_function(
        self, params: SiloParams, moments: Moments, gradient: SiloParams, scale: Tensor
    ) -> tuple[SiloParams, Moments]:
        params, moments, gradient = SiloParams(*params), Moments(*moments), SiloParams(*gradient)
        return self.core.ascend(params, moments, gradient, self.core.units(params), scale)

    def _check_alone(self) -> None:
        """Raise InputError where made records cannot be evaluated alone, as then none of the silo's could be."""
        start = self.predictor.start
        shared = {k: v.to(start) for k, v in self.core.init(1, torch.Generator().manual_seed(0))[0].shared.items()}
        theta = start.new_zeros(self.core.family.noise_size)
        try:
            self._draws.check((shared, theta))
            self._gradients.check((shared, theta, start.new_zeros(())))
        except Exception as error:  # program and likelihood may be the user's
            said = " ".join(str(error).split())[:200]
            raise InputError(
                f"record-level privacy evaluates each record alone, which fails on made data ({type(error).__name__}: "
                f"{said})"
            ) from error

    def _draw_at(self, local: VerticalLocal, view: VerticalView) -> Draw:
        """The z_j of the round that `local` is in, the same however often it is asked for."""
        round_, noise, params = local.sent_round, self._noise(local, view), self._record_params(local)
        rows, response = self._rows(round_, view), self._response(round_, view)
        return Draw(*self._draw(params, rows, response, self.frame.weights(), noise))

    def _record_params(self, local: VerticalLocal) -> SiloParams:
        """With those of the records in the round that `local` is in."""
        return SiloParams(local.params.shared, take(local.params.record, self.frame.batch(local.sent_round)))

    def _rows(self, round_: int, view: VerticalView) -> Params:
        return take(view.rows, self.frame.batch(round_))

    def _response(self, round_: int, view: VerticalView) -> Response | tuple[()]:
        if not view.response:
            return ()
        return Response(**take(view.response._asdict(), self.frame.batch(round_)))

    def _noise(self, local: VerticalLocal, view: VerticalView) -> Noise:
        at = self.frame.batch(local.sent_round)
        positions = None if at is None else at.cpu().numpy()
        theta = view.silo_draws.normals(local.turn, self.core.family.noise_size)[0]
        z = view.record_draws.normals(local.turn, self.frame.columns, positions)
        return Noise(self.frame.move(theta), self.frame.move(z))

    def _flat(self, phase: str, blocks: dict[str, Tensor]) -> FloatArray:
        return np.concatenate([to_numpy(blocks[b.name]).reshape(-1) for b in self.tables[phase].blocks])

    def _moved(self, params: Params) -> Params:
        return {name: value.to(self.problem.device) for name, value in params.items()}


def _settled(local: VerticalLocal) -> bool:
    r_hat: Any = local.monitor.r_hat
    return r_hat is not None and r_hat < stopping.R_HAT_BELOW
