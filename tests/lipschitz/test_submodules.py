"""Any model's submodules are measured as their dense Jacobians say, and the model is left alone."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from invformer.lipschitz.submodule_probe import SubmoduleProbe
from invformer.lipschitz.submodules import local_constants
from tests.lipschitz.foreign import agree, dense_constants

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
    made = Model()
    made.block[1].qkv.weight.data.mul_(4)
    return made


def test_every_constant_is_that_of_the_dense_jacobian(model) -> None:
    tokens = torch.randint(11, (2, TOKENS))
    found = local_constants(model, tokens)
    inside = ("", ".0", ".1", ".1.qkv", ".1.dropout", ".2", ".3", ".4")
    blocks = {f"block{name}" for name in inside}
    assert found.values.keys() == {"norm", "recurrent", "bilinear", *blocks}
    agree(found.values, dense_constants(model, found.values, tokens))
    assert found.notes.keys() == {"block", "block.1"}  # whose attention runs in its math form
    no_map = "it takes or returns no floating-point tensor"
    assert found.skipped == {"unused": "it is not called", "": no_map, "token": no_map}


def test_layers_that_are_given_a_mask_are_measured_with_it() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, TOKENS, WIDTH)
    padding = {"src_key_padding_mask": torch.arange(TOKENS) >= torch.tensor([[3], [4]])}
    found = local_constants(model, {"src": x, **padding})
    assert {"", "layers.0", "layers.1"} < found.values.keys()
    jacobian = torch.autograd.functional.jacobian(lambda x: model(x, **padding), x)
    norm = torch.linalg.matrix_norm(jacobian.reshape(x.numel(), x.numel()), 2).item()
    assert found.values[""] == pytest.approx(norm, rel=0.01)


def test_activations_that_are_overwritten_in_place_count_as_they_were() -> None:
    model = nn.Sequential(nn.Identity(), nn.ELU(inplace=True), nn.Flatten())
    found = local_constants(model, torch.full((2, 3), -2.0))
    assert not found.skipped
    assert found.values["1"] == pytest.approx(math.exp(-2))
    assert found.values[""] == pytest.approx(math.exp(-2))


def test_inputs_stay_as_they_are_though_the_model_overwrites_them() -> None:
    model, x = nn.Sequential(Function(lambda m, x: x.mul_(2)), nn.Tanh()), torch.randn(2, 3)
    before = x.clone()
    probe = SubmoduleProbe(model, x)
    true = torch.cosh(2 * x).square().reciprocal().max().item()
    for found in (local_constants(model, x), probe.measure(), probe.measure()):
        assert found.values["1"] == pytest.approx(true, rel=0.01)
    assert torch.equal(x, before)


def test_pruned_linear_layers_are_measured() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    probe = SubmoduleProbe(model, x)
    probe.measure()
    for layer in model:
        prune.l1_unstructured(layer, "weight", amount=0.5)
    model(x)
    true = dense_constants(model, ["", "0", "1"], x)
    found = local_constants(model, x)
    assert not found.skipped
    agree(found.values, true)
    agree(probe.measure().values, true, rtol=0.2)


def test_values_are_the_same_in_inference_mode_and_under_autocast(model) -> None:
    model, tokens = model.float(), torch.randint(11, (2, TOKENS))
    found, probe = local_constants(model, tokens), SubmoduleProbe(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert local_constants(model, tokens) == found
    with torch.inference_mode():
        assert local_constants(model, tokens.clone()) == found
        probe.measure()
    assert probe.measure().values.keys() == found.values.keys()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # as accelerate does
    assert local_constants(model, tokens) == found
    assert torch.autocast.__enter__.__qualname__ == "autocast.__enter__"


def test_power_iteration_in_half_precision_is_not_tried() -> None:
    model = nn.Sequential(nn.Linear(3, 2)).bfloat16()
    skipped = local_constants(model, torch.ones(4, 3, dtype=torch.bfloat16)).skipped
    assert set(skipped.values()) == {"it computes in torch.bfloat16; measure model.float()"}


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_modules_of_torchscript_are_skipped_and_those_around_them_measured() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    model, x = nn.Sequential(inner, nn.Linear(3, 2).double()), torch.randn(2, 3)
    plain = local_constants(model, x)
    model[0] = torch.jit.script(inner)
    found = local_constants(model, x)
    assert found.skipped.keys() == {"0", "0.0", "0.1"}
    assert found.values == pytest.approx({name: plain.values[name] for name in ("", "1")})


class Once(torch.autograd.Function):
    """The identity, whose derivative cannot be derived again."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear, x)


@torch.no_grad()
def frozen(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.weight).tanh()


def rounded(x: torch.Tensor, step: float) -> torch.Tensor:
    return x + (step * (x / step).round() - x).detach()


CONTRADICT = "difference quotients contradict its derivative"
DIFFER = "two evaluations at one input differ"
WRONG = {
    "functional dropout": (lambda m, x: F.dropout(m(x), 0.1), DIFFER),
    "noise": (lambda m, x: m(x) + 1e-3 * torch.randn_like(x), DIFFER),
    "Python's random numbers": (lambda m, x: random.random() * m(x), DIFFER),
    "NumPy's random numbers": (lambda m, x: float(np.random.random()) * m(x), DIFFER),
    "a frozen backbone": (frozen, CONTRADICT),
    "a frozen part": (lambda m, x: m(x) + 0.3 * frozen(m, x), CONTRADICT),
    "a detached part": (lambda m, x: x + 0.3 * m(x).detach(), CONTRADICT),
    "rounding, straight through": (lambda m, x: rounded(m(x), 1.0), CONTRADICT),
    "rounding to eight bits": (lambda m, x: rounded(m(x), 2 / 127), CONTRADICT),
    "a sign, straight through": (lambda m, x: m(x) + (m(x).sign() - m(x)).detach(), CONTRADICT),
    "no second derivative": (lambda m, x: Once.apply(m(x)), "it cannot be derived twice"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", WRONG)
def test_no_functions_and_other_derivatives_are_skipped(case: str, dtype: torch.dtype) -> None:
    function, reason = WRONG[case]
    odd = Function(function)
    model = nn.Sequential(nn.Linear(4, 4), odd, nn.Linear(4, 4)).to(dtype)
    x = torch.randn(6, 4, dtype=dtype)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    found = local_constants(model, x)
    assert found.values.keys() - {"1.linear"} == {"0", "2"}
    for name in ("", "1"):  # what contains it, too
        assert found.skipped[name].startswith(reason)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_what_is_not_a_number_is_skipped_as_such() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Function(lambda m, x: x + math.nan), nn.Linear(4, 4))
    found = local_constants(model, torch.randn(6, 4))
    assert found.values.keys() == {"0"}
    assert {found.skipped[name] for name in ("", "1", "2")} == {"its output is not a number"}


RIGHT = {
    "a constant": lambda m, x: m(torch.ones_like(x)),
    "a detached maximum": lambda m, x: (m(x) - m(x).amax(-1, keepdim=True).detach()).softmax(-1),
    "kinks": lambda m, x: (8 * m(x)).relu() - x.abs(),
    "a mask of infinities": lambda m, x: m(x).masked_fill(
        torch.ones(4) > torch.eye(4)[0], -math.inf
    ),
    "a large offset": lambda m, x: 100 + m(x),
    "steep attention": lambda m, x: (30 * m(x) @ x.mT).softmax(-1) @ x,
    "small numbers": lambda m, x: F.layer_norm(1e-3 * m(x) + 0.1, (4,)),
    "an index": lambda m, x: m(x).gather(-1, x.argmax(-1, keepdim=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", RIGHT)
def test_unusual_derivatives_that_are_right_are_measured(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model, x = Function(RIGHT[case]).to(dtype), torch.randn(6, 4, dtype=dtype)
    found = local_constants(model, x)
    assert not found.skipped
    if "infinities" not in case:
        true = dense_constants(model.double(), found.values, x.double())
        for name, value in found.values.items():
            assert value == pytest.approx(true[name], rel=0.01, abs=1e-12)


@dataclass
class Answer:
    """What a model of other people returns."""

    loss: torch.Tensor
    states: torch.Tensor


class Keywords(nn.Module):
    """Takes and gives what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.inner = Function(lambda _, pair: {"sum": (pair["x"].sin() + pair["y"][0], 1)})

    def forward(self, tokens: torch.Tensor, *, states: torch.Tensor, scale: float = 1.0) -> Answer:
        mask = torch.zeros_like(states[0, :, :1] @ states[0, :, :1].mT).fill_diagonal_(-math.inf)
        y = self.attention(query=states, key=states, value=states, attn_mask=mask)[0]
        y = self.inner({"x": scale * y, "y": [states, tokens]})["sum"][0]
        return Answer(loss=y.mean(), states=y)


def test_keywords_dictionaries_tuples_and_dataclasses_are_taken() -> None:
    torch.manual_seed(2)
    model, states = Keywords(), torch.randn(2, TOKENS, WIDTH)
    inputs = {"tokens": torch.arange(3), "states": states, "scale": 2.0}
    found = local_constants(model, inputs)
    assert found.values.keys() == {"", "attention", "inner"}
    jacobian = torch.autograd.functional.jacobian(
        lambda x: model(**(inputs | {"states": x})).states, states
    ).reshape(states.numel(), states.numel())
    agree(found.values, {
        "": torch.linalg.matrix_norm(jacobian, 2).item(),
        **dense_constants(model, ["attention", "inner"], **inputs),
    })  # fmt: skip


class Packed(nn.Module):
    """Passes on a named tuple that makes itself in its own way, and a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.up = nn.GRU(3, 4), nn.ConvTranspose1d(4, 4, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3])
        y = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0])[0]
        return self.up(y.mT, output_size=torch.Size([5, 4, 5]))


def test_packed_sequences_and_shapes_are_taken() -> None:
    model, x = Packed(), torch.randn(5, 2, 3)
    found, probe = local_constants(model, x), SubmoduleProbe(model, x)
    assert found.values.keys() == {"", "recurrent", "up"}
    true = dense_constants(model, found.values, x)
    agree(found.values, true)
    probe.measure()
    agree(probe.measure().values, true, rtol=0.1)
