"""Kim et al. 2021, Fig. 1: how near tied L2 attention comes to its Lipschitz bound, by ascent on X.

‖J_F(X)‖ is maximised over X by Adam from many starts, all in one batch. Every value found is the
gain of one vector, hence a lower bound on Lip(F), to be held against the theorem's upper bound in
the same norm. With D = H = 1 and unit weights the worst configuration is known in closed form.

In entry_max and token_max a norm of J is the norm of one of its rows, so only the row that is
largest at present is differentiated, at a cost linear in N; which one that is, is looked up every
``refresh_every`` steps. With D = 1 both norms are the same number.
"""

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from invformer.bounds import contractive
from invformer.config.schema import MANY
from invformer.config.section import option
from invformer.nn.kim_attention import paper_output_map
from invformer.numerics.linear_map import linearise
from invformer.numerics.norms import Norm
from studies import kim
from studies.layer_bounds import project, tied_attention, unproject
from studies.report import Figure, Outcome, Rows, Summary, by, curves, panels, table, values
from studies.study import Study, StudyOptions, case_of, program, progress

SHAPE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})")
NUM_DIRECTION_STEPS = 5  # of the power method that finds a row's worst output direction
CLOSED_FORM_STEPS = 200  # of a ternary search on an interval of length 10: far below rounding


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Maximise the Jacobian's norm over X and compare with the theorem's bound."""

    sizes: list[int] = option(
        [100, 200, 400, 1000], "N in entry_max, D = H = 1, tokens", "[2, 1e5]"
    )
    frobenius_sizes: list[int] = option(
        [10, 30, 100], "N in frobenius, D = H = 1, tokens", "[2, 1e4]"
    )
    shapes: list[str] = option(
        ["2x1", "2x2", "4x2", "8x4"], "DxH with unit weights, in all three norms; [] for none"
    )
    shape_tokens: int = option(50, "N for these shapes, tokens", "[2, 1e4]")
    num_starts: int = option(20, "starts of the ascent, the best counts", "[1, 1e5]")
    num_steps: int = option(600, "Adam steps", MANY)
    lr: float = option(0.1, "learning rate of Adam on X", "(0, 10]")
    spread: float = option(10.0, "starts are uniform on [-s, s], s uniform up to this", "(0, 1e6]")
    refresh_every: int = option(40, "steps between two looks for the largest row", MANY)

    def check(self) -> None:
        """Shapes read DxH, and heads divide the width."""
        for shape in self.shapes:
            match = SHAPE.fullmatch(shape)
            if match is None or int(match[1]) % int(match[2]):
                self.refuse("shapes", f"{shape!r} is not DxH, such as 4x2, with H a divisor of D")


@dataclass(frozen=True)
class Case:
    """One maximisation; the weights are W^Q_h = W^V_h = columns of I, W^O = I."""

    norm: Norm
    num_tokens: int
    d_model: int
    num_heads: int
    num_starts: int
    num_steps: int
    lr: float
    spread: float
    refresh_every: int
    seed: int

    @property
    def is_scalar(self) -> bool:
        """Whether D = H = 1, the paper's setting."""
        return self.d_model == 1


@dataclass(frozen=True)
class Result:
    """Both sides of Lip(F), in the norm of the case."""

    lower: float  # the largest norm of J_F(X) that any start reached
    median: float  # over the starts
    upper: float  # the theorem's bound: Kim et al. 2021 in entry_max and frobenius, ours elsewhere
    closed_form: float  # what the worst configuration for D = H = 1 attains; NaN elsewhere


def cases(options: Options) -> list[Case]:
    """The paper's curve, the other norm at D = H = 1, and the other shapes in every norm."""
    norms: tuple[Norm, ...] = ("entry_max", "token_max", "frobenius")
    settings: list[tuple[Norm, int, int, int]] = [
        *(("entry_max", n, 1, 1) for n in options.sizes),
        *(("frobenius", n, 1, 1) for n in options.frobenius_sizes),
    ]
    for shape, norm in itertools.product(options.shapes, norms):
        d_model, num_heads = map(int, shape.split("x"))
        settings.append((norm, options.shape_tokens, d_model, num_heads))
    names = ("norm", "num_tokens", "d_model", "num_heads")
    return [case_of(Case, options, **dict(zip(names, s, strict=True))) for s in settings]


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
    has_closed_form = case.is_scalar and case.norm != "frobenius"
    closed_form = worst_row_sum(n) if has_closed_form else math.nan
    return Result(reached.max().item(), reached.median().item(), upper, closed_form)


def unit_weights(d_model: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """W^Q = W^V (H, D, d) and W^O (H, d, D): every head reads and writes its own channels."""
    blocks = torch.eye(d_model, dtype=torch.float64).unflatten(0, (num_heads, -1))
    return blocks.mT, blocks.mT, blocks


def starts(case: Case) -> Float[Tensor, "starts tokens width"]:
    """X ~ U[−s, s] with s ~ U[0, spread], one s per start, as in the paper."""
    generator = torch.Generator().manual_seed(case.seed)
    uniform = {"generator": generator, "dtype": torch.float64}
    s = case.spread * torch.rand(case.num_starts, 1, 1, **uniform)
    x = torch.rand(case.num_starts, case.num_tokens, case.d_model, **uniform)
    return s * (2 * x - 1)


def ascend(case: Case, x: Tensor, w_q: Tensor, g: Tensor) -> Float[Tensor, "starts"]:
    """The largest ‖J_F(X)‖ met on the way up from every start.

    ‖Jᵀu‖ in the dual norm is at most ‖J‖ for a u of dual norm one, and equal for the best u. In
    entry_max and token_max u sits at one token, so ‖Jᵀu‖ takes one row of J, looked up anew every
    ``refresh_every`` steps; in frobenius u follows the leading left singular vector.
    """
    x = x.clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=case.lr, maximize=True)
    best = x.new_zeros(case.num_starts)
    witness: Any = None
    for step in progress(range(case.num_steps), f"ascent {case.norm} N={case.num_tokens}"):
        if case.norm == "frobenius":
            witness = leading_vector(x.detach(), w_q, g, witness)
        elif step % case.refresh_every == 0:
            witness = largest_rows(x.detach(), w_q, g, case.norm)
        reached = gain(x, witness, w_q, g, case.norm)
        best = torch.maximum(best, reached.detach())
        optimiser.zero_grad()
        reached.sum().backward()
        optimiser.step()
    return best


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
    found = [largest_row(sample, w_q, g, norm) for sample in x]
    tokens = torch.tensor([token for token, _ in found], device=x.device)
    return tokens, torch.stack([direction for _, direction in found])


def gain(
    x: Float[Tensor, "starts tokens width"], witness: Any, w_q: Tensor, g: Tensor, norm: Norm
) -> Float[Tensor, "starts"]:
    """‖Jᵀu‖ in the dual norm, differentiable in X with the witness u held fixed."""
    if norm == "frobenius":
        pull = torch.func.vjp(lambda z: tied_attention(z, w_q, g), x)[1]
        return torch.linalg.vector_norm(pull(witness)[0], dim=(-2, -1))
    token, direction = witness
    return dual_norm(row_sensitivity(x, token, direction, w_q, g), norm)


def row_sensitivity(
    x: Float[Tensor, "#starts tokens width"],
    token: Int[Tensor, "starts"],
    direction: Float[Tensor, "starts width"],
    w_q: Float[Tensor, "heads width d_head"],
    g: Float[Tensor, "heads d_head width"],
) -> Float[Tensor, "starts tokens width"]:
    """w = ∇_X ⟨a, F(X)_i⟩, one row of J per start, at a cost linear in N.

    With b = G_h a, t_j = P_ij ⟨b, q_j − Y_i⟩ per head:

        w_j = [P_ij b + (2/√d) t_j (q_i − q_j) + δ_ij (2/√d) Σ_k t_k (q_k − q_i)] W^Q_hᵀ

    Args:
        x: X, one for all starts or one each.
        token: i.
        direction: a.
        w_q: W^Q, one matrix per head.
        g: output maps G_h.
    """
    q = project(x, w_q)
    at = token[:, None, None, None]
    gap = q - q.take_along_dim(at, dim=-2)  # q_j − q_i: distances are not computed by expansion
    scale = 1 / math.sqrt(q.shape[-1])
    p = (-scale * gap.square().sum(-1, keepdim=True)).softmax(-2)
    b = torch.einsum("hde,se->shd", g, direction)[:, :, None]
    t = p * ((gap - (p * gap).sum(-2, keepdim=True)) * b).sum(-1, keepdim=True)
    own = torch.zeros_like(gap).scatter(-2, at.expand_as(b), (t * gap).sum(-2, keepdim=True))
    return unproject(p * b + 2 * scale * (own - t * gap), w_q)


def largest_row(
    x: Float[Tensor, "tokens width"], w_q: Tensor, g: Tensor, norm: Norm
) -> tuple[int, Float[Tensor, "width"]]:
    """The token i and the direction a for which Σ_j ‖(Jᵀ(e_i ⊗ a))_j‖_dual is largest.

    Exact in entry_max; in token_max the direction comes from a few steps of Boyd's method per row.
    """
    tokens = torch.arange(len(x), device=x.device)
    axes = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    blocks = torch.stack(
        [row_sensitivity(x[None], tokens, a.expand_as(x), w_q, g) for a in axes], dim=1
    )  # (row, output channel, token, input channel)
    if norm == "entry_max":
        sums = dual_norm(blocks, norm)
        row, channel = divmod(int(sums.argmax()), len(axes))
        return row, axes[channel]
    a = x.new_ones(x.shape) / math.sqrt(x.shape[-1])
    for _ in range(NUM_DIRECTION_STEPS):
        w = torch.einsum("rcje,rc->rje", blocks, a)
        o = torch.einsum("rcje,rje->rc", blocks, torch.nn.functional.normalize(w, dim=-1))
        a = torch.nn.functional.normalize(o, dim=-1)
    row = int(dual_norm(torch.einsum("rcje,rc->rje", blocks, a), norm).argmax())
    return row, a[row]


def dual_norm(w: Float[Tensor, "*batch tokens width"], norm: Norm) -> Float[Tensor, "*batch"]:
    """Σ |w_jk| for ``entry_max``, Σ_j ‖w_j‖₂ for ``token_max``: the norm of w as a functional."""
    return torch.linalg.vector_norm(w, ord=1 if norm == "entry_max" else 2, dim=-1).sum(-1)


def worst_row_sum(num_tokens: int) -> float:
    """max_a of the row sum at one token 0, half of the others at +a and half at −a (D = H = 1).

    1 − 2p + 4pz with z = a², p = (N − 1)e^{−z}/(1 + (N − 1)e^{−z}); at z = u + 1, u = g(N − 1),
    it is 4u + 1 − 2u/(u + 1), within 2 of the bound 4u + 1 (ours; exact for odd N).
    """

    def row_sum(z: float) -> float:
        others = (num_tokens - 1) * math.exp(-z)
        p = others / (1 + others)
        return 1 - 2 * p + 4 * p * z

    low, high = 0.5, 0.5 + math.log(num_tokens) + 10  # concave in between: ternary search
    for _ in range(CLOSED_FORM_STEPS):
        third = (high - low) / 3
        if row_sum(low + third) < row_sum(high - third):
            low += third
        else:
            high -= third
    return row_sum(low)


def share(case: Case, result: Result) -> float:
    """Share of the bound that the best start reached."""
    return result.lower / result.upper


def setting(case: Case, result: Result) -> str:
    """Shape and length in words."""
    return f"D={case.d_model} H={case.num_heads} N={case.num_tokens}"


def summarise(rows: Rows[Case, Result]) -> Summary:
    """The paper's curve; what share of the bound is reached elsewhere."""
    curve = [(c, r) for c, r in rows if c.is_scalar and c.norm == "entry_max"]
    lowers = ", ".join(f"{r.lower:.3f} (N={c.num_tokens})" for c, r in curve) or "not run"
    uppers = ", ".join(f"{r.upper:.3f}" for _, r in curve) or "not run"
    paper = (
        "a figure without numbers: lower bound log N-like with the upper bound's slope; the "
        f"theorem's upper bound is {uppers}"
    )
    lines = table(rows, more={"lower/upper": share})
    if violated := sum(r.lower > r.upper for _, r in rows):
        why = f"the bound is exceeded in {violated} cases, so it or the code is wrong"
        return Summary(lines, paper, lowers, "not reproduced", why)
    if not curve:
        why = "the paper's setting (entry_max, D = H = 1) was not among the cases"
        return Summary(lines, paper, lowers, "not in the paper", why)
    missed = max(1 - r.lower / r.closed_form for _, r in curve)
    gap = max(r.upper - r.lower for _, r in curve)
    why = (
        f"the ascent comes within {100 * missed:.2f} % of the closed form and within {gap:.2f} of "
        "the bound, which it never exceeds, at every N"
    )
    shares = by([row for row in rows if row not in curve], "norm")
    if ranges := [(norm, values(group, share)) for norm, group in shares.items()]:
        words = ", ".join(f"{norm} {min(s):.2f} to {max(s):.2f}" for norm, s in ranges)
        why += (
            f". Share of the bound reached elsewhere: {words}; a small share says that the bound "
            "is loose or the ascent weak, not which"
        )
    outcome: Outcome = "reproduced" if missed < 0.01 else "partly reproduced"
    return Summary(lines, paper, lowers, outcome, why)


def draw(rows: Rows[Case, Result]) -> Figure:
    """Both sides of the constant against N; beside it, what share of the bound was reached."""
    figure, (left, right) = panels(1, 2)
    curve = [(c, r) for c, r in rows if c.is_scalar and c.norm == "entry_max"]
    for name, label, style in (
        ("upper", "upper: 4 g(N−1) + 1 (Kim et al., Theorem 3.2)", "-"),
        ("closed_form", "closed form of the worst configuration", ":"),
        ("lower", "lower: best start (ours)", ""),
        ("median", "lower: median start (ours)", ""),
    ):
        marker = {"lower": "o", "median": "_"}.get(name, "")
        curves(left, curve, "num_tokens", name, label=label, linestyle=style, marker=marker)
    left.set(
        xlabel="tokens N", ylabel="Lipschitz constant, entry_max (no unit)", xscale="log",
        title="D = H = 1, unit weights",
    )  # fmt: skip
    curves(right, rows, setting, share, ("norm",), linestyle="none")
    right.tick_params("x", rotation=45)
    right.set(ylabel="lower / upper, best start (no unit)", ylim=(0, 1), title="unit weights")
    return figure


STUDY = Study(Options, Case, Result, cases, measure, summarise, draw)

if __name__ == "__main__":
    program(STUDY)
