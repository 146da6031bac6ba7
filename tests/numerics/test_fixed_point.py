"""The inverse of y = x + f(x): every answer within its bound, no failure called success."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from invformer.numerics.fixed_point import invert_residual
from invformer.numerics.fixed_point_solution import (
    FixedPointError,
    FixedPointSolution,
    InversionStatus,
)
from invformer.numerics.norms import NORMS, Norm, vector_norm
from invformer.numerics.precision import denormals_flushed, unit_roundoff
from tests.numerics.contractions import orthogonal, two_layers

TOKEN_MAX: dict[str, Any] = {"norm": "token_max", "throw": False}


def true_error(solution: FixedPointSolution, x: Tensor) -> Tensor:
    return vector_norm(solution.value.double() - x.double(), solution.norm)


def test_the_bound_is_attained_by_the_worst_direction_in_the_predicted_steps() -> None:
    c, x = 0.9, torch.randn(5, 3, 2)
    solve = partial(
        invert_residual, lambda z: -c * z, (1 - c) * x, lipschitz_bound=c, norm="frobenius"
    )
    first = vector_norm((1 - c) * c * x, "frobenius")
    for atol in (1e-2, 1e-6):
        found = solve(atol=atol, rtol=0.0)
        ratio = true_error(found, x) / found.error_bound
        assert (ratio <= 1).all()
        assert (ratio > 1 - 1e-6).all()
        predicted = ((1 - c) * atol / first).log() / math.log(c)
        assert ((found.num_steps - predicted).abs() <= 1.01).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_below_float64_the_bound_holds_with_a_float64_map_and_without(dtype: torch.dtype) -> None:
    f = two_layers(4, 6, 0.5, "token_max", dtype)
    x = torch.randn(50, 4, 6).to(dtype)
    c = 0.5 * (1 + 3 * unit_roundoff(dtype)) ** 2
    solve = partial(invert_residual, f, x + f(x), lipschitz_bound=c, norm="token_max")
    own, measured = solve(), solve(residual_map=f)
    for solution in (own, measured):
        assert solution.value.dtype == dtype
        assert (true_error(solution, x) <= solution.error_bound).all()
    value = measured.value.double()
    residual = vector_norm((x + f(x)).double() - value - f(value), "token_max")
    torch.testing.assert_close(measured.residual, residual, rtol=1e-9, atol=1e-15)


def test_without_evidence_the_answer_is_as_good_but_nothing_is_said_of_its_error() -> None:
    f = two_layers(4, 6, 0.7, "token_max", torch.float32)
    x = torch.randn(20, 4, 6).float()
    solve = partial(invert_residual, y=x + f(x), lipschitz_bound=0.7 * (1 + 1e-5), norm="token_max")
    proven = solve(f, residual_map=f)
    bare = solve(f, residual_map=f, evidence=False)
    assert torch.equal(bare.value, proven.value)
    assert bare.error_bound.isinf().all()
    assert torch.equal(bare.num_evaluations + 1, proven.num_evaluations)
    wrong = solve(lambda z: 3 * f(z), evidence=False, throw=False)
    assert (wrong.status == InversionStatus.NOT_CONTRACTIVE).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [3.0, 300.0, 1e5])
def test_biases_that_cancel_inside_break_no_error_bound(bias: float, dtype: torch.dtype) -> None:
    for c in (0.9 * torch.rand(6)).tolist():

        def f(x: Tensor, c: float = c) -> Tensor:
            return c / 2 * ((x + bias) - (bias - x))

        x = torch.randn(1_000, 1, 1).to(dtype)
        known = {"lipschitz_bound": c * (1 + 1e-6), "inner_size": c / 2 * math.sqrt(2) * bias}
        atol = 64 * unit_roundoff(dtype) * bias / (1 - c)
        solution = invert_residual(f, x + f(x), residual_map=f, atol=atol, **known, **TOKEN_MAX)
        assert (true_error(solution, x) <= solution.error_bound).all()
        assert (solution.status != InversionStatus.NOT_CONTRACTIVE).all()
        assert solution.converged.double().mean() > 0.9


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float64, 1e-160), (torch.float64, 1e-308), (torch.float32, 3e-45)]
)
def test_underflow_is_covered_by_the_bound(dtype: torch.dtype, scale: float) -> None:
    x = (scale * (1 + torch.rand(20, 3, 2))).to(dtype)
    with denormals_flushed():
        y = x + 0.5 * x
        solution = invert_residual(
            lambda z: 0.5 * z, y, lipschitz_bound=0.5, residual_map=lambda z: 0.5 * z, **TOKEN_MAX
        )
    assert (solution.error_bound >= 2 * scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("bias", "inner_size"), [(0.0, 0.0), (0.2, 1.0)])
@pytest.mark.parametrize("norm", NORMS)
def test_zeros_are_inverted(dtype: torch.dtype, bias: float, inner_size: float, norm: Norm) -> None:
    f = lambda x: 0.5 * (x + bias).tanh()  # noqa: E731
    solution = invert_residual(
        f, torch.zeros(2, 3, 4, dtype=dtype), lipschitz_bound=0.5, norm=norm,
        residual_map=f, inner_size=inner_size,
    )  # fmt: skip
    y = solution.value + f(solution.value)
    assert (vector_norm(y, norm) <= 1.5 * solution.error_bound).all()
    assert (solution.error_bound < 1e-5).all()


def test_a_causal_map_above_one_or_without_a_constant_is_inverted_without_a_bound() -> None:
    matrix = -0.6 * torch.eye(16) - 1.5 * torch.eye(16).roll(1, 0).tril(-1)
    x, f = torch.randn(5, 16, 3), partial(torch.matmul, matrix)
    solution = invert_residual(f, x + f(x), lipschitz_bound=0.6, kind="causal", **TOKEN_MAX)
    assert solution.converged.all()
    assert solution.error_bound.isinf().all()
    unknown = invert_residual(lambda z: 0.5 * z, x, lipschitz_bound=None, **TOKEN_MAX)
    assert unknown.error_bound.isinf().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("scale", "status"),
    [
        (1.5, InversionStatus.NOT_CONTRACTIVE),  # expands
        (0.97, InversionStatus.NOT_CONTRACTIVE),  # contracts, but not as claimed
        (math.nan, InversionStatus.NONFINITE),
        (0.85, InversionStatus.CONVERGED),
    ],
)
@pytest.mark.parametrize("token_wise", [False, True])
def test_planted_failures_are_never_called_converged(
    scale: float, status: InversionStatus, dtype: torch.dtype, token_wise: bool
) -> None:
    w, y = scale * orthogonal(6, 6), torch.randn(20, 4, 6).to(dtype)
    solve = partial(invert_residual, lambda z: z @ w.to(z.dtype), y, token_wise=token_wise)
    solution = solve(lipschitz_bound=0.9, **TOKEN_MAX)
    assert (solution.status == status).all()
    assert solution.error_bound[~solution.converged].isinf().all()
    if status == InversionStatus.CONVERGED:
        short = solve(lipschitz_bound=0.9, max_steps=3, **TOKEN_MAX)
        assert (short.status == InversionStatus.MAX_STEPS).all()
        assert (short.num_steps == 3).all()


def test_an_exact_constant_is_never_disproved_by_rounding() -> None:
    for dtype in (torch.float64, torch.float32):
        for c in (0.3, 0.7, 0.95):
            w = c * orthogonal(6, 6)
            y = 1e3 * torch.randn(50, 4, 6).to(dtype)
            claimed = c * (1 + 1e-15 if dtype == torch.float64 else 1 + 3e-7)
            f = partial(lambda w, z: z @ w.to(z.dtype), w)
            solution = invert_residual(f, y, lipschitz_bound=claimed, residual_map=f, **TOKEN_MAX)
            assert solution.converged.all()


def test_rounding_far_above_the_model_disproves_a_constant_only_if_it_is_not_measured() -> None:
    f = lambda z: 0.5 * z + (((z + 1e4) - 1e4) - z)  # noqa: E731
    y = torch.randn(20, 4, 6, dtype=torch.float32)
    for exact, status in (
        (None, InversionStatus.NOT_CONTRACTIVE),
        (lambda z: 0.5 * z, InversionStatus.MAX_STEPS),
    ):
        found = invert_residual(f, y, lipschitz_bound=0.9, residual_map=exact, **TOKEN_MAX)
        assert (found.status == status).all()


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-16), (torch.float32, 1e-7), (torch.bfloat16, 1e-2)]
)
def test_a_tolerance_below_precision_is_refused_untried(dtype: torch.dtype, rtol: float) -> None:
    y = torch.randn(3, 4, 2).to(dtype)
    solution = invert_residual(
        lambda z: 0.5 * z.tanh(), y, lipschitz_bound=0.5, rtol=rtol, **TOKEN_MAX
    )
    assert (solution.status == InversionStatus.TOLERANCE_BELOW_PRECISION).all()
    assert (solution.num_steps == 0).all()
    assert torch.equal(solution.value, y)


@pytest.mark.parametrize("off", [math.nan, 1e-3])
def test_a_residual_that_float64_does_not_confirm_is_not_converged(off: float) -> None:
    y = torch.randn(2, 2, 2).float() + torch.tensor([0.0, 50.0]).float()[:, None, None]

    def exact(z: Tensor) -> Tensor:
        return 0.5 * z.sin() + torch.where(z > 20, off, 0.0)

    solution = invert_residual(
        lambda z: 0.5 * z.sin(), y, residual_map=exact, lipschitz_bound=0.5, **TOKEN_MAX
    )
    assert solution.status.tolist() == [InversionStatus.CONVERGED, InversionStatus.MAX_STEPS]
    assert solution.error_bound.isinf().tolist() == [False, True]


@pytest.mark.parametrize("token_wise", [False, True])
def test_the_error_says_how_many_failed_how_badly_and_what_to_try(token_wise: bool) -> None:
    y = torch.ones(3, 2, 2)
    y[1, 0], y[2, 1] = 50.0, math.nan
    steep_far_out = lambda z: 0.5 * z + (z.abs() - 10).clamp(min=0) * z.sign()  # noqa: E731
    options = {"lipschitz_bound": 0.6, "token_wise": token_wise}
    with pytest.raises(FixedPointError) as caught:
        invert_residual(steep_far_out, y, norm="token_max", **options)
    message = str(caught.value)
    assert message.startswith("2 of 3 samples were not inverted (1 NONFINITE, 1 NOT_CONTRACTIVE)")
    assert "worst residual inf in token_max" in message
    assert "certify the weights" in message
    assert "look for NaN" in message
    assert "\n" not in message
    assert caught.value.solution.converged.tolist() == [True, False, False]


@pytest.mark.wrong_shapes
@pytest.mark.parametrize(
    ("y", "f", "constant", "message"),
    [
        (torch.zeros(3), torch.tanh, 0.5, "must be floating point"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tanh, 0.5, "must be floating point"),
        (torch.zeros(0, 2, 3), torch.tanh, 0.5, "and not empty"),
        (torch.zeros(2, 3), lambda z: z[..., :1], 0.5, "must keep dtype and shape"),
        *((torch.ones(2, 3), torch.tanh, c, r"in \[0, 1\)") for c in (1.0, math.nan, -0.1)),
    ],
)
def test_tensors_and_constants_that_do_not_fit_are_refused_in_one_line(
    y: Tensor, f: Callable[[Tensor], Tensor], constant: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        invert_residual(f, y, lipschitz_bound=constant, norm="token_max")


@pytest.mark.parametrize("token_wise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_answer_does_not_depend_on_batch_mates(dtype: torch.dtype, token_wise: bool) -> None:
    w = orthogonal(4, 4)

    def f(z: Tensor) -> Tensor:
        return 0.7 * torch.tanh(z @ w.to(z.dtype)) + 0.1 * z

    options = {"lipschitz_bound": 0.81, "token_wise": token_wise} | TOKEN_MAX
    solve = partial(invert_residual, f, residual_map=f, **options)
    y = torch.randn(6, 5, 4).to(dtype)
    y[1:3] *= torch.tensor([1e-3, 1e3]).to(dtype)[:, None, None]
    y[3, 2, 1], y[4, 0, 3] = math.nan, math.inf
    together = solve(y)
    assert together.converged.tolist() == [True, True, True, False, False, True]
    assert len(together.num_steps.unique()) > 1
    for i in (0, 1, 2, 5):
        alone = solve(y[i : i + 1])
        torch.testing.assert_close(alone.value[0], together.value[i])
        assert alone.num_steps[0] == together.num_steps[i]


def test_solved_samples_are_not_evaluated_again_and_float64_is_asked_once() -> None:
    w, evaluated, measured = orthogonal(4, 4), [], []

    def f(z: Tensor) -> Tensor:
        (measured if z.dtype == torch.float64 else evaluated).append(len(z))
        return 0.9 * torch.tanh(z @ w.to(z.dtype))

    y = (torch.randn(32, 5, 4) * torch.logspace(-3, 1, 32)[:, None, None]).float()
    solution = invert_residual(f, y, residual_map=f, lipschitz_bound=0.9001, norm="token_max")
    assert len(solution.num_steps.unique()) > 3
    assert measured == [32]
    assert sum(evaluated) == int((solution.num_steps + 1).sum())
    assert torch.equal(solution.num_evaluations, solution.num_steps + 2)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("evidence", [True, False])
def test_arrived_tokens_wait_for_others(norm: Norm, dtype: torch.dtype, evidence: bool) -> None:
    # Far out tanh hardly changes: those tokens arrive after two steps.
    x = torch.cat([0.1 * torch.randn(3, 4, 6), 30 + torch.randn(3, 16, 6)], 1).to(dtype)
    order, asked = torch.randperm(6), []

    def f(x: Tensor) -> Tensor:
        asked.append(x.shape[0] * x.shape[1])
        return 0.5 * x[..., order].tanh()

    y = x + f(x)
    kept = y.clone()
    solve = partial(invert_residual, f, y, lipschitz_bound=0.5, norm=norm, evidence=evidence)
    asked.clear()
    whole = solve()
    of_whole = sum(asked)
    asked.clear()
    by_tokens = solve(token_wise=True)
    assert torch.equal(y, kept)
    asked_for = 1e-8 if dtype == torch.float64 else 4e-3
    torch.testing.assert_close(by_tokens.value, whole.value, rtol=0, atol=asked_for)
    assert (true_error(by_tokens, x) <= by_tokens.error_bound).all()
    if norm == "frobenius":  # a sequence's norm is not that of its largest token
        assert sum(asked) == of_whole
    else:
        assert sum(asked) < 0.7 * of_whole


def test_f_may_write_its_results_over_the_one_before() -> None:
    f, held, y = two_layers(6, 5, 0.9, "token_max"), torch.empty(4, 6, 5), torch.randn(4, 6, 5)
    found = invert_residual(
        lambda x: held[: len(x)].copy_(f(x)), y, lipschitz_bound=0.9, **TOKEN_MAX
    )
    torch.testing.assert_close(found.value + f(found.value), y)
