"""Branches of one kind and shape at inputs of their own: outputs, Jacobians, local bounds.

Everything here has a leading dimension of branches: one launch serves all of them, at any depth.
Products with a Jacobian take a further dimension after the sequences, of K vectors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.kernels.attention import only
from invformer.numerics.ball import into_ball, to_ball
from invformer.numerics.linear_map import linearise
from invformer.weights.position_bias import biases_together

# The norm of a certificate, or max_i ‖∂f_i/∂x_i‖₂, which is what a causal certificate bounds.
Measured = Literal["token_max", "frobenius", "entry_max", "diagonal_block"]
# Multiplications in float64 that a tight bound of one branch may take: some seconds.
MOST_TIGHT = 2e11
# Multiplications of a certified spectral norm of a D × D matrix, in D³.
PER_SPECTRAL_NORM = 10
# Output tokens, one for each vector.
Chosen = Integer[Tensor, "branches sequences K"]


class Products(NamedTuple):
    """Products with rows J_i· = ∂f_i/∂X of R output tokens i, or with all of J.

    Attributes:
        jvp: dX ↦ J_i· dX, from (branches, R, M, D) to (branches, R, D), with M = N tokens, or with
            the token i alone; it may overwrite dX. All of J: R sequences, N tokens on both sides.
        vjp: its adjoint, which leaves its argument alone.
    """

    jvp: Callable[[Tensor], Tensor]
    vjp: Callable[[Tensor], Tensor]


class StackedBranches:
    """Branches f of one kind, each at an input of its own: their outputs, then their Jacobians.

    :meth:`forward` is called for one branch after the other. This class differentiates any branches
    automatically, and knows no local bound; the others know those of theirs.

    Args:
        weights: of each branch; None if it takes none.
        num_tokens: N of the inputs.
        input_radius: R of the map ψ_R before each branch, if there is one.
        scale: D, (branches, 1, width), if it is folded into the weights: these have the Jacobian
            D⁻¹ J D.
    """

    def __init__(
        self,
        branches: Sequence[Any],
        weights: Sequence[Any],
        num_tokens: int,
        input_radius: float | None = None,
        scale: Float[Tensor, "branches 1 width"] | None = None,
    ) -> None:
        self.branches, self.weights, self.num_tokens = branches, weights, num_tokens
        self.input_radius, self.scale = input_radius, scale
        self.inputs: list[Tensor] = []  # D x + b of each
        self.points: list[tuple[Tensor, ...]] = []

    def forward(self, u: Float[Tensor, "sequences tokens width"]) -> Tensor:
        """f(ψ_R(u)) of the next branch, at u = D x + b."""
        branch, w = self.branches[len(self.inputs)], self.weights[len(self.inputs)]
        self.inputs.append(u)
        seen = into_ball(u, self.input_radius)
        return branch(seen) if w is None else branch(seen, w)

    def stacked_points(self) -> list[Tensor]:
        """What was kept of every branch, which derivatives and local bounds are made of."""
        return [torch.stack(each) for each in zip(*self.points, strict=True)]

    def whole(self, num_vectors: int = 1) -> Products:
        """J of every sequence, so many times, by automatic differentiation."""
        u = torch.stack(self.inputs).repeat_interleave(num_vectors, 1)
        with only("math"):  # fused attention has no second derivative
            j = linearise(self.together, u)
        if self.scale is None:
            return Products(j.jvp, j.vjp)
        d = self.scale.unsqueeze(1)
        return Products(lambda dx: j.jvp(dx / d) * d, lambda dy: j.vjp(dy * d) / d)

    def together(self, u: Float[Tensor, "branches *batch tokens width"]) -> Tensor:
        """All branches, each at inputs of its own."""
        # Masks too, which ``state_dict`` leaves out.
        states = [{**dict(b.named_parameters()), **dict(b.named_buffers())} for b in self.branches]
        weights = self.weights
        state = {n: torch.stack([each[n].detach() for each in states]) for n in states[0]}
        tensors = [torch.stack(each) for each in zip(*(w or () for w in weights), strict=True)]

        def branch(state: dict[str, Tensor], tensors: list[Tensor], x: Tensor) -> Tensor:
            own = [type(weights[0])(*tensors)] if tensors else []
            return torch.func.functional_call(self.branches[0], state, (x, *own))

        return torch.func.vmap(branch)(state, tensors, into_ball(u, self.input_radius))

    def rows(self, chosen: Chosen, diagonal: bool = False) -> Products:
        """The rows of K output tokens i, or only the diagonal blocks ∂f_i/∂x_i in them."""
        tokens = torch.arange(self.num_tokens, device=chosen.device)
        is_own = (chosen.flatten(1, 2).unsqueeze(-1) == tokens).unsqueeze(-1)
        jvp, vjp = self.products(chosen, is_own.to(self.inputs[0].dtype))
        if not diagonal:
            return Products(jvp, vjp)
        return Products(lambda dx: jvp(is_own * dx), lambda dy: at_chosen(vjp(dy), chosen))

    def products(self, chosen: Chosen, is_own: Float[Tensor, "branches R tokens 1"]) -> Products:
        """The rows of K output tokens of every sequence; ``is_own`` is one at a row's own token."""
        jvp, vjp = self.whole(chosen.shape[-1])
        return Products(
            lambda dx: (jvp(dx) * is_own).sum(-2), lambda dy: vjp(dy.unsqueeze(-2) * is_own)
        )

    def derivative_in_ball(self, chosen: Chosen, alone: bool = False) -> Callable[[Tensor], Tensor]:
        """dX ↦ ψ_R′ dX, its own adjoint, for each row's sequence, or for its token ``alone``."""
        if self.input_radius is None:
            return lambda dx: dx
        u = torch.stack(self.inputs) / self.input_radius
        u = take(u, chosen).flatten(1, 2).unsqueeze(2) if alone else by_row(u, chosen)
        return to_ball(u).derivative

    def local_bounds(self, measured: Measured, tight: bool = False) -> Float[Tensor, "branches"]:
        """Proven upper bounds on ‖J‖ at the inputs, the largest over the sequences.

        inf where none is known: here always. ``tight`` may spend more.
        """
        return self.inputs[0].new_full((len(self.inputs),), torch.inf)

    def affords(self, per_token: float) -> bool:
        """True if a tight bound may take so many multiplications a token."""
        return per_token * self.inputs[0][..., 0].numel() <= MOST_TIGHT


class StackedMaps(StackedBranches):
    """Branches h(x W + b) V with W, (branches, D, inner), V and b, if there is one, as maps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        maps = map(self.maps, self.weights)
        self.w, self.v, *b = (torch.stack(kind) for kind in zip(*maps, strict=True))
        b = b[0].unsqueeze(1) if b else self.w.new_zeros(len(self.w), 1, 1)
        self.each = list(zip(self.w, b, self.v, strict=True))

    @staticmethod
    def maps(weights: Any) -> tuple[Tensor, ...]:
        """W and V of a branch, and b if there is one."""
        raise NotImplementedError

    def forward(self, u: Float[Tensor, "sequences tokens width"]) -> Tensor:
        """f(ψ_R(u)) of the next branch; what its Jacobian is made of is kept."""
        index, (w, b, v) = len(self.inputs), self.each[len(self.inputs)]
        self.inputs.append(u)
        z = torch.addmm(b, self.read(u).flatten(0, -2), w).view(*u.shape[:-1], -1)
        return (self.inner(index, z).flatten(0, -2) @ v).view(u.shape)

    def read(self, u: Tensor) -> Tensor:
        """What W multiplies."""
        return into_ball(u, self.input_radius)

    def inner(self, index: int, z: Float[Tensor, "sequences tokens inner"]) -> Tensor:
        """h(z) of a branch."""
        raise NotImplementedError

    def of_maps(self, inner: Products, chosen: Chosen, alone: bool = False) -> Products:
        """V h′ W ψ_R′ from h′, of rows, or of their own tokens alone."""
        w, v = self.w[:, : self.v.shape[-1]] if alone else self.w, self.v
        if self.scale is not None:
            w, v = w / self.scale.mT, v * self.scale
        in_ball = self.derivative_in_ball(chosen, alone)

        def jvp(dx: Tensor) -> Tensor:
            dz = torch.bmm(in_ball(dx).flatten(1, 2), w).view(*dx.shape[:-1], -1)
            return torch.bmm(inner.jvp(dz), v)

        def vjp(dy: Tensor) -> Tensor:
            dz = inner.vjp(torch.bmm(dy, v.mT))
            return in_ball(torch.bmm(dz.flatten(1, 2), w.mT).view(*dz.shape[:-1], -1))

        return Products(jvp, vjp)

    def local_bounds(self, measured: Measured, tight: bool = False) -> Float[Tensor, "branches"]:
        """As :meth:`.StackedBranches.local_bounds`, by :meth:`local_bound`; none in entry_max.

        In as many launches at any depth, or ``tight`` branch by branch.
        """
        if measured == "entry_max":
            return super().local_bounds(measured)
        weights = [torch.stack(each) for each in zip(*self.weights, strict=True)]
        evidence = self.stacked_points(), weights
        bound = partial(self.local_bound, measured, tight)
        if not tight:
            return torch.vmap(bound)(*evidence).amax(-1)
        each = zip(*(zip(*tensors, strict=True) for tensors in evidence), strict=True)
        return torch.stack([bound(*of_branch) for of_branch in each]).amax(-1)

    def local_bound(
        self, measured: Measured, tight: bool, point: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Float[Tensor, "sequences"]:
        """A bound on ‖J‖ of one branch, from what was kept of it, and its weights."""
        raise NotImplementedError


class StackedAttention(StackedMaps):
    """Input maps of all heads side by side, output maps below one another, and position biases."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_heads = len(self.weights[0].g)
        self.bias = biases_together([b.position for b in self.branches], self.num_tokens)

    def heads(self, z: Float[Tensor, "*batch channels"]) -> Float[Tensor, "*batch heads d"]:
        """Every head's channels of a token."""
        return z.view(*z.shape[:-1], self.num_heads, -1)


def take(t: Float[Tensor, "branches sequences tokens *rest"], chosen: Chosen) -> Tensor:
    """The chosen tokens of each, (branches, sequences, K, *rest); as many as there are: all."""
    if chosen.shape[-1] == t.shape[2]:
        return t
    index = chosen.view(*chosen.shape, *[1] * (t.ndim - 3))
    return t.gather(2, index.expand(*chosen.shape, *t.shape[3:]))


def at_chosen(x: Float[Tensor, "branches R tokens m"], chosen: Chosen) -> Tensor:
    """Each row at its chosen token, (branches, R, 1, m): of rows of J the diagonal blocks."""
    index = chosen.flatten(1)[..., None, None]
    return x.gather(2, index.expand(-1, -1, 1, x.shape[-1]))


def by_row(t: Float[Tensor, "branches sequences *rest"], chosen: Chosen) -> Tensor:
    """The entries of each row's sequence, (branches, R, *rest); unchanged if there is one."""
    return t if t.shape[1] == 1 else t.repeat_interleave(chosen.shape[-1], 1)
