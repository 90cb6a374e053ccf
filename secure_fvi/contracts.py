"""What a program and a silo's data have to keep to, looked at before the first round: afterwards it has been paid for.

*The program* (`check_program`), on made data, at every party alike: log p is a sum over records, says the same each
time it is run, has a gradient in every latent, and gives draws as the end of a fit does. *The data*
(`read_at_silo`), at their silo: observed values lie in the support of their sites, labels point into what they index,
terms are finite, and the sum over records holds among the silo's own. Pyro's validation is off while a program runs;
this stands in its place, and costs a silo some log2 N runs on its N rows (`_apart`), without gradients, two with them,
and a few on eight rows or fewer.

What is found at a silo counts that silo's rows: it is for that silo alone (`DataError`).
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pyro.distributions import Unit
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from secure_fvi.algorithms.base import Problem
from secure_fvi.density import (
    ALL_RECORDS,
    Evaluation,
    LogDensity,
    LogTerms,
    Params,
    has_no_density,
    observed_value,
    record_dim,
    running,
    site_mask,
)
from secure_fvi.discovery import Discovery, Start, kind_of, one_line, start_of
from secure_fvi.errors import DataError, InputError, SecureFVIWarning, UntestedOperation
from secure_fvi.federated_model import rounded
from secure_fvi.privacy.settings import RecordDP

if TYPE_CHECKING:
    from secure_fvi.algorithms.vertical.predictors import Predictor

_T = TypeVar("_T")
_MADE = 4  # records of made data
_SOME = 8  # rows at a silo that are also evaluated in parts, and few enough to show what many drown
_AT_ONCE = 1024  # rows whose gradient is looked at together
_SPREAD = 0.1  # of the point at which log p is compared, around the start
_SPREADS = (0.1, 2.0)  # of those at which slopes are
_NEAR = (0.3, 1.0, 3.0)  # of the start, in unconstrained space: where else a site is tried
_FAR = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # and where an edge of log p is looked for
_EDGE = 1e6  # nats that log p falls there at least
_BELOW = 30.0  # nats under the start from which on an edge is where q does not come, or a logarithm that has run out
_FORBIDDEN = 1e8  # nats: what a pyro.factor under minus that much is taken to forbid
_AROUND = 4  # points at each distance from where a run ran off
_PRIOR_DRAWS = 16  # in which a parameter is looked for that its distribution does not take
_DIFFERENT_ROWS = 10  # from which a file in which every row occurs twice is taken for a mistake


class _Point:
    """Values of all latents around the start, in unconstrained space, the same at every party."""

    def __init__(self, problem: Problem, records: int, spread: float = _SPREAD) -> None:
        rng, start = torch.Generator().manual_seed(0), problem.start

        def around(value: Tensor) -> Tensor:
            noise = torch.randn(value.shape, generator=rng, dtype=torch.float64)
            return value.to(problem.device) + spread * noise.to(problem.device, problem.dtype)

        self.problem = problem
        self.z_global, self.z_silo = around(start.z_global), around(start.z_silo)
        self.z_record = around(start.z_record[:1].expand(records, -1))
        self.theta = {name: value.to(problem.device) for name, value in start.theta.items()}

    def evaluate(self, rows: Params, silo: float = 0.0, record: float = 0.0) -> LogTerms:
        """Log p, with the silo's or the records' latents moved by so much."""
        z_silo, z_record = self.z_silo + silo, self.z_record + record
        return self.problem.density.evaluate(self.z_global, z_silo, z_record, self.theta, rows)

    def of(self, part: Tensor) -> _Point:
        """The same values, of some of the records."""
        found = copy.copy(self)
        found.z_record = self.z_record[part]
        return found

    def latents(self) -> Params:
        split = self.problem.layout.split
        return {**split(self.z_global, "global"), **split(self.z_silo, "silo"), **split(self.z_record, "record")}


# ---- the program ----


def check_program(problem: Problem, importance_samples: int = 1) -> None:
    """Raise InputError where the program does not keep its contract, and say why; warn of a site that nothing uses.

    Looks at made data alone, so that all parties come to the same answer.
    """
    rows = {name: value.to(problem.device) for name, value in problem.schema.dummy_rows(_MADE).items()}
    try:
        _check_program(_Point(problem, _MADE), rows, importance_samples)
    except (InputError, SecureFVIWarning):  # a warning that the user had made an error of is no fault of the program
        raise
    except Exception as error:  # the program is the user's: anything may come
        raise InputError(
            f"the model fails on made data, where gradients are taken ({type(error).__name__}: {one_line(error)})"
        ) from error


def _check_program(point: _Point, rows: Params, importance_samples: int) -> None:
    problem = point.problem
    first, again = _undrawn(point, rows), _undrawn(point, rows)
    if not all(_same(a, b) for a, b in zip(first, again, strict=True)):
        raise InputError(
            "the model gives another log density each time it is run: it changes its own state (a list, dict or array "
            "outside of it, or its data), or asks for the time"
        )
    if not bool(torch.isfinite(first.shared)) or not bool(torch.isfinite(first.silo)):
        raise InputError(
            "the log density of the global sites is not finite near the start; look at their priors, or say where to "
            "begin with start={...}"
        )
    found = _dependent(point, rows)
    if found.records:
        raise InputError(found.said())
    if found.shared or found.silo:
        raise InputError(_PRIOR.format("global" if found.shared else "silo"))
    _check_owners(point, rows, first)
    if type(problem.density) is LogDensity:  # of a traced program's graph that was looked at when it was traced
        _check_gradients(point, rows)
        _check_edges(point, rows)
        _warn_of_parameters(problem, rows)
    _check_taken(point, rows)
    _check_end(point)
    if isinstance(problem.privacy, RecordDP):
        _check_mapped(point, rows, first.records, "record-level privacy evaluates each record alone")
    elif importance_samples > 1:
        _check_mapped(point, rows, first.records, "importance samples go through the model together")


def _undrawn(point: _Point, rows: Params) -> LogTerms:
    """Log p, from a run that draws nothing by itself: a seed set inside makes one draw of all records, and a fit that
    maps the program, or traces it, another one each time."""
    with torch.random.fork_rng(devices=[]):
        numbers, ours = np.random.get_state(), random.getstate()
        try:
            found = None
            for begin in (0, 1):  # a program that sets the seed itself may end where it began
                for _ in range(3):  # another thread of the process may have drawn in the meantime, once
                    torch.manual_seed(begin)
                    np.random.seed(begin)
                    random.seed(begin)
                    before = _drawn_so_far()
                    found = point.evaluate(rows)
                    if _drawn_so_far() == before:
                        break
                else:
                    raise InputError(
                        "the model draws random numbers by itself (torch, numpy or random), anew each time that it is "
                        "run; draw with pyro.sample alone, which the fit sees"
                    )
        finally:
            np.random.set_state(numbers)
            random.setstate(ours)
    assert found is not None
    return found


def _drawn_so_far() -> tuple[bytes, bytes, int]:
    """The states of the generators that a program may draw from."""
    numbers: Any = np.random.get_state()
    state = numbers[1].tobytes() + repr(numbers[2:]).encode()
    return torch.get_rng_state().numpy().tobytes(), state, hash(random.getstate())


_NO_SUM = (
    "the model's log density is not a sum over records: together and in parts, the same records have another one{}. A "
    "program that standardises, lags, sorts or counts over records is another model at every silo; work such numbers "
    "out before, over all silos, and pass them as a column, or with sf.Shared where they are the same for all records"
)


_PRIOR = (
    "the prior of a {} site depends on the data of records; move what depends on data into the record plate, or "
    "share it with sf.Shared"
)


class _Dependent(NamedTuple):
    """What another choice of records changes."""

    records: int = 0  # how many have another term among some of the records than among all
    looked_at: int = 0
    shared: bool = False  # whether global sites have
    silo: bool = False
    sites: tuple[str, ...] = ()  # of records, whose terms change

    def said(self) -> str:
        return _NO_SUM.format(f" at {', '.join(map(repr, self.sites))}" if self.sites else "")


def _dependent(point: _Point, rows: Params) -> _Dependent:
    """Evaluates all rows, and some of them apart from the rest."""
    count = len(point.z_record)
    if count < 2:
        return _Dependent()

    def evaluate(part: Tensor) -> LogTerms:
        return point.of(part).evaluate({name: value[part] for name, value in rows.items()})

    with torch.no_grad():
        whole = point.evaluate(rows)
        bad, looked_at = torch.zeros(2, count, dtype=torch.bool, device=whole.records.device)
        shared, silo, sites = False, False, set[str]()
        for part, found in _in_parts(evaluate, count):
            differ = ~_alike(found.records, whole.records[part])
            if bool(differ.any()) and not sites:
                sites = _differing(point, rows, part)
            bad[part] |= differ
            looked_at[part] = True
            shared |= not _same(found.shared, whole.shared)
            silo |= not _same(found.silo, whole.silo)
    spread_out = _spread_out(count, _AT_ONCE)
    some = {name: value[spread_out] for name, value in rows.items()}
    for spread in _SPREADS if not bad.any() else ():
        for part in _slopes_differ(_Point(point.problem, len(spread_out), spread), some):
            bad[spread_out[part]] = looked_at[spread_out[part]] = True
    return _Dependent(int(bad.sum()), int(looked_at.sum()), shared, silo, tuple(sorted(sites)))


def _slopes_differ(point: _Point, rows: Params) -> Iterator[Tensor]:
    """The parts of the records whose slopes in some latent are other ones among the rest than apart. Where outcomes are
    large, as incomes are, terms drown what a mean over records changes in them; their slopes, each by its own size, do
    not. A part's rows are weighed by numbers of their own, so that they do not cancel."""
    count = len(point.z_record)
    weights = torch.randn(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    few = _spread_out(count, _SOME)
    parts = [few[: len(few) // 2], few[len(few) // 2 :], drawn[: max(1, count // 2)].sort().values]

    def slopes(of: Tensor | None) -> Callable[[Tensor, Tensor | slice], list[Tensor | None]]:
        here = point if of is None else point.of(of)
        latents = [z.detach().clone().requires_grad_() for z in (here.z_global, here.z_silo, here.z_record)]
        data = rows if of is None else {name: value[of] for name, value in rows.items()}
        with torch.enable_grad():
            terms = point.problem.density.evaluate(latents[0], latents[1], latents[2], point.theta, data).records

        def of_part(part: Tensor, at: Tensor | slice) -> list[Tensor | None]:
            if not terms.requires_grad:
                return [None, None, None]
            total = (weights[part].to(terms) * terms[at]).sum()
            found = list(torch.autograd.grad(total, latents, retain_graph=True, allow_unused=True))
            return [*found[:2], None if found[2] is None else found[2][at]]

        return of_part

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = slopes(None)
            pairs = [(part, whole(part, part), slopes(part)(part, slice(None))) for part in parts]
    except Exception:
        return  # so far from the start, or without gradients: what a fit needs is looked at by itself
    tolerance, rounding = (1e-6, 1e-12) if point.problem.dtype == torch.float64 else (1e-2, 1e-5)
    for part, among, apart in pairs:
        largest = max((float(g.abs().max()) for g in among if g is not None and g.numel()), default=0.0)
        for a, b in zip(among, apart, strict=True):
            if a is None or b is None or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
                continue
            size = torch.maximum(a.abs(), b.abs())
            size = size.amax(0, keepdim=True) if a.dim() > 1 and len(a) else size  # of records' latents: by column
            if bool(((a - b).abs() > tolerance * size + rounding * largest).any()):
                yield part
                break


def _differing(point: _Point, rows: Params, part: Tensor) -> set[str]:
    """The sites of records that have other terms among some of the rows than among all. Of a graph, or where discrete
    sites are summed out, none is known by itself."""
    if type(point.problem.density) is not LogDensity:
        return set()
    some, few = point.of(part), {name: value[part] for name, value in rows.items()}
    runs = [p.problem.density.run(p.latents(), p.theta, r) for p, r in ((point, rows), (some, few))]
    names = [name for name in runs[0].own if name in runs[0].in_records]
    terms = zip(names, *(run.terms["record"] for run in runs), strict=False)
    return {name for name, whole, found in terms if not _same(found, whole[part])}


def _in_parts(evaluate: Callable[[Tensor], _T], count: int) -> Iterator[tuple[Tensor, _T]]:
    """What a program says of some of `count` records, by their places: of a few that are spread among them together,
    of the first and the last alone, and of parts of the few, and of all, such that each record is without each other in
    one of them. What depends on any other record is seen by these; what others drown there, by the few."""
    few = _spread_out(count, _SOME)
    parts = [few[:1], few[-1:], *(few[part] for part in _apart(len(few)))]
    if count > _SOME:
        parts += [few, *_apart(count)]
    for part in parts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # standard deviations of one record, say
                found = evaluate(part)
        except Exception:
            if len(part) > 1:
                raise
            continue  # a fit never runs a program on one row, but record by record, which is looked at by itself
        yield part, found


def _spread_out(count: int, most: int) -> Tensor:
    """Places of so many of `count` records at most, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most)).round().long()


def _apart(count: int) -> Iterator[Tensor]:
    """Some log2 N + log2 log2 N parts of `count` places, half of them each, such that for every two, i and j, one holds
    i and not j: by the bits of a shuffled number and those of the count of its zeros (Berger 1961, "A note on error
    detection codes for asymmetric channels")."""
    number = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    bits = [number >> k & 1 for k in range(max(1, (count - 1).bit_length()))]
    zeros = len(bits) - torch.stack(bits).sum(0)
    bits += [zeros >> k & 1 for k in range(len(bits).bit_length())]
    for bit in bits:
        part = bit.nonzero()[:, 0]
        if 0 < len(part) < count:
            yield part


def _alike(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: equal up to rounding, or both not a number."""
    tolerance = 1e-6 if a.dtype == torch.float64 else 1e-3
    known = b[torch.isfinite(b)]
    scale = float(known.abs().max()) if known.numel() else 0.0
    return torch.isclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(_alike(a, b).all())


def _check_owners(point: _Point, rows: Params, first: LogTerms) -> None:
    """Global terms depend on global sites, a silo's on global and silo sites: the server computes the first alone."""
    moved = point.evaluate(rows, silo=0.5, record=0.5)
    if not _same(moved.shared, first.shared):
        raise InputError(
            "the prior of a global site, or a pyro.factor outside the record plate, depends on sites of a silo or a "
            "record; name what belongs to a silo in silo_sites"
        )
    if not _same(point.evaluate(rows, record=0.5).silo, first.silo):
        raise InputError("the prior of a silo site depends on sites of records")


def _check_gradients(point: _Point, rows: Params) -> None:
    """Every latent and every pyro.param moves log p, and the gradient says by how much."""
    problem = point.problem
    latents = {name: value.detach().clone().requires_grad_() for name, value in point.latents().items()}
    theta = {name: value.detach().clone().requires_grad_() for name, value in point.theta.items()}
    with torch.enable_grad(), _Edges():
        run = problem.density.run(latents, theta, rows)
        total = _others(run)
    for name, leaf in latents.items():
        gradient = _gradient(_others(run, name), leaf)
        _check_slope(point, rows, name, gradient)
        if name in run.masks:
            _check_masked(name, run.masks[name], gradient)
    for name, leaf in theta.items():
        # An encoder's weights are pyro.params too, which log p does not know.
        if problem.model.encoder is None and _gradient(total, leaf) is None:
            hint = "; a PyroModule's own torch parameters stay as they are: declare them with PyroParam or PyroSample"
            hint = "; give pyro.module(..., update_module_params=True)" if "$$$" in name else hint
            raise InputError(f"pyro.param '{name}' does not reach the log density{hint}")


class _Edges(Messenger):  # type: ignore[misc]
    """Refuses what is observed within bounds that latents move: log p falls off an edge there, which no gradient tells
    of, and no normal q stays on one side of it."""

    def _pyro_sample(self, msg: Any) -> None:
        if has_no_density(msg) or not msg["is_observed"]:
            return
        try:
            bounds = vars(_base(msg["fn"].support)).values()
        except Exception:  # a distribution of the user's own, without one
            return
        if any(bound.requires_grad for bound in _tensors(bounds)):
            raise InputError(
                f"observed site '{msg['name']}': what {kind_of(msg['fn'])} can take depends on latent sites, and its "
                "density ends where they say, which no gradient tells of. Take one with a tail, or make the bound a "
                "number"
            )


#: By which functions a program compares; the log density of one that compares nothing that follows from latents has no
#: edge but where a logarithm ends, which is none of its making.
_COMPARE = {"lt", "le", "gt", "ge", "eq", "ne", "where", "masked_fill", "sign", "heaviside", "relu", "clamp", "clip"}


class _Compares(TorchFunctionMode):
    """Whether a program compares values that follow from latents."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").strip("_") in _COMPARE:
            self.seen |= any(t.requires_grad for t in _tensors((args, *(kwargs or {}).values())))
        return func(*args, **(kwargs or {}))


def _directions(point: _Point) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each latent site, where it is, and a random direction from there, and its opposite."""
    rng = torch.Generator().manual_seed(1)
    for site, at in point.latents().items():
        direction = torch.randn(at.shape, generator=rng, dtype=torch.float64).to(at)
        yield site, at, direction
        yield site, at, -direction


def _check_edges(point: _Point, rows: Params, silo: str | None = None) -> None:
    """Refuse an edge off which the terms of records fall as a latent moves, by a pyro.factor of -inf or -1e10, say:
    what `_Edges` refuses, by hand. One of global factors alone may lie where q does not come: the fit tells of it."""
    density, latents = point.problem.density, point.latents()
    leaves = {name: value.detach().clone().requires_grad_() for name, value in latents.items()}
    with torch.enable_grad(), _Compares() as compares:
        here = _observed(density.run(leaves, point.theta, rows))
    if not compares.seen:
        return

    def terms(site: str, value: Tensor) -> dict[str, float]:
        """Nothing where the program fails so far out, which is no edge of its log density."""
        with contextlib.suppress(Exception), torch.no_grad():
            return _observed(density.run({**latents, site: value}, point.theta, rows))
        return {}

    for latent, at, direction in _directions(point):
        near, before = 0.0, here
        for far in _FAR:
            found = terms(latent, at + far * direction)
            if not found:
                break
            for site in found:
                if not _fallen(before[site], found[site]):
                    continue
                ends, between = (near, far), (before[site], found[site])
                for _ in range(60):  # to where the two are one number
                    middle = 0.5 * sum(ends)
                    value = terms(latent, at + middle * direction).get(site, between[1])
                    first = _fallen(between[0], value)
                    ends, between = (
                        ((ends[0], middle), (between[0], value)) if first else ((middle, ends[1]), (value, between[1]))
                    )
                if _fallen(*between) and max(between) > here[site] - _BELOW:
                    where, error = ("", InputError) if silo is None else (f"silo '{silo}': ", DataError)
                    raise error(
                        f"{where}site '{site}': its log density falls off an edge that '{latent}' moves, of which no "
                        "gradient tells, and no normal q stays on one side of it. Take a distribution with a tail, or "
                        f"a penalty that grows smoothly; where the edge is a number, give '{latent}' a prior that ends "
                        "there"
                    )
            near, before = far, found


def _observed(run: Evaluation) -> dict[str, float]:
    """Terms of records, each site's together, but for their latents' own; nan as 0, which is no edge."""
    named = [name for name in run.own if name not in run.latents and (name in run.in_records or name == ALL_RECORDS)]
    return {name: float(torch.nan_to_num(run.own[name].detach(), nan=0.0, neginf=-np.inf)) for name in named}


def _fallen(a: float, b: float) -> bool:
    """Whether of two values of a log density one lies so far under the other as beyond an edge."""
    return abs(a - b) > _EDGE if np.isfinite([a, b]).all() else a != b


def _warn_of_parameters(problem: Problem, rows: Params) -> None:
    """Warn where values that priors can take make a parameter what its distribution does not take: a scale below 0.
    Seen in that many draws of all sites, so that one in ten is missed with probability 0.2. What is so at the start is
    refused by a silo, on its data."""
    point, begins = _Point(problem, _MADE, spread=0.0), _Parameters(far=False)
    with contextlib.suppress(Exception), torch.enable_grad(), begins:
        problem.density.run(point.latents(), point.theta, rows)
    for seed in range(_PRIOR_DRAWS):
        looks = _Parameters()
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.enable_grad(), looks:
            torch.manual_seed(seed)
            with running(problem.dtype, problem.device):
                problem.model.fn(**rows, **problem.schema.constants)
        if looks.said and not begins.said:
            warnings.warn(
                f"{looks.said} for values that priors allow, where log p is none, or of another model. {_CANNOT}",
                SecureFVIWarning,
                stacklevel=2,
            )
            return


class _Parameters(Messenger):  # type: ignore[misc]
    """Looks at parameters of all sites that follow from latents."""

    def __init__(self, far: bool = True) -> None:
        """far: where numbers may have run out of digits, so that 0 and what is none are passed over."""
        super().__init__()
        self.said, self.far = "", far
        self.latents: Params = {}

    def _pyro_sample(self, msg: Any) -> None:
        if has_no_density(msg) or self.said:
            return
        for name, constraint, given, bad in _bad_parameters(msg["fn"]):
            if constraint.event_dim > 1:
                continue  # a matrix is not taken apart
            nearly = torch.nextafter(given.detach(), torch.full_like(given, np.inf))
            number = ~torch.isnan(given if given.dim() == bad.dim() else given.sum(-1))
            if not self.far or bool((~constraint.check(nearly) & number).any()):
                sites = _names(given, self.latents)
                self.said = (
                    f"site '{msg['name']}' has a {name} that {kind_of(msg['fn'])} does not take "
                    f"({described(constraint)}){f', by {sites},' if sites else ''}"
                )
                return

    def _pyro_post_sample(self, msg: Any) -> None:
        drawn = not msg["is_observed"] and not has_no_density(msg)
        if drawn and isinstance(msg["value"], Tensor) and msg["value"].is_floating_point():
            self.latents[msg["name"]] = msg["value"] = msg["value"].detach().requires_grad_()


def _names(value: Tensor, latents: Params, all_used: bool = False) -> str:
    """The latent sites that a value follows from, in quotes; those that do not move it there too, if `all_used`."""
    if not value.requires_grad or not latents:
        return ""
    uneven = torch.arange(1.0, value.numel() + 1).to(value)  # shares of a whole have a sum that nothing moves
    found = torch.autograd.grad(
        (value.reshape(-1) * uneven).sum(), list(latents.values()), retain_graph=True, allow_unused=True
    )
    used = [g is not None and (all_used or bool((g != 0).any())) for g in found]
    return ", ".join(f"'{name}'" for name, one in zip(latents, used, strict=True) if one)


def _others(run: Evaluation, site: str | None = None) -> Tensor:
    """The terms of all sites but one."""
    return sum((term for name, term in run.own.items() if name != site), torch.zeros(()))


def _gradient(value: Tensor, leaf: Tensor) -> Tensor | None:
    """None where `leaf` has no part in `value`."""
    if not value.requires_grad:
        return None
    return torch.autograd.grad(value, leaf, retain_graph=True, allow_unused=True)[0]


def _check_slope(point: _Point, rows: Params, site: str, gradient: Tensor | None) -> None:
    """The gradient of all but the site's own prior against a difference along a random direction."""
    density, latents = point.problem.density, point.latents()
    precise = point.problem.dtype == torch.float64
    step, floor = (1e-5, 1e-6) if precise else (1e-2, 1e-2)
    at = latents[site]
    rng = torch.Generator().manual_seed(1)
    direction = torch.randn(at.shape, generator=rng, dtype=torch.float64).to(at)

    def value(distance: float) -> float:
        with torch.no_grad():
            run = density.run({**latents, site: at + distance * direction}, point.theta, rows)
            return float(_others(run, site))

    high, low = value(step), value(-step)
    slope = (high - low) / (2 * step)
    told = 0.0 if gradient is None else float((gradient * direction).sum())
    if not np.isfinite([slope, told]).all():
        return
    off = abs(slope - told) > 0.05 * (abs(slope) + abs(told)) + floor * (1 + abs(high))
    flat = gradient is None or not bool(gradient.any())
    if off or (flat and _in_steps(point, rows, site, direction)):
        raise InputError(
            f"site '{site}' does not reach the likelihood: the log density changes with its value and the gradient "
            "does not say so. detach(), .item(), no_grad(), rounding or NumPy cuts it off; use tensor operations"
        )
    if gradient is None:
        warnings.warn(
            f"site '{site}' does not reach the likelihood: on made data nothing that is observed depends on it, and q "
            "stays at its prior. Leave it out, and draw it afterwards with result.predict",
            SecureFVIWarning,
            stacklevel=2,
        )


def _in_steps(point: _Point, rows: Params, site: str, direction: Tensor) -> bool:
    """Whether log p, without the site's own prior, changes farther away although no gradient there says so: of what is
    rounded the gradient is zero everywhere, of a hinge on one side alone."""
    density, latents, values = point.problem.density, point.latents(), []
    for distance in (0.0, -10.0, -2.0, -0.7, 0.7, 2.0, 10.0):
        leaf = (latents[site] + distance * direction).detach().requires_grad_()
        with torch.enable_grad():
            value = _others(density.run({**latents, site: leaf}, point.theta, rows), site)
        gradient = _gradient(value, leaf)
        if gradient is not None and bool(gradient.any()):
            return False
        values.append(float(value.detach()))
    return bool(np.isfinite(values).all()) and float(np.ptp(values)) > 1e-3 * (1 + abs(values[0]))


def _check_masked(site: str, mask: Tensor, gradient: Tensor | None, silo: str | None = None) -> None:
    """What a mask takes out has no prior left, so that nothing may depend on it."""
    if gradient is None:
        return
    used = (gradient.reshape((*mask.shape, -1)) != 0).any(-1)
    if bool((used & ~mask).any()):
        error, where = (InputError, "") if silo is None else (DataError, f"silo '{silo}': ")
        raise error(
            f"{where}site '{site}' is masked where the rest of the model uses it: a mask takes its prior away. Give it "
            "a wide prior instead, or mask what is observed"
        )


def _check_taken(point: _Point, rows: Params) -> None:
    """The gradient as fits take it, by torch.func, which a program that calls backward() by itself does not let."""

    def value(z_global: Tensor, z_silo: Tensor, z_record: Tensor) -> Tensor:
        terms = point.problem.density.evaluate(z_global, z_silo, z_record, point.theta, rows)
        return terms.shared + terms.silo + terms.records.sum()

    torch.func.grad(value, argnums=(0, 1, 2))(point.z_global, point.z_silo, point.z_record)


def _check_end(point: _Point) -> None:
    """What a fit does once it has ended: draws of the global sites in the model's space, mapped if they can be."""
    density, theta = point.problem.density, point.theta
    draws = torch.stack([point.z_global, point.z_global + 0.3])

    def values(z: Tensor) -> Params:
        return density.constrain(z, theta)[0]

    alone = [values(z) for z in draws]
    try:
        mapped = torch.func.vmap(values)(draws)
    except RuntimeError:
        return  # draws are then made one by one
    if not all(_same(mapped[name], torch.stack([one[name] for one in alone])) for name in mapped):
        raise InputError("the model gives other values when it is mapped over draws; use tensor operations throughout")


def _check_mapped(point: _Point, rows: Params, expected: Tensor, why: str) -> None:
    """Several draws of the records' latents go through the program together, or each record alone, by vmap."""

    def draw(z: Tensor) -> Tensor:
        return point.problem.density.evaluate(point.z_global, point.z_silo, z, point.theta, rows).records

    def record(z: Tensor, row: Params) -> Tensor:
        batch = {name: value.unsqueeze(0) for name, value in row.items()}
        found = point.problem.density.evaluate(point.z_global, point.z_silo, z.unsqueeze(0), point.theta, batch)
        return found.records[0]

    try:
        if isinstance(point.problem.privacy, RecordDP):
            found = torch.func.vmap(record)(point.z_record, rows)
        else:
            found = torch.func.vmap(draw)(point.z_record.unsqueeze(0))[0]
    except Exception as error:
        raise InputError(
            f"{why}, by torch.func.vmap, which this model does not allow ({type(error).__name__}): values must not "
            "decide on its course (.item(), `if`, boolean indexing), nor may it count on several records"
        ) from error
    if not _same(found, expected):
        raise InputError(_NO_SUM.format(""))


# ---- a run that ran off ----


def misplaced(problem: Problem, z_global: Tensor | None = None, rows: Params | None = None) -> str:
    """Which site has no log density, or a parameter that it does not take, and by which latents, at `z_global`
    (n_global,), by default the start, or else around it: why a run came to numbers that are none. "" where nothing is
    seen, and of a traced program, whose sites are not known. rows: a silo's, whose reader is that silo alone; made ones
    where there are none."""
    if type(problem.density) is not LogDensity:
        return ""
    given = rows or {name: value.to(problem.device) for name, value in problem.schema.dummy_rows(_MADE).items()}
    rng, centre = torch.Generator().manual_seed(0), problem.start.z_global if z_global is None else z_global
    point = _Point(problem, len(next(iter(given.values()))), spread=0.0)
    for radius in (0.0, 0.01, 0.1, 0.3, 1.0, 3.0):
        for _ in range(_AROUND if radius else 1):
            step = radius * torch.randn(centre.shape, generator=rng, dtype=torch.float64)
            point.z_global = (centre.to("cpu", torch.float64) + step).to(problem.device, problem.dtype)
            looks = _Parameters()
            with contextlib.suppress(Exception), torch.enable_grad(), looks:
                run = problem.density.run(point.latents(), point.theta, given)
                if looks.said:
                    return f"{looks.said} where the fit went. {_CANNOT}"
                for name in sorted(run.own, key=lambda name: name in run.latents):
                    if said := _unbounded(name, run, looks.latents):
                        return said
            point = point.of(torch.arange(min(len(point.z_record), _SOME)))
            given = {name: value[:_SOME] for name, value in given.items()}
    return ""


def _unbounded(name: str, run: Evaluation, latents: Params) -> str:
    """A site whose term is no number, -inf, or so low that something was to forbid it."""
    term = run.own[name]
    value, by_hand = float(term.detach()), name in run.factors
    if np.isfinite(value) and (value > -_FORBIDDEN or not by_hand):
        return ""
    sites = _names(term, latents, all_used=True)
    low = "no number" if np.isnan(value) else f"{value:g}"
    return (
        f"the log density of site '{name}' is {low} where the fit went{f', by {sites}' if sites else ''}: a bound that "
        "moves with latents (a pyro.factor of -inf, say), or the logarithm or root of what they make less than 0. No "
        "normal q stays on one side of it: take a distribution with a tail or a penalty that grows smoothly, and "
        "priors that end where log p does"
    )


# ---- a predictor of a vertical run ----

_ROWS = (
    "a row of eta depends on other rows: together and in parts, the same people have another one. A program that "
    "standardises, lags, sorts or counts over rows is another model in every batch; work such numbers out before, "
    "under privacy not from these people, and pass them as a column, or with sf.Shared where they are the same for all"
)
_ROW_PRIOR = (
    "the prior of its sites depends on rows; pass what it needs with sf.Shared (a scale, the number of groups), under "
    "privacy nothing that was worked out from these people"
)


def check_predictor(predictor: Predictor, alone: bool) -> None:
    """Raise InputError where a predictor does not keep its contract; on made data. `alone`: a row is evaluated by
    itself in the fit, by `vmap`."""
    theta, points = _near(predictor)
    rows = _varied(predictor, theta, points)
    first, again = (predictor.evaluate(theta, points, rows)[0] for _ in range(2))
    if not _same(first, again):
        raise InputError(
            "predictor: another eta each time it is run: it draws numbers, or changes its own state; draw with "
            "pyro.sample alone"
        )
    bad, _, in_prior = _coupled(predictor, rows)
    if in_prior:
        raise InputError(f"predictor: {_ROW_PRIOR}")
    if bad:
        raise InputError(f"predictor: {_ROWS}")
    if not alone:
        return
    try:
        mapped = predictor.evaluate_alone(theta, points, rows)
    except Exception as error:
        untested = f": {error}" if isinstance(error, UntestedOperation) else ""
        raise InputError(
            "predictor: record-level privacy evaluates each row alone, by torch.func.vmap, which this program does not "
            f"allow ({type(error).__name__}{untested}): values must not decide on its course (.item(), `if`, "
            "boolean indexing), nor may it count on several rows"
        ) from error
    if not _same(mapped, first):
        raise InputError(f"predictor: {_ROWS}")


def check_predictor_at_silo(predictor: Predictor, rows: Params, silo: str) -> None:
    """The same contract on a silo's own rows, without privacy: there no row would be evaluated alone. Raises
    DataError, which counts rows."""
    try:
        bad, looked_at, in_prior = _coupled(predictor, rows)
    except Exception as error:
        raise DataError(f"silo '{silo}': the predictor fails on part of its data ({type(error).__name__})") from None
    if in_prior:
        raise DataError(f"silo '{silo}': predictor: {_ROW_PRIOR}")
    if bad:
        raise DataError(f"silo '{silo}': predictor: in {bad} of {looked_at} rows looked at, {_ROWS}")


def _near(predictor: Predictor) -> tuple[Tensor, Params]:
    """theta_j and the `pyro.param`s around their start."""
    rng = torch.Generator().manual_seed(0)

    def around(value: Tensor) -> Tensor:
        return value + _SPREAD * torch.randn(value.shape, generator=rng, dtype=torch.float64).to(value)

    return around(predictor.start), {name: around(value) for name, value in predictor.points.items()}


def _varied(predictor: Predictor, theta: Tensor, points: Params) -> Params:
    """Made rows that differ and are not in order: numbers from 1 to 2; whole ones 0 and 1, or all 0 where the program
    looks up no 1."""
    rng, made = torch.Generator().manual_seed(1), predictor.made(_MADE)
    for name, value in made.items():
        if value.is_floating_point():
            unordered = torch.rand(value.shape, generator=rng, dtype=torch.float64).sort(0).values[[2, 0, 3, 1]]
            made[name] = value + unordered.to(value)
    order = torch.arange(_MADE) % 2
    whole = {
        name: order.reshape(-1, *[1] * (value.dim() - 1)).expand(value.shape).to(value)
        for name, value in made.items()
        if not value.is_floating_point()
    }
    try:
        predictor.evaluate(theta, points, made | whole)
    except Exception:
        return made
    return made | whole


def _coupled(predictor: Predictor, rows: Params) -> tuple[int, int, bool]:
    """How many rows have another eta among some of the rows than among all, of how many that were looked at; whether
    the prior depends on rows."""
    theta, points = _near(predictor)
    with torch.no_grad():
        whole, prior = predictor.evaluate(theta, points, rows)
        in_prior = not _same(prior, predictor.log_prior(theta, points))
        bad, looked_at = torch.zeros(2, len(whole), dtype=torch.bool, device=whole.device)

        def evaluate(part: Tensor) -> tuple[Tensor, Tensor]:
            return predictor.evaluate(theta, points, {name: value[part] for name, value in rows.items()})

        if len(whole) > 1:
            for part, (found, own) in _in_parts(evaluate, len(whole)):
                bad[part] |= True if found.shape != whole[part].shape else ~_alike(found, whole[part]).all(-1)
                looked_at[part] = True
                in_prior |= not _same(own, prior)
    return int(bad.sum()), int(looked_at.sum()), in_prior


# ---- a silo's data ----


def read_at_silo(problem: Problem, rows: Params, size: int, silo: str) -> Start:
    """Where a silo's own latents start, from its rows, (N + 1, ...) each with a spare one at the end.

    Raises DataError, which counts rows and quotes no value, for data that do not fit the model. Seen by that silo only.
    """
    columns = _Columns(rows, size, silo)
    found = _AtSilo(problem, size, silo, columns)
    try:
        with running(problem.dtype, problem.device), torch.no_grad(), columns, found:
            problem.model.fn(**rows, **problem.schema.constants)
    except _NotFinite as error:
        own = _cured_by(problem, {name: value[:size] for name, value in rows.items()}) if error.count == size else None
        if own is None:
            raise DataError(str(error)) from None
        raise DataError(
            f"silo '{silo}': the log density of site '{error.site}' is not finite at the start in any of {size} rows, "
            f"and is finite where '{own}' lies elsewhere: the logarithm or the root of what '{own}' makes 0 or less, "
            f"say. Give '{own}' a prior that cannot be so (Beta, HalfNormal, Dirichlet), or say where to begin with "
            "start={...}"
        ) from None
    except InputError as error:
        raise error if isinstance(error, DataError) else DataError(f"silo '{silo}': {error}") from None
    except Exception as error:
        raise DataError(f"silo '{silo}': the model fails on its data ({type(error).__name__})") from None
    _check_sites(problem, found, silo)
    point, some = check_parts(problem, rows, size, silo)
    if found.masked:
        _check_masks(point, some, silo)
    _check_edges(point, some, silo)
    _check_steps(point, some, {name: value[:size] for name, value in rows.items()}, found.priors, silo)
    return start_of(found)


def _cured_by(problem: Problem, rows: Params) -> str | None:
    """The latent site, if there is one, without whose value at the start the log p of all rows is finite."""
    if type(problem.density) is not LogDensity:
        return None
    point = _Point(problem, len(next(iter(rows.values()))), spread=0.0)
    for site, at, direction in _directions(point):
        for far in _NEAR:
            with contextlib.suppress(Exception), torch.no_grad():
                run = problem.density.run({**point.latents(), site: at + far * direction}, point.theta, rows)
                if bool(torch.isfinite(sum(run.terms["record"])).all()):  # type: ignore[arg-type]
                    return site
    return None


def check_parts(problem: Problem, rows: Params, size: int, silo: str) -> tuple[_Point, Params]:
    """Raise DataError where global terms depend on a silo's data, or its records on each other; what was looked at."""
    few = _spread_out(size, _SOME)
    some, point = {name: value[few] for name, value in rows.items()}, _Point(problem, len(few))
    try:
        problem.density.check_global_density(rows, silo, problem.start.z_global)
        found = _dependent(_Point(problem, size), {name: value[:size] for name, value in rows.items()})
    except InputError:
        raise
    except Exception as error:
        raise DataError(f"silo '{silo}': the model fails on part of its data ({type(error).__name__})") from None
    if found.silo:
        raise DataError(f"silo '{silo}': {_PRIOR.format('silo')}")
    if found.records:
        counted = f"{found.records} of {found.looked_at} records looked at"
        raise DataError(f"silo '{silo}': {counted} depend on others: {found.said()}")
    for first in range(0, size, _AT_ONCE):
        part = {name: value[first : min(first + _AT_ONCE, size)] for name, value in rows.items()}
        _check_steepness(problem, part, size, silo)
    return point, some


def _check_steepness(problem: Problem, rows: Params, size: int, silo: str) -> None:
    """Raise DataError where log p is finite and its gradient is not, as at exp(log(0)): a fit would not move."""
    count = len(next(iter(rows.values())))
    if _steady(problem, rows, slice(None)):
        return
    bad = [k for k in range(count) if not _steady(problem, rows, slice(k, k + 1))]
    good = next((k for k in range(count) if k not in set(bad)), None)
    blamed = []
    if bad and good is not None:
        for name, value in rows.items():
            other = {**rows, name: value[good].expand_as(value)}
            blamed += [f"'{name}'"] * all(_steady(problem, other, slice(k, k + 1)) for k in bad[:_SOME])
    rest = "" if count == size else f", of {count} that were looked at together"
    raise DataError(
        f"silo '{silo}': {', '.join(blamed) or 'the data'} give the log density a gradient that is not finite, at the "
        f"start, in {len(bad) or 'some'} of {size} rows{rest}: the logarithm or the root of 0, say; correct these "
        "rows, or take them out"
    )


def _steady(problem: Problem, rows: Params, part: slice) -> bool:
    """Whether the gradient of the records' terms is finite at the start."""
    some = {name: value[part] for name, value in rows.items()}
    point = _Point(problem, len(next(iter(some.values()))))
    latents = [z.detach().clone().requires_grad_() for z in (point.z_global, point.z_silo, point.z_record)]
    try:
        with torch.enable_grad():
            terms = problem.density.evaluate(latents[0], latents[1], latents[2], point.theta, some).records
            total = torch.where(torch.isfinite(terms), terms, torch.zeros_like(terms)).sum()
        found = torch.autograd.grad(total, latents, allow_unused=True) if total.requires_grad else ()
    except Exception:  # not on so few rows: nothing is known
        return True
    return all(bool(torch.isfinite(g).all()) for g in found if g is not None)


def _check_sites(problem: Problem, found: Discovery, silo: str) -> None:
    mine, layout = {s.name: s for s in found.sites}, {s.name: s for s in problem.layout.sites}
    for name in sorted(mine.keys() ^ layout.keys()):
        raise DataError(f"silo '{silo}': the data decide on whether the model has the site '{name}'; sites must not")
    for name, site in layout.items():
        if mine[name].shape != site.shape:
            raise DataError(
                f"silo '{silo}': site '{name}' has shape {mine[name].shape} on its data and {site.shape} on made data. "
                "How many latents there are must not depend on data: pass the number of groups as a plain argument"
            )


def _check_masks(point: _Point, rows: Params, silo: str) -> None:
    latents = {name: value.detach().clone().requires_grad_() for name, value in point.latents().items()}
    with torch.enable_grad():
        run = point.problem.density.run(latents, point.theta, rows)
    for name, mask in run.masks.items():
        _check_masked(name, mask, _gradient(_others(run, name), latents[name]), silo)


def _check_steps(point: _Point, some: Params, rows: Params, priors: Mapping[str, Any], silo: str) -> None:
    """Raise DataError where values of a site's prior change log p on all of the silo's rows, of which no gradient tells
    at any of them: of `t < c`, for one. Made data, which are all alike, need not lie where the step is."""
    for site in _flat(point, some, priors):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                prior = priors[site]
                values = biject_to(prior.support).inv(prior.sample((_SOME,)))
        except Exception:  # a distribution of the user's own, or an improper one, of which none can be drawn
            continue
        found = []
        for value in values:
            total, sloped = _around(point.problem, rows, site, value)
            if sloped:
                break
            found.append(total)
        else:
            tolerance = 1e-6 if point.problem.dtype == torch.float64 else 1e-3
            if np.isfinite(found).all() and np.ptp(found) > tolerance * (1 + abs(found[0])):
                raise DataError(
                    f"silo '{silo}': site '{site}' reaches the likelihood by steps alone: its value decides between "
                    "others', as in torch.where(t < c, a, b), and no gradient says so, so that q would stay at the "
                    "prior. Smooth the step, torch.sigmoid((c - t) / width) for t < c, or give it a grid of values "
                    "whose terms are summed out"
                )


def _flat(point: _Point, rows: Params, names: Iterable[str]) -> list[str]:
    """Sites that some rows' terms do not follow, by their gradient."""
    latents = {name: value.detach().clone().requires_grad_() for name, value in point.latents().items()}
    with torch.enable_grad():
        run = point.problem.density.run(latents, point.theta, rows)
    gradients = {name: _gradient(_others(run, name), latents[name]) for name in names}
    return [name for name, gradient in gradients.items() if gradient is None or not bool(gradient.any())]


def _around(problem: Problem, rows: Params, site: str, value: Tensor) -> tuple[float, bool]:
    """Of rows, log p with a site at `value`, its own prior aside, and whether it has a gradient in it."""
    total, count = 0.0, len(next(iter(rows.values())))
    for first in range(0, count, _AT_ONCE):
        part = {name: rows[name][first : first + _AT_ONCE] for name in rows}
        point, leaf = _Point(problem, min(_AT_ONCE, count - first)), value.detach().clone().requires_grad_()
        with torch.enable_grad():
            terms = _others(problem.density.run({**point.latents(), site: leaf}, point.theta, part), site)
        gradient = _gradient(terms, leaf)
        if gradient is not None and bool(gradient.any()):
            return 0.0, True
        total += float(terms.detach())
    return total, False


class _NotFinite(DataError):
    """A site whose density is not finite at the start, in `count` rows."""

    def __init__(self, site: str, count: int, said: str) -> None:
        super().__init__(said)
        self.site, self.count = site, count


class _AtSilo(Discovery):
    """Reads the program on a silo's rows, and looks at each site in the record plate."""

    def __init__(self, problem: Problem, size: int, silo: str, columns: _Columns) -> None:
        super().__init__(problem.model, size + 1, problem.dtype, problem.device)
        self.size, self.silo, self.columns = size, silo, columns
        self.masked = False
        self.priors: dict[str, Any] = {}  # of latent sites outside the record plate

    def _pyro_sample(self, msg: Any) -> None:
        super()._pyro_sample(msg)
        if has_no_density(msg):
            return
        if not msg["is_observed"]:
            self.masked |= site_mask(msg) is not None
        if not record_dim(msg, self.model.record_plate):
            if not msg["is_observed"]:
                self.priors[msg["name"]] = msg["fn"]
            return
        self._check_weights(msg)
        if msg["is_observed"] and not isinstance(msg["fn"], Unit):
            self._check_support(msg)
        self._check_finite(msg)

    def _check_weights(self, msg: Any) -> None:
        weights = torch.as_tensor(msg["scale"])
        enough = weights >= 0 if msg["is_observed"] else weights > 0
        count = self._count(msg, ~enough | torch.isinf(weights))
        if count:
            names = self.columns.of(weights) or "poutine.scale"
            least = "less than 0" if msg["is_observed"] else "0 or less, which leaves a latent no prior"
            raise DataError(
                f"silo '{self.silo}': {names} weighs site '{msg['name']}' by {least}, or by no finite number, in "
                f"{count} of {self.size} rows"
            )

    def _check_support(self, msg: Any) -> None:
        fn, value = msg["fn"], msg["value"]
        try:
            support = fn.support
            inside = support.check(value)
            if "multinomial" in str(support).lower():
                inside = inside & (value % 1 == 0).all(-1)
        except Exception:  # a distribution of the user's own, without one
            return
        count = self._count(msg, ~inside)
        if count:
            names = self.columns.of(value, *vars(_base(support)).values()) or f"site '{msg['name']}'"
            raise DataError(
                f"silo '{self.silo}': {names} does not fit site '{msg['name']}' in {count} of {self.size} rows: "
                f"{kind_of(fn)} takes {described(support)}"
            )

    def _check_finite(self, msg: Any) -> None:
        fn, value = msg["fn"], msg["value"]
        term = fn.log_prob(observed_value(msg) if msg["is_observed"] and not isinstance(fn, Unit) else value)
        count = self._count(msg, ~torch.isfinite(scale_and_mask(term, 1.0, msg["mask"])))
        if count:
            self._check_parameters(msg)
            names = self.columns.of(value, *vars(fn).values()) or "no column"
            raise _NotFinite(
                msg["name"],
                count,
                f"silo '{self.silo}': the log density of site '{msg['name']}' is not finite at the start in {count} of "
                f"{self.size} rows, from {names}: values on the edge of what {kind_of(fn)} takes, or too large; "
                "correct or rescale them, or say where to begin with start={...}",
            )

    def _check_parameters(self, msg: Any) -> None:
        """Of a site whose density is not finite: the scale, say, where that is what it cannot be."""
        for name, constraint, given, bad in _bad_parameters(msg["fn"]):
            because = f"for any data: it follows from sites that can be so. {_CANNOT}"
            if columns := self.columns.of(given):
                because = f"from {columns}; correct or rescale it"
            batch = len(msg["fn"].batch_shape)
            bad = bad.reshape(*bad.shape[:batch], -1).any(-1) if bad.dim() > batch else bad
            try:
                where = f" in {self._count(msg, bad)} of {self.size} rows"
            except (RuntimeError, IndexError):  # of another shape than the site's
                where = ""
            raise DataError(
                f"silo '{self.silo}': site '{msg['name']}' has a {name} at the start that {kind_of(msg['fn'])} does "
                f"not take ({described(constraint)}){where}, {because}"
            )

    def _count(self, msg: Any, bad: Tensor) -> int:
        """Rows of the silo's with anything bad in what is not masked. bad: batch shape, and parts of an event."""
        fn, mask = msg["fn"], site_mask(msg)
        dim = record_dim(msg, self.model.record_plate)
        extra = max(0, bad.dim() - len(fn.batch_shape))
        batch = bad.reshape((*bad.shape[: bad.dim() - extra], -1)).any(-1) if extra else bad
        batch = batch.expand(torch.broadcast_shapes(batch.shape, fn.batch_shape))
        if mask is not None:
            batch = batch & mask.to(batch.device)
        rows = batch.movedim(dim, 0).reshape(batch.shape[dim], -1).any(1)
        return int(rows[: self.size].sum())


#: What makes a site's parameter what it has to be.
_CANNOT = "Give these priors that cannot (HalfNormal, Dirichlet in place of Normal), or take exp() or softmax() of them"


def _bad_parameters(fn: Any) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
    """Parameters of a distribution that it does not take: name, constraint, value, and where it is not kept."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    for name, constraint in getattr(fn, "arg_constraints", {}).items():
        given = vars(fn).get(name)
        if constraint.is_discrete or not isinstance(given, Tensor):
            continue
        try:
            bad = ~constraint.check(given)
        except Exception:  # a constraint of the user's own, or one that depends on others
            continue
        if bool(bad.any()):
            yield name, constraint, given, bad
    for part in vars(fn).values():
        if isinstance(part, torch.distributions.Distribution):  # of a mixture
            yield from _bad_parameters(part)


def _base(support: Any) -> Any:
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def described(support: Any) -> str:
    """What a support takes, in words; bounds that are the model's numbers, not a silo's."""
    base = _base(support)
    low, high = (getattr(base, name, None) for name in ("lower_bound", "upper_bound"))
    numbers = [None if b is None or (isinstance(b, Tensor) and b.numel() > 1) else f"{float(b):g}" for b in (low, high)]
    if isinstance(base, type(constraints.boolean)):
        return "0 and 1 alone"
    if "multinomial" in type(base).__name__:
        return "whole numbers of at least 0 that add up to its total_count"
    if isinstance(base, constraints.integer_interval):
        upper = numbers[1] if numbers[1] is not None else "its own number of trials"
        return f"whole numbers from {numbers[0]} to {upper}"
    if isinstance(base, type(constraints.nonnegative_integer)):
        return f"whole numbers of at least {numbers[0]}"
    if isinstance(base, constraints.greater_than):
        return f"numbers above {numbers[0] or 'its bound'}"
    if isinstance(base, constraints.greater_than_eq):
        return f"numbers of at least {numbers[0] or 'its bound'}"
    if isinstance(base, constraints.interval | constraints.half_open_interval):
        return f"numbers from {numbers[0] or 'its bound'} to {numbers[1] or 'its bound'}"
    if isinstance(base, type(constraints.simplex)):
        return "shares of at least 0 that add up to 1"
    return f"values in its support, {type(base).__name__.strip('_')}"


#: The arguments of functions that look numbers up along an axis, in their order.
_BY_AXIS = ("input", "dim", "index")
_GATHERS = {
    torch.index_select: _BY_AXIS, Tensor.index_select: _BY_AXIS, torch.gather: _BY_AXIS, Tensor.gather: _BY_AXIS,
    torch.take_along_dim: ("input", "index", "dim"),
}  # fmt: skip
_TO_WHOLE = (Tensor.long, Tensor.int, Tensor.short, Tensor.to, Tensor.type)


class _Columns(TorchFunctionMode):
    """Follows columns through a program: which tensor comes from which, and whether what is used as an index can be."""

    def __init__(self, rows: Params, size: int, silo: str) -> None:
        super().__init__()
        self.size, self.silo, self.rows = size, silo, rows
        self._names: Any = WeakIdKeyDictionary()
        for name, value in rows.items():
            self._names[value] = frozenset([name])

    def of(self, *values: Any) -> str:
        """The columns that some values come from, in quotes."""
        found = {name for value in _tensors(values) for name in self._names.get(value, ())}
        return ", ".join(f"'{name}'" for name in sorted(found))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._look(func, args, kwargs)
        out = func(*args, **kwargs)
        names = frozenset().union(*(self._names.get(t, frozenset()) for t in _tensors((args, *kwargs.values()))))
        if names:
            for tensor in _tensors((out,)):
                self._names[tensor] = names | self._names.get(tensor, frozenset())
        return out

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is Tensor.__getitem__:
            for index, length in _indices(args[0], args[1]):
                self._check_index(index, length)
        elif func in (functional.embedding, torch.embedding):
            index, table = (args[0], args[1]) if args[0].dim() < 2 or not args[0].is_floating_point() else args[1::-1]
            self._check_index(index, table.shape[0])
        elif func is functional.one_hot:
            classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            if classes > 0:
                self._check_index(args[0], classes)
        elif func in _GATHERS:
            given = {**dict(zip(_GATHERS[func], args, strict=False)), **kwargs}
            at = given.get("index", given.get("indices"))
            if isinstance(at, Tensor) and isinstance(given.get("dim"), int):
                self._check_index(at, given["input"].shape[given["dim"]])
        elif func in _TO_WHOLE and args[0].is_floating_point() and any(args[0] is row for row in self.rows.values()):
            whole = func is not Tensor.to and func is not Tensor.type
            whole |= any(isinstance(a, torch.dtype) and not a.is_floating_point and a != torch.bool for a in args[1:])
            dtype = kwargs.get("dtype")
            whole |= isinstance(dtype, torch.dtype) and not dtype.is_floating_point and dtype != torch.bool
            if whole:
                count = self._rows(args[0] % 1 != 0)
                if count:
                    raise DataError(
                        f"silo '{self.silo}': {self.of(args[0])} holds fractions in {count} of {self.size} rows, where "
                        "the model takes whole numbers (labels); round() or floor() them if that is meant"
                    )

    def _check_index(self, index: Tensor, length: int) -> None:
        names = self.of(index)
        if not names or index.dtype == torch.bool:
            return
        if index.is_floating_point() or index.dtype == torch.uint8:
            raise DataError(f"silo '{self.silo}': {names} is used as an index and holds no whole numbers; use .long()")
        count = self._rows((index < 0) | (index >= length))
        if count:
            raise DataError(
                f"silo '{self.silo}': {names} points outside of what it indexes in {count} of {self.size} rows: the "
                f"model has {length} there, so that labels are whole numbers from 0 to {length - 1}"
            )

    def _rows(self, bad: Tensor) -> int:
        if bad.dim() and bad.shape[0] == self.size + 1:
            bad = bad[: self.size].reshape(self.size, -1).any(1)
        return int(bad.sum())


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _indices(table: Tensor, key: Any) -> Iterator[tuple[Tensor, int]]:
    """The tensors in `table[key]`, each with the length of the axis that it indexes."""
    parts = key if isinstance(key, tuple) else (key,)
    used = sum(0 if p is None or p is Ellipsis else _axes(p) for p in parts)
    axis = 0
    for part in parts:
        if part is Ellipsis:
            axis += table.dim() - used
        elif part is not None:
            if isinstance(part, Tensor) and axis < table.dim():
                yield part, table.shape[axis]
            axis += _axes(part)


def _axes(part: Any) -> int:
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1


# ---- records ----


def check_repeats(rows: Params, silo: str, named: Iterable[str] | None = None) -> None:
    """Refuse a silo's records, without ids of their own, of which every one occurs several times: a file joined to
    itself. Only where measured numbers, with fractions, say that it is no coincidence, and records are no groups of
    rows, which a column of the table names. named: the columns that they were made of, as their owner knows them."""
    if "present" in rows and rows["present"].shape[1:] > (1,):
        return
    columns = [value.reshape(len(value), -1).double() for value in rows.values()]
    if not any(bool((column % 1 != 0).any()) for column in columns):
        return
    values = torch.cat(columns, 1)
    weights = torch.randn(values.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    marks = (values * weights.to(values.device)).sum(1)
    different, counts = marks.unique(return_counts=True)
    if len(different) >= _DIFFERENT_ROWS and int(counts.min()) > 1:
        raise DataError(
            f"silo '{silo}': {len(marks) - len(different)} of {len(marks)} rows repeat another one in all of "
            f"{', '.join(map(repr, named or rows))}: every record is there several times. Remove the copies, or give "
            "records ids of their own (record_ids, or a column record_id) if they are different people"
        )


def whole_ids(ids: Any, silo: str) -> npt.NDArray[np.int64]:
    """A silo's record ids as int64 (N,). Raises DataError, which counts rows, where some are not whole numbers."""
    try:
        found = torch.as_tensor(ids).cpu().numpy()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"silo '{silo}': record_ids must be whole numbers, one a record") from None
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        raise InputError(f"silo '{silo}': record_ids must be whole numbers, one a record")
    bad = int((~(found >= 0) | (found % 1 != 0) | (found >= 2**63)).sum())
    long = int(rounded(found).sum())
    if long and not bad:
        raise DataError(
            f"silo '{silo}': record_ids are floats of too many digits to be told apart in {long} of {len(found)} rows"
        )
    if bad:
        raise DataError(f"silo '{silo}': record_ids are no whole numbers of at least 0 in {bad} of {len(found)} rows")
    return found.astype(np.int64)
