"""Code lengths of texts: in which precision."""

import pytest
import torch

from invformer.evaluation.likelihood import window_nats


def test_a_window_in_double_precision_is_not_rounded_to_single() -> None:
    logits, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    scored = torch.rand(3, 5) < 0.5
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0][scored].sum()
    assert window_nats(logits, targets, scored).item() == pytest.approx(expected.item(), rel=1e-14)
