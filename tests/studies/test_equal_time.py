"""Equal time: what nanoGPT is made of, how minutes become steps, and who is beside whom."""

import json

import pytest

from invformer.config.load import load_config
from invformer.config.schema import TrainConfig
from studies import kinds
from studies.equal_time import KINDS, Case, Options, build, cases, summarise
from studies.kinds import Result, command


def row(kind: str, rate: float, val: float, test: float) -> tuple[Case, Result]:
    return Case(kind, 100, rate, 0, "", "", 3.0), Result(1, val, test, 1.0, 1.5, None, None, None)


def test_nanogpt_has_its_size_ties_its_head_and_decays_matrices_alone() -> None:
    config = load_config([*KINDS["nanogpt"].split(), "optim.lr=1e-3"], TrainConfig)
    model, optimiser = build(config, 65)
    assert model.head.weight is model.embedding.token.weight
    assert sum(p.numel() for p in model.parameters()) - 64 * 128 == 795_904  # it says 0.80M
    decays = {p.dim(): g["weight_decay"] for g in optimiser.param_groups for p in g["params"]}
    assert decays == {1: 0.0, 2: 0.1}


def test_the_kinds_whose_losses_are_compared_are_of_one_size() -> None:
    def size(kind: str) -> int:
        config = load_config(KINDS[kind].split(), TrainConfig)
        return sum(p.numel() for p in build(config, 51)[0].parameters())

    sizes = [size(kind) for kind in kinds.KINDS]
    assert max(sizes) < 1.01 * min(sizes)


def test_minutes_become_steps_of_each_kind_at_the_times_that_the_folder_keeps(tmp_path) -> None:
    seconds = {KINDS["nanogpt"]: 0.05, KINDS["twin"]: 0.1}
    (tmp_path / "seconds.json").write_text(json.dumps(seconds))
    kinds = ["nanogpt", "nanogpt_tuned", "twin"]
    found = cases(Options(kinds=kinds, minutes=[1.0, 2.0], out=str(tmp_path)))
    steps = {(case.kind, case.minutes): case.budget for case in found}
    assert [steps[kind, 1.0] for kind in kinds] == [1200, 1200, 600]
    assert steps["twin", 2.0] == 1200
    assert len({case.run for case in found}) == len(found) == 2 * (1 + 3 + 1)
    assert {"trainer.max_steps=600", "trainer.val_every=600"} <= set(command(found[4]))


@pytest.mark.parametrize(("loss", "outcome"), [(1.26, "not reproduced"), (1.209, "reproduced")])
def test_a_certified_model_stands_beside_the_best_other_one(loss: float, outcome: str) -> None:
    tuned = [row("nanogpt_tuned", 0.002, 1.1, 1.1), row("nanogpt_tuned", 0.004, 1.0, 1.2)]
    summary = summarise([*tuned, row("twin", 0.01, 1.0, 1.25), row("certified", 0.01, 1.0, loss)])
    assert [line["rate"] for line in summary.table] == [0.004, 0.01, 0.01]
    assert [line["price"] for line in summary.table] == [None, None, pytest.approx(loss - 1.2)]
    assert summary.outcome == outcome
