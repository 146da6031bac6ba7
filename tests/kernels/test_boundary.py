"""No tensor that does not fit reaches compiled code, and no forward-mode derivative is lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from invformer.kernels import native_attention
from invformer.kernels.attention import LogitBias, attend, attend_in_ball, attend_l2
from invformer.lipschitz.probe import LipschitzProbe
from invformer.weights.position_bias import toeplitz
from tests.kernels.test_attention import every_kernel, needs_compiler
from tests.support.builders import contractive_model, random_tokens

TOKENS = 40
# PyTorch's first dual number loads derivatives that it scripts.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def bias_of(by_lag: Tensor) -> LogitBias:
    """The bias with these numbers at its lags."""
    return LogitBias(lambda: toeplitz(by_lag, by_lag.shape[-1]), by_lag)


ENTRIES: dict[str, Callable[..., Tensor]] = {
    "dot product": lambda q, k, v, z, tau, b, kernel: attend(q, k, v, b, kernel),
    "l2": lambda q, k, v, z, tau, b, kernel: attend_l2(q, b, kernel),
    "ball": lambda q, k, v, z, tau, b, kernel: attend_in_ball(z, tau, b, True, kernel),
}


def inputs() -> list[Tensor]:
    """Queries, keys, values, and for the ball all three of a token and temperatures."""
    return [*torch.randn(3, 2, 3, TOKENS, 4), torch.randn(2, TOKENS, 3 * 3 * 4), 1 + torch.rand(3)]


@every_kernel
@pytest.mark.parametrize("entry", ENTRIES)
def test_tensors_that_lie_in_memory_in_any_way_are_read_right(kernel: Any, entry: str) -> None:
    bias = bias_of(torch.randn(3, TOKENS))
    for lying in (
        lambda t: t[:1].expand(t.shape),
        lambda t: t[..., :1].expand(t.shape),
        lambda t: t.mT.contiguous().mT if t.ndim > 1 else t.repeat_interleave(2)[::2],
        lambda t: torch.complex(t, -t).conj().imag,
    ):
        given = [lying(t) for t in inputs()]
        plain = [t.resolve_neg().contiguous().requires_grad_() for t in given]
        y, wanted = (
            ENTRIES[entry](*ts, bias, name) for ts, name in ((given, kernel), (plain, "math"))
        )
        torch.testing.assert_close(y, wanted)


@every_kernel
def test_what_does_not_fit_is_one_line(kernel: Any) -> None:
    b = bias_of(torch.randn(3, TOKENS))
    q, k, v, z, tau = (t.float() for t in inputs())
    for wrong in (k[:1], k.double(), k[..., :3], k[:, :, 1:], k.to("meta")):
        with pytest.raises(ValueError, match="queries, keys and values have one shape and format"):
            attend(q, wrong, v, b, kernel)
        with pytest.raises(ValueError, match="queries, keys and values have one shape and format"):
            attend(q, k, wrong, b, kernel)
    with pytest.raises(ValueError, match="for floating-point numbers, not"):
        attend_l2(q.long(), b, kernel)
    few = bias_of(torch.randn(3, TOKENS - 4))
    for call in (
        lambda: attend_l2(q, few, kernel),
        lambda: attend_in_ball(z, tau, few, True, kernel),
    ):
        with pytest.raises((ValueError, RuntimeError), match="36"):
            call()


@needs_compiler
def test_compiled_operators_refuse_each_tensor_that_does_not_fit() -> None:
    q, k, v, z, tau = (t.float() for t in inputs())
    by_lag, mass = torch.randn(3, TOKENS).float(), torch.randn(2, 3, TOKENS).float()
    for operator, right, places in (
        (native_attention.native_attention, (q, k, v, by_lag), (1, 2, 3)),
        (native_attention.native_attention, (q, None, None, by_lag), (3,)),
        (native_attention.native_attention_backward, (q, q, k, v, by_lag, mass), (0, 2, 3, 4, 5)),
        (native_attention.native_ball_attention, (z, tau, by_lag, True), (1, 2)),
    ):
        operator(*right)
        for place in places:
            t = right[place]
            for wrong in (t.double(), t.half(), t[:-1], t[..., :-1]):
                with pytest.raises(ValueError, match="compiled code expects"):
                    operator(*right[:place], wrong, *right[place + 1 :])


@forward_mode
@every_kernel
@pytest.mark.parametrize("entry", ENTRIES)
def test_forward_mode_derivatives_are_those_of_the_plain_form(kernel: Any, entry: str) -> None:
    given = [*inputs(), torch.randn(3, TOKENS)]
    tangents = [torch.randn_like(t) for t in given]

    def at(name: str) -> Callable[..., Tensor]:
        return lambda *ts: ENTRIES[entry](*ts[:-1], bias_of(ts[-1]), name)

    expected = torch.func.jvp(at("math"), tuple(given), tuple(tangents))
    torch.testing.assert_close(torch.func.jvp(at(kernel), tuple(given), tuple(tangents)), expected)
    with forward_ad.dual_level(), torch.no_grad():
        duals = list(map(forward_ad.make_dual, given, tangents))
        for ts in (duals, [*given[:-1], duals[-1]]):  # all of them, or the bias alone
            found = (forward_ad.unpack_dual(at(name)(*ts)) for name in (kernel, "math"))
            torch.testing.assert_close(*map(tuple, found))


@forward_mode
@needs_compiler
def test_a_second_derivative_in_forward_mode_is_refused_by_compiled_code() -> None:
    q = torch.randn(2, 3, TOKENS, 4, requires_grad=True)
    y = attend_l2(q, bias_of(torch.randn(3, TOKENS)), "native")
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        torch.autograd.grad(y, q, forward_ad.make_dual(torch.randn_like(y), torch.randn_like(y)))


@needs_compiler
def test_estimates_refuse_a_model_in_another_format_or_with_other_sizes() -> None:
    model = contractive_model(norm=False).float()
    probe = LipschitzProbe(model, random_tokens(2))
    assert probe.is_compiled
    probe.values()
    model.double()
    with pytest.raises(ValueError, match=r"compiled code expects .* in torch.float64"):
        probe.values()
    model.float()
    table = model.stack.blocks[0].attention.branch.position.table
    table.data = table.data.T.contiguous().T
    with pytest.raises(ValueError, match="compiled code takes tensors without gaps"):
        probe.values()
