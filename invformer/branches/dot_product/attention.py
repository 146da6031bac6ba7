"""Dot-product attention, the unconstrained baseline."""

import math

from torch import nn

from invformer.branches import compiled
from invformer.branches.branch import AttentionCache, Branch
from invformer.branches.compiled import Fields
from invformer.branches.enclosed import EnclosedDotProducts
from invformer.branches.tied_l2.attention import head_width
from invformer.kernels.attention import Kernel, attend
from invformer.numerics.enclosure import constant
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.norms import Tokens
from invformer.numerics.pairs import paired
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
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(x).chunk(3, dim=-1))
        y = attend(q, k, v, self.position.logit_bias(x.shape[-2]), self.kernel)
        return self.out(merge_heads(y))

    def next_outputs(self, x: Tokens, past: AttentionCache, weights: None = None) -> Tokens:
        """As :meth:`.Branch.next_outputs`, with the weights of this module."""
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(x).chunk(3, dim=-1))
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
