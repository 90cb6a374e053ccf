"""What both halves of FedVI derive from the model: FedAvg's frame, with q(theta) and with clients' own latents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from secure_fvi.algorithms.base import Problem
from secure_fvi.algorithms.fedavg_frame import FedAvgFrame
from secure_fvi.algorithms.fedvi import FedVI
from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import Diagonal, GlobalFamily
from secure_fvi.federated_model import SiloEncoder
from secure_fvi.trees import Params

#: Totals of a round: sum over clients of n_k x the query's mean negative log-likelihood, and of KL(q(beta_k) || r).
DISTORTION, RATE = "distortion", "rate"


class FedVIFrame(FedAvgFrame):
    """A configuration bound to a problem. Every party builds the same one."""

    reported = (DISTORTION, RATE)

    def __init__(self, config: FedVI, problem: Problem) -> None:
        self.options = config
        super().__init__(config, problem)

    @property
    def encoder(self) -> SiloEncoder:
        encoder = self.problem.model.encoder
        assert encoder is not None  # checked below
        return encoder

    def check_latents(self) -> None:
        layout, encoder = self.problem.layout, self.problem.model.encoder
        if layout.of("record"):
            raise InputError(f"fedvi takes no latents of a record, and this model has {layout.of('record')[0].name}")
        if encoder is None or not layout.of("silo"):
            raise InputError(
                "fedvi needs a model with silo_sites and an encoder that infers them: "
                "sf.FederatedModel(fn, silo_sites=(...), encoder=sf.SiloEncoder(...)); without such sites use fedavg"
            )
        fields = {name for name, _, _ in self.problem.schema.fields}
        for name in encoder.fields:
            if name not in fields:
                raise InputError(f"the encoder asks for '{name}'; the data hold {', '.join(sorted(fields))}")
        if set(encoder.fields) == fields:
            raise InputError("the encoder is given all of the data, labels included; name only what needs no label")

    def start_of_family(self) -> tuple[GlobalFamily, Params]:
        if self.options.theta == "point":
            return super().start_of_family()
        family, loc = Diagonal(self.problem.layout.size("global")), self.problem.start.z_global
        return family, {"loc": loc.clone(), "log_scale": torch.full_like(loc, math.log(self.options.start_scale))}

    def objective(self, point: Params, reported: Mapping[str, float]) -> float:
        """Minus equation (8), in nats: at tau = gamma = 1 a lower bound of the log evidence."""
        options = self.options
        regulariser = options.gamma * float(self.global_rate(point)) if options.gamma else 0.0
        return -(reported[DISTORTION] + options.tau * reported[RATE] + regulariser)

    def global_rate(self, point: Params) -> Tensor:
        """KL(q(theta) || t) in nats (); -log t(theta) for a point, whose divergence is infinite."""
        eta, theta = self.posterior(point)[1:]
        if self.options.theta == "point":
            return -self.problem.density.log_prior(eta["loc"], theta)
        scale = eta["log_scale"].exp()
        return gaussian_kl(
            eta["loc"], scale, torch.ones_like(scale), lambda z: self.problem.density.log_prior(z, theta)
        )


def gaussian_kl(loc: Tensor, scale: Tensor, signs: Tensor, log_prior: Callable[[Tensor], Tensor]) -> Tensor:
    """KL(N(loc, diag(scale^2)) || prior) in nats ().

    The mean of log p over loc +- signs x scale has its expectation: exactly for a Gaussian prior with independent
    elements, whatever the signs (n,); without bias under random signs for any Gaussian; to second order otherwise.
    """
    expected = (log_prior(loc + signs * scale) + log_prior(loc - signs * scale)) / 2
    return -(scale.log().sum() + len(scale) * (1 + math.log(2 * math.pi)) / 2) - expected
