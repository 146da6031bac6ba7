"""Folders to share: the same model, nothing that must not be shared, and no harm done by them."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import invformer
from invformer.errors import CertificateViolation, CheckpointError, InvformerError
from invformer.runs.checkpoint import MANIFEST, MODEL, WEIGHTS, read_checkpoint
from invformer.training.module import CharLanguageModel
from tests.runs.hostile import edit_json, edited, first, put, set_key, with_weights
from tests.support.saved_runs import Saved, evaluated

pytestmark = pytest.mark.usefixtures("single_precision")
LOGGER = ("logger.entity=somebody", "logger.notes=secret", "run.root=/home/me")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that was never trained, of a model in the default norm."""
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("run")
    Saved(folder, *LOGGER).save()
    return folder


@pytest.fixture(scope="module", params=[None, 4])
def whole(run, tmp_path_factory, request) -> Path:
    """Its export, with and without rounding."""
    folder = tmp_path_factory.mktemp("whole") / "shared"
    invformer.load(run).export(folder, bits=request.param)
    return folder


@pytest.fixture
def exported(whole, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "shared")


not_rounded = pytest.mark.parametrize("whole", [None], indirect=True)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return invformer.load(path).network.state_dict()


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def test_an_export_has_the_weights_and_exports_again(run, exported, tmp_path) -> None:
    model = invformer.load(exported)
    if "weight_bits" not in model.metadata:
        assert_equal(weights_of(exported), weights_of(run))
    model.export(tmp_path / "again")
    assert_equal(weights_of(exported), weights_of(tmp_path / "again"))
    assert read_checkpoint(str(exported)).is_shared
    (exported / ".gitattributes").touch()  # as on the Hub
    invformer.load(exported)


@not_rounded
def test_an_export_names_no_account_folder_or_run(exported, run, tmp_path) -> None:
    tracked = shutil.copytree(run, tmp_path / "tracked")
    for path in (tracked / "checkpoints").iterdir():
        edit_json(path, MODEL, lambda m: m.update(wandb_run_id="abc123", wandb={"id": "abc123"}))
    text = (exported / MODEL).read_text() + (exported / "README.md").read_text()
    invformer.load(tracked).export(tmp_path / "second")
    text += (tmp_path / "second" / MODEL).read_text()
    assert not [word for word in ("somebody", "secret", "/home/me", "abc123") if word in text]


def test_an_export_of_0_1_is_refused_by_its_version(exported) -> None:
    (exported / MANIFEST).rename(exported / "manifest.json")
    with pytest.raises(CheckpointError, match=r"of invformer 0\.1: export its run again"):
        invformer.load(exported)


def test_the_evaluation_of_a_model_that_was_in_the_folder_before_is_not_taken(
    run, tmp_path, command
) -> None:
    few = ("evaluate.lipschitz_sequences=0", "evaluate.inversion_sequences=0")
    exported = tmp_path / "shared"
    for words in ([], ["bits=4"], ["bits=2"]):
        shutil.rmtree(exported, ignore_errors=True)
        assert command("export", f"checkpoint={run}", f"out={exported}", *words) == 0
        assert invformer.load(exported).evaluation is None
        assert command("evaluate", f"checkpoint={exported}", *few) == 0
        model = invformer.load(exported)
        assert model.evaluation is not None
        model.network.head.weight.data.zero_()
        assert model.evaluation is None


def test_an_export_killed_anywhere_is_completed_later(run, tmp_path, monkeypatch) -> None:
    model, write = invformer.load(run), Path.write_bytes
    for count in range(4):
        left = [write] * count
        monkeypatch.setattr(Path, "write_bytes", lambda *args, left=left: left.pop()(*args))
        with pytest.raises(IndexError):  # nothing handles it, as nothing handles kill -9
            model.export(tmp_path)
        with pytest.raises(CheckpointError):
            invformer.load(tmp_path)
    monkeypatch.undo()
    model.export(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert invformer.load(tmp_path).certificate == model.certificate


ATTACKS: dict[str, Callable[[Path, Path], Any]] = {
    "a flipped bit of the header": put(WEIGHTS, lambda c: c[:9] + bytes([c[9] ^ 4]) + c[10:]),
    "a tensor less": with_weights(lambda w: w.pop(first(w))),
    "a tensor of one entry": with_weights(
        lambda w: w.update({k: w[k].flatten()[:1].clone() for k in w})
    ),
    "a certificate without bounds": edited(MODEL, lambda m: m["certificate"].pop("per_branch")),
    "a certificate that is a list": set_key("certificate", []),
    "a certificate of another format": set_key("certificate.dtype", "int3"),
    "a bound that is text": edited(MODEL, lambda m: m["certificate"]["per_branch"].update(a="b")),
    "a model of gigabytes": edited(
        MODEL, lambda m: m["config"]["model"].update(d_model=20_000, num_heads=2)
    ),
    "a context of gigabytes": set_key("config.data.seq_len", 1_000_000),
    "all of Unicode": set_key("vocabulary.characters", "".join(map(chr, range(1, 0xD800)))),
    "more than Unicode has": set_key(
        "vocabulary.characters", "".join(map(chr, range(0x10000, 0x60000)))
    ),
    "other bits": edited(MODEL, lambda m: m.update(weight_bits=2 if "weight_bits" in m else 5.5)),
}


@pytest.mark.parametrize("attack", [pytest.param(a, id=name) for name, a in ATTACKS.items()])
def test_a_hostile_export_is_refused_in_one_line(
    attack: Callable[[Path, Path], Any], exported
) -> None:
    attack(exported, exported)
    with pytest.raises(InvformerError) as error:
        invformer.load(exported)
    assert error.value.exit_code == 4
    assert "\n" not in str(error.value)


def test_a_certificate_that_the_weights_do_not_have_is_refused(exported) -> None:
    def lower(model: dict[str, Any]) -> None:
        bounds = model["certificate"]["per_branch"]
        bounds[next(iter(bounds))] *= 0.9

    edit_json(exported, MODEL, lower)
    with pytest.raises(CertificateViolation, match="does not hold for the weights"):
        invformer.load(exported)


@not_rounded
def test_a_path_that_an_export_names_is_read_only_if_it_is_the_text_of_the_training(
    exported, tmp_path, run
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("1 and 1 is 2; the password is 3; " * 100)
    quick = ("evaluate.lipschitz_sequences=0", "evaluate.inversion_sequences=0")
    assert evaluated(exported, *quick).data.same_as_training
    assert evaluated(exported, *quick, "data.max_characters=900").ngram
    edit_json(exported, MODEL, lambda m: m["config"]["data"].update(path=str(secret)))
    for more in ((), ("data.max_characters=900",), ("data.split=all",)):
        with pytest.raises(InvformerError, match=r"secret\.txt: not the text .* data\.path=PATH"):
            evaluated(exported, *quick, *more)
    assert not evaluated(exported, *quick, f"data.path={secret}").data.same_as_training


@not_rounded
def test_the_lightning_module_opens_our_folders(run, exported, tmp_path) -> None:
    for source in (run, exported):
        module = CharLanguageModel.load_from_checkpoint(source)
        assert_equal(module.model.state_dict(), weights_of(source))
        assert len(module.configure_optimizers().param_groups) > 1
    with pytest.raises(CheckpointError, match="does not exist"):
        CharLanguageModel.load_from_checkpoint(tmp_path / "nothing")
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    arguments = {"model": module.model, "make_optimizer": module.make_optimizer}
    again = CharLanguageModel.load_from_checkpoint(tmp_path / "own.ckpt", **arguments)
    assert_equal(again.model.state_dict(), module.model.state_dict())


@pytest.mark.filterwarnings("ignore")  # of the tracer, about shapes that become constants
@pytest.mark.parametrize("compiled", ["export", "trace"])
def test_a_trained_network_is_exported_and_traced_by_torch(run, compiled: str) -> None:
    network = invformer.load(run).network
    first, second = torch.randint(1, 10, (2, 2, 16))
    with torch.no_grad():
        if compiled == "export":
            again = torch.export.export(network, (first,)).module()
        else:
            again = torch.jit.trace(network, (first,), check_trace=False)
        torch.testing.assert_close(again(second), network(second))
