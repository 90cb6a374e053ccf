"""report.html: a run for a reader without tools. Everything is inside the file; nothing is fetched."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from secure_fvi.runs import plots
from secure_fvi.runs.checkpoint import write_atomically
from secure_fvi.runs.config import Config
from secure_fvi.runs.directory import RunDirectory, read_json
from secure_fvi.runs.metrics import read_metrics
from secure_fvi.runs.rows import comparison_rows, posterior_rows, reason, standing

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_MOST_ROWS = 60


class Picture(NamedTuple):
    source: Markup  # a data address
    alt: str


def write_report(directory: Path) -> None:
    """Write report.html from the other files of a finished run, compare.json among them where it exists."""
    run = RunDirectory(directory)
    result = run.read_result()
    config = run.read_config()
    metrics = read_metrics(directory / "metrics.jsonl")
    comparison = _optional(directory / "compare.json")
    densities = _optional(directory / "marginals.json") or {}
    rows = comparison_rows(comparison) if comparison else []
    released = [row for row in metrics if row["objective"] is not None]
    pictures = {
        "marginals": _picture(_marginals(densities, comparison), "Marginal posteriors of the global sites")
        if densities
        else None,
        "objective": _picture(plots.objective(released), "The bound over the rounds") if released else None,
        "traffic": _picture(plots.traffic(metrics, len(result["silos"])), "Traffic of a silo") if metrics else None,
        "errors": _picture(plots.errors(rows), "Errors of the means, in reference sds") if rows else None,
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(number=_number, size=_size)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(
        result=result,
        standing=standing(result),
        reason=reason(result),
        run=run.read_run(),
        settings=config.model_dump(mode="json", exclude_none=True),
        toml=config.to_toml(),
        source=_source(config),
        posterior=posterior_rows(result)[:_MOST_ROWS],
        left_out=max(0, len(posterior_rows(result)) - _MOST_ROWS),
        theta=posterior_rows({"posterior": {k: {"mean": v, "sd": v} for k, v in result["theta"].items()}})[:_MOST_ROWS],
        comparison=comparison,
        comparison_rows=rows[:_MOST_ROWS],
        pictures=pictures,
    )
    write_atomically(directory / "report.html", text.encode())


def _source(config: Config) -> str:
    model = config.model
    if model.likelihood is not None:
        return f"{model.likelihood} regression over columns"
    return model.program or Path(str(model.function)).name


def marginal_figure(directory: Path) -> Figure:
    """The marginals of a finished run, beside the reference's where there is one."""
    return _marginals(read_json(directory / "marginals.json"), _optional(directory / "compare.json"))


def _marginals(densities: dict[str, Any], comparison: dict[str, Any] | None) -> Figure:
    reference = comparison["marginals"] if comparison else None
    name = f"{comparison['reference'].upper()} on the pooled data" if comparison else ""
    return plots.marginal_panels(densities, reference, name)


def _picture(figure: Figure, alt: str) -> Picture:
    data = base64.b64encode(plots.svg(figure).encode()).decode()
    return Picture(Markup(f"data:image/svg+xml;base64,{data}"), alt)


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _number(value: float) -> str:
    return f"{value:.4g}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError("unreachable")
