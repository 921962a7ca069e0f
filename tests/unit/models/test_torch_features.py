"""Features that the oldest supported PyTorch lacks."""

from typing import Any

import torch

from agentrl.models.torch_features import has_keyword, with_recompile_limit


def test_a_keyword_is_found_by_the_signature() -> None:
    assert has_keyword(torch.compile, "dynamic")
    assert not has_keyword(torch.compile, "a_keyword_of_tomorrow")


def test_the_limit_holds_while_the_compiled_function_is_called() -> None:
    seen: list[Any] = []
    before = torch._dynamo.config.recompile_limit
    limited = with_recompile_limit(
        lambda: seen.append(torch._dynamo.config.recompile_limit), before + 5
    )
    limited()
    assert (seen, torch._dynamo.config.recompile_limit) == ([before + 5], before)
