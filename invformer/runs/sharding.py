"""Fully sharded data parallelism (FSDP2): gradients and the optimiser's memory in parts.

Every process updates its part of every weight and keeps the optimiser's memory of that part, which
it writes into checkpoints. Between two steps all weights are whole everywhere, because
normalisation, monitor, certificate and inversion are functions of whole matrices.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Replace the parameters of each block, and then of all else, by this process's parts."""
    # The output of a linear layer is a view of its product, but no code writes into logits.
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)


def is_sharded(model: nn.Module) -> bool:
    """Whether :func:`shard` was applied."""
    return isinstance(model, FSDPModule)


def sharded(model: nn.Module) -> list[FSDPModule]:
    """The modules that :func:`shard` was applied to."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gather(model: nn.Module) -> None:
    """Put whole weights in their places, until the next backward pass; all processes take part."""
    for module in sharded(model):
        module.unshard()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Whole weights in their places, then parts again, which the optimiser needs."""
    gather(model)
    yield
    for module in sharded(model):
        module.reshard()


def whole(value: Any) -> Any:
    """A tensor in parts as a whole one, anything else as it is; all processes take part."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norms_of_whole(norms: Tensor) -> Tensor:
    """Euclidean norms of tensors from those of their parts; all processes take part."""
    squares = norms.double().square()
    dist.all_reduce(squares)
    return squares.sqrt().to(norms)


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with checkpoints through the run's own IO.

    The module shards its model in ``configure_model``. ``names`` are those of its parameters and
    buffers that are saved; None for ``backend`` is the one for the devices.
    """

    def __init__(
        self, num_processes: int, names: Iterable[str], timeout: timedelta, backend: str | None
    ) -> None:
        self.names = list(names)
        super().__init__(
            data_parallel_size=num_processes,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=backend,
            timeout=timeout,
        )

    # As without shards: every process reads a checkpoint, and saves its own part of the state.
    load_checkpoint = Strategy.load_checkpoint
    optimizer_state = Strategy.optimizer_state

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands over what a checkpoint holds of the optimiser."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights and buffers, in every process.

        The module's own ``state_dict`` would take them apart, and forget an average in their place.
        """
        module: Any = self.lightning_module
        gather(module)
        present = dict(module.named_parameters()) | dict(module.named_buffers())
        return {name: present[name].detach() for name in self.names}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Every process takes its parts."""
        assert self.lightning_module is not None
        present = self.lightning_module.state_dict()
        saved = checkpoint["state_dict"].items()
        weights = {name: part_like(value, present[name]) for name, value in saved}
        self.lightning_module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Every process takes its parts."""
        states: list[dict[str, Any]] = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(in_parts(optimizer, state))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Through the run's own IO, in every process."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)


def in_parts(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state with this process's part of every tensor kept."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    memory = {
        number: {key: part_like(value, parameters[number]) for key, value in kept.items()}
        for number, kept in state["state"].items()
    }
    return {**state, "state": memory}


def part_like(value: Any, parameter: Tensor) -> Any:
    """This process's part of a tensor that is taken apart like the parameter; else the value."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:  # a count of steps, or damage that others look for
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)  # all have read the whole
