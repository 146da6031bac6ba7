"""python -m benchmarks.recipes: a training step of nanoGPT's CPU size by four recipes, in turns.

Our model, its twin with dot products, both as their experiments train them, and a plain model under
AdamW as nanoGPT trains its own: about as many parameters, the same batch, one thread. Times are of
the processor, without what other programs take. Unlike the other benchmarks this one reads
configurations, so it needs the whole project installed.
"""

import time
from pathlib import Path

import torch

from benchmarks.arguments import Parser
from benchmarks.models import VOCABULARY, Case
from benchmarks.plain import PlainTransformer
from benchmarks.run import environment, write
from benchmarks.tasks import Training, Work
from benchmarks.timing import Spread, in_turns, paired
from invformer.assemble.model import build_model
from invformer.config.load import load_config
from invformer.kernels.host import keep_freed_memory
from invformer.numerics.precision import denormals_flushed
from invformer.training.optimizers import build_optimizer

CPU = torch.device("cpu")
CASE = Case(seq_len=64, d_model=128, num_layers=4, num_heads=4, batch_size=12)
RECIPES = {
    "contractive_bounded, strictly causal": ["experiment=nanogpt_cpu_causal"],
    "the same, eight heads, width 128": [
        "experiment=nanogpt_cpu_causal", "model.num_heads=8", "model.d_model=128",
        "model.d_ff=520",
    ],
    "dot product": [
        "experiment=nanogpt_cpu", "model=dot_product", "model.num_heads=8", "optim.muon_lr=1e-2",
    ],
}  # fmt: skip


def recipe(words: list[str], probe_length: int | None = None) -> Training:
    """The training step that a configuration describes."""
    config = load_config(words)
    torch.manual_seed(0)
    model = build_model(config.model, len(VOCABULARY), CASE.seq_len)
    step = Training(model, CASE, "float32", probe_length)
    model.initialise(step.inputs)
    step.optimizer = build_optimizer(model, config.optim)
    return step


def steps() -> dict[str, Training]:
    """Every recipe's step, and ours with the monitor that it has by default."""
    found = {name: recipe(words) for name, words in RECIPES.items()}
    ours = next(iter(RECIPES))
    found[f"{ours}, monitored"] = recipe(RECIPES[ours], probe_length=CASE.seq_len)
    sizes = CASE.seq_len, CASE.d_model, CASE.num_heads, CASE.num_layers
    torch.manual_seed(0)
    found["plain"] = Training(PlainTransformer(len(VOCABULARY), *sizes), CASE, "float32")
    return found


def main() -> None:
    """Measure, print, and write results/recipes.json."""
    parser = Parser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/recipes.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with denormals_flushed():
        work = steps()
        times = in_turns(dict[str, Work](work), args.seconds, CPU, time.process_time)
    rows = [
        {
            "recipe": name,
            "parameters": sum(p.numel() for p in work[name].model.parameters()),
            "milliseconds": Spread.of([1e3 * t for t in found]).to_list(),
            "times_as_long_as_plain": paired(found, times["plain"]).to_list(),
        }
        for name, found in times.items()
    ]
    write({"environment": environment(1), "rows": rows}, args.out)
    for row in rows:
        print(*row.values(), sep=" | ")


if __name__ == "__main__":
    main()
