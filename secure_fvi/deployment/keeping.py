"""What is done to a site's folder: files that come from others are installed, keys rotated, a policy begun."""

from __future__ import annotations

import datetime
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgpack
from pydantic import ValidationError

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.certificates import as_text, pem_of
from secure_fvi.deployment.consortium import (
    LABEL_SUCCESSION,
    ConsortiumRoster,
    Member,
    Signature,
    Succession,
    check_signature,
    digest_of,
    parse_roster,
    read_succession,
    sign_roster,
    signature_folder,
)
from secure_fvi.deployment.home import Home, make_tls
from secure_fvi.deployment.names import Bytes32, Bytes64, Id, Role, Table, format_time, parse_table
from secure_fvi.errors import InputError, ProtocolError, SecureFVIError
from secure_fvi.files import read_bytes, write_bytes
from secure_fvi.key_files import create_key, load_key
from secure_fvi.privacy.chain import signed
from secure_fvi.runs import wording

TEMPLATE = """\
# What this site takes part in. Only this site edits this file; a job outside it is refused, whatever a server says.
# docs/provisioning.md explains each key.
format = 1
rosters = []        # hashes of the rosters that this site accepts: secure-fvi keys roster show
algorithms = []     # such as "sfvi", "sfvi-avg", "pvi"
aggregations = []   # such as "masked", "homomorphic"; "plain" shows the server each silo's numbers
min_cohort = 3      # fewer silos in a sum, losses counted: refused
max_rounds = 0      # more rounds than this in a job, sums before and after them counted: refused
sandbox = "required"  # "off" runs a model's own code in the process that holds keys and data
package = "same"    # the server's secure_fvi has to be this site's, file by file; "any", or digests of both
# silos = "all"        # or a share such as 0.5: a job that asks fewer of the roster's silos is refused
# must_include = []    # silos without which this site takes no part
# disclosures = []     # what `secure-fvi policy explain JOB.toml` says that a policy has to list
# max_missing = 0      # silos that a sum may lack of those asked; left out, what a job's noise allows, of exact sums 0
# max_unanswered = 3   # jobs on a data set that its records could not answer: which of them did tells of the records
# max_differences = 0  # sums of a job over fewer silos than it asks: differences of totals come close to single silos

[privacy]
dp = "required"     # "optional" lets jobs without differential privacy in
units = ["record"]  # "silo" protects institutions, not persons
max_epsilon = 1.0   # of one job; the budget of a data set holds over all jobs
max_delta = 1e-6
min_noise_multiplier = 0.3
noise = ["distributed", "silo"]  # "server" trusts the server with sums before noise
# min_colluders = 1    # silos that may know their shares of distributed noise: a job has to plan for as many
# max_retries = 20     # sums beyond a job's rounds, paid for by the same epsilon

# A formula that was read and agreed to, in the words of: secure-fvi policy explain JOB.toml
# [[model]]
# formula = "wheeze ~ smoke * age + (1 | child)"   # or a list; "any" allows all over the columns of the dictionary
# family = "bernoulli"   # "gaussian" unless given; or a list, or "any"
# record = "child"       # where the job names the group that is a record
# most = { rows = 4 }    # what the job says of it, number for number; "any" allows all
# priors = { age = [0, 0.5] }   # likewise: a fit starts where priors are, so that jobs with others ask other questions

# Any other model, by its hash: secure-fvi policy hash-model CONFIG
# [[model]]
# hash = "64 hexadecimal digits"
# function = "/srv/models/asthma.py:model"   # this site's copy; leave out for a program that secure-fvi ships

# A population that jobs may use, its file, and what all jobs on it may spend together.
# [[data]]
# id = "asthma-2026"
# path = "/srv/data/asthma.csv"      # or .parquet, .sqlite, .duckdb
# dictionary = "asthma.toml"         # secure-fvi data describe drafts it, secure-fvi data check tries it
# query = "SELECT * FROM data WHERE age IS NOT NULL"  # one SELECT over `data`, and over files that `tables` names
# missing = "drop"                   # leaves out rows with a gap, which are refused otherwise
# cohort = "pinned"                  # refuses a job on other rows than the first one's; "said" notes it in the log
# epsilon = 3.0
# delta = 1e-6
# unit = "record"
# predictor = "dose.py:effect"      # of a vertical job: this silo's own program, for which sandbox has to be "off"
# response = ["died"]               # of a vertical job: columns that this site tells all its silos as the outcome
# alignment = { column = "person" } # of a vertical job: as its [alignment], which says what identifies people
# largest = 1048576                 # identifiers that each other party may test against this site's, in one job
# matchings = 10                    # jobs for which the data set is matched
# fewest = 100                      # people that all must have in common: the server names who they are
# from_job = []   # without a path: "partition", "data" where a job may say which of a program's records are this site's
"""


def request_text(home: Home) -> str:
    """The site's request, with its newest keys: those that are being rotated in, where there are such."""

    def newest(file: str) -> str:
        return f"next/{file}" if (home.path / "next" / file).exists() else file

    signer = load_key(home.path / newest("identity.pem"), home.passphrase)
    return make_request(home.id, home.role, signer, as_text(home.certificate(newest("tls.crt"))))


def install(home: Home, source: Path, now: datetime.datetime) -> str:
    """Put a file that came from others where it belongs, and say what it was.

    A roster, a signature, a succession. Raises InputError for anything else, ProtocolError for a file that
    does not hold what it should.
    """
    content = read_bytes(source, "the file", 1 << 26)
    where = f"'{source}'"
    if source.suffix == ".sig":
        signature = parse_table(content, Signature, where)
        home.newest_roster_file()  # where there is none, that is what is wrong
        rosters = [(path, _read_roster(path)) for path in home.roster_files()]
        path, roster = next((r for r in rosters if r[1].hash == signature.roster), rosters[0])
        check_signature(roster, signature)
        _put(signature_folder(path) / f"{signature.member}.sig", content)
        return f"signature of '{signature.member}' under roster {roster.serial}"
    if b'kind = "identity-succession"' in content:
        succession = read_succession(content, where)
        path = home.path / "successions" / f"{succession.member}-{succession.after.hex()[:16]}.toml"
        _check_succession(home, succession, path)
        _put(path, content)
        return f"succession of the identity of '{succession.member}'"
    roster = parse_roster(content, where)
    home.check_own(roster)
    home.check_not_older(roster)
    path = home.roster_file(roster.serial)
    if not path.exists() or path.read_bytes() != content:
        shutil.rmtree(signature_folder(path), ignore_errors=True)  # they are under another draft
    last = max((p.stat().st_mtime_ns for p in home.roster_files() if p != path), default=0)
    _put(path, content)
    if path.stat().st_mtime_ns <= last:  # within one tick of the clock
        os.utime(path, ns=(last + 1, last + 1))
    return f"roster {roster.serial} of '{roster.consortium}', not in force before all have signed it"


def _check_succession(home: Home, succession: Succession, path: Path) -> None:
    """Raises ProtocolError for a succession that what this site has accepted contradicts: who has an identity can make
    any number of others that it is said to follow, and begin records anew under one of them."""
    member = succession.member
    rosters = list(home.accepted_rosters())  # the newest first
    known = [r.members[member].identity_key for r in rosters if member in r.members]
    if succession.after in known:
        older = [key for key in known[known.index(succession.after) :] if key != succession.after]
        begun = bool(rosters) and rosters[-1].serial == 1  # nobody was somebody else before the first roster
    else:
        older, begun = known, False
    if (older and succession.before != older[0]) or (not older and begun):
        raise ProtocolError(f"no roster that this site has accepted names {succession.before.hex()[:16]}... "
                            f"as what '{member}' was before {succession.after.hex()[:16]}...")  # fmt: skip
    if path.exists() and read_succession(path.read_bytes(), f"'{path}'").before != succession.before:
        raise ProtocolError(f"'{path}' says that '{member}' was somebody else before; one of the two is forged")


def sign(home: Home, now: datetime.datetime) -> tuple[ConsortiumRoster, Path]:
    """Sign the newest roster, whose code was compared. The roster, and the signature file to send."""
    file = home.newest_roster_file()
    roster = _read_roster(file)
    home.check_own(roster)
    home.check_not_older(roster)
    roster.check_time(now)
    path = signature_folder(file) / f"{home.id}.sig"
    _put(path, sign_roster(roster, home.id, home.identity_in(roster)))
    return roster, path


def accept(home: Home, now: datetime.datetime) -> ConsortiumRoster:
    """Check the newest roster with everybody's signatures; from here on it is in force at this site."""
    roster = home.check_roster(home.newest_roster_file(), now)
    home.accept(roster)
    if home.identity_in(roster).public_key != home.identity().public_key:
        _follow(home, now, "identity.pem", "identity.pub")
    if home.tls_in(roster):
        _follow(home, now, "tls.key", "tls.crt")
    return roster


def rotate_tls(home: Home) -> str:
    """Make the next TLS key and its certificate; the text of a request with them. The present ones serve until the
    roster that names the next is accepted."""
    home.identity()  # where the keys here are locked, that is what is wrong
    make_tls(home.path / "next", home.id, home.role, home.addresses, home.passphrase, not home.sealed)
    return request_text(home)


def rotate_identity(home: Home, now: datetime.datetime) -> tuple[str, bytes]:
    """Make the next identity; the texts of its request and of its succession. The present one serves until the roster
    that names the next is accepted."""
    home.identity()
    following = create_key(home.path / "next" / "identity.pem", home.passphrase, not home.sealed)
    return request_text(home), succeed(home.id, home.identity(), following, now)


def expiring(
    home: Home, now: datetime.datetime, within: datetime.timedelta, *, keys: bool = True
) -> Iterator[tuple[bool, str]]:
    """What runs out, or is wrong: (True where it is past or within `within`, a line that says so). keys: whether this
    site's private keys are looked at, which takes their passphrase."""
    try:
        roster = home.roster(now) if keys else home.roster_by_public_keys(now)
        looked = [
            ("certificate", "rotate it: keys rotate tls", home.certificate().not_valid_after_utc),
            ("roster", "make and sign the next: keys roster make --previous", roster.expires),
        ]
    except SecureFVIError as error:
        yield True, str(error)
        return
    for what, remedy, until in looked:
        days = (until - now).days
        soon = until - now <= within
        state = "EXPIRED" if until < now else f"expires in {days} days"
        yield soon, f"{what}: {state} ({format_time(until)}){f'; {remedy}' if soon else ''}"
    try:
        roster.whose(pem_of(home.certificate()), now)
        yield False, "roster signed by all, certificate in force"
    except ProtocolError as error:
        yield True, str(error)


def _read_roster(path: Path) -> ConsortiumRoster:
    return parse_roster(read_bytes(path, "the roster"), f"'{path}'")


def _follow(home: Home, now: datetime.datetime, *names: str) -> None:
    """The next keys take the place of the present ones."""
    for name in names:
        _retire(home, name, now)
    for name in names:
        (home.path / "next" / name).rename(home.path / name)


def _retire(home: Home, name: str, now: datetime.datetime) -> None:
    old = home.path / "old"
    old.mkdir(mode=0o700, exist_ok=True)
    stem, _, suffix = name.partition(".")
    (home.path / name).rename(old / f"{stem}-{now:%Y%m%dT%H%M%S}.{suffix}")


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_bytes(path, content)


# ---- A site's request to join: its identity and the certificate of its TLS key, signed by both keys ----
#
# It goes to whoever writes the roster. It holds no secret.

LABEL_REQUEST = b"secure-fvi/request/2/"


class _File(Table):
    format: Literal[2]
    id: Id
    role: Role
    identity: Bytes32
    certificate: str
    signature: Bytes64


def make_request(name: str, role: Role, identity: Identity, certificate: str) -> str:
    """The text of a request file. certificate: DER in base64."""
    signature = identity.sign(LABEL_REQUEST + _statement(name, role, identity.public_key, certificate)).hex()
    said = {"id": name, "role": role, "identity": identity.public_key.hex(), "certificate": certificate}
    return wording.dumps({"format": 2, **said, "signature": signature})


def read_request(content: bytes, source: str) -> Member:
    """Who asks, as a roster would name it. Raises InputError for no request, ProtocolError where its signature does not
    hold."""
    file = parse_table(content, _File, source)
    statement = _statement(file.id, file.role, file.identity, file.certificate)
    if not signed(file.identity, LABEL_REQUEST, statement, file.signature):
        raise ProtocolError(f"{source}: the request is not signed by the identity that it names; it was altered")
    try:
        return Member(id=file.id, role=file.role, identity=file.identity.hex(), certificate=file.certificate)
    except ValidationError as error:
        raise InputError(f"{source}: {error.errors()[0]['ctx']['error']}") from None


def _statement(name: str, role: str, identity: bytes, certificate: str) -> bytes:
    return hashlib.sha256(msgpack.packb([name, role, identity, certificate])).digest()


def succeed(member: str, before: Identity, after: Identity, now: datetime.datetime) -> bytes:
    """A succession file: from one identity to the next."""
    made = format_time(now)
    statement = LABEL_SUCCESSION + digest_of(member, before.public_key + after.public_key, made)
    return wording.dumps(
        {
            "format": 1,
            "kind": "identity-succession",
            "member": member,
            "before": before.public_key.hex(),
            "after": after.public_key.hex(),
            "made": made,
            "signature": before.sign(statement).hex(),
            "signature_after": after.sign(statement).hex(),
        }
    ).encode()


def check_changes(
    before: ConsortiumRoster, members: Iterable[Member], successions: Iterable[Succession], replaced: Iterable[str] = ()
) -> list[str]:
    """What a roster after `before` changes, in lines for people.

    Raises ProtocolError for a member whose identity changed with no succession, unless `replaced` names it: its key was
    lost, and the new one is checked by voice.
    """
    lines, known, allowed = [], list(successions), set(replaced)
    now = {m.id: m for m in members}
    for name, old in before.members.items():
        new = now.get(name)
        if new is None:
            lines.append(f"{name}: leaves")
        elif new.identity != old.identity:
            announced = any(
                s.member == name and s.before == old.identity_key and s.after == new.identity_key for s in known
            )
            if not announced and name not in allowed:
                raise ProtocolError(
                    f"'{name}' has another identity than in roster {before.serial}, not announced by its old one; "
                    f"give its succession file, or say --replace {name} if the old key is lost"
                )
            lines.append(f"{name}: new identity, {'announced by the old' if announced else 'NOT announced by the old'}")
        elif new.role != old.role:
            lines.append(f"{name}: {old.role} becomes {new.role}")
        elif new.tls_key != old.tls_key:
            lines.append(f"{name}: new TLS key")
    return lines + [f"{name}: joins" for name in now if name not in before.members]


def write_template(path: Path) -> None:
    """A new policy that allows nothing. Raises InputError where there is a policy already."""
    try:
        with path.open("x") as file:
            file.write(TEMPLATE)
    except FileExistsError:
        raise InputError(f"'{path}' is there already; edit it") from None
    except OSError as error:
        hint = "; `secure-fvi keys init` makes a site's folder" if isinstance(error, FileNotFoundError) else ""
        raise InputError(f"cannot write '{path}': {error.strerror}{hint}") from None
    path.chmod(0o600)
