"""Replaying the protocol: the truth gives exactly what was seen, and the search finds the latents of individuals."""

from __future__ import annotations

import functools

import pytest
import torch
from programs import make_clinics, make_intercepts

import secure_fvi as sf
from secure_fvi.audits.replay import Replayer, Search, replay_rows
from secure_fvi.audits.worlds import MASKED, PLAIN, LateStart, Workbench, resampled
from secure_fvi.errors import InputError
from secure_fvi.fitting import build_parties
from secure_fvi.models.six_cities import PROGRAM, load
from secure_fvi.models.tabular import MODEL as LOGISTIC


@functools.cache
def bench() -> Workbench:
    problem = make_intercepts()
    late = LateStart(problem.model, sf.SFVI(), problem.silos, 1, 50, 10)
    return Workbench(problem.model, sf.SFVI(), problem.silos, rounds=5, worlds=10, late=late)


@pytest.mark.parametrize("records", [1, 3])
@pytest.mark.later("1")
def test_the_truth_gives_what_was_seen(records: int) -> None:
    """Records, start and draws of the silos put in place of guesses: the replayed messages are the recorded ones."""
    where = bench()
    drawn = resampled(where.pool, [records] * 4, 8)
    transcript = where.laboratory(PLAIN, 4).run(drawn, 8).transcript
    server, engine, _ = build_parties(where.model, drawn, where.algorithm, sf.Plain(), 8)
    where.late.apply(server, list(engine.silos.values()))
    silos = [engine.silos[name] for name in transcript.silos]
    replayer = Replayer(where, records)
    low, high = where.pool["y"].min(0).values, where.pool["y"].max(0).values
    rows = torch.cat([silo.view.rows["y"][:records] for silo in silos])
    begun = {n: torch.cat([silo.local.record[n][:records] for silo in silos]) for n in silos[0].local.record}
    draws = [torch.cat([s.view.record_draws.normals(t, 1)[:records] for s in silos])[None] for t in range(5)]
    free = {"data/y": torch.logit((rows - low) / (high - low), 1e-12), **replayer.start_of(begun)}
    free["eps/draws"] = torch.stack(draws)
    assert replayer.error(transcript, free).max() < 1e-12
    free["eps/draws"] = -free["eps/draws"]
    assert replayer.error(transcript, free).min() > 1e-3


@pytest.mark.slow
def test_individuals_are_found() -> None:
    """12 silos of one child, five rounds that begin at a fit to 60."""
    silos = resampled(load().records, (20,) * 3, 1)
    late = LateStart(PROGRAM.model, sf.SFVI(), silos, 1, 100, 10)
    told: list[int] = []
    where = Workbench(PROGRAM.model, sf.SFVI(), silos, rounds=5, worlds=10, late=late)
    latents, _, answers = replay_rows(where, 12, search=Search(8, 120), each=lambda: told.append(1))
    assert len(told) == 120
    for row in (latents, answers):
        assert row.valid
        assert row.low > 0.7
        assert row.negative_control < 0
    assert set(latents.detail) >= {"ridge", "median_loss"}


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [12, 30])
def test_six_cities(rounds: int) -> None:
    """40 children, a silo each, late in a run."""
    silos = resampled(load().records, (179,) * 3, 3)
    rows = replay_rows(Workbench(PROGRAM.model, sf.SFVI(), silos, rounds=rounds, worlds=5))
    for row in rows:
        print(f"{row.attack:<70} {row.value:.3f} [{row.low:.3f}, {row.high:.3f}] {row.detail.get('ridge')}")
    assert all(row.valid for row in rows)
    assert rows[0].low > 0.7
    assert rows[0].value > rows[0].detail["ridge"][0]


def test_bad_input() -> None:
    where = bench()
    masked = where.laboratory(MASKED, 3).run(resampled(where.pool, [1] * 3, 1), 1).transcript
    with pytest.raises(InputError, match="no silo's own contribution"):
        Replayer(where).find(masked, Search(1, 1))
    with pytest.raises(InputError, match="at least 10"):
        replay_rows(where, 5)
    clinics = make_clinics()
    with pytest.raises(InputError, match="latents of records"):
        Replayer(Workbench(clinics.model, sf.SFVI(), clinics.silos))
    with pytest.raises(InputError, match="not of 'sfvi-avg'"):
        Replayer(Workbench(where.model, sf.SFVIAvg(), where.silos))
    plain = {"x": torch.randn(9, 2), "y": torch.ones(9)}
    with pytest.raises(InputError, match="latents of records"):
        Replayer(Workbench(LOGISTIC, sf.SFVI(), resampled(plain, (3, 3, 3), 0)))
