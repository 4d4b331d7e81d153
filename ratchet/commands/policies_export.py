"""`ratchet policies export`: a version as a Hugging Face folder, with a model card if its plug-in is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ratchet import options

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.records import Policy
    from ratchet.store.store import Store

_NAMED = re.compile(r"(?P<alias>[^@/\s]+)@(?P<version>\d+)")
_CARD = "readme"  # name of the plug-in's entry point
_FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("policy", metavar="NAME[@VERSION] [VERSION]", nargs=-1, required=True)
@click.option("--merged", type=_FOLDER, metavar="DIR", help="Write the merged model into a new folder.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32"]),
    default="auto",
    help="Data type of the merged model: the base model's, or float32, which does not round.  [default: auto]",
)
@click.option("--adapter", type=_FOLDER, metavar="DIR", help="Copy the adapter into a new folder.")
@options.base_model
@options.store_url
@options.project
@click.pass_context
def export(
    context: click.Context,
    policy: tuple[str, ...],
    merged: Path | None,
    dtype: Literal["auto", "float32"],
    adapter: Path | None,
    base_model: str | None,
    store: str | None,
    project: str | None,
) -> None:
    """Export a version in Hugging Face's format.

    The plug-in model-card adds a card with the training data, the judge, the decisions and the gain with its interval.

    \b
    Example:
      ratchet policies export mail@7 --merged mail-7
    """
    name = "@".join(policy)  # `mail 7`, which the other commands accept, is mail@7
    if (folder := merged or adapter) is None or (merged and adapter):
        raise click.UsageError("give one of --merged DIR, for a whole model, and --adapter DIR, for the adapter alone")
    from ratchet.status import versions
    from ratchet.supervisor.vllm_command import check_model
    from ratchet.trainer.learner.merged_model import export_adapter, export_merged
    from ratchet.trainer.user_code.plugins import MODEL_CARDS, load_plugin, missing_plugin_remedy, plugin_names

    if folder.exists():
        raise click.UsageError(f"{folder} already exists: name a new folder")
    settings = options.read_project_settings(context, {"base_model": base_model, "store": store, "project": project})
    base = check_model(settings.base_model)
    with options.open_store_for_command(settings.store_url) as opened:
        found = _exportable(opened, name)
        source = _adapter_folder(settings, found)
        card = None
        if _CARD in plugin_names(MODEL_CARDS):
            card = load_plugin(MODEL_CARDS, _CARD)(opened, found, base, versions(), source, merged=merged is not None)
    if merged:
        export_merged(base, source, folder, card, dtype)
    else:
        export_adapter(source, folder, card)
    if card is None:
        click.echo(f"{name}: {folder}, without a model card ({missing_plugin_remedy(MODEL_CARDS, _CARD)})")
    else:
        click.echo(f"{name}: {folder}, with its card in {folder / 'README.md'}")


def _exportable(store: Store, name: str) -> Policy:
    """Return the version, which has an adapter."""
    named = _NAMED.fullmatch(name)
    if named is None:
        raise click.UsageError(f"{name!r} is not a version: give NAME@VERSION or NAME VERSION, such as mail@7")
    options.check_alias(store, named["alias"])
    policy = store.policies.get(named["alias"], int(named["version"]))
    if policy.adapter is None:
        prompt = f" with the system prompt {policy.prompt_id}" if policy.prompt_id else ""
        raise click.UsageError(f"{name} has no adapter: it is the base model{prompt or ' as it is'}")
    if policy.pruned_at is not None:
        raise click.UsageError(f"{name} was pruned: its folder was deleted (trainer.keep_checkpoints)")
    return policy


def _adapter_folder(settings: Settings, policy: Policy) -> Path:
    """Return a local folder with the version's adapter, which may come from object storage."""
    from ratchet.trainer.adapters.adapter_store import AdapterStore

    adapters = AdapterStore(settings.state.adapter_cache, settings.adapters.max_cache_bytes)
    return adapters.fetch(policy.adapter or "", state=False)
