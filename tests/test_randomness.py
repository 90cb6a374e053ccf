"""Keyed draws: a function of key, id and round; standard normal; unknown without the key."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from secure_fvi.errors import ProtocolError
from secure_fvi.randomness import LARGEST, KeyedDraws, server_draws

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


@pytest.mark.parametrize("number", [-1, LARGEST, LARGEST + 7, 2**40])
def test_numbers_that_do_not_fit_are_refused(number: int) -> None:
    """Cut to 32 bits, 7 + 2^32 would meet the draws of 7. The control: the largest that fits has draws of its own."""
    draws = KeyedDraws(SECRET, b"records", np.array([1, 2]))
    for draw in (draws.normals, draws.uniforms):
        with pytest.raises(ProtocolError, match="past the last"):
            draw(number, 3)
    with pytest.raises(ProtocolError, match="past the last"):
        draws.stratified(number, 3, 4)
    assert not torch.equal(draws.normals(LARGEST - 1, 3), draws.normals(0, 3))


def test_no_two_draws_meet_in_one_block() -> None:
    """What enters the cipher is different for different ids, numbers and positions, and so is what leaves it."""
    ids = np.array([-2, -1, 0, 1, 2**62])
    draws = KeyedDraws(SECRET, b"records", ids)
    numbers = (0, 1, 2**16, 2**31, LARGEST - 1)
    seen = np.concatenate([draws.uniforms(n, 6).ravel() for n in numbers])
    assert len(np.unique(seen)) == len(ids) * len(numbers) * 6


def test_repr_shows_no_key() -> None:
    assert repr(KeyedDraws(SECRET, b"records", np.array([1, 2]))) == "KeyedDraws(2 ids)"
