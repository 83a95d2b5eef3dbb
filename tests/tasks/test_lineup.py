"""The line-up game: what it reads, what it answers, and that softmax doubles up where a matching does not (B9, G7)."""

import pytest
import torch
from every_task import GAME, made
from oracles import shaken

from regard.attention.matching import best_matching
from regard.config.data import LineupData
from regard.config.run import Config
from regard.config.text import TextConfig, Tokenization
from regard.data.batching import Batch, pad_sources
from regard.data.examples import Dropped, Example
from regard.errors import ConfigError, InputError
from regard.explain.look import look
from regard.inference.predictor import Predictor
from regard.tasks.lineup import FIRST, LineupTask, count_doubles, read_game
from regard.tasks.task import Answer

WIDER = "Kim 9 1 Lee 2 8 Park 5 5 Choi 0 1 | first 8 2 second 9 0 third 1 1"


def read(task, texts):
    ids, lengths = pad_sources([one.ids for one in task.encode(texts)])
    return Batch(ids, lengths, ids, ids)


def test_a_game_is_names_and_numbers_on_two_sides():
    game = read_game(GAME, 2)
    assert [[one.text for one in side] for side in game] == [["Kim", "Lee", "Park"], ["first", "second"]]
    assert [GAME[one.start : one.end] for one in game.players] == ["Kim", "Lee", "Park"]


@pytest.mark.parametrize(
    "text",
    ["Kim 9 1", "Kim 9 | first 8 2", "Kim 9 x | first 8 2", "Kim 9 10 | first 8 2", "| first 8 2", "Kim 9 1 |",
     "Kim 9 1 | first 8 2 second 9 0", "Kim 9 1 | first 8 2 | second 9 0"],
)  # fmt: skip
def test_what_is_no_game_is_refused(text):
    assert read_game(text, 2) is None
    task, _ = made("lineup")
    with pytest.raises(InputError, match=r"expected players, a bar .* as in: Kim 9 8 \| first 9 8"):
        task.check_source(text, "text")
    found = LineupTask.accept(Example(text, "Kim", "f:1"), task.config)
    assert found == Dropped("not players | positions with 2 numbers each", "f:1")


def test_targets_are_players_of_the_game():
    task, _ = made("lineup")
    assert LineupTask.accept(Example(GAME, "Lee Kim", "f:1"), task.config).target == "Lee Kim"
    for wrong in ("Lee", "Lee Seo", "Lee Kim Park"):
        assert LineupTask.accept(Example(GAME, wrong, "f:1"), task.config).reason.startswith("not one of the players")
    example = Example(GAME, "Park Kim", "f:1")
    assert task.encode_targets([example], task.encode([GAME])) == [[FIRST + 2, FIRST]]


def test_only_words_are_read():
    text = TextConfig(source=Tokenization(kind="char"))
    config = Config(data=LineupData(kind="lineup"), model={"kind": "lineup"}, text=text)
    with pytest.raises(ConfigError, match="reads words"):
        LineupTask.check(config)


@pytest.mark.parametrize("normalize", ["softmax", "matching"])
def test_games_beside_it_change_nothing(normalize):
    task, _ = made("lineup")
    task.settings = task.settings.model_copy(update={"normalize": normalize})
    model = shaken(task.build())
    with torch.inference_mode():
        both = model.weights(read(task, [GAME, WIDER]))
        torch.testing.assert_close(both[:1, :2, :3], model.weights(read(task, [GAME])), rtol=0, atol=1e-6)
        torch.testing.assert_close(both[1:], model.weights(read(task, [WIDER])), rtol=0, atol=1e-6)
    assert not both[0, 2:].any()
    assert not both[0, :, 3:].any()
    torch.testing.assert_close(both.sum(-1)[1], torch.ones(3), rtol=0, atol=1e-5)


def test_the_loss_is_that_of_the_wanted_players():
    task, model = made("lineup")
    shaken(model)
    batch = read(task, [GAME, WIDER])
    wanted = torch.tensor([[FIRST + 1, FIRST, 0], [FIRST, FIRST + 3, FIRST + 2]])
    batch = batch._replace(target=wanted, answer=wanted)
    weights = model.weights(batch)
    chances = torch.stack([weights[0, 0, 1], weights[0, 1, 0], weights[1, 0, 0], weights[1, 1, 3], weights[1, 2, 2]])
    loss = model(batch)
    assert loss.tokens == 5
    torch.testing.assert_close(loss.total, -chances.log().sum())
    torch.testing.assert_close(model.surprise(batch).nats.sum(), loss.plain)


def test_two_stars_are_doubled_up_by_softmax_and_not_by_a_matching():
    """Both positions like the same player best: softmax gives him to both, a matching to the one that gains more."""
    texts = {}
    for normalize in ("softmax", "matching"):
        task, _ = made("lineup")
        task.settings = task.settings.model_copy(update={"normalize": normalize, "embedding": 1, "size": 2})
        model = task.build().eval()
        with torch.no_grad():  # vectors as they stand there: a number less 4.5; so warm that favourites stay the same
            model.attention.score.sharpness.fill_(-1.0)
            for number in range(10):
                place = task.source.encode_all([str(number)])[0].ids[0]
                model.embedding.weight[place] = number - 4.5 if str(number) in GAME else 0.0
            for projection in (model.attention.projection.query, model.attention.projection.key):
                torch.nn.init.eye_(projection.weight)
                torch.nn.init.zeros_(projection.bias)
        (answer,) = Predictor(task, model).predict([GAME])[0]
        texts[normalize] = answer.text
        scores = model.logits(read(task, [GAME]))[0]
        if normalize == "matching":
            assert best_matching(scores).unique().numel() == 2
    assert texts["softmax"] == "Kim Kim"
    assert sorted(texts["matching"].split())[0] == "Kim"
    assert len({*texts["matching"].split()}) == 2


def test_positions_of_one_name_are_two_positions():
    text = GAME.replace("second", "first")
    (answer,) = Predictor(*made("lineup")).predict([text])[0]
    assert len(answer.text.split()) == 2


def test_doubles_are_players_who_stand_there_already():
    answers = [Answer("a b c", 0.0), Answer("a a a", 0.0), Answer("a b a", 0.0)]
    assert count_doubles(answers, []) == pytest.approx((0 + 2 + 1) / 3)


def test_the_map_is_of_positions_and_players():
    found = look(Predictor(*made("lineup")), GAME)
    (seen,) = found.maps
    assert (seen.kind, seen.rows, seen.columns) == ("matching", "query", "key")
    weights, rows, columns = found.label()
    assert (rows, columns) == (["first", "second"], ["Kim", "Lee", "Park"])
    torch.testing.assert_close(weights.sum(-1), torch.ones(2), rtol=0, atol=1e-5)
    assert weights.sum(-2).max() < 1 + 1e-5
