"""Weights divided by an upper bound on their spectral norm, differentiably, once per step."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.numerics.spectral_norm import gram_normaliser

# Squarings per refresh: on trained weights σ̄ then exceeds the norm by about 0.1 %.
NUM_STEPS = 8
# Entries of output maps start at this size: normalisation hides it from the function, but not from
# Adam, whose steps have a size of their own and would hardly turn a matrix of large entries.
INITIAL_OUTPUT = 0.1


class SpectralNormalised(nn.Module):
    """Ŵ = W / σ̄(W) with σ̄ ≥ ‖W‖₂, for a matrix or a batch of matrices.

    σ̄ comes from Gram iteration, which bounds the norm from above and needs no state: it is a
    function of W alone, so copies, averages and resumed runs agree without carrying vectors along.
    The gradient is that of σ = uᵀWv at the leading singular pair, which the same iteration yields;
    the small gap σ̄ − uᵀWv is treated as a constant (Miyato et al. 2018 do the same with u and v).

    By default every forward pass in training mode refreshes σ̄. A training loop that knows when the
    weights change sets ``manual_refresh`` and calls :func:`refresh_normalisers` once per step.
    Leaving training mode refreshes too, so an evaluated model never carries a stale constant.
    """

    def __init__(self, weight: Float[Tensor, "*batch rows columns"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.manual_refresh = False
        *batch, rows, columns = weight.shape
        self.register_buffer("sigma_bound", weight.new_ones(batch), persistent=False)
        self.register_buffer("u", weight.new_zeros(*batch, rows), persistent=False)
        self.register_buffer("v", weight.new_zeros(*batch, columns), persistent=False)
        self.refresh()
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute σ̄, u and v from the present weight (new tensors: old graphs stay valid)."""
        self.sigma_bound, self.u, self.v = gram_normaliser(self.weight.detach(), NUM_STEPS)

    def train(self, mode: bool = True) -> "SpectralNormalised":
        """Switch mode; leaving training mode refreshes the constant."""
        if self.training and not mode:
            self.refresh()
        return super().train(mode)

    def sigma(self) -> Float[Tensor, "*batch"]:
        """σ̄(W), an upper bound in value with the gradient of ‖W‖₂."""
        if self.training and not self.manual_refresh:
            self.refresh()
        if not torch.is_grad_enabled():
            return self.sigma_bound
        with torch.autocast(self.weight.device.type, enabled=False):
            image = (self.weight @ self.v.unsqueeze(-1)).squeeze(-1)
            rayleigh = (self.u * image).sum(-1)
        return rayleigh + (self.sigma_bound - rayleigh).detach()

    def forward(
        self, factor: Float[Tensor, "*#batch #rows #columns"] | float = 1.0
    ) -> Float[Tensor, "*batch rows columns"]:
        """The normalised weight Ŵ, of spectral norm at most one, times ``factor``, in one pass."""
        return self.weight * (factor / self.sigma()[..., None, None])


def set_manual_refresh(model: nn.Module, manual: bool = True) -> None:
    """Hand the refresh of every normaliser to the training loop (or take it back)."""
    for module in model.modules():
        if isinstance(module, SpectralNormalised):
            module.manual_refresh = manual


@torch.no_grad()
def refresh_normalisers(model: nn.Module) -> None:
    """Recompute every σ̄ of a model, all weights of one shape in one batched Gram iteration."""
    groups: dict[tuple, list[SpectralNormalised]] = {}
    for module in model.modules():
        if isinstance(module, SpectralNormalised):
            key = (*module.weight.shape, module.weight.device, module.weight.dtype)
            groups.setdefault(key, []).append(module)
    for group in groups.values():
        bounds, us, vs = gram_normaliser(torch.stack([m.weight.detach() for m in group]), NUM_STEPS)
        for module, bound, u, v in zip(group, bounds, us, vs, strict=True):
            module.sigma_bound, module.u, module.v = bound, u, v


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
