"""A trained model as its users meet it: generate, encode, invert, and the certificate.

>>> model = invformer.load("checkpoints/first")
>>> model.generate("The ", length=200, top_k=20)
>>> z = model.encode("some text")          # states at the top of the stack, (tokens, width)
>>> model.invert(z).text
'some text'
"""

import copy
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.config.schema import TrainConfig
from invformer.data.vocabulary import Vocabulary
from invformer.errors import ConfigurationError, DataError
from invformer.evaluation.result import Evaluation
from invformer.nn.certificate import Certificate
from invformer.nn.coupling import CouplingStack
from invformer.nn.proof import certify, certify_trained
from invformer.nn.stack import InvertibleStack, StackWeights
from invformer.nn.transformer import CharTransformer
from invformer.numerics.precision import FORWARD_DTYPE
from invformer.numerics.threads import threads
from invformer.proofs.prefix_margins import (
    MarginEvidence,
    Networks,
    as_double,
    prefix_margins,
)
from invformer.runs.checkpoint import WEIGHT_BITS, Checkpoint
from invformer.runs.machine import pick_device
from invformer.trained.export import quantised, shared, write_export
from invformer.trained.opening import configuration_of, find_checkpoint, restored, vocabulary_of
from invformer.trained.states import LEAST_ROUNDING

log = logging.getLogger(__name__)
# Where rounding is measured, and how much more than that is assumed.
RANDOM_TEXTS, SEVERAL = 8, 8


@dataclass(frozen=True)
class RecoveredText:
    """A text that was recovered from states at the top of the stack.

    Attributes:
        text: the recovered characters; U+FFFD for the unknown symbol and for broken UTF-8.
        symbols: the recovered symbols: the text, or a character chr(b) for every byte b of it.
        proven: per symbol, whether :func:`.prefix_margins` proves it: the states of this text
            are nearer to the given ones than half the distance of any other text's states; or no
            other text has states within the bounds that were given.
        error_bound: bound on the distance of the recovered embeddings from the exact preimage of
            the states, by the rounding model of docs/numerics.md; inf if none is known.
        num_steps: largest number of solver steps in any layer; 0 without a solver.
        residual: largest distance of the recovered embeddings from those of the text; NaN if the
            text was found by trying symbols alone.
        radius: if positive, any other symbols have a state farther than this from the given one.
        tried: how many symbols, from the first on, the proof has looked at.
        unproven: why nothing is proven, if the rounding of this model is not bounded.
    """

    text: str
    symbols: str
    proven: tuple[bool, ...]
    error_bound: float
    num_steps: int
    residual: float
    radius: float
    tried: int
    unproven: str | None

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= 40 else f"{self.text[:37]}..."
        share = f"{sum(self.proven)} of {len(self.proven)} characters proven"
        return f"RecoveredText({shown!r}, {share}, {self.num_steps} steps)"


@dataclass(eq=False, repr=False)
class TrainedModel:
    """A trained character model with its vocabulary.

    Attributes:
        network: the PyTorch module, in eval mode.
        vocabulary: the characters behind its tokens.
        config: the configuration of its training.
        metadata: step, command, commit and source of the text, if known.
    """

    network: CharTransformer
    vocabulary: Vocabulary
    config: TrainConfig
    metadata: dict[str, Any]
    _made: tuple[Any, Any] = field(default_factory=lambda: ({}, {}), init=False)  # see _kept

    def __repr__(self) -> str:
        parameters = sum(p.numel() for p in self.network.parameters())
        return (
            f"TrainedModel({self.config.model.name}, {parameters:,} parameters, "
            f"{self.vocabulary.size} symbols, step {self.metadata.get('step')})"
        )

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.network.head.weight.device

    @property
    def evaluation(self) -> Evaluation | None:
        """The latest evaluation of these weights on the run's own text, if there is one."""
        return self._kept("evaluation", lambda: None)

    @property
    def certificate(self) -> Certificate | None:
        """Proven bounds for the weights as cast for the forward pass; None for a baseline."""
        dtype = FORWARD_DTYPE[self.config.trainer.precision]
        return self._kept("certificate", lambda: certify_trained(self.network, dtype, "the model"))

    def generate(self, prompt: str, length: int = 200, **options: Any) -> str:
        """The prompt, continued; the options are those of :meth:`stream`."""
        return prompt + "".join(self.stream(prompt, length, **options))

    def stream(
        self,
        prompt: str,
        length: int = 200,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Iterator[str]:
        """The characters that continue a prompt, one after the other.

        The options are those of :meth:`.CharTransformer.stream`; ``seed`` is of the sampling.
        """
        tokens = self._tokens(prompt)
        generator = torch.Generator(device=self.device).manual_seed(seed)
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        stream = self.network.stream(tokens, length, generator=generator, **options)
        yield from self.vocabulary.text_of(self.vocabulary.decode(t.cpu()) for t in stream)

    @torch.no_grad()
    def encode(self, text: str) -> Float[Tensor, "tokens width"]:
        """The states at the top of the stack; a long text is read in windows of ``seq_len``."""
        windows = self._tokens(text).split(self.network.seq_len)
        network = self.network
        return torch.cat([network.stack(network.embedding(window)) for window in windows])

    @torch.no_grad()
    def invert(
        self,
        z: Float[Tensor, "tokens width"],
        entries_within: Float[Tensor, "..."] | float | None = None,
        states_within: Float[Tensor, "..."] | float | None = None,
        *,
        prove: bool = True,
        watch: Callable[[int, RecoveredText], object] = lambda start, found: None,
    ) -> RecoveredText:
        """The text behind states at the top of the stack, in float64.

        First every window is inverted, which gives the nearest symbols; then it is proven. If the
        states were damaged, other symbols may fit them better. They are found by trying all, which
        takes up to ten times as long. The text of a baseline without an inverse is found in the
        same way.

        Args:
            z: the states.
            entries_within: how far their entries may be off, such as half the step of a rounding;
                inf where they are lost. More is then proven. A number, or of a shape that can be
                expanded to that of z.
            states_within: how far each state may be off, ‖·‖₂, a number or (tokens,).
            prove: False leaves out proof and search.
            watch: gets the first position of a window and what is known of it, whenever more is.
                What it raises ends the inversion; :func:`joined` makes one text of windows.
        """
        width = self.network.head.in_features
        z = torch.as_tensor(z, dtype=torch.float64, device=self.device)  # NumPy's, too
        if z.ndim != 2 or z.shape[-1] != width or not len(z):
            raise DataError(f"states have the shape {tuple(z.shape)}, not (tokens, {width})")
        network, certificate = self._exact
        has_inverse = isinstance(network.stack, InvertibleStack | CouplingStack)
        if not (prove or has_inverse):
            raise ConfigurationError(
                "prove: without an inverse the text is found by trying symbols"
            )
        weights = network.weights()
        known: dict[str, Any] = {}
        if entries_within is not None:
            known["entries_within"] = as_double(entries_within, z)
        if states_within is not None:
            known["states_within"] = as_double(states_within, z[:, 0])
        preimages: dict[int, tuple[Tensor, float, int]] = {}
        nearest: dict[int, Tensor] = {}
        found: dict[int, RecoveredText] = {}

        def tell(start: int, evidence: MarginEvidence | None = None) -> None:
            """Record what is known of a window."""
            (preimage, bound, num_steps), tokens = preimages[start], nearest[start]
            proven, tried, radius = [], 0, 0.0
            if evidence is not None:
                tried = evidence.tokens.shape[-1]
                tokens = torch.cat([evidence.tokens.view(1, -1), tokens[:, tried:]], -1)
                proven, radius = evidence.proven.flatten().tolist(), evidence.radius.min().item()
            found[start] = RecoveredText(
                text=self.vocabulary.text(tokens[0].cpu()),
                symbols=self.vocabulary.decode(tokens[0].cpu()),
                proven=(*proven, *[False] * (tokens.shape[-1] - tried)),
                error_bound=bound,
                num_steps=num_steps,
                residual=(preimage - network.embedding(tokens)).norm(dim=-1).max().item(),
                radius=radius,
                tried=tried,
                unproven=evidence and evidence.unproven,
            )
            watch(start, found[start])

        windows = {
            start: z[None, start:][:, : network.seq_len]
            for start in range(0, len(z), network.seq_len)
        }
        undone = partial(preimage_of, network=network, weights=weights, certificate=certificate)
        with threads() as each:
            for start, preimage in zip(windows, each(undone, windows.values()), strict=True):
                preimages[start] = preimage
                nearest[start] = network.embedding.nearest_tokens(preimage[0])
                if has_inverse:
                    tell(start)
        networks = Networks(network, network.seq_len)
        for start, window in windows.items() if prove else ():
            rows = slice(start, start + network.seq_len)
            of_rows = {name: bound[rows] for name, bound in known.items()}
            given = networks, nearest[start], window
            evidence = prefix_margins(*given, fit=True, watch=partial(tell, start), **of_rows)
            if evidence.unproven:
                tell(start, evidence)
        return joined(self.vocabulary, found.values())

    @torch.no_grad()
    def assumed_rounding(self, z: Float[Tensor, "tokens width"], text: str | None = None) -> float:
        """How far a forward pass is assumed to round an entry of any text's states, not proven.

        2⁻¹⁶ of the largest entry of z, or eight times the most that is measured on random texts and
        on this one, against float64.
        """
        network, exact = self.network, self._exact[0]
        shape, generator = (RANDOM_TEXTS, network.seq_len), torch.Generator().manual_seed(0)
        drawn = torch.randint(self.vocabulary.size, shape, generator=generator).to(self.device)
        texts = [*drawn]
        if text:
            tokens = self.vocabulary.encode(self.vocabulary.symbols_of(text)).long()
            texts += tokens.to(self.device).split(network.seq_len)
        pairs = (
            (network.stack(network.embedding(t)), exact.stack(exact.embedding(t))) for t in texts
        )
        measured = max(
            torch.dist(rounded.double(), right, p=math.inf).item() for rounded, right in pairs
        )
        return max(LEAST_ROUNDING * z.abs().amax().item(), SEVERAL * measured)

    def export(
        self, folder: str | os.PathLike[str], name: str | None = None, bits: int | None = None
    ) -> None:
        """Write the model to a new or empty folder that :func:`load` opens, with a model card.

        What a killed export has left is overwritten.

        Args:
            folder: to write.
            name: what the card says that the model is called; None for the folder's name.
            bits: to which the entries of matrices are rounded, 2 to 8; None rounds nothing. The
                certificate is proven for the rounded matrices.

        Raises:
            ConfigurationError: there is no rounding to so many bits.
            StorageError: the folder holds something, or cannot be written.
        """
        metadata, model, matrices = shared(self.metadata, self.config), self, {}
        if bits is not None:
            network, matrices = quantised(self.network, bits)
            model = replace(self, network=network)
            metadata[WEIGHT_BITS] = bits
        target = Path(os.path.expanduser(folder))
        known = model.network, metadata, model.certificate, model.evaluation
        write_export(target, *known, name, matrices)

    @property
    def _exact(self) -> tuple[CharTransformer, Certificate | None]:
        """The network in float64, and its certificate there."""

        def made() -> tuple[CharTransformer, Certificate | None]:
            network = copy.deepcopy(self.network).double()
            return network, certify(network) if network.is_invertible else None

        return self._kept("exact", made)

    def _kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made of these weights before; made anew if they have changed since."""
        weights, (before, made) = self.network.state_dict(), self._made
        same = weights.keys() == before.keys() and all(
            (w.device, w.dtype) == (b.device, b.dtype) and torch.equal(w, b)
            for w, b in zip(weights.values(), before.values(), strict=True)
        )
        if not same:
            made = {}
            self._made = {key: weight.clone() for key, weight in weights.items()}, made
        if name not in made:
            made[name] = make()
        return made[name]

    def _tokens(self, text: str) -> Tensor:
        if not text:
            raise ConfigurationError("the text is empty; give at least one character")
        tokens = self.vocabulary.encode(self.vocabulary.symbols_of(text)).long()
        if unknown := len(tokens) - int(tokens.count_nonzero()):
            log.warning(
                "%d of %d characters are not in the vocabulary and count as the unknown symbol",
                unknown, len(tokens),
            )  # fmt: skip
        return tokens.to(self.device)


def joined(vocabulary: Vocabulary, windows: Iterable[RecoveredText]) -> RecoveredText:
    """One text of those of windows, which follow each other."""
    parts = [*windows]
    symbols, tried = "".join(p.symbols for p in parts), sum(p.tried for p in parts)
    return RecoveredText(
        text="".join(vocabulary.text_of(symbols)),
        symbols=symbols,
        proven=tuple(chain.from_iterable(p.proven for p in parts)),
        error_bound=max(p.error_bound for p in parts),
        num_steps=max(p.num_steps for p in parts),
        residual=max(p.residual for p in parts),
        radius=min(p.radius for p in parts) if tried == len(symbols) else 0.0,
        tried=tried,
        unproven=next((p.unproven for p in parts if p.unproven), None),
    )


def preimage_of(
    z: Float[Tensor, "*batch tokens width"],
    network: CharTransformer,
    weights: StackWeights | None,
    certificate: Certificate | None,
) -> tuple[Tensor, float, int]:
    """What a stack maps to z, a bound on its error, and the most solver steps of a layer.

    For a baseline without an inverse the first is NaN.
    """
    stack = network.stack
    if isinstance(stack, InvertibleStack):
        found = stack.inverse(z, weights, certificate, throw=False)
        steps = max(int(layer.num_steps.max()) for layer in found.layers.values())
        return found.value, found.error_bound.max().item(), steps
    value = stack.inverse(z) if isinstance(stack, CouplingStack) else z * math.nan
    return value, math.inf, 0


def load(source: str | os.PathLike[str], device: str = "auto") -> TrainedModel:
    """A trained model from a run folder, one checkpoint in it, an exported folder, or the Hub.

    Args:
        source: the folder, or USER/NAME on the Hugging Face Hub.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:INDEX``.

    Raises:
        CheckpointError: there is no model, or a damaged one.
        CertificateViolation: an exported model does not have the certificate beside it.
    """
    return opened(find_checkpoint(source), device)


def opened(checkpoint: Checkpoint, device: str = "auto") -> TrainedModel:
    """The model of a checkpoint, with its latest evaluation, as of :func:`load`."""
    network = restored(checkpoint).to(pick_device(device, "device"))
    evaluation = None
    # There may be none that can be read, or one of a model that was in the folder before.
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        content = checkpoint.evaluation.read_text(encoding="utf-8")
        found = Evaluation.from_json(json.loads(content))
        same = ("step", "command", "commit", WEIGHT_BITS)
        if all(getattr(found, key) == checkpoint.metadata.get(key) for key in same):
            evaluation = found
    config, vocabulary = configuration_of(checkpoint), vocabulary_of(checkpoint)
    model = TrainedModel(network, vocabulary, config, checkpoint.metadata)
    model._kept("evaluation", lambda: evaluation)
    return model
