"""Captioners: an image becomes a grid z of vectors, and a decoder writes what is seen there.

Without attention (Vinyals 2015), all passes through the first state: h_0 = MLP(z), and c = h_0 at every step. With
spatial attention (Xu 2015), every word looks at the grid anew: e_tij = f(h_{t-1}, z_ij), a = softmax(e) over all cells,
c_t = sum_ij a_tij z_ij. Or a Transformer's cross-attention looks.
"""

from typing import Any

import torch
from torch import Tensor, nn

from regard.config.model import RNNConfig
from regard.config.vision import CaptionerConfig, VisionConfig
from regard.data.batching import Batch
from regard.data.vocabulary import BOS, PAD, UNK
from regard.nn.attention import CROSS, Attention
from regard.nn.layers import Dropout, OutputLayer, make_embedding, make_norm, widen
from regard.nn.loss import Loss, cross_entropy, token_surprise
from regard.nn.recurrent import RecurrentDecoder
from regard.nn.state import State
from regard.nn.transformer import Decoder, EncodedSource
from regard.nn.vision.encoders import read_gates
from regard.tasks.generation import EncoderDecoder
from regard.tasks.vision.images import make_encoder

UNSAID = (PAD, UNK, BOS)
"""What no caption that is sampled holds."""


def augment(pixels: Tensor, settings: VisionConfig) -> Tensor:
    """Images (batch, 3, height, width), each mirrored or not and moved by a few pixels, as torch's generator draws."""
    if settings.flip:
        mirrored = torch.rand(len(pixels), device=pixels.device) < 0.5
        pixels = torch.where(mirrored[:, None, None, None], pixels.flip(-1), pixels)
    if not settings.shift:
        return pixels
    most, height = settings.shift, pixels.shape[-2]
    moved = torch.randint(-most, most + 1, (2, len(pixels), 1), device=pixels.device)
    down, right = ((torch.arange(height, device=pixels.device) + one).clamp(0, height - 1) for one in moved)
    rows = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    return pixels.permute(0, 2, 3, 1)[rows, down[:, :, None], right[:, None]].permute(0, 3, 1, 2)


def encode_images(encoder: nn.Module, source: Tensor, settings: VisionConfig, training: bool) -> Tensor:
    """Pixels (batch, 3, size, size) or kept features -> features (batch, cells, depth). Those of a frozen encoder have
    the 16 bits that are kept, whether they were or not."""
    if source.dim() == 3:
        return source.to(next(encoder.parameters()).dtype)
    if not settings.freeze_encoder:
        found: Tensor = encoder(augment(source, settings) if training else source)
        return found
    with torch.no_grad():
        found = encoder(source)
    return found.half().to(found.dtype)


class Captioner(EncoderDecoder):
    """What all captioners share: z_ij = W x_ij + p_ij, of the encoder's x and a learned place p; words and output."""

    decoder: nn.Module

    def __init__(self, config: CaptionerConfig, vocab: int, width: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = make_encoder(config)
        cells = self.encoder.grid[0] * self.encoder.grid[1]
        self.project = nn.Linear(self.encoder.size, config.size)
        self.places = nn.Parameter(torch.randn(cells, config.size) * config.size**-0.5)
        self.dropout = Dropout(config.dropout)
        self.target_embedding = make_embedding(vocab, width)
        self.output = OutputLayer(vocab, width, self.target_embedding if config.tie_embeddings else None)

    def encoder_states(self, source: Tensor, lengths: Tensor) -> Tensor:
        """Pixels or features -> the grid z (batch, cells, size). Dropout takes the same numbers of all cells: what it
        takes of one alone, the mean of all has nearly whole."""
        seen = encode_images(self.encoder, source, self.config, self.training)
        grid: Tensor = self.project(seen) + self.places
        kept: Tensor = self.dropout(grid.new_ones(len(grid), 1, grid.shape[-1]))
        return grid * kept

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """As of any writer; no caption says <unk>."""
        logprobs, state = super().step(tokens, state)
        logprobs[:, UNK] = -torch.inf
        return logprobs, state

    def gauges(self) -> dict[str, float]:
        return read_gates(self.encoder)

    def follow(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """As `hidden`, and where every word looked: (batch, heads, target, cells) of each attention to the grid."""
        given: dict[Attention, list[Any]] = {}

        def note(attention: Attention, inputs: tuple[Any, ...], output: Tensor) -> None:
            given.setdefault(attention, []).append(inputs)

        parts = [part for part in self.decoder.modules() if isinstance(part, Attention) and part.axes == CROSS]
        hooks = [part.register_forward_hook(note) for part in parts]
        try:
            hidden = self.hidden(batch)
        finally:
            for hook in hooks:
                hook.remove()
        maps = []
        for attention, uses in given.items():
            _, kv, *mask = uses[0]
            maps.append(attention.weights(torch.cat([queries for queries, *_ in uses], dim=-2), kv, *mask))
        return hidden, maps

    def forward(self, batch: Batch, label_smoothing: float = 0.0) -> Loss:
        """The cross-entropy of captions; of sampled ones with their rewards, what makes those above 0 likelier."""
        if batch.rewards is not None:
            return self.reinforce(batch, batch.rewards)
        weight = self.config.doubly_stochastic
        if not weight:
            return super().forward(batch, label_smoothing)
        hidden, maps = self.follow(batch)
        loss = cross_entropy(hidden, self.output.weight, self.output.bias, batch.answer, label_smoothing)
        return loss._replace(total=loss.total + weight * penalize_neglect(maps, batch.answer))

    def reinforce(self, batch: Batch, rewards: Tensor) -> Loss:
        """What makes captions with rewards above 0 likelier. The probabilities are those that they were sampled with,
        without dropout and without what is never said: with others, an equal reward of all would have a gradient, which
        drives the model astray (into <unk>, where most samples are worse than the greedy caption)."""
        mode = self.training
        self.eval()
        try:
            unsaid = torch.tensor(UNSAID, device=batch.answer.device)
            logits = widen(self.logits(batch)).index_fill(-1, unsaid, -torch.inf)
            nats, tokens = token_surprise(logits, batch.answer)
        finally:
            self.train(mode)
        return Loss((nats * rewards).sum(), nats.detach().sum(), int(tokens.sum()))


def penalize_neglect(maps: list[Tensor], answer: Tensor) -> Tensor:
    """sum_i (1 - sum_t a_ti)^2 over cells i and words t, of the mean of all heads (Eq. 14, Xu 2015): maps (batch,
    heads, target, cells), answer (batch, target)."""
    real = (answer != PAD)[..., None]
    mean = torch.stack([one.mean(1) for one in maps]).mean(0)
    total: Tensor = ((1 - (mean * real).sum(1)) ** 2).sum()
    return total


class RecurrentCaptioner(Captioner):
    """A recurrent decoder; with or without attention to the grid."""

    decoder: RecurrentDecoder

    def __init__(self, config: CaptionerConfig, vocab: int) -> None:
        super().__init__(config, vocab, config.embedding)
        shared = {name: getattr(config, name) for name in ("cell", "size", "embedding", "layers", "normalize")}
        own = RNNConfig(
            kind="rnn", attention=config.spatial_attention, dropout=config.dropout, bidirectional=False, **shared
        )
        self.decoder = RecurrentDecoder(own, "spatial", gate=config.gate)
        width = config.size * (len(self.places) if config.summary == "flat" else 1)
        self.summarize = nn.Linear(width, config.size)

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        grid = self.encoder_states(source, lengths)
        whole = grid.flatten(1) if self.config.summary == "flat" else grid.mean(1)
        last = torch.tanh(self.summarize(whole))[:, None].expand(-1, self.config.layers, -1)
        seen, first = self.decoder.begin(grid, last, lengths)
        return State(seen._replace(summary=first.hidden[:, -1]), first)  # without attention, c = h_0

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cache = self.decoder(self.target_embedding(target), state.source, state.cache)
        return hidden, State(state.source, cache)


class TransformerCaptioner(Captioner):
    """A Transformer's decoder, whose cross-attention looks at the grid."""

    decoder: Decoder

    def __init__(self, config: CaptionerConfig, vocab: int, longest: int) -> None:
        super().__init__(config, vocab, config.size)
        self.norm = make_norm(config.size, config.norm_kind, config.norm_epsilon)
        self.decoder = Decoder(config, config.layers, longest, cross="spatial")

    def encode(self, source: Tensor, lengths: Tensor) -> State:
        return State(EncodedSource(self.norm(self.encoder_states(source, lengths)), None), None)

    def start(self, source: Tensor, lengths: Tensor) -> State:
        return State(self.decoder.project_source(self.encode(source, lengths).source), None)

    def decode(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cache = self.decoder(self.target_embedding(target), state.source, state.cache)
        return hidden, State(state.source, cache)
