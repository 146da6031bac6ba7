"""How constants of attention grow with the length: ours, attacked, and of other people's models."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from invformer.branches.dot_product import PreNormBranch
from invformer.config.schema import AttentionName
from invformer.errors import DataError
from invformer.lipschitz.probe import LipschitzProbe
from invformer.numerics.ball import into_ball
from invformer.weights.position_bias import VisibilityMask
from studies import growth
from studies.growth import Case, Options, Result, cases, measure
from studies.power_law import fit
from studies.pretrained import BLOCK, pretrained, sequences
from studies.study import main
from tests.support.problems import dense_jacobian
from tests.support.saved_runs import Saved

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    """Layers of other sizes, here and after the test."""
    for kept in (growth.model_and_text, growth.random_layer):
        kept.cache_clear()
    yield
    growth.random_layer.cache_clear()


@pytest.mark.parametrize(
    ("attention", "causal"),
    [("dot_product", True), ("dot_product", False), ("l2", True), ("l2", False),
     ("contractive_l2", True)],
)  # fmt: skip
def test_a_constant_is_a_dense_singular_value(attention: AttentionName, causal: bool) -> None:
    case = Case(part=attention, layer=1, causal=causal, num_tokens=4, num_sequences=2, seed=0)
    found = measure(case, CPU)
    model, text = growth.model_and_text("", attention, 0)
    probe = LipschitzProbe(model, sequences(text, 4, 2, 0))
    attentions = probe.stacked()[0]
    layer, inputs = attentions.branches[1], into_ball(attentions.inputs[1], attentions.input_radius)
    if isinstance(layer, PreNormBranch):
        layer, inputs = layer.inner, layer.norm(inputs)
    if not causal:
        layer.position = VisibilityMask(torch.ones(4, 4, dtype=torch.bool))
    dense = [torch.linalg.matrix_norm(dense_jacobian(layer, x), 2) for x in inputs]
    torch.testing.assert_close(
        torch.tensor(found.constants), torch.stack(dense), rtol=1e-6, atol=1e-9
    )
    assert found.converged == 1


def test_an_exact_power_is_fitted_exactly() -> None:
    points = [(n, [3 * n**0.25, 6 * n**0.25]) for n in (4, 9, 30, 100)]
    found = fit(points)
    assert found is not None
    assert found.exponent == pytest.approx(0.25)
    assert found.coefficient == pytest.approx(3 * math.sqrt(2))
    assert found.low == pytest.approx(0.25)
    assert found.high == pytest.approx(0.25)
    assert str(found) == "4.24 n^0.25 [0.25, 0.25]"
    assert fit(points[:2]) is None
    assert fit(points, "(n-1)") == replace(found, variable="(n-1)")


def test_the_attack_gives_a_square_root_to_one_head_and_nothing_to_distances() -> None:
    chosen = cases(Options(sizes=[], attack_sizes=[7, 15, 31], num_attacked=1))
    rows = [(case, measure(case, CPU)) for case in chosen if case.attacked == "head"]
    found = {part[0][0].part: one for part, one in growth.fits(rows)}
    dot_product, l2 = found["dot_product"], found["l2"]
    assert dot_product is not None
    assert l2 is not None
    assert dot_product.exponent == pytest.approx(0.5, abs=1e-6)  # of n - 1, not of n
    assert l2.exponent < 0.2
    summary = growth.summarise(rows)
    assert summary.outcome == "not in the paper"  # which measured the layer
    assert "(n-1)^0.50 [0.50, 0.50]" in str(summary)


def naive_attack(x: Tensor, layer: tuple[Tensor, ...], attacked: str, causal: bool) -> Tensor:
    """Token by token and head by head."""
    w_q, w_k, w_v, w_o = layer[:4]
    rows = []
    for i in range(len(x)):
        seen = x[: i + 1] if causal else x
        heads = []
        for h in range(1 if attacked == "head" else len(w_q)):
            p = (seen @ w_k[h] @ (x[i] @ w_q[h]) / math.sqrt(w_q.shape[-1])).softmax(0)
            heads.append(p @ seen @ w_v[h])
        rows.append(torch.cat(heads))
    y = torch.stack(rows)
    return y @ w_o if attacked == "layer" else y


@pytest.mark.parametrize("attacked", ["head", "heads", "layer"])
@pytest.mark.parametrize("causal", [False, True])
def test_an_attacked_layer_has_its_dense_constant(
    attacked: growth.Attacked, causal: bool, monkeypatch
) -> None:
    monkeypatch.setattr(growth, "GPT2_WIDTH", 12)
    monkeypatch.setattr(growth, "GPT2_HEADS", 3)
    case = Case(
        part="dot_product", causal=causal, num_tokens=5, attacked=attacked, radius=40.0,
        num_sequences=2, seed=3,
    )  # fmt: skip
    found = measure(case, CPU).constants
    for seed, constant in zip((3, 4), found, strict=True):
        layer = growth.random_layer(seed)
        lone, others = layer[-1]
        x = 40.0 * torch.stack([lone, others, others, others, others])
        f = partial(naive_attack, layer=layer, attacked=attacked, causal=causal)
        dense = torch.func.jacrev(f)(x).flatten(2).flatten(0, 1)
        assert constant == pytest.approx(torch.linalg.matrix_norm(dense, 2).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("exponent", "coefficient", "outcome"),
    [
        (0.5, 1.0, "reproduced"), (0.5, 9.0, "partly reproduced"),
        (0.4, 1.0, "partly reproduced"), (0.4, 9.0, "not reproduced"),
    ],
)  # fmt: skip
def test_the_verdict_is_about_the_layer(exponent: float, coefficient: float, outcome: str) -> None:
    for sizes, expected in (([5, 17, 65], outcome), ([5, 17], "not in the paper")):
        rows = []
        for case in cases(Options(sizes=[], attack_sizes=sizes)):
            is_layer = case.attacked == "layer"
            constant = coefficient * case.num_tokens**exponent if is_layer else 30.0
            rows.append((case, Result(2 * [constant], 1.0)))
        assert growth.summarise(rows).outcome == expected


def test_sequences_do_not_overlap_and_longer_ones_begin_alike() -> None:
    tokens = torch.arange(1000)
    short, long = (sequences(tokens, n, 5, 3) for n in (10, 90))
    assert torch.equal(short, long[:, :10])
    assert long.unique().numel() == long.numel()
    assert not torch.equal(short, sequences(tokens, 10, 5, 4))
    with pytest.raises(DataError, match="too few"):
        sequences(tokens, 200, 5, 0)


def test_a_trained_model_of_ours_is_measured(tmp_path, capsys) -> None:
    saved = Saved(tmp_path, "model.num_layers=2")
    saved.save()
    sizes = {"sizes": [4, 8, 16, 32], "attack_sizes": []}
    chosen = cases(Options(checkpoint=str(tmp_path), num_sequences=2, **sizes))
    assert "longer sizes are left out" in capsys.readouterr().out
    assert {(c.part, c.num_tokens, c.causal) for c in chosen} == {
        ("contractive_l2", n, True) for n in (4, 8, 16)
    }
    result = measure(chosen[0], CPU)
    assert len(result.constants) == 2
    # Frobenius: the target is in token_max, √N of it in frobenius.
    assert 0 < max(result.constants) <= saved.config.model.lipschitz_target * math.sqrt(4)


WORDS = "abcdefghij"
SIZE = {"vocab_size": 10, "initializer_range": 0.5, "bos_token_id": None, "eos_token_id": None}


@pytest.fixture(params=["gpt2", "bert"])
def saved(request, tmp_path) -> dict[str, str]:
    """The options for a model, masked or not, and a text on disk, one token a character."""
    missing = "pip install 'invformer[transformers]'"
    transformers = pytest.importorskip("transformers", reason=missing)
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    if request.param == "gpt2":
        config = transformers.GPT2Config(n_positions=16, n_embd=8, n_layer=2, n_head=2, **SIZE)
        model = transformers.GPT2LMHeadModel(config)  # AutoModel leaves the head out
    else:
        config = transformers.BertConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=16, **SIZE,
        )  # fmt: skip
        model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / request.param)
    found = Tokenizer(models.WordLevel({c: i for i, c in enumerate(WORDS)}, unk_token="a"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=found)
    tokenizer.save_pretrained(tmp_path / request.param)
    (tmp_path / "text.txt").write_text("".join(WORDS[i * i % 7 + i % 3] for i in range(300)))
    return {"pretrained": str(tmp_path / request.param), "text": str(tmp_path / "text.txt")}


def test_every_attention_and_block_has_its_dense_constant(saved) -> None:
    is_bert = saved["pretrained"].endswith("bert")
    parts = ["attention", "attention.self", BLOCK] if is_bert else ["attn", BLOCK]
    chosen = cases(Options(**saved, sizes=[5], num_sequences=1))
    assert [(c.causal, c.part, c.layer) for c in chosen] == [
        (mask, part, layer) for mask in (not is_bert, is_bert) for part in parts for layer in (0, 1)
    ]
    model = pretrained(saved["pretrained"], saved["text"])
    texts = sequences(model.tokens, 5, 1, 0)
    for case in chosen:
        found = measure(case, CPU)
        assert found.converged == 1
        for constant, text in zip(found.constants, texts, strict=True):
            j = model.jacobian(case.layer, case.part, case.causal, text)
            rows = [j.vjp(row[None]).view(5, 8) for row in torch.eye(40, dtype=torch.float64)]
            dense = torch.stack(rows).view(5, 8, 5, 8)
            later = torch.ones(5, 5).triu(1).bool()
            assert (dense.transpose(1, 2)[later].abs().max() > 0) is not case.causal
            expected = torch.linalg.matrix_norm(dense.view(40, 40), 2).item()
            assert constant == pytest.approx(expected, rel=1e-5)


def test_the_products_are_those_of_difference_quotients(saved) -> None:
    model = pretrained(saved["pretrained"], saved["text"])
    tokens = sequences(model.tokens, 4, 1, 0)[0]
    block = model.model.get_submodule(model.blocks[0])
    kept = []
    hook = block.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    model.model(**model.call(tokens, None))
    hook.remove()
    x, v = kept[0], torch.randn_like(kept[0])
    mask = model.call(tokens, model.masks[0])["attention_mask"]
    plus, minus = (block(x + h * v, attention_mask=mask) for h in (1e-6, -1e-6))
    plus, minus = (y[0] if isinstance(y, tuple) else y for y in (plus, minus))
    expected = (plus - minus).view(1, -1) / 2e-6
    found = model.jacobian(0, BLOCK, model.masks[0], tokens).jvp(v.view(1, -1))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("exponent", "outcome"), [(0.25, "reproduced"), (0.5, "not reproduced")])
def test_the_verdict_is_about_attention_modules(exponent: float, outcome: str) -> None:
    rows = [
        (
            Case(path="m", text="t", part=part, layer=i, num_tokens=n, num_sequences=2, seed=0),
            Result([n ** (0.9 if part == BLOCK else exponent)] * 2, 1.0),
        )
        for part in ("attn", BLOCK) for i in range(2) for n in (4, 16, 64)
    ]  # fmt: skip
    assert growth.summarise(rows).outcome == outcome


def test_without_the_library_one_line_names_the_extra(saved, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = [f"{key}={value}" for key, value in saved.items()]
    assert main(growth.STUDY, [*words, f"out={tmp_path / 'out'}"]) == 2
    assert "pip install 'invformer[transformers]'" in capsys.readouterr().err
