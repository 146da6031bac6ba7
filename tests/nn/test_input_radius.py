"""Branches that see their inputs in a ball: the same constants, and nothing that multiplies."""

import pytest
import torch

from invformer.nn.proof import certify
from invformer.nn.residual import InvertibleResidual
from tests.support.builders import SEQ_LEN, contractive_model, random_tokens, trained_a_little
from tests.support.problems import dense_jacobian

# Small enough to bend: tokens of these models have a length of about √12.
RADIUS = 2.0
MODELS = [
    {},
    {"certificate": "causal"},
    {"bounded": True},
    {"bounded": True, "certificate": "causal", "strictly_causal": True, "kernel": 3},
]


def model_in_a_ball(**options):
    return trained_a_little(contractive_model(input_radius=RADIUS, **options)).eval()


def layers_and_inputs(model, tokens):
    x = model.embedding(tokens).detach()
    for name, layer in model.stack.layers():
        if isinstance(layer, InvertibleResidual):
            yield name, layer, x
        x = layer(x).detach()


@pytest.mark.parametrize("options", MODELS)
def test_no_jacobian_exceeds_the_bounds_of_the_branches(options: dict) -> None:
    model, tokens = model_in_a_ball(**options), random_tokens(1)
    norms = ("token_max", "frobenius")
    bounds = {norm: certify(model, norm, torch.float64, "global").per_branch for norm in norms}
    for name, layer, x in layers_and_inputs(model, tokens):
        dense = dense_jacobian(layer.f, x[0])
        assert torch.linalg.matrix_norm(dense, 2).item() <= bounds["frobenius"][name]
        rows = dense.unflatten(0, (SEQ_LEN, -1))
        # ‖X‖_F ≤ 1 holds every token at 1, so a token's rows gain no more than in token_max.
        assert torch.linalg.matrix_norm(rows, 2).max().item() <= bounds["token_max"][name]


@pytest.mark.parametrize("options", MODELS)
def test_the_output_of_a_branch_stays_bounded_however_large_its_input(options: dict) -> None:
    model = model_in_a_ball(**options)
    for _, layer, x in layers_and_inputs(model, random_tokens(2)):
        added = [layer.f(scale * x).norm(dim=-1).max().item() for scale in (1e3, 1e6)]
        assert added[1] == pytest.approx(added[0], rel=1e-3)


def test_nothing_is_claimed_in_entry_max() -> None:
    model = model_in_a_ball()
    with pytest.raises(ValueError, match="entry_max"):
        certify(model, norm="entry_max")
