"""What an evaluation makes of checkpoints and of texts that go up and come back."""

import math
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from invformer.data.corpora import read_corpus
from invformer.errors import CertificateViolation, NonFiniteError, StorageError
from invformer.evaluation.inversion import round_trip
from invformer.evaluation.lipschitz import measured_branches
from invformer.report.page import keep
from invformer.report.table import print_table
from tests.support.builders import VOCAB, contractive_model, random_tokens, trained_a_little
from tests.support.saved_runs import SUMS, Saved, evaluated

QUICK = ("evaluate.inversion_sequences=0", "evaluate.lipschitz_sequences=0")
pytestmark = pytest.mark.usefixtures("single_precision")


@pytest.mark.parametrize("correction", [1.9, 1e30])
def test_a_branch_above_its_target_ends_an_evaluation(tmp_path, correction: float) -> None:
    saved = Saved(tmp_path)
    saved.model.stack.blocks[0].attention.branch.correction.fill_(correction)
    with pytest.raises(CertificateViolation, match=r"block_00/attention has the bound .* target"):
        saved.evaluated()


def test_a_branch_that_only_a_cast_put_above_its_target_is_shrunk(tmp_path, caplog) -> None:
    saved = Saved(tmp_path, "trainer.precision=bf16-mixed")
    saved.model.stack.blocks[0].feed_forward.branch.correction.fill_(1.003)
    certificate = saved.evaluated().certificate
    assert certificate.dtype == "bfloat16"
    assert all(b <= certificate.targets[n] for n, b in certificate.per_branch.items())
    assert "block_00/feed_forward was" in caplog.text


def test_weights_whose_logits_are_not_finite_end_an_evaluation(tmp_path) -> None:
    saved = Saved(tmp_path)
    saved.model.head.weight.data.fill_(3e38)
    with pytest.raises(NonFiniteError, match=r"nats per character on data\.split=val"):
        saved.evaluated()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_model_is_scored_in_the_arithmetic_it_was_trained_in(tmp_path, precision: str) -> None:
    saved = Saved(tmp_path, f"trainer.precision={precision}")
    report = saved.evaluated(*QUICK)
    assert report.precision == precision
    model = saved.model.eval()
    tokens = saved.vocabulary.encode(read_corpus(saved.config.data).split("val")).long()
    windows = tokens[: len(tokens) // 16 * 16].view(-1, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, precision == "bf16-mixed"):
        inner = model(windows)[:, :-1].log_softmax(-1)
    expected = -inner.gather(-1, windows[:, 1:, None]).double().mean().item()
    # The first character of each window and the last, shorter one differ.
    assert report.nats == pytest.approx(expected, rel=0.05)


def test_the_split_that_is_asked_for_is_the_one_that_is_scored(tmp_path) -> None:
    saved = Saved(tmp_path)
    corpus = read_corpus(saved.config.data)
    quick = (*QUICK, "evaluate.stride=5")
    nats = {saved.evaluated(*quick).nats}
    for split in ("train", "test", "val"):
        report = evaluated(tmp_path, f"data.split={split}", *quick)
        assert report.num_characters == len(corpus.split(split))
        assert report.data.split == split
        nats.add(report.nats)
    assert len(nats) == 3


@pytest.mark.parametrize(("apart", "unknown"), [(0.5, 1e10), (1e-4, 1e7), (3e-45, 0)])
def test_no_checkpoint_has_a_wrong_proof(tmp_path, apart: float, unknown: float) -> None:
    torch.set_flush_denormal(True)
    saved = Saved(tmp_path, "model=contractive_bounded")
    table = saved.model.embedding.token.weight.data
    away = torch.zeros(table.shape, dtype=torch.float64)
    away[:, 0] = apart * torch.arange(len(table))
    away[0, 1] = unknown
    table.copy_(away)
    inversion = saved.evaluated(
        "evaluate.lipschitz_sequences=0", "evaluate.inversion_sequences=4"
    ).inversion
    torch.set_flush_denormal(False)
    assert inversion.characters_proven <= inversion.characters_recovered
    if unknown > 1:
        assert inversion.characters_recovered == 1


def test_a_full_disk_does_not_take_the_table(tmp_path, command, monkeypatch, capsys) -> None:
    Saved(tmp_path).save()
    full = StorageError("evaluation.json: cannot be written (No space left on device)")
    monkeypatch.setattr("invformer.report.page.write_json", Mock(side_effect=full))
    assert command("evaluate", *[f"checkpoint={tmp_path}"] * 2, *QUICK) == 7
    shown = capsys.readouterr()
    assert shown.out.count("val bpc") == 2
    assert "written to" not in shown.out
    assert "No space left" in shown.err


def test_another_text_leaves_the_earlier_evaluation_untouched(tmp_path, capsys) -> None:
    saved = Saved(tmp_path)
    latest = tmp_path / "evaluation.json"
    own, _ = keep(saved.evaluated(), latest)
    before = latest.read_bytes()
    assert own == tmp_path / "evaluation" / "text_file-val-3.json"
    assert own.read_bytes() == before
    (tmp_path / "other.txt").write_text(SUMS.replace("is", "ïs"))
    report = evaluated(tmp_path, f"data.path={tmp_path / 'other.txt'}", "data.split=all")
    other, _ = keep(report, latest)
    assert re.fullmatch(r"text_file-[0-9a-f]{8}-all-3\.json", other.name)
    assert latest.read_bytes() == before
    assert report.num_characters == len(SUMS)
    print_table(report)
    said = capsys.readouterr().out
    rate = f"{SUMS.count('is') / len(SUMS):.1%}"
    assert f"{rate} of the text is unknown to this vocabulary" in said
    assert "of the symbols recovered" in said


def test_the_table_opens_with_the_result_and_marks_empty_numbers(tmp_path, capsys) -> None:
    report = Saved(tmp_path).evaluated()
    assert re.fullmatch(
        r".*/step-00000003: evaluating [\d,]+ characters of text_file, val\n",
        capsys.readouterr().out,
    )
    assert report.certificate
    assert report.inversion
    vast = replace(
        report,
        certificate=replace(report.certificate, total=1e6),
        inversion=replace(report.inversion, error_bound=1e6),
    )
    print_table(vast)
    short = capsys.readouterr().out
    head = short.split("\n\n")[0].splitlines()[1:]
    assert [line.split("  ")[1] for line in head] == [
        "val bpc", "every branch proven", "inversion", "largest local estimate"
    ]  # fmt: skip
    assert short.count("1.00e+06, not informative") == 2
    assert "frobenius" not in short
    print_table(report, verbose=True)
    assert "\n  weighted frobenius " in capsys.readouterr().out


def test_the_proof_is_capped_by_characters_times_symbols_and_says_so(tmp_path, capsys) -> None:
    saved = Saved(tmp_path)
    limit = 2 * 5 * saved.vocabulary.size
    words = ("evaluate.inversion_sequences=2", f"evaluate.proof_limit={limit}")
    report = saved.evaluated("evaluate.lipschitz_sequences=0", *words)
    inversion = report.inversion
    assert inversion.characters_tried == 2 * 5
    assert inversion.characters_proven == 10 / inversion.num_characters
    assert [text.marks for text in inversion.texts] == ["✓" * 5 + "·" * 11] * 2
    print_table(report)
    assert "the proof tried 10 of 32 (evaluate.proof_limit)" in capsys.readouterr().out


def test_a_bound_stands_beside_the_estimate_of_its_own_branch() -> None:
    model = contractive_model(certificate="causal").double().eval()
    for place, (_, branch) in enumerate(model.stack.branches()):
        branch.correction.fill_(1 - 0.1 * place)
    report = measured_branches(model, random_tokens(1), 2)
    for norm, rows in report.items():
        diagonal = norm == "diagonal_block"
        for name, branch in model.stack.branches():
            bound = branch.causal_bound() if diagonal else branch.lipschitz_bound(norm)
            assert rows[name].bound == bound
        assert len({row.bound for row in rows.values()}) == len(rows)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("certificate", ["token_max", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_character_is_proven(dtype: torch.dtype, certificate: str, bounded: bool) -> None:
    model = trained_a_little(contractive_model(0.7, certificate, bounded=bounded)).eval()
    tokens = named_tokens(4)
    trip = round_trip(model, tokens, dtype)
    assert trip.certificate.dtype == trip.reconstruction().dtype == str(dtype)[6:]
    assert torch.equal(trip.decoded, tokens)
    proof = trip.proof()
    assert proof.proven.all()
    assert 0 < proof.distance.max() < proof.radius.min() < proof.margin.min()
    if certificate == "causal":
        assert trip.reconstruction().error_bound == math.inf


def named_tokens(batch: int) -> torch.Tensor:
    """Random symbols without the unknown one."""
    return random_tokens(batch).clamp(min=1)


def test_a_proven_character_that_is_wrong_is_a_violated_certificate() -> None:
    model = trained_a_little(contractive_model()).eval()
    tokens = named_tokens(2)
    wrong = tokens.clone()
    wrong[1, 3] = wrong[1, 3] % (VOCAB - 1) + 1
    trip = replace(round_trip(model, wrong, torch.float64), tokens=tokens)
    assert trip.reconstruction().characters_recovered == 1 - 1 / tokens.numel()
    with pytest.raises(CertificateViolation, match="character 3 of sequence 1"):
        trip.proof()
