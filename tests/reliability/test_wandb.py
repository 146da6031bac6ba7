"""Whole runs beside a W&B server that misbehaves: the same losses, and no secret anywhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.runs.wandb_records import read_records
from tests.support.fake_wandb import FakeServer, refused
from tests.support.processes import python
from tests.support.small_runs import DROPOUT, difference, options, without_plots

KEY = "5ec2e7" * 6 + "abcd"
TOKEN = "hf_5ec2e7secret5ec2e7"


def patient(**seconds: float) -> None:
    """Called in a run before it starts: patient with a busy machine and a server that answers."""
    from invformer.runs import wandb_logger

    without_plots()
    usual = {"SERVER": 60.0, "ONLINE": 90.0, "START": 120.0, "FINISH": 10.0}
    for name, value in (usual | seconds).items():
        setattr(wandb_logger, f"{name}_SECONDS", value)


def impatient() -> None:
    """Likewise, short with the server."""
    patient(SERVER=1.0)


def patient_until_the_end() -> None:
    """Likewise, for a server that is not there any more when the run ends."""
    patient(FINISH=2.0)


@pytest.fixture
def serve() -> Iterator[Callable[[str], FakeServer]]:
    with ExitStack() as servers:
        yield lambda behaviour: servers.enter_context(closing(FakeServer(behaviour)))


def environment(url: str) -> dict[str, str | None]:
    return {"WANDB_API_KEY": KEY, "HF_TOKEN": TOKEN, "WANDB_BASE_URL": url, "WANDB_MODE": None}


def assert_no_secret_in(folder: Path) -> None:
    for path in filter(Path.is_file, folder.rglob("*")):
        content = path.read_bytes()
        assert KEY.encode() not in content, path
        assert TOKEN.encode() not in content, path


SLOW = [pytest.param(behaviour, marks=pytest.mark.slow) for behaviour in ("refuses", "fails")]


@pytest.mark.parametrize("behaviour", [*SLOW, "hangs", "dies"])
def test_a_server_that_misbehaves_changes_no_loss(
    zygote, root, uninterrupted, serve, behaviour: str
) -> None:
    name = f"wandb-{behaviour}"
    server = None if behaviour == "refuses" else serve("ok" if behaviour == "dies" else behaviour)
    zygote.start(
        [*options(root, name, model=DROPOUT), "logger.name=wandb"],
        before=f"{__name__}:{'patient_until_the_end' if behaviour == 'dies' else 'impatient'}",
        environment=environment(refused() if server is None else server.url),
    )
    if behaviour == "dies":
        assert server is not None
        while not (root / name / "metrics.jsonl").exists() and not server.bodies:
            time.sleep(0.02)
        server.close()
    ended = zygote.wait()
    assert ended.code == 0, ended.stderr
    assert difference(uninterrupted["dropout"], root / name) is None
    assert_no_secret_in(root / name)
    if behaviour != "dies":
        assert "going offline" in ended.stderr
        assert "wandb sync" in ended.stdout


@pytest.mark.slow
def test_an_online_run_is_continued_under_its_name(zygote, root, serve) -> None:
    server = serve("ok")
    arguments = [*options(root, "wandb-online", model=DROPOUT), "logger.name=wandb"]
    how = {"before": f"{__name__}:patient", "environment": environment(server.url)}
    place = "invformer.training.module:CharLanguageModel.training_step"
    assert zygote.run(arguments, signals=[(place, 9, 15)], **how).code == 143
    first = names_in(server)
    assert len(first) == 1
    assert zygote.run(arguments, **how).code == 0
    assert names_in(server) == first
    assert any("train/nats" in body for body in server.bodies)
    assert_no_secret_in(root / "wandb-online")


@pytest.mark.slow
def test_an_offline_run_that_went_on_and_was_moved_is_uploaded_whole_and_nothing_before(
    zygote, root, serve, tmp_path
) -> None:
    server = serve("ok")
    (tmp_path / "settings").write_text("[default]\nmode = offline\n")
    told = environment(server.url) | {"WANDB_CONFIG_DIR": str(tmp_path)}
    for steps in (5, 10):
        arguments = options(root, "wandb-moved", f"trainer.max_steps={steps}", model=DROPOUT)
        words = [*arguments, "logger.name=wandb"]
        ended = zygote.run(words, before=f"{__name__}:patient", environment=told)
        assert ended.code == 0, ended.stderr
    assert not server.bodies  # there is a key, but W&B is set to be offline
    moved = (root / "wandb-moved").rename(tmp_path / "moved")
    for number, folder in enumerate(sorted(moved.glob("wandb/offline-run-*"))):
        server.bodies.clear()
        key = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url, "WANDB_MODE": "online"}
        synced = python("-m", "wandb", "sync", str(folder), cwd=root, **key)
        assert synced.returncode == 0, synced.stderr
        sent = "\n".join(server.bodies)
        found = read_records(moved, number)
        assert not found.artifacts
        assert any("weights.safetensors" in name for name in found.files)
        assert all(f"/upload/{name} " in sent for name in found.files)
        assert sent.count("bpc/train") >= 5
        assert [path for path in (folder / "files").rglob("*") if path.is_symlink()] == []


def names_in(server: FakeServer) -> set[str]:
    """The runs a server was asked to open."""
    return {
        body.partition("/files/e/p/")[2].partition("/")[0]
        for body in server.bodies
        if body.startswith("/files/e/p/")
    }


@pytest.mark.slow
def test_a_client_process_that_dies_takes_nothing_with_it(zygote, root, uninterrupted) -> None:
    ended = zygote.run(
        [*options(root, "wandb-core", model=DROPOUT), "logger.name=wandb", "logger.mode=offline"],
        before=f"{__name__}:mortal",
    )
    assert ended.code == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "metrics.jsonl has every row" in ended.stderr
    assert difference(uninterrupted["dropout"], root / "wandb-core") is None


def mortal() -> None:
    """Called in a run before it starts: W&B's own process is killed before the last step."""
    from invformer.runs.wandb_logger import WandbLogger
    from tests.support.small_runs import STEPS

    patient()
    log = WandbLogger.log_metrics

    def call(logger: WandbLogger, metrics: dict[str, float], step: int) -> None:
        from wandb.sdk import wandb_setup

        if step == STEPS // 2:
            wandb_setup.singleton()._connection._proc._process.kill()
        log(logger, metrics, step)

    WandbLogger.log_metrics = call
