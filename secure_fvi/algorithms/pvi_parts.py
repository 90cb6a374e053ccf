"""Virtual clients: a silo's records in disjoint parts, each with a site of its own (fixed sub-partitions, Ashman et al.
2022, Appendix B.6)."""

from __future__ import annotations

import numpy as np
import torch

from secure_fvi.algorithms.base import SiloView

#: The draw that assigns records to parts; minibatches use others.
_ASSIGNMENT = 2**31


def part_views(view: SiloView, parts: int) -> list[SiloView]:
    """The silo's view of each part, which may be empty. Which is a record's follows from secret and own id."""
    if parts == 1:
        return [view]
    chosen = np.floor(parts * view.batch_draws.uniforms(_ASSIGNMENT, 1)[0, : view.size, 0]).astype(np.int64)
    views = []
    for part in range(parts):
        at = np.append(np.flatnonzero(chosen == part), view.size)  # with the spare row
        rows = torch.from_numpy(at).to(view.weights.device)
        views.append(
            view._replace(
                rows={name: value.index_select(0, rows) for name, value in view.rows.items()},
                weights=view.weights.index_select(0, rows),
                size=len(at) - 1,
                start=view.start._replace(z_record=view.start.z_record[at]),
                record_draws=view.record_draws.subset(at),
                batch_draws=view.batch_draws.subset(at),
            )
        )
    return views
