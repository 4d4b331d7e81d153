"""Work in the background: its result and its errors come to the caller, one work at a time."""

from __future__ import annotations

import threading

import pytest

from ratchet.trainer.controller.background_work import BackgroundWork

SECONDS = 60.0


def test_the_result_is_recorded_in_the_callers_thread() -> None:
    done = threading.Event()
    background = BackgroundWork("test", done.set)
    found: list[tuple[int, str, str]] = []

    def record(result: tuple[int, str]) -> bool:
        found.append((*result, threading.current_thread().name))
        return True

    background.start("a sum", lambda: (1 + 1, threading.current_thread().name), record)
    assert done.wait(SECONDS)
    assert (background.is_busy, background.what, found) == (True, "a sum", [])
    assert background.collect()
    assert found == [(2, "test", threading.main_thread().name)]
    assert not background.collect()
    assert not background.is_busy
    background.close()


def test_an_error_is_raised_once_and_work_goes_on() -> None:
    background = BackgroundWork("test")

    def fail() -> int:
        raise ValueError("scripted")

    background.start("a failure", fail, lambda _: True)
    assert background.wait(SECONDS)
    with pytest.raises(ValueError, match="scripted"):
        background.collect()
    background.start("a success", lambda: 1, lambda result: result == 1)
    assert background.wait(SECONDS)
    assert background.collect()
    background.close()


def test_nothing_starts_before_the_last_result_is_collected() -> None:
    gate = threading.Event()
    background = BackgroundWork("test")
    background.start("a wait", lambda: gate.wait(SECONDS), lambda _: False)
    assert not background.collect()
    assert not background.wait(0.0)
    with pytest.raises(RuntimeError, match="before a wait was collected"):
        background.start("another", lambda: None, lambda _: False)
    background.close()  # the work that runs may end
    gate.set()
    assert background.wait(SECONDS)
    assert not background.collect()
