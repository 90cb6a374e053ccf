"""A run's TOML file, where a run is started: sites are sent what it says, and read no such file."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secure_fvi.errors import InputError
from secure_fvi.runs import wording
from secure_fvi.runs.config import Config, parse


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` with `overrides` ("a.b=c") applied; paths in it become absolute.

    Raises InputError with the file, the dotted key, the value and what would be right.
    """
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise InputError(f"no configuration file '{path}'") from None
    except IsADirectoryError:
        raise InputError(f"'{path}' is a folder; give a configuration file") from None
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from error
    table, folder = wording.read_toml(content, str(path)), path.resolve().parent
    privacy = table.get("privacy")
    if isinstance(privacy, dict) and isinstance(ledger := privacy.get("ledger"), str) and ledger:
        privacy["ledger"] = _beside(path, folder, ledger)  # one that is typed lies where it is typed
    for text in overrides:
        override(table, text)
    config = parse(table, str(path))
    return _absolute(config, folder)


def _beside(path: Path, folder: Path, ledger: str) -> str:
    """Where a ledger lies that a configuration names. Raises InputError for one where earlier versions had it, the
    folder in which the command is typed: of the budget it has what was spent."""
    found = folder / ledger
    if not found.exists() and (before := Path(ledger)).exists():
        raise InputError(
            f"{path}: privacy.ledger: it lies beside the configuration, where there is none; '{before.absolute()}', "
            f"which an earlier version took, has what was spent: move it to '{found}', with the keys beside it"
        )
    return str(found)


def override(table: dict[str, Any], text: str) -> None:
    """Set one dotted key of `table` from "a.b=c"; c is a TOML value, or a string where it is none."""
    key, separator, value = text.partition("=")
    steps = [step.strip() for step in key.split(".")]
    if not separator or not all(steps):
        raise InputError(f"--set '{text}': must look like table.key=value")
    for depth, step in enumerate(steps[:-1]):
        table = table.setdefault(step, {})
        if not isinstance(table, dict):
            raise InputError(f"--set '{text}': '{'.'.join(steps[: depth + 1])}' is no table")
    table[steps[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    try:
        parsed = wording.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _absolute(config: Config, folder: Path) -> Config:
    """Files named in a configuration are relative to its own folder, so that it can be run from anywhere."""
    silos = tuple(
        s.model_copy(
            update={
                "data": str(folder / s.data),
                "predictor": s.predictor and str(folder / s.predictor),
                "dictionary": s.dictionary and str(folder / s.dictionary),
                "tables": {name: str(folder / path) for name, path in s.tables.items()},
            }
        )
        for s in config.silo
    )
    response = config.response
    if response is not None and response.data is not None:
        response = response.model_copy(update={"data": str(folder / response.data)})
    model = config.model
    if model.function is not None:
        model = model.model_copy(update={"function": str(folder / model.function)})
    if isinstance(model.dictionary, str):
        model = model.model_copy(update={"dictionary": str(folder / model.dictionary)})
    privacy = config.privacy
    if privacy is not None and privacy.ledger is not None:
        privacy = privacy.model_copy(update={"ledger": str(Path(privacy.ledger).absolute())})
    return config.model_copy(update={"silo": silos, "model": model, "response": response, "privacy": privacy})
