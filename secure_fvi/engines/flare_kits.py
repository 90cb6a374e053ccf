"""What stands outside FLARE's processes: a site's startup kit made safe and started, and jobs submitted until they end.

A startup kit is FLARE's folder for one participant (`startup/`, `local/`), made by `nvflare provision`. FLARE runs in a
folder of our own that has the kit's keys, certificates and addresses in it, and nothing else of the kit. What FLARE
lets a job bring to a site is said in its `local/`: here no code at all, and no class but ours.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from cryptography import x509
from cryptography.x509.oid import NameOID
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from secure_fvi.checkpoints import latest_round
from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.home import HOME_VARIABLE, Home
from secure_fvi.deployment.job import silo_ids
from secure_fvi.deployment.names import ROLES, Table, now, printable
from secure_fvi.errors import InputError, SecureFVIError
from secure_fvi.files import write_atomically, write_bytes
from secure_fvi.key_files import KEY_FILE_VARIABLE, PASSPHRASE_VARIABLE
from secure_fvi.runs import wording
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.reading import read

_log = logging.getLogger(__name__)

CLASSES = ("secure_fvi.engines.flare_app.SiteExecutor", "secure_fvi.engines.flare_app.ServerController")
#: What FLARE lets the administrator do at a site: submit and end jobs, and look at states.
_RIGHTS = {
    **dict.fromkeys(("submit_job", "manage_job", "view"), "any"),
    **dict.fromkeys(
        ("clone_job", "download_job", "operate", "shell_commands", "byoc", "server-predeployed-flwr"), "none"
    ),
}
_APP = "nvflare.app_common"
_STORAGE = f"{_APP}.storages.filesystem_storage.FilesystemStorage"
_LOG = "nvflare.fuel.utils.log_utils.BaseFormatter"
_MOST_BYTES = 1 << 20  # of a file of a kit
#: Incarnations of one job in a row that may end without a round more.
MOST_TRIES = 5
_LOOK, _BETWEEN, _FLARE_AWAY, _LOST = 1.0, 10.0, 60.0, 30.0  # seconds


#: Text without braces or dollars, in which FLARE would put values of its environment; and a file of `startup/`.
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/@ \[\]-]{0,200}$")]
_File = Annotated[str, Field(pattern=r"^([A-Za-z0-9_-]{1,40}\.(key|crt|pem))?$")]


class _Words(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def check_flare() -> None:
    """Raises InputError where FLARE is missing."""
    try:
        metadata.version("nvflare")
    except metadata.PackageNotFoundError:
        raise InputError("this needs NVIDIA FLARE: pip install '.[flare]' in a checkout") from None


class _Service(_Words):
    target: _Word = ""
    scheme: _Word = ""


class _Server(_Words):
    name: _Word = ""
    service: _Service = _Service()
    identity: _Word = ""
    auth_identity: _Word = ""
    admin_server: _Word = ""
    admin_port: int = 0
    ssl_private_key: _File = ""
    ssl_cert: _File = ""
    ssl_root_cert: _File = ""
    connection_security: _Word = ""


class _Client(_Words):
    ssl_private_key: _File = ""
    ssl_cert: _File = ""
    ssl_root_cert: _File = ""
    fqsn: _Word = ""
    is_leaf: bool = True
    connection_security: _Word = ""
    auth_identity: _Word = ""


class _Kit(_Words):
    """What `startup/fed_client.json` or `fed_server.json` of a kit says, and all that it may say."""

    format_version: Literal[2]
    require_signed_jobs: bool = False
    servers: tuple[_Server, ...]
    client: _Client = _Client()


def guard(kit: Path, workspace: Path) -> None:
    """Write FLARE's folder `workspace` anew, from the kit's keys, certificates and addresses alone: what FLARE itself
    has left there of its jobs stays.

    Let no job bring code or name a class other than ours, and no log leave the site: FLARE would stream it to the
    server, and a site's log counts its records' faults. Who made the kit may be the server. FLARE builds whatever class
    a file of `local/` or `startup/` names, runs what lies in folders of its jobs, and puts the values of the process's
    environment in the place of their names in braces, some of which it tells the server: of all that nothing is read.
    Raises InputError for what is no kit, or says more than a kit does.
    """
    at = _startup(kit)
    said = _addresses(kit, at)
    for folder in ("startup", "local"):
        place = workspace / folder
        if place.is_symlink():  # FLARE's code was here, and may have been somebody's: nothing is written elsewhere
            place.unlink()
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700, parents=True)
    write_atomically(workspace / "startup" / at, json.dumps(said.model_dump(exclude_unset=True), indent=2).encode())
    ends: list[_Client | _Server] = [said.client, *said.servers]
    for one in ends:
        for name in {one.ssl_private_key, one.ssl_cert, one.ssl_root_cert} - {""}:
            if os.path.lexists(kit / "startup" / name):  # FLARE itself says what is missing
                write_bytes(workspace / "startup" / name, _own(kit, name))
    local = workspace / "local"
    rights = {"format_version": "1.0", "permissions": {"project_admin": dict(_RIGHTS)}}
    of_role = _of_server(workspace.resolve()) if at == "fed_server.json" else _of_site()
    resources = {
        "format_version": 2, "class_allow_list": list(CLASSES), "class_list_enforcement_mode": "enforce",
        "allow_log_streaming": False, **of_role,
    }  # fmt: skip
    for name, table in zip(("resources.json", "authorization.json", "log_config.json"),
                           (resources, rights, _logging()), strict=True):  # fmt: skip
        write_atomically(local / name, json.dumps(table, indent=2).encode())


def _of_site() -> dict[str, Any]:
    """A site's resources, as FLARE's kits have them by default, without its streamer of logs."""
    gpu = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300}
    return {
        "client": {"retry_timeout": 30, "compression": "Gzip"},
        "components": [
            _component("resource_manager", f"{_APP}.resource_managers.gpu_resource_manager.GPUResourceManager", **gpu),
            _component("resource_consumer", f"{_APP}.resource_consumers.gpu_resource_consumer.GPUResourceConsumer"),
            _component("process_launcher", f"{_APP}.job_launcher.client_process_launcher.ClientProcessJobLauncher"),
        ],
    }


def _of_server(kit: Path) -> dict[str, Any]:
    """The server's; its stores are folders of the kit, where FLARE's defaults are shared by all users of a machine."""
    jobs = {"uri_root": str(kit / "jobs"), "job_store_id": "job_store"}
    storage = {"path": _STORAGE, "args": {"root_dir": str(kit / "snapshots"), "uri_root": "/"}}
    persistor = f"{_APP}.state_persistors.storage_state_persistor.StorageStatePersistor"
    server = {"admin_storage": "transfer", "max_num_clients": 100, "heart_beat_timeout": 600, "admin_timeout": 10.0}
    return {
        "servers": [{**server, "download_job_url": "http://download.server.com/"}],
        "snapshot_persistor": {"path": persistor, "args": {"uri_root": "/", "storage": storage}},
        "components": [
            _component("job_scheduler", f"{_APP}.job_schedulers.job_scheduler.DefaultJobScheduler", max_jobs=4),
            _component("job_manager", "nvflare.apis.impl.job_def_manager.SimpleJobDefManager", **jobs),
            _component("job_store", _STORAGE),
            _component("process_launcher", f"{_APP}.job_launcher.server_process_launcher.ServerProcessJobLauncher"),
        ],
    }


def _component(name: str, path: str, **args: Any) -> dict[str, Any]:
    return {"id": name, "path": path, "args": args}


def _logging() -> dict[str, Any]:
    """Of FLARE's processes: to their own output and to `log.txt`, as its kits have it."""
    said = "%(asctime)s - %(name)s - %(levelname)s - %(fl_ctx)s - %(message)s"
    file = {"filename": "log.txt", "mode": "a", "maxBytes": 20 << 20, "backupCount": 10}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"()": _LOG, "fmt": said}},
        "handlers": {
            "output": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stdout"},
            "file": {"class": "logging.handlers.RotatingFileHandler", "formatter": "plain", **file},
        },
        "loggers": {"root": {"level": "INFO", "handlers": ["output", "file"]}},
    }


def _startup(kit: Path) -> str:
    """The name of the file that says whom this kit is for. Raises InputError where there is none."""
    for name in ("fed_server.json", "fed_client.json"):
        if (kit / "startup" / name).is_file():
            return name
    raise InputError(f"'{kit}' is no startup kit of FLARE: startup/fed_client.json is missing")


def _own(kit: Path, name: str) -> bytes:
    """A file of the kit's `startup/` itself: what a link leads to is not of whoever handed the kit out. Raises
    InputError for anything else than a plain file."""
    try:
        folder = os.open(kit / "startup", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as file:
                about = os.fstat(file.fileno())
                content = file.read(_MOST_BYTES + 1) if stat.S_ISREG(about.st_mode) and about.st_nlink == 1 else None
        finally:
            os.close(folder)
    except OSError as error:
        raise InputError(f"'{kit}': startup/{name} is no plain file ({error.strerror})") from None
    if content is None or len(content) > _MOST_BYTES:
        raise InputError(
            f"'{kit}': startup/{name} is no plain file of at most {_MOST_BYTES:,} bytes, with no other name"
        )
    return content


def _addresses(kit: Path, name: str) -> _Kit:
    try:
        return _Kit.model_validate_json(_own(kit, name))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, found["loc"]))
        raise InputError(
            f"'{kit}': startup/{name}: '{printable(where, 80)}' is not as in a startup kit that this was tried with"
        ) from None


def check_kit(kit: Path, home: Home) -> str:
    """The name of the file that says whom the kit is for. Raises InputError where it is another member's, or its
    certificate not in force: FLARE would go on trying without a word. Nothing is written."""
    at, name = _startup(kit), home.id
    if (at == "fed_server.json") != (home.role == "server"):
        raise InputError(f"'{kit}' is a kit for another role than '{home.id}' has, a {home.role}")
    said = _addresses(kit, at)
    file = said.client.ssl_cert or next((s.ssl_cert for s in said.servers if s.ssl_cert), "")
    if not file or not os.path.lexists(kit / "startup" / file):
        return at  # FLARE itself says what is missing
    try:
        found = x509.load_pem_x509_certificate(_own(kit, file))
    except ValueError:
        raise InputError(f"'{kit}': startup/{file} is no certificate") from None
    owner = ", ".join(str(part.value) for part in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME))
    if owner != name:
        raise InputError(
            f"'{kit}' is the startup kit of '{printable(owner, 80)}', and this site is '{name}': take its own"
        )
    if not found.not_valid_before_utc <= (clock := now()) <= found.not_valid_after_utc:
        raise InputError(
            f"'{kit}': its certificate is in force from {found.not_valid_before_utc:%Y-%m-%d %H:%M} to "
            f"{found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and the clock here says {clock:%Y-%m-%d %H:%M}: set "
            "the clock, or have the server run `nvflare provision` again"
        )
    return at


def check_port(kit: Path) -> None:
    """Raises InputError where the port of a server's kit is taken: FLARE would try again for good."""
    at = _startup(kit)
    target = next((s.service.target for s in _addresses(kit, at).servers), "")
    if at != "fed_server.json" or not (port := target.rpartition(":")[2]).isdecimal():
        return
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", int(port)))
        except (OSError, OverflowError) as error:
            raise InputError(
                f"port {port}, which '{kit}' names, cannot be had ({error}): is another `flare start` running here?"
            ) from None


class Job(Table):
    """What a job's name stands for at the server; FLARE hands the name alone to the sites. sandbox: as of
    `secure-fvi server start`."""

    config: str
    out: str
    overrides: tuple[str, ...] = Field(default=())
    sandbox: Literal["required", "off"] = "required"


def job_file(home: Path, name: str) -> Path:
    """Where a job is written down. Raises InputError for a name that is no plain id: whoever reaches FLARE names it."""
    if not name or not all(c.isalnum() or c in "-_" for c in name):
        raise InputError("a job's name must be letters, digits, dashes and underscores")
    return home / "flare" / "jobs" / f"{name}.toml"


def ended_file(home: Path, name: str, incarnation: str) -> Path:
    """What a job's controller leaves, in this job of FLARE alone: one that FLARE had begun before may end later."""
    plain = "".join(c for c in incarnation if c.isalnum() or c in "-_")
    return job_file(home, name).with_suffix(f".{plain}.ended")


def write_job(home: Path, name: str, job: Job) -> None:
    path = job_file(home, name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, wording.dumps(job.model_dump(mode="json")).encode())


def environment(home: Home, key_file: Path | None = None) -> dict[str, str]:
    """Of FLARE's processes at the server: which member it is, and this Python first; no passphrase, but which file has
    it, and no module out of the folder that a process stands in."""
    found = {**os.environ, HOME_VARIABLE: str(home.path.resolve())}
    found.pop(PASSPHRASE_VARIABLE, None)
    named = key_file or found.get(KEY_FILE_VARIABLE)
    if named:  # FLARE's processes stand in folders of their own
        found[KEY_FILE_VARIABLE] = str(Path(named).resolve())
    found["PYTHONSAFEPATH"] = "1"
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
    return found


@contextlib.contextmanager
def key_file_of(home: Home) -> Iterator[Path | None]:
    """A file with the passphrase of the server's keys, in memory where the system has such, for as long as FLARE runs;
    None where the environment names one, or the keys have none."""
    secret = home.passphrase
    if secret is None or (os.environ.get(KEY_FILE_VARIABLE) and not os.environ.get(PASSPHRASE_VARIABLE)):
        yield None
        return
    if secret != secret.partition("\n")[0].strip():
        raise InputError("under FLARE a passphrase is one line that neither begins nor ends with a blank")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        path = Path(folder) / "passphrase"
        write_bytes(path, secret.encode())
        path.chmod(0o600)
        yield path


def workspace_of(home: Home) -> Path:
    """The folder in which FLARE runs at this member."""
    return home.path / "flare" / "workspace"


def put_away(home: Home) -> None:
    """Before FLARE is started: at a site what its code has left, which may have been somebody's, is put aside whole,
    and looked into by nobody. Its log is there until the next time. At the server, whose own it is, FLARE goes on."""
    workspace = workspace_of(home)
    if home.role == "server":
        (workspace / "shutdown.fl").unlink(missing_ok=True)
    if home.role == "server" or not os.path.lexists(workspace):
        return
    before = workspace.with_name("workspace-before")
    subprocess.run(["rm", "-rf", "--", str(before)], check=False, stderr=subprocess.DEVNULL)  # however deep it is
    if os.path.lexists(before):
        before = Path(tempfile.mkdtemp(prefix="workspace-before-", dir=workspace.parent)) / "it"
    workspace.rename(before)


def command(kit: Path, home: Home) -> list[str]:
    """FLARE's process of this member, from the installed package, in a folder that is guarded first."""
    at = check_kit(kit, home)
    workspace = workspace_of(home)
    guard(kit, workspace)
    module = "server.server_train" if home.role == "server" else "client.client_train"
    own = ["secure_train=true", f"uid={home.id}", "org=consortium", "config_folder=config"]
    run = [sys.executable, "-P", "-u", "-m", f"nvflare.private.fed.app.{module}"]
    return [*run, "-m", str(workspace.resolve()), "-s", at, "--set", *own]


Scheme = Literal["tcp", "grpc", "http"]


def project(roster: ConsortiumRoster, host: str, port: int, admin: str, scheme: Scheme = "tcp") -> str:
    """What `nvflare provision -p` reads: the roster's members under their own names, and one administrator. scheme: of
    what carries messages, by mutual TLS; "http" for sites behind proxies."""
    people: list[dict[str, Any]] = [{"name": admin, "type": "admin", "org": "consortium", "role": "project_admin"}]
    for member in (m for role in ROLES for m in roster.of_role(role)):
        if member.role == "server":
            server = {
                "name": member.id,
                "type": "server",
                "org": "consortium",
                "fed_learn_port": port,
                "default_host": host,
            }
            people.append(server)
        else:
            people.append({"name": member.id, "type": "client", "org": "consortium"})
    impl = "nvflare.lighter.impl"
    builders: list[dict[str, Any]] = [
        {"path": f"{impl}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
        {"path": f"{impl}.static_file.StaticFileBuilder", "args": {"config_folder": "config", "scheme": scheme}},
        {"path": f"{impl}.cert.CertBuilder"},
        {"path": f"{impl}.signature.SignatureBuilder"},
    ]
    table = {"api_version": 3, "name": roster.consortium, "participants": people, "builders": builders}
    return yaml.safe_dump(table, sort_keys=False)


def job_folder(folder: Path, name: str, sites: Sequence[str]) -> Path:
    """The job as FLARE takes it: two classes of the installed package, and our job's name for the server."""
    app = folder / name / "app" / "config"
    app.mkdir(parents=True)
    meta = {
        "name": name, "resource_spec": {}, "deploy_map": {"app": ["server", *sites]}, "min_clients": len(sites),
        "mandatory_clients": list(sites),
    }  # fmt: skip
    (folder / name / "meta.json").write_text(json.dumps(meta))
    workflow = {"id": "job", "path": CLASSES[1], "args": {"job": name}}
    executor = {"tasks": ["none"], "executor": {"path": CLASSES[0], "args": {}}}
    at_server, at_site = {"format_version": 2, "workflows": [workflow]}, {"format_version": 2, "executors": [executor]}
    for side, table in (("server", at_server), ("client", at_site)):
        (app / f"config_fed_{side}.json").write_text(json.dumps(table))
    return folder / name


def launch(
    home: Home, config: Path, out: Path, admin: Path, overrides: tuple[str, ...] = (),
    sandbox: Literal["required", "off"] = "required", say: Callable[[str], None] = _log.info,
) -> None:  # fmt: skip
    """Submit the job that `config` describes with the startup kit `admin`, and again whenever FLARE ends it before its
    time, until it is done. Raises SecureFVIError where it cannot be: a refusal, or `MOST_TRIES` without a round more.
    """
    job_table = read(config, overrides)
    if job_table.engine is None or job_table.engine.kind != "flare":
        raise InputError(f"'{config}': [engine] kind must be \"flare\" for a job that FLARE carries")
    if home.role != "server":
        raise InputError(
            f"'{home.path}' is the folder of a {home.role}: jobs are submitted at the server, with its --home"
        )
    name = out.resolve().name
    job = Job(config=str(config.resolve()), out=str(out.resolve()), overrides=overrides, sandbox=sandbox)
    write_job(home.path, name, job)
    roster = home.roster(now())
    silos = silo_ids(job_table) or tuple(m.id for m in roster.of_role("silo"))
    sites = [*silos, *(m.id for m in roster.of_role("holder") if job_table.aggregation.kind == "homomorphic")]
    tries, reached = 0, latest_round(RunDirectory(out).checkpoints) or 0
    with tempfile.TemporaryDirectory() as work, _Session(admin) as session:
        definition = job_folder(Path(work), name, sites)
        while True:
            began, incarnation = time.monotonic(), session.submit(definition)
            say(f"job '{name}' is submitted to FLARE as {incarnation}")
            status = session.wait()
            if RunDirectory(out).state == "finished":
                return
            again, why = _told(ended_file(home.path, name, incarnation), status)
            if not again:
                raise SecureFVIError(why)
            before, reached = reached, latest_round(RunDirectory(out).checkpoints) or 0
            tries = 1 if reached > before else tries + 1
            if tries >= MOST_TRIES:
                raise SecureFVIError(f"{why}; {MOST_TRIES} tries brought no round more: see FLARE's logs")
            say(f"{why}; the job goes on after round {reached} in a new job of FLARE")
            time.sleep(max(0.0, _BETWEEN - (time.monotonic() - began)))


def _told(path: Path, status: str) -> tuple[bool, str]:
    """Whether the job may be submitted again, and why it has ended: our controller's word, or else FLARE's."""
    if not path.exists():
        return True, f"FLARE has ended the job ({status})"
    again, _, why = path.read_text().partition("\n")
    path.unlink()
    return again == "again", why


class _Session:
    """An administrator's session with FLARE's server, opened anew where it is lost."""

    def __init__(self, admin: Path) -> None:
        if not (admin / "startup" / "fed_admin.json").is_file():
            raise InputError(f"'{admin}' is no administrator's startup kit of FLARE: startup/fed_admin.json is missing")
        self._admin, self._job = admin, ""
        self._api: Any = None

    def __enter__(self) -> _Session:
        self._api = self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._api is not None:
            self._api.close()

    def _open(self) -> Any:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        until = time.monotonic() + _FLARE_AWAY
        while True:
            try:
                return new_secure_session(self._admin.name, str(self._admin))
            except Exception as error:  # FLARE's client raises what it likes
                if time.monotonic() >= until:
                    raise InputError(
                        f"FLARE's server does not take the kit '{self._admin}' ({type(error).__name__}: "
                        f"{printable(str(error), 200)}); is `secure-fvi flare start` running at the server?"
                    ) from None
                time.sleep(_LOOK)

    def _ask(self, what: Callable[[Any], Any]) -> Any:
        until = time.monotonic() + _FLARE_AWAY
        while True:
            try:
                return what(self._api)
            except Exception as error:  # the server is away, or the session has ended with it
                if time.monotonic() >= until:
                    raise SecureFVIError(f"FLARE's server: {printable(str(error), 300)}") from None
                time.sleep(_LOOK)
                with contextlib.suppress(Exception):
                    self._api.close()
                self._api = self._open()

    def submit(self, definition: Path) -> str:
        self._job = str(self._ask(lambda api: api.submit_job(str(definition))))
        return self._job

    def wait(self) -> str:
        """FLARE's last word on the job. A server that was killed still calls its jobs running when it is back, and runs
        none: that is an end too."""
        ran = time.monotonic()
        while True:
            status = str(self._ask(lambda api: api.get_job_meta(self._job)).get("status", ""))
            if status.startswith("FINISHED") or status in ("ABANDONED", "FAILED_TO_RUN"):
                return status
            running = {job.job_id for job in self._ask(lambda api: api.get_system_info()).job_info}
            if self._job in running or status == "SUBMITTED":
                ran = time.monotonic()
            elif time.monotonic() - ran >= _LOST:
                return f"{status}, but not any more"
            time.sleep(_LOOK)
