"""`secure-fvi reproduce NAME --quick`, as a user calls it; whether a plot is a picture."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from secure_fvi.cli import main


def quick_run(name: str, needs: str, out: Path) -> dict[str, Any]:
    """The content of NAME.json; skips where SECURE_FVI_DATA holds no data set `needs`. "": none is needed."""
    data, arguments = os.environ.get("SECURE_FVI_DATA"), ["reproduce", name, "--out", str(out), "--quick"]
    if needs:
        if not data or not (Path(data) / needs).is_dir():
            pytest.skip(f"SECURE_FVI_DATA holds no {needs}")
        arguments += ["--data", data]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert not (out / f"{name}.partial").exists()
    assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    content: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    assert {"name", "paper", "ours", "seconds", "bytes", "machine", "setting"} <= content.keys()
    return content


def is_picture(figure: Figure) -> bool:
    """Nothing is drawn before a figure is written."""
    figure.savefig(file := io.BytesIO())
    return len(figure.axes) > 0 and file.getvalue()[:4] == b"\x89PNG"
