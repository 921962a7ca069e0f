"""`PolicyModel`: a causal language model that returns the logprobs of target tokens.

The full logits are never materialized. Only positions that predict a target token go through the LM
head, in chunks, and the backward pass recomputes the logits of each chunk. With tensor parallelism,
each rank computes the logits of its part of the vocabulary.

A row that is too long for one pass is cut into chunks in depth-first order, with exact gradients
(`ChunkedPass`). The first pass runs them in order without gradients and keeps what later chunks read:
keys, values and inputs of convolutions of every token, and the recurrent states that later segments
continue. The caller then computes the loss from the logprobs of the whole row. The second pass runs
the chunks in reverse order and recomputes each with what lies above it as leaves. Its backward pass
starts from two kinds of gradient: those of its logprobs, and those of the values it created for later
chunks, which these have accumulated. It adds the gradients of what lies above it to the accumulators
of earlier chunks. Reverse order makes this exact: only a chunk itself and later chunks read what it
creates. Memory holds the activations of one chunk, plus what passes between chunks and its gradients
for the whole row (`models.rows.chunk_states`), which may be kept in host memory.

Shape legend: N tokens of the row, D hidden size, V vocabulary, T target tokens, R distinct (source,
temperature) pairs, C of them in a chunk. If several ranks share a row, N counts this rank's tokens,
padding included.
"""

# ruff: noqa: N803, N806 - shape suffixes

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl.data.rows import PackedRow, empty_row
from agentrl.errors import TrainingError
from agentrl.models.attention.attention_registry import attention_of, computes_trees, layer_keywords
from agentrl.models.router_replay import ROUTED_EXPERTS
from agentrl.models.rows.chunk_states import ChunkStates, RowStates
from agentrl.models.rows.row_chunks import RowChunk, cut_row
from agentrl.models.rows.row_split import RowShare, RowSplit
from agentrl.models.stage_layers import WHOLE
from agentrl.models.unrounded import unrounded
from agentrl.models.vision.image_encoders import (
    grid_keywords,
    kind_keywords,
    shown_features,
    unshown_features,
)
from agentrl.models.vision.image_reader import ImageReader
from agentrl.models.vocabulary import Vocabulary


class TargetLogprobs(NamedTuple):
    """Logprobs of the target tokens of a row, and what else was asked for."""

    logprobs: torch.Tensor
    """Logprob of each target after temperature, float32 (float64 for a float64 model) [T]."""
    entropies: torch.Tensor | None
    """Entropy in nats of the distribution that each target was drawn from [T]; no gradient."""
    likeliest: torch.Tensor | None = None
    """Likeliest token at the place of each target, int64 [T]; with the whole vocabulary on this rank."""


class PolicyModel(nn.Module):
    """Wraps a transformers causal LM; its forward pass takes a `PackedRow`.

    Everything that touches parameters happens inside `forward`, so the module can be sharded as
    one (FSDP2 gathers the parameters of embedding, norm and head around this call).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.reader = ImageReader(model.config)
        self.split = RowSplit()
        """How rows are split over ranks; set by `models.parallel`."""
        self.stage = WHOLE
        """The part of the model that this pipeline stage has."""
        self.score_logits = score_logits
        """Computes the head's results; `models.compilation` compiles it."""
        self.traced_windows: tuple[int | None, ...] = ()
        """Windows of the layers that are compiled together with their attention."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    def forward(
        self,
        row: PackedRow,
        *,
        chunk_size: int = 4096,
        with_entropy: bool = False,
        with_likeliest: bool = False,
        states: ChunkStates | None = None,
        stage_input: torch.Tensor | None = None,
    ) -> TargetLogprobs | torch.Tensor:
        """Return the logprobs of the row's target tokens, or the input of the next stage.

        Args:
            row: token trees and target tokens.
            chunk_size: positions that go through the LM head at a time.
            with_entropy: also return entropies.
            with_likeliest: also return the likeliest tokens.
            states: what passes between the chunks of a longer row (see `ChunkedPass`); None for
                a whole row.
            stage_input: hidden states [1, own tokens, D] of the previous stage, if there is one.

        Returns:
            The logprobs; hidden states [1, own tokens, D] if another stage has the head.

        Raises:
            TrainingError: replayed experts do not fit this model.
        """
        share = self.split.share(row)
        with unrounded(self.model.dtype):
            own_ND = self._hidden_states(row, share, states, stage_input)
        if not self.stage.is_last:
            return own_ND[None].clone()  # FSDP2 warns about views
        hidden_ND = share.whole_stretch(own_ND)
        own = self._own_targets(
            hidden_ND, share.own_targets(row), chunk_size, with_entropy, with_likeliest
        )
        logprobs, *further = (None if one is None else share.of_all_targets(one) for one in own)
        assert logprobs is not None
        return TargetLogprobs(logprobs, *further)

    def _own_targets(
        self,
        hidden_ND: torch.Tensor,
        row: PackedRow,
        chunk_size: int,
        with_entropy: bool,
        with_likeliest: bool,
    ) -> TargetLogprobs:
        """Return logprobs (and what else is asked for) of the targets whose sources this rank holds.

        Targets are sorted by their (source, temperature) pair, so that every chunk of pairs owns a
        contiguous range of targets; the results are put back in the order of the row.
        """
        sources_R, temperatures_R, rows_T = _distinct_rows(row)
        device = hidden_ND.device
        hidden_RD = hidden_ND.index_select(0, torch.from_numpy(sources_R).to(device))
        order = np.argsort(rows_T, kind="stable")
        temperatures = torch.from_numpy(temperatures_R).to(device)
        rows = torch.from_numpy(rows_T[order]).to(device)
        targets = torch.from_numpy(row.targets[order]).to(device)
        vocabulary = Vocabulary(self.split.tensor)
        # A rank without targets still runs one empty chunk: its graph must reach every parameter,
        # or the gradient reduction of the other ranks would wait for it.
        edges = [*range(0, max(len(sources_R), 1), chunk_size), len(sources_R)]
        target_edges = np.searchsorted(rows_T[order], edges).tolist()
        chunks: list[tuple[torch.Tensor, ...]] = []
        for number, (first, last) in enumerate(pairwise(edges)):
            within = slice(target_edges[number], target_edges[number + 1])
            arguments = (
                self.score_logits,
                self.model,
                hidden_RD[first:last],
                temperatures[first:last],
                rows[within] - first,
                targets[within],
                vocabulary,
                with_entropy,
                with_likeliest,
            )
            # A single chunk's logits are kept: recomputation would save no peak memory.
            if len(edges) > 2:
                chunks.append(checkpoint(_head_logprobs, *arguments, use_reentrant=False))
            else:
                chunks.append(_head_logprobs(*arguments))
        return _reordered(chunks, (True, with_entropy, with_likeliest), order)

    def _hidden_states(
        self,
        row: PackedRow,
        share: RowShare,
        states: ChunkStates | None,
        stage_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the last hidden states of this rank's tokens [N, D]."""
        device = self.device
        implementation = attention_of(self.model)
        extra = layer_keywords(
            implementation, row, device, share, states, traced_windows=self.traced_windows
        )
        positions_N = torch.from_numpy(share.own(row.positions)).to(device)[None]
        if row.rotary_positions is not None:
            positions_N = torch.from_numpy(share.own(row.rotary_positions.T).T).to(device)[:, None]
        if row.images is not None:
            extra |= shown_features(self.model, self.reader, row.images, share.stretch)
            if not computes_trees(self.model):
                extra |= kind_keywords(self.model, row.images, row.num_tokens)
                if row.rotary_positions is not None:
                    # The model computes its own positions, which are the reference for ours.
                    extra |= grid_keywords(self.model, self.reader, row.images)
        if row.routed_experts is not None:
            choices = share.between_blocks(share.own(row.routed_experts))
            extra[ROUTED_EXPERTS] = self._by_layer(
                torch.from_numpy(choices).to(device, torch.int64)
            )
        if self.stage.entry is None:
            extra["input_ids"] = torch.from_numpy(share.own(row.token_ids)).to(device)[None]
        else:
            extra["inputs_embeds"] = self.stage.entry.stage_input = stage_input
        output = self.model.base_model(
            position_ids=None if "image_grid_thw" in extra else positions_N,
            use_cache=False,
            **extra,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        if row.images is None and row.stand_in is not None:
            hidden = hidden + unshown_features(self.model, self.reader, row.stand_in)
        return hidden

    def _by_layer(self, choices_NW: torch.Tensor) -> torch.Tensor:
        """Reshape replayed experts [N, layers * experts per token] to one row per layer.

        Raises:
            TrainingError: the servers routed with another model.
        """
        config: Any = self.model.config.get_text_config()
        layers, chosen = config.num_hidden_layers, getattr(config, "num_experts_per_tok", 0)
        if choices_NW.shape[1] != layers * chosen:
            raise TrainingError(
                f"--router_replay: the servers returned {choices_NW.shape[1]} experts per token, but "
                f"this model has {layers} layers with {chosen} each; they serve another model"
            )
        return choices_NW.view(-1, layers, chosen)


def _reordered(
    parts: Sequence[Sequence[torch.Tensor | None]], is_asked: Sequence[bool], order: np.ndarray
) -> TargetLogprobs:
    """Join parts whose targets are in the `order` [T] of their sources, and restore that of the row."""
    device = next(values.device for values in parts[0] if values is not None)
    inverse = torch.from_numpy(np.argsort(order, kind="stable")).to(device)
    columns = [
        torch.cat([v for v in values if v is not None]).index_select(0, inverse) if asked else None
        for values, asked in zip(zip(*parts, strict=True), is_asked, strict=True)
    ]
    assert columns[0] is not None
    return TargetLogprobs(columns[0], *columns[1:])


def target_logprobs(
    policy: nn.Module,
    row: PackedRow,
    *,
    chunk_size: int = 4096,
    with_entropy: bool = False,
    with_likeliest: bool = False,
) -> TargetLogprobs:
    """Return the policy logprobs of a row's target tokens.

    Args:
        policy: a `PolicyModel`, sharded or not, or a `BasePolicy`.
        row: token trees and target tokens.
        chunk_size: positions that go through the LM head at a time.
        with_entropy: also return entropies.
        with_likeliest: also return the likeliest tokens.
    """
    output: TargetLogprobs = policy(
        row, chunk_size=chunk_size, with_entropy=with_entropy, with_likeliest=with_likeliest
    )
    return output


def _distinct_rows(row: PackedRow) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct (source, temperature) pairs and the pair of every target.

    Branches of a tree often share a source; its logits are computed once per temperature.

    Returns:
        sources int64 [R], temperatures float32 [R], index of each target's pair int64 [T].
    """
    # float64 holds both an index and a float32 temperature exactly.
    pairs = np.stack([row.sources.astype(np.float64), row.temperatures.astype(np.float64)], axis=1)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    return (
        distinct[:, 0].astype(np.int64),
        distinct[:, 1].astype(np.float32),
        inverse.reshape(-1).astype(np.int64),
    )


class _HiddenStatesOnly:
    """Output of a model's blocks if only their last hidden states are known."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index == 0, "hidden states come first"
        return self.last_hidden_state

    def __getattr__(self, _name: str) -> None:
        return None


def _logits(model: PreTrainedModel, hidden_CD: torch.Tensor) -> torch.Tensor:
    """Return the logits [C, V] that a model computes from last hidden states.

    The model's own forward pass computes them, with its blocks skipped: a head may scale or cap
    logits, or multiply hidden states, as its family does.
    """
    base: Any = model.base_model
    hidden = hidden_CD[None]
    base.forward = lambda *_, **__: _HiddenStatesOnly(hidden)
    try:
        with unrounded(model.dtype):
            output = model(inputs_embeds=hidden, use_cache=False, output_router_logits=False)
    finally:
        del base.forward
    logits: torch.Tensor = output.logits[0]
    return logits


def _head_logprobs(
    score: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    model: PreTrainedModel,
    hidden_CD: torch.Tensor,
    temperatures_C: torch.Tensor,
    rows_T: torch.Tensor,
    *of_targets: Any,
) -> tuple[torch.Tensor, ...]:
    """Return logprobs, entropies and likeliest tokens [T] of the targets of one chunk of C positions."""
    *further, with_likeliest = of_targets
    logits_CV = _logits(model, hidden_CD)
    scored = score(logits_CV, temperatures_C, rows_T, *further)
    likeliest_C = logits_CV.argmax(-1) if with_likeliest else rows_T.new_empty(0)
    return (*scored, likeliest_C.index_select(0, rows_T) if with_likeliest else likeliest_C)


def score_logits(
    logits_CV: torch.Tensor,
    temperatures_C: torch.Tensor,
    rows_T: torch.Tensor,
    targets_T: torch.Tensor,
    vocabulary: Vocabulary,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and entropies [T] of target tokens.

    Args:
        logits_CV: of C positions, in any precision; this rank's part of the vocabulary.
        temperatures_C: of the positions.
        rows_T: position that predicts each target token.
        targets_T: token id of each target.
        vocabulary: the ranks that share the logits.
        with_entropy: compute entropies; else they are empty.
    """
    if logits_CV.dtype != torch.float64:
        logits_CV = logits_CV.float()
    logits_CV = logits_CV / temperatures_C.to(logits_CV.dtype)[:, None]
    normalizers_C = vocabulary.logsumexp(logits_CV)
    chosen_T = vocabulary.chosen(logits_CV, rows_T, targets_T)
    logprobs_T = chosen_T - normalizers_C.index_select(0, rows_T)
    if not with_entropy:
        return logprobs_T, logprobs_T.new_empty(0)
    # H = -sum p log p = logsumexp - sum p * logit; entropy is reported and never trained on.
    with torch.no_grad():
        probabilities_CV = (logits_CV - normalizers_C[:, None]).exp()
        entropies_C = normalizers_C - vocabulary.sum(probabilities_CV * logits_CV)
    return logprobs_T, entropies_C.index_select(0, rows_T)


class ChunkedPass:
    """One forward and backward pass over a row, one chunk at a time.

    Example:
        passes = ChunkedPass(policy, row, num_chunks=4)
        output = passes.forward()
        loss(output.logprobs.requires_grad_()).backward()
        passes.backward(output.logprobs.grad)
    """

    def __init__(
        self,
        policy: nn.Module,
        row: PackedRow,
        *,
        num_chunks: int,
        chunk_size: int = 4096,
        autocast: AbstractContextManager[object] | None = None,
        states_device: torch.device | None = None,
    ) -> None:
        """Cut the row.

        Args:
            policy: a `PolicyModel` with tree attention; it may be sharded.
            row: N tokens, T target tokens.
            num_chunks: number of forward passes and of backward passes; equal on all ranks.
            chunk_size: positions that go through the LM head at a time.
            autocast: context of every forward pass.
            states_device: where what passes between chunks is kept; None: where they are computed.
        """
        self._autocast = autocast if autocast is not None else nullcontext()
        self._policy = policy
        self._row = row
        self._chunks = cut_row(row, num_chunks)
        self._chunk_size = chunk_size
        self._states = RowStates(row.num_tokens, states_device)

    @torch.no_grad()
    def forward(
        self, *, with_entropy: bool = False, with_likeliest: bool = False
    ) -> TargetLogprobs:
        """Return logprobs (and what is asked for) of all targets of the row in order, without a graph."""
        outputs: list[TargetLogprobs] = []
        for chunk in self._chunks:
            states = self._states_of(chunk)
            outputs.append(self._run(chunk, states, with_entropy, with_likeliest=with_likeliest))
            if states is not None:
                self._states.store(states)
        return self._in_row_order(outputs)

    def _in_row_order(self, outputs: Sequence[TargetLogprobs]) -> TargetLogprobs:
        order = np.concatenate([chunk.targets for chunk in self._chunks if chunk is not None])
        return _reordered(outputs, [values is not None for values in outputs[0]], order)

    def backward(self, gradient: torch.Tensor) -> None:
        """Accumulate the gradients of the parameters.

        Args:
            gradient: [T], derivative of the loss with respect to each logprob that `forward`
                returned.
        """
        self._states.start_backward()
        for chunk in reversed(self._chunks):
            self._backward(chunk, gradient)

    def _backward(self, chunk: RowChunk | None, gradient: torch.Tensor) -> None:
        states = self._states_of(chunk)
        output = self._run(chunk, states, with_entropy=False)
        if states is None:
            # FSDP2's hooks reduce gradients in the backward pass, a collective that the other
            # ranks wait for; the sum over no targets is 0.
            output.logprobs.sum().backward()
            return
        targets = torch.from_numpy(states.chunk.targets).to(gradient.device)
        roots = [output.logprobs, *states.created()]
        incoming = [gradient.index_select(0, targets), *self._states.gradients(states)]
        # A root does not require a gradient if all parameters below its layer are frozen.
        needed = [number for number, root in enumerate(roots) if root.requires_grad]
        torch.autograd.backward(
            [roots[number] for number in needed], [incoming[number] for number in needed]
        )

    def _row_of(self, chunk: RowChunk | None) -> PackedRow:
        return replace(empty_row(), stand_in=self._row.stand_in) if chunk is None else chunk.row

    def _run(
        self,
        chunk: RowChunk | None,
        states: ChunkStates | None,
        with_entropy: bool,
        stage_input: torch.Tensor | None = None,
        *,
        with_likeliest: bool = False,
    ) -> Any:
        with self._autocast:
            return self._policy(
                self._row_of(chunk),
                chunk_size=self._chunk_size,
                with_entropy=with_entropy,
                with_likeliest=with_likeliest,
                states=states,
                stage_input=stage_input,
            )

    def _states_of(self, chunk: RowChunk | None) -> ChunkStates | None:
        return None if chunk is None else ChunkStates(self._states, chunk)
