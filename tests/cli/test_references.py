"""The centralised reference finds a posterior that is known in closed form, silo-level sites included."""

import pyro
import pytest
import torch
from pyro.distributions import LogNormal, Normal

from secure_fvi.federated_model import FederatedModel
from secure_fvi.runs.marginals import density, labels
from secure_fvi_lab.references import pooled_program, sample_nuts


def hierarchy(y: torch.Tensor) -> None:
    """mu, a shift for each silo, a latent for each record: all Gaussian, so mu is Gaussian given y."""
    mu = pyro.sample("mu", Normal(0.0, 2.0))
    shift = pyro.sample("shift", Normal(0.0, 0.7))
    with pyro.plate("person", len(y)):
        own = pyro.sample("own", Normal(mu + shift, 1.0))
        pyro.sample("y", Normal(own, 0.5), obs=y)


def silo_data() -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    return [{"y": torch.randn(n, generator=rng, dtype=torch.float64) + 1.0} for n in (4, 9, 6)]


def exact(silos: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Mean and sd of mu: y_j ~ N(mu, (1 + 0.25) I + 0.49 11') at silo j."""
    precision, weighted = 1 / 4.0, 0.0
    for silo in silos:
        n = len(silo["y"])
        variance_of_mean = 1.25 / n + 0.49
        precision += 1 / variance_of_mean
        weighted += float(silo["y"].mean()) / variance_of_mean
    return weighted / precision, precision**-0.5


@pytest.mark.slow
def test_nuts_on_pooled_silos_with_a_site_of_their_own() -> None:
    silos = silo_data()
    model = FederatedModel(hierarchy, record_plate="person", silo_sites=("shift",))
    program = pooled_program(model, silos, ["a", "b", "c"], {})
    found = sample_nuts(program, "person", ["mu"], warmup=150, draws=400)
    mean, sd = exact(silos)
    # Five Monte-Carlo standard errors: a false alarm for less than one seed in a million.
    assert abs(float(found.sites["mu"].mean()) - mean) < 5 * sd / found.ess**0.5
    assert float(found.sites["mu"].std()) == pytest.approx(sd, rel=5 * (2 * found.ess) ** -0.5)
    assert found.r_hat < 1.1


def test_pooling_counts_each_global_density_once() -> None:
    silos = silo_data()
    values = {"mu": torch.tensor(0.3), "shift": torch.tensor(0.1)}
    together = FederatedModel(hierarchy, record_plate="person")
    by_silo = FederatedModel(hierarchy, record_plate="person", silo_sites=("shift",))
    own = torch.linspace(-1, 1, 19)
    pooled = pyro.poutine.condition(pooled_program(together, silos, ["a", "b", "c"], {}), {**values, "own": own})
    parts = {f"{s}/own": part for s, part in zip("abc", own.split([4, 9, 6]), strict=True)}
    shifts = {f"{s}/shift": values["shift"] for s in "abc"}
    split = pyro.poutine.condition(
        pooled_program(by_silo, silos, ["a", "b", "c"], {}), {"mu": values["mu"], **parts, **shifts}
    )
    difference = (
        pyro.poutine.trace(split).get_trace().log_prob_sum() - pyro.poutine.trace(pooled).get_trace().log_prob_sum()
    )
    # Only the silo-level prior is there three times instead of once.
    expected = 2 * Normal(0.0, 0.7).log_prob(values["shift"])
    torch.testing.assert_close(difference, expected, check_dtype=False)


def test_theta_is_held_at_the_value_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(y: torch.Tensor) -> None:
        scale = pyro.param("scale", torch.tensor(1.0), constraint=torch.distributions.constraints.positive)
        mu = pyro.sample("mu", LogNormal(0.0, 1.0))
        with pyro.plate("person", len(y)):
            pyro.sample("y", Normal(mu, scale), obs=y)

    silos = silo_data()
    pooled = pooled_program(FederatedModel(program, "person"), silos, ["a", "b", "c"], {"scale": torch.tensor(0.25)})
    trace = pyro.poutine.trace(pooled).get_trace()
    y, mu = trace.nodes["y"]["value"], trace.nodes["mu"]["value"]
    torch.testing.assert_close(trace.nodes["y"]["fn"].log_prob(y), Normal(mu, 0.25).log_prob(y), check_dtype=False)
    # Compiling takes ten seconds and nothing is claimed of it; of 60 draws of log mu about half are below zero.
    monkeypatch.setattr("secure_fvi_lab.references.shutil.which", lambda _: None)
    found = sample_nuts(pooled, "person", ["mu"], warmup=20, draws=30)
    assert bool((found.sites["mu"] > 0).all())


def test_density_of_known_draws() -> None:
    draws = torch.randn(20_000, generator=torch.Generator().manual_seed(1)).numpy()
    found = density(draws)
    x, y = torch.tensor(found["x"]), torch.tensor(found["density"])
    assert float(torch.trapezoid(y, x)) == pytest.approx(1.0, abs=0.01)
    assert float(y.max()) == pytest.approx(0.3989, rel=0.05)


def test_labels_are_in_row_major_order() -> None:
    assert labels("omega", ()) == ["omega"]
    assert labels("w", (2, 2)) == ["w[0,0]", "w[0,1]", "w[1,0]", "w[1,1]"]
