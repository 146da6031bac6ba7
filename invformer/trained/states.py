"""States at the top of the stack: in files, and damaged."""

import os
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from invformer.errors import DataError, StorageError
from invformer.numerics.precision import RESIDUAL_FLOOR, at_least_single
from invformer.runs.files import replace_file

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


def read_states(path: str) -> Float[Tensor, "tokens width"]:
    """The states of one text in a safetensors file; raises DataError for anything else.

    They are the only tensor in it, or the one that is called ``states``, also as a batch of one.
    """
    try:
        held = safetensors.torch.load_file(os.path.expanduser(path))
        if "states" not in held and len(held) != 1:
            raise ValueError(f"call one of its {len(held)} tensors states")
        states = held["states"] if "states" in held else next(iter(held.values()))
        if states.ndim == 3 and len(states) == 1:
            states = states[0]
        if states.ndim != 2:
            raise ValueError(f"states have the shape (tokens, width), not {tuple(states.shape)}")
        if states.dtype not in RESIDUAL_FLOOR:
            raise ValueError(f"states are numbers of 16, 32 or 64 bits, not {states.dtype}")
        if not states.isfinite().all():
            raise ValueError("some of its numbers are not finite")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: not a safetensors file of states ({error})") from None
    return states


def write_states(z: Float[Tensor, "tokens width"], path: str) -> None:
    """Write states to a safetensors file that :func:`read_states` reads; raises StorageError."""
    content = safetensors.torch.save({"states": z.cpu().contiguous()})
    file = Path(os.path.expanduser(path)).absolute()
    if file.exists() and not file.is_file():  # which root could replace
        raise StorageError(f"{file}: cannot be written (not a regular file)")
    replace_file(file, content)
