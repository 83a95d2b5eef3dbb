"""Continuations while they are written: penalties, settings and scores, by hand and by one pass of the model."""

import pytest
import torch
from every_task import made
from oracles import shaken

from regard.data.batching import Batch
from regard.data.vocabulary import EOS
from regard.inference.predictor import Predictor
from regard.server.completions import Choice, CompletionBody, Prompt, score_prompt


@pytest.fixture(scope="module")
def predictor():
    task, model = made("language model")
    torch.manual_seed(5)
    return Predictor(task, shaken(model))


@pytest.mark.parametrize(("once", "often"), [(0.5, 0.0), (0.0, 0.25), (0.5, 0.25), (-1.0, 2.0)])
def test_penalties_are_taken_off_what_was_written(predictor, once, often):
    """The presence penalty once for every token that was written, the frequency penalty as often as it was; those that
    were not, and the prompt's, have none."""
    body = CompletionBody(temperature=0, presence_penalty=once, frequency_penalty=often, max_tokens=9)
    choice, seen = Choice(0, Prompt("a", [4]), body, predictor, 0), []
    choice.draw = lambda logprobs, step: seen.append(logprobs[0]) or torch.tensor([4])
    for token in (5, 6, 5, 5):
        assert not choice.hear(token, -1.0)
    logprobs = torch.arange(12.0).neg()
    choice.choose(logprobs.clone(), 4)
    wanted = logprobs.clone()
    wanted[5] -= once + 3 * often
    wanted[6] -= once + often
    assert torch.equal(seen[0], wanted)


@pytest.mark.parametrize(("top_p", "wanted"), [(1.0, None), (0.3, 0.3), (0.0, 1e-9)])
def test_settings_of_a_completion(top_p, wanted):
    found = CompletionBody(temperature=0.7, top_p=top_p, seed=5).decode_settings()
    assert found == {"sample": True, "temperature": 0.7, "top_k": None, "top_p": wanted, "seed": 5}
    assert not CompletionBody(temperature=0).decode_settings()["sample"]


@pytest.mark.parametrize("length", [1, 2, 256, 257, 258, 600])
def test_a_prompt_of_any_length_is_scored_as_by_one_pass(predictor, length):
    """It is read some hundred tokens at a time, for a vocabulary is wide."""
    ids = torch.randint(4, 12, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    found = score_prompt(predictor.model, ids, predictor.target, 2)
    row = torch.tensor([ids])
    with torch.inference_mode():
        logprobs = predictor.model.logits(Batch(row, row, row, row))[0].log_softmax(-1)
    assert [token.logprob for token in found] == [
        None, *(pytest.approx(logprobs[place, token].item(), abs=1e-5) for place, token in enumerate(ids[1:]))
    ]  # fmt: skip
    for token, place in zip(found[1:], logprobs, strict=False):
        assert max(token.top.values()) == pytest.approx(max(place.max().item(), token.logprob), abs=1e-5)
    assert [token.offset for token in found] == list(range(length))
    assert "".join(token.text for token in found) == predictor.target.decode(ids)


@pytest.mark.parametrize("stops", [["cd", "bcd"], ["bcd", "cd"]])
def test_of_several_stops_the_first_in_the_text_counts(predictor, stops):
    """Both are there with the last letter."""
    body = CompletionBody(temperature=0, stop=stops, max_tokens=20, logprobs=0)
    choice, parts = Choice(0, Prompt("", [EOS]), body, predictor, 0), []
    choice.emit = parts.append
    assert [choice.hear(token, -1.0) for token in predictor.target.encode("abcd").ids] == [False, False, False, True]
    assert ("".join(part.text for part in parts), parts[-1].finish) == ("a", "stop")
