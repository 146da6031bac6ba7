"""What the commands that use a trained model, or show many, are asked to do."""

import os
import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from invformer.config.schema import (
    MANY,
    MANY_CHARACTERS,
    SEED,
    SIZE,
    CorpusName,
    ScoredSplit,
    Unknown,
)
from invformer.config.section import ANY_TEXT, Root, Section, option

DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
DEVICES = "auto, cpu, cuda or cuda:INDEX"
CHECKPOINT = "run folder, a checkpoint in it, an exported folder, or USER/NAME on the Hub"


def is_hub_name(path: str) -> bool:
    """Whether a path names a model on the Hub: it is USER/NAME, and no folder USER is here."""
    folder = os.path.dirname(path)
    is_local = folder == "checkpoints" or os.path.exists(folder)
    return HUB_NAME.fullmatch(path) is not None and not is_local


@dataclass(kw_only=True)
class EvaluateDataConfig(Section, key="data"):
    """The text to score; null keeps what the checkpoint was trained with."""

    name: CorpusName | None = option(None, "another corpus, in the checkpoint's vocabulary")
    path: str | None = option(None, "file or folder with the corpus")
    unknown: Unknown | None = option(None, "an unknown character: one symbol, or an error")
    split: ScoredSplit | None = option(None, "to score; null is the checkpoint's data.split")
    max_characters: int | None = option(None, "read no more characters than this", MANY_CHARACTERS)
    max_val_characters: int | None = option(
        None, "score the beginning of the validation split, this long", MANY_CHARACTERS
    )


@dataclass(kw_only=True)
class MeasureConfig(Section, key="evaluate"):
    """What is measured."""

    stride: int | None = option(None, "characters between windows; null is seq_len", SIZE)
    batch_size: int = option(64, "windows per batch", SIZE)
    lipschitz_sequences: int = option(2, "sequences for local Lipschitz estimates", "[0, 1e6]")
    lipschitz_steps: int = option(30, "power iteration steps per estimate", SIZE)
    inversion_sequences: int = option(4, "sequences that are inverted and proven", "[0, 1e6]")
    proof_limit: int = option(
        150_000, "characters times symbols that the proof tries; later ones stay unproven", MANY
    )
    inversion_dtype: Literal["float32", "float64"] = option("float64", "arithmetic of the inverse")
    device: str = option("auto", DEVICES, pattern=DEVICE)


@dataclass(kw_only=True)
class EvaluateConfig(Root):
    """Score, certify and invert a trained model."""

    program: ClassVar[str] = "evaluate.py"
    groups: ClassVar[tuple[str, ...]] = ("data",)
    checkpoint: list[str] = field(
        metadata={"help": f"{CHECKPOINT}; given again, they are compared", "again": True}
    )
    verbose: bool = option(False, "print the branches in every norm that is measured")
    data: EvaluateDataConfig = field(default_factory=EvaluateDataConfig)
    evaluate: MeasureConfig = field(default_factory=MeasureConfig)


@dataclass(kw_only=True)
class SampleConfig(Root):
    """Continue a text with a trained model."""

    program: ClassVar[str] = "sample.py"
    checkpoint: str = field(metadata={"help": CHECKPOINT})
    prompt: str | None = option(
        None,
        "text to continue; without one the terminal or a pipe is read, - is stdin",
        pattern=ANY_TEXT,
    )
    length: int = option(200, "characters to add", SIZE)
    temperature: float = option(1.0, "0 takes the likeliest character", "[0, 100]")
    top_k: int | None = option(None, "sample among this many likeliest characters", SIZE)
    top_p: float | None = option(None, "sample among the likeliest of this mass", "(0, 1]")
    num_samples: int = option(1, "texts for each prompt", SIZE)
    seed: int = option(0, "of the sampling", SEED)
    device: str = option("auto", DEVICES, pattern=DEVICE)


@dataclass(kw_only=True)
class InvertConfig(Root):
    """Recover a text from the states at the top of the network, and prove it by character."""

    program: ClassVar[str] = "invert.py"
    checkpoint: str = field(metadata={"help": CHECKPOINT})
    text: str | None = option(
        None,
        "text to recover; without one, or for -, file, states or stdin is read",
        pattern=ANY_TEXT,
    )
    file: str | None = option(None, "file with the text, UTF-8; - is stdin")
    states: str | None = option(None, "safetensors file with states (tokens, width) to invert")
    save_states: str | None = option(None, "safetensors file to write the perturbed states to")
    noise: float = option(0.0, "moves states by so many times their length", "[0, 1e6]")
    bits: int | None = option(None, "round states to 2^bits levels", "[1, 32]")
    seed: int = option(0, "of the noise", SEED)
    prove: bool = option(True, "prove characters, and search for others where states are damaged")
    device: str = option("auto", DEVICES, pattern=DEVICE)

    def check(self) -> None:
        """There is one source of the text."""
        given = [name for name in ("text", "file", "states") if getattr(self, name) is not None]
        for name in given[1:]:
            self.refuse(name, "give one of text, file and states")


@dataclass(kw_only=True)
class ExportConfig(Root):
    """Write a trained model to a folder that can be shared and loaded elsewhere."""

    program: ClassVar[str] = "export.py"
    checkpoint: str = field(metadata={"help": CHECKPOINT})
    out: str = field(metadata={"help": "new folder"})
    bits: int | None = option(None, "round the entries of matrices to so many bits", "[2, 8]")
    hub: str | None = option(
        None, "USER/NAME on the Hugging Face Hub to upload it to", pattern=HUB_NAME
    )


@dataclass(kw_only=True)
class WorkspaceConfig(Root):
    """Save a view of a W&B project: overview, constants of every block, inversion, samples."""

    program: ClassVar[str] = "workspace"
    project: str | None = option(None, "W&B project; null is W&B's own, or invformer")
    entity: str | None = option(None, "W&B user or team; null is your default")
    name: str = option("invformer", "of the view")
    num_layers: int = option(4, "blocks of the models", "[1, 1e4]")
