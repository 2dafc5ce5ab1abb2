"""Runs a plan from several client processes, so that the client is not what saturates, and measures them too."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from cluster.load.client import Client, OutgoingRequest
from cluster.load.load_plan import LoadPlan
from cluster.load.request_record import RequestRecord

_START_DELAY_S = 0.05  # after the last process is ready, so that all see the start ahead of them


@dataclass(frozen=True, slots=True)
class ClientUsage:
    """What one client process itself took. cpu_s: user and system time over wall_s, 1 core at most."""

    cpu_s: float
    wall_s: float

    @property
    def cores(self) -> float:
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of a run, in order of their index, on one monotonic clock."""

    records: list[RequestRecord]
    clients: list[ClientUsage]
    duration_s: float  # from the start until the last answer was complete


class ClientFailed(Exception):
    """A client process died or raised; the run is void."""


def run_load(plan: LoadPlan) -> LoadResult:
    """Blocks for the whole run. Raises ClientFailed, and ValueError for a plan that cannot be made."""
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    try:
        for index in range(plan.num_processes):
            ours, theirs = context.Pipe()
            child = context.Process(target=_child, args=(theirs, plan, index), daemon=True)
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        for pipe in pipes:
            _receive(pipe)  # ready
        start_s = time.monotonic() + _START_DELAY_S
        for pipe in pipes:
            pipe.send(start_s)
        parts = [_receive(pipe) for pipe in pipes]
    finally:
        for pipe in pipes:
            pipe.close()
        for child in children:
            child.join(5)
            child.kill()
    records = sorted((record for part, _ in parts for record in part), key=lambda record: record.index)
    end_s = max((record.ended_s for record in records), default=start_s)
    return LoadResult(records, [usage for _, usage in parts], end_s - start_s)


def _receive(pipe: Connection) -> tuple[list[RequestRecord], ClientUsage]:
    try:
        message = pipe.recv()
    except EOFError:
        raise ClientFailed("a client process died") from None
    if isinstance(message, str):
        raise ClientFailed(message)
    parts: tuple[list[RequestRecord], ClientUsage] = message
    return parts


def _child(pipe: Connection, plan: LoadPlan, process: int) -> None:
    """Ready -> start time -> (records, usage); a text instead when something fails."""
    try:
        pipe.send(asyncio.run(_run(pipe, plan, process)))
    except (Exception, KeyboardInterrupt):
        pipe.send(traceback.format_exc())


async def _run(pipe: Connection, plan: LoadPlan, process: int) -> tuple[list[RequestRecord], ClientUsage]:
    client = Client(plan.target, plan.timeout_s)
    requests = plan.requests(process, plan.num_processes)
    if process == 0:
        for request in plan.warmup_requests():
            record = await client.send(request)
            if not record.is_ok:
                raise RuntimeError(f"a warm-up request failed: {record.error}")
    gc.collect()
    gc.freeze()
    gc.disable()  # a pause here would be read as one of the server's
    pipe.send(([], ClientUsage(0, 0)))
    start_s = await asyncio.to_thread(pipe.recv)
    cpu_s = time.process_time()
    records = await send_all(client, requests, start_s)
    usage = ClientUsage(time.process_time() - cpu_s, time.monotonic() - start_s)
    client.close()
    return records, usage


async def send_all(client: Client, requests: list[OutgoingRequest], start_s: float) -> list[RequestRecord]:
    """Each at its time after `start_s`, however many are open: an open loop."""
    tasks = []
    for request in requests:
        due_s = start_s + request.scheduled_s
        delay_s = due_s - time.monotonic()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        tasks.append(asyncio.create_task(client.send(replace(request, scheduled_s=due_s))))
    return await asyncio.gather(*tasks)
