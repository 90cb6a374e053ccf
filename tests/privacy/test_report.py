"""The budget report: its numbers are the accountants', its words follow the declarations, its page fetches nothing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from scipy.optimize import brentq
from scipy.stats import norm

from secure_fvi.cli import cli
from secure_fvi.errors import InputError
from secure_fvi.privacy import accountants, accounting
from secure_fvi.privacy.events import Composed, Gaussian, PoissonSampled, Repeated, Skellam
from secure_fvi.privacy.ledger import Budget, Job, Ledger, Term, read_ledger
from secure_fvi.privacy.ledger_account import account
from secure_fvi.privacy.report import Report, job_event, read_report, report_html, report_text
from secure_fvi.privacy.terms import ADD_OR_REMOVE, REPLACE

SAMPLED = PoissonSampled(0.02, Gaussian(2.0))
INTEGER = PoissonSampled(0.01, Skellam(1.8e5**2, 3.2e6, 1e5))


def _job(name: str, event: Any, count: int, **description: Any) -> Job:
    return Job(name, "adults", "record", 1e-6, (Term("gradient", event, count),), description)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(file, "hospital-a", create=True)
    ledger.set_budget(Budget("adults", 2.0, 1e-6))
    ledger.set_budget(Budget("adults", 3.0, 1e-6))
    first = ledger.open_job(_job("first", SAMPLED, 300, algorithm="SFVI", noise="server", public=[], rng="ChaCha20"))
    for index in range(7):
        first.charge("gradient", index)
    first.close("finished")
    ledger.open_job(
        _job(
            r"<b>second</b>$\x$",  # mathematics, to matplotlib
            INTEGER,
            400,
            noise="distributed",
            colluders=2,
            public=["number of records"],
            rng="ChaCha20",
        )
    )
    ledger.close()
    return file


@pytest.fixture
def report(path: Path) -> Report:
    return read_report(path)


def test_numbers(path: Path, report: Report) -> None:
    first, second = report.jobs
    assert first.accountant == "pld"
    assert first.epsilon == accountants.epsilon(Repeated(SAMPLED, 300), 1e-6, "pld")
    assert second.accountant == "rdp"
    assert second.epsilon == accountants.epsilon(Repeated(INTEGER, 400), 1e-6, "rdp")
    both = Composed((Repeated(SAMPLED, 300), Repeated(INTEGER, 400)))
    assert report.epsilon == pytest.approx(accountants.epsilon(both, 1e-6, "rdp"), rel=1e-12)
    assert report.epsilon == pytest.approx(second.epsilon_so_far, rel=1e-12)
    assert first.epsilon < first.epsilon_so_far < report.epsilon < report.budget["epsilon"] == 3.0
    assert [b["epsilon"] for b in report.budget["history"]] == [2.0, 3.0]
    of = account(read_ledger(path)["hospital-a"], "adults")
    assert (report.remaining, report.ledger_head) == (of.remaining, of.head.hex())
    assert first.terms[0]["released"] == 7


def test_the_contract_of_the_json(report: Report) -> None:
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert {"data_set", "unit", "jobs", "epsilon", "delta", "accountant", "budget", "remaining", "ledger_head"} <= set(
        data
    )
    assert data["jobs"][0]["declared_public"] == []


def test_equal_events_of_a_job_are_counted_together() -> None:
    job = Job("j", "d", "record", 1e-6, (Term("a", SAMPLED, 3), Term("b", Repeated(SAMPLED, 2), 5)), {})
    assert accounting.grouped(job_event(job)) == {SAMPLED: 13}


def test_words_follow_the_declarations(path: Path, report: Report) -> None:
    assert "with up to 2 other institutions in league, but not against the server of jobs" in report.adversary
    assert "number of records of this data set was declared public by a job" in report.adversary
    words = "\n".join(report.not_covered)
    for expected in (
        "several institutions",
        "epsilon is m times as large and delta up to (exp(m epsilon) - 1) / (exp(epsilon) - 1) times",  # and no sum
        "The server.",
        "no more than 2",
        "number of records",
        "in secret",
        "not rounded",
    ):
        assert expected in words
    assert "test key" not in words
    ledger = Ledger.open(path, "hospital-a")
    ledger.open_job(_job("careless", INTEGER, 1, rng="TEST KEY: the noise can be replayed"))
    ledger.close()
    after = read_report(path)
    assert after.not_covered[0].startswith("ANYTHING AT ALL")
    assert any("did not declare" in item for item in after.not_covered)


def test_what_a_record_is_follows_the_jobs(path: Path, report: Report) -> None:
    """Visits that are records of their own are not told to be individuals; the control's record is one."""
    assert "individual" not in report.adjacency
    ledger = Ledger.open(path, "hospital-a")
    for name, record in (("visits", "one row of the data"), ("patients", "all rows of one 'patient' at one silo")):
        ledger.open_job(_job(name, INTEGER, 1, record=record))
    ledger.close()
    said = read_report(path).adjacency
    assert "one record more: all rows of one 'patient' at one silo or, by job, one row of the data." in said


def test_jobs_of_other_neighbours_are_not_added_up_as_they_stand(tmp_path: Path) -> None:
    """A changed person is two records to a job that counts them: both jobs fit the budget, and together say more of
    that person than it allows, by the exact delta of a Gaussian. The controls: jobs of one kind are within it."""

    def told(*adjacencies: str) -> tuple[Report, float]:
        file = tmp_path / f"{'-'.join(adjacencies)}.sqlite".replace(" ", "")
        ledger = Ledger.open(file, "hospital-a", create=True)
        ledger.set_budget(Budget("adults", 1.05, 1e-6))
        for number, said in enumerate(adjacencies):
            ledger.open_job(_job(f"job {number}", Gaussian(7.5), 1, adjacency=said))
        ledger.close()
        moved = math.hypot(*((2 if said == ADD_OR_REMOVE else 1) / 7.5 for said in adjacencies))
        if REPLACE not in adjacencies:
            moved = math.hypot(*(1 / 7.5 for _ in adjacencies))
        at = moved / 2 - 1.05 / moved, -moved / 2 - 1.05 / moved
        return read_report(file), float(norm.cdf(at[0]) - math.exp(1.05) * norm.cdf(at[1]))

    for alike in (ADD_OR_REMOVE, REPLACE):
        report, delta = told(alike, alike)
        assert delta <= report.delta
        assert "kinds of neighbours" not in report.composition
    mixed, delta = told(ADD_OR_REMOVE, REPLACE)
    assert delta > 10 * mixed.delta
    assert "2 kinds of neighbours (above): the numbers bound the jobs of each kind by themselves" in mixed.composition
    assert "as for a group of two" in mixed.adjacency


def test_only_integer_noise_has_no_floating_point_gap(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "l", "s", create=True)
    ledger.set_budget(Budget("adults", 3.0, 1e-6))
    empty = account(ledger.chain, "adults")
    ledger.open_job(_job("integers", INTEGER, 10, noise="distributed"))
    ledger.close()
    words = "\n".join(read_report(tmp_path / "l").not_covered)
    assert "not rounded" not in words
    assert "The server." not in words
    assert not empty.jobs


def test_text(report: Report) -> None:
    text = report_text(report)
    for expected in (
        "adults",
        "hospital-a",
        report.ledger_head,
        "gradient 7/300",
        "Not covered:",
        "pld",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 130


def test_what_a_job_declared_is_in_words_and_on_the_page_alike(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "l", "s", create=True)
    ledger.set_budget(Budget("adults", 3.0, 1e-6))
    about = {
        "algorithm": "sfvi",
        "clipping_norm": 2.25,
        "noise_multiplier": 2.15036,
        "sampling_rate": 0.02,
        "colluders": 1,
    }
    ledger.open_job(Job("j", "adults", "record", 1e-5, (Term("gradient", SAMPLED, 30),), about)).close("finished")
    ledger.close()
    report = read_report(tmp_path / "l")
    text, page = " ".join(report_text(report).split()), report_html(report)
    for words in (
        "sfvi; finished; its own delta 1e-05; clipping norm 2.25; noise multiplier 2.15; sampling rate 0.02; colluders",
        "Equal service. Gradients are cut at the clipping norm",
        report.budget["history"][0]["set"],
        "knows all other data and chooses what the institution is asked.",
        "The number of records of this data set was not released without noise, and this report does not know it.",
    ):
        assert words in text
        assert words in page
    assert report.to_dict()["adversary"] in page
    assert f"as of {report.made}" in text
    assert "Equal service" not in " ".join(read_report(_unclipped(tmp_path / "u")).not_covered)


@pytest.mark.parametrize("adjacency", ["replace one", "add or remove one"])
def test_of_columns_all_parties_know_how_many_people_there_are(tmp_path: Path, adjacency: str) -> None:
    """The control has silos of records, whose number is told nobody."""
    ledger = Ledger.open(tmp_path / "l", "s", create=True)
    ledger.set_budget(Budget("adults", 3.0, 1e-6))
    about = {"algorithm": "vertical", "adjacency": adjacency}
    ledger.open_job(Job("j", "adults", "record", 1e-5, (Term("gradient", SAMPLED, 30),), about)).close("finished")
    ledger.close()
    said = " ".join(report_text(read_report(tmp_path / "l")).split())
    assert ("Their number is known to all parties" in said) == (adjacency == "replace one")
    assert ("this report does not know it" in said) == (adjacency != "replace one")
    assert "released at most / declared" in said  # blocks that were reserved count whole


def _unclipped(path: Path) -> Path:
    ledger = Ledger.open(path, "s", create=True)
    ledger.set_budget(Budget("adults", 3.0, 1e-6))
    ledger.open_job(_job("j", SAMPLED, 30))
    ledger.close()
    return path


def test_the_page_is_self_contained_and_escaped(report: Report) -> None:
    page = report_html(report)
    assert "<b>second</b>" not in page
    assert "&lt;b&gt;second&lt;/b&gt;" in page
    assert page.count("data:image/svg+xml;base64,") == 1
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:)", page)
    assert "<script" not in page
    assert report.ledger_head in page


def test_an_empty_account_has_a_report(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "l", "s", create=True)
    ledger.set_budget(Budget("d", 1.0, 1e-6, "silo"))
    ledger.close()
    empty = read_report(tmp_path / "l")
    assert empty.epsilon == 0
    assert "No job was charged" in report_text(empty)
    assert "No job was charged" in report_html(empty)


def test_a_choice_is_asked_for(path: Path) -> None:
    ledger = Ledger.open(path, "hospital-a")
    ledger.set_budget(Budget("children", 1.0, 1e-6))
    ledger.close()
    with pytest.raises(InputError, match="data sets adults, children"):
        read_report(path)
    assert read_report(path, data_set="children").jobs == []
    Ledger.open(path, "hospital-b", create=True).close()
    with pytest.raises(InputError, match="hospital-a, hospital-b"):
        read_report(path)
    with pytest.raises(InputError, match="knows no data set 'elders'"):
        read_report(path, "hospital-a", "elders")


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (3.0, 1e-6), (0.5, 1e-6)])
@pytest.mark.parametrize("m", [2, 3, 5])
def test_one_person_in_several_institutions_is_a_group(epsilon: float, delta: float, m: int) -> None:
    """The worst case of shared noise, a full-batch Gaussian sum, whose delta is known exactly (Balle and Wang 2018): no
    more than we say. The control: that epsilons and deltas add up, as was said here once, is false."""

    def exact(at: float, mu: float) -> float:
        return float(norm.cdf(mu / 2 - at / mu) - math.exp(at + norm.logcdf(-mu / 2 - at / mu)))

    mu = brentq(lambda x: exact(epsilon, x) - delta, 1e-3, 20)
    assert m * delta < exact(m * epsilon, m * mu) <= accountants.of_group(epsilon, delta, m)[1]
    assert accountants.of_group(epsilon, delta, m)[0] == m * epsilon


@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 1e-6), (1.0, 1e-5), (3.0, 1e-6), (8.0, 1e-9), (1.0, 0.1)])
def test_how_often_a_guess_is_right(epsilon: float, delta: float) -> None:
    """Of a Gaussian release of just this (epsilon, delta), the best guess is right less often than is said. The control
    is what was said once: that beliefs pass e^epsilon with a probability of about delta. It is several times that."""
    mu = brentq(
        lambda x: norm.cdf(x / 2 - epsilon / x) - math.exp(epsilon + norm.logcdf(-x / 2 - epsilon / x)) - delta,
        1e-3,
        20,
    )
    assert float(norm.cdf(mu / 2)) <= accountants.best_guess(epsilon, delta) < 1
    if delta < 0.1:
        assert float(norm.cdf(mu / 2 - epsilon / mu)) > 3 * delta


def test_a_budget_that_was_raised_or_lowered_promises_no_more_than_it_can(path: Path, report: Report) -> None:
    """The control: of the one that was set once, the promise is about all that will be asked."""
    assert "whatever was and will be asked" in report.composition
    first = report.budget["epsilon"]
    for epsilon, said in (
        (4 * first, f"within epsilon {4 * first:g} at delta 2e-06"),
        (0.5 * first, f"within epsilon {4 * first:g} at delta 3e-06"),
    ):
        ledger = Ledger.open(path, "hospital-a")
        ledger.set_budget(Budget("adults", epsilon, report.delta))
        ledger.close()
        found = read_report(path)
        assert "will be asked" not in found.composition
        assert "where one did, no theorem covers them" in found.composition
        assert said in found.composition
        assert found.budget["bound"]["epsilon"] == 4 * first
        assert found.best_guess > report.best_guess


def _changed(folder: Path, *budgets: Budget, step: float) -> Report:
    """The report of a ledger with these budgets and a job under each; its clock goes on by `step` seconds a row."""
    file, now = folder / f"{len(list(folder.iterdir()))}.sqlite", [1e9]
    ledger = Ledger.open(file, "hospital-a", create=True, clock=lambda: now[0])
    for number, budget in enumerate(budgets):
        ledger.set_budget(budget)
        now[0] += step
        ledger.open_job(_job(f"job {number}", Gaussian(12.0), 1))
        now[0] += step
    ledger.close()
    return read_report(file)


@pytest.mark.parametrize("step", [1.0, 0.0, -30.0])
def test_budgets_are_told_apart_by_rows_not_by_times(tmp_path: Path, step: float) -> None:
    """Rows of one time, as after a clock that was set back: what the first job met was taken for taken back before it.
    The control is a clock that runs."""
    found = _changed(tmp_path, Budget("adults", 10.0, 1e-6), Budget("adults", 1.0, 1e-6), step=step)
    assert found.budget["bound"] == {"epsilon": 10.0, "delta": 2e-6}
    assert "within epsilon 10 at delta 2e-06" in found.composition
    assert found.best_guess == pytest.approx(1 / (1 + math.exp(-10)))
    times = [b["set"] for b in found.budget["history"]] + [job.opened for job in found.jobs]
    assert (len(set(times)) == 1) == (step <= 0)


def test_deltas_of_changed_budgets_add_up(tmp_path: Path) -> None:
    """The control: of a budget that nobody changed, and of one that was changed before the first job, the delta is
    its own."""
    six = [Budget("adults", e, 1e-6) for e in (3.0, 2.9, 2.8, 2.7, 2.6, 2.5)]
    found = _changed(tmp_path, *six, step=1.0)
    assert found.budget["bound"] == {"epsilon": 3.0, "delta": pytest.approx(6e-6, rel=1e-12)}
    assert "within epsilon 3 at delta 6e-06, the largest epsilon and the sum of the deltas" in found.composition
    assert _changed(tmp_path, six[0], step=1.0).budget["bound"] == {"epsilon": 3.0, "delta": 1e-6}
    wide = _changed(tmp_path, Budget("adults", 3.0, 0.6), Budget("adults", 2.0, 0.7), step=1.0)
    assert wide.budget["bound"]["delta"] == 1.0
    assert "at delta 1, which promises nothing" in wide.composition


def test_a_ledger_of_somebody_else_moves_no_cursor_and_makes_no_line(path: Path) -> None:
    """Members hand on their ledgers. The control: what its words hold, which click would echo to a terminal."""
    evil = "all rows of one person\x1b[2J\x1b[H\nspent epsilon 0.01 of 3\u202e"
    ledger = Ledger.open(path, "hospital-a")
    ledger.open_job(_job("third", SAMPLED, 1, record=evil, noise=evil, rng=evil, public=[evil]))
    ledger.close()
    found = read_report(path, "hospital-a", "adults")
    assert any("\x1b[2J\x1b[H\n" in str(job.rng) for job in found.jobs)
    text = report_text(found)
    assert all(line.isprintable() for line in text.splitlines())
    assert not any(line.startswith("spent") for line in text.splitlines())
    for form in ([], ["--format", "html"]):
        said = CliRunner().invoke(cli, ["budget", "report", str(path), "--silo", "hospital-a", *form], color=True)
        assert said.exit_code == 0
        assert "\x1b" not in said.output
