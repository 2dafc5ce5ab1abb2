"""An engine dies while its peer is full and has a queue: no stream breaks, and none waits behind newcomers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cluster.routing.generation import Generation
from replicas.settings import FaultSettings
from scheduler.generation_spec import GenerationSpec
from tests.engines.dying_engines import AdmissionLog, dying_engines
from tests.engines.held_streams import held_streams
from tests.engines.local_system import GREEDY, collect, touch
from tests.engines.tiny_goldens import TinyGoldens
from tests.engines.tiny_model import tiny_settings
from tests.golden.golden_set import Golden

NUM_STREAMS = 10  # five at each engine, and full it is
NUM_NEWCOMERS = 12


def generation(name: str, golden: Golden) -> Generation:
    spec = GenerationSpec(tuple(golden.prompt_ids), (0,), 64, frozenset(), GREEDY)
    return Generation(name, spec, 600.0)


def test_streams_of_a_dead_engine_go_before_whoever_waits_at_its_full_peer(
    tiny_goldens: TinyGoldens, tmp_path: Path
) -> None:
    goldens = [tiny_goldens.of(17, number) for number in range(4)]
    changes = {"max_running_sequences": 5, "testing": FaultSettings(str(tmp_path))}
    settings = tiny_settings("decode", tiny_goldens.folder, **changes)

    async def run() -> None:
        async with engines.routed(queue_s=300.0) as router:
            log = AdmissionLog(engines.engines["decode-1"])
            with held_streams(engines.engines.values(), 32):
                streams = [asyncio.create_task(collect(router, of)) for of in begun]
                while not all(of.binding.is_final for of in begun):
                    await asyncio.sleep(0.001)
                touch(tmp_path, "hold.decode.step")  # so that nobody ends before all wait
            late = [asyncio.create_task(collect(router, of)) for of in newcomers]
            while sum(built.engine.scheduler.num_queued for built in engines.engines.values()) < NUM_NEWCOMERS:
                await asyncio.sleep(0.001)
            num_begun = len([open_ for open_ in engines.open_at("decode-0") if open_.num_sent])
            assert num_begun > 0
            engines.die("decode-0")
            while sum(request.has_begun for what, request in log.entries if what == "submitted") < num_begun:
                await asyncio.sleep(0.001)
            (tmp_path / "hold.decode.step").unlink()
            texts = await asyncio.gather(*streams)
            assert [text.token_ids[0] for text in texts] == [golden.output_ids for golden in expected[:NUM_STREAMS]]
            texts = await asyncio.gather(*late)
            assert [text.token_ids[0] for text in texts] == [golden.output_ids for golden in expected[:NUM_NEWCOMERS]]
            assert log.newcomers_before_begun() == []

    with dying_engines(settings, 2) as engines:
        expected = [goldens[number % 4] for number in range(max(NUM_STREAMS, NUM_NEWCOMERS))]
        begun = [generation(f"begun-{n}", expected[n]) for n in range(NUM_STREAMS)]
        newcomers = [generation(f"new-{n}", expected[n]) for n in range(NUM_NEWCOMERS)]
        asyncio.run(run())
