"""Text -> ids -> text: nothing is lost that need not be, and nothing turns into a special token."""

import functools
import itertools
import json
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from regard.config.text import Tokenization
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL, UNK, Vocabulary, clean, joins, pipeline, settle_scores
from regard.errors import ConfigError, DataError, RunError

KINDS = ("char", "byte", "word", "bpe", "unigram")
LOSSLESS = ("byte", "bpe", "unigram")
TEXT = [
    "a man rides a horse",
    "ein Hund läuft über die Straße",
    "the words <eos> and <pad> and <unk> <bos> are words <eos>",
    "남자가 말을 타고 있다",
    "  two  spaces, a\ttab and\na new line  ",
    "😀 👩‍👩‍👧 e\u0301 \x00",
] * 3
SYLLABLES = "".join(chr(0xAC00 + (n % 19 * 21 + n % 21) * 28 + n) for n in range(28))  # every jamo at least once
OLD = unicodedata.ucd_3_2_0  # what later editions of Unicode assign is normalized by newer libraries only
KNOWN = "".join(letter for letter in map(chr, range(0x30000)) if OLD.category(letter) not in ("Cn", "Co", "Cs"))


@functools.cache
def learned(**choices) -> Vocabulary:
    """A vocabulary of TEXT; not normalized unless asked for."""
    return Vocabulary.learn(TEXT, Tokenization(**{"size": 400, "normalize": "none", **choices}))


@functools.cache
def korean(kind: str) -> Vocabulary:
    """A vocabulary of jamo."""
    return Vocabulary.learn([SYLLABLES], Tokenization(kind=kind, jamo=True, size=300))


def again(vocabulary: Vocabulary, text: str) -> str:
    """Text -> ids -> text."""
    return vocabulary.decode(vocabulary.encode(text).ids)


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSLESS)
@settings(deadline=None, max_examples=100)
@given(st.text())
@example("")
@example(" ")
@example("  two  spaces  ")
@example("\n a\r\n\n")
@example("\x00\x1f\x7f\u2028\ufeff")
@example("👩‍👩‍👧 \U0010ffff")
@example("Ġ▁<unk>")
def test_nothing_is_lost(kind, text):
    vocabulary = learned(kind=kind)
    ids = vocabulary.encode(text).ids
    assert vocabulary.decode(ids) == text
    assert all(EOS < index < vocabulary.size for index in ids)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_nothing_is_lost_after_learning_from_nothing(kind):
    assert again(Vocabulary.learn([], Tokenization(kind=kind, size=300)), " 말 x\n") == " 말 x\n"


@settings(deadline=None, max_examples=50)
@given(st.text("".join(set("".join(TEXT)))))
def test_characters_of_the_alphabet_are_kept(text):
    assert again(learned(kind="char"), text) == text


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(TEXT[0].split() + TEXT[3].split())), st.sampled_from([" ", "\n", " \t "]))
def test_words_are_kept_and_white_space_becomes_a_space(words, space):
    assert again(learned(kind="word"), space.join(["", *words, ""])) == " ".join(words)


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("form", ["nfc", "nfkc"])
@settings(deadline=None, max_examples=50)
@given(st.text(KNOWN))
@example("e\u0301 \ufb01 \u212b ＜ \u1112\u1161\u11ab")
def test_normal_form_is_unicode(kind, form, text):
    assert again(learned(kind=kind, normalize=form), text) == unicodedata.normalize(form.upper(), text)


@pytest.mark.parametrize("kind", ["byte", "bpe", "unigram", "char"])
@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3)))
def test_jamo_come_together_again(kind, text):
    assert again(korean(kind), text) == text


def test_jamo_are_the_alphabet():
    vocabulary = korean("char")
    assert vocabulary.size == len(SPECIAL) + 19 + 21 + 27
    ids, offsets = vocabulary.encode("한국")
    assert [vocabulary.token(index) for index in ids] == list("\u1112\u1161\u11ab\u1100\u116e\u11a8")
    assert offsets == [(0, 1)] * 3 + [(1, 2)] * 3


@settings(deadline=None, max_examples=50)
@given(st.text(KNOWN))
def test_jamo_compose_any_text(text):
    assert again(learned(kind="byte", jamo=True), text) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("kind", KINDS)
def test_lowercase(kind):
    vocabulary = learned(kind=kind, lowercase=True)
    assert again(vocabulary, "EIN Hund läuft ÜBER die") == "ein hund läuft über die"


# --- what is not known -----------------------------------------------------------------------------------------------


def test_rare_words_and_characters_are_unknown():
    words = Vocabulary.learn(["a a b", "a b c"], Tokenization(kind="word", min_count=2))
    assert words.size == len(SPECIAL) + 2
    assert words.encode("c a d b").ids == [UNK, 4, UNK, 5]
    assert again(words, "c a d b") == "<unk> a <unk> b"
    letters = Vocabulary.learn(["aab", "abc"], Tokenization(kind="char", min_count=2))
    assert letters.encode("cadb").ids == [UNK, 4, UNK, 5]
    assert again(letters, "cadb") == "<unk>a<unk>b"


@pytest.mark.parametrize("kind", ["char", "word"])
@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_empty_training_text_is_refused(kind, lines):
    with pytest.raises(DataError) as caught:
        Vocabulary.learn(lines, Tokenization(kind=kind))
    assert str(caught.value) == f"the training text holds nothing to make a vocabulary of kind {kind} from."


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_subwords_that_cannot_hold_the_bytes_are_refused(kind):
    with pytest.raises(ConfigError) as caught:
        Vocabulary.learn(TEXT, Tokenization(kind=kind, size=259))
    assert str(caught.value) == (
        f"a {kind} vocabulary of size 259 cannot be made: the 4 special tokens and all bytes are 260 entries. Set a "
        'size of at least 260, or kind = "char".'
    )
    assert Vocabulary.learn(TEXT, Tokenization(kind="bpe", size=260)).size == 260


def test_settled_scores_say_what_the_library_found():
    """Entries stay, and those of seen text keep their scores to four digits; bytes that were not seen are the least."""
    plain, trainer = pipeline(Tokenization(kind="unigram", size=400))
    plain.train_from_iterator(TEXT, trainer)
    before, after = (dict(json.loads(one.to_str())["model"]["vocab"]) for one in (plain, settle_scores(plain)))
    assert before.keys() == after.keys()
    assert {entry for entry, score in before.items() if abs(score - after[entry]) > 6e-5} <= {*ByteLevel.alphabet()}
    assert sorted(after.values()) == pytest.approx(sorted(before.values()), abs=6e-5)


# --- special tokens --------------------------------------------------------------------------------------------------


def assert_special(vocabulary: Vocabulary) -> None:
    """The first four entries are the special tokens, and every other id is below the size."""
    assert [vocabulary.token(index) for index in (PAD, UNK, BOS, EOS)] == list(SPECIAL)
    assert sorted(vocabulary.tokenizer.get_vocab().values()) == list(range(vocabulary.size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choices", [{}, {"normalize": "nfkc"}, {"lowercase": True}, {"jamo": True}])
@pytest.mark.parametrize("text", [*SPECIAL, "<bos><eos>", "a <pad> man <eos>", " <eos>", "<EOS>", "＜eos＞"])
def test_text_never_becomes_a_special_token(kind, choices, text):
    vocabulary = learned(kind=kind, **choices)
    assert_special(vocabulary)
    ids = vocabulary.encode(text).ids
    assert not {PAD, BOS, EOS} & set(ids)
    if kind in LOSSLESS and not choices:
        assert vocabulary.decode(ids) == text


@pytest.mark.parametrize("word", ["<eos>", "<pad>"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_text_never_takes_the_place_of_a_special_token(kind, word):
    assert_special(Vocabulary.learn([f"{word} a", word], Tokenization(kind=kind, size=300)))


@pytest.mark.parametrize(("word", "choice"), [("<EOS>", {"lowercase": True}), ("＜eos＞", {"normalize": "nfkc"})])
def test_normalized_training_text_never_takes_the_place_of_a_special_token(word, choice):
    assert_special(Vocabulary.learn([f"{word} a", word], Tokenization(kind="word", **choice)))


@pytest.mark.parametrize(
    ("label", "choice"),
    [
        *((word, {}) for word in SPECIAL),
        ("<EOS>", {"lowercase": True}),
        ("＜eos＞", {"normalize": "nfkc"}),
        ("good , <eos>", {"separator": ","}),
    ],
)
def test_a_label_that_spells_a_special_token_is_refused(label, choice):
    with pytest.raises(DataError, match=r"has the label '<(pad|unk|bos|eos)>', but <pad> .*: give it another name\."):
        Vocabulary.learn(["good", "bad", label], Tokenization(kind="label", **choice))
    assert Vocabulary.learn(["<eos> or not", "EOS"], Tokenization(kind="label", **choice)).size == len(SPECIAL) + 2


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_say_nothing(kind):
    vocabulary = learned(kind=kind)
    ids = vocabulary.encode("a man").ids
    assert vocabulary.decode([BOS, *ids, EOS, PAD, PAD]) == "a man"
    assert vocabulary.decode([]) == ""


# --- lone surrogates -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.text("a 한😀\ufeff\udc00\udc80\udfff"))
@example("\ud800")
@example("\ud800x")
@example("\ud800\ud800")
@example("a\udfff\ud800")
def test_lone_surrogate_becomes_the_replacement_character(text):
    wanted = re.sub("[\ud800-\udfff]", "\ufffd", text)
    assert clean(text) == wanted
    assert again(learned(kind="byte"), text) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_lone_surrogates(kind):
    settings = Tokenization(kind=kind, size=300)
    vocabulary = Vocabulary.learn(["a \ud800 b", "a \udfff"], settings)
    assert again(vocabulary, "a \ud801") == "a \ufffd"


# --- offsets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=100)
@given(st.text() | st.lists(st.sampled_from([*TEXT, " ", "\n", "<eos>"])).map(" ".join))
@example("  two  spaces  ")
@example("한 👩‍👩‍👧")
def test_offsets_lie_in_the_text_and_never_go_back(kind, text):
    ids, offsets = learned(kind=kind).encode(text)
    assert len(ids) == len(offsets)
    assert all(0 <= start <= end <= len(text) for start, end in offsets)
    assert all(start < end for start, end in offsets[1:])  # the space put before a first word came from nowhere
    assert all(a <= c and b <= d for (a, b), (c, d) in itertools.pairwise(offsets))
    if kind in ("byte", "char"):
        assert [at for at in range(len(text)) if not any(a <= at < b for a, b in offsets)] == []
    if kind == "char":
        assert offsets == [(at, at + 1) for at in range(len(text))]
    if kind == "byte":
        assert len(ids) == len(text.encode())


def test_offsets_of_words_are_the_words():
    text = "  a man \n rides 😀 a  horse "
    assert [text[a:b] for a, b in learned(kind="word").encode(text).offsets] == text.split()


def test_offsets_end_behind_decomposed_letters():
    text = unicodedata.normalize("NFD", "철수 likes Zoé")
    offsets = learned(kind="word", normalize="nfc").encode(text).offsets
    assert [text[a:b] for a, b in offsets] == text.split()


DECOMPOSED = st.text("철수각ée\u0301\u0316x\u030c カガ한ǖ.\n").map(functools.partial(unicodedata.normalize, "NFD"))


@pytest.mark.parametrize("jamo", [False, True])
@pytest.mark.parametrize("form", ["nfc", "nfkc"])
@pytest.mark.parametrize("kind", ["char", "byte", "word", "bpe", "unigram"])
@settings(deadline=None, max_examples=50)
@given(DECOMPOSED)
@example(unicodedata.normalize("NFD", "철수"))
@example("a\u0316\u0301b")
def test_offsets_of_decomposed_text_cover_it(kind, form, jamo, text):
    offsets = learned(kind=kind, normalize=form, jamo=jamo).encode(text).offsets
    missed = [text[at] for at in range(len(text)) if not any(a <= at < b for a, b in offsets)]
    assert "".join(missed).strip() == ""  # white space alone belongs to no word
    starts = {a for a, _ in offsets}
    assert all(a == b or b in starts or b == len(text) or not joins(text[b]) for a, b in offsets)


def test_all_at_once_equals_one_by_one():
    vocabulary = learned(kind="bpe")
    assert vocabulary.encode_all(TEXT) == [vocabulary.encode(line) for line in TEXT]
    assert vocabulary.encode_all([]) == []


# --- find, dump and load ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_find_gives_the_id_of_a_whole_word(kind):
    vocabulary = learned(kind=kind)
    index = vocabulary.find("horse")
    assert vocabulary.encode("a horse").ids[-1] == index
    assert vocabulary.decode([index]) == "horse"
    assert [vocabulary.find(text) for text in ("xyzzy", "", "a man", "<eos>")] == [None] * 4


def stored(vocabulary: Vocabulary, path: Path) -> Vocabulary:
    """The vocabulary after a way through a file."""
    path.write_text(vocabulary.dump(), encoding="utf-8")
    return Vocabulary.load(path)


@pytest.mark.parametrize("choices", [*({"kind": kind} for kind in KINDS), {"kind": "char", "jamo": True}])
def test_dump_and_load_change_nothing(choices, tmp_path):
    vocabulary = learned(**choices)
    loaded = stored(vocabulary, tmp_path / "tokenizer.json")
    assert loaded.dump() == vocabulary.dump()
    assert (loaded.size, loaded.composed) == (vocabulary.size, vocabulary.composed)
    for text in (*TEXT, "<eos> Straße 한국 unknown"):
        assert loaded.encode(text) == vocabulary.encode(text)
        assert again(loaded, text) == again(vocabulary, text)


@pytest.mark.parametrize("kind", KINDS)
def test_learning_is_deterministic(kind):
    assert len({Vocabulary.learn(TEXT, Tokenization(kind=kind, size=400)).dump() for _ in range(5)}) == 1


PANIC = json.loads(learned(kind="byte").dump()) | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}
DAMAGED = [b"", b"{}", b"[1]", b"\xff\xfe", learned(kind="byte").dump().encode()[:-9], json.dumps(PANIC).encode()]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_file_is_refused(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(RunError) as caught:
        Vocabulary.load(path)
    assert str(caught.value).startswith(f"{path} is not a tokenizer file: ")


def test_foreign_tokenizer_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(learned(kind="byte").dump().replace("<pad>", "[PAD]"), encoding="utf-8")
    with pytest.raises(RunError) as caught:
        Vocabulary.load(path)
    assert str(caught.value) == (
        f"{path} is not a vocabulary of regard: its first entries are not <pad> <unk> <bos> <eos>."
    )


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(RunError) as caught:
        Vocabulary.load(tmp_path / "none.json")
    assert str(caught.value) == f"{tmp_path / 'none.json'} cannot be read: No such file or directory."


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_text_goes_on_where_its_beginning_ends(kind):
    """Wherever it is cut, also inside a character of four bytes, which what follows completes."""
    vocabulary, text = learned(kind=kind), "ab 😀 말 😀"
    ids = vocabulary.encode(text).ids
    for cut in range(1, len(ids)):
        known = vocabulary.decode(ids[:cut]).rstrip("\ufffd")
        assert known + vocabulary.continued(ids[:cut], ids[cut:]) == text


def test_entries_are_spelled_as_text():
    """Words with their space; a part of a character, which is no text, as the vocabulary writes it."""
    learned = Vocabulary.learn(["two dogs", "오늘 두 마리"] * 9, Tokenization(kind="bpe", size=400))
    ids = learned.encode("two dogs 오늘").ids
    assert "".join(learned.spelled(i) for i in ids).strip() == "two dogs 오늘"
    half = learned.encode("힣").ids[-1]
    assert learned.spelled(half) == learned.token(half)
    assert learned.spelled(EOS) == "<eos>"


def test_ids_with_gaps_are_refused(tmp_path):
    """A row of an embedding that is not there would be asked for."""
    path = tmp_path / "tokenizer.json"
    tree = json.loads(Vocabulary.learn(["a b"], Tokenization(kind="word")).dump())
    tree["model"]["vocab"]["b"] = 1000
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(RunError, match="not a vocabulary of regard: the ids of its entries have gaps"):
        Vocabulary.load(path)
