"""States that were damaged on the way."""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.precision import at_least_single

NOISE_SEED = 1_000_003  # a model's embeddings are drawn by a small seed
LEAST_ROUNDING = 2.0**-16  # of the largest entry: what a forward pass is assumed to round by


def perturb(
    z: Float[Tensor, "tokens width"],
    noise: float,
    bits: int | None,
    seed: int,
    rounding: float | None = None,
) -> tuple[Float[Tensor, "tokens width"], dict[str, Tensor]]:
    """Damaged states, and how far they may be off, as :func:`.prefix_margins` takes it.

    Every state is moved by ``noise`` times the states' root mean square length, in a random
    direction. Then its entries are rounded to 2^bits levels, evenly spaced between the least and
    the largest of all. Bounds have room for the rounding of z to its format, ε/2 of the largest
    entry, and of an entry by the forward pass, ``rounding``, by default 2⁻¹⁶ of the largest entry.
    States in half precision become float32 first: float16 has no number for the 65536th level.
    """
    of_format, z = torch.finfo(z.dtype).eps / 2, at_least_single(z)
    clean = z
    length = noise * z.square().sum(-1).mean().sqrt()
    if noise:
        generator = torch.Generator().manual_seed(NOISE_SEED + seed)
        directions = torch.randn(z.shape, generator=generator).to(z)
        z = z + directions * (length / directions.norm(dim=-1, keepdim=True))
    largest = torch.maximum(clean.abs().amax(), z.abs().amax())
    off = of_format * largest + (LEAST_ROUNDING * largest if rounding is None else rounding)
    if bits is not None:
        least, largest = z.aminmax()
        step = (largest - least) / (2**bits - 1)
        z = least + ((z - least) / step).round() * step if step > 0 else z
        off = off + step / 2
    if noise:
        return z, {"states_within": length + off * z.shape[-1] ** 0.5}
    return z, {} if bits is None else {"entries_within": off}
