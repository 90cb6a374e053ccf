"""Components that change places, and signs: found in the program, and said by runs that do not look at other ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import secure_fvi as sf
from secure_fvi import fitting
from secure_fvi.aggregation import Plain
from secure_fvi.algorithms import label_switching
from secure_fvi.algorithms.label_switching import exchanges
from secure_fvi.algorithms.weighing import mirrors
from secure_fvi.fitting import build_parties

SAID = "the posterior is the same where components change places"


def normal(*shape: int, sd: float = 2.0) -> Any:
    return dist.Normal(torch.zeros(shape), sd).to_event(len(shape))


def mixed(share: Tensor, parts: Any, y: Tensor) -> None:
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(share), parts), obs=y)


def two(y: Tensor) -> None:
    mu, p = pyro.sample("mu", normal(2)), pyro.sample("p", dist.Beta(2.0, 2.0))
    mixed(torch.stack([p, 1 - p]), dist.Normal(mu, 1.0), y)


def several(count: int) -> Callable[[Tensor], None]:
    def model(y: Tensor) -> None:
        mu, share = pyro.sample("mu", normal(count)), pyro.sample("share", dist.Dirichlet(torch.ones(count)))
        sd = pyro.sample("sd", dist.LogNormal(torch.zeros(count), 0.5).to_event(1))
        mixed(share, dist.Normal(mu, sd), y)

    return model


def plane(y: Tensor) -> None:
    mu, share = pyro.sample("mu", normal(3, 2)), pyro.sample("share", dist.Dirichlet(torch.ones(3)))
    mixed(share, dist.Normal(mu, 1.0).to_event(1), y)


def lines(x: Tensor, y: Tensor) -> None:
    """Two regressions on three columns, and two coefficients that they share."""
    b, both, p = pyro.sample("b", normal(2, 3)), pyro.sample("both", normal(2)), pyro.sample("p", dist.Beta(2.0, 2.0))
    parts = dist.Normal(x[:, :3] @ b.T + (x[:, 3:] @ both).unsqueeze(-1), 0.5)
    mixed(torch.stack([p, 1 - p]), parts, y)


def named(y: Tensor) -> None:
    mu = torch.stack([pyro.sample(f"mu{k}", dist.Normal(0.0, 2.0)) for k in (1, 2)])
    sd = torch.stack([pyro.sample(f"sd{k}", dist.HalfNormal(1.0)) for k in (1, 2)])
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    mixed(torch.stack([p, 1 - p]), dist.Normal(mu, sd), y)


def summed_out(y: Tensor) -> None:
    share, centre = pyro.sample("share", dist.Dirichlet(torch.ones(2))), pyro.sample("centre", normal(2))
    with pyro.plate("row", len(y)):
        z = pyro.sample("z", dist.Categorical(share))
        pyro.sample("y", dist.Normal(centre[z], 0.5), obs=y)


def topics(y: Tensor) -> None:
    """Of each record's own weights, which change places with them."""
    topic = pyro.sample("topic", normal(3, 5))
    with pyro.plate("row", len(y)):
        weight = pyro.sample("weight", normal(3))
        pyro.sample("y", dist.Normal(weight.softmax(-1) @ topic, 1.0).to_event(1), obs=y)


def in_order(y: Tensor) -> None:
    apart = dist.TransformedDistribution(normal(2), dist.transforms.OrderedTransform())
    mu, p = pyro.sample("mu", apart), pyro.sample("p", dist.Beta(2.0, 2.0))
    mixed(torch.stack([p, 1 - p]), dist.Normal(mu, 1.0), y)


def apart(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(torch.tensor([-2.0, 2.0]), 1.0).to_event(1))
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    mixed(torch.stack([p, 1 - p]), dist.Normal(mu, 1.0), y)


def regression(x: Tensor, y: Tensor) -> None:
    b, sd = pyro.sample("b", normal(5)), pyro.sample("sd", dist.HalfNormal(1.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(x @ b, sd), obs=y)


def groups(g: Tensor, y: Tensor) -> None:
    """Alike a priori, and told apart by data."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    level = pyro.sample("level", dist.Normal(mean * torch.ones(4), 1.0).to_event(1))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(level[g], 1.0), obs=y)


def total(y: Tensor) -> None:
    """Of two levels data tell the sum alone: one mode, in which they are alike."""
    both = pyro.sample("level1", dist.Normal(0.0, 2.0)) + pyro.sample("level2", dist.Normal(0.0, 2.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(both, 1.0), obs=y)


def kinds(k: Tensor) -> None:
    share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("row", len(k)):
        pyro.sample("k", dist.Categorical(share), obs=k)


def columns(y: Tensor) -> None:
    mean = pyro.sample("mean", normal(5))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)


def factor(y: Tensor, positive: bool = False) -> None:
    """A record's own number times loadings, the first of which may be positive."""
    first = pyro.sample("first", dist.HalfNormal(2.0)) if positive else pyro.sample("first", dist.Normal(0.0, 2.0))
    load = torch.cat([first.reshape(1), pyro.sample("load", normal(3))])
    with pyro.plate("row", len(y)):
        f = pyro.sample("f", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(f.unsqueeze(-1) * load, 0.5).to_event(1), obs=y)


def first_is_positive(y: Tensor) -> None:
    factor(y, True)


def ability(y: Tensor) -> None:
    """Items' discriminations and difficulties; abilities of records."""
    slope, hard = pyro.sample("slope", normal(5, sd=1.0)), pyro.sample("hard", normal(5))
    with pyro.plate("row", len(y)):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Bernoulli(logits=slope * theta.unsqueeze(-1) - hard).to_event(1), obs=y)


def network(x: Tensor, y: Tensor) -> None:
    into, bias, out = (pyro.sample(name, normal(*shape)) for name, shape in (("w", (5, 3)), ("b", (3,)), ("v", (3,))))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal((x @ into + bias).tanh() @ out, 0.5), obs=y)


def product(x: Tensor, y: Tensor) -> None:
    """Among five coefficients that have their signs."""
    many = [pyro.sample(f"{name}_of", normal(k)) for k, name in enumerate("abcde", 2)]
    left, right = pyro.sample("left", dist.Normal(0.0, 1.0)), pyro.sample("right", dist.Normal(0.0, 1.0))
    mean = sum(x[:, : len(b)] @ b[: x.shape[1]] for b in many) + left * right * x[:, 0]
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def made(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def problem_of(model: Any, data: dict[str, Tensor]) -> Any:
    silos = [{name: value[j::2] for name, value in data.items()} for j in range(2)]
    of = sf.FederatedModel(model, record_plate="row")
    return build_parties(of, silos, sf.SFVI(iterations=1), Plain(), compile=False).server.problem


Y, X = {"y": made(20)}, {"x": made(20, 5), "y": made(20)}


@pytest.mark.parametrize(
    ("model", "data", "sites"),
    [
        (two, Y, {"mu", "p"}),
        *((several(count), Y, {"mu", "sd", "share"}) for count in (2, 3, 4)),
        (plane, {"y": made(20, 2)}, {"mu", "share"}),
        (lines, X, {"b", "p"}),
        (named, Y, {"mu1 with mu2", "sd1 with sd2", "p"}),
        (summed_out, Y, {"centre", "share"}),
        (topics, {"y": made(20, 5)}, {"topic", "weight"}),
    ],
)
def test_components_that_change_places_are_found_in_the_program(model: Any, data: Any, sites: set[str]) -> None:
    problem = problem_of(model, data)
    (found,) = exchanges(problem)
    assert set(found.sites) == sites
    z = made(problem.layout.size("global"))
    assert not torch.allclose(found.by(z), z)
    torch.testing.assert_close(found.by(found.by(z)), z)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (in_order, Y),
        (apart, Y),
        (regression, X),
        (groups, {"g": torch.arange(20) % 4, **Y}),
        (total, Y),
        (kinds, {"k": torch.arange(20) % 3}),
        (columns, {"y": made(20, 5)}),
        (first_is_positive, {"y": made(20, 4)}),
    ],
)
def test_what_an_order_priors_or_data_tell_apart_is_no_such_component(model: Any, data: Any) -> None:
    assert exchanges(problem_of(model, data)) == []


@pytest.mark.parametrize(
    ("model", "data", "sites", "places"),
    [
        (factor, {"y": made(20, 4)}, {"first", "load", "f"}, False),
        (ability, {"y": (made(20, 5) > 0).double()}, {"slope", "theta"}, False),
        (network, X, {"w", "b", "v"}, True),
        (product, X, {"left", "right"}, True),
    ],
)
def test_signs_that_no_data_tell_are_found_in_the_program(model: Any, data: Any, sites: set[str], places: bool) -> None:
    """Of hidden units, and of two factors by their names, places as well."""
    problem = problem_of(model, data)
    found = exchanges(problem)
    assert {kind.signs for kind in found} == ({False, True} if places else {True})
    (signs,) = (kind for kind in found if kind.signs)
    assert set(signs.sites) == sites
    z = made(problem.layout.size("global"))
    assert torch.equal(signs.by(z).abs(), z.abs())
    assert not torch.equal(signs.by(z), z)


def test_a_program_that_fails_on_made_records_far_out_loses_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is the same program where it does not."""
    problem = problem_of(two, Y)
    assert exchanges(problem)
    inside = type(problem.density).evaluate

    def evaluate(self: Any, z: Tensor, *rest: Any) -> Any:
        if torch.func.debug_unwrap(z).abs().max() > 1.5:
            raise ZeroDivisionError
        return inside(self, z, *rest)

    monkeypatch.setattr(type(problem.density), "evaluate", evaluate)
    assert exchanges(problem) == []


def clusters(count: int, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    left = torch.rand(count, generator=rng) < 0.4
    return {"y": torch.where(left, -2.0, 2.0) + torch.randn(count, generator=rng)}


def fitted(model: Any, silos: list[Any], algorithm: Any, privacy: Any = None) -> tuple[Any, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of = sf.FederatedModel(model, record_plate="row")
        result = sf.fit(of, silos, algorithm, Plain(), privacy=privacy)
    return result, " ".join(str(w.message) for w in caught)


def loaded(count: int, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    f = torch.randn(count, 1, generator=rng)
    return {"y": f * torch.tensor([1.0, -2.0, 0.0, 1.5]) + 0.5 * torch.randn(count, 4, generator=rng)}


SIGNS = "the posterior is the same where signs change"


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(
    ("made", "models", "same", "details"),
    [(clusters, (two, in_order, apart), SAID, ""),
     (loaded, (factor, first_is_positive), SIGNS, " (first, load and f), and this run did not look at their other")],
    ids=["orders", "signs"],
)  # fmt: skip
def test_a_run_that_does_not_look_at_other_orders_or_signs_says_so(
    made: Any, models: tuple[Any, ...], same: str, details: str, private: bool
) -> None:
    """In its warning, its summary and its result. The controls have components in an order, by themselves or by priors,
    or a first loading that is positive; without the check the first says nothing of it."""
    silos = [made(60, seed) for seed in range(3)]
    privacy = sf.RecordDP(epsilon=8.0, delta=1e-5, clipping_norm=3.0, noise="silo") if private else None
    for model in models:
        result, warned = fitted(model, silos, sf.SFVI(iterations=10), privacy)
        assert result.converged is None
        for said in (warned, str(result.summary()), result.convergence["reason"]):
            assert (same + details in said) == (same in said) == (model is models[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(label_switching, "exchanges", lambda problem: [])
        assert same not in fitted(models[0], silos, sf.SFVI(iterations=10), privacy)[1]


def test_a_point_at_which_a_sign_is_still_to_be_chosen_is_not_called_converged() -> None:
    """A square, whose slope is zero where it begins. The control begins away from there."""

    def square(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 2.0))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Normal(w**2 * x[:, 0], 0.5), obs=y)

    silos = [{"x": made(50, 1), "y": 4 * made(50, 1)[:, 0]} for _ in range(2)]
    at_rest, warned = fitted(square, silos, sf.FedAvg(rounds=40, local_steps=1, learning_rate=1e-3))
    assert at_rest.posterior["w"].mean.abs() < 1e-6
    assert at_rest.converged is None
    assert "may be a saddle between their signs; begin away from zero" in warned
    of = sf.FederatedModel(square, record_plate="row", start={"w": torch.tensor(0.5)})
    found = sf.fit(of, silos, sf.FedAvg(rounds=300, local_steps=1, learning_rate=1e-3), Plain())
    assert found.converged
    assert found.posterior["w"].mean == pytest.approx(2.0, abs=0.01)


def test_a_point_at_which_components_are_still_alike_is_not_called_converged() -> None:
    """Averages begin where all are alike, and come to rest there. The control begins with them apart."""
    silos = [clusters(60, seed) for seed in range(3)]
    at_rest, warned = fitted(two, silos, sf.FedAvg(rounds=40, local_steps=1, learning_rate=0.5))
    assert at_rest.posterior["mu"].mean.diff().abs() < 1e-6
    assert at_rest.converged is None
    assert "may be a saddle between their orders; begin with components apart" in warned
    start = {"mu": torch.tensor([-1.0, 1.0])}
    of = sf.FederatedModel(two, record_plate="row", start=start)
    found = sf.fit(of, silos, sf.FedAvg(rounds=200, local_steps=1, learning_rate=0.5), Plain())
    assert found.converged
    assert found.posterior["mu"].mean.diff() > 3


def test_orders_that_no_mirror_leads_to_are_no_convergence() -> None:
    """Of more numbers than scouts look for, with others along an axis of the same length. The control, without the
    check, is called converged at one of two orders."""
    b = torch.tensor([[2.0, 0.0, -1.0], [-1.5, 1.0, 1.0]])
    silos = []
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        x, left = torch.randn(150, 5, generator=rng), torch.rand(150, generator=rng) < 0.4
        y = torch.where(left, x[:, :3] @ b[0], x[:, :3] @ b[1]) + x[:, 3] - x[:, 4]
        silos.append({"x": x, "y": y + 0.5 * torch.randn(150, generator=rng)})
    problem = problem_of(lines, X)
    assert not _mirrored(problem)
    result, warned = fitted(lines, silos, sf.PVI())
    assert result.converged is False
    assert SAID in warned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "of_one_order", lambda verdict, problem, posterior: verdict)
        assert fitted(lines, silos, sf.PVI())[0].converged is True


def _mirrored(problem: Any) -> bool:
    """Whether some mirror leads where components that change places do."""
    (found,), z = exchanges(problem), made(problem.layout.size("global"))
    return any(torch.allclose(found.by(z), m(z)) for part in mirrors(problem.layout) for m in part)


def test_where_a_mirror_leads_to_the_other_orders_a_run_may_be_called_converged() -> None:
    """Of seven numbers, so that no scouts look: two components in a plane, of which draws around both orders are the
    result."""

    def model(y: Tensor) -> None:
        mu, share = pyro.sample("mu", normal(2, 2)), pyro.sample("share", dist.Dirichlet(torch.ones(2)))
        sd = pyro.sample("sd", dist.LogNormal(torch.zeros(2), 0.5).to_event(1))
        mixed(share, dist.Normal(mu, sd.unsqueeze(-1)).to_event(1), y)

    silos = []
    for seed in range(2):
        rng = torch.Generator().manual_seed(seed)
        left = (torch.rand(120, generator=rng) < 0.4).unsqueeze(-1)
        silos.append({"y": torch.where(left, -2.0, 2.0) + torch.randn(120, 2, generator=rng)})
    assert _mirrored(problem_of(model, {"y": made(20, 2)}))
    result, warned = fitted(model, silos, sf.PVI())
    assert result.converged is True
    assert SAID not in warned
    assert result.refined is not None
