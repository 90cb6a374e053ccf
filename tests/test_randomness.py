"""Keyed draws: a function of key, id and round; standard normal; unknown without the key."""

from __future__ import annotations

import numpy as np
import torch

from secure_fvi.randomness import KeyedDraws, server_draws

SECRET = b"s" * 32


def test_draws_belong_to_ids_and_rounds() -> None:
    together = KeyedDraws(SECRET, b"records", np.array([4, 9, 2]))
    alone = KeyedDraws(SECRET, b"records", np.array([9]))
    for round_ in (0, 1, 63, 64, 1000):
        assert torch.equal(together.normals(round_, 5)[1], alone.normals(round_, 5)[0])
    assert torch.equal(together.normals(7, 5, np.array([2, 0])), together.normals(7, 5)[[2, 0]])


def test_rounds_may_come_in_any_order() -> None:
    draws = KeyedDraws(SECRET, b"records", np.array([1, 2]))
    forward = [draws.normals(r, 3).clone() for r in range(200)]
    again = KeyedDraws(SECRET, b"records", np.array([1, 2]))
    for round_ in (150, 3, 199, 0):
        assert torch.equal(again.normals(round_, 3), forward[round_])


def test_other_key_purpose_id_or_round_gives_other_draws() -> None:
    base = KeyedDraws(SECRET, b"records", np.array([1])).normals(0, 8)
    others = [
        KeyedDraws(b"t" * 32, b"records", np.array([1])).normals(0, 8),
        KeyedDraws(SECRET, b"batches", np.array([1])).normals(0, 8),
        KeyedDraws(SECRET, b"records", np.array([2])).normals(0, 8),
        KeyedDraws(SECRET, b"records", np.array([1])).normals(1, 8),
    ]
    assert all((base != other).all() for other in others)


def test_normals_are_standard() -> None:
    """Kolmogorov-Smirnov on 200,000 draws: the 1e-6 quantile of sqrt(n) D is 2.69; the seed is fixed."""
    draws = KeyedDraws(SECRET, b"records", np.arange(1000)).normals(0, 200).flatten().sort().values
    n = len(draws)
    distance = (torch.special.ndtr(draws) - torch.arange(1, n + 1) / n).abs().max()
    assert distance * np.sqrt(n) < 2.69


def test_server_draws_follow_from_the_seed() -> None:
    assert torch.equal(server_draws(3).normals(9, 4), server_draws(3).normals(9, 4))
    assert not torch.equal(server_draws(3).normals(9, 4), server_draws(-3).normals(9, 4))


def test_repr_shows_no_key() -> None:
    assert repr(KeyedDraws(SECRET, b"records", np.array([1, 2]))) == "KeyedDraws(2 ids)"
