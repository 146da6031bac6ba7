"""How far the input of a model's stack can move before a prediction changes: proven, and attacked.

    m_ij = logit_y − logit_j,   radius_i = min_j m_ij / (‖W_y − W_j‖₂ L)

for a position i with a correct prediction y: L bounds how far what the head reads moves, and W_y is
the head's row of character y. All in float64, rounded down.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from invformer.data.windows import Windows
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import Tokens, divide

Logits = Float[Tensor, "windows tokens vocab"]
OfTokens = Float[Tensor, "windows tokens"]
OfWindows = Float[Tensor, " windows"]

INWARD = 1 - 1e-12  # a radius is rounded down, a perturbation stays inside its ball
ROUNDING = 1e-11  # of the logits in float64, relative to the largest: no margin below it counts
MULTIPLES = (1.0, 1.5, 2.0, 4.0)  # of the certified radius, for attacks


def certified_radii(
    model: CharTransformer, logits: Logits, correct: Bool[Tensor, "windows tokens"], constant: float
) -> OfTokens:
    """min_j (logit_y − logit_j)/(‖W_y − W_j‖₂ L), rounded down; 0 where y is not correct.

    No perturbation of the sequence shorter than this in token_max changes the prediction at the
    position. ``constant`` is L, from the stack's input to what the head reads.
    """
    best, y = logits.max(-1)
    distances = torch.cdist(
        model.head.weight, model.head.weight, compute_mode="donot_use_mm_for_euclid_dist"
    )
    gaps = best.unsqueeze(-1) - logits - ROUNDING * logits.abs().amax()
    radii = (gaps / (distances[y] * constant)).scatter(-1, y.unsqueeze(-1), torch.inf)
    return torch.where(correct, radii.amin(-1).clamp_min(0) * INWARD, 0.0)


def attacked(
    model: CharTransformer, windows: Windows, targets: Windows, constant: float, num_steps: int
) -> tuple[float, list[float]]:
    """Median certified radius of correct positions, and the share that flips at its multiples.

    The share is of the windows that have a correct position; ``constant`` is L from the stack's
    input to what the head reads.
    """
    x = model.embedding(windows)
    clean = logits_of(model, x)
    correct = clean.argmax(-1) == targets
    radii = certified_radii(model, clean, correct, constant)
    flips = [
        attack_at_radius(model, x, targets, clean, radii * multiple, num_steps)
        for multiple in MULTIPLES
    ]
    return radii[correct].median().item() if correct.any() else math.nan, flips


def attack_at_radius(
    model: CharTransformer,
    x: Tokens,
    targets: Windows,
    clean: Logits,
    radii: OfTokens,
    num_steps: int,
) -> float:
    """Share of predictions that PGD changes, on the margin of each window's last correct position.

    Every position is attacked with its own radius.
    """
    number = torch.arange(targets.shape[1], device=x.device)
    position = torch.where(clean.argmax(-1) == targets, number, -1).amax(-1)
    chosen = position >= 0
    if not chosen.any():
        return 0.0
    rows = torch.arange(int(chosen.sum()), device=x.device)
    x, targets, position = x[chosen], targets[chosen], position[chosen]

    def lost(x: Tensor) -> Tensor:
        return -margins(logits_of(model, x), targets)[rows, position]

    moved = pgd(lost, x, radii[chosen, position], num_steps)
    return (lost(moved) > 0).double().mean().item()


def pgd(
    objective: Callable[[Tokens], OfWindows], x: Tokens, radius: OfWindows, num_steps: int
) -> Tokens:
    """The worst of the points that projected gradient ascent visits in balls around X.

    Steps of a quarter of the radius along the gradient of every token, from the centre; windows do
    not influence each other. The worst point of a window, the centre included, has the largest
    objective.
    """
    step = torch.zeros_like(x)
    best, best_value = x, torch.full_like(radius, -math.inf)
    with torch.enable_grad():
        for index in range(num_steps + 1):
            moved = (x + step).requires_grad_()
            value = objective(moved)
            better = value.detach() > best_value
            best = torch.where(better[:, None, None], moved.detach(), best)
            best_value = torch.where(better, value.detach(), best_value)
            if index == num_steps:
                break
            gradient = torch.autograd.grad(value.sum(), moved)[0]
            ahead = step + radius[:, None, None] / 4 * unit(gradient)
            length = ahead.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
            step = ahead * (INWARD * radius[:, None, None] / length).clamp_max(1)  # in the ball
    return best


def unit(x: Tokens) -> Tokens:
    """Every token at length one: the direction along which a gradient x ascends fastest."""
    return divide(x, x.norm(dim=-1, keepdim=True))


def logits_of(model: CharTransformer, x: Tokens) -> Logits:
    """Logits for an input of the stack."""
    return model.predict(model.stack(x))


def margins(logits: Logits, targets: Windows) -> OfTokens:
    """The target's logit minus the largest other one."""
    at = targets.unsqueeze(-1)
    others = logits.scatter(-1, at, -torch.inf).amax(-1)
    return logits.gather(-1, at).squeeze(-1) - others
