# SPDX-License-Identifier: Apache-2.0
"""The event loop waits for results of other threads and is woken once for all that are ready."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from vllm_steer.server.http.result_waiter import wait_for


async def many(count: int, threads: int) -> tuple[list[int], int]:
    """Return the results of futures that several threads set, and the number of wake-ups."""
    loop, wakes = asyncio.get_running_loop(), 0
    call = loop.call_soon_threadsafe

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal wakes
        wakes += 1
        return call(*args, **kwargs)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
    futures: list[Future[int]] = [Future() for _ in range(count)]
    waiting = [asyncio.create_task(wait_for(future)) for future in futures]
    await asyncio.sleep(0)

    def work(part: int) -> None:
        for number in range(part, count, threads):
            futures[number].set_result(number)

    workers = [threading.Thread(target=work, args=(part,)) for part in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:  # the loop does not run meanwhile
        worker.join()
    return await asyncio.wait_for(asyncio.gather(*waiting), 30), wakes


@pytest.mark.parametrize("threads", [1, 4])
def test_every_result_arrives_with_one_wake_up(threads: int) -> None:
    """Catches a result whose waiter is never woken, results that are exchanged, and one wake-up per result."""
    found, wakes = asyncio.run(many(200, threads))
    assert found == list(range(200))
    assert wakes == 1


def test_results_that_are_ready_or_come_later() -> None:
    """Catches a loop that is woken only for the first results."""

    async def run() -> list[int]:
        found = []
        for number in range(3):
            future: Future[int] = Future()
            threading.Timer(0.01 * number, future.set_result, (number,)).start()
            found.append(await asyncio.wait_for(wait_for(future), 30))
        return found

    assert asyncio.run(run()) == [0, 1, 2]


def test_cancelled_waiter_leaves_the_future_and_the_other_waiters() -> None:
    """Catches a consumer's work that is cancelled with the client's request, and waiters that are lost with it."""

    async def run() -> tuple[bool, int]:
        one, other = Future[int](), Future[int]()
        left, stays = asyncio.create_task(wait_for(one)), asyncio.create_task(wait_for(other))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        one.set_result(1)
        other.set_result(2)
        return one.cancelled(), await asyncio.wait_for(stays, 30)

    assert asyncio.run(run()) == (False, 2)


def test_result_after_the_loop_has_closed() -> None:
    """Catches an error in a consumer's thread at the end of the server."""
    future: Future[int] = Future()

    async def run() -> None:
        asyncio.create_task(wait_for(future))  # noqa: RUF006
        await asyncio.sleep(0)

    asyncio.run(run())
    future.set_result(1)
    assert future.result() == 1
