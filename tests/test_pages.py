"""Pages of the documentation, run as they stand from a clean folder: every `sh` and `python` block, in order.

A page's `sh` blocks are one shell (`bash -euo pipefail`), its `python` blocks one program. A page with either is run
here, or named below with the reason why not; `toml` blocks are read. Blocks without a language are not run: commands
that need many minutes, a network or a browser, or are output. Of every command on every page, run or not, it is seen
that it exists and has the options that it is given, and of every test that a page names that it is there.

A page whose commands name `examples/` runs where these are, as in a checkout; where one reads `$SECURE_FVI_DATA`, there
are made-up rows in the published form.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from secure_fvi.cli import cli
from secure_fvi.cli.poc import HUB, NAMES, SETTINGS, Handed, Typed, plan

ROOT = Path(__file__).parents[1]
PAGES = {str(p.relative_to(ROOT)): p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
#: Seconds each.
QUICK = ("README.md", "docs/ledger.md", "docs/tables.md", "docs/vertical-alignment.md")
#: Up to minutes each, on two cores shared with other work.
SLOW = (
    "docs/audits-data.md",
    "docs/audits-epsilon.md",
    "docs/audits.md",
    "docs/baselines.md",
    "docs/fedavg.md",
    "docs/fedvi.md",
    "docs/formula.md",
    "docs/models.md",
    "docs/posterior.md",
    "docs/privacy.md",
    "docs/private-intervals.md",
    "docs/prodlda.md",
    "docs/provisioning.md",
    "docs/pvi.md",
    "docs/sfvi-avg.md",
    "docs/tutorial.md",
    "docs/vertical.md",
)
#: Run below by tests of their own, which look at what came out.
LOOKED_AT = ("docs/end-to-end.md", "docs/vertical-deployment.md")
NOT_RUN = {
    "docs/distributed.md": "names machines that are not here; tests/deployment/test_poc.py types the same commands",
    "docs/flare.md": "names machines that are not here; tests/deployment/test_flare.py starts FLARE",
}

#: What a page's commands print, and how often.
SAYS = {
    "docs/provisioning.md": {
        "roster signed by all, certificate in force": 1,
        "data sets: data": 1,
        "is in force: signed by east, hub, north, south": 1,
    },
}


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _made_up_adult(folder: Path) -> Path:
    """`folder`/uci_adult: 3,000 rows of made-up people in the form of UCI Adult."""
    rng, where = random.Random(1), folder / "uci_adult"
    where.mkdir(parents=True)
    rows = []
    for _ in range(3000):
        age, years, hours = rng.randint(17, 80), rng.randint(1, 16), rng.randint(10, 70)
        income = ">50K" if rng.gauss(0.3 * (years - 11) + 0.03 * (age - 45), 1.5) > 0 else "<=50K"
        rows.append(
            f"{age}, Private, 77516, Bachelors, {years}, Divorced, Sales, Husband, White, "
            f"{rng.choice(['Male', 'Female'])}, 0, 0, {hours}, United-States, {income}"
        )
    (where / "adult.data").write_text("\n".join(rows) + "\n")
    return where


def _run(page: str, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """The blocks of `page` in `folder`. What it runs is the Python and the package that run the tests."""
    text = PAGES[page].read_text()
    (folder / "page.py").write_text("\n".join(_blocks(text, "python")))
    script = "\n".join([*_blocks(text, "sh"), "python page.py"])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SECURE_FVI_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "lab")])
    if "examples/" in script:
        (folder / "examples").symlink_to(ROOT / "examples")
    if "$SECURE_FVI_DATA" in script:
        environment["SECURE_FVI_DATA"] = str(_made_up_adult(folder / "data").parent)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    logs = "\n".join(p.read_text()[-2000:] for p in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:] + logs
    assert "PRIVATE" not in done.stdout + done.stderr
    return done


def test_every_page_is_run_or_says_why_not() -> None:
    with_code = {name for name, page in PAGES.items() if _blocks(page.read_text(), "(?:sh|python)")}
    named = [*QUICK, *SLOW, *LOOKED_AT, *NOT_RUN]
    assert sorted(named) == sorted(with_code)


@pytest.mark.parametrize("page", [name for name in PAGES if _blocks(PAGES[name].read_text(), "toml")])
def test_configuration_is_toml(page: str) -> None:
    for block in _blocks(PAGES[page].read_text(), "toml"):
        assert tomllib.loads(block)


def test_python_compiles_without_names_of_nowhere() -> None:
    """Also of pages that are not run: what they import from secure_fvi is there."""
    lines = list[str]()
    for page, path in PAGES.items():
        source = "\n".join(_blocks(path.read_text(), "python"))
        compile(source, page, "exec")
        lines += re.findall(r"^(?:from secure_fvi|import secure_fvi).*$", source, re.MULTILINE)
    assert len(lines) > 30
    for line in lines:
        exec(line, {})


def _commands(text: str, page: bool = True) -> Iterator[list[str]]:
    """The words after `secure-fvi` of each command on a page, in blocks and in lines of text; or in any other file."""
    text = re.sub(r"\\\n[\s#]*", " ", text)
    spans = [text]
    if page:
        spans = [*re.findall(r"^```(?!python|text).*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
        spans += [span.replace("\n", " ") for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    for line in "\n".join(spans).splitlines():
        for rest in re.findall(r"(?:^|[\s(/])secure-fvi ([^|;&)#`:,]+)", line):
            yield shlex.split(re.sub(r"[\[\]'\"]|\d?>.*", "", rest))


def _mistake(words: list[str]) -> str:
    """What is wrong with a command, or nothing. Words in capitals stand for the reader's own."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and words and not words[0].startswith(("-", "$")):
        if words[0] not in command.list_commands(context):
            return f"no command '{words[0]}'" if words[0].isidentifier() or "-" in words[0] else ""
        found = command.get_command(context, words[0])
        assert found is not None
        command, words = found, words[1:]
    options = {o for p in command.get_params(context) for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    unknown = [w for w in words if w.startswith("--") and w.split("=")[0] not in options]
    return f"{command.name} has no {', '.join(unknown)}" if unknown else ""


def test_commands_on_pages_exist_with_their_options() -> None:
    pages = {**PAGES, "SECURITY.md": ROOT / "SECURITY.md"}
    found = {name: list(_commands(page.read_text())) for name, page in pages.items()}
    assert sum(map(len, found.values())) > 120
    files = [
        ROOT / "Makefile",
        *(p for p in sorted((ROOT / "examples").rglob("*")) if p.suffix not in (".csv", ".pyc") and p.is_file()),
    ]
    found |= {str(p.relative_to(ROOT)): list(_commands(p.read_text(), page=False)) for p in files}
    assert len(found["Makefile"]) > 5
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = {
        name: set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)) for name, page in pages.items()
    }
    assert len(set().union(*made.values())) > 5
    assert not {name: words for name, words in made.items() if words - set(targets)}
    wrong = {(name, " ".join(words)): _mistake(words) for name, all_ in found.items() for words in all_}
    assert not {where: what for where, what in wrong.items() if what}
    # The control: what is not there is found.
    assert all(map(_mistake, (["runn", "a.toml"], ["run", "a.toml", "--outt", "b"], ["keys", "made"])))
    assert list(_commands("```sh\nx=$(secure-fvi keys code a \\\n  b | cut -d: -f2)\n```")) == [
        ["keys", "code", "a", "b"]
    ]


def test_tests_that_pages_name_are_there() -> None:
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    sources = {name: path.read_text() for name, path in files.items()}
    everything = "\n".join(sources.values())
    named = 0
    for page, path in {**PAGES, "SECURITY.md": ROOT / "SECURITY.md"}.items():
        text = path.read_text()
        for folder, name in re.findall(r"(tests/(?:\w+/)*)?(test_\w+\.py)", text):
            named += 1
            assert name in files, f"{page}: {name}"
            assert not folder or (ROOT / folder / name).is_file(), f"{page}: {folder}{name}"
        for name in re.findall(r"`(test_\w+)`", text):
            named += 1
            assert f"def {name}" in everything, f"{page}: {name}"
        for name, chosen in re.findall(r"(test_\w+\.py)\s+-k \"?([\w ]+)", text):
            words = [word for word in chosen.split() if word not in ("or", "and", "not")]
            assert any(word in sources[name] for word in words), f"{page}: -k {chosen}"
    assert named > 80


def _headings(text: str) -> set[str]:
    """Anchors of a page's headings, as MkDocs and as GitHub make them."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    out = set()
    for heading in re.findall(r"^#+ (.*)$", plain, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).strip()
        out |= {re.sub(r"[\s-]+", "-", words), re.sub(r"\s", "-", words)}
    return out


def _dead(page: Path, text: str) -> list[str]:
    """Links of a page to files or headings that are not there; what is on the web is not looked at."""
    plain, dead = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), []
    for link in re.findall(r"\]\(([^)\s]+)\)", plain):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if re.match(r"https?:|mailto:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _headings(target.read_text())):
            dead.append(link)
    return dead


def test_links_lead_somewhere() -> None:
    """Of all pages, and of the navigation, which names each page once; every picture stands on some page."""
    others = (*ROOT.glob("*.md"), *ROOT.glob("lab/*.md"), *ROOT.glob("examples/**/*.md"))
    pages = {path: path.read_text() for path in (*PAGES.values(), *others)}
    assert not {str(path): found for path, text in pages.items() if (found := _dead(path, text))}
    navigation = re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))
    everything = "\n".join(pages.values())
    assert not [p.name for p in (ROOT / "docs" / "images").iterdir() if p.name not in everything]
    # The control: a file, a heading and a heading of the same page that are not there.
    wrong = "[a](nowhere.md) [b](glossary.md#nothing) [c](#nothing) [d](glossary.md#glossary) [e](https://example.org)"
    assert _dead(ROOT / "docs" / "index.md", wrong) == ["nowhere.md", "glossary.md#nothing", "#nothing"]


def test_deployment_types_what_poc_types() -> None:
    """Line by line, the hub and the first site. That the job is poc's is in `test_poc.py`."""
    text = PAGES["docs/deployment.md"].read_text()
    lines = [line for block in _blocks(text, "console") for line in block.splitlines()]
    steps = [step for part in plan({s: f"{s}.csv" for s in NAMES[:3]}) for step in part.steps]
    typed = list(dict.fromkeys(str(step) for step in steps if step[0] in (HUB, "north")))  # the job is offered twice
    assert lines[0] == "north$ export " + " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    for who in (HUB, "north"):
        assert [line for line in lines[1:] if line.startswith(who)] == [line for line in typed if line.startswith(who)]
    assert len(lines) == len(typed) + 1
    own = [step for step in steps if step[0] == "north"]
    given = [w for s in steps if isinstance(s, Handed) and "north" in s.takers for w in s.files.split()]
    signatures = sum(w.endswith("*.sig") for w in given) * (1 + len(NAMES[:3]))  # of the hub and each site
    counts = [sum(isinstance(step, kind) for step in own) for kind in (Typed, Handed)]
    counts += [sum("*" not in w for w in given) + signatures, signatures]
    assert counts[0] + 1 <= 9
    assert counts[1] <= 2
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    said = "types {} commands besides .* hands over {} files, .* is handed {}: .*, {} signatures"
    assert re.search(said.format(*(words[count] for count in counts)), " ".join(text.split())), counts


def test_no_page_promises_a_package_on_an_index() -> None:
    """`pip install secure-fvi` would fetch whatever another put there: there is no such release."""
    for name, page in PAGES.items():
        assert not re.search(r"pip install '?secure-fvi", page.read_text()), name


@pytest.mark.parametrize("page", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_page_runs_as_it_stands(page: str, tmp_path: Path) -> None:
    done = _run(page, tmp_path, 1800)
    for text, times in SAYS.get(page, {}).items():
        assert done.stdout.count(text) == times


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    """From a Pyro function to a deployed run under a budget, and evidence."""
    done = _run("docs/end-to-end.md", tmp_path, 900)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["rounds"], result["silos"]) == (400, ["east", "north", "south"])
    assert result["privacy"]["epsilon"] <= 3.0
    assert not (tmp_path / "second" / "result.json").exists()
    refusals = [(tmp_path / f"{site}.second.log").read_text() for site in ("north", "south", "east")]
    assert any("the budget of data set 'data' is epsilon 3" in text for text in refusals)
    assert done.stdout.count("' agree on ") == 3
    assert (tmp_path / "audit" / "audit.html").is_file()


def test_from_files_of_columns_to_a_posterior_in_eight_commands() -> None:
    """What a party types, repeated for each, on the page that the next test runs to its end."""
    first = PAGES["docs/vertical-deployment.md"].read_text().partition("\n## ")[0]
    typed = {
        " ".join(itertools.takewhile(str.isalpha, words)) for words in _commands("\n".join(_blocks(first, "sh")), False)
    }
    roster = {f"keys roster {what}" for what in ("make", "show", "sign", "verify")}
    assert typed == {"keys init", *roster, "policy allow", "silo start", "server start"}
    assert len(typed) <= 8


@pytest.mark.slow
def test_columns_from_files_to_posteriors_reports_and_budgets(tmp_path: Path) -> None:
    """Five processes a job: outcome at the server, outcome at a silo, outcome under privacy."""
    done = _run("docs/vertical-deployment.md", tmp_path, 1800)
    for name in ("run", "run-at-silo"):
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert result["converged"], result["convergence"]
        assert result["silos"] == ["bank", "clinic", "school"]
        assert 300 < result["metrics"]["records"] < 400
        assert (tmp_path / name / "report.html").is_file()
    private = json.loads((tmp_path / "run-private" / "result.json").read_text())
    assert private["privacy"]["epsilon"] <= 1.0
    assert private["privacy"]["protects"] == "a person's columns at one silo, and the response"
    spent = re.findall(r"spent +epsilon (\S+) of", done.stdout)
    assert len(spent) == 4
    assert all(0.9 < float(epsilon) <= 1.0 for epsilon in spent)
    assert done.stdout.count("EXACT TOTALS: 2 jobs") == 3  # at the silos; the server's response left without them
    for silo in ("bank", "clinic", "school"):
        assert len(list((tmp_path / silo / "results").glob("*.safetensors"))) == 3
