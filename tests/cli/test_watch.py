"""`secure-fvi watch`: what the page is told, and who is turned away. How it looks: `tests/test_in_a_browser.py`."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import ran

from secure_fvi.errors import InputError
from secure_fvi.runs.watching import Watch, snapshot

CONFIG = """
seed = 1
[model]
program = "six-cities"
[partition]
count = 3
[algorithm]
name = "sfvi"
iterations = 18
[run]
compile = false
[privacy]
unit = "record"
epsilon = 4.0
delta = 1e-5
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("watch"), CONFIG)


@pytest.fixture
def server(run: Path) -> Iterator[Watch]:
    with Watch(run) as watch:
        threading.Thread(target=watch.serve_forever, daemon=True).start()
        yield watch
        watch.shutdown()


def get(server: Watch, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def token(server: Watch) -> str:
    return server.link.split("token=")[1]


def test_the_state_of_a_run(run: Path) -> None:
    state = snapshot(run)
    assert (state["state"], state["algorithm"], state["round"], state["cohort"]) == ("finished", "sfvi", 18, 3)
    assert (state["name"], state["rounds"]) == ("out: six-cities", 18)
    assert state["job"] == json.loads((run / "run.json").read_text())["job"]
    assert (state["standing"], state["r_hat"]) == ("not assessed", None)
    assert len(state["budgets"]) == 3
    for budget in state["budgets"]:
        assert budget["epsilon"] == pytest.approx(4.0)
        assert 0 <= budget["remaining"] < 4.0
    assert json.loads(json.dumps(state, allow_nan=False)) == state


def test_the_page_its_script_and_its_state(server: Watch, run: Path) -> None:
    status, page, headers = get(server, f"/?token={token(server)}")
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert f"/watch.js?token={token(server)}".encode() in page
    assert b"http://" not in page  # nothing from elsewhere
    assert get(server, f"/watch.js?token={token(server)}")[0] == 200
    status, body, _ = get(server, f"/state?token={token(server)}")
    assert status == 200
    assert json.loads(body) == snapshot(run)


def test_who_is_turned_away(server: Watch, capfd: pytest.CaptureFixture[str]) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/", "/state", "/watch.js", "/?token=", "/state?token=" + "x" * 32, "/?token=%F0%9F%94%91"):
        assert get(server, path)[0] == 403
    # A name of elsewhere that resolves to this machine, as in DNS rebinding.
    assert get(server, f"/state?token={token(server)}", host="evil.example")[0] == 403
    assert get(server, f"/../ledger.sqlite?token={token(server)}")[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        assert get(server, f"/state?token={token(server)}", method)[0] == 501
    out = capfd.readouterr()
    assert token(server) not in out.out + out.err


def test_a_run_without_privacy_that_has_only_begun(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "begun")
    for name in ("result.json", "metrics.jsonl"):
        (tmp_path / "begun" / name).unlink()
    state = snapshot(tmp_path / "begun")
    assert (state["state"], state["round"], state["objective"]) == ("begun", 0, [])
    assert (state["standing"], state["reason"]) == ("not finished yet", "")
    shutil.rmtree(tmp_path / "begun" / "ledger.sqlite.keys")
    (tmp_path / "begun" / "ledger.sqlite").write_bytes(b"no ledger")
    assert "error" in snapshot(tmp_path / "begun")["budgets"][0]


def test_bad_input(tmp_path: Path, server: Watch, run: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        Watch(tmp_path)
    with pytest.raises(InputError, match="--port"):
        Watch(run, server.server_port)
