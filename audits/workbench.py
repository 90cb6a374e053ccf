"""Where worlds of attacks on one configuration come from: its records, its sizes, and laboratories for each protection.

Worlds of SFVI begin late in a run (`late`), those of other algorithms at their first round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import FloatArray, SecureSum
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.audits.worlds import Data, Laboratory, LateStart, pooled, resampled, shortened
from secure_fvi.discovery import read_layout
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel, read_data
from secure_fvi.privacy.settings import DP


class Protection(NamedTuple):
    """What a run is protected by, as the table of an audit names it."""

    name: str
    aggregation: SecureSum
    privacy: DP | None = None


PLAIN, MASKED = Protection("plain", Plain()), Protection("masked", Masked())
#: Worlds whose number says so are the adversary's own, and that in which it learns nothing but where to begin.
OWN, ELSEWHERE = 1_000_000, 2_000_000
Each = Callable[[], None]


def silent() -> None:
    """For callers that want no progress."""


class Workbench:
    """One configuration, for attacks that make worlds of it."""

    def __init__(
        self,
        model: FederatedModel,
        algorithm: Any,
        silos: Sequence[Data],
        *,
        rounds: int = 12,
        worlds: int = 50,
        simulated: bool = True,
        real_data: bool = False,
        late: LateStart | None = None,
    ) -> None:
        """`rounds` of each world; about `worlds` worlds under each protection, which interval widths follow.
        `late`: where worlds begin, if not at a fit that is made for it."""
        if len(silos) < 3:
            raise InputError(f"{len(silos)} silos: masked sums, which are audited beside plain ones, need at least 3")
        self.model, self.full, self.worlds, self.rounds = model, algorithm, worlds, rounds
        self.algorithm = shortened(algorithm, rounds)
        self.silos, self.pool = list(silos), pooled(silos)
        self.sizes = [len(next(iter(s.values()))) for s in silos]
        schema, _ = read_data(self.pool, "pool", torch.float64)
        self.layout, self.start = read_layout(model, schema, torch.float64)
        self._simulated, self._real_data = simulated, real_data
        self._late = late

    @property
    def all_global(self) -> bool:
        """Whether the model's parameters are all global latents."""
        return not (self.layout.size("record") or self.layout.size("silo") or self.start.theta)

    @property
    def records(self) -> int:
        return sum(self.sizes)

    @property
    def late(self) -> LateStart:
        """Fitted when it is first asked for."""
        if self._late is None:
            config = self.full if isinstance(self.full, SFVI) else SFVI()
            elsewhere = resampled(self.pool, self.sizes, ELSEWHERE)
            self._late = LateStart(self.model, config, elsewhere, 8 * self.worlds, pool=self.pool)
        return self._late

    def laboratory(self, protection: Protection, worlds: int | None = None, own_latents: bool = False) -> Laboratory:
        """Under `protection`. The latents that worlds tell are those of a settled fit, since what moves a short run
        moves its own latents, too; with `own_latents` those that each run ends with."""
        sfvi = isinstance(self.full, SFVI)
        return Laboratory(
            self.model,
            self.algorithm,
            protection.aggregation,
            protection.privacy,
            worlds=worlds or self.worlds * len(self.sizes),
            late=self.late if sfvi else None,
            targets=self.late if self.layout.size("record") and not own_latents else None,
            simulated=self._simulated,
            real_data=self._real_data,
        )


def per_record(values: Any) -> FloatArray:
    """(N,): mean over each record's own numbers of an argument (N, ...)."""
    return np.asarray(values.reshape(len(values), -1).double().mean(1).cpu().numpy(), np.float64)
