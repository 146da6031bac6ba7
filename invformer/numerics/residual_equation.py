"""y = x + f(x) as the solver sees it: how f is evaluated, what that rounds, what is proven of f."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.error_bound import (
    causal_error_bound,
    contraction_error_bound,
    sequence_norm,
    token_norm,
)
from invformer.numerics.linear_map import SequenceMap
from invformer.numerics.norms import Norm, vector_norm
from invformer.numerics.precision import RESIDUAL_FLOOR, rounding_factor, unit_roundoff

Contraction = Literal["global", "causal"]

# Headroom over a rounding error that was measured, as the difference between two precisions: from
# one point to another, and on the way from a low precision down to float64.
FROM_POINT_TO_POINT = 4
FROM_LOW_TO_HIGH = 16
LEAST_DEFAULT_RTOL = 1e-10
HEADROOM = 8


class Evidence(NamedTuple):
    """What is measured in full precision, per sample.

    Attributes:
        known: for which samples.
        residual: ‖y − x − f(x)‖.
        rounding: of that.
        token_residual: (B, N), the same of every token.
        output_error: how far y may be from what x really gives.
    """

    known: Tensor
    residual: Tensor
    rounding: Tensor
    token_residual: Tensor
    output_error: Tensor

    def among(self, samples: Tensor, rows: Tensor) -> "Evidence":
        """The same for a larger batch, known where it comes from."""
        shapes = ((len(samples), *v.shape[1:]) for v in self)
        return Evidence(
            *(v.new_zeros(n).index_copy_(0, rows, v) for v, n in zip(self, shapes, strict=True))
        )


@dataclass(frozen=True)
class ResidualEquation:
    """y = x + f(x) for a batch flattened to (B, N, D). Lengths are float64, one per sample.

    Attributes:
        f: the map in the precision of ``y``, which is that of the iterates.
        precise_f: the map behind the reported residual.
        residual_dtype: the precision ``precise_f`` works in.
        y: right-hand sides.
        start: first iterates.
        f_start: f(start) if it is known.
        forward_dtype: the precision y was computed in.
        measure_gap: measures what evaluating f in ``forward_dtype`` rounds, at the start.
        gap: the same once it was measured, else None. An iteration whose rates raise no doubt goes
            by the rounding model alone, and measures where it ends.
        factor: k of the rounding model (:func:`.precision.rounding_factor`).
        inner_size: length of what f adds up inside, whatever x is; zero if the model knows all.
        norm: the norm of every length.
        lipschitz_bound: c, or None.
        contraction: what c bounds.
        off_diagonal_bound: L of the causal error bound, or None.
        evaluation_error: proven error of ``precise_f``, or None for the model.
        output_error: proven error of y, or None for the model.
        atol: error allowed.
        rtol: error allowed relative to ‖x̂‖.
        compact: leave solved samples out of the batch.
        evidence: prove how far the answer is off. Without, an iteration ends by the residual of its
            own precision, rounding and all.
    """

    f: SequenceMap
    precise_f: SequenceMap
    residual_dtype: torch.dtype
    y: Tensor
    start: Tensor
    f_start: Tensor | None
    forward_dtype: torch.dtype
    measure_gap: Callable[[], Tensor]
    gap: Tensor | None
    factor: float
    inner_size: float
    norm: Norm
    lipschitz_bound: float | None
    contraction: Contraction
    off_diagonal_bound: float | Tensor | None
    evaluation_error: Tensor | float | None
    output_error: Tensor | float | None
    atol: Tensor | float
    rtol: float
    compact: bool
    evidence: bool

    # --- how f is evaluated -----------------------------------------------------------------

    @property
    def exact_residual(self) -> bool:
        """Whether the working residual is already the reported one."""
        return self.y.dtype == self.residual_dtype

    @property
    def starts_at_y(self) -> bool:
        """Whether x₀ = y, so that the first residual is −f(x₀)."""
        return self.start is self.y

    @cached_property
    def value_at_start(self) -> Tensor:
        """f(x₀)."""
        return self.f(self.start) if self.f_start is None else self.f_start

    @cached_property
    def start_residual(self) -> Tensor:
        """y − x₀ − f(x₀)."""
        if self.starts_at_y:
            return -self.value_at_start
        return self.y - self.start - self.value_at_start

    @cached_property
    def first_residual(self) -> Tensor:
        """‖y − x₀ − f(x₀)‖."""
        return self.size(self.start_residual)

    def look(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f(x), y − x − f(x) and the norm of that, in the working precision."""
        fx = self.f(x)
        r = (self.y - x).sub_(fx)
        return fx, r, self.size(r)

    def measure(self, x: Tensor, fx: Tensor, r: Tensor, size: Tensor) -> "Evidence":
        """The residual at x in full precision, where f is fx in the working one.

        Args:
            x: iterates.
            fx: f(x).
            r: y − x − f(x) in the working precision: the answer, if that is full or nothing is to
                be proven.
            size: ‖x‖ + ‖f(x)‖.
        """
        gap = self.gap
        if self.y.dtype == torch.float64 or (self.y.dtype == torch.float32 and not self.evidence):
            return self._evidence(token_norm(r, self.norm).double(), size, gap)
        precise, value = x.to(self.residual_dtype), fx
        if not self.exact_residual:
            value = self.precise_f(precise)
            if gap is None:
                gap = self.size(fx.to(torch.float64, copy=True).sub_(value))
        residual = self.y.to(torch.float64, copy=True).sub_(precise).sub_(value)
        return self._evidence(token_norm(residual, self.norm), size, gap)

    def _evidence(self, tokens: Tensor, size: Tensor, gap: Tensor | None) -> "Evidence":
        """From the residuals of all tokens."""
        return Evidence(
            torch.ones_like(size, dtype=torch.bool),
            sequence_norm(tokens, self.norm),
            self.rounding(size, gap),
            tokens,
            self.allowed_output_error(size, gap),
        )

    @cached_property
    def size_of_y(self) -> Tensor:
        """‖y‖ per sample."""
        return self.size(self.y)

    def size(self, x: Tensor) -> Tensor:
        """‖x‖ per sample."""
        at_least_single = x if x.dtype == torch.float64 else x.float()
        return vector_norm(at_least_single, self.norm).double()

    # --- what rounding it allows ------------------------------------------------------------

    def evaluation_noise(self, size: Tensor) -> Tensor:
        """≥ ‖fl(f(x)) − f(x)‖ in the working precision, for size = ‖x‖ + ‖f(x)‖."""
        if self.exact_residual:
            return self.rounding(size, self.gap)
        measured = 0.0 if self.gap is None else FROM_POINT_TO_POINT * self.gap
        return measured + self.factor * unit_roundoff(self.y.dtype) * (size + self.inner_size)

    def rounding(self, size: Tensor, gap: Tensor | None) -> Tensor:
        """≥ the rounding of the reported residual, for size = ‖x‖ + ‖f(x)‖."""
        sizes = size + self.size_of_y + self.inner_size
        if self.evaluation_error is not None:
            return self.evaluation_error + 4 * unit_roundoff(torch.float64) * sizes
        u = unit_roundoff(self.residual_dtype)
        scaled = 0.0
        if gap is not None:
            scaled = FROM_LOW_TO_HIGH * u / unit_roundoff(self.forward_dtype) * gap
        return scaled + self.factor * u * sizes

    def allowed_output_error(self, size: Tensor, gap: Tensor | None) -> Tensor:
        """≥ ‖y − (x + f(x))‖ for the x that was put in, for size = ‖x‖ + ‖f(x)‖."""
        if self.output_error is not None:
            return torch.zeros_like(size) + self.output_error
        if self.forward_dtype == self.residual_dtype:
            return self.rounding(size, gap)
        assert gap is not None
        rounded = unit_roundoff(self.forward_dtype) * (size + self.size_of_y)
        return FROM_POINT_TO_POINT * (gap + rounded)

    # --- what is asked ----------------------------------------------------------------------

    @property
    def margin(self) -> float:
        """1 − c: error = residual / margin. One if c is not known."""
        return 1.0 if self.lipschitz_bound is None else 1 - self.lipschitz_bound

    def tolerance(self, size: Tensor) -> Tensor:
        """atol + rtol ‖x‖ for size = ‖x‖."""
        return self.atol + self.rtol * size

    def within_tolerance(self, size: Tensor, residual: Tensor) -> Tensor:
        """Whether residual / (1 − c) ≤ atol + rtol ‖x‖ for size = ‖x‖; never with NaN."""
        return residual <= self.margin * self.tolerance(size)

    def is_on_its_way(self, before: Tensor, residual: Tensor, reach: Tensor) -> bool:
        """Whether a plain step took every residual down as c says, and none to within tolerance.

        Such a step disproves nothing and ends nothing. ``reach`` is at least ‖x‖. Waits for the
        device; False with NaN.
        """
        known = self.lipschitz_bound if self.contraction == "global" else None
        shrunk = residual <= before * (1.0 if known is None else known)
        far = residual > self.margin * self.tolerance(reach)
        return bool((shrunk & far).all())

    def largest_size(self, reach: Tensor, residual: Tensor) -> Tensor:
        """≥ ‖x‖ + ‖f(x)‖ from ‖x‖ ≤ ``reach``, as f(x) = y − x − residual."""
        return 2 * reach + self.size_of_y + residual

    def smallest_rtol(self) -> float:
        """The relative error that the format, the rounding model and c allow to certify."""
        return (RESIDUAL_FLOOR[self.y.dtype] + 3 * self._modelled()) / self.margin

    def tolerance_below_precision(self) -> Tensor:
        """Which samples cannot be solved to the tolerance by anyone."""
        least = self.smallest_rtol() * self.size_of_y
        least = least + self._modelled() * self.inner_size / self.margin
        return self.tolerance(self.size_of_y) < least

    def _modelled(self) -> float:
        """k u of the reported residual, which is nothing if that is not wanted."""
        return self.factor * unit_roundoff(self.residual_dtype) if self.evidence else 0.0

    def with_tolerance(self, atol: float, rtol: float | None) -> "ResidualEquation":
        """The same equation, another tolerance; rtol None is one that can be met comfortably."""
        if rtol is None:
            rtol = comfortable_rtol(self.smallest_rtol(), self.lipschitz_bound or 0.0)
        return replace(self, atol=atol, rtol=rtol)

    # --- what is known ----------------------------------------------------------------------

    def observed_rate(self, dx: Tensor, df: Tensor, size: Tensor) -> Tensor:
        """(‖df‖ − rounding)/‖dx‖ ≤ Lip(f) from lengths, for points whose sizes sum to ``size``."""
        rate = (df - self.evaluation_noise(size / 2) * 2) / dx
        return rate.nan_to_num(0, 0, 0).clamp(min=0)

    def disproved(self, rate: Tensor) -> Tensor:
        """Whether a rate contradicts c. A causal c says nothing about whole steps."""
        if self.lipschitz_bound is None or self.contraction == "causal":
            return torch.zeros_like(rate, dtype=torch.bool)
        return rate > self.lipschitz_bound

    def error_bound(self, residual: Tensor, token_residual: Tensor, rounding: Tensor) -> Tensor:
        """≥ ‖x̂ − x‖ from the measured residuals and all rounding; infinite if nothing follows."""
        outward = 1 + (self.y[0].numel() + 8) * unit_roundoff(torch.float64)
        if self.lipschitz_bound is None or not self.evidence:
            return torch.full_like(residual, math.inf)
        if self.contraction == "global":
            return contraction_error_bound(outward * residual + rounding, self.lipschitz_bound)
        if self.off_diagonal_bound is None:
            return torch.full_like(residual, math.inf)
        token_residual = outward * token_residual + rounding[:, None]
        tokens = causal_error_bound(token_residual, self.lipschitz_bound, self.off_diagonal_bound)
        return outward * sequence_norm(tokens, self.norm)

    # --- equations made from it -------------------------------------------------------------

    def with_gap(self) -> "ResidualEquation":
        """The same equation, with the rounding of f measured."""
        return self if self.gap is not None else replace(self, gap=self.measure_gap())

    def in_float64(self) -> "ResidualEquation":
        """The same equation, for iterates in float64."""
        y, start = self.y.double(), self.start.double()
        return replace(self.with_gap(), f=self.precise_f, y=y, start=start, f_start=None)

    def of(self, rows: Tensor) -> "ResidualEquation":
        """The equation of some samples; f must accept any batch size."""

        def chosen(value: Any) -> Any:
            return value[rows] if isinstance(value, Tensor) else value

        y = self.y[rows]
        return replace(
            self,
            y=y,
            start=y if self.starts_at_y else self.start[rows],
            f_start=None,
            measure_gap=lambda: self.measure_gap()[rows],
            gap=chosen(self.gap),
            evaluation_error=chosen(self.evaluation_error),
            output_error=chosen(self.output_error),
            atol=chosen(self.atol),
        )

    def from_start(self, start: Tensor) -> "ResidualEquation":
        """The same equation, another start."""
        return replace(self, start=start, f_start=None)


def comfortable_rtol(smallest: float, c: float) -> float:
    """A relative error that can be met with room to spare where ``smallest`` can just be met."""
    # Every step rounds anew and J carries that on: √(1 + c² + c⁴ + …) times one step's.
    return max(LEAST_DEFAULT_RTOL, HEADROOM * smallest / math.sqrt(1 - c * c))


def rtol_of_single_precision(c: float) -> float:
    """The relative error that float32 is asked for by default, if c < 1 is proven."""
    return comfortable_rtol(RESIDUAL_FLOOR[torch.float32] / (1 - c), c)


def residual_equation(
    f: SequenceMap,
    y: Tensor,
    initial: Tensor | None,
    residual_map: SequenceMap | None,
    forward_map: SequenceMap | None,
    forward_dtype: torch.dtype | None,
    *,
    inner_size: float,
    norm: Norm,
    lipschitz_bound: float | None,
    contraction: Contraction,
    off_diagonal_bound: float | Tensor | None,
    evaluation_error: Tensor | float | None,
    output_error: Tensor | float | None,
    compact: bool,
    evidence: bool,
) -> ResidualEquation:
    """Flatten the batch, find out what f can be evaluated in, and measure what that rounds.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    batch, (tokens, width) = y.shape[:-2], y.shape[-2:]
    flat = y.reshape(-1, tokens, width)
    start = y if initial is None else initial.to(y.dtype).expand_as(y)
    flat_start = flat if initial is None else start.reshape(flat.shape)

    def flattened(g: SequenceMap) -> SequenceMap:
        def on_samples(x: Tensor) -> Tensor:
            if len(x) != len(flat):
                return g(x)
            return g(x.reshape(*batch, *x.shape[1:])).reshape(x.shape)

        return on_samples

    f_start = _same_kind(f(start), start, "f")
    own = y.dtype == torch.float64 or not evidence
    precise_f = None if own else _precise(f, f_start, residual_map, start)
    residual_dtype = torch.float64 if precise_f is not None else y.dtype
    precise_f = precise_f or f
    if forward_map is None:
        forward_dtype, forward = y.dtype, f_start
    elif forward_dtype is None:
        raise ValueError("forward_map needs forward_dtype, the precision the forward pass ran in")
    else:
        forward = forward_map(start.to(forward_dtype))

    def measure_gap() -> Tensor:
        # Both at the point as the lower precision sees it: the difference is f's rounding alone.
        if forward_dtype == residual_dtype:
            return torch.zeros(len(flat), dtype=torch.float64, device=y.device)
        seen = start.to(forward_dtype).to(residual_dtype)
        return equation.size((forward.double() - precise_f(seen).double()).reshape(flat.shape))

    equation = ResidualEquation(
        f=flattened(f),
        precise_f=flattened(precise_f),
        residual_dtype=residual_dtype,
        y=flat,
        start=flat_start,
        f_start=f_start.reshape(flat.shape),
        forward_dtype=forward_dtype,
        measure_gap=measure_gap,
        gap=None,
        factor=rounding_factor(tokens, width),
        inner_size=inner_size,
        norm=norm,
        lipschitz_bound=lipschitz_bound,
        contraction=contraction,
        off_diagonal_bound=off_diagonal_bound,
        evaluation_error=_per_sample(evaluation_error, batch),
        output_error=_per_sample(output_error, batch),
        atol=0.0,
        rtol=0.0,
        compact=compact,
        evidence=evidence,
    )
    # Where the iteration ends it knows f in both precisions, if the forward pass ran in its own.
    return equation if forward_dtype == y.dtype != residual_dtype else equation.with_gap()


def output_rounding(
    f: SequenceMap,
    x: Tensor,
    y: Tensor,
    residual_map: SequenceMap | None,
    norm: Norm,
    inner_size: float = 0.0,
) -> Float[Tensor, "samples"]:
    """≥ ‖y − (x + f(x))‖ where y was computed as x + f(x), by the rounding model.

    Args:
        f: the branch, in the precision of x.
        x: (samples, N, D).
        y: what the forward pass made of x.
        residual_map: f in float64; None where f takes float64 itself.
        norm: of the result.
        inner_size: as for :func:`.fixed_point.invert_residual`.
    """
    equation = residual_equation(
        f,
        y,
        x,
        residual_map,
        None,
        None,
        inner_size=inner_size,
        norm=norm,
        lipschitz_bound=None,
        contraction="global",
        off_diagonal_bound=None,
        evaluation_error=None,
        output_error=None,
        compact=False,
        evidence=True,
    ).with_gap()
    size = equation.size(equation.start) + equation.size(equation.value_at_start)
    return equation.allowed_output_error(size, equation.gap)


def _precise(
    f: SequenceMap, f_start: Tensor, residual_map: SequenceMap | None, start: Tensor
) -> SequenceMap | None:
    """The float64 map behind the residual: the one given, else f itself unless it refuses."""
    if residual_map is not None:
        return lambda x: _same_kind(residual_map(x), x, "residual_map")
    try:
        value = f(start.double() * (1 + 2.0**-30))  # what no lower precision holds
    except RuntimeError:  # torch refuses to mix float64 input with low-precision weights
        return None
    if value.dtype != torch.float64:
        return None
    # An f that computes in low precision inside gives itself away: its values fit low precision.
    value = value[value.isfinite()]
    return None if torch.equal(value, value.to(f_start.dtype).double()) else f


def _same_kind(value: Tensor, x: Tensor, name: str) -> Tensor:
    if value.shape != x.shape or value.dtype != x.dtype:
        raise ValueError(
            f"{name} maps {x.dtype} {tuple(x.shape)} to {value.dtype} {tuple(value.shape)}: "
            "it must keep dtype and shape"
        )
    return value


def _per_sample(value: Tensor | float | None, batch: torch.Size) -> Tensor | float | None:
    if isinstance(value, Tensor):
        return value.double().expand(batch).reshape(-1)
    return value
