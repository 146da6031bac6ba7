"""Following a local constant: always from below, and catching up with a fixed Jacobian."""

from contextlib import nullcontext

import pytest
import torch

from invformer.lipschitz.power_iteration import power_iteration_estimate
from invformer.lipschitz.tracking import Tracker
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import vector_norm
from invformer.numerics.precision import denormals_flushed

NORMS = ("token_max", "frobenius")


def matrix_map(matrix: torch.Tensor, tokens: int) -> LinearMap:
    shape = torch.Size((tokens, matrix.shape[0] // tokens))
    return LinearMap(
        jvp=lambda x: (x.flatten(-2) @ matrix.T).unflatten(-1, shape),
        vjp=lambda x: (x.flatten(-2) @ matrix).unflatten(-1, shape),
        shape=shape,
        dtype=matrix.dtype,
        device=matrix.device,
    )


def block_map(blocks: torch.Tensor) -> LinearMap:
    return LinearMap(
        jvp=lambda x: torch.einsum("tij,tj->ti", blocks, x),
        vjp=lambda x: torch.einsum("tij,ti->tj", blocks, x),
        shape=blocks.shape[:2],
        dtype=blocks.dtype,
        device=blocks.device,
    )


def limits(jacobian: LinearMap) -> dict[str, float]:
    return {
        norm: power_iteration_estimate(
            jacobian, norm, num_steps=100, num_restarts=4, rtol=0
        ).value.item()
        for norm in NORMS
    }


def test_every_look_is_a_lower_bound_in_its_own_norm() -> None:
    jacobian = matrix_map(torch.randn(12, 12), tokens=4)
    most = limits(jacobian)
    tracker = Tracker(NORMS)
    for _ in range(30):
        for estimate in tracker.look(jacobian):
            assert estimate.value.item() <= most[estimate.norm] * (1 + 1e-9)


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("far", [1e-17, 1e-18, 3e-19, 1e-21, 3e-22, 7e-23])
def test_tokens_whose_squared_weight_underflows_do_not_count_more_than_they_may(
    far: float, flushed: bool
) -> None:
    mixing = 0.9 * torch.eye(8, dtype=torch.float32)
    mixing[0, 1:] = far
    jacobian = LinearMap(
        jvp=lambda x: mixing @ x,
        vjp=lambda x: mixing.T @ x,
        shape=torch.Size((8, 256)),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tracker = Tracker(NORMS, scouts=4)
    with denormals_flushed() if flushed else nullcontext():
        for _ in range(20):
            for estimate in tracker.look(jacobian):
                assert estimate.value.item() <= 0.9 * (1 + 1e-5)
                assert vector_norm(estimate.vector, estimate.norm).item() <= 1 + 1e-5
    assert estimate.value.item() == pytest.approx(0.9, rel=1e-5)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("size", [1e-18, 1e-22, 1e-30])
def test_a_map_of_the_smallest_numbers_is_not_overestimated(size: float, per_token: bool) -> None:
    blocks = size * torch.eye(64, dtype=torch.float32).expand(4, -1, -1)
    jacobian = block_map(blocks) if per_token else matrix_map(torch.block_diag(*blocks), tokens=4)
    tracker = Tracker(NORMS)
    for _ in range(5):
        for estimate in tracker.look(jacobian, per_token):
            assert estimate.value.item() <= size * (1 + 1e-5)


def test_looks_at_a_fixed_jacobian_converge_to_its_norm() -> None:
    u, _ = torch.linalg.qr(torch.randn(12, 12))
    jacobian = matrix_map(u @ torch.diag(torch.tensor([3.0] + [1.0] * 11)) @ u.T, tokens=4)
    most = limits(jacobian)
    tracker = Tracker(NORMS)
    for _ in range(60):
        estimates = tracker.look(jacobian)
    for estimate in estimates:
        assert estimate.value.item() == pytest.approx(most[estimate.norm], rel=1e-6)
        assert estimate.residual.item() < 1e-6
        assert estimate.converged


def test_scouts_find_the_token_that_following_the_largest_one_misses() -> None:
    """The last output token reads one input that no step from another token turns to."""
    matrix = torch.zeros(16, 16)
    matrix[:12, :12] = 0.5 * torch.eye(12)
    matrix[12, :12:2] = 0.4
    jacobian = matrix_map(matrix, tokens=8)
    found = {}
    for scouts in (0, 2):
        tracker = Tracker(("token_max",), scouts=scouts)
        for _ in range(40):
            (estimate,) = tracker.look(jacobian)
        found[scouts] = estimate.value.item()
    assert found[2] == pytest.approx(6 * 0.4)
    assert found[2] > 2 * found[0]


def test_a_moving_jacobian_is_followed() -> None:
    moving = torch.randn(12, 12)
    tracker = Tracker(NORMS)
    for _ in range(200):
        moving = moving + 2e-3 * torch.randn(12, 12)
        jacobian = matrix_map(moving, tokens=4)
        estimates = tracker.look(jacobian)
    most = limits(jacobian)
    for estimate in estimates:
        assert estimate.value.item() == pytest.approx(most[estimate.norm], rel=0.02)


def test_the_value_is_the_gain_of_the_vector_beside_it() -> None:
    jacobian = matrix_map(torch.randn(12, 12), tokens=4)
    tracker = Tracker(NORMS)
    tracker.look(jacobian)
    whole = tracker.whole
    token_max, frobenius = tracker.look(jacobian)
    assert token_max.vector.norm(dim=-1).amax().item() == pytest.approx(1)
    image = jacobian.jvp(token_max.vector)
    assert token_max.value.item() == pytest.approx(image.norm(dim=-1).amax().item())
    assert frobenius.vector.norm().item() == pytest.approx(1)
    assert frobenius.value.item() == pytest.approx(jacobian.jvp(frobenius.vector).norm().item())
    gap = jacobian.jvp(jacobian.vjp(whole)) / frobenius.value**2 - whole
    assert frobenius.residual.item() == pytest.approx(gap.norm().item())


def test_a_map_that_acts_token_by_token_is_as_large_as_its_largest_token_in_both_norms() -> None:
    blocks = torch.randn(7, 5, 5)
    jacobian = block_map(blocks)
    tracker = Tracker(NORMS)
    for _ in range(300):
        estimates = tracker.look(jacobian, per_token=True)
    true = torch.linalg.matrix_norm(blocks, 2).amax().item()
    for estimate, length in zip(estimates, (1, 1), strict=True):
        assert estimate.value.item() == pytest.approx(true, rel=1e-6)
        image = jacobian.jvp(estimate.vector)
        if estimate.norm == "frobenius":
            assert estimate.vector.norm().item() == pytest.approx(length)
            assert image.norm().item() == pytest.approx(true, rel=1e-6)
        else:
            assert image.norm(dim=-1).amax().item() == pytest.approx(true, rel=1e-6)
        assert estimate.converged


def test_a_map_that_is_zero_has_a_constant_of_zero_and_is_followed_when_it_wakes_up() -> None:
    tracker, blocks = Tracker(NORMS), Tracker(NORMS)
    for _ in range(3):
        estimates = tracker.look(matrix_map(torch.zeros(8, 8), tokens=4))
        estimates += blocks.look(block_map(torch.zeros(4, 2, 2)), per_token=True)
    assert all(e.value.item() == 0 and e.residual.item() == 0 for e in estimates)
    jacobian = matrix_map(torch.eye(8), tokens=4)
    assert tracker.look(jacobian)[1].value.item() == pytest.approx(1)


def test_a_saved_tracker_continues_bit_for_bit() -> None:
    jacobian = matrix_map(torch.randn(12, 12), tokens=4)
    one, other = Tracker(NORMS), Tracker(NORMS)
    for _ in range(3):
        one.look(jacobian)
    other.load_state_dict(one.state_dict(), torch.device("cpu"))
    for _ in range(3):
        first, second = one.look(jacobian), other.look(jacobian)
        assert all(torch.equal(a.value, b.value) for a, b in zip(first, second, strict=True))


def test_other_norms_are_refused() -> None:
    with pytest.raises(ValueError, match="only token_max and frobenius"):
        Tracker(("entry_max",))
