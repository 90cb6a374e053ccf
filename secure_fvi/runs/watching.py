"""A run seen from a browser on the same machine: rounds, objective, R-hat, whether it converged, budgets.

The server answers GET alone, on a loopback address alone, and only with the token of the link; it writes nothing. What
it shows is what the run's folder holds, all of it derived from broadcasts, totals and ledgers.
"""

from __future__ import annotations

import json
import math
import secrets
import sqlite3
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from secure_fvi.algorithms.stopping import R_HAT_BELOW
from secure_fvi.errors import InputError, SecureFVIError
from secure_fvi.privacy.ledger import read_ledger
from secure_fvi.privacy.ledger_account import account
from secure_fvi.runs.config import title
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.marginals import reason, standing
from secure_fvi.runs.report import read_metrics

_PAGE, _SCRIPT = (Path(__file__).with_name(name) for name in ("watch.html", "watch.js"))
#: Points of the curve that are sent, at most.
_POINTS = 500
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def snapshot(folder: Path) -> dict[str, Any]:
    """The run as it stands: its name and job, state, algorithm, silos, rounds, objective and R-hat by round, cohort,
    budgets, and once it has ended whether it converged and why that is said. JSON types."""
    run = RunDirectory(folder)
    if run.state == "empty":
        raise InputError(f"'{folder}' holds no run")
    config, about = run.read_config(), run.read_run()
    rows = read_metrics(folder / "metrics.jsonl")
    last = rows[-1] if rows else {}
    thinned = rows[:: max(1, -(-len(rows) // _POINTS))] + rows[-1:]

    def curve(name: str) -> list[list[float]]:
        return [[row["round"], row[name]] for row in thinned if row[name] is not None and math.isfinite(row[name])]

    result = run.read_result() if run.state == "finished" else None
    r_hats = curve("r_hat")
    return {
        "name": f"{folder.resolve().name}: {title(config)}",
        "job": about["job"],
        "state": run.state,
        "standing": standing(result) if result else "not finished yet",
        "reason": reason(result) if result else "",
        "algorithm": config.algorithm.name,
        "aggregation": config.aggregation.kind,
        "round": last.get("round", 0),
        "rounds": last.get("rounds"),
        "seconds": last.get("seconds", 0.0),
        "phase": last.get("phase"),
        "cohort": last.get("cohort"),
        "objective": curve("objective"),
        "r_hats": r_hats,
        "r_hat": r_hats[-1][1] if r_hats else None,
        "r_hat_below": R_HAT_BELOW,
        "budgets": _budgets(folder, config),
        "no_budgets": _no_budgets(about, config),
    }


def _budgets(folder: Path, config: Any) -> list[dict[str, Any]]:
    """By silo: the budget's epsilon, and what is left of it. Nothing where the run has no privacy or no ledger yet."""
    if config.privacy is None:
        return []
    path = Path(config.privacy.ledger) if config.privacy.ledger else folder / "ledger.sqlite"
    if not path.exists():
        return []
    try:
        found = [account(chain, config.privacy.data_set) for chain in read_ledger(path).values()]
        return [
            {"silo": a.silo, "epsilon": a.budget.epsilon, "remaining": a.remaining}
            for a in found
            if a.budget is not None
        ]
    except (SecureFVIError, sqlite3.Error) as error:
        return [{"silo": "ledger", "error": str(error)}]


def _no_budgets(about: dict[str, Any], config: Any) -> str:
    """What stands in place of an empty table of budgets."""
    if config.privacy is None:
        return "This run has no differential privacy."
    if about.get("engine", "one process") != "one process":
        return "Each silo's budget is in the ledger at its own site."
    return "Nothing is charged yet."


class Watch(ThreadingHTTPServer):
    """Serves one folder on a loopback port. `link` is for the person in front of this machine."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        """`port` 0 takes a free one. Raises InputError where there is no run, or the port is taken."""
        snapshot(folder)
        self.folder = folder
        self._token = secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise InputError(f"--port {port}: {error.strerror}") from None

    @property
    def link(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self._token}"

    def admits(self, token: str, host: str | None) -> bool:
        """Whether a request has the token and means this machine: a foreign name that points here is refused."""
        named = host in (f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}")
        return secrets.compare_digest(token.encode(), self._token.encode()) and named


class _Handler(BaseHTTPRequestHandler):
    server: Watch
    server_version, sys_version = "secure-fvi", ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        token = parse_qs(parts.query).get("token", [""])[0]
        if not self.server.admits(token, self.headers.get("Host")):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"the link has no token, or another's\n")
        elif parts.path == "/":
            self._send(HTTPStatus.OK, "text/html", _PAGE.read_bytes().replace(b"TOKEN", token.encode()))
        elif parts.path == "/watch.js":
            self._send(HTTPStatus.OK, "text/javascript", _SCRIPT.read_bytes())
        elif parts.path == "/state":
            self._state()
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is nothing else here\n")

    def _state(self) -> None:
        try:
            body, status = snapshot(self.server.folder), HTTPStatus.OK
        except SecureFVIError as error:  # the folder was moved, say
            body, status = {"error": str(error)}, HTTPStatus.GONE
        self._send(status, "application/json", json.dumps(body, allow_nan=False).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line of the log would have the token in it."""
