"""The aggregator's part in privacy: it reads totals off the lattice and, where it is trusted to, adds the noise."""

from __future__ import annotations

import numpy as np

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.privacy.noise import gaussian
from secure_fvi.privacy.terms import Terms


def curated(total: FloatArray, terms: Terms, clip: float, generator: np.random.Generator) -> FloatArray:
    """A total (table.size,) in natural units. With noise = "server" nobody else may see `total` itself."""
    values = total.copy()
    if terms.settings.noise == "server":
        noised = terms.extent.shared + terms.extent.side
        values[:noised] += gaussian(generator, terms.noise_multiplier * clip, noised)
    return terms.in_clear(values, clip)
