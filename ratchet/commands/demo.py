"""`ratchet demo`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of tasks and learner.")
@click.option("--model", metavar="PATH", help="Folder or hub name in place of the bundled tiny policy (needs a GPU).")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Rounds of training tasks.")
@click.option("--concurrency", type=click.IntRange(min=1), default=32, show_default=True, help="Concurrent agents.")
@click.option("--held-out-tasks", type=click.IntRange(min=1), default=150, show_default=True, help="Held-out tasks.")
@click.option("--held-out-attempts", type=click.IntRange(min=1), default=2, show_default=True, help="Attempts each.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder of the state.  [default: .ratchet]")
def demo(
    seed: int,
    model: str | None,
    rounds: int,
    concurrency: int,
    held_out_tasks: int,
    held_out_attempts: int,
    state_dir: Path | None,
) -> int:
    """Train an unmodified agent on the real vLLM and measure its improvement.

    Exits with 0 only if the success rate on held-out tasks rose significantly. Results: .ratchet/demo/result.json.
    The demo has its own settings: ratchet.yaml and RATCHET_* variables are ignored, except secrets.

    \b
    Example:
      ratchet demo --seed 2
      ratchet demo --model Qwen/Qwen2.5-0.5B-Instruct
    """
    from ratchet.demo.run import DemoOptions, run

    return run(
        DemoOptions(
            seed=seed,
            base_model=model,
            rounds=rounds,
            concurrency=concurrency,
            held_out_tasks=held_out_tasks,
            held_out_attempts=held_out_attempts,
            state_dir=state_dir,
        )
    )
