"""Code lengths of texts: in which precision."""

import pytest
import torch

from invformer.evaluation.likelihood import at_least_single, window_nats


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_likelihoods_are_computed_in_single_precision_or_the_models_own_if_that_is_finer(
    given: torch.dtype, used: torch.dtype
) -> None:
    assert at_least_single(torch.ones(2, dtype=given)).dtype == used


def test_a_window_in_double_precision_is_not_rounded_to_single() -> None:
    logits, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    scored = torch.rand(3, 5) < 0.5
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0][scored].sum()
    assert window_nats(logits, targets, scored).item() == pytest.approx(expected.item(), rel=1e-14)
