"""Attention by Triton against the plain form in float64; without a GPU in Triton's interpreter."""

import itertools
import os

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")
pytestmark = pytest.mark.compiles  # Triton cannot read a program that checks its shapes

from triton.runtime import interpreter  # type: ignore # noqa: E402

from invformer.kernels import triton_attention as kernel  # noqa: E402
from invformer.kernels.attention import LogitBias, attend, attend_l2, choose, only  # noqa: E402
from invformer.weights.position_bias import toeplitz  # noqa: E402

LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3}
SIZES = [(40, 8, 3), (64, 16, 2), (130, 40, 1), (160, 64, 1), (70, 72, 2)]
if DEVICE.type == "cuda":
    LIMITS[torch.bfloat16] = 3e-2  # the interpreter has no products of these
    SIZES += [(1000, 64, 8), (300, 128, 4)]


@pytest.fixture(autouse=True)
def _available(monkeypatch) -> None:
    """The interpreter in the place of a GPU; mended for NumPy 2.4."""
    if DEVICE.type == "cpu":
        patched = interpreter._patch_lang_tensor

        def patch(tensor: type, scope) -> None:
            patched(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
        monkeypatch.setattr(kernel, "is_available", lambda device: True)


def tokens_of_heads(batch: int, heads: int, tokens: int, d_head: int) -> Tensor:
    """(B, H, N, d) in the memory of (B, N, H d)."""
    x = torch.randn(batch, tokens, heads * d_head, device=DEVICE)
    return x.unflatten(-1, (heads, d_head)).transpose(1, 2)


def biased(by_lag: Tensor | None, tokens: int) -> LogitBias:
    """A bias of the lag; none but the mask if there is none."""
    b = torch.zeros(1, tokens, device=DEVICE) if by_lag is None else by_lag
    return LogitBias(lambda: toeplitz(b, tokens), b, by_lag is None)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("l2", [True, False])
def test_values_and_gradients_are_those_of_the_plain_form(dtype: torch.dtype, l2: bool) -> None:
    for (tokens, d_head, batch), of_bias in itertools.product(SIZES, (0, 1, 2)):
        inputs = [tokens_of_heads(batch, 2, tokens, d_head) for _ in range(1 if l2 else 3)]
        inputs = [(t * (0.4 if l2 else 1)).to(dtype).requires_grad_() for t in inputs]
        by_lag = torch.randn(of_bias, tokens, device=DEVICE, requires_grad=True)
        bias = biased(by_lag if of_bias else None, tokens)
        of = [*inputs, by_lag] if of_bias else inputs
        g = torch.randn(inputs[0].shape, device=DEVICE).to(dtype)
        attention = attend_l2 if l2 else attend
        y = attention(*inputs, bias, "triton")
        expected = attention(*(t.double() for t in inputs), bias, "math")
        found = [y, *torch.autograd.grad(y, of, g)]
        wanted = [expected, *torch.autograd.grad(expected, of, g.double())]
        for part, exact in zip(found, wanted, strict=True):
            assert (part - exact).norm() <= LIMITS[dtype] * exact.norm(), (tokens, d_head, of_bias)


def test_the_same_call_has_the_same_bits_in_any_batch() -> None:
    by_lag = torch.randn(2, 70, device=DEVICE, dtype=torch.float32)
    q, k, v, g = (tokens_of_heads(3, 2, 70, 16).float() for _ in range(4))

    def bits(samples: slice) -> list[Tensor]:
        inputs = q[samples], k[samples], v[samples], by_lag
        y, log_mass = kernel.triton_attention(*inputs)
        given = g[samples], *inputs, y, log_mass, True
        return [y, log_mass, *kernel.triton_attention_backward(*given)]

    whole = bits(slice(None))
    assert all(map(torch.equal, whole, bits(slice(None))))
    assert all(torch.equal(a[1:2], b) for a, b in zip(whole[:-1], bits(slice(1, 2)), strict=False))


@pytest.mark.parametrize("tied", [True, False])
def test_the_operator_keeps_its_promises_to_torch(tied: bool) -> None:
    q, k, v = (tokens_of_heads(1, 2, 20, 4).float().requires_grad_() for _ in range(3))
    by_lag = torch.randn(2, 20, device=DEVICE, dtype=torch.float32, requires_grad=True)
    for bias in (by_lag, None):
        given = (q, None, None, bias) if tied else (q, k, v, bias)
        torch.library.opcheck(kernel.triton_attention, given)


def test_auto_is_triton_for_distances_or_a_bias() -> None:
    device = DEVICE if DEVICE.type == "cuda" else torch.device("meta")
    q = torch.zeros(1, 1, 40, 8, dtype=torch.float32, device=device)
    plain, table = biased(None, 40), biased(torch.zeros(1, 40), 40)
    assert choose("auto", q, table) == choose("auto", q, plain, l2=True) == "triton"
    assert choose("auto", q, plain) == "sdpa"
    assert choose("auto", q.double(), table) == "math"
    assert choose("triton", q.double(), table) == "math"
    assert choose("auto", q.repeat(1, 1, 1, 17), table) == "sdpa"
    with pytest.raises(ValueError, match="at most 128 channels a head: choose 'auto'"):
        choose("triton", q.repeat(1, 1, 1, 17), table)
    with only("triton"):
        assert choose("auto", q, plain) == "triton"
