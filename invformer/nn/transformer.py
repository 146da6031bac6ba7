"""The character-level language model: embedding, a stack of blocks, a free head."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal, overload

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from invformer.branches.branch import AttentionCache, Branch
from invformer.branches.dot_product import PreNormBranch
from invformer.nn.residual import InvertibleResidual, ResidualWeights
from invformer.nn.stack import FoldedStackWeights, InvertibleStack, StackWeights
from invformer.numerics.norms import Norm, Tokens
from invformer.weights.dropout import Dropout

# Symbols of texts, and what is predicted after each.
Text = Integer[Tensor, "*batch tokens"]
Logits = Float[Tensor, "*batch tokens vocab"]
# Below this a temperature makes no difference, and float32 would divide by zero.
COLDEST = 1e-30
# Distances to symbols that are held at once when states are decoded.
MOST_DISTANCES = 1 << 24


class CharEmbedding(nn.Module):
    """Token plus position embedding in the first ``d_embedding`` channels, zero in the others.

    Blocks write to the zero channels (injective padding, Jacobsen et al. 2018): beside an embedding
    the output of a contraction would be small.
    """

    def __init__(self, vocab_size: int, seq_len: int, d_model: int, d_embedding: int) -> None:
        super().__init__()
        self.padding = d_model - d_embedding
        self.token = nn.Embedding(vocab_size, d_embedding)
        self.position = nn.Parameter(0.1 * torch.randn(seq_len, d_embedding))

    def forward(self, tokens: Text, start: int = 0) -> Tokens:
        """The input of the stack, for symbols from position ``start`` on.

        ValueError if there are none, or if they reach beyond ``seq_len``.
        """
        end = start + tokens.shape[-1]
        self.require_length(end)
        x = self.token(tokens) + self.position[start:end]
        return nn.functional.pad(x, (0, self.padding))

    def require_length(self, tokens: int) -> None:
        """Raise ValueError unless there are positions for so many."""
        seq_len = self.position.shape[0]
        if not 1 <= tokens <= seq_len:
            raise ValueError(f"a sequence has 1 to {seq_len} tokens (the seq_len), got {tokens}")

    def nearest_tokens(self, x: Tokens) -> Text:
        """The symbols whose embeddings lie nearest: the inverse of :meth:`forward` on its range."""
        z = x[..., : self.token.embedding_dim].double() - self.position[: x.shape[-2]].double()
        nearest = [some.argmin(-1) for some in self.distances(z.flatten(0, -2))]
        return torch.cat(nearest).view(x.shape[:-1])

    @torch.no_grad()
    def decoding_margin(self, norm: Norm = "token_max") -> float:
        """An error in ``norm`` below this changes no symbol: half the least distance of embeddings.

        In entry_max an error per entry is up to √d_embedding longer as a vector.
        """
        table = self.token.weight.double()
        # The second least distance: each symbol is nearest to itself.
        least = min(some.kthvalue(2).values.min().item() for some in self.distances(table))
        return least / 2 / (math.sqrt(table.shape[-1]) if norm == "entry_max" else 1)

    def distances(
        self, z: Float[Tensor, "points d_embedding"]
    ) -> Iterator[Float[Tensor, "some vocab"]]:
        """‖z_i − e_v‖₂ to every symbol, of some points at a time; products would cancel here."""
        table = self.token.weight.double()
        for some in z.split(max(1, MOST_DISTANCES // len(table))):
            yield torch.cdist(some, table, compute_mode="donot_use_mm_for_euclid_dist")


class PreNormBlock(nn.Module):
    """x ↦ x + attention(LN(x)), x ↦ x + feed_forward(LN(x)): the baseline; no fixed-point inverse.

    Dropout acts on each branch's output.
    """

    def __init__(
        self, attention: Branch, feed_forward: Branch, d_model: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention = PreNormBranch(attention, d_model, dropout)
        self.feed_forward = PreNormBranch(feed_forward, d_model, dropout)

    def forward(self, x: Tokens) -> Tokens:
        """Apply both residual branches."""
        return self.compose(x, lambda branch, x: branch.dropout(branch(x)))

    def compose(self, x: Tokens, apply: Callable[[PreNormBranch, Tokens], Tokens]) -> Tokens:
        """The block made of ``apply(branch, input)`` of both branches."""
        x = x + apply(self.attention, x)
        return x + apply(self.feed_forward, x)


class PreNormStack(nn.Module):
    """A chain of pre-norm blocks, bottom first."""

    def __init__(self, blocks: list[PreNormBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpoint_activations = False

    def forward(self, x: Tokens) -> Tokens:
        """Apply the blocks in order; recomputed activations are kept between blocks only."""
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and then every module in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class CharTransformer(nn.Module):
    """tokens → embedding → stack → LayerNorm → dropout → logits.

    With an :class:`InvertibleStack` everything between embedding and LayerNorm can be undone and is
    certified; LayerNorm, dropout and the head are free and outside that part.
    """

    def __init__(
        self,
        embedding: CharEmbedding,
        stack: InvertibleStack | PreNormStack,
        vocab_size: int,
        d_model: int,
        head_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.stack = stack
        self.norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(head_dropout)
        self.head = nn.Linear(d_model, vocab_size)

    @property
    def seq_len(self) -> int:
        """Longest sequence the position embedding knows."""
        return self.embedding.position.shape[0]

    @property
    def is_invertible(self) -> bool:
        """True if the stack can be inverted with a certificate."""
        return isinstance(self.stack, InvertibleStack)

    @overload
    def weights(self, folded: Literal[False] = False) -> StackWeights | None: ...

    @overload
    def weights(self, folded: bool) -> FoldedStackWeights | None: ...

    def weights(self, folded: bool = False) -> Any:
        """The weights of an invertible stack; None for a baseline."""
        return self.stack.weights(folded) if isinstance(self.stack, InvertibleStack) else None

    def forward(
        self,
        tokens: Text,
        weights: FoldedStackWeights | None = None,
        folded: bool = False,
    ) -> Logits:
        """Logits of the next symbol at every position; see :meth:`.InvertibleStack.forward`."""
        x = self.embedding(tokens)
        arguments = (weights, folded) if isinstance(self.stack, InvertibleStack) else ()
        return self.predict(self.stack(x, *arguments))

    def predict(self, z: Tokens) -> Logits:
        """Logits of the next symbols, from the output of the stack."""
        return self.head(self.dropout(self.norm(z)))

    def initialise(self, tokens: Text) -> None:
        """Initialise the ActivationNorms, if there are any, from one batch."""
        if isinstance(self.stack, InvertibleStack):
            self.stack.initialise(self.embedding(tokens))

    def extend(
        self, tokens: Text, past: dict[int, AttentionCache], weights: StackWeights | None = None
    ) -> Logits:
        """Logits for the symbols after those in ``past``, to which the new ones are added.

        Together they are at most ``seq_len``. ``past`` is an empty dict at the beginning of a text,
        then it has one cache per branch: blocks may share a branch, but no cache.
        """
        start = max((cache.length for cache in past.values()), default=0)
        x = self.embedding(tokens, start)
        places = count()

        def next_outputs(layer: Any, u: Tensor, *weights: ResidualWeights) -> Tensor:
            cache = past.setdefault(next(places), AttentionCache(self.seq_len))
            return layer.next_outputs(u, cache, *(w.branch for w in weights))

        return self.predict(self.through_stack(x, next_outputs, weights))

    def through_stack(
        self,
        x: Tokens,
        outputs: Callable[..., Tensor],
        weights: FoldedStackWeights | None = None,
    ) -> Tokens:
        """The stack, where ``outputs(layer, D x + b, weights)`` stands for f of each layer.

        In a baseline ``outputs(branch, x)`` stands for each branch.
        """
        if isinstance(self.stack, InvertibleStack):
            weights = weights or self.stack.weights()
            for name, layer in self.stack.layers():
                w = weights[name]
                if isinstance(layer, InvertibleResidual):
                    x = x + w.unscale_output(outputs(layer, w.scale_input(x), w))
                else:
                    x = layer(x, w)
            return x
        for block in self.stack.blocks:
            assert isinstance(block, PreNormBlock)
            x = block.compose(x, outputs)
        return x

    @torch.no_grad()
    def generate(
        self, prompt: Text, length: int, **options: Any
    ) -> Integer[Tensor, "*batch longer"]:
        """The prompts and their continuations; the options are those of :meth:`stream`."""
        return torch.cat([prompt, *self.stream(prompt, length, **options)], -1)

    @torch.no_grad()
    def stream(
        self,
        prompt: Text,
        length: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Iterator[Integer[Tensor, "*batch 1"]]:
        """Continue a prompt by ``length`` symbols, one after the other; several prompts at once.

        Keys and values of earlier symbols are cached. Positions are absolute: once ``seq_len``
        symbols are in view, the last half of them is encoded anew. There is no dropout, in training
        mode either; the mode is restored afterwards.

        Args:
            prompt: at least one symbol; the last ``seq_len`` count.
            temperature: 0 takes the likeliest symbol; 1 samples the model's distribution.
            top_k: sample among this many likeliest symbols; None among all.
            top_p: sample among the fewest likeliest symbols that have this probability together.

        Raises:
            ValueError: the prompt is empty, or one of the numbers is out of its range.
        """
        if not prompt.shape[-1]:
            raise ValueError("the prompt is empty: it needs at least one symbol")
        if length < 0 or not temperature >= 0:  # nor NaN
            raise ValueError(f"negative: length {length} or temperature {temperature}")
        if (top_k is not None and top_k < 1) or (top_p is not None and not top_p > 0):
            raise ValueError(f"top_k={top_k}, top_p={top_p} keep no symbol; None keeps all")
        text = prompt[..., -self.seq_len :]
        past: dict[int, AttentionCache] = {}
        new, in_view = text, 0
        with evaluating(self):
            weights = self.weights()
            for _ in range(length):
                logits = self.extend(new, past, weights)[..., -1, :]
                in_view += new.shape[-1]
                new = sampled(logits, temperature, generator, top_k, top_p)
                text = torch.cat([text, new], -1)[..., -self.seq_len :]
                yield new
                if in_view == self.seq_len:
                    past, in_view = {}, 0
                    new = text[..., -max(1, self.seq_len // 2) :]


def sampled(
    logits: Float[Tensor, "*batch vocab"],
    temperature: float,
    generator: torch.Generator | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Integer[Tensor, "*batch 1"]:
    """One symbol a row, drawn from softmax(logits / temperature) among the likeliest."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # Differences, over no less than a float can be divided by without NaN.
    behind = (logits - logits.amax(-1, keepdim=True)) / max(temperature, COLDEST)
    if top_k is not None:
        least = behind.topk(min(top_k, behind.shape[-1])).values[..., -1:]
        behind = behind.masked_fill(behind < least, -torch.inf)
    chances = behind.softmax(-1)
    if top_p is not None:
        ordered, order = chances.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        beyond[..., 0] = False  # the likeliest stays, though top_p may be zero in float32
        chances = chances.masked_fill(beyond.scatter(-1, order, beyond), 0)
    rows = chances.flatten(0, -2) if chances.ndim > 1 else chances
    return torch.multinomial(rows, 1, generator=generator).view(*logits.shape[:-1], 1)
