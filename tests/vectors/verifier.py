"""Checks the test vectors with none of our code: what docs/protocol.md says, written down a second time.

An outsider's reading. It has every silo's private key and nonce, and works out from these what each message has to
hold, but for what is random (one-time secrets, shares, nonces of envelopes): of that it checks that it fits. Totals are
opened from what the server has seen alone. Only `cryptography`, MessagePack, hashlib and whole numbers are used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KINDS = (
    "KeysRequest", "KeyAdvert", "KeySet", "NonceReveal", "Nonces", "DepositRequest", "Deposit", "Deliver",
    "BatchSignature", "Activate", "Contribution", "SignRequest", "SetSignature", "RevealRequest", "Shares", "Done",
)  # fmt: skip
NAME = b"secure-fvi/masked-sum/1"


class Wrong(Exception):
    """What does not fit, in words."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


# ---- Hashes, keys, the field of the shares ----


def digest(label: bytes, *fields: bytes) -> bytes:
    sized = b"".join(len(f).to_bytes(8, "big") + f for f in fields)
    return sha256(NAME + b"/" + len(label).to_bytes(2, "big") + label + sized).digest()


def derive(secret: bytes, label: bytes, *fields: bytes) -> bytes:
    info = len(label).to_bytes(2, "big") + label + b"".join(len(f).to_bytes(4, "big") + f for f in fields)
    return HKDF(hashes.SHA256(), 32, sha256(NAME).digest(), info).derive(secret)


def keystream(key: bytes, length: int) -> bytes:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(length))


def n8(value: int) -> bytes:
    return value.to_bytes(8, "big")


def _doubled(a: int) -> int:
    """Times x in GF(2)[x] modulo x^8 + x^4 + x^3 + x^2 + 1, of which x generates all but zero."""
    return (a << 1) ^ (0x11D if a & 0x80 else 0)


POWERS = [1]
for _ in range(254):
    POWERS.append(_doubled(POWERS[-1]))
LOGARITHMS = {value: at for at, value in enumerate(POWERS)}


def times(a: int, b: int) -> int:
    return POWERS[(LOGARITHMS[a] + LOGARITHMS[b]) % 255] if a and b else 0


def interpolated(x: int, points: Mapping[int, bytes]) -> bytes:
    """Lagrange: at x, the polynomials of least degree through `points`, one for each byte."""
    total = bytes(len(next(iter(points.values()))))
    for at, row in points.items():
        weight = 1
        for other in points.keys() - {at}:
            weight = times(times(weight, x ^ other), POWERS[-LOGARITHMS[at ^ other] % 255])
        total = bytes(t ^ times(weight, byte) for t, byte in zip(total, row, strict=True))
    return total


# ---- The graph ----


def tail(population: int, marked: int, draws: int, least: int) -> Fraction:
    """P[at least so many marked among draws without replacement]."""
    ways = (math.comb(marked, k) * math.comb(population - marked, draws - k) for k in range(max(least, 0), draws + 1))
    return Fraction(sum(ways), math.comb(population, draws))


def complete_threshold(silos: int) -> int:
    return max(silos // 2 + 1, min(2 * silos // 3 + 1, silos - 1))


def graph(n: int, corrupt: float, lost: float, orders: int) -> tuple[int, int]:
    """Neighbours of each silo, n - 1 where the graph is complete, and survivors that each window of k/2 must keep."""
    bad, gone = math.floor(corrupt * n), math.floor(lost * n)
    for k in range(2, min(n - 1, 256), 2) if n > 32 else ():
        t, width = 2 * k // 3 + 1, k // 2
        tails = ((m, n * orders * tail(n, bad, width, m)) for m in range(1, width + 1))
        least = next((m for m, chance in tails if chance <= Fraction(1, 2**40)), width + 1)
        if (
            tail(n - 1, bad, k, 2 * t - k) <= Fraction(1, 2**40)
            and n * (Fraction(corrupt) + Fraction(lost)) ** width <= Fraction(1, 2**40)
            and n * tail(n - 1, gone, k, k - t + 1) <= Fraction(1, 2**30)
            and least <= width
            and n * tail(n, gone, width, width - least + 1) <= Fraction(1, 2**30)
        ):
            return k, least
    return n - 1, 0


# ---- The verifier ----


class Verifier:
    """Takes messages in their order; whatever does not fit raises `Wrong`."""

    def __init__(self, vector: Mapping[str, Any]) -> None:
        roster = self.roster = vector["roster"]
        self.ids = [silo for silo, _ in roster["members"]]
        self.public = [bytes.fromhex(key) for _, key in roster["members"]]
        self.session = bytes.fromhex(roster["session"])
        settings = [
            roster[s] for s in ("min_cohort", "max_missing", "bits", "consistency_check", "batch", "corrupt", "lost")
        ]
        members = [list(row) for row in zip(self.ids, self.public, strict=True)]
        packed = msgpack.packb([self.session, members, settings, bytes.fromhex(roster["key_holder"])])
        self.roster_hash = digest(b"roster", packed)
        need(roster["consistency_check"] and self.ids == sorted(self.ids), "a roster in order, with the check")
        self.n, self.per_batch, self.bits = len(self.ids), roster["batch"], roster["bits"]
        self.needed = 2 * self.n // 3 + 1
        self.whole = roster["max_missing"] == 0 and not roster["key_holder"]
        self.k, self.least = graph(self.n, roster["corrupt"], roster["lost"], 8 * self.n if self.whole else 1)
        self.blocks = vector["blocks"]
        self.table = sha256(b"secure-fvi/block-table/2" + msgpack.packb(self.blocks)).digest()
        private = [vector["private"][silo] for silo in self.ids]
        for key, its in zip(self.public, private, strict=True):
            made = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(its["identity"])).public_key()
            need(made.public_bytes_raw() == key, "an identity key")
        self.private = [X25519PrivateKey.from_private_bytes(bytes.fromhex(its["x25519"])) for its in private]
        self.ephemeral = [key.public_key().public_bytes_raw() for key in self.private]
        self.nonces = [bytes.fromhex(its["nonce"]) for its in private]
        self.sums = {one["index"]: one for one in vector["sums"]}
        for index, one in self.sums.items():
            if "broadcast" in one:
                self.on_broadcast(index, one)
        self.deposits: dict[int, dict[int, Any]] = {}
        self.dealt: dict[tuple[int, int, int], bytes] = {}  # batch, owner, holder
        self.batch_digests: dict[int, bytes] = {}
        self.contributions: dict[int, dict[int, Any]] = {index: {} for index in self.sums}
        self.shown: dict[int, dict[int, Any]] = {index: {} for index in self.sums}
        self.everybody = self.bitmap(range(self.n))

    def bitmap(self, places: Iterable[int]) -> bytes:
        return sum(1 << place for place in places).to_bytes((self.n + 7) // 8, "little")

    def signed(self, place: int, signature: bytes, statement: bytes) -> None:
        Ed25519PublicKey.from_public_bytes(self.public[place]).verify(signature, statement)

    def take(self, sender: str, receivers: Sequence[str], kind: str, message: bytes) -> None:
        """One message. Its sender is a silo's id, or "server"."""
        version, tag, *fields = msgpack.unpackb(message)
        need(version == 10 and type(tag) is int and 1 <= tag <= 16 and KINDS[tag - 1] == kind, "version and tag")
        need(message == msgpack.packb([version, tag, *fields]), "the shortest form of MessagePack")
        need(not self.whole or tag in (1, 2, 3, 4, 5, 11, 16), "a message of whole sums")
        who = [self.ids.index(r) for r in receivers] if sender == "server" else self.ids.index(sender)
        try:
            getattr(self, f"on_{kind}")(who, *fields)
        except (InvalidSignature, InvalidTag):
            raise Wrong(f"{kind} of {sender}: a signature or a seal") from None
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise Wrong(f"{kind} of {sender}: {type(error).__name__}") from None

    # Set-up

    def on_KeysRequest(self, to: list[int], attempt: int) -> None:
        need(attempt == 0, "the first set-up")

    def committed(self, place: int) -> bytes:
        return digest(b"nonce-commitment", self.roster_hash, n8(0), n8(place), self.nonces[place])

    def on_KeyAdvert(self, place: int, attempt: int, key: bytes, commitment: bytes, signature: bytes) -> None:
        need((attempt, key, commitment) == (0, self.ephemeral[place], self.committed(place)), "an advert")
        fields = (self.session, self.roster_hash, n8(0), n8(place), key, commitment)
        self.signed(place, signature, digest(b"key-advert", *fields))

    def on_KeySet(
        self, to: list[int], attempt: int, members: bytes, keys: Any, commitments: Any, signatures: Any
    ) -> None:
        need(members == self.everybody and len(keys) == len(commitments) == len(signatures) == self.n, "members")
        for place, row in enumerate(zip(keys, commitments, signatures, strict=True)):
            self.on_KeyAdvert(place, attempt, *row)
        self.key_set = digest(b"key-set", self.roster_hash, n8(0), members, *keys, *commitments)
        self.binding = self.session + self.roster_hash + self.key_set
        self.fix(list(range(self.n)))

    def on_NonceReveal(self, place: int, attempt: int, key_set: bytes, nonce: bytes) -> None:
        need((attempt, key_set, nonce) == (0, self.key_set, self.nonces[place]), "a nonce")

    def on_Nonces(self, to: list[int], attempt: int, nonces: list[bytes]) -> None:
        need((attempt, nonces) == (0, self.nonces), "all nonces")
        seed = digest(b"graph-order", self.key_set, *nonces)
        self.fix(sorted(range(self.n), key=lambda place: digest(b"graph-order", seed, n8(place))))

    def on_Done(self, place: int) -> None:
        pass

    def fix(self, order: list[int]) -> None:
        """The graph."""
        self.order, n, half, everyone = order, self.n, self.k // 2, range(self.n)
        self.threshold = complete_threshold(n) if self.k == n - 1 else 2 * self.k // 3 + 1
        at = {place: i for i, place in enumerate(order)}
        if self.k == n - 1:
            self.near = {p: [q for q in everyone if q != p] for p in everyone}
            self.holders = {p: list(everyone) for p in everyone}
        else:
            steps = [s for s in range(-half, half + 1) if s]
            self.near = self.holders = {p: sorted(order[(at[p] + s) % n] for s in steps) for p in everyone}

    # Batches

    def pair(self, one: int, other: int) -> bytes:
        """What X25519 gives two silos."""
        return self.private[one].exchange(X25519PublicKey.from_public_bytes(self.ephemeral[other]))

    def seeds(self, batch: int, one: int, other: int) -> bytes:
        names = n8(min(one, other)), n8(max(one, other))
        return keystream(
            derive(self.pair(one, other), b"pair-seeds", self.binding, n8(batch), *names), 32 * self.per_batch
        )

    def row(self, label: bytes, batch: int, one: int, other: int, values: bytes) -> bytes:
        name = digest(label, self.binding, n8(batch), n8(one), n8(other))
        parts = [values[at : at + 32] for at in range(0, len(values), 32)]
        return b"".join(sha256(name + at.to_bytes(4, "big") + part).digest()[:16] for at, part in enumerate(parts))

    def commitment(self, owner: int, index: int, kind: bytes, secret: bytes) -> bytes:
        return digest(b"secret-commitment", self.binding, n8(owner), n8(index), kind, secret)

    def unsealed(self, owner: int, index: int, e: bytes, sealed: bytes) -> dict[int, bytes]:
        """The seeds of one index that `owner` sealed under e, by neighbour."""
        near, at = self.near[owner], index % self.per_batch
        length = 32 * len(near) + 16
        key = derive(e, b"sealed-seeds", self.binding, n8(owner), n8(index))
        plain = AESGCM(key).decrypt(bytes(12), sealed[at * length : (at + 1) * length], b"")
        return {v: plain[32 * i : 32 * i + 32] for i, v in enumerate(near)}

    def on_DepositRequest(self, to: list[int], batch: int) -> None:
        need(batch == len(self.deposits), "the next batch")
        self.deposits[batch] = {}

    def on_Deposit(self, owner: int, *deposit: Any) -> None:
        batch, commitments, sealed, seed_rows, share_rows, envelopes, signature = deposit
        near, holders, count, first = self.near[owner], self.holders[owner], self.per_batch, batch * self.per_batch
        need(len(envelopes) == len(near) and len(sealed) == count * (32 * len(near) + 16), "the form of a deposit")
        seeds = {v: self.seeds(batch, owner, v) for v in near}
        need(
            seed_rows == [self.row(b"seed-commitment", batch, min(owner, v), max(owner, v), seeds[v]) for v in near],
            "commitments to seeds",
        )
        shares = {}
        for v, envelope in zip(near, envelopes, strict=True):
            fields = self.binding, n8(first), n8(count), n8(owner), n8(v)
            cipher = AESGCM(derive(self.pair(owner, v), b"envelope", *fields))
            shares[holders.index(v) + 1] = cipher.decrypt(envelope[:12], envelope[12:], b"".join(fields))
        points = dict(list(shares.items())[: self.threshold])
        rows = {x: shares.get(x) or interpolated(x, points) for x in range(1, len(holders) + 1)}
        need(all(row == interpolated(x, points) for x, row in rows.items()), "shares of one polynomial")
        named = enumerate(holders, 1)
        need(share_rows == [self.row(b"share-commitment", batch, owner, h, rows[x]) for x, h in named], "shares")
        secrets = interpolated(0, points)
        need(len(commitments) == len(secrets) == 64 * count, "b and e of each index")
        for at in range(count):
            b, e = secrets[64 * at : 64 * at + 32], secrets[64 * at + 32 : 64 * at + 64]
            made = self.commitment(owner, first + at, b"b", b) + self.commitment(owner, first + at, b"e", e)
            need(made == commitments[64 * at : 64 * at + 64], "commitments to b and e")
            opened = {v: seeds[v][32 * at : 32 * at + 32] for v in near}
            need(self.unsealed(owner, first + at, e, sealed) == opened, "sealed seeds")
        self.signed(owner, signature, digest(b"deposit-signature", self.deposit_digest(owner, deposit), *envelopes))
        self.deposits[batch][owner] = deposit
        self.dealt |= {(batch, owner, h): rows[x] for x, h in enumerate(holders, 1)}

    def deposit_digest(self, owner: int, deposit: Sequence[Any]) -> bytes:
        batch, commitments, sealed, seed_rows, share_rows = deposit[:5]
        rows = digest(b"deposit-rows", n8(len(seed_rows)), *seed_rows, *share_rows)
        return digest(b"deposit", self.binding, n8(batch), n8(owner), commitments, sealed, rows)

    def on_Deliver(
        self, to: list[int], batch: int, depositors: bytes, digests: Any, envelopes: Any, named: Any
    ) -> None:
        deposits = self.deposits[batch]
        need(depositors == self.bitmap(deposits) and to[1:] == [], "depositors; one receiver")
        need(digests == [self.deposit_digest(p, deposits[p]) for p in sorted(deposits)], "digests of deposits")
        from_ = [v for v in self.near[to[0]] if v in deposits]
        need(envelopes == [deposits[v][5][self.near[v].index(to[0])] for v in from_], "envelopes")
        rows = [deposits[v][4][self.holders[v].index(to[0])] for v in from_]
        need(named == [sha256(row).digest() for row in rows], "digests of commitments to shares")
        self.batch_digests[batch] = digest(b"batch", self.binding, n8(batch), depositors, *digests)

    def batch_statement(self, batch: int) -> bytes:
        return digest(b"batch-signature", self.binding, self.batch_digests[batch])

    def on_BatchSignature(self, place: int, batch: int, unheld: bytes, signature: bytes, complaint: bytes) -> None:
        need(unheld == self.bitmap(()), "nothing that was dealt wrong")
        self.signed(place, signature, self.batch_statement(batch))
        self.signed(place, complaint, digest(b"unheld", self.binding, self.batch_digests[batch], unheld))

    def on_Activate(self, to: list[int], batch: int, signers: bytes, signatures: list[bytes]) -> None:
        self.enough(signers, signatures, self.batch_statement(batch))

    def enough(self, signers: bytes, signatures: list[bytes], statement: bytes) -> None:
        places = [p for p in range(self.n) if int.from_bytes(signers, "little") >> p & 1]
        need(self.bitmap(places) == signers and len(places) == len(signatures) >= self.needed, "T signers")
        for place, signature in zip(places, signatures, strict=True):
            self.signed(place, signature, statement)

    # Sums

    def on_broadcast(self, index: int, one: Mapping[str, Any]) -> None:
        """What silos read a context and a question from. The vectors' job asks all silos in every round."""
        raw, cohort = bytes.fromhex(one["broadcast"]), one["cohort"]
        version, round_, at, used, digest_, named, scalars, tensors, phase, answered = msgpack.unpackb(raw)
        need((version, at) == (5, index) and sha256(raw).hexdigest() == one["context"], "a broadcast of this sum")
        packed = msgpack.packb(cohort)
        need(digest_ == sha256(b"secure-fvi/cohort/1" + packed).digest(), "the digest of the cohort")
        need(named == ([] if cohort == self.ids else cohort), "a cohort that is named if it is not all")
        before = {
            s: max((i for i, o in self.sums.items() if i < index and s in o["cohort"]), default=0) for s in cohort
        }
        last = [before[s] for s in cohort]
        need(used == (last[:1] if len(set(last)) == 1 else last), "the last sums used")
        need(answered == [[i, i - 1, "round", 0] for i in sorted(set(last) - {0})], "what these answered")
        shapes = [[name, kind, shape] for name, (kind, shape, _) in sorted(tensors.items())]
        asks = msgpack.packb([round_, phase, cohort, sorted(scalars.items()), shapes])
        values = b"".join(data for _, (_, _, data) in sorted(tensors.items()))
        need(sha256(b"secure-fvi/question/1" + asks + values).hexdigest() == one["question"], "a question")

    def past(self, index: int, one: int, other: int) -> bytes:
        """What two silos were asked together before a sum, all of which was used."""
        past = b""
        for at, before in self.sums.items():
            if at < index and {self.ids[one], self.ids[other]} <= set(before["cohort"]):
                context, question, _ = self.asked(at)
                view = sha256(self.binding + context).digest()
                past = sha256(b"secure-fvi/shared-past/2" + past + n8(at) + question + view).digest()
        return past

    def asked(self, index: int) -> tuple[bytes, bytes, bytes]:
        """Context, question, and the batch's digest of a sum, nothing where it is whole."""
        one = self.sums[index]
        batch = b"" if self.whole else self.batch_digests[index // self.per_batch]
        return bytes.fromhex(one["context"]), bytes.fromhex(one["question"]), batch

    def cohort(self, index: int) -> list[int]:
        """The places of those who are asked."""
        cohort = [self.ids.index(silo) for silo in self.sums[index]["cohort"]]
        need(len(cohort) >= self.roster["min_cohort"] and cohort == sorted(set(cohort)), "a cohort")
        return cohort

    @cached_property
    def scales(self) -> list[tuple[int, int]]:
        """Of each element: the exponent of its scale, and the largest that one contribution may be."""
        room = (2 ** (self.bits - 2) - 1) // self.n - 1
        found = []
        for _, shape, bound, integer, _ in self.blocks:
            fits = (e for e in range(1000, -1001, -1) if Fraction(bound) * Fraction(2) ** e <= room)
            e = 0 if integer else next(fits)
            largest = math.floor(Fraction(bound) * Fraction(2) ** e) + (not integer)
            found += [(e, largest)] * math.prod(shape)
        return found

    def mask(self, index: int, seed: bytes) -> list[int]:
        """Ring elements."""
        context, _, batch = self.asked(index)
        return self.expanded(derive(seed, b"mask", self.binding, batch, n8(index), self.table, context))

    def expanded(self, key: bytes) -> list[int]:
        width = self.bits // 8
        stream = keystream(key, width * len(self.scales))
        return [int.from_bytes(stream[at : at + width], "little") for at in range(0, len(stream), width)]

    def whole_mask(self, index: int, one: int, other: int) -> list[int]:
        """The one mask that two neighbours share in a whole sum."""
        context, question, _ = self.asked(index)
        cohort, (low, high) = self.bitmap(self.cohort(index)), sorted((one, other))
        past = self.past(index, low, high)
        named = {(a, b): bytes.fromhex(past) for a, b, past in self.sums[index].get("pasts", ())}
        need(past == named.get((self.ids[low], self.ids[high]), b""), "what both were asked before")
        fields = n8(index), n8(low), n8(high), cohort, self.table, context, question, past
        return self.expanded(derive(self.pair(one, other), b"whole-mask", self.binding, *fields))

    def elements(self, payload: bytes) -> list[int]:
        width = self.bits // 8
        need(len(payload) == width * len(self.scales), "a payload's length")
        return [int.from_bytes(payload[at : at + width], "little") for at in range(0, len(payload), width)]

    def on_Contribution(self, place: int, index: int, question: bytes, payload: bytes, signature: bytes) -> None:
        context, asked, batch = self.asked(index)
        need(question == asked and place not in self.contributions[index], "the question, answered once")
        cohort = self.cohort(index)
        fields = (n8(index), n8(place), self.bitmap(cohort), self.table, context, question, sha256(payload).digest())
        self.signed(place, signature, digest(b"contribution", self.binding, batch, *fields))
        number, at = divmod(index, self.per_batch)
        values = self.elements(payload)
        if self.whole:
            masks = {v: self.whole_mask(index, place, v) for v in self.near[place] if v in cohort}
            need(place in cohort and bool(masks), "a silo of the cohort, and a neighbour in it")
        else:
            points = {x: self.dealt[number, place, h] for x, h in enumerate(self.holders[place], 1)}
            opened = interpolated(0, dict(list(points.items())[: self.threshold]))
            values = [(v - m) for v, m in zip(values, self.mask(index, opened[64 * at :][:32]), strict=True)]
            seeds = {v: self.seeds(number, place, v)[32 * at : 32 * at + 32] for v in self.near[place]}
            masks = {v: self.mask(index, seed) for v, seed in seeds.items()}
        for v, mask in masks.items():  # the earlier of the two adds
            values = [a - (m if place < v else -m) for a, m in zip(values, mask, strict=True)]
        real = self.sums[index]["values"][self.ids[place]]
        encoded = [round(Fraction(x) * Fraction(2) ** e) for x, (e, _) in zip(real, self.scales, strict=True)]
        need([v % 2**self.bits for v in values] == [v % 2**self.bits for v in encoded], "values under their masks")
        self.contributions[index][place] = [payload, signature]

    def survivors_statement(self, index: int) -> bytes:
        context, question, batch = self.asked(index)
        cohort, there = self.bitmap(self.cohort(index)), self.bitmap(self.contributions[index])
        fields = (n8(index), cohort, there, self.table, context, question)
        return digest(b"survivors", self.binding, batch, *fields)

    def named(self, index: int, cohort: bytes, survivors: bytes, *asked: bytes) -> None:
        context, question, _ = self.asked(index)
        there = self.contributions[index]
        need((cohort, survivors) == (self.bitmap(self.cohort(index)), self.bitmap(there)), "cohort and survivors")
        need(asked == (self.table, context, question), "table, context and question")
        need(self.n - len(there) <= self.roster["max_missing"], "few enough missing")
        need(len(there) >= self.roster["min_cohort"], "enough survivors")

    def on_SignRequest(self, to: list[int], index: int, *fields: Any) -> None:
        *named, payloads, proofs = fields
        self.named(index, *named)
        sent = dict(sorted(self.contributions[index].items()))
        proved = [] if set(to) <= sent.keys() else list(sent.values())
        need(not (proved and set(to) & sent.keys()), "proofs for those alone that did not contribute")
        need(payloads == [sha256(p).digest() for p, _ in proved], "digests of payloads")
        need(proofs == [signature for _, signature in proved], "the survivors' signatures")

    def on_SetSignature(self, place: int, index: int, signature: bytes) -> None:
        self.signed(place, signature, self.survivors_statement(index))

    def on_RevealRequest(self, to: list[int], index: int, *fields: Any) -> None:
        *named, payloads, proofs, signers, signatures = fields
        self.named(index, *named)
        need(payloads == proofs == [], "no proofs where there are signatures")
        self.enough(signers, signatures, self.survivors_statement(index))

    def on_Shares(self, place: int, index: int, shares: list[bytes], own: bytes, seeds: list[bytes]) -> None:
        there, (number, at) = self.contributions[index], divmod(index, self.per_batch)
        owners = [v for v in self.holders[place] if v in self.deposits[number]]
        spot = {v: 64 * at + (0 if v in there else 32) for v in owners}  # b of a survivor, e of who was lost
        need(shares == [self.dealt[number, v, place][spot[v] : spot[v] + 32] for v in owners], "shares")
        away = [v for v in self.near[place] if v in self.deposits[number] and v not in there and place in there]
        need(
            seeds == [self.seeds(number, place, v)[32 * at : 32 * at + 32] for v in away], "seeds shared with the lost"
        )
        opened = self.commitment(place, index, b"b", own)
        commitments = self.deposits[number][place][1]
        need(opened == commitments[64 * at : 64 * at + 32] if place in there else own == b"", "b of a survivor")
        self.shown[index][place] = {"shares": dict(zip(owners, shares, strict=True)), "own": own, "seeds": dict(
            zip(away, seeds, strict=True))}  # fmt: skip

    def secret(self, index: int, owner: int, kind: bytes) -> bytes:
        """b or e of an owner, from t shares that holders have shown."""
        places = enumerate(self.holders[owner], 1)
        points = {x: self.shown[index][h]["shares"][owner] for x, h in places if h in self.shown[index]}
        need(len(points) >= self.threshold, "t shares")
        found = interpolated(0, dict(list(points.items())[: self.threshold]))
        commitments = self.deposits[index // self.per_batch][owner][1][64 * (index % self.per_batch) :]
        need(self.commitment(owner, index, kind, found) == commitments[32 * (kind == b"e") :][:32], "a secret")
        return found

    def total(self, index: int) -> list[float]:
        """The sum, from the server's view."""
        there, shown = self.contributions[index], self.shown[index]
        if self.k < self.n - 1:
            left = [sum(self.order[(i + s) % self.n] in there for s in range(self.k // 2)) for i in range(self.n)]
            need(min(left) >= self.least, "survivors in each window")
        columns = [self.elements(payload) for payload, _ in there.values()]
        need(not self.whole or sorted(there) == self.cohort(index), "all of the cohort")
        for v in () if self.whole else there:
            b = shown[v]["own"] if v in shown else self.secret(index, v, b"b")
            columns.append([-m for m in self.mask(index, b)])
        for lost in self.deposits.get(index // self.per_batch, {}).keys() - there.keys():
            near = [v for v in self.near[lost] if v in there]
            told = {v: shown[v]["seeds"][lost] for v in near if v in shown}
            if set(near) - told.keys():
                sealed = self.deposits[index // self.per_batch][lost][2]
                told |= self.unsealed(lost, index, self.secret(index, lost, b"e"), sealed)
            columns += [[-m if v < lost else m for m in self.mask(index, told[v])] for v in near]
        total, values = [sum(column) % 2**self.bits for column in zip(*columns, strict=True)], []
        for element, (e, largest) in zip(total, self.scales, strict=True):
            signed = element - (element >> (self.bits - 1) << self.bits)
            need(abs(signed) <= len(there) * largest, "a total in range")
            values.append(float(signed) * 2.0**-e)
        return values


def verify(vector: Mapping[str, Any]) -> Verifier:
    """Raises `Wrong` for the first thing in a vector that does not fit."""
    seen = Verifier(vector)
    for sender, receivers, kind, message in vector["messages"]:
        seen.take(sender, receivers, kind, bytes.fromhex(message))
    for index, one in seen.sums.items():
        need(seen.total(index) == one["total"], "a total")
        need(set(one["values"]) == {seen.ids[p] for p in seen.contributions[index]}, "survivors")
    need(all(a < b for a, b in pairwise(seen.sums)), "indices in their order")
    batches = [found.hex() for found in seen.batch_digests.values()]
    derived = {"roster": seen.roster_hash.hex(), "table": seen.table.hex(), "key set": seen.key_set.hex()}
    derived |= {"order": seen.order, "threshold": seen.threshold, "batches": batches}
    need(vector["derived"] == derived, "what is derived")
    return seen


if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.glob("*.json")):
        verify(json.loads(path.read_text()))
        print(f"{path.name}: fits")
