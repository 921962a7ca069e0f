"""Redaction of secrets in text that is written, logged or printed.

Input: text that people may read (log lines, messages, values of flags). Output: the same text with
`***` in place of secrets: credentials and queries of URLs, bearer tokens, and every value
registered with `remember`.
"""

import re
from collections.abc import Iterable
from urllib.parse import unquote

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
