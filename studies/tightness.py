"""Kim et al. 2021, Fig. 1: how near tied L2 attention comes to its Lipschitz bound, by ascent on X.

With D = H = 1 and unit weights F(X)_i = Σ_j P_ij x_j, P_ij ∝ exp(−(x_i − x_j)²). The norm of its
Jacobian in entry_max, the largest absolute row sum, is maximised over X by Adam from many starts,
all in one batch. Every value found is the gain of one vector, hence a lower bound on Lip(F), to be
held against the theorem's upper bound. The worst configuration is known in closed form.

Only the row that is largest at present is differentiated, at a cost linear in N.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from invformer.config.schema import MANY
from invformer.config.section import option
from invformer.numerics.lambert_w import phi_inverse_upper
from studies import kim
from studies.report import Figure, Rows, Summary, curves, panels, table
from studies.study import Study, StudyOptions, grid, program, progress

LR = 0.1  # of Adam on X
SPREAD = 10.0  # starts are uniform on [−s, s], s uniform up to this
REFRESH_EVERY = 40  # steps between two looks for the largest row


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Maximise the Jacobian's norm over X and compare with the theorem's bound."""

    sizes: list[int] = option([100, 200, 400, 1000], "N, tokens", "[2, 1e5]")
    num_starts: int = option(20, "starts of the ascent, the best counts", "[1, 1e5]")
    num_steps: int = option(600, "Adam steps", MANY)


@dataclass(frozen=True)
class Case:
    """One maximisation."""

    num_tokens: int
    num_starts: int
    num_steps: int
    seed: int


@dataclass(frozen=True)
class Result:
    """Both sides of Lip(F) in entry_max."""

    lower: float  # the largest norm of J_F(X) that any start reached
    upper: float  # Theorem 3.2 of Kim et al. 2021


def cases(options: Options) -> list[Case]:
    """One for each number of tokens."""
    return grid(Case, options, num_tokens=options.sizes)


def measure(case: Case, device: torch.device) -> Result:
    """Ascend from every start and evaluate the bound."""
    reached = ascend(case, starts(case).to(device))
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    upper = kim.entry_max_bound(one, one, one[0], kim.log_mass_of(case.num_tokens))
    return Result(reached.max().item(), upper)


def starts(case: Case) -> Float[Tensor, "starts tokens"]:
    """X ~ U[−s, s] with s ~ U[0, SPREAD], one s per start, as in the paper."""
    generator = torch.Generator().manual_seed(case.seed)
    uniform = {"generator": generator, "dtype": torch.float64}
    s = SPREAD * torch.rand(case.num_starts, 1, **uniform)
    return s * (2 * torch.rand(case.num_starts, case.num_tokens, **uniform) - 1)


def ascend(case: Case, x: Float[Tensor, "starts tokens"]) -> Float[Tensor, "starts"]:
    """The largest row sum of |J_F(X)| met on the way up from every start."""
    x = x.clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=LR, maximize=True)
    best, token = x.new_zeros(case.num_starts), torch.zeros(case.num_starts, dtype=torch.long)
    for step in progress(range(case.num_steps), f"ascent N={case.num_tokens}"):
        if step % REFRESH_EVERY == 0:
            token = torch.stack([largest_row(one) for one in x.detach()])
        reached = row_sum(x, token)
        best = torch.maximum(best, reached.detach())
        optimiser.zero_grad()
        reached.sum().backward()
        optimiser.step()
    return best


def largest_row(x: Float[Tensor, "tokens"]) -> Int[Tensor, ""]:
    """The token whose row sum is largest."""
    return row_sum(x.expand(len(x), -1), torch.arange(len(x), device=x.device)).argmax()


def row_sum(x: Float[Tensor, "rows tokens"], token: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    """Σ_j |∂F(X)_i/∂x_j| of one token i in every row, differentiable in X."""

    def attention_at(x: Tensor) -> Tensor:
        gap = x - x.take_along_dim(token[:, None], dim=-1)  # x_j − x_i
        return ((-gap.square()).softmax(-1) * x).sum(-1)

    pull = torch.func.vjp(attention_at, x)[1]
    return pull(x.new_ones(len(x)))[0].abs().sum(-1)


def worst_row_sum(num_tokens: int) -> float:
    """max_a of the row sum at one token 0, half of the others at +a and half at −a (D = H = 1).

    With z = a² it is 1 − 2p + 4pz, p = (N − 1)e^{−z}/(1 + (N − 1)e^{−z}), largest where
    (N − 1)e^{−z} = z − 3/2, and 4 φ⁻¹((N − 1)/√e) + 1 there (ours; exact for odd N).
    """
    return 4 * phi_inverse_upper(math.log(num_tokens - 1) - 0.5) + 1


def closed_form(case: Case, result: Result) -> float:
    """What the worst configuration attains."""
    return worst_row_sum(case.num_tokens)


def summarise(rows: Rows[Case, Result]) -> Summary:
    """The paper's curve beside ours."""
    violated = sum(r.lower > r.upper for _, r in rows)
    missed = max(1 - r.lower / worst_row_sum(c.num_tokens) for c, r in rows)
    gap = max(r.upper - r.lower for _, r in rows)
    words = f"within {missed:.2%} of the closed form and {gap:.2f} of the bound at every N"
    must = [(violated == 0, f"the bound is exceeded in {violated} cases")]
    return Summary(table(rows, more={"closed form": closed_form}), [(missed < 0.01, words)], must)


def draw(rows: Rows[Case, Result]) -> Figure:
    """Both sides of the constant against N."""
    figure, (axes,) = panels(1, 1)
    for name, label, line, marker in (
        ("upper", "upper: 4 g(N−1) + 1 (Kim et al., Theorem 3.2)", "-", ""),
        (closed_form, "closed form of the worst configuration", ":", ""),
        ("lower", "lower: best start (ours)", "", "o"),
    ):
        curves(axes, rows, "num_tokens", name, label=label, linestyle=line, marker=marker)
    axes.set(
        xlabel="tokens N", ylabel="Lipschitz constant, entry_max (no unit)", xscale="log",
        title="D = H = 1, unit weights",
    )  # fmt: skip
    return figure


STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
