"""Proving the certificate of an invertible stack."""

import logging
import math

import torch
from torch import Tensor, nn

from invformer.errors import CertificateViolation, NonFiniteError
from invformer.nn.certificate import Certificate, NoCertificateError
from invformer.nn.stack import InvertibleStack, StackWeights
from invformer.numerics.norms import Norm
from invformer.numerics.residual_equation import Kind
from invformer.numerics.rounding import product_up, sum_up
from invformer.weights.scaling import ActivationNorm, DiagonalScaling
from invformer.weights.spectral import refresh_normalisers

log = logging.getLogger(__name__)


def certify(
    model: nn.Module,
    norm: Norm | None = None,
    dtype: torch.dtype | None = None,
    kind: Kind | None = None,
    weights: StackWeights | None = None,
) -> Certificate:
    """Prove a bound for every branch of a model's invertible stack, on the weights as cast.

    All arithmetic is in float64 and rounded outward, with :func:`.spectral_norm_bound`. A bound
    above the target is reported, not hidden: see :func:`enforce`.

    Args:
        model: an InvertibleStack, or a module whose ``stack`` is one.
        norm: None for the norm in which the stack's targets are set.
        dtype: precision of the forward pass, to which the weights are cast first; None for that of
            the parameters.
        kind: None for the kind of the stack's targets; ``causal`` bounds the diagonal blocks of any
            stack with causal masks, often far below its Lipschitz constants.
        weights: of the stack; None computes them.

    Raises:
        NoCertificateError: the stack contains something without a proof, such as a subclass or a
            forward hook, or nothing is known of it in this norm or of this kind.
        ValueError: there is no such norm or kind.
    """
    stack = invertible_stack(model)
    stack.require_proven()
    norm, kind = norm or stack.norm, kind or stack.kind
    dtype = dtype or parameter_dtype(stack)
    with torch.no_grad():
        weights = weights or stack.weights()
    per_branch = stack.bounds(norm, kind, dtype, weights)
    of_norms: dict[str, Tensor] = {}
    of_scalings: dict[str, Tensor] = {}
    for name, layer in stack.layers():
        if isinstance(layer, ActivationNorm):
            of_norms[name] = weights[name].log_scale
        elif layer.scaling is not None:
            of_scalings[name] = weights[name].scaling.log_scale
    scales = largest_exps(of_norms, dtype)
    largest, of_inverse = (largest_exps(of_scalings, dtype, sign) for sign in (1, -1))
    conditions = {name: product_up(largest[name], of_inverse[name]) for name in of_scalings}
    total = None
    if kind == "global":
        in_plain = (product_up(c, conditions.get(name, 1.0)) for name, c in per_branch.items())
        total = product_up(*(sum_up(1.0, c) for c in in_plain), *scales.values())
    targets = {name: branch.lipschitz_target for name, branch in stack.branches()}
    return Certificate(
        norm=norm,
        kind=kind,
        target=max(targets.values()),
        targets=targets,
        per_branch=per_branch,
        conditions=conditions,
        scales=scales,
        total=total,
        dtype=str(dtype).removeprefix("torch."),
        seq_len=stack.seq_len,
    )


def enforce(model: nn.Module, dtype: torch.dtype | None = None) -> Certificate:
    """Certify in the target's norm; shrink branches above their targets and certify again.

    In float32 the margin in the normalised weights makes this a no-op. In bfloat16 the cast alone
    may lift a spectral norm by 0.4 %. ``dtype`` and errors are those of :func:`certify`, and
    NonFiniteError for a weight that is NaN or infinite.
    """
    stack = invertible_stack(model)
    dtype = dtype or parameter_dtype(stack)
    require_finite(stack)
    refresh_normalisers(stack)  # a correction is kept: it must not make up for an old σ̄
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


def certify_trained(model: nn.Module, dtype: torch.dtype, where: str) -> Certificate | None:
    """The certificate for a trained model's weights as cast to training's format.

    None for baselines. A branch above its target by no more than that cast can do (a run that was
    stopped between two validations) is shrunk, as at a validation; one above it by more is a
    CertificateViolation. ``where`` the model comes from is named in the error.
    """
    if not isinstance(getattr(model, "stack", None), InvertibleStack):
        return None
    certificate = certify(model, dtype=dtype)
    if certificate.holds:
        return certificate
    bounds, targets = certificate.per_branch, certificate.targets
    name = max(bounds, key=lambda name: bounds[name] / targets[name])
    excess = bounds[name] / targets[name] - 1
    if not excess <= torch.finfo(dtype).eps:
        raise CertificateViolation(
            f"{where}: {name} has the bound {bounds[name]:.6g} in {certificate.norm}, its target "
            f"is {targets[name]:.6g}: not what training left; its weights were changed, or this is "
            "a bug"
        )
    log.warning("%s: %s was %.2g above its target and is shrunk", where, name, excess)
    return enforce(model, dtype)


def parameter_dtype(stack: InvertibleStack) -> torch.dtype:
    """The format of the parameters."""
    return next((p.dtype for p in stack.parameters()), torch.get_default_dtype())


def require_finite(stack: InvertibleStack) -> None:
    """Raise NonFiniteError, which names the layer, unless all parameters and scales are finite."""
    for name, layer in stack.layers():
        scalings = [m.weights() for m in layer.modules() if isinstance(m, DiagonalScaling)]
        tensors = [*layer.parameters(), *(w for scaling in scalings for w in scaling)]
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise NonFiniteError(f"{name}: its weights are not finite, nothing can be proven")


def invertible_stack(model: nn.Module) -> InvertibleStack:
    """The stack that a certificate speaks about; NoCertificateError if there is none."""
    stack = getattr(model, "stack", model)
    if not isinstance(stack, InvertibleStack):
        raise NoCertificateError(
            f"nothing is proven of {type(stack).__name__}: certify an InvertibleStack([Invertible"
            "Block(attention, feed_forward)], seq_len) or a model with such a stack, or call "
            "lipschitz_bound(norm) of one branch. LayerNorm has no useful bound"
        )
    return stack


def largest_exps(
    log_scales: dict[str, Tensor], dtype: torch.dtype, sign: int = 1
) -> dict[str, float]:
    """max_k e^{±s_k} for each s, rounded up; for s as stored and as cast, since both are used."""
    if not log_scales:
        return {}
    kept = sign * torch.stack(list(log_scales.values()))
    logs = {kept, kept.to(dtype)}  # one tensor if it has the format
    found = zip(*(s.exp().amax(-1).tolist() for s in logs), strict=True)
    largest = zip(log_scales, map(max, found), strict=True)
    return {name: product_up(size, 1 + 1e-6) for name, size in largest}
