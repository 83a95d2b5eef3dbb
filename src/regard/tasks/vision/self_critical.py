"""Self-critical training (Rennie 2017): learn from CIDEr-D itself, which no gradient reaches.

A caption that was sampled is made likelier if it scores better than the one that the model would give, and less likely
if it scores worse.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.data.batching import Batch, Row, pad, pad_sources
from regard.data.examples import Image
from regard.data.vocabulary import BOS, EOS, PAD, Vocabulary
from regard.nn.state import State, Steppable, select_rows
from regard.tasks.vision.caption_metrics import count_documents, score_cider
from regard.tasks.vision.images import get_image

NEVER = (PAD, BOS)
"""What no caption may hold, as in any search."""


class Critic:
    """Rewards captions by the references of their images."""

    def __init__(self, rows: Sequence[Row], vocabulary: Vocabulary, longest: int) -> None:
        """Rows have an image and one of its references each; captions have at most `longest` tokens."""
        self.vocabulary, self.longest = vocabulary, longest
        self.references: dict[Image, list[str]] = {}
        for row in rows:
            self.references.setdefault(get_image(row.source), []).append(vocabulary.decode(row.target))
        self.frequencies = count_documents(list(self.references.values()))

    def score(self, captions: Sequence[Sequence[int]], images: Sequence[Image]) -> Tensor:
        """CIDEr-D (n,) of captions of images."""
        texts = [self.vocabulary.decode(ids) for ids in captions]
        return torch.tensor(score_cider(texts, [self.references[image] for image in images], self.frequencies).each)

    def judge(self, model: Any, rows: Sequence[Row]) -> Batch:
        """The images of rows with captions that the model samples now, each with how much better it is than the one
        that the model would give."""
        images = [get_image(row.source) for row in rows]
        device = next(model.parameters()).device
        source, lengths = (part.to(device) for part in pad_sources([row.source for row in rows]))
        model.eval()
        best, drawn = write_both(model, source, lengths, self.longest)
        model.train()
        rewards = self.score(drawn, images) - self.score(best, images)
        target, answer = pad([[BOS, *ids] for ids in drawn]), pad([[*ids, EOS] for ids in drawn])
        return Batch(source, lengths, target, answer, rewards)


@torch.no_grad()
def write_both(model: Steppable, source: Tensor, lengths: Tensor, longest: int) -> tuple[list[list[int]], ...]:
    """Greedy captions and sampled ones, without <eos>, of at most `longest` tokens: two hypotheses of every image are
    written together. The noise is that of torch's generator."""
    state = model.start(source, lengths)
    tokens = torch.full_like(lengths, BOS)
    written: list[Tensor] = []
    for step in range(longest):
        logprobs, state = model.step(tokens, state)
        logprobs[:, NEVER] = -torch.inf
        if step == 0:
            twice = torch.arange(len(lengths), device=lengths.device).repeat_interleave(2)
            state, logprobs = State(state.source, select_rows(state.cache, twice)), logprobs[twice]
        noise = -torch.empty_like(logprobs).exponential_().log()  # Gumbel's: the largest sum is a draw
        noise[::2] = 0.0
        tokens = (logprobs + noise).argmax(-1)
        written.append(tokens)
        if bool((torch.stack(written) == EOS).any(0).all()):
            break
    rows = [[*row, EOS] for row in torch.stack(written, dim=1).tolist()]
    captions = [row[: row.index(EOS)] for row in rows]
    return captions[::2], captions[1::2]
