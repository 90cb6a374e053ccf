"""The aggregator's part in privacy: it reads totals off the lattice and, where it is trusted to, adds the noise."""

from __future__ import annotations

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.privacy.noise import NoiseSource, gaussian
from secure_fvi.privacy.terms import Terms


def curated(total: FloatArray, terms: Terms, clip: float, noise: NoiseSource, index: int) -> FloatArray:
    """The total (table.size,) of sum `index` in natural units. With noise = "server" nobody else may see `total`."""
    values = total.copy()
    if terms.settings.noise == "server":
        noised = terms.extent.shared + terms.extent.side
        values[:noised] += gaussian(noise.generator("server", index), terms.noise_multiplier * clip, noised)
    return terms.in_clear(values, clip)
