"""Recurrent encoder and decoder (RNN, GRU, LSTM), with or without attention (Sutskever 2014, Bahdanau 2015)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.attention.equation import KeyValues
from regard.attention.masks import padding
from regard.config.model import RNNConfig
from regard.nn.attention import (
    KEY,
    SOURCE,
    Attention,
    Kind,
    SeparateProjections,
    choose_normalizer,
    single_head_attention,
)  # fmt: skip
from regard.nn.layers import Dropout

NETWORKS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
CELLS = {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}


class RecurrentEncoder(nn.Module):
    """h_t = f(x_t, h_{t-1}), stacked; both directions have half of the size each."""

    def __init__(self, config: RNNConfig) -> None:
        super().__init__()
        self.directions = 2 if config.bidirectional else 1
        size, dropout = config.size // self.directions, config.dropout if config.layers > 1 else 0.0
        form = {"batch_first": True, "bidirectional": config.bidirectional, "dropout": dropout}
        self.network = NETWORKS[config.cell](config.embedding, size, config.layers, **form)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (batch, source, embedding) -> states (batch, source, size) and last states (batch, layer, size),
        each direction's own last."""
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, last = self.network(packed)
        states, _ = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
        last = last[0] if isinstance(last, tuple) else last  # an LSTM's (hidden, cell)
        last = last.unflatten(0, (-1, self.directions)).permute(2, 0, 1, 3).flatten(2)
        return states, last


class WordEncoder(nn.Module):
    """What a decoder sees of a word is its embedding, and with attention also the embeddings of the words that it
    attends to: [x_i; sum_j a_ij x_j]. Recurrent states say who attends to whom, and nothing else of them goes on, so
    that all that a decoder knows of a word's neighbours comes by the weights: soft parents (section 4.2, Kim 2017)."""

    def __init__(self, config: RNNConfig) -> None:
        super().__init__()
        self.layers, size = config.layers, config.size
        attends = config.encoder != "words"
        self.states = RecurrentEncoder(config) if attends else None
        projections = SeparateProjections(nn.Linear(size, size), nn.Linear(size, size), nn.Identity())
        own = choose_normalizer(config.encoder, "self") if attends else {}
        self.attention = Attention(projections, nn.Identity(), axes=SOURCE, **own) if attends else None
        self.join = nn.Linear(config.embedding * (2 if attends else 1), size)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """As `RecurrentEncoder`; the last states are the mean of all words."""
        real = padding(lengths, x.shape[1])
        if self.attention is not None and self.states is not None:
            states, _ = self.states(x, lengths)
            (keys,) = self.attention.projection.project(states, KEY, 1)
            queries = self.attention.project_query(states)
            x = torch.cat([x, self.attention(queries, KeyValues(keys, x[:, None]), real)], dim=-1)
        shown = real[:, 0, 0, :, None]
        states = torch.tanh(self.join(x)) * shown
        mean = states.sum(1) / shown.sum(1)
        return states, mean[:, None].expand(-1, self.layers, -1)


class RecurrentSource(NamedTuple):
    """What the decoder attends to. Rows are sentences."""

    kv: KeyValues
    mask: Tensor
    summary: Tensor  # (batch, size) the encoder's last state: the fixed-size context where there is no attention


class Hidden(NamedTuple):
    """The decoder's state, layer by layer. Rows are hypotheses; `cell` is an LSTM's (else the same as hidden)."""

    hidden: Tensor  # (batch, layer, size)
    cell: Tensor  # (batch, layer, size)


class RecurrentDecoder(nn.Module):
    """s_t = g(y_{t-1}, s_{t-1}, c_t), where c_t is the encoder's last state, or with attention what s_{t-1} attended
    to; then c_t joins s_t to give y_t. With a gate, s_{t-1} also says how much of c_t counts (beta, Xu 2015)."""

    def __init__(self, config: RNNConfig, kind: Kind = "cross", *, gate: bool = False) -> None:
        """`kind` is that of the attention: what it looks at."""
        super().__init__()
        self.kind = config.cell
        size = config.size
        score, normalize = config.attention, config.normalize
        self.attention = None if score == "none" else single_head_attention(size, score, normalize, kind)
        self.gate = nn.Linear(size, 1) if gate and self.attention is not None else None
        widths = [config.embedding + size] + [size] * (config.layers - 1)
        self.cells = nn.ModuleList(CELLS[config.cell](width, size) for width in widths)
        self.bridge = nn.Linear(size, size)
        self.join = nn.Linear(2 * size + config.embedding, config.embedding)
        self.dropout = Dropout(config.dropout)

    def begin(self, states: Tensor, last: Tensor, lengths: Tensor) -> tuple[RecurrentSource, Hidden]:
        """The source to attend to, and the first state: the encoder's last, layer by layer."""
        plain = KeyValues(states[:, None], states[:, None])
        kv = plain if self.attention is None else self.attention.project_kv(states)
        first = torch.tanh(self.bridge(last))
        return RecurrentSource(kv, padding(lengths, states.shape[1]), last[:, -1]), Hidden(first, first)

    def attend_source(self, hidden: Tensor, source: RecurrentSource) -> Tensor:
        """The context (rows, size) for a state (rows, size)."""
        if self.attention is None:
            return source.summary.repeat_interleave(len(hidden) // len(source.summary), dim=0)
        context = self.attention.attend_source(hidden, source.kv, source.mask)
        return context if self.gate is None else torch.sigmoid(self.gate(hidden)) * context

    def step(self, x: Tensor, source: RecurrentSource, past: Hidden) -> tuple[Tensor, Hidden]:
        """One embedding a row (rows, embedding) -> what the output is made of (rows, 2 size + embedding), new state."""
        context = self.attend_source(past.hidden[:, -1], source)
        inputs = torch.cat([x, context], dim=-1)
        hidden, cell = [], []
        for layer, network in enumerate(self.cells):
            if self.kind == "lstm":
                state, inner = network(inputs, (past.hidden[:, layer], past.cell[:, layer]))
                cell.append(inner)
            else:
                state = network(inputs, past.hidden[:, layer])
            hidden.append(state)
            inputs = self.dropout(state)
        top = torch.stack(hidden, dim=1)
        return torch.cat([inputs, context, x], dim=-1), Hidden(top, torch.stack(cell, dim=1) if cell else top)

    def forward(self, x: Tensor, source: RecurrentSource, past: Hidden) -> tuple[Tensor, Hidden]:
        """Embeddings (rows, target, embedding) -> states (rows, target, embedding) ready for the output layer."""
        joined = []
        for inputs in self.dropout(x).unbind(1):
            state, past = self.step(inputs, source, past)
            joined.append(state)
        out: Tensor = self.dropout(torch.tanh(self.join(torch.stack(joined, dim=1))))
        return out, past
