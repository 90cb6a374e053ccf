"""What a silo's half of a horizontal algorithm works on, from the silo's data. Never leaves the silo."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from secure_fvi.algorithms.base import Problem, SiloView
from secure_fvi.contracts import read_at_silo
from secure_fvi.errors import DataError, InputError
from secure_fvi.exported import GraphDensity, read_graph_at_silo
from secure_fvi.federated_model import Records
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.randomness import UNIT_ID, KeyedDraws

_SPARE_ID = -2


def silo_view(silo: str, problem: Problem, records: Records, ids: npt.NDArray[np.int64], secret: bytes) -> SiloView:
    """Records with one spare row of weight zero at the end, and the silo's draws.

    The spare row is a copy of the first; under record privacy it is made, since it stands beside every record.
    """
    if ids.shape != (records.size,):
        raise InputError(f"silo '{silo}': {ids.shape[0]} record ids for {records.size} records")
    different, counts = np.unique(ids, return_counts=True)
    if len(different) != len(ids) or (ids < 0).any():
        bad = int((np.isin(ids, different[counts > 1]) | (ids < 0)).sum())
        raise DataError(
            f"silo '{silo}': record ids must be different whole numbers of at least 0; in {bad} of {len(ids)} rows "
            "they are not"
        )
    made = problem.schema.dummy_rows(1) if isinstance(problem.privacy, RecordDP) else {}
    rows = {name: torch.cat([t, made.get(name, t[:1]).to(t)]).to(problem.device) for name, t in records.rows.items()}
    weights = torch.ones(records.size + 1, dtype=problem.dtype, device=problem.device)
    weights[-1] = 0.0
    keyed = np.append(ids, _SPARE_ID)
    read = read_graph_at_silo if isinstance(problem.density, GraphDensity) else read_at_silo
    start = read(problem, rows, records.size, silo)
    return SiloView(
        silo,
        rows,
        weights,
        records.size,
        start,
        KeyedDraws(secret, b"records", keyed),
        KeyedDraws(secret, b"batches", keyed),
        KeyedDraws(secret, b"silo/" + silo.encode(), np.array([UNIT_ID])),
        KeyedDraws(secret, b"hiding/" + silo.encode(), np.array([UNIT_ID])),
    )
