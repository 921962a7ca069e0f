"""What a model wrote as arguments is exported, whatever it is."""

from typing import Any

import pytest

from agentrl.plugins.sft.demonstrations.atif_export import _arguments


@pytest.mark.parametrize(
    ("written", "exported"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{broken", {"arguments": "{broken"}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_malformed_arguments_are_exported_as_text(
    written: object, exported: dict[str, Any]
) -> None:
    assert _arguments(written) == exported
