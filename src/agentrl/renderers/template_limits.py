"""Limits of chat templates: their processor time, and how much text they make.

Jinja's sandbox bounds neither: two nested loops or `'a' * 10**9` would stop the process. Here every
iteration and every call of a macro compares the processor time, and every operation that makes text
pays for its size in advance. Ordinary operations take about a microsecond longer.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
"""Processor time of one rendering."""
MAX_CHARS = 1 << 28
"""Characters that one rendering may make, intermediate texts included."""
_MAX_NUMBER = 1 << 20
"""Largest width or count that a method or filter may be given."""
_OPERATIONS_PER_CHECK = 64
_VALUE_CHARS = 64
"""Assumed length of a number, and of the punctuation around a value."""
_ITEM_CHARS = 8
"""Bytes of a list's reference to an item, which count as characters."""
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)|:[^{}]*(?:\d{5}|\{)")
_UNBOUNDED = frozenset({"encode", "expandtabs", "to_bytes", "translate"})
"""Methods that chat templates do not need, and whose results may be of any size."""
_UNBOUNDED_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")
_LOOKING = frozenset({"count", "endswith", "find", "index", "rfind", "rindex", "startswith"})
"""Methods of texts that make none."""
_FORMATTING = frozenset({"format", "format_map"})
_TEXT_FILTERS = frozenset(
    {
        *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join"),
        *("lower", "replace", "safe", "string", "striptags", "title", "tojson", "trim"),
        *("truncate", "upper", "urlencode"),
    }
)
_ITERABLES: tuple[type[Iterable[Any]], ...] = (
    list,
    tuple,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_PLAIN = (str, int, float, list, tuple, dict)


class _TemplateTooCostly(jinja2.TemplateRuntimeError):
    """A template exceeded a limit."""


class _Allowance(threading.local):
    """What the rendering in this thread may still spend; unlimited outside of one."""

    num_chars: float = float("inf")
    num_seconds: float = float("inf")
    ends_at: float | None = None
    """On the thread's clock, once that was read. Few renderings last until then, and reading it is a
    system call."""
    num_operations = 0
    sizes: Mapping[int, int] = MappingProxyType({})
    """`written_size` of values that are known, by their id."""


_allowance = _Allowance()


@contextmanager
def limited_rendering(sizes: Mapping[int, int] = MappingProxyType({})) -> Iterator[None]:
    """Limit what templates of a `BoundedEnvironment` spend in the block, which cannot be nested.

    Args:
        sizes: `written_size` of values that templates write often, by their `id`.
    """
    _allowance.sizes = sizes
    _allowance.num_chars = MAX_CHARS
    _allowance.num_seconds = MAX_SECONDS
    try:
        yield
    finally:
        _allowance.__dict__.clear()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates stop with an error before they spend too much."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        """Create an environment with the options of Jinja's, except `finalize`."""
        super().__init__(finalize=_paid, **options)
        del self.globals["lipsum"]
        for name in _UNBOUNDED_FILTERS:
            del self.filters[name]
        self.add_filters(self.filters)
        self.filters |= {"_paid": _paid, "_sized": _sized, "_iterate": _iterate}

    def add_filters(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        """Add filters; those that make text pay for it."""
        self.filters |= {name: _bounded(name, function) for name, function in filters.items()}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, unless the result would be too large."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _pay(len(left) + len(right))
            return left + right
        _pay(_binop_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of a template, unless the result would be too large."""
        _count_operation()
        # The sandbox wraps `str.format`.
        method = getattr(function, "__wrapped__", function)
        value = getattr(method, "__self__", None)
        if isinstance(value, _PLAIN):
            if method.__name__ == "join" and args and isinstance(args[0], Iterator):
                args = (list(args[0]),)
            given = (*args, *kwargs.values())
            if method.__name__ not in _FORMATTING:
                _check_numbers(given)
            if isinstance(value, str):
                _pay(_method_size(method.__name__, value, given))
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may read an attribute."""
        return attr not in _UNBOUNDED and super().is_safe_attribute(obj, attr, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Payments().visit(template)
        template.set_environment(self)
        return template


class _Payments(NodeTransformer):
    """Inserts the payments that the environment has no hook for."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Return the node that takes the place of `node`."""
        self.generic_visit(node)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            check = _filtered(nodes.Const(num_chars, lineno=node.lineno), "_iterate")
            node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            node.nodes = [_filtered(value, "_paid") for value in node.nodes]
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filtered(node, "_sized")
        return node


def _filtered(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


@jinja2.pass_context  # which keeps the compiler from calling it once and for all
def _iterate(_: Context, num_chars: int) -> None:
    _pay(num_chars)
    _count_operation()


def _count_operation() -> None:
    _allowance.num_operations += 1
    if _allowance.num_operations % _OPERATIONS_PER_CHECK:
        return
    now = time.thread_time()
    if _allowance.ends_at is None:
        _allowance.ends_at = now + _allowance.num_seconds
    if now > _allowance.ends_at:
        raise _TemplateTooCostly(f"it takes more than {MAX_SECONDS:g} s of processor time")


def _pay(num_chars: float) -> None:
    left = _allowance.num_chars - num_chars
    _allowance.num_chars = left
    if left < 0:
        raise _TemplateTooCostly(f"it makes more than {MAX_CHARS:,} characters of text")


def _paid(value: Any) -> Any:
    """Pay for the text of a value, and return it."""
    if isinstance(value, str):
        _pay(len(value))
    else:
        _pay(_allowance.sizes.get(id(value)) or written_size(value))
    return value


def written_size(value: Any) -> int:
    """Return how long a value is as text at most, or some size that exceeds the allowance."""
    affordable, size = _allowance.num_chars, 0
    open_: list[Iterable[Any]] = [(value,)]
    while open_ and size <= affordable:
        for item in open_.pop():
            if isinstance(item, str):
                size += _ITEM_CHARS + len(item)
                continue
            size += _VALUE_CHARS
            if isinstance(item, dict):
                open_ += item, item.values()
            elif isinstance(item, _ITERABLES):
                open_.append(item)
            elif isinstance(item, Namespace):
                open_.append((vars(item)["_Namespace__attrs"],))
    return size


def _sized(value: Any) -> Any:
    """Pay for a copy of a text or list, and return it."""
    _pay(_length(value))
    return value


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that pays for what it makes; `name` is the filter's."""
    num_leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _count_operation()
        leading, value, rest = args[:num_leading], args[num_leading], args[num_leading + 1 :]
        given = (*rest, *kwargs.values())
        if name in _TEXT_FILTERS:
            if isinstance(value, Iterator):
                value = list(value)
            _paid(value)
            _pay(_filter_size(name, value, given))
        if name in ("batch", "slice"):
            _check_numbers(given)
        result = function(*leading, value, *rest, **kwargs)
        return _sized(result) if isinstance(result, list) else result

    return bounded


def _filter_size(name: str, value: Any, args: tuple[Any, ...]) -> float:
    """Return how much longer than its value the result of a filter is at most."""
    if name in ("center", "indent", "tojson", "truncate"):
        _check_numbers(args)
    if name == "join":
        return _longest(args) * _length(value)
    if name == "tojson":  # it begins a line for each item
        width = _longest(args)
        return width * (written_size(value) // _ITEM_CHARS) if width else 0
    if name == "indent":
        return _longest(args) * (str(value).count("\n") + 1)
    return _method_size(name, value, args) if isinstance(value, str) else 0


def _method_size(name: str, text: str, args: tuple[Any, ...]) -> float:
    """Return how long the result of a text's method is at most."""
    if name in _LOOKING:
        return 0
    if name == "replace" and len(args) > 1:
        return len(text) + text.count(str(args[0])) * len(str(args[1]))
    if name in _FORMATTING:
        if _WIDE_FIELD.search(text):
            raise _TemplateTooCostly("it formats a field that is too wide")
        num_fields = text.count("%") + text.count("{")  # each may write every value
        return len(text) + num_fields * written_size(args)
    if name == "join":
        _paid(args)
        return len(text) * sum(map(_length, args))
    return len(text) + _longest(args)


def _binop_size(operator: str, left: Any, right: Any) -> float:
    """Return how long the result of an operator is at most."""
    if operator == "%":
        return _method_size("format", left, (right,)) if isinstance(left, str) else 0
    if operator == "+" or (isinstance(left, int) and isinstance(right, int) and operator == "*"):
        return _length(left) + _length(right)
    return max(_length(left) * _factor(right), _length(right) * _factor(left))


def _length(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length() // 3
    if isinstance(value, list | tuple):
        return _ITEM_CHARS * len(value)
    return len(value) if isinstance(value, str) else 0


def _factor(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _longest(args: tuple[Any, ...]) -> int:
    """Return the length or width that the largest argument asks for."""
    return max((arg if isinstance(arg, int) else _length(arg) for arg in args), default=0)


def _check_numbers(args: tuple[Any, ...]) -> None:
    for value in args:
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise _TemplateTooCostly(f"it calls a function with a number above {_MAX_NUMBER:,}")
