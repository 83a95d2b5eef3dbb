"""Files of the other tasks: what is read, and what is said when they are not as they should be."""

import io
import json
import random
import tarfile

import pytest

from regard.config.data import DocumentData, LabelledData, SquadData, StoryData
from regard.config.run import Config
from regard.config.text import Tokenization
from regard.config.toml import read
from regard.data.examples import Ledger, Question
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.errors import ConfigError, DataError
from regard.tasks import make_task
from regard.training.prepare import find_doubts, prepare, read_examples

MODELS = {"labelled": "classifier", "babi": "reader", "squad": "reader", "text": "language model"}
"""What reads each of these kinds of data."""


def put(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return (str(path),)


def read_files(settings):
    """The splits of files, as the task that they are for takes them."""
    text = {"target": {"kind": "label"}} if settings.kind == "labelled" else {}
    return read_examples(
        Config.model_validate({"data": settings, "model": {"kind": MODELS[settings.kind]}, "text": text})
    )


def examples(settings):
    return [(example.source, example.target) for example in read_files(settings).train]


# --- labels ----------------------------------------------------------------------------------------------------------


def test_lines_of_a_label_and_a_text(tmp_path):
    train = put(tmp_path / "t", b"\xef\xbb\xbf1 Who is it ?\r\n0\tWhat a\tday\r\nalone\n\xff x\n2  wide\n\n")
    splits = read_files(LabelledData(kind="labelled", train=train))
    assert [(e.source, e.target) for e in splits.train] == [("Who is it ?", "1"), ("What a\tday", "0"), (" wide", "2")]
    assert {reason: len(places) for reason, places in splits.ledgers["train"].dropped.items()} == {
        "empty": 1,
        "undecodable": 1,
    }


def test_a_line_without_a_label_is_dropped(tmp_path):
    """Its first word is not one."""
    splits = read_files(
        LabelledData(kind="labelled", train=put(tmp_path / "t", "1 a b\n\tgood film\n bad film\n0 c\n"))
    )
    assert [(e.source, e.target) for e in splits.train] == [("a b", "1"), ("c", "0")]
    assert splits.ledgers["train"].dropped == {"empty": [f"{tmp_path}/t:2", f"{tmp_path}/t:3"]}


def test_one_label_is_nothing_to_tell_apart(tmp_path):
    put(tmp_path / "t", "".join(f"good number {n}\n" for n in range(2000)))
    config = read("trec", [f'data.train=["{tmp_path / "t"}"]', "text.raw=[]"])
    with pytest.raises(DataError, match=r"all 1,200 training examples have the label 'good': .* at least two labels"):
        prepare(config)


def test_a_label_of_the_validation_that_training_never_saw(tmp_path):
    """It is said before training, not by the first validation, or behind the last."""
    train = put(tmp_path / "t", "good a\nbad b\n" * 10)
    valid = put(tmp_path / "v", "good a\n" * 1500 + "fine c\n" + "bad b\n" * 1500)
    files = [f"data.train={json.dumps(train)}", f"data.valid={json.dumps(valid)}"]
    config = read("trec", [*files, "data.cut_test=0", "text.raw=[]"])
    with pytest.raises(DataError, match=r"v:1501 has the label 'fine', which training never saw\. Known: bad, good\."):
        prepare(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["text.target.kind=char"], r'a model of kind classifier needs text\.target = \{ kind = "label" \}'),
        (["model.kind=rnn"], "a model of kind rnn has no labels: change text.target"),
    ],
)
def test_settings_that_do_not_fit_each_other(changes, message, monkeypatch):
    monkeypatch.setenv("REGARD_DATA", "/nowhere")
    with pytest.raises(ConfigError, match=message):
        read("trec", changes, lambda text: None)


# --- stories ---------------------------------------------------------------------------------------------------------

STORY = """1 Mary went home.
2 John left.
3 Where is Mary? \thome\t1
4 Mary went out.
5 Where is Mary?\tout\t4
1 Ann sat.
2 Who sat?\tAnn,Bob\t1
"""


def test_a_question_has_the_story_before_it(tmp_path):
    found = examples(StoryData(kind="babi", train=put(tmp_path / "qa1_train.txt", STORY)))
    assert found == [
        (Question("Where is Mary?", "Mary went home. John left."), "home"),
        (Question("Where is Mary?", "Mary went home. John left. Mary went out."), "out"),
        (Question("Who sat?", "Ann sat."), "Ann,Bob"),
    ]


def test_training_files_of_an_archive_by_task(tmp_path):
    path = tmp_path / "babi.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("qa2_b_train.txt", "qa1_a_train.txt", "qa1_a_test.txt", "../qa3_c_train.1k.txt", "README.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = len(STORY)
            archive.addfile(entry, io.BytesIO(STORY.replace("home", name[2:4] + "xx").encode()))
    settings = StoryData(kind="babi", train=(str(path),))
    assert [target for _, target in examples(settings)[::3]] == ["1_xx", "2_xx", "/qxx"]
    assert [target for _, target in examples(settings.model_copy(update={"tasks": (2,)}))] == ["2_xx", "out", "Ann,Bob"]
    assert sorted(tmp_path.iterdir()) == [path]  # nothing was unpacked


def test_an_archive_that_ends_too_soon(tmp_path):
    path = tmp_path / "babi.tar"
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo("qa1_a_train.txt")
        entry.size = 5000
        archive.addfile(entry, io.BytesIO(b"1 Mary went home.\n" * 500))
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(DataError, match=r"babi\.tar is a damaged archive: .*\. Get it again\."):
        read_files(StoryData(kind="babi", train=(str(path),)))


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: raw[:-9000] + b"xyz" + raw[-8997:]])
def test_a_packed_archive_that_is_damaged(tmp_path, damage):
    path = tmp_path / "babi.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        for name in ("qa1_a_train.txt", "qa2_b_train.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = 90_000
            archive.addfile(entry, io.BytesIO(random.Random(name).randbytes(90_000)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"babi\.tar\.xz is a damaged archive: .*\. Get it again\."):
        read_files(StoryData(kind="babi", train=(str(path),)))


def test_a_task_of_many_digits_is_none(tmp_path):
    path = tmp_path / "babi.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("qa1_a_train.txt", f"qa{'1' * 5000}_b_train.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = len(STORY)
            archive.addfile(entry, io.BytesIO(STORY.encode()))
    assert len(examples(StoryData(kind="babi", train=(str(path),)))) == 3


def test_what_is_not_a_story(tmp_path):
    train = put(tmp_path / "s", "1 Mary went home.\nWhere is Mary?\thome\t1\n")
    with pytest.raises(DataError, match=r"s:2 does not begin with a number, as every line of bAbI does: 'Where is"):
        read_files(StoryData(kind="babi", train=train))


def test_a_story_with_a_byte_order_mark_and_blank_lines(tmp_path):
    plain = examples(StoryData(kind="babi", train=put(tmp_path / "p", STORY)))
    marked = b"\xef\xbb\xbf" + STORY.replace("\n", "\r\n").replace("1 Ann", "\r\n1 Ann").encode() + b"\r\n \n"
    splits = read_files(StoryData(kind="babi", train=put(tmp_path / "s", marked)))
    assert [(example.source, example.target) for example in splits.train] == plain
    assert splits.ledgers["train"].dropped == {"empty": [f"{tmp_path / 's'}:6"]}


@pytest.mark.parametrize("line", [2, 6])
def test_questions_behind_an_undecodable_line_of_a_story_are_dropped(line, tmp_path):
    lines = STORY.encode().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace(b".", b"\xff")
    splits = read_files(StoryData(kind="babi", train=put(tmp_path / "s", b"".join(lines))))
    lost = [3, 5] if line == 2 else [7]
    assert [e.where.rpartition(":")[2] for e in splits.train] == [str(n) for n in (3, 5, 7) if n not in lost]
    assert splits.ledgers["train"].dropped == {
        "undecodable": [f"{tmp_path / 's'}:{line}"],
        "after an undecodable line of its story": [f"{tmp_path / 's'}:{n}" for n in lost],
    }


@pytest.mark.parametrize("answer", ["word", "span"])
def test_a_question_without_a_context_is_dropped_and_said(answer, tmp_path):
    sources = ["who", "who\t", "who\t \n", "who\tann sat"]
    (path,) = put(tmp_path / "q.jsonl", "".join(json.dumps({"source": s, "target": "ann"}) + "\n" for s in sources))
    parts = {
        "data": {"kind": "jsonl", "train": (path,)},
        "model": {"kind": "reader", "answer": answer},
        "text": {"target": {"kind": "label"}} if answer == "word" else {},
    }
    config = Config.model_validate(parts)
    splits = read_examples(config)
    assert [example.source for example in splits.train] == [Question("who", "ann sat")]
    ledger = splits.ledgers["train"]
    assert ledger == Ledger(read=4, kept=1, dropped={"no context": [f"{path}:{line}" for line in (1, 2, 3)]})
    words = Vocabulary.learn(["who sat ann"], Tokenization(kind="word"))
    assert len(make_task(config, Vocabularies(words, words)).encode_examples(splits.train, ledger)) == 1
    assert ledger.kept == 1


# --- SQuAD's form ----------------------------------------------------------------------------------------------------


def squad(**changes):
    answer = {"text": "Bob", "answer_start": 0}
    asked = {"question": "Who\tsees?", "id": "1", "answers": [answer, answer, {"text": "Ada", "answer_start": 9}]}
    paragraph = {"context": "Bob sees Ada.\nSo it is.", "qas": [asked]} | changes
    return {"version": "1.1", "data": [{"title": "x", "paragraphs": [paragraph]}]}


def test_questions_contexts_and_answers(tmp_path):
    settings = SquadData(kind="squad", train=put(tmp_path / "q.json", json.dumps(squad())))
    found = read_files(settings).train
    assert [(e.source, e.target, e.start) for e in found] == [
        (Question("Who sees?", "Bob sees Ada.\nSo it is."), "Bob", 0),
        (Question("Who sees?", "Bob sees Ada.\nSo it is."), "Ada", 9),
    ]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            squad(context=None),
            r"q\.json: data\[0\]\.paragraphs\[0\] has no text in field 'context'. Its fields are context",
        ),
        (squad(qas={}), r"data\[0\]\.paragraphs\[0\] has no list in field 'qas'"),
        (squad(qas=[{"question": "a", "answers": [{}]}]), r"paragraphs\[0\]\.qas\[0\] has no text in field 'text'"),
        (squad(qas=[{"question": "a"}]), r"qas\[0\] has no list in field 'answers'. Its fields are question"),
        ({"data": [3]}, r"data\[0\] has no list in field 'paragraphs'. Its fields are none: it is no object"),
        ({"data": [{"paragraphs": ["x"]}]}, r"data\[0\]\.paragraphs\[0\] is JSON but no object: .* field 'context'"),
        (squad(qas=["x"]), r"paragraphs\[0\]\.qas\[0\] is JSON but no object: .* field 'question'"),
        (squad(qas=[{"question": "a", "answers": [3]}]), r"qas\[0\].* is JSON but no object: .* field 'text'"),
        ([], r"q\.json is JSON but no object"),
    ],
)
def test_a_field_that_is_missing_is_named_with_its_place(tree, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_files(SquadData(kind="squad", train=put(tmp_path / "q.json", json.dumps(tree))))


def test_a_field_that_comes_twice_is_refused(tmp_path):
    text = json.dumps(squad()).replace('"context": ', '"context": "Ada sees Bob.", "context": ')
    with pytest.raises(DataError, match=r"q\.json has the field 'context' twice in one object\. Remove one of them\."):
        read_files(SquadData(kind="squad", train=put(tmp_path / "q.json", text)))


def test_json_that_ends_too_soon(tmp_path):
    with pytest.raises(DataError, match=r"q\.json is not JSON"):
        read_files(SquadData(kind="squad", train=put(tmp_path / "q.json", json.dumps(squad())[:40])))


def test_json_that_is_not_utf_8(tmp_path):
    train = put(tmp_path / "q.json", json.dumps(squad()).encode().replace(b"sees", b"s\xe9es"))
    with pytest.raises(DataError, match=r"q\.json is not UTF-8, as JSON has to be\. Convert it: iconv -f ENCODING"):
        read_files(SquadData(kind="squad", train=train))


def test_half_a_character_is_in_the_ledger(tmp_path):
    tree = squad()
    tree["data"][0]["paragraphs"].append(squad(context="Bob sees\ud800")["data"][0]["paragraphs"][0])
    splits = read_files(SquadData(kind="squad", train=put(tmp_path / "q.json", json.dumps(tree))))
    place = f"{tmp_path / 'q.json'}: data[0].paragraphs[1].qas[0]"
    assert splits.ledgers["train"].dropped == {"not valid Unicode": [place, place]}
    assert len(splits.train) == 2


def test_a_question_without_answer_is_in_the_ledger(tmp_path):
    tree = squad()
    tree["data"][0]["paragraphs"][0]["qas"].append({"question": "Why?", "answers": []})
    ledger = read_files(SquadData(kind="squad", train=put(tmp_path / "q.json", json.dumps(tree)))).ledgers["train"]
    assert list(ledger.dropped) == ["no answer"]


# --- documents -------------------------------------------------------------------------------------------------------


def test_doubts_about_texts(tmp_path):
    train = put(tmp_path / "t.txt", "ab ba\n" * 50)
    changes = [f'data.train=["{train[0]}"]', "text.max_length=8"]
    assert find_doubts(prepare(read("shakespeare", changes))) == [
        "there is no test data: set data.test or data.test_share."
    ]
    same = read("shakespeare", [*changes, f'data.valid=["{train[0]}"]', "data.test_share=0.0"])
    assert find_doubts(prepare(same))[0] == "1 of 1 valid sources are in the training data too."


def test_doubts_about_pairs(tmp_path):
    """Lines that occur more than once are counted apart from their surplus copies."""
    train = put(tmp_path / "t", "a\tA\n" * 4 + "b\tB\n" * 2 + "b\tX\nc\tC\nd\tD\n")
    valid, test = put(tmp_path / "v", "a\tA\ne\tE\n"), put(tmp_path / "w", "b\tB\ne\tE\nf\tF\na\tA\n")
    data = f"data={{kind='tsv', train={list(train)}, valid={list(valid)}, test={list(test)}}}"
    assert find_doubts(prepare(read("reverse", [data]))) == [
        "1 of 2 valid sources are in the training data too.",
        "2 of 4 test sources are in the training data too.",
        "2 of 4 test sources are in the validation data too.",
        "2 training examples occur more than once: 4 surplus copies.",
    ]


def test_a_text_file_is_one_document(tmp_path):
    train = put(tmp_path / "t.txt", b"\xef\xbb\xbfOne.\r\n\r\nTwo.\xff\nThree.")
    splits = read_files(DocumentData(kind="text", train=train))
    assert [e.target for e in splits.train] == ["One.\n\nThree.\n"]
    assert splits.ledgers["train"].dropped == {"undecodable": [f"{train[0]}:3"]}


def test_documents_of_json_lines_that_are_no_documents(tmp_path):
    lines = [b'{"text": "a"}', b"", rb'{"text": "x\ud800"}', b"\xff", b'{"text": "b"}', b" ", b""]
    train = put(tmp_path / "t.jsonl", b"\n".join(lines))
    splits = read_files(DocumentData(kind="text", train=train))
    assert [e.target for e in splits.train] == ["a", "b"]
    assert splits.ledgers["train"].dropped == {
        "empty": [f"{train[0]}:2"],
        "not valid Unicode": [f"{train[0]}:3"],
        "undecodable": [f"{train[0]}:4"],
    }


@pytest.mark.parametrize(("share", "counts"), [(0.1, [8, 1, 1]), (0.25, [5, 3, 3])])
def test_ledgers_of_shared_documents_add_up(share, counts, tmp_path):
    lines = "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(10))
    train = put(tmp_path / "t.jsonl", lines + "\n\n" + json.dumps({"text": " "}) + "\n")
    splits = read_files(DocumentData(kind="text", train=train, valid_share=share, test_share=share))
    assert [len(part) for part in splits[:3]] == counts
    assert [ledger.kept for ledger in splits.ledgers.values()] == counts
    for ledger in splits.ledgers.values():
        assert ledger.read == ledger.kept + sum(map(len, ledger.dropped.values()))
    whole = "".join(example.target for part in splits[:3] for example in part)
    assert whole == "".join(f"text {n}" for n in range(10))  # in their order, train, validation, test


def test_unknown_words_are_counted_on_both_sides(tmp_path):
    (tmp_path / "t.tsv").write_text("a b\tx y\na b\tx z\na c\tx x\n")
    words = 'text={source={kind="word",min_count=2},target={kind="word",min_count=2}}'
    found = find_doubts(prepare(read("reverse", [f"data={{kind='tsv', train='{tmp_path / 't.tsv'}'}}", words])))
    assert "3 training tokens are <unk>: their words are rarer than min_count." in found  # c, y, z
