"""A server that asks one question in two ways, or twice, or completes sums late: masked sums, strict sites, all honest.

Each attack ends in a total that is one silo's own term. The controls take the one refusal away that stops it: that a
silo waits for silos' signatures before it believes that its answer was used (`SumSilo.shown`), that one question has
one sum (`Order.answered`), that a sum is over when a later question was answered (`MaskedSilo._newest`),
that a sum which silos have signed was used with all of its survivors or with none (`Silo._heard`, `Past.seen`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pvi_world import NOISE, REGRESSION, make_regression

import secure_fvi as sf
from secure_fvi.aggregation.base import FloatArray, Total, carry
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import RevealRequest, unpack_any
from secure_fvi.algorithms.base import BEFORE_ALL, Broadcast, Order, Question
from secure_fvi.checkpoints import pack_state, unpack_state
from secure_fvi.errors import ProtocolError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND, SUM, encode_broadcast
from secure_fvi.silo import Limits, Past

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
        self.unshown: set[str] = set()  # who is asked to sign, and not shown who did

    def exchange(self, messages: Any) -> dict[str, bytes]:
        sent = {s: m for s, m in messages.items() if s not in self.unshown or type(unpack_any(m)) is not RevealRequest}
        return {s: self.silos[s].handle(SUM + m) for s, m in sent.items()}

    def ask(self, message: Broadcast, *who: str) -> dict[str, bytes]:
        carry(self.server.secure_sum.prepare(message.sum_index), self.exchange)
        return {s: self.silos[s].handle(ROUND + encode_broadcast(message)) for s in who or self.names}

    def total(self, message: Broadcast, replies: dict[str, bytes]) -> dict[str, FloatArray]:
        context = hashlib.sha256(encode_broadcast(message)).digest()
        exchanges = self.server.secure_sum.total(message.sum_index, message.cohort, self.table, replies, context)
        found: Total = carry(exchanges, self.exchange)
        assert found.survivors == tuple(sorted(replies))
        return self.table.split(found.values)

    def isolated(self, accepted: dict[str, int], rounds: Mapping[int, int] | None = None) -> float:
        """How far the change of the next round is from the lonely silo's own term, once the server has said that these
        sums were used, and that q took the others' changes alone. In shares of that term. rounds: of sums, where they
        are not all of the first."""
        alone, rounds = accepted[ALONE], rounds or {}
        sums = tuple((index, rounds.get(index, 0), "round", 0) for index in sorted(set(accepted.values()) - {0}))
        weights = [0.0 if accepted[s] == alone else 1.0 for s in self.names]
        told = {"sums": torch.tensor([float(accepted[s]) for s in self.names]), "dampings": torch.tensor(weights)}
        asked = self.first._replace(
            round=1 + max(rounds.values(), default=0),
            sum_index=9,
            accepted=accepted,
            sums=sums,
            tensors={**self.first.tensors, **told},
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


def forgetful(silo: Any) -> None:
    """It goes by what the server says, and by how many silos it says it of."""
    silo._sum.shown = lambda question: None
    silo._sum.absent_from = lambda question: None


@pytest.mark.parametrize(("held", "refusal"), [
    ("nobody", None), (ALONE, "sum 1 was not used, and has shown that silos signed"),
    ("the others", "answers of 1 silos were not used, which are among the survivors"),
])  # fmt: skip
def test_one_of_a_complete_sum_is_said_to_be_behind(held: str, refusal: str | None) -> None:
    """All have signed a sum with all in it. Sites let one be missing, and no total that lacks any."""
    limits = Limits(rounds=1000, missing=1, lacking=True, left_out=3, unused=1)
    liar = Liar(PVI, limits, max_missing=1)
    for name, silo in liar.silos.items():
        if held == "nobody" or (name == ALONE) != (held == ALONE):
            forgetful(silo)
    if held == "the others":
        liar.unshown = {ALONE}
    liar.total(liar.first, liar.ask(liar.first))
    accepted = {s: 0 if s == ALONE else 1 for s in liar.names}
    if refusal is None:
        assert liar.isolated(accepted) < 1e-6
        assert not any(silo.past.differences for silo in liar.silos.values())
    else:
        with pytest.raises(ProtocolError, match=refusal):
            liar.isolated(accepted)


@pytest.mark.parametrize("held", [True, False])
def test_one_is_said_to_be_behind_a_sum_of_earlier_rounds(held: bool) -> None:
    """It was in the first sum, was not shown it, and was not asked in the second. The others remember, though the
    question that they answered last was not put to it. The control: they look at that question alone."""
    limits = Limits(rounds=1000, missing=1, differences=1, lacking=True, left_out=3, unused=1)
    liar = Liar(PVI, limits, max_missing=1)
    liar.unshown, others = {ALONE}, tuple(s for s in liar.names if s != ALONE)
    liar.total(liar.first, liar.ask(liar.first))
    each = torch.tensor([float(s != ALONE) for s in liar.names])
    second = liar.first._replace(
        round=1, sum_index=2, cohort=others, accepted=dict.fromkeys(others, 1), sums=((1, 0, "round", 0),),
        tensors={**liar.first.tensors, "sums": each, "dampings": each},
    )  # fmt: skip
    liar.total(second, liar.ask(second, *others))
    for name in others:  # killed and started again
        silo = liar.silos[name]
        past = unpack_state(pack_state(silo.past), Past(), Path())
        assert past == silo.past
        silo.past = past if held else past._replace(seen={})
    accepted = {s: 0 if s == ALONE else 2 for s in liar.names}
    if held:
        with pytest.raises(ProtocolError, match="answers of 1 silos were not used, which are among the survivors"):
            liar.isolated(accepted, {2: 1})
    else:
        for name in others:
            liar.silos[name]._sum.absent_from = lambda question: None
        assert liar.isolated(accepted, {2: 1}) < 1e-6


def test_who_was_absent_may_be_behind_and_a_sum_that_nobody_has_may_have_failed() -> None:
    """What an honest server says: of a sum that lacked a silo, that it lacked it; of one that failed, that no answer
    was used. Neither is refused."""
    limits = Limits(rounds=1000, missing=1, differences=1, lacking=True, left_out=3, unused=1)
    liar = Liar(PVI, limits, max_missing=1)
    replies = liar.ask(liar.first)
    liar.total(liar.first, {s: r for s, r in replies.items() if s != ALONE})
    liar.isolated({s: 0 if s == ALONE else 1 for s in liar.names})
    assert {silo.past.left_out for silo in liar.silos.values()} == {0, 1}
    liar = Liar(PVI, limits)
    liar.ask(liar.first)
    liar.isolated(dict.fromkeys(liar.names, 0))
    assert {silo.past.left_out for silo in liar.silos.values()} == {1}


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
