"""Whether a site's policy allows a job. Asked at the site before anything of the job runs there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from secure_fvi.aggregation import Homomorphic, Masked
from secure_fvi.deployment.job import JobOffer
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.names import Role, printable
from secure_fvi.deployment.policy import DataRule, PrivacyRules, SitePolicy
from secure_fvi.errors import InputError, PolicyError
from secure_fvi.privacy.settings import DP
from secure_fvi.privacy.terms import Terms
from secure_fvi.runs.options import AGGREGATIONS, ALGORITHMS, PRIVACIES, build, named


def check(offer: JobOffer, policy: SitePolicy, role: Role = "silo") -> DataRule | None:
    """The data that the job may use. Raises PolicyError with every reason against it and what the policy allows.

    A key holder (role) runs no model and has no data: roster, sums and rounds count there, and None is returned.
    The model is hashed from this site's files. A job's noise follows from its epsilon once its model is traced:
    `check_terms` looks at it then.
    """
    try:
        reasons = list(_reasons(offer, policy, role))
    except InputError as error:
        reasons = [f"it cannot be read here: {error}"]
    if reasons:
        raise PolicyError(printable(f"job '{offer.job}' is outside this site's policy: {'; '.join(reasons)}", 4000))
    return policy.data[offer.data_set] if role == "silo" else None


def check_terms(terms: Mapping[str, Terms], policy: SitePolicy) -> None:
    """The noise that this site derived for the job's phases. Raises PolicyError where it is below the floor."""
    least = policy.privacy.min_noise_multiplier
    for phase, t in terms.items():
        if t.noise_multiplier < least:
            raise PolicyError(
                f"the job is outside this site's policy: phase '{phase}' has a noise multiplier of "
                f"{t.noise_multiplier:.3g}, the policy asks for at least {least:g}"
            )
    if not terms and policy.privacy.dp == "required":
        raise PolicyError("the job is outside this site's policy: it adds no noise, and dp = 'required'")


def _reasons(offer: JobOffer, policy: SitePolicy, role: Role) -> Iterator[str]:
    config = offer.config
    if offer.roster not in policy.rosters:
        yield f"roster {offer.roster.hex()[:16]}... is not accepted ({_few([r.hex()[:16] for r in policy.rosters])})"
    yield from _sums(offer, policy)
    algorithm = build(named(ALGORITHMS, "algorithm.name", config.algorithm.name), config.algorithm.options, "algorithm")
    if algorithm.most_rounds > policy.max_rounds:
        yield f"it may run {algorithm.most_rounds} rounds (at most {policy.max_rounds})"
    if role != "silo":
        return
    if config.algorithm.name not in policy.algorithms:
        yield f"algorithm '{config.algorithm.name}' is not accepted ({_few(policy.algorithms)})"
    yield from _model(offer, policy)
    dp = None
    if config.privacy is not None:
        dp = build(named(PRIVACIES, "privacy.unit", config.privacy.unit), config.privacy.options, "privacy")
    yield from _privacy(dp, policy.privacy)
    data = policy.data.get(offer.data_set)
    if data is None:
        yield f"data set '{offer.data_set}' is not offered ({_few(policy.data)})"
    elif dp is not None and data.budget is not None and data.unit != dp.unit:
        yield f"it protects each {dp.unit}, the budget of data set '{data.id}' counts each {data.unit}"


def _model(offer: JobOffer, policy: SitePolicy) -> Iterator[str]:
    rule = policy.models.get(offer.model)
    if rule is None:
        yield f"model {offer.model.hex()[:16]}... is not accepted ({_few([h.hex()[:16] for h in policy.models])})"
        return
    if offer.config.model.function is not None and rule.function is None:
        yield "its model is a function of a file, and the policy names no 'function' for this hash"
        return
    here = manifest(offer.config, rule.function)
    if here.hash != offer.model:
        yield (
            f"the model here hashes to {here.hash.hex()[:16]}..., not to the accepted {offer.model.hex()[:16]}...: "
            "source, an import, a bound or a version was altered; see `secure-fvi policy hash-model`"
        )


def _sums(offer: JobOffer, policy: SitePolicy) -> Iterator[str]:
    config = offer.config.aggregation
    sums = build(named(AGGREGATIONS, "aggregation.kind", config.kind), config.options, "aggregation")
    kind = sums.kind
    if isinstance(sums, Masked) and not sums.consistency_check:
        kind = "masked-unchecked"
    if isinstance(sums, Homomorphic) and not sums.masked:
        kind = "homomorphic-unmasked"
    if kind not in policy.aggregations:
        yield f"aggregation '{kind}' is not accepted ({_few(policy.aggregations)})"
    if len(offer.silos) < policy.min_cohort:
        yield f"it has {len(offer.silos)} silos (at least {policy.min_cohort})"
    least = getattr(sums, "min_cohort", None)
    if least is not None and least < policy.min_cohort:
        yield f"its sums may have {least} silos (aggregation.min_cohort of at least {policy.min_cohort})"


def _privacy(dp: DP | None, rules: PrivacyRules) -> Iterator[str]:
    if dp is None:
        if rules.dp == "required":
            yield "it has no differential privacy, and dp = 'required'"
        return
    if dp.unit not in rules.units:
        yield f"it protects each {dp.unit} ({_few(rules.units)})"
    if dp.noise not in rules.noise:
        yield f"noise = '{dp.noise}' is not accepted ({_few(rules.noise)})"
    if dp.epsilon is None:
        yield f"it states no epsilon; [privacy] epsilon must be at most {rules.max_epsilon:g}"
    elif dp.epsilon > rules.max_epsilon:
        yield f"its epsilon is {dp.epsilon:g} (at most {rules.max_epsilon:g})"
    if dp.delta > rules.max_delta:
        yield f"its delta is {dp.delta:g} (at most {rules.max_delta:g})"


def _few(allowed: Any) -> str:
    names: Sequence[str] = sorted(allowed)
    return f"allowed: {', '.join(names)}" if names else "none is allowed"
