"""Attacks on vertical runs: labels from pulls, columns from what is sent, with and without protection."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from scipy.integrate import trapezoid

import secure_fvi as sf
from secure_fvi.algorithms.vertical import Bernoulli, Vertical
from secure_fvi.audits.vertical import LABEL_ATTACKS, World, auc_bound, column_rows, guess_labels, label_rows, record
from secure_fvi.errors import InputError
from secure_fvi.models.vertical_programs import VerticalDataset, linear, make_data

EPSILON, DELTA = 1.0, 1e-5


@functools.lru_cache(maxsize=4)
def _world(kind: str) -> World:
    """A simulated run over three silos with a private response."""
    made, ids = make_data(0, 400, 6), ("bank", "clinic", "insurer")
    silos = {n: {"x": x} for n, x in zip(ids, made.by_silo(3), strict=True)}
    data = VerticalDataset(silos, dict.fromkeys(ids, linear), made.y)
    config = Vertical(response="private", rho=1.0, rounds=60, learning_rate=0.05)
    privacy = sf.RecordDP(epsilon=EPSILON, delta=DELTA, clipping_norm=2.0) if kind == "dp" else None
    sums = sf.Plain() if kind == "plain" else sf.Masked()
    return record(data, Bernoulli(), config, sums, privacy, simulated=True)


def test_a_private_response_is_given_away_without_privacy() -> None:
    """The paper's second setting: masks protect the silos, not the labels. AUC of at least .99 by sign, by cosine."""
    for kind in ("plain", "masked"):
        rows = {row.attack: row for row in label_rows(kind, _world(kind), _world("plain"), None, DELTA)}
        assert set(rows) == {f"labels, {attack}" for attack in LABEL_ATTACKS}
        assert all(row.valid and row.finding == "leaks" for row in rows.values())
        assert rows["labels, sign"].value >= 0.99
        assert rows["labels, cosine"].value >= 0.99


def test_under_privacy_the_labels_stay_below_the_bound() -> None:
    for row in label_rows("DP", _world("dp"), _world("plain"), EPSILON, DELTA):
        assert row.valid
        assert row.value <= row.detail["bound"]
        assert row.value < 0.65


def test_columns() -> None:
    """From a silo's own z_j in a plain sum; under masks from totals alone; under privacy from neither."""
    plain, masked, private = (
        {r.attack: r for r in column_rows(kind, _world(kind), _world("plain"))} for kind in ("plain", "masked", "dp")
    )
    assert plain["columns from messages"].value > 0.9
    assert masked["columns from messages"].finding == "nothing found"
    assert masked["columns from totals"].finding == "leaks"
    assert all(row.finding == "nothing found" and row.valid for row in private.values())


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 1e-3), (4.0, 0.05)])
def test_the_bound_is_the_area_under_the_curve(epsilon: float, delta: float) -> None:
    x = np.linspace(0, 1, 200_001)
    curve = np.minimum(1.0, np.minimum(delta + np.exp(epsilon) * x, 1 - np.exp(-epsilon) * (1 - delta - x)))
    assert auc_bound(epsilon, delta) == pytest.approx(trapezoid(curve, x), abs=1e-5)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="unknown"):
        guess_labels("guess", np.ones((4, 2)), np.array([0.0, 1.0, 0.0, 1.0]))
