"""What a silo's data have to keep to, looked at there before the first round: afterwards it has been paid for.

Observed values lie in the support of their sites, labels point into what they index, terms are finite, and the sum over
records holds among the silo's own (`program_contract.check_parts`), by a program that runs in this process; of a traced
one `exported.GraphDensity` looks. To read them costs a silo some log2 N runs of the program on its N rows
(`program_contract.in_parts`), without gradients, two with them, and a few on eight rows or fewer.

What is found counts a silo's rows: it is for that silo alone (`DataError`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from pyro.distributions import Unit
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.distributions import biject_to
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from secure_fvi.algorithms.base import Problem
from secure_fvi.density import Params, Start, running
from secure_fvi.discovery import Discovery, kind_of, start_of
from secure_fvi.errors import DataError, InputError
from secure_fvi.program_contract import AT_ONCE, SOME, Point, check_parts
from secure_fvi.program_density import (
    bad_records,
    has_no_density,
    observed_value,
    outside,
    record_dim,
    site_mask,
)
from secure_fvi.program_sites import (
    REMEDY,
    bad_parameters,
    base_constraint,
    check_edges,
    check_masked,
    described,
    directions,
    gradient_of,
    tensors_in,
    terms_without,
)
from secure_fvi.randomness import seeded

_NEAR = (0.3, 1.0, 3.0)  # of the start, in unconstrained space: where else a site is tried


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
    check_edges(point, some, silo)
    _check_steps(point, some, {name: value[:size] for name, value in rows.items()}, found.priors, silo)
    return start_of(found)


def _cured_by(problem: Problem, rows: Params) -> str | None:
    """The latent site, if there is one, without whose value at the start the log p of all rows is finite."""
    point = Point(problem, len(next(iter(rows.values()))), spread=0.0)
    for site, at, direction in directions(point):
        for far in _NEAR:
            with contextlib.suppress(Exception), torch.no_grad():
                run = problem.density.run({**point.latents(), site: at + far * direction}, point.theta, rows)
                if bool(torch.isfinite(sum(run.terms["record"])).all()):
                    return site
    return None


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


def _check_masks(point: Point, rows: Params, silo: str) -> None:
    latents = {name: value.detach().clone().requires_grad_() for name, value in point.latents().items()}
    with torch.enable_grad():
        run = point.problem.density.run(latents, point.theta, rows)
    for name, mask in run.masks.items():
        check_masked(name, mask, gradient_of(terms_without(run, name), latents[name]), silo)


def _check_steps(point: Point, some: Params, rows: Params, priors: Mapping[str, Any], silo: str) -> None:
    """Raise DataError where values of a site's prior change log p on all of the silo's rows, of which no gradient tells
    at any of them: of `t < c`, for one. Made data, which are all alike, need not lie where the step is."""
    for site in _flat(point, some, priors):
        try:
            with seeded(0):
                prior = priors[site]
                values = biject_to(prior.support).inv(prior.sample((SOME,)))
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


def _flat(point: Point, rows: Params, names: Iterable[str]) -> list[str]:
    """Sites that some rows' terms do not follow, by their gradient."""
    latents = {name: value.detach().clone().requires_grad_() for name, value in point.latents().items()}
    with torch.enable_grad():
        run = point.problem.density.run(latents, point.theta, rows)
    gradients = {name: gradient_of(terms_without(run, name), latents[name]) for name in names}
    return [name for name, gradient in gradients.items() if gradient is None or not bool(gradient.any())]


def _around(problem: Problem, rows: Params, site: str, value: Tensor) -> tuple[float, bool]:
    """Of rows, log p with a site at `value`, its own prior aside, and whether it has a gradient in it."""
    total, count = 0.0, len(next(iter(rows.values())))
    for first in range(0, count, AT_ONCE):
        part = {name: rows[name][first : first + AT_ONCE] for name in rows}
        point, leaf = Point(problem, min(AT_ONCE, count - first)), value.detach().clone().requires_grad_()
        with torch.enable_grad():
            terms = terms_without(problem.density.run({**point.latents(), site: leaf}, point.theta, part), site)
        gradient = gradient_of(terms, leaf)
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
        fn, bad = msg["fn"], outside(msg)
        if bad is not None and (count := self._count(msg, bad)):
            support = fn.support
            names = self.columns.of(msg["value"], *vars(base_constraint(support)).values()) or f"site '{msg['name']}'"
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
        for name, constraint, given, bad in bad_parameters(msg["fn"]):
            because = f"for any data: it follows from sites that can be so. {REMEDY}"
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
        """Rows of the silo's with anything bad (`bad_records`)."""
        return int(bad_records(msg, bad, record_dim(msg, self.model.record_plate))[: self.size].sum())


#: The arguments of functions that look numbers up along an axis, in their order.
_BY_AXIS = ("input", "dim", "index")
_GATHERS = {
    torch.index_select: _BY_AXIS, Tensor.index_select: _BY_AXIS, torch.gather: _BY_AXIS, Tensor.gather: _BY_AXIS,
    torch.take_along_dim: ("input", "index", "dim"),
}  # fmt: skip
_TO_WHOLE = (Tensor.long, Tensor.int, Tensor.short, Tensor.to, Tensor.type)

_SMALL = (torch.uint8, torch.bool)  # what columns may be beside floating point numbers and int64
_ARITHMETIC = {"add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "mul", "rmul", "imul", "multiply", "neg",
               "negative", "pow", "rpow", "ipow", "square", "diff"}  # fmt: skip


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
        found = {name for value in tensors_in(values) for name in self._of(value)}
        return ", ".join(f"'{name}'" for name in sorted(found))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._look(func, args, kwargs)
        wide = _widened(func, args, kwargs)
        out = func(*args, **kwargs)
        if wide is not None:
            self._check_wrapped(func, args, out, wide)
        names = frozenset().union(*(self._of(t) for t in tensors_in((args, *kwargs.values()))))
        if names:
            for tensor in map(_of_all_rows, tensors_in((out,))):
                self._names[tensor] = names | self._of(tensor)
        return out

    def _of(self, value: Tensor) -> frozenset[str]:
        found: frozenset[str] = self._names.get(_of_all_rows(value), frozenset())
        return found

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
        elif func in (torch.take, Tensor.take):
            given = {**dict(zip(("input", "index"), args, strict=False)), **kwargs}
            self._check_index(given["index"], given["input"].numel())
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

    def _check_wrapped(self, func: Any, args: Any, out: Any, wide: Tensor) -> None:
        """Of columns that stay as small as they came: 3 - 5 of eight bits is 254, and True + True is True."""
        if not (names := self.of(*args)) or not isinstance(out, Tensor) or out.dtype not in _SMALL:
            return
        if count := self._rows(_of_all_rows(out.long() != wide)):
            small, end, sooner = "whole numbers of eight bits", "which end at 255", ".float() of them"
            if out.dtype == torch.bool:
                small, end, sooner = "truth values", "of which True + True is True", ".float() of them, or | for 'or'"
            raise DataError(
                f"silo '{self.silo}': {func.__name__.strip('_')}() of {small}, from {names}, goes past what these "
                f"hold in {count} of {self.size} rows, {end}: write {sooner}"
            )

    def _check_index(self, index: Tensor, length: int) -> None:
        names, index = self.of(index), _of_all_rows(index)
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


def _of_all_rows(value: Tensor) -> Tensor:
    """A tensor within torch.vmap, which there has one row's shape and cannot be looked at, as that of all rows."""
    while is_batchedtensor(value):
        value = get_unwrapped(value)
    return value


def _widened(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """What arithmetic of numbers in small types would be without their end; None where there are none."""
    if getattr(func, "__name__", "").strip("_") not in _ARITHMETIC or "out" in kwargs:
        return None
    if not any(isinstance(a, Tensor) and a.dtype in _SMALL for a in args):
        return None
    if any(isinstance(a, Tensor) and a.is_floating_point() for a in args):
        return None
    with contextlib.suppress(Exception):  # the function itself fails then, or is none of whole numbers
        wide = func(*(a.long() if isinstance(a, Tensor) and a.dtype in _SMALL else a for a in args), **kwargs)
        return wide if isinstance(wide, Tensor) and wide.dtype == torch.int64 else None
    return None
