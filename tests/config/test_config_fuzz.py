"""Thousands of random command lines: a valid configuration, or one line that names the key."""

import pickle
import random
import string
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from invformer.config import from_dict, load_config, to_dict
from invformer.config.schema import TrainConfig
from invformer.config.section import Root, options
from invformer.config.trained import EvaluateConfig
from invformer.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
SCHEMAS = (TrainConfig, EvaluateConfig)
LISTS = 1000
VALUES = [
    "", " ", "=", "==", "null", "None", "~", "true", "yes", "off", "0", "-0", "1", "-1", "7",
    "010", "0x10", "1_000", "1e3", "1e-3", "1e400", "-1e400", "nan", "inf", "-inf", ".5", "5.",
    "+3", "1,5", "9" * 30, "9" * 5000, "0." + "0" * 400 + "1", "3.0", "3.5", "auto", "cpu", "l2",
    "contractive_l2", "token_max", "[", "]", "[]", "[0.9]", "[0.9, 0.99]", "[0.9, [0.99]]",
    "[1, 2", "[[]]", "[nan, 1]", "{}", "{a: 1}", "{a: {b: [1, {c: 2}]}}", "{", "}", "- a", "a: b",
    "? x", "&a 1", "*a", "!!int 3", "!!python/object/apply:os.system [id]",
    "!!python/name:os.system", "${", "${}", "${model.d_model}", "${oc.env:HOME}",
    "${oc.env:WANDB_API_KEY}", "${oc.decode:1}", "${a.b.c}", "$HOME", "`id`", "???", "ünïcödé",
    "名前", "🙂", "\x00", "\n", "a\nb", "\t", "\ud800", "\u202e", "..", "../x", "/etc/passwd",
    "a/b", "a\\b", "%s%n", "'", '"', "'a", '"\\x"', "# x", "a #b", "x" * 300, "2021-01-01",
    "12:30:45",
    "<<", "@", "%", "|", ">", "python_docs", "adamw", "text_file", "http://x/y", "1" + "0" * 400,
]  # fmt: skip
STRANGE_KEYS = [
    "", " ", ".", "..", "a.b.c.d", "model", "model.", ".model", "model..d_model",
    "model.d_model.x", "model.d_model[0]", "optim.betas[0]", "optim.betas[5]", "optim.betas[-1]",
    "optim.betas[x]", "optim.betas[0][1]", "optim.betas[999999999999]", "logger.tags[0]",
    "Model.d_model", "модель", "model.d_modl", "${model}", "__class__", "model.__init__",
    "model.key", "program", "groups", "experiment", "data", "optim", "trainer", "logger", "run",
    "monitor", "run.run", "\x00", "--", "-",
]  # fmt: skip
PRESETS = {
    group: sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml"))
    for group in TrainConfig.groups
}


@pytest.fixture(autouse=True)
def _one_tree_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy OmegaConf's typed tree, which takes a hundredth of the time that making it takes."""
    trees = {schema: pickle.dumps(OmegaConf.structured(schema)) for schema in SCHEMAS}
    monkeypatch.setattr(OmegaConf, "structured", lambda schema: pickle.loads(trees[schema]))


def random_word(chance: random.Random, keys: list[str]) -> str:
    """One argument, more often nearly right than not."""
    kind = chance.random()
    if kind < 0.05:
        return "".join(chance.choices(string.printable, k=chance.randint(0, 12)))
    if kind < 0.1:
        return chance.choice(VALUES)
    if kind < 0.25:
        group = chance.choice(list(PRESETS))
        return f"{group}={chance.choice([*PRESETS[group], *PRESETS[group], *VALUES])}"
    key = chance.choice(keys) if kind < 0.9 else chance.choice(STRANGE_KEYS)
    if chance.random() < 0.1:  # a slip of the finger
        place = chance.randint(0, len(key))
        key = key[:place] + chance.choice(string.ascii_lowercase + "._-[]") + key[place + 1 :]
    value = str(chance.randint(1, 64)) if chance.random() < 0.3 else chance.choice(VALUES)
    return (
        f"{chance.choice(['', '', '', '--'])}{key}{chance.choice(['=', '=', '=', '', '=='])}{value}"
    )


def random_words(seed: int, schema: type[Root]) -> list[str]:
    """A command line; a word may come twice."""
    chance = random.Random(seed)
    keys = [key for key, _ in options(schema)]
    words = [random_word(chance, keys) for _ in range(chance.randint(1, 5))]
    if schema is EvaluateConfig and chance.random() < 0.9:
        words.insert(0, "checkpoint=checkpoints/first")
    return words + ([chance.choice(words)] if chance.random() < 0.2 else [])


def names_what_is_wrong(words: list[str], message: str) -> bool:
    """Whether a message names a field, a group, an unknown key, or the word that is no setting."""
    said = [word.removeprefix("--").partition("=")[0] for word in words]
    known = [key for schema in SCHEMAS for key, _ in options(schema)]
    start = message.partition(": ")[0].rpartition("configs/")[2]
    return (
        start in said
        or start.split("[")[0] in (*known, *PRESETS)
        or any(key in message for key in known)
        or message.startswith(("unknown key ", "the file"))
        or " is not key=value: " in message
        or "is a section: set a field of it" in message
    )


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_random_command_line_is_valid_or_refused_by_name(
    schema: type[TrainConfig] | type[EvaluateConfig],
) -> None:
    valid = 0
    refusals: list[tuple[int, list[str], str]] = []
    for seed in range(LISTS // 2):
        words = random_words(seed, schema)
        try:
            config = load_config(words, schema)
        except ConfigurationError as error:
            refusals.append((seed, words, str(error)))
        else:
            valid += 1
            assert from_dict(to_dict(config), schema) == config, (seed, words)
    for refusal in refusals:
        message = refusal[2]
        assert "\n" not in message, refusal
        assert len(message) < 1000, refusal
        assert names_what_is_wrong(refusal[1], message), refusal
    assert valid > LISTS // 200
