"""The pages that people read, in Debian's Chromium: at the width of a telephone and of a screen, light and dark,
nothing on the console, nothing wider than the window, and text that stands out from what is behind it."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, SCHEMES, WIDTHS, Browser

from secure_fvi.audits.base import AuditRow
from secure_fvi.audits.report import write as write_audit
from secure_fvi.cli import main
from secure_fvi.privacy.events import Gaussian, PoissonSampled
from secure_fvi.privacy.ledger import Budget, Job, Ledger, Term
from secure_fvi.privacy.report import read_report, report_html
from secure_fvi.runs.report import write_report
from secure_fvi.runs.watching import Watch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]
LOOKS = [(width, scheme) for width in WIDTHS for scheme in SCHEMES]
CONFIG = """
seed = 1
[model]
program = "six-cities"
[partition]
count = 3
[algorithm]
name = "sfvi"
iterations = 120
[aggregation]
kind = "masked"
[run]
compile = false
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose metrics say more than so few rounds do."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.toml").write_text(CONFIG)
    with warnings.catch_warnings(action="ignore"), pytest.raises(SystemExit) as stopped:
        main(["run", str(folder / "run.toml"), "--out", str(folder / "wheeze"), "--quiet"])
    assert stopped.value.code in (0, 4)
    metrics = folder / "wheeze" / "metrics.jsonl"
    row = json.loads(metrics.read_text().splitlines()[-1])
    rows = [row | {"round": 50 * k, "objective": -900.0 + 5 * k, "r_hat": 1 + 3 / k} for k in range(1, 41)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "wheeze"


def faults(seen: Any) -> list[str]:
    return [*seen.errors, *seen.pale, *seen.wide]


def test_what_is_wrong_with_a_page_is_seen(browser: Browser, tmp_path: Path) -> None:
    """The control: a script that fails, a box of 600 pixels, a pale line; each where it is."""
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><style>body{background:#fff} @media (prefers-color-scheme: dark){body{background:#bbb}}</style>"
        '<p style="color:#666">grey</p><div style="width:600px">a box</div><script>nothing.at.all</script>'
    )
    narrow, dark = browser.look(page.as_uri(), 390, "light"), browser.look(page.as_uri(), 1200, "dark")
    assert (len(narrow.errors), narrow.pale, bool(narrow.wide)) == (1, [], True)
    assert (len(dark.errors), dark.pale, dark.wide) == (1, ["P: grey"], [])
    page.write_text("<!doctype html><p>nothing wrong</p>")
    assert faults(browser.look(page.as_uri(), 390, "light")) == []


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("verdict", [True, False, None, "begun"])
def test_the_watch_page(
    browser: Browser, run: Path, tmp_path: Path, verdict: bool | str | None, width: int, scheme: str
) -> None:
    """Under the page's own security policy: name, axes, R-hat, and whether it converged."""
    shutil.copytree(run, tmp_path / "wheeze")
    result = tmp_path / "wheeze" / "result.json"
    if verdict == "begun":
        result.unlink()
    else:
        said = {"converged": verdict, "convergence": {"reason": "because it is so"}}
        result.write_text(json.dumps(json.loads(result.read_text()) | said))
    standing = {True: "converged", False: "not converged", None: "not assessed", "begun": "not finished yet"}[verdict]
    with Watch(tmp_path / "wheeze") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = "document.querySelectorAll('polyline').length === 2"
        seen = browser.look(server.link, width, scheme, there)
        ticks = browser.says(
            "[...document.querySelectorAll('#objective text.y, #r_hats text.x')].map(e => e.textContent)"
        )
        curves = browser.says("[...document.querySelectorAll('polyline')].map(e => e.points.length)")
        server.shutdown()
    assert faults(seen) == []
    for words in ("wheeze: six-cities", f"{standing}", "2000 of at most 120", "at rest below 1.1", "R-hat\n1.075"):
        assert words in seen.text
    assert ("because it is so" in seen.text) == (verdict != "begun")
    assert curves == [31, 41]  # the newest point comes twice
    assert {"-800", "-700", "1000", "2000"} <= set(ticks)


def test_the_watch_page_lists_budgets(browser: Browser, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are text: none is read as HTML."""
    left = [{"silo": "<b>north</b>", "epsilon": 4.0, "remaining": 1.25}, {"silo": "ledger", "error": "cannot be read"}]
    monkeypatch.setattr("secure_fvi.runs.watching._budgets", lambda *_: left)
    with Watch(run) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        seen = browser.look(server.link, 390, "dark", "document.querySelectorAll('#budgets td').length === 6")
        server.shutdown()
    assert faults(seen) == []
    assert all(words in seen.text for words in ("<b>north</b>", "4.000", "1.250", "cannot be read"))


def test_the_watch_page_turns_others_away(browser: Browser, run: Path) -> None:
    with Watch(run) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        seen = browser.look(server.link + "x", 390, "light")
        server.shutdown()
    assert "the link has no token" in seen.text
    assert "six-cities" not in seen.text


def _run_report(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "run")
    write_report(folder / "run")
    return folder / "run" / "report.html"


def _budget_report(run: Path, folder: Path) -> Path:
    ledger = Ledger.open(folder / "ledger.sqlite", "hospital-a", create=True)
    ledger.set_budget(Budget("adults", 2.0, 1e-6))
    terms = (Term("gradient", PoissonSampled(0.02, Gaussian(2.0)), 300),)
    about = {"algorithm": "SFVI", "noise": "server", "public": ["number of records"], "rng": "ChaCha20"}
    job = ledger.open_job(Job("a-job-of-a-long-name-0123456789abcdef", "adults", "record", 1e-6, terms, about))
    for index in range(7):
        job.charge("gradient", index)
    job.close("finished")
    ledger.close()
    (folder / "budget.html").write_text(report_html(read_report(folder / "ledger.sqlite")))
    return folder / "budget.html"


def _audit_report(run: Path, folder: Path) -> Path:
    found: list[Any] = ["leaks", "nothing found", "invalid"]
    note = "What a reader needs beside the numbers of this row."
    rows = [
        AuditRow("membership of a record", protection, "advantage", 0.2, 0.1, 0.3, 0.9, 0.0, True, finding, 0.0,
                 {"bound": 0.4, "note": note, "positive_control": {"power": 0.99}})
        for protection in ("masked", "plain") for finding in found
    ]  # fmt: skip
    write_audit(rows, {"program": "six-cities", "commit": "0123456789abcdef" * 4}, folder)
    return folder / "audit.html"


@pytest.mark.parametrize("page", [_run_report, _budget_report, _audit_report])
def test_reports(browser: Browser, run: Path, tmp_path: Path, page: Any) -> None:
    path = page(run, tmp_path)
    for width, scheme in LOOKS:
        seen = browser.look(path.as_uri(), width, scheme)
        assert faults(seen) == [], (width, scheme)
        assert browser.says("getComputedStyle(document.body).backgroundColor") == {
            "light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)",
        }[scheme]  # fmt: skip
