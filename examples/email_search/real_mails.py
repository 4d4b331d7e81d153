"""A mailbox from a data set of real mails, such as Enron's, through the `datasets` library.

    python -m examples.email_search.real_mails --dataset MAILS [QUESTIONS]

Accepts hub names and local folders of Parquet, JSON Lines or CSV. Columns are found by their usual names. Rows with the
columns `question` and `answer` become tasks, others mails; without such rows the task set stays unchanged.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.demo.email_search.mailbox import DATABASE, Mail, Mailbox
from ratchet.demo.email_search.tasks import MailTask, home, write_tasks

COLUMNS = {
    "message_id": ("message_id", "message-id", "id"),
    "sender": ("sender", "from", "from_address"),
    "subject": ("subject", "title"),
    "body": ("body", "content", "message", "text"),
    "date": ("date", "sent_at", "timestamp"),
}
OWNERS = ("to", "cc", "bcc", "recipients", "to_address", "inbox_address")  # with the sender: the owners of a mail
_ADDRESS = re.compile(r"[^\s<>,;\"']+@[^\s<>,;\"']+")
REQUIRED = ("subject", "body")
SPLITS = {"train": "train", "test": "test", "validation": "test"}


class DatasetError(ValueError):
    """A data set cannot be loaded or contains no mails; the text names it and the remedy."""


def build_from_datasets(path: Path, names: Sequence[str], limit: int) -> tuple[int, dict[str, list[MailTask]]]:
    """Write the mailbox `path` from the data sets; return the number of mails and the tasks by split, if any."""
    loaded = [(name, split, rows) for name in names for split, rows in _load(name).items()]
    mails = [(name, rows) for name, _, rows in loaded if not _is_questions(rows)]
    questions = {SPLITS.get(split, "train"): rows for _, split, rows in loaded if _is_questions(rows)}
    if not mails:
        raise DatasetError(f"no mails in {', '.join(names)}: no split has the columns subject and body")
    mails_by_id = {mail.message_id: mail for name, rows in mails for mail in _mails(name, rows, limit)}
    box = Mailbox.build(path, list(mails_by_id.values())[:limit])
    count = len(box)
    box.close()
    return count, {split: _tasks(rows, split) for split, rows in questions.items()}


def _load(name: str) -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("real mails need the `datasets` package: pip install datasets") from error
    try:
        return dict(datasets.load_dataset(name))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DatasetError(
            f"cannot load data set {name} ({type(error).__name__}: {error}): "
            "check the name and that the hub is reachable (HF_ENDPOINT, HF_HUB_OFFLINE), or give a local folder"
        ) from error


def _is_questions(rows: Any) -> bool:
    return {"question", "answer"} <= set(rows.column_names)


def _mails(name: str, rows: Any, limit: int) -> Iterator[Mail]:
    present = {column.casefold(): column for column in rows.column_names}
    columns = {
        field: next((present[usual] for usual in names if usual in present), None) for field, names in COLUMNS.items()
    }
    missing = [field for field in REQUIRED if columns[field] is None]
    if missing:
        raise DatasetError(f"data set {name} has no column {missing[0]}: it has {', '.join(rows.column_names)}")
    for number, row in enumerate(_first(rows, limit)):
        values = {field: str(row[column] or "") if column else "" for field, column in columns.items()}
        head = "".join(f"{field}: {values[field]}\n" for field in ("sender", "date", "subject") if values[field])
        values["body"] = f"{head}\n{values['body']}"
        people = tuple(address for one in OWNERS if one in present for address in _addresses(row[present[one]]))
        values["message_id"] = values["message_id"] or f"mail-{number}"
        yield Mail(**values, inboxes=(*_addresses(values["sender"]), *people))


def _addresses(value: Any) -> list[str]:
    """Return the e-mail addresses in a text, or in a list of texts."""
    texts = value if isinstance(value, list | tuple) else [value]
    return [found for text in texts if text for found in _ADDRESS.findall(str(text))]


def _first(rows: Iterable[Mapping[str, Any]], limit: int) -> Iterator[Mapping[str, Any]]:
    for _, row in zip(range(limit), rows, strict=False):
        yield row


def _tasks(rows: Any, split: str) -> list[MailTask]:
    return [_task(row, f"{split}-{number}") for number, row in enumerate(rows)]


def _task(row: Mapping[str, Any], name: str) -> MailTask:
    user = {"inbox": str(row.get("inbox_address") or ""), "date": str(row.get("query_date") or "")[:10]}
    return MailTask(str(row.get("id", name)), str(row["question"]), str(row["answer"]), "", "", "", "", **user)


def main() -> int:
    """Write the mailbox, and the task set if there are questions. Returns 1 with a message on failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", nargs="+", required=True, help="hub names or local folders")
    parser.add_argument("--limit", type=int, default=20_000, help="at most this many mails")
    parser.add_argument("--home", type=Path, default=home(), help="folder of mailbox and tasks (EMAIL_SEARCH_HOME)")
    chosen = parser.parse_args()
    try:
        count, splits = build_from_datasets(chosen.home / DATABASE, chosen.dataset, chosen.limit)
    except (OSError, ValueError, ImportError) as error:
        print(f"real_mails: {error}", file=sys.stderr)
        return 1
    if splits:
        write_tasks(chosen.home, splits)
    print(
        f"{count} mails; tasks: {', '.join(f'{len(tasks)} {split}' for split, tasks in splits.items()) or 'unchanged'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
