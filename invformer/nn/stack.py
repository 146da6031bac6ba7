"""Stacks of invertible blocks: weights, proven bounds, the inverse, and the error through it."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from invformer.branches.branch import LipschitzBranch
from invformer.nn.certificate import Certificate, NoCertificateError, require_type
from invformer.nn.inverse import StackSolution, with_gradients
from invformer.nn.residual import InvertibleBlock, InvertibleResidual
from invformer.numerics.error_bound import ErrorStep, scale_step, stack_error_bound
from invformer.numerics.fixed_point_solution import FixedPointSolution
from invformer.numerics.norms import NORMS, Norm, Tokens, unknown_norm
from invformer.numerics.private import has_hooks, is_compiled
from invformer.numerics.residual_equation import Kind
from invformer.weights.dropout import Dropout
from invformer.weights.position_bias import POSITIONS
from invformer.weights.scaling import ActivationNorm, DiagonalScaling, scalings_together

# The weights of every layer of a stack by its full name, ``block_00/attention`` and so on: those of
# f, D and b; and those of a training step, in which D may be folded into those of f.
StackWeights = dict[str, Any]
FoldedStackWeights = Mapping[str, Any]


def full_name(block: int, layer: str) -> str:
    """The name of a block's layer in the whole stack."""
    return f"block_{block:02d}/{layer}"


class InvertibleStack(nn.Module):
    """A chain of invertible blocks, bottom first, for sequences of up to ``seq_len`` tokens.

    The layers of block l are named ``block_0l/attention`` and so on.

    Args:
        norm: the norm in which the branches' targets are set.
        kind: ``global`` if the targets bound Lipschitz constants, ``causal`` if they bound the
            diagonal Jacobian blocks.
    """

    def __init__(
        self,
        blocks: list[InvertibleBlock],
        seq_len: int,
        norm: Norm = "token_max",
        kind: Kind = "global",
    ) -> None:
        super().__init__()
        if not blocks:
            raise ValueError("a stack has at least one block")
        self.blocks = nn.ModuleList(blocks)
        self.seq_len = seq_len
        self.norm: Norm = norm
        self.kind: Kind = kind
        self.checkpoint_activations = False

    def layers(self) -> Iterator[tuple[str, InvertibleResidual | ActivationNorm]]:
        """Every layer by its full name, in the order they act."""
        for index, block in enumerate(self.blocks):
            assert isinstance(block, InvertibleBlock)
            for name, layer in block.layers():
                yield full_name(index, name), layer

    def residual_layers(self) -> Iterator[tuple[str, InvertibleResidual]]:
        """Every residual layer by its full name, in the order they act."""
        for name, layer in self.layers():
            if isinstance(layer, InvertibleResidual):
                yield name, layer

    def branches(self) -> Iterator[tuple[str, LipschitzBranch]]:
        """Every residual branch by its full name, in the order they act."""
        for name, layer in self.residual_layers():
            yield name, layer.branch

    def groups(self) -> Iterable[dict[str, InvertibleResidual]]:
        """The residual layers by their full names, those of one group together."""
        groups: dict[Hashable, dict[str, InvertibleResidual]] = {}
        for name, layer in self.residual_layers():
            groups.setdefault(layer.group() or name, {})[name] = layer
        return groups.values()

    @overload
    def weights(self, folded: Literal[False] = False) -> StackWeights: ...

    @overload
    def weights(self, folded: bool) -> FoldedStackWeights: ...

    def weights(self, folded: bool = False) -> Any:
        """The weights of every layer, branches of one group at once; once a step is enough.

        ``folded`` is for training steps: scalings of the channels are folded into a branch's
        weights where that is possible, the same function for less. Autocast then rounds x instead
        of D x + b, which is coarser if means of channels are far above their deviations (1.7 times
        in trained models). Certificates and inversion are about the other weights.
        """
        weights: dict[str, Any] = {}
        for layers in self.groups():
            found = InvertibleResidual.weights_of(list(layers.values()), folded)
            weights.update(zip(layers, found, strict=True))
        norms = {n: layer for n, layer in self.layers() if isinstance(layer, ActivationNorm)}
        if norms:
            together = scalings_together(list(norms.values()))
            weights.update(zip(norms, together.unbind(), strict=True))
        return weights

    def forward(
        self,
        x: Tokens,
        weights: FoldedStackWeights | None = None,
        folded: bool = False,
    ) -> Tokens:
        """Apply the blocks in order, with their weights; None computes them, ``folded`` or not."""
        if weights is None and not self.blocks_compute_weights():
            weights = self.weights(folded)
        for index, block in enumerate(self.blocks):
            assert isinstance(block, InvertibleBlock)
            of_block = None
            if weights is not None:
                of_block = {name: weights[full_name(index, name)] for name, _ in block.layers()}
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, of_block, folded, use_reentrant=False)
            else:
                x = block(x, of_block, folded)
        return x

    def blocks_compute_weights(self) -> bool:
        """True if each block computes its own weights: compiled or recomputed."""
        compiled = any(is_compiled(block) for block in self.blocks)
        return compiled or self.checkpoint_activations or torch.compiler.is_compiling()

    def bounds(
        self, norm: Norm, kind: Kind, dtype: torch.dtype, weights: StackWeights
    ) -> dict[str, float]:
        """A bound of every residual branch, proven if :meth:`require_proven` raises nothing.

        It raises NoCertificateError if nothing is known of a branch in this norm or of this kind.
        """
        if norm not in NORMS:
            raise unknown_norm(norm)
        if kind not in get_args(Kind):
            raise ValueError(f"unknown kind {kind!r}: choose one of {', '.join(get_args(Kind))}")
        if kind == "causal" and norm != "token_max":
            raise NoCertificateError(
                f"diagonal blocks are bounded in the Euclidean norm of a token, not in {norm}: "
                "certify them in token_max"
            )
        bounds: dict[str, float] = {}
        for layers in self.groups():
            of_group, used = list(layers.values()), [weights[name].branch for name in layers]
            try:
                found = InvertibleResidual.proven_bounds(of_group, norm, kind, dtype, used)
            except ValueError as error:  # nothing is known in this norm or of this kind
                raise NoCertificateError(f"{next(iter(layers))}: {error}") from None
            bounds.update(zip(layers, found, strict=True))
        return {name: bounds[name] for name, _ in self.residual_layers()}

    def require_proven(self) -> None:
        """Raise NoCertificateError if a module may compute what the proof does not cover.

        It has a type without a proof, a forward hook, or a replaced forward.
        """
        for name, module in self.named_modules():
            if "forward" in vars(module) or has_hooks(module):
                raise NoCertificateError(
                    f"{name or 'the stack'}: a forward hook, or a forward of its own, may change "
                    "what it computes; remove it, then certify"
                )
        # A subclass may compute something else; a branch says itself that it is proven.
        require_type("the stack", self, (InvertibleStack,))
        for index, block in enumerate(self.blocks):
            require_type(f"block_{index:02d}", block, (InvertibleBlock,))
            for name, layer in block.named_children():
                require_type(full_name(index, name), layer, (InvertibleResidual, ActivationNorm))
        for name, layer in self.residual_layers():
            own = type(layer.branch)
            require_type(name, layer.branch, (own,) if getattr(own, "is_proven", False) else ())
            require_type(name, layer.scaling, (DiagonalScaling, type(None)))
            require_type(name, layer.dropout, (Dropout, nn.Identity))
            if isinstance(position := getattr(layer.branch, "position", None), nn.Module):
                require_type(name, position, POSITIONS)  # whose mass enters the bound

    @torch.no_grad()
    def initialise(self, x: Tokens) -> None:
        """Initialise every scale and shift from the activations that this batch produces."""
        for _, layer in self.layers():
            layer.initialise(x)
            x = layer(x)

    def inverse(
        self,
        z: Tokens,
        weights: StackWeights | None = None,
        certificate: Certificate | None = None,
        **options: Any,
    ) -> StackSolution:
        """Undo the layers from the top down: residual ones by their inverse, scalings directly.

        ``error_bound`` is the :func:`.stack_error_bound` of the layers; it is infinite for causal
        constants, which bound no error (docs/numerics.md). ``value`` has implicit gradients of z
        and of every parameter (:mod:`invformer.nn.inverse`), unless they are off.

        Args:
            weights: of the stack; None computes them.
            certificate: proven bounds of this stack, for the weights as cast to the format it runs
                in; None proves them for the format of z, which under autocast is another one.
            options: passed to every layer's inverse. With ``evidence=False`` the same value comes
                for a quarter to a third less work below float64, and nothing is proven of it.

        Raises:
            ValueError: the certificate is of another kind or norm than this stack's targets, or of
                shorter sequences; z is empty or in another format than the weights.
        """
        self.require_proven()
        weights = weights or self.weights()
        weights[next(self.residual_layers())[0]].require_format_of(z)
        if certificate is None:
            with torch.no_grad():
                bounds = self.bounds(self.norm, self.kind, z.dtype, weights)
            longest = self.seq_len
        else:
            certificate.require(self.norm, self.kind)
            bounds, longest = certificate.per_branch, certificate.seq_len
        if z.shape[-2] > longest:
            raise ValueError(f"the certificate holds up to {longest} tokens")
        common: dict[str, Any] = {"norm": self.norm, "kind": self.kind, **options}
        layers = [
            (name, layer, weights[name], {"lipschitz_bound": bounds.get(name), **common})
            for name, layer in self.layers()
        ]
        with torch.no_grad():
            x, solutions, error = self.undo(layers, z.detach())
        parts = [(layer, own, how) for _, layer, own, how in layers]
        return StackSolution(with_gradients(x, z, parts), error, solutions)

    def undo(
        self, layers: Sequence[tuple[str, Any, Any, dict[str, Any]]], x: Tokens
    ) -> tuple[Tokens, dict[str, FixedPointSolution], Float[Tensor, "*batch"]]:
        """The input, a solution of each residual layer, and a bound on the error of the input.

        Layers, bottom first, are given by name, with their weights and options of their inverse.
        """
        solutions: dict[str, FixedPointSolution] = {}
        steps: list[ErrorStep] = []
        batch = x.shape[:-2]
        for name, layer, own, options in reversed(layers):
            if isinstance(layer, ActivationNorm):
                steps.append(scale_step(x, own.log_scale, own.shift, self.norm))
                x = own.undo(x)
                continue
            solutions[name] = found = layer.inverse(x, own, **options)
            steps.extend(found.error_steps)
            x = found.value
        error = stack_error_bound(steps).to(x.device).expand(batch)
        if self.kind == "causal":
            error = torch.full_like(error, torch.inf)
        return x, solutions, error
