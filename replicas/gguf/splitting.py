"""How text is cut before its bytes are merged into tokens, by the `tokenizer.ggml.pre` of a GGUF file.

A GGUF file has a name there where a tokenizer.json has the rules. The names and what each stands for: llama.cpp's
llama-vocab.cpp. Where the model's own tokenizer.json is known to say it otherwise (letters by their case in Tekken,
Qwen's Unicode normal form), it is done as there: so the model was trained.

Only names that architectures served here are written with, and whose rules are known whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# In parts: what several have in common.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CASED_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_UP_TO_THREE_DIGITS = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_ONE_DIGIT = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_TEKKEN = rf"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_SIGNS}|{_SPACES}"
_O200K = (
    rf"{_FIRST}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_FIRST}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_SIGNS}|{_SPACES}"
)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class Splitting:
    """patterns: each splits what those before it left together: a match is a piece, and so is what lies between two.
    like_gpt2: split by GPT-2's own rule after that. single_digits: before it, each numeral is a piece.
    normal_form: of Unicode, before anything. whole_pieces: a piece that is a token is that token, whatever merges say.
    adds_bos: in a file that does not say whether a text begins with that token.
    """

    patterns: tuple[str, ...] = ()
    like_gpt2: bool = False
    single_digits: bool = False
    normal_form: str | None = None
    whole_pieces: bool = False
    adds_bos: bool = False

    def normalizer(self) -> Any:
        """Of the tokenizers library; None without one."""
        from tokenizers import normalizers

        return {None: None, "NFC": normalizers.NFC()}[self.normal_form]

    def pre_tokenizer(self) -> Any:
        """Of the tokenizers library."""
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

        steps: list[Any] = [Digits(individual_digits=True)] if self.single_digits else []
        steps += [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(ByteLevel(add_prefix_space=False, use_regex=self.like_gpt2))
        return Sequence(steps) if len(steps) > 1 else steps[0]


_GPT2 = Splitting(like_gpt2=True)
_DIGITS_THEN_GPT2 = Splitting(single_digits=True, like_gpt2=True)
_LLAMA3 = Splitting((_UP_TO_THREE_DIGITS,), whole_pieces=True, adds_bos=True)
_CL100K = Splitting((_UP_TO_THREE_DIGITS,))
_QWEN2 = Splitting((_ONE_DIGIT,), normal_form="NFC")

SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": _GPT2,
    "gigachat": _GPT2,
    "mellum": _GPT2,
    "trillion": _GPT2,
    "granite-docling": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,  # Granite's too
    "minerva-7b": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _CL100K,  # Phi-4's
    "smaug-bpe": _CL100K,
    "gpt-4o": Splitting((_O200K,)),  # Phi-4-mini's
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": Splitting((_ONE_DIGIT,)),
    "seed-coder": Splitting((_SEED,)),
    "tekken": Splitting((_TEKKEN,), whole_pieces=True, adds_bos=True),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "deepseek-v3": Splitting(_DEEPSEEK_3),
}
