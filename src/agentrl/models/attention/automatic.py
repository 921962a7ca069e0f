"""The default: for each row, the back end that is fastest for its tree on the device.

CPUs compute along segments (`sdpa`). On CUDA, the number of kernels of `sdpa` grows with the number of
branches, so trees go through one kernel with a block mask (`flex`). A row of a few long conversations
without branches needs no mask at all: torch's own causal kernels are about twice as fast there, and
`sdpa` calls one for each conversation. Images whose tokens see one another, and float64, which
FlexAttention does not compute, go through `sdpa` as well.

Shape legend as in `backend`.
"""

from functools import cached_property
from typing import Any

import torch

from agentrl.data.rows import PackedRow
from agentrl.models.attention.backend import AttentionVariant, register_backend
from agentrl.models.attention.flex import FLEX
from agentrl.models.attention.layout import whole_images
from agentrl.models.attention.sdpa import SDPA
from agentrl.models.rows.row_tree import segment_starts

LEAST_CONVERSATION = 2048
"""Mean tokens of a conversation from which a kernel for each is faster than one block mask."""


class RowLayouts:
    """The layouts of a row; each is created when a layer needs it."""

    def __init__(
        self, row: PackedRow, device: torch.device, num_above: int, window: int | None
    ) -> None:
        self._given = (row, device, num_above, window)

    @cached_property
    def needs_no_mask(self) -> bool:
        """Whether SDPA computes the row in few kernels, or alone computes it."""
        row, device, num_above, window = self._given
        if device.type != "cuda" or len(whole_images(row)):
            return True
        starts = segment_starts(row)
        is_unbranched = not num_above and not row.positions[starts].any()
        return is_unbranched and window is None and row.num_tokens >= LEAST_CONVERSATION * len(starts)

    @cached_property
    def sdpa(self) -> Any:
        """For `SDPA.attend`."""
        return SDPA.layout(*self._given)

    @cached_property
    def flex(self) -> Any:
        """For `FLEX.attend`."""
        return FLEX.layout(*self._given)


class AutomaticBackend:
    """Chooses a back end for each row."""

    flag = "auto"
    implementation = "agentrl_auto"
    computes = SDPA.computes & FLEX.computes

    def refusal(self, device: torch.device) -> str | None:
        """Return None: one of the back ends runs on every device."""
        return None

    def layout(
        self,
        row: PackedRow,
        device: torch.device,
        num_above: int = 0,
        window: int | None = None,
    ) -> RowLayouts:
        """Return the row's layouts, created when a layer needs them."""
        return RowLayouts(row, device, num_above, window)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        variant: AttentionVariant,
        layout: RowLayouts,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if layout.needs_no_mask or query.dtype == torch.float64:
            return SDPA.attend(query, key, value, variant=variant, layout=layout.sdpa)
        return FLEX.attend(query, key, value, variant=variant, layout=layout.flex)


AUTOMATIC = register_backend(AutomaticBackend())
