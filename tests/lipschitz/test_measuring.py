"""Measuring a model leaves no trace in it, whatever its forward pass changes."""

import copy
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from invformer.lipschitz.submodule_probe import SubmoduleProbe
from invformer.lipschitz.submodules import local_constants


class Network(nn.Sequential):
    """With a forward pass that torch.compile takes: it leaves those of PyTorch's classes alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def network() -> Network:
    torch.manual_seed(0)
    return Network(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))


def test_modes_weights_hooks_gradients_and_random_numbers_stay() -> None:
    model, x = network(), torch.randn(2, 3)
    model[1].eval()
    modes = [module.training for module in model.modules()]
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert local_constants(model, x) == local_constants(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


class Counter(nn.Module):
    """Counts its calls and draws random numbers in every way that modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.calls, self.total, self.seen, self.cache = 0, torch.zeros(3), [], {}
        self.generator, self.random = torch.Generator(), random.Random(0)
        self.numpy = numpy.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.calls += 1
        self.total += 1
        self.seen.append(x)
        self.cache[len(self.cache)] = self.kept = x
        return x * self.count * (self.random.random() + self.numpy.random())

    def state(self) -> tuple:
        drawn = self.generator.get_state().tolist(), self.random.getstate()
        numbers = str(self.numpy.bit_generator.state), self.total.tolist(), self.count.tolist()
        return *drawn, *numbers, self.calls, len(self.seen), len(self.cache)


def test_buffers_attributes_and_generators_are_restored_and_may_be_in_a_graph() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Counter())
    loss = model(torch.randn(2, 3)).sum()
    count, kept, state = model[1].count, model[1].kept, model[1].state()
    found = local_constants(model, torch.randn(2, 3))
    assert found.skipped.keys() == {"", "1"}
    assert model[1].state() == state
    assert model[1].count is count
    assert model[1].kept is kept
    loss.backward()  # the buffer has not changed


def test_backward_hooks_see_no_gradient_of_a_measurement_and_change_none() -> None:
    model, x, calls = network(), torch.randn(2, 3), []
    plain = local_constants(model, x)
    model[1].register_full_backward_hook(lambda *_: calls.append(1))
    model[2].register_full_backward_hook(lambda _, grads, __: (0.1 * grads[0],))
    model[3].register_full_backward_pre_hook(lambda *_: calls.append(1))
    assert local_constants(model, x) == plain
    probe = SubmoduleProbe(model, x)
    assert probe.measure().values.keys() == probe.measure().values.keys() == plain.values.keys()
    assert not calls
    model(x).sum().backward()
    assert len(calls) == 2


class Merging(nn.Linear):
    """Adds a low-rank part to its weights in eval mode, as LoRA does, and rounds."""

    merged = False

    def train(self, mode: bool = True) -> nn.Module:
        if mode == self.merged:
            self.weight.data += 0.1 if not mode else -0.1
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight if self.merged else self.weight + 0.1, self.bias)


def test_weights_that_eval_would_merge_stay_as_they_are() -> None:
    layer = Merging(64, 64).float()
    before = layer.weight.clone()
    value = local_constants(layer, torch.randn(2, 64).float()).values[""]
    assert torch.equal(layer.weight, before)
    assert value == pytest.approx(torch.linalg.matrix_norm(before + 0.1, 2).item(), rel=1e-2)


@pytest.mark.compiles
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_measured_without_compiling_it_anew(in_place: bool) -> None:
    graphs, model, x = [], network(), torch.randn(2, 3)
    options = {"backend": lambda graph, _: graphs.append(graph) or graph.forward}
    found = local_constants(model, x).values
    compiled = model if in_place else torch.compile(model, **options)
    if in_place:
        model.compile(**options)
    compiled(x)
    assert graphs
    before = len(graphs)
    again = local_constants(compiled, x).values
    assert {
        name.removeprefix("_orig_mod").removeprefix("."): v for name, v in again.items()
    } == found
    compiled(x)
    assert len(graphs) == before
