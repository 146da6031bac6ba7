"""Studies of losses: which runs are compared, which of them count, and the verdicts."""

import math
import re
from dataclasses import replace
from typing import get_args

import pytest
import torch

from invformer.assemble.model import build_model
from invformer.config.load import load_config
from invformer.config.schema import TrainConfig
from invformer.nn.coupling import CouplingBlock
from invformer.nn.residual import InvertibleBlock, InvertibleResidual
from studies import ablation, at_size, depth_stability, equal_time, kinds, price, study
from studies.report import Summary
from tests.support.processes import ROOT

Row = tuple[kinds.Case, kinds.Result]


def row(kind: str, rate: float, val: float, test: float, seed: int = 0) -> Row:
    case = kinds.Case(kind, 2000, rate, seed, "", "")
    return case, kinds.Result(1, val, test, 1.0, 1.5, 1000, None, None)


def timed_row(kind: str, rate: float, val: float, test: float) -> Row:
    case = equal_time.Case(kind, 100, rate, 0, "", "", 3.0)
    return case, kinds.Result(1, val, test, 1.0, 1.5, None, None, None)


def size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_rate_is_chosen_on_the_validation_split_and_reported_on_the_test_split() -> None:
    rows = [
        row("twin", 0.01, 1.0, 1.20),
        row("certified", 0.01, 1.0, 1.30),
        row("certified", 0.006, 1.1, 1.10),
    ]
    assert [case.rate for case, _ in kinds.chosen(rows, "budget")] == [0.01, 0.01]
    summary = price.summarise(rows)
    assert [line.get("price") for line in summary.table] == [None, pytest.approx(0.1)]
    assert summary.outcome == "not reproduced"
    assert price.summarise([rows[0], row("certified", 0.01, 1.0, 1.205)]).outcome == "reproduced"
    curves = [line.get_label() for line in price.draw(rows).axes[0].lines]
    assert curves == ["twin", "certified", "5-gram"]


def test_the_mean_of_all_seeds_counts() -> None:
    rows = [row("twin", 0.01, 1.0, 1.2), row("twin", 0.01, 1.0, 1.4, seed=1)]
    (line,) = price.summarise(rows).table
    assert (line["test"], line["s"]) == pytest.approx((1.3, 0.1414), abs=1e-4)


def test_nanogpt_has_its_size_ties_its_head_and_decays_matrices_alone() -> None:
    config = load_config([*equal_time.KINDS["nanogpt"].split(), "optim.lr=1e-3"], TrainConfig)
    model, optimiser = equal_time.build(config, 65)
    assert model.head.weight is model.embedding.token.weight
    assert size(model) - 64 * 128 == 795_904  # it says 0.80M
    decays = {p.dim(): g["weight_decay"] for g in optimiser.param_groups for p in g["params"]}
    assert decays == {1: 0.0, 2: 0.1}


def test_kinds_are_of_the_size_of_the_twin_that_they_are_compared_with() -> None:
    sizes = {}
    for kind in kinds.KINDS:
        config = load_config(equal_time.KINDS[kind].split(), TrainConfig)
        sizes[kind] = size(equal_time.build(config, 51)[0])
    twin = sizes[kinds.TWIN]
    assert {kind for kind in sizes if abs(sizes[kind] / twin - 1) > 0.01} == set()


@pytest.mark.parametrize(("loss", "outcome"), [(1.26, "not reproduced"), (1.209, "reproduced")])
def test_a_certified_model_stands_beside_the_best_other_one(loss: float, outcome: str) -> None:
    rows = [
        ("nanogpt_tuned", 0.002, 1.1, 1.1), ("nanogpt_tuned", 0.004, 1.0, 1.2),
        ("twin", 0.01, 1.0, 1.25), ("certified", 0.01, 1.0, loss),
    ]  # fmt: skip
    summary = equal_time.summarise([timed_row(*values) for values in rows])
    assert [line["rate"] for line in summary.table] == [0.004, 0.01, 0.01]
    assert [line["price"] for line in summary.table] == [None, None, pytest.approx(loss - 1.2)]
    assert summary.outcome == outcome


def configuration(name: str) -> TrainConfig:
    return load_config(["experiment=ablation", *ablation.VARIANTS[name].split()])


def test_every_variant_is_a_valid_recipe_and_no_two_are_the_same() -> None:
    base = configuration("nothing")
    found = [configuration(name) for name in ablation.VARIANTS]
    for index, config in enumerate(found):
        assert config not in found[:index]
        assert (config.data, config.trainer, config.run) == (base.data, base.trainer, base.run)


def test_the_models_that_are_compared_have_the_same_size() -> None:
    sizes = {}
    for name in ("nothing", "deep", "dot_product", "kernel", "dot_product_kernel"):
        config = configuration(name)
        sizes[name] = size(build_model(config.model, 65, config.data.seq_len))
    assert all(abs(size / sizes["nothing"] - 1) < 0.03 for size in sizes.values())


def test_a_variant_is_held_against_the_unchanged_model() -> None:
    rows = [
        (ablation.Case("nothing", "", "", 0), ablation.Result(1.1, 0.5, None)),
        (ablation.Case("relu", "", "", 0), ablation.Result(1.5, None, None)),
    ]
    (base, relu) = ablation.summarise(rows).table
    assert ablation.summarise(rows).outcome == "not in the paper"  # nothing was inverted
    for share, outcome in ((1.0, "reproduced"), (0.99, "not reproduced")):
        inverted = [(ablation.Case("nothing", "", "", 0), ablation.Result(1.1, 0.5, share))]
        assert ablation.summarise(inverted).outcome == outcome
    assert (base["nats"], base["bpc"]) == pytest.approx((1.1, 1.1 / math.log(2)))
    assert relu["difference"] == pytest.approx(0.4)


def test_the_page_lists_every_variant() -> None:
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    section = page.split("(ablations)\n")[1]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(ablation.VARIANTS)


RESULT = depth_stability.Result(2.0, 3.0, 5, 1.0, [2.0, 1.0], [1.0, 1.0])


def test_no_better_than_single_characters_counts_as_failed() -> None:
    assert not RESULT.failed
    assert replace(RESULT, val_nats=3.0).failed
    assert replace(RESULT, val_nats=math.nan).failed


@pytest.mark.parametrize(
    ("failed", "outcome"),
    [
        ({"dot_product": {10: 0, 14: 1, 18: 1}, "l2": {18: 0}}, "reproduced"),
        ({"dot_product": {10: 0, 18: 0}, "dot_product_post": {18: 1}, "l2": {18: 0}}, "partly"),
        ({"dot_product": {2: 0, 14: 0, 18: 1}, "l2": {18: 0}}, "partly"),
        ({"dot_product": {2: 1, 18: 1}, "l2": {2: 0, 18: 0}}, "partly"),
        ({"dot_product": {18: 1}, "l2": {18: 0}}, "partly"),
        ({"dot_product": {2: 1, 18: 0}, "l2": {2: 0, 18: 0}}, "not reproduced"),
        ({"dot_product": {18: 1}, "l2": {18: 1}}, "not reproduced"),
        ({"dot_product": {18: 0}, "l2": {18: 0}}, "not reproduced"),
        ({"dot_product": {2: 1}, "l2": {2: 0}}, "not in the paper"),
        ({"dot_product": {18: 1}, "dot_product_post": {18: 1}}, "not in the paper"),
        ({"l2": {18: 1}, "contractive": {18: 0}}, "not in the paper"),
    ],
)
def test_the_verdict_follows_failures(
    failed: dict[depth_stability.Kind, dict[int, bool]], outcome: str
) -> None:
    assert Summary([], *depth_stability.claims(failed)).outcome.startswith(outcome)


@pytest.mark.parametrize("kind", get_args(depth_stability.Kind))
def test_every_kind_has_the_blocks_that_its_name_says(kind: depth_stability.Kind) -> None:
    words = ["d_model=8", "num_heads=2", "seq_len=8", "data.val_characters=200", "depths=[3]"]
    options = load_config([*words, f"kinds=[{kind}]"], depth_stability.Options)
    model = depth_stability.build_kind(*depth_stability.cases(options))
    contractive = kind.startswith("contractive") or kind == "certified"
    blocks = {type(block) for block in model.stack.blocks}
    assert (blocks == {torch.nn.Sequential}) == kind.endswith("_post")
    assert (blocks == {InvertibleBlock}) == contractive
    assert (blocks == {CouplingBlock}) == (kind == "coupling")
    norms = sum(isinstance(m, torch.nn.LayerNorm) for m in model.modules())
    assert (norms == 1) == (contractive or kind.endswith("_bare"))  # that of the head
    radii = {m.input_radius for m in model.modules() if isinstance(m, InvertibleResidual)}
    assert (None not in radii and bool(radii)) == kind.endswith("_ball")
    x = model(torch.zeros(1, 8, dtype=torch.long))
    assert x.isfinite().all()


GPU = torch.device("cuda")


@pytest.fixture
def full(tmp_path) -> at_size.Options:
    """A call on a GPU with both texts."""
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("the <unk> of N \n" * 200)
    (tmp_path / "plays").write_text("ROMEO: it is the east.\n" * 200)
    texts = {"ptb": str(tmp_path), "shakespeare": str(tmp_path / "plays")}
    return at_size.Options(out=str(tmp_path / "out"), **texts)


def test_rates_are_scaled_by_width_and_characters_of_a_step(full) -> None:
    growth = 64 * 256 / (12 * 64)
    for power in (0, 1 / 4, 1 / 2):
        rate = 6e-3 * math.sqrt(160 / 384) * growth**power
        assert at_size.case_of(full, GPU, "ptb", "certified", 6, power).rate == pytest.approx(
            rate, 0.01
        )
    rate = 3e-3 * math.sqrt(128 / 512) * (64 * 288 / (12 * 64)) ** 0.25
    assert at_size.case_of(full, GPU, "kim", "twin", 8, 0.25).rate == pytest.approx(rate, 0.02)


def test_every_run_has_the_size_that_readers_know(full) -> None:
    for case in at_size.runs_of(replace(full, rates=1), GPU):
        config = load_config([word for word in at_size.command(case) if "accelerator" not in word])
        model, data, trainer = config.model, config.data, config.trainer
        sizes = (model.d_model, data.seq_len, data.batch_size, trainer.precision)
        width, length = (512, 288) if case.part == "kim" else (384, 256)
        assert sizes == (width, length, 64, "bf16-mixed")
        assert (model.num_layers, trainer.max_steps) == (case.blocks, case.budget)
        assert model.is_contractive == (case.kind != "twin")
        assert model.dropout == (0.2 if case.part == "shakespeare" else 0)
        assert data.name == ("tiny_shakespeare" if case.part == "shakespeare" else "ptb")
        assert (data.val_fraction, data.test_fraction) == (0.1, 0) or case.part == "kim"
        certificate = {"certified": "causal", "token_max": "token_max", "kim": "kim_entry_max"}
        assert model.certificate == certificate.get(case.kind)


def test_a_later_call_measures_what_is_missing(tmp_path, monkeypatch, capsys) -> None:
    asked: list[str] = []

    def measured(case: at_size.Case, device: torch.device) -> at_size.Result:
        asked.append(f"{case.part} {case.kind}")
        if case.part == "step":
            return at_size.Result(milliseconds=10.0)
        return at_size.Result(val=2.0, scored=2.0 if case.kind == "twin" else 2.25, proven=1.0)

    monkeypatch.setattr(at_size, "STUDY", replace(at_size.STUDY, measure=measured))
    options = at_size.Options(
        out=str(tmp_path / "one"), parts=["ptb"], kinds=["certified", "twin"], rates=1, minutes=1.0
    )
    study.run(at_size.STUDY, options)
    assert asked == ["step certified", "step twin", "ptb certified"]
    assert "not run: ptb, twin, 6 blocks at" in capsys.readouterr().out
    asked.clear()
    (tmp_path / "one").rename(tmp_path / "two")  # which another machine may call otherwise
    last = study.run(at_size.STUDY, replace(options, out=str(tmp_path / "two")))
    assert asked == ["ptb twin"]
    prices = [line["price"] for line in last.table if line["part"] == "ptb"]
    assert prices == [0.25, 0]
    assert last.outcome == "not in the paper"  # a smoke test claims nothing


def test_full_size_on_a_gpu_is_held_to_its_aims(full) -> None:
    steps = [case for case in at_size.steps_of(full, GPU) if case.kind == "one graph"]
    runs = [*at_size.runs_of(replace(full, rates=1, parts=["shakespeare"]), GPU)]

    def outcome(certified: float, alone: float = 4.9, note: str = "") -> str:
        rows = [(case, at_size.Result(milliseconds=alone, note=note)) for case in steps]
        for case in runs:
            nats = 1.44 if case.kind == "twin" else certified
            rows.append((case, at_size.Result(val=nats, scored=nats, recovered=1.0, proven=1.0)))
        return at_size.STUDY.summarise(rows).outcome

    assert outcome(1.445) == "reproduced"
    assert outcome(1.46) == outcome(1.445, alone=5.1) == "partly reproduced"
    assert outcome(1.445, note="RuntimeError") == "not reproduced"
