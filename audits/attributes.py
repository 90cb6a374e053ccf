"""One attribute of a record, guessed by an adversary that knows all the rest of it.

Much of that is statistics: who knows the population guesses a smoking mother from a wheezing child without any run. So
what is scored is a gain: how much better the attribute is guessed from a run that the record was in than, by the same
attack, from one that it was not in. The adversary here sees a silo's messages and the totals; in `attributes_released`
it sees the released posterior alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits.base import CONFIDENCE, CONTROL_CONFIDENCE, AuditRow, Control, Estimate, judge
from secure_fvi.audits.features import contributions_in_clear, from_messages, from_totals
from secure_fvi.audits.membership import Membership
from secure_fvi.audits.scores import auc, auc_gain, cross_fitted, ridge
from secure_fvi.audits.transcript import Transcript
from secure_fvi.audits.worlds import MASKED, PLAIN, Data, Each, Protection, Workbench, resampled, silent
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel


@dataclass(frozen=True)
class Attribute:
    """A yes or no of each record: an argument of the model, or one of its columns.

    `complement` is a column that holds 1 where `column` holds 0, as one-hot codes of two levels have it.
    """

    argument: str
    column: int | None = None
    complement: int | None = None

    def read(self, data: Data) -> FloatArray:
        """(N,) of 0 and 1. Raises InputError where it is not that."""
        if self.argument not in data:
            raise InputError(f"the model has no argument '{self.argument}'; choose {', '.join(data)}")
        values = data[self.argument] if self.column is None else data[self.argument][:, self.column]
        if values.dim() != 1 or not bool(((values == 0) | (values == 1)).all()):
            raise InputError(f"'{self.argument}' is no yes or no of each record; name a column of 0 and 1")
        return np.asarray(values.cpu().numpy(), np.float64)

    def write(self, data: Data, value: float) -> Data:
        """The same records with `value` for all."""
        changed = data[self.argument].clone()
        if self.column is None:
            changed[:] = value
        else:
            changed[:, self.column] = value
            if self.complement is not None:
                changed[:, self.complement] = 1 - value
        return {**data, self.argument: changed}

    def rest(self, data: Data) -> FloatArray:
        """(N, D): what is known of the records."""
        hidden = self.write(data, 0.0)
        columns = [v.reshape(len(v), -1).double().cpu().numpy() for _, v in sorted(hidden.items())]
        return np.concatenate(columns, 1)


class Targets(NamedTuple):
    """Records in question, one a silo, in worlds of equally many silos."""

    truth: FloatArray  # (S,)
    known: FloatArray  # (S, D)
    messages: FloatArray  # (S, D')
    totals: FloatArray  # (S, D'')
    silos: int  # of each world

    def seen(self, look: str, away: int) -> FloatArray:
        """What is seen of the run `away` worlds further on, which is another than the record's own unless that is 0."""
        parts = (self.messages, self.totals) if look == "messages and totals" else (self.totals,)
        return np.roll(np.concatenate(parts, 1), -away * self.silos, 0)

    def guesses(self, look: str, away: int) -> FloatArray:
        """(S,): of a ridge regression on the known part, on what is seen, and on products of both."""
        seen = self.seen(look, away)
        scaled = (seen - seen.mean(0)) / np.where(seen.std(0) > 0, seen.std(0), 1.0)
        known = self.known - self.known.mean(0)
        products = (scaled[:, :, None] * known[:, None, :]).reshape(len(seen), -1)
        return cross_fitted(ridge, np.concatenate([known, seen, products], 1), self.truth, np.arange(len(seen)))


def energies(transcript: Transcript) -> FloatArray:
    """(J, D): log mean squares over rounds of the numbers that each silo sent."""
    sent = contributions_in_clear(transcript)
    return np.stack([np.log(np.mean([row[s] ** 2 for row in sent], 0) + 1e-12) for s in transcript.silos])


def attribute_rows(
    bench: Workbench,
    attribute: Attribute,
    protections: Sequence[Protection] = (PLAIN, MASKED),
    records: int = 1,
    silos: int = 40,
    worlds: int = 4,
    each: Each = silent,
) -> list[AuditRow]:
    """Two rows for each protection: gain in AUC from messages and totals, and from totals alone.

    The record in question is the first of a silo of `records`. Everything that a release depends on follows from the
    totals, so "totals alone" is at least what a released posterior tells. Positive control: plain sums.
    """
    if worlds < 3:
        raise InputError(f"{worlds} worlds: the controls need at least 3, so that runs differ")
    attribute.read(bench.pool)
    sizes = [records] * silos

    def collect(protection: Protection) -> Targets:
        laboratory = bench.laboratory(protection, worlds * silos)
        parts: list[tuple[FloatArray, ...]] = []
        for seed in range(worlds):
            drawn = resampled(bench.pool, sizes, seed)
            transcript = laboratory.run(drawn, seed).transcript
            order = [int(name.removeprefix("silo-")) - 1 for name in transcript.silos]
            first = {n: torch.stack([drawn[j][n][0] for j in order]) for n in bench.pool}
            messages = np.concatenate([from_messages(transcript), energies(transcript)], 1)
            parts.append((attribute.read(first), attribute.rest(first), messages, from_totals(transcript)))
            each()
        truth, known, seen, totals = (np.concatenate(p) for p in zip(*parts, strict=True))
        return Targets(truth, known, seen, totals, silos)

    plain, rows = collect(PLAIN), []
    strongest = "messages and totals"
    control = _gain(plain, strongest, 0, 1)
    nothing = _gain(plain, strongest, 2, 1, CONTROL_CONFIDENCE)
    for protection in protections:
        found = plain if protection.name == PLAIN[0] else collect(protection)
        for look in (strongest, "totals alone"):
            rows.append(
                judge(
                    f"'{attribute.argument}' of a record that is known otherwise: {look}",
                    protection.name,
                    "gain in AUC over a run without the record",
                    _gain(found, look, 0, 1),
                    Control(control, "the same attack under plain sums"),
                    Control(nothing, "plain sums, between two runs without the record"),
                    auc_in=list(auc(found.truth, found.guesses(look, 0), found.truth)),
                    auc_out=list(auc(found.truth, found.guesses(look, 1), found.truth)),
                    records_a_silo=records,
                    targets=len(found.truth),
                    rounds=bench.rounds,
                )
            )
    return rows


def _gain(targets: Targets, look: str, inside: int, outside: int, confidence: float = CONFIDENCE) -> Estimate:
    return auc_gain(targets.truth, targets.guesses(look, inside), targets.guesses(look, outside), confidence)


# ----
# One attribute of a record, guessed from the released posterior by an adversary that knows all the rest of the record
#
# For models without local latents. A record's signal is how much likelier it is under q(Z_G) with the attribute than
# without; the adversary sets it beside the same signal under posteriors that it fitted to data of its own without the
# record. As in `attributes`, what is scored is the gain over a posterior that the record had no part in.

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
    imputed = cross_fitted(ridge, known, truth, everybody)

    def guesses(seen: FloatArray) -> FloatArray:
        # One number for all that is known: a fit to whole records beside margins would undo "without the record",
        # since all other records' attributes are in those margins.
        return cross_fitted(ridge, np.column_stack([imputed, seen]), truth, everybody)

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
