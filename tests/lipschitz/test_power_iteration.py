"""Estimates are gains, so never above the norm; they find it, and follow it."""

from contextlib import nullcontext

import pytest
import torch

from invformer.branches.jacobian import Products
from invformer.lipschitz.power_iteration import PowerIteration, Step, operator_norm
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import NORMS, vector_norm
from invformer.numerics.precision import denormals_flushed


def from_matrix(matrix: torch.Tensor, tokens: int) -> LinearMap:
    """A matrix per sample, on vectors with any further dimensions after those of the samples."""
    shape = torch.Size((*matrix.shape[:-2], tokens, matrix.shape[-1] // tokens))

    def product(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        a = a.view(*a.shape[:-2], *[1] * (x.ndim - len(shape)), *a.shape[-2:])
        return (a @ x.flatten(-2).unsqueeze(-1)).view(x.shape)

    return LinearMap(
        jvp=lambda x: product(matrix, x),
        vjp=lambda x: product(matrix.mT, x),
        value=matrix.new_empty(shape),
    )


class Iteration:
    """The iteration for a norm on whole Jacobians, or on diagonal blocks alone."""

    def __init__(
        self, like: LinearMap, norm: str = "token_max", per_token: bool = False, at_once: int = 8
    ) -> None:
        at = {"dtype": like.value.dtype, "device": like.value.device}
        self.inner = PowerIteration(like.value.shape, norm, at_once=at_once, **at)
        self.per_token = per_token

    def step(self, jacobian: LinearMap) -> Step:
        def rows(chosen: torch.Tensor) -> Products:
            if self.inner.norm == "frobenius":
                return Products(jacobian.jvp, jacobian.vjp)
            here = (chosen[..., None] == torch.arange(jacobian.value.shape[-2])).to(jacobian.value)
            here = here.flatten(1, 2).unsqueeze(-1)

            def jvp(x: torch.Tensor) -> torch.Tensor:
                x = x * here if self.per_token else x
                return (jacobian.jvp(x.unsqueeze(1)).squeeze(1) * here).sum(-2)

            def vjp(y: torch.Tensor) -> torch.Tensor:
                x = jacobian.vjp((y.unsqueeze(-2) * here).unsqueeze(1)).squeeze(1)
                return (x * here).sum(-2, keepdim=True) if self.per_token else x

            return Products(jvp, vjp)

        return self.inner.step(rows)


def true_norm(matrix: torch.Tensor, norm: str) -> float:
    """Singular values; row sums of absolute values, with one channel a token in token_max too."""
    if norm == "frobenius":
        return torch.linalg.matrix_norm(matrix, 2).item()
    return matrix.abs().sum(-1).amax().item()


@pytest.mark.parametrize("norm", NORMS)
def test_the_norm_of_a_matrix_is_found_from_below(norm: str) -> None:
    for seed in range(5):
        matrix = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))
        jacobian = from_matrix(matrix, 6)
        found = [operator_norm(jacobian, norm, num_steps=300, seed=start) for start in range(9)]
        estimate = max(found, key=lambda one: one.value.item())
        true = true_norm(matrix, norm)
        assert estimate.value.item() <= true * (1 + 1e-12)
        assert estimate.value.item() == pytest.approx(true, rel=1e-4)
        gain = vector_norm(jacobian.jvp(estimate.vector), norm)
        assert gain.item() == pytest.approx(estimate.value.item(), rel=1e-9)
        assert vector_norm(estimate.vector, norm).item() == pytest.approx(1)


@pytest.mark.parametrize("norm", NORMS)
def test_no_sample_depends_on_its_batch_mates_and_nan_never_converges(norm: str) -> None:
    matrix = torch.randn(4, 40, 40, generator=torch.Generator().manual_seed(1))
    matrix[1], matrix[2] = torch.eye(40), torch.nan
    for num_steps, rtol in ((7, 0.0), (60, 0.02)):  # a sample that has converged stays as it is
        together = operator_norm(from_matrix(matrix, 8), norm, num_steps=num_steps, rtol=rtol)
        for i in (0, 1, 3):
            alone = operator_norm(from_matrix(matrix[i], 8), norm, num_steps=num_steps, rtol=rtol)
            torch.testing.assert_close(together.value[i], alone.value, rtol=1e-9, atol=0)
        assert not together.converged[2]


def test_close_singular_values_take_far_fewer_steps_than_plain_power_iteration() -> None:
    u, v = (torch.linalg.qr(torch.randn(60, 60))[0] for _ in range(2))
    sigma = torch.cat([torch.tensor([1.0, 0.999]), torch.linspace(0.99, 0.1, 58)])
    jacobian = from_matrix(u @ sigma.diag() @ v, 6)
    estimate = operator_norm(jacobian, "frobenius", num_steps=200, rtol=1e-5)
    assert estimate.converged
    assert estimate.value.item() == pytest.approx(1, rel=1e-8)


@pytest.mark.parametrize("size", [1, 2, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearly_dependent_vectors_lead_to_no_overestimate(dtype: torch.dtype, size: int) -> None:
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        left, _, right = torch.linalg.svd(torch.randn(size, size, generator=generator).double())
        matrix = (left * torch.linspace(1, 0.99, size).double() @ right).to(dtype)
        jacobian = from_matrix(matrix, 1)
        estimate = operator_norm(jacobian, "frobenius", num_steps=100, rtol=0, seed=seed)
        largest = torch.linalg.matrix_norm(matrix.double(), 2)
        assert 0.999 < estimate.value / largest < 1 + 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("norm", NORMS)
def test_a_moving_matrix_is_followed_from_below(norm: str) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(1, 1, 8, 8, generator=generator)
    followed = Iteration(from_matrix(matrix, 8), norm)
    for _ in range(200):
        matrix = matrix + 2e-3 * torch.randn(matrix.shape, generator=generator)
        gains, *_ = followed.step(from_matrix(matrix, 8))
        true = true_norm(matrix[0, 0], norm)
        assert gains.max().item() <= true * (1 + 1e-12)
    assert gains.max().item() == pytest.approx(true, rel=0.05 if norm == "entry_max" else 0.01)


def test_tokens_in_turn_find_what_following_the_largest_one_misses() -> None:
    """The last output token reads one input that no step from another token turns to."""
    matrix = torch.zeros(1, 1, 16, 16)
    matrix[..., :12, :12] = 0.5 * torch.eye(12)
    matrix[..., 12, :12:2] = 0.4
    jacobian = from_matrix(matrix, 8)
    for at_once in (3, 8):
        followed = Iteration(jacobian, at_once=at_once)
        for _ in range(40):
            gains, *_ = followed.step(jacobian)
        assert gains.max().item() == pytest.approx(6 * 0.4)


def test_a_map_that_acts_token_by_token_is_as_large_as_its_largest_token() -> None:
    blocks = torch.randn(11, 5, 5)
    jacobian = from_matrix(torch.block_diag(*blocks)[None, None], 11)
    followed = Iteration(jacobian, per_token=True)
    for _ in range(900):
        gains, residual = followed.step(jacobian)
    true = torch.linalg.matrix_norm(blocks, 2).amax().item()
    assert gains.max().item() == pytest.approx(true, rel=1e-6)
    assert residual().flatten()[gains.argmax()].abs().item() < 1e-6


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("far", [1e-17, 3e-19, 1e-21, 7e-23])
def test_tokens_whose_square_underflows_do_not_count_more(far: float, flushed: bool) -> None:
    mixing = 0.9 * torch.eye(8, dtype=torch.float32)
    mixing[0, 1:] = far
    jacobian = LinearMap(
        jvp=lambda x: mixing @ x,
        vjp=lambda x: mixing.T @ x,
        value=torch.empty(1, 1, 8, 256, dtype=torch.float32),
    )
    for norm in ("token_max", "frobenius"):
        followed = Iteration(jacobian, norm)
        with denormals_flushed() if flushed else nullcontext():
            for _ in range(20):
                gains, _ = followed.step(jacobian)
                assert gains.max().item() <= 0.9 * (1 + 1e-5)
        assert gains.max().item() == pytest.approx(0.9, rel=1e-5)


@pytest.mark.parametrize("per_token", [False, True])
def test_a_map_of_zero_is_not_overestimated_and_followed_when_it_wakes_up(per_token: bool) -> None:
    eye = torch.eye(64, dtype=torch.float32)[None, None]
    followed = Iteration(from_matrix(eye, 4), per_token=per_token)
    for size in (0.0, 1e-30, 1e-18):
        for _ in range(3):
            gains, *_ = followed.step(from_matrix(size * eye, 4))
            assert gains.max().item() <= size * (1 + 1e-5)
    gains, *_ = followed.step(from_matrix(eye, 4))
    assert gains.max().item() == pytest.approx(1)
