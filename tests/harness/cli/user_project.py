"""A project in a user's folder: Ratchet is installed elsewhere, and the user's modules have the names of its parts."""

from __future__ import annotations

from pathlib import Path

from tests.harness.cli.project import Project

_PACKAGES = ("store", "proxy", "trainer", "tuner", "examples")
_JUDGE = """
from store.orders import total
from proxy import NAME as proxy_name
from trainer import NAME as trainer_name


def judge(response):
    assert (proxy_name, trainer_name) == ("the user's proxy", "the user's trainer")
    return total(response)
"""
# It differs between any two answers.
_ORDERS = "def total(response):\n    return sum(map(ord, response)) % 997 / 997\n"


class UserProject(Project):
    """A folder with packages named as Ratchet's components, a logging.py, and `shop_judge`, which imports them."""

    def __init__(self, folder: Path, commands: Path) -> None:
        """`commands`: the folder with the installed `ratchet`."""
        super().__init__(folder)
        self.command = [str(commands / "ratchet")]
        for name in _PACKAGES:
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(f'NAME = "the user\'s {name}"\n')
        (folder / "store" / "orders.py").write_text(_ORDERS)
        (folder / "shop_judge.py").write_text(_JUDGE)
        (folder / "logging.py").write_text("raise ImportError('this is not the standard library')\n")

    def _environ(self, environ: dict[str, str]) -> dict[str, str]:
        inherited = super()._environ({})
        del inherited["PYTHONPATH"]  # the checkout
        return inherited | environ
