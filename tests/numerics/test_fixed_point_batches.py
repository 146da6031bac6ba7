"""Many samples and single tokens at once: each gets its own answer, none is computed twice."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from invformer.numerics.fixed_point import (
    FixedPointSolution,
    InversionStatus,
    invert_residual,
)
from invformer.numerics.norms import NORMS, Norm, vector_norm
from tests.numerics.contractions import orthogonal

TOKEN_MAX: dict[str, Any] = {"norm": "token_max", "throw": False}


def true_error(solution: FixedPointSolution, x: Tensor) -> Tensor:
    return vector_norm(solution.value.double() - x.double(), solution.norm)


def all_converged(solution: FixedPointSolution) -> bool:
    return bool(solution.converged.all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_answer_does_not_depend_on_batch_mates(dtype: torch.dtype) -> None:
    w = orthogonal(4, 4)

    def f(z: Tensor) -> Tensor:
        return 0.7 * torch.tanh(z @ w.to(z.dtype)) + 0.1 * z

    solve = partial(invert_residual, f, lipschitz_bound=0.81, residual_map=f, **TOKEN_MAX)
    y = torch.randn(6, 5, 4).to(dtype)
    y[1:] *= torch.tensor([1e-3, 1e3, math.nan, math.inf, 1.0]).to(dtype)[:, None, None]
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


def permuted_tanh(scale: float = 0.5, width: int = 6) -> tuple[Callable[[Tensor], Tensor], list]:
    """tanh of permuted channels, and how many tokens each evaluation was asked for."""
    order, asked = torch.randperm(width), []

    def f(x: Tensor) -> Tensor:
        asked.append(x.shape[0] * x.shape[1])
        return scale * x[..., order].tanh()

    return f, asked


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("evidence", [True, False])
def test_tokens_that_have_arrived_wait_for_the_others(
    norm: Norm, dtype: torch.dtype, evidence: bool
) -> None:
    # Far out tanh hardly changes: those tokens arrive after two steps.
    x = torch.cat([0.1 * torch.randn(3, 4, 6), 30 + torch.randn(3, 16, 6)], 1).to(dtype)
    f, asked = permuted_tanh()
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


def test_verdicts_of_single_tokens_are_those_of_their_samples() -> None:
    f, _ = permuted_tanh(0.9)
    solve = partial(invert_residual, f, token_wise=True, **TOKEN_MAX)
    x = 0.01 * torch.randn(2, 5, 6)
    wrong = solve(x + f(x), lipschitz_bound=0.3)
    assert (wrong.status == InversionStatus.NOT_CONTRACTIVE).all()
    assert wrong.error_bound.isinf().all()
    y = x + f(x)
    y[1, 3, 2] = math.nan
    mixed = solve(y, lipschitz_bound=0.9)
    assert mixed.status.tolist() == [InversionStatus.CONVERGED, InversionStatus.NONFINITE]
    short = solve(x + f(x), lipschitz_bound=0.9, max_steps=3)
    assert (short.status == InversionStatus.MAX_STEPS).all()
    assert (short.num_steps == 3).all()


def test_it_runs_in_inference_mode_and_records_nothing() -> None:
    w = (0.5 * orthogonal(4, 4)).requires_grad_()
    y = torch.randn(2, 3, 4, requires_grad=True)
    solve = partial(invert_residual, lambda z: (z @ w).tanh(), lipschitz_bound=0.51)
    assert not solve(y, norm="token_max").value.requires_grad
    with torch.inference_mode():
        assert all_converged(solve(y.clone(), norm="token_max"))
