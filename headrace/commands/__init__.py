"""One file per command line command: plain functions that cli.py parses arguments for."""
