"""FedVI beside its baselines over clients that take part and clients that do not: what three experiments share."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secure_fvi.aggregation import Plain
from secure_fvi.algorithms.base import Algorithm
from secure_fvi.algorithms.fedavg import FedAvg
from secure_fvi.algorithms.fedvi import FedVI, gaussian_kl
from secure_fvi.checkpoints import FolderCheckpoints
from secure_fvi.compiled import threads
from secure_fvi.driving import Parties, Run
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.files import write_atomically
from secure_fvi.fitting import build_parties
from secure_fvi.models.fedvi import Network, common_classifier, embed, infer, personal_classifier, personal_log_probs
from secure_fvi.models.fedvi_data import Client
from secure_fvi_lab.experiments import Request, Tell
from secure_fvi_lab.experiments.fedvi_methods import Predict, Tuning, fedrep, fedvi, from_fedavg, scores
from secure_fvi_lab.experiments.spread import spread
from secure_fvi_lab.machine import machine

Row = dict[str, Any]
#: Test accuracy is looked at so often on the way.
_LOOKS = 10


class Plan(NamedTuple):
    """One experiment."""

    name: str
    network: Network
    taking_part: int
    new: int  # clients that take no part
    fedvi: FedVI
    fedavg: FedAvg
    tuning: Tuning
    seeds: tuple[int, ...]  # none of them the one that options were chosen on
    device: str
    paper: dict[str, Any]
    setting: str


Make = Callable[[Path | None, int], list[Client]]
Dealt = Callable[[], list[Client]]


class Fitted(NamedTuple):
    """Weights, by name, and what they cost."""

    weights: dict[str, Tensor]
    curve: list[Row]
    metrics: dict[str, float | None]
    seconds: float
    bytes_up: int  # of the client that sent most
    bytes_down: int


def run(plan: Plan, make: Make, request: Request) -> Row:
    """The content of NAME.json. What has been fitted is kept in `request.keep`, so that a run that was stopped goes on.
    `make(folder, seed)`: all clients, those that take no part last."""
    began, rows, options = time.monotonic(), [], repr(plan._replace(seeds=()))  # more seeds make no other fit anew
    keep = request.folder(options)
    for seed in plan.seeds:
        seeded = plan._replace(network=replace(plan.network, seed=seed))
        dealt = cache(partial(make, request.data, seed))  # not before something is to be fitted
        for method in _METHODS:
            rounds = (plan.fedvi if method == "FedVI" else plan.fedavg).rounds
            made = partial(_made, method, seeded, dealt, seed, keep, request.tell)
            rows += request.once(f"seed {seed}: {method}, {rounds} rounds", options, made)
    summary = {key: _over_seeds(rows, key) for key in ("accuracy", "log_loss", "calibration")}
    best = [r for r in rows if r["method"] == "FedVI"]
    accuracy = [r["new"]["accuracy"] for r in best]
    return {
        "name": plan.name,
        "paper": plan.paper,
        "ours": {**spread(accuracy), "what": "FedVI's accuracy on clients that took no part", **summary},
        "seconds": round(sum(r["seconds"] for r in rows if "seconds" in r), 1),
        "seconds_since_start": round(time.monotonic() - began, 1),
        "bytes": best[0]["bytes_up"] + best[0]["bytes_down"],
        "machine": machine(),
        "setting": plan.setting,
        "rows": rows,
    }


def _made(method: str, plan: Plan, dealt: Dealt, seed: int, keep: Path | None, tell: Tell) -> list[Row]:
    with threads(torch.get_num_threads() if plan.device != "cpu" else 1):
        return _METHODS[method](plan, dealt(), seed, keep, tell)


def _over_seeds(rows: Sequence[Row], key: str) -> Row:
    methods = dict.fromkeys(r["method"] for r in rows)
    return {
        m: {who: spread([r[who][key] for r in rows if r["method"] == m]) for who in ("taking_part", "new")}
        for m in methods
    }


def _fedvi(plan: Plan, clients: Sequence[Client], seed: int, keep: Path | None, tell: Tell) -> list[Row]:
    network = plan.network
    fitted = fit(personal_classifier(network), plan.fedvi, plan, clients, seed, keep, tell, lambda w: fedvi(network, w))
    row = _row(plan, "FedVI", seed, fedvi(network, fitted.weights), clients)
    bound = new_clients_bound(network, fitted.weights, clients[plan.taking_part :])
    return [row | _costs(fitted) | {"curve": fitted.curve, "metrics": fitted.metrics, "bound": bound}]


def _fedavg(plan: Plan, clients: Sequence[Client], seed: int, keep: Path | None, tell: Tell) -> list[Row]:
    def common(w: dict[str, Tensor]) -> Predict:
        return from_fedavg(plan.network, w, plan.tuning)["FedAvg"]

    fitted = fit(common_classifier(plan.network), plan.fedavg, plan, clients, seed, keep, tell, common)
    methods = from_fedavg(plan.network, fitted.weights, plan.tuning)
    rows = [_row(plan, name, seed, predict, clients) for name, predict in methods.items()]
    rows[0] |= _costs(fitted) | {"curve": fitted.curve}
    return rows


def _fedrep(plan: Plan, clients: Sequence[Client], seed: int, keep: Path | None, tell: Tell) -> list[Row]:
    began = time.monotonic()
    predict = fedrep(plan.network, clients[: plan.taking_part], plan.tuning, plan.fedavg, seed, tell)
    return [_row(plan, "FedRep", seed, predict, clients) | {"seconds": round(time.monotonic() - began, 1)}]


_METHODS = {"FedVI": _fedvi, "FedAvg": _fedavg, "FedRep": _fedrep}


def _row(plan: Plan, method: str, seed: int, predict: Predict, clients: Sequence[Client]) -> Row:
    part, new = clients[: plan.taking_part], clients[plan.taking_part :]
    return {
        "method": method, "seed": seed,
        "taking_part": scores(predict, part)._asdict(), "new": scores(predict, new)._asdict(),
    }  # fmt: skip


def _costs(fitted: Fitted) -> Row:
    return {"seconds": round(fitted.seconds, 1), "bytes_up": fitted.bytes_up, "bytes_down": fitted.bytes_down}


def fit(
    model: FederatedModel,
    algorithm: Algorithm,
    plan: Plan,
    clients: Sequence[Client],
    seed: int,
    keep: Path | None,
    tell: Tell,
    predictor: Callable[[dict[str, Tensor]], Predict],
) -> Fitted:
    """A fit over the clients that take part, looked at on the way, with checkpoints where `keep` is a folder."""
    began = time.monotonic()
    server, engine, guards = build_parties(
        model, [c.train for c in clients[: plan.taking_part]], algorithm, Plain(), seed,
        silo_ids=[f"client-{k:04d}" for k in range(plan.taking_part)], device=plan.device, dtype=torch.float32,
        compile=plan.device != "cpu",
    )  # fmt: skip
    folder = None if keep is None else keep / f"{algorithm.name}-{seed}"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    written = None if folder is None else folder / "curve.json"
    seen: list[Row] = json.loads(written.read_text()) if written is not None and written.is_file() else []

    def weights() -> dict[str, Tensor]:
        posterior = server.program.posterior(server.state.algorithm)
        found = server.problem.density.constrain(posterior.eta["loc"], posterior.theta)[0]
        return {name: value.cpu() for name, value in found.items()}

    def look(progress: Any) -> None:
        if progress.round % max(1, algorithm.most_rounds // _LOOKS):
            return
        w = weights()
        both = (clients[: plan.taking_part], clients[plan.taking_part :])
        part, new = (scores(predictor(w), some).accuracy for some in both)
        seen[:] = [r for r in seen if r["round"] < progress.round]
        seen.append({"round": progress.round, "taking_part": part, "new": new, "objective": progress.objective})
        tell(f"    round {progress.round} of {algorithm.most_rounds}: {part:.3f} taking part, {new:.3f} new")
        if written is not None:
            write_atomically(written, json.dumps(seen).encode())

    checkpoints = None if folder is None else FolderCheckpoints(folder, 30.0)
    going: Run[None] = Run(
        Parties(server, engine, guards), algorithm.most_rounds, lambda _: None, checkpoints, resume=True, began=began
    )
    for progress in going:
        look(progress)
    seconds = going.seconds
    metrics = server.program.metrics(server.state.algorithm)
    up, down = max(engine.bytes_up.values()), max(engine.bytes_down.values())
    return Fitted(weights(), seen, metrics, seconds, up, down)


def new_clients_bound(network: Network, w: dict[str, Tensor], clients: Sequence[Client], delta: float = 0.05) -> Row:
    """Means over clients that took no part, of the bound that holds for each with probability 1 - delta, nats: theta
    was fixed without its records, so that KL is the client's own."""
    largest, predict, rows = largest_loss(network.classes), fedvi(network, w), []
    prior = torch.distributions.Normal(0.0, network.beta_scale)
    with torch.no_grad():
        for c in clients:
            loc, scale = infer(network, w, torch.ones(len(c.x)), embed(network, w, c.x))
            rate = float(gaussian_kl(loc, scale, torch.ones_like(loc), lambda b: prior.log_prob(b).sum()))
            draws = personal_log_probs(network, w, c.x, c.x)
            empirical = statistics.mean(float(smoothed_loss(one, c.y).mean()) for one in draws)
            found = pac_bayes_bound(empirical, rate, len(c.y), largest, delta)
            assert found is not None  # the loss is bounded and q(beta) has a density
            rows.append({**found._asdict(), "rate": rate, "test": float(smoothed_loss(predict(c), c.test_y).mean())})
    means = {key: statistics.mean(r[key] for r in rows) for key in rows[0]}
    return {**means, "delta": delta, "largest_loss": largest}


# ---- The PAC-Bayes bound of FedVI (Vedadi et al. 2023, Corollary 1), where its slack is finite ----
#
#     true risk <= empirical risk + (KL(q || prior) + log 1 / delta) / eta + log E_prior E_data exp(eta (...)) / eta
#
# The last term, the slack, is finite for a loss within [0, b]: at most eta b^2 / (8 n) over n independent records
# (Hoeffding). A log loss is not bounded, and the slack of the text's own loss need not be finite; here probabilities
# are
# mixed with a share `floor` of equal ones, -log((1 - floor) p + floor / C), which is at most log(C / floor).
# KL is that of everything the records at hand have moved. For a client that took no part this is KL(q(beta_k) || r)
# alone: theta is fixed before its records are drawn. For the clients that took part theta counts, and under a point
# estimate of theta KL is infinite.


class Bound(NamedTuple):
    """In nats a record."""

    value: float  # of the true risk, with probability at least 1 - delta over the records
    empirical: float
    complexity: float  # (KL + log 1 / delta) / eta
    slack: float


def smoothed_loss(log_probs: Tensor, y: Tensor, floor: float = 0.05) -> Tensor:
    """-log((1 - floor) p(y) + floor / C) (N,) in nats, from log probabilities (N, C): at most log(C / floor)."""
    if not 0 < floor < 1:
        raise InputError(f"floor must lie in (0, 1), not {floor}")
    p = log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1).exp()
    return -torch.log((1 - floor) * p + floor / log_probs.shape[-1])


def largest_loss(classes: int, floor: float = 0.05) -> float:
    """b of `smoothed_loss`, nats."""
    return math.log(classes / floor)


def pac_bayes_bound(
    empirical: float, divergence: float, records: int, largest: float, delta: float = 0.05
) -> Bound | None:
    """The bound for n = `records` with losses in [0, `largest`]; None where it is not finite.

    empirical: mean of E_q[loss] over the records. divergence: KL(q || prior), nats, inf for a point. eta is the best of
    a grid of powers of two, whose size delta is shared over.
    """
    if records < 1 or not 0 < delta < 1 or divergence < 0:
        raise InputError("at least one record, delta in (0, 1) and a divergence of at least 0 are needed")
    if not (math.isfinite(divergence) and math.isfinite(largest)):
        return None
    grid = [2.0**k for k in range(-4, 33)]

    def at(eta: float) -> Bound:
        complexity = (divergence + math.log(len(grid) / delta)) / eta
        slack = eta * largest**2 / (8 * records)
        return Bound(empirical + complexity + slack, empirical, complexity, slack)

    return min(map(at, grid))
