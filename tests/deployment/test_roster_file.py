"""The roster file: signed by all it counts; altered, unsigned, foreign, expired or older it is refused, saying why."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest
from deployment_world import DAY, NOW, World

from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.certificates import as_text, make_certificate
from secure_fvi.deployment.consortium import (
    Sums,
    load_roster,
    parse_roster,
    session_id,
    sign_roster,
    signature_folder,
    write_roster,
)
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.keeping import accept, install, sign
from secure_fvi.deployment.names import format_time, reading_code, same_code
from secure_fvi.errors import InputError, ProtocolError, SecureFVIError
from secure_fvi.runs import wording


def file(world: World, site: str = "north") -> Path:
    return world.homes[site].roster_file(1)


def test_a_roster_that_all_have_signed_is_loaded(world: World) -> None:
    roster = world.homes["north"].roster(NOW)
    assert list(roster.members) == ["east", "hub", "north", "south"]
    assert [m.id for m in roster.of_role("silo")] == ["east", "north", "south"]
    assert roster.member("hub").role == "server"
    assert roster.hash == world.homes["hub"].roster(NOW).hash


def test_an_altered_byte_of_any_line_is_refused(world: World) -> None:
    path, text = file(world), file(world).read_text()
    load_roster(path, NOW)
    altered = 0
    for at, line in enumerate(text.splitlines(keepends=True)):
        if "=" not in line:
            continue
        # The last character of the value: a digit, a letter, or the quote that ends it.
        body = line.rstrip("\n").rstrip('"')
        change = "0" if body[-1] != "0" else "1"
        lines = text.splitlines(keepends=True)
        lines[at] = body[:-1] + change + line[len(body) :]
        path.write_text("".join(lines))
        with pytest.raises(SecureFVIError):
            load_roster(path, NOW)
        altered += 1
    assert altered == 6 + 5 + 4 * 4
    path.write_text(text)
    load_roster(path, NOW)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("serial = 1", "serial = 2"),
        ('expires = "20', 'expires = "21'),
        ("min_cohort = 3", "min_cohort = 2"),
        ("consistency_check = true", "consistency_check = false"),
        ('role = "server"', 'role = "holder"'),
        ('consortium = "study"', 'consortium = "studY"'),
    ],
)
def test_a_meaning_that_was_changed_is_named_as_altered(world: World, old: str, new: str) -> None:
    path, text = file(world), file(world).read_text()
    assert old in text
    changed = text.replace(old, new)
    if "serial" in old:
        changed = changed.replace('previous = ""', f'previous = "{"0" * 64}"')
    path.write_text(changed)
    with pytest.raises(ProtocolError, match="was altered, or the signature is of another version"):
        load_roster(path, NOW)


def test_a_swapped_identity_is_refused(world: World) -> None:
    path, text = file(world), file(world).read_text()
    own = world.homes["south"].identity().public_key.hex()
    path.write_text(text.replace(own, Identity().public_key.hex()))
    with pytest.raises(ProtocolError, match="was altered"):
        load_roster(path, NOW)


@pytest.mark.parametrize("change", ["\n", "# a comment for the reader\n", "serial = 1  \n"])
def test_a_roster_in_another_layout_is_refused(world: World, change: str) -> None:
    text = file(world).read_text()
    edited = text.replace("serial = 1\n", change) if "serial" in change else change + text
    with pytest.raises(InputError, match="not in the layout"):
        parse_roster(edited.encode(), "roster")


def test_a_missing_signature_is_named(world: World) -> None:
    (signature_folder(file(world)) / "south.sig").unlink()
    with pytest.raises(ProtocolError, match="not signed by south: signature missing"):
        world.homes["north"].roster(NOW)


def test_a_signature_by_another_key_is_named(world: World) -> None:
    path = signature_folder(file(world)) / "south.sig"
    text = path.read_text()
    before = text.split('signature = "')[1][:128]
    path.write_text(text.replace(before, Identity().sign(b"something").hex()))
    with pytest.raises(ProtocolError, match="signature of 'south' is not by the identity that the roster names"):
        world.homes["north"].roster(NOW)


def test_an_unknown_signer_is_named(world: World) -> None:
    folder = signature_folder(file(world))
    shutil.copy(folder / "south.sig", folder / "west.sig")
    text = (folder / "west.sig").read_text().replace('"south"', '"west"')
    (folder / "west.sig").write_text(text)
    with pytest.raises(ProtocolError, match="'west' is on the roster, but no member of that name"):
        world.homes["north"].roster(NOW)


def test_a_site_cannot_sign_for_another(world: World) -> None:
    roster = world.homes["north"].roster(NOW)
    with pytest.raises(InputError, match="names another identity for 'south'"):
        sign_roster(roster, "south", world.homes["north"].identity())


def test_an_expired_roster_is_refused(world: World) -> None:
    home = world.homes["north"]
    assert home.roster(NOW + 365 * DAY).serial == 1
    with pytest.raises(ProtocolError, match=f"roster 1 of 'study' expired at {format_time(NOW + 365 * DAY)}"):
        home.roster(NOW + 365 * DAY + datetime.timedelta(seconds=1))
    with pytest.raises(ProtocolError, match="yet to come"):
        home.roster(NOW - 2 * DAY)


def test_an_older_roster_is_a_rollback(world: World) -> None:
    home, first = world.homes["north"], world.homes["north"].roster(NOW)
    world.distribute(world.write(first, NOW + DAY), NOW + DAY)
    assert home.roster(NOW + DAY).serial == 2
    with pytest.raises(ProtocolError, match="roster 1 is older than roster 2, which this site has accepted"):
        install(home, file(world), NOW + DAY)
    shutil.copy(file(world), home.roster_file(2))
    shutil.rmtree(signature_folder(home.roster_file(2)))
    shutil.copytree(signature_folder(file(world)), signature_folder(home.roster_file(2)))
    with pytest.raises(ProtocolError, match="roster 1 is older than roster 2, which this site has accepted"):
        home.roster(NOW + DAY)


def test_another_roster_of_the_same_number_is_refused(world: World) -> None:
    other = world.write(None, NOW + DAY)
    path = world.root / "other.toml"
    path.write_bytes(other.content)
    with pytest.raises(ProtocolError, match="has accepted another roster 1"):
        install(world.homes["north"], path, NOW + DAY)


def test_a_roster_that_does_not_follow_is_refused(world: World) -> None:
    forked = world.write(world.write(None, NOW + DAY), NOW + DAY)
    path = world.root / "forked.toml"
    path.write_bytes(forked.content)
    with pytest.raises(ProtocolError, match="roster 2 does not follow the roster 1 that this site has accepted"):
        install(world.homes["north"], path, NOW + DAY)


@pytest.mark.parametrize("first", [True, False], ids=["before the next", "between it and its signatures"])
def test_an_unsigned_roster_of_a_far_number_keeps_no_next_one_out(
    world: World, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Anybody who has the roster in force can make one that names another before it, and mail it: what is signed and
    verified is what a site installed last. The control is the largest number, where the far one stays in the way."""
    home = world.homes["north"]
    text = home.roster(NOW).content.decode().replace("serial = 1\n", f"serial = {2**31 - 1}\n")
    far, path = world.root / "far.toml", world.root / "next.toml"
    far.write_text(text.replace('previous = ""', f'previous = "{"11" * 32}"'))
    path.write_bytes(world.write(world.roster, NOW + DAY).content)

    for site in world.homes.values():
        for draft in (far, path) if first else (path, far, path):
            install(site, draft, NOW + DAY)
    with monkeypatch.context() as largest:
        files = Home.roster_files
        largest.setattr(Home, "roster_files", lambda h: sorted(files(h), key=lambda p: -int(p.stem)))
        assert sign(home, NOW + DAY)[0].serial == 2**31 - 1
        with pytest.raises(ProtocolError, match="not signed by"):
            accept(home, NOW + DAY)
    sent = [sign(site, NOW + DAY)[1] for site in world.homes.values()]
    if not first:
        install(home, far, NOW + DAY)
    for signature in sent:
        install(home, signature, NOW + DAY)  # goes to the roster that it is over
    install(home, path, NOW + DAY)  # the remedy, and no harm where there is nothing to mend
    assert accept(home, NOW + DAY).serial == 2
    assert home.roster(NOW + DAY).serial == 2


def test_a_site_signs_nothing_that_has_its_own_keys_wrong(world: World) -> None:
    members = [world.request(h) for h in world.homes.values()]
    wrong = [m if m.id != "north" else m.model_copy(update={"identity": Identity().public_key.hex()}) for m in members]
    roster = write_roster("study", wrong, NOW, previous=world.roster)
    world.homes["north"].roster_file(2).write_bytes(roster.content)
    with pytest.raises(ProtocolError, match="names another identity for 'north'"):
        sign(world.homes["north"], NOW)


def test_a_site_signs_no_roster_with_a_tls_key_that_it_has_given_up(world: World) -> None:
    members = [world.request(h) for h in world.homes.values()]
    home = world.homes["north"]
    (home.path / "tls.key").unlink()
    (home.path / "tls.crt").unlink()
    Home.create(world.root / "elsewhere", "north", "silo", unsealed=True)
    for name in ("tls.key", "tls.crt"):
        shutil.copy(world.root / "elsewhere" / name, home.path / name)
    stale = write_roster("study", members, NOW, previous=world.roster)
    home.roster_file(2).write_bytes(stale.content)
    with pytest.raises(ProtocolError, match="names another TLS key for 'north' than the one in"):
        sign(home, NOW)
    right = [world.request(h) for h in world.homes.values()]
    fresh = write_roster("study", right, NOW, previous=world.roster)
    home.roster_file(2).write_bytes(fresh.content)
    assert sign(home, NOW)[0].hash == fresh.hash


def test_a_new_roster_is_not_in_force_before_all_have_signed(world: World) -> None:
    home = world.homes["north"]
    second = world.write(home.roster(NOW), NOW + DAY)
    path = world.root / "second.toml"
    path.write_bytes(second.content)
    install(home, path, NOW + DAY)
    sign(home, NOW + DAY)
    with pytest.raises(ProtocolError, match="not signed by east, hub, south"):
        accept(home, NOW + DAY)
    assert home.roster(NOW + DAY).serial == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "no/slash"}, "must be 1 to 63 letters"),
        ({"id": "süd"}, "must be 1 to 63 letters"),
        ({"role": "boss"}, "must be 'silo', 'server' or 'holder'"),
        ({"identity": "00"}, "64 hexadecimal digits"),
        ({"certificate": "00"}, "must be a certificate: DER in base64"),
        ({}, "the certificate of 'zone' is made out to 'north'"),
        ({"extra": 1}, "unknown key"),
    ],
)
def test_a_malformed_member_is_named(world: World, change: dict[str, object], says: str) -> None:
    text, own = file(world).read_text(), world.request(world.homes["north"]).certificate
    member = {"id": "zone", "role": "silo", "identity": "1" * 64, "certificate": own, **change}
    with pytest.raises(InputError, match=says):
        parse_roster((text + wording.dumps({"member": [member]})).encode(), "roster")


def test_two_members_cannot_share_a_key(world: World) -> None:
    members = [world.request(h) for h in world.homes.values()]
    zone = make_certificate(world.homes["east"].tls_key(), "zone", "silo", (), NOW)
    twin = members[0].model_copy(update={"id": "zone", "certificate": as_text(zone)})
    with pytest.raises(InputError, match="two members have the tls_key"):
        write_roster("study", [*members, twin.model_copy(update={"identity": "1" * 64})], NOW)
    with pytest.raises(InputError, match="two members have the identity"):
        write_roster("study", [*members, twin], NOW)


def test_the_session_roster_has_the_silos_and_the_settings(world: World) -> None:
    roster = world.homes["north"].roster(NOW)
    nonces = {m.id: bytes([i]) * 32 for i, m in enumerate(roster.of_role("silo"))}
    session = session_id(roster, b"job", nonces, 5)
    made = roster.session(session)
    assert made.ids == ("east", "north", "south")
    assert dict(made.members)["north"] == world.homes["north"].identity().public_key
    assert (made.session, made.min_cohort, made.bits) == (session, 3, 64)
    assert roster.session(session, key_holder=bytes(64)).key_holder == bytes(64)
    for other in ({**nonces, "east": bytes([9]) * 32}, dict(list(nonces.items())[:2])):
        assert session_id(roster, b"job", other, 5) != session
    assert session_id(roster, b"another job", nonces, 5) != session
    assert session_id(roster, b"job", nonces, 6) != session  # a silo to whom another version was named is in another
    with pytest.raises(ProtocolError, match="32 fresh bytes"):
        session_id(roster, b"job", {"east": b"short"}, 5)


@pytest.mark.parametrize("looser", [Masked(bits=32), Masked(consistency_check=False), Masked(corrupt=0.0)])
def test_a_job_cannot_loosen_the_settings(world: World, looser: Masked) -> None:
    roster = world.homes["north"].roster(NOW)
    roster.session(bytes(32), aggregation=Masked())
    with pytest.raises(InputError, match="not as strict as"):
        roster.session(bytes(32), aggregation=looser)
    with pytest.raises(InputError, match="'hub' is a server"):
        roster.session(bytes(32), ["east", "north", "south", "hub"])


def test_a_consortium_may_bound_what_a_total_lacks(world: World) -> None:
    """Whatever a job or its noise allow; a roster that does not say so has the bytes that it had before there was such
    a bound. The control is the roster without it."""
    free = world.homes["north"].roster(NOW)
    assert b"max_missing" not in free.content
    assert parse_roster(free.content, "test").sums.max_missing is None
    bound = write_roster(free.consortium, list(free.members.values()), NOW, Sums(max_missing=1), previous=free)
    assert parse_roster(bound.content, "test").sums.max_missing == 1
    for aggregation in (Masked(max_missing=2), Homomorphic(max_missing=2)):
        masks = aggregation if isinstance(aggregation, Masked) else aggregation.beneath(64)
        assert free.session(bytes(32), aggregation=masks).max_missing == 2
        with pytest.raises(InputError, match="not as strict as"):
            bound.session(bytes(32), aggregation=masks)
    assert bound.session(bytes(32), aggregation=Masked(max_missing=1)).max_missing == 1
    assert bound.session(bytes(32)).max_missing == 1


def test_codes_are_of_fixed_form_and_of_every_byte() -> None:
    code = reading_code("roster", b"content")
    groups = code.split(" ")
    assert len(groups) == 8
    assert all(len(g) == 5 and g.isdigit() for g in groups)
    assert reading_code("roster", b"content") == code
    assert reading_code("roster", b"contenu") != code
    assert reading_code("request", b"content") != code
    assert same_code(code.replace(" ", "-"), code)
    assert not same_code(code[:-1] + ("0" if code[-1] != "0" else "1"), code)
    assert not same_code("", code)
