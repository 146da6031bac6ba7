"""Certified kinds of models beside others, as runs of ``train.py``: what their certificate costs.

Of every kind the learning rate with the best mean on the validation split counts; its loss on the
test split is reported, beside that of a 5-gram. A price is what a kind is behind the best of others
at the same budget of training.
"""

import json
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import torch

from studies.report import Figure, Rows, Summary, by, curves, look_of, mean, panels, values
from studies.runs import call, place_of, validations

Kind = Literal[
    "certified", "eight_blocks", "eight_heads", "together", "token_max", "plain", "twin",
    "twin_of_eight_blocks",
]  # fmt: skip
ALLOWED = 0.01  # nats
TWIN = "twin"
KINDS = {
    "certified": "experiment=nanogpt_cpu_causal",  # diagonal blocks ≤ 0.5
    # The same matrices in twice as many branches: half the heads and hidden units in each.
    "eight_blocks": "experiment=nanogpt_cpu_causal model.num_layers=8 model.num_heads=8"
    " model.d_head=10 model.d_ff=148",
    # Half the heads, and so a shorter step.
    "eight_heads": "experiment=nanogpt_cpu_causal model.num_heads=8 model.d_model=128"
    " model.d_ff=520",
    # What helped alone: eight blocks, eight heads at width 128, a larger c.
    "together": "experiment=nanogpt_cpu_causal model.num_layers=8 model.num_heads=8 model.d_head=8"
    " model.d_model=128 model.d_ff=260 model.lipschitz_target=0.9",
    "token_max": "experiment=nanogpt_cpu",  # branches ≤ 0.5
    "plain": "experiment=nanogpt_cpu_causal model.diagonal_scaling=false",  # Euclidean norm
    TWIN: "experiment=nanogpt_cpu model=dot_product model.num_heads=8 model.activation=gelu",
    "twin_of_eight_blocks": "experiment=nanogpt_cpu model=dot_product model.num_heads=8"
    " model.activation=gelu model.num_layers=8 model.d_model=88 model.d_ff=384",
}
QUIET = "logger=none monitor.enabled=false trainer.progress=false trainer.sample_length=0"


@dataclass(frozen=True)
class Case:
    """One run of ``train.py``."""

    kind: str
    budget: int
    rate: float
    seed: int
    words: str
    folder: str

    @property
    def run(self) -> Path:
        """Its folder."""
        return Path(self.folder) / f"{self.kind}-{self.budget}-{self.rate:g}-{self.seed}"


@dataclass(frozen=True)
class Result:
    """Nats of both splits, those of a 5-gram, and what is proven of a certified model."""

    parameters: int
    val: float
    test: float
    val_ngram: float
    test_ngram: float
    passed: int | None  # first validation, in steps, ahead of the 5-gram
    certified: float | None  # largest bound
    proven: float | None  # share of characters at the beginning of the test split


def own_words(case: Case) -> list[str]:
    """Steps, rate, folder and seed of a case, as words of ``train.py``."""
    steps = [f"trainer.max_steps={case.budget}", f"optim.muon_lr={case.rate:g}"]
    return [*steps, *place_of(case)]


def measure(case: Case, device: torch.device) -> Result:
    """Train, or continue, and evaluate on both splits; InvformerError if a command failed."""
    words = f"{KINDS[case.kind]} {case.words}"
    call("train.py", *shlex.split(words), *own_words(case))  # on a GPU too if there is one
    val, test = (evaluated(case, split, device) for split in ("val", "test"))
    ngram, certificate, inversion = val["ngram"]["nats"], test["certificate"], test["inversion"]
    rows = validations(case.run)
    return Result(
        parameters=val["model"]["parameters"],
        val=val["nats"],
        test=test["nats"],
        val_ngram=ngram,
        test_ngram=test["ngram"]["nats"],
        passed=next((row["step"] + 1 for row in rows if row["val/nats"] < ngram), None),
        certified=certificate and max(certificate["per_branch"].values()),
        proven=inversion and inversion["characters_proven"],
    )


def evaluated(case: Case, split: str, device: torch.device) -> dict[str, Any]:
    """The report of ``evaluate.py`` on a split, of the checkpoint that is best on validation."""
    asked = ["evaluate.lipschitz_sequences=0", f"evaluate.device={device.type}"]
    if split == "val":
        asked.append("evaluate.inversion_sequences=0")
    call("evaluate.py", f"checkpoint={case.run}", f"data.split={split}", *asked)
    files = (case.run / "evaluation").glob(f"*-{split}-*.json")
    file = max(files, key=lambda file: file.stat().st_mtime)  # the one just written
    return json.loads(file.read_text(encoding="utf-8"))


def chosen(rows: Rows[Case, Result], x: str) -> Rows[Case, Result]:
    """The rows of every kind at every x whose rate has the best mean on the validation split."""
    found: list[tuple[Case, Result]] = []
    for group in by(rows, "kind", x).values():
        found += min(by(group, "rate").values(), key=lambda same: mean(same, "val"))
    return found


def prices(
    rows: Rows[Case, Result], x: str, others: Collection[str]
) -> dict[tuple[str, float], float]:
    """Nats of the test split by which a kind is behind the best of others at the same x."""
    found: dict[tuple[str, float], float] = {}
    for at, group in by(rows, x).items():
        tests = {kind: mean(same, "test") for kind, same in by(group, "kind").items()}
        level = [nats for kind, nats in tests.items() if kind in others]
        paying = [kind for kind in tests if kind not in others and level]
        found |= {(kind, at): tests[kind] - min(level) for kind in paying}
    return found


def summary_of(rows: Rows[Case, Result], x: str, others: Collection[str], where: str) -> Summary:
    """Every kind and x at its best rate; no price is above what is allowed."""
    same = chosen(rows, x)
    found = prices(same, x, others)
    lines = [
        {x: key[1]} | line_of(group) | {"price": found.get(key)}
        for key, group in by(same, "kind", x).items()
    ]
    findings = [
        (price <= ALLOWED, f"{kind} {price:+.4f} nats behind {where.format(at)}")
        for (kind, at), price in found.items()
    ]
    return Summary(lines, findings)


def line_of(group: Rows[Case, Result]) -> dict[str, Any]:
    """A line of the table: rows that differ in their seeds."""
    tests = values(group, "test")
    case, one = group[0]
    return {
        "kind": case.kind, "budget": case.budget, "rate": case.rate, "parameters": one.parameters,
        "val": mean(group, "val"), "test": fmean(tests),
        "s": stdev(tests) if len(tests) > 1 else None, "5-gram": one.test_ngram,
        "passed": one.passed, "certified": one.certified, "proven": one.proven,
    }  # fmt: skip


def figure_of(rows: Rows[Case, Result], x: str, others: Collection[str], unit: str) -> Figure:
    """Curves of the test split's loss and of prices against ``x``."""
    same = chosen(rows, x)
    figure, (loss, price) = panels(1, 2)
    curves(loss, same, x, "test", ("kind",))
    gaps = sorted(prices(same, x, others).items())
    for index, kind in enumerate(by(same, "kind")):
        if points := [(at, gap) for (name, at), gap in gaps if name == kind]:
            price.plot(*zip(*points, strict=True), label=kind, **look_of(index))
    loss.axhline(rows[0][1].test_ngram, color="0.8", label="5-gram")
    loss.set(ylabel="nats per character of the test split", title="loss")
    price.axhline(0, color="0.5")
    price.axhline(ALLOWED, color="0.8", label=f"limit set beforehand: {ALLOWED}")
    price.set(ylabel=f"nats per character behind the {' or '.join(others)}", title="price")
    for axes in (loss, price):
        axes.set(xscale="log", xlabel=f"{unit}, each with its own schedule")
    return figure
