"""`secure-fvi keys`, `policy` and `audit-log`, as people type them: four sites from nothing to a roster in force."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from deployment_world import NOW, World

from secure_fvi.aggregation.roster import Identity
from secure_fvi.cli import main
from secure_fvi.deployment.countersigning import open_trail
from secure_fvi.deployment.keeping import succeed
from secure_fvi.deployment.trail import Exchange, JobEntry, Trail

SITES = ("east", "north", "south", "hub")


class Answer(NamedTuple):
    code: int
    out: str
    err: str


class Shell:
    """Runs commands in a folder, with a passphrase set. The first argument may hold several words."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Answer:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([*str(arguments[0]).split(), *(str(a) for a in arguments[1:])])
        seen = self._capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        assert "PRIVATE KEY" not in seen.out + seen.err
        assert "open sesame" not in seen.out + seen.err
        return Answer(stopped.value.code, seen.out, seen.err)

    def done(self, *arguments: object) -> str:
        answer = self(*arguments)
        assert answer.code == 0, answer
        return answer.out

    def refused(self, code: int, says: str, *arguments: object) -> None:
        answer = self(*arguments)
        assert answer.code == code, answer
        assert says in answer.err, answer.err
        assert answer.err.count("\n") == 1


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECURE_FVI_PASSPHRASE", "open sesame")
    monkeypatch.delenv("SECURE_FVI_HOME", raising=False)
    return Shell(capsys)


def code_in(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("code: ")).removeprefix("code: ")


def found(shell: Shell) -> None:
    """A consortium with a signed roster in force."""
    for name in SITES:
        role = "server" if name == "hub" else "silo"
        shell.done("keys", "init", "--id", name, "--role", role, "--home", name)
    requests = [f"{name}/{name}.request.toml" for name in SITES]
    make = "keys roster make --consortium study --out roster.toml"
    shell.done(make, *requests)
    code = code_in(shell.done("keys", "roster", "show", "roster.toml"))
    for name in SITES:
        shell.done("keys", "install", "--home", name, "roster.toml")
        assert code_in(shell.done("keys", "roster", "sign", "--home", name, "--yes-code", code)) == code
    for name in SITES:
        others = [f"{other}/rosters/1.sig/{other}.sig" for other in SITES if other != name]
        shell.done("keys", "install", "--home", name, *others)
        assert "roster 1 of 'study' is in force" in shell.done("keys", "roster", "verify", "--home", name)


def test_from_nothing_to_a_roster_in_force(shell: Shell) -> None:
    found(shell)
    assert "roster signed by all, certificate in force" in shell.done("keys", "check", "--home", "north")
    assert shell("keys", "check", "--home", "north", "--days", "400").code == 1
    shown = shell.done("keys", "roster", "show", "north/rosters/1.toml")
    assert "signature files: complete" in shown
    out = shell.done("policy", "check", "--home", "north")
    assert "rosters: none" in out


def test_a_wrong_code_stops_everything(shell: Shell) -> None:
    found(shell)
    signed = Path("roster.toml").read_bytes()
    shell.refused(2, "is there already", "keys roster make --previous roster.toml --out roster.toml")
    assert Path("roster.toml").read_bytes() == signed
    shell.done("keys roster make --previous roster.toml --out next.toml")
    shell.done("keys", "install", "--home", "north", "next.toml")
    sign = ("keys", "roster", "sign", "--home", "north", "--yes-code")
    shell.refused(2, "--yes-code is another code", *sign, "00000 " * 8)
    assert not Path("north/rosters/2.sig").exists()
    shell.done(*sign, code_in(shell.done("keys", "roster", "show", "next.toml")))


def test_plain_mistakes_are_one_line(shell: Shell) -> None:
    shell.done("keys", "init", "--id", "north", "--role", "silo", "--home", "north")
    init = ("keys", "init", "--role", "silo", "--home")
    shell.refused(2, "'north' holds the site 'north' already", *init, "north", "--id", "other")
    shell.refused(2, "must be 1 to 63 letters", *init, "new", "--id", "no spaces please")
    for command in (("keys", "check"), ("policy", "init"), ("status",)):
        shell.refused(2, "`secure-fvi keys init` makes", *command, "--home", "nowhere")
    shell.refused(2, "holds no roster", "keys", "roster", "sign", "--home", "north", "--yes-code", "1")
    shell.refused(2, "cannot read the roster", "keys", "roster", "show", "nothing.toml")
    shell.refused(2, "cannot read the file", "keys", "install", "--home", "north", "nothing.crt")
    shell.refused(2, "is there already; edit it", "policy", "init", "--home", "north")
    shell.refused(2, "there is no audit-log 'nothing'", "audit-log", "verify", "nothing")
    shell.refused(2, "--home", "keys", "check")


def test_a_locked_key_needs_its_passphrase(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.done("keys", "init", "--id", "north", "--role", "silo", "--home", "north")
    monkeypatch.setenv("SECURE_FVI_PASSPHRASE", "shut sesame")
    shell.refused(2, "or the passphrase is wrong", "keys", "rotate", "tls", "--home", "north")
    monkeypatch.delenv("SECURE_FVI_PASSPHRASE")
    shell.refused(2, "is encrypted; set SECURE_FVI_PASSPHRASE", "keys", "rotate", "tls", "--home", "north")


def test_keys_are_rotated(shell: Shell) -> None:
    found(shell)
    request = "north/north.request.toml"
    shell.done("keys", "rotate", "tls", "--home", "north")
    shell.done("keys", "rotate", "identity", "--home", "north")
    make = "keys roster make --previous roster.toml --out next.toml"
    shell.refused(1, "another identity than in roster 1, not announced by its old one", make, request)
    out = shell.done(make, request, "--succession", "north/north.succession.toml")
    assert "north: new identity, announced by the old" in out
    code = code_in(shell.done("keys", "roster", "show", "next.toml"))
    for name in SITES:
        shell.done("keys", "install", "--home", name, "next.toml")
        shell.done("keys", "roster", "sign", "--home", name, "--yes-code", code)
    before = [Path("north", name).read_bytes() for name in ("identity.pub", "tls.crt", "tls.key")]
    for name in SITES:
        shell.done("keys", "install", "--home", name, *(f"{o}/rosters/2.sig/{o}.sig" for o in SITES if o != name))
        shell.done("keys", "roster", "verify", "--home", name)
    after = [Path("north", name).read_bytes() for name in ("identity.pub", "tls.crt", "tls.key")]
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert "roster signed by all, certificate in force" in shell.done("keys", "check", "--home", "north")


def test_a_site_with_a_broken_policy_does_not_start(shell: Shell) -> None:
    """The control, whose policy is whole, goes on to what is wrong with the server's address."""
    found(shell)
    start = ("silo", "start", "--home", "north", "--server", "nowhere")
    assert "policy" not in shell(*start).err
    policy = Path("north", "policy.toml")
    policy.write_text(policy.read_text() + "\nmax_round = 5\n")
    shell.refused(2, "max_round", *start)


def test_a_model_is_hashed(shell: Shell) -> None:
    example = Path(__file__).parents[2] / "examples" / "six_cities.toml"
    text = shell.done("policy", "hash-model", example)
    table = json.loads(shell.done("policy", "hash-model", example, "--json"))
    assert table["hash"] == text.strip()
    assert len(table["hash"]) == 64
    assert "secure_fvi.models.six_cities" in table["sources"]
    assert shell.done("policy", "hash-model", example, "--set", "algorithm.bound=7.0") != text
    shell.refused(2, "no configuration file", "policy", "hash-model", "nothing.toml")


def test_a_log_is_verified_and_shown(shell: Shell, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECURE_FVI_PASSPHRASE")
    logs = {name: open_trail(world.homes[name]) for name in ("north", "hub")}
    entry = JobEntry("job-1", b"o" * 32, b"r" * 32, b"m" * 32, b"p" * 32, True, "", "cohort", 0.9, 1e-7)
    for log in logs.values():
        log.job(entry)
    logs["north"].exchanges("job-1", [Exchange("hub", "Contribution", b"ask", b"answer", "gradient 1")])
    logs["hub"].exchanges("job-1", [Exchange("north", "Contribution", b"answer", b"ask")])
    for log in logs.values():
        log.close()
    files = {name: world.homes[name].log_file for name in logs}
    key = world.homes["north"].path / "identity.pub"
    out = shell.done("audit-log", "verify", files["north"], "--public-key", key, "--against", files["hub"])
    assert "'north' and 'hub' agree on 1 exchanges in 1 jobs" in out
    lines = shell.done("audit-log", "show", files["north"], "--json").splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["genesis", "job", "exchange"]
    assert json.loads(lines[2])["sent"][0] == len(b"answer")
    assert "gradient 1" in shell.done("audit-log", "show", files["north"], "--last", 1)
    roster = world.homes["south"].roster_file(1)
    pinned = shell.done("audit-log", "verify", files["north"], "--roster", roster)
    assert "(not pinned)" not in pinned
    assert "(not pinned)" in shell.done("audit-log", "verify", files["north"])
    stranger = Trail.open("stranger.sqlite", "north", Identity(), create=True)
    stranger.close()
    shell.refused(1, "the roster does not name for it", "audit-log", "verify", "stranger.sqlite", "--roster", roster)
    forged = open_trail(world.homes["hub"])
    forged.exchanges("job-1", [Exchange("north", "Contribution", b"made up", b"ask")])
    forged.close()
    shell.refused(1, "not in the log of 'north'", "audit-log", "verify", files["north"], "--against", files["hub"])
    wrong = world.homes["hub"].path / "identity.pub"
    shell.refused(1, "the chain belongs to key", "audit-log", "verify", files["north"], "--public-key", wrong)


def test_a_log_is_compared_with_the_servers_own(shell: Shell, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log called 'hub' that anybody made, in which a false answer was mended, or a job that the server's log leaves
    out, was taken. The control: a comparison without the roster, which says so, and the server's own log as it is."""
    monkeypatch.delenv("SECURE_FVI_PASSPHRASE")
    hub, before = world.homes["hub"], Identity()
    entry = JobEntry("job-1", b"o" * 32, b"r" * 32, b"m" * 32, b"p" * 32, True)
    earlier = Trail.open("earlier.sqlite", "hub", before, create=True)
    logs = {
        "site": open_trail(world.homes["north"]), "hub": open_trail(hub), "earlier": earlier,
        "stranger": Trail.open("stranger.sqlite", "hub", Identity(), create=True),
    }  # fmt: skip
    for name, log in logs.items():
        log.job(entry)
        ours = name == "site"
        log.exchanges("job-1", [Exchange(*(("hub", "x", b"q", b"a") if ours else ("north", "x", b"a", b"q")))])
    roster = world.homes["north"].roster_file(1)
    verify = ["audit-log", "verify", world.homes["north"].log_file, "--roster", roster]
    assert "agree on 1 exchanges in 1 jobs" in shell.done(*verify, "--against", hub.log_file)
    shell.refused(1, "the roster does not name for it", *verify, "--against", "stranger.sqlite")
    key = world.homes["north"].path / "identity.pub"
    out = shell.done(*verify[:3], "--public-key", key, "--against", "stranger.sqlite")
    assert "a log of 'hub', key" in out
    assert "(not pinned)" in out
    shell.refused(1, "no server in the roster", *verify, "--against", world.homes["north"].log_file)
    shell.refused(1, "the roster does not name for it", *verify, "--against", "earlier.sqlite")
    Path("hub.succession.toml").write_bytes(succeed("hub", before, hub.identity(), NOW))
    shell.done(*verify, "--succession", "hub.succession.toml", "--against", "earlier.sqlite")
    logs["site"].job(dataclasses.replace(entry, job="job-2"))
    logs["site"].exchanges("job-2", [Exchange("hub", "x", b"q2", b"a2")])
    against = [*verify, "--against", hub.log_file]
    shell.refused(1, "job 'job-2': 'north' has exchanges with 'hub', whose log has none", *against)
    logs["hub"].job(dataclasses.replace(entry, job="job-2"))
    logs["hub"].exchanges("job-2", [Exchange("north", "x", b"a2", b"q2")])
    logs["hub"].job(dataclasses.replace(entry, job="job-3"))
    assert "agree on 2 exchanges in 2 jobs" in shell.done(*against)
    logs["hub"].exchanges("job-3", [Exchange("north", "x", b"a3", b"q3")])
    shell.refused(1, "job 'job-3': 'hub' has exchanges with 'north', whose log has none", *against)


def test_a_passphrase_may_be_typed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECURE_FVI_PASSPHRASE")
    asked: list[str] = []

    def prompt(text: str, **options: object) -> str:
        assert options["hide_input"]
        asked.append(text)
        return "open sesame"

    monkeypatch.setattr("click.prompt", prompt)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    shell.done("keys init --id north --role silo --home north --ask-passphrase")
    assert b"BEGIN ENCRYPTED" in Path("north/identity.pem").read_bytes()
    shell.done("keys rotate tls --home north")
    assert asked == ["passphrase for the new keys", "passphrase of 'north/identity.pem'"]
