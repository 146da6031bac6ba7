"""Stacks of invertible blocks: their inverse, and the error through them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from invformer.nn.activation_norm import ChannelAffine
from invformer.nn.branch import LipschitzBranch, frozen_weights, shared_weights
from invformer.nn.channel_metric import ChannelMetric
from invformer.nn.position_bias import VisibilityMask
from invformer.nn.residual import InvertibleBlock, InvertibleResidual, MetricBlock
from invformer.numerics.error_bound import (
    ErrorStep,
    contraction_error_bound,
    residual_step,
    scale_step,
    stack_error_bound,
)
from invformer.numerics.fixed_point import FixedPointSolution
from invformer.numerics.norms import Norm, norm_upper


@dataclass(frozen=True)
class StackSolution:
    """The input of a stack found from its output, layer by layer.

    Attributes:
        value: the recovered input, (*batch, N, D).
        error_bound: bound on the distance of ``value`` from the input that was pushed up, forward
            rounding included (by the rounding model of docs/numerics.md), in the stack's norm, per
            sample; inf where nothing is proven.
        layers: the fixed-point solution of every residual layer, from the top down.
    """

    value: Tensor
    error_bound: Float[Tensor, "*batch"]
    layers: dict[str, FixedPointSolution]


def apply_blocks(
    blocks: Iterable[nn.Module], x: Float[Tensor, "*batch tokens width"], recompute: bool
) -> Float[Tensor, "*batch tokens width"]:
    """The blocks in order; with ``recompute`` the backward pass keeps only what is between them."""
    for block in blocks:
        if recompute and torch.is_grad_enabled():
            x = checkpoint(block, x, use_reentrant=False)
        else:
            x = block(x)
    return x


class StackBounds(Protocol):
    """What inversion needs of a certificate."""

    @property
    def norm(self) -> Norm:
        """The norm in which the bounds are stated."""
        ...

    @property
    def kind(self) -> Literal["global", "causal"]:
        """Lipschitz constants, or diagonal blocks."""
        ...

    @property
    def per_branch(self) -> dict[str, float]:
        """Proven bound of every residual branch."""
        ...

    @property
    def seq_len(self) -> int:
        """Longest sequence for which the bounds hold."""
        ...


class InvertibleStack(nn.Module):
    """A chain of invertible blocks; block l's layers are named ``block_0l/attention`` and so on.

    Args:
        blocks: the blocks, bottom first.
        seq_len: longest sequence.
        norm: the norm in which the branches' targets are set.
        kind: ``global`` if the targets bound Lipschitz constants, ``causal`` if they bound the
            diagonal Jacobian blocks.

    Raises:
        ValueError: an attention knows fewer positions than that.
    """

    def __init__(
        self,
        blocks: list[InvertibleBlock],
        seq_len: int,
        norm: Norm = "token_max",
        kind: Literal["global", "causal"] = "global",
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.seq_len = seq_len
        self.norm: Norm = norm
        self.kind: Literal["global", "causal"] = kind
        self.checkpoint_activations = False
        for name, branch in self.branches():
            position = getattr(branch, "position", None)
            if isinstance(position, VisibilityMask) and position.seq_len < seq_len:
                raise ValueError(
                    f"{name} knows {position.seq_len} positions, fewer than seq_len={seq_len}"
                )

    def layers(self) -> Iterator[tuple[str, InvertibleResidual | ChannelAffine]]:
        """Every layer by its full name, in the order they act."""
        for index, block in enumerate(self.blocks):
            assert isinstance(block, InvertibleBlock)
            for name, layer in block.layers():
                yield f"block_{index:02d}/{name}", layer

    def residual_layers(self) -> Iterator[tuple[str, InvertibleResidual]]:
        """Every residual layer by its full name, in the order they act."""
        for name, layer in self.layers():
            if isinstance(layer, InvertibleResidual):
                yield name, layer

    def branches(self) -> Iterator[tuple[str, LipschitzBranch]]:
        """Every residual branch by its full name, in the order they act."""
        for name, layer in self.residual_layers():
            yield name, layer.branch

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """Apply the blocks in order."""
        with shared_weights(self.sharing_branches(), self.shared_metrics(x)):
            return apply_blocks(self.blocks, x, self.checkpoint_activations)

    def sharing_branches(self) -> list[LipschitzBranch]:
        """Whose weights are computed before the first block: none where each block is by itself."""
        compiled = any(block._compiled_call_impl is not None for block in self.blocks)
        if self.checkpoint_activations or compiled or torch.compiler.is_compiling():
            return []
        return [branch for _, branch in self.branches()]

    def shared_metrics(self, x: Tensor) -> dict[LipschitzBranch, ChannelMetric]:
        """The metrics that a forward pass of x folds into shared weights."""
        return {
            layer.branch: metric
            for block in self.blocks
            if isinstance(block, MetricBlock) and block.is_folded(x)
            for layer, metric in block.metrics()
            if layer.input_radius is None
        }

    @torch.no_grad()
    def initialise(self, x: Float[Tensor, "*batch tokens width"]) -> None:
        """Initialise every scale and shift from the activations that this batch produces."""
        for block in self.blocks:
            assert isinstance(block, InvertibleBlock)
            x = block.initialise(x)

    @torch.no_grad()
    def inverse(
        self, z: Float[Tensor, "*batch tokens width"], certificate: StackBounds, **options: Any
    ) -> StackSolution:
        """Undo the layers from the top down.

        The error bound follows E ← E · max e^{−s} through a channel-wise map (and its rounding) and
        E ← e_l + E / (1 − c_l) through a residual layer whose own bound is e_l. A causal constant
        bounds no error, so there the bound is infinite (docs/numerics.md).

        Args:
            z: the output of the stack.
            certificate: proven bounds of this stack, for the weights as cast to the format it runs
                in. Under autocast z does not tell which that is, so the caller sees to it: float32
                and float64 bounds differ by about 1e-7 of their size, half precision's by 1e-3.
            options: passed to every layer's inverse. With ``evidence=False`` the same value comes
                for a quarter to a third less work below float64, and nothing is proven of it.

        Raises:
            ValueError: the certificate is of another kind or norm than this stack's targets, of
                another stack or of shorter sequences.
        """
        if (certificate.kind, certificate.norm) != (self.kind, self.norm):
            raise ValueError(
                f"the certificate is {certificate.kind} in {certificate.norm}, the stack's targets "
                f"are {self.kind} in {self.norm}: certify the stack without a kind or norm"
            )
        self._require_own(certificate, z.shape[-2])
        solutions: dict[str, FixedPointSolution] = {}
        steps: list[ErrorStep] = []
        with frozen_weights(self):
            for name, layer in reversed(list(self.layers())):
                if isinstance(layer, ChannelAffine):
                    steps.append(scale_step(z, layer.log_scale, layer.shift, self.norm))
                    z = layer.inverse(z)
                    continue
                bound = certificate.per_branch[name]
                solutions[name] = layer.inverse(
                    z, lipschitz_bound=bound, norm=self.norm, contraction=self.kind, **options
                )
                z = solutions[name].value
                steps.append(residual_step(solutions[name].error_bound, bound))
        error = stack_error_bound(steps).to(z.device).expand(z.shape[:-2])
        if self.kind == "causal":
            error = torch.full_like(error, torch.inf)
        return StackSolution(value=z, error_bound=error, layers=solutions)

    @torch.no_grad()
    def preimage_bound(
        self,
        x: Float[Tensor, "samples tokens width"],
        z: Float[Tensor, "samples tokens width"],
        certificate: StackBounds,
    ) -> Float[Tensor, "samples"]:
        """Bound on ‖x − x*‖ for every x* that the forward pass takes to z, from pushing x up.

        Nothing is solved: x + f(x) never brings two points nearer to each other than by the factor
        1 − c, so that E ← (E + rounding of both)/(1 − c_l) from the top down, from E = ‖z − F(x)‖.

        With bounds of diagonal blocks it holds at the first token where x* differs from x, which is
        all that texts need: if it is below the distance of any two symbols, no text but that of x
        has the output z. That rests on a forward pass which computes equal beginnings equally,
        whatever follows them (docs/numerics.md).

        Args:
            x: what may be the input.
            z: the output that was seen, of the same forward pass.
            certificate: proven bounds of this stack, of Lipschitz constants or of diagonal blocks.

        Returns:
            One bound per sample, in the stack's norm, by the rounding model.

        Raises:
            ValueError: the certificate is stated in another norm, or it is of another stack or of
                shorter sequences.
        """
        if certificate.norm != self.norm:
            raise ValueError(f"bounds in {certificate.norm}, but lengths in {self.norm}")
        self._require_own(certificate, z.shape[-2])
        difference = z.double() - self(x).double()
        top = ErrorStep(1.0, norm_upper(difference, self.norm))
        upwards: list[ErrorStep] = []
        with frozen_weights(self):
            for name, layer in self.layers():
                y = layer(x)
                if isinstance(layer, ChannelAffine):
                    upwards.append(scale_step(y, layer.log_scale, layer.shift, self.norm))
                else:
                    bound = certificate.per_branch[name]
                    both = 2 * layer.rounding(x, y, self.norm)
                    upwards.append(residual_step(contraction_error_bound(both, bound), bound))
                x = y
        return stack_error_bound([top, *reversed(upwards)])

    def _require_own(self, certificate: StackBounds, num_tokens: int) -> None:
        """Refuse bounds that can be seen to be of another stack, or of shorter sequences."""
        names = {name for name, _ in self.residual_layers()}
        if differing := sorted(certificate.per_branch.keys() ^ names):
            raise ValueError(
                f"the certificate is of another stack: {differing[0]} is in one and not the other"
            )
        if num_tokens > certificate.seq_len:
            raise ValueError(
                f"the certificate holds up to {certificate.seq_len} tokens, not for {num_tokens}"
            )
