"""Models of Hugging Face's transformers are measured as they are, masks and caches included."""

import pytest
import torch

from invformer.lipschitz.submodules import local_constants
from tests.lipschitz.foreign import agree, dense_constants

transformers = pytest.importorskip("transformers", reason="pip install 'invformer[transformers]'")
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def gpt2(**options) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=16, n_embd=8, n_layer=2, n_head=2, initializer_range=0.5,
        bos_token_id=None, eos_token_id=None, **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(**options) -> torch.nn.Module:
    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=11, intermediate_size=16, max_position_embeddings=16, initializer_range=0.5,
        **size, **options,
    )  # fmt: skip
    return transformers.BertModel(config)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [gpt2, bert])
def test_every_submodule_is_measured_as_its_dense_jacobian_says(build, attention: str) -> None:
    model = build(attn_implementation=attention)
    inputs = {"input_ids": TOKENS, "attention_mask": MASK}
    found = local_constants(model, inputs, rtol=1e-4)
    blocks = ["transformer.h.1", "transformer.h.1.attn"] if build is gpt2 else ["encoder.layer.1"]
    assert found.values.keys() >= set(blocks)
    assert set(blocks) <= found.notes.keys() or attention == "eager"
    without = {"use_cache": False} if build is gpt2 else {}  # the oracle would write to it
    agree(found.values, dense_constants(model, found.values, **inputs, **without))


def test_a_cache_that_is_given_stays_as_it_is() -> None:
    model = gpt2().eval()
    with torch.no_grad():
        cache = model(TOKENS[:, :2], use_cache=True).past_key_values
    rest = {"input_ids": TOKENS[:, 2:], "past_key_values": cache}
    found = local_constants(model, rest)
    assert cache.get_seq_length() == 2
    assert local_constants(model, rest) == found
    # The constants of the last tokens are those of ordinary blocks at the same states, so that a
    # model without a cache, given all tokens, has larger ones.
    whole = local_constants(model, TOKENS)
    assert 0 < found.values["transformer.h.1.attn"] < whole.values["transformer.h.1.attn"]
