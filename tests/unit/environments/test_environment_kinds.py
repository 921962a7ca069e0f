"""What a policy says to an environment is its move, whatever it is."""

from agentrl.environments.environment_kinds import _as_action

SCHEMA = {"required": ["guess"]}


def test_a_reply_that_is_no_json_is_an_action_of_one_field() -> None:
    assert _as_action('```json\n{"guess": 7}\n```', SCHEMA) == {"guess": 7}
    assert _as_action("crane", SCHEMA) == {"guess": "crane"}
    assert _as_action("[" * 100_000, SCHEMA) == {"guess": "[" * 100_000}
    assert _as_action("9" * 5_000, SCHEMA) == {"guess": "9" * 5_000}
