"""The language model: embedding, causality, generation."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from invformer.nn import CharEmbedding, CharTransformer
from invformer.nn.transformer import sampled
from invformer.numerics.precision import denormals_flushed
from invformer.weights.spectral import set_manual_refresh
from tests.nn.test_layers import EVERY_KIND
from tests.support.builders import (
    SEQ_LEN,
    VOCAB,
    baseline,
    contractive_model,
    convolutional_baseline,
    coupling,
    l2_baseline,
    model_of_the_past,
    random_tokens,
    scaled_model,
    trained_a_little,
)

SEQUENTIAL = [*EVERY_KIND, baseline, convolutional_baseline, coupling, l2_baseline]


def test_the_decoding_margin_is_half_the_least_distance_however_near_two_symbols_are() -> None:
    embedding = CharEmbedding(20, 4, 9, 6)
    with torch.no_grad():
        embedding.token.weight += 100
        embedding.token.weight[17] = embedding.token.weight[4] + 2.0**-10
    margin = embedding.decoding_margin()
    assert margin == pytest.approx(2.0**-11 * math.sqrt(6))
    assert embedding.decoding_margin("entry_max") == pytest.approx(margin / math.sqrt(6))


@pytest.mark.parametrize("build", [contractive_model, baseline])
def test_texts_without_symbols_or_beyond_seq_len_are_refused_in_one_line(build) -> None:
    model, tokens = build(), random_tokens(2)
    for wrong, length in ((tokens[:, :0], 0), (torch.cat([tokens, tokens[:, :1]], 1), 13)):
        message = rf"a sequence has 1 to 12 tokens \(the seq_len\), got {length}"
        with pytest.raises(ValueError, match=message):
            model(wrong)
    past: dict = {}
    model.extend(tokens, past)
    with pytest.raises(ValueError, match="got 13"):
        model.extend(tokens[:, :1], past)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore")  # while it traces, Dynamo does what PyTorch warns of
@pytest.mark.parametrize(
    ("build", "autocast"),
    [
        (contractive_model, False),
        (model_of_the_past, False),
        (partial(contractive_model, input_radius=1.0), False),
        (scaled_model, True),
    ],
)
def test_compiled_blocks_are_one_graph_each_and_have_the_same_gradients(build, autocast) -> None:
    model = build().train().to(torch.float32 if autocast else torch.float64)
    set_manual_refresh(model)
    parameters = list(model.stack.parameters())

    def gradients() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(random_tokens(2)).float().logsumexp(-1).sum()
        return torch.autograd.grad(loss, parameters)

    plain = gradients()
    for block in model.stack.blocks:
        block.compile(backend="eager", fullgraph=True)
    for found, expected in zip(gradients(), plain, strict=True):
        assert found.allclose(expected, rtol=1e-9, atol=1e-12)


def tied(build: Callable[[], CharTransformer]) -> CharTransformer:
    """A model that applies its first block twice."""
    model = build()
    model.stack.blocks[1] = model.stack.blocks[0]
    return model


TIED = [partial(tied, contractive_model), partial(tied, baseline)]


@pytest.mark.parametrize("build", [*SEQUENTIAL, *TIED])
def test_symbols_one_at_a_time_have_the_logits_of_all_at_once(build) -> None:
    model = trained_a_little(build())
    tokens = random_tokens(3)
    past: dict = {}
    with torch.no_grad():
        expected = model(tokens)
        parts = [model.extend(part, past) for part in tokens.split([5, 1, 1, 3, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("build", SEQUENTIAL)
def test_prompts_are_continued_together_as_if_every_window_were_encoded_anew(build) -> None:
    model = trained_a_little(build())
    prompts = random_tokens(6)[:, :3].view(2, 3, 3)
    plain = window = prompts.flatten(0, 1)
    for _ in range(20):
        likeliest = model(window)[:, -1].argmax(-1, keepdim=True)
        plain = torch.cat([plain, likeliest], 1)
        is_full = window.shape[1] == SEQ_LEN
        window = plain[:, -(SEQ_LEN // 2) :] if is_full else torch.cat([window, likeliest], 1)
    found = model.generate(prompts, 20, temperature=0)
    assert torch.equal(found.flatten(0, 1), plain)
    assert torch.equal(model.generate(prompts[0, 0], 20, temperature=0), plain[0])
    assert model.generate(prompts[:0], 2, temperature=0).shape == (0, 3, 5)


def test_generation_drops_nothing_out_and_leaves_every_mode_as_it_was() -> None:
    model = trained_a_little(contractive_model())
    prompt = random_tokens(1)[0, :3]
    expected = model.generate(prompt, 20, temperature=0)
    model.dropout.p = 0.9
    model.train().norm.eval()
    before = [module.training for module in model.modules()]
    assert torch.equal(model.generate(prompt, 20, temperature=0), expected)
    with pytest.raises(IndexError):  # the modes come back after an error too
        model.generate(torch.full((3,), VOCAB), 20)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 5e-324])
def test_the_lowest_temperatures_take_the_likeliest_character(temperature: float) -> None:
    model = trained_a_little(contractive_model()).float()
    prompt = random_tokens(1)[0, :3]
    with denormals_flushed():
        coldest = model.generate(prompt, 20, temperature=temperature)
        assert torch.equal(coldest, model.generate(prompt, 20, temperature=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": torch.empty(0, dtype=torch.long)}, "the prompt is empty"),
        ({"length": -1}, "negative: length -1"),
        ({"temperature": -1.0}, "negative: .* temperature -1.0"),
        ({"temperature": math.nan}, "negative: .* temperature nan"),
        ({"top_k": 0}, "top_k=0, top_p=None keep no symbol"),
        ({"top_p": 0.0}, "top_k=None, top_p=0.0 keep no symbol"),
    ],
)
def test_impossible_generation_is_refused_in_one_line(change: dict, message: str) -> None:
    arguments = {"prompt": torch.zeros(3, dtype=torch.long), "length": 20, **change}
    with pytest.raises(ValueError, match=message):
        contractive_model().generate(**arguments)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_texts_that_begin_alike_have_the_same_bits(dtype: torch.dtype, bounded: bool) -> None:
    model = trained_a_little(contractive_model(certificate="causal", bounded=bounded))
    model = model.eval().requires_grad_(False).to(dtype)
    tokens = random_tokens(4)
    for place in range(1, SEQ_LEN):
        other = tokens.clone()
        other[:, place:] = random_tokens(4, seed=place)[:, place:]
        before, after = (model.stack(model.embedding(t))[:, :place] for t in (tokens, other))
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(2, None, 2), (None, 0.6, 2), (1, 1.0, 1), (None, 1e-300, 1)]
)
def test_only_the_likeliest_are_sampled(top_k: int | None, top_p: float | None, kept: int) -> None:
    logits = torch.tensor([0.1, 0.5, 0.2, 0.2]).log().expand(500, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = set(sampled(logits, 1.0, generator, top_k, top_p).flatten().tolist())
    assert 1 in drawn
    assert len(drawn) >= kept
    assert 0 not in drawn
