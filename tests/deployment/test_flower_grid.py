"""The server's side of both carriers against a grid in memory: finding sites, answers that are none, tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from consortium_run import SILOS
from deployment_world import World

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from secure_fvi.deployment.certificates import pem_of
from secure_fvi.engines import flower_client, flower_messages, flower_server
from secure_fvi.engines.flower_letters import Letter, read_letter, write_letter
from secure_fvi.engines.flower_messages import FlowerMessages
from secure_fvi.engines.flower_server import Sessions
from secure_fvi.engines.remote import Patience, SessionLost
from secure_fvi.errors import PolicyError, ProtocolError

# Flower sets these in the processes that it starts; without them no message can be made.
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

Node = Callable[[Message], Message | None]


class Grid:
    """Nodes that answer at once. What they were sent stays here."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes, self.sent, self._ids = nodes, [], itertools.count()
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        keys = []
        for message in messages:
            key = str(next(self._ids))
            message.metadata.__dict__["_message_id"] = key
            self.sent.append(message)
            reply = self.nodes[message.metadata.dst_node_id](message)
            if reply is not None:
                self._replies[key] = reply
            keys.append(key)
        return keys

    def pull_messages(self, keys: Iterable[str]) -> list[Message]:
        return [self._replies.pop(key) for key in list(keys) if key in self._replies]


class Answering:
    """In place of a site's parties."""

    def __init__(self, home: Any, local: Any) -> None:
        self._name = home.id

    def handle(self, job: str, message: bytes) -> bytes:
        if message == b"refuse":
            raise PolicyError("not here")
        if message == b"lost":
            raise SessionLost("gone")
        return f"{self._name}/{job}/".encode() + message

    def close(self) -> None:
        pass


def _node(world: World, silo: str) -> Node:
    config = {"secure-fvi-home": str(world.homes[silo].path)}

    def reply(message: Message) -> Message:
        pieces = {name: bytes(record["piece"]) for name, record in message.content.items()}
        answer = flower_client.answer(pieces, config)
        return Message(RecordDict({n: ConfigRecord({"piece": p}) for n, p in answer.items()}), reply_to=message)

    return reply


@pytest.fixture
def nodes(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[int, Node]:
    monkeypatch.setattr(flower_client, "Site", Answering)
    monkeypatch.setattr(flower_messages, "_AFTER_FAILURE", 0.0)
    monkeypatch.setattr(flower_messages, "_LOOK", 0.01)
    monkeypatch.setattr(flower_messages, "_LOOK_FOR_NODES", 0.01)
    return {number: _node(world, silo) for number, silo in enumerate(SILOS, 1)}


def _carrier(world: World, nodes: dict[int, Node], patience: Patience | None = None) -> FlowerMessages:
    home = world.homes["hub"]
    tls = home.credentials([])
    return FlowerMessages(SILOS, "", tls, str, bytes(32), "job", patience, grid=Grid(nodes), home=home)


def test_every_site_is_found_and_answers(world: World, nodes: dict[int, Node]) -> None:
    carrier = _carrier(world, nodes)
    for _ in range(2):
        found = carrier.exchange({silo: silo.encode() for silo in SILOS})
        assert found == {silo: f"{silo}/job/{silo}".encode() for silo in SILOS}


def test_a_site_that_fails_is_written_to_again(world: World, nodes: dict[int, Node]) -> None:
    answering, errors = nodes[2], [3]

    def failing(message: Message) -> Message | None:
        if errors[0]:
            errors[0] -= 1
            return Message(Error(code=3, reason="killed"), reply_to=message)
        return answering(message)

    carrier = _carrier(world, {**nodes, 2: failing})
    assert set(carrier.exchange(dict.fromkeys(SILOS, b"x"))) == set(SILOS)
    assert errors == [0]


def test_an_old_answer_does_not_count(world: World, nodes: dict[int, Node]) -> None:
    """A node, or whoever holds the SuperLink, sends a site's signed answer to an earlier letter once more."""
    answering, kept = nodes[1], []

    def replaying(message: Message) -> Message:
        reply = answering(message)
        assert reply is not None
        kept.append(reply.content)
        if len(kept) == 3:  # the second exchange gets what answered the first
            return Message(kept[1], reply_to=message)
        return reply

    carrier = _carrier(world, {**nodes, 1: replaying})
    carrier.exchange(dict.fromkeys(SILOS, b"first"))
    found = carrier.exchange(dict.fromkeys(SILOS, b"second"))
    assert found["east"] == b"east/job/second"
    assert len(kept) == 4


def test_a_site_does_not_answer_for_another(
    world: World, nodes: dict[int, Node], caplog: pytest.LogCaptureFixture
) -> None:
    """South's software is another, and it gets east's letters: its answers, well signed, are not taken for east's."""
    south, turned = world.homes["south"], []

    def turning(message: Message) -> Message | None:
        turned.append(message)
        if len(turned) == 1:  # east is found here
            return nodes[1](message)
        pieces = {name: bytes(record["piece"]) for name, record in message.content.items()}
        asked = read_letter(pieces, south, ["server"])
        answer = Letter(pem_of(south.certificate()), "job", "hub", asked.digest, 0, b"a lie")
        letter, _ = write_letter(answer, south.identity())
        return Message(RecordDict({n: ConfigRecord({"piece": p}) for n, p in letter.items()}), reply_to=message)

    carrier = _carrier(world, {**nodes, 1: turning}, Patience("drop", 0.5, 2))
    assert set(carrier.exchange(dict.fromkeys(SILOS, b"x"))) == {"north", "south"}
    assert "'south' answers for 'east'" in caplog.text


def test_refusal_and_lost_session_reach_the_server(world: World, nodes: dict[int, Node]) -> None:
    carrier = _carrier(world, nodes)
    with pytest.raises(ProtocolError, match="refused: not here"):
        carrier.exchange({"east": b"x", "north": b"refuse"})
    with pytest.raises(SessionLost):
        carrier.exchange({"north": b"lost"})
    assert carrier.exchange({"north": b"x"}) == {"north": b"north/job/x"}


def test_a_busy_superlink_is_asked_again(
    world: World, nodes: dict[int, Node], caplog: pytest.LogCaptureFixture
) -> None:
    carrier, failures = _carrier(world, nodes), [3]
    push = carrier._grid.push_messages

    def locked(messages: Iterable[Message]) -> list[str]:
        if failures[0]:
            failures[0] -= 1
            raise OSError("database is locked")
        found: list[str] = push(messages)
        return found

    carrier._grid.push_messages = locked
    assert set(carrier.exchange(dict.fromkeys(SILOS, b"x"))) == set(SILOS)
    assert failures == [0]
    assert "Flower does not answer (OSError)" in caplog.text


def test_a_silent_site_is_dropped(world: World, nodes: dict[int, Node]) -> None:
    carrier = _carrier(world, {1: nodes[1], 2: nodes[2], 3: lambda message: None}, Patience("drop", 0.3, 2))
    assert set(carrier.exchange(dict.fromkeys(SILOS, b"x"))) == {"east", "north"}


def test_tokens_say_which_run_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is asked, and asked again with new bytes once its ClientApp has ended; the old ones are refused then."""
    monkeypatch.setattr(flower_server, "_AFTER_FAILURE", 0.0)

    def ended(message: Message) -> Message:
        return Message(RecordDict({"session": ConfigRecord({"ended": "killed"})}), reply_to=message)

    grid = Grid({7: ended})
    sessions = Sessions(grid, "hub:8443")  # type: ignore[arg-type]
    sessions._look()
    sessions._look()
    first, second = (bytes(m.content["session"]["token"]) for m in grid.sent)
    assert grid.sent[0].content["session"]["address"] == "hub:8443"
    assert first != second
    sessions.check("east", second)
    for wrong in (first, b"", bytes(32)):
        with pytest.raises(ProtocolError, match="this run did not start"):
            sessions.check("east", wrong)
    sessions.connected = lambda: {"east"}
    sessions._look()
    assert len(grid.sent) == 2
