"""The configuration: its schema, and how a command line becomes one."""

from invformer.config.load import (
    command_line,
    from_dict,
    help_text,
    load_config,
    parse_or_exit,
    to_yaml,
    typed,
)
