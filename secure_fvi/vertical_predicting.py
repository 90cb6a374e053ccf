"""One secure sum outside a fit: the silos' predictors of new people."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable, Exchanges, SecureSum, SumSilo
from secure_fvi.privacy.gate import Gate
from secure_fvi.trees import to_numpy

T = TypeVar("T")

_PHASE = "predict"


def sum_of_predictors(aggregation: SecureSum, etas: Mapping[str, Tensor], bound: float) -> Tensor:
    """The total of each silo's `etas`, all of one shape. Raises AggregationError past `bound`, as in a fit."""
    names = tuple(sorted(etas))
    first = etas[names[0]]
    table = BlockTable((Block("eta", tuple(first.shape), bound),))
    server, silos = aggregation.local_parties(names)
    context = hashlib.sha256(repr((_PHASE, tuple(first.shape))).encode()).digest()
    _carry(server.prepare(1), silos)
    sent = {}
    for name in names:
        gate = Gate(name, {_PHASE: table})
        gate.begin(1, _PHASE)
        release = gate.release(to_numpy(etas[name]).reshape(-1))
        sent[name] = silos[name].contribute(release.sum_index, names, table, release.values, context)
    total = _carry(server.total(1, names, table, sent, context), silos)
    return torch.from_numpy(total.values.reshape(first.shape)).to(first)


def _carry(exchanges: Exchanges[T], silos: Mapping[str, SumSilo]) -> T:
    """The sum's messages to the silos and back, in this process."""
    replies: Any = None
    while True:
        try:
            asked = next(exchanges) if replies is None else exchanges.send(replies)
        except StopIteration as stop:
            return stop.value
        replies = {name: silos[name].handle(message) for name, message in asked.items()}
