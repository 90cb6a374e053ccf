"""Attacks on local latents, by protection: regressions on worlds, the same by size of a silo, and the game.

Worlds are run once and serve all attacks that look at them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.audits.base import (
    CONFIDENCE,
    CONTROL_CONFIDENCE,
    AuditRow,
    Control,
    Estimate,
    Groups,
    Knowledge,
    judge,
)
from secure_fvi.audits.features import from_both, from_totals
from secure_fvi.audits.local_latents import Sample, by_silo, collect, rows
from secure_fvi.audits.scores import (
    advantage,
    auc,
    cross_fitted,
    power_of_advantage,
    r_squared,
    ridge,
    standardised,
    tpr_at_fpr,
)
from secure_fvi.audits.worlds import OWN, PLAIN, Data, Each, Laboratory, Protection, Workbench, resampled, silent
from secure_fvi.errors import InputError

_LOOKS: dict[str, Knowledge] = {"messages and totals": from_both, "totals alone": from_totals}
Told = Callable[[str], None]

#: Individuals a silo, silos a world, worlds: for the attack "sizes".
SIZES = ((1, 50, 2), (10, 50, 2), (100, 5, 20), (537, 3, 30))


def runs_with_many(protection: Protection) -> bool:
    """Whether worlds of very many silos are run under it: ciphertexts of all of them take minutes."""
    return protection.privacy is None and not isinstance(protection.aggregation, Homomorphic)


def _renamed(found: list[AuditRow], start: str) -> list[AuditRow]:
    return [replace(row, attack=row.attack.replace("latents by", f"{start},")) for row in found]


class LatentStudies:
    """Of one configuration. `told` hears what is being done, once a world."""

    def __init__(self, bench: Workbench, individuals: int, trials: int, told: Told) -> None:
        """`individuals`: silos of one record in each of two worlds. `trials`: runs of the game."""
        self.bench, self.told = bench, told
        self.individuals, self.trials = individuals, trials
        self._samples: dict[tuple[str, str, int], Sample] = {}
        self._plays: dict[str, Plays] = {}

    def latents(self, protection: Protection) -> list[AuditRow]:
        """The means of silos' latents at the configuration's own sizes."""
        found, control = self._at_own_sizes(protection), self._at_own_sizes(PLAIN)
        return rows(protection.name, found, control, worlds=self.bench.worlds, rounds=self.bench.rounds)

    def information(self, protection: Protection) -> list[AuditRow]:
        """What is seen tells about them, in nats."""
        return information_rows(protection.name, self._at_own_sizes(protection), self._at_own_sizes(PLAIN))

    def one_by_one(self, protection: Protection) -> list[AuditRow]:
        """Silos of one individual."""
        sizes = [1] * self.individuals
        own = self._sample(PLAIN, sizes, OWN)
        found, control = (by_silo(self._sample(p, sizes, 0).hinted(own)) for p in (protection, PLAIN))
        return _renamed(rows(protection.name, found, control, rounds=self.bench.rounds), "individuals")

    def _at_own_sizes(self, protection: Protection) -> Sample:
        return self._sample(protection, self.bench.sizes, 0).hinted(self._sample(PLAIN, self.bench.sizes, OWN))

    def by_size(self) -> list[AuditRow]:
        """Records and silos' means by the size of a silo, under plain sums; silos of a few are groups by themselves."""
        out = []
        for records, silos, worlds in SIZES:
            sizes = [records] * silos
            own, found = (self._sample(PLAIN, sizes, first, worlds) for first in (OWN, 0))
            found = found.hinted(own)
            found = by_silo(found) if worlds < 10 else found
            out += rows(f"plain, {records} a silo", found, found, rounds=self.bench.rounds)
        wanted = ("silo mean, messages and totals", "single records, messages and totals")
        return _renamed([row for row in out if row.attack.endswith(wanted)], "by size of a silo")

    def _sample(self, protection: Protection, sizes: list[int], first: int, worlds: int | None = None) -> Sample:
        key = (protection.name, str(sizes), first)
        if key not in self._samples:
            count = worlds or (2 if max(sizes) == 1 else self.bench.worlds)
            laboratory = self.bench.laboratory(protection, count * len(sizes))
            what = f"{protection.name}: worlds of {len(sizes)} silos"
            self._samples[key] = collect(
                laboratory,
                lambda seed: resampled(self.bench.pool, sizes, seed),
                range(first, first + count),
                each=lambda: self.told(what),
            )
        return self._samples[key]

    def game(self, protection: Protection) -> list[AuditRow]:
        """One record's two candidates."""
        detail: dict[str, Any] = {"rounds": self.bench.rounds, "silo_records": self.bench.sizes[0]}
        privacy = protection.privacy
        if privacy is not None and privacy.epsilon is not None:
            detail["bound"] = bound(privacy.epsilon, privacy.delta)
        return game_rows(protection.name, self._played(protection), self._played(PLAIN), **detail)

    def _played(self, protection: Protection) -> Plays:
        if protection.name not in self._plays:
            laboratory = self.bench.laboratory(protection, self.trials * len(self.bench.sizes))
            what = f"{protection.name}: the game"
            self._plays[protection.name] = play(
                laboratory, self._game, range(self.trials), _LOOKS, each=lambda: self.told(what)
            )
        return self._plays[protection.name]

    @property
    def _game(self) -> Game:
        """The first record of the first silo is one of the two whose latents lie farthest apart in one plain run."""
        if not hasattr(self, "_chosen"):
            outcome = self.bench.laboratory(PLAIN, 1).run(self.bench.silos, 0)
            names = [f"silo-{j + 1}" for j in range(len(self.bench.silos))]
            means = torch.cat([torch.from_numpy(outcome.latents[name]) for name in names])
            if not means.shape[1]:
                raise InputError("the model has no latent site inside its record plate, so there is no game to play")
            ends = (int(means[:, 0].argmin()), int(means[:, 0].argmax()))
            candidates = tuple({name: v[at : at + 1] for name, v in self.bench.pool.items()} for at in ends)
            self._chosen = Game(tuple(self.bench.silos), 0, 0, (candidates[0], candidates[1]))
        return self._chosen


# ----
# How many nats a silo's messages hold about its latents: lower bounds on mutual information, with intervals
#
# InfoNCE (van den Oord et al. 2018): a small network learns to tell a silo's own latent from those of others by its
# messages. On silos that it has not seen, in batches of N, the mean log-likelihood of the right one plus ln N is a
# lower bound in expectation, and one that cannot exceed ln N (Poole et al. 2019): an estimate near the cap says "at
# least so much", and no more. Beside it stands -log(1 - R^2) / 2 of a ridge regression, which is a lower bound where
# the latent is normal.

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
    guesses = cross_fitted(ridge, seen, target, groups)
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
    guesses = [(cross_fitted(ridge, known, a, groups), ridge(known, a, unknown)) for a in answers.T]
    first, second = _scaled(known, unknown)
    basis = torch.linalg.svd(first, full_matrices=False)[2][: critic.components].T
    parts = _scaled((first @ basis).numpy(), (second @ basis).numpy())
    told = _scaled(*(np.column_stack(g) for g in zip(*guesses, strict=True)))
    return torch.cat([told[0], parts[0]], 1), torch.cat([told[1], parts[1]], 1)


def _scaled(known: FloatArray, unknown: FloatArray) -> tuple[Tensor, Tensor]:
    first, second = (torch.from_numpy(v) for v in standardised(known, unknown))
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


# ---- A game on one record: which of two values did this individual take? ----
#
# The adversary knows everything but one record and the silos' secrets: the model, every other record, and that the one
# in question is either the first candidate or the second. A fair coin decides; the run is made with fresh secrets; the
# adversary looks at what the server saw and guesses. It has learnt to guess on runs that it made itself. Under
# (epsilon, delta)-differential privacy for adding or removing a record no adversary can win by more than `bound`.


@dataclass(frozen=True)
class Game:
    """The silos, which record is in question, and its two candidates (one row each)."""

    silos: tuple[Data, ...]
    silo: int
    record: int
    candidates: tuple[Data, Data]

    def world(self, which: int) -> list[Data]:
        """The silos with candidate `which` in place."""
        changed = {name: values.clone() for name, values in self.silos[self.silo].items()}
        for name, value in self.candidates[which].items():
            changed[name][self.record] = value[0]
        return [changed if j == self.silo else dict(data) for j, data in enumerate(self.silos)]


@dataclass(frozen=True)
class Plays:
    """Runs of a game: by what the adversary may look at, its features, and how the coins fell."""

    features: dict[str, FloatArray]  # (T, D) each
    coins: FloatArray  # (T,) of 0 and 1
    played: int  # the first so many are the adversary's own, the rest are guessed at

    def shuffled(self) -> Plays:
        """The same runs with coins that were tossed again: nothing can be guessed. For negative controls."""
        again = np.random.default_rng(4).integers(0, 2, len(self.coins)).astype(np.float64)
        return Plays(self.features, again, self.played)


def play(
    laboratory: Laboratory,
    game: Game,
    seeds: Iterable[int],
    looks: dict[str, Knowledge],
    own: float = 0.5,
    each: Callable[[], None] = lambda: None,
) -> Plays:
    """One run a seed; the share `own` of them the adversary may learn from. The coins follow the seeds."""
    coins: list[float] = []
    seen: dict[str, list[FloatArray]] = {name: [] for name in looks}
    for seed in seeds:
        coin = int(np.random.default_rng([seed, 1]).integers(2))
        transcript = laboratory.run(game.world(coin), seed).transcript
        place = transcript.silos.index(f"silo-{game.silo + 1}")
        for name, look in looks.items():
            seen[name].append(look(transcript)[place])
        coins.append(float(coin))
        each()
    if len(coins) < 20:
        raise InputError(f"{len(coins)} runs of a game say little; play at least 20")
    return Plays({name: np.stack(rows) for name, rows in seen.items()}, np.array(coins), round(own * len(coins)))


@dataclass(frozen=True)
class Guessed:
    """How an attack did on the runs it had not learnt from."""

    truth: FloatArray
    scores: FloatArray
    right: int

    @property
    def trials(self) -> int:
        return len(self.truth)

    def advantage(self, confidence: float = CONFIDENCE) -> Estimate:
        return advantage(self.right, self.trials, confidence)


def guess(plays: Plays, look: str) -> Guessed:
    """Scores above 1/2 are guesses for the second candidate."""
    x, k = plays.features[look], plays.played
    scores = ridge(x[:k], plays.coins[:k], x[k:])
    truth = plays.coins[k:]
    return Guessed(truth, scores, int(((scores > 0.5) == (truth > 0.5)).sum()))


def bound(epsilon: float, delta: float) -> float:
    """The largest advantage in this game under (epsilon, delta) for adding or removing a record.

    The game replaces one, which is a removal and an addition: (2 epsilon, (1 + e^epsilon) delta), and under (e, d) no
    test has an advantage above (e^e - 1 + 2 d) / (e^e + 1) (Kairouz et al. 2015).
    """
    if epsilon > 300:
        return 1.0
    twice, failing = 2 * epsilon, (1 + math.exp(epsilon)) * delta
    return min(1.0, (math.expm1(twice) + 2 * failing) / (math.exp(twice) + 1))


def game_rows(protection: str, plays: Plays, unprotected: Plays, fpr: float = 0.1, **detail: Any) -> list[AuditRow]:
    """Advantage for each way to look at the runs, with AUC and the true-positive rate at `fpr` in the detail.

    `unprotected`: the same game under plain sums, whose `messages` are the positive control of every way to look.
    """
    strongest = guess(unprotected, "messages and totals")
    caught = strongest.advantage()
    power = power_of_advantage(caught, strongest.trials)
    nothing = guess(unprotected.shuffled(), "messages and totals").advantage(CONTROL_CONFIDENCE)
    out = []
    for look in plays.features:
        found = guess(plays, look)
        area = auc(found.truth, found.scores, found.truth)
        rate = tpr_at_fpr(found.truth, found.scores, fpr).rate
        more = {"trials": found.trials, "auc": list(area), f"tpr_at_fpr_{fpr:g}": list(rate), **detail}
        out.append(
            judge(
                f"which of two values, by ridge: {look}",
                protection,
                "advantage",
                found.advantage(),
                Control(caught, "the same game under plain sums, from messages and totals", power),
                Control(nothing, "plain sums, with the coins tossed again"),
                **more,
            )
        )
    return out
