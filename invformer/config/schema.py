"""What a run is made of: every choice with its default, range and meaning. Knows no library.

Integers have a ceiling too, so that ``10**20`` steps are refused before anything is allocated.
"""

import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from invformer.config.section import Root, Section, option, shown

MANY = "[1, 1e9]"
MANY_CHARACTERS = "[1, 1e12]"
SIZE = "[1, 1e6]"
SEED = "[0, 4294967295]"
RUN_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.)){0,99}")
TIME = re.compile(r"(\d\d:)?\d\d:[0-5]\d:[0-5]\d")
# What W&B refuses, but only after the run has started.
PROJECT, TAG = re.compile(r"[^/\\#?%:]{1,128}"), re.compile(r".{1,64}", re.DOTALL)

CertificateName = Literal["token_max", "kim_entry_max", "kim_frobenius", "causal"]
# What can be proven of every attention, nothing of a baseline; assemble/model.py builds them all.
ATTENTIONS: dict[str, tuple[CertificateName, ...]] = {
    "dot_product": (),
    "l2": (),
    "reversible": (),
    "contractive_l2": ("token_max", "kim_entry_max", "kim_frobenius", "causal"),
    "contractive_bounded": ("token_max", "causal"),
}
if TYPE_CHECKING:
    AttentionName = str
else:
    AttentionName = Literal[tuple(ATTENTIONS)]

CorpusName = Literal[
    "python_docs", "python_stdlib", "text_file",
    "tiny_shakespeare", "ptb", "text8", "enwik8", "wikitext2",
]  # fmt: skip
LoggerName = Literal["wandb", "csv", "tensorboard", "none"]
AlarmMode = Literal["off", "warn", "stop"]
Kernel = Literal["auto", "math", "native", "sdpa", "triton"]
Unknown = Literal["symbol", "refuse"]
Split = Literal["val", "test", "train"]
ScoredSplit = Literal["val", "test", "train", "all"]
WITH_MODEL = ("data.seq_len", "data.vocabulary")
CONTRACTIVE_ONLY = (
    "lipschitz_target", "diagonal_scaling", "written_channels", "activation_norm", "input_radius",
    "d_embedding", "initial_sharpness", "initial_output",
)  # fmt: skip


@dataclass(kw_only=True)
class ModelConfig(Section, key="model"):
    """The network."""

    name: AttentionName = option("contractive_l2", "attention; contractive_* can be inverted")
    certificate: CertificateName | None = option("token_max", "theorem; null for the baselines")
    d_model: int = option(128, "width of the residual stream or streams", "[1, 1e5]")
    num_heads: int = option(8, "attention heads, a divisor of d_model", "[1, 1e4]")
    d_head: int | None = option(None, "channels of a head; null is d_model // num_heads", SIZE)
    num_layers: int = option(4, "blocks, each of attention and feed-forward", "[1, 1e4]")
    d_ff: int | None = option(None, "hidden channels of the feed-forward; null is 4 d_model", SIZE)
    strictly_causal: bool = option(False, "a token attends to earlier tokens, not to itself")
    feed_forward_kernel: int = option(1, "tokens that a hidden unit sees, its own last", "[1, 1e3]")
    lipschitz_target: float = option(
        0.5, "c, the largest constant of a branch (causal: of its diagonal blocks)", "[1e-6, 1)"
    )
    position_bias: bool = option(True, "add a learned relative position bias to the logits")
    attention_kernel: Kernel = option("auto", "native and triton need memory linear in seq_len")
    activation: Literal["silu", "gelu", "relu", "tanh"] = option("silu", "of the feed-forward")
    diagonal_scaling: bool = option(
        True, "branches contract in a norm with learned channel weights"
    )
    written_channels: int | None = option(None, "with large outputs; null is d_model // 4", SIZE)
    activation_norm: bool = option(False, "invertible ActNorm after each branch")
    input_radius: float | None = option(
        None, "map inputs of branches into a ball of this radius times sqrt(d_model)", "[1e-3, 1e6]"
    )
    d_embedding: int | None = option(None, "channels it writes; null is d_model // 3", SIZE)
    initial_sharpness: float = option(8.0, "bend of feed-forward units at first", "[1e-6, 1e6]")
    initial_output: float = option(0.1, "entries of a branch's output at first", "[1e-6, 1e6]")
    dropout: float = option(0.0, "probability on a branch's output in training", "[0, 1)")
    head_dropout: float = option(0.0, "probability on the head's input, after the stack", "[0, 1)")

    def check(self) -> None:
        """Widths fit each other; a contractive model has a certificate that covers its options."""
        name, bound, proven = self.name, self.certificate, ATTENTIONS[self.name]
        if self.d_model % self.num_heads:
            self.refuse("num_heads", f"{self.num_heads} heads do not divide d_model={self.d_model}")
        for key in ("d_embedding", "written_channels"):
            if (channels := getattr(self, key) or 0) > self.d_model:
                self.refuse(key, f"{channels} is more than d_model={self.d_model}")
        if name != "contractive_bounded" and self.d_head:
            self.refuse("d_head", f"{name} has heads of d_model // num_heads channels")
        if name != "contractive_bounded" and self.strictly_causal:
            self.refuse("strictly_causal", f"tokens of {name} see themselves")
        if not proven and bound:
            advice = f"pick model={name}, or set model.certificate=null"
            self.refuse("certificate", f"{name} has none: {advice}")
        if not proven:
            return
        if bound is None:
            self.refuse("certificate", f"{name} needs one, such as token_max")
        if bound not in proven:
            advice = f"pick {' or '.join(proven)}"
            self.refuse("certificate", f"{bound} is no theorem about {name}: {advice}")
        if self.feed_forward_kernel > 1 and bound != "causal":
            why = f"{self.feed_forward_kernel} tokens need model.certificate=causal"
            self.refuse("feed_forward_kernel", why)
        if self.input_radius is not None and bound == "kim_entry_max":
            self.refuse("input_radius", "kim_entry_max proves nothing about it")
        if self.activation_norm and self.diagonal_scaling:
            why = "needs model.diagonal_scaling=false, which takes its place"
            self.refuse("activation_norm", why)
        if self.written_channels and not self.diagonal_scaling:
            self.refuse("written_channels", "needs model.diagonal_scaling=true")

    @property
    def is_contractive(self) -> bool:
        """Whether the stack is invertible and certified."""
        return bool(ATTENTIONS[self.name])

    @property
    def head_width(self) -> int:
        """``d_head``, or an equal share of ``d_model``."""
        return self.d_head or self.d_model // self.num_heads

    @property
    def feed_forward_width(self) -> int:
        """``d_ff``, or 4 ``d_model``."""
        return self.d_ff or 4 * self.d_model

    @property
    def embedding_width(self) -> int:
        """Channels that the embedding writes: all of them in a baseline."""
        third = max(1, self.d_model // 3)
        return (self.d_embedding or third) if self.is_contractive else self.d_model


class SavedPath(str):
    """A path that nobody typed: it stood in a checkpoint."""


@dataclass(kw_only=True)
class DataConfig(Section, key="data"):
    """The text."""

    name: CorpusName = option("python_docs", "corpus; the first three need no network")
    path: str | None = option(None, "file or folder with the corpus; needed by text_file")
    seq_len: int = option(128, "context, characters", SIZE)
    batch_size: int = option(8, "windows per batch, all devices together", SIZE)
    val_fraction: float = option(0.05, "share for validation, without own splits", "(0, 1)")
    test_fraction: float = option(0.05, "share for the test, without own splits", "[0, 1)")
    vocabulary: Literal["characters", "bytes"] = option(
        "characters", "symbols: characters of the training text, or its UTF-8 bytes"
    )
    unknown: Unknown = option("symbol", "a new character in val or test: one symbol, or an error")
    split: Split = option("val", "split that evaluate.py scores")
    max_characters: int | None = option(None, "read no more characters than this", MANY_CHARACTERS)
    max_val_characters: int | None = option(
        None, "validate on the beginning of the split, this long", MANY_CHARACTERS
    )

    def check(self) -> None:
        """Something is left to train on, and a local corpus says where it is."""
        if 1 - self.val_fraction - self.test_fraction <= 0:
            total = f"{self.val_fraction} + test_fraction {self.test_fraction}"
            self.refuse("val_fraction", f"{total} leaves no text for training")
        if self.name == "text_file" and self.path is None:
            self.refuse("path", "text_file needs one: data.path=FILE or data.path=FOLDER")


@dataclass(kw_only=True)
class OptimConfig(Section, key="optim"):
    """The optimiser and its schedule: linear warm-up, then cosine."""

    name: Literal["adamw", "muon"] = option("muon", "muon: Muon for matrices, AdamW for others")
    lr: float = option(5e-3, "peak learning rate of AdamW", "(0, 10]")
    muon_lr: float = option(2e-2, "peak learning rate of Muon", "(0, 10]")
    betas: list[float] = option([0.9, 0.99], "AdamW's two decay rates", "[0, 1)")
    weight_decay: float = option(0.1, "decoupled decay of the stack's matrices", "[0, 100]")
    warmup_steps: int | None = option(
        None, "linear warm-up, steps; null is min(100, max_steps // 10 + 1)", "[0, 1e9]"
    )
    min_lr_fraction: float = option(0.0, "final over peak learning rate", "[0, 1]")
    grad_clip: float | None = option(1.0, "largest gradient norm; null is no limit", "(0, 1e9]")
    ema_decay: float | None = option(None, "validate a moving average of weights", "(0, 1)")

    def check(self) -> None:
        """AdamW has two decay rates."""
        if len(self.betas) != 2:
            self.refuse("betas", f"{shown(self.betas)} is not two numbers")


@dataclass(kw_only=True)
class TrainerConfig(Section, key="trainer"):
    """How long, on what, and in which precision."""

    max_steps: int = option(2500, "optimiser steps", MANY)
    max_time: str | None = option(
        None, "[DD:]HH:MM:SS after which a run ends; the same command continues it", pattern=TIME
    )
    patience: int | None = option(
        None, "end after this many validations without a better one; null never does", MANY
    )
    val_every: int = option(500, "optimiser steps between validations", MANY)
    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = option("auto", "device; a Mac has the cpu")
    devices: int = option(1, "devices to train on", "[1, 1e4]")
    precision: Literal["32-true", "bf16-mixed", "64-true"] = option("32-true", "arithmetic")
    compile: bool = option(False, "torch.compile each block")
    cuda_graph: bool = option(True, "on one GPU, replay each step as CUDA graphs")
    accumulate: int = option(1, "batches per optimiser step", SIZE)
    checkpoint_activations: bool = option(False, "save memory: compute blocks again in backward")
    rank_timeout: float = option(300.0, "seconds to wait for a process that hangs", SIZE)
    num_threads: int | None = option(None, "CPU threads; null is PyTorch's choice", "[1, 1024]")
    deterministic: bool = option(True, "only algorithms that repeat bit for bit")
    sample_length: int = option(200, "characters generated at each validation", "[0, 1e6]")
    eval_batch_size: int = option(64, "windows per validation batch", SIZE)
    progress: bool = option(True, "a bar on a terminal; false prints lines")

    @property
    def max_seconds(self) -> int | None:
        """``max_time`` in seconds."""
        if self.max_time is None:
            return None
        *days, hours, minutes, seconds = map(int, self.max_time.split(":"))
        return ((sum(days) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(kw_only=True)
class LoggerConfig(Section, key="logger"):
    """Where metrics go; metrics.jsonl is always written."""

    name: list[LoggerName] = option(["wandb"], "beside metrics.jsonl; several as [csv,wandb]")
    mode: Literal["auto", "online", "offline", "disabled"] = option(
        "auto", "auto is what W&B is set to, but offline without a key"
    )
    project: str | None = option(
        None,
        r"W&B project: up to 128 characters, none of / \ # ? % :; null is W&B's own, or invformer",
        pattern=PROJECT,
    )
    entity: str | None = option(None, "W&B user or team; null is your default")
    tags: list[str] = option(
        [], "W&B tags of 1 to 64 characters each; [] are W&B's own, or model and data", pattern=TAG
    )
    group: str | None = option(
        None, "W&B group; null is W&B's own, or the run's name. An experiment file names its family"
    )
    notes: str | None = option(None, "W&B notes, what this run is for")


@dataclass(kw_only=True)
class MonitorConfig(Section, key="monitor"):
    """What is measured during training, without touching it."""

    enabled: bool = option(True, "measure local Lipschitz constants and the inverse")
    every: int = option(1, "optimiser steps between estimates", MANY)
    num_sequences: int = option(1, "sequences of the probe text", "[1, 1e4]")
    length: int | None = option(None, "characters of each; null is data.seq_len", "[1, 1e6]")
    flush_every: int = option(25, "optimiser steps between transfers to the host", MANY)
    alarm: AlarmMode = option("off", "if an estimate grows far beyond its start")
    inversion: bool = option(True, "invert the stack at each validation (contractive models only)")
    inversion_sequences: int = option(4, "sequences that are inverted", "[1, 1e4]")


@dataclass(kw_only=True)
class RunConfig(Section, key="run"):
    """The run as a whole."""

    name: str | None = option(
        None,
        "a folder name below run.root (up to 100 letters, digits, '_', later also '-' and '.'); "
        "null makes a new readable one",
        pattern=RUN_NAME,
    )
    seed: int = option(0, "of weights, data order and samples", SEED)
    root: str = option("checkpoints", "folder that holds the run folders")
    resume: bool = option(True, "continue the run of this name; false refuses a name that exists")
    change: bool = option(False, "continue with other rates, batches, decay, clipping, dropout")
    debug: bool = option(False, "show tracebacks instead of one-line errors")


@dataclass(kw_only=True)
class TrainConfig(Root):
    """Train a character-level Transformer, certify it and watch it."""

    program: ClassVar[str] = "train.py"
    groups: ClassVar = ("experiment", "model", "data", "optim", "trainer", "logger")
    init_from: str | None = option(
        None, "run, exported folder or USER/NAME on the Hub that training starts with"
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def check(self) -> None:
        """The schedule fits the run, and batches the devices."""
        if self.warmup_steps > self.trainer.max_steps:
            why = f"{self.warmup_steps} is more than trainer.max_steps={self.trainer.max_steps}"
            self.refuse("optim.warmup_steps", why)
        self.require_equal_shares(self.trainer.devices)
        characters = self.data.batch_size * self.data.seq_len * self.trainer.accumulate
        if characters == 1 and self.model.is_contractive and self.init_from is None:
            why = "1 window of 1 character has no deviation to start from; read more"
            self.refuse("data.batch_size", why)

    def require_equal_shares(self, devices: int) -> None:
        """Refuse a batch that so many devices cannot share."""
        if (batch := self.data.batch_size) % devices:
            why = f"{batch} windows cannot be shared by {devices} devices; choose a multiple"
            self.refuse("data.batch_size", why)

    def ignored(self) -> dict[str, str]:
        """Keys that another model, init_from or another optimiser would read."""
        keys: dict[str, str] = {}
        if self.init_from is not None:
            names = [*(f"model.{f.name}" for f in fields(ModelConfig)), "model", *WITH_MODEL]
            keys |= dict.fromkeys(names, f"init_from={self.init_from} brings the model")
        elif not self.model.is_contractive:
            why = f"model={self.model.name} is a baseline without certificate"
            keys |= dict.fromkeys((f"model.{name}" for name in CONTRACTIVE_ONLY), why)
        if self.optim.name != "muon":
            keys["optim.muon_lr"] = f"optim={self.optim.name} does not use Muon; add optim=muon"
        return keys

    @property
    def warmup_steps(self) -> int:
        """``optim.warmup_steps``, or a length that suits short runs too."""
        short = min(100, self.trainer.max_steps // 10 + 1)
        return short if self.optim.warmup_steps is None else self.optim.warmup_steps
