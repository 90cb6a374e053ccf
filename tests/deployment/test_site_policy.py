"""A site's policy: a job inside it passes; outside any one of its rules it is refused, and the reason is named."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from deployment_world import DAY, NOW, World

import secure_fvi as sf
from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.aggregation.roster import Identity
from secure_fvi.building import declared_job
from secure_fvi.deployment import deciding
from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.countersigning import open_ledger, open_trail
from secure_fvi.deployment.deciding import FINISHED, decide, job_entry, logged_policy
from secure_fvi.deployment.job import JobOffer, make_offer, sign_offer
from secure_fvi.deployment.keeping import TEMPLATE, write_template
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.policy import DataRule, ModelRule, PrivacyRules, SitePolicy, read_policy
from secure_fvi.deployment.policy_check import check, check_terms, unjudged
from secure_fvi.deployment.trail import Exchange, Trail
from secure_fvi.deployment.trail_verify import rows, verify
from secure_fvi.engines.stream_client import answered
from secure_fvi.engines.stream_messages import REFUSAL
from secure_fvi.errors import HomeError, InputError, PolicyError, ProtocolError
from secure_fvi.privacy.events import Gaussian
from secure_fvi.privacy.gate import NoiseSource
from secure_fvi.privacy.ledger_terms import Budget, Job, Term
from secure_fvi.privacy.report import read_report
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.privacy.terms import Extent, agree
from secure_fvi.runs import wording
from secure_fvi.runs.config import ALGORITHMS, Algorithm, Config, Model, build, named, parse

MODEL = """
import pyro
from pyro.distributions import Normal


def mean(y):
    mu = pyro.sample("mu", Normal(0.0, 5.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", Normal(mu, 1.0), obs=y)
"""


def config(**tables: Any) -> Config:
    table = {
        "model": {"function": "anywhere.py:mean"},
        "silo": [{"id": name, "data": "x.csv"} for name in ("east", "north", "south")],
        "algorithm": {"name": "sfvi", "iterations": 100, "sampling_rate": 0.1},
        "aggregation": {"kind": "masked"},
        "privacy": {"unit": "record", "epsilon": 0.9, "delta": 1e-7, "data_set": "cohort"},
        **tables,
    }
    return parse({k: v for k, v in table.items() if v is not None}, "test")


class Site:
    """North's model file and policy, and offers that it is made."""

    def __init__(self, world: World) -> None:
        self.folder = world.homes["north"].path
        self.roster = world.homes["north"].roster(NOW)
        (self.folder / "model.py").write_text(MODEL)
        self.function = f"{self.folder / 'model.py'}:mean"
        self.table: dict[str, Any] = {
            "format": 1,
            "rosters": [self.roster.hash.hex()],
            "algorithms": ["sfvi"],
            "aggregations": ["masked"],
            "min_cohort": 3,
            "max_rounds": 100,
            "sandbox": "off",  # what the fence does, test_fence.py says; this runs without bubblewrap
            "privacy": {
                "dp": "required",
                "units": ["record"],
                "max_epsilon": 1.0,
                "max_delta": 1e-6,
                "min_noise_multiplier": 0.3,
                "noise": ["distributed", "silo"],
            },
            "model": [{"hash": self.model(config()).hex(), "function": "model.py:mean"}],
            "data": [{"id": "cohort", "path": "cohort.csv", "epsilon": 3.0, "delta": 1e-6, "unit": "record"}],
        }

    def model(self, of: Config) -> bytes:
        return manifest(of, self.function).hash

    def policy(self, **changes: Any) -> SitePolicy:
        """With dp = "optional" its data set has no budget, unless `changes` say so: exact jobs keep to none."""
        if changes.get("privacy", {}).get("dp") == "optional":
            changes.setdefault("data", [{"id": "cohort", "path": "cohort.csv"}])
        path = self.folder / "policy.toml"
        path.write_text(wording.dumps({**self.table, **changes}))
        path.chmod(0o600)
        return read_policy(path)

    def offer(self, of: Config | None = None, model: bytes | None = None, data_set: str | None = None) -> JobOffer:
        of = of or config()
        offer = make_offer(of, self.roster, "hub", model or self.model(of), NOW)
        return offer if data_set is None else dataclasses.replace(offer, data_set=data_set)

    def refused(self, offer: JobOffer, *words: str, **changes: Any) -> str:
        with pytest.raises(PolicyError) as caught:
            check(offer, self.policy(**changes))
        for word in ("is outside this site's policy", *words):
            assert word in str(caught.value)
        return str(caught.value)


@pytest.fixture
def site(world: World) -> Site:
    return Site(world)


def test_a_job_inside_the_policy_passes(site: Site) -> None:
    rule = check(site.offer(), site.policy())
    assert rule is not None
    assert rule.id == "cohort"
    assert rule.path == str(site.folder / "cohort.csv")
    assert rule.budget is not None
    assert (rule.budget.epsilon, rule.budget.unit) == (3.0, "record")


def test_the_first_policy_allows_nothing(site: Site) -> None:
    path = site.folder / "policy.toml"
    write_template(path)
    with pytest.raises(PolicyError) as caught:
        check(site.offer(), read_policy(path))
    text = str(caught.value)
    for word in ("roster", "model", "algorithm 'sfvi'", "aggregation 'masked'", "100 rounds (at most 0)", "data set"):
        assert word in text
    assert text.count("none is allowed") == 5
    with pytest.raises(InputError, match="is there already"):
        write_template(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rosters": ["0" * 64]}, "is not accepted (allowed: 0000000000000000)"),
        ({"model": []}, "model "),
        ({"algorithms": ["pvi"]}, "algorithm 'sfvi' is not accepted (allowed: pvi)"),
        ({"aggregations": ["homomorphic"]}, "aggregation 'masked' is not accepted (allowed: homomorphic)"),
        ({"min_cohort": 4}, "it has 3 silos (at least 4)"),
        ({"max_rounds": 99}, "it may run 100 rounds (at most 99)"),
        ({"data": []}, "data set 'cohort' is not offered (none is allowed)"),
    ],
)
def test_each_list_and_limit_is_kept(site: Site, changes: dict[str, Any], says: str) -> None:
    text = site.refused(site.offer(), says, **changes)
    if "min_cohort" not in changes:
        assert ";" not in text  # one reason alone


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_epsilon": 0.5}, "its epsilon is 0.9 (at most 0.5)"),
        ({"max_delta": 1e-8}, "its delta is 1e-07 (at most 1e-08)"),
        ({"units": ["silo"]}, "it protects each record (allowed: silo)"),
        ({"noise": ["silo"]}, "noise = 'distributed' is not accepted (allowed: silo)"),
    ],
)
def test_the_privacy_floor_is_kept(site: Site, change: dict[str, Any], says: str) -> None:
    site.refused(site.offer(), says, privacy={**site.table["privacy"], **change})


def test_a_job_without_privacy_needs_a_policy_that_says_so(site: Site) -> None:
    plain = site.offer(config(privacy=None), data_set="cohort")
    models = [{"hash": plain.model.hex(), "function": "model.py:mean"}]
    site.refused(plain, "it has no differential privacy, and dp = 'required'", model=models)
    optional = {**site.table["privacy"], "dp": "optional"}
    site.refused(plain, "'sampled_records' by sampling_rate = 0.1", model=models, privacy=optional)
    check(plain, site.policy(model=models, privacy=optional, disclosures=["sampled_records"]))


def test_exact_totals_keep_to_no_budget(site: Site) -> None:
    """`policy allow --without-dp` of a job on one data set let exact jobs in on all, whatever their budgets. The
    controls: a data set without one, and a job that is charged to it."""
    plain = site.offer(config(privacy=None, algorithm={"name": "sfvi", "iterations": 100}), data_set="cohort")
    private = site.offer()
    rules: dict[str, Any] = {
        "privacy": {**site.table["privacy"], "dp": "optional"},
        "model": [{"hash": offer.model.hex(), "function": "model.py:mean"} for offer in (plain, private)],
    }
    says = "data set 'cohort' has a budget of epsilon 3, which exact totals do not keep to"
    assert says in site.refused(plain, data=site.table["data"], **rules)
    check(plain, site.policy(**rules))
    check(private, site.policy(data=site.table["data"], **rules))


@pytest.mark.parametrize("budgeted", [True, False])
def test_nor_to_one_that_the_ledger_alone_has(site: Site, world: World, budgeted: bool) -> None:
    """The first private job's, where the policy states none. The control: a ledger that knows of none on this data."""
    home, hub = world.homes["north"], world.homes["hub"].identity()
    plain = site.offer(config(privacy=None, algorithm={"name": "sfvi", "iterations": 100}), data_set="cohort")
    models = [{"hash": plain.model.hex(), "function": "model.py:mean"}]
    site.policy(model=models, privacy={**site.table["privacy"], "dp": "optional"})
    with closing(open_ledger(home)) as ledger, closing(open_trail(home)) as trail:
        ledger.set_budget(Budget("cohort" if budgeted else "others", 1.0, 1e-6))
        said = "the ledger has a budget of epsilon 1 for data set 'cohort'"
        with pytest.raises(PolicyError, match=said) if budgeted else nullcontext():
            decide(home, sign_offer(plain, hub), trail, NOW, met=True)


@pytest.mark.parametrize("private", [True, False], ids=["", "exact"])
@pytest.mark.parametrize(("step", "epsilon"), [("broadcast", 0.9), ("broadcast", None), ("join", 0.9)])
def test_a_ledger_that_lacks_what_was_answered_is_an_old_copy(
    site: Site, world: World, step: str, epsilon: float | None, private: bool
) -> None:
    """The log says so, whatever the server shows of what it has seen. So for a job without privacy too, which may be on
    the data whose budget that ledger had. The controls: before it was such a job, or one that was let in and never
    answered, which the ledger need not know."""
    home, hub = world.homes["north"], world.homes["hub"].identity()
    site.policy()
    offered = site.offer()
    if not private:
        plain = config(privacy=None, algorithm={"name": "sfvi", "iterations": 100})
        offered, models = site.offer(plain, data_set="cohort"), [{"function": "model.py:mean"}]
        models[0]["hash"] = offered.model.hex()
        site.policy(model=models, privacy={**site.table["privacy"], "dp": "optional"})
    with closing(open_ledger(home)), closing(open_trail(home)) as trail:
        entry = job_entry(site.offer(), bytes(32), accepted=True)
        trail.job(dataclasses.replace(entry, job="before", epsilon=epsilon))
        trail.exchanges("before", [Exchange("hub", step, b"question", b"answer")])
        old = step == "broadcast" and epsilon is not None
        with pytest.raises(ProtocolError, match="it lacks job 'before'") if old else nullcontext():
            decide(home, sign_offer(offered, hub), trail, NOW, met=True)


@pytest.mark.parametrize("seen", [True, False])
def test_a_roster_that_was_put_back_lets_nobody_in(site: Site, world: World, seen: bool) -> None:
    """By the log, which has the newer one. The control: one that has not, where who left is a member again."""
    home, hub = world.homes["north"], world.homes["hub"]
    site.policy()
    before, older = (home.path / "accepted.json").read_bytes(), sign_offer(site.offer(), hub.identity())
    with closing(open_ledger(home)), closing(open_trail(home)) as trail:
        decide(home, older, trail, NOW, met=True)
        assert world.roster is not None
        world.distribute(world.write(world.roster))
        site.roster = home.roster(NOW)
        site.policy(rosters=[*site.table["rosters"], site.roster.hash.hex()])
        if seen:
            decide(home, sign_offer(site.offer(), hub.identity()), trail, NOW, met=True)
        (home.path / "accepted.json").write_bytes(before)
        with pytest.raises(HomeError, match=r"accepted\.json was put back") if seen else nullcontext():
            decide(home, older, trail, NOW, met=True)


def test_what_was_answered_stays_what_it_was(site: Site, world: World) -> None:
    """A refused offer of a job's id took its answers to another data set and privacy: exact totals were in no report,
    or a ledger seemed an old copy. The controls: the offer itself, and one of a job of which nothing was answered."""
    home, hub = world.homes["north"], world.homes["hub"].identity()
    with closing(open_trail(home)) as trail:
        site.policy(max_rounds=99)  # so that each is refused
        offers = [dataclasses.replace(site.offer(), job=job) for job in ("answered", "never")]
        for offer in offers:
            trail.job(dataclasses.replace(job_entry(offer, bytes(32), accepted=True), data_set="before", epsilon=None))
        trail.exchanges("answered", [Exchange("hub", "broadcast", b"question", b"answer")])
        for offer in offers:
            with pytest.raises(PolicyError, match="at most 99"):
                decide(home, sign_offer(offer, hub), trail, NOW, met=True)
            other = dataclasses.replace(offer, made=offer.made + 1)
            refused = pytest.raises(ProtocolError, match="with another offer; a new job needs a new id")
            with refused if offer.job == "answered" else pytest.raises(PolicyError, match="at most 99"):
                decide(home, sign_offer(other, hub), trail, NOW, met=True)
            assert (trail.chain.jobs[offer.job].fields["offer"] == other.hash) is (offer.job == "never")
        trail.job(
            job_entry(dataclasses.replace(offers[0], made=1), bytes(32), accepted=False)
        )  # as logs of old have it
        kept = trail.chain.jobs["answered"].fields
        assert (kept["offer"], kept["epsilon"]) == (offers[0].hash, 0.9)


@pytest.mark.parametrize(("step", "before"), [("broadcast", 1), ("join", 0)])
def test_an_account_says_what_was_answered_exactly_before_it_began(
    site: Site, world: World, step: str, before: int
) -> None:
    """The report promised an epsilon of rows whose exact totals had been told. The control: a job never answered."""
    home, hub = world.homes["north"], world.homes["hub"].identity()
    site.policy()
    with closing(open_ledger(home)) as ledger, closing(open_trail(home)) as trail:
        entry = job_entry(site.offer(), bytes(32), accepted=True)
        for job, data_set in (("exact", "cohort"), ("elsewhere", "others")):
            trail.job(dataclasses.replace(entry, job=job, data_set=data_set, epsilon=None))
            trail.exchanges(job, [Exchange("hub", step, b"question", b"answer")])
        found = decide(home, sign_offer(site.offer(), hub), trail, NOW, met=True)
        assert found.exact_jobs == before
        terms = {"round": agree(RecordDP(epsilon=0.9, delta=1e-7), 3, 1.0, 5, Extent(2, 0, 0))}
        job, budget = declared_job("private", "cohort", terms, "sfvi", NoiseSource(None), found.exact_jobs)
        ledger.open_job(job, default_budget=budget)
    assert ("EXACT TOTALS: 1 job without" in str(read_report(home.ledger_file).not_covered)) is bool(before)


@pytest.mark.parametrize("log", ["lacks it", "has it", "was begun anew"])
def test_a_log_that_lacks_what_was_charged_is_an_old_copy(site: Site, world: World, log: str) -> None:
    """With it the counts of `max_unanswered` and `matchings` are old. The controls: a log that has the job, and one
    that was begun anew, under the key that followed."""
    home, hub = world.homes["north"], world.homes["hub"].identity()
    site.policy()
    charged = Job("before", "cohort", "record", 1e-7, (Term("round", Gaussian(50.0), 1),))
    with closing(open_ledger(home)) as ledger:
        ledger.open_job(charged, default_budget=Budget("cohort", 3.0, 1e-6))
    signer = home.identity() if log != "was begun anew" else Identity()
    with closing(Trail.open(home.log_file, "north", signer, create=True)) as trail:
        if log == "has it":
            trail.job(dataclasses.replace(job_entry(site.offer(), bytes(32), accepted=True), job="before"))
        old = log == "lacks it"
        with pytest.raises(ProtocolError, match="it lacks job 'before', which was charged") if old else nullcontext():
            decide(home, sign_offer(site.offer(), hub), trail, NOW, met=True)


def test_record_privacy_is_refused_on_a_gpu(site: Site) -> None:
    """Whether a record moves others' numbers there was not tested. The controls: the CPU, and no privacy."""
    cuda = {"device": "cuda"}
    site.refused(site.offer(config(run=cuda)), "record privacy with device = 'cuda'", "use the CPU")
    check(site.offer(config(run={"device": "cpu"})), site.policy())
    plain = site.offer(config(run=cuda, privacy=None, algorithm={"name": "sfvi", "iterations": 100}), data_set="cohort")
    models = [{"hash": plain.model.hex(), "function": "model.py:mean"}]
    check(plain, site.policy(model=models, privacy={**site.table["privacy"], "dp": "optional"}))


def test_a_job_must_state_its_epsilon(site: Site) -> None:
    privacy = {"unit": "record", "noise_multiplier": 5.0, "delta": 1e-7, "data_set": "cohort"}
    offer = site.offer(config(privacy=privacy))
    site.refused(offer, "it states no epsilon", model=[{"hash": offer.model.hex(), "function": "model.py:mean"}])


def test_rows_of_silos_are_refused_whatever_the_policy_allows_of_masked_sums(site: Site) -> None:
    """Break 1: the total of a trusted barycenter lists each silo's own posterior. Control: the secure one."""
    everything: dict[str, Any] = {
        "algorithms": ["sfvi-avg"],
        "aggregations": ["masked", "plain"],
        "privacy": {**site.table["privacy"], "dp": "optional"},
        "disclosures": ["final_likelihood"],
    }

    def job(barycenter: str, kind: str = "masked") -> tuple[JobOffer, list[dict[str, str]]]:
        options = {"name": "sfvi-avg", "rounds": 2, "barycenter": barycenter}
        offer = site.offer(config(algorithm=options, aggregation={"kind": kind}, privacy=None), data_set="cohort")
        return offer, [{"hash": offer.model.hex(), "function": "model.py:mean"}]

    offer, model = job("secure")
    check(offer, site.policy(model=model, **everything))
    offer, model = job("trusted")
    words = ("each silo's own term (barycenter = 'trusted'", "no engine runs it")
    listed = {"disclosures": ["per_silo_rows", "final_likelihood"]}
    site.refused(offer, *words, model=model, **{**everything, **listed})
    offer, model = job("trusted", "plain")
    site.refused(offer, "'per_silo_rows' by barycenter = 'trusted'", "(disclosures: final", model=model, **everything)
    check(offer, site.policy(model=model, **{**everything, **listed}))


@pytest.mark.parametrize(
    ("privacy", "says", "allowing"),
    [
        ({"public_counts": True}, "'exact_counts' by public_counts = True", {"disclosures": ["exact_counts"]}),
        ({"objective_share": 0.9}, "'objective' by objective_share = 0.9", {"disclosures": ["objective"]}),
        ({"colluders": 0}, "colluders = 0 (min_colluders: at least 1)", {"min_colluders": 0}),
        ({"retries": 1_000_000}, "retries are 1000000 (max_retries: at most 20)", {"max_retries": 1_000_000}),
        ({"dropouts": 1}, "may lack 1 of the silos asked, by privacy.dropouts (max_missing: at most 0)", {}),
    ],
)
def test_what_a_job_sets_beside_its_epsilon_is_judged(
    site: Site, privacy: dict[str, Any], says: str, allowing: dict[str, Any]
) -> None:
    of = config(
        privacy={"unit": "record", "epsilon": 0.9, "delta": 1e-7, "data_set": "cohort", **privacy},
        aggregation={"kind": "masked", "min_cohort": 2},
    )
    offer = site.offer(of)
    rules: dict[str, Any] = {"model": [{"hash": offer.model.hex(), "function": "model.py:mean"}], "min_cohort": 2}
    strict = {"max_missing": 0} if "dropouts" in privacy else {}
    site.refused(offer, says, **rules, **strict)
    if "disclosures" in allowing:
        check(offer, site.policy(**rules, **allowing))
    else:
        check(offer, site.policy(**rules, privacy={**site.table["privacy"], **allowing}))


def test_an_adaptive_clipping_norm_and_single_silos_have_to_be_listed(site: Site) -> None:
    rules = {**site.table["privacy"], "units": ["silo"]}
    silo = {"unit": "silo", "epsilon": 0.9, "delta": 1e-7, "data_set": "cohort", "target_quantile": 0.5}
    offer = site.offer(config(privacy=silo))
    model = [{"hash": offer.model.hex(), "function": "model.py:mean"}]
    data = [{"id": "cohort", "path": "cohort.csv"}]
    site.refused(offer, "'adaptive_clipping' by target_quantile = 0.5", privacy=rules, model=model, data=data)
    check(offer, site.policy(privacy=rules, model=model, data=data, disclosures=["adaptive_clipping"]))
    visits = config(algorithm={"name": "vcl", "reveal_changes": True}, aggregation={"kind": "plain"}, privacy=None)
    offer = site.offer(visits, data_set="cohort")
    loose: dict[str, Any] = {
        "model": [{"hash": offer.model.hex(), "function": "model.py:mean"}],
        "algorithms": ["vcl"],
        "aggregations": ["plain"],
        "privacy": {**site.table["privacy"], "dp": "optional"},
    }
    site.refused(offer, "'single_silos' by reveal_changes = True", **loose)
    check(offer, site.policy(disclosures=["single_silos"], **loose))
    # A visit is a round: an algorithm that says 1 runs as many as there are silos.
    site.refused(offer, "it may run 3 rounds (at most 2)", **{**loose, "max_rounds": 2}, disclosures=["single_silos"])


def test_iterations_within_a_round_count(site: Site) -> None:
    options = {"name": "sfvi-avg", "rounds": 2, "bures_iterations": 90}
    offer = site.offer(config(algorithm=options, privacy=None), data_set="cohort")
    rules: dict[str, Any] = {
        "model": [{"hash": offer.model.hex(), "function": "model.py:mean"}],
        "algorithms": ["sfvi-avg"],
        "privacy": {**site.table["privacy"], "dp": "optional"},
        "disclosures": ["final_likelihood"],
    }
    site.refused(offer, "phase 'bures' may take 178 sums (at most 100)", **rules)
    check(offer, site.policy(**rules, **{"max_rounds": 178}))


def test_all_sites_of_a_job_let_as_many_of_its_sums_lack_silos(site: Site) -> None:
    """Each counted by its own policy. A strict site that was left out of the last rounds is asked no more: it was
    missing in as many of them as the most lenient of the others allows. Now the job says how many, and each site has to
    allow it. The controls allow that, or lack none."""
    rules: dict[str, Any] = {
        "privacy": {**site.table["privacy"], "dp": "optional"}, "min_cohort": 2, "max_missing": 1,
    }  # fmt: skip

    def job(**sums: int) -> JobOffer:
        options, kind = {"name": "sfvi", "iterations": 5}, {"kind": "masked", "max_missing": 1, "min_cohort": 2}
        offer = site.offer(config(algorithm=options, aggregation={**kind, **sums}, privacy=None), data_set="cohort")
        rules["model"] = [{"hash": offer.model.hex(), "function": "model.py:mean"}]
        return offer

    says = "3 of its sums may lack silos, by aggregation.max_differences (max_differences: at most 2)"
    site.refused(job(max_differences=3), says, **rules, max_differences=2)
    check(job(max_differences=3), site.policy(**rules, max_differences=3))
    check(job(), site.policy(**rules))
    # Where none is to be missing sums are whole, and not by a job's word: of shares t of 7 silos open one's term.
    strict, says = {**rules, "max_missing": 0}, r"may lack 1 of the silos asked, by aggregation.max_missing"
    site.refused(job(), says, **{**rules, **strict})
    site.refused(job(max_differences=1, min_cohort=3), says, **{**rules, **strict, "max_differences": 1})
    check(job(max_missing=0), site.policy(**{**rules, **strict}))


def test_sums_after_the_rounds_count_and_have_to_be_listed(site: Site) -> None:
    """They were outside `max_rounds` and outside what a policy lists: up to 7 x 1000 exact values of the likelihood.
    The control is a run of fixed length, which makes none."""
    rules: dict[str, Any] = {"privacy": {**site.table["privacy"], "dp": "optional"}, "algorithms": ["pvi"]}

    def job(**options: Any) -> tuple[JobOffer, dict[str, Any]]:
        offer = site.offer(config(algorithm={"name": "pvi", **options}, privacy=None), data_set="cohort")
        return offer, {**rules, "model": [{"hash": offer.model.hex(), "function": "model.py:mean"}]}

    offer, allowed = job(max_rounds=10)
    listed = {"disclosures": ["final_likelihood"]}
    site.refused(offer, "'final_likelihood' by rounds, left out", **allowed, max_rounds=17)
    site.refused(offer, "it may run 10 rounds and 7 sums besides (at most 16)", **allowed, **listed, max_rounds=16)
    check(offer, site.policy(**allowed, **listed, max_rounds=17))
    offer, allowed = job(rounds=10)
    check(offer, site.policy(**allowed, max_rounds=11))


def test_a_server_may_not_choose_who_is_asked(site: Site, world: World) -> None:
    """Three of thirty silos, two of them the server's friends: here two of three, through `decide`."""
    home, hub = world.homes["north"], world.homes["hub"].identity()
    two = config(silo=[{"id": name, "data": "x.csv"} for name in ("north", "south")], aggregation={
        "kind": "masked", "min_cohort": 2})  # fmt: skip
    message = sign_offer(site.offer(two), hub)
    trail = open_trail(home)
    for rules, says in (
        ({}, "it asks 2 of the roster's 3 silos (silos = all)"),
        ({"silos": 0.7}, "it asks 2 of the roster's 3 silos (silos = 0.7)"),
        ({"silos": 0.5, "must_include": ["east"]}, "it does not ask silo 'east', which must_include names"),
    ):
        site.policy(min_cohort=2, **rules)
        with pytest.raises(PolicyError) as caught:
            decide(home, message, trail, NOW, met=True)
        assert says in str(caught.value)
    site.policy(min_cohort=2, silos=0.5, must_include=["south"])
    decide(home, message, trail, NOW, met=True)
    for wrong in (0.0, 1.5, "most"):
        with pytest.raises(InputError, match="silos"):
            site.policy(silos=wrong)


def test_an_option_that_nobody_has_judged_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a later release whose author forgot the policies: in the algorithm, the sums, privacy and the job."""
    assert not list(unjudged(site.offer().config))
    for name in ALGORITHMS:
        cls = named(ALGORITHMS, "", name)
        options = {"reveal_changes": True} if name in ("vcl", "streaming-vb") else {}
        assert not list(unjudged(build(cls, options, ""))), name
    for sums in (Plain(), Masked(), Homomorphic()):
        assert not list(unjudged(sums))

    @dataclasses.dataclass(frozen=True)
    class SFVI(sf.SFVI):  # the fake has the name, and one option more
        echo_records: bool = False

    module = types.ModuleType("fake_release")
    module.SFVI = SFVI  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_release", module)
    monkeypatch.setitem(ALGORITHMS, "sfvi", "fake_release:SFVI")
    site.refused(site.offer(), "option 'algorithm.echo_records' is not known to this release's policies")
    monkeypatch.undo()
    check(site.offer(), site.policy())


def test_options_in_tables_are_judged_as_well() -> None:
    """The control: a table of plain values."""

    @dataclasses.dataclass(frozen=True)
    class Later:
        echo_records: bool = True

    table: Any = {"lr": 0.1, "more": [{"deep": Later()}]}
    assert list(unjudged(table, "optimizer_options")) == ["optimizer_options.more.deep.echo_records"]
    assert not list(unjudged({"lr": 0.1, "betas": [0.9, 0.99]}))


@pytest.mark.later
def test_a_server_does_not_pick_a_sites_records(site: Site) -> None:
    """One record of its choice, by sizes and a seed; or a program's rows in place of the policy's file. The controls:
    a policy that lists both, an even split, a data set of a program."""

    def offer(data: dict[str, Any] | None = None, **partition: Any) -> JobOffer:
        split = {"ids": ["east", "north", "south"], **({} if "sizes" in partition else {"count": 3}), **partition}
        of = config(model={"program": "six-cities"}, silo=None, data=data, partition=split)
        return site.offer(of, manifest(of).hash)

    def rules(**data: Any) -> dict[str, Any]:
        return {"model": [{"hash": offer().model.hex()}], "data": [{"id": "cohort", **data}]}

    site.refused(offer(), "by [partition] it says which records are used as data set 'cohort'", **rules())
    site.refused(offer({"x": 1}), "by [data] it says which records", **rules(from_job=["partition"]))
    site.refused(offer(), "by [partition] it would not read the file", **rules(path="none.csv"))
    check(offer(), site.policy(**rules(from_job=["partition"])))
    both = rules(from_job=["partition", "data"])
    site.refused(offer({"count": 3}), "by [data] a loader may leave out all records but a few", **both)
    check(offer({"count": 3}), site.policy(**both, disclosures=["sampled_records"]))
    one = offer(sizes=[268, 1, 268], seed=2)
    site.refused(one, "give a silo 1 records", **rules(from_job=["partition"]))
    check(one, site.policy(**rules(from_job=["partition"]), disclosures=["sampled_records"]))
    check(offer(sizes=[200, 180, 157]), site.policy(**rules(from_job=["partition"])))
    with pytest.raises(InputError, match="a data set is the file of its path"):
        site.policy(**rules(path="cohort.csv", from_job=["partition"]))


def test_the_derived_noise_is_held_to_the_floor(site: Site) -> None:
    settings = RecordDP(epsilon=0.9, delta=1e-7)
    terms = {"gradient": agree(settings, 3, 0.1, 100, Extent(10, 0, 0))}
    noise = terms["gradient"].noise_multiplier
    check_terms(terms, site.policy())
    floor = {**site.table["privacy"], "min_noise_multiplier": noise * 1.01}
    with pytest.raises(PolicyError, match="phase 'gradient' has a noise multiplier of"):
        check_terms(terms, site.policy(privacy=floor))
    with pytest.raises(PolicyError, match="adds no noise"):
        check_terms({}, site.policy())
    check_terms({}, site.policy(privacy={**site.table["privacy"], "dp": "optional"}))


@pytest.mark.parametrize(
    ("aggregation", "says"),
    [
        ({"kind": "plain"}, "aggregation 'plain'"),
        ({"kind": "masked", "consistency_check": False}, "aggregation 'masked-unchecked'"),
        ({"kind": "homomorphic", "masks": False}, "aggregation 'homomorphic-unmasked'"),
        ({"kind": "homomorphic", "scheme": "ckks"}, "aggregation 'homomorphic-unmasked'"),
        ({"kind": "masked", "min_cohort": 2}, "its sums may have 2 silos"),
    ],
)
def test_weaker_sums_need_their_own_name(site: Site, aggregation: dict[str, Any], says: str) -> None:
    offer = site.offer(config(aggregation=aggregation))
    site.refused(offer, says, aggregations=["masked", "homomorphic"])
    if "masked-unchecked" in says:
        check(offer, site.policy(aggregations=["masked", "masked-unchecked"]))


def test_the_budget_counts_the_unit_that_the_job_protects(site: Site) -> None:
    data = [{**site.table["data"][0], "unit": "silo"}]
    site.refused(site.offer(), "it protects each record, the budget of data set 'cohort' counts each silo", data=data)


def test_an_altered_model_file_is_refused(site: Site) -> None:
    offer = site.offer()
    path = site.folder / "model.py"
    path.write_text(MODEL.replace("5.0", "5.1"))
    site.refused(offer, "the model here hashes to", "source, an import, a bound or a version was altered")
    path.write_text(MODEL)
    check(offer, site.policy())


def test_another_bound_is_another_model(site: Site) -> None:
    privacy = {"unit": "record", "epsilon": 0.9, "delta": 1e-7, "data_set": "cohort", "clipping_norm": 100.0}
    looser = config(privacy=privacy)
    site.refused(site.offer(looser, site.model(config())), "the model here hashes to")
    site.refused(site.offer(looser), "is not accepted")


def test_a_function_needs_the_sites_own_copy(site: Site) -> None:
    site.refused(site.offer(), "names no 'function'", model=[{"hash": site.table["model"][0]["hash"]}])
    (site.folder / "model.py").unlink()
    site.refused(site.offer(model=bytes.fromhex(site.table["model"][0]["hash"])), "model cannot be read here; see its")


@pytest.mark.parametrize("spoilt", ["gone", "altered", "identity", "signature"])
def test_no_refusal_tells_a_server_where_a_sites_files_lie(
    world: World, site: Site, spoilt: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each once did: a model's file that is gone, or runs what no hash names, another identity than the roster's, a
    signature that is missing. The control is the site's own log, which says where."""
    home, agreed = world.homes["north"], bytes.fromhex(site.table["model"][0]["hash"])
    site.policy()
    message = sign_offer(site.offer(model=agreed), world.homes["hub"].identity())
    if spoilt == "gone":
        (site.folder / "model.py").unlink()
    elif spoilt == "altered":
        (site.folder / "model.py").write_text(MODEL + "\n\neval('1')\n")
    with closing(open_trail(home)) as trail:
        if spoilt == "identity":
            for file in (home.path / "identity.pem", home.path / "identity.pub"):
                file.write_bytes((world.homes["south"].path / file.name).read_bytes())
        elif spoilt == "signature":
            next(home.roster_file(1).with_suffix(".sig").glob("*.sig")).unlink()
        status, said = answered(lambda _, body: decide(home, body, trail, NOW, met=True) and b"", "job", message)
    assert status == REFUSAL
    assert str(home.path) in caplog.text
    assert str(home.path) not in said.decode()
    assert any(word in said.decode() for word in ("outside this site's policy", HomeError.TOLD))


def test_a_refusal_tells_a_server_of_no_other_data_set_or_model(world: World, site: Site) -> None:
    """One offer of what no site has once brought the names of all its data sets, and the formulas of other studies. The
    control: what the site's own people read has them; what was asked for, and limits, the server is told."""
    home, hub = world.homes["north"], world.homes["hub"].identity()
    formula = {"formula": "relapse ~ dose + (1 | physician)", "family": "bernoulli"}
    site.policy(data=[{"id": "clinic", "path": "clinic.csv"}], model=[*site.table["model"], formula])
    text = {"kind": "number", "low": 0, "high": 1}
    model = {"formula": "y ~ x", "dictionary": {"format": 1, "columns": {"x": text, "y": text}}}
    own, told = "", b""
    with closing(open_trail(home)) as trail:
        for of, known in ((config(), bytes(32)), (config(model=model), manifest(config(model=model)).hash)):
            message = sign_offer(site.offer(of, known, "cohort"), hub)
            with pytest.raises(PolicyError) as caught:
                decide(home, message, trail, NOW, met=True)
            own += str(caught.value)
            told += answered(lambda _, body: decide(home, body, trail, NOW, met=True) and b"", "job", message)[1]
        noted = b"".join(path.read_bytes() for path in home.path.glob("audit-log.sqlite*"))
    for secret in ("clinic", "relapse", site.table["model"][0]["hash"][:16]):
        assert secret in own
        assert secret.encode() not in told + noted
    for words in ("data set 'cohort' is not offered", "formula 'y ~ x'", "model 0000000000000000... is not accepted"):
        assert words.encode() in told
        assert words.encode() in noted


def test_a_policy_that_others_may_edit_is_refused(site: Site) -> None:
    site.policy()
    path = site.folder / "policy.toml"
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        with pytest.raises(InputError, match="may be written by others than its owner"):
            read_policy(path)
    path.chmod(0o644)
    read_policy(path)
    site.folder.chmod(0o777)  # who may write the folder may put another file there
    with pytest.raises(InputError, match="may be written by others"):
        read_policy(path)
    site.folder.chmod(0o700)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"min_cohorts": 3}, "unknown key 'min_cohorts'; did you mean 'min_cohort'"),
        ({"max_rounds": "many"}, "max_rounds = 'many': must be a whole number"),
        ({"aggregations": ["maskd"]}, "aggregations"),
        ({"rosters": ["abc"]}, "64 hexadecimal digits"),
        ({"min_cohort": 1}, "min_cohort = 1: must be at least 2"),
        ({"privacy": {"dp": "never"}}, "privacy"),
        ({"data": [{"id": "a", "epsilon": 1.0}]}, "a budget needs both epsilon and delta"),
        ({"data": [{"id": "a", "response": ["died"]}]}, "of a vertical job, which needs the path of a table"),
        ({"data": [{"id": "a", "path": "a.csv", "missing": "drop"}]}, "query, tables and missing need a dict"),
        ({"data": [{"id": "a", "dictionary": "d.toml"}]}, "a dictionary needs the path of a table"),
        (
            {"data": [{"id": "a", "path": "a.csv", "dictionary": "d.toml", "alignment": {"column": "person"}}]},
            "a vertical job reads numbers and ids, and no dictionary",
        ),
        ({"model": [{"hash": "00" * 32, "formula": "y ~ 1"}]}, "agreed to by its hash, or by its formula"),
        ({"model": [{"formula": "y ~ 1", "function": "own.py:f"}]}, "a formula has no function"),
        ({"model": [{"hash": "00" * 32, "record": "row"}]}, "family, record, most and priors belong to a formula"),
        ({"data": [{"id": "a"}, {"id": "a"}]}, "data set 'a' stands twice"),
        (
            {"data": [{"id": n, "from_job": ["partition"]} for n in "ab"]},
            "of data sets 'a' and 'b' jobs name the records",
        ),
        ({"format": 2}, "format = 2"),
    ],
)
def test_a_mistake_in_the_policy_is_named(site: Site, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        site.policy(**changes)
    assert says in str(caught.value)


def test_who_agreed_to_a_hash_agreed_to_no_formula() -> None:
    """The control is the formula itself."""
    asked = Model(formula="y ~ 1", dictionary="d.toml")
    assert not ModelRule(hash="00" * 32).allows(asked)
    assert not ModelRule(formula="any").allows(Model(program="six-cities"))
    assert ModelRule(formula="y  ~ 1").allows(asked)


def test_losses_and_differences_are_none_where_the_file_is_silent(site: Site) -> None:
    silent, stated = site.policy(), site.policy(max_missing=2, max_differences=5)
    assert (silent.max_missing(exact=True), silent.max_missing(exact=False), silent.max_differences) == (0, None, 0)
    assert (stated.max_missing(exact=True), stated.max_missing(exact=False), stated.max_differences) == (2, 2, 5)
    for change in ({"max_missing": -1}, {"max_differences": -1}, {"max_missing": "all"}):
        with pytest.raises(InputError, match=next(iter(change))):
            site.policy(**change)


def test_every_rule_must_stand_in_the_file(site: Site) -> None:
    for key in ("rosters", "algorithms", "aggregations", "min_cohort", "max_rounds", "privacy"):
        path = site.folder / "policy.toml"
        path.write_text(wording.dumps({k: v for k, v in site.table.items() if k != key}))
        with pytest.raises(InputError, match=f"'{key}' is missing"):
            read_policy(path)


def test_no_policy_is_no_permission(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the policy"):
        read_policy(tmp_path / "policy.toml")


def test_past_the_rows_of_a_day_no_new_job_is_let_in(site: Site, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be answered without a row, by which jobs are counted. The controls: a day with rows left, and a job that
    was let in before, which goes on."""
    home, message = world.homes["north"], sign_offer(site.offer(), world.homes["hub"].identity())
    site.policy()
    with closing(open_trail(home)) as trail:
        for full, before in ((True, False), (False, False), (True, True)):
            monkeypatch.setattr(Trail, "full", property(lambda _, full=full: full))
            refused = pytest.raises(ProtocolError, match="this site was asked too often today; offer it again tomorrow")
            with refused if full and not before else nullcontext():
                decide(home, message, trail, NOW, met=True)
            assert bool(trail.chain.jobs) is (before or not full)


def test_of_two_servers_the_first_is_listened_to(site: Site, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's offer, right as it is, is not the first's to hand on. The control: where it is the first."""
    home, hub = world.homes["north"], site.roster.member("hub")
    site.policy()
    for first in ("relay", "hub"):
        servers = (hub.model_copy(update={"id": first}), hub)
        monkeypatch.setattr(ConsortiumRoster, "of_role", lambda *_, servers=servers: servers)
        refused = pytest.raises(ProtocolError, match="offer of 'hub', where 'relay' is the server that is listened to")
        with nullcontext() if first == "hub" else refused, closing(open_trail(home)) as trail:
            decide(home, sign_offer(site.offer(), world.homes["hub"].identity()), trail, NOW, met=True)


def test_an_offer_that_meets_a_fault_of_ours_has_its_row_too(
    site: Site, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 10^400 did: rows are what offers are counted by, a thousand a day. The control: a refusal has its row."""
    home, hub = world.homes["north"], world.homes["hub"].identity()
    trail, huge = open_trail(home), config(privacy={"unit": "record", "epsilon": 10**400})
    site.policy(max_rounds=99)
    with pytest.raises(PolicyError):
        decide(home, sign_offer(site.offer(), hub), trail, NOW, met=True)
    before = trail.chain.length
    with pytest.raises(ProtocolError, match="is no TOML"):
        decide(home, sign_offer(site.offer(huge, bytes(32)), hub), trail, NOW, met=True)

    def fault(*of: object) -> None:
        raise RuntimeError("of a record: 3")

    for name in ("check", "read_offer"):
        with monkeypatch.context() as patched:
            patched.setattr(deciding, name, fault)
            with pytest.raises(RuntimeError):
                decide(home, sign_offer(site.offer(), hub), trail, NOW, met=True)
    trail.close()
    told = [row.fields for row in rows(home.log_file)[1]]
    assert len(told) == before + 3
    assert "RuntimeError, unforeseen" in str(told[-2:])
    assert "of a record" not in str(told)


def test_a_decision_is_written_down_whichever_it_is(site: Site, world: World) -> None:
    home, hub = world.homes["north"], world.homes["hub"].identity()
    trail = open_trail(home)
    policy = site.policy()
    decision = decide(home, sign_offer(site.offer(), hub), trail, NOW, met=True)
    local = decision.local_config("north")
    assert local.model.function == site.function
    assert {s.id: s.data for s in local.silo}["north"] == str(site.folder / "cohort.csv")
    assert {s.id: s.data for s in local.silo}["south"] == "at-site"
    site.policy(max_rounds=99)
    with pytest.raises(PolicyError, match="at most 99"):
        decide(home, sign_offer(site.offer(), hub), trail, NOW, met=True)
    with pytest.raises(ProtocolError, match="not signed by the identity"):
        decide(home, sign_offer(site.offer(), Identity()), trail, NOW, met=True)
    trail.close()
    chain = verify(home.log_file)
    accepted, refused = chain.jobs.values()
    assert (accepted.accepted, refused.accepted) == (True, False)
    # Digests of all rows leave the site, unkeyed: of one that had the hash, a server would try policies.
    assert accepted.fields["policy"] == logged_policy(home, policy.hash)
    assert not any(policy.hash in row.body for row in rows(home.log_file)[1])
    assert accepted.fields["epsilon"] == 0.9
    assert "it may run 100 rounds (at most 99)" in refused.fields["reason"]
    kinds = [row.kind for row in rows(home.log_file)[1]]
    assert kinds == ["genesis", "roster", "policy", "job", "note", "note", "policy", "job", "note"]


def test_an_id_stands_for_one_job(site: Site, world: World) -> None:
    home, hub = world.homes["north"], world.homes["hub"].identity()
    trail, offer = open_trail(home), site.offer()
    site.policy()
    message = sign_offer(offer, hub)
    decide(home, message, trail, NOW, met=True)
    other = dataclasses.replace(offer, made=offer.made + 1)
    with pytest.raises(ProtocolError, match="was accepted with another offer"):
        decide(home, sign_offer(other, hub), trail, NOW, met=True)
    trail.close_job(offer.job, "lost the server")
    decide(home, message, trail, NOW + 20 * DAY, met=True)  # it goes on, after its offer has expired for others
    with pytest.raises(ProtocolError, match="the job offer expired"):
        decide(home, sign_offer(site.offer(), hub), trail, NOW + 20 * DAY, met=True)
    trail.close_job(offer.job, FINISHED)
    with pytest.raises(ProtocolError, match="has finished; its offer was sent again"):
        decide(home, message, trail, NOW, met=True)


def test_a_key_holder_has_no_model_and_no_data(site: Site, world: World) -> None:
    offer = site.offer(config(aggregation={"kind": "homomorphic"}))
    rules: dict[str, Any] = {"model": [], "data": [], "algorithms": [], "aggregations": ["homomorphic"]}
    assert check(offer, site.policy(**rules), "holder") is None
    for change, says in (
        ({"rosters": []}, "roster"),
        ({"aggregations": ["masked"]}, "aggregation 'homomorphic'"),
        ({"min_cohort": 4}, "it has 3 silos"),
        ({"max_rounds": 1}, "100 rounds"),
    ):
        with pytest.raises(PolicyError, match=says):
            check(offer, site.policy(**{**rules, **change}), "holder")
    lacking = {"kind": "homomorphic", "max_missing": 1, "max_differences": 1, "min_cohort": 2}
    exact = site.offer(config(aggregation=lacking, privacy=None), data_set="cohort")
    rules |= {"min_cohort": 2, "max_missing": 1, "max_differences": 1}
    assert check(exact, site.policy(**rules), "holder") is None
    for change, says in (("max_missing", "may lack 1 of the silos"), ("max_differences", "1 of its sums may lack")):
        with pytest.raises(PolicyError, match=says):
            check(exact, site.policy(**{**rules, change: 0}), "holder")


@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_no_sum_but_plain_ones_has_fewer_silos_than_a_policy_asks_for(site: Site, kind: str) -> None:
    """A round that asks two of three, where min_cohort is 3. In a plain sum the server has each silo's term anyway,
    which the policy has to list; a job of too few silos is refused there too."""
    options = {"name": "sfvi", "iterations": 5, "participation": 0.67}
    silo = {"unit": "record", "epsilon": 0.9, "delta": 1e-7, "data_set": "cohort", "noise": "silo"}
    sums = {"kind": kind, **({"min_cohort": 2} if kind == "masked" else {})}
    offer = site.offer(config(aggregation=sums, privacy=silo, algorithm=options))
    models = [{"hash": offer.model.hex(), "function": "model.py:mean"}]
    rules: dict[str, Any] = {"model": models, "aggregations": [kind]}
    if kind == "plain":
        check(offer, site.policy(**rules))
        site.refused(offer, "it has 3 silos (at least 4)", **rules, min_cohort=4)
    else:
        site.refused(offer, "its phase 'round' asks 2 silos (min_cohort: at least 3)", **rules)
        check(offer, site.policy(**rules, min_cohort=2))


def test_keys_that_a_new_policy_shows_are_there() -> None:
    """Each of the commented ones: a site takes away the mark before it, and a key that is none is refused."""
    shown: dict[str, set[str]] = {}
    table = "top"
    for line in TEMPLATE.splitlines():
        if (named := re.match(r"(?:# )?\[+(\w+)\]+", line)) is not None:
            table = named[1]
        elif (key := re.match(r"# {1,4}(\w+) = ", line)) is not None:
            shown.setdefault(table, set()).add(key[1])
    assert {"query", "cohort", "epsilon"} <= shown["data"]  # the control
    assert shown["data"] <= DataRule.model_fields.keys()
    assert shown["model"] <= ModelRule.model_fields.keys()
    assert shown["privacy"] <= PrivacyRules.model_fields.keys()


def test_refusals_hold_no_control_characters(site: Site) -> None:
    name = "sfvi\x1b[2J" + "x" * 9000
    offer = dataclasses.replace(
        site.offer(), config=site.offer().config.model_copy(update={"algorithm": Algorithm(name=name)})
    )
    text = site.refused(offer, "it cannot be read here")
    assert text.isprintable()
    assert len(text) <= 4000
