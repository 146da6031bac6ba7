"""The inversion engine: every answer within its bound, no failure called success."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from invformer.numerics.error_bound import (
    ErrorStep,
    causal_error_bound,
    contraction_error_bound,
    residual_step,
    scale_step,
    stack_error_bound,
)
from invformer.numerics.fixed_point import (
    PICARD_STEPS,
    FixedPointError,
    FixedPointSolution,
    InversionStatus,
    Method,
    invert_residual,
    predicted_steps,
)
from invformer.numerics.norms import NORMS, Norm, vector_norm
from invformer.numerics.precision import rounding_factor, unit_roundoff
from tests.numerics.contractions import (
    CausalL2,
    linear_map,
    orthogonal,
    planted_inverse,
    slow_map,
    two_layers,
)

METHODS: tuple[Method, ...] = ("picard", "anderson", "auto")
CONSTANTS = (0.3, 0.5, 0.7, 0.9, 0.95, 0.99)


def true_error(solution: FixedPointSolution, x: Tensor) -> Tensor:
    return vector_norm(solution.value.double() - x.double(), solution.norm)


def all_converged(solution: FixedPointSolution) -> bool:
    return bool(solution.converged.all())


# --- right answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS[:2])
@pytest.mark.parametrize("c", [0.3, 0.9, 0.99])
def test_a_planted_linear_inverse_is_found_to_the_tolerance(method: Method, c: float) -> None:
    matrix = c * orthogonal(8, 12, 12) * (1 - 1e-12)
    y = torch.randn(8, 3, 4)
    solution = invert_residual(
        linear_map(matrix), y, lipschitz_bound=c, norm="frobenius", method=method, atol=1e-9, rtol=0
    )
    x = planted_inverse(matrix, y)
    assert all_converged(solution)
    assert (true_error(solution, x) <= 1e-9).all()
    assert (true_error(solution, x) <= solution.error_bound).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_inverts_in_every_norm(method: Method, norm: Norm) -> None:
    f = two_layers(16, 6, 5, 0.9, norm)
    x = torch.randn(16, 6, 5)
    solution = invert_residual(f, x + f(x), lipschitz_bound=0.9, norm=norm, method=method)
    assert all_converged(solution)
    assert (true_error(solution, x) <= solution.error_bound).all()
    assert (solution.error_bound <= 1.1e-10 * vector_norm(x, norm) + 1e-12).all()


def test_leading_dimensions_are_all_batch() -> None:
    f = two_layers(6, 4, 3, 0.7, "token_max")
    x = torch.randn(6, 4, 3)
    flat = invert_residual(f, x + f(x), lipschitz_bound=0.7, norm="token_max")
    grid = invert_residual(
        lambda z: f(z.flatten(0, 1)).view(2, 3, 4, 3),
        (x + f(x)).view(2, 3, 4, 3),
        lipschitz_bound=0.7,
        norm="token_max",
    )
    assert grid.value.shape == (2, 3, 4, 3)
    assert grid.status.shape == grid.error_bound.shape == grid.num_steps.shape == (2, 3)
    assert torch.equal(grid.value.flatten(0, 1), flat.value)
    single = invert_residual(
        lambda z: 0.5 * z.tanh(), torch.ones(2, 3), lipschitz_bound=0.5, norm="entry_max"
    )
    assert single.status.shape == ()


def test_a_solved_start_takes_no_steps() -> None:
    f = two_layers(4, 4, 3, 0.7, "token_max")
    x = torch.randn(4, 4, 3)
    solution = invert_residual(f, x + f(x), lipschitz_bound=0.7, norm="token_max", initial=x)
    assert all_converged(solution)
    assert (solution.num_steps == 0).all()
    assert torch.equal(solution.value, x)


# --- the bound ----------------------------------------------------------------------------------


def stack_violations(
    c: float,
    norm: Norm,
    dtype: torch.dtype,
    samples: int,
    method: Method,
    max_steps: int | None,
    spread: float = 0.5,
) -> tuple[int, int]:
    """Through three residual layers and two scales and back; (violations, finite bounds)."""
    layers = [two_layers(samples, 4, 6, c, norm, dtype) for _ in range(3)]
    log_scale = (spread * torch.randn(2, 6)).to(dtype)
    shift = torch.randn(2, 6).to(dtype)
    x = torch.randn(samples, 4, 6).to(dtype)
    z = x
    for i, f in enumerate(layers):
        z = z + f(z)
        if i < 2:
            z = z * log_scale[i].exp() + shift[i]
    steps: list[ErrorStep] = []
    for i in (2, 1, 0):
        if i < 2:
            steps.append(scale_step(z, log_scale[i], shift[i], norm))
            z = (z - shift[i]) * (-log_scale[i]).exp()
        solution = invert_residual(
            layers[i],
            z,
            lipschitz_bound=c,
            norm=norm,
            method=method,
            max_steps=max_steps,
            throw=False,
        )
        steps.append(residual_step(solution.error_bound, c))
        z = solution.value
    error, bound = vector_norm(z.double() - x.double(), norm), stack_error_bound(steps)
    return int((~(error <= bound)).sum()), int(bound.isfinite().sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_true_error_of_a_stack_is_never_above_its_bound(dtype: torch.dtype) -> None:
    samples, violations, finite = 0, 0, 0
    for c in CONSTANTS:
        for norm in NORMS:
            for method, max_steps in (("picard", 5), ("anderson", None)):
                bad, good = stack_violations(c, norm, dtype, 40, method, max_steps)
                samples, violations, finite = samples + 40, violations + bad, finite + good
    assert samples >= 1000
    assert violations == 0
    assert finite == samples


@pytest.mark.parametrize("norm", NORMS)
def test_the_true_error_stays_below_the_bound_where_channels_change_their_scales_much(
    norm: Norm,
) -> None:
    for c in CONSTANTS:
        assert stack_violations(c, norm, torch.float64, 40, "picard", 5, spread=3.0) == (0, 40)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ten_thousand_stacks_stay_within_their_bounds(dtype: torch.dtype, method: Method) -> None:
    for c in CONSTANTS:
        for norm in NORMS:
            violations, finite = stack_violations(c, norm, dtype, 150, method, None)
            assert (violations, finite) == (0, 150)


def test_the_bound_is_attained_by_the_worst_direction() -> None:
    c = 0.9
    x = torch.randn(5, 3, 2)
    solution = invert_residual(
        lambda z: -c * z,
        (1 - c) * x,
        lipschitz_bound=c,
        norm="frobenius",
        max_steps=20,
        output_error=0.0,
        throw=False,
    )
    assert (solution.status == InversionStatus.MAX_STEPS).all()
    ratio = true_error(solution, x) / solution.error_bound
    assert (ratio <= 1).all()
    assert (ratio > 1 - 1e-9).all()


def test_the_difference_of_iterates_would_not_have_been_a_bound() -> None:
    """c/(1 − c)‖Δ‖ in working precision goes to zero where the true error does not."""
    c = 0.95
    w = orthogonal(1, 8, 8)
    x = torch.randn(200, 4, 8).float()

    def f(z: Tensor) -> Tensor:
        return (c * 0.999999) * torch.tanh(z @ w.to(z.dtype) + 3) @ w.mT.to(z.dtype)

    y = x + f(x)
    z = y
    for _ in range(400):
        z, previous = y - f(z), z
    popular = c / (1 - c) * vector_norm(z - previous, "token_max")
    error = vector_norm(z.double() - x.double(), "token_max")
    assert (error > popular).any()
    solution = invert_residual(f, y, lipschitz_bound=c, norm="token_max", initial=z)
    assert (true_error(solution, x) <= solution.error_bound).all()


def test_a_float32_output_solved_in_float64_still_counts_its_forward_rounding() -> None:
    f = two_layers(100, 4, 6, 0.7, "token_max", torch.float32)
    x = torch.randn(100, 4, 6).float()
    y = x + f(x)
    settings = {"lipschitz_bound": 0.7, "norm": "token_max"}
    polished = invert_residual(f, y, polish=True, **settings)
    chained = invert_residual(f, y.double(), forward_map=f, forward_dtype=torch.float32, **settings)
    assert polished.value.dtype == chained.value.dtype == torch.float64
    for solution in (polished, chained):
        assert (true_error(solution, x) > 1e-9).any()
        assert (true_error(solution, x) <= solution.error_bound).all()
        assert (solution.error_bound < 1e-4).all()
    exact = invert_residual(f, y, polish=True, output_error=0.0, **settings)
    assert (exact.error_bound <= 1e-10 * vector_norm(exact.value, "token_max")).all()


def test_a_branch_that_refuses_float64_gets_the_allowance_of_its_own_precision() -> None:
    w = (0.5 * orthogonal(6, 6)).float()
    x = torch.randn(50, 4, 6).float()

    def f(z: Tensor) -> Tensor:
        return torch.tanh(z @ w)

    def in_float64(z: Tensor) -> Tensor:
        return torch.tanh(z @ w.double())

    settings = {"lipschitz_bound": 0.501, "norm": "token_max"}
    own = invert_residual(f, x + f(x), **settings)
    assert own.residual_dtype == torch.float32
    given = invert_residual(f, x + f(x), residual_map=in_float64, **settings)
    assert given.residual_dtype == torch.float64
    value = given.value.double()
    in_full = vector_norm((x + f(x)).double() - value - in_float64(value), "token_max")
    torch.testing.assert_close(given.residual, in_full, rtol=1e-9, atol=1e-15)
    for solution in (own, given):
        assert (true_error(solution, x) <= solution.error_bound).all()
    cast_inside = invert_residual(lambda z: f(z.float()).to(z.dtype), x + f(x), **settings)
    assert cast_inside.residual_dtype == torch.float32


@pytest.mark.parametrize("method", METHODS)
def test_without_evidence_the_answer_is_as_good_but_nothing_is_said_of_its_error(
    method: Method,
) -> None:
    f = two_layers(20, 4, 6, 0.7, "token_max", torch.float32)
    x = torch.randn(20, 4, 6).float()
    y = x + f(x)
    settings = {"lipschitz_bound": 0.7 * (1 + 1e-5), "norm": "token_max", "method": method}
    proven, bare = (invert_residual(f, y, evidence=e, **settings) for e in (True, False))
    assert all_converged(bare)
    assert bare.residual_dtype == torch.float32
    assert bare.error_bound.isinf().all()
    assert (true_error(bare, x) <= proven.error_bound).all()
    assert (bare.num_evaluations < proven.num_evaluations).all()
    wrong = invert_residual(lambda z: 3 * f(z), y, evidence=False, throw=False, **settings)
    assert (wrong.status == InversionStatus.NOT_CONTRACTIVE).any()


def test_polishing_without_evidence_is_refused() -> None:
    with pytest.raises(ValueError, match="evidence"):
        invert_residual(
            torch.zeros_like, torch.ones(1, 2, 3).float(),
            lipschitz_bound=0.5, norm="token_max", polish=True, evidence=False,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_inverted_as_far_as_it_goes(dtype: torch.dtype) -> None:
    f = two_layers(50, 4, 6, 0.5, "token_max", dtype)
    x = torch.randn(50, 4, 6).to(dtype)
    c = 0.5 * (1 + 3 * unit_roundoff(dtype)) ** 2
    solution = invert_residual(f, x + f(x), lipschitz_bound=c, norm="token_max")
    assert all_converged(solution)
    assert (true_error(solution, x) <= solution.error_bound).all()


def test_the_rounding_model_covers_what_float32_rounds() -> None:
    worst = 0.0
    for tokens, width in ((1, 2), (4, 8), (32, 64), (64, 16)):
        w_q, g = torch.randn(2, width, width // 2) / width**0.5, torch.randn(2, width // 2, width)
        for f in (
            two_layers(8, tokens, width, 0.9, "token_max", torch.float32),
            CausalL2(w_q.float(), (g / width**0.5).float()),
        ):
            x = 3 * torch.randn(8, tokens, width).float()
            rounded = vector_norm(f(x).double() - f(x.double()), "token_max")
            size = vector_norm(x, "token_max") + vector_norm(f(x), "token_max")
            unit = rounding_factor(tokens, width) * unit_roundoff(torch.float32)
            worst = max(worst, float((rounded / (unit * size)).max()))
    assert worst <= 0.25


def test_a_proven_evaluation_error_replaces_the_model() -> None:
    f = two_layers(4, 4, 3, 0.5, "token_max")
    x = torch.randn(4, 4, 3)
    settings = {"lipschitz_bound": 0.5, "norm": "token_max", "rtol": 1e-6}
    modelled = invert_residual(f, x + f(x), **settings)
    proven = invert_residual(
        f,
        x + f(x),
        evaluation_error=torch.full((4,), 1e-3),
        output_error=0.0,
        throw=False,
        max_steps=60,
        **settings,
    )
    assert (proven.error_bound >= 2e-3).all()
    assert (proven.status == InversionStatus.MAX_STEPS).all()
    assert (modelled.error_bound < 1e-5).all()


def test_without_a_constant_there_is_no_error_bound() -> None:
    f = two_layers(4, 4, 3, 0.9, "token_max")
    x = torch.randn(4, 4, 3)
    solution = invert_residual(f, x + f(x), lipschitz_bound=None, norm="token_max")
    assert all_converged(solution)
    assert solution.error_bound.isinf().all()
    assert solution.predicted_steps is None


# --- causal certificates ------------------------------------------------------------------------


def shift_map(tokens: int, c: float, off_diagonal: float) -> Tensor:
    """f(x)_i = −c x_i − L x_{i−1}: nothing cancels, so the causal recursion is attained."""
    return -c * torch.eye(tokens) - off_diagonal * torch.eye(tokens).roll(1, 0).tril(-1)


def test_a_causal_constant_alone_bounds_no_error() -> None:
    matrix = shift_map(40, 0.5, 2.0)
    x = torch.randn(3, 40, 1)
    solution = invert_residual(
        lambda z: matrix @ z,
        x + matrix @ x,
        lipschitz_bound=0.5,
        norm="token_max",
        contraction="causal",
        initial=x + 1e-13 * torch.randn_like(x),
        rtol=1e-9,
    )
    assert all_converged(solution)
    assert (solution.residual < 1e-10).all()
    assert solution.error_bound.isinf().all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("off_diagonal", [0.2, 0.9])
def test_the_causal_bound_holds_and_is_attained(norm: Norm, off_diagonal: float) -> None:
    matrix = shift_map(12, 0.5, off_diagonal)
    x = torch.randn(20, 12, 1)
    settings = {"lipschitz_bound": 0.5, "norm": norm, "contraction": "causal", "throw": False}
    for bound in (off_diagonal, (-matrix).tril(-1)):
        solution = invert_residual(
            lambda z: matrix @ z,
            x + matrix @ x,
            max_steps=10,
            off_diagonal_bound=bound,
            **settings,
        )
        assert (true_error(solution, x) <= solution.error_bound).all()
    error = causal_error_bound(torch.ones(12), 0.5, off_diagonal)
    truth = torch.linalg.solve(torch.eye(12) + matrix, torch.ones(12, 1)).squeeze(-1)
    assert (error >= truth).all()
    torch.testing.assert_close(error, truth, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_causal_map_with_a_global_constant_above_one_is_inverted(method: Method) -> None:
    matrix = shift_map(16, 0.6, 1.5)
    x = torch.randn(5, 16, 3)
    solution = invert_residual(
        lambda z: matrix[: z.shape[-2], : z.shape[-2]] @ z,
        x + matrix @ x,
        lipschitz_bound=0.6,
        norm="token_max",
        contraction="causal",
        method=method,
    )
    assert all_converged(solution)
    assert (solution.observed_rate > 1).all()
    assert (solution.residual <= 1e-9 * vector_norm(x, "token_max")).all()


# --- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_planted_failures_are_never_called_converged(method: Method, dtype: torch.dtype) -> None:
    batch, c = 60, 0.9
    scale = torch.full((batch, 1, 1), 0.85)
    scale[0::6] = 1.5  # expands
    scale[1::6] = math.nan
    scale[2::6] = 0.97  # contracts, but not as claimed
    w = orthogonal(batch, 6, 6)
    y = torch.randn(batch, 4, 6).to(dtype)
    y[3::6, 0, 0] = math.inf
    solution = invert_residual(
        lambda z: z @ (scale * w).to(z.dtype),
        y,
        lipschitz_bound=c,
        norm="token_max",
        method=method,
        throw=False,
    )
    expected = torch.full((batch,), int(InversionStatus.CONVERGED))
    expected[0::6] = expected[2::6] = InversionStatus.NOT_CONTRACTIVE
    expected[1::6] = expected[3::6] = InversionStatus.NONFINITE
    assert torch.equal(solution.status, expected)
    assert solution.error_bound[~solution.converged].isinf().all()
    assert (solution.observed_rate[solution.converged] <= c).all()


def test_an_exact_constant_is_never_disproved_by_rounding() -> None:
    for dtype in (torch.float64, torch.float32):
        for c in (0.3, 0.7, 0.95):
            w = orthogonal(50, 6, 6)

            def f(z: Tensor, w: Tensor = w, c: float = c) -> Tensor:
                return z @ (c * w).to(z.dtype)

            y = 1e3 * torch.randn(50, 4, 6).to(dtype)
            claimed = c * (1 + 1e-15 if dtype == torch.float64 else 1 + 3e-7)
            solution = invert_residual(f, y, lipschitz_bound=claimed, norm="token_max")
            assert all_converged(solution)
            assert (solution.observed_rate > 0.9 * c).all()


def test_a_growing_residual_is_divergence() -> None:
    solution = invert_residual(
        lambda z: 3 * z, torch.randn(4, 2, 2), lipschitz_bound=None, norm="token_max", throw=False
    )
    assert (solution.status == InversionStatus.DIVERGED).all()
    assert (solution.num_steps < 15).all()


def test_running_out_of_steps_is_said() -> None:
    f = slow_map(4, 3, 8, 0.99)
    solution = invert_residual(
        f, torch.randn(4, 3, 8), lipschitz_bound=0.99, norm="frobenius", max_steps=3, throw=False
    )
    assert (solution.status == InversionStatus.MAX_STEPS).all()
    assert (solution.num_steps == 3).all()


def single_inside(x: Tensor) -> Tensor:
    """0.5 sin x, computed in float32 whatever comes in."""
    return (0.5 * x.float().sin()).to(x.dtype)


@pytest.mark.parametrize("mate", [math.nan, math.inf])
def test_what_a_map_computes_in_is_found_out_whatever_a_batch_mate_is(mate: float) -> None:
    y = torch.randn(1, 3, 2).float()
    together = torch.cat([y, torch.full_like(y, mate)])
    for f in (single_inside, lambda x: 0.5 * x):
        alone, both = (
            invert_residual(f, each, lipschitz_bound=0.5, norm="token_max", throw=False)
            for each in (y, together)
        )
        assert alone.residual_dtype == both.residual_dtype
        assert both.status[0] == alone.status[0]
        assert torch.equal(both.value[0], alone.value[0])
    assert alone.residual_dtype == torch.float64


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-16), (torch.float32, 1e-7), (torch.bfloat16, 1e-2)]
)
def test_a_tolerance_below_the_precision_is_refused_untried(
    dtype: torch.dtype, rtol: float
) -> None:
    y = torch.randn(3, 4, 2).to(dtype)
    solution = invert_residual(
        lambda z: 0.5 * z.tanh(), y, lipschitz_bound=0.5, norm="token_max", rtol=rtol, throw=False
    )
    assert (solution.status == InversionStatus.TOLERANCE_BELOW_PRECISION).all()
    assert (solution.num_steps == 0).all()
    assert torch.equal(solution.value, y)


def test_the_refusal_grows_with_the_constant_and_vanishes_with_polish() -> None:
    y = torch.randn(3, 4, 2).float()
    settings = {"norm": "token_max", "rtol": 1e-5, "throw": False}
    for c, expected in ((0.5, "CONVERGED"), (0.99, "TOLERANCE_BELOW_PRECISION")):

        def f(z: Tensor, c: float = c) -> Tensor:
            return 0.5 * c * z.sin()

        solution = invert_residual(f, y, lipschitz_bound=c, **settings)
        assert {InversionStatus(s).name for s in solution.status.tolist()} == {expected}
    assert all_converged(invert_residual(f, y, lipschitz_bound=0.99, polish=True, **settings))


def test_polishing_forgets_no_evidence_against_the_constant() -> None:
    """Steep at y only: the first step disproves c, later ones would not."""

    def f(z: Tensor) -> Tensor:
        falling = 0.1 - 3 * (z - 0.45).clamp(0, 0.05)
        return falling + 2 * (z - 0.5).clamp(0, 0.05)

    y = torch.full((2, 1, 1), 0.5).float()
    settings = {"lipschitz_bound": 0.9, "norm": "token_max", "throw": False}
    solution = invert_residual(f, y, polish=True, **settings)
    assert (solution.status == InversionStatus.NOT_CONTRACTIVE).all()
    restarted = invert_residual(f, y.double(), initial=solution.value, **settings)
    assert all_converged(restarted)


@pytest.mark.parametrize("method", METHODS[1:3])
def test_accelerated_steps_that_fail_fall_back_to_picard(method: Method) -> None:
    """Without the safeguard half of these break Newton, and a tenth Anderson."""
    c, w = 0.99, orthogonal(40, 4, 4)
    x = torch.randn(40, 3, 4)
    for shape in (lambda h: torch.sin(8 * h) / 8, lambda h: h.clamp(-0.1, 0.1)):

        def f(z: Tensor, shape: Callable[[Tensor], Tensor] = shape) -> Tensor:
            return -c * (1 - 1e-12) * shape(z @ w) @ w.mT

        solution = invert_residual(f, x + f(x), lipschitz_bound=c, norm="token_max", method=method)
        assert all_converged(solution)
        assert (true_error(solution, x) <= solution.error_bound).all()


def test_a_residual_that_cannot_be_confirmed_is_not_converged() -> None:
    y = torch.randn(3, 2, 2).float()
    broken = torch.tensor([math.nan, 1.0, 1.0])[:, None, None]
    solution = invert_residual(
        lambda z: 0.5 * z.sin(),
        y,
        residual_map=lambda z: 0.5 * z.sin() * broken,
        lipschitz_bound=0.5,
        norm="token_max",
        throw=False,
    )
    assert solution.converged.tolist() == [False, True, True]
    assert solution.error_bound.isfinite().tolist() == [False, True, True]


def test_the_error_says_how_many_failed_how_badly_and_what_to_try() -> None:
    scale = torch.tensor([0.5, 1.5, math.nan])[:, None, None]
    with pytest.raises(FixedPointError) as caught:
        invert_residual(
            lambda z: scale * z, torch.ones(3, 2, 2), lipschitz_bound=0.6, norm="token_max"
        )
    message = str(caught.value)
    assert message.startswith("2 of 3 samples were not inverted (1 NONFINITE, 1 NOT_CONTRACTIVE)")
    assert "worst residual inf in token_max" in message
    assert "certify the weights" in message
    assert "look for NaN" in message
    assert "\n" not in message
    assert caught.value.solution.converged.tolist() == [True, False, False]


# --- batch mates --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_does_not_depend_on_batch_mates(method: Method) -> None:
    def f(z: Tensor) -> Tensor:
        return 0.7 * torch.tanh(z @ w) + 0.1 * z

    w = orthogonal(4, 4)
    settings = {"lipschitz_bound": 0.81, "norm": "token_max", "method": method, "throw": False}
    y = torch.randn(6, 5, 4)
    others = y.clone()
    others[1:] *= torch.tensor([1e-3, 1e3, math.nan, math.inf, 0.0])[:, None, None]
    first, second = invert_residual(f, y, **settings), invert_residual(f, others, **settings)
    for field in ("value", "residual", "error_bound", "num_steps", "status", "observed_rate"):
        assert torch.equal(getattr(first, field)[0], getattr(second, field)[0])
    alone = invert_residual(f, y[:1], **settings)
    torch.testing.assert_close(alone.value[0], first.value[0], rtol=1e-9, atol=1e-9)


def test_solved_samples_are_not_evaluated_again_when_compact() -> None:
    evaluated = 0

    def f(z: Tensor) -> Tensor:
        nonlocal evaluated
        evaluated += len(z)
        return 0.95 * torch.tanh(z @ w)

    w = orthogonal(4, 4)
    y = torch.randn(64, 5, 4)
    y[8:] *= 1e-5  # these are done at once
    settings = {"lipschitz_bound": 0.95, "norm": "token_max", "atol": 1e-2, "rtol": 0.0}
    whole = invert_residual(f, y, **settings)
    work, evaluated = evaluated, 0
    compact = invert_residual(f, y, compact=True, **settings)
    torch.testing.assert_close(compact.value, whole.value)
    assert torch.equal(compact.status, whole.status)
    assert evaluated < work / 4


@pytest.mark.parametrize("method", ["picard", "anderson"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batch_mates_that_leave_the_batch_change_nothing(
    method: Method, dtype: torch.dtype
) -> None:
    w = orthogonal(4, 4)

    def f(z: Tensor) -> Tensor:
        return 0.7 * torch.tanh(z @ w.to(z.dtype)) + 0.1 * z

    y = torch.randn(6, 5, 4).to(dtype)
    y[1:] *= torch.tensor([1e-3, 1e3, math.nan, math.inf, 1.0]).to(dtype)[:, None, None]
    settings = {"lipschitz_bound": 0.81, "norm": "token_max", "method": method, "throw": False}
    together = invert_residual(f, y, compact=True, **settings)
    assert together.converged.tolist() == [True, True, True, False, False, True]
    assert len(together.num_steps.unique()) > 1
    for i in (0, 1, 2, 5):
        alone = invert_residual(f, y[i : i + 1], **settings)
        torch.testing.assert_close(alone.value[0], together.value[i])
        assert alone.num_steps[0] == together.num_steps[i]


@pytest.mark.parametrize("compact", [False, True])
def test_float64_is_asked_once_however_differently_samples_converge(compact: bool) -> None:
    w, measured = orthogonal(4, 4), []

    def exact(z: Tensor) -> Tensor:
        measured.append(len(z))
        return 0.9 * torch.tanh(z @ w)

    y = (torch.randn(32, 5, 4) * torch.logspace(-3, 1, 32)[:, None, None]).float()
    solution = invert_residual(
        lambda z: 0.9 * torch.tanh(z @ w.float()),
        y,
        residual_map=exact,
        lipschitz_bound=0.9001,
        norm="token_max",
        compact=compact,
    )
    assert all_converged(solution)
    assert len(solution.num_steps.unique()) > 3
    assert measured == [32]
    assert torch.equal(solution.num_evaluations, solution.num_steps + 2)


# --- speed --------------------------------------------------------------------------------------


def test_anderson_needs_at_most_half_of_picards_evaluations_on_a_slow_map() -> None:
    f = slow_map(20, 8, 16, 0.95)
    x = torch.randn(20, 8, 16)
    evaluations = {}
    for method in METHODS[:2]:
        solution = invert_residual(
            f, x + f(x), lipschitz_bound=0.95, norm="token_max", method=method
        )
        assert (true_error(solution, x) <= solution.error_bound).all()
        evaluations[method] = float(solution.num_evaluations.double().mean())
    assert evaluations["picard"] > 60
    assert evaluations["anderson"] <= evaluations["picard"] / 2


def test_auto_is_picard_where_that_is_quick_and_goes_on_with_anderson_where_it_is_slow() -> None:
    share = torch.tensor([0.1, 0.5, 1.0])[:, None, None]
    f = slow_map(3, 8, 16, 0.95)

    def scaled(z: Tensor) -> Tensor:
        return share * f(z)

    x = torch.randn(3, 8, 16)
    settings = {"lipschitz_bound": 0.95, "norm": "token_max"}
    picard = invert_residual(scaled, x + scaled(x), method="picard", **settings)
    auto = invert_residual(scaled, x + scaled(x), method="auto", **settings)
    assert all_converged(auto)
    assert (true_error(auto, x) <= auto.error_bound).all()
    assert picard.num_steps[:2].amax() <= PICARD_STEPS < picard.num_steps[2]
    torch.testing.assert_close(auto.value[:2], picard.value[:2], rtol=0, atol=0)
    assert torch.equal(auto.num_steps[:2], picard.num_steps[:2])
    assert PICARD_STEPS < auto.num_steps[2] < picard.num_steps[2]


@pytest.mark.parametrize("max_steps", [PICARD_STEPS // 2, PICARD_STEPS, PICARD_STEPS + 3])
def test_auto_takes_no_more_steps_than_are_allowed(max_steps: int) -> None:
    f, x = slow_map(2, 8, 16, 0.99), torch.randn(2, 8, 16)
    solution = invert_residual(
        f, x + f(x), lipschitz_bound=0.99, norm="token_max", method="auto",
        max_steps=max_steps, throw=False,
    )  # fmt: skip
    assert (solution.status == InversionStatus.MAX_STEPS).all()
    assert (solution.num_steps == max_steps).all()
    assert (true_error(solution, x) <= solution.error_bound).all()


def test_picard_needs_at_most_the_predicted_steps_and_exactly_so_in_the_worst_direction() -> None:
    c, tolerance = 0.9, 1e-6
    x = torch.randn(10, 3, 2)
    solution = invert_residual(
        lambda z: -c * z,
        (1 - c) * x,
        lipschitz_bound=c,
        norm="frobenius",
        atol=tolerance,
        rtol=0.0,
    )
    assert solution.predicted_steps is not None
    assert ((solution.num_steps - solution.predicted_steps).abs() <= 1).all()
    assert int(predicted_steps(0.5, torch.tensor(1.0), 0.5)) == 2
    assert int(predicted_steps(0.5, torch.tensor(0.0), 0.5)) == 0
    assert int(predicted_steps(0.0, torch.tensor(1.0), 0.5)) == 1


# --- stacks -------------------------------------------------------------------------------------


def test_the_stack_bound_is_the_recursion_written_out() -> None:
    y = torch.randn(2, 3, 2)
    log_scale, shift = torch.tensor([0.5, -1.0]), torch.zeros(2)
    scale = scale_step(y, log_scale, shift, "token_max")
    top, bottom = torch.tensor([1e-3, 2e-3]), torch.tensor([1e-5, 0.0])
    bound = stack_error_bound([residual_step(top, 0.5), scale, residual_step(bottom, 0.75)])
    by_hand = bottom + 4 * math.e * top
    assert (bound >= by_hand).all()
    torch.testing.assert_close(bound, by_hand, rtol=1e-5, atol=0)
    assert stack_error_bound([]) == 0


def test_what_an_error_is_in_one_metric_comes_back_in_another_only_as_far_as_channels_allow() -> (
    None
):
    # Errors of the upper layer are loud in channel 0, which the lower one hardly reads.
    c, quiet = 0.5, math.log(0.01)
    upper, lower = torch.tensor([quiet, 0.0]), torch.tensor([quiet, 0.0])
    y = torch.zeros(1, 1, 2)
    none, error = torch.zeros(1), torch.tensor([1e-3])
    undone = scale_step(y, upper, torch.zeros(2), "token_max")
    entered = scale_step(y, -lower, torch.zeros(2), "token_max")
    steps = [residual_step(error, c), undone, entered, residual_step(none, c)]
    bound = stack_error_bound(steps)
    assert 2e-3 <= bound.item() <= 2e-3 * (1 + 1e-4)  # 0.1 by the largest scales alone


@pytest.mark.parametrize("constant", [1.0, 1.5, math.inf, math.nan])
def test_constants_from_one_on_bound_no_error_not_even_of_a_zero_residual(constant: float) -> None:
    for residual in (torch.zeros(3), torch.ones(3)):
        assert (contraction_error_bound(residual, constant) == math.inf).all()
        assert (causal_error_bound(residual, constant, 0.0) == math.inf).all()
        steps = [residual_step(residual, constant), residual_step(torch.zeros(3), 0.5)]
        assert (stack_error_bound(steps) == math.inf).all()


def test_the_solver_itself_refuses_to_be_differentiated() -> None:
    y = torch.randn(2, 3, 4, requires_grad=True)
    settings = {"lipschitz_bound": 0.5, "norm": "token_max"}
    with pytest.raises(ValueError, match="not recorded"):
        invert_residual(lambda z: 0.5 * z.tanh(), y, **settings)
    with torch.no_grad():
        solution = invert_residual(lambda z: 0.5 * z.tanh(), y, **settings)
    assert not solution.value.requires_grad


def test_it_runs_in_inference_mode() -> None:
    w = 0.5 * orthogonal(4, 4)
    y = torch.randn(2, 3, 4)
    with torch.inference_mode():
        for method in METHODS:
            solution = invert_residual(
                lambda z: F.silu(z @ w) / 1.1,
                y,
                lipschitz_bound=0.5,
                norm="token_max",
                method=method,
            )
            assert all_converged(solution)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.wrong_shapes
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lipschitz_bound": 1.0}, r"must be in \[0, 1\), got 1.0"),
        ({"lipschitz_bound": math.nan}, r"must be in \[0, 1\)"),
        ({"norm": "spectral"}, "unknown norm 'spectral': choose one of token_max"),
        ({"method": "broyden"}, "unknown method 'broyden'"),
        ({"contraction": "local"}, "unknown contraction 'local'"),
        ({"atol": -1.0}, "atol must be finite and not negative"),
        ({"rtol": math.inf}, "rtol must be finite"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"y": torch.zeros(3)}, "must be floating point"),
        ({"y": torch.zeros(2, 3, dtype=torch.int64)}, "must be floating point"),
        ({"y": torch.zeros(0, 2, 3)}, r"nothing to invert: y is empty, of shape \(0, 2, 3\)"),
        ({"f": lambda z: z.float()}, "f maps torch.float64"),
        ({"f": lambda z: z[..., :1]}, "must keep dtype and shape"),
        ({"off_diagonal_bound": 1.0}, "belongs to contraction='causal'"),
        ({"forward_map": torch.tanh}, "needs forward_dtype"),
        (
            {"y": torch.zeros(2, 3, dtype=torch.float32), "residual_map": lambda z: z.float()},
            "residual_map maps torch.float64",
        ),
    ],
)
def test_impossible_arguments_are_refused_in_one_line(change: dict, message: str) -> None:
    arguments = {"f": lambda z: 0.5 * z, "y": torch.ones(2, 3), "lipschitz_bound": 0.5}
    arguments = {**arguments, "norm": "token_max", **change}
    with pytest.raises(ValueError, match=message):
        invert_residual(arguments.pop("f"), arguments.pop("y"), **arguments)


def test_polish_refuses_a_map_that_cannot_do_float64() -> None:
    w = 0.5 * orthogonal(4, 4).float()
    with pytest.raises(ValueError, match="pass residual_map"):
        invert_residual(
            lambda z: z @ w,
            torch.ones(2, 3, 4).float(),
            lipschitz_bound=0.6,
            norm="token_max",
            polish=True,
        )


def token_wise_map(scale: float = 0.5, width: int = 6):
    """tanh of permuted channels, and how many tokens each evaluation was asked for."""
    rotation = torch.eye(width)[torch.randperm(width)]
    asked = []

    def f(x: Tensor) -> Tensor:
        asked.append(x.shape[0] * x.shape[1])
        return scale * (x @ rotation).tanh()

    return f, asked


@pytest.mark.parametrize("norm", ["token_max", "entry_max", "frobenius"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("evidence", [True, False])
def test_tokens_that_have_arrived_wait_for_the_others(
    norm: Norm, dtype: torch.dtype, evidence: bool
) -> None:
    # Far out tanh hardly changes: those tokens arrive after two steps.
    x = torch.cat([0.1 * torch.randn(3, 4, 6), 30 + torch.randn(3, 16, 6)], 1).to(dtype)
    torch.set_default_dtype(dtype)
    f, asked = token_wise_map()
    y = x + f(x)
    kept = y.clone()
    solve = partial(invert_residual, f, y, lipschitz_bound=0.5, norm=norm, evidence=evidence)
    asked.clear()
    whole = solve()
    of_whole = sum(asked)
    asked.clear()
    by_tokens = solve(token_wise=True)
    assert torch.equal(y, kept)
    assert by_tokens.converged.all()
    asked_for = 1e-8 if dtype == torch.float64 else 4e-3
    torch.testing.assert_close(by_tokens.value, whole.value, rtol=0, atol=asked_for)
    error = vector_norm((by_tokens.value - x).double(), norm)
    if evidence:
        assert (error <= by_tokens.error_bound).all()
    else:
        assert by_tokens.error_bound.isinf().all()
    assert (by_tokens.observed_rate <= 0.5).all()
    if norm == "frobenius":  # a sequence's norm is not that of its largest token
        assert sum(asked) == of_whole
    else:
        assert sum(asked) < 0.7 * of_whole


def test_a_constant_that_single_tokens_disprove_is_found_out_as_before() -> None:
    f, _ = token_wise_map(0.9)
    x = 0.01 * torch.randn(2, 5, 6)
    options: dict[str, Any] = {"lipschitz_bound": 0.3, "norm": "token_max", "throw": False}
    solve = partial(invert_residual, f, x + f(x), **options)
    for solution in (solve(), solve(token_wise=True)):
        assert (solution.status == InversionStatus.NOT_CONTRACTIVE).all()
        assert solution.error_bound.isinf().all()


def test_a_token_that_is_no_number_is_one_samples_trouble() -> None:
    f, _ = token_wise_map()
    y = torch.randn(2, 5, 6)
    y[1, 3, 2] = math.nan
    solution = invert_residual(
        f, y, lipschitz_bound=0.5, norm="token_max", token_wise=True, throw=False
    )
    assert solution.status.tolist() == [InversionStatus.CONVERGED, InversionStatus.NONFINITE]


def test_a_sequence_that_arrived_before_it_started_is_left_alone() -> None:
    f, asked = token_wise_map(0.0)
    y = torch.randn(2, 5, 6)
    solution = invert_residual(f, y, lipschitz_bound=0.5, norm="token_max", token_wise=True)
    assert torch.equal(solution.value, y)
    assert len(asked) == 1


@pytest.mark.parametrize("max_steps", [1, 3, 500])
def test_a_limit_of_steps_is_one_for_tokens_too(max_steps: int) -> None:
    f, asked = token_wise_map()
    x = torch.cat([0.1 * torch.randn(2, 4, 6), 30 + torch.randn(2, 16, 6)], 1)
    y = x + f(x)
    options: dict[str, Any] = {"lipschitz_bound": 0.5, "norm": "token_max", "throw": False}
    solve = partial(invert_residual, f, y, max_steps=max_steps, **options)
    whole, by_tokens = solve(), solve(token_wise=True)
    assert torch.equal(by_tokens.status, whole.status)
    assert (by_tokens.num_steps <= max_steps).all()
    assert by_tokens.converged.all() == (max_steps == 500)
    asked.clear()
    solve(token_wise=True)
    assert max_steps < 500 or sum(asked) < 0.7 * len(asked) * y.shape[0] * y.shape[1]
