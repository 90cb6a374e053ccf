"""Test vectors of masked sums, from the parties themselves: `PYTHONPATH=. python tests/vectors/make_vectors.py`.

Whatever is random comes from `Chance` here: SHA-256 of a label, the party's id and a count. So the files come out the
same each time, and private keys and nonces stand in them: they are for tests alone. tests/vectors/verifier.py reads
them without any of our code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from secure_fvi.aggregation import Block, BlockTable, Masked, onetime, shamir
from secure_fvi.aggregation.base import Exchanges, T
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import unpack_any
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.errors import ProtocolError
from secure_fvi.messages import decode_broadcast, encode_broadcast, question_digest
from secure_fvi.silo import Silo, shared_past

FOLDER = Path(__file__).parent
SERVER = "server"
TABLE = BlockTable((Block("gradient", (2, 2), 10.0), Block("count", (1,), 1000.0, integer=True)))


class Scenario(NamedTuple):
    """Who takes part, and who is away when. away: by sum, who does not contribute, sign, reveal. unasked: by sum, who
    is not in its cohort. job: whether sums answer broadcasts, from index 1 on, and masks name what they asked before;
    else a context and a question are 32 bytes each."""

    name: str
    ids: tuple[str, ...]
    options: Mapping[str, Any]
    away: tuple[tuple[Collection[str], Collection[str], Collection[str]], ...]
    unasked: tuple[Collection[str], ...] = ()
    job: bool = False


#: North, lost once it has contributed, has its self mask opened by shares; west, which did not contribute and comes
#: back, its pairwise one.
THREE = Scenario(
    "three",
    ("east", "north", "west"),
    {"min_cohort": 2, "max_missing": 1, "batch": 2},
    (((), (), ()), (("west",), (), ("north",))),
)
_IDS = tuple(f"s{i:02d}" for i in range(33))
#: 33 silos are the fewest on a regular graph; with hardly any assumed lost or corrupt, each has four neighbours. Of the
#: one that is lost, s24 is a neighbour, and falls silent before secrets are shown.
RING = Scenario(
    "ring",
    _IDS,
    {"max_missing": 1, "batch": 1, "bits": 32, "corrupt": 0.0, "lost": 1e-7},
    ((("s05",), ("s05",), ("s05", "s24")),),
)
_NOBODY = (), (), ()
#: Whole sums, of four, of three of them, and of four again.
WHOLE = Scenario(
    "whole", ("east", "north", "south", "west"), {}, (_NOBODY,) * 3, unasked=((), ("north",), ()), job=True
)
#: Of the neighbours of some silo one is not asked.
WHOLE_RING = Scenario(
    "whole-ring", _IDS, {"bits": 32, "corrupt": 0.0, "lost": 1e-7}, (_NOBODY,), unasked=(("s07", "s20"),)
)
SCENARIOS = (THREE, RING, WHOLE, WHOLE_RING)


class Chance:
    """Bytes that look random and are not, of each party its own."""

    def __init__(self, scenario: str) -> None:
        self.scenario, self.party, self._drawn = scenario, SERVER, dict[str, int]()

    def __call__(self, length: int) -> bytes:
        count = self._drawn[self.party] = self._drawn.get(self.party, 0) + 1
        return self.named(f"{self.party}/{count}", length)

    def named(self, what: str, length: int = 32) -> bytes:
        name = f"secure-fvi test vectors/{self.scenario}/{what}".encode()
        blocks = (hashlib.sha256(name + at.to_bytes(4, "big")).digest() for at in range(length // 32 + 1))
        return b"".join(blocks)[:length]

    @contextmanager
    def of(self, party: str) -> Iterator[None]:
        before, self.party = self.party, party
        yield
        self.party = before


class Sent(NamedTuple):
    """One message on its way; `to` are all who got these bytes."""

    sender: str
    to: tuple[str, ...]
    message: bytes


class Made(NamedTuple):
    """What became of a scenario."""

    vector: dict[str, Any]
    sent: list[Sent]
    refusals: list[str]  # what silos refused, in words
    faults: Mapping[str, str]  # what the server says of silos


def play(scenario: Scenario, on_the_way: Callable[[Sent], bytes] = lambda sent: sent.message) -> Made:
    """Set-up and sums, all messages on record. on_the_way: may alter what a receiver gets, not what is on record.

    Raises AggregationError where a sum does not come about.
    """
    chance = Chance(scenario.name)
    system, keys = SimpleNamespace(urandom=chance), SimpleNamespace(
        generate=lambda: X25519PrivateKey.from_private_bytes(chance(32)),
        from_private_bytes=X25519PrivateKey.from_private_bytes,
    )  # fmt: skip
    with (
        patch.object(onetime, "os", system),
        patch.object(shamir, "os", system),
        patch.object(onetime, "X25519PrivateKey", keys),
    ):
        return _played(scenario, chance, on_the_way)


def _played(scenario: Scenario, chance: Chance, on_the_way: Callable[[Sent], bytes]) -> Made:
    ids, sent, refusals = scenario.ids, list[Sent](), list[str]()
    seeds = {s: chance.named(f"identity/{s}") for s in ids}
    identities = {s: Identity(Ed25519PrivateKey.from_private_bytes(seed)) for s, seed in seeds.items()}
    public = {s: identity.public_key for s, identity in identities.items()}
    roster = Masked(**scenario.options).roster(public, chance.named("session"))
    stores = {s: MemoryStore() for s in ids}
    silos = {s: MaskedSilo(roster, s, identities[s], stores[s]) for s in ids}
    server = MaskedServer(roster)

    def carry(exchanges: Exchanges[T], away: Callable[[int], Collection[str]]) -> T:
        step, replies = 0, dict[str, bytes]()
        try:
            messages = next(exchanges)
            while True:
                for message in dict.fromkeys(messages.values()):
                    sent.append(Sent(SERVER, tuple(s for s, m in messages.items() if m == message), message))
                arrived = {s: on_the_way(Sent(SERVER, (s,), m)) for s, m in messages.items() if s not in away(step)}
                replies = {}
                for silo, message in arrived.items():
                    try:
                        with chance.of(silo):
                            reply = Sent(silo, (SERVER,), silos[silo].handle(message))
                    except ProtocolError as error:
                        refusals.append(f"{silo}: {error}")
                        continue
                    sent.append(reply)
                    replies[silo] = on_the_way(reply)
                step += 1
                messages = exchanges.send(replies)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    sums: list[dict[str, Any]] = []
    used, pasts = dict.fromkeys(ids, 0), dict[str, dict[str, str]]()  # the last sum used; by silo, `Past.shared`
    for at, (silent, unsigned, unrevealed) in enumerate(scenario.away):
        index = at + scenario.job
        carry(server.prepare(index), lambda step: ())
        cohort = [s for s in ids if not scenario.unasked or s not in scenario.unasked[at]]
        context, question = chance.named(f"context/{index}"), chance.named(f"question/{index}")
        broadcast = b""
        if scenario.job:
            broadcast = asked(index, ids, cohort, used)
            context = hashlib.sha256(broadcast).digest()
            question = question_digest(decode_broadcast(broadcast, lambda round_, phase: ids))
        values = {
            s: np.array([(at + 1) * (2 * j - 3) / (7.0 + index) % 10 for j in range(4)] + [100.0 * index + at])
            for at, s in enumerate(ids)
        }
        contributions = {}
        for silo in (s for s in cohort if s not in silent):
            past = {other: bytes.fromhex(named) for other, named in pasts.get(silo, {}).items()}
            with chance.of(silo):
                message = silos[silo].contribute(index, cohort, TABLE, values[silo], context, question, past=past)
            sent.append(Sent(silo, (SERVER,), message))
            contributions[silo] = on_the_way(sent[-1])
        total = carry(
            server.total(index, cohort, TABLE, contributions, context),
            lambda step, gone=(unsigned, unrevealed): gone[step],  # type: ignore[misc]
        )
        named = [[u, v, pasts[u][v]] for u, v in combinations(cohort, 2) if v in pasts.get(u, {})]
        sums.append(
            {
                "index": index,
                "cohort": cohort,
                **({"broadcast": broadcast.hex()} if broadcast else {}),
                "context": context.hex(),
                "question": question.hex(),
                **({"pasts": named} if named else {}),
                "values": {s: list(values[s]) for s in total.survivors},
                "total": list(total.values),
            }
        )
        for s in cohort if scenario.job else ():
            used[s], before = index, pasts.setdefault(s, {})
            view = Silo._view(cast(Any, SimpleNamespace(_sum=silos[s])), context)
            before |= {v: shared_past(before.get(v, ""), index, question.hex(), view) for v in cohort}
    session, setups = server._state.session, {s: silos[s]._state._setup for s in ids}
    assert session is not None
    vector = {
        "made by": "tests/vectors/make_vectors.py; the keys are for tests alone",
        "roster": {
            "session": roster.session.hex(),
            "members": [[s, key.hex()] for s, key in roster.members],
            **{name: getattr(roster, name) for name in _SETTINGS},
            "key_holder": roster.key_holder.hex(),
        },
        "blocks": [[b.name, list(b.shape), b.bound, b.integer, b.rows] for b in TABLE.blocks],
        "private": {
            s: {
                "identity": seeds[s].hex(),
                "x25519": setup._private.private_bytes_raw().hex(),
                "nonce": setup._nonce.hex(),
            }
            for s, setup in setups.items()
            if setup is not None
        },
        "sums": sums,
        "derived": {
            "roster": roster.hash.hex(),
            "table": TABLE.digest.hex(),
            "key set": session.key_set.hex(),
            "order": list(session._order),
            "threshold": session.threshold,
            "batches": [batch.digest.hex() for batch in server._state.batches.values()],
        },
        "messages": [[s.sender, list(s.to), type(unpack_any(s.message)).__name__, s.message.hex()] for s in sent],
    }
    return Made(vector, sent, refusals, server.faults)


def asked(index: int, ids: tuple[str, ...], cohort: Collection[str], used: Mapping[str, int]) -> bytes:
    """A broadcast of a job that asks all of `ids` in each round; sum 1 answers round 0."""
    accepted = {s: used[s] for s in cohort}
    tensors = {
        "q": torch.tensor([0.5 * index, -1.0], dtype=torch.float64),
        "a": torch.tensor([[1.0 + index]], dtype=torch.float32),
    }
    sums = tuple((i, i - 1, "round", 0) for i in sorted({*accepted.values()} - {0}))
    scalars = {"rate": 0.25, "beta": float(index)}
    return encode_broadcast(Broadcast(index - 1, index, accepted, tuple(cohort), scalars, tensors, sums=sums), ids)


_SETTINGS = ("min_cohort", "max_missing", "bits", "consistency_check", "batch", "corrupt", "lost")


def text(vector: Mapping[str, Any]) -> str:
    """As it stands in a file: a line for each message."""
    head = json.dumps({k: v for k, v in vector.items() if k != "messages"}, indent=1)
    rows = ",\n".join(json.dumps(row) for row in vector["messages"])
    return f'{head[:-2]},\n "messages": [\n{rows}\n]}}\n'


if __name__ == "__main__":
    for scenario in SCENARIOS:
        (FOLDER / f"{scenario.name}.json").write_text(text(play(scenario).vector))
