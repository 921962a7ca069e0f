import gc

from agentrl.runtime.frozen_imports import frozen_imports


def test_what_a_block_imports_is_collected_neither_within_it_nor_later() -> None:
    before = gc.get_freeze_count()
    with frozen_imports():
        assert not gc.isenabled()
        made = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)
