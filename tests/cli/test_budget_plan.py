"""`budget plan` and `budget report`: the agreed JSON, one line for bad input, nothing half-written."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import CommandLine
from scipy.stats import norm

from secure_fvi.errors import BudgetError
from secure_fvi.privacy import accountants
from secure_fvi.privacy.accountants import of_group
from secure_fvi.privacy.events import Gaussian, PoissonSampled, Repeated
from secure_fvi.privacy.gate import NoiseSource
from secure_fvi.privacy.ledger import Budget, Job, Ledger, Term
from secure_fvi.privacy.settings import RecordDP, SiloDP
from secure_fvi.privacy.terms import Extent, Terms, agree
from secure_fvi.server import claim

BASE = ("budget", "plan", "--delta", "1e-5")


def test_plan_solves_for_the_noise(cli: CommandLine) -> None:
    """By an accountant of somebody else's it costs no more than is said; the control, a fifth less noise, does."""
    given = ("--epsilon", "1", "--sampling-rate", "0.05", "--rounds", "40", "--noise", "silo")
    answer = cli(*BASE, *given, "--format", "json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert {"noise_multiplier", "epsilon", "delta", "accountant", "sampling_rate", "rounds"} <= found.keys()
    assert (found["accountant"], found["unit"], found["rounds"]) == ("ledger", "record", 40)
    event = Repeated(PoissonSampled(0.05, Gaussian(found["noise_multiplier"])), 40 + found["retries"])
    assert found["epsilon"] == accountants.epsilon(event, 1e-5, "ledger") <= 1
    assert accountants.epsilon(event, 1e-5, "pld") < found["epsilon"]
    less = Repeated(PoissonSampled(0.05, Gaussian(0.8 * found["noise_multiplier"])), 40 + found["retries"])
    assert accountants.epsilon(less, 1e-5, "pld") > found["epsilon"]


def test_a_plan_for_linked_records_keeps_the_epsilon_of_all_of_them(cli: CommandLine) -> None:
    """Three records of one person move a Gaussian sum by three norms: its exact delta at the epsilon that was asked for
    is below the one asked for. The control is the noise that is planned for one record."""
    given = (*BASE, "--epsilon", "1", "--sampling-rate", "1", "--rounds", "40", "--retries", "0", "--noise", "silo")

    def delta_of_three(*options: str) -> float:
        found = json.loads(cli(*given, *options, "--format", "json").out)
        return group_delta(3 * math.sqrt(40) / found["noise_multiplier"], 1.0)

    assert 1e-7 < delta_of_three("--linked", "3") <= 1e-5
    assert delta_of_three() > 1e-3
    one, alone = (json.loads(cli(*given, *more, "--format", "json").out) for more in (("--linked", "3"), ()))
    assert one["noise_multiplier"] == pytest.approx(3 * alone["noise_multiplier"], rel=1e-3)
    assert one["linked"] == {"records": 3, "delta": 1e-5, "by": "noise for all of them"}
    assert one["epsilon"] == pytest.approx(alone["epsilon"], rel=1e-3)
    assert "up to 3 records, as in so many silos: give a run these with linked = 3" in cli(*given, "--linked", "3").out


def test_a_plan_for_linked_records_of_a_sample_divides_epsilon(cli: CommandLine) -> None:
    given = (*BASE, "--epsilon", "1", "--sampling-rate", "0.05", "--rounds", "40", "--noise", "silo", "--linked", "3")
    one = json.loads(cli(*given, "--format", "json").out)
    assert of_group(1 / 3, one["delta"], 3) == pytest.approx((1.0, 1e-5))
    assert one["epsilon"] <= 1 / 3
    assert one["linked"] == {"records": 3, "delta": 1e-5, "by": "group privacy"}
    assert "Someone with up to 3 of them, as in so many silos, has epsilon 1 at delta 1e-05 in all" in cli(*given).out
    refused = cli(*BASE, "--noise-multiplier", "5", "--sampling-rate", "0.05", "--rounds", "40", "--linked", "2")
    assert (refused.code, "give --epsilon" in refused.err) == (2, True)


def group_delta(mu: float, epsilon: float) -> float:
    """Of mu-Gaussian DP, exactly."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.later
@pytest.mark.parametrize("noise", ["silo", "distributed"])
@pytest.mark.parametrize("unit", ["record", "silo"])
def test_plan_run_and_ledger_give_one_number(cli: CommandLine, tmp_path: Path, noise: str, unit: str) -> None:
    """The noise that is planned is the noise that a run takes, which says what it is charged, and the ledger admits it
    in a budget of that epsilon and in none that is 1% smaller. The control is the plan by PLD, which names a noise that
    this budget refuses."""
    rate, rounds, epsilon = (0.05 if unit == "record" else 1.0), 40, 1.0
    options = ("--rounds", str(rounds), "--epsilon", "1", "--unit", unit, "--noise", noise, "--silos", "5")
    sampled = ("--sampling-rate", str(rate)) if unit == "record" else ()
    found = json.loads(cli(*BASE, *options, *sampled, "--dimension", "12", "--format", "json").out)
    kind = RecordDP if unit == "record" else SiloDP
    terms = agree(kind(epsilon=epsilon, delta=1e-5, noise=noise), 5, rate, rounds, Extent(12, 0, 0))  # type: ignore[arg-type]
    assert found["noise_multiplier"] == pytest.approx(terms.noise_multiplier, rel=0.01)
    said = claim({"round": terms}, NoiseSource(b"k" * 32))
    assert said["charged"] == pytest.approx(epsilon, rel=0.01)
    assert said["epsilon"] <= said["charged"]
    job = Job("fit", "adults", unit, 1e-5, (Term("round", terms.event, terms.releases),), {})
    ledger = Ledger.open(tmp_path / "ledger.sqlite", "hospital-a", create=True)
    ledger.set_budget(Budget("adults", epsilon, 1e-5, unit))
    ledger.check_job(job)
    tighter = Ledger.open(tmp_path / "tighter.sqlite", "hospital-a", create=True)
    tighter.set_budget(Budget("adults", 0.99 * epsilon, 1e-5, unit))
    with pytest.raises(BudgetError):
        tighter.check_job(job)
    if noise == "silo":
        loose = json.loads(cli(*BASE, *options, *sampled, "--accountant", "pld", "--format", "json").out)
        event = Gaussian(loose["noise_multiplier"])
        sampled_event = PoissonSampled(rate, event) if unit == "record" else event
        with pytest.raises(BudgetError):
            ledger.check_job(Job("fit", "adults", unit, 1e-5, (Term("round", sampled_event, terms.releases),), {}))
    ledger.close()
    tighter.close()


#: By what is odd of it: options of the plan, and settings, silos, sampling rate, rounds and width of the run.
ODD: dict[str, tuple[str, RecordDP | SiloDP, int, float, int, int]] = {
    "wide, low epsilon, nothing said of noise": (
        "--epsilon .2 --delta 1e-5 --sampling-rate .05 --rounds 400 --dimension 100000",
        RecordDP(epsilon=0.2, delta=1e-5), 10, 0.05, 400, 100_000,
    ),
    "an institution, tiny delta": (
        "--epsilon 8 --delta 1e-12 --rounds 30 --unit silo --noise silo",
        SiloDP(epsilon=8.0, delta=1e-12, noise="silo"), 5, 1.0, 30, 50,
    ),
    "three records a person": (
        "--epsilon 1 --delta 1e-5 --sampling-rate 1 --rounds 40 --silos 5 --dimension 12 --linked 3",
        RecordDP(epsilon=1.0, linked=3), 5, 1.0, 40, 12,
    ),
    "large delta": (
        "--epsilon .5 --delta .1 --sampling-rate .3 --rounds 3 --noise silo",
        RecordDP(epsilon=0.5, delta=0.1, noise="silo"), 5, 0.3, 3, 5,
    ),
    "one release": (
        "--epsilon 1 --delta 1e-6 --sampling-rate 1 --rounds 1 --retries 0 --dimension 3",
        RecordDP(epsilon=1.0, delta=1e-6, retries=0), 3, 1.0, 1, 3,
    ),
    "many tiny batches": (
        "--epsilon 3 --delta 1e-6 --sampling-rate 1e-4 --rounds 100000 --noise silo",
        RecordDP(epsilon=3.0, delta=1e-6, noise="silo"), 3, 1e-4, 100_000, 3,
    ),
    "delta below all doubles' squares": (
        "--epsilon 5 --delta 1e-300 --sampling-rate 1 --rounds 5 --noise silo",
        RecordDP(epsilon=5.0, delta=1e-300, noise="silo"), 3, 1.0, 5, 3,
    ),
}  # fmt: skip


@pytest.mark.later
@pytest.mark.parametrize("odd", ODD)
def test_odd_plans_are_charged_to_a_percent(cli: CommandLine, tmp_path: Path, odd: str) -> None:
    options, settings, silos, rate, rounds, width = ODD[odd]
    found = json.loads(cli("budget", "plan", *options.split(), "--format", "json").out)
    extent = Extent(width, 0, 0)
    assert agree(settings, silos, rate, rounds, extent).noise_multiplier == pytest.approx(
        found["noise_multiplier"], rel=0.01
    )
    planned = replace(settings, epsilon=None, noise_multiplier=found["noise_multiplier"])
    terms = agree(planned, silos, rate, rounds, extent)
    assert _admits(tmp_path / "at.sqlite", settings, 1.01 * found["epsilon"], terms)
    assert not _admits(tmp_path / "below.sqlite", settings, 0.99 * found["epsilon"], terms)


def test_a_plan_for_narrower_releases_is_too_little(cli: CommandLine, tmp_path: Path) -> None:
    """The control: 1,000 numbers where a run has 100,000; the plan says for how many it is."""
    options, settings, silos, rate, rounds, width = next(iter(ODD.values()))
    narrow = options.replace("100000", "1000").split()
    assert "releases of 1,000 numbers" in cli("budget", "plan", *narrow).out
    found = json.loads(cli("budget", "plan", *narrow, "--format", "json").out)
    planned = replace(settings, epsilon=None, noise_multiplier=found["noise_multiplier"])
    terms = agree(planned, silos, rate, rounds, Extent(width, 0, 0))
    assert not _admits(tmp_path / "ledger.sqlite", settings, 1.01 * found["epsilon"], terms)


def _admits(path: Path, settings: RecordDP | SiloDP, epsilon: float, terms: Terms) -> bool:
    """Whether a budget of that epsilon, of which nothing is spent, holds the job."""
    ledger = Ledger.open(path, "hospital-a", create=True)
    ledger.set_budget(Budget("adults", epsilon, settings.delta, settings.unit))
    try:
        ledger.check_job(
            Job("fit", "adults", settings.unit, settings.delta, (Term("round", terms.event, terms.releases),), {})
        )
    except BudgetError:
        return False
    finally:
        ledger.close()
    return True


def test_plan_in_words_marks_what_was_solved_for(cli: CommandLine) -> None:
    answer = cli(*BASE, "--noise-multiplier", "2", "--sampling-rate", "0.05", "--rounds", "40", "--accountant", "rdp")
    assert answer.code == 0, answer.err
    (marked,) = [line for line in answer.out.splitlines() if "<- solved for" in line]
    assert marked.split()[0] == "epsilon"
    assert "is right at most" in answer.out
    assert "who cannot see which records joined" in answer.out


def test_plan_for_distributed_noise(cli: CommandLine) -> None:
    given = (
        "--epsilon",
        "1",
        "--sampling-rate",
        "0.05",
        "--rounds",
        "40",
        "--format",
        "json",
        "--noise",
        "distributed",
    )
    answer = cli(*BASE, *given, "--silos", "10", "--dropouts", "2", "--colluders", "3")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert (found["accountant"], found["honest_survivors"]) == ("ledger", 5)
    assert found["share_multiplier"] * 5**0.5 == pytest.approx(found["noise_multiplier"])
    assert found["sum_multiplier"] == pytest.approx(found["noise_multiplier"] * 2**0.5)
    gaussian = Repeated(PoissonSampled(0.05, Gaussian(found["noise_multiplier"])), 40 + found["retries"])
    assert accountants.epsilon(gaussian, 1e-5, "ledger") < found["epsilon"] <= 1  # rounding to integers costs a little
    once = PoissonSampled(0.05, Gaussian(found["noise_multiplier"]))
    assert found["epsilon"] == pytest.approx(accountants.epsilon(gaussian, 1e-5, "ledger"), rel=0.01)
    assert found["release_epsilon"] == pytest.approx(accountants.epsilon(once, 1e-5, "ledger"), rel=0.01)


def test_plan_for_silos_has_no_sampling(cli: CommandLine) -> None:
    answer = cli(*BASE, "--epsilon", "2", "--rounds", "10", "--unit", "silo", "--accountant", "rdp", "--format", "json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["sampling_rate"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--epsilon", "0", "--sampling-rate", "0.1", "--rounds", "1"), "epsilon must be"),
        (("--epsilon", "nan", "--sampling-rate", "0.1", "--rounds", "1"), "epsilon must be"),
        (("--epsilon", "1", "--sampling-rate", "1.7", "--rounds", "1"), "sampling rate must lie in (0, 1]"),
        (("--epsilon", "1", "--sampling-rate", "0.1", "--rounds", "0"), "--rounds must be at least 1, not 0"),
        (("--sampling-rate", "0.1", "--rounds", "1", "--noise-multiplier", "-1"), "noise_multiplier must be"),
        (("--epsilon", "1", "--sampling-rate", "0.1", "--rounds", "1", "--delta", "1"), "delta must lie"),
        (("--epsilon", "1", "--rounds", "1"), "are left out"),
        (("--epsilon", "1", "--sampling-rate", "0.1", "--rounds", "1", "--noise-multiplier", "1"), "none is left out"),
        (("--epsilon", "1", "--rounds", "1", "--unit", "silo", "--sampling-rate", "0.1"), "every round"),
        (("--epsilon", "1", "--sampling-rate", "1", "--rounds", "1", "--noise", "distributed"), "give --silos"),
        (
            ("--epsilon", "1", "--sampling-rate", "1", "--rounds", "1", "--noise", "distributed", "--silos", "1"),
            "honest survivor",
        ),
        (
            (
                *("--epsilon", "1", "--sampling-rate", "1", "--rounds", "1", "--noise", "distributed"),
                *("--silos", "5", "--accountant", "pld"),
            ),
            "use ledger or rdp",
        ),
    ],
)
def test_bad_input_is_one_line(cli: CommandLine, options: tuple[str, ...], message: str) -> None:
    answer = cli(*BASE, *options)
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.strip().splitlines()) == 1
    assert not answer.out


def test_a_delta_too_large_for_the_population_is_warned_about(cli: CommandLine) -> None:
    given = ("--epsilon", "1", "--sampling-rate", "1", "--rounds", "1", "--accountant", "rdp")
    assert "not below 1 / 100000" in cli(*BASE, *given, "--records", "100000").err
    assert not cli(*BASE, *given, "--records", "1000").err


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    opened = Ledger.open(path, "hospital-a", create=True)
    opened.set_budget(Budget("adults", 3.0, 1e-6))
    opened.open_job(Job("fit", "adults", "record", 1e-6, (Term("gradient", Gaussian(5.0), 3),), {"noise": "silo"}))
    opened.close()
    return path


def test_report_formats(cli: CommandLine, ledger: Path, tmp_path: Path) -> None:
    answer = cli("budget", "report", str(ledger), "--format", "json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["jobs"][0]["epsilon"] == accountants.epsilon(Repeated(Gaussian(5.0), 3), 1e-6, "pld")
    assert "hospital-a" in cli("budget", "report", str(ledger)).out
    page = tmp_path / "report.html"
    assert cli("budget", "report", str(ledger), "--format", "html", "--out", str(page)).code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_report_of_nothing_writes_nothing(cli: CommandLine, ledger: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    for options in (
        (str(tmp_path / "none.sqlite"),),
        (str(ledger), "--silo", "hospital-b"),
        (str(ledger), "--data-set", "children"),
    ):
        answer = cli("budget", "report", *options, "--format", "html", "--out", str(out))
        assert answer.code == 2, answer
        assert len(answer.err.strip().splitlines()) == 1
        assert not out.exists()


@pytest.mark.slow
def test_bench_accountants(cli: CommandLine) -> None:
    answer = cli("bench", "accountants", "--json")
    assert answer.code == 0, answer.err
    assert len(json.loads(answer.out)["rows"]) == 10
