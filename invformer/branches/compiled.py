"""What compiled estimates need to know of a branch (``kernels/cpp/estimate.cpp``)."""

from typing import Any

from torch import Tensor

from invformer.weights.position_bias import CausalMask, RelativePositionBias

# Of one branch, by the names of ``Branch`` in kernels/cpp/branch.h: tensors of one format, all but
# W and V without gaps.
Fields = dict[str, Tensor | float]


def knows(position: Any) -> bool:
    """True if compiled code knows this mask or bias, or if there is none."""
    return type(position) in (CausalMask, RelativePositionBias, type(None))


def maps(w: Tensor, v: Tensor) -> Fields:
    """W and V, as they lie in memory."""
    own: Fields = {"w": w, "v": v, "inner": w.shape[-1], "outer": len(v)}
    own |= {"w_row": w.stride(0), "w_column": w.stride(1)}
    return own | {"v_row": v.stride(0), "v_column": v.stride(1)}


def heads(count: int, position: Any) -> Fields:
    """What the heads of an attention see of positions."""
    own: Fields = {"heads": count, "kernel": 1}
    if isinstance(position, RelativePositionBias):
        table = position.table
        own |= {"biases": table, "bias_stride": table.stride(0) if len(table) > 1 else 0}
    return own
