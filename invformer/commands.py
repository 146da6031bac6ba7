"""The commands: train, evaluate, sample, invert, export, workspace. Each parses, builds and calls.

Heavy imports stand inside the functions: a mistyped command line is answered before torch loads.
"""

import glob
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from invformer import __version__
from invformer.config.load import parse_or_exit
from invformer.config.schema import DataConfig, TrainConfig
from invformer.config.section import Root, suggestion
from invformer.config.trained import (
    EvaluateConfig,
    ExportConfig,
    InvertConfig,
    SampleConfig,
    WorkspaceConfig,
    is_hub_name,
)
from invformer.errors import (
    CertificateViolation,
    CheckpointError,
    ConfigurationError,
    DataError,
    Stopped,
    StorageError,
)
from invformer.processes.console import outlive_console, printable
from invformer.processes.exit import guarded, raised_signals, stop_on_signals
from invformer.processes.ranks import end_with_launcher, is_rank

Config = TypeVar("Config", bound=Root)
STDIN = "standard input"
# How often OpenMP's threads look whether others are done before they sleep. With its own 300,000
# commands take ten times as long while other programs compute.
SPINS = "10000"


def run(
    schema: type[Config], work: Callable[[Config], None], argv: Sequence[str] | None = None
) -> None:
    """Parse a command line, do the work, and end the program with its exit code."""
    outlive_console(is_all=schema in (SampleConfig, InvertConfig))
    stop_on_signals()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # is read when torch is loaded
    words = sys.argv[1:] if argv is None else argv
    config = parse_or_exit(words, schema)
    debug = "--debug" in words or (isinstance(config, TrainConfig) and config.run.debug)

    def guarded_work() -> None:
        require_paths(config)
        work(config)

    raise SystemExit(guarded(guarded_work, debug))


def require_paths(config: Root) -> None:
    """Raise CheckpointError or DataError for a mistyped path, before torch is loaded."""
    named = getattr(config, "checkpoint", getattr(config, "init_from", None)) or []
    for checkpoint in [named] if isinstance(named, str) else named:
        if is_missing(checkpoint) and not is_hub_name(checkpoint):
            raise CheckpointError(
                f"{checkpoint:.200} does not exist: name a run folder or a checkpoint in it"
            )
    text = getattr(getattr(config, "data", None), "path", None)
    if text == "-":
        raise DataError(
            "data.path: - is standard input, which is read only once; a run reads its text again "
            "when it is continued: save it to a file"
        )
    if text and is_missing(text):
        raise DataError(f"{text:.200}: no such file or folder; check data.path")
    if not text or is_rank() or Path(text).expanduser().is_fifo():
        return
    from invformer.data.corpora import read_corpus, read_local

    if isinstance(config, TrainConfig):
        read_corpus(config.data)  # decodes it
    elif isinstance(config, EvaluateConfig) and config.data.name:
        read_local(DataConfig(name=config.data.name, path=text), text)


def is_missing(path: str) -> bool:
    """Whether nothing has this path or pattern."""
    here = os.path.expanduser(path)
    return not os.path.lexists(here) and not glob.glob(here, recursive=True)


def train(config: TrainConfig) -> None:
    """Fit, in this process or in several."""
    if is_rank():
        end_with_launcher()
    elif config.trainer.devices > 1:
        from invformer.processes.launcher import launch
        from invformer.runs.machine import refuse_missing_devices

        refuse_missing_devices(config.trainer)
        launch(config.trainer.devices)
        return
    else:
        print(f"{config.model.name} on {config.data.name}; loading PyTorch", flush=True)
    from invformer.kernels.host import keep_freed_memory, leave_new_memory_unfilled
    from invformer.numerics.precision import denormals_flushed
    from invformer.training.build import build_run
    from invformer.training.fit import fit

    keep_freed_memory()
    leave_new_memory_unfilled()
    with denormals_flushed():
        fit(build_run(config))


def evaluate(config: EvaluateConfig) -> None:
    """Load, measure, report; compare if there are several."""
    from invformer.processes.bar import Bar

    with Bar(desc="loading PyTorch"):
        from invformer.evaluation.evaluate import evaluate
        from invformer.kernels.host import keep_freed_memory
        from invformer.report.page import keep, keep_comparison
        from invformer.report.table import print_comparison, print_table, summary_values
        from invformer.trained.model import opened
        from invformer.trained.opening import find_checkpoint

    keep_freed_memory()
    reports, paths, unsaved = [], [], None
    for source in config.checkpoint:
        with Bar(desc=f"loading {source}"):
            checkpoint = find_checkpoint(source)
            model = opened(checkpoint, "cpu")
        given = model.network, model.vocabulary, model.config, checkpoint
        report = evaluate(*given, replace(config, checkpoint=[source]))
        latest = checkpoint.evaluation
        reports.append(report)
        try:
            path, page = keep(report, latest)
            says = f"written to {path} and {page}"
            paths.append(path)
        except StorageError as error:  # a full disk, or another's folder, takes no measurement away
            unsaved = error
            says = f"not written: {error}"
        print_table(report, config.verbose)
        print(says)
        if report.wandb and report.data.same_as_training:
            from invformer.runs.wandb_logger import add_to_summary

            add_to_summary(latest.parent, summary_values(report), report.wandb)
    if len(reports) > 1:
        print_comparison(reports)
        if paths:
            print(f"written to {keep_comparison(reports, paths[0].parent)}")
    if unsaved is not None:
        raise unsaved


def sample(config: SampleConfig) -> None:
    """Continue a prompt, character by character."""
    from invformer.processes.bar import Bar

    with Bar(desc="loading PyTorch and the model"):
        from invformer.trained.model import load

        model = load(config.checkpoint, config.device)
    seed = config.seed
    for prompt in (
        prompts(config.prompt == "-") if config.prompt in (None, "", "-") else [config.prompt]
    ):
        for _ in range(config.num_samples):
            characters = model.stream(
                prompt, config.length, temperature=config.temperature,
                top_k=config.top_k, top_p=config.top_p, seed=seed,
            )  # fmt: skip
            first = next(characters)  # warns of unknown characters before anything is printed
            for text in chain([prompt, first], characters):
                print(printable(text), end="", flush=True)
            print("\n---" if config.num_samples > 1 else "")
            seed += 1


def prompts(is_piped: bool) -> Iterator[str]:
    """What a person types until Ctrl-D; a pipe's whole text; a newline if there is neither."""
    if is_piped or sys.stdin is None or not sys.stdin.isatty():
        yield read_text() or "\n"
        return
    import readline  # noqa: F401  # history and editing for input()

    while True:
        try:
            if prompt := input("prompt> "):
                yield prompt
        except EOFError:
            print()
            return


def invert(config: InvertConfig) -> None:
    """Encode a text or read its states, perturb them, and recover the text."""
    text = None
    if not config.states:
        text = read_text(config.file) if config.text in (None, "-") else config.text
        if not text:
            raise DataError(f"{config.file or STDIN}: there is no text to invert")
    from invformer.processes.bar import Bar

    with Bar(desc="loading PyTorch and the model"):
        from invformer.report.recovered_text import Shown
        from invformer.trained.model import joined, load
        from invformer.trained.states import perturb, read_states, write_states

        model = load(config.checkpoint, config.device)
    z = model.encode(text) if text is not None else read_states(str(config.states))
    damaged = config.noise > 0 or config.bits is not None
    rounding = model.assumed_rounding(z, text) if damaged else None
    z, known = perturb(z, config.noise, config.bits, config.seed, rounding)
    if config.save_states:
        write_states(z, config.save_states)
    given = None if text is None else model.vocabulary.symbols_of(text)
    shown, stopped = Shown(model.vocabulary, given, len(z)), None
    start = time.perf_counter()
    try:
        with raised_signals():
            model.invert(z, **known, prove=config.prove, watch=shown)
    except Stopped as error:
        stopped = error
    finally:
        shown.finish()
    seconds = time.perf_counter() - start
    if not shown.windows:
        assert stopped is not None
        raise stopped
    found = joined(model.vocabulary, shown.windows.values())
    symbols = zip(given or found.symbols, found.symbols, found.proven, strict=stopped is None)
    if not damaged and any(sure and a != b for a, b, sure in symbols):
        raise CertificateViolation("a proven character is wrong: a bug in invformer")
    print(*shown.conclusion(found, config.prove, rounding, seconds), sep="\n", flush=True)
    if stopped:
        raise stopped


def read_text(path: str | None = None) -> str:
    """The text of a file or of standard input, without a byte order mark; raises DataError."""
    try:
        if path not in (None, "-"):
            content = Path(os.path.expanduser(path)).read_bytes()
        else:
            content = b"" if sys.stdin is None else sys.stdin.buffer.read()  # None: it is closed
    except OSError as error:
        raise DataError(f"{path or STDIN}: {error.strerror}") from None
    from invformer.data.corpora import decoded

    return "".join(decoded(Path(STDIN if path in (None, "-") else path), [content], "utf-8-sig"))


def export(config: ExportConfig) -> None:
    """Write a model to a folder that can be shared, and upload it if asked to."""
    from invformer.processes.bar import Bar
    from invformer.runs.files import require_new_folder

    require_new_folder(Path(os.path.expanduser(config.out)))

    with Bar(desc="loading PyTorch and the model"):
        from invformer.trained.export import upload
        from invformer.trained.model import load

        model = load(config.checkpoint, "cpu")
    model.export(config.out, name=config.hub, bits=config.bits)
    print(f"written to {config.out}; load it with invformer.load({config.out!r})")
    if config.hub:
        print(f"uploaded to {upload(Path(config.out), config.hub)}")


def workspace(config: WorkspaceConfig) -> None:
    """Save a view of a W&B project."""
    from invformer.runs.workspace import save

    save(config)


COMMANDS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "train": (TrainConfig, train),
    "evaluate": (EvaluateConfig, evaluate),
    "sample": (SampleConfig, sample),
    "invert": (InvertConfig, invert),
    "export": (ExportConfig, export),
    "workspace": (WorkspaceConfig, workspace),
}


def main() -> None:
    """``invformer COMMAND key=value ...``"""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        print(f"invformer {__version__}")
    elif name in ("-h", "--help"):
        print(f"usage: invformer {'|'.join(COMMANDS)} key=value ... [--help]\n       --version")
    elif name in COMMANDS:
        run(*COMMANDS[name], sys.argv[2:])
    else:
        hint = suggestion(name, COMMANDS, f"there are {', '.join(COMMANDS)}")
        error = ConfigurationError(f"unknown command {name!r:.60}: {hint}")
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code)
