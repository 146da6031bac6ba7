"""Who sees whom: masks, a learned relative position bias, and the mass that certificates need."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

SLOPES = (2.0, 1.0, 0.4, 0.1)
NEAREST = 3.0


class VisibilityMask(nn.Module):
    """S_ij ← S_ij where token i sees token j, −∞ elsewhere.

    Every token sees itself: hiding the self token makes L2 attention lose its Lipschitz property
    (the logit 0 of j = i is what bounds the others' weights), so such a mask is refused.

    Args:
        visible: entry (i, j) says whether i sees j.

    Raises:
        ValueError: the mask is not square or hides a token from itself.
    """

    hidden: Tensor

    def __init__(self, visible: Bool[Tensor, "tokens tokens"]) -> None:
        super().__init__()
        if visible.ndim != 2 or visible.shape[0] != visible.shape[1]:
            raise ValueError(f"a mask is square (tokens, tokens), got shape {tuple(visible.shape)}")
        if not visible.diagonal().all():
            token = int((~visible.diagonal()).nonzero()[0])
            raise ValueError(
                f"the mask hides token {token} from itself; L2 attention is then not Lipschitz: "
                "keep the diagonal visible"
            )
        self.register_buffer("hidden", ~visible, persistent=False)

    @property
    def seq_len(self) -> int:
        """Longest sequence."""
        return self.hidden.shape[0]

    @property
    def is_causal(self) -> bool:
        """Whether no token sees a later one."""
        return not (~self.hidden).triu(1).any()

    def forward(self, num_tokens: int) -> Float[Tensor, "heads tokens tokens"]:
        """The additive bias for sequences of ``num_tokens`` (one head: it broadcasts)."""
        hidden = self.hidden[:num_tokens, :num_tokens]
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, -math.inf)[None]

    def log_mass(self) -> Float[Tensor, "heads"]:
        """log n, n = the largest number of other tokens that any row sees."""
        return self.log_mass_per_row().amax(-1)

    def log_mass_per_row(self) -> Float[Tensor, "heads tokens"]:
        """log nᵢ, nᵢ = the number of other tokens row i sees, in float64."""
        return ((~self.hidden).sum(-1) - 1).double().log()[None]


class CausalMask(VisibilityMask):
    """Token i sees the tokens j ≤ i.

    Args:
        seq_len: longest sequence.
    """

    def __init__(self, seq_len: int) -> None:
        super().__init__(torch.ones(seq_len, seq_len, dtype=torch.bool).tril())


class RelativePositionBias(CausalMask):
    """S_ij ← S_ij + b_h(i − j), b_h(0) = 0, causal; b_h is a learned table over lags 1 … N − 1.

    Starts as b_h(lag) = 3 − slope_h (lag − 1), so that heads begin by looking at near tokens at
    several ranges. Certificates see the table only through its mass n_h = Σ_lag exp b_h(lag), which
    takes the place of N − 1 in every bound (docs/numerics.md).

    Args:
        num_heads: H.
        seq_len: longest sequence N.
    """

    lag: Tensor

    def __init__(self, num_heads: int, seq_len: int) -> None:
        super().__init__(seq_len)
        slopes = torch.tensor([SLOPES[h % len(SLOPES)] for h in range(num_heads)])
        self.table = nn.Parameter(NEAREST - slopes[:, None] * torch.arange(seq_len - 1))
        position = torch.arange(seq_len)
        lag = (position[:, None] - position[None, :]).clamp(min=0)
        self.register_buffer("lag", lag, persistent=False)

    def forward(self, num_tokens: int) -> Float[Tensor, "heads tokens tokens"]:
        """The additive bias (−∞ above the diagonal) for sequences of ``num_tokens``."""
        by_lag = nn.functional.pad(self.table, (1, 0))
        bias = by_lag[:, self.lag[:num_tokens, :num_tokens]]
        return bias.masked_fill(self.hidden[:num_tokens, :num_tokens], -math.inf)

    def log_mass(self) -> Float[Tensor, "heads"]:
        """log n_h, n_h = Σ_{lag = 1}^{N−1} exp b_h(lag), differentiable."""
        return self.table.logsumexp(-1)

    def log_mass_per_row(self) -> Float[Tensor, "heads tokens"]:
        """log n_hi of every row i: the mass of the lags that row can see, in float64."""
        cumulative = self.table.double().logcumsumexp(-1)
        return nn.functional.pad(cumulative, (1, 0), value=-math.inf)
