"""ActivationNorm, feed-forward, residual layers, stacks and the language model."""

import math
from functools import partial

import pytest
import torch

from invformer.nn import (
    ActivationNorm,
    CausalMask,
    CharEmbedding,
    ContractiveFeedForward,
    ContractiveL2Attention,
    DotProductAttention,
    InvertibleResidual,
    InvertibleStack,
    L2Attention,
    RelativePositionBias,
    certify,
)
from invformer.nn import branch as branch_module
from invformer.nn.spectral import set_manual_refresh
from invformer.numerics.fixed_point import InversionStatus
from invformer.numerics.linear_map import dense_jacobian
from invformer.numerics.norms import vector_norm
from invformer.numerics.precision import denormals_flushed
from tests.nn.builders import (
    SEQ_LEN,
    VOCAB,
    WIDTH,
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


def test_activation_norm_leaves_its_first_batch_with_zero_mean_and_unit_variance() -> None:
    x = 5 + 3 * torch.randn(16, 8, WIDTH)
    layer = ActivationNorm(WIDTH)
    layer.initialise(x)
    y = layer(x).flatten(0, 1)
    torch.testing.assert_close(y.mean(0), torch.zeros(WIDTH), rtol=0, atol=1e-12)
    torch.testing.assert_close(y.std(0), torch.ones(WIDTH))


def test_activation_norm_leaves_constant_channels_alone() -> None:
    x = torch.randn(16, 8, WIDTH)
    x[..., 3] = 0
    layer = ActivationNorm(WIDTH)
    layer.initialise(x)
    assert layer.log_scale[3].item() == 0
    assert torch.equal(layer(x)[..., 3], x[..., 3])


@pytest.mark.parametrize("shape", [(WIDTH,), (5, WIDTH), (2, 3, WIDTH)])
def test_activation_norm_has_the_derivatives_of_its_formula(shape: tuple[int, ...]) -> None:
    layer = ActivationNorm(WIDTH)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(shape, requires_grad=True)
    inputs = (x, layer.log_scale, layer.shift)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (y.sin() * torch.linspace(1, 2, y.numel()).view(y.shape)).sum()

    ours = torch.autograd.grad(loss(layer(x)), inputs)
    formula = torch.autograd.grad(loss(x * layer.log_scale.exp() + layer.shift), inputs)
    for found, expected in zip(ours, formula, strict=True):
        assert found.allclose(expected, rtol=1e-12)
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x), inputs)


def test_activation_norm_is_undone_exactly_up_to_rounding() -> None:
    layer = ActivationNorm(WIDTH)
    layer.initialise(3 * torch.randn(64, WIDTH) + 1)
    x = torch.randn(7, WIDTH)
    torch.testing.assert_close(layer.inverse(layer(x)), x, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "tanh"])
@pytest.mark.parametrize("sharpness", [0.5, 4.0, 50.0])
def test_feed_forward_jacobians_stay_below_the_certificate_however_sharp(
    activation: str, sharpness: float
) -> None:
    layer = ContractiveFeedForward(WIDTH, 3 * WIDTH, 0.9, activation).eval()
    with torch.no_grad():
        layer.log_sharpness.fill_(math.log(sharpness))
    bound = layer.lipschitz_bound("frobenius")
    assert bound <= 0.9
    assert layer.lipschitz_bound("token_max") == bound
    for scale in (0.1, 1.0, 10.0):
        jacobian = dense_jacobian(layer, scale * torch.randn(2, WIDTH))
        assert torch.linalg.matrix_norm(jacobian, 2).item() <= bound


def test_feed_forward_held_in_entry_max_is_certified_there() -> None:
    layer = ContractiveFeedForward(WIDTH, 3 * WIDTH, 0.9, norm="entry_max").eval()
    bound = layer.lipschitz_bound("entry_max")
    jacobian = dense_jacobian(layer, torch.randn(2, WIDTH))
    assert jacobian.abs().sum(-1).max().item() <= bound <= 0.9


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "tanh"])
def test_without_gradients_the_feed_forward_gives_the_same_numbers(activation: str) -> None:
    layer = ContractiveFeedForward(WIDTH, 2 * WIDTH, 0.9, activation).eval()
    x = torch.randn(2, 3, WIDTH)
    before = x.clone()
    with torch.no_grad():
        value = layer(x)
    assert torch.equal(value, layer(x))
    assert torch.equal(x, before)


@torch.no_grad()
def test_a_residual_layer_is_undone() -> None:
    layer = InvertibleResidual(ContractiveFeedForward(WIDTH, 2 * WIDTH, 0.9)).eval()
    x = torch.randn(2, 5, WIDTH)
    bound = layer.branch.lipschitz_bound("token_max")
    solution = layer.inverse(layer(x), lipschitz_bound=bound, norm="token_max")
    error = (solution.value - x).norm(dim=-1).amax(-1)
    assert solution.converged.all()
    assert (error <= solution.error_bound).all()
    assert error.max().item() < 1e-9


def test_the_whole_stack_is_undone_and_the_text_comes_back() -> None:
    model = trained_a_little(contractive_model())
    tokens = random_tokens(3, seed=5)
    x = model.embedding(tokens)
    certificate = certify(model, dtype=torch.float64)
    solution = model.stack.inverse(model.stack(x), certificate=certificate)
    error = (solution.value - x).norm(dim=-1).amax(-1)
    assert (error <= solution.error_bound).all()
    assert (solution.error_bound < model.embedding.decoding_margin()).all()
    assert torch.equal(model.embedding.nearest_tokens(solution.value), tokens)


def test_in_float32_the_text_comes_back_without_evidence_too_for_one_evaluation_less() -> None:
    model = trained_a_little(contractive_model()).float()
    tokens = random_tokens(3, seed=5)
    z = model.stack(model.embedding(tokens))
    certificate = certify(model, dtype=torch.float32)
    proven, bare = (
        model.stack.inverse(z, certificate=certificate, evidence=e) for e in (True, False)
    )
    assert torch.equal(bare.value, proven.value)
    assert bare.error_bound.isinf().all()
    assert torch.equal(model.embedding.nearest_tokens(bare.value), tokens)
    for name, layer in bare.layers.items():
        assert torch.equal(layer.num_evaluations + 1, proven.layers[name].num_evaluations)


def test_the_decoding_margin_is_half_the_least_distance_however_near_two_symbols_are() -> None:
    embedding = CharEmbedding(20, 4, 9, 6)
    with torch.no_grad():
        embedding.token.weight += 100
        embedding.token.weight[17] = embedding.token.weight[4] + 2.0**-10
    margin = embedding.decoding_margin()
    assert margin == pytest.approx(2.0**-11 * math.sqrt(6))
    assert embedding.decoding_margin("entry_max") == pytest.approx(margin / math.sqrt(6))


def test_embedding_leaves_the_padded_channels_zero() -> None:
    model = contractive_model()
    assert (model.embedding(random_tokens(2))[..., WIDTH // 3 :] == 0).all()


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


def test_blocks_first_write_to_their_own_channels() -> None:
    model = contractive_model(norm=False)
    block = model.stack.blocks[0]
    written = block.attention.branch(model.embedding(random_tokens(2))).abs().sum((0, 1)) > 0
    share = (WIDTH - WIDTH // 3) // 2
    expected = torch.zeros(WIDTH, dtype=torch.bool)
    expected[WIDTH // 3 : WIDTH // 3 + share] = True
    assert torch.equal(written, expected)


SEQUENTIAL = [
    contractive_model,
    model_of_the_past,
    scaled_model,
    baseline,
    convolutional_baseline,
    coupling,
    l2_baseline,
]


@pytest.mark.parametrize("build", SEQUENTIAL)
def test_logits_never_depend_on_later_characters(build) -> None:
    model = build().eval()
    tokens = random_tokens(1)
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    torch.testing.assert_close(model(tokens)[:, :6], model(changed)[:, :6], rtol=0, atol=1e-14)


def test_dropout_before_the_head_leaves_the_certified_stack_alone() -> None:
    model = contractive_model()
    plain = model(random_tokens(1))
    model.dropout.p = 0.5
    model.train()
    x = model.embedding(random_tokens(1))
    assert model.stack(x).equal(model.stack(x))
    assert not model(random_tokens(1)).equal(model(random_tokens(1)))
    assert certify(model).holds
    assert model.eval()(random_tokens(1)).allclose(plain)


@pytest.mark.filterwarnings("ignore")  # while it traces, Dynamo does what PyTorch warns of
@pytest.mark.parametrize(
    "build",
    [contractive_model, partial(contractive_model, bounded=True), model_of_the_past, scaled_model],
)
def test_compiled_blocks_are_one_graph_each_and_have_the_same_gradients(build) -> None:
    model = build().train()
    set_manual_refresh(model)
    parameters = list(model.stack.parameters())

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(random_tokens(2)).logsumexp(-1).sum(), parameters)

    plain = gradients()
    for block in model.stack.blocks:
        block.compile(backend="eager", fullgraph=True)
    for found, expected in zip(gradients(), plain, strict=True):
        assert found.allclose(expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "build",
    [contractive_model, partial(contractive_model, bounded=True), model_of_the_past, scaled_model],
)
def test_a_model_on_the_meta_device_has_the_shapes_of_a_real_one(build) -> None:
    with torch.device("meta"):
        model = build()
        logits = model(torch.zeros(2, SEQ_LEN, dtype=torch.long))
    logits.sum().backward()
    assert logits.shape == (2, SEQ_LEN, VOCAB)
    for parameter, real in zip(model.parameters(), build().parameters(), strict=True):
        assert parameter.is_meta
        assert parameter.shape == real.shape


def test_generation_extends_the_prompt_and_repeats_with_the_same_seed() -> None:
    model = trained_a_little(contractive_model())
    prompt = random_tokens(1)[0, :3]
    first, second = (
        model.generate(prompt, 20, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(first[:3], prompt)
    assert len(first) == 23 > SEQ_LEN


@pytest.mark.parametrize("build", SEQUENTIAL)
def test_prompts_together_are_continued_as_each_alone(build) -> None:
    model = trained_a_little(build())
    prompts = random_tokens(6)[:, :3].view(2, 3, 3)
    together = model.generate(prompts, 2 * SEQ_LEN, temperature=0)
    alone = [model.generate(prompt, 2 * SEQ_LEN, temperature=0) for prompt in prompts.flatten(0, 1)]
    assert torch.equal(together.flatten(0, 1), torch.stack(alone))
    assert model.generate(prompts[:0], 2, temperature=0).shape == (0, 3, 5)


def test_together_prompts_are_sampled_apart_and_repeat_with_the_same_seed() -> None:
    model = trained_a_little(contractive_model())
    prompts = random_tokens(1)[:, :3].expand(8, -1)
    first, second = (
        model.generate(prompts, 20, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert len(first.unique(dim=0)) > 1


def test_greedy_generation_takes_the_likeliest_character() -> None:
    model = trained_a_little(contractive_model())
    prompt = random_tokens(1)[0, :3]
    assert model.generate(prompt, 1, temperature=0)[-1] == model(prompt[None])[0, -1].argmax()


@pytest.mark.parametrize("build", SEQUENTIAL)
def test_symbols_one_at_a_time_have_the_logits_of_all_at_once(build) -> None:
    model = trained_a_little(build())
    tokens = random_tokens(3)
    past: dict = {}
    with torch.no_grad():
        expected = model(tokens)
        parts = [model.extend(part, past) for part in tokens.split([5, 1, 1, 3, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("build", SEQUENTIAL)
def test_cached_generation_equals_encoding_everything_while_the_window_is_not_full(build) -> None:
    model = trained_a_little(build())
    plain = prompt = random_tokens(1)[0, :3]
    for _ in range(20):
        likeliest = model(plain[-SEQ_LEN:][None])[0, -1].argmax(-1, keepdim=True)
        plain = torch.cat([plain, likeliest])
    assert torch.equal(model.generate(prompt, SEQ_LEN - 2, temperature=0), plain[: SEQ_LEN + 1])
    assert torch.equal(model.generate(prompt, 20, temperature=0, keep=SEQ_LEN), plain)


def test_a_full_window_keeps_its_last_half_and_is_encoded_once() -> None:
    model = trained_a_little(contractive_model())
    encoded: list[int] = []
    extend = model.extend

    def counting(tokens: torch.Tensor, *others) -> torch.Tensor:
        encoded.append(tokens.shape[-1])
        return extend(tokens, *others)

    model.extend = counting  # type: ignore[method-assign]
    model.generate(random_tokens(1)[0, :3], 2 * SEQ_LEN)
    fresh = [3, *[1] * (SEQ_LEN - 3)]
    again = [SEQ_LEN // 2, *[1] * (SEQ_LEN // 2)]
    assert encoded == (fresh + again + again + again)[: 2 * SEQ_LEN]


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


@pytest.mark.parametrize("target", [0.0, -0.5, 1.0, 1.5, math.nan])
def test_a_target_that_is_no_contraction_is_refused_when_a_branch_is_made(target: float) -> None:
    with pytest.raises(ValueError, match=r"lipschitz_target must be in \(0, 1\), got"):
        ContractiveFeedForward(WIDTH, 2 * WIDTH, target)


@pytest.mark.parametrize("attention", [ContractiveL2Attention, DotProductAttention, L2Attention])
def test_a_position_bias_of_other_heads_is_refused_when_an_attention_is_made(attention) -> None:
    target = (0.5,) if attention is ContractiveL2Attention else ()
    position = RelativePositionBias(3, SEQ_LEN)
    with pytest.raises(ValueError, match="a position bias of 3 heads does not fit 4 heads"):
        attention(WIDTH, 4, position, *target)
    attention(WIDTH, 4, CausalMask(SEQ_LEN), *target)


def test_a_stack_for_more_positions_than_its_attentions_know_is_refused() -> None:
    blocks = list(contractive_model().stack.blocks)
    with pytest.raises(ValueError, match="block_00/attention knows 12 positions, fewer than seq_l"):
        InvertibleStack(blocks, SEQ_LEN + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": torch.empty(0, dtype=torch.long)}, "the prompt is empty"),
        ({"length": -1}, "length must not be negative, got -1"),
        ({"temperature": -1.0}, "temperature must not be negative, got -1.0"),
        ({"temperature": math.nan}, "temperature must not be negative, got nan"),
        ({"keep": 0}, "keep must be from 1 to the seq_len of 12, got 0"),
        ({"keep": -2}, "keep must be from 1 to the seq_len of 12, got -2"),
        ({"keep": SEQ_LEN + 1}, "keep must be from 1 to the seq_len of 12, got 13"),
    ],
)
def test_impossible_generation_is_refused_in_one_line(change: dict, message: str) -> None:
    arguments = {"prompt": torch.zeros(3, dtype=torch.long), "length": 20, **change}
    with pytest.raises(ValueError, match=message):
        contractive_model().generate(**arguments)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_texts_that_begin_alike_are_computed_alike_to_the_last_bit(
    dtype: torch.dtype, bounded: bool
) -> None:
    model = trained_a_little(contractive_model(certificate="causal", bounded=bounded))
    model = model.eval().requires_grad_(False).to(dtype)
    tokens = random_tokens(4)
    for place in range(1, SEQ_LEN):
        other = tokens.clone()
        other[:, place:] = random_tokens(4, seed=place)[:, place:]
        before, after = (model.stack(model.embedding(t))[:, :place] for t in (tokens, other))
        assert torch.equal(before, after)


def test_tight_local_bounds_of_a_branch_too_large_for_them_are_the_fast_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    branches = (
        ContractiveFeedForward(8, 16, 0.5),
        ContractiveL2Attention(8, 2, RelativePositionBias(2, 5), 0.5),
    )
    for branch in branches:
        x = 3 * torch.randn(2, 5, 8)
        tight, fast = (branch.local_bound(x, "frobenius", tight=each) for each in (True, False))
        assert (tight < fast).all()
        with monkeypatch.context() as patch:
            patch.setattr(branch_module, "MOST_TIGHT", 100)
            assert torch.equal(branch.local_bound(x, "frobenius", tight=True), fast)


@pytest.mark.parametrize(("tokens", "width", "bias"), [(1, 1, 1e2), (4, 2, 1e3), (8, 8, 1e4)])
@pytest.mark.parametrize("norm", ["token_max", "frobenius", "entry_max"])
def test_biases_that_cancel_put_no_error_above_its_bound(
    tokens: int, width: int, bias: float, norm: str
) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        held = "entry_max" if norm == "entry_max" else "spectral"
        branch = ContractiveFeedForward(width, 2, 0.9, norm=held).eval()
        u, v = torch.randn(width, 1), torch.randn(1, width)
        with torch.no_grad():
            branch.w_in.weight.copy_(torch.cat([u, -u], 1))
            branch.w_out.weight.copy_(torch.cat([v, -v], 0))
            branch.b_in.fill_(bias)
            branch.log_sharpness.zero_()
            layer, x = InvertibleResidual(branch), torch.randn(64, tokens, width)
            found = layer.inverse(layer(x), norm=norm, throw=False)
        assert (vector_norm(found.value - x, norm) <= found.error_bound).all()
        assert (found.status != InversionStatus.NOT_CONTRACTIVE).all()


@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_what_a_feed_forward_adds_up_inside_is_measured_in_the_norm_of_the_sequence(
    tokens: int,
) -> None:
    branch = ContractiveFeedForward(WIDTH, 2 * WIDTH, 0.7)
    branch.b_in.data.normal_()
    weights = branch.weights()
    inner = torch.diag(weights.b_in) @ weights.w_out
    assert branch.inner_size("token_max", tokens) == pytest.approx(inner.norm().item())
    whole = torch.stack([inner] * tokens).norm().item()
    assert branch.inner_size("frobenius", tokens) == pytest.approx(whole)
    largest = inner.norm(dim=0).max().item()
    assert branch.inner_size("entry_max", tokens) == pytest.approx(largest)


EVERY_KIND = [
    contractive_model,
    partial(contractive_model, bounded=True),
    partial(contractive_model, input_radius=2.0),
    model_of_the_past,
    scaled_model,
]


@pytest.mark.parametrize("build", EVERY_KIND)
@pytest.mark.parametrize("training", [True, False])
def test_weights_computed_together_are_those_each_layer_computes(build, training: bool) -> None:
    model, x = trained_a_little(build()), torch.randn(2, SEQ_LEN, WIDTH)
    with torch.set_grad_enabled(training):
        weights = model.stack.weights()
        together, alone = model.stack(x, weights), x
        for block in model.stack.blocks:
            alone = block(alone)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.stack(x, weights), together)
    if training:
        parameters = list(model.stack.parameters())
        found, expected = (
            torch.autograd.grad(y.sin().sum(), parameters) for y in (together, alone)
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("build", EVERY_KIND)
def test_weights_are_values_that_later_steps_do_not_change(build) -> None:
    model, tokens = trained_a_little(build()), random_tokens(2)
    with torch.no_grad():
        weights, x = model.weights(), model.embedding(tokens)
        z, certificate = model.stack(x, weights), certify(model, weights=weights)
        for name, parameter in model.stack.named_parameters():
            if "position" not in name:
                parameter.mul_(1.3)
        assert torch.equal(model.stack(x, weights), z)
        assert not torch.allclose(model.stack(x), z)
        solution = model.stack.inverse(z, weights, certificate)
        torch.testing.assert_close(solution.value, x, rtol=1e-6, atol=1e-6)
        assert certify(model, weights=weights) == certificate


def test_weights_for_training_are_not_inverted_with() -> None:
    model = scaled_model()
    weights = model.weights()
    with pytest.raises(ValueError, match="compute them under torch"):
        model.stack.inverse(torch.zeros(1, SEQ_LEN, WIDTH), weights)


def test_a_layer_and_a_stack_are_inverted_without_further_objects() -> None:
    layer = InvertibleResidual(ContractiveFeedForward(WIDTH, 2 * WIDTH, 0.9))
    x = torch.randn(3, 5, WIDTH)
    found = layer.inverse(layer(x))
    assert ((found.value - x).norm(dim=-1).amax(-1) <= found.error_bound).all()
    model = trained_a_little(contractive_model())
    x = model.embedding(random_tokens(2))
    solution = model.stack.inverse(model.stack(x).detach())
    assert ((solution.value - x).norm(dim=-1).amax(-1) <= solution.error_bound).all()


@pytest.mark.parametrize(
    "layer",
    [
        ContractiveL2Attention(WIDTH, 3, CausalMask(SEQ_LEN), 0.5),
        ContractiveFeedForward(WIDTH, 2 * WIDTH, 0.5),
        ActivationNorm(WIDTH),
    ],
)
def test_a_wrong_width_names_both(layer: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match="tokens have width 7, the layer has width 12"):
        layer(torch.randn(2, 5, 7))
