"""What a server asks of a site: signed by a server of the roster, for this site and roster, without a path or code."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from deployment_world import DAY, NOW, World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secure_fvi import wire
from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment import job
from secure_fvi.deployment.certificates import as_text, make_certificate
from secure_fvi.deployment.consortium import ConsortiumRoster, Member, write_roster
from secure_fvi.deployment.job import JobOffer, make_offer, portable, read_offer, sign_offer
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.runs.config import Config, parse
from secure_fvi.runs.reading import read

FILES = {
    "seed": 5,
    "model": {"function": "/srv/models/m.py:mean"},
    "silo": [
        {"id": name, "data": f"/srv/{name}.csv", "predictor": f"/srv/{name}.py:eta"}
        for name in ("east", "north", "south")
    ],
    "privacy": {"unit": "record", "epsilon": 1.0, "ledger": "/srv/ledger.sqlite", "data_set": "cohort"},
}


def certificate(name: str) -> str:
    return as_text(make_certificate(generate_private_key(SECP256R1()), name, "silo", (), NOW))


WORLDLESS = write_roster(
    "study",
    [
        Member(id=name, role="silo", identity=Identity().public_key.hex(), certificate=certificate(name))
        for name in ("east", "north", "south")
    ],
    NOW,
)


@pytest.fixture
def roster(world: World) -> ConsortiumRoster:
    return world.homes["north"].roster(NOW)


def offer_of(roster: ConsortiumRoster, config: Config | None = None) -> JobOffer:
    return make_offer(config or parse(FILES, "test"), roster, "hub", bytes(32), NOW)


def test_an_offer_arrives_as_it_was_made(world: World, roster: ConsortiumRoster) -> None:
    offer = offer_of(roster)
    message = sign_offer(offer, world.homes["hub"].identity())
    for site in ("north", "south", "east"):
        assert read_offer(message, roster, site, NOW) == offer
    assert read_offer(message, roster, "north", NOW).hash == offer.hash
    assert offer.data_set == "cohort"
    assert offer.config.seed == 5


def test_an_offer_holds_no_path(roster: ConsortiumRoster) -> None:
    assert b"/srv" not in offer_of(roster).encoded
    assert b"at-site.py:mean" in offer_of(roster).encoded


@pytest.mark.parametrize("example", ["six_cities.toml", "adult.toml", "vertical_logistic.toml"])
def test_the_examples_travel(world: World, roster: ConsortiumRoster, example: str) -> None:
    config = read(Path(__file__).parents[2] / "examples" / example)
    if config.partition is not None:
        ids = ("east", "north", "south")
        config = config.model_copy(
            update={"partition": config.partition.model_copy(update={"count": 3, "ids": ids, "sizes": None})}
        )
    offer = offer_of(roster, config)
    assert read_offer(sign_offer(offer, world.homes["hub"].identity()), roster, "north", NOW) == offer


def test_an_offer_signed_by_another_key_is_refused(roster: ConsortiumRoster) -> None:
    with pytest.raises(ProtocolError, match="not signed by the identity of 'hub'"):
        read_offer(sign_offer(offer_of(roster), Identity()), roster, "north", NOW)


def test_an_offer_by_a_silo_is_refused(world: World, roster: ConsortiumRoster) -> None:
    offer = dataclasses.replace(offer_of(roster), server="south")
    with pytest.raises(ProtocolError, match="offered by 'south', which is a silo"):
        read_offer(sign_offer(offer, world.homes["south"].identity()), roster, "north", NOW)
    stranger = dataclasses.replace(offer_of(roster), server="west")
    with pytest.raises(ProtocolError, match="'west' is no member"):
        read_offer(sign_offer(stranger, world.homes["hub"].identity()), roster, "north", NOW)


def test_an_altered_byte_is_refused(world: World, roster: ConsortiumRoster) -> None:
    message = bytearray(sign_offer(offer_of(roster), world.homes["hub"].identity()))
    for at in range(3, len(message), 37):
        altered = bytearray(message)
        altered[at] ^= 1
        with pytest.raises(ProtocolError):
            read_offer(bytes(altered), roster, "north", NOW)
    for cut in (0, 1, len(message) // 2, len(message) - 1):
        with pytest.raises(ProtocolError):
            read_offer(bytes(message[:cut]), roster, "north", NOW)


def test_an_offer_for_others_is_refused(world: World, roster: ConsortiumRoster) -> None:
    hub = world.homes["hub"].identity()
    offer = offer_of(roster)
    other = dataclasses.replace(offer, roster=bytes(32))
    with pytest.raises(ProtocolError, match="the job is for roster 0000000000000000"):
        read_offer(sign_offer(other, hub), roster, "north", NOW)
    two = dataclasses.replace(offer, silos=("east", "south"))
    with pytest.raises(ProtocolError, match="the job is not for 'north'; it is for east, south"):
        read_offer(sign_offer(two, hub), roster, "north", NOW)
    with pytest.raises(ProtocolError, match="for other silos than the offer"):
        read_offer(sign_offer(two, hub), roster, "south", NOW)
    server = dataclasses.replace(offer, silos=("hub", "north"))
    with pytest.raises(ProtocolError, match="asks 'hub', which is no silo"):
        read_offer(sign_offer(server, hub), roster, "north", NOW)


def test_an_offer_has_its_time(world: World, roster: ConsortiumRoster) -> None:
    message = sign_offer(offer_of(roster), world.homes["hub"].identity())
    read_offer(message, roster, "north", NOW + 7 * DAY)
    with pytest.raises(ProtocolError, match="the job offer expired at"):
        read_offer(message, roster, "north", NOW + 8 * DAY)
    with pytest.raises(ProtocolError, match="yet to come; compare the clocks"):
        read_offer(message, roster, "north", NOW - 2 * DAY)


def test_an_offer_that_names_a_file_is_refused(world: World, roster: ConsortiumRoster) -> None:
    hub, offer = world.homes["hub"].identity(), offer_of(roster)
    config = offer.config
    for update in (
        {"model": config.model.model_copy(update={"function": "/etc/cron.py:run"})},
        {"silo": tuple(s.model_copy(update={"data": "/etc/shadow.csv"}) for s in config.silo)},
        {"privacy": config.privacy and config.privacy.model_copy(update={"ledger": "/srv/other.sqlite"})},
    ):
        bad = dataclasses.replace(offer, config=config.model_copy(update=update))
        with pytest.raises(ProtocolError, match="names files; a site reads its own"):
            read_offer(sign_offer(bad, hub), roster, "north", NOW)


def test_an_offer_is_for_silos_of_the_roster(roster: ConsortiumRoster) -> None:
    def asking(name: str) -> Config:
        return parse({**FILES, "silo": [*FILES["silo"], {"id": name, "data": "/srv/other.csv"}]}, "t")

    with pytest.raises(ProtocolError, match="'west' is no member"):
        make_offer(asking("west"), roster, "hub", bytes(32), NOW)
    with pytest.raises(InputError, match="'hub' is no silo"):
        make_offer(asking("hub"), roster, "hub", bytes(32), NOW)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_offer(data, WORLDLESS, "north", NOW)


def test_an_offer_says_which_protocols_its_server_speaks(world: World, roster: ConsortiumRoster) -> None:
    """Of other versions than this site's: refused by both. Of an older one as well, it is taken."""
    newest = wire.PROTOCOLS[-1]
    key = world.homes["hub"].identity()
    both = dataclasses.replace(offer_of(roster), protocols=(newest - 1, newest, newest + 1))
    assert read_offer(sign_offer(both, key), roster, "north", NOW).protocols == both.protocols
    other = dataclasses.replace(offer_of(roster), protocols=(newest + 1,))
    assert other.hash != both.hash
    with pytest.raises(ProtocolError, match=f"'hub' {newest + 1}, 'north' {newest}"):
        read_offer(sign_offer(other, key), roster, "north", NOW)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.one_of(st.text(max_size=200), st.sampled_from(["a = " + "[" * 5000, "a = " + "9" * 5000, "[model]\n", ""])))
def test_a_configuration_that_is_none_is_refused(world: World, roster: ConsortiumRoster, text: str) -> None:
    """Even one that the server has signed."""
    offer = offer_of(roster)
    fields = (offer.job, offer.server, offer.roster, offer.model, offer.data_set, list(offer.silos))
    encoded = job._CODEC.pack(job._Offer(*fields, offer.made, offer.expires, text, bytes(32), [3]))
    digest = hashlib.sha256(job.LABEL_OFFER + encoded).digest()
    signature = world.homes["hub"].identity().sign(job.LABEL_OFFER + digest)
    with pytest.raises(ProtocolError) as caught:
        read_offer(job._CODEC.pack(job._Signed(encoded, signature)), roster, "north", NOW)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 1000


def test_portable_configurations_stay_as_they_are(roster: ConsortiumRoster) -> None:
    config = offer_of(roster).config
    assert portable(config, "cohort") == config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[model]\nprogram = "six-cities"\n[partition]\ncount = 1000000000\n', "partition.count = 1000000000: must be"),
        ('[model]\nprogram = "six-cities"\n[partition]\ncount = 20000\n', "not in its one form"),
        (f'[model]\nprogram = "six-cities"\n[partition]\nsizes = [{"1, " * 30_000}]\n', "not in its one form"),
        (f'[model]\nprogram = "six-cities"\n[partition]\ncount = 3\nseed = {2**64}\n', "partition.seed = 1844"),
    ],
)
def test_a_short_configuration_stays_short_work(world: World, roster: ConsortiumRoster, text: str, says: str) -> None:
    """A count of silos gave each a name, and each was compared with all: 300 signed bytes took a site's memory, or
    hours of a processor. A seed that fits no generator was taken for a fault of the site's records. Control: three."""

    def offered(config: str) -> bytes:
        offer = job._CODEC.unpack(offer_of(roster).encoded, job._Offer)._replace(config=config)
        digest = hashlib.sha256(job.LABEL_OFFER + job._CODEC.pack(offer)).digest()
        signature = world.homes["hub"].identity().sign(job.LABEL_OFFER + digest)
        return job._CODEC.pack(job._Signed(job._CODEC.pack(offer), signature))

    began = time.process_time()
    with pytest.raises(ProtocolError, match=says):
        read_offer(offered(text), roster, "north", NOW)
    assert time.process_time() - began < 1.0
    assert len(read_offer(offered(offer_of(roster).config.to_toml()), roster, "north", NOW).config.silo) == 3
