"""What the tests of the command line share: a small model with its data, and a way to call `secure-fvi`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from secure_fvi.cli import main

MODEL = """
import pyro
from pyro.distributions import HalfNormal, Normal


def means(y):
    mu = pyro.sample("mu", Normal(0.0, 5.0))
    tau = pyro.sample("tau", HalfNormal(2.0))
    with pyro.plate("person", len(y)):
        own = pyro.sample("own", Normal(mu, tau))
        pyro.sample("y", Normal(own.unsqueeze(-1), 0.5).expand(y.shape).to_event(1), obs=y)


def one_mean(y):
    mu = pyro.sample("mu", Normal(0.0, 5.0))
    with pyro.plate("person", len(y)):
        pyro.sample("y", Normal(mu, 0.5).expand(y.shape).to_event(1), obs=y)


def shop_means(y):
    mu = pyro.sample("mu", Normal(0.0, 5.0))
    shop = pyro.sample("shop", Normal(mu, 1.0))
    with pyro.plate("person", len(y)):
        pyro.sample("y", Normal(shop.unsqueeze(-1), 0.5).expand(y.shape).to_event(1), obs=y)


def discrete(y):
    from pyro.distributions import Bernoulli

    z = pyro.sample("z", Bernoulli(0.5))
    with pyro.plate("person", len(y)):
        pyro.sample("y", Normal(z, 0.5).expand(y.shape).to_event(1), obs=y)
"""

CONFIG = """
seed = 3

[model]
function = "model.py:means"
record_plate = "person"

[[silo]]
id = "a"
data = "a.csv"

[[silo]]
id = "b"
data = "b.csv"

[[silo]]
id = "c"
data = "c.csv"

[algorithm]
name = "sfvi"
iterations = 120

[aggregation]
kind = "plain"

[run]
compile = false
"""


def ran(folder: Path, config: str) -> Path:
    """The directory of a run of so few rounds that it does not converge, which is no matter to whom asks for it: the
    suite makes that warning an error."""
    (folder / "run.toml").write_text(config)
    with warnings.catch_warnings(action="ignore"), pytest.raises(SystemExit) as stopped:
        main(["run", str(folder / "run.toml"), "--out", str(folder / "out"), "--quiet"])
    assert stopped.value.code == 0
    return folder / "out"


class Answer(NamedTuple):
    code: int
    out: str
    err: str


class CommandLine:
    """Calls `secure-fvi` in this process, in a folder that holds the small model and its data."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        (folder / "model.py").write_text(MODEL)
        self.config = folder / "config.toml"
        self.config.write_text(CONFIG)
        rng = np.random.default_rng(0)
        for silo, people in (("a", 6), ("b", 9), ("c", 5)):
            rows = rng.normal(1.0, 1.0, (people, 1)) + rng.normal(0, 0.5, (people, 2))
            lines = ["y[0],y[1]", *(f"{u:.3f},{v:.3f}" for u, v in rows)]
            (folder / f"{silo}.csv").write_text("\n".join(lines) + "\n")

    def __call__(self, *arguments: object) -> Answer:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in arguments])
        seen = self._capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return Answer(stopped.value.code, seen.out, seen.err)

    def run(self, *more: object, out: str = "out") -> Answer:
        return self("run", self.config, "--out", self.folder / out, *more)

    def change(self, old: str, new: str) -> None:
        """Replace text in the configuration, which must be there."""
        text = self.config.read_text()
        assert old in text
        self.config.write_text(text.replace(old, new))

    def refused(self, *words: str, more: tuple[object, ...] = (), out: str = "out") -> None:
        """The run is refused in one line that holds all `words`, and nothing is written."""
        before = sorted(self.folder.rglob("*"))
        answer = self.run(*more, out=out)
        assert answer.code == 2, answer
        assert answer.err.count("\n") == 1, answer.err
        assert answer.out == ""
        for word in words:
            assert word in answer.err, answer.err
        after = [path for path in sorted(self.folder.rglob("*")) if "__pycache__" not in path.parts]
        assert after == [path for path in before if "__pycache__" not in path.parts]
