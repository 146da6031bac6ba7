"""nanoGPT and certified models that train for the same time of one thread.

A step of every kind is timed first, in turns with the others, and minutes become so many steps of
each; ``seconds.json`` keeps the times, so that the same command asks for the same steps. Every run
has a schedule of its own. As steps are fixed, a busy machine changes no result.

nanoGPT is what its README trains on a CPU, with its own learning rate and with the best of three.
Our models are runs of ``train.py`` as in studies/price.py, at one rate of Muon. All see the
same windows in the same order, and the same code scores them on whole splits.

Verdict: every certified kind is at most ``ALLOWED`` nats behind the best other kind of each time.
"""

import json
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from benchmarks.timing import median_seconds
from invformer.assemble.model import build_model
from invformer.config.load import load_config
from invformer.config.schema import TrainConfig
from invformer.config.section import option
from invformer.data.windows import EvaluationWindows, TrainingWindows
from invformer.evaluation.likelihood import score
from invformer.evaluation.ngram import witten_bell_nats
from invformer.kernels.host import keep_freed_memory
from invformer.nn.transformer import CharTransformer
from invformer.numerics.precision import denormals_flushed
from invformer.runs.files import write_json
from invformer.training.optimizers import build_optimizer, warmup_cosine
from studies import kinds
from studies.kinds import QUIET, TWIN, Result
from studies.runs import words_of
from studies.study import Study, StudyOptions, program
from studies.training import encoded, train

Kind = Literal["nanogpt", "nanogpt_tuned", kinds.Kind]
NANOGPT, TUNED = "nanogpt", "nanogpt_tuned"
RATE = 1e-3  # nanoGPT's own
SETTINGS = (
    "experiment=nanogpt_cpu model=dot_product model.num_heads=4 model.activation=gelu "
    "model.position_bias=false model.attention_kernel=sdpa "
    "optim=adamw optim.weight_decay=0.1 optim.min_lr_fraction=0.1"
)
KINDS = {NANOGPT: SETTINGS, TUNED: SETTINGS, **kinds.KINDS}
UNCERTIFIED = (NANOGPT, TUNED, TWIN)
TURN = 10  # steps of a kind before the next one's turn


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Train nanoGPT, the twin and certified models for the same minutes of one thread."""

    kinds: list[Kind] = option([*UNCERTIFIED, "certified", "token_max"], "what is trained")
    minutes: list[float] = option([3.0, 6.0, 12.0], "of one thread", "[1e-6, 1e6]")
    adam_rates: list[float] = option([2e-3, 4e-3, 8e-3], "of nanogpt_tuned", "(0, 10]")
    muon_rate: float = option(1e-2, "of the kinds that Muon trains", "(0, 10]")
    num_seeds: int = option(1, "seeds, from seed on", "[1, 1e4]")
    num_turns: int = option(10, f"of {TURN} timed steps a kind", "[1, 1e4]")
    overrides: list[str] = option([], "words for train.py in every run, such as data=ptb")

    def rates(self, kind: str) -> list[float]:
        """The peak learning rates of a kind."""
        return {NANOGPT: [RATE], TUNED: self.adam_rates}.get(kind, [self.muon_rate])


@dataclass(frozen=True)
class Case(kinds.Case):
    """One run, of as many steps as fit into ``minutes``."""

    minutes: float


def cases(options: Options) -> list[Case]:
    """One seed after the other, the least time first."""
    seconds = step_seconds(options)
    words = " ".join([QUIET, *words_of(options)])
    return [
        Case(
            kind, steps, rate, seed, f"{words} trainer.val_every={steps}",
            str(options.folder / "runs"), minutes,
        )
        for seed in range(options.seed, options.seed + options.num_seeds)
        for minutes in options.minutes
        for kind in options.kinds
        for steps in [max(1, round(60 * minutes / seconds[kind]))]
        for rate in options.rates(kind)
    ]  # fmt: skip


def measure(case: Case, device: torch.device) -> Result:
    """Train, and score both splits."""
    if case.kind in kinds.KINDS:
        return kinds.measure(case, device)
    rate = f"optim.lr={case.rate:g}"
    config = load_config([*SETTINGS.split(), *shlex.split(case.words), rate], TrainConfig)
    text = encoded(config.data)
    torch.manual_seed(case.seed)
    model, optimiser = build(config, text.vocab_size)
    warmup = min(100, case.budget // 10 + 1)
    schedule = warmup_cosine(optimiser, warmup, case.budget, config.optim.min_lr_fraction)
    length, nats = config.data.seq_len, {}
    batches = TrainingWindows(text.train, length, config.data.batch_size, case.seed)
    train(model.to(device), batches, optimiser, case.budget, schedule=schedule)
    model.eval()
    for split, tokens in (("val", text.val), ("test", text.test)):
        windows = EvaluationWindows(tokens, length, length)
        ngram = witten_bell_nats(text.train, tokens, vocab_size=text.vocab_size)
        nats |= {split: score(model, windows, device).nats, f"{split}_ngram": ngram}
    return Result(
        sum(p.numel() for p in model.parameters()), **nats,
        passed=None, certified=None, proven=None,
    )  # fmt: skip


def step_seconds(options: Options) -> dict[str, float]:
    """Median seconds of a training step of every kind; a folder keeps what was measured in it."""
    file = options.folder / "seconds.json"
    known: dict[str, float] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    words = {kind: " ".join([KINDS[kind], *words_of(options)]) for kind in options.kinds}
    steps = {one: steps_of(shlex.split(one)) for one in sorted({*words.values()} - known.keys())}
    if steps:
        keep_freed_memory()
        with denormals_flushed():  # as train.py does
            median_seconds(steps, 1)  # warms up
            turns = median_seconds(steps, options.num_turns, time.process_time)
        known |= {one: seconds / TURN for one, seconds in turns.items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(known, file)
    return {kind: known[one] for kind, one in words.items()}


def steps_of(words: list[str]) -> Callable[[], Any]:
    """``TURN`` training steps of a configuration, after one that initialises the model."""
    config = load_config(words, TrainConfig)
    text = encoded(config.data)
    model, optimiser = build(config, text.vocab_size)
    batches = TrainingWindows(text.train, model.seq_len, config.data.batch_size, seed=0)
    steps = partial(train, model, batches, optimiser)
    steps(1)
    return partial(steps, TURN, is_fresh=False)


def build(config: TrainConfig, vocab_size: int) -> tuple[CharTransformer, Optimizer]:
    """The model of a configuration and its optimiser; nanoGPT is the one with AdamW."""
    optim = config.optim
    model = build_model(config.model, vocab_size, config.data.seq_len).float()
    if optim.name == "muon":
        return model, build_optimizer(model, optim)
    turn_into_nanogpt(model)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    how: dict[str, Any] = {"betas": optim.betas, "weight_decay": optim.weight_decay}
    return model, AdamW([{"params": matrices}, vectors], lr=optim.lr, fused=True, **how)


@torch.no_grad()
def turn_into_nanogpt(model: CharTransformer) -> None:
    """No biases, the head tied to the embedding, weights of 0.02; less on the way to the stream."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_parameter("bias", None)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            last = name.endswith(("out.weight", "inner.2.weight"))
            shrink = math.sqrt(2 * len(model.stack.blocks)) if last else 1.0
            nn.init.normal_(parameter, std=0.02 / shrink)
    model.head.weight = model.embedding.token.weight


summarise = partial(kinds.summary_of, x="minutes", others=UNCERTIFIED, where="after {:g} min")
draw = partial(kinds.figure_of, x="minutes", others=UNCERTIFIED, unit="minutes of a thread")
STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
