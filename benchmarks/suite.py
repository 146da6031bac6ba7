"""Which cases are measured, and what of each."""

from dataclasses import dataclass

from benchmarks.models import Case

# Width and depth as in nanoGPT's character-level runs, where not varied.
WIDTH, LAYERS, HEADS = 128, 4, 4
CHARACTERS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True)
class Suite:
    """Cases and how long to measure each.

    Attributes:
        cases: sizes, smallest first.
        seconds: per case and task.
    """

    cases: tuple[Case, ...]
    seconds: float


def sized(device: str, seq_len: int, d_model: int = WIDTH, num_layers: int = LAYERS) -> Case:
    """A case with as many windows as make a step of the usual number of characters."""
    heads = HEADS if d_model < 384 else d_model // 64
    return Case(seq_len, d_model, num_layers, heads, max(1, CHARACTERS[device] // seq_len))


def suite(name: str, device: str) -> Suite:
    """``quick`` (about a minute), ``default`` (half an hour on two cores) or ``full``."""
    if name == "quick":
        return Suite((Case(32, 32, 2, 2, 4),), seconds=0.5)
    lengths = [64, 256, 1024, 4096]
    widths = [(256, 4), (384, 6)]
    depths = [2, 8]
    seconds = 25.0
    if name == "full":
        lengths, widths = (
            [64, 128, 256, 512, 1024, 2048, 4096, 8192],
            [*widths, (768, 4), (1024, 4)],
        )
        seconds = 60.0
    cases = [sized(device, seq_len) for seq_len in lengths]
    cases += [sized(device, 256, num_layers=depth) for depth in depths]
    cases += [sized(device, 256, width, depth) for width, depth in widths]
    # What is paid once a step, such as normalisation, weighs less the larger the batch.
    cases.append(Case(256, 384, 6, 6, 4 * CHARACTERS[device] // 256))
    return Suite(tuple(cases), seconds)
