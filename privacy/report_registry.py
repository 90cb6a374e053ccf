"""The report in the fields of the Differential Privacy Deployments Registry (OpenDP, proposed to be hosted by NIST).

Names and nesting follow github.com/opendp/deployments-registry-data as of 2026, tiers 1 to 3. What a ledger cannot know
is null and listed by its path in `needs_answer`, a key of ours that is to be deleted before submission; a
facts file of the same shape supplies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from secure_fvi.errors import InputError
from secure_fvi.privacy.report import Report

_SECOND_TIER = frozenset(
    (
        "variant_name",
        "privacy_unit",
        "privacy_parameters",
        "model_name",
        "release_type",
        "data_source_type",
        "access_type",
    )
)
#: What the ledger says and nobody else may.
_FIXED = frozenset(("tier", "variant_name", "privacy_parameters", "privacy_parameters_details", "composition"))


def report_registry(report: Report, facts: Mapping[str, Any] | None = None) -> str:
    """The registry entry as YAML. facts: answers, in the shape of the entry; unknown fields raise InputError."""
    entry = registry_entry(report)
    if facts:
        _answer(entry, facts, "")
    missing = list(_missing(entry))
    entry["tier"] = _tier(missing)
    entry["needs_answer"] = missing
    text: str = yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=100)
    return text


def read_facts(path: Path) -> dict[str, Any]:
    """The answers in a YAML file. Raises InputError if it is none."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read the facts in '{path}': {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"'{path}' must hold a table with the fields of a registry entry")
    return found


def registry_entry(report: Report) -> dict[str, Any]:
    """What the ledger can say of an entry; None elsewhere."""
    unit = "Individual-level" if report.unit == "record" else "Institution-level"
    noises = {j.noise for j in report.jobs}
    events = sorted({_mechanism(t["event"]) for j in report.jobs for t in j.terms})
    public = [", ".join(j.declared_public) for j in report.jobs if j.declared_public]
    described = bool(report.jobs) and all(j.declared_public is not None for j in report.jobs)
    return {
        "url_slug": None,
        "status": "Draft",
        "tier": None,
        "deployment": {
            "basic": {
                "name": None,
                "data_curators": None,
                "intended_use": None,
                "data_product_type": "Machine learning model",
                "data_product_region": None,
                "description": None,
                "publication_date": None,
                "data_product_sector": None,
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": None,
                "unprotected_quantities": (", ".join(sorted(set(public))) or "None declared.") if described else None,
            },
            "privacy_loss": {
                "privacy_unit": unit,
                "privacy_unit_details": report.adjacency,
                "privacy_parameters": dict(report.budget["bound"]),
                "privacy_parameters_details": f"Spent so far: epsilon {report.epsilon:.6g} at the same delta, by "
                f"{len(report.jobs)} jobs. Ledger head {report.ledger_head}.",
            },
            "deployment_model": {
                "model_name": _model(noises),
                "model_name_details": _where(noises),
                "actors": None,
                "release_type": "Many releases" if len(report.jobs) != 1 else "One release",
                "release_type_details": report.composition,
                "data_source_type": None,
                "data_source_type_details": None,
                "access_type": None,
                "access_type_details": None,
            },
            "accounting": {
                "post_processing": None,
                "composition": f"{report.composition} Accountant: {report.accountant_version}.",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": None,
                "mechanisms": "; ".join([*events, f"implemented by {report.software}", *_sources(report)])
                if report.jobs
                else None,
                "justification": None,
            },
            "administrative": {"sources": None, "registry_authors": None},
        },
    }


def _model(noises: set[str | None]) -> str | None:
    if not noises or None in noises:
        return None
    return "Central" if noises == {"server"} else "Federated"


def _where(noises: set[str | None]) -> str | None:
    words = {
        "server": "A trusted aggregator adds the noise to the sum of the institutions' clipped contributions.",
        "silo": "Each institution adds the whole noise before anything leaves it.",
        "distributed": "Institutions add shares of integer Skellam noise before a secure sum; the guarantee counts "
        "the shares of honest survivors only.",
    }
    found = [words[n] for n in sorted(n for n in noises if n in words)]
    return " ".join(found) or None


def _mechanism(event: Mapping[str, Any]) -> str:
    kind = event["kind"]
    if kind in ("poisson_sampled", "repeated"):
        inner = _mechanism(event["event"])
        return f"Poisson-sampled {inner} (rate {event['rate']:.4g})" if kind == "poisson_sampled" else inner
    if kind == "composed":
        return " and ".join(_mechanism(e) for e in event["events"])
    if kind == "gaussian":
        return f"Gaussian mechanism in floating point (noise multiplier {event['noise_multiplier']:.4g})"
    if kind == "skellam":
        return f"Skellam mechanism on integers (sd over L2 sensitivity {event['variance'] ** 0.5 / event['l2']:.4g})"
    return f"discrete Gaussian mechanism (sigma over L2 sensitivity {event['sigma'] / event['l2']:.4g})"


def _sources(report: Report) -> list[str]:
    return [f"randomness: {rng}" for rng in sorted({j.rng for j in report.jobs if j.rng})]


def _missing(entry: Any, path: str = "") -> Iterator[str]:
    if isinstance(entry, dict):
        for key, value in entry.items():
            if key not in ("tier", "needs_answer"):
                yield from _missing(value, f"{path}/{key}")
    elif entry is None:
        yield path.lstrip("/")


def _tier(missing: list[str]) -> int | None:
    """The highest tier whose fields are all answered, None if not even the first's are."""
    if any("/basic/" in m for m in missing):
        return None
    if any(m.rsplit("/", 1)[-1] in _SECOND_TIER for m in missing):
        return 1
    required = [m for m in missing if m.startswith("deployment/") and not m.endswith("_details")]
    return 2 if any("/administrative/" not in m for m in required) else 3


def _answer(entry: dict[str, Any], facts: Mapping[str, Any], path: str) -> None:
    for key, value in facts.items():
        here = f"{path}/{key}".lstrip("/")
        if key not in entry:
            raise InputError(f"the registry has no field '{here}'; here it has {', '.join(entry)}")
        if key in _FIXED:
            raise InputError(f"field '{here}' comes from the ledger and cannot be given")
        if isinstance(entry[key], dict):
            if not isinstance(value, dict):
                raise InputError(f"field '{here}' must be a table")
            _answer(entry[key], value, here)
        else:
            entry[key] = value
