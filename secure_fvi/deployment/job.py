"""What a server asks of a site: a job offer, signed by the server's identity. It holds no code and no path.

The configuration is a run's, in which silos have no files: a site reads its own, which its policy names by the data
set's id, and the model is the site's own copy, which the offer names by its hash, or a formula with its dictionary,
which is data.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import secrets
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from secure_fvi import wire
from secure_fvi.aggregation.messages import PROTOCOL_LIST, Codec
from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.model_hash import package_digest
from secure_fvi.deployment.names import format_time, printable
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import signed
from secure_fvi.runs import wording
from secure_fvi.runs.config import Config, SiloFile, parse

LABEL_OFFER = b"secure-fvi/job-offer/3/"
LABEL_COLUMNS = b"secure-fvi/columns-job/1/"
#: Stands where a run's configuration has a path: what it names lies at the site.
AT_SITE = "at-site"
_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_LONGEST_CONFIG = 1 << 20
VALID = datetime.timedelta(days=7)


class _Offer(NamedTuple):
    job: str
    server: str
    roster: bytes
    model: bytes
    data_set: str
    silos: list[str]
    made: int
    expires: int
    config: str
    package: bytes
    protocols: list[int]


class _Signed(NamedTuple):
    offer: bytes
    signature: bytes


_text, _is_32, _seconds = wire.text(200, 1, printable=True), wire.binary(32), wire.whole(2**40)

_CODEC = Codec(
    {
        _Offer: (
            1,
            (
                _text,
                _text,
                _is_32,
                _is_32,
                _text,
                wire.Listed(_text, 10_000, 1),
                _seconds,
                _seconds,
                wire.text(_LONGEST_CONFIG, 1),
                _is_32,
                PROTOCOL_LIST,
            ),
        ),
        _Signed: (2, (wire.binary(most=2 * _LONGEST_CONFIG), wire.binary(64))),
    }
)


@dataclass(frozen=True)
class JobOffer:
    """A job as a server describes it. Known to all members.

    job: an id that no other job has; a job that goes on after a crash keeps it. roster, model: hashes of 32 bytes.
    package: the digest of the server's secure_fvi, which is part of `model`. protocols: the versions that it speaks, of
    which the highest that all speak is chosen once all have joined.
    data_set: which of its populations each site is to use. silos: who is asked, sorted. Times: seconds since 1970, UTC.
    """

    job: str
    server: str
    roster: bytes
    model: bytes
    data_set: str
    silos: tuple[str, ...]
    made: int
    expires: int
    config: Config
    package: bytes
    protocols: tuple[int, ...] = wire.PROTOCOLS

    @cached_property
    def encoded(self) -> bytes:
        """The one form that is signed and hashed."""
        config = self.config.to_toml()
        named = (self.job, self.server, self.roster, self.model, self.data_set, list(self.silos))
        return _CODEC.pack(_Offer(*named, self.made, self.expires, config, self.package, list(self.protocols)))

    @cached_property
    def hash(self) -> bytes:
        """SHA-256, 32 bytes."""
        return hashlib.sha256(LABEL_OFFER + self.encoded).digest()

    def within(self, schema: bytes) -> bytes:
        """What names the job in a session whose schema has this digest: its hash. Of a vertical job the schema, which
        says in which order the people are, is part of it: who was told another order has keys of another session, under
        which no other silo masks or signs. 32 bytes."""
        return hashlib.sha256(LABEL_COLUMNS + self.hash + schema).digest() if self.config.vertical else self.hash


def make_offer(
    config: Config,
    roster: ConsortiumRoster,
    server: str,
    model: bytes,
    now: datetime.datetime,
    job: str | None = None,
) -> JobOffer:
    """The offer of `config` to the silos that it names, or all. Paths are dropped."""
    named = silo_ids(config)
    chosen = tuple(sorted(named if named is not None else [m.id for m in roster.of_role("silo")]))
    for name in chosen:
        if roster.member(name).role != "silo":
            raise InputError(f"'{name}' is no silo in roster {roster.serial}")
    data_set = data_set_of(config)
    return JobOffer(
        secrets.token_hex(16) if job is None else job,
        server,
        roster.hash,
        model,
        data_set,
        chosen,
        int(now.timestamp()),
        int((now + VALID).timestamp()),
        portable(config, data_set),
        package_digest(),
    )


def data_set_of(config: Config) -> str:
    """What sites' policies call the data that a configuration is about."""
    return config.privacy.data_set if config.privacy is not None else "data"


def silo_ids(config: Config) -> tuple[str, ...] | None:
    """The silos that a configuration names, sorted; None where its program does."""
    if config.silo:
        return tuple(sorted(s.id for s in config.silo))
    return tuple(sorted(config.partition.silo_ids)) if config.partition is not None else None


def portable(config: Config, data_set: str) -> Config:
    """`config` without anything of one machine: no path of data, dictionary, model, predictor or
    ledger, and no query. A formula's dictionary is there as `settled` put it."""
    silos = tuple(
        SiloFile(id=s.id, data=AT_SITE, predictor=None if s.predictor is None else f"{AT_SITE}.py:predictor")
        for s in config.silo
    )
    model = config.model
    if model.function is not None:
        model = model.model_copy(update={"function": f"{AT_SITE}.py:{model.function.rpartition(':')[2]}"})
    if isinstance(model.dictionary, str):
        model = model.model_copy(update={"dictionary": None})
    response = config.response
    if response is not None and response.data is not None:
        response = response.model_copy(update={"data": AT_SITE})
    privacy = config.privacy and config.privacy.model_copy(update={"ledger": None, "data_set": data_set})
    return config.model_copy(update={"silo": silos, "model": model, "response": response, "privacy": privacy})


def sign_offer(offer: JobOffer, identity: Identity) -> bytes:
    """The message that goes to every site."""
    return _CODEC.pack(_Signed(offer.encoded, identity.sign(LABEL_OFFER + offer.hash)))


def read_offer(
    message: bytes,
    roster: ConsortiumRoster,
    site: str,
    now: datetime.datetime,
    known: Container[bytes] = (),
) -> JobOffer:
    """The offer in `message`, as `site` takes it: by a server of the roster, for this roster, for this site, in time.

    known: hashes of offers accepted before; a job that goes on may be older than an offer lasts.
    Raises ProtocolError, which names the reason; whether the site allows the job is `policy_check`'s question.
    """
    envelope = _CODEC.unpack(message, _Signed)
    fields = _CODEC.unpack(envelope.offer, _Offer)
    server = roster.member(fields.server)
    if server.role != "server":
        raise ProtocolError(f"a job offered by '{server.id}', which is a {server.role} in the roster")
    digest = hashlib.sha256(LABEL_OFFER + envelope.offer).digest()
    if not signed(server.identity_key, LABEL_OFFER, digest, envelope.signature):
        raise ProtocolError(f"the job offer is not signed by the identity of '{server.id}'")
    check_job_id(fields.job)
    wire.agreed({f"'{server.id}'": fields.protocols, f"'{site}'": wire.PROTOCOLS})
    if fields.roster != roster.hash:
        raise ProtocolError(
            f"the job is for roster {fields.roster.hex()[:16]}..., this site's is {roster.hash.hex()[:16]}... "
            f"(number {roster.serial})"
        )
    if site not in fields.silos and roster.member(site).role == "silo":
        raise ProtocolError(f"the job is not for '{site}'; it is for {', '.join(fields.silos)}")
    for name in fields.silos:
        if roster.member(name).role != "silo":
            raise ProtocolError(f"the job asks '{name}', which is no silo in the roster")
    if now.timestamp() > fields.expires and digest not in known:
        expired = datetime.datetime.fromtimestamp(fields.expires, datetime.UTC)
        raise ProtocolError(f"the job offer expired at {format_time(expired)}")
    if now.timestamp() + 86_400 < fields.made:
        raise ProtocolError("the job offer was made at a time that is yet to come; compare the clocks")
    offer = JobOffer(
        fields.job,
        fields.server,
        fields.roster,
        fields.model,
        fields.data_set,
        tuple(fields.silos),
        fields.made,
        fields.expires,
        _parse(fields.config),
        fields.package,
        tuple(fields.protocols),
    )
    if offer.encoded != envelope.offer:
        raise ProtocolError("the job offer is not in its one form")
    if silo_ids(offer.config) not in (None, offer.silos):
        raise ProtocolError("the job offer's configuration is for other silos than the offer")
    if portable(offer.config, offer.data_set) != offer.config:
        raise ProtocolError("the job offer names files; a site reads its own and no others")
    return offer


def check_job_id(job: str) -> None:
    """Raises ProtocolError for an id that names no folder of its own: it comes from the server."""
    if not _ID.fullmatch(job):
        raise ProtocolError("a job's id must be letters, digits, dashes and underscores, 100 of them at most")


def offer_hash(message: bytes) -> bytes:
    """`JobOffer.hash` of the offer in `message`, which nobody has looked at yet. Raises ProtocolError for no offer."""
    envelope = _CODEC.unpack(message, _Signed)
    _CODEC.unpack(envelope.offer, _Offer)
    return hashlib.sha256(LABEL_OFFER + envelope.offer).digest()


def _parse(text: str) -> Config:
    try:
        table = wording.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError("the job offer's configuration is no TOML") from None
    try:
        return parse(table, "the job offer")
    except (InputError, RecursionError) as error:
        raise ProtocolError(printable(str(error))) from None
