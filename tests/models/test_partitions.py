"""Splits over silos: the paper's table, no row twice, the same call the same split, refusals; and the credit data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset
from secure_fvi.models.uci_credit import feature_names, load
from secure_fvi_lab.experiments.partitions import PAPER_SPLITS, label_shards, size_and_label, take

# Adult as in the paper's Table 2: 39,074 rows, .24 positive; credit 520 rows, .55.
ADULT = (torch.arange(39_074) < round(0.2398 * 39_074)).double()
CREDIT = (torch.arange(522) < round(0.55 * 522)).double()


@pytest.mark.parametrize(
    ("name", "split", "labels", "small", "share", "large", "large_share"),
    [
        ("adult", "A", ADULT, 3907, 0.240, 3907, 0.240),
        ("adult", "B", ADULT, 1172, 0.959, 6642, 0.111),
        ("credit", "A", CREDIT, 52, 0.550, 52, 0.550),
        ("credit", "B", CREDIT, 36, 0.944, 67, 0.337),
    ],
)
def test_sizes_and_shares_of_the_papers_table(
    name: str, split: str, labels: torch.Tensor, small: int, share: float, large: int, large_share: float
) -> None:
    beta, kappa = PAPER_SPLITS[name, split]
    parts = size_and_label(labels, 10, beta, kappa, seed=3)
    together = torch.cat(parts)
    assert len(together.unique()) == len(together) <= len(labels)
    assert [len(p) for p in parts] == [small] * 5 + [large] * 5
    assert all(abs(float(labels[p].mean()) - share) < 0.012 for p in parts[:5])
    assert abs(float(torch.cat([labels[p] for p in parts[5:]]).mean()) - large_share) < 0.012


def test_the_seed_is_the_split() -> None:
    first, again, other = (size_and_label(ADULT, 10, 0.7, -3.0, seed=s) for s in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_shards_hold_few_labels() -> None:
    labels = torch.arange(10).repeat(600)
    parts = label_shards(labels, 100, 2)
    assert all(len(labels[p].unique()) <= 2 for p in parts)
    assert sorted(torch.cat(parts).tolist()) == list(range(6000))


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(InputError, match="even number of silos"):
        size_and_label(ADULT, 3, 0.0, 0.0)
    with pytest.raises(InputError, match="positive labels"):
        size_and_label(ADULT, 10, 0.0, -4.0)
    with pytest.raises(InputError, match="cannot be cut"):
        label_shards(torch.arange(3), 2, 2)


def test_taking_keeps_ids() -> None:
    data = Dataset({"y": torch.arange(6.0)}, torch.arange(10, 16))
    silos, ids = take(data, [torch.tensor([0, 5]), torch.tensor([3])])
    assert silos[0]["y"].tolist() == [0.0, 5.0]
    assert ids[1].tolist() == [13]


def _write(folder: Path, text: str) -> Path:
    (folder / "uci_credit_approval").mkdir()
    (folder / "uci_credit_approval" / "crx.data").write_text(text)
    return folder


def test_credit_features_have_fixed_units(tmp_path: Path) -> None:
    rows = "b,42,10,u,g,w,v,0,t,t,0,f,g,?,0,+\n?,?,5,y,p,aa,h,1.71,f,f,1,t,s,0,20,-\n"
    data = load(_write(tmp_path, rows))
    x = {name: data.records["x"][:, i].tolist() for i, name in enumerate(feature_names())}
    assert data.records["y"].tolist() == [1.0, 0.0]
    assert x["intercept"] == [1.0, 1.0]
    assert x["A2"] == [1.0, 0.0]
    assert x["A2=?"] == [0.0, 1.0]
    assert x["A1=?"] == [0.0, 1.0]
    assert x["A3"] == [1.0, 0.0]
    assert x["A6=aa"] == [0.0, 1.0]
    assert x["A14=?"] == [1.0, 0.0]


@pytest.mark.parametrize("text", ["a,b\n", "b,x,10,u,g,w,v,0,t,t,0,f,g,1,0,+\n", ""])
def test_malformed_credit_files_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError):
        load(_write(tmp_path, text))


def test_the_whole_file_where_it_is_there() -> None:
    folder = os.environ.get("SECURE_FVI_DATA")
    if not folder or not (Path(folder) / "uci_credit_approval").is_dir():
        pytest.skip("SECURE_FVI_DATA holds no uci_credit_approval")
    data = load(Path(folder))
    assert data.records["x"].shape == (690, 63)
    assert int(data.records["y"].sum()) == 307
