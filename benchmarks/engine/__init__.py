"""The engine alone, in this process, without Ray: step times, prompts, sampling, streams against transformers."""
