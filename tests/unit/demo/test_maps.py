import asyncio
import json
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from mcp.client import Client
from mcp.types import TextContent
from PIL import Image

from agentrl.schema.image import image_from_data_url
from examples.maps.demonstrations import FLAWLESS, Habits, conversations
from examples.maps.questions import (
    ALL_QUESTIONS,
    COLOURS,
    FIELD_PIXELS,
    KINDS,
    Map,
    Question,
    draw_legend,
    draw_map,
    right_answer,
)
from examples.maps.server import LEGEND, Legend, legend_server

VISION = Path(__file__).resolve().parents[3] / "assets" / "demo" / "vision"
SHADES = tuple(COLOURS.values())[:6]
MAP = Map(("red", "orange", "yellow", "green", "blue", "purple"), SHADES)


def entries(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (VISION / f"{name}.jsonl").read_text().splitlines()]


def nearest_colour(picture: Image.Image, column: int, row: int) -> str:
    """The name of the colour in the middle of a field."""
    shade = picture.getpixel(
        (column * FIELD_PIXELS + FIELD_PIXELS // 2, row * FIELD_PIXELS + FIELD_PIXELS // 2)
    )
    assert isinstance(shade, tuple)

    def distance(name: str) -> float:
        return sum((a - b) ** 2 for a, b in zip(COLOURS[name], shade, strict=True))

    return min(COLOURS, key=distance)


def test_a_map_is_drawn_row_by_row() -> None:
    with Image.open(BytesIO(MAP.png())) as picture:
        seen = [nearest_colour(picture, column, row) for row in range(2) for column in range(3)]
    assert tuple(seen) == MAP.colours


def test_a_question_is_answered_from_map_and_legend() -> None:
    legend: Legend = {"green": {"land": "lake", "cost": 7}, "purple": {"land": "city", "cost": 2}}
    assert right_answer(legend, MAP, Question(KINDS[0], 0, "southwest")) == "lake"
    assert right_answer(legend, MAP, Question(KINDS[1], 1, "southeast")) == "2"


def test_no_two_fields_of_a_map_and_no_two_colours_of_a_legend_are_answered_alike() -> None:
    draw = random.Random(1)
    for _ in range(50):
        legend, shown = draw_legend(draw), draw_map(draw)
        for kind in KINDS:
            mine = [q for q in ALL_QUESTIONS if q.kind is kind and q.wording == 0]
            assert len({right_answer(legend, shown, question) for question in mine}) == 6


@pytest.mark.parametrize("name", ["train", "eval"])
def test_shipped_answers_are_what_the_pictures_show(name: str) -> None:
    pictures = {}
    asked = {question.text: question for question in ALL_QUESTIONS}
    for entry in entries(name):
        (file,) = entry["images"]
        if file not in pictures:
            with Image.open(VISION / file) as picture:
                seen = [nearest_colour(picture, c, r) for r in range(2) for c in range(3)]
            pictures[file] = Map(tuple(seen), SHADES)
        question = asked[entry["query"]]
        assert entry["answer"] == right_answer(LEGEND, pictures[file], question)


def test_no_map_of_the_evaluation_is_trained_on() -> None:
    files = [{entry["images"][0] for entry in entries(name)} for name in ("train", "eval")]
    assert [len(each) for each in files] == [64, 16]
    seen, held_out = ({(VISION / file).read_bytes() for file in each} for each in files)
    assert not seen & held_out


def test_the_server_knows_the_legend_and_names_the_colours_that_there_are() -> None:
    async def ask(tool: str, colour: str) -> tuple[str, bool]:
        async with Client(legend_server(LEGEND)) as client:
            result = await client.call_tool(tool, {"colour": colour})
        (block,) = result.content
        assert isinstance(block, TextContent)
        return block.text, bool(result.is_error)

    async def ask_all() -> list[tuple[str, bool]]:
        return [await ask("land", "red"), await ask("cost", "red"), await ask("land", "pink")]

    land, cost, unknown = asyncio.run(ask_all())
    assert land == (LEGEND["red"]["land"], False)
    assert cost == (str(LEGEND["red"]["cost"]), False)
    assert unknown[1]
    assert "'pink', only red, orange" in unknown[0]


@pytest.mark.parametrize(
    ("habits", "least", "most"), [(FLAWLESS, 1.0, 1.0), (Habits(), 0.25, 0.55)]
)
def test_a_demonstrator_is_as_often_right_as_its_habits_are(
    habits: Habits, least: float, most: float
) -> None:
    made = conversations(random.Random(0), 400, habits, described=0.0)
    num_right = 0
    for talk in made:
        asked, call, result, answer = talk["messages"]
        assert answer["content"] == f"<answer>{result['content']}</answer>"
        num_right += is_right(asked, call["tool_calls"][0]["function"])
    assert least <= num_right / len(made) <= most


def is_right(asked: dict[str, Any], function: dict[str, str]) -> bool:
    """Whether a call asks the right tool about the colour that is in the picture."""
    image, text = asked["content"]
    question = {question.text: question for question in ALL_QUESTIONS}[text["text"]]
    data = image_from_data_url(image["image_url"]["url"]).data
    with Image.open(BytesIO(data)) as picture:
        column = 0 if "west" in question.place else 2 if "east" in question.place else 1
        seen = nearest_colour(picture, column, int(question.place.startswith("south")))
    return function == {"name": question.kind.tool, "arguments": json.dumps({"colour": seen})}
