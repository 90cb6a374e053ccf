"""Is every refusal held by a test? Each is removed, one at a time, and the tests that reach it must fail.

    python tests/mutants.py [--only aggregation] [--workers 2] [--fresh]

A refusal is, in the files below: a `raise`; a call of which nothing is used but that it may raise (`_require(...)`,
`self._check_size(...)`); a `return False`, and each condition of an `and` that a function returning bool (or a lambda)
returns; an `if` whose body writes down somebody's fault. Each is wrapped, by AST and on import, in a switch that a
mutant turns off; so all mutants are in one process that has the packages imported and the tests collected, and a fork
that turns one switch runs a few tests and is gone. Which tests reach which refusal is recorded first, by the same
switches; a process that a test starts by itself has none, so what only such a test reaches counts as not caught.

Results are kept in .mutants/ and used again while module and tests are the same. The exit status is 1 where fewer than
95% of a part's refusals are caught, or where one that is not caught stands without a reason in mutants_accepted.toml.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".mutants"
ACCEPTED = Path(__file__).with_name("mutants_accepted.toml")
LEAST_CAUGHT = 0.95

_OF_A_SILO = (
    "silo",
    "column_silo",
    "disclosure",
    "messages",
    "wire",
    "algorithms/base",
    "algorithms/kit",
    "algorithms/refining",
)
#: By name: the files, and the tests that are to hold their refusals. `silo` is what a silo answers by, whoever asks.
PARTS = {
    "aggregation": (["aggregation/*.py"], ["tests/aggregation", "tests/test_parties.py", "tests/test_wire.py"]),
    "privacy": (
        ["privacy/*.py"],
        [
            "tests/privacy",
            "tests/test_disclosure.py",
            "tests/cli/test_budget_ledger.py",
            "tests/cli/test_budget_plan.py",
        ],
    ),
    "deployment": (
        ["secure_fvi/deployment/*.py"],
        ["tests/deployment", "tests/test_exported.py", "tests/cli/test_bad_input.py"],
    ),
    "silo": (
        [f"secure_fvi/{name}.py" for name in _OF_A_SILO],
        [
            "tests/test_parties.py",
            "tests/test_wire.py",
            "tests/test_disclosure.py",
            "tests/test_exported.py",
            "tests/test_local_posterior.py",
            "tests/test_mistakes.py",
            "tests/test_predicting.py",
            "tests/test_questions.py",
            "tests/test_every_algorithm.py",
            "tests/privacy",
            "tests/deployment/test_columns.py",
            "tests/deployment/test_deployed_sum.py",
            "tests/deployment/test_every_engine.py",
            "tests/deployment/test_refusals_at_sites.py",
            "tests/deployment/test_unfit_data.py",
            "tests/contracts",
            "tests/vertical",
            "tests/wire",
            "tests/algorithms",
        ],
    ),
}
_REFUSING = re.compile(r"_*(require|refuse|check|verify|forbid|must|expect|ensure|reject)(_|$)")
_FAULT = re.compile(r"_*fault$")
#: Tests of one mutant: no more than so many, and than so many recorded seconds.
MOST_TESTS, MOST_SECONDS = 120, 60.0


class Refusal(NamedTuple):
    """One mutant. Its name holds while the text and the function around it stay the same."""

    file: str
    line: int
    inside: str
    kind: str
    text: str
    copy: int  # the same text again in the same function

    @property
    def name(self) -> str:
        return f"{self.file}|{self.inside}|{self.kind}|{self.text}|{self.copy}"


class Switches:
    """Which refusals have been reached, and which one is off."""

    def __init__(self) -> None:
        self.all: list[Refusal] = []
        self.reached: set[int] = set()
        self.off = -1

    def __call__(self, at: int) -> bool:
        self.reached.add(at)
        return at == self.off


class _Wrap(ast.NodeTransformer):
    """Puts each refusal of a module behind its switch."""

    def __init__(self, file: str, switches: Switches) -> None:
        self.file, self.switches = file, switches
        self.names: list[str] = []
        self.says_bool = [False]
        self.seen: Counter[tuple[str, str, str]] = Counter()

    def _switch(self, node: ast.AST, kind: str) -> ast.Call:
        text = " ".join(ast.unparse(node).split())
        where = (".".join(self.names), kind, text)
        self.switches.all.append(Refusal(self.file, node.lineno, where[0], kind, text, self.seen[where]))  # type: ignore[attr-defined]
        self.seen[where] += 1
        at = ast.Constant(len(self.switches.all) - 1)
        return ast.Call(ast.Name("__refusal__", ast.Load()), [at], [])

    def _unless(self, node: ast.stmt, kind: str) -> ast.stmt:
        return ast.If(self._switch(node, kind), [ast.Pass()], [node])

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.names.append(node.name)
        self.says_bool.append(isinstance(node.returns, ast.Name) and node.returns.id == "bool")
        node.body = [self.visit(statement) for statement in node.body]
        self.names.pop(), self.says_bool.pop()
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        # Neither an abstract method nor an assertion refuses anybody, nor does what hands on an error on its way.
        dumped = "" if node.exc is None else ast.dump(node.exc)
        if not dumped or not self.names or "NotImplementedError" in dumped or "AssertionError" in dumped:
            return node
        return self._unless(node, "raise")

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call) and self.names:
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if _REFUSING.match(name):
                return self._unless(node, "call")
        self.generic_visit(node)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if self.says_bool[-1] and isinstance(node.value, ast.Constant) and node.value.value is False:
            node.value = self._switch(node, "return")
        elif self.says_bool[-1] and node.value is not None:
            node.value = self._conditions(node.value)
        else:
            self.generic_visit(node)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.body = self._conditions(node.body)
        return node

    def _conditions(self, value: ast.expr) -> ast.expr:
        if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And):
            value.values = [ast.BoolOp(ast.Or(), [self._switch(v, "condition"), v]) for v in value.values]
            return value
        return self.visit(value)

    def visit_If(self, node: ast.If) -> ast.AST:
        calls = [s.value for s in node.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
        if any(_FAULT.match(getattr(call.func, "attr", "")) for call in calls):
            shown = ast.copy_location(ast.If(node.test, [ast.Pass()], []), node)
            off = ast.UnaryOp(ast.Not(), self._switch(shown, "fault"))
            node.test = ast.BoolOp(ast.And(), [node.test, off])
        node.body = [self.visit(statement) for statement in node.body]
        node.orelse = [self.visit(statement) for statement in node.orelse]
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with its refusals behind switches; the file itself is as it was for whoever reads it."""

    switches: Switches

    def get_code(self, fullname: str) -> Any:
        path = Path(self.path)
        tree = ast.parse(path.read_bytes(), self.path)
        file = str(path.resolve().relative_to(ROOT))
        return compile(ast.fix_missing_locations(_Wrap(file, self.switches).visit(tree)), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: Collection[str]) -> None:
        self.modules = modules

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def _digest(paths: Sequence[Path]) -> str:
    state = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(paths):
        state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()[:24]


class _Run:
    """What one fork does: run tests, note how they end. Speaks to its parent through one file."""

    def __init__(self, config: Any, switches: Switches, scratch: Path) -> None:
        self.config, self.switches, self.scratch = config, switches, scratch
        self.failed = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed = self.failed or report.failed

    def tests(self, items: Sequence[Any], stop: bool) -> Iterator[tuple[str, bool, float, list[int]]]:
        """(name, failed, seconds, refusals reached) of each; after a failure no more where `stop`."""
        self.config.pluginmanager.register(self)
        self.config._tmp_path_factory._basetemp = self.scratch
        tempfile.tempdir = str(self.scratch)
        os.environ["TMPDIR"] = str(self.scratch)
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.failed, began = False, time.monotonic()
            self.switches.reached.clear()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item.nodeid, self.failed, time.monotonic() - began, sorted(self.switches.reached)
            if stop and self.failed:
                return


class Farm:
    """The pytest plugin that takes the place of the loop over tests."""

    def __init__(self, sources: Sequence[Path], switches: Switches, workers: int, fresh: bool) -> None:
        self.sources, self.switches, self.workers, self.fresh = sources, switches, workers, fresh
        self.results: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        self.config, self.items = session.config, {item.nodeid: item for item in session.items}
        files = {item.nodeid.partition("::")[0] for item in session.items}
        helpers = [p for p in (ROOT / "tests").rglob("*.py") if not p.name.startswith("test_") and p != Path(__file__)]
        self.of_tests = {f: _digest([ROOT / f, *helpers]) for f in files}
        self.of_module = {str(p.relative_to(ROOT)): _digest([p]) for p in self.sources}
        self.all_tests = hashlib.sha256("".join(sorted(self.of_tests.values())).encode()).hexdigest()
        KEPT.mkdir(exist_ok=True)
        reach = self._reach(_digest(self.sources))
        self._judge(reach)
        return True

    # What reaches what

    def _reach(self, sources: str) -> dict[str, Any]:
        """By test: whether it failed, its seconds, the names of the refusals that it reached."""
        kept = _load(KEPT / "reach.json") if not self.fresh else {}
        stale = {f for f, d in self.of_tests.items() if kept.get(f, {}).get("of") != sources + d}
        jobs = []
        for file in sorted(stale):
            items = [item for name, item in self.items.items() if name.partition("::")[0] == file]
            jobs.append((file, lambda run, items=items: list(run.tests(items, stop=False)), 1800.0))
        for file, rows in self._fork_each(jobs):
            found = {
                name: [failed, seconds, [self.switches.all[at].name for at in reached]]
                for name, failed, seconds, reached in rows or ()
            }
            kept[file] = {"of": sources + self.of_tests[file], "tests": found}
            seconds = sum(row[1] for row in found.values())
            failed = [name for name, row in found.items() if row[0]]
            _say(
                f"recorded {file}: {len(found)} tests, {seconds:.1f} s"
                + (f"; FAIL unchanged: {failed}" if failed else "")
            )
            _dump(KEPT / "reach.json", kept)
        return {name: row for file in self.of_tests for name, row in kept[file]["tests"].items() if name in self.items}

    # Each mutant

    def _judge(self, reach: dict[str, Any]) -> None:
        kept = _load(KEPT / "results.json") if not self.fresh else {}
        by_refusal: dict[str, list[str]] = {}
        for name, (failed, _, reached) in reach.items():
            if not failed:
                for refusal in reached:
                    by_refusal.setdefault(refusal, []).append(name)
        jobs = []
        for at, refusal in enumerate(self.switches.all):
            old = kept.get(refusal.name)
            if old is not None and self._holds(refusal, old):
                continue
            tests = self._in_order(refusal, by_refusal.get(refusal.name, []), reach)
            kept[refusal.name] = {
                "module": self.of_module[refusal.file],
                "tests": self.all_tests,
                "by": "",
                "reached": len(tests),
            }
            if tests:
                limit = 10.0 + 5 * sum(reach[t][1] for t in tests)
                jobs.append((refusal.name, lambda run, at=at, tests=tests: self._one(run, at, tests), limit))
        for done, (name, killer) in enumerate(self._fork_each(jobs), 1):
            kept[name]["by"] = "the time limit" if killer is None else killer
            kept[name]["killer"] = self.of_tests.get(str(killer).partition("::")[0], "")
            if done % 25 == 0 or done == len(jobs):
                _say(f"{done} of {len(jobs)} mutants")
                _dump(KEPT / "results.json", kept)
        _dump(KEPT / "results.json", kept)
        self.results = kept

    def _holds(self, refusal: Refusal, old: dict[str, Any]) -> bool:
        """Whether an old result still stands: caught by a test that is the same, or not caught by the same tests."""
        if old["module"] != self.of_module[refusal.file]:
            return False
        killer = self.of_tests.get(str(old["by"]).partition("::")[0])
        return killer == old.get("killer") if killer else old["tests"] == self.all_tests

    def _in_order(self, refusal: Refusal, tests: list[str], reach: dict[str, Any]) -> list[str]:
        """Quick ones first; where many reach a check, those before them in which it has refused something: a raise of
        the function that is called, a fault that the condition's function finds, or else one of the same module; and
        before others of each kind those whose file is called after the module, or imports from it."""
        called = re.match(r"(?:[\w.]*\.)?(\w+)\(", refusal.text) if refusal.kind == "call" else None
        stem = Path(refusal.file).stem
        imports = re.compile(rf"\b(from|import) [\w.]*\b{stem}\b|^from [\w.]+ import .*\b{stem}\b", re.M)
        files = {name.partition("::")[0] for name in tests}
        near = {f for f in files if stem.partition("_")[0] in Path(f).stem or imports.search((ROOT / f).read_text())}

        def kind(name: str) -> int:
            if refusal.kind not in ("call", "condition"):
                return 0
            refused = [r.split("|")[:2] for r in reach[name][2] if "|raise|" in r or "|fault|" in r]
            if called and any(inside.rpartition(".")[2] == called[1] for _, inside in refused):
                return 0
            if not called and any(f"{refusal.inside}(" in r for r in reach[name][2] if "|fault|" in r):
                return 0
            return 1 if any(file == refusal.file for file, _ in refused) else 2

        def key(name: str) -> tuple[int, bool, float]:
            return kind(name), name.partition("::")[0] not in near, reach[name][1]

        chosen, seconds = [], 0.0
        for name in sorted(tests, key=key)[:MOST_TESTS]:
            seconds += reach[name][1]
            if chosen and seconds > MOST_SECONDS:
                break
            chosen.append(name)
        return chosen

    def _one(self, run: _Run, at: int, tests: Sequence[str]) -> str:
        self.switches.off = at
        for name, failed, _, _ in run.tests([self.items[t] for t in tests], stop=True):
            if failed:
                return name
        return ""

    # Forks

    def _fork_each(self, jobs: Sequence[tuple[str, Callable[[_Run], Any], float]]) -> Iterator[tuple[str, Any]]:
        """Run jobs in forks, `workers` at a time; (name, result) as they end, None past a job's limit in seconds."""
        waiting, running = list(jobs)[::-1], {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                name, work, limit = waiting.pop()
                scratch = Path(tempfile.mkdtemp(prefix="mutant-"))
                pid = os.fork()
                if pid == 0:
                    self._child(work, scratch)
                running[pid] = (name, scratch, time.monotonic() + limit)
            time.sleep(0.005)
            for pid, (name, scratch, deadline) in list(running.items()):
                ended = os.waitpid(pid, os.WNOHANG)[0] == pid
                if not ended and time.monotonic() < deadline:
                    continue
                with contextlib.suppress(ProcessLookupError):  # and whatever the tests left running
                    os.killpg(pid, signal.SIGKILL)
                if not ended:
                    os.waitpid(pid, 0)
                del running[pid]
                answer = scratch / "mutant-answer.json"
                yield name, json.loads(answer.read_text()) if answer.exists() else None
                shutil.rmtree(scratch, ignore_errors=True)

    def _child(self, work: Callable[[_Run], Any], scratch: Path) -> None:
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            answer = work(_Run(self.config, self.switches, scratch))
            (scratch / "partial").write_text(json.dumps(answer))
            (scratch / "partial").rename(scratch / "mutant-answer.json")
        finally:
            os._exit(0)


def _files(part: str) -> list[Path]:
    return sorted(path for pattern in PARTS[part][0] for path in ROOT.glob(pattern))


def _module(path: Path) -> str:
    names = list(path.relative_to(ROOT).with_suffix("").parts)
    names = names if names[0] == "secure_fvi" else ["secure_fvi", *names]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").rename(path)


def _say(line: str) -> None:
    os.write(2, (line + "\n").encode())


def _report(switches: Switches, results: dict[str, dict[str, Any]]) -> int:
    """Print survivors and shares caught; the exit status."""
    accepted = (
        {
            (row["file"], row["inside"], row["text"]): row["reason"]
            for row in tomllib.loads(ACCEPTED.read_text())["survivor"]
        }
        if ACCEPTED.exists()
        else {}
    )
    status, used = 0, set()
    for part in PARTS:
        files = {str(path.relative_to(ROOT)) for path in _files(part)}
        mine = [r for r in switches.all if r.file in files]
        if not mine:
            continue
        left = [r for r in mine if not results[r.name]["by"]]
        for refusal in left:
            key = (refusal.file, refusal.inside, refusal.text)
            used.add(key)
            why = accepted.get(key)
            tests = results[refusal.name]["reached"]
            note = f"accepted: {why}" if why else f"NOT CAUGHT ({tests} tests reach it)"
            _say(f"{refusal.file}:{refusal.line} {refusal.inside} [{refusal.kind}] {refusal.text[:160]}\n    {note}")
            status |= why is None
        share = 1 - len(left) / len(mine)
        _say(f"{part}: {len(mine) - len(left)} of {len(mine)} refusals caught ({share:.1%})")
        status |= share < LEAST_CAUGHT
    files = {r.file for r in switches.all}
    for key in accepted:
        if key[0] in files and key not in used:
            _say(f"mutants_accepted.toml names what is caught, or is not there: {key}")
    return int(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(PARTS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="use no kept result")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "lab")]
    chosen = [part for part in PARTS if not options.only or part in options.only]
    modules = {_module(path): path for part in chosen for path in _files(part) if path.stem != "__main__"}
    switches = Switches()
    builtins.__refusal__ = switches  # type: ignore[attr-defined]
    _Loader.switches = switches
    sys.meta_path.insert(0, _Finder(modules))
    from hypothesis import settings

    # The same examples every time, and no example that a mutant failed kept for the real tests.
    settings.register_profile("mutants", database=None, derandomize=True)
    settings.load_profile("mutants")
    for module in modules:  # all of it, whatever the tests import
        __import__(module)
    farm = Farm(list(modules.values()), switches, options.workers, options.fresh)
    paths = [path for part in chosen for path in PARTS[part][1]]
    quiet = ["-p", "no:terminal", "-p", "no:cov", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts="]
    pytest.main([*quiet, "-m", "(not slow or later) and not gpu", *paths], plugins=[farm])
    return _report(switches, farm.results)


if __name__ == "__main__":
    sys.exit(main())
