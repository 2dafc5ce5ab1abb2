"""Grammars of structured output: their texts, what is made of a text, and how much work that may cause. No torch."""
