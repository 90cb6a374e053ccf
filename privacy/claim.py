"""What a job guarantees, as `result.json` and the ledger's job row state it."""

from __future__ import annotations

from typing import Any

from secure_fvi.privacy.accounting import epsilon
from secure_fvi.privacy.events import Event
from secure_fvi.privacy.noise import NoiseSource
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.privacy.terms import Terms


def accountant_for(event: Event, resolution: int) -> str:
    """The tightest accountant that bounds `event`: PLD, or RDP for vector noise on a lattice."""
    return "rdp" if resolution else "pld"


def claim(terms: Terms, noise: NoiseSource) -> dict[str, Any]:
    """Unit, epsilon and delta of all releases of a job, the mechanism's numbers and what was declared public."""
    settings = terms.settings
    accountant = accountant_for(terms.job, terms.resolution)
    return {
        "unit": settings.unit,
        "adjacency": "add or remove one",
        "epsilon": epsilon(terms.job, settings.delta, accountant),
        "delta": settings.delta,
        "accountant": accountant,
        "noise": settings.noise,
        **description(terms, noise),
    }


def description(terms: Terms, noise: NoiseSource) -> dict[str, Any]:
    """How the noise is made: for the ledger's job row and the report."""
    settings = terms.settings
    distributed = settings.noise == "distributed"
    public = ["number of silos", "silos that answered"]
    if isinstance(settings, RecordDP) and settings.public_counts:
        public.append("number of records")
    return {
        "mechanism": "skellam" if terms.resolution else "gaussian",
        "noise_multiplier": terms.noise_multiplier,
        "clipping_norm": settings.clipping_norm,
        "clipping": "adaptive" if terms.adaptive else "fixed",
        "sampling_rate": terms.sampling_rate,
        "rounds": terms.rounds,
        "releases": terms.releases,
        "silos_counted_on": terms.honest if distributed else 1,
        "colluders": settings.colluders if distributed else 0,
        "dropouts": settings.dropouts,
        "public": public,
        "rng": noise.status,
    }
