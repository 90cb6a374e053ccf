"""The budget report as one HTML file: plots inside, nothing fetched."""

from __future__ import annotations

import base64
import textwrap
from pathlib import Path

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

from secure_fvi.plots import svg
from secure_fvi.privacy.report import JobReport, Report

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_MUTED, _GRID, _RUN, _LIMIT = "#6b7280", "#e5e7eb", "#2563eb", "#b45309"
_STYLE = {
    "font.size": 9,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "legend.frameon": False,
}
_MOST_LINES = 12


def report_html(report: Report) -> str:
    """The page; names from the ledger are escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["audited"] = audited
    environment.filters["declared"] = declared
    environment.filters["number"] = lambda value: f"{value:.4g}"
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        report=report,
        over_jobs=_picture(over_jobs(report)) if report.jobs else None,
        over_rounds=_picture(over_rounds(report)) if report.jobs else None,
    )


def over_jobs(report: Report) -> Figure:
    """Epsilon spent after each job, below the budget as it was."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.0, 3.0), layout="constrained")
        axis = figure.subplots()
        spent = [0.0, *(j.epsilon_so_far for j in report.jobs)]
        axis.step(range(len(spent)), spent, where="post", color=_RUN, lw=1.8)
        axis.scatter(range(1, len(spent)), spent[1:], color=_RUN, s=18, zorder=3)
        axis.axhline(report.budget["epsilon"], color=_LIMIT, lw=1.2, ls="--")
        axis.annotate("budget", (0, report.budget["epsilon"]), color=_LIMIT, xytext=(2, 3), textcoords="offset points")
        axis.set(xlabel="jobs charged", ylabel=f"epsilon at delta {report.delta:.2g}")
        axis.set_ylim(0, 1.12 * max(report.budget["epsilon"], *spent))
        axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    return figure


def over_rounds(report: Report) -> Figure:
    """Epsilon over the rounds of each of the newest jobs by RDP; a dot for the job's own accountant."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.0, 3.0), layout="constrained")
        axis = figure.subplots()
        shown = report.jobs[-_MOST_LINES:]
        for number, job in enumerate(shown):
            color = mpl.colormaps["viridis"](0.85 * number / max(1, len(shown) - 1))
            axis.plot(*zip(*job.series, strict=True), color=color, lw=1.6, label=job.job[:24].replace("$", r"\$"))
            axis.scatter([job.series[-1][0]], [job.epsilon], color=color, s=22, zorder=3)
        axis.set(xlabel="releases", ylabel="epsilon at the job's delta", ylim=(0, None))
        axis.grid(axis="y", color=_GRID, lw=0.6)
        if len(shown) > 1:
            figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _picture(figure: Figure) -> Markup:
    return Markup("data:image/svg+xml;base64," + base64.b64encode(svg(figure).encode()).decode())


# ---- The budget report for a terminal ----

_WIDTH = 100


def report_text(report: Report) -> str:
    """The report in plain text, ending in a newline. What a ledger says moves no cursor and makes no line of its own:
    it may be another's."""
    budget = report.budget
    share = report.epsilon / budget["epsilon"]
    lines = [
        f"Privacy budget of data set '{report.data_set}', silo '{report.silo}', as of {report.made}",
        "",
        f"  spent      epsilon {report.epsilon:.4g} of {budget['epsilon']:.4g} ({share:.0%}), delta {report.delta:.2g}",
        f"  remaining  epsilon {report.remaining:.4g}, as one more release with Gaussian noise",
        f"  protects   {'a record' if report.unit == 'record' else 'a whole silo'}",
        *(f"  budget set {b['set']}: epsilon {b['epsilon']:.4g}, delta {b['delta']:.2g}" for b in budget["history"]),
        f"  jobs       {len(report.jobs)}",
        f"  accountant {report.accountant}, {report.accountant_version}",
        f"  ledger     {report.ledger_length} rows, head {report.ledger_head}",
        "",
        *_wrapped(report.adjacency),
        *_wrapped(
            f"At the whole budget, someone who gives even odds to a {report.unit} being in the data, and guesses "
            f"whether it is from all that was released, is right at most {report.best_guess:.0%} of the time."
        ),
        "",
        *_table(report.jobs),
        *_wrapped(report.composition),
        "",
        "Not covered:",
        *(line for item in report.not_covered for line in _wrapped(item, "  - ", "    ")),
    ]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines) + "\n"


def _table(jobs: list[JobReport]) -> list[str]:
    if not jobs:
        return ["No job was charged.", ""]
    width = max(3, *(len(j.job) for j in jobs))
    lines = [f"{'job':{width}}  {'opened':20}  {'epsilon':>9}  {'by':4}  {'in total':>9}  released / declared, noise"]
    for j in jobs:
        counts = ", ".join(f"{t['phase']} {t['released']}/{t['count']}" for t in j.terms)
        about = [counts, f"{j.noise} noise" if j.noise else "noise placement undeclared"]
        about.append(audited(j))
        lines.append(
            f"{j.job:{width}}  {j.opened[:19]:20}  {j.epsilon:9.4g}  {j.accountant:4}  {j.epsilon_so_far:9.4g}  "
            + "; ".join(about)
        )
        lines += _wrapped(declared(j), "    ", "    ")
    return [*lines, ""]


#: What a job's row in the ledger may declare, in the order of the report.
_DECLARED = {
    "clipping_norm": "clipping norm",
    "clipping": "clipping",
    "noise_multiplier": "noise multiplier",
    "sampling_rate": "sampling rate",
    "silos_counted_on": "silos whose noise is counted on",
    "colluders": "colluders",
    "dropouts": "dropouts",
}


def declared(job: JobReport) -> str:
    """What `job` said of itself when it was let in, and how it ended."""
    about = [job.algorithm or "algorithm not declared", job.outcome or "open", f"its own delta {job.delta:.2g}"]
    for key, words in _DECLARED.items():
        value = job.description.get(key)
        if value is not None:
            about.append(f"{words} {value:.4g}" if isinstance(value, float) else f"{words} {value}")
    return "; ".join([*about, f"random numbers: {job.rng or 'source not declared'}"])


def audited(job: JobReport) -> str:
    """What an audit proved, in words."""
    if job.audit_lower_bound is None:
        return "not audited"
    text, about = f"audit: at least {job.audit_lower_bound:.3g}", job.audit or {}
    if about.get("if"):
        text += f", or {about['if']['epsilon']:.3g} if {about['if']['assumption']}"
    return text


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest)
