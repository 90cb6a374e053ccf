"""A server that asks one question in two ways, or twice, or completes sums late: masked sums, strict sites, all honest.

Each attack ends in a total that is one silo's own term. The controls take the one refusal away that stops it: that a
silo waits for silos' signatures before it believes that its answer was used (`SumSilo.shown`), that one question has
one sum (`Order.answered`), that a sum is over when a later question was answered (`MaskedSilo._newest`).
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pvi_world import NOISE, REGRESSION, make_regression

import secure_fvi as sf
from secure_fvi.aggregation.base import FloatArray, Total, carry
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.algorithms.base import BEFORE_ALL, Broadcast, Order, Question
from secure_fvi.errors import ProtocolError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND, SUM, encode_broadcast
from secure_fvi.silo import Limits

SIZES, ALONE = (7, 30, 12, 25, 9), "silo-1"


class Liar:
    """A server that says what it likes to real silos with a strict site's limits."""

    def __init__(self, algorithm: Any, limits: Limits, max_missing: int = 0) -> None:
        self.data = make_regression(SIZES)[0]
        sums = sf.Masked(min_cohort=2, max_missing=max_missing)
        self.server, engine, _ = build_parties(REGRESSION, self.data, algorithm, sums, compile=False)
        self.silos, self.names = engine.silos, tuple(sorted(engine.silos))
        for silo in self.silos.values():
            silo.limits = limits
        message = self.server.program.broadcast(self.server.state.algorithm, 1, {})
        self.first: Broadcast = message._replace(accepted=dict.fromkeys(self.names, 0))
        self.table = self.server.program.tables["round"]

    def exchange(self, messages: Any) -> dict[str, bytes]:
        return {s: self.silos[s].handle(SUM + m) for s, m in messages.items()}

    def ask(self, message: Broadcast, *who: str) -> dict[str, bytes]:
        carry(self.server.secure_sum.prepare(message.sum_index), self.exchange)
        return {s: self.silos[s].handle(ROUND + encode_broadcast(message)) for s in who or self.names}

    def total(self, message: Broadcast, replies: dict[str, bytes]) -> dict[str, FloatArray]:
        context = hashlib.sha256(encode_broadcast(message)).digest()
        exchanges = self.server.secure_sum.total(message.sum_index, message.cohort, self.table, replies, context)
        found: Total = carry(exchanges, self.exchange)
        assert found.survivors == tuple(sorted(replies))
        return self.table.split(found.values)

    def isolated(self, accepted: dict[str, int]) -> float:
        """How far the change of the next round is from the lonely silo's own term, once the server has said that these
        sums were used, and that q took the others' changes alone. In shares of that term."""
        alone = accepted[ALONE]
        sums = tuple((index, 0, "round", 0) for index in sorted(set(accepted.values())))
        weights = [0.0 if accepted[s] == alone else 1.0 for s in self.names]
        told = {"sums": torch.tensor([float(accepted[s]) for s in self.names]), "dampings": torch.tensor(weights)}
        asked = self.first._replace(
            round=1, sum_index=9, accepted=accepted, sums=sums, tensors={**self.first.tensors, **told}
        )
        change = torch.as_tensor(self.total(asked, self.ask(asked))["change"])
        x, y = self.data[0]["x"], self.data[0]["y"]
        rows, columns = torch.tril_indices(3, 3)
        term = torch.cat([x.T @ y, (x.T @ x)[rows, columns]]).double() / NOISE**2
        term = term * self.server.program.per_unit(asked.tensors["units"])
        return float((change - term).norm() / term.norm())


PVI = sf.PVI(rounds=4, family="full", local_optimizer="closed_form")
STRICT = Limits(rounds=1000, lacking=True, left_out=3, unused=0)


def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silos that take the server's word for it that their answers were used."""
    monkeypatch.setattr(MaskedSilo, "shown", lambda self, question: None)


@pytest.mark.parametrize("held", [True, False])
def test_two_broadcasts_of_one_question(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One goes to silo-1, one to the others; neither sum completes, and both "were used"."""
    if not held:
        believed(monkeypatch)
        monkeypatch.setattr(Order, "answered", answered)
    liar = Liar(PVI, STRICT)
    liar.ask(liar.first, ALONE)
    other = {**liar.first.tensors, "q": liar.first.tensors["q"] * (1 + 1e-12)}
    liar.ask(liar.first._replace(sum_index=2, tensors=other), *(s for s in liar.names if s != ALONE))
    accepted = {s: 1 if s == ALONE else 2 for s in liar.names}
    if held:
        with pytest.raises(ProtocolError, match="has not shown that silos signed"):
            liar.isolated(accepted)
    else:
        assert liar.isolated(accepted) < 1e-6


@pytest.mark.parametrize("held", [True, False])
def test_one_question_under_two_indices(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed by all, then asked of silo-1 alone again: its change would be named by another sum than the others'."""
    if not held:
        monkeypatch.setattr(Order, "answered", answered)
    liar = Liar(PVI, STRICT)
    liar.total(liar.first, liar.ask(liar.first))
    liar.ask(liar.first._replace(sum_index=2), ALONE)
    accepted = {s: 2 if s == ALONE else 1 for s in liar.names}
    if held:
        with pytest.raises(ProtocolError, match="two sums of one question"):
            liar.isolated(accepted)
    else:
        assert liar.isolated(accepted) < 1e-6


def answered(order: Order, message: Broadcast) -> dict[int, Question]:
    """As `Order.answered`, though two sums be of one question."""
    places = list(order.phases)
    return {0: BEFORE_ALL, **{i: Question(r, places.index(phase), k) for i, r, phase, k in message.sums}}


@pytest.mark.parametrize("told", ["used", "not used"])
@pytest.mark.parametrize("held", [True, False])
def test_totals_that_lack_silos_and_come_late(held: bool, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One total of the job may lack a silo. All questions are asked first, and the sums completed afterwards, each
    without another silo: their differences are the silos' own terms."""
    if not held:
        believed(monkeypatch)
        monkeypatch.setattr(MaskedSilo, "_newest", lambda self, index: self._record(index))
    limits = Limits(rounds=1000, missing=1, differences=1, lacking=True, left_out=9, unused=1)
    liar = Liar(sf.SFVI(iterations=9), limits, max_missing=1)
    asked, lacking = list[tuple[Broadcast, dict[str, bytes], str]](), 0
    with pytest.raises(ProtocolError) if held else nullcontext():
        for round_, lost in enumerate(liar.names):
            last = round_ if told == "used" else 0
            message = liar.first._replace(
                round=round_, sum_index=round_ + 1, accepted=dict.fromkeys(liar.names, last),
                sums=((last, last - 1, "round", 0),) if last else (),
            )  # fmt: skip
            asked.append((message, liar.ask(message), lost))
        for message, replies, lost in asked:
            liar.total(message, {s: r for s, r in replies.items() if s != lost})
            lacking += 1
    assert lacking == (0 if held else len(SIZES))
