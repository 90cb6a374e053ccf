"""Who is let in: a member with the certificate that the signed roster names; nobody with another's, an old, an expired
or a foreign one, and none whom a member vouches for."""

from __future__ import annotations

import base64
import datetime
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, generate_private_key
from deployment_world import DAY, NOW, World, handshake

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.certificates import as_text, key_hash, make_certificate, pem_of, pinned_name
from secure_fvi.deployment.consortium import Sums, parse_roster, read_succession, write_roster
from secure_fvi.deployment.countersigning import records_keys
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.keeping import (
    accept,
    check_changes,
    expiring,
    install,
    make_request,
    read_request,
    rotate_identity,
    rotate_tls,
    sign,
)
from secure_fvi.deployment.names import format_time
from secure_fvi.deployment.site_job import job_folder
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.files import make_private
from secure_fvi.key_files import TlsFiles


def pem(certificate: bytes) -> bytes:
    """PEM of a certificate as TLS hands it over."""
    return ssl.DER_cert_to_PEM_cert(certificate).encode()


def of_hub(world: World) -> TlsFiles:
    hub = world.homes["hub"]
    return hub.credentials(hub.roster(NOW).of_role("silo"))


def of_site(home: Home) -> TlsFiles:
    return home.credentials(home.roster(NOW).of_role("server"))


def meet(world: World, client: str, now: datetime.datetime = NOW) -> str:
    """`client` dials the server over TLS and is looked up; its id."""
    hub, site = world.homes["hub"], world.homes[client]
    seen, shown = handshake(of_hub(world), of_site(site), site.roster(NOW).tls_name("hub"), world.root)
    assert site.roster(now).whose(pem(shown), now, "server").id == "hub"
    return hub.roster(now).whose(pem(seen), now, "silo").id


def test_members_recognise_each_other(world: World) -> None:
    for name in ("north", "south", "east"):
        assert meet(world, name) == name


def test_tls_refuses_a_server_with_another_key(world: World) -> None:
    """A member's own certificate does not make it the server, nor does another server's, nor another of its name."""
    site = world.homes["north"]
    name = site.roster(NOW).tls_name("hub")
    handshake(of_hub(world), of_site(site), name, world.root)
    for other in ("hub2", "hub"):
        made = Home.create(world.root / "elsewhere" / other, other, "server", unsealed=True)
        with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate"):
            handshake(made.credentials(world.homes["hub"].roster(NOW).of_role("silo")), of_site(site), name, world.root)
    south = world.homes["south"]
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate"):
        handshake(south.credentials(south.roster(NOW).of_role("silo")), of_site(site), name, world.root)


def test_tls_refuses_who_is_not_in_the_roster(world: World, tmp_path: Path) -> None:
    """A key of his own under a member's name: TLS does not take it, and neither would the roster."""
    mallory = Home.create(tmp_path / "mallory", "north", "silo", unsealed=True)
    roster = world.homes["north"].roster(NOW)
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        handshake(of_hub(world), mallory.credentials(roster.of_role("server")), roster.tls_name("hub"), world.root)
    with pytest.raises(ProtocolError, match="certificate of 'north' is for another TLS key than roster 1 names"):
        world.homes["hub"].roster(NOW).whose(pem_of(mallory.certificate()), NOW)
    outsider = Home.create(tmp_path / "west", "west", "silo", unsealed=True)
    with pytest.raises(ProtocolError, match="'west' is no member of consortium 'study'"):
        world.homes["hub"].roster(NOW).whose(pem_of(outsider.certificate()), NOW)


def test_a_member_cannot_vouch_for_another(world: World) -> None:
    """A certificate signed with a member's own key, in the member's name or another's."""
    home, roster = world.homes["north"], world.homes["hub"].roster(NOW)
    for name in ("north", "east", "west"):
        key = generate_private_key(SECP256R1())
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(home.certificate().subject)
            .public_key(key.public_key())
            .serial_number(5)
            .not_valid_before(NOW - DAY)
            .not_valid_after(NOW + DAY)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(home.tls_key(), hashes.SHA256())
        )
        child = Home.create(world.root / f"child-{name}", name, "silo", unsealed=True)
        (child.path / "tls.crt").write_bytes(pem_of(made) + pem_of(home.certificate()))
        files = child.credentials(roster.of_role("server"))._replace(certificate=(child.path / "tls.crt").read_bytes())
        files = files._replace(private_key=_pem_of_key(key))
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(of_hub(world), files, roster.tls_name("hub"), world.root)
        with pytest.raises(ProtocolError, match=r"another TLS key than roster 1 names|is no member of"):
            roster.whose(pem_of(made), NOW)


def _pem_of_key(key: object) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())  # type: ignore[attr-defined, no-any-return]


def test_a_certificate_that_was_taken_back_is_refused(world: World) -> None:
    """The next roster names another for 'north', or north no more: whoever has put it in force refuses the old one, in
    TLS already. The control is the roster before."""
    assert meet(world, "north") == "north"
    hub, old = world.homes["hub"], of_site(world.homes["north"])
    world.without("north")
    assert meet(world, "north") == "north"  # signed, and not yet in force at the server
    world.put_in_force(hub)
    with pytest.raises(ProtocolError, match="the certificate of 'north' is for another TLS key than roster 2 names"):
        hub.roster(NOW).whose(old.certificate, NOW)
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate"):
        handshake(of_hub(world), old, hub.roster(NOW).tls_name("hub"), world.root)
    assert meet(world, "south") == "south"


def test_a_member_that_was_removed_is_refused(world: World) -> None:
    north, hub = world.homes.pop("north"), world.homes["hub"]
    west = Home.create(world.root / "west", "west", "silo", unsealed=True)  # a cohort needs three silos
    old, name = of_site(north), hub.roster(NOW).tls_name("hub")
    members = [world.request(h) for h in (*world.homes.values(), west)]
    made = write_roster("study", members, NOW, Sums(), hub.roster(NOW))
    world.homes["west"] = west
    world.distribute(made)
    assert meet(world, "west") == "west"
    with pytest.raises(ProtocolError, match="'north' is no member of consortium 'study'"):
        hub.roster(NOW).whose(old.certificate, NOW)
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate"):
        handshake(of_hub(world), old, name, world.root)


def test_an_expired_certificate_is_refused(world: World) -> None:
    home = world.homes["north"]
    shown = world.certify(home, days=30)
    world.distribute(world.write(world.roster))
    assert meet(world, "north", NOW + 30 * DAY) == "north"
    with pytest.raises(
        ProtocolError, match=f"the certificate of silo 'north' expired at {format_time(NOW + 30 * DAY)}"
    ):
        meet(world, "north", NOW + 31 * DAY)
    with pytest.raises(ProtocolError, match="is not valid before"):
        world.homes["hub"].roster(NOW).whose(shown, NOW - 2 * DAY / 24)


def test_tls_itself_refuses_an_expired_certificate(world: World) -> None:
    home = world.homes["north"]
    world.certify(home, now=NOW - 40 * DAY, days=30)
    world.distribute(world.write(world.roster))
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
        meet(world, "north")
    assert meet(world, "south") == "south"


def test_a_member_of_another_role_is_refused(world: World) -> None:
    roster = world.homes["hub"].roster(NOW)
    own = pem_of(world.homes["hub"].certificate())
    assert roster.whose(own, NOW, "server").id == "hub"
    with pytest.raises(ProtocolError, match="'hub' is a server in the roster; here a silo is expected"):
        roster.whose(own, NOW, "silo")
    with pytest.raises(ProtocolError, match="'north' is a silo in the roster; here a server or holder is expected"):
        roster.whose(pem_of(world.homes["north"].certificate()), NOW, "server", "holder")


def test_the_certificates_say_what_they_are_for(world: World) -> None:
    leaf = world.homes["north"].certificate()
    basic = leaf.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert not basic.value.ca
    usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.digital_signature, usage.key_cert_sign, usage.crl_sign) == (True, False, False)
    uses = list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert uses == [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    south, north = world.homes["south"], world.homes["north"]
    roster = south.roster(NOW)
    with pytest.raises(ssl.SSLError, match="unsuitable certificate purpose"):  # a silo's certificate must not serve
        handshake(
            north.credentials([roster.member("south")]),
            south.credentials([roster.member("north")]),
            roster.tls_name("north"),
            world.root,
        )


def test_a_request_counts_only_with_its_signatures(world: World) -> None:
    home = world.homes["north"]
    own = as_text(home.certificate())
    text = make_request("north", "silo", home.identity(), own)
    assert read_request(text.encode(), "request") == world.request(home)
    for old, new in (
        ('id = "north"', 'id = "norte"'),
        ('role = "silo"', 'role = "server"'),
        (home.identity().public_key.hex(), Identity().public_key.hex()),
        (own, as_text(world.homes["south"].certificate())),
    ):
        assert old in text
        with pytest.raises(ProtocolError, match="not signed by the identity that it names"):
            read_request(text.replace(old, new).encode(), "request")
    foreign = make_request("north", "silo", home.identity(), as_text(world.homes["south"].certificate()))
    with pytest.raises(InputError, match="the certificate of 'north' is made out to 'south'"):
        read_request(foreign.encode(), "request")
    curve = make_certificate(generate_private_key(SECP384R1()), "north", "silo", (), NOW)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be on P-256"):
        read_request(make_request("north", "silo", home.identity(), as_text(curve)).encode(), "request")


def test_a_new_tls_key_enters_with_the_next_roster(world: World) -> None:
    home, hub = world.homes["north"], world.homes["hub"]
    old = pem_of(home.certificate())
    request = rotate_tls(home)
    assert request == rotate_tls(home)  # asked again, it is the same key
    assert meet(world, "north") == "north"  # the old one serves on
    second = world.write(hub.roster(NOW))
    assert second.members["north"] == read_request(request.encode(), "request")
    world.sign(second)
    world.put_in_force(home)
    assert pem_of(home.certificate()) != old
    assert not (home.path / "next" / "tls.key").exists()
    assert len(list((home.path / "old").glob("tls-*"))) == 2
    with pytest.raises(ssl.SSLCertVerificationError):  # the server goes by the roster before
        meet(world, "north")
    for other in ("hub", "south", "east"):
        world.put_in_force(world.homes[other])
    assert meet(world, "north") == "north"
    with pytest.raises(ProtocolError, match="for another TLS key than roster 2 names"):
        hub.roster(NOW).whose(old, NOW)


def test_rosters_and_requests_of_another_format_are_refused(world: World) -> None:
    old = world.homes["hub"].roster(NOW).content.replace(b"format = 2", b"format = 1")
    with pytest.raises(InputError, match="roster: format = 1: must be 2"):
        parse_roster(old, "roster")
    with pytest.raises(InputError, match="request: "):
        read_request(b'format = 1\ncsr = ""\n', "request")


def test_a_new_identity_enters_with_the_word_of_the_old(world: World) -> None:
    home, first = world.homes["north"], world.homes["north"].roster(NOW)
    before = home.identity().public_key
    request, succession = rotate_identity(home, NOW)
    after = read_request(request.encode(), "request").identity_key
    assert after != before
    members = [m if m.id != "north" else m.model_copy(update={"identity": after.hex()}) for m in first.members.values()]
    known = [read_succession(succession, "s")]
    assert check_changes(first, members, known) == ["north: new identity, announced by the old"]
    with pytest.raises(ProtocolError, match="another identity than in roster 1, not announced by its old one"):
        check_changes(first, members, [])
    assert check_changes(first, members, [], ["north"]) == ["north: new identity, NOT announced by the old"]
    second = write_roster("study", members, NOW, Sums(), first)
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
    world.certify(home, days=100)
    world.distribute(world.write(world.roster))

    def lines(now: datetime.datetime) -> list[str]:
        return [line for soon, line in expiring(home, now, 30 * DAY) if soon]

    assert lines(NOW) == []
    assert any("certificate: expires in 20 days" in line for line in lines(NOW + 80 * DAY))
    assert any("certificate" in line and "EXPIRED" in line for line in lines(NOW + 101 * DAY))
    assert any("roster: expires in 15 days" in line for line in lines(NOW + 350 * DAY))
    assert any("roster 2 of 'study' expired" in line for line in lines(NOW + 366 * DAY))


def test_keys_are_private_and_never_shown(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = world.homes["north"]
    for name in ("identity.pem", "tls.key"):
        assert stat.S_IMODE((home.path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert "PRIVATE" not in repr(home) + repr(of_site(home)) + repr(home.identity())
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


def test_folders_of_a_site_are_its_own_alone_whatever_was_there_and_whatever_the_umask(tmp_path: Path) -> None:
    """A folder made beforehand or mounted, one that was opened later, and the state below it. The control is what
    `Path.mkdir` makes of the folders above the last one."""

    def modes(path: Path) -> list[int]:
        return [stat.S_IMODE(p.stat().st_mode) for p in (path, path / "state", path / "state" / "jobs")]

    (tmp_path / "control" / "state" / "jobs" / "one").mkdir(mode=0o700, parents=True)
    assert all(mode & 0o055 for mode in modes(tmp_path / "control"))
    path = tmp_path / "made-before"
    path.mkdir()
    home = Home.create(path, "north", "silo", unsealed=True)
    make_private(job_folder(home, "one"))
    assert modes(path) == [0o700] * 3
    for folder in (path, path / "state" / "jobs"):
        folder.chmod(0o755)
    home.hold().close()
    assert modes(path) == [0o700] * 3


def test_files_that_belong_to_nobody_here_are_refused(world: World) -> None:
    home = world.homes["north"]
    (world.root / "text").write_text("hello")
    for path in (world.root / "text", world.homes["south"].path / "tls.crt"):
        with pytest.raises(InputError, match="not a TOML file"):
            install(home, path, NOW)
    with pytest.raises(InputError, match="cannot read the file"):
        install(home, world.root / "nothing", NOW)


def test_a_roster_takes_certificates_of_one_form(world: World) -> None:
    """Of the member's own name, on P-256, signed with its key, naming that key, and no authority's."""
    home = world.homes["north"]
    key, good = home.tls_key(), home.certificate()
    public = key.public_key()
    names = x509.SubjectAlternativeName([x509.DNSName(pinned_name(key_hash(public)))])

    def made(signer: object = key, alternative: object = names, ca: bool = False) -> str:
        built = x509.CertificateBuilder(good.subject, good.issuer, public, 5, NOW - DAY, NOW + DAY)
        built = built.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        if alternative is not None:
            built = built.add_extension(alternative, critical=False)  # type: ignore[arg-type]
        return as_text(built.sign(signer, hashes.SHA256()))  # type: ignore[arg-type]

    def request(certificate: str) -> object:
        return read_request(make_request("north", "silo", home.identity(), certificate).encode(), "request")

    assert request(made())
    other = x509.SubjectAlternativeName([x509.DNSName(pinned_name(bytes(32)))])
    # A name of X.400, of which `cryptography` raises what is no ValueError: it ended the command as an error of ours.
    unread = x509.UnrecognizedExtension(x509.ObjectIdentifier("2.5.29.17"), bytes.fromhex("3004a3023000"))
    with pytest.raises(x509.UnsupportedGeneralNameType):
        _ = x509.load_der_x509_certificate(base64.b64decode(made(alternative=unread))).extensions
    for bad, says in (
        ("nothing", "must be a certificate: DER in base64"),
        (made()[:-4] + "AAAA", "must be a certificate|not signed with its own key"),
        (made(generate_private_key(SECP256R1())), "is not signed with its own key"),
        (made(alternative=None), "lacks what `keys init` writes into it"),
        (made(alternative=unread), "lacks what `keys init` writes into it"),
        (made(alternative=other), "does not carry the name of its own key"),
        (made(ca=True), "is an authority's, which signs others"),
    ):
        with pytest.raises(InputError, match=says):
            request(bad)


def test_a_site_signs_and_accepts_twice_the_same(world: World) -> None:
    home = world.homes["north"]
    first, path = sign(home, NOW)
    content = path.read_bytes()
    assert accept(home, NOW).hash == first.hash
    assert sign(home, NOW)[1].read_bytes() == content
