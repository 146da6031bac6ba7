"""What each part of the model is worth: ``experiment=ablation`` with one thing changed at a time.

Every variant is a run of ``train.py`` in a folder of its own below ``out``, so an interrupted one
continues where it was. Nats and bits per character are of the whole validation split after the last
step; ``certified`` is the largest proven bound of a branch, of its diagonal block under a causal
certificate, in the norm of the certificate.

Verdict: every certified model gives every character of its probe text back.
"""

import difflib
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from invformer.config.section import option
from studies.report import Rows, Summary, table
from studies.runs import call, place_of, validations, words_of
from studies.study import Study, StudyOptions, grid, program

NO_ACTNORM = "model.activation_norm=false"
SCALED = f"{NO_ACTNORM} model.diagonal_scaling=true"
STRICTLY = "model.certificate=causal model.strictly_causal=true"
KERNEL = "model.feed_forward_kernel=3 model.d_ff=256"
L2 = "model.name=contractive_l2 model.num_heads=4"
BASELINE = "model.name=dot_product model.certificate=null model.num_heads=4 optim.lr=8e-3"
NOTHING = "nothing"

# Name and the words of train.py that change something; docs/results.md says in prose what they do.
VARIANTS = {
    NOTHING: "",
    "no_bias": "model.position_bias=false",
    "l2": L2,
    "l2_causal": f"{L2} model.certificate=causal",
    "l2_kim": "model=contractive_l2_paper model.num_heads=4",
    "causal": "model.certificate=causal",
    "strictly_causal": STRICTLY,
    "kernel": f"{STRICTLY} {KERNEL}",  # as many parameters
    "scaled": SCALED,
    "scaled_c030": f"{SCALED} model.lipschitz_target=0.3",
    "no_activation_norm": NO_ACTNORM,
    "no_padding": "model.d_embedding=128",
    "c030": "model.lipschitz_target=0.3",
    "c050": "model.lipschitz_target=0.5",
    "c070": "model.lipschitz_target=0.7",
    "c090": "model.lipschitz_target=0.9",
    "heads4": "model.num_heads=4",
    "heads16": "model.num_heads=16",
    "deep": "model.num_layers=8 model.d_model=88 model.d_head=12",  # 2.5 % fewer parameters
    "muon": "optim.name=muon optim.lr=5e-3",
    "no_weight_decay": "optim.weight_decay=0.0",
    "ema": "optim.ema_decay=0.99",
    "head_dropout": "model.head_dropout=0.1",
    "relu": "model.activation=relu",
    "gelu": "model.activation=gelu",
    "tanh": "model.activation=tanh",
    "blunt": "model.initial_sharpness=1.0",
    "large_output": "model.initial_output=1.0",
    "dot_product": BASELINE,
    "dot_product_muon": f"{BASELINE} optim.name=muon optim.lr=5e-3 optim.muon_lr=1e-2",
    "dot_product_kernel": f"{BASELINE} {KERNEL}",
    "dot_product_heads8": f"{BASELINE} model.num_heads=8",
}


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Train the variants of ``experiment=ablation`` and hold their losses against its own."""

    only: list[str] = option([], "variants, besides the unchanged one; [] is all of them")
    overrides: list[str] = option([], "words for train.py in every run, such as data=ptb")

    def check(self) -> None:
        """Every variant exists."""
        for name in self.only:
            if name not in VARIANTS:
                near = difflib.get_close_matches(name, VARIANTS, 1, 0.0)
                self.refuse("only", f"no variant {name!r}: did you mean {near[0]!r}?")


@dataclass(frozen=True)
class Case:
    """One run: a variant, the other words of its ``train.py``, and where it is kept."""

    variant: str
    words: str
    folder: str
    seed: int

    @property
    def run(self) -> Path:
        """Its folder."""
        return Path(self.folder) / f"{self.variant}-{self.seed}"


@dataclass(frozen=True)
class Result:
    """Loss and certificate after the last step; ``certified`` is None for baselines."""

    nats: float
    certified: float | None
    recovered: float | None


def cases(options: Options) -> list[Case]:
    """The unchanged model first, then the variants."""
    same = {"words": " ".join(words_of(options)), "folder": str(options.folder / "runs")}
    names = dict.fromkeys([NOTHING, *(options.only or VARIANTS)])
    return grid(Case, options, same, variant=names)


def measure(case: Case, device: torch.device) -> Result:
    """Train, or continue, and read what the run has written; InvformerError if training failed."""
    where = f"trainer.accelerator={'gpu' if device.type == 'cuda' else 'cpu'}"
    words = [*VARIANTS[case.variant].split(), *shlex.split(case.words), *place_of(case)]
    call("train.py", "experiment=ablation", *words, where, "trainer.progress=false")
    last, file = validations(case.run)[-1], case.run / "certificate.json"
    bounds = json.loads(file.read_text(encoding="utf-8"))["per_branch"] if file.exists() else {}
    return Result(
        nats=last["val/nats"],
        certified=max(bounds.values(), default=None),
        recovered=last.get("inverse/characters_recovered"),
    )


def summarise(rows: Rows[Case, Result]) -> Summary:
    """Every variant beside the unchanged model."""
    unchanged = next(result.nats for case, result in rows if case.variant == NOTHING)
    more = {
        "bpc": lambda case, result: result.nats / math.log(2),
        "difference": lambda case, result: result.nats - unchanged,
        "changes": lambda case, result: VARIANTS[case.variant],
    }
    back = [result.recovered == 1 for _, result in rows if result.recovered is not None]
    words = f"{sum(back)} of {len(back)} certified models give every character back"
    return Summary(table(rows, ["variant"], more), [(all(back) if back else None, words)])


STUDY = program(Study(Options, Case, Result, cases, measure, summarise))
