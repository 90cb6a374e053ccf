"""Refusals that no behaviour of the other tests needs: each bad value, message or row alone is turned away by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ledger_world import Clock, gaussian_job, new_ledger

import secure_fvi as sf
from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.algorithms.vertical.likelihoods import Bernoulli
from secure_fvi.errors import AggregationError, InputError, ProtocolError
from secure_fvi.privacy import accountants, accounting
from secure_fvi.privacy.accounting import smallest_budget
from secure_fvi.privacy.chain import GENESIS, RECEIPT, ChainKind, ChainReader, Row, check_keys, link, make_row
from secure_fvi.privacy.chain_file import verify_chain
from secure_fvi.privacy.events import Composed, Gaussian, PoissonSampled, Repeated, Skellam, from_dict
from secure_fvi.privacy.gate import Gate
from secure_fvi.privacy.ledger import Budget, Chain, Job, Ledger
from secure_fvi.privacy.ledger_account import verify
from secure_fvi.privacy.plan import gaussian_job as event_of
from secure_fvi.privacy.plan import solve_noise, solve_rate, solve_rounds
from secure_fvi.privacy.settings import RecordDP, SiloDP
from secure_fvi.privacy.terms import Extent, Terms, agree
from secure_fvi.privacy.witness import Witness

NO_EVENTS = Composed(())
DEEP: dict[str, Any] = {"kind": "gaussian", "noise_multiplier": 1.0}
for _ in range(40):
    DEEP = {"kind": "composed", "events": [DEEP]}
BUDGET_BODY = Budget("adult", 1.0, 1e-5).to_body()
JOB_BODY = gaussian_job().to_body()
NESTED: Any = "leaf"
for _ in range(6):
    NESTED = [NESTED]

VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "l1 below l2": (lambda: Skellam(1.0, l1=0.5, l2=1.0), "no vector has such norms"),
    "a sample of a sample": (
        lambda: PoissonSampled(0.5, PoissonSampled(0.5, Gaussian(1.0))),  # type: ignore[arg-type]
        "only a mechanism can be subsampled",
    ),
    "a composition repeated": (lambda: Repeated(NO_EVENTS, 2), "only a mechanism can be repeated"),  # type: ignore[arg-type]
    "a composition of a list": (lambda: Composed([Gaussian(1.0)]), "a tuple of events"),  # type: ignore[arg-type]
    "a composition of numbers": (lambda: Composed((1.0,)), "a tuple of events"),  # type: ignore[arg-type]
    "an event that is no table": (lambda: from_dict([]), "must be a table"),
    "an event past all depth": (lambda: from_dict(DEEP), "must be a table"),
    "an event without its number": (lambda: from_dict({"kind": "gaussian"}), "needs noise_multiplier"),
    "events that are no list": (lambda: from_dict({"kind": "composed", "events": "ab"}), "must be a list"),
    "a delta of a curve": (lambda: accounting.best_order(accounting.rdp(Gaussian(1.0)), 2.0), "delta"),
    "a delta of nothing": (lambda: accountants.epsilon(NO_EVENTS, 2.0), "delta"),
    "an accountant nobody knows": (
        lambda: accountants.delta(Gaussian(1.0), 1.0, "guess"),
        "unknown accountant 'guess'",
    ),
    "a rate for no epsilon": (lambda: solve_rate(lambda q: event_of(9.0, q, 1), -1.0, 1e-5, "rdp"), "epsilon must be"),
    "a rate that is too small": (lambda: solve_rate(lambda q: event_of(1e-3, q, 10**6), 1e-3, 1e-9, "rdp"), "epsilon"),
    "rounds for no epsilon": (lambda: solve_rounds(lambda n: event_of(9.0, 0.1, n), 0.0, 1e-5, "rdp"), "epsilon must"),
    "noise at no delta": (lambda: solve_noise(lambda _: NO_EVENTS, 1.0, 2.0, "rdp"), "delta must"),
    "noise by no accountant": (lambda: solve_noise(lambda _: NO_EVENTS, 1.0, 1e-5, "guess"), "accountant"),
    "a job without privacy": (lambda: smallest_budget(gaussian_job(noise=1e-150)), "no finite epsilon"),
    "noise whose square is no number": (lambda: Gaussian(1e-200), "noise_multiplier must lie in"),
    "noise that covers nothing": (lambda: RecordDP(noise_multiplier=1e-300), "noise_multiplier must lie in"),
    "noise that leaves nothing": (lambda: SiloDP(noise_multiplier=1e300), "noise_multiplier must lie in"),
    "noise to no tolerance": (lambda: solve_noise(Gaussian, 1.0, 1e-5, "rdp", 2.0), "tolerance must lie"),
    "a bound of zero nats": (lambda: RecordDP(noise_multiplier=1.0, objective_bound=0.0), "objective_bound must be"),
    "a quantile above one": (lambda: SiloDP(noise_multiplier=1.0, target_quantile=1.5), "target_quantile must lie"),
    "a rate of zero": (lambda: SiloDP(noise_multiplier=1.0, quantile_rate=0.0), "quantile_rate must be"),
    "a step past all norms": (lambda: SiloDP(noise_multiplier=1.0, quantile_rate=1e4), "quantile_rate must be at most"),
    "a share above one": (lambda: SiloDP(noise_multiplier=1.0, quantile_share=1.5), "quantile_share"),
    "a quantile for nothing": (
        lambda: SiloDP(noise_multiplier=1.0, target_quantile=0.5, quantile_share=0.0),
        "quantile_share above 0",
    ),
    "a budget with more fields": (lambda: Budget.from_body({**BUDGET_BODY, "more": 1}), "must have the fields"),
    "a job of no data set": (lambda: gaussian_job(data_set=""), "data_set must be"),
    "a job with more fields": (lambda: Job.from_body({**JOB_BODY, "more": 1}), "must have the fields"),
    "terms of two": (lambda: Job.from_body({**JOB_BODY, "terms": [["gradient", 1]]}), "phase, event, count"),
    "terms that are no list": (lambda: Job.from_body({**JOB_BODY, "terms": "abc"}), "phase, event, count"),
    "a description that is a list": (lambda: Job.from_body({**JOB_BODY, "description": [1]}), "must be a table"),
    "a description past all depth": (lambda: gaussian_job(description={"a": NESTED}), "text, numbers, booleans"),
    "a description of objects": (lambda: gaussian_job(description={"a": [object()]}), "text, numbers, booleans"),
    "a table that is none": (lambda: check_keys([], "a"), "must have the fields a"),
}


@pytest.mark.parametrize("case", VALUES)
def test_bad_values_are_named(case: str) -> None:
    make, what = VALUES[case]
    with pytest.raises(InputError, match=what):
        make()


@pytest.mark.parametrize("accountant", accountants.ACCOUNTANTS)
@pytest.mark.filterwarnings("error")
def test_noise_that_covers_nothing_has_no_bound_by_any_accountant(accountant: str) -> None:
    assert accountants.epsilon(event_of(1.0, 1.0, 1), 1e-5, accountant) < 10
    for noise in (1e-150, 1e-7):
        assert accountants.epsilon(event_of(noise, 0.5, 10**9), 1e-5, accountant) == np.inf


@pytest.mark.parametrize("accountant", ["rdp", "pld", "ledger"])
def test_noise_that_covers_everything_costs_next_to_nothing(accountant: str) -> None:
    for noise in (1e12, 1e150):
        assert accountants.epsilon(event_of(noise, 0.5, 100), 1e-5, accountant) < 2e-3


def test_a_failure_inside_prv_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.accountants import PRVAccountant

    def fail(*_: object, **__: object) -> float:
        raise RuntimeError("the grid is too small")

    monkeypatch.setattr(PRVAccountant, "get_epsilon", fail)
    with pytest.raises(InputError, match="cannot account for this: the grid is too small; use pld"):
        accountants.prv_epsilon({(0.1, 1.0): 3}, 1e-5, 1.0)


def row(chain: ChainReader, kind: str, body: object) -> Row:
    """The next row of `chain`, by somebody who knows how rows are made."""
    return make_row(chain.kind, chain.silo, chain.length + 1, chain.head, chain.time + 1, kind, body)  # type: ignore[arg-type]


def begun() -> Chain:
    """A chain of genesis, budget and job; rows that follow are checked for what they say, not for signatures."""
    chain = Chain("a")
    chain.follow(row(chain, GENESIS, {"silo": "a", "public_key": bytes(32)}))
    chain.follow(row(chain, "budget", BUDGET_BODY))
    chain.follow(row(chain, "job", JOB_BODY))
    return chain


RELEASE = {"job": "job", "phase": "gradient", "index": 0, "digest": None, "count": 1}
ROWS: dict[str, tuple[str, object, str]] = {
    "no table": ("release", [1], "not well-formed"),
    "a receipt of text": (RECEIPT, {"receipt": "x"}, "a receipt is bytes"),
    "a receipt and more": (RECEIPT, {"receipt": b"x", "more": 1}, "must have the fields receipt"),
    "a release and more": ("release", {**RELEASE, "more": 1}, "must have the fields"),
    "a release at a place below zero": ("release", {**RELEASE, "index": -1}, "an index of at least 0"),
    "a release of nothing": ("release", {**RELEASE, "count": 0}, "a count of at least 1"),
    "a release of text": ("release", {**RELEASE, "digest": "x"}, "a digest is bytes"),
    "an end and more": ("close", {"job": "job", "outcome": "done", "more": 1}, "must have the fields"),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_do_not_say_what_their_kind_says(case: str) -> None:
    kind, body, what = ROWS[case]
    chain = begun()
    with pytest.raises((InputError, ProtocolError), match=what):
        chain.follow(row(chain, kind, body))
    assert chain.length == 3
    chain.follow(row(chain, "release", RELEASE))


@pytest.mark.parametrize("odd", [{"time": "x"}, {"body": 5}, {}])
def test_a_row_of_odd_types_that_is_hashed_as_it_stands(odd: dict[str, Any]) -> None:
    """By somebody who may write into the file. The control is a row as it should be."""
    chain = begun()
    found = row(chain, "release", RELEASE)._replace(**odd)
    found = found._replace(hash=link(chain.kind, found.previous, found.content(chain.kind, chain.silo)))
    with pytest.raises(ProtocolError, match="not well-formed") if odd else nullcontext():
        chain.follow(found)


def test_a_job_that_no_order_admits_has_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one would be to which its own delta leaves nothing. The control is the filter as it is."""
    assert smallest_budget(gaussian_job()).epsilon > 0
    monkeypatch.setattr(accounting, "admitted", lambda *_: False)
    with pytest.raises(InputError, match="no order of the filter admits job 'job'"):
        smallest_budget(gaussian_job())


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"silo": "a"}, "must have the fields"),
        ({"silo": "a", "public_key": bytes(32), "more": 1}, "must have the fields"),
        ({"silo": "b", "public_key": bytes(32)}, "names its silo"),
        ({"silo": "a", "public_key": bytes(31)}, "of 32 bytes"),
    ],
)
def test_a_first_row_that_names_no_key(fields: dict[str, object], what: str) -> None:
    chain = Chain("a")
    with pytest.raises((InputError, ProtocolError), match=what):
        chain.follow(row(chain, GENESIS, fields))
    assert chain.length == 0


def test_a_head_without_a_signature_is_found_where_rows_before_it_need_none(tmp_path: Path) -> None:
    kind = ChainKind("log", "", "", "", each_signed=False)

    class Plain(ChainReader):
        def apply(self, row: Row, fields: dict[str, Any]) -> None:
            pass

    chain, identity = Plain(kind, "a"), Identity()
    rows = []
    for at in range(3):
        body = {"silo": "a", "public_key": identity.public_key} if at == 0 else {}
        rows.append(row(chain, GENESIS if at == 0 else "note", body))
        chain.follow(rows[-1])

    class File:
        path = tmp_path

        def rows(self, silo: str) -> list[Row]:
            return rows

    with pytest.raises(ProtocolError, match="row 3: its signature is not by this silo's key"):
        verify_chain(File(), Plain(kind, "a"), None, [])  # type: ignore[arg-type]
    rows[-1] = rows[-1]._replace(signature=identity.sign(kind.label("row") + rows[-1].hash))
    assert verify_chain(File(), Plain(kind, "a"), None, []).length == 3  # type: ignore[arg-type]


def test_ledgers_are_opened_by_a_name_and_used_in_blocks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="silo must be 1 to"):
        Ledger.open(tmp_path / "ledger.sqlite", "", create=True)
    ledger = new_ledger(tmp_path, clock=Clock())
    with pytest.raises(InputError, match="block must lie in"):
        ledger.open_job(gaussian_job(), block=0)
    assert not ledger.chain.jobs
    job = ledger.open_job(gaussian_job(), block=4)
    with pytest.raises(InputError, match="outcome must be"):
        job.close("")
    job.charge("gradient", 0)
    ledger._rolled_back = True  # a witness has seen more
    with pytest.raises(ProtocolError, match="was rolled back"):
        job.charge("gradient", 1)  # within the block, which touches no disk


def test_a_receipt_about_a_ledger_that_is_not_here(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    new_ledger(tmp_path, "a")
    other = new_ledger(tmp_path / "b", "b")
    witness = Witness("w", Identity(), MemoryStore())
    receipt = witness.countersign(other.statement(), other.chain.public_key)
    with pytest.raises(ProtocolError, match="about a ledger of silo 'b', which is not here"):
        verify(tmp_path / "ledger.sqlite", receipts=[receipt])


# The gate

TABLE = BlockTable((Block("sum", (3,), 1.0),))


def terms(unit: type = SiloDP, rate: float = 1.0, **more: Any) -> Terms:
    return agree(unit(noise_multiplier=1.0, noise="silo", **more), 3, rate, 10, Extent(3, 0, 0))


def gate(agreed: Terms | None, **tables: BlockTable) -> Gate:
    known = {"round": agreed.table([Block("sum", (agreed.extent.shared,), 1.0)], [])} if agreed else {"round": TABLE}
    paid = {"terms": {"round": agreed}, "charge": lambda *_: None} if agreed else {}
    made = Gate("here", {**known, **tables}, **paid)  # type: ignore[arg-type]
    made.begin(1, "round", 3)
    return made


GATES: dict[str, tuple[Callable[[], object], str]] = {
    "a phase without terms": (lambda: gate(terms(), other=TABLE), "every phase needs its terms"),
    "a phase of no name": (lambda: gate(None).begin(1, "other"), "no phase of the given name"),
    "a short contribution under privacy": (lambda: gate(terms()).release(np.zeros(2)), "where 3 were declared"),
    "a short contribution": (lambda: gate(None).release(np.zeros(2)), "where 3 were declared"),
    "a contribution past its bound": (lambda: gate(None).release(np.full(3, 2.0)), "exceeds the declared bound 1"),
    "a contribution that is no number": (lambda: gate(None).release(np.full(3, np.nan)), "not finite"),
    "records where the unit is the silo": (
        lambda: gate(terms()).release_records([], None, []),
        "only a job under record privacy",
    ),
    "public values that nobody declared": (
        lambda: gate(terms(RecordDP, 0.5)).release_records([(torch.zeros(2, 3), torch.zeros(2))], None, [1.0]),
        "where 3 were declared",
    ),
    "a short change": (lambda: gate(terms(RecordDP)).release_change(torch.zeros(2)), "where 3 were declared"),
    "rows of others": (lambda: gate(terms(RecordDP)).release_rows(torch.zeros(4, 1)), "not those of a row a record"),
    "a sum that would leave": (
        lambda: gate(terms(RecordDP, 0.5)).hidden_sum("round", torch.zeros(2, 3)),
        "not those of a sum that stays",
    ),
}


@pytest.mark.parametrize("case", GATES)
def test_what_the_gate_does_not_let_out(case: str) -> None:
    make, what = GATES[case]
    with pytest.raises((AggregationError, ProtocolError), match=what):
        make()


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_no_run_protects_records_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether one moves the others' numbers there was not tested. The controls, silo privacy and none, get as far as
    looking for the device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    x, y = torch.ones(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0])
    silo = SiloDP(epsilon=1.0)

    def run(privacy: Any) -> None:
        if kind == "columns":
            sf.fit(sf.Columns(Bernoulli(), y), [{"x": x}] * 2, sf.Vertical(), privacy=privacy, device="cuda")
        else:
            sf.fit(lambda x, y: None, [{"x": x, "y": y}] * 2, sf.SFVI(), privacy=privacy, device="cuda:0")

    with pytest.raises(InputError, match=r"record privacy with device = 'cuda'.*use the CPU"):
        run(RecordDP(epsilon=1.0))
    for other in (None, silo) if kind == "rows" else (None,):
        with pytest.raises(InputError, match="PyTorch finds 0 CUDA devices"):
            run(other)
