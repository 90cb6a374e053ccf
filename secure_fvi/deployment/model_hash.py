"""The hash by which a site accepts a model: over source, imports, roles, bounds, versions, and this very package.

A job names a model by this hash and never ships code. The site works the hash out of its own files, before it imports
them, and refuses the job where it differs from the one that its policy lists.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache, cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, NamedTuple

import secure_fvi
from secure_fvi.errors import InputError
from secure_fvi.files import read_bytes
from secure_fvi.runs.config import Config
from secure_fvi.runs.records import formula_said

_LABEL = b"secure-fvi/model/2/"
_PACKAGE_LABEL = b"secure-fvi/package/1/"
#: What Python runs of a package, and the tables that programs read.
_COUNTED = frozenset((".py", ".pyc", ".so", ".pyd", ".csv"))
#: Versions that count whether or not the source names them.
LOCKED = ("numpy", "pyro-ppl", "secure-fvi", "torch")
_LIKELIHOODS = "secure_fvi.algorithms.vertical.likelihoods"


class ModelManifest:
    """What the hash is over. sources: SHA-256 in hex by module; versions: by distribution; settings: roles, bounds.
    package: the digest of secure_fvi as it is installed (`package_digest`): a gate without noise is another gate."""

    def __init__(
        self, sources: Mapping[str, bytes], versions: Mapping[str, str], settings: Mapping[str, Any], package: bytes
    ) -> None:
        self.sources = {name: hashlib.sha256(sources[name]).hexdigest() for name in sorted(sources)}
        self.versions = {name: versions[name] for name in sorted(versions)}
        self.settings, self.package = dict(settings), package

    def __repr__(self) -> str:
        return f"ModelManifest({self.hash.hex()[:16]}, {len(self.sources)} sources)"

    @cached_property
    def hash(self) -> bytes:
        """32 bytes."""
        said = [self.sources, self.versions, self.settings, self.package.hex()]
        return hashlib.sha256(_LABEL + json.dumps(said, sort_keys=True, allow_nan=False).encode()).digest()

    def differences(self, other: ModelManifest) -> list[str]:
        """What differs, in lines for people: modules, versions, settings."""
        lines = []
        for what, a, b in (
            ("source of", self.sources, other.sources),
            ("version of", self.versions, other.versions),
            ("setting", self.settings, other.settings),
        ):
            lines += [f"{what} {name}" for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
        return lines + (["the installed secure_fvi"] if self.package != other.package else [])


class ReadModel(NamedTuple):
    """A model as its files were read: what its hash is over, and the bytes that were hashed."""

    manifest: ModelManifest
    closure: Closure


def manifest(config: Config, installed: str | None = None, package: bytes | None = None) -> ModelManifest:
    """The manifest of the model in `config`: see `read_model`."""
    return read_model(config, installed, package).manifest


def read_model(config: Config, installed: str | None = None, package: bytes | None = None) -> ReadModel:
    """The model in `config`, from the files on this machine. Nothing of it is run.

    installed: "path/to/file.py:name", the site's own copy of a `function`, which counts instead of the path that the
    job gives. package: of which secure_fvi the hash is to be; of the one that is installed here unless given.
    Raises InputError for a model that is not here.
    """
    model, settings = config.model, _settings(config)
    if model.program is not None:
        found = closure(_module_of(model.program))
        settings["program"] = model.program
    elif model.function is not None:
        path, _, name = (installed or model.function).rpartition(":")
        if not Path(path).is_file():
            raise InputError(f"model.function: no file '{path}'")
        found = closure("<model>", Path(path))
        settings["function"] = name
    elif model.formula is not None:
        found = _shipped("secure_fvi.mixed_model")
        settings |= formula_said(model)
    else:
        found = _shipped(_LIKELIHOODS)
        settings["likelihood"], settings["options"] = model.likelihood, dict(model.options)
    versions = {**found.packages, **{name: public_version(name) for name in LOCKED}}
    versions["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    said = ModelManifest(found.sources, versions, settings, package_digest() if package is None else package)
    return ReadModel(said, found)


@cache
def package_digest(folder: Path | None = None) -> bytes:
    """SHA-256, 32 bytes, over the names and contents of secure_fvi's files: code, and tables that programs read.

    Of the files as they are when this is first asked; the same for a wheel and for a checkout, at any place. Files of
    `__pycache__` are left out.
    """
    root = Path(secure_fvi.__file__).parent if folder is None else folder
    found = {}
    for place, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            path = Path(place, name)
            if path.suffix in _COUNTED:
                found[path.relative_to(root).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha256(_PACKAGE_LABEL + json.dumps(found, sort_keys=True).encode()).digest()


@cache
def _shipped(module: str) -> Closure:
    """Of what makes models of formulas and of likelihoods, none of which is a job's: read once, as `package_digest`
    is."""
    return closure(module)


def _module_of(program: str) -> str:
    from secure_fvi.models.base import MODULES, VERTICAL

    if program in MODULES:
        return MODULES[program]
    if program in VERTICAL:
        return VERTICAL[program].partition(":")[0]
    raise InputError(f"model.program: no program is called '{program}' here")


def _settings(config: Config) -> dict[str, Any]:
    """Roles of sites, and the bounds that what leaves is held to, defaults written out."""
    from secure_fvi.runs.config import ALGORITHMS, PRIVACIES, build, named, resolved

    settings: dict[str, Any] = {}
    if config.model.record_plate is not None:
        settings["record_plate"] = config.model.record_plate
    if config.model.silo_sites is not None:
        settings["silo_sites"] = list(config.model.silo_sites)
    settings |= {f"start.{name}": value for name, value in config.model.start.items()}
    cls = named(ALGORITHMS, "algorithm.name", config.algorithm.name)
    tables = {"algorithm": resolved(build(cls, config.algorithm.options, "algorithm"))}
    if config.privacy is not None:
        unit = named(PRIVACIES, "privacy.unit", config.privacy.unit)
        tables["privacy"] = resolved(build(unit, config.privacy.options, "privacy"))
    for table, options in tables.items():
        for name, value in options.items():
            if value is not None and (name == "bound" or name.endswith(("_bound", "_norm"))):
                settings[f"{table}.{name}"] = value if isinstance(value, str) else float(value)
    return settings


# ---- Which source files a Python module runs, found by reading its imports and never by importing it ----
#
# Files of installed distributions count by name and version; all other files, and all of secure_fvi, by their bytes.
# Imports under `if TYPE_CHECKING:` are left out, those inside functions are not. Code that imports by a name which is
# worked out at run time cannot be followed: the usual forms are refused outside of secure_fvi, so that an honest author
# learns of it early. That list is no protection, since Python has more forms than any list. The fence is one
# (`secure_fvi.deployment.fence`): there only the files that are found here can be read at all.

_OURS = "secure_fvi"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Modules that run code, or load it, from what is not an import by name.
_LOADERS = _words(
    """
    _ctypes _imp _pickle _posixsubprocess builtins cffi cloudpickle code codeop concurrent ctypes dill imp
    importlib joblib marshal multiprocessing pickle pkgutil pty runpy shelve site subprocess zipimport
    """
)
#: Names and attributes that do, whatever they are attributes of.
_NAMES = _words(
    """
    __builtins__ __import__ __loader__ __spec__ __globals__ __subclasses__ __code__ compile eval exec
    exec_module import_module load_module run_module run_path FunctionType CodeType find_spec load_library
    load_inline system popen execv execve execvp execl execlp spawnv spawnl spawnvp posix_spawn fork forkpty
    """
)
#: Those that are also harmless methods: `module.eval()`, `re.compile()`.
_METHODS = frozenset(("eval", "compile", "system", "find_spec"))
#: Attributes of modules, by module.
_OF_MODULES = {
    "sys": _words("path modules meta_path path_hooks path_importer_cache addaudithook"),
    "torch": _words("load hub jit classes package"),
    "os": frozenset(("system",)),
}
_MOST_BYTES = 1 << 24


class Closure(NamedTuple):
    """sources: content of each file by module name, without a path, so that sites agree. packages: version by name.
    places: where below a folder of `sys.path` each file stands."""

    sources: dict[str, bytes]
    packages: dict[str, str]
    places: dict[str, str]


def closure(root: str, path: Path | None = None) -> Closure:
    """All that the module `root` runs; path: its file, where it is none that Python finds by name.

    Raises InputError, which names the file, for source that cannot be read or followed.
    """
    found = Closure({}, {}, {})
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
        found.places[name] = _place(name, file)
        if file.suffix == ".py":
            is_package = file.name == "__init__.py"
            for wanted in _imports(content, name, is_package, file):
                _locate(wanted, found, waiting)
    return found


@lru_cache(maxsize=512)
def _imports(content: bytes, module: str, is_package: bool, file: Path) -> tuple[str, ...]:
    """Dotted names that a source file imports; "a.b" may be a module or a name in module "a". Each content is gone
    through once a process."""
    return tuple(_imported(content, module, is_package, file))


def _imported(content: bytes, module: str, is_package: bool, file: Path) -> Iterator[str]:
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
        if not module.startswith(_OURS) and (what := _loads(node)):
            raise InputError(
                f"'{file}', line {getattr(node, 'lineno', 0)}: {what}, so that what it runs cannot be hashed; "
                "import by name instead"
            )


def _loads(node: ast.AST) -> str:
    """What of `node` may run code that no import names; empty for nothing that is known to."""
    if isinstance(node, ast.Import):
        return _first("imports", [n.name for n in node.names if n.name.partition(".")[0] in _LOADERS])
    if isinstance(node, ast.ImportFrom):
        base = (node.module or "") if node.level == 0 else ""
        inner = _NAMES | _OF_MODULES.get(base.partition(".")[0], frozenset())
        if base.partition(".")[0] in _LOADERS:
            return f"imports {base}"
        return _first("imports", [n.name for n in node.names if n.name in inner or _flag(n.name, base)])
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in _NAMES and not (isinstance(node.func, ast.Attribute) and called in _METHODS):
            return f"calls {called}"
        worked_out = called in ("getattr", "vars", "globals", "locals") and not _plain(node)
        return f"calls {called} with a name that is worked out" if worked_out else ""
    if isinstance(node, ast.Attribute):
        of = node.value.id if isinstance(node.value, ast.Name) else ""
        inner = (_NAMES - _METHODS) | _OF_MODULES.get(of, frozenset())
        stored = not isinstance(node.ctx, ast.Load) and _flag(node.attr, "")
        return f"names {node.attr}" if node.attr in inner or stored else ""
    if isinstance(node, ast.Name):
        stored = not isinstance(node.ctx, ast.Load) and _flag(node.id, "")
        return f"names {node.id}" if node.id in _NAMES or stored else ""
    return ""


def _first(verb: str, names: list[str]) -> str:
    return f"{verb} {names[0]}" if names else ""


def _flag(name: str, module: str) -> bool:
    """Whether this would say of `TYPE_CHECKING`, by which imports are left out, that it is something else."""
    return name == "TYPE_CHECKING" and module != "typing"


def _plain(call: ast.Call) -> bool:
    """Whether it is `getattr(x, "name")` for a name that runs nothing."""
    if len(call.args) < 2 or not isinstance(call.args[1], ast.Constant):
        return False
    return call.args[1].value not in _NAMES


def _place(name: str, file: Path) -> str:
    at = name.replace(".", "/")
    return f"{at}/{file.name}" if file.name.startswith("__init__.") else at + file.name[len(name.rpartition(".")[2]) :]


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
    return any(Path(place).resolve().is_relative_to(home) for place in places for home in _homes())


@cache
def _homes() -> tuple[Path, ...]:
    return tuple({Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")})


@cache
def _distributions() -> dict[str, list[str]]:
    return {name: sorted(set(found)) for name, found in packages_distributions().items()}


@cache
def public_version(distribution: str) -> str:
    """A distribution's version without its build: CPU and CUDA builds of one version count as the same."""
    return version(distribution).partition("+")[0]
