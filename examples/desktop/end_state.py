"""The state of a desktop as data, and whether it is the one that a task asks for.

A state is `{"windows": [...], "files": {...}}`. A window has its program, title, place and size in
pixels, and whether it has the keyboard. Files are those of the home folder, by path, with their
text; the path of a folder ends in `/` and has no text.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from examples.desktop.display import WINDOW_CLASSES, Display

MAX_FILES, MAX_FILE_CHARS = 200, 4_000
"""What a state shows: a model may write as many files as it likes."""
_SIDES = ("x", "y", "width", "height")


async def desktop_state(display: Display) -> dict[str, Any]:
    """Return the windows and files of a display."""
    active = await display.ask("getactivewindow")
    windows = []
    for program in WINDOW_CLASSES:
        for number in await display.windows_of(program):
            lines = await display.ask(
                "getwindowname", number, "getwindowgeometry", "--shell", number
            )
            sides = dict(line.lower().split("=", 1) for line in lines[1:] if "=" in line)
            if all(side in sides for side in _SIDES):  # it may have closed in this moment
                windows.append(
                    {"program": program, "title": lines[0], "active": [number] == active}
                    | {side: int(sides[side]) for side in _SIDES}
                )
    return {"windows": windows, "files": dict(_files(display.home))}


def unmet(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return what a state lacks of the wanted one, in words; nothing if the task is done.

    Args:
        state: what `desktop_state` returned.
        wanted: `files` with the text of each path, or None where nothing may be; `windows`, each
            with the fields that a window must have, numbers as `[least, most]`; `programs` with
            the number of their windows.
    """
    windows, files = state["windows"], state["files"]
    lacks = [
        f"file {path}" for path, text in wanted.get("files", {}).items() if files.get(path) != text
    ]
    lacks += [
        f"window {fields}"
        for fields in wanted.get("windows", ())
        if not any(_has(window, fields) for window in windows)
    ]
    return lacks + [
        f"{count} of {program}"
        for program, count in wanted.get("programs", {}).items()
        if sum(window["program"] == program for window in windows) != count
    ]


def _files(home: Path) -> Iterator[tuple[str, str]]:
    """Yield the paths and texts below the home, without hidden ones and without following links."""
    count = 0
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home)
        if any(part.startswith(".") for part in name.parts) or path.is_symlink():
            continue
        count += 1
        if count > MAX_FILES:
            return
        if path.is_dir():
            yield f"{name}/", ""
        elif path.is_file():
            with path.open(errors="replace") as file:
                yield str(name), file.read(MAX_FILE_CHARS)


def _has(window: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    return all(
        value[0] <= window[name] <= value[1] if isinstance(value, list) else window[name] == value
        for name, value in fields.items()
    )
