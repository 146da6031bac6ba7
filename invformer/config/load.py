"""From a command line to a validated configuration, and back: the only module that knows OmegaConf.

``python train.py model=l2 data=ptb trainer.max_steps=20000 experiment=nanogpt_cpu``

* ``group=name`` merges ``configs/group/name.yaml`` into a group; fields it does not name stay.
* ``experiment=name`` or ``config=path/to/mine.yaml`` sets fields of any group; ``base: NAME`` at
  the top of such a file merges another experiment first. ``config=FOLDER`` names the run in it.
* ``key=value`` (or ``--key=value``) sets one field.
* Order: the schema's defaults, the experiment, the other groups, single fields. The last one wins.

Every value, from a file or a command line, stays text until it meets the type of its field:
``run.name=010`` keeps its letters, ``trainer.max_steps=010`` is ten. ``${model.d_model}`` is the
value of another field.
"""

import json
import os
import pickle
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple, TypeVar, get_origin

import yaml  # OmegaConf's own parser, used here to keep scalars as text

from invformer.config.schema import TrainConfig
from invformer.config.section import (
    ANY_TEXT,
    NULL_WORDS,
    Root,
    default_of,
    describe,
    is_optional,
    nearest,
    options,
    refuse,
    required_part,
    shown,
    suggestion,
)
from invformer.errors import ConfigurationError

Config = TypeVar("Config", bound=Root)

# What files of earlier versions hold and this one does without: typed, it is refused.
RETIRED = {"trainer.strategy": "ddp", "model.attention_kernel": "blocked"}
YAML = (".yaml", ".yml")  # a name that ends like this is a path
FIELD_REFERENCE = re.compile(r"\$\{\w+\.\w+\}")
PACKAGE = Path(__file__).parents[1]
# A wheel carries the presets inside the package, a checkout beside it.
CONFIGS = (PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent) / "configs"


class Setting(NamedTuple):
    """One field to set, and the file that sets it ("" for the command line)."""

    key: str
    value: Any
    source: str = ""


def parse_or_exit(argv: Sequence[str], schema: type[Config] = TrainConfig) -> Config:
    """The configuration a command line asks for, as :func:`load_config` returns it.

    ``--help`` and ``--print-config`` end the program with 0, an error ends it with one line and 2.
    """
    words = [word for word in argv if word not in ("--print-config", "--debug")]
    if "--debug" in argv:
        words += [f"{key}=true" for key, _ in options(schema) if key.split(".")[-1] == "debug"]
    try:
        if {"-h", "--help"} & set(argv):
            print(help_text(schema))
            raise SystemExit(0)
        config = load_config(words, schema)
        if "--print-config" in argv:
            print(to_yaml(config), end="")
            raise SystemExit(0)
        return config
    except ConfigurationError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # torchrun's other ranks would say the same
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def load_config(argv: Sequence[str], schema: type[Config] = TrainConfig) -> Config:
    """The validated dataclasses that ``group=name`` and ``key=value`` words ask for."""
    words = [setting for word in argv for setting in _parse_word(word, schema)]
    words.sort(key=lambda setting: not setting.source)  # what was typed wins over config=FOLDER
    chosen = {word.key: word.value for word in words if word.key in schema.groups}
    if chosen.get("experiment") in NULL_WORDS:
        del chosen["experiment"]
    groups = [group for group in schema.groups if group in chosen]  # the experiment comes first
    presets = [setting for g in groups for setting in _read_preset(g, chosen[g], schema)]
    config = _build([*presets, *(w for w in words if w.key not in schema.groups)], schema)
    for key, why in config.ignored().items():
        if any(key == word.key for word in words):
            refuse(key, f"would be ignored: {why}")
    return config


def from_dict(values: Mapping[str, Any], schema: type[Config] = TrainConfig) -> Config:
    """A configuration from plain values, such as a checkpoint's; absent keys have defaults."""
    return _build(_flatten(values, "", schema, ""), schema)


def to_yaml(config: Root) -> str:
    """The resolved configuration as YAML; it can serve as an experiment file."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def typed(program: str) -> list[str]:
    """The words that start a program: ``python train.py``, or ``invformer train`` if installed."""
    if os.path.basename(sys.argv[0]) == "invformer":
        return ["invformer", program.removesuffix(".py")]
    return ["python", *program.split()]


def command_line(config: Root) -> str:
    """The one command that repeats a run: every value that is not a default, shell-quoted."""
    words, ignored = typed(config.program), config.ignored()
    for key, f in options(type(config)):
        value = attrgetter(key)(config)
        if value != default_of(f) and key not in ignored:
            again = value if f.metadata.get("again") else [value]
            words += [f"{key}={_as_text(item)}" for item in again]
    return shlex.join(words)


def help_text(schema: type[Root] = TrainConfig) -> str:
    """Usage, presets by group, and every field with type, interval, default and meaning."""
    presets = "[group=preset ...] " if schema.groups else ""
    words = f"{presets}[key=value ...] [--print-config] [--debug] [--help]"
    lines = [f"usage: {shlex.join(typed(schema.program))} {words}", "", schema.__doc__ or ""]
    lines += ["", "presets (group=name):"] if schema.groups else []
    for group in schema.groups:
        names = ", ".join(_presets(group)) or "none found"
        lines += wrap(f"  {group:<12}{names}", 100, subsequent_indent=" " * 14)
    if "experiment" in schema.groups:
        lines += ["  config      for experiment: a YAML file of your own, or a run's folder"]
    lines += ["", "fields (key=value), each with its default:"]
    for key, f in options(schema):
        default = default_of(f)
        assigned = "=  (required)" if default is MISSING else f"={_as_text(default)}"
        kind = describe(f.type)
        if f.metadata.get("pattern") is ANY_TEXT:  # also "null"
            assigned, kind = "=", "text"
        interval = f.metadata.get("within")
        within = f" in {interval}" if interval else ""
        lines += [f"  {key}{assigned}", f"      {kind}{within}: {f.metadata['help']}"]
    return "\n".join(lines)


def _parse_word(word: str, schema: type[Root]) -> list[Setting]:
    """``key=value`` or ``--key=value``; a run's folder is this run, whatever it was called."""
    key, equals, value = word.removeprefix("--").partition("=")
    if equals and key == "config" and "experiment" in schema.groups:
        if value.endswith(YAML) and not os.path.isdir(os.path.expanduser(value)):
            return [Setting("experiment", value)]
        place = {"run.root": str(Path(value).parent), "run.name": Path(value).name}
        settings = [Setting(key, part, f"{value}: ") for key, part in place.items()]
        return [Setting("experiment", f"{value}/config.yaml"), *settings]
    if equals:
        return [Setting(key, value)]
    meant = {key: f"{key}=VALUE" for key, _ in options(schema)}
    meant |= {group: f"{group}=NAME" for group in schema.groups}
    meant |= {name: f"{g}={name}" for g in schema.groups for name in _presets(g)}
    near = nearest(key.lstrip("-"), meant)
    hint = f"did you mean {meant[near]}?" if near else "see --help"
    raise ConfigurationError(f"{shown(word)} is not key=value: {hint}")


def _presets(group: str) -> dict[str, Path]:
    """The presets of one group by name; empty if there is no such folder."""
    return {path.stem: path for path in sorted((CONFIGS / group).glob("*.yaml"))}


def _read_preset(
    group: str, name: str, schema: type[Root], above: tuple[str, ...] = ()
) -> Iterator[Setting]:
    """The settings of a preset, after those of the experiment it extends.

    ``above`` are the files that extend this one, the one asked for first.
    """
    where = f"{above[-1]}: base" if above else group
    if group == "experiment" and name.endswith(YAML):
        path, source = Path(os.path.expanduser(name)), name
    elif name in (known := _presets(group)):
        path, source = known[name], f"configs/{group}/{name}.yaml"
    else:
        there = f"there are {', '.join(known)}" if known else f"there is no folder configs/{group}"
        refuse(where, f"no preset {shown(name)}: {suggestion(name, known, there)}")
    if source in above:
        refuse(where, f"experiments extend each other: {' > '.join([*above, source])}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        refuse(source, getattr(error, "strerror", None) or str(error))
    tree = _parse_yaml(text, source)
    if group == "experiment" and isinstance(tree, dict) and "base" in tree:
        base = tree.pop("base")
        if not isinstance(base, str):
            refuse(f"{source}: base", f"{shown(base)} is not the name of an experiment")
        yield from _read_preset(group, base, schema, (*above, source))
    yield from _flatten(tree, "" if group == "experiment" else f"{group}.", schema, f"{source}: ")


class _TextLoader(yaml.BaseLoader):
    """YAML whose scalars stay text, as on a command line; a key given twice is refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key is given twice", problem_mark=node.start_mark)
        return mapping


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _TextLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        refuse(where, f"line {line}: {error.problem}")
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        refuse(where, " ".join(str(error).split()))


def _flatten(tree: Any, prefix: str, schema: type[Root], source: str) -> Iterator[Setting]:
    """Nested mappings as one setting per field, in the file's order."""
    if tree is None or tree == "":
        return
    if not isinstance(tree, Mapping):
        where = f"{source}{prefix.rstrip('.') or 'the file'}"
        refuse(where, f"{shown(tree)} does not map fields to values")
    sections = {key.rpartition(".")[0] for key, _ in options(schema)}
    for name, value in tree.items():
        if f"{prefix}{name}" in sections:
            yield from _flatten(value, f"{prefix}{name}.", schema, source)
        elif (f"{prefix}{name}", value) not in RETIRED.items():  # a field left blank is null
            yield Setting(f"{prefix}{name}", "null" if value == "" else value, source)


def _build(settings: Iterable[Setting], schema: type[Config]) -> Config:
    """The dataclasses, which check themselves as they are made."""
    known = dict(options(schema))
    settings = list(settings)
    for key, _, source in settings:  # a typo is answered before OmegaConf is loaded
        if key not in known:
            if inside := [name for name in known if name.startswith(f"{key}.")]:
                refuse(source + key, f"is a section: set a field of it, such as {inside[0]}=VALUE")
            hint = suggestion(key, [*schema.groups, *known], "see --help")
            refuse(f"{source}unknown key {shown(key)}", hint)

    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    tree, verbatim = pickle.loads(_defaults(schema)), {}
    for setting in settings:
        field = known[setting.key]
        if field.metadata.get("pattern") is ANY_TEXT:
            verbatim[setting.key] = setting.value
            continue
        value = _prepared(setting, field)
        try:
            if field.metadata.get("again"):  # a value joins those before
                value = [*(OmegaConf.select(tree, setting.key) or []), *value]
            OmegaConf.update(tree, setting.key, value)
        except OmegaConfBaseException:
            why = f"{shown(setting.value)} is not {describe(field.type)}"
            refuse(setting.source + setting.key, why)
    try:
        config: Any = OmegaConf.to_object(tree)
    except MissingMandatoryValue as error:
        key = str(error.full_key).partition("[")[0]  # of a list its field
        refuse(key, f"give one: {known[key].metadata['help']}")
    except OmegaConfBaseException as error:  # a reference in a file that leads nowhere
        refuse(str(error.full_key), str(error).splitlines()[0])
    return replace(config, **verbatim)


@cache
def _defaults(schema: type[Root]) -> bytes:
    """OmegaConf's tree of a schema, pickled: fifty times as fast to read as to make anew."""
    from omegaconf import OmegaConf

    return pickle.dumps(OmegaConf.structured(schema))


def _prepared(setting: Setting, field: Field) -> Any:
    """A value as OmegaConf's typed field takes it: text for numbers, but null and lists as such."""
    value, where = setting.value, setting.source + setting.key
    if "${" in str(value) and not FIELD_REFERENCE.fullmatch(str(value)):
        refuse(where, f"{shown(value)}: refer to another field as ${{model.d_model}}")
    if not isinstance(value, str):
        return value
    if value in NULL_WORDS and is_optional(field.type):
        return None
    if field.type is bool and re.fullmatch(r"[-+\d_]+", value) and value not in ("0", "1"):
        refuse(where, f"{shown(value)} is not {describe(bool)}")  # OmegaConf takes it for true
    if get_origin(required_part(field.type)) is list:
        items = value if field.metadata.get("again") else _parse_yaml(value, where)
        return [items] if isinstance(items, str) else items  # one word is a list of one
    return value


def _as_text(value: Any) -> str:
    """A value as an override writes it."""
    if isinstance(value, list):
        return yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).strip()
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
