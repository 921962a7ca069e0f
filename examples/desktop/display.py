"""A private X display: start it, take screenshots, use mouse and keyboard, and let people watch.

It uses installed programs: Xvfb, openbox, Chromium, maim and xdotool; for people's own files, xterm
and mousepad; for viewers, x11vnc and websockify with noVNC. All users of the machine can reach the display's socket, so the X server
requires a secret (an MIT magic cookie), which is stored in the display's folder. This module is
independent of MCP.
"""

import asyncio
import os
import secrets
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.addresses import http_address
from agentrl.config.atomic_file import write_atomically
from agentrl.errors import ConfigError, ToolError
from agentrl.runtime.ports import listening_near
from agentrl.runtime.printable import one_line
from agentrl.runtime.processes.child_processes import end_with_parent
from agentrl.runtime.processes.wall import wall_gap

NEEDED = ("Xvfb", "openbox", "chromium", "maim", "xdotool")
NEEDED_FOR_FILES = ("xterm", "mousepad")
NEEDED_TO_WATCH = ("x11vnc", "websockify")
NOVNC = Path("/usr/share/novnc")
MIN_PASSWORD_CHARS = 8
"""VNC compares only the first eight characters."""
_START_SECONDS, _ACTION_SECONDS, _END_SECONDS = 30.0, 30.0, 3.0
_POLL_SECONDS, _NOTICE_SECONDS = 0.05, 0.5
_MAX_STDERR_CHARS = 200
_WINDOW_GONE = "BadWindow"
"""Name of the X error for a window that no longer exists."""
DESKTOP_PROGRAMS = {
    "terminal": (
        *("xterm", "-fa", "Monospace", "-fs", "11", "-title", "Terminal"),
        *("-e", "bash", "--norc", "--noprofile"),
    ),
    "editor": ("mousepad", "--disable-server"),
}
"""Command lines of the programs of a display with files, by the names that models use."""
WINDOW_CLASSES = {"terminal": "^xterm$", "editor": "^mousepad$", "browser": "^chromium$"}
_BROWSER_FLAGS = (
    *("--no-first-run", "--no-default-browser-check", "--start-maximized", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--password-store=basic", "--hide-crash-restore-bubble"),
    # By default, a browser contacts its vendor for updates and accounts.
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
)


class Display:
    """One display, and the programs that run on it; an asynchronous context."""

    def __init__(
        self,
        folder: Path,
        *,
        width: int,
        height: int,
        view_host: str = "127.0.0.1",
        view_port: int = 0,
        view_password: str = "",
        home: Path | None = None,
    ) -> None:
        """Prepare a display, which starts when the context is entered.

        Args:
            folder: an empty folder, for secrets and the browser's profile.
            width: pixels.
            height: pixels.
            view_host: address that the viewer listens on.
            view_port: its port, or the next free one; 0 for no viewer.
            view_password: password of the viewer.
            home: a folder whose copy is the home of the programs; it adds a terminal and an editor.

        Raises:
            ConfigError: a program is not installed, or the password is too short.
        """
        needed = [*NEEDED, *(NEEDED_TO_WATCH if view_port else ())]
        needed += NEEDED_FOR_FILES if home else ()
        missing = [name for name in needed if shutil.which(name) is None]
        if missing:
            raise ConfigError(
                f"a desktop needs {', '.join(missing)}: run scripts/install_desktop, or use the "
                "image of deploy/images/desktop.Dockerfile"
            )
        if view_port and len(view_password) < MIN_PASSWORD_CHARS:
            raise ConfigError(
                "--view_port requires a password in the environment variable "
                f"DESKTOP_VIEW_PASSWORD, with at least {MIN_PASSWORD_CHARS} characters"
            )
        self.width, self.height = width, height
        self.view_address = ""
        """Address of the viewer, once the display has started; empty without a viewer."""
        self.home = folder / "home"
        """Home of the programs, private to this display."""
        self.has_files = home is not None
        """Whether it has a terminal, an editor and files to use them on."""
        self._template = home
        self._folder = folder
        self._view_host, self._view_port = view_host, view_port
        self._view_password = view_password
        self._environment = {**os.environ, "HOME": str(self.home), "PS1": "$ "}
        self._programs: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> "Display":
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def gone(self) -> None:
        """Wait until the display has exited for any reason."""
        await self._programs[0].wait()

    async def has_ended(self) -> bool:
        """Return whether the display has exited, after a moment for the exit to become visible."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.gone(), _NOTICE_SECONDS)
        return self._programs[0].returncode is not None

    async def screenshot(self) -> bytes:
        """Return a picture of the whole display with its pointer, as PNG.

        Raises:
            ToolError: the display has exited.
        """
        picture, _ = await self._run("maim", "--format", "png")
        return picture

    async def use(self, *argv: str, typed: str = "") -> None:
        """Run `xdotool` with these arguments; `typed` is its standard input.

        Raises:
            ToolError: it failed, or took too long.
        """
        _, error_text = await self._run("xdotool", *argv, stdin=typed.encode())
        if error_text:  # such as an unknown key, which xdotool skips
            raise ToolError(error_text)

    async def open_program(self, name: str) -> None:
        """Start a program of `DESKTOP_PROGRAMS`; return once its window exists.

        Raises:
            ToolError: no window opens in time.
        """
        before = len(await self.windows_of(name))
        await self._start_program(*DESKTOP_PROGRAMS[name], cwd=self.home)
        deadline = time.monotonic() + _ACTION_SECONDS
        while len(await self.windows_of(name)) <= before:
            if time.monotonic() > deadline:
                raise ToolError(f"no window of the {name} opens")
            await asyncio.sleep(_POLL_SECONDS)

    async def windows_of(self, program: str) -> list[str]:
        """Return the visible windows of one of `WINDOW_CLASSES`, by their X11 numbers."""
        return await self.ask("search", "--onlyvisible", "--class", WINDOW_CLASSES[program])

    async def ask(self, *argv: str) -> list[str]:
        """Return what `xdotool` prints with these arguments, in lines; none if it finds nothing."""
        try:
            output, _ = await self._run("xdotool", *argv)
        except ToolError:  # nothing found, or a window that closed in this moment
            return []
        return output.decode(errors="replace").splitlines()

    async def browse(self, url: str) -> None:
        """Open a page in the browser, starting it if needed; return once its window exists.

        Raises:
            ToolError: no window opens in time.
        """
        # Chromium's sandbox needs namespaces, which it does not use as root. The second flag hides
        # the warning bar about the first.
        can_use_sandbox = os.geteuid() != 0 and wall_gap() is None
        sandbox = () if can_use_sandbox else ("--no-sandbox", "--test-type")
        profile = f"--user-data-dir={self._folder / 'browser'}"
        # If a browser is running, it opens the page and this process exits.
        await self._start_program("chromium", *_BROWSER_FLAGS, *sandbox, profile, "--", url)
        deadline = time.monotonic() + _ACTION_SECONDS
        while True:
            try:
                # Returns when the first window matches.
                await self.use("search", "--sync", "--onlyvisible", "--class", "chromium")
                return
            except ToolError as error:
                # xdotool queries every window, and a starting browser closes some of them meanwhile.
                if _WINDOW_GONE not in str(error) or time.monotonic() > deadline:
                    raise

    async def _start(self) -> None:
        if self._template is None:
            self.home.mkdir(0o700)
        else:
            shutil.copytree(self._template, self.home)
        display_dir = self._folder / "display"
        display_dir.mkdir(0o700)
        cookies = display_dir / "cookies"
        write_atomically(cookies, _cookie_file(secrets.token_bytes(16)), private=True)
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as number_pipe:
            with os.fdopen(writing, "wb"):
                await self._start_program(
                    *self._server_command(display_dir, writing), pass_fds=(writing,)
                )
            number = await asyncio.to_thread(number_pipe.readline)  # empty if Xvfb exits
        if not number.strip():
            raise ToolError("Xvfb cannot be started")
        self._environment |= {"DISPLAY": f":{int(number)}", "XAUTHORITY": str(cookies)}
        await self._start_program("openbox")
        if self._view_port:
            await self._start_viewer()

    def _server_command(self, display_dir: Path, number_fd: int) -> list[str]:
        """Return the command line of the X server."""
        screen = f"{self.width}x{self.height}x24"
        argv = ["Xvfb", "-displayfd", str(number_fd), "-screen", "0", screen, "-nolisten", "tcp"]
        argv += ["-noreset", "-extension", "MIT-SHM"]  # confined programs cannot share memory
        return [*argv, "-auth", str(display_dir / "cookies")]

    async def _start_viewer(self) -> None:
        password, socket = self._folder / "password", self._folder / "vnc"
        write_atomically(password, self._view_password, private=True)
        await self._start_program(
            *("x11vnc", "-unixsock", str(socket), "-rfbport", "0", "-passwdfile", str(password)),
            *("-viewonly", "-shared", "-forever", "-noremote", "-noshm", "-no6", "-quiet"),
        )
        for _ in range(int(_START_SECONDS / _POLL_SECONDS)):  # it does not report when it is ready
            if socket.is_socket():
                break
            await asyncio.sleep(_POLL_SECONDS)
        else:
            raise ToolError(f"x11vnc did not start within {_START_SECONDS:g} s")
        with listening_near(self._view_host, self._view_port) as listener:
            viewer = ("websockify", "--inetd", "--unix-target", str(socket), "--web", str(NOVNC))
            await self._start_program(*viewer, stdin=listener.fileno())
            port = listener.getsockname()[1]
        self.view_address = f"{http_address(self._view_host, port)}/vnc.html?autoconnect=true"

    async def _start_program(
        self,
        *argv: str,
        stdin: int = asyncio.subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
    ) -> None:
        """Start a program that runs as long as the display."""
        program = await asyncio.create_subprocess_exec(
            *argv,
            stdin=stdin,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._environment,
            cwd=cwd,
            pass_fds=pass_fds,
            preexec_fn=end_with_parent(signal.SIGTERM),
        )
        self._programs = [
            *(kept for kept in self._programs if kept.returncode is None),
            program,
        ]

    async def _run(self, *argv: str, stdin: bytes = b"") -> tuple[bytes, str]:
        """Run a program to completion; return its standard output and standard error."""
        program = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
        )
        try:
            output, stderr_bytes = await asyncio.wait_for(
                program.communicate(stdin), _ACTION_SECONDS
            )
        except TimeoutError:
            raise ToolError(f"{argv[0]} did not finish within {_ACTION_SECONDS:g} s") from None
        finally:
            if program.returncode is None:
                program.kill()
        error_text = one_line(stderr_bytes.decode(errors="replace")).strip()[:_MAX_STDERR_CHARS]
        if program.returncode != 0:
            raise ToolError(f"{argv[0]}: {error_text or f'exit {program.returncode}'}")
        return output, error_text

    async def _end(self) -> None:
        """End the programs, the last one first; kill those that do not exit."""
        running = [program for program in reversed(self._programs) if program.returncode is None]
        for program in running:
            program.terminate()
        for program in running:
            try:
                await asyncio.wait_for(program.wait(), _END_SECONDS)
            except TimeoutError:
                program.kill()
                await program.wait()


def _cookie_file(secret: bytes) -> bytes:
    """Return an Xauthority file with one secret for every display (Xau(3), "FILE FORMAT")."""
    every_family, no_address, no_number = b"\xff\xff", b"", b""
    fields = (no_address, no_number, b"MIT-MAGIC-COOKIE-1", secret)
    return every_family + b"".join(len(field).to_bytes(2) + field for field in fields)
