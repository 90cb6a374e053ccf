"""The size and order of the house in numbers: `make house`.

lines and files   of Python as it stands; core: all that `secure-fvi` installs, lab: what lab/ does
closure           what a silo's job imports, with SFVI for its algorithm and masked sums, at any depth: at the top of
                  a module or in a function, not for types alone;
                  "trusted": without what a party of the server's, a report or a plot has in that;
                  a vertical job, whose silos hold different columns: the same, with masked sums
circles           strongly connected parts of the graph of imports, of two modules or more
parameters        of functions; self, cls not counted
seconds           median of processes that were started for it
"""

from __future__ import annotations

import ast
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
#: What reads a job's offer and runs its part at one silo, and what the job names (`secure_fvi.runs.config`): its
#: algorithm and its sums; its model is a function in Python, which has no maker here, and its data are arrays, which no
#: reader of tables reads. What runs in the fence (`secure_fvi.deployment.fenced`) is a process of its own. What is
#: loaded when it is used (`secure_fvi.later`) is not in it: `tests/test_exported.py` holds silos to using none of that.
SILO_JOB = ("secure_fvi.deployment.site_job", "secure_fvi.algorithms.sfvi", "secure_fvi.aggregation.masked")
#: The same of a job whose silos hold different columns.
COLUMNS_JOB = ("secure_fvi.deployment.columns_job", "secure_fvi.aggregation.masked")
_NOT_TRUSTED = re.compile(r"(^|[._])(server|report|plots)([._]|$)")
_MOST_PARAMETERS = 9
_STARTED = 7

Edges = dict[str, frozenset[str]]


def modules() -> dict[str, Path]:
    """File by module name; of the tracked links, files under the link's name."""
    found = {}
    for base in (ROOT, ROOT / "lab"):
        for package in ("secure_fvi", "secure_fvi_lab"):
            for folder in _folders(base / package):
                for file in folder.glob("*.py"):
                    name = ".".join(file.relative_to(base).with_suffix("").parts)
                    found[name.removesuffix(".__init__")] = file
    return found


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield folder
        for inner in sorted(folder.iterdir()):
            yield from _folders(inner)


def imports(files: dict[str, Path]) -> Edges:
    """By module: what it imports itself."""
    packages = sorted({name.partition(".")[0] for name in files})
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=True, cache_dir=None)
    return {name: frozenset(graph.find_modules_directly_imported_by(name)) for name in files}


def closure(start: tuple[str, ...], edges: Edges, without: re.Pattern[str] | None = None) -> set[str]:
    """`start`, all that these come to import, and the packages in which these lie, which Python runs before them; what
    matches `without` is not entered."""
    found, left = set[str](), list(start)
    while left:
        name = left.pop()
        if name and name not in found and not (without and without.search(name)):
            found.add(name)
            left += [*edges[name], name.rpartition(".")[0]]
    return found


def circles(edges: Edges) -> list[list[str]]:
    """Groups of modules of which each comes to import every other."""

    def after(start: str) -> set[str]:
        found, left = set[str](), list(edges[start])
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                left += edges[name]
        return found

    comes_to = {name: after(name) for name in edges}
    found = {tuple(sorted(other for other in comes_to[name] if name in comes_to[other])) for name in edges}
    return sorted((list(group) for group in found if len(group) > 1), key=len, reverse=True)


def many_parameters(files: dict[str, Path]) -> list[tuple[str, int]]:
    """(module.function, how many) of those with more than nine."""
    found = []
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                named = [
                    *node.args.posonlyargs,
                    *node.args.args,
                    *node.args.kwonlyargs,
                    node.args.vararg,
                    node.args.kwarg,
                ]
                count = sum(a is not None and a.arg not in ("self", "cls") for a in named)
                if count > _MOST_PARAMETERS:
                    found.append((f"{name}.{node.name}", count))
    return sorted(found, key=lambda row: -row[1])


def seconds(code: str) -> str:
    """On the clock, which what else the machine does makes longer, and of its processor."""
    wall, used = [], []
    for _ in range(_STARTED):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - began)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return f"{statistics.median(wall):7.3f} s, {statistics.median(used):.3f} s of the processor"


def main() -> None:
    files = modules()
    lines = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    edges = imports(files)

    def say(what: str, names: set[str] | list[str]) -> None:
        print(f"{what:52} {sum(lines[n] for n in names):7,} lines {len(names):4} files")

    core = [n for n in files if n.partition(".")[0] == "secure_fvi"]
    say("package: core and lab", list(files))
    say("core", core)
    for folder in ("aggregation", "privacy", "models", "audits", "engines", "deployment"):
        say(f"  of which {folder}", [n for n in core if n.startswith(f"secure_fvi.{folder}")])
    others = ("secure_fvi.models", "secure_fvi.audits")
    say("  without models and audits", [n for n in core if not n.startswith(others)])
    say("lab", [n for n in files if n not in core])
    say("import closure of a silo's job", closure(SILO_JOB, edges))
    say("  trusted: without server, reports, plots", closure(SILO_JOB, edges, _NOT_TRUSTED))
    say("import closure of a silo's vertical job", closure(COLUMNS_JOB, edges))
    found = circles(edges)
    print(f"{'import circles':52} {len(found):7}")
    for group in found:
        print(f"  {len(group):3}: {', '.join(n.removeprefix('secure_fvi.') for n in group)}")
    many = many_parameters(files)
    inside = [row for row in many if row[0].startswith("secure_fvi.")]
    print(f"{'functions with more than 9 parameters':52} {len(many):7}, {len(inside)} of them in the core")
    for name, count in many:
        print(f"  {count:3}: {name}")
    help_ = seconds("from secure_fvi.cli import main; main(['--help'])")
    print(f"{'`secure-fvi --help`':52} {help_}")
    print(f"{'`import secure_fvi`':52} {seconds('import secure_fvi')}")
    print(f"{'`import secure_fvi as sf; sf.fit`':52} {seconds('import secure_fvi as sf; sf.fit')}")
    print(f"{'  `import torch` alone':52} {seconds('import torch')}")
    print(f"{'  Python alone':52} {seconds('pass')}")


if __name__ == "__main__":
    main()
