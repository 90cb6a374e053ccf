"""Transcripts: who sees what, and that nothing is missing from the server's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from programs import make_intercepts

import secure_fvi as sf
from secure_fvi.aggregation.base import FloatArray, carry
from secure_fvi.aggregation.key_holder import KEY_HOLDER
from secure_fvi.audits.transcript import NETWORK, SERVER, Transcript
from secure_fvi.audits.worlds import Recorder
from secure_fvi.errors import InputError
from secure_fvi.fitting import build_parties
from secure_fvi.server import Server

ROUNDS = 4


def parties(aggregation: Any) -> Any:
    problem = make_intercepts()
    return build_parties(problem.model, problem.silos, sf.SFVI(iterations=ROUNDS), aggregation, 3, compile=False)


@functools.cache
def recorded(aggregation: Any) -> tuple[Transcript, Server]:
    server, engine, _ = parties(aggregation)
    recorder = Recorder(server, engine, aggregation.kind, simulated=True)
    for _ in range(ROUNDS):
        engine.run(server.round())
    return recorder.transcript(), server


def replayed(transcript: Transcript, server: Server) -> bool:
    """Whether a fresh server, which gets the recorded answers, asks and releases what was recorded: with keys drawn at
    random, which is every sum but the plain one, none does."""
    found: list[FloatArray] = []
    server.observe(SimpleNamespace(total=lambda *_: None, released=lambda _, values: found.append(values.copy())))
    entries = iter(transcript.entries)

    def exchange(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        down, up = ([next(entries) for _ in messages] for _ in range(2))
        assert {e.party: e.body for e in down} == dict(messages)
        return {e.party: e.body for e in up}

    try:
        for _ in transcript.sums:
            carry(server.round(), exchange)
    except AssertionError:
        return False
    return all(np.array_equal(a, s.released) for a, s in zip(found, transcript.sums, strict=True))


def test_recording_changes_nothing_and_misses_nothing() -> None:
    transcript, watched = recorded(sf.Plain())
    server, engine, _ = parties(sf.Plain())
    for _ in range(ROUNDS):
        engine.run(server.round())
    for name, value in server.state.algorithm.eta.items():
        assert torch.equal(value, watched.state.algorithm.eta[name])
    assert sum(e.size for e in transcript.entries if e.direction == "up") == sum(engine.bytes_up.values())
    assert sum(e.size for e in transcript.entries if e.direction == "down") == sum(engine.bytes_down.values())
    assert replayed(transcript, parties(sf.Plain()).server)
    other = make_intercepts()
    elsewhere = build_parties(other.model, other.silos, sf.SFVI(iterations=ROUNDS), sf.Plain(), 4, compile=False)
    assert not replayed(transcript, elsewhere.server)


def test_plain_contributions_add_up_to_the_totals() -> None:
    transcript, _ = recorded(sf.Plain())
    for terms, outcome in zip(transcript.contributions(), transcript.sums, strict=True):
        assert tuple(sorted(terms)) == outcome.survivors == transcript.silos
        together = sum(np.frombuffer(raw, "<f8")[: len(outcome.values)] for raw in terms.values())
        np.testing.assert_allclose(together, outcome.values, rtol=1e-12, atol=1e-12)
    assert [b.round for b in transcript.broadcasts()] == list(range(ROUNDS))


@pytest.mark.parametrize("aggregation", [sf.Masked(), sf.Homomorphic()])
def test_protected_sums_have_the_same_totals_and_no_term_in_sight(aggregation: Any) -> None:
    plain, _ = recorded(sf.Plain())
    protected, _ = recorded(aggregation)
    for a, b in zip(plain.sums, protected.sums, strict=True):
        np.testing.assert_allclose(a.values, b.values, atol=1e-5)
    terms = [raw for sent in plain.contributions() for raw in sent.values()]
    bodies = b"".join(e.body for e in protected.entries)
    assert all(raw[:8] not in bodies for raw in terms)
    assert all(raw[:8] in b"".join(e.body for e in plain.entries) for raw in terms)  # the control


def test_each_onlooker_sees_its_own_part() -> None:
    transcript, _ = recorded(sf.Homomorphic())
    assert transcript.view(SERVER) is transcript
    silo = transcript.view("silo-2")
    assert {e.party for e in silo.entries} == {"silo-2"}
    assert silo.sums == ()
    holder = transcript.view(KEY_HOLDER)
    assert {e.party for e in holder.entries} == {KEY_HOLDER}
    assert sum(e.direction == "up" for e in holder.entries) >= ROUNDS
    assert not any(e.party == KEY_HOLDER for e in recorded(sf.Masked())[0].entries)
    network = transcript.view(NETWORK)
    assert all(e.body == b"" and e.phase == "" and e.round == -1 for e in network.entries)
    assert [e.size for e in network.entries] == [len(e.body) for e in transcript.entries]
    assert network.contributions() == []
    with pytest.raises(InputError, match="nobody is called 'silo-9'"):
        transcript.view("silo-9")
    with pytest.raises(InputError, match="what 'network' saw"):
        network.view(SERVER)


def test_a_transcript_of_real_data_needs_a_word() -> None:
    server, engine, _ = parties(sf.Plain())
    with pytest.raises(InputError, match="real_data = True"):
        Recorder(server, engine, "plain", simulated=False)
    assert not Recorder(server, engine, "plain", simulated=False, real_data=True).transcript().simulated
