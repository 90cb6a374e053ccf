"""A consortium in folders, with a key holder where asked for, made in one process; and ways to spoil it."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

from secure_fvi.aggregation.store import SqliteStore
from secure_fvi.deployment.certificates import make_certificate, pem_of
from secure_fvi.deployment.consortium import ConsortiumRoster, Member, Sums, write_roster
from secure_fvi.deployment.home import Home, make_tls
from secure_fvi.deployment.keeping import accept, install, read_request, request_text, sign
from secure_fvi.deployment.names import ROLES
from secure_fvi.deployment.trail import TRAIL
from secure_fvi.key_files import TlsFiles
from secure_fvi.privacy.witness import Witness

#: TLS goes by the clock of the machine, so the world does too; it does not move during a test.
NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
DAY = datetime.timedelta(days=1)
SITES = {"east": "silo", "hub": "server", "north": "silo", "south": "silo"}


def open_witness(home: Home) -> Witness:
    """This site as a witness of others' logs."""
    return Witness(home.id, home.identity(), SqliteStore(home.seen_file), TRAIL)


class World:
    """Folders below `root`, one of each site. All share one clock, at `NOW`."""

    def __init__(self, root: Path, holder: bool = False, west: bool = False) -> None:
        """Opened, or made where there is none. holder: with the key holder 'escrow'. west: with a fourth silo."""
        self.root = root
        made, more = (root / "hub").exists(), {"escrow": ("holder", holder), "west": ("silo", west)}
        sites = SITES | {name: role for name, (role, asked) in more.items() if asked or (root / name).exists()}
        self.homes = {n: Home(root / n) if made else self.new_home(n, role) for n, role in sites.items()}
        self.roster: ConsortiumRoster | None = self.homes["hub"].roster(NOW) if made else None

    def copy(self, root: Path) -> World:
        """The same consortium in another folder."""
        shutil.copytree(self.root, root)
        return World(root)

    def new_home(self, name: str, role: str) -> Home:
        return Home.create(self.root / name, name, next(r for r in ROLES if r == role), unsealed=True)

    def request(self, home: Home) -> Member:
        return read_request(request_text(home).encode(), "request")

    def certify(self, home: Home, now: datetime.datetime = NOW, days: int = 365) -> bytes:
        """Another certificate for the site's present key (PEM), which the next roster will name."""
        made = pem_of(make_certificate(home.tls_key(), home.id, home.role, home.addresses, now, days))
        (home.path / "tls.crt").write_bytes(made)
        return made

    def install_all(self, home: Home, *paths: Path, now: datetime.datetime = NOW) -> None:
        for path in paths:
            install(home, path, now)

    def write(
        self, previous: ConsortiumRoster | None = None, now: datetime.datetime = NOW, days: int = 365
    ) -> ConsortiumRoster:
        members = [self.request(home) for home in self.homes.values()]
        made = write_roster("study", members, now, Sums(), previous, days)
        self.roster = made
        return made

    def without(self, name: str) -> ConsortiumRoster:
        """The roster after the one in force, with another TLS key for `name`, whose holder does not know of it: what a
        consortium does about a stolen key. Signed by all; in force nowhere yet."""
        assert self.roster is not None
        taken, home = self.root / f"{name}-new", self.homes[name]
        shutil.copytree(home.path, taken)
        for file in ("tls.key", "tls.crt"):
            (taken / file).unlink()
        make_tls(taken, name, home.role, home.addresses, None, True)
        self.homes[name] = Home(taken)
        made = self.write(self.roster)
        self.sign(made)
        self.homes[name] = home
        return made

    def sign(self, roster: ConsortiumRoster, now: datetime.datetime = NOW) -> list[Path]:
        """Installed and signed by all: the signatures."""
        path = self.root / f"roster-{roster.serial}.toml"
        path.write_bytes(roster.content)
        for home in self.homes.values():
            install(home, path, now)
        self.signatures = [sign(home, now)[1] for home in self.homes.values()]
        return self.signatures

    def put_in_force(self, home: Home, now: datetime.datetime = NOW) -> None:
        """At one site: the roster that all have signed."""
        self.install_all(home, *(s for s in self.signatures if s.parent.parent.parent != home.path), now=now)
        accept(home, now)

    def distribute(self, roster: ConsortiumRoster, now: datetime.datetime = NOW) -> None:
        """Installed, signed by all, signatures handed round, accepted by all."""
        self.sign(roster, now)
        for home in self.homes.values():
            self.put_in_force(home, now)


def new_world(root: Path, holder: bool = False, west: bool = False) -> World:
    """A whole consortium: a signed roster, accepted by all."""
    world = World(root, holder, west)
    world.distribute(world.write())
    return world


def handshake(server: TlsFiles, client: TlsFiles, name: str, root: Path) -> tuple[bytes, bytes]:
    """A mutual TLS handshake in memory, the client asking for `name`: DER certificates that server and client saw.

    Raises ssl.SSLError as the side does that refuses.
    """
    contexts = []
    for side, protocol in ((server, ssl.PROTOCOL_TLS_SERVER), (client, ssl.PROTOCOL_TLS_CLIENT)):
        context = ssl.SSLContext(protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=side.trusted.decode())
        for kind, pem in (("key", side.private_key), ("crt", side.certificate)):
            (root / f"pem.{kind}").write_bytes(pem)
        context.load_cert_chain(root / "pem.crt", root / "pem.key")
        contexts.append(context)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    s = contexts[0].wrap_bio(to_server, to_client, server_side=True)
    c = contexts[1].wrap_bio(to_client, to_server, server_hostname=name)
    for _ in range(4):
        for side in (c, s):
            _step(side.do_handshake)
    _step(lambda: s.read(1))  # TLS 1.3: the client's certificate is judged after its own handshake is done
    seen = s.getpeercert(binary_form=True), c.getpeercert(binary_form=True)
    assert seen[0] is not None
    assert seen[1] is not None
    return seen[0], seen[1]


def _step(act: Callable[[], object]) -> None:
    with contextlib.suppress(ssl.SSLWantReadError):
        act()
