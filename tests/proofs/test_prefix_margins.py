"""What states prove about a text: never more than is true, and all of it where rounding allows."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from invformer.nn import ContractiveL2Attention
from invformer.nn.transformer import PreNormBlock, PreNormStack
from invformer.numerics.precision import denormals_flushed
from invformer.proofs import prefix_margins as prefix_module
from invformer.proofs.prefix_margins import MarginEvidence, prefix_margins
from tests.proofs.models import ready, unconstrained
from tests.support.builders import (
    SEQ_LEN,
    VOCAB,
    contractive_model,
    mask_of,
    model_of_the_past,
    preset_model,
    random_tokens,
)


@torch.no_grad()
def test_margins_are_those_of_every_symbol_at_every_place(model) -> None:
    tokens = random_tokens(1)
    states = model.stack(model.embedding(tokens))
    found = prefix_margins(model, tokens, states, unknown=None)
    wide = model.double()
    own = wide.stack(wide.embedding(tokens))[0]
    for place in range(SEQ_LEN):
        others = tokens.repeat(VOCAB, 1)
        others[:, place] = torch.arange(VOCAB)
        apart = (wide.stack(wide.embedding(others))[:, place] - own[place]).norm(dim=-1)
        least = apart[torch.arange(VOCAB) != tokens[0, place]].min()
        assert found.margin[0, place] == pytest.approx(least.item(), rel=1e-4)
    assert found.proven.all()
    assert torch.equal(found.radius, (found.margin - found.distance).cummin(-1).values)
    assert (found.distance < 1e-3 * found.margin).all()


@torch.no_grad()
def test_a_text_is_found_from_its_rounded_states_alone(model) -> None:
    tokens = random_tokens(2).clamp(min=1)
    states = model.stack(model.embedding(tokens))
    step = states.std() / 4
    nothing = torch.ones_like(tokens)
    rounded, within = (states / step).round() * step, step / 2 + 1e-6
    found = prefix_margins(model, nothing, rounded, fit=True, entries_within=within)
    assert torch.equal(found.tokens, tokens)
    assert found.proven.all()
    entries_within = torch.full_like(states[0, 0], 1e-4)
    states[:, :, :2], entries_within[:2] = math.nan, math.inf
    found = prefix_margins(model, nothing, states, fit=True, entries_within=entries_within)
    assert torch.equal(found.tokens, tokens)
    assert found.proven.all()


@torch.no_grad()
def test_a_text_is_found_where_rounding_is_bounded_too_loosely_to_prove_anything() -> None:
    model = preset_model("dot_product", 10).double().eval()
    tokens = random_tokens(1)
    states = model.stack(model.embedding(tokens))
    for start in (tokens, torch.zeros_like(tokens)):
        found = prefix_margins(model, start, states, fit=True)
        assert torch.equal(found.tokens, tokens)
        assert not found.proven.any()


@pytest.mark.parametrize(("kind", "size"), [
    ("rounded", 1.0), ("rounded", 9.0), ("lost", 5), ("moved", 1.0), ("moved", 9.0), ("both", 3.0),
])  # fmt: skip
@torch.no_grad()
def test_proven_by_known_damage_is_what_no_other_text_may_be(kind: str, size: float) -> None:
    model = ready(lambda: contractive_model(bounded=True, scaled=True)).double()
    texts = torch.tensor(list(product(range(VOCAB), repeat=3)))
    states = model.stack(model.embedding(texts))
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(texts), (40,), generator=generator)
    damaged, known = states[chosen], {}
    if kind == "rounded":
        damaged = (damaged / size).round() * size
        known["entries_within"] = torch.full_like(damaged[:1, :1], size / 2 + 1e-9)
    elif kind == "lost":
        known["entries_within"] = torch.full_like(damaged, 1e-9)
        damaged[..., : int(size)], known["entries_within"][..., : int(size)] = 0, math.inf
    else:
        moved = torch.randn(damaged.shape, generator=generator).double()
        damaged = damaged + size * moved / moved.norm(dim=-1, keepdim=True)
        known["states_within"] = size + 1e-9
    if kind == "both":  # and of the first entries nothing else is known
        known["entries_within"] = torch.full_like(damaged, size / 2)
        known["entries_within"][..., :8] = math.inf
    decoded = texts[chosen]
    decoded[::2, 1] = (decoded[::2, 1] + 1) % VOCAB  # every second is wrong
    evidence = prefix_margins(model, decoded, damaged, unknown=None, **known)
    off = states[None] - damaged[:, None]  # (damaged, texts, places, width)
    entries = known.get("entries_within", torch.full_like(damaged, math.inf))[:, None]
    near = (off.abs() <= entries).all(-1) & (
        off.norm(dim=-1) <= known.get("states_within", math.inf)
    )
    same = (texts[None] == decoded[:, None]).cumprod(-1).bool()
    expected = torch.ones(len(decoded)).bool()
    for end in range(3):
        assert (same[..., end] | ~near[..., : end + 1].all(-1))[evidence.proven[:, end]].all()
        behind = same[..., end - 1] if end else torch.ones_like(same[..., 0])
        expected &= (~behind | (near[..., end] == same[..., end])).all(-1)
        assert torch.equal(evidence.proven[:, end], expected)
    assert not evidence.proven[::2, 1:].any()
    assert evidence.proven.any() == ((kind, size) != ("rounded", 9.0))


@torch.no_grad()
def test_numbers_get_more_digits_where_float64_is_not_enough(monkeypatch) -> None:
    model, tokens = ready(model_of_the_past), random_tokens(3)
    states = model.stack(model.embedding(tokens))
    fast = prefix_margins(model, tokens, states, unknown=None)
    monkeypatch.setattr(prefix_module, "ENOUGH", 1e30)
    accurate = prefix_margins(model, tokens, states, unknown=None)
    assert (accurate.arithmetic_error < 0.01 * fast.arithmetic_error).all()
    assert torch.allclose(accurate.margin, fast.margin)
    assert fast.proven.all()
    assert accurate.proven.all()


@torch.no_grad()
def test_who_watches_a_proof_sees_what_is_proven_of_every_beginning(monkeypatch) -> None:
    monkeypatch.setattr(prefix_module, "ROWS", 2 * VOCAB)
    model, tokens = ready(model_of_the_past), random_tokens(2)
    states = model.stack(model.embedding(tokens))
    seen: list[MarginEvidence] = []
    whole = prefix_margins(model, (tokens + 1) % VOCAB, states, fit=True, watch=seen.append)
    assert torch.equal(whole.tokens, tokens)
    ends = [*range(2, SEQ_LEN, 2), SEQ_LEN]
    assert [len(part.tokens) for part in seen] == ends * 2
    for index, part in enumerate(seen):
        text, end = divmod(index, len(ends))
        for name in ("margin", "distance", "radius", "proven", "tokens"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[text, : ends[end]])


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 3e-45), (torch.float64, 1e-160), (torch.float64, 1e-310),
     (torch.bfloat16, 1e-40), (torch.float32, 1e-34)],
)  # fmt: skip
@torch.no_grad()
def test_symbols_that_underflow_are_not_proven(dtype: torch.dtype, scale: float) -> None:
    model = ready(contractive_model).to(dtype)
    model.embedding.token.weight.mul_(0).add_(torch.arange(VOCAB)[:, None].to(dtype) * scale)
    tokens = random_tokens(2)
    with denormals_flushed():
        states = model.stack(model.embedding(tokens))
        assert not prefix_margins(model, tokens, states, unknown=None).proven.any()


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e200])
@torch.no_grad()
def test_numbers_that_are_none_prove_nothing(number: float) -> None:
    model = ready(contractive_model)
    tokens = random_tokens(1)
    states = model.stack(model.embedding(tokens))
    states[0, 3, 2] = number
    proven = prefix_margins(model, tokens, states, unknown=None).proven[0]
    assert proven.tolist() == [place < 3 for place in range(SEQ_LEN)]
    model.stack.blocks[1].feed_forward.branch.b_in[1] = number
    states = model.stack(model.embedding(tokens))
    assert not prefix_margins(model, tokens, states, unknown=None).proven.any()
    model = ready(contractive_model)
    model.stack.blocks[0].attention.branch.position.table[0, 0] = number
    states = model.stack(model.embedding(tokens))
    assert not prefix_margins(model, tokens, states, unknown=None).proven.any()


class Doubled(ContractiveL2Attention):
    """Twice what the class above it computes."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return 2 * super().forward(*args, **options)


class Twice(PreNormBlock):
    """Both branches, applied again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Downwards(PreNormStack):
    """The blocks from the top down."""

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


twin, l2 = partial(unconstrained, "dot_product"), contractive_model


@pytest.mark.parametrize(
    ("make", "place", "value", "reason"),
    [
        (twin, "__class__", Downwards, "the rounding of a Downwards is not bounded"),
        (twin, "blocks.1.__class__", Twice, "the rounding of a Twice is not bounded"),
        (twin, "blocks.1.feed_forward.norm", nn.RMSNorm(12).double(), "rounding of a RMSNorm"),
        (l2, "blocks.0.attention.branch.position", mask_of("full", 3, SEQ_LEN), "see later ones"),
        (l2, "blocks.0.attention.branch.__class__", Doubled, "block_00/attention: the rounding"),
    ],
)
@torch.no_grad()
def test_other_models_are_not_proven(make: Any, place: str, value: Any, reason: str) -> None:
    model, tokens = make().eval(), random_tokens(1)
    part, _, name = place.rpartition(".")
    setattr(model.stack.get_submodule(part), name, value)
    evidence = prefix_margins(model, tokens, model.stack(model.embedding(tokens)))
    assert not evidence.proven.any()
    assert reason in evidence.unproven
