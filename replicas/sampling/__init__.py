"""From logits to tokens and to what is said of them.

Begin with `sampled_tokens.py`.
"""
