"""`Request.once`: what a run that was stopped has finished is not made again, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from secure_fvi_lab.experiments import Request, vertical_logistic


class Maker:
    """Counts how often it is asked."""

    def __init__(self, value: object) -> None:
        self.value, self.calls = value, 0

    def __call__(self) -> object:
        self.calls += 1
        return self.value


def _request(keep: Path | None, quick: bool = False, told: list[str] | None = None) -> Request:
    return Request(quick, None, ([] if told is None else told).append, keep)


def test_a_value_is_made_once_and_told_once(tmp_path: Path) -> None:
    make, told = Maker({"error": 0.1, "curve": (1.0, float("inf"))}), list[str]()
    request = _request(tmp_path / "x.partial", told=told)
    first = request.once("split 1", 20, make)
    again = _request(tmp_path / "x.partial", told=told).once("split 1", 20, make)
    assert first == again == {"error": 0.1, "curve": [1.0, float("inf")]}
    assert (make.calls, told) == (1, ["split 1"])


@pytest.mark.parametrize(
    ("quick", "what", "options"), [(True, "split 1", 20), (False, "split 2", 20), (False, "split 1", 21)]
)
def test_another_value_is_made_anew(tmp_path: Path, quick: bool, what: str, options: int) -> None:
    _request(tmp_path).once("split 1", 20, Maker(1))
    assert _request(tmp_path, quick).once(what, options, Maker(2)) == 2


def test_what_was_being_made_at_the_stop_is_made_again(tmp_path: Path) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    request = _request(tmp_path)
    assert request.once("split 1", 20, Maker(1)) == 1
    with pytest.raises(KeyboardInterrupt):
        request.once("split 2", 20, stopped)
    make = Maker(9)
    assert [request.once(f"split {k}", 20, make) for k in (1, 2)] == [1, 9]
    assert make.calls == 1


def test_without_a_folder_everything_is_made(tmp_path: Path) -> None:
    make = Maker((1, 2))
    assert [_request(None).once("split 1", 20, make) for _ in range(2)] == [[1, 2], [1, 2]]
    assert make.calls == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_experiment_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vertical-logistic at no length to speak of, stopped at its third part: the same tables and plot at the end."""
    effort = vertical_logistic.Effort(5, 5, 1, 5, 10, 1, "traced", (2,), (0.5,))
    monkeypatch.setattr(vertical_logistic, "step_times", lambda *arguments, **options: {"ours": 1.0})
    told = list[str]()

    def stop(what: str) -> None:
        told.append(what)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vertical_logistic.run(effort, Request(False, None, stop, tmp_path))
    first = told[:2]
    content, _ = vertical_logistic.run(effort, Request(False, None, told.append, tmp_path))
    assert len(content["rows"]) == 10
    assert not set(told[3:]) & set(first)
    again, _ = vertical_logistic.run(effort, Request(False, None, told.append, tmp_path))
    assert {**again, "seconds": 0} == {**content, "seconds": 0}
