"""Self-critical training: learn from CIDEr-D itself, which no gradient reaches.

A caption that was sampled is made likelier if it scores better than what the model would say otherwise, and less likely
if it scores worse: than its greedy caption (Rennie 2017), or than the mean of the other samples of the same image (Luo
2020), which varies less.
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

    def judge(self, model: Any, rows: Sequence[Row], samples: int = 1) -> Batch:
        """As many captions as there are rows (or a few less), which the model samples now: `samples` of each of the
        rows' first images, with how much better each is than expected: than the other samples of its image, or than the
        model's greedy caption if there is one sample."""
        found = list({get_image(row.source): row.source for row in rows}.items())[: max(1, len(rows) // samples)]
        device = next(model.parameters()).device
        source, lengths = (part.to(device) for part in pad_sources([picture for _, picture in found]))
        model.eval()
        longest = max(self.longest[image] for image, _ in found)
        best, drawn = write_captions(model, source, lengths, longest, samples, greedy=samples == 1)
        model.train()
        images = [image for image, _ in found for _ in range(samples)]
        scores = self.score(drawn, images).view(-1, samples)
        if samples == 1:
            rewards = scores - self.score(best, images)[:, None]
        else:
            rewards = (scores - scores.mean(1, keepdim=True)) * (samples / (samples - 1))
        answers = [[*ids, EOS][:longest] for ids in drawn]  # one that was cut has drawn no <eos>
        source, lengths = (part.repeat_interleave(samples, dim=0) for part in (source, lengths))
        return Batch(source, lengths, pad([[BOS, *ids[:-1]] for ids in answers]), pad(answers), rewards.flatten())


@torch.no_grad()
def write_captions(
    model: Steppable, source: Tensor, lengths: Tensor, longest: int, samples: int, *, greedy: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy captions, if they are asked for, and so many sampled ones of every image, without <eos>, of at most
    `longest` tokens: all hypotheses of an image are written together, until all have ended. The noise is that of
    torch's generator."""
    state = model.start(source, lengths)
    tokens, each = torch.full_like(lengths, BOS), samples + greedy
    rows = torch.arange(each * len(lengths), device=lengths.device)  # of the hypotheses that are still written
    written: list[list[int]] = [[] for _ in rows]
    for step in range(longest):
        logprobs, state = model.step(tokens, state)
        logprobs[:, UNSAID] = -torch.inf
        if step == 0:
            state, logprobs = State(state.source, select_rows(state.cache, rows // each)), logprobs[rows // each]
        tokens = draw(logprobs)
        if greedy:
            tokens[::each] = logprobs[::each].argmax(-1)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            written[row].append(token)
        going = torch.tensor([EOS not in written[row] for row in rows.tolist()], device=rows.device)
        images = going.view(-1, each).any(1).nonzero()[:, 0]
        if not len(images):
            break
        if 2 * each * len(images) < len(rows):
            chosen = (each * images[:, None] + torch.arange(each, device=rows.device)).flatten()
            state = State(select_rows(state.source, images), select_rows(state.cache, chosen))
            rows, tokens = rows[chosen], tokens[chosen]
    captions = [row[: row.index(EOS)] if EOS in row else row for row in written]
    best = captions[::each] if greedy else []
    return best, [row for number, row in enumerate(captions) if not greedy or number % each]


def draw(logprobs: Tensor) -> Tensor:
    """A token (n,) for every row (n, vocab), as often as it is likely: one random number a row says where in the sum of
    all probabilities it lies."""
    sums = logprobs.softmax(-1).double().cumsum(-1)
    places = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, places, right=True)[:, 0].clamp(max=logprobs.shape[-1] - 1)
