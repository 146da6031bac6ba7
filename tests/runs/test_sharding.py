"""FSDP2 as the run uses it, in one process: the parts are the whole, the code is the same."""

import copy
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from invformer.assemble.model import build_model
from invformer.config.schema import ModelConfig, OptimConfig
from invformer.nn.proof import certify
from invformer.runs.sharding import (
    gather,
    in_parts,
    is_sharded,
    local_part,
    norms_of_whole,
    shard,
    whole,
)
from invformer.training.guard import UpdateGuard
from invformer.training.module import CharLanguageModel
from invformer.training.optimizers import build_optimizer
from invformer.training.weight_average import WeightAverage
from invformer.weights.spectral import refresh_normalisers, set_manual_refresh

VOCAB, SEQ_LEN = 11, 8
MODELS = [
    ModelConfig(d_model=12, num_heads=3, num_layers=2),
    ModelConfig(
        d_model=12, num_heads=3, num_layers=1, name="contractive_bounded", diagonal_scaling=False,
        activation_norm=True,
    ),
    ModelConfig(
        d_model=12, num_heads=3, num_layers=1, name="contractive_bounded", certificate="causal",
        strictly_causal=True, feed_forward_kernel=3, input_radius=2.0,
    ),
    ModelConfig(d_model=12, num_heads=3, num_layers=1, name="dot_product", certificate=None),
]  # fmt: skip


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def fresh(config: ModelConfig):
    torch.manual_seed(0)
    model = build_model(config, VOCAB, SEQ_LEN).float()
    model.initialise(torch.randint(VOCAB, (4, SEQ_LEN)))
    set_manual_refresh(model)
    return model


def optimiser_of(model, name: str) -> torch.optim.Optimizer:
    return build_optimizer(model, OptimConfig(name=name, lr=1e-2, muon_lr=1e-2))


def loss_of(model, step: int) -> torch.Tensor:
    tokens = torch.arange(4 * (SEQ_LEN + 1)).view(4, -1) * (step + 1) % VOCAB
    module = CharLanguageModel(model, Mock(), Mock(), Mock(), {})
    return module.training_step((tokens[:, :-1], tokens[:, 1:]), 0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("config", MODELS, ids=lambda c: f"{c.name}-{c.feed_forward_kernel}")
def test_a_sharded_model_learns_and_is_certified_like_a_whole_one(
    mesh: DeviceMesh, config: ModelConfig, name: str
) -> None:
    plain, sharded = fresh(config), fresh(config)
    averages = [WeightAverage(model, 0.5) for model in (plain, sharded)]
    shard(sharded, sharded.stack.blocks, mesh)
    assert is_sharded(sharded)
    assert all(map(is_sharded, sharded.stack.blocks))
    assert not is_sharded(plain)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    optimisers = [optimiser_of(model, name) for model in (plain, sharded)]
    guard = UpdateGuard()
    gather(sharded)
    for step in range(5):
        losses = [loss_of(model, step) for model in (plain, sharded)]
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        for model, optimiser, loss in zip((plain, sharded), optimisers, losses, strict=True):
            optimiser.zero_grad()
            loss.backward()
            if model is plain:
                norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            else:
                parts = {n: local_part(p.grad) for n, p in sharded.named_parameters()}
                found = guard.inspect(step, loss.detach(), parts, norms_of_whole)
                assert found.item() == pytest.approx(norm.item(), rel=1e-5)
                torch.nn.utils.clip_grads_with_norm_(sharded.parameters(), 0.5, found)
            optimiser.step()
            gather(model)
            refresh_normalisers(model)
        for average in averages:
            average.update(step)
    for _ in range(2):  # the average, and the weights that learn
        for average in averages:
            average.swap()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(dict(sharded.named_parameters())[name], parameter)
    if config.is_contractive:
        bounds = [certify(model).per_branch for model in (plain, sharded)]
        assert bounds[1] == pytest.approx(bounds[0], rel=1e-5)
        assert certify(sharded).holds


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_memory_of_an_optimiser_is_taken_apart_and_put_together(
    mesh: DeviceMesh, name: str
) -> None:
    model = fresh(MODELS[0])
    shard(model, model.stack.blocks, mesh)
    optimiser = optimiser_of(model, name)
    loss_of(model, 0).backward()
    optimiser.step()
    state = optimiser.state_dict()
    wholes = copy.deepcopy(state)
    for memory in wholes["state"].values():
        memory.update({key: whole(value) for key, value in memory.items()})
    parts = in_parts(optimiser, wholes)
    assert not any(isinstance(value, DTensor) for value in tensors(wholes))
    for value, part in zip(tensors(state), tensors(parts), strict=True):
        assert type(value) is type(part)
        assert torch.equal(whole(value), whole(part))


def tensors(state: dict) -> list[torch.Tensor]:
    return [value for memory in state["state"].values() for value in memory.values()]
