"""What a silo's half of a horizontal algorithm works on, from the silo's data. Never leaves the silo."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from secure_fvi.algorithms.base import Problem, SiloView
from secure_fvi.discovery import start_at_silo
from secure_fvi.errors import InputError
from secure_fvi.federated_model import Records
from secure_fvi.randomness import UNIT_ID, KeyedDraws

_SPARE_ID = -2


def silo_view(silo: str, problem: Problem, records: Records, ids: npt.NDArray[np.int64], secret: bytes) -> SiloView:
    """Records with one spare row at the end (a copy of the first, of weight zero), and the silo's draws."""
    if ids.shape != (records.size,):
        raise InputError(f"silo '{silo}': {ids.shape[0]} record ids for {records.size} records")
    if len(np.unique(ids)) != len(ids) or (ids < 0).any():
        raise InputError(f"silo '{silo}': record ids must be different whole numbers of at least 0")
    rows = {name: torch.cat([t, t[:1]]).to(problem.device) for name, t in records.rows.items()}
    weights = torch.ones(records.size + 1, dtype=problem.dtype, device=problem.device)
    weights[-1] = 0.0
    keyed = np.append(ids, _SPARE_ID)
    problem.density.check_global_density(rows, silo)
    start = start_at_silo(problem.model, rows, problem.schema.constants, problem.dtype, silo)
    return SiloView(
        silo,
        rows,
        weights,
        records.size,
        start,
        KeyedDraws(secret, b"records", keyed),
        KeyedDraws(secret, b"batches", keyed),
        KeyedDraws(secret, b"silo/" + silo.encode(), np.array([UNIT_ID])),
    )
