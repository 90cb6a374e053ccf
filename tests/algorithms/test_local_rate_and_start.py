"""`start_spread` and `local_learning_rate` of SFVI and SFVI-Avg."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import secure_fvi as sf
from secure_fvi.errors import InputError
from secure_fvi.fitting import build_parties
from secure_fvi.models.prodlda import load, prodlda
from secure_fvi.randomness import start_draws

COUNTS = load(None, documents=6, words=5, length=9).records["counts"]
SILOS = [{"counts": c} for c in COUNTS.chunk(3)]
LOCAL = sf.Conditional(scale="diagonal", coupling=False)
SHORT: dict[str, Any] = {"sfvi": {"iterations": 1, "average_last": 0.0}, "sfvi-avg": {"rounds": 1, "local_steps": 1}}
ALGORITHMS = {"sfvi": sf.SFVI, "sfvi-avg": sf.SFVIAvg}


def _parties(name: str, **options: Any) -> Any:
    algorithm = ALGORITHMS[name](family="diagonal", local_family=LOCAL, **SHORT[name], **options)
    return build_parties(prodlda(2), SILOS, algorithm, sf.Plain(), 5, compile=False)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_start_is_a_public_draw(name: str) -> None:
    server, _, _ = _parties(name, start_spread=0.5)
    loc = server.program.init().eta["loc"]
    torch.testing.assert_close(loc, 0.5 * start_draws(5, 10))
    server, _, _ = _parties(name)
    assert not server.program.init().eta["loc"].any()


@pytest.mark.parametrize("name", ["sfvi", pytest.param("sfvi-avg", marks=pytest.mark.slow)])
def test_first_steps_have_the_rate_of_their_own(name: str) -> None:
    """Adam's first step has the length of its rate, whatever the gradient."""
    server, engine, _ = _parties(name, learning_rate=0.05, local_learning_rate=0.2)
    while not engine.run(server.round()).finished:
        pass
    local = engine.silo_states(server.state.accepted)["silo-1"].local.record
    starts = {"loc": 0.0, "log_scale": math.log(0.1)}
    moved = [float((local[key][:2] - start).abs().mean()) for key, start in starts.items()]
    assert moved == pytest.approx([0.2, 0.2], rel=1e-3)
    shared = server.program.posterior(server.state.algorithm).eta["loc"]
    assert 0 < float(shared.abs().max()) < 0.0501  # SFVI-Avg's is a mean over silos


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="start_spread must be finite and not negative, not -1"):
        ALGORITHMS[name](start_spread=-1.0)
    with pytest.raises(InputError, match="local_learning_rate must be positive and finite, not 0"):
        ALGORITHMS[name](local_learning_rate=0.0)
