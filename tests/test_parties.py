"""Who holds what: the server never has data, messages are checked, silos commit only what the server used."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from programs import make_clinics, make_intercepts, reachable_tensors
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.algorithms.base import Broadcast, choose_cohort
from secure_fvi.errors import AggregationError, DataError, InputError, ProtocolError
from secure_fvi.federated_model import Records
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND, decode_broadcast, encode_broadcast
from secure_fvi.privacy.gate import Gate
from secure_fvi.randomness import KeyedDraws
from secure_fvi.silo import silo_view


def _holds(root: object, secrets: dict[str, Tensor]) -> set[str]:
    """Which of the secret tensors' values occur in anything reachable from `root`; zero is nobody's secret."""
    values = torch.cat([t.detach().double().flatten() for t in reachable_tensors(root) if t.is_floating_point()])
    return {name for name, secret in secrets.items() if torch.isin(secret[secret != 0], values).any()}


@pytest.mark.parametrize("aggregation", [sf.Plain(), sf.Masked()])
def test_the_server_never_holds_data_or_local_parameters(aggregation: Any) -> None:
    problem = make_clinics()
    server, engine, _ = build_parties(problem.model, problem.silos, sf.SFVI(iterations=9), aggregation, compile=False)
    for _ in range(5):
        engine.run(server.round())
    secrets = {}
    for name, silo in engine.silos.items():
        secrets[f"{name} data"] = silo.view.rows["y"]
        secrets[f"{name} record loc"] = silo.local.record["loc"]
        secrets[f"{name} silo loc"] = silo.local.silo["loc"]
        secrets[f"{name} pending"] = silo.pending.local.record["loc"]  # type: ignore[union-attr]
    assert _holds(server, secrets) == set()
    assert _holds(engine, secrets) == set(secrets)  # the control: the search finds them where they are


def test_a_pending_state_counts_only_when_its_sum_was_used() -> None:
    problem = make_intercepts()
    server, engine, _ = build_parties(problem.model, problem.silos, sf.SFVI(iterations=9), sf.Plain(), compile=False)
    silo = engine.silos["silo-1"]
    before = silo.local
    engine.run(server.round())
    assert silo.local is before
    silo.settle({})  # the server did not use it
    assert silo.local is before
    server.state = server.state._replace(accepted={})  # and says so again
    engine.run(server.round())
    silo.settle(server.state.accepted)
    assert silo.local is not before


def test_a_silo_that_sits_rounds_out_keeps_what_was_used() -> None:
    """Its next broadcast names a later sum for the others, and its own last one for itself."""
    problem = make_intercepts()
    algorithm = sf.SFVI(iterations=30, participation=0.34)
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
    kept = dict.fromkeys(engine.silos, 0)
    for _ in range(30):
        before = {name: silo.pending for name, silo in engine.silos.items()}
        engine.run(server.round())
        for name, silo in engine.silos.items():
            pending = before[name]
            if pending is not None and silo.pending is not pending:  # it was asked again
                assert silo.local is pending.local
                kept[name] += 1
    assert min(kept.values()) > 2


def test_an_abandoned_sum_never_gives_its_index_again() -> None:
    problem = make_intercepts()
    server, engine, _ = build_parties(problem.model, problem.silos, sf.SFVI(iterations=9), sf.Masked(), compile=False)
    server.round()  # never driven
    generator = server.round()
    next(generator)
    generator.close()
    engine.run(server.round())
    assert server.state.last_index == 2
    assert set(server.state.accepted.values()) == {2}


def test_a_wrong_number_of_records_ends_no_server() -> None:
    """One of the silos of a total that lacks another says how many all have. The control: an honest number."""
    problem = make_intercepts()
    server = build_parties(problem.model, problem.silos, sf.SFVI(iterations=9), sf.Plain(), compile=False)[0]
    server.state = server.state._replace(records=40)
    silos = server.problem.silos
    assert server._absent(silos, silos[1:], np.array(10.0)) == (40, 4.0)
    assert server._absent(silos, silos[1:], np.array(50.0)) == (40, 1.0)
    assert server._absent(silos, silos, np.array(30.0)) == (40, 1.0)  # one of them is in this merge no more
    for said in (0.0, -7.0):
        with pytest.raises(AggregationError, match="one of them tells a wrong number"):
            server._absent(silos, silos[1:], np.array(said))


def _broadcast() -> Broadcast:
    tensors = {"z_global": torch.tensor([1.0, 2.0]), "theta/t": torch.ones(2, 3, dtype=torch.float32)}
    return Broadcast(3, 4, {"a": 2, "b": 1}, ("a", "b"), {"scale": 0.5}, tensors)


def test_broadcasts_survive_the_wire() -> None:
    sent = _broadcast()
    got = decode_broadcast(encode_broadcast(sent))
    assert got[:5] == sent[:5]
    assert all(torch.equal(got.tensors[k], v) and got.tensors[k].dtype == v.dtype for k, v in sent.tensors.items())


def test_a_broadcast_to_all_names_nobody_and_is_of_one_length() -> None:
    """Whoever reads it looks up whom the job asks, and refuses a cohort of another digest; of a smaller one the names
    stand in it, and of sums used one number a silo, where they differ."""

    def sent(cohort: tuple[str, ...], asked: tuple[str, ...]) -> bytes:
        return encode_broadcast(_broadcast()._replace(cohort=cohort, accepted=dict.fromkeys(cohort, 2)), asked)

    few, many = ("a", "b", "c"), tuple(f"silo-{i}" for i in range(1000))
    assert len(sent(few, few)) == len(sent(many, many)) < 300
    assert decode_broadcast(sent(many, many)).cohort == ()
    for cohort in (many, many[1:]):
        got = decode_broadcast(sent(cohort, many), lambda round_, phase: many)
        assert (got.cohort, got.accepted) == (cohort, dict.fromkeys(cohort, 2))
    with pytest.raises(ProtocolError, match="not the one that the job asks"):
        decode_broadcast(sent(few, few), lambda round_, phase: ("a", "b", "d"))
    two = _broadcast()
    for raw in (encode_broadcast(two), encode_broadcast(two, ("a", "b"))):
        assert decode_broadcast(raw, lambda round_, phase: ("a", "b")).accepted == two.accepted
    longer = encode_broadcast(two, ("a", "b")).replace(b"\x92\x02\x01", b"\x93\x02\x01\x01")
    with pytest.raises(ProtocolError, match="as many sums used as silos"):
        decode_broadcast(longer, lambda round_, phase: ("a", "b"))


def test_malformed_broadcasts_are_refused() -> None:
    """Every truncation, and every single-byte change, either decodes to a broadcast or raises ProtocolError."""
    raw = encode_broadcast(_broadcast())
    for cut in range(len(raw)):
        with pytest.raises(ProtocolError):
            decode_broadcast(raw[:cut])
    survived = 0
    for at in range(len(raw)):
        try:
            decode_broadcast(raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :])
            survived += 1
        except ProtocolError:
            pass
    assert survived < len(raw)  # bytes of numbers and names may change unnoticed here; signatures cover them


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, 4, "a broadcast of version"),
        (6, {"scale": math.nan}, "malformed scalars"),
        (7, {"z": ["f2", [1], bytes(2)]}, "unknown kind"),
        (7, {"z": ["f4", [2], bytes(4)]}, "wrong length"),
        (7, {"z": ["f4", [0, 2**62, 2**62], b""]}, "impossible shape"),
    ],
)
def test_a_broadcast_of_the_right_form_is_refused_for_what_it_holds(at: int, value: Any, says: str) -> None:
    """The control: with what stood there it is taken."""
    fields = msgpack.unpackb(encode_broadcast(_broadcast()))
    decode_broadcast(msgpack.packb(fields))
    fields[at] = value
    with pytest.raises(ProtocolError, match=says):
        decode_broadcast(msgpack.packb(fields))


def test_a_silo_refuses_unknown_messages() -> None:
    problem = make_intercepts()
    _, engine, _ = build_parties(problem.model, problem.silos, sf.SFVI(iterations=9), sf.Plain(), compile=False)
    silo = engine.silos["silo-1"]
    for message in (b"", b"X", b"X" + encode_broadcast(_broadcast())):
        with pytest.raises(ProtocolError, match="a message of unknown kind"):
            silo.handle(message)
    with pytest.raises(ProtocolError, match="not well-formed"):
        silo.handle(ROUND + b"nonsense")
    assert silo.pending is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.1, -2.1])
def test_the_gate_refuses_what_is_not_finite_or_past_its_bound(bad: float) -> None:
    table = BlockTable((Block("first", (2,), 2.0), Block("second", (3,), 2.0)))
    values = np.array([2.0, -2.0, 0.0, 0.1, 0.2])
    gate = Gate("here", {"round": table})
    gate.begin(1, "round")
    assert gate.release(values).values is values
    values[3] = bad
    gate.begin(2, "round")
    with pytest.raises(AggregationError, match="its part of 'second' is not finite or exceeds") as caught:
        gate.release(values)
    assert "2.1" not in str(caught.value)


def test_cohorts_are_drawn_fairly_and_repeatably() -> None:
    """Each of 10 silos takes part in 3,000 draws of 3 about 900 times; 5 sds, false alarm about 6e-6."""
    silos = tuple("abcdefghij")
    drawn = [choose_cohort(silos, 3, 7, r) for r in range(3000)]
    assert drawn == [choose_cohort(silos, 3, 7, r) for r in range(3000)]
    counts = [sum(s in cohort for cohort in drawn) for s in silos]
    assert all(abs(c - 900) < 5 * np.sqrt(3000 * 0.3 * 0.7) for c in counts)
    assert choose_cohort(silos, 10, 7, 0) == silos


@pytest.mark.parametrize("ids", [[0, 1, 1], [0, 5, -2], [4, 0, 7]])
def test_records_of_one_id_would_share_their_draws(ids: list[int]) -> None:
    """So would one that has the spare row's, -2: both are refused, by count alone. The control: of such draws two are
    the same, and of the last's none are."""
    problem = make_intercepts()
    server = build_parties(problem.model, problem.silos, sf.SFVI(iterations=1), sf.Plain(), compile=False)[0]
    given, records = np.array(ids), Records({"y": problem.silos[0]["y"][:3].double()}, 3)
    drawn = KeyedDraws(b"s" * 32, b"records", np.append(given, -2)).uniforms(0, 2)[0]
    if len(np.unique(drawn, axis=0)) == 4:
        view = silo_view("a", server.problem, records, given, b"s" * 32)
        assert np.array_equal(view.record_draws.uniforms(0, 2)[0], drawn)
        return
    with pytest.raises(DataError, match=r"must be different whole numbers of at least 0; in [12] of 3 rows"):
        silo_view("a", server.problem, records, given, b"s" * 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"silo_ids": ["a", "a", "b"]}, "two silos have the id 'a'"),
        ({"silo_ids": ["a", "b"]}, "2 silo ids for 3 silos"),
        ({"record_ids": [torch.arange(7), torch.arange(40), torch.arange(13)]}, "a record id occurs twice"),
        ({"record_ids": [torch.arange(7)]}, "record_ids for 1 silos"),
        ({"device": "cuda:99"}, "PyTorch finds . CUDA devices here"),
        ({"dtype": torch.float16}, "dtype must be"),
        ({"seed": 1.5}, "seed must be a whole number"),
    ],
)
def test_bad_arguments_of_fit(options: dict[str, Any], message: str) -> None:
    problem = make_intercepts()
    with pytest.raises(InputError, match=message):
        sf.fit(problem.model, problem.silos, sf.SFVI(iterations=1), **options)
