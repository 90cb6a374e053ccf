"""Model code runs in a sandbox: what its hash does not name is not there, and a site's keys, data and network are not.

The tests that need a sandbox are left out where bubblewrap is missing or may not make namespaces, and say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import socket
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from click.testing import CliRunner
from consortium_run import SILOS, Job
from deployment_world import NOW, World
from programs import altered

from secure_fvi import exported
from secure_fvi.cli import cli
from secure_fvi.deployment import fence
from secure_fvi.deployment.countersigning import open_trail
from secure_fvi.deployment.deciding import decide
from secure_fvi.deployment.fence import FencedModel, KeptTrace, check_fence, model_for
from secure_fvi.deployment.fenced import export
from secure_fvi.deployment.job import make_offer, sign_offer
from secure_fvi.deployment.model_hash import Closure, closure, manifest, package_digest
from secure_fvi.deployment.policy import files_of, read_policy
from secure_fvi.deployment.policy_check import check
from secure_fvi.deployment.session_messages import pack_schema
from secure_fvi.deployment.trail_verify import rows
from secure_fvi.errors import InputError, PolicyError
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.runs import wording
from secure_fvi.runs.config import SiloFile

try:
    check_fence()
    NO_FENCE = ""
except InputError as error:
    NO_FENCE = str(error)
needs_fence = pytest.mark.skipif(bool(NO_FENCE), reason=NO_FENCE)

SCHEMA = Schema((("y", (), torch.float64),), {})
HEAD = """
import pyro, torch
from pyro.distributions import Normal
"""
BODY = """
def model(y):
    found = pyro.param("found", torch.tensor(FOUND, dtype=torch.float64))
    mu = pyro.sample("mu", Normal(0.0, 5.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", Normal(mu + 0 * found.sum(), 1.0), obs=y)
"""
#: Break 9 of the audit of November 2026: each runs code that is in no file of the hash, which then leaves a mark.
WAYS: dict[str, str] = {
    "control: exec": "exec(open(P).read())",
    "alias of exec": "from builtins import exec as run; run(open(P).read())",
    "getattr": "import builtins; getattr(builtins, 'ex' + 'ec')(open(P).read())",
    "subscript": "b = __builtins__\n(b if isinstance(b, dict) else vars(b))['ex' + 'ec'](open(P).read())",
    "FunctionType": "import types; types.FunctionType(compile(open(P).read(), 'p', 'exec'), globals())()",
    "loader": "from importlib.machinery import SourceFileLoader; SourceFileLoader('payload', P).load_module()",
    "pickle": "import pickle; pickle.load(open(Q, 'rb'))",
    "torch.load": "import torch; torch.load(T, weights_only=False)",
    "ctypes": "import ctypes; ctypes.CDLL(None).system(SHELL.encode())",
    "subprocess": "import subprocess; subprocess.run(['sh', '-c', SHELL])",
    "sys.path": "import sys; sys.modules.pop('payload', 0); sys.path.insert(0, D); import payload",
    "zip": "import sys; sys.path.insert(0, Z); import payload_in_zip",
    "os.fork": "import os; p = os.fork(); (open(M, 'w').close(), os._exit(0)) if not p else os.waitpid(p, 0)",
}
#: More ways, which the reading of the source takes for harmless.
UNSEEN: dict[str, str] = {
    "numpy.load": "import numpy; numpy.load(N, allow_pickle=True)",
    "timeit": "import timeit; timeit.timeit(open(P).read(), number=1)",
    "attrgetter": "import operator, os; operator.attrgetter('sys' + 'tem')(os)(SHELL)",
    "logging": "import logging.config as c; c.BaseConfigurator({}).resolve('os.sys' + 'tem')(SHELL)",
    "classes": "[c for c in type.__dict__['__sub' + 'classes__'](object) if c.__name__ == '_wrap_close'][0]"
    ".__init__.__getattribute__('__glo' + 'bals__')['sys' + 'tem'](SHELL)",
}
#: Ways into what a folder has beside the model, which are in no file of the hash either.
BESIDE: dict[str, str] = {
    "trace": "import trace; trace.Trace(count=0, trace=0).run(open(P).read())",
    "profile": "import cProfile; cProfile.Profile().run(open(P).read())",
    "debugger": "import bdb; bdb.Bdb().run(open(P).read())",
    "doctest": "import doctest; doctest.testfile(D + '/doc.txt', module_relative=False)",
    "unittest": "import unittest; unittest.defaultTestLoader.discover(D, pattern='test_payload.py')",
    "fileConfig": "import logging.config as c; c.fileConfig(D + '/log.ini', disable_existing_loggers=False)",
    "asyncio": "import asyncio; asyncio.run(asyncio.wait_for(asyncio.create_subprocess_shell(SHELL), 5)); "
    "import time; [time.sleep(.05) for _ in range(100) if not os.path.exists(M)]",
}
#: What a model may do: without a mark of its own there would be none of others.
ITSELF = {"its own text": "open(M, 'w').close()"}
#: What a site has and a model is not to reach.
REACH: dict[str, str] = {
    "read a key": "open(KEY).read()",
    "open a key by a link": "import os; os.symlink(KEY, M + '.link'); open(M + '.link').read()",
    "connect": "import socket; socket.create_connection(('127.0.0.1', PORT), 5).close()",
    "connect by a path": "import socket; socket.socket(socket.AF_UNIX).connect(UNIX)",
    "read the passphrase": "import os; os.environ['SECURE_FVI_PASSPHRASE']",
    "see the site's folder": "import os; os.listdir(D)",
    "see the parent": "import os; os.kill(PARENT, 0); open(f'/proc/{PARENT}/cmdline').read()",
    "take a process' file": "import ctypes, os; p = os.pidfd_open(os.getpid()); "
    "assert ctypes.CDLL(None).syscall(438, p, 2, 0) >= 0",
    "write beside the model": "open(__file__ + '.more', 'w').write('x')",
}


class Spy:
    """A model file that tries all of `attempts`, and tells by the start of a parameter which of them worked."""

    def __init__(self, folder: Path, attempts: dict[str, str], marked: bool, **values: Any) -> None:
        self.names, self.path = list(attempts), folder / "spy.py"
        lines = [HEAD, "import os, tempfile", "D = " + repr(str(folder))]
        lines += [f"{name} = {value!r}" for name, value in values.items()]
        lines += ["P, Q, T, Z = D + '/payload.py', D + '/q.pkl', D + '/q.pt', D + '/p.zip'"]
        lines += ["N, FOUND = D + '/q.npy', []"]
        for i, source in enumerate(attempts.values()):
            lines += [
                f"M = os.path.join(tempfile.gettempdir(), 'mark-{i}-' + str(os.getpid()))",
                "SHELL = 'echo 1 > ' + M",
                f"os.environ['MARK'] = M; source = {source!r}",
                "try:",
                "    exec(source)",
                f"    FOUND.append(float(os.path.exists(M)) if {marked} else 1.0)",
                "except BaseException:",
                "    FOUND.append(0.0)",
            ]
        self.path.write_text("\n".join(lines) + BODY)

    def here(self) -> dict[str, bool]:
        """Which attempts work without a fence."""
        spec = importlib.util.spec_from_file_location("spy", self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        path = list(sys.path)
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path[:] = path
            for name in ("payload", "payload_in_zip"):
                sys.modules.pop(name, None)
        return dict(zip(self.names, map(bool, module.FOUND), strict=True))

    def fenced(self) -> dict[str, bool]:
        """Which work in it."""
        program = fenced(self.path.read_bytes()).exported(SCHEMA, torch.float64)
        return dict(zip(self.names, program.start.theta["found"].bool().tolist(), strict=True))


def fenced(source: bytes) -> FencedModel:
    return FencedModel(Closure({"<model>": source}, {}, {}), "model", None, None, {})


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that reads what another has traced is not started, which takes seconds: of the one that traces alone
    is asked what its code may do."""
    reader = types.SimpleNamespace(answer=lambda *_: b"")
    monkeypatch.setattr(fence, "_checker", lambda hidden: contextlib.nullcontext(reader))


#: Of which `logging` evaluates what it calls with.
LOG_INI = """
[loggers]
keys=root
[handlers]
keys=h
[formatters]
keys=
[logger_root]
handlers=
[handler_h]
class=NullHandler
args=(open(__import__("os").environ["MARK"], "w").close(),)[1:]
"""
#: What pickle makes of a `_Command`, in its oldest form.
PICKLE = b"cos\nsystem\n(S'echo 1 > \"$MARK\"'\ntR."


class _Command:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ('echo 1 > "$MARK"',)


@needs_fence
@pytest.mark.usefixtures("unread")
def test_code_that_the_hash_does_not_name_does_not_run(tmp_path: Path) -> None:
    """Each way works without the fence, so that the old check of the source alone was no protection against it."""
    import zipfile

    payload = "import os\nopen(os.environ['MARK'], 'w').write('ran')\n"
    (tmp_path / "payload.py").write_text(payload)
    (tmp_path / "q.pkl").write_bytes(PICKLE)
    torch.save(_Command(), tmp_path / "q.pt")
    np.save(tmp_path / "q.npy", np.array([_Command()], object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        archive.writestr("payload_in_zip.py", payload)
    (tmp_path / "test_payload.py").write_text(payload)
    (tmp_path / "doc.txt").write_text(">>> import os\n>>> _ = open(os.environ['MARK'], 'w').write('ran')\n")
    (tmp_path / "log.ini").write_text(LOG_INI)
    ways = WAYS | UNSEEN | BESIDE
    spy = Spy(tmp_path, ways | ITSELF, marked=True)
    assert spy.here() == dict.fromkeys([*ways, *ITSELF], True)
    assert spy.fenced() == dict.fromkeys(ways, False) | dict.fromkeys(ITSELF, True)
    with pytest.raises(InputError, match=r"spy.py', line \d+: calls exec, so that what it runs cannot be hashed"):
        closure("<model>", spy.path)
    for way in (UNSEEN | BESIDE).values():
        spy.path.write_text(way)
        assert not closure("<model>", spy.path).packages.keys() - {"numpy"}


@needs_fence
@pytest.mark.usefixtures("unread")
def test_keys_data_and_network_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECURE_FVI_PASSPHRASE", "correct horse")
    (tmp_path / "identity.pem").write_text("PRIVATE")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        monkeypatch.chdir(tmp_path)
        local.bind("s")
        local.listen()
        spy = Spy(
            tmp_path, REACH, marked=False, KEY=str(tmp_path / "identity.pem"), PORT=server.getsockname()[1],
            UNIX=str(tmp_path / "s"), PARENT=os.getpid(),
        )  # fmt: skip
        assert spy.here() == dict.fromkeys(REACH, True)
        assert spy.fenced() == dict.fromkeys(REACH, False)


@needs_fence
def test_a_sites_folder_below_pythons_own_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should an administrator keep it there. The control: without `hidden` it can be read."""
    site, model = tmp_path / "python" / "site", tmp_path / "model"
    site.mkdir(parents=True)
    model.mkdir()
    (site / "identity.pem").write_text("PRIVATE")
    monkeypatch.setattr(fence, "_places", lambda: [str(tmp_path / "python"), "/usr/bin"])

    def read(*hidden: Path) -> bytes:
        command = [*fence._command(model, hidden), "cat", str(site / "identity.pem")]
        return subprocess.run(command, capture_output=True, check=False).stdout

    assert read() == b"PRIVATE"
    assert read(site) == read(site / "identity.pem") == b""


@needs_fence
def test_every_file_that_a_policy_names_is_hidden_and_under_each_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data sets, tables, dictionaries and the passphrase's file, below a folder that is shown twice, as /lib is. The
    control: what nobody names can be read there under both names."""
    real, alias, model = tmp_path / "usr", tmp_path / "lib", tmp_path / "model"
    real.mkdir()
    model.mkdir()
    alias.symlink_to(real)
    names = ["own.csv", "homes.csv", "d.toml", "key", "other"]
    for name in names:
        (real / name).write_text("SECRET")
    monkeypatch.setattr(fence, "_places", lambda: [str(real), str(alias), "/usr/bin"])
    monkeypatch.setenv("SECURE_FVI_KEY_FILE", str(real / "key"))
    silo = {"id": "a", "data": str(real / "own.csv"), "dictionary": str(real / "d.toml"), "query": "SELECT 1"}
    silo["tables"] = {"homes": str(real / "homes.csv")}  # type: ignore[assignment]
    hidden = files_of(types.SimpleNamespace(silo=[SiloFile.model_validate(silo)]))  # type: ignore[arg-type]
    paths = [str(folder / name) for folder in (real, alias) for name in names]

    def read(path: str) -> bytes:
        return subprocess.run([*fence._command(model, hidden), "cat", path], capture_output=True, check=False).stdout

    assert [read(path) for path in paths] == [b"", b"", b"", b"", b"SECRET"] * 2


@needs_fence
@pytest.mark.parametrize("whole", [False, True], ids=["libraries", "control"])
def test_of_the_system_and_of_python_libraries_alone_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """A table that no policy names, beside Python's libraries, as of a container that works below /usr/src, or of an
    environment that lies beside the data. The control shows whole prefixes, as was done."""
    prefix, model = tmp_path / "python", tmp_path / "model"
    model.mkdir()
    (prefix / "lib").mkdir(parents=True)
    for name in ("own.csv", "lib/code.py"):
        (prefix / name).write_text("SECRET")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    if whole:
        shown = [*fence._places(), "/usr", str(prefix)]
        monkeypatch.setattr(fence, "_places", lambda: shown)

    def found(code: str) -> str:
        python = [sys.executable, "-I", "-S", "-c", f"import os; print({code})"]
        command = [*fence._command(model, ()), *python]
        return subprocess.run(command, capture_output=True, check=False, text=True).stdout.strip()

    assert found(f"open({str(prefix / 'lib' / 'code.py')!r}).read()") == "SECRET"
    assert found(f"open({str(prefix / 'own.csv')!r}).read()") == ("SECRET" if whole else "")
    there = {name: set(found(f"*os.listdir({name!r})").split()) for name in ("/usr", "/usr/local")}
    if whole:
        assert {"share", "local"} <= there["/usr"]
    else:
        assert there["/usr"] <= {"lib", "lib32", "lib64", "local", "bin"}  # bin: where Python itself is there
        assert there["/usr/local"] <= {"lib", "lib64", "bin"} | {
            Path(path).parts[3] for path in fence._places() if path.startswith("/usr/local/")
        }


@needs_fence
@pytest.mark.usefixtures("unread")
def test_a_model_that_does_not_end_or_eats_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    hungry = HEAD + "FOUND = torch.zeros(2**31, dtype=torch.float64)[:1].tolist()\n" + BODY  # 16 GiB
    with pytest.raises(InputError, match=r"fails on import: RuntimeError: .*memory"):
        fenced(hungry.encode()).exported(SCHEMA, torch.float64)
    monkeypatch.setattr(fence, "_SECONDS", 0.5)
    with pytest.raises(InputError, match="its process ended without an answer"):
        fenced((HEAD + "while True:\n    pass\n").encode()).exported(SCHEMA, torch.float64)


#: Memory that a limit of data does not count, nor one of a single file. Each takes 64 MB, or tries to.
HOARDS: dict[str, str] = {
    "private": "KEPT.append(mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))",
    "shared": "KEPT.append(mmap.mmap(-1, 64 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))",
    "read-only": """
m = LIBC.mmap(None, 64 << 20, 3, 0x22, -1, 0)
LIBC.mprotect(ctypes.c_void_p(m), 64 << 20, 1)
assert m != 2**64 - 1
""",
    "/tmp": "fill('/tmp')",
    "scratch": "fill(os.getcwd())",
    "/dev/shm": "fill('/dev/shm')",
    "/dev": "fill('/dev')",
    "/": "fill('/')",
    "a file without a name": "os.truncate(os.memfd_create('m'), 64 << 20)",
    "a segment": "assert LIBC.shmget(0, 64 << 20, 0o1600) >= 0",
    "semaphores": "for _ in range(32):\n    assert LIBC.semget(0, 32000, 0o600) >= 0",
}
if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0:  # of rules there is no end, where Linux has them
    HOARDS["rules"] = "assert LIBC.syscall(444, (ctypes.c_uint64 * 1)(1), ctypes.c_size_t(8), 0) >= 0"
HOARD = """
import contextlib, ctypes, mmap
KEPT, LIBC = [], ctypes.CDLL(None)
LIBC.mmap.restype, LIBC.mmap.argtypes = ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3,
                                                          ctypes.c_long]
def fill(folder):
    path = os.path.join(folder, f"hoard-{os.getpid()}")
    try:
        with open(path, "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
"""


@needs_fence
@pytest.mark.usefixtures("unread")
def test_memory_of_every_kind_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: with more memory and larger folders there is what they limit; in the same walls without what makes
    folders read-only, without a filter and a limit, there is all of it."""
    model = tmp_path / "hoard.py"
    tries = [f"try:\n    exec({source!r})\n    FOUND.append(1.0)\nexcept BaseException:\n    FOUND.append(0.0)\n"
             for source in HOARDS.values()]  # fmt: skip
    model.write_text(HEAD + "import os\nFOUND = []\n" + HOARD + "".join(tries) + BODY)

    def hoarded() -> dict[str, bool]:
        found = fenced(model.read_bytes()).exported(SCHEMA, torch.float64).start.theta["found"]
        return dict(zip(HOARDS, found.bool().tolist(), strict=True))

    folders = ["/tmp", "scratch"]
    assert [name for name, there in hoarded().items() if there] == ["private", "shared", "read-only", *folders]
    monkeypatch.setattr(fence, "_FOLDER", 32 << 20)
    monkeypatch.setattr(fence, "_MEMORY", 48 << 20)
    assert not any(hoarded().values())
    monkeypatch.undo()
    walls = fence._command(tmp_path, [])
    while "--remount-ro" in walls:
        at = walls.index("--remount-ro")
        del walls[at : at + 2]
    code = "import os\nFOUND = []\n" + HOARD + "".join(tries) + "print(sum(FOUND))"
    said = subprocess.run([*walls, sys.executable, "-I", "-S", "-c", code], capture_output=True, check=True)
    assert float(said.stdout) == len(HOARDS)


@needs_fence
@pytest.mark.skipif(os.getuid() == 0, reason="Linux does not limit root's threads")
@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="counted from Linux 5.14 on")
@pytest.mark.usefixtures("unread")
def test_threads_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where 1,000 are allowed, all 200 start."""
    model = tmp_path / "threads.py"
    starts = """
import threading
STOP, FOUND = threading.Event(), [0.0]
try:
    for _ in range(200):
        threading.Thread(target=STOP.wait, daemon=True).start()
        FOUND[0] += 1
except RuntimeError:
    pass
STOP.set()
"""
    model.write_text(HEAD + starts + BODY)

    def started() -> float:
        return float(fenced(model.read_bytes()).exported(SCHEMA, torch.float64).start.theta["found"])

    assert started() == 200
    monkeypatch.setattr(fence, "MOST_THREADS", 100)
    monkeypatch.setattr(fence, "_answers", {})
    assert started() < 100


@needs_fence
def test_what_the_process_answers_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes over its process and writes an answer itself: bytes that are checked, never unpickled."""
    lies = "import os, pickle\nos.write(3, b'P' + pickle.dumps([1]))\nos._exit(0)\n"
    with pytest.raises(InputError, match="what was traced of the model is not valid"):
        fenced(lies.encode()).exported(SCHEMA, torch.float64)


def traced(*nodes: list[Any]) -> bytes:
    """What is traced of a mean, with more operations."""

    def mean(y: torch.Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("records", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    content = export(FederatedModel(mean), SCHEMA, torch.float64)
    return altered(content, lambda table: table["evaluate"]["nodes"].extend(nodes))


@needs_fence
def test_a_graph_runs_first_where_its_memory_and_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is the system's, whatever an operation takes before anyone knows its size. The control: with more of
    either it is read."""
    content = traced(*[["aten.full.default", [[1 << 21], 0.0], {}]] * 8)  # 128 MiB
    schema = pack_schema(SCHEMA)

    def check() -> bytes:
        with fence._checker() as process:
            return process.answer(len(schema).to_bytes(8, "big") + schema + content, fence._CHECK_SECONDS)

    assert check() == b""
    monkeypatch.setattr(fence, "_CHECK_MEMORY", 64 << 20)
    with pytest.raises(InputError, match=r"not valid \(RuntimeError\)"):
        check()
    monkeypatch.undo()
    monkeypatch.setattr(fence, "_CHECK_SECONDS", 0.1)
    with pytest.raises(InputError, match="its process ended without an answer"):
        check()


@needs_fence
@pytest.mark.parametrize("bad", [True, False], ids=["refused", "control"])
def test_nothing_of_a_graph_runs_here_before_it_ran_there(monkeypatch: pytest.MonkeyPatch, bad: bool) -> None:
    """A model answers for its process with a graph of its own: no operation runs in the process that has the keys."""
    content = traced(["aten.full.default", [[1 << 27 if bad else 9], 0.0], {}])
    monkeypatch.setattr(exported.TensorGraph, "__call__", lambda *_: pytest.fail("it ran here"))
    monkeypatch.setattr(exported.TensorGraph, "check_work", lambda *_: pytest.fail("it ran here"))
    lies = fenced(f"import os\nos.write(3, b'P' + {content!r})\nos._exit(0)\n".encode())
    if not bad:
        assert lies.exported(SCHEMA, torch.float64).layout.size("global") == 1
        return
    with pytest.raises(InputError, match="results that are too large on made data"):
        lies.exported(SCHEMA, torch.float64)


MODEL = """
import pyro
from fenced_parts import spread
from pyro.distributions import Normal


def mean(y):
    mu = pyro.sample("mu", Normal(0.0, 5.0))
    with pyro.plate("records", len(y)):
        b = pyro.sample("b", Normal(0.0, 1.0))
        pyro.sample("y", Normal(mu + b, spread), obs=y)
"""


@pytest.fixture
def job(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A model of one's own that imports another file, and three tables."""
    (tmp_path / "fenced_parts.py").write_text("spread = 0.5\n")
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    silos = []
    for k, name in enumerate(SILOS):
        path = tmp_path / f"{name}.csv"
        path.write_text("record_id,y\n" + "".join(f"{100 * k + i},{(i * 7 + k) % 11 / 3}\n" for i in range(20 + k)))
        silos.append({"id": name, "data": str(path)})
    found = Job(
        world, tmp_path, allow=False, partition=None, silo=silos, model={"function": f"{tmp_path / 'model.py'}:mean"},
        algorithm={"name": "sfvi", "iterations": 10, "family": "diagonal"},
    )  # fmt: skip
    for name in SILOS:
        allow(found, name)
    return found


def allow(job: Job, site: str, **changes: Any) -> None:
    rule = {"hash": manifest(job.config).hash.hex(), "function": f"{job.folder / 'model.py'}:mean"}
    data = [{"id": "data", "path": str(job.folder / f"{site}.csv")}]
    job.allow(site, **{"model": [rule], "data": data, **changes})


@needs_fence
def test_a_deployed_job_runs_the_graph_and_never_the_file(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its posterior is that of one process, in which the file was run: the control."""

    def imported() -> bool:
        return any(name in sys.modules for name in ("fenced_parts", "secure_fvi_user_model"))

    for name in ("fenced_parts", "secure_fvi_user_model"):  # of another test's run in this process
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not imported()
    remote = job.run()
    assert not imported()
    assert not [
        path for home in job.world.homes.values() for path in home.state_folder.rglob("trace")
    ]  # the job is over
    local = job.local()
    assert imported()
    for name in ("fenced_parts", "secure_fvi_user_model"):
        monkeypatch.delitem(sys.modules, name)
    from safetensors.torch import load

    ours, theirs = load(remote), load(local)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-7), name


def test_a_job_that_is_taken_up_again_is_not_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where all is as it was, and the file is the one that this party wrote: controls trace anew, and what they
    find is never taken for the other's."""
    traced: list[bytes] = []

    def trace(closure: Closure, message: bytes, schema: bytes, hidden: tuple[Path, ...]) -> bytes:
        traced.append(closure.sources["<model>"])
        return export(FederatedModel(made, "r"), SCHEMA, torch.float64)

    def made(y: torch.Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("r", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    def taken_up(
        job: str = "asthma", secret: bytes = bytes(32), source: bytes = b"x", dtype: Any = torch.float64
    ) -> int:
        """How often it was traced by a new process."""
        monkeypatch.setattr(fence, "_answers", {})
        (tmp_path / job).mkdir(exist_ok=True)
        kept, before = KeptTrace(tmp_path / job / "trace", lambda: secret), len(traced)
        model = FencedModel(Closure({"<model>": source}, {}, {}), "made", "r", None, {}, kept=kept)
        assert model.exported(SCHEMA, dtype).layout.size("global") == 1
        return len(traced) - before

    monkeypatch.setattr(fence, "_traced", trace)
    assert taken_up() == 1
    assert taken_up() == 0
    assert (tmp_path / "asthma" / "trace").stat().st_mode & 0o077 == 0
    assert taken_up(source=b"z") == 1
    assert taken_up() == 1  # one is kept, of the last
    assert taken_up(secret=bytes(31) + b"1") == 1
    assert taken_up() == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "trace").write_bytes((tmp_path / "asthma" / "trace").read_bytes())
    assert taken_up("other") == 1  # another job's
    content = bytearray((tmp_path / "asthma" / "trace").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "asthma" / "trace").write_bytes(content)
    assert taken_up() == 1
    for what, found in (("torch.__version__", "1"), ("pyro.__version__", "1"), ("package_digest", lambda: bytes(32))):
        with monkeypatch.context() as other:
            other.setattr(f"secure_fvi.deployment.fence.{what}", found)
            assert taken_up() == 1, what
        assert taken_up() == 1
        assert taken_up() == 0


def test_without_a_sandbox_a_site_refuses_unless_it_says_off(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence.shutil, "which", lambda name: None)
    fence._tool.cache_clear()
    try:
        home = job.world.homes["north"]
        roster = home.roster(NOW)
        offer = make_offer(job.config, roster, "hub", manifest(job.config).hash, NOW)
        with pytest.raises(PolicyError, match=r"no 'bwrap' here: install bubblewrap .* or set sandbox = \"off\""):
            check(offer, read_policy(home.policy_file))
        with pytest.raises(InputError, match="no 'bwrap' here"):
            model_for(job.config, "required", None, None, home.path)
        allow(job, "north", sandbox="off")
        trail = open_trail(home)
        decision = decide(home, sign_offer(offer, job.world.homes["hub"].identity()), trail, NOW, met=True)
        trail.close()
        assert decision.policy.sandbox == "off"
        notes = [row.fields()["what"] for row in rows(home.log_file)[1] if row.kind == "note"]
        assert any('sandbox = "off": the code of the model runs in the process' in note for note in notes)
        assert any(package_digest().hex() in note for note in notes)
        found, _ = model_for(job.config, "off", None, None, home.path)
        assert isinstance(found, FederatedModel)
    finally:
        fence._tool.cache_clear()
        for name in ("fenced_parts", "secure_fvi_user_model"):
            sys.modules.pop(name, None)


def test_files_exchanged_after_the_decision_are_noticed(job: Job) -> None:
    agreed = manifest(job.config).hash
    (job.folder / "fenced_parts.py").write_text("spread = 0.6\n")
    with pytest.raises(InputError, match="was altered since its hash was compared"):
        model_for(job.config, "required", agreed, None, job.folder)


def test_a_shipped_program_needs_no_sandbox(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "_tool", lambda: pytest.fail("a sandbox was asked for"))
    found, _ = model_for(Job(world, tmp_path).config, "required", None, None, tmp_path)
    assert isinstance(found, FederatedModel)


def test_another_secure_fvi_at_the_server_is_refused_by_both_names(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose gate adds no noise has another package; an honest one is let in by a policy that says so."""
    from secure_fvi.deployment import job as offers

    job, home = Job(world, tmp_path), world.homes["north"]
    config = job.config
    other = bytes(range(32))
    monkeypatch.setattr(offers, "package_digest", lambda: other)
    offer = make_offer(config, home.roster(NOW), "hub", manifest(config, None, other).hash, NOW)

    def policy(**changes: Any) -> Any:
        job.allow("north", model=[{"hash": offer.model.hex()}], **changes)
        return read_policy(home.policy_file)

    ours = package_digest().hex()
    said = f"has digest {other.hex()[:16]}..., the one installed here {ours[:16]}"
    with pytest.raises(PolicyError, match=rf"{said}.* package = \['{ours}', '{other.hex()}'\]"):
        check(offer, policy())
    with pytest.raises(PolicyError, match=f"this site's secure_fvi, {ours}, is not accepted"):
        check(offer, policy(package=[other.hex()]))
    for package in ([other.hex(), ours], "any"):
        assert check(offer, policy(package=package)) is not None


@pytest.mark.parametrize("control", [False, True])
def test_what_somebody_elses_job_discloses_is_said_without_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    """`policy explain --with-data` of a job that came by mail: its model's code ran as the user, and read the
    passphrase of the site's keys, as it does in the control, outside the sandbox. Where there is none, it is refused.
    """
    monkeypatch.setenv("SECURE_FVI_PASSPHRASE", "correct horse")
    mark = tmp_path / "mark"
    spying = f"import contextlib, os, pathlib\nwith contextlib.suppress(OSError):\n    pathlib.Path({str(mark)!r})"
    spying += ".write_text(os.environ.get('SECURE_FVI_PASSPHRASE', 'none'))\n"
    (tmp_path / "model.py").write_text(HEAD + spying + BODY.replace("FOUND", "[0.0]"))
    silos = []
    for name in SILOS:
        (tmp_path / f"{name}.csv").write_text("record_id,y\n1,0.5\n2,0.1\n")
        silos.append({"id": name, "data": str(tmp_path / f"{name}.csv")})
    table = {"model": {"function": f"{tmp_path / 'model.py'}:model"}, "silo": silos, "algorithm": {"name": "sfvi"}}
    (tmp_path / "job.toml").write_text(wording.dumps(table))
    more = ["--sandbox", "off"] if control else []
    answer = CliRunner().invoke(cli, ["policy", "explain", str(tmp_path / "job.toml"), "--with-data", *more])
    if NO_FENCE and not control:
        assert "there is no 'bwrap' here" in str(answer.exception)
    else:
        assert (answer.exit_code, "records" in answer.output) == (0, True), answer.output
    assert mark.exists() == control
    if control:
        assert mark.read_text() == "correct horse"
