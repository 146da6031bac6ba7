"""The configuration: its schema, and how a command line becomes one."""
