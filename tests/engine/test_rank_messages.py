"""How a rank waits for what rank 0 has to say."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.engine.worker import ranks

pytestmark = pytest.mark.in_process

LEADER = 4321


class Queue:
    """Of messages that come late: each None is a wait in vain."""

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)

    def dequeue(self, timeout: float) -> Any:
        assert timeout > 0
        message = self.messages.pop(0)
        if message is None:
            raise TimeoutError
        return message


class Group:
    rank_in_group, world_size = 1, 2

    def __init__(self, queue: Any) -> None:
        self.mq_broadcaster = queue

    def broadcast_object(self, value: Any, src: int) -> Any:
        assert src == 0
        return LEADER if value is not None else "by the group"


def rank(monkeypatch: pytest.MonkeyPatch, queue: Any) -> ranks.Ranks:
    monkeypatch.setattr(ranks, "get_tp_group", lambda: Group(queue))
    return ranks.Ranks()


def test_it_waits_as_long_as_the_engine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank(monkeypatch, Queue(None, None, "late")).receive() == "late"


@pytest.mark.parametrize(("parent", "leader"), [(True, True), (True, False), (False, True), (False, False)])
def test_it_ends_with_the_engine_and_rank_0(monkeypatch: pytest.MonkeyPatch, parent: bool, leader: bool) -> None:
    waiting = rank(monkeypatch, Queue("a step", None, "another"))
    assert waiting.receive() == "a step"
    if not parent:
        monkeypatch.setattr(ranks.os, "getppid", lambda: 1)
    monkeypatch.setattr(ranks.psutil, "pid_exists", lambda process: process == LEADER and leader)
    if parent or leader:  # a slow rank 0 goes on with the step, and what both compute together
        assert waiting.receive() == "another"
    else:
        with pytest.raises(SystemExit):
            waiting.receive()


def test_groups_without_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank(monkeypatch, None).receive() == "by the group"
