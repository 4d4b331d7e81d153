"""`ratchet demo`: the command line of the demo."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of tasks and learner.")
@click.option(
    "--model", metavar="PATH", help="A folder or hub name instead of the example's tiny policy (needs a GPU)."
)
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Rounds of training tasks.")
@click.option("--concurrency", type=click.IntRange(min=1), default=32, show_default=True, help="Agents at once.")
@click.option("--held-out-tasks", type=click.IntRange(min=1), default=150, show_default=True, help="Unseen tasks.")
@click.option("--held-out-attempts", type=click.IntRange(min=1), default=2, show_default=True, help="Tries of each.")
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
    """Watch an agent that knows nothing of Ratchet get better, on the real vLLM.

    Exit code 0 only if success on held-out tasks really rose. Figures go to .ratchet/demo/result.json.

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
