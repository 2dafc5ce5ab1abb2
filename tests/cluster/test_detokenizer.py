"""IncrementalDetokenizer against decoding everything at once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from cluster.text.detokenizer import IncrementalDetokenizer
from cluster.text.token_bytes import token_bytes
from cluster.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


def pieces(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def sentencepiece(*words: str, strip: bool = True) -> tuple[Backend, Any]:
    """A byte-fallback tokenizer as Llama 2 has it, and the part of a Tokenizer that a detokenizer needs."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return backend, SimpleNamespace(visible_bytes=token_bytes(backend.get_vocab(), generation_of(backend)["decoder"]))


def generation_of(backend: Backend) -> dict[str, Any]:
    generation: dict[str, Any] = json.loads(backend.to_str())
    return generation


@pytest.mark.parametrize("seed", range(4))
def test_pieces_join_to_the_decoded_whole(tokenizer: Tokenizer, reference: Any, seed: int) -> None:
    rng = random.Random(seed)
    partial = [i for i, text in tokenizer.visible_bytes.items() if text.decode(errors="replace").count(REPLACEMENT)]
    assert len(partial) > 200  # tokens that are not whole characters: most of what is drawn below
    num_replaced = 0
    for _ in range(1000):
        share = rng.choice([0.0, 0.5, 0.95, 1.0])
        ids = [
            rng.choice(partial) if rng.random() < share else rng.randrange(tokenizer.vocab_size + 5)
            for _ in range(rng.randrange(1, 40))
        ]
        whole = "".join(pieces(tokenizer, ids))
        assert whole == reference.decode(ids, skip_special_tokens=True), ids
        assert whole == tokenizer.decode(ids), ids
        num_replaced += REPLACEMENT in whole
    assert num_replaced > 300


def test_every_token_alone(tokenizer: Tokenizer) -> None:
    ids = range(tokenizer.vocab_size)
    assert [
        token_id for token_id in ids if "".join(pieces(tokenizer, [token_id])) != tokenizer.decode([token_id])
    ] == []


def test_b01_no_piece_has_half_a_character(tokenizer: Tokenizer) -> None:
    text = "🔥🌶️👨‍👩‍👧 ďábelské 你好 e\u0301 \u202e\x00 ok"
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == text
    assert REPLACEMENT not in text
    assert len(ids) > len(text)  # some characters took several tokens
    assert parts[-1] == ""


def test_b02_the_prompt_never_shows(tokenizer: Tokenizer) -> None:
    # The prompt ends after two of the four bytes of 🌶; the answer begins with the other two.
    ids = tokenizer.encode("Hello 🌶", add_special_tokens=False)
    cut = next(k for k in range(len(ids)) if tokenizer.decode(ids[: k + 1]).endswith(REPLACEMENT)) + 1
    answer = [*ids[cut:], *tokenizer.encode(" fine", add_special_tokens=False)]
    text = "".join(pieces(tokenizer, answer))
    assert text == tokenizer.decode(answer)
    assert "Hello" not in text
    assert text.endswith(" fine")


def test_special_and_unknown_tokens_leave_no_text(tokenizer: Tokenizer) -> None:
    fire = tokenizer.encode("🔥", add_special_tokens=False)
    assert len(fire) > 1
    with_special = [fire[0], 2, tokenizer.vocab_size + 100, *fire[1:], 2]
    assert "".join(pieces(tokenizer, with_special)) == "🔥" == tokenizer.decode(with_special)


def test_half_a_character_at_the_end_is_one_replacement(tokenizer: Tokenizer) -> None:
    fire = tokenizer.encode("🔥", add_special_tokens=False)
    assert pieces(tokenizer, fire[:1]) == ["", REPLACEMENT]


def test_bytes_that_never_become_a_character_are_not_held_back() -> None:
    # A model may emit nonsense for long: the text must keep up with it. (DecodeStream of tokenizers stays silent.)
    _, stub = sentencepiece()
    assert pieces(stub, [0xBF] * 1000) == [REPLACEMENT] * 1000 + [""]


def test_finish_makes_it_ready_for_another_text(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    fire = tokenizer.encode("🔥", add_special_tokens=False)
    assert detokenizer.push(fire[0]) + detokenizer.finish() == REPLACEMENT
    assert "".join(map(detokenizer.push, fire)) + detokenizer.finish() == "🔥"


@pytest.mark.parametrize("strip", [True, False])
def test_sentencepiece_bytes_join_to_the_decoded_whole(strip: bool) -> None:
    backend, stub = sentencepiece("▁", "▁a", "b", "▁é", "🔥", "<0x", strip=strip)
    words = [[256 + i] for i in range(6)] + [list(text.encode()) for text in ("é", "🔥", "你", "\n", "▁")]
    rng = random.Random(7)
    for _ in range(1000):
        ids = [token_id for word in rng.choices(words, k=rng.randrange(1, 12)) for token_id in word]
        text, whole = "".join(pieces(stub, ids)), backend.decode(ids)
        # The space in front is dropped where a text begins; what is generated goes on after a prompt.
        assert text == (" " + whole if strip and text.startswith(" ") else whole), ids


def test_sentencepiece_keeps_characters_that_were_complete() -> None:
    backend, stub = sentencepiece("a")
    ids = [*"é".encode(), 0xFF, 256]
    assert "".join(pieces(stub, ids)) == "é" + REPLACEMENT + "a"
    assert backend.decode(ids) == REPLACEMENT * 3 + "a"  # it takes back the é


def test_metaspace_marks_become_spaces() -> None:
    backend = Backend(models.Unigram([("▁a", -1.0), ("b", -1.0)]))
    backend.decoder = decoders.Metaspace()
    stub = SimpleNamespace(visible_bytes=token_bytes(backend.get_vocab(), generation_of(backend)["decoder"]))
    assert pieces(stub, [0, 1, 0]) == [" a", "b", " a", ""]


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.CTC()]), "CTC"),
        (None, "none"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: Any, name: str) -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ValueError, match=name):
        token_bytes(backend.get_vocab(), generation_of(backend)["decoder"])
