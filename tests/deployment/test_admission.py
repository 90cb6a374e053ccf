"""Who is let in: a member with its own valid certificate; nobody with a revoked, expired, foreign or misnamed one."""

from __future__ import annotations

import datetime
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from deployment_world import DAY, NOW, World, handshake

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.authority import Authority
from secure_fvi.deployment.certificates import check_certificate, check_revocations, read_certificate
from secure_fvi.deployment.countersigning import records_keys
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.keeping import accept, expiring, install, rotate_identity, rotate_tls, sign
from secure_fvi.deployment.names import format_time
from secure_fvi.deployment.requests import make_request, read_request
from secure_fvi.deployment.rotation import check_changes, endorse, read_endorsement, read_succession
from secure_fvi.errors import InputError, ProtocolError


def pem(certificate: bytes) -> bytes:
    """PEM of a certificate as TLS hands it over."""
    return ssl.DER_cert_to_PEM_cert(certificate).encode()


def meet(world: World, client: str, now: datetime.datetime = NOW) -> str:
    """`client` dials the server over TLS and is looked up; its id."""
    hub, site = world.homes["hub"], world.homes[client]
    name = site.admission(now).tls_name("hub")
    seen, _ = handshake(hub.credentials(), site.credentials(), name, world.root)
    return hub.admission(now).member(pem(seen), now, "silo").id


def test_members_recognise_each_other(world: World) -> None:
    for name in ("north", "south", "east"):
        assert meet(world, name) == name


def test_tls_refuses_a_server_with_another_key(world: World) -> None:
    """A member's own certificate does not make it the server, nor does the server's old one after it has a new key."""
    site = world.homes["north"]
    name = site.admission(NOW).tls_name("hub")
    handshake(world.homes["hub"].credentials(), site.credentials(), name, world.root)
    certified = Home.create(
        world.root / "hub2", "hub2", "server", unsealed=True
    )  # another server of the same consortium
    world.certify(certified)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(certified.credentials(), site.credentials(), name, world.root)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(world.homes["south"].credentials(), site.credentials(), name, world.root)


def test_tls_refuses_another_authority(world: World, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other", "study", NOW, unsealed=True)
    mallory = Home.create(tmp_path / "mallory", "north", "silo", unsealed=True)
    certificate = other.issue(world.request(mallory), NOW)
    (mallory.path / "tls.crt").write_bytes(certificate)
    (mallory.path / "ca.crt").write_bytes((world.root / "authority" / "ca.crt").read_bytes())
    name = world.homes["north"].admission(NOW).tls_name("hub")
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        handshake(world.homes["hub"].credentials(), mallory.credentials(), name, world.root)
    with pytest.raises(ProtocolError, match="not issued by the consortium's authority"):
        world.homes["hub"].admission(NOW).member(certificate, NOW)


def test_a_revoked_certificate_is_refused(world: World) -> None:
    assert meet(world, "north") == "north"
    world.authority.revoke("north", NOW)
    install(world.homes["hub"], world.root / "authority" / "ca.crl", NOW)
    with pytest.raises(ProtocolError, match=r"the certificate of silo 'north' was revoked \(serial [0-9a-f]+\)"):
        meet(world, "north")
    assert meet(world, "south") == "south"


def test_an_expired_certificate_is_refused(world: World) -> None:
    home = world.homes["north"]
    world.certify(home, days=30)
    assert meet(world, "north", NOW + 30 * DAY) == "north"
    with pytest.raises(
        ProtocolError, match=f"the certificate of silo 'north' expired at {format_time(NOW + 30 * DAY)}"
    ):
        meet(world, "north", NOW + 31 * DAY)
    with pytest.raises(ProtocolError, match="is not valid before"):
        world.homes["hub"].admission(NOW).member((home.path / "tls.crt").read_bytes(), NOW - 20 * DAY / 24 / 60)


def test_an_outsider_certified_by_the_authority_is_no_member(world: World, tmp_path: Path) -> None:
    outsider = Home.create(tmp_path / "west", "west", "silo", unsealed=True)
    certificate = world.authority.issue(world.request(outsider), NOW)
    with pytest.raises(ProtocolError, match="'west' is no member of consortium 'study'"):
        world.homes["hub"].admission(NOW).member(certificate, NOW)


def test_the_authority_cannot_make_itself_a_member(world: World, tmp_path: Path) -> None:
    """A second certificate of 'north', for a key that north never had: the roster pins the key."""
    imposter = Home.create(tmp_path / "north", "north", "silo", unsealed=True)
    own = world.homes["north"]
    text = make_request("north", "silo", own.identity(), imposter.tls_key())  # the authority could sign it unasked
    certificate = world.authority.issue(read_request(text.encode(), "request"), NOW)
    with pytest.raises(ProtocolError, match="for another TLS key than roster 1 names"):
        world.homes["hub"].admission(NOW).member(certificate, NOW)


def test_a_certificate_of_another_role_is_refused(world: World) -> None:
    home = world.homes["north"]
    text = make_request("north", "server", home.identity(), home.tls_key())
    certificate = world.authority.issue(read_request(text.encode(), "request"), NOW)
    admission = world.homes["hub"].admission(NOW)
    with pytest.raises(ProtocolError, match="'north' is a silo in the roster, its certificate says server"):
        admission.member(certificate, NOW)
    with pytest.raises(ProtocolError, match="'hub' is a server in the roster; here a silo is expected"):
        admission.member((world.homes["hub"].path / "tls.crt").read_bytes(), NOW, "silo")


def test_a_revocation_list_that_is_forged_stale_or_older_is_refused(world: World, tmp_path: Path) -> None:
    home, crl = world.homes["north"], world.root / "authority" / "ca.crl"
    old = crl.read_bytes()
    world.authority.renew_revocations(NOW)
    install(home, crl, NOW)
    (tmp_path / "old.crl").write_bytes(old)
    with pytest.raises(ProtocolError, match="revocation list 1 is older than list 2"):
        install(home, tmp_path / "old.crl", NOW)
    home.revocations(NOW)  # the newer one is still there
    with pytest.raises(ProtocolError, match=f"expired at {format_time(NOW + 120 * DAY)}: ask the authority"):
        home.admission(NOW + 121 * DAY)
    other = Authority.create(tmp_path / "other", "study", NOW, unsealed=True)
    (home.path / "ca.crl").write_bytes((other.folder / "ca.crl").read_bytes())
    with pytest.raises(ProtocolError, match="not signed by the consortium's authority"):
        home.revocations(NOW)


def test_the_certificates_say_what_they_are_for(world: World) -> None:
    ca = world.authority.certificate
    basic = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert (basic.value.ca, basic.value.path_length) == (True, 0)
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.crl_sign, usage.digital_signature) == (True, True, False)
    leaf = world.homes["north"].certificate()
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    uses = list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert uses == [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["secure-fvi://study/silo/north"]
    south = world.homes["south"]
    name = south.admission(NOW).tls_name("north")
    with pytest.raises(ssl.SSLError, match="unsuitable certificate purpose"):  # a silo's certificate must not serve
        handshake(world.homes["north"].credentials(), south.credentials(), name, world.root)


def test_a_request_counts_only_with_both_of_its_signatures(world: World) -> None:
    home = world.homes["north"]
    text = make_request("north", "silo", home.identity(), home.tls_key())
    assert read_request(text.encode(), "request").id == "north"
    with pytest.raises(ProtocolError, match="not signed by the identity that it names"):
        read_request(text.replace('id = "north"', 'id = "norte"').encode(), "request")
    with pytest.raises(ProtocolError, match="not signed by the identity that it names"):
        read_request(text.replace(home.identity().public_key.hex(), Identity().public_key.hex()).encode(), "request")
    foreign = make_request("north", "silo", home.identity(), world.homes["south"].tls_key())
    swapped = text.split('csr = "')[0] + 'csr = "' + foreign.split('csr = "')[1].split('"')[0] + '"\n'
    swapped += text[text.index("signature = ") :]
    with pytest.raises(ProtocolError, match="not signed by the identity"):
        read_request(swapped.encode(), "request")
    other_curve = make_request("north", "silo", home.identity(), generate_private_key(SECP384R1()))
    with pytest.raises(InputError, match="must be on P-256"):
        read_request(other_curve.encode(), "request")
    assert read_request(foreign.encode(), "r").code != read_request(text.encode(), "r").code


def test_another_identity_under_a_taken_name_gets_no_certificate(world: World, tmp_path: Path) -> None:
    imposter = Home.create(tmp_path / "north", "north", "silo", unsealed=True)
    with pytest.raises(InputError, match="'north' has a certificate under another identity; revoke it first"):
        world.authority.issue(world.request(imposter), NOW)
    with pytest.raises(InputError, match="'nobody' has no certificate that could be revoked"):
        world.authority.revoke("nobody", NOW)
    world.authority.revoke("north", NOW)
    assert b"CERTIFICATE" in world.authority.issue(world.request(imposter), NOW)


def test_a_new_tls_key_is_endorsed_by_the_identity(world: World) -> None:
    home, hub = world.homes["north"], world.homes["hub"]
    old = (home.path / "tls.crt").read_bytes()
    request = read_request(rotate_tls(home).encode(), "request")
    assert meet(world, "north") == "north"  # the old one serves on
    path = world.root / "new.crt"
    path.write_bytes(world.authority.issue(request, NOW))
    assert "endorsement" in install(home, path, NOW)
    with pytest.raises(ProtocolError, match="for another TLS key than roster 1 names"):
        meet(world, "north")
    install(hub, home.path / "north.endorsement.toml", NOW)
    assert meet(world, "north") == "north"
    with pytest.raises(ProtocolError, match="for another TLS key"):
        hub.admission(NOW).member(old, NOW)


def test_an_endorsement_by_somebody_else_is_refused(world: World) -> None:
    hub = world.homes["hub"]
    forged = endorse("north", Identity(), hub.roster(NOW).hash, bytes(32), NOW)
    (hub.path / "endorsements").mkdir()
    (hub.path / "endorsements" / "north.toml").write_bytes(forged)
    assert read_endorsement(forged, "e").member == "north"
    with pytest.raises(ProtocolError, match="endorsement of a TLS key of 'north' is not signed by its identity"):
        hub.admission(NOW).member((world.homes["north"].path / "tls.crt").read_bytes(), NOW)
    other = endorse("north", world.homes["north"].identity(), bytes(32), bytes(32), NOW)  # under another roster
    (hub.path / "endorsements" / "north.toml").write_bytes(other)
    assert meet(world, "north") == "north"


def test_a_new_identity_enters_with_the_word_of_the_old(world: World) -> None:
    home, first = world.homes["north"], world.homes["north"].roster(NOW)
    before = home.identity().public_key
    request, succession = rotate_identity(home, NOW)
    after = read_request(request.encode(), "request").identity
    assert after != before
    members = [m if m.id != "north" else m.model_copy(update={"identity": after.hex()}) for m in first.members.values()]
    known = [read_succession(succession, "s")]
    assert check_changes(first, members, known) == ["north: new identity, announced by the old"]
    with pytest.raises(ProtocolError, match="another identity than in roster 1, not announced by its old one"):
        check_changes(first, members, [])
    assert check_changes(first, members, [], ["north"]) == ["north: new identity, NOT announced by the old"]
    from secure_fvi.deployment.consortium import Sums, write_roster

    second = write_roster("study", members, first.authority, NOW, Sums(), first)
    world.distribute(second)
    assert home.identity().public_key == after
    assert home.roster(NOW).member("north").identity_key == after
    assert home.records_identity(before).public_key == before
    path = world.root / "north.succession.toml"
    path.write_bytes(succession)
    install(world.homes["hub"], path, NOW)
    assert records_keys(world.homes["hub"], second, "north") == (after, before)
    assert records_keys(world.homes["hub"], second, "south") == (second.member("south").identity_key,)


def test_a_succession_needs_both_identities(world: World) -> None:
    _, succession = rotate_identity(world.homes["north"], NOW)
    text = succession.decode()
    for name in ("signature", "signature_after"):
        at = text.index(f"{name} = ") + len(name) + 4
        broken = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
        with pytest.raises(ProtocolError, match="not signed by both identities"):
            read_succession(broken.encode(), "s")


def test_expiry_is_announced(world: World) -> None:
    home = world.homes["north"]

    def lines(now: datetime.datetime) -> list[str]:
        return [line for soon, line in expiring(home, now, 30 * DAY) if soon]

    assert lines(NOW) == []
    assert any(line.startswith("revocation list: expires in 20 days") for line in lines(NOW + 100 * DAY))
    assert any("certificate: expires in 15 days" in line for line in lines(NOW + 350 * DAY))
    assert any("revocation list" in line and "EXPIRED" in line for line in lines(NOW + 130 * DAY))


def test_keys_are_private_and_never_shown(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = world.homes["north"]
    for name in ("identity.pem", "tls.key"):
        assert stat.S_IMODE((home.path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert "PRIVATE" not in repr(home) + repr(home.credentials()) + repr(home.identity())
    monkeypatch.setenv("SECURE_FVI_PASSPHRASE", "correct horse")
    locked = Home.create(tmp_path / "locked", "locked", "silo", unsealed=True)
    for name in ("identity.pem", "tls.key"):
        assert b"BEGIN ENCRYPTED PRIVATE KEY" in (locked.path / name).read_bytes()
    locked.tls_key()
    monkeypatch.setenv("SECURE_FVI_PASSPHRASE", "wrong horse")
    with pytest.raises(InputError, match="or the passphrase is wrong") as caught:
        locked.tls_key()
    assert "horse" not in str(caught.value)
    monkeypatch.delenv("SECURE_FVI_PASSPHRASE")
    with pytest.raises(InputError, match="is encrypted; set SECURE_FVI_PASSPHRASE"):
        locked.identity()
    assert Home(locked.path, "correct horse").identity().public_key


def test_a_folder_that_others_may_write_to_is_refused(world: World) -> None:
    path = world.homes["north"].path
    path.chmod(0o770)
    with pytest.raises(InputError, match="may be written by others than its owner"):
        Home(path)


def test_files_that_belong_to_nobody_here_are_refused(world: World, tmp_path: Path) -> None:
    home = world.homes["north"]
    for name, says in (("south.crt", "is for silo 'south'"), ("text", "not a TOML file")):
        path = world.root / name
        if name == "text":
            path.write_text("hello")
        with pytest.raises(InputError, match=says):
            install(home, path, NOW)
    other = Authority.create(tmp_path / "other", "study", NOW, unsealed=True)
    with pytest.raises(InputError, match="is another authority than"):
        install(home, other.folder / "ca.crt", NOW)
    with pytest.raises(InputError, match="cannot read the file"):
        install(home, world.root / "nothing", NOW)


def test_certificates_are_checked_with_the_list_of_their_authority(world: World) -> None:
    home = world.homes["north"]
    revocations = home.revocations(NOW)
    check_revocations(revocations, home.authority(), NOW)
    subject = check_certificate(home.certificate(), home.authority(), revocations, NOW)
    assert (subject.id, subject.role, subject.consortium) == ("north", "silo", "study")
    data = home.certificate().public_bytes(serialization.Encoding.PEM)
    assert read_certificate(data, "c").serial_number == subject.serial
    with pytest.raises(ProtocolError, match="names no member"):
        check_certificate(home.authority(), home.authority(), revocations, NOW)


def test_a_site_signs_and_accepts_twice_the_same(world: World) -> None:
    home = world.homes["north"]
    first, path = sign(home, NOW)
    content = path.read_bytes()
    assert accept(home, NOW).hash == first.hash
    assert sign(home, NOW)[1].read_bytes() == content
