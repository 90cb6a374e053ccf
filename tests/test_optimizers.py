"""Functional optimisers: equal to torch.optim's own objects, step counts by row where wanted."""

from __future__ import annotations

import pytest
import torch

from secure_fvi.errors import InputError
from secure_fvi.optimizers import BY_NAME, Optimizer


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_equals_the_torch_optimiser(name: str) -> None:
    torch.manual_seed(0)
    start = {"a": torch.randn(5, 3), "b": torch.randn(5)}
    target = 1.0
    optimizer = Optimizer(name, 0.05)
    params, state = dict(start), optimizer.init(start, by_row=True)
    own = {k: v.clone().requires_grad_() for k, v in start.items()}
    reference = BY_NAME[name](list(own.values()), lr=0.05)
    for _ in range(60):
        gradients = {k: -2 * (v - target) for k, v in params.items()}
        params, state = optimizer.step(params, gradients, state, torch.tensor(1.0))
        reference.zero_grad()
        sum(((v - target) ** 2).sum() for v in own.values()).backward()  # type: ignore[union-attr]
        reference.step()
    for key, value in params.items():
        torch.testing.assert_close(value, own[key].detach(), rtol=1e-7, atol=1e-9)


def test_scale_multiplies_the_step() -> None:
    optimizer = Optimizer("adam", 0.1)
    params = {"a": torch.zeros(2)}
    moved, _ = optimizer.step(params, {"a": torch.ones(2)}, optimizer.init(params), torch.tensor(0.5))
    torch.testing.assert_close(moved["a"], torch.full((2,), 0.05))


def test_what_draws_parameters_to_zero_is_no_optimiser_of_a_posterior() -> None:
    Optimizer("adam", 0.1, {"weight_decay": 0.0})
    with pytest.raises(InputError, match="takes no weight_decay: it biases a posterior"):
        Optimizer("adam", 0.1, {"weight_decay": 0.01})
    with pytest.raises(InputError, match="'adamw' is unknown"):
        Optimizer("adamw")


@pytest.mark.parametrize("name", ["rmsprop", "sgd"])
def test_a_rate_that_32_bits_do_not_hold_is_refused(name: str) -> None:
    """The control builds one all the same: it fails as a silo begins, where nothing but its data were said to."""
    with pytest.raises(InputError, match="learning_rate must be positive and finite, in 32 bits too, not 1e"):
        Optimizer(name, 1e300)
    found = Optimizer(name, 1.0)
    object.__setattr__(found, "learning_rate", 1e300)
    with pytest.raises(RuntimeError, match="overflow"):
        found.init({"a": torch.zeros(2, dtype=torch.float32)})
