"""One secure sum outside a fit: the silos' predictors of new people."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable, SecureSum, carry
from secure_fvi.privacy.gate import Gate
from secure_fvi.trees import to_numpy

_PHASE = "predict"


def sum_of_predictors(aggregation: SecureSum, etas: Mapping[str, Tensor], bound: float) -> Tensor:
    """The total of each silo's `etas`, all of one shape. Raises AggregationError past `bound`, as in a fit."""
    names = tuple(sorted(etas))
    first = etas[names[0]]
    table = BlockTable((Block("eta", tuple(first.shape), bound),))
    server, silos = aggregation.local_parties(names)
    context = hashlib.sha256(repr((_PHASE, tuple(first.shape))).encode()).digest()

    def answer(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: silos[name].handle(message) for name, message in messages.items()}

    carry(server.prepare(1), answer)
    sent = {}
    for name in names:
        gate = Gate(name, {_PHASE: table})
        gate.begin(1, _PHASE)
        release = gate.release(to_numpy(etas[name]).reshape(-1))
        sent[name] = silos[name].contribute(release.sum_index, names, table, release.values, context)
    total = carry(server.total(1, names, table, sent, context), answer)
    return torch.from_numpy(total.values.reshape(first.shape)).to(first)
