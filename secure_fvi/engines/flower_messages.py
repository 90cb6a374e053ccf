"""Carrier `messages`: every exchange as plain Flower messages, for sites that allow no second port.

Made for jobs of tens of exchanges: a node asks every 3 s whether there is a message, and each message gets a process
of its own. A letter is one Flower message of many records, since Flower carries each record by itself.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict

from secure_fvi.deployment.home import Home
from secure_fvi.deployment.names import now
from secure_fvi.engines.flower_letters import Letter, Received, read_letter, write_letter
from secure_fvi.engines.remote import Patience, Remote, TlsFiles, shown
from secure_fvi.engines.stream_messages import MESSAGE, Whole
from secure_fvi.errors import ProtocolError, SecureFVIError

_log = logging.getLogger(__name__)
_LOOK, _LOOK_FOR_NODES = 0.5, 3.0  # seconds
#: Seconds after which a letter without an answer is sent again, doubled each time: a node that was stopped loses it.
_AGAIN = 120.0
_AFTER_FAILURE = 5.0
_LIVES = 24 * 3600.0


class _Sent(NamedTuple):
    """A letter on its way. site: none where the node's was asked for."""

    node: int
    site: str
    digest: bytes


class _Due(NamedTuple):
    """When to write again. pause: seconds that were left for an answer."""

    when: float
    pause: float


_NOT_YET = _Due(0.0, _AGAIN / 2)


class FlowerMessages(Remote):
    """Letters to the ClientApps of the run's nodes."""

    port = 0  # nobody dials in

    def __init__(
        self,
        names: Sequence[str],
        listen: str,
        tls: TlsFiles,
        admit: Callable[[bytes], str],
        roster: bytes,
        job: str,
        patience: Patience | None = None,
        others: Sequence[str] = (),
        *,
        grid: Any,
        home: Home,
    ) -> None:
        """What a `StreamServer` takes, of which there is no address here; grid: Flower's, of the run."""
        super().__init__(names, others, patience)
        self._grid, self._home, self._job, self._certificate = grid, home, job, tls.certificate
        self._nodes: dict[str, int] = {}  # by site
        self._sent: dict[str, _Sent] = {}  # by the message's id
        self._due: dict[object, _Due] = {}  # by node or site
        self._looked = 0.0

    def _deliver(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        self._asked, self._answers = dict(messages), {}
        began = time.monotonic()
        self._sent = {key: sent for key, sent in self._sent.items() if not sent.site}  # late answers count no more
        for site in messages:
            self._due.pop(site, None)
        while not self._settled(began):
            try:
                self._look()
            except Exception as error:
                # Flower's client raises what it likes, such as when the SuperLink's database is busy.
                _log.warning("Flower does not answer (%s); trying again", type(error).__name__)
            if not self._settled(began):
                time.sleep(_LOOK)
        _log.info("exchange took %.2f s", time.monotonic() - began)
        answers, self._asked = self._answers, {}
        self._absent |= messages.keys() - answers.keys()
        return {site: answers[site].message for site in messages if self._usable(site, answers.get(site))}

    def close(self) -> None:
        """Nothing is held: nodes forget a run when it ends."""

    def _look(self) -> None:
        """Write what is due, and take what has come."""
        self._find()
        for site in self._asked.keys() - self._answers.keys():
            if site in self._nodes and self._is_due(site):
                self._write(self._nodes[site], site, self._asked[site])
        for reply in self._grid.pull_messages(list(self._sent)) if self._sent else ():
            self._take(reply)

    def _find(self) -> None:
        """Ask nodes whose site is not known yet."""
        if self._asked.keys() <= self._nodes.keys() or time.monotonic() - self._looked < _LOOK_FOR_NODES:
            return
        self._looked = time.monotonic()
        for node in set(self._grid.get_node_ids()) - set(self._nodes.values()):
            if self._is_due(node):
                self._write(node, "", b"")

    def _is_due(self, whom: object) -> bool:
        return time.monotonic() >= self._due.get(whom, _NOT_YET).when

    def _write(self, node: int, site: str, body: bytes) -> None:
        identity = self._home.identity_in(self._home.roster(now()))
        letter = Letter(self._certificate, self._job, site, secrets.token_bytes(32), MESSAGE, body)
        pieces, digest = write_letter(letter, identity)
        content = RecordDict({name: ConfigRecord({"piece": piece}) for name, piece in pieces.items()})
        message = Message(content, dst_node_id=node, message_type="query.letter", ttl=_LIVES)
        for key in self._grid.push_messages([message]):
            if key:
                self._sent[key] = _Sent(node, site, digest)
        whom = site or node
        pause = 2 * self._due.get(whom, _NOT_YET).pause
        self._due[whom] = _Due(time.monotonic() + pause, pause)

    def _take(self, reply: Message) -> None:
        """A node's answer. What is wrong with it is told, and the letter is written again."""
        sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
        if sent is None:
            return
        try:
            received = self._read(reply, sent)
        except (SecureFVIError, KeyError, TypeError, AttributeError) as error:
            _log.warning("node %d: %s", sent.node, shown(str(error).encode()))
            self._due[sent.site or sent.node] = _Due(time.monotonic() + _AFTER_FAILURE, _AGAIN / 2)
            return
        if self._nodes.get(received.sender) != sent.node:
            _log.info("node %d is '%s'", sent.node, received.sender)
        self._nodes[received.sender] = sent.node
        if sent.site and sent.site in self._asked and sent.site not in self._answers:
            self._answers[sent.site] = Whole(self.exchanges, received.letter.status, received.letter.body)
            self._absent.discard(sent.site)

    def _read(self, reply: Message, sent: _Sent) -> Received:
        """The letter in `reply`. Raises ProtocolError for anything but an answer to what was sent."""
        if reply.has_error():
            raise ProtocolError(str(reply.error.reason))
        if "error" in reply.content:
            raise ProtocolError(str(reply.content["error"]["reason"]))
        pieces = {name: bytes(record["piece"]) for name, record in reply.content.items()}
        received = read_letter(pieces, self._home, ["silo", "holder"])
        letter = received.letter
        if letter.number != sent.digest or letter.receiver != self._home.id or letter.job != self._job:
            raise ProtocolError("an answer to another letter")
        if sent.site not in ("", received.sender):
            raise ProtocolError(f"'{received.sender}' answers for '{sent.site}'")
        return received
