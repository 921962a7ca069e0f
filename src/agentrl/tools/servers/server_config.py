"""The tool servers of a run: their settings, and the `mcpServers` mapping that they are read from."""

import asyncio
import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from agentrl.config.named_files import read_text_file
from agentrl.errors import ConfigError
from agentrl.runtime.processes.child_processes import program
from agentrl.runtime.processes.wall import Wall, named_paths
from agentrl.runtime.variables import with_variables
from agentrl.tools.servers.served_question import NO_QUESTION, PLACEHOLDER, ServedQuestion

Transport = Literal["http", "sse", "stdio", "aggregator"]
_MAX_PAUSE_SECONDS = 10.0
_SECRET_FLAG = re.compile(r"-\S*(?:key|token|secret|passw|auth|credential)\S*", re.IGNORECASE)


class McpServer(BaseModel):
    """One MCP server: an address, or a command that is started and reached over its pipes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transport: Transport
    url: str | None = None
    """Endpoint of an HTTP server, for example `http://127.0.0.1:8000/mcp`."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Additional headers of every HTTP request."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, SecretStr] = Field(default_factory=dict)
    """Environment of the command, in addition to PATH, HOME and the like."""
    cwd: str | None = None
    """Its working directory, which it then sees; by default an empty one."""
    readable: tuple[str, ...] = ()
    """Files and folders that the command reads in addition to those that its words name."""
    writable: tuple[str, ...] = ()
    """Files and folders outside its scratch folder that the command may write to; all rollouts, or
    all clients of `agentrl env up`, share them."""
    call_timeout_seconds: float | None = Field(default=None, gt=0)
    """Longest tool call; by default `ToolsConfig.call_timeout_seconds`."""
    per_rollout: bool = False
    """Each rollout gets its own connection: for servers that keep state in the session."""
    state: Literal["session", "folder"] = "session"
    """Where a `per_rollout` command keeps its state: `folder`: only in the files of its directory
    (`${rollout_dir}`), so that a branch starts from a copy of them."""
    fixture: str = ""
    """A file, or a folder, below the folder of the question file, which each rollout finds copied in
    its directory: `${row.fixture}`, for example."""
    row: tuple[str, ...] = ()
    """Columns of the question's row that each rollout finds in `row.json` of its directory."""
    resumable: bool = False
    """The server keeps no state between calls: another sampler may resume a rollout."""
    written: tuple[str, ...] = Field(default=(), repr=False)
    """Its address, or command and arguments, before environment variables are substituted."""

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        required, forbidden = (
            ("command", "url") if self.transport == "stdio" else ("url", "command")
        )
        if getattr(self, required) is None or getattr(self, forbidden) is not None:
            raise ValueError(f"a {self.transport} server takes `{required}`, not `{forbidden}`")
        if self.per_rollout and self.transport == "aggregator":
            raise ValueError(
                "per_rollout is not supported by aggregators, which share their servers between "
                "rollouts"
            )
        if self.per_rollout and self.resumable:
            raise ValueError(
                "per_rollout and resumable are mutually exclusive: one declares session state, the "
                "other its absence"
            )
        if self.state == "folder" and not (self.per_rollout and self.command):
            raise ValueError('"state": "folder" requires a command with "per_rollout": true')
        if self.url is not None and not re.match(r"https?://[^/\s]", self.url):
            raise ValueError(f"url {self.url!r} is not an http(s) address")
        return self

    @model_validator(mode="after")
    def _check_placeholders(self) -> Self:
        if (self.fixture or self.row) and not (self.per_rollout and self.command):
            raise ValueError('"fixture" and "row" require a command with "per_rollout": true')
        for found in PLACEHOLDER.finditer("".join((self.url or "", self.command or ""))):
            raise ValueError(
                f"{found[0]} is supported only in args, env and cwd of a command and in headers"
            )
        for found in PLACEHOLDER.finditer(self._filled_texts):
            if not self.per_rollout:
                raise ValueError(f'{found[0]} requires "per_rollout": true')
            if self.command is None and found["name"] == "rollout_dir":
                raise ValueError(f"{found[0]} is supported only in args, env and cwd of a command")
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """Its command line and the values of its variables.

        Those that a rollout fills in are left out, so that no row opens a path.
        """
        variables = (text.get_secret_value() for text in self.env.values())
        given = (program(self.command or ""), *self.args, *variables)
        return tuple(word for word in given if PLACEHOLDER.search(word) is None)

    def named_paths(self) -> tuple[Path, ...]:
        """Return what the command line, the variables and the working directory name."""
        given = (*self.readable, *((self.cwd,) if self.cwd else ()))
        opened = (Path(path) for path in given if PLACEHOLDER.search(path) is None)
        return (*named_paths(self.words), *opened)

    async def prepare(self, question: ServedQuestion, rollout_dir: Path) -> None:
        """Put what the settings name into a rollout's directory; see `ServedQuestion.prepare`."""
        if self.fixture or self.row:
            await asyncio.to_thread(question.prepare, self.fixture, self.row, rollout_dir)

    @property
    def _filled_texts(self) -> str:
        """All settings whose placeholders a rollout fills in."""
        secrets = (one.get_secret_value() for one in (*self.env.values(), *self.headers.values()))
        return "\n".join((*self.args, *secrets, self.cwd or "", self.fixture))

    @property
    def asks_for_question(self) -> bool:
        """Whether its settings name more of a rollout than its directory."""
        placed = PLACEHOLDER.finditer(self._filled_texts)
        return bool(self.fixture or self.row) or any(
            found["name"] != "rollout_dir" for found in placed
        )

    @property
    def named_columns(self) -> tuple[str, ...]:
        """The columns of a question's row that its settings name."""
        placed = (found["column"] for found in PLACEHOLDER.finditer(self._filled_texts))
        return tuple(dict.fromkeys((*self.row, *filter(None, placed))))

    @property
    def address(self) -> str:
        """The server's address for messages, without credentials and query strings.

        Environment variables appear by name, because they often hold secrets.
        """
        if self.url is None:
            return " ".join(_without_secrets(self.written or (self.command or "", *self.args)))
        url = self.written[0] if self.written else self.url
        return re.sub(r"//[^/@]*@", "//", url).split("?", 1)[0]


class ToolsConfig(BaseModel):
    """The tool servers of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    servers: dict[str, McpServer]
    server_names: tuple[str, ...] | None = None
    """Use only these servers, including those behind an aggregator; None uses all."""
    tool_names: tuple[str, ...] | None = None
    """Show only these tools (plain or `server.tool` names); None shows all."""
    blocked_tools: tuple[str, ...] = ()
    """Never show or call these tools (plain or `server.tool` names)."""
    auth_token: SecretStr | None = None
    """Bearer token sent to every HTTP server without a configured `Authorization` header."""
    connect_timeout_seconds: float = Field(default=10.0, gt=0)
    start_timeout_seconds: float = Field(default=60.0, gt=0)
    """Startup timeout of a command: `npx` and `uvx` download it first."""
    call_timeout_seconds: float = Field(default=120.0, gt=0)
    """Timeout of a tool call; the model sees the error."""
    max_call_seconds: float = Field(default=600.0, gt=0)
    """Longest call of a tool that reports progress: each report extends the call by
    `call_timeout_seconds`, up to this."""
    max_retries: int = Field(default=4, ge=0)
    """Retries after a connection failure, if repeating the call is safe."""
    retry_delay_seconds: float = Field(default=0.5, ge=0)
    """Pause before the first retry; it doubles with each further one, up to 10 s."""
    retry_lost_calls: bool = False
    """Also retry calls whose response was lost and that may have been carried out, for tools that do
    not declare themselves read-only or idempotent."""
    refresh_seconds: float = Field(default=60.0, gt=0)
    """Seconds between two refreshes of the servers' tool lists; a rollout keeps the tools that it
    started with."""
    wall: Wall = Wall()
    """What commands can access in addition to what their own words name. Without a scratch folder,
    each gets one of its own."""
    log_dir: Path | None = None
    """Folder for the standard error of commands; by default it is discarded."""
    example: ServedQuestion = NO_QUESTION
    """Question that servers are told of when they are started to list their tools."""
    log_prefix: str = "tool_"
    """Prefix of the names of these files."""
    show_instructions: bool = True
    """Show the servers' usage instructions to the model."""
    show_images: bool = False
    """Pass images in results on to the model instead of describing them."""
    max_result_chars: int = Field(default=200_000, gt=0)
    """Longer results are cut in the middle, with a note."""

    def with_scratch(self, folder: Path) -> Self:
        """Return the same with one scratch folder for all commands."""
        return self.model_copy(update={"wall": replace(self.wall, scratch=folder)})

    @property
    def retry_pauses(self) -> list[float]:
        """The pauses between the attempts of a request, in seconds."""
        delay = self.retry_delay_seconds
        return [min(delay * 2**number, _MAX_PAUSE_SECONDS) for number in range(self.max_retries)]

    @property
    def is_resumable(self) -> bool:
        """Whether all servers in use are declared stateless."""
        servers = self.selected.values()
        return bool(servers) and all(server.resumable for server in servers)

    @property
    def selected(self) -> dict[str, McpServer]:
        """The servers in use.

        Raises:
            ConfigError: `server_names` contains an unknown name.
        """
        if self.server_names is None:
            return dict(self.servers)
        # The servers of an aggregator are known only once it has listed them.
        aggregators = [name for name, one in self.servers.items() if one.transport == "aggregator"]
        if not aggregators:
            self.check_server_names(self.servers)
        return {
            name: server
            for name, server in self.servers.items()
            if name in self.server_names or name in aggregators
        }

    def check_server_names(self, known: Collection[str]) -> None:
        """Raise ConfigError if `server_names` contains an unknown name."""
        unknown = [name for name in self.server_names or () if name not in known]
        if unknown:
            near = get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            names = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"unknown MCP server {unknown[0]!r}{hint} (known: {names})")


def http_headers(server: McpServer, config: ToolsConfig) -> dict[str, str]:
    """Return the headers of every request to an HTTP server."""
    headers = {
        name: value.get_secret_value()
        for name, value in server.headers.items()
        if name.lower() != "accept-encoding"
    }
    # The limits of responses count received bytes, so responses must not be compressed.
    headers["Accept-Encoding"] = "identity"
    lower_names = {name.lower() for name in headers}
    if config.auth_token is not None and "authorization" not in lower_names:
        headers["Authorization"] = f"Bearer {config.auth_token.get_secret_value()}"
    return headers


def _without_secrets(parts: Sequence[str]) -> list[str]:
    """Return the words of a command line without the values of `--api-key` and the like."""
    shown: list[str] = []
    for number, part in enumerate(parts):
        flag, equals, _ = part.partition("=")
        if equals and _SECRET_FLAG.match(flag):
            shown.append(f"{flag}=***")
        elif number and _SECRET_FLAG.fullmatch(parts[number - 1]) and "=" not in parts[number - 1]:
            shown.append("***")
        else:
            shown.append(part)
    return shown


_TRANSPORT_NAMES: dict[str, Transport] = {
    "http": "http",
    "streamable-http": "http",
    "streamable_http": "http",
    "streamableHttp": "http",
    "sse": "sse",
    "stdio": "stdio",
    "mcpapi": "aggregator",
}
_OTHER_VARIABLE = re.compile(r"\$\{(?:input|workspaceFolder|userHome|command)\b[^}]*\}")
# Settings of other clients that are ignored here: who confirms a call, how a server is displayed.
_IGNORED_SETTINGS = (
    "autoApprove",
    "alwaysAllow",
    "trust",
    "description",
    "icon",
    "sse_read_timeout",
)
_URL_KEYS = ("serverUrl", "httpUrl")


def load_mcp_servers(source: str | Path | Mapping[str, object]) -> dict[str, McpServer]:
    """Read an `mcpServers` mapping: `{"mcpServers": {NAME: {"url": ...} | {"command": ...}}}`.

    Args:
        source: a mapping, JSON text, the path of a JSON file, or the address of a single HTTP
            server (it is then called `default`; a path that ends with `/mcpapi` makes it an
            AgentDock aggregator). The outer `mcpServers` key may be left out, or be `servers`.
            `${NAME}`, `${env:NAME}` and `${NAME:-default}` in its texts stand for environment
            variables. Servers that are `disabled` are left out.

    Raises:
        ConfigError: the source is missing or malformed; the server at fault is named.
    """
    if isinstance(source, Mapping):
        data: object = source
    elif isinstance(source, str) and re.match(r"https?://", source):
        data = {"default": {"url": source}}
    else:
        data = _read_json(source)
    if isinstance(data, Mapping):
        key = next((key for key in ("mcpServers", "servers") if key in data), None)
        data = data if key is None else data[key]
    if not isinstance(data, Mapping) or not data:
        raise ConfigError("mcpServers: expected a non-empty object of servers by name")
    enabled = {
        str(name): value
        for name, value in data.items()
        if not (isinstance(value, Mapping) and value.get("disabled") is True)
    }
    if not enabled:
        raise ConfigError("mcpServers: all servers are disabled")
    return {name: _parse_server(name, value) for name, value in enabled.items()}


def _read_json(source: str | Path) -> object:
    text, origin = str(source), "mcpServers"
    if not text.lstrip().startswith("{"):
        origin = text
        try:
            text = read_text_file(Path(source))
        except OSError as error:
            raise ConfigError(f"MCP servers file {origin}: {error.strerror}") from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: not JSON ({error})") from error
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply") from None


def _substituted(name: str, value: object) -> object:
    if other := _OTHER_VARIABLE.search(str(value)):
        raise ConfigError(
            f"mcpServers.{name}: {other[0]} is a variable of another client; write the value, or an "
            "environment variable as ${NAME}"
        )
    try:
        return with_variables(value, kept=PLACEHOLDER)
    except ConfigError as error:
        raise ConfigError(f"mcpServers.{name}: {error}") from None


def _default_transport(fields: Mapping[str, object]) -> str:
    if "command" in fields:
        return "stdio"
    path = str(fields.get("url", "")).split("?", 1)[0].rstrip("/")
    return "mcpapi" if path.endswith("/mcpapi") else "http"


def _parse_server(name: str, value: object) -> McpServer:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'mcpServers.{name}: expected an object, as in {{"command": "python", "args": ["x.py"]}}'
        )
    value = {"url" if key in _URL_KEYS else key: part for key, part in value.items()}
    fields = {
        key: _substituted(name, part)
        for key, part in value.items()
        if key not in (*_IGNORED_SETTINGS, "disabled")
    }
    fields["written"] = _unsubstituted(value)
    kind = fields.pop("type", None) or fields.pop("transport", None)
    if kind is None:
        kind = _default_transport(fields)
    if kind not in _TRANSPORT_NAMES:
        known = ", ".join(sorted(set(_TRANSPORT_NAMES)))
        raise ConfigError(f"mcpServers.{name}: unknown transport {kind!r} (known: {known})")
    # Other clients have separate limits for requests and streams; the last one given wins.
    for limit in ("timeout", "client_session_timeout_seconds"):
        if limit in fields:
            fields["call_timeout_seconds"] = fields.pop(limit)
    try:
        server = McpServer.model_validate({**fields, "transport": _TRANSPORT_NAMES[kind]})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(["mcpServers", name, *map(str, first["loc"])])
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = ", ".join(key for key in McpServer.model_fields if key != "written")
            near = get_close_matches(str(first["loc"][-1]).lower(), McpServer.model_fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            reason = f"unknown setting{hint} (known: {known})"
        elif first["type"] == "tuple_type":
            reason = 'expected a list, as in ["server.py", "--verbose"]'
        raise ConfigError(f"{location}: {reason}") from error
    words = (server.command or "").split()
    if len(words) > 1 and shutil.which(program(server.command or "")) is None:
        suggestion = json.dumps({"command": words[0], "args": words[1:]})[1:-1]
        raise ConfigError(f"mcpServers.{name}: program not found; write {suggestion}")
    return server


def _unsubstituted(value: Mapping[str, object]) -> tuple[str, ...]:
    """Return a server's address or command before substitution of variables."""
    if isinstance(url := value.get("url"), str):
        return (url,)
    args = value.get("args")
    parts = [value.get("command"), *(args if isinstance(args, list | tuple) else ())]
    return tuple(map(str, parts))
