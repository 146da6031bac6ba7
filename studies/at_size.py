r"""Certified models at nanoGPT's GPU size and at Kim et al.'s width, in a GPU's few minutes.

    python -m studies.at_size minutes=8 ptb=FOLDER shakespeare=FILE out=DIR

Milliseconds of a step are measured first, and a plan is made from them: what fits into ``minutes``
in the order of ``parts``, every run at its first rate before any at a further one. What does not
fit is printed as "not run"; a later call with the same ``out`` goes on with it. Every row is
written as it ends, and a run that a signal stops has saved: the same command continues it.

* step: the one for which docs/results.md has 7.2 ms, compiled 6.2 (aim: 5), launched, replayed, or
  one CUDA graph; those of the models that are trained; and one with estimates at the full context.
* shakespeare: nanoGPT's text, cut as there (the last tenth is validation), dropout 0.2 on every
  branch's output, and the best validation. nanoGPT's README has 1.4697 nats; aim: 1.45.
* ptb: the Penn Treebank; nats of its test text, and the price behind the dot product.
* kim: the same at width 512, 8 heads and 288 characters: the attention of Kim et al. 2021 with
  their constants, ours, and the dot product. Their table, quoted unchecked, has 1.008 to 1.029.

Rates are chosen beforehand, from Muon's best at nanoGPT's CPU size after 5,000 steps. A step has
the spectral norm 0.2 η √width, so η is divided by the root of the width's growth. If a step reads G
times as many characters, η would stay if gradients were exact and grow by √G if they were noise:
the first rate takes the mean of both, G^¼; the further ones are both ends.

FOLDER holds train.txt, valid.txt and test.txt of the Penn Treebank. A machine that has PyTorch for
its GPU but no network takes along the checkout, both texts (7 MB) and wheels for its Python::

    pip download --no-deps -c constraints.txt -d wheels jaxtyping wadler-lindig lightning \
      lightning-utilities torchmetrics omegaconf pyyaml safetensors fsspec packaging tqdm numpy \
      matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil tzdata
    pip install --no-index --no-deps wheels/*.whl

``out/rows.csv`` alone tells another machine what is done, ``out/runs`` what has begun.

A processor trains tiny models, as a smoke test. There ``full=true steps=3 rates=1 minutes=1e4
parts=[ptb] kinds=[certified] ptb=FOLDER`` rehearses a part at full size on its text's beginning,
in single precision, because it takes fifty times as long over products in bfloat16.
"""

import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.models import VOCABULARY, compile_blocks, windows
from benchmarks.models import Case as Sizes
from benchmarks.tasks import Graphs, Training
from benchmarks.timing import median_seconds
from invformer.assemble.model import build_model
from invformer.config.load import load_config
from invformer.config.schema import TrainConfig
from invformer.config.section import option
from invformer.data.corpora import read_corpus
from invformer.errors import ConfigurationError
from invformer.runs.checkpoint import newest_checkpoint
from invformer.runs.machine import pick_device
from invformer.training.optimizers import build_optimizer
from studies import kinds
from studies.kinds import ALLOWED, QUIET, TWIN, evaluated, own_words
from studies.report import Finding, Rows, Summary, by, table
from studies.rows import RowFile
from studies.runs import call, validations, words_of
from studies.study import Study, StudyOptions, measure_missing, program

Part = Literal["step", "shakespeare", "ptb", "kim"]
Kind = Literal["certified", "token_max", "twin", "kim"]
NANOGPT = "experiment=nanogpt_gpu"
KIM = "experiment=ptb_kim optim=muon trainer.precision=bf16-mixed trainer.eval_batch_size=256"
DOT_PRODUCT = "model=dot_product model.activation=gelu model.position_bias=true"
KINDS = {
    "certified": NANOGPT,  # diagonal blocks ≤ 0.5
    "token_max": f"{NANOGPT} model.certificate=token_max model.strictly_causal=false",
    TWIN: f"{NANOGPT} {DOT_PRODUCT} model.num_heads=6",
}
STEP = f"{NANOGPT} model=contractive_l2 model.num_heads=6 optim=adamw"
# Of one step: what is replayed, and whether blocks are compiled.
VARIANTS: dict[str, tuple[Graphs, bool]] = {
    "eager": ("none", False),  # all that a processor has
    "graphs": ("parts", False),
    "one graph": ("whole", False),
    "compiled": ("parts", True),
    "compiled, one graph": ("whole", True),
}
MONITORED = "certified, monitored"
RECIPES: dict[str, dict[str, str]] = {
    "step": {**KINDS, "kim": KIM, MONITORED: NANOGPT, **dict.fromkeys(VARIANTS, STEP)},
    "shakespeare": {kind: f"{words} model.dropout=0.2" for kind, words in KINDS.items()},
    "ptb": KINDS,
    "kim": {
        "kim": KIM,
        "certified": f"{KIM} model=causal_bounded model.strictly_causal=true model.num_heads=32",
        TWIN: f"{KIM} {DOT_PRODUCT} model.num_heads=8",
    },
}
TINY = "model.d_model=16 model.num_heads=2 model.d_ff=16 data.seq_len=8 data.batch_size=2"
SMOKE = f"{TINY} data.max_characters=4000"
REHEARSAL = "data.max_characters=200000 trainer.precision=32-true"  # no processor's half precision
STEPS = {"step": 0, "shakespeare": 2500, "ptb": 5000, "kim": 5000}
VALIDATE = {"shakespeare": "trainer.val_every=250 trainer.patience=3"}
VALIDATE |= dict.fromkeys(("ptb", "kim"), "trainer.val_every=1000")
# The best rates and the widths of nanoGPT's CPU size, whose steps read 12 windows of 64 characters.
TWIN_RATES = {"shakespeare": 1e-2, "ptb": 3e-3, "kim": 3e-3}
SMALL_RATE, SMALL_WIDTH, SMALL_CERTIFIED, SMALL_STEP = 6e-3, 128, 160, 12 * 64
POWERS = 1 / 4, 0.0, 1 / 2  # of the growth of a step: of the first rate, and of further ones
START, SLOWER = 45.0, 1.3  # seconds to load and to evaluate; a step of train.py over one timed
NANOGPT_NATS, AIM_NATS, AIM_MS = 1.4697, 1.45, 5.0


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Time steps, then train what fits into the minutes of a GPU."""

    minutes: float = option(8.0, "of this call", "(0, 1e5]")
    ptb: str | None = option(None, "folder with the Penn Treebank; a smoke test has another text")
    shakespeare: str | None = option(None, "file with tiny Shakespeare; likewise")
    full: bool = option(False, "full size on a processor too")
    parts: list[Part] = option(["step", "shakespeare", "ptb", "kim"], "what is measured")
    kinds: list[Kind] = option([*KINDS, "kim"], "what is trained")
    depths: list[int] = option([2, 4, 6, 8], "blocks in part kim", "[1, 1e3]")
    rates: int = option(len(POWERS), "of each run", "[1, 3]")
    steps: int | None = option(None, "of every run; null is what its part has", "[1, 1e7]")
    overrides: list[str] = option([], "words for train.py in every run")


@dataclass(frozen=True)
class Case(kinds.Case):
    """One run of ``train.py``, of ``budget`` steps, or a step that is timed."""

    folder: str = field(compare=False)  # another on another machine
    part: str
    blocks: int
    is_full: bool
    device: str
    text: str  # first digits of its SHA-256
    split: str  # which is evaluated
    where: str = field(compare=False)  # words for train.py: places on this machine

    @property
    def run(self) -> Path:
        """Its folder."""
        name = f"{self.part}-{self.kind}-{self.blocks}-{self.budget}-{self.rate:g}-{self.seed}"
        return Path(self.folder) / name

    @property
    def is_claim(self) -> bool:
        """Whether it is neither a smoke test nor a rehearsal."""
        return self.is_full and self.device == "cuda" and self.budget == STEPS[self.part]

    def __str__(self) -> str:
        return f"{self.part}, {self.kind}, {self.blocks} blocks at {self.rate:g}"


@dataclass(frozen=True)
class Result:
    """Milliseconds of a step, or what came of a run; NaN is what does not exist."""

    milliseconds: float = math.nan
    parameters: float = math.nan
    best: float = math.nan  # steps until the best validation
    val: float = math.nan  # nats, there
    scored: float = math.nan  # nats of the split that is evaluated
    ngram: float = math.nan
    certified: float = math.nan  # largest bound
    recovered: float = math.nan  # share of the characters of four windows
    proven: float = math.nan  # likewise
    note: str = ""  # what went wrong


def cases(options: Options) -> list[Case]:
    """Steps, which are timed at once, and the runs that fit into the time that remains."""
    end, device = time.monotonic() + 60 * options.minutes, pick_device(options.device, "device")
    timed, runs = steps_of(options, device), list(dict.fromkeys(runs_of(options, device)))
    file = RowFile(options.folder / "rows.csv", Case, Result)
    known = file.read()
    if timed:
        measure_missing(STUDY, timed, known, file, device)
    unit = {case.kind: known[case].result.milliseconds / work(case) for case in timed}
    remaining, fit = end - time.monotonic(), []
    for case in runs:
        needed = 0.0 if case in known else seconds_left(case, unit)
        if needed <= remaining:
            remaining -= needed
            fit.append(case)
        else:
            print(f"not run: {case}")
    return [*timed, *fit]


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every row, with its price behind the best twin."""
    twins = {(c.part, c.blocks): r.scored for c, r in best(rows) if c.kind == TWIN}

    def behind(case: Case, result: Result) -> float:
        return result.scored - twins.get((case.part, case.blocks), math.nan)

    lines = table(rows, ["part", "kind", "blocks", "rate"], {"price": behind})
    failed = [(False, f"{case}: {result.note}") for case, result in rows if result.note]
    return Summary(lines, [*findings(rows, behind)], failed or [(True, "nothing failed")])


def seconds_left(case: Case, unit: Mapping[str, float]) -> float:
    """Of a run and its evaluation; ``unit`` has milliseconds for each unit of work, by kind."""
    saved, _ = newest_checkpoint(case.run / "checkpoints")
    steps = case.budget - (saved.step if saved else 0)
    return START + SLOWER * 1e-3 * unit.get(case.kind, math.nan) * work(case) * steps


def work(case: Case) -> float:
    """Characters × blocks × width² of a step."""
    config = configuration(case.words)
    return config.data.batch_size * config.data.seq_len * case.blocks * config.model.d_model**2


def steps_of(options: Options, device: torch.device) -> list[Case]:
    """One of each kind that is trained, one with the monitor, and variants of one."""
    trained = {kind for part in options.parts if part != "step" for kind in RECIPES[part]}
    names: list[str] = [kind for kind in options.kinds if kind in trained]
    if "step" in options.parts:
        names += [MONITORED, *(VARIANTS if device.type == "cuda" else ["eager"])]
    return [case_of(options, device, "step", name) for name in names]


def runs_of(options: Options, device: torch.device) -> Iterator[Case]:
    """All runs, the most important first."""
    for power in POWERS[: options.rates]:
        for part in options.parts:
            for blocks in options.depths if part == "kim" else [6]:
                for kind in options.kinds:
                    if part != "step" and kind in RECIPES[part]:
                        yield case_of(options, device, part, kind, blocks, power)


def case_of(
    options: Options, device: torch.device, part: Part, kind: str, blocks: int = 6, power: float = 0
) -> Case:
    """A case; a run's rate grows by this power of the characters of a step."""
    is_gpu = device.type == "cuda"
    is_full = is_gpu or options.full
    short = "" if is_gpu else REHEARSAL if is_full else SMOKE
    recipe = RECIPES[part].get(kind, NANOGPT)
    words = " ".join([recipe, f"model.num_layers={blocks}", short, *words_of(options)])
    config = configuration(words)
    growth = config.data.batch_size * config.data.seq_len / SMALL_STEP
    narrow = (SMALL_CERTIFIED if kind == "certified" else SMALL_WIDTH) / config.model.d_model
    small = TWIN_RATES.get(part, SMALL_RATE) if kind == TWIN else SMALL_RATE
    text = () if part == "step" else text_words(options, part, is_full)
    sha256, split = text_of(text) if text else ("", "")
    steps = options.steps or (STEPS[part] if is_full else 2)
    return Case(
        kind=kind, budget=0 if part == "step" else steps, seed=options.seed, words=words,
        rate=0 if part == "step" else float(f"{small * narrow**0.5 * growth**power:.1e}"),
        folder=str(options.folder / "runs"), part=part, blocks=blocks, is_full=is_full,
        device=device.type, text=sha256, split=split,
        where=shlex.join([*text, f"trainer.accelerator={'gpu' if is_gpu else 'cpu'}"]),
    )  # fmt: skip


def text_words(options: Options, part: Part, is_full: bool) -> tuple[str, ...]:
    """What says which text a part reads; a smoke test may read the one that comes with Python."""
    is_plays = part == "shakespeare"
    name, path = ("tiny_shakespeare", options.shakespeare) if is_plays else ("ptb", options.ptb)
    if path is not None:
        return f"data={name}", f"data.path={path}"
    if is_full:
        raise ConfigurationError(f"part {part}: where is {name}? Add ptb=FOLDER shakespeare=FILE")
    return "data=python_docs", "data.test_fraction=0.05"


@cache
def configuration(words: str) -> TrainConfig:
    """What ``train.py`` is asked for."""
    return load_config(shlex.split(words), TrainConfig)


@cache
def text_of(words: tuple[str, ...]) -> tuple[str, str]:
    """The first digits of a text's SHA-256, and the split that is evaluated: test if there is."""
    corpus = read_corpus(load_config([NANOGPT, *words]).data)
    return corpus.sha256[:8], "test" if corpus.sizes["test"] else "val"


def command(case: Case) -> list[str]:
    """The words of ``train.py`` for a run."""
    words = f"{QUIET} {VALIDATE[case.part]} {case.words} {case.where}"
    return [*shlex.split(words), *own_words(case)]


def measure(case: Case, device: torch.device) -> Result:
    """Time, or train and evaluate; what goes wrong is noted, and does not end the study."""
    try:
        if case.part == "step":
            return Result(milliseconds=milliseconds(case, device))
        call("train.py", *command(case))
        return result_of(case, evaluated(case, case.split, device))
    except Exception as error:
        return Result(note=f"{type(error).__name__}: {' '.join(str(error).split()):.300}")


def result_of(case: Case, report: Mapping[str, Any]) -> Result:
    """What a run and its evaluation found."""
    least = min(validations(case.run), key=lambda row: row["val/nats"])
    bounds = (report["certificate"] or {}).get("per_branch", {})
    inversion = report["inversion"] or {}
    return Result(
        parameters=report["model"]["parameters"], best=least["step"] + 1, val=least["val/nats"],
        scored=report["nats"], ngram=report["ngram"]["nats"],
        certified=max(bounds.values(), default=math.nan),
        recovered=inversion.get("characters_recovered", math.nan),
        proven=inversion.get("characters_proven", math.nan),
    )  # fmt: skip


def milliseconds(case: Case, device: torch.device) -> float:
    """A step by itself, on a GPU in bfloat16 and the median of five spans.

    A variant has AdamW. An estimate follows its step, and in train.py hides behind it in part.
    """
    graphs, is_compiled = VARIANTS.get(case.kind, ("parts", False))
    config = configuration(case.words)
    size, data = config.model, config.data
    sizes = Sizes(data.seq_len, size.d_model, case.blocks, size.num_heads, data.batch_size)
    torch.manual_seed(case.seed)
    model = build_model(size, len(VOCABULARY), sizes.seq_len).float()
    model.initialise(windows(sizes, torch.device("cpu"))[0][:8])
    model = compile_blocks(model.to(device)) if is_compiled else model.to(device)
    probe_length = sizes.seq_len if case.kind == MONITORED else None
    precision = "bf16" if config.trainer.precision == "bf16-mixed" else "float32"
    step = Training(model, sizes, precision, probe_length, graphs)
    if case.kind not in VARIANTS:
        step.optimizer = build_optimizer(model, config.optim)
    span, turns = (20, 5) if device.type == "cuda" else (1, 1)
    median_seconds({"": step}, 3 if span > 1 else 1)  # launches, records, replays
    return 1e3 / span * median_seconds({"": lambda: [step() for _ in range(span)]}, turns)[""]


def best(rows: Rows[Case, Result]) -> Rows[Case, Result]:
    """The runs whose rate has the best validation."""
    ended = by([row for row in rows if row[1].val >= 0], "part", "blocks", "kind")
    return [min(group, key=lambda row: row[1].val) for group in ended.values()]


def findings(
    rows: Rows[Case, Result], behind: Callable[[Case, Result], float]
) -> Iterator[Finding]:
    """What was aimed at; smoke tests and rehearsals claim nothing."""
    said: list[tuple[Case, bool, str]] = []
    steps = [row for row in rows if row[0].kind in VARIANTS and row[1].milliseconds > 0]
    for case, result in sorted(steps, key=lambda row: row[1].milliseconds)[:1]:
        ms = result.milliseconds
        said += [(case, ms <= AIM_MS, f"a step takes {ms:.3g} ms ({case.kind}); aim: {AIM_MS:g}")]
    for case, result in best(rows):
        nats, price_of = result.scored, behind(case, result)
        if case.part == "shakespeare" and case.kind == "certified":
            words = f"{case}: {nats:.4f} nats; aim: {AIM_NATS}, nanoGPT: {NANOGPT_NATS}"
            said += [(case, nats <= AIM_NATS, words)]
        if case.kind != TWIN and not math.isnan(price_of):
            words = f"{case}: {price_of:+.4f} nats behind the twin"
            said += [(case, price_of <= ALLOWED, words)]
        if case.kind != TWIN:
            back = f"{case}: {result.recovered:.1%} recovered, {result.proven:.1%} proven"
            said += [(case, result.recovered == result.proven == 1, back)]
    return ((holds if case.is_claim else None, words) for case, holds, words in said)


STUDY = Study(Options, Case, Result, cases, measure, summarise)
program(STUDY)  # which has its name by then: steps are timed as rows of it
