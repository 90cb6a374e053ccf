"""The statement of what a job discloses, and the gate that holds a program to it."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, get_args

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import make_intercepts
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import Block, BlockTable, Total
from secure_fvi.building import strong_enough
from secure_fvi.cli.policy import disclosure_lines
from secure_fvi.deployment.policy import Allowed
from secure_fvi.disclosure import DISCLOSURES, WORDS, Declaration, Disclosure, Sums, check_carried, disclose
from secure_fvi.errors import AggregationError, InputError
from secure_fvi.fitting import build_parties
from secure_fvi.privacy.gate import Gate
from secure_fvi.privacy.terms import Extent, agree
from secure_fvi.runs.config import Engine

RECORD = {"noise_multiplier": 2.0, "delta": 1e-7}
AT_SERVER = sf.RecordDP(noise="server", **RECORD)
#: Sums from which single silos' terms are solved for, as the job says.
OPEN = sf.PVI(schedule="asynchronous", reveal_changes=True)


@pytest.mark.parametrize(
    ("algorithm", "aggregation", "privacy", "kinds"),
    [
        (sf.SFVI(), sf.Masked(), None, ("final_likelihood",)),
        (sf.SFVI(iterations=5), sf.Masked(), None, ()),
        (sf.SFVI(sampling_rate=0.1), sf.Masked(), None, ("final_likelihood", "sampled_records")),
        (sf.SFVI(sampling_rate=0.1, iterations=5), sf.Masked(), sf.RecordDP(**RECORD), ()),
        (sf.SFVI(participation=0.5), sf.Masked(), None, ("changing_cohorts", "final_likelihood")),
        (sf.SFVI(participation=0.01), sf.Plain(), None, ("single_silos", "final_likelihood")),
        (sf.FedAvg(sampling_rate=0.01, local_steps=1), sf.Masked(), None, ("sampled_records",)),
        (sf.FedAvg(sampling_rate=0.01, local_steps=500), sf.Masked(), None, ("sampled_records",)),
        (sf.SFVIAvg(sampling_rate=0.1), sf.Masked(), None, ("final_likelihood", "sampled_records")),
        (sf.PVI(sampling_rate=0.1), sf.Masked(), None, ("final_likelihood", "sampled_records")),
        (sf.FedVI(), sf.Masked(), None, ("sampled_records",)),
        (sf.SFVIAvg(barycenter="trusted"), sf.Plain(), None, ("per_silo_rows", "final_likelihood")),
        (OPEN, sf.Masked(), None, ("single_silos", "changing_cohorts", "final_likelihood")),
        (sf.PVI(schedule="asynchronous", buffer=6), sf.Masked(), None, ("final_likelihood",)),
        (sf.PVI(schedule="asynchronous", rounds=5), sf.Masked(), sf.SiloDP(**RECORD, noise="silo"), ()),
        (sf.PVI(schedule="sequential", reveal_changes=True), sf.Plain(), None, ("single_silos", "final_likelihood")),
        (sf.VCL(reveal_changes=True), sf.Plain(), None, ("single_silos",)),
        (sf.Vertical(response="private"), sf.Masked(), None, ("person_rows",)),
        (sf.Vertical(model="power", batch_size=1), sf.Masked(), None, ("person_rows", "sampled_records")),
        (sf.Vertical(), sf.Masked(), sf.RecordDP(**RECORD), ()),
        # Its noise is added to what leaves the server, which sees what it sees of a job without privacy.
        (
            sf.SFVI(iterations=5, sampling_rate=0.1),
            sf.Masked(),
            sf.RecordDP(noise="server", **RECORD),
            ("sampled_records",),
        ),
        (
            sf.SFVI(iterations=5, participation=0.5),
            sf.Masked(),
            sf.RecordDP(noise="server", **RECORD),
            ("changing_cohorts",),
        ),
        (sf.SFVI(iterations=5, sampling_rate=0.1), sf.Masked(), sf.RecordDP(noise="silo", **RECORD), ()),
        (sf.SFVI(iterations=5), sf.Masked(), sf.RecordDP(public_counts=True, **RECORD), ("exact_counts",)),
        (sf.SFVI(iterations=5), sf.Masked(), sf.RecordDP(objective_share=0.2, **RECORD), ("objective",)),
        (sf.SFVI(iterations=5), sf.Masked(), sf.SiloDP(target_quantile=0.5, **RECORD), ("adaptive_clipping",)),
    ],
)
def test_each_disclosure_follows_from_its_options(
    algorithm: Any, aggregation: Any, privacy: Any, kinds: tuple[str, ...]
) -> None:
    found = disclose(algorithm, aggregation, privacy, 6)
    assert found.kinds == kinds
    for name in kinds:
        assert any(f"'{name}': {DISCLOSURES[name]}" in line for line in disclosure_lines(found))


def test_what_is_named_as_the_cure_of_equations_is_one() -> None:
    """The job is refused as it stands; each of the three that the refusal names is not, and two of them show nobody."""
    with pytest.raises(InputError, match=r"reveal_changes = true .*'synchronous'.*, or use noise that the"):
        disclose(sf.PVI(schedule="asynchronous", rounds=5), sf.Masked(), None, 6)
    assert "single_silos" in disclose(OPEN, sf.Masked(), None, 6).kinds
    noise = sf.SiloDP(noise="silo", **RECORD)
    for algorithm, privacy in ((sf.PVI(rounds=5), None), (sf.PVI(schedule="asynchronous", rounds=5), noise)):
        found = disclose(algorithm, sf.Masked(), privacy, 6)
        assert "single_silos" not in found.kinds
        assert not found.solvable


def test_a_policy_may_list_each_disclosure_and_nothing_else() -> None:
    assert set(get_args(Allowed)) == set(DISCLOSURES)


@pytest.mark.parametrize(
    ("algorithm", "aggregation", "privacy", "words"),
    [
        (sf.SFVIAvg(barycenter="trusted"), sf.Masked(), None, "barycenter = 'trusted'"),
        (sf.SFVIAvg(barycenter="trusted"), sf.Homomorphic(), None, "hide it in name only"),
        (sf.PVI(schedule="sequential", reveal_changes=True), sf.Masked(), None, "schedule = 'sequential'"),
        (sf.PVI(schedule="asynchronous", buffer=1), sf.Masked(), None, "buffer = 1"),
        (sf.PVI(schedule="asynchronous"), sf.Masked(), None, "equations for each silo's own term"),
        (sf.PVI(schedule="asynchronous"), sf.Homomorphic(), None, "Say reveal_changes = true to accept this"),
        (sf.VCL(reveal_changes=True), sf.Masked(), None, "reveal_changes = true"),
        (sf.SFVI(participation=0.1), sf.Masked(), None, "participation = 0.1"),
        (sf.SFVI(participation=0.4), sf.Masked(), None, "asks 2 of 6 silos .* min_cohort = 3"),
        (sf.SFVI(iterations=5), sf.Plain(), sf.RecordDP(**RECORD), "needs a masked or homomorphic sum"),
        (sf.SFVI(iterations=5), sf.Homomorphic(masks=False), sf.RecordDP(**RECORD), "exact sums with masks"),
        # The key holder opens totals before the server has added its noise.
        (sf.FedAvg(), sf.Homomorphic(masks=False), sf.SiloDP(**RECORD, noise="server"), "before that noise"),
        (sf.FedAvg(), sf.Homomorphic(scheme="ckks"), sf.SiloDP(**RECORD, noise="server"), "before that noise"),
    ],
)
def test_what_a_sum_would_hide_in_name_only_is_refused(
    algorithm: Any, aggregation: Any, privacy: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        disclose(algorithm, aggregation, privacy, 6)
    quiet = dataclasses.replace(privacy, noise="silo") if privacy is not None else None
    disclose(algorithm, sf.Plain(), quiet, 6)  # where it is said what the server sees, it is allowed


def test_sums_are_counted_by_phase_with_their_iterations() -> None:
    phases = {
        p.phase: p.at_most for p in disclose(sf.SFVIAvg(rounds=7, bures_iterations=4), sf.Masked(), None, 3).phases
    }
    assert phases == {"count": 1, "merge": 7, "bures": 21, "finish": 1, "refine": 6}
    visits = disclose(sf.StreamingVB(passes=3, reveal_changes=True), sf.Plain(), None, 5)
    assert (visits.rounds, visits.phases[0].at_most, visits.phases[0].cohort) == (15, 15, "sequential")
    warm = disclose(sf.SFVI(iterations=9, warm_start=sf.WarmStart(rounds=2)), sf.Masked(), None, 3)
    assert {p.phase: p.at_most for p in warm.phases} == {"count": 1, "merge": 2, "round": 9}
    assert warm.rounds == 11


@pytest.mark.parametrize(
    ("algorithm", "most"), [(sf.SFVIAvg(rounds=7), 8), (sf.SFVI(), 7), (sf.PVI(), 7), (sf.PVI(rounds=2), 1),
    (sf.BCM(prior="split"), 1), (sf.SFVI(iterations=5), 0)], ids=lambda a: str(a)[:9],
)  # fmt: skip
def test_sums_besides_the_rounds_are_counted_and_said(algorithm: Any, most: int) -> None:
    """As the program's order has them, which silos go by. They lack nobody, whatever rounds may lack."""
    problem, sums = make_intercepts(), sf.Masked(min_cohort=2, max_missing=1, max_differences=9)
    found = disclose(algorithm, sums, None, 3)
    assert found.besides == most
    assert {p.at_least for p in found.phases if p.besides} <= {3}
    assert [line.count("besides the rounds") for line in disclosure_lines(found)].count(1) == sum(
        p.besides for p in found.phases
    )
    assert (f"{found.rounds + most} in all" in disclosure_lines(found)[0]) is bool(most)
    server, _, _ = build_parties(problem.model, problem.silos, algorithm, sums, compile=False)
    counted = {name: phase.counts for name, phase in server.program.order.phases.items()}
    assert counted == {p.phase: not p.besides for p in found.phases if p.phase in counted}
    assert (found.missing, found.differences) == (1, 9)
    assert any("9 exact sums of its rounds may lack up to 1 silo" in line for line in disclosure_lines(found))
    assert disclose(algorithm, sf.Masked(min_cohort=2, max_missing=1), None, 3).missing == 0


def test_the_final_likelihood_is_told_by_its_flag_and_not_by_words() -> None:
    """Control: with the flag turned over, and not a word with it, the statement is the opposite, and the gate's."""

    class Told:
        name = "told"

        def __init__(self, *sums: Sums) -> None:
            self.sums = sums

        def declare(self, silos: int, private: bool) -> Declaration:
            return Declaration(1, self.sums, "nothing")

    def kinds(*sums: Sums) -> tuple[str, ...]:
        return disclose(Told(*sums), sf.Masked(), None, 3).kinds

    words = Sums("finish", 1, "its log-likelihood", 3, besides=True)
    assert kinds(words) == ()
    assert kinds(dataclasses.replace(words, what="a number", likelihood=True)) == ("final_likelihood",)
    table = BlockTable((Block("weighed", (4,), 1.0),))
    flagged = Told(dataclasses.replace(words, likelihood=True))
    assert disclose(flagged, sf.Masked(), None, 3).of_program({"finish": table}, {}, sf.Masked()).phases[0].blocks
    with pytest.raises(InputError, match="sums 'weighed' in phase 'finish', which it does not declare"):
        disclose(Told(words), sf.Masked(), None, 3).of_program({"finish": table}, {}, sf.Masked())


def test_losses_that_noise_counts_on_are_in_the_statement() -> None:
    settings = sf.RecordDP(dropouts=2, **RECORD)
    assert disclose(sf.SFVI(iterations=3), sf.Masked(), settings, 10).at_least == 8
    assert disclose(sf.SFVI(iterations=3), sf.Plain(), None, 10).at_least == 1


@pytest.mark.parametrize(
    ("options", "sums", "at_least", "lacking"),
    [
        (None, {"max_missing": 1}, 4, 1),  # shares are dealt, and no total lacks one
        (None, {"max_missing": 1, "max_differences": 1}, 3, 1),
        ({"noise": "server"}, {}, 4, 0),  # it read as "any down to min_cohort", which no sum let happen
        ({"noise": "server"}, {"max_missing": 1}, 4, 1),
        ({"noise": "server"}, {"max_missing": 1, "max_differences": 1}, 3, 1),
        ({"noise": "silo"}, {}, 3, 1),
        ({"dropouts": 2}, {}, 3, 1),  # min_cohort counts as well: sums recovered from a loss that could not be
        ({"dropouts": 1}, {"min_cohort": 4}, 4, 0),
    ],
)
def test_what_a_sum_may_lack_is_read_once(
    options: dict[str, Any] | None, sums: dict[str, int], at_least: int, lacking: int
) -> None:
    settings = None if options is None else sf.RecordDP(**{**RECORD, **options})
    aggregation = sf.Masked(**sums)
    found = disclose(sf.SFVI(iterations=3), aggregation, settings, 4)
    used = strong_enough(aggregation, found)
    assert (found.at_least, found.lacking) == (at_least, lacking)
    assert used.max_missing == lacking
    if not found.exact:
        assert max(used.min_cohort, 4 - used.max_missing) == at_least


@pytest.mark.parametrize(
    ("silos", "sums", "options", "most"),
    [
        (7, sf.Masked(), {"colluders": 3, "dropouts": 1}, 2),
        (7, sf.Masked(), {"colluders": 5}, None),  # whole sums: the total of two is all there is
        (30, sf.Masked(), {"colluders": 12, "dropouts": 1}, 11),
        (7, sf.Homomorphic(), {"colluders": 3}, 2),  # these always recover
        (64, sf.Masked(), {"colluders": 7}, 6),  # the graph assumes a tenth
        (64, sf.Masked(corrupt=0.15), {"colluders": 7}, None),
        (4, sf.Masked(consistency_check=False), {"dropouts": 1, "colluders": 2}, None),  # one share: all of the noise
        (5, sf.Masked(consistency_check=False), {"dropouts": 1, "colluders": 2}, 0),
        (4, sf.Masked(consistency_check=False), {"dropouts": 1}, 0),  # it may leave one out of three that it names
        (3, sf.Masked(consistency_check=False), {}, None),
    ],
)
def test_noise_in_shares_counts_on_no_more_colluders_than_the_sums_withstand(
    silos: int, sums: Any, options: dict[str, int], most: int | None
) -> None:
    """Whoever opens a term finds one share of the noise there. What they withstand, test_attack_views.py attacks. The
    control: all of the noise at each silo."""
    if most is not None:
        with pytest.raises(InputError, match=f"withstand {most} in league with a lying server"):
            disclose(sf.SFVI(iterations=3), sums, sf.RecordDP(**RECORD, **options), silos)
        options = options | {"colluders": most}
        disclose(sf.SFVI(iterations=3), sums, sf.RecordDP(**RECORD, noise="silo", **options), silos)
    assert disclose(sf.SFVI(iterations=3), sums, sf.RecordDP(**RECORD, **options), silos).exact is False


def test_a_silo_is_not_dropped_where_no_sum_may_lack_one() -> None:
    drop = Engine(on_loss="drop")
    for sums in (sf.Masked(min_cohort=3), sf.Masked(min_cohort=2, max_missing=1)):
        with pytest.raises(InputError, match="on_loss = 'drop': no sum of this job may lack a silo"):
            check_carried(disclose(sf.SFVI(), sums, None, 3), drop)
    check_carried(disclose(sf.SFVI(), sf.Masked(min_cohort=2, max_missing=1, max_differences=1), None, 3), drop)
    check_carried(disclose(sf.SFVI(), sf.Plain(), None, 3), drop)
    check_carried(disclose(sf.SFVI(iterations=3), sf.Masked(), sf.RecordDP(**RECORD), 3), drop)


def test_the_statement_is_held_against_the_program() -> None:
    found = disclose(sf.SFVI(), sf.Masked(), None, 3)
    table = BlockTable((Block("direct", (2,), 1.0),))
    assert found.of_program({"round": table}, {}, sf.Masked()).phases[0].exact() == ("direct",)
    with pytest.raises(InputError, match="phase 'more' that it does not declare"):
        found.of_program({"round": table, "more": table}, {}, sf.Masked())
    rows = BlockTable((Block("means", (3, 2), 1.0, rows="silo"),))
    with pytest.raises(InputError, match="a row a silo in 'means', which it does not declare"):
        found.of_program({"round": rows}, {}, sf.Masked())
    private = disclose(sf.SFVI(iterations=5), sf.Masked(), sf.RecordDP(**RECORD), 3)
    with pytest.raises(InputError, match="no terms of its privacy"):
        private.of_program({"round": table}, {}, sf.Masked())
    for rounds, silos in ((6, 3), (5, 4)):
        more = {"round": agree(sf.RecordDP(**RECORD), silos, 1.0, rounds, Extent(2, 0, 0))}
        with pytest.raises(InputError, match=f"for {rounds} sums of {silos} silos, and declares 5 of 3"):
            private.of_program({"round": table}, more, sf.Masked())


def _with_a_parameter(y: Tensor) -> None:
    scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(mu, scale), obs=y)


@pytest.mark.parametrize("name", ["SFVI", "SFVIAvg", "PVI", "FedAvg"])
def test_sums_of_a_models_parameters_are_declared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each algorithm runs a model with `pyro.param`; control: it does not where the statement leaves parameters out."""
    model = sf.FederatedModel(_with_a_parameter, "row")
    silos = [{"y": torch.tensor([0.0, 1.0, 2.0])}] * 3
    build_parties(model, silos, getattr(sf, name)(), sf.Plain(), compile=False)
    monkeypatch.setitem(WORDS, "theta", ("nothing of the kind",))
    with pytest.raises(InputError, match=r"sums 'theta/scale' in phase '[a-z]+', which it does not declare"):
        build_parties(model, silos, getattr(sf, name)(), sf.Plain(), compile=False)


def test_blocks_are_exact_or_noised_as_they_leave() -> None:
    problem = make_intercepts()
    settings = sf.RecordDP(public_counts=True, objective_share=0.1, **RECORD)
    found = _traced(problem, sf.SFVI(iterations=5), settings)
    (phase,) = found.phases
    assert phase.exact() == ("records",)
    assert any(line.strip().startswith("objective:") and line.endswith("noised") for line in disclosure_lines(found))
    assert any(line.strip().startswith("records:") and line.endswith("exact") for line in disclosure_lines(found))
    assert any("Skellam, 2 times" in line for line in disclosure_lines(found))


def _traced(problem: Any, algorithm: Any, privacy: Any) -> Disclosure:
    server, _, _ = build_parties(problem.model, problem.silos, algorithm, sf.Masked(), compile=False, privacy=privacy)
    found = disclose(algorithm, sf.Masked(), privacy, len(problem.silos))
    return found.of_program(server.program.tables, server.program.terms, sf.Masked())


# ---- the gate ----

SILOS = ("a", "b", "c")


def test_the_gate_lets_no_row_of_a_silo_out_that_the_job_does_not_disclose() -> None:
    tables = {"round": BlockTable((Block("means", (3, 2), 1.0, rows="silo"),))}
    with pytest.raises(AggregationError, match="block 'means' has a row a silo, and this job discloses none"):
        Gate("a", tables, silos=SILOS)
    gate = Gate("a", tables, silos=SILOS, rows_of_silos=True)
    gate.begin(1, "round")
    gate.release(np.zeros(6))


@pytest.mark.usefixtures("few_draws", "untraced")
def test_control_a_masked_sum_with_rows_of_silos_tells_each_silos_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused above, where nobody looks: the total has each silo's own posterior."""
    problem = make_intercepts()
    algorithm = sf.SFVIAvg(rounds=1, local_steps=2, barycenter="trusted", family="diagonal")

    def parties() -> Any:
        return build_parties(problem.model, problem.silos, algorithm, sf.Masked(min_cohort=2), compile=False)

    with pytest.raises(InputError, match="hide it in name only"):
        parties()
    monkeypatch.setattr("secure_fvi.disclosure._check_hidden", lambda *_: None)
    (server, engine, _), totals, own, release = parties(), list[Total](), dict[str, Any](), Gate.release
    monkeypatch.setattr(Gate, "release", lambda gate, v: release(gate, own.update({gate.silo: v}) or v))
    server.observe(types.SimpleNamespace(total=lambda index, total: totals.append(total), released=lambda *_: None))
    for _ in range(2):
        engine.run(server.round())
    split = server.program.tables["merge"].split
    told = split(totals[-1].values)["means"]
    assert len(np.unique(told.round(6), axis=0)) == len(problem.silos)
    for row, name in enumerate(sorted(own)):
        np.testing.assert_allclose(told[row], split(own[name])["means"][row], atol=1e-6)


def test_presence_says_no_more_than_who_is_there() -> None:
    """A program that wrote data there would name their silo: the gate takes one vector, the same whatever the data."""
    tables = {"round": BlockTable((Block("sum", (), 9.0), Block("present", (3,), 1.0, integer=True, rows="presence")))}
    for values in ([5.0, 0, 1, 0], [5.0, 1, 1, 0], [5.0, 0, 0, 0], [5.0, 0.5, 0, 0]):
        gate = Gate("a", tables, silos=SILOS)
        gate.begin(1, "round")
        with pytest.raises(AggregationError, match="'present' must be a one in its own row alone"):
            gate.release(np.array(values))
    gate = Gate("a", tables, silos=SILOS)
    gate.begin(1, "round")
    gate.release(np.array([5.0, 1, 0, 0]))
    for silos in ((), ("b", "c", "d"), ("a", "b")):
        with pytest.raises(AggregationError, match="must have a row for each silo"):
            Gate("a", tables, silos=silos)


@pytest.mark.parametrize(
    ("algorithm", "marked"),
    [
        (sf.SFVI(iterations=3), set()),
        (sf.SFVIAvg(rounds=1, local_steps=2, total_records=18, family="diagonal"), set()),
        (sf.SFVIAvg(rounds=1, local_steps=2, total_records=18, barycenter="trusted"), {"weights", "means", "spreads"}),
        (sf.PVI(rounds=1, local_steps=2), {"present"}),
        (sf.BCM(local_steps=2), set()),
        (sf.VCL(local_steps=2, reveal_changes=True), set()),
    ],
)
def test_blocks_are_symmetric_in_silos_unless_they_are_marked(algorithm: Any, marked: set[str]) -> None:
    """The same data, draws and broadcast under another silo's name: what a block holds changes where it is marked as
    naming silos, and nowhere else."""
    problem = make_intercepts()
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
    program, names = server.program, sorted(engine.silos)
    silo = engine.silos[names[0]]
    message = program.broadcast(server.state.algorithm, 1, dict.fromkeys(names, 0))
    table = program.tables[message.phase]
    said = []
    for name in names[:2]:
        gate = Gate(name, program.tables, silos=names, rows_of_silos=True)
        gate.begin(1, message.phase)
        view = silo.view._replace(silo=name)
        torch.manual_seed(0)
        said.append(silo.program.contribute(message, silo.program.init_local(view), view, gate)[0].values)
    first, second = (table.split(values) for values in said)
    assert {block.name for block in table.blocks if block.rows in ("silo", "presence")} == marked
    assert {name for name in first if not np.array_equal(first[name], second[name])} == marked


def test_an_algorithm_that_declares_nothing_runs_nowhere() -> None:
    class Odd:
        kind = "odd"

    with pytest.raises(InputError, match="nobody has said what such sums disclose"):
        disclose(sf.SFVI(), Odd(), None, 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="algorithm must be one"):
        disclose(object(), sf.Masked(), None, 3)  # type: ignore[arg-type]
    assert Declaration(1, (Sums("round", 1, "", 3),), "").share == 1
