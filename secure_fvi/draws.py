"""Draws of a posterior: of global sites, which everyone may see, and of one silo's own, which are for that silo."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secure_fvi.algorithms.base import LocalFit, Posterior, Problem
from secure_fvi.compiled import over_draws
from secure_fvi.density import Params
from secure_fvi.errors import InputError
from secure_fvi.families import conditional as gaussian_rows
from secure_fvi.silo import Silo
from secure_fvi.trees import stacked

#: Numbers of all draws together that fit well into memory.
NUMBERS_AT_ONCE = 20_000_000


class SitePosterior(NamedTuple):
    """Mean and standard deviation of a global site in the model's own space, in the site's shape."""

    mean: Tensor
    sd: Tensor


class SitePosteriors(dict[str, SitePosterior]):
    """Posteriors by site; a name that does not exist is answered with those that do."""

    def __missing__(self, name: str) -> SitePosterior:
        raise InputError(f"no global site '{name}'; there are: {', '.join(self) or 'none'}")


def draws_that_fit(most: int, least: int, size: int) -> int:
    """`most` draws, or fewer of so many numbers (`size`) each that they would not fit into memory; `least` at least."""
    return min(most, max(least, NUMBERS_AT_ONCE // max(1, size)))


def check_draws(n: int) -> None:
    """Raise InputError for what is no number of draws."""
    if not isinstance(n, numbers.Integral) or isinstance(n, bool) or n < 1:
        raise InputError(f"the number of draws must be a whole number of at least 1, not {n!r}")


def draw_global(
    problem: Problem, posterior: Posterior, n: int, seed: int, sites: Collection[str] | None = None
) -> Params:
    """Draws of q(Z_G), constrained, (n, *shape) a site; of `sites` alone, where the others would only take memory."""
    check_draws(n)
    rng = torch.Generator().manual_seed(seed)
    most = max(1, NUMBERS_AT_ONCE // max(1, posterior.family.noise_size))
    parts = []
    for start in range(0, n, most):
        z = posterior.draws(min(most, n - start), rng)
        found = over_draws(lambda z: problem.density.constrain(z, posterior.theta)[0], z)
        parts.append({name: v for name, v in found.items() if sites is None or name in sites})
    return stacked(parts)


def to_arviz(draws: Mapping[str, Tensor], about: Mapping[str, str], log_likelihood: Tensor | None = None) -> Any:
    """An `arviz.InferenceData` of one chain of draws (n, *shape) a site, and of the log likelihood (n, N) of records
    where it is given; `about` are its attributes. Raises InputError without arviz."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of arviz 1, which is another package's
            import arviz
    except ImportError:
        raise InputError("to_arviz needs arviz: pip install 'arviz<1'") from None
    if not hasattr(arviz, "InferenceData"):
        raise InputError(f"to_arviz needs arviz before version 1, not {arviz.__version__}: pip install 'arviz<1'")

    def chain(values: Mapping[str, Tensor]) -> dict[str, Any]:
        return {name: value.detach().cpu().unsqueeze(0).numpy() for name, value in values.items()}

    given = {} if log_likelihood is None else {"log_likelihood": chain({"records": log_likelihood})}
    found = arviz.from_dict(posterior=chain(draws), **given)
    found.posterior.attrs.update(about)
    return found


# ---- A silo's own latents after a fit: draws of q(Z_L | Z_G), sharpened by importance resampling. For it alone ----


class LocalPosterior:
    """The posterior of one silo's record-level and silo-level sites, given the global posterior."""

    def __init__(self, silo: Silo, problem: Problem, posterior: Posterior) -> None:
        self._silo, self._problem, self._posterior = silo, problem, posterior

    def __repr__(self) -> str:
        return f"LocalPosterior('{self._silo.name}', {self._silo.size} records)"

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` joint draws of the silo's sites, in the model's own space.

        Record sites have shape (n, N_j, ...), silo sites (n, ...). With K importance samples each record's latent is
        one of K, drawn by its weight, as in the bound that was fitted. Discrete sites, which the fit summed out, are
        drawn given all others.
        """
        layout, size = self._problem.layout, self._silo.size
        values = len(self._problem.density.chosen())

        def one(z: _Joint, uniform: Tensor, choose: Tensor) -> Params:
            # The largest of log w_k plus Gumbel noise is a draw by weight, without a loop over records.
            chosen = (z.log_weights - torch.log(-torch.log(uniform))).argmax(0)
            z_record = torch.take_along_dim(z.records, chosen[None, :, None], 0)[0]
            theta, rows = self._posterior.theta, self._silo.view.rows
            at = (z.shared, z.silo, z_record, theta, rows)
            found = self._problem.density.constrain_local(*at)
            if layout.choices:
                terms, options = self._problem.density.by_choice(*at)
                best = (terms - torch.log(-torch.log(choose))).argmax(0)
                for name, _ in layout.choices:
                    each = torch.stack([option[name] for option in options])
                    found[name] = torch.take_along_dim(each, best.reshape(1, -1, *[1] * (each.dim() - 2)), 0)[0]
            return found

        draws = self._over_draws(one, n, seed, self._fit.importance_samples, values)
        by_record = {s.name for s in layout.of("record")} | {name for name, _ in layout.choices}
        # The last row is the spare one, which is no record.
        return {name: v[:, :size] if name in by_record else v for name, v in draws.items()}

    def log_likelihood(self, n: int = 1000, seed: int = 0, samples: int = 50) -> Tensor:
        """log p(y_i | Z_G, Z_S) of each of the silo's records at `n` draws of Z_G from q: (n, N_j), in nats.

        The draws of Z_G are those of `Result.sample(n, seed)` where the result was not refined. A record's own latents
        are integrated out, by `samples` importance draws from its q (the estimate of p is unbiased), discrete ones
        summed out: what leave-one-out of whole records takes. It is about single records, for the silo's eyes alone:
        nothing is sent, and no privacy guarantee of the fit covers it.
        """
        if samples < 1:
            raise InputError(f"the number of importance samples must be at least 1, not {samples}")
        samples = samples if self._problem.layout.size("record") else 1

        def one(z: _Joint, uniform: Tensor, choose: Tensor) -> Params:
            return {"records": torch.logsumexp(z.log_weights, 0) - math.log(len(z.log_weights))}

        return self._over_draws(one, n, seed, samples, 1)["records"][:, : self._silo.size]

    def to_arviz(self, n: int = 1000, seed: int = 0, samples: int = 50) -> Any:
        """An `arviz.InferenceData` of `n` draws of the global sites, with this silo's `log_likelihood` at them, as
        `arviz.loo` takes it. For the silo's eyes alone. Raises InputError without arviz."""
        draws = draw_global(self._problem, self._posterior, n, seed)
        return to_arviz(draws, {"silo": self._silo.name}, self.log_likelihood(n, seed, samples))

    @property
    def _fit(self) -> LocalFit:
        found: LocalFit = self._silo.program.local_fit(self._silo.local)
        return found

    def _over_draws(
        self, one: Callable[[_Joint, Tensor, Tensor], Params], n: int, seed: int, samples: int, values: int
    ) -> Params:
        """What `one` makes of each of `n` joint draws, with `samples` draws of every record's latents, and of uniform
        numbers: (samples, N + 1) and (values, N + 1)."""
        check_draws(n)
        problem, view, fit = self._problem, self._silo.view, self._fit
        layout, theta = problem.layout, self._posterior.theta
        rng = torch.Generator().manual_seed(seed)
        rows = len(view.weights)

        def made(how: Callable[..., Tensor], *shape: int) -> Tensor:
            return how(*shape, generator=rng, dtype=torch.float64).to(problem.device, problem.dtype)

        def joint(z_global: Tensor, eps: Tensor, eps_silo: Tensor, uniform: Tensor, choose: Tensor) -> Params:
            shift = z_global - self._posterior.eta["loc"]
            silo_moments = fit.silo_family.moments(fit.silo_params, {}, {}, z_global, shift)
            z_silo = gaussian_rows.transform(silo_moments, eps_silo)[0]
            silo_shift = z_silo - fit.silo_params["loc"][0] if fit.silo_params else z_silo
            moments = fit.family.moments(fit.params, theta, view.rows, z_global, torch.cat([shift, silo_shift]))
            z = gaussian_rows.transform(moments, eps)
            log_w = torch.stack(
                [problem.density.evaluate(z_global, z_silo, zk, theta, view.rows).records for zk in z.unbind(0)]
            ) - gaussian_rows.log_prob(moments, z)
            return one(_Joint(z_global, z_silo, z, log_w), uniform, choose)

        z, parts = self._posterior.draws(n, seed), []
        most = max(1, NUMBERS_AT_ONCE // (samples * rows * max(1, layout.size("record"))))
        for start in range(0, n, most):
            some = z[start : start + most]
            count = len(some)
            uniform = made(torch.rand, count, samples, rows)
            eps = made(torch.randn, count, samples, rows, layout.size("record"))
            eps_silo = made(torch.randn, count, 1, layout.size("silo"))
            parts.append(over_draws(joint, some, eps, eps_silo, uniform, made(torch.rand, count, values, rows)))
        return stacked(parts)


class _Joint(NamedTuple):
    """One draw of Z_G and Z_S, and K of each record's latents."""

    shared: Tensor  # (n_global,)
    silo: Tensor  # (n_silo,)
    records: Tensor  # (K, N + 1, n_record)
    log_weights: Tensor  # (K, N + 1): log p(y_i, Z_Li | Z_G, Z_S) - log q(Z_Li), nats
