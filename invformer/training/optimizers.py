"""Optimisers and the learning-rate schedule."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from invformer.training.muon import Muon


class MuonWithAdamW(Optimizer):
    """:class:`.muon.Muon` for weight matrices, AdamW for everything else.

    One object with one state dict, so that a training loop sees an ordinary optimiser.

    Args:
        matrices: parameters of at least two dimensions that act as linear maps.
        others: all other parameters.
        fused: those of ``matrices`` that are queries, keys and values in one.
        lr: learning rate of AdamW.
        muon_lr: learning rate of Muon.
        betas: of AdamW.
        weight_decay: of Muon; AdamW has none here, as vectors and embeddings are not decayed.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        fused: Iterable[nn.Parameter] = (),
        *,
        lr: float,
        muon_lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        matrices, others, three_in_one = list(matrices), list(others), {id(p) for p in fused}
        whole = [p for p in matrices if id(p) not in three_in_one]
        split = [p for p in matrices if id(p) in three_in_one]
        groups = [
            {"params": matrices, "lr": muon_lr, "kind": "muon"},
            {"params": others, "lr": lr, "kind": "adamw"},
        ]
        super().__init__(groups, {"betas": betas, "weight_decay": weight_decay})
        apart = [{"params": p, "parts": n} for p, n in ((whole, 1), (split, 3)) if p]
        self.parts: list[Optimizer] = [
            Muon(apart, lr=muon_lr, weight_decay=weight_decay),
            AdamW(others, lr=lr, betas=betas, weight_decay=0.0),
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of both parts, or none where ``found_inf`` is 1.

        ``found_inf`` is an attribute that a training loop may set, as PyTorch's fused optimisers
        have it: a scalar on the device, which is not waited for.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        tensors = [] if skip is None else self._tensors_on(skip.device)
        before = [flat(some) for some in tensors]
        for part, group in zip(self.parts, self.param_groups, strict=True):
            for inner in part.param_groups:
                inner["lr"] = group["lr"]
            part.step()
        for some, kept in zip(tensors, before, strict=True):
            assert skip is not None
            chosen = torch.where(skip.bool(), kept, flat(some)).split([t.numel() for t in some])
            values = [c.view_as(t) for c, t in zip(chosen, some, strict=True)]
            torch._foreach_copy_(some, values)  # type: ignore  # torch's optimisers call it too
        return loss

    def _tensors_on(self, device: torch.device) -> list[list[torch.Tensor]]:
        """Weights and memory by dtype, without what is counted on the host."""
        weights = [p for group in self.param_groups for p in group["params"]]
        memory = [m for part in self.parts for s in part.state.values() for m in s.values()]
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in (*weights, *memory):
            if torch.is_tensor(tensor) and tensor.device == device:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        return list(by_dtype.values())

    def state_dict(self) -> dict[str, Any]:
        """The states of both parts and the present learning rates."""
        return {
            "parts": [part.state_dict() for part in self.parts],
            "lr": [group["lr"] for group in self.param_groups],
            "initial_lr": [group.get("initial_lr", group["lr"]) for group in self.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        for key in ("lr", "initial_lr"):
            for group, value in zip(self.param_groups, state_dict[key], strict=True):
                group[key] = value


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All entries in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that act as linear maps inside the stack, and all the others.

    Embeddings and the head stay with AdamW, as is usual with Muon.
    """
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        outside = any(part in name for part in ("embedding", "head", "position"))
        (others if parameter.dim() < 2 or outside else matrices).append(parameter)
    return matrices, others


def build_optimizer(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    muon_lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> Optimizer:
    """AdamW on everything, or Muon on the matrices and AdamW on the rest."""
    if name == "muon":
        matrices, others = split_matrices(model)
        fused = [p for name, p in model.named_parameters() if name.endswith("qkv.weight")]
        return MuonWithAdamW(
            matrices, others, fused, lr=lr, muon_lr=muon_lr, betas=betas, weight_decay=weight_decay
        )
    decayed, plain = split_matrices(model)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=betas, fused=True)


def warmup_cosine(
    optimizer: Optimizer, warmup_steps: int, max_steps: int, min_fraction: float = 0.0
) -> LambdaLR:
    """Linear warm-up to the full rate, then half a cosine down to ``min_fraction`` of it."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        return min_fraction + (1 - min_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
