"""The stack of a model in enclosures of real numbers: its rounding, bounded channel by channel."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Integer
from torch import Tensor, nn

from invformer.nn.attention import L2Weights, TiedL2Attention, merge_heads, split_heads
from invformer.nn.attention import side_by_side as joined_heads
from invformer.nn.bounded_attention import BoundedAttention, side_by_side
from invformer.nn.branch import LipschitzBranch
from invformer.nn.dot_product import DotProductAttention
from invformer.nn.feed_forward import (
    ACTIVATIONS,
    Activation,
    ContractiveFeedForward,
    FeedForward,
    activation_slope,
)
from invformer.nn.position_bias import VisibilityMask
from invformer.nn.scaling import ActivationNorm, ScalingWeights
from invformer.nn.stack import InvertibleStack
from invformer.nn.transformer import CharTransformer, PreNormStack
from invformer.numerics.enclosure import (
    ACTIVATION,
    UP,
    Enclosure,
    Matrix,
    Pair,
    U,
    accumulate,
    add,
    affine,
    constant,
    divide,
    exp,
    has_denormal,
    into_ball,
    inverse_root,
    joined,
    length_up,
    matmul,
    matrix,
    multiply,
    negated,
    outward,
    paired,
    scale,
    size,
    square_sum,
    sum_last,
    with_one,
)
from invformer.numerics.token_shift import delay

# ≥ sup |φ″|, and ≥ sup |φ′|.
CURVATURE = {"silu": 0.5001, "gelu": 0.7980, "relu": math.inf, "tanh": 0.7699}
SLOPE = {"silu": 1.0999, "gelu": 1.1290, "relu": 1.0, "tanh": 1.0}
# Covers the rounding of φ′ in float32.
SLOPE_ERROR = 2.0**-16


class NotEnclosed(ValueError):
    """The rounding of this network is not bounded; the message says why."""


class Network:
    """The stack of a model in enclosures, for symbols that each continue a beginning of one text.

    Channels stay in the coordinates of the embedding, as sums of two float64: what normalisations
    and diagonal scalings make of them, A x + B, is made where a branch reads them.

    Args:
        model: with the weights it has now.
        length: tokens of a text.

    Raises:
        NotEnclosed: the model has a layer whose rounding is not bounded here.
    """

    def __init__(self, model: CharTransformer, length: int) -> None:
        self.embedding = model.embedding
        self.vocab_size = model.embedding.token.num_embeddings
        require_normal(model.embedding.token.weight, model.embedding.position)
        width = torch.zeros(model.head.in_features, device=model.embedding.position.device)
        factor, shift = paired(constant(width + 1)), paired(constant(width))
        self.branches: list[tuple[Branch, Pair, Pair]] = []
        for branch, scaling in layers_of(model.stack, length):
            inside = factor, shift
            if scaling is not None:
                require_normal(scaling.scale, scaling.shift)
                by, to = constant(scaling.scale), constant(scaling.shift)
                shifted = accumulate(scale(shift, by.middle), paired(to))
                inside = scale(factor, by.middle), shifted
            if branch is not None:
                self.branches.append((branch, *inside))
            else:
                factor, shift = inside
        self.at_the_top = factor, shift

    def __call__(
        self,
        symbols: Integer[Tensor, "rows"],
        places: Integer[Tensor, "rows"],
        past: list[Any] | None,
    ) -> tuple[Enclosure, list[Any]]:
        """The states of some symbols, each at its place behind the same beginning.

        Args:
            symbols: one a row.
            places: their positions.
            past: what the branches keep of the text they continue; None if the rows are that text.

        Returns:
            States (rows, D), and what the branches keep of these rows.
        """
        table, position = self.embedding.token.weight, self.embedding.position
        x = accumulate(paired(constant(table[symbols])), paired(constant(position[places])))
        x = Pair(*(nn.functional.pad(t, (0, self.embedding.padding)) for t in x))
        kept = []
        for index, (branch, factor, shift) in enumerate(self.branches):
            before = None if past is None else past[index]
            value, own = branch(affine(x, factor, shift), places, before)
            scaled = divide(value, Enclosure(factor.high, factor.radius + size(factor.low)))
            x = accumulate(x, paired(scaled))
            kept.append(own)
        return affine(x, *self.at_the_top), kept


class Branch:
    """A residual branch in enclosures.

    Args:
        prepare: what it applies to its input first, token by token.
    """

    prepare: Callable[[Enclosure], Enclosure] | None = None

    def __call__(self, x: Enclosure, places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """f of every row and of what was kept of the text before it, and what to keep of the rows.

        Args:
            x: (rows, D).
            places: (rows,), their positions.
            past: what was kept of the text; None if the rows are the text.
        """
        return self.apply(x if self.prepare is None else self.prepare(x), places, past)

    def apply(self, x: Enclosure, places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """The same behind :attr:`prepare`."""
        raise NotImplementedError


def layer_norm(x: Enclosure, norm: nn.LayerNorm) -> Enclosure:
    """LayerNorm."""
    width = constant(torch.tensor(float(x.middle.shape[-1]), device=x.middle.device))
    mean = divide(sum_last(x), width).map(lambda t: t.unsqueeze(-1))
    centred = add(x, negated(mean))
    eps = constant(torch.tensor(norm.eps, dtype=torch.float64, device=x.middle.device))
    root = inverse_root(add(divide(square_sum(centred), width), eps))
    y = multiply(centred, root.map(lambda t: t.unsqueeze(-1)))
    return add(multiply(y, constant(norm.weight)), constant(norm.bias))


class FeedForwardBranch(Branch):
    """φ(Σ_l x_{i−l} W_l + b) V + b′, W_0 for the own token."""

    def __init__(
        self, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor | None, activation: Any
    ) -> None:
        require_normal(w_in, b_in, w_out, b_out)
        own, *past = w_in.split(w_out.shape[-1], dim=-2)
        self.w_own, self.w_past = matrix(constant(own)), [matrix(constant(w)) for w in past]
        self.b_in, self.w_out = constant(b_in), matrix(constant(w_out))
        self.b_out = [] if b_out is None else [constant(b_out)]
        self.activation: Activation = activation

    def apply(self, x: Enclosure, places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """f of every row, and Σ_{l ≥ 1} x_{i−l} W_l."""
        if past is None:
            past = [matmul(delayed(x, lag), w) for lag, w in enumerate(self.w_past, 1)]
        earlier = [part.map(lambda t: t[places]) for part in past]
        hidden = activate(matmul(x, self.w_own, self.b_in, *earlier), self.activation)
        return matmul(hidden, self.w_out, *self.b_out), past


def activate(x: Enclosure, activation: Activation) -> Enclosure:
    """φ(x): |φ(x ± r) − φ(x)| ≤ r min(sup |φ′|, |φ′(x)| + r sup |φ″|)."""
    middle = ACTIVATIONS[activation](x.middle)
    if activation == "relu":  # which bends at zero
        slope = (x.middle.float() * (1 + 2.0**-22) + x.radius >= 0).float()
    else:
        slope = activation_slope(activation, x.middle.float()).abs_().add_(SLOPE_ERROR)
        slope = slope.addcmul_(x.radius, x.radius.new_tensor(CURVATURE[activation]))
    # In gelu, 1 + erf cancels.
    rounding = ACTIVATION * size(x.middle if activation == "gelu" else middle)
    return Enclosure(middle, outward(x.radius * slope.clamp_(max=SLOPE[activation]) + rounding))


class AttentionBranch(Branch):
    """Σ_h (Σ_j P_ij v_j) G_h. Rows see the text before them: themselves, or a null token, as well.

    Args:
        position: mask or bias.
        output: G of all heads, (H d, D).
        length: tokens of a text.
        strictly_causal: whether rows see the tokens up to the one before them, each a place later,
            and a null token in front, but not themselves.

    Raises:
        NotEnclosed: the mask is not causal.
    """

    def __init__(
        self, position: VisibilityMask, output: Tensor, length: int, strictly_causal: bool = False
    ) -> None:
        if not position.is_causal:
            raise NotEnclosed("tokens see later ones, so that a beginning has no states of its own")
        bias = position(length).detach()
        require_normal(bias, output)
        self.bias, self.output = bias.double(), matrix(constant(output))
        self.strictly_causal = strictly_causal

    def attended(
        self,
        logits: Enclosure,
        own_logits: Enclosure | None,
        factor: Tensor,
        values: Enclosure,
        own_values: Enclosure | None,
        places: Tensor,
        origin: Tensor,
    ) -> Enclosure:
        """Σ_h softmax(factor · logits + bias)_h v_h G_h of every row, (rows, D).

        Args:
            logits: (H, rows, tokens), of the text.
            own_logits: (H, rows, 1), of rows that see themselves.
            factor: (H, 1, 1), to a relative error of u.
            values: (H, tokens, d).
            own_values: (H, rows, d).
            places: of the rows.
            origin: (H, 1, d), what values are relative to.
        """
        count = logits.middle.shape[-1]
        tokens = torch.arange(count, device=places.device)
        bias = self.bias[:, places, :count]
        hidden = tokens > places[:, None] if self.strictly_causal else tokens >= places[:, None]
        if own_logits is not None:
            logits = joined(logits, own_logits)
            bias = torch.cat([bias, self.bias[:, places, places, None]], -1)
            hidden = nn.functional.pad(hidden, (0, 1), value=False)
        hidden = hidden | bias.isinf()
        scaled = logits.middle * factor
        scores = (scaled + bias).masked_fill_(hidden, -math.inf)
        highest = scores.amax(-1, keepdim=True)
        behind = scores - highest
        rounding = 4 * U * (size(scaled) + size(highest) + size(behind))
        radius = (logits.radius * size(factor) + rounding).masked_fill_(hidden, 0)
        weights = exp(Enclosure(behind, outward(radius)))
        total = matmul(weights.map(lambda t: t[..., :count]), matrix(with_one(values)))
        if own_values is not None:
            total = add(
                total, multiply(with_one(own_values), weights.map(lambda t: t[..., count:]))
            )
        means = divide(total.map(lambda t: t[..., :-1]), total.map(lambda t: t[..., -1:]))
        return matmul(add(means, constant(origin)).map(merge_heads), self.output)


class L2AttentionBranch(AttentionBranch):
    """Tied L2 attention: the logits are −‖q_i − q_j‖²/√d = (q_i·q_j − ‖q_j‖²/2 − ‖q_i‖²/2) 2/√d."""

    def __init__(self, position: VisibilityMask, weights: L2Weights, length: int) -> None:
        super().__init__(position, weights.g.flatten(-3, -2), length)
        require_normal(weights.w_q)
        self.w_q = matrix(constant(joined_heads(weights.w_q)))
        self.num_heads, _, d_head = weights.w_q.shape
        self.factor = constant(torch.full_like(weights.w_q[:1, :1, :1], 4 / d_head)).middle.sqrt()

    def apply(self, x: Enclosure, places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """f of every row, and q relative to its mean."""
        q = matmul(x, self.w_q).map(lambda t: split_heads(t, self.num_heads))
        origin = q.middle.mean(-2, keepdim=True) if past is None else past[1]
        q = add(q, constant(-origin))
        keys = (q if past is None else past[0]).map(lambda t: t[:, : int(places.max()) + 1])
        half, their_half = (squares(part) for part in (q, keys))
        exact = constant(q.middle), constant(keys.middle)
        right = joined(exact[1], their_half).map(lambda t: t.mT)
        behind = matmul(with_one(exact[0]), matrix(right), half)  # −‖q_i − q_j‖²/2 of the midpoints
        distance = (behind.radius - behind.middle.float()).clamp_(min=0).mul_(2 * UP).sqrt_()
        error = length_up(q.radius).unsqueeze(-1) + length_up(keys.radius).unsqueeze(-2)
        spread = error.float() * (distance + error.float() / 2)
        logits = Enclosure(behind.middle, outward(behind.radius + spread))
        own_logits = constant(torch.zeros_like(half.middle))
        y = self.attended(logits, own_logits, self.factor, keys, q, places, origin)
        return y, past or (q, origin)


def squares(q: Enclosure) -> Enclosure:
    """−‖q‖²/2 of midpoints, as a column."""
    return negated(square_sum(constant(q.middle)).map(lambda t: t.unsqueeze(-1) / 2))


class DotProductBranch(AttentionBranch):
    """Attention by dot products, of projections that may first be mapped into the unit ball."""

    def __init__(
        self,
        position: VisibilityMask,
        w_qkv: Tensor,
        output: Tensor,
        factor: Tensor,
        length: int,
        in_ball: bool = False,
        strictly_causal: bool = False,
    ) -> None:
        super().__init__(position, output, length, strictly_causal)
        require_normal(w_qkv, factor)
        self.factor, self.in_ball = factor.detach().double()[:, None, None], in_ball
        w_q, w_kv = w_qkv.tensor_split([w_qkv.shape[-1] // 3], -1)
        self.w_q, self.w_kv = matrix(constant(w_q)), matrix(constant(w_kv))

    def apply(self, x: Enclosure, places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """f of every row, keys and values."""
        (q,) = self.projected(x, self.w_q, 1)
        sees_itself = not self.strictly_causal
        own = self.projected(x, self.w_kv, 2) if past is None or sees_itself else None
        if past is None:
            assert own is not None
            k, v = (delayed(part, 0 if sees_itself else 1) for part in own)
            past = k, v, v.middle.mean(-2, keepdim=True)
        upto = int(places.max()) + 1
        keys, values = (part.map(lambda t: t[:, :upto]) for part in past[:2])
        logits = matmul(q, matrix(keys.map(lambda t: t.mT)))
        own_logits = own_values = None
        if own is not None and sees_itself:
            own_logits = sum_last(multiply(q, own[0])).map(lambda t: t.unsqueeze(-1))
            own_values = add(own[1], constant(-past[2]))
        values = add(values, constant(-past[2]))
        y = self.attended(logits, own_logits, self.factor, values, own_values, places, past[2])
        return y, past

    def projected(self, x: Enclosure, w: Matrix, parts: int) -> tuple[Enclosure, ...]:
        """x W of every head, in the unit ball if asked for: ``parts`` times (H, rows, d)."""
        heads = len(self.factor)
        z = matmul(x, w).map(lambda t: split_heads(t, parts * heads))
        z = into_ball(z, 1.0) if self.in_ball else z
        return tuple(Enclosure(*p) for p in zip(*(t.split(heads) for t in z), strict=True))


def delayed(x: Enclosure, lag: int) -> Enclosure:
    """x_{i−lag} at token i, zero before the first."""
    return x.map(lambda t: delay(t, lag))


def layers_of(
    stack: nn.Module, length: int
) -> Iterator[tuple["Branch | None", ScalingWeights | None]]:
    """The layers of a stack in the order they act: each branch with the D and b it reads in.

    A normalisation D x + b has no branch.

    Raises:
        NotEnclosed: there is one that is not known here.
    """
    if isinstance(stack, InvertibleStack):
        weights = stack.weights()
        for name, layer in stack.layers():
            if isinstance(layer, ActivationNorm):
                yield None, weights[name]
                continue
            branch = enclosed_branch(name, layer.branch, length, weights[name].branch)
            if layer.input_radius is not None:
                branch.prepare = partial(into_ball, radius=layer.input_radius)
            yield branch, weights[name].scaling
        return
    assert isinstance(stack, PreNormStack)
    for index, block in enumerate(stack.blocks):
        for name in ("attention", "feed_forward"):
            layer = getattr(block, name)
            inner = layer.inner
            weights = inner.weights() if isinstance(inner, LipschitzBranch) else None
            branch = enclosed_branch(f"block_{index:02d}/{name}", inner, length, weights)
            branch.prepare = partial(layer_norm, norm=layer.norm)
            yield branch, None


def enclosed_branch(name: str, branch: nn.Module, length: int, weights: Any) -> Branch:
    """A branch in enclosures, with its weights.

    Raises:
        NotEnclosed: it is not known here.
    """
    match branch:
        case ContractiveFeedForward():
            w_in, b_in, w_out, _ = weights
            return FeedForwardBranch(w_in, b_in, w_out, None, branch.activation)
        case FeedForward():
            first, pointwise, last = branch
            return FeedForwardBranch(
                first.weight.mT, first.bias, last.weight.mT, last.bias, pointwise.activation
            )
        case TiedL2Attention():
            return L2AttentionBranch(branch.position, weights, length)
        case BoundedAttention():
            w_qkv, temperature, g = weights
            return DotProductBranch(
                branch.position,
                side_by_side(w_qkv),
                g.flatten(-3, -2),
                temperature,
                length,
                in_ball=True,
                strictly_causal=branch.strictly_causal,
            )
        case DotProductAttention():
            d_head = branch.qkv.in_features // branch.num_heads
            factor = torch.full((branch.num_heads,), 1 / d_head, dtype=torch.float64).sqrt()
            w_qkv, output = branch.qkv.weight.mT, branch.out.weight.mT
            return DotProductBranch(branch.position, w_qkv, output, factor, length)
    raise NotEnclosed(f"{name}: the rounding of a {type(branch).__name__} is not bounded")


def require_normal(*weights: Tensor | None) -> None:
    """Refuse weights that a processor may read as zero.

    Raises:
        NotEnclosed: there is one.
    """
    for weight in weights:
        if weight is not None and has_denormal(weight):
            least = torch.finfo(weight.dtype).tiny
            raise NotEnclosed(f"there are weights below {least:.2g}, which may be read as zero")
