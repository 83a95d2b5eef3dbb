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
from regard.data.vocabulary import BOS, EOS, Vocabulary
from regard.nn.state import State, Steppable, select_rows
from regard.tasks.vision.caption_metrics import Weighed, compare_captions, count_documents, weigh_caption
from regard.tasks.vision.images import get_image
from regard.tasks.vision.model import UNSAID


class Critic:
    """Rewards captions by the references of their images."""

    def __init__(self, rows: Sequence[Row], vocabulary: Vocabulary) -> None:
        """Rows have an image and one of its references each."""
        self.vocabulary = vocabulary
        self.longest: dict[Image, int] = {}
        """Tokens of an image's longest reference, with <eos>: of a batch, no caption that is sampled has more."""
        self.references: dict[Image, list[str]] = {}
        for row in rows:
            image = get_image(row.source)
            self.references.setdefault(image, []).append(vocabulary.decode(row.target))
            self.longest[image] = max(self.longest.get(image, 0), len(row.target) + 1)
        self.frequencies = count_documents(list(self.references.values()))
        self.weighed: dict[Image, list[Weighed]] = {}
        """References as they are compared, of images that have been seen."""

    def score(self, captions: Sequence[Sequence[int]], images: Sequence[Image]) -> Tensor:
        """CIDEr-D (n,) of captions of images."""
        scores = []
        for ids, image in zip(captions, images, strict=True):
            if image not in self.weighed:
                self.weighed[image] = [weigh_caption(text, self.frequencies) for text in self.references[image]]
            caption = weigh_caption(self.vocabulary.decode(ids), self.frequencies)
            scores.append(compare_captions(caption, self.weighed[image]))
        return torch.tensor(scores)

    def judge(self, model: Any, rows: Sequence[Row]) -> Batch:
        """The images of rows with captions that the model samples now, each with how much better it is than the one
        that the model would give."""
        images = [get_image(row.source) for row in rows]
        device = next(model.parameters()).device
        source, lengths = (part.to(device) for part in pad_sources([row.source for row in rows]))
        model.eval()
        longest = max(self.longest[image] for image in images)
        best, drawn = write_both(model, source, lengths, longest)
        model.train()
        rewards = self.score(drawn, images) - self.score(best, images)
        answers = [[*ids, EOS][:longest] for ids in drawn]  # one that was cut has drawn no <eos>
        return Batch(source, lengths, pad([[BOS, *ids[:-1]] for ids in answers]), pad(answers), rewards)


@torch.no_grad()
def write_both(model: Steppable, source: Tensor, lengths: Tensor, longest: int) -> tuple[list[list[int]], ...]:
    """Greedy captions and sampled ones, without <eos>, of at most `longest` tokens: two hypotheses of every image are
    written together, until both have ended. The noise is that of torch's generator."""
    state = model.start(source, lengths)
    tokens = torch.full_like(lengths, BOS)
    rows = torch.arange(2 * len(lengths), device=lengths.device)  # of the hypotheses that are still written
    written: list[list[int]] = [[] for _ in rows]
    for step in range(longest):
        logprobs, state = model.step(tokens, state)
        logprobs[:, UNSAID] = -torch.inf
        if step == 0:
            state, logprobs = State(state.source, select_rows(state.cache, rows // 2)), logprobs[rows // 2]
        tokens = logprobs.argmax(-1)
        tokens[1::2] = draw(logprobs[1::2])
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            written[row].append(token)
        going = torch.tensor([EOS not in written[row] for row in rows.tolist()], device=rows.device)
        pairs = (going[::2] | going[1::2]).nonzero()[:, 0]
        if not len(pairs):
            break
        if len(pairs) < len(rows) // 2:
            chosen = (2 * pairs[:, None] + torch.arange(2, device=rows.device)).flatten()
            state = State(select_rows(state.source, pairs), select_rows(state.cache, chosen))
            rows, tokens = rows[chosen], tokens[chosen]
    captions = [row[: row.index(EOS)] if EOS in row else row for row in written]
    return captions[::2], captions[1::2]


def draw(logprobs: Tensor) -> Tensor:
    """A token (n,) for every row (n, vocab), as often as it is likely: one random number a row says where in the sum of
    all probabilities it lies."""
    sums = logprobs.softmax(-1).double().cumsum(-1)
    places = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, places, right=True)[:, 0].clamp(max=logprobs.shape[-1] - 1)
