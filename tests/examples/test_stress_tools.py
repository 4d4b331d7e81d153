"""The stress example: failures and timeouts are counted by tool, and limits decide the exit code."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from examples.stress_tools import ToolCall, main, stress


def half(number: int) -> float:
    """Fails for odd numbers."""
    if number % 2:
        raise ValueError("odd")
    return number / 2


async def never() -> None:
    """A tool that hangs."""
    await asyncio.Event().wait()


TOOLS = {"half": half}


async def test_failures_are_counted_by_tool_and_kind() -> None:
    calls = [ToolCall("half", {"number": number}) for number in range(10)]
    found = {one.tool: one for one in await stress({"half": half}, calls, 4)}
    assert len(found["half"].seconds) == 5
    assert found["half"].failures == {"ValueError": 5}
    assert found["half"].failure_rate == 0.5
    assert "5 ValueError" in found["half"].line()


async def test_a_tool_that_hangs_has_failed() -> None:
    (found,) = await stress({"never": never}, [ToolCall("never")] * 3, 3, timeout=0.01)
    assert found.failures == {"TimeoutError": 3}
    assert found.seconds == []


async def test_no_more_calls_run_together_than_the_given_concurrency() -> None:
    inside = most = 0

    async def count() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1

    await stress({"count": count}, [ToolCall("count")] * 20, 7)
    assert most == 7


async def test_as_many_calls_run_together_as_given_also_with_fewer_lines_and_tools_that_are_not_async() -> None:
    everyone = threading.Barrier(50, timeout=60)  # breaks unless fifty calls are inside at once
    (found,) = await stress({"wait": everyone.wait}, [ToolCall("wait")] * 25, 50)
    assert (len(found.seconds), found.failures) == (50, {})


def test_a_file_without_calls_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "calls.jsonl").touch()
    with pytest.raises(SystemExit):
        main([f"{__name__}:TOOLS", str(tmp_path / "calls.jsonl")])
    assert "calls.jsonl has no calls" in capsys.readouterr().err


@pytest.mark.parametrize(("numbers", "code"), [((0, 2, 4), 0), ((0, 1, 2), 1)])
def test_the_exit_code_says_whether_a_limit_is_exceeded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], numbers: tuple[int, ...], code: int
) -> None:
    lines = [json.dumps({"tool": "half", "arguments": {"number": number}}) for number in numbers]
    (tmp_path / "calls.jsonl").write_text("\n".join(lines))
    given = [f"{__name__}:TOOLS", str(tmp_path / "calls.jsonl"), "--concurrency", "1", "8", "--max-p99", "60"]
    assert main(given) == code
    assert capsys.readouterr().out.count("\nhalf") == 2
