"""Following a slowly changing local Lipschitz constant: one pair of products per look."""

from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from invformer.lipschitz.power_iteration import LipschitzEstimate
from invformer.numerics.linear_map import LinearMap
from invformer.numerics.norms import divide, vector_norm

TrackedNorm = Literal["token_max", "frobenius"]


class Tracker:
    """‖J‖ from below, look by look, while J moves under it.

    Each look takes one product with Jᵀ and one with J, for all vectors of all norms together:

    ``frobenius``: x = Jᵀu/‖Jᵀu‖, u ← Jx/‖Jx‖, power iteration from the left.
    ``token_max``: ‖J‖ = max_i sup_{‖x_j‖ ≤ 1} ‖(Jx)_i‖. Every output token i has a unit vector a_i:
    w = Jᵀ(e_i a_i), x_j = w_j/‖w_j‖, a_i ← (Jx)_i/‖(Jx)_i‖, the power method of Boyd for one i. A
    look advances the token that was largest last time and ``scouts`` others in turn: a power method
    that only follows the largest one stays in a local maximum, and was found 10 to 40 % too low.

    Where J acts token by token, all tokens advance at once, and their largest serves both norms.

    The value is the gain of x, so a true lower bound at every look, with the delay of power
    iteration. Its residual belongs to u or a_i: ‖JJᵀu/σ² − u‖ in ``frobenius``, in ``token_max``
    the relative gain ‖(Jx)_i‖/Σ_j ‖w_j‖ − 1 that the step from a_i to x brought.

    Args:
        norms: the norms, in the order of the estimates.
        scouts: tokens a look advances besides the largest (``token_max``).
        seed: of the start vectors, drawn from a generator of its own.
        rtol: residual below which a sample counts as converged.

    Raises:
        ValueError: another norm is asked for.

    Source:
        as ``power_iteration_estimate``; following a moving target with scouts is ours.
    """

    tokens: Tensor  # a_i as rows
    lengths: Tensor  # ‖(Jx)_i‖ when token i was last looked at
    whole: Tensor  # u

    def __init__(
        self,
        norms: tuple[TrackedNorm, ...],
        *,
        scouts: int = 2,
        seed: int = 0,
        rtol: float = 0.1,
    ) -> None:
        if not {"token_max", "frobenius"}.issuperset(norms):
            raise ValueError(f"only token_max and frobenius can be followed, got {norms}")
        self.norms = norms
        self.scouts = scouts
        self.seed = seed
        self.rtol = rtol
        self.turn = 0
        self.has_started = False

    @property
    def num_vectors(self) -> int:
        """How many vectors a look hands to the products of a J that mixes tokens."""
        scouting = 1 + self.scouts if "token_max" in self.norms else 0
        return scouting + ("frobenius" in self.norms)

    def look(self, jacobian: LinearMap, per_token: bool = False) -> tuple[LipschitzEstimate, ...]:
        """One estimate per norm, and one step on from the vectors of the look before.

        Args:
            jacobian: J. Its products must broadcast over a further leading dimension (of
                ``num_vectors``), unless it acts token by token.
            per_token: whether J = diag(J_1, …, J_N).
        """
        if not self.has_started:
            self._start(jacobian)
        return self._all_tokens(jacobian) if per_token else self._some_tokens(jacobian)

    def _start(self, jacobian: LinearMap) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(jacobian.shape, generator=generator, dtype=torch.float64)
        noise = noise.to(jacobian.device, jacobian.dtype)
        self.tokens = divide(noise, torch.linalg.vector_norm(noise, dim=-1, keepdim=True))
        self.lengths = noise.new_zeros(noise.shape[:-1])
        self.whole = divide(noise, vector_norm(noise, "frobenius")[..., None, None])
        self.has_started = True

    def _all_tokens(self, jacobian: LinearMap) -> tuple[LipschitzEstimate, ...]:
        a = self.tokens
        w = jacobian.vjp(a)
        reach = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
        x = divide(w, reach)
        x = shortened(x, torch.linalg.vector_norm(x, dim=-1, keepdim=True))
        o = jacobian.jvp(x)
        length = torch.linalg.vector_norm(o, dim=-1, keepdim=True)
        self.tokens = torch.where(length > 0, divide(o, length), a)
        value, largest = length.max(-2)
        at_largest = largest[..., None]
        residual = {
            "token_max": divide(length - reach, reach),
            "frobenius": torch.linalg.vector_norm(
                divide(reach, length) * self.tokens - a, dim=-1, keepdim=True
            ),
        }
        alone = torch.zeros_like(length).scatter_(-2, at_largest, 1) * x
        witness = {"token_max": x, "frobenius": alone}
        return tuple(
            self._estimate(
                value.squeeze(-1),
                residual[norm].gather(-2, at_largest)[..., 0, 0],
                norm,
                witness[norm],
            )
            for norm in self.norms
        )

    def _some_tokens(self, jacobian: LinearMap) -> tuple[LipschitzEstimate, ...]:
        chosen = self._choose() if "token_max" in self.norms else []
        here = [torch.zeros_like(self.lengths).scatter_(-1, token, 1) for token in chosen]
        starts = [one_hot.unsqueeze(-1) * self.tokens for one_hot in here]
        follow_whole = "frobenius" in self.norms
        pulled = jacobian.vjp(torch.stack([*starts, self.whole] if follow_whole else starts))
        lengths = self._lengths(pulled)
        x = divide(pulled, lengths)
        x = shortened(x, self._lengths(x))
        outputs = jacobian.jvp(x)
        found = {}
        if follow_whole:
            found["frobenius"] = self._advance_whole(x[-1], outputs[-1], lengths[-1, ..., 0, 0])
        if starts:
            count = len(starts)
            reach = lengths[:count].sum((-2, -1))
            found["token_max"] = self._advance_tokens(here, x[:count], outputs[:count], reach)
        return tuple(found[norm] for norm in self.norms)

    def _lengths(self, x: Tensor) -> Tensor:
        """‖x_j‖ of every token; of the last vector, if that is ``whole``, ‖x‖ for all of them."""
        lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if "frobenius" in self.norms:
            lengths[-1] = vector_norm(x[-1], "frobenius")[..., None, None]
        return lengths

    def _choose(self) -> list[Int[Tensor, "*batch one"]]:
        """The largest token of every sample, then the scouts whose turn it is."""
        largest = self.lengths.argmax(-1, keepdim=True)
        num_tokens = self.lengths.shape[-1]
        turns = [(self.turn + scout) % num_tokens for scout in range(self.scouts)]
        self.turn = (self.turn + self.scouts) % num_tokens
        return [largest] + [torch.full_like(largest, token) for token in turns]

    def _advance_whole(self, x: Tensor, o: Tensor, reach: Tensor) -> LipschitzEstimate:
        u, value = self.whole, vector_norm(o, "frobenius")
        self.whole = torch.where(value[..., None, None] > 0, divide(o, value[..., None, None]), u)
        back = divide(reach, value)[..., None, None] * self.whole
        return self._estimate(value, vector_norm(back - u, "frobenius"), "frobenius", x)

    def _advance_tokens(
        self, here: list[Tensor], x: Tensor, outputs: Tensor, reach: Tensor
    ) -> LipschitzEstimate:
        lengths = torch.linalg.vector_norm(outputs, dim=-1)
        turned = outputs / lengths.clamp_min(torch.finfo(lengths.dtype).tiny).unsqueeze(-1)
        for one_hot, length, rows in zip(here, lengths, turned, strict=True):
            self.lengths = torch.where(one_hot > 0, length, self.lengths)
            moved = (one_hot * length > 0).unsqueeze(-1)
            self.tokens = torch.where(moved, rows, self.tokens)
        value, best = lengths.amax(-1).max(0, keepdim=True)
        witness = x.gather(0, best[..., None, None].expand(1, *x.shape[1:]))[0]
        gained = divide(value - reach.gather(0, best), reach.gather(0, best))
        return self._estimate(value[0], gained[0], "token_max", witness)

    def _estimate(
        self, value: Tensor, residual: Tensor, norm: TrackedNorm, vector: Tensor
    ) -> LipschitzEstimate:
        residual = torch.where(value == 0, torch.zeros_like(residual), residual)
        return LipschitzEstimate(value, residual, 1, residual <= self.rtol, norm, vector)

    def state_dict(self) -> dict[str, Any]:
        """The vectors, and whose turn it is; nothing before the first look."""
        if not self.has_started:
            return {}
        vectors = {"tokens": self.tokens, "lengths": self.lengths, "whole": self.whole}
        return {"turn": self.turn, **vectors}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from saved vectors."""
        self.has_started = bool(state)
        if state:
            self.turn = int(state["turn"])
            self.tokens, self.lengths, self.whole = (
                state[name].to(device) for name in ("tokens", "lengths", "whole")
            )


def shortened(x: Tensor, lengths: Tensor) -> Tensor:
    """x/max(1, ‖x‖): what was divided by a length whose squares left the range may be too long.

    Without it a token that hardly matters, ‖w_j‖ near the root of the smallest number, would count
    several times as much as it may, and the gain of such an x is no lower bound.
    """
    return x / lengths.clamp(min=1)
