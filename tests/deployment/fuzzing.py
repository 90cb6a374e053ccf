"""Seeded mutations of valid messages of every kind, and what may come of them: an answer, or a refusal that says so.

`decoders` are functions of bytes; `machines` are parties with state, which get valid, stale and mutated messages in any
order. For as many seconds as one likes: `make fuzz SECONDS=3600`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from consortium_run import SILOS, Job, met
from deployment_world import NOW, World
from safetensors.torch import save

from secure_fvi import alignment, building, wire
from secure_fvi.aggregation import homomorphic_schemes, messages
from secure_fvi.aggregation.base import Block, BlockTable, carry
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.parties import local_parties, server_half
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.building import build_problem, strong_enough
from secure_fvi.deployment import countersigning, job, session_messages
from secure_fvi.deployment.holding import DurableSilo
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.session_messages import session_of, session_roster
from secure_fvi.deployment.site import Site
from secure_fvi.deployment.site_job import Local, SiteJob
from secure_fvi.disclosure import disclose
from secure_fvi.engines import letters, stream_messages
from secure_fvi.errors import AggregationError, InputError, PolicyError, ProtocolError, SessionLost
from secure_fvi.federated_model import Schema
from secure_fvi.messages import decode_broadcast, encode_broadcast
from secure_fvi.privacy import witness
from secure_fvi.privacy.chain import Row
from secure_fvi.runs.config import chosen
from secure_fvi.runs.records import model_of
from secure_fvi.server import Server
from secure_fvi.silo import Silo
from secure_fvi.states import pack_state, unpack_state

#: What a party may raise: anything else is a fault.
REFUSALS = (ProtocolError, AggregationError, InputError, PolicyError, SessionLost)
#: No message of some kilobytes may take longer (seconds); a busy machine takes some of it.
LONGEST = 5.0

_PIECES = [
    b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\x00\x00\x00\x10",
    b"\xdb\x7f\xff\xff\xff", b"\x90", b"\x80", b"\xc0", b"\xc1", b"\xc2", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7),
    b"\xcb\x7f\xf8" + bytes(6), b"\xcb\x7f\xf0" + bytes(6), b"\xc7\x00\x05", b"\xd6\xff" + bytes(4),
    b"\xd7\xff" + b"\xff" * 8, b"\x91" * 600, b"\x81\x00" * 300, b"\xa3\xff\xfe\xfd", b"\xcc\x01", b"\xe0",
    b"\xc4\x20" + bytes(32), b"\xc4\x00", b"\x00", b"\xff" * 9, b"[[", b"9" * 30, b"1e999", b"a.b.", b"\"\"\"", b"0x9",
]  # fmt: skip


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to eight changes: bits, bytes, pieces of MessagePack put in or over, parts lost or repeated."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, piece = rng.randrange(len(out) + 1), rng.choice(_PIECES)
        match rng.randrange(8):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                out[at:at] = piece
            case 3:
                out[at : at + len(piece)] = piece
            case 4:
                del out[at : at + rng.randrange(1, 40)]
            case 5:
                del out[at:]
            case 6:
                out[at:at] = out[: rng.randrange(1, 60)]
            case _:
                out[at:at] = piece * rng.choice((2, 50, 3000))
    return bytes(out)


class Outcome(NamedTuple):
    """What came of a number of messages. faults: what was raised that is no refusal, with an example each."""

    counts: Counter[str]
    faults: dict[str, str]

    def note(self, kind: str) -> None:
        self.counts[kind] += 1

    def fault(self, what: str, example: bytes) -> None:
        self.counts["FAULT"] += 1
        self.faults.setdefault(what, example[:80].hex())


def tried(act: Callable[[], Any], outcome: Outcome, example: bytes, where: str) -> bool:
    """Whether `act` went through; a refusal is counted, all else is a fault."""
    began = time.process_time()  # of this process: others share the machine
    try:
        act()
    except REFUSALS:
        outcome.note("refused")
        return False
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        outcome.fault(f"{where}: {type(error).__name__} at {Path(last.filename).name}:{last.lineno}", example)
        return False
    finally:
        if time.process_time() - began > LONGEST:
            outcome.fault(f"{where}: took {time.process_time() - began:.1f} s", example)
    outcome.note("taken")
    return True


# ---- decoders ----


#: Whole sums, and such as recover from losses, whose messages are more: with and without the consistency check.
SUMS: list[dict[str, Any]] = [{}, {"max_missing": 1}, {"max_missing": 1, "consistency_check": False}]


def sum_messages() -> list[bytes]:
    """Everything that is said in masked sums of each kind, contributions included; nonces are for large rosters."""
    seen = [messages.pack(messages.Nonces(0, [bytes(32)] * 4))]
    ids = [f"s{i}" for i in range(4)]
    for options in SUMS:
        server, silos = local_parties(Masked(batch=2, **options), ids)

        def exchange(asked: Mapping[str, bytes], silos: Any = silos) -> dict[str, bytes]:
            replies = {silo: silos[silo].handle(message) for silo, message in asked.items()}
            seen.extend([*asked.values(), *replies.values()])
            return replies

        carry(server.prepare(0), exchange)
        sent = {s: silos[s].contribute(0, ids, TABLE, np.zeros(3), bytes(32)) for s in ids}
        seen.extend(sent.values())
        carry(server.total(0, ids, TABLE, sent, bytes(32)), exchange)
    return list(dict.fromkeys(seen))


TABLE = BlockTable((Block("g", (3,), 1.0),))
CONFIG = b"""seed = 3
[model]
program = "six-cities"
[partition]
ids = ["a", "b", "c"]
sizes = [200, 180, 157]
[algorithm]
name = "sfvi"
iterations = 9
"""
_STATE = (torch.zeros(3), {"a": np.zeros(2)}, 3)


def decoders() -> dict[str, tuple[Callable[[bytes], Any], list[bytes]]]:
    """By name, what reads bytes of others, or its own files, and valid examples of each kind."""
    h, sm, st, cs, fl = homomorphic_schemes, session_messages, stream_messages, countersigning, letters
    d32, d64 = bytes(32), bytes(64)
    request = h.DecryptRequest(1, d32, d32, b"\x07", b"\x07", d32, d32, d32, b"\x07", [d64] * 3, b"t", [b"x" * 40])
    key, parts = h.HolderKey(b"k" * 50, d64), h.Ciphertexts([b"a", b"b"])
    held = (h.HolderKeyRequest(), key, parts, request, h.Decrypted(1, d32, d64), messages.Done())
    kept = {"z_global": torch.zeros(3, dtype=torch.float64), "shift": torch.zeros(2, 2, dtype=torch.float32)}
    broadcast = Broadcast(3, 4, {"a": 2, "b": 2}, ("a", "b"), {"scale": 0.1, "stage": 0.0}, kept, "round")
    fields = (("y", (3,), torch.float64), ("x", (), torch.int64))
    schema = sm.pack_schema(Schema(fields, {"k": 3, "t": torch.zeros(2), "s": "text"}))
    joined, opened = sm.Joined(schema, d32, b"", 0), sm.Open(["a", "b"], [d32] * 2, d32, 0, b"", 3)
    config = "[model]\nprogram='six-cities'\nx=[1,{y=2}]\n"
    offered = job._CODEC.pack(job._Offer("job", "hub", d32, d32, "data", ["a", "b"], 1, 2, config, d32, [3]))
    row = Row(1, d32, 0, "job", msgpack.packb({"job": "j", "silos": ["a", "b"], "epsilon": 0.5}), b"", b"")
    letter = fl.CODEC.pack(fl.Letter("hub", "a", "job", d32, 0, d32, d32))
    seen = (
        cs.Seen([b"a"], [b"b"]),
        cs.Stated(b"a", b"b", [b"c"]),
        cs.Countersigned(b"a", b"b", b"c"),
        cs.Receipt(b"a"),
    )
    receipt = witness.Countersignature("w", d32, "a", d32, 3, d32, 0, d64, d64)
    ended = (sm.Opened(d32), sm.Ended(), sm.End("finished", 2, b"abc"))
    response = (sm.Known(b"abc"), sm.Learned(d32), sm.Wanted("a", d32, d64), sm.Told(b"abc", d64))
    return {
        "masked": (messages.unpack_any, sum_messages()),
        "homomorphic": (h.unpack_any, [h.pack(m) for m in held]),
        "broadcast": (decode_broadcast, [encode_broadcast(broadcast)]),
        "schema": (sm.unpack_schema, [schema]),
        "session": (sm.CODEC.unpack_any, [sm.CODEC.pack(m) for m in (joined, opened, *ended, *response)]),
        "greeting": (
            st.GREETINGS.unpack_any,
            [st.GREETINGS.pack(st.Hello(d32)), st.GREETINGS.pack(st.Welcome(d32, "job"))],
        ),
        "stream": (lambda data: st.Assembler().add(data), list(st.parts(1, bytes(30)))),
        "countersigning": (cs._CODEC.unpack_any, [cs._CODEC.pack(m) for m in seen]),
        "witness": (
            witness._CODEC.unpack_any,
            [witness._CODEC.pack(m) for m in (witness.Statement("a", d32, 3, d32, 0, d64, 1, [d32] * 2), receipt)],
        ),
        "offer": (job._CODEC.unpack_any, [job._CODEC.pack(job._Signed(offered, d64)), offered]),
        "configuration": (lambda data: job._parse(data.decode("utf-8", "replace")), [CONFIG]),
        "letter": (fl.CODEC.unpack_any, [letter, fl.CODEC.pack(fl.Envelope(letter, b"body", d64))]),
        "posterior": (lambda data: wire.tensors(data, "a posterior"), [save({"eta/loc": torch.zeros(3)})]),
        "matching": (alignment._CODEC.unpack_any, matching_world(random.Random(1), 99)[1]),
        "row": (lambda data: row._replace(body=data).fields(), [row.body]),
        "own state": (lambda data: unpack_state(data, _STATE, Path("x")), [pack_state(_STATE)]),
    }


def fuzz_decoders(seconds: float, seed: int) -> Outcome:
    """Mutations of all of them, for so long."""
    rng, outcome = random.Random(seed), Outcome(Counter(), {})
    found = list(decoders().items())
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        name, (read, pool) = rng.choice(found)
        data = mutated(rng.choice(pool), rng)
        tried(functools.partial(read, data), outcome, data, name)
    return outcome


# ---- machines ----


def store_of(party: Any) -> dict[str, bytes]:
    """A copy of all that a party in this process has written down."""
    return dict(party._store._slots)


class Machine(NamedTuple):
    """A party: what it takes (in one of several ways), and a picture of its state."""

    name: str
    take: Callable[[bytes], Any]
    picture: Callable[[], Any]


def fuzz_machine(machine: Machine, bag: list[bytes], steps: int, rng: random.Random, outcome: Outcome) -> None:
    """Valid, stale, strange and mutated messages in any order; a refusal leaves the state as it was."""
    for _ in range(steps):
        data = rng.choice(bag)
        if rng.random() < 0.7:
            data = mutated(data, rng)
        elif rng.random() < 0.1:
            data = os.urandom(rng.randrange(40)) if rng.random() < 0.5 else b""
        before = machine.picture()
        if (
            not tried(functools.partial(machine.take, data), outcome, data, machine.name)
            and machine.picture() != before
        ):
            outcome.fault(f"{machine.name}: a refusal changed its state", data)


def masked_world(rng: random.Random) -> tuple[list[Machine], list[bytes]]:
    """Four silos at a random point of a masked sum, and what was said on the way there."""
    ids, bag = [f"s{i}" for i in range(4)], []
    server, silos = local_parties(Masked(batch=2, **rng.choice(SUMS)), ids)
    stop = rng.randrange(8)

    class Stop(Exception):
        pass

    def exchange(asked: Mapping[str, bytes]) -> dict[str, bytes]:
        nonlocal stop
        stop -= 1
        if not stop:
            bag.extend(asked.values())
            raise Stop
        replies = {s: silos[s].handle(m) for s, m in asked.items()}
        bag.extend([*asked.values(), *replies.values()])
        return replies

    try:
        carry(server.prepare(0), exchange)
        sent = {s: silos[s].contribute(0, ids, TABLE, np.zeros(3), bytes(32)) for s in ids}
        bag.extend(sent.values())
        carry(server.total(0, ids, TABLE, sent, bytes(32)), exchange)
    except Stop:
        pass
    return [Machine("masked silo", silo.handle, lambda silo=silo: store_of(silo)) for silo in silos.values()], bag


def matching_world(rng: random.Random, stop: int = 0) -> tuple[list[Machine], list[bytes]]:
    """Three silos at a random point of a private matching, or after `stop` exchanges, and what was said on the way."""
    keys, bag = {s: Identity() for s in "abc"}, list[bytes]()
    roster = Roster(rng.randbytes(32), tuple((s, key.public_key) for s, key in keys.items()))
    ids = alignment.prepare(["1", "2", None])
    silos = {s: alignment.MatchingSilo(roster, s, key, ids, workers=1) for s, key in keys.items()}
    matching, replies = alignment.Matcher(roster).match(), None
    for _ in range(stop or rng.randrange(1, 9)):
        try:
            asked = matching.send(replies)  # type: ignore[arg-type]
        except StopIteration:
            break
        bag.extend(asked.values())
        replies = {s: silos[s].handle(m) for s, m in asked.items()}
        bag.extend(replies.values())
    return [Machine("matching silo", s.handle, lambda silo=s: store_of(silo)) for s in silos.values()], bag


def server_run(rng: random.Random, corpus: list[bytes], outcome: Outcome) -> None:
    """A masked server one of whose silos answers with mutations, or not: three sums of two batches, each of which ends
    with its survivors' own sum or is refused."""
    ids = [f"s{i}" for i in range(4)]
    server, silos = local_parties(Masked(batch=2, **rng.choice(SUMS)), ids)
    liar, rate = rng.choice(ids), rng.choice((0.1, 0.2, 0.6, 1.0))

    def exchange(asked: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = {}
        for silo, message in asked.items():
            with contextlib.suppress(ProtocolError):
                replies[silo] = silos[silo].handle(message)
        if liar in replies and rng.random() < rate:
            replies[liar] = mutated(rng.choice([replies[liar], rng.choice(corpus)]), rng)
        if rng.random() < 0.1:
            replies.pop(liar, None)
        return replies

    def run(index: int) -> None:
        carry(server.prepare(index), exchange)
        sent, values = {}, {s: np.array([rng.uniform(-1, 1) for _ in range(3)]) for s in ids}
        for s in ids:
            with contextlib.suppress(ProtocolError):
                sent[s] = silos[s].contribute(index, ids, TABLE, values[s], bytes(32))
        if liar in sent and rng.random() < rate / 2:
            sent[liar] = mutated(sent[liar], rng)
        total = carry(server.total(index, ids, TABLE, sent, bytes(32)), exchange)
        if np.abs(total.values - sum(values[s] for s in total.survivors)).max() > 1e-12:
            outcome.fault("masked server: a wrong total", b"")

    for index in range(3):
        tried(functools.partial(run, index), outcome, b"", "masked server")


def holder_world() -> tuple[list[Machine], list[bytes]]:
    """A key holder and a silo of homomorphic sums after one of them, and what was said."""
    ids, bag = [f"s{i}" for i in range(3)], []
    stores: dict[str, MemoryStore] = {}
    server, silos, holder = Homomorphic(batch=2).parties(ids, lambda party: stores.setdefault(party, MemoryStore()))
    from secure_fvi.aggregation.homomorphic import WithHolder

    def ask(message: bytes) -> bytes:
        reply = holder.handle(message)
        bag.extend([message, reply])
        return reply

    def exchange(asked: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = {s: silos[s].handle(m) for s, m in asked.items()}
        bag.extend([*asked.values(), *replies.values()])
        return replies

    local = WithHolder(server, ask)
    carry(local.prepare(0), exchange)
    sent = {s: silos[s].contribute(0, ids, TABLE, np.zeros(3), bytes(32)) for s in ids}
    bag.extend(sent.values())
    carry(local.total(0, ids, TABLE, sent, bytes(32)), exchange)
    machines = [Machine("key holder", holder.handle, lambda: store_of(holder))]
    machines += [Machine("homomorphic silo", s.handle, lambda s=s: store_of(s)) for s in silos.values()]
    return machines, bag


def fuzz_machines(seconds: float, seed: int) -> Outcome:
    """Silos, servers and key holders of the secure sums, and silos of a matching."""
    rng, outcome = random.Random(seed), Outcome(Counter(), {})
    corpus, held = sum_messages(), holder_world()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        machines, bag = masked_world(rng)
        for machine in machines:
            fuzz_machine(machine, [*bag, rng.choice(corpus)], 25, rng, outcome)
        machines, bag = matching_world(rng)
        for machine in machines:
            fuzz_machine(machine, bag, 10, rng, outcome)
        server_run(rng, corpus, outcome)
        for machine in held[0]:
            fuzz_machine(machine, held[1], 4, rng, outcome)
    return outcome


class Opened(NamedTuple):
    """A job that its sites have let in, in a session, and its server. bag: all that was said."""

    job: str
    sites: dict[str, Site]
    server: Server
    bag: list[bytes]

    def say(self, site: str, message: bytes) -> bytes:
        reply = self.sites[site].handle(self.job, message)
        self.bag.extend([message, reply])
        return reply

    def exchange(self, asked: Mapping[str, bytes]) -> dict[str, bytes]:
        return {site: self.say(site, message) for site, message in asked.items()}

    def silo(self, site: str) -> Silo:
        opened = self.sites[site]._open_job(self.job)
        assert isinstance(opened, SiteJob)
        assert isinstance(opened.party, DurableSilo)
        return opened.party.silo


def opened_job(made: Job, data: Path | None) -> Opened:
    """Joined and opened by the sites themselves; no round was asked yet. data: a folder of data sets."""
    homes, hub = made.world.homes, made.world.homes["hub"]
    offer = job.make_offer(made.config, hub.roster(NOW), "hub", manifest(made.config).hash, NOW)
    sites = {s: Site(homes[s], Local(data_dir=data)) for s in made.sites if homes[s].role == "silo"}
    for site in sites.values():
        met(hub, site)
    return _opened(Opened(offer.job, sites, None, []), made, job.sign_offer(offer, hub.identity()))  # type: ignore[arg-type]


def reopened(found: Opened, made: Job) -> Opened:
    """In another session, by a server that begins the job again."""
    return _opened(found, made, next(m for m in found.bag if m[:1] == session_messages.JOIN)[1:])


def _opened(found: Opened, made: Job, signed: bytes) -> Opened:
    codec, silos, roster = session_messages.CODEC, list(found.sites), made.world.homes["hub"].roster(NOW)
    algorithm, aggregation, privacy = chosen(made.config)
    answers = found.exchange(dict.fromkeys(silos, session_messages.JOIN + signed))
    joined = {s: codec.unpack(answers[s], session_messages.Joined) for s in silos}
    schema = session_messages.unpack_schema(joined[silos[0]].schema)
    nonces = [joined[s].nonce for s in silos]
    opened = session_messages.Open(silos, nonces, session_messages.schema_digest(schema), 0)
    found.exchange(dict.fromkeys(silos, session_messages.OPEN + codec.pack(opened)))
    problem = build_problem(
        model_of(made.config)[0], schema, algorithm, silos, 3, privacy, building.Machine(compile=False)
    )
    program = algorithm.server(problem)
    aggregation = strong_enough(aggregation, disclose(algorithm, aggregation, privacy, len(silos)))
    offer = job.read_offer(signed, roster, silos[0], NOW)
    session = session_of(roster, offer.hash, opened, aggregation)
    named = session_roster(roster, session, silos, aggregation, b"")
    sums = server_half(aggregation, silos, named, MemoryStore(), lambda message: b"")
    return found._replace(server=Server(problem, program, sums))


def site_world(world: World, folder: Path, data: Path | None, missing: int = 0) -> tuple[list[Machine], list[bytes]]:
    """Three sites and the silos in them after the first broadcast of a job, and what was said to them."""
    limits = {"max_missing": missing, "max_differences": missing}
    sums = {"kind": "masked", **limits}
    made = Job(world, folder, False, algorithm={"name": "sfvi", "iterations": 5}, aggregation=sums)
    for site in made.sites:
        made.allow(site, **limits)
    found = opened_job(made, data)
    sites, bag = found.sites, found.bag
    carry(found.server.round(), found.exchange)
    ended = session_messages.End("finished", 2, save({"eta/x": torch.zeros(2)}))
    bag.append(session_messages.END + session_messages.CODEC.pack(ended))

    def picture(name: str) -> Any:
        home = world.homes[name]
        opened = sites[name]._open_job(found.job)  # let go of in memory, it is found in the folder
        assert isinstance(opened, SiteJob)
        if opened.party is None:
            opened.restore()
        party = opened.party
        assert party is not None
        silo, waiting = party.silo, party.silo.pending
        files = [
            p for p in sorted(home.state_folder.rglob("*")) if p.is_file() and p.suffix == "" and p.name != "fresh"
        ]
        past = getattr(silo, "past", getattr(party, "_used", None))
        kept = pack_state(silo.local), None if waiting is None else waiting.sum_index, past
        return [(p.name, p.read_bytes()) for p in files], kept

    return [
        Machine("site", functools.partial(sites[s].handle, found.job), functools.partial(picture, s)) for s in SILOS
    ], bag


def fuzz_sites(world: World, folder: Path, data: Path | None, seconds: float, seed: int) -> Outcome:
    """Sites with their silos, as the server's stream reaches them; seeds that are odd: of sums that recover."""
    rng, outcome = random.Random(seed), Outcome(Counter(), {})
    machines, bag = site_world(world, folder, data, seed % 2)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        fuzz_machine(rng.choice(machines), bag, 10, rng, outcome)
    return outcome
