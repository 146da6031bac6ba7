"""Masks and learned position biases, and the mass n that certificates need of them."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from invformer.kernels.attention import LogitBias

# At first b_h(1), well above b_h(0) = 0 of the token itself, and how fast it falls from there.
NEAREST = 3.0
SLOPES = (2.0, 1.0, 0.4, 0.1)


class VisibilityMask(nn.Module):
    """S_ij ← S_ij where token i sees token j, −∞ elsewhere.

    Every token sees itself: otherwise L2 attention is not Lipschitz (docs/numerics.md §2).

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
        self.seq_len = visible.shape[0]
        self.register_buffer("hidden", ~visible, persistent=False)

    @property
    def is_causal(self) -> bool:
        """True if no token sees a later one."""
        return not (~self.hidden).triu(1).any()

    def require_causal(self) -> None:
        """Raise ValueError if a token sees a later one: diagonal blocks then prove nothing."""
        if not self.is_causal:
            raise ValueError("the causal certificate needs a causal mask")

    def forward(self, num_tokens: int) -> Float[Tensor, "heads tokens tokens"]:
        """The additive bias for sequences of ``num_tokens`` (one head: it broadcasts)."""
        return self.last_rows(num_tokens, num_tokens)

    def last_rows(self, num_rows: int, num_tokens: int) -> Float[Tensor, "heads rows tokens"]:
        """The last rows of the bias for sequences of ``num_tokens``."""
        hidden = self.hidden[num_tokens - num_rows : num_tokens, :num_tokens]
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, -math.inf)[None]

    def logit_bias(self, num_tokens: int) -> LogitBias:
        """The bias in every form that attention kernels take."""
        return LogitBias(dense=lambda: self(num_tokens))

    def log_mass(self) -> Float[Tensor, "heads"]:
        """log n, n = the largest number of other tokens that any row sees."""
        return self.log_mass_per_row().amax(-1)

    def log_mass_per_row(self) -> Float[Tensor, "heads tokens"]:
        """log nᵢ, nᵢ = the number of other tokens row i sees, in float64."""
        return ((~self.hidden).sum(-1) - 1).double().log()[None]


class CausalMask(VisibilityMask):
    """Token i sees the tokens j ≤ i, in up to ``seq_len``; holds nothing of size seq_len²."""

    origin: Tensor

    def __init__(self, seq_len: int) -> None:
        nn.Module.__init__(self)
        self.seq_len = seq_len
        # Zero at lag 0; also tells the device.
        self.register_buffer("origin", torch.zeros(1, 1), persistent=False)

    @property
    def is_causal(self) -> bool:
        """True."""
        return True

    def by_lag(self, num_tokens: int) -> Float[Tensor, "heads tokens"]:
        """b_h(lag) at the lags 0 … ``num_tokens`` − 1, with b_h(0) = 0.

        ValueError for none, and beyond ``seq_len``, for which no constant has been proven.
        """
        if not num_tokens:
            raise ValueError("an empty sequence: there is no token to attend to")
        if num_tokens > self.seq_len:
            raise ValueError(f"{num_tokens} tokens are more than the seq_len of {self.seq_len}")
        return self.lags()[:, :num_tokens]

    def lags(self) -> Float[Tensor, "heads seq_len"]:
        """b_h at every lag."""
        return self.origin.expand(1, self.seq_len)

    def last_rows(self, num_rows: int, num_tokens: int) -> Float[Tensor, "heads rows tokens"]:
        """The last rows of b_h(i − j), −∞ above the diagonal, for sequences of ``num_tokens``."""
        return toeplitz(self.by_lag(num_tokens), num_rows)

    def logit_bias(self, num_tokens: int) -> LogitBias:
        """The same, with b at every lag, which kernels need whose memory is linear in N."""
        is_zero = type(self) is CausalMask
        return LogitBias(lambda: self(num_tokens), self.by_lag(num_tokens), is_zero)

    def log_mass(self) -> Float[Tensor, "heads"]:
        """log n_h, n_h = Σ_{lag = 1}^{N−1} exp b_h(lag), differentiable."""
        return self.by_lag(self.seq_len)[:, 1:].logsumexp(-1)

    def log_mass_per_row(self) -> Float[Tensor, "heads tokens"]:
        """log n_hi of every row i, in float64: row i sees the lags 1 … i besides itself."""
        masses = self.by_lag(self.seq_len)[:, 1:].double().logcumsumexp(-1)
        return nn.functional.pad(masses, (1, 0), value=-math.inf)


class RelativePositionBias(CausalMask):
    """S_ij ← S_ij + b_h(i − j), b_h(0) = 0, causal; b_h is a learned table over lags 1 … N − 1.

    Starts as b_h(lag) = 3 − slope_h (lag − 1), so that heads first attend to near tokens, each at a
    range of its own. Certificates depend on the table only through its mass
    n_h = Σ_lag exp b_h(lag), which takes the place of N − 1 in every bound (docs/numerics.md).

    If lag 0 is not the token itself but the one before, ``sees_itself`` is false and b_h starts as
    −slope_h lag, without the step of 3.
    """

    def __init__(self, num_heads: int, seq_len: int, sees_itself: bool = True) -> None:
        super().__init__(seq_len)
        slopes = torch.tensor([SLOPES[h % len(SLOPES)] for h in range(num_heads)])[:, None]
        first = torch.full_like(slopes, NEAREST) if sees_itself else -slopes
        self.table = nn.Parameter(first - slopes * torch.arange(seq_len - 1))

    def lags(self) -> Float[Tensor, "heads seq_len"]:
        """The table, after a zero."""
        return nn.functional.pad(self.table, (1, 0))


# Those whose mass is known to be that of their biases.
POSITIONS = (VisibilityMask, CausalMask, RelativePositionBias)


def log_masses(masks: Sequence[VisibilityMask]) -> Float[Tensor, "masks heads"]:
    """log n_h of several masks; of tables of one size at once."""
    if tables := tables_of(masks):
        return torch.stack(tables).logsumexp(-1)
    return torch.stack([mask.log_mass() for mask in masks])


def biases_together(
    masks: Sequence[VisibilityMask], num_tokens: int
) -> Float[Tensor, "masks heads tokens tokens"]:
    """The additive biases of several masks; of tables of one size at once."""
    if tables := tables_of(masks):
        by_lag = torch.stack([table[:, : num_tokens - 1] for table in tables])
        return toeplitz(nn.functional.pad(by_lag, (1, 0)), num_tokens)
    return torch.stack([mask(num_tokens) for mask in masks])


def tables_of(masks: Sequence[VisibilityMask]) -> list[Tensor]:
    """The tables of all masks; none if they have no tables, or tables of several sizes."""
    tables: list[Tensor] = [mask.table for mask in masks if type(mask) is RelativePositionBias]
    alike = len(tables) == len(masks) and len({table.shape for table in tables}) == 1
    return tables if alike else []


def toeplitz(
    by_lag: Float[Tensor, "*masks heads tokens"], rows: int
) -> Float[Tensor, "*masks heads rows tokens"]:
    """The last ``rows`` rows of the matrix b(i − j), −∞ above the diagonal."""
    if rows == 1:
        return by_lag.flip(-1).unsqueeze(-2)
    reversed_lags = nn.functional.pad(by_lag.flip(-1), (0, rows - 1), value=-math.inf)
    # Contiguous: flip would keep the order of the strides, which is that of the transpose.
    return reversed_lags.unfold(-1, by_lag.shape[-1], 1).contiguous().flip(-2)
