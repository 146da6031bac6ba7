"""Local Lipschitz constants of every residual branch at a fixed probe text, step after step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.nn.attention import TiedL2Attention, attention_jacobian
from invformer.nn.branch import LipschitzBranch, frozen_weights
from invformer.nn.feed_forward import ContractiveFeedForward, feed_forward_jacobian
from invformer.nn.residual import InvertibleResidual, InvertibleStack
from invformer.nn.transformer import CharTransformer, PreNormBlock, PreNormBranch
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.local_lipschitz import LipschitzEstimate
from invformer.numerics.norms import Norm, maximiser
from invformer.numerics.tracking import track

Branch = LipschitzBranch | PreNormBranch


@dataclass(frozen=True)
class BranchGroup:
    """Branches of one shape, linearised together: the leading dimension counts them."""

    names: tuple[str, ...]
    jacobian: LinearMap


class LipschitzProbe:
    """Estimates ‖∂f/∂X‖ of every residual branch f at its input on a fixed text, from below.

    Each call takes ``num_steps`` steps of power iteration in all norms at once, starting from the
    vectors of the call before: while the weights move slowly the estimates follow the true local
    constants. Branches of one shape are stacked and share products. Nothing waits for the device.

    Args:
        model: the language model; its weights may change between calls.
        tokens: the probe text, (sequences, N).
        norms: in which norms to estimate; each has its own vectors.
        num_steps: power iteration steps, of one pair of products, per call.
        seed: of the start vectors, drawn from a generator of its own.
    """

    def __init__(
        self,
        model: CharTransformer,
        tokens: Integer[Tensor, "sequences tokens"],
        norms: tuple[Norm, ...] = ("token_max", "frobenius"),
        num_steps: int = 1,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.norms = norms
        self.num_steps = num_steps
        self.seed = seed
        self.vectors: dict[str, Tensor] = {}

    @torch.no_grad()
    def estimate(self) -> dict[Norm, dict[str, LipschitzEstimate]]:
        """One warm-started estimate per norm and branch; values are (sequences,) on the device."""
        found: dict[Norm, dict[str, LipschitzEstimate]] = {norm: {} for norm in self.norms}
        with frozen_weights(self.model):
            for index, group in enumerate(branch_jacobians(self.model, self.tokens)):
                for estimate in self._look(str(index), group.jacobian):
                    for position, name in enumerate(group.names):
                        found[estimate.norm][name] = select(estimate, position)
        return found

    def _look(self, key: str, jacobian: LinearMap) -> tuple[LipschitzEstimate, ...]:
        vectors = self.vectors.get(key)
        if vectors is None:
            vectors = self._random_start(jacobian)
        look = track(jacobian, vectors, self.norms)
        for _ in range(self.num_steps - 1):
            look = track(jacobian, look.vectors, self.norms)
        self.vectors[key] = look.vectors
        return look.estimates

    def _random_start(self, jacobian: LinearMap) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(jacobian.shape, generator=generator, dtype=torch.float64)
        noise = noise.to(jacobian.device, jacobian.dtype)
        return torch.stack([maximiser(noise, norm, otherwise=noise) for norm in self.norms])

    def state_dict(self) -> dict[str, Tensor]:
        """The warm-started vectors."""
        return dict(self.vectors)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from saved vectors."""
        self.vectors = dict(state)


def select(estimate: LipschitzEstimate, position: int) -> LipschitzEstimate:
    """One branch's share of a group's estimate."""
    return LipschitzEstimate(
        value=estimate.value[position],
        residual=estimate.residual[position],
        num_steps=estimate.num_steps,
        converged=estimate.converged[position],
        norm=estimate.norm,
        vector=estimate.vector[position],
    )


def residual_branches(
    model: CharTransformer, x: Float[Tensor, "*batch tokens width"]
) -> Iterator[tuple[str, Branch, Tensor]]:
    """Every residual branch with its name and its input, for the stack's input x."""
    if isinstance(model.stack, InvertibleStack):
        for name, layer in model.stack.layers():
            if isinstance(layer, InvertibleResidual):
                yield name, layer.branch, x
            x = layer(x)
        return
    for index, block in enumerate(model.stack.blocks):
        assert isinstance(block, PreNormBlock)
        for name, branch in (("attention", block.attention), ("feed_forward", block.feed_forward)):
            yield f"block_{index:02d}/{name}", branch, x
            x = x + branch(x)


def branch_jacobians(model: CharTransformer, tokens: Tensor) -> list[BranchGroup]:
    """The Jacobians of all residual branches at a text, stacked wherever shapes agree."""
    found = list(residual_branches(model, model.embedding(tokens)))
    groups: dict[type, list[tuple[str, Branch, Tensor]]] = {}
    for name, branch, x in found:
        kind = type(branch) if isinstance(branch, LipschitzBranch) else object
        groups.setdefault(kind, []).append((name, branch, x))
    jacobians = []
    for members in groups.values():
        names = tuple(name for name, _, _ in members)
        branches = [branch for _, branch, _ in members]
        x = torch.stack([x for _, _, x in members])
        if all(isinstance(b, TiedL2Attention) for b in branches):
            jacobians.append(BranchGroup(names, stacked_attention(branches, x)))
        elif all(isinstance(b, ContractiveFeedForward) for b in branches):
            jacobians.append(BranchGroup(names, stacked_feed_forward(branches, x)))
        else:
            jacobians.extend(
                BranchGroup((name,), leading_one(branch.linearise(x)))
                for name, branch, x in members
            )
    return jacobians


def stacked_attention(branches: list, x: Tensor) -> LinearMap:
    """The Jacobians of several attention branches as one map with a leading branch dimension."""
    w_q, g = (torch.stack(ws)[:, None] for ws in zip(*(b.weights() for b in branches), strict=True))
    bias = torch.stack([b.position(x.shape[-2]) for b in branches])[:, None]
    return attention_jacobian(x, w_q, g, bias)


def stacked_feed_forward(branches: list, x: Tensor) -> LinearMap:
    """The Jacobians of several feed-forward branches as one map with a leading branch dimension."""
    w_in, b_in, w_out, sharpness = (
        torch.stack(ws) for ws in zip(*(b.weights() for b in branches), strict=True)
    )
    return feed_forward_jacobian(
        x,
        w_in[:, None],
        b_in[:, None, None],
        w_out[:, None],
        sharpness[:, None, None],
        activation=branches[0].activation,
    )


def leading_one(jacobian: LinearMap) -> LinearMap:
    """The same map with a leading branch dimension of size one, one norm after the other."""
    return LinearMap(
        jvp=lambda vectors: torch.stack([jacobian.jvp(v[0])[None] for v in vectors]),
        vjp=lambda vectors: torch.stack([jacobian.vjp(v[0])[None] for v in vectors]),
        shape=torch.Size((1, *jacobian.shape)),
        dtype=jacobian.dtype,
        device=jacobian.device,
    )
