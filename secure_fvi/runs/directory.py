"""The folder of one run: who may write to it, what it already holds, and how it begins and ends.

config.toml is written first and atomically, so a folder either holds a run that can be continued or nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hmac
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from secure_fvi import __version__
from secure_fvi.errors import InputError
from secure_fvi.files import write_atomically
from secure_fvi.runs import wording
from secure_fvi.runs.config import Config, parse

State = Literal["empty", "begun", "finished"]

#: What may change when a run is continued.
_FREE = ("run.checkpoint_seconds", "engine.")

#: In the folder of a private run, what its data's digest is keyed with: a plain one would tell whoever knows all
#: records but one whether a guess at that one is right. Not for others, as little as `silos` is.
_KEY = "data.key"
#: The report; what the server of a run between institutions states of it, and signs. See `deployment.evidence`.
REPORT, EVIDENCE, SIGNATURE = "report.html", "evidence.json", "report.sig"
#: The report's table for other programs.
TABLE = "table.csv"
#: Names that only a run writes; `discard` removes these and nothing else.
_OURS = (
    "config.toml",
    "run.json",
    _KEY,
    "metrics.jsonl",
    "result.json",
    "posterior.safetensors",
    "silos",
    "marginals.json",
    "compare.json",
    REPORT,
    TABLE,
    EVIDENCE,
    SIGNATURE,
    "checkpoint",
    "ledger.sqlite",
    "ledger.sqlite-wal",
    "ledger.sqlite-shm",
    "ledger.sqlite.keys",
)


class RunDirectory:
    """The folder `path`. Nothing is written before `begin`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._existed = os.path.lexists(path)
        self._handle: int | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def state(self) -> State:
        if (self.path / "result.json").exists():
            return "finished"
        return "begun" if (self.path / "config.toml").exists() else "empty"

    def check_new(self) -> None:
        """Raises InputError unless a new run may begin here: the folder can be made or is empty."""
        self.check_writable()
        if self.state == "finished":
            raise InputError(f"--out '{self.path}' holds a finished run; give another folder")
        if self.state == "begun":
            raise InputError(f"--out '{self.path}' holds an unfinished run; add --resume, or give another folder")
        if self._foreign():
            raise InputError(f"--out '{self.path}' holds other files; give a new or empty folder")

    def check_writable(self) -> None:
        """Raises InputError for what is no folder, or can be none."""
        check_folder(self.path, "--out")

    def check_same(self, config: Config, digest: str) -> None:
        """Raises InputError unless the run in this folder has this configuration and these data."""
        before, now = _flat(self.read_config().model_dump()), _flat(config.model_dump())
        for key in sorted(before.keys() | now.keys()):
            old, new = before.get(key), now.get(key)
            if old != new:
                raise InputError(
                    f"--out '{self.path}' holds a run with {key} = {old!r}, not {new!r}; "
                    "resume with the same configuration, or give another folder"
                )
        self.check_data(digest)

    def check_data(self, digest: str) -> None:
        """Raises InputError when the data are not those the run began with: between sites, what stands for them."""
        before = self.read_run()
        if self._says(digest).items() <= before.items():
            return
        if "roster" in before:  # a server has no records: its digest is over the model's hash, and its own file's rows
            raise InputError(
                f"the model, the installed secure_fvi or the server's own file is not that with which the run in "
                f"'{self.path}' began: go on with that one, or give another folder"
            )
        raise InputError(f"the data are not those that the run in '{self.path}' began with")

    def begin(self, config: Config, digest: str, provenance: Mapping[str, str]) -> None:
        """Take the folder and write down what runs in it, since when, by which version. `provenance`: what else the
        report is to say of where the run comes from. Raises InputError when another process has the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()
        if self.state == "empty":
            began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            if config.privacy is not None:
                write_atomically(self.path / _KEY, secrets.token_bytes(32), private=True)
            run = {**self._says(digest), "job": secrets.token_hex(16), "began": began, "version": __version__}
            write_atomically(self.path / "run.json", json.dumps({**run, **provenance}, indent=2).encode())
            write_atomically(self.path / "config.toml", config.to_toml().encode())

    def _says(self, digest: str) -> dict[str, str]:
        """What run.json says of data with this digest."""
        key = self.path / _KEY
        if not key.exists():
            return {"data_sha256": digest}
        return {"data_hmac_sha256": hmac.new(key.read_bytes(), digest.encode(), "sha256").hexdigest()}

    def discard(self) -> None:
        """Undo `begin` of a new run that turned out impossible: the folder is as it was before."""
        for name in _OURS:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if not self._existed and not any(self.path.iterdir()):
            self.path.rmdir()

    def read_config(self) -> Config:
        """The configuration of the run in this folder. Raises InputError when there is none."""
        path = self.path / "config.toml"
        try:
            return parse(wording.loads(path.read_text(encoding="utf-8")), str(path))
        except FileNotFoundError:
            raise InputError(f"'{self.path}' holds no run (no config.toml)") from None
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
            raise InputError(f"{path}: damaged: {error}") from error

    def read_run(self) -> dict[str, Any]:
        return read_json(self.path / "run.json")

    def read_result(self) -> dict[str, Any]:
        """result.json. Raises InputError when the run has not finished."""
        if self.state != "finished":
            self.read_config()
            raise InputError(f"the run in '{self.path}' has not finished; continue it with --resume")
        return read_json(self.path / "result.json")

    def _foreign(self) -> list[str]:
        """Files that are not a run's; what a crash before config.toml left behind does not count."""
        if not self.path.is_dir():
            return []
        return [p.name for p in self.path.iterdir() if not p.name.endswith(".tmp") and p.name != "run.json"]

    def _lock(self) -> None:
        # A lock on the folder itself leaves no file behind, and the system drops it when the process dies.
        self._handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"another process is writing to '{self.path}'") from None

    def release(self) -> None:
        """Let other processes have the folder."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises InputError when the file is missing or damaged."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no file '{path}'") from None
    except ValueError as error:
        raise InputError(f"{path}: damaged: {error}") from error
    return content


def _flat(table: Any, key: str = "") -> dict[str, Any]:
    """Leaves by dotted key, without those that do not change the result."""
    if isinstance(table, dict):
        inner = [_flat(value, f"{key}.{name}" if key else name) for name, value in table.items()]
        return {k: v for part in inner for k, v in part.items() if not k.startswith(_FREE) and v is not None}
    return {key: list(table) if isinstance(table, tuple) else table}


def check_folder(folder: Path, option: str) -> None:
    """Raise InputError, which names the `option` it was given by, where a folder is none, or cannot be made or written
    to. Nothing stays behind of the trial."""
    if folder.is_file():
        raise InputError(f"{option} '{folder}' is a file; give a folder")
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except FileExistsError:
        raise InputError(f"{option} '{folder}' is no folder; give one") from None
    except OSError as error:
        raise InputError(f"cannot write to {option} '{folder}': {error.strerror}; give another folder") from None
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # it was not made, or another process has put something there
                path.rmdir()
