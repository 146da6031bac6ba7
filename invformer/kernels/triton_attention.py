"""The ``triton`` kernel: causal attention with a bias of the lag on NVIDIA GPUs.

    Y = P V,   P = softmax_j S,   S_ij = q_i·k_j/√d + b(i − j),   j ≤ i

As flash attention (Dao et al. 2022), in memory linear in N and without atomic sums, so that the
same call has the same bits. Without keys and values attention is tied L2: both are the queries, and
S_ij = −‖q_i − q_j‖²/√d + b(i − j). Products are of numbers in the format given, summed in float32;
those of float32 are three of TF32, with an error near that of float32.
"""

import importlib
import math
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from invformer.kernels.native import require
from invformer.kernels.native_attention import (
    refuse_tangents,
    results,
    token_by_token,
    with_channels_together,
)
from invformer.numerics.private import constant_when_compiled

MOST_CHANNELS = 128
# The bias's gradient is summed by about so many programs, if there are enough samples.
PROGRAMS = 512


@cache
def complaint(device: torch.device) -> str | None:
    """Why there is no Triton on a device; None if there is. The first call compiles a little C."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "it is for NVIDIA GPUs"
    if find_spec("triton") is None:
        return "the package triton is missing"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0"
    try:
        importlib.import_module("triton").runtime.driver.active.get_current_target()
    except Exception as error:
        return " ".join(str(error).split())[:300]
    return None


@constant_when_compiled
def is_available(device: torch.device) -> bool:
    """True if there is Triton."""
    return complaint(device) is None


def can_take(q: Tensor) -> bool:
    """True if the kernel is there for queries (*batch, H, N, d) of this kind."""
    fits = q.dtype != torch.float64 and q.shape[-1] <= MOST_CHANNELS
    return fits and is_available(q.device)


@torch.library.custom_op("invformer::triton_attention", mutates_args=())
def triton_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, by_lag: Tensor | None
) -> tuple[Tensor, Tensor]:
    """softmax(S) v and log Σ_j exp S_ij of every query; causal, all (B, H, N, d), of one format.

    In L2 attention the second leaves −‖q_i‖²/√d out of the logits. In float32 q is taken relative
    to q_0, to lose less to cancellation; in half precision it is not, since products of its numbers
    are exact in float32. Gradients then have the rounding of y as it is: they err more where q is
    many times farther from zero than from other queries. The bias is (H, N) in float32.
    """
    y, log_mass = results(q, torch.float32)
    _launch("forward", (y, log_mass), _seen(q, k, v), _bias(q, by_lag), tied=k is None)
    return y, log_mass


@torch.library.custom_op("invformer::triton_attention_backward", mutates_args=())
def triton_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    by_lag: Tensor | None,
    y: Tensor,
    log_mass: Tensor,
    with_bias: bool,
) -> list[Tensor]:
    """Gradients of q, of k and v if there are any, and of by_lag if asked for."""
    tied, seen, bias = k is None, _seen(q, k, v), _bias(q, by_lag)
    gradients = [token_by_token(q) for _ in range(1 if tied else 3)]
    delta, outer = torch.empty_like(log_mass), _strided(dy, q)
    _launch("backward_queries", (gradients[0], delta, y, log_mass, *outer), seen, bias, tied)
    to = (gradients[0], None, None) if tied else gradients
    _launch("backward_keys", (*to, delta, log_mass, *outer), seen, bias, tied)
    if not with_bias:
        return gradients
    (batch, heads, tokens, _), tiles = q.shape, Tiles.of(q)
    rows, columns = tiles.block, math.ceil(tokens / tiles.block) * tiles.block
    across = columns // tiles.step
    samples = math.ceil(batch * heads * across / PROGRAMS)  # of each program
    parts = math.ceil(batch / samples)
    sums = y.new_empty(parts, heads, rows, columns, dtype=torch.float32)
    to = (sums, batch, samples, delta, log_mass, *outer)
    _launch("backward_bias", to, seen, bias, tied, grid=(parts * heads, across))
    return [*gradients, sum_by_lag(sums.sum(0))[:, :tokens].contiguous()]


def sum_by_lag(t: Float[Tensor, "heads rows tokens"]) -> Float[Tensor, "heads tokens"]:
    """Sums along the diagonals i − j of the last rows of a matrix."""
    heads, rows, tokens = t.shape
    # Rows one column longer than the distance of their entries: each moves one to the right.
    padded = F.pad(t.flip(-2), (0, rows)).flatten(1)[:, : rows * (tokens + rows - 1)]
    return padded.view(heads, rows, -1).sum(1)[:, :tokens].flip(-1)


class Tiles(NamedTuple):
    """How a program goes through its share."""

    width: int
    block: int
    step: int
    warps: int

    @classmethod
    def of(cls, q: Tensor) -> "Tiles":
        """What fits into the registers and the shared memory of a multiprocessor."""
        width = max(16, 1 << (q.shape[-1] - 1).bit_length())
        if q.element_size() < 4:
            return cls(width, 64, 64 if width <= 64 else 32, 4)
        return cls(width, 64, 32, 4) if width <= 64 else cls(width, 32, 16, 8)


def _launch(
    name: str,
    to: Any,
    seen: tuple[Any, ...],
    bias: Tensor | None,
    tied: bool,
    grid: tuple[int, int] | None = None,
) -> None:
    """Run a program for every pair of sample and head and every block of tokens."""
    program = getattr(importlib.import_module("invformer.kernels.triton_programs"), name)
    q: Tensor = seen[0]
    (batch, heads, tokens, d_head), tiles = q.shape, Tiles.of(q)
    with torch.cuda.device_of(q):
        program[grid or (batch * heads, math.ceil(tokens / tiles.block))](
            *to,
            *seen,
            bias,
            0 if bias is None else bias.shape[-1],
            (2 if tied else 1) / math.sqrt(d_head),
            heads,
            tokens,
            TIED=tied,
            CENTRED=tied and q.dtype == torch.float32,
            D=d_head,
            WIDTH=tiles.width,
            BLOCK=tiles.block,
            STEP=tiles.step,
            PRECISION="tf32x3",
            num_warps=tiles.warps,
            num_stages=2,
        )


def _bias(q: Tensor, by_lag: Tensor | None) -> Tensor | None:
    """The last rows of the matrix b(i − j), the last first, (H, BLOCK, length).

    ``length`` is that of whole blocks and one more. Lags beyond the last token have −∞.
    """
    if by_lag is None:
        return None
    require(by_lag, q.shape[1:3], torch.float32, q.device)
    rows, tokens = Tiles.of(q).block, q.shape[-2]
    more = rows + -tokens % rows
    falling = F.pad(by_lag.flip(-1), (more, rows - 1), value=-math.inf)
    return falling.unfold(-1, tokens + more, 1).contiguous()


def _seen(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Any, ...]:
    """Queries, keys and values, each with its strides."""
    return tuple(part for t in (q, k, v) for part in _strided(q if t is None else t, q))


def _strided(t: Tensor, q: Tensor) -> tuple[Any, ...]:
    """A tensor like q whose channels lie together, and its strides."""
    require(t, q.shape, q.dtype, q.device)
    t = with_channels_together(t)
    return t, *t.stride()[:3]


@triton_attention.register_fake
def _(q, k, v, by_lag):
    return results(q, torch.float32)


@triton_attention_backward.register_fake
def _(dy, q, k, v, by_lag, y, log_mass, with_bias):
    gradients = [token_by_token(q) for t in (q, k, v) if t is not None]
    return [*gradients, *([torch.empty_like(by_lag)] if with_bias else [])]


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dlog_mass):
    refuse_tangents(dy)
    with_bias = ctx.needs_input_grad[3]
    found = triton_attention_backward(dy, *ctx.saved_tensors, with_bias)
    dbias = found.pop() if with_bias else None
    return *found, *[None] * (3 - len(found)), dbias


triton_attention.register_autograd(_backward, setup_context=_keep)
