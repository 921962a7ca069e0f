"""Templates that would run for ever or fill the memory end with one clear error."""

import time

import pytest
from support.little_memory import little_memory

from agentrl.errors import ConfigError, RenderError
from agentrl.renderers import template_limits
from agentrl.renderers.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "x" * 1000}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='aaaa') %}{% for a in range(60) %}"

SLOW = [
    NESTED,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "{% for a in range(99999) if range(99999)|sum %}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999)|map('string')|list|length and '' }}{% endfor %}",
]
LARGE = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ ['a'] * 10**9 }}",
    "{{ 9**9**9 }}",
    "{% set x = 9 %}{{ x**x**x }}",
    DOUBLED + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    DOUBLED + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    DOUBLED + "{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    DOUBLED + "{% set ns.x = ''.join([ns.x, ns.x]) %}{% endfor %}",
    DOUBLED + "{% set ns.x = ''.join([ns.x, ns.x]|map('upper')) %}{% endfor %}",
    DOUBLED + "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    DOUBLED + "{% set ns.x = ns.x|replace('a', 'aa') %}{% endfor %}",
    DOUBLED + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    DOUBLED + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    DOUBLED + "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}{% endfor %}",
    DOUBLED + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    DOUBLED + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    DOUBLED + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    DOUBLED + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|string|length }}",
    DOUBLED + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ {'a': ns.x}.values() }}",
    DOUBLED + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns }}",
    "{{ [[''] * 10**6] * 10**6 }}",
    "{{ ('{0}' * 10**4).format('a' * 10**6) }}",
    "{{ '%(a)s' * 10**4 % {'a': 'a' * 10**6} }}",
    DOUBLED + "{% set ns.x = ns.x + [1] if a else [] %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set x = [''] * 10**6 %}{% set y = [x] * 10**4 %}{{ y }}",
    "{% set ns = namespace(x=[]) %}{% set t = 'a' * 10**7 %}{% for a in range(99999) %}"
    "{% set ns.x = ns.x + [t[a:]] %}{% endfor %}",
    "{% for a in range(99999) %}" + "static " * 1000 + "{% endfor %}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ 'x'|center(10**9) }}",
    "{{ ('\\n' * 10**6)|indent(10**6) }}",
    "{{ ('\\t' * 10**6).expandtabs(10**6) }}",
    "{{ 'a'.translate({97: 'a' * 10**6}) }}",
    "{{ (1).to_bytes(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ [[1]]|tojson(indent=10**9) }}",
    "{{ range(3)|batch(10**9, 'x')|list }}",
    "{{ lipsum(10**6) }}",
    "{{ 'a b'|wordwrap(1, wrapstring='x' * 10**8) }}",
]


def rendered(source: str) -> str:
    return ChatTemplate(source, {}).render(MESSAGES, (), add_generation_prompt=True)


@pytest.mark.parametrize("source", SLOW)
def test_a_template_that_takes_too_long_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.3)
    began = time.thread_time()
    with pytest.raises(RenderError, match=r"it takes more than 0\.3 s of processor time$"):
        rendered(source)
    assert time.thread_time() - began < 3


@pytest.mark.parametrize("source", LARGE)
def test_a_template_that_makes_too_much_is_stopped_in_little_memory(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.thread_time()
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 1.0)
    with little_memory(1 << 30), pytest.raises((ConfigError, RenderError)) as caught:
        rendered(source)
    assert "\n" not in str(caught.value)
    assert time.thread_time() - began < 10


def test_endless_recursion_is_one_line() -> None:
    with pytest.raises(RenderError, match="maximum recursion depth"):
        rendered("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


def test_the_limits_are_those_of_one_rendering() -> None:
    template = ChatTemplate("{{ 'a' * 10**8 }}", {})
    for _ in range(4):
        assert len(template.render(MESSAGES, (), add_generation_prompt=True)) == 10**8


def test_a_tool_that_changes_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_CHARS", 10_000)
    template = ChatTemplate("{% for tool in tools %}{{ tool|tojson }}{% endfor %}", {})
    tool = {"description": "short"}
    assert template.render(MESSAGES, [tool], add_generation_prompt=True)
    tool["description"] = "x" * 6_000
    with pytest.raises(RenderError, match="more than 10,000 characters"):
        template.render(MESSAGES, [tool], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 1700000000 * 1000 }} {{ 10**9 }}", "1700000000000 1000000000"),
        ("{% set ns = namespace(t=1700000000) %}{{ ns.t }}", "1700000000"),
        ("{% macro f(n) %}{{ n }}{% endmacro %}{{ f(10**9) }}", "1000000000"),
        ("{{ messages[0].content[:3] ~ '-' * 3 }}", "xxx---"),
        ("{{ '%d of %5.1f' % (10**9, 2) }}", "1000000000 of   2.0"),
        ("{{ '{} {:>3}'.format(10**9, 2) }}", "1000000000   2"),
        ("{{ undefined|default(10**9) }}", "1000000000"),
        ("{{ [1, {'a': none}]|tojson(indent=2) }}", '[\n  1,\n  {\n    "a": null\n  }\n]'),
        ("{{ 'a,b'.split(',', 1)|join('+')|upper }}", "A+B"),
        (
            "{% for a in range(3) if a %}{{ a }}{% if a == 1 %}{% continue %}{% endif %}!{% endfor %}",
            "12!",
        ),
    ],
)
def test_ordinary_templates_are_unchanged(source: str, text: str) -> None:
    assert rendered(source) == text
