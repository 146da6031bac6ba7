"""What fits into a GPU's minutes, at which rates, what a later call adds, and what is claimed."""

import math
from dataclasses import replace

import pytest
import torch

from invformer.config.load import load_config
from studies import at_size
from studies.study import run

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
    run(at_size.STUDY, options)
    assert asked == ["step certified", "step twin", "ptb certified"]
    assert "not run: ptb, twin, 6 blocks at" in capsys.readouterr().out
    asked.clear()
    (tmp_path / "one").rename(tmp_path / "two")  # which another machine may call otherwise
    last = run(at_size.STUDY, replace(options, out=str(tmp_path / "two")))
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
