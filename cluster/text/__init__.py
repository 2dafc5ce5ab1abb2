"""Text and token ids: tokenizer, chat template, detokeniser, stop strings, a request's text as it grows.

Begin with `generation.py`.
"""
