"""Weights divided by an upper bound on their spectral norm, differentiably, once per step."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from invformer.kernels.normaliser import Normalisation, gram_normalisers

# Squarings per refresh: on trained weights σ̄ then exceeds the norm by about 0.1 %.
NUM_STEPS = 8
# Entries of output maps start at this size. Normalisation hides it from the function, but not from
# Adam, whose steps of a fixed size would hardly turn a matrix of large entries.
INITIAL_OUTPUT = 0.1


class SpectralNormalised(nn.Module):
    """Ŵ = W / σ̄(W) with σ̄ ≥ ‖W‖₂, for a matrix or a batch of matrices.

    σ̄ (:mod:`invformer.kernels.normaliser`) is above the norm and a function of W alone, so copies,
    averages and resumed runs agree without carrying vectors along. The gradient is that of
    σ = uᵀWv at the leading singular pair, which comes with it; the small gap σ̄ − uᵀWv is treated
    as a constant (Miyato et al. 2018 do the same with u and v).

    σ̄ is computed whenever it is needed, unless a training loop says that it refreshes the constants
    itself after every update: :func:`set_manual_refresh` and :func:`refresh_normalisers`.
    """

    sigma_bound: Tensor
    u: Tensor
    v: Tensor

    def __init__(self, weight: Float[Tensor, "*batch rows columns"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.manual_refresh = False
        *batch, rows, columns = weight.shape
        # Those of the last refresh; only used while ``manual_refresh``.
        self.register_buffer("sigma_bound", weight.new_ones(batch), persistent=False)
        self.register_buffer("u", weight.new_zeros(*batch, rows), persistent=False)
        self.register_buffer("v", weight.new_zeros(*batch, columns), persistent=False)

    def sigma(self) -> Float[Tensor, "*batch"]:
        """σ̄(W), an upper bound in value with the gradient of ‖W‖₂."""
        return sigmas([self])[0]

    def forward(
        self, factor: Float[Tensor, "..."] | float = 1.0
    ) -> Float[Tensor, "*batch rows columns"]:
        """The normalised weight Ŵ, of spectral norm at most one, times a factor (it broadcasts)."""
        factor = torch.as_tensor(factor).to(self.weight)
        return scaled_weights([self], factor[(None,) * max(1, 3 - factor.ndim)])[0]


def set_manual_refresh(model: nn.Module, manual: bool = True) -> None:
    """Let a training loop refresh every σ̄ of a model, once per update (or no longer)."""
    for module in normalised(model):
        module.manual_refresh = manual
    if manual:
        refresh_normalisers(model)


def refresh_normalisers(model: nn.Module) -> None:
    """Compute every σ̄ of a model, for forward passes until the next refresh."""
    modules = normalised(model)
    with torch.inference_mode(False):  # gradients could not pass through tensors made in it
        for module, constants in zip(modules, compute_constants(modules), strict=True):
            # Past nn.Module's own assignment, which is slow for many small weights.
            module._buffers.update(zip(("sigma_bound", "u", "v"), constants, strict=True))


def normalised(model: nn.Module) -> list[SpectralNormalised]:
    """All normalised weights of a model."""
    return [module for module in model.modules() if isinstance(module, SpectralNormalised)]


def compute_constants(weights: Sequence[SpectralNormalised]) -> list[Normalisation]:
    """σ̄, u and v of the present weights, those with Gram matrices of one size at once."""
    matrices = [w.weight.detach() for w in weights]
    if torch.compiler.is_compiling():  # as a decorator, disable loads the compiler (1.5 s)
        return torch.compiler.disable(gram_normalisers)(matrices, NUM_STEPS)  # type: ignore  # untyped
    return gram_normalisers(matrices, NUM_STEPS)


def stacked_constants(weights: Sequence[SpectralNormalised]) -> Normalisation:
    """σ̄, u and v of several weights of one shape, stacked."""
    if weights[0].manual_refresh:
        constants = [(w.sigma_bound, w.u, w.v) for w in weights]
    else:
        constants = compute_constants(weights)
    if len(constants) == 1:
        bound, u, v = constants[0]
        return bound[None], u[None], v[None]
    bounds, us, vs = zip(*constants, strict=True)
    return torch.stack(bounds), torch.stack(us), torch.stack(vs)


def sigmas(weights: Sequence[SpectralNormalised]) -> Float[Tensor, "weights *batch"]:
    """σ̄ of several weights of one shape, with the gradients of their norms."""
    bound, u, v = stacked_constants(weights)
    if not torch.is_grad_enabled():
        return bound
    if torch.compiler.is_compiling():  # which cannot trace a function with its own jvp
        along = torch.stack([w.weight for w in weights]) * u.unsqueeze(-1) * v.unsqueeze(-2)
        norm = along.sum((-2, -1))
        return bound + (norm - norm.detach())
    return SigmasWithGradient.apply(bound, u, v, *(w.weight for w in weights))


def scaled_weights(
    weights: Sequence[SpectralNormalised],
    factors: Float[Tensor, "weights *#batch #rows #columns"],
    further: Float[Tensor, "weights *#batch #rows #columns"] | None = None,
) -> list[Float[Tensor, "*batch rows columns"]]:
    """Ŵ · factor of several weights of one shape: what is small is computed for all at once.

    Args:
        weights: their constants are divided by.
        factors: scalars, one per row or one per column.
        further: more of them: one per column where ``factors`` are per row, or per row otherwise.
    """
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        scales = factors / sigmas(weights)[..., None, None]
        return list(scale_each([w.weight for w in weights], scales, further))
    bound, u, v = stacked_constants(weights)
    return list(ScaledWeights.apply(factors, further, bound, u, v, *(w.weight for w in weights)))


def scale_each(
    weights: Sequence[Tensor], scales: Tensor, further: Tensor | None
) -> Iterator[Tensor]:
    """Every weight times its scale, and times its entry of ``further``.

    One after the other: each is still in the cache when it is taken up again.
    """
    recorded = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
    for w, scale, f in zip(weights, scales, _each(further), strict=False):
        scaled = w * scale
        if f is not None:
            scaled = scaled * f if recorded else scaled.mul_(f)
        yield scaled


class ScaledWeights(torch.autograd.Function):
    """W · factor/σ̄ with the gradients of both, in fewer passes over W than autograd makes."""

    @staticmethod
    def forward(
        ctx: Any,
        factors: Tensor,
        further: Tensor | None,
        sigma: Tensor,
        u: Tensor,
        v: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        """Every weight times its scale."""
        ctx.save_for_backward(factors, further, sigma, u, v, *weights)
        return tuple(scale_each(weights, factors / sigma[..., None, None], further))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """g · factor/σ̄ − ⟨g, W · factor⟩/σ̄² · u vᵀ for W."""
        factors, further, sigma, u, v, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            return second_derivatives(factors, further, sigma, u, v, weights, gradients)
        sigma = sigma[..., None, None]
        scales = factors / sigma
        sums: list[Tensor] = []
        sums_further: list[Tensor] = []
        for g, w, scale, f in zip(gradients, weights, scales, _each(further), strict=False):
            product = g * w
            sums.append(_summed(product, f, scale))
            if f is not None:
                sums_further.append(_summed(product, scale, f))
        along = torch.stack(sums)
        per_sigma = (along * scales).sum((-2, -1), keepdim=True) / sigma
        left, right = u.unsqueeze(-1) * -per_sigma, v.unsqueeze(-2)
        scaled = scale_each(gradients, scales, further)
        dw = [d.addcmul_(a, b) for d, a, b in zip(scaled, left, right, strict=True)]
        dfactors = (along / sigma).sum_to_size(factors.shape)
        dfurther = torch.stack(sums_further) if sums_further else None
        return dfactors, dfurther, None, None, None, *dw


def _each(further: Tensor | None) -> Iterable[Tensor | None]:
    """The further factor of every weight, or None for each."""
    return itertools.repeat(None) if further is None else further


def _summed(product: Tensor, factor: Tensor | None, like: Tensor) -> Tensor:
    """Σ product · factor to the size of ``like``: over columns, or over rows."""
    if factor is None:
        return product.sum_to_size(like.shape)
    if like.shape[-1] == factor.shape[-2] == 1:
        sums = product @ factor.expand(*factor.shape[:-1], product.shape[-1]).mT
    else:
        sums = factor.mT @ product
    return sums.sum_to_size(like.shape)


def second_derivatives(
    factors: Tensor,
    further: Tensor | None,
    sigma: Tensor,
    u: Tensor,
    v: Tensor,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients of :class:`ScaledWeights` as functions that autograd can derive again."""
    scales = factors / SigmasWithGradient.apply(sigma, u, v, *weights)[..., None, None]
    outputs = list(scale_each(weights, scales, further))
    inputs = (factors, further, *weights)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True))
    df, dfurther, *dw = (next(found) if t is not None and t.requires_grad else None for t in inputs)
    return df, dfurther, None, None, None, *dw


class SigmasWithGradient(torch.autograd.Function):
    """σ̄ with the gradient dσ = uᵀ dW v: nothing to compute on the way forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(sigma: Tensor, u: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        """The bounds as they are."""
        return sigma.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the singular pairs, for derivatives in both directions."""
        _, u, v, *_ = inputs
        ctx.save_for_backward(u, v)
        ctx.save_for_forward(u, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """dσ · u vᵀ."""
        (gradient,) = gradients
        u, v = ctx.saved_tensors
        outer = (gradient.unsqueeze(-1) * u).unsqueeze(-1) * v.unsqueeze(-2)
        return None, None, None, *outer.unbind()

    @staticmethod
    def jvp(ctx: Any, *changes: Tensor | None) -> Tensor:
        """uᵀ dW v."""
        u, v = ctx.saved_tensors
        change = torch.stack([torch.zeros_like(u[0]) if c is None else c for c in changes[3:]])
        return ((change @ v.unsqueeze(-1)).squeeze(-1) * u).sum(-1)


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
