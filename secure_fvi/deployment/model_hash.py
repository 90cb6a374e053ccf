"""The hash by which a site accepts a model: over source, imports, roles, bounds, versions, and this very package.

A job names a model by this hash and never ships code. The site works the hash out of its own files, before it imports
them, and refuses the job where it differs from the one that its policy lists.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import secure_fvi
from secure_fvi.deployment.imports import Closure, closure, public_version
from secure_fvi.errors import InputError
from secure_fvi.runs.config import Config

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
    else:
        found = closure(_LIKELIHOODS)
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


def _module_of(program: str) -> str:
    from secure_fvi.models.base import MODULES
    from secure_fvi.models.vertical_base import PROGRAMS

    if program in MODULES:
        return MODULES[program]
    if program in PROGRAMS:
        return PROGRAMS[program].partition(":")[0]
    raise InputError(f"model.program: no program is called '{program}' here")


def _settings(config: Config) -> dict[str, Any]:
    """Roles of sites, and the bounds that what leaves is held to, defaults written out."""
    from secure_fvi.runs.options import ALGORITHMS, PRIVACIES, build, named, resolved

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
            if name == "clipping_norm" or name == "bound" or name.endswith("_bound"):
                settings[f"{table}.{name}"] = float(value)
    return settings
