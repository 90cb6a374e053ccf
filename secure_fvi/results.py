"""What a fit returns: the posterior of the global sites, and what is needed to draw from it and to predict."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from secure_fvi.algorithms.base import LocalFit, Posterior, Problem, Verdict
from secure_fvi.compiled import over_draws
from secure_fvi.density import Params
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.families import conditional as gaussian_rows
from secure_fvi.files import write_atomically
from secure_fvi.silo import Silo
from secure_fvi.summary import (
    LEVELS,
    Correlations,
    Summary,
    correlated,
    quantiles,
    resampled,
    summarised,
    to_arviz,
)

if TYPE_CHECKING:
    from secure_fvi.prediction import Personal


_MOMENT_DRAWS = 20_000
_MOMENT_SEED = 20_230_208
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


def assessed(verdict: Verdict, algorithm: str, rounds: int) -> dict[str, Any]:
    """`converged` and `convergence` of a result. Warns with SecureFVIWarning where the result deserves less trust."""
    if verdict.warns:
        how = "without converging" if verdict.converged is False else "unassessed"
        warnings.warn(
            f"{algorithm} ended after {rounds} rounds {how}: {verdict.reason}", SecureFVIWarning, stacklevel=4
        )
    return {
        "converged": verdict.converged,
        "convergence": {"reason": verdict.reason, "moving": verdict.moving, **verdict.details},
    }


@dataclass(frozen=True, repr=False, kw_only=True)
class RunSummary:
    """What every fit reports: the content of result.json. All of it follows from broadcasts and totals."""

    algorithm: str
    seed: int
    silos: list[str]
    rounds: int
    seconds: float
    # nats; mean over the last rounds (with importance samples: the tighter bound); None: not released
    elbo: float | None
    converged: bool | None  # None: not assessed
    convergence: dict[str, Any]  # "reason", one line, and the numbers that the verdict rests on
    posterior: SitePosteriors
    theta: Params  # in the model's own space
    metrics: dict[str, Any]
    aggregation: dict[str, Any]
    privacy: dict[str, Any] | None

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` draws of every global site, (n, *shape) each, in the model's own space. Everyone may see them."""
        raise NotImplementedError

    def summary(self) -> Summary:
        """A row each scalar of the global sites: mean, sd, 5, 50 and 95% quantiles, in the model's own space and units.

        The first line says whether the run converged and, if not, why. From the weighted draws of `refined` where there
        are any, with their k-hat and effective sample size; otherwise from q, by its normal quantiles for real-valued
        sites and by 20,000 draws for others (standard error of the 5% quantile: .015 sd). Latents of silos and records
        have no row: they stay at their silos. What is shown follows from broadcasts and totals; everyone may see it.
        """
        refined = getattr(self, "refined", None)
        if refined is not None:
            spread: Params | None = {site: quantiles(d, refined.weights) for site, d in refined.draws.items()}
        else:
            spread = self._quantiles()
        return summarised(self, spread, refined)

    def correlations(self, sites: Collection[str] | None = None) -> Correlations:
        """Posterior correlations between the scalars of the global sites, or of `sites`, in the model's own space.

        From the draws of `summary`; standard error .007 or less where these are 20,000. Raises InputError for a site
        that there is not, a point, which has none, and more than 2,000 scalars. Everyone may see them.
        """
        names = list(self.posterior) if sites is None else list(sites)
        for name in names:
            self.posterior[name]  # raises for one that there is not
        draws, weights = self._weighted(names)
        return correlated(draws, weights)

    def to_arviz(self, n: int = 4000, seed: int = 0) -> Any:
        """An `arviz.InferenceData` with `n` draws of the global sites, as one chain: `arviz.plot_posterior` and others
        take it. No data are in it. Raises InputError without arviz (`pip install 'arviz<1'`). Everyone may see it.
        """
        return to_arviz(self.sample(n, seed), self)

    def _quantiles(self) -> Params | None:
        """`summary.LEVELS` of each site, (3, *shape); None where the posterior is a point."""
        draws, weights = self._weighted(list(self.posterior))
        return {site: quantiles(value, weights) for site, value in draws.items()}

    def _weighted(self, sites: Collection[str]) -> tuple[Params, Tensor]:
        """Draws of some sites, (S, *shape), and weights (S,) that add up to 1."""
        refined = getattr(self, "refined", None)
        if refined is not None:
            return {name: refined.draws[name] for name in sites}, refined.weights
        draws = self.sample(_moment_draws(self.posterior[name].mean.numel() for name in sites), _MOMENT_SEED)
        return {name: draws[name] for name in sites}, equal_weights(draws)

    def __repr__(self) -> str:
        sites = ", ".join(self.posterior)
        return (
            f"{type(self).__name__}({self.algorithm}, {self.rounds} rounds, converged={self.converged}, sites: {sites})"
        )

    def to_json(self) -> dict[str, Any]:
        """The content of result.json."""
        return {
            "algorithm": self.algorithm,
            "seed": self.seed,
            "silos": self.silos,
            "rounds": self.rounds,
            "seconds": self.seconds,
            "elbo": self.elbo,
            "converged": self.converged,
            "convergence": self.convergence,
            "posterior": {s: {"mean": p.mean.tolist(), "sd": p.sd.tolist()} for s, p in self.posterior.items()},
            "theta": {name: value.tolist() for name, value in self.theta.items()},
            "metrics": self.metrics,
            "aggregation": self.aggregation,
            "privacy": self.privacy,
        }


@dataclass(frozen=True, repr=False, kw_only=True)
class Result(RunSummary):
    """A fitted model. All but `local` follows from broadcasts and totals."""

    problem: Problem = field(repr=False)
    variational: Posterior = field(repr=False)
    local: Mapping[str, LocalPosterior]  # by silo, where the silos are in this process; never saved

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` draws of every global site, (n, *shape) each, in the model's own space, independent given q; where the
        result was refined, by weight from its draws. Raises InputError for n < 1. Everyone may see them."""
        refined = getattr(self, "refined", None)
        if refined is not None and n >= 1:
            return resampled(refined, n, seed)
        return draw_global(self.problem, self.variational, n, seed)

    def _quantiles(self) -> Params | None:
        if self.variational.family.noise_size == 0:
            return None
        real = _real_sites(self.problem)
        others = [site for site in self.posterior if site not in real]
        found = {}
        if others:
            draws, weights = self._weighted(others)
            found = {site: quantiles(draws[site], weights) for site in others}
        normal = torch.special.ndtri(torch.tensor(LEVELS, dtype=torch.float64) / 100)
        for site in real:  # exact: q is normal there
            mean, sd = self.posterior[site]
            found[site] = mean + normal.to(mean).reshape(-1, *[1] * mean.dim()) * sd
        return found

    def _weighted(self, sites: Collection[str]) -> tuple[Params, Tensor]:
        if self.variational.family.noise_size == 0:
            raise InputError(f"{self.algorithm} found a point, which has no correlations")
        if getattr(self, "refined", None) is not None:
            return super()._weighted(sites)
        n = _moment_draws(self.posterior[name].mean.numel() for name in sites)
        draws = draw_global(self.problem, self.variational, n, _MOMENT_SEED, sites)
        return {name: draws[name] for name in sites}, equal_weights(draws)

    def predict(self, data: Mapping[str, Any], n: int = 200, seed: int = 0) -> Params:
        """Posterior predictive draws for new records, (n, ...) for every observed site.

        `data` holds the program's arguments; what the program observes is replaced by draws, so its values do not
        matter. The records' own latents are drawn from their prior given the global draw.
        """
        from secure_fvi.prediction import predict

        return predict(self.problem, self.variational, data, n, seed)

    def log_predictive(self, data: Mapping[str, Any], n: int = 200, seed: int = 0) -> Tensor:
        """Log predictive density of each record of `data`, in nats (N,): log of the mean over `n` draws.

        Latent sites of a record or a silo are drawn from their priors given the global sites. Same requirements as
        `predict`.
        """
        from secure_fvi.prediction import log_predictive

        return log_predictive(self.problem, self.variational, data, n, seed)

    def personalise(self, unlabelled: Mapping[str, Tensor]) -> Personal:
        """The model as one client sees it, from its records without labels; for fits by FedVI.

        It does not matter whether the client took part. Its `predict` and `log_predictive` are those above.
        """
        from secure_fvi.prediction import personalise

        return personalise(self.problem, self.variational, unlabelled)

    def save(self, directory: str | Path) -> None:
        """Write posterior.safetensors (eta_G, theta and site moments) and result.json, each atomically."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"eta/{k}": v for k, v in self.variational.eta.items()}
        tensors |= {f"theta/{k}": v for k, v in self.variational.theta.items()}
        for site, moments in self.posterior.items():
            tensors |= {f"mean/{site}": moments.mean, f"sd/{site}": moments.sd}
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        write_atomically(directory / "posterior.safetensors", save(tensors, {"family": self.variational.family.name}))
        write_atomically(directory / "result.json", json.dumps(self.to_json(), indent=2).encode())


def draw_global(
    problem: Problem, posterior: Posterior, n: int, seed: int, sites: Collection[str] | None = None
) -> Params:
    """Draws of q(Z_G), constrained, (n, *shape) a site; of `sites` alone, where the others would only take memory."""
    if n < 1:
        raise InputError(f"the number of draws must be at least 1, not {n}")
    rng = torch.Generator().manual_seed(seed)
    most = max(1, NUMBERS_AT_ONCE // max(1, posterior.family.noise_size))
    parts = []
    for start in range(0, n, most):
        z = posterior.draws(min(most, n - start), rng)
        found = over_draws(lambda z: problem.density.constrain(z, posterior.theta)[0], z)
        parts.append({name: v for name, v in found.items() if sites is None or name in sites})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def equal_weights(draws: Params) -> Tensor:
    """(S,) of S draws, that add up to 1."""
    some = next(iter(draws.values()))
    return some.new_full((len(some),), 1 / len(some), dtype=torch.float64)


def _moment_draws(sizes: Iterable[int]) -> int:
    """As many as `summarise` takes, fewer of so many numbers that they would not fit into memory."""
    return min(_MOMENT_DRAWS, max(1000, NUMBERS_AT_ONCE // max(1, sum(sizes))))


def _real_sites(problem: Problem) -> set[str]:
    """Global sites whose own space is that of q."""
    return {s.name for s in problem.layout.of("global") if "Real" in s.support}


def summarise(problem: Problem, posterior: Posterior) -> SitePosteriors:
    """Moments of each global site: exact for real-valued sites and for a point, by a fixed set of draws for others."""
    if posterior.family.noise_size == 0:
        at, _ = problem.density.constrain(posterior.eta["loc"], posterior.theta)
        return SitePosteriors({name: SitePosterior(v, torch.zeros_like(v)) for name, v in at.items()})
    sd = posterior.family.stddev(posterior.eta)
    exact_mean = problem.layout.split(posterior.eta["loc"], "global")
    exact_sd = problem.layout.split(sd, "global")
    real = _real_sites(problem)
    others = exact_mean.keys() - real
    draws = draw_global(problem, posterior, _MOMENT_DRAWS, _MOMENT_SEED, others) if others else {}
    return SitePosteriors(
        {
            name: SitePosterior(exact_mean[name], exact_sd[name])
            if name in real
            else SitePosterior(draws[name].mean(0), draws[name].std(0))
            for name in exact_mean
        }
    )


# ----
# A silo's own latents after a fit: draws of q(Z_L | Z_G), sharpened by importance resampling. For that silo's eyes


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


def number_or_none(value: Any) -> float | None:
    """None for what was not released."""
    return float(value) if math.isfinite(value) else None
