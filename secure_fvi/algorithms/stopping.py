"""When is a stochastic fit done? A rule on the iterates, not on the objective, whose noise hides what matters.

At a constant learning rate the iterates first travel, then wander around a stationary distribution. A stage runs
until split R-hat says they wander, averages them, and hands over to the next stage at a lower learning rate. The
fit has converged when two stages agree and the Monte-Carlo error of the last average is small (after Dhaka et al.
2020 and Welandawe et al. 2022). Agreement matters: at a high rate the noise of the local parameters alone shifts
and shrinks q(Z_G). Everything here sees eta_G only, so it runs at the server.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

R_HAT_BELOW = 1.1
DRIFT_BELOW = 0.01  # posterior sds between the halves of a window: as good as standing still
ERROR_BELOW = 0.03  # Monte-Carlo error of the last average, in posterior sds
AGREE_WITHIN = 0.05  # posterior sds between the averages of two stages, beyond the error of the earlier one
AGREE_AT_MOST = 0.12  # and with it
AVERAGE_MOST = 1_000  # rounds of averaging in a stage that does not agree with the one before
DECAY = 0.3  # of the learning rate from stage to stage
CHECK_EVERY = 100  # rounds
WINDOW_LEAST = 200  # rounds
HISTORY_MOST = 1_000_000  # numbers kept; longer stages are thinned


class Monitor(NamedTuple):
    """The rule's memory. `history` rows are (loc, log sd) of q(Z_G), one every `stride` rounds of the stage."""

    stage: int
    stage_rounds: int
    stride: int
    history: FloatArray  # (kept, 2 n)
    averaging: int  # rounds averaged so far, 0 before stationarity
    previous: FloatArray | None  # (2, 2 n): the last stage's average, and its Monte-Carlo error
    r_hat: float | None
    converged: bool

    @property
    def scale(self) -> float:
        """Factor on the learning rate."""
        return float(DECAY**self.stage)


def start() -> Monitor:
    return Monitor(0, 0, 1, np.empty((0, 0)), 0, None, None, False)


def observe(monitor: Monitor, loc: FloatArray, log_sd: FloatArray) -> Monitor:
    """Note the iterate after a round. loc and log_sd are (n,)."""
    rounds = monitor.stage_rounds + 1
    history, stride = monitor.history, monitor.stride
    if rounds % stride == 0:
        row = np.concatenate([loc, log_sd])
        kept = rounds // stride
        if kept > len(history):  # grow by doubling, so that a round costs a copy only now and then
            grown = np.zeros((max(64, 2 * len(history)), len(row)))
            grown[: len(history)] = history.reshape(-1, len(row))[: len(history)] if len(history) else 0.0
            history = grown
        history[kept - 1] = row
        if kept * len(row) > HISTORY_MOST:
            history = history[1:kept:2].copy()
            stride *= 2
    averaging = monitor.averaging + 1 if monitor.averaging else 0
    return monitor._replace(stage_rounds=rounds, stride=stride, history=history, averaging=averaging)


def assess(monitor: Monitor) -> tuple[Monitor, bool]:
    """Every CHECK_EVERY rounds: begin averaging, end the stage, or go on. True when a stage has just ended."""
    rounds, kept = monitor.stage_rounds, monitor.stage_rounds // monitor.stride
    if rounds % CHECK_EVERY or rounds < WINDOW_LEAST:
        return monitor, False
    series = monitor.history[:kept]
    if not monitor.averaging:
        window = series[kept // 2 :] if rounds >= 2 * WINDOW_LEAST else series
        worst = _worst_r_hat(window)
        # Averaging starts with the next round; 1 marks that it has.
        return monitor._replace(r_hat=worst, averaging=1 if worst < R_HAT_BELOW else 0), False
    if monitor.averaging < WINDOW_LEAST:
        return monitor, False
    averaged = series[kept - max((monitor.averaging - 1) // monitor.stride, 2) :]
    mean, error = averaged.mean(0), _error(averaged)
    agrees = monitor.previous is not None and _agree(mean, *monitor.previous)
    precise = bool((error / _units(averaged)).max() < ERROR_BELOW)
    if agrees and precise:
        return monitor._replace(converged=True), True
    if agrees or not (precise or monitor.averaging >= AVERAGE_MOST):
        return monitor, False
    return Monitor(monitor.stage + 1, 0, 1, np.empty((0, 0)), 0, np.stack([mean, error]), monitor.r_hat, False), True


def watch(monitor: Monitor) -> Monitor:
    """In a run of fixed length: note R-hat over the last quarter, decide nothing."""
    kept = monitor.stage_rounds // monitor.stride
    if monitor.stage_rounds % CHECK_EVERY or kept < WINDOW_LEAST:
        return monitor
    return monitor._replace(r_hat=_worst_r_hat(monitor.history[kept - kept // 4 : kept], AGREE_WITHIN))


def _units(series: FloatArray) -> FloatArray:
    """Posterior sds of the locations; log sds are already relative."""
    n = series.shape[-1] // 2
    sd = np.exp(series[:, n:].mean(0))
    return np.concatenate([sd, np.ones(n)])


def _worst_r_hat(window: FloatArray, drift: float = DRIFT_BELOW) -> float:
    """Split R-hat (Gelman et al. 2013) of the worst coordinate; one that drifts by less than `drift` passes."""
    half = len(window) // 2
    a, b = window[:half] / _units(window), window[-half:] / _units(window)
    within = 0.5 * (a.var(0, ddof=1) + b.var(0, ddof=1))
    between = 0.5 * (a.mean(0) - b.mean(0)) ** 2
    r_hat = np.sqrt(np.where(within > 0, 1 - 1 / half + between / np.maximum(within, 1e-300), 1.0))
    still = np.abs(a.mean(0) - b.mean(0)) < drift
    return float(np.where(still, np.minimum(r_hat, 1.0), r_hat).max())


def _error(series: FloatArray) -> FloatArray:
    """Monte-Carlo standard error of the mean by batch means, (2 n,)."""
    batches = max(int(np.sqrt(len(series))), 2)
    size = len(series) // batches
    means = series[-batches * size :].reshape(batches, size, -1).mean(1)
    error: FloatArray = means.std(0, ddof=1) / np.sqrt(batches)
    return error


def _agree(mean: FloatArray, before: FloatArray, error_before: FloatArray) -> bool:
    units = _units(mean[None])
    tolerance = np.minimum(AGREE_WITHIN + 2 * error_before / units, AGREE_AT_MOST)
    return bool((np.abs(mean - before) / units < tolerance).all())
