"""Attacks on vertical runs: labels from what comes back to the silos, columns from what leaves them.

labels      a silo reads dlog p/ds of each person off the broadcasts: by its sign, by its size (the rarer class has the
            larger slope), and by its direction, compared with people whose labels it knows (cosine)
columns     the server regresses a silo's predictor, which carries its columns, on the trace of z_j over the rounds (a
            plain sum) or of s, and so does another silo where there are two
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import FloatArray, SecureSum
from secure_fvi.algorithms.vertical import AUXILIARY_PHASE, Vertical
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control, Estimate, judge
from secure_fvi.audits.features import contributions_in_clear
from secure_fvi.audits.scores import auc, cross_fitted, r_squared, ridge
from secure_fvi.audits.transcript import Transcript
from secure_fvi.audits.worlds import Recorder
from secure_fvi.columns import Columns, VerticalLocalPosterior
from secure_fvi.errors import InputError
from secure_fvi.models.vertical_programs import VerticalDataset
from secure_fvi.privacy.settings import DP

#: Ways to read labels off the pulls.
LABEL_ATTACKS = ("sign", "norm", "cosine")
_KNOWN = 0.1  # share of people whose labels the cosine attack knows
_STRETCHES = 8  # over which traces are averaged
_DRAWS = 2000  # of q, for posterior means


class World(NamedTuple):
    """A recorded run on made data, and what the attacks look for."""

    transcript: Transcript
    labels: FloatArray  # (N,)
    predictors: Mapping[str, FloatArray]  # (N,) by silo, posterior means


def columns_of(data: VerticalDataset, likelihood: Likelihood) -> tuple[Columns, list[dict[str, Tensor]]]:
    """The model and the silos' columns, in one order."""
    predictors = [data.predictors[n] for n in data.silos]
    return Columns(likelihood, data.response, predictors, data.offset), list(data.silos.values())


def record(
    data: VerticalDataset,
    likelihood: Likelihood,
    config: Vertical,
    aggregation: SecureSum,
    privacy: DP | None = None,
    seed: int = 0,
    *,
    simulated: bool,
    real_data: bool = False,
    each: Callable[[], None] = lambda: None,
) -> World:
    """A whole run, watched. `each` is told after every round."""
    model, silos = columns_of(data, likelihood)
    run = sf.run(model, silos, config, aggregation, privacy, seed, silo_ids=list(data.silos), compile=False)
    recorder = Recorder(run.server, run.engine, aggregation.kind, simulated=simulated, real_data=real_data)
    for _ in run:
        each()
    eta = {}
    for name, silo in run.engine.silos.items():
        eta[name] = VerticalLocalPosterior(silo).eta(data.silos[name], _DRAWS).mean(0).reshape(len(data.response), -1)
    predictors = {n: v[:, 0].numpy().astype(np.float64) for n, v in eta.items()}
    return World(recorder.transcript(), data.response.numpy().astype(np.float64), predictors)


def pulls(transcript: Transcript) -> FloatArray:
    """(N, R) dlog p/ds of each person over the rounds, as any silo reads them. Needs all records in each round."""
    found = [b.tensors["pull"][:, 0].numpy() for b in transcript.broadcasts() if "pull" in b.tensors and b.round]
    if not found or len({len(f) for f in found}) > 1:
        raise InputError("no round's broadcast carries a pull on every person")
    return np.stack(found, 1).astype(np.float64)


def guess_labels(attack: str, seen: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Scores of people whose labels the attack does not know, and those labels. `seen` (N, R)."""
    if attack == "sign":
        return seen.mean(1), labels
    if attack == "norm":
        rare = labels.mean() < 0.5  # the class sizes are no secret: the rarer one is further from what is expected
        size = np.abs(seen).mean(1)
        return (size if rare else -size), labels
    if attack != "cosine":
        raise InputError(f"attack '{attack}' is unknown; choose {', '.join(LABEL_ATTACKS)}")
    known = np.zeros(len(labels), dtype=bool)
    known[np.random.default_rng(0).permutation(len(labels))[: max(2, round(_KNOWN * len(labels)))]] = True
    unit = seen / np.linalg.norm(seen, axis=1, keepdims=True).clip(1e-300)
    if len(set(labels[known])) < 2:
        raise InputError("the people whose labels are known are all of one class")
    ones, zeros = (unit[known & (labels == c)].mean(0) for c in (1.0, 0.0))
    return (unit @ (ones - zeros))[~known], labels[~known]


def label_rows(protection: str, world: World, control: World, epsilon: float | None, delta: float) -> list[AuditRow]:
    """Each attack's AUC beside the bound that (epsilon, delta) gives; `control` is the same run without privacy."""
    rows = []
    for attack in LABEL_ATTACKS:
        rng = np.random.default_rng(1)
        bound = None if epsilon is None else auc_bound(epsilon, delta)
        rows.append(
            judge(
                f"labels, {attack}",
                protection,
                "AUC",
                _label_score(attack, world, world.labels),
                Control(_label_score(attack, control, control.labels), "the same run without privacy"),
                Control(
                    _label_score(attack, world, rng.permutation(world.labels), CONTROL_CONFIDENCE),
                    "labels in random order",
                ),
                0.5,
                bound=bound,
                rounds=pulls(world.transcript).shape[1],
            )
        )
    return rows


def column_rows(protection: str, world: World, control: World) -> list[AuditRow]:
    """R^2 of the first silo's predictor: from its own z_j where the sum shows it, and from the total."""
    silo = world.transcript.silos[0]
    target, rng = world.predictors[silo], np.random.default_rng(2)

    def score(of: World, what: str, wanted: FloatArray, confidence: float = 0.95) -> Estimate:
        seen = _traces(of.transcript, silo if what == "messages" else None)
        people = np.arange(len(wanted))
        return r_squared(wanted, cross_fitted(ridge, seen, wanted, people), people, confidence)

    return [
        judge(
            f"columns from {what}",
            protection,
            "R^2",
            score(world, what, target),
            Control(score(control, "messages", control.predictors[silo]), "the silo's own z_j in a plain sum"),
            Control(score(world, what, rng.permutation(target), CONTROL_CONFIDENCE), "people in random order"),
            0.0,
            rounds=len(world.transcript.sums),
        )
        for what in ("messages", "totals")
    ]


def auc_bound(epsilon: float, delta: float) -> float:
    """Largest AUC of any test between two values of one label under (epsilon, delta)-DP for its replacement.

    The ROC curve lies under min(delta + e^eps x, 1 - e^-eps (1 - delta - x)), whose area this is.
    """
    return 1 - (1 - delta) ** 2 / (1 + math.exp(epsilon))


def _label_score(attack: str, world: World, labels: FloatArray, confidence: float = 0.95) -> Estimate:
    guesses, truth = guess_labels(attack, pulls(world.transcript), labels)
    return auc(truth, guesses, np.arange(len(truth)), confidence)


def _traces(transcript: Transcript, silo: str | None) -> FloatArray:
    """(N, stretches) means of each person's row over stretches of the run, of one silo's messages or of the totals."""
    if silo is None:
        rounds = [s.released for s in transcript.sums if s.phase == AUXILIARY_PHASE]
    else:
        sent = zip(transcript.broadcasts(), contributions_in_clear(transcript), strict=True)
        rounds = [numbers[silo] for message, numbers in sent if message.phase == AUXILIARY_PHASE]
    table = transcript.tables[AUXILIARY_PHASE]
    each = np.stack([table.split(r)["auxiliary"][:, 0] for r in rounds], 1)
    return np.stack([part.mean(1) for part in np.array_split(each, min(_STRETCHES, each.shape[1]), 1)], 1)
