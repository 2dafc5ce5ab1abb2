"""vLLM on one card, or on each of several: behind HAProxy, or one computing prompts for the other.

Its defaults, but no prefix cache unless that is asked for, and random weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.child_server import child_server
from benchmarks.gpu.handing_proxy import handing
from benchmarks.gpu.spread import spread
from benchmarks.real_server import free_ports

SERVED_NAME = "shape"
_START_TIMEOUT_S = 240.0
# Its own handing over of KV, by NIXL: who computes and who generates is said by each request.
_HANDS_OVER = ("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}))


@dataclass(frozen=True, slots=True)
class VllmPlace:
    """site: where vLLM is installed. folder: the model. logs: for what the servers say."""

    site: Path
    folder: Path
    logs: Path
    max_model_len: int


@contextmanager
def vllm_servers(
    place: VllmPlace, num_cards: int, *, has_prefix_cache: bool, hands_over: bool, flags: Sequence[str] = ()
) -> Iterator[str]:
    """The URL of one for each card, until the end. Blocks for a minute or two, as the slowest. hands_over: of two
    cards the first computes prompts for the second. Raises RuntimeError, and ImportError where HAProxy or NIXL is
    lacking."""
    cards: Sequence[int | None] = [None] if num_cards == 1 else range(num_cards)
    flags = [*vllm_cache_flags(has_prefix_cache), *flags]
    paths, ports = [place.site], free_ports(2 * num_cards)
    if hands_over:
        flags += _HANDS_OVER
        paths.append(nixl_alone(place.logs))
    python_path = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    with ExitStack() as stack:
        starts = [
            _vllm_server(place, card, port, flags, python_path | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)})
            for card, port, side_port in zip(cards, ports[:num_cards], ports[num_cards:], strict=True)
        ]
        with ThreadPoolExecutor(len(starts)) as threads:
            urls = list(threads.map(stack.enter_context, starts))
        if hands_over:
            yield stack.enter_context(handing(urls[0], urls[1], place.logs))
        else:
            yield urls[0] if len(urls) == 1 else stack.enter_context(spread(urls, place.logs))


def nixl_alone(folder: Path) -> Path:
    """A folder on whose path NIXL is, and nothing else of where it is installed here. Raises ImportError."""
    found = importlib.util.find_spec("nixl_cu13")
    if found is None or found.origin is None:
        raise ImportError("nixl-cu13 is not installed")
    package, alone = Path(found.origin).parent, folder / "nixl"
    alone.mkdir(exist_ok=True)
    for name in (package.name, f"{package.name}.libs"):
        if not (alone / name).exists():
            (alone / name).symlink_to(package.parent / name)
    return alone


@contextmanager
def _vllm_server(
    place: VllmPlace, card: int | None, port: int, flags: Sequence[str], environment: Mapping[str, str]
) -> Iterator[str]:
    """Yields the URL. Blocks for a minute or two. Raises RuntimeError when it is not up in time. card: of several;
    None: the one there is."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(place.folder)]
    command += ["--load-format", "dummy", "--served-model-name", SERVED_NAME, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(place.max_model_len), *flags]
    cards = {} if card is None else {"CUDA_VISIBLE_DEVICES": visible_card(card, os.environ)}
    whole = own_vllm_cache(os.environ | cards) | environment
    whole |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with child_server(
        command,
        f"http://127.0.0.1:{port}",
        place.logs / f"vllm-{card or 0}.log",
        _START_TIMEOUT_S,
        environment=whole,
        folder=place.folder,
        stops_by=signal.SIGINT,
    ) as url:
        yield url


def visible_card(number: int, environment: Mapping[str, str]) -> str:
    """The name of a card, as CUDA_VISIBLE_DEVICES has it, of those that this process sees."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[number] if visible else str(number)


def vllm_cache_flags(has_prefix_cache: bool) -> list[str]:
    return (
        ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        if has_prefix_cache
        else ["--no-enable-prefix-caching"]
    )


def own_vllm_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """With a folder for compiled code that is not that of a vLLM on another card of the machine, which may be compiling
    the same meanwhile."""
    cards = environment.get("CUDA_VISIBLE_DEVICES")
    if not cards:
        return dict(environment)
    root = Path("~/.cache").expanduser() / f"vllm-{cards.replace(',', '-')}"
    return {"VLLM_CACHE_ROOT": str(root), **environment}
