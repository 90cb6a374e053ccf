"""`sf.fit` by default over the gallery, against posteriors that are known; beside it, where asked, NumPyro's own.

Peers are AutoNormal, AutoMultivariateNormal and NUTS on all records in one place.

Errors are the largest over all numbers of all global sites, in sds of the reference; seconds are the processor's. Peers
fit the entries for which `_twin` has the program in NumPyro's own words; nothing of theirs is tuned either.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

import secure_fvi as sf
from secure_fvi.errors import InputError, SecureFVIError, SecureFVIWarning
from secure_fvi_lab.machine import commit, machine
from secure_fvi_lab.posteriors.gallery import ENTRIES, Entry, wrong_by

#: Steps of NumPyro's guides, their rate, and draws of NUTS: after as many of warm-up, four chains.
_STEPS, _RATE, _DRAWS, _CHAINS = 20_000, 0.01, 1000, 4
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
    if isinstance(found["peers"], str):
        yield found["peers"]
    yield f"{found['machine']}, commit {found['commit']}"


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
        yield f"{name:30}{by:24}{state:14}{errors}{exchanges:>17}{found['seconds']:8.1f} s"


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
    return {**about, **_errors(name, result.posterior), **cost, "refined": result.refined is not None}


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
    program = _twin(ENTRIES[name])
    if program is None:
        return {"NumPyro": {"converged": None, "said": "no program of this entry in NumPyro's words"}}
    found = {}
    for by, run in (("AutoNormal", _guided), ("AutoMultivariateNormal", _guided), ("NUTS", _nuts)):
        began = time.process_time()
        draws = run(program, by)
        posterior = {site: Moments(value.mean(0), value.std(0)) for site, value in draws.items()}
        seconds = round(time.process_time() - began, 1)
        found[by] = {"converged": None, **_errors(name, posterior), "seconds": seconds}
    return found


def _twin(entry: Entry) -> Callable[[], None] | None:
    """The entry's program and records for NumPyro: of ordinary regressions alone."""
    if entry.linear is None:
        return None
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    (width, scale), x, y = entry.linear, *(jnp.asarray(entry.rows[k].numpy()) for k in ("x", "y"))

    def program() -> None:
        beta = numpyro.sample("beta", dist.Normal(jnp.zeros(x.shape[1]), width).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(scale))
        with numpyro.plate("r", len(y)):
            numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    return program


def _guided(program: Callable[[], None], guide: str) -> dict[str, torch.Tensor]:
    import jax
    import numpyro
    from numpyro.infer import SVI, Trace_ELBO, autoguide

    numpyro.enable_x64()
    made = getattr(autoguide, guide)(program)
    svi = SVI(program, made, numpyro.optim.Adam(_RATE), Trace_ELBO())
    state = svi.run(jax.random.PRNGKey(0), _STEPS, progress_bar=False)
    draws = made.sample_posterior(jax.random.PRNGKey(1), state.params, sample_shape=(20_000,))
    return {site: torch.tensor(value.tolist(), dtype=torch.float64) for site, value in draws.items()}


def _nuts(program: Callable[[], None], _: str) -> dict[str, torch.Tensor]:
    import jax
    import numpyro
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    chains = MCMC(
        NUTS(program), num_warmup=_DRAWS, num_samples=_DRAWS, num_chains=_CHAINS, chain_method="sequential",
        progress_bar=False,
    )  # fmt: skip
    chains.run(jax.random.PRNGKey(0))
    return {site: torch.tensor(value.tolist(), dtype=torch.float64) for site, value in chains.get_samples().items()}
