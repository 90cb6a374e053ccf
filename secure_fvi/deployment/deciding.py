"""A site's answer to a job offer: roster, signature, policy and model are checked, and the decision is written down."""

from __future__ import annotations

import datetime
from typing import NamedTuple

from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.job import JobOffer, read_offer
from secure_fvi.deployment.names import printable
from secure_fvi.deployment.policy import DataRule, SitePolicy, read_policy
from secure_fvi.deployment.policy_check import check
from secure_fvi.deployment.trail import JobEntry, Trail
from secure_fvi.errors import SecureFVIError
from secure_fvi.runs.config import Config


class Decision(NamedTuple):
    """An accepted job, with the files of this site that it may use."""

    offer: JobOffer
    roster: ConsortiumRoster
    policy: SitePolicy
    data: DataRule

    def local_config(self, site: str) -> Config:
        """The job's configuration with this site's own model, data and predictor in place of `AT_SITE`."""
        config, rule = self.offer.config, self.policy.models[self.offer.model]
        silos = tuple(
            s.model_copy(update={"data": self.data.path or s.data, "predictor": self.data.predictor})
            if s.id == site
            else s
            for s in config.silo
        )
        model = config.model.model_copy(update={"function": rule.function}) if config.model.function else config.model
        return config.model_copy(update={"silo": silos, "model": model})


def decide(home: Home, message: bytes, trail: Trail, now: datetime.datetime) -> Decision:
    """Accept the job offer in `message`, or raise ProtocolError, PolicyError or InputError with the reason.

    Either way the log says so before this returns. What the job will cost is the ledger's question, and how much noise
    it adds `policy_check.check_terms`'s; both come once the model is traced.
    """
    roster = home.roster(now)
    policy = read_policy(home.policy_file)
    if trail.chain.roster != roster.hash:
        trail.roster(roster.serial, roster.hash)
    if trail.chain.policy != policy.hash:
        trail.policy(policy.hash)
    try:
        offer = read_offer(message, roster, home.id, now)
    except SecureFVIError as error:
        trail.note("", f"a job offer was refused: {printable(str(error))}")
        raise
    try:
        data = check(offer, policy)
    except SecureFVIError as error:
        trail.job(_entry(offer, policy, accepted=False, reason=printable(str(error))))
        raise
    trail.job(_entry(offer, policy, accepted=True))
    return Decision(offer, roster, policy, data)


def _entry(offer: JobOffer, policy: SitePolicy, accepted: bool, reason: str = "") -> JobEntry:
    privacy = offer.config.privacy
    options = {} if privacy is None else privacy.options
    epsilon, delta = options.get("epsilon"), options.get("delta")
    return JobEntry(
        offer.job, offer.hash, offer.roster, offer.model, policy.hash, accepted, reason, offer.data_set,
        float(epsilon) if isinstance(epsilon, int | float) else None,
        float(delta) if isinstance(delta, int | float) else None,
    )  # fmt: skip
