"""A site's folder: where its keys, the consortium's files, its policy and its records lie.

    site.toml            id and role
    identity.pem, .pub   Ed25519: signs rosters, the ledger, the log; made here, never leaves
    tls.key, tls.crt     P-256 key and its certificate, both made here
    rosters/N.toml, N.sig/            roster N and everybody's signatures
    successions/         identities that followed others
    accepted.json        which roster is in force: older ones are refused
    policy.toml          what this site accepts; edited here and nowhere else
    ledger.sqlite, audit-log.sqlite   its records
    seen.sqlite, state/  what it saw of others' records, and of its own; its parties' state
    state.key            seals that state
    going.json           while a process serves jobs: the round of the one that runs, and who is waited for
    lock                 held by the one process that serves or runs jobs
    next/, old/          keys that are being rotated in, and that were rotated out

The folder belongs to one user; group and others may not write to it.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.certificates import make_certificate, pem_of, read_certificate
from secure_fvi.deployment.consortium import ConsortiumRoster, Member, load_roster, parse_roster, trusted
from secure_fvi.deployment.names import Id, Role, Table, check_id, now, parse_table
from secure_fvi.errors import HomeError, InputError, ProtocolError, RecordError
from secure_fvi.files import make_private, own_files, read_bytes, write_bytes
from secure_fvi.key_files import (
    TlsFiles,
    check_sealed,
    create_key,
    is_encrypted,
    load_key,
    load_private,
    seal,
    store_private,
)
from secure_fvi.runs import wording

HOME_VARIABLE = "SECURE_FVI_HOME"


class _Site(Table):
    format: Literal[1]
    id: Id
    role: Role
    addresses: tuple[str, ...] = ()


class _Accepted(Table):
    serial: int = 0
    roster: str = ""


class Home:
    """The folder of one site. Everything is read anew when asked for, so that installed files count at once; of the
    roster in force, and the identity in it, what was checked is kept for as long as no file of it has changed."""

    def __init__(self, path: Path, passphrase: str | None = None) -> None:
        """Raises InputError where there is no site, or where others may write to its folder."""
        self.path, self.passphrase, file = path, passphrase, path / "site.toml"
        site = parse_table(read_bytes(file, "the site's file", makes="`secure-fvi keys init`"), _Site, f"'{file}'")
        self.id, self.role, self.addresses = site.id, site.role, site.addresses
        self._checked: tuple[_Files, ConsortiumRoster, Identity] | None = None
        check_private(path)

    def __repr__(self) -> str:
        return f"Home({str(self.path)!r}, id={self.id!r}, role={self.role!r})"

    @classmethod
    def create(
        cls,
        path: Path,
        name: str,
        role: Role,
        addresses: tuple[str, ...] = (),
        passphrase: str | None = None,
        unsealed: bool = False,
    ) -> Home:
        """A new site with an identity and a TLS key. Raises InputError where the folder holds a site already, and
        without a passphrase, unless its keys may lie there `unsealed`."""
        try:
            check_id(name)
        except ValueError as error:
            raise InputError(f"id: {error}") from None
        if (path / "site.toml").exists():
            raise InputError(f"'{path}' holds the site '{cls(path).id}' already; give another folder")
        check_sealed(passphrase, unsealed)
        _close(path)
        create_key(path / "identity.pem", passphrase, unsealed)
        make_tls(path, name, role, addresses, passphrase, unsealed)
        site = {"format": 1, "id": name, "role": role, "addresses": list(addresses)}
        write_bytes(path / "site.toml", wording.dumps(site).encode())
        return cls(path, passphrase)

    @property
    def sealed(self) -> bool:
        """Whether this site's keys are encrypted; those that come later are as its identity is."""
        return is_encrypted(self.path / "identity.pem")

    def seal(self) -> list[Path]:
        """Encrypt the keys that lie here unsealed, with the passphrase: which they were."""
        check_sealed(self.passphrase, False)
        folders = (self.path, self.path / "next", self.path / "old")
        keys = [p for folder in folders for p in sorted((*folder.glob("*.pem"), *folder.glob("*.key")))]
        # The identity last: as long as it is not sealed, this can be done again.
        keys.sort(key=lambda p: p == self.path / "identity.pem")
        return [p for p in keys if seal(p, self.passphrase)]

    @property
    def policy_file(self) -> Path:
        return self.path / "policy.toml"

    @property
    def ledger_file(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def log_file(self) -> Path:
        return self.path / "audit-log.sqlite"

    @property
    def seen_file(self) -> Path:
        """The store of this site as a witness of others."""
        return self.path / "seen.sqlite"

    @property
    def state_folder(self) -> Path:
        return self.path / "state"

    def hold(self) -> IO[bytes]:
        """Close the folder to other users, and take it for this process, until the file that is returned is closed or
        the process ends, however it does. Raises InputError where another process has it: two over one state would use
        secrets twice."""
        file = (self.path / "lock").open("ab")
        for folder in (self.path, self.state_folder, self.state_folder / "jobs"):
            if folder.exists():
                _close(folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InputError(
                f"'{self.path}' is in use by another process of the {self.role} '{self.id}'; stop that one first"
            ) from None
        return file

    def check_held(self, file: IO[bytes]) -> None:
        """Raises RecordError where what `hold` returned locks nobody out any more: the file was removed by hand."""
        lock = self.path / "lock"
        if not (lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat())):
            raise RecordError(
                f"'{lock}' was removed while this process held it, so that another may have taken the folder; stop "
                "this one, and start it again"
            )

    def identity(self) -> Identity:
        """The key that the roster names. Raises InputError where it cannot be read."""
        return load_key(self.path / "identity.pem", self.passphrase)

    def identity_in(self, roster: ConsortiumRoster) -> Identity:
        """The present identity, or the one that is being rotated in, whichever `roster` names for this site."""
        if self._checked is not None and self._checked[1] is roster and self._checked[0] == self._files():
            return self._checked[2]
        named = roster.member(self.id).identity_key
        for path in (self.path / "identity.pem", self.path / "next" / "identity.pem"):
            if path.exists():
                found = load_key(path, self.passphrase)
                if found.public_key == named:
                    return found
        if not (self.path / "identity.pem").exists():
            raise HomeError(f"'{self.path}' has no identity.pem: bring it back from a backup, or join anew")
        raise HomeError(f"the roster names another identity for '{self.id}' than the one in '{self.path}'")

    def records_identity(self, public_key: bytes) -> Identity:
        """The present or former identity of `public_key`: a ledger or log stays with the key that began it."""
        for pub in (self.path / "identity.pub", *sorted((self.path / "old").glob("identity-*.pub"))):
            if pub.exists() and pub.read_text().strip() == public_key.hex():
                return load_key(pub.with_suffix(".pem"), self.passphrase)
        raise InputError(f"'{self.path}' does not hold the identity {public_key.hex()[:16]}..., nor did it before")

    def tls_key(self, file: str = "tls.key") -> EllipticCurvePrivateKey:
        """The private key of the certificate."""
        return _p256(self.path / file, self.passphrase)

    def state_secret(self) -> bytes:
        """32 bytes that seal what the parties keep between messages; made when first asked for. Raises RecordError
        where it is gone, or cannot be read, and a job that goes on here rests on it."""
        path = self.path / "state.key"
        if not path.exists():
            self._check_nothing_sealed(path)
            store_private(path, Ed25519PrivateKey.generate(), self.passphrase, not self.sealed)
        # It signs nothing: the form is that of the other keys, so that the same passphrase guards it.
        with own_files():
            key = load_private(path, self.passphrase)
        if not isinstance(key, Ed25519PrivateKey):
            raise RecordError(f"'{path}' holds a key of another kind than the one that was made here")
        return key.private_bytes_raw()

    def _check_nothing_sealed(self, path: Path) -> None:
        """Raises RecordError where a job is under way: under another key a site takes its own rows for others."""
        begun = sorted(p.parent for p in (self.state_folder / "jobs").glob("*/session"))
        if going := [folder for folder in begun if not (folder / "ended").exists()]:
            raise RecordError(
                f"'{path}' is gone, with which what is kept of job '{going[0].name}' was sealed; put its newest copy "
                f"back, or remove '{going[0]}' and begin another job"
            )

    def certificate(self, file: str = "tls.crt") -> x509.Certificate:
        path = self.path / file
        return read_certificate(read_bytes(path, "the site's certificate"), f"'{path}'")

    def tls_in(self, roster: ConsortiumRoster) -> str:
        """The folder of the present TLS key and certificate, or of those that are being rotated in, whichever `roster`
        names for this site: "" or "next/". Raises HomeError where it names neither."""
        named = roster.member(self.id)
        for folder in ("", "next/"):
            if (self.path / f"{folder}tls.crt").exists():
                found = self.certificate(f"{folder}tls.crt")
                if found == named.x509 and found.public_key() == self.tls_key(f"{folder}tls.key").public_key():
                    return folder
        raise HomeError(
            f"the roster names another TLS key for '{self.id}' than the one in '{self.path}'; "
            "have it made with this site's newest request"
        )

    def credentials(self, peers: Iterable[Member]) -> TlsFiles:
        """What TLS needs to speak to these members and to nobody else; the private key is in clear in it."""
        private = self.tls_key().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return TlsFiles(private, pem_of(self.certificate()), trusted(peers))

    @property
    def in_force(self) -> int:
        """The number of the roster that this site has accepted; 0 before the first."""
        return self._accepted().serial

    def roster_file(self, serial: int) -> Path:
        """Where roster number `serial` lies, its signatures beside it."""
        return self.path / "rosters" / f"{serial}.toml"

    def newest_roster_file(self) -> Path:
        """The roster that was installed last: the one to sign. Not the one of the largest number: whoever has a roster
        can make one of any. Raises InputError where there is none."""
        found = self.roster_files()
        if not found:
            raise InputError(f"'{self.path}' holds no roster; install one with `secure-fvi keys install`")
        return found[0]

    def roster_files(self) -> list[Path]:
        """All that were installed: those that are not in force yet, the last one first, by the times of the files; then
        the one in force and those before it."""
        found = {int(p.stem): p for p in (self.path / "rosters").glob("*.toml") if p.stem.isdecimal()}
        before = sorted((n for n in found if n <= self.in_force), reverse=True)
        drafts = sorted(set(found) - set(before), key=lambda n: (found[n].stat().st_mtime_ns, n), reverse=True)
        return [found[n] for n in (*drafts, *before)]

    def roster(self, now: datetime.datetime) -> ConsortiumRoster:
        """The roster in force, checked in all ways but whether this site's policy accepts it.

        Raises ProtocolError that names the reason: a signature, the time, this site's own entry, or that it is not the
        roster that this site has accepted.
        """
        files = self._files()
        if self._checked is not None and self._checked[0] == files:
            self._checked[1].check_time(now)
            return self._checked[1]
        serial, self._checked = self.in_force, None
        if not serial:
            raise InputError(f"no roster is in force in '{self.path}'; put one in force with `keys roster verify`")
        found = self.check_roster(self.roster_file(serial), now)
        if max(stamp[-1] for _, stamp in files if stamp is not None) + _TICK < time.time_ns():
            self._checked = files, found, self.identity_in(found)
        return found

    def roster_by_public_keys(self, now: datetime.datetime) -> ConsortiumRoster:
        """`roster` for who has no passphrase, such as a monitor: of this site's own entry the identity's public half is
        looked at, and no private key."""
        if not self.in_force:
            return self.roster(now)  # which says what to do
        roster = load_roster(self.roster_file(self.in_force), now)
        self.check_not_older(roster)
        own, halves = roster.member(self.id), (self.path / f / "identity.pub" for f in ("", "next"))
        if own.role != self.role or own.identity not in {p.read_text().strip() for p in halves if p.exists()}:
            raise ProtocolError(f"the roster names another role or identity for '{self.id}' than this site's")
        return roster

    def _files(self) -> _Files:
        """Which files `roster` is read from, as they lie there: a replaced or altered one shows by itself, an added one
        by its folder, so that those seen before are all that has to be looked at."""
        if self._checked is not None:
            seen = self._checked[0]
            if all(_stamp(path) == stamp for path, stamp in seen):
                return seen
        own = ("accepted.json", *(f"{f}{n}" for f in ("", "next/") for n in ("identity.pem", "tls.key", "tls.crt")))
        rosters = self.path / "rosters"
        paths = [*(self.path / name for name in own), rosters]
        for folder in sorted(rosters.glob("*")):
            paths += [folder, *(sorted(folder.iterdir()) if folder.is_dir() else ())]
        return tuple((path, _stamp(path)) for path in paths)

    def check_roster(self, path: Path, now: datetime.datetime) -> ConsortiumRoster:
        """The roster in `path`, checked in the same ways."""
        roster = load_roster(path, now)
        self.check_own(roster)
        self.check_not_older(roster)
        return roster

    def check_own(self, roster: ConsortiumRoster) -> None:
        """Raises ProtocolError unless the roster has this site's identity, role and TLS certificate right."""
        own = roster.member(self.id)
        self.identity_in(roster)
        if own.role != self.role:
            raise ProtocolError(f"the roster calls '{self.id}' a {own.role}, here it is a {self.role}")
        self.tls_in(roster)

    def check_not_older(self, roster: ConsortiumRoster) -> None:
        """Raises ProtocolError for a roster older than the one accepted here, or one that does not follow it."""
        accepted = self._accepted()
        serial, hash_ = accepted.serial, accepted.roster
        if roster.serial < serial:
            raise ProtocolError(f"roster {roster.serial} is older than roster {serial}, which this site has accepted")
        if roster.serial == serial and roster.hash.hex() != hash_:
            raise ProtocolError(f"this site has accepted another roster {serial} ({hash_[:16]}...)")
        if roster.serial == serial + 1 and serial and roster.previous.hex() != hash_:
            raise ProtocolError(
                f"roster {roster.serial} does not follow the roster {serial} that this site has accepted"
            )

    def accept(self, roster: ConsortiumRoster) -> None:
        """Remember a checked roster: older ones are refused from now on."""
        self.check_not_older(roster)
        self._accept(serial=roster.serial, roster=roster.hash.hex())

    def accepted_rosters(self) -> Iterator[ConsortiumRoster]:
        """The rosters that have been in force here, the newest first, each named by the next, as they lie here."""
        wanted, serial = self._accepted().roster, self.in_force
        while serial and self.roster_file(serial).exists():
            path = self.roster_file(serial)
            found = parse_roster(read_bytes(path, "the roster"), f"'{path}'")
            if found.hash.hex() != wanted:
                return
            yield found
            wanted, serial = found.previous.hex(), serial - 1

    def _accepted(self) -> _Accepted:
        path = self.path / "accepted.json"
        if not path.exists():
            return _Accepted()
        try:
            return _Accepted.model_validate_json(read_bytes(path, "what this site accepted"))
        except ValueError:
            raise InputError(f"'{path}' is damaged; restore it, or accept the roster anew after removing it") from None

    def _accept(self, **news: object) -> None:
        write_bytes(
            self.path / "accepted.json", self._accepted().model_copy(update=news).model_dump_json(indent=2).encode()
        )


#: Inode, size, and when it was written and changed, nanoseconds; None where there is no such file.
_Stamp = tuple[int, int, int, int] | None
_Files = tuple[tuple[Path, _Stamp], ...]
#: Two changes of one file within so many nanoseconds may bear the same time.
_TICK = 100_000_000


def _stamp(path: Path) -> _Stamp:
    try:
        seen = path.stat()
    except FileNotFoundError:
        return None
    return seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def make_tls(
    folder: Path, name: str, role: Role, addresses: tuple[str, ...], passphrase: str | None, unsealed: bool
) -> None:
    """A TLS key in `folder` and its certificate, unless they are there."""
    store_private(folder / "tls.key", generate_private_key(SECP256R1()), passphrase, unsealed)
    if not (folder / "tls.crt").exists():
        certificate = make_certificate(_p256(folder / "tls.key", passphrase), name, role, addresses, now())
        write_bytes(folder / "tls.crt", pem_of(certificate))


def _p256(path: Path, passphrase: str | None) -> EllipticCurvePrivateKey:
    key = load_private(path, passphrase)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise InputError(f"'{path}' holds a key of another kind than P-256")
    return key


def _close(folder: Path) -> None:
    """`make_private`, with what to do where that cannot be."""
    try:
        make_private(folder)
    except OSError as error:
        if not folder.exists():
            raise InputError(f"'{folder}' cannot be made ({error.strerror}); give another folder") from None
        raise InputError(
            f"'{folder}' is open to others than its owner ({error.strerror}); run: chmod 700 '{folder}'"
        ) from None


def check_private(path: Path) -> None:
    """Raises InputError for a file or folder that its group or everybody may write to, or that is another user's."""
    found = path.stat()
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(f"'{path}' may be written by others than its owner; run: chmod go-w '{path}'")
    if found.st_uid not in (os.geteuid(), 0):
        raise InputError(f"'{path}' belongs to another user; the site's files must be its own")
