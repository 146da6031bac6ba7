"""Products with Jacobians of layer norms and GELU are those that PyTorch derives."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.nn import functional as F

from invformer.lipschitz.double_backward import gelu_of, layer_norm_of, pulling
from invformer.lipschitz.measuring import measuring
from invformer.lipschitz.submodule_probe import SubmoduleProbe
from invformer.lipschitz.submodules import local_constants

GAIN, SHIFT = torch.arange(1.0, 6.0).double(), torch.arange(5.0).double()
CASES = {
    "layer norm": (layer_norm_of, F.layer_norm, ((5,), GAIN, SHIFT)),
    "layer norm without gain": (layer_norm_of, F.layer_norm, ((5,),)),
    "layer norm without shift": (layer_norm_of, F.layer_norm, ((5,), GAIN, None, 1e-2)),
    "layer norm of two dimensions": (layer_norm_of, F.layer_norm, ((4, 5), GAIN.expand(4, 5))),
    "gelu": (gelu_of, F.gelu, ()),
    "gelu by tanh": (partial(gelu_of, approximate="tanh"), partial(F.gelu, approximate="tanh"), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_values_pulls_and_pushes_are_those_of_pytorch(name: str) -> None:
    ours, theirs, options = CASES[name]
    points = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    found = []
    for function in (ours, theirs):
        x, a, v = (point.clone().requires_grad_() for point in points)
        with pulling():
            y = function(x, *options)
            (w,) = torch.autograd.grad(y, x, a, create_graph=True)
            found.append((y, w, *torch.autograd.grad(w, a, v)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", CASES)
def test_passes_that_are_not_ours_are_derived_by_everything(name: str) -> None:
    ours, theirs, options = CASES[name]
    x, a = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    parameters = [t.clone().requires_grad_() for t in options if isinstance(t, torch.Tensor)]
    given = [parameters.pop(0) if isinstance(t, torch.Tensor) else t for t in options]
    found = []
    for function in (ours, theirs):
        at = [x.clone().requires_grad_(), *(t for t in given if isinstance(t, torch.Tensor))]
        pulled = torch.autograd.grad(function(at[0], *given), at, a, create_graph=True)
        found.append([*pulled, *torch.autograd.grad(pulled[0].sin().sum(), at[:1])])
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_transforms_of_functions_and_forward_mode_are_those_of_pytorch(name: str) -> None:
    ours, theirs, options = CASES[name]
    x, v = torch.randn(3, 4, 5).requires_grad_(), torch.randn(3, 4, 5)
    found = []
    for function in (ours, theirs):
        each = vmap(grad(lambda x, f=function: f(x, *options).square().sum()))(x)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, v), *options)).tangent
        found.append([each, tangent, *torch.autograd.grad(each.sum() + tangent.sum(), x)])
    torch.testing.assert_close(*found)


class Slope(nn.Module):
    """∂(Σ inner(x)²)/∂x, computed in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            return torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)[0]


def test_a_model_that_derives_itself_has_its_dense_constant() -> None:
    model, x = Slope(), torch.randn(1, 4)
    dense = torch.autograd.functional.jacobian(model, x).view(4, 4)
    expected = torch.linalg.matrix_norm(dense, 2).item()
    assert local_constants(model, x).values[""] == pytest.approx(expected, rel=1e-3)
    probe = SubmoduleProbe(model, x)
    values = [probe.measure().values[""] for _ in range(9)]
    assert values[-1] == pytest.approx(expected, rel=1e-3)


def test_modules_call_the_functions_of_pytorch_again_afterwards() -> None:
    before = F.layer_norm, F.gelu
    with measuring(nn.LayerNorm(3)):
        assert (F.layer_norm, F.gelu) == (layer_norm_of, gelu_of)
    assert (F.layer_norm, F.gelu) == before
