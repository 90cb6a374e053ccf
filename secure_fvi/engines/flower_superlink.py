"""The server's SuperLink: on loopback with a certificate of its own, behind the filter; and runs on it."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.x509.oid import NameOID

from secure_fvi.deployment.home import HOME_VARIABLE, Home
from secure_fvi.engines.flower_setup import (
    app_source,
    environment,
    flower_folder,
    free_port,
    locked,
    prepare,
    program,
    write_key,
)
from secure_fvi.errors import InputError
from secure_fvi.files import write_atomically
from secure_fvi.key_files import PASSPHRASE_VARIABLE, given_passphrase
from secure_fvi.runs import wording
from secure_fvi.runs.config import read

_NAME = "local"
_YEARS = datetime.timedelta(days=3650)


def run_superlink(home: Home, listen: tuple[str, int], any_app: bool) -> None:
    """Serve until a signal comes, or until the SuperLink has ended. Raises InputError for a folder of another role."""
    from secure_fvi.engines.flower_gate import run_gate

    if home.role != "server":
        raise InputError(f"'{home.path}' is the folder of a {home.role}; a server's is needed here")
    folder = flower_folder(home.path)
    prepare(home.path, any_app)
    lock = locked(folder / "superlink.lock", "SuperLink")
    key, certificate = _inner_certificate(folder)
    port = free_port()
    address = f"127.0.0.1:{port}"
    connection = {_NAME: {"address": address, "root-certificates": str(certificate.resolve())}}
    table = {"superlink": {"default": _NAME, **connection}}
    write_atomically(folder / "config.toml", wording.dumps(table).encode())
    command = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(certificate), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    command += ["--database", str(folder / "superlink.sqlite")]
    variables = {**environment(home.path, home.passphrase), HOME_VARIABLE: str(home.path.resolve())}
    inner = subprocess.Popen(command, env=variables, pass_fds=[lock])
    threading.Thread(target=_leave_with, args=(inner,), daemon=True).start()
    try:
        run_gate(
            listen,
            address,
            certificate,
            home.path / "tls.key",
            home.path / "tls.crt",
            variables.get(PASSPHRASE_VARIABLE) or given_passphrase(),
            folder / "superlink.sqlite",
        )
    finally:
        inner.terminate()
        inner.wait(20)


def launch(
    home: Home, config: Path, out: Path, listen: str, address: str, overrides: tuple[str, ...],
    sandbox: Literal["required", "off"] = "required",
) -> None:  # fmt: skip
    """Write the job down and have Flower run it, its log on standard output, until the run ends."""
    from secure_fvi.engines.flower_server import FlowerJob, write_job

    engine = read(config, overrides).engine
    if engine is None or engine.kind != "flower":
        raise InputError(f"'{config}': [engine] kind must be \"flower\" for a job under Flower")
    job = FlowerJob(
        config=str(config.resolve()),
        out=str(out.resolve()),
        listen=listen,
        address=address,
        overrides=overrides,
        sandbox=sandbox,
    )
    name = out.resolve().name
    write_job(home.path, name, job)
    command = [program("flwr"), "run", str(app_source(home.path)), _NAME, "-c", f'job="{name}"', "--stream"]
    done = subprocess.run(command, env=environment(home.path), check=False)
    if done.returncode:
        raise InputError("flwr could not start the run; is `secure-fvi flower superlink` running?")


def _leave_with(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    os.kill(os.getpid(), signal.SIGINT)


def _inner_certificate(folder: Path) -> tuple[Path, Path]:
    """Key and certificate for 127.0.0.1, which signs itself and is trusted by this folder's programs alone."""
    key_file, certificate_file = folder / "inner.key", folder / "inner.crt"
    if not certificate_file.exists():
        key = generate_private_key(SECP256R1())
        write_key(key_file, key, serialization.PrivateFormat.PKCS8)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "SuperLink on loopback")])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + _YEARS)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
            .sign(key, hashes.SHA256())
        )
        write_atomically(certificate_file, made.public_bytes(serialization.Encoding.PEM))
    return key_file, certificate_file
