"""Every branch's Jacobian at the probe text, stacked: equal to each branch's own."""

import copy

import pytest
import torch

from invformer.evaluation.lipschitz import lipschitz_row
from invformer.lipschitz.branch_jacobians import (
    branch_jacobians,
    residual_branches,
    stacked_weights,
)
from invformer.lipschitz.probe import LipschitzProbe
from invformer.nn.branch import frozen_weights
from invformer.nn.certificate import certify
from invformer.numerics.linear_map import dense_jacobian
from tests.nn.builders import (
    SEQ_LEN,
    baseline,
    contractive_model,
    l2_baseline,
    random_tokens,
    trained_a_little,
)


@pytest.mark.parametrize("certificate", ["token_max", "causal"])
def test_stacked_weights_are_the_effective_weights(certificate: str) -> None:
    model = trained_a_little(contractive_model(certificate=certificate))
    branches = [branch for _, branch in model.stack.branches()]
    for members in (branches[0::2], branches[1::2]):
        with torch.no_grad():
            for stacked, weights in zip(
                stacked_weights(members),
                zip(*(b.weights() for b in members), strict=True),
                strict=True,
            ):
                torch.testing.assert_close(stacked, torch.stack(weights), rtol=1e-12, atol=0)


def test_weights_that_are_held_are_used_as_they_are() -> None:
    model = trained_a_little(contractive_model())
    branches = [branch for _, branch in model.stack.branches()]
    with frozen_weights(model), torch.no_grad():
        for branch in branches:
            branch._frozen = type(branch._frozen)(*(2 * w for w in branch._frozen))
        assert torch.equal(stacked_weights(branches[0::2]).g[1], branches[2].weights().g)
        w_out = stacked_weights(branches[1::2]).w_out
        assert torch.equal(w_out[1], branches[3].weights().w_out)


@pytest.mark.parametrize("build", [contractive_model, baseline, l2_baseline])
def test_products_are_those_of_the_dense_jacobian_of_every_branch(build) -> None:
    model = trained_a_little(build())
    tokens = random_tokens(2, seed=3)
    branches = {name: (b, x) for name, b, x in residual_branches(model, model.embedding(tokens))}
    with torch.no_grad():
        groups = branch_jacobians(model, tokens, num_vectors=3)
    assert [n for g in groups for n in g.names] != []
    for group in groups:
        count = 1 if group.per_token else 3
        vectors = torch.randn(count, *group.jacobian.shape)
        given = vectors[0] if group.per_token else vectors
        with torch.no_grad():
            pushed, pulled = group.jacobian.jvp(given), group.jacobian.vjp(given)
        pushed, pulled = (p.reshape(vectors.shape) for p in (pushed, pulled))
        for index, name in enumerate(group.names):
            branch, x = branches[name]
            for sample in range(2):
                dense = dense_jacobian(branch, x[sample].detach()).detach()
                for v, up, down in zip(vectors, pushed, pulled, strict=True):
                    flat = v[index, sample].flatten()
                    torch.testing.assert_close(up[index, sample].flatten(), dense @ flat)
                    torch.testing.assert_close(down[index, sample].flatten(), dense.T @ flat)


def test_every_branch_is_measured_once_in_every_norm() -> None:
    for model in (contractive_model(), baseline()):
        names = [name for name, _, _ in residual_branches(model, model.embedding(random_tokens(1)))]
        estimates = LipschitzProbe(model, random_tokens(1)).estimate()
        for norm in ("token_max", "frobenius"):
            assert sorted(estimates[norm]) == sorted(names)


def test_a_prefix_of_the_text_has_the_smaller_constants() -> None:
    """Causal branches: the prefix's Jacobian is a block of the whole one."""
    model = trained_a_little(contractive_model())
    tokens = random_tokens(1, seed=5)
    part, whole = (
        LipschitzProbe(model, text, num_steps=300).estimate() for text in (tokens[:, :6], tokens)
    )
    for norm, estimates in part.items():
        for name, estimate in estimates.items():
            assert estimate.value.item() <= whole[norm][name].value.item() * (1 + 1e-6)


def test_looking_leaves_model_and_random_numbers_alone() -> None:
    model = contractive_model()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    LipschitzProbe(model, random_tokens(1)).look()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


# Attention of either kind, and a model whose tokens see only the past of their own.
CAUSAL = [
    {},
    {"bounded": True},
    {"bounded": True, "strictly_causal": True, "kernel": 3},
]


@pytest.mark.parametrize("options", CAUSAL)
def test_under_a_causal_certificate_diagonal_blocks_are_followed(options: dict) -> None:
    model = trained_a_little(contractive_model(certificate="causal", **options)).eval()
    tokens = random_tokens(1)
    probe = LipschitzProbe(model, tokens, num_steps=200)
    estimates = probe.estimate()["own_token"]
    bounds = certify(model, dtype=torch.float64).per_branch
    x = model.embedding(tokens).detach()
    for name, branch, at in residual_branches(model, x):
        with frozen_weights(branch):
            dense = dense_jacobian(branch, at[0].detach()).unflatten(0, (SEQ_LEN, -1))
        blocks = dense.unflatten(-1, (SEQ_LEN, -1)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        true = torch.linalg.matrix_norm(blocks, 2).max().item()
        found = estimates[name].value.item()
        assert found <= true * (1 + 1e-12)
        assert found == pytest.approx(true, rel=1e-3)
        assert true <= bounds[name]


@pytest.mark.parametrize("options", CAUSAL)
def test_products_with_diagonal_blocks_are_adjoint_to_each_other(options: dict) -> None:
    model = trained_a_little(contractive_model(certificate="causal", **options)).eval()
    for group in branch_jacobians(model, random_tokens(2)):
        right, left = torch.randn(2, *group.jacobian.shape, dtype=torch.float64)
        pushed, pulled = group.own_token.jvp(right), group.own_token.vjp(left)
        torch.testing.assert_close((left * pushed).sum(), (pulled * right).sum())


@pytest.mark.parametrize("options", CAUSAL)
def test_a_row_of_a_causal_run_holds_estimates_below_the_target(options: dict) -> None:
    model = trained_a_little(contractive_model(certificate="causal", **options)).eval()
    probe = LipschitzProbe(model, random_tokens(2), first_steps=SEQ_LEN)
    row = {}
    for keys, values in lipschitz_row(probe).items():
        row |= dict(zip(keys, values, strict=True)) if isinstance(keys, tuple) else {keys: values}
    for name, _ in model.stack.branches():
        estimate = row[f"lipschitz/own_token/{name}/estimate"]
        assert 0 < estimate <= row[f"lipschitz/own_token/{name}/bound"] <= row["lipschitz/target"]
    assert "own_token" not in LipschitzProbe(contractive_model(), random_tokens(1)).estimate()


def test_a_saved_probe_of_diagonal_blocks_goes_on_as_if_never_saved() -> None:
    model = trained_a_little(contractive_model(certificate="causal", bounded=True)).eval()
    probe, other = (LipschitzProbe(model, random_tokens(1)) for _ in range(2))
    probe.look()
    other.load_state_dict(probe.state_dict())
    values = [p.estimate()["own_token"] for p in (probe, other)]
    assert all(torch.equal(values[0][name].value, e.value) for name, e in values[1].items())
