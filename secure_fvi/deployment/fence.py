"""The fence: a model's code runs in a process of its own that has no network, no key, no data and no file but the
model's, and what comes back is a graph of tensor operations (`secure_fvi.exported`), which is data.

The boundary is the operating system's: bubblewrap makes namespaces in which nothing else is there, drops all
privileges and kills the process with its parent; a seccomp filter forbids new processes, programs and sockets; limits
hold for memory, files and time. Python's audit hook only keeps a list for the error message: code can get round it.

The files of the model are those whose bytes were hashed: they are written from memory into a new folder, so that
nothing else can be read there, and nothing can be exchanged in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import math
import mmap
import os
import platform
import resource
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

import torch

import secure_fvi
from secure_fvi.deployment.model_hash import Closure, read_model
from secure_fvi.deployment.names import printable
from secure_fvi.deployment.session_messages import pack_schema, unpack_schema
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.exported import Elsewhere, Program, export, read_program
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.runs.config import Config
from secure_fvi.runs.records import model_of, python_function

_log = logging.getLogger(__name__)

#: What a traced program may weigh, and what it may cost to trace it: bytes, bytes of address space beyond what Python
#: and PyTorch have when it begins, bytes of each of two folders in memory, seconds, seconds of computation.
MOST_BYTES = 1 << 28
_MEMORY = 8 << 30
_FOLDER = 1 << 28
_SECONDS = 600
_CPU_SECONDS = 540
#: What it may cost to read it, and to run it on made data: bytes of address space, seconds.
_CHECK_MEMORY, _CHECK_SECONDS = 4 << 30, 90.0
_MOST_THREADS = 1024
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
_MODEL, _SCRATCH = "/fence/model", "/fence/scratch"
UNFENCED = 'sandbox = "off": the code of the model runs in the process that holds this site\'s keys and data'
_WITHOUT = "install bubblewrap (the package 'bubblewrap'), or set sandbox = \"off\" to run the model's code unfenced"


_answers: dict[bytes, bytes] = {}  # the last one, by what was asked


@cache
def _tool() -> str:
    """The path of bubblewrap. Raises InputError where it is not here or may not make namespaces."""
    found = shutil.which("bwrap")
    if found is None:
        raise InputError(f"model code runs in a sandbox, and there is no 'bwrap' here: {_WITHOUT}")
    tried = subprocess.run([*_walls(found), "--ro-bind", "/", "/", "true"], capture_output=True, check=False)
    if tried.returncode:
        said = printable(tried.stderr.decode(errors="replace").strip(), 200)
        raise InputError(f"model code runs in a sandbox, and 'bwrap' makes none here ({said}): {_WITHOUT}")
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


@dataclass(frozen=True, eq=False)
class FencedModel:
    """A function of a file, which only the fence calls. hidden: this site's folders, should they lie below Python's."""

    closure: Closure
    function: str
    record_plate: str | None
    silo_sites: tuple[str, ...] | None
    start: Mapping[str, Any]
    hidden: tuple[Path, ...] = ()

    @property
    def roles(self) -> FederatedModel:
        """Plate and silo sites."""
        return FederatedModel(_gone, **_roles(self.record_plate, self.silo_sites))

    def exported(self, schema: Schema, dtype: torch.dtype) -> Program:
        """What the fence makes of the program. Raises InputError for what the fence or the program cannot do."""
        request = {
            "function": self.function,
            "record_plate": self.record_plate,
            "silo_sites": self.silo_sites,
            "start": dict(self.start),
            "dtype": "float64" if dtype == torch.float64 else "float32",
            "memory": _MEMORY,
            "threads": _MOST_THREADS,
        }
        asked = json.dumps(request, allow_nan=False).encode()
        message = len(asked).to_bytes(8, "big") + asked + pack_schema(schema)
        sources = sorted(self.closure.sources.items())
        key = hashlib.sha256(repr(sources).encode() + message).digest()
        if key not in _answers:  # a job that is taken up again asks for the same
            _answers.clear()
            _answers[key] = _traced(self.closure, message, pack_schema(schema), self.hidden)
        program = read_program(_answers[key], schema, checked=True)
        if program.start.z_global.dtype != dtype:
            raise InputError("what was traced of the model has another type of numbers than the run")
        for words in program.warnings:
            warnings.warn(words, SecureFVIWarning, stacklevel=2)
        _log.info("the model was traced in a sandbox: %r", program.evaluate)
        return program


def _roles(record_plate: str | None, silo_sites: Iterable[str] | None) -> dict[str, Any]:
    named = {"record_plate": record_plate, "silo_sites": None if silo_sites is None else tuple(silo_sites)}
    return {name: value for name, value in named.items() if value is not None}


def _gone(*_: Any, **__: Any) -> NoReturn:
    raise InputError(
        "the model's code is not in this process: it was traced in a sandbox. To predict, fit or load it with the model"
    )


def model_for(
    config: Config, sandbox: Literal["required", "off"], agreed: bytes | None, package: bytes | None, *hidden: Path
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
    fenced = FencedModel(read.closure, name, model.record_plate, model.silo_sites, dict(model.start), hidden)
    return fenced, f"{name} in {Path(path).name}"


# ---- the parent's side ----


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
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said)
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
    shown = [p for p in map(Path, (*_SYSTEM, *_places())) if p.exists()]
    command = [*_walls(_tool()), "--hostname", "fence", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(_FOLDER), "--tmpfs", "/tmp"]
    for path in sorted(shown):
        command += ["--ro-bind", str(path), str(path)]
    for path in hidden:  # where a folder of the site lies among these
        at = path.resolve()
        if any(at.is_relative_to(p.resolve()) for p in shown) and at.exists():
            empty = ["--tmpfs", str(at), "--remount-ro", str(at)]
            command += empty if at.is_dir() else ["--ro-bind", "/dev/null", str(at)]
    command += ["--ro-bind", str(folder), _MODEL, "--size", str(_FOLDER), "--tmpfs", _SCRATCH]
    command += ["--remount-ro", "/", "--chdir", _SCRATCH]
    for name, value in {
        "HOME": _SCRATCH, "TMPDIR": _SCRATCH, "USER": "model", "LANG": "C.UTF-8", "PATH": "/usr/bin",
        "OMP_NUM_THREADS": "1",
    }.items():  # fmt: skip
        command += ["--setenv", name, value]
    return [*command, "--"]


def _python(entry: str) -> list[str]:
    """Python without what a site may add to its start: no .pth files, no sitecustomize, no environment. entry: the
    call of a function below."""
    paths = [str(_package().parent), *_packages(), f"{_MODEL}/modules"]
    start = (
        f"import sys; sys.path += {paths!r}; from secure_fvi.deployment.fence import {entry.partition('(')[0]}; {entry}"
    )
    return [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", start]


def _package() -> Path:
    return Path(secure_fvi.__file__).parent


def _packages() -> list[str]:
    """Folders of installed packages."""
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = [*installed, *(p for p in sys.path if Path(p).name in ("site-packages", "dist-packages"))]
    return list(dict.fromkeys(p for p in found if Path(p).is_dir()))


def _places() -> Iterator[str]:
    """Where Python and the installed packages lie. Of a checkout of this one, only the package itself."""
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parent.parent))
    yield from _packages()
    yield str(_package())
    yield from (str(p.resolve()) for p in _package().iterdir() if p.is_symlink())


# ---- the child's side: from here on, in the fence ----


def serve() -> None:
    """Answer the one request on the standard input, and end. Only `_python` starts this."""
    out, first, rest = _request()
    asked, schema = json.loads(first), unpack_schema(rest)
    _limit(asked["memory"], _CPU_SECONDS, asked["threads"])
    tried: list[str] = []
    _listen(tried)
    forbid()
    try:
        path = Path(_MODEL, "main", "model.py")
        fn = python_function(path, asked["function"], "model.function")
        model = FederatedModel(fn, start=asked["start"], **_roles(asked["record_plate"], asked["silo_sites"]))
        answer = b"P" + export(model, schema, torch.float64 if asked["dtype"] == "float64" else torch.float32)
    except Exception as error:  # whatever an author's code raises
        words = str(error) if isinstance(error, InputError) else f"the model fails: {type(error).__name__}: {error}"
        if tried:
            words += f" (in the sandbox it tried {', '.join(tried[:3])}, and has only the files that its hash names)"
        answer = b"E" + words.encode(errors="replace")
    _respond(out, answer)


def serve_check(memory: int, seconds: int) -> None:
    """Read and run what was traced, on made data, and say whether it is a program. Only `_python` starts this."""
    out, schema, content = _request()
    _limit(memory, seconds)
    forbid()
    try:
        read_program(content, unpack_schema(schema))
        answer = b"P"
    except InputError as error:
        answer = b"E" + str(error).encode(errors="replace")
    _respond(out, answer)


def _request() -> tuple[BinaryIO, bytes, bytes]:
    """Where the answer goes, and the two parts of what was asked."""
    # What the first graph loads: before the limits, of which it would take a part, and before what is opened is noted.
    import torch._inductor.config

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a program prints is no answer
    torch.set_num_threads(1)
    request = sys.stdin.buffer.read()
    length = int.from_bytes(request[:8], "big")
    return out, request[8 : 8 + length], request[8 + length :]


def _respond(out: BinaryIO, answer: bytes) -> NoReturn:
    out.write(answer)
    out.flush()
    os._exit(0)


def _limit(memory: int, seconds: int, threads: int = _MOST_THREADS) -> None:
    """Of address space, since a limit of data counts neither shared memory nor pages that are made read-only. What it
    does not count, memory that a file or a segment holds and no process has mapped, `_FORBIDDEN` and `_command` bar.

    Linux counts threads from 5.14 on for the sandbox alone, before that for all that its user runs; root's, never.
    """
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    counted = (major, minor) >= (5, 14)
    for what, most in (
        *([(resource.RLIMIT_NPROC, threads)] if counted else []),
        (resource.RLIMIT_AS, _mapped() + memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 1 << 28),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _mapped() -> int:
    """Bytes of address space of this process, to a MiB above: the least limit under which it may map another page.
    There is no `/proc` here to say it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    low, high = 0, 1 << 47 if hard == resource.RLIM_INFINITY else hard
    while high - low > 1 << 20:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_AS, (middle, hard))
        try:
            mmap.mmap(-1, mmap.PAGESIZE).close()
            high = middle
        except (OSError, MemoryError):
            low = middle
    return high


def _listen(tried: list[str]) -> None:
    """Note what a program asks for that the fence does not have, for the message. A note, no protection."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        with contextlib.suppress(Exception):
            if event == "open" and _missing(args[0]):
                tried.append(f"to open '{args[0]}'")
            elif event in ("socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
                tried.append(event)

    sys.addaudithook(hook)


def _missing(path: Any) -> bool:
    return isinstance(path, str) and "__pycache__" not in path and not Path(path).exists()


#: Numbers of system calls: x86-64, arm64. New programs, other processes' memory, sockets, mounts, kernel interfaces,
#: memory that is in no address space.
_FORBIDDEN: Mapping[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "socket": (41, 198), "socketpair": (53, 199),
    "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "open_by_handle_at": (304, 265), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsmount": (432, 432), "memfd_secret": (447, 447),
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "mq_open": (240, 180),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 56, 317), "aarch64": (1, 0xC00000B7, 220, 277)}
_CLONE3, _CLONE_THREAD = 435, 0x10000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38


def _filter() -> tuple[bytes, int]:
    """The seccomp filter as the kernel reads it, and the number of the call that installs it; nothing on others."""
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return b"", 0
    column, architecture, clone, seccomp = known
    numbers = [calls[column] for calls in _FORBIDDEN.values() if calls[column] is not None]

    def step(code: int, yes: int, no: int, k: int) -> bytes:
        return struct.pack("=HBBI", code, yes, no, k)

    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    steps = [step(load, 0, 0, 4), step(equal, 1, 0, architecture), step(end, 0, 0, _KILL), step(load, 0, 0, 0)]
    steps += [step(at_least, 0, 1, 0x40000000), step(end, 0, 0, _KILL)]  # the x32 calls have other numbers
    for number in numbers:
        steps += [step(equal, 0, 1, int(number or 0)), step(end, 0, 0, _ERRNO | _EPERM)]
    steps += [step(equal, 0, 1, _CLONE3), step(end, 0, 0, _ERRNO | _ENOSYS)]  # its flags lie in memory: libc falls back
    steps += [step(equal, 0, 3, clone), step(load, 0, 0, 16), step(any_bit, 1, 0, _CLONE_THREAD)]
    steps += [step(end, 0, 0, _ERRNO | _EPERM), step(end, 0, 0, _ALLOW)]
    return b"".join(steps), seccomp


def forbid() -> None:
    """From now on this process, all of its threads, starts no process and opens no socket."""
    program, seccomp = _filter()
    if not program:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    kept = ctypes.create_string_buffer(program, len(program))
    pointed = struct.pack("@HP", len(program) // 8, ctypes.addressof(kept))
    held = ctypes.create_string_buffer(pointed, len(pointed))
    if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(
        ctypes.c_long(seccomp), ctypes.c_long(1), ctypes.c_long(1), ctypes.c_void_p(ctypes.addressof(held))
    ):  # no new privileges; filter
        raise InputError(f"the sandbox takes no system call filter ({os.strerror(ctypes.get_errno())})")
