"""Certificates of whole stacks: what they prove, and what they refuse to guess."""

import copy
from typing import Any

import pytest
import torch

from invformer.branches.branch import LipschitzBranch
from invformer.nn import (
    ActivationNorm,
    CausalMask,
    ContractiveFeedForward,
    InvertibleBlock,
    InvertibleStack,
    L2Attention,
    NoCertificateError,
    VisibilityMask,
    certify,
    enforce,
)
from invformer.numerics.norms import NORMS, Norm
from tests.support.builders import (
    SEQ_LEN,
    WIDTH,
    baseline,
    contractive_model,
    mask_of,
    random_tokens,
    scaled_model,
    trained_a_little,
)
from tests.support.problems import dense_jacobian


def test_the_bound_of_the_whole_stack_covers_its_jacobian() -> None:
    model = trained_a_little(contractive_model())
    certificate = certify(model, norm="frobenius", dtype=torch.float64)
    x = model.embedding(random_tokens(1))[0].detach()
    jacobian = dense_jacobian(lambda t: model.stack(t), x)
    assert torch.linalg.matrix_norm(jacobian, 2).item() <= certificate.total
    assert certificate.total > 1


def test_norms_and_kinds_that_do_not_exist_are_refused_by_name() -> None:
    names = "unknown norm 'l2': choose one of token_max, frobenius, entry_max"
    for model in (contractive_model(), contractive_model(bounded=True)):
        with pytest.raises(ValueError, match=names):
            certify(model, norm="l2")  # type: ignore
        with pytest.raises(ValueError, match="unknown kind 'local': choose one of global, causal"):
            certify(model, kind="local")  # type: ignore
        for _, branch in model.stack.branches():
            with pytest.raises(ValueError, match="unknown norm 'inf': choose one of token_max, "):
                branch.lipschitz_bound("inf")


def test_layer_norm_is_refused_and_a_branch_alone_is_told_which_wrapper_it_wants() -> None:
    with pytest.raises(NoCertificateError, match="LayerNorm"):
        certify(baseline())
    with pytest.raises(NoCertificateError, match="L2Attention: certify an InvertibleStack"):
        certify(L2Attention(4, 1, CausalMask(5)))


class Louder(ContractiveFeedForward):
    def forward(self, *inputs: Any) -> torch.Tensor:
        return 10 * super().forward(*inputs)


class Nearer(CausalMask):
    def forward(self, num_tokens: int) -> torch.Tensor:
        return super().forward(num_tokens) + 30 * torch.eye(num_tokens).roll(1, 0).tril(-1)


LINEAR, FULL = torch.nn.Linear(WIDTH, WIDTH), mask_of("full", 3, SEQ_LEN)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("1.feed_forward.branch.__class__", Louder, "block_01/feed_forward: no proof is known for"),
        ("1.forward", lambda x: 10 * x, "blocks.1: a forward hook, or a forward of its own"),
        ("1.norm", torch.nn.LayerNorm(WIDTH), "block_01/norm: no proof is known for LayerNorm"),
        ("1.attention.branch.position", Nearer(SEQ_LEN), "block_01/attention: no proof is known"),
        ("0.attention.branch.position", torch.nn.Identity(), "block_00/attention: no proof is"),
        ("1.attention.branch.position", FULL, "^block_01/attention: the causal certificate"),
        ("1.attention.scaling", LINEAR, "block_01/attention: no proof is known for Linear"),
        ("1.feed_forward.branch", LINEAR, "block_01/feed_forward: no proof is known for Linear"),
        ("1", LINEAR, "block_01: no proof is known for Linear"),
    ],
)
def test_what_has_no_proof_is_refused_by_its_place(place: str, value: Any, message: str) -> None:
    model = contractive_model()
    part, _, name = place.rpartition(".")
    setattr(model.stack.blocks.get_submodule(part), name, value)
    with pytest.raises(NoCertificateError, match=message):
        certify(model, kind="causal" if value is FULL else None)


def test_forward_hooks_are_refused_by_their_place() -> None:
    model = contractive_model()
    layer = model.stack.blocks[0].attention
    before = layer.register_forward_pre_hook(lambda module, inputs: (10 * inputs[0],))
    with pytest.raises(NoCertificateError, match=r"blocks\.0\.attention: a forward hook"):
        certify(model)
    before.remove()
    layer.branch.register_forward_hook(lambda module, inputs, output: 10 * output)
    with pytest.raises(NoCertificateError, match=r"blocks\.0\.attention\.branch: a forward hook"):
        certify(model)


def test_diagonal_blocks_are_bounded_and_inverted_in_token_max_alone() -> None:
    for norm in ("frobenius", "entry_max"):
        stack = InvertibleStack([InvertibleBlock(Tanh(0.6), Tanh(0.6))], 4, norm, "causal")
        for use in (certify, lambda stack: stack.inverse(torch.zeros(1, 4, 3))):
            with pytest.raises(NoCertificateError, match=f"not in {norm}: certify them in token"):
                use(stack)


@pytest.mark.parametrize("build", [contractive_model, scaled_model])
def test_scales_bound_those_of_a_stack_in_bfloat16(build) -> None:
    model = build()
    for name, parameter in model.stack.named_parameters():
        if name.endswith("log_scale"):
            parameter.data.normal_(std=2)
    half = copy.deepcopy(model).to(torch.bfloat16)
    for certified in (model, half):
        certificate = certify(certified, dtype=torch.bfloat16)
        for name, layer in half.stack.layers():
            if isinstance(layer, ActivationNorm):
                assert layer.weights().scale.max() <= certificate.scales[name]
            elif layer.scaling is not None:
                used = layer.scaling.weights()
                condition = used.scale.max().double() * used.inverse.max().double()
                assert condition <= certificate.conditions[name]


def test_a_mask_whose_last_row_sees_least_is_certified_by_its_fullest_row() -> None:
    visible = torch.ones(30, 30, dtype=torch.bool).tril()
    visible[-1, :-1] = False
    layer = L2Attention(4, 1, VisibilityMask(visible))
    full = L2Attention(4, 1, CausalMask(29))
    full.load_state_dict(layer.state_dict())
    assert layer.lipschitz_bound("token_max") == pytest.approx(full.lipschitz_bound("token_max"))
    assert layer.causal_bound() == pytest.approx(full.causal_bound())


def test_every_branch_is_held_to_its_own_target() -> None:
    model = trained_a_little(contractive_model(target=0.7))
    branch = dict(model.stack.branches())["block_01/feed_forward"]
    branch.lipschitz_target = 0.3
    branch.correction.fill_(1.5)
    assert not certify(model).holds
    assert enforce(model).holds
    assert certify(model).per_branch["block_01/feed_forward"] <= 0.3


@pytest.mark.parametrize("at_once", [1, 2**23])
def test_branches_have_the_same_bounds_alone_and_together(at_once: int, monkeypatch) -> None:
    monkeypatch.setattr("invformer.branches.branch.NUMBERS_AT_ONCE", at_once)
    for model in (contractive_model(), scaled_model(kernel=2)):
        stack = trained_a_little(model).stack
        for norm in NORMS:
            together = certify(stack, norm, kind="global").per_branch
            for name, branch in stack.branches():
                assert together[name] == pytest.approx(branch.lipschitz_bound(norm), rel=1e-14)
        together = certify(stack, kind="causal").per_branch
        for name, branch in stack.branches():
            assert together[name] == pytest.approx(branch.causal_bound(), rel=1e-14)


class Halved(ContractiveFeedForward):
    is_proven = True

    def lipschitz_bound(self, *arguments: Any) -> float:
        return super().lipschitz_bound(*arguments) / 2


def test_a_subclass_with_a_bound_of_its_own_is_asked_for_it() -> None:
    blocks = [InvertibleBlock(Halved(4, 8, 0.6), Halved(4, 8, 0.6)) for _ in range(2)]
    for kind in ("global", "causal"):  # it does not inherit the other bound
        bounds = certify(InvertibleStack(blocks, 4), kind=kind).per_branch.values()
        assert all(0.29 < bound <= 0.3 for bound in bounds)


class Tanh(LipschitzBranch[tuple[()]]):
    is_proven = True

    def weights(self) -> tuple[()]:
        return ()

    def forward(self, x: torch.Tensor, weights: Any = None) -> torch.Tensor:
        return 0.5 * x.tanh()

    def lipschitz_bound(self, norm: Norm, *_: Any, **__: Any) -> float:
        return 0.5


class GroupedTanh(LipschitzBranch[tuple[()]]):
    is_proven = True
    weights, forward, bounds_of = Tanh.weights, Tanh.forward, lambda branches, *_: [0.5]


@pytest.mark.parametrize("branch", [Tanh, GroupedTanh])
def test_branches_without_parameters_are_certified_and_inverted(branch: Any) -> None:
    stack = InvertibleStack([InvertibleBlock(branch(0.6), branch(0.6))], 4)
    assert certify(stack).bound_max == enforce(stack).bound_max == 0.5
    x = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(stack.inverse(stack(x)).value, x)
