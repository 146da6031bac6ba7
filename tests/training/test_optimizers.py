"""Optimisers and schedule; Muon against singular values and PyTorch's own."""

from collections import defaultdict
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from invformer.branches.dot_product import DotProductAttention
from invformer.config.schema import OptimConfig
from invformer.training import muon, optimizers
from invformer.weights.position_bias import RelativePositionBias
from tests.gpu.emulation import cuda_rules
from tests.support.builders import contractive_model

OPTIONS = {"lr": 1e-2, "muon_lr": 2e-2, "weight_decay": 0.0}


def test_muon_gets_the_matrices_of_the_stack_and_adamw_the_rest() -> None:
    model = contractive_model()
    names = {id(p): n for n, p in model.named_parameters()}
    matrices, others = optimizers.split_matrices(model)
    assert all("weight" in names[id(p)] and "stack" in names[id(p)] for p in matrices)
    assert len(matrices) + len(others) == len(list(model.parameters()))
    assert any("embedding" in names[id(p)] for p in others)


def test_every_rate_is_logged_as_the_schedule_moves_it() -> None:
    for name, keys in (("adamw", {"optim/lr"}), ("muon", {"optim/lr", "optim/muon_lr"})):
        optimiser = optimizers.build_optimizer(
            contractive_model(), OptimConfig(name=name, **OPTIONS)
        )
        optimizers.warmup_cosine(optimiser, warmup_steps=2, max_steps=4)
        rates = optimizers.learning_rates(optimiser)
        assert rates == {key: OPTIONS[key.removeprefix("optim/")] / 2 for key in keys}


def test_the_schedule_warms_up_linearly_and_ends_at_its_floor() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    schedule = optimizers.warmup_cosine(optimiser, warmup_steps=4, max_steps=20, min_fraction=0.1)
    rates = []
    for _ in range(21):
        rates.append(schedule.get_last_lr()[0])
        optimiser.step()
        schedule.step()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[20] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[4:]))


def stepped(parameters: list[Tensor], gradients: list[list[Tensor]], **options: float) -> None:
    defaults = {"weight_decay": 0.0, "momentum": muon.MOMENTUM, "parts": 1}
    group, memory = {"params": parameters, **defaults, **options}, defaultdict(dict)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        muon.update(group, memory)


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (3, 5, 9)])
def test_singular_values_become_one_and_vectors_stay(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape)
    found = muon.orthogonalised(matrix)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    towards = u.mT @ found @ vh.mT
    values = towards.diagonal(dim1=-2, dim2=-1)
    away = towards - torch.diag_embed(values)
    assert away.abs().max() < 1e-10
    strong = s > 0.02 * torch.linalg.matrix_norm(matrix)[..., None]
    assert (values[strong] > 0.68).all()
    assert (values < 1.21).all()


@pytest.mark.parametrize("rules", [nullcontext, cuda_rules])  # compiled code if there is any
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.float64, 1e-11)])
def test_matrices_together_have_the_directions_of_each(rules, dtype, close: float) -> None:
    shapes = [(3, 40, 40), (1, 70, 33), (2, 33, 70), (1, 5, 40), (1, 40, 40)]
    batches = [torch.randn(shape, dtype=dtype) for shape in shapes]
    batches[0] = batches[0].mT * torch.logspace(0, -4, 40, dtype=dtype)  # near singular
    batches[-1].zero_()
    with rules():
        together = muon.orthogonalised_together(batches)
    for batch, found in zip(batches, together, strict=True):
        size = muon.UPDATE_RMS * max(batch.shape[1:]) ** 0.5
        expected = muon.orthogonalised(batch.double()) * size
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=close)


def test_a_step_is_that_of_pytorch_up_to_its_bfloat16() -> None:
    ours, theirs = torch.randn(12, 30), torch.nn.Parameter(torch.empty(12, 30))
    theirs.data.copy_(ours)
    gradients = [torch.randn(12, 30) for _ in range(3)]
    options = {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9}
    stepped([ours], [[g] for g in gradients], **options)
    reference = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        reference.step()
    torch.testing.assert_close(ours, theirs.data, rtol=0, atol=0.1 * 3 * 0.03)


def test_matrices_of_one_shape_are_updated_together_as_each_alone() -> None:
    shapes = [(6, 10), (10, 6), (6, 10), (3, 8, 4), (3, 2, 4, 6), (7, 7)]
    start = [torch.randn(s) for s in shapes]
    gradients = [[torch.randn(s) for s in shapes] for _ in range(2)]
    together = [w.clone() for w in start]
    stepped(together, gradients, lr=0.1, weight_decay=0.1)
    for index, weight in enumerate(start):
        stepped([weight], [[of_step[index]] for of_step in gradients], lr=0.1, weight_decay=0.1)
        torch.testing.assert_close(together[index], weight)


def test_queries_keys_and_values_in_one_are_three_matrices() -> None:
    attention = DotProductAttention(8, 2, RelativePositionBias(2, 4))
    gradient = torch.randn(24, 8)
    before = attention.qkv.weight.detach().clone()
    optimizer = optimizers.build_optimizer(attention, OptimConfig(muon_lr=0.1, weight_decay=0.0))
    for parameter in attention.parameters():
        parameter.grad = torch.zeros_like(parameter)
    attention.qkv.weight.grad = gradient.clone()
    optimizer.step()
    apart = [w.clone() for w in before.chunk(3)]
    stepped(apart, [list(gradient.chunk(3))], lr=0.1)
    torch.testing.assert_close(attention.qkv.weight.detach(), torch.cat(apart))
