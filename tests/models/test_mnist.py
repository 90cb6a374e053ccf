"""The loader of MNIST reads IDX files and refuses broken ones by name; predictions of the network."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from secure_fvi.errors import InputError
from secure_fvi.models.bnn import bayesian_network, class_log_probs, score
from secure_fvi.models.mnist import FILES, load, read_idx

IMAGES, LABELS = FILES["train"]


def idx(array: np.ndarray) -> bytes:
    """As the format is published: two zero bytes, type 8, number of dimensions, their sizes, the bytes in C order."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def folder(tmp_path: Path, count: int = 6, zipped: bool = False) -> tuple[Path, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 4, 6), dtype=np.uint8)
    labels = rng.integers(0, 10, count, dtype=np.uint8)
    (tmp_path / "mnist").mkdir()
    for name, array in ((IMAGES, images), (LABELS, labels)):
        content = idx(array)
        path = tmp_path / "mnist" / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content) if zipped else content)
    return tmp_path, images, labels


@pytest.mark.parametrize("zipped", [False, True])
def test_images_and_labels_are_read(tmp_path: Path, zipped: bool) -> None:
    where, images, labels = folder(tmp_path, zipped=zipped)
    data = load(where)
    assert data.records["x"].shape == (6, 24)
    assert data.records["x"][2, 8] == pytest.approx(images[2, 1, 2] / 255)
    assert data.records["y"].tolist() == labels.tolist()


def test_pooling_takes_means_of_squares(tmp_path: Path) -> None:
    where, images, _ = folder(tmp_path)
    x = load(where, pool=2).records["x"]
    assert x.shape == (6, 6)
    assert x[1, 4] == pytest.approx(images[1, 2:4, 2:4].mean() / 255)


def test_a_subset_is_seeded_and_keeps_its_ids(tmp_path: Path) -> None:
    where, _, _ = folder(tmp_path, count=40)
    whole, some, other = load(where), load(where, count=10, seed=3), load(where, count=10, seed=4)
    assert torch.equal(some.record_ids, load(where, count=10, seed=3).record_ids)
    assert not torch.equal(some.record_ids, other.record_ids)
    assert torch.equal(some.records["x"], whole.records["x"][some.record_ids])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: content[:-5], "truncated, 139 bytes for 6 x 4 x 6 numbers"),
        (lambda content: content + b"\0", "too long, 145 bytes"),
        (lambda content: content[:9], "truncated, 9 bytes where the header alone has 16"),
        (lambda content: b"\0\0\x0d\x03" + content[4:], "begins with 0x00000d03; .* begins with 0x00000803"),
        (lambda content: idx(np.zeros((5, 4, 6), np.uint8)), "5 images and 6 labels"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, damage: object, why: str) -> None:
    where, _, _ = folder(tmp_path)
    path = where / "mnist" / IMAGES
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(InputError, match=why):
        load(where)


def test_a_broken_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    for content in (b"no gzip", gzip.compress(idx(np.zeros(1000, np.uint8)))[:-12]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"labels\.gz: not a whole gzip file"):
            read_idx(path, 1)


def test_wrong_labels_and_options_are_refused(tmp_path: Path) -> None:
    where, _, labels = folder(tmp_path)
    for options, why in (
        ({"split": "half"}, "split = 'half'"),
        ({"count": 7}, "count = 7: must be a whole number from 1 to 6"),
        ({"pool": 4}, "pool = 4: must divide the 4 x 6"),
    ):
        with pytest.raises(InputError, match=why):
            load(where, **options)  # type: ignore[arg-type]
    (where / "mnist" / LABELS).write_bytes(idx(labels + 10))
    with pytest.raises(InputError, match="digits go up to 9"):
        load(where)
    (where / "mnist" / LABELS).unlink()
    with pytest.raises(InputError, match=f"no file '{LABELS}' or '{LABELS}.gz'"):
        load(where)


def test_the_published_files() -> None:
    data = os.environ.get("SECURE_FVI_DATA")
    if not data or not (Path(data) / "mnist").is_dir():
        pytest.skip("SECURE_FVI_DATA holds no mnist")
    train, test = load(Path(data), pool=2), load(Path(data), "test", count=1000)
    assert train.records["x"].shape == (60_000, 196)
    assert test.records["x"].shape == (1000, 784)
    assert torch.bincount(train.records["y"]).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert train.records["y"][:5].tolist() == [5, 0, 4, 1, 9]
    assert float(train.records["x"].mean()) == pytest.approx(0.1307, abs=1e-4)  # the published mean intensity


def test_predictive_probabilities_are_means_over_draws() -> None:
    """Two draws that are sure of different classes: each class has probability 1/2."""
    draws = {
        "hidden_weights": torch.zeros(2, 3, 1),
        "hidden_bias": torch.ones(2, 1),
        "output_weights": torch.tensor([[[50.0, 0.0]], [[0.0, 50.0]]]),
        "output_bias": torch.zeros(2, 2),
    }
    log_probs = class_log_probs(draws, torch.ones(5, 3))
    torch.testing.assert_close(log_probs.exp(), torch.full((5, 2), 0.5))
    found = score(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]).log(), torch.tensor([0, 1, 1]))
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.log_likelihood == pytest.approx(float(torch.tensor([0.9, 0.8, 0.4]).log().mean()))


def test_network_options_are_checked() -> None:
    with pytest.raises(InputError, match="hidden must be"):
        bayesian_network(hidden=0)
    with pytest.raises(InputError, match="scale must be positive"):
        bayesian_network(scale=-1.0)
