"""Where examples come from: the kinds of `[data]`, files and generators."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from regard.config.settings import Count, Paths, Settings, Share


class FileData(Settings):
    """What every file format shares."""

    cutter: ClassVar[str] = "cut_{}"  # the setting that cuts a split from the training data
    obtain: str = ""
    """How a user gets these files; shown when one is missing."""
    cut_valid: Annotated[int, Field(ge=0)] = 0
    """Distinct sources cut from the training data for validation, when no validation files are given."""
    cut_test: Annotated[int, Field(ge=0)] = 0
    """Distinct sources cut from the training data for the test, when no test files are given."""

    def remedy(self, split: str) -> str:
        """The settings that give a split its examples, in words."""
        return f"data.{split} or data.{self.cutter.format(split)}"

    def missing(self) -> list[str]:
        """The splits beside training that neither have files nor are cut from training."""
        own = {split: (split, self.cutter.format(split)) for split in ("valid", "test")}
        return [split for split, names in own.items() if not any(getattr(self, name) for name in names)]


class Sides(Settings):
    """One split of parallel text: line n of the sources belongs to line n of the targets."""

    source: Paths
    """Files of one side."""
    target: Paths
    """Files of the other, as many lines."""


class ParallelData(FileData):
    """Two sides in separate text files, a line a sentence; a name that ends in .gz is gzipped."""

    kind: Literal["parallel"]
    train: Sides
    """Files to learn from."""
    valid: Sides | None = None
    """Files that choose the best weights."""
    test: Sides | None = None
    """Files for the final score."""


class ListedData(FileData):
    """What formats of one file for both sides share."""

    train: Paths
    """Files to learn from."""
    valid: Paths = ()
    """Files that choose the best weights."""
    test: Paths = ()
    """Files for the final score."""


class TextData(ListedData):
    """What formats of one text and its target share."""

    join_bytes: Annotated[int, Field(ge=0)] = 0
    """Long texts of short ones: sources of examples that have the same target are joined, in the order of the file and
    with a line break between them, to at most this many bytes (UTF-8). Splits are cut before that. 0: as they are."""


class TableData(TextData):
    """Both sides in one file: tab- or comma-separated."""

    kind: Literal["tsv", "csv"]
    source: str | Annotated[int, Field(ge=0)] = 0
    """A column: its number from 0 (the file has no header), or its name (the first row is a header)."""
    target: str | Annotated[int, Field(ge=0)] = 1
    """As `source`."""


class JsonData(TextData):
    """A JSON object on every line."""

    kind: Literal["jsonl"]
    source: str = "source"
    """The field that holds the source."""
    target: str = "target"
    """The field that holds the target."""


class LabelledData(TextData):
    """A label, a space or a tab, and the text it belongs to, on every line."""

    kind: Literal["labelled"]


class StoryData(ListedData):
    """bAbI: numbered sentences, among them questions with their answer and supporting facts, separated by tabs. Each
    question becomes an example with the story before it. Files, or tar archives of them."""

    kind: Literal["babi"]
    tasks: tuple[int, ...] = ()
    """Of an archive, the files qa<task>_*; without any, all."""


class SquadData(ListedData):
    """SQuAD's JSON form (KorQuAD has it too): data > paragraphs > context, qas > question, answers > text,
    answer_start."""

    kind: Literal["squad"]


class ColumnsData(ListedData):
    """A word on every line, with its tag and what else is known of it in columns (tabs or spaces between them), and a
    blank line behind every sentence, as in CoNLL-2000 and CoNLL-2003."""

    kind: Literal["columns"]
    word: int = 0
    """The column of the word, from 0; negative ones count from the last."""
    tag: int = -1
    """The column of the tag."""
    features: dict[str, int] = {}  # noqa: RUF012 (nobody changes it)
    """Names of further columns, for feature templates: { pos = 1 }."""


class ConlluData(ListedData):
    """Treebanks of Universal Dependencies (CoNLL-U)."""

    kind: Literal["conllu"]
    tag: str = "upos"
    """The field that is the tag: upos, xpos, deprel, ..."""
    features: tuple[str, ...] = ()
    """Further fields, for feature templates: lemma, xpos, ..."""


class DocumentData(ListedData):
    """Texts to continue: a whole text file is one document; of JSONL, every line holds one."""

    cutter: ClassVar[str] = "{}_share"
    kind: Literal["text"]
    field: str = "text"
    """Of a file that ends in .jsonl (or .jsonl.gz), the field that holds the document."""
    valid_share: Share = 0.0
    """The share at the end of the training text that becomes validation, when no validation files are given."""
    test_share: Share = 0.0
    """As valid_share, for the test; it lies behind the validation."""

    @model_validator(mode="after")
    def cuts_are_shares(self) -> "DocumentData":
        if self.cut_valid or self.cut_test:
            raise ValueError("a text has no sources to cut: use valid_share and test_share, as valid_share = 0.1")
        return self


class CaptionData(ListedData):
    """Images and what is said of each: captions as in Flickr8k (name#number, a tab, the caption), as JSON (COCO's form,
    or Karpathy's), or as CSV. An image may have several captions; all are references for it."""

    kind: Literal["captions"]
    images: Paths
    """Folders or zip archives of the images."""
    captions: Paths = ()
    """Caption files of all splits. Then `train`, `valid` and `test` are lists: the name of an image on every line.
    Without them, they are caption files themselves; dataset.json#val is the split val of one in Karpathy's form."""
    image: str | Annotated[int, Field(ge=0)] = "image"
    """Of CSV: the column of the image's name, by its own name in the header or by its number from 0."""
    caption: str | Annotated[int, Field(ge=0)] = "caption"
    """Of CSV: the column of the caption."""


class GeneratedData(Settings):
    """What every generator shares; the three splits never share a source."""

    examples: Count = 20_000
    """Training examples."""
    valid: Count = 500
    """Validation examples."""
    test: Count = 2000
    """Test examples."""

    def remedy(self, split: str) -> str:
        """The setting that gives a split its examples, in words."""
        return f"data.{split}"

    def missing(self) -> list[str]:
        """A generator makes all splits."""
        return []


class ReverseData(GeneratedData):
    """Toy: a string of letters, and the same string backwards."""

    kind: Literal["reverse"]
    shortest: Count = 1
    """Letters at least."""
    longest: Count = 12
    """Letters at most."""
    letters: Annotated[int, Field(ge=2, le=26)] = 26
    """Different letters."""

    @model_validator(mode="after")
    def shortest_is_not_longer(self) -> "ReverseData":
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} is more than longest {self.longest}")
        return self


class NumbersData(GeneratedData):
    """Number words of a language, and their digits."""

    kind: Literal["numbers"]
    language: str = "de"
    """A language of num2words."""
    digits: Annotated[int, Field(ge=1, le=9)] = 6
    """Numbers have one to this many digits."""


class DatesData(GeneratedData):
    """Dates as people write them, and as ISO 8601."""

    kind: Literal["dates"]
    languages: Annotated[tuple[str, ...], Field(min_length=1)] = ("en", "de", "ko", "fr", "es")
    """Locales of babel."""
    first_year: Annotated[int, Field(ge=1, le=9999)] = 1900
    """The earliest."""
    last_year: Annotated[int, Field(ge=1, le=9999)] = 2099
    """The latest."""

    @model_validator(mode="after")
    def first_year_is_not_later(self) -> "DatesData":
        if self.first_year > self.last_year:
            raise ValueError(f"first_year {self.first_year} is after last_year {self.last_year}")
        return self


class TransduceData(GeneratedData):
    """Arithmetic, from prefix to infix: ( * ( + 15 7 ) 3 ) -> ( 15 + 7 ) * 3 (Kim 2017). Test expressions are also
    deeper than those of training, as many of each depth."""

    kind: Literal["transduce"]
    shallowest: Count = 2
    """Brackets within each other at least."""
    deepest: Count = 4
    """Brackets within each other at most, in training and validation."""
    test_deepest: Count = 6
    """The same in the test."""
    operands: Annotated[int, Field(ge=2)] = 4
    """Expressions in one bracket at most; there are two at least."""
    largest: Annotated[int, Field(ge=1)] = 20
    """Numbers are 0 to this."""
    nested: Share = 0.2
    """How likely an expression in a bracket is itself a bracket, where the depth does not ask for one."""

    @model_validator(mode="after")
    def shallowest_is_not_deeper(self) -> "TransduceData":
        if not self.shallowest <= self.deepest <= self.test_deepest:
            depths = f"shallowest {self.shallowest}, deepest {self.deepest}, test_deepest {self.test_deepest}"
            raise ValueError(f"{depths}: none may be more than the next")
        return self


class ListopsData(GeneratedData):
    """Lists of digits with an operation, within each other, and the digit that they come to (Nangia 2018; as long as in
    Long Range Arena, Tay 2021): [MAX 2 9 [MIN 4 7 ] 0 ] -> 9."""

    kind: Literal["listops"]
    shortest: Count = 500
    """Tokens at least; brackets count."""
    longest: Count = 2000
    """Tokens at most."""
    deepest: Annotated[int, Field(ge=2)] = 10
    """Levels of the tree at most, as its authors count them: the digits of the innermost list are the last."""
    operands: Annotated[int, Field(ge=2)] = 10
    """Digits and lists in one list at most; there are two at least."""
    nested: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """How likely an operand is a list."""

    @model_validator(mode="after")
    def shortest_is_not_longer(self) -> "ListopsData":
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} is more than longest {self.longest}")
        return self


class LineupData(GeneratedData):
    """The line-up game: players with their skills, positions with the skills they wish for -> who stands where, as the
    assignment with the greatest sum of cosines has it. Two positions at least like the same player best."""

    kind: Literal["lineup"]
    fewest: Annotated[int, Field(ge=2)] = 4
    """Positions at least."""
    positions: Annotated[int, Field(ge=2, le=9)] = 9
    """Positions at most."""
    bench: Annotated[int, Field(ge=0, le=8)] = 2
    """Players more than positions, at most."""
    skills: Annotated[int, Field(ge=2)] = 4
    """Numbers from 0 to 9 that a player has, and a position wishes for; 4 and 5 are average."""

    @model_validator(mode="after")
    def fewest_is_not_more(self) -> "LineupData":
        if self.fewest > self.positions:
            raise ValueError(f"fewest {self.fewest} is more than positions {self.positions}")
        return self


class ShapesData(GeneratedData):
    """Scenes of one to three coloured shapes, with captions such as "a red circle above a blue square"; where every
    shape is, is known, so that attention can be scored by pointing."""

    kind: Literal["shapes"]
    pixels: Annotated[int, Field(ge=24, le=1024)] = 64
    """Pixels of a scene on a side."""


class DigitsData(GeneratedData):
    """Scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels."""

    kind: Literal["digits"]
    examples: Annotated[int, Field(ge=1, le=1197)] = 1197
    valid: Annotated[int, Field(ge=1, le=300)] = 300
    test: Annotated[int, Field(ge=1, le=300)] = 300


Files = (
    ParallelData | TableData | JsonData | LabelledData | StoryData | SquadData | ColumnsData | ConlluData | DocumentData
    | CaptionData
)  # fmt: skip
Generated = (
    ReverseData | NumbersData | DatesData | TransduceData | LineupData | ListopsData | ShapesData | DigitsData
)  # fmt: skip
Data = Annotated[Files | Generated, Field(discriminator="kind")]
