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

_MODULES = {  # The names that each of `secure_fvi` holds, as imported above.
    "aggregation": "Masked Plain",
    "aggregation.homomorphic": "Homomorphic",
    "algorithms.baselines": "BCM StreamingVB VCL",
    "algorithms.fedavg": "FedAvg",
    "algorithms.fedvi": "FedVI",
    "algorithms.pvi": "PVI",
    "algorithms.sfvi": "SFVI WarmStart",
    "algorithms.sfvi_avg": "SFVIAvg",
    "algorithms.vertical.soul": "Soul",
    "algorithms.vertical.vertical": "Vertical",
    "columns": "Columns",
    "dictionary": "Dictionary",
    "driving": "Books Progress Run",
    "errors": "BudgetError InputError SecureFVIError SecureFVIWarning",
    "families": "Amortised Conditional",
    "federated_model": "FederatedModel Shared SiloEncoder",
    "fitting": "fit run",
    "mixed_model": "glmm",
    "opening": "load",
    "privacy.settings": "RecordDP SiloDP",
    "results": "Result prior_predictive",
}
_HOME = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'secure_fvi' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
