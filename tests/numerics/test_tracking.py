"""Following a local constant: always from below, and catching up with a fixed Jacobian."""

import pytest
import torch

from invformer.numerics.linear_map import LinearMap, dense_jacobian
from invformer.numerics.local_lipschitz import power_iteration_estimate
from invformer.numerics.norms import NORMS, vector_norm
from invformer.numerics.tracking import track


def matrix_map(matrix: torch.Tensor, tokens: int) -> LinearMap:
    shape = torch.Size((tokens, matrix.shape[0] // tokens))
    return LinearMap(
        jvp=lambda x: (x.flatten(-2) @ matrix.T).unflatten(-1, shape),
        vjp=lambda x: (x.flatten(-2) @ matrix).unflatten(-1, shape),
        shape=shape,
        dtype=matrix.dtype,
        device=matrix.device,
    )


def unit_vectors(shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(shape)
    return torch.stack([x / vector_norm(x, norm) for norm in NORMS])


def test_every_look_is_a_lower_bound_in_its_own_norm() -> None:
    jacobian = matrix_map(torch.randn(12, 12), tokens=4)
    vectors = unit_vectors((4, 3))
    limits = {
        norm: power_iteration_estimate(jacobian, norm, num_steps=200, num_restarts=4).value
        for norm in NORMS
    }
    for _ in range(20):
        look = track(jacobian, vectors, NORMS)
        for estimate in look.estimates:
            assert estimate.value <= limits[estimate.norm] * (1 + 1e-9)
        vectors = look.vectors


def test_looks_at_a_fixed_jacobian_converge_to_its_norm() -> None:
    u, _ = torch.linalg.qr(torch.randn(12, 12))
    matrix = u @ torch.diag(torch.tensor([3.0] + [1.0] * 11)) @ u.T
    jacobian = matrix_map(matrix, tokens=4)
    vectors = unit_vectors((4, 3))
    for _ in range(30):
        look = track(jacobian, vectors, NORMS)
        vectors = look.vectors
    frobenius = look.estimates[NORMS.index("frobenius")]
    assert frobenius.value.item() == pytest.approx(3, rel=1e-9)
    assert frobenius.residual.item() < 1e-6
    assert frobenius.converged


def test_a_moving_jacobian_is_followed() -> None:
    moving = torch.randn(12, 12)
    vectors = unit_vectors((4, 3))
    for _ in range(200):
        moving = moving + 2e-3 * torch.randn(12, 12)
        look = track(matrix_map(moving, tokens=4), vectors, NORMS)
        vectors = look.vectors
    true = torch.linalg.matrix_norm(moving, 2).item()
    assert look.estimates[NORMS.index("frobenius")].value.item() == pytest.approx(true, rel=0.02)


def test_the_residual_describes_the_vector_that_the_value_belongs_to() -> None:
    f = torch.nn.Linear(3, 3, bias=False)
    x = torch.randn(4, 3)
    jacobian = matrix_map(dense_jacobian(f, x).detach(), tokens=4)
    (estimate,) = track(jacobian, unit_vectors((4, 3))[1:2], ("frobenius",)).estimates
    image = jacobian.jvp(estimate.vector)
    assert estimate.value.item() == pytest.approx(image.norm().item())
    gap = jacobian.vjp(image) / estimate.value**2 - estimate.vector
    assert estimate.residual.item() == pytest.approx(gap.norm().item())
