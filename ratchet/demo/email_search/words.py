"""The closed word lists of the synthetic mailbox.

Every entry is one word of letters only, so the tiny policy's tokenizer encodes it as the same single token everywhere.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = _words(
    "Alice Bruno Carla Derek Elena Felix Grace Henry Irene Jonas Karen Louis Maria Nadia Oscar Paula Quinn Ralph "
    "Sofia Tomas Ursula Victor Wanda Xavier Yvonne Zoltan Amber Boris Celia Diego"
)
NEW_PEOPLE = _words("Astrid Benoit Camila Dmitri Esther Fatima Goran Hanako Imran Joyce")  # of the hard set only
TOPICS = _words(
    "budget audit lease picnic merger survey recall launch review retreat workshop hearing invoice pipeline payroll "
    "contract seminar renewal upgrade banquet"
)
CITIES = _words(
    "Oslo Paris Delhi Cairo Lima Tokyo Berlin Austin Denver Milan Dublin Boston Madrid Prague Vienna Geneva"
)
MONTHS = _words("January February March April May June July August September October November December")
ID_FIRST = _words(
    "apple birch cedar delta ember flint grape hazel ivory jelly kiwi lemon mango nutmeg olive peach quartz raven "
    "silver tulip umber velvet walnut yellow zebra basil cocoa daisy fern ginger honey indigo"
)
ID_SECOND = _words(
    "bear crow deer eagle finch goat hawk ibis jackal koala lynx mole newt otter panda quail rabbit seal tiger viper "
    "wolf yak bison camel dingo ferret gecko heron lizard moose ostrich puma"
)
JUNK_KEYWORDS = ("email", "message", "information")

ENTITIES = frozenset(PEOPLE + TOPICS + CITIES + MONTHS + ID_FIRST + ID_SECOND)
