"""The log of a site's process, as people read it and as machines collect it."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from secure_fvi.aggregation.roster import Identity
from secure_fvi.cli import cli
from secure_fvi.cli.serving import start_log
from secure_fvi.deployment.trail import TrailChain
from secure_fvi.privacy.chain_file import Book
from secure_fvi.privacy.ledger import Chain


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("secure_fvi")
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def test_json_is_one_object_a_line_whatever_the_message_holds(capsys: pytest.CaptureFixture[str]) -> None:
    start_log(False, "json", site="north", role="silo")
    log = logging.getLogger("secure_fvi.deployment.site")
    log.info("job '%s' of '%s' accepted", "seven", 'h"u\nb')
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("a message could not be answered")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["event"] == "job '%s' of '%s' accepted"
    assert first["message"] == "job 'seven' of 'h\"u\nb' accepted"
    assert (first["site"], first["role"], first["level"]) == ("north", "silo", "info")
    assert first["time"].endswith("+00:00")
    assert "ValueError: two" in second["traceback"]


def test_what_others_sent_begins_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The control is a plain formatter's line."""
    start_log(False, "text")
    log, sent = logging.getLogger("secure_fvi.engines"), "phase 'x\n2027-01-01 00:00:00,000 INFO all is well\x1b[2K'"
    log.warning("a message was refused: %s", sent)
    assert len(capsys.readouterr().err.splitlines()) == 1
    logging.getLogger("secure_fvi").handlers[0].setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("secure_fvi").warning("a message was refused: %s", sent)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_quiet_leaves_errors(capsys: pytest.CaptureFixture[str]) -> None:
    start_log(True, "text")
    log = logging.getLogger("secure_fvi.engines")
    log.warning("not shown")
    log.error("shown")
    assert capsys.readouterr().err.strip().endswith("ERROR shown")


@pytest.mark.parametrize(("chain", "verify"), [(Chain, ["budget", "verify"]), (TrailChain, ["audit-log", "verify"])])
def test_another_members_file_moves_no_cursor(tmp_path: Path, chain: Any, verify: list[str]) -> None:
    """Whose it is says the file itself. The control is that name as it is, which clears the screen."""
    name, own = "a\x1b[2J\x1b[1;1Hverified\nfake line", Identity()
    Book.opened(tmp_path / "f.sqlite", chain(name), lambda begun: own, "", create=True, clock=time.time).close()
    said = CliRunner().invoke(cli, [*verify, str(tmp_path / "f.sqlite")], color=True).output
    assert "a?[2J?[1;1Hverified?fake line" in said
    assert "\x1b" not in said
    assert "\x1b" in name


@pytest.mark.parametrize("damage", ["time = 9223372036854775807", "time = 'noon'", "kind = x'00'", "hash = 'none'"])
def test_a_damaged_row_is_shown_as_it_is(tmp_path: Path, damage: str) -> None:
    """`show` checks nothing: it ended with a fault of its own at such a row. `verify` names it."""
    path, own = tmp_path / "f.sqlite", Identity()
    Book.opened(path, TrailChain("a"), lambda begun: own, "", create=True, clock=time.time).close()
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(f"UPDATE rows SET {damage}")
    for more in ([], ["--json"]):
        shown = CliRunner().invoke(cli, ["audit-log", "show", str(path), *more])
        assert (shown.exit_code, len(shown.output.splitlines())) == (0, 1)
    assert "row 1: its content is not what was hashed" in str(
        CliRunner().invoke(cli, ["audit-log", "verify", str(path)]).exception
    )


def test_what_others_sent_begins_no_line_of_a_stack_trace_either(capsys: pytest.CaptureFixture[str]) -> None:
    """The control is a plain formatter's."""
    forged = "2027-01-01 00:00:00,000 INFO all is well"
    log = logging.getLogger("secure_fvi.engines")

    def lines(plain: bool) -> list[str]:
        start_log(False, "text")
        if plain:
            logging.getLogger("secure_fvi").handlers[0].setFormatter(logging.Formatter("%(message)s"))
        try:
            raise KeyError from ValueError(f"x\n{forged}\x1b[2K")
        except KeyError:
            log.exception("a message could not be answered")
        return capsys.readouterr().err.splitlines()

    said = lines(plain=False)
    assert f"  {forged}?[2K" in said
    assert all(line.startswith("  ") and line.isprintable() for line in said[1:])
    assert any(line.startswith(forged) and not line.isprintable() for line in lines(plain=True))
