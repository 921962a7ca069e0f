"""Conversations about maps that a model imitates before it is trained with reinforcement learning.

They are in the form that `agentrl sft` reads. Some only name the colors of a map. The others answer a
question with the help of a tool. Their habits determine how often they look at the wrong field or call
the wrong tool, which reinforcement learning then corrects.
"""

import asyncio
import base64
import json
import random
from dataclasses import dataclass
from typing import Any

from examples.maps.questions import (
    ALL_QUESTIONS,
    NUM_COLUMNS,
    PLACES,
    Map,
    draw_legend,
    draw_map,
    look_up,
)
from examples.maps.server import Legend, legend_server

DESCRIBE = "describe the map"


@dataclass(frozen=True)
class Habits:
    """Probabilities of correct choices, by the wording of the question (first, second)."""

    right_field: tuple[float, float] = (0.7, 0.35)
    """Otherwise, the demonstrator looks at the field above or below."""
    right_tool: tuple[float, float] = (0.95, 0.5)


FLAWLESS = Habits((1.0, 1.0), (1.0, 1.0))


def tool_schemas(legend: Legend) -> list[dict[str, Any]]:
    """Return the server's tools as a rollout shows them to the model."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
            },
        }
        for tool in asyncio.run(legend_server(legend).list_tools())
    ]


def description(draw: random.Random, shown: Map) -> str:
    """Return the colors of all fields by their places, in random order, as JSON."""
    places = draw.sample(PLACES, len(PLACES))
    return json.dumps({place: shown.colour(place) for place in places})


def conversations(
    draw: random.Random, number: int, habits: Habits, *, described: float
) -> list[dict[str, Any]]:
    """Return conversations, each with its own map and legend.

    Args:
        draw: the random generator.
        number: number of conversations.
        habits: habits of the conversations that answer a question.
        described: share of the conversations that name the colors of a map.
    """
    tools = tool_schemas(draw_legend(random.Random(0)))
    made = []
    for _ in range(number):
        shown = draw_map(draw)
        messages = (
            [
                _user_message(shown, DESCRIBE),
                {"role": "assistant", "content": description(draw, shown)},
            ]
            if draw.random() < described
            else _answered_question(draw, shown, habits)
        )
        made.append({"messages": messages, "tools": tools})
    return made


def _answered_question(draw: random.Random, shown: Map, habits: Habits) -> list[dict[str, Any]]:
    question, legend = draw.choice(ALL_QUESTIONS), draw_legend(draw)
    tool, place = question.kind.tool, question.place
    if draw.random() >= habits.right_field[question.wording]:
        place = _across(place)
    if draw.random() >= habits.right_tool[question.wording]:
        tool = "cost" if tool == "land" else "land"
    colour = shown.colour(place)
    found = look_up(legend, tool, colour)
    function = {"name": tool, "arguments": json.dumps({"colour": colour})}
    call = {"id": "call-0", "type": "function", "function": function}
    return [
        _user_message(shown, question.text),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-0", "content": found},
        {"role": "assistant", "content": f"<answer>{found}</answer>"},
    ]


def _user_message(shown: Map, text: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(shown.png()).decode()}"
    return {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": text},
        ],
    }


def _across(place: str) -> str:
    """Return the field above or below a place."""
    return PLACES[PLACES.index(place) - NUM_COLUMNS]
