"""Estimators from below: against singular values and row norms of dense Jacobians."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from invformer.lipschitz.power_iteration import (
    LipschitzEstimate,
    estimate_in_chunks,
    lanczos_estimate,
    power_iteration_estimate,
    singular_values,
    smallest_singular_value,
)
from invformer.numerics.linear_map import LinearMap, dense_jacobian, plus_identity
from invformer.numerics.norms import NORMS, Norm, vector_norm
from tests.kernels.attention_cases import MASKS, attention_case


def from_matrix(matrix: Tensor, num_tokens: int) -> LinearMap:
    """A dense (*batch, ND, ND) matrix as a map of sequences."""
    shape = torch.Size((*matrix.shape[:-2], num_tokens, matrix.shape[-1] // num_tokens))

    def product(m: Tensor, v: Tensor) -> Tensor:
        return (m @ v.flatten(-2).unsqueeze(-1)).squeeze(-1).unflatten(-1, shape[-2:])

    return LinearMap(
        lambda v: product(matrix, v),
        lambda g: product(matrix.mT, g),
        shape,
        matrix.dtype,
        matrix.device,
    )


def with_singular_values(sigma: Tensor, num_tokens: int = 4) -> LinearMap:
    """U diag(σ) Vᵀ with random orthogonal U and V."""
    u, v = (torch.linalg.qr(torch.randn(len(sigma), len(sigma))).Q for _ in range(2))
    return from_matrix(u * sigma @ v.mT, num_tokens)


def counting(jacobian: LinearMap) -> tuple[LinearMap, list[int]]:
    """The same map, and a counter of its products."""
    count = [0]

    def counted(product):
        def call(v: Tensor) -> Tensor:
            count[0] += 1
            return product(v)

        return call

    return replace(jacobian, jvp=counted(jacobian.jvp), vjp=counted(jacobian.vjp)), count


def gain(jacobian: LinearMap, estimate: LipschitzEstimate) -> Tensor:
    image = vector_norm(jacobian.jvp(estimate.vector), estimate.norm)
    return image / vector_norm(estimate.vector, estimate.norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("num_steps", [0, 1, 7])
def test_the_value_is_the_gain_of_the_vector_returned(norm: Norm, num_steps: int) -> None:
    jacobian = from_matrix(torch.randn(3, 12, 12), 4)
    estimate = power_iteration_estimate(jacobian, norm, num_steps=num_steps, num_restarts=2)
    torch.testing.assert_close(gain(jacobian, estimate), estimate.value, rtol=1e-13, atol=0)
    torch.testing.assert_close(vector_norm(estimate.vector, norm), torch.ones(3))


def test_power_iteration_finds_the_largest_singular_value_and_its_vector() -> None:
    jacobian = with_singular_values(torch.linspace(1, 0.1, 12))
    estimate = power_iteration_estimate(
        jacobian, "frobenius", num_steps=400, rtol=1e-8, check_every=5
    )
    torch.testing.assert_close(estimate.value, torch.tensor(1.0), rtol=1e-12, atol=0)
    assert estimate.converged
    assert estimate.residual <= 1e-8
    assert 5 <= estimate.num_steps < 400


def test_the_frobenius_residual_is_that_of_the_vector_returned() -> None:
    jacobian = with_singular_values(torch.linspace(1, 0.1, 12))
    estimate = power_iteration_estimate(jacobian, "frobenius", num_steps=3)
    back = jacobian.vjp(jacobian.jvp(estimate.vector)) / estimate.value**2
    expected = torch.linalg.vector_norm(back - estimate.vector)
    torch.testing.assert_close(estimate.residual, expected)
    assert not estimate.converged


@pytest.mark.parametrize("norm", NORMS)
def test_more_steps_never_lower_the_value(norm: Norm) -> None:
    jacobian = from_matrix(torch.randn(5, 12, 12), 4)
    values = [power_iteration_estimate(jacobian, norm, num_steps=k).value for k in range(8)]
    for before, after in pairwise(values):
        assert (after >= before * (1 - 1e-14)).all()


def test_entry_max_never_exceeds_the_largest_row_sum_and_restarts_reach_it() -> None:
    matrix = torch.randn(20, 12, 12)
    exact = matrix.abs().sum(-1).amax(-1)
    estimate = power_iteration_estimate(
        from_matrix(matrix, 4), "entry_max", num_steps=6, num_restarts=12
    )
    assert (estimate.value <= exact * (1 + 1e-14)).all()
    assert (estimate.value >= 0.75 * exact).all()
    assert (estimate.value >= exact * (1 - 1e-14)).sum() >= 12


def test_token_max_of_a_single_token_is_the_spectral_norm() -> None:
    matrix = torch.randn(6, 12, 12)
    estimate = power_iteration_estimate(
        from_matrix(matrix, 1), "token_max", num_steps=500, rtol=1e-6
    )
    exact = torch.linalg.matrix_norm(matrix, 2)
    assert (estimate.value <= exact * (1 + 1e-14)).all()
    torch.testing.assert_close(estimate.value, exact, rtol=1e-3, atol=0)


def test_token_max_of_one_channel_is_the_largest_row_sum() -> None:
    """With D = 1 the three norms of a token coincide: token_max is the induced ∞-norm."""
    matrix = torch.rand(6, 8, 8)
    exact = matrix.sum(-1).amax(-1)
    estimate = power_iteration_estimate(
        from_matrix(matrix, 8), "token_max", num_steps=4, num_restarts=8
    )
    torch.testing.assert_close(estimate.value, exact)
    assert (estimate.residual <= 1e-12).all()


def test_token_max_lies_between_its_rows_spectral_norms_and_their_sums() -> None:
    case = attention_case(3, num_tokens=6, d_model=4)
    dense = dense_jacobian(case.f, case.x).reshape(6, 4, 6, 4)
    blocks = torch.linalg.matrix_norm(dense.transpose(1, 2), 2)
    estimate = power_iteration_estimate(
        case.jacobian(), "token_max", num_steps=60, num_restarts=6, rtol=1e-9
    )
    assert blocks.amax() * (1 - 1e-12) <= estimate.value <= blocks.sum(-1).amax()


def test_restarts_only_help() -> None:
    matrix = torch.randn(40, 16, 16)
    alone = power_iteration_estimate(from_matrix(matrix, 8), "token_max", num_steps=10)
    several = power_iteration_estimate(
        from_matrix(matrix, 8), "token_max", num_steps=10, num_restarts=4
    )
    assert (several.value >= alone.value).all()
    assert (several.value > alone.value * 1.01).any()


@pytest.mark.parametrize("norm", NORMS)
def test_one_warm_started_step_at_a_time_gets_where_many_steps_get(norm: Norm) -> None:
    jacobian = attention_case(0).jacobian()
    estimate = power_iteration_estimate(jacobian, norm, num_steps=0)
    for _ in range(12):
        estimate = power_iteration_estimate(jacobian, norm, start=estimate.vector, rtol=0.0)
    at_once = power_iteration_estimate(jacobian, norm, num_steps=12, rtol=0.0)
    torch.testing.assert_close(estimate.value, at_once.value)


def test_unusable_starts_are_replaced_sample_by_sample() -> None:
    matrix = torch.randn(12, 12).expand(3, 12, 12)
    start = torch.randn(3, 4, 3)
    start[0], start[1, 0, 0] = 0, torch.nan
    jacobian = from_matrix(matrix, 4)
    estimate = power_iteration_estimate(jacobian, "frobenius", start=start, num_steps=300)
    torch.testing.assert_close(
        estimate.value, torch.linalg.matrix_norm(matrix, 2), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("scale", "clustered"), [(0.3, False), (2.0, False), (1.0, True)])
def test_lanczos_meets_the_dense_constant_with_a_fifth_of_power_iterations_products(
    mask: str, scale: float, clustered: bool
) -> None:
    """At equal residuals the ratio is about √(2/gap): where the gap is wide, only half is saved."""
    case = attention_case(1, num_tokens=20, scale=scale, clustered=clustered, mask=mask)
    sigma = torch.linalg.svdvals(dense_jacobian(case.f, case.x))
    lanczos, lanczos_products = counting(case.jacobian())
    estimate = lanczos_estimate(lanczos, rtol=1e-6)
    torch.testing.assert_close(estimate.value, sigma[0], rtol=1e-6, atol=0)
    assert estimate.value <= sigma[0] * (1 + 1e-13)
    assert estimate.converged
    power, power_products = counting(case.jacobian())
    slow = power_iteration_estimate(power, "frobenius", num_steps=3000, rtol=1e-6, check_every=1)
    assert slow.converged
    factor = 5 if 1 - sigma[1] / sigma[0] < 0.06 else 2
    assert factor * lanczos_products[0] <= power_products[0]


def test_lanczos_converges_on_a_cluster_where_power_iteration_needs_thousands() -> None:
    sigma = torch.cat([1 - 1e-4 * torch.arange(6), torch.linspace(0.9, 0.01, 74)])
    jacobian, products = counting(with_singular_values(sigma, 8))
    estimate = lanczos_estimate(jacobian)
    assert estimate.converged
    assert products[0] < 140
    torch.testing.assert_close(estimate.value, torch.tensor(1.0), rtol=1e-6, atol=0)
    power = power_iteration_estimate(jacobian, "frobenius", num_steps=2000, rtol=1e-5)
    assert not power.converged
    assert power.value < 1 - 1e-6


def test_several_leading_singular_values_come_with_their_vectors_and_residuals() -> None:
    sigma = torch.linspace(2, 0.1, 48).square()
    jacobian = with_singular_values(sigma)
    found = singular_values(jacobian, 5, rtol=1e-7)
    torch.testing.assert_close(found.values, sigma[:5], rtol=1e-9, atol=0)
    assert found.converged
    rows = found.vectors.flatten(-2)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(5), rtol=0, atol=1e-10)
    for vector, value in zip(found.vectors, found.values, strict=True):
        torch.testing.assert_close(vector_norm(jacobian.jvp(vector), "frobenius"), value)


@pytest.mark.parametrize("mask", MASKS)
def test_the_smallest_singular_value_of_a_residual_map_gives_its_inverses_constant(
    mask: str,
) -> None:
    case = attention_case(2, num_tokens=10, scale=1.5, mask=mask)
    case = replace(case, g=0.3 * case.g)
    dense = torch.eye(160) + dense_jacobian(case.f, case.x)
    found = smallest_singular_value(plus_identity(case.jacobian()))
    exact = torch.linalg.svdvals(dense)[-1:]
    assert found.converged
    assert (found.values >= exact * (1 - 1e-12)).all()
    torch.testing.assert_close(found.values, exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        1 / found.values, torch.linalg.matrix_norm(dense.inverse(), 2)[None], rtol=1e-6, atol=0
    )


def test_an_exhausted_krylov_space_goes_on_to_repeated_singular_values() -> None:
    sigma = torch.tensor([2.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.0, 0.0])
    found = singular_values(with_singular_values(sigma, 2), 8, max_steps=8)
    torch.testing.assert_close(found.values, sigma, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 1e-150, 1e100])
def test_a_multiple_of_the_identity_has_its_factor_for_every_singular_value(factor: float) -> None:
    found = singular_values(from_matrix(factor * torch.eye(12), 4), 3)
    torch.testing.assert_close(found.values / factor, torch.ones(3))
    assert found.converged
    estimate = lanczos_estimate(from_matrix(factor * torch.eye(12), 4))
    assert estimate.num_steps <= 2


def test_lanczos_starts_warm() -> None:
    jacobian = with_singular_values(torch.linspace(1, 0.5, 60), 6)
    cold = lanczos_estimate(jacobian)
    warm = lanczos_estimate(jacobian, start=cold.vector)
    assert warm.converged
    assert warm.num_steps < cold.num_steps / 2


ESTIMATORS = {
    **{
        norm: lambda jacobian, norm=norm: power_iteration_estimate(
            jacobian, norm, num_steps=6, num_restarts=1
        )
        for norm in NORMS
    },
    "lanczos": lanczos_estimate,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_sample_depends_on_its_batch_mates(name: str) -> None:
    """Not even on how long they take: one of these converges at once, another not at all."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(4, 40, 40, generator=generator)
    matrix[1] = torch.eye(40)
    matrix[2] = torch.nan
    together = ESTIMATORS[name](from_matrix(matrix, 8))
    for i in (0, 1, 3):
        alone = ESTIMATORS[name](from_matrix(matrix[i], 8))
        torch.testing.assert_close(together.value[i], alone.value, rtol=1e-12, atol=0)
        torch.testing.assert_close(together.vector[i], alone.vector, rtol=1e-7, atol=1e-9)
    assert together.value[2].isnan()
    assert not together.converged[2]
    assert together.converged[1]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_zero_map_has_constant_zero(name: str) -> None:
    estimate = ESTIMATORS[name](from_matrix(torch.zeros(2, 12, 12), 4))
    assert (estimate.value == 0).all()
    assert estimate.converged.all()
    assert estimate.vector.isfinite().all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_single_precision_agrees_with_double_to_its_rounding(name: str) -> None:
    case = attention_case(4, num_tokens=12)
    exact = ESTIMATORS[name](case.jacobian())
    single = replace(case, x=case.x.float(), w_q=case.w_q.float(), g=case.g.float())
    rounded = ESTIMATORS[name](replace(single, bias=case.bias.float()).jacobian())
    assert rounded.value.dtype == rounded.vector.dtype == torch.float32
    torch.testing.assert_close(rounded.value.double(), exact.value, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimates_leave_the_global_random_numbers_alone_and_repeat(name: str) -> None:
    jacobian = from_matrix(torch.randn(2, 12, 12), 4)
    state = torch.random.get_rng_state()
    first, second = ESTIMATORS[name](jacobian), ESTIMATORS[name](jacobian)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.vector, second.vector)


def test_another_generator_starts_elsewhere() -> None:
    jacobian = from_matrix(torch.randn(12, 12), 4)
    values = {
        float(
            power_iteration_estimate(
                jacobian,
                "frobenius",
                num_steps=0,
                generator=torch.Generator().manual_seed(seed),
            ).value
        )
        for seed in range(3)
    }
    assert len(values) == 3


@pytest.mark.parametrize("chunk_size", [1, 3, 10])
def test_chunks_change_the_memory_not_the_answer(chunk_size: int) -> None:
    matrix = torch.randn(7, 12, 12)

    def estimate(index: Tensor) -> LipschitzEstimate:
        return lanczos_estimate(from_matrix(matrix[index[:, 0, 0].long()], 4))

    index = torch.arange(7.0).view(7, 1, 1)
    whole, chunked = estimate(index), estimate_in_chunks(estimate, index, chunk_size)
    torch.testing.assert_close(chunked.value, whole.value, rtol=1e-13, atol=0)
    assert chunked.num_steps == whole.num_steps
    assert chunked.vector.shape == whole.vector.shape


def test_misuse_is_refused_in_one_line() -> None:
    jacobian = from_matrix(torch.eye(12), 4)
    with pytest.raises(ValueError, match="num_steps must not be negative, got -1"):
        power_iteration_estimate(jacobian, "frobenius", num_steps=-1)
    with pytest.raises(ValueError, match=r"start has shape \(3, 4\), the map acts on \(4, 3\)"):
        power_iteration_estimate(jacobian, "frobenius", start=torch.ones(3, 4))
    with pytest.raises(ValueError, match="13 singular values asked for: choose 1 to 12"):
        singular_values(jacobian, 13)
    with pytest.raises(ValueError, match="chunk_size must be positive, got 0"):
        estimate_in_chunks(lambda x: lanczos_estimate(jacobian), torch.ones(2, 4, 3), 0)
