"""An ingress does without torch, and its tokenizer is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from cluster.text.chat_template import TemplateOptions
from cluster.text.tokenizer import Tokenizer
from tests.model_folder import model_folder

_PROGRAM = """
import json, sys
from cluster.serving.ingress import _load_tokenizer
from replicas.gguf.conversion import resolve_source
from replicas.model.identity_digests import tokenizer_digest
from cluster.text.chat_template import TemplateOptions
tokenizer, digest = _load_tokenizer(resolve_source(sys.argv[1], "/nowhere"), False)
assert digest == tokenizer_digest(sys.argv[1]) != "none"
text, messages = json.loads(sys.argv[2])
ids = tokenizer.encode(text, add_special_tokens=True)
chat_ids = tokenizer.apply_chat_template(messages, options=TemplateOptions())
hidden = "torch" not in sys.modules
import torch
print(json.dumps([hidden, ids, chat_ids, torch.ones(2).sum().item()]))
"""
TEXT = "Ferry 47 to the ﬁrst 你好 🔥 <|im_end|>"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]


def test_the_tokenizer_is_the_same_and_torch_can_be_imported_after() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _PROGRAM, model_folder(), json.dumps([TEXT, MESSAGES])],
        capture_output=True,
        text=True,
        check=True,
    )
    hidden, ids, chat_ids, total = json.loads(answer.stdout)
    assert hidden
    assert total == 2.0
    tokenizer = Tokenizer(model_folder())
    assert ids == tokenizer.encode(TEXT, add_special_tokens=True)
    assert chat_ids == tokenizer.apply_chat_template(MESSAGES, options=TemplateOptions())
    assert "PyTorch" not in answer.stderr
