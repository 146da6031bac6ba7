"""The certificate of an invertible stack: proven constants, one norm, no guesses."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from invformer.errors import NonFiniteError
from invformer.nn.activation_norm import ActivationNorm, ChannelAffine
from invformer.nn.attention import (
    ContractiveL2Attention,
    L2Attention,
    PaperContractiveL2Attention,
)
from invformer.nn.bounded_attention import BoundedAttention
from invformer.nn.branch import LipschitzBranch, frozen_weights
from invformer.nn.channel_metric import ChangeOfMetric, ChannelMetric
from invformer.nn.convolutional_feed_forward import ContractiveConvolutionalFeedForward
from invformer.nn.feed_forward import ContractiveFeedForward
from invformer.nn.residual import InvertibleBlock, InvertibleResidual, MetricBlock
from invformer.nn.spectral import SpectralNormalised
from invformer.nn.stack import InvertibleStack
from invformer.numerics.norms import NORMS, Norm
from invformer.numerics.rounding import product_up, sum_up

Kind = Literal["global", "causal"]
# What there are proofs for. A subclass may compute something else.
BLOCKS = (InvertibleBlock, MetricBlock)
LAYERS = (InvertibleResidual, ActivationNorm, ChannelMetric, ChangeOfMetric)
BRANCHES = (
    L2Attention, ContractiveL2Attention, PaperContractiveL2Attention, BoundedAttention,
    ContractiveFeedForward, ContractiveConvolutionalFeedForward,
)  # fmt: skip


class NoCertificateError(ValueError):
    """There is no proof for something in the model, so there is no certificate either."""


@dataclass(frozen=True)
class Certificate:
    """Proven upper bounds for one stack.

    Attributes:
        norm: the norm on sequences in which every bound here is stated.
        kind: ``global`` (Lipschitz constants) or ``causal`` (norms of the diagonal Jacobian blocks,
            enough to invert a causal stack; not Lipschitz constants).
        target: the largest ``lipschitz_target`` of the branches: what was asked for.
        targets: the target of every residual branch, by name.
        per_branch: proven bound for every residual branch, by name.
        scales: largest scale of every channel-wise map, by name, rounded up.
        inverse_scales: largest inverse scale of every channel-wise map, by name, rounded up.
        total: bound on the whole stack, Π (1 + c_l) Π scales; None where ``kind`` is causal.
        dtype: the precision the weights were cast to before they were certified.
        seq_len: longest sequence for which the bounds hold.
        in_metrics: whether a branch's bound is one in coordinates of its own, ‖e^s x‖ for ‖x‖
            (:class:`.channel_metric.ChannelMetric`), and what it adds may expand in plain ones.
    """

    norm: Norm
    kind: Kind
    target: float
    targets: dict[str, float]
    per_branch: dict[str, float]
    scales: dict[str, float]
    inverse_scales: dict[str, float]
    total: float | None
    dtype: str
    seq_len: int
    in_metrics: bool

    @property
    def bound_max(self) -> float:
        """The largest bound of any branch."""
        return max(self.per_branch.values())

    @property
    def holds(self) -> bool:
        """Whether every branch is proven to be at or below its own target."""
        return all(bound <= self.targets[name] for name, bound in self.per_branch.items())

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for JSON."""
        return asdict(self)


def certify(
    model: nn.Module,
    norm: Norm | None = None,
    dtype: torch.dtype = torch.float32,
    kind: Kind | None = None,
) -> Certificate:
    """Prove a bound for every branch of a model's invertible stack, on the weights as cast.

    All arithmetic is in float64 and rounded outward; spectral norms are those of
    :func:`.spectral_norm.spectral_norm_bound`.

    Args:
        model: an InvertibleStack, or a module whose ``stack`` is one.
        norm: None for the norm in which the stack's targets are set.
        dtype: precision of the forward pass; the weights are cast to it first.
        kind: None for the kind of the stack's targets; ``causal`` bounds the diagonal blocks of any
            stack with causal masks, often far below its Lipschitz constants.

    Returns:
        The certificate. A bound above the target is reported, not hidden: see :func:`enforce`.

    Raises:
        NoCertificateError: the stack contains something without a proof, a subclass or a forward
            hook among it, or nothing is known of it in this norm or of this kind.
        ValueError: there is no such norm or kind.
    """
    stack = invertible_stack(model)
    require_own(stack)
    norm, kind = norm or stack.norm, kind or stack.kind
    for name, value, choices in (("norm", norm, NORMS), ("kind", kind, get_args(Kind))):
        if value not in choices:
            raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")
    if kind == "causal" and norm != "token_max":
        raise NoCertificateError(
            f"diagonal blocks are bounded in the Euclidean norm of a token, not in {norm}: "
            "certify them in token_max"
        )
    per_branch: dict[str, float] = {}
    scales: dict[str, float] = {}
    inverse_scales: dict[str, float] = {}
    with frozen_weights(stack):
        for name, layer in stack.layers():
            if isinstance(layer, ChannelAffine):
                scales[name], inverse_scales[name] = scale_bounds(layer, dtype)
            else:
                per_branch[name] = branch_bound(name, layer, norm, kind, dtype)
    total = None
    if kind == "global":
        total = product_up(*(sum_up(1.0, c) for c in per_branch.values()), *scales.values())
    targets = {name: branch.lipschitz_target for name, branch in stack.branches()}
    return Certificate(
        norm=norm,
        kind=kind,
        target=max(targets.values()),
        targets=targets,
        per_branch=per_branch,
        scales=scales,
        inverse_scales=inverse_scales,
        total=total,
        dtype=str(dtype).removeprefix("torch."),
        seq_len=stack.seq_len,
        in_metrics=any(isinstance(block, MetricBlock) for block in stack.blocks),
    )


def enforce(model: nn.Module, dtype: torch.dtype = torch.float32) -> Certificate:
    """Certify in the target's norm; shrink branches above their targets and certify again.

    In float32 the margin built into the normalisation makes this a no-op; in bfloat16, where the
    cast alone moves a spectral norm by up to 0.4 %, it is what keeps the promise.

    Raises:
        NonFiniteError: a weight is NaN or infinite, so nothing can be proven.
        NoCertificateError: the stack contains something without a proof.
    """
    stack = invertible_stack(model)
    require_finite(stack)
    for module in stack.modules():  # a correction is kept: it must not make up for old constants
        if isinstance(module, SpectralNormalised):
            module.refresh()
    certificate = certify(stack, dtype=dtype)
    for attempt in range(5):
        if certificate.holds:
            return certificate
        for name, branch in stack.branches():
            bound = certificate.per_branch[name]
            if not math.isfinite(bound):
                raise NonFiniteError(f"{name}: its weights are not finite, nothing can be proven")
            if bound > branch.lipschitz_target:
                # Scaling rounds the cast weights anew: leave room, and more each time.
                room = max(1e-6, torch.finfo(dtype).eps / 8) * 2**attempt
                branch.correction.mul_(branch.lipschitz_target / bound * (1 - room))
        certificate = certify(stack, dtype=dtype)
    return certificate


def require_finite(stack: InvertibleStack) -> None:
    """Look at every parameter, also at those that no constant depends on.

    Raises:
        NonFiniteError: one of them is NaN or infinite; the message names its layer.
    """
    for name, layer in stack.layers():
        tensors = list(layer.parameters())
        if isinstance(layer, ChannelAffine):
            tensors += [layer.log_scale, layer.shift]
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise NonFiniteError(f"{name}: its weights are not finite, nothing can be proven")


def invertible_stack(model: nn.Module) -> InvertibleStack:
    """The stack that a certificate speaks about.

    Raises:
        NoCertificateError: there is none; the message names what stands in its place.
    """
    stack = getattr(model, "stack", model)
    if isinstance(stack, InvertibleStack):
        return stack
    for name, module in stack.named_modules():
        if isinstance(module, nn.LayerNorm):
            raise NoCertificateError(
                f"{name or type(module).__name__}: LayerNorm in the stack has no useful Lipschitz "
                "bound (it grows like 1/√ε); certify a contractive model"
            )
    raise NoCertificateError(
        f"{type(stack).__name__} is no invertible stack, so there is nothing to certify"
    )


def require_own(stack: InvertibleStack) -> None:
    """Refuse whatever may compute something else than what is proven.

    Raises:
        NoCertificateError: a block, layer or branch of a type without a proof, or a module whose
            forward pass was replaced or is hooked; the message names it.
    """
    for name, module in stack.named_modules():
        changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
        if changed:
            raise NoCertificateError(
                f"{name or 'the stack'}: a forward hook, or a forward of its own, may change what "
                "it computes; remove it, then certify"
            )
    for index, block in enumerate(stack.blocks):
        require_type(f"block_{index:02d}", block, BLOCKS)
        for name, layer in block.named_children():
            require_type(f"block_{index:02d}/{name}", layer, LAYERS)
    for name, branch in stack.branches():
        require_type(name, branch, BRANCHES)


def require_type(name: str, module: nn.Module, known: tuple[type, ...]) -> None:
    """Refuse another type than those that something is proven of.

    Raises:
        NoCertificateError: it is none of them.
    """
    if type(module) not in known:
        raise NoCertificateError(f"{name}: no proof is known for {type(module).__name__}")


def branch_bound(
    name: str, layer: InvertibleResidual, norm: Norm, kind: Kind, dtype: torch.dtype
) -> float:
    """The proven bound of one residual branch."""
    branch = layer.branch
    for part, module in branch.named_modules():
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            raise NoCertificateError(
                f"{name}.{part}: dropout in training mode multiplies the constant by up to "
                f"1/(1 − {module.p}); call eval() first"
            )
    try:
        return (
            branch.causal_bound(dtype) if kind == "causal" else layer.lipschitz_bound(norm, dtype)
        )
    except ValueError as error:
        raise NoCertificateError(f"{name}: {error}") from None


def scale_bounds(layer: ChannelAffine, dtype: torch.dtype) -> tuple[float, float]:
    """max_k e^{s_k} and max_k e^{−s_k}, rounded up: the layer's constant and its inverse's.

    As computed in the format s is kept in, and in ``dtype``: the format of the exponential decides
    its last digits.
    """
    kept = layer.log_scale.detach()
    logs = (kept, kept.to(dtype))
    largest = max(s.exp().max().item() for s in logs)
    of_inverse = max((-s).exp().max().item() for s in logs)
    return product_up(largest, 1 + 1e-6), product_up(of_inverse, 1 + 1e-6)


def as_branches(model: nn.Module) -> dict[str, LipschitzBranch]:
    """The residual branches of a model by name; empty for a model without an invertible stack."""
    stack = getattr(model, "stack", model)
    return dict(stack.branches()) if isinstance(stack, InvertibleStack) else {}


def certified_branches(
    model: nn.Module, norm: Norm, dtype: torch.dtype | None = None
) -> dict[str, float]:
    """Certified constants of every branch in ``norm``; empty without an invertible stack."""
    stack = getattr(model, "stack", model)
    if not isinstance(stack, InvertibleStack):
        return {}
    with frozen_weights(stack):
        return {name: layer.lipschitz_bound(norm, dtype) for name, layer in stack.residual_layers()}
