"""What a chat template may do: Jinja's sandbox, and a limit of what it reads and writes."""

import pytest

from agentrl.errors import ConfigError, RenderError
from agentrl.renderers import chat_template
from agentrl.renderers.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "x" * 1000}]


def rendered(source: str) -> str:
    return ChatTemplate(source, {}).render(MESSAGES, (), add_generation_prompt=True)


def test_a_template_that_writes_too_much_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_TEXT_CHARS", 99_999)
    assert len(rendered("{% for a in range(99) %}{{ messages[0].content }}{% endfor %}")) == 99_000
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}ab{% endfor %}{% endfor %}"
    with pytest.raises(RenderError, match=r"it writes more than 99,999 characters$"):
        rendered(endless)


def test_a_template_that_is_too_long_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SOURCE_CHARS", 9)
    assert rendered("{{ 1+1 }}") == "2"
    with pytest.raises(ConfigError, match="the chat template has more than 9 characters"):
        rendered("{{ 1+1 }}.")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ '{0.__class__.x}'.format(1) }}", "unsafe"),
    ],
)
def test_a_template_gets_no_further_than_its_values(source: str, message: str) -> None:
    with pytest.raises(RenderError, match=message) as caught:
        rendered(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content[:3] ~ '-' * 3 }}", "xxx---"),
        ("{{ [1, {'a': none}]|tojson(indent=2) }}", '[\n  1,\n  {\n    "a": null\n  }\n]'),
        ("{{ ['<é>']|tojson }}", '["<é>"]'),
        (
            "{% for a in range(3) if a %}{{ a }}{% if a == 1 %}{% continue %}{% endif %}!{% endfor %}",
            "12!",
        ),
    ],
)
def test_what_templates_use_is_there(source: str, text: str) -> None:
    assert rendered(source) == text
