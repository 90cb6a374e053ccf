"""The hash by which a site accepts a model: over source, imports, roles, bounds and versions of what it builds on.

A job names a model by this hash and never ships code. The site works the hash out of its own files, before it imports
them, and refuses the job where it differs from the one that its policy lists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from secure_fvi.deployment.imports import closure, public_version
from secure_fvi.errors import InputError
from secure_fvi.runs.config import Config

_LABEL = b"secure-fvi/model/1/"
#: Versions that count whether or not the source names them.
LOCKED = ("numpy", "pyro-ppl", "secure-fvi", "torch")
_LIKELIHOODS = "secure_fvi.algorithms.vertical.likelihoods"


class ModelManifest:
    """What the hash is over. sources: SHA-256 in hex by module; versions: by distribution; settings: roles, bounds."""

    def __init__(self, sources: Mapping[str, bytes], versions: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        self.sources = {name: hashlib.sha256(sources[name]).hexdigest() for name in sorted(sources)}
        self.versions = {name: versions[name] for name in sorted(versions)}
        self.settings = dict(settings)

    def __repr__(self) -> str:
        return f"ModelManifest({self.hash.hex()[:16]}, {len(self.sources)} sources)"

    @cached_property
    def hash(self) -> bytes:
        """32 bytes."""
        said = [self.sources, self.versions, self.settings]
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
        return lines


def manifest(config: Config, installed: str | None = None) -> ModelManifest:
    """The manifest of the model in `config`, from the files on this machine.

    installed: "path/to/file.py:name", the site's own copy of a `function`, which counts instead of the path that the
    job gives. Raises InputError for a model that is not here.
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
    return ModelManifest(found.sources, versions, settings)


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
