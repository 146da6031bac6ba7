"""Every attention kernel against naive loops and against each other, derivatives included."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from invformer.kernels import native
from invformer.kernels.attention import attend, attend_in_ball, attend_l2, choose
from invformer.kernels.native_attention import (
    native_attention,
    native_attention_backward,
    native_ball_attention,
)
from invformer.numerics.l2_attention import attention_weights
from invformer.weights.position_bias import (
    CausalMask,
    RelativePositionBias,
    VisibilityMask,
    log_masses,
)

BIASES = {"none": lambda heads, tokens: CausalMask(tokens), "table": RelativePositionBias}
needs_compiler = pytest.mark.skipif(not native.is_available(), reason=f"{native.complaint()}")
KERNELS = ["math", pytest.param("native", marks=needs_compiler), "sdpa"]
FUSED = KERNELS[1:]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_fused_kernel = pytest.mark.parametrize("kernel", FUSED)


def position(bias: str, heads: int, tokens: int, dtype: torch.dtype) -> CausalMask:
    """A position bias that is not at its start value."""
    made = BIASES[bias](heads, tokens).to(dtype)
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


def naive(q: Tensor, k: Tensor, v: Tensor, by_lag: Tensor, rows: range, l2: bool) -> Tensor:
    """Y_i = Σ_j P_ij v_j for some i of one sample, term by term in float64."""
    q, k, v, by_lag = q.double(), k.double(), v.double(), by_lag.double()
    heads, _, d = q.shape
    y = torch.empty(heads, len(rows), d)
    for h in range(heads):
        for index, i in enumerate(rows):
            bias = by_lag[h % len(by_lag), : i + 1].flip(0)
            seen = k[h, : i + 1]
            products = -(seen - q[h, i]).square().sum(-1) if l2 else seen @ q[h, i]
            y[h, index] = (bias + products / math.sqrt(d)).softmax(0) @ v[h, : i + 1]
    return y


def gradients(y: Tensor, of: list[Tensor], g: Tensor) -> tuple[Tensor, ...]:
    """⟨g, ∂y⟩; zero where y does not depend on it, as one token's does not on a bias."""
    return torch.autograd.grad(y, of, g, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 10.0])
@every_kernel
def test_kernels_are_a_naive_loop(kernel: str, bias: str, dtype: torch.dtype, scale: float) -> None:
    tokens = 200
    where = position(bias, 2, tokens, torch.float64 if dtype == torch.float64 else torch.float32)
    q, k, v = (scale * torch.randn(3, 2, tokens, 16)).to(dtype)
    rows, by_lag, b = range(0, tokens, 7), where.by_lag(tokens), where.logit_bias(tokens)
    exact = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype)
    with torch.no_grad():
        results = [(attend_l2(q, b, kernel), naive(q, q, q, by_lag, rows, l2=True))]
        if dtype == torch.float32 and kernel != "math":  # autocast does not reach the logits
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(attend_l2(q, b, kernel), results[0][0])
        if dtype != torch.bfloat16:  # whose dot products are rounded wherever they are computed
            results.append((attend(q, k, v, b, kernel), naive(q, k, v, by_lag, rows, l2=False)))
    for y, expected in results:
        assert y.dtype == dtype
        allowed = scale * exact if exact else 2**-8 * expected.abs().max()
        assert (y[:, ::7] - expected).abs().max() <= allowed


@pytest.mark.parametrize(
    ("batch", "tokens"), [(2, 1), (2, 2), (2, 33), (2, 128), (2, 129), (2, 300), (0, 33), (0, 300)]
)
@pytest.mark.parametrize("bias", BIASES)
@every_fused_kernel
def test_fused_kernels_have_the_values_and_gradients_of_the_plain_form(
    kernel: str, bias: str, batch: int, tokens: int
) -> None:
    where = position(bias, 3, tokens, torch.float64)
    q, k, v, g = torch.randn(4, batch, 3, tokens, 8)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    for output, used in (
        (lambda kind: attend_l2(q, where.logit_bias(tokens), kind), inputs[:1]),
        (lambda kind: attend(q, k, v, where.logit_bias(tokens), kind), inputs),
    ):
        of = [*used, *where.parameters()]
        y, expected = output(kernel), output("math")
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
        pulled, wanted = gradients(y, of, g), gradients(expected, of, g)
        torch.testing.assert_close(pulled, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("strictly_causal", [True, False])
@pytest.mark.parametrize("tokens", [1, 33, 130])
@every_kernel
def test_attention_in_the_ball_has_the_values_and_gradients_of_its_formula(
    kernel: str, tokens: int, strictly_causal: bool
) -> None:
    where = position("table", 3, tokens, torch.float64)
    z = torch.randn(2, tokens, 3 * 3 * 5, requires_grad=True)
    temperature = (1 + torch.rand(3)).requires_grad_()
    b = where.logit_bias(tokens)
    y = attend_in_ball(z, temperature, b, strictly_causal, kernel)
    u = z.unflatten(-1, (3, 3, 5)).transpose(1, 3)  # (2, H, 3, N, d)
    q, k, v = (u / (1 + u.square().sum(-1, keepdim=True)).sqrt()).unbind(2)
    if strictly_causal:
        k, v = (torch.cat([torch.zeros_like(t[..., :1, :]), t[..., :-1, :]], -2) for t in (k, v))
    expected = (temperature[:, None, None] * (q @ k.mT) + b.dense()).softmax(-1) @ v
    torch.testing.assert_close(y, expected)
    of, g = [z, temperature, *where.parameters()], torch.randn_like(y)
    pulled, wanted = gradients(y, of, g), gradients(expected, of, g)
    torch.testing.assert_close(pulled, wanted, rtol=1e-8, atol=1e-12)


def test_single_precision_survives_an_offset_that_ruins_the_uncentred_expansion() -> None:
    q = torch.randn(3, 6, 4)
    exact, rounded = attention_weights(q), (q + 300).float()
    plain = ((2 * rounded @ rounded.mT - rounded.square().sum(-1).unsqueeze(-2)) / 2).softmax(-1)
    assert (attention_weights(rounded) - exact).abs().max() < 2e-4
    assert (plain - exact).abs().max() > 1e-3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (attention_weights(rounded) - exact).abs().max() < 2e-4


@every_kernel
def test_coincident_tokens_have_finite_derivatives(kernel: str) -> None:
    q = torch.randn(3, 1, 4).expand(1, 3, 40, 4).clone().requires_grad_()
    attend_l2(q, CausalMask(40).logit_bias(40), kernel).square().sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@needs_compiler
def test_custom_operators_keep_their_promises_to_torch() -> None:
    q, k, v = (torch.randn(2, 2, 40, 4, requires_grad=True) for _ in range(3))
    by_lag = torch.randn(2, 40, requires_grad=True)
    torch.library.opcheck(native_attention, (q, k, v, by_lag))
    torch.library.opcheck(native_attention, (q, None, None, by_lag))
    z, temperature = torch.randn(2, 40, 24, requires_grad=True), torch.rand(2, requires_grad=True)
    torch.library.opcheck(native_ball_attention, (z, temperature, by_lag, True))


@needs_compiler
def test_compiled_attention_reads_its_copies_before_others_get_their_memory(monkeypatch) -> None:
    original = native.call

    def with_new_memory(name: str, dtype: torch.dtype, *arguments: Any) -> None:
        waste = [torch.full(shape, math.nan) for shape in [(2, 2, 40, 4), (2, 40, 24)] * 8]
        original(name, dtype, *arguments)
        del waste

    q, k, v = (torch.randn(2, 2, 4, 40).mT.requires_grad_() for _ in range(3))
    z, temperature = torch.randn(2, 40, 24, requires_grad=True), torch.rand(2, requires_grad=True)
    bias = CausalMask(40).logit_bias(40)

    def values_and_gradients() -> list[Tensor]:
        plain, tied = attend(q, k, v, bias, "native"), attend_l2(q, bias, "native")
        ball = attend_in_ball(z, temperature, bias, True, "native")
        total = plain.sum() + tied.sum() + ball.sum()  # whose gradients are broadcast
        return [plain, tied, ball, *torch.autograd.grad(total, [q, k, v, z, temperature])]

    expected = values_and_gradients()
    monkeypatch.setattr(native, "call", with_new_memory)
    torch.testing.assert_close(values_and_gradients(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("lengths", [(30, 30), (30, 12)])
def test_masses_are_sums_over_visible_lags_alone_and_together(bias: str, lengths: Any) -> None:
    masks = [position(bias, 3, tokens, torch.float64) for tokens in lengths]
    for where, tokens in zip(masks, lengths, strict=True):
        others = where(tokens).clone()
        others.diagonal(dim1=-2, dim2=-1).fill_(-math.inf)
        assert (where(tokens).diagonal(dim1=-2, dim2=-1) == 0).all()
        torch.testing.assert_close(others.logsumexp(-1), where.log_mass_per_row())
        torch.testing.assert_close(where.log_mass_per_row()[:, -1], where.log_mass().double())
    parameters = [p for mask in masks for p in mask.parameters()]
    for p in parameters:
        torch.nn.init.normal_(p)
    found, expected = log_masses(masks), torch.stack([m.log_mass() for m in masks])
    torch.testing.assert_close(found, expected)
    if parameters:
        by_hand = torch.autograd.grad(expected.square().sum(), parameters)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), parameters), by_hand)


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_sequences_longer_than_the_certified_length_are_refused(bias) -> None:
    where = bias(2, 8)
    for ask in (where, where.logit_bias, partial(where.last_rows, 1)):
        ask(8)
        with pytest.raises(ValueError, match="9 tokens are more than the seq_len of 8"):
            ask(9)


@pytest.mark.compiles
@pytest.mark.parametrize("bias", BIASES)
@every_fused_kernel
def test_kernels_compile_without_a_graph_break(kernel: str, bias: str) -> None:
    where = position(bias, 2, 40, torch.float32)
    torch.compiler.reset()  # of one function only so many cases are compiled
    compiled = torch.compile(
        lambda x: attend_l2(x, where.logit_bias(40), kernel), fullgraph=True, backend="aot_eager"
    )
    q = torch.randn(1, 2, 40, 8, dtype=torch.float32, requires_grad=True)
    y = compiled(q)
    expected = attend_l2(q, where.logit_bias(40), kernel)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(y)
    torch.testing.assert_close(*(torch.autograd.grad(out, q, g)[0] for out in (y, expected)))


@pytest.mark.parametrize(
    ("device", "compiler", "bias", "l2", "tokens", "kernel"),
    [
        ("cpu", True, "table", True, 20, "math"), ("cpu", True, "table", True, 40, "native"),
        ("cpu", True, "none", False, 64, "native"), ("cpu", False, "table", True, 20, "math"),
        ("cpu", False, "table", True, 40, "math"), ("cpu", False, "none", True, 64, "sdpa"),
        ("cpu", False, "none", False, 64, "sdpa"), ("cpu", False, "table", False, 4096, "math"),
        ("meta", True, "table", True, 32, "math"), ("meta", True, "table", True, 33, "sdpa"),
        ("meta", True, "table", True, 2049, "sdpa"), ("meta", True, "none", True, 2049, "sdpa"),
        ("meta", True, "none", False, 40, "sdpa"),
    ],
)  # fmt: skip
def test_auto_is_the_kernel_that_was_measured_fastest(
    device: str, compiler: bool, bias: str, l2: bool, tokens: int, kernel: str,
    monkeypatch,
) -> None:  # fmt: skip
    b = position(bias, 1, tokens, torch.float32).to(device).logit_bias(tokens)
    q = torch.empty(1, 1, tokens, 16, dtype=torch.float32, device=device, requires_grad=True)
    monkeypatch.setattr(native, "is_available", lambda: compiler)
    assert choose("auto", q, b, l2) == kernel
    if device == "meta":
        assert (attend_l2(q, b) if l2 else attend(q, q, q, b)).shape == q.shape
    elif kernel == "native":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 8)  # most of them would be idle
        assert choose("auto", q, b, l2) == ("math" if bias == "table" else "sdpa")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_attention_has_the_same_bits_in_any_batch_and_threads(dtype: torch.dtype) -> None:
    tokens, threads = 70, torch.get_num_threads()
    by_lag = torch.randn(3, tokens, dtype=dtype)

    def bits(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
        y, mass = native_attention(q, k, v, by_lag)
        y_l2, mass_l2 = native_attention(q, None, None, by_lag)
        of_bias, *backward = native_attention_backward(g, q, k, v, by_lag, mass)
        of_bias_l2, *backward_l2 = native_attention_backward(g, q, None, None, by_lag, mass_l2)
        return [y, y_l2, *backward, *backward_l2, of_bias, of_bias_l2]

    inputs = torch.randn(4, 5, 3, tokens, 12, dtype=dtype)
    whole = bits(*inputs)
    alone = [bits(*inputs[:, i : i + 1]) for i in range(5)]
    for i, expected in enumerate(whole[:6]):
        assert torch.equal(torch.cat([each[i] for each in alone]), expected)
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, bits(*inputs), whole))
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_a_weight_that_is_not_a_number_stays_in_its_own_rows() -> None:
    by_lag = torch.randn(1, 100, dtype=torch.float32)
    q = torch.randn(2, 1, 100, 8, dtype=torch.float32)
    q[1, :, 60, 3] = math.nan
    y = native_attention(q, None, None, by_lag)[0]
    assert y[0].isfinite().all()
    assert y[1, 0, :48].isfinite().all()
    assert y[1, 0, 60:].isnan().any(-1).all()


def test_a_mask_that_is_not_causal_runs_on_the_plain_form_only() -> None:
    where = VisibilityMask(torch.ones(5, 5, dtype=torch.bool))
    q = torch.randn(1, 2, 5, 4)
    expected = attend_l2(q, where.logit_bias(5), "math")
    assert torch.equal(attend_l2(q, where.logit_bias(5)), expected)
    with pytest.raises(ValueError, match="needs a causal mask"):
        attend_l2(q, where.logit_bias(5), "sdpa")
