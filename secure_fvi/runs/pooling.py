"""All silos' data in one process, for the centralised fit that a federated one is compared with.

This is for data that may be pooled: simulations, published data, a rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from pyro.poutine.messenger import Messenger
from torch import Tensor

from secure_fvi.federated_model import FederatedModel, Shared

Program = Callable[[], None]


def pooled_program(
    model: FederatedModel, silos: Sequence[Mapping[str, Any]], silo_ids: Sequence[str], theta: Mapping[str, Tensor]
) -> Program:
    """A Pyro program without arguments that is the joint model of all silos, with theta held at the given values.

    Without silo-level sites the records are simply put together. With them the program runs once a silo: global
    sites are drawn at the first and shared by the others, and all other sites carry the silo's id in their names.
    """
    if not model.silo_sites:
        together = {name: _together([silo[name] for silo in silos]) for name in silos[0]}

        def program() -> None:
            with _Fixed(theta):
                model.fn(**together)

        return program

    plain = [{name: v.tensor if isinstance(v, Shared) else v for name, v in silo.items()} for silo in silos]

    def program_by_silo() -> None:
        values: dict[str, Any] = {}
        for silo, data in zip(silo_ids, plain, strict=True):
            with _Fixed(theta), _OneSilo(silo, model, values):
                model.fn(**data)

    return program_by_silo


def _together(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Shared):
        return first.tensor
    return torch.cat(list(parts)) if isinstance(first, Tensor) else first


def is_record_site(site: Any, record_plate: str) -> bool:
    """Whether a site of a trace, or a message about one, lies in the record plate (of any silo)."""
    frames = site["cond_indep_stack"]
    return any(frame.name == record_plate or frame.name.endswith(f"/{record_plate}") for frame in frames)


def non_centred(program: Program, record_plate: str) -> Program:
    """Record-level sites of location-scale families as loc + scale * standardised."""
    with poutine.block():
        trace = poutine.trace(program).get_trace()
    config = {}
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and not site["is_observed"] and is_record_site(site, record_plate):
            base = site["fn"]
            while isinstance(base, torch.distributions.Independent):
                base = base.base_dist
            if {"loc", "scale"} <= set(base.arg_constraints) and base.support is torch.distributions.constraints.real:
                config[name] = LocScaleReparam(0.0)
    reparametrised: Program = poutine.reparam(program, config=config)
    return reparametrised


class _Fixed(Messenger):  # type: ignore[misc]
    """Holds each `pyro.param` at its fitted value: the reference takes the posterior given theta."""

    def __init__(self, theta: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.theta = theta

    def _pyro_param(self, msg: Any) -> None:
        if msg["name"] in self.theta:
            msg["value"], msg["done"] = self.theta[msg["name"]], True


class _OneSilo(Messenger):  # type: ignore[misc]
    """One silo's pass through the program: global sites keep the value of the first pass, others get a prefix."""

    def __init__(self, silo: str, model: FederatedModel, values: dict[str, Any]) -> None:
        super().__init__()
        self.silo, self.model, self.values = silo, model, values

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        in_plate = is_record_site(msg, self.model.record_plate)
        # Plates of one name and different sizes would be taken for one plate by handlers outside.
        msg["cond_indep_stack"] = tuple(
            frame._replace(name=f"{self.silo}/{frame.name}") for frame in msg["cond_indep_stack"]
        )
        is_plate = type(msg["fn"]).__name__ == "_Subsample"
        if in_plate or is_plate or name in self.model.silo_sites:
            msg["name"] = f"{self.silo}/{name}"
        elif name in self.values:
            # Its density was counted at the first silo, so handlers outside do not hear of it again.
            msg["value"], msg["done"], msg["stop"] = self.values[name], True, True

    def _pyro_post_sample(self, msg: Any) -> None:
        self.values.setdefault(msg["name"], msg["value"])
