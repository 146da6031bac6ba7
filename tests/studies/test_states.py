"""One position at a time: the states, preimages and symbols of whole texts."""

import pytest
import torch

from studies.states import OUTSIDE, Prefix, decode, misfit, undoing
from tests.support.builders import (
    SEQ_LEN,
    baseline,
    contractive_model,
    coupling,
    random_tokens,
    scaled_model,
    trained_a_little,
)

MODELS = {
    "strictly causal": scaled_model,
    "sees itself": lambda: contractive_model(bounded=True),
    "coupling": coupling,
    "dot product": baseline,
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_states_and_preimages_behind_known_symbols_are_those_of_the_whole_text(name: str) -> None:
    with torch.enable_grad():
        model, tokens = trained_a_little(MODELS[name]()).eval(), random_tokens(3)
    x = model.embedding(tokens)
    z, prefix = model.stack(x), Prefix(model, 3)
    for i in range(SEQ_LEN):
        one = slice(i, i + 1)
        torch.testing.assert_close(prefix.states(prefix.embed(tokens[:, one])), z[:, one])
        if name != "dot product":
            torch.testing.assert_close(prefix.preimage(z[:, one], 1e-12), x[:, one])
        prefix.append(tokens[:, i])
    if name != "dot product":
        torch.testing.assert_close(undoing(model)(z), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_decoded_from_all_symbols_and_from_a_few(name: str) -> None:
    model, tokens = trained_a_little(MODELS[name]()).eval(), random_tokens(2)
    z = model.stack(model.embedding(tokens)).detach()
    assert torch.equal(decode(model, z, None, torch.full_like(z, 1e-3)).tokens, tokens)
    if name != "dot product":
        assert torch.equal(decode(model, z, 2).tokens, tokens)


def test_more_candidates_are_tried_where_known_damage_rules_out_the_first() -> None:
    model, tokens = trained_a_little(scaled_model()).eval(), random_tokens(1)
    z = model.stack(model.embedding(tokens)).detach()
    far = z + 0.3 * z.std() * torch.randn(z.shape)
    within = (far - z).abs() * 1.01
    assert torch.equal(decode(model, far, 1, within).tokens, tokens)
    prefix = Prefix(model, 1)
    with torch.no_grad():
        fits = misfit(prefix, torch.arange(11)[None], far[:, :1], within[:, :1])
    assert (fits < OUTSIDE).nonzero()[:, 1].tolist() == tokens[0, :1].tolist()
    far[..., 0], within[..., 0] = 1e3, torch.inf  # a channel that is lost
    assert torch.equal(decode(model, far, None, within).tokens, tokens)
