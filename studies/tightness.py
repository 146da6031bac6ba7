"""Kim et al. 2021, Fig. 1: how near tied L2 attention comes to its Lipschitz bound, by ascent on X.

‖J_F(X)‖ is maximised over X by Adam from many starts, all in one batch. Every value found is the
gain of one vector, hence a lower bound on Lip(F), to be held against the theorem's upper bound in
the same norm. With D = H = 1 and unit weights the worst configuration is known in closed form.

In entry_max and token_max a norm of J is the norm of one of its rows, so only the row that is
largest at present is differentiated, at a cost linear in N; which one that is, is looked up every
``REFRESH_EVERY`` steps. With D = 1 both norms are the same number.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from invformer.bounds import contractive
from invformer.config.schema import MANY
from invformer.config.section import option
from invformer.nn.kim_attention import paper_output_map
from invformer.numerics.lambert_w import phi_inverse_upper
from invformer.numerics.linear_map import linearise
from invformer.numerics.norms import Norm
from studies import kim
from studies.layer_bounds import project, tied_attention
from studies.report import Figure, Outcome, Rows, Summary, by, curves, panels, table, values
from studies.study import Study, StudyOptions, grid, program, progress

SHAPES = ((2, 1), (2, 2), (4, 2), (8, 4))  # D and H with unit weights, in all three norms
NORMS: tuple[Norm, ...] = ("entry_max", "token_max", "frobenius")
LR = 0.1  # of Adam on X
SPREAD = 10.0  # starts are uniform on [−s, s], s uniform up to this
REFRESH_EVERY = 40  # steps between two looks for the largest row
NUM_DIRECTION_STEPS = 5  # of the power method that finds a row's worst output direction


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Maximise the Jacobian's norm over X and compare with the theorem's bound."""

    sizes: list[int] = option(
        [100, 200, 400, 1000], "N in entry_max, D = H = 1, tokens", "[2, 1e5]"
    )
    frobenius_sizes: list[int] = option(
        [10, 30, 100], "N in frobenius, D = H = 1, tokens", "[2, 1e4]"
    )
    shape_tokens: int = option(50, "N for other shapes, in all three norms, tokens", "[2, 1e4]")
    num_starts: int = option(20, "starts of the ascent, the best counts", "[1, 1e5]")
    num_steps: int = option(600, "Adam steps", MANY)


@dataclass(frozen=True)
class Case:
    """One maximisation; the weights are W^Q_h = W^V_h = columns of I, W^O = I."""

    norm: Norm
    num_tokens: int
    d_model: int
    num_heads: int
    num_starts: int
    num_steps: int
    seed: int

    @property
    def of_the_paper(self) -> bool:
        """Whether this is the paper's setting."""
        return self.d_model == 1 and self.norm == "entry_max"


@dataclass(frozen=True)
class Result:
    """Both sides of Lip(F), in the norm of the case."""

    lower: float  # the largest norm of J_F(X) that any start reached
    upper: float  # the theorem's bound: Kim et al. 2021 in entry_max and frobenius, ours elsewhere


def cases(options: Options) -> list[Case]:
    """The paper's curve, the other norm at D = H = 1, and the other shapes in every norm."""
    scalar = {"d_model": 1, "num_heads": 1}
    found = grid(Case, options, scalar, norm=["entry_max"], num_tokens=options.sizes)
    found += grid(Case, options, scalar, norm=["frobenius"], num_tokens=options.frobenius_sizes)
    for d_model, num_heads in SHAPES:
        shape = {"d_model": d_model, "num_heads": num_heads, "num_tokens": options.shape_tokens}
        found += grid(Case, options, shape, norm=NORMS)
    return found


def measure(case: Case, device: torch.device) -> Result:
    """Ascend from every start and evaluate the bounds."""
    w_q, w_v, w_o = unit_weights(case.d_model, case.num_heads)
    g = paper_output_map(w_q, w_v, w_o)
    reached = ascend(case, starts(case).to(device), w_q.to(device), g.to(device))
    n = case.num_tokens
    match case.norm:
        case "entry_max":
            upper = kim.entry_max_bound(w_q, w_v, w_o.flatten(0, 1), n)
        case "token_max":
            upper = contractive.token_max_bound(w_q, g, n)
        case "frobenius":
            upper = kim.frobenius_bound(w_q, w_v, w_o.flatten(0, 1), n, n)
    return Result(reached.max().item(), upper)


def unit_weights(d_model: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """W^Q = W^V (H, D, d) and W^O (H, d, D): every head reads and writes its own channels."""
    blocks = torch.eye(d_model, dtype=torch.float64).unflatten(0, (num_heads, -1))
    return blocks.mT, blocks.mT, blocks


def starts(case: Case) -> Float[Tensor, "starts tokens width"]:
    """X ~ U[−s, s] with s ~ U[0, SPREAD], one s per start, as in the paper."""
    generator = torch.Generator().manual_seed(case.seed)
    uniform = {"generator": generator, "dtype": torch.float64}
    s = SPREAD * torch.rand(case.num_starts, 1, 1, **uniform)
    x = torch.rand(case.num_starts, case.num_tokens, case.d_model, **uniform)
    return s * (2 * x - 1)


def ascend(case: Case, x: Tensor, w_q: Tensor, g: Tensor) -> Float[Tensor, "starts"]:
    """The largest ‖J_F(X)‖ met on the way up from every start.

    ‖Jᵀu‖ in the dual norm is at most ‖J‖ for a u of dual norm one, and equal for the best u. In
    entry_max and token_max u sits at one token, so ‖Jᵀu‖ takes one row of J, looked up anew every
    ``REFRESH_EVERY`` steps; in frobenius u follows the leading left singular vector.
    """
    x = x.clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=LR, maximize=True)
    best = x.new_zeros(case.num_starts)
    token, u = None, None
    for step in progress(range(case.num_steps), f"ascent {case.norm} N={case.num_tokens}"):
        if case.norm == "frobenius":
            u = leading_vector(x.detach(), w_q, g, u)
        elif step % REFRESH_EVERY == 0:
            token, u = largest_rows(x.detach(), w_q, g, case.norm)
        reached = gain(x, token, u, w_q, g, case.norm)
        best = torch.maximum(best, reached.detach())
        optimiser.zero_grad()
        reached.sum().backward()
        optimiser.step()
    return best


def gain(
    x: Tensor, token: Tensor | None, u: Tensor | None, w_q: Tensor, g: Tensor, norm: Norm
) -> Float[Tensor, "starts"]:
    """‖Jᵀu‖ in the dual norm, differentiable in X; u is of all tokens, or of one each start."""

    def f(z: Tensor) -> Tensor:
        return tied_attention(z, w_q, g) if token is None else attention_at(z, token, w_q, g)

    return dual_norm(torch.func.vjp(f, x)[1](u)[0], norm)


def attention_at(
    x: Float[Tensor, "starts tokens width"],
    token: Int[Tensor, "starts"],
    w_q: Float[Tensor, "heads width d_head"],
    g: Float[Tensor, "heads d_head width"],
) -> Float[Tensor, "starts width"]:
    """F(X)_i = Σ_h Σ_j P_ij q_j G_h of one token i each start, at a cost linear in N."""
    q = project(x, w_q)
    gap = q - q.take_along_dim(token[:, None, None, None], dim=-2)  # q_j − q_i
    p = (-gap.square().sum(-1, keepdim=True) / math.sqrt(q.shape[-1])).softmax(-2)
    return torch.einsum("shd,hde->se", (p * q).sum(-2), g)


def leading_vector(x: Tensor, w_q: Tensor, g: Tensor, u: Tensor | None) -> Tensor:
    """One step u ← J Jᵀu/‖J Jᵀu‖ of every start, more at the first X."""
    jacobian, steps = linearise(lambda z: tied_attention(z, w_q, g), x), 1
    if u is None:
        generator = torch.Generator().manual_seed(0)
        start: Tensor = torch.randn(x.shape[1:], generator=generator, dtype=x.dtype)
        u, steps = start.to(x).expand_as(x), NUM_DIRECTION_STEPS
    v: Tensor = u
    for _ in range(steps):
        v = jacobian.jvp(jacobian.vjp(v))
        v = v / torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    return v


def largest_rows(x: Tensor, w_q: Tensor, g: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The token and the direction of :func:`largest_row`, of every start."""
    tokens, directions = zip(*(largest_row(rows_of(z, w_q, g), norm) for z in x), strict=True)
    return torch.tensor(tokens, device=x.device), torch.stack(directions)


def rows_of(
    x: Float[Tensor, "tokens width"], w_q: Tensor, g: Tensor
) -> Float[Tensor, "row channel tokens width"]:
    """J, row by row."""
    every = torch.arange(len(x), device=x.device)
    pull = torch.func.vjp(lambda z: attention_at(z, every, w_q, g), x.expand(len(x), -1, -1))[1]
    axes = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.stack([pull(axis.expand_as(x))[0] for axis in axes], dim=1)


def largest_row(
    rows: Float[Tensor, "row channel tokens width"], norm: Norm
) -> tuple[int, Float[Tensor, "channel"]]:
    """The token i and the direction a for which Σ_j ‖(Jᵀ(e_i ⊗ a))_j‖_dual is largest.

    Exact in entry_max; in token_max the direction comes from a few steps of Boyd's method per row.
    """
    num_channels = rows.shape[1]
    if norm == "entry_max":
        row, channel = divmod(int(dual_norm(rows, norm).argmax()), num_channels)
        return row, torch.eye(num_channels).to(rows)[channel]
    a = rows.new_ones(rows.shape[:2]) / math.sqrt(num_channels)
    for _ in range(NUM_DIRECTION_STEPS):
        w = torch.einsum("rcje,rc->rje", rows, a)
        o = torch.einsum("rcje,rje->rc", rows, torch.nn.functional.normalize(w, dim=-1))
        a = torch.nn.functional.normalize(o, dim=-1)
    row = int(dual_norm(torch.einsum("rcje,rc->rje", rows, a), norm).argmax())
    return row, a[row]


def dual_norm(w: Float[Tensor, "*batch tokens width"], norm: Norm) -> Float[Tensor, "*batch"]:
    """The norm of w as a functional: Σ |w_jk| for entry_max, Σ_j ‖w_j‖₂ for token_max."""
    if norm == "frobenius":
        return torch.linalg.vector_norm(w, dim=(-2, -1))
    return torch.linalg.vector_norm(w, ord=1 if norm == "entry_max" else 2, dim=-1).sum(-1)


def worst_row_sum(num_tokens: int) -> float:
    """max_a of the row sum at one token 0, half of the others at +a and half at −a (D = H = 1).

    With z = a² it is 1 − 2p + 4pz, p = (N − 1)e^{−z}/(1 + (N − 1)e^{−z}), largest where
    (N − 1)e^{−z} = z − 3/2, and 4 φ⁻¹((N − 1)/√e) + 1 there (ours; exact for odd N).
    """
    return 4 * phi_inverse_upper(math.log(num_tokens - 1) - 0.5) + 1


def closed_form(case: Case, result: Result) -> float | None:
    """What the worst configuration for D = H = 1 attains."""
    return worst_row_sum(case.num_tokens) if case.of_the_paper else None


def share(case: Case, result: Result) -> float:
    """Share of the bound that the best start reached."""
    return result.lower / result.upper


def summarise(rows: Rows[Case, Result]) -> Summary:
    """The paper's curve; what share of the bound is reached elsewhere."""
    curve = [(c, r) for c, r in rows if c.of_the_paper]
    lowers = ", ".join(f"{r.lower:.3f} (N={c.num_tokens})" for c, r in curve) or "not run"
    uppers = ", ".join(f"{r.upper:.3f}" for _, r in curve) or "not run"
    paper = (
        "a figure without numbers: lower bound log N-like with the upper bound's slope; the "
        f"theorem's upper bound is {uppers}"
    )
    outcome, why = verdict(rows, curve)
    lines = table(rows, more={"closed form": closed_form, "lower/upper": share})
    return Summary(lines, paper, lowers, outcome, why)


def verdict(rows: Rows[Case, Result], curve: Rows[Case, Result]) -> tuple[Outcome, str]:
    """Whether the paper's curve meets the closed form, and no value is above its bound."""
    if violated := sum(r.lower > r.upper for _, r in rows):
        why = f"the bound is exceeded in {violated} cases, so it or the code is wrong"
        return "not reproduced", why
    if not curve:
        return "not in the paper", "the paper's setting (entry_max, D = H = 1) was not run"
    missed = max(1 - r.lower / worst_row_sum(c.num_tokens) for c, r in curve)
    gap = max(r.upper - r.lower for _, r in curve)
    elsewhere = by([row for row in rows if row not in curve], "norm")
    shares = {norm: values(group, share) for norm, group in elsewhere.items()}
    words = ", ".join(f"{norm} {min(s):.2f} to {max(s):.2f}" for norm, s in shares.items())
    return "reproduced" if missed < 0.01 else "partly reproduced", (
        f"the ascent comes within {100 * missed:.2f} % of the closed form and within {gap:.2f} of "
        "the bound, which it never exceeds, at every N. Share of the bound reached elsewhere: "
        f"{words or 'not run'}; a small share says that the bound is loose or the ascent weak, not "
        "which"
    )


def draw(rows: Rows[Case, Result]) -> Figure:
    """Both sides of the constant against N, in the paper's setting."""
    figure, (axes,) = panels(1, 1)
    curve = [(c, r) for c, r in rows if c.of_the_paper]
    for name, label, line, marker in (
        ("upper", "upper: 4 g(N−1) + 1 (Kim et al., Theorem 3.2)", "-", ""),
        (closed_form, "closed form of the worst configuration", ":", ""),
        ("lower", "lower: best start (ours)", "", "o"),
    ):
        curves(axes, curve, "num_tokens", name, label=label, linestyle=line, marker=marker)
    axes.set(
        xlabel="tokens N", ylabel="Lipschitz constant, entry_max (no unit)", xscale="log",
        title="D = H = 1, unit weights",
    )  # fmt: skip
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
