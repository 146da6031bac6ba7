"""Dot-product attention and the LayerNorm before it: the baseline."""

import math
from typing import Any

from torch import Tensor, nn

from invformer.branches import compiled
from invformer.branches.branch import AttentionCache, Branch
from invformer.branches.compiled import Fields
from invformer.branches.enclosed import EnclosedDotProducts
from invformer.branches.heads import head_width
from invformer.kernels.attention import Kernel, attend
from invformer.numerics.enclosure import constant
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.norms import Tokens
from invformer.numerics.pairs import paired
from invformer.weights.dropout import Dropout
from invformer.weights.position_bias import VisibilityMask


class DotProductAttention(Branch):
    """F(X) = [softmax(Q_h K_hᵀ/√d + b_h) V_h]_h W^O, the unconstrained baseline of Vaswani et al.

    Not Lipschitz in any norm (Kim et al. 2021, Theorem 3.1).

    The arguments are those of :class:`.ContractiveL2Attention`.
    """

    def __init__(
        self, d_model: int, num_heads: int, position: VisibilityMask, kernel: Kernel = "auto"
    ) -> None:
        super().__init__()
        head_width(d_model, num_heads)  # raises ValueError if there is none
        self.kernel: Kernel = kernel
        self.num_heads = num_heads
        self.position = position
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tokens) -> Tokens:
        """Attend, causally."""
        q, k, v = self.projections(x)
        y = attend(q, k, v, self.position.logit_bias(x.shape[-2]), self.kernel)
        return self.out(merge_heads(y))

    def projections(self, x: Tokens) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (*batch, H, N, d)."""
        return split_heads(self.qkv(x), 3 * self.num_heads).chunk(3, dim=-3)

    def next_outputs(self, x: Tokens, past: AttentionCache, weights: None = None) -> Tokens:
        """As :meth:`.Branch.next_outputs`, with the weights of this module."""
        q, k, v = self.projections(x)
        k, v = past.append(k, v)
        bias = self.position.last_rows(x.shape[-2], k.shape[-2]).to(q)
        logits = q @ k.mT / math.sqrt(q.shape[-1]) + bias
        return self.out(merge_heads(logits.softmax(-1) @ v))

    def enclosed(self, weights: None, length: int) -> EnclosedDotProducts:
        """As :meth:`.Branch.enclosed`."""
        w_qkv, heads = self.qkv.weight.mT, self.num_heads
        width = constant(w_qkv.new_full((heads,), w_qkv.shape[0] // heads))
        temperature = paired(width).inverse_root()  # 1/√d
        output = self.out.weight.mT
        return EnclosedDotProducts(w_qkv.chunk(3, -1), temperature, self.position, output, length)

    @property
    def is_compiled(self) -> bool:
        """As :meth:`.Branch.is_compiled`: True if nobody replaced a part."""
        parts = self.qkv, self.out
        plain = all(type(part) is nn.Linear and part.bias is None for part in parts)
        return plain and super().is_compiled

    def compiled_fields(self, weights: None) -> Fields:
        """As :meth:`.Branch.compiled_fields`."""
        own = compiled.maps(self.qkv.weight.T, self.out.weight.T)
        return own | compiled.heads(self.num_heads, self.position)


class PreNormBranch(Branch):
    """x ↦ inner(LN(x)), one residual branch of the baseline; no Lipschitz bound is known for it."""

    def __init__(self, inner: Branch, d_model: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.inner: Any = inner
        self.dropout = Dropout(dropout)  # applied by the block: it is no part of the map

    def forward(self, x: Tokens) -> Tokens:
        """inner(LN(x))."""
        return self.inner(self.norm(x))

    def next_outputs(self, x: Tokens, past: AttentionCache, weights: None = None) -> Tokens:
        """As :meth:`.Branch.next_outputs`."""
        return self.inner.next_outputs(self.norm(x), past)

    @property
    def reach(self) -> int | None:
        """That of the inner branch."""
        return self.inner.reach

    @property
    def is_compiled(self) -> bool:
        """True if the inner branch is, and this is an ordinary LayerNorm."""
        plain = type(self.norm) is nn.LayerNorm and self.norm.bias is not None
        return plain and self.norm.eps > 0 and self.inner.is_compiled

    def compiled_fields(self, weights: Any) -> Fields:
        """As :meth:`.Branch.compiled_fields`, with the weights of the inner branch."""
        norm: Fields = {"scale": self.norm.weight, "shift": self.norm.bias}
        return norm | {"epsilon": self.norm.eps} | self.inner.compiled_fields(weights)
