"""Refusals that no behaviour of the other tests needs: each bad file, certificate, row or message, by name."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import shutil
import types
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from consortium_run import SILOS, Job
from consortium_run import met as countersigned
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from deployment_world import DAY, NOW, World, open_witness
from fuzzing import opened_job, site_world
from safetensors.torch import load_file, save
from test_formula_sites import Study

from secure_fvi.aggregation import Masked
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import SqliteStore
from secure_fvi.building import Guards
from secure_fvi.deployment import (
    consortium,
    countersigning,
    deciding,
    fence,
    fenced,
    model_hash,
    session_messages,
    site_job,
)
from secure_fvi.deployment import site as site_of
from secure_fvi.deployment.certificates import general_name, is_p256, pem_of
from secure_fvi.deployment.consortium import ConsortiumRoster, Sums, write_roster
from secure_fvi.deployment.countersigning import open_ledger, open_trail
from secure_fvi.deployment.deciding import job_entry
from secure_fvi.deployment.going import Unfit
from secure_fvi.deployment.holding import DurableSilo
from secure_fvi.deployment.home import Home, _close, check_private
from secure_fvi.deployment.job import make_offer, read_offer, sign_offer
from secure_fvi.deployment.keeping import install, sign, write_template
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.names import Hex32, Table, now, parse_table
from secure_fvi.deployment.serving import Hub, remote_federation
from secure_fvi.deployment.session_messages import (
    CODEC,
    END,
    JOIN,
    OPEN,
    End,
    Joined,
    Open,
    schema_digest,
    session_of,
    unpack_schema,
)
from secure_fvi.deployment.site import Site, client_of, server_of
from secure_fvi.deployment.site_job import Local, SiteJob, check_supported, job_folder
from secure_fvi.deployment.status import read_status
from secure_fvi.deployment.trail import TRAIL, TrailChain
from secure_fvi.deployment.trail_verify import rows, verify
from secure_fvi.engines.stream_client import answered
from secure_fvi.errors import (
    AggregationError,
    DataError,
    InputError,
    PolicyError,
    ProtocolError,
    RecordError,
    SecureFVIError,
    SessionLost,
)
from secure_fvi.federated_model import Schema
from secure_fvi.files import read_bytes, write_bytes
from secure_fvi.messages import ROUND, decode_broadcast, encode_broadcast
from secure_fvi.privacy.chain import GENESIS, make_row
from secure_fvi.privacy.ledger_terms import LEDGER, Budget
from secure_fvi.privacy.witness import Witness
from secure_fvi.runs import records, wording
from secure_fvi.runs.config import parse
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.records import read_table
from secure_fvi.silo import UNANSWERABLE, Silo

CONFIG: dict[str, Any] = {
    "model": {"program": "six-cities"},
    "partition": {"ids": ["east", "north", "south"], "count": 3},
    "algorithm": {"name": "sfvi", "iterations": 5},
}


def raises(error: type[Exception], what: str) -> Any:
    return pytest.raises(error, match=what)


# Files and names


class Hashed(Table):
    hash: Hex32


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * 11)
    with raises(InputError, "the file '.*' has more than 10 bytes"):
        read_bytes(tmp_path / "long", "the file", 10)
    with raises(InputError, "here: not a TOML file: not UTF-8 text"):
        parse_table(b"a = '\xff'", Table, "here")
    for text in ("00" * 31, "00" * 33, "0g" * 32, "AA" * 32):
        with raises(InputError, "must be 64 hexadecimal digits"):
            parse_table(f"hash = '{text}'".encode(), Hashed, "here")
    assert parse_table(f"hash = '{'0f' * 32}'".encode(), Hashed, "here").hash == "0f" * 32
    with raises(InputError, "cannot write"):
        write_bytes(tmp_path / "long" / "file", b"")
    with raises(InputError, "cannot write"):
        write_template(tmp_path / "long" / "policy.toml")
    with raises(InputError, r"/long/folder' cannot be made \(Not a directory\); give another folder"):
        _close(tmp_path / "long" / "folder")
    with raises(InputError, "policy: not a TOML file: it begins with a byte order mark: save it as UTF-8 without one"):
        parse_table(b"\xef\xbb\xbf" + f"hash = '{'0f' * 32}'".encode(), Hashed, "policy")
    with raises(InputError, "neither a host name nor an IP address"):
        general_name("a" * 64 + ".org")
    p256, curve = generate_private_key(SECP256R1()), generate_private_key(SECP384R1())
    keys = (p256, p256.public_key(), Ed25519PrivateKey.generate(), curve, None)
    assert [is_p256(k) for k in keys] == [True, True, False, False, False]


def test_job_folders_are_below_the_sites_own(world: World) -> None:
    for bad in ("", "../../etc", "a/b", "a.b", "a b", "j\u00f3b", "x" * 101):
        with raises(ProtocolError, "letters, digits, dashes"):
            job_folder(world.homes["north"], bad)
    assert job_folder(world.homes["north"], "job-1").parent.parent == world.homes["north"].state_folder


# Certificates


def test_admission_is_for_members_of_this_consortium_while_its_roster_lasts(world: World) -> None:
    home = world.homes["north"]
    pem = pem_of(home.certificate())
    assert home.roster(NOW).whose(pem, NOW).id == "north"
    with raises(ProtocolError, "expired at"):
        world.write(now=NOW - 3 * DAY, days=2).whose(pem, NOW)
    with raises(InputError, "what the other side presented is no certificate"):
        home.roster(NOW).whose(b"-----BEGIN", NOW)


# Home


def test_a_sites_folder(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(InputError, "id: '.*' must be"):
        Home.create(tmp_path / "new", "a b", "silo")
    assert not (tmp_path / "new").exists()
    home = world.homes["north"]
    with raises(InputError, "does not hold the identity"):
        home.records_identity(bytes(32))
    with raises(InputError, "no roster is in force"):
        Home.create(tmp_path / "new", "west", "silo", passphrase="long enough").roster(NOW)
    roster = home.roster(NOW)
    members = [m if m.id != "north" else m.model_copy(update={"role": "holder"}) for m in roster.members.values()]
    other = write_roster("study", members, NOW, Sums(min_cohort=2))
    with raises(ProtocolError, "the roster calls 'north' a holder, here it is a silo"):
        home.check_own(other)
    p256, edwards = home.path / "tls.key", home.path / "identity.pem"
    home.state_secret()
    (home.path / "state.key").write_bytes(p256.read_bytes())
    with raises(RecordError, "of another kind than the one that was made here"):
        home.state_secret()
    p256.write_bytes(edwards.read_bytes())
    with raises(InputError, "of another kind than P-256"):
        home.tls_key()
    edwards.unlink()
    with raises(ProtocolError, "has no identity.pem: bring it back from a backup"):
        home.identity_in(roster)
    (home.path / "accepted.json").write_text("{}}")
    with raises(InputError, "is damaged"):
        home.roster(NOW)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    stranger = type("Stat", (), {"st_mode": 0o600, "st_uid": 777})()
    with raises(InputError, "belongs to another user"):
        check_private(type("Path", (), {"stat": lambda self: stranger, "__str__": lambda self: "x"})())  # type: ignore[arg-type]


@pytest.mark.parametrize("looked", [True, False])
def test_a_roster_that_was_checked_ends_when_it_ends(
    world: World, monkeypatch: pytest.MonkeyPatch, looked: bool
) -> None:
    """Files that are unchanged are not read again; the time goes on. The control looks at no clock then."""
    home = world.homes["north"]
    home._checked = home._files(), home.roster(NOW), home.identity()
    if not looked:
        monkeypatch.setattr(ConsortiumRoster, "check_time", lambda *_: None)
    with raises(ProtocolError, "expired at") if looked else nullcontext():
        home.roster(NOW + 4000 * DAY)


def test_who_has_no_passphrase_goes_by_the_roster_that_was_accepted(world: World) -> None:
    """Another of its number, though all have signed it, is not in force, nor one that names another identity than this
    site's. The control is the one accepted."""
    home = world.homes["north"]
    assert home.roster_by_public_keys(NOW).hash == home.roster(NOW).hash
    public = home.path / "identity.pub"
    own = public.read_text()
    public.write_text((world.homes["east"].path / "identity.pub").read_text())
    with raises(ProtocolError, "the roster names another role or identity for 'north' than this site's"):
        home.roster_by_public_keys(NOW)
    public.write_text(own)
    accepted = home.path / "accepted.json"
    accepted.write_text(accepted.read_text().replace(home.roster(NOW).hash.hex(), "00" * 32))
    with raises(ProtocolError, "this site has accepted another roster 1"):
        home.roster_by_public_keys(NOW)


def test_a_roster_in_force_has_this_sites_own_keys_right(world: World, tmp_path: Path) -> None:
    """Signed by all and numbered right: a site whose own entry is another's still refuses it."""
    home, key = world.homes["north"], Identity()
    roster = home.roster(NOW)
    changed = {"identity": key.public_key.hex()}
    members = [m if m.id != "north" else m.model_copy(update=changed) for m in roster.members.values()]
    forged = write_roster("study", members, NOW)
    (tmp_path / "draft.toml").write_bytes(forged.content)
    with raises(ProtocolError, "the roster names another identity for 'north'"):  # before anybody signs it
        install(home, tmp_path / "draft.toml", NOW)
    path = home.roster_file(1)
    path.write_bytes(forged.content)
    for name, other in world.homes.items():
        signer = key if name == "north" else other.identity()
        (consortium.signature_folder(path) / f"{name}.sig").write_bytes(
            _bytes(consortium.sign_roster(forged, name, signer))
        )
    home._accept(serial=1, roster=forged.hash.hex())
    with raises(ProtocolError, "the roster names another identity for 'north'"):
        home.check_roster(path, NOW)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def test_a_signed_roster_past_its_time_is_not_loaded(world: World) -> None:
    path = world.homes["north"].roster_file(1)
    with raises(ProtocolError, "expired at"):
        consortium.load_roster(path, NOW + 4000 * DAY)


# The roster

ROSTERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "out of order": (lambda t: t["member"].reverse(), "members must be sorted by id"),
    "of no time": (lambda t: t.update(expires=t["made"]), "'expires' must be after 'made'"),
    "a second without a first": (lambda t: t.update(serial=2), "empty for serial 1 alone"),
    "a first with one before": (lambda t: t.update(previous="00" * 32), "empty for serial 1 alone"),
    "too few silos": (lambda t: t["sums"].update(min_cohort=4), "3 silos cannot make a cohort of 4"),
}


@pytest.mark.parametrize("case", ROSTERS)
def test_rosters_that_contradict_themselves(world: World, case: str) -> None:
    from secure_fvi.deployment.consortium import parse_roster

    change, what = ROSTERS[case]
    table = __import__("tomllib").loads(world.homes["hub"].roster(NOW).content.decode())
    change(table)
    with raises(InputError, what):
        parse_roster(wording.dumps(table).encode(), "here")


def test_a_roster_follows_one_of_its_own_consortium(world: World) -> None:
    roster = world.homes["hub"].roster(NOW)
    with raises(InputError, "the roster before is of consortium 'study', not 'trial'"):
        write_roster("trial", list(roster.members.values()), NOW, previous=roster)


# Records


def chain() -> TrailChain:
    made = TrailChain("north")
    follow(made, GENESIS, {"silo": "north", "public_key": bytes(32)})
    follow(made, "job", JOB)
    return made


def follow(made: TrailChain, kind: str, body: object) -> None:
    row = make_row(made.kind, made.silo, made.length + 1, made.head, made.time + 1, kind, body)  # type: ignore[arg-type]
    made.follow(row)


JOB = {
    "job": "j", "offer": bytes(32), "roster": bytes(32), "model": bytes(32), "policy": bytes(32),
    "accepted": True, "reason": "", "data_set": "d", "epsilon": None, "delta": None,
}  # fmt: skip
EXCHANGE = {"job": "j", "peer": "hub", "step": "sum", "received": [1, bytes(32)], "sent": None, "release": ""}
ROWS: dict[str, tuple[str, object, str]] = {
    "a roster and more": ("roster", {"serial": 1, "roster": bytes(32), "more": 1}, "must have the fields"),
    "a short roster": ("roster", {"serial": 1, "roster": bytes(31)}, "a digest has 32 bytes"),
    "a policy and more": ("policy", {"policy": bytes(32), "more": 1}, "must have the fields"),
    "a job and more": ("job", {**JOB, "more": 1}, "must have the fields"),
    "an omission and more": ("omission", {"job": "j", "kind": "late", "what": "x", "more": 1}, "must have the fields"),
    "a note and more": ("note", {"job": "j", "what": "x", "more": 1}, "must have the fields"),
    "an end and more": ("close", {"job": "j", "outcome": "x", "more": 1}, "must have the fields"),
    "a kind of tomorrow": ("dream", {}, "unknown to this version"),
    "an exchange and more": ("exchange", {**EXCHANGE, "more": 1}, "must have the fields"),
    "a peer without a name": ("exchange", {**EXCHANGE, "peer": 1}, "'peer' must be text"),
    "a message of no size": ("exchange", {**EXCHANGE, "sent": [-1, bytes(32)]}, "its size and its digest"),
    "a message of no digest": ("exchange", {**EXCHANGE, "sent": [1]}, "its size and its digest"),
    "a short digest": ("exchange", {**EXCHANGE, "sent": [1, bytes(31)]}, "a digest has 32 bytes"),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_a_log_that_do_not_say_what_their_kind_says(case: str) -> None:
    kind, body, what = ROWS[case]
    made = chain()
    with pytest.raises((InputError, ProtocolError), match=what):
        follow(made, kind, body)
    follow(made, "exchange", EXCHANGE)


def test_a_file_of_two_logs_is_none(tmp_path: Path) -> None:
    from secure_fvi.deployment.trail import Trail

    for party in ("north", "south"):
        Trail.open(tmp_path / "log.sqlite", party, Identity(), create=True).close()
    with raises(InputError, "holds 2 audit logs instead of one"):
        verify(tmp_path / "log.sqlite")


def test_statements_under_a_key_that_is_not_the_members(world: World) -> None:
    log = open_trail(world.homes["north"])
    witness = open_witness(world.homes["hub"])
    with raises(ProtocolError, "not under an identity of the member that made it"):
        countersigning._countersigned(witness, log.statement(0), (bytes(32),), "north")
    assert countersigning._countersigned(witness, log.statement(0), (log.chain.public_key,), "north")


# Jobs and sessions


def test_an_offer_has_one_form(world: World) -> None:
    hub = world.homes["hub"]
    config, roster = parse(CONFIG, "test"), hub.roster(NOW)
    offer = make_offer(config, roster, "hub", manifest(config).hash, NOW)

    fields = msgpack.unpackb(offer.encoded)
    other = msgpack.packb(fields, use_bin_type=True, use_single_float=False) + b""
    assert other == offer.encoded
    # A number in nine bytes says the same as in one.
    version = msgpack.packb(fields[0])
    at = offer.encoded.index(version, 1 if offer.encoded[0] < 0xDC else 3)
    wide = offer.encoded[:at] + b"\xcf" + int(fields[0]).to_bytes(8, "big") + offer.encoded[at + len(version) :]
    assert msgpack.unpackb(wide) == fields
    padded = dataclasses.replace(offer) if dataclasses.is_dataclass(offer) else offer
    padded.__dict__["encoded"] = wide
    with raises(ProtocolError, "not in its one form"):
        read_offer(sign_offer(padded, hub.identity()), roster, "north", NOW)


def test_models_that_are_not_here() -> None:
    with raises(InputError, "no program is called 'nothing' here"):
        model_hash._module_of("nothing")
    with raises(InputError, "there is no module 'nothing_of_the_kind'"):
        model_hash.closure("nothing_of_the_kind")


def test_sessions_rest_on_fresh_bytes_of_each_silo_and_on_a_key_where_there_is_one(world: World) -> None:
    roster = world.homes["hub"].roster(NOW)
    silos = ["east", "north", "south"]
    opened = Open(silos, [bytes(32)] * 3, bytes(32), b"")
    assert len(session_of(roster, bytes(32), opened, Masked())) == 32
    with raises(ProtocolError, "32 fresh bytes of each silo"):
        session_of(roster, bytes(32), opened._replace(nonces=[bytes(32)] * 2), Masked())
    for message, sums in ((opened, Homomorphic()), (opened._replace(holder=bytes(32)), Masked())):
        with raises(ProtocolError, "an encryption key where its sums are homomorphic, and there alone"):
            session_of(roster, bytes(32), message, sums)


def test_schemas_that_are_none() -> None:
    for bad in (b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"a": 1})):
        with raises(ProtocolError, "schema"):
            session_messages.unpack_schema(bad)
    for dtype, known in (("torch.float64", True), ("torch.complex64", False), ("float128", False)):
        packed = msgpack.packb([[["x", [3], dtype]], {}, save({})])
        if known:
            session_messages.unpack_schema(packed)
        else:
            with raises(ProtocolError, "a malformed schema"):
                session_messages.unpack_schema(packed)


def test_what_runs_in_one_process_alone() -> None:
    together = parse({**CONFIG, "run": {"batch_silos": True}}, "test")
    with raises(InputError, "run.batch_silos: silos compute together in one process alone"):
        check_supported(together)


def test_sites_dial_the_server_of_their_roster_and_take_known_messages(world: World) -> None:
    with raises(InputError, "is the folder of a server, which dials nobody"):
        Site(world.homes["hub"])
    site = Site(world.homes["north"])
    with raises(ProtocolError, "silo 'north': a message of unknown kind"):
        site.handle("job", b"?")
    site.close()

    class Homeless:
        def __init__(self, roster: ConsortiumRoster) -> None:
            self._roster = roster

        def roster(self, now: datetime.datetime) -> ConsortiumRoster:
            return self._roster

    members = [m for m in world.homes["hub"].roster(NOW).members.values() if m.role == "silo"]
    alone = write_roster("study", members, NOW)
    with raises(InputError, "the roster names no server"):
        server_of(Homeless(alone))  # type: ignore[arg-type]


# A site in a job


DATA = Path(os.environ["SECURE_FVI_DATA"]) if os.environ.get("SECURE_FVI_DATA") else None


class OldLedger:
    """A job's guards whose ledger knows of the sums up to `last_index` alone."""

    def __init__(self, inner: Any, last_index: int) -> None:
        self._inner, self.jobs, self.last_index = inner, (object(),), last_index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_site_before_its_session_is_open(world: World, tmp_path: Path) -> None:
    machines, bag = site_world(world, tmp_path, DATA)
    handle = machines[0].take
    assert isinstance(handle, functools.partial)
    site, (job,) = handle.func.__self__, handle.args
    signed = next(m for m in bag if m[:1] == JOIN)
    opening = next(m for m in bag if m[:1] == OPEN)
    with raises(ProtocolError, f"an offer of job '{job}' on the stream of job 'another'"):
        site.handle("another", signed)
    joined = CODEC.unpack(site.handle(job, signed), Joined)  # it has taken the job up again
    opened = CODEC.unpack(opening[1:], Open)
    more = opened._replace(silos=[*opened.silos, "west"], nonces=[*opened.nonces, bytes(32)])
    with raises(ProtocolError, "a session of other silos than the job's"):
        site.handle(job, OPEN + CODEC.pack(more))
    with raises(ProtocolError, "the schema that the server agreed on is not that of this silo's data"):
        site.handle(job, OPEN + CODEC.pack(opened._replace(schema=bytes(32))))
    with raises(SessionLost, "does not rest on this silo's fresh bytes"):
        site.handle(job, OPEN + CODEC.pack(opened._replace(nonces=[bytes(32)] * 3)))
    found = site._open_job(job)
    assert isinstance(found, SiteJob)
    found.restore()
    with raises(ProtocolError, "is not of this job's model"):
        found.end(0, save({"eta/x": torch.zeros(2)}))
    assert found.session == joined.session != b""
    (found.folder / "session").unlink()
    site.close()
    fresh = Site(world.homes["east"], Local(data_dir=DATA))
    fresh.handle(job, signed)
    for message in (ROUND + b"any", END + CODEC.pack(End("finished", 0, b""))):
        with raises(SessionLost, "no session is open here"):
            fresh._open_job(job).handle(message) if message[:1] == ROUND else fresh.handle(job, message)


def test_sessions_of_a_job_are_counted(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over restarts of the site: a server that throws one away sees another order of the ring. The control: as many as
    may be are opened."""
    machines, bag = site_world(world, tmp_path, DATA)
    assert isinstance(machines[0].take, functools.partial)
    site, (job,) = machines[0].take.func.__self__, machines[0].take.args
    signed = next(m for m in bag if m[:1] == JOIN)
    opened = CODEC.unpack(next(m for m in bag if m[:1] == OPEN)[1:], Open)
    at = list(opened.silos).index(site.home.id)

    def anew(site: Site) -> bytes:
        fresh = CODEC.unpack(site.handle(job, signed), Joined).nonce
        nonces = [fresh if k == at else nonce for k, nonce in enumerate(opened.nonces)]
        return site.handle(job, OPEN + CODEC.pack(opened._replace(nonces=nonces)))

    monkeypatch.setattr("secure_fvi.deployment.site_job.MOST_SESSIONS", 4)
    assert len({anew(site) for _ in range(2)}) == 2
    site.close()
    again = Site(world.homes["east"], Local(data_dir=DATA))
    anew(again)
    with raises(ProtocolError, "4 sessions of this job were opened here"):
        anew(again)


def test_a_silo_lets_as_many_sums_lack_silos_as_the_job_says(world: World, tmp_path: Path) -> None:
    """Its own site allows more, and others may allow less."""
    members = [world.request(home) for home in world.homes.values()]
    world.distribute(write_roster("study", members, NOW, Sums(min_cohort=2), world.homes["hub"].roster(NOW)))
    sums = {"kind": "masked", "min_cohort": 2, "max_missing": 1, "max_differences": 2}
    made = Job(world, tmp_path, allow=False, algorithm={"name": "sfvi", "iterations": 5}, aggregation=sums)
    for name in SILOS:
        made.allow(name, min_cohort=2, max_missing=2, max_differences=9)
    hub = world.homes["hub"]
    offer = make_offer(made.config, hub.roster(NOW), "hub", manifest(made.config).hash, NOW)
    signed = JOIN + sign_offer(offer, hub.identity())
    sites = [Site(world.homes[name], Local(data_dir=DATA)) for name in SILOS]
    for site in sites:
        countersigned(hub, site)
    joined = [CODEC.unpack(site.handle(offer.job, signed), Joined) for site in sites]
    opened = Open(list(SILOS), [j.nonce for j in joined], schema_digest(unpack_schema(joined[0].schema)), 0, b"", 2, 1)
    sites[0].handle(offer.job, OPEN + CODEC.pack(opened))
    party = sites[0]._open_job(offer.job).party
    assert party is not None
    limits = party.silo.limits
    assert (limits.missing, limits.differences, limits.lacking) == (1, 2, True)
    for site in sites:
        site.close()


def test_sums_that_the_roster_does_not_allow_are_no_fault_of_the_data(world: World, tmp_path: Path) -> None:
    """Jobs that a site's data could not answer are counted, and after a few none is let in."""
    members = [world.request(home) for home in world.homes.values()]
    world.distribute(write_roster("study", members, NOW, Sums(max_missing=0), world.homes["hub"].roster(NOW)))
    sums = {"kind": "masked", "min_cohort": 3, "max_missing": 1, "max_differences": 1}
    made = Job(world, tmp_path, allow=False, algorithm={"name": "sfvi", "iterations": 5}, aggregation=sums)
    made.allow("east", max_missing=1, max_differences=1)
    hub = world.homes["hub"]
    offer = make_offer(made.config, hub.roster(NOW), "hub", manifest(made.config).hash, NOW)
    with closing(Site(world.homes["east"], Local(data_dir=DATA))) as site:
        countersigned(hub, site)
        joined = CODEC.unpack(site.handle(offer.job, JOIN + sign_offer(offer, hub.identity())), Joined)
        nonces = [joined.nonce, bytes(32), bytes(32)]
        opened = Open(list(SILOS), nonces, schema_digest(unpack_schema(joined.schema)), 0, b"", 3, 1)
        with raises(ProtocolError, "the job's sums are not as strict as the"):
            site.handle(offer.job, OPEN + CODEC.pack(opened))
        assert UNANSWERABLE not in site._trail.chain.jobs[offer.job].omissions


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_options_that_do_not_go_with_the_model_are_no_fault_of_the_data(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """The server hears which, and what to do. In the control it hears that a silo's data do not fit."""
    if not rule:
        monkeypatch.setattr(site_job, "_of_the_job", nullcontext)
    algorithm = {"name": "pvi", "rounds": 2, "virtual_clients": 2, "damping": 0.5}
    said = "use virtual_clients = 1" if rule else "its data do not fit"
    with pytest.raises(ProtocolError, match=rf"silo '.*{said}"):
        Job(world, tmp_path, algorithm=algorithm).run()


def test_a_sites_state_and_its_ledger_agree(world: World, tmp_path: Path) -> None:
    machines, bag = site_world(world, tmp_path, DATA)
    handle = machines[0].take
    assert isinstance(handle, functools.partial)
    job = handle.func.__self__._open_job(handle.args[0])
    job.restore()
    true = job.guards
    job.guards = OldLedger(true, 0)
    job.party = None
    with raises(ProtocolError, "the ledger of 'east' is older than its state of this job, which knows of sum 1"):
        job.restore()
    job.guards = true
    job.restore()
    # Charged, and killed before the answer was kept: the session is given up, and the server told so.
    broadcast = decode_broadcast(next(m for m in bag if m[:1] == ROUND)[1:], job.program.order.asked)
    job.guards = OldLedger(true, broadcast.sum_index + 1)
    later = broadcast._replace(round=broadcast.round + 1, sum_index=broadcast.sum_index + 1)
    with raises(SessionLost, f"sum {later.sum_index} was charged, and its answer is not there"):
        job.handle(ROUND + encode_broadcast(later))
    assert job.join().session == b""
    # A state of another version of this package is not guessed at.
    store, silo = job._store, job.party.silo
    store.put({"party/state": msgpack.packb([1, *msgpack.unpackb(store.get("party/state"))[1:]])})
    with raises(InputError, "was written by another version"):
        DurableSilo(silo, store)


def test_rosters_are_signed_and_accepted_in_their_time_and_order(world: World, tmp_path: Path) -> None:
    home, roster = world.homes["north"], world.homes["north"].roster(NOW)
    with raises(ProtocolError, "expired"):
        sign(home, roster.expires + DAY)
    # A signature of another member, with a byte changed on its way.
    given = consortium.signature_folder(home.newest_roster_file()) / "east.sig"
    row = given.read_text()
    at = row.index("signature = ") + 20
    (tmp_path / "east.sig").write_text(row[:at] + ("0" if row[at] != "0" else "1") + row[at + 1 :])
    with raises(ProtocolError, "east"):
        install(home, tmp_path / "east.sig", NOW)
    assert given.read_text() == row
    sign(home, NOW)
    home._accept(serial=roster.serial + 3)
    for act in (lambda: sign(home, NOW), lambda: home.accept(roster)):
        with raises(ProtocolError, "is older than roster 4"):
            act()
    with raises(InputError, "new private keys need a passphrase"):
        home.seal()
    assert not home.sealed


# A server


def test_a_server_offers_no_formula_that_sites_could_not_agree_on(world: World, tmp_path: Path) -> None:
    """Before any of them is asked. The control is the study's own job."""
    study, hub = Study(world, tmp_path), world.homes["hub"]
    for options in (study.config.model.options, {"priors": {"age": [0.0, 0.5]}}):
        model = study.config.model.model_copy(update={"options": options})
        config = study.config.model_copy(update={"model": model})
        with nullcontext() if "most" in options else raises(InputError, "agreed on beforehand"):
            remote_federation(config, hub, RunDirectory(tmp_path / "run"), "127.0.0.1:0")


def test_a_server_is_one_and_is_the_one_that_was_meant(world: World, tmp_path: Path) -> None:
    with raises(InputError, "is the folder of a silo; a server's is needed here"):
        remote_federation(parse(CONFIG, "test"), world.homes["north"], RunDirectory(tmp_path / "run"), "127.0.0.1:0")
    lossy = {**CONFIG, "aggregation": {"kind": "masked"}, "engine": {"kind": "direct", "on_loss": "drop"}}
    with raises(InputError, "engine.on_loss = 'drop': no sum of this job may lack a silo"):
        remote_federation(parse(lossy, "test"), world.homes["hub"], RunDirectory(tmp_path / "run"), "127.0.0.1:0")
    pem = pem_of(world.homes["hub"].certificate())
    dials = {name: client_of(world.homes["north"], "127.0.0.1:1", name, lambda *_: b"") for name in ("hub", "other")}
    dials["hub"]._check_server(pem)
    with raises(ProtocolError, "the certificate is of 'hub', not of 'other'"):
        dials["other"]._check_server(pem)


def test_a_server_that_loses_all_sessions_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, told = Hub.__new__(Hub), []
    vars(hub).update(
        offer=types.SimpleNamespace(job="j"),
        _trail=types.SimpleNamespace(note=lambda *row: told.append(row)),
        _guards=Guards({}),
    )

    def lost(_: Hub) -> Any:
        raise SessionLost("a session was lost")

    monkeypatch.setattr(Hub, "_session", lost)
    with raises(ProtocolError, "100 sessions were lost; see the silos' logs"):
        hub.run()
    assert len(told) == 100

    def refused(self: Hub, message: bytes) -> Any:
        raise ProtocolError("'escrow': no")

    monkeypatch.setattr(Hub, "_ask_holder", refused)
    with raises(AggregationError, "key holder 'escrow': no"):
        hub._ask_sum(b"")


# The fence


def test_a_tool_that_makes_no_namespaces_is_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    false = shutil.which("false")
    monkeypatch.setattr(shutil, "which", lambda _: false)
    with raises(InputError, "'bwrap' makes none here"):
        fence._tool.__wrapped__()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with raises(InputError, "there is no 'bwrap' here"):
        fence._tool.__wrapped__()


def test_a_home_is_not_below_what_the_process_of_flare_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that process would read what lies beside its workspace. The control is a workspace elsewhere."""
    monkeypatch.setattr(fence, "_tool", lambda *_: "bwrap")
    monkeypatch.setattr(fence, "_NETWORK", (str(tmp_path / "read"),))
    for folder in ("read", "apart"):
        (tmp_path / folder / "north" / "flare").mkdir(parents=True)
    with raises(InputError, "which FLARE's process is to read: move the home"):
        fence.carrying(tmp_path / "read" / "north" / "flare", (), {}, (), None)
    command = fence.carrying(tmp_path / "apart" / "north" / "flare", (), {}, (), None)
    assert command[command.index(str(tmp_path / "read")) - 1] == "--ro-bind"


def test_a_graph_of_other_numbers_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fence.FencedModel(model_hash.Closure({"<model>": b"x"}, {}, {}), "f", None, None, {})
    schema = Schema((("y", (), torch.float64),), {})
    start = types.SimpleNamespace(z_global=torch.zeros(1, dtype=torch.float32))
    monkeypatch.setattr(fence, "_traced", lambda *_: b"P")
    monkeypatch.setattr(fence, "_answers", {})
    traced = types.SimpleNamespace(start=start, warnings=(), evaluate=None)
    monkeypatch.setattr(fence, "read_program", lambda *_, **__: traced)
    with raises(InputError, "another type of numbers than the run"):
        made.exported(schema, torch.float64)
    assert made.exported(schema, torch.float32) is traced


def test_what_the_fence_says_of_files_and_of_code_that_is_not_here(tmp_path: Path) -> None:
    assert fenced._missing(str(tmp_path / "none"))
    for there in (3, str(tmp_path), str(tmp_path / "__pycache__" / "none")):
        assert not fenced._missing(there)
    with raises(InputError, "the model's code is not in this process"):
        fence.FencedModel(None, "f", None, None, {}).roles.fn()  # type: ignore[arg-type]


# What a site's refusals tell


def _offered(world: World, folder: Path) -> tuple[Any, bytes]:
    made = Job(world, folder, algorithm={"name": "sfvi", "iterations": 5}, aggregation={"kind": "masked"})
    hub = world.homes["hub"]
    offer = make_offer(made.config, hub.roster(NOW), "hub", manifest(made.config).hash, NOW)
    return offer, JOIN + sign_offer(offer, hub.identity())


@pytest.mark.parametrize("least", [0.1, 1e6], ids=["control", "refused"])
def test_noise_below_a_sites_floor_is_refused_once_it_is_derived(world: World, tmp_path: Path, least: float) -> None:
    """It follows from the traced model, so that the offer alone does not tell."""
    dp = {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "data_set": "data"}
    made = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 2, "family": "diagonal"}, privacy=dp)
    floor = {"dp": "required", "max_epsilon": 10.0, "max_delta": 1e-4, "min_noise_multiplier": least}
    made.allow("east", privacy={**floor, "noise": ["distributed"]})
    hub, site = world.homes["hub"], Site(world.homes["east"], Local(data_dir=DATA))
    offer = make_offer(made.config, hub.roster(NOW), "hub", manifest(made.config).hash, NOW)
    countersigned(hub, site)
    with nullcontext() if least < 1 else raises(PolicyError, "phase '.*' has a noise multiplier of"):
        site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))
    site.close()


def test_a_site_looks_at_its_own_records_before_it_takes_a_job_up(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its first job and at each that it goes on with; what it looks at: `test_countersigning.py`. The control: where
    nothing is missing the job is taken."""
    offer, join = _offered(world, tmp_path)

    def missing(*_: Any) -> None:
        raise ProtocolError("rows are missing")

    for found in (missing, site_of.check_seen):
        monkeypatch.setattr(site_of, "check_seen", found)
        site = Site(world.homes["east"], Local(data_dir=DATA))
        countersigned(world.homes["hub"], site)
        with raises(ProtocolError, "rows are missing") if found is missing else nullcontext():
            site.handle(offer.job, join)
        site.close()
        monkeypatch.undo()


@pytest.mark.parametrize("met", [0, 2, 3])
def test_jobs_that_data_could_not_answer_are_counted(world: World, tmp_path: Path, met: int) -> None:
    """One bit of the records a job: 68 jobs gave one silo's mean and size. The control: fewer, and another data set."""
    offer, join = _offered(world, tmp_path)
    with closing(open_trail(world.homes["east"])) as trail:
        for k in range(met + 3):
            data_set = offer.data_set if k < met else "another"
            before = dataclasses.replace(offer, job=f"before-{k}", data_set=data_set)
            trail.job(job_entry(before, bytes(32), accepted=True))
            trail.omission(before.job, "unanswerable", "round 0: AggregationError")
    site = Site(world.homes["east"], Local())
    try:
        countersigned(world.homes["hub"], site)
        if met < 3:
            assert CODEC.unpack(site.handle(offer.job, join), Joined).nonce
        else:
            with raises(
                PolicyError, r"3 jobs asked what the records of 'data' could not answer \(max_unanswered = 3\)"
            ):
                site.handle(offer.job, join)
    finally:
        site.close()


def test_a_new_job_waits_until_records_were_countersigned(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was restored from a copy would be charged again for a job of a server that leaves that out; so it
    is in the control. One that goes on needs no more of it."""
    offer, join = _offered(world, tmp_path)
    site, hub = Site(world.homes["east"], Local()), world.homes["hub"]
    with closing(site):
        with raises(SessionLost, f"job '{offer.job}' is new to 'east', and its records were not countersigned first"):
            site.handle(offer.job, join)
        assert offer.job not in site._trail.chain.jobs
        countersigned(hub, site)
        assert site.handle(offer.job, join)
        another, offered = _offered(world, tmp_path)
        with raises(SessionLost, "is new to 'east'"):
            site.handle(another.job, offered)
        assert site.handle(offer.job, join)
    seen = countersigning._CODEC.pack(countersigning.Seen([], []))
    with closing(Site(world.homes["east"], Local())) as site:
        with raises(ProtocolError, r"'hub' shows 0 rows of the audit-log, of which it has countersigned \d+"):
            site.handle("", countersigning.SEEN + seen)
        with monkeypatch.context() as patched:  # switched off, both
            patched.setattr(site_of, "decide", lambda *of, met: deciding.decide(*of, met=True))
            patched.setattr(countersigning, "_check_shown", countersigning._check_own)
            site.handle("", countersigning.SEEN + seen)
            assert site.handle(another.job, offered)


@pytest.mark.parametrize("way", ["alone", "without the ledger", "of an earlier time", "as it ought to be"])
def test_the_last_message_of_countersigning_opens_no_door_by_itself(world: World, tmp_path: Path, way: str) -> None:
    """A server that leaves the first message out, in which it would have to show what it has seen, or has receipts of
    another time. The control is the exchange as it ought to be."""
    offer, join = _offered(world, tmp_path)
    hub, east = world.homes["hub"], world.homes["east"]
    with closing(open_ledger(east)) as ledger:
        ledger.set_budget(Budget("others", 1.0, 1e-5))
    kept: list[bytes] = []

    def through(site: Site) -> None:
        """The whole exchange, whose last message the server may have changed."""
        handle = site.handle

        def altered(job: str, message: bytes) -> bytes:
            if kept and way == "without the ledger":
                receipts = countersigning._CODEC.unpack(message[1:], countersigning.Countersigned)
                message = countersigning.SEEN + countersigning._CODEC.pack(receipts._replace(ledger=b""))
            kept.append(message)
            return handle(job, message)

        site.handle = altered  # type: ignore[method-assign]
        countersigned(hub, site)
        site.handle = handle  # type: ignore[method-assign]

    with closing(Site(east, Local())) as site:
        through(site)
        if way == "as it ought to be":
            assert site.handle(offer.job, join)
            return
        if way != "without the ledger":  # receipts were rows of their own, so that there is more now
            site._met = False
            if way == "alone":
                site._stated = b""
            else:
                with closing(SqliteStore(hub.seen_file)) as store:
                    seen = [
                        [Witness("hub", hub.identity(), store, kind).receipt(site._trail.chain.public_key)]
                        for kind in (TRAIL, LEDGER)
                    ]
                site.handle("", countersigning.SEEN + countersigning._CODEC.pack(countersigning.Seen(*seen)))
            site.handle("", kept[1])
        with raises(SessionLost, "records were not countersigned first"):
            site.handle(offer.job, join)


def _opened(hub: Home, site: Site, offer: Any, join: bytes) -> Any:
    """The job at 'east', joined and opened."""
    countersigned(hub, site)
    joined = CODEC.unpack(site.handle(offer.job, join), Joined)
    nonces = [joined.nonce if silo == "east" else bytes(32) for silo in offer.silos]
    opening = Open(list(offer.silos), nonces, schema_digest(unpack_schema(joined.schema)), 0, b"", 3, 0)
    site.handle(offer.job, OPEN + CODEC.pack(opening))
    job = site._open_job(offer.job)
    assert isinstance(job, SiteJob)
    assert job.party is not None
    return job


@pytest.mark.parametrize("hid", [2, 3])
def test_jobs_of_which_a_silo_hid_what_they_asked_are_counted(world: World, tmp_path: Path, hid: int) -> None:
    """That a number at the end of a run was too large to tell is a bit of a silo's records, job after job. After three
    its site answers none, without a word to others. The controls: after two; and on another data set."""
    offer, join = _offered(world, tmp_path)
    hub, home = world.homes["hub"], world.homes["east"]
    for k in range(hid + 3):
        (home.state_folder / "jobs" / f"before-{k}").mkdir(parents=True)
        data_set = offer.data_set if k < hid else "another"
        Unfit(home.state_folder / "jobs" / f"before-{k}", "east", data_set).tell("too large", hid=True)
    with closing(Site(home, Local())) as site:
        job = _opened(hub, site, offer, join)
        assert job.party.silo.past.failed == (hid == 3)
        if hid == 2:
            assert not job.unfit.said
            job.party.silo.view.hides(True)
            assert "too large to tell; it is hidden" in job.unfit.said
            assert Unfit(home.state_folder / "jobs" / offer.job, "east").hid
        assert list(site._trail.chain.jobs[offer.job].omissions) == []


def test_what_was_hidden_stays_hidden_where_sums_have_no_masks(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over sums that others may see, a silo's log counts what it hid; the silo that a restart makes hides on."""
    monkeypatch.setattr(Silo, "keeps_to_itself", False)
    offer, join = _offered(world, tmp_path)
    hub, home = world.homes["hub"], world.homes["east"]
    for begun in (False, True):
        with closing(Site(home, Local())) as site:
            silo = _opened(hub, site, offer, join).party.silo
            assert silo.hides == begun
            silo.view.hides(True)
            assert UNANSWERABLE in site._trail.chain.jobs[offer.job].omissions


def _asks(world: World, folder: Path, number: int, records: int) -> tuple[int, bytes]:
    """What a site with 200 records answers to JOIN and OPEN of a job that says that there are so many over all."""
    made = Job(
        world, folder, algorithm={"name": "bcm", "prior": "split", "total_records": records, "local_steps": 10},
        aggregation={"kind": "masked"},
    )  # fmt: skip
    hub, site = world.homes["hub"], Site(world.homes["east"], Local())
    offer = make_offer(made.config, hub.roster(NOW), "hub", manifest(made.config).hash, NOW, f"job-{number}")
    with closing(site):
        countersigned(hub, site)
        status, reply = answered(site.handle, offer.job, JOIN + sign_offer(offer, hub.identity()))
        if status:
            return status, reply
        joined = CODEC.unpack(reply, Joined)
        nonces = [joined.nonce if silo == "east" else bytes(32) for silo in offer.silos]
        schema = schema_digest(unpack_schema(joined.schema))
        opening = Open(list(offer.silos), nonces, schema, 0, b"", 3, 0)
        with pytest.raises(ProtocolError, match=r"the session 99, the offer \d+, 'east' \d+"):
            site.handle(offer.job, OPEN + CODEC.pack(opening._replace(protocol=99)))
        return answered(site.handle, offer.job, OPEN + CODEC.pack(opening))


@pytest.mark.parametrize("of_data", ["where it is raised", "where it is refused", "nowhere"])
def test_a_start_that_the_records_do_not_allow_is_counted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_data: str
) -> None:
    """An algorithm begins at OPEN: BCM compares the silo's records with a public number, which a server chooses. Three
    jobs are told, then none is let in. Either of two places sees to it, whatever the algorithm raises. The control:
    where neither does, the server goes on until it has the number of records to the last one."""
    begin = Silo.begin

    def begun(self: Silo) -> None:
        try:
            begin(self)
        except DataError as error:
            raise InputError(str(error)) from None

    monkeypatch.setattr(Silo, "begin", begun)
    if of_data != "where it is raised":
        monkeypatch.setattr(site_job, "_of_data", lambda silo: nullcontext())
    if of_data == "nowhere":
        monkeypatch.setattr("secure_fvi.deployment.site._NOT_OF_DATA", Exception)
    assert _asks(world, tmp_path, 0, 200)[0] == 0
    said = [_asks(world, tmp_path, number, 199)[1] for number in range(1, 5)]
    assert [b"do not fit the model" in reply for reply in said[:3]] == [True] * 3
    if of_data == "nowhere":
        assert b"do not fit the model" in said[3]
        assert _asks(world, tmp_path, 5, 200)[0] == 0
    else:
        assert b"max_unanswered = 3" in said[3]


def _rows(world: World, folder: Path, cells: str) -> Any:
    """A site's reader, whose own file has 500 rows with `cells` in one of them."""
    path = folder / "cohort.csv"
    path.write_text("record_id,wheeze\n" + "".join(f"{i},{cells if i == 16 else 1}\n" for i in range(500)))
    return lambda *_: read_table(path, "silo[0].data")


_BAD: dict[str, Callable[[World, Path], Callable[..., Any]]] = {
    "no number": lambda world, folder: _rows(world, folder, "nan"),
    "a line too long": lambda world, folder: _rows(world, folder, "1,1"),
    "no file": lambda world, folder: lambda *_: read_table(folder / "none.csv", "silo[0].data"),
    "lengths": lambda world, folder: (
        lambda *_: ({"wheeze": torch.ones(5), "age": torch.ones(4)}, torch.arange(5), True)
    ),
    "an error of its own": lambda world, folder: lambda *_: {}["wheeze"],
    "every row twice": lambda world, folder: (
        lambda *_: ({"smoke": torch.arange(80) // 2 / 40, "wheeze": torch.ones(80, 4)}, torch.arange(80), False)
    ),
}


def _told(world: World, join: bytes, job: str) -> tuple[int, bytes]:
    site = Site(world.homes["east"], Local())
    countersigned(world.homes["hub"], site)
    try:
        return answered(site.handle, job, join)
    finally:
        site.close()


def test_whatever_is_wrong_with_its_data_a_site_says_the_same_of_them(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To server and paper trail: no class of an error, no count, no line, no path. The control: its own process is
    told which."""
    offer, join = _offered(world, tmp_path)
    told, own = set(), set()
    for make in _BAD.values():
        monkeypatch.setattr(site_job, "silo_part", make(world, tmp_path))
        told.add(_told(world, join, offer.job))
        site = Site(world.homes["east"], Local())
        countersigned(world.homes["hub"], site)
        with pytest.raises(DataError) as caught:
            site.handle(offer.job, join)
        own.add(str(caught.value))
        site.close()
    assert len(told) == 1
    assert len(own) == len(_BAD)
    log = world.homes["east"].path.rglob("audit-log.sqlite*")
    held = b"".join(path.read_bytes() for path in log)
    assert b"its data do not fit the model" in held
    for secret in (
        b"cohort.csv",
        b"none.csv",
        b"line 18",
        b"KeyError",
        b"DataError",
        b"InputError",
        b"has 5",
        b"repeat",
    ):
        assert secret not in held


@pytest.mark.parametrize("bad", [True, False], ids=["refused", "control"])
def test_jobs_that_data_do_not_fit_are_counted(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: bool
) -> None:
    """Each such job would give an exact bit of the records: the fourth is not looked at. The control: of data that fit,
    every one is let in. A job that is offered again counts once."""
    right = records.silo_part

    def miscoded(*args: Any) -> Any:
        rows, ids, own = right(*args)
        return {**rows, "wheeze": rows["wheeze"] + bad}, ids, own

    monkeypatch.setattr(site_job, "silo_part", miscoded)
    said = []
    for _ in range(5):
        offer, join = _offered(world, tmp_path)
        said.append([_told(world, join, offer.job)[1] for _ in range(2)])
    stopped = [b"outside this site's policy" in again for pair in said for again in pair]
    assert stopped == [False] * 6 + [bad] * 4


def test_a_message_that_is_refused_has_a_row_as_well(world: World, tmp_path: Path, monkeypatch: Any) -> None:
    """So that whoever asks until something fits is seen to have asked; after so many there are no more of a job."""
    monkeypatch.setattr("secure_fvi.deployment.site._MOST_REFUSED", 3)
    offer, join = _offered(world, tmp_path)
    site = Site(world.homes["east"], Local())
    countersigned(world.homes["hub"], site)
    site.handle(offer.job, join)
    for k in range(5):
        with pytest.raises(SecureFVIError):
            site.handle(offer.job, OPEN + bytes([k]))
        assert site._trail.chain.jobs[offer.job].omissions == {"refused": min(k + 1, 3)}
    with pytest.raises(SecureFVIError):
        site.handle("another", OPEN)
    site.close()


@pytest.mark.parametrize("most", [5, 1000], ids=["limited", "control"])
def test_refused_offers_do_not_fill_a_sites_log(world: World, monkeypatch: Any, most: int) -> None:
    """Of a server that offers job after job, sends what is none, or one refused offer again and again: rows of a day,
    and one at its end that says how many more there were. The control: a row each, below the limit."""
    monkeypatch.setattr("secure_fvi.deployment.trail.MOST_ASKED", most)
    home, hub = world.homes["east"], world.homes["hub"]
    write_template(home.policy_file)
    table = {"model": {"program": "six-cities"}, "partition": {"count": 3, "ids": ["east", "north", "south"]}}

    def offer(k: int) -> bytes:
        made = make_offer(parse(table, "test"), hub.roster(NOW), "hub", bytes(32), NOW, f"x{k}")
        return sign_offer(made, hub.identity())

    asked = [offer(0), *(offer(k) for k in range(8)), *(b"garbage%d" % k for k in range(8))]

    def ask() -> int:
        """Rows that a site of its own, closed afterwards, writes of all of them."""
        site = Site(home, Local())
        before = site._trail.chain.length
        for k, message in enumerate(asked):
            with pytest.raises(SecureFVIError):
                site.handle(f"x{k}", JOIN + message)
        site.close()
        return verify(home.log_file).length - before

    first, again = ask(), ask()
    assert (first, again) == ((2 + most + 1 + 1, 1) if most == 5 else (2 + len(asked), len(asked)))  # 2: roster, policy
    says = [row.fields()["what"] for row in rows(home.log_file)[1] if row.kind == "note"]
    assert (f"{len(asked)} more refusals and notes of one day have no row" in says) == (most == 5)


def test_an_end_is_not_refused_for_what_data_do(world: World, tmp_path: Path, monkeypatch: Any) -> None:
    """A server named one posterior after the other, and heard where the model fails on the records, without noise or
    charge. The control: own latents are kept where they can be worked out (test_distributed.py)."""

    def fails(*_: Any) -> Any:
        raise torch.linalg.LinAlgError("record 7")

    job = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 4})
    monkeypatch.setattr("secure_fvi.deployment.site_job.LocalPosterior.sample", fails)
    assert job.run() == job.local()
    for silo in ("east", "north", "south"):
        (kept,) = (world.homes[silo].path / "results").glob("*.safetensors")
        assert not [name for name in load_file(kept) if name.startswith("mean/")]
        (record,) = verify(world.homes[silo].log_file).jobs.values()
        assert record.outcome is not None


def test_a_policy_that_is_edited_counts_for_the_job_that_runs(world: World, tmp_path: Path, monkeypatch: Any) -> None:
    """Its owner took a model, or the data, back, and the job went on until the process was started again. The control
    looks at the roster alone, as it was."""
    made = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 4})
    opened, path = opened_job(made, None), world.homes["east"].policy_file
    again = next(m for m in opened.bag if m[:1] == OPEN)
    answer = opened.say("east", again)
    made.allow("east", algorithms=["pvi"])
    with raises(PolicyError, "algorithm 'sfvi' is not accepted"):
        opened.say("east", again)
    path.write_text("algorithms = [")  # half an edit is no fault of the records
    with raises(PolicyError, "policy cannot be read"):
        opened.say("east", again)
    assert "unanswerable" not in opened.sites["east"]._trail.chain.jobs[opened.job].omissions
    made.allow("east")
    assert opened.say("east", again) == answer
    monkeypatch.setattr(Site, "_rules", lambda self: (self.home.in_force,))
    opened.say("east", again)
    made.allow("east", algorithms=["pvi"])
    assert opened.say("east", again) == answer
    for site in opened.sites.values():
        site.close()


def test_a_server_adds_nothing_to_a_silos_own_results(world: World, tmp_path: Path) -> None:
    """Tensors of any other name went into the file beside what the silo works out itself. Control: the posterior."""
    opened = opened_job(Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 4}), None)
    job = opened.sites["east"]._open_job(opened.job)
    assert isinstance(job, SiteJob)
    found = job._family.posterior(job._family.init())
    tensors = {f"eta/{k}": v for k, v in found.eta.items()} | {f"theta/{k}": v for k, v in found.theta.items()}
    tensors = {name: t.clone().contiguous() for name, t in tensors.items()}

    def end(**more: torch.Tensor) -> bytes:
        return opened.say("east", END + CODEC.pack(End("finished, converged", 0, save({**tensors, **more}))))

    results = world.homes["east"].path / "results"
    for name in ("mean/dose", "sd/dose", "note"):
        with raises(ProtocolError, "is not of this job's model"):
            end(**{name: torch.ones(1)})
    assert not results.exists()
    end()
    (kept,) = results.glob("*.safetensors")
    assert tensors.keys() < load_file(kept).keys()
    for site in opened.sites.values():
        site.close()


@pytest.mark.parametrize(("asked", "used"), [(1_000_000, 4), (3, 3)], ids=["more than there are", "control"])
def test_a_job_takes_no_more_threads_than_a_site_has(
    world: World, tmp_path: Path, monkeypatch: Any, asked: int, used: int
) -> None:
    """A hundred thousand ended the process with a fault of the system's, at the first sum and after each restart."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    opened = opened_job(Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 4}, run={"threads": asked}), None)
    for site in opened.sites.values():
        assert isinstance(site._job, SiteJob)
        assert site._job.threads == used
        site.close()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"aggregation": {"kind": "homomorphic", "scheme": "ckks"}}, "too large for exact totals by CKKS"),
        ({"run": {"compile": False, "device": "cuda:99"}}, "device 'cuda:99': PyTorch finds"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_options_that_do_not_go_together_are_no_fault_of_a_sites_data(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any], words: str, named: bool
) -> None:
    """A server hears which they are. The control takes what is said of them for what is said of anything else, and
    blames the site's data."""
    if not named:
        monkeypatch.setattr(site_job, "_of_the_job", nullcontext)
    job, hub = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 3}, **tables), world.homes["hub"]
    job.allow("east", aggregations=["masked", "homomorphic-unmasked"])
    offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
    with closing(Site(world.homes["east"], Local())) as site:
        countersigned(hub, site)
        _, told = answered(site.handle, offer.job, JOIN + sign_offer(offer, hub.identity()))
    assert (words.encode() in told) == named
    assert (DataError.TOLD.encode() in told) != named


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
@pytest.mark.parametrize("table", ["silo", "data"])
def test_offers_of_files_or_keys_that_there_are_not_close_no_data_set(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, rule: bool
) -> None:
    """Of a program, whose records a job names by [partition]: offers with [[silo]] files, where the data set has none,
    or with a key that the program's loader does not take. In the control they are jobs that the records could not
    answer, and after three nobody's is let in."""
    more = {
        "silo": {"partition": None, "silo": [{"id": s, "data": "x.csv"} for s in SILOS]},
        "data": {"data": {"nothing": 1}},
    }
    (tmp_path / "bad").mkdir()
    good = Job(world, tmp_path, algorithm=CONFIG["algorithm"])
    bad = Job(world, tmp_path / "bad", False, algorithm=CONFIG["algorithm"], **more[table])
    good.allow("east", disclosures=["final_likelihood", "sampled_records"])
    if not rule and table == "silo":
        monkeypatch.setattr("secure_fvi.deployment.policy_check._records", lambda *_: ())
    if not rule and table == "data":
        monkeypatch.setattr(records, "JobError", InputError)
    hub = world.homes["hub"]
    with closing(Site(world.homes["east"], Local())) as site:

        def join(job: Job) -> Joined:
            offer = make_offer(job.config, hub.roster(NOW), "hub", manifest(job.config).hash, NOW)
            countersigned(hub, site)
            return CODEC.unpack(site.handle(offer.job, JOIN + sign_offer(offer, hub.identity())), Joined)

        for _ in range(3):
            with raises(InputError if table == "data" or not rule else PolicyError, "at-site|no path|data.nothing"):
                join(bad)
        with nullcontext() if rule else raises(PolicyError, "max_unanswered = 3"):
            assert join(good).nonce


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_an_offer_of_an_id_that_is_a_path_is_no_job_of_the_log(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """On the stream of another job. In the control the log has it as accepted, and by it the site's people hear anew of
    data that were mended long ago, or of what stands in a file elsewhere."""
    offer, join = _offered(world, tmp_path)
    hub, east = world.homes["hub"], world.homes["east"]
    path = f"../jobs/{offer.job}"
    if not rule:
        monkeypatch.setattr("secure_fvi.deployment.job.check_job_id", lambda job: None)
    with closing(Site(east, Local())) as site:
        countersigned(hub, site)
        assert CODEC.unpack(site.handle(offer.job, join), Joined).nonce
        Unfit(job_folder(east, offer.job), "east", "data").tell("a cell that was mended long ago", whole=True)
        countersigned(hub, site)
        later = dataclasses.replace(offer, job="later")
        site.handle("later", JOIN + sign_offer(later, hub.identity()))
        assert not read_status(east, now()).problems
        countersigned(hub, site)
        with raises(ProtocolError, "a job's id must be letters" if rule else "on the stream of job 'other'"):
            site.handle("other", JOIN + sign_offer(dataclasses.replace(offer, job=path), hub.identity()))
    found = read_status(east, now())
    assert (path in [job.job for job in found.jobs]) == (not rule)
    assert any("mended long ago" in said for said in found.problems) == (not rule)
