"""The residual branches of a stack at a text, those of one kind and shape stacked.

Everything here has a leading dimension of branches: one launch serves all of them, at any depth.
Products with a Jacobian take a further dimension after the sequences, of K vectors.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from invformer.branches.feed_forward.feed_forward import (
    ACTIVATIONS,
    ContractiveFeedForward,
    activation_slope,
)
from invformer.branches.in_ball.attention import BoundedAttention
from invformer.branches.tied_l2.attention import TiedL2Attention
from invformer.kernels.attention import only
from invformer.nn.residual import ResidualWeights
from invformer.numerics.ball import BallPoint, attention_point, into_ball, to_ball
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.linear_map import linearise
from invformer.numerics.token_shift import advance, delay, windows
from invformer.weights.position_bias import biases_together

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

    They are those of residual layers of one kind and shape, or of baselines. :meth:`forward` is
    called for one branch after the other. This class differentiates any branches automatically; the
    others know the products of theirs.
    """

    def __init__(
        self, layers: Sequence[Any], weights: Sequence[ResidualWeights], num_tokens: int
    ) -> None:
        # The layer of a baseline is its branch.
        self.branches: Sequence[Any] = [getattr(layer, "branch", layer) for layer in layers]
        self.input_radius = getattr(layers[0], "input_radius", None)
        self.weights = [layer.branch for layer in weights]
        self.num_tokens = num_tokens
        self.inputs: list[Tensor] = []  # D x + b of each
        self.points: list[tuple[Tensor, ...]] = []
        # D, (branches, 1, width), if it is folded in: these weights have the Jacobian D⁻¹ J D.
        self.scale = None
        if weights[0].centre is not None:
            self.scale = torch.stack([layer.scaling.log_scale for layer in layers]).exp()[:, None]

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


class StackedMaps(StackedBranches):
    """Branches h(x W + b) V with W, (branches, D, inner), V and b, if there is one, as maps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
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
        in_ball: Callable[[Tensor], Tensor] = lambda dx: dx  # noqa: E731
        if self.input_radius is not None:
            u = torch.stack(self.inputs) / self.input_radius
            u = take(u, chosen).flatten(1, 2).unsqueeze(2) if alone else by_row(u, chosen)
            in_ball = to_ball(u).derivative

        def jvp(dx: Tensor) -> Tensor:
            dz = torch.bmm(in_ball(dx).flatten(1, 2), w).view(*dx.shape[:-1], -1)
            return torch.bmm(inner.jvp(dz), v)

        def vjp(dy: Tensor) -> Tensor:
            dz = inner.vjp(torch.bmm(dy, v.mT))
            return in_ball(torch.bmm(dz.flatten(1, 2), w.mT).view(*dz.shape[:-1], -1))

        return Products(jvp, vjp)


class StackedFeedForward(StackedMaps):
    """φ(x W + b) V, x with the tokens before it where the kernel sees them."""

    @staticmethod
    def maps(weights: Any) -> tuple[Tensor, ...]:
        """W, V and b."""
        return weights.w_in, weights.w_out, weights.b_in

    def read(self, u: Tensor) -> Tensor:
        """The tokens that hidden units see."""
        return windows(super().read(u), self.weights[0].kernel)

    def inner(self, index: int, z: Float[Tensor, "sequences tokens inner"]) -> Tensor:
        """φ(z); z is kept."""
        self.points.append((z,))
        return ACTIVATIONS[self.branches[0].activation](z)

    def rows(self, chosen: Chosen, diagonal: bool = False) -> Products:
        """Of the token alone, unless hidden units see others that count: then automatically."""
        if self.weights[0].kernel > 1 and not diagonal:
            return super().rows(chosen)
        (z,) = self.stacked_points()
        slope = activation_slope(self.branches[0].activation, take(z, chosen).flatten(1, 2))
        inner = Products(
            lambda dz: dz.squeeze(2).mul_(slope), lambda dh: dh.mul_(slope).unsqueeze(2)
        )
        return self.of_maps(inner, chosen, alone=True)


class StackedAttention(StackedMaps):
    """Input maps of all heads side by side, output maps below one another, and position biases."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.num_heads = len(self.weights[0].g)
        self.bias = biases_together([b.position for b in self.branches], self.num_tokens)

    def heads(self, z: Float[Tensor, "*batch channels"]) -> Float[Tensor, "*batch heads d"]:
        """Every head's channels of a token."""
        return z.view(*z.shape[:-1], self.num_heads, -1)


class StackedL2Attention(StackedAttention):
    """Σ_h (P^h q^h) G_h with q = X W_h."""

    @staticmethod
    def maps(weights: Any) -> tuple[Tensor, ...]:
        """W and G of all heads."""
        return merge_heads(weights.w_q), weights.g.flatten(0, 1)

    def inner(self, index: int, z: Float[Tensor, "sequences tokens inner"]) -> Tensor:
        """P q by few operations; q and P are kept."""
        q = self.heads(z).transpose(1, 2)
        k = q - q[:, :, :1]
        # b_ij + (2 k_i·k_j − ‖k_j‖²)/√d, where the diagonal of b is zero
        bias, k = self.bias[index].expand(*k.shape[:3], -1).flatten(0, 1), k.flatten(0, 1)
        logits = torch.baddbmm(bias, k, k.mT, alpha=2 / math.sqrt(k.shape[-1]))
        lengths = logits.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        p = torch.sub(logits, lengths, alpha=0.5).softmax(-1).view(*q.shape[:3], -1)
        self.points.append((z, p))
        return merge_heads(p @ q)

    def products(self, chosen: Chosen, is_own: Float[Tensor, "branches R tokens 1"]) -> Products:
        """dY_i = Σ_j P_ij dq_j − s_ij e_ij with s = C_i (e_ij·(dq_j − dq_i)) for each head,
        e_ij = q_i − q_j and C_i = (2/√d)(diag P_i − P_i P_iᵀ).
        """
        z, p = self.stacked_points()
        e = self.heads((take(z, chosen).unsqueeze(3) - z.unsqueeze(2)).flatten(1, 2))
        p = take(p.permute(0, 1, 3, 4, 2), chosen).flatten(1, 2)  # (branches, R, tokens, heads)
        minus, weight = p * (-2 / math.sqrt(e.shape[-1])), p.unsqueeze(-1)
        is_own = is_own.unsqueeze(-1)

        def minus_of_softmax(a: Tensor) -> Tensor:
            return (minus * (a - (p * a).sum(2, keepdim=True))).unsqueeze(-1)

        def jvp(dq: Tensor) -> Tensor:
            s = minus_of_softmax((dq - at_chosen(dq, chosen)).view(e.shape).mul_(e).sum(-1))
            return dq.view(e.shape).mul_(weight).addcmul_(s, e).sum(2).flatten(-2)

        def vjp(dy: Tensor) -> Tensor:
            a = self.heads(dy).unsqueeze(2)
            dq = a * e
            torch.mul(minus_of_softmax(dq.sum(-1)), e, out=dq)
            others = dq.sum(2, keepdim=True)
            dq.addcmul_(weight, a).addcmul_(is_own, others, value=-1)
            return dq.flatten(-2)

        return self.of_maps(Products(jvp, vjp), chosen)


class StackedBoundedAttention(StackedAttention):
    """[P_h v_h]_h G; queries, keys and values are in the unit ball."""

    @staticmethod
    def maps(weights: Any) -> tuple[Tensor, ...]:
        """W of queries, keys and values, and G, of all heads."""
        return merge_heads(weights.w_qkv.flatten(0, 1)), weights.g.flatten(0, 1)

    def inner(self, index: int, z: Float[Tensor, "sequences tokens inner"]) -> Tensor:
        """P v; the points in the ball and P are kept."""
        q, k, v = split_heads(z, 3 * self.num_heads).chunk(3, dim=-3)
        if self.branches[0].strictly_causal:
            k, v = delay(k), delay(v)
        at = attention_point(q, k, v, self.weights[index].temperature, self.bias[index])
        self.points.append(at)
        return merge_heads(at.p @ at.v)

    def products(self, chosen: Chosen, is_own: Float[Tensor, "branches R tokens 1"]) -> Products:
        """dY_i = Σ_j (P_ij dv_j + dP_ij v_j) for each head, with
        dP_i = τ (diag P_i − P_i P_iᵀ) a_i, a_ij = dq_i·k_j + q_i·dk_j.
        """
        strictly_causal = self.branches[0].strictly_causal
        *points, p, temperature = self.stacked_points()
        q, q_rho, *others = (t.transpose(2, 3) for t in points)
        at_q = BallPoint(*(take(t, chosen).flatten(1, 2) for t in (q, q_rho)))
        k, k_rho, v, v_rho = (by_row(t, chosen) for t in others)
        at_k, at_v = BallPoint(k, k_rho), BallPoint(v, v_rho)
        p = take(p.permute(0, 1, 3, 4, 2), chosen).flatten(1, 2)
        scaled, weight = p * temperature[:, None, None, :, 0, 0], p.unsqueeze(-1)
        q = at_q.u.unsqueeze(2)

        def of_softmax(a: Tensor) -> Tensor:
            return scaled * (a - (p * a).sum(2, keepdim=True))

        def jvp(dz: Tensor) -> Tensor:
            dq, dk, dv = dz.chunk(3, -1)
            if strictly_causal:
                dk, dv = delay(dk), delay(dv)
            dq, dk, dv = map(self.heads, (at_chosen(dq, chosen).squeeze(2), dk, dv))
            dq, dk, dv = at_q.derivative(dq), at_k.derivative(dk), at_v.derivative(dv)
            dp = of_softmax(torch.addcmul(dq.unsqueeze(2) * k, q, dk).sum(-1)).unsqueeze(-1)
            return torch.addcmul(weight * dv, dp, v).sum(2).flatten(-2)

        def vjp(dy: Tensor) -> Tensor:
            dy = self.heads(dy).unsqueeze(2)
            da = of_softmax((dy * v).sum(-1)).unsqueeze(-1)
            dq = is_own * at_q.derivative((da * k).sum(2)).flatten(-2).unsqueeze(2)
            dk = at_k.derivative(da * q).flatten(-2)
            dv = at_v.derivative(weight * dy).flatten(-2)
            if strictly_causal:
                dk, dv = advance(dk), advance(dv)
            return torch.cat([dq, dk, dv], -1)

        return self.of_maps(Products(jvp, vjp), chosen)


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


# By the forward pass, which a subclass may replace.
STACKED: dict[Callable[..., Any], type[StackedBranches]] = {
    TiedL2Attention.forward: StackedL2Attention,
    BoundedAttention.forward: StackedBoundedAttention,
    ContractiveFeedForward.forward: StackedFeedForward,
}


def stacked_class(branch: Any) -> type[StackedBranches]:
    """The class that knows the products of branches like this one."""
    return STACKED.get(type(branch).forward, StackedBranches)
