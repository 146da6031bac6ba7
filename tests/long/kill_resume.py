"""``python -m tests.long.kill_resume``: hundreds of runs, killed and continued, bit for bit.

Every run trains over three epochs, is killed with SIGKILL one to four times at random times and
places, is continued by the same command, and is compared with the run that nobody disturbed: every
number of every row but clocks as float.hex, weights, optimiser, random generators, monitor.
"""

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path

from tests.support.kills import MODELS, kill_and_resume, undisturbed
from tests.support.small_runs import write_text
from tests.support.zygote import Zygote


def main() -> int:
    """Run, print progress and a summary; 1 if any run differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    chosen = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="invformer-kills-"))
    write_text(root)
    zygote = Zygote(root)
    began = time.monotonic()
    runs = kills = differing = 0
    try:
        seconds = undisturbed(zygote, root)
        while runs < chosen.runs and time.monotonic() - began < 60 * chosen.minutes:
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
