"""A silo's own latents after a fit: draws of q(Z_L | Z_G), sharpened by importance resampling. For that silo's eyes."""

from __future__ import annotations

import torch
from torch import Tensor

from secure_fvi.algorithms.base import LocalFit, Posterior, Problem
from secure_fvi.compiled import over_draws
from secure_fvi.density import Params
from secure_fvi.errors import InputError
from secure_fvi.families import rows as gaussian_rows
from secure_fvi.silo import Silo


class LocalPosterior:
    """The posterior of one silo's record-level and silo-level sites, given the global posterior."""

    def __init__(self, silo: Silo, problem: Problem, posterior: Posterior) -> None:
        self._silo, self._problem, self._posterior = silo, problem, posterior

    def __repr__(self) -> str:
        return f"LocalPosterior('{self._silo.name}', {self._silo.size} records)"

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` joint draws of the silo's sites, in the model's own space.

        Record sites have shape (n, N_j, ...), silo sites (n, ...). With K importance samples each record's latent is
        one of K, drawn by its weight, as in the bound that was fitted.
        """
        if n < 1:
            raise InputError(f"the number of draws must be at least 1, not {n}")
        silo, problem, view = self._silo, self._problem, self._silo.view
        fit: LocalFit = silo.program.local_fit(silo.local)
        layout, samples, theta = problem.layout, fit.importance_samples, self._posterior.theta
        rng = torch.Generator().manual_seed(seed)
        rows = len(view.weights)

        def noise(*shape: int) -> Tensor:
            return torch.randn(n, *shape, generator=rng, dtype=torch.float64).to(problem.device, problem.dtype)

        uniform = torch.rand(n, samples, rows, generator=rng, dtype=torch.float64).to(problem.device, problem.dtype)

        def one(z_global: Tensor, eps: Tensor, eps_silo: Tensor, uniform: Tensor) -> Params:
            shift = z_global - self._posterior.eta["loc"]
            silo_moments = fit.silo_family.moments(fit.silo_params, {}, {}, z_global, shift)
            z_silo = gaussian_rows.transform(silo_moments, eps_silo)[0]
            silo_shift = z_silo - fit.silo_params["loc"][0] if fit.silo_params else z_silo
            moments = fit.family.moments(fit.params, theta, view.rows, z_global, torch.cat([shift, silo_shift]))
            z = gaussian_rows.transform(moments, eps)
            log_w = torch.stack(
                [problem.density.evaluate(z_global, z_silo, zk, theta, view.rows).records for zk in z.unbind(0)]
            ) - gaussian_rows.log_prob(moments, z)
            # The largest of log w_k plus Gumbel noise is a draw by weight, without a loop over records.
            chosen = (log_w - torch.log(-torch.log(uniform))).argmax(0)
            z = torch.take_along_dim(z, chosen[None, :, None], 0)[0]
            return problem.density.constrain_local(z_global, z_silo, z, theta, view.rows)

        draws = over_draws(
            one,
            self._posterior.draws(n, seed),
            noise(samples, rows, layout.size("record")),
            noise(1, layout.size("silo")),
            uniform,
        )
        roles = {site.name: site.role for site in layout.sites}
        # The last row is the spare one, which is no record.
        return {name: v[:, : silo.size] if roles[name] == "record" else v for name, v in draws.items()}
