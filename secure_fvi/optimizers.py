"""Optimisers of `torch.optim` as pure functions of tensors.

`torch.optim` keeps its state in objects; algorithms here keep state in NamedTuples that are checkpointed, gathered
for a minibatch and traced into the step's graph. The optimiser is therefore built anew in each call around the
given state, with `differentiable=True`, which makes its step counter a tensor: one a record where needed, so
that the state of a record that is absent from a minibatch stays frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.trees import Params

#: Those whose step counter may be a tensor, so that their step can be traced and counted by record.
BY_NAME: Mapping[str, Any] = {
    "adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop, "sgd": torch.optim.SGD,
}  # fmt: skip


@dataclass(frozen=True)
class Optimizer:
    """A `torch.optim` class by its lower-case name, with its options (betas, momentum, ...)."""

    name: str = "adam"
    learning_rate: float = 0.05
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in BY_NAME:
            raise InputError(f"optimizer '{self.name}' is unknown; choose one of {', '.join(BY_NAME)}")
        if self.options.get("weight_decay", 0):
            # q's means and the logarithms of its sds would be drawn to 0, by no prior of the model.
            raise InputError("optimizer_options takes no weight_decay: it biases a posterior; the prior is the model's")
        if not 0 < self.learning_rate <= torch.finfo(torch.float32).max:
            # Past that a job in float32 failed as it began, which was told as a fault of data.
            raise InputError(f"learning_rate must be positive and finite, in 32 bits too, not {self.learning_rate}")
        if not self.options:  # nothing else can be wrong; the first that is built loads PyTorch's compiler, a second
            return
        try:
            self._build([torch.zeros(1)])
        except (TypeError, ValueError) as error:
            raise InputError(f"optimizer '{self.name}' does not take these options: {error}") from None

    def _build(self, params: list[Tensor]) -> torch.optim.Optimizer:
        built: torch.optim.Optimizer = BY_NAME[self.name](
            params, lr=self.learning_rate, maximize=True, differentiable=True, foreach=False, **self.options
        )
        return built

    def init(self, params: Params, by_row: bool = False) -> Params:
        """State for `params`, named "<parameter>/<quantity>"; step counts are a row each when `by_row`."""
        state = {}
        for name, value in params.items():
            # A step along a zero gradient leaves every moment at its initial value and shows which there are.
            probe = torch.zeros_like(value)
            probe.grad = torch.zeros_like(value)
            optimizer = self._build([probe])
            optimizer.step()
            for key, entry in optimizer.state[probe].items():
                if not isinstance(entry, Tensor):
                    continue
                if entry.dim() == 0:
                    shape = (value.shape[0],) + (1,) * (value.dim() - 1) if by_row else ()
                    state[f"{name}/{key}"] = value.new_zeros(shape)
                else:
                    state[f"{name}/{key}"] = entry.clone()
        return state

    def step(
        self, params: Params, gradients: Params, state: Params, scale: Tensor, units: Params | None = None
    ) -> tuple[Params, Params]:
        """Ascend: parameters and state after one step.

        Its length is multiplied by `scale` () and, for parameters named there, by `units` of the same shape.
        """
        new_params, new_state = dict(params), dict(state)
        for name, value in params.items():
            if value.numel() == 0:
                continue
            moved = value.clone()
            moved.grad = gradients[name]
            optimizer = self._build([moved])
            prefix = f"{name}/"
            entries = {k.removeprefix(prefix): v.clone() for k, v in state.items() if k.startswith(prefix)}
            optimizer.state[moved].update(entries)
            optimizer.step()
            change = scale * (moved.detach() - value)
            new_params[name] = value + (change * units[name] if units and name in units else change)
            for key in entries:
                new_state[prefix + key] = optimizer.state[moved][key]
        return new_params, new_state


def mean_units(stddev: Tensor) -> Tensor:
    """The unit in which a mean takes its steps: 1, or the posterior sd where that is larger.

    Means of wide posteriors would otherwise creep, since an adaptive optimiser's steps have the length of the
    learning rate whatever the scale of the parameter.
    """
    return stddev.clamp(min=1.0)


def local_units(params: Params) -> Params:
    return {"loc": mean_units(params["log_scale"].exp())} if params else {}
