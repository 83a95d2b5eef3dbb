"""A predictor that says what it is told, for tests of what is around a model."""

from collections.abc import Callable, Iterator, Sequence

from models import build
from random_runs import read

from regard.data.encoding import Encoded
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.inference.beam_search import Found
from regard.inference.engine import Request
from regard.inference.predictor import Predictor
from regard.nn.state import Hypothesis
from regard.tasks import make_task
from regard.tasks.task import Task

Say = Callable[[str], Sequence[str]]
"""A source's text -> the answers to it, best first."""


class Saying:
    """An engine that says what it is told, and remembers what it was asked."""

    def __init__(self, task: Task, say: Say) -> None:
        self.task, self.say = task, say
        self.asked: list[tuple[list[str], Request]] = []

    def generate(self, sources: Sequence[Encoded], request: Request) -> Iterator[Found]:
        self.asked.append(([source.text for source in sources], request))
        for place, source in enumerate(sources):
            begin = list(request.prefixes[place]) if request.prefixes else []
            texts = enumerate(self.say(source.text)[: request.best])
            ids = [(rank, [*begin, *self.task.target.encode(text).ids]) for rank, text in texts]
            yield place, [Hypothesis(tokens, -1.0 - rank, None) for rank, tokens in ids]


def saying(say: Say = lambda text: [text], *changes: str) -> Predictor:
    """A predictor of texts of small letters, white space and a full stop; by default, each is its own answer."""
    sizes = ("model.size=8", "model.feedforward=8", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=1")
    config = read("transformer", "text.source.normalize=none", *sizes, *changes)
    letters = Vocabulary.learn(["abcdefghijklmnopqrstuvwxyz .\t\n"], config.text.source)
    task = make_task(config, Vocabularies(letters, letters))
    return Predictor(task, build(config, letters), Saying(task, say))
