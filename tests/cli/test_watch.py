"""`secure-fvi watch`: what the page is told, and who is turned away."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from secure_fvi.cli import main
from secure_fvi.errors import InputError
from secure_fvi.runs import watching
from secure_fvi.runs.watching import Watch, snapshot

CONFIG = """
seed = 1
[model]
program = "six-cities"
[partition]
count = 3
[algorithm]
name = "sfvi"
iterations = 120
[run]
compile = false
[privacy]
unit = "record"
epsilon = 4.0
delta = 1e-5
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watch")
    (folder / "run.toml").write_text(CONFIG)
    # Few rounds do not converge, which is no matter here; the suite makes that warning an error.
    with warnings.catch_warnings(action="ignore"), pytest.raises(SystemExit) as stopped:
        main(["run", str(folder / "run.toml"), "--out", str(folder / "out"), "--quiet"])
    assert stopped.value.code == 0
    return folder / "out"


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
    assert (state["state"], state["algorithm"], state["round"], state["cohort"]) == ("finished", "sfvi", 120, 3)
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
    shutil.rmtree(tmp_path / "begun" / "ledger.sqlite.keys")
    (tmp_path / "begun" / "ledger.sqlite").write_bytes(b"no ledger")
    assert "error" in snapshot(tmp_path / "begun")["budgets"][0]


def test_bad_input(tmp_path: Path, server: Watch, run: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        Watch(tmp_path)
    with pytest.raises(InputError, match="--port"):
        Watch(run, server.server_port)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_writes_what_it_is_told(run: Path) -> None:
    """In node with a made document: the script's own logic; its looks need a browser."""
    made = """
    const made = {}; const el = (id) => made[id] = made[id] || {textContent: "", hidden: true, attributes: {},
      setAttribute(k, v) { this.attributes[k] = v; },
      tBodies: [{rows: [], replaceChildren(...r) { this.rows = r; }}]};
    global.document = {body: {dataset: {token: "t"}}, getElementById: el, createElement: () => ({cells: [],
      appendChild(c) { this.cells.push(c); return c; }})};
    global.setTimeout = () => {};
    global.fetch = async () => ({json: async () => (STATE)});
    """.replace("STATE", json.dumps({**snapshot(run), "objective": [[50 * k, -9.0 + k] for k in range(8)]}))
    script = Path(watching.__file__).with_name("watch.js").read_text()
    show = """
    ;setImmediate(() => console.log(JSON.stringify({round: made.round.textContent, range: made.range.textContent,
      curve: made.curve.attributes.points.split(" ").length, rows: made.budgets.tBodies[0].rows.length,
      problem: made.problem.textContent})));
    """
    found = subprocess.run(["node", "-e", made + script + show], capture_output=True, text=True, timeout=20)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert told == {"round": 120, "range": told["range"], "curve": 6, "rows": 3, "problem": ""}
    assert "now -2.0" in told["range"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_it(run: Path, tmp_path: Path) -> None:
    """In headless Chromium, under the page's own security policy. A private run tells no objective: one is put in."""
    shutil.copytree(run, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) | {"objective": -9.0 + k} for k, line in enumerate(metrics.read_text().splitlines())]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(link: str) -> str:
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        # Six seconds of the page's own time: three of its questions.
        command = ["chromium", *options, "--virtual-time-budget=6000", "--dump-dom", link]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    with Watch(tmp_path / "run") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page, other = load(server.link), load(server.link + "x")
        server.shutdown()
    for name, value in (("state", "finished"), ("algorithm", "sfvi"), ("round", "120"), ("cohort", "3")):
        assert f'id="{name}">{value}</dd>' in page
    (points,) = re.findall(r'id="curve" points="([^"]*)"', page)
    assert len(points.split()) == len(rows) == 3
    (table,) = re.findall(r"<tbody>(.*?)</tbody>", page, re.DOTALL)
    assert table.count("<tr>") == 3
    assert table.count("<td>4.000</td>") == 3
    assert "the link has no token" in other
    assert "sfvi" not in other
