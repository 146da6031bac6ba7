"""log|det(I + J)| of y = x + f(x), J = ∂f/∂x, exactly for a causal f.

A normalising flow adds this to its log-density. For example:

    f, x = lambda x: 0.05 * x.cumsum(-2).tanh(), torch.randn(2, 5, 3)
    exact = causal_log_det(f, x)                                             # one value per sample
"""

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.linear_map import SequenceMap
from invformer.numerics.norms import Tokens


def causal_log_det(f: SequenceMap, x: Tokens) -> Float[Tensor, "*batch"]:
    """log|det(I + J)| = Σ_t log|det(I + J_tt)|, J_tt = ∂f_t/∂x_t, exact for causal f.

    J is block lower-triangular in time, so only the D × D blocks of its diagonal count. Cost: N·D
    products with Jᵀ, D of them at a time, and N determinants of D × D. Each product also shows
    whether later tokens have influence: then ValueError. Gradients for x and for weights of f are
    recorded.
    """
    tokens, width = x.shape[-2:]
    identity = torch.eye(width, dtype=x.dtype, device=x.device)
    total = torch.zeros(x.shape[:-2], dtype=x.dtype, device=x.device)
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        _, pull_back, *_ = torch.func.vjp(f, x.clone())
        for t in range(tokens):
            # One cotangent per output channel of token t: (D, *batch, N, D).
            seeds = torch.zeros(width, *x.shape, dtype=x.dtype, device=x.device)
            seeds[..., t, :] = identity.view(width, *(1,) * (x.ndim - 2), width)
            rows = torch.func.vmap(lambda g: pull_back(g)[0])(seeds)
            if bool((rows[..., t + 1 :, :] != 0).any()):
                raise ValueError(f"f is not causal: token {t} depends on later ones")
            block = rows[..., t, :].movedim(0, -2)
            total = total + torch.linalg.slogdet(identity + block).logabsdet
    return total
