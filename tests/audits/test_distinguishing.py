"""The game on one record: won in clear, never beyond the bound under privacy, lost on coins that were tossed again."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from programs import make_intercepts

import secure_fvi as sf
from secure_fvi.audits.features import from_both, from_totals
from secure_fvi.audits.latent_studies import Game, bound, game_rows, guess, play
from secure_fvi.audits.worlds import Laboratory
from secure_fvi.errors import InputError

LOOKS = {"messages and totals": from_both, "totals alone": from_totals}


def game() -> Game:
    silos = tuple({"y": s["y"][:7]} for s in make_intercepts().silos)
    return Game(silos, 1, 3, ({"y": torch.full((1, 3), -2.0)}, {"y": torch.full((1, 3), 3.0)}))


def test_worlds_differ_in_the_record_alone() -> None:
    first, second = game().world(0), game().world(1)
    assert [int((a["y"] != b["y"]).any(1).sum()) for a, b in zip(first, second, strict=True)] == [0, 1, 0]
    assert torch.equal(second[1]["y"][3], torch.full((3,), 3.0))
    assert torch.equal(game().silos[1]["y"], game().silos[1]["y"])


def test_the_bound_under_privacy() -> None:
    """Pure epsilon: (e^2eps - 1) / (e^2eps + 1) = tanh(eps). It is met by randomised response, twice."""
    assert bound(0.7, 0.0) == pytest.approx(math.tanh(0.7))
    assert bound(1.0, 1e-5) > bound(1.0, 0.0)
    assert bound(1000.0, 1e-5) == 1.0
    assert bound(0.0, 0.0) == 0.0


def test_the_game_is_won_in_clear_and_lost_on_other_coins() -> None:
    """28 guesses, 23 or more of which are right by luck with probability 5e-4. The negative control has a false-alarm
    rate of 0.1%; seeds are fixed."""
    laboratory = Laboratory(make_intercepts().model, sf.SFVI(iterations=5), sf.Plain(), worlds=1, simulated=True)
    plays = play(laboratory, game(), range(56), LOOKS)
    found = game_rows("plain", plays, plays)
    assert [row.attack.split(": ")[1] for row in found] == list(LOOKS)
    assert found[0].valid
    assert found[0].value > 0.8
    assert found[0].detail["auc"][0] > 0.9
    assert found[0].detail["positive_control"]["power"] > 0.99
    assert found[0].detail["trials"] == 28
    assert guess(plays.shuffled(), "totals alone").advantage(0.999).low < 0
    coins = plays.coins
    assert 0.2 < coins.mean() < 0.8
    with pytest.raises(InputError, match="at least 20"):
        play(laboratory, game(), range(3), LOOKS)


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "wins"), [(0.5, False), (500.0, True)])
def test_privacy_keeps_the_advantage_below_its_bound(epsilon: float, wins: bool) -> None:
    """200 guesses: the interval's lower end exceeds a true bound in 2.5% of runs at most; the seeds are fixed. Next to
    no noise is the control."""
    privacy = sf.RecordDP(epsilon=epsilon, delta=1e-5, clipping_norm=5.0, retries=0)
    laboratory = Laboratory(
        make_intercepts().model, sf.SFVI(iterations=5), sf.Masked(), privacy, worlds=100, simulated=True
    )
    found = guess(play(laboratory, game(), range(400), LOOKS), "totals alone").advantage()
    print(f"epsilon {epsilon}: advantage {found}, bound {bound(epsilon, 1e-5):.3f}")
    assert found.low <= bound(epsilon, 1e-5)
    assert (found.low > 0.5) == wins
    assert np.isfinite(found.value)
