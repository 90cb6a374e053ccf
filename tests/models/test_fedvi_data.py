"""Loaders and partitions for FedVI: files as published, bad ones refused, no image dealt twice, the network's sizes."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from secure_fvi.errors import InputError
from secure_fvi.models import cifar100, writers
from secure_fvi.models.fedvi import (
    Network,
    as_dataset,
    embed,
    infer,
    logits,
    pachinko,
    personal_log_probs,
    pooled,
    split_off,
    start,
)
from secure_fvi.runs.config import Partition
from secure_fvi.runs.records import _partitioned

RNG = np.random.default_rng(0)


# ---- CIFAR-100 ----


def _pickle(fine: list[int], coarse: list[int], pixels: bytes) -> bytes:
    """A file of the archive as Python 2 wrote it: protocol 2, byte strings."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def numbers(values: list[int]) -> bytes:
        return b"](" + b"".join(b"K" + bytes([v]) for v in values) + b"e"

    body = short(b"coarse_labels") + numbers(coarse) + short(b"data")
    body += b"T" + len(pixels).to_bytes(4, "little") + pixels + short(b"fine_labels") + numbers(fine)
    return b"\x80\x02}(" + body + b"u."


def _archive(folder: Path, content: bytes) -> Path:
    (folder / "cifar100").mkdir()
    path = folder / "cifar100" / cifar100.ARCHIVE
    with tarfile.open(path, "w:gz") as archive:
        for name in ("train", "test"):
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_the_archive_is_read_without_unpickling(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (3, 3, 32, 32), np.uint8)
    _archive(tmp_path, _pickle([7, 99, 0], [1, 19, 0], images.tobytes()))
    found = cifar100.read_images(tmp_path)
    assert np.array_equal(found.images, np.concatenate([images, images]))
    assert (found.fine.tolist(), found.coarse.tolist()) == ([7, 99, 0] * 2, [1, 19, 0] * 2)


def test_an_archive_that_would_run_code_runs_none(tmp_path: Path) -> None:
    """A reduce opcode that would make a file; the control is a reader that unpickles, by which it does."""
    mark = tmp_path / "ran"
    command = b"cos\nsystem\n(U" + bytes([len(f"touch {mark}")]) + f"touch {mark}".encode() + b"tR."
    _archive(tmp_path, command)
    with pytest.raises(InputError, match="0 fine and 0 coarse labels"):
        cifar100.read_images(tmp_path)
    assert not mark.exists()
    np.load(io.BytesIO(command), allow_pickle=True)
    assert mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_pickle([7], [1], b"\0" * 3071), "3071 bytes of pixels, 1 fine"),
        (_pickle([7, 8], [1], b"\0" * 6144), "2 fine and 1 coarse"),
        (_pickle([100], [1], b"\0" * 3072), "a label outside 0 to 99"),
        (b"not a pickle", "not a file of CIFAR-100"),
    ],
)
def test_bad_archives_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    _archive(tmp_path, content)
    with pytest.raises(InputError, match=message):
        cifar100.read_images(tmp_path)


def test_where_cifar_is_missing_the_address_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cs\.toronto\.edu"):
        cifar100.read_images(tmp_path)
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100" / cifar100.ARCHIVE).write_bytes(b"no archive")
    with pytest.raises(InputError, match="download it again"):
        cifar100.read_images(tmp_path)


def test_the_subset(tmp_path: Path) -> None:
    (tmp_path / "cifar100_subset").mkdir()
    path = tmp_path / "cifar100_subset" / cifar100.SUBSET
    images = RNG.integers(0, 256, (2, 3, 32, 32), np.uint8)
    np.savez(path, images=images, fine_labels=np.array([1, 2], np.uint8), coarse_labels=np.array([3, 4], np.uint8))
    assert np.array_equal(cifar100.read_images(tmp_path).images, images)
    np.savez(path, images=images[0], fine_labels=np.array([1, 2]), coarse_labels=np.array([3, 4]))
    with pytest.raises(InputError, match=r"images must be \(N, 3, 32, 32\)"):
        cifar100.read_images(tmp_path)


# ---- dealing ----


def test_pachinko_deals_no_row_twice_and_few_coarse_labels_to_each() -> None:
    """20 coarse labels of 5 fine ones with 40 rows; Dirichlet(0.1) over 20: most of a client lies in a few of them."""
    fine = np.repeat(np.arange(100), 40)
    coarse = fine // 5
    parts = pachinko(coarse, fine, 20, 50, seed=3)
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == 1000
    largest = np.mean([np.sort(np.bincount(coarse[p], minlength=20))[-3:].sum() / 50 for p in parts])
    assert largest > 0.7  # a uniform deal gives 0.27
    assert all(np.array_equal(a, b) for a, b in zip(parts, pachinko(coarse, fine, 20, 50, seed=3), strict=True))
    everything = pachinko(coarse[:800], fine[:800], 8, 100)  # labels run out on the way
    assert len(np.unique(np.concatenate(everything))) == 800
    with pytest.raises(InputError, match="need 4100; there are 4000"):
        pachinko(coarse, fine, 41, 100)


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
