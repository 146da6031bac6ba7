"""Additive couplings: an exact inverse in one pass."""

import torch

from invformer.nn import CouplingStack
from tests.support.builders import SEQ_LEN, coupling, trained_a_little
from tests.support.problems import dense_jacobian


def test_the_inverse_undoes_the_stack_and_the_stack_the_inverse() -> None:
    model = trained_a_little(coupling()).eval()
    stack, x = model.stack, 3 * torch.randn(2, SEQ_LEN, model.head.in_features)
    assert isinstance(stack, CouplingStack)
    torch.testing.assert_close(stack.inverse(stack(x)), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(stack(stack.inverse(x)), x, rtol=0, atol=1e-12)


def test_a_coupling_keeps_volume_and_sees_no_later_token() -> None:
    model = trained_a_little(coupling()).eval()
    x = torch.randn(SEQ_LEN, model.head.in_features)
    jacobian = dense_jacobian(model.stack, x).detach()
    assert abs(torch.linalg.slogdet(jacobian)[1]) < 1e-9
    later = jacobian.view(*x.shape, *x.shape).abs().sum((1, 3)).triu(1)
    assert later.max() == 0
