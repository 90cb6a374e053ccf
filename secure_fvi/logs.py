"""What the processes of a job write to standard error: lines to read, or one JSON object a line to collect."""

from __future__ import annotations

import datetime
import json
import logging
from typing import Any

import click

log_option = click.option(
    "--log", "log_format", type=click.Choice(["text", "json"]), default="text", show_default=True,
    help="Form of the log on standard error.",
)  # fmt: skip


class JsonLines(logging.Formatter):
    """One object a line. `event` is the message before names and numbers are put in: the same for all of a kind."""

    def __init__(self, **always: str) -> None:
        """`always`: fields of every line, such as the site's id."""
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        written = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": written.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._always,
            "logger": record.name,
            "event": str(record.msg),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Lines(logging.Formatter):
    """A line to read. What others sent may stand in it: it moves no cursor and begins no line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return "".join(c if c.isprintable() else "?" for c in super().formatMessage(record))


def start_log(quiet: bool, form: str, **always: str) -> None:
    """Log this package's messages in the `form` that `log_option` takes; errors only where `quiet`."""
    # A handler of its own: libraries that are imported later set up the root logger to their taste.
    handler = logging.StreamHandler()
    text = Lines("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines(**always) if form == "json" else text)
    logger = logging.getLogger("secure_fvi")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.ERROR if quiet else logging.INFO)
