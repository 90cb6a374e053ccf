"""Attacks on vertical runs: labels from what comes back to the silos, columns from what leaves them.

labels      a silo reads dlog p/ds of each person off the broadcasts: by its sign, by its size (the rarer class has the
            larger slope), and by its direction, compared with people whose labels it knows (cosine)
columns     the server regresses a silo's predictor, which carries its columns, on the trace of z_j over the rounds (a
            plain sum) or of s, and so does another silo where there are two
members     who takes part. By matching: of its own list a party is told by design, of other identifiers colluders
            try what they have. By totals and pulls: a likelihood ratio between two people of whom one has a place
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

import secure_fvi as sf
from secure_fvi import alignment
from secure_fvi.aggregation.base import FloatArray, SecureSum, carry
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.algorithms.vertical import AUXILIARY_PHASE, Vertical
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.audits.base import CONTROL_CONFIDENCE, AuditRow, Control, Estimate, Scored, judge
from secure_fvi.audits.features import contributions_in_clear
from secure_fvi.audits.scores import auc, auc_bound, cross_fitted, r_squared, ridge, told_at
from secure_fvi.audits.transcript import Transcript
from secure_fvi.audits.worlds import Recorder
from secure_fvi.column_silo import VerticalLocalPosterior
from secure_fvi.columns import Columns
from secure_fvi.errors import InputError
from secure_fvi.models.vertical_programs import VerticalDataset
from secure_fvi.privacy.accountants import of_group
from secure_fvi.privacy.settings import DP

#: Ways to read labels off the pulls.
LABEL_ATTACKS = ("sign", "norm", "cosine")
_KNOWN = 0.1  # share of people whose labels the cosine attack knows
_STRETCHES = 8  # over which traces are averaged
_DRAWS = 2000  # of q, for posterior means


class World(NamedTuple):
    """A recorded run on made data, and what the attacks look for."""

    transcript: Transcript
    labels: FloatArray  # (N,)
    predictors: Mapping[str, FloatArray]  # (N,) by silo, posterior means


def columns_of(data: VerticalDataset, likelihood: Likelihood) -> tuple[Columns, list[dict[str, Tensor]]]:
    """The model and the silos' columns, in one order."""
    predictors = [data.predictors[n] for n in data.silos]
    return Columns(likelihood, data.response, predictors, data.offset), list(data.silos.values())


def record(
    data: VerticalDataset,
    likelihood: Likelihood,
    config: Vertical,
    aggregation: SecureSum,
    privacy: DP | None = None,
    *,
    simulated: bool,
    real_data: bool = False,
    each: Callable[[], None] = lambda: None,
) -> World:
    """A whole run, watched. `each` is told after every round."""
    model, silos = columns_of(data, likelihood)
    run = sf.run(model, silos, config, aggregation, privacy, silo_ids=list(data.silos), compile=False)
    recorder = Recorder(run.server, run.engine, aggregation.kind, simulated=simulated, real_data=real_data)
    for _ in run:
        each()
    eta = {}
    for name, silo in run.engine.silos.items():
        eta[name] = VerticalLocalPosterior(silo).eta(data.silos[name], _DRAWS).mean(0).reshape(len(data.response), -1)
    predictors = {n: v[:, 0].numpy().astype(np.float64) for n, v in eta.items()}
    return World(recorder.transcript(), data.response.numpy().astype(np.float64), predictors)


def pulls(transcript: Transcript) -> FloatArray:
    """(N, R) dlog p/ds of each person over the rounds, as any silo reads them. Needs all records in each round."""
    found = [b.tensors["pull"][:, 0].numpy() for b in transcript.broadcasts() if "pull" in b.tensors and b.round]
    if not found or len({len(f) for f in found}) > 1:
        raise InputError("no round's broadcast carries a pull on every person")
    return np.stack(found, 1).astype(np.float64)


def guess_labels(attack: str, seen: FloatArray, labels: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Scores of people whose labels the attack does not know, and those labels. `seen` (N, R)."""
    if attack == "sign":
        return seen.mean(1), labels
    if attack == "norm":
        rare = labels.mean() < 0.5  # the class sizes are no secret: the rarer one is further from what is expected
        size = np.abs(seen).mean(1)
        return (size if rare else -size), labels
    if attack != "cosine":
        raise InputError(f"attack '{attack}' is unknown; choose {', '.join(LABEL_ATTACKS)}")
    known = np.zeros(len(labels), dtype=bool)
    known[np.random.default_rng(0).permutation(len(labels))[: max(2, round(_KNOWN * len(labels)))]] = True
    unit = seen / np.linalg.norm(seen, axis=1, keepdims=True).clip(1e-300)
    if len(set(labels[known])) < 2:
        raise InputError("the people whose labels are known are all of one class")
    ones, zeros = (unit[known & (labels == c)].mean(0) for c in (1.0, 0.0))
    return (unit @ (ones - zeros))[~known], labels[~known]


def label_rows(protection: str, world: World, control: World, epsilon: float | None, delta: float) -> list[AuditRow]:
    """Each attack's AUC beside the bound that (epsilon, delta) gives; `control` is the same run without privacy."""
    rows = []
    for attack in LABEL_ATTACKS:
        rng = np.random.default_rng(1)
        bound = None if epsilon is None else auc_bound(epsilon, delta)
        rows.append(
            judge(
                f"labels, {attack}",
                protection,
                "AUC",
                _label_score(attack, world, world.labels),
                Control(_label_score(attack, control, control.labels), "the same run without privacy"),
                Control(
                    _label_score(attack, world, rng.permutation(world.labels), CONTROL_CONFIDENCE),
                    "labels in random order",
                ),
                0.5,
                bound=bound,
                rounds=pulls(world.transcript).shape[1],
            )
        )
    return rows


def column_rows(protection: str, world: World, control: World) -> list[AuditRow]:
    """R^2 of the first silo's predictor: from its own z_j where the sum shows it, and from the total."""
    silo = world.transcript.silos[0]
    target, rng = world.predictors[silo], np.random.default_rng(2)

    def score(of: World, what: str, wanted: FloatArray, confidence: float = 0.95) -> Estimate:
        seen = _traces(of.transcript, silo if what == "messages" else None)
        people = np.arange(len(wanted))
        return r_squared(wanted, cross_fitted(ridge, seen, wanted, people), people, confidence)

    return [
        judge(
            f"columns from {what}",
            protection,
            "R^2",
            score(world, what, target),
            Control(score(control, "messages", control.predictors[silo]), "the silo's own z_j in a plain sum"),
            Control(score(world, what, rng.permutation(target), CONTROL_CONFIDENCE), "people in random order"),
            0.0,
            rounds=len(world.transcript.sums),
        )
        for what in ("messages", "totals")
    ]


# ---- who takes part ----

#: Of 2 x so many people each place has two, and a coin says which of them takes part.
LEAST_PEOPLE = 80
_FOLDS = 5
_LEAST_VARIANCE = 1e-9  # of what is left of a total, in the total's own variance


class Game(NamedTuple):
    """A recorded run each of whose places was given to one of two people by a coin."""

    seen: FloatArray  # (N, T) the place's totals in each round, and its pulls where they are broadcast
    records: FloatArray  # (2, N, D) columns of all silos and the response of the two
    coins: npt.NDArray[np.int64]  # (N,) which of them takes part
    institutions: int  # that hold something in which the two differ, those of the response included
    guarded: bool  # whether privacy, if there is any, is of all in which they differ


def play(
    data: VerticalDataset,
    likelihood: Likelihood,
    config: Vertical,
    aggregation: SecureSum,
    privacy: DP | None = None,
    *,
    whole: bool,
    simulated: bool,
    real_data: bool = False,
    each: Callable[[], None] = lambda: None,
) -> Game:
    """A run over half of the people. whole: a place's two candidates differ in all columns and the response; else in
    the first silo's columns alone, which is what privacy calls neighbours."""
    rng = np.random.default_rng([0, whole])
    half = len(data.response) // 2
    pairs = rng.permutation(len(data.response))[: 2 * half].reshape(2, half)
    coins, first = rng.integers(2, size=half), next(iter(data.silos))
    own = np.where(coins == 1, pairs[1], pairs[0])

    def of(silo: str, who: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return who if whole or silo == first else pairs[0]

    silos = {n: {k: v[of(n, own)] for k, v in rows.items()} for n, rows in data.silos.items()}
    known = of("", own)
    offset = None if data.offset is None else data.offset[known]
    played = VerticalDataset(silos, data.predictors, data.response[known], offset)
    world = record(
        played, likelihood, config, aggregation, privacy, simulated=simulated, real_data=real_data, each=each
    )
    seen = [_each_round(world.transcript, None)]
    if any("pull" in b.tensors for b in world.transcript.broadcasts()):
        seen.append(pulls(world.transcript))
    records = np.stack([np.concatenate([_flat(data, n, of(n, who)) for n in (*data.silos, "")], 1) for who in pairs])
    held = config.response == "private"
    return Game(np.concatenate(seen, 1), records, coins, len(data.silos) + held if whole else 1, held or not whole)


def guess_members(game: Game) -> FloatArray:
    """(N,) log-likelihood ratio of what was seen at each place, the second candidate against the first: normal around
    a linear function of a record, which is learned from the people of other places, all of whom are known."""
    x = np.concatenate([np.ones((*game.records.shape[:2], 1)), game.records], 2)
    truth = x[game.coins, np.arange(len(game.coins))]
    fold = np.random.default_rng(3).permutation(len(game.coins)) % _FOLDS
    found = np.empty(len(game.coins))
    for k in range(_FOLDS):
        known, at = fold != k, fold == k
        learned = np.linalg.lstsq(truth[known], game.seen[known], rcond=1e-9)[0]
        left = ((game.seen[known] - truth[known] @ learned) ** 2).sum(0)
        freedom = max(int(known.sum()) - x.shape[2], 1)
        spread = left / freedom + _LEAST_VARIANCE * game.seen[known].var(0) + 1e-300
        first, second = (((game.seen[at] - candidate[at] @ learned) ** 2 / spread).sum(1) for candidate in x)
        found[at] = (first - second) / 2
    return found


def member_row(protection: str, game: Game, control: Game, epsilon: float | None, delta: float) -> AuditRow:
    """The ratio's AUC, and its true-positive rates at low false-positive rates, beside what (epsilon, delta) allows;
    `control` is the same game without privacy. Of m institutions a person is a group of m records."""
    whole, count = game.institutions > 1, game.institutions
    scores, coins = guess_members(game), game.coins.astype(np.float64)
    places = np.arange(len(coins))
    caught = auc(control.coins.astype(np.float64), guess_members(control), np.arange(len(control.coins)))
    again = np.random.default_rng(4).permutation(coins)
    detail: dict[str, Any] = {"institutions": count}
    allowed = None
    if epsilon is not None and game.guarded:
        allowed = of_group(epsilon, delta, count)
        detail |= {"bound": auc_bound(*allowed), "epsilon": allowed[0], "delta": allowed[1]}
    told = told_at(coins, scores, allowed)
    return judge(
        f"membership, totals: {'all of a person' if whole else 'its columns at one silo'}",
        protection,
        "AUC",
        auc(coins, scores, places),
        Control(caught, "the same game without privacy"),
        Control(auc(again, scores, places, CONTROL_CONFIDENCE), "coins tossed again"),
        0.5,
        scored=Scored(coins, scores),
        **detail,
        **told,
    )


MATCHING = "private matching"
_MATCHING = alignment._CODEC
_LISTED, _UNIVERSE = 40, 200  # identifiers of each colluder's list, and that there are


def matching_rows(seed: int = 0) -> list[AuditRow]:
    """What all parties but one silo, the matcher among them, learn of that silo's list by private matching of made
    identifiers: of those that they list, and of others, for which they try every evaluation that they were given in
    the place of its part. The positive control is one keyed hash that silos share, as matching was before: whoever
    has the key tries all."""
    rng = np.random.default_rng(seed)
    everyone = [f"{n:05}" for n in rng.permutation(_UNIVERSE)]
    holds = rng.random(_UNIVERSE) < 0.5
    lists = {
        "colluder-1": everyone[:_LISTED],
        "colluder-2": everyone[_LISTED : 2 * _LISTED],
        "silo": [i for i, inside in zip(everyone, holds, strict=True) if inside],
    }
    ids = {n: alignment.prepare(ids) for n, ids in lists.items()}
    keys = {n: Identity(Ed25519PrivateKey.generate()) for n in lists}
    roster = Roster(rng.bytes(32), tuple((n, k.public_key) for n, k in keys.items()), min_cohort=2)
    silos = {n: alignment.MatchingSilo(roster, n, keys[n], ids[n]) for n in lists}
    said = list[tuple[Any, Any]]()

    def exchange(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = {n: silos[n].handle(m) for n, m in messages.items()}
        if "silo" in messages:
            said.append((_MATCHING.unpack_any(messages["silo"]), _MATCHING.unpack_any(replies["silo"])))
        return replies

    carry(alignment.Matcher(roster).match(), exchange)
    named = _named_by({roster.places[n]: silos[n] for n in lists if n != "silo"}, said)
    listed = np.arange(_UNIVERSE) < 2 * _LISTED
    by_matching = np.array([named(i) for i in everyone], np.float64)
    hashes = {_keyed(b"shared", i) for i in lists["silo"]}
    by_key = np.array([_keyed(b"shared", i) in hashes for i in everyone], np.float64)
    truth, rows = holds.astype(np.float64), []
    for what, at in (("on a list of theirs", listed), ("on none of their lists", ~listed)):
        people = np.arange(int(at.sum()))
        again = rng.permutation(truth[at])
        rows.append(
            judge(
                f"membership, matching: identifiers {what}",
                MATCHING,
                "AUC",
                auc(truth[at], by_matching[at], people),
                Control(auc(truth[at], by_key[at], people), "a keyed hash that the silos share"),
                Control(auc(again, by_matching[at], people, CONTROL_CONFIDENCE), "another silo's list"),
                0.5,
                note=(
                    "By design: it is what matching is for, at a place of a list whose size was signed for each; "
                    "no differential privacy bounds it."
                    if at is listed
                    else "Of all parties but one, which pool what they have and try everything that they were sent."
                ),
                scored=Scored(truth[at], by_matching[at]),
                identifiers=int(at.sum()),
            )
        )
    return rows


def _named_by(
    colluders: Mapping[int, alignment.MatchingSilo], said: Sequence[tuple[Any, Any]]
) -> Callable[[str], bool]:
    """Whether an identifier's output is among those of the silo that was asked and answered `said`, by what colluders,
    by their places, have: their keys, and all that the silo evaluated for them, blinded and not."""
    group, outputs, parts = alignment._group(), set[bytes](), set[bytes]()
    for asked, answered in said:
        if isinstance(answered, alignment.Outputs):
            outputs.update(alignment._split(answered.outputs))
        if isinstance(answered, alignment.Evaluated):
            for owner, points in zip(asked.owners, map(alignment._split, answered.points), strict=True):
                its = colluders[owner]
                blinds = (alignment._scalar(its._blinds, element) for element in its._batch(asked.batch))
                parts.update(points)
                parts.update(
                    alignment._times(group.crypto_core_ristretto255_scalar_invert(blind), point)
                    for blind, point in zip(blinds, points, strict=True)
                )
    (place,) = set(range(len(colluders) + 1)) - colluders.keys()

    def named(identifier: str) -> bool:
        element = b"\1" + identifier.encode()
        points = [alignment._times(its._key, alignment.hashed(element)) for _, its in sorted(colluders.items())]

        def output(part: bytes) -> bytes:
            return alignment.output(alignment.secret_of(element, [*points[:place], part, *points[place:]]))

        return any(output(part) in outputs for part in parts)

    return named


def _keyed(key: bytes, identifier: str) -> bytes:
    return hashlib.blake2b(identifier.encode(), key=key).digest()


def _flat(data: VerticalDataset, silo: str, who: npt.NDArray[np.int64]) -> FloatArray:
    """(N, D) a silo's columns of these people, or their response and offset."""
    if not silo:
        known = [data.response] if data.offset is None else [data.response, data.offset]
    else:
        known = list(data.silos[silo].values())
    return np.concatenate([v[who].reshape(len(who), -1).to(torch.float64).numpy() for v in known], 1)


def _label_score(attack: str, world: World, labels: FloatArray, confidence: float = 0.95) -> Estimate:
    guesses, truth = guess_labels(attack, pulls(world.transcript), labels)
    return auc(truth, guesses, np.arange(len(truth)), confidence)


def _traces(transcript: Transcript, silo: str | None) -> FloatArray:
    """(N, stretches) means of each person's row over stretches of the run, of one silo's messages or of the totals."""
    each = _each_round(transcript, silo)
    return np.stack([part.mean(1) for part in np.array_split(each, min(_STRETCHES, each.shape[1]), 1)], 1)


def _each_round(transcript: Transcript, silo: str | None) -> FloatArray:
    """(N, rounds) each person's row, of one silo's messages or of the totals."""
    if silo is None:
        rounds = [s.released for s in transcript.sums if s.phase == AUXILIARY_PHASE]
    else:
        sent = zip(transcript.broadcasts(), contributions_in_clear(transcript), strict=True)
        rounds = [numbers[silo] for message, numbers in sent if message.phase == AUXILIARY_PHASE]
    table = transcript.tables[AUXILIARY_PHASE]
    return np.stack([table.split(r)["auxiliary"][:, 0] for r in rounds], 1)
