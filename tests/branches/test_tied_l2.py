"""Attention maps against naive loops, dense Jacobians and the inputs that break imitations."""

from functools import partial

import pytest
import torch

from invformer.nn import (
    BoundedAttention,
    ContractiveL2Attention,
    DotProductAttention,
    L2Attention,
    PaperContractiveL2Attention,
)
from invformer.numerics.norms import NORMS
from invformer.weights.position_bias import VisibilityMask
from tests.support.builders import mask_of, moved
from tests.support.problems import diagonal_norm, jacobian, norm_from_below, paper_attention

WIDTH, HEADS, SEQ_LEN, TARGET = 6, 2, 7, 0.7


@pytest.mark.parametrize("kind", ["bias", "causal", "full"])
@torch.no_grad()
def test_tied_l2_attention_is_the_papers_formula_with_a_h_written_out(kind: str) -> None:
    layer = L2Attention(WIDTH, HEADS, mask_of(kind, HEADS, SEQ_LEN))
    x = torch.randn(SEQ_LEN, WIDTH)
    bias = layer.position(SEQ_LEN).expand(HEADS, -1, -1)
    expected = paper_attention(x, layer.w_q, layer.w_v, layer.w_o.flatten(0, 1), bias)
    torch.testing.assert_close(layer(x), expected)


contractive = partial(ContractiveL2Attention, WIDTH, HEADS, lipschitz_target=TARGET)
paper = partial(PaperContractiveL2Attention, WIDTH, HEADS, lipschitz_target=TARGET)
bounded = partial(BoundedAttention, WIDTH, HEADS, 5, lipschitz_target=TARGET)
ATTENTIONS = {
    "dot product": partial(DotProductAttention, WIDTH, HEADS),
    "l2": partial(L2Attention, WIDTH, HEADS),
    "contractive l2": contractive,
    "paper, entry_max": paper,
    "paper, frobenius": partial(paper, certificate="kim_frobenius"),
    "bounded": bounded,
    "contractive l2, causal": partial(contractive, certificate="causal"),
    "bounded, causal": partial(bounded, certificate="causal"),
    "bounded, strict": partial(bounded, certificate="causal", strictly_causal=True),
}
LIPSCHITZ = [name for name in ATTENTIONS if name != "dot product"]
TIGHT_OR_NOT = {"token_max": (False,), "frobenius": (False, True)}
HELD_IN = {
    "contractive l2": "token_max", "bounded": "token_max",
    "paper, entry_max": "entry_max", "paper, frobenius": "frobenius",
}  # fmt: skip


def attention(name: str, kind: str = "bias", seed: int = 0) -> torch.nn.Module:
    """An attention with no parameter at its start value."""
    torch.manual_seed(seed)
    return moved(ATTENTIONS[name](position=mask_of(kind, HEADS, SEQ_LEN)))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_no_output_depends_on_a_later_token(name: str) -> None:
    layer, x = attention(name), torch.randn(SEQ_LEN, WIDTH)
    changed = x.clone()
    changed[4:] += 10 * torch.randn(SEQ_LEN - 4, WIDTH)
    torch.testing.assert_close(layer(x)[:4], layer(changed)[:4], rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", LIPSCHITZ)
@pytest.mark.parametrize("kind", ["bias", "causal", "full"])
@pytest.mark.parametrize(("seed", "scale"), [(0, 0.1), (1, 1.0), (2, 10.0)])
def test_true_constant_below_local_bound_below_certificate_below_target(
    name: str, kind: str, seed: int, scale: float
) -> None:
    if name == "bounded, strict" and kind == "full":
        with pytest.raises(ValueError, match="causal mask"):
            attention(name, kind).causal_bound()
        return
    layer, x = attention(name, kind, seed), scale * torch.randn(SEQ_LEN, WIDTH)
    dense = jacobian(layer, x)
    for norm in NORMS:
        true, bound = norm_from_below(dense, norm), layer.lipschitz_bound(norm)
        assert true <= bound
        for tight in TIGHT_OR_NOT.get(norm, ()):
            assert true <= layer.local_bound(x[None], norm, tight) <= bound
        if HELD_IN.get(name) == norm:
            assert bound <= TARGET
    if kind == "full":  # tokens see later ones
        with pytest.raises(ValueError, match="causal mask"):
            layer.causal_bound()
        return
    assert diagonal_norm(dense) <= layer.causal_bound()
    if name not in {"l2", *HELD_IN}:
        assert layer.causal_bound() <= TARGET
        assert seed or layer.lipschitz_bound("token_max") > TARGET


def test_the_certificate_is_held_at_its_target_not_far_below_it() -> None:
    assert attention("contractive l2").lipschitz_bound("token_max") > 0.97 * TARGET


def test_a_mask_that_hides_a_token_from_itself_is_refused() -> None:
    visible = torch.ones(4, 4, dtype=torch.bool)
    visible[2, 2] = False
    with pytest.raises(ValueError, match="hides token 2 from itself"):
        VisibilityMask(visible)
