from pathlib import Path

from room_budget import excesses, measured


def test_a_room_beyond_its_budget_and_one_without_are_named(tmp_path: Path) -> None:
    for name, text in (
        ("store/a.py", "1\n2\n"),
        ("store/deep/b.py", "3\n"),
        ("plugins/engine/c.py", "4\n"),
        ("plugins/__init__.py", "5\n"),
        ("errors.py", "6\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = measured(tmp_path)
    assert found["store"] == {"lines": 3, "modules": 2}
    assert found.keys() == {"store", "plugins/engine", "plugins", "errors"}
    assert excesses(found, found) == []
    budgets = {**found, "store": {"lines": 2, "modules": 2}}
    del budgets["plugins/engine"]
    assert excesses(found, budgets) == [
        "plugins/engine: 1 lines, budget 0",
        "plugins/engine: 1 modules, budget 0",
        "store: 3 lines, budget 2",
    ]
