"""`sf.fit` of columns as a user meets it: sums, who sees what, absence, crashes, prediction, bad input."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
from programs import reachable_tensors
from pyro.distributions import Normal
from torch import Tensor

import secure_fvi as sf
from secure_fvi import columns as columns_module
from secure_fvi.algorithms.vertical import Amortised, Bernoulli, Categorical, Gaussian, Poisson, Vertical
from secure_fvi.algorithms.vertical.predictors import linear
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.column_silo import VerticalLocalPosterior
from secure_fvi.columns import VerticalResult
from secure_fvi.driving import Parties
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import AggregationError, InputError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import decode_broadcast

pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")

N = 50


def _data(silos: int = 3) -> tuple[list[dict[str, Tensor]], Tensor]:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(N, 2 * silos, generator=rng)
    y = torch.bernoulli(torch.sigmoid(x @ torch.linspace(-1.5, 1.5, 2 * silos)), generator=rng)
    return [{"x": part} for part in x.split(2, 1)], y


def _fit(config: Vertical | Soul, silos: int = 3, **options: Any) -> VerticalResult:
    columns, y = _data(silos)
    return sf.fit(sf.Columns(Bernoulli(), y), columns, config, compile=False, **options)


def _means(result: VerticalResult) -> Tensor:
    return torch.cat([result.local[s].q["theta/loc"] for s in result.silos])


def _told_of_sds(silos: list[Tensor], y: Tensor, likelihood: Any, **options: Any) -> tuple[VerticalResult, list[str]]:
    """A fit, and what it warns of: that q is too narrow."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        config = Vertical(rho=0.3, rounds=800, learning_rate=0.05, average_last=0.5, **options)
        found = sf.fit(sf.Columns(likelihood, y), [{"x": x} for x in silos], config, sf.Plain(), compile=False)
    return found, [str(w.message) for w in told if "q is a product over silos" in str(w.message)]


@pytest.mark.parametrize("alike", [0.8, 0.0])
def test_columns_that_two_silos_hold_alike_are_told_of(alike: float) -> None:
    """q is a product over silos: of columns that correlate its sds are too small, and it said nothing. Each silo hears
    roughly by how much, beside the closed form. The control are columns that do not."""
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(60, 2, generator=rng).double()
    x = torch.linalg.qr(x - x.mean(0))[0] * 60**0.5
    x[:, 1] = alike * x[:, 0] + (1 - alike**2) ** 0.5 * x[:, 1]
    y = x[:, 0] + 0.8 * torch.randn(60, generator=rng)
    found, told = _told_of_sds(list(x.split(1, 1)), y, Gaussian(), response="private")
    precision = torch.eye(2) + x.T @ x / (float(found.posterior["sigma"].mean) ** 2 + 2 * 0.3**2)
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    wider = sd / torch.stack([found.local[s].sample(5000)["beta"].std() for s in found.silos])
    if not alike:
        assert not told
        assert float((wider - 1).abs().max()) < 0.1
        return
    assert [line.split(":")[0] for line in told] == ["silo 'silo-1'", "silo 'silo-2'"]
    for line, ratio in zip(told, wider.tolist(), strict=True):
        assert ratio > 1.5
        assert float(line.split("beta ")[1].split(" times")[0]) == pytest.approx(ratio, rel=0.45)


def test_sds_that_have_not_come_to_rest_are_told_of() -> None:
    """A column in a unit of 30 has an sd far below those at which q begins: nobody drifts, and it is still twice too
    wide. The control is the same silo's other column, and `test_columns_that_two_silos_hold_alike_are_told_of`."""
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(150, 2, generator=rng).double()
    y = x[:, 0] + torch.randn(150, generator=rng)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        config, columns = Vertical(rho=0.3, rounds=400, response="private"), [{"x": 30 * x[:, :1]}, {"x": x[:, 1:]}]
        sf.fit(sf.Columns(Gaussian(), y), columns, config, sf.Plain(), compile=False)
    said = [str(w.message) for w in told if "have not come to rest" in str(w.message)]
    assert [line.split(":")[0] for line in said] == ["silo 'silo-1'"]
    assert "larger than they will be: beta" in said[0]
    assert "q is a product" not in said[0]


@pytest.mark.parametrize("response", ["shared", pytest.param("silos", marks=pytest.mark.slow)])
def test_a_column_that_the_intercept_moves_with_is_told_of(response: Any) -> None:
    """As of a column of a mean far from 0, in its sds: who takes the steps on gamma hears of it, and the silo."""
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(80, 2, generator=rng).double()
    y = torch.bernoulli(torch.sigmoid(x[:, 0]), generator=rng).double()
    for mean in (0.0, 2.0):
        found, told = _told_of_sds([x[:, :1] + mean, x[:, 1:]], y, Bernoulli(), response=response)
        of = ", ".join(told)
        assert ("gamma" in of) == ("beta" in of) == (mean > 0), told
        assert ("widening" in found.convergence) == (response == "shared")


@pytest.mark.parametrize("model", ["augmented", "power"])
@pytest.mark.later("power")
def test_secure_sums_change_nothing(model: Any) -> None:
    config = Vertical(model=model, rounds=6)
    plain, masked, homomorphic = (_fit(config, aggregation=a) for a in (sf.Plain(), sf.Masked(), sf.Homomorphic()))
    torch.testing.assert_close(_means(plain), _means(masked), rtol=0, atol=1e-6)
    torch.testing.assert_close(_means(masked), _means(homomorphic), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["augmented", "power"])
def test_soul_in_secure_sums(tmp_path: Path, model: Any) -> None:
    """Draws stay at the silos; a run that was stopped goes on with the same ones."""
    config = Soul(model=model, rounds=12, keep=4)
    plain, masked = _fit(config, aggregation=sf.Plain()), _fit(config, aggregation=sf.Masked())
    torch.testing.assert_close(_means(plain), _means(masked), rtol=0, atol=1e-6)
    assert plain.elbo is None
    draws = plain.local["silo-1"].sample(50)["beta"]
    assert len(torch.unique(draws[:, 0])) in (5, 6)  # every other round of the last six, or of seven where they fall so
    assert torch.equal(_means(_stopped(config, 7, tmp_path)), _means(_fit(config)))
    with pytest.raises(InputError, match="SOUL"):
        _fit(config, privacy=sf.RecordDP(epsilon=1.0))


@pytest.mark.parametrize("batch", [None, 20])
def test_upload_does_not_depend_on_the_number_of_silos(batch: int | None) -> None:
    """Batch x columns x ring bytes, and a few hundred bytes of the protocol."""
    for silos in (2, 20):
        config = Vertical(rounds=3, batch_size=batch)
        found = _fit(config, silos, aggregation=sf.Plain()).aggregation["bytes_up_per_silo"] / 3
        assert 8 * (batch or N) <= found <= 8 * (batch or N) + 300


def _reachable(root: object) -> Tensor:
    """Every number in tensors and arrays that can be reached."""
    return torch.cat([t.detach().double().flatten() for t in reachable_tensors(root) if t.is_floating_point()])


def _parties(config: Vertical, response: Tensor | None = None, silos: int = 3) -> Parties[LocalEngine]:
    columns, y = _data(silos)
    y = response if response is not None else y
    likelihood = Gaussian() if response is not None else Bernoulli()
    return build_parties(sf.Columns(likelihood, y), columns, config, sf.Masked(), compile=False)


def test_who_holds_what() -> None:
    """The server holds no column and no silo's z_j; a private response never reaches a silo, and one that silos alone
    know never reaches the server."""
    secret = torch.randn(N, generator=torch.Generator().manual_seed(8))
    for response in ("private", "shared", "silos"):
        parties = _parties(Vertical(response=response, rounds=9), secret)
        for _ in range(3):
            parties.engine.run(parties.server.round())
        silo = parties.engine.silos["silo-1"]
        assert not torch.isin(silo.view.rows["x"].flatten(), _reachable(parties.server)).any()
        reached = torch.isin(secret, _reachable(parties.engine)).any()
        assert bool(reached) == (response != "private")  # the others are the control
        assert bool(torch.isin(secret, _reachable(parties.server)).any()) == (response != "silos")


def test_the_broadcast_carries_the_pull_and_nothing_of_one_silo() -> None:
    parties = _parties(Vertical(response="private", rounds=9))
    engine, sent = parties.engine, []
    inner = engine.exchange

    def noted(messages: Any) -> Any:
        sent.append(messages)
        return inner(messages)

    engine.exchange = noted  # type: ignore[method-assign]
    engine.run(parties.server.round())
    engine.run(parties.server.round())
    broadcasts = [decode_broadcast(m[1:]) for batch in sent for m in batch.values() if m[:1] == b"R"]
    assert {tuple(b.tensors) for b in broadcasts} == {("pull", "curvature")}
    last = [b for b in broadcasts if b.round == 1]
    assert len(last) == 3
    assert all(torch.equal(b.tensors["pull"], last[0].tensors["pull"]) for b in last)


def test_a_fit_is_the_same_whatever_type_pytorch_gives_numbers() -> None:
    """A rate went through 32 bits on its way, but where a caller had set 64 bits as the default, as these tests do."""
    program, before = _parties(Vertical(rounds=4)).server.program, torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        assert float(program.move(0.1)) == 0.1  # type: ignore[attr-defined]
    finally:
        torch.set_default_dtype(before)


def test_silos_that_alone_know_the_response_find_what_the_server_would() -> None:
    """Each takes the server's step on gamma itself: the silos' own posteriors are the same to the last bit, gamma's up
    to what the secure sum rounds, after several local steps too."""
    config = Vertical(response="private", rounds=5, local_steps=2)
    theirs, own = _fit(config), _fit(dataclasses.replace(config, response="silos"))
    assert torch.equal(_means(theirs), _means(own))
    for name, value in theirs.variational.eta.items():
        torch.testing.assert_close(own.variational.eta[name], value, rtol=0, atol=1e-9)
    assert own.elbo is None  # of which every round's part would be an equation for the labels


def test_silos_may_be_absent_up_to_the_bound() -> None:
    """Three of six silos a round, more when due: no z_j in the sum is older than the bound; the total is their sum."""
    config = Vertical(response="private", rounds=40, participation=0.5, max_staleness=2)
    parties = _parties(config, silos=6)
    server, engine = parties.server, parties.engine
    cohorts, last = [], dict.fromkeys(engine.silos, -1)
    for round_ in range(40):
        asked = server.program.broadcast(server.state.algorithm, 99, {}).cohort
        engine.run(server.round())
        state = server.state.algorithm
        last |= dict.fromkeys(asked, round_)
        assert all(round_ - before <= 2 for before in last.values())
        cohorts.append(len(asked))
        sent = sum(s.pending.local.sent for s in engine.silos.values() if s.pending is not None)
        torch.testing.assert_close(state.total, sent, rtol=0, atol=1e-6)
    assert cohorts[0] == 6
    assert min(cohorts[1:]) == 3


def test_a_silo_that_does_not_answer_stops_the_round() -> None:
    """A sum without it is no predictor: the state stays as it was."""
    columns, y = _data(4)
    parties = build_parties(sf.Columns(Bernoulli(), y), columns, Vertical(rounds=9), sf.Masked(), compile=False)
    server, engine = parties.server, parties.engine
    engine.run(server.round())
    before = server.state.algorithm
    inner = engine.exchange

    def losing(messages: Any) -> Any:
        replies = inner(messages)
        return {s: r for s, r in replies.items() if s != "silo-2" or messages[s][:1] == b"S"}

    engine.exchange = losing  # type: ignore[method-assign]
    with pytest.raises(AggregationError):
        engine.run(server.round())
    assert server.state.algorithm is before


def _stopped(config: Vertical | Soul, at: int, folder: Path) -> VerticalResult:
    """A run that dies in round `at` and is resumed."""

    class Stop(Exception):
        pass

    def stop(progress: sf.Progress) -> None:
        if progress.round == at:
            raise Stop

    kept = {"checkpoint_dir": folder / "c", "checkpoint_seconds": 1e-9}
    with pytest.raises(Stop):
        _fit(config, on_round=stop, **kept)
    return _fit(config, resume=True, **kept)


@pytest.mark.parametrize("options", [{}, {"model": "power"}])
@pytest.mark.later("options1")
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    config = Vertical(rounds=12, batch_size=20, **options)
    whole, again = _fit(config), _stopped(config, 7, tmp_path)
    assert torch.equal(_means(whole), _means(again))
    assert whole.elbo == again.elbo


@pytest.mark.later
def test_prediction_is_the_sum_of_the_silos() -> None:
    """At small rho, beside logistic regression's own formula on all columns with the fitted coefficients."""
    result = _fit(Vertical(rounds=60, rho=0.01, learning_rate=0.05))
    columns, y = _data()
    by_silo = dict(zip(result.silos, columns, strict=True))
    found = result.log_predictive(by_silo, y, n=2000)
    beta = torch.cat([result.local[s].sample(4000)["beta"] for s in result.silos], 1)
    logits = beta @ torch.cat([c["x"] for c in columns], 1).T + result.sample(4000)["intercept"][:, None]
    exact = torch.sigmoid((2 * y - 1) * logits).mean(0).log()
    torch.testing.assert_close(found, exact, rtol=0, atol=0.05)
    draws = result.predict(by_silo, n=500)["y"]
    torch.testing.assert_close(draws.mean(0), torch.where(y > 0.5, found.exp(), 1 - found.exp()), rtol=0, atol=0.12)
    with pytest.raises(InputError, match="silo-3"):
        result.log_predictive({"silo-1": columns[0], "silo-2": columns[1]}, y)
    with pytest.raises(InputError, match="same number"):
        result.log_predictive({**by_silo, "silo-2": {"x": columns[1]["x"][:3]}}, y)


def test_new_people_have_the_columns_of_the_fit() -> None:
    """At each silo, under the names that its program reads, and of at least one draw. The control is theirs."""
    result, (columns, _) = _fit(Vertical(rounds=2)), _data()
    own, x = result.local["silo-1"], columns[0]["x"]
    assert own.eta({"x": x}, 2).shape == (2, N, 1)
    for rows in ({"z": x}, {"x": x, "z": x}, {}):
        with pytest.raises(InputError, match="silo 'silo-1': give the columns x, not"):
            own.eta(rows, 2)
    for draw in (own.sample, lambda n: own.eta({"x": x}, n)):
        with pytest.raises(InputError, match="the number of draws must be a whole number of at least 1, not 0"):
            draw(0)


def test_new_people_have_an_offset_where_the_fit_had_one() -> None:
    """The control is a fit without: there it is zero, as counts of one unit of exposure."""
    columns, _ = _data()
    rng = torch.Generator().manual_seed(3)
    exposure = 50 + 50 * torch.rand(len(columns[0]["x"]), generator=rng)
    y = torch.poisson(exposure * 0.1, generator=rng)
    with_one, without = (
        sf.fit(sf.Columns(Poisson(), y, offset=offset), columns, Vertical(rounds=2), compile=False)
        for offset in (exposure.log(), None)
    )
    new = {name: {"x": own["x"][:4]} for name, own in zip(with_one.silos, columns, strict=True)}
    with pytest.raises(InputError, match=r"the fit had an offset .*: give offset="):
        with_one.predict(new)
    with pytest.raises(InputError, match="the fit had an offset"):
        with_one.log_predictive(new, y[:4])
    assert with_one.predict(new, torch.zeros(4), n=3)["y"].shape == (3, 4)
    assert without.predict(new, n=3)["y"].shape == (3, 4)


@pytest.mark.parametrize("guarded", [True, False])
def test_nothing_of_new_people_is_stretched_to_their_number(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response or an offset of one person, or of a number a draw; a column twice as wide, which a program of rows
    takes for twice the people. The control is without the checks: there are answers, of other people."""

    def effect(x: Tensor) -> Tensor:
        return x * pyro.sample("slope", Normal(0.0, 1.0))

    columns, y = _data()
    silos = [{"x": c["x"][:, 0]} for c in columns]
    model = sf.Columns(Bernoulli(), y, [effect] * len(silos))
    result = sf.fit(model, silos, Vertical(rounds=2), compile=False)
    new = {name: {"x": own["x"][:4]} for name, own in zip(result.silos, silos, strict=True)}
    wide = {name: {"x": own["x"][:, None].expand(4, 2)} for name, own in new.items()}
    numpy = {name: {"x": own["x"].numpy()} for name, own in new.items()}
    torch.testing.assert_close(result.log_predictive(numpy, y[:4].numpy()), result.log_predictive(new, y[:4]))
    if not guarded:
        monkeypatch.setattr(columns_module, "_of_each", lambda _, given, s: given.to(s))
        monkeypatch.setattr(VerticalLocalPosterior, "_as_fitted", lambda _, rows, theta: rows)
    for call, control, words in (
        (lambda: result.log_predictive(new, y[:1]), (4,), r"the response must be .* shape \(4,\), not \(1,\)"),
        (lambda: result.predict(new, torch.ones(1), n=2)["y"], (2, 4), r"the offset .* shape \(4,\), not \(1,\)"),
        (lambda: result.predict(new, y[:2, None], n=2)["y"], (2, 4), r"the offset .*, not \(2, 1\)"),
        (lambda: result.predict(wide, n=2)["y"], (2, 8), r"silo '.*': 'x' holds numbers of shape \(N\), as in the fit"),
    ):
        with pytest.raises(InputError, match=words) if guarded else nullcontext():
            assert call().shape == control
    if guarded:
        with pytest.raises(InputError, match="'x' holds NaN or infinite values"):
            result.predict({**new, result.silos[0]: {"x": torch.full((4,), torch.nan)}})


def test_bad_input_is_refused() -> None:
    columns, y = _data()
    with pytest.raises(InputError, match="align"):
        sf.fit(sf.Columns(Bernoulli(), y), [columns[0], {"x": columns[1]["x"][:9]}])
    with pytest.raises(InputError, match=r"silo 'silo-1': all tensors must have one row a record, but sizes are .*9"):
        sf.fit(sf.Columns(Bernoulli(), y), [{**columns[0], "z": y[:9]}, columns[1]])
    with pytest.raises(InputError, match="silo 'silo-2': no records"):
        sf.fit(sf.Columns(Bernoulli(), y), [columns[0], {"x": columns[1]["x"][:0]}])
    with pytest.raises(InputError, match="NaN"):
        sf.fit(sf.Columns(Bernoulli(), y), [columns[0], {"x": columns[1]["x"] * torch.nan}])
    with pytest.raises(InputError, match="0 and 1"):
        sf.fit(sf.Columns(Bernoulli(), y + 0.5), columns)
    with pytest.raises(InputError, match="offset"):
        sf.fit(sf.Columns(Poisson(), y, offset=y[:3]), columns)
    with pytest.raises(InputError, match="2 predictors"):
        sf.fit(sf.Columns(Bernoulli(), y, [linear()] * 2), columns)
    with pytest.raises(InputError, match="power-likelihood"):
        Vertical(model="power", response="private")
    for options, words in (
        ({"model": "power"}, "whose sign is the label; use model = 'augmented'"),
        ({"auxiliary": Amortised()}, "follow each person's label; use auxiliary kind 'integrated'"),
        ({"participation": 0.5, "max_staleness": 2}, "set participation = 1"),
        ({"batch_size": 8}, "an equation each for the labels; leave batch_size out"),
    ):
        with pytest.raises(InputError, match=words):
            Vertical(response="silos", **options)
    with pytest.raises(InputError, match="needs z integrated out, which a Categorical likelihood cannot be"):
        sf.fit(sf.Columns(Categorical(2), y), columns, Vertical(response="silos"))
    privacy = sf.RecordDP(epsilon=1.0, delta=1e-5, clipping_norm=1.0)
    with pytest.raises(InputError, match="would have no noise; use response = 'private' or 'shared'"):
        sf.fit(sf.Columns(Bernoulli(), y), columns, Vertical(response="silos"), privacy=privacy)
    with pytest.raises(InputError, match="belong together"):
        Vertical(participation=0.5)
    with pytest.raises(InputError, match="augmented"):
        Vertical(model="power", participation=0.5, max_staleness=2)
