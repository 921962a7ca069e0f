"""A filter by difficulty: trains on groups whose share of right answers is in a band.

agentrl run ... --group_filter examples/own_algorithm/difficulty_filter.py:neither_easy_nor_hard
"""

from agentrl.algorithms.filters import GroupFacts

EASIEST, HARDEST = 0.8, 0.2


def neither_easy_nor_hard(group: GroupFacts) -> list[bool]:
    """Return for each record whether it is trained on: all of a group, or none."""
    right = [record.is_right for record in group.records if record.score is not None]
    share = sum(right) / max(len(right), 1)
    return [HARDEST <= share <= EASIEST] * len(group.records)
