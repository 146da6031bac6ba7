"""The smooth map into a ball, its Jacobian, and the fast form that training uses."""

import pytest
import torch

from invformer.numerics.ball import into_ball, to_ball
from tests.gpu.emulation import cuda_rules


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_tokens_land_inside_the_ball_in_their_own_direction(scale: float) -> None:
    x = scale * torch.randn(5, 7)
    mapped = into_ball(x, 3.0)
    length = mapped.norm(dim=-1)
    assert (length < 3.0).all()
    assert (length <= x.norm(dim=-1)).all()
    torch.testing.assert_close(mapped / length[:, None], x / x.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_its_jacobian_is_that_of_the_unit_ball_at_the_scaled_point(scale: float) -> None:
    x, direction = scale * torch.randn(1, 7), torch.randn(7)
    dense = torch.func.jacrev(lambda z: into_ball(z, 3.0))(x)[0, :, 0]
    point = to_ball(x / 3.0)
    torch.testing.assert_close(point.derivative(direction)[0], dense @ direction)
    torch.testing.assert_close(dense, dense.T)
    norm = torch.linalg.matrix_norm(dense, 2).item()
    assert norm <= 1
    assert norm == pytest.approx(point.rho.item())


def test_gradients_are_those_of_differences_and_without_them_numbers_are_the_same() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: into_ball(z, 2.0), x)
    assert torch.autograd.gradgradcheck(lambda z: into_ball(z, 2.0), x)
    with torch.no_grad():
        plain = into_ball(x, 2.0)
    assert torch.equal(plain, into_ball(x, 2.0))


@pytest.mark.parametrize("input_format", [torch.float32, torch.bfloat16])
def test_gradients_pass_under_autocast_as_an_accelerator_does_it(input_format: torch.dtype) -> None:
    """There roots are float32 whatever the stream is, and a gradient comes in another format."""
    x = torch.randn(3, 4, dtype=input_format, requires_grad=True)
    weight = torch.randn(4, 4, dtype=torch.float32)
    with cuda_rules(), torch.autocast("cpu", torch.bfloat16):
        output = (into_ball(x, 2.0) @ weight).sum()
    output.backward()
    exact = x.detach().double().requires_grad_()
    (into_ball(exact, 2.0) @ weight.double()).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == input_format
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=0.02, atol=0.05)
