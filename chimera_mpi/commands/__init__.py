"""The subcommands, a module each.

A module has `EXAMPLE`, lines for the end of its `--help`; `add_arguments(parser)`; and `run(args)`, which
returns the exit code. A module is imported only when its command is called, and itself imports what is slow
(torch, MPI, HDF5) only where it needs it. Its name and one line of help stand in `cli.COMMANDS`.
"""
