"""Weights & Biases: offline by itself, the right step axis, and never in the way of a run."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import wandb
import yaml
from wandb.sdk.lib.wbauth import write_netrc_auth

from invformer.config.load import load_config
from invformer.config.trained import WorkspaceConfig
from invformer.errors import CertificateViolation
from invformer.processes import contained
from invformer.runs import wandb_logger, workspace
from invformer.runs.run_log import read_rows
from invformer.training.fit import fit
from tests.runs.wandb_records import charts, read_records
from tests.support.processes import ROOT
from tests.support.small_runs import built, fitted, options, write_text

KEY = "0" * 40
IN_ROWS = {"bpc/train": "train/bpc", "bpc/val": "val/bpc"}


@pytest.fixture(autouse=True)
def _patient(monkeypatch) -> None:
    """The machine may be busy."""
    monkeypatch.setattr(wandb_logger, "START_SECONDS", 200.0)


@pytest.fixture
def _no_settings(monkeypatch, tmp_path) -> Iterator[None]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    wandb.teardown()
    yield
    wandb.teardown()


def open_logger(folder: Path, **options: Any) -> Any:
    names = {"mode": "auto", "asked": {}, "defaults": {"run_tags": ["x"]}}
    return wandb_logger.open_wandb(folder, **(names | options))


class FakeRun(SimpleNamespace):
    """A W&B run that does what a test says."""

    def __init__(self, folder: Path, **behaviour: Any) -> None:
        quiet = {"log": lambda row: None, "finish": lambda exit_code: None}
        quiet |= {"offline": True, "dir": str(folder / "files"), "id": "x1"}
        quiet |= dict.fromkeys(("project", "entity", "group", "name"), "a")
        super().__init__(**(quiet | behaviour))


def logger_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **behaviour: Any
) -> wandb_logger.WandbLogger:
    monkeypatch.setattr(wandb_logger, "start", lambda options: FakeRun(folder, **behaviour))
    return open_logger(folder, mode="offline")


@pytest.mark.usefixtures("_no_settings")
def test_without_a_key_the_run_is_offline_and_says_how_to_upload(tmp_path, capsys) -> None:
    logger = open_logger(tmp_path)
    for step in (0, 1, 5, 3):
        logger.log_metrics({"train/bpc": 2.0 + step}, step)
    logger.log_table("sample", ["text"], [["hello"]], step=3)
    logger.finish(7)
    wandb.teardown()  # as at the end of a program: waits until W&B's own process has written all
    assert logger.run.offline
    assert logger.identity["run_id"] is None
    captured = capsys.readouterr()
    assert "wandb sync" in captured.out
    assert captured.err == ""
    found = read_records(tmp_path)
    logged = [
        (row[wandb_logger.STEP], row["bpc/train"]) for row in found.rows if "bpc/train" in row
    ]
    assert logged == [(0, 2.0), (1, 3.0), (5, 7.0), (3, 5.0)]  # each at its step, in any order
    assert any(key.startswith("sample") for row in found.rows for key in row)
    assert found.exit_code == 7


@pytest.mark.usefixtures("single_precision")
def test_the_page_of_a_run_shows_the_result_at_a_glance(tmp_path) -> None:
    """Read back from the records: few charts, which come first; samples; the best checkpoint."""
    write_text(tmp_path)
    size = ("trainer.max_steps=8", "trainer.val_every=4", "trainer.sample_length=20")
    more = ("logger.name=wandb", "logger.mode=offline", "logger.notes=why", *size)
    run = fitted(options(tmp_path, "a", *more))
    wandb.teardown()
    found = read_records(run.directory.path)
    kinds = ("constants", "sample", "recovered", "certificate", "summary")
    views = {f"view/{kind}" for kind in kinds}
    assert charts(found) == wandb_logger.OVERVIEW | views
    assert len(wandb_logger.OVERVIEW | views) <= 20
    names = sorted(set().union(*found.rows))
    first = [name for name in names if not name.startswith("_")][:12]  # a page of wandb leet
    assert set(first) > wandb_logger.OVERVIEW
    assert first[:2] == ["bpc/train", "bpc/val"]
    for row in read_rows(run.directory.metrics):
        same = [r for r in found.rows if r[wandb_logger.STEP] == row["step"]]
        logged = {IN_ROWS.get(k, k).removeprefix("z/"): v for r in same for k, v in r.items()}
        assert row.items() - {("step", row["step"])} <= {
            (k, v) for k, v in logged.items() if k in row
        }
    assert sum("view/sample/path" in row for row in found.rows) == 2
    assert sum("view/constants/filenames" in row for row in found.rows) == 2
    assert found.summary["bpc/val"] == min(r["bpc/val"] for r in found.rows if "bpc/val" in r)
    assert not found.artifacts  # their files would lie outside the folder
    assert any(name.endswith("/weights.safetensors") for name in found.files)
    assert {"command", "commit", "parameters", "model", "optim"} <= found.config.keys()
    assert found.config["parameters"] == sum(p.numel() for p in run.module.parameters())


def test_a_violated_certificate_is_an_alert(folder, monkeypatch) -> None:
    run = built(options(folder, "a", "logger.name=wandb", "logger.mode=offline"))
    violation = CertificateViolation("step 3: block_00: 0.8 exceeds 0.7")
    monkeypatch.setattr(run.trainer, "fit", Mock(side_effect=violation))
    with pytest.raises(CertificateViolation):
        fit(run)
    wandb.teardown()
    found = read_records(run.directory.path)
    assert found.alerts == ["certificate violated"]
    assert found.exit_code == 6


def test_a_client_that_fails_says_so_once_and_the_number_of_lost_calls_at_the_end(
    tmp_path, monkeypatch, capsys
) -> None:
    full_disk = OSError(28, "No space left on device")
    logger = logger_of(tmp_path, monkeypatch, log=Mock(side_effect=full_disk))
    for step in range(5):
        logger.log_metrics({"train/bpc": 1.0}, step)
    logger.finish(0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "log_metrics failed ([Errno 28] No space left on device)" in lines[0]
    assert "5 calls were lost; metrics.jsonl has every row" in lines[1]


def test_a_client_that_hangs_delays_nothing_and_the_end_is_bounded(
    tmp_path, monkeypatch, capsys
) -> None:
    abandoned = []
    monkeypatch.setattr(wandb_logger, "FINISH_SECONDS", 0.3)
    monkeypatch.setattr(contained, "MAX_WAITING", 4)
    monkeypatch.setattr(wandb_logger, "abandon_service", lambda: abandoned.append(1))
    logger = logger_of(tmp_path, monkeypatch, log=lambda row: time.sleep(600))
    for step in range(50):
        logger.log_metrics({"train/bpc": 1.0}, step)
    logger.finish(0)
    assert abandoned
    assert "could not be closed" in capsys.readouterr().err
    assert logger.calls.dropped >= 45


def test_a_start_that_hangs_goes_offline_or_nowhere(tmp_path, monkeypatch, capsys) -> None:
    hanging = ["online"]

    def start(options: dict[str, Any]) -> Any:
        if options["mode"] in hanging:
            time.sleep(600)
        return FakeRun(tmp_path)

    monkeypatch.setattr(wandb_logger, "start", start)
    monkeypatch.setattr(wandb_logger, "ONLINE_SECONDS", 0.1)
    monkeypatch.setattr(wandb_logger, "START_SECONDS", 0.2)
    assert open_logger(tmp_path, mode="online").run.offline
    assert "no answer within 0 s; going offline" in capsys.readouterr().err
    hanging.append("offline")
    assert open_logger(tmp_path, mode="online") is None
    assert "metrics.jsonl has every row" in capsys.readouterr().err


def test_a_run_is_continued_in_its_own_folder_and_a_copy_begins_another_of_its_group(
    tmp_path, monkeypatch, capsys
) -> None:
    start = Mock(return_value=FakeRun(tmp_path, offline=False, url="u"))
    monkeypatch.setattr(wandb_logger, "start", start)
    (tmp_path / "a").mkdir()
    first = open_logger(tmp_path / "a", mode="online").identity
    known = first | {"run_group": "family", "base_url": "http://elsewhere"}
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "a").rename(tmp_path / "moved")
    for name, mode in (("moved", "online"), ("copy", "online"), ("moved", "offline")):
        open_logger(tmp_path / name, mode=mode, earlier=known)
    moved, copy, offline = (call.args[0] for call in start.call_args_list[1:])
    assert (moved["run_id"], moved["resume"]) == ("x1", "allow")
    for other in (copy, offline):
        assert other["run_id"] != "x1"
        assert "resume" not in other
    assert {other["run_group"] for other in (moved, copy, offline)} == {"family"}
    assert not any("base_url" in other for other in (moved, copy, offline))
    assert capsys.readouterr().err.count("is a copy of W&B's run x1") == 1


def test_a_summary_is_added_to_no_run_but_the_online_one(tmp_path, monkeypatch, capsys) -> None:
    summary: dict[str, Any] = {}
    start = Mock(return_value=FakeRun(tmp_path, offline=False, summary=summary))
    monkeypatch.setattr(wandb_logger, "start", start)
    values = {"evaluation/val_bpc": 2.0, "evaluation/bound": float("inf")}
    known = {"run_id": "abc", "project": "p", "entity": None}
    identity = known | {"folder": wandb_logger.place_of(tmp_path)}
    for mode in ("offline", "online"):
        monkeypatch.setattr(wandb_logger, "read_settings", lambda mode=mode: {"mode": mode})
        wandb_logger.add_to_summary(tmp_path, values, identity)
        wandb_logger.add_to_summary(tmp_path, values, known | {"folder": "of another"})
    ((options,), _) = start.call_args_list[0]
    assert start.call_count == 1
    assert (options["run_id"], options["resume"], options["mode"]) == ("abc", "must", "online")
    assert summary == {"evaluation/val_bpc": 2.0}
    start.side_effect = ZeroDivisionError
    wandb_logger.add_to_summary(tmp_path, values, identity)
    assert "the summary of the run stays as it is" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_settings")
@pytest.mark.parametrize(
    ("files", "environment", "asked", "expected"),
    [
        ("", {}, {}, {"mode": "online", "project": "invformer", "run_name": "a"}),
        ("mode = offline", {}, {}, {"mode": "offline"}),
        ("mode = offline", {}, {"mode": "online"}, {"mode": "online"}),
        ("mode = disabled", {}, {}, None),
        ("", {"WANDB_DISABLED": "true"}, {}, None),
        ("", {"WANDB_MODE": "disabled"}, {}, None),
        ("", {"WANDB_MODE": "dryrun"}, {}, {"mode": "offline"}),
        ("", {"WANDB_API_KEY": "too-short"}, {}, {"mode": "offline"}),
        ("project = p\nentity = e", {}, {}, {"project": None, "entity": None}),
        ("project = p", {"WANDB_PROJECT": "q"}, {"project": "r"}, {"project": "r"}),
        ("", {"WANDB_TAGS": "a,b", "WANDB_RUN_GROUP": "g"}, {}, {"run_tags": None}),
        ("", {"WANDB_NAME": "n", "WANDB_NOTES": "why"}, {}, {"run_name": None, "run_notes": None}),
        ("", {"WANDB_NAME": "n"}, {"run_name": "typed"}, {"run_name": "typed"}),
        ("", {"WANDB_DIR": "hers"}, {}, {"root_dir": None}),
        ("", {"WANDB_RUN_ID": "i", "WANDB_RESUME": "allow"}, {}, {"run_id": None, "resume": None}),
    ],
)
def test_what_was_typed_comes_before_wandbs_own_settings_and_these_before_our_defaults(
    tmp_path, monkeypatch, files: str, environment: dict, asked: dict, expected: dict | None
) -> None:
    """None stands for what is left to W&B."""
    for name, value in {"WANDB_API_KEY": KEY, **environment}.items():
        monkeypatch.setenv(name, value)
    for name in ("a", "wandb", "hers"):
        (tmp_path / name).mkdir()
    (tmp_path / "wandb" / "settings").write_text(f"[default]\n{files}\n")
    start = Mock(return_value=FakeRun(tmp_path))
    monkeypatch.setattr(wandb_logger, "start", start)
    open_logger(tmp_path / "a", mode=asked.pop("mode", "auto"), asked=asked)
    assert start.called == (expected is not None)
    for key, value in (expected or {}).items():
        assert start.call_args.args[0].get(key) == value


@pytest.mark.usefixtures("_no_settings")
@pytest.mark.parametrize("server", [None, "https://wandb.example.org:8443"])
def test_a_key_that_wandb_login_keeps_is_found(monkeypatch, server: str | None) -> None:
    assert wandb_logger.read_settings()["mode"] == "offline"
    if server is not None:
        monkeypatch.setenv("WANDB_BASE_URL", server)
    write_netrc_auth(host=server or wandb.Settings().base_url, api_key=KEY)
    wandb.teardown()
    assert wandb_logger.read_settings()["mode"] == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://another.example.org")
    wandb.teardown()
    assert wandb_logger.read_settings()["mode"] == "offline"


@pytest.mark.filterwarnings("ignore")  # of the other library's models
def test_the_view_shows_the_overview_and_every_block() -> None:
    view = workspace.build(load_config(["num_layers=2", "entity=me"], WorkspaceConfig))
    panels = {section.name: section.panels for section in view.sections}
    drawn = {str(getattr(key, "name", key)) for panel in panels["Overview"] for key in panel.y}
    assert drawn == wandb_logger.OVERVIEW
    assert len(panels["Constants"]) == 2
    keys = [str(getattr(key, "name", key)) for key in panels["Constants"][1].y]
    branch = "z/lipschitz_branches/block_01/attention"
    assert keys[:3] == [f"{branch}/{kind}" for kind in ("estimate", "local_bound", "bound")]
    assert "view/sample" in view._to_model().model_dump_json()


def test_every_value_of_the_sweep_is_taken_as_an_agent_writes_it() -> None:
    sweep = yaml.safe_load((ROOT / "configs/sweep.yaml").read_text())
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["metric"]["name"] in wandb_logger.OVERVIEW
    for key, choice in sweep["parameters"].items():
        ends = [choice[name] for name in ("min", "max", "value") if name in choice]
        for value in [*choice.get("values", ()), *ends]:
            load_config([f"--{key}={value}"])
