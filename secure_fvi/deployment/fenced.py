"""What the process in the fence (`fence.py`) runs: it forbids itself what it may not do, and traces a model's code, or
reads what another has traced. Never imported by a process that holds keys or data.

Limits of memory, files and time and a seccomp filter stand beside bubblewrap's namespaces. Python's audit hook only
keeps a list for the error message: code can get round it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import resource
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from secure_fvi.deployment.fence import CPU_SECONDS, MODEL, MOST_THREADS, roles_of
from secure_fvi.deployment.session_messages import unpack_schema
from secure_fvi.errors import InputError
from secure_fvi.export import export
from secure_fvi.exported import read_program
from secure_fvi.federated_model import FederatedModel
from secure_fvi.runs.records import python_function


def serve() -> None:
    """Answer the one request on the standard input, and end. Only `_python` starts this."""
    out, first, rest = _request()
    asked, schema = json.loads(first), unpack_schema(rest)
    _limit(asked["memory"], CPU_SECONDS, asked["threads"])
    tried: list[str] = []
    _listen(tried)
    forbid()
    try:
        path = Path(MODEL, "main", "model.py")
        fn = python_function(path, asked["function"], "model.function")
        model = FederatedModel(fn, start=asked["start"], **roles_of(asked["record_plate"], asked["silo_sites"]))
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


def _limit(memory: int, seconds: int, threads: int = MOST_THREADS) -> None:
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
