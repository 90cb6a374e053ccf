"""A consortium in one folder and its parties as processes of their own, to be killed and measured.

A party's process is forked from one that has the modules loaded and nothing else, since Python with torch takes
seconds of a processor to start; from there on it is `secure-fvi server start`, `silo start` or `holder start`.
"""

from __future__ import annotations

import datetime
import hashlib
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from secure_fvi.checkpoints import latest_round
from secure_fvi.compiled import threads as with_threads
from secure_fvi.deployment.consortium import write_roster
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.job import silo_ids
from secure_fvi.deployment.keeping import accept, install, read_request, request_text, sign
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.names import Role
from secure_fvi.deployment.policy_check import held_by_server
from secure_fvi.deployment.trail import EXCHANGE, read_exchange
from secure_fvi.deployment.trail_verify import rows
from secure_fvi.driving import Parties as RunParties
from secure_fvi.driving import Run
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import ProtocolError, SecureFVIWarning
from secure_fvi.fitting import build_parties, result_of
from secure_fvi.messages import ROUND
from secure_fvi.results import Result
from secure_fvi.runs import wording
from secure_fvi.runs.config import Config
from secure_fvi.runs.federation import Federation, VerticalFederation, federate
from secure_fvi.runs.reading import read
from secure_fvi.silo import Silo

HUB, HOLDER = "hub", "escrow"
_PRELOAD = ["secure_fvi_lab.bench.warm"]


def consortium(root: Path, silos: Sequence[str], holder: bool = False) -> dict[str, Home]:
    """The members' folders by id, with a roster that all have signed and accepted."""
    now = datetime.datetime.now(datetime.UTC)
    roles: dict[str, Role] = {**dict.fromkeys(silos, "silo"), HUB: "server", **({HOLDER: "holder"} if holder else {})}
    at = {HUB: ("127.0.0.1",)}
    homes = {
        name: Home.create(root / name, name, role, at.get(name, ()), unsealed=True)
        for name, role in sorted(roles.items())
    }
    members = [read_request(request_text(home).encode(), "request") for home in homes.values()]
    roster = root / "roster.toml"
    roster.write_bytes(write_roster("bench", members, now).content)
    for home in homes.values():
        install(home, roster, now)
    signatures = {name: sign(home, now)[1] for name, home in homes.items()}
    for name, home in homes.items():
        for other, path in signatures.items():
            if other != name:
                install(home, path, now)
        accept(home, now)
    return homes


def allow(home: Home, config: Config, **changes: Any) -> None:
    """Write a policy that allows this job, but for `changes`."""
    data: dict[str, Any] = {"id": "data"} if config.silo else {"id": "data", "from_job": ["partition", "data"]}
    if config.alignment is not None and config.response is not None:
        path = next((s.data for s in config.silo if s.id == home.id), config.response.data)
        data |= {"path": path, "alignment": config.alignment.model_dump(mode="json"), "fewest": 1}
        data |= {"response": list(config.response.columns)} if config.response.silo == home.id else {}
    policy = {
        "format": 1,
        "rosters": [home.roster(datetime.datetime.now(datetime.UTC)).hash.hex()],
        "algorithms": [config.algorithm.name],
        "aggregations": ["masked", "plain", "homomorphic"],
        "min_cohort": 3,
        "max_rounds": 10**6,
        "disclosures": ["person_rows"] if config.vertical else ["final_likelihood"],
        **({"max_missing": len(silo_ids(config) or ()), "max_differences": 10**6} if config.privacy is None else {}),
        "privacy": {
            "dp": "optional",
            "max_epsilon": 10.0,
            "max_delta": 1e-4,
            "min_noise_multiplier": 0.1,
            "max_retries": 100,
        },
        "model": [{"hash": manifest(config).hash.hex()}],
        "data": [data],
        **changes,
    }
    home.policy_file.write_text(wording.dumps(policy))
    home.policy_file.chmod(0o600)


class Parties:
    """The parties of one job as processes, started, killed and started again."""

    def __init__(self, root: Path, table: Mapping[str, Any], silos: Sequence[str], holder: bool = False) -> None:
        """`table`: the job's configuration. `root`: a new folder for all of it."""
        root.mkdir(parents=True)
        self.root, self.silos, self.out = root, tuple(silos), root / "out"
        self.homes = consortium(root, silos, holder)
        self.path = root / "job.toml"
        self.path.write_text(wording.dumps(dict(table)))
        self.config = read(self.path)
        for home in self.homes.values():
            if home.role != "server" or held_by_server(self.config):
                allow(home, self.config, **({"model": [], "data": []} if home.role == "holder" else {}))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.dialled = self.port  # where silos dial: another port where something stands between
        self._processes: dict[str, Any] = {}

    def role(self, name: str) -> str:
        return self.homes[name].role

    def start(self, name: str) -> None:
        home = str(self.homes[name].path)
        if self.role(name) == "server":
            arguments = ["server", "start", str(self.path), "--home", home, "--out", str(self.out)]
            arguments += ["--listen", f"127.0.0.1:{self.port}"]
        else:
            # Not `--once`: a server that was killed as the job ended needs them again.
            arguments = [self.role(name), "start", "--home", home, "--server", f"127.0.0.1:{self.dialled}"]
            arguments += ["--repeatable"] if self.role(name) == "silo" else []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        process = context.Process(target=_party, args=(arguments, str(self.root / f"{name}.log")), daemon=True)
        process.start()
        self._processes[name] = process

    def kill(self, name: str) -> bool:
        """SIGKILL. Whether its process was still there."""
        self._processes[name].kill()
        self._processes[name].join()
        return bool(self._processes[name].exitcode == -9)

    def left(self, name: str) -> int | None:
        """The exit code; None while the party is at work."""
        code: int | None = self._processes[name].exitcode
        return code

    def wait(self, name: str, seconds: float) -> int | None:
        """The exit code; None where the party is still at work after `seconds`."""
        self._processes[name].join(seconds)
        return self.left(name)

    def stop(self) -> None:
        for name in self._processes:
            self.kill(name)

    def rounds(self) -> int:
        """Rounds that the server has done and written down; 0 before the first."""
        return latest_round(self.out / "checkpoint") or 0

    def wait_for_rounds(self, rounds: int, seconds: float) -> bool:
        """Whether the server has done so many in time; at once false where it has left."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.left(HUB) is None:
            if self.rounds() >= rounds:
                return True
            time.sleep(0.02)
        return self.rounds() >= rounds

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text() if path.exists() else ""


def _party(arguments: list[str], log: str) -> None:
    """What a forked process does: the command line, its words into a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(OMP_NUM_THREADS="1", GRPC_VERBOSITY="ERROR")
    from secure_fvi.cli import main

    main(arguments)


# ---- What a job between sites should have found: the same job in one process, without crashes or with the losses
# that the server's log tells of ----

#: Silos that answered a broadcast, by its SHA-256.
Answered = Mapping[bytes, frozenset[str]]


class Elsewhere(ProtocolError):
    """A replay asks what the job between sites did not. `back`: the broadcast before, and the silos that answered it
    and not the one before that."""

    def __init__(self, back: tuple[bytes, tuple[str, ...]]) -> None:
        super().__init__("the job took another course: its server's log has no such broadcast")
        self.back = back


class Replayed(LocalEngine):
    """A local engine in which a broadcast reaches only the silos that answered it between sites. claimed: by broadcast,
    silos that came back to it having claimed a question before, and drawn for it, which they were killed in: no log
    tells of that, and they draw by the next number."""

    def __init__(self, silos: Mapping[str, Silo], answered: Answered, claimed: Mapping[bytes, Collection[str]]) -> None:
        super().__init__(silos)
        self._answered, self._claimed = answered, claimed
        self._away = set[str]()
        self._back: tuple[bytes, tuple[str, ...]] = b"", ()

    def _deliver(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        first = next(iter(messages.values()))
        if first[:1] == ROUND:
            digest = hashlib.sha256(first).digest()
            if digest not in self._answered:
                raise Elsewhere(self._back)
            here = {silo: m for silo, m in messages.items() if silo in self._answered[digest]}
            self._back = digest, tuple(sorted(self._away & here.keys()))
            for silo in self._claimed.get(digest, ()):
                past = self.silos[silo].past
                self.silos[silo].past = past._replace(turn=past.turn + 1)
            self._away, messages = {*messages} - {*here}, here
        return super()._deliver(messages)


def _replays(run: Callable[[Mapping[bytes, Collection[str]]], bytes]) -> bytes:
    """What `run` gives by what was claimed, which is found out: as little as the course that the job took allows."""
    claimed: dict[bytes, Collection[str]] = {}
    left: dict[bytes, Iterator[Collection[str]]] = {}
    while True:
        try:
            return run(claimed)
        except Elsewhere as error:
            at, back = error.back
            some = [subset for size in range(1, len(back) + 1) for subset in combinations(back, size)]
            found = next(left.setdefault(at, iter(some)), None)
            if found is None:
                raise
            claimed[at] = found


def answered(log: Path) -> Answered:
    """From the server's log. A broadcast that was sent again after a crash counts as it went the last time."""
    found: dict[bytes, dict[str, bool]] = {}
    for row in rows(log)[1]:
        if row.kind != EXCHANGE:
            continue
        seen = read_exchange(row.fields())
        if seen.step == "broadcast" and seen.sent is not None:
            found.setdefault(seen.sent.digest, {})[seen.peer] = seen.received is not None
    return {digest: frozenset(s for s, came in by.items() if came) for digest, by in found.items()}


def posterior(config: Config, answers: Answered | None = None, kept_in: Path | None = None) -> bytes:
    """posterior.safetensors of the job with all parties in this process. kept_in: of a vertical job, where all of its
    result is kept too. Raises ProtocolError where `answers` belong to a job that went otherwise."""
    began, federation = time.monotonic(), federate(config)
    assert isinstance(federation, Federation | VerticalFederation)
    with (
        warnings.catch_warnings(),
        with_threads(federation.threads),
        tempfile.TemporaryDirectory() as folder,
    ):
        warnings.simplefilter("ignore", SecureFVIWarning)
        if isinstance(federation, VerticalFederation):  # whose sums lack nobody
            alone = federation.fit(seed=config.seed, dtype=federation.dtype, compile=config.run.compile)
            alone.save(kept_in or Path(folder))
            return ((kept_in or Path(folder)) / "posterior.safetensors").read_bytes()

        def run(claimed: Mapping[bytes, Collection[str]]) -> bytes:
            server, engine, guards = build_parties(
                federation.model, federation.silos, federation.algorithm, federation.aggregation, config.seed,
                silo_ids=federation.silo_ids, record_ids=federation.record_ids, dtype=federation.dtype,
                compile=config.run.compile,
            )  # fmt: skip
            carrier = engine if answers is None else Replayed(engine.silos, answers, claimed)
            going: Run[Result] = Run(
                RunParties(server, carrier, guards),
                lambda done: result_of(server, carrier, federation.algorithm, federation.aggregation, done),
                began=began,
            )
            going.result().save(Path(folder))
            return (Path(folder) / "posterior.safetensors").read_bytes()

        return _replays(run)
