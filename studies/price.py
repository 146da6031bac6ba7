"""The price of a certificate against the budget of training, at equal parameters and steps.

Every case is a run of ``train.py`` with a schedule and a folder of its own; an interrupted one
continues where it was. Of every kind and budget the learning rate with the best mean on the
validation split counts; its loss on the test split is reported, beside that of a 5-gram.

Verdict: at every budget each certified kind is at most ``ALLOWED`` nats behind the twin.
"""

from dataclasses import dataclass
from functools import partial

from invformer.config.section import option
from studies.kinds import QUIET, TWIN, Case, Kind, Result, figure_of, measure, summary_of
from studies.runs import words_of
from studies.study import Study, StudyOptions, grid, program


@dataclass(kw_only=True)
class Options(StudyOptions):
    """Train certified models and their unconstrained twin for growing numbers of steps."""

    kinds: list[Kind] = option(["certified", "twin"], "what is trained")
    budgets: list[int] = option([2000, 5000], "optimiser steps", "[1, 1e7]")
    rates: list[float] = option([1e-2, 6e-3], "peak learning rates of Muon", "(0, 10]")
    num_seeds: int = option(1, "seeds, from seed on", "[1, 1e4]")
    val_every: int = option(1000, "steps between validations", "[1, 1e7]")
    overrides: list[str] = option([], "words for train.py in every run, such as data=ptb")


def cases(options: Options) -> list[Case]:
    """One seed after the other, small budgets first."""
    words = " ".join([QUIET, f"trainer.val_every={options.val_every}", *words_of(options)])
    seeds = range(options.seed, options.seed + options.num_seeds)
    return grid(
        Case, options, {"words": words, "folder": str(options.folder / "runs")},
        seed=seeds, budget=options.budgets, rate=options.rates, kind=options.kinds,
    )  # fmt: skip


summarise = partial(summary_of, x="budget", others=[TWIN], where="at {:g} steps")
draw = partial(figure_of, x="budget", others=[TWIN], unit="optimiser steps")
STUDY = program(Study(Options, Case, Result, cases, measure, summarise, draw))
