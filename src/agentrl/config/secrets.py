"""Secrets: kept out of text that people read, and in the values of flags.

`redact` returns a text (log lines, messages, values of flags) with `***` in place of secrets:
credentials and queries of URLs, bearer tokens, and every value registered with `remember`.

A flag's value with a secret is whole for its consumer, and has a public part for all others:
`get_secret_value()` returns it as the user gave it; everything else (text, `repr`, JSON, messages)
shows only the public part. `secrets_of` lists the secrets for `remember`.
"""

import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pydantic import Secret, SecretStr

HIDDEN = "***"
_PUBLIC_WORD = re.compile(r"\{port\}|-m|--[a-z][a-z_-]*|[\w./-]+\.(?:py|m?js|ts|sh)")
SECRET_NAME = re.compile(
    r"auth|key|token|secret|passw|cookie|credential|bearer|signature", re.IGNORECASE
)
"""Names of headers, variables and arguments whose values are secrets."""
# The bound on the scheme's length keeps the search of a long word from taking quadratic time.
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,30}://[^\s\"'<>]+")
_BEARER = re.compile(r"(?i)(bearer\s+)[^\s\"',]+")
_TOKEN = re.compile(
    r"\b(?:sk-|ghp_|gho_|github_pat_|hf_|glpat-|xox[abp]-|AKIA|eyJ)[A-Za-z0-9._-]{12,}"
)
"""Tokens of well-known services, anywhere in a text."""
_SECRET_OPTION = re.compile(
    r"(?i)\b((?:\w*(?:password|token|secret)\w*|authMechanismProperties)=)[^&\s]*"
)
_MIN_SECRET_CHARS = 6
"""Shorter values are not redacted, because they occur in ordinary words."""
_known_secrets: set[str] = set()


def redact(text: str) -> str:
    """Return the text without its secrets."""
    for secret in sorted(_known_secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _TOKEN.sub(HIDDEN, _BEARER.sub(rf"\1{HIDDEN}", _URL.sub(_public_url, text)))


def remember(secrets: Iterable[str]) -> None:
    """Make `redact` find these values anywhere, including percent-encoded."""
    for secret in secrets:
        _known_secrets.update(
            form for form in (secret, unquote(secret)) if len(form) >= _MIN_SECRET_CHARS
        )


def secrets_of_url(url: str) -> list[str]:
    """Return the secret parts of a URL: password, user (except of a database), query values."""
    _, user_part, _, query = _split_url(url)
    user, _, password = user_part.partition(":")
    parts = [password] if _is_database(url) else [user, password]
    if _is_database(url):
        parts += [match[0].partition("=")[2] for match in _SECRET_OPTION.finditer(query)]
    else:
        parts += [pair.partition("=")[2] or pair for pair in query.split("&")]
    return [part for part in parts if part and part != HIDDEN]


def public_command(words: Iterable[str]) -> list[str]:
    """Return a command with its program, scripts and names of flags: any other word may be a secret."""
    return [
        word if number == 0 or _PUBLIC_WORD.fullmatch(word) else HIDDEN
        for number, word in enumerate(words)
    ]


def secrets_of_command(words: Iterable[str]) -> list[str]:
    """Return the arguments that are secrets by their names: `--token X`, `API_KEY=X`, URLs."""
    found: list[str] = []
    expects_secret = False
    for word in words:
        name, equals, value = word.partition("=")
        if "://" in word:
            found += secrets_of_url(word)
        elif equals and SECRET_NAME.search(name):
            found.append(value)
        elif expects_secret and not word.startswith("-"):
            found.append(word)
        expects_secret = (
            not equals and word.startswith("-") and SECRET_NAME.search(word) is not None
        )
    return found


def _public_url(match: re.Match[str]) -> str:
    scheme, user_part, rest, query = _split_url(match[0])
    user, colon, _ = user_part.partition(":")
    if not _is_database(match[0]):
        user, colon = (HIDDEN if user_part else ""), ""
    public = f"{scheme}://{user}" + (f":{HIDDEN}" if colon else "") + ("@" if user_part else "")
    if not query:
        return public + rest
    if _is_database(match[0]):
        return f"{public}{rest}?" + _SECRET_OPTION.sub(rf"\1{HIDDEN}", query)
    pairs = (pair.partition("=") for pair in query.split("&"))
    public_pairs = [f"{name}={HIDDEN}" if equals else HIDDEN for name, equals, _ in pairs]
    return f"{public}{rest}?" + "&".join(public_pairs)


def _split_url(url: str) -> tuple[str, str, str, str]:
    """Return scheme, user part, the rest without them, and the query.

    A password with an unescaped `/`, `@` or `?` is still part of the user part of a database's URL.
    """
    scheme, _, tail = url.partition("://")
    if _is_database(url):
        user_part, _, tail = tail.rpartition("@")
        rest, _, query = tail.partition("?")
        return scheme, user_part, rest, query
    rest, _, query = tail.partition("?")
    host, slash, path = rest.partition("/")
    user_part, _, host = host.rpartition("@")
    return scheme, user_part, host + slash + path, query


def _is_database(url: str) -> bool:
    return url.startswith("mongodb")


class PartlySecret(ABC):
    """Extends pydantic's `Secret` for values that are public in parts."""

    @property
    @abstractmethod
    def public(self) -> Any:
        """The value with `***` for its secrets."""

    @abstractmethod
    def secrets(self) -> Iterator[str]:
        """Yield the secrets in it."""

    def _display(self) -> str:
        return str(self.public)


class SecretUrl(PartlySecret, Secret[str]):
    """An address; its user part and the values of its query are secrets."""

    @property
    def public(self) -> str:
        """The address without its secrets."""
        return redact(self.get_secret_value())

    def secrets(self) -> Iterator[str]:
        """Yield the user part and the values of the query."""
        yield from secrets_of_url(self.get_secret_value())


class SecretCommand(PartlySecret, Secret[str]):
    """A command line; any argument may be a secret."""

    @property
    def public(self) -> str:
        """The command with `***` for words that may be secrets."""
        return " ".join(public_command(_split_command(self.get_secret_value())))

    def secrets(self) -> Iterator[str]:
        """Yield the arguments that are secrets by their names."""
        yield from secrets_of_command(_split_command(self.get_secret_value()))


class SecretServers(PartlySecret, Secret[str]):
    """An `mcpServers` mapping: JSON, a file that contains it, or the address of one server."""

    @property
    def public(self) -> str:
        """The mapping without arguments, headers and variables; a file's path as it is."""
        text = self.get_secret_value()
        return json.dumps(_public_servers(_parse_json(text))) if self.is_json else redact(text)

    @property
    def is_json(self) -> bool:
        """Whether the mapping itself was given."""
        return self.get_secret_value().lstrip().startswith("{")

    def secrets(self) -> Iterator[str]:
        """Yield the values of headers and variables, secret arguments, and secret parts of URLs."""
        text = self.get_secret_value()
        yield from _server_secrets(_parse_json(text)) if self.is_json else _url_secrets(text)


class SecretRoute(PartlySecret, Secret[dict[str, str]]):
    """A model at another address, which may contain secrets."""

    @property
    def model(self) -> str:
        """Its name there."""
        return self.get_secret_value()["model"]

    @property
    def public(self) -> dict[str, str]:
        """The model with a redacted address."""
        return {key: redact(text) for key, text in self.get_secret_value().items()}

    def secrets(self) -> Iterator[str]:
        """Yield the secret parts of the address."""
        for text in self.get_secret_value().values():
            yield from _url_secrets(text)


SECRET_TYPES = (SecretStr, Secret)


def secrets_of(value: Any) -> Iterator[str]:
    """Yield the secrets in a flag's value."""
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        yield from secrets_of_url(text) if "://" in text else [text]
    elif isinstance(value, PartlySecret):
        yield from value.secrets()


def _url_secrets(text: str) -> Iterator[str]:
    yield from secrets_of_url(text) if "://" in text else ()


def _public_servers(value: Any) -> Any:
    """Return `mcpServers` with all names, but only those values that cannot be secrets."""
    if not isinstance(value, dict):
        return redact(value) if isinstance(value, str) else value
    public: dict[str, Any] = {}
    for key, inner in value.items():
        if key == "args":
            public[key] = [HIDDEN] * len(inner) if isinstance(inner, list) else HIDDEN
        elif key in ("headers", "env") and isinstance(inner, dict):
            public[key] = {name: _variable_or_hidden(text) for name, text in inner.items()}
        elif key == "command" and isinstance(inner, str):
            public[key] = " ".join(public_command(_split_command(inner)))
        else:
            public[key] = _public_servers(inner)
    return public


def _server_secrets(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from _url_secrets(value)
    if not isinstance(value, Mapping):
        return
    for key, inner in value.items():
        if key == "args" and isinstance(inner, list):
            yield from secrets_of_command(str(word) for word in inner)
        elif key in ("headers", "env") and isinstance(inner, dict):
            yield from (str(text) for text in inner.values() if _variable_or_hidden(text) == HIDDEN)
        else:
            yield from _server_secrets(inner)


def _variable_or_hidden(text: Any) -> str:
    return text if isinstance(text, str) and text.startswith("${") else HIDDEN


def _split_command(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an unclosed quotation mark is reported where the command is started
        return command.split()


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # reported where the servers are read
        return HIDDEN
