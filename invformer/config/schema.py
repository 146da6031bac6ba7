"""What a run is made of: every choice with its default, range and meaning. Knows no library.

Integers have a ceiling too, so that ``10**20`` steps are refused before anything is allocated.
"""

# ruff: noqa: RUF009  # option() and section() return dataclass fields

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from invformer.config.section import Root, Section, option, refuse, section, shown

MANY = "[1, 1e9]"
SEED = "[0, 4294967295]"
RUN_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.)){0,99}")
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")

Attention = Literal["dot_product", "l2", "contractive_l2", "contractive_bounded"]
Certificate = Literal["token_max", "kim_entry_max", "kim_frobenius", "causal"]
Corpus = Literal[
    "python_docs", "python_stdlib", "text_file",
    "tiny_shakespeare", "ptb", "text8", "enwik8", "wikitext2",
]  # fmt: skip
Split = Literal["val", "test", "train"]
MonitoredNorm = Literal["token_max", "frobenius"]


@dataclass(kw_only=True)
class ModelConfig(Section):
    """The network."""

    key: ClassVar[str] = "model"
    name: Attention = option(
        "contractive_l2",
        "attention map; contractive_* are the invertible models, the others baselines",
    )
    certificate: Certificate | None = option(
        "token_max", "theorem that certifies a contractive model; null for the baselines"
    )
    d_model: int = option(96, "width of the residual stream, channels", within="[1, 1e5]")
    num_heads: int = option(4, "attention heads, a divisor of d_model", within="[1, 1e4]")
    d_head: int | None = option(
        None,
        "channels of a head (contractive_bounded only); null is d_model // num_heads",
        within="[1, 1e4]",
    )
    num_layers: int = option(4, "blocks, each of attention and feed-forward", within="[1, 1e4]")
    d_ff: int | None = option(
        None, "hidden width of the feed-forward, channels; null is 4 d_model", within="[1, 1e6]"
    )
    strictly_causal: bool = option(
        False,
        "tokens attend to those before them and not to themselves (contractive_bounded only)",
    )
    feed_forward_kernel: int = option(
        1,
        "tokens that a hidden unit sees, its own and those before; of contractive models only "
        "the causal certificate allows more than 1",
        within="[1, 1e3]",
    )
    lipschitz_target: float = option(
        0.5,
        "c, at which the certificate holds every residual branch: its Lipschitz constant or, under "
        "causal, the diagonal blocks of its Jacobian",
        within="(0, 1)",
    )
    position_bias: bool = option(True, "add a learned relative position bias to the logits")
    position_bias_form: Literal["table", "linear", "sinusoid"] = option(
        "table",
        "of the bias over lags: free, or of low rank, with which thousands of tokens train faster",
    )
    attention_kernel: Literal["auto", "math", "native", "blocked", "sdpa", "flex"] = option(
        "auto", "what attention runs on; all but math need memory linear in seq_len"
    )
    activation: Literal["silu", "gelu", "relu", "tanh"] = option("silu", "of the feed-forward")
    channel_metric: bool = option(
        True,
        "each residual branch contracts in a learned metric of the channels, its own, in which it "
        "is loud in a few of them (contractive models only)",
    )
    loud_channels: int | None = option(
        None,
        "channels that a branch with a channel_metric is loud in at first; null is d_model // 4",
        within="[1, 1e5]",
    )
    activation_norm: bool = option(
        False,
        "invertible ActNorm after each residual branch, where there is no channel_metric "
        "(contractive models only)",
    )
    input_radius: float | None = option(
        None,
        "radius of a ball that inputs of contractive branches are mapped into, in units of "
        "sqrt(d_model): keeps deep stacks from multiplying activations; null leaves inputs alone",
        within="[1e-3, 1e6]",
    )
    d_embedding: int | None = option(
        None,
        "channels the embedding writes, the rest start at zero (contractive models only); "
        "null is d_model // 3, d_model switches the padding off",
        within="[1, 1e5]",
    )
    initial_sharpness: float = option(
        8.0,
        "how sharply units of a contractive feed-forward bend at first; each then learns its own",
        within="[1e-6, 1e6]",
    )
    initial_output: float = option(
        0.1,
        "size of the entries that a contractive branch's output map starts with "
        "(not the attention under a kim_ certificate)",
        within="[1e-6, 1e6]",
    )
    dropout: float = option(
        0.0, "probability on each branch's output, baselines only", within="[0, 1)"
    )
    head_dropout: float = option(
        0.0, "probability on what the head reads, above the certified stack", within="[0, 1)"
    )

    def check(self) -> None:
        """Heads divide the width; only the contractive model has, and needs, a certificate."""
        if self.d_model % self.num_heads:
            self.refuse("num_heads", f"{self.num_heads} heads do not divide d_model={self.d_model}")
        if self.d_embedding is not None and self.d_embedding > self.d_model:
            self.refuse("d_embedding", f"{self.d_embedding} is more than d_model={self.d_model}")
        table = self.position_bias and self.position_bias_form == "table"
        if self.attention_kernel == "sdpa" and table:
            self.refuse(
                "attention_kernel",
                "sdpa takes no bias table: pick blocked, or another model.position_bias_form",
            )
        if self.d_head is not None and self.name != "contractive_bounded":
            self.refuse("d_head", f"{self.name} has heads of d_model // num_heads channels")
        if self.strictly_causal and self.name != "contractive_bounded":
            self.refuse("strictly_causal", f"tokens of {self.name} have to see themselves")
        if self.is_contractive and self.feed_forward_kernel > 1 and self.certificate != "causal":
            self.refuse(
                "feed_forward_kernel",
                f"{self.feed_forward_kernel} tokens are more than a certificate of whole Lipschitz "
                "constants allows: 1, or model.certificate=causal",
            )
        self._check_metric()
        if self.input_radius is not None:
            if not self.is_contractive:
                self.refuse("input_radius", f"{self.name} normalises its inputs already")
            if self.certificate == "kim_entry_max":
                self.refuse("input_radius", "nothing is proven of it under kim_entry_max")
        if not self.is_contractive:
            if self.certificate is not None:
                self.refuse(
                    "certificate",
                    f"{self.name} has no certificate: pick model={self.name}, "
                    "or set model.certificate=null",
                )
        elif self.certificate is None:
            self.refuse("certificate", f"{self.name} needs one, such as token_max")
        elif self.name == "contractive_bounded" and self.certificate.startswith("kim_"):
            self.refuse(
                "certificate",
                f"{self.certificate} is a theorem on tied L2 attention: pick token_max or causal",
            )
        elif self.dropout > 0:
            self.refuse(
                "dropout", f"{self.dropout} would void the certificate: {self.name} has none"
            )

    def _check_metric(self) -> None:
        """One scaling of the channels between branches, and loud ones where there are metrics."""
        if self.channel_metric and self.activation_norm:
            self.refuse(
                "activation_norm", "metrics take its place: set model.channel_metric=false for it"
            )
        if self.loud_channels is not None and not self.channel_metric:
            self.refuse("loud_channels", "is of branches with model.channel_metric=true")
        if self.loud_channels is not None and self.loud_channels > self.d_model:
            self.refuse(
                "loud_channels", f"{self.loud_channels} is more than d_model={self.d_model}"
            )

    @property
    def is_contractive(self) -> bool:
        """Whether the stack is invertible and certified."""
        return self.name in ("contractive_l2", "contractive_bounded")

    @property
    def is_l2(self) -> bool:
        """Whether logits are distances."""
        return self.name in ("l2", "contractive_l2")

    @property
    def head_width(self) -> int:
        """``d_head``, or what the heads of the others have."""
        return self.d_model // self.num_heads if self.d_head is None else self.d_head

    @property
    def feed_forward_width(self) -> int:
        """``d_ff``, or 4 ``d_model``."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def embedding_width(self) -> int:
        """``d_embedding``, or a third of ``d_model`` (at least one channel)."""
        return max(1, self.d_model // 3) if self.d_embedding is None else self.d_embedding


@dataclass(kw_only=True)
class DataConfig(Section):
    """The text."""

    key: ClassVar[str] = "data"
    name: Corpus = option("python_docs", "corpus; the first three need no network")
    path: str | None = option(None, "file or folder with the corpus; needed by text_file")
    seq_len: int = option(128, "context, characters", within="[1, 1e6]")
    batch_size: int = option(8, "windows per batch and device", within="[1, 1e6]")
    val_fraction: float = option(
        0.05, "share of the text for validation, where the corpus has no splits", within="(0, 1)"
    )
    test_fraction: float = option(
        0.05, "share of the text for the test, where the corpus has no splits", within="[0, 1)"
    )
    split: Split = option("val", "split that evaluate.py scores")
    max_characters: int | None = option(
        None, "read only this many characters of the corpus; null reads all", within="[1, 1e12]"
    )

    def check(self) -> None:
        """Something is left to train on, and a local corpus says where it is."""
        if self.val_fraction + self.test_fraction >= 1:
            total = f"{self.val_fraction} + test_fraction {self.test_fraction}"
            self.refuse("val_fraction", f"{total} leaves no text for training")
        if self.name == "text_file" and self.path is None:
            self.refuse("path", "text_file needs one: data.path=FILE or data.path=FOLDER")


@dataclass(kw_only=True)
class OptimConfig(Section):
    """The optimiser and its schedule: linear warm-up, then cosine."""

    key: ClassVar[str] = "optim"
    name: Literal["adamw", "muon"] = option(
        "adamw", "muon updates the matrices by Muon and everything else by AdamW"
    )
    lr: float = option(8e-3, "peak learning rate of AdamW", within="(0, 10]")
    muon_lr: float = option(2e-2, "peak learning rate of Muon", within="(0, 10]")
    betas: list[float] = option([0.9, 0.99], "AdamW's two decay rates", within="[0, 1)")
    weight_decay: float = option(
        0.0, "decoupled weight decay of the matrices in the stack", within="[0, 100]"
    )
    warmup_steps: int | None = option(
        None,
        "linear warm-up, optimiser steps; null is min(100, max_steps // 10 + 1)",
        within="[0, 1e9]",
    )
    min_lr_fraction: float = option(0.0, "final over peak learning rate", within="[0, 1]")
    grad_clip: float | None = option(
        1.0, "largest gradient norm; null switches clipping off", within="(0, 1e9]"
    )
    ema_decay: float | None = option(
        None,
        "keep an exponential moving average of the weights with this decay, to validate, certify "
        "and evaluate; null keeps none",
        within="(0, 1)",
    )

    def check(self) -> None:
        """AdamW has two decay rates."""
        if len(self.betas) != 2:
            self.refuse("betas", f"{shown(self.betas)} is not two numbers")


@dataclass(kw_only=True)
class TrainerConfig(Section):
    """How long, on what, and in which precision."""

    key: ClassVar[str] = "trainer"
    max_steps: int = option(2500, "optimiser steps", within=MANY)
    val_every: int = option(500, "optimiser steps between validations", within=MANY)
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = option("auto", "device kind")
    devices: int = option(1, "devices to train on", within="[1, 1e4]")
    strategy: Literal["ddp", "fsdp"] = option(
        "ddp",
        "with several devices: ddp keeps everything on each, fsdp (FSDP2) shards gradients and "
        "AdamW's memory",
    )
    precision: Literal["32-true", "bf16-mixed", "64-true"] = option("32-true", "arithmetic")
    compile: bool = option(False, "torch.compile each block")
    accumulate: int = option(1, "batches per optimiser step", within="[1, 1e6]")
    checkpoint_activations: bool = option(
        False, "compute each block's activations again in the backward pass, to save memory"
    )
    rank_timeout: float = option(
        300.0,
        "with several devices: seconds in which each process has to begin a batch",
        within="[1, 1e6]",
    )
    num_threads: int | None = option(
        None, "CPU threads; null leaves PyTorch's choice", within="[1, 1024]"
    )
    deterministic: bool = option(True, "only algorithms that repeat bit for bit")
    sample_length: int = option(
        200, "characters generated at the end of training; 0 for none", within="[0, 1e6]"
    )
    eval_batch_size: int = option(64, "windows per validation batch", within="[1, 1e6]")
    progress: bool = option(True, "show a progress bar")


@dataclass(kw_only=True)
class LoggerConfig(Section):
    """Weights & Biases; metrics.jsonl is always written."""

    key: ClassVar[str] = "logger"
    name: Literal["wandb", "none"] = option("wandb", "none writes metrics.jsonl alone")
    project: str = option("invformer", "W&B project")
    mode: Literal["auto", "online", "offline", "disabled"] = option(
        "auto", "auto is online with an API key, else offline"
    )
    entity: str | None = option(None, "W&B user or team; null is your default")
    tags: list[str] = option([], "W&B tags, 1 to 64 characters each")
    group: str | None = option(None, "W&B group; an experiment file names its family here")

    def check(self) -> None:
        """What W&B itself would refuse, but only after the run has started."""
        if len(self.project) > 128 or any(c in "/\\#?%:" for c in self.project):
            self.refuse(
                "project", rf"{shown(self.project)} is over 128 characters or has one of /\#?%:"
            )
        if any(len(tag) > 64 for tag in self.tags):
            self.refuse("tags", f"{shown(max(self.tags, key=len))} is longer than 64 characters")


@dataclass(kw_only=True)
class MonitorConfig(Section):
    """What is measured during training, without touching it."""

    key: ClassVar[str] = "monitor"
    enabled: bool = option(True, "measure local Lipschitz constants and the inverse")
    norms: list[MonitoredNorm] = option(
        ["token_max", "frobenius"], "norms of the local Lipschitz estimates"
    )
    budget: float = option(
        0.05,
        "largest share of a step that estimates and local bounds take, on top; sizes what is null",
        within="(0, 10]",
    )
    every: int | None = option(
        None, "optimiser steps between estimates; null follows the budget", within=MANY
    )
    num_sequences: int | None = option(
        None, "sequences in the probe batch; null follows the budget", within="[1, 1e4]"
    )
    probe_length: int | None = option(
        None,
        "characters of each probe sequence, from its start; null follows the budget",
        within="[1, 1e6]",
    )
    flush_every: int = option(25, "optimiser steps between transfers to the host", within=MANY)
    num_steps: int | None = option(
        None,
        "power iteration steps per estimate; null is one, and up to four where steps are left out",
        within="[1, 1e4]",
    )
    inversion: bool = option(True, "invert the stack at each validation (contractive models only)")
    inversion_sequences: int = option(4, "sequences that are inverted", within="[1, 1e4]")

    def check(self) -> None:
        """A monitor that is on measures something, once."""
        if self.enabled and not self.norms:
            self.refuse("norms", "name at least one, or set monitor.enabled=false")
        if twice := [norm for norm, count in Counter(self.norms).items() if count > 1]:
            self.refuse("norms", f"{twice[0]} is named twice")


@dataclass(kw_only=True)
class RunConfig(Section):
    """The run as a whole."""

    key: ClassVar[str] = "run"
    name: str | None = option(None, "folder below run.root; null makes a new readable one")
    seed: int = option(0, "of weights, data order and samples", within=SEED)
    root: str = option("checkpoints", "folder that holds the run folders")
    resume: bool = option(True, "continue the run of this name; false refuses a name that exists")
    debug: bool = option(False, "show tracebacks instead of one-line errors")

    def check(self) -> None:
        """The name is one safe folder."""
        if self.name is not None and not RUN_NAME.fullmatch(self.name):
            self.refuse(
                "name",
                f"{shown(self.name)} is not a folder name: use up to 100 letters, digits, '_', '-' "
                "and single dots, the first no '-' or dot",
            )


@dataclass(kw_only=True)
class TrainConfig(Root):
    """Train a character-level Transformer, certify it and watch it."""

    program: ClassVar[str] = "train.py"
    groups: ClassVar[tuple[str, ...]] = (
        "experiment", "model", "data", "optim", "trainer", "logger",
    )  # fmt: skip
    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    optim: OptimConfig = section(OptimConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    logger: LoggerConfig = section(LoggerConfig)
    monitor: MonitorConfig = section(MonitorConfig)
    run: RunConfig = section(RunConfig)

    def check(self) -> None:
        """The schedule fits the run, the probe the windows."""
        length = self.monitor.probe_length
        if length is not None and length > self.data.seq_len:
            refuse(
                "monitor.probe_length", f"{length} is more than data.seq_len={self.data.seq_len}"
            )
        if self.trainer.strategy == "fsdp":
            self.check_sharding()
        if self.warmup_steps > self.trainer.max_steps:
            refuse(
                "optim.warmup_steps",
                f"{self.warmup_steps} is more than trainer.max_steps={self.trainer.max_steps}",
            )

    def check_sharding(self) -> None:
        """What needs whole gradients, or one device, is not sharded."""
        where = "trainer.strategy"
        if self.trainer.devices == 1:
            refuse(where, "fsdp shards over several devices: set trainer.devices=2 or more")
        if self.optim.name == "muon":
            refuse(where, "muon updates whole matrices: pick ddp, or optim=adamw")
        if self.optim.ema_decay is not None:
            refuse(where, "fsdp keeps no average of the weights: pick ddp, or optim.ema_decay=null")
        if self.trainer.precision == "64-true":
            refuse(where, "fsdp trains in 32-true or bf16-mixed: pick ddp, or one of those")

    @property
    def warmup_steps(self) -> int:
        """``optim.warmup_steps``, or a length that suits short runs too."""
        if self.optim.warmup_steps is not None:
            return self.optim.warmup_steps
        return min(100, self.trainer.max_steps // 10 + 1)


@dataclass(kw_only=True)
class EvaluateDataConfig(Section):
    """The text to score; null keeps what the checkpoint was trained with."""

    key: ClassVar[str] = "data"
    name: Corpus | None = option(None, "another corpus, in the checkpoint's vocabulary")
    path: str | None = option(None, "file or folder with the corpus")
    split: Split | None = option(None, "split to score; null is the checkpoint's data.split")
    max_characters: int | None = option(
        None, "read only this many characters of the corpus", within="[1, 1e12]"
    )

    def check(self) -> None:
        """A local corpus says where it is."""
        if self.name == "text_file" and self.path is None:
            self.refuse("path", "text_file needs one: data.path=FILE or data.path=FOLDER")


@dataclass(kw_only=True)
class MeasureConfig(Section):
    """What is measured."""

    key: ClassVar[str] = "evaluate"
    stride: int | None = option(
        None, "characters between windows; null is seq_len, without overlap", within="[1, 1e6]"
    )
    batch_size: int = option(64, "windows per batch", within="[1, 1e6]")
    lipschitz_sequences: int = option(
        2, "sequences for local Lipschitz estimates; 0 for none", within="[0, 1e6]"
    )
    lipschitz_steps: int = option(30, "power iteration steps per estimate", within="[1, 1e6]")
    inversion_sequences: int = option(
        16, "sequences that are inverted; 0 for none", within="[0, 1e6]"
    )
    inversion_method: Literal["auto", "picard", "anderson"] = option(
        "auto", "fixed-point solver; auto is picard, then anderson where that is slow"
    )
    inversion_dtype: Literal["float32", "float64"] = option("float64", "arithmetic of the inverse")
    atol: float | None = option(
        None,
        "error allowed per layer, on top of the relative one that dtype and bound leave",
        within="(0, 1]",
    )
    device: str = option("auto", "auto, cpu, mps, cuda or cuda:INDEX")

    def check(self) -> None:
        """The device is one PyTorch could have."""
        if not DEVICE.fullmatch(self.device):
            self.refuse("device", f"{shown(self.device)} is not auto, cpu, mps, cuda or cuda:INDEX")


@dataclass(kw_only=True)
class GenerateConfig(Section):
    """Text continued by the model."""

    key: ClassVar[str] = "generate"
    prompt: str | None = option(None, "text to continue; null generates nothing")
    length: int = option(200, "characters to add", within="[1, 1e6]")
    temperature: float = option(1.0, "0 takes the likeliest character", within="[0, 100]")
    seed: int = option(0, "of the sampling", within=SEED)


@dataclass(kw_only=True)
class EvaluateConfig(Root):
    """Score, certify and invert a trained model."""

    program: ClassVar[str] = "evaluate.py"
    checkpoint: str = field(metadata={"help": "run folder, or one checkpoint in it"})
    data: EvaluateDataConfig = section(EvaluateDataConfig)
    evaluate: MeasureConfig = section(MeasureConfig)
    generate: GenerateConfig = section(GenerateConfig)
