"""A probe of any model follows its dense Jacobians while it trains, for two products each."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from invformer.lipschitz import submodule_probe
from invformer.lipschitz.submodule_probe import SubmoduleProbe
from invformer.lipschitz.submodules import local_constants
from invformer.lipschitz.taps import Taps
from tests.lipschitz.foreign import agree, dense_constants

TOKENS, WIDTH = 6, 8


class Block(nn.Module):
    """A pre-norm block whose branches may begin at zero."""

    def __init__(self, scale: float = 1.0, reentrant: bool | None = None) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.reentrant = reentrant
        with torch.no_grad():
            self.attention.out_proj.weight.mul_(scale)
            self.mlp[2].weight.mul_(scale)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        h = self.ln_1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.inside(x)
        return checkpoint(self.inside, x, use_reentrant=self.reentrant)


class Language(nn.Module):
    """Tokens to a loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(11, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.token(tokens) + self.place(torch.arange(TOKENS))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits[:, :-1].mT, tokens[:, 1:])


def vision() -> nn.Module:
    """Samples that are not mixed, activations in place, a batch norm, a number for each sample."""
    convolved = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten()
    return nn.Sequential(*convolved, nn.Linear(27, 5), nn.Softmax(-1), nn.Linear(5, 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(4, 5, batch_first=True), nn.LSTM(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[0])[0].tanh()


def shared() -> nn.Module:
    """The same layer inside and outside another one."""
    layer = nn.Linear(4, 4)
    norm = nn.LayerNorm(4)
    return nn.Sequential(norm, layer, nn.Sequential(layer, nn.Tanh(), norm), norm)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "language": (Language, lambda: torch.randint(11, (1, TOKENS))),
    "branches begin at zero": (lambda: Language(scale=0.0), lambda: torch.arange(TOKENS)[None]),
    "a batch": (Language, lambda: torch.randint(11, (3, TOKENS))),
    "checkpoints": (lambda: Language(reentrant=False), lambda: torch.randint(11, (2, TOKENS))),
    "old checkpoints": (lambda: Language(reentrant=True), lambda: torch.randint(11, (2, TOKENS))),
    "vision": (vision, lambda: torch.randn(4, 2, 5, 5)),
    "recurrent": (Recurrent, lambda: torch.randn(3, 5, 4)),
    "shared layers": (shared, lambda: torch.randn(3, 4)),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    out = model(inputs)
    loss = out[1] if isinstance(out, tuple) else (out - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy without checkpoints."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        module.reentrant = None
    return plain


@pytest.mark.parametrize("case", MODELS)
def test_a_probe_follows_the_dense_jacobians_from_below(case: str) -> None:
    torch.manual_seed(3)
    build, inputs = MODELS[case]
    model, x = build(), inputs()
    probe, optimizer = SubmoduleProbe(model, x), torch.optim.AdamW(model.parameters(), 3e-3)
    names, errors = probe.measure().values.keys(), []
    once = local_constants(model, x).values
    assert names == once.keys()
    agree(once, dense_constants(plain_copy(model), names, x))
    for number in range(1, 13):
        step(model, optimizer, x)
        found = probe.measure()
        assert found.values.keys() == names
        if number % 4:
            continue
        for name, true in dense_constants(plain_copy(model), names, x).items():
            value = found.values[name]
            assert value <= true * (1 + 1e-9), name
            errors.append((1 - value / true if true else 0.0, name))
    assert sorted(errors)[len(errors) // 2][0] < 0.005
    assert max(errors)[0] < 0.1, max(errors)


def test_a_later_measurement_is_one_forward_pass() -> None:
    model, calls = Language(), []
    probe = SubmoduleProbe(model, torch.randint(11, (1, TOKENS)))
    probe.measure()
    model.token.register_forward_hook(lambda *_: calls.append(1))
    probe.measure()
    assert len(calls) == 1


def test_a_measurement_leaves_no_graph_behind(monkeypatch) -> None:
    kept = []

    class Watched(Taps):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(submodule_probe, "Taps", Watched)
    probe = SubmoduleProbe(Language(), torch.randint(11, (1, TOKENS)))
    for _ in range(3):
        probe.measure()
    gc.collect()
    assert len(kept) == 2
    assert not any(taps() for taps in kept)


def test_products_of_inner_submodules_do_not_run_through_what_is_between_them() -> None:
    reached, between = [], Product(torch.eye(4))
    model = nn.Sequential(nn.Sequential(nn.Tanh()), between, nn.Sequential(nn.Tanh()))
    names = {model[0]: "0", model[0][0]: "0.0", between: "1", model[2]: "2", model[2][0]: "2.0"}
    taps = Taps(names, model, (torch.randn(2, 4),))
    node = taps.levels[0]["1"].output.node
    node.register_prehook(lambda given: reached.extend(g for g in given if g is not None))
    taps.products(1, {"0.0": torch.ones(2, 4), "2.0": torch.ones(2, 4)})
    assert not reached
    taps.products(0, {"1": torch.ones(2, 4)})
    assert reached


def test_a_restored_probe_goes_on_to_the_bit() -> None:
    model, x = Language(), torch.randint(11, (1, TOKENS))
    first, optimizer = SubmoduleProbe(model, x), torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(3):
        first.measure()
        step(model, optimizer, x)
    second = SubmoduleProbe(model, x)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(3):
        assert first.measure() == second.measure()
        step(model, optimizer, x)


def test_vectors_of_other_inputs_or_of_another_model_start_anew(caplog) -> None:
    x = torch.randn(2, 4)
    saved = SubmoduleProbe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x)
    saved.measure()
    saved.measure()
    deeper = nn.Sequential(nn.Tanh(), nn.Linear(4, 5))
    for model, inputs in ((saved.model, torch.randn(3, 4)), (deeper, x), (deeper[0], x)):
        probe, fresh = SubmoduleProbe(model, inputs), SubmoduleProbe(model, inputs)
        probe.load_state_dict(copy.deepcopy(saved.state_dict()))
        assert [probe.measure(), probe.measure()] == [fresh.measure(), fresh.measure()]
    assert caplog.text.count("estimates start anew") == 3


def test_frozen_and_random_parts_inside_are_measured_or_skipped_as_at_first() -> None:

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                h = self.backbone(x).sin()
            return self.head(F.dropout(h, 0.5))

    model, x = Odd(), torch.randn(5, 4)
    probe = SubmoduleProbe(model, x)
    first, later = probe.measure(), probe.measure()
    assert first.skipped == later.skipped == {"": "two evaluations at one input differ"}
    agree(later.values, dense_constants(model, first.values, x))


class Product(nn.Module):
    """x ↦ x W, which is no ``nn.Linear``."""

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


def test_another_singular_vector_that_becomes_the_largest_is_found_at_once() -> None:
    model, q = Product(torch.eye(8)), torch.linalg.qr(torch.randn(8, 8)).Q
    model.matrix.data = q @ torch.diag(torch.tensor([3.0] + 7 * [1.0])) @ q.mT
    probe = SubmoduleProbe(model, torch.randn(1, 8))
    for _ in range(12):
        value = probe.measure().values[""]
    assert value == pytest.approx(3.0)
    turned = (q[:, 1] + 0.2 * q[:, 0]) / 1.04**0.5
    model.matrix.data = torch.eye(8) + 3.0 * torch.outer(turned, turned)
    assert 3.999 < probe.measure().values[""] <= 4.0 + 1e-9
