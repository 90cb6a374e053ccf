"""SFVI after a warm start by SFVI-Avg: what is handed over, what is charged, what resumes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import make_clinics, make_intercepts, make_slopes

import secure_fvi as sf
from secure_fvi.algorithms import sfvi_warm
from secure_fvi.algorithms.base import ROUND_PHASE
from secure_fvi.algorithms.sfvi import OWN_DRAWS
from secure_fvi.algorithms.sfvi_avg import COUNT, MERGE
from secure_fvi.algorithms.sfvi_warm import SFVIWarmProgram
from secure_fvi.driving import Books
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.fitting import build_parties
from secure_fvi.privacy.accountants import epsilon
from secure_fvi.privacy.events import Composed
from secure_fvi.privacy.ledger import Ledger
from secure_fvi.randomness import KeyedDraws
from secure_fvi.runs.config import build, resolved

# Runs of fixed length that are too short to have converged warn.
pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")


def _warm(rounds: int = 2, local_steps: int = 15, iterations: int | None = 6, **options: Any) -> sf.SFVI:
    return sf.SFVI(iterations=iterations, warm_start=sf.WarmStart(rounds, local_steps), **options)


@pytest.mark.slow
def test_phases_rounds_and_exchanges() -> None:
    """One count, two merges, six rounds of SFVI; a plain sum is one exchange."""
    problem, phases = make_slopes(), []
    result = sf.fit(
        problem.model, problem.silos, _warm(), sf.Plain(), compile=False, on_round=lambda p: phases.append(p.phase)
    )
    assert phases[:3] == [COUNT, MERGE, MERGE]
    assert result.rounds == 8
    assert result.aggregation["exchanges"] == 9
    assert _warm().declare(3, False).rounds == 8


def test_sfvi_begins_where_sfvi_avg_ended() -> None:
    """q(Z_G) bit for bit; the silos' conditionals as they were, written around the merged mean: 1e-12.

    The same options and seed make the same SFVI-Avg run.
    """
    problem = make_clinics()
    averaging = sf.SFVIAvg(rounds=2, local_steps=15, tolerance=0.0)
    server, engine, _ = build_parties(problem.model, problem.silos, _warm(), sf.Plain(), compile=False)
    alone, alone_engine, _ = build_parties(problem.model, problem.silos, averaging, sf.Plain(), compile=False)
    for _ in range(3):
        engine.run(server.round())
        alone_engine.run(alone.round())
    state, expected = server.state.algorithm, alone.state.algorithm
    for name, value in expected.eta.items():
        assert torch.equal(state.own.eta[name], value)
    before = {name: silo.pending.local.warm for name, silo in engine.silos.items() if silo.pending is not None}
    engine.run(server.round())  # the silos hand over in answer to the first broadcast of SFVI
    loc = expected.eta["loc"]
    for name, silo in engine.silos.items():
        assert silo.pending is not None
        assert silo.pending.local.begun
        program: Any = silo.program
        message = server.program.broadcast(state, 9, 0)
        handed = program._handed_over(message, silo.local).own
        assert torch.equal(handed.record_moments["loc/step"], before[name].record_moments["loc/step"])
        shift = loc - before[name].anchor
        moved = before[name].silo["loc"] + (before[name].silo["coupling"] * shift).sum(-1)
        torch.testing.assert_close(handed.silo["loc"], moved, rtol=1e-12, atol=1e-12)
        assert not silo.pending.local.warm.record


@pytest.mark.slow
def test_draws_of_the_two_algorithms_are_numbered_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number names two draws of a silo's records, whichever algorithm drew."""
    problem = make_intercepts()
    server, engine, _ = build_parties(problem.model, problem.silos, _warm(), sf.Plain(), compile=False)
    silo, drawn, normals = engine.silos["silo-1"], [], KeyedDraws.normals

    def noted(self: KeyedDraws, number: int, *rest: Any) -> Any:
        if self is silo.view.record_draws:
            drawn.append(number)
        return normals(self, number, *rest)

    monkeypatch.setattr(KeyedDraws, "normals", noted)
    for _ in range(5):
        engine.run(server.round())
    assert len(set(drawn)) == len(drawn) > 2 * 15
    assert sum(number >= OWN_DRAWS for number in drawn) == 2


@pytest.mark.slow
def test_a_warm_start_reaches_the_posterior() -> None:
    """The stopping rule of SFVI, which promises means within 0.12 posterior sds and a Monte-Carlo error of 0.03."""
    problem = make_intercepts()
    result = sf.fit(problem.model, problem.silos, _warm(3, 200, None), sf.Plain(), compile=True)
    assert result.converged
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.15 * problem.sd["mu"]
    assert (result.posterior["mu"].sd / problem.sd["mu"] - 1).abs() < 0.1


class _KilledError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [2, 5])
def test_a_killed_run_ends_where_an_unbroken_one_does(killed_after: int, tmp_path: Path) -> None:
    """In the warm start and after it; silo-level latents as well. The same bits."""
    problem = make_clinics()
    algorithm = _warm()
    whole = sf.fit(problem.model, problem.silos, algorithm, compile=False)
    calls = 0

    def kill(_: sf.Progress) -> None:
        nonlocal calls
        calls += 1
        if calls == killed_after:
            raise _KilledError

    keep: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_seconds": 0.0, "compile": False}
    with pytest.raises(_KilledError):
        sf.fit(problem.model, problem.silos, algorithm, on_round=kill, **keep)
    resumed = sf.fit(problem.model, problem.silos, algorithm, resume=True, **keep)
    assert resumed.rounds == whole.rounds == 8
    for name, value in whole.variational.eta.items():
        assert torch.equal(resumed.variational.eta[name], value)
    for silo in whole.local:
        for site, draws in whole.local[silo].sample(3).items():
            assert torch.equal(resumed.local[silo].sample(3)[site], draws)


def test_from_a_configuration_table() -> None:
    table = {"iterations": 10, "warm_start": {"rounds": 3, "local_steps": 50}}
    algorithm = build(sf.SFVI, table, "algorithm")
    assert algorithm == sf.SFVI(iterations=10, warm_start=sf.WarmStart(3, 50))
    assert build(sf.SFVI, resolved(algorithm), "algorithm") == algorithm
    with pytest.raises(InputError, match=r"algorithm.warm_start must be a table"):
        build(sf.SFVI, {"warm_start": 3}, "algorithm")


# ---- privacy ----


def _private(iterations: int = 5) -> sf.SFVI:
    warm = sf.WarmStart(2, 20, weights="equal", total_records=60)
    return sf.SFVI(iterations=iterations, family="diagonal", warm_start=warm)


@pytest.mark.parametrize("noise", ["silo", "distributed"])
def test_one_epsilon_covers_both_algorithms(noise: Any) -> None:
    """All releases of both phases, retries included, cost at most the epsilon asked for, and not much less."""
    problem = make_intercepts()
    privacy = sf.SiloDP(epsilon=20.0, noise=noise, retries=3)
    server, _, _ = build_parties(
        problem.model, problem.silos, _private(), sf.Masked(), compile=False, privacy=privacy, noise_key=b"n" * 32
    )
    terms = server.program.terms
    assert {phase: t.rounds for phase, t in terms.items()} == {ROUND_PHASE: 5, MERGE: 2}
    assert len({(t.noise_multiplier, t.resolution) for t in terms.values()}) == 1
    cost = epsilon(Composed(tuple(t.job for t in terms.values())), privacy.delta, "rdp")
    assert 0.95 * 20 < cost <= 20.0
    for phase, table in server.program.tables.items():
        assert table.size == sum(terms[phase].extent)


@pytest.mark.later
def test_both_phases_are_charged(tmp_path: Path) -> None:
    """The ledger holds a term a phase; a run spends the rounds of each."""
    problem = make_intercepts()
    privacy = sf.SiloDP(noise_multiplier=0.5, noise="silo", retries=1)
    books = Books(tmp_path / "ledger.sqlite", block=1)
    assert books.path is not None
    result = sf.fit(
        problem.model, problem.silos, _private(), sf.Masked(), privacy, compile=False, noise_key=b"n" * 32, books=books
    )
    assert result.rounds == 7
    assert result.privacy is not None
    assert result.privacy["releases"] == 5 + 1 + 2 + 1
    ledger = Ledger.open(books.path, "silo-1")
    assert ledger.chain.jobs["job"].released == {ROUND_PHASE: 5, MERGE: 2}
    ledger.close()


def test_sfvi_is_asked_as_often_as_the_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many draws a round of the warm start sets aside: those of SFVI lie above them all. The control counts
    SFVI's questions as if they set as many aside, as was shipped: of very many local steps a job ended halfway."""
    problem, answer = make_intercepts(), SFVIWarmProgram.answer
    monkeypatch.setattr(sfvi_warm, "OWN_DRAWS", 3 * sfvi_warm.averaging(_warm(1, 2, 6)).keys_a_round)

    def counted(self: Any, message: Any, local: Any, view: Any) -> Any:
        if view.turn > self._last_turn:
            raise ProtocolError(f"question {view.turn} of a warm start is past the last")
        return answer(self, message, local, view)

    for shipped in (False, True):
        if shipped:
            monkeypatch.setattr(SFVIWarmProgram, "answer", counted)
        with pytest.raises(ProtocolError, match="past the last") if shipped else nullcontext():
            assert sf.fit(problem.model, problem.silos, _warm(1, 2, 6), sf.Plain(), compile=False).rounds == 7


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warm_start": sf.WarmStart(1), "family": "low_rank"}, "has no barycenter"),
        ({"warm_start": sf.WarmStart(1), "optimizer": "nadam"}, "choose one of adam"),
        ({"warm_start": sf.WarmStart(1, 0)}, "local_steps must be a whole number"),
    ],
)
def test_what_sfvi_avg_refuses_is_no_warm_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sf.SFVI(**options)


def test_bad_rounds_and_record_privacy_are_refused() -> None:
    with pytest.raises(InputError, match="rounds must be a whole number of at least 0"):
        sf.WarmStart(-1)
    problem = make_intercepts()
    with pytest.raises(InputError, match="takes no record privacy"):
        sf.fit(problem.model, problem.silos, _warm(), privacy=sf.RecordDP(epsilon=1.0))
