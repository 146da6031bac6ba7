"""A branch behind LayerNorm, as in ordinary Transformers."""

from typing import Any

from torch import nn

from invformer.branches.branch import AttentionCache, Branch
from invformer.branches.compiled import Fields
from invformer.numerics.norms import Tokens
from invformer.weights.dropout import Dropout


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
    def is_token_wise(self) -> bool:
        """True if the inner branch is."""
        return self.inner.is_token_wise

    @property
    def is_compiled(self) -> bool:
        """True if the inner branch is, and this is an ordinary LayerNorm."""
        plain = type(self.norm) is nn.LayerNorm and self.norm.bias is not None
        return plain and self.norm.eps > 0 and self.inner.is_compiled

    def compiled_fields(self, weights: Any) -> Fields:
        """As :meth:`.Branch.compiled_fields`, with the weights of the inner branch."""
        norm: Fields = {"scale": self.norm.weight, "shift": self.norm.bias}
        return norm | {"epsilon": self.norm.eps} | self.inner.compiled_fields(weights)
