"""A silo: the only party that holds data. A state machine over bytes; it opens no connection.

Data, local variational parameters and the silo's secret stay in this object. What leaves is what `handle` returns:
contributions, which pass the gate and then the secure sum, and the sum's own protocol messages.

The silo keeps order, whatever a server says. It answers each question of the job's `Order` once, later ones only after
earlier ones, and counts:

    the same bytes again                     the same answer, byte for byte
    the same question under another index    the same values, masked anew: a session was lost; no draw, noise or charge
    anything else that is not the next       ProtocolError, and nothing changes
    sums that follow the final one           only at the parameters that the final one named
    its answer was used, says the server     only if signatures on that sum came in: all silos were asked the same
    it was not                               only if they did not, and of others, not if they stand in such a sum;
                                             to silos that were not asked with it, only if they signed one without it
    where sums are whole, and not signed     its answer was used, before it answers another question; and what it and
                                             another were both asked names the mask they share: of two accounts, noise

What it draws is keyed by its own count of questions (`Past.turn`), which is claimed, with the digest of the question,
before anything is drawn. Of the past a broadcast may say one thing: whether this silo's last answer was used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from secure_fvi.aggregation.base import FloatArray, SumSilo
from secure_fvi.algorithms.base import (
    BEFORE_ALL,
    CLIP,
    Broadcast,
    Pending,
    Phase,
    Problem,
    Question,
    SiloView,
)
from secure_fvi.density import Start
from secure_fvi.errors import (
    AggregationError,
    BoundError,
    BudgetError,
    DataError,
    InputError,
    ProtocolError,
    RecordError,
    one_line,
)
from secure_fvi.federated_model import Records
from secure_fvi.messages import ROUND, SUM, decode_broadcast, question_digest
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.randomness import UNIT_ID, KeyedDraws
from secure_fvi.states import moves

if TYPE_CHECKING:
    from secure_fvi.algorithms.kit import Program

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # torch does not export it to type checkers
#: What a message, a ledger or a disk makes fail. Whatever else is raised, a silo's data may have made fail.
_NOT_OF_DATA = (ProtocolError, BudgetError, OSError)
#: What neither follows from data nor is mended by sending noise.
_OF_MESSAGE = (ProtocolError, BudgetError, RecordError)
#: What linear algebra raises, PyTorch's and NumPy's, and Python's arithmetic.
_NOT_COMPUTED = (ArithmeticError, LinAlgError, np.linalg.LinAlgError)
_log = logging.getLogger(__name__)
_SHARED = b"secure-fvi/shared-past/2"
#: Root mean square from which on a column is taken to be on a raw scale.
_RAW = 5.0
#: In sds: a mean from which on an intercept and a slope go together to within 1e-4.
_FAR = 100.0
#: And from which on it does not differ but by rounding.
_SAME = 1e9
#: What `on_event` hears of a question that this silo's data could not answer: a site counts them over jobs.
UNANSWERABLE = "unanswerable"
#: So many answers that were used make up for one that was not (`Limits.left_out`).
_MAKES_UP = 10


class Limits(NamedTuple):
    """What a site lets a server do within the job's order. None: no limit of the site's own."""

    rounds: int | None = None  # answered, and sums besides them
    missing: int = 0  # silos that a cohort may lack of those that the job asks in a round; in sums besides them, none
    differences: int = 0  # rounds with such a cohort, or, where `lacking`, with such a total
    lacking: bool = False  # whether a total that lacks silos of its cohort counts as one over a smaller cohort
    left_out: int | None = None  # answers of this silo that the server did not use, one more for every ten that it did
    unused: int | None = None  # silos asked with this one that are behind its own last answer that was used


class Past(NamedTuple):
    """What a silo remembers of the questions it was asked. Never leaves the silo."""

    turn: int = -1  # its own count of questions: the number of the last one claimed
    claimed: str = ""  # digest of that question
    asked: Question = BEFORE_ALL  # the last one answered
    answers: tuple[int, ...] = ()  # by phase
    rounds: int = 0  # answered, and sums besides them
    used: int = 0  # the last sum of which it knows that it was used with its term
    settled: Question = BEFORE_ALL  # which that sum answered
    together: tuple[str, ...] = ()  # who was asked it
    seen: Mapping[str, tuple[int, int, int]] = {}  # by silo, the last such question whose survivors it was among
    shared: Mapping[str, str] = {}  # by silo, a digest of all whole sums that were used and that both were asked
    made: int = 0  # the sum for which the last answer was made, and charged
    counted: int = 0  # answers that were used
    left_out: int = 0  # answers that were not
    differences: int = 0  # cohorts that lacked a silo
    failed: bool = False  # whether its data could not answer the question claimed last; no later one is
    cohort: tuple[str, ...] = ()  # of the last answer
    answered: str = ""  # digest of the question that it answered
    whole: bool = True  # whether it was asked of all whom the job asks
    view: str = ""  # of a whole sum, a digest of the broadcast that the answer is to, and of the keys that mask it
    final: str = ""  # digest of what the sum that ends the job named; sums after it name the same


class Kept(NamedTuple):
    """A silo between two rounds, for a checkpoint."""

    local: Any
    past: Past


class Answer(NamedTuple):
    """The last answer, for as long as it may be asked for again."""

    broadcast: bytes  # SHA-256 of the broadcast that it answers, as it came
    values: FloatArray  # as they were released, before the secure sum
    reply: bytes


class Silo:
    """One institution's party."""

    def __init__(
        self,
        name: str,
        program: Program,
        view: Any,
        secure_sum: SumSilo,
        gate: Gate,
        limits: Limits | None = None,
        released: int = 0,
        silent: bool = False,
    ) -> None:
        """`view`: what the program may use of the silo's data; `view.size` is the number of records. `released`: how
        often the ledger was charged before, below which no count of questions may be drawn from. silent: under
        privacy, `view` is nobody's and goes into no answer: each is what stands for one that could not be computed."""
        self.name, self.program, self.view, self.size = name, program, view, view.size
        if isinstance(view, SiloView):
            self.view = view._replace(hides=self._hides)
        self._silent = silent
        self._sum, self.gate, self.limits, self._released = secure_sum, gate, limits or Limits(), released
        #: Told of the claim before anything is drawn; a silo that may be killed writes it down.
        self.on_claim: Callable[[Past], None] = lambda past: None
        #: Told what is not as it should be, in a few words, before an answer leaves: it belongs in the site's log.
        self.on_event: Callable[[str, str], None] = lambda kind, what: None
        #: Told why this silo's data could not answer, where nobody else is: a party among others' sets it. Where None,
        #: or where others see contributions, such a question is refused.
        self.on_unfit: Callable[[object], None] | None = None
        #: Told that a sum at the end asked for numbers that are too large to tell.
        self.on_hidden: Callable[[str], None] = lambda what: None
        self.begin()

    def __repr__(self) -> str:
        return f"Silo('{self.name}')"

    def begin(self) -> None:
        """As before the first round."""
        self.local = self.program.init_local(self.view)
        self.pending: Pending | None = None
        #: The number on whose word the local state became what it is, before the answer that is pending.
        self.decided = -1
        self.past = Past()
        self.answer: Answer | None = None
        #: Whether the sums at the end hear no more of this silo than that: of a number that is asked after again and
        #: again where it passes what is told is its value.
        self.hides = False

    @property
    def kept(self) -> Kept:
        return Kept(self.local, self.past)

    def restore(self, kept: Kept) -> None:
        """Go on from there."""
        self.local, self.past, self.pending, self.answer = kept.local, kept.past, None, None

    def forget(self) -> None:
        """Let go of the last answer: its sum is complete, and nobody asks for it again."""
        self.answer = None

    def handle(self, message: bytes) -> bytes:
        """Answer the server. Raises ProtocolError or AggregationError; nothing is released then, and nothing changes
        but for what was charged."""
        kind, body = message[:1], message[1:]
        if kind == SUM:
            return self._sum.handle(body)
        if kind != ROUND:
            raise ProtocolError(f"silo '{self.name}': a message of unknown kind")
        context = hashlib.sha256(body).digest()
        if self.answer is not None and self.answer.broadcast == context:
            return self.answer.reply
        try:
            broadcast, digest = _read(body, self.program.order.asked, self.program.order.longest)
            question = self.program.order.question(broadcast)
        except ProtocolError as error:
            raise ProtocolError(f"silo '{self.name}': {error}") from None
        if digest == self.past.answered:
            return self._again(broadcast, context)
        try:
            return self._answer(broadcast, question, digest, context)
        except BaseException:
            if self.pending is not None and moves(self.pending.local):  # rows may have been written on its word
                self.program.commit(self.local, self.pending, -1)
            raise

    def answered(self, message: bytes) -> bool:
        """Whether the answer to this broadcast, or to its question under another index, is kept."""
        if self.answer is None or message[:1] != ROUND:
            return False
        if self.answer.broadcast == hashlib.sha256(message[1:]).digest():
            return True
        return question_digest(decode_broadcast(message[1:], self.program.order.asked)).hex() == self.past.answered

    def settle(self, accepted: Mapping[str, int]) -> None:
        """Let the algorithm decide on the pending local state; `accepted` is the server's, after a round. Raises
        ProtocolError where the two disagree on the past."""
        self.past, self.local = self._heard(accepted.get(self.name, 0))
        self.pending = self.answer = None

    # ---- parts ----

    def _answer(self, broadcast: Broadcast, question: Question, digest: str, context: bytes) -> bytes:
        """A question that was not asked before."""
        self._check_not_failed(broadcast, digest)
        past, local = self._heard(broadcast.accepted.get(self.name, 0))
        self._check_left_out(broadcast)
        self._check_told(past, broadcast)
        past = self._in_order(past, broadcast, question)
        before, paid, index = self.past, self.gate.paid, broadcast.sum_index
        # A claim is drawn for again, unless it was released since: its store is then from before that answer.
        again = before.claimed == digest and before.turn >= self._released
        turn = before.turn if again else max(before.turn + 1, self._released)
        claimed = before._replace(turn=turn, claimed=digest)
        self.on_claim(claimed)
        try:
            clip = broadcast.scalars.get(CLIP)
            self.gate.begin(index, broadcast.phase, len(broadcast.cohort), clip, turn)
            release, after, failed = self._found(broadcast, local, turn)
            table = self.gate.table
            reply = self._sum.contribute(
                release.sum_index, broadcast.cohort, table, release.values, context, bytes.fromhex(digest),
                self._may_lack(past, broadcast), _as_bytes(past.shared), failed,
            )  # fmt: skip
        except BaseException as error:
            # What was charged was drawn for, and that it failed is seen: another attempt is drawn for by the next
            # count, in another process as well. Of one that ended before nothing has left.
            charged = self.gate.paid > paid
            unfit = isinstance(error, Exception) and not isinstance(error, _NOT_OF_DATA)
            self.past = before
            if charged or unfit:  # a refusal tells the server something of this silo alone: once
                self.past = claimed._replace(turn=turn + charged, failed=unfit or claimed.failed)
                if isinstance(error, Exception):  # a process that is killed writes nothing either
                    self.on_claim(self.past)
            if unfit:
                self.on_event(UNANSWERABLE, f"round {broadcast.round}")
            said = self._said(error, broadcast)
            if said is None:
                raise
            if not isinstance(error, BoundError):
                raise AggregationError(said) from error
            found = BoundError(said)
            found.uncentred = self._uncentred()
            raise found from None
        self._tell(past)
        self.past = past._replace(
            turn=turn, claimed=digest, made=index, failed=failed, cohort=broadcast.cohort, answered=digest,
            whole=broadcast.cohort == self.program.order.cohort(broadcast.round, broadcast.phase),
            view=self._view(context),
        )  # fmt: skip
        self.local, self.pending = local, Pending(index, after)
        self.answer = Answer(context, release.values, reply)
        return reply

    def _found(self, broadcast: Broadcast, local: Any, turn: int) -> tuple[Release, Any, bool]:
        """A contribution, the silo's next state, and whether it is none: of a party that tells its own site alone, from
        its first failure to the end of the job, so that no refusal tells others where its values pass a bound."""
        if not (self.keeps_to_itself and self.past.failed):
            try:
                return *self._contribution(broadcast, local, turn), False
            except Exception as error:
                if self.on_unfit is None or not self.keeps_to_itself or isinstance(error, _NOT_OF_DATA):
                    raise
                self.on_unfit(self._said(error, broadcast) or f"round {broadcast.round}: {one_line(error)}")
        return Release(broadcast.sum_index, np.zeros(self.gate.table.size)), local, True

    def _hides(self, past: bool) -> bool:
        """See `SiloView.hides`."""
        if past and not self.hides and not self.program.terms:
            self.hides = True
            self.on_hidden("what a sum at the end of the run asks of it is too large to tell")
        return self.hides

    @property
    def keeps_to_itself(self) -> bool:
        """Whether this silo alone hears that its data could not answer."""
        return self.on_unfit is not None and self._sum.spoils and not self.program.terms

    def _said(self, error: BaseException, broadcast: Broadcast) -> str | None:
        """Why this silo's data could not answer, for itself alone; None where what was raised says it."""
        if isinstance(error, BoundError):
            return f"{self._because(error, broadcast)}{self._on_raw_scales()}"
        if isinstance(error, _NOT_COMPUTED):
            said = (
                f"silo '{self.name}': the model cannot be computed on its data in round {broadcast.round} "
                f"({type(error).__name__}); rescale the data, lower learning_rate, or keep parameters where the "
                "model is defined"
            )
            return self._because(said, broadcast)
        return None

    def _because(self, said: object, broadcast: Broadcast) -> str:
        """What was said of a contribution that is none, with the site and the latents that it is of, where these are
        seen, in place of what else it might be. For this silo alone, as its data are."""
        problem = self.program.problem
        if self.gate.terms is not None or not isinstance(problem, Problem):
            return str(said)
        rows = {name: value[: self.size] for name, value in self.view.rows.items()}
        why = ""
        with contextlib.suppress(Exception):  # what a server sent may have no mean
            why = problem.density.misplaced(problem, self.program.where(broadcast), rows)
        return f"{str(said).partition(';')[0]}: {why}" if why else str(said)

    def _uncentred(self) -> bool:
        """Of this silo's data: whether a column is far from 0 in its own sds, as a calendar year is."""
        for value in self.view.rows.values():
            if value.is_floating_point():
                sd, mean = torch.std_mean(value[: self.size].double(), 0, correction=0)
                off = mean.abs() / sd
                if bool(((off > _FAR) & (off < _SAME)).any()):
                    return True
        return False

    def _on_raw_scales(self) -> str:
        """What of this silo's data may be why a contribution is too large, by name."""
        rows = self.view.rows.items()
        size = {n: float(v.square().mean().sqrt()) for n, v in rows if v.is_floating_point() and v.numel()}
        raw = [f"'{name}'" for name in sorted(size, key=lambda name: -size[name]) if size[name] > _RAW]
        if not raw:
            return ""
        return (
            f". Of its columns {', '.join(raw)} are far from 0 or wide: subtract from each a centre and divide it by a "
            "spread that all silos share (in age, say, 50 and 10 years); counts stay, and their rate gets a factor of "
            "their size"
        )

    def _contribution(self, broadcast: Broadcast, local: Any, turn: int) -> tuple[Release, Any]:
        """Under privacy it does not fail on data, whatever a program raises: that would tell of them, without noise or
        charge, whenever asked."""
        paid, dropped, raised, view = self.gate.paid, self.gate.dropped, "", self.view._replace(turn=turn)
        if self._silent and self.gate.terms is not None and not self.gate.terms.steps:
            return self.program.silence(broadcast, local, view, self.gate)
        self.gate.deaf = self._silent
        try:
            found = self.program.contribute(broadcast, local, view, self.gate)
        except Exception as error:
            if self.gate.terms is None or self.gate.paid > paid or isinstance(error, _OF_MESSAGE):
                raise
            raised = f" ({type(error).__name__})"
            found = self.program.silence(broadcast, local, view, self.gate)
        if self.gate.dropped > dropped == 0:
            # Not in the site's paper trail: others see how many rows it has, and this follows from data.
            _log.warning(
                "silo '%s', round %d: %d records or contributions failed%s, or were not finite, and count as nothing; "
                "later ones are counted in silence", self.name, broadcast.round, self.gate.dropped, raised,
            )  # fmt: skip
        return found

    def _again(self, broadcast: Broadcast, context: bytes) -> bytes:
        """The question that was answered last, under another index: the same values, to the same silos. The sum signs
        one set of survivors for both, since it is told the question."""
        if self.answer is None or self.pending is None or broadcast.accepted.get(self.name, 0) != self.past.used:
            raise ProtocolError(
                f"silo '{self.name}': round {broadcast.round} was answered already, and that answer is settled"
            )
        self._check_told(self.past, broadcast)
        index, table = broadcast.sum_index, self.program.tables[broadcast.phase]
        reply = self._sum.contribute(
            index, broadcast.cohort, table, self.answer.values, context, bytes.fromhex(self.past.answered),
            self._may_lack(self.past, broadcast), _as_bytes(self.past.shared),
            self.past.failed and self.keeps_to_itself,
        )  # fmt: skip
        self.pending, self.past = self.pending._replace(sum_index=index), self.past._replace(view=self._view(context))
        self.answer = self.answer._replace(broadcast=context, reply=reply)
        return reply

    def _check_not_failed(self, broadcast: Broadcast, digest: str) -> None:
        """Raises ProtocolError for another question than the one that this silo's data could not answer: with question
        after question a server would search for the point where one silo's values pass a bound."""
        if self.past.failed and digest != self.past.claimed and not self.keeps_to_itself:
            raise ProtocolError(
                f"silo '{self.name}': round {broadcast.round} is not answered: its data could not answer a question "
                "before, and which others they can would tell of them alone; begin another job"
            )

    def _check_told(self, past: Past, broadcast: Broadcast) -> None:
        """Raises ProtocolError where the server says that this silo's last answer that counts was to another question,
        that one's was not which stands among the survivors of a sum that was, or that more silos which were asked with
        it are behind than may be: what these then send may be nothing, and a total this silo's, or that one's, term.
        Each holds the server to its own, so that of all is known what they answered, whatever its sum's index."""
        answered = self.program.order.answered(broadcast)
        if answered.get(past.used) != past.settled:
            raise ProtocolError(f"silo '{self.name}': sum {past.used} did not answer what the server says it did")
        used = broadcast.accepted
        said = {index: answered.get(index, BEFORE_ALL) for index in {0, *used.values()}}
        taken_back = sum(said[used.get(s, 0)] < past.seen[s] for s in broadcast.cohort if s in past.seen)
        if taken_back:
            raise ProtocolError(
                f"silo '{self.name}': the server says that answers of {taken_back} silos were not used, which are "
                "among the survivors of a sum that was"
            )
        behind = sum(said[used.get(s, 0)] < past.settled for s in set(past.together).intersection(broadcast.cohort))
        if self.limits.unused is not None and behind > self.limits.unused:
            raise ProtocolError(
                f"silo '{self.name}': the server says that sum {past.used} lacks {behind} silos; its site "
                f"allows {self.limits.unused} (max_missing)"
            )

    def _check_left_out(self, broadcast: Broadcast) -> None:
        """Raises ProtocolError where the last answer of this silo was not used, says the server, in a broadcast to
        silos that were not asked with it, and so know of no sum that it would be in: unless silos signed the survivors
        of one without it. Under privacy a total has noise, whatever a silo was told."""
        if self.pending is None or not self.limits.lacking:
            return
        others = set(broadcast.cohort) - set(self.past.cohort)
        used = broadcast.accepted.get(self.name, 0) == self.pending.sum_index
        if others and not used and self._sum.left_out(bytes.fromhex(self.past.answered)) is False:
            raise ProtocolError(
                f"silo '{self.name}': the server says that sum {self.pending.sum_index} was not used, to {len(others)} "
                "silos that were not asked with it, and has not shown that silos signed survivors without this one"
            )

    def _heard(self, accepted: int) -> tuple[Past, Any]:
        """Past and local state, once the server has said whether the last answer was used."""
        past, pending = self.past, self.pending
        newest = past.used if pending is None else pending.sum_index
        if accepted not in (past.used, newest):
            whose = "this silo's state is" if accepted > newest else "the server's checkpoint is"
            raise ProtocolError(
                f"{whose} older than the other's: the server has used sum {accepted} of silo '{self.name}', which "
                f"itself knows of sums up to {newest}; a copy was restored, or the machine lost its last writes"
            )
        if pending is None:
            return past, self.local
        question, ends = bytes.fromhex(past.answered), self._phase_of(past).ends
        if accepted != newest and not ends:
            self._check_complete(newest)
        shown = self._sum.shown(question)
        if accepted == newest and shown is False:
            raise ProtocolError(
                f"silo '{self.name}': the server says that sum {accepted} was used, and has not shown that silos "
                "signed it: they may have been asked something else"
            )
        if accepted != newest and shown:
            # An honest server asks this question again until it has the sum that silos have signed.
            raise ProtocolError(
                f"silo '{self.name}': the server says that sum {newest} was not used, and has shown that silos signed "
                "it, with this one among its survivors: the others may be told that it was"
            )
        # What ends a job brings the last q, which a silo's own state follows whether the sum came about or not.
        self.decided = newest if ends else accepted
        local = self.program.commit(self.local, pending, self.decided)
        if accepted == newest:
            absent, seen = self._sum.absent_from(question), past.seen
            if absent is not None:
                seen = {**seen, **dict.fromkeys(set(past.cohort) - set(absent), past.asked)}
            return past._replace(
                used=accepted, settled=past.asked, together=past.cohort, seen=seen, shared=self._shared(past, newest),
                counted=past.counted + 1,
            ), local  # fmt: skip
        return past._replace(left_out=past.left_out + 1), local

    def _check_complete(self, newest: int) -> None:
        """Raises ProtocolError where sums are whole and the server goes on without the last one: it has that total, or
        an honest server asks this question again until it does."""
        if self._sum.whole:
            raise ProtocolError(
                f"silo '{self.name}': the server asks another question, and says that sum {newest} was not used: a sum "
                "of all or none is asked for again until it is there"
            )

    def _view(self, context: bytes) -> str:
        """Who is told another broadcast, or masks with other keys, is in no total with this silo: so of what was called
        used a total could be had, or none of a later question can."""
        return hashlib.sha256(self._sum.keys + context).hexdigest() if self._sum.whole else ""

    def _shared(self, past: Past, index: int) -> Mapping[str, str]:
        """`Past.shared` with the last answer in it, which sum `index` has used."""
        if not self._sum.whole:
            return past.shared
        before = [past.shared.get(silo, "") for silo in past.cohort]
        after = {b: shared_past(b, index, past.answered, past.view) for b in set(before)}
        return {**past.shared, **dict(zip(past.cohort, map(after.__getitem__, before), strict=True))}

    def _in_order(self, past: Past, broadcast: Broadcast, question: Question) -> Past:
        """The past with this question in it. Raises ProtocolError where it is not its turn, or is past a limit."""
        limits, phases = self.limits, self.program.order.phases
        ended = past.answers and self._phase_of(past).ends
        after = question.round == past.asked.round and phases[broadcast.phase].ends
        if question <= past.asked or (ended and not after):
            raise ProtocolError(
                f"silo '{self.name}': round {question.round}, phase '{broadcast.phase}', was answered already or is "
                "over; no other broadcast of it is answered"
            )
        phase = phases[broadcast.phase]
        answers = list(past.answers or (0,) * len(phases))
        answers[question.place] += 1
        if answers[question.place] > phase.most:
            raise ProtocolError(
                f"silo '{self.name}': phase '{broadcast.phase}' was answered {phase.most} times, as agreed"
            )
        begins = question.round > past.asked.round or not self._phase_of(past).counts
        rounds = past.rounds + (begins or not phase.counts)
        if limits.rounds is not None and rounds > limits.rounds:
            raise ProtocolError(
                f"silo '{self.name}': {limits.rounds} rounds were answered, and its site allows no more"
            )
        if limits.left_out is not None and past.left_out > limits.left_out + past.counted // _MAKES_UP:
            raise ProtocolError(
                f"silo '{self.name}': {past.left_out} of its answers were not used, and its site allows no more"
            )
        past = past._replace(
            differences=past.differences + self._lacked(past) + self._skipped(past, question),
            final=self._final(past, broadcast),
        )
        differences = past.differences + self._differs(past, broadcast)
        return past._replace(asked=question, answers=tuple(answers), rounds=rounds, differences=differences)

    def _final(self, past: Past, broadcast: Broadcast) -> str:
        """`Past.final`. Raises ProtocolError where a sum after the final one names other parameters than that did: each
        would show a likelihood elsewhere, at thousands of points. One whose broadcasts have no such parameters shows
        none."""
        order = self.program.order
        if not order.phases[broadcast.phase].ends:
            return past.final
        first = next(name for name, phase in order.phases.items() if phase.ends)
        form = order.forms[first]
        if not form.tensors.keys() <= order.forms[broadcast.phase].tensors.keys():
            return past.final
        named = broadcast._replace(
            phase=first, scalars={name: broadcast.scalars[name] for name in form.scalars},
            tensors={name: broadcast.tensors[name] for name in form.tensors},
        )  # fmt: skip
        digest = question_digest(named).hex()
        if broadcast.phase != first and digest != past.final:
            raise ProtocolError(
                f"silo '{self.name}': phase '{broadcast.phase}' names other parameters than phase '{first}' did, or "
                "that one was not asked"
            )
        return digest

    def _lacked(self, past: Past) -> bool:
        """Whether the total of the last question answered lacks silos, and its cohort did not: a difference as well. It
        lacks this one where its answer was not used, whoever was shown that: else each would count another's alone."""
        if not self.limits.lacking or not past.answered or not past.whole:
            return False
        return past.left_out > self.past.left_out or bool(self._sum.absent_from(bytes.fromhex(past.answered)))

    def _skipped(self, past: Past, question: Question) -> int:
        """How many questions of the job's rounds since its last answer this silo was not asked, though the job asks it:
        they are differences as well, which others count. Raises ProtocolError for more than its own site allows."""
        limits, order, skipped = self.limits, self.program.order, 0
        if not limits.lacking:
            return 0
        most = limits.differences - past.differences if limits.missing else 0
        for at, phase in order.between(past.asked, question):
            skipped += self.name in order.cohort(at.round, phase)
            if skipped > max(most, 0):
                raise ProtocolError(
                    f"silo '{self.name}': it was not asked in round {at.round}, and the job asks it: a total without "
                    f"it, past the {limits.differences} that its site allows (max_missing, max_differences)"
                )
        return skipped

    def _phase_of(self, past: Past) -> Phase:
        """That of the last question answered."""
        return list(self.program.order.phases.values())[past.asked.place]

    def _may_lack(self, past: Past, broadcast: Broadcast) -> int | None:
        """How many of the cohort the total may lack, by this site's limits; None for as many as its sums allow. Cohort
        and total together lack no more silos than a total may, and no more totals lack any than the site allows."""
        limits = self.limits
        if not limits.lacking:
            return None
        if not self.program.order.phases[broadcast.phase].counts:
            return 0
        short = len(self.program.order.cohort(broadcast.round, broadcast.phase)) - len(broadcast.cohort)
        return max(0, limits.missing - short) if short or past.differences < limits.differences else 0

    def _differs(self, past: Past, broadcast: Broadcast) -> bool:
        """Whether a silo is missing that the job asks. Raises ProtocolError for a cohort that the site forbids."""
        cohort, limits = broadcast.cohort, self.limits
        asked = self.program.order.cohort(broadcast.round, broadcast.phase)
        if cohort == asked:
            return False
        missing = len(asked) - len(cohort)
        if len(set(cohort)) != len(cohort) or not set(cohort) <= set(asked) or not missing:
            raise ProtocolError(f"silo '{self.name}': the cohort is not the one that the job asks in this round")
        if not self.program.order.phases[broadcast.phase].counts:
            raise ProtocolError(
                f"silo '{self.name}': the cohort lacks {missing} silos, and phase '{broadcast.phase}' is asked of all "
                "or of none, whatever its site lets rounds lack"
            )
        if missing > limits.missing:
            raise ProtocolError(
                f"silo '{self.name}': the cohort lacks {missing} silos of those that the job asks; its site allows "
                f"{limits.missing} (max_missing)"
            )
        if past.differences >= limits.differences:
            raise ProtocolError(
                f"silo '{self.name}': the cohort lacks {missing} silos, and after {past.differences} such rounds its "
                f"site allows no more (max_differences): totals over other cohorts differ by single silos' terms"
            )
        return True

    def _tell(self, past: Past) -> None:
        """Of what the question showed, before its answer leaves."""
        if past.left_out > self.past.left_out:
            self.on_event("left out", f"sum {self.pending.sum_index if self.pending else 0}: {past.left_out} in all")
        if past.differences > self.past.differences:
            self.on_event("difference", f"round {past.asked.round} lacks silos: {past.differences} such rounds in all")


@functools.lru_cache(maxsize=1)
def _read(body: bytes, asked: Callable[[int, str], tuple[str, ...]], longest: int) -> tuple[Broadcast, str]:
    """A broadcast, and its question's digest in hex. All silos of one process are sent the same, of one job: the newest
    is read once. It is public."""
    broadcast = decode_broadcast(body, asked, longest)
    return broadcast, question_digest(broadcast).hex()


def shared_past(before: str, index: int, answered: str, view: str) -> str:
    """What two silos were asked together, as one digest in hex, once sum `index` has used what both answered to the
    question of digest `answered` under the `view` (`Past.view`); `before` is the same of all before it, or nothing."""
    parts = bytes.fromhex(before), index.to_bytes(8, "big"), bytes.fromhex(answered), bytes.fromhex(view)
    return hashlib.sha256(_SHARED + b"".join(parts)).hexdigest()


def _as_bytes(shared: Mapping[str, str]) -> dict[str, bytes]:
    """`Past.shared` for the sum."""
    known = {digest: bytes.fromhex(digest) for digest in set(shared.values())}  # of most silos one and the same
    return {silo: known[digest] for silo, digest in shared.items()}


# ---- What a silo's half of a horizontal algorithm works on, from the silo's data. Never leaves the silo ----

_SPARE_ID = -2


def made_start(problem: Problem, size: int) -> Start:
    """Where the latents of `size` records and a spare one begin by made data."""
    start = problem.start
    return start._replace(z_record=start.z_record[:1].expand(size + 1, -1))


def silo_view(
    silo: str,
    problem: Problem,
    records: Records,
    ids: npt.NDArray[np.int64],
    secret: bytes,
    unfit: Callable[[Exception], None] | None = None,
) -> SiloView:
    """Records with one spare row of weight zero at the end, and the silo's draws.

    The spare row is a copy of the first; under record privacy it is made, since it stands beside every record.
    unfit: is told of records that do not fit the model, with which it goes on all the same, from where a fit of made
    data would begin: under record privacy, each of them counts as much as the gate lets it.
    """
    if ids.shape != (records.size,):
        raise InputError(f"silo '{silo}': {ids.shape[0]} record ids for {records.size} records")
    different, counts = np.unique(ids, return_counts=True)
    if len(different) != len(ids) or (ids < 0).any():
        bad = int((np.isin(ids, different[counts > 1]) | (ids < 0)).sum())
        raise DataError(
            f"silo '{silo}': record ids must be different whole numbers of at least 0; in {bad} of {len(ids)} rows "
            "they are not"
        )
    made: dict[str, torch.Tensor] = {}
    if isinstance(problem.privacy, RecordDP):
        made = problem.schema.dummy_rows(1)
    rows = {name: torch.cat([t, made.get(name, t[:1]).to(t)]).to(problem.device) for name, t in records.rows.items()}
    weights = torch.ones(records.size + 1, dtype=problem.dtype, device=problem.device)
    weights[-1] = 0.0
    keyed = np.append(ids, _SPARE_ID)
    start = made_start(problem, records.size)
    try:
        start = problem.density.start_at(problem, rows, records.size, silo) if records.size else start
    except Exception as error:
        if unfit is None:
            raise
        unfit(error)
    return SiloView(
        silo,
        rows,
        weights,
        records.size,
        start,
        KeyedDraws(secret, b"records", keyed),
        KeyedDraws(secret, b"batches", keyed),
        KeyedDraws(secret, b"joining/" + silo.encode(), np.array([UNIT_ID])),
        KeyedDraws(secret, b"silo/" + silo.encode(), np.array([UNIT_ID])),
        KeyedDraws(secret, b"hiding/" + silo.encode(), np.array([UNIT_ID])),
    )
