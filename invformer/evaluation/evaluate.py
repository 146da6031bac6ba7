"""Everything that evaluate.py measures, and the files in which it is kept."""

import math
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from invformer.config.load import command_line
from invformer.config.schema import DataConfig, SavedPath, TrainConfig
from invformer.config.trained import EvaluateConfig, EvaluateDataConfig, MeasureConfig
from invformer.data.corpora import read_corpus
from invformer.data.corpus import SPLITS, Corpus
from invformer.data.tokens import tokens_of, unknown_rate
from invformer.data.vocabulary import Vocabulary
from invformer.data.windows import EvaluationWindows, first_sequences
from invformer.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    NonFiniteError,
)
from invformer.evaluation.inversion import round_trip
from invformer.evaluation.likelihood import score
from invformer.evaluation.lipschitz import measured_branches
from invformer.evaluation.marked_text import marks, readable
from invformer.evaluation.ngram import witten_bell_nats
from invformer.nn.proof import certify_trained
from invformer.nn.transformer import CharTransformer
from invformer.numerics.precision import FORWARD_DTYPE
from invformer.processes.bar import Bar
from invformer.proofs.prefix_margins import MarginEvidence
from invformer.runs.checkpoint import Checkpoint
from invformer.runs.machine import pick_device

MOSTLY = 0.5  # a text is mostly unknown if more of it is not in the vocabulary
NGRAM_ORDER = 5
PROMPT, SAMPLE = 16, 200  # characters that are given, and that the model adds
NGRAM_CHARACTERS = 100_000_000  # of the training text, at most
# Characters generated to time it, and texts generated at once.
MOST_GENERATED = 256
TEXTS_TOGETHER = 32


def evaluate(
    model: CharTransformer,
    vocabulary: Vocabulary,
    trained: TrainConfig,
    checkpoint: Checkpoint,
    config: EvaluateConfig,
) -> dict[str, Any]:
    """The report on a model, as a nested plain dict."""
    device = pick_device(config.evaluate.device, "evaluate.device")
    parameters = list(model.to(device).parameters())
    data = evaluated_data(trained.data, config.data)
    split = config.data.split or data.split
    with Bar(desc=f"reading {data.name}"):
        corpus = read_corpus(data)
        require_known_text(data, corpus, trained.data, checkpoint)
        tokens = tokens_of(corpus, vocabulary, data.max_val_characters)[split]
        size = corpus.total if split == "all" else corpus.size(split)
        unknown, own = unknown_rate(tokens), corpus.sha256 == checkpoint.metadata["data_sha256"]
    if unknown > MOSTLY and not own:
        raise CheckpointError(
            f"{checkpoint.path}: most characters of {corpus.name} ({corpus.source}) are not in its "
            "vocabulary; name a text in the characters it was trained on"
        )
    if data.unknown == "refuse":
        vocabulary.require(corpus.read(*(SPLITS if split == "all" else (split,))), corpus.source)
    seq_len = trained.data.seq_len
    measure = config.evaluate
    stride = measure.stride or seq_len
    if stride > seq_len:
        raise ConfigurationError(
            f"evaluate.stride: {stride} is more than the model's seq_len={seq_len}; characters "
            "between windows would never be scored"
        )
    if len(tokens) < 2:
        raise DataError(f"data.split={split}: {len(tokens)} characters, nothing to score")
    certificate = certify_trained(
        model, FORWARD_DTYPE[trained.trainer.precision], str(checkpoint.path)
    )
    windows = EvaluationWindows(tokens, seq_len, stride, measure.batch_size)
    what = f"{len(tokens):,} characters of {corpus.name}, {split}"
    print(f"{checkpoint.path}: evaluating {what}", flush=True)
    mixed = trained.trainer.precision == "bf16-mixed"  # as in training, and in the certificate
    with torch.autocast(device.type, torch.bfloat16, mixed):
        likelihood = score(model, Bar(windows, desc="likelihood", unit="batches"), device)
    if not math.isfinite(likelihood.nats):
        raise NonFiniteError(
            f"{checkpoint.path}: {likelihood.nats} nats per character on data.split={split}: "
            "its weights are finite, but what comes of them is not; evaluate an earlier checkpoint"
        )
    # On the text it has learnt by heart an n-gram is no comparison.
    by_heart = split == "train" or (own and split == "all")
    learnt = None if by_heart else training_tokens(checkpoint, vocabulary, trained.data, corpus)
    wandb = checkpoint.metadata.get("wandb") or {}
    report: dict[str, Any] = {
        "checkpoint": str(checkpoint.path if checkpoint.path.name else checkpoint.path.resolve()),
        "step": checkpoint.step,
        "command": checkpoint.metadata.get("command"),
        "wandb": wandb if wandb.get("run_id") else None,  # if it was online
        "commit": checkpoint.metadata.get("commit"),
        "weight_bits": checkpoint.metadata.get("weight_bits"),  # of an exported model
        "evaluated_with": command_line(config),
        "model": {"name": trained.model.name, "parameters": sum(map(Tensor.numel, parameters))},
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
            "split": split,
            "source": corpus.source,
            "sha256": corpus.sha256,
            "same_as_training": own,
            "split_characters": size,
            "unknown_rate": unknown,
        },
        "ngram": None if learnt is None else ngram_baseline(vocabulary, learnt, tokens),
        "certificate": None if certificate is None else certificate.to_dict(),
        "local_lipschitz": {},
        "inversion": None,
        "sample": sample_text(model, vocabulary, tokens),
        "perf": {
            "forward_characters_per_second": likelihood.num_characters / likelihood.seconds,
        },
    }
    if measure.lipschitz_sequences:
        probe = first_sequences(tokens, seq_len, measure.lipschitz_sequences).to(device)
        report["local_lipschitz"] = measured_branches(model, probe, measure.lipschitz_steps)
    if certificate is not None and measure.inversion_sequences:
        sequences = first_sequences(tokens, seq_len, measure.inversion_sequences).to(device)
        inversion = inverted(model, vocabulary, sequences, measure)
        report["inversion"] = inversion
        rate = inversion["num_characters"] / inversion["seconds_inverse"]
        report["perf"]["inverse_characters_per_second"] = rate
    for key, count in (("generate", 1), (f"generate_{TEXTS_TOGETHER}_texts", TEXTS_TOGETHER)):
        with Bar(desc="generating texts"):
            rate = generation_rate(model, tokens, count, device)
        report["perf"][f"{key}_characters_per_second"] = rate
    return report


def evaluated_data(trained: DataConfig, asked: EvaluateDataConfig) -> DataConfig:
    """The data of training, with the options asked for; another corpus has another path."""
    given = {name: value for name, value in asdict(asked).items() if value is not None}
    if given.get("split") == "all":
        del given["split"]  # no split of a training run
    if given.get("name", trained.name) != trained.name:
        given.setdefault("path", None)
    return replace(trained, **given)


def require_known_text(
    data: DataConfig, corpus: Corpus, trained: DataConfig, checkpoint: Checkpoint
) -> None:
    """Raise DataError if a path that nobody typed leads to another text than the one of training.

    A checkpoint may come from somebody else, and name any file of this machine.
    """
    known = checkpoint.metadata["data_sha256"]
    if not isinstance(data.path, SavedPath) or corpus.sha256 == known:
        return
    if data == trained or read_corpus(trained).sha256 != known:  # with limits that were typed
        raise DataError(
            f"{data.path}: not the text that {checkpoint.path} was trained on, which named it "
            "(SHA-256 differs); name a text yourself with data.path=PATH"
        )


def training_tokens(
    checkpoint: Checkpoint, vocabulary: Vocabulary, trained: DataConfig, corpus: Corpus
) -> Tensor | None:
    """The symbols that the model was trained on; None if that text is gone."""
    if corpus.sha256 != checkpoint.metadata["data_sha256"]:
        try:
            corpus = read_corpus(trained)
        except DataError:
            return None
    is_own = corpus.sha256 == checkpoint.metadata["data_sha256"]
    return tokens_of(corpus, vocabulary)["train"] if is_own else None


def ngram_baseline(vocabulary: Vocabulary, learnt: Tensor, tokens: Tensor) -> dict[str, float]:
    """Score a split with an interpolated Witten–Bell n-gram of the model's training text.

    Of a long text it learns the beginning: counting takes two seconds for a million characters.
    """
    learnt = learnt[:NGRAM_CHARACTERS]
    nats = witten_bell_nats(learnt, tokens, NGRAM_ORDER, vocab_size=vocabulary.size)
    baseline = {"order": NGRAM_ORDER, "nats": nats, "bpc": nats / math.log(2)}
    return {**baseline, "num_characters": len(learnt)}


def inverted(
    model: CharTransformer, vocabulary: Vocabulary, sequences: Tensor, measure: MeasureConfig
) -> dict[str, Any]:
    """Round trip of some sequences: the report's numbers, and each text beside the recovered."""
    with Bar(desc="inversion"):
        trip = round_trip(model, sequences, getattr(torch, measure.inversion_dtype))
    of_each = measure.proof_limit // (len(sequences) * vocabulary.size)
    count, before = min(max(1, of_each), sequences.shape[-1]), 0
    start = time.perf_counter()
    with Bar(desc="proof", total=count * len(sequences), unit="characters") as bar:

        def watch(evidence: MarginEvidence) -> None:
            nonlocal before
            now = len(evidence.tokens)
            bar.update(now - before if before < count else now)
            before = now

        proof = trip.proof(count, watch)
    seconds = {"proof": time.perf_counter() - start}
    with Bar(desc="timing the inverse"):
        seconds |= trip.seconds()
    proven = torch.zeros_like(trip.decoded).bool()
    proven[:, :count] = proof.proven
    decoded = ([vocabulary.decode(t) for t in batch.cpu()] for batch in (sequences, trip.decoded))
    symbols = zip(*decoded, proven.tolist(), strict=True)
    texts = starmap(partial(readable, vocabulary), symbols)
    return {
        **trip.numbers(),
        "characters_proven": proven.double().mean().item(),
        "characters_tried": proof.proven.numel(),
        "margin": proof.margin.min().item(),
        "arithmetic_error": proof.arithmetic_error.max().item(),
        "distance": proof.distance.max().item(),
        "radius": proof.radius.min().item(),
        "unproven": proof.unproven,
        **{f"seconds_{what}": value for what, value in seconds.items()},
        "texts": [
            {"text": text, "recovered": recovered, "marks": marks(text, recovered, proven)}
            for text, recovered, proven in texts
        ],
        "unknown_rate": (sequences == 0).double().mean().item(),
    }


def sample_text(model: CharTransformer, vocabulary: Vocabulary, tokens: Tensor) -> dict[str, str]:
    """The first characters of a split, and how the model continues them."""
    prompt = tokens[:PROMPT].long().to(model.head.weight.device)
    generator = torch.Generator(device=prompt.device).manual_seed(0)
    text = model.generate(prompt, SAMPLE, generator=generator)[len(prompt) :]
    return {"prompt": vocabulary.text(prompt.cpu()), "text": vocabulary.text(text.cpu())}


def generation_rate(
    model: CharTransformer, tokens: Tensor, num_texts: int, device: torch.device
) -> float:
    """Characters per second of continuing the split's first ones, up to a window each, at once."""
    starts = torch.arange(num_texts) % len(tokens)
    prompt, length = tokens[starts, None].long().to(device), min(model.seq_len, MOST_GENERATED)
    model.generate(prompt, 1)
    start = time.perf_counter()
    model.generate(prompt, length, temperature=0)[-1, -1].item()  # waits for the device
    return num_texts * length / (time.perf_counter() - start)
