"""Split networks on heart disease, columns at two silos (Hassan et al. 2024, section 5.3 and table 3).

Ten folds, every patient tested once, for each of several assignments to folds. The split NN; the hierarchical Bayes
split NN as printed, its network fitted as points; the same network with every weight sampled; several local steps an
exchange; and a variant that each training set chooses among four by its own inner fold. Logistic regression on pooled
columns says what is in reach. z-scores come from the training folds, each silo's own columns alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import logsigmoid

from secure_fvi.algorithms.vertical import (
    Amortised,
    Bernoulli,
    Likelihood,
    Predictor,
    Vertical,
    VerticalServer,
    VerticalSilo,
)
from secure_fvi.algorithms.vertical.predictors import Program
from secure_fvi.algorithms.vertical.steps import (
    Answer,
    Draw,
    Incoming,
    Moments,
    Noise,
    Response,
    ServerParams,
    SiloParams,
)
from secure_fvi.compiled import Mode, Traced
from secure_fvi.errors import InputError
from secure_fvi.models.heart import Heart, bayesian_network, load, split_network, standardise
from secure_fvi.optimizers import Optimizer
from secure_fvi.trees import Params, part
from secure_fvi_lab.experiments import Experiment, Request, Row, lines_of
from secure_fvi_lab.experiments.vertical_batched import logistic_mode, stack
from secure_fvi_lab.references import default_dtype

RHOS, SMALL_RHO, LOCAL_STEPS = (1.0, 5.0, 10.0), 0.2, 5
#: Means, sds over folds, and log-likelihoods of table 3: accuracy, all predictions, wrong predictions.
PAPER = {
    "split NN": (80.73, 3.65, -2.21, -10.95),
    "points, rho 1": (86.39, 4.20, -0.36, -1.99),
    "points, rho 5": (84.98, 4.92, -0.59, -3.53),
    "points, rho 10": (84.10, 5.23, -0.67, -3.89),
}
_OF_PAPER = ("accuracy", "sd", "log_likelihood", "wrong")
_POINTS = 20  # of the test log-likelihood over the exchanges
#: Adam's rates. The paper's is 1e-3, for 50,000 iterations.
_POINT_RATE, _SAMPLED_RATE = 5e-3, 2e-2
#: Compilation takes 25 s and saves a sixth of a step that works on so much data.
_MODE: Mode = "traced"
#: Weights start this many sds off their prior's mean, which is a saddle.
_SPREAD = 0.5


class SplitSilo:
    """Split NN (section 5.3): each silo's network answers the same slope, one step an exchange.

    draw      z_j = f(x_j; phi_j) (N, C), which the silo adds to the secure sum: the limit rho = 0, weights as points
    update    one ascent step on phi_j along the pull dlog p(y | s)/ds of the server (`VerticalServer.respond`)

    Nothing is sampled: z_j tells what the network outputs, and several steps a round would need a new s each. Pure
    functions of one silo's columns; the predictor's `pyro.param` sites are phi_j.
    """

    def __init__(self, predictor: Predictor, optimizer: Optimizer) -> None:
        if predictor.n:
            raise InputError("a split NN fits points: its program must have pyro.param sites only, no pyro.sample")
        self.predictor, self.optimizer = predictor, optimizer

    def init(self) -> tuple[Params, Params]:
        """phi_j, and the optimiser's state for it."""
        return self.predictor.points, self.optimizer.init(self.predictor.points)

    def draw(self, points: Params, rows: Params) -> Tensor:
        """z_j (N, C)."""
        return self.predictor.evaluate(self.predictor.start, points, rows)[0]

    def update(
        self, points: Params, moments: Params, rows: Params, weights: Tensor, pull: Tensor, scale: Tensor
    ) -> tuple[Params, Params]:
        """One step from the pull (N, C) and the records' weights (N,), `scale` () times the learning rate."""
        return self.ascend(points, self.gradient(points, rows, weights, pull), moments, scale)

    def gradient(self, points: Params, rows: Params, weights: Tensor, pull: Tensor) -> Params:
        """Of sum_i weights_i log p(y_i | s_i) in phi_j, exactly."""

        def pulled(points: Params) -> Tensor:
            return (weights.unsqueeze(-1) * pull * self.draw(points, rows)).sum()

        return torch.func.grad(pulled)(points)

    def ascend(self, points: Params, gradient: Params, moments: Params, scale: Tensor) -> tuple[Params, Params]:
        """One step of the optimiser: element by element, so that runs can be stacked."""
        return self.optimizer.step(points, gradient, moments, scale)


class Effort(NamedTuple):
    seeds: int  # assignments of patients to folds
    point_seeds: int  # of these, for networks fitted as points
    point_rounds: int
    rounds: int
    inner_rounds: int
    draws: int


_FULL = Effort(3, 1, 6_000, 1_000, 600, 200)
_QUICK = Effort(1, 1, 500, 300, 200, 50)


class Probabilities(NamedTuple):
    """Of y = 1, (R, N): with z_j at its mean eta_j, and with z_j ~ N(eta_j, rho^2) as the model has it."""

    still: Tensor
    noisy: Tensor


def _heart(request: Request) -> tuple[Row, Figure]:
    effort = _QUICK if request.quick else _FULL
    with default_dtype(torch.float32):
        data = {missing: load(request.data, missing) for missing in (False, True)}
        rows = list(_rows(effort, data, request))
    ours = next(r for r in rows if r["method"] == "sampled, rho 1")
    records = len(data[False].y) - len(data[False].y) // FOLDS
    content = {
        "paper": {method: dict(zip(_OF_PAPER, numbers, strict=True)) for method, numbers in PAPER.items()},
        "ours": {
            "mean": ours["accuracy"],
            "sd": ours["sd_over_seeds"],
            "seeds": effort.seeds,
            "what": "accuracy in % of the paper's network, every weight sampled, rho = 1, mean over folds and "
            "assignments, sd over assignments",
            "log_likelihood": ours["log_likelihood"],
            "log_likelihood_noisy": ours["log_likelihood_noisy"],
        },
        "bytes": sum(8 * b.size for b in Vertical().blocks(records, 1, 1)["auxiliary"]),
        "setting": (
            f"{len(data[False].y)} patients, {FOLDS} stratified folds; log-likelihood: nats a patient, of the "
            "mean probability over q(theta) with z at its mean; noisy: with the model's noise in z; bytes: upload a "
            "silo and exchange at 8 bytes a number"
        ),
        "rows": rows,
    }
    return content, png(rows, PAPER)


def _rows(effort: Effort, data: dict[bool, Heart], request: Request) -> Iterator[Row]:
    plain, y = data[False], data[False].y
    long, short = make_folds(y, effort.seeds), make_folds(y, effort.point_seeds)
    for missing, name in ((False, "pooled logistic"), (True, "pooled logistic, marked")):
        found = logistic(data[missing], long)
        yield _row(name, Probabilities(found, found), plain.y, long)
    yield request.once("split NN", effort, lambda: _split(effort, plain, short))
    every = effort.rounds // LOCAL_STEPS
    fits: list[tuple[str, _Hierarchical, Heart, Folds]] = [
        *((f"points, rho {rho:g}", _as_points(effort, rho), plain, short) for rho in RHOS),
        *((f"sampled, rho {rho:g}", _sampled(rho, effort.rounds), plain, long) for rho in RHOS),
        *(
            (f"sampled, rho 1, {LOCAL_STEPS} steps{share}", _sampled(1.0, rounds, LOCAL_STEPS), plain, short)
            for rounds, share in ((every, f", 1/{LOCAL_STEPS} of exchanges"), (effort.rounds, ""))
        ),
        # The fourth variant of `_chosen`, at the paper's rho.
        ("linear + 8 units, marked, rho 1", _sampled(1.0, effort.inner_rounds, program=_linear_and_units), data[True],
         long),
    ]  # fmt: skip
    for label, net, patients, folds in fits:
        yield request.once(label, effort, partial(_fit_row, label, net, effort, patients, folds))
    yield from _chosen(effort, data, long, request)


def _as_points(effort: Effort, rho: float) -> _Hierarchical:
    return _Hierarchical(Vertical(rho=rho, **_PRIVATE), _points, effort.point_rounds, _POINT_RATE, 0.0, False)


def _fit_row(label: str, net: _Hierarchical, effort: Effort, data: Heart, folds: Folds) -> Row:
    return _row(label, *net.fit(effort, data, folds))


class Exchanges(NamedTuple):
    """What a federated fit cost and how it went."""

    rounds: int
    local_steps: int
    rho: float
    seconds: float
    at: list[int]
    log_likelihood: list[float]  # of the test records after so many exchanges


#: The response stays at the server. A network of four units maps eta to the moments of z.
_PRIVATE: dict[str, Any] = {"response": "private", "family": "diagonal", "auxiliary": Amortised((4,))}


def _points(seed: int) -> Any:
    return split_network(seed=seed)


class _Hierarchical(NamedTuple):
    """One variant of the hierarchical Bayes split NN."""

    config: Vertical
    programs: Programs
    rounds: int
    rate: float
    spread: float
    decay: bool

    def fit(
        self, effort: Effort, data: Heart, folds: Folds, inner: bool = False
    ) -> tuple[Probabilities, Tensor, Folds, Exchanges]:
        """With `inner`, the inner folds are left out of the training sets as well."""
        began, at, seen = time.monotonic(), list[int](), list[float]()
        task = task_of(data, ~(folds.test | folds.inner) if inner else ~folds.test)
        parties = HierarchicalRound(
            self.config, Bernoulli(), self.programs, task, Optimizer("adam", self.rate), _MODE, self.spread
        )

        def see(r: int, state: Any) -> None:
            at.append(r)
            seen.append(mean_log_likelihood(parties.predict(state, 50)[0], data.y, folds.test))

        state = parties.fit(self.rounds, decay=self.decay, at=[] if inner else _looks(self.rounds), see=see)
        cost = Exchanges(self.rounds, self.config.local_steps, self.config.rho, time.monotonic() - began, at, seen)
        return Probabilities(*parties.predict(state, effort.draws)), data.y, folds, cost


def _sampled(
    rho: float, rounds: int, local_steps: int = 1, program: Callable[[], Any] = bayesian_network
) -> _Hierarchical:
    config = Vertical(rho=rho, local_steps=local_steps, **_PRIVATE)
    return _Hierarchical(config, lambda seed: program(), rounds, _SAMPLED_RATE, _SPREAD, True)


def _split(effort: Effort, data: Heart, folds: Folds) -> Row:
    began, at, seen = time.monotonic(), list[int](), list[float]()
    parties = SplitRound(
        Bernoulli(),
        lambda seed: split_network(seed=seed, bayesian=False),
        task_of(data, ~folds.test),
        Optimizer("adam", _POINT_RATE),
        _MODE,
    )

    def see(r: int, points: Any) -> None:
        at.append(r)
        seen.append(mean_log_likelihood(parties.predict(points), data.y, folds.test))

    found = parties.predict(parties.fit(effort.point_rounds, _looks(effort.point_rounds), see))
    cost = Exchanges(effort.point_rounds, 1, 0.0, time.monotonic() - began, at, seen)
    return _row("split NN", Probabilities(found, found), data.y, folds, cost)


def _looks(rounds: int) -> list[int]:
    """Rounds after which the test folds are looked at, for the plot alone: evenly spaced on a logarithmic axis."""
    return sorted({max(1, round(rounds ** (k / _POINTS))) for k in range(_POINTS // 3, _POINTS + 1)})


def _chosen(effort: Effort, data: dict[bool, Heart], folds: Folds, request: Request) -> list[Row]:
    """Each of four variants at a small rho, and for each training set the one that predicts its inner fold best."""
    y, kept = data[False].y, []
    for missing in (False, True):
        for name, program in (("paper's network", bayesian_network), ("linear + 8 units", _linear_and_units)):
            label = f"{name}{', marked' if missing else ''}, rho {SMALL_RHO:g}"
            net = _sampled(SMALL_RHO, effort.inner_rounds, program=program)
            kept.append(request.once(label, effort, partial(_variant, label, net, effort, data[missing], folds)))
    best = torch.stack([torch.tensor(found["scores"]) for found in kept]).argmax(0)
    runs = torch.arange(len(best))
    each = (torch.stack([torch.tensor(found[key]) for found in kept])[best, runs] for key in Probabilities._fields)
    chosen = _row(f"chosen by inner folds, rho {SMALL_RHO:g}", Probabilities(*each), y, folds)
    rows: list[Row] = [found["row"] for found in kept]
    return [*rows, chosen | {"chosen": torch.bincount(best, minlength=len(kept)).tolist()}]


def _variant(label: str, net: _Hierarchical, effort: Effort, data: Heart, folds: Folds) -> Row:
    """A `row` of the table, the `scores` of the inner folds, and the probabilities, `still` and `noisy`."""
    inner, y, _, _ = net.fit(effort, data, folds, inner=True)
    scores = by_fold(inner.still, y, folds.inner)[1]
    found, y, _, cost = net.fit(effort, data, folds)
    return {
        "row": _row(label, found, y, folds, cost) | {"inner_log_likelihood": float(scores.mean())},
        "scores": scores.tolist(),
        **{key: value.tolist() for key, value in found._asdict().items()},
    }


def _linear_and_units() -> Any:
    return bayesian_network((8,), linear=True)


def _row(name: str, found: Probabilities, y: Tensor, folds: Folds, cost: Exchanges | None = None) -> Row:
    accuracy, log_p, wrong = by_fold(found.still, y, folds.test)
    noisy_accuracy, noisy_log_p, noisy_wrong = by_fold(found.noisy, y, folds.test)
    by_seed: Sequence[float] = accuracy.reshape(-1, FOLDS).mean(1).tolist()
    row = {
        "method": name,
        "seeds": len(by_seed),
        "accuracy": float(accuracy.mean()),
        "sd_over_folds": float(accuracy.std()),
        "sd_over_seeds": statistics.stdev(by_seed) if len(by_seed) > 1 else 0.0,
        "log_likelihood": float(log_p.mean()),
        "wrong": float(wrong.mean()),
        "accuracy_noisy": float(noisy_accuracy.mean()),
        "log_likelihood_noisy": float(noisy_log_p.mean()),
        "wrong_noisy": float(noisy_wrong.mean()),
    }
    if cost is None:
        return row
    return row | {
        "rho": cost.rho,
        "local_steps": cost.local_steps,
        "exchanges": cost.rounds,
        "bytes_up_per_silo_and_exchange": sum(
            8 * b.size for b in Vertical().blocks(int((~folds.test[0]).sum()), 1, 1)["auxiliary"]
        ),
        "seconds": round(cost.seconds, 1),
        "curve": {"exchanges": cost.at, "log_likelihood": cost.log_likelihood},
    }


# ----
# Ten-fold training sets of the heart disease data, scores on their test folds, and pooled logistic regression

FOLDS = 10
_DTYPE = torch.float32


class Folds(NamedTuple):
    """R training sets, ten an assignment."""

    test: Tensor  # (R, N) bool
    inner: Tensor  # (R, N) bool: another fold, held out of the training set for the choice of a variant


def task_of(data: Heart, train: Tensor) -> Task:
    """One run for each training set of `train` (R, N) bool; z-scores from it alone, by silo."""
    rows = tuple(
        {"x": torch.stack([standardise(x, numeric, t) for t in train]).to(_DTYPE)}
        for x, numeric in zip(data.x, data.numeric, strict=True)
    )
    y = data.y.to(_DTYPE)
    return Task(rows, train.to(_DTYPE), Response(y, torch.zeros_like(y)))


def make_folds(y: Tensor, seeds: int) -> Folds:
    """Stratified by the response; assignment s is drawn from seed s."""
    test, inner = [], []
    for seed in range(seeds):
        generator, fold = torch.Generator().manual_seed(seed), torch.empty(len(y), dtype=torch.long)
        order = torch.cat([at[torch.randperm(len(at), generator=generator)] for at in _classes(y)])
        fold[order] = torch.arange(len(y)) % FOLDS
        test += [fold == k for k in range(FOLDS)]
        inner += [fold == (k + 1) % FOLDS for k in range(FOLDS)]
    return Folds(torch.stack(test), torch.stack(inner))


def _classes(y: Tensor) -> list[Tensor]:
    return [torch.nonzero(y == value).squeeze(1) for value in (0.0, 1.0)]


def logistic(data: Heart, folds: Folds, steps: int = 20) -> Tensor:
    """Probabilities (R, N) at the mode of logistic regression on the pooled columns, beta ~ N(0, 1), by Newton."""
    found = []
    for test in folds.test:
        parts = [standardise(x, n, ~test) for x, n in zip(data.x, data.numeric, strict=True)]
        x = torch.cat([torch.ones_like(parts[0][:, :1]), *parts], 1)
        found.append(torch.sigmoid(x @ logistic_mode(x[~test], data.y[~test], steps)[0]))
    return torch.stack(found)


def by_fold(probability: Tensor, y: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accuracy in % (R,), mean log-likelihood in nats (R,), and log-likelihoods of the wrong predictions (W,)."""
    logits = torch.logit(probability.double().clamp(1e-30, 1 - 1e-16))
    log_p, right = logsigmoid((2 * y - 1) * logits), (2 * y - 1) * logits > 0
    size = held.sum(1)
    return 100 * (right & held).sum(1) / size, (log_p * held).sum(1) / size, log_p[held & ~right]


def mean_log_likelihood(probability: Tensor, y: Tensor, held: Tensor) -> float:
    return float(by_fold(probability, y, held)[1].mean())


# ---- Rounds of split networks for many training sets at once, for experiments on data that may be pooled ----
#
# A run is one training set with its own start and noise. All runs, silos and the server are one traced function: runs
# mapped by vmap, silos of different columns one after the other, sums plain. Records that a run does not train on have
# weight 0: they add nothing to any gradient, and are predicted like the others.

_BLOCK = 20  # rounds whose noise is drawn at once

#: A silo's program from the seed of a run.
Programs = Callable[[int], Program]


class Task(NamedTuple):
    """R runs over N records of J silos."""

    rows: tuple[Params, ...]  # J dicts of (R, N, ...)
    weights: Tensor  # (R, N)
    response: Response  # (N,)

    @property
    def runs(self) -> int:
        return self.weights.shape[0]


class State(NamedTuple):
    """Of all parties; every tensor has a first axis of length R."""

    params: tuple[SiloParams, ...]
    moments: tuple[Moments, ...]
    server: ServerParams


class HierarchicalRound:
    """Rounds of `Vertical` in the augmented-variable model; theta starts `spread` sds of noise off its prior's mean."""

    def __init__(
        self, config: Vertical, likelihood: Likelihood, programs: Programs, task: Task, optimizer: Optimizer,
        mode: Mode, spread: float = 0.0,
    ) -> None:  # fmt: skip
        self.config, self.likelihood, self.task, self.spread = config, likelihood, task, spread
        self.dtype, self.optimizer = task.weights.dtype, optimizer
        self._predictors = [
            [Predictor(programs(1000 * j + r), {k: v[r] for k, v in rows.items()}) for r in range(task.runs)]
            for j, rows in enumerate(task.rows)
        ]
        count = len(task.rows)
        self.silos = [VerticalSilo(config, likelihood, p[0], count, optimizer) for p in self._predictors]
        self.server = VerticalServer(likelihood, optimizer, self.dtype)
        self.step: Callable[..., tuple[State, Tensor]] = Traced(self._round, (None,) * 4, mode)

    def init(self, generator: torch.Generator) -> State:
        """Points start at their programs' own values, one program a run."""
        params, moments, records = [], [], self.task.weights.shape[1]
        for silo, predictors in zip(self.silos, self._predictors, strict=True):
            found = []
            for predictor in predictors:
                shared, record = silo.init(records, generator)[0]
                loc = shared["theta/loc"]
                shared["theta/loc"] = loc + self.spread * torch.randn(len(loc), generator=generator, dtype=loc.dtype)
                points = {f"point/{name}": value for name, value in predictor.points.items()}
                found.append(SiloParams({**shared, **points}, record))
            params.append(stack(found))
            moments.append(Moments(*(self.optimizer.init(p) for p in params[-1])))
        eta = stack([self.server.init().eta] * self.task.runs)
        return State(tuple(params), tuple(moments), ServerParams(eta, self.optimizer.init(eta)))

    def noises(self, rounds: int, generator: torch.Generator) -> Iterator[tuple[tuple[Noise, ...], Tensor]]:
        """The silos' noise and the server's, for each round."""
        r, n = self.task.weights.shape

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=self.dtype)

        for start in range(0, rounds, _BLOCK):
            size = min(_BLOCK, rounds - start)
            silos = [(normal(size, r, s.family.noise_size), normal(size, r, n, 1)) for s in self.silos]
            gamma = normal(size, r, self.server.family.noise_size)
            for k in range(size):
                yield tuple(Noise(theta[k], z[k]) for theta, z in silos), gamma[k]

    def fit(
        self, rounds: int, seed: int = 0, decay: bool = False, at: Collection[int] = (),
        see: Callable[[int, State], None] | None = None,
    ) -> State:  # fmt: skip
        """Adam at a constant rate, or one that falls linearly to nothing; `see` is called after the rounds in `at`."""
        generator = torch.Generator().manual_seed(seed)
        state = self.init(generator)
        for r, (noise, eps) in enumerate(self.noises(rounds, generator)):
            scale = torch.tensor(1.0 - 0.99 * r / rounds if decay else 1.0, dtype=self.dtype)
            state, _ = self.step(state, noise, eps, scale)
            if see is not None and r + 1 in at:
                see(r + 1, state)
        return state

    def predict(self, state: State, draws: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Probabilities (R, N) of y = 1 under q(theta), q(gamma): z_j at eta_j, and z_j ~ N(eta_j, rho^2)."""
        generator, noise_sd = torch.Generator().manual_seed(seed), math.sqrt(len(self.silos)) * self.config.rho
        still, noisy = torch.zeros_like(self.task.weights), torch.zeros_like(self.task.weights)
        for noise, eps in self.noises(draws, generator):
            s = vmap(self._centre)(state.params, state.server.eta, self.task.rows, noise, eps)
            still += torch.sigmoid(s) / draws
            noisy += torch.sigmoid(s + noise_sd * torch.randn(s.shape, generator=generator, dtype=s.dtype)) / draws
        return still, noisy

    def _centre(self, params: Any, eta: Params, rows: Any, noise: Any, eps: Tensor) -> Tensor:
        """sum_j eta_j + offset + intercept (N,) of one run."""
        total = self.task.response.offset + self.server.gamma(eta, eps)[0]
        for silo, q, columns, e in zip(self.silos, params, rows, noise, strict=True):
            shared = SiloParams(*q).shared
            theta = silo.family.transform(part(shared, "theta"), Noise(*e).theta)
            total = total + silo.predictor.evaluate(theta, part(shared, "point"), columns)[0][:, 0]
        return total

    def _round(self, state: State, noise: tuple[Noise, ...], eps: Tensor, scale: Tensor) -> tuple[State, Tensor]:
        """Algorithm 1. Optimisers step on the stacked runs, element by element: vmap has no rule for them."""
        weights, response = self.task.weights, self.task.response
        known: Any = response if self.config.response == "shared" else ()
        state = State(*state)
        params, moments = [SiloParams(*q) for q in state.params], [Moments(*m) for m in state.moments]
        server, noise = ServerParams(*state.server), tuple(Noise(*e) for e in noise)
        parties = list(zip(self.silos, params, self.task.rows, noise, strict=True))
        draws = [Draw(*vmap(_drawing(silo, known))(q, x, weights, e)) for silo, q, x, e in parties]
        s = torch.stack([d.z for d in draws]).sum(0)
        gamma = vmap(self.server.gamma)(server.eta, eps)
        answer = Answer(*vmap(lambda s, g, w: self.server.respond(response, s, g, w))(s, gamma, weights))
        one = torch.ones_like(answer.value)
        incoming = Incoming(answer.pull, answer.curvature, torch.zeros_like(s), gamma, one)
        ends = []
        for (silo, q, x, e), m, d in zip(parties, moments, draws, strict=True):
            new = q
            for _ in range(self.config.local_steps):
                found = SiloParams(*vmap(_gradient(silo, known))(new, x, weights, e, d.z, incoming))
                new, m = silo.ascend(new, m, found, SiloParams(*vmap(silo.units)(new)), scale)
            ends.append((SiloParams(*(_lerp(a, b, silo.kept) for a, b in zip(q, new, strict=True))), m))
        in_eta, own = vmap(self.server.gradient)(server.eta, answer.gamma, eps)
        server = self.server.ascend(server, in_eta, vmap(self.server.units)(server.eta), scale)
        bound = answer.value + own + torch.stack([d.local for d in draws]).sum(0)
        return State(tuple(q for q, _ in ends), tuple(m for _, m in ends), server), bound


def _drawing(silo: VerticalSilo, known: Any) -> Callable[..., Draw]:
    return lambda params, rows, weights, noise: silo.draw(params, rows, known, weights, noise)


def _gradient(silo: VerticalSilo, known: Any) -> Callable[..., SiloParams]:
    return lambda params, rows, weights, noise, sent, incoming: silo.gradient(
        params, rows, known, weights, noise, sent, incoming
    )


def _lerp(old: Params, new: Params, kept: float) -> Params:
    return new if kept == 1 else {name: torch.lerp(value, new[name], kept) for name, value in old.items()}


class SplitRound:
    """Rounds of the split NN; the server has no parameters."""

    def __init__(
        self, likelihood: Likelihood, programs: Programs, task: Task, optimizer: Optimizer, mode: Mode
    ) -> None:
        self.likelihood, self.task, self.dtype = likelihood, task, task.weights.dtype
        predictors = [
            [Predictor(programs(1000 * j + r), {k: v[r] for k, v in rows.items()}) for r in range(task.runs)]
            for j, rows in enumerate(task.rows)
        ]
        self._silos = [[SplitSilo(p, optimizer) for p in of_silo] for of_silo in predictors]
        self.silos = [of_silo[0] for of_silo in self._silos]
        self.server = VerticalServer(likelihood, optimizer, self.dtype)
        self.gamma = torch.zeros(likelihood.gamma_size, dtype=self.dtype)
        self.step: Callable[..., Any] = Traced(self._round, (None,) * 3, mode)

    def fit(self, rounds: int, at: Collection[int] = (), see: Callable[[int, Any], None] | None = None) -> Any:
        """Adam at a constant rate."""
        points = tuple(stack([silo.init()[0] for silo in of_silo]) for of_silo in self._silos)
        moments = tuple(silo.optimizer.init(p) for silo, p in zip(self.silos, points, strict=True))
        scale = torch.ones((), dtype=self.dtype)
        for r in range(rounds):
            points, moments = self.step(points, moments, scale)
            if see is not None and r + 1 in at:
                see(r + 1, points)
        return points

    def predict(self, points: tuple[Params, ...]) -> Tensor:
        """(R, N)."""
        return torch.sigmoid(vmap(self._sum)(points, self.task.rows)[..., 0])

    def _sum(self, points: tuple[Params, ...], rows: tuple[Params, ...]) -> Tensor:
        drawn = [silo.draw(p, x) for silo, p, x in zip(self.silos, points, rows, strict=True)]
        return torch.stack(drawn).sum(0)

    def _round(self, points: tuple[Params, ...], moments: tuple[Params, ...], scale: Tensor) -> Any:
        weights = self.task.weights
        s = vmap(self._sum)(points, self.task.rows)
        pull = vmap(lambda s, w: self.server.respond(self.task.response, s, self.gamma, w).pull)(s, weights)
        ends = [
            silo.ascend(p, vmap(silo.gradient)(p, x, weights, pull), m, scale)
            for silo, p, m, x in zip(self.silos, points, moments, self.task.rows, strict=True)
        ]
        return tuple(p for p, _ in ends), tuple(m for _, m in ends)


# ---- The lines of `secure-fvi reproduce heart` for a terminal, and its plot ----

#: Methods whose test log-likelihood is drawn over the exchanges.
_CURVES = (
    "split NN", "points, rho 1", "points, rho 5", "points, rho 10", "sampled, rho 1", "sampled, rho 10",
    "sampled, rho 1, 5 steps", "linear + 8 units, marked, rho 0.2",
)  # fmt: skip
_COLOURS = ("#dc2626", "#d97706", "#f59e0b", "#fcd34d", "#2563eb", "#93c5fd", "#059669", "#7c3aed")


def table(content: Row) -> str:
    """Accuracy in %, log-likelihoods in nats, narrow enough for a terminal; the paper's beside ours."""
    rows = []
    for r in content["rows"]:
        paper = content["paper"].get(r["method"].replace("sampled", "points"))
        beside = f"{paper['accuracy']:.2f} / {paper['log_likelihood']:.2f}" if paper else ""
        found = (f"{r['accuracy']:.2f} ({r['sd_over_folds']:.2f})", f"{r['log_likelihood']:.3f}", f"{r['wrong']:.2f}")
        rows.append((r["method"], r["seeds"], *found, f"{r['log_likelihood_noisy']:.3f}", beside))
    lines = lines_of(("method", "seeds", "accuracy (sd)", "log-lik", "wrong", "noisy", "paper"), rows)
    lines.append("sd over folds; log-likelihoods in nats a patient; noisy: with the model's noise in z")
    return "\n".join(lines)


def png(rows: Sequence[Row], paper: Mapping[str, tuple[float, float, float, float]]) -> Figure:
    """Accuracy and log-likelihood by method beside the paper's, and the log-likelihood over the exchanges."""
    figure = Figure(figsize=(11, 10), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.2, 1))
    upper, lower = halves
    left, right = upper.subplots(1, 2, sharey=True)
    for y, row in enumerate(rows):
        known = paper.get(row["method"].replace("sampled", "points"))
        left.errorbar(row["accuracy"], y, xerr=row["sd_over_folds"], fmt="o", color="#2563eb", ms=5, lw=1)
        right.plot(row["log_likelihood"], y, "o", color="#2563eb", ms=5)
        if known:
            left.errorbar(known[0], y + 0.25, xerr=known[1], fmt="s", color="#9ca3af", ms=4, lw=1)
            right.plot(known[2], y + 0.25, "s", color="#9ca3af", ms=4)
    left.set(yticks=range(len(rows)), yticklabels=[r["method"] for r in rows], xlabel="accuracy, %, sd over folds")
    left.invert_yaxis()
    right.set(
        xlabel="test log-likelihood, nats a patient", xlim=(min(-1.0, *(p[2] for p in paper.values())) - 0.1, -0.25)
    )
    right.plot([], [], "o", color="#2563eb", label="ours")
    right.plot([], [], "s", color="#9ca3af", label="paper, table 3 (its model)")
    right.legend(frameon=False, fontsize=8, loc="lower left")
    _curves(lower.subplots(1, 1), rows)
    return figure


def _curves(axis: Any, rows: Sequence[Row]) -> None:
    by_name = {r["method"]: r for r in rows if "curve" in r}
    drawn = [by_name[name] for name in _CURVES if name in by_name]
    for row, colour in zip(drawn, _COLOURS, strict=False):
        curve = row["curve"]
        axis.plot(curve["exchanges"], curve["log_likelihood"], color=colour, lw=1.4, label=row["method"])
    axis.set(xscale="log", ylim=(-1.2, -0.3), xlabel="exchanges", ylabel="test log-likelihood, nats a patient")
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower left")


EXPERIMENTS = {"heart": Experiment(_heart, table)}
