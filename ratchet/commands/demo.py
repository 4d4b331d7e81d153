"""`ratchet demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command()
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of tasks and learner.")
@click.option("--real", is_flag=True, help="A real pretrained model, SmolLM2-135M-Instruct, learns to label reviews.")
@click.option(
    "--model",
    metavar="PATH",
    help="Folder or hub name in place of the tiny policy (needs a GPU), or with --real of the downloaded model.",
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Number format of vLLM and learner.")
@click.option(
    "--rounds", type=click.IntRange(min=1), help="Rounds of training tasks.  [default: 20; with --real no limit]"
)
@click.option(
    "--versions",
    type=click.IntRange(min=1),
    help="With --real: the training traffic ends once this version is live.  [default: 10]",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="With --real: the longest time of training traffic.  [default: 12]",
)
@click.option("--concurrency", type=click.IntRange(min=1), help="Concurrent agents.  [default: 32; with --real 16]")
@click.option("--held-out-tasks", type=click.IntRange(min=1), help="Held-out tasks.  [default: 150; with --real 60]")
@click.option("--held-out-attempts", type=click.IntRange(min=1), help="Attempts each.  [default: 2; with --real 3]")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder of the state.  [default: .ratchet]")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="A setting of the demo; repeatable.")
def demo(real: bool, model: str | None, dtype: str | None, settings: tuple[str, ...], **given: Any) -> int:
    """Train an unmodified agent on the real vLLM and measure its improvement.

    Exits with 0 only if the success rate on held-out tasks rose significantly. Results: .ratchet/demo/result.json,
    with --real .ratchet/demo-real/result.json. The demo has its own settings: ratchet.yaml and RATCHET_* variables are
    ignored, except secrets; --set changes one.

    \b
    Example:
      ratchet demo --seed 2
      ratchet demo --real --dtype bfloat16
      ratchet demo --model Qwen/Qwen2.5-0.5B-Instruct
    """
    from dataclasses import replace

    from ratchet.demo.run import REAL_DEFAULTS, DemoOptions, run

    for name in ("versions", "minutes"):
        if given[name] and not real:
            raise click.UsageError(f"--{name} needs --real; without it, --rounds sets the length")
    changes = {("vllm", "dtype"): dtype, ("learner", "dtype"): dtype} if dtype else {}
    options = {name: value for name, value in given.items() if value is not None}
    return run(
        replace(
            REAL_DEFAULTS if real else DemoOptions(),
            base_model=model,
            changes=changes | dict(map(_setting, settings)),
            **options,
        )
    )


def _setting(text: str) -> tuple[tuple[str, ...], Any]:
    """Return key path and value of `vllm.max_num_seqs=8`; the value is YAML."""
    import yaml

    key, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--set {text}: give KEY=VALUE, such as --set learner.learning_rate=1e-4")
    try:
        return tuple(key.strip().split(".")), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise click.UsageError(f"--set {text}: the value is not YAML: {' '.join(str(error).split())}") from error
