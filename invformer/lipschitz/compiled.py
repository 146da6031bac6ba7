"""Estimates for all branches of a stack by one call of compiled code.

``kernels/cpp/estimate.cpp`` says how. It takes the place of a hundred operations on small tensors.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from invformer.branches.compiled import Fields
from invformer.kernels import native
from invformer.lipschitz.power_iteration import PowerIteration
from invformer.nn.coupling import CouplingBlock
from invformer.nn.residual import (
    FoldedWeights,
    InvertibleBlock,
    InvertibleResidual,
    ResidualWeights,
)
from invformer.nn.stack import FoldedStackWeights
from invformer.nn.transformer import CharEmbedding, CharTransformer, PreNormBlock

BLOCKS = (InvertibleBlock, PreNormBlock, CouplingBlock)
# What a branch consists of, in the order of ``Branch`` in branch.h, which explains it.
TENSORS = (
    *("w", "b", "v", "c", "scale", "shift", "inverse", "log_scale", "norm_scale", "norm_shift"),
    *("biases", "temperatures", "left", "lengths", "estimate", "turn"),
)
NUMBERS = (
    *("w_row", "w_column", "v_row", "v_column", "inner", "outer", "kernel", "activation", "heads"),
    *("bias_stride", "is_tied", "strictly_causal", "at_once", "leaders", "promising", "in_turn"),
    *("reads", "writes"),
)


# Of 16 rows of attention that a step advances 7 had the largest gains, and 7 promise the largest.
PROMISING = 7 / 16


class _Branch(ctypes.Structure):
    """A residual layer, the scaling that follows it, and the vectors of its iteration."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in NUMBERS),
        *((name, ctypes.c_double) for name in ("radius", "epsilon")),
    ]


class _Call(ctypes.Structure):
    """Sizes and options of a call, for all branches."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("sequences", "tokens", "width")),
        *((name, ctypes.c_int64) for name in ("streams", "branches", "steps", "embedded")),
        ("factor", ctypes.c_double),
        ("diagonal", ctypes.c_bool),
        ("entries", ctypes.c_bool),
        ("threads", ctypes.c_int),
    ]


def can_take(
    model: CharTransformer, branches: Sequence[Any], iterations: Sequence[PowerIteration]
) -> bool:
    """True if there is compiled code for this model, its branches and these iterations."""
    embedding: Any = model.embedding
    return (
        type(embedding) is CharEmbedding
        and (type(embedding.token), embedding.token.max_norm) == (nn.Embedding, None)
        and all(type(block) in BLOCKS for block in model.stack.blocks)
        and all(branch.is_compiled for branch in branches)
        and all(
            each.norm != "frobenius"
            and each.left.device.type == "cpu"
            and each.left.dtype in native.FORMATS
            for each in iterations
        )
        and native.is_available()
    )


class CompiledEstimates:
    """The branches of a model as compiled code takes them, and the iterations that follow them.

    Weights lie elsewhere at every step, so their addresses are written before each call. All else
    is found once, and again whenever a tensor has another form than before.

    Args:
        model: for which compiled code :func:`can_take` the place of operations.
        text: the symbols, (sequences, tokens).
        iterations: of the attentions and of the feed-forwards.
    """

    def __init__(
        self,
        model: CharTransformer,
        text: Integer[Tensor, "sequences tokens"],
        iterations: Sequence[PowerIteration],
    ) -> None:
        self.stack, self.iterations = model.stack, iterations
        # A copy: symbols are checked once, before the first call.
        self.embedding, self.text = model.embedding, text.to(torch.int64, copy=True).contiguous()
        self.shape = *text.shape, model.head.in_features  # of what enters the stack
        self.branches: Any = ()
        self.forms: list[Any] = []  # of all tensors when branches were found
        # Owners and names of the parameters among them; which tensor stands in which field.
        self.parameters: list[tuple[nn.Module, str]] = []
        self.places: list[tuple[_Branch, str, int]] = []
        self.followed: list[float] = []  # times, and where the iterations' vectors lie
        self.values = torch.empty(0)

    def advance(
        self,
        weights: FoldedStackWeights | None,
        num_steps: int,
        diagonal: bool,
        threads: int,
        times: float = 1.0,
        factor: float = 1.0,
    ) -> Float[Tensor, "branches"]:
        """The largest gain of every branch after some steps; the iterations go on from there.

        A baseline has no ``weights``. ``diagonal`` means only the diagonal blocks ∂f_i/∂x_i. It
        takes ``threads`` at most. A step advances so many ``times`` the rows that others do. Gains
        are multiplied by a ``factor``.
        """
        used = self.find(weights or weights_of_baseline(self.stack))
        self.follow(times)
        symbols, positions = self.embedding.token.weight, self.embedding.position
        entries = self.iterations[0].norm == "entry_max"
        width = self.iterations[0].left.shape[-1]
        sizes = *self.text.shape, width, self.shape[-1] // width, len(self.branches), num_steps
        threads = min(threads, len(self.branches))
        call = _Call(*sizes, symbols.shape[-1], factor, diagonal, entries, threads)
        at = [ctypes.c_void_p(t.data_ptr()) for t in (self.text, symbols, positions)]
        native.call("advance", symbols.dtype, self.branches, *at, call)
        del used  # not earlier
        for iteration, branch in zip(self.iterations, self.branches, strict=False):
            iteration.turn += num_steps * branch.in_turn
        return self.values.clone()

    def find(self, weights: Any) -> Any:
        """Make the branches known to compiled code; what is returned has to outlive its call."""
        tensors = self.tensors(weights)
        if [*map(form, tensors)] == self.forms:
            at = [t.data_ptr() for t in tensors]
            for branch, name, i in self.places:
                setattr(branch, name, at[i])
            return tensors
        self.followed = []
        require_embedding(self.embedding, self.text, self.shape[-1])
        fields = fields_of_all(self.stack, weights)
        left = self.iterations[0].left
        each = [_Branch(**addressed(branch, self.shape, left)) for branch in fields]
        self.branches = (_Branch * len(each))(*each)
        at = [
            (branch, name, t.data_ptr())
            for branch, own in zip(self.branches, fields, strict=True)
            for name, t in own.items()
            if isinstance(t, Tensor)
        ]
        needed = {address for *_, address in at}
        self.parameters = [
            (module, name)
            for module in self.stack.modules()
            for name, p in module.named_parameters(recurse=False)
            if p.data_ptr() in needed
        ]
        tensors = self.tensors(weights)
        index = {t.data_ptr(): i for i, t in enumerate(tensors)}
        self.forms = []
        if needed <= index.keys():  # no copies, whose addresses would not be found again
            self.places = [(branch, name, index[address]) for branch, name, address in at]
            self.forms = [*map(form, tensors)]
        return tensors, fields

    def follow(self, times: float) -> None:
        """Make rows, vectors and estimates known to compiled code, unless they are."""
        own = [t for each in self.iterations for t in (each.left, each.lengths, each.turn)]
        if [times, *(t.data_ptr() for t in own)] == self.followed:
            return
        parts, text, symbols = len(self.iterations), self.text.shape, self.embedding.token.weight
        width, count = self.iterations[0].left.shape[-1], len(self.branches) // parts
        self.values = symbols.new_empty(len(self.branches))
        estimates = addresses(self.values, self.values.shape, symbols.dtype)
        for first, iteration in enumerate(self.iterations):
            lefts = addresses(iteration.left, (count, *text, width), symbols.dtype)
            lengths = addresses(iteration.lengths, (count, *text), symbols.dtype)
            common = chosen_rows(iteration, self.branches[first].heads > 0, times)
            common["turn"] = native.pointer(iteration.turn, dtype=torch.int64)
            for n, i in enumerate(range(first, len(self.branches), parts)):
                own_of = {"left": lefts[n], "lengths": lengths[n], "estimate": estimates[i]}
                for name, value in (own_of | common).items():
                    setattr(self.branches[i], name, value)
        self.followed = [times, *(t.data_ptr() for t in own)]

    def tensors(self, weights: Any) -> list[Tensor]:
        """Those of the embedding and the weights, and parameters that branches have beside them."""
        parameters = [getattr(module, name) for module, name in self.parameters]
        embedding = self.embedding.token.weight, self.embedding.position
        return [*embedding, *leaves(weights), *parameters]


def form(t: Tensor) -> tuple[Any, ...]:
    """All that compiled code has to know of a tensor but its address."""
    return type(t), t.shape, t.stride(), t.dtype, t.device, t.layout, t.is_neg()


def leaves(weights: Any) -> Iterator[Tensor]:
    """The tensors in mappings and sequences, which are not copied: this runs at every step."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, Mapping):
        yield from leaves(list(weights.values()))
    elif isinstance(weights, tuple | list):
        for each in weights:
            yield from leaves(each)


def addresses(t: Tensor, shape: Sequence[int], dtype: torch.dtype) -> range:
    """Those of the parts of a tensor without gaps."""
    native.pointer(t, *shape, dtype=dtype)
    first, size = t.data_ptr(), t.stride(0) * t.element_size()
    return range(first, first + len(t) * size, size)


def chosen_rows(iteration: PowerIteration, promises: bool, times: float) -> dict[str, Any]:
    """How many rows a step advances: the largest, of attention those that promise most, others."""
    count, tokens = iteration.slots.shape[-1], iteration.left.shape[-2]
    at_once = min(int(times * count), tokens)
    promising = int(PROMISING * at_once) if promises and at_once < tokens else 0
    leaders = promising or iteration.leaders * at_once // count
    in_turn = at_once - leaders - promising if at_once < tokens else 0
    return {"at_once": at_once, "leaders": leaders, "promising": promising, "in_turn": in_turn}


def require_embedding(embedding: CharEmbedding, text: Tensor, channels: int) -> None:
    """Raise ValueError or IndexError unless compiled code can look up the text in it."""
    symbols, positions = embedding.token.weight, embedding.position
    for t in (symbols, positions):
        native.pointer(t, len(t), symbols.shape[-1], dtype=symbols.dtype)
    embedding.require_length(text.shape[-1])
    if symbols.shape[-1] > channels or not 0 <= text.amin() <= text.amax() < len(symbols):
        raise IndexError("compiled estimates: the embedding lacks a symbol or is too wide")


def addressed(branch: Fields, shape: Sequence[int], left: Tensor) -> dict[str, Any]:
    """The same with weights by their addresses; ValueError if the sizes of one do not fit."""
    width, dtype = left.shape[-1], left.dtype
    own: Any = {"heads": 0, "kernel": 1, "reads": 0, "writes": 0, "is_tied": False} | branch
    text, heads, inner, outer = shape[:-1], own["heads"], own["inner"], own["outer"]
    parts = 3 if heads and not own["is_tied"] else 1  # queries, keys and values
    fits = inner == parts * outer and outer % max(1, heads) == 0
    if not fits or max(own["reads"], own["writes"]) + width > shape[-1]:
        raise ValueError(f"compiled estimates: maps to {inner} and from {outer} channels misfit")
    shapes = dict.fromkeys(TENSORS, (width,)) | {
        "w": (own["kernel"] * width, inner), "b": (inner,), "v": (outer, width),
        "temperatures": (heads,),
    }  # fmt: skip
    for name, t in branch.items():
        if not isinstance(t, Tensor):
            continue
        if name == "biases":  # of every head or of all, at more lags perhaps than there are
            rows = heads if own["bias_stride"] else 1
            native.require(t[:rows, : text[-1] - 1], (rows, text[-1] - 1), dtype)
            own[name] = native.pointer(t[:1], 1, t.shape[-1], dtype=dtype)
        elif name in ("w", "v"):  # by their strides
            native.require(t, shapes[name], dtype)
            own[name] = t.data_ptr()
        else:
            own[name] = native.pointer(t, *shapes[name], dtype=dtype)
    return own


def fields_of_all(stack: Any, weights: Any) -> list[Fields]:
    """What is known of every branch."""
    if isinstance(weights, list):
        return of_baseline(stack, weights)
    return of_invertible(stack, weights)


def of_invertible(stack: Any, weights: FoldedStackWeights) -> list[Fields]:
    """Every residual layer, with the ActivationNorm that follows it."""
    found: list[Fields] = []
    for name, layer in stack.layers():
        if isinstance(layer, InvertibleResidual):
            found.append(fields_of(layer, weights[name]))
        else:
            norm = weights[name]
            found[-1] |= {"norm_scale": norm.scale, "norm_shift": norm.shift}
    return found


def fields_of(layer: InvertibleResidual, weights: ResidualWeights | FoldedWeights) -> Fields:
    """What is known of the branch, and the scalings of the layer."""
    own = layer.branch.compiled_fields(weights[0]) | {"radius": layer.input_radius or 0.0}
    if isinstance(weights, FoldedWeights):
        assert layer.scaling is not None
        own |= {"shift": weights.centre, "log_scale": layer.scaling.log_scale}
    elif weights.scaling is not None:
        scaling = weights.scaling
        own |= {"scale": scaling.scale, "inverse": scaling.inverse, "shift": scaling.shift}
    return own


def weights_of_baseline(stack: Any) -> list[Any]:
    """Those of the attentions."""
    attentions = [block.attention.inner for block in stack.blocks]
    return attentions[0].weights_of(attentions)


def of_baseline(stack: Any, weights: list[Any]) -> list[Fields]:
    """Both branches of every block; the attention of a coupling adds to the first stream."""
    found: list[Fields] = []
    for block, of_attention in zip(stack.blocks, weights, strict=True):
        found.append(block.attention.compiled_fields(of_attention))
        found.append(block.feed_forward.compiled_fields(None))
        if isinstance(block, CouplingBlock):
            width = len(block.attention.norm.weight)
            found[-2] |= {"reads": width}
            found[-1] |= {"writes": width}
    return found
