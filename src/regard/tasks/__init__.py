"""What a run does, one folder or file per task, and the table of them: the only room that knows.

Knows nothing of training loops, searches, servers or pages: they call the task in hand.
"""

from regard.config.run import Config, register_models
from regard.data.vocabulary import Vocabularies
from regard.tasks.classification import ClassificationTask
from regard.tasks.encoder import EmbeddingTask
from regard.tasks.language_model import LanguageModelTask
from regard.tasks.lineup import LineupTask
from regard.tasks.question_answering.task import QuestionAnsweringTask
from regard.tasks.seq2seq import Seq2SeqTask
from regard.tasks.tagging.task import TaggingTask
from regard.tasks.task import Task
from regard.tasks.vision.captioning import CaptioningTask
from regard.tasks.vision.classification import ImageClassificationTask

TASKS: dict[str, type[Task]] = {
    "rnn": Seq2SeqTask,
    "transformer": Seq2SeqTask,
    "language model": LanguageModelTask,
    "encoder": EmbeddingTask,
    "classifier": ClassificationTask,
    "reader": QuestionAnsweringTask,
    "tagger": TaggingTask,
    "lineup": LineupTask,
    "captioner": CaptioningTask,
    "image classifier": ImageClassificationTask,
}
"""By `model.kind`."""


def find_task(config: Config) -> type[Task]:
    """What a run of these settings does."""
    return TASKS[config.model.kind]


def make_task(config: Config, vocabularies: Vocabularies) -> Task:
    """The task of a run."""
    return find_task(config)(config, vocabularies)


def register(task: type[Task]) -> None:
    """Add a task, of this package or another, with the kinds of models it serves."""
    register_models(*task.kinds)
    for settings in task.kinds:
        TASKS.update(dict.fromkeys(settings.model_fields["kind"].annotation.__args__, task))  # type: ignore[union-attr]
