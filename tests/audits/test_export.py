"""Rows as other auditors keep an attack's result: files of the form that LeakPro and Privacy Meter read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from secure_fvi.audits.base import AuditRow, Control, Estimate, Scored, judge
from secure_fvi.audits.report import export, write
from secure_fvi.audits.scores import auc


class LeakPro(BaseModel):
    """The fields of LeakPro's MIAResultSchema and their types."""

    model_config = ConfigDict(extra="forbid", strict=True)
    result_name: str
    result_type: str
    id: str
    tpr: list[float]
    fpr: list[float]
    roc_auc: float
    accuracy: list[float]
    fixed_fpr: dict[str, float]
    signal_values: list[float]
    true_labels: list[int]
    config: dict[str, object]
    tp: list[int]
    fp: list[int]
    tn: list[int]
    fn: list[int]


#: Of Privacy Meter's attack_result_K.npz, and of what its `compute_attack_results` returns.
PRIVACY_METER = {"fpr", "tpr", "auc", "one_fpr", "one_tenth_fpr", "zero_fpr", "scores", "memberships"}


def row(name: str, scored: Scored | None) -> AuditRow:
    found = Estimate(0.6, 0.55, 0.65)
    return judge(name, "DP 1", "AUC", found, Control(found, "all"), Control(Estimate(0.5, 0.4, 0.6), "none"), 0.5,
                 scored=scored)  # fmt: skip


@pytest.fixture
def scored() -> Scored:
    rng = np.random.default_rng(1)
    truth = (np.arange(500) % 2).astype(float)
    return Scored(truth, np.round(rng.standard_normal(500) + truth, 1))  # with ties


def test_the_files_have_the_fields_of_others(tmp_path: Path, scored: Scored) -> None:
    about = {"model": "made", "seed": 1}
    assert export([row("members by LiRA: q", scored), row("R^2 of a mean", None)], about, tmp_path) == 1
    (path,) = (tmp_path / "leakpro").iterdir()
    found = LeakPro.model_validate_json(path.read_text())
    assert (path.stem, found.result_type) == (found.id, "MIAResult")
    assert found.config["about"] == about
    assert found.fixed_fpr.keys() == {"TPR@0%FPR", "TPR@0.01%FPR", "TPR@0.1%FPR", "TPR@1%FPR", "TPR@10%FPR"}
    (path,) = (tmp_path / "privacy_meter").iterdir()
    assert path.name == "attack_result_0.npz"
    with np.load(path, allow_pickle=False) as arrays:
        assert set(arrays) == PRIVACY_METER
        assert (arrays["fpr"].tolist(), arrays["tpr"].tolist()) == (found.fpr, found.tpr)
        assert (float(arrays["auc"]), float(arrays["one_fpr"])) == (found.roc_auc, found.fixed_fpr["TPR@1%FPR"])
        assert arrays["memberships"].dtype == bool
        assert (arrays["memberships"] == scored.truth).all()
        assert (arrays["scores"] == scored.scores).all()


def test_the_curve_is_that_of_the_scores(tmp_path: Path, scored: Scored) -> None:
    """Each point is that of a threshold, counted anew; the area under it is that of the row's own AUC."""
    export([row("members", scored)], {}, tmp_path)
    (path,) = (tmp_path / "leakpro").iterdir()
    found = LeakPro.model_validate_json(path.read_text())
    truth, scores = scored
    assert found.roc_auc == pytest.approx(auc(truth, scores, truth).value, rel=1e-12)
    thresholds = [np.inf, *np.unique(scores)[::-1]]
    called = [scores >= t for t in thresholds]
    assert found.tp == [int((c & (truth == 1)).sum()) for c in called]
    assert found.fp == [int((c & (truth == 0)).sum()) for c in called]
    assert found.accuracy == pytest.approx([(c == (truth == 1)).mean() for c in called])
    assert np.add(found.tp, found.fn).tolist() == np.add(found.fp, found.tn).tolist() == [250] * len(thresholds)
    assert (found.tpr[-1], found.fpr[-1]) == (1.0, 1.0)


def test_an_audits_own_files_have_no_single_scores(tmp_path: Path, scored: Scored) -> None:
    """They are of single records: who exports them asks for it."""
    write([row("members", scored)], {}, tmp_path)
    (kept,) = json.loads((tmp_path / "audit.json").read_text())["rows"]
    assert "scored" not in kept
    assert {p.name for p in tmp_path.iterdir()} == {"audit.json", "audit.html"}
