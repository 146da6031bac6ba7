"""An independent point of comparison: a plain causal Transformer, written without invformer.

Pre-norm blocks of fused causal attention without bias and a GELU feed-forward, tied head: what
anybody would write down first, and about as fast as plain PyTorch gets.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainBlock(nn.Module):
    """x + attention(LN(x)), x + feed_forward(LN(x))."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.norm_feed_forward = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, tokens, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_feed_forward(x))))


class PlainTransformer(nn.Module):
    """tokens → logits.

    Args:
        vocab_size: number of symbols.
        seq_len: longest sequence.
        d_model: width.
        num_heads: heads, a divisor of the width.
        num_layers: blocks.
    """

    def __init__(
        self, vocab_size: int, seq_len: int, d_model: int, num_heads: int, num_layers: int
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(seq_len, d_model)
        self.blocks = nn.ModuleList(PlainBlock(d_model, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.token.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next symbol at every position."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
