"""Tables of a posterior as users of Stan, PyMC and brms know them: a row each scalar, correlations, arviz.

Everything here follows from the posterior of the global sites, which all parties of a run see. Latents of silos and
records have no row: they stay at their silos.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor

from secure_fvi.errors import InputError, visible

if TYPE_CHECKING:
    from secure_fvi.results import RunSummary

#: Of the quantiles, in per cent.
LEVELS = (5, 50, 95)
#: Rows of a printed table; those of a network's weights would fill screens. `rows` and `to_dict` have all.
MOST_ROWS = 60
#: Names in a sentence.
_NAMED = 5
#: Scalars whose correlations are shown as a matrix; of more, the strongest pairs.
_MATRIX, _PAIRS = 12, 20
#: Scalars whose correlations are worked out at once.
_MOST_CORRELATED = 2000
#: k-hat from which importance weights are not trusted (Vehtari et al. 2024).
_TRUSTED = 0.7


def labels(site: str, shape: tuple[int, ...]) -> list[str]:
    """Names of a site's elements in row-major order: `beta[0]`, `omega`, `Sigma[1,0]`."""
    if not shape:
        return [site]
    return [f"{site}[{','.join(map(str, index))}]" for index in itertools.product(*map(range, shape))]


def shown(value: float | None, sd: float | None) -> str:
    """`value` for people: to three digits of its `sd`, whatever its scale; to four of its own where it has none."""
    if value is None:
        return "-"
    if sd is None or not 0 < sd < math.inf or not math.isfinite(value):
        return f"{value:.4g}"
    places = 2 - math.floor(math.log10(sd))
    if -4 <= places <= 6:
        return f"{round(value, places) + 0.0:.{max(places, 0)}f}"  # no -0
    return f"{value:.{max(3, math.floor(math.log10(abs(value) or sd)) + 1 + places)}g}"


class Row(NamedTuple):
    """One scalar of a global site, in the model's own space and units. None: a point has no spread."""

    name: str
    mean: float
    sd: float | None
    q5: float | None
    q50: float | None
    q95: float | None
    noise: float | None = None  # the part of the sd that the noise of privacy adds; None where it is not counted


class _Printed:
    """What prints through rich: at the prompt, by `print`, and in a rich console."""

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120, color_system=None)
        console.print(self, soft_wrap=True)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def __repr__(self) -> str:
        return str(self)


def plain(text: str) -> Text:
    """As it stands: no markup in names, and a line is one line, of what can be shown."""
    return Text(visible(text), no_wrap=True, overflow="ignore")


class Summary(_Printed):
    """What `Result.summary()` returns: `heading`, whether the run converged, and a row each scalar (`rows`).

    khat: Pareto k-hat of the importance weights; ess: effective sample size, in draws; draws: how many there were. All
    None where the posterior is q itself. note: under differential privacy, whether sds count its noise. It follows from
    broadcasts and totals; everyone may see it.
    """

    def __init__(
        self, heading: str, rows: list[Row], khat: float | None, ess: float | None, draws: int | None, note: str = ""
    ) -> None:
        self.heading, self.rows, self.khat, self.ess, self.draws, self.note = heading, rows, khat, ess, draws, note

    def to_dict(self) -> dict[str, dict[str, float | None]]:
        """{name: {"mean", "sd", "5%", "50%", "95%"}}, and "noise" where the noise of privacy is counted."""
        return {r.name: dict(zip(self._columns, r[1:], strict=False)) for r in self.rows}

    def to_pandas(self) -> Any:
        """A frame with a row each scalar, indexed by name. Raises InputError without pandas."""
        try:
            import pandas as pd
        except ImportError:
            raise InputError("to_pandas needs pandas: pip install pandas; to_dict needs nothing") from None
        return pd.DataFrame.from_dict(self.to_dict(), orient="index", columns=list(self._columns))

    @property
    def _columns(self) -> tuple[str, ...]:
        return (*_COLUMNS, "noise") if any(row.noise is not None for row in self.rows) else _COLUMNS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield plain(self.heading)
        if self.note:
            yield plain(self.note)
        if self.khat is not None and self.ess is not None:
            trust = "" if self.khat < _TRUSTED else f", {_TRUSTED} or more: the weights are not to be trusted"
            yield plain(
                f"by {self.draws} weighted draws: k-hat {self.khat:.2f}{trust}, effective sample size {self.ess:.0f}"
            )
        table = Table()
        table.add_column("site")
        for column in self._columns:
            table.add_column(column, justify="right")
        for row in self.rows[:MOST_ROWS]:
            numbers: Any = row[1 : 1 + len(self._columns)]
            table.add_row(plain(row.name), *(shown(value, row.sd) for value in numbers))
        yield table
        if len(self.rows) > MOST_ROWS:
            yield f"and {len(self.rows) - MOST_ROWS} more, in .rows"


_COLUMNS = ("mean", "sd", *(f"{level}%" for level in LEVELS))


class Correlations(_Printed):
    """What `Result.correlations()` returns: `names` and `matrix` (k, k), symmetric, with NaN where a scalar does not
    vary. Everyone may see it."""

    def __init__(self, names: list[str], matrix: Tensor) -> None:
        self.names, self.matrix = names, matrix

    def to_dict(self) -> dict[str, dict[str, float]]:
        """{name: {name: correlation}}."""
        rows = self.matrix.tolist()
        return {name: dict(zip(self.names, row, strict=True)) for name, row in zip(self.names, rows, strict=True)}

    def strongest(self, most: int = _PAIRS) -> list[tuple[str, str, float]]:
        """The pairs of the largest absolute correlation, the strongest first."""
        at = torch.tril_indices(len(self.names), len(self.names), -1)
        values = self.matrix[at[0], at[1]].nan_to_num(0.0)
        order = values.abs().argsort(descending=True, stable=True)[:most].tolist()
        return [(self.names[int(at[1, k])], self.names[int(at[0, k])], float(values[k])) for k in order]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table()
        if len(self.names) <= _MATRIX:
            table.add_column("")
            for name in self.names:
                table.add_column(plain(name), justify="right")
            for name, row in zip(self.names, self.matrix.tolist(), strict=True):
                table.add_row(plain(name), *(f"{value:.2f}" for value in row))
        else:
            for column in ("", "", "correlation"):
                table.add_column(column, justify="right" if column else "left")
            for first, second, value in self.strongest():
                table.add_row(plain(first), plain(second), f"{value:.2f}")
        yield table
        if len(self.names) > _MATRIX:
            yield f"the strongest of {len(self.names) * (len(self.names) - 1) // 2} pairs; all are in .matrix"


def heading(result: RunSummary) -> str:
    """The first line of a summary: what ran, for how long, and whether it converged; if not, or not assessed, why."""
    state = {True: "converged", False: "not converged", None: "convergence not assessed"}[result.converged]
    reason = str(result.convergence.get("reason", ""))
    why = f": {reason}" if reason and result.converged is not True else ""
    return f"{result.algorithm}, {result.rounds} rounds, {state}{why}"


def named_few(names: Sequence[str]) -> str:
    """The first of so many names."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _untold(privacy: Mapping[str, Any]) -> str:
    """Of a run that does not tell how much it cut, that it does not."""
    if privacy.get("clipping") == "adaptive":
        return "the clipping norm follows a quantile of contributions' lengths, so that a share of them is always cut"
    return "nothing that is released tells how many contributions were cut to the clipping norm, or how far"


def counts_noise(privacy: Mapping[str, Any] | None, point: bool = False) -> str:
    """Of a result's `privacy`, in a line: whether sds count the noise, and what is known of what clipping cut; ""
    without differential privacy. point: the result has no sds."""
    if not privacy:
        return ""
    if point:
        return f"how far the noise of privacy moved the point is not known; {_untold(privacy)}"
    said = privacy.get("sds", {"count_noise": False, "because": "the run is of a version that could not"})
    cut, clipped = said.get("cut_at_most"), privacy.get("clipped")
    share = "" if cut is None else f", which is up to {cut:.1%} of gradients"
    moved, kept = f"; not what clipping moves, where it cuts one side more{share}", f"; {_untold(privacy)}"
    if cut is None:
        moved += kept
    if clipped is not None:
        share = f"{clipped['share']:.1%} (+- {2 * clipped['error']:.1%}) of records' gradients"
        moved, kept = (
            f", and what cutting {share} is likely to move if the model is right",
            f"; nor what cutting {share} moves",
        )
        if not said.get("cuts_counted", False):
            moved = f"; not what cutting {share} moves, which is nothing only if residuals are as the model has them"
    if not said["count_noise"]:
        because = f"{said['because']}{kept}"
        return f"sds and quantiles do not count the noise of privacy, so that intervals are too short: {because}"
    if said.get("hidden"):
        moved += f"; intervals of {named_few(said['hidden'])} are mostly the prior's, for the noise or for want of data"
    if said.get("least_information") is not None:
        moved += (
            f"; they rest on least_information = {said['least_information']:g}, which the job declares: that along no "
            f"direction of the global latents data alone leave an sd above {said['least_information'] ** -0.5:.3g}"
        )
    if said.get("ruled_out") is not None:
        moved += f"; least_information = {said['ruled_out']:g} was not used, since totals rule it out"
    return f"sds and quantiles count the noise of privacy{moved}"


def quantiles(draws: Tensor, weights: Tensor, levels: Sequence[float] = LEVELS) -> Tensor:
    """The `levels`, per cent, of draws (S, *shape), by weights (S,) that add up to 1: (levels, *shape). Each is the
    smallest draw up to which the weights reach the level."""
    values, order = draws.reshape(len(draws), -1).sort(0)
    reached = weights.to(draws)[order].cumsum(0)
    # A sum of weights may fall short of a level that it equals by rounding.
    at = torch.stack([(reached < level / 100 - 1e-9).sum(0) for level in levels]).clamp(max=len(draws) - 1)
    return values.gather(0, at).reshape(len(levels), *draws.shape[1:])


def weighted_moments(draws: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sd, (*shape) each, of draws (S, *shape) by weights (S,) that add up to 1."""
    w = weights.to(draws).reshape(-1, *[1] * (draws.dim() - 1))
    mean = (w * draws).sum(0)
    return mean, (w * (draws - mean).square()).sum(0).clamp(min=0).sqrt()


def _of_rows(result: RunSummary, rows: list[Row], point: bool = False) -> Summary:
    """With what is said of the result, and of its weighted draws, where it has any."""
    head, note = heading(result) + "; a point, without spread" * point, counts_noise(result.privacy, point=point)
    if (found := result.refined) is None:
        return Summary(head, rows, None, None, None, note)
    return Summary(head, rows, float(found.khat), float(found.ess), len(found.weights), note)


def summarised(result: RunSummary, spread: Mapping[str, Tensor] | None) -> Summary:
    """The table of a result. spread: quantiles (3, *shape) a site; None for a point."""
    rows, noise = [], result.noise_sd
    for site, (mean, sd) in result.posterior.items():
        names, means = labels(site, tuple(mean.shape)), mean.reshape(-1).tolist()
        if spread is None:
            rows += [Row(name, value, None, None, None, None) for name, value in zip(names, means, strict=True)]
            continue
        columns = [sd.reshape(-1).tolist(), *spread[site].reshape(len(LEVELS), -1).tolist()]
        if noise is not None:
            columns.append(noise[site].reshape(-1).tolist())
        rows += [Row(*row) for row in zip(names, means, *columns, strict=True)]
    return _of_rows(result, rows, spread is None)


def of_draws(result: RunSummary, draws: Mapping[str, Tensor], weights: Tensor) -> Summary:
    """The table of weighted draws (S,) of scalars by name."""
    rows, noise = [], result.noise_sd
    for name, values in draws.items():
        mean, sd = weighted_moments(values, weights)
        added = None if noise is None else float(noise[name])
        q5, q50, q95 = quantiles(values, weights).tolist()
        rows.append(Row(name, float(mean), float(sd), q5, q50, q95, added))
    return _of_rows(result, rows)


def correlated(draws: Mapping[str, Tensor], weights: Tensor) -> Correlations:
    """Of the scalars of draws (S, *shape) a site, by weights (S,) that add up to 1."""
    names = [name for site, value in draws.items() for name in labels(site, tuple(value.shape[1:]))]
    if len(names) > _MOST_CORRELATED:
        raise InputError(
            f"correlations of {len(names)} scalars are too many; choose sites=[...], {_MOST_CORRELATED} at most"
        )
    flat = torch.cat([value.reshape(len(value), -1).double() for value in draws.values()], 1)
    w = weights.to(flat).unsqueeze(-1)
    centred = flat - (w * flat).sum(0)
    covariance = (w * centred).T @ centred
    sd = covariance.diagonal().sqrt()
    # A constant such as the corner of a Cholesky factor varies by rounding alone.
    sd = torch.where(sd > 1e-12 * flat.abs().amax(0), sd, torch.nan)
    return Correlations(names, covariance / sd / sd.unsqueeze(-1))
