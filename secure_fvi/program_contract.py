"""What a log density has to keep to, looked at on made data before the first round (`check_program`), at every party
alike: it is a sum over records, says the same each time it is run, and gives draws as the end of a fit does.
`program_sites.py` looks at the sites of a program that runs in this process.

`check_parts` asks the same of a silo's own rows, `algorithms.vertical.predictors` of a predictor's program.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from secure_fvi.algorithms.base import Problem
from secure_fvi.compiled import in_program
from secure_fvi.density import LogTerms, Params
from secure_fvi.errors import DataError, InputError, SecureFVIWarning, one_line
from secure_fvi.families import Amortised
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.randomness import seeded

_T = TypeVar("_T")
MADE = 4  # records of made data
SOME = 8  # rows at a silo that are also evaluated in parts, and few enough to show what many drown
AT_ONCE = 1024  # rows whose gradient is looked at together
SPREAD = 0.1  # of the point at which log p is compared, around the start
_SPREADS = (0.1, 2.0)  # of those at which slopes are
_ALL = slice(None)


class Point:
    """Values of all latents around the start, in unconstrained space, the same at every party."""

    def __init__(self, problem: Problem, records: int, spread: float = SPREAD) -> None:
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

    def of(self, part: Tensor) -> Point:
        """The same values, of some of the records."""
        found = copy.copy(self)
        found.z_record = self.z_record[part]
        return found

    def nudged(self, units: float, seed: int) -> Point:
        """Values that differ from these by so many units of their own rounding, as drawn by the seed."""
        step, found = units * torch.finfo(self.problem.dtype).eps, copy.copy(self)
        rng = torch.Generator().manual_seed(seed)
        for name in ("z_global", "z_silo", "z_record"):
            value = getattr(self, name)
            setattr(found, name, value + step * value * torch.randn(value.shape, generator=rng).to(value))
        return found

    def latents(self) -> Params:
        split = self.problem.layout.split
        return {**split(self.z_global, "global"), **split(self.z_silo, "silo"), **split(self.z_record, "record")}


def check_program(problem: Problem, importance_samples: int = 1) -> None:
    """Raise InputError where the program does not keep its contract, and say why; warn of a site that nothing uses.

    Looks at made data alone, so that all parties come to the same answer.
    """
    rows = {name: value.to(problem.device) for name, value in problem.schema.dummy_rows(MADE).items()}
    try:
        _check_program(Point(problem, MADE), rows, importance_samples)
    except (InputError, SecureFVIWarning):  # a warning that the user had made an error of is no fault of the program
        raise
    except Exception as error:  # the program is the user's: anything may come
        if "autograd.Function" in str(error):
            raise InputError(
                "the model uses a torch.autograd.Function without setup_context (Pyro's DiscreteHMM does), which "
                "cannot be differentiated over many values at once; write it out: of a hidden Markov chain, a discrete "
                "site a time in the record plate, which is summed out"
            ) from error
        if "numpy()" in str(error) or "data pointer" in str(error):
            raise InputError(
                "the model takes tensors to NumPy (x.numpy(), np.log(x)), where no gradient follows; write it in "
                "PyTorch (torch.log(x)), or bring what depends on no latent as a column of the data"
            ) from error
        if "mutate a captured Tensor" in str(error):
            raise InputError(
                "the model writes into its data, or into a tensor from outside of it (x[x < 0] = 0, x.log_(), x /= 9), "
                "which the next run would find changed; make another one: torch.where, x.log(), or x = x.clone() first"
            ) from error
        raise InputError(
            f"the model fails on made data, where gradients are taken ({type(error).__name__}: {one_line(error)})"
        ) from error


def _check_program(point: Point, rows: Params, importance_samples: int) -> None:
    problem, own = point.problem, (point.z_silo, point.z_record, point.theta)
    _check_own_generator(lambda z: problem.density.evaluate(z, *own, rows).records, point.z_global, _DRAWS)
    first, again = (_undrawn(lambda: point.evaluate(rows), _DRAWS) for _ in range(2))
    if not all(same(a, b) for a, b in zip(first, again, strict=True)):
        raise InputError(
            "the model gives another log density each time it is run: it changes its own state (a list, dict or array "
            "outside of it, or its data), or asks for the time"
        )
    if not bool(torch.isfinite(first.shared)) or not bool(torch.isfinite(first.silo)):
        why = problem.density.misplaced(problem, rows=rows)
        raise InputError(
            f"the log density of the global sites is not finite near the start{f': {why}' if why else ''}; look at "
            "their priors, or say where to begin with start={...}"
        )
    found = dependent(point, rows)
    if found.records:
        raise InputError(found.said())
    if found.shared or found.silo:
        raise InputError(DEPENDENT_PRIOR.format("global" if found.shared else "silo"))
    _check_owners(point, rows, first)
    problem.density.check_sites(point, rows)
    _check_taken(point, rows)
    _check_end(point)
    if isinstance(problem.privacy, RecordDP):
        _check_mapped(point, rows, first.records, "record-level privacy evaluates each record alone")
    elif importance_samples > 1:
        _check_mapped(point, rows, first.records, "importance samples go through the model together")


_DRAWS = (
    "the model draws random numbers by itself (torch, numpy or random), anew each time that it is run, or from a "
    "generator of its own, or hides a site, which then draws so too (poutine.block); draw with pyro.sample alone, "
    "which the fit sees"
)


def _check_own_generator(run: Callable[[Tensor], Any], z_global: Tensor, said: str) -> None:
    """Raises InputError for draws from a `torch.Generator` of the program's own, which no global state tells of: mapped
    over one copy of Z_G such a draw fails, while what else cannot be mapped is for others to say."""
    try:
        torch.func.vmap(run)(z_global[None])
    except Exception as error:
        if "randomness" in str(error):
            raise InputError(said) from None


def _undrawn(run: Callable[[], _T], said: str) -> _T:
    """What it gives, from a run that draws nothing by itself: a seed set inside makes one draw of all records, and a
    fit that maps the program, or traces it, another one each time. Raises InputError, `said`, where each draws."""
    numbers, ours = np.random.get_state(), random.getstate()
    try:
        for begin in (0, 1):  # a program that sets the seed itself may end where it began
            for _ in range(3):  # another thread of the process may have drawn in the meantime, once
                with seeded(begin):
                    np.random.seed(begin)
                    random.seed(begin)
                    before = _drawn_so_far()
                    found = run()
                    if _drawn_so_far() == before:
                        break
            else:
                raise InputError(said)
    finally:
        np.random.set_state(numbers)
        random.setstate(ours)
    return found


def _drawn_so_far() -> tuple[bytes, bytes, int]:
    """The states of the generators that a program may draw from."""
    numbers: Any = np.random.get_state()
    state = numbers[1].tobytes() + repr(numbers[2:]).encode()
    return torch.get_rng_state().numpy().tobytes(), state, hash(random.getstate())


_ENCODER_DRAWS = (
    "the encoder draws random numbers by itself (Dropout in training mode, torch, numpy or random), or says something "
    "else each time that it is run: what it would say of a record followed from how many were before it, at all silos "
    "of a process, and differential privacy would hold for none; call encoder.eval() beforehand, or leave out what "
    "draws (FedVI's has the argument `noise` for it)"
)


def check_encoders(problem: Problem, local: object) -> None:
    """Raise InputError where an encoder of records, in the family `local` of their latents, or of silos, the model's,
    gives other numbers each time that it is run on the same made data."""
    rows = {name: value.to(problem.device) for name, value in problem.schema.dummy_rows(MADE).items()}
    point = Point(problem, MADE)
    runs = list[Callable[[Tensor], tuple[Tensor, ...]]]()
    if isinstance(local, Amortised) and problem.layout.size("record"):
        family = local.build(problem.layout.size("record"), problem.layout.size("global"), 1)
        weights = {name: value.to(problem.device) for name, value in family.init_theta(problem.dtype).items()}
        runs.append(lambda z: tuple(family.moments({}, weights, rows, z, z).values()))
    encoder = problem.model.encoder
    if encoder is not None:
        noise = {name: torch.full((MADE, *shape), 0.5).to(point.z_global) for name, shape in encoder.noise.items()}

        def inferred(z: Tensor) -> tuple[Tensor, ...]:
            sites, parameters = problem.density.constrain(z, point.theta)
            given = {**{name: rows[name] for name in encoder.fields}, **noise}
            return encoder.fn({**sites, **parameters}, torch.ones(MADE).to(z), **given)

        runs.append(inferred)
    for run in runs:
        with torch.no_grad():
            try:
                run(point.z_global)
            except InputError:
                raise
            except Exception:  # which the fit says
                continue
            _check_own_generator(run, point.z_global, _ENCODER_DRAWS)
            first, again = (_undrawn(functools.partial(run, point.z_global), _ENCODER_DRAWS) for _ in range(2))
        if not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(first, again, strict=True)):
            raise InputError(_ENCODER_DRAWS)


_NO_SUM = (
    "the model's log density is not a sum over records: together and in parts, the same records have another one{}. A "
    "program that standardises, lags, sorts or counts over records is another model at every silo; work such numbers "
    "out before, over all silos, and pass them as a column, or with sf.Shared where they are the same for all records"
)


DEPENDENT_PRIOR = (
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


def dependent(point: Point, rows: Params) -> _Dependent:
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
        for part, found in in_parts(evaluate, count):
            differ = ~alike(found.records, whole.records[part])
            if bool(differ.any()) and not sites:
                sites = point.problem.density.differing(point, rows, part)
            bad[part] |= differ
            looked_at[part] = True
            shared |= not same(found.shared, whole.shared)
            silo |= not same(found.silo, whole.silo)
    places = spread_out(count, AT_ONCE)
    some = {name: value[places] for name, value in rows.items()}
    for spread in _SPREADS if not bad.any() else ():
        for part in _slopes_differ(Point(point.problem, len(places), spread), some):
            bad[places[part]] = looked_at[places[part]] = True
    return _Dependent(int(bad.sum()), int(looked_at.sum()), shared, silo, tuple(sorted(sites)))


def _slopes_differ(point: Point, rows: Params) -> list[Tensor]:
    """The parts of the records whose slopes in some latent are other ones among the rest than apart. Where outcomes are
    large, as incomes are, terms drown what a mean over records changes in them; their slopes, each by its own size, do
    not. A part's rows are weighed by numbers of their own, so that they do not cancel."""
    count = len(point.z_record)
    weights = torch.randn(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    few = spread_out(count, SOME)
    parts = [few[: len(few) // 2], few[len(few) // 2 :], drawn[: max(1, count // 2)].sort().values]
    tolerance, rounding = (1e-6, 1e-12) if point.problem.dtype == torch.float64 else (1e-2, 1e-5)
    found = []
    with contextlib.suppress(Exception), warnings.catch_warnings(), torch.enable_grad():
        # So far from the start, or without gradients, it may fail: what a fit needs is looked at by itself.
        warnings.simplefilter("ignore")
        whole = own_terms(point, rows)
        for part in parts:
            alone, own = point.of(part), {name: value[part] for name, value in rows.items()}
            among, apart = (_slopes(*t, weights[part], at) for t, at in ((whole, part), (own_terms(alone, own), _ALL)))
            largest = max((float(g.abs().max()) for g in among if g is not None and g.numel()), default=0.0)
            over = [_beyond(a, b, tolerance, rounding * largest) for a, b in zip(among, apart, strict=True)]
            if any(bool((o > 0).any()) for o in over):
                moved = _moved(alone, own, weights[part], apart)
                if any(bool((o > 4 * m).any()) for o, m in zip(over, moved, strict=True)):
                    found.append(part)
    return found


def _beyond(a: Tensor | None, b: Tensor | None, tolerance: float, least: float) -> Tensor:
    """How much further two slopes are apart than they may be; nothing where there are none, or no finite ones."""
    if a is None or b is None or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return torch.zeros(())
    size = torch.maximum(a.abs(), b.abs())
    size = size.amax(0, keepdim=True) if a.dim() > 1 and len(a) else size  # of records' latents: by column
    return (a - b).abs() - tolerance * size - least


def _moved(point: Point, rows: Params, weights: Tensor, slopes: list[Tensor | None]) -> list[Tensor]:
    """By latent, how far slopes move where the latents are rounded otherwise, there and back: those of a network of 32
    bits, far from the start and beside its kinks, by more than any tolerance."""
    found = [torch.zeros(()) if g is None else torch.zeros_like(g) for g in slopes]
    for seed in range(6):
        again = _slopes(*own_terms(point.nudged(8 * (-1) ** seed, seed // 2), rows), weights, _ALL)
        pairs = zip(found, again, slopes, strict=True)
        found = [m if a is None or b is None else torch.maximum(m, (a - b).abs()) for m, a, b in pairs]
    return found


def own_terms(point: Point, rows: Params) -> tuple[Tensor, list[Tensor]]:
    """The records' terms (N,), and the latents that they follow from: the globals, the silo's, the records'."""
    latents = [z.detach().clone().requires_grad_() for z in (point.z_global, point.z_silo, point.z_record)]
    return point.problem.density.evaluate(latents[0], latents[1], latents[2], point.theta, rows).records, latents


def _slopes(terms: Tensor, latents: list[Tensor], weights: Tensor, at: Tensor | slice) -> list[Tensor | None]:
    """By latent, the gradient of what the terms of some records, by their places, add up to by these weights."""
    if not terms.requires_grad:
        return [None] * len(latents)
    total = (weights.to(terms) * terms[at]).sum()
    *shared, own = torch.autograd.grad(total, latents, retain_graph=True, allow_unused=True)
    return [*shared, None if own is None else own[at]]


def in_parts(evaluate: Callable[[Tensor], _T], count: int) -> Iterator[tuple[Tensor, _T]]:
    """What a program says of some of `count` records, by their places: of a few that are spread among them together,
    of the first and the last alone, and of parts of the few, and of all, such that each record is without each other in
    one of them. What depends on any other record is seen by these; what others drown there, by the few."""
    few = spread_out(count, SOME)
    parts = [few[:1], few[-1:], *(few[part] for part in _apart(len(few)))]
    if count > SOME:
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


def spread_out(count: int, most: int) -> Tensor:
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


def alike(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: equal up to rounding, or both not a number."""
    tolerance = 1e-6 if a.dtype == torch.float64 else 1e-3
    known = b[torch.isfinite(b)]
    scale = float(known.abs().max()) if known.numel() else 0.0
    return torch.isclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def same(a: Tensor, b: Tensor) -> bool:
    return bool(alike(a, b).all())


def _check_owners(point: Point, rows: Params, first: LogTerms) -> None:
    """Global terms depend on global sites, a silo's on global and silo sites: the server computes the first alone."""
    moved = point.evaluate(rows, silo=0.5, record=0.5)
    if not same(moved.shared, first.shared):
        raise InputError(
            "the prior of a global site, or a pyro.factor outside the record plate, depends on sites of a silo or a "
            "record; name what belongs to a silo in silo_sites"
        )
    if not same(point.evaluate(rows, record=0.5).silo, first.silo):
        raise InputError("the prior of a silo site depends on sites of records")


def _check_taken(point: Point, rows: Params) -> None:
    """The gradient as fits take it, by torch.func, which a program that calls backward() by itself does not let."""

    def value(z_global: Tensor, z_silo: Tensor, z_record: Tensor) -> Tensor:
        terms = point.problem.density.evaluate(z_global, z_silo, z_record, point.theta, rows)
        return terms.shared + terms.silo + terms.records.sum()

    torch.func.grad(value, argnums=(0, 1, 2))(point.z_global, point.z_silo, point.z_record)


def _check_end(point: Point) -> None:
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
    if not all(same(mapped[name], torch.stack([one[name] for one in alone])) for name in mapped):
        raise InputError("the model gives other values when it is mapped over draws; use tensor operations throughout")


#: What a program that is mapped must not do.
_COURSE = "values must not decide on its course (.item(), `if`, boolean indexing), nor may it count on several records"
_IN_PLACE = (
    "it writes a record's numbers into a tensor that is made without them (p = torch.zeros(...); p[..., 0] = ...), as "
    "pyro's OrderedLogistic does: put them together by torch.stack or torch.cat (of that one, dist.Categorical of "
    "differences of sigmoids)"
)


def _check_mapped(point: Point, rows: Params, expected: Tensor, why: str) -> None:
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
            f"{why}, by torch.func.vmap, which this model does not allow ({type(error).__name__}{in_program(error)}): "
            f"{_IN_PLACE if 'inplace' in str(error) else _COURSE}"
        ) from error
    if not same(found, expected):
        raise InputError(_NO_SUM.format(""))


# ---- a silo's own rows ----


def check_parts(problem: Problem, rows: Params, size: int, silo: str) -> tuple[Point, Params]:
    """Raise DataError where global terms depend on a silo's data, or its records on each other; what was looked at."""
    few = spread_out(size, SOME)
    some, point = {name: value[few] for name, value in rows.items()}, Point(problem, len(few))
    try:
        problem.density.check_global_density(rows, silo, problem.start.z_global)
        found = dependent(Point(problem, size), {name: value[:size] for name, value in rows.items()})
    except InputError:
        raise
    except Exception as error:
        raise DataError(f"silo '{silo}': the model fails on part of its data ({type(error).__name__})") from None
    if found.silo:
        raise DataError(f"silo '{silo}': {DEPENDENT_PRIOR.format('silo')}")
    if found.records:
        counted = f"{found.records} of {found.looked_at} records looked at"
        raise DataError(f"silo '{silo}': {counted} depend on others: {found.said()}")
    for first in range(0, size, AT_ONCE):
        part = {name: value[first : min(first + AT_ONCE, size)] for name, value in rows.items()}
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
            blamed += [f"'{name}'"] * all(_steady(problem, other, slice(k, k + 1)) for k in bad[:SOME])
    rest = "" if count == size else f", of {count} that were looked at together"
    if len(bad) == count > 1:
        raise DataError(
            f"silo '{silo}': the program's log density has a gradient that is not finite, at the start, in every one "
            f"of {count} rows: a rate, sd or probability that is exactly 0 there (of a zero-inflated count's zeros, "
            "say: 1e-9 does as well), or the logarithm or the root of a column that is 0 in all of them"
        )
    raise DataError(
        f"silo '{silo}': {', '.join(blamed) or 'the data'} give the log density a gradient that is not finite, at the "
        f"start, in {len(bad) or 'some'} of {size} rows{rest}: the logarithm or the root of 0, say, also in the branch "
        "of a torch.where that is not taken, whose gradient is 0 times infinity; write "
        "torch.log(torch.where(y > 0, y, 1.0)) there, or correct these rows"
    )


def _steady(problem: Problem, rows: Params, part: slice) -> bool:
    """Whether the gradient of the records' terms is finite near the start, or there: in columns of raw units, a slope
    that is moved as little as `Point` does may make of every term an infinity, and of its gradient no number."""
    some = {name: value[part] for name, value in rows.items()}
    return any(_finite_slopes(Point(problem, len(next(iter(some.values()))), by), some) for by in (SPREAD, 0.0))


def _finite_slopes(point: Point, rows: Params) -> bool:
    try:
        with torch.enable_grad():
            terms, latents = own_terms(point, rows)
            total = torch.where(torch.isfinite(terms), terms, torch.zeros_like(terms)).sum()
        found = torch.autograd.grad(total, latents, allow_unused=True) if total.requires_grad else ()
    except Exception:  # not on so few rows: nothing is known
        return True
    return all(bool(torch.isfinite(g).all()) for g in found if g is not None)
