"""What a job discloses: one statement, derived from its resolved options, by which every engine and every policy goes.

    disclose(algorithm, aggregation, privacy, silos)   from the options, before a model is traced or a record is read
    Disclosure.of_program(tables, terms, aggregation)  with the blocks and the noise, once the model is traced

An algorithm declares its sums (`Declaration`); what no engine accepts is refused here and nowhere else. A site's policy
judges the statement (deployment.policy_check), and the silo's gate holds the program to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from secure_fvi.aggregation.base import UNABLE, Block, BlockTable, Form, SecureSum
from secure_fvi.errors import InputError
from secure_fvi.privacy.settings import DP, RecordDP, SiloDP, exact_totals
from secure_fvi.privacy.terms import BELOW_NORM, Terms

if TYPE_CHECKING:
    from secure_fvi.runs.config import Engine

#: all: every silo is asked. sampled: a part, by a coin that all can toss from the job's seed. asynchronous: whose fits
#: are done first. sequential: one after the other.
Cohort = Literal["all", "sampled", "asynchronous", "sequential"]

#: What a policy has to allow by name, since it says more than exact or noised totals over one set of silos do.
DISCLOSURES = {
    "per_silo_rows": "a total has a row a silo: the server reads each silo's own values in it",
    "person_rows": "a total has a row a person, without noise: where the auxiliary variables are integrated out the "
    "totals of some rounds give the server and every silo, which need to know nobody, linear columns of yes and no "
    "exactly for each person, whatever the number of silos, and other columns nearly; whoever knows a silo's predictor "
    "for most of the people learns it for the others (R^2 1.00 measured, .1 to .9 in the other families: auxiliary "
    "kind 'amortised'; [privacy] alone bounds all of this), and where "
    "two silos hold columns, not three, each learns the other's at once; whoever knows a person's columns learns "
    "whether it takes part; the broadcasts tell everybody's response, classes and counts exactly, unless the silos "
    "alone know it",
    "single_silos": "a sum is of one silo alone, or the job's sums are equations for each: the server, and with the "
    "next broadcasts all silos, learn its term",
    "changing_cohorts": "exact sums over a part of the silos that changes from sum to sum: their differences come "
    "close to single silos' terms, and a server that asks the same in each solves for these",
    "final_likelihood": "after the rounds, the exact log-likelihood of all records together at up to some thousand "
    "points near q, and all over the prior, which tells its shape there, and of few records, where it has kinks, each "
    "one's values",
    "sampled_records": "exact sums that rest on few records, drawn anew each time: the fewer, the closer to one's own",
    "exact_counts": "the number of records without noise, beside numbers with noise",
    "objective": "the bound, with noise that the same epsilon pays for",
    "adaptive_clipping": "the share of silos below the clipping norm, with noise that the same epsilon pays for",
}
#: Of a job whose silos hold columns of the same people: who learns their response, by the algorithm's option.
LABELS = {
    "shared": "the server has it and tells it to every silo",
    "private": "the server has it; every silo is told each person's slope of the likelihood, which tells classes "
    "and counts exactly, and other numbers nearly, by the first rounds",
    "noised": "the server has it; every silo is told each person's slope of the likelihood, clipped and noised, for "
    "which the server's own ledger is charged with as much as each silo's is for its columns",
    "silos": "one silo has it and tells it to every other, sealed, so that the server is never told; the server sees "
    "the sum of predictors round after round, which says of each person what the fitted model says (of the labels, a "
    "number a column, by how it moves), and q(gamma) at the end, by whose digits one that knows all labels but a few "
    "has these; one that names other sums than there were reads those of some people of its choice off it, and learns "
    "more from what silos then add up",
}
_POINT = ("its own copy",)
#: Words for each block, one of which has to stand in what its phase is declared to be. Names end where a "/" stands.
WORDS = {
    "direct": ("gradients",), "path": ("gradients",), "curvature": ("curvature",),
    "lengths": ("how long",),
    "theta": ("parameters", "its site"), "eta": _POINT,
    "objective": ("that part", "part of the bound", "part of the objective"), "records": ("number of records",),
    "silos": ("weight", "number of records"), "value": ("part of the bound", "part of the log-likelihood"),
    "slope": ("slope",), "curve": ("slope",), "weighed": ("log-likelihood",),
    "refined": ("log-likelihood",), "replicated": ("replicates",), "gamma": ("gamma",),
    "loc": _POINT, "sd": _POINT, "root": (*_POINT, "covariance"), "weights": _POINT, "means": _POINT, "spreads": _POINT,
    "change": ("change of its site", "change of q"), "skipped": ("could not fit", "could fit"),
    "tempered": ("tempered",), "moving": ("would move q",),
    "distortion": ("part of the objective",), "rate": ("part of the objective",),
    "auxiliary": ("auxiliary",), "local": ("part of the objective",), "unsettled": ("settled", "drift"),
    "mass": ("weight",),
}  # fmt: skip
#: Blocks that a phase sums only where it says `likelihood`.
_OF_LIKELIHOOD = ("weighed", "refined")
#: An exact sum that rests on a smaller share of the records than this is "sampled_records".
FEW = 0.5


@dataclass(frozen=True)
class Sums:
    """The sums of one phase, as an algorithm declares them.

    at_most: so many in a job, iterations within a round counted, retries not. what: of a silo's term, in words.
    asked: silos in each, at least. besides: they are in no round, but before or after them, and lack nobody.
    likelihood: they tell the log-likelihood of the records at points near the final q, without noise.
    """

    phase: str
    at_most: int
    what: str
    asked: int
    cohort: Cohort = "all"
    besides: bool = False
    likelihood: bool = False


@dataclass(frozen=True)
class Declaration:
    """What an algorithm's sums are, whatever the model.

    rounds: at most. keeps: what stays at a silo, in words. rows: a total has a row a silo. share: of its records on
    which one step of a silo's term rests, at least, in expectation: at some learning rates a last step leaves nothing
    of those before it, so that what they saw does not count. because: the options, with their values, by which it shows
    single silos' terms, or asks a part of them. shows: whether another option says that it may show these. people: a
    total has a row a person, of columns that silos hold of the same people. labels: who
    learns their response, in words. follows: the units under whose privacy a silo's state follows what it released, the
    noise that it added itself in it. within: whether noise is in the steps of a silo's own fit, of which no sum adds
    shares up, and no server sees one.
    """

    rounds: int
    sums: tuple[Sums, ...]
    keeps: str
    rows: bool = False
    share: float = 1.0
    because: str = ""
    shows: bool = False
    people: bool = False
    labels: str = ""
    follows: frozenset[str] = frozenset()
    within: bool = False


class Declares(Protocol):
    """What this file needs to know of an algorithm."""

    @property
    def name(self) -> str: ...

    def declare(self, silos: int, private: bool) -> Declaration: ...


def drawn(silos: int, participation: float) -> tuple[int, Cohort]:
    """`asked` and `cohort` of sums over a share of the silos that is drawn by a public coin."""
    asked = max(1, round(participation * silos))
    return asked, "all" if asked == silos else "sampled"


@dataclass(frozen=True)
class Phase:
    """The sums of one phase of a job. blocks and terms are None before the model is traced; terms stay so without
    differential privacy. at_least: silos in a total, after losses; 1 where single terms are seen anyway."""

    phase: str
    at_most: int
    what: str
    asked: int
    cohort: Cohort
    at_least: int
    besides: bool = False
    likelihood: bool = False
    blocks: tuple[Block, ...] | None = None
    terms: Terms | None = None

    def exact(self) -> tuple[str, ...]:
        """Blocks without noise; () before they are known."""
        if self.blocks is None:
            return ()
        if self.terms is None:
            return tuple(b.name for b in self.blocks)
        return tuple(b.name for b in self.blocks[self._noised :])

    @property
    def _noised(self) -> int:
        """How many of the blocks carry noise: all but the counts that were declared public, which come last."""
        assert self.blocks is not None
        assert self.terms is not None
        left, count = self.terms.extent.shared + self.terms.extent.side, 0
        while left > 0:
            left -= self.blocks[count].size
            count += 1
        return count


@dataclass(frozen=True)
class Disclosure:
    """What a job tells whom. Public: all parties derive the same.

    kind: of the sums; "masked-unchecked" and "homomorphic-unmasked" are the weaker forms. lacking: silos that a total
    may lack by the option that says so: shares are dealt for as many, whether or not any total lacks one. differences:
    exact sums of its rounds that may. withstands: silos that a lying server may have in league before a sum shows it a
    single term, all others where that is so of any number; 0 where sums have no masks. uncounted: why no posterior of a
    private job will count the noise, where its program is known and tells it.
    """

    algorithm: str
    kind: str
    silos: int
    rounds: int
    phases: tuple[Phase, ...]
    keeps: str
    rows: bool
    share: float
    privacy: DP | None
    lacking: int = 0
    differences: int = 0
    people: bool = False
    labels: str = ""
    withstands: int = 0
    uncounted: str = ""

    @property
    def exact(self) -> bool:
        """Whether the server sees totals without noise: what limits these, limits this job."""
        return exact_totals(self.privacy)

    @property
    def besides(self) -> int:
        """Sums that are in no round."""
        return sum(p.at_most for p in self.phases if p.besides)

    @property
    def single(self) -> bool:
        """Whether some sum is of one silo alone, of several."""
        return any(p.asked == 1 < self.silos for p in self.phases)

    @property
    def solvable(self) -> bool:
        """Whether exact sums of an honest job are equations for single silos' terms. Asynchronous ones are: what a
        silo's site lacks shrinks by known factors, and with it the silo's share of the next sum."""
        return self.exact and any(p.cohort == "asynchronous" and p.asked < self.silos for p in self.phases)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which of `DISCLOSURES` this job makes."""
        dp = self.privacy
        found = {
            "per_silo_rows": self.rows,
            "person_rows": self.people and self.exact,
            "single_silos": self.single or self.solvable,
            "changing_cohorts": self.exact and any(1 < p.asked < self.silos for p in self.phases),
            "final_likelihood": self.exact and any(p.likelihood for p in self.phases),
            "sampled_records": self.exact and self.share < FEW,
            "exact_counts": isinstance(dp, RecordDP) and dp.public_counts,
            "objective": isinstance(dp, RecordDP) and dp.objective_share > 0,
            "adaptive_clipping": isinstance(dp, SiloDP) and dp.target_quantile is not None,
        }
        return tuple(name for name in DISCLOSURES if found[name])

    @property
    def at_least(self) -> int:
        """Silos in the smallest total that may come about."""
        return min(p.at_least for p in self.phases)

    @property
    def missing(self) -> int:
        """Silos that were asked and that a total may lack, at most."""
        return max(p.asked - p.at_least for p in self.phases)

    @property
    def learn(self) -> tuple[str, ...]:
        """Who learns a total."""
        who = ["the server", "every silo, since each broadcast follows from the totals before it"]
        return (*who, "the key holder") if self.kind == "homomorphic-unmasked" else tuple(who)

    def of_program(
        self, tables: Mapping[str, BlockTable], terms: Mapping[str, Terms], aggregation: SecureSum
    ) -> Disclosure:
        """The statement with blocks and noise. Raises InputError where the program goes beyond what was declared, or
        where the sums cannot carry its blocks."""
        declared = {p.phase: p for p in self.phases}
        for name, table in tables.items():
            if name not in declared:
                raise InputError(f"{self.algorithm} has a phase '{name}' that it does not declare")
            rows = [b.name for b in table.blocks if b.rows == "silo"]
            if rows and not self.rows:
                raise InputError(f"{self.algorithm} has a row a silo in '{rows[0]}', which it does not declare")
            if self.privacy is not None and name not in terms:
                raise InputError(f"phase '{name}' of {self.algorithm} has no terms of its privacy")
            own, planned = declared[name], terms.get(name)
            if planned is not None and (planned.rounds, planned.cohort) != (own.at_most, own.asked):
                raise InputError(
                    f"phase '{name}' of {self.algorithm} plans its noise for {planned.rounds} sums of {planned.cohort} "
                    f"silos, and declares {own.at_most} of {own.asked}"
                )
            for b in table.blocks:
                if b.rows == "presence" or b.name in (BELOW_NORM, UNABLE.name):  # said of all sums, and by `kinds`
                    continue
                kind = b.name.split("/")[0]
                said = any(word in own.what for word in WORDS.get(kind, ()))
                if not said or (kind in _OF_LIKELIHOOD and not own.likelihood):
                    raise InputError(f"{self.algorithm} sums '{b.name}' in phase '{name}', which it does not declare")
        if (codec := aggregation.codec(self.silos)) is not None:
            for name, table in tables.items():
                steps = codec(table).resolution
                if name in terms:
                    terms[name].check_rounding(steps)
        phases = tuple(
            dataclasses.replace(p, blocks=tables[p.phase].blocks, terms=terms.get(p.phase))
            for p in self.phases
            if p.phase in tables
        )
        return dataclasses.replace(self, phases=phases)


def disclose(algorithm: Declares, aggregation: SecureSum, privacy: DP | None, silos: int) -> Disclosure:
    """What a job of these options over `silos` silos discloses. Raises InputError for what no engine runs."""
    kind: Any = getattr(aggregation, "form", None)
    if kind not in get_args(Form):
        named = getattr(aggregation, "kind", None) if not isinstance(aggregation, type) else None
        raise InputError(
            f"aggregation {named or aggregation!r}: nobody has said what such sums disclose; give sf.Plain(), "
            "sf.Masked() or sf.Homomorphic()"
        )
    if isinstance(algorithm, type) or not hasattr(algorithm, "declare"):
        raise InputError(f"algorithm must be one, such as sf.PVI(), not {algorithm!r}")
    declared = algorithm.declare(silos, privacy is not None)
    phases = tuple(Phase(**dataclasses.asdict(s), at_least=_at_least(s, aggregation, privacy)) for s in declared.sums)
    found = Disclosure(
        algorithm.name, kind, silos, declared.rounds, phases, declared.keeps, declared.rows, declared.share, privacy,
        people=declared.people, labels=declared.labels,
    )  # fmt: skip
    lacking = getattr(aggregation, "max_missing", 0) if found.exact else found.missing
    found = dataclasses.replace(found, lacking=lacking if kind != "plain" else 0)
    if found.exact and found.missing:
        found = dataclasses.replace(found, differences=getattr(aggregation, "max_differences", 0))
    if (masks := aggregation.beneath(64)) is not None and kind != "homomorphic-unmasked":
        recovers = found.lacking > 0 or kind == "homomorphic"
        found = dataclasses.replace(found, withstands=masks.withstands(silos, recovers))
    if kind != "plain":
        _check_hidden(found, aggregation, declared)
    if privacy is not None and privacy.noise != "silo" and declared.within:
        raise InputError(
            f"noise = '{privacy.noise}' with noise in the steps of a silo's own fit (private = 'steps'): no sum adds "
            "up shares there, and no server sees the steps; use noise = 'silo'"
        )
    if privacy is not None and privacy.noise == "distributed":
        if kind == "plain":
            raise InputError(
                "noise = 'distributed' needs a masked or homomorphic sum: in a plain one each share of noise stands "
                "alone"
            )
        if kind == "homomorphic-unmasked":
            raise InputError("noise = 'distributed' needs exact sums with masks: use scheme = 'bfv' with masks")
        _check_colluders(found, aggregation, privacy)
        _check_follows(found, declared, privacy)
    if kind == "homomorphic-unmasked" and privacy is not None and privacy.noise == "server":
        raise InputError(
            "noise = 'server' needs sums that the server alone opens: without masks the key holder sees totals before "
            "that noise. Use scheme = 'bfv' with masks, or noise = 'silo'"
        )
    return found


def _check_colluders(found: Disclosure, aggregation: SecureSum, privacy: DP) -> None:
    """Whoever opens one silo's own term finds its share of the noise there, and no more."""
    shares = min(p.asked for p in found.phases) - privacy.dropouts - privacy.colluders
    if shares <= 1:  # each silo adds all of the noise
        return
    recovers, most = found.lacking > 0 or found.kind == "homomorphic", found.withstands
    if privacy.colluders > most:
        raise InputError(
            f"colluders = {privacy.colluders} with noise = 'distributed': {aggregation.kind} sums of {found.silos} "
            f"silos{' that may lack some' if recovers else ''} withstand {most} in league with a lying server; more "
            f"would open a single silo's term, which has one of {shares} shares of the noise. Plan for {most}, let no "
            "silo be lost (dropouts = 0, masked sums), assume more (aggregation.corrupt, over 32 silos), or take "
            "noise = 'silo'"
        )


def _check_follows(found: Disclosure, declared: Declaration, privacy: DP) -> None:
    """Where a silo's state follows its own share of the noise, the totals after tell of the shares before, and with
    them of what these covered. An answer that does so undeclared is refused (`algorithms.kit`)."""
    shares = min(p.asked for p in found.phases) - privacy.dropouts - privacy.colluders
    if privacy.unit in declared.follows and shares > 1 and any(p.at_most > 1 for p in found.phases):
        raise InputError(
            f"noise = 'distributed' with more than one round of {found.algorithm}: a silo's state follows what it "
            f"released, with one of {shares} shares of the noise in it, so that totals of later rounds tell of the "
            "noise in earlier ones; use noise = 'silo', rounds = 1, or sfvi"
        )


def check_carried(found: Disclosure, engine: Engine) -> None:
    """Raises InputError where the way in which a job is carried does not go with what it discloses."""
    if engine.on_loss == "drop" and found.exact and not found.missing:
        raise InputError(
            f"engine.on_loss = 'drop': no sum of this job may lack a silo, since each asks {found.at_least} and needs "
            f"{found.at_least}; use on_loss = 'wait', or let sums lack some (aggregation.max_missing, max_differences)"
        )


def _check_hidden(found: Disclosure, aggregation: SecureSum, declared: Declaration) -> None:
    because = declared.because
    if found.solvable and not declared.shows:
        raise InputError(
            f"{found.algorithm} makes sums over parts of the silos ({because}) that are equations for each silo's "
            f"own term: the server can solve them, {aggregation.kind} or not. Say reveal_changes = true to accept "
            "this, ask all silos (schedule = 'synchronous'), or use noise that the server does not add"
        )
    if found.rows or found.single:
        raise InputError(
            f"{found.algorithm} is to show the server each silo's own term ({because}); a {aggregation.kind} sum would "
            "hide it in name only. Use a plain sum, or take that option back"
        )
    least = getattr(aggregation, "min_cohort", 1)
    for p in found.phases:
        if p.asked < min(least, found.silos):
            raise InputError(
                f"{found.algorithm} asks {p.asked} of {found.silos} silos in phase '{p.phase}' ({because}), and a "
                f"{aggregation.kind} sum refuses fewer than min_cohort = {least}; ask more, or lower min_cohort"
            )


def _at_least(sums: Sums, aggregation: SecureSum, privacy: DP | None) -> int:
    """Silos that a total has after losses: under distributed noise all but its dropouts, and where each silo adds all
    of the noise, any down to min_cohort."""
    asked, least = sums.asked, getattr(aggregation, "min_cohort", 1)
    if aggregation.kind == "plain":
        return 1
    missing: int = getattr(aggregation, "max_missing", asked)
    if privacy is not None and not exact_totals(privacy):
        missing = privacy.dropouts if privacy.noise == "distributed" else asked
    elif sums.besides or not getattr(aggregation, "max_differences", 0):
        missing = 0
    return min(max(least, asked - missing), asked)
