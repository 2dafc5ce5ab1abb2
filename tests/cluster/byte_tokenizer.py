"""The tokenizer.json of a tokenizer whose tokens are the bytes, and one that ends an answer."""

from __future__ import annotations

import json

EOS = 256


def byte_tokenizer_json() -> str:
    """Token ids are those of tests.cluster.fake_ingress.ByteTokenizer."""
    # GPT-2's alphabet: a printable byte is its own character, each other one the next from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    names = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    end = {"id": EOS, "content": "<eos>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
    )
