"""Any model's submodules are measured as their dense Jacobians say, and the model is left alone."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from invformer.lipschitz.submodules import local_constants

WIDTH, TOKENS = 8, 5


class Attention(nn.Module):
    """Causal attention as other people write it, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A submodule of every kind: wider, narrower, nested, unused, of integers, of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.unused = nn.Embedding(11, WIDTH), nn.Linear(2, 2)
        feed_forward = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), Attention(), *feed_forward)
        self.norm, self.bilinear = nn.BatchNorm1d(TOKENS), nn.Bilinear(WIDTH, WIDTH, 1)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.block(self.token(tokens)))
        return self.bilinear(x, self.recurrent(x)[0])


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model()
    with torch.no_grad():
        made.block[1].qkv.weight.mul_(4)
    return made


def test_every_constant_is_that_of_the_dense_jacobian(model: Model) -> None:
    tokens = torch.randint(11, (2, TOKENS))
    found = local_constants(model, tokens)
    inputs = {}
    for name, module in model.eval().named_modules():
        module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
    model(tokens)
    inside = ("", ".0", ".1", ".1.qkv", ".1.dropout", ".2", ".3", ".4")
    assert found.values.keys() == {"norm", *(f"block{name}" for name in inside)}
    for name, value in found.values.items():
        x = inputs[name].detach()
        with sdpa_kernel(SDPBackend.MATH):
            jacobian = torch.func.jacrev(model.get_submodule(name))(x).reshape(-1, x.numel())
        true = torch.linalg.matrix_norm(jacobian, 2).item()
        assert 0.99 * true <= value <= true * (1 + 1e-9), name


class Encoder(nn.Module):
    """An encoder of PyTorch's, whose tokens at the end are padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.register_buffer("padding", torch.arange(TOKENS) >= torch.tensor([[3], [4]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=self.padding)


def test_layers_that_are_given_a_mask_are_measured_with_it() -> None:
    model, x = Encoder().eval(), torch.randn(2, TOKENS, WIDTH)
    found = local_constants(model, x)
    assert {"", "encoder", "encoder.layers.0", "encoder.layers.1"} < found.values.keys()
    jacobian = torch.autograd.functional.jacobian(model, x).reshape(x.numel(), x.numel())
    norm = torch.linalg.matrix_norm(jacobian, 2).item()
    for name in ("", "encoder"):
        assert found.values[name] == pytest.approx(norm, rel=0.01)


def test_activations_that_are_overwritten_in_place_count_as_they_were() -> None:
    model = nn.Sequential(nn.Identity(), nn.ELU(inplace=True), nn.Flatten())
    found = local_constants(model, torch.full((2, 3), -2.0))
    assert not found.skipped
    assert found.values["1"] == pytest.approx(math.exp(-2))
    assert found.values[""] == pytest.approx(math.exp(-2))


def test_other_submodules_are_skipped_with_a_reason(model: Model) -> None:
    skipped = local_constants(model, torch.randint(11, (2, TOKENS))).skipped
    assert skipped.pop("unused") == "it is not called"
    assert skipped.keys() == {"", "token", "bilinear", "recurrent"}
    assert set(skipped.values()) == {"it does not map one floating-point tensor to one"}


@pytest.mark.compiles
def test_a_compiled_model_is_measured_without_compiling_it_anew() -> None:
    graphs, model, x = [], Attention().eval(), torch.randn(2, TOKENS, WIDTH)
    found = local_constants(model, x)
    model.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    model(x)
    assert graphs
    before = len(graphs)
    assert local_constants(model, x) == found
    assert len(graphs) == before


def test_power_iteration_in_half_precision_is_not_tried() -> None:
    model = nn.Sequential(nn.Linear(3, 2)).bfloat16()
    skipped = local_constants(model, torch.ones(4, 3, dtype=torch.bfloat16)).skipped
    assert set(skipped.values()) == {"it computes in torch.bfloat16; measure model.float()"}


def test_values_do_not_depend_on_the_autocast_around_them(model: Model) -> None:
    model, tokens = model.float(), torch.randint(11, (2, TOKENS))
    found = local_constants(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert local_constants(model, tokens) == found


class Once(torch.autograd.Function):
    """The identity, whose derivative cannot be derived again."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g


def test_a_submodule_without_a_second_derivative_is_skipped() -> None:
    odd = nn.Module()
    odd.forward = Once.apply
    found = local_constants(nn.Sequential(odd, nn.Linear(3, 2)), torch.randn(4, 3))
    assert found.values.keys() == {"1"}
    assert "derived twice" in found.skipped["0"]


def test_measuring_leaves_model_modes_hooks_and_random_numbers_alone(model: Model) -> None:
    model.block.eval()
    modes = [module.training for module in model.modules()]
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    tokens = torch.zeros(2, TOKENS, dtype=torch.int64)
    assert local_constants(model, tokens) == local_constants(model, tokens)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
