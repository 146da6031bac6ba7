"""What an evaluation found, and its file ``evaluation.json``."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin

from invformer.evaluation.inversion import Inversion
from invformer.evaluation.lipschitz import BranchConstants
from invformer.evaluation.ngram import NgramScore
from invformer.nn.certificate import Certificate


@dataclass(frozen=True)
class EvaluatedModel:
    """Which kind of model was evaluated."""

    name: str
    parameters: int


@dataclass(frozen=True)
class Context:
    """From what each character was predicted."""

    seq_len: int
    stride: int  # characters from one window to the next
    first_character: str = "uniform over the vocabulary"
    protocol: str = "every character of the split once; windows do not see what precedes them"


@dataclass(frozen=True)
class EvaluatedText:
    """The text that was scored."""

    name: str
    split: str
    source: str  # in words
    sha256: str
    same_as_training: bool
    split_characters: int  # of which at most ``num_characters`` were scored
    unknown_rate: float  # share of the characters that are the unknown symbol


@dataclass(frozen=True)
class SampledText:
    """The first characters of the split, and how the model continues them."""

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What ``evaluate.py`` found; None for what is not known or was not measured."""

    checkpoint: str
    step: int  # optimiser steps of the training
    command: str | None  # that trained it
    wandb: dict[str, Any] | None  # its run there, if that was online
    commit: str | None
    weight_bits: int | None  # of an exported model whose matrices were rounded
    evaluated_with: str
    model: EvaluatedModel
    bpc: float  # bits per character
    nats: float  # per character
    num_characters: int  # scored
    precision: str  # of the forward passes, as in training
    context: Context
    data: EvaluatedText
    ngram: NgramScore | None
    certificate: Certificate | None
    local_lipschitz: dict[str, dict[str, BranchConstants]] = field(default_factory=dict)  # by norm
    inversion: Inversion | None = None
    sample: SampledText

    def to_json(self) -> dict[str, Any]:
        """Plain values; :func:`.write_json` makes numbers that are not finite None."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Evaluation":
        """The evaluation that a file holds: NaN where a number is null, what is new is ignored.

        Raises:
            LookupError, TypeError, AttributeError: it is the file of something else.
        """
        return from_plain(cls, values)


def from_plain(kind: Any, value: Any) -> Any:
    """A value of a type from what JSON kept of it."""
    of = get_args(kind)
    if value is None:
        return math.nan if kind is float else None
    if get_origin(kind) is UnionType:  # with None
        return from_plain(of[0], value)
    if get_origin(kind) is dict:
        return {key: from_plain(of[1], item) for key, item in value.items()}
    if get_origin(kind) is list:
        return [from_plain(of[0], item) for item in value]
    if not is_dataclass(kind):
        return value
    given = [f for f in fields(kind) if f.name in value or f.default is MISSING]
    return kind(**{f.name: from_plain(f.type, value[f.name]) for f in given})  # type: ignore[operator]
