"""What an adversary can solve for: contributions as equations, masks and inputs as their unknowns.

A contribution that a silo sent is its input plus masks. Each mask is the keystream of a key, so equal keys are one
unknown and different keys are independent ones; each input (a silo's answer to a question) is one more. A mask is
known once its seed is: b once as many shares of it as the session's threshold have been revealed, or are held by
colluders, and the seed of a pair once e of either side is known, or one of the two colludes. A whole sum has masks of
pairs alone. Contributions are spied on inside the silos (which keys, which sign, which input), but counted only if
their bytes came out of a silo's `handle`; so are shares.

All coordinates of a contribution have the same coefficients, so that one row stands for the whole vector. Rows live
over GF(p), not over Z_2^64 in which the sums are taken. That loses nothing: a mask's column holds one +1 (b), or +1
at the earlier and -1 at the later of a pair, or the same again where a row is repeated, as the columns of a network
matrix do. Such a matrix is totally unimodular: its invariant factors are 1, so that it has the same rank modulo every
prime and modulo 2^64 every combination without masks is an integer one, whose coefficients are 0 and +-1.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from secure_fvi.aggregation.onetime import PAIR, SELF
from secure_fvi.aggregation.prg import Mask, apply_masks
from secure_fvi.aggregation.ring import Ring

P = 2_147_483_629  # a prime below 2^31: products of two residues fit in int64


class Answer(NamedTuple):
    """One contribution as its silo made it."""

    silo: int
    question: object  # what it answers
    index: int
    context: bytes
    payload: bytes
    values: np.ndarray
    masks: tuple[tuple[bytes, bool, tuple], ...]  # key, whether subtracted, name of the seed

    @property
    def input(self) -> tuple[int, bytes]:
        """The unknown: the same values are the same unknown, whatever they answer."""
        return self.silo, hashlib.sha256(self.values.tobytes()).digest()


class Named(NamedTuple):
    """A set of survivors that an honest silo signed, or opened masks for."""

    question: object
    index: int
    context: bytes
    cohort: frozenset[int]
    survivors: frozenset[int]


class Verdict(NamedTuple):
    """What an adversary knows."""

    beyond: list[str]  # more than the disclosed, in words; nothing if all is well
    disclosed: int  # totals that it was to learn and did


def reduced(rows: np.ndarray, columns: int) -> tuple[np.ndarray, list[int]]:
    """`rows` over GF(p) with the first `columns` columns in row echelon form, and the pivots' columns in order."""
    rows = rows % P
    pivots: list[int] = []
    for column in range(columns):
        at = len(pivots)
        below = np.flatnonzero(rows[at:, column])
        if not below.size:
            continue
        rows[[at, at + below[0]]] = rows[[at + below[0], at]]
        rows[at] = rows[at] * pow(int(rows[at, column]), -1, P) % P
        others = np.flatnonzero(rows[at + 1 :, column]) + at + 1
        rows[others] = (rows[others] - rows[others, column][:, None] * rows[at]) % P
        pivots.append(column)
        if len(pivots) == len(rows):
            break
    return rows, pivots


def rank(rows: np.ndarray) -> int:
    return len(reduced(rows, rows.shape[1])[1]) if rows.size else 0


class Knowledge:
    """All that a server with `colluders` has been sent in one session, and what follows from it."""

    def __init__(self, colluders: frozenset[int]) -> None:
        self.colluders = colluders
        self.answers: dict[tuple[int, bytes], Answer] = {}
        self.named: list[Named] = []
        self._shares: dict[tuple[int, int, int], set[int]] = defaultdict(set)  # positions, by (owner, index, kind)
        self._told: set[tuple] = set()  # seeds that were revealed as they are
        self._batches: dict[int, object] = {}  # by index: members, threshold, neighbours

    def take_contribution(self, answer: Answer) -> None:
        self.answers[answer.silo, answer.payload] = answer

    def take_shares(self, batch, holder: int, survivors: frozenset[int], reply) -> None:
        """What `holder` revealed: shares of b for survivors and of e for all others; of its own, b and some seeds."""
        index = reply.sum_index
        self._batches[index] = batch
        owners = [v for v in batch.session.holders(holder) if v in batch.depositors]
        for owner, share in zip(owners, reply.shares, strict=True):
            if share:
                kind = SELF if owner in survivors else PAIR
                self._shares[owner, index, kind].add(batch.session.position(owner, holder))
        if reply.own:
            self._told.add(("b", holder, index))
        peers = [v for v in batch._peers if v not in survivors]
        self._told.update(("pair", *sorted((holder, v)), index) for v, _ in zip(peers, reply.seeds, strict=False))

    def take_colluder(self, batch, colluder: int, index: int) -> None:
        """All that a colluder holds for an index."""
        self._batches.setdefault(index, batch)
        for owner in batch._held:
            for kind in (SELF, PAIR):
                self._shares[owner, index, kind].add(batch.session.position(owner, colluder))

    def _open(self, owner: int, index: int, kind: int) -> bool:
        if owner in self.colluders:
            return True
        return len(self._shares[owner, index, kind]) >= self._batches[index].session.threshold

    def knows(self, seed: tuple) -> bool:
        """Whether the seed of a mask is known: ("b", owner, index) or ("pair", one, other, index)."""
        if seed in self._told:
            return True
        if seed[-1] not in self._batches:
            return not self.colluders.isdisjoint(seed[1:-1])
        if seed[0] == "b":
            return self._open(seed[1], seed[2], SELF)
        _, one, other, index = seed
        return self._open(one, index, PAIR) or self._open(other, index, PAIR)

    def solved(self, rounds: frozenset | None = None) -> tuple[np.ndarray, list, np.ndarray, list[Answer]]:
        """Combinations of honest silos' inputs that the adversary has, in row echelon form (rows, inputs); the inputs;
        and of which answers each row is the combination (rows, answers); the answers."""
        answers = [
            a
            for a in self.answers.values()
            if a.silo not in self.colluders and (rounds is None or a.question in rounds)
        ]
        inputs = sorted({a.input for a in answers})
        masks = sorted({key for a in answers for key, _, seed in a.masks if not self.knows(seed)})
        column = {name: at for at, name in enumerate([*masks, *inputs])}
        size = len(column)
        rows = np.zeros((len(answers), size + len(answers)), np.int64)
        for at, answer in enumerate(answers):
            for key, negative, _ in answer.masks:
                if key in column:
                    rows[at, column[key]] += -1 if negative else 1
            rows[at, column[answer.input]] += 1
            rows[at, size + at] = 1
        rows, pivots = reduced(rows, size)
        free = [r for r, pivot in enumerate(pivots) if pivot >= len(masks)]
        return rows[free, len(masks) : size], inputs, rows[free, size:], answers

    def supports(self) -> list[frozenset[int]]:
        """The silos whose input may be other than zero, for each kind of coordinate.

        Who knows the program knows where a silo's answer is always zero, as in a table with a row for each silo; those
        coordinates are no unknowns. Here they are taken from the answers themselves.
        """
        by_silo = defaultdict(list)
        for answer in self.answers.values():
            by_silo[answer.silo].append(answer.values != 0)
        ever = {silo: np.any(rows, axis=0) for silo, rows in by_silo.items() if silo not in self.colluders}
        length = max((len(row) for row in ever.values()), default=0)
        return sorted({frozenset(s for s, row in ever.items() if row[at]) for at in range(length)}, key=sorted)

    def beyond(self, max_missing: int, min_cohort: int, rounds: frozenset | None = None) -> Verdict:
        """What is known of the questions in `rounds` beyond what is disclosed.

        Disclosed is one total for each question: over a set of survivors that an honest silo named and that the rule
        allows, at most `max_missing` of the cohort absent and at least `min_cohort` present. A table is declared to be
        symmetric in silos: a total in which the input of some survivor is no unknown is none.
        """
        known, inputs, _, answers = self.solved(rounds)
        found, opened = [], 0
        for support in self.supports():
            kept = [at for at, (silo, _) in enumerate(inputs) if silo in support]
            disclosed, words = self._disclosed(
                known[:, kept], [inputs[at] for at in kept], answers, support, (max_missing, min_cohort)
            )
            more = rank(known[:, kept]) - (rank(np.array(disclosed)) if disclosed else 0)
            found += words
            if more:
                found.append(f"{more} combinations of inputs beyond the {len(disclosed)} disclosed totals")
            opened = max(opened, len(disclosed))
        return Verdict(found, opened)

    def _disclosed(self, known, inputs, answers, support, rule) -> tuple[list[tuple[int, ...]], list[str]]:
        """The totals that are disclosed and known, one for each question; in words, where there is more than one."""
        max_missing, min_cohort = rule
        column = {name: at for at, name in enumerate(inputs)}
        sent = defaultdict(set)
        for answer in answers:
            sent[answer.index, answer.context, answer.silo].add(answer.input)
        totals: dict[object, set[tuple[int, ...]]] = defaultdict(set)
        for named in set(self.named):
            honest = named.survivors - self.colluders
            terms = [sent[named.index, named.context, silo] for silo in honest]
            allowed = (
                named.survivors <= named.cohort
                and len(named.cohort - named.survivors) <= max_missing
                and len(named.survivors) >= min_cohort
                and all(len(term) == 1 for term in terms)
                and honest <= support
            )
            if allowed and honest:
                row = np.zeros(len(inputs), np.int64)
                row[[column[next(iter(term))] for term in terms]] = 1
                totals[named.question].add(tuple(row.tolist()))
        base, disclosed, words = rank(known), [], []
        for question, candidates in sorted(totals.items()):
            held = [c for c in sorted(candidates) if rank(np.array([*known, c])) == base]
            if len(held) > 1:
                words.append(f"question {question}: totals over {len(held)} sets of silos")
            disclosed += held[:1]
        return disclosed, words

    def read(self, table, roster) -> list[tuple[dict, np.ndarray, np.ndarray]]:
        """Each solved combination carried out on the real bytes: (signs by input, what comes out, the truth)."""
        known, inputs, combination, answers = self.solved()
        out = []
        for row, signs in zip(combination, known, strict=True):
            value, truth = 0, 0
            for at in np.flatnonzero(row):
                answer = answers[at]
                ring = Ring(table, roster.bits, roster.size)
                part = np.frombuffer(answer.payload, ring.dtype).copy()
                apply_masks(part, [Mask(key, not minus) for key, minus, seed in answer.masks if self.knows(seed)])
                sign = int(row[at]) if row[at] <= P // 2 else int(row[at]) - P
                assert sign in (-1, 1)
                value = value + (part if sign == 1 else 0 - part)
                truth = truth + sign * answer.values
            out.append(({inputs[at]: int(signs[at]) for at in np.flatnonzero(signs)}, ring.decode(value), truth))
        return out
