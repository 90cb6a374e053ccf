"""NVIDIA FLARE carries the parties: a controller at the server, an executor at each site, of the installed package.

FLARE starts and ends its processes, and brings auxiliary messages from one to the other. Nothing rests on its trust:
what travels are letters, signed by the identities of the roster, and an answer names the letter that it answers; and at
a site FLARE's own processes, which do what its server says, see neither keys nor data: behind a fence, they bring each
letter to the door of the site's own process, which is here; the server's end is `flare_server`. A job of FLARE is one
incarnation of a job of ours; parties go on from their own folders in the next (`secure-fvi flare run`).

server                              site: FLARE              the site itself
Letter(number, job, body)    ->           Letter        ->
                             <-                         <-   Letter(digest of the question, job, status, answer), or
                                                             that it works on it, unsigned
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

from secure_fvi.deployment.fence import call_filter, carrying
from secure_fvi.deployment.home import HOME_VARIABLE, Home
from secure_fvi.deployment.names import printable
from secure_fvi.deployment.policy import read_policy
from secure_fvi.deployment.site import Site, server_of
from secure_fvi.deployment.site_job import Local
from secure_fvi.engines.flare_kits import (
    check_kit,
    check_port,
    command,
    environment,
    key_file_of,
    put_away,
    workspace_of,
)
from secure_fvi.engines.letters import (
    ANSWERED,
    DOOR_VARIABLE,
    DOORS,
    FAILED,
    NUMBER_BYTES,
    OVERHEAD,
    REFUSED,
    WORKING,
    Letter,
    check_letter,
    read_letter,
    write_letter,
)
from secure_fvi.engines.remote import shown
from secure_fvi.engines.stream_client import answered
from secure_fvi.engines.stream_messages import LONGEST
from secure_fvi.errors import InputError, ProtocolError, SecureFVIError
from secure_fvi.key_files import KEY_FILE_VARIABLE, PASSPHRASE_VARIABLE

_log = logging.getLogger(__name__)

#: Seconds after which a site that still computes says so, and until what is not there yet is looked for again.
_HOLD, _PAUSE = 5.0, 0.2
_AGAIN = 5.0  # seconds until a process that has ended is started again
_LAST, _LINE = 10, 400  # lines of what it said that are kept, and bytes of each
UNFENCED = "--sandbox off: FLARE's server can have FLARE read every file here that this user may read"
_REMEMBERED = 1 << 17  # letters that a site has answered, some 15 MB
_HELD = 60.0  # seconds for a folder that a process before may still hold


class _Question(NamedTuple):
    digest: bytes
    answer: Future[bytes]


class SiteParty:
    """The site, in a thread of its own: one question at a time, the last answer kept. An older letter is not answered
    anew: whoever carries letters has them all, no connection names which belong to it, and each is a row of the log."""

    def __init__(self, home: Home, local: Local) -> None:
        self._home = home
        self._thread = ThreadPoolExecutor(1, "site")
        self._lock = threading.Lock()
        self._last: _Question | None = None
        self._before = dict[bytes, None]()  # digests of letters that were answered, the oldest first
        self._site = self._thread.submit(self._open, local)

    def _open(self, local: Local) -> Site:
        until, said = time.monotonic() + _HELD, False
        while True:  # the process of a job before may still hold the folder
            try:
                return Site(self._home, local)
            except InputError as error:
                if time.monotonic() >= until:
                    raise
                if not said:
                    _log.warning("%s; trying again for %d s", error, _HELD)
                said = True
                time.sleep(_PAUSE)

    def opened(self) -> None:
        """Wait until the site is there. Raises InputError where another process holds it."""
        self._site.result()

    @property
    def longest(self) -> int:
        """Bytes of a message that a site takes of its job, at most."""
        return self._site.result().longest() if self._site.done() else LONGEST

    def answer(self, content: bytes) -> bytes | None:
        """The signed answer to a signed letter, None while it is being made. Raises ProtocolError for a letter that
        is not the server's, or an older one than the last."""
        letter, digest = read_letter(content, self._home, "server", most=self.longest)
        check_letter(letter, server_of(self._home).id, letter.job, b"")
        with self._lock:
            if self._last is None or self._last.digest != digest:
                if digest in self._before:
                    raise ProtocolError(f"a letter of '{letter.sender}' that was answered before came again")
                self._before[digest] = None
                if len(self._before) > _REMEMBERED:
                    del self._before[next(iter(self._before))]
                self._last = _Question(digest, self._thread.submit(self._make, letter, digest))
            waited = self._last.answer
        try:
            return waited.result(_HOLD)
        except TimeoutError:
            return None

    def _make(self, letter: Letter, digest: bytes) -> bytes:
        status, body = answered(self._site.result().handle, letter.job, letter.body)
        reply = Letter(self._home.id, letter.sender, letter.job, digest, status, body)
        return write_letter(reply, self._home)[0]

    def close(self) -> None:
        """Let go of the site, to be continued by another process."""

        def close() -> None:
            with contextlib.suppress(SecureFVIError):
                self._site.result().close()

        self._thread.submit(close)
        self._thread.shutdown(wait=True, cancel_futures=False)


class Door:
    """Where FLARE's processes of a site bring letters: two pipes in `folder`, so that it needs no socket of the
    machine's own. Whoever opens them is a job of FLARE, one after the other. Bytes alone pass, and none is unpickled.
    Raises InputError where another process holds the site."""

    def __init__(self, home: Home, local: Local, folder: Path) -> None:
        self.folder, self.paths = folder, tuple(folder / name for name in DOORS)
        for pipe in self.paths[:2]:
            os.mkfifo(pipe, 0o600)
        self.paths[2].touch(0o600)
        self._party, self._open = SiteParty(home, local), True
        self._party.opened()
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def _serve(self) -> None:
        while self._open:
            try:
                with Connection(os.open(self.paths[0], os.O_RDONLY), writable=False) as letters:
                    if self._open:
                        self._talk(letters)
            except Exception:  # whatever a job of FLARE did, the next is let in
                if self.paths[0].exists():
                    _log.exception("a job of FLARE ended here")
                time.sleep(_PAUSE)
            with contextlib.suppress(OSError), self.paths[2].open("rb") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX)  # until who was there has left, and the pipes are empty

    def _talk(self, letters: Connection) -> None:
        with Connection(os.open(self.paths[1], os.O_WRONLY), readable=False) as answers:
            try:
                while True:
                    said = letters.recv_bytes(NUMBER_BYTES + self._party.longest + OVERHEAD)
                    answers.send_bytes(said[:NUMBER_BYTES] + _said_of(self._party, said[NUMBER_BYTES:]))
            except (EOFError, BrokenPipeError):
                return  # FLARE has ended its process
            except OSError as error:
                _log.warning("what a job of FLARE brings is no letter: %s", error)

    def close(self) -> None:
        """Let nobody in any more, and let go of the site."""
        self._open = False
        with contextlib.suppress(OSError):  # it is not waited there
            os.close(os.open(self.paths[0], os.O_WRONLY | os.O_NONBLOCK))
        self._party.close()


def _said_of(party: SiteParty, letter: bytes) -> bytes:
    try:
        answer = party.answer(letter)
    except SecureFVIError as error:
        _log.warning("a letter was refused: %s", shown(str(error).encode()))
        return REFUSED
    except Exception:  # its kind may tell of data: it stays at the site
        _log.exception("a letter could not be answered")
        return FAILED
    return WORKING if answer is None else ANSWERED + answer


def run(kit: Path, home: Home, local: Local | None = None, sandbox: Literal["required", "off"] = "required") -> None:
    """Run it until FLARE's administrator or a signal stops it, and again when it dies.

    FLARE's own code at a site does what its server says: it reads files for it, and writes what it sends. So a silo's
    and a key holder's sees the folder in which it runs, and no more; keys, data and all that is ours are here, behind
    the door to which it brings letters. sandbox: "off" leaves the fence away. Raises InputError where there is none.
    """
    over = workspace_of(home) / "shutdown.fl"  # FLARE's own sign
    check_kit(kit, home)  # before a site's folder is waited for
    if home.role == "server":
        check_port(kit)
    with _around(home, local or Local(), sandbox) as start:
        while True:
            put_away(home)
            process, words = start(command(kit, home)), deque[bytes](maxlen=_LAST)
            try:
                while process.stdout is not None and (line := process.stdout.readline(_LINE)):
                    words.append(line)
                process.wait()
            finally:
                process.terminate()
                process.wait()
            if is_file(over):
                return
            said = printable(b" ".join(words).decode(errors="replace"), 2000)
            _log.warning(
                "FLARE's process of '%s' has ended (%d); it is started again%s", home.id, process.returncode,
                f". Its last words: {said}" if said else "",
            )  # fmt: skip
            time.sleep(_AGAIN)


def is_file(path: Path) -> bool:
    """Whether it is one, and no link: that may lead anywhere, and whether there is something tells of what is there."""
    with contextlib.suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False


@contextlib.contextmanager
def _around(home: Home, local: Local, sandbox: str) -> Iterator[Callable[[list[str]], subprocess.Popen[bytes]]]:
    """What starts FLARE's command at this member: a site's has no file of this process, whose log may be one, and in
    the fence nothing of its environment."""
    if home.role == "server":
        with key_file_of(home) as key_file:
            yield lambda command: subprocess.Popen(command, env=environment(home, key_file), cwd=home.path)
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="secure-fvi-door-"))
        door = stack.enter_context(contextlib.closing(Door(home, local, Path(folder))))
        calls = stack.enter_context(tempfile.TemporaryFile(buffering=0))
        calls.write(call_filter(carrier=True)[0])
        told = {DOOR_VARIABLE: str(door.folder)}
        workspace_of(home).mkdir(mode=0o700, parents=True, exist_ok=True)
        filtered, variables = calls.fileno() if calls.tell() else None, dict[str, str]()
        if sandbox == "off":
            _log.warning("%s", UNFENCED)
            secret = PASSPHRASE_VARIABLE, KEY_FILE_VARIABLE, HOME_VARIABLE
            variables = {n: value for n, value in os.environ.items() if n not in secret} | told

        def fence() -> list[str]:
            """As the site's policy is now."""
            if sandbox == "off":
                return []
            return carrying(workspace_of(home), door.paths, told, _hidden(home, local), filtered)

        def start(command: list[str]) -> subprocess.Popen[bytes]:
            calls.seek(0)
            return subprocess.Popen(
                [*fence(), *command], env=variables, cwd=home.path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, pass_fds=(calls.fileno(),),
            )  # fmt: skip

        fence()  # what it refuses is said before anything is put away
        yield start


def _hidden(home: Home, local: Local) -> list[Path]:
    """What of the site is not to be seen, should it lie below Python's own folders."""
    found = [home.path, *(Path(p) for p in (local.data_dir, os.environ.get(KEY_FILE_VARIABLE)) if p)]
    try:
        return [*found, *read_policy(home.policy_file).files]
    except InputError as error:
        _log.warning("data below Python's own folders would not be hidden from FLARE: %s", error)
        return found
