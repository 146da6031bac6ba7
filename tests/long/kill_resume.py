"""``python -m tests.long.kill_resume``: hundreds of runs, killed and continued, bit for bit.

Every run trains over four epochs, is killed with SIGKILL one to four times at random times and
places, is continued by the same command, and is compared with the run that nobody disturbed: every
number of every row but clocks as float.hex, weights, optimiser, random generators, monitor. Runs
alternate between the contractive model with its monitor, and dot products with dropout.
"""

import argparse
import collections
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tests.kills import FAST, Killed, kill_and_resume
from tests.small_runs import CONTRACTIVE, DROPOUT, options, write_text
from tests.zygote import Zygote

MODELS = {"contractive": CONTRACTIVE, "dropout": DROPOUT}
WARM_UP = 3  # runs from which the usual duration is taken


def usual_seconds(zygote: Zygote, root: Path, name: str) -> float:
    """Seconds that an uninterrupted run takes; the first of them is the reference."""
    seconds = []
    for number in range(WARM_UP):
        began = time.monotonic()
        run = name if number == 0 else f"{name}-again-{number}"
        ended = zygote.run(options(root, run, model=MODELS[name]), before=FAST)
        seconds.append(time.monotonic() - began)
        if ended.code:
            raise SystemExit(ended.stderr)
    return statistics.median(seconds)


def place_of(where: str) -> str:
    """A kill's place without its count; all times are one place."""
    return "by the clock" if where.endswith(" s") else where.rpartition(" ")[0]


def main() -> int:
    """Run, print progress, write a summary; 1 if any run differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=None, help="stop early after so long")
    parser.add_argument("--summary", type=Path, default=None, help="where to write JSON")
    chosen = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="invformer-kills-"))
    write_text(root)
    zygote = Zygote(root)
    began = time.monotonic()
    done: list[Killed] = []
    try:
        seconds = {name: usual_seconds(zygote, root, name) for name in MODELS}
        for number in range(chosen.runs):
            if chosen.minutes is not None and time.monotonic() - began > 60 * chosen.minutes:
                break
            seed = 1_000_003 * chosen.seed + number
            model = random.Random(seed).choice(list(MODELS))
            name = f"run-{number}"
            kills = random.Random(seed + 1).randint(1, 4)
            killed = kill_and_resume(
                zygote, root, name, root / model,
                model=MODELS[model], kills=kills, seconds=seconds[model], seed=seed,
            )  # fmt: skip
            done.append(killed)
            if killed.failure is None:
                shutil.rmtree(root / name)
            else:
                print(f"{name} ({model}, seed {seed}): {killed}", flush=True)
            if number % 25 == 24:
                print(f"{number + 1} runs, {sum(k.kills for k in done)} kills", flush=True)
    finally:
        zygote.close()
    failures = [killed for killed in done if killed.failure is not None]
    summary = {
        "runs": len(done),
        "kills": sum(killed.kills for killed in done),
        "differing": len(failures),
        "seed": chosen.seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "places": dict(
            collections.Counter(place_of(w) for killed in done for w in killed.where).most_common()
        ),
    }
    print(json.dumps(summary, indent=2))
    if chosen.summary is not None:
        chosen.summary.write_text(json.dumps(summary, indent=2) + "\n")
    if failures:
        print(f"the runs that differ are kept in {root}")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
