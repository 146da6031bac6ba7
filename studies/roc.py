"""How well scores tell sick runs from healthy ones, when runs come in families.

A score is higher the sicker a run looks; infinite is allowed. Ties count half.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RESAMPLES, HALVES, ALLOWED = 2000, 200, 0.05
Pairs = Float[Tensor, "families families"]


@dataclass(frozen=True)
class Labels:
    """Which runs are sick, and the family of each, numbered from 0."""

    sick: Bool[Tensor, "runs"]
    family: Int[Tensor, "runs"]

    @property
    def num_families(self) -> int:
        """Families that have a run."""
        return int(self.family.max()) + 1

    def pairs(self, scores: Float[Tensor, "runs"]) -> tuple[Pairs, Pairs]:
        """Pairs of a sick run (of a row's family) and a healthy one: ordered rightly, and all."""
        ill, well = scores[self.sick, None], scores[~self.sick]
        won = (ill > well).double() + 0.5 * (ill == well).double()
        member = torch.nn.functional.one_hot(self.family, self.num_families).double()
        ill, well = member[self.sick], member[~self.sick]
        return ill.T @ won @ well, ill.sum(0)[:, None] * well.sum(0)

    def area(self, scores: Float[Tensor, "runs"]) -> float:
        """Area under the ROC curve; NaN without a sick run or without a healthy one."""
        won, number = self.pairs(scores)
        return (won.sum() / number.sum()).item()

    def resampled_areas(self, scores: Float[Tensor, "runs"]) -> Float[Tensor, "resamples"]:
        """The area where families are drawn with replacement, the same ones for all scores."""
        generator = torch.Generator().manual_seed(0)
        shape = RESAMPLES, self.num_families
        drawn = torch.randint(self.num_families, shape, generator=generator)
        weights = torch.nn.functional.one_hot(drawn, self.num_families).sum(1).double()
        won, number = (torch.einsum("ri,ij,rj->r", weights, m, weights) for m in self.pairs(scores))
        return won / number

    def held_out(self, scores: Float[Tensor, "runs"]) -> Float[Tensor, "2 halves"]:
        """Shares of sick runs that are found and of healthy ones accused, by thresholds of others.

        One random half of the families chooses the threshold, the other half is judged; many times.
        """
        generator = torch.Generator().manual_seed(0)
        shares = []
        for _ in range(HALVES):
            order = torch.randperm(self.num_families, generator=generator)
            chosen = torch.isin(self.family, order[: max(1, self.num_families // 2)])
            above = scores > threshold(scores[chosen & ~self.sick])
            other = ~chosen if not chosen.all() else chosen
            shares.append(
                [above[other & is_so].double().mean() for is_so in (self.sick, ~self.sick)]
            )
        return torch.tensor(shares).T


def threshold(healthy: Float[Tensor, "runs"]) -> float:
    """The smallest score that at most 5 % of healthy runs exceed."""
    if not len(healthy):
        return math.inf
    return healthy.sort(descending=True).values[int(ALLOWED * len(healthy))].item()


def between(shares: Float[Tensor, "draws"]) -> str:
    """The mean of shares, and what 95 % of them lie between, in percent."""
    known = shares[~shares.isnan()]
    if not len(known):
        return "–"
    low, high = known.quantile(torch.tensor([0.025, 0.975], dtype=known.dtype)).tolist()
    return f"{100 * known.mean().item():.0f} % ({100 * low:.0f} to {100 * high:.0f})"
