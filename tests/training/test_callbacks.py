"""The checks at every flush: finite numbers, and estimate ≤ local bound ≤ bound."""

import json
from pathlib import Path

import pytest
import torch

from invformer.errors import CertificateViolation, NonFiniteError
from invformer.runs.run_log import RunLog
from invformer.training.callbacks import Flush

BRANCH = "lipschitz_branches/block_00/attention"


def flush_row(folder: Path, row: dict[str, float]) -> None:
    log = RunLog([])
    log.record(7, row)
    probe = torch.tensor([[1, 2, 3]])
    Flush(log, 25, 100, folder / "violation.json", probe).flush()


@pytest.mark.parametrize("key", ["train/nats", "optim/grad_norm"])
def test_a_number_that_is_not_finite_stops_the_run_by_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(NonFiniteError, match=f"step 7: {key} is nan"):
        flush_row(tmp_path, {key: float("nan")})


def test_an_estimate_above_its_bound_stops_the_run_and_keeps_the_evidence(tmp_path: Path) -> None:
    with pytest.raises(CertificateViolation, match=r"step 7: .*attention: estimate 0\.8") as error:
        flush_row(tmp_path, {f"{BRANCH}/estimate": 0.8, f"{BRANCH}/bound": 0.7})
    assert error.value.exit_code == 6
    evidence = json.loads((tmp_path / "violation.json").read_text())
    assert evidence["step"] == 7
    assert evidence["probe"] == [[1, 2, 3]]
    assert evidence["row"][f"{BRANCH}/estimate"] == 0.8


def test_a_local_bound_above_the_bound_is_a_violation_too(tmp_path: Path) -> None:
    row = {f"{BRANCH}/estimate": 0.1, f"{BRANCH}/local_bound": 0.8, f"{BRANCH}/bound": 0.7}
    with pytest.raises(CertificateViolation, match="local_bound"):
        flush_row(tmp_path, row)
