"""One run from its configuration to the last file in its folder."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from secure_fvi.checkpoints import latest_round
from secure_fvi.deployment.model_hash import package_digest
from secure_fvi.draws import draws_that_fit
from secure_fvi.driving import Books, Progress
from secure_fvi.errors import BudgetError, InputError
from secure_fvi.files import write_atomically
from secure_fvi.results import RunSummary
from secure_fvi.runs.config import Config
from secure_fvi.runs.directory import REPORT, RunDirectory
from secure_fvi.runs.federation import FederationBase, federate
from secure_fvi.runs.marginals import marginals
from secure_fvi.runs.report import MetricsLog, write_report

#: Of a posterior for its marginals: so many, fewer of one so large that they would not fit into memory.
_MARGINAL_DRAWS, _LEAST_DRAWS = 20_000, 1000


def execute(
    config: Config,
    folder: RunDirectory,
    data_dir: Path | None = None,
    resume: bool = False,
    on_round: Callable[[Progress], None] | None = None,
) -> RunSummary | None:
    """Fit what `config` says and write everything to `folder`; None when the run there was finished before.

    With `resume` the run in the folder is continued, or begun where there is none yet. Raises InputError before
    anything is written, and leaves the folder as it was when the model or its data turn out to be unusable.
    """
    return execute_federation(federate(config, data_dir), folder, resume, on_round)


def execute_federation(
    federation: FederationBase,
    folder: RunDirectory,
    resume: bool = False,
    on_round: Callable[[Progress], None] | None = None,
) -> RunSummary | None:
    """The same for what `federate` made of a configuration."""
    digest = federation.digest()
    known = resume and folder.state != "empty"
    if known:
        folder.check_same(federation.config, digest)
        if folder.state == "finished":
            if not (folder.path / REPORT).exists():  # the process ended after the result
                write_report(folder.path)
            federation.seal(folder)
            return None
    else:
        folder.check_new()
    installed = {"package": package_digest().hex()}
    folder.begin(federation.config, digest, {**federation.provenance(), **installed})
    try:
        result = _fit(federation, folder, resume, on_round)
        federation.seal(folder)
    except (InputError, BudgetError):
        if not known and latest_round(folder.checkpoints) is None:
            folder.discard()
        raise
    finally:
        folder.release()
    return result


def _fit(
    federation: FederationBase, folder: RunDirectory, resume: bool, on_round: Callable[[Progress], None] | None
) -> RunSummary:
    log = MetricsLog(folder.path / "metrics.jsonl", resumed_from=latest_round(folder.checkpoints) or 0)
    last: Progress | None = None

    def note(progress: Progress) -> None:
        nonlocal last
        last = progress
        log.add(progress)
        if on_round is not None:
            on_round(progress)

    settings = federation.config.run
    try:
        result = federation.fit(
            seed=federation.config.seed,
            device=settings.device,
            dtype=federation.dtype,
            compile=settings.compile,
            threads=federation.threads,
            checkpoint_dir=folder.checkpoints,
            checkpoint_seconds=settings.checkpoint_seconds,
            resume=resume,
            on_round=note,
            books=_books(federation.config, folder),
        )
    finally:
        log.close(last)
    if federation.privacy is not None:
        _keep_ledger(_books(federation.config, folder), folder)
    found = json.dumps(marginals(result.named(result.sample(_marginal_draws(result)))))
    write_atomically(folder.path / "marginals.json", found.encode())
    result.save(folder.path)
    write_report(folder.path)
    return result


def _marginal_draws(result: RunSummary) -> int:
    size = sum(site.mean.numel() for site in result.posterior.values())
    return draws_that_fit(_MARGINAL_DRAWS, _LEAST_DRAWS, size)


def _books(config: Config, folder: RunDirectory) -> Books:
    """The site's ledger, or one in the folder of the run."""
    if config.privacy is None:
        return Books()
    path = Path(config.privacy.ledger) if config.privacy.ledger is not None else folder.ledger
    return Books(path, config.privacy.data_set, folder.read_run()["job"])


def _keep_ledger(books: Books, folder: RunDirectory) -> None:
    """A copy of the site's ledger as it stood when the run ended, so that the folder explains itself."""
    if books.path is None or books.path == folder.ledger:
        return
    with closing(sqlite3.connect(books.path)) as source, closing(sqlite3.connect(folder.ledger)) as copy:
        source.backup(copy)
