"""The processes of a program: ranks and their launcher, signals, exit codes, console, threads."""
