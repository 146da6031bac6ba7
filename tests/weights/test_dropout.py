"""Masks are a function of seed, sample and layer, and look random."""

import itertools

import pytest
import torch
from torch import nn

from invformer.nn import NoCertificateError, certify
from invformer.weights.dropout import Dropout, sample_keys, set_sample_keys
from tests.support.builders import SEQ_LEN, WIDTH, contractive_model

ONES = torch.ones(6, 50, 40)


def masks(first: int, count: int, seed: int = 3, p: float = 0.2) -> list[torch.Tensor]:
    """The masks of two layers."""
    model = nn.Sequential(Dropout(p), nn.Sequential(Dropout(p)))
    set_sample_keys(model, sample_keys(seed, first, count))
    return [layer(ONES[:count].clone()) * (1 - p) for layer in (model[0], model[1][0])]


def test_a_sample_has_the_same_masks_in_every_batch() -> None:
    for whole, begin, end in zip(masks(6, 6), masks(6, 2), masks(8, 4), strict=True):
        assert torch.equal(whole, torch.cat([begin, end]))
    assert all(map(torch.equal, masks(6, 6), masks(6, 6)))


def test_other_samples_layers_and_seeds_have_masks_that_are_independent() -> None:
    found = [
        *masks(0, 3),
        *masks(1 << 32, 3),
        *masks(0, 3, seed=4),
        *masks(0, 3, seed=(1 << 32) - 1),
    ]
    rows = torch.cat([mask.flatten(1) for mask in found]).double()
    correlation = torch.corrcoef(rows)
    for i, j in itertools.combinations(range(len(rows)), 2):
        assert abs(correlation[i, j]) < 5 / rows.shape[1] ** 0.5


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 0.9])
def test_a_mask_drops_the_share_that_was_asked_for(p: float) -> None:
    mask = torch.stack(masks(0, 6, p=p))
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert mask.unique().tolist() == pytest.approx([0, 1])
    assert float((mask == 0).double().mean()) == pytest.approx(p, abs=5 * deviation)


def test_without_keys_or_training_it_is_pytorchs() -> None:
    layer = Dropout(0.5)
    torch.manual_seed(0)
    ours = layer(ONES)
    torch.manual_seed(0)
    assert torch.equal(ours, nn.functional.dropout(ONES, 0.5))
    set_sample_keys(layer, sample_keys(0, 0, 6))
    assert torch.equal(layer.eval()(ONES), ONES)


@pytest.mark.parametrize("scaled", [False, True])
def test_dropout_in_certified_branches_changes_training_and_nothing_else(scaled: bool) -> None:
    plain, dropped = (contractive_model(scaled=scaled, dropout=p).stack for p in (0.0, 0.3))
    dropped.load_state_dict(plain.state_dict())
    x = torch.randn(2, SEQ_LEN, WIDTH)
    z = plain(x).detach()
    for folded in (False, True):
        assert not torch.allclose(dropped(x, folded=folded), z, rtol=0.01)
    assert torch.equal(dropped.eval()(x), z)
    with torch.no_grad():
        for mode in (True, False):
            assert torch.equal(dropped.train(mode).inverse(z).value, plain.inverse(z).value)
    assert certify(dropped) == certify(plain)


def test_another_module_in_the_place_of_dropout_is_not_certified() -> None:
    stack = contractive_model(dropout=0.3).stack
    stack.blocks[1].attention.dropout = nn.LeakyReLU(2.0)
    with pytest.raises(NoCertificateError, match="block_01/attention: no proof is known for Leaky"):
        certify(stack)
