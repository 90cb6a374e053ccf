"""Generalised linear mixed models from a formula, on tables as they are: `sf.glmm`.

    linear predictor of row r of record i    x_r beta + offset_r + sum over random terms of z_r u_group(r)
    u_group = sd * L eps,   eps ~ N(0, 1),   L the Cholesky factor of a correlation matrix (LKJ)

All on standardised columns (`formula.Design`), with priors as rstanarm and brms choose them; `summary` goes back to the
user's units. A group that lives in one silo is local: eps of the record's group are latents of a record, those of other
local groups are the silo's, and neither leaves it. A group that spans silos (`shared` in the dictionary) is global.

A record is a group of rows, of any number: rows are laid out (N, M, ...) with `present` (N, M), 0 where there is none.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from secure_fvi.dictionary import Column, Dictionary, Missing, dictionary_of, read_dictionary
from secure_fvi.errors import DataError, InputError, SecureFVIWarning
from secure_fvi.federated_model import FederatedModel, Laid, check_rows, laid_out, places, read_data
from secure_fvi.formula import (
    ADDITIONS,
    FAMILIES,
    Design,
    Expression,
    Frame,
    Parsed,
    Random,
    Response,
    family_named,
    few_records,
    few_said,
    marked,
    parse,
    response_of,
)
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.runs.config import RECORD_ID
from secure_fvi.runs.wording import nearest
from secure_fvi.summary import counts_noise, quantiles, shown, weighted_moments
from secure_fvi.supports import ReachesFar, ReachesZero
from secure_fvi.tables import Coded, code_columns

if TYPE_CHECKING:
    from secure_fvi.algorithms.base import Posterior, Problem
    from secure_fvi.results import Result

_PLATE = "records"
#: Scale of the half-t(3) prior of sds, and sd of the normal prior of coefficients of standardised columns.
_HALF_T, _NORMAL = 2.5, 2.5
_LKJ = 1.0
#: Of a student's degrees of freedom, a gamma's, and of a negative binomial's shape, an inverse gamma's.
_NU, _SHAPE = (2.0, 0.1), (0.4, 0.3)
#: Parameters of families besides coefficients, and what goes with each term of groups, as their sites are named.
_OWN = ("sigma", "nu", "shape")
_OWN_OF = {"gaussian": ("sigma",), "student": ("sigma", "nu"), "negbinomial": ("shape",)}
_OF_GROUPS = ("sd", "cor", "mean")
_OWN_PRIORS = {"student": {"nu": f"gamma{_NU}"}, "negbinomial": {"shape": f"inverse-gamma{_SHAPE}"}}
#: Of a group that spans silos, as many as decide how its effects are sampled (`Program._shared`).
_ROWS_A_GROUP = 20.0
#: What the sites of such a term, and of any, mean, for results that are kept.
_SHARED, _SDS = "contrasts, partially non-centred together, sds that reach far", "sds that reach 0"
#: The prior scale of groups' sds is so many of their units (`supports`): of local groups, and of such as span silos.
_UNITS, _FEWER_UNITS = 10.0, 25.0
#: Of the groups of a global term, and cells of a silo's table once records are laid out.
_MOST_EFFECTS, _MOST_CELLS = 100_000, 2**29
#: Cells of one record, under record privacy, where nothing may follow from how many records there are.
_CELLS_A_RECORD = 2**16
#: Of a record's latents, by which the bound is tightened.
_SAMPLES = 20
#: Of a local fit without latents, whose steps have the noise of one draw of Z_G alone.
_STEPS = 200
#: Of one with latents of silos, which are integrated out around their mode and whose steps take many draws.
_FEW_STEPS = 40
_DRAWS = 20_000
#: By how many of its sds a prior moves a mean that rests much on it.
_PULLED = 0.5
#: Families whose likelihood is log-concave in the linear predictor.
_LOG_CONCAVE = ("gaussian", "bernoulli", "binomial", "poisson", "negbinomial", "ordinal")
_NUMBERED = (
    "each number of '{}', an integer, is taken for a group: where it names groups, kind = 'id' in the dictionary says "
    "so (or 'category', with its levels); where it is measured, it belongs among the fixed effects; and each silo's "
    "numbers are groups of its own unless 'shared' names it"
)
#: Of which an effect of each row cannot be told from what the family has itself.
_ONE_A_ROW = ("gaussian", "student", "bernoulli")
#: Silos whose rows and groups the table counts.
_SILOS_SHOWN = 12
#: Two tables that are alike with less than this probability are one table.
_BY_CHANCE = 1e-9
#: Rows of all tables together up to which two silos' are held against each other where not all are the same; the share
#: of the shorter one that is told of, and how many times what chance makes, by how often rows of one silo are alike.
_LOOKED_AT, _SHARED_PART, _OVER_CHANCE = 50_000, 0.2, 3.0


# ---- random terms ----


class Term(NamedTuple):
    """A random term with its design and where its effects live."""

    of: Random
    name: str  # of its sites
    design: Design
    place: str  # "record", "silo" or "global"
    levels: int  # of a global one

    @property
    def correlated(self) -> bool:
        return self.of.correlated and self.design.size > 1


def _placed(parsed: Parsed, dictionary: Dictionary, shared: Sequence[str], record: str | None) -> list[Term]:
    """Where each group lives. The record is one local group: the one named, else the innermost of the last term of a
    group of kind id, else of the last term."""
    for random in parsed.random:
        for name in random.group:
            try:
                column = dictionary[name]
            except InputError as error:
                raise marked(parsed.text, name, f"{error},") from None
            if column.kind in ("number", "date"):
                raise marked(parsed.text, name, f"'{name}' is a {column.kind} and names no groups,")
    spans = {r.label: all(n in shared or dictionary[n].shared for n in r.group) for r in parsed.random}
    local = [r.label for r in parsed.random if not spans[r.label]]
    ids = [r.label for r in parsed.random if not spans[r.label] and dictionary[r.group[-1]].kind == "id"]
    chosen = record if record is not None else next(iter((ids or local)[::-1]), None)
    if chosen is not None and chosen not in local:
        raise InputError(
            f"record='{chosen}': it must be a group of the formula that lives in one silo{nearest(chosen, local)}"
        )
    found: list[Term] = []
    for r in parsed.random:
        design = Design(r.design, parsed.text, dictionary, centred=r.correlated)
        if not design.size:
            raise marked(parsed.text, r.design, f"({r.design} | {r.label}) varies nothing: write 1 for an intercept,")
        place = "global" if spans[r.label] else "record" if r.label == chosen else "silo"
        levels = math.prod(_listed(n, dictionary[n]) for n in r.group) if place == "global" else 0
        if levels * design.size > _MOST_EFFECTS:
            raise InputError(
                f"formula: (... | {r.label}) has {levels:g} groups over all silos; at most {_MOST_EFFECTS}"
            )
        name = r.label + "".join("'" for t in found if t.of.label == r.label)
        for t in found:
            if set(t.of.group) == set(r.group) and (twice := [n for n in design.names if n in t.design.names]):
                raise InputError(
                    f"formula: '{twice[0]}' varies twice by {r.label}, in ({t.of.design} | {t.of.label}) and in "
                    f"({r.design} | {r.label}), which data do not tell apart: leave it out of one, as by 0 + ..."
                )
        found.append(Term(r, name, design, place, levels))
    return found


def _listed(name: str, column: Column) -> int:
    """How many groups the dictionary lists, none of which is made to count them."""
    if column.kind == "integer" and column.low is not None and column.high is not None:
        return int(column.high) - int(column.low) + 1
    if not column.levels:
        raise InputError(f"'{name}' spans silos: the dictionary must list its groups (a category's levels)")
    return len(column.levels)


# ---- priors ----


class Priors(NamedTuple):
    """Of standardised columns. `mean`, `sd` (p,): normal; `group_sd`: scales of half-t(3), by random term."""

    mean: Tensor
    sd: Tensor
    group_sd: Mapping[str, float]
    lkj: float
    aux: float  # half-t(3) scale of a residual sd


def _priors(
    given: Mapping[str, Any],
    fixed: Design,
    terms: Sequence[Term],
    family: str,
    response: Response,
    dictionary: Dictionary,
) -> Priors:
    """`given`: by name of a fixed effect, (mean, sd) in the user's units; "sd_<group>" and "sigma", the scale of a
    half-t(3); "lkj", its concentration."""
    mean, sd = torch.zeros(fixed.size, dtype=torch.float64), torch.full((fixed.size,), _NORMAL, dtype=torch.float64)
    usual = dictionary[response.name].centre
    if FAMILIES[family].link == "log" and usual is not None and usual > 0 and fixed.intercept is not None:
        mean[fixed.intercept] = math.log(usual)
    group_sd, lkj, aux = {t.name: _HALF_T for t in terms}, _LKJ, _HALF_T
    known = [*fixed.names, *(f"sd_{t.name}" for t in terms), "sigma", "lkj"]
    for name, value in given.items():
        if name in fixed.names:
            at, numbers = fixed.names.index(name), tuple(value) if isinstance(value, (tuple, list)) else ()
            if len(numbers) != 2 or not all(map(_number, numbers)) or numbers[1] <= 0:
                raise InputError(f"priors: '{name}' takes (mean, sd), in units of the response's link")
            if at != fixed.intercept:
                _check_moved(name, fixed.centres_of(at), "coefficient")
            centre = response.centre if name == "(Intercept)" else 0.0
            mean[at] = (numbers[0] - centre) * float(fixed.scales[at]) / response.scale
            sd[at] = numbers[1] * float(fixed.scales[at]) / response.scale
        elif name in known and _number(value) and value > 0:
            for t in terms if name != "sigma" else ():
                if name == f"sd_{t.name}" or (name == "lkj" and t.correlated):
                    _check_moved(name, _centres(t.design), f"effects of (... | {t.of.label})")
            if name == "lkj":
                lkj = float(value)
            elif name == "sigma":
                aux = float(value) / response.scale
            else:
                group_sd[name.removeprefix("sd_")] = float(value) / response.scale
        elif name in known:
            raise InputError(f"priors: '{name}' takes a positive number")
        else:
            raise InputError(f"priors: there is no '{name}'{nearest(name, known)} (there are: {', '.join(known)})")
    return Priors(mean, sd, group_sd, lkj, aux)


def _centres(design: Design) -> dict[str, float]:
    """At which columns' centres any of the design's coefficients are those of the standardised columns."""
    found: dict[str, float] = {}
    for at in range(design.size):
        found |= design.centres_of(at)
    return found


def _check_moved(name: str, centres: Mapping[str, float], what: str) -> None:
    """Refuse a given prior of another coefficient than the table's: of the slope of x where z is at its centre in place
    of that where z is 0."""
    for column, centre in centres.items():
        by = f"{column} {'+' if centre < 0 else '-'} {abs(centre):g}"
        also = f"give '{column}' centre = 0 in the dictionary, " if column.isidentifier() else ""
        raise InputError(
            f"priors: '{name}' is in the table where '{column}' is 0, and a prior is of the {what} where '{column}' is "
            f"at its centre, {centre:g}: write I({by}) for {column} in the formula, {also}or leave this prior out"
        )


def _where(centres: Mapping[str, float]) -> str:
    """In which terms a prior is, where not in those of the table."""
    at = [f"{name} is at its centre, {centre:g}" for name, centre in centres.items()]
    return f", where {' and '.join(at)}" if at else ""


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class _HalfT(dist.FoldedDistribution):  # type: ignore[misc]
    """Half-t(3), of the shape of `like`."""

    def __init__(self, scale: float, like: Tensor) -> None:
        super().__init__(dist.StudentT(3.0, torch.zeros_like(like), scale))
        self.scale = scale

    def expand(self, batch_shape: Any, _instance: Any = None) -> _HalfT:
        return type(self)(self.scale, self.base_dist.loc.expand(batch_shape))


class _GroupSd(_HalfT):
    """Of local groups' sds, unconstrained so that 0 is near (`supports.ReachesZero`)."""

    @property
    def support(self) -> Any:
        return ReachesZero(self.scale / _UNITS)


class _SharedSd(_HalfT):
    """Of the sds of groups that span silos, mostly few, whose tail on the right is long (`supports.ReachesFar`)."""

    @property
    def support(self) -> Any:
        return ReachesFar(self.scale / _FEWER_UNITS)


# ---- the Pyro program ----


class Program:
    """The Pyro function of one silo's rows, (N, M, ...) each."""

    def __init__(
        self, family: str, response: Response, terms: Sequence[Term], priors: Priors, fixed: Design,
        kept: Sequence[int],
    ) -> None:  # fmt: skip
        self.family, self.response, self.terms = family, response, tuple(terms)
        self.within = {
            t.name: a for t in terms if t.place == "global" and (a := _within(t.design, fixed, kept)) is not None
        }
        self.integrated = 0 < sum(t.design.size for t in terms if t.place == "record") <= max(NODES)
        self.most_nodes = BESIDE_LATENTS if any(t.place == "silo" for t in terms) else max(NODES.values())
        self.priors = priors._replace(mean=priors.mean[list(kept)], sd=priors.sd[list(kept)])

    def __call__(self, y: Tensor, present: Tensor, **data: Any) -> None:
        like, records = present.new_zeros(()), present.shape[0]
        eta = data["offset"] if "offset" in data else present.new_zeros(())
        factors = {t.name: self._factor(t, like) for t in self.terms if t.place == "global"}
        given = self._observed(like) if factors else None
        b, means = self._fixed(factors, like)
        if b is not None:
            eta = eta + data["x"] @ b
        own = []
        for at, term in enumerate(self.terms):
            if term.place == "global":
                assert given is not None
                effects = self._shared(term, factors[term.name], means.get(term.name), given.information)
            else:
                factor = self._factor(term, like)
                if term.place == "record":
                    own.append((at, term, factor))
                    continue
                shape = like.new_zeros(data[f"n{at}"], term.design.size)
                effects = pyro.sample(term.name, dist.Normal(shape, 1.0).to_event(2)) @ factor.mT
            eta = eta + self._part(data, at, effects[data[f"g{at}"]])
        given = given or self._observed(like)
        with pyro.plate(_PLATE, records, dim=-2):
            if self.response.scale != 1:  # the density of the response in its own unit, not of the standardised one
                rows = (present * data.get("weights", 1.0)).sum(-1, keepdim=True)
                pyro.factor("unit", -math.log(self.response.scale) * rows)
            if self.integrated and own:
                designs = [data.get(f"z{at}", present.unsqueeze(-1)) @ factor for at, _, factor in own]
                design = torch.cat(designs, -1)
                found = marginal(eta.expand(present.shape), design, y, present, data, given, self.most_nodes)
                pyro.factor("y", found.unsqueeze(-1))
                return
            for at, term, factor in own:
                shape = like.new_zeros(1, term.design.size)
                effects = pyro.sample(
                    term.name, dist.Normal(shape, 1.0).expand([records, 1, term.design.size]).to_event(1)
                )
                eta = eta + self._part(data, at, effects @ factor.mT)
            with pyro.poutine.scale(scale=data.get("weights", 1.0)):
                pyro.sample("y", given.density(eta.expand(present.shape), data).mask(present > 0), obs=y)

    def _factor(self, term: Term, like: Tensor) -> Tensor:
        """(d, d), by which standard normals become effects."""
        kind = _SharedSd if term.place == "global" else _GroupSd
        prior = kind(self.priors.group_sd[term.name], like.new_zeros(term.design.size))
        sd = pyro.sample(f"sd_{term.name}", prior.to_event(1))
        if not term.correlated:
            return torch.diag_embed(sd)
        lower = pyro.sample(f"cor_{term.name}", dist.LKJCholesky(term.design.size, like + self.priors.lkj))
        return sd.unsqueeze(-1) * lower

    @property
    def levelled(self) -> list[Term]:
        """Terms whose effects' mean over their groups the data cannot tell from the coefficients."""
        return [t for t in self.terms if t.name in self.within and t.levels > 1]

    def apart(self, both: Tensor, factors: Sequence[Tensor], eps: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The coefficients (..., p), and the means over groups (..., d) of `levelled` terms' effects, given what they
        come to together, the terms' factors (..., d, d) and standard normals (..., d) that say how much of it is whose.
        """
        mean, covariances = self._together(both, factors)
        means = []
        for term, factor, e, rest in zip(self.levelled, factors, eps, covariances[1:], strict=True):
            root = self.within[term.name].to(both) @ factor / math.sqrt(term.levels)
            solved = torch.cholesky_solve(root, _lower(rest))  # of rest + root eps, eps is normal given the sum
            lower = _lower(root.mT @ solved + torch.eye(root.shape[-1]).to(both))
            centre = torch.cholesky_solve(solved.mT @ (both - mean).unsqueeze(-1), lower)
            drawn = centre + torch.linalg.solve_triangular(lower.mT, e.unsqueeze(-1), upper=True)
            both = both - (root @ drawn).squeeze(-1)
            means.append((factor @ drawn).squeeze(-1) / math.sqrt(term.levels))
        return both, means

    def _together(self, like: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Prior mean (p,) and covariances (..., p, p) of the coefficients and the means of all `levelled` terms, of all
        but the first, and so on to the coefficients alone."""
        covariances = [torch.diag(self.priors.sd.to(like).square())]
        for term, factor in zip(self.levelled[::-1], factors[::-1], strict=True):
            root = self.within[term.name].to(like) @ factor
            covariances.append(covariances[-1] + root @ root.mT / term.levels)
        return self.priors.mean.to(like), covariances[::-1]

    def _fixed(self, factors: Mapping[str, Tensor], like: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The coefficients (p,), and by name of a `levelled` term its effects' mean over groups (d,).

        Data tell the sum of these means and the coefficients, whatever the groups' sds, and no part of it: that sum is
        what is sampled, as "b", and beside it how much is whose, on which data say nothing.
        """
        mean, sd, terms = self.priors.mean.to(like), self.priors.sd.to(like), self.levelled
        if not mean.numel():
            return None, {}
        if not terms:
            return pyro.sample("b", dist.Normal(mean, sd).to_event(1)), {}
        given = [factors[t.name] for t in terms]
        lower = _lower(self._together(like, given)[1][0])
        b = pyro.sample("b", dist.MultivariateNormal(mean, scale_tril=lower, validate_args=False))
        eps = [
            pyro.sample(f"mean_{t.name}", dist.Normal(like.new_zeros(t.design.size), 1.0).to_event(1)) for t in terms
        ]
        b, means = self.apart(b, given, eps)
        return b, {t.name: m for t, m in zip(terms, means, strict=True)}

    def _shared(self, term: Term, factor: Tensor, mean: Tensor | None, information: Tensor | float) -> Tensor:
        """(groups, d) effects of a term that spans silos; `mean` (d,): theirs over groups, where that is known.

        What is sampled is each, or each of their contrasts, over s = sd / sqrt(1 + w sd^2), w what some rows tell of
        it: s is the sd where that is small, and what rows leave open where it is not. So a normal q fits many rows a
        group, whose effects are known whatever the sd, as well as few (partial non-centring, Papaspiliopoulos et al.
        2007). Where effects are correlated, s is the lower triangular root of (Sigma^-1 + w)^-1, Sigma = factor
        factor': with an s for each sd alone the correlation would still say how wide effects are.
        """
        known = _ROWS_A_GROUP * information
        shape = factor.new_zeros(term.levels - (mean is not None), term.design.size)
        if term.correlated:
            spread = known * factor.mT @ factor + torch.eye(term.design.size).to(factor)
            wide = _lower(spread.flip(-2, -1)).flip(-2, -1).mT  # lower, and wide.mT @ wide is spread
            prior = dist.MultivariateNormal(shape, scale_tril=wide, validate_args=False).to_event(1)
            effects = pyro.sample(term.name, prior) @ torch.linalg.solve_triangular(wide.mT, factor.mT, upper=True)
        else:
            sd = factor.diagonal()
            wide = (1 + known * sd.square()).sqrt()
            effects = pyro.sample(term.name, dist.Normal(shape, wide).to_event(2)) * (sd / wide)
        return effects if mean is None else _contrasts(term.levels).to(effects) @ effects + mean

    def _part(self, data: Mapping[str, Any], at: int, effects: Tensor) -> Tensor:
        design = data.get(f"z{at}")
        return effects[..., 0] if design is None else (design * effects).sum(-1)

    def _observed(self, like: Tensor) -> Given:
        """What is observed given its linear predictor; samples what else that needs."""
        family = self.family
        if family == "bernoulli":
            return Given(lambda eta, data: dist.Bernoulli(logits=eta), binomial_kernel, binomial_slopes)
        if family == "binomial":
            return Given(
                lambda eta, data: dist.Binomial(total_count=data["trials"], logits=eta),
                binomial_kernel,
                binomial_slopes,
            )
        if family == "poisson":
            return Given(
                lambda eta, data: dist.Poisson(eta.exp()),
                lambda eta, y, data: y * eta - eta.exp(),
                lambda eta, y, data: (y - eta.exp(), eta.exp()),
                STEPS_OF_COUNTS,
                1.0,
                likeliest=_of_count,
            )
        if family == "negbinomial":
            shape = pyro.sample("shape", dist.InverseGamma(*(like + a for a in _SHAPE)))
            return Given(
                lambda eta, data: dist.NegativeBinomial(total_count=shape, logits=eta - shape.log()),
                lambda eta, y, data: count_kernel(eta, y, shape),
                lambda eta, y, data: count_slopes(eta, y, shape),
                STEPS_OF_COUNTS,
                1.0,
                likeliest=_of_count,
            )
        if family == "ordinal":
            cuts = self._cuts(like)
            return Given(
                lambda eta, data: dist.Categorical(logits=ordinal_logits(eta, cuts)),
                lambda eta, y, data: ordinal_kernel(eta, y, cuts),
                lambda eta, y, data: ordinal_slopes(eta, y, cuts),
            )
        sigma = pyro.sample("sigma", _HalfT(self.priors.aux, like))
        if family == "gaussian":
            return Given(
                lambda eta, data: dist.Normal(eta, sigma),
                lambda eta, y, data: -0.5 * ((y - eta) / sigma).square(),
                lambda eta, y, data: ((y - eta) / sigma**2, torch.ones_like(eta) / sigma**2),
                information=sigma**-2,
                quadratic=True,
            )
        nu = pyro.sample("nu", dist.Gamma(*(like + a for a in _NU)))
        return Given(
            lambda eta, data: dist.StudentT(nu, eta, sigma),
            lambda eta, y, data: -0.5 * (nu + 1) * (1 + (y - eta) ** 2 / (nu * sigma**2)).log(),
            lambda eta, y, data: student_slopes(eta, y, sigma, nu),
            MORE_STEPS,
            sigma**-2,
            likeliest=lambda y: y,
            alone=True,
        )

    def _cuts(self, like: Tensor) -> Tensor:
        """(K - 1,) thresholds: the first and the logarithms of the gaps are normal, around levels that are alike."""
        first, gaps = self.even_cuts(like)
        low = pyro.sample("cut", dist.Normal(first, _NORMAL))
        log_gaps = pyro.sample("log_gaps", dist.Normal(gaps, 1.0).to_event(1))
        return torch.cat([low.unsqueeze(-1), low.unsqueeze(-1) + log_gaps.exp().cumsum(-1)], -1)

    def even_cuts(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Threshold and logarithms of gaps under which all levels are as likely."""
        levels = len(self.response.levels)
        cuts = torch.logit(torch.arange(1, levels, dtype=torch.float64) / levels).to(like)
        return cuts[0], (cuts[1:] - cuts[:-1]).log()


def _lower(covariance: Tensor) -> Tensor:
    """Its factor; no numbers where it has none, as of sds beyond all measure, which runs look at too."""
    lower, wrong = torch.linalg.cholesky_ex(covariance)
    return torch.where(wrong[..., None, None] > 0, math.nan, lower)


def _within(design: Design, fixed: Design, kept: Sequence[int]) -> Tensor | None:
    """(p, d): by which coefficients of the columns of `fixed` that are `kept` the columns of `design` are made up; None
    where they are not. Both standardised."""
    if not set(design.names) <= set(fixed.names):
        return None
    chosen = np.zeros((fixed.size, design.size))
    chosen[[fixed.names.index(name) for name in design.names], range(design.size)] = 1.0
    found = np.linalg.solve(fixed.to_user, chosen @ design.to_user)
    found[np.abs(found) < 1e-9 * np.abs(found).max()] = 0.0
    if np.delete(found, kept, 0).any():
        return None
    return torch.from_numpy(found[list(kept)])


def _contrasts(groups: int) -> Tensor:
    """(groups, groups - 1): orthonormal columns that add up to 0 (Helmert's)."""
    lower = torch.tril(torch.ones(groups, groups, dtype=torch.float64), -1).T[:, 1:]
    size = torch.arange(1, groups, dtype=torch.float64)
    columns = lower - torch.diag(size, -1)[:, :-1] if groups > 1 else lower
    return columns / (size * (size + 1)).sqrt()


# ---- the model ----


@dataclass(frozen=True)
class MixedModel(FederatedModel):
    """What `glmm` makes: a `FederatedModel` that takes silos as tables."""

    text: str = ""
    family: str = ""
    of: Parts = field(default=None, compare=False, repr=False)  # type: ignore[assignment]

    @property
    def default_algorithm(self) -> Any:
        """Partitioned VI; with latents of records, by the bound that 20 samples of each tighten."""
        from secure_fvi.algorithms.pvi import PVI

        if self._has_latents:
            return PVI(importance_samples=_SAMPLES)
        if self.silo_sites:
            return PVI(local_steps=_FEW_STEPS) if self.concave else PVI()
        return PVI() if self._shares else PVI(local_steps=_STEPS)

    @property
    def concave(self) -> bool:
        """Of effects of a silo's groups, where those of records are integrated out: of a log-concave likelihood that
        leaves a log-concave one (Prekopa 1973)."""
        return self.family in _LOG_CONCAVE and not self._has_latents

    @property
    def edgeless(self) -> bool:
        """Of all families. What quadrature leaves of a density that is a billion nats lower is no edge."""
        return True

    @property
    def own_slopes(self) -> bool:
        """`_Softplus`, of many nodes a row."""
        return bool(self.fn.integrated)  # type: ignore[attr-defined]

    def with_latents(self) -> MixedModel:
        """The same model, in which records' effects are latents rather than integrated out: for samplers."""
        program = copy.copy(self.fn)
        program.integrated = False  # type: ignore[attr-defined]
        return replace(self, fn=program)

    @property
    def _has_latents(self) -> bool:
        """Whether records have any: effects that are not integrated out."""
        return any(t.place == "record" for t in self.of.terms) and not self.fn.integrated  # type: ignore[attr-defined]

    @property
    def _shares(self) -> bool:
        """Whether groups span silos."""
        return any(t.place == "global" for t in self.of.terms)

    @property
    def record_label(self) -> str | None:
        return next((t.of.label for t in self.of.terms if t.place == "record"), None)

    @property
    def numbered_by_data(self) -> str | None:
        return next((t.of.label for t in self.of.terms if t.place == "silo" and not self.of.numbered(t)), None)

    @property
    def undeclared(self) -> str | None:
        lacking = ", ".join(f"'{name}': M" for name in self._unsized)
        return f"most={{{lacking}}} (model.options.most of a configuration)" if lacking else None

    @property
    def _unsized(self) -> list[str]:
        """What `most` does not say, and shapes follow from: rows of a record, groups of a silo by label."""
        sized = ["rows" if t.place == "record" else t.of.label for t in self.of.terms if t.place != "global"]
        return [name for name in sized if name not in self.of.most]

    def check_declared(self, privacy: object) -> None:
        """As of any model; under record privacy a record is no larger than tables of any number of them may hold: to
        refuse a table for its cells would tell how many there are."""
        super().check_declared(privacy)
        if not isinstance(privacy, RecordDP):
            return
        rows = self.of.most.get("rows", 1)
        if rows * self.of.cells > _CELLS_A_RECORD:
            raise InputError(
                f"under record privacy a record is laid out in at most {_CELLS_A_RECORD} cells, and most.rows = {rows} "
                f"of {self.of.cells} cells, by this formula, are {rows * self.of.cells}: give most.rows = "
                f"{_CELLS_A_RECORD // self.of.cells} or less, or fewer columns"
            )

    def prepared(self, silos: Mapping[str, Any], limited: bool = True) -> dict[str, Any]:
        """Tables (dicts of columns, pandas, polars, Arrow, or coded ones) as the program takes them. Raises DataError,
        which names the silo, the column and the rows, and InputError where two silos hold the same rows. limited: to
        so many cells in all, which is not to be asked where each record stands for itself."""
        if all(isinstance(table, Laid) for table in silos.values()):
            return dict(silos)
        read = {name: _read(self.of, self.columns, table, name) for name, table in silos.items()}
        _check_rows_differ(self.of, read)
        _check_names_differ(self.of, read)
        _check_groups_occur(self.of, list(read.values()))
        _warn_of_one_value(self.of, list(read.values()))
        _warn_of_single_rows(self.of, list(read.values()))
        sizes = {
            t.of.label: max(r.groups[t.of.label] for r in read.values()) for t in self.of.terms if t.place == "silo"
        }
        rows = max(int(np.bincount(r.record).max()) if r.record is not None else 1 for r in read.values())
        for name, r in read.items():
            shared = {t.of.label: set(r.at[t.of.label].tolist()) for t in self.of.terms if t.place == "global"}
            self.of.counts[name] = {"rows": r.rows, "left out": r.left_out, "groups": r.groups, "shared": shared}
        for name, r in read.items() if limited else ():
            _check_cells(self.of, r, name, rows)
        laid = {name: _laid(self.of, r, name, rows, sizes) for name, r in read.items()}
        for name, r in read.items():
            self.of.counts[name]["weightless"] = self.weightless(r.frame)
        if len(read) > 1 and all(self.of.counts[name]["weightless"] == r.rows for name, r in read.items()):
            raise InputError(f"all rows of all silos have the weight 0, by '{self.of.additions['weights'].text}'")
        return laid

    def those_that_fit(
        self,
        found: Coded,
        silo: str,
        spoilt: list[str],
        dtype: torch.dtype = torch.float64,
        besides: Sequence[MixedModel] = (),
    ) -> Coded:
        """The rows of those records which `prepared` and `read_data` take by themselves. spoilt: is told of the
        others. besides: whose records they have to be as well; by single rows, where those have other records."""
        rows, said = np.ones(len(found.columns[self.of.response.name]), dtype=bool), list[str]()
        for model in (self, *besides):
            record = model._numbered(found) if model._group == self._group else np.arange(len(rows))
            bad, why = model._failing(found, record, silo, dtype)
            if bad and model is self:
                said.append(f"{len(bad)} records do not fit the formula, the first since {why}")
            elif bad:
                said.append(f"{len(bad)} do not fit formula {model.text!r}, which the policy lists, since {why}")
            rows &= ~np.isin(record, bad)
        spoilt += said
        return found.of_rows(rows)

    @property
    def _group(self) -> tuple[str, ...] | None:
        """The columns by whose values rows are of one record; None where each row is one."""
        return next((t.of.group for t in self.of.terms if t.place == "record"), None)

    def _numbered(self, found: Coded) -> np.ndarray[Any, Any]:
        """(N,) which record each row is of."""
        if self._group is None:
            return np.arange(len(found.columns[self.of.response.name]))
        keys = np.stack([found.columns[name] for name in self._group], 1)
        return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)

    def _failing(
        self, found: Coded, record: np.ndarray[Any, Any], silo: str, dtype: torch.dtype
    ) -> tuple[list[int], str]:
        """Which of the records (N,) cannot be taken by themselves, by halves, and why the first cannot."""
        said: list[str] = []

        def failing(some: np.ndarray[Any, Any]) -> list[int]:
            try:
                read_data(self.prepared({silo: found.of_rows(np.isin(record, some))}, False)[silo], silo, dtype)
                return []
            except Exception as error:
                if len(some) == 1:
                    said.append(str(error))
                    return [int(some[0])]
            half = len(some) // 2
            return [] if not len(some) else [*failing(some[:half]), *failing(some[half:])]

        return failing(np.unique(record)), next(iter(said), "")

    @property
    def identity(self) -> dict[str, str]:
        """Formula, family, and a digest of all that gives its parameters their meaning."""
        of = self.of
        # Without what is of no consequence for the meaning of a parameter.
        columns = [
            (name, replace(of.dictionary[name], missing=(), description="", review="", at_most=""))
            for name in self.columns
        ]
        told = [self.text, self.family, columns, _described(self, where=False), *([_SHARED] if self._shares else []),
                *([_SDS] if self.of.terms else [])]  # fmt: skip
        return {"formula": self.text, "family": self.family, "digest": hashlib.sha256(repr(told).encode()).hexdigest()}

    def readable(self, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Draws (S,) of every parameter by the user's names, in the user's units."""
        return user_draws(self, draws)

    def called(self, site: str, at: Sequence[int]) -> str | None:
        if site != "b":
            return None
        fixed, column = self.of.fixed, self.of.kept[at[0]]
        if not (centres := fixed.centres_of(column)):
            return fixed.names[column]
        where = " and ".join(f"{name} is {centre:g}" for name, centre in centres.items())
        where = "other columns are at their centres" if column == fixed.intercept and len(centres) > 1 else where
        return f"{fixed.names[column]} where {where}"

    def for_new(self, data: Any, scored: bool) -> tuple[MixedModel, Laid, Any]:
        """`data`: the user's table, without gaps; the response need not be there where it is drawn. Effects of local
        groups are drawn from their prior: nobody but their silo knows them."""
        weighed = {n: e for n, e in self.of.additions.items() if scored or n != "weights"}
        of = self.of._replace(additions=weighed, most={})
        names = sorted({*of.used, *([of.response.name] if scored else [])})
        try:
            # One patient may stand in several rows here, as at several doses.
            found = code_columns(data, of.dictionary, "refuse", names, every_id=False)
        except InputError as error:
            raise type(error)(f"predict: {error}") from None
        frame = {of.response.name: np.zeros(found.read, dtype=np.int64), **found.columns}
        table = _grouped(of, frame, found.read, 0)
        record = np.arange(found.read) if table.record is None else table.record
        rows = int(np.bincount(record).max())
        _check_cells(of, table, "predict", rows)
        laid = _laid(of, table, "predict", rows, table.groups)

        def read(draws: dict[str, Tensor]) -> dict[str, Tensor]:
            y = draws["y"][:, record, places(record)]
            return {of.response.name: y * of.response.scale + of.response.centre + of.response.low}

        return (self if scored else self._drawn()), laid, read

    def _drawn(self) -> MixedModel:
        """The same model for draws of the response, in its standardised unit: they are weighed by no factor."""
        drawn = self.with_latents()
        drawn.fn.response = self.of.response._replace(scale=1.0)  # type: ignore[attr-defined]
        return drawn

    @property
    def columns(self) -> list[str]:
        """Of a silo's table, those that are read; where a row is a record, its own id too, if there is one."""
        ids = {RECORD_ID}.intersection(self.of.dictionary.all_different if self.record_label is None else ())
        return sorted({self.of.response.name, *self.of.used, *ids})

    def few_said(self, columns: Frame) -> str:
        """What of the formula few records of a site's table have, `columns` (N,) each, as a warning for that site
        alone; empty where there is nothing (`formula.few_records`)."""
        shared = [t.of.label for t in self.of.terms if t.place == "global"]
        graded = self.family in ("bernoulli", "ordinal")
        return few_said(few_records(self.text, self.of.dictionary, columns, self.record_label, shared, graded=graded))

    def weightless(self, columns: Frame) -> int:
        """How many rows of a site's table, `columns` (N,) each, have the weight 0, so that they count for nothing."""
        weigh = self.of.additions.get("weights")
        return 0 if weigh is None else int((weigh(columns, len(columns[self.of.response.name])) == 0).sum())

    def check_apart(self, privacy: object) -> None:
        """Raises InputError where parties that share no process could not agree on what tables come to, or where
        `check_declared` does."""
        of = self.of
        if lacking := self._unsized:
            raise InputError(
                f"model.options.most has no '{lacking[0]}': the most rows of a record, and the most groups of a silo, "
                "which all lay out alike, are agreed on beforehand: [model.options.most]"
            )
        for term in of.terms:
            name = term.of.group[0]
            if term.place != "global" and of.dictionary[name].kind == "category" and name not in of.local:
                raise InputError(
                    f"'{name}' may name the same groups at several sites: say shared = true in the dictionary where "
                    f'these are one, and local = ["{name}"] in [model.options] where they are others at each'
                )
        if told := [n for t in of.terms if t.place == "global" for n in t.of.group if not of.dictionary[n].shared]:
            raise InputError(f"model.options.shared: sites' dictionaries have to say it: shared = true of '{told[0]}'")
        self.check_declared(privacy)

    def summary(self, result: Result) -> Summary:
        """The posterior in the user's units, of the draws that `Result.summary` is of."""
        return _summary(self, result)

    def check(self, result: Result, silos: Mapping[str, Any], n: int = 200, seed: int = 0) -> Check:
        """A posterior predictive check: numbers of the tables beside those of `n` replicates of each, by the program
        under draws of the posterior, effects of local groups drawn anew. `silos`: tables, as for a fit, by name. Of
        each silo totals alone are added. At a site, with its own table, it tells how that is fitted; nothing is sent.
        Raises InputError where the fit is private: tables themselves have no noise."""
        if result.privacy is not None:
            raise InputError("check: a run under differential privacy is not held against its tables without noise")
        _check_is_of(self, result)
        laid, dtype = list(self.prepared(silos).values()), result.problem.dtype
        problems = [result.problem._replace(schema=read_data(data, "check", dtype)[0]) for data in laid]
        totals = [
            _totals(self, problem, result.variational, data, n, seed, noise)
            for noise, (problem, data) in enumerate(zip(problems, laid, strict=True))
        ]
        return self.compared(torch.stack(totals).sum(0), len(laid), result.converged)

    @property
    def numbers(self) -> int:
        return _ADDED + len(_counted_places(self.of))

    def replicated(self, problem: Problem, z: Tensor, rows: Mapping[str, Tensor], seed: int) -> Tensor:
        return _totals(self, problem, _At(z), rows, len(z), seed, 0)

    def compared(self, totals: Tensor, silos: int, converged: bool | None = True, step: float = 0.0) -> Check:
        """Of totals (1 + n, `numbers`) over so many silos, as of `replicated`, each known to a `step`. `converged`: of
        the fit, where None says that nobody looked. Everyone may see it."""
        rows, small = _checked(self, totals, step)
        scaled = self.family in ("gaussian", "student")
        return Check(rows, len(totals) - 1, silos, converged is True, small, scaled, "weights" in self.of.additions)

    def checked(self, result: Result) -> Check | None:
        """The check that a run with `replicates` made over all silos; None where it made none."""
        from secure_fvi.algorithms.checking import STEP

        totals = result.replicated
        return None if totals is None else self.compared(totals, len(result.silos), result.converged, STEP)

    def told(self, result: Any) -> dict[str, Any]:
        found = self.summary(result)
        told: dict[str, Any] = {
            "formula": {**found.to_json(), "ratio": found.ratio, "notes": list(found.notes), "is": self.describe()}
        }
        if (check := self.checked(result)) is not None:
            told["check"] = check.to_json()
        return told

    def describe(self) -> list[str]:
        """What the formula came to: where groups live, and the priors, in the user's units. A line each."""
        return _described(self)


class Counts:
    """By silo that was read in this process: rows, rows left out and of weight 0, groups by label, and which of those
    that span silos. No part of a model, whose digest may be shown of a private run: digests and pickles are those of a
    model that has read nothing."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Any]] = {}

    def __getitem__(self, silo: str) -> dict[str, Any]:
        return self._held[silo]

    def __setitem__(self, silo: str, counted: dict[str, Any]) -> None:
        self._held[silo] = counted

    def items(self) -> list[tuple[str, dict[str, Any]]]:
        return list(self._held.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return Counts, ()


class Parts(NamedTuple):
    """What a formula and a dictionary come to."""

    dictionary: Dictionary
    fixed: Design
    terms: tuple[Term, ...]
    response: Response
    priors: Priors
    family: str
    offsets: tuple[Expression, ...]
    additions: Mapping[str, Expression]
    missing: Missing
    local: tuple[str, ...]
    most: Mapping[str, int]
    counts: Counts

    @property
    def used(self) -> set[str]:
        """Columns of a silo's table that are read, but for the response."""
        names = {*self.fixed.columns, *(c for t in self.terms for c in (*t.design.columns, *t.of.group))}
        return names | {c for e in (*self.offsets, *self.additions.values()) for c in e.columns}

    @property
    def cells(self) -> int:
        """Numbers that a row is laid out in (`_flat`)."""
        own = sum((not t.design.constant) * t.design.size + (t.place != "record") for t in self.terms)
        return 2 + len(self.kept) + bool(self.offsets) + len(self.additions) + own

    def numbered(self, term: Term) -> bool:
        """Whether the dictionary numbers the groups of a silo's term: it lists them, and `most` has room for all. Else
        they are numbered by which are there, as records are always: a number without rows would be a record more."""
        try:
            listed = math.prod(_listed(name, self.dictionary[name]) for name in term.of.group)
        except InputError:
            return False
        return self.most.get(term.of.label, 0) >= listed

    @property
    def kept(self) -> list[int]:
        """Columns of the design that have a coefficient: thresholds are an ordinal's intercepts."""
        return [k for k in range(self.fixed.size) if not (self.family == "ordinal" and k == self.fixed.intercept)]


def glmm(
    formula: str,
    family: str = "gaussian",
    priors: Mapping[str, Any] | None = None,
    dictionary: Dictionary | Mapping[str, Any] | str | Path | None = None,
    *,
    shared: Sequence[str] = (),
    local: Sequence[str] = (),
    record: str | None = None,
    missing: Missing = "refuse",
    most: Mapping[str, int] | None = None,
) -> MixedModel:
    """A mixed model as `sf.fit` takes it, with silos as tables.

    `formula` as in lme4 and brms; `family`: gaussian, student, bernoulli, binomial, poisson, negbinomial or ordinal.
    `dictionary`: what all parties know of the columns, the path of its file, or a dict of columns. `shared`, `local`:
    columns that name groups of several silos, or other groups at each under the same names. `record`: the group
    that is a record, for sums and for privacy. `missing`: "refuse" rows with a gap, or "drop" them. `most`: "rows" of a
    record and groups of a silo, by label, at most; needed under privacy, or where parties do not share a
    process. `priors`: by coefficient (mean, sd) in the user's units, and "sd_<group>", "sigma" (scales of half-t(3)),
    "lkj". Raises InputError.
    """
    if dictionary is None:
        raise InputError("glmm needs the job's dictionary: columns are coded from it, never from data")
    if isinstance(dictionary, (str, Path)):
        dictionary = read_dictionary(Path(dictionary))
    elif isinstance(dictionary, Mapping):
        dictionary = dictionary_of({"format": 1, "columns": dict(dictionary)}, "dictionary")
    if not isinstance(dictionary, Dictionary):
        raise InputError(f"dictionary is a path, a Dictionary or a dict of columns, not {type(dictionary).__name__}")
    family = family_named(family)
    if missing not in ("refuse", "drop"):
        raise InputError(f"missing='{missing}' must be 'refuse' or 'drop'")
    if priors is not None and not isinstance(priors, Mapping):
        raise InputError(f"priors is a dict by name, such as {{'age': (0, 0.5)}}, not {type(priors).__name__}")
    parsed = parse(formula)
    for option, names in (("shared", shared), ("local", local)):
        _check_groups(option, names, parsed)
    if both := [name for name in local if name in shared or dictionary[name].shared]:
        raise InputError(f"'{both[0]}' is both shared and local: its groups span silos, or are others at each")
    fixed = Design(parsed.fixed, formula, dictionary)
    terms = tuple(_placed(parsed, dictionary, shared, record))
    _check_most(most or {}, terms)
    effects = {*fixed.columns, *(c for t in terms for c in t.design.columns)}
    _warn_of_numbers(_numbered(terms, dictionary, {*local, *(most or {}), record}), dictionary, effects)
    response = response_of(parsed, family, dictionary)
    if fixed.intercept is None:  # nothing takes up what a centre would leave
        response = response._replace(centre=0.0)
    prior = _priors(priors or {}, fixed, terms, family, response, dictionary)
    if parsed.response in {*fixed.columns, *(c for t in terms for c in (*t.design.columns, *t.of.group))}:
        raise marked(formula, parsed.response, f"the response '{parsed.response}' stands on both sides,")
    _check_names(formula, fixed, terms, family, response)
    offsets = tuple(Expression(text, formula, dictionary) for text in parsed.offsets)
    _check_offsets(offsets, family)
    additions = {name: Expression(text, formula, dictionary) for name, text in parsed.additions.items()}
    _check_response_apart(parsed, offsets, additions)
    of = Parts(
        dictionary, fixed, terms, response, prior, family, offsets, additions, missing, tuple(local), dict(most or {}),
        Counts(),
    )  # fmt: skip
    dictionary.check_reviewed(sorted({response.name, *of.used}))
    program = Program(family, response, terms, prior, fixed, of.kept)
    silo_sites = tuple(t.name for t in terms if t.place == "silo")
    start = {f"cor_{t.name}": torch.eye(t.design.size, dtype=torch.float64) for t in terms if t.correlated}
    return MixedModel(program, _PLATE, silo_sites, start=start, text=formula, family=family, of=of)


def _check_names(formula: str, fixed: Design, terms: Sequence[Term], family: str, response: Response) -> None:
    """Of two parameters of one name a table would show one in the place of the other, and priors be of either."""
    own = [name for name in _OWN if name in _OWN_OF.get(family, ())]
    own += [f"{below}|{above}" for below, above in itertools.pairwise(response.levels)]
    own += [f"sd_{t.name}" for t in terms] + ["lkj"] * any(t.correlated for t in terms)
    sites = {
        _PLATE,
        "b",
        "y",
        "unit",
        "cut",
        "log_gaps",
        *_OWN,
        *(f"{of}_{t.name}" for t in terms for of in _OF_GROUPS),
    }
    groups = [t.name for t in terms]
    for name, what in (
        *((n, "column") for n in fixed.names if n in own),
        *((n, "group") for n in groups if n in sites),
    ):
        said = f"the {what} '{name}' has the name of a parameter of the model; rename it, by a query or in the table,"
        raise marked(formula, name, said)


def _check_response_apart(parsed: Parsed, offsets: Sequence[Expression], additions: Mapping[str, Expression]) -> None:
    """Raises InputError where the response would be explained, or weighed, by itself. Trials may be counted with its
    help (r + failures), but are not it alone: all would be successes."""
    for at, found in (*(("offset", e) for e in offsets), *additions.items()):
        if parsed.response in found.columns if at != "trials" else {parsed.response} == set(found.columns):
            what = f"the response '{parsed.response}' stands in {at}({found.text})"
            raise marked(parsed.text, f"{at}({found.text}", f"{what}: of itself it tells nothing,")


def _check_groups(option: str, names: Any, parsed: Parsed) -> None:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InputError(f"{option}={names!r} must be a list of columns, such as {option}=['region']")
    groups = list(dict.fromkeys(name for random in parsed.random for name in random.group))
    for name in names:
        if name not in groups:
            raise InputError(f"{option}: '{name}' names no groups in the formula{nearest(str(name), groups)}")


def _numbered(terms: Sequence[Term], dictionary: Dictionary, said: set[str | None]) -> list[str]:
    """Integers that name local groups, and may be measurements, but for those that an option names as a group's."""
    local = [t.of for t in terms if t.place != "global" and t.of.label not in said]
    names = dict.fromkeys(name for random in local for name in random.group)
    return [name for name in names if dictionary[name].kind == "integer" and name not in said]


def _warn_of_numbers(names: Sequence[str], dictionary: Dictionary, beside: set[str]) -> None:
    """Of `_numbered` those that look like measurements: with a unit or a scale, or among the effects as well."""
    for name in names:
        column = dictionary[name]
        if column.unit or column.centre is not None or column.scale is not None or name in beside:
            # Attributed to here, so that it is said once, though job and parties each make the model.
            warnings.warn(_NUMBERED.format(name), SecureFVIWarning, stacklevel=1)


def _check_most(most: Mapping[str, int], terms: Sequence[Term]) -> None:
    known = ["rows", *dict.fromkeys(t.of.label for t in terms if t.place == "silo")]
    for name, number in most.items():
        if name in known:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InputError(f"most: '{name}' needs a whole number of at least 1, got {number!r}")
            continue
        if any(t.place == "record" and t.of.label == name for t in terms):
            raise InputError(f"most: '{name}' is the record, of which a silo has any number; 'rows' are those of one")
        raise InputError(f"most: '{name}' is no group of a silo in the formula{nearest(str(name), known)}")


def _check_offsets(offsets: Sequence[Expression], family: str) -> None:
    """Where the link is a logarithm, an exposure enters by its logarithm; as it stands it would be a factor e^hours."""
    for found in offsets if FAMILIES[family].link == "log" else ():
        if not found.calls & {"log", "I"}:
            raise InputError(
                f"formula: offset({found.text}) is added to the logarithm of the mean: an exposure (hours watched, "
                f"people at risk) is offset(log({found.text})); where it is a logarithm already, write "
                f"offset(I({found.text}))"
            )


# ---- a silo's table ----


class _Table(NamedTuple):
    """A silo's rows, coded. Never leaves the silo."""

    frame: Frame
    rows: int
    left_out: int
    record: np.ndarray[Any, Any] | None  # (rows,) index of each row's record
    at: dict[str, np.ndarray[Any, Any]]  # (rows,) by label of a group that is none: index of its group
    groups: dict[str, int]  # by label: how many
    named: dict[str, set[int]]  # codes of levels that name local groups


def _read(of: Parts, columns: list[str], table: Any, silo: str) -> _Table:
    """Columns coded from the dictionary, rows with gaps refused or left out, groups counted."""
    try:
        found = table if isinstance(table, Coded) else code_columns(table, of.dictionary, of.missing, columns)
    except InputError as error:  # DataError is one
        raise type(error)(f"silo '{silo}': {error}") from None
    rows = len(found.columns[of.response.name])
    return _grouped(of, found.columns, rows, found.read - rows)


def _grouped(of: Parts, frame: Frame, rows: int, left_out: int) -> _Table:
    record, at, groups, named = None, {}, {}, {}
    for term in of.terms:
        label = term.of.label
        keys = np.stack([np.asarray(frame[name], dtype=np.int64) for name in term.of.group], 1)
        different, index = np.unique(keys, axis=0, return_inverse=True)
        groups[label], at[label] = len(different), index.reshape(-1)
        if term.place == "global" or (term.place == "silo" and of.numbered(term)):
            index = np.zeros(rows, dtype=np.int64)
            for name, column in zip(term.of.group, keys.T, strict=True):
                found = of.dictionary[name]
                index = index * _listed(name, found) + column - int(found.low or 0)
            at[label] = index
        if term.place == "global":
            continue
        if of.dictionary[term.of.group[0]].kind == "category":
            named[label] = set(different[:, 0].tolist())
        if term.place == "record":
            record = at[label]
    return _Table(frame, rows, left_out, record, at, groups, named)


def _check_rows_differ(of: Parts, read: Mapping[str, _Table]) -> None:
    """Refuse two silos whose rows say the same, which would count twice: the same values in the same groups, whatever
    the groups are called. Short tables may be alike by chance: a warning, unless chance is out of question."""
    sizes = Counter(table.rows for table in read.values())
    for rows in [size for size, silos in sizes.items() if silos > 1]:  # kinds of a large table take their time
        tables = {silo: table for silo, table in read.items() if table.rows == rows}
        seen: dict[bytes, str] = {}
        for (silo, table), kinds in zip(tables.items(), _kinds(of, list(tables.values())), strict=True):
            other = seen.setdefault(np.sort(kinds).tobytes(), silo)
            if other == silo:
                continue
            said = f"silos '{other}' and '{silo}' hold the same {rows} rows, which would count twice"
            if _chance(kinds, table.record) < _BY_CHANCE:
                raise InputError(f"{said}: is one file given for both?")
            warnings.warn(f"{said}, unless they are alike by chance", SecureFVIWarning, stacklevel=4)
            return
    if len(read) > 1 and sum(table.rows for table in read.values()) <= _LOOKED_AT:
        _warn_of_shared_rows(of, read)


def _warn_of_shared_rows(of: Parts, read: Mapping[str, _Table]) -> None:
    """Of two silos of which the one holds more of the other's rows than chance makes."""
    found = dict(zip(read, _kinds(of, list(read.values())), strict=True))
    for (one, its), (other, theirs) in itertools.combinations(found.items(), 2):
        a, b = np.unique(its), np.unique(theirs)
        both, size = len(np.intersect1d(a, b)), (len(its), len(theirs))
        pairs = sum(n * (n - 1) / 2 for n in size)
        alike = sum(size) - len(a) - len(b) + 4  # and four that might have been
        if both >= max(_SHARED_PART * min(size), _OVER_CHANCE * size[0] * size[1] * alike / max(pairs, 1)):
            warnings.warn(
                f"{both} of {len(theirs)} rows of silo '{other}' are those of silo '{one}' in all columns that the "
                "formula reads, and would count twice: is one file, with changes, given for both?",
                SecureFVIWarning,
                stacklevel=5,
            )


def _kinds(of: Parts, tables: Sequence[_Table]) -> list[np.ndarray[Any, Any]]:
    """(rows,) of each table: of which kind a row is, by its values and by the kinds in its local groups, whose names
    say nothing. A group's kinds are told by the sum of 64 random bits of each."""
    local = [t for t in of.terms if t.place != "global"]
    used = {*of.fixed.columns, *(c for t in of.terms for c in t.design.columns)}
    names = {RECORD_ID, *(name for t in local for name in t.of.group)} - used
    said = [
        [np.asarray(values, dtype=np.float64) for name, values in sorted(t.frame.items()) if name not in names]
        for t in tables
    ]
    kinds = np.unique(np.hstack([np.stack(columns) for columns in said]), axis=1, return_inverse=True)[1].reshape(-1)
    bits = np.random.default_rng(0).integers(2**64, size=len(kinds), dtype=np.uint64)
    for label in [t.of.label for t in local]:
        starts = np.cumsum([0, *(int(t.at[label].max()) + 1 for t in tables)])
        group = np.concatenate([t.at[label] + start for t, start in zip(tables, starts, strict=False)])
        sums = np.zeros(starts[-1], dtype=np.uint64)
        np.add.at(sums, group, bits[kinds])
        kinds = np.unique(np.stack([kinds.astype(np.uint64), sums[group]]), axis=1, return_inverse=True)[1].reshape(-1)
    return np.split(kinds, np.cumsum([t.rows for t in tables])[:-1])


def _chance(kinds: np.ndarray[Any, Any], record: np.ndarray[Any, Any] | None) -> float:
    """With which probability as many records, drawn from those of a table, are of its kinds again as often."""
    if record is not None:
        kinds = kinds[np.lexsort((kinds, record))][np.unique(np.sort(record), return_index=True)[1]]
    often = np.unique(kinds, return_counts=True)[1].tolist()
    total = sum(often)
    return math.exp(math.lgamma(total + 1) + sum(n * math.log(n / total) - math.lgamma(n + 1) for n in often))


def _check_names_differ(of: Parts, read: Mapping[str, _Table]) -> None:
    """Groups with a name in the dictionary that stand in two silos span them, unless somebody says otherwise."""
    for term in of.terms:
        name = term.of.group[0]
        seen: dict[int, str] = {}
        if name in of.local:
            continue
        for silo, table in read.items():
            for code_ in table.named.get(term.of.label, ()):
                if code_ in seen:
                    raise InputError(
                        f"'{name}' names the same groups at silos '{seen[code_]}' and '{silo}': say shared = "
                        f'["{name}"] (--shared {name}) where these are one, and local = ["{name}"] (--local {name}) '
                        "where they are others at each"
                    )
                seen[code_] = silo


def _check_groups_occur(of: Parts, tables: Sequence[_Table]) -> None:
    """Warn of groups that span silos and have rows nowhere, where all silos are here: `Program._shared` counts on rows
    of each."""
    for term in of.terms if len(tables) > 1 else ():
        if term.place == "global":
            seen = len(np.unique(np.concatenate([t.at[term.of.label] for t in tables])))
            if seen < term.levels:
                warnings.warn(
                    f"{term.levels - seen} of {term.levels} groups of '{term.of.label}' have no rows at any silo, and "
                    "a fit may not converge for it: list in the dictionary those alone that take part",
                    SecureFVIWarning,
                    stacklevel=4,
                )


def _warn_of_one_value(of: Parts, tables: Sequence[_Table]) -> None:
    """Warn of a response that never differs, where all silos are here."""
    name = of.response.name
    if (
        len(tables) > 1
        and sum(t.rows for t in tables) > 1
        and len({v for t in tables for v in np.unique(t.frame[name])}) == 1
    ):
        warnings.warn(
            f"'{name}' is the same in all rows of all silos, and tells little or nothing",
            SecureFVIWarning,
            stacklevel=4,
        )


def _warn_of_single_rows(of: Parts, tables: Sequence[_Table]) -> None:
    """Warn of local groups of one row each, where all silos are here and the family has no count to tell apart what
    differs between groups from what does between rows."""
    rows = sum(t.rows for t in tables)
    for term in of.terms if len(tables) > 1 and of.family in _ONE_A_ROW else ():
        if term.place != "global" and sum(t.groups[term.of.label] for t in tables) == rows:
            said = f"each '{term.of.label}' has one row: how far they differ, data tell little of beside the rows' own"
            warnings.warn(f"{said} spread, and it rests on the prior", SecureFVIWarning, stacklevel=4)


def _check_cells(of: Parts, table: _Table, silo: str, rows: int) -> None:
    """Raise DataError for a table that would take more memory than most machines have."""
    most, records = of.most.get("rows", rows), table.rows if table.record is None else int(table.record.max()) + 1
    if (cells := records * most * of.cells) > _MOST_CELLS:
        raise DataError(f"silo '{silo}': {records} records of {most} rows are {cells} cells; at most {_MOST_CELLS}")


def _laid(of: Parts, table: _Table, silo: str, rows: int, sizes: Mapping[str, int]) -> Laid:
    """Rows by record, (N, M, ...), and as many groups as the silo with most has."""
    try:
        flat = _flat(of, table)
    except InputError as error:
        raise DataError(f"silo '{silo}': {error}") from None
    most = of.most.get("rows", rows)
    record = np.arange(table.rows) if table.record is None else table.record
    check_rows(record, most, silo)
    out = Laid()
    for name, values in flat.items():
        alone = table.record is None and most == 1  # no copy
        fill = 1.0 if name in ADDITIONS else 0.0
        out[name] = torch.from_numpy(values[:, None] if alone else laid_out(values, record, most, fill))
    for at, term in enumerate(of.terms):
        if term.place == "silo":
            label = term.of.label
            limit = of.most.get(label, sizes[label])
            if table.groups[label] > limit:
                raise DataError(
                    f"silo '{silo}': {table.groups[label]} groups of '{label}', more than most={{'{label}': {limit}}}"
                )
            out[f"n{at}"] = limit
    return out


def _flat(of: Parts, table: _Table) -> dict[str, np.ndarray[Any, Any]]:
    """The arguments of the program, a row a row. Raises InputError, without the silo's name."""
    rows, frame = table.rows, table.frame
    out: dict[str, np.ndarray[Any, Any]] = {"present": np.ones(rows)}
    if of.kept:
        x = of.fixed.matrix(frame, rows)
        out["x"] = x if len(of.kept) == of.fixed.size else np.ascontiguousarray(x[:, of.kept])
    offset = sum((e(frame, rows) for e in of.offsets), np.zeros(rows))
    if of.offsets:
        out["offset"] = offset / of.response.scale
    for name, found in of.additions.items():
        out[name] = found(frame, rows)
    for at, term in enumerate(of.terms):
        if not term.design.constant:
            out[f"z{at}"] = term.design.matrix(frame, rows)
        if term.place != "record":
            out[f"g{at}"] = table.at[term.of.label]
    out["y"] = _coded_response(of, frame, out, rows)
    return out


def _coded_response(of: Parts, frame: Frame, out: Mapping[str, Any], rows: int) -> np.ndarray[Any, Any]:
    response, values = of.response, frame[of.response.name]
    if "weights" in out and (bad := int((out["weights"] < 0).sum())):
        raise InputError(f"'{of.additions['weights'].text}' weighs by less than 0 in {bad} of {rows} rows")
    if of.family == "ordinal":
        return values.astype(np.int64) - response.low
    y = np.asarray((values - response.centre) / response.scale, dtype=np.float64)
    if of.family in ("binomial", "poisson", "negbinomial") and (bad := int((y < 0).sum())):
        raise InputError(f"'{response.name}' is a count and below 0 in {bad} of {rows} rows")
    if of.family == "binomial":
        trials, text = out["trials"], of.additions["trials"].text
        if bad := int(((trials < 0) | (trials % 1 != 0)).sum()):
            raise InputError(f"'{text}' is no whole number of trials in {bad} of {rows} rows")
        if bad := int((y > trials).sum()):
            raise InputError(f"'{response.name}' is more than '{text}' in {bad} of {rows} rows")
    return y


# ---- what the user reads ----


class Line(NamedTuple):
    """A parameter in the user's units. `ratio`: exp of estimate and interval, where the link has one."""

    name: str
    estimate: float
    sd: float
    low: float  # of the central 95% interval
    high: float
    ratio: tuple[float, float, float] | None

    def shown(self) -> list[str]:
        """Estimate, sd and interval, to as many digits as the sd warrants."""
        return [shown(n, self.sd) for n in (self.estimate, self.sd, self.low, self.high)]

    def shown_ratio(self) -> list[str]:
        """The ratio and its interval; the sd of a ratio grows with it."""
        return [shown(n, n * self.sd) for n in self.ratio or ()]


@dataclass(frozen=True)
class Summary:
    """Fixed effects, sds and correlations of groups, and the family's own parameters. `str` is the table."""

    head: tuple[str, ...]
    effects: tuple[Line, ...]
    groups: tuple[Line, ...]
    own: tuple[Line, ...]
    ratio: str
    foot: tuple[str, ...]
    notes: tuple[str, ...] = ()  # those lines of the foot that are of this formula's data and priors

    def __str__(self) -> str:
        lines = list(self.head)
        for title, rows in (("Fixed effects", self.effects), ("Groups", self.groups), ("Family", self.own)):
            if rows:
                lines += ["", *_table(title, rows, self.ratio if rows is self.effects else "")]
        return "\n".join([*lines, "", *self.foot])

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """The same as numbers."""
        parts = {"effects": self.effects, "groups": self.groups, "own": self.own}
        return {name: [line._asdict() for line in rows] for name, rows in parts.items()}


def _table(title: str, rows: Sequence[Line], ratio: str) -> list[str]:
    heads = [title, "estimate", "sd", "2.5%", "97.5%", *([ratio, "2.5%", "97.5%"] if ratio else [])]
    cells = [heads]
    for row in rows:
        cells.append([row.name, *row.shown(), *((row.shown_ratio() if row.ratio else ()) if ratio else ())])
    return _aligned(cells)


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, the first of them the heads; some may be shorter."""
    widths = [max(len(r[k]) for r in cells if k < len(r)) for k in range(len(cells[0]))]
    return [
        "  ".join(
            c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(r, widths, strict=False))
        ).rstrip()
        for r in cells
    ]


def _line(name: str, draws: Tensor, weights: Tensor, ratio: bool = False) -> Line:
    low, high = quantiles(draws, weights, (2.5, 97.5)).tolist()
    mean, sd = map(float, weighted_moments(draws, weights))
    try:
        exp = (math.exp(mean), math.exp(low), math.exp(high)) if ratio else None
    except OverflowError:  # noise may send a coefficient to where its ratio has no number
        exp = None
    return Line(name, mean, sd, low, high, exp)


def user_draws(model: MixedModel, sites: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Draws (n,) of every parameter in the user's units, from draws (n, ...) of the sites."""
    of, out = model.of, {}
    scale, some = of.response.scale, next(iter(sites.values()))
    b = some.new_zeros(len(some), of.fixed.size)
    if of.kept:
        b[:, of.kept] = sites["b"]
    if terms := model.fn.levelled:  # type: ignore[attr-defined]
        factors, eps = [_factor_of(t, sites) for t in terms], [sites[f"mean_{t.name}"] for t in terms]
        b[:, of.kept] = model.fn.apart(sites["b"], factors, eps)[0]  # type: ignore[attr-defined]
    user = b @ torch.from_numpy(of.fixed.to_user).to(b).mT * scale
    if of.fixed.intercept is not None:
        user[:, of.fixed.intercept] += of.response.centre
    if of.family == "ordinal":
        cuts = torch.cat([sites["cut"][:, None], sites["cut"][:, None] + sites["log_gaps"].exp().cumsum(-1)], 1)
        shift = user[:, of.fixed.intercept] if of.fixed.intercept is not None else some.new_zeros(len(some))
        for k, (below, above) in enumerate(itertools.pairwise(of.response.levels)):
            out[f"{below}|{above}"] = cuts[:, k] - shift
    for at, name in enumerate(of.fixed.names):
        if at in of.kept:
            out[name] = user[:, at]
    for term in of.terms:
        out |= _group_draws(term, sites, scale)
    out |= {name: sites[name] * (scale if name == "sigma" else 1.0) for name in _OWN if name in sites}
    return out


def _factor_of(term: Term, sites: Mapping[str, Tensor]) -> Tensor:
    """(n, d, d), by which standard normals become effects."""
    sd = sites[f"sd_{term.name}"]
    return sd[..., None] * sites[f"cor_{term.name}"] if term.correlated else torch.diag_embed(sd)


def _group_draws(term: Term, sites: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    factor = _factor_of(term, sites)
    root = torch.from_numpy(term.design.to_user).to(factor) @ factor * scale
    cov = root @ root.mT
    sds = cov.diagonal(dim1=-2, dim2=-1).sqrt()
    names, out = term.design.names, {}
    for k, name in enumerate(names):
        out[f"sd({term.name}) {name}"] = sds[:, k]
    for i in range(len(names)) if term.correlated else ():
        for j in range(i):
            out[f"cor({term.name}) {names[j]}, {names[i]}"] = cov[:, i, j] / (sds[:, i] * sds[:, j])
    return out


def _prior_of(of: Parts, at: int) -> tuple[str, float, float]:
    """Of the design's column `at`: its name, and mean and sd of its coefficient's prior in the user's units."""
    unit = of.response.scale / float(of.fixed.scales[at])
    return of.fixed.names[at], float(of.priors.mean[at]) * unit, float(of.priors.sd[at]) * unit


def _by_prior(of: Parts, found: Mapping[str, Tensor], weights: Tensor) -> list[str]:
    """What is said of coefficients and groups' sds on which the prior says much, each in the terms of its prior.
    `found`: draws (n,) by name, in the table's, by `weights` (n,)."""
    said = []
    if of.kept:
        user = torch.stack([found[of.fixed.names[at]] for at in of.kept], -1)
        back = np.linalg.inv(of.fixed.to_user[np.ix_(of.kept, of.kept)]) / of.fixed.scales[of.kept, None]
        fitted = user @ torch.from_numpy(back).to(user).mT
        for draws, at in zip(fitted.mT, of.kept, strict=True):
            name, mean, sd = _prior_of(of, at)
            mean += of.response.centre if at == of.fixed.intercept else 0.0
            if not _rests(draws, weights, -0.5 * ((draws - mean) / sd).square(), sd):
                continue
            if at == of.fixed.intercept:
                given, where = float(of.priors.sd[at]) != _NORMAL, ", where other columns are at their centres,"
                unit = "give an offset in a unit in which it is small, as hours/1000, "
                cure = (
                    f"is the default: {unit if of.offsets else 'look at the ranges in the dictionary, '}or give priors"
                )
            else:
                given = (float(of.priors.mean[at]), float(of.priors.sd[at])) != (0.0, _NORMAL)
                where = _where(of.fixed.centres_of(at))
                cure = (
                    "follows from the dictionary's range: give the column the centre and scale of usual values there, "
                    "or give priors"
                    if of.fixed.measures(at)
                    else "is the default: give priors where more is known"
                )
            cure = "was given" if given else cure
            said.append(f"'{name}'{where} rests much on its prior, normal({mean:.3g}, {sd:.3g}), which {cure}")
    for t in of.terms:
        for name, scale in zip(t.design.names, _half_t(of, t), strict=True):
            draws = found[f"sd({t.name}) {name}"]
            if not _centres(t.design) and _rests(draws, weights, -2 * ((draws / scale).square() / 3).log1p()):
                said.append(
                    f"'sd({t.name}) {name}' rests much on its prior, half-t(3, {scale:.3g}): groups are few, or their "
                    f"rows; give priors = {{'sd_{t.name}': ...}} where more is known"
                )
    return said


def _rests(draws: Tensor, weights: Tensor, log_prior: Tensor, sd: float = math.inf) -> bool:
    """Whether a parameter rests much on its prior: where it is wider than half the prior's `sd`, or where a prior of
    another power would move its mean by many sds (d mean / d power = cov(draws, log prior); Kallioinen et al. 2024). To
    lie far out in a prior is not enough: where data say much they say it there too."""
    mean, spread = weighted_moments(draws, weights)
    moved = float((weights.to(draws) * (draws - mean) * log_prior).sum())
    return float(spread) > 0.5 * sd or abs(moved) > _PULLED * float(spread)


def _half_t(of: Parts, term: Term) -> list[float]:
    """Scales of the priors of a term's sds, in the table's units."""
    return [of.priors.group_sd[term.name] * of.response.scale / float(scale) for scale in term.design.scales]


def _counted(of: Parts) -> list[str]:
    said = []
    for key, what in (
        ("left out", "rows with a gap that were left out"),
        ("weightless", "rows of weight 0, which are counted among rows and tell the fit nothing"),
    ):
        some = {silo: c[key] for silo, c in of.counts.items() if c.get(key)}
        if some:
            said.append(f"{what}: {', '.join(f'{n} at {silo}' for silo, n in some.items())}")
    return said


def _by_silo(model: MixedModel, silos: Sequence[str], records: float | None) -> list[str]:
    """Rows and groups of each silo, and of all, where this process has read all of them; no part of what is saved."""
    held = dict(model.of.counts.items())
    label = model.record_label
    if set(held) != set(silos) or sum(c["groups"][label] if label else c["rows"] for c in held.values()) != records:
        return []  # of another fit
    together = {label: sum(c["groups"][label] for c in held.values()) for label in next(iter(held.values()))["groups"]}
    for shared in (c["shared"] for c in held.values()):  # a group that stands at two silos is one
        together |= {label: len(set().union(*(c["shared"][label] for c in held.values()))) for label in shared}
    counted = [(f"at {silo}", c["rows"], c["groups"]) for silo, c in held.items()] if len(held) <= _SILOS_SHOWN else []
    counted.append(("over all silos", sum(c["rows"] for c in held.values()), together))
    return [f"{where}: " + ", ".join([f"{rows} rows", *(f"{n} of {g}" for g, n in groups.items())])
            for where, rows, groups in counted]  # fmt: skip


def _weighed(result: Result) -> list[str]:
    """What weights say of a q that is the answer; where weighed draws are, the reason of convergence says it."""
    said = result.convergence
    mean, sd, khat = (said.get(name) for name in ("mean_error_sd", "sd_error_log", "khat"))
    if mean is None or sd is None or result.refined is not None:
        return []
    also = "" if khat is None else f"; k-hat {khat:.2f}, effective sample size {said['ess']:.0f}"
    off = f"means are off by at most {mean:.2g} sds, and sds by {abs(math.expm1(sd)):.2g} of themselves"
    return [f"by draws that were weighed by the likelihood of all records, {off}{also}"]


def _summary(model: MixedModel, result: Result) -> Summary:
    of, family = model.of, FAMILIES[model.family]
    _check_is_of(model, result)
    found, weights = result.readable() or _as_drawn(model, result)
    lines = {name: _line(name, d, weights, bool(family.ratio) and name != "(Intercept)") for name, d in found.items()}
    effects = [n for n in lines if n in of.fixed.names or "|" in n]
    groups = [n for n in lines if n.startswith(("sd(", "cor("))]
    state = {True: "converged", False: "NOT converged", None: "not assessed"}[result.converged]
    of_what = _counted_level(of)
    head = (
        model.text,
        f"family {model.family}, link {family.link}{of_what}; {len(result.silos)} silos, {result.algorithm}",
    )
    records = result.metrics.get("records")
    label = model.record_label or "row"
    counted = () if records is None else (f"{records:g} records (a record is a {label}), over all silos",)
    notes = (
        *(_counted(of) if result.privacy is None else ()),
        *_by_prior(of, found, weights),
        *(_NUMBERED.format(name) for name in _numbered(of.terms, of.dictionary, {*of.local, *of.most})),
    )
    noise = counts_noise(result.privacy)
    foot = (
        *counted,
        *(_by_silo(model, result.silos, records) if result.privacy is None else ()),
        *notes,
        *([noise] if noise else []),
        *_weighed(result),
        f"{state} after {result.rounds} rounds: {result.convergence['reason']}",
    )
    rest = [n for n in lines if n not in effects and n not in groups]
    plain = [tuple(lines[n]._replace(ratio=None) for n in names) for names in (groups, rest)]
    return Summary(
        head, tuple(lines[n] if "|" not in n else lines[n]._replace(ratio=None) for n in effects), plain[0], plain[1],
        family.ratio, foot, notes,
    )  # fmt: skip


class Checked(NamedTuple):
    """A number of the tables, and of their replicates: mean, central 95% interval, and the share of them that are
    larger, those that are alike by half."""

    name: str
    observed: float
    replicated: float
    low: float
    high: float
    larger: float


#: A share of replicates that is smaller, or larger than 1 less this, is told of.
_ODD = 0.01


@dataclass(frozen=True)
class Check:
    """What `MixedModel.check` returns. `str` is the table."""

    rows: tuple[Checked, ...]
    n: int
    silos: int
    converged: bool = True  # whether the fit is known to have
    small: tuple[str, ...] = ()  # sds that are too small to be told from totals
    scaled: bool = True  # whether the response is one that a dictionary may scale
    weighed: bool = False  # whether rows have weights, which no number here counts

    def __str__(self) -> str:
        cells = [["Predictive check", "observed", "replicated", "2.5%", "97.5%", "larger"]]
        for row in self.rows:
            spread = (row.high - row.low) / 4
            cells.append([row.name, *(shown(value, spread) for value in row[1:5]), f"{row.larger:.2f}"])
        return "\n".join([*_aligned(cells), "", self.said])

    @property
    def said(self) -> str:
        """What it comes to, in a line."""
        odd = [f"'{row.name}'" for row in self.rows if not _ODD <= row.larger <= 1 - _ODD]
        about = f"totals over {self.silos} silos, and over {self.n} replicates of their tables under the posterior"
        may = "another family or term may" if self.converged else "another family or term may, or a fit that converged"
        told = f"; the model makes no tables like these in {', '.join(odd)}: {may}" if odd else ""
        small = ", ".join(f"'{name}'" for name in self.small)
        cure = "; give the response a centre and a scale in the dictionary" if self.scaled else ""
        about += ", each row once, whatever its weight" if self.weighed else ""
        return about + told + (f"; {small}: too small to tell from totals{cure}" if small else "")

    def to_json(self) -> dict[str, Any]:
        """For result.json and the report; None for what is infinite."""
        rows = [row._asdict() for row in self.rows]
        rows = [{k: v if k == "name" or math.isfinite(v) else None for k, v in row.items()} for row in rows]
        return {"replicates": self.n, "said": self.said, "rows": rows}

    __repr__ = __str__


class _At(NamedTuple):
    """Points of the global sites, unconstrained (S, n), in place of a posterior's draws."""

    z: Tensor
    theta: Mapping[str, Tensor] = {}

    def draws(self, n: int, seed: int) -> Tensor:
        return self.z[:n]


def _totals(
    model: MixedModel, problem: Problem, posterior: Posterior | _At, laid: Any, n: int, seed: int, noise: int
) -> Tensor:
    """(1 + n, numbers) of a silo's rows, and of replicates of them, as of `_added`."""
    from secure_fvi.results import replicates

    problem = problem._replace(model=model._drawn(), schema=problem.schema.to(problem.device))
    drawn = (draw["y"].cpu() for draw in replicates(problem, posterior, laid, n, seed, noise=noise))
    if _counts(model.of):  # past 2^63 a draw comes back below 0
        drawn = (y.masked_fill(y < 0, math.inf) for y in drawn)
    y, present = laid["y"].cpu(), laid["present"].cpu()
    return torch.stack([_added(model.of, values, present) for values in (y, *drawn)])


#: Numbers that are added of a table of any family.
_ADDED = 6


def _added(of: Parts, y: Tensor, present: Tensor) -> Tensor:
    """Totals of responses (N, M): rows, records, y, y^2, means of records and their squares, and rows at each of
    `_counted_places`. y: in its standardised unit."""
    y = torch.where(present > 0, y.to(present), 0.0)
    rows, mean = present.sum(1), y.sum(1) / present.sum(1)
    counted = [((y == place) * present).sum() for place in _counted_places(of)]
    ones = torch.ones_like(mean)
    return torch.stack([*(v.sum() for v in (rows, ones, y, y.square(), mean, mean.square())), *counted])


def _counted_places(of: Parts) -> range:
    """Values of the response whose rows are counted: levels of an ordinal, and 0 of a count."""
    return range(len(of.response.levels) if of.family == "ordinal" else _counts(of))


def _counts(of: Parts) -> bool:
    return FAMILIES[of.family].kinds == ("integer",)


#: What is counted in a row of a response, where that is not the response by its name: of a binomial no share of trials.
_COUNTED = {"binomial": " of successes a row"}

#: How many times a variance has to be what is not known of it, at least, to be told.
_KNOWN = 50.0


def _checked(model: MixedModel, totals: Tensor, step: float = 0.0) -> tuple[tuple[Checked, ...], tuple[str, ...]]:
    """Of totals that are known to a `step`; and names of sds that are too small for that."""
    of, label, scale = model.of, model.record_label, model.of.response.scale
    rows, records, y, squares, means, square_means, *at = totals.mT
    found: dict[str, Tensor] = {}
    small = []

    def sd(name: str, count: Tensor, total: Tensor, square: Tensor) -> None:
        mean = total / count
        variance = square / count - mean**2
        known = variance >= _KNOWN * step * (1 + 2 * mean.abs()) / count
        if step == 0 or (known[0] and known[1:].double().mean() > 0.5):
            found[name] = scale * variance.clamp(min=0).sqrt()
        else:
            small.append(name)

    if of.family == "bernoulli":
        found[f"share{_counted_level(of) or ' of 1'}"] = y / rows
    elif of.family != "ordinal":
        found[f"mean{_COUNTED.get(of.family, '')}"] = y / rows * scale + of.response.centre
        sd(f"sd{_COUNTED.get(of.family, '')}", rows, y, squares)
    none = "rows without a success" if of.family == "binomial" else "0"
    names = of.response.levels if of.family == "ordinal" else (none,)
    found |= {f"share of {name}": count / rows for name, count in zip(names, at, strict=False)}
    if label is not None:
        what = {"bernoulli": "shares", "binomial": "mean successes"}.get(of.family, "means")
        sd(f"sd of {what} by {label}", records, means, square_means)
    checked = []
    for name, values in found.items():
        observed, *drawn = (
            values.double().nan_to_num(math.inf, math.inf).tolist()
        )  # of infinite draws sds are no number
        low, high = np.quantile(drawn, [0.025, 0.975], method="inverted_cdf")
        larger = np.mean(np.greater(drawn, observed) + 0.5 * np.isclose(drawn, observed, rtol=1e-9))
        checked.append(Checked(name, observed, float(np.mean(drawn)), float(low), float(high), float(larger)))
    return tuple(checked), tuple(small)


def _check_is_of(model: MixedModel, result: Result) -> None:
    """Raises InputError for another model's result."""
    theirs = getattr(getattr(result, "problem", None), "model", None)
    if isinstance(theirs, MixedModel) and theirs.identity != model.identity:
        raise InputError("the result is of another model: another formula, family, dictionary, priors or options")


def _as_drawn(model: MixedModel, result: Result) -> tuple[dict[str, Tensor], Tensor]:
    """Of a point, or of a result that does not know the model."""
    found = user_draws(model, result.sample(_DRAWS))
    return found, torch.full((_DRAWS,), 1 / _DRAWS, dtype=torch.float64)


def _counted_level(of: Parts) -> str:
    """Of which of a category's two levels a chance is told; empty of numbers."""
    levels = of.dictionary[of.response.name].levels
    return f" of {of.response.name} = {levels[1]}" if of.family == "bernoulli" and len(levels) == 2 else ""


def _described(model: MixedModel, where: bool = True) -> list[str]:
    """`where`: with the words that say at which centres, which follow from the rest."""
    of, program = model.of, model.fn
    assert isinstance(program, Program)
    lives = {"record": "local, a record", "silo": "local, of a silo", "global": "global, it spans silos"}
    said = [
        f"{model.text}  (family {model.family}{', the chance' * bool(_counted_level(of))}{_counted_level(of)})",
        f"columns that it reads: {', '.join(model.columns)}",
    ]
    own = "a row" if model.record_label is None else f"all rows of a {model.record_label}"
    said.append(f"a record, by which sums and differential privacy count: {own}")
    said += [f"(1 | {t.of.label}): {lives[t.place]}" if t.design.constant else
             f"({t.of.design} | {t.of.label}): {lives[t.place]}" for t in of.terms]  # fmt: skip
    for at in of.kept:
        name, mean, sd = _prior_of(of, at)
        mean += of.response.centre if name == "(Intercept)" else 0.0
        centred = _where(of.fixed.centres_of(at)) if where else ""
        if name == "(Intercept)":
            centred = ", where other columns are at their centres"
        said.append(f"prior of {name}: normal({mean:.4g}, {sd:.4g}){centred}")
    for t in of.terms:
        said += [f"prior of sd({t.name}) {name}: half-t(3, {scale:.4g})"
                 + (_where(t.design.centres_of(at)) if where else "")
                 for at, (name, scale) in enumerate(zip(t.design.names, _half_t(of, t), strict=True))]  # fmt: skip
    if correlated := [t for t in of.terms if t.correlated]:
        centres: dict[str, float] = {}
        for t in correlated if where else ():
            centres |= _centres(t.design)
        said.append(f"prior of correlations: LKJ({of.priors.lkj:g}){_where(centres)}")
    if of.family in ("gaussian", "student"):
        said.append(f"prior of sigma: half-t(3, {of.priors.aux * of.response.scale:.4g})")
    said += [f"prior of {name}: {prior}" for name, prior in _OWN_PRIORS.get(of.family, {}).items()]
    if of.family == "ordinal":
        first, gaps = program.even_cuts(torch.zeros((), dtype=torch.float64))
        names = [f"{below}|{above}" for below, above in itertools.pairwise(of.response.levels)]
        said.append(
            f"prior of {names[0]}: normal({float(first):.4g}, {_NORMAL:g}), where other columns are at their centres"
        )
        said += [
            f"prior of log({after} - {before}): normal({gap:.4g}, 1)"
            for (before, after), gap in zip(itertools.pairwise(names), gaps.tolist(), strict=True)
        ]
    return said


# ---- Effects of a record integrated out of its likelihood ----
#
# By adaptive Gauss-Hermite quadrature (Pinheiro and Bates 1995), in pure functions of tensors: they run inside the
# program, traced and differentiated.

#: Nodes an effect by the number of effects of a record; with more, they are latents.
NODES = {1: 19, 2: 9, 3: 7}
#: Of a density whose logarithm is quadratic: exact for the integral, its first two derivatives and the third where that
#: is at most quadratic in an effect.
FEW_NODES = 3
#: Nodes at most where a silo has latents too, by whose number evaluations multiply: right to 1e-4 nats a record of ten
#: rows where sds are 1, 3e-3 where they are 3, .06 where they are 10.
BESIDE_LATENTS = 9
STEPS, STEPS_BETWEEN = 4, 8
#: Of those whose curvature changes fast, as a count's does, from where its rows say, and of those where it is not the
#: expected one.
STEPS_OF_COUNTS, MORE_STEPS = 3, 7


class Given(NamedTuple):
    """`density(eta, data)` of y. `kernel(eta, y, data)`: its logarithm, up to what eta does not change. `slopes(eta, y,
    data)`: the first derivative of that in eta, and its expected curvature, which is positive."""

    density: Callable[[Tensor, Mapping[str, Any]], Any]
    kernel: Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor]
    slopes: Callable[[Tensor, Tensor, Mapping[str, Any]], tuple[Tensor, Tensor]]
    steps: int = STEPS
    information: Tensor | float = 0.2  # about, of a row in eta
    quadratic: bool = False  # whether the logarithm of the density is, in eta
    likeliest: Callable[[Tensor], Tensor] | None = None  # eta, about, at which y is: steps begin near it, not at 0
    alone: bool = False  # whether rows far from each other do not draw an effect between them


#: From where on e^-x is as nothing.
_LINEAR = 30.0


class _Softplus(torch.autograd.Function):
    """log(1 + e^x), to 1e-13. Of exp and log PyTorch works out several numbers at once, of log1p, and so of its own
    softplus and logsigmoid, one: that takes ten times as long. Its slope is sigmoid(x), one operation, where the chain
    of those here would be a dozen, and as many again for each derivative more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        low = x.clamp(max=_LINEAR)
        return (1 + low.exp()).log() + (x - low)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.sigmoid(*ctx.saved_tensors)


def _softplus(x: Tensor) -> Tensor:
    found: Tensor = _Softplus.apply(x)
    return found


def binomial_kernel(eta: Tensor, y: Tensor, data: Mapping[str, Any]) -> Tensor:
    return y * eta - data.get("trials", 1.0) * _softplus(eta)


def binomial_slopes(eta: Tensor, y: Tensor, data: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    p, n = torch.sigmoid(eta), data.get("trials", 1.0)
    return y - n * p, n * p * (1 - p)


def count_kernel(eta: Tensor, y: Tensor, shape: Tensor) -> Tensor:
    return y * eta - (y + shape) * _softplus(eta - shape.log())


def count_slopes(eta: Tensor, y: Tensor, shape: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.sigmoid(eta - shape.log())
    return y - (y + shape) * p, shape * p


def ordinal_logits(eta: Tensor, cuts: Tensor) -> Tensor:
    """(..., K) log p of each level: sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - e^(b - a)) does not cancel.

    Nothing is written in place, as in Pyro's OrderedLogistic, which PyTorch cannot map over draws.
    """
    at = cuts - eta.unsqueeze(-1)
    below, above = torch.nn.functional.logsigmoid(at), torch.nn.functional.logsigmoid(-at)
    gaps = torch.log(-torch.expm1(cuts[:-1] - cuts[1:]))
    return torch.cat([below[..., :1], below[..., 1:] + above[..., :-1] + gaps, above[..., -1:]], -1)


def _ends(cuts: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The thresholds below and above each."""
    ends = torch.cat([cuts.new_full((1,), -_FAR), cuts, cuts.new_full((1,), _FAR)])
    return ends[y], ends[y + 1]


def ordinal_kernel(eta: Tensor, y: Tensor, cuts: Tensor) -> Tensor:
    low, high = _ends(cuts, y)
    return -_softplus(low - eta) - _softplus(eta - high)


def ordinal_slopes(eta: Tensor, y: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor]:
    below, above = (torch.sigmoid(end - eta) for end in _ends(cuts, y))
    return below + above - 1, below * (1 - below) + above * (1 - above)


def student_slopes(eta: Tensor, y: Tensor, sigma: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
    r = y - eta
    return (nu + 1) * r / (nu * sigma**2 + r**2), torch.ones_like(eta) * (nu + 1) / ((nu + 3) * sigma**2)


_FAR = 1e6


def _of_count(y: Tensor) -> Tensor:
    return (y + 0.5).log()


#: Longest Newton step, in prior sds of the effects, and at how many times that it is looked how far to go.
_LONGEST, _ALONG = 3.0, (1 / 16, 1 / 4, 1.0, 4.0, 32.0)
#: Furthest from 0, in prior sds, that an effect's mode is looked for.
_ANYWHERE = 1e8
#: Rows by each of which alone it is looked where to begin.
_FIRST = 8


def marginal(
    eta: Tensor, design: Tensor, y: Tensor, present: Tensor, data: Mapping[str, Any], given: Given, most: int = 19
) -> Tensor:
    """log of the integral of p(y_i | eta_i + design_i eps) N(eps; 0, 1) over eps (d,), (N,), by adaptive Gauss-Hermite
    quadrature (Pinheiro and Bates 1995): nodes around the mode of each record's integrand, as wide as its curvature.

    eta, y, present (N, M); design (N, M, d). most: nodes of an effect, at most. Centre and width only say where nodes
    lie: no gradient goes through them.
    """
    size, here = design.shape[-1], present > 0
    weights = torch.where(here, data.get("weights", torch.ones_like(present)), torch.zeros_like(present))
    # Records come last: their rows are few, and a sum over a short last axis costs more than all that it sums.
    eta, y = (torch.where(here, value, torch.zeros_like(value)).mT.contiguous() for value in (eta, y))
    design = torch.where(here.unsqueeze(-1), design, torch.zeros_like(design)).movedim(-1, -3).mT.contiguous()
    data = {name: value.mT.contiguous() if name in ADDITIONS else value for name, value in data.items()}
    rows = _Rows(eta.detach(), design.detach(), y, weights.mT.contiguous(), data, given)
    centre, width = _around(rows)
    x, log_w = _nodes(size, min(most, FEW_NODES if given.quadratic else NODES[size]), eta)
    eps = centre + _across(width, x.unsqueeze(-1))  # (Q, d, N)
    # What no effect changes is worked out once a row, rather than at each node: logarithms of factorials, say.
    level = torch.zeros_like(eta)
    rest = given.density(level, data).log_prob(y) - given.kernel(level, y, data)
    term = ((given.kernel(_moved(eta, design, eps), y, data) + rest) * rows.weights).sum(-2)
    term = term + (0.5 * x.square().sum(-1) + log_w).unsqueeze(-1) - 0.5 * eps.square().sum(-2)
    return torch.logsumexp(term, 0) + width.diagonal(dim1=-3, dim2=-2).log().sum(-1)


def _moved(eta: Tensor, design: Tensor, eps: Tensor) -> Tensor:
    """eta_i + design_i eps, (..., M, N), of design (d, M, N) and eps (..., d, N)."""
    for k in range(len(design)):
        eta = eta + design[k] * eps[..., k : k + 1, :]
    return eta


def _across(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix (d, d, N) times x (..., d, N), (..., d, N)."""
    return torch.stack([(row * x).sum(-2) for row in matrix], -2)


class _Rows(NamedTuple):
    """Records' rows, as `marginal` takes them, but (M, N); weights are 0 where there is none."""

    eta: Tensor
    design: Tensor  # (d, M, N)
    y: Tensor
    weights: Tensor
    data: Mapping[str, Any]
    given: Given

    def curved(self, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Slope (d, N) of the logarithm of the integrand, and the factor (N, d, d) of its expected curvature."""
        at = _moved(self.eta, self.design, eps)
        slope, curve = (part.detach() * self.weights for part in self.given.slopes(at, self.y, self.data))
        return (self.design * slope).sum(-2) - eps, self.factor(curve)

    def factor(self, curve: Tensor) -> Tensor:
        """(N, d, d) of the curvature of the integrand's logarithm, of rows' (M, N) in eta."""
        design = self.design
        if len(design) == 1:
            return (1 + (curve * design.square()).sum(-2)).sqrt().mT.unsqueeze(-1)
        eye = torch.eye(len(design), dtype=curve.dtype, device=curve.device)
        among = torch.stack([(design * (design[k] * curve)).sum(-2) for k in range(len(design))])
        return torch.linalg.cholesky_ex(eye + among.movedim(-1, 0))[0]

    def height(self, eps: Tensor) -> Tensor:
        """Logarithm of the integrand at eps (..., d, N), but for a constant: (..., N)."""
        kernel = self.given.kernel(_moved(self.eta, self.design, eps), self.y, self.data).detach()
        return (kernel * self.weights).sum(-2) - 0.5 * eps.square().sum(-2)

    def begun(self) -> tuple[Tensor, Tensor]:
        """Where the integrand is the largest of 0 and of what would be its mode if the density were normal around where
        each y is the likeliest, by all rows, and, where these may be `alone`, by each of the first of them, (d, N); and
        its height there."""
        zero = torch.zeros_like(self.design[:, 0])
        if self.given.likeliest is None:
            return zero, self.height(zero)
        eta = self.given.likeliest(self.y)
        curve = self.given.slopes(eta, self.y, self.data)[1].detach() * self.weights
        pull = self.design * (curve * (eta - self.eta))
        tried = [zero, _solved(self.factor(curve), pull.sum(-2))]
        if self.given.alone:
            tried += (pull / (1 + self.design.square().sum(0) * curve))[:, :_FIRST].unbind(1)
        return self.highest(tried, self.height(zero))

    def highest(self, tried: Sequence[Tensor], height: Tensor) -> tuple[Tensor, Tensor]:
        """The first of `tried` (d, N) where the integrand is the largest, and its height there, (N,). height: that of
        the first one."""
        best, top = tried[0], height.nan_to_num(nan=-math.inf)
        for eps, its in zip(tried[1:], self.height(torch.stack(list(tried[1:]))), strict=True):
            higher = its > top
            best, top = torch.where(higher, eps, best), torch.where(higher, its, top)
        return best, top


def _nodes(size: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(Q, d) nodes of a standard normal, `count` of each effect, and the logarithms of their weights (Q,)."""
    at, w = np.polynomial.hermite_e.hermegauss(count)
    grid = np.stack([g.reshape(-1) for g in np.meshgrid(*[at] * size, indexing="ij")], -1)
    log_w = np.add.reduce(np.meshgrid(*[np.log(w / w.sum())] * size, indexing="ij")).reshape(-1)
    return torch.tensor(grid).to(like), torch.tensor(log_w).to(like)


def _around(rows: _Rows) -> tuple[Tensor, Tensor]:
    """Mode (d, N) of each record's integrand by Newton's steps, and the factor (d, d, N) of the inverse curvature."""
    design = rows.design
    if rows.given.quadratic:
        zero = torch.zeros_like(design[:, 0])
        slope, lower = rows.curved(zero)
        eps = zero + _solved(lower, slope)
    elif len(design) == 1 and not rows.given.alone:
        eps = _between(rows)
    else:
        eps = _climbed(rows)
    lower = rows.curved(eps)[1]
    if len(design) == 1:
        return eps, 1 / lower.movedim(0, -1)
    eye = torch.eye(len(design), dtype=eps.dtype, device=eps.device)
    return eps, torch.linalg.solve_triangular(lower, eye.expand(lower.shape), upper=False).mT.movedim(0, -1)


def _between(rows: _Rows) -> Tensor:
    """The mode (1, N) of one effect in which the integrand's logarithm is concave, by slopes alone.

    Its curvature is at least the prior's 1, so that the mode lies between any eps and eps + slope. A step that leaves
    what is known so, or follows one that did not halve the slope, goes to the middle: far below a count Newton's steps
    go anywhere, and from far above it each makes the mean e times less, however far it is.
    """
    eps = torch.zeros_like(rows.design[:, 0]) if rows.given.likeliest is None else rows.begun()[0]
    low, high = eps - _ANYWHERE, eps + _ANYWHERE
    before = torch.full_like(eps, math.inf)
    for _ in range(STEPS_BETWEEN):
        slope, lower = rows.curved(eps)
        slope = torch.where(slope.isnan(), -eps, slope).clamp(-_ANYWHERE, _ANYWHERE)  # to 0 from where it overflows
        low, high = torch.maximum(low, eps + slope.clamp(max=0.0)), torch.minimum(high, eps + slope.clamp(min=0.0))
        eps = eps + slope / lower[:, 0, 0].square()
        inside = (eps >= low) & (eps <= high) & (2 * slope.abs() <= before)
        eps, before = torch.where(inside, eps, 0.5 * (low + high)), slope.abs()
    return eps


def _climbed(rows: _Rows) -> Tensor:
    """The mode (d, N) of several effects, or near the highest of them where there are more.

    How far a step goes is looked for along it: a whole one may lead astray, as in `_between`.
    """
    eps, height = rows.begun()
    for _ in range(rows.given.steps):
        slope, lower = rows.curved(eps)
        move = _solved(lower, slope)
        move = move * (_LONGEST / move.norm(dim=0).clamp(min=_LONGEST))
        eps, height = rows.highest([eps, *(eps + times * move for times in _ALONG)], height)
    return eps


def _solved(lower: Tensor, right: Tensor) -> Tensor:
    """Of a factor (N, d, d) and (d, N)."""
    if len(right) == 1:
        return right / lower[:, 0, 0].square()
    return torch.cholesky_solve(right.mT.unsqueeze(-1), lower).squeeze(-1).mT
