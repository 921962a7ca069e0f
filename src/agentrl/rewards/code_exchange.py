"""Runs in a confined process: the code of an answer, or the tests that call it from another one.

    tests ──function, arguments──> answer                       one JSON array a line, over two pipes;
    tests <──value or exception, changed arguments── answer     calls may nest in either direction

In a folder with `answer.py` this program is the answer's side, with `tests.json` that of the tests. The
answer's side may say anything at any time: the tests' side builds values from what it receives, of
builtin types and a few of the standard library, and does for the answer only what a test's argument
is meant for. Everything else stays where it is, and the other side has a `Handle` of it.
"""

import ast
import builtins
import importlib
import itertools
import json
import operator
import os
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO, StringIO
from typing import Any, BinaryIO

_MAX_LINE = 64 << 20
_MAX_TEXT = 300
_JSON_INTS = 1 << 63
_CONTENT, _NAMESPACE = 0, 1
"""Numbers of what a side has from the start: a function, and the names of the answer."""
_TESTS = "tests"
"""Module of what the tests define."""
_ALIASES = {"np": "numpy", "pd": "pandas"}


def _imported(path: str) -> Any:
    module, name = path.split(":")
    return operator.attrgetter(name)(importlib.import_module(module))


def _dated(name: str) -> tuple[Callable[..., Any], Callable[[Any], list[Any]]]:
    return lambda text: _imported(name).fromisoformat(text), lambda value: [value.isoformat()]


_VALUES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "builtins:int": (lambda digits: int(digits, 16), lambda value: [hex(value)]),
    "builtins:complex": (complex, lambda value: [value.real, value.imag]),
    "builtins:bytes": (bytes.fromhex, lambda value: [value.hex()]),
    "builtins:tuple": (lambda *items: items, list),
    "builtins:frozenset": (lambda *items: frozenset(items), list),
    "builtins:range": (range, lambda value: [value.start, value.stop, value.step]),
    "builtins:slice": (slice, lambda value: [value.start, value.stop, value.step]),
    "fractions:Fraction": (
        lambda *parts: _imported("fractions:Fraction")(*parts),
        lambda value: [value.numerator, value.denominator],
    ),
    "decimal:Decimal": (
        lambda text: _imported("decimal:Decimal")(text),
        lambda value: [str(value)],
    ),
    "datetime:timedelta": (
        lambda *parts: _imported("datetime:timedelta")(*parts),
        lambda value: [value.days, value.seconds, value.microseconds],
    ),
    "datetime:date": _dated("datetime:date"),
    "datetime:time": _dated("datetime:time"),
    "datetime:datetime": _dated("datetime:datetime"),
}
"""Immutable types: what builds a value from its parts, and what takes it apart."""
_CONTAINERS: dict[str, type] = {
    kind.__name__: kind
    for kind in (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
}
_CONTENTS: dict[type, Callable[[Any], Any]] = {
    str: lambda one: str.__getitem__(one, slice(None)),
    int: int.__index__,
    float: float.__float__,
    complex: lambda one: complex.__add__(one, 0),
    bytes: lambda one: bytes.__getitem__(one, slice(None)),
    tuple: lambda one: tuple.__getitem__(one, slice(None)),
    list: list.copy,
    dict: lambda one: dict(dict.items(one)),
    set: lambda one: set(set.__iter__(one)),
    frozenset: lambda one: frozenset(frozenset.__iter__(one)),
    bytearray: lambda one: bytearray(bytearray.__iter__(one)),
}
"""What an object of a subclass of these holds."""
_IMMUTABLE = ("str", "int", "float", "complex", "bytes", "tuple", "frozenset")
_KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (*_CONTENTS, types.FunctionType, types.GeneratorType)
}
_SHOWN = frozenset({"__name__", "__qualname__", "__doc__", "__dict__", "__bases__", "__module__"})
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Exceptions that would end a loop of the tests rather than a test."""
_NUMPY_TYPE = re.compile(r"[<>|=][biufc]\d{1,2}")


class EndedError(BaseException):
    """The other side has ended, or cannot be understood."""


class Handle:
    """An object of the other side; the odd names of its own attributes hide none of the object's."""

    __slots__ = ("agentrl_exchange", "agentrl_held", "agentrl_kind", "agentrl_number")

    def __init__(self, exchange: "Exchange", number: int, kind: str | None = None) -> None:
        object.__setattr__(self, "agentrl_exchange", exchange)
        object.__setattr__(self, "agentrl_number", number)
        object.__setattr__(self, "agentrl_kind", kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self.agentrl_exchange.ask(self, args, kwargs)

    def agentrl_content(self) -> Any:
        """Return what it holds, if its class derives from a builtin type: once, if that is immutable."""
        if not hasattr(self, "agentrl_held"):
            content = self.agentrl_exchange.ask(Handle(self.agentrl_exchange, _CONTENT), (self,))
            if self.agentrl_kind not in _IMMUTABLE:
                return content
            object.__setattr__(self, "agentrl_held", content)
        return self.agentrl_held

    def __getattr__(self, name: str) -> Any:
        # Libraries look for further ones, and read memory at the address that they find there.
        if name == "agentrl_held" or (name.startswith("__") and name not in _SHOWN):
            raise AttributeError(name)
        return self.agentrl_exchange.ask(getattr, (self, name))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The builtin type that its class derives from, if there is one."""
        if self.agentrl_kind is not None:
            return _KINDS[self.agentrl_kind]
        return self.agentrl_exchange.ask(getattr, (self, "__class__"))

    def __instancecheck__(self, one: object) -> bool:
        return bool(self.agentrl_exchange.ask(isinstance, (one, self)))

    def __subclasscheck__(self, one: object) -> bool:
        return bool(self.agentrl_exchange.ask(issubclass, (one, self)))

    def __hash__(self) -> int:
        if self.agentrl_kind in _IMMUTABLE:
            return hash(self.agentrl_content())
        return int(self.agentrl_exchange.ask(hash, (self,)))

    def __contains__(self, wanted: object) -> bool:
        return any(wanted is one or wanted == one for one in iter(self))

    def __enter__(self) -> Any:
        return self.agentrl_exchange.ask(getattr, (self, "__enter__"))()

    def __exit__(self, kind: object, error: object, _: object) -> Any:
        return self.agentrl_exchange.ask(getattr, (self, "__exit__"))(kind, error, None)


def _content_of(one: Any) -> Any:
    """Return what an object of a subclass of a builtin type holds, whatever the subclass says."""
    return next(content(one) for base, content in _CONTENTS.items() if isinstance(one, base))


def _asking(function: Any, *, reflected: bool = False) -> Any:
    def method(one: Handle, *args: Any) -> Any:
        return one.agentrl_exchange.ask(function, (*args, one) if reflected else (one, *args))

    return method


def _among_own(function: Any, *, reflected: bool = False) -> Any:
    """Return an operator that tells the other side no value: it could be the one that is expected."""

    def method(one: Handle, other: object) -> Any:
        if type(other) is Handle:
            return one.agentrl_exchange.ask(function, (one, other))
        if one.agentrl_kind is None or _KINDS[one.agentrl_kind] not in _CONTENTS:
            if type(other).__module__ != "builtins":
                return NotImplemented
            if function is operator.eq:
                return False
            raise TypeError("an object of the code is compared with no value")
        content = one.agentrl_content()
        return function(other, content) if reflected else function(content, other)

    return method


_BUILTINS = "len iter next bool str repr format int float complex abs round reversed"
_UNARY = "index neg pos invert getitem setitem delitem"
_TELLING = "add mul matmul pow"
_COMPARING = "eq lt le gt ge"
_SILENT = "sub truediv floordiv mod and_ or_ xor lshift rshift"
for _word in _BUILTINS.split():
    setattr(Handle, f"__{_word}__", _asking(getattr(builtins, _word)))
for _word in ("setattr", "delattr"):
    type.__setattr__(Handle, f"__{_word}__", _asking(getattr(builtins, _word)))
for _word in (_UNARY + " " + _TELLING).split():
    setattr(Handle, f"__{_word}__", _asking(getattr(operator, _word)))
for _word in _TELLING.split():
    setattr(Handle, f"__r{_word}__", _asking(getattr(operator, _word), reflected=True))
for _word in (_COMPARING + " " + _SILENT).split():
    setattr(Handle, f"__{_word.rstrip('_')}__", _among_own(getattr(operator, _word)))
for _word in _SILENT.split():
    _method = _among_own(getattr(operator, _word), reflected=True)
    setattr(Handle, f"__r{_word.rstrip('_')}__", _method)
_PROTOCOL = frozenset(
    [f"builtins:{_word}" for _word in _BUILTINS.split()]
    + [f"_operator:{_word}" for _word in f"{_UNARY} {_TELLING} {_COMPARING} {_SILENT}".split()]
)
_ATTRIBUTES = frozenset({"builtins:getattr", "builtins:setattr", "builtins:delattr"})


class SharedValues:
    """The containers of a message, in the order in which it names them first."""

    def __init__(self, items: Any = ()) -> None:
        self.items: list[Any] = []
        self.numbers: dict[int, int] = {}
        for one in items:
            self.add(one)

    def add(self, one: object) -> None:
        """Give a container the next number."""
        self.numbers[id(one)] = len(self.items)
        self.items.append(one)


class ExchangedCall:
    """What the other side has called."""

    def __init__(self, packed: list[Any]) -> None:
        self.packed = packed
        self.shared = SharedValues()
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}


class Exchange:
    """One side's end of the two pipes."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO, *, is_answer: bool) -> None:
        self._reader = reader
        self._writer = writer
        self._is_answer = is_answer
        self._mine = SharedValues([_content_of])
        self._theirs: dict[int, Any] = {}
        self.has_ended = False
        """Whether the other side says nothing more."""
        self.nonsense = ""
        """What was wrong with its last message."""
        self.raised: tuple[BaseException | None, str] = (None, "")
        """The last exception of the other side, and its text."""

    def own(self, one: object) -> int:
        """Return the number by which the other side names an object; it lives from now on."""
        if id(one) not in self._mine.numbers:
            self._mine.add(one)
        return self._mine.numbers[id(one)]

    def ask(self, function: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the other side call a function, and return or raise what comes back."""
        shared = SharedValues()
        if type(function) is Handle:
            target: Any = self._packed(function, shared)
        else:
            target = f"{function.__module__}:{function.__name__}"
        packed = self._packed_call(args, kwargs or {}, shared)
        self._write(json.dumps(["call", target, *packed]))
        return self.received(shared.items, is_next=function is next)

    def received(self, shared: list[Any], *, is_next: bool = False) -> Any:
        """Serve the other side until it replies, and return or raise its reply."""
        while True:
            message = self._read()
            call, is_raised, result, text = None, False, None, ""
            try:
                if message[0] == "call":
                    _, *call = message
                else:
                    kind, packed, states, text = message
                    table = SharedValues(shared)
                    result = self._unpacked(packed, table)
                    for one, state in zip(shared, states, strict=bool(states)):
                        items = self._unpacked_items(one, state, table)
                        one.clear()
                        _fill(one, items)
                    is_raised = kind == "raise" and issubclass(type(result), BaseException)
            except Exception as error:  # noqa: BLE001  (the other side may send anything)
                raise self._end(f"sent a reply that is no value ({type(error).__name__})") from None
            if call is not None:
                self._serve(*call)
            elif not is_raised:
                return result
            else:
                is_end = issubclass(type(result), _ENDS_OF_LOOPS)
                if is_end and not (is_next and issubclass(type(result), StopIteration)):
                    result = RuntimeError(type(result).__name__)
                self.raised = (result, str(text)[:_MAX_TEXT])
                raise result from None  # type: ignore[misc]

    def serve(self) -> None:
        """Serve the other side until it ends."""
        while True:
            self._serve(*self._read()[1:])

    def reply(self, value: Any) -> None:
        """Send a value that no call asked for."""
        self._write(self._line("value", value))

    def reply_error(self, error: BaseException, call: ExchangedCall | None = None) -> None:
        """Send an exception; its class alone if it holds what cannot be sent."""
        name = type(error).__name__
        try:
            line = self._line("raise", error, f"{name}: {error}", call)
        except Exception:  # noqa: BLE001  (code of a user: how its exceptions print, too)
            line = self._line("raise", RuntimeError(name), name)
        self._write(line)

    def _serve(self, function: Any, args: Any, kwargs: Any) -> None:
        call = None
        try:
            call = ExchangedCall([args, kwargs])
            call.args = [self._unpacked(one, call.shared) for one in args]
            call.kwargs = {name: self._unpacked(one, call.shared) for name, one in kwargs.items()}
            value = self._target(function, call.args)(*call.args, **call.kwargs)
            line = self._line("value", value, "", call)
        except EndedError:
            raise
        except BaseException as error:  # noqa: BLE001  (a call may raise anything)
            self.reply_error(error, call)
        else:
            self._write(line)

    def _line(
        self, kind: str, value: Any, text: str = "", call: ExchangedCall | None = None
    ) -> str:
        """Return a reply, with the contents of the containers of the call's arguments if one changed."""
        table = SharedValues(call.shared.items if call else ())
        packed, states = self._packed(value, table), []
        if call and self._packed_call(call.args, call.kwargs, SharedValues()) != call.packed:
            states = [self._packed_items(one, table) for one in call.shared.items]
        return json.dumps([kind, packed, states, text[:_MAX_TEXT]])

    def _target(self, function: Any, args: list[Any]) -> Any:
        """Return what a call calls, if this side does that for the other one.

        The answer may use what a test passed to it: call it, iterate over it, and read its attributes
        if the tests define its class.
        """
        if isinstance(function, list):
            tag, number = function
            if tag == "yours":
                return self._mine.items[number]
        elif self._is_answer or self._is_allowed(function, args):
            return _imported(function)
        raise TypeError("the tests do not allow that")

    def _is_allowed(self, function: str, args: list[Any]) -> bool:
        if function not in _ATTRIBUTES:
            return function in _PROTOCOL and any(id(one) in self._mine.numbers for one in args)
        one, name = args[:2]
        is_known = type(one).__module__ == _TESTS or type(one) in (StringIO, BytesIO)
        is_public = type(name) is str and not name.startswith("_")
        return is_known and is_public and id(one) in self._mine.numbers

    def _packed_call(self, args: Any, kwargs: Any, shared: SharedValues) -> list[Any]:
        return [
            [self._packed(one, shared) for one in args],
            {name: self._packed(one, shared) for name, one in kwargs.items()},
        ]

    def _packed(self, one: Any, shared: SharedValues) -> Any:
        kind = type(one)
        if one is None or kind in (bool, str, float):
            return one
        if kind is int and -_JSON_INTS < one < _JSON_INTS:
            return one
        if kind is Handle:
            return ["yours", one.agentrl_number]
        if _CONTAINERS.get(kind.__name__) is kind:
            if id(one) in shared.numbers:
                return ["same", shared.numbers[id(one)]]
            shared.add(one)
            option = one.maxlen if kind is deque else getattr(one, "default_factory", None)
            packed = self._packed(option, shared)
            return [kind.__name__, packed, self._packed_items(one, shared)]
        path = f"{kind.__module__}:{kind.__name__}"
        if path in _VALUES and getattr(sys.modules[kind.__module__], kind.__name__, None) is kind:
            return [path, *(self._packed(part, shared) for part in _VALUES[path][1](one))]
        if issubclass(kind, BaseException):
            number = one.__dict__.get("agentrl_number")
            if number is not None:
                return ["yours", number]
            args = [self._packed(part, shared) for part in one.args]
            return ["exception", self.own(one), self._packed(kind, shared), args]
        if kind.__module__ == "numpy" and one.dtype.kind in "biufc":
            array = sys.modules["numpy"].asarray(one)
            return ["numpy", array.dtype.str, list(array.shape), array.tobytes().hex()]
        return self._packed_class(one) if isinstance(one, type) else self._packed_object(one)

    def _packed_items(self, one: Any, shared: SharedValues) -> list[Any]:
        if isinstance(one, dict):
            pairs = list(one.items())
            return [[self._packed(key, shared), self._packed(item, shared)] for key, item in pairs]
        return [self._packed(item, shared) for item in list(one)]

    def _packed_class(self, one: type) -> Any:
        if getattr(builtins, one.__name__, None) is one:
            return ["type", one.__name__]
        if not issubclass(one, BaseException):
            return self._packed_object(one)
        if "agentrl_number" in one.__dict__:
            return ["yours", one.__dict__["agentrl_number"]]
        base = next(base for base in one.__bases__ if issubclass(base, BaseException))
        return ["error", self.own(one), one.__name__, self._packed_class(base)]

    def _packed_object(self, one: Any) -> Any:
        kind = type(one)
        if not self._is_answer:
            path = f"{getattr(one, '__module__', None)}:{getattr(one, '__qualname__', '')}"
            if path.partition(".")[0].partition(":")[0] in sys.stdlib_module_names:
                with suppress(AttributeError, ImportError):
                    if _imported(path) is one:
                        return ["named", path]
            is_known = kind.__module__ == _TESTS or kind in (StringIO, BytesIO)
            if not (is_known or callable(one) or hasattr(kind, "__next__")):
                raise TypeError(f"an object of type {kind.__name__} cannot be passed to the code")
        names = (base.__name__ for base in _KINDS.values() if isinstance(one, base))
        return ["mine", self.own(one), next(names, None)]

    def _unpacked(self, packed: Any, shared: SharedValues) -> Any:
        match packed:
            case None | bool() | int() | float() | str():
                return packed
            case ["same", number]:
                return shared.items[number]
            case ["yours", number]:
                return self._mine.items[number]
            case ["mine", number, kind]:
                if number not in self._theirs:
                    self._theirs[number] = Handle(self, number, kind and _KINDS[kind].__name__)
                return self._theirs[number]
            case ["type", name] if isinstance(getattr(builtins, name), type):
                return getattr(builtins, name)
            case ["named", path] if self._is_answer:
                return _imported(path)
            case [tag, *parts]:
                return self._built(tag, parts, shared)
        raise TypeError("no value")

    def _built(self, tag: str, parts: list[Any], shared: SharedValues) -> Any:
        if tag == "error":
            number, name, base = parts
            return self._mirrored(number, name, self._unpacked(base, shared))
        if tag == "exception":
            number, kind, args = parts
            values = [self._unpacked(one, shared) for one in args]
            return self._exception(number, self._unpacked(kind, shared), values)
        if tag in _VALUES:
            return _VALUES[tag][0](*(self._unpacked(part, shared) for part in parts))
        if tag in _CONTAINERS:
            option, items = parts
            one = _container(_CONTAINERS[tag], self._unpacked(option, shared))
            shared.add(one)
            _fill(one, self._unpacked_items(one, items, shared))
            return one
        kind, shape, digits = parts
        if tag != "numpy" or _NUMPY_TYPE.fullmatch(kind) is None:
            raise TypeError("no value")
        array = importlib.import_module("numpy").frombuffer(bytes.fromhex(digits), kind)
        return array.reshape(shape).copy()[()]

    def _unpacked_items(self, one: Any, items: Any, shared: SharedValues) -> list[Any]:
        if isinstance(one, dict):
            return [(self._unpacked(key, shared), self._unpacked(at, shared)) for key, at in items]
        return [self._unpacked(item, shared) for item in items]

    def _mirrored(self, number: int, name: str, base: type) -> type:
        """Return a class that stands for an exception class of the other side, so that it is caught."""
        if number not in self._theirs:
            if not issubclass(base, BaseException):
                raise TypeError("no exception")
            attributes = {
                "agentrl_number": number,
                "agentrl_exchange": self,
                "__module__": "answer",
            }
            methods = {"__getattr__": _attribute_of_error, "__str__": _text_of_error}
            self._theirs[number] = type(name, (base,), attributes | methods)
        found: type = self._theirs[number]
        return found

    def _exception(self, number: int, kind: Any, args: list[Any]) -> BaseException:
        if not issubclass(kind, BaseException):
            raise TypeError("no exception")
        try:
            error: BaseException = kind(*args)
        except Exception:  # noqa: BLE001  (its class wants other arguments)
            error = kind.__new__(kind)
            error.args = tuple(args)
        error.__dict__["agentrl_number"] = number
        return error

    def _read(self) -> list[Any]:
        line = b"" if self.has_ended else self._reader.readline(_MAX_LINE)
        if not line:
            raise self._end()
        try:
            message = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, list) or not message:
            raise self._end("sent what is no reply")
        return message

    def _write(self, line: str) -> None:
        try:
            self._writer.write(line.encode("ascii") + b"\n")
            self._writer.flush()
        except OSError:
            raise self._end() from None

    def _end(self, nonsense: str = "") -> EndedError:
        self.has_ended, self.nonsense = True, self.nonsense or nonsense
        return EndedError(nonsense)


def _container(kind: type, option: Any) -> Any:
    if kind is deque:
        return deque(maxlen=option)
    return kind(option) if kind is defaultdict else kind()


def _fill(one: Any, items: list[Any]) -> None:
    if isinstance(one, dict):
        for key, item in items:
            one[key] = item
    elif isinstance(one, set):
        one.update(items)
    else:
        one.extend(items)


def _attribute_of_error(error: Any, name: str) -> Any:
    number = error.__dict__.get("agentrl_number")
    if number is None or name.startswith("__"):
        raise AttributeError(name)
    return error.agentrl_exchange.ask(getattr, (Handle(error.agentrl_exchange, number), name))


def _text_of_error(error: Any) -> Any:
    number = error.__dict__.get("agentrl_number")
    if number is None:
        return BaseException.__str__(error)
    return error.agentrl_exchange.ask(str, (Handle(error.agentrl_exchange, number),))


class Names(dict[str, Any]):
    """What tests see besides their own names: builtins, modules, and then the names of the answer."""

    def __init__(self, exchange: Exchange, tests: list[ast.Module]) -> None:
        """Decide which names are the answer's.

        `math.isclose(f(2), 4)` means the module if the tests do not import it, and `sorted(f(2))` the
        builtin function: the answer does not decide what its results are compared by. It does define
        `sum` if that is the only name in all tests, as in `assert sum(10, 15) == 6`.
        """
        super().__init__(vars(builtins))
        self._answer = Handle(exchange, _NAMESPACE)
        nodes = [list(ast.walk(test)) for test in tests]
        bound = {name for node in itertools.chain(*nodes) for name in _bound(node)}
        uses = Counter(
            name
            for of_test in nodes
            for name in {node.id for node in of_test if isinstance(node, ast.Name)} - bound
        )
        for name in uses:
            module = _module(name, list(itertools.chain(*nodes)))
            if module is not None:
                self[name] = module
        if uses.keys() <= self.keys():
            for name in [one for one, count in uses.items() if count == len(tests)]:
                if name in vars(builtins):
                    del self[name]

    def __missing__(self, name: str) -> Any:
        if not name.startswith("__"):
            with suppress(KeyError):
                return self._answer[name]  # type: ignore[index]
        return vars(builtins)[name]


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node of the tests defines."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            yield name
        case ast.alias(name=path, asname=name):
            yield name or path.partition(".")[0]


def _module(name: str, nodes: list[ast.AST]) -> Any:
    """Return the module that tests mean by a name that they only read attributes of; else None."""
    path = _ALIASES.get(name, name)
    if path not in (*sys.stdlib_module_names, *_ALIASES.values()):
        return None
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    read = [
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and any(node.value is use for use in uses)
    ]
    try:
        module = importlib.import_module(path)
    except ImportError:
        return None
    is_meant = len(read) == len(uses) and all(hasattr(module, attribute) for attribute in read)
    return module if is_meant else None


def _serve_answer(exchange: Exchange) -> None:
    """Run the code of the answer, and then what the tests call."""
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    exchange.own(vars(module))
    try:
        with open("answer.py", encoding="utf-8", errors="surrogatepass") as file:
            exec(compile(file.read(), "answer.py", "exec"), vars(module))
    except BaseException as error:  # noqa: BLE001  (code of a model)
        exchange.reply_error(error)
    else:
        exchange.reply(None)
        exchange.serve()


def _run_tests(exchange: Exchange, results: int) -> None:
    """Run the tests, and write a line for each: its number, and "", why it failed, or null.

    null says that the process of the code has ended.
    """
    with open("tests.json", encoding="utf-8") as file:
        tests = json.load(file)
    trees = []
    for test in tests:
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            trees.append(ast.parse(test))
    names: dict[str, Any] = {"__name__": _TESTS, "__builtins__": Names(exchange, trees)}
    has_failed = False
    for number, test in enumerate(tests):
        reason: str | None = ""
        try:
            if number == 0:
                exchange.received([])
            exec(compile(test, "test", "exec"), names)
        except BaseException as error:  # noqa: BLE001  (a test may raise anything)
            known, text = exchange.raised
            reason = f"the code raised {text}" if error is known else type(error).__name__
        if exchange.has_ended:
            reason = f"the code {exchange.nonsense}" if exchange.nonsense else None
        if reason:  # the first is shown, and there is room for every result
            reason, has_failed = "fails" if has_failed else reason, True
        os.write(results, (json.dumps([number, reason]) + "\n").encode())


def main() -> None:
    """Serve or test, over standard input and output, which the code in here then no longer has."""
    is_answer = os.path.exists("answer.py")
    reader, writer, errors = (os.dup(number) for number in range(3))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2 if is_answer else nothing, 1)
    exchange = Exchange(os.fdopen(reader, "rb"), os.fdopen(writer, "wb"), is_answer=is_answer)
    with suppress(EndedError):
        if is_answer:
            _serve_answer(exchange)
        else:
            os.dup2(nothing, 2)
            _run_tests(exchange, errors)


if __name__ == "__main__":
    main()
