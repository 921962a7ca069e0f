"""Maps, their legend, and questions about them, drawn from a seed.

A map is a small picture of colored fields. A tool looks up the answer to a question in the legend, by
the name of a color. An answer therefore needs both the picture and the tool.
"""

import json
import random
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from PIL import Image

from examples.maps.server import Legend, Meaning

PLACES = ("northwest", "north", "northeast", "southwest", "south", "southeast")
"""Fields of a map, row by row."""
NUM_ROWS, NUM_COLUMNS = 2, 3
COLOURS = {
    "red": (208, 40, 40), "orange": (240, 140, 30), "yellow": (240, 225, 60), "green": (50, 150, 60),
    "blue": (40, 80, 200), "purple": (130, 50, 160), "black": (25, 25, 25), "white": (235, 235, 235),
}  # fmt: skip
LANDS = (
    "forest", "lake", "meadow", "desert", "swamp", "city", "river", "glacier",
    "island", "valley", "orchard", "quarry", "village", "harbour", "heath", "cliff",
)  # fmt: skip
FIELD_PIXELS = 16
_SHADE = 15
"""Maximum difference between a field's color and the color of its name."""


@dataclass(frozen=True)
class Kind:
    """One kind of question: the tool whose result answers it, and its two wordings."""

    tool: str
    phrasings: tuple[str, str]


KINDS = (
    Kind("land", ("{place}: which land is it?", "{place}: where would we be?")),
    Kind("cost", ("{place}: what does it cost?", "{place}: how much to cross?")),
)


@dataclass(frozen=True)
class Map:
    """Colors by their places, all different, and the shades in which they are drawn."""

    colours: tuple[str, ...]
    """In the order of `PLACES`."""
    shades: tuple[tuple[int, int, int], ...]

    def colour(self, place: str) -> str:
        """Return the color of a field."""
        return self.colours[PLACES.index(place)]

    def png(self) -> bytes:
        """Draw the map."""
        picture = Image.new("RGB", (FIELD_PIXELS * NUM_COLUMNS, FIELD_PIXELS * NUM_ROWS))
        for field, shade in enumerate(self.shades):
            row, column = divmod(field, NUM_COLUMNS)
            left, top = FIELD_PIXELS * column, FIELD_PIXELS * row
            picture.paste(shade, (left, top, left + FIELD_PIXELS, top + FIELD_PIXELS))
        written = BytesIO()
        picture.save(written, format="PNG", optimize=True)
        return written.getvalue()


@dataclass(frozen=True)
class Question:
    """A question about a field of a map."""

    kind: Kind
    wording: int
    """Index among the kind's phrasings."""
    place: str

    @property
    def text(self) -> str:
        """The question as the user asks it."""
        return self.kind.phrasings[self.wording].format(place=self.place)


ALL_QUESTIONS = tuple(
    Question(kind, wording, place)
    for kind in KINDS
    for wording in range(len(kind.phrasings))
    for place in PLACES
)


def draw_map(draw: random.Random) -> Map:
    """Draw the colors of a map."""
    colours = draw.sample(sorted(COLOURS), len(PLACES))

    def shade(name: str) -> tuple[int, int, int]:
        red, green, blue = (
            min(255, max(0, part + draw.randint(-_SHADE, _SHADE))) for part in COLOURS[name]
        )
        return red, green, blue

    return Map(tuple(colours), tuple(shade(name) for name in colours))


def draw_legend(draw: random.Random) -> Legend:
    """Draw the meanings of the colors; all lands and costs differ."""
    lands, costs = draw.sample(LANDS, len(COLOURS)), draw.sample(range(2, 10), len(COLOURS))
    return {
        colour: Meaning(land=land, cost=cost)
        for colour, land, cost in zip(COLOURS, lands, costs, strict=True)
    }


def look_up(legend: Legend, tool: str, colour: str) -> str:
    """Return the answer of a tool of the legend's server."""
    meaning = legend[colour]
    return meaning["land"] if tool == "land" else str(meaning["cost"])


def right_answer(legend: Legend, shown: Map, question: Question) -> str:
    """Return the correct answer to a question about a map."""
    return look_up(legend, question.kind.tool, shown.colour(question.place))


def write_questions(
    folder: Path, name: str, legend: Legend, maps: list[Map], draw: random.Random, num_each: int
) -> None:
    """Write `maps/NAME-00.png`, ... and `NAME.jsonl`, with `num_each` questions per map."""
    (folder / "maps").mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for number, shown in enumerate(maps):
        file = f"maps/{name}-{number:02d}.png"
        (folder / file).write_bytes(shown.png())
        for question in draw.sample(ALL_QUESTIONS, num_each):
            entry = {
                "id": f"{name}-{len(lines):04d}",
                "query": question.text,
                "images": [file],
                "answer": right_answer(legend, shown, question),
                "scorer": "exact",
                "answer_schema": "answer",
                "tag": question.kind.tool,
            }
            lines.append(json.dumps(entry))
    draw.shuffle(lines)
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
