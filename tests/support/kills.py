"""kill -9 at random, and the same command again, until the run is done.

``python -m tests.support.kills`` does it to hundreds of runs of three epochs.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.small_runs import CONTRACTIVE, DROPOUT, difference, options, write_text
from tests.support.zygote import Zygote

FAST = "tests.support.small_runs:without_plots"
MODELS = {"contractive": CONTRACTIVE, "dropout": DROPOUT}
MODULE = "invformer.training.module:CharLanguageModel"
DIRECTORY = "invformer.runs.checkpoint"
# Where a run may kill itself, and how often it comes by there.
PLACES = {
    f"{MODULE}.training_step": 15,
    f"{MODULE}.optimizer_step": 15,
    "invformer.training.module:refresh_normalisers": 16,
    f"{MODULE}.validation_step": 9,
    f"{MODULE}.on_validation_epoch_end": 3,
    "invformer.runs.json_lines:JsonLinesLogger.save": 24,
    "invformer.runs.checkpoint:write_new": 15,
    "invformer.runs.files:sync_folder": 6,
    f"{DIRECTORY}:keep_only": 3,
    "os:rename": 4,
    "os:replace": 4,
    "invformer.training.build:build_callbacks": 1,
}


def undisturbed(zygote: Zygote, root: Path) -> dict[str, float]:
    """Seconds that the run of each model takes, which is left in the folder under its name."""
    seconds = {}
    for name, model in MODELS.items():
        began = time.monotonic()
        ended = zygote.run(options(root, name, model=model), before=FAST)
        seconds[name] = time.monotonic() - began
        assert ended.code == 0, ended.stderr
    return seconds


@dataclass
class Killed:
    """What became of one run."""

    kills: int
    where: list[str]  # places and times, in words
    failure: str | None  # how it differs from the uninterrupted run; None if it does not


def kill_and_resume(
    zygote: Zygote,
    root: Path,
    name: str,
    reference: Path,
    *,
    model: Sequence[str] = DROPOUT,
    kills: int,
    seconds: float,
    seed: int,
) -> Killed:
    """Kill a run several times, let it finish, compare it with one that nobody interrupted.

    Every second kill is by the clock, within the seconds that a run takes; others are at a place
    in the code.
    """
    chance = random.Random(seed)
    arguments = options(root, name, model=model)
    elsewhere = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}
    done = Killed(0, [], None)
    for attempt in range(8 * kills):
        place = chance.choice(list(PLACES))
        count = 1 + int(PLACES[place] * chance.random() ** 2)
        delay = seconds * chance.random()
        by_clock = (attempt + seed) % 2 == 0
        signals = [] if by_clock else [(place, count, int(signal.SIGKILL))]
        ended = zygote.run(
            arguments, signals=signals, environment=elsewhere, before=FAST,
            kill_after=delay if by_clock else None,
        )  # fmt: skip
        if ended.code == -signal.SIGKILL:
            done.kills += 1
            done.where.append(f"{delay:.2f} s" if by_clock else f"{place} {count}")
        elif ended.code != 0:
            done.failure = f"code {ended.code}: {ended.stderr}"
            return done
        if done.kills == kills or ended.code == 0:
            break
    ended = zygote.run(arguments, environment=elsewhere, before=FAST)
    if ended.code != 0:
        done.failure = f"code {ended.code}: {ended.stderr}"
    else:
        done.failure = difference(reference, root / name)
    return done


def main() -> int:
    """Kill and continue hundreds of runs, print what differs and a summary; 1 if any differed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.kills", description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="invformer-kills-"))
    write_text(root)
    zygote = Zygote(root)
    began = time.monotonic()
    runs = kills = differing = 0
    try:
        seconds = undisturbed(zygote, root)
        while runs < chosen.runs:
            seed = 1_000_003 * chosen.seed + runs
            chance = random.Random(seed)
            model, name = chance.choice(list(MODELS)), f"run-{runs}"
            killed = kill_and_resume(
                zygote, root, name, root / model, model=MODELS[model],
                kills=chance.randint(1, 4), seconds=seconds[model], seed=seed,
            )  # fmt: skip
            runs, kills = runs + 1, kills + killed.kills
            if killed.failure is None:
                shutil.rmtree(root / name)
            else:
                differing += 1
                print(f"{root / name} ({model}, seed {seed}): {killed}", flush=True)
    finally:
        zygote.close()
    minutes = (time.monotonic() - began) / 60
    print(f"{runs} runs, {kills} kills, {differing} differ, {minutes:.1f} minutes")
    if not differing:
        shutil.rmtree(root)
    return min(differing, 1)


if __name__ == "__main__":
    raise SystemExit(main())
