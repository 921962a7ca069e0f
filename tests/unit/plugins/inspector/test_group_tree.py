from harness.trees import make_turn

from agentrl.data import TokenTree
from agentrl.plugins.inspector.group_tree import group_tree


def test_answers_that_differ_in_their_last_token_part() -> None:
    turns = [
        make_turn("t/0", 0, [1, 2, 3], [4, 5]),
        make_turn("t/1", 0, [1, 2, 3], [4, 6]),
        make_turn("t/2", 0, [1, 2, 3], []),
    ]
    scores = {"t/0": 1.0, "t/1": 0.0, "t/2": None}
    nodes = group_tree(turns, scores, {}, frozenset(), None)["nodes"]
    assert [(node["depth"], node["num_tokens"], node["records"]) for node in nodes] == [
        (0, 3, ["t/0", "t/1", "t/2"]),
        (3, 1, ["t/0", "t/1"]),
        (4, 1, ["t/0"]),
        (4, 1, ["t/1"]),
    ]
    assert [node["diverges"] for node in nodes] == [False, True, False, False]
    assert [len(node["turns"]) for node in nodes] == [1, 0, 1, 1]
    # A model reads four tokens for either, and nothing for the turn without a reply.
    assert TokenTree.from_turns(turns).num_tokens == 4
