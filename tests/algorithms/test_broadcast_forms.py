"""A broadcast that decodes and does not fit is refused by the silo, by name, before anything is computed from it.

Every algorithm, every phase: its own broadcasts, spoilt one part at a time. The control takes the check away.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fedvi_world import MODEL, clients
from programs import make_clinics, make_intercepts
from pvi_world import REGRESSION, make_regression
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms import base, sfvi_avg
from secure_fvi.algorithms.base import Broadcast, Form
from secure_fvi.algorithms.local_fit import Families
from secure_fvi.algorithms.vertical import Gaussian, Vertical
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.disclosure import disclose
from secure_fvi.errors import AggregationError, BoundError, InputError, ProtocolError, SecureFVIError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND, decode_broadcast, encode_broadcast
from secure_fvi.silo import Silo

#: That an encoder's weights do not reach the likelihood; what the extreme values make of a fit.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("few_draws", "untraced")]

DP = {"noise_multiplier": 1.0, "clipping_norm": 1.0, "noise": "silo", "retries": 200}
CASES: dict[str, tuple[Any, Any]] = {
    "sfvi": (sf.SFVI(iterations=2), None),
    "sfvi, to the end": (sf.SFVI(max_iterations=2), None),
    "sfvi, full": (sf.SFVI(max_iterations=2, family="full"), None),
    "sfvi, warm": (sf.SFVI(iterations=2, warm_start=sf.WarmStart(rounds=1, local_steps=2)), None),
    "sfvi, records": (sf.SFVI(iterations=2), sf.RecordDP(**DP)),
    "sfvi, adaptive": (sf.SFVI(iterations=2), sf.SiloDP(**DP, target_quantile=0.5)),
    "sfvi-avg": (sf.SFVIAvg(rounds=1, local_steps=2, family="diagonal"), None),
    "sfvi-avg, full": (sf.SFVIAvg(rounds=1, local_steps=2, family="full", bures_iterations=2), None),
    "sfvi-avg, trusted": (sf.SFVIAvg(rounds=1, local_steps=2, family="diagonal", barycenter="trusted"), None),
    "pvi": (sf.PVI(max_rounds=2, local_steps=2), None),
    "pvi, private": (sf.PVI(rounds=2, local_steps=2), sf.SiloDP(**DP, target_quantile=0.5)),
    "fedavg": (sf.FedAvg(rounds=1), None),
    "fedvi": (sf.FedVI(rounds=1), None),
    "bcm": (sf.BCM(local_steps=2), None),
    "vcl": (sf.VCL(local_steps=2, reveal_changes=True), None),
    "vertical": (Vertical(rounds=2), None),
    "vertical, power": (Vertical(rounds=2, model="power"), None),
    "soul": (Soul(rounds=2, model="power"), None),
}
#: Asked extreme values in every run of the tests, and controls that are left for a slow one.
_QUICK, _SLOW = ("sfvi", "sfvi, records", "pvi"), ("sfvi-avg, full", "fedavg", "vertical, power")


def parties(algorithm: Any, privacy: Any) -> tuple[Any, Any]:
    if isinstance(algorithm, Vertical | Soul):
        rng = torch.Generator().manual_seed(0)
        columns = [{"x": torch.randn(8, 2, generator=rng)} for _ in range(3)]
        y = torch.randn(8, generator=rng)
        built = build_parties(sf.Columns(Gaussian(), y), columns, algorithm, sf.Plain(), compile=False)
        return built.server, built.engine
    model, silos = REGRESSION, make_regression((5, 6, 7))[0]
    if isinstance(algorithm, sf.FedVI):
        model, silos = MODEL, clients(3)
    elif isinstance(algorithm, sf.SFVI | sf.SFVIAvg):
        problem = make_clinics() if algorithm.name == "sfvi-avg" else make_intercepts()
        model, silos = problem.model, problem.silos
    server, engine, _ = build_parties(model, silos, algorithm, sf.Plain(), compile=False, privacy=privacy)
    return server, engine


def misfits(message: Broadcast) -> Iterator[Broadcast]:
    """What a lying server may send instead: well-formed, of this phase and round, and of no use."""
    scalars, tensors = dict(message.scalars), dict(message.tensors)

    def without(table: dict[str, Any], name: str) -> dict[str, Any]:
        return {key: value for key, value in table.items() if key != name}

    for name in scalars:
        yield message._replace(scalars=without(scalars, name))
        yield message._replace(scalars={**without(scalars, name), name + " ": scalars[name]})
    for other in ("clip", "iteration", "x"):
        if other not in scalars:
            yield message._replace(scalars={**scalars, other: 1.0})
    yield message._replace(tensors={**tensors, "x": torch.zeros(1)})
    for name, value in tensors.items():
        yield message._replace(tensors=without(tensors, name))
        yield message._replace(tensors={**without(tensors, name), name + " ": value})
        shapes = [value.unsqueeze(0), value.unsqueeze(-1), torch.zeros(0), torch.cat([value.reshape(-1)] * 2)]
        if value.dim():
            shapes += [value[:0], torch.cat([value, value[:1]]), value.new_zeros(())]
        for shape in shapes:
            if shape.shape != value.shape:
                yield message._replace(tensors={**tensors, name: shape.double()})


def extremes(message: Broadcast) -> Iterator[Broadcast]:
    """Of the right form, with values that no honest server sends."""
    for value in (0.0, -1.0, 0.5, 1e308, -1e308):
        for name in message.scalars:
            yield message._replace(scalars={**message.scalars, name: value})
        for name, tensor in message.tensors.items():
            yield message._replace(tensors={**message.tensors, name: torch.full_like(tensor, value)})
    for name, tensor in message.tensors.items():
        yield message._replace(tensors={**message.tensors, name: torch.full_like(tensor, torch.nan)})


class Attacked:
    """Runs a job, and before each honest question of one silo asks it the spoilt ones."""

    def __init__(self, case: str, monkeypatch: pytest.MonkeyPatch, spoilt: Any) -> None:
        self.server, self.engine = parties(*CASES[case])
        self.phases, self.refused, self.name = set[str](), list[Exception](), sorted(self.engine.silos)[0]
        handle = Silo.handle

        def attacked(silo: Silo, message: bytes) -> bytes:
            if silo.name == self.name and message[:1] == ROUND:
                broadcast = decode_broadcast(message[1:], silo.program.order.asked)
                if broadcast.phase not in self.phases:
                    for lie in spoilt(broadcast):
                        self.ask(silo, lie, handle)
                self.phases.add(broadcast.phase)
            return handle(silo, message)

        monkeypatch.setattr(Silo, "handle", attacked)
        # After so few rounds q may miss the posterior, and would not be refined: every phase is to be asked.
        monkeypatch.setattr("secure_fvi.algorithms.refining_server.worthwhile", lambda rest: rest.seen is not None)
        finished = False
        while not finished:
            finished = self.engine.run(self.server.round()).finished

    def ask(self, silo: Silo, lie: Broadcast, handle: Any) -> None:
        """Ask, and put the silo back where it was."""
        kept = copy.copy(vars(silo)), copy.copy(vars(silo.gate)), copy.copy(vars(silo._sum))
        try:
            handle(silo, ROUND + encode_broadcast(lie))
        except Exception as error:
            self.refused.append(error)
        for party, state in zip((silo, silo.gate, silo._sum), kept, strict=True):
            vars(party).update(state)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c == "sfvi, full")) for c in CASES])
@pytest.mark.later("sfvi-avg, full", "sfvi, to the end")
def test_a_broadcast_of_another_form_is_refused_by_name(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def counted(message: Broadcast) -> Iterator[Broadcast]:
        nonlocal asked
        for lie in misfits(message):
            asked += 1
            yield lie

    found = Attacked(case, monkeypatch, counted)
    assert found.phases == set(found.server.program.tables)
    assert len(found.refused) == asked > 10
    for error in found.refused:
        assert type(error) is ProtocolError
        assert str(error).startswith(f"silo '{found.name}': ")


@pytest.mark.parametrize(
    "case", ["pvi", *(pytest.param(c, marks=pytest.mark.slow) for c in ("sfvi, to the end", *_SLOW))]
)
def test_without_the_check_it_is_not(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Form, "check", lambda *_: None)
    found = Attacked(case, monkeypatch, misfits)
    assert any(not isinstance(error, SecureFVIError) for error in found.refused)


@pytest.mark.parametrize("case", [c if c in _QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_values_that_no_server_sends_end_in_a_refusal_or_an_answer(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Attacked(case, monkeypatch, extremes)
    for error in found.refused:
        assert isinstance(error, SecureFVIError), repr(error)


def test_a_broadcast_is_no_longer_than_its_form() -> None:
    server, engine = parties(*CASES["sfvi"])
    silo, exchanges = engine.silos["silo-1"], server.round()
    message = decode_broadcast(next(exchanges)["silo-1"][1:], server.program.order.asked)
    long: dict[str, Tensor] = {**message.tensors, "z_global": torch.from_numpy(np.zeros(2_000_000))}
    with pytest.raises(ProtocolError, match=r"silo 'silo-1': a broadcast of \d+ bytes, where at most \d+ are expected"):
        silo.handle(ROUND + encode_broadcast(message._replace(tensors=long)))
    silo.handle(ROUND + encode_broadcast(message))


@pytest.mark.later
@pytest.mark.parametrize(
    ("case", "number", "value"),
    [
        ("sfvi", "scale", 1e308), ("sfvi", "averaging", 2.0), ("sfvi-avg", "rate", 1.5), ("sfvi-avg", "rate", -0.1),
        ("sfvi-avg", "records", 1e60), ("fedavg", "prior", math.inf), ("sfvi, adaptive", "clip", math.nan),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_before_it_is_used(
    case: str, number: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of the job is spent: the honest question is answered afterwards. Controls follow."""

    def spoilt(message: Broadcast) -> Iterator[Broadcast]:
        if number in message.scalars:
            yield message._replace(scalars={**message.scalars, number: value})

    found = Attacked(case, monkeypatch, spoilt)
    assert found.refused
    for error in found.refused:
        assert type(error) is ProtocolError
        assert f"the number '{number}' of phase" in str(error) or "malformed scalars" in str(error)
    assert not any(silo.past.failed for silo in found.engine.silos.values())


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("case", ["vertical", "sfvi, records"])
def test_what_is_no_finite_number_is_a_messages_fault(
    case: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tensor as in a number: nothing is spent, and the honest question is answered. The control looks at no form:
    the silo finds that its own data cannot answer, and answers no more, or under privacy pays for noise."""
    server, engine = parties(*CASES[case])
    engine.run(server.round())
    silo, sent = engine.silos["silo-1"], next(server.round())["silo-1"]
    honest, paid = decode_broadcast(sent[1:], server.program.order.asked), silo.gate.paid
    if not checked:
        monkeypatch.setattr(Form, "check", lambda *_: None)
    for value in (math.nan, -math.inf):
        lie = honest._replace(tensors={name: torch.full_like(t, value) for name, t in honest.tensors.items()})
        with contextlib.suppress(BoundError), pytest.raises(ProtocolError) if checked else contextlib.nullcontext():
            silo.handle(ROUND + encode_broadcast(lie))
        if not checked:
            assert silo.past.failed or silo.gate.paid > paid
            return
        assert (silo.past.failed, silo.gate.paid) == (False, paid)
    assert silo.handle(sent)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("case", ["pvi", "pvi, private", "bcm", "sfvi-avg, full"])
def test_a_q_or_a_covariance_that_is_none_is_a_messages_fault(
    case: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No data could answer it. The control looks at neither: of a silo's own data it was said that they could not, or
    under privacy it paid for noise."""
    if not checked:
        monkeypatch.setattr(Families, "sent", lambda self, message, _: self.unpack(message.tensors["q"]))
        monkeypatch.setattr(sfvi_avg, "ProtocolError", AggregationError)

    def spoilt(message: Broadcast) -> Iterator[Broadcast]:
        for name in {"q", "root"} & message.tensors.keys():
            yield message._replace(tensors={**message.tensors, name: torch.zeros_like(message.tensors[name])})

    found = Attacked(case, monkeypatch, spoilt)
    if checked:
        assert found.refused
        assert all(type(error) is ProtocolError for error in found.refused)
        assert any("no distribution" in str(e) or "not positive definite" in str(e) for e in found.refused)
    else:
        assert any(isinstance(error, AggregationError) for error in found.refused) != (case == "pvi, private")


def test_without_ranges_a_number_that_no_server_sends_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_RANGES", {})
    found = Attacked("sfvi", monkeypatch, lambda m: iter([m._replace(scalars={**m.scalars, "averaging": 2.0})]))
    assert not found.refused


def test_a_number_that_all_know_has_that_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for total, refused in ((18, True), (None, False)):
        monkeypatch.setitem(
            CASES, "known", (sf.SFVIAvg(rounds=1, local_steps=2, family="diagonal", total_records=total), None)
        )
        lies = lambda m: iter([m._replace(scalars={**m.scalars, "records": 19.0})])  # noqa: E731
        found = Attacked("known", monkeypatch, lies)
        assert any("the number 'records'" in str(error) for error in found.refused) == refused


_MORE: dict[str, tuple[Any, Any]] = {
    "bcm, split": (sf.BCM(prior="split"), None),
    "stream": (sf.StreamingVB(reveal_changes=True), None),
    "sfvi-avg, equal": (sf.SFVIAvg(family="full", bures_iterations=2, weights="equal"), None),
    "sfvi, counts": (sf.SFVI(iterations=2), sf.RecordDP(**DP, objective_share=0.1, public_counts=True)),
}


@pytest.mark.parametrize("case", [*CASES, *_MORE])
def test_every_block_is_declared(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a sum holds stands in the words of the statement. The control: words that are taken away are missed."""
    monkeypatch.setattr(sys.modules[__name__], "CASES", {**CASES, **_MORE})
    algorithm, privacy = CASES[case]
    program = parties(algorithm, privacy)[0].program
    found = disclose(algorithm, sf.Plain(), privacy, 3)
    found.of_program(program.tables, program.terms, sf.Plain())
    bare = dataclasses.replace(found, phases=tuple(dataclasses.replace(p, what="something") for p in found.phases))
    with pytest.raises(InputError, match="which it does not declare"):
        bare.of_program(program.tables, program.terms, sf.Plain())
