"""Compiled code makes the estimates that operations on stacked branches make."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from invformer.lipschitz import compiled
from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn import CharTransformer, PreNormBlock
from invformer.weights.spectral import set_manual_refresh
from tests.kernels.test_attention import needs_compiler
from tests.support import builders
from tests.support.builders import (
    VOCAB,
    WIDTH,
    baseline,
    contractive_model,
    convolutional_baseline,
    coupling,
    l2_baseline,
    random_tokens,
    small_model,
    trained_a_little,
)

pytestmark = needs_compiler

BALL = {"bounded": True}
STRICTLY_CAUSAL = {**BALL, "strictly_causal": True}
CAUSAL = {"certificate": "causal"}
CASES = {
    "l2": {},
    "l2, actnorm": {"norm": True},
    "l2, scaled": {"scaled": True},
    "l2, scaled, radius": {"scaled": True, "input_radius": 1.5},
    "l2, diagonal blocks, past": {**CAUSAL, "kernel": 3},
    "ball": BALL,
    "ball, radius, scaled": {**BALL, "input_radius": 1.5, "scaled": True},
    "ball, strictly causal": STRICTLY_CAUSAL,
    "ball, strictly causal, scaled": {**STRICTLY_CAUSAL, "scaled": True},
    "ball, strictly causal, scaled, diagonal blocks, past": {
        **STRICTLY_CAUSAL,
        **CAUSAL,
        "kernel": 3,
        "scaled": True,
    },
    "ball, diagonal blocks, radius": {**BALL, **CAUSAL, "input_radius": 1.5},
}
TEXTS = {"one": (1, 1), "eight": (1, 8), "nine": (1, 9), "several": (3, 12)}
IN_EVERY_SIZE = ("l2", "ball, strictly causal")


def trained(**options) -> CharTransformer:
    model = trained_a_little(contractive_model(**{"norm": False, **options})).train()
    set_manual_refresh(model)
    return model


def both(
    model: CharTransformer, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch, measured=None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Three estimates and the iterations' vectors after them, compiled and not."""
    found = []
    for can_take in (compiled.can_take, lambda *_: False):
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "can_take", can_take)
            patch.setattr(compiled, "PROMISING", 0)
            patch.setattr("invformer.lipschitz.probe.TOKENS_AT_ONCE", 5)  # of longer texts
            probe = LipschitzProbe(model, tokens, measured)
            values = [
                probe.values(weights=w)
                for w in (model.weights(folded=True), None, model.weights(folded=True))
            ]
            found.append(values + list(probe.state_dict().values()))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("name", "size"),
    [(n, size) for n in CASES for size in TEXTS if size == "several" or n in IN_EVERY_SIZE],
)
def test_estimates_are_those_of_stacked_branches(name: str, size: str, monkeypatch) -> None:
    model, (sequences, num_tokens) = trained(**CASES[name]), TEXTS[size]
    tokens = random_tokens(sequences, seed=3)[:, :num_tokens]
    probe = LipschitzProbe(model, tokens)
    assert probe.is_compiled
    torch.testing.assert_close(*both(model, tokens, monkeypatch), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("gaps", [False, True], ids=["as they are", "with gaps"])
@pytest.mark.parametrize("make", [partial(trained, scaled=True), l2_baseline])
def test_weights_are_found_again_wherever_they_lie(
    make: Callable[[], CharTransformer], gaps: bool
) -> None:
    def spread(weights):
        if isinstance(weights, torch.Tensor):  # its parts are copies when heads are merged
            return weights.mT.contiguous().mT if weights.dim() == 3 and gaps else weights
        if isinstance(weights, dict):
            return {name: spread(each) for name, each in weights.items()}
        return type(weights)(*map(spread, weights)) if isinstance(weights, tuple) else weights

    model, tokens = trained_a_little(make()), random_tokens(1)
    compiled, launched = LipschitzProbe(model, tokens), LipschitzProbe(model, tokens)
    launched.is_compiled = False
    for step in range(4):
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.01
        weights = model.weights(folded=step != 2) if model.is_invertible else None
        found = compiled.values(spread(weights)), launched.values(weights)
        torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("measured", ["token_max", "entry_max", "diagonal_block"])
@pytest.mark.parametrize("make", [baseline, convolutional_baseline, l2_baseline, coupling])
def test_branches_of_baselines_begin_with_their_layer_norm(
    monkeypatch, make: Callable[[], CharTransformer], measured: str
) -> None:
    model, tokens = trained_a_little(make()), random_tokens(3)
    assert LipschitzProbe(model, tokens, measured).is_compiled
    torch.testing.assert_close(*both(model, tokens, monkeypatch, measured), rtol=1e-8, atol=1e-10)


def test_a_block_with_a_forward_pass_of_its_own_is_not_compiled() -> None:
    class Twice(PreNormBlock):
        def compose(self, x, apply):
            return super().compose(super().compose(x, apply), apply)

    model = baseline()
    model.stack.blocks[0].__class__ = Twice
    assert not LipschitzProbe(model, random_tokens(1)).is_compiled


class Louder(nn.LayerNorm):
    def forward(self, input):
        return 3 * super().forward(input)


@pytest.mark.parametrize(("name", "make"), [
    ("norm", Louder), ("norm", nn.RMSNorm), ("norm", partial(nn.LayerNorm, bias=False)),
    ("norm", partial(nn.LayerNorm, elementwise_affine=False)),
    ("norm", partial(nn.LayerNorm, eps=0)), ("inner.qkv", lambda d: nn.Linear(d, 3 * d)),
    ("inner.out", lambda d: nn.Sequential(nn.Linear(d, d, bias=False))),
])  # fmt: skip
def test_a_branch_of_own_parts_is_launched(name: str, make: Callable[[int], nn.Module]) -> None:
    model = baseline()
    for block in model.stack.blocks:
        block.attention.set_submodule(name, make(WIDTH).double())
    probe = LipschitzProbe(model, random_tokens(1))
    assert not probe.is_compiled
    assert probe.values().isfinite().all()


def test_an_embedding_that_changes_its_symbols_is_launched() -> None:
    model = trained()
    model.embedding.token.max_norm = 0.1
    assert not LipschitzProbe(model, random_tokens(1)).is_compiled


def test_a_text_that_the_embedding_does_not_have_is_refused() -> None:
    model, tokens = trained(), random_tokens(1)
    with pytest.raises(IndexError, match="lacks a symbol"):
        LipschitzProbe(model, tokens + VOCAB).values()
    with pytest.raises(ValueError, match="a sequence has 1 to"):
        LipschitzProbe(model, tokens.repeat(1, 2)).values()
    probe = LipschitzProbe(model, tokens)
    probe.values()
    tokens += VOCAB  # which nobody reads any more
    assert probe.values().isfinite().all()


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "tanh"])
def test_every_activation_and_its_slope_are_known(activation: str, monkeypatch) -> None:
    model = trained()
    for block in model.stack.blocks:
        block.feed_forward.branch.activation = activation
    found = both(model, random_tokens(1), monkeypatch)
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_four_times_a_quarter_of_the_rows_are_all_rows(monkeypatch) -> None:
    model, found = trained(), []
    for at_once, times in ((3, 4), (12, 1)):
        monkeypatch.setattr("invformer.lipschitz.probe.TOKENS_AT_ONCE", at_once)
        probe = LipschitzProbe(model, random_tokens(1))
        found.append([probe.values(times=times) for _ in range(3)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "certificate"), [
    ("contractive_l2", "token_max"), ("contractive_bounded", "token_max"), ("dot_product", None),
])  # fmt: skip
def test_rows_that_promise_most_are_larger_than_those_that_were_largest(
    name: str, certificate: str | None, monkeypatch
) -> None:
    """Right after all weights have changed, when remembered gains say nothing."""
    monkeypatch.setattr("invformer.lipschitz.probe.TOKENS_AT_ONCE", 8)
    monkeypatch.setattr(builders, "SEQ_LEN", 64)
    model, found = small_model(name=name, certificate=certificate), []
    tokens = torch.randint(VOCAB, (1, 64), generator=torch.Generator().manual_seed(0))
    for promising in (compiled.PROMISING, 0):
        monkeypatch.setattr(compiled, "PROMISING", promising)
        probe, values = LipschitzProbe(model, tokens), []
        for seed in range(60):
            generator = torch.Generator().manual_seed(seed)
            for w in model.stack.parameters():
                w.data.normal_(generator=generator)
            values.append(probe.values()[::2].log())
        found.append(torch.stack(values[1:]).mean())
    assert found[0] > found[1]


def test_threads_change_no_bit(monkeypatch) -> None:
    model, found = trained(), []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(
            LipschitzProbe(model, random_tokens(4)).values(weights=model.weights(folded=True))
        )
    assert torch.equal(*found)


@pytest.mark.parametrize("position", [0, 4, 11])
@pytest.mark.parametrize("sequence", [0, 1])
def test_a_token_that_is_no_number_is_not_lost(sequence: int, position: int, monkeypatch) -> None:
    model, tokens = trained(), random_tokens(2) % (VOCAB - 1)
    tokens[sequence, position] = VOCAB - 1
    model.embedding.token.weight.data[VOCAB - 1] = torch.nan
    found, expected = (values[:3] for values in both(model, tokens, monkeypatch))
    assert torch.stack(found).isnan().all()
    torch.testing.assert_close(found, expected, equal_nan=True)
