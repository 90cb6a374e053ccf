"""One attribute of a record, guessed from the released posterior by an adversary that knows all the rest of the record.

For models without local latents. A record's signal is how much likelier it is under q(Z_G) with the attribute than
without; the adversary sets it beside the same signal under posteriors that it fitted to data of its own without the
record. As in `attributes`, what is scored is the gain over a posterior that the record had no part in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.attributes import Attribute, auc_gain
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control, judge
from secure_fvi.audits.membership import Membership
from secure_fvi.audits.regressors import Ridge, cross_fitted
from secure_fvi.audits.scores import auc
from secure_fvi.audits.workbench import Each, silent
from secure_fvi.audits.worlds import Data
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel

#: How often each record counts in the positive control's posteriors.
COPIES = 10


class _Signals(NamedTuple):
    """What a record's attribute is guessed from, under a run with the record and two without."""

    inside: FloatArray  # (N, D)
    outside: FloatArray
    other: FloatArray


def released_rows(
    model: FederatedModel, data: Data, attribute: Attribute, references: int = 32, each: Each = silent
) -> list[AuditRow]:
    """One row. Each of `references` posteriors is fitted to a random half of `data`, all side by side.

    For each record one posterior with it and one without are the targets, the others without it are the adversary's.
    Positive control: posteriors in which each record counts `COPIES` times. Negative: two posteriors without it.
    """
    truth, known = attribute.read(data), attribute.rest(data)
    if references < 8:
        raise InputError(f"{references} references: the adversary's own need at least 8")
    with_it, without = (Membership(model, attribute.write(data, value)) for value in (1.0, 0.0))
    real = Membership(model, data)
    halves = real.halves(references)

    def signals(copies: int) -> _Signals:
        fitted = real.fit(halves * np.int64(copies))  # type: ignore[arg-type]  # a record counts so many times
        margins = with_it.signals(real.family, fitted.eta) - without.signals(real.family, fitted.eta)
        each()
        return _chosen(margins, halves)

    everybody = np.arange(len(truth))
    imputed = cross_fitted(Ridge(), known, truth, everybody)

    def guesses(seen: FloatArray) -> FloatArray:
        # One number for all that is known: a fit to whole records beside margins would undo "without the record",
        # since all other records' attributes are in those margins.
        return cross_fitted(Ridge(), np.column_stack([imputed, seen]), truth, everybody)

    found, heavy = (signals(copies) for copies in (1, COPIES))
    inside, outside, other = (guesses(seen) for seen in found)
    return [
        judge(
            f"'{attribute.argument}' of a record that is known otherwise: released posterior",
            "none",
            "gain in AUC over a posterior without the record",
            auc_gain(truth, inside, outside),
            Control(
                auc_gain(truth, guesses(heavy.inside), guesses(heavy.outside)),
                f"posteriors in which each record counts {COPIES} times",
            ),
            Control(auc_gain(truth, other, outside, CONTROL_CONFIDENCE), "between two posteriors without the record"),
            auc_in=list(auc(truth, inside, truth)),
            auc_out=list(auc(truth, outside, truth)),
            auc_of_the_rest_alone=list(auc(truth, imputed, truth)),
            records=len(truth) // 2,
            references=references,
        )
    ]


def _chosen(margins: FloatArray, halves: npt.NDArray[np.bool_]) -> _Signals:
    """Of `margins` (M, N) each record's under its targets, beside how far they lie from the adversary's own."""
    rng = np.random.default_rng(6)
    order = np.where(halves, 2.0, rng.random(halves.shape)).argsort(0)  # runs without the record come first
    count = len(halves) // 2
    places = np.arange(margins.shape[1])
    own = margins[order[2:count], places].mean(0)

    def beside(run: npt.NDArray[np.int64]) -> FloatArray:
        margin = margins[run, places]
        return np.column_stack([margin, margin - own])

    first_with = np.where(halves, rng.random(halves.shape), 2.0).argmin(0)
    return _Signals(beside(first_with), beside(order[0]), beside(order[1]))
