"""What a fit returns: the posterior of the global sites, and what is needed to draw from it and to predict."""

from __future__ import annotations

import copy
import inspect
import json
import math
import pickle  # noqa: TID251 - written for the user's own processes, never read here
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from pyro.distributions import Unit
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from safetensors.torch import save
from torch import Tensor
from torch.distributions import transform_to

from secure_fvi.algorithms.base import Posterior, Problem, Verdict
from secure_fvi.algorithms.noise_aware import FEW_FAR, Clipped
from secure_fvi.checkpoints import text_of
from secure_fvi.compiled import over_draws
from secure_fvi.density import Params, param_constraint, param_start, running
from secure_fvi.discovery import kind_of
from secure_fvi.draws import (
    LocalPosterior,
    SitePosterior,
    SitePosteriors,
    check_draws,
    draw_global,
    draws_that_fit,
    to_arviz,
)
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.federated_model import FederatedModel, read_data
from secure_fvi.files import write_atomically
from secure_fvi.program_density import choice, has_no_density, observed_value, record_dim
from secure_fvi.randomness import seeded
from secure_fvi.summary import (
    LEVELS,
    Correlations,
    Summary,
    correlated,
    heading,
    of_draws,
    quantiles,
    summarised,
    weighted_moments,
)
from secure_fvi.trees import merge, plain

_R = TypeVar("_R")
#: Share of cut gradients, at most, over which a private result warns
#: (`test_where_many_gradients_are_cut_the_run_says_so`).
MANY_CUT = 0.1
#: Share of the clipping norm from which gradients have as good as all of it.
_WHOLE = 0.99
_MOMENT_DRAWS = 20_000
_MOMENT_SEED = 20_230_208


def assessed(verdict: Verdict, algorithm: str, rounds: int) -> dict[str, Any]:
    """`converged` and `convergence` of a result. Warns with SecureFVIWarning where the result deserves less trust."""
    if verdict.warns:
        how = "without converging" if verdict.converged is False else "unassessed"
        warnings.warn(f"{algorithm} ended after {rounds} rounds {how}: {verdict.said}", SecureFVIWarning, stacklevel=4)
    return {
        "converged": verdict.converged,
        "convergence": {"reason": verdict.said, "moving": verdict.moving, **verdict.details},
    }


def counting(server: Any, state: Any, found: Posterior) -> tuple[Posterior, dict[str, Any] | None]:
    """Under differential privacy `found` with the noise counted where it can be, and the job's claim, which says in
    "sds" whether it is: numbers, or why not. Without: `found` and None."""
    claim = server.claim()
    if claim is None:
        return found, None
    clipped = server.program.clipped(state)
    if clipped is not None:
        claim["clipped"] = {name: list(v) if isinstance(v, tuple) else v for name, v in clipped._asdict().items()}
        if (many := _many_cut(clipped, claim["clipping_norm"])) is not None:
            warnings.warn(many, SecureFVIWarning, stacklevel=4)
    counted = server.program.noise_aware(state)
    if isinstance(counted, str):
        declared = getattr(server.program.config, "least_information", None)
        unused = "" if declared is None else f"; least_information = {declared:g} was not used"
        return found, {**claim, "sds": {"count_noise": False, "because": counted + unused}}
    cut = number_or_none(counted.cut)
    said = {
        "count_noise": True,
        "curvature_error": number_or_none(counted.error),
        "rounds": counted.rounds,
        "cut_at_most": cut,
    }
    if clipped is None and cut is not None and cut > MANY_CUT:
        warnings.warn(
            f"gradients of up to {cut:.0%} of records (or silos) are cut, if the model is right: "
            "where more are cut on one side than on the other, as in a logistic regression, means are off by more than "
            "sds say; take a longer clipping_norm",
            SecureFVIWarning,
            stacklevel=4,
        )
    if clipped is not None:
        said["cuts_counted"] = counted.pulled
    said["hidden"] = _named(server.program.problem, counted.hidden)
    if counted.assumed is not None:
        said["least_information"] = counted.assumed
    if counted.dropped is not None:
        said["ruled_out"] = counted.dropped
        warnings.warn(
            f"least_information = {counted.dropped:g} was not used: totals rule it out. Along some direction the data "
            "tell less, or gradients (of PVI sites) are cut that would tell more; intervals are those without it",
            SecureFVIWarning,
            stacklevel=4,
        )
    return found._replace(counted=counted), {**claim, "sds": said}


def _many_cut(found: Clipped, norm: float) -> str | None:
    """What to say where many gradients are known to be cut under a clipping norm; None: they are not. Rounds around q
    told it. Gradients have all of that norm but what else is said of a record has: curvature, objective, lengths."""
    left = min(norm, found.edges[found.unit])
    far, error = found.beyond(found.unit + 1)
    if found.share - 2 * found.error <= MANY_CUT and far - 2 * error <= FEW_FAR:
        return None
    return (
        f"{found.share:.0%} (+- {2 * found.error:.0%}) of records' gradients are longer than clipping_norm = {norm:g} "
        + (f"leaves them, {left:.3g}, " if left < _WHOLE * norm else "")
        + "and were cut: where more are cut on one side than on the other, as in a logistic regression, most of a "
        "rare outcome, or skewed residuals, or those that tell the sd of errors, means are off by more than sds say; "
        f"{found.advice(norm)}, or bring the response and columns to a scale near 1"
    )


def _named(problem: Problem, chosen: Tensor | None) -> list[str]:
    """The numbers of global sites that are chosen (n_global,): "beta[2]", or "sigma" of a site that is one number; of a
    formula's coefficients what its table calls them."""
    sites = {} if chosen is None else problem.layout.split(chosen, "global")
    return [
        problem.model.called(name, at) or name + (f"[{', '.join(map(str, at))}]" if at else "")
        for name, part in sites.items()
        for at in part.nonzero().tolist()
    ]


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
    posterior: SitePosteriors  # of a formula's standardised sites, as the program has them: see `sample`
    theta: Params  # in the model's own space
    metrics: dict[str, Any]
    aggregation: dict[str, Any]
    privacy: dict[str, Any] | None
    refined: Refined | None = None  # what `posterior` and `sample` go by then; `variational.eta` stays q's

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` draws of every global site, (n, *shape) each, in the model's own space. Of a formula these are its
        standardised sites, as in `posterior`, and no coefficients of the table: `named` makes those of them. Everyone
        may see them."""
        raise NotImplementedError

    def summary(self) -> Summary:
        """A row each scalar of the global sites: mean, sd, 5, 50 and 95% quantiles, in the model's own space and units.

        The first line says whether the run converged and, if not, why. From the weighted draws of `refined` where there
        are any, with their k-hat and effective sample size; otherwise from q, by its normal quantiles for real-valued
        sites and by 20,000 draws for others (standard error of the 5% quantile: .015 sd). Latents of silos and records
        have no row: they stay at their silos. What is shown follows from broadcasts and totals; everyone may see it.
        """
        read = self.readable()
        return summarised(self, self._quantiles()) if read is None else of_draws(self, *read)

    def correlations(self, sites: Collection[str] | None = None) -> Correlations:
        """Posterior correlations between the scalars of the global sites, or of `sites`, in the model's own space.

        From the draws of `summary`; standard error .007 or less where these are 20,000. Raises InputError for a site
        that there is not, a point, which has none, and more than 2,000 scalars. Everyone may see them.
        """
        read = self.readable()
        known = self.posterior if read is None else SitePosteriors(dict.fromkeys(read[0], None))  # type: ignore[arg-type]
        names = list(known) if sites is None else list(sites)
        for name in names:
            known[name]  # raises for one that there is not
        draws, weights = self._weighted(names) if read is None else ({name: read[0][name] for name in names}, read[1])
        return correlated(draws, weights)

    @property
    def noise_sd(self) -> Params | None:
        """Of each global site, by the names that users read, the part of its sd that the noise of privacy adds:
        sqrt(sd^2 - sd of the same data without noise^2). None where sds do not count it."""
        return None

    def readable(self) -> tuple[Params, Tensor] | None:
        """Draws of a formula's parameters by the user's names, in the user's units, and weights; None for a model whose
        sites users know, and for a point."""
        return None

    def to_arviz(self, n: int = 4000, seed: int = 0) -> Any:
        """An `arviz.InferenceData` with `n` draws of the global sites, as one chain: `arviz.plot_posterior` and others
        take it. No data are in it. Raises InputError without arviz (`pip install 'arviz<1'`). Everyone may see it.
        """
        about = {"algorithm": self.algorithm, "converged": str(self.converged), "summary": heading(self)}
        draws = self.sample(n, seed)
        return to_arviz(self.named(draws), about)

    def named(self, draws: Params) -> Params:
        """Draws, as of `sample`, under the names that users read: of a formula its coefficients and sds, in the units
        of its tables, as in `summary`. Others stay as they are."""
        return draws

    def _quantiles(self) -> Params | None:
        """`summary.LEVELS` of each site, (3, *shape); None where the posterior is a point."""
        draws, weights = self._weighted(list(self.posterior))
        return {site: quantiles(value, weights) for site, value in draws.items()}

    def _weighted(self, sites: Collection[str]) -> tuple[Params, Tensor]:
        """Draws of some sites, (S, *shape), and weights (S,) that add up to 1."""
        if self.refined is not None:
            return {name: self.refined.draws[name] for name in sites}, self.refined.weights
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


@dataclass(frozen=True, repr=False)
class Refined:
    """Weighted draws of the global sites, where they are the result in place of q(Z_G) (`algorithms.refining`)."""

    draws: Params  # (S, *shape) a site, in the model's own space
    weights: Tensor  # (S,) adding up to 1
    #: Pareto's, of the weights, or of them times squares of a number: under .7, or there were no such result.
    khat: float
    ess: float  # effective sample size, 1 / sum of squared weights
    log_evidence: float  # log p(y), nats
    integration_error: float  # sd over draws of what latents that were integrated out add by chance, nats

    def __repr__(self) -> str:
        return f"Refined({len(self.weights)} draws, k-hat {self.khat:.2f}, ess {self.ess:.0f})"


@dataclass(frozen=True, repr=False, kw_only=True)
class Result(RunSummary):
    """A fitted model. All but `local` follows from broadcasts and totals."""

    problem: Problem = field(repr=False)
    variational: Posterior = field(repr=False)
    replicated: Tensor | None = field(default=None, repr=False)  # (1 + replicates, numbers) of a check over all silos
    local: Mapping[str, LocalPosterior]  # by silo, where the silos are in this process; never saved

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` draws of every global site, (n, *shape) each, in the model's own space. Of a formula these are its
        standardised sites, as in `posterior`, and no coefficients of the table: `named` makes those of them. Raises
        InputError for n < 1. Everyone may see them."""
        return draw_global(self.problem, self.variational, n, seed)

    @property
    def unaware(self) -> SitePosteriors:
        """The moments of q as the run ended, which under differential privacy take its noise for data: `posterior` less
        what counts the noise, and without refined draws. Everyone may see them."""
        return summarise(self.problem, self.variational._replace(counted=None, refined=None))

    @property
    def noise_sd(self) -> Params | None:
        counted = self.variational.counted
        if counted is None:
            return None
        without = self.variational._replace(counted=counted._replace(covariance=counted.without))
        one = {site: moments.mean.unsqueeze(0) for site, moments in self.posterior.items()}
        if self.problem.model.readable(one) is None:
            bare = summarise(self.problem, without)
            both = {site: (moments.sd, bare[site].sd) for site, moments in self.posterior.items()}
        else:
            n = _moment_draws(moments.mean.numel() for moments in self.posterior.values())
            whole, less = (
                self.named(draw_global(self.problem, p, n, _MOMENT_SEED)) for p in (self.variational, without)
            )
            both = {name: (value.std(0), less[name].std(0)) for name, value in whole.items()}
        return {name: (sd.square() - less.square()).clamp(min=0).sqrt() for name, (sd, less) in both.items()}

    def named(self, draws: Params) -> Params:
        found = self.problem.model.readable(draws)
        return draws if found is None else found

    def readable(self) -> tuple[Params, Tensor] | None:
        if self.variational.family.noise_size == 0 or not self.posterior:
            return None
        one = {site: moments.mean.unsqueeze(0) for site, moments in self.posterior.items()}
        if self.problem.model.readable(one) is None:
            return None
        draws, weights = self._weighted(list(self.posterior))
        return self.named(draws), weights

    def _quantiles(self) -> Params | None:
        if self.variational.family.noise_size == 0:
            return None
        real = _real_sites(self.problem) if self.refined is None else set[str]()
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
        if self.refined is not None:
            return super()._weighted(sites)
        n = _moment_draws(self.posterior[name].mean.numel() for name in sites)
        draws = draw_global(self.problem, self.variational, n, _MOMENT_SEED, sites)
        return {name: draws[name] for name in sites}, equal_weights(draws)

    def predict(self, data: Mapping[str, Any], n: int = 200, seed: int = 0) -> Params:
        """`n` posterior predictive draws for new records, (n, ...) for every observed and deterministic site.

        `data` holds the program's columns. What the program observes is replaced by draws: its values do not matter,
        and it may be left out, or None, where the program takes its sizes from other columns (`obs=y` with y None).
        Of a formula it is a table as silos have it, and the draws are (n, rows), of the response alone, in its unit, of
        a category the places of its levels.
        The records' own latents are drawn from their prior given the global draw. Raises InputError for columns of
        other shapes than the fit's. Whoever has the columns sees the draws; nothing is sent.
        """

        problem, rows, read = self._for_new(data, False)
        found: Params = read(predict(problem, self.variational, rows, n, seed))
        return found

    def _for_new(self, data: Any, scored: bool) -> tuple[Problem, Any, Callable[[Params], Params]]:
        model, rows, read = self.problem.model.for_new(data, scored)
        if rows is data:
            return self.problem, data, read
        schema = read_data(rows, "predict", self.problem.dtype)[0].to(self.problem.device)
        return self.problem._replace(model=model, schema=schema), rows, read

    def log_predictive(self, data: Mapping[str, Any], n: int = 200, seed: int = 0) -> Tensor:
        """Log predictive density of each record of `data`, in nats (N,): log of the mean over `n` draws.

        Latent sites of a record or a silo are drawn from their priors given the global sites; discrete ones are summed
        out. All columns of the fit are needed. Records of a formula stand in the order of their groups' names.
        """

        problem, rows, _ = self._for_new(data, True)
        return log_predictive(problem, self.variational, rows, n, seed)

    def personalise(self, unlabelled: Mapping[str, Tensor]) -> Personal:
        """The model as one client sees it, from its records without labels; for fits by FedVI.

        It does not matter whether the client took part. Its `predict` and `log_predictive` are those above.
        """

        return personalise(self.problem, self.variational, unlabelled)

    def to_json(self) -> dict[str, Any]:
        """The content of result.json: `RunSummary`'s, of a formula its parameters by the user's names, and what
        `sf.load` needs: sites, shapes and types, no value."""
        problem, layout, identity = self.problem, self.problem.layout, self.problem.model.identity
        counted = self.variational.counted
        read = self.readable()
        named: dict[str, Any] = {}
        if read is not None:
            named = {"parameters": of_draws(self, *read).to_dict(), **problem.model.told(self)}
        apart = self.noise_sd
        if apart is not None:
            named["noise"] = {
                "sd": {name: value.tolist() for name, value in apart.items()},
                "unaware": {s: {"mean": p.mean.tolist(), "sd": p.sd.tolist()} for s, p in self.unaware.items()},
            }
        return (
            super().to_json()
            | named
            | {
                "saved": (program_said(problem.model) if identity is None else {"model": identity})
                | {
                    "format": FORMAT,
                    "family": self.variational.family.name,
                    "dtype": str(problem.dtype),
                    "sites": [list(site) for site in layout.sites],
                    "theta": [list(point) for point in layout.theta],
                    "fields": [[name, list(shape), str(dtype)] for name, shape, dtype in problem.schema.fields],
                    "shared": sorted(problem.schema.constants),
                    "refined": refined_numbers(self.variational),
                    "counted": None
                    if counted is None
                    else {"error": number_or_none(counted.error), "rounds": counted.rounds},
                }
            }
        )

    def save(self, directory: str | Path) -> None:
        """Write posterior.safetensors (eta_G, theta and site moments) and result.json, each atomically; `sf.load` opens
        them. No record, no latent of a silo or a record and no program is in them; everyone may see them."""
        write_result(Path(directory), self)

    def __reduce__(self) -> tuple[Any, ...]:
        """For `pickle`, to hand a result to processes of one's own: without `local`, which holds silos' data."""
        check_picklable(self.problem.model)
        return revived, (type(self), {**vars(self), "local": ELSEWHERE})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return deep_copied(self, memo)


#: Of the files of a result. Another number is not read.
FORMAT = 1


def program_said(model: FederatedModel) -> dict[str, Any]:
    """The program of a model by its code and what that names, with the Python that wrote it so: what a saved result
    says, and `sf.load` holds the model that it is given against. Nothing of one that is no plain function."""
    if not isinstance(model.fn, types.FunctionType):
        return {}
    return {"program": {"digest": text_of(model.fn), "python": "{}.{}".format(*sys.version_info)}}


class _Elsewhere(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise InputError(f"the latents of silo '{name}' are at that silo: neither saved nor pickled")


#: Tensors of `NoiseAware` in such a file.
COUNTED = ("mean", "covariance", "without")
#: `local` of a result that comes from a file or another process.
ELSEWHERE: Mapping[str, Any] = _Elsewhere()


def write_result(directory: Path, result: Any) -> None:
    """posterior.safetensors, then result.json, of a result that has q(Z_G); each atomically."""
    directory = made_folder(directory)
    tensors = merge(eta=result.variational.eta, theta=result.variational.theta)
    for site, moments in result.posterior.items():
        tensors |= {f"mean/{site}": moments.mean, f"sd/{site}": moments.sd}
    refined, counted = result.variational.refined, result.variational.counted
    if refined is not None:
        tensors |= {"refined/z": refined.z, "refined/weights": refined.weights}
    if counted is not None:
        tensors |= {f"counted/{name}": getattr(counted, name) for name in COUNTED}
    family = {"family": result.variational.family.name}
    write_atomically(directory / "posterior.safetensors", save(plain(tensors), family))
    write_atomically(directory / "result.json", json.dumps(result.to_json(), indent=2).encode())


def refined_numbers(posterior: Posterior) -> dict[str, float] | None:
    """What is said of a posterior's weighted draws, k-hat and the like; None where there are none."""
    if posterior.refined is None:
        return None
    return {name: value for name, value in posterior.refined._asdict().items() if not isinstance(value, Tensor)}


def check_picklable(model: FederatedModel) -> None:
    """Raise InputError for a program that `pickle` cannot name: a lambda, or a function within another."""
    try:
        pickle.dumps(model)
    except Exception:
        name = getattr(model.fn, "__qualname__", type(model.fn).__name__)
        raise InputError(
            f"the result cannot be pickled with its model, '{name}': define the program at the top level of a module, "
            "not as a lambda or within a function; or use result.save(folder) and sf.load(folder)"
        ) from None


def revived(cls: type[Any], fields: dict[str, Any]) -> Any:
    """An instance of a frozen dataclass with these fields."""
    found = object.__new__(cls)
    vars(found).update(fields)
    return found


def deep_copied(result: _R, memo: dict[int, Any]) -> _R:
    """A copy whose numbers are its own; the problem, and the silos where they are in this process, are shared."""
    same = {"problem", "local", "config", "secure_sum"}
    fields = {name: v if name in same else copy.deepcopy(v, memo) for name, v in vars(result).items()}
    found: _R = revived(type(result), fields)
    return found


def made_folder(directory: str | Path) -> Path:
    """The folder, made where there is none. Raises InputError where it cannot be one."""
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"'{path}' cannot be a folder: {error.strerror}") from None
    return path


def equal_weights(draws: Params) -> Tensor:
    """(S,) of S draws, that add up to 1."""
    some = next(iter(draws.values()))
    return some.new_full((len(some),), 1 / len(some), dtype=torch.float64)


def _moment_draws(sizes: Iterable[int]) -> int:
    """As many as `summarise` takes, fewer of so many numbers that they would not fit into memory."""
    return draws_that_fit(_MOMENT_DRAWS, 1000, sum(sizes))


def _real_sites(problem: Problem) -> set[str]:
    """Global sites whose own space is that of q."""
    return {s.name for s in problem.layout.of("global") if "Real" in s.support}


def refined_draws(problem: Problem, posterior: Posterior) -> Refined | None:
    """The weighted draws of `posterior` in the model's own space, where it has any."""
    if posterior.refined is None:
        return None
    r = posterior.refined
    draws = over_draws(lambda z: problem.density.constrain(z, posterior.theta)[0], r.z.to(posterior.eta["loc"]))
    return Refined(draws, r.weights, r.khat, r.ess, r.log_evidence, r.integration_error)


def summarise(problem: Problem, posterior: Posterior, refined: Refined | None = None) -> SitePosteriors:
    """Moments of each global site: exact for real-valued sites and for a point, by a fixed set of draws for others; by
    weighted draws where there are such."""
    if refined is not None:
        return SitePosteriors(
            {k: SitePosterior(*weighted_moments(v, refined.weights)) for k, v in refined.draws.items()}
        )
    if posterior.family.noise_size == 0:
        at, _ = problem.density.constrain(posterior.eta["loc"], posterior.theta)
        return SitePosteriors({name: SitePosterior(v, torch.zeros_like(v)) for name, v in at.items()})
    sd, loc = posterior.family.stddev(posterior.eta), posterior.eta["loc"]
    if posterior.counted is not None:
        sd, loc = posterior.counted.covariance.diagonal().sqrt().to(loc), posterior.counted.mean.to(loc)
    exact_mean = problem.layout.split(loc, "global")
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


def number_or_none(value: Any) -> float | None:
    """None for what was not released."""
    return float(value) if math.isfinite(value) else None


# ---- Predictive draws and densities: the program run forward under draws of the global sites ----


class _Forward(Messenger):  # type: ignore[misc]
    """Global sites take given values, all other latent sites are drawn; observed ones are drawn, or scored."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        theta: Mapping[str, Tensor] | None,
        record_plate: str | None,
        latents: Collection[str] = (),
        chosen: Mapping[str, int] | None = None,
    ) -> None:
        """theta: None for each `pyro.param` as it begins. record_plate: of what is scored; None: nothing is. latents:
        what was not observed in the fit; all else is now, whatever stands in `obs`. chosen: values of discrete sites,
        which are scored."""
        super().__init__()
        self.values, self.theta, self.record_plate = values, theta, record_plate
        self.latents, self.chosen = latents, chosen or {}
        self.observed: Params = {}
        self.drawn: Params = {}  # latent sites
        self.log_prob: list[Tensor] = []  # (N,) each; with a record plate only

    def _pyro_param(self, msg: Any) -> None:
        if self.theta is None:
            msg["value"] = param_start(msg)
        else:
            msg["value"] = transform_to(param_constraint(msg))(self.theta[msg["name"]])

    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        scored = self.record_plate is not None
        dim = record_dim(msg, self.record_plate) if self.record_plate is not None else 0
        # What stands outside the record plate is no part of a record's density.
        if isinstance(fn, _Subsample) or (isinstance(fn, Unit) and not dim) or (scored and has_no_density(msg)):
            return
        if has_no_density(msg):  # deterministic: its value follows from the others, in the shape that it has
            self.observed[name] = msg["value"]
        elif name in self.values:
            msg["value"] = self.values[name]
        elif name in self.chosen:
            msg["value"] = choice(fn, self.chosen[name])
            self._score(fn.log_prob(msg["value"]), dim)
        elif name in self.latents or (not msg["is_observed"] and scored):
            msg["value"] = self.drawn[name] = _drawn(fn, name)
        elif not scored:
            msg["value"] = self.observed[name] = _drawn(fn, name)
        else:
            self._score(scale_and_mask(fn.log_prob(observed_value(msg)), msg["scale"], msg["mask"]), dim)
        msg["done"] = True

    def _score(self, term: Tensor, dim: int) -> None:
        self.log_prob.append(term.movedim(dim, 0).reshape(term.shape[dim], -1).sum(1))


def _drawn(fn: Any, name: str) -> Tensor:
    try:
        value: Tensor = fn.sample()
    except NotImplementedError:
        raise InputError(
            f"site '{name}' ({kind_of(fn)}) has a density and no draws: a prior that is improper, or an Unit factor, "
            "says nothing of what would be seen; give it a distribution that can be drawn"
        ) from None
    return value


#: A draw of the silo's own sites that goes with a draw of Z_G, from a seed.
Local = Callable[[Tensor, int], Params]


def predict(
    problem: Problem, posterior: Posterior, data: Mapping[str, Any], n: int, seed: int, local: Local | None = None
) -> Params:
    """See `Result.predict`. local: where a silo's own sites come from; None: their prior."""
    draws = list(replicates(problem, posterior, data, n, seed, local))
    return {name: torch.stack([d[name] for d in draws]) for name in draws[0]}


def replicates(
    problem: Problem, posterior: Any, data: Mapping[str, Any], n: int, seed: int, local: Local | None = None,
    noise: int = 0,
) -> Iterator[Params]:  # fmt: skip
    """The draws of `predict`, one after the other: all together they may not fit into memory. noise: another number for
    each silo of one replicate, which is of one draw of the global sites and of what else is drawn anew at each."""
    return (run.observed for run in _runs(problem, posterior, data, n, seed, None, local, noise))


def log_predictive(
    problem: Problem, posterior: Posterior, data: Mapping[str, Any], n: int, seed: int, local: Local | None = None
) -> Tensor:
    """See `Result.log_predictive`. local: as for `predict`."""
    runs = _runs(problem, posterior, data, n, seed, problem.model.record_plate, local)
    values = len(problem.density.chosen())
    scores = torch.stack([torch.stack(run.log_prob).sum(0) for run in runs])
    return torch.logsumexp(scores, 0) - math.log(len(scores) // values)


def _runs(
    problem: Problem,
    posterior: Posterior,
    data: Mapping[str, Any],
    n: int,
    seed: int,
    record_plate: str | None,
    local: Local | None,
    noise: int = 0,
) -> Iterator[_Forward]:
    """The program run forward for each of `n` draws; where it is scored, once for each value of discrete sites."""
    check_draws(n)
    rows, missing = _rows(problem, data, record_plate is not None)
    layout, scored = problem.layout, record_plate is not None
    latents = {site.name for site in layout.sites} | ({name for name, _ in layout.choices} if not scored else set())
    with seeded(seed + noise):
        draws = posterior.draws(n, seed)
        sites = over_draws(lambda z: problem.density.constrain(z, posterior.theta)[0], draws)
        for k, z in enumerate(draws):
            values = {name: value[k] for name, value in sites.items()}
            if local is not None:
                values = {**values, **local(z, seed + k)}
            for chosen in problem.density.chosen() if scored else [{}]:
                forward = _Forward(values, posterior.theta, record_plate, latents, chosen)
                with running(problem.dtype, problem.device), torch.no_grad(), forward as run:
                    _call(problem.model.fn, {**rows, **problem.schema.constants}, missing)
                yield run


def _rows(problem: Problem, data: Mapping[str, Any], scored: bool) -> tuple[Params, list[str]]:
    """The columns that are given, and the names of those that are not, to be predicted."""
    given = {k: v for k, v in data.items() if v is not None} if isinstance(data, Mapping) else data
    schema, records = read_data(given, "predict", problem.dtype)
    want = {name: (shape, dtype) for name, shape, dtype in problem.schema.fields}
    have = {name: (shape, dtype) for name, shape, dtype in schema.fields}
    missing = sorted(want.keys() - have.keys())
    if have != {name: want.get(name) for name in have} or (scored and missing):
        shapes = {name: shape for name, (shape, _) in want.items()}
        raise InputError(f"predict needs the tensors of the fit, of these shapes a record: {shapes}")
    return {name: value.to(problem.device) for name, value in records.rows.items()}, missing


def _call(fn: Callable[..., Any], data: Mapping[str, Any], missing: list[str]) -> None:
    """Run a program, with None for what is missing, unless it has a default of its own."""
    parameters = inspect.signature(fn).parameters
    absent = [name for name in missing if name not in parameters or parameters[name].default is inspect.Parameter.empty]
    try:
        fn(**data, **dict.fromkeys(absent))
    except InputError:
        raise
    except Exception as error:
        if not missing:
            raise
        names = ", ".join(f"'{name}'" for name in missing)
        raise InputError(
            f"the program does not run without {names} ({type(error).__name__}): where obs=None is to be predicted, it "
            f"must take sizes from other columns; or give {names} any values, which draws replace"
        ) from error


def prior_predictive(
    model: FederatedModel | Callable[..., Any],
    data: Mapping[str, Any],
    n: int = 200,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Params:
    """`n` draws of all sites of a program from its prior, (n, *shape) each in its own space: what it says before any
    data are seen.

    `data` are the program's arguments: columns, `sf.Shared` values and numbers, as in `fit`. What it observes is drawn,
    whatever is given for it; `y=None`, or no y, will do where the program takes its sizes from other columns. Each
    `pyro.param` is as it begins. Of a formula it is a table, and the draws are of the response alone, as of
    `Result.predict`. Nothing is sent and nobody's data are looked at but for shapes and covariates.

    Raises InputError for a prior that cannot be drawn (ImproperUniform) and a program that weighs by `pyro.factor`.
    """
    check_draws(n)
    read: Callable[[Params], Params] = lambda draws: draws  # noqa: E731
    fn: Any = model
    if isinstance(model, FederatedModel):
        model, data, read = model.for_new(data, False)
        fn = model.fn
    if not callable(fn):
        raise InputError(f"the model must be an sf.FederatedModel or a Pyro function, not {type(fn).__name__}")
    given = {k: v for k, v in data.items() if v is not None} if isinstance(data, Mapping) else data
    schema, records = read_data(given, "prior_predictive", dtype)
    have = records.rows.keys() | schema.constants.keys()
    missing = [k for k, p in inspect.signature(fn).parameters.items() if k not in have and p.kind not in _VARIABLE]
    draws = []
    with seeded(seed):
        for _ in range(n):
            with running(dtype, torch.device("cpu")), torch.no_grad(), _Prior() as run:
                _call(fn, {**records.rows, **schema.constants}, missing)
            draws.append(run.observed)
    return read({name: torch.stack([d[name] for d in draws]) for name in draws[0]})


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Prior(_Forward):
    """Every site is drawn."""

    def __init__(self) -> None:
        super().__init__({}, None, None)

    def _pyro_sample(self, msg: Any) -> None:
        if isinstance(msg["fn"], Unit):
            raise InputError(
                f"pyro.factor '{msg['name']}' weighs what is drawn, and draws from the prior have no weights; write it "
                "as a distribution"
            )
        super()._pyro_sample(msg)


# ----
# What a client does with a fitted FedVI model: infer what is its own from unlabelled records, and predict with it
#
# Nothing here leaves the client, and the server has no part in it: a client that never took part does the same.


class Personal:
    """The fitted model as one client sees it. `loc`, `scale` (n_silo,): its q(beta) in unconstrained space, at the
    centre of q(theta)."""

    def __init__(self, problem: Problem, posterior: Posterior, rows: Params) -> None:
        self._problem, self._posterior, self._rows = problem, posterior, rows
        self.loc, self.scale = self._infer(posterior.eta["loc"])

    def __repr__(self) -> str:
        return f"Personal({len(self.loc)} latents)"

    def sample(self, n: int, seed: int = 0) -> Params:
        """`n` draws of the global and the client's own sites, (n, *shape) each, in the model's own space."""
        check_draws(n)
        constrain, theta = self._problem.density.constrain, self._posterior.theta
        centres = self._posterior.draws(n, seed)
        draws = [{**constrain(z, theta)[0], **self._local(z, seed + k)} for k, z in enumerate(centres)]
        return {name: torch.stack([d[name] for d in draws]) for name in draws[0]}

    def predict(self, data: Mapping[str, Any], n: int = 200, seed: int = 0) -> Params:
        """Posterior predictive draws for the client's records, (n, ...) for every observed site."""
        return predict(self._problem, self._posterior, data, n, seed, self._local)

    def log_predictive(self, data: Mapping[str, Any], n: int = 200, seed: int = 0) -> Tensor:
        """Log predictive density of each record of `data`, in nats (N,): log of the mean over `n` draws."""
        return log_predictive(self._problem, self._posterior, data, n, seed, self._local)

    def _infer(self, z: Tensor) -> tuple[Tensor, Tensor]:
        encoder = self._problem.model.encoder
        assert encoder is not None  # `personalise` checks
        sites, theta = self._problem.density.constrain(z, self._posterior.theta)
        present = z.new_ones(len(next(iter(self._rows.values()))))
        with torch.no_grad():
            return encoder.fn({**sites, **theta}, present, **self._rows)

    def _local(self, z: Tensor, seed: int) -> Params:
        """A draw of the client's sites that goes with a draw of the global ones."""
        loc, scale = self._infer(z)
        eps = torch.randn(len(loc), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rows = {name: v.to(z.device) for name, v in self._problem.schema.dummy_rows(2).items()}
        z_silo, none = loc + scale * eps.to(loc), z.new_zeros(2, 0)
        return self._problem.density.constrain_local(z, z_silo, none, self._posterior.theta, rows)


def personalise(problem: Problem, posterior: Posterior, unlabelled: Mapping[str, Tensor]) -> Personal:
    """The client's view of the model, from records without labels: the tensors that the model's encoder asks for.

    Raises InputError for a model without an encoder, and for records that are not of the fit's shapes.
    """
    encoder = problem.model.encoder
    if encoder is None:
        raise InputError("this model has no encoder; only a fit by fedvi can be made a client's own from its records")
    if set(unlabelled) != set(encoder.fields):
        raise InputError(f"the encoder asks for {', '.join(encoder.fields)}, not {', '.join(sorted(unlabelled))}")
    fields = {name: (shape, dtype) for name, shape, dtype in problem.schema.fields}
    rows = {}
    for name, value in unlabelled.items():
        shape, dtype = fields[name]
        if tuple(value.shape[1:]) != shape or len(value) == 0:
            raise InputError(f"'{name}' must have at least one row of shape {shape}, not {tuple(value.shape)}")
        if value.dtype.is_floating_point != dtype.is_floating_point:
            raise InputError(f"'{name}' must be {dtype}, not {value.dtype}")
        rows[name] = value.to(problem.device, dtype)
    return Personal(problem, posterior, rows)
