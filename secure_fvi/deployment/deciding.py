"""A site's answer to a job offer: roster, signature, policy and model are checked, and the decision is written down."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from typing import Any, NamedTuple

from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.countersigning import own_ledger
from secure_fvi.deployment.fence import UNFENCED
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.job import JobOffer, read_offer
from secure_fvi.deployment.model_hash import package_digest
from secure_fvi.deployment.names import printable
from secure_fvi.deployment.policy import DataRule, SitePolicy, read_policy
from secure_fvi.deployment.policy_check import check
from secure_fvi.deployment.trail import MATCHED, JobEntry, Trail, TrailChain
from secure_fvi.errors import (
    InputError,
    PolicyError,
    ProtocolError,
    SecureFVIError,
    SessionLost,
    told,
)
from secure_fvi.files import own_files
from secure_fvi.privacy.settings import RecordDP, exact_totals
from secure_fvi.runs.config import Config, Model, chosen
from secure_fvi.runs.records import formula_columns, formula_families, site_dictionary
from secure_fvi.silo import UNANSWERABLE

#: The outcome (`Trail.close_job`) after which a job's id is spent; a job with any other may go on.
FINISHED = "finished"
#: How a server may say that a job ended; what a site's log has of it.
OUTCOMES = tuple(f"{FINISHED}, {state}" for state in ("converged", "not converged", "not assessed"))


def over(outcome: str | None) -> bool:
    """Whether a job that a log has as `outcome` has finished, converged or not."""
    return outcome is not None and outcome.split(",")[0] == FINISHED


def stated_policy(home: Home, job: str, policy: bytes) -> bytes:
    """The digest (32 bytes) by which a site tells the server under which policy, which its log calls `policy`, it
    accepted a job: the site can tell whether it is right, and who has none of its keys cannot try policies against it.
    """
    said = b"secure-fvi/stated-policy/1/" + policy + job.encode()
    return hashlib.blake2b(said, key=home.state_secret(), digest_size=32).digest()


def logged_policy(home: Home, policy: bytes) -> bytes:
    """What this site's log calls the policy of hash `policy`, likewise: the server, which countersigns the log, has a
    digest of every row."""
    return stated_policy(home, "", policy)


class Decision(NamedTuple):
    """An accepted job, with the files of this site that it may use."""

    offer: JobOffer
    roster: ConsortiumRoster
    policy: SitePolicy
    data: DataRule | None  # None at a key holder
    matched: bool = False  # whether people were matched for the job before, as the site's log has it
    exact_jobs: int = 0  # without differential privacy, that the site has answered on this data set before
    charged: int = 0  # answers of the job that its ledger was charged for, as the site's log has it
    answered: int = 0  # broadcasts of the job that it has answered, one that was sent again as often, likewise

    def stated_policy(self, home: Home) -> bytes:
        """Under which policy, as the server hears it."""
        return stated_policy(home, self.offer.job, logged_policy(home, self.policy.hash))

    def local_config(self, site: str) -> Config:
        """The job's configuration with this site's own model, data and predictor in place of `AT_SITE`."""
        config, rule = self.offer.config, self.policy.models.get(self.offer.model)
        assert self.data is not None, "a key holder runs no model"
        own = {k: getattr(self.data, k) for k in ("predictor", "dictionary", "query", "tables", "missing")}
        own |= {"complete": self._complete, "fitting": self._fitting}
        silos = tuple(
            s.model_copy(update={"data": self.data.path or s.data, **own}) if s.id == site else s for s in config.silo
        )
        model = config.model
        if model.function is not None:
            assert rule is not None, "a function of a file is agreed to by its hash"
            model = model.model_copy(update={"function": rule.function})
        return config.model_copy(update={"silo": silos, "model": model})

    @property
    def _complete(self) -> tuple[str, ...]:
        """Of a formula whose totals the server sees exactly, where rows with a gap are left out, as they always are
        under record privacy: the columns of all formulas that the policy lists, or all, where it lists any, or a model
        by its hash: a program reads all of them. Were it this formula's alone, totals of two would differ by the rows
        that have a gap in one's columns."""
        data = self.data
        if not self._exact_formula or data is None or data.dictionary is None:
            return ()
        if data.missing != "drop" and not isinstance(chosen(self.offer.config)[2], RecordDP):
            return ()
        try:
            own = site_dictionary(data.dictionary)
        except InputError:  # which whoever reads the table says
            return ()
        found = set(own.columns) if self.policy.models else set[str]()
        for text in (text for rule in self.policy.formulas for text in rule.formulas):
            if text == "any":
                found.update(own.columns)
                continue
            with contextlib.suppress(InputError):  # of other columns: of another data set
                found.update(formula_columns(text, own))
        return tuple(sorted(found))

    @property
    def _fitting(self) -> tuple[Model, ...]:
        """Likewise, where records that do not fit are left out, as record privacy does: all formulas that the policy
        lists, with each family that it has and as many rows of a record as it says. Were it this job's alone, totals of
        two would differ by the record that fits one of them."""
        config, data = self.offer.config, self.data
        if not self._exact_formula or not isinstance(chosen(config)[2], RecordDP):
            return ()
        if data is None or data.dictionary is None:
            return ()
        found = []
        for rule in self.policy.formulas:
            record = config.model.options.get("record") if rule.record == "any" else rule.record
            options: dict[str, Any] = {"most": rule.most} if rule.most != "any" else {}
            options |= {"record": record} if record is not None else {}
            families = formula_families() if "any" in rule.families else rule.families
            said = [(text, family) for text in rule.formulas if text != "any" for family in families]
            found += [Model(formula=t, family=f, dictionary=data.dictionary, options=options) for t, f in said]
        return tuple(found)

    @property
    def _exact_formula(self) -> bool:
        """Whether the job is of a formula, and the server sees its totals exactly."""
        return self.offer.config.model.formula is not None and exact_totals(chosen(self.offer.config)[2])


def decide(home: Home, message: bytes, trail: Trail, now: datetime.datetime, *, met: bool) -> Decision:
    """Accept the job offer in `message`, or raise ProtocolError or PolicyError with the reason; SessionLost, so that
    the server begins again, for a job that is new here where records were not countersigned just before (`met`): they
    may have been restored from a copy, of which the server could tell.

    An id stands for one offer: another offer of the same id is refused, and so is one of a job that has `FINISHED`.
    Either way the log says so before this returns. What the job will cost is the ledger's question, and how much noise
    it adds `policy_check.check_terms`'s; both come once the model is traced. RecordError where this site's own roster
    cannot be read.
    """
    with own_files():
        roster = home.roster(now)
    try:
        policy = read_policy(home.policy_file)
    except InputError as error:  # which names files; it may be half written, and is nobody else's fault
        raise PolicyError("this site's policy cannot be read; the site's log says more") from error
    if trail.chain.roster != roster.hash:
        trail.roster(roster.serial, roster.hash)
    logged = logged_policy(home, policy.hash)
    if trail.chain.policy != logged:
        trail.policy(logged)
    try:
        jobs = trail.chain.jobs
        accepted = {r.fields["offer"] for r in jobs.values() if r.accepted}
        offer = read_offer(message, roster, home.id, now, accepted)
        speaking = next(iter(roster.of_role("server")))
        if offer.server != speaking.id:  # another server's offer is not this one's to hand on
            raise ProtocolError(
                f"an offer of '{offer.server}', where '{speaking.id}' is the server that is listened to"
            )
        before = jobs.get(offer.job)
        if before is not None and (before.accepted or before.begun) and before.fields["offer"] != offer.hash:
            raise ProtocolError(f"job '{offer.job}' was accepted with another offer; a new job needs a new id")
        if before is not None and over(before.outcome):
            raise ProtocolError(f"job '{offer.job}' has finished; its offer was sent again")
        again = before is not None and before.accepted and before.fields["policy"] == logged
        if trail.full and not again:
            raise ProtocolError(f"job '{offer.job}': this site was asked too often today; offer it again tomorrow")
    except Exception as error:
        trail.note("", f"a job offer was refused: {_reason(error)}")
        raise
    try:
        data = check(offer, policy, home.role, roster, home.id)
        if home.role == "silo":
            check_records(home, offer, trail.chain, policy, data)
    except Exception as error:
        trail.job(job_entry(offer, logged, accepted=False, reason=_reason(error)))
        raise
    if not met and (before is None or not (before.accepted or before.exchanges)):
        raise SessionLost(f"job '{offer.job}' is new to '{home.id}', and its records were not countersigned first")
    matched = before is not None and MATCHED in before.omissions
    exact = sum(r.broadcasts > 0 and r.fields["epsilon"] is None for r in trail.chain.on(offer.data_set).values())
    charged = 0 if before is None else before.releases
    answered = 0 if before is None else before.broadcasts
    found = Decision(offer, roster, policy, data, matched, exact, charged, answered)
    if trail.full:  # it goes on, by a row that is there
        return found
    trail.job(job_entry(offer, logged, accepted=True))
    if home.role == "silo":
        trail.note(
            offer.job,
            f"secure_fvi here has digest {package_digest().hex()}, at the server {offer.package.hex()}",
            always=True,
        )
        if offer.config.model.function is not None and policy.sandbox == "off":
            trail.note(offer.job, UNFENCED, always=True)
    return found


def _reason(error: Exception) -> str:
    """For the log, which has a row of every offer, whatever kept it from being read, and which others read too."""
    return printable(told(error)) if isinstance(error, SecureFVIError) else f"{type(error).__name__}, unforeseen"


def check_records(home: Home, offer: JobOffer, log: TrailChain, policy: SitePolicy, data: DataRule | None) -> None:
    """Raises PolicyError or ProtocolError for what this site's log and ledger have against a job that its policy lets
    in. Needs no key."""
    _check_answered(offer, log, policy)
    _check_matched(offer, log, data)
    _check_ledger(home, offer, log)


def _check_answered(offer: JobOffer, log: TrailChain, policy: SitePolicy) -> None:
    """Raises PolicyError where too many jobs met records that could not answer them: whether they can is a bit of them,
    and a server that offers job after job would search for where it turns."""
    jobs = log.on(offer.data_set).items()
    met = [name for name, record in jobs if name != offer.job and UNANSWERABLE in record.omissions]
    if len(met) >= policy.max_unanswered:
        raise PolicyError(
            f"job '{offer.job}' is outside this site's policy: {len(met)} jobs asked what the records of "
            f"'{offer.data_set}' could not answer (max_unanswered = {policy.max_unanswered}), the last '{met[-1]}'; "
            "see why in the site's log, and raise it to let more in"
        )


def _check_matched(offer: JobOffer, log: TrailChain, data: DataRule | None) -> None:
    """Raises PolicyError where a data set was matched for as many jobs as it may be: each tests identifiers."""
    if offer.config.alignment is None or offer.config.alignment.how != "matching" or data is None:
        return
    jobs = {name for name, record in log.on(offer.data_set).items() if MATCHED in record.omissions}
    if offer.job not in jobs and len(jobs) >= data.matchings:
        raise PolicyError(
            f"job '{offer.job}' is outside this site's policy: data set '{offer.data_set}' was matched for "
            f"{len(jobs)} jobs (matchings = {data.matchings}), each of which tests identifiers against it"
        )


def _check_ledger(home: Home, offer: JobOffer, log: TrailChain) -> None:
    """Raises PolicyError for a job without differential privacy on a data set with a budget in the ledger: that of its
    first private job, where the policy states none. Raises ProtocolError where the ledger lacks a private job that the
    log has answers of, with which it may lack that budget, or the log one that the ledger was charged for: one of them
    is an old copy, whatever a server shows of what it has seen. A job that was let in and never answered has released
    nothing, so that the ledger need not know it: it is charged when it goes on."""
    chain = own_ledger(home)
    known = {} if chain is None else chain.jobs
    same = chain is not None and chain.public_key == log.public_key  # a log may begin anew, under a later key
    if same and (missing := [name for name in known if name not in log.jobs]):
        raise ProtocolError(
            f"the log of '{home.id}' is older than its ledger: it lacks job '{missing[0]}', which was charged; a copy "
            "was restored, put the newest one back"
        )
    answered = [n for n, r in log.jobs.items() if r.broadcasts and r.fields["epsilon"] is not None]
    if lacking := [name for name in answered if name not in known]:
        raise ProtocolError(
            f"the ledger of '{home.id}' is older than its log: it lacks job '{lacking[0]}', which was answered under "
            "privacy; a copy was restored, put the newest one back"
        )
    budget = None if chain is None else chain.budget(offer.data_set)
    if offer.config.privacy is None and budget is not None:
        raise PolicyError(
            f"job '{offer.job}' is outside this site's policy: it has no differential privacy, and the ledger has "
            f"a budget of epsilon {budget.epsilon:g} for data set '{offer.data_set}', which exact totals do not "
            "keep to"
        )


def job_entry(offer: JobOffer, policy: bytes, accepted: bool, reason: str = "") -> JobEntry:
    """What the log says of an offer; policy: its hash (32 zero bytes at a server, which has none)."""
    privacy = offer.config.privacy
    options = {} if privacy is None else privacy.options
    epsilon, delta = options.get("epsilon"), options.get("delta")
    return JobEntry(
        offer.job, offer.hash, offer.roster, offer.model, policy, accepted, reason, offer.data_set,
        float(epsilon) if isinstance(epsilon, int | float) else None,
        float(delta) if isinstance(delta, int | float) else None,
    )  # fmt: skip
