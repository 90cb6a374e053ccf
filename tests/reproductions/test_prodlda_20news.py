"""ProdLDA on 20 Newsgroups: what the rows say, resuming, table and plot on made-up posts; the quick run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from quick_run import is_picture, quick_run

from secure_fvi.models.newsgroups import Corpus
from secure_fvi.models.prodlda import load
from secure_fvi_lab.experiments import Request, prodlda_20news
from secure_fvi_lab.experiments.prodlda_20news import METHODS, QUICK, plot, run, silos_of, table


def _posts(documents: int = 120) -> Corpus:
    counts = load(None, documents=documents, words=30, length=40).records["counts"].float()
    words = tuple(f"word{v}" for v in range(30))
    return Corpus(counts, words, torch.zeros(documents, dtype=torch.int64), torch.arange(documents))


def test_silos_share_all_posts_and_none_twice() -> None:
    posts = _posts(100)
    silos = [silo["counts"] for silo in silos_of(posts, 3)]
    assert [len(counts) for counts in silos] == [34, 34, 32]
    together = torch.cat(silos)
    assert torch.equal(together.unique(dim=0), posts.counts.unique(dim=0))
    assert torch.equal(together.sum(0), posts.counts.sum(0))
    assert not torch.equal(silos[0], silos_of(posts, 4)[0]["counts"])


@pytest.mark.slow
def test_an_experiment_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods on made-up posts; the second call fits nothing, and says the same."""
    monkeypatch.setattr(prodlda_20news, "corpus", lambda *_: _posts())
    plan = QUICK._replace(words=30, topics=5, steps=40, rounds=2, share=0.5, epochs=1)
    said: list[str] = []
    request = Request(True, None, said.append, tmp_path)
    first = run(plan, request)
    assert [row["method"] for row in first["rows"]] == list(METHODS)
    by_method = {row["method"]: row for row in first["rows"]}
    assert len(by_method["silos alone"]["coherence"]) == 3 * 5
    assert by_method["SFVI"]["curve"][-1][0] == by_method["SFVI-Avg"]["curve"][-1][0] == 40
    assert by_method["SFVI-Avg"]["curve"][0][0] == 0  # where the silos began
    assert first["ours"]["mean"] == pytest.approx(statistics.mean(by_method["SFVI"]["coherence"]))
    for name in METHODS:
        monkeypatch.setitem(METHODS, name, lambda *_: pytest.fail("everything is there already"))
    second = run(plan, request)
    assert second["rows"] == json.loads(json.dumps(first["rows"]))
    assert second["ours"] == first["ours"]
    assert "silos alone" in table({**first, "machine": "one"})
    assert is_picture(plot(first))


@pytest.mark.slow
def test_the_quick_run(tmp_path: Path) -> None:
    """Topics of 100 steps are not all alike, and explain more than the words' frequencies do."""
    pytest.importorskip("simplemma")
    content = quick_run("prodlda-20news", "20newsgroups", tmp_path)
    assert content["quick"] is True
    sfvi = next(row for row in content["rows"] if row["method"] == "SFVI")
    assert sfvi["diversity"] > 0.2  # 1/21 where all topics are alike
    assert sfvi["curve"][-1][1] > sfvi["curve"][0][1]
