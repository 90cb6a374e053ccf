"""The one place where data leaves a silo.

A contribution is checked here against the bounds that the job declared, and only what `release` returns is handed
to the secure sum. Clipping, noise and the ledger of differential privacy act on the same numbers at the same
place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.errors import AggregationError


@dataclass(frozen=True)
class Gate:
    """One silo's gate."""

    silo: str

    def release(self, table: BlockTable, values: FloatArray) -> FloatArray:
        """`values` (table.size,), unchanged, if every element is finite and within its block's bound.

        Raises AggregationError naming the block and the bound, never the value: nothing leaves the silo then.
        """
        if values.shape != (table.size,):
            raise AggregationError(
                f"silo '{self.silo}': a contribution of {values.shape} where {table.size} were declared"
            )
        within = np.abs(values) <= table.bounds  # false for NaN
        if within.all():
            return values
        for name, inside in table.split(within.astype(np.float64)).items():
            if not inside.all():
                bound = next(b.bound for b in table.blocks if b.name == name)
                raise AggregationError(
                    f"silo '{self.silo}': its part of '{name}' is not finite or exceeds the declared bound {bound:g}; "
                    "scale the data, lower learning_rate, or declare a larger bound"
                )
        raise AssertionError("unreachable")
