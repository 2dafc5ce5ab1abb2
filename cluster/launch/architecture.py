"""What transformers knows of a model's architecture, by its config.json and without torch: the same refusals that a
replica would make when it loads the model, minutes earlier.
"""

from __future__ import annotations

import contextlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster.text.no_torch import no_torch
from replicas.model_support import UnsupportedModel, model_name, naming_failures, refuse_unsupported
from replicas.quantisation.scheme_reading import chosen_scheme

_LETS_ATTENTION_BE_REPLACED = re.compile(r"^\s+_supports_attention_backend\s*=\s*True\b", re.MULTILINE)
# Found only by running them (replicas/model/attention_trace.py); tests/engines/test_architectures.py tells when a newer
# transformers changes one.
_FOREIGN_ATTENTION = {
    "nemotron": "its attention does not pass on what the paged one is called with",
    "doge": "its attention has a mask of its own",
    "diffllama": "its layers call attention twice",
    "hrm_text": "its layers are run many times",
}


def read_architecture(file: Path, trust_remote_code: bool, quantise: str = "none") -> Any | None:
    """The PretrainedConfig of a config.json; None where only the model's own code knows. Takes a second the first time.

    Raises UnsupportedModel for one that no replica would serve, and where config.json can't be read. No code of the
    model is run. quantise: as in the config.
    """
    said = _config_json(file)
    if trust_remote_code and "auto_map" in said:
        return None
    if not said.get("model_type"):
        raise UnsupportedModel(f"{file} has no model_type: is it a model of transformers?")
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_torch())
        from transformers import CONFIG_MAPPING, AutoConfig
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        if said["model_type"] not in CONFIG_MAPPING:
            raise UnsupportedModel(_unknown(file, said))
        stack.enter_context(naming_failures(str(file), "reading its configuration"))
        config = AutoConfig.from_pretrained(file, trust_remote_code=False)
    refuse_unsupported(config)
    chosen_scheme(config, quantise)
    _refuse_class(config)
    return config


def _config_json(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_bytes())
    except OSError as error:
        raise UnsupportedModel(f"{file}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UnsupportedModel(f"{file} is not valid JSON: {error}") from None
    if not isinstance(said, dict):
        raise UnsupportedModel(f"{file} is no JSON object")
    return said


def _unknown(file: Path, said: dict[str, Any]) -> str:
    if "auto_map" in said:
        return (
            f"{file}: model_type {said['model_type']!r} is computed by code that comes with the model; set "
            "model.trust_remote_code: true if you trust it like your own"
        )
    return (
        f"{file}: the transformers that is installed does not know model_type {said['model_type']!r}; a newer one "
        "may, or serve another model"
    )


def _refuse_class(config: Any) -> None:
    """What the class that would compute it says of itself: its source is looked at, not run."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise UnsupportedModel(f"{model_name(config)} is no causal language model; only those are served")
    reason = _FOREIGN_ATTENTION.get(config.model_type)
    if reason is not None:
        raise UnsupportedModel(f"{name} can't be served: {reason}")
    source = find_spec(type(config).__module__.replace(".configuration_", ".modeling_"))
    if source is None or source.origin is None:
        return
    text = Path(source.origin).read_text(encoding="utf-8", errors="replace")
    if not _LETS_ATTENTION_BE_REPLACED.search(text):
        raise UnsupportedModel(f"{name} does not let its attention be replaced, so it can't be served")
