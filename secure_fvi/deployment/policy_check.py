"""Whether a site's policy allows a job. Asked at the site before anything of the job runs there.

Judged is what the job discloses (`secure_fvi.disclosure`), and every option of it: one that this file does not know is
refused, since nobody has said what it does.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from secure_fvi.aggregation.base import SecureSum
from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.fence import check_fence
from secure_fvi.deployment.job import JobOffer
from secure_fvi.deployment.model_hash import manifest, package_digest
from secure_fvi.deployment.names import Role, printable
from secure_fvi.deployment.policy import DataRule, PrivacyRules, SitePolicy, rule_of
from secure_fvi.disclosure import DISCLOSURES, Disclosure, disclose
from secure_fvi.errors import InputError, PolicyError
from secure_fvi.privacy.settings import DP, RecordDP, exact_totals
from secure_fvi.privacy.terms import Terms
from secure_fvi.runs.config import Config, chosen
from secure_fvi.runs.records import formula_model, job_dictionary, site_dictionary

_log = logging.getLogger(__name__)

_OF_LOCAL_FIT = (
    "family importance_samples start_spread local_steps local_optimizer optimizer_options learning_rate scale_rate "
    "decay local_learning_rate theta_learning_rate alpha sampling_rate bound local_family silo_family "
)
_OF_DP = "epsilon delta noise_multiplier clipping_norm noise dropouts colluders retries "
#: Every option that a job may have, by the class that has it. Listed here is what was judged: it shapes the estimate
#: alone, or enters the disclosure, or is bound by the model's hash (bounds, clipping norms), or the policy has a key.
_JUDGED = {
    "BCM": _OF_LOCAL_FIT + "prior total_records",
    "VCL": _OF_LOCAL_FIT + "reveal_changes",
    "StreamingVB": _OF_LOCAL_FIT + "passes reveal_changes",
    "PVI": _OF_LOCAL_FIT + "rounds max_rounds tolerance schedule buffer reveal_changes damping virtual_clients "
    "private lengths_share replicates least_information",
    "FedAvg": "rounds local_steps learning_rate server_learning_rate server_momentum server_schedule tolerance prior "
    "weights sampling_rate participation total_records bound",
    "FedVI": "rounds epochs batch_size learning_rate server_learning_rate server_momentum server_schedule "
    "participation tau gamma theta start_scale weights total_records tolerance bound",
    "SFVI": "family rank importance_samples iterations max_iterations optimizer optimizer_options learning_rate "
    "local_learning_rate start_spread schedule average_last sampling_rate participation bound local_family "
    "silo_family warm_start replicates least_information curvature_norm curvature_share lengths_share",
    "WarmStart": "rounds local_steps weights total_records",
    "SFVIAvg": "rounds local_steps importance_samples family weights scale_entropy tolerance bures_iterations "
    "barycenter optimizer optimizer_options learning_rate local_learning_rate start_spread decay average_last "
    "sampling_rate participation total_records bound final_local_steps local_family silo_family "
    "replicates",
    "Vertical": "model rho response family auxiliary local_steps damping batch_size rounds "
    "learning_rate schedule average_last optimizer participation max_staleness bound",
    "Soul": "model rho draws step settle decay response rounds learning_rate optimizer burn_in keep bound",
    "Auto": "",
    "Conditional": "scale coupling varying_scale",
    "Amortised": "encoder features see_global block hidden",
    "Integrated": "nodes",
    "MeanField": "",
    "Plain": "",
    "Masked": "min_cohort max_missing max_differences bits consistency_check batch corrupt lost",
    "Homomorphic": "scheme masks min_cohort max_missing max_differences batch corrupt lost",
    "RecordDP": _OF_DP + "objective_share objective_bound public_counts linked",
    "SiloDP": _OF_DP + "target_quantile quantile_rate quantile_share",
    "Config": "seed model data partition silo response alignment algorithm aggregation privacy run engine",
    "Model": "program function record_plate silo_sites start formula family dictionary likelihood options",
    "Partition": "sizes count ids seed by_client",
    "SiloFile": "id data predictor dictionary query tables missing complete fitting",
    "Response": "data silo column offset",
    "Alignment": "column how",
    "Algorithm": "name",
    "Aggregation": "kind",
    "Privacy": "unit ledger data_set",
    "Run": "device dtype compile threads batch_silos checkpoint_seconds",
    "Engine": "kind on_loss deadline",
}
#: The options that a disclosure follows from, for a reason that names them.
_FOLLOWS_FROM = {
    "per_silo_rows": "barycenter",
    "person_rows": "name auxiliary",
    "single_silos": "schedule reveal_changes passes buffer participation",
    "changing_cohorts": "schedule buffer participation",
    "final_likelihood": "iterations rounds",
    "sampled_records": "sampling_rate batch_size",
    "exact_counts": "public_counts",
    "objective": "objective_share",
    "adaptive_clipping": "target_quantile",
}


class _Reason(NamedTuple):
    """Why a job is refused. own: what the policy allows instead, where that names data sets or models that the job did
    not: for the site's own people."""

    text: str
    own: str = ""


def check(
    offer: JobOffer,
    policy: SitePolicy,
    role: Role = "silo",
    roster: ConsortiumRoster | None = None,
    site: str | None = None,
) -> DataRule | None:
    """The data that the job may use. Raises PolicyError with every reason against it and what the policy allows; the
    server is not told of other data sets and models.

    A key holder (role) runs no model and has no data: roster, sums, silos and rounds count there, and None is returned.
    So do they at a server, unless it holds a response that its own ledger guards: it is judged as a silo is.
    The model is hashed from this site's files. A job's noise follows from its epsilon once its model is traced:
    `check_terms` looks at it then. roster: the one in force, of whose silos the job has to ask a share; without it, as
    where no job was offered yet, that share is not looked at. site: this one's id, by which a vertical job's predictor
    here is found.
    """
    role = "silo" if role == "server" and held_by_server(offer.config) else role
    try:
        found = list(_reasons(offer, policy, role, roster, site))
    except InputError as error:
        found = [f"it cannot be read here: {error}"]
    if reasons := [_Reason(r) if isinstance(r, str) else r for r in found]:
        said, told = ("; ".join(parts) for parts in ((r.text + r.own for r in reasons), (r.text for r in reasons)))
        begins = f"job '{offer.job}' is outside this site's policy: "
        raise PolicyError(printable(begins + said, 4000), printable(begins + told, 4000))
    return policy.data[offer.data_set] if role == "silo" else None


def held_by_server(config: Config) -> bool:
    """Whether the server releases of data that it holds, under differential privacy: of a private response."""
    private = config.vertical and config.algorithm.options.get("response") == "private"
    return private and config.privacy is not None and config.response is not None


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


def unjudged(value: Any, where: str = "") -> Iterator[str]:
    """Options of a configuration, or of what it stands for, that this file does not know, by their dotted names."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from unjudged(item, where)
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from unjudged(item, f"{where}.{key}" if where else str(key))
        return
    if isinstance(value, BaseModel):
        names = list(type(value).model_fields)
    elif dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
    else:
        return
    known = _JUDGED.get(type(value).__name__, "").split()
    for name in names:
        dotted = f"{where}.{name}" if where else name
        if name not in known:
            yield dotted
        else:
            yield from unjudged(getattr(value, name), dotted)


def _reasons(
    offer: JobOffer, policy: SitePolicy, role: Role, roster: ConsortiumRoster | None, site: str | None
) -> Iterator[str | _Reason]:
    config = offer.config
    if offer.roster not in policy.rosters:
        yield f"roster {offer.roster.hex()[:16]}... is not accepted ({_few([r.hex()[:16] for r in policy.rosters])})"
    algorithm, sums, dp = chosen(config)
    if sums.form not in policy.aggregations:
        yield f"aggregation '{sums.form}' is not accepted ({_few(policy.aggregations)})"
    for option in (
        *unjudged(config), *unjudged(algorithm, "algorithm"), *unjudged(sums, "aggregation"), *unjudged(dp, "privacy")
    ):  # fmt: skip
        yield f"option '{option}' is not known to this release's policies, so that nobody has judged it"
    try:
        found = disclose(algorithm, sums, dp, len(offer.silos))
    except InputError as error:
        yield f"no engine runs it: {error}"
        return
    yield from _sums(found, sums, policy)
    yield from _silos(offer, policy, roster)
    if found.rounds + found.besides > policy.max_rounds:
        besides = f" and {found.besides} sums besides" if found.besides else ""
        yield f"it may run {found.rounds} rounds{besides} (at most {policy.max_rounds})"
    for p in found.phases:
        if p.at_most > max(policy.max_rounds, found.rounds):
            yield f"its phase '{p.phase}' may take {p.at_most} sums (at most {policy.max_rounds})"
    if role != "silo":
        return
    if config.algorithm.name not in policy.algorithms:
        yield f"algorithm '{config.algorithm.name}' is not accepted ({_few(policy.algorithms)})"
    yield from _package(offer, policy)
    data = policy.data.get(offer.data_set)
    yield from _model(offer, policy) if config.model.formula is None else _formula(offer, policy, data)
    yield from _disclosures(found, (algorithm, dp), policy)
    yield from _privacy(dp, policy.privacy)
    if data is None:
        yield _Reason(f"data set '{offer.data_set}' is not offered", f" ({_few(policy.data)})")
        return
    yield from _records(config, data, policy)
    if config.vertical:
        yield from _vertical(config, data, policy, site)
    if dp is None and data.budget is not None:
        yield (
            f"it has no differential privacy, and data set '{data.id}' has a budget of epsilon "
            f"{data.budget.epsilon:g}, which exact totals do not keep to"
        )
    if dp is not None and data.budget is not None and data.unit != dp.unit:
        yield f"it protects each {dp.unit}, the budget of data set '{data.id}' counts each {data.unit}"


def _records(config: Config, data: DataRule, policy: SitePolicy) -> Iterator[str]:
    """A job's [partition] and [data] say which of a program's records are the site's: by sizes, or a loader's count and
    seed, a server picks a single one."""
    for name, given in (("partition", config.partition is not None), ("data", bool(config.data))):
        if given and data.path is not None:
            yield f"by [{name}] it would not read the file that data set '{data.id}' has as its path"
        elif given and name not in data.from_job:
            yield (
                f"by [{name}] it says which records are used as data set '{data.id}' (from_job: {_few(data.from_job)})"
            )
    if config.silo and not config.vertical and data.path is None:
        yield f"its silos read files of their own, and data set '{data.id}' has no path"
    few = "sampled_records" in policy.disclosures
    if config.data and not few:
        yield "by [data] a loader may leave out all records but a few (disclosures: 'sampled_records' is not listed)"
    sizes = config.partition.sizes if config.partition is not None else None
    if sizes and 2 * len(sizes) * min(sizes) < sum(sizes) and not few:
        yield (
            f"its partition.sizes give a silo {min(sizes)} records, less than half of what each had by count = "
            f"{len(sizes)}: totals over few records (disclosures: 'sampled_records' is not listed)"
        )


def _vertical(config: Config, data: DataRule, policy: SitePolicy, site: str | None) -> Iterator[str]:
    """What identifies people and how it is compared is the site's to say, and so is a predictor of its own."""
    if data.path is None:
        yield f"data set '{data.id}' has no path, and a vertical job reads a file"
    wanted, own = (a.model_dump(mode="json") if a is not None else None for a in (config.alignment, data.alignment))
    if own is None:
        yield f"it finds people by {_said(wanted)}, and data set '{data.id}' lists no alignment"
    elif wanted != own:
        yield f"it finds people by {_said(wanted)} (data set '{data.id}' lists {_said(own)})"
    asked_of = config.response.columns if config.response is not None and config.response.silo == site else ()
    if site is not None and asked_of != data.response:
        does, lists = ((", ".join(map(repr, names)) or "nothing") for names in (asked_of, data.response))
        yield f"it has this site tell the other silos {does} as the outcome (data set '{data.id}' lists {lists})"
    asked = {s.id: s.predictor is not None for s in config.silo}
    if site is not None and asked.get(site, False) != (data.predictor is not None):
        has, lists = (
            ("a program", "none") if data.predictor is None else ("all columns, linearly,", "a program of its own")
        )
        yield f"its predictor here is {has} (data set '{data.id}' lists {lists})"
    if data.predictor is not None and policy.sandbox == "required":
        yield (
            f"the predictor of data set '{data.id}' would run in the process that holds this site's keys and data, and "
            "sandbox = 'required'"
        )


def _said(alignment: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in sorted((alignment or {}).items())) or "nothing"


def _model(offer: JobOffer, policy: SitePolicy) -> Iterator[str | _Reason]:
    rule = policy.models.get(offer.model)
    if rule is None:
        known = _few([h.hex()[:16] for h in policy.models])
        yield _Reason(f"model {offer.model.hex()[:16]}... is not accepted", f" ({known})")
        return
    if offer.config.model.function is not None and rule.function is None:
        yield "its model is a function of a file, and the policy names no 'function' for this hash"
        return
    if offer.config.model.function is not None and policy.sandbox == "required":
        check_fence()
    yield from _altered(offer, rule.function)


def _altered(offer: JobOffer, function: str | None = None) -> Iterator[str]:
    try:
        here = manifest(offer.config, function, offer.package)
    except InputError as error:
        if function is None:  # of the job's own words
            raise
        _log.warning("%s", error)  # it names files
        yield "this site's copy of the model cannot be read here; see its log"
        return
    if here.hash != offer.model:
        yield (
            f"the model here hashes to {here.hash.hex()[:16]}..., not to the accepted {offer.model.hex()[:16]}...: "
            "source, an import, a bound or a version was altered; see `secure-fvi policy hash-model`"
        )


def _numbers_of(said: Mapping[str, Any]) -> str:
    """What a job or a rule says of a formula number for number."""
    return "".join(f", {name} {said[name]}" for name in ("most", "priors") if name in said)


def _formula(offer: JobOffer, policy: SitePolicy, data: DataRule | None) -> Iterator[str | _Reason]:
    """A formula that nobody agreed to is compared as text and not read; nor is one whose dictionary is not the
    site's."""
    model = offer.config.model
    if offer.model not in policy.models and not any(rule.allows(model) for rule in policy.formulas):
        wanted = rule_of(model)
        record = f", record '{wanted['record']}'" if "record" in wanted else ""
        allowed = [
            f"{text}, {rule.family}{_numbers_of(rule.model_dump(exclude_defaults=True))}"
            for rule in policy.formulas
            for text in rule.formulas
        ]
        what = f"formula '{model.formula}', family {wanted['family']}{record}{_numbers_of(wanted)}"
        yield _Reason(f"{what}, is not accepted", f" ({_few(allowed)})")
        return
    altered = list(_altered(offer))
    yield from altered
    if altered or data is None:
        return
    if data.dictionary is None:
        yield f"data set '{data.id}' has no dictionary, by which a formula's columns are coded"
        return
    try:
        own = site_dictionary(data.dictionary)
    except InputError as error:  # it names files
        _log.warning("%s", error)
        yield f"the dictionary of data set '{data.id}' cannot be read; see this site's log"
        return
    if unlike := job_dictionary(model).differences(own):
        yield f"its dictionary is not this site's: {'; '.join(unlike)}"
        return
    privacy = chosen(offer.config)[2]
    formula_model(model).check_apart(privacy)
    if not isinstance(privacy, RecordDP) or offer.model in policy.models:
        return
    exact = {"noise = 'server'": exact_totals(privacy), "public_counts": privacy.public_counts}
    if any(exact.values()) and not any(rule.allows(model) and rule.most != "any" for rule in policy.formulas):
        yield (
            "under record privacy records of more rows than most.rows are left out, and by "
            f"{' and '.join(name for name, so in exact.items() if so)} it is seen without noise whether one is: the "
            "policy's most has to be numbers, not 'any'"
        )


def _package(offer: JobOffer, policy: SitePolicy) -> Iterator[str]:
    """Whether the code that makes and guards contributions, here and at the server, is what the policy says."""
    allowed, ours, theirs = policy.package, package_digest().hex(), offer.package.hex()
    if allowed == "same" and ours != theirs:
        yield (
            f"the server's secure_fvi has digest {theirs[:16]}..., the one installed here {ours[:16]}...; install one "
            f"version at both, or, if both were looked at: package = ['{ours}', '{theirs}']"
        )
    if isinstance(allowed, tuple):
        for whose, digest in (("the server's", theirs), ("this site's", ours)):
            if digest not in allowed:
                yield f"{whose} secure_fvi, {digest}, is not accepted ({_few([d[:16] for d in allowed])})"


def _sums(found: Disclosure, sums: SecureSum, policy: SitePolicy) -> Iterator[str]:
    if found.silos < policy.min_cohort:
        yield f"it has {found.silos} silos (at least {policy.min_cohort})"
    if found.kind == "plain":  # single terms are seen anyway, and the policy has to name that kind
        return
    least = getattr(sums, "min_cohort", found.at_least)
    if least < policy.min_cohort:
        yield f"its sums may have {least} silos (aggregation.min_cohort of at least {policy.min_cohort})"
    for p in found.phases:
        if p.asked < min(policy.min_cohort, found.silos):
            yield f"its phase '{p.phase}' asks {p.asked} silos (min_cohort: at least {policy.min_cohort})"
    allowed = policy.max_missing(found.exact)
    shared = not found.exact and found.privacy is not None and found.privacy.noise == "distributed"
    option = "privacy.dropouts" if shared else "aggregation.max_missing" if found.exact else "aggregation.min_cohort"
    if allowed is not None and found.lacking > allowed:
        yield f"its sums may lack {found.lacking} of the silos asked, by {option} (max_missing: at most {allowed})"
    if found.differences > policy.max_differences:
        yield (
            f"{found.differences} of its sums may lack silos, by aggregation.max_differences (max_differences: at most "
            f"{policy.max_differences})"
        )


def _silos(offer: JobOffer, policy: SitePolicy, roster: ConsortiumRoster | None) -> Iterator[str]:
    """A server might ask three silos of thirty, two of them its friends."""
    for name in sorted(set(policy.must_include) - set(offer.silos)):
        yield f"it does not ask silo '{name}', which must_include names"
    if roster is None:
        return
    known = len(roster.of_role("silo"))
    if len(offer.silos) < policy.share * known:
        share = "all" if policy.share == 1 else f"{policy.share:g}"
        yield f"it asks {len(offer.silos)} of the roster's {known} silos (silos = {share})"


def _disclosures(found: Disclosure, options: Sequence[Any], policy: SitePolicy) -> Iterator[str]:
    for name in found.kinds:
        if name in policy.disclosures:
            continue
        causes = [
            f"{option} = {getattr(o, option)!r}" if getattr(o, option) is not None else f"{option}, left out"
            for option in _FOLLOWS_FROM[name].split()
            for o in options
            if o is not None and hasattr(o, option)
        ]
        yield (
            f"it discloses '{name}' by {', '.join(causes)}: {DISCLOSURES[name]} "
            f"(disclosures: {', '.join(policy.disclosures) or 'none is allowed'})"
        )


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
    if dp.noise == "distributed" and dp.colluders < rules.min_colluders:
        yield f"its noise plans for colluders = {dp.colluders} (min_colluders: at least {rules.min_colluders})"
    if dp.retries > rules.max_retries:
        yield f"its retries are {dp.retries} (max_retries: at most {rules.max_retries})"


def _few(allowed: Any) -> str:
    names: Sequence[str] = sorted(allowed)
    return f"allowed: {', '.join(names)}" if names else "none is allowed"
