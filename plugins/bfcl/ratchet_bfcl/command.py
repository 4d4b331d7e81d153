"""`ratchet eval bfcl`: measure versions of a model on the Berkeley Function-Calling Leaderboard through the proxy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratchet import options
from ratchet.output import show

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.store import Store
    from ratchet.trainer.statistics import Ranking
    from ratchet.tuner.reports import TuningResult
    from ratchet_bfcl.evaluation import BfclRequest


@click.command()
@click.argument("versions", nargs=-1, metavar="[NAME@VERSION...]")
@click.option(
    "--category",
    "categories",
    multiple=True,
    help="Category or group of categories. May be repeated.  [default: simple_python]",
)
@click.option("--limit", type=click.IntRange(min=1), help="Sample this many entries per category.  [default: all]")
@click.option("--seed", type=int, default=0, help="Random seed of the sample.  [default: 0]")
@click.option("--threads", type=click.IntRange(min=1), default=8, help="Entries evaluated concurrently.  [default: 8]")
@click.option("--temperature", type=float, default=0.0, help="Sampling temperature.  [default: 0]")
@click.option("--prompt-tools", is_flag=True, help="Put the tools into the prompt, for models without a tool parser.")
@options.proxy_url
@click.option("--environment", type=click.Path(path_type=Path), help="Folder of the virtual environment of bfcl-eval.")
@click.option("--setup", is_flag=True, help="Create that environment first; needs a package index.")
@options.store_url
@options.alias
@options.project
@options.as_json
@options.with_settings(options.read_agent_settings)
def bfcl(settings: Settings, versions: tuple[str, ...], environment: Path | None, setup: bool, **given: Any) -> None:
    """Measure function calling with the benchmark BFCL: the same entries for each version, compared entry by entry.

    Default versions: the base model (version 0) and the live one. The calls are never trained. The package bfcl-eval
    needs a virtual environment of its own, which --setup creates; without versions, --setup does only that.

    \b
    Example:
      ratchet eval bfcl mail@0 mail@7 --category simple_python --limit 100
    """
    from ratchet_bfcl.evaluation import VERSION, find, set_up

    folder = environment or settings.state_dir.absolute() / "environments" / f"bfcl-{VERSION}"
    if settings.model in versions:
        raise click.UsageError(f"{settings.model} is the trained alias: name a version, {settings.model}@0")
    if setup:
        python = set_up(folder)
        click.echo(f"bfcl-eval {VERSION} is ready: {folder}", err=True)
        if not versions:
            return
    else:
        python = find(folder)
    request, proxy = _request(given), click.get_current_context().params["proxy"]
    with options.open_store_for_command(settings.store_url) as opened:
        found, ranked = _evaluate(opened, settings, versions or _both(opened, settings.model), python, request, proxy)
    from ratchet.tuner.reports import plain

    show(plain(found), _lines(found, ranked))


def _request(given: dict[str, Any]) -> BfclRequest:
    from ratchet_bfcl.evaluation import CATEGORIES, BfclRequest

    categories = given["categories"] or ("simple_python",)
    for name in categories:
        if name not in CATEGORIES:
            raise click.UsageError(f"--category {name} is not supported; supported: {', '.join(CATEGORIES)}")
    return BfclRequest(
        categories=tuple(dict.fromkeys(categories)), limit=given["limit"], seed=given["seed"], threads=given["threads"],
        temperature=given["temperature"], tools=not given["prompt_tools"],
    )  # fmt: skip


def _both(store: Store, alias: str) -> tuple[str, ...]:
    """Return the base model and the live version."""
    live = store.policies.live().get(alias)
    if live is None:
        raise click.UsageError(f"{alias} has no live version in this store: name the versions, such as {alias}@0")
    return tuple(dict.fromkeys((f"{alias}@0", f"{alias}@{live.version}")))


def _evaluate(
    store: Store, settings: Settings, versions: tuple[str, ...], python: Path, request: BfclRequest, proxy: str | None
) -> tuple[TuningResult, Ranking]:
    """Evaluate each version and store the result."""
    import msgspec

    from ratchet.api.context import proxy_of
    from ratchet.api.run_lease import RunLease
    from ratchet.output import progress_bars
    from ratchet.tuner.reports import plain
    from ratchet.tuner.rollouts.prices import prices_of
    from ratchet.tuner.rollouts.runner import first_api_key
    from ratchet_bfcl.evaluation import ranking, result, run_package

    base_url = f"{(proxy or proxy_of(settings)).rstrip('/').removesuffix('/v1')}/v1"
    began = time.monotonic()
    tuning = store.tunings.begin("eval", settings.model, {"versions": versions, **msgspec.to_builtins(request)})
    folder = settings.state.root / "evaluations" / tuning.id
    key = first_api_key() or "x"
    answers = {}
    with RunLease(store).acquire(tuning.id, resumable=False):
        with progress_bars() as report_progress:
            for version in versions:
                name = folder / version.replace("/", "_")
                answers[version] = run_package(python, version, request, base_url=base_url, key=key, folder=name)
                report_progress("versions evaluated", 1, len(versions))
        ranked = ranking(answers)
        wall = time.monotonic() - began
        prices = prices_of((entry.model_dump() for entry in settings.model_list), settings.tuner.prices)
        found = result(settings.model, request, answers, found=ranked, wall_seconds=wall, prices=prices)
        store.tunings.end(tuning.id, "done", plain(found))
    return found, ranked


def _lines(found: TuningResult, ranked: Ranking) -> list[str]:
    text = [f"{found.technique}: {found.task_set.tasks} entries, judged by {found.judge}"]
    for score in ranked.scores:
        share = "not known" if score.mean is None else f"{score.mean:.1%}"
        text.append(f"  {score.candidate:<16} {share} right (95% {score.low:.1%} to {score.high:.1%})")
    for row in found.details["by_category"]:
        errors = ", ".join(f"{count} {name}" for name, count in row["errors"].items())
        broken = f", {row['broken']} failed to run" if row["broken"] else ""
        right = f"{row['right']} of {row['entries']} right{broken}"
        text.append(f"    {row['version']} {row['category']}: {right}" + (f"; wrong: {errors}" if errors else ""))
    if found.gain is not None:
        text.append(
            f"{found.gain.candidate} against {found.gain.against}: {found.gain.describe()}: {found.gain.verdict}"
        )
    return text
