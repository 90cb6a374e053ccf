"""Label switching: whatever the data, components of a model change places, as a mixture's, or signs, as a factor's.

A posterior of K such components has K! modes that differ in their order alone, one of K factors 2^K that differ in
their signs. A run that looks at no other order or sign than its own says nothing of the rest, and where silos or rounds
differ in theirs nothing of any: it is told so, in words, by `of_one_order`. Found in the program, on made records, so
that no data are asked (`exchanges`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from secure_fvi.algorithms.base import Posterior, Problem, Verdict
from secure_fvi.algorithms.weighing import APART, AT_ONCE, COMPONENTS, REALS, SCOUTED, Mirror, by_names, mirrors
from secure_fvi.compiled import over_draws
from secure_fvi.density import Layout, Site
from secure_fvi.families import Params

#: What says in a verdict's details that it was looked for other modes; kinds of components that are named; how near
#: those of a point are alike; and what to do.
_LOOKED, _SEVERAL, _STILL_ALIKE = "mean_error_sd", 3, 1e-4
_SAID = {
    False: (
        "components change places",
        "order",
        "give components an order in the program (an ordered vector, or priors apart)",
    ),
    True: ("signs change", "sign", "give one of them a sign in the program (a positive support)"),
}
_START_APART = "begin with components apart (start={...} of the model)"
_START_OFF = "begin away from zero (start={...} of the model)"
#: Made records: normal numbers of such scales, positive ones where that is negative, and whole ones up to such.
_MADE, _SCALES_MADE, _WHOLES_MADE = 12, (1.0, 4.0, -1.0, -4.0), (1, 2, 3, 6)
#: Points, every other one of which is far out by so many times; sites that are taken together in any way, and how many
#: of more whose signs change; maps at most, of places and of signs; how alike densities are, by the type of numbers;
#: nats by which a record is less likely halfway between a point and its image, where there is a valley.
_AT, _FAR_OUT, _SUBSETS, _FEW, _MAPS = 4, 3.0, 6, (1, 2, 3), 512
_SAME = {torch.float64: 1e-8, torch.float32: 1e-4}
_BETWEEN_NATS = 0.1


def of_one_order(found: Verdict, problem: Problem, posterior: Posterior) -> Verdict:
    """With what is to be said where components of the model change places (`exchanges`, which look at the program
    alone) and nobody looked for the places that they change to: `found`, of this posterior, is of one order of theirs,
    or of a point where they are still all alike."""
    looked = _LOOKED in found.details
    if looked and (not found.converged or problem.layout.size("global") <= SCOUTED):  # of few numbers wherever they are
        return found
    kinds = exchanges(problem)
    if looked:
        kinds = [kind for kind in kinds if _far(kind.by, problem, posterior)]
    if not kinds:
        return found
    said = [(*_SAID[signs], of) for signs in (False, True) if (of := [kind for kind in kinds if kind.signs == signs])]
    same = "whatever the data, the posterior is the same where " + " and where ".join(
        f"{what} ({'; or '.join(map(str, of[:_SEVERAL]))}{'; and others' if len(of) > _SEVERAL else ''})"
        for what, _, _, of in said
    )
    one, several = (" and ".join(noun + end for _, noun, _, _ in said) for end in ("", "s"))
    if found.converged and not looked:  # a point at rest
        at = posterior.eta["loc"].cpu().double()
        alike = [kind for kind in kinds if torch.allclose(kind.by(at), at, rtol=0.0, atol=_STILL_ALIKE)]
        if not alike:
            return found
        why = f"{same}, and at the point that was found these are alike, which may be a saddle between their {several}"
        remedy = _START_OFF if all(kind.signs for kind in alike) else _START_APART
        return found._replace(converged=None, reason=f"{found.reason}, but {why}", remedy=remedy, narrow=True)
    why = (
        f"{same}, and this run did not look at their other {several}: what it says of them is of one {one} at most, "
        "and of none where silos or rounds differ in it"
    )
    advice = [remedy for _, _, remedy, _ in said]
    if found.converged:
        return found._replace(converged=False, reason=f"{found.reason}, but {why}", remedy="; ".join(advice))
    remedy = "; ".join(part for part in (found.remedy, *advice) if part)
    return found._replace(reason=f"{found.reason}; besides, {why}", remedy=remedy, narrow=True)


def _far(by: Mirror, problem: Problem, posterior: Posterior) -> bool:
    """Whether the image of the result's mean lies farther from it than one mode is wide, where no mirror leads."""
    if (refined := posterior.refined) is not None:
        mean = refined.weights @ refined.z
        sd = (refined.weights @ (refined.z - mean).square()).sqrt()
    else:
        mean, sd = (v.cpu().double() for v in (posterior.eta["loc"], posterior.family.stddev(posterior.eta)))
    image = by(mean)
    looked = (m(mean) for part in mirrors(problem.layout) for m in part)
    return bool(((image - mean).abs() > APART * sd).any()) and not any(torch.allclose(image, at) for at in looked)


class Exchange(NamedTuple):
    """A map of all latents under which log p(y, Z) is the same for made records."""

    by: Mirror  # of Z_G
    sites: tuple[str, ...]  # names of what changes
    signs: bool = False  # nothing changes places

    def __str__(self) -> str:
        *others, last = self.sites
        return f"{', '.join(others)} and {last}" if others else last


class _Unit(NamedTuple):
    """Of one site, or of two by their names, what changes places with something, or its sign."""

    name: str
    where: tuple[Tensor, Tensor] = (torch.zeros(0, dtype=torch.long),) * 2  # places that change, one and the other
    shares: tuple[tuple[Tensor, int, int], ...] = ()
    flipped: Tensor = torch.zeros(0, dtype=torch.long)  # a sign; or a share of two components, which is the other's


def exchanges(problem: Problem) -> list[Exchange]:
    """The maps that leave every posterior of this model as it is and by which components change places: neighbours
    along an axis of up to eight or two labels of names, of any of the sites that have these, with shares; or signs: of
    whole sites, or at one of the first eight places of axes of one length. The fewest sites that do. Not what makes no
    difference to the likelihood, nor what is a sum of two (a + b, both with one prior), between which and its image all
    is as likely.

    Of made records, so that no data are asked. A silo's and its records' own latents change along.
    """
    layout = problem.layout
    found = list[Exchange]()
    ends = itertools.accumulate(s.size for s in _in_order(layout))
    at = {s.name: torch.arange(e - s.size, e) for s, e in zip(_in_order(layout), ends, strict=True)}
    n, shared = sum(s.size for s in layout.sites), layout.size("global")
    tried = list[Exchange]()
    for signs, groups in enumerate(([*_along(layout, at), *_labelled(layout, at)], [*_signed(layout, at)])):
        every = (_map(units, n, bool(signs)) for units in _together(groups, _FEW if signs else ()))
        tried += itertools.islice((m for m in every if _moves(m.by, shared)), _MAPS)
    if not tried:
        return []
    made = _Made(problem)
    tried = [m for m, same in zip(tried, made.same([m.by for m in tried], 1, 1), strict=True) if same]
    for m in sorted(tried, key=lambda m: len(m.sites)):
        known = (set(of.sites) for of in found if of.signs == m.signs)
        if any(names <= set(m.sites) for names in known) or not made.same([m.by])[0] or not made.valley(m.by):
            continue
        found.append(m._replace(by=_first(m.by, shared)))
    return found


def _in_order(layout: Layout) -> tuple[Site, ...]:
    return (*layout.of("global"), *layout.of("silo"), *layout.of("record"))


def _moves(by: Mirror, n: int) -> bool:
    """Whether it changes any of the first n."""
    shares = any(int(where.min()) < n for where, _, _ in by.shares)
    return shares or not torch.equal(by.order[:n], torch.arange(n)) or bool((by.signs[:n] < 0).any())


def _first(by: Mirror, n: int) -> Mirror:
    shares = tuple(share for share in by.shares if int(share[0].min()) < n)
    return Mirror(by.order[:n], by.signs[:n], shares=shares)


def _map(units: tuple[_Unit, ...], n: int, signed: bool) -> Exchange:
    """All of them at once."""
    order, signs = torch.arange(n), torch.ones(n, dtype=torch.float64)
    for unit in units:
        one, other = unit.where
        both = torch.cat([one, other])
        order[both] = order[torch.cat([other, one])]
        signs[unit.flipped] *= -1.0
    shares = sum((u.shares for u in units), ())
    return Exchange(Mirror(order, signs, shares=shares), tuple(u.name for u in units), signed)


def _together(groups: list[list[_Unit]], few: tuple[int, ...]) -> Iterator[tuple[_Unit, ...]]:
    """Units that may change at once: those of a group in any way while these are few, else all of them, or as many as
    `few` says."""
    for units in groups:
        sizes = range(1, len(units) + 1) if len(units) <= _SUBSETS else (*few, len(units))
        yield from (chosen for size in sizes for chosen in itertools.combinations(units, size))


def _signed(layout: Layout, at: dict[str, Tensor]) -> Iterator[list[_Unit]]:
    sites = [s for s in _in_order(layout) if s.support.startswith(REALS)]
    yield [_Unit(s.name, flipped=at[s.name]) for s in sites]
    for k in sorted({length for s in sites for length in s.shape if length > 1}):
        for a in range(min(k, COMPONENTS)):
            yield [
                _Unit(s.name, flipped=at[s.name].reshape(s.shape).select(axis, a).flatten())
                for s in sites for axis, length in enumerate(s.shape) if length == k
            ]  # fmt: skip


def _along(layout: Layout, at: dict[str, Tensor]) -> Iterator[list[_Unit]]:
    sites = _in_order(layout)
    simplex = {s.name for s in sites if "Simplex" in s.support}
    lengths = {k for s in sites for k in s.shape[: len(s.shape) - (s.name in simplex)]}
    for k in sorted(length for length in lengths if 1 < length <= COMPONENTS):
        for a in range(k - 1):
            units = []
            for s in sites:
                grid = at[s.name].reshape(s.shape)
                axes = range(len(s.shape) - (s.name in simplex))
                for axis in axes:
                    if s.shape[axis] == k:
                        units.append(
                            _Unit(s.name, (grid.select(axis, a).flatten(), grid.select(axis, a + 1).flatten()))
                        )
                if s.name in simplex and s.shape[-1] == k - 1:
                    units.append(_Unit(s.name, shares=((grid, a, a + 1),)))
                elif k == 2 and s.size == 1 and "Interval" in s.support:
                    units.append(_Unit(s.name, flipped=at[s.name]))
            yield units


def _labelled(layout: Layout, at: dict[str, Tensor]) -> Iterator[list[_Unit]]:
    labels: dict[tuple[str, str], list[tuple[int, _Unit]]] = defaultdict(list)
    for role in ("global", "silo", "record"):
        for of in by_names(layout.of(role)).values():
            names = sorted(of)
            for one, other in itertools.combinations(names, 2) if len(of) <= COMPONENTS else ():
                unit = _Unit(f"{of[one].name} with {of[other].name}", (at[of[one].name], at[of[other].name]))
                labels[one, other].append((len(of), unit))
    for (one, other), found in sorted(labels.items()):
        units, k = [unit for _, unit in found], max(count for count, _ in found)
        every = sorted({label for pair in labels for label in pair})
        for s in _in_order(layout):
            if "Simplex" in s.support and s.shape[-1] == k - 1 and len(every) == k:
                share = at[s.name].reshape(s.shape), every.index(one), every.index(other)
                units.append(_Unit(s.name, shares=(share,)))
            elif s.size == 1 and "Interval" in s.support and k == 2:
                units.append(_Unit(s.name, flipped=at[s.name]))
        yield units


class _Made:
    """log p(y, Z) of made records at points that are spread around the start."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        rng, start = torch.Generator().manual_seed(0), problem.start
        n = problem.layout.size("record")

        def around(value: Tensor, far: int) -> Tensor:
            spread = _FAR_OUT if far % 2 else 1.0
            return value.double().cpu() + spread * torch.randn(value.shape, generator=rng, dtype=torch.float64)

        silo, record = start.z_silo, start.z_record[:1].reshape(-1)[:n].expand(_MADE, n)
        shared = [around(torch.cat([start.z_global, silo]), k).expand(_MADE, -1) for k in range(_AT)]
        self.at = [torch.cat([own, around(record, k)], 1) for k, own in enumerate(shared)]  # (_MADE, n) each
        kinds = range(len(_SCALES_MADE) + len(_WHOLES_MADE))
        self.rows = [rows for kind in kinds if (rows := self._records(kind, rng)) is not None]

    def _records(self, kind: int, rng: torch.Generator) -> Params | None:
        """Normal numbers of some scale, or positive ones, or whole ones; None: this program takes none of these."""
        cpu, count = self.problem.device.type == "cpu", len(_SCALES_MADE)
        top = _WHOLES_MADE[kind - count] if kind >= count else 1

        def made(column: Tensor) -> Tensor:
            if kind >= count or not column.is_floating_point():
                # On another device a number past a table's end is no error that one survives.
                last = top if cpu or column.is_floating_point() else 0
                return torch.randint(last + 1, column.shape, generator=rng).to(column.dtype)
            normal = abs(_SCALES_MADE[kind]) * torch.randn(column.shape, generator=rng, dtype=torch.float64)
            return (normal.abs() if _SCALES_MADE[kind] < 0 else normal).to(column.dtype)

        dummy = self.problem.schema.dummy_rows(_MADE)
        rows = {name: made(column).to(self.problem.device) for name, column in dummy.items()}
        return rows if bool(self._values(self.at[0][None], rows)[:, 1:].isfinite().any()) else None

    def _values(self, z: Tensor, rows: Params) -> Tensor:
        """(S, 1 + _MADE) of z (S, _MADE, n): log p of what all records share, and of each; NaN where the program has
        none, or fails: it is the user's, and anything may come."""
        problem = self.problem
        n, own = problem.layout.size("global"), problem.layout.size("silo")
        theta = {name: value.to(problem.device) for name, value in problem.start.theta.items()}
        parts = z.to(problem.device, problem.dtype).split(max(1, AT_ONCE // (8 * z[0].numel())))

        def of(z: Tensor) -> Tensor:
            terms = problem.density.evaluate(z[0, :n], z[0, n : n + own], z[:, n + own :], theta, rows)
            return torch.cat([(terms.shared + terms.silo).reshape(1), terms.records])

        try:
            return torch.cat([over_draws(of, part) for part in parts]).detach().cpu().double()
        except Exception:  # a run has ended: its result is not lost for that
            return torch.full((len(z), 1 + _MADE), torch.nan, dtype=torch.float64)

    def same(self, maps: list[Mirror], points: int = _AT, kinds: int | None = None) -> list[bool]:
        """Whether each leaves all values as they are, but for how a simplex is stretched where it is."""
        alike = torch.ones(len(maps), dtype=torch.bool)
        seen = torch.zeros(len(maps), dtype=torch.bool)
        for at in self.at[:points]:
            images = torch.stack([_image(by, at) for by in maps])
            for rows in self.rows[:kinds]:
                first, others = self._values(at[None], rows)[0], self._values(images, rows)
                others[:, 0] -= torch.stack(
                    [_stretched(by, of[0]) - _stretched(by, at[0]) for by, of in zip(maps, images, strict=True)]
                )
                near = (others - first).abs() <= _SAME[self.problem.dtype] * (1 + first.abs())
                alike &= (near | ~(first.isfinite() | others.isfinite())).all(1)
                seen |= (first.isfinite() & others.isfinite())[:, 1:].any(1)
        return (alike & seen).tolist()

    def valley(self, by: Mirror) -> bool:
        """Whether some record is less likely halfway between a point and its image."""
        for at in self.at:
            halfway = 0.5 * (at + _image(by, at))
            for rows in self.rows:
                end, between = self._values(torch.stack([at, halfway]), rows)[:, 1:]
                if bool((end - between > _BETWEEN_NATS).any()):
                    return True
        return False


def _image(by: Mirror, z: Tensor) -> Tensor:
    """Of each of z (S, n)."""
    if not by.shares:
        return by.signs * z[:, by.order]
    return torch.stack([by(row) for row in z])


def _stretched(by: Mirror, z: Tensor) -> Tensor:
    """The log of by how much simplexes that change are wider at z (n,) than unconstrained space."""
    found, simplex = torch.zeros((), dtype=torch.float64), torch.distributions.StickBreakingTransform()
    for where, _, _ in by.shares:
        found = found + simplex.log_abs_det_jacobian(z[where], simplex(z[where])).sum()
    return found
