"""Silos' own networks: densities by hand and by role, both priors of the scatter, predictions, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import HalfNormal, Normal

from secure_fvi.density import LogTerms
from secure_fvi.discovery import read_layout
from secure_fvi.errors import InputError
from secure_fvi.federated_model import read_data
from secure_fvi.models.hierarchical_network import (
    PersonalNetwork,
    class_log_probs,
    fedpop,
    hierarchical_network,
    mixed_network,
)
from secure_fvi.program_density import ProgramDensity

D, HIDDEN, CLASSES = 3, 2, 4
_rng = torch.Generator().manual_seed(0)
DATA = {"x": torch.randn(5, D, generator=_rng), "y": torch.randint(CLASSES, (5,), generator=_rng)}
Z = torch.randn(40, generator=_rng)


def _evaluate(network: PersonalNetwork, shared: int, own: int) -> LogTerms:
    """At the first numbers of Z, in the order of the program's sites."""
    schema, _ = read_data(DATA, "a", torch.float64)
    layout, _ = read_layout(network.model, schema, torch.float64)
    assert (layout.size("global"), layout.size("silo"), layout.size("record")) == (shared, own, 0)
    density = ProgramDensity(network.model, layout, schema)
    return density.evaluate(Z[:shared], Z[shared : shared + own], torch.zeros(5, 0), {}, DATA)


def _log_likelihood(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(torch.relu(DATA["x"] @ first) @ last, -1)[torch.arange(5), DATA["y"]]


def test_the_hierarchical_network_by_hand() -> None:
    sd, mean = Z[0].exp(), Z[1:7].reshape(D, HIDDEN)
    offsets, last = Z[7:13].reshape(D, HIDDEN), Z[13:21].reshape(HIDDEN, CLASSES)
    found = _evaluate(hierarchical_network(HIDDEN, CLASSES), 1 + D * HIDDEN, D * HIDDEN + HIDDEN * CLASSES)
    prior = HalfNormal(1.0).log_prob(sd) + Z[0]  # the logarithm's Jacobian
    torch.testing.assert_close(found.shared, prior + Normal(0, 1).log_prob(mean).sum())
    torch.testing.assert_close(found.silo, Normal(0, 1).log_prob(Z[7:21]).sum())
    torch.testing.assert_close(found.records, _log_likelihood(mean + sd * offsets, last))


def test_fedpop_by_hand() -> None:
    first, last = Z[:6].reshape(D, HIDDEN), Z[6:14].reshape(HIDDEN, CLASSES)
    found = _evaluate(fedpop(HIDDEN, CLASSES), D * HIDDEN, HIDDEN * CLASSES)
    torch.testing.assert_close(found.shared, Normal(0, 1).log_prob(first).sum())
    torch.testing.assert_close(found.silo, Normal(0, 1).log_prob(last).sum())
    torch.testing.assert_close(found.records, _log_likelihood(first, last))


def test_the_mixed_network_by_hand() -> None:
    first, mean = Z[1:7].reshape(D, HIDDEN), Z[7:15].reshape(HIDDEN, CLASSES)
    offsets = Z[15:23].reshape(HIDDEN, CLASSES)
    found = _evaluate(mixed_network(HIDDEN, CLASSES), 1 + (D + CLASSES) * HIDDEN, HIDDEN * CLASSES)
    prior = HalfNormal(1.0).log_prob(Z[0].exp()) + Z[0]
    torch.testing.assert_close(found.shared, prior + Normal(0, 1).log_prob(Z[1:15]).sum())
    torch.testing.assert_close(found.silo, Normal(0, 1).log_prob(offsets).sum())
    torch.testing.assert_close(found.records, _log_likelihood(first, mean + Z[0].exp() * offsets))


def test_a_fixed_scatter_takes_the_place_of_the_site() -> None:
    network = mixed_network(HIDDEN, CLASSES, scatter=0.3)
    found = _evaluate(network, (D + CLASSES) * HIDDEN, HIDDEN * CLASSES)
    first, mean = Z[:6].reshape(D, HIDDEN), Z[6:14].reshape(HIDDEN, CLASSES)
    offsets = Z[14:22].reshape(HIDDEN, CLASSES)
    torch.testing.assert_close(found.shared, Normal(0, 1).log_prob(Z[:14]).sum())
    torch.testing.assert_close(found.records, _log_likelihood(first, mean + 0.3 * offsets))


def test_a_fit_begins_at_the_spread_that_is_given() -> None:
    model = hierarchical_network(HIDDEN, CLASSES, start=0.05).model
    schema, _ = read_data(DATA, "here", torch.float64)
    _, start = read_layout(model, schema, torch.float64)
    assert float(start.z_global[0]) == pytest.approx(math.log(0.05))  # in unconstrained space
    assert not start.z_global[1:].any()


def test_predictions_average_probabilities_over_joint_draws() -> None:
    network = mixed_network(HIDDEN, CLASSES)
    draws = {
        "hidden_weights": torch.randn(2, D, HIDDEN, generator=_rng), "spread": torch.tensor([0.5, 2.0]),
        "output_mean": torch.randn(2, HIDDEN, CLASSES, generator=_rng),
        "output_offsets": torch.randn(2, HIDDEN, CLASSES, generator=_rng),
    }  # fmt: skip
    each = [
        torch.relu(DATA["x"] @ draws["hidden_weights"][k])
        @ (draws["output_mean"][k] + draws["spread"][k] * draws["output_offsets"][k])
        for k in range(2)
    ]
    expected = torch.log(torch.softmax(torch.stack(each), -1).mean(0))
    torch.testing.assert_close(class_log_probs(network, draws, DATA["x"]), expected)
    assert math.isclose(float(expected.exp().sum()), 5.0)


def test_refusals_of_networks() -> None:
    with pytest.raises(InputError, match="hidden must be a whole number of at least 1"):
        hierarchical_network(hidden=0)
    with pytest.raises(InputError, match="classes must be a whole number of at least 1"):
        fedpop(classes=2.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="scatter must be positive"):
        mixed_network(scatter=0.0)
    with pytest.raises(InputError, match="start must be positive"):
        hierarchical_network(start=0.0)
    with pytest.raises(InputError, match="at least one is needed"):
        class_log_probs(fedpop(), {"hidden_weights": torch.zeros(0)}, DATA["x"])
