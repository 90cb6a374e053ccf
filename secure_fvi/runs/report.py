"""report.html: a run for a reader without tools. Everything is inside the file; nothing is fetched."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from secure_fvi import plots
from secure_fvi.disclosure import DISCLOSURES, Disclosure, disclose
from secure_fvi.driving import Progress
from secure_fvi.files import write_atomically
from secure_fvi.privacy.settings import exact_totals
from secure_fvi.privacy.terms import REPLACE
from secure_fvi.runs.config import VERTICAL, Config, chosen, title
from secure_fvi.runs.directory import EVIDENCE, REPORT, TABLE, RunDirectory, read_json
from secure_fvi.runs.marginals import is_point, posterior_rows, reason, standing
from secure_fvi.summary import counts_noise, shown

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_MOST_ROWS = 60
#: With which a cell begins that a spreadsheet computes.
_COMPUTED = tuple("=+-@\t\r\n＝＋－＠")


class Note(NamedTuple):
    text: str
    warns: bool = False


class Picture(NamedTuple):
    source: Markup  # a data address
    alt: str


def write_report(directory: Path) -> None:
    """Write report.html, and its table as table.csv, from the other files of a finished run."""
    run = RunDirectory(directory)
    result = run.read_result()
    config = run.read_config()
    metrics = read_metrics(directory / "metrics.jsonl")
    densities = _optional(directory / "marginals.json") or {}
    released = [row for row in metrics if row["objective"] is not None]
    pictures = {
        "marginals": _picture(plots.marginal_panels(densities), "Marginal posteriors of the global sites")
        if densities
        else None,
        "objective": _picture(plots.objective(released), "The bound over the rounds") if released else None,
        "traffic": _picture(plots.traffic(metrics, len(result["silos"])), "Traffic of a silo") if metrics else None,
    }
    rows = posterior_rows(result)
    text = _template().render(
        result=result,
        standing=standing(result),
        reason=reason(result),
        counts=counts_noise(result["privacy"], point := is_point(rows)),
        point=point,
        tells_lengths=_tells_lengths(config),
        rows_are_people=(result["privacy"] or {}).get("adjacency") == REPLACE,
        run=(about := run.read_run()),
        left=what_left(config, len(result["silos"])),
        seen_by=f"{_privacy_words(result)} {_engine_words(about, result)}",
        kept=_kept_words(config, about),
        neighbours=_neighbours(result),
        toml=config.to_toml(),
        source=title(config),
        formula=result.get("formula"),
        methods=_methods(result, config, about),
        posterior=rows[:_MOST_ROWS],
        left_out=max(0, len(rows) - _MOST_ROWS),
        theta=posterior_rows({"posterior": {k: {"mean": v, "sd": v} for k, v in result["theta"].items()}})[:_MOST_ROWS],
        pictures=pictures,
        evidence=_optional(directory / EVIDENCE),
    )
    write_atomically(directory / REPORT, text.encode())
    write_atomically(directory / TABLE, _as_csv(result).encode())


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(number=_number, size=_size, shown=shown)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _as_csv(result: dict[str, Any]) -> str:
    """A line each parameter, with all digits: of a formula in its parts, with intervals and ratios."""
    out = io.StringIO()
    # Texts in quotes: a semicolon in a name would begin a cell of its own where lists are written with it.
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    formula = result.get("formula")
    if formula is None:
        writer.writerow(["site", "mean", "sd"])
        writer.writerows((_no_formula(row.label), row.mean, row.sd) for row in posterior_rows(result))
        return out.getvalue()
    ratio = [f"{formula['ratio']}{end}" for end in ("", " 2.5%", " 97.5%")] if formula["ratio"] else []
    writer.writerow(["part", "name", "estimate", "sd", "2.5%", "97.5%", *ratio])
    for part in ("effects", "groups", "own"):
        for row in formula[part]:
            numbers = [row[name] for name in ("estimate", "sd", "low", "high")]
            writer.writerow([part, _no_formula(row["name"]), *numbers, *((row["ratio"] or [""] * 3) if ratio else ())])
    return out.getvalue()


def _no_formula(name: str) -> str:
    """A name, which is another party's, as a spreadsheet shows it and does not compute it."""
    return f"'{name}" if name.startswith(_COMPUTED) else name


def _methods(result: dict[str, Any], config: Config, about: dict[str, Any]) -> str:
    """A formula's run in the words of a paper's methods; "" of other models."""
    if "formula" not in result:
        return ""
    model, dp = result["saved"]["model"], result["privacy"]
    silos, kind = len(result["silos"]), result["aggregation"]["kind"]
    records = result["metrics"].get("records")
    count = "" if records is None else f" of {records:g} records"
    summed = {"plain": "sums in clear", "masked": "masked sums"}.get(kind, "encrypted sums")
    refined = result["saved"].get("refined")
    if refined is None:
        counts = dp and dp.get("sds", {}).get("count_noise")
        drawn = "of a normal that counts the noise of privacy" if counts else "of the approximation itself"
    else:
        known = f"Pareto k-hat {refined['khat']:.2f}, effective sample size {refined['ess']:.0f}"
        drawn = f"of importance-weighted draws ({known})"
    version = f" {about['version']}" if "version" in about else ""
    state = {True: "The fit converged", False: "The fit did NOT converge", None: "Convergence was not assessed"}
    said = [
        f"We fitted the model {model['formula']} (family {model['family']}) to the tables{count} of {silos} "
        f"institutions without pooling them, by {result['algorithm'].upper()} in secure-fvi{version}: what left an "
        f"institution went into {summed} over all that took part, over {result['rounds']} rounds",
        "Columns were coded and standardised by a dictionary that was agreed on beforehand, not by data, and priors "
        "are those listed under what the formula came to",
        f"Estimates are posterior means, with posterior sds and central 95% intervals, {drawn}",
        f"{state[result['converged']]}: {reason(result)}",
    ]
    if dp:
        said.append(f"{_privacy_words(result).rstrip('.')}; {counts_noise(dp)}")
    return ". ".join(said) + "."


def what_left(config: Config, silos: int) -> list[Note]:
    """What the secure sum of a run over so many `silos` shows whom, where its parties are apart."""
    algorithm, aggregation, privacy = chosen(config)
    found = disclose(algorithm, aggregation, privacy, silos)
    kind, rows = aggregation.form, []
    if "person_rows" in found.kinds:
        rows = [Note(f"Of people: {DISCLOSURES['person_rows']}. The response: {found.labels}.", warns=True)]
    if kind == "plain":
        alone = "Contributions were sent as they are: the server sees each silo's own."
        return [Note(f"{alone} This kind is for a trusted server and for tests.", warns=True), *rows]
    learns = "the server, and with its next broadcast every silo, learns the total over the silos that answered"
    masked = f"Every contribution was masked before it left its silo: {learns}, and of a single silo"
    text, warns = {
        "masked": (
            f"{masked} nothing beyond what totals tell, {_league(found)}.",
            False,
        ),
        "masked-unchecked": (
            f"{masked} nothing beyond what totals tell. This holds for a server that tells all silos the same: the "
            "consistency check, which catches it lying, was off.",
            True,
        ),
        "homomorphic": (
            "Contributions were masked and encrypted. The key holder, neither server nor silo, decrypted sums under "
            f"masks, which are noise to it; {learns}, and of a single silo nothing beyond what totals tell, "
            f"{_league(found)}.",
            False,
        ),
        "homomorphic-unmasked": (
            "Contributions were encrypted, not masked: the key holder, neither server nor silo, saw totals in clear, "
            f"and {learns}. The server was trusted to add honestly and not to be in league with the key holder, "
            "or with a silo.",
            True,
        ),
    }[kind]
    notes = [Note(f"{text} No total was formed over fewer than {aggregation.min_cohort} silos.", warns)]
    if "single_silos" in found.kinds:
        alone = "Totals tell much here: some are of one silo alone, or they are equations that the server can solve for"
        notes.append(Note(f"{alone} single silos' terms. The job says that it accepts this.", warns=True))
    if aggregation.min_cohort < 3:
        notes.append(Note("With two silos in a total, each can subtract its own term and has the other's.", warns=True))
    return [*notes, *rows]


def _tells_lengths(config: Config) -> bool:
    """Whether records say, with noise, how long their gradients are, and so how many they are."""
    algorithm, _, privacy = chosen(config)
    told = getattr(algorithm, "lengths_share", 0) and getattr(algorithm, "private", "steps") == "steps"
    return bool(told) and privacy is not None and privacy.unit == "record" and not exact_totals(privacy)


def _league(found: Disclosure) -> str:
    """How many silos may be in league with a lying server."""
    if found.withstands >= found.silos - 1:
        return "whichever other silos are in league"
    return f"as long as no more than {found.withstands} of the {found.silos} silos are in league"


def _privacy_words(result: dict[str, Any]) -> str:
    dp = result["privacy"]
    if dp:
        strength = f"epsilon = {_number(dp['epsilon'])} at delta = {_number(dp['delta'])}"
        return f"Differential privacy: {strength}, unit {dp['unit']}, by {dp['accountant']}."
    if result["aggregation"]["kind"] == "plain":
        return (
            "No differential privacy: totals and the posterior itself are exact and may reveal something of the data."
        )
    after = " and of the sums after them" if result["metrics"].get("bound") is not None else ""
    columns = result["algorithm"] in VERTICAL
    record = "of each person what is said above" if columns else "something about a single record"
    return (
        "No differential privacy: totals and the posterior itself are exact. One total hides a silo among the others; "
        f"the totals of {result['rounds']} rounds{after}, taken together, can tell much about a single silo, and "
        f"{record}."
    )


def _engine_words(run: dict[str, Any], result: dict[str, Any]) -> str:
    engine = run.get("engine")  # runs of earlier versions do not say
    if engine is None:
        return ""
    if engine != "one process":
        return (
            f"The parties ran as processes of their own, carried by {engine}; this is the server's report, and what "
            "each site sent is in that site's own log."
        )
    seen = "All parties ran in one process here, so whoever ran it could see everything"
    apart = "; what is said above holds once the parties are on machines of their own"
    return f"{seen}{'' if result['aggregation']['kind'] == 'plain' else apart}."


def _kept_words(config: Config, run: dict[str, Any]) -> str:
    """Where what belongs to single silos is."""
    if run.get("engine", "one process") != "one process":
        return "What belongs to a silo alone, its local latents among it, is in that silo's own folder and not here."
    if config.vertical:
        return "Each silo's own coefficients are in the silos folder, its state in the checkpoint folder."
    return (
        "Local latents and their variational parameters are in no result file, only in the checkpoint folder, which "
        "silos of their own would keep to themselves."
    )


def _neighbours(result: dict[str, Any]) -> str:
    """What one unit more or less is, in words; "" without privacy."""
    dp = result["privacy"]
    if not dp:
        return ""
    replaced = dp.get("adjacency") == REPLACE
    which = f" ({dp['record']})" if "record" in dp else ""
    return "replacing what one silo holds of one person" if replaced else f"adding or removing one {dp['unit']}{which}"


def _picture(figure: Figure, alt: str) -> Picture:
    return Picture(plots.image(figure), alt)


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


# ---- metrics.jsonl: how the run went, one line every so many rounds ----

#: Rounds between two lines, and the span that a line's mean objective covers; a run of at most twice as many rounds has
#: a line for each.
INTERVAL = 50


class MetricsLog:
    """Appends to `path`: round, rounds (there are at most so many), objective (mean over the interval, nats; null: not
    released), learning_rate, r_hat, phase, cohort (silos in the last sum), bytes_up and bytes_down (totals over all
    silos) and seconds, both over all pieces of a resumed run.
    """

    def __init__(self, path: Path, resumed_from: int = 0) -> None:
        """Lines of rounds after `resumed_from` are dropped: the run will write them again."""
        self.path = path
        kept = [row for row in read_metrics(path) if row["round"] <= resumed_from]
        if path.exists():
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        last = kept[-1] if kept else {}
        self._seconds_before = last.get("seconds", 0.0)
        self._began = time.monotonic()
        self._objectives: list[float] = []
        self._file = path.open("a", encoding="utf-8")

    def add(self, progress: Progress) -> bool:
        """Take note of a round; true when that ended an interval and a line was written."""
        self._objectives.append(progress.objective)
        if progress.max_rounds > 2 * INTERVAL and progress.round % INTERVAL:
            return False
        self._write(progress)
        return True

    def _write(self, progress: Progress) -> None:
        mean = sum(self._objectives) / len(self._objectives)
        row = {
            "round": progress.round,
            "rounds": progress.max_rounds,
            "objective": mean if math.isfinite(mean) else None,
            "learning_rate": progress.learning_rate,
            "r_hat": progress.r_hat,
            "phase": progress.phase,
            "cohort": progress.cohort,
            "bytes_up": progress.bytes_up,
            "bytes_down": progress.bytes_down,
            "seconds": round(self._seconds_before + time.monotonic() - self._began, 3),
        }
        self._objectives.clear()
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self, last: Progress | None) -> None:
        """Write what the last interval holds so far."""
        if self._objectives and last is not None:
            self._write(last)
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a line that a crash tore ends them. No file, no rows."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows
