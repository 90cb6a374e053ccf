"""A silo's size and mix: given away by plain contributions, by masked ones no more than by totals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from programs import make_intercepts

import secure_fvi as sf
from secure_fvi.audits.base import AuditRow
from secure_fvi.audits.latent_studies import Guesses, Sample, draw, property_rows
from secure_fvi.audits.worlds import MASKED, PLAIN, LateStart, Workbench, per_record, resampled
from secure_fvi.errors import InputError


def by_name(found: list[AuditRow]) -> dict[tuple[str, str, str], AuditRow]:
    return {(row.protection, row.attack.split()[0], row.attack.split(": ")[1]): row for row in found}


def test_drawn_silos_differ_in_size_and_mix() -> None:
    pool = {"y": torch.arange(100.0), "x": torch.randn(100, 2)}
    silos = draw(pool, 200, 40, "y", 1)
    sizes = np.array([len(s["y"]) for s in silos])
    shares = np.array([float((s["y"] > 49.5).double().mean()) for s in silos])
    assert sizes.min() >= 20
    assert sizes.max() <= 60
    assert abs(sizes.mean() - 40) < 3  # sd of the mean 0.8
    assert shares.std() > 0.18  # 0.23 of the drawn shares alone
    assert abs(np.corrcoef(sizes, shares)[0, 1]) < 0.25
    assert torch.equal(draw(pool, 3, 40, "y", 1)[2]["x"], silos[2]["x"])
    mostly = draw({"y": torch.cat([torch.ones(90), torch.zeros(10)])}, 50, 40, "y", 2)  # the median is the largest
    assert np.std([float(per_record(s["y"]).mean()) for s in mostly]) > 0.1
    with pytest.raises(InputError, match="same for all records"):
        draw({"y": torch.ones(5)}, 3, 40, "y", 2)


def test_guesses_of_a_known_dependence() -> None:
    """Three silos a world; messages tell the target with noise of 1/3 of its sd (R^2 .9), totals the world's mean."""
    rng = np.random.default_rng(0)
    target = rng.standard_normal((80, 3))
    messages = (target + rng.standard_normal(target.shape) / 3).reshape(-1, 1)
    totals = np.repeat(target.mean(1), 3)[:, None]
    seen = Sample(messages, totals, target.reshape(-1, 1), (), np.repeat(np.arange(80), 3), (0, 1))
    found, nothing = Guesses(seen), Guesses(seen.shuffled())
    assert found.from_both().value == pytest.approx(0.9, abs=0.05)
    assert found.from_totals().value == pytest.approx(1 / 3, abs=0.12)
    assert found.beyond_totals().low > 0.3
    assert found.above_median().low > 0.85
    assert nothing.from_both().low < 0
    assert nothing.above_median().low < 0.5


@pytest.mark.slow
def test_plain_sums_give_size_and_mix_away() -> None:
    """14 worlds of three rounds of a conjugate model."""
    problem = make_intercepts()
    late = LateStart(problem.model, sf.SFVI(), problem.silos, 1, 60, 5)
    bench = Workbench(problem.model, sf.SFVI(), problem.silos, rounds=3, worlds=14, late=late)
    told: list[int] = []
    found = by_name(property_rows(bench, "y", (PLAIN,), lambda: told.append(1)))
    assert len(told) == 28
    assert all(row.valid for row in found.values())
    assert found["plain", "size", "messages and totals"].low > 0.99  # the count itself is in a plain contribution
    assert found["plain", "size", "messages beyond totals"].low > 0.2
    assert found["plain", "mean", "messages and totals"].low > 0.5
    with pytest.raises(InputError, match="no argument 'z'"):
        property_rows(bench, "z")


@pytest.mark.slow
def test_masked_sums_leave_what_totals_tell() -> None:
    """Six cities, 3 x 50 silos of 90 to 269 children. A gain's interval lies above 0 in 2.5% of runs where there is
    none; masks come from the operating system."""
    from secure_fvi.models.six_cities import PROGRAM, load

    bench = Workbench(PROGRAM.model, sf.SFVI(), resampled(load().records, (179,) * 3, 3))
    rows = property_rows(bench, "wheeze", (PLAIN, MASKED))
    for row in rows:
        print(f"{row.attack:<68} {row.protection:<8} {row.value:.3f} [{row.low:.3f}, {row.high:.3f}] {row.finding}")
    found = by_name(rows)
    assert all(row.valid for row in rows)
    for name in ("size", "mean"):
        assert found["plain", name, "messages and totals"].low > 0.7
        assert found["masked", name, "totals alone"].low > 0
        assert found["masked", name, "messages beyond totals"].low < 0.02
