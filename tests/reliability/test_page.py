"""docs/reliability.md keeps its word: its tests exist, and its job requeues when it should."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from invformer import errors
from tests.zygote import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_every_test_the_page_names_exists() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 30
    assert not {name for name in named if f"def {name}(" not in sources}


def test_every_exit_code_is_in_the_table() -> None:
    codes = set(
        re.findall(r"\d+", "".join(re.findall(r"^Exit codes:(.*?)\n\n", PAGE, re.S | re.M)))
    )
    family = [errors.InvformerError, *errors.InvformerError.__subclasses__()]
    assert {str(error.exit_code) for error in family} <= codes


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (143, True), (4, False)])
def test_the_cluster_job_is_requeued_exactly_when_it_was_stopped(
    tmp_path: Path, code: int, requeued: bool
) -> None:
    for name, body in {"srun": f'echo "$@" > {tmp_path}/called; exit {code}',
                       "scontrol": f'echo "$@" > {tmp_path}/requeued'}.items():  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(ROOT / "docs" / "train.sbatch"), "run.name=first"], env=environment
    )
    assert done.returncode == code
    assert (tmp_path / "called").read_text().endswith("run.name=first\n")
    assert (tmp_path / "requeued").exists() == requeued
