"""Everything that evaluate.py measures."""

import math
from dataclasses import asdict, replace

import torch
from torch import Tensor

from invformer.config.load import command_line
from invformer.config.schema import DataConfig, SavedPath, TrainConfig
from invformer.config.trained import EvaluateConfig, EvaluateDataConfig
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
from invformer.evaluation.inversion import inverted
from invformer.evaluation.likelihood import score
from invformer.evaluation.lipschitz import BranchConstants, measured_branches
from invformer.evaluation.ngram import ngram_baseline
from invformer.evaluation.result import (
    Context,
    EvaluatedModel,
    EvaluatedText,
    Evaluation,
    SampledText,
)
from invformer.nn.proof import certify_trained
from invformer.nn.transformer import CharTransformer
from invformer.numerics.precision import FORWARD_DTYPE
from invformer.processes.bar import Bar
from invformer.runs.checkpoint import Checkpoint
from invformer.runs.machine import pick_device

MOSTLY = 0.5  # a text is mostly unknown if more of it is not in the vocabulary
PROMPT, SAMPLE = 16, 200  # characters that are given, and that the model adds


def evaluate(
    model: CharTransformer,
    vocabulary: Vocabulary,
    trained: TrainConfig,
    checkpoint: Checkpoint,
    config: EvaluateConfig,
) -> Evaluation:
    """Measure a trained model on a text: likelihood, constants, inversion, a sample."""
    measure, seq_len = config.evaluate, trained.data.seq_len
    device = pick_device(measure.device, "evaluate.device")
    parameters = list(model.to(device).parameters())
    text, tokens, corpus = scored_text(vocabulary, trained.data, checkpoint, config.data)
    stride = measure.stride or seq_len
    if stride > seq_len:
        raise ConfigurationError(
            f"evaluate.stride: {stride} is more than the model's seq_len={seq_len}; characters "
            "between windows would never be scored"
        )
    if len(tokens) < 2:
        raise DataError(f"data.split={text.split}: {len(tokens)} characters, nothing to score")
    certificate = certify_trained(
        model, FORWARD_DTYPE[trained.trainer.precision], str(checkpoint.path)
    )
    windows = EvaluationWindows(tokens, seq_len, stride, measure.batch_size)
    what = f"{len(tokens):,} characters of {text.name}, {text.split}"
    print(f"{checkpoint.path}: evaluating {what}", flush=True)
    mixed = trained.trainer.precision == "bf16-mixed"  # as in training, and in the certificate
    with torch.autocast(device.type, torch.bfloat16, mixed):
        likelihood = score(model, Bar(windows, desc="likelihood", unit="batches"), device)
    if not math.isfinite(likelihood.nats):
        raise NonFiniteError(
            f"{checkpoint.path}: {likelihood.nats} nats per character on data.split={text.split}: "
            "its weights are finite, but what comes of them is not; evaluate an earlier checkpoint"
        )
    # On the text it has learnt by heart an n-gram is no comparison.
    by_heart = text.split == "train" or (text.same_as_training and text.split == "all")
    learnt = None if by_heart else training_tokens(checkpoint, vocabulary, trained.data, corpus)
    ngram = None if learnt is None else ngram_baseline(learnt, tokens, vocabulary.size)
    sample = sample_text(model, vocabulary, tokens)
    constants: dict[str, dict[str, BranchConstants]] = {}
    if measure.lipschitz_sequences:
        probe = first_sequences(tokens, seq_len, measure.lipschitz_sequences).to(device)
        constants = measured_branches(model, probe, measure.lipschitz_steps)
    inversion = None
    if certificate is not None and measure.inversion_sequences:
        sequences = first_sequences(tokens, seq_len, measure.inversion_sequences).to(device)
        dtype = getattr(torch, measure.inversion_dtype)
        inversion = inverted(model, vocabulary, sequences, dtype, measure.proof_limit)
    wandb = checkpoint.metadata.get("wandb") or {}
    return Evaluation(
        checkpoint=str(checkpoint.path if checkpoint.path.name else checkpoint.path.resolve()),
        step=checkpoint.step,
        command=checkpoint.metadata.get("command"),
        wandb=wandb if wandb.get("run_id") else None,  # if it was online
        commit=checkpoint.metadata.get("commit"),
        weight_bits=checkpoint.metadata.get("weight_bits"),
        evaluated_with=command_line(config),
        model=EvaluatedModel(trained.model.name, sum(map(Tensor.numel, parameters))),
        bpc=likelihood.bpc,
        nats=likelihood.nats,
        num_characters=likelihood.num_characters,
        precision=trained.trainer.precision,
        context=Context(seq_len, stride),
        data=text,
        ngram=ngram,
        certificate=certificate,
        local_lipschitz=constants,
        inversion=inversion,
        sample=sample,
    )


def scored_text(
    vocabulary: Vocabulary, trained: DataConfig, checkpoint: Checkpoint, asked: EvaluateDataConfig
) -> tuple[EvaluatedText, Tensor, Corpus]:
    """The text to score, its tokens, and the corpus that it is a split of.

    Raises:
        CheckpointError: most of it is not in the model's vocabulary.
        DataError: it cannot be read, or has unknown characters that were to be refused.
    """
    data = evaluated_data(trained, asked)
    split = asked.split or data.split
    with Bar(desc=f"reading {data.name}"):
        corpus = read_corpus(data)
        require_known_text(data, corpus, trained, checkpoint)
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
    text = EvaluatedText(corpus.name, split, corpus.source, corpus.sha256, own, size, unknown)
    return text, tokens, corpus


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


def sample_text(model: CharTransformer, vocabulary: Vocabulary, tokens: Tensor) -> SampledText:
    """The first characters of a split, and how the model continues them."""
    prompt = tokens[:PROMPT].long().to(model.head.weight.device)
    generator = torch.Generator(device=prompt.device).manual_seed(0)
    text = model.generate(prompt, SAMPLE, generator=generator)[len(prompt) :]
    return SampledText(vocabulary.text(prompt.cpu()), vocabulary.text(text.cpu()))
