"""`load`: a finished run, opened again from its folder. No code and no pickle is in such a folder; a model is given.

The folder is that of `Result.save`, of `secure-fvi run` or of a deployed server: posterior.safetensors has q and its
moments, result.json the rest (`results.FORMAT`). Both are read as files from anywhere: sizes and names are checked, and
the moments are worked out again, which neither a bound that other sites set nor another model survives.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.constraints import Constraint

from secure_fvi import results
from secure_fvi.algorithms.base import Posterior, Problem, Refined
from secure_fvi.algorithms.noise_aware import NoiseAware
from secure_fvi.algorithms.vertical import likelihoods
from secure_fvi.density import Layout, LogDensity, Params, Site, Start
from secure_fvi.discovery import as_model, read_layout
from secure_fvi.draws import SitePosterior, SitePosteriors
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.families.gaussian import GlobalFamily, LowRank, Point, global_family
from secure_fvi.federated_model import FederatedModel, Schema, Shared
from secure_fvi.program_density import Evaluation, ProgramDensity
from secure_fvi.results import ELSEWHERE, FORMAT, Result, summarise
from secure_fvi.supports import ReachesFar, ReachesZero
from secure_fvi.trees import part

#: What reading a file made to be too large or too deep raises, beside errors of values.
_TOO_LARGE = (RecursionError, OverflowError, MemoryError)
#: In one record of the data that a model is traced with.
_MOST_NUMBERS = 1 << 24
_DTYPES = {str(d): d for d in (
    torch.float64, torch.float32, torch.int64, torch.uint8, torch.bool,
)}  # fmt: skip
_NUMBER = r"(-?[\d.]+(?:e[-+]?\d+)?|-?inf)"
_BOUNDED = {
    "GreaterThan": constraints.greater_than, "GreaterThanEq": constraints.greater_than_eq,
    "LessThan": constraints.less_than,
}  # fmt: skip
_NAMED = {
    "Real()": constraints.real, "Simplex()": constraints.simplex, "CorrCholesky()": constraints.corr_cholesky,
    "LowerCholesky()": constraints.lower_cholesky, "PositiveDefinite()": constraints.positive_definite,
}  # fmt: skip


def load(
    folder: str | Path,
    model: FederatedModel | Callable[..., Any] | None = None,
    shared: Mapping[str, Any] | None = None,
) -> Result:
    """The result of a finished run, from the folder that `Result.save`, `secure-fvi run` or a server wrote.

    It has the posterior, convergence, `summary`, `correlations`, `sample` and `to_arviz` of the fit. With `model`, the
    program that was fitted, also `predict` and `log_predictive`; `shared` are the program's arguments that are no
    columns (`sf.Shared` tensors, numbers), which files do not hold. Without it, sites whose bounds other sites set
    cannot be drawn, and are refused by name. Silos' and records' own latents were never in the folder. Nothing in the
    folder is run or unpickled.

    Raises InputError for a folder without a finished run, a damaged file, files of another version or of two runs, and
    a model that is not the one that was fitted.
    """
    directory = Path(folder)
    found = _read_json(directory)
    path = directory / "posterior.safetensors"
    try:
        tensors, saved = read_tensors(path.read_bytes()), found["saved"]
        posterior = _posterior(found, tensors)
        layout = _layout(saved)
        moments = SitePosteriors(
            {n: SitePosterior(tensors[f"mean/{n}"], tensors[f"sd/{n}"]) for n in found["posterior"]}
        )
        for name, both in found["posterior"].items():
            if [both["mean"], both["sd"]] != [m.tolist() for m in moments[name]]:
                raise InputError(f"'{directory}' is damaged: posterior.safetensors and result.json are of two runs")
        problem = _problem(directory, found, layout, posterior, model, shared)
        result = (Opened if model is None else Result)(
            refined=results.refined_draws(problem, posterior),
            **{name: found[name] for name in _PLAIN},
            posterior=moments,
            theta={name: torch.tensor(value, dtype=problem.dtype) for name, value in found["theta"].items()},
            problem=problem,
            variational=posterior,
            local=ELSEWHERE,
        )
    except FileNotFoundError:
        raise InputError(f"'{directory}' holds no posterior.safetensors beside its result.json") from None
    except InputError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError, *_TOO_LARGE):
        raise InputError(f"'{directory}' is damaged: {path.name} or result.json is not as it was written") from None
    _check_moments(directory, result, given=model is not None)
    return result


_PLAIN = (
    "algorithm", "seed", "silos", "rounds", "seconds", "elbo", "converged", "convergence", "metrics", "aggregation",
    "privacy",
)  # fmt: skip


def _read_json(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise InputError(f"there is no folder '{directory}'")
    path = directory / "result.json"
    if not path.exists():
        if (directory / "config.toml").exists():
            raise InputError(f"the run in '{directory}' has not finished; continue it with --resume")
        raise InputError(f"'{directory}' holds no run: there is no result.json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, *_TOO_LARGE):  # UnicodeDecodeError is one
        raise InputError(f"{path}: damaged: no JSON") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: damaged: no table")
    version = found.get("saved", {}).get("format") if isinstance(found.get("saved", {}), dict) else None
    if version != FORMAT:
        says = "an earlier one, before runs could be opened" if version is None else f"{version!r}"
        raise InputError(f"{path}: format {FORMAT} is read here, and this is {says}; open it with the version it is of")
    return found


def _posterior(found: Mapping[str, Any], tensors: Params) -> Posterior:
    eta, theta = part(tensors, "eta"), part(tensors, "theta")
    name, loc = found["saved"]["family"], eta["loc"]
    n = len(loc)
    family: GlobalFamily
    if name == Point.name:
        family = Point(n)
    elif name == LowRank.name:
        family = LowRank(n, eta["factor"].shape[1])
    else:
        family = global_family(name, n)
    shapes = {k: v.shape for k, v in family.init(loc.to("meta")).items()}  # no memory before they are compared
    if name == "auto" or {k: v.shape for k, v in eta.items()} != shapes or loc.dim() != 1:
        raise ValueError
    posterior = Posterior(family, eta, theta)
    said = found["saved"].get("counted")
    if said is not None:
        mean, covariance, without = (tensors[f"counted/{kind}"] for kind in results.COUNTED)
        if mean.shape != (n,) or covariance.shape != (n, n) or without.shape != (n, n):
            raise ValueError
        for matrix in (covariance, without):
            torch.linalg.cholesky(matrix)  # raises where it is no covariance
        error = math.inf if said["error"] is None else float(said["error"])
        posterior = posterior._replace(counted=NoiseAware(mean, covariance, without, error, said["rounds"]))
    numbers = found["saved"].get("refined")
    if numbers is None:
        return posterior
    z, weights = tensors["refined/z"], tensors["refined/weights"]
    if z.shape != (len(weights), n) or not bool((weights >= 0).all()) or not math.isclose(float(weights.sum()), 1.0):
        raise ValueError
    return posterior._replace(refined=Refined(z=z, weights=weights, **numbers))


def _layout(saved: Mapping[str, Any]) -> Layout:
    sites = tuple(Site(n, role, tuple(shape), *rest) for n, role, shape, *rest in saved["sites"])
    return Layout(sites, tuple((name, tuple(shape)) for name, shape in saved["theta"]))


def _problem(
    directory: Path, found: Mapping[str, Any], layout: Layout, posterior: Posterior,
    model: FederatedModel | Callable[..., Any] | None, shared: Mapping[str, Any] | None,
) -> Problem:  # fmt: skip
    saved = found["saved"]
    dtype = _DTYPES[saved["dtype"]]
    fields = tuple((name, tuple(shape), _DTYPES[kind]) for name, shape, kind in saved["fields"])
    if sum(math.prod(shape) for _, shape, _ in fields) > _MOST_NUMBERS:  # made data of a few records are traced
        raise ValueError
    loc, theta, silos = posterior.eta["loc"], posterior.theta, tuple(sorted(found["silos"]))
    zero = loc.new_zeros(())  # seen as many times as the file says, without memory for it
    start = Start(loc, zero.expand(layout.size("silo")), zero.expand(2, layout.size("record")), theta)
    if model is None:
        if shared is not None:
            raise InputError("shared is for a model; give both")
        if isinstance(said := saved.get("model"), dict) and "formula" in said:
            warnings.warn(
                f"this run is of the formula '{said['formula']}', and without its model sites have their own names and "
                "are of standardised columns: sf.load(folder, model=...) has the table's names and units",
                SecureFVIWarning,
                stacklevel=4,
            )
        absent, schema = FederatedModel(_absent), Schema(fields, {})
        density: LogDensity = _Saved(absent, layout, schema, saved.get("likelihood"))
        return Problem(absent, schema, layout, density, start, silos, found["seed"], dtype, loc.device, "eager")
    if saved.get("likelihood") is not None:
        raise InputError("this run's silos hold columns: its predictors are at the silos, and a model is of no use")
    _check_identity(directory, saved.get("model"), getattr(model, "identity", None))
    constants = {name: v.tensor if isinstance(v, Shared) else v for name, v in (shared or {}).items()}
    if sorted(constants) != saved["shared"]:
        want = ", ".join(saved["shared"]) or "none"
        raise InputError(f"the model's arguments that are no columns are given in shared={{...}}; of this run: {want}")
    schema = Schema(fields, constants)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)  # said when it was fitted
        model = as_model(model, schema, dtype)
        have, _ = read_layout(model, schema, dtype)
    for mine, theirs in zip((*have.sites, *have.theta), (*layout.sites, *layout.theta), strict=False):
        if mine != theirs:
            raise InputError(
                f"the model is not that of the run in '{directory}': its site '{mine[0]}' is '{theirs[0]}' there, or "
                "has another shape, role or support"
            )
    if (len(have.sites), len(have.theta)) != (len(layout.sites), len(layout.theta)):
        raise InputError(f"the model is not that of the run in '{directory}': it has other sites")
    if saved.get("model") is None:
        _check_program(directory, saved.get("program"), results.program_said(model).get("program"))
    density = ProgramDensity(model, have, schema)
    return Problem(model, schema, have, density, start, silos, found["seed"], dtype, loc.device, "eager")


def _check_identity(directory: Path, theirs: Mapping[str, str] | None, mine: Mapping[str, str] | None) -> None:
    """Raise InputError, naming both, where the model is not that of the run: its numbers would get other names."""
    if theirs == mine:
        return
    both = (theirs, mine)
    names = ["no formula" if said is None else f"'{said['formula']}', family {said['family']}" for said in both]
    also = ", of another dictionary, other priors or other options" if names[0] == names[1] else ""
    raise InputError(f"the run in '{directory}' is of {names[0]}, and the model given is {names[1]}{also}")


def _check_program(directory: Path, theirs: Mapping[str, str] | None, mine: Mapping[str, str] | None) -> None:
    """Raise InputError where the program is another than the run's: of the same sites, its predictions would be others.
    Warn where that cannot be told: of an earlier file, of what is no plain function, or under another Python."""
    if theirs is None or mine is None or theirs["python"] != mine["python"]:
        warnings.warn(
            f"whether the model is the program of the run in '{directory}' cannot be told here: it has its sites, and "
            "what it predicts is taken on trust",
            SecureFVIWarning,
            stacklevel=4,
        )
    elif theirs != mine:
        raise InputError(
            f"the model is not that of the run in '{directory}': it has the same sites, and other code or constants; "
            "give the program as it was fitted"
        )


def _check_moments(directory: Path, result: Result, given: bool) -> None:
    """The moments that were saved, against those of q through the transforms that were found."""
    if isinstance(result.problem.density, _Saved) and result.problem.density.misses:
        return  # said where it is drawn from
    problem, again = result.problem, result.posterior
    if problem.layout.sites:
        again = summarise(problem, result.variational, result.refined)
    tolerance = 1e-6 if result.problem.dtype == torch.float64 else 1e-3
    for site, moments in result.posterior.items():
        for one, other in zip(moments, again[site], strict=True):
            same = one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=1e-12)
            if same:
                continue
            if given:
                raise InputError(
                    f"site '{site}' has other moments by this model than the run in '{directory}' found: it is another "
                    "model, or has other values in shared"
                )
            assert isinstance(result.problem.density, _Saved)
            result.problem.density.misses.add(site)
            if result.refined is not None:  # its draws, and what is said by them, would be others
                result.sample(1)


class Opened(Result):
    """A result without its program: all but what runs it."""

    def predict(self, data: Mapping[str, Any], n: int = 200, seed: int = 0) -> Params:
        """Refused: the program, or what the silos of columns keep, is not here."""
        return self._refuse()

    def log_predictive(self, data: Mapping[str, Any], n: int = 200, seed: int = 0) -> Tensor:
        """Refused, as `predict`."""
        return self._refuse()

    def personalise(self, unlabelled: Mapping[str, Tensor]) -> Any:
        """Refused, as `predict`."""
        return self._refuse()

    def _refuse(self) -> Any:
        if isinstance(self.problem.density, _Saved) and self.problem.density.likelihood is not None:
            raise InputError(
                "silos of columns predict together, each by coefficients of its own, which are at the silos"
            )
        _absent()


def _absent(*args: Any, **kwargs: Any) -> None:
    raise InputError("this run was opened without its model; give it: sf.load(folder, model=...)")


class _Saved(LogDensity):
    """Global sites in the model's own space without the program, where their supports depend on nothing."""

    def __init__(self, model: FederatedModel, layout: Layout, schema: Schema, likelihood: Any) -> None:
        super().__init__(model, layout, schema)
        self.transforms = {s.name: _support(s.support) for s in layout.of("global")}
        self.misses = {name for name, found in self.transforms.items() if found is None}
        self.likelihood = None if likelihood is None else _likelihood(likelihood)

    def constrain(self, z_global: Tensor, theta: Params) -> tuple[Params, Params]:
        if self.likelihood is not None:
            return self.likelihood.constrain(z_global), {}
        if self.misses:
            names = ", ".join(f"'{name}'" for name in sorted(self.misses))
            raise InputError(f"{names} cannot be drawn without the model: sf.load(folder, model=...)")
        values = self.layout.split(z_global, "global")
        return {name: biject_to(self.transforms[name])(value) for name, value in values.items()}, {}

    def run(self, latents: Params, theta: Params, rows: Params, densities: bool = True) -> Evaluation:
        _absent()
        raise AssertionError


def _support(text: str) -> Constraint | None:
    """The support that a site of the layout names; None for one whose bounds are tensors, or of no known kind."""
    if text in _NAMED:
        return _NAMED[text]
    independent = re.fullmatch(r"IndependentConstraint\((.*), (\d+)\)", text)
    if independent is not None:
        base = _support(independent[1])
        return None if base is None else constraints.independent(base, int(independent[2]))
    near = re.fullmatch(r"Reaches(Zero|Far)\(unit=([\d.e+-]+)\)", text)
    if near is not None:
        return (ReachesZero if near[1] == "Zero" else ReachesFar)(float(near[2]))
    one = re.fullmatch(rf"(\w+)\((?:lower|upper)_bound={_NUMBER}\)", text)
    if one is not None and one[1] in _BOUNDED:
        return _BOUNDED[one[1]](float(one[2]))
    two = re.fullmatch(rf"(?:HalfOpen)?Interval\(lower_bound={_NUMBER}, upper_bound={_NUMBER}\)", text)
    return None if two is None else constraints.interval(float(two[1]), float(two[2]))


def _likelihood(saved: Mapping[str, Any]) -> likelihoods.Likelihood:
    kinds = {c.__name__: c for c in (
        likelihoods.Bernoulli, likelihoods.Categorical, likelihoods.Gaussian, likelihoods.Poisson,
    )}  # fmt: skip
    if saved["kind"] not in kinds:
        raise InputError(f"the run is of a likelihood of its own, '{saved['kind']}', which this package does not have")
    found: likelihoods.Likelihood = kinds[saved["kind"]](**saved["options"])
    return found
