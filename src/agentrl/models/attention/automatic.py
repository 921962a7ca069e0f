"""The default: for each row, the back end that is fastest for its tree on the device.

CPUs compute along segments (`sdpa`). On CUDA, the number of kernels of `sdpa` grows with the number of
branches, so trees go through one kernel with a block mask (`flex`). A row of a few long conversations
without branches needs no mask at all: torch's own causal kernels are about twice as fast there, and
`sdpa` calls one for each conversation. Images whose tokens see one another go through `sdpa` as well.

Shape legend as in `backend`.
"""

import torch
from torch.nn.attention.flex_attention import BlockMask

from agentrl.data.rows import PackedRow
from agentrl.models.attention.backend import AttentionVariant, register_backend
from agentrl.models.attention.flex import FLEX
from agentrl.models.attention.layout import whole_images
from agentrl.models.attention.sdpa import SDPA, RowLayout
from agentrl.models.rows.row_tree import segment_starts

LEAST_CONVERSATION = 2048
"""Mean tokens of a conversation from which a kernel for each is faster than one block mask."""


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
    ) -> RowLayout | BlockMask:
        """Return the layout of the back end that computes the row."""
        if masks_blocks(device) and not needs_no_mask(row, num_above, window):
            return FLEX.layout(row, device, num_above, window)
        return SDPA.layout(row, device, num_above, window)

    def is_traceable(self, layout: RowLayout | BlockMask) -> bool:
        """Return whether the back end's attention can be traced."""
        return isinstance(layout, BlockMask)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        variant: AttentionVariant,
        layout: RowLayout | BlockMask,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if isinstance(layout, BlockMask):
            return FLEX.attend(query, key, value, variant=variant, layout=layout)
        return SDPA.attend(query, key, value, variant=variant, layout=layout)


def needs_no_mask(row: PackedRow, num_above: int, window: int | None) -> bool:
    """Return whether SDPA computes a row in few kernels, or alone computes it."""
    if len(whole_images(row)):
        return True
    starts = segment_starts(row)
    is_unbranched = not num_above and not row.positions[starts].any()
    return is_unbranched and window is None and row.num_tokens >= LEAST_CONVERSATION * len(starts)


def masks_blocks(device: torch.device) -> bool:
    """Return whether a device has kernels with block masks."""
    return device.type == "cuda"


AUTOMATIC = register_backend(AutomaticBackend())
