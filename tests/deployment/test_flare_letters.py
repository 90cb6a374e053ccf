"""Jobs under FLARE without FLARE: the same carrier and the same site, over a network that the test holds in its hand.

What FLARE itself does is in test_flare.py, where it is installed.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging.config
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
from consortium_run import SILOS, Job
from deployment_world import DAY, NOW, World, new_world

from secure_fvi.deployment import consortium, fence, names
from secure_fvi.deployment.certificates import make_certificate, pem_of
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.site_job import Local
from secure_fvi.engines import flare, flare_kits, flare_server
from secure_fvi.engines.flare_server import Ended, FlareCarrier, Post
from secure_fvi.engines.letters import ANSWERED, BUSY, LETTER, REFUSED, WORKING, Letter, Way, read_letter, write_letter
from secure_fvi.engines.remote import Line, Patience
from secure_fvi.errors import InputError, ProtocolError, SecureFVIError, SecureFVIWarning

SFVI = {"name": "sfvi", "iterations": 6}
_APP = "nvflare.app_common"
MOST = 1 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    return new_world(tmp_path_factory.mktemp("flare") / "world")


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    return made.copy(tmp_path / "world")


class Network:
    """What FLARE is to both ends: a letter in at the door of a site, an answer or a word out. `spoil` may change or
    lose an answer."""

    def __init__(self, world: World, folder: Path) -> None:
        self.doors: dict[str, flare.Door] = {}
        for site in SILOS:
            (folder / site).mkdir()
            self.doors[site] = flare.Door(world.homes[site], Local(repeatable=True), folder / site)
        self.world, self.over = world, threading.Event()
        self.processes: dict[str, Way] = {}  # of FLARE, at each site
        for site in SILOS:
            self.come_back(site)
        self.spoil: Callable[[str, bytes], Mapping[str, Any]] = lambda site, answer: {LETTER: answer}
        self.letters: list[tuple[str, bytes]] = []

    def send(self, site: str, letter: bytes) -> Mapping[str, Any]:
        self.letters.append((site, letter))
        if site not in self.processes:
            return {}
        kind, answer = self.processes[site].ask(letter)
        assert kind in (ANSWERED, WORKING)
        return {BUSY: True} if kind == WORKING else self.spoil(site, answer)

    def lose(self, site: str) -> None:
        """The site's process dies."""
        self.processes.pop(site).close()

    def come_back(self, site: str) -> None:
        until = time.monotonic() + 30
        while site not in self.processes:
            try:
                self.processes[site] = Way(self.doors[site].folder)
            except OSError:  # nobody waits there yet
                assert time.monotonic() < until
                time.sleep(0.05)

    def serve(self, job: Job, out: Path) -> bytes:
        home = self.world.homes["hub"]
        flare_kits.write_job(home.path, "job", flare_kits.Job(config=str(job.path), out=str(out)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureFVIWarning)
            post = Post(self.send, self.over.is_set)
            flare_server.serve(home, "job", post.carrier)
        return (out / "posterior.safetensors").read_bytes()


@pytest.fixture
def network(world: World) -> Iterator[Network]:
    with tempfile.TemporaryDirectory(prefix="doors-") as folder:
        found = Network(world, Path(folder))
        yield found
        for site in list(found.processes):
            found.lose(site)
        for door in found.doors.values():
            door.close()


def _job(world: World, folder: Path) -> Job:
    return Job(world, folder, algorithm=SFVI, engine={"kind": "flare"})


def test_a_job_under_flare_gives_the_posterior_of_one_process(network: Network, tmp_path: Path) -> None:
    """Byte for byte, though a site dies and comes back, and answers are lost, spoilt and sent twice."""
    job, n = _job(network.world, tmp_path), [0]

    def spoil(site: str, answer: bytes) -> Mapping[str, Any]:
        n[0] += 1
        if n[0] % 5 == 0:
            return {}
        if n[0] % 7 == 0:
            return {LETTER: answer[:-1] + bytes([answer[-1] ^ 1])}
        if n[0] == 20:  # and the next brings what is no letter
            network.lose("east")
            network.come_back("east")
            assert network.processes["east"].ask(b"no letter")[0] == REFUSED
            with pytest.raises(BlockingIOError):  # no job beside another
                Way(network.doors["east"].folder)
        return {LETTER: answer}

    network.spoil = spoil
    assert network.serve(job, tmp_path / "remote") == job.local()
    assert n[0] > 40


@pytest.mark.later
def test_a_job_that_flare_ends_goes_on_in_the_next(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site is silent for good, as FLARE never brings its process back: that job ends, and the next goes on."""
    monkeypatch.setattr(flare_server, "SILENCE", 3.0)
    monkeypatch.setattr(flare, "_HOLD", 0.2)
    job, n = _job(network.world, tmp_path), [0]

    def spoil(site: str, answer: bytes) -> Mapping[str, Any]:
        n[0] += 1
        if n[0] == 30:
            network.lose("north")
        return {LETTER: answer}

    network.spoil = spoil
    with pytest.raises(Ended, match="silo 'north' is silent: its process is gone"):
        network.serve(job, tmp_path / "remote")
    assert not (tmp_path / "remote" / "posterior.safetensors").exists()
    network.come_back("north")
    assert network.serve(job, tmp_path / "remote") == job.local()


@pytest.mark.later
def test_a_roster_that_was_replaced_ends_the_job(network: Network, tmp_path: Path) -> None:
    """Mid-job two sites accept another roster, since an identity was stolen, say: they answer nothing under the old."""
    n = [0]

    def spoil(site: str, answer: bytes) -> Mapping[str, Any]:
        n[0] += 1
        if n[0] == 20:
            network.world.sign(network.world.write(network.world.roster))
            for name in ("east", "north"):
                network.world.put_in_force(network.world.homes[name])
        return {LETTER: answer}

    network.spoil = spoil
    with pytest.raises(ProtocolError, match=r"refused: .*roster"):
        network.serve(_job(network.world, tmp_path), tmp_path / "remote")
    assert n[0] < 30


def test_letters_rest_on_a_roster_that_was_checked_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each letter read and checked it, every member's signature with it, and the site's own keys. It is checked again
    where a file of it has changed, which the control below does: a roster accepted since, a signature that is gone."""
    hub, east, checks = world.homes["hub"], world.homes["east"], list[str]()
    check_signatures = consortium.check_signatures
    monkeypatch.setattr(consortium, "check_signatures", lambda r, f: (checks.append(f.parent.parent.name),
                                                                      check_signatures(r, f)))  # fmt: skip

    def letters(count: int) -> int:
        before = len(checks)
        for _ in range(count):
            content, _ = write_letter(Letter("hub", "east", "job", bytes(32), 0, b"x"), hub)
            read_letter(content, east, "server", most=MOST)
        return len(checks) - before

    time.sleep(0.2)  # files that were written just now are looked at again
    letters(1)
    assert letters(20) == 0
    world.sign(world.write(world.roster))
    for home in (hub, east):
        world.put_in_force(home)
    assert letters(1) > 0
    time.sleep(0.2)
    letters(1)
    assert letters(20) == 0
    with pytest.raises(ProtocolError, match="expired"):
        east.roster(NOW + 4000 * DAY)
    with monkeypatch.context() as patched:  # switched off: files that are taken for unchanged
        kept = {home.path: home._files() for home in (hub, east)}
        patched.setattr(Home, "_files", lambda home: kept[home.path])
        next(east.roster_file(2).with_suffix(".sig").glob("north*")).unlink()
        assert letters(1) == 0
    with pytest.raises(ProtocolError, match="is not signed by north"):
        letters(1)


def test_every_change_of_what_a_roster_was_read_from_is_seen(world: World) -> None:
    """Of the files seen before alone: what is altered in place shows by itself, whatever time it is given, what is
    added by the folder that it is in, what was not there by being there. The control looks at no folder."""
    home = world.homes["east"]
    time.sleep(0.2)
    roster = home.roster(NOW)
    file, signatures_ = home.roster_file(1), home.roster_file(1).with_suffix(".sig")

    def altered() -> None:
        seen = file.stat()
        file.write_bytes(file.read_bytes().swapcase())
        os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))

    def begun() -> None:
        (home.path / "next").mkdir()
        (home.path / "next" / "identity.pem").touch()

    changes: list[tuple[Callable[[], object], bool]] = [
        (begun, True),
        (altered, True),
        ((home.path / "accepted.json").touch, True),
        ((home.path / "rosters" / "9.toml").touch, False),
        ((signatures_ / "zoe.sig").touch, False),
        (next(signatures_.glob("north*")).unlink, True),
    ]
    for change, alone in changes:
        home._checked = None
        files = home._files()
        without = tuple(seen for seen in files if not seen[0].is_dir())
        change()
        for looked_at, shows in ((files, True), (without, alone)):
            home._checked = looked_at, roster, home.identity()
            assert (home._files() != looked_at) == shows


@pytest.mark.parametrize("control", [False, True])
def test_what_another_job_of_flare_left_ends_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    """FLARE ends a job and begins another; the first one's controller, late, says that it was refused. The launcher
    believed it and gave up, as it does in the control, where all jobs of FLARE have one file."""
    if control:
        for module in (flare_server, flare_kits):
            monkeypatch.setattr(module, "ended_file", lambda home, name, _: home / "flare" / "jobs" / f"{name}.ended")
    home, told = world.homes["hub"], list[str]()
    monkeypatch.setenv("SECURE_FVI_HOME", str(home.path))

    class Session:
        """FLARE, whose jobs all end before their time. Before the second one does, the first has its late word."""

        def __init__(self, admin: Path) -> None:
            self.jobs = 0

        def __enter__(self) -> Session:
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, definition: Path) -> str:
            self.jobs += 1
            return f"incarnation-{self.jobs}"

        def wait(self) -> str:
            if self.jobs == 2:
                flare_server.left("remote", "incarnation-1", False, "refused, long ago")
            if self.jobs == 3:
                flare_server.left("remote", "incarnation-3", False, "refused, just now")
            return "FINISHED:ABORTED"

    monkeypatch.setattr(flare_kits, "_Session", Session)
    monkeypatch.setattr(flare_kits, "_BETWEEN", 0.0)
    with pytest.raises(SecureFVIError, match="refused, long ago" if control else "refused, just now"):
        flare_kits.launch(home, _job(world, tmp_path).path, tmp_path / "remote", tmp_path, say=told.append)
    assert len([line for line in told if "submitted" in line]) == (2 if control else 3)


def test_an_end_by_flare_is_no_end_of_ours(network: Network, tmp_path: Path) -> None:
    network.spoil = lambda site, answer: network.over.set() or {}  # type: ignore[func-returns-value]
    with pytest.raises(Ended, match="FLARE ends this job"):
        network.serve(_job(network.world, tmp_path), tmp_path / "remote")


def test_what_a_policy_refuses_is_refused_under_flare(network: Network, tmp_path: Path) -> None:
    """By the site, whatever FLARE's administrator may; the server tells it apart from a process that died."""
    job = _job(network.world, tmp_path)
    job.allow("south", algorithms=["pvi"])
    with pytest.raises(ProtocolError, match=r"silo 'south' refused: .*sfvi"):
        network.serve(job, tmp_path / "remote")


def _question(world: World, **changes: Any) -> bytes:
    letter = Letter("hub", "east", "job", bytes(32), 0, b"\x00body")._replace(**changes)
    return write_letter(letter, world.homes["hub"])[0]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda w: _question(w)[:-70] + bytes(70), "message|signed"),
        (lambda w: _question(w, receiver="north"), "a letter to 'north'"),
        (lambda w: write_letter(Letter("hub", "east", "job", bytes(32), 0, b""), w.homes["south"])[0], "not signed by"),
        (lambda w: write_letter(Letter("south", "east", "job", bytes(32), 0, b""), w.homes["south"])[0], "a silo in"),
        (lambda w: write_letter(Letter("nobody", "east", "job", bytes(32), 0, b""), w.homes["hub"])[0], "nobody"),
        (lambda w: _question(w, body=bytes(MOST + 4096)), "more than the 1048576 bytes"),
        (lambda w: b"", "message"),
    ],
)
def test_a_site_answers_its_server_alone(world: World, spoil: Callable[[World], bytes], why: str) -> None:
    """What FLARE, or whoever reaches it, makes up or alters is refused before it is looked into. The control: a letter
    as it was written."""
    letter, _ = read_letter(_question(world), world.homes["east"], "server", most=MOST)
    assert letter.body == b"\x00body"
    with pytest.raises((ProtocolError, InputError), match=why):
        read_letter(spoil(world), world.homes["east"], "server", most=MOST)


def test_an_answer_names_its_question(network: Network) -> None:
    """FLARE's server hands each question the answer of an older one: taken for none. The control: the right ones."""
    home, older = network.world.homes["hub"], {}
    post = Post(network.send, network.over.is_set)
    carrier = FlareCarrier(Line(SILOS, "job", home, Patience("drop")), post)
    ask = functools.partial(carrier.exchange, dict.fromkeys(SILOS, b"\xffanything"))

    def spoil(site: str, answer: bytes) -> Mapping[str, Any]:
        if len(network.letters) > 20:
            network.over.set()
        return {LETTER: older.setdefault(site, answer)}

    network.spoil = spoil
    assert ask() == {}
    assert set(carrier._answers) == set(SILOS)  # refusals, which are answers
    with pytest.raises(Ended):
        ask()
    assert carrier._answers == {}
    carrier.close()


def test_an_old_letter_is_not_answered_again(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE's process at a site plays the server's letters again, each a row of the log. The last one may be asked for
    again. The control: a site that remembers one letter."""
    first, other = (_question(network.world, number=bytes([n]) * 32) for n in (1, 2))
    ask = network.processes["east"].ask
    kinds = [ask(letter)[0] for letter in (first, first, other, first, other)]
    assert kinds == [ANSWERED, ANSWERED, ANSWERED, REFUSED, ANSWERED]
    monkeypatch.setattr(flare, "_REMEMBERED", 1)
    kinds = [ask(_question(network.world, number=bytes([n]) * 32))[0] for n in (3, 4, 5, 3)]
    assert kinds == [ANSWERED] * 4


@pytest.mark.later
def test_a_silo_computes_while_flare_waits(network: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The site says that it is busy, the same letter asks again, and nothing is computed twice."""
    monkeypatch.setattr(flare, "_HOLD", 0.03)
    monkeypatch.setattr(flare_server, "SILENCE", 20.0)
    busy = [0]
    send = network.send

    def counted(site: str, letter: bytes) -> Mapping[str, Any]:
        reply = send(site, letter)
        busy[0] += BUSY in reply
        return reply

    monkeypatch.setattr(network, "send", counted)
    job = _job(network.world, tmp_path)
    assert network.serve(job, tmp_path / "remote") == job.local()
    assert busy[0] > 0


# ---- kits ----


#: What FLARE 2.9.0 makes for a site.
_STARTUP = {
    "format_version": 2,
    "servers": [{"name": "study", "service": {"scheme": "grpc", "target": "hub:8002"}, "identity": "hub"}],
    "client": {
        "ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem", "fqsn": "east",
        "is_leaf": True, "connection_security": "mtls",
    },
}  # fmt: skip


def _kit(folder: Path, startup: Mapping[str, Any] = _STARTUP, **local: Any) -> Path:
    """A site's kit; local: tables of its `local/`, by name, beside those of FLARE's own making."""
    made = [{"id": "site_log_streamer", "path": f"{_APP}.logging.site_log_streamer.SiteLogStreamer", "args": {}}]
    resources = {"class_allow_list": ["*"], "allow_log_streaming": True, "components": made}
    kit = folder / "east"
    (kit / "local").mkdir(parents=True)
    (kit / "startup").mkdir()
    (kit / "startup" / "fed_client.json").write_text(json.dumps(startup))
    (kit / "startup" / "client.key").write_text("a key")
    for name, table in {"resources": resources, "log_config": {"version": 1}, **local}.items():
        (kit / "local" / f"{name}.json.default").write_text(json.dumps(table))
    return kit


def test_a_guarded_kit_takes_no_code_and_gives_no_log(tmp_path: Path) -> None:
    work = tmp_path / "work"
    flare_kits.guard(_kit(tmp_path), work)
    assert json.loads((work / "startup" / "fed_client.json").read_text()) == _STARTUP
    assert (work / "startup" / "client.key").read_text() == "a key"
    resources = json.loads((work / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == list(flare_kits.CLASSES)
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["allow_log_streaming"] is False
    assert [c["id"] for c in resources["components"]] == ["resource_manager", "resource_consumer", "process_launcher"]
    rights = json.loads((work / "local" / "authorization.json").read_text())["permissions"]
    assert list(rights) == ["project_admin"]
    assert {k for k, v in rights["project_admin"].items() if v != "none"} == {"submit_job", "manage_job", "view"}


_RUN = {"path": "os.system", "args": {"command": "touch ran"}}
_NESTED = {"id": "resource_manager", "path": f"{_APP}.resource_managers.gpu_resource_manager.GPUResourceManager",
           "args": {"num_of_gpus": _RUN}}  # fmt: skip
#: What FLARE 2.9.0 ran of a kit that the server had handed out, whatever classes jobs may name.
_RUN_OF_A_KIT = {
    "a component": {"resources": {"components": [_RUN | {"id": "x"}]}},
    "a component as another's argument": {"resources": {"components": [_NESTED]}},
    "a validator of jobs": {"resources": {"components": [], "app_validator": _RUN}},
    "a form of the log": {
        "log_config": {"version": 1, "formatters": {"x": {"()": "os.system", "command": "touch ran"}}}
    },
}


@pytest.mark.parametrize("kind", _RUN_OF_A_KIT)
def test_nothing_that_a_kit_names_is_built(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE reads each file of `local/` where the guard wrote none of that name: what it reads is the same whatever the
    kit says. The control: a log that is set up as the kit has it runs the server's command."""
    monkeypatch.chdir(tmp_path)

    def read(kit: Path) -> dict[str, str]:
        names = {p.name.removesuffix(".default").removesuffix(".sample") for p in (kit / "local").iterdir()}
        of = {n: next(p for p in (kit / "local" / n, kit / "local" / f"{n}.default") if p.is_file()) for n in names}
        return {name: path.read_text() for name, path in of.items()}

    spoilt = _kit(tmp_path / "spoilt", **_RUN_OF_A_KIT[kind])
    assert "ran" in "".join(read(spoilt).values())
    if "log_config" in _RUN_OF_A_KIT[kind]:
        logging.config.dictConfig(json.loads(read(spoilt)["log_config.json"]) | {"disable_existing_loggers": False})
        assert (tmp_path / "ran").exists()
    works = [tmp_path / "work-spoilt", tmp_path / "work-plain"]
    for kit, work in zip((spoilt, _kit(tmp_path / "plain")), works, strict=True):
        flare_kits.guard(kit, work)
    assert read(works[0]) == read(works[1])
    assert "touch" not in "".join(read(works[0]).values())


def test_who_makes_a_kit_runs_nothing_at_the_site(tmp_path: Path, world: World) -> None:
    """The server hands kits out. Of what else lies in one, scripts, tables of resources, modules, a folder of a job to
    come with code in it, nothing is where FLARE runs; what FLARE has left there is. The control: the kit has it all."""
    east = world.homes["east"]
    kit, work = _kit(tmp_path / "plain"), flare_kits.workspace_of(east)
    odd = ("startup/sub_start.sh", "startup/x__resources.json", "startup/evil.py", "local/custom/x.py", "nvflare/x.py",
           "local/privacy.json", "1b4e28ba/app_east/custom/sitecustomize.py", "startup/fed_client.yml")  # fmt: skip
    for name in odd:
        (kit / name).parent.mkdir(parents=True, exist_ok=True)
        (kit / name).write_text("touch ran")
        assert (kit / name).exists()
    (work / "its-own-job").mkdir(parents=True)
    (work / "startup").mkdir()
    (work / "startup" / "older__resources.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (work / "local").symlink_to(tmp_path / "elsewhere")
    command = flare_kits.command(kit, east)
    assert command[:5] == [sys.executable, "-P", "-u", "-m", "nvflare.private.fed.app.client.client_train"]
    assert not any("start.sh" in word for word in command)
    made = {str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()}
    ours = {f"local/{name}.json" for name in ("resources", "authorization", "log_config")}
    assert made == ours | {"startup/fed_client.json", "startup/client.key"}
    assert (work / "its-own-job").is_dir()
    assert not (work / "local").is_symlink()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert flare_kits.environment(east)["PYTHONSAFEPATH"] == "1"
    assert command[command.index("-s") - 1] == str(work.resolve())
    with pytest.raises(InputError, match="for another role than 'hub' has, a server"):
        flare_kits.command(kit, world.homes["hub"])


def test_a_kit_that_is_anothers_or_out_of_its_dates_is_refused(world: World, tmp_path: Path) -> None:
    """FLARE would go on trying without a word. The control: the site's own, at a clock within them."""
    for owner, days, said in (
        ("east", 30, ""),
        ("south", 30, "is the startup kit of 'south', and this site is 'east'"),
        ("east", -1, "its certificate is in force from .* set the clock, or have the server run `nvflare provision`"),
    ):
        kit = _kit(tmp_path / f"{owner}{days}")
        clock = names.now()
        begun = clock - datetime.timedelta(days=2)
        made = make_certificate(world.homes["east"].tls_key(), owner, "silo", (), begun, days + 2)
        (kit / "startup" / "client.crt").write_bytes(pem_of(made))
        with pytest.raises(InputError, match=said) if said else nullcontext():
            assert flare_kits.check_kit(kit, world.homes["east"]) == "fed_client.json"
    (kit / "startup" / "client.crt").write_text("none")
    with pytest.raises(InputError, match="is no certificate"):
        flare_kits.check_kit(kit, world.homes["east"])


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    """FLARE would try again for good. The control: the same port once it is free."""
    (tmp_path / "startup").mkdir()
    with socket.create_server(("", 0)) as taken:
        target = f"hub:{taken.getsockname()[1]}"
        server = {"format_version": 2, "servers": [{"name": "study", "service": {"scheme": "tcp", "target": target}}]}
        (tmp_path / "startup" / "fed_server.json").write_text(json.dumps(server))
        with pytest.raises(InputError, match=r"cannot be had .* is another `flare start` running here"):
            flare_kits.check_port(tmp_path)
    flare_kits.check_port(tmp_path)


def test_jobs_are_submitted_at_the_server_with_an_administrators_kit(world: World, tmp_path: Path) -> None:
    """A site's folder, and a site's kit: FLARE would be dialled for a minute."""
    config = _job(world, tmp_path).path
    for home, said in (("east", "is the folder of a silo"), ("hub", "is no administrator's startup kit")):
        with pytest.raises(InputError, match=said):
            flare_kits.launch(world.homes[home], config, tmp_path / "out", _kit(tmp_path / home))


def test_flares_processes_find_a_key_file_that_was_named_from_here(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand in folders of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECURE_FVI_KEY_FILE", "passphrase")
    assert flare_kits.environment(world.homes["hub"])["SECURE_FVI_KEY_FILE"] == str(tmp_path / "passphrase")


_SPYING = "{$SECURE_FVI_PASSPHRASE}"


@pytest.mark.parametrize(("what", "more"), [
    ("client.site_config", {"client": {**_STARTUP["client"], "site_config": {"label": _SPYING}}}),  # type: ignore[dict-item]
    ("client.fqsn", {"client": {"fqsn": _SPYING}}),
    ("servers.0.service.target", {"servers": [{"service": {"scheme": "grpc", "target": _SPYING}}]}),
    ("servers.0.path", {"servers": [_RUN]}),
    ("client.ssl_cert", {"client": {"ssl_cert": "../../identity.pem"}}),
    ("components", {"components": []}),
])  # fmt: skip
def test_a_kit_reads_nothing_out(
    what: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE puts the values of its process's environment where a kit names them in braces, and tells the server: in the
    control, by its own way of doing so, the passphrase of the site's keys, which is no longer there either."""
    home = Home.create(tmp_path / "site", "east", "silo", passphrase="correct horse")
    kit = _kit(tmp_path, _STARTUP | more)
    flare_kits.guard(_kit(tmp_path / "plain"), tmp_path / "work")
    with pytest.raises(InputError, match=f"'{what}' is not as in a startup kit"):
        flare_kits.guard(kit, tmp_path / "work")
    monkeypatch.setenv("SECURE_FVI_PASSPHRASE", "correct horse")
    said = (kit / "startup" / "fed_client.json").read_text()
    if _SPYING in said:
        assert "correct horse" in said.replace(_SPYING, _SPYING.format(**{f"${k}": v for k, v in os.environ.items()}))
    with flare_kits.key_file_of(home) as key_file:
        found = flare_kits.environment(home, key_file=key_file)
        assert "correct horse" not in str(found)
        monkeypatch.delenv("SECURE_FVI_PASSPHRASE")
        for name in ("SECURE_FVI_HOME", "SECURE_FVI_KEY_FILE"):
            monkeypatch.setenv(name, found[name])
        assert flare_server.home_of_environment().identity().public_key == home.identity().public_key
    assert key_file is not None
    assert not key_file.exists()


@pytest.mark.parametrize("what", ["link", "hard link", "folder", "pipe"])
def test_a_kit_hands_over_nothing_that_its_links_lead_to(what: str, tmp_path: Path) -> None:
    """Of the site's own files, before FLARE is behind its fence. The control is the same file as it is read else."""
    secret, kit = tmp_path / "identity.pem", _kit(tmp_path / "kit")
    secret.write_text("-----BEGIN PRIVATE KEY-----")
    at = kit / "startup" / "client.key"
    flare_kits.guard(kit, tmp_path / "work")
    at.unlink()
    if what == "folder":
        (kit / "startup").rename(tmp_path / "elsewhere")
        (tmp_path / "elsewhere" / "client.key").write_text(secret.read_text())
        (kit / "startup").symlink_to(tmp_path / "elsewhere")
    else:
        {"link": at.symlink_to, "hard link": at.hardlink_to, "pipe": lambda _: os.mkfifo(at)}[what](secret)
    if what != "pipe":
        assert at.read_text() == secret.read_text()
    with pytest.raises(InputError, match="is no plain file"):
        flare_kits.guard(kit, tmp_path / "work")
    assert "PRIVATE" not in "".join(p.read_text() for p in (tmp_path / "work").rglob("*") if p.is_file())


def test_what_is_no_kit_is_said(tmp_path: Path, world: World) -> None:
    with pytest.raises(InputError, match="is no startup kit of FLARE"):
        flare_kits.command(tmp_path, world.homes["east"])


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b"])
def test_a_job_is_named_by_a_plain_id(name: str, world: World) -> None:
    with pytest.raises(InputError, match="letters, digits"):
        flare_kits.job_file(world.homes["hub"].path, name)


def test_a_job_for_another_engine_is_not_launched(world: World, tmp_path: Path) -> None:
    job = Job(world, tmp_path, algorithm=SFVI)
    with pytest.raises(InputError, match='kind must be "flare"'):
        flare_kits.launch(world.homes["hub"], job.path, tmp_path / "out", tmp_path)


def test_homes_come_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.delenv("SECURE_FVI_HOME", raising=False)
    with pytest.raises(InputError, match="names no SECURE_FVI_HOME"):
        flare_server.home_of_environment()
    for name, value in flare_kits.environment(world.homes["hub"]).items():
        monkeypatch.setenv(name, value)
    assert isinstance(flare_server.home_of_environment(), Home)
    assert flare_server.home_of_environment().id == "hub"


# ---- a site's door ----


#: What FLARE 2.9.0's own client does for whoever plays its server: cat, head, grep, ls of any path.
_LOOKING = """
import ctypes, json, os, socket, sys
from pathlib import Path
from secure_fvi.engines.letters import Way
found = {}
for path in sys.argv[2:]:
    try:
        found[path] = open(path, errors="replace").read() if not os.path.isdir(path) else os.listdir(path)
    except OSError as error:
        found[path] = None
try:
    with socket.socket(socket.AF_UNIX) as bus:
        bus.connect("\\0" + sys.argv[1])
        found["bus"] = "reached"
except PermissionError:
    found["bus"] = None
try:  # a datagram's socket is one of the machine's, also where it comes as one of a pair
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.connect("\\0" + sys.argv[1] + "-of-datagrams")
    one.send(b"here")
    found["datagrams"] = "reached"
except PermissionError:
    found["datagrams"] = None
try:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4).close()
    found["connections"] = "told"  # of all processes
except PermissionError:
    found["connections"] = None
for family, kind, protocol in ((16, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0), (10, socket.SOCK_STREAM, 0)):
    try:
        socket.socket(family, kind, protocol).close()
    except PermissionError:
        found["refused"] = family
    except OSError:
        pass  # a machine without IPv6
for end in socket.socketpair():
    end.close()
socket.socket(socket.AF_INET).close()
try:
    open("/proc/sys/kernel/core_pipe_limit", "r+").close()
    found["settings"] = os.getuid() == 0 or None  # of the machine, which are root's
except OSError:
    found["settings"] = None
keyctl = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
found["keyring"] = ctypes.CDLL(None).syscall(keyctl, 0, -3, 1) > 0 or None
found["door"] = Way(Path(os.environ["SECURE_FVI_DOOR"])).ask(b"no letter")[0].decode()
open("written", "w").write("here")
print(json.dumps(found))
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not here")
@pytest.mark.parametrize("sandbox", ["required", "off"])
def test_flares_process_sees_the_door_and_nothing_of_the_site(
    sandbox: Literal["required", "off"], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files, of what this process was started with, of services of the machine, and of the user's keys in the
    kernel. The control: without the fence it reads and reaches them, but for the passphrase."""
    east, table, name = world.homes["east"], tmp_path / "asthma.csv", f"bus-of-{os.getpid()}"
    table.write_text("child,wheeze\n7,1\n")
    monkeypatch.setenv("SECURE_FVI_PASSPHRASE", "correct horse")
    monkeypatch.setenv("PGPASSWORD", "of the database")
    keys = [path for path in east.path.iterdir() if path.is_file()]
    looked = [str(p) for p in (table, *keys, east.path, "/proc/self/environ", "/proc/1/environ")]
    letters = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with letters, socket.socket(socket.AF_UNIX) as bus, flare._around(east, Local(), sandbox) as start:
        bus.bind(f"\0{name}")
        bus.listen()
        letters.bind(f"\0{name}-of-datagrams")
        done = start([sys.executable, "-P", "-c", _LOOKING, name, *looked])
        said, _ = done.communicate(timeout=120)
    found = json.loads(said.splitlines()[-1])
    assert found.pop("door") == REFUSED.decode()
    if sandbox == "off":
        assert (found["bus"], found["keyring"], found[str(table)]) == ("reached", True, table.read_text())
        assert (found["datagrams"], found["connections"], letters.fileno()) == ("reached", "told", -1)
        assert "PGPASSWORD" in found["/proc/self/environ"]
        assert "correct horse" not in found["/proc/self/environ"]
        assert set(keys) <= {east.path / name for name in found[str(east.path)]}
        return
    assert (flare_kits.workspace_of(east) / "written").read_text() == "here"
    assert found.pop(str(east.path)) == ["flare"]  # in which its own folder is
    assert not any(secret in str(found) for secret in ("PGPASSWORD", "correct horse"))
    assert not any(found.pop(name) for name in list(found) if not name.startswith("/proc"))


def test_flares_process_has_no_file_of_this_one(world: World, tmp_path: Path) -> None:
    """A log, where it is a file: who inherits it reads what is for this site alone. The control inherits it."""
    log = tmp_path / "log"
    code = "import os, sys; sys.stdout.write(str([os.path.realpath(f'/proc/self/fd/{n}') for n in range(3)]))"
    with log.open("ab") as held, flare._around(world.homes["east"], Local(), "off") as start:
        inherited = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=held, check=True)
        assert str(log) in inherited.stdout.decode()
        kept = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            said, _ = start([sys.executable, "-c", code]).communicate(timeout=60)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    assert str(log) not in said.decode()
    assert "/dev/null" in said.decode()


def test_without_bubblewrap_no_site_is_started_unless_its_owner_says_so(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    fence._tool.cache_clear()
    try:
        with pytest.raises(InputError, match=r"FLARE's process .* there is no 'bwrap' here: install .*--sandbox off"):
            flare.run(_kit(tmp_path), world.homes["east"])
    finally:
        fence._tool.cache_clear()


def test_what_flares_code_leaves_stops_no_site_and_tells_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in a folder's place, a thousand folders in each other, FLARE's sign to stop as a folder or as a link, by
    which it would be seen whether a file is there. The control: a folder that nobody put away, and the sign itself."""
    east = world.homes["east"]
    work = flare_kits.workspace_of(east)
    for made in (False, True):
        work.mkdir(parents=True)
        (work / "startup").write_text("no folder")
        (work / "log.txt").write_text("FLARE's log")
        deep = work / "local"
        deep.mkdir()
        for _ in range(1100):
            monkeypatch.chdir(deep)
            deep = Path("x")
            deep.mkdir()
        monkeypatch.chdir(tmp_path)
        with pytest.raises((OSError, RecursionError)):
            flare_kits.command(_kit(tmp_path / f"control-{made}"), east)
        flare_kits.put_away(east)
        flare_kits.command(_kit(tmp_path / f"kit-{made}"), east)
        assert (work / "startup").is_dir()
        assert (work.with_name("workspace-before") / "log.txt").read_text() == "FLARE's log"
        subprocess.run(["rm", "-rf", str(work.parent)], check=True)
    sign = tmp_path / "shutdown.fl"
    sign.symlink_to(__file__)
    assert not flare.is_file(sign)
    sign.unlink()
    sign.mkdir()
    assert not flare.is_file(sign)
    sign.rmdir()
    assert not flare.is_file(sign)
    sign.write_text("")
    assert flare.is_file(sign)


def test_the_door_outlives_a_job_of_flare_whatever_it_does(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure of ours, a message that is too long, one that is none: the next job is let in. What a site takes of its
    job may be longer than what it takes of anybody, and then comes through."""
    door, ask = network.doors["east"], Way.ask

    def fails(party: Any, letter: bytes) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(flare, "_said_of", fails)
        with pytest.raises((EOFError, OSError)):
            ask(network.processes["east"], b"letter")
    monkeypatch.setattr(flare, "LONGEST", 1000)
    for longest, let_in in ((1000, False), (100_000, True)):
        monkeypatch.setattr(flare.SiteParty, "longest", property(lambda _, most=longest: most))
        network.lose("east")
        network.come_back("east")
        with nullcontext() if let_in else pytest.raises((EOFError, OSError)):
            assert ask(network.processes["east"], bytes(50_000))[0] == REFUSED
    assert "is no letter: bad message length" in caplog.text
    assert door.folder.exists()
