"""How many nats a silo's messages hold about its latents: lower bounds on mutual information, with intervals.

InfoNCE (van den Oord et al. 2018): a small network learns to tell a silo's own latent from those of others by its
messages. On silos that it has not seen, in batches of N, the mean log-likelihood of the right one plus ln N is a lower
bound in expectation, and one that cannot exceed ln N (Poole et al. 2019): an estimate near the cap says "at least so
much", and no more. Beside it stands -log(1 - R^2) / 2 of a ridge regression, which is a lower bound where the latent is
normal.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.base import CONFIDENCE, CONTROL_CONFIDENCE, AuditRow, Control, Estimate, Groups, judge
from secure_fvi.audits.local_latents import Sample
from secure_fvi.audits.regressors import Ridge, cross_fitted
from secure_fvi.audits.scores import r_squared
from secure_fvi.audits.workbench import Each, silent
from secure_fvi.errors import InputError

#: An estimate above this share of its cap is marked.
NEAR = 0.9
#: Steps between looks at the rows that training leaves out, by which it is stopped.
_WATCH = 20
#: Rows of a step of training, at most.
_TRAINING = 20
_RESAMPLES, _SEED = 4000, 20_260_101


@dataclass(frozen=True)
class Critic:
    """The network that pairs messages with latents, and its training.

    batch: N. components: of the messages, by their variance. folds: parts of the worlds, each in turn left out of
    training. repeats: ways to form batches of the silos left out.
    """

    batch: int = 10
    components: int = 4
    hidden: int = 32
    steps: int = 300
    learning_rate: float = 5e-3
    decay: float = 5e-2
    folds: int = 5
    repeats: int = 6
    seed: int = 0


class Information(NamedTuple):
    """An estimate in nats with its interval and its cap."""

    estimate: Estimate
    cap: float  # ln N

    @property
    def near_cap(self) -> bool:
        """Whether the truth may be anywhere above."""
        return self.estimate.value > NEAR * self.cap


def info_nce(
    seen: FloatArray,
    target: FloatArray,
    groups: Groups,
    critic: Critic | None = None,
    confidence: float = CONFIDENCE,
    each: Each = silent,
) -> Information:
    """Nats about `target` (B,) or (B, K) in `seen` (B, D). No row of a group is scored by a network that met the group.

    The interval is a percentile bootstrap over batches, each of rows that are in no other batch of their repeat.
    """
    critic = critic or Critic()
    y = target.reshape(len(target), -1)
    names = np.unique(groups)
    if len(names) < 2 * critic.folds:
        raise InputError(f"{len(names)} groups for {critic.folds} folds; give at least {2 * critic.folds}")
    rng = np.random.default_rng([_SEED, critic.seed])
    fold = dict(zip(names, rng.permutation(len(names)) % critic.folds, strict=True))
    held = np.array([fold[g] for g in groups])
    batches: list[list[float]] = []
    for k in range(critic.folds):
        inside, outside = held != k, held == k
        if outside.sum() < critic.batch:
            raise InputError(f"{int(outside.sum())} rows left out make no batch of {critic.batch}; give more worlds")
        x_in, x_out = _components(seen[inside], seen[outside], y[inside], groups[inside], critic)
        y_in, y_out = _scaled(y[inside], y[outside])
        network = _trained(x_in, y_in, critic, critic.seed + k)
        with torch.no_grad():
            for repeat in range(critic.repeats):
                order = rng.permutation(int(outside.sum()))
                whole = len(order) // critic.batch * critic.batch
                parts = order[:whole].reshape(-1, critic.batch)
                values = [float(_bound(network, x_out[part], y_out[part])) for part in parts]
                if repeat == 0:
                    batches += [[v] for v in values]
                else:
                    for place, v in enumerate(values):
                        batches[len(batches) - len(values) + place].append(v)
        each()
    means = np.array([np.mean(b) for b in batches])
    drawn = np.random.default_rng(_SEED).choice(means, (_RESAMPLES, len(means))).mean(1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Information(Estimate(float(means.mean()), float(low), float(high)), math.log(critic.batch))


def gaussian(seen: FloatArray, target: FloatArray, groups: Groups, confidence: float = CONFIDENCE) -> Estimate:
    """-log(1 - R^2) / 2 of a cross-fitted ridge regression, in nats: a lower bound if `target` (B,) is normal.

    Of a target (B, K) that column is taken which varies most; what is told of it is told of all.
    """
    if target.ndim == 2:
        target = target[:, int(np.argmax(target.var(0)))]
    guesses = cross_fitted(Ridge(), seen, target, groups)
    return Estimate(*(-0.5 * math.log(max(1 - r, 1e-12)) for r in r_squared(target, guesses, groups, confidence)))


def information_rows(
    protection: str, sample: Sample, unprotected: Sample, critic: Critic | None = None, each: Each = silent
) -> list[AuditRow]:
    """Two rows: what messages with totals tell about silos' mean latents, by InfoNCE and by the Gaussian bound.

    `unprotected` is the same study under plain sums, which is the positive control. The cap stands in every row of
    InfoNCE, with a mark where the estimate is within a tenth of it.
    """
    critic = critic or Critic()
    shuffled = unprotected.shuffled()

    def measured(s: Sample, confidence: float = CONFIDENCE) -> Information:
        return info_nce(s.both, s.target, s.world, critic, confidence, each)

    def closed(s: Sample, confidence: float = CONFIDENCE) -> Estimate:
        return gaussian(s.both, s.target, s.world, confidence)

    found, control = measured(sample), measured(unprotected)
    plain, other = "the same under plain sums", "plain sums, with the latents of other worlds"
    shared: dict[str, Any] = {"silos": len(sample.target)}
    return [
        judge(
            "information on a silo's mean latent: InfoNCE",
            protection,
            f"nats, at most ln {critic.batch} = {found.cap:.2f}",
            found.estimate,
            Control(control.estimate, plain),
            Control(measured(shuffled, CONTROL_CONFIDENCE).estimate, other),
            cap=found.cap,
            near_cap=found.near_cap,
            **shared,
        ),
        judge(
            "information on a silo's mean latent: normal, from R^2",
            protection,
            "nats",
            closed(sample),
            Control(closed(unprotected), plain),
            Control(closed(shuffled, CONTROL_CONFIDENCE), other),
            **shared,
        ),
    ]


def _components(
    known: FloatArray, unknown: FloatArray, answers: FloatArray, groups: Groups, critic: Critic
) -> tuple[Tensor, Tensor]:
    """What the network sees of messages: a ridge regression's guess of each target, and principal components."""
    guesses = [(cross_fitted(Ridge(), known, a, groups), Ridge()(known, a, unknown)) for a in answers.T]
    first, second = _scaled(known, unknown)
    basis = torch.linalg.svd(first, full_matrices=False)[2][: critic.components].T
    parts = _scaled((first @ basis).numpy(), (second @ basis).numpy())
    told = _scaled(*(np.column_stack(g) for g in zip(*guesses, strict=True)))
    return torch.cat([told[0], parts[0]], 1), torch.cat([told[1], parts[1]], 1)


def _scaled(known: FloatArray, unknown: FloatArray) -> tuple[Tensor, Tensor]:
    mean, sd = known.mean(0), known.std(0)
    sd = np.where(sd > 1e-12 * (1 + np.abs(mean)), sd, 1.0)
    first, second = (torch.from_numpy(np.clip((v - mean) / sd, -4, 4)) for v in (known, unknown))
    return first, second


def _bound(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """() nats: InfoNCE of one batch of pairs (N, D) and (N, K)."""
    count = len(x)
    pairs = torch.cat([x[:, None].expand(-1, count, -1), y[None].expand(count, -1, -1)], -1)
    return network(pairs).squeeze(-1).log_softmax(1).diagonal().mean() + math.log(count)


def _trained(x: Tensor, y: Tensor, critic: Critic, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        width = x.shape[1] + y.shape[1]
        network = nn.Sequential(
            nn.Linear(width, critic.hidden), nn.SiLU(), nn.Linear(critic.hidden, critic.hidden), nn.SiLU(),
            nn.Linear(critic.hidden, 1),
        ).to(x.dtype)  # fmt: skip
        optimizer = torch.optim.AdamW(network.parameters(), critic.learning_rate, weight_decay=critic.decay)
        order = torch.randperm(len(x))
        watched, used = order[: max(len(x) // 5, critic.batch)], order[max(len(x) // 5, critic.batch) :]
        best, kept = -math.inf, copy.deepcopy(network.state_dict())
        for step in range(critic.steps):
            if step % _WATCH == 0:
                with torch.no_grad():
                    parts = [torch.randperm(len(watched))[: critic.batch] for _ in range(4)]
                    value = sum(float(_bound(network, x[watched[p]], y[watched[p]])) for p in parts)
                if value > best:
                    best, kept = value, copy.deepcopy(network.state_dict())
            part = used[torch.randperm(len(used))[:_TRAINING]]  # larger batches teach more; N is for the estimate
            optimizer.zero_grad()
            (-_bound(network, x[part], y[part])).backward()
            optimizer.step()
        network.load_state_dict(kept)
    return network
