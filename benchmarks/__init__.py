"""Benchmarks: a load generator for any OpenAI-compatible server, the engine alone, and the path without an engine."""
