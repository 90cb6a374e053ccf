"""FedVI (Vedadi et al. 2023): many small clients, a hierarchical model, and inference of what is a client's own.

    theta ~ t,    beta_k ~ r,    y_ik ~ l(y | f(theta, beta_k, x_ik))                                         (1)

    server:  sends theta to clients drawn for the round
    client:  E epochs of minibatches, each cut in two: q(beta_k | x of the support, theta), by the model's encoder, is
             what the labels of the query are predicted with; contributes n_k and n_k x the change of theta
    server:  SGD with momentum along the mean change

A step of client k is on the objective of equation (8) a record,

    mean over the query of E_q[-log l(y_i | f(theta, beta, x_i))] + tau / n_k KL(q(beta) || r) + gamma / N KL(q || t)

so that tau = gamma = 1 is the ELBO upper bound, and gamma = 0 the paper's flat prior on theta. A client keeps nothing
between rounds: a new one infers beta from its own unlabelled records. docs/fedvi.md says what each party sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.algorithms.base import PRIVATE, Broadcast, LocalFit, Posterior, Problem, SiloView, Step, Verdict
from secure_fvi.algorithms.fedavg import RECORDS, FedAvgProgram, FedAvgState, averaged_sums
from secure_fvi.algorithms.kit import Totals
from secure_fvi.compiled import Traced
from secure_fvi.disclosure import Declaration
from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import Diagonal, GlobalFamily
from secure_fvi.federated_model import SiloEncoder
from secure_fvi.options import Bound, Count, Momentum, NotNegative, Positive, Schedule, Share, check
from secure_fvi.trees import Params, take

IntArray = npt.NDArray[np.int64]
#: Totals of a round: sum over clients of n_k x the query's mean negative log-likelihood, and of KL(q(beta_k) || r).
DISTORTION, RATE = "distortion", "rate"
#: The objective of the last quarter of the rounds is level with the best one before it if they differ by less than so
#: many nats a record, `_SURE` standard errors of the difference included. A quarter has `_LEAST` rounds at least.
_LEVEL, _SURE, _LEAST = 0.02, 3.0, 4
#: Steps of one round that have random numbers of their own: three draws each.
_MOST_STEPS = 2**16


@dataclass(frozen=True)
class FedVI:
    """Options of FedVI."""

    rounds: Count = 500
    """Each asks a share `participation` of the clients."""
    epochs: Count = 1
    """Of local training in a round."""
    batch_size: Count = 256
    """Of local training, at least 2: half support, half query."""
    learning_rate: Positive = 0.05
    """Of local gradient steps on the objective a record, nats."""
    server_learning_rate: Positive = 1.0
    """Of the server's step along the mean change."""
    server_momentum: Momentum = 0.9
    """Of that step."""
    server_schedule: Schedule = "constant"
    """How its rate falls over `rounds`."""
    participation: Share = 1.0
    """Of the clients, asked in a round."""
    tau: NotNegative = 1e-3
    """Weight of the local regulariser."""
    gamma: NotNegative = 0.0
    """Weight of the global one."""
    theta: Literal["point", "gaussian"] = "point"
    """"gaussian": a posterior with independent elements, which starts with standard deviation `start_scale`."""
    start_scale: Positive = 0.01
    """See `theta`."""
    weights: Literal["records", "equal"] = "records"
    """Of a client in the mean: n_k, or 1."""
    total_records: Count | None = None
    """N for gamma above 0, where it is public; otherwise it is counted by one more secure sum."""
    tolerance: NotNegative = 0.0
    """A round whose mean change is below it, an element and a whole step, ends the run."""
    bound: Bound = 2.0**30
    """Largest absolute value of any element of a contribution."""

    name = "fedvi"
    importance_samples = 1
    without_prior = "gamma = 0"

    def __post_init__(self) -> None:
        check(self)
        if self.batch_size < 2:
            raise InputError("batch_size must be at least 2: one record for the support, one for the query")

    @property
    def prior(self) -> bool:
        """Whether theta's prior counts."""
        return self.gamma > 0

    @property
    def reach(self) -> float:
        """How far a local step may come, of a whole one."""
        return min(1.0, self.learning_rate)

    @property
    def expected_calls(self) -> int:
        return max(1, round(self.rounds * self.epochs * self.participation))

    def declare(self, silos: int, private: bool) -> Declaration:
        # Of a batch nobody knows beforehand how many of a client's records it has.
        because = f"participation = {self.participation:g}"
        return Declaration(self.rounds, averaged_sums(self, silos, private), "nothing", False, 0.0, because)

    def server(self, problem: Problem) -> FedVIProgram:
        """Raises InputError for what the model or its privacy do not allow."""
        return FedVIProgram(self, problem)

    silo = server


class FedVIState(NamedTuple):
    """The server's state. All of it follows from broadcasts and totals."""

    average: FedAvgState
    objectives: Tensor  # (rounds,) float64, nats a record; NaN for rounds to come and where it is not released


class _Half(NamedTuple):
    """Support or query of one batch."""

    rows: Params  # (m, ...), noise for the encoder's model included
    present: Tensor  # (m,): 0 for rows that fill up


class FedVIProgram(FedAvgProgram):
    """FedAvg with q(theta) in place of a point, and clients' own latents inferred from unlabelled records."""

    reported = (DISTORTION, RATE)

    @property
    def encoder(self) -> SiloEncoder:
        encoder = self.problem.model.encoder
        assert encoder is not None  # checked below
        return encoder

    def check_latents(self) -> None:
        layout, encoder = self.problem.layout, self.problem.model.encoder
        if layout.of("record"):
            raise InputError(f"fedvi takes no latents of a record, and this model has {layout.of('record')[0].name}")
        if encoder is None or not layout.of("silo"):
            raise InputError(
                "fedvi needs a model with silo_sites and an encoder that infers them: "
                "sf.FederatedModel(fn, silo_sites=(...), encoder=sf.SiloEncoder(...)); without such sites use fedavg"
            )
        fields = {name for name, _, _ in self.problem.schema.fields}
        for name in encoder.fields:
            if name not in fields:
                raise InputError(f"the encoder asks for '{name}'; the data hold {', '.join(sorted(fields))}")
        if set(encoder.fields) == fields:
            raise InputError("the encoder is given all of the data, labels included; name only what needs no label")

    def start_of_family(self) -> tuple[GlobalFamily, Params]:
        if self.config.theta == "point":
            return super().start_of_family()
        family, loc = Diagonal(self.problem.layout.size("global")), self.problem.start.z_global
        return family, {"loc": loc.clone(), "log_scale": torch.full_like(loc, math.log(self.config.start_scale))}

    # ---- server ----

    def init(self) -> Any:
        objectives = torch.full((self.config.rounds,), math.nan, dtype=torch.float64)
        return FedVIState(super().init(), objectives)

    def broadcast(self, state: Any, index: int, accepted: Mapping[str, int]) -> Broadcast:
        return super().broadcast(state.average, index, accepted)

    def step(self, state: Any, message: Broadcast, sums: Totals, scale: float) -> tuple[Any, Step]:
        average, step = super().step(state.average, message, sums, scale)
        objectives = state.objectives.clone()
        if average.round > state.average.round:
            records = scale * float(sums[RECORDS]) if average.reported else math.nan
            objectives[average.round - 1] = step.objective / records
        return FedVIState(average, objectives), step

    def posterior(self, state: Any) -> Posterior:
        return super().posterior(state.average)

    def rounds(self, state: Any) -> int:
        return int(state.average.round)

    def objective(self, point: Params, reported: Mapping[str, float]) -> float:
        """Minus equation (8), in nats: at tau = gamma = 1 a lower bound of the log evidence."""
        config = self.config
        regulariser = config.gamma * float(self.global_rate(point)) if config.gamma else 0.0
        return -(reported[DISTORTION] + config.tau * reported[RATE] + regulariser)

    def global_rate(self, point: Params) -> Tensor:
        """KL(q(theta) || t) in nats (); -log t(theta) for a point, whose divergence is infinite."""
        _, eta, theta, *_ = self.at(point)
        if self.config.theta == "point":
            return -self.problem.density.log_prior(eta["loc"], theta)
        scale = eta["log_scale"].exp()
        return gaussian_kl(
            eta["loc"], scale, torch.ones_like(scale), lambda z: self.problem.density.log_prior(z, theta)
        )

    def verdict(self, state: Any) -> Verdict:
        """Of the objective of the rounds. Where that is not released nothing is known of it."""
        if not state.average.reported:
            return Verdict(None, PRIVATE, {})
        if self.at_rest(state.average):
            return Verdict(True, "averages have come to rest: a point estimate of theta", {})
        change, error, apart = self._change(state)
        numbers = {"change": change, "change_error": error}
        details = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        if abs(change) + _SURE * error <= _LEVEL:
            found = f"the objective is level within {_LEVEL} nats a record: a point estimate of theta"
            return Verdict(True, found, details)
        advice = f"raise rounds (now {self.config.rounds})"
        clear = apart or abs(change) > _SURE * error
        if clear and change < 0:
            found, advice = "the objective fell", f"lower learning_rate (now {self.config.learning_rate:g})"
        elif clear:
            found = "the objective was still rising when the rounds were over"
        else:
            return Verdict(
                False, f"not assessed: rounds too few to tell whether the objective is level; {advice}", details
            )
        return Verdict(False, f"{found}, by {abs(change):.3g} nats a record; {advice}", details)

    def _change(self, state: Any) -> tuple[float, float, bool]:
        """From the best earlier quarter of the rounds to the last one, of the mean objective, nats a record; its
        standard error, infinite for rounds that are too few; and whether every round of one is better than all of the
        other, as in a run that falls ever faster, whose trend counts as noise in that error."""
        quarter = int(state.average.round) // 4
        if quarter < _LEAST:
            return math.nan, math.inf, False
        parts = state.objectives[state.average.round - 4 * quarter : state.average.round].reshape(4, quarter)
        late, best = parts[3], parts[int(parts[:3].mean(1).argmax())]
        error = ((late.var() + best.var()) / quarter).sqrt()
        return float(late.mean() - best.mean()), float(error), bool(late.max() < best.min() or late.min() > best.max())

    def metrics(self, state: Any) -> dict[str, float | None]:
        """Of the last round's clients, scaled to all: `objective`, minus equation (8); `distortion`, the negative
        log-likelihood that queries cost; `rate_per_client`, KL(q(beta_k) || r); all in nats."""
        reported, clients = state.average.reported, len(self.problem.silos)
        return {
            "bound": None,
            "objective": state.average.objective if reported else None,
            "distortion": reported.get(DISTORTION),
            "rate_per_client": reported[RATE] / clients if reported else None,
            "movement": state.average.movement,
        }

    # ---- client ----

    def local_fit(self, local: tuple[()]) -> LocalFit:
        raise InputError("fedvi keeps no local state; use result.personalise(records without labels)")

    def run(self, point: Params, message: Broadcast, view: SiloView) -> tuple[dict[str, Any], Params]:
        """Means over the local steps of the query's negative log-likelihood times n_k, and of KL(q(beta) || r), nats;
        and the point after the steps."""
        config, seen = self.config, []
        weights = self.move(torch.tensor([config.tau / view.size, config.gamma * message.scalars["prior"]]))
        n_global = self.family.noise_size
        for step, (support, query) in enumerate(self._batches(view)):
            key = 3 * (view.turn * _MOST_STEPS + step)
            eps = self.move(view.silo_draws.normals(key, n_global + self.problem.layout.size("silo"))[0])
            gradient, terms = self._gradient(
                point,
                self._half(support, view, self.encoder.fields, key + 1),
                self._half(query, view, tuple(view.rows), key + 2),
                eps[:n_global],
                eps[n_global:],
                weights,
            )
            point = {name: w - config.learning_rate * gradient[name] for name, w in point.items()}
            seen.append(terms)
        distortion, rate = torch.stack(seen).double().mean(0).tolist()
        return {DISTORTION: view.size * distortion, RATE: rate}, point

    def _batches(self, view: SiloView) -> Iterator[tuple[IntArray, IntArray]]:
        """Support and query rows (m,) by step, in batches as even as can be, filled up with the spare row of weight
        zero. A client with one record has it in both."""
        config = self.config
        for epoch in range(config.epochs):
            drawn = view.batch_draws.uniforms(view.turn * config.epochs + epoch, 1)[0, : view.size, 0]
            for batch in np.array_split(np.argsort(drawn), -(-view.size // config.batch_size)):
                half = len(batch) // 2
                support, query = (batch[:half], batch[half:]) if half else (batch, batch)
                yield np.pad(support, (0, len(query) - len(support)), constant_values=view.size), query

    def _half(self, at: IntArray, view: SiloView, fields: Sequence[str], key: int) -> _Half:
        chosen = torch.from_numpy(at).to(self.problem.device)
        rows = take({name: view.rows[name] for name in fields}, chosen)
        noise = self.encoder.noise
        if noise:
            # What the silo's secret seeds may come from a faster generator: it moves training only.
            seed = int(view.silo_draws.uniforms(key, 1)[0, 0, 0] * 2**53)
            rng = torch.Generator().manual_seed(seed)
            for name, shape in sorted(noise.items()):
                rows[name] = self.move(torch.rand(len(at), *shape, generator=rng))
        return _Half(rows, view.weights[chosen])

    def traced_gradient(self) -> Traced:
        return Traced(self._gradient_function, (None, 0, 0, None, None, None), self.problem.mode)

    def _gradient_function(
        self, point: Params, support: _Half, query: _Half, eps_global: Tensor, eps_silo: Tensor, weights: Tensor
    ) -> tuple[Params, Tensor]:
        """Of equation (8) a record; and the query's mean negative log-likelihood and KL(q(beta) || r), nats (2,)."""
        density = self.problem.density

        def loss(point: Params) -> tuple[Tensor, Tensor]:
            family, eta, theta, *_ = self.at(point)
            z = family.transform(eta, eps_global)
            sites, parameters = density.constrain(z, theta)
            loc, scale = self.encoder.fn({**sites, **parameters}, support.present, **support.rows)
            no_latents = z.new_zeros(len(query.present), 0)
            terms = density.evaluate(z, loc + scale * eps_silo, no_latents, theta, query.rows)
            distortion = -(query.present * terms.records).sum() / query.present.sum()
            signs = torch.where(eps_silo < 0, -1.0, 1.0).to(scale)
            rate = gaussian_kl(loc, scale, signs, lambda beta: density.log_silo_prior(z, beta, theta))
            total = distortion + weights[0] * rate
            if self.config.prior:
                total = total + weights[1] * self.global_rate(point)
            return total, torch.stack([distortion, rate]).detach()

        found: tuple[Params, Any] = torch.func.grad(loss, has_aux=True)(point)
        return found


def gaussian_kl(loc: Tensor, scale: Tensor, signs: Tensor, log_prior: Callable[[Tensor], Tensor]) -> Tensor:
    """KL(N(loc, diag(scale^2)) || prior) in nats ().

    The mean of log p over loc +- signs x scale has its expectation: exactly for a Gaussian prior with independent
    elements, whatever the signs (n,); without bias under random signs for any Gaussian; to second order otherwise.
    """
    expected = (log_prior(loc + signs * scale) + log_prior(loc - signs * scale)) / 2
    return -(scale.log().sum() + len(scale) * (1 + math.log(2 * math.pi)) / 2) - expected
