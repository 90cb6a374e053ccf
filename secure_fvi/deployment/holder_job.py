"""One job at the key holder: the encryption key of the session that is open, and what was decrypted with it.

state/jobs/JOB/offer       the offer that was accepted
               session     the session that is open: everybody's fresh bytes
               SESSION.sqlite    its key pair, and which sums were decrypted; sealed

The holder sees no data and, with masks, no total. A key serves one session and is removed with it. One whose record
of decryptions may not be whole is used no more: after a restart of the machine, and where this site's log knows of
more answers than the record, which is then an old copy. All open a new session then, under a new key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.aggregation.homomorphic_schemes import SecretContext, scheme_named
from secure_fvi.aggregation.key_holder import KeyHolder, KeyWornOut, key_hash
from secure_fvi.aggregation.roster import Roster
from secure_fvi.deployment import session_messages as talk
from secure_fvi.deployment.deciding import Decision
from secure_fvi.deployment.going import Stand
from secure_fvi.deployment.holding import HeldStore, open_held
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.site_job import check_supported, job_folder
from secure_fvi.disclosure import disclose
from secure_fvi.engines.stream_messages import LONGEST
from secure_fvi.errors import (
    InputError,
    ProtocolError,
    SessionLost,
)
from secure_fvi.files import make_private, own_file, write_atomically
from secure_fvi.messages import SUM
from secure_fvi.runs.config import chosen, title
from secure_fvi.wire import MAX_MESSAGE_BYTES

_KEY, _LOGGED = "holder/key", "holder/logged"


class HolderJob:
    """A job for which this site keeps the key. To `Site` it is what `SiteJob` is at a silo."""

    def __init__(self, home: Home, decision: Decision, logged: Callable[[], int]) -> None:
        """logged: how many answers of the job this site's log has. Raises InputError for a job that needs no key."""
        self.home, self.decision, self._logged = home, decision, logged
        offer = decision.offer
        algorithm, sums, privacy = chosen(offer.config)
        if not isinstance(sums, Homomorphic):
            raise InputError(f"aggregation.kind = '{offer.config.aggregation.kind}' needs no key holder")
        check_supported(offer.config)
        disclose(algorithm, sums, privacy, len(offer.silos))
        self.aggregation, self._scheme = sums, scheme_named(sums.scheme)
        self.folder = job_folder(home, decision.offer.job)
        make_private(self.folder)
        self.session = b""
        self._next: SecretContext | None = None  # offered, and not in use yet
        self._party: KeyHolder | None = None
        self._store: HeldStore | None = None

    @property
    def longest(self) -> int:
        """Bytes of the longest message that the server may send. Once a key is there: a request holds a ciphertext of
        each part of a table that the holder does not know."""
        begun = self._party is not None or (self.folder / "session").exists()
        return MAX_MESSAGE_BYTES if begun else LONGEST

    def __repr__(self) -> str:
        return f"HolderJob({self.home.id!r}, {self.decision.offer.job!r})"

    def stand(self) -> Stand:
        """How the job stands here, for any thread; which round it is, a key holder is not told."""
        offer = self.decision.offer
        return Stand(offer.job, title(offer.config), "key in use" if self._party is not None else "joining")

    def join(self) -> talk.Joined:
        """The session that is open here, and the hash of a new key, should there have to be another."""
        self._restore()
        if self._next is None:
            self._next = SecretContext(self._scheme)
        policy = self.decision.stated_policy(self.home)
        self._count()
        return talk.Joined(b"", self._hash(self._next), self.session, 0, policy=policy)

    def open(self, message: talk.Open) -> bytes:
        """Open the session that `message` describes, or go on in it; 32 bytes that name it."""
        self._restore()
        if not set(message.silos) <= set(self.decision.offer.silos):
            raise ProtocolError("a session of other silos than the job's")
        session = talk.session_of(
            self.decision.roster, self.decision.offer.within(message.schema), message, self.aggregation
        )
        if session == self.session:
            self._count()
            return session
        if self._next is None or message.holder != self._hash(self._next):
            raise SessionLost("the session does not rest on this key holder's newest key")
        try:
            roster = self._roster(session, message)
        except InputError as error:  # of job and roster
            raise ProtocolError(str(error)) from None
        key, self._next = self._next, None
        path = self.folder / f"{session.hex()}.sqlite"
        store = open_held(path, self.home.state_secret())
        store.same_boot()
        store.put({_KEY: key.to_bytes(), **self._counted()})
        write_atomically(self.folder / "session", talk.CODEC.pack(message))
        self._begin(roster, store, key)
        for other in self.folder.glob("*.sqlite*"):  # keys of sessions that are over
            if not other.name.startswith(session.hex()):
                other.unlink()
        return session

    def handle(self, message: bytes) -> bytes:
        """The server's request for the key, or for a total. Raises SessionLost where there is no session, or its key
        is worn out, ProtocolError where `KeyHolder` refuses."""
        self._restore()
        if self._party is None:
            raise SessionLost("no session is open here")
        if message[:1] != SUM:
            raise ProtocolError("a key holder takes no broadcast")
        try:
            answer = self._party.handle(message[1:])
        except KeyWornOut as error:
            self._forget()
            raise SessionLost(str(error)) from None
        self._count()
        return answer

    def charged(self, logged: int) -> str:
        """Nothing: a key holder has no ledger."""
        return ""

    def end(self, accepted: int, posterior: bytes) -> Path | None:
        """Nothing is kept of a job's result."""
        return None

    def close(self, outcome: str | None = None) -> None:
        """Let go of files; with an outcome the job is over, and its key is removed."""
        self._let_go()
        if outcome is not None:
            self._remove()

    # ---- parts ----

    def _restore(self) -> None:
        """Go on in the session that was open when the process ended, if its record of decryptions is whole."""
        if self._party is None:
            self._reopen()

    def _count(self) -> None:
        """Note how many answers the log will have with the one that leaves now, so that an old copy of the record of
        decryptions can be told. A message that is refused is none: were it noted as it came, a copy from after it would
        pass for one from after the next answer."""
        if self._store is not None:
            self._store.put(self._counted())

    def _counted(self) -> dict[str, bytes]:
        return {_LOGGED: (self._logged() + 1).to_bytes(8, "big")}

    def _reopen(self) -> None:
        path = self.folder / "session"
        if not path.exists():
            return
        with own_file(path):
            message = talk.CODEC.unpack(path.read_bytes(), talk.Open)
        session = talk.session_of(
            self.decision.roster, self.decision.offer.within(message.schema), message, self.aggregation
        )
        kept = self.folder / f"{session.hex()}.sqlite"
        if not kept.exists():
            return
        store = open_held(kept, self.home.state_secret())
        key, fault = store.get(_KEY), self._fault(store)
        if fault or key is None:
            store.close()
            self._remove()
            raise SessionLost(fault or "the session's key is not there")
        self._begin(self._roster(session, message), store, SecretContext.from_bytes(self._scheme, key))

    def _fault(self, store: HeldStore) -> str:
        """Why the record of decryptions in `store` may not be whole; empty where it is."""
        if not store.same_boot():
            return "the machine was restarted, and what was decrypted last may not be on record"
        # One that was killed before the log had its last answer has noted one more than that.
        if self._logged() > int.from_bytes(store.get(_LOGGED) or b"", "big"):
            return "the record of what was decrypted is older than this site's log: a copy was restored"
        return ""

    def _roster(self, session: bytes, message: talk.Open) -> Roster:
        """Raises InputError where the consortium's [sums] are stricter than the job's."""
        least = max(message.min_cohort, self.aggregation.min_cohort)
        sums = dataclasses.replace(self.aggregation, min_cohort=least, max_missing=message.max_missing)
        found = talk.session_roster(self.decision.roster, session, self.decision.offer.silos, sums, message.holder)
        assert found is not None
        return found

    def _begin(self, roster: Roster, store: HeldStore, key: SecretContext) -> None:
        identity = self.home.identity_in(self.decision.roster)
        self._party = KeyHolder(roster, identity, key, self.aggregation.masked, store)
        self._store, self.session = store, roster.session

    def _hash(self, key: SecretContext) -> bytes:
        return key_hash(self._scheme, self.aggregation.masked, key.public_bytes)

    def _forget(self) -> None:
        self._let_go()
        self._remove()

    def _let_go(self) -> None:
        if self._store is not None:
            self._store.close()
        self._party = self._store = None
        self.session = b""

    def _remove(self) -> None:
        for path in (*self.folder.glob("*.sqlite*"), self.folder / "session"):
            path.unlink(missing_ok=True)
