"""Certified spectral norms against 50-digit arithmetic."""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import mpmath
import pytest
import torch
from torch import Tensor

from invformer.numerics import spectral_norm
from tests.gpu.emulation import cuda_rules
from tests.kernels.test_normaliser import ZOO
from tests.support.problems import matrix_with, trained_like


@pytest.fixture(params=[nullcontext, cuda_rules])
def either_device(request) -> Iterator[None]:
    """With eigenvalues, and with as many squarings as a GPU takes."""
    with request.param():
        yield


def true_norm(weight: Tensor) -> mpmath.mpf:
    """‖W‖₂ to 50 digits: the root of the largest eigenvalue of the smaller Gram matrix."""
    with mpmath.workdps(50):
        w = mpmath.matrix(weight.double().tolist())
        gram = w.T * w if w.rows >= w.cols else w * w.T
        return mpmath.sqrt(max(mpmath.eigsy(gram, eigvals_only=True)))


def small_matrices(number: int, largest: int) -> Iterator[Tensor]:
    """Where rounding matters: orthogonal, rank one, clustered, graded, far scales, cast."""
    for seed in range(number):
        generator = torch.Generator().manual_seed(seed)
        m, n = torch.randint(1, largest + 1, (2,), generator=generator).tolist()
        size = min(m, n)
        gaussian = torch.randn(m, n, generator=generator)
        match seed % 7:
            case 0:
                yield gaussian
            case 1:
                yield matrix_with(torch.ones(size), m, n, seed)
            case 2:
                yield torch.outer(gaussian[:, 0], gaussian[0])
            case 3:
                yield matrix_with(1 - 1e-9 * torch.rand(size, generator=generator), m, n, seed)
            case 4:
                yield matrix_with(10.0 ** -torch.arange(float(size)), m, n, seed)
            case 5:
                yield (1e150 if seed % 2 else 1e-150) * gaussian
            case 6:
                yield gaussian.to(torch.float32 if seed % 2 else torch.bfloat16)


@pytest.mark.usefixtures("either_device")
def test_the_certified_norm_is_never_below_the_true_one() -> None:
    """The certificate is close, too; each of its two halves alone is above."""
    for weight in small_matrices(70, largest=8):
        truth, size = true_norm(weight), min(weight.shape)
        assert (
            truth <= spectral_norm.spectral_norm_bound(weight).item() <= truth * (1 + 1e-12 * size)
        )
        g = spectral_norm.tall_side(weight.double())
        g, scale = spectral_norm._scaled(g, g.abs().amax())
        gram, unscaled = g.mT @ g, (truth / scale.item()) ** 2
        least = unscaled - spectral_norm._product_error(g).item()
        assert least <= spectral_norm._residual_bound(gram).item()
        for num_steps in (0, 1, 3, 8):
            bound = spectral_norm._gram_bound(gram, num_steps).item()
            assert least <= bound <= unscaled * (size**0.5 ** (num_steps + 1) + 1e-12)


SPECTRA = ZOO | {"normalised": lambda: matrix_with(1 - 1e-3 * torch.rand(96), 96, 384)}


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_excess_is_below_a_billionth_for_every_spectrum(spectrum: str) -> None:
    """Gram iteration alone is up to 1 % off where the leading singular values are close."""
    weight = SPECTRA[spectrum]()
    excess = spectral_norm.spectral_norm_bound(weight) / torch.linalg.matrix_norm(weight, 2) - 1
    assert -1e-14 < excess < 1e-9


def test_without_a_factorisation_gram_iteration_stands_alone(monkeypatch) -> None:
    def break_down(matrix: Tensor) -> torch.return_types.linalg_cholesky_ex:
        return torch.return_types.linalg_cholesky_ex((matrix * math.nan, torch.ones(())))

    monkeypatch.setattr(torch.linalg, "cholesky_ex", break_down)
    for spectrum, worst in (("trained", 2e-6), ("orthogonal", 1e-2), ("half rank", 1e-2)):
        weight = SPECTRA[spectrum]()
        excess = spectral_norm.spectral_norm_bound(weight) / torch.linalg.matrix_norm(weight, 2) - 1
        assert -1e-14 < excess < worst


def test_any_factor_whatever_gives_a_bound(monkeypatch) -> None:
    """RᵀR is semidefinite for every R: a wrong factorisation costs excess, never soundness."""
    exact = torch.linalg.cholesky_ex

    def distorted(matrix: Tensor) -> torch.return_types.linalg_cholesky_ex:
        factor, info = exact(matrix)
        noise = 1e-3 * torch.randn_like(factor)
        return torch.return_types.linalg_cholesky_ex((factor + noise, info))

    monkeypatch.setattr(torch.linalg, "cholesky_ex", distorted)
    for _ in range(20):
        gram = torch.cov(torch.randn(6, 9))
        truth = torch.linalg.matrix_norm(gram, 2)
        assert truth <= spectral_norm._residual_bound(gram) < 1.2 * truth


@pytest.mark.usefixtures("either_device")
def test_a_batch_gives_what_each_matrix_gives() -> None:
    weights = torch.stack([trained_like(12, 7, seed) for seed in range(6)]).unflatten(0, (2, 3))
    bounds = spectral_norm.spectral_norm_bound(weights)
    alone = torch.stack([spectral_norm.spectral_norm_bound(w) for w in weights.flatten(0, 1)])
    torch.testing.assert_close(bounds, alone.view(2, 3), rtol=1e-14, atol=0)


@pytest.mark.usefixtures("either_device")
def test_zero_is_certified_as_zero_and_the_unknown_as_infinite() -> None:
    weights = torch.zeros(4, 3, 2)
    weights[1, 0, 0] = math.nan
    weights[2, 2, 1] = -math.inf
    weights[3, 0, 0] = 5
    torch.testing.assert_close(
        spectral_norm.spectral_norm_bound(weights), torch.tensor([0, math.inf, math.inf, 5])
    )
    assert spectral_norm.spectral_norm_bound(weights)[0] == 0


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1e200, 1e307])
def test_neither_underflow_nor_overflow_makes_a_bound_too_small(scale: float) -> None:
    weight = scale * torch.tensor([[3.0, 0.0], [4.0, 0.0]])
    bound = spectral_norm.spectral_norm_bound(weight).item()
    assert mpmath.mpf(bound) >= true_norm(weight)
    assert bound <= 5 * scale * (1 + 1e-12) + 4e-308  # denormal entries may be flushed
