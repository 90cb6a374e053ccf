"""Records from gradients, for regressions whose records have no latents of their own.

A record (x, y) adds (d log p / d logit) x to the gradient in the weights: a multiple of its own covariates. One record
alone is read off up to scale, and with an intercept exactly. A sum of B records is read off no longer, but over rounds
the sums of one batch stay in the span of its B records: with more coefficients than records, whether somebody is in the
batch can be seen from his distance to that span.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.aggregation.plain import Plain
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control, judge
from secure_fvi.audits.features import contributions_in_clear
from secure_fvi.audits.scores import auc, proportion
from secure_fvi.audits.transcript import Transcript
from secure_fvi.audits.worlds import Data, Laboratory
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel

#: A guess that is this close to a record in direction is that record.
SAME = 0.999
#: Directions of the gradients' span are those with singular values above this share of the largest.
_RANK = 1e-9
BATCHES = (1, 2, 8, 64)


def gradients(transcript: Transcript, silo: str, block: str = "direct") -> FloatArray:
    """(R, D): a silo's gradient in the global coefficients, round by round, as plain sums show it."""
    if transcript.aggregation != "plain":
        raise InputError(f"under {transcript.aggregation} sums no silo's own gradient is in sight")
    pairs = zip(transcript.broadcasts(), contributions_in_clear(transcript), strict=True)
    return np.stack([transcript.tables[b.phase].split(numbers[silo])[block] for b, numbers in pairs])


def invert(gradient: FloatArray, intercept: int | None = 0) -> FloatArray:
    """The covariates (D,) of the one record that a gradient (D,) is from; without an intercept up to scale."""
    scale = gradient[intercept] if intercept is not None else np.linalg.norm(gradient)
    if scale == 0:
        raise InputError("a gradient of zero gives nothing away")
    return np.asarray(gradient / scale)


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
    covariates: str = "x",
    each: Callable[[], None] = lambda: None,
) -> list[AuditRow]:
    """Two rows a batch size: is one round's gradient a record, and is a record in the batch of many rounds' gradients.

    Silos are batches of records drawn without replacement. Positive control of all: batches of one record. Negative
    control: other records that are in no batch.
    """
    if batches[0] != 1:
        raise InputError("batches must begin with 1, which is the positive control")
    found = {b: _one_size(model, data, b, runs, rounds, covariates, each) for b in batches}
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
    model: FederatedModel, data: Data, size: int, runs: int, rounds: int, covariates: str, each: Callable[[], None]
) -> tuple[int, int, FloatArray, FloatArray, FloatArray]:
    total = len(data[covariates])
    laboratory = Laboratory(model, SFVI(iterations=rounds), Plain(), worlds=3 * runs, simulated=True)
    recovered = false = 0
    truth, scores, fresh = [], [], []
    for run in range(runs):
        rows = torch.randperm(total, generator=torch.Generator().manual_seed(run))
        silos = [{name: v[part] for name, v in data.items()} for part in rows[: 3 * size].split(size)]
        seen = gradients(laboratory.run(silos, run).transcript, "silo-1")
        inside = silos[0][covariates].numpy()
        outside = data[covariates][rows[3 * size : 3 * size + max(size, 3)]].numpy()
        recovered += _closest(seen[0], inside) > SAME
        false += _closest(seen[0], outside) > SAME
        member, other, third = distances(seen, np.stack([inside[0], outside[0], outside[1]]))
        truth += [1.0, 0.0]
        scores += [-member, -other]
        fresh += [-third, -other]
        each()
    return recovered, false, np.array(truth), np.array(scores), np.array(fresh)
