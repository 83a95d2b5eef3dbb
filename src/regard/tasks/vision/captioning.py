"""Captions: an image in, a sentence out, and for every word where the model looked."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from regard.config.model import ModelConfig
from regard.config.run import Config, DecodeConfig
from regard.config.vision import CaptionerConfig
from regard.data.batching import Batch, Row, draw_updates
from regard.data.encoding import Encoded
from regard.data.examples import Example
from regard.data.vocabulary import BOS, EOS, SPECIAL, Vocabularies, Vocabulary
from regard.tasks.axes import Piece, Tokens, written_pieces
from regard.tasks.generation import GenerationTask
from regard.tasks.page import FORMS
from regard.tasks.task import Answer, Answered, Embedded, Generate, Metric
from regard.tasks.vision.images import ImageTask, get_image
from regard.tasks.vision.model import Captioner, RecurrentCaptioner, TransformerCaptioner
from regard.tasks.vision.pointing import point, score_pointing
from regard.tasks.vision.self_critical import Critic


class CaptioningTask(ImageTask, GenerationTask):
    """A sentence about an image."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]] = (CaptionerConfig,)
    settings: CaptionerConfig
    verb = "caption"
    metrics: ClassVar[tuple[str | Metric, ...]] = (
        *("bleu4", "bleu3", "bleu2", "bleu1", "cider", "coco_rougel"),
        *("exact", "error", "accuracy", "wer", "perplexity", "bleu", "chrf", "ter"),
        Metric("pointing", score_pointing),
    )
    form = FORMS["captioning"]

    @classmethod
    def learn_vocabularies(cls, config: Config, examples: Sequence[Example], raw: Sequence[str]) -> Vocabularies:
        """Only captions have words: one vocabulary serves both sides."""
        targets = [example.target for example in examples]
        words = Vocabulary.learn([*targets, *raw], config.text.target or config.text.source)
        return Vocabularies(words, words)

    def build(self) -> Captioner:
        if self.settings.decoder == "rnn":
            return RecurrentCaptioner(self.settings, self.target.size)
        return TransformerCaptioner(self.settings, self.target.size, self.config.text.max_length + 2)

    def freeze(self, model: Any) -> None:
        super().freeze(model)
        self.learner = model

    def batches(self, rows: Sequence[Row], start: int) -> Iterator[list[Batch]]:
        """The last updates may be of captions that the model samples when it is asked for them."""
        updates, critical = super().batches(rows, start), self.settings.self_critical_steps
        if not critical:
            return updates
        assert self.config.train.steps is not None
        first = max(start, self.config.train.steps - critical)
        critic, samples = Critic(rows, self.target), self.settings.self_critical_samples
        sampled = draw_updates(rows, self.config.train, first)
        return itertools.chain(
            itertools.islice(updates, first - start),
            ([critic.judge(self.learner, batch, samples) for batch in update] for update in sampled),
        )

    def embeddings(self, model: Any) -> list[Embedded]:
        return [Embedded("target", model.target_embedding, self.target, self.settings.target_vectors, False)]

    def output_limit(self, length: int, settings: DecodeConfig) -> int | None:
        return self.config.text.max_length

    def answer(self, model: Any, sources: Sequence[Encoded], best: int, generate: Generate) -> Iterator[Answered]:
        """What is found for images of which it is known what is where comes last, with how well their words point."""
        pointed = []
        for one in super().answer(model, sources, best, generate):
            if one and self.attends and get_image(sources[one[0]].ids).boxes:
                pointed.append(one)
            else:
                yield one
        yield from self.point_all(model, sources, pointed)

    @property
    def attends(self) -> bool:
        """Whether words look at the grid."""
        return self.settings.decoder == "transformer" or self.settings.spatial_attention != "none"

    def point_all(
        self, model: Any, sources: Sequence[Encoded], found: Sequence[tuple[int, list[Answer]]]
    ) -> Iterator[tuple[int, list[Answer]]]:
        """The same answers; the best of each says which of its words looked where they should, by the mean of all heads
        of all attentions."""
        if not found:
            return
        outputs = [[token.id for token in answers[0].tokens[:-1]] for _, answers in found]
        batch = self.replay_all([sources[place] for place, _ in found], outputs)
        with torch.inference_mode():
            maps = model.follow(batch.to(next(model.parameters()).device))[1]
        mean = torch.cat(maps, dim=1).mean(1).cpu()
        for (place, answers), weights in zip(found, mean, strict=True):
            best, boxes = answers[0], get_image(sources[place].ids).boxes
            hits = point(best.text, self.spell(best), boxes, weights, self.grid)
            yield place, [best._replace(details={**best.details, "pointing": hits}), *answers[1:]]

    def spell(self, answer: Answer) -> list[Piece]:
        """The characters that each token of a caption brought."""
        return written_pieces(self.target, [token.id for token in answer.tokens[:-1]], answer.text)

    def axes(self, source: Encoded, answer: Answer) -> Tokens:
        queries = self.spell(answer)
        end = Piece(SPECIAL[EOS], len(answer.text), len(answer.text))
        return {**self.cells(), "query": [*queries, end], "input": [Piece(SPECIAL[BOS], 0, 0), *queries]}
