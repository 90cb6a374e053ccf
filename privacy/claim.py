"""What a job guarantees, as `result.json` and the ledger's job row state it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from secure_fvi.privacy.accounting import epsilon
from secure_fvi.privacy.events import Composed
from secure_fvi.privacy.noise import NoiseSource
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.privacy.terms import ADD_OR_REMOVE, Terms

#: Beyond this epsilon the guarantee is void, and the tighter accountant not worth its time.
_MEANINGFUL = 100.0


def claim(terms: Mapping[str, Terms], noise: NoiseSource) -> dict[str, Any]:
    """Unit, epsilon and delta of all releases of a job, the mechanism's numbers and what was declared public."""
    settings = next(iter(terms.values())).settings
    job = Composed(tuple(t.job for t in terms.values()))
    by_rdp = epsilon(job, settings.delta, "rdp")
    exact = by_rdp < _MEANINGFUL and not any(t.resolution for t in terms.values())
    return {
        "unit": settings.unit,
        "epsilon": epsilon(job, settings.delta, "pld") if exact else by_rdp,
        "delta": settings.delta,
        "accountant": "pld" if exact else "rdp",
        **description(terms, noise),
    }


def description(by_phase: Mapping[str, Terms], noise: NoiseSource) -> dict[str, Any]:
    """How the noise is made, in numbers of the first phase: for the ledger's job row and the report."""
    terms = next(iter(by_phase.values()))
    settings = terms.settings
    distributed = settings.noise == "distributed"
    public = ["number of silos", "silos that answered"]
    by_record = settings.unit == "record" and terms.adjacency == ADD_OR_REMOVE
    if isinstance(settings, RecordDP) and settings.public_counts:
        public.append("number of records")
    return {
        "adjacency": terms.adjacency,
        **({"record": terms.record} if by_record else {}),
        "noise": settings.noise,
        "mechanism": "skellam" if terms.resolution else "gaussian",
        "noise_multiplier": terms.noise_multiplier,
        "clipping_norm": settings.clipping_norm,
        "clipping": "adaptive" if terms.adaptive else "fixed",
        "sampling_rate": terms.sampling_rate,
        "rounds": terms.rounds,
        "releases": sum(t.releases for t in by_phase.values()),
        "silos_counted_on": terms.honest if distributed else 1,
        "colluders": settings.colluders if distributed else 0,
        "dropouts": settings.dropouts,
        "public": public,
        "rng": noise.status,
    }
