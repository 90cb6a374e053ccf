"""`sf.fit` by default over the gallery, against posteriors that are known; beside it, where asked, NumPyro's own.

Peers are AutoNormal, AutoMultivariateNormal and NUTS on all records in one place.

Errors are the largest over all numbers of all global sites, in sds of the reference; seconds are the processor's. Peers
fit the entries that `numpyro_programs` has in NumPyro's own words; nothing of theirs is tuned either.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

import secure_fvi as sf
from secure_fvi.errors import InputError, SecureFVIError, SecureFVIWarning
from secure_fvi_lab.machine import commit, machine
from secure_fvi_lab.posteriors.gallery import ENTRIES, WITH_QUANTILES, quantiles, reference, wrong_by

#: Steps of NumPyro's guides, their rate, and draws of NUTS: after as many of warm-up, four chains.
_STEPS, _RATE, _DRAWS, _CHAINS = 20_000, 0.01, 1000, 4
PEERS = ("AutoNormal", "AutoMultivariateNormal", "NUTS")
_WITHIN = 0.1  # reference sds of a mean, and of the log of an sd: what the aim calls right


class Moments(NamedTuple):
    mean: torch.Tensor
    sd: torch.Tensor


def measure(names: tuple[str, ...], peers: bool, quick: bool, tell: Callable[[str], None]) -> dict[str, Any]:
    """A row an entry, `names` or all of them. quick: a twelfth of the default steps. tell: hears of each as it ends."""
    unknown = [name for name in names if name not in ENTRIES]
    if unknown:
        raise InputError(f"no entry '{unknown[0]}'; these are: {', '.join(ENTRIES)}")
    torch.set_num_threads(1)
    missing = _missing() if peers else None
    rows = {}
    for name in names or tuple(ENTRIES):
        rows[name] = {"secure-fvi": _ours(name, quick)}
        if peers and missing is None:
            rows[name] |= _peers(name)
        for line in _of_entry(name, rows[name]):
            tell(line)
    return {"machine": machine(), "commit": commit(), "quick": quick, "peers": missing or peers, "entries": rows}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """For a terminal: how many were right, and at what price; the rows were told before."""
    ours = [row["secure-fvi"] for row in found["entries"].values()]
    ended = [row for row in ours if row["converged"]]
    wrong = [row for row in ended if not _right(row, 0.2, 0.15)]
    yield (
        f"{len(ended)} of {len(ours)} converged, {sum(_right(row, _WITHIN, _WITHIN) for row in ended)} of these within "
        f"{_WITHIN} sds and 10%; {len(wrong)} silently wrong (over .2 sds or 15%)"
    )
    if ended:
        exchanges, seconds = ([row[k] for row in ended] for k in ("exchanges", "seconds"))
        yield f"medians: {statistics.median(exchanges):.0f} exchanges, {statistics.median(seconds):.1f} s"
    yield from _beside(found["entries"].values())
    if isinstance(found["peers"], str):
        yield found["peers"]
    yield f"{found['machine']}, commit {found['commit']}"


def _beside(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Each peer's count of right answers and seconds, with ours of the same entries."""
    for by in PEERS:
        both = [(row["secure-fvi"], row[by]) for row in entries if by in row]
        if not both:
            continue
        ours, theirs = ([row[k] for row in both] for k in (0, 1))
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in both)
        right = sum(_right(row, _WITHIN, _WITHIN) for row in theirs)
        yield (
            f"{by}: {right} of {len(both)} within {_WITHIN} sds and 10%, "
            f"{statistics.median(row['seconds'] for row in theirs):.1f} s at the median; ours of these "
            f"{statistics.median(row['seconds'] for row in ours):.1f} s, and {ratio:.2f} times as long"
        )


def _right(row: Mapping[str, Any], mean: float, sd: float) -> bool:
    return bool(row["error"] < mean and row["least"] > 1 - sd and row["most"] < 1 + sd)


def _of_entry(name: str, row: Mapping[str, Any]) -> Iterator[str]:
    for by, found in row.items():
        if "said" in found:
            yield f"{name:30}{by:24}{found['said']}"
            continue
        state = {True: "converged", False: "not converged", None: ""}[found["converged"]]
        exchanges = f"{found['exchanges']:5d} exchanges" if "exchanges" in found else ""
        errors = f"{found['error']:6.3f} sds, sds x {found['least']:.2f} to {found['most']:.2f}"
        quantiles = f"; quantiles {found['quantiles']:.3f} sds off" if "quantiles" in found else ""
        yield f"{name:30}{by:24}{state:14}{errors}{exchanges:>17}{found['seconds']:8.1f} s{quantiles}"


def _ours(name: str, quick: bool) -> dict[str, Any]:
    """Masked sums, nothing tuned. A refusal is a row without numbers that says why."""
    entry, began = ENTRIES[name], time.process_time()
    algorithm = sf.PVI(local_steps=80, max_rounds=20) if quick else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureFVIWarning)
            result = sf.fit(entry.program, entry.silos, algorithm, sf.Masked(), compile=False, threads=1)
    except SecureFVIError as error:
        seconds = round(time.process_time() - began, 1)
        return {"converged": False, "said": f"refused: {error}", "seconds": seconds}
    seconds = round(time.process_time() - began, 1)
    cost = {"rounds": result.rounds, "exchanges": result.aggregation["exchanges"], "seconds": seconds}
    about = {"converged": result.converged, "algorithm": result.algorithm, "reason": result.convergence["reason"]}
    found = {**about, **_errors(name, result.posterior), **cost, "refined": result.refined is not None}
    if name in WITH_QUANTILES:
        found["quantiles"] = _quantiles_off(name, result.sample(20_000))
    return found


def _quantiles_off(name: str, draws: Mapping[str, torch.Tensor]) -> float:
    """By how many reference sds a 5 or 95% quantile is off, at most. Of 20,000 draws: a standard error of .015."""
    at = torch.tensor([0.05, 0.95], dtype=torch.float64)
    off = [
        ((draws[site].double().quantile(at, 0) - torch.stack(both)) / reference(name)[site][1]).abs().max()
        for site, both in quantiles(name).items()
    ]
    return float(torch.stack(off).max())


def _errors(name: str, posterior: Mapping[str, Any]) -> dict[str, float]:
    return dict(zip(("error", "least", "most"), wrong_by(name, posterior), strict=True))


# ---- peers ----


def _missing() -> str | None:
    """Why there are no peers; None: there are."""
    try:
        import numpyro  # noqa: F401
    except ImportError:
        return "NumPyro is not installed, so that nothing stands beside: pip install 'secure-fvi-lab[benchmark]'"
    return None


def _peers(name: str) -> dict[str, dict[str, Any]]:
    """NumPyro's on pooled records; a row that says so where there is no program."""
    from secure_fvi_lab.posteriors.numpyro_programs import twin

    if (program := twin(name)) is None:
        return {"NumPyro": {"converged": None, "said": "no program of this entry in NumPyro's words"}}
    found = {}
    for by in PEERS:
        began = time.process_time()
        draws = _nuts(program) if by == "NUTS" else _guided(program, by)
        values = {site: torch.tensor(draws[site].tolist(), dtype=torch.float64) for site in reference(name)}
        posterior = {site: Moments(value.mean(0), value.std(0)) for site, value in values.items()}
        seconds = round(time.process_time() - began, 1)
        found[by] = {"converged": None, **_errors(name, posterior), "seconds": seconds}
    return found


def _guided(program: Callable[[], None], guide: str) -> Mapping[str, Any]:
    import jax
    import numpyro
    from numpyro.infer import SVI, Trace_ELBO, autoguide

    made = getattr(autoguide, guide)(program)
    svi = SVI(program, made, numpyro.optim.Adam(_RATE), Trace_ELBO())
    state = svi.run(jax.random.PRNGKey(0), _STEPS, progress_bar=False)
    return made.sample_posterior(jax.random.PRNGKey(1), state.params, sample_shape=(20_000,))


def _nuts(program: Callable[[], None]) -> Mapping[str, Any]:
    import jax
    from numpyro.infer import MCMC, NUTS

    chains = MCMC(
        NUTS(program), num_warmup=_DRAWS, num_samples=_DRAWS, num_chains=_CHAINS, chain_method="sequential",
        progress_bar=False,
    )  # fmt: skip
    chains.run(jax.random.PRNGKey(0))
    return chains.get_samples()
