"""What Flower needs in a site's folder, and the environment in which its programs run.

HOME/flower/            FLWR_HOME of this site's Flower programs
     node.key, node.pub   the SuperNode's key (P-384), made here; Flower's registry knows its public half
     apps/                the one app that may run here; not writable, so that no other can be installed
     config.toml          where `flwr` finds the SuperLink, at the server
     alive        touched while the SuperNode is online; supernode.lock, superlink.lock: held by who runs
     inner.key, inner.crt, superlink.sqlite   the SuperLink's own, at the server
     jobs/NAME.toml       jobs that may be started, at the server

The app holds no code: a pyproject.toml that names two modules of the installed package.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePrivateKey, generate_private_key

from secure_fvi.errors import InputError
from secure_fvi.files import write_atomically
from secure_fvi.key_files import PASSPHRASE_VARIABLE

SERIES = "1.41."
#: Files of an app are the same everywhere, so that all sites have the same app whatever their release of secure-fvi.
APP = """[project]
name = "secure-fvi-app"
version = "1.0.0"
description = "Starts the parties of the installed package secure-fvi; holds no code"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "secure-fvi"

[tool.flwr.app.components]
serverapp = "secure_fvi.engines.flower_server:app"
clientapp = "secure_fvi.engines.flower_client:app"

[tool.flwr.app.config]
job = ""
"""
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds until a message gets its process; 1 by default
}


def check_flower() -> None:
    """Raises InputError where Flower is missing or of a series that was not tried."""
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise InputError("this needs Flower: pip install '.[flower]' in a checkout") from None
    if not version.startswith(SERIES):
        raise InputError(f"flwr {version} is installed; this needs {SERIES}*: pip install '.[flower]' in a checkout")


def flower_folder(home: Path) -> Path:
    return home / "flower"


def environment(home: Path, passphrase: str | None = None) -> dict[str, str]:
    """Of a Flower program at this site: its own FLWR_HOME, no telemetry, no look-ups outside, nothing installed.
    passphrase: of the site's keys, for the parties that the program starts."""
    found = {**os.environ, **_QUIET, "FLWR_HOME": str(flower_folder(home).resolve())}
    if passphrase is not None:
        found[PASSPHRASE_VARIABLE] = passphrase
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
    for name in ("NO_PROXY", "no_proxy"):
        found[name] = ",".join(filter(None, [found.get(name), "127.0.0.1", "localhost"]))
    return found


def program(name: str) -> str:
    """Flower's program beside this Python. Raises InputError where it is not there."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise InputError(f"'{path}' is missing: pip install '.[flower]' in a checkout")
    return str(path)


def node_key(home: Path) -> Path:
    """The public half of the SuperNode's key (OpenSSH), which is made where there is none."""
    path = flower_folder(home) / "node.key"
    if not path.exists():
        key = generate_private_key(SECP384R1())
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        write_atomically(path.with_suffix(".pub"), public + b"\n")
        write_key(path, key, serialization.PrivateFormat.OpenSSH)
    return path.with_suffix(".pub")


def write_key(path: Path, key: EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    """A private key for a program that takes no passphrase, readable by its owner only."""
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pem)


def prepare(home: Path, any_app: bool) -> None:
    """All that a Flower program of this site needs. Raises InputError where another app than ours could run."""
    node_key(home)
    if any_app:
        apps = flower_folder(home) / "apps"
        if apps.exists():
            apps.chmod(0o700)
        return
    install_app(home)
    check_guarded(home)


def locked(path: Path, what: str) -> int:
    """A lock that Flower's program inherits, since it may outlive this process, and no two may share what is its.
    Raises InputError where it is taken."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"a {what} of '{path.parent}' is running; end it first") from None
    return handle


def free_port() -> int:
    """A port on loopback that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def app_source(home: Path) -> Path:
    """The folder that `flwr run` takes."""
    folder = flower_folder(home) / "source" / "secure-fvi-app"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "pyproject.toml", APP.encode())
    return folder


def install_app(home: Path) -> Path:
    """Install the app, and see to it that no other can be: where it lies.

    Flower's ClientApp and ServerApp processes unpack whatever app a run ships into FLWR_HOME/apps, unless a folder of
    its name and hash is there, and import from that folder. This one is there, and the rest of `apps` is not writable.
    Raises InputError where this process could write there all the same, as root can.
    """
    apps = flower_folder(home) / "apps"
    with tempfile.TemporaryDirectory() as work:
        _flwr(home, work, "build", "--app", str(app_source(home)))
        bundle = next(Path(work).glob("*.fab"))
        publisher, name, version, short = bundle.stem.split(".")
        installed = apps / f"{publisher}.{name}.{version.replace('-', '.')}.{short}"
        if not installed.exists() or [p.name for p in apps.iterdir()] != [installed.name]:
            if apps.exists():
                for path in (apps, *apps.iterdir()):
                    path.chmod(0o700)
                shutil.rmtree(apps)
            _flwr(home, work, "install", str(bundle))
        with zipfile.ZipFile(bundle) as archive:
            built = archive.read("pyproject.toml")
    if [p.name for p in installed.iterdir()] != ["pyproject.toml"] or (
        (installed / "pyproject.toml").read_bytes() != built
    ):
        raise InputError(f"'{installed}' holds something else than the app of secure-fvi; remove '{apps}'")
    installed.chmod(0o500)
    apps.chmod(0o500)
    return installed


def check_guarded(home: Path) -> None:
    """Raises InputError where another app could be installed, since this process may write where nobody should."""
    probe = flower_folder(home) / "apps" / "probe"
    try:
        probe.mkdir()
    except PermissionError:
        return
    probe.rmdir()
    raise InputError(
        "this user may write everywhere (root does), so Flower would run whatever app a run ships; start it as a user "
        "of its own, or under `setpriv --bounding-set=-all`, or with --any-app"
    )


def _flwr(home: Path, folder: str, *arguments: str) -> None:
    done = subprocess.run(
        [program("flwr"), *arguments], cwd=folder, env=environment(home), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InputError(f"flwr {arguments[0]} failed: {' '.join((done.stdout + done.stderr).split())[-500:]}")
