"""Random command lines: each is a valid configuration, or one line that names what is wrong."""

import string
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invformer.config.load import CONFIGS, from_dict, load_config
from invformer.config.schema import TrainConfig
from invformer.config.section import Root, options
from invformer.config.trained import EvaluateConfig
from invformer.errors import ConfigurationError

SCHEMAS = (TrainConfig, EvaluateConfig)
KEYS = [key for schema in SCHEMAS for key, _ in options(schema)]
PRESETS = [f"{path.parent.name}={path.stem}" for path in CONFIGS.glob("*/*.yaml")]
VALUES = [
    "", " ", "=", "null", "None", "~", "true", "off", "0", "-0", "1", "-1", "7", "010", "0x10",
    "1_000", "1e3", "1e-3", "1e400", "nan", "inf", "-inf", ".5", "5.", "1,5", "9" * 5000, "3.0",
    "auto", "cpu", "l2", "token_max", "[", "[]", "[0.9]", "[0.9, 0.99]", "[0.9, [0.99]]", "[1, 2",
    "[[]]", "[nan, 1]", "{}", "{a: {b: [1, {c: 2}]}}", "}", "- a", "a: b", "? x", "&a 1", "*a",
    "!!int 3", "!!python/object/apply:os.system [id]", "${", "${}", "${model.d_model}",
    "${oc.env:WANDB_API_KEY}", "${oc.decode:1}", "${a.b.c}", "`id`", "???", "名前", "🙂", "\x00",
    "a\nb", "\t", "\ud800", "\u202e", "..", "/etc/passwd", "a\\b", "%s%n", "'", '"', "'a", '"\\x"',
    "a #b", "x" * 300, "2021-01-01", "12:30:45", "<<", "@", "|", "python_docs", "adamw",
    "http://x/y",
]  # fmt: skip
STRANGE_KEYS = [
    "", " ", ".", "a.b.c.d", "model", "model.", ".model", "model..d_model", "model.d_model.x",
    "model.d_model[0]", "optim.betas[0]", "optim.betas[-1]", "optim.betas[x]",
    "optim.betas[999999999999]", "Model.d_model", "модель", "model.d_modl", "${model}",
    "__class__", "model.__init__", "model.key", "program", "groups", "experiment", "data", "run",
    "run.run", "\x00", "--", "-",
]  # fmt: skip


def command_lines(schema: type[Root]) -> st.SearchStrategy[list[str]]:
    """Words that are more often nearly right than not."""
    known = [key for key, _ in options(schema)]
    key = st.sampled_from(known) | st.sampled_from([*known, *STRANGE_KEYS, *TrainConfig.groups])
    value = st.sampled_from(VALUES) | st.integers(1, 64)
    setting = st.builds("{}{}={}".format, st.sampled_from(["", "--"]), key, value)
    word = setting | setting | st.sampled_from(PRESETS) | st.text(string.printable, max_size=12)
    return st.lists(word, min_size=1, max_size=5)


@pytest.mark.parametrize("schema", SCHEMAS)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_random_command_line_is_valid_or_refused_by_name(
    schema: type[Root], data: st.DataObject
) -> None:
    needed = ["checkpoint=checkpoints/first"] if schema is EvaluateConfig else []
    line = [*needed, *data.draw(command_lines(schema))]
    try:
        config = load_config(line, schema)
    except ConfigurationError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 1000
        assert names_what_is_wrong(line, message), message
    else:
        assert from_dict(asdict(config), schema) == config


def names_what_is_wrong(line: list[str], message: str) -> bool:
    """Whether a message names a field, a group, an unknown key, or the word that is no setting."""
    said = [word.removeprefix("--").partition("=")[0] for word in line]
    start = message.partition(": ")[0].rpartition("configs/")[2]
    return (
        start in said
        or start.split("[")[0] in (*KEYS, *TrainConfig.groups)
        or any(key in message for key in KEYS)
        or message.startswith(("unknown key ", "the file"))
        or " is not key=value: " in message
        or "is a section: set a field of it" in message
    )
