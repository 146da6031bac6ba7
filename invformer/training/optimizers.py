"""Optimisers and the learning-rate schedule."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from invformer.config.schema import OptimConfig
from invformer.numerics.private import foreach_copy_
from invformer.training import muon


class MuonWithAdamW(Optimizer):
    """Muon (:func:`.muon.update`) for groups of matrices, AdamW for everything else.

    An ordinary optimiser, whose first groups are Muon's. Both keep their memory in its state.
    """

    def __init__(self, matrices: list[dict[str, Any]], adamw: AdamW) -> None:
        self.adamw = adamw
        super().__init__([*matrices, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters, or of none where ``found_inf`` is 1.

        ``found_inf`` is an attribute that a training loop may set, as PyTorch's fused optimisers
        have it: a scalar on the device, which is not waited for.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Muon's groups, and only these, have a momentum.
        of_muon = [g for g in self.param_groups if "momentum" in g]
        self.adamw.param_groups = [g for g in self.param_groups if "momentum" not in g]
        self.adamw.state = self.state
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        self.adamw.found_inf = skip  # type: ignore[attr-defined]  # its fused kernel looks at it
        self.adamw.step()
        if skip is None:
            for group in of_muon:
                muon.update(group, self.state)
            return loss
        matrices = [p for group in of_muon for p in group["params"]]
        moved = (p for p in matrices if p.grad is not None)
        held = matrices + [muon.average_of(p, self.state[p]) for p in moved]
        before = torch.cat([t.flatten() for t in held])  # in one vector: one launch for all
        for group in of_muon:
            muon.update(group, self.state)
        after = torch.cat([t.flatten() for t in held])
        chosen = torch.where(skip.bool(), before, after).split([t.numel() for t in held])
        values = [c.view_as(t) for c, t in zip(chosen, held, strict=True)]
        foreach_copy_(held, values)
        return loss


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """The present rates by the keys of metrics.jsonl; Muon's only where there is Muon."""
    rates = {"optim/lr": optimizer.param_groups[-1]["lr"]}
    if isinstance(optimizer, MuonWithAdamW):
        rates["optim/muon_lr"] = optimizer.param_groups[0]["lr"]
    return rates


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that act as linear maps inside the stack, and all the others.

    Embeddings and the head stay with AdamW, as is usual with Muon.
    """
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        outside = any(part in name for part in ("embedding", "head", "position"))
        (others if parameter.dim() < 2 or outside else matrices).append(parameter)
    return matrices, others


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """AdamW on everything, or Muon on the matrices and AdamW on the rest.

    Vectors and embeddings are not decayed. Queries, keys and values in one weight are three
    matrices for Muon.
    """
    matrices, others = split_matrices(model)
    decay = config.weight_decay
    adamw: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "fused": True}
    if config.name == "muon":
        fused = {id(p) for name, p in model.named_parameters() if name.endswith("qkv.weight")}
        options = {"lr": config.muon_lr, "weight_decay": decay, "momentum": muon.MOMENTUM}
        groups = [
            {"params": [p for p in matrices if (id(p) in fused) == (parts == 3)], "parts": parts}
            for parts in (1, 3)
        ]
        of_muon = [group | options for group in groups if group["params"]]
        return MuonWithAdamW(of_muon, AdamW(others, weight_decay=0.0, **adamw))
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, **adamw)


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
