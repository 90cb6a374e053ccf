"""The fence: a model's code runs in a process of its own that has no network, no key, no data and no file but the
model's, and what comes back is a graph of tensor operations (`secure_fvi.exported`), which is data.

The boundary is the operating system's: bubblewrap makes namespaces in which nothing else is there, drops all
privileges and kills the process with its parent; a seccomp filter forbids new processes, programs and sockets; limits
hold for memory, files and time (`fenced.py`, which the process itself runs).

The files of the model are those whose bytes were hashed: they are written from memory into a new folder, so that
nothing else can be read there, and nothing can be exchanged in between.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

import pyro
import torch

import secure_fvi
from secure_fvi.aggregation.store import Sealer
from secure_fvi.deployment.model_hash import Closure, package_digest, read_model
from secure_fvi.deployment.names import printable
from secure_fvi.deployment.session_messages import pack_schema
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.exported import Elsewhere, Program, read_program
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.files import write_atomically
from secure_fvi.runs.config import Config
from secure_fvi.runs.records import model_of

_log = logging.getLogger(__name__)

#: What a traced program may weigh, and what it may cost to trace it: bytes, bytes of address space beyond what Python
#: and PyTorch have when it begins, bytes of each of two folders in memory, seconds, seconds of computation.
MOST_BYTES = 1 << 28
_MEMORY = 8 << 30
_FOLDER = 1 << 28
_SECONDS = 600
CPU_SECONDS = 540
#: What it may cost to read it, and to run it on made data: bytes of address space, seconds.
_CHECK_MEMORY, _CHECK_SECONDS = 4 << 30, 90.0
MOST_THREADS = 1024
#: Libraries alone: no program is started there, and below /usr and /usr/local a site may keep what it likes.
_SYSTEM = (
    "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64",
    "/etc/ld.so.cache", "/etc/ld.so.conf", _CONFIGURED := "/etc/ld.so.conf.d",
)  # fmt: skip
MODEL, _SCRATCH = "/fence/model", "/fence/scratch"
UNFENCED = 'sandbox = "off": the code of the model runs in the process that holds this site\'s keys and data'
_WITHOUT = 'set sandbox = "off" to run the model\'s code unfenced'


_answers: dict[bytes, bytes] = {}  # the last one, by what was asked


@cache
def _tool(what: str = "model code", without: str = _WITHOUT) -> str:
    """The path of bubblewrap. Raises InputError where it is not here or may not make namespaces; `what` is to run in
    it, or `without`."""
    found = shutil.which("bwrap")
    otherwise = f"install bubblewrap (the package 'bubblewrap'), or {without}"
    if found is None:
        raise InputError(f"{what} runs in a sandbox, and there is no 'bwrap' here: {otherwise}")
    tried = subprocess.run([*_walls(found), "--ro-bind", "/", "/", "true"], capture_output=True, check=False)
    if tried.returncode:
        said = printable(tried.stderr.decode(errors="replace").strip(), 200)
        raise InputError(f"{what} runs in a sandbox, and 'bwrap' makes none here ({said}): {otherwise}")
    return found


def check_fence() -> None:
    """Raises InputError, with what to do, where no sandbox can be made on this machine."""
    _tool()


def _walls(tool: str) -> list[str]:
    """Namespaces of its own for all that Linux has them for; no privilege, no terminal, no life after the parent's."""
    return [
        tool, "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL",
        "--uid", "65534", "--gid", "65534",
        "--die-with-parent",
        "--new-session", "--clearenv",
    ]  # fmt: skip


class KeptTrace:
    """What the fence made of a model, in a file of this party's job, sealed: a process that takes the job up again need
    not trace. It holds for these files of the model, of this package, under this Python, PyTorch and Pyro alone."""

    def __init__(self, path: Path, secret: Callable[[], bytes]) -> None:
        """secret: `Home.state_secret`, which is asked for once there is something to seal or to open."""
        self._path, self._secret = path, secret

    def __repr__(self) -> str:
        return f"KeptTrace({str(self._path)!r})"

    @cached_property
    def _sealer(self) -> Sealer:
        return Sealer(self._secret(), f"trace/{self._path.parent.name}".encode())

    @staticmethod
    def _name(asked: bytes) -> str:
        here = (platform.machine(), sys.version, torch.__version__, pyro.__version__)
        return hashlib.sha256(repr((package_digest(), here)).encode() + asked).hexdigest()

    def read(self, asked: bytes) -> bytes | None:
        """What was made of this. None where nothing was, or what lies there was altered, or is of something else."""
        try:
            content = self._path.read_bytes()
            return self._sealer.open(self._name(asked), content)
        except (InputError, OSError):
            return None

    def write(self, asked: bytes, content: bytes) -> None:
        """In the place of what was there."""
        with contextlib.suppress(OSError):  # a job that can keep nothing ends where it has to
            write_atomically(self._path, self._sealer.seal(self._name(asked), content), private=True)


@dataclass(frozen=True, eq=False)
class FencedModel:
    """A function of a file, which only the fence calls. hidden: this site's folders, should they lie below Python's."""

    closure: Closure
    function: str
    record_plate: str | None
    silo_sites: tuple[str, ...] | None
    start: Mapping[str, Any]
    hidden: tuple[Path, ...] = ()
    kept: KeptTrace | None = None

    @property
    def roles(self) -> FederatedModel:
        """Plate and silo sites."""
        return FederatedModel(_gone, **roles_of(self.record_plate, self.silo_sites))

    def exported(self, schema: Schema, dtype: torch.dtype) -> Program:
        """What the fence makes of the program. Raises InputError for what the fence or the program cannot do."""
        request = {
            "function": self.function,
            "record_plate": self.record_plate,
            "silo_sites": self.silo_sites,
            "start": dict(self.start),
            "dtype": "float64" if dtype == torch.float64 else "float32",
            "memory": _MEMORY,
            "threads": MOST_THREADS,
        }
        asked = json.dumps(request, allow_nan=False).encode()
        message = len(asked).to_bytes(8, "big") + asked + pack_schema(schema)
        sources = sorted(self.closure.sources.items())
        key = hashlib.sha256(repr(sources).encode() + message).digest()
        if key not in _answers:  # a job that is taken up again asks for the same
            _answers.clear()
            content = None if self.kept is None else self.kept.read(key)
            if content is None:
                content = _traced(self.closure, message, pack_schema(schema), self.hidden)
                if self.kept is not None:
                    self.kept.write(key, content)
            _answers[key] = content
        program = read_program(_answers[key], schema, checked=True)
        if program.start.z_global.dtype != dtype:
            raise InputError("what was traced of the model has another type of numbers than the run")
        for words in program.warnings:
            warnings.warn(words, SecureFVIWarning, stacklevel=2)
        _log.info("the model was traced in a sandbox: %r", program.evaluate)
        return program


def roles_of(record_plate: str | None, silo_sites: Iterable[str] | None) -> dict[str, Any]:
    named = {"record_plate": record_plate, "silo_sites": None if silo_sites is None else tuple(silo_sites)}
    return {name: value for name, value in named.items() if value is not None}


def _gone(*_: Any, **__: Any) -> NoReturn:
    raise InputError(
        "the model's code is not in this process: it was traced in a sandbox. To predict, fit or load it with the model"
    )


def model_for(
    config: Config,
    sandbox: Literal["required", "off"],
    agreed: bytes | None,
    package: bytes | None,
    *hidden: Path,
    kept: KeptTrace | None = None,
) -> tuple[FederatedModel | Elsewhere, str]:
    """The model of `config` for a process that holds keys and data, in `hidden`; and what it is called.

    A program that secure_fvi ships is as trusted as the package is. A function of a file is left to the fence, or,
    where sandbox = "off", run here, with a warning. agreed: the hash that its files must have, of the secure_fvi that
    `package` names. Raises InputError where they have another, or there is no sandbox.
    """
    if config.model.function is None:
        return model_of(config)
    path, _, name = config.model.function.rpartition(":")
    read = read_model(config, config.model.function, package)
    if agreed is not None and read.manifest.hash != agreed:
        raise InputError(f"'{path}' was altered since its hash was compared")
    if sandbox == "off":
        _log.warning("%s", UNFENCED)
        return model_of(config)
    check_fence()
    model = config.model
    fenced = FencedModel(read.closure, name, model.record_plate, model.silo_sites, dict(model.start), hidden, kept)
    return fenced, f"{name} in {Path(path).name}"


def _traced(closure: Closure, request: bytes, schema: bytes, hidden: tuple[Path, ...]) -> bytes:
    """The program that the fence makes of `request`, and that a second one, in which the author's code never ran, has
    read and run on made data: what an operation costs is known once it has run, so that it does where limits hold.
    Raises InputError with the words of the one that fails."""
    with _Fenced("serve()", hidden, closure) as tracing, _checker(hidden) as checking:  # both start now
        content = tracing.answer(request, _SECONDS)
        checking.answer(len(schema).to_bytes(8, "big") + schema + content, _CHECK_SECONDS)
        return content


def _checker(hidden: Iterable[Path] = ()) -> _Fenced:
    return _Fenced(f"serve_check({_CHECK_MEMORY}, {math.ceil(_CHECK_SECONDS)})", hidden)


class _Fenced(contextlib.ExitStack):
    """A process in the fence that waits for one request, with the files of `closure`. It ends with the `with`."""

    def __init__(self, entry: str, hidden: Iterable[Path], closure: Closure | None = None) -> None:
        super().__init__()
        with contextlib.ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="secure-fvi-fence-")))
            self._said = undo.enter_context(tempfile.TemporaryFile())
            if closure is not None:
                _lay_out(closure, folder)
            command = [*_command(folder, hidden), *_python(entry)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said}
            process = subprocess.Popen(command, env={}, **pipes)  # bubblewrap's own process would keep one
            self._process = undo.enter_context(process)
            undo.callback(self._process.kill)
            self.push(undo.pop_all())

    def answer(self, request: bytes, seconds: float) -> bytes:
        """What it says to `request`. Raises InputError with its words where it fails."""
        process, said = self._process, self._said
        clock = threading.Timer(seconds, process.kill)
        clock.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(request)
            answer = process.stdout.read(MOST_BYTES + 2)
        finally:
            process.kill()
            process.wait()
            clock.cancel()
        if answer[:1] == b"P" and len(answer) <= MOST_BYTES + 1:
            return bytes(answer[1:])
        if answer[:1] == b"E":
            raise InputError(printable(answer[1:4000].decode(errors="replace"), 4000))
        said.seek(max(0, said.seek(0, os.SEEK_END) - 1000))
        last = said.read(1000).decode(errors="replace").strip().rpartition("\n")[2]
        raise InputError(
            f"model.function: its process ended without an answer{': ' if last else ''}{printable(last, 300)}"
        )


#: Numbers of system calls: x86-64, arm64. New programs, other processes' memory and files, sockets, mounts,
#: kernel interfaces, memory that is in no address space.
_FORBIDDEN: Mapping[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "socket": (41, 198), "socketpair": (53, 199),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "open_by_handle_at": (304, 265), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsmount": (432, 432), "memfd_secret": (447, 447),
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "mq_open": (240, 180), "semget": (64, 190),
    "landlock_create_ruleset": (444, 444),
}  # fmt: skip
#: Of those what a program needs that starts others and speaks over a network; and the sockets that it may open: IPv4,
#: IPv6, and what asks the kernel for addresses (of its family protocol 0, others tell of the machine's devices and
#: connections). And pairs of streams, which go nowhere else: one of datagrams sends to any service of the machine.
_OF_CARRIERS = frozenset(("fork", "vfork", "execve", "execveat", "socket", "socketpair"))
_FAMILIES, _NETLINK, _STREAM = (2, 10), 16, 1
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 56, 317), "aarch64": (1, 0xC00000B7, 220, 277)}
_CLONE3, _CLONE_THREAD = 435, 0x10000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38


def call_filter(carrier: bool = False) -> tuple[bytes, int]:
    """The seccomp filter as the kernel reads it, and the number of the call that installs it; nothing on machines that
    it is not known for. carrier: of a program that starts others and opens sockets as above."""
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return b"", 0
    column, architecture, clone, seccomp = known
    named = {name: calls[column] for name, calls in _FORBIDDEN.items() if calls[column] is not None}
    numbers = [number for name, number in named.items() if not (carrier and name in _OF_CARRIERS)]

    def step(code: int, yes: int, no: int, k: int) -> bytes:
        return struct.pack("=HBBI", code, yes, no, k)

    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    steps = [step(load, 0, 0, 4), step(equal, 1, 0, architecture), step(end, 0, 0, _KILL), step(load, 0, 0, 0)]
    steps += [step(at_least, 0, 1, 0x40000000), step(end, 0, 0, _KILL)]  # the x32 calls have other numbers
    for number in numbers:
        steps += [step(equal, 0, 1, int(number or 0)), step(end, 0, 0, _ERRNO | _EPERM)]
    if carrier:
        let, refuse = step(end, 0, 0, _ALLOW), step(end, 0, 0, _ERRNO | _EPERM)
        family, kind, protocol = (step(load, 0, 0, at) for at in (16, 24, 32))  # the call's arguments
        opened = [family, *(part for number in _FAMILIES for part in (step(equal, 0, 1, number), let))]
        opened += [step(equal, 0, 3, _NETLINK), protocol, step(equal, 0, 1, 0), let, refuse]
        paired = [kind, step(0x54, 0, 0, 0xF), step(equal, 0, 1, _STREAM), let, refuse]  # without what may be or-ed in
        for name, asked in (("socket", opened), ("socketpair", paired)):
            steps += [step(equal, 0, len(asked), int(named[name] or 0)), *asked]
        return b"".join([*steps, let]), seccomp
    steps += [step(equal, 0, 1, _CLONE3), step(end, 0, 0, _ERRNO | _ENOSYS)]  # its flags lie in memory: libc falls back
    steps += [step(equal, 0, 3, clone), step(load, 0, 0, 16), step(any_bit, 1, 0, _CLONE_THREAD)]
    steps += [step(end, 0, 0, _ERRNO | _EPERM), step(end, 0, 0, _ALLOW)]
    return b"".join(steps), seccomp


#: What a program needs besides to find others in a network, and what a site says of proxies on its way there.
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services", "/etc/localtime")
_PASSED = ("http_proxy", "https_proxy", "no_proxy", "grpc_proxy", "OMP_NUM_THREADS", "TZ")


def carrying(
    workspace: Path, doors: Sequence[Path], told: Mapping[str, str], hidden: Iterable[Path], calls: int | None
) -> list[str]:
    """Bubblewrap for a Python program that carries messages over the network and is to see nothing else of this
    machine: Python and the installed packages, to be read; `workspace`, to be written under its own name; and `doors`,
    the files by which it hands them over. told: of its environment. hidden: this site's folders, as in `FencedModel`.
    calls: a file descriptor with `call_filter(carrier=True)`. It is to be started without an environment, which its
    first process would keep, and with no file of this process. Raises InputError where no sandbox can be made."""
    tool = _tool("FLARE's process at a site", "start it with --sandbox off, by which FLARE's server reads what you may")
    command = [*_walls(tool), "--share-net", "--dev", "/dev", "--tmpfs", "/tmp"]
    command += ["--proc", "/proc", "--remount-ro", "/proc"]  # of root's, the machine's own settings lie there
    shown = (*_SYSTEM, *_NETWORK, *_places())
    for place in map(Path, shown):
        if place.exists() and workspace.resolve().is_relative_to(place.resolve()):
            raise InputError(f"'{workspace}' lies below '{place}', which FLARE's process is to read: move the home")
    command += _bound(shown, hidden)
    for own in map(str, (workspace.resolve(), *doors)):
        command += ["--bind", own, own]
    command += [] if calls is None else ["--seccomp", str(calls)]
    passed = {n: os.environ[n] for name in _PASSED for n in (name, name.upper()) if n in os.environ}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
    ours = {
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PATH": path,
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": str(_package().parent),
    }
    for name, value in {**passed, **ours, **told}.items():
        command += ["--setenv", name, value]
    return [*command, "--chdir", str(workspace.resolve()), "--"]


def _lay_out(closure: Closure, folder: Path) -> None:
    """The model's files and no others: its own as `main/model.py`, what it imports below `modules`."""
    for name, content in closure.sources.items():
        place = folder / ("main/model.py" if name == "<model>" else f"modules/{closure.places[name]}")
        if name.partition(".")[0] == "secure_fvi":
            continue  # the package is there as it is installed
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def _command(folder: Path, hidden: Iterable[Path]) -> list[str]:
    """Bubblewrap with Python, the installed packages and the model's files, all of it read-only, and two folders in
    memory, of `_FOLDER` bytes each. Read-only too are `/dev`, with the `/dev/shm` in it, and `/` itself: bubblewrap
    makes them in memory, and without a size."""
    command = [*_walls(_tool()), "--hostname", "fence", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(_FOLDER), "--tmpfs", "/tmp"]
    command += _bound((*_SYSTEM, *_places()), hidden)
    command += ["--ro-bind", str(folder), MODEL, "--size", str(_FOLDER), "--tmpfs", _SCRATCH]
    command += ["--remount-ro", "/", "--chdir", _SCRATCH]
    for name, value in {
        "HOME": _SCRATCH, "TMPDIR": _SCRATCH, "USER": "model", "LANG": "C.UTF-8", "PATH": "/usr/bin",
        "OMP_NUM_THREADS": "1",
    }.items():  # fmt: skip
        command += ["--setenv", name, value]
    return [*command, "--"]


def _bound(places: Iterable[str], hidden: Iterable[Path]) -> list[str]:
    """To be read: those of `places` that are here, without `hidden`, where a folder of the site lies among them."""
    shown = list(dict.fromkeys(p for p in map(Path, places) if p.exists()))
    command: list[str] = []
    for path in sorted(shown):
        command += ["--ro-bind", str(path), str(path)]
    for path in hidden:
        at = path.resolve()
        for shows in shown if at.exists() else ():  # under each name that it has there, as of /lib, which is /usr/lib
            if at.is_relative_to(shows.resolve()):
                there = str(shows / at.relative_to(shows.resolve()))
                empty = ["--tmpfs", there, "--remount-ro", there]
                command += empty if at.is_dir() else ["--ro-bind", "/dev/null", there]
    return command


def _python(entry: str) -> list[str]:
    """Python without what a site may add to its start: no .pth files, no sitecustomize, no environment. entry: the
    call of a function of `secure_fvi.deployment.fenced`."""
    paths = [str(_package().parent), *_packages(), f"{MODEL}/modules"]
    name = entry.partition("(")[0]
    start = f"import gc, sys; gc.disable(); sys.path += {paths!r}; from secure_fvi.deployment.fenced import {name}"
    start += f"; gc.freeze(); gc.enable(); {entry}"  # what imports made is no garbage, and going through it takes long
    return [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", start]


def _package() -> Path:
    return Path(secure_fvi.__file__).parent


def _packages() -> list[str]:
    """Folders of installed packages."""
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = [*installed, *(p for p in sys.path if Path(p).name in ("site-packages", "dist-packages"))]
    return list(dict.fromkeys(p for p in found if Path(p).is_dir()))


def _places() -> Iterator[str]:
    """Where Python and the installed packages lie, and no more of Python's prefixes: they are /usr or /usr/local in a
    container, or lie beside a site's data. Of a checkout of this one, only the package itself."""
    real = Path(sys.executable).resolve()
    prefixes = sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, str(real.parents[1])
    for prefix in dict.fromkeys(prefixes):
        yield from (str(Path(prefix, name)) for name in ("lib", "lib64", "pyvenv.cfg"))
    yield from (sys.executable, str(real), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    for listed in Path(_CONFIGURED).glob("*.conf"):  # where the system's loader looks, as of a GPU's libraries
        yield from (line.strip() for line in listed.read_text().splitlines() if line.strip().startswith("/"))
    yield from _packages()
    yield str(_package())
    yield from (str(p.resolve()) for p in _package().iterdir() if p.is_symlink())
