"""Newton's steps of PVI's local fits: by many draws of q, as far as they may go, and until they go nowhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import make_intercepts
from pvi_world import REGRESSION, World, build, make_regression
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms import local_fit
from secure_fvi.algorithms.local_fit import (
    Families,
    NewtonSteps,
    SiloFit,
    StepBlock,
    _balanced,
    _pairs,
    at_rest,
    settled,
)
from secure_fvi.algorithms.natural import Natural
from secure_fvi.fitting import build_parties

_N = 3


def _fit(**options: Any) -> SiloFit:
    """Of a regression with 3 weights."""
    world = build(REGRESSION, make_regression((5,))[0], sf.PVI(rounds=1, **options))
    fit: Any = world.engine.silos["silo-1"].program.fit  # type: ignore[attr-defined]
    assert isinstance(fit, SiloFit)
    return fit


def _stepped(slope: Callable[[Tensor], Tensor], count: int, q: Natural, tight: bool = True) -> dict[str, Tensor]:
    """q after so many steps against a target whose gradient is `slope` of draws (S, n)."""
    fit, rng = _fit(), torch.Generator().manual_seed(0)
    assert fit.block is not None
    steps = fit.block.steps
    assert isinstance(steps, NewtonSteps)
    state = steps.init(q, tight)
    for _ in range(count):
        eps = _pairs(_balanced(torch.randn(16, _N, generator=rng, dtype=torch.float64))).to(state["loc"])
        z = state["loc"] + eps @ state["factor"].mT
        state = steps.step(state, eps, slope(z), torch.ones(()).to(z))
    return state


_AT_ZERO = Natural(torch.zeros(_N).double(), torch.eye(_N).double())


def test_of_a_normal_target_a_step_is_exact() -> None:
    """From a q that is near enough for one step: a precision of at most 16 times q's."""
    root = torch.tensor([[1.0, 0.0, 0.0], [0.4, 1.2, 0.0], [-0.3, 0.3, 1.5]]).double()
    precision, mean = root @ root.mT, torch.tensor([0.3, -0.2, 0.4]).double()
    state = _stepped(lambda z: (mean.to(z) - z) @ precision.to(z), 1, _AT_ZERO, tight=False)
    torch.testing.assert_close(state["loc"].double(), mean, rtol=1e-5, atol=1e-6)
    covariance = (state["factor"] @ state["factor"].mT).double()
    torch.testing.assert_close(covariance, torch.linalg.inv(precision), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("mean", "sd"), [(1e4, 1.0), (-3e3, 0.01), (0.5, 200.0)])
def test_however_far_and_narrow_it_takes_some_steps(mean: float, sd: float) -> None:
    """A first fit on raw scales; steps of half an sd, as one draw takes them, would be 20,000 and more."""
    state = _stepped(lambda z: (mean - z) / sd**2, 40, _AT_ZERO)
    assert float((state["loc"] - mean).abs().max()) < 1e-2 * sd
    assert state["factor"].norm(dim=1).double().tolist() == pytest.approx([sd] * _N, rel=1e-3)


def test_where_the_target_is_not_finite_a_step_is_taken_back() -> None:
    """Past 3 there is nothing: the mean of a target that would draw q there stays below."""
    state = _stepped(lambda z: torch.where((z > 3).any(1, keepdim=True), torch.nan, 2.5 - z) / 0.04, 40, _AT_ZERO)
    assert bool((state["loc"] < 3).all())
    assert float((state["loc"] - 2.5).abs().max()) < 0.5


def test_a_way_that_noise_explains_has_settled_and_a_drift_has_not() -> None:
    """Of 200 of each: a drift of half an sd of the noise a step is seen in most windows, noise alone taken for one in
    few. Randomness is fixed."""
    rng, settle = torch.Generator().manual_seed(1), [0, 0]
    for drift in (0, 1):
        for _ in range(200):
            noise = torch.randn(10, 2, generator=rng)
            loc = noise + drift * torch.arange(10.0)[:, None]
            rows = torch.cat([loc, torch.ones(10, 2), torch.zeros(10, 1)], 1)
            settle[drift] += settled(list(rows))
    assert settle[0] > 180
    assert settle[1] < 20
    assert not settled(list(torch.zeros(9, 5)))


@pytest.mark.later
def test_a_fit_ends_when_it_has_settled_and_not_before() -> None:
    """Of a normal target once two steps by other draws have moved nothing, with the same q as after more; else after
    some tens of steps; by one draw each it takes all that it may."""
    taken, ended = [], []

    def counted(block: StepBlock, *args: Any) -> Any:
        taken[-1] += 1
        return advance(block, *args)

    advance = StepBlock.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepBlock, "__call__", counted)
        for most, rest in ((local_fit._NEWTON_TO, local_fit._REST), (local_fit._NEWTON_TO, -1.0), (0, -1.0)):
            patch.setattr(local_fit, "_NEWTON_TO", most)
            patch.setattr(local_fit, "_REST", rest)
            taken.append(0)
            world = build(REGRESSION, make_regression((40, 40))[0], sf.PVI(rounds=1, local_steps=100))
            world.round()
            ended.append(world.state.q.mean())
    assert 2 * 3 < taken[0] < 2 * 12
    assert 2 * 22 <= taken[1] < 2 * 60
    assert taken[2] == 2 * 4 * 100 / 5  # in blocks of five
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-7, atol=1e-7)


def test_what_moves_by_some_draws_is_not_at_rest() -> None:
    """Two steps that move nothing are asked for, in means, sds and bound."""
    state = torch.tensor([1.0, -2.0, 0.5, 2.0, -7.0]).double()  # two means, their sds, the bound
    assert at_rest([state + 1, state, state, state])
    assert not at_rest([state, state])
    for place in range(5):
        moved = state.clone()
        moved[place] += 1e-6
        assert not at_rest([state, moved, moved])
        assert not at_rest([state, moved, state])


def test_where_newton_is_not_sound_steps_are_by_one_draw() -> None:
    problem = _fit().problem
    assert Families(sf.PVI(), problem).newton
    for options in ({"sampling_rate": 0.5}, {"family": "diagonal"}, {"local_optimizer": "adam"}):
        assert not Families(sf.PVI(**options), problem).newton  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", [sf.SiloDP, sf.RecordDP])
def test_under_privacy_the_data_have_no_say_in_when_a_fit_ends(unit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """25 full steps and 12 short ones, four times the full ones in a first fit, and more at a lower rate. The control:
    without privacy the same two silos' fits end when they have settled. With next to no noise q is the exact one."""
    taken = [0]

    def counted(block: StepBlock, *args: Any) -> Any:
        taken[-1] += 1
        return advance(block, *args)

    advance = StepBlock.__call__
    monkeypatch.setattr(StepBlock, "__call__", counted)
    silos, exact = make_regression((40, 20))
    wild = [{**silo, "y": 30 * silo["y"]} for silo in silos]
    privacy = unit(noise_multiplier=1e-6, clipping_norm=1e4, noise="silo")

    def fitted(data: Any, privacy: Any = None, rounds: int = 1, **options: Any) -> Any:
        taken.append(0)
        algorithm = sf.PVI(rounds=rounds, damping=1.0, **options)
        given = {} if privacy is None else {"noise_key": b"k" * 32, "privacy": privacy}
        server, engine, _ = build_parties(REGRESSION, data, algorithm, sf.Plain(), **given)
        world = World(server, engine)
        for _ in range(rounds):
            world.round()
        return world.state.q

    q = fitted(silos, privacy)
    fitted(wild, privacy, 2)
    fitted(silos, privacy, learning_rate=0.5)
    assert taken[1:] == [2 * 112, 2 * (112 + 37), 2 * 212]
    torch.testing.assert_close(q.mean(), exact.mean(), rtol=0, atol=1e-3)
    torch.testing.assert_close(q.precision, exact.precision, rtol=1e-2, atol=0.1)
    fitted(silos)
    monkeypatch.setattr(local_fit, "_REST", -1.0)
    fitted(silos)
    assert taken[-2] != taken[-1] != taken[1]


def test_under_privacy_steps_that_are_noised_and_those_of_latents_are_by_one_draw() -> None:
    private, latents = sf.RecordDP(epsilon=1.0, noise="silo"), make_intercepts()
    for model, silos, algorithm, newton in (
        (REGRESSION, make_regression((5,))[0], sf.PVI(rounds=1), True),
        (REGRESSION, make_regression((5,))[0], sf.PVI(rounds=1, private="steps", scale_rate=0.2), False),
        (latents.model, latents.silos, sf.PVI(rounds=1), False),
    ):
        server, _, _ = build_parties(model, silos, algorithm, sf.Plain(), privacy=private, noise_key=b"k" * 32)
        assert server.program.families.newton == newton  # type: ignore[attr-defined]


def test_fits_of_few_steps_are_not_compiled() -> None:
    """Ten fits of 25 steps do not repay it; of a step by one draw, of latents, there are a thousand in each. The
    control."""

    def mode(**options: Any) -> str:
        model, silos = make_intercepts().model, make_intercepts().silos
        server, _, _ = build_parties(model, silos, sf.PVI(**options), sf.Plain(), compile="auto")
        return str(server.problem.mode)

    assert mode() == "traced"
    assert mode(local_optimizer="adam") == ("compiled" if shutil.which("c++") else "traced")
