"""A model of the Hugging Face Hub, asked for by its id: what it has, or in one line why it can't be had. No torch.

Asked once and with a deadline, before anything tries to load it: transformers tries a Hub that it can't reach for half
a minute, in every replica, and then names neither it nor the model.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import HfApi

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MODEL_KEY = "model.source"
_CONFIG = "config.json"
_PATIENCE_S = 8.0
_PAUSE_S = 2.0
# Of everything else a repository may have: weights in other formats, pictures, examples.
_WANTED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_WEIGHTS = {".safetensors": "*.safetensors", ".bin": "pytorch_model*.bin"}


class HubRefusal(Exception):
    """The model can't be had from the Hub; the message names both, and what to do."""


class HubUnreachable(HubRefusal):
    """Nothing is known of the model: the Hub did not answer."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """config: its config.json, in the Hub's cache. counts: numbers by their type, as safetensors counts them; None
    where it does not. patterns: of the files to fetch, which are num_bytes. key: of the config, that names it.
    """

    hub_id: str
    config: Path
    counts: Mapping[str, int] | None
    patterns: tuple[str, ...]
    num_bytes: int
    key: str = MODEL_KEY


def find_on_hub(hub_id: str, trust_remote_code: bool = False, key: str = MODEL_KEY) -> HubModel:
    """Waits for the Hub for 8 s at most. Its config.json is in the Hub's cache afterwards. Raises HubRefusal. key: of
    the config, that names the model."""
    # Loaded before the clock runs: from a cold disk that takes longer than an answer.
    from huggingface_hub import HfApi, hf_hub_download

    found: list[HubModel | BaseException] = []

    def ask() -> None:
        try:
            found.append(_ask(HfApi(), hf_hub_download, hub_id, trust_remote_code, key))
        except Exception as error:
            found.append(error)

    # A thread, as looking up the Hub's address alone may take longer, and can't be given a deadline.
    thread = threading.Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    if not found:
        raise _unreachable(hub_id, f"no answer within {_PATIENCE_S:g} s", key)
    (answer,) = found
    if isinstance(answer, BaseException):
        raise _refusal(hub_id, answer, key) from answer
    return answer


def copy_in_cache(hub_id: str) -> Path | None:
    """The folder of the copy that an earlier start has fetched, perhaps not all of it; None without one."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(hub_id, _CONFIG)
    return Path(config).parent if isinstance(config, str) else None


def fetch(model: HubModel, with_weights: bool = True, on_bytes: Callable[[int], None] = lambda _: None) -> Path:
    """Its files, into the Hub's cache; the folder. Blocks for as long as that takes. on_bytes: told now and then how
    many of them are there, on threads of the Hub's library.

    Raises HubRefusal.
    """
    from huggingface_hub import snapshot_download

    patterns = [pattern for pattern in model.patterns if with_weights or pattern not in _WEIGHTS.values()]
    if with_weights:
        _refuse_full_disk(model)
    try:
        return Path(snapshot_download(model.hub_id, allow_patterns=patterns, tqdm_class=_bar_class(on_bytes)))
    except Exception as error:
        raise _refusal(model.hub_id, error, model.key) from error


def _bar_class(on_bytes: Callable[[int], None]) -> Any:
    """What the Hub's library takes for its progress bars: nothing is drawn."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.counts_bytes, self.num_counted = options.get("unit") == "B", 0
            self.lock = threading.Lock()  # files that come at the same time share a bar
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            more = int(n or 0)
            with self.lock:
                self.num_counted += more
                # Of several bars, of what has come and of what has been written, each is told: the later one is right.
                if self.counts_bytes and more:
                    on_bytes(self.num_counted)
            return None

    return Bar


def refuse_unavailable(source: str, key: str = MODEL_KEY) -> None:
    """For a replica: raises HubRefusal for a Hub id that it could not load either. Of a path nothing is asked. key: as
    of `find_on_hub`.

    A Hub that does not answer is asked three times: a replica that fails takes its pool's start with it.
    """
    if not HUB_ID.fullmatch(source) or Path(source).exists() or copy_in_cache(source) is not None:
        return
    for is_last in (False, False, True):
        try:
            find_on_hub(source, key=key)
            return
        except HubUnreachable:
            if is_last:
                raise
            time.sleep(_PAUSE_S)


def refuse_missing_path(source: str, key: str = MODEL_KEY) -> None:
    """For a replica: raises FileNotFoundError for a path where nothing is any more, which transformers would take for a
    Hub id that is none. key: as of `find_on_hub`."""
    if not HUB_ID.fullmatch(source) and not Path(source).exists():
        raise FileNotFoundError(f"{key}: {source} is not there any more; bring it back, or set another")


def _refuse_full_disk(model: HubModel) -> None:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    copy = copy_in_cache(model.hub_id)
    there = sum(file.stat().st_size for file in copy.iterdir() if file.is_file()) if copy else 0
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    needed = model.num_bytes - there
    if needed > free:
        raise HubRefusal(
            f"{model.key}: {model.hub_id} takes {needed / 1e9:.1f} GB more of the disk, but the Hub's cache {cache} "
            f"has {free / 1e9:.1f} GB free; make room, or set HF_HOME to a folder on another disk"
        )


def _ask(api: HfApi, download: Callable[..., str], hub_id: str, trust_remote_code: bool, key: str) -> HubModel:
    # Whoever waits for this thread gives up sooner.
    info = api.model_info(hub_id, timeout=2 * _PATIENCE_S, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if _CONFIG not in sizes:
        gguf = next((name for name in sizes if name.endswith(".gguf")), None)
        raise HubRefusal(
            f"{key}: {hub_id} on the Hub has no config.json, so transformers can't load it"
            + (f"; it has {gguf}: download that file and give its path" if gguf else "; choose another model")
        )
    # Anybody may ask what a gated model is; its files are another matter.
    config = Path(download(hub_id, _CONFIG, etag_timeout=_PATIENCE_S))
    top = [name for name in sizes if "/" not in name]
    kind = next((kind for kind in _WEIGHTS if any(name.endswith(kind) for name in top)), None)
    if kind is None:
        raise HubRefusal(f"{key}: {hub_id} on the Hub has no weights (*.safetensors); choose another model")
    patterns = (*_WANTED, _WEIGHTS[kind], *(["*.py"] if trust_remote_code else []))
    counted = getattr(getattr(info, "safetensors", None), "parameters", None)
    wanted = [name for name in top if any(Path(name).match(pattern) for pattern in patterns)]
    return HubModel(hub_id, config, counted, patterns, sum(sizes[name] for name in wanted), key)


def _refusal(hub_id: str, error: BaseException, key: str) -> HubRefusal:
    """By whatever in the chain of causes says most. huggingface_hub's classes go by their names: they move about."""
    if isinstance(error, HubRefusal):
        return error
    chain = list(_causes(error))
    kinds = {kind.__name__: cause for cause in reversed(chain) for kind in type(cause).__mro__}
    page = f"{_endpoint()}/{hub_id}"
    subject = f"{key}: {hub_id}"
    if "OfflineModeIsEnabled" in kinds:
        return HubUnreachable(
            f"{subject} is not in the Hub's cache here, and HF_HUB_OFFLINE is set: unset it, or give a folder"
        )
    if "GatedRepoError" in kinds:
        how = "its account has no access" if _has_token() else "HF_TOKEN is not set"
        return HubRefusal(
            f"{subject} is a gated model of the Hub, and {how}: accept its licence at {page}, and set HF_TOKEN"
        )
    if "RepositoryNotFoundError" in kinds:
        token = "HF_TOKEN's account may not see it" if _has_token() else "for a private one set HF_TOKEN"
        return HubRefusal(f"{subject}: the Hub has no such model ({page}); is it spelt right? {token}")
    if "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds:
        return HubRefusal(f"{subject}: a file of it is missing on the Hub ({page}); choose another model")
    status = next((code for cause in chain if (code := _status(cause))), None)
    if status in (401, 403):
        how = "HF_TOKEN is wrong or has expired" if _has_token() else "HF_TOKEN is not set"
        return HubRefusal(
            f"{subject}: the Hub does not let it be read ({status}): {how}; make a token at {_endpoint()}"
        )
    if status is not None:
        return _unreachable(hub_id, f"it answers {status}", key)
    if "HFValidationError" in kinds:
        return HubRefusal(f"{subject} is no id of a model on the Hub; expected org/name, a folder or a .gguf file")
    root = chain[-1]
    return _unreachable(hub_id, (str(root).strip() or type(root).__name__).splitlines()[0], key)


def _unreachable(hub_id: str, reason: str, key: str) -> HubUnreachable:
    return HubUnreachable(
        f"{key}: {hub_id}: the Hub ({_endpoint()}) can't be reached: {reason}; is there a network, or a "
        "proxy to set? Without one give a folder or a .gguf file"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _status(error: BaseException) -> int | None:
    code: Any = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) else None


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
