"""A text goes up and comes back, and the report says how sure that is."""

import math
import re
from dataclasses import asdict

import pytest
import torch

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
@pytest.mark.parametrize("target", [0.7, 0.97])
def test_every_character_is_proven_even_where_no_error_bound_helps(
    target: float, certificate: str, bounded: bool
) -> None:
    model = trained_a_little(contractive_model(target, certificate, bounded=bounded)).eval()
    tokens = random_tokens(4)
    decoded, report = invert_text(model, tokens, certify(model), dtype=torch.float64)
    assert torch.equal(decoded, tokens)
    assert report.characters_certified == 1
    assert 0 < report.preimage_bound < 2 * report.decoding_margin
    if certificate == "causal":
        assert report.error_bound == math.inf


@pytest.mark.parametrize("place", [0, SEQ_LEN - 1])
def test_a_text_with_one_wrong_symbol_is_not_proven(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained_a_little(contractive_model(certificate="causal", bounded=True)).eval()
    tokens = random_tokens(4)
    wrong = tokens.clone()
    wrong[:2, place] = (wrong[:2, place] + 1) % VOCAB
    monkeypatch.setattr(model.embedding, "nearest_tokens", lambda x: wrong)
    decoded, report = invert_text(model.double(), tokens, certify(model), dtype=torch.float64)
    assert torch.equal(decoded, wrong)
    assert report.characters_recovered == 1 - 2 / tokens.numel()
    assert report.characters_certified == 0.5


@pytest.mark.parametrize("bounded", [False, True])
def test_diagonal_blocks_of_a_stack_held_in_token_max_have_a_certificate_too(bounded: bool) -> None:
    model = trained_a_little(contractive_model(bounded=bounded)).eval()
    whole, blocks = certify(model), certify(model, kind="causal")
    assert (whole.kind, blocks.kind, blocks.total) == ("global", "causal", None)
    for name, bound in blocks.per_branch.items():
        assert bound <= whole.per_branch[name] * (1 + 1e-12)
    attention = [name for name in whole.per_branch if name.endswith("attention")]
    assert all(blocks.per_branch[name] < whole.per_branch[name] for name in attention)


def test_what_an_inversion_and_its_evidence_cost_is_timed_where_it_is_asked_for() -> None:
    model = trained_a_little(contractive_model()).eval()
    certificate, tokens = certify(model), random_tokens(2)
    decoded, report = invert_text(model, tokens, certificate, timed=True)
    assert torch.equal(decoded, tokens)
    assert min(report.seconds_forward, report.seconds_inverse, report.seconds_inverse_bare) > 0
    assert re.fullmatch(
        r"\d+\.\d forward passes in float32, \d+\.\d without evidence",
        inversion_cost(asdict(report)),
    )
    _, report = invert_text(model, tokens, certificate, dtype=torch.float64, timed=True)
    assert report.seconds_inverse_bare is None
    assert re.fullmatch(
        r"\d+\.\d forward passes in float64, \d+\.\d to float32's accuracy",
        inversion_cost(asdict(report)),
    )
    _, report = invert_text(model, tokens, certificate)
    assert report.seconds_forward is report.seconds_inverse is None


def test_no_text_is_nothing_to_invert() -> None:
    model = contractive_model().eval()
    with pytest.raises(ValueError, match="there is nothing to invert"):
        invert_text(model, random_tokens(2)[:0], certify(model), dtype=torch.float64)
