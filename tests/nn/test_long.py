"""Attention of linear cost inside of models: as dense masks would, whatever the padding, the cache and the prompt."""

import pytest
import torch
from random_runs import drawn, read
from torch.testing import assert_close

import regard
from regard.errors import ConfigError
from regard.evaluation.fit import fit
from regard.nn.attention import Attention
from regard.nn.transformer import Block, Decoder, Encoder
from regard.training.memory import TensorBytes
from regard.training.prepare import start_run

CLOSE = {"rtol": 0, "atol": 1e-10}
WINDOW = {"attention": "window", "window_size": 3}
BIGBIRD = {"attention": "bigbird", "block": 2, "near_blocks": 1, "global_blocks": 1, "random_blocks": 1}
LINFORMER = {"attention": "linformer", "slots": 5}
SIZES = {"size": 12, "feedforward": 16, "heads": 2, "dropout": 0.0}


def config(kind, **own):
    layers = {"layers": 2} if kind == "language model" else {"encoder_layers": 2, "decoder_layers": 2}
    changes = {**SIZES, **layers, **own}
    return read(kind, *(f"model.{name}={value}" for name, value in changes.items())).model


def make(stack, kind, positions="sinusoidal", **own):
    torch.manual_seed(1)
    return stack(config(kind, positions=positions, **own), 2, 40).double().eval()


@pytest.fixture
def paths(monkeypatch):
    """Which form every attention took: gathered blocks or a dense mask."""
    taken, is_sparse = [], Attention.is_sparse
    monkeypatch.setattr(Attention, "is_sparse", lambda *given: (taken.append(is_sparse(*given)), taken[-1])[1])
    return taken


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "alibi"])
@pytest.mark.parametrize("own", [WINDOW, BIGBIRD], ids=["window", "bigbird"])
def test_an_encoder_gives_the_same_by_blocks_and_by_a_mask_alone_and_in_a_batch(own, positions, paths, monkeypatch):
    encoder, x = make(Encoder, "transformer", positions, **own), torch.randn(3, 31, 12, dtype=torch.float64)
    lengths = torch.tensor([31, 24, 30])
    mask = (torch.arange(31) < lengths[:, None])[:, None, None]
    found = encoder(x, mask)
    assert any(paths)
    alone = [encoder(x[row : row + 1, :length], None)[0] for row, length in enumerate(lengths.tolist())]
    monkeypatch.setattr(Attention, "is_sparse", lambda *given: False)
    dense = encoder(x, mask)
    for row, length in enumerate(lengths.tolist()):
        assert_close(found[row, :length], dense[row, :length], **CLOSE)
        assert_close(found[row, :length], alone[row], **CLOSE)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "alibi"])
@pytest.mark.parametrize("own", [WINDOW, BIGBIRD], ids=["window", "bigbird"])
def test_a_decoder_gives_the_same_at_once_and_step_by_step(own, positions, paths):
    decoder, x = make(Decoder, "language model", positions, **own), torch.randn(2, 31, 12, dtype=torch.float64)
    whole, _ = decoder(x)
    assert any(paths)
    cache, parts = None, []
    for first, last in ((0, 1), (1, 2), (2, 12), (12, 13), *((n, n + 1) for n in range(13, 31))):
        states, cache = decoder(x[:, first:last], None, cache)
        parts.append(states)
    assert_close(torch.cat(parts, dim=1), whole, **CLOSE)
    changed = torch.cat([x[:, :20], torch.randn(2, 11, 12, dtype=torch.float64)], dim=1)
    assert_close(decoder(changed)[0][:, :20], whole[:, :20], **CLOSE)  # nothing ahead is seen


@pytest.mark.parametrize("share", ["nothing", "heads", "keys and values", "layers"])
def test_linformer_in_an_encoder(share):
    encoder = make(Encoder, "transformer", **LINFORMER, share_slots=f'"{share}"')
    x, lengths = torch.randn(2, 20, 12, dtype=torch.float64), torch.tensor([20, 13])
    found = encoder(x, (torch.arange(20) < lengths[:, None])[:, None, None])
    assert_close(found[1, :13], encoder(x[1:, :13], None)[0], **CLOSE)
    slots = {id(one): one for one in encoder.modules() if type(one).__name__ == "Slots"}
    count = {"nothing": 4 * 2, "heads": 4, "keys and values": 2, "layers": 1}[share]
    assert sum(part.numel() for one in slots.values() for part in one.parameters()) == count * 40 * 5
    weights = encoder.blocks[0].self_attention
    queries, kv = weights.project_qkv(x)
    shown = weights.weights(queries, kv, (torch.arange(20) < lengths[:, None])[:, None, None])
    assert shown.shape == (2, 2, 20, 5)  # tokens look at slots
    assert_close(shown.sum(-1), torch.ones(2, 2, 20, dtype=torch.float64), **CLOSE)
    gathered = weights.slots.shares(20, (torch.arange(20) < lengths[:, None])[:, None, None])
    assert_close(gathered.sum(-1), torch.ones_like(gathered[..., 0]), **CLOSE)
    assert not gathered[1, :, :, 13:].any()


@pytest.mark.parametrize("own", [WINDOW, BIGBIRD], ids=["window", "bigbird"])
@pytest.mark.parametrize("kind", ["language model", "transformer"])
def test_texts_are_answered_alone_as_in_a_batch(tmp_path, kind, own):
    """Prompts of other lengths are padded on their left."""
    changes = [f"model.{name}={value}" for name, value in own.items()]
    predictor = regard.load(drawn(tmp_path / "run", kind, *changes, "decode.max_extra=20"), device="cpu")
    texts = ["the quick brown fox", "abc", "zyxwvutsrqpon", "the quick"]
    together = predictor.predict(texts, best=2)
    for text, answers in zip(texts, together, strict=True):
        (alone,) = predictor.predict([text], best=2)
        assert [one.text for one in answers] == [one.text for one in alone]
        assert [one.score for one in answers] == pytest.approx([one.score for one in alone], abs=1e-4)
    found = regard.look(predictor, texts[0])
    assert found.tree()["maps"]


def test_what_cannot_be_is_refused():
    for message, kind, own in (
        ("linformer's slots hold all tokens of a text, also those ahead", "language model", LINFORMER),
        ("rotary positions compare tokens", "transformer", {**LINFORMER, "positions": "rotary"}),
        ("model.slots 41 is more than the 40 tokens of text.max_length", "transformer", {**LINFORMER, "slots": 41}),
        ("needs all scores of a text", "transformer", {**WINDOW, "normalize": "matching"}),
    ):
        with pytest.raises(ConfigError, match=message):
            config(kind, **own)


def test_checkpointed_activations_give_the_same_gradients_with_less_memory():
    gradients, bytes_alive = [], []
    for checkpointed in (False, True):
        encoder = make(Encoder, "transformer", dropout=0.3).train()
        for block in encoder.blocks:
            block.checkpoint_activations = checkpointed
        x = torch.randn(2, 64, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(5)
        with TensorBytes() as alive:
            encoder(x, None).square().sum().backward()
        bytes_alive.append(alive.most)
        gradients.append([parameter.grad for parameter in encoder.parameters()])
    assert_close(*gradients, **CLOSE)
    assert bytes_alive[1] < 0.8 * bytes_alive[0]


def test_the_setting_reaches_every_block(tmp_path, monkeypatch):
    seen = []
    compute = Block.compute
    monkeypatch.setattr(Block, "compute", lambda self, *given: seen.append(self.training) or compute(self, *given))
    sizes = [f"model.{name}={value}" for name, value in {**SIZES, "encoder_layers": 1, "decoder_layers": 1}.items()]
    for setting in ("false", "true"):
        changes = ("train.steps=1", "train.validate_every=1", f"train.checkpoint_activations={setting}")
        run = start_run(read("transformer", *sizes, *changes), tmp_path / setting)
        fit(run, tmp_path / setting, lambda event: None, device="cpu")
        seen.append("end")
    once, again = ("".join("x" if one is True else "e" * (one == "end") for one in seen)).split("e")[:2]
    assert len(again) == 2 * len(once) == 4
