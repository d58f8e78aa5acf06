"""The command line: noun, then verb; tables for people, `--json` for programs."""
