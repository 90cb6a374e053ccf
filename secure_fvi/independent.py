"""Every silo on its own: what it would know if it exchanged nothing, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from secure_fvi.aggregation import Plain
from secure_fvi.aggregation.base import check_silo_ids
from secure_fvi.algorithms.base import Algorithm
from secure_fvi.errors import InputError
from secure_fvi.federated_model import Data, FederatedModel
from secure_fvi.fitting import fit
from secure_fvi.results import Result


def fit_alone(
    model: FederatedModel | Callable[..., Any],
    silos: Sequence[Data],
    algorithm: Algorithm | None = None,
    seed: int = 0,
    *,
    silo_ids: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Result]:
    """Fit `model` to each silo's data alone, by its own run of `algorithm`; the results by silo, in the order given.

    Nothing is shared: a silo is its own server, and its result is for its own eyes. `options` are those of `fit` but
    for aggregation, privacy, books and checkpoints, which exchanges have and this has not. Raises InputError as `fit`.
    """
    for option in ("aggregation", "privacy", "books", "noise_key", "checkpoint_dir", "resume"):
        if option in options:
            raise InputError(f"fit_alone exchanges nothing and takes no {option}")
    names = list(silo_ids) if silo_ids is not None else [f"silo-{i + 1}" for i in range(len(silos))]
    if len(names) != len(silos):
        raise InputError(f"{len(names)} silo ids for {len(silos)} silos")
    check_silo_ids(names)
    ids = options.pop("record_ids", None) or [None] * len(silos)
    return {
        name: fit(
            model, [data], algorithm, Plain(), seed=seed, silo_ids=[name],
            record_ids=None if own is None else [own], **options,
        )
        for name, data, own in zip(names, silos, ids, strict=True)
    }  # fmt: skip
