"""A text goes up and comes back, and the report says how sure that is."""

import math
import re
from dataclasses import asdict

import pytest
import torch

from invformer.errors import CertificateViolation
from invformer.evaluation.inversion import invert_text
from invformer.evaluation.report import inversion_cost
from invformer.nn.certificate import certify
from tests.nn.builders import (
    SEQ_LEN,
    VOCAB,
    contractive_model,
    random_tokens,
    trained_a_little,
)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("certificate", ["token_max", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_character_is_proven_whatever_an_error_bound_says(
    dtype: torch.dtype, certificate: str, bounded: bool
) -> None:
    model = trained_a_little(contractive_model(0.7, certificate, bounded=bounded)).eval()
    tokens = named_tokens(4)
    decoded, report = invert_text(model, tokens, certify(model), dtype=dtype)
    assert torch.equal(decoded, tokens)
    assert report.characters_proven == 1
    assert 0 < report.distance < report.radius < report.margin
    if certificate == "causal":
        assert report.error_bound == math.inf


def named_tokens(batch: int) -> torch.Tensor:
    """Random symbols without the unknown one."""
    return random_tokens(batch).clamp(min=1)


@pytest.mark.parametrize("place", [0, SEQ_LEN - 1])
def test_a_text_with_one_wrong_symbol_is_proven_up_to_there(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained_a_little(contractive_model(certificate="causal", bounded=True)).eval()
    tokens = named_tokens(4)
    wrong = tokens.clone()
    wrong[:2, place] = wrong[:2, place] % (VOCAB - 1) + 1
    monkeypatch.setattr(model.embedding, "nearest_tokens", lambda x: wrong)
    decoded, report = invert_text(model.double(), tokens, certify(model), dtype=torch.float64)
    assert torch.equal(decoded, wrong)
    assert report.characters_recovered == 1 - 2 / tokens.numel()
    assert report.characters_proven == pytest.approx((1 + place / SEQ_LEN) / 2)


def test_a_proven_character_that_is_wrong_is_a_violated_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = trained_a_little(contractive_model()).eval()
    tokens = named_tokens(2)
    wrong = tokens.clone()
    wrong[1, 3] = wrong[1, 3] % (VOCAB - 1) + 1
    at_wrong = model.stack(model.embedding(wrong)).detach()
    monkeypatch.setattr(type(model.stack), "forward", lambda self, x, weights: at_wrong.to(x))
    with pytest.raises(CertificateViolation, match="character 3 of sequence 1"):
        invert_text(model, tokens, certify(model), dtype=torch.float64)
    assert invert_text(model, tokens, certify(model), prove=False)[1].characters_proven is None


def test_a_certificate_for_another_format_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained_a_little(contractive_model()).eval()
    certificate, used = certify(model), []
    inverse = type(model.stack).inverse

    def spy(self, z, weights, certificate, **options):
        used.append(certificate.dtype)
        return inverse(self, z, weights, certificate, **options)

    monkeypatch.setattr(type(model.stack), "inverse", spy)
    for dtype in (torch.float64, torch.float32):
        invert_text(model, named_tokens(1), certificate, dtype=dtype, prove=False)
    assert used == ["float64", "float32"]


def test_what_does_not_converge_is_counted_as_it_is() -> None:
    model = trained_a_little(contractive_model(0.97)).eval()
    options = {"max_steps": 1, "prove": False}
    _, report = invert_text(model, named_tokens(4), certify(model), **options)
    assert report.converged_fraction < 1


@pytest.mark.parametrize("bounded", [False, True])
def test_diagonal_blocks_of_a_stack_held_in_token_max_have_a_certificate_too(bounded: bool) -> None:
    model = trained_a_little(contractive_model(bounded=bounded)).eval()
    whole, blocks = certify(model), certify(model, kind="causal")
    assert (whole.kind, blocks.kind, blocks.total) == ("global", "causal", None)
    for name, bound in blocks.per_branch.items():
        assert bound <= whole.per_branch[name] * (1 + 1e-12)
    attention = [name for name in whole.per_branch if name.endswith("attention")]
    assert all(blocks.per_branch[name] < whole.per_branch[name] for name in attention)


def test_what_an_inversion_costs_is_timed_where_it_is_asked_for() -> None:
    model = trained_a_little(contractive_model()).eval()
    certificate, tokens = certify(model), random_tokens(2)
    decoded, report = invert_text(model, tokens, certificate, dtype=torch.float64, timed=True)
    assert torch.equal(decoded, tokens)
    assert min(report.seconds_forward, report.seconds_inverse, report.seconds_inverse_coarse) > 0
    assert re.fullmatch(
        r"\d+\.\d forward passes in float64, \d+\.\d to float32's accuracy \(by the clock\)",
        inversion_cost(asdict(report)),
    )
    _, report = invert_text(model, tokens, certificate)
    assert report.seconds_forward is report.seconds_inverse is None


def test_no_text_is_nothing_to_invert() -> None:
    model = contractive_model().eval()
    with pytest.raises(ValueError, match="there is nothing to invert"):
        invert_text(model, random_tokens(2)[:0], certify(model), dtype=torch.float64)
