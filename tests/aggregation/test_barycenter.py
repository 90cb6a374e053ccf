"""Wasserstein barycenters: as POT's, from totals alone; and what those totals say of few silos."""

import numpy as np
import pytest
from barycenter_world import _CODEC, BarycenterSilo, Step, secure_barycenter
from scipy.optimize import least_squares
from sum_network import CONTEXT, carry, contribute, names

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.barycenter import (
    Bounds,
    Gaussian,
    diagonal_blocks,
    diagonal_contribution,
    diagonal_from_total,
    full_blocks,
    full_contribution,
    matrix_root,
    next_covariance,
    relative_change,
    trusted_barycenter,
    unpack_symmetric,
)
from secure_fvi.errors import AggregationError, InputError, ProtocolError

BOUNDS = Bounds(mean=3.0, variance=3.01, weight=10)


def random_gaussian(rng, d):
    """Eigenvalues between 0.2 and 3 in random directions."""
    directions, _ = np.linalg.qr(rng.normal(size=(d, d)))
    covariance = (directions * rng.uniform(0.2, 3, d)) @ directions.T
    return Gaussian(rng.uniform(-3, 3, d), (covariance + covariance.T) / 2)


class Session:
    """Silos with Gaussians and weights over a kind of sum."""

    def __init__(self, kind, d, count=4, seed=0, start=None, weights=(3, 1, 4, 2, 5), **options):
        rng = np.random.default_rng([d, seed])
        self.ids = sorted(names(count))
        self.gaussians = {s: random_gaussian(rng, d) for s in self.ids}
        self.weights = dict(zip(self.ids, weights, strict=False))
        self.start = np.eye(d) if start is None else start
        self.server, sums = kind.local_parties(self.ids)
        self.silos = {
            s: BarycenterSilo(sums[s], self.gaussians[s], self.start, BOUNDS, self.weights[s], **options)
            for s in self.ids
        }

    def run(self, lost=(), first=0, **options):
        return carry(secure_barycenter(self.server, self.ids, first, self.start, BOUNDS, **options), self.silos, lost)

    def reference(self, ids=None):
        ids = ids or self.ids
        weights = np.array([self.weights[s] for s in ids], float)
        return trusted_barycenter([self.gaussians[s] for s in ids], weights / weights.sum())


@pytest.mark.parametrize("kind", [Plain(), Masked()], ids=lambda k: k.kind)
@pytest.mark.parametrize("d", [5, 20, 50])
def test_secure_equals_pot(kind, d):
    session = Session(kind, d)
    result, reference = session.run(), session.reference()
    assert result.converged
    assert result.iterations <= 12
    assert relative_change(reference.covariance, result.gaussian.covariance) < 1e-6
    np.testing.assert_allclose(result.gaussian.mean, reference.mean, atol=1e-12)


def test_the_barycenter_solves_its_equation():
    session = Session(Plain(), 6)
    covariance = session.run(tolerance=1e-13).gaussian.covariance
    root = matrix_root(covariance)
    total = sum(session.weights[s] * matrix_root(root @ g.covariance @ root) for s, g in session.gaussians.items())
    np.testing.assert_allclose(total / sum(session.weights.values()), covariance, atol=1e-10)


def test_equal_gaussians_are_their_own_barycenter_in_one_iteration():
    rng = np.random.default_rng(0)
    own = random_gaussian(rng, 4)
    server, sums = Plain().local_parties(names(3))
    silos = {s: BarycenterSilo(sums[s], own, np.eye(4), BOUNDS) for s in names(3)}
    result = carry(secure_barycenter(server, names(3), 0, np.eye(4), BOUNDS), silos)
    np.testing.assert_allclose(result.gaussian.covariance, own.covariance, atol=1e-12)
    assert result.iterations == 2  # the second sees that nothing changes


@pytest.mark.parametrize("kind", [Plain(), Masked()], ids=lambda k: k.kind)
def test_diagonal_gaussians_need_one_sum(kind):
    ids, d, rng = names(4), 7, np.random.default_rng(3)
    means, sds = ({s: rng.uniform(0.2, 1.7, d) for s in ids} for _ in range(2))
    weights = dict(zip(ids, [3, 1, 4, 2], strict=True))
    table = diagonal_blocks(d, BOUNDS)
    server, silos = kind.local_parties(ids)
    carry(server.prepare(0), silos)
    values = {s: diagonal_contribution(means[s], sds[s], weights[s]) for s in ids}
    messages = contribute(silos, 0, table, values)
    total = carry(server.total(0, ids, table, messages, CONTEXT), silos)
    mean, sd = diagonal_from_total(table, total.values)
    share = np.array([weights[s] for s in ids]) / 10
    reference = trusted_barycenter([Gaussian(means[s], np.diag(sds[s] ** 2)) for s in ids], share)
    np.testing.assert_allclose(mean, reference.mean, atol=1e-12)
    np.testing.assert_allclose(np.diag(sd**2), reference.covariance, atol=1e-6)
    np.testing.assert_allclose(sd, sum(weights[s] * sds[s] for s in ids) / 10, atol=1e-12)


def test_a_silo_lost_on_the_way_is_left_out_from_then_on():
    session = Session(Masked(max_missing=1), 4, count=5)
    away = session.ids[1]
    # Exchanges: five of preparation, then three a sum (contributions, signatures, shares).
    result = session.run(lost=[(), (), (), (), (), (), (), (), (away,)])
    reference = session.reference([s for s in session.ids if s != away])
    assert relative_change(reference.covariance, result.gaussian.covariance) < 1e-6
    # Its mean was in the first sum, before it was lost.
    np.testing.assert_allclose(result.gaussian.mean, session.reference().mean, atol=1e-12)


class TestCaps:
    def test_iterations_are_capped_and_the_result_says_so(self):
        result = Session(Plain(), 5).run(max_iterations=2)
        assert (result.iterations, result.converged) == (2, False)
        assert result.change > 1e-8

    def test_silos_keep_to_their_own_cap(self):
        session = Session(Plain(), 5, max_iterations=3)
        with pytest.raises(AggregationError, match="no silo answered"):
            session.run(tolerance=0.0)
        step = Step(7, 3, session.ids, np.ones(16).tobytes())
        with pytest.raises(ProtocolError, match="past the iterations agreed on"):
            session.silos[session.ids[0]].handle(_CODEC.pack(step))

    def test_steps_out_of_turn_are_refused(self):
        session = Session(Plain(), 5)
        silo = session.silos[session.ids[0]]
        bad = [
            (Step(0, 1, session.ids, b""), "when 0 is due"),
            (Step(0, 0, session.ids, bytes(8)), "before the first"),
        ]
        for step, reason in bad:
            with pytest.raises(ProtocolError, match=reason):
                silo.handle(_CODEC.pack(step))
        silo.handle(_CODEC.pack(Step(0, 0, session.ids, b"")))
        size = full_blocks(np.eye(5), BOUNDS, first=True).size
        bad = [
            (Step(1, 0, session.ids, b""), "when 1 is due"),
            (Step(1, 1, session.ids, bytes(8)), "wrong length"),
            (Step(1, 1, session.ids, np.full(size, np.nan).tobytes()), "not finite"),
            (Step(1, 1, session.ids, np.zeros(size).tobytes()), "add up to nothing"),
            (Step(1, 1, session.ids, np.ones(size).tobytes()), "not positive"),
        ]
        for step, reason in bad:
            with pytest.raises(ProtocolError, match=reason):
                silo.handle(_CODEC.pack(step))

    def test_a_bad_start_or_silo_is_refused(self):
        for start in (np.zeros((3, 3)), np.ones((2, 3)), np.array([[1.0, 0.5], [0.0, 1.0]]), np.full((2, 2), np.nan)):
            with pytest.raises(InputError, match="start of a barycenter"):
                next(secure_barycenter(Plain().local_parties(["a"])[0], ["a"], 0, start, BOUNDS))
            own = Gaussian(np.zeros(start.shape[0]), np.ones(start.shape))
            with pytest.raises(InputError, match="start of a barycenter"):
                BarycenterSilo(Plain().local_parties(["a"])[1]["a"], own, start, BOUNDS)
        with pytest.raises(InputError, match="max_iterations must be at least 1"):
            next(secure_barycenter(Plain().local_parties(["a"])[0], ["a"], 0, np.eye(2), BOUNDS, max_iterations=0))
        with pytest.raises(InputError, match="another dimension"):
            BarycenterSilo(Plain().local_parties(["a"])[1]["a"], Gaussian(np.zeros(2), np.eye(2)), np.eye(3), BOUNDS)

    def test_a_covariance_past_its_bound_does_not_leave_the_silo(self):
        own = Gaussian(np.zeros(2), np.diag([1.0, 50.0]))
        silo = BarycenterSilo(Plain().local_parties(["a"])[1]["a"], own, np.eye(2), BOUNDS, weight=10)
        with pytest.raises(AggregationError, match="'root'"):
            silo.handle(_CODEC.pack(Step(0, 0, ["a"], b"")))


#: Which two covariances; with some others the attack needs more random starts than it has here.
SEED = 0


class TestTotalsOfFewSilos:
    """The server keeps every S and every total. Of two silos it can solve for both covariances.

    With M_j = (S^1/2 Sigma_j S^1/2)^1/2 at the first S, one total leaves M_1 free and fixes the rest; each later
    total is d (d+1) / 2 equations more.
    """

    D = 5

    def observed(self, covariances, iterations):
        """What the server sees: each S with the sum there, over silos of weight 1."""
        covariance, seen = np.eye(self.D), []
        for _ in range(iterations):
            table = full_blocks(covariance, BOUNDS, first=False)
            own = [Gaussian(np.zeros(self.D), c) for c in covariances]
            total = sum(full_contribution(g, 1, covariance, first=False) for g in own)
            seen.append((covariance, unpack_symmetric(table.split(total)["root"], self.D)))
            covariance = next_covariance(covariance, table, total)
        return seen

    def reconstruct(self, seen, silos, guesses, evaluations=100):
        """Covariances that fit by least squares from the guesses of all but the last M_j, and the best cost."""
        (first, total), *later = seen
        inverse, size = matrix_root(first, inverse=True), self.D * (self.D + 1) // 2
        roots = np.stack([matrix_root(s) for s, _ in later])[:, None]
        totals = np.stack([t for _, t in later])
        upper = np.triu_indices(self.D)

        def covariances(unknown):
            parts = [unpack_symmetric(unknown[j * size : (j + 1) * size], self.D) for j in range(silos - 1)]
            return [inverse @ m @ m @ inverse for m in [*parts, total - sum(parts)]]

        def residuals(unknown):
            values, vectors = np.linalg.eigh(roots @ np.stack(covariances(unknown)) @ roots)
            terms = (vectors * np.sqrt(np.maximum(values, 0))[..., None, :]) @ vectors.swapaxes(-1, -2)
            return (terms.sum(axis=1) - totals)[:, *upper].ravel()

        best = None
        for guess in guesses:
            start = np.concatenate([m[upper] for m in guess])
            fit = least_squares(residuals, start, xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=evaluations)
            if best is None or fit.cost < best.cost:
                best = fit
            if best.cost < 1e-20:
                break
        return covariances(best.x), best.cost

    def errors(self, found, covariances):
        """For each silo the relative error of the nearest reconstruction."""
        return [min(relative_change(c, f) for f in found) for c in covariances]

    def covariances(self, silos, seed):
        rng = np.random.default_rng([seed, 77])
        return [random_gaussian(rng, self.D).covariance for _ in range(silos)]

    def scatter(self, rng, around, size):
        """Symmetric matrices, `size` from those of `around`."""
        noise = [rng.normal(size=(self.D, self.D)) for _ in around]
        return [m + size / 2 * (n + n.T) for m, n in zip(around, noise, strict=True)]

    def test_six_totals_of_two_silos_give_both_covariances(self):
        own = self.covariances(2, SEED)
        seen = self.observed(own, 6)
        rng = np.random.default_rng(SEED)
        guesses = (self.scatter(rng, [seen[0][1] / 2], 0.3) for _ in range(6))
        found, cost = self.reconstruct(seen, 2, guesses)
        assert cost < 1e-20
        assert max(self.errors(found, own)) < 1e-6

    def test_control_one_total_of_two_silos_fits_other_covariances_as_well(self):
        own = self.covariances(2, SEED)
        total = self.observed(own, 1)[0][1]
        half = total / 2
        others = [half @ half, half @ half]
        np.testing.assert_allclose(self.observed(others, 1)[0][1], total, atol=1e-12)
        assert min(self.errors(others, own)) > 0.1

    def nearest_fit(self, own, seed):
        """By Gauss and Newton, least-norm steps, from close to the truth: covariances and the relative misfit."""
        seen, upper = self.observed(own, 6), np.triu_indices(self.D)
        roots, totals = np.stack([matrix_root(c) for c, _ in seen])[:, None], np.stack([t for _, t in seen])

        def covariances(unknown):
            halves = np.stack([unpack_symmetric(m, self.D) for m in unknown.reshape(len(own), -1)])
            return halves @ halves

        def residuals(unknown):
            values, vectors = np.linalg.eigh(roots @ covariances(unknown) @ roots)
            terms = (vectors * np.sqrt(np.maximum(values, 0))[..., None, :]) @ vectors.swapaxes(-1, -2)
            return (terms.sum(axis=1) - totals)[:, *upper].ravel()

        unknown = np.concatenate([matrix_root(c)[upper] for c in own])
        unknown += 0.1 * np.random.default_rng(seed).normal(size=unknown.size)
        for _ in range(8):
            columns = [(residuals(unknown + h) - residuals(unknown - h)) / 2e-6 for h in 1e-6 * np.eye(unknown.size)]
            unknown -= np.linalg.lstsq(np.stack(columns, axis=1), residuals(unknown), rcond=1e-13)[0]
        return covariances(unknown), np.linalg.norm(residuals(unknown)) / np.linalg.norm(totals)

    def test_control_six_totals_of_ten_silos_fit_other_covariances_as_well(self):
        # 150 unknowns and 90 equations: even from close to the truth the search ends elsewhere.
        own = self.covariances(10, 0)
        others, misfit = self.nearest_fit(own, seed=0)
        assert misfit < 1e-4
        assert min(self.errors(others, own)) > 0.05
