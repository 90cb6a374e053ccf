"""Records from gradients, for regressions whose records have no latents of their own.

A record (x, y) adds (d log p / d logit) x to the gradient in the weights: a multiple of its own covariates. One record
alone is read off up to scale, and with an intercept exactly. A sum of B records is read off no longer, but over rounds
the sums of one batch stay in the span of its B records: with more coefficients than records, whether somebody is in the
batch can be seen from his distance to that span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.func import grad, vmap

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.aggregation.plain import Plain
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control, judge
from secure_fvi.audits.features import contributions_in_clear
from secure_fvi.audits.scores import auc, proportion, r_squared
from secure_fvi.audits.transcript import Transcript
from secure_fvi.audits.worlds import Data, Each, Laboratory, silent
from secure_fvi.discovery import read_layout
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel, read_data
from secure_fvi.fitting import check_schemas_agree
from secure_fvi.program_density import ProgramDensity

#: A guess that is this close to a record in direction is that record.
SAME = 0.999
#: Directions of the gradients' span are those with singular values above this share of the largest.
_RANK = 1e-9
BATCHES = (1, 2, 8, 64)
#: The argument that attacks are after.
COVARIATES = "x"


def gradients(transcript: Transcript, silo: str) -> FloatArray:
    """(R, D): a silo's gradient in the global coefficients, round by round, as plain sums show it."""
    if transcript.aggregation != "plain":
        raise InputError(f"under {transcript.aggregation} sums no silo's own gradient is in sight")
    pairs = zip(transcript.broadcasts(), contributions_in_clear(transcript), strict=True)
    return np.stack([transcript.tables[b.phase].split(numbers[silo])["direct"] for b, numbers in pairs])


def distances(seen: FloatArray, candidates: FloatArray) -> FloatArray:
    """(C,): the share of each candidate's length (C, D) that lies outside the span of the gradients (R, D)."""
    _, s, vt = np.linalg.svd(seen / np.linalg.norm(seen, axis=1, keepdims=True), full_matrices=False)
    basis = vt[s > _RANK * s[0]]
    outside = candidates - candidates @ basis.T @ basis
    return np.asarray(np.linalg.norm(outside, axis=1) / np.linalg.norm(candidates, axis=1))


def _closest(guess: FloatArray, candidates: FloatArray) -> float:
    """Cosine of the angle to the candidate's line that is nearest."""
    lengths = np.linalg.norm(candidates, axis=1) * np.linalg.norm(guess)
    return float(np.abs(candidates @ guess / lengths).max())


def study(
    model: FederatedModel,
    data: Data,
    batches: tuple[int, ...] = BATCHES,
    runs: int = 60,
    rounds: int = 100,
    each: Callable[[], None] = lambda: None,
) -> list[AuditRow]:
    """Two rows a batch size: is one round's gradient a record, and is a record in the batch of many rounds' gradients.

    Silos are batches of records drawn without replacement. Positive control of all: batches of one record. Negative
    control: other records that are in no batch.
    """
    if batches[0] != 1:
        raise InputError("batches must begin with 1, which is the positive control")
    found = {b: _one_size(model, data, b, runs, rounds, each) for b in batches}
    rows = []
    for size, (recovered, false, truth, scores, fresh) in found.items():
        detail: dict[str, Any] = {"batch": size, "runs": runs}
        alone = found[1]
        rows.append(
            judge(
                "one gradient read as a record",
                f"plain, batch of {size}",
                f"share recovered (cosine above {SAME})",
                proportion(recovered, runs),
                Control(proportion(alone[0], runs), "batches of one record"),
                Control(proportion(false, runs, CONTROL_CONFIDENCE), "records that are in no batch"),
                **detail,
            )
        )
        rows.append(
            judge(
                "a record in the span of the gradients",
                f"plain, batch of {size}",
                "AUC",
                auc(truth, scores, truth),
                Control(auc(alone[2], alone[3], alone[2]), "batches of one record"),
                Control(auc(truth, fresh, truth, CONTROL_CONFIDENCE), "pairs of records that are in no batch"),
                nothing=0.5,
                **detail,
                rounds=rounds,
            )
        )
    return rows


def _one_size(
    model: FederatedModel, data: Data, size: int, runs: int, rounds: int, each: Callable[[], None]
) -> tuple[int, int, FloatArray, FloatArray, FloatArray]:
    x = data[COVARIATES].numpy()
    laboratory = Laboratory(model, SFVI(iterations=rounds), Plain(), worlds=3 * runs, simulated=True)
    recovered = false = 0
    truth, scores, fresh = [], [], []
    for run in range(runs):
        rows, transcript = _batches(laboratory, data, size, run)
        seen = gradients(transcript, "silo-1")
        inside, outside = x[rows[:size]], x[rows[3 * size : 3 * size + max(size, 3)]]
        recovered += _closest(seen[0], inside) > SAME
        false += _closest(seen[0], outside) > SAME
        member, other, third = distances(seen, np.stack([inside[0], outside[0], outside[1]]))
        truth += [1.0, 0.0]
        scores += [-member, -other]
        fresh += [-third, -other]
        each()
    return recovered, false, np.array(truth), np.array(scores), np.array(fresh)


def _batches(laboratory: Laboratory, data: Data, size: int, run: int) -> tuple[Tensor, Transcript]:
    """A run of three silos that are batches of `size` records, and the records' places, those of the silos first."""
    rows = torch.randperm(len(data[COVARIATES]), generator=torch.Generator().manual_seed(run))
    silos = [{name: v[part] for name, v in data.items()} for part in rows[: 3 * size].split(size)]
    return rows, laboratory.run(silos, run).transcript


# ---- Records from gradients by optimisation: which batch would have given this gradient? ----
#
# The adversary of a plain run knows Z_G of each round and a silo's gradient in it, so it looks for records whose
# gradient is the same (Zhu et al. 2019; cosine distance as in Geiping et al. 2020), from several starts at once and
# over one round or several in which the batch is the same. For models without latents of records or silos. One record
# is read off; of a batch one round shows as many numbers as one record has, so that only several rounds can tell its
# records apart.

#: A guess is a record's if the cosine between their deviations from the population's mean is above this.
MATCHED = 0.99
MATCHED_BATCHES = (1, 2, 4, 8)
_PRIOR = 1e-4  # weight of the guesses' squared standardised deviations from the population


@dataclass(frozen=True)
class Search:
    """How the optimisation goes: Adam on all starts at once, then L-BFGS on the best of them."""

    starts: int = 6
    steps: int = 400
    polish: int = 150
    learning_rate: float = 0.05


class Matcher:
    """Gradient matching for one model without local latents; `pool` is what the adversary knows of the population."""

    def __init__(self, model: FederatedModel, pool: Data) -> None:
        schema, records = read_data(pool, "pool", torch.float64)
        layout, start = read_layout(model, check_schemas_agree({"pool": schema}), torch.float64)
        if layout.size("record") or layout.size("silo") or start.theta:
            raise InputError("gradients are matched in models whose parameters are all global latents")
        self._density = ProgramDensity(model, layout, schema)
        self._others = dict(records.rows)
        values = self._others.pop(COVARIATES)
        self.mean, self.sd = values.mean(0), values.std(0)

    def gradient(self, z_global: Tensor, rows: Data) -> Tensor:
        """(n_global,): the batch's gradient at Z_G."""
        none = z_global.new_zeros(0)
        count = len(rows[COVARIATES])

        def log_p(z: Tensor) -> Tensor:
            return self._density.evaluate(z, none, z.new_zeros(count, 0), {}, rows).records.sum()

        return grad(log_p)(z_global)

    def invert(
        self, z_global: Tensor, seen: Tensor, size: int, known: Mapping[str, Tensor], search: Search, seed: int
    ) -> Tensor:
        """The covariates (size, ...) of the batch that gave the gradients `seen` (R, n) at `z_global` (R, n).

        Arguments that are not `known` are searched for as well, between the population's least and largest value.
        """
        rng = torch.Generator().manual_seed(seed)
        hidden = [name for name in self._others if name not in known]
        varies = (self.sd > 0).to(seen)

        def noise(*shape: int) -> Tensor:
            return torch.randn(search.starts, size, *shape, generator=rng, dtype=torch.float64)

        free = {name: noise(*self._others[name].shape[1:]) for name in hidden}
        free[COVARIATES] = noise(*self.mean.shape)

        def batch(free: Data) -> Data:
            rows = {COVARIATES: self.mean + varies * self.sd * free[COVARIATES], **known}
            for name in hidden:
                low, high = self._others[name].min(0).values, self._others[name].max(0).values
                rows[name] = low + (high - low) * torch.sigmoid(free[name])
            return rows

        def loss(free: Data) -> Tensor:
            got = vmap(lambda z: self.gradient(z, batch(free)))(z_global)
            cosine = torch.nn.functional.cosine_similarity(got, seen, -1)
            error = (got - seen).square().sum(-1) / seen.square().sum(-1)
            return (1 - cosine + error).mean() + _PRIOR * free[COVARIATES].square().mean()

        free = _adam(free, loss, search)
        best = int(vmap(loss)(free).argmin())
        free = _polished({name: v[best] for name, v in free.items()}, loss, search)
        return batch(free)[COVARIATES].detach()

    def centred(self, values: Tensor) -> FloatArray:
        """(B, D): deviations from the population's mean."""
        return np.asarray((values - self.mean).reshape(len(values), -1).numpy(), np.float64)


def _adam(free: Data, loss: Any, search: Search) -> Data:
    moved = {name: v.clone().requires_grad_() for name, v in free.items()}
    optimizer = torch.optim.Adam(list(moved.values()), lr=search.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, search.steps)
    for _ in range(search.steps):
        optimizer.zero_grad()
        vmap(loss)(moved).sum().backward()
        optimizer.step()
        schedule.step()
    return {name: v.detach() for name, v in moved.items()}


def _polished(free: Data, loss: Any, search: Search) -> Data:
    moved = {name: v.clone().requires_grad_() for name, v in free.items()}
    optimizer = torch.optim.LBFGS(
        list(moved.values()), max_iter=search.polish, line_search_fn="strong_wolfe", tolerance_grad=1e-12,
        tolerance_change=1e-14,
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = loss(moved)
        value.backward()
        return value

    optimizer.step(closure)
    return {name: v.detach() for name, v in moved.items()}


def matched(guesses: FloatArray, truth: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Guesses (B, D) in the order of the records (B, D) that they fit best, and the cosine of each pair (B,)."""
    lengths = np.linalg.norm(guesses, axis=1)[:, None] * np.linalg.norm(truth, axis=1)
    cosines = guesses @ truth.T / np.maximum(lengths, 1e-300)
    at, where = linear_sum_assignment(-cosines)
    order = np.empty(len(truth), np.int64)
    order[where] = at
    return guesses[order], cosines[order, np.arange(len(truth))]


def inversion_rows(
    model: FederatedModel,
    data: Data,
    batches: tuple[int, ...] = MATCHED_BATCHES,
    rounds: tuple[int, ...] = (1, 32),
    runs: int = 12,
    known: tuple[str, ...] = ("y",),
    search: Search | None = None,
    each: Each = silent,
) -> list[AuditRow]:
    """Two rows for each batch size and number of rounds matched together: how much of a batch's covariates comes back.

    Silos are batches drawn without replacement, whose arguments `known` the adversary knows. Positive control: batches
    of one record, matched over as many rounds. Negative control: the guesses beside records that are in no batch. A
    record counts as recovered from a cosine of `MATCHED` on; of each run it is the first record that is counted.
    """
    if batches[0] != 1:
        raise InputError("batches must begin with 1, which is the positive control")
    if runs < 10:
        raise InputError(f"{runs} runs: an interval needs at least 10")
    matcher, how, rows = Matcher(model, data), search or Search(), []
    for length in rounds:
        found = {b: _matched_size(matcher, model, data, b, length, runs, known, how, each) for b in batches}
        for size, result in found.items():
            share, r2, alone = result[0], result[1], found[1]
            about = f"records by gradient matching, {length} round{'s' if length > 1 else ''}"
            protection = f"plain, batch of {size}"
            detail: dict[str, Any] = {
                "runs": runs,
                "known": ", ".join(known) or "nothing",
                "share_of_all_records": result[4],
            }
            rows.append(
                judge(
                    about,
                    protection,
                    f"share recovered (cosine above {MATCHED})",
                    proportion(share, runs),
                    Control(proportion(alone[0], runs), "batches of one record"),
                    Control(proportion(result[2], runs, CONTROL_CONFIDENCE), "records that are in no batch"),
                    **detail,
                )
            )
            rows.append(
                judge(
                    about,
                    protection,
                    "R^2 of covariates",
                    r_squared(*r2),
                    Control(r_squared(*alone[1]), "batches of one record"),
                    Control(r_squared(*result[3], CONTROL_CONFIDENCE), "records that are in no batch"),
                    **detail,
                )
            )
    return rows


class _Scored(NamedTuple):
    truth: FloatArray  # of each covariate of each record
    guesses: FloatArray
    run: FloatArray


def _matched_size(
    matcher: Matcher,
    model: FederatedModel,
    data: Data,
    size: int,
    rounds: int,
    runs: int,
    known: tuple[str, ...],
    search: Search,
    each: Each,
) -> tuple[int, _Scored, int, _Scored, float]:
    """First records recovered, the covariates; the same for records in no batch; share of all records recovered."""
    laboratory = Laboratory(model, SFVI(iterations=rounds), Plain(), worlds=3 * runs, simulated=True)
    first = false = every = 0
    inside: list[FloatArray] = []
    outside: list[FloatArray] = []
    for run in range(runs):
        order, transcript = _batches(laboratory, data, size, run)
        places = torch.stack([torch.as_tensor(b.tensors["z_global"]) for b in transcript.broadcasts()])
        seen = torch.from_numpy(gradients(transcript, "silo-1"))
        told = {name: data[name][order[:size]].to(seen) for name in known}
        guesses = matcher.centred(matcher.invert(places, seen, size, told, search, run))
        truth, others = (matcher.centred(data[COVARIATES][order[k : k + size]].to(seen)) for k in (0, 3 * size))
        best, cosines = matched(guesses, truth)
        false_best, false_cosines = matched(guesses, others)
        first += bool(cosines[0] > MATCHED)
        every += int((cosines > MATCHED).sum())
        false += bool(false_cosines[0] > MATCHED)
        group = np.full(truth.size, run)
        inside.append(np.stack([truth.ravel(), best.ravel(), group]))
        outside.append(np.stack([others.ravel(), false_best.ravel(), group]))
        each()
    scored, wrong = (_Scored(*np.concatenate(part, 1)) for part in (inside, outside))
    return first, scored, false, wrong, every / (runs * size)
