"""Loaders and partitions for FedVI: files as published, bad ones refused, no image dealt twice, the network's sizes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from secure_fvi.errors import InputError
from secure_fvi.models import writers
from secure_fvi.models.fedvi import (
    Network,
    as_dataset,
    embed,
    infer,
    logits,
    personal_log_probs,
    pooled,
    split_off,
    start,
)
from secure_fvi.runs.config import Partition
from secure_fvi.runs.records import _partitioned

RNG = np.random.default_rng(0)


# ---- dealing ----


def test_partition_by_client() -> None:
    y = torch.arange(6)
    clients = [split_off(torch.zeros(n, 1, 2, 2, dtype=torch.uint8), y[:n], 0.5) for n in (4, 6)]
    dataset = as_dataset(clients, "train")
    ids, silos, _ = _partitioned(dataset, Partition(count=2, by_client=True), 0)
    assert (ids, [len(s["y"]) for s in silos]) == (("silo-1", "silo-2"), [2, 3])
    with pytest.raises(InputError, match="come from 2 clients"):
        _partitioned(dataset, Partition(count=3, by_client=True), 0)
    assert as_dataset(clients, "test").records["y"].tolist() == [2, 3, 3, 4, 5]


def test_pooling() -> None:
    images = np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4)
    assert pooled(images, 2).tolist() == [[[[2, 4], [10, 12]]]]  # 2.5, 4.5, 10.5, 12.5, rounded to even
    with pytest.raises(InputError, match="must divide"):
        pooled(images, 3)


@pytest.mark.slow
def test_habits_conflict() -> None:
    """A nearest-mean classifier of ones takes the ones of writers with the habit for other people's sevens."""
    folder = Path(os.environ.get("SECURE_FVI_DATA", ""))
    if not (folder / "mnist").is_dir():
        pytest.skip("SECURE_FVI_DATA holds no mnist")
    people = writers.write(folder, 60, 50, seed=5)
    assert all(c.x.shape == (40, 1, 14, 14) for c in people)
    assert sum(len(torch.unique(torch.cat([c.x, c.test_x]), dim=0)) for c in people) == 60 * 50
    seven = torch.cat([c.x[c.y == 7] for c in people]).double().mean(0)
    ones = torch.stack([c.x[c.y == 1].double().mean(0) for c in people])
    away = (ones - seven).square().mean((1, 2, 3)).sort().values
    assert float(away[45] / away[15]) > 1.5  # two kinds of ones


# ---- the network ----


def test_appendix_d() -> None:
    """Sizes of the paper's networks, and that q(beta) is near r(beta) at first."""
    network = Network(62, (1, 28, 28), (32, 64))
    shapes = network.shapes()
    assert (network.n_global, network.n_local, network.flat) == (102, 26, 64 * 12 * 12)
    assert shapes["embedding_weight"] == (128, 9216)
    assert shapes["constructor2_weight"] == (2 * 27 * 62, 256)
    assert shapes["head_weight"] == (62, 102)
    assert Network(100, (3, 32, 32), (32, 64, 128, 256, 512)).flat == 512 * 11 * 11
    assert network.beta_scale == pytest.approx((2 / 88) ** 0.5)
    with pytest.raises(InputError, match="leave nothing"):
        Network(10, (1, 4, 4), (8, 8, 8))


def test_the_constructor_is_the_mean_over_records_of_three_layers() -> None:
    """Equations (27) and (28) as written, where the mean follows the last layer."""
    network = writers.network()
    w = {name: v.double() for name, v in start(network).items()}
    h = torch.rand(5, network.features, generator=torch.Generator().manual_seed(0)).double()
    (w0, b0), (w1, b1), (w2, b2) = ((w[f"constructor{k}_weight"].T, w[f"constructor{k}_bias"]) for k in range(3))
    each = ((h[:, : network.n_global] @ w0 + b0).relu() @ w1 + b1).relu() @ w2 + b2
    loc, log_scale = each.mean(0).chunk(2)
    found = infer(network, w, torch.ones(5), h)
    torch.testing.assert_close(found[0], network.loc_share * loc)
    torch.testing.assert_close(found[1], 1e-5 + network.beta_scale * (0.01 * log_scale).exp())


def test_predictions_of_the_network() -> None:
    network = writers.network()
    w, x = (
        {name: v.double() for name, v in start(network).items()},
        torch.randint(256, (6, 1, 14, 14), generator=torch.Generator().manual_seed(0)),
    )
    h = embed(network, w, x)
    present = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    loc, scale = infer(network, w, present, h)
    again, _ = infer(network, w, torch.ones(2), h[:2])
    torch.testing.assert_close(loc, again)  # rows that are not there do not count
    assert float((scale / network.beta_scale - 1).abs().max()) < 0.05
    each = personal_log_probs(network, w, x, x, 3)
    assert each.shape == (3, 6, 10)
    torch.testing.assert_close(each.exp().sum(-1), torch.ones(3, 6))
    zero = torch.zeros(10, network.n_local + 1)
    torch.testing.assert_close(
        logits(network, w, zero, h), h[:, : network.n_global] @ w["head_weight"].T + w["head_bias"]
    )


def test_dropout_keeps_the_mean() -> None:
    network = Network(10, (1, 14, 14), (4,), dropout=(0.5, 0.0))
    w, x = {name: v.double() for name, v in start(network).items()}, torch.full((1, 1, 14, 14), 128)
    rng = torch.Generator().manual_seed(0)
    w["embedding_weight"], w["embedding_bias"] = w["embedding_weight"].abs(), torch.ones(128)
    dropped = embed(network, w, x.expand(400, -1, -1, -1), torch.rand(400, network.flat, generator=rng))
    torch.testing.assert_close(dropped.mean(0), embed(network, w, x)[0], rtol=0.1, atol=0.05)
    assert not torch.equal(dropped[0], dropped[1])
