"""An open-loop load generator for OpenAI-compatible servers: `python -m benchmarks.load --help`."""
