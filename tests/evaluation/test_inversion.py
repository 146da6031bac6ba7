"""A text goes up and comes back, and the report says how sure that is."""

import math
from dataclasses import replace

import pytest
import torch

from invformer.errors import CertificateViolation
from invformer.evaluation.inversion import round_trip
from invformer.nn.proof import certify
from tests.support.builders import VOCAB, contractive_model, random_tokens, trained_a_little


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("certificate", ["token_max", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_character_is_proven(dtype: torch.dtype, certificate: str, bounded: bool) -> None:
    model = trained_a_little(contractive_model(0.7, certificate, bounded=bounded)).eval()
    tokens = named_tokens(4)
    trip = round_trip(model, tokens, dtype)
    assert trip.certificate.dtype == trip.reconstruction().dtype == str(dtype)[6:]
    assert torch.equal(trip.decoded, tokens)
    proof = trip.proof()
    assert proof.proven.all()
    assert 0 < proof.distance.max() < proof.radius.min() < proof.margin.min()
    if certificate == "causal":
        assert trip.reconstruction().error_bound == math.inf


def named_tokens(batch: int) -> torch.Tensor:
    """Random symbols without the unknown one."""
    return random_tokens(batch).clamp(min=1)


def test_a_proven_character_that_is_wrong_is_a_violated_certificate() -> None:
    model = trained_a_little(contractive_model()).eval()
    tokens = named_tokens(2)
    wrong = tokens.clone()
    wrong[1, 3] = wrong[1, 3] % (VOCAB - 1) + 1
    trip = replace(round_trip(model, wrong, torch.float64), tokens=tokens)
    assert trip.reconstruction().characters_recovered == 1 - 1 / tokens.numel()
    with pytest.raises(CertificateViolation, match="character 3 of sequence 1"):
        trip.proof()


@pytest.mark.parametrize("bounded", [False, True])
def test_diagonal_blocks_of_a_stack_held_in_token_max_have_a_certificate_too(bounded: bool) -> None:
    model = trained_a_little(contractive_model(bounded=bounded)).eval()
    whole, blocks = certify(model), certify(model, kind="causal")
    assert (whole.kind, blocks.kind, blocks.total) == ("global", "causal", None)
    for name, bound in blocks.per_branch.items():
        assert bound <= whole.per_branch[name] * (1 + 1e-12)
        assert bound < whole.per_branch[name] or not name.endswith("attention")
