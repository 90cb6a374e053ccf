"""A run that is looked at on the way and kept, so that an experiment that was stopped goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import secure_fvi as sf
from secure_fvi.aggregation import Plain
from secure_fvi.algorithms.base import Algorithm
from secure_fvi.algorithms.structured import FINISH
from secure_fvi.driving import Run
from secure_fvi.files import write_atomically
from secure_fvi_lab.experiments import Tell

Row = dict[str, Any]
#: Seconds between two checkpoints of a fit.
_CHECKPOINT = 60.0


class Watched:
    """A run of `algorithm` with plain sums, and its learning curve: `looks` rows {round, what `look` says, objective}.

    Where `folder` is one, run and curve are kept there, and go on from where they were.
    """

    def __init__(
        self, model: Any, silos: Any, algorithm: Algorithm, seed: int, folder: Path | None, **options: Any
    ) -> None:
        kept = None if folder is None else folder / "checkpoint"
        self.run: Run[Any] = sf.run(
            model, silos, algorithm, Plain(), seed=seed, checkpoint_dir=kept, checkpoint_seconds=_CHECKPOINT,
            resume=kept is not None, **options,
        )  # fmt: skip
        self._most, self._looking = algorithm.most_rounds, 0.0
        self._file = None if folder is None else folder / "curve.json"
        self.curve: list[Row] = json.loads(self._file.read_text()) if self._file and self._file.is_file() else []

    def drain(self, look: Callable[[], Row], looks: int, tell: Tell) -> None:
        """Run to the end. `tell` hears what a look found."""
        for progress in self.run:
            known = self.curve[-1]["round"] if self.curve else 0
            if progress.phase == FINISH or progress.round in (0, known):
                continue
            if progress.round % max(1, self._most // looks):
                continue
            start = time.monotonic()
            found = look()
            self.curve = [point for point in self.curve if point["round"] < progress.round]
            self.curve.append({"round": progress.round, **found, "objective": progress.objective})
            said = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items())
            tell(f"    round {progress.round} of {self._most}: {said}")
            if self._file is not None:
                write_atomically(self._file, json.dumps(self.curve).encode())
            self._looking += time.monotonic() - start

    def costs(self) -> Row:
        """Seconds without the looks of this process, and bytes of the silo that sent and received most."""
        up, down = (max(by.values()) for by in (self.run.engine.bytes_up, self.run.engine.bytes_down))
        return {"seconds": round(self.run.seconds - self._looking, 1), "bytes_up": up, "bytes_down": down}
