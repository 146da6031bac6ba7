"""Additive couplings: blocks with an exact inverse in one pass, and no bound on its constant.

The state of a token is two streams of D channels. A block adds to each a function of the other:

    y₁ = x₁ + attention(LN(x₂)),   y₂ = x₂ + feed_forward(LN(y₁))
    x₂ = y₂ − feed_forward(LN(y₁)),   x₁ = y₁ − attention(LN(x₂))

Dinh et al. 2015 (NICE, arXiv 1410.8516); Gomez et al. 2017 (RevNet, arXiv 1707.04585); Kitaev et
al. 2020 (Reformer, arXiv 2001.04451). The branches are those of the baseline, so no Lipschitz
constant of the stack or of its inverse is known (Behrmann et al. 2021, arXiv 2006.09347).
"""

from collections.abc import Callable

import torch
from torch import nn

from invformer.branches.dot_product import PreNormBranch
from invformer.nn.transformer import PreNormBlock, PreNormStack
from invformer.numerics.norms import Tokens


class CouplingBlock(PreNormBlock):
    """y₁ = x₁ + attention(LN(x₂)), y₂ = x₂ + feed_forward(LN(y₁)).

    The arguments are those of :class:`.PreNormBlock`, ``d_model`` the width of one stream.
    """

    def compose(self, x: Tokens, apply: Callable[[PreNormBranch, Tokens], Tokens]) -> Tokens:
        """Both residual branches, each on the stream that the other one adds to."""
        x1, x2 = x.chunk(2, dim=-1)
        y1 = x1 + apply(self.attention, x2)
        return torch.cat([y1, x2 + apply(self.feed_forward, y1)], dim=-1)

    def inverse(self, y: Tokens) -> Tokens:
        """The x with ``self(x) = y``, without dropout and up to rounding."""
        y1, y2 = y.chunk(2, dim=-1)
        x2 = y2 - self.feed_forward(y1)
        return torch.cat([y1 - self.attention(x2), x2], dim=-1)


class CouplingStack(PreNormStack):
    """A chain of coupling blocks."""

    def inverse(self, z: Tokens) -> Tokens:
        """Undo the blocks from the top down: as much work as a forward pass."""
        for block in reversed(list[nn.Module](self.blocks)):
            assert isinstance(block, CouplingBlock)
            z = block.inverse(z)
        return z
