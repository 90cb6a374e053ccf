"""Modules that are loaded when they are first used: what another party runs (a server's half, at a silo), or what reads
a program that runs here, where its graph alone does. `tests/test_imports.py` holds a silo to using none of these."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """The module of this name. Type checkers are told of it by an import of their own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, wanted: str) -> Any:
        return getattr(importlib.import_module(self._name), wanted)
