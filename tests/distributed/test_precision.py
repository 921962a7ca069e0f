import pytest
from support.gloo_ranks import run_ranks


@pytest.mark.distributed
def test_bfloat16_ranks_keep_weights_sum_gradients_and_step_in_float32() -> None:
    run_ranks("precision_run.py", 2)
