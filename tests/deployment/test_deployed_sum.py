"""The pieces together, without a network: an offer, decisions, a session, a masked sum, and logs that agree; and a
server that lies to sites with policies of their own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import deployment_world
import numpy as np
import pytest
from consortium_run import Job
from deployment_world import NOW, World, open_witness
from fuzzing import Opened, opened_job

import secure_fvi as sf
from secure_fvi.aggregation import Block, BlockTable, Masked, masked_silo
from secure_fvi.aggregation.base import FloatArray, carry
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import MemoryStore, SqliteStore
from secure_fvi.deployment.consortium import session_id
from secure_fvi.deployment.countersigning import open_trail, records_keys
from secure_fvi.deployment.deciding import FINISHED, decide, job_entry
from secure_fvi.deployment.job import make_offer, sign_offer
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.session_messages import OpenSession, silo_sum
from secure_fvi.deployment.trail import Exchange
from secure_fvi.deployment.trail_verify import compare, verify
from secure_fvi.errors import AggregationError, InputError, ProtocolError
from secure_fvi.messages import ROUND, SUM, decode_broadcast, encode_broadcast
from secure_fvi.runs.config import parse
from secure_fvi.wire import PROTOCOLS

CONFIG = {
    "model": {"program": "six-cities"},
    "partition": {"ids": ["east", "north", "south"], "count": 3},
    "algorithm": {"name": "sfvi", "iterations": 5},
}
POLICY = """
format = 1
rosters = ["{roster}"]
algorithms = ["sfvi"]
aggregations = ["masked"]
min_cohort = 3
max_rounds = 5
[privacy]
dp = "optional"
max_epsilon = 1.0
max_delta = 1e-6
min_noise_multiplier = 0.3
[[model]]
hash = "{model}"
[[data]]
id = "data"
from_job = ["partition"]
"""


def test_a_sum_between_sites_leaves_logs_that_agree(world: World) -> None:
    hub, sites = world.homes["hub"], {n: h for n, h in world.homes.items() if h.role == "silo"}
    roster, config = hub.roster(NOW), parse(CONFIG, "test")
    model = manifest(config).hash
    offer = make_offer(config, roster, "hub", model, NOW)
    logs = {name: open_trail(home) for name, home in world.homes.items()}
    logs["hub"].job(job_entry(offer, bytes(32), accepted=True))
    for name, home in sites.items():
        home.policy_file.write_text(POLICY.format(roster=roster.hash.hex(), model=model.hex()))
        home.policy_file.chmod(0o600)
        assert decide(home, sign_offer(offer, hub.identity()), logs[name], NOW, met=True).offer == offer
    session = roster.session(session_id(roster, offer.hash, {name: os.urandom(32) for name in sites}, PROTOCOLS[-1]))
    silos = {}
    for name, home in sites.items():
        home.state_folder.mkdir(mode=0o700)
        silos[name] = MaskedSilo(
            session, name, home.identity(), SqliteStore(home.state_folder / "sum.sqlite"), unbound=True
        )
    server = MaskedServer(session, SqliteStore(world.root / "server.sqlite"))
    table, context = BlockTable((Block("gradient", (4,), 10.0),)), bytes(32)
    values = {name: np.arange(4.0) + i for i, name in enumerate(sites)}

    def exchange(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = {}
        for name, message in messages.items():
            replies[name] = silos[name].handle(message)
            logs[name].exchanges(offer.job, [Exchange("hub", "sum", message, replies[name])])
        logs["hub"].exchanges(offer.job, [Exchange(n, "sum", replies[n], m) for n, m in messages.items()])
        return replies

    carry(server.prepare(0), exchange)
    sent = {name: silos[name].contribute(0, sorted(sites), table, v, context) for name, v in values.items()}
    total = carry(server.total(0, sorted(sites), table, sent, context), exchange)
    np.testing.assert_allclose(total.values, sum(values.values()), atol=1e-9)
    assert total.survivors == ("east", "north", "south")
    for name in sites:
        for other in world.homes:  # everybody countersigns everybody's head
            if other != name:
                witness, key = open_witness(world.homes[other]), records_keys(world.homes[other], roster, name)[0]
                receipt = witness.countersign(logs[name].statement(witness.length(key)), key)
                logs[name].add_receipt(receipt, world.homes[other].identity().public_key)
        logs[name].close_job(offer.job, FINISHED)
    for log in logs.values():
        log.close()
    keys = [m.identity_key for m in roster.members.values()]
    for name, home in sites.items():
        chain = verify(home.log_file, roster.member(name).identity_key, witness_keys=keys)
        assert chain.jobs[offer.job].outcome == FINISHED
        assert len(chain.receipts) == 3
        agreement = compare(home.log_file, hub.log_file)
        assert agreement.agreed == chain.jobs[offer.job].exchanges == 2  # the keys; contributions are a job's own
        assert (agreement.lost_answers, agreement.unanswered) == (0, 0)


def test_a_silo_with_another_identity_is_not_in_the_session(world: World) -> None:
    session = world.homes["hub"].roster(NOW).session(bytes(32))
    MaskedSilo(session, "north", world.homes["north"].identity(), SqliteStore(world.root / "a.sqlite"))
    with pytest.raises(InputError):
        MaskedSilo(session, "north", Identity(), SqliteStore(world.root / "b.sqlite"))
    assert json.loads((world.homes["hub"].path / "accepted.json").read_text())["serial"] == 1


def test_no_site_adds_to_a_sum_whose_question_is_not_named(world: World) -> None:
    """Such a sum could be made twice, over other survivors. The control is the same call with a question, which gets as
    far as the set-up that is missing here."""
    names, table = ["east", "north", "south"], BlockTable((Block("gradient", (4,), 10.0),))
    roster = world.homes["hub"].roster(NOW)
    opened = OpenSession(roster, bytes(32), names, Masked(), b"")
    silo = silo_sum(opened, MemoryStore(), "north", world.homes["north"].identity(), 3)
    with pytest.raises(ProtocolError, match="names no question"):
        silo.contribute(0, names, table, np.zeros(4), bytes(32))
    with pytest.raises(ProtocolError, match=r"^(?!.*names no question)"):
        silo.contribute(0, names, table, np.zeros(4), bytes(32), bytes(32))


DATA = Path(os.environ["SECURE_FVI_DATA"]) if os.environ.get("SECURE_FVI_DATA") else None


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A job of five rounds that four sites have opened. Their policies let it run five, and a total lack one silo."""
    monkeypatch.setattr(deployment_world, "SITES", {**deployment_world.SITES, "west": "silo"})
    made = Job(
        deployment_world.new_world(tmp_path / "world"), tmp_path,
        partition={"ids": ["east", "north", "south", "west"], "sizes": [150, 140, 137, 110]},
        algorithm={"name": "sfvi", "iterations": 5},
        aggregation={"kind": "masked", "max_missing": 1, "max_differences": 2},
    )  # fmt: skip
    for site in made.sites:
        made.allow(site, max_rounds=5, max_missing=1, max_differences=2)
    return opened_job(made, DATA)


@pytest.mark.parametrize(
    ("by", "says"), [("job", "the job has no round 5"), ("policy", "5 rounds were answered"), ("nobody", "")]
)
def test_sites_answer_as_many_rounds_as_their_policies_say(four: Opened, by: str, says: str) -> None:
    """The server asks on, as if the job had nine. Silos refuse by the job's number, and by their policies' where the
    job's is nine. The control: silos that look at neither answer for as long as it likes."""
    longer = sf.SFVI(iterations=9).server(four.server.program.problem)  # type: ignore[attr-defined]
    four.server.program = longer
    silos = [four.silo(site) for site in four.sites]
    for silo in silos:
        if by != "job":
            silo.program.order = longer.order
        if by == "nobody":
            silo.limits = silo.limits._replace(rounds=None)
    with pytest.raises(ProtocolError, match=f"^silo 'east': {says}") if says else contextlib.nullcontext():
        for _ in range(9):
            carry(four.server.round(), four.exchange)
    assert {silo.past.rounds for silo in silos} == {5 if says else 9}


@pytest.mark.parametrize("held", [True, False])
def test_sites_sum_a_question_over_one_set_of_survivors(
    four: Opened, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same question under two indices, one silo declared lost the second time: the difference of both totals is
    its term. The control: survivors that are not bound to their question."""
    if not held:
        monkeypatch.setattr(masked_silo, "_question_slot", lambda question: f"question/{os.urandom(8).hex()}")
    silos, lost = list(four.sites), "west"
    carry(four.server.round(), four.exchange)
    message = decode_broadcast(next(four.server.round())[lost][1:], four.server.program.order.asked)
    sums, table = four.server.secure_sum, four.server.program.tables[message.phase]

    def exchange(asked: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = {}
        for site, said in asked.items():
            with contextlib.suppress(ProtocolError):
                replies[site] = four.say(site, SUM + said)
        return replies

    def total(index: int, survivors: list[str]) -> FloatArray:
        body = encode_broadcast(message._replace(sum_index=index))
        carry(sums.prepare(index), exchange)
        answers = four.exchange(dict.fromkeys(silos, ROUND + body))
        kept = {s: answers[s] for s in survivors}
        return carry(sums.total(index, message.cohort, table, kept, hashlib.sha256(body).digest()), exchange).values

    first = total(message.sum_index, silos)
    kept = four.silo(lost).answer
    assert kept is not None
    assert np.abs(first - kept.values).max() > 0.1
    with pytest.raises(AggregationError, match="signed the survivors") if held else contextlib.nullcontext():
        second = total(message.sum_index + 1, [s for s in silos if s != lost])
    if not held:
        np.testing.assert_allclose(first - second, kept.values, atol=1e-8)
