"""`ratchet bench`: measure the latency that the proxy adds, compared with direct calls to vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratchet import options

if TYPE_CHECKING:
    from ratchet.bench.timed_calls import CallTarget, RequestShape
    from ratchet.settings.project_settings import Settings


@click.command()
@click.option("--calls", type=click.IntRange(1), help="Calls per target.  [default: 2 x concurrency x blocks]")
@click.option("--concurrency", type=click.IntRange(1, 1024), default=8, show_default=True, help="Concurrent calls.")
@click.option("--blocks", type=click.IntRange(1), default=10, show_default=True, help="Blocks of calls per target.")
@click.option("--stream/--no-stream", default=True, show_default=True, help="Stream answers.")
@click.option(
    "--prompt-words", type=click.IntRange(1, 1_000_000), default=100, show_default=True, help="Words per prompt."
)
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens per answer.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=120.0, show_default=True,
              help="Timeout per call in seconds.")  # fmt: skip
@options.proxy_url
@click.option("--upstream", metavar="URL", help="vLLM behind the proxy.  [default: the running project's]")
@click.option("--upstream-model", metavar="NAME", help="vLLM's name of the model.  [default: detected]")
@options.alias
@options.project
@options.as_json
@click.pass_context
def bench(
    context: click.Context, /, calls: int | None, concurrency: int, blocks: int, timeout: float, as_json: bool,
    stream: bool, prompt_words: int, max_tokens: int, proxy: str | None, upstream: str | None, upstream_model: str |
    None, model: str | None, project: str | None,
) -> int:  # fmt: skip
    """Measure the overhead of the proxy: compare direct calls to your vLLM with calls through the proxy.

    Prints the added latency with its interval, tokens per second, and the proxy's CPU time per call. The calls name the
    live version, so they are neither judged nor trained; they are recorded with the tag `bench`. They put load on vLLM:
    run this while it is idle. Exits with 1 if a call failed. Keys: RATCHET_API_KEYS, RATCHET_UPSTREAM_API_KEY.

    \b
    Example:
      ratchet bench --concurrency 32 --calls 320
      ratchet bench --proxy http://10.0.0.5:8000 --upstream http://10.0.0.6:8001 --model mail --json
    """
    from ratchet.bench import bench_report
    from ratchet.bench.measurement import MeasurementPlan, measure
    from ratchet.bench.targets import cpu_seconds_of
    from ratchet.bench.timed_calls import RequestShape
    from ratchet.output.terminal import progress_bars

    if calls is not None and calls < concurrency * blocks:
        raise click.UsageError(
            f"--calls {calls}: {blocks} blocks of {concurrency} concurrent calls need {blocks * concurrency} or more; "
            "reduce --blocks or --concurrency"
        )
    settings = options.read_agent_settings(context, {"model": model, "project": project})
    ways = _ways(settings, proxy, upstream, upstream_model)
    shape, plan = (
        RequestShape(stream, prompt_words, max_tokens),
        MeasurementPlan(calls or 2 * concurrency * blocks, concurrency, blocks, timeout),
    )
    if not as_json:
        click.echo(_describe(ways, shape), err=True)
    with progress_bars() as report_progress:
        measured = measure(ways, shape, plan, cpu_seconds_of(ways[-1].url), report_progress)
    if as_json:
        options.print_json(bench_report.plain(measured))
    else:
        bench_report.show(measured)
    return 1 if measured.failed else 0


def _ways(
    settings: Settings, proxy: str | None, upstream: str | None, upstream_model: str | None
) -> tuple[CallTarget, ...]:
    import os

    from ratchet.bench import targets
    from ratchet.bench.measurement import DIRECT, DIRECT_WITH_IDS, IDS, PROXIED
    from ratchet.bench.timed_calls import CallTarget
    from ratchet.supervisor.up import read_run_state
    from ratchet.tuning import context as tuning

    proxy_url = _base(proxy or tuning.proxy_of(settings))
    vllm_url = upstream or read_run_state(settings.state).get("vllm_url")
    if not vllm_url:
        raise click.UsageError(
            "the URL of vLLM is unknown: start the project with `ratchet up --detach`, or give --upstream URL"
        )
    vllm_url = _base(str(vllm_url))
    key, vllm_key = tuning.first_api_key(), os.environ.get("RATCHET_UPSTREAM_API_KEY")
    listed = targets.cards(proxy_url, key, "is it running (`ratchet up`), and does it accept RATCHET_API_KEYS?")
    proxy_model = targets.proxy_model_name(settings.model, listed)
    name = upstream_model or targets.vllm_model_name(
        proxy_model, targets.cards(vllm_url, vllm_key, "is --upstream its URL, and RATCHET_UPSTREAM_API_KEY its key?")
    )
    return (
        CallTarget(DIRECT, vllm_url, name, vllm_key),
        CallTarget(DIRECT_WITH_IDS, vllm_url, name, vllm_key, IDS),
        CallTarget(PROXIED, proxy_url, proxy_model, key),
    )


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _describe(ways: tuple[CallTarget, ...], shape: RequestShape) -> str:
    direct, proxied = ways[0], ways[-1]
    return (
        f"{proxied.model} at {proxied.url} beside {direct.model} at {direct.url}: "
        f"{'streamed' if shape.stream else 'whole'} answers of {shape.max_tokens} tokens, "
        f"prompts of {shape.words} words"
    )
