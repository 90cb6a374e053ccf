"""Which source files a Python module runs, found by reading its imports and never by importing it.

Files of installed distributions count by name and version; all other files, and all of secure_fvi, by their bytes.
Imports under `if TYPE_CHECKING:` are left out, those inside functions are not. Code that imports by a name which is
worked out at run time cannot be followed, and is refused outside of secure_fvi.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import NamedTuple

from secure_fvi.deployment.names import read_bytes
from secure_fvi.errors import InputError

_OURS = "secure_fvi"
_CALLS = {"__import__", "eval", "exec", "import_module", "exec_module", "run_path", "run_module"}
_MOST_BYTES = 1 << 24


class Closure(NamedTuple):
    """sources: content of each file by module name, without a path, so that sites agree. packages: version by name."""

    sources: dict[str, bytes]
    packages: dict[str, str]


def closure(root: str, path: Path | None = None) -> Closure:
    """All that the module `root` runs; path: its file, where it is none that Python finds by name.

    Raises InputError, which names the file, for source that cannot be read or followed.
    """
    found = Closure({}, {})
    waiting: list[tuple[str, Path]] = []
    if path is not None:
        waiting.append((root, path))
    else:
        _locate(root, found, waiting)
        if not waiting:
            raise InputError(f"there is no module '{root}' whose source could be read")
    while waiting:
        name, file = waiting.pop()
        if name in found.sources:
            continue
        found.sources[name] = content = read_bytes(file, "the source", _MOST_BYTES)
        if file.suffix == ".py":
            is_package = file.name == "__init__.py"
            for wanted in _imports(content, name, is_package, file):
                _locate(wanted, found, waiting)
    return found


def _imports(content: bytes, module: str, is_package: bool, file: Path) -> Iterator[str]:
    """Dotted names that a source file imports; "a.b" may be a module or a name in module "a"."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"'{file}' is no Python source: {error}") from None
    package = module if is_package else module.rpartition(".")[0]
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).strip(".")
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and not module.startswith(_OURS):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in _CALLS:
                raise InputError(
                    f"'{file}', line {node.lineno}: calls {called}, so that what it runs cannot be hashed; "
                    "import by name instead"
                )


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield other
                yield from _walk(other)
            continue
        yield node
        yield from _walk(node)


def _locate(name: str, found: Closure, waiting: list[tuple[str, Path]]) -> None:
    """Add the module `name` and the packages that it lies in to `waiting`, or its distribution to `found`."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names:
        return
    spec = _top(parts[0])
    if spec is None:
        found.packages[f"missing:{parts[0]}"] = ""  # an import that is allowed to fail; a site that has it differs
        return
    if parts[0] != _OURS and _installed(spec):
        for distribution in _distributions().get(parts[0], [parts[0]]):
            found.packages[distribution] = public_version(distribution)
        return
    module = ""
    for part in parts:
        module = f"{module}.{part}" if module else part
        if module != parts[0]:
            places = spec.submodule_search_locations if spec is not None else None
            spec = PathFinder.find_spec(module, list(places)) if places is not None else None
        if spec is None:
            return  # a name in the module before
        if spec.origin is not None and spec.has_location:
            waiting.append((module, Path(spec.origin)))


def _top(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)  # of a name without dots: imports nothing
    except (ImportError, ValueError):
        return None


def _installed(spec: ModuleSpec) -> bool:
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else [])]
    homes = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    return any(Path(place).resolve().is_relative_to(home) for place in places for home in homes)


@cache
def _distributions() -> dict[str, list[str]]:
    return {name: sorted(set(found)) for name, found in packages_distributions().items()}


def public_version(distribution: str) -> str:
    """A distribution's version without its build: CPU and CUDA builds of one version count as the same."""
    return version(distribution).partition("+")[0]
