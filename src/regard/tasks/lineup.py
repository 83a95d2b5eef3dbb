"""The line-up game: every position looks at all players, and what it says depends on what the others say, or not.

Softmax lets every position choose for itself, so that a star stands at two of them; a matching does not (G7).
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from regard.attention.equation import KeyValues
from regard.attention.matching import best_matching
from regard.attention.scores import scaled_dot
from regard.config.model import ModelConfig
from regard.config.run import Config
from regard.config.structure import LineupConfig
from regard.data.batching import Batch, pad_sources
from regard.data.encoding import Encoded, reject_surrogates
from regard.data.examples import Dropped, Example, Source
from regard.data.vocabulary import PAD, SPECIAL
from regard.errors import ConfigError, InputError
from regard.nn.attention import CROSS, Attention, Cosine, SeparateProjections, choose_normalizer
from regard.nn.loss import Loss, Surprise, Trainable
from regard.tasks.axes import Piece, Tokens
from regard.tasks.page import FORMS
from regard.tasks.task import Answer, Answered, Generate, Metric, Task, Token

FIRST = len(SPECIAL)
"""The id of the first player of a game; the others follow."""


class Game(NamedTuple):
    """Who can stand where, by name, with the characters of each name."""

    players: list[Piece]
    positions: list[Piece]


def read_game(text: str, skills: int) -> Game | None:
    """Kim 3 1 | first 2 2: names, each with so many numbers from 0 to 9, players before the bar; None: it is no game,
    or has fewer players than positions."""
    words = [Piece(found.group(), found.start(), found.end()) for found in re.finditer(r"\S+", text)]
    bars = [place for place, word in enumerate(words) if word.text == "|"]
    if len(bars) != 1:
        return None
    sides = words[: bars[0]], words[bars[0] + 1 :]
    for side in sides:
        numbers = [word.text for place, word in enumerate(side) if place % (skills + 1)]
        if len(side) % (skills + 1) or not all(re.fullmatch("[0-9]", number) for number in numbers):
            return None
    game = Game(*(side[:: skills + 1] for side in sides))
    return game if len(game.players) >= len(game.positions) > 0 else None


class Lineup(Trainable):
    """Positions attend to players, by the numbers of both."""

    def __init__(self, config: LineupConfig, vocab: int, bar: int) -> None:
        """`bar` is the id of what stands between players and positions."""
        super().__init__()
        self.skills, self.bar = config.skills, bar
        self.embedding = nn.Embedding(vocab, config.embedding)
        width = config.skills * config.embedding
        projections = SeparateProjections(nn.Linear(width, config.size), nn.Linear(width, config.size), nn.Identity())
        score = Cosine() if config.score == "cosine" else scaled_dot
        own = choose_normalizer(config.normalize, "cross")
        self.attention = Attention(projections, nn.Identity(), axes=CROSS, score=score, **own)

    def read_numbers(self, source: Tensor, begin: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of `count` (batch,) names that stand one after another from `begin` (batch,) on, embedded:
        (batch, name, skills * embedding); and which names there are (batch, name)."""
        names = torch.arange(int(count.max()), device=source.device)
        real = names < count[:, None]
        places = 1 + torch.arange(self.skills, device=source.device) + (self.skills + 1) * names[:, None]
        places = (begin[:, None, None] + places).clamp(max=source.shape[1] - 1).flatten(1)
        vectors: Tensor = self.embedding(source.gather(1, places)).unflatten(1, (-1, self.skills)).flatten(2)
        return vectors, real

    def weights(self, batch: Batch) -> Tensor:
        """How likely every player stands at every position: (batch, position, player)."""
        bar = (batch.source == self.bar).long().argmax(1)
        counts = [tokens // (self.skills + 1) for tokens in (bar, batch.lengths - bar - 2)]  # without bar and <eos>
        players, is_player = self.read_numbers(batch.source, torch.zeros_like(bar), counts[0])
        positions, is_position = self.read_numbers(batch.source, bar + 1, counts[1])
        mask = (is_position[:, :, None] & is_player[:, None])[:, None]
        queries, kv = self.attention.project_query(positions), self.attention.project_kv(players)
        each = torch.eye(players.shape[1], device=players.device).expand(len(players), 1, -1, -1)
        found: Tensor = self.attention(queries, KeyValues(kv.keys, each), mask)  # their sum by weights is the weights
        return found

    def logits(self, batch: Batch) -> Tensor:
        """The logarithms of `weights`; of none, those of the smallest number."""
        weights = self.weights(batch).float()
        return weights.clamp(min=torch.finfo(weights.dtype).tiny).log()

    def nats(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The surprise (batch, position) of the wanted players, and which positions are real."""
        real = batch.answer != PAD
        wanted = (batch.answer - FIRST).clamp(min=0)
        return -self.logits(batch).gather(-1, wanted[..., None])[..., 0] * real, real

    def forward(self, batch: Batch, label_smoothing: float = 0.0) -> Loss:
        """Nothing is smoothed: wrong players are not all alike."""
        nats, real = self.nats(batch)
        return Loss(nats.sum(), nats.detach().sum(), int(real.sum()))

    def surprise(self, batch: Batch) -> Surprise:
        """The negative log-probability of every row's players, each by itself."""
        nats, real = self.nats(batch)
        return Surprise(nats.sum(1), real.sum(1))


def count_doubles(answers: Sequence[Answer], references: Sequence[Sequence[str]]) -> float:
    """How often, in a line-up, a player stands where he cannot, for he stands at another position already."""
    extra = [sum(Counter(answer.text.split()).values()) - len({*answer.text.split()}) for answer in answers]
    return sum(extra) / max(1, len(extra))


class LineupTask(Task):
    """Who stands where."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]] = (LineupConfig,)
    settings: LineupConfig
    verb = "line up"
    metrics: ClassVar[tuple[str | Metric, ...]] = (
        "exact", "accuracy", Metric("doubles", count_doubles, smaller_is_better=True), "perplexity",
    )  # fmt: skip
    form = FORMS["lineup"]

    @classmethod
    def check(cls, config: Config) -> None:
        if config.text.source.kind != "word" or config.text.target is not None:
            raise ConfigError(
                'a model of kind lineup reads words: text.source = { kind = "word" }, and no text.target.'
            )

    @classmethod
    def accept(cls, example: Example, config: Config) -> Example | Dropped:
        assert isinstance(config.model, LineupConfig)
        game = read_game(str(example.source), config.model.skills)
        if game is None:
            return Dropped(f"not players | positions with {config.model.skills} numbers each", example.where)
        names = [player.text for player in game.players]
        chosen = example.target.split()
        if len(chosen) != len(game.positions) or not {*chosen} <= {*names}:
            return Dropped("not one of the players for every position", example.where)
        return reject_surrogates(example)

    def check_source(self, source: Source, where: str) -> None:
        super().check_source(source, where)
        if read_game(str(source), self.settings.skills) is None:
            digits = " ".join("9876543210"[: self.settings.skills])
            raise InputError(
                f"{where} is {str(source)!r:.60}, expected players, a bar and at most as many positions, each a name "
                f"and {self.settings.skills} numbers from 0 to 9, as in: Kim {digits} | first {digits}"
            )

    def game(self, source: Encoded) -> Game:
        """Who plays."""
        found = read_game(source.text, self.settings.skills)
        assert found is not None, source.text
        return found

    def encode_targets(self, examples: Sequence[Example], sources: Sequence[Encoded]) -> list[list[int] | Dropped]:
        found: list[list[int] | Dropped] = []
        for example, source in zip(examples, sources, strict=True):
            names = [player.text for player in self.game(source).players]
            found.append([FIRST + names.index(name) for name in example.target.split()])
        return found

    def build(self) -> Lineup:
        return Lineup(self.settings, self.source.size, self.source.encode_all(["|"])[0].ids[0])

    def answer(self, model: Any, sources: Sequence[Encoded], best: int, generate: Generate) -> Iterator[Answered]:
        """A matching is answered by its best assignment; else every position has whom it likes best."""
        ids, lengths = pad_sources([one.ids for one in sources])
        batch = Batch(ids, lengths, ids, ids).to(next(model.parameters()).device)
        with torch.inference_mode():
            logs = model.logits(batch).cpu()
        for number, source in enumerate(sources):
            players, positions = self.game(source)
            own = logs[number, : len(positions), : len(players)]
            chosen = best_matching(own) if self.settings.normalize == "matching" else own.argmax(-1)
            sure = own.gather(-1, chosen[:, None])[:, 0].tolist()
            pairs = list(zip(chosen.tolist(), sure, strict=True))
            tokens = [Token(players[player].text, logprob, FIRST + player) for player, logprob in pairs]
            lineup = {place.text: token.text for place, token in zip(positions, tokens, strict=True)}
            yield number, [Answer(" ".join(token.text for token in tokens), sum(sure), tokens, {"lineup": lineup})]

    def axes(self, source: Encoded, answer: Answer) -> Tokens:
        players, positions = self.game(source)
        names = [Piece(place.text, 0, 0) for place in positions]  # they are no part of the answer's text
        return {"key": players, "query": names, "input": []}
