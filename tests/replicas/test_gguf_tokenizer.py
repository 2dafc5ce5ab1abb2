"""The ids that a text gets out of a GGUF's tokenizer are those that its model learnt, or the file is refused."""

from __future__ import annotations

import itertools
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import regex
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cluster.config.model import find_bundled_gguf
from cluster.text.tokenizer import Tokenizer
from replicas.gguf.conversion import convert
from replicas.gguf.file import GgufFile, read_gguf
from replicas.gguf.splitting import SPLITTINGS
from replicas.gguf.tokenizer import write_tokenizer
from replicas.model_support import UnsupportedModel
from tests.golden.golden_prompts import PASSAGE, TEXTS
from tests.golden.golden_set import load_goldens
from tests.replicas.tiny_gguf import END, END_OF_TURN, TOKENIZER, VOCAB_SIZE, gguf_of, tiny_model

SPELLING = bytes_to_unicode()
CLASSES = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "phi3": "Phi3Config",
    "starcoder2": "Starcoder2Config",
    "gpt2": "GPT2Config",
}


def written(folder: Path, architecture: str = "llama", **metadata: Any) -> Tokenizer:
    """The tokenizer of a tiny file, as an ingress reads it. metadata: of `tokenizer.ggml`; None leaves one out."""
    return Tokenizer(str(written_folder(folder, architecture, **metadata)))


def written_folder(folder: Path, architecture: str = "llama", **metadata: Any) -> Path:
    gguf = gguf_of(tiny_model(CLASSES[architecture]), architecture)
    gguf.metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return convert(gguf.write(folder / "model.gguf"), folder / "cache")


def ids(tokenizer: Tokenizer, text: str, around: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=around, parse_special_tokens=True)


# --- pieces: where each rule cuts, by hand ----------------------------------------------------------------------------

ALIKE = {
    "gpt-2": ["gigachat", "mellum", "trillion", "granite-docling"],
    "smollm": ["starcoder", "refact", "minerva-7b"],
    "llama-bpe": ["llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral", "dbrx", "smaug-bpe"],
    "qwen2": ["deepseek-r1-qwen", "megrez"],
    "tekken": [],
    "gpt-4o": [],
    "seed-coder": [],
    "deepseek-coder": [],
    "deepseek-v3": [],
}

PIECES = {
    "gpt-2": [
        "x| | 12345| x|2²",
        "It|'s| DON|'|T| | we|'ll",
        "a|\n|\n|b|\n\n| c|   \n",
        "f|(|x|)| =| | !=;|\n|y",
        "你好世界|。|日本| 12|年",
        " a|\t|b|\r|\n|c",
        " क|ि|x",
    ],
    "smollm": [
        "x|  |1|2|3|4|5| x|2|²",
        "x| |1| y",
        "It|'s| DON|'|T| | we|'ll",
        "a|\n\n|1|\n|2",
        "你好世界|。|日本| |1|2|年|٣|Ⅷ",
    ],
    "llama-bpe": [
        "x| | |123|45| x|2²",
        "It|'s| DON|'T| | we|'ll|'Ve",
        "a|\n\n|b|\n\n| c|  \n",
        "f|(x|)| =| | !=;\n|y",
        "你好世界|。日本| |12|年",
        " a|\tb|\r\n|c|//\n\n|d",
    ],
    "qwen2": [
        "x| | |1|2|3|4|5| x|2|²",
        "It|'s| DON|'T| | we|'ll|'Ve",
        "a|\n\n|b|\n\n| c|  \n",
        "f|(x|)| =| | !=;\n|y",
        "你好世界|。日本| |1|2|年",
    ],
    "tekken": [
        "x| | |1|2|3| Http|Server| HTTPServer",
        "It|'s| DON|'Tcamel|Case",
        "a|\n\n|b|://|x|//\n/|d",
        "हिन्दी| você",
    ],
    "gpt-4o": [
        "x| | |123|4| Http|Server| HTTPServer",
        "It's| DON'T|camel|Case",
        "a|\n\n|b|://|x|//\n/|d",
        "हिन्दी| você",
    ],
    "seed-coder": ["x| | |1|2|3| x", "a|;|\n|b| =|\n\n|c", "It|'s| DON|'T"],
    "deepseek-coder": [
        "x|  |1|2|3| y",
        "a|\n|\n|b|\r|\n| c",
        "f|(|x|)| +| y|:| z",
        "你好|、|世界|。",
        "क|ि|x",
    ],
    "deepseek-v3": [
        "x|  |123|45| x|2²",
        "a|\n\n|b| =| | !=;\n|y",
        "f|(x|).|end|[i|]",
        "你好世界|。|日本| |12|年カタカナ",
        "हिन्दी",
    ],
}


def pieces_of(pre: str, text: str) -> list[str]:
    found = SPLITTINGS[pre].pre_tokenizer().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in found]


ROWS = [(pre, row) for kind, rows in PIECES.items() for pre in (kind, *ALIKE[kind]) for row in rows]


@pytest.mark.parametrize(("pre", "row"), ROWS)
def test_pieces(pre: str, row: str) -> None:
    assert "|".join(pieces_of(pre, row.replace("|", ""))) == row


# The same rules for another regex engine, as llama.cpp has them in llama-vocab.cpp: each splits what is left.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
ENDING = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RULES = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [rf"{WORDS}|\p{{N}}{{1,3}}|{ENDING}"],
    "qwen2": [rf"{WORDS}|\p{{N}}|{ENDING}"],
    "seed-coder": [
        rf"{WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}
PARTS = [
    *("a", "the", " foo", "Hello world", "'s", "'S", "'LL", "I'm", "23456", "1", "²", "½", "٣٤", "Ⅷ", "HTTPServer"),
    *("(", ")", "<b>", "_", ".", "//", "!=", "$", "\\", "{", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\xa0"),
    *(
        "\u3000",
        "é",
        "e\u0301",
        "İ",
        "ﬁ",
        "你好",
        "世界",
        "。",
        "カタカナ",
        "한국어",
        "हिन्दी",
        "ไทย",
        "Привет",
        "🔥",
        "👨‍👩‍👧",
    ),
]


def random_texts(count: int) -> Iterator[str]:
    rng = random.Random(7)
    for _ in range(count):
        yield "".join(rng.choice(PARTS) for _ in range(rng.choice([1, 2, 3, 5, 12])))
        yield "".join(chr(rng.choice([rng.randrange(32, 0x250), rng.randrange(0x370, 0x3100)])) for _ in range(9))


def pieces_by_rules(rules: list[str], text: str) -> list[str]:
    pieces = [text]
    for rule in rules:
        pieces = [part for piece in pieces for part in _split(rule, piece)]
    return pieces


def _split(rule: str, piece: str) -> Iterator[str]:
    end = 0
    for match in regex.finditer(rule, piece):
        yield from (part for part in (piece[end : match.start()], match[0]) if part)
        end = match.end()
    if piece[end:]:
        yield piece[end:]


def is_old(text: str) -> bool:
    """Of Unicode 14: newer characters are letters to one engine and unknown to the other."""
    return all(unicodedata.category(character) != "Cn" for character in text)


@pytest.mark.parametrize("pre", RULES)
def test_pieces_by_another_engine(pre: str) -> None:
    for text in filter(is_old, random_texts(1500)):
        assert pieces_of(pre, text) == pieces_by_rules(RULES[pre], text), text


# --- the bundled model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundled() -> GgufFile:
    path = find_bundled_gguf()
    assert path is not None
    return read_gguf(Path(path))


@pytest.fixture(scope="module")
def smollm(bundled: GgufFile, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("smollm")
    write_tokenizer(bundled, folder)
    return Tokenizer(str(folder))


SMOLLM_TOKENS = {
    "x  12": "x ĠĠ 1 2",
    "1  2": "1 ĠĠ 2",
    "a 1": "a Ġ 1",
    "    9": "ĠĠĠĠ 9",
    "x  y": "x Ġ Ġy",
    "It's 1984.": "It 's Ġ 1 9 8 4 .",
    "\n\n7": "ĊĊ 7",
    "x = 10\n    y = 3": "x Ġ= Ġ 1 0 ĊĠĠĠ Ġy Ġ= Ġ 3",
}


@pytest.mark.parametrize("text", SMOLLM_TOKENS)
def test_tokens_of_the_bundled_model(text: str, smollm: Tokenizer, bundled: GgufFile) -> None:
    assert " ".join(bundled.tokens[token_id] for token_id in ids(smollm, text)) == SMOLLM_TOKENS[text]


def test_ids_of_spaces_before_digits(smollm: Tokenizer) -> None:
    assert ids(smollm, "x  12") == [104, 256, 33, 34]


class Merging:
    """Byte-level BPE in a few lines: of all neighbours, the pair that was merged first in training, again and again."""

    def __init__(self, file: GgufFile) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(file.tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(file.merges)}

    def ids(self, piece: str) -> list[int]:
        parts = [SPELLING[byte] for byte in piece.encode() if SPELLING[byte] in self._ids]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            rank, place = min((self._ranks.get(pair, 10**9), place) for place, pair in enumerate(pairs))
            if rank == 10**9:
                break
            parts[place : place + 2] = ["".join(pairs[place])]
        return [self._ids[part] for part in parts]


def test_ids_of_the_bundled_model_are_those_of_llama_cpp(smollm: Tokenizer, bundled: GgufFile) -> None:
    assert bundled.metadata["tokenizer.ggml.pre"] == "smollm"
    merging = Merging(bundled)
    texts = [*filter(is_old, random_texts(1000)), PASSAGE, *TEXTS.values(), "  1 " * 50]
    for text in texts:
        expected = [token_id for piece in pieces_by_rules(RULES["smollm"], text) for token_id in merging.ids(piece)]
        assert ids(smollm, text) == expected, text


def test_prompts_of_the_goldens_have_these_ids(smollm: Tokenizer) -> None:
    for golden in load_goldens():
        if golden.kind == "text":
            assert ids(smollm, golden.source) == golden.prompt_ids, golden.name
        elif golden.kind == "chat":
            assert smollm.apply_chat_template(golden.source) == golden.prompt_ids, golden.name


def test_control_tokens_of_the_bundled_model(smollm: Tokenizer, bundled: GgufFile) -> None:
    names = [token for token, kind in zip(bundled.tokens, bundled.token_types, strict=True) if kind == 3]
    assert len(names) == 17
    assert ids(smollm, "".join(names)) == list(range(17))
    assert smollm.special_ids == frozenset(range(17))


# --- what goes with a rule --------------------------------------------------------------------------------------------

TOKENS: list[str] = TOKENIZER["tokenizer.ggml.tokens"]
SPACES = {
    "tokens": [*TOKENS, "ĠĠ"],
    "token_type": [*TOKENIZER["tokenizer.ggml.token_type"], 1],
    "merges": [*TOKENIZER["tokenizer.ggml.merges"], "Ġ Ġ"],
}
TWO_SPACES = VOCAB_SIZE


@pytest.fixture(scope="module", autouse=True)
def more_rows() -> Iterator[None]:
    """The model of a tiny file has a row for each token that a test adds."""
    from tests.replicas import tiny_gguf

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_gguf.TINY, "vocab_size", VOCAB_SIZE + 8)
        yield


@pytest.mark.parametrize("architecture", [name for name in CLASSES if name != "qwen2"])
def test_every_architecture_keeps_it(architecture: str, tmp_path: Path) -> None:
    """transformers has tokenizer classes for some, which build another tokenizer out of the same file."""
    tokenizer = written(tmp_path, architecture, pre="smollm", **SPACES)
    assert ids(tokenizer, "x  1") == [TOKENS.index("x"), TWO_SPACES, TOKENS.index("1")]
    tokenizer = written(tmp_path / "2", architecture, pre="gpt-2", **SPACES)
    assert ids(tokenizer, "x  1") == [TOKENS.index("x"), TOKENS.index("Ġ"), TOKENS.index("Ġ"), TOKENS.index("1")]


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-r1-qwen"])
def test_qwen2_keeps_its_own(pre: str, tmp_path: Path) -> None:
    ends = {"bos_token_id": END, "eos_token_id": END_OF_TURN, "add_bos_token": True}
    tokenizer = written(tmp_path, "qwen2", pre=pre, **ends, **SPACES)
    x, space, one = (TOKENS.index(token) for token in "xĠ1")
    assert ids(tokenizer, "x   11", around=True) == [END, x, TWO_SPACES, space, one, one]


@pytest.mark.parametrize(
    ("metadata", "named"),
    [({"pre": "smollm"}, "pre is 'smollm': for qwen2 only"), ({"pre": "megrez"}, "pre is 'megrez'")],
)
def test_qwen2_has_no_other(metadata: Any, named: str, tmp_path: Path) -> None:
    """transformers would read it as Qwen2's."""
    with pytest.raises(UnsupportedModel, match=rf"model\.gguf: tokenizer\.ggml\.{named}"):
        written_folder(tmp_path, "qwen2", **metadata)


def test_a_whole_piece_goes_before_merges(tmp_path: Path) -> None:
    """Llama 3 and Tekken have tokens that no merge leads to."""
    more = {"tokens": [*TOKENS, "xyz"], "token_type": [*TOKENIZER["tokenizer.ggml.token_type"], 1], "bos_token_id": END}
    whole, merged = [VOCAB_SIZE], [TOKENS.index(letter) for letter in "xyz"]
    for pre, expected in {"llama-bpe": whole, "tekken": whole, "dbrx": merged, "megrez": merged}.items():
        assert ids(written(tmp_path / pre, pre=pre, **more), "xyz") == expected


def test_what_begins_and_ends_a_text(tmp_path: Path) -> None:
    """Files of Llama 3 and of Mistral's Tekken begin each text with that token and need not say so."""
    ends = {"bos_token_id": END, "eos_token_id": END_OF_TURN}
    a = TOKENS.index("a")
    for number, (said, expected) in enumerate(
        [
            ({"pre": "llama-bpe"}, [END, a]),
            ({"pre": "tekken"}, [END, a]),
            ({"pre": "smollm"}, [a]),
            ({"pre": "llama-bpe", "add_bos_token": False}, [a]),
            ({"pre": "smollm", "add_bos_token": True}, [END, a]),
            ({"pre": "smollm", "add_bos_token": True, "add_eos_token": True}, [END, a, END_OF_TURN]),
            ({"pre": "smollm", "add_eos_token": True}, [a, END_OF_TURN]),
        ]
    ):
        tokenizer = written(tmp_path / str(number), **ends, **said)
        assert ids(tokenizer, "a", around=True) == expected
        assert ids(tokenizer, "a") == [a]
        assert tokenizer.bos_token_id == END


def test_qwen_takes_text_in_one_normal_form(tmp_path: Path) -> None:
    composed, decomposed = "é", "e\u0301"
    qwen = written(tmp_path / "qwen", "qwen2", pre="qwen2")
    assert ids(qwen, decomposed) == ids(qwen, composed) == [TOKENS.index("Ã"), TOKENS.index("©")]
    other = written(tmp_path / "other", "llama", pre="smollm")
    assert ids(other, decomposed) != ids(other, composed)


def test_control_tokens_of_other_characters(tmp_path: Path) -> None:
    """DeepSeek's. transformers' reader takes them for text, and gives those that end it ids that no model has."""
    names = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<think>", "<｜end▁of▁sentence｜>"]
    tokens = {
        "tokens": [*TOKENS, *names],
        "token_type": [*TOKENIZER["tokenizer.ggml.token_type"], 3, 3, 4, 1],
        "bos_token_id": VOCAB_SIZE,
        "eos_token_id": VOCAB_SIZE + 3,
    }
    tokenizer = written(tmp_path, pre="deepseek-r1-qwen", **tokens)
    assert ids(tokenizer, "a".join(names)) == [
        *(VOCAB_SIZE, TOKENS.index("a"), VOCAB_SIZE + 1, TOKENS.index("a")),
        *(VOCAB_SIZE + 2, TOKENS.index("a"), VOCAB_SIZE + 3),
    ]
    assert tokenizer.bos_token_id == VOCAB_SIZE
    assert tokenizer.eos_token_ids == {VOCAB_SIZE + 3}
    assert VOCAB_SIZE + 2 not in tokenizer.special_ids
    assert tokenizer.decode([VOCAB_SIZE + 2]) == "<think>"
    assert len(tokenizer.bytes_of_token) == VOCAB_SIZE + 4


def test_an_ordinary_token_that_pads_stays_ordinary(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, padding_token_id=TOKENS.index("!"), unknown_token_id=TOKENS.index("a"))
    assert not {TOKENS.index("!"), TOKENS.index("a")} & tokenizer.special_ids
    assert tokenizer.decode(ids(tokenizer, "Ha!")) == "Ha!"


def test_all_ends_that_a_file_names(tmp_path: Path) -> None:
    several = written(tmp_path / "several", eos_token_id=END, eos_token_ids=[END, END_OF_TURN])
    assert several.eos_token_ids == {END, END_OF_TURN}
    assert written(tmp_path / "one", eos_token_ids=[END_OF_TURN]).eos_token_ids == {END_OF_TURN}


# --- SentencePiece ----------------------------------------------------------------------------------------------------

SPM_WORDS = ["▁", "h", "i", "▁h", "▁hi", "hi", "▁▁", "\n"]
SPM_CONTROL = ["<|user|>", "<|end|>", "<|endoftext|>"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS, *SPM_CONTROL]
SPM = {
    "model": "llama",
    "tokens": SPM_TOKENS,
    "token_type": [2, 3, 3, *[6] * 256, *[1] * len(SPM_WORDS), *[3] * len(SPM_CONTROL)],
    "scores": [0.0] * 259 + [-float(len(SPM_WORDS) - index) for index in range(len(SPM_WORDS))] + [0.0] * 3,
    "merges": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def spm_tokens(tokenizer: Tokenizer, text: str, around: bool = False) -> str:
    return " ".join(SPM_TOKENS[token_id] for token_id in ids(tokenizer, text, around))


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
@pytest.mark.parametrize("pre", [None, "default", "llama-bpe"])
def test_sentencepiece_has_no_rule(pre: str | None, architecture: str, tmp_path: Path) -> None:
    tokenizer = written(tmp_path, architecture, pre=pre, **SPM)
    assert spm_tokens(tokenizer, "hi hi", around=True) == "<s> ▁hi ▁hi"
    assert tokenizer.decode(ids(tokenizer, "hi hi")) == "hi hi"


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_no_space_in_front(architecture: str, tmp_path: Path) -> None:
    tokenizer = written(tmp_path, architecture, add_space_prefix=False, add_bos_token=False, **SPM)
    assert spm_tokens(tokenizer, "hi hi", around=True) == "hi ▁hi"
    assert tokenizer.decode(ids(tokenizer, " hi")) == " hi"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "starcoder2", "gpt2"])
def test_sentencepiece_where_no_model_has_it(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"tokenizer.ggml.model is 'llama': for {architecture} only 'gpt2'"):
        written_folder(tmp_path, architecture, **SPM)


def test_phi_3_takes_no_spaces_after_its_control_tokens(tmp_path: Path) -> None:
    text = "<|user|>\nhi<|end|>\n<|endoftext|>\nhi"
    assert spm_tokens(written(tmp_path / "phi", "phi3", **SPM), text) == "<|user|> ▁hi <|end|> <|endoftext|> ▁ \n hi"
    other = spm_tokens(written(tmp_path / "llama", "llama", **SPM), text)
    assert other == "<|user|> \n hi <|end|> \n <|endoftext|> \n hi"


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pre": "newest"}, "pre is 'newest': how it splits text is not known here; known are dbrx, deepseek-coder"),
    ({"pre": "command-r"}, "pre is 'command-r'"),
    ({"pre": "default"}, "pre is 'default': how the model's text is split is not in the file"),
    ({"pre": None}, "pre is 'missing': how the model's text is split is not in the file"),
    ({"add_space_prefix": True}, "add_space_prefix is True"),
    ({"add_bos_token": 1}, "add_bos_token is 1"),
    ({"add_sep_token": True}, "add_sep_token is True"),
    ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is True"),
    ({"precompiled_charsmap": [1, 2, 3]}, "precompiled_charsmap is [1, 2, 3]"),
    ({"precompiled_charsmap": [1] * 5000}, "precompiled_charsmap is a long array"),
    ({"normalizer.lowercase": True}, "normalizer.lowercase is True"),
    ({"suppress_tokens": [5, 6]}, "suppress_tokens is [5, 6]"),
    ({"something": "new"}, "something is 'new'"),
    ({"eos_token_id": 999}, "eos_token_id is 999: the vocabulary has 262 tokens"),
    ({"add_bos_token": True}, "bos_token_id is 'missing': each text must have it"),
    ({"pre": "llama-bpe"}, "bos_token_id is 'missing': each text must have it"),
    ({"token_type": [3] * 263}, "token_type is [3, 3, 3"),
    ({"token_type": [1, 1]}, "token_type is [1, 1]: it has 2 values for 262 tokens"),
    ({"tokens": [*TOKENS[:-1], "a"]}, "tokens has 'a' twice"),
    ({"merges": ["t h", "q z"]}, "merges has 'q' and 'z'"),
    ({**SPM, "remove_extra_whitespaces": True}, "remove_extra_whitespaces is True"),
]


@pytest.mark.parametrize(("metadata", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_refusals(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        written_folder(tmp_path, **metadata)
    assert f"{tmp_path / 'model.gguf'}: tokenizer.ggml.{named}" in str(raised.value)


def test_what_changes_no_ids_is_taken(tmp_path: Path) -> None:
    plain = written_folder(tmp_path / "plain")
    neutral: dict[str, Any] = {
        "add_bos_token": False,
        "add_eos_token": False,
        "add_padding_token": True,
        "add_sep_token": False,
        "add_space_prefix": False,
        "fim_pre_token_id": 99_999,
        "normalizer.lowercase": False,
        "remove_extra_whitespaces": False,
        "scores": [0.0] * VOCAB_SIZE,
    }
    other = written_folder(tmp_path / "neutral", **neutral)
    assert (plain / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
