"""Federated variational inference under secure sums. `import secure_fvi as sf`; heavy modules load on first use."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as processor:
    # Before MKL's first use. On AMD's processors it rounds a row of a product by where it stands, unless it is told to
    # take one way for all; record privacy rests on its not doing so (`privacy.gate.check_machine`).
    if "AuthenticAMD" in processor.read(400):
        os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

if TYPE_CHECKING:
    from secure_fvi.aggregation import Masked as Masked
    from secure_fvi.aggregation import Plain as Plain
    from secure_fvi.aggregation.homomorphic import Homomorphic as Homomorphic
    from secure_fvi.algorithms.baselines import BCM as BCM
    from secure_fvi.algorithms.baselines import VCL as VCL
    from secure_fvi.algorithms.baselines import StreamingVB as StreamingVB
    from secure_fvi.algorithms.fedavg import FedAvg as FedAvg
    from secure_fvi.algorithms.fedvi import FedVI as FedVI
    from secure_fvi.algorithms.pvi import PVI as PVI
    from secure_fvi.algorithms.sfvi import SFVI as SFVI
    from secure_fvi.algorithms.sfvi import WarmStart as WarmStart
    from secure_fvi.algorithms.sfvi_avg import SFVIAvg as SFVIAvg
    from secure_fvi.algorithms.vertical.soul import Soul as Soul
    from secure_fvi.algorithms.vertical.vertical import Vertical as Vertical
    from secure_fvi.columns import Columns as Columns
    from secure_fvi.dictionary import Dictionary as Dictionary
    from secure_fvi.driving import Books as Books
    from secure_fvi.driving import Progress as Progress
    from secure_fvi.driving import Run as Run
    from secure_fvi.errors import BudgetError as BudgetError
    from secure_fvi.errors import InputError as InputError
    from secure_fvi.errors import SecureFVIError as SecureFVIError
    from secure_fvi.errors import SecureFVIWarning as SecureFVIWarning
    from secure_fvi.families import Amortised as Amortised
    from secure_fvi.families import Conditional as Conditional
    from secure_fvi.federated_model import FederatedModel as FederatedModel
    from secure_fvi.federated_model import Shared as Shared
    from secure_fvi.federated_model import SiloEncoder as SiloEncoder
    from secure_fvi.fitting import fit as fit
    from secure_fvi.fitting import run as run
    from secure_fvi.mixed_model import glmm as glmm
    from secure_fvi.opening import load as load
    from secure_fvi.privacy.settings import RecordDP as RecordDP
    from secure_fvi.privacy.settings import SiloDP as SiloDP
    from secure_fvi.results import Result as Result
    from secure_fvi.results import prior_predictive as prior_predictive

__version__ = "0.2.0"

_HOME = {
    "Amortised": "secure_fvi.families",
    "BCM": "secure_fvi.algorithms.baselines",
    "Books": "secure_fvi.driving",
    "BudgetError": "secure_fvi.errors",
    "Columns": "secure_fvi.columns",
    "Conditional": "secure_fvi.families",
    "FedAvg": "secure_fvi.algorithms.fedavg",
    "FedVI": "secure_fvi.algorithms.fedvi",
    "FederatedModel": "secure_fvi.federated_model",
    "Homomorphic": "secure_fvi.aggregation.homomorphic",
    "InputError": "secure_fvi.errors",
    "Masked": "secure_fvi.aggregation",
    "PVI": "secure_fvi.algorithms.pvi",
    "Plain": "secure_fvi.aggregation",
    "Progress": "secure_fvi.driving",
    "RecordDP": "secure_fvi.privacy.settings",
    "Result": "secure_fvi.results",
    "Run": "secure_fvi.driving",
    "SFVI": "secure_fvi.algorithms.sfvi",
    "SFVIAvg": "secure_fvi.algorithms.sfvi_avg",
    "SecureFVIError": "secure_fvi.errors",
    "SecureFVIWarning": "secure_fvi.errors",
    "SiloDP": "secure_fvi.privacy.settings",
    "Shared": "secure_fvi.federated_model",
    "SiloEncoder": "secure_fvi.federated_model",
    "Soul": "secure_fvi.algorithms.vertical.soul",
    "StreamingVB": "secure_fvi.algorithms.baselines",
    "VCL": "secure_fvi.algorithms.baselines",
    "Vertical": "secure_fvi.algorithms.vertical.vertical",
    "WarmStart": "secure_fvi.algorithms.sfvi",
    "Dictionary": "secure_fvi.dictionary",
    "fit": "secure_fvi.fitting",
    "load": "secure_fvi.opening",
    "prior_predictive": "secure_fvi.results",
    "glmm": "secure_fvi.mixed_model",
    "run": "secure_fvi.fitting",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'secure_fvi' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
