"""Weights divided by an upper bound on their spectral norm, differentiably, once per step."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.kernels.normaliser import Normalisation, gram_normalisers
from invformer.numerics.precision import without_autocast
from invformer.numerics.private import foreach_copy_

# Entries of output maps start at this size. Normalisation hides it from the function, but not from
# Adam, whose steps of a fixed size would hardly turn a matrix of large entries.
INITIAL_OUTPUT = 0.1


class SpectralNormalised(nn.Module):
    """Ŵ = W / σ̄(W) with σ̄ ≥ ‖W‖₂, for a matrix or a batch of matrices.

    σ̄ (:mod:`invformer.kernels.normaliser`) is a function of W alone, so copies, averages and
    resumed runs agree. The gradient is that of uᵀWv at the leading singular pair; the small gap
    σ̄ − uᵀWv is treated as a constant (Miyato et al. 2018 do the same with u and v).

    σ̄ is computed whenever it is needed, unless a training loop refreshes it after every update:
    :func:`set_manual_refresh` and :func:`refresh_normalisers`.
    """

    sigma_bound: Tensor
    u: Tensor
    v: Tensor

    def __init__(self, weight: Float[Tensor, "*batch rows columns"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.manual_refresh = False
        *batch, rows, columns = weight.shape
        # Values of the last refresh, used if ``manual_refresh``.
        self.register_buffer("sigma_bound", weight.new_ones(batch), persistent=False)
        self.register_buffer("u", weight.new_zeros(*batch, rows), persistent=False)
        self.register_buffer("v", weight.new_zeros(*batch, columns), persistent=False)

    def sigma(self) -> Float[Tensor, "*batch"]:
        """σ̄(W), an upper bound in value with the gradient of ‖W‖₂."""
        return sigmas([self], self.weight[None])[0]

    def forward(self) -> Float[Tensor, "*batch rows columns"]:
        """The normalised weight Ŵ, of spectral norm at most one."""
        return self.weight / self.sigma()[..., None, None]


def set_manual_refresh(model: nn.Module, manual: bool = True) -> None:
    """Let a training loop refresh every σ̄ of a model, once per update (or no longer)."""
    for module in normalised(model):
        module.manual_refresh = manual
    if manual:
        refresh_normalisers(model)


def refresh_normalisers(model: nn.Module) -> None:
    """Compute every σ̄ of a model, for forward passes until the next refresh.

    In place, where CUDA graphs read them, unless the weights have another device or format now.
    """
    modules = normalised(model)
    now = normalisations(modules)
    held = [t for module in modules for t in (module.sigma_bound, module.u, module.v)]
    found = [t for each in now for t in each]
    if any(h.device != f.device or h.dtype != f.dtype for h, f in zip(held, found, strict=True)):
        for module, each in zip(modules, now, strict=True):
            module.sigma_bound, module.u, module.v = each
    elif held:
        foreach_copy_(held, found)


def normalised(model: nn.Module) -> list[SpectralNormalised]:
    """All normalised weights of a model."""
    return [module for module in model.modules() if isinstance(module, SpectralNormalised)]


def normalisations(weights: Sequence[SpectralNormalised]) -> list[Normalisation]:
    """σ̄, u and v of the present weights."""
    matrices = [w.weight.detach() for w in weights]
    if torch.compiler.is_compiling():  # as a decorator, disable loads the compiler (1.5 s)
        return torch.compiler.disable(gram_normalisers)(matrices)  # type: ignore  # untyped
    return gram_normalisers(matrices)


def sigmas(
    weights: Sequence[SpectralNormalised], w: Float[Tensor, "weights *batch rows columns"]
) -> Float[Tensor, "weights *batch"]:
    """σ̄ of several weights with the gradient of uᵀWv; ``w`` is these weights, stacked."""
    if weights[0].manual_refresh:
        known = [(each.sigma_bound, each.u, each.v) for each in weights]
    else:
        known = normalisations(weights)
    bound, u, v = map(torch.stack, zip(*known, strict=True))
    bound = bound.clamp_min(least_norm(w.dtype))
    if not torch.is_grad_enabled():
        return bound
    with without_autocast(w.device):
        # Rows uᵀW: on a CPU batches of columns W v take nine times as long.
        norm = ((u.unsqueeze(-2) @ w).squeeze(-2) * v).sum(-1)
    return bound + (norm - norm.detach())


def normalised_weights(
    weights: Sequence[SpectralNormalised],
    factors: Float[Tensor, "weights *#batch #rows #columns"],
    further: Float[Tensor, "weights *#batch #rows #columns"] | None = None,
    norm: Literal["spectral", "entry_max"] = "spectral",
) -> Float[Tensor, "weights *batch rows columns"]:
    """Ŵ · factor (· further) of several weights of one shape; factors by row or column.

    Ŵ = W / σ̄(W); in entry_max W / ‖Wᵀ‖_∞.
    """
    w = torch.stack([each.weight for each in weights])
    if norm == "spectral":
        size = sigmas(weights, w)
    else:
        size = max_row_sum(w.mT).clamp_min(least_norm(w.dtype))
    scaled = w * (factors / size[..., None, None])
    return scaled if further is None else scaled * further


def least_norm(dtype: torch.dtype) -> float:
    """What is divided by is at least this, so that a zero matrix has finite gradients.

    Products of a gradient with two or three inverse norms stay in range.
    """
    in_range = torch.finfo(torch.promote_types(dtype, torch.float32)).tiny ** 0.32
    return max(in_range, torch.finfo(dtype).tiny)


def write_to(weight: Tensor, channels: slice | None) -> Tensor:
    """The weight with every output channel (column) outside ``channels`` set to zero."""
    if channels is None:
        return weight
    kept = torch.zeros_like(weight)
    kept[..., channels] = weight[..., channels]
    return kept


def max_row_sum(w: Tensor) -> Tensor:
    """‖W‖_∞, the largest absolute row sum."""
    return w.abs().sum(-1).amax(-1)
