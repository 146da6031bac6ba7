"""Certificates of weights that nobody trains, and of the matrices low precision really uses."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from invformer.errors import NonFiniteError
from invformer.evaluation.inversion import round_trip
from invformer.nn import (
    BoundedAttention,
    CausalMask,
    ContractiveFeedForward,
    ContractiveL2Attention,
    InvertibleBlock,
    InvertibleStack,
    PaperContractiveL2Attention,
    RelativePositionBias,
    certify,
    enforce,
)
from invformer.nn.transformer import CharEmbedding, CharTransformer
from tests.support.builders import contractive_model, random_tokens, scaled_model, trained_a_little

WIDTH, TOKENS, SYMBOLS, TARGET = 16, 16, 60, 0.9


class Factors(TorchFunctionMode):
    """Collects what inputs are multiplied by from the right."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("addmm", "matmul", "__matmul__"):
            self.found.append(args[-1])
        return func(*args, **(kwargs or {}))


def stack_of(
    attention: torch.nn.Module, feed_forward: torch.nn.Module, **options
) -> InvertibleStack:
    block = InvertibleBlock(attention, feed_forward, None)
    return InvertibleStack([block], TOKENS, **options).eval().requires_grad_(False)


@pytest.mark.parametrize("size", [1.0, 1e-9, 1e-12, 1e-30, 0.0])
@pytest.mark.parametrize("certificate", ["token_max", "causal"])
def test_a_head_without_queries_costs_nothing(certificate: str, size: float) -> None:
    attention = ContractiveL2Attention(WIDTH, 4, CausalMask(TOKENS), TARGET, certificate)
    attention.w_q.weight.data[0] *= size
    feed_forward = ContractiveFeedForward(WIDTH, WIDTH, TARGET)
    kind = "global" if certificate == "token_max" else "causal"
    stack = stack_of(attention, feed_forward, kind=kind)
    assert attention.causal_bound() <= TARGET
    assert enforce(stack).holds
    assert attention.correction == 1


def test_heads_of_very_unequal_sharpness_stay_below_the_causal_target() -> None:
    attention = BoundedAttention(WIDTH, 4, 4, CausalMask(TOKENS), TARGET, "causal").eval()
    attention.log_sharpness.data[:, 0] = -40.0
    attention.log_sharpness.data[:, 1] = 30.0
    assert attention.causal_bound() <= TARGET


def test_no_character_is_certified_by_bounds_that_prove_nothing(monkeypatch) -> None:
    attention = ContractiveL2Attention(WIDTH, 4, RelativePositionBias(4, TOKENS), TARGET)
    attention.w_q.weight.data[0] = 0
    feed_forward = ContractiveFeedForward(WIDTH, WIDTH, TARGET, "relu")
    feed_forward.w_in.weight.data = torch.eye(WIDTH)
    feed_forward.w_out.weight.data = -torch.eye(WIDTH)
    feed_forward.b_in.data.fill_(10.0)
    embedding = CharEmbedding(SYMBOLS, TOKENS, WIDTH, WIDTH)
    stack = stack_of(attention, feed_forward)
    model = CharTransformer(embedding, stack, SYMBOLS, WIDTH).eval().requires_grad_(False)
    tokens = torch.randint(SYMBOLS, (8, TOKENS))
    monkeypatch.setattr(model.stack, "inverse", partial(model.stack.inverse, max_steps=3))
    enforce(model)
    trip = round_trip(model, tokens, torch.float32)
    assert not torch.equal(trip.decoded, tokens)
    trip.proof()  # which raises where a wrong character is proven


@pytest.mark.parametrize("spread", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("offset", [0.0, 30.0, 300.0])
def test_far_and_near_symbols_decode_to_themselves(offset: float, spread: float) -> None:
    embedding = CharEmbedding(SYMBOLS, TOKENS, WIDTH, WIDTH)
    tokens = torch.randint(SYMBOLS, (4, TOKENS))
    embedding.token.weight.data = offset + spread * torch.randn(SYMBOLS, WIDTH)
    for dtype in (torch.float32, torch.float64):
        embedding.to(dtype)
        assert torch.equal(embedding.nearest_tokens(embedding(tokens)), tokens)


def test_enforcing_does_not_make_up_for_constants_of_other_weights() -> None:
    stack = contractive_model().stack.eval()
    for branch in (branch for _, branch in stack.branches()):
        for name, parameter in branch.named_parameters():
            if name.endswith(".weight"):
                parameter.data.mul_(3)  # which PyTorch does not count as a change
    assert enforce(stack).holds
    assert all(branch.correction == 1 for _, branch in stack.branches())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_feed_forward_multiplies_by_what_is_certified(dtype: torch.dtype) -> None:
    # One unit, always at its largest slope: the Jacobian is the product of the two matrices.
    for seed in range(20):
        torch.manual_seed(seed)
        branch = ContractiveFeedForward(6, 1, TARGET, "relu", initial_sharpness=7.3).to(dtype)
        branch.b_in.data.fill_(100)
        branch.eval()
        with Factors() as factors, torch.no_grad():
            branch(torch.zeros(1, 6, dtype=dtype))
        w_in, w_out = (w.double() for w in factors.found)
        constant = torch.linalg.matrix_norm(w_in @ w_out, 2).item()
        assert constant <= branch.lipschitz_bound("token_max", dtype)


def test_the_papers_output_map_does_not_feel_autocast() -> None:
    attention = PaperContractiveL2Attention(8, 1, CausalMask(TOKENS), TARGET).float().eval()
    plain = attention.weights().g
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention.weights().g, plain)


@pytest.mark.parametrize("d_head", [2, 3, 5, 7])
def test_the_temperature_that_kernels_use_in_bfloat16_is_certified(d_head: int) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        options = {"certificate": "causal", "strictly_causal": True}
        attention = BoundedAttention(8, 1, d_head, CausalMask(TOKENS), TARGET, **options)
        attention = attention.float().eval().requires_grad_(False)
        attention.log_temperature.data = torch.randn(1)
        weights = attention.weights()
        root = math.sqrt(d_head)
        used = (weights.temperature * root).bfloat16().double() / root
        w_q, g = weights.w_qkv[0, 0].bfloat16().double(), weights.g[0].bfloat16().double()
        at_least = used * torch.linalg.matrix_norm(w_q, 2) * torch.linalg.matrix_norm(g, 2)
        assert attention.causal_bound(torch.bfloat16) >= at_least * (1 - 1e-12)


def test_certificates_of_another_kind_or_norm_or_length_do_not_bound_errors() -> None:
    model = trained_a_little(contractive_model())
    x = model.embedding(random_tokens(1))
    z = model.stack(x)
    for wrong in (certify(model, kind="causal"), certify(model, norm="frobenius")):
        with pytest.raises(ValueError, match="the certificate is"):
            model.stack.inverse(z, certificate=wrong)
    short = replace(certify(model), seq_len=11)
    with pytest.raises(ValueError, match="holds up to 11 tokens"):
        model.stack.inverse(z, certificate=short)


@pytest.mark.parametrize(
    ("build", "part", "value"),
    [
        (contractive_model, "attention.branch.w_g.weight", math.nan),
        (contractive_model, "feed_forward.branch.b_in", math.nan),
        (contractive_model, "feed_forward.branch.log_sharpness", 900.0),
        (contractive_model, "feed_forward.branch.log_sharpness", -900.0),
        (contractive_model, "feed_forward_norm.shift", math.inf),
        (scaled_model, "feed_forward.scaling.shift", math.nan),
    ],
)
def test_parameters_with_and_without_a_constant_have_to_be_finite_and_in_range(
    build: Callable[[], CharTransformer], part: str, value: float
) -> None:
    model = build()
    model.stack.blocks[1].get_parameter(part).data[0] = value
    assert part.startswith("feed_forward") or not certify(model).holds
    layer = part.split(".")[0]
    with pytest.raises(NonFiniteError, match=f"block_01/{layer}: its weights are not") as error:
        enforce(model)
    assert error.value.exit_code == 5
