"""Models in training whose signals can be read: ours, and nanoGPT from a file of its own."""

import contextlib
import io
import math
import runpy
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from invformer.branches.tied_l2.attention import TiedL2Attention
from invformer.config.schema import OptimConfig
from invformer.errors import ConfigurationError
from invformer.lipschitz.probe import LipschitzProbe
from invformer.lipschitz.submodules import local_constants
from invformer.numerics.l2_attention import split_heads
from invformer.training.optimizers import build_optimizer
from invformer.weights.spectral import set_manual_refresh
from studies.layer_bounds import heads_of
from studies.training import ModelCase, layer_inputs, mean_nats, new_model

MUON_TO_ADAM = 4  # Muon's rate over AdamW's for vectors and embeddings, as train.py has them
WEIGHT_DECAY, BETAS = 0.1, (0.9, 0.99)  # of nanoGPT's AdamW
# Of local constants, which are compared by their logarithms.
STEPS, RTOL = 6, 0.1
WINDOW = 10  # losses in SpikeDetection's running mean


class Ours:
    """A model of this project; its family is KIND/OPTIMISER, AdamW or Muon at ``case.lr``."""

    def __init__(self, case: ModelCase, family: str, device: torch.device) -> None:
        kind, optimiser = family.split("/")
        proven = {} if kind == "certified" else {"certificate": None}
        name = {"bare": "dot_product", "certified": "contractive_l2"}.get(kind, kind)
        self.model = new_model(case, name=name, **proven).to(device)
        if kind == "bare":
            for block in self.model.stack.blocks:
                block.attention.norm = block.feed_forward.norm = nn.Identity()  # pyright: ignore
        config = OptimConfig(name="adamw", lr=case.lr)
        if optimiser == "muon":
            config = OptimConfig(lr=case.lr / MUON_TO_ADAM, muon_lr=case.lr)
        self.optimiser = build_optimizer(self.model, config)
        self.blocks: nn.Module = self.model.stack
        self.text = case.text.windows(case.seq_len, device)
        set_manual_refresh(self.model)
        self.model.initialise(case.batches.batch(0)[0].to(device))
        self.probe = LipschitzProbe(self.model, self.text[0][:1])

    def nats(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, nats per character."""
        return mean_nats(self.model(inputs, folded=True), targets)

    def constants(self) -> dict[str, float]:
        """The estimate of every branch; each token has its turn."""
        for _ in range(self.model.seq_len // 8):
            values = self.probe.values()
        return dict(zip(self.probe.names, values.tolist(), strict=True))  # pyright: ignore

    def attentions(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits without position bias, and attention weights, of every layer at a window."""
        with layer_inputs(self.model) as seen:
            self.model(self.text[0][:1])
        for layer, z in seen:
            h = heads_of(layer, z)
            is_l2 = isinstance(layer, TiedL2Attention)
            logits = -torch.cdist(h.q, h.q).square() if is_l2 else h.q @ h.k.mT
            yield logits / math.sqrt(h.q.shape[-1]), h.p


class NanoGPT:
    """nanoGPT as its file has it, by its own AdamW."""

    def __init__(self, case: ModelCase, file: str, device: torch.device) -> None:
        code = names_in(file)
        torch.manual_seed(case.seed)
        with contextlib.redirect_stdout(io.StringIO()):  # it says how large it is
            config = code["GPTConfig"](
                block_size=case.seq_len, vocab_size=case.text.vocab_size, n_layer=case.num_layers,
                n_head=case.num_heads, n_embd=case.d_model,
            )  # fmt: skip
            self.model: nn.Module = code["GPT"](config).to(device)
            made = self.model.configure_optimizers(WEIGHT_DECAY, case.lr, BETAS, device.type)  # pyright: ignore
        self.optimiser: Optimizer = made
        self.blocks: Any = self.model.transformer.h  # pyright: ignore
        self.text = case.text.windows(case.seq_len, device)

    def nats(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, nats per character."""
        return self.model(inputs, targets.contiguous())[1]

    def constants(self) -> dict[str, float]:
        """Of every block, and of attention and feed-forward in it, without their LayerNorms."""
        window = self.text[0][:1]
        found = local_constants(self.model, window, num_steps=STEPS, rtol=RTOL).values
        parts = {"": "", ".attn": "/attention", ".mlp": "/feed_forward"}
        return {
            f"block_{i:02d}{ours}": found.get(f"transformer.h.{i}{its}", math.inf)
            for i in range(len(self.blocks))
            for its, ours in parts.items()
        }

    def attentions(self) -> Iterator[tuple[Tensor, Tensor]]:
        """As :meth:`Ours.attentions`."""
        with layer_inputs(self.model, type(self.blocks[0].attn)) as seen:
            self.model(self.text[0][:1])
        for attention, x in seen:
            q, k, _ = (split_heads(t, attention.n_head) for t in attention.c_attn(x).chunk(3, -1))
            logits = q @ k.mT / math.sqrt(q.shape[-1])
            hidden = torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1)
            yield logits, logits.masked_fill(hidden, -math.inf).softmax(-1)


@lru_cache(maxsize=1)
def names_in(file: str) -> dict[str, Any]:
    """What a Python file of the user's defines; ConfigurationError if it is not there."""
    try:
        return runpy.run_path(str(Path(file).expanduser()))
    except OSError as error:
        raise ConfigurationError(f"nanogpt={file}: {error.strerror}") from None


@torch.no_grad()
def of_attention(subject: Ours | NanoGPT) -> tuple[float, float]:
    """The largest |logit| of visible pairs, and the least mean entropy of a head, in nats."""
    largest, least = [], []
    for logits, p in subject.attentions():
        largest.append(logits.abs().tril().max().item())
        least.append(torch.special.entr(p).sum(-1).mean(-1).min().item())
    return max(largest), min(least)  # NaN anywhere is told from losses


def spike(losses: Sequence[float]) -> float:
    """The largest rise of a loss above the mean of the ten before it, as a share of that."""
    rises = [0.0]
    for i, (before, loss) in enumerate(pairwise(losses), 1):
        mean = fmean(losses[max(0, i - WINDOW) : i])
        rises.append((loss - mean) / mean if loss > before else 0.0)
    return max(rises)


def largest_weight(blocks: nn.Module) -> float:
    """The largest spectral norm of a matrix in the blocks, each head's its own."""
    named = blocks.named_parameters()
    found = [w.detach() for name, w in named if w.dim() > 1 and "position" not in name]
    if not all(w.isfinite().all() for w in found):
        return math.inf
    return max(torch.linalg.matrix_norm(w, 2).max().item() for w in found)


@torch.no_grad()
def validation(subject: Ours | NanoGPT) -> float:
    """Nats per character of the validation text's whole windows."""
    inputs, targets = subject.text
    parts = zip(inputs.split(64), targets.split(64), strict=True)
    return sum(subject.nats(*part).item() * len(part[0]) for part in parts) / len(inputs)
