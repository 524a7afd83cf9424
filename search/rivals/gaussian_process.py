"""Gaussian-process regression and the search for its upper confidence bound, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

Array = NDArray[np.float64]
NOISE = 1e-2
"""Variance of the noise on standardised values, as in Draft & Verify's and SWIFT's runs."""
_NUM_SCALES = 12
_NUM_RANDOM = 2000
_NUM_REFINED = 5


class GaussianProcess:
    """Matern-5/2 kernel with one length scale, values standardised; the scale maximises the marginal likelihood.

    Shapes: points (n, d), values (n,). Cost: 12 Cholesky factors of n x n.
    """

    def __init__(self, points: Array, values: Array) -> None:
        self._points = points
        self._mean, self._spread = float(values.mean()), float(values.std()) or 1.0
        standard = (values - self._mean) / self._spread
        distances, best = _distances(points, points), -np.inf
        for scale in np.geomspace(0.1, 10.0, _NUM_SCALES) * np.sqrt(points.shape[1]):
            kernel = _matern(distances, scale) + NOISE * np.eye(len(points))
            factor = cho_factor(kernel, lower=True)
            weights = cho_solve(factor, standard)
            likelihood = -0.5 * float(standard @ weights) - float(np.log(np.diag(factor[0])).sum())
            if likelihood > best:
                best, self._scale, self._weights, chosen = likelihood, float(scale), weights, factor
        self._precision = cho_solve(chosen, np.eye(len(points)))

    def predict(self, points: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of the noise-free value at points (m, d), in the values' unit."""
        kernel = _matern(_distances(points, self._points), self._scale)
        variance = 1.0 - np.einsum("ij,ij->i", kernel, kernel @ self._precision)
        return self._mean + self._spread * (kernel @ self._weights), self._spread * np.sqrt(np.maximum(variance, 1e-12))

    def bounds_and_gradients(self, points: Array, kappa: float) -> tuple[Array, Array]:
        """Standardised upper confidence bounds mean + kappa x deviation (m,) at points (m, d), and gradients (m, d)."""
        offsets = points[:, None] - self._points
        root = np.sqrt(5.0 * (offsets**2).sum(axis=-1)) / self._scale
        decay = (1.0 + root) * np.exp(-root)
        kernel = decay + root**2 / 3.0 * np.exp(-root)
        slope = (-5.0 / (3.0 * self._scale**2) * decay)[..., None] * offsets
        solved = kernel @ self._precision
        deviation = np.sqrt(np.maximum(1.0 - (kernel * solved).sum(axis=1), 1e-12))
        weights = self._weights - kappa * solved / deviation[:, None]
        return kernel @ self._weights + kappa * deviation, (weights[:, None] @ slope)[:, 0]


def upper_bound_points(process: GaussianProcess, dim: int, kappa: float, rng: np.random.Generator) -> Array:
    """Points of the unit cube (m, dim), highest upper confidence bound first: the five best of 2,000 random ones
    climbed to a local optimum, then all the random ones."""
    random = rng.random((_NUM_RANDOM, dim))
    mean, deviation = process.predict(random)
    random = random[np.argsort(-(mean + kappa * deviation), kind="stable")]

    def negative(flat: Array) -> tuple[float, Array]:
        bounds, gradients = process.bounds_and_gradients(flat.reshape(-1, dim), kappa)
        return -float(bounds.sum()), -gradients.reshape(-1)

    starts = random[:_NUM_REFINED].reshape(-1)  # all at once: the highest sum is where each is highest
    found = minimize(negative, starts, jac=True, bounds=[(0.0, 1.0)] * len(starts), method="L-BFGS-B")
    climbed = np.clip(found.x.reshape(-1, dim), 0.0, 1.0)
    bounds, _ = process.bounds_and_gradients(climbed, kappa)
    return np.vstack([climbed[np.argsort(-bounds, kind="stable")], random])


def _distances(left: Array, right: Array) -> Array:
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2.0 * left @ right.T
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


def _matern(distance: Array, scale: float) -> Array:
    root = np.sqrt(5.0) * distance / scale
    return np.asarray((1.0 + root + root**2 / 3.0) * np.exp(-root))
