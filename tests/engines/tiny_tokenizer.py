"""A tokenizer for the tiny model: 512 tokens, bytes and the commonest pairs of some JSON."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, BEGIN, DONE = "<end>", "<begin>", "<done>"
END_ID, BEGIN_ID, DONE_ID = 0, 1, 2
VOCAB_SIZE = 512
_TEXTS = [
    json.dumps({"name": f"n{i}", "age": i, "tags": ["red", "green", "blue"][: i % 4], "ok": i % 2 == 0, "x": None})
    for i in range(200)
]


def save_tiny_tokenizer(folder: Path) -> None:
    """Beside the model's files, with the model's end. Some tokens of the model have no text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 12,
        special_tokens=[END, BEGIN, DONE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID}))
