"""The server's end of what FLARE carries (`flare`): letters to the executors, in FLARE's own process of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from secure_fvi.deployment.home import HOME_VARIABLE, Home
from secure_fvi.deployment.names import parse_table
from secure_fvi.deployment.serving import remote_federation
from secure_fvi.driving import Progress
from secure_fvi.engines.flare_kits import (
    Job,
    ended_file,
    job_file,
)
from secure_fvi.engines.letters import (
    BUSY,
    LETTER,
    Letter,
    check_letter,
    read_letter,
    write_letter,
)
from secure_fvi.engines.remote import Line, Remote, shown
from secure_fvi.engines.stream_messages import Whole
from secure_fvi.errors import InputError, SecureFVIError
from secure_fvi.files import read_bytes, write_atomically
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.reading import read
from secure_fvi.runs.running import execute_federation

_log = logging.getLogger(__name__)

#: Seconds that FLARE waits for a site that may be gone, and until a letter goes out again.
REPLY, _PAUSE = 15.0, 0.2
#: Seconds of silence after which a site's process is taken for dead, and at the start, for not there yet.
SILENCE, START = 45.0, 120.0
_SAY = 60.0  # seconds between two lines of the log


class Ended(SecureFVIError):
    """This job of FLARE cannot go on; the next one can."""


class Post(NamedTuple):
    """What FLARE's server gives a carrier. send: a letter to a site, and what came back; over: whether the job is to
    end."""

    send: Callable[[str, bytes], Mapping[str, Any]]
    over: Callable[[], bool]

    def carrier(self, line: Line, *_: Any) -> FlareCarrier:
        """Of what a `StreamServer` takes, address and TLS are FLARE's here."""
        return FlareCarrier(line, self)


class FlareCarrier(Remote):
    """Letters to the executors, in auxiliary messages. A site's name is the same in FLARE and in the roster."""

    port = 0  # nobody dials in

    def __init__(self, line: Line, post: Post) -> None:
        super().__init__(line)
        self._send, self._over = post
        self._threads = ThreadPoolExecutor(2 * (len(line.names) + len(line.others)), "ask")
        self._heard: dict[str, float] = {}  # by site, when it last said anything

    def _deliver(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        self._asked, self._answers = dict(messages), {}
        began = time.monotonic()
        letters = {site: self._letter(site, body) for site, body in messages.items()}
        flying: dict[str, Future[Mapping[str, Any]]] = {}
        again = dict.fromkeys(messages, began)  # by site, when it is asked again
        while not self._settled(began):
            for site in messages.keys() - self._answers.keys() - flying.keys():
                if time.monotonic() >= again[site]:
                    flying[site] = self._threads.submit(self._send, site, letters[site][0])
            wait(flying.values(), _PAUSE, FIRST_COMPLETED)
            for site in [s for s, asked in flying.items() if asked.done()]:
                reply = self._said(flying.pop(site))
                self._take(site, reply, letters[site][1])
                again[site] = time.monotonic() + (0 if reply.get(BUSY) else _PAUSE)
            self._check(began)
        answers, self._asked = self._answers, {}
        self._absent |= messages.keys() - answers.keys()
        return {site: answers[site].message for site in messages if self._usable(site, answers.get(site))}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _said(asked: Future[Mapping[str, Any]]) -> Mapping[str, Any]:
        """What FLARE brought back. Whatever its network makes it raise is nobody's word: nothing came back."""
        try:
            return asked.result()
        except Exception as error:
            _log.warning("FLARE could not bring a letter (%s)", type(error).__name__)
            return {}

    def _letter(self, site: str, body: bytes) -> tuple[bytes, bytes]:
        return write_letter(Letter(self._home.id, site, self._job, secrets.token_bytes(32), 0, body), self._home)

    def _take(self, site: str, reply: Mapping[str, Any], question: bytes) -> None:
        """What a site said; what is wrong with it is told, and the same letter goes out again."""
        if reply.get(BUSY):
            self._heard[site] = time.monotonic()
            return
        content = reply.get(LETTER)
        if not isinstance(content, bytes):
            return  # FLARE's own word for a site that is not there
        try:
            letter, _ = read_letter(content, self._home, "silo", "holder", most=self.longest)
            check_letter(letter, site, self._job, b"", question)
        except SecureFVIError as error:
            _log.warning("what came for '%s' is no answer: %s", site, shown(str(error).encode()))
            return
        self._heard[site] = time.monotonic()
        self._absent.discard(site)
        self._answers[site] = Whole(self.exchanges, letter.status, letter.body)

    def _check(self, began: float) -> None:
        """Raises Ended where FLARE ends the job, or a site that has to be waited for has long said nothing: FLARE does
        not bring a site's process back in the same job."""
        if self._over():
            raise Ended("FLARE ends this job")
        if self.patience.on_loss == "drop":
            return
        clock = time.monotonic()
        for site in self._asked.keys() - self._answers.keys():
            known = site in self._heard
            if clock - max(self._heard.get(site, began), began) >= (SILENCE if known else START):
                raise Ended(f"{self._named(site)} is silent: its process is gone, or was never started")


def serve(home: Home, name: str, carrier: Callable[..., FlareCarrier]) -> None:
    """Run the job `name` to its end. Raises what `execute_federation` raises; started again, it goes on."""
    path = job_file(home.path, name)
    job = parse_table(read_bytes(path, f"what job '{name}' is"), Job, f"'{path}'")
    config = read(Path(job.config), job.overrides)
    folder = RunDirectory(Path(job.out))
    federation = remote_federation(config, home, folder, "", sandbox=job.sandbox)
    execute_federation(dataclasses.replace(federation, carrier=carrier), folder, True, _said())


def _said() -> Callable[[Progress], None]:
    """A line in the log every minute."""
    last = time.monotonic()

    def note(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= _SAY or progress.round == 1:
            last = time.monotonic()
            _log.info("round %d of at most %d", progress.round, progress.max_rounds)

    return note


def left(name: str, incarnation: str, again: bool, text: str) -> None:
    """What the launcher reads of its own job of FLARE: whether the job may be submitted again, and why it has ended."""
    with contextlib.suppress(OSError, SecureFVIError):
        path = ended_file(home_of_environment().path, name, incarnation)
        write_atomically(path, f"{'again' if again else 'over'}\n{text}".encode())


def home_of_environment() -> Home:
    """The server's folder, which its own environment names. Raises InputError where it names none."""
    folder = os.environ.get(HOME_VARIABLE)
    if not folder:
        raise InputError(f"the environment of FLARE's process names no {HOME_VARIABLE}; use `secure-fvi flare start`")
    return Home(Path(folder))
