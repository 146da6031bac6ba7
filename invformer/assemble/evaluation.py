"""From a checkpoint to an evaluation report."""

import logging
import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from invformer.assemble.machine import pick_device
from invformer.assemble.run import FORWARD_DTYPE, read_corpus
from invformer.assemble.saved_model import (
    load_model,
    refuse_other_vocabulary,
    trained_configuration,
)
from invformer.config.schema import (
    DataConfig,
    EvaluateConfig,
    EvaluateDataConfig,
    MeasureConfig,
    TrainConfig,
)
from invformer.data.corpora import Corpus
from invformer.data.vocabulary import Vocabulary
from invformer.data.windows import EvaluationWindows
from invformer.errors import CertificateViolation, ConfigurationError, DataError, NonFiniteError
from invformer.evaluation.checkpoint import read_checkpoint
from invformer.evaluation.inversion import InversionReport, invert_text
from invformer.evaluation.likelihood import Likelihood, score
from invformer.evaluation.lipschitz import measured_branches
from invformer.evaluation.ngram import witten_bell_nats
from invformer.nn.branch import frozen_weights
from invformer.nn.certificate import Certificate, certify, enforce
from invformer.nn.transformer import CharTransformer
from invformer.runs.checkpoint import Checkpoint

NGRAM_ORDER = 5
# Characters generated to time it, and texts generated at once.
MOST_GENERATED = 256
TEXTS_TOGETHER = 32
log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def evaluate_checkpoint(config: EvaluateConfig) -> tuple[dict[str, Any], Path]:
    """Load a model and measure everything that is asked for.

    Returns:
        The report as a nested plain dict, and the file it belongs into.
    """
    checkpoint = read_checkpoint(config.checkpoint)
    trained = trained_configuration(checkpoint)
    vocabulary = Vocabulary.from_dict(checkpoint.metadata["vocabulary"])
    device = pick_device(config.evaluate.device, "evaluate.device")
    model = load_model(checkpoint, trained, vocabulary).to(device)
    data = evaluated_data(trained.data, config.data)
    corpus = read_corpus(data)
    text = corpus.split(data.split)
    refuse_other_vocabulary(checkpoint, vocabulary, corpus, text)
    tokens = vocabulary.encode(text)
    seq_len = trained.data.seq_len
    measure = config.evaluate
    stride = measure.stride or seq_len
    if stride > seq_len:
        raise ConfigurationError(
            f"evaluate.stride: {stride} is more than the model's seq_len={seq_len}; characters "
            "between windows would never be scored"
        )
    if len(tokens) < 2:
        raise DataError(f"data.split={data.split}: {len(tokens)} characters, nothing to score")
    certificate = certify_model(model, trained, checkpoint.path)
    windows = EvaluationWindows(tokens, seq_len, stride, measure.batch_size)
    with arithmetic(trained, device):
        likelihood = score(model, windows, device)
    if not math.isfinite(likelihood.nats):
        raise NonFiniteError(
            f"{checkpoint.path}: {likelihood.nats} nats per character on data.split={data.split}: "
            "its weights are finite, but what comes of them is not; evaluate an earlier checkpoint"
        )
    # On the text it has learnt by heart an n-gram is no comparison.
    learnt = None if data.split == "train" else training_text(checkpoint, trained.data, corpus)
    report: dict[str, Any] = {
        "checkpoint": str(checkpoint.path if checkpoint.path.name else checkpoint.path.resolve()),
        "step": checkpoint.step,
        "command": checkpoint.metadata.get("command"),
        "commit": checkpoint.metadata.get("commit"),
        "bpc": likelihood.bpc,
        "nats": likelihood.nats,
        "num_characters": likelihood.num_characters,
        "precision": trained.trainer.precision,
        "context": {
            "seq_len": seq_len,
            "stride": stride,
            "first_character": "uniform over the vocabulary",
            "protocol": "every character of the split once; windows do not see what precedes them",
        },
        "data": {
            "name": corpus.name,
            "split": data.split,
            "source": corpus.source,
            "sha256": corpus.sha256,
            "same_as_training": corpus.sha256 == checkpoint.metadata["data_sha256"],
            "unknown_rate": vocabulary.unknown_rate(text),
        },
        "ngram": None if learnt is None else ngram_baseline(vocabulary, learnt, tokens),
        "certificate": None if certificate is None else certificate.to_dict(),
        "local_lipschitz": {},
        "inversion": None,
        "perf": {"forward_characters_per_second": rate(likelihood.num_characters, likelihood)},
    }
    if measure.lipschitz_sequences:
        probe = first_sequences(tokens, seq_len, measure.lipschitz_sequences).to(device)
        report["local_lipschitz"] = measured_branches(model, probe, measure.lipschitz_steps)
    if certificate is not None and measure.inversion_sequences:
        inversion = invert_split(model, tokens, certificate, measure, device)
        report["inversion"] = asdict(inversion)
        report["perf"] |= inversion_rates(inversion)
    report["perf"] |= {
        "generate_characters_per_second": generation_rate(model, tokens, 1, device),
        f"generate_{TEXTS_TOGETHER}_texts_characters_per_second": generation_rate(
            model, tokens, TEXTS_TOGETHER, device
        ),
    }
    if config.generate.prompt is not None:
        report["sample"] = continue_text(model, vocabulary, config, device)
    return report, checkpoint.evaluation


def evaluated_data(trained: DataConfig, asked: EvaluateDataConfig) -> DataConfig:
    """What training read, with what is asked for in its place; another corpus has another path."""
    given = {name: value for name, value in asdict(asked).items() if value is not None}
    if given.get("name", trained.name) != trained.name:
        given.setdefault("path", None)
    return replace(trained, **given)


def training_text(checkpoint: Checkpoint, trained: DataConfig, corpus: Corpus) -> str | None:
    """What the model learnt from, in whatever corpus it is evaluated; None where it is gone."""
    wanted = checkpoint.metadata["data_sha256"]
    if corpus.sha256 == wanted:
        return corpus.train
    try:
        learnt = read_corpus(trained)
    except DataError:
        return None
    return learnt.train if learnt.sha256 == wanted else None


def ngram_baseline(vocabulary: Vocabulary, text: str, tokens: Tensor) -> dict[str, float]:
    """What an interpolated Witten–Bell n-gram of the model's training text scores on a split."""
    train = vocabulary.encode(text)
    nats = witten_bell_nats(train, tokens, NGRAM_ORDER, vocab_size=vocabulary.size)
    return {"order": NGRAM_ORDER, "nats": nats, "bpc": nats / math.log(2)}


def arithmetic(config: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    """That of training's forward pass, which the certificate is for."""
    if config.trainer.precision == "bf16-mixed":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def certify_model(model: CharTransformer, config: TrainConfig, path: Path) -> Certificate | None:
    """The certificate for the weights as cast for training's forward pass; None for baselines.

    A branch above its target by no more than that cast can do (a run that was stopped between two
    validations) is shrunk, as at a validation.

    Raises:
        CertificateViolation: a branch is above its target by more.
    """
    if not model.is_invertible:
        return None
    dtype = FORWARD_DTYPE[config.trainer.precision]
    certificate = certify(model, dtype=dtype)
    if certificate.holds:
        return certificate
    excess = {n: bound / certificate.targets[n] for n, bound in certificate.per_branch.items()}
    name = max(excess, key=lambda name: excess[name])
    if not excess[name] <= 1 + torch.finfo(dtype).eps:
        raise CertificateViolation(
            f"{path}: {name} has the bound {certificate.per_branch[name]:.6g} in "
            f"{certificate.norm}, its target is {certificate.targets[name]:.6g}: not what training "
            "left; its weights were changed, or this is a bug"
        )
    log.warning("%s: %s was %.2g above its target and is shrunk", path, name, excess[name] - 1)
    return enforce(model, dtype)


def first_sequences(tokens: Tensor, seq_len: int, count: int) -> Tensor:
    """Up to ``count`` consecutive full sequences from the beginning of a split."""
    count = max(1, min(count, len(tokens) // seq_len))
    length = min(seq_len, len(tokens))
    return tokens[: count * length].long().view(count, length)


def invert_split(
    model: CharTransformer,
    tokens: Tensor,
    certificate: Certificate,
    measure: MeasureConfig,
    device: torch.device,
) -> InversionReport:
    """Round trip of the split's first sequences."""
    sequences = first_sequences(tokens, model.seq_len, measure.inversion_sequences).to(device)
    _, report = invert_text(
        model,
        sequences,
        certificate,
        dtype=DTYPES[measure.inversion_dtype],
        method=measure.inversion_method,
        atol=measure.atol,
        timed=True,
    )
    return report


def inversion_rates(report: InversionReport) -> dict[str, float]:
    """Characters per second of the inverse."""
    assert report.seconds_inverse is not None
    return {"inverse_characters_per_second": report.num_characters / report.seconds_inverse}


def rate(num_characters: int, likelihood: Likelihood) -> float:
    """Characters per second of the scoring forward passes."""
    return num_characters / max(likelihood.seconds, 1e-9)


def generation_rate(
    model: CharTransformer, tokens: Tensor, num_texts: int, device: torch.device
) -> float:
    """Characters per second of continuing the split's first ones, up to a window each, at once."""
    starts = torch.arange(num_texts) % len(tokens)
    prompt, length = tokens[starts, None].long().to(device), min(model.seq_len, MOST_GENERATED)
    with frozen_weights(model):
        model.generate(prompt, 1)
        start = time.perf_counter()
        model.generate(prompt, length, temperature=0)[-1, -1].item()  # waits for the device
        return num_texts * length / (time.perf_counter() - start)


def continue_text(
    model: CharTransformer, vocabulary: Vocabulary, config: EvaluateConfig, device: torch.device
) -> str:
    """The prompt and what the model adds to it."""
    generate = config.generate
    assert generate.prompt
    if unknown := vocabulary.unknown_count(generate.prompt):
        log.warning(
            "generate.prompt: %d of %d characters are not in the vocabulary and count as the "
            "unknown symbol", unknown, len(generate.prompt),
        )  # fmt: skip
    prompt = vocabulary.encode(generate.prompt).long().to(device)
    generator = torch.Generator(device=device).manual_seed(generate.seed)
    with frozen_weights(model):
        tokens = model.generate(prompt, generate.length, generate.temperature, generator)
    return vocabulary.decode(tokens.cpu())
