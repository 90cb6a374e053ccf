"""Every claim of the README rests on tests of the first tier, which CI runs: tests/claims.toml says on which. And every
refusal of which tests/mutants_accepted.toml says why no test holds it is in the code."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[1]
CLAIMS = tomllib.loads((ROOT / "tests" / "claims.toml").read_text())["claim"]
_LATER = re.compile(r"\bmark\.(slow|gpu|skip|skipif|xfail)\b|\bmark\.later\b(?!\()")


def words(text: str) -> str:
    return " ".join(text.split())


def points(readme: str) -> list[str]:
    """Paragraphs of prose and points of lists, but for captions and for how to install, run and read on."""
    text = re.sub(r"^```.*?^```$", "", readme, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(
        r"^## (?:Two commands|Four doors|Where next)\n.*?(?=^## |\Z)", "", text, flags=re.DOTALL | re.MULTILINE
    )
    parts = re.split(r"\n\n|^- ", text, flags=re.MULTILINE)
    return [found for part in parts if (found := words(part)) and not found.startswith(("#", "![", "*Wheezing"))]


def unclaimed(readme: str, claims: list[str]) -> list[str]:
    """Points of the README in which no claim stands."""
    return [point for point in points(readme) if not any(words(claim) in point for claim in claims)]


def problem(test: str, source: str) -> str | None:
    """Why `test` is none that the first tier runs; `source`: of its file. Cases of it may be left for later."""
    tree, name = ast.parse(source), test.partition("::")[2]
    for node in tree.body:
        if isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets):
            if _LATER.search(ast.unparse(node.value)):
                return "its module is marked"
        elif isinstance(node, ast.FunctionDef) and node.name == name:
            decorators = [ast.unparse(d) for d in node.decorator_list]
            marked = any(_LATER.search(d) for d in decorators if "parametrize" not in d)
            return "it is marked" if marked else None
    return "there is none of that name"


def test_each_claim_stands_in_the_readme_and_each_point_has_one() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [c["says"] for c in CLAIMS if words(c["says"]) not in words(readme)]
    assert missing == []
    said = [c["says"] for c in CLAIMS]
    assert len(points(readme)) > 15
    (unshown,) = unclaimed(readme, said)  # no test can show that nobody looked
    assert unshown.startswith("Nobody outside this project has audited it.")
    assert len(unclaimed(readme, [s for s in said if "Vertical" not in s])) == 3


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c["says"][:40])
def test_the_tests_of_a_claim_are_of_the_first_tier(claim: dict[str, list[str]]) -> None:
    assert claim["tests"]
    for test in claim["tests"]:
        assert problem(test, (ROOT / test.partition("::")[0]).read_text()) is None, test


def test_cuda_is_untested_until_its_numbers_are_here() -> None:
    """`make gpu` writes them: README and the page say so exactly as long as they are not committed."""
    here = (ROOT / "benchmarks" / "gpu.json").exists()
    for page in (ROOT / "README.md", ROOT / "docs" / "gpu.md"):
        assert ("CUDA: untested" in page.read_text()) is not here


def test_what_leaves_the_first_tier_is_noticed() -> None:
    test, plain = "tests/x.py::test_it", "def test_it() -> None:\n    pass\n"
    assert problem(test, plain) is None
    assert problem(test, f"@pytest.mark.parametrize('a', [1, param(2, marks=pytest.mark.slow)])\n{plain}") is None
    assert problem(test, f"@pytest.mark.slow\n{plain}") == "it is marked"
    assert problem(test, f"@pytest.mark.later\n{plain}") == "it is marked"
    assert problem(test, f"@pytest.mark.later('1')\n{plain}") is None
    assert problem(test, f"@pytest.mark.skipif(True, reason='')\n{plain}") == "it is marked"
    assert problem(test, f"pytestmark = [pytest.mark.slow]\n{plain}") == "its module is marked"
    assert problem(test, plain.replace("it", "other")) == "there is none of that name"


def refusals() -> set[tuple[str, str, str]]:
    """File, function and text of every refusal that `make mutants` removes, from the sources alone."""
    switches = mutants.Switches()
    for path in (path for part in mutants.PARTS for path in mutants._files(part)):
        mutants._Wrap(str(path.relative_to(ROOT)), switches).visit(ast.parse(path.read_bytes()))
    return {(found.file, found.inside, found.text) for found in switches.all}


def test_each_refusal_that_no_test_holds_is_there() -> None:
    """One that has moved or was reworded would excuse nothing, and whoever reads the list would not know."""
    here = refusals()
    assert len(here) > 500
    listed = tomllib.loads(mutants.ACCEPTED.read_text())["survivor"]
    names = [(row["file"], row["inside"], row["text"]) for row in listed]
    assert [name for name in names if name not in here] == []
    assert len(set(names)) == len(names)
    assert all(len(row["reason"]) > 20 for row in listed)
    # The control: the same refusals in another function, and reworded.
    assert not {(file, f"{inside}_", text) for file, inside, text in names} & here
    assert not {(file, inside, text.replace("(", "('")) for file, inside, text in names if "(" in text} & here
