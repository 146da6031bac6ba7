"""kill -9 at random times and places over three epochs: the same losses, the same final state.

The long version is ``python -m tests.support.kills``.
"""

from pathlib import Path

import pytest

from tests.support.kills import MODELS, kill_and_resume
from tests.support.zygote import Zygote

KILLS = 3


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_again_and_again_ends_as_the_uninterrupted_one(
    zygote: Zygote,
    root: Path,
    uninterrupted: dict[str, Path],
    durations: dict[str, float],
    seed: int,
) -> None:
    model = "dropout" if seed % 2 else "contractive"
    kills = part = 0
    while kills < KILLS:
        killed = kill_and_resume(
            zygote, root, f"killed-{seed}-{part}", uninterrupted[model], model=MODELS[model],
            kills=KILLS - kills, seconds=min(durations.values()), seed=100 * part + seed,
        )  # fmt: skip
        assert killed.failure is None, killed
        kills += killed.kills
        part += 1
