"""Imported by the process from which parties are forked: a short job loads and traces what every party needs alike."""

from __future__ import annotations

import warnings

import matplotlib.figure  # noqa: F401

import secure_fvi.algorithms.pvi
import secure_fvi.algorithms.sfvi_avg
import secure_fvi.deployment.serving
import secure_fvi.deployment.site
import secure_fvi.plots
import secure_fvi.runs.running  # noqa: F401
from secure_fvi.compiled import TRACE_AFTER_CALLS
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.runs.config import parse
from secure_fvi.runs.federation import federate

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SecureFVIWarning)
    _job = {
        "model": {"program": "six-cities"},
        "partition": {"count": 3},
        "algorithm": {"name": "sfvi", "iterations": TRACE_AFTER_CALLS + 1},
        "run": {"threads": 1, "compile": False},
    }
    federate(parse(_job, "warm")).fit(compile=False, threads=1)
