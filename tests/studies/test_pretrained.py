"""Layers of models of transformers, masked and unmasked: a tiny GPT-2 and a tiny BERT."""

import sys

import pytest
import torch

from studies import growth
from studies.growth import Case, Options, Result, cases, measure
from studies.pretrained import BLOCK, pretrained, sequences
from studies.study import main

transformers = pytest.importorskip("transformers", reason="pip install 'invformer[transformers]'")
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

CPU = torch.device("cpu")
WORDS = "abcdefghij"
SIZE = {"vocab_size": 10, "initializer_range": 0.5, "bos_token_id": None, "eos_token_id": None}


def tokenizer() -> "transformers.PreTrainedTokenizerFast":
    """One token a character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    found = Tokenizer(models.WordLevel({c: i for i, c in enumerate(WORDS)}, unk_token="a"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found)


@pytest.fixture(params=["gpt2", "bert"])
def saved(request, tmp_path) -> dict[str, str]:
    """The options for a model and a text on disk."""
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
    tokenizer().save_pretrained(tmp_path / request.param)
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
