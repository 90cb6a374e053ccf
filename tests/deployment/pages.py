"""Pages of the documentation whose commands are run as they stand, in order, in one shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"


def run_page(name: str, folder: Path, timeout: float, least_blocks: int) -> subprocess.CompletedProcess[str]:
    """The `sh` blocks of docs/NAME in `folder`. A page with fewer than `least_blocks` of them has changed its form."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (_DOCS / name).read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= least_blocks
    environment = {k: v for k, v in os.environ.items() if k != "SECURE_FVI_HOME"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
