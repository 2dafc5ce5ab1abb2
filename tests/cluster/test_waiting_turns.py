"""Turns: one at a time, the quick ones first, and none is lost to somebody who has gone."""

from __future__ import annotations

import asyncio

from cluster.grammars.waiting_turns import WaitingTurns


class Visitors:
    """Who takes turns, in the order in which they had one. Each keeps it until `leave`."""

    def __init__(self) -> None:
        self.turns = WaitingTurns()
        self.served: list[str] = []
        self.num_inside = 0
        self._may_leave = asyncio.Semaphore(0)

    async def come(self, name: str, is_long: bool = False, client: str = "") -> None:
        async with self.turns.turn(is_long, client):
            self.num_inside += 1
            assert self.num_inside == 1
            self.served.append(name)
            try:
                await self._may_leave.acquire()
            finally:
                self.num_inside -= 1

    def leave(self) -> None:
        self._may_leave.release()

    async def serve_all(self, visits: list[tuple[str, bool, str]]) -> list[str]:
        """Who came after the first one, in the order in which they were served."""
        tasks = []
        for name, is_long, client in visits:
            tasks.append(asyncio.ensure_future(self.come(name, is_long, client)))
            await settled()
        for _ in visits:
            self.leave()
            await settled()
        await asyncio.gather(*tasks)
        return self.served[1:]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_quick_ones_go_first_and_else_who_came_first() -> None:
    visitors = Visitors()
    names = [("long 1", True), ("long 2", True), ("quick 1", False), ("long 3", True), ("quick 2", False)]
    tasks = []
    for name, is_long in names:
        tasks.append(asyncio.ensure_future(visitors.come(name, is_long)))
        await settled()
    for _ in names:
        visitors.leave()
        await settled()
    await asyncio.gather(*tasks)
    assert visitors.served == ["long 1", "quick 1", "quick 2", "long 2", "long 3"]
    visitors.leave()
    await visitors.come("later")


async def test_who_has_gone_keeps_nobody_waiting() -> None:
    visitors = Visitors()
    tasks = {}
    for name in ("inside", "waits", "given", "last"):
        tasks[name] = asyncio.ensure_future(visitors.come(name))
        await settled()
    tasks["waits"].cancel()
    await settled()
    visitors.leave()
    await tasks["inside"]  # "given" has the turn, and has not run since
    tasks["given"].cancel()
    await settled()
    assert visitors.served[-1] == "last"
    tasks["last"].cancel()
    await settled()
    visitors.leave()
    await visitors.come("later")
    assert visitors.served[-1] == "later"


async def test_clients_are_served_in_turns_whoever_came_first() -> None:
    for is_long in (False, True):
        visits = [
            (f"{client}{number}", is_long, client)
            for client, n in (("a", 5), ("b", 2), ("c", 1))
            for number in range(n)
        ]
        served = await Visitors().serve_all([("inside", False, "z"), *visits])
        assert served == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


async def test_a_client_s_line_ends_with_those_who_have_gone() -> None:
    visitors = Visitors()
    tasks = {}
    for name, client in (("inside", "z"), ("a0", "a"), ("a1", "a"), ("b0", "b")):
        tasks[name] = asyncio.ensure_future(visitors.come(name, client=client))
        await settled()
    tasks["a0"].cancel()
    tasks["a1"].cancel()
    await settled()
    for _ in range(2):
        visitors.leave()
        await settled()
    assert visitors.served == ["inside", "b0"]
    visitors.leave()
    await visitors.come("later", client="a")


async def test_quick_ones_without_end_do_not_keep_long_ones_for_ever() -> None:
    visits = [(f"long {number}", True, "a") for number in range(3)]
    visits += [(f"quick {number}", False, "b") for number in range(120)]
    served = await Visitors().serve_all([("inside", False, "z"), *visits])
    places = [index for index, name in enumerate(served) if name.startswith("long")]
    assert places == [50, 101, 122]
