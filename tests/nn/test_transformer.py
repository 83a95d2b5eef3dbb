"""Blocks against torch's, the whole model against Marian's (D1, D2, D4), and a step at a time against all at once."""

import pytest
import torch
from oracles import EXACT, assert_half_dropped, rival, shaken, three_maps
from oracles import exact as exact
from pydantic import ValidationError
from torch import nn
from torch.testing import assert_close

from regard.attention.masks import causal, padding
from regard.config.model import WHOLE, LanguageModelConfig, TransformerConfig
from regard.nn.attention import CROSS, SOURCE, TARGET
from regard.nn.kv_cache import KVCache
from regard.nn.transformer import Block, Decoder, EncodedSource, Encoder, FeedForward, Residual
from regard.tasks.seq2seq import Transformer

pytestmark = pytest.mark.usefixtures("exact")

POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "none"]
NORMS = ["pre", "post"]


def settings(**changes):
    sizes = {"size": 12, "heads": 3, "feedforward": 7, "encoder_layers": 2, "decoder_layers": 2}
    return TransformerConfig(kind="transformer", **sizes | changes)


# --- D1: the block ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", NORMS)
def test_an_encoder_block_is_the_one_of_torch(norm, activation, masked):
    ours = shaken(Block(settings(norm=norm, activation=activation, positions="none"), SOURCE))
    theirs = nn.TransformerEncoderLayer(12, 3, 7, 0.0, activation, batch_first=True, norm_first=norm == "pre")
    theirs.self_attn = rival(ours.self_attention)
    theirs.linear1, theirs.linear2 = ours.feedforward.up, ours.feedforward.down
    theirs.norm1, theirs.norm2 = (residual.norm for residual in ours.residuals)
    x, mask = torch.randn(2, 5, 12), padding(torch.tensor([3, 5]), 5) if masked else None
    found, _ = ours(x, mask)
    assert_close(found, theirs(x, src_key_padding_mask=~mask[:, 0, 0] if masked else None), **EXACT)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_decoder_block_is_the_one_of_torch(norm, activation, masked):
    ours = shaken(Block(settings(norm=norm, activation=activation, positions="none"), TARGET, cross="cross"))
    theirs = nn.TransformerDecoderLayer(12, 3, 7, 0.0, activation, batch_first=True, norm_first=norm == "pre")
    theirs.self_attn, theirs.multihead_attn = rival(ours.self_attention), rival(ours.cross_attention)
    theirs.linear1, theirs.linear2 = ours.feedforward.up, ours.feedforward.down
    theirs.norm1, theirs.norm2, theirs.norm3 = (residual.norm for residual in ours.residuals)
    x, states = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    ahead, hidden = (causal(5, 5), padding(torch.tensor([3, 7]), 7)) if masked else (None, None)
    found, _ = ours(x, ahead, ours.cross_attention.project_kv(states), hidden)
    masks = {"memory_key_padding_mask": ~hidden[:, 0, 0]} if masked else {}
    assert_close(found, theirs(x, states, tgt_mask=~causal(5, 5), **masks), **EXACT)  # without a mask, it is causal


@pytest.mark.parametrize("kv_heads", [None, 1])
@pytest.mark.parametrize("norm", NORMS)
def test_encoder_states_are_worth_as_much_as_their_keys_and_values(norm, kv_heads):
    block = shaken(Block(settings(norm=norm, kv_heads=kv_heads), TARGET, cross="cross"))
    x, states = torch.randn(6, 5, 12), torch.randn(2, 7, 12)  # three hypotheses of each sentence
    masks = causal(5, 5), padding(torch.tensor([3, 7]), 7)
    given = [block(x, masks[0], source, masks[1]) for source in (states, block.project_source(states))]
    assert_close(*given, **EXACT)
    assert_close(block.project_source(states), block.cross_attention.project_kv(states), **EXACT)


def test_a_block_needs_no_source():
    block, x = shaken(Block(settings(), TARGET, cross="cross")), torch.randn(2, 5, 12)
    found, kv = block(x, causal(5, 5))
    alone = Block(settings(), TARGET)
    alone.load_state_dict(
        {
            name.replace("residuals.2", "residuals.1"): weight
            for name, weight in block.state_dict().items()
            if "cross" not in name and "residuals.1" not in name
        }
    )
    assert_close((found, kv), alone.eval()(x, causal(5, 5)), **EXACT)


def test_attentions_of_stacks_say_what_stands_on_their_sides():
    encoder, decoder = Encoder(settings(), 2, longest=11), Decoder(settings(), 2, longest=11, cross="cross")
    assert [(b.self_attention.kind, b.self_attention.axes) for b in encoder.blocks] == [("self", SOURCE)] * 2
    assert [(b.self_attention.kind, b.self_attention.axes) for b in decoder.blocks] == [("self", TARGET)] * 2
    assert [(b.cross_attention.kind, b.cross_attention.axes) for b in decoder.blocks] == [("cross", CROSS)] * 2


def test_a_block_without_bias_has_it_in_its_norms_alone():
    block = Block(settings(bias=False), TARGET, cross="cross")
    names = [name for name, _ in block.named_parameters() if name.endswith("bias")]
    assert names == [f"residuals.{number}.norm.bias" for number in range(3)]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_feed_forward_sees_one_position_at_a_time(activation):
    part, x = shaken(FeedForward(5, 7, activation)), torch.randn(2, 3, 5)
    bent = getattr(nn.functional, activation)(x[1, 2] @ part.up.weight.mT + part.up.bias)
    assert_close(part(x)[1, 2], bent @ part.down.weight.mT + part.down.bias, **EXACT)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu tanh", "silu"])
def test_a_gate_is_activated_and_multiplies(activation):
    part, x = shaken(FeedForward(5, 7, activation, gated=True)), torch.randn(2, 3, 5)
    bend = {"gelu tanh": lambda x: nn.functional.gelu(x, approximate="tanh")}
    bent = bend.get(activation, getattr(nn.functional, activation, None))(part.gate(x))
    assert_close(part(x), part.down(bent * part.up(x)), **EXACT)


def test_dropout_stands_behind_every_part_and_behind_the_embeddings():
    config, ones = settings(dropout=0.5, positions="none", embedding_scale=False), torch.ones(101, 7, 12)
    assert_half_dropped(Residual(config)(torch.zeros_like(ones), lambda x: ones))
    assert_half_dropped(Encoder(config, 1, longest=11).prepare(ones))
    block = Block(config, TARGET, cross="cross")
    assert [residual.dropout.probability for residual in block.residuals] == [0.5] * 3


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_every_norm_has_the_epsilon_that_was_set(kind):
    config = settings(norm_kind=kind, norm_epsilon=0.25, embedding_norm=True)
    norms = [part for part in Decoder(config, 2, longest=11, cross="cross").modules() if hasattr(part, "eps")]
    assert [norm.eps for norm in norms] == [0.25] * (2 * 3 + 2)


# --- D2, D4: encoder and decoder -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_step_at_a_time_is_all_at_once(positions, norm):
    config = settings(positions=positions, norm=norm)
    decoder, x = shaken(Decoder(config, config.decoder_layers, longest=11, cross="cross")), torch.randn(2, 7, 12)
    source = decoder.project_source(EncodedSource(torch.randn(2, 5, 12), padding(torch.tensor([3, 5]), 5)))
    wanted, whole = decoder(x, source)
    cache, steps = None, []
    for piece in x.split([1, 1, 3, 2], dim=1):
        step, cache = decoder(piece, source, cache)
        steps.append(step)
    assert_close(torch.cat(steps, dim=1), wanted, **EXACT)
    assert_close(cache, whole, **EXACT)
    assert cache.length == cache.start == 7


@pytest.mark.parametrize("positions", POSITIONS)
def test_hypotheses_of_one_sentence_look_at_the_same_source(positions):
    decoder, x = shaken(Decoder(settings(positions=positions), 2, longest=11, cross="cross")), torch.randn(6, 4, 12)
    states, mask = torch.randn(2, 5, 12), padding(torch.tensor([3, 5]), 5)
    source = EncodedSource(states, mask)
    copied = EncodedSource(states.repeat_interleave(3, dim=0), mask.repeat_interleave(3, dim=0))
    wanted, _ = decoder(x, copied)
    for one in (source, decoder.project_source(source), decoder.project_source(copied)):
        assert_close(decoder(x, one)[0], wanted, **EXACT)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_more_changes_nothing(positions, norm):
    encoder, x = shaken(Encoder(settings(positions=positions, norm=norm), 2, longest=11)), torch.randn(2, 5, 12)
    alone = encoder(x, None)
    for junk in (0.0, 1e3):
        more = torch.cat([x, torch.full((2, 3, 12), junk)], dim=1)
        assert_close(encoder(more, padding(torch.tensor([5, 5]), 8))[:, :5], alone, **EXACT)


@pytest.mark.parametrize("positions", POSITIONS)
def test_what_comes_later_is_not_seen(positions):
    decoder, x = shaken(Decoder(settings(positions=positions), 2, longest=11, cross="cross")), torch.randn(2, 7, 12)
    source = decoder.project_source(EncodedSource(torch.randn(2, 5, 12), None))
    before, _ = decoder(x, source)
    x[:, 4] = torch.randn(2, 12)
    after, _ = decoder(x, source)
    assert_close(after[:, :4], before[:, :4], **EXACT)
    assert (after[:, 4:] - before[:, 4:]).norm(dim=-1).min() > 1e-3


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_source_may_be_projected_before(positions):
    decoder, x = shaken(Decoder(settings(positions=positions), 2, longest=11, cross="cross")), torch.randn(2, 7, 12)
    source = EncodedSource(torch.randn(2, 5, 12), padding(torch.tensor([3, 5]), 5))
    projected = decoder.project_source(source)
    assert len(projected.projected) == 2
    assert projected._replace(projected=()) == source
    assert_close(decoder(x, projected), decoder(x, source), **EXACT)
    with torch.no_grad():
        assert_close(decoder(x, decoder.project_source(source)), decoder(x, source), **EXACT)


@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_before_a_text_changes_nothing(positions):
    decoder, x = shaken(Decoder(settings(positions=positions), 2, longest=11)), torch.randn(2, 7, 12)
    shift = torch.tensor([3, 0])
    real = torch.arange(5) >= shift[:, None]
    found, cache = decoder(x[:, :5], cache=KVCache(start=-shift), real=real)
    later, after = decoder(x[:, 5:], cache=cache)
    for row, first in enumerate(shift.tolist()):
        alone, _ = decoder(x[row : row + 1, first:])
        assert_close(torch.cat([found, later], dim=1)[row, first:], alone[0], **EXACT)
    assert after.start.tolist() == [4, 7]
    assert after.real.tolist() == [[False] * 3 + [True] * 4, [True] * 7]


def test_pre_norm_ends_with_a_norm_and_post_norm_does_not():
    ends = {norm: Encoder(settings(norm=norm), 2, longest=11).norm for norm in NORMS}
    assert isinstance(ends["pre"], nn.LayerNorm)
    assert not list(ends["post"].parameters())


def test_layers_do_not_share_weights():
    decoder = Decoder(settings(), 2, longest=11, cross="cross")
    first, second = (set(map(id, block.parameters())) for block in decoder.blocks)
    assert not first & second


# --- the whole model -------------------------------------------------------------------------------------------------


def same_weights(theirs, ours):
    """Give a MarianMTModel the weights of ours."""
    pairs = [(theirs.model.encoder, ours.encoder, ours.source_embedding)]
    pairs += [(theirs.model.decoder, ours.decoder, ours.target_embedding)]
    for stack, own, embedding in pairs:
        stack.embed_tokens = embedding
        stack.embed_positions.weight = own.positions.table
        for layer, block in zip(stack.layers, own.blocks, strict=True):
            attentions = [(layer.self_attn, block.self_attention)]
            norms = ["self_attn_layer_norm", "final_layer_norm"]
            if block.cross_attention is not None:
                attentions.append((layer.encoder_attn, block.cross_attention))
                norms.insert(1, "encoder_attn_layer_norm")
            for attention, part in attentions:
                attention.q_proj, attention.k_proj, attention.v_proj = three_maps(part)
                attention.out_proj = part.output
            layer.fc1, layer.fc2 = block.feedforward.up, block.feedforward.down
            for name, residual in zip(norms, block.residuals, strict=True):
                setattr(layer, name, residual.norm)
    theirs.lm_head.weight = ours.output.weight
    theirs.final_logits_bias = ours.output.bias.detach()[None]
    return theirs.eval()


@pytest.mark.parametrize(("activation", "name"), [("relu", "relu"), ("silu", "swish")])
def test_the_whole_model_is_marian(activation, name):
    transformers = pytest.importorskip("transformers")
    config = settings(norm="post", activation=activation, positions="learned", decoder_layers=3)
    ours = shaken(Transformer(config, 17, longest=11)).float()
    theirs = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=17,
            max_position_embeddings=11,
            d_model=12,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=3,
            decoder_attention_heads=3,
            encoder_ffn_dim=7,
            decoder_ffn_dim=7,
            activation_function=name,
            scale_embedding=True,
            pad_token_id=0,
            eos_token_id=3,
            decoder_start_token_id=2,
            forced_eos_token_id=3,
            attn_implementation="eager",
        )
    )
    source, target, lengths = torch.randint(4, 17, (2, 7)), torch.randint(4, 17, (2, 5)), torch.tensor([4, 7])
    mask = padding(lengths, 7)[:, 0, 0]
    wanted = same_weights(theirs, ours)(source * mask, mask.long(), decoder_input_ids=target).logits
    hidden, _ = ours.decode(target, ours.encode(source * mask, lengths))
    assert_close(ours.output(hidden), wanted, rtol=0, atol=1e-5)


# --- structure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", WHOLE)
def test_structures_are_of_the_encoder_alone(normalize):
    config = settings(normalize=normalize)
    encoder, decoder = Encoder(config, 1, 20), Decoder(config, 1, 20, cross="cross")
    assert encoder.blocks[0].self_attention.kind == ("matching" if normalize == "matching" else "tree")
    assert [decoder.blocks[0].self_attention.kind, decoder.blocks[0].cross_attention.kind] == ["self", "cross"]


@pytest.mark.parametrize("normalize", [*WHOLE, "segments"])
def test_padding_is_no_part_of_a_structure(normalize):
    encoder = shaken(Encoder(settings(dropout=0, normalize=normalize), 2, 20))
    x, lengths = torch.randn(3, 6, 12), torch.tensor([4, 6, 1])
    found = encoder(x, padding(lengths, 6))
    for row, length in enumerate(lengths.tolist()):
        alone = encoder(x[row : row + 1, :length], None)
        assert_close(found[row : row + 1, :length], alone, rtol=0, atol=1e-6)


def test_segments_in_a_decoder_step_by_step():
    """Every row is a chain by itself, so a cache serves it."""
    decoder = shaken(Decoder(settings(dropout=0, normalize="segments"), 2, 20, cross="cross"))
    assert {block.self_attention.kind for block in decoder.blocks} == {"chain"}
    source = EncodedSource(torch.randn(2, 5, 12), padding(torch.tensor([5, 3]), 5))
    x = torch.randn(2, 4, 12)
    wanted, _ = decoder(x, source)
    cache, steps = None, []
    for piece in x.unbind(1):
        step, cache = decoder(piece[:, None], source, cache)
        steps.append(step)
    assert_close(torch.cat(steps, dim=1), wanted, **EXACT)


@pytest.mark.parametrize("normalize", WHOLE)
def test_a_language_model_cannot_see_a_whole_structure(normalize):
    with pytest.raises(ValidationError, match=r"weighs all tokens of a text together.*causal"):
        LanguageModelConfig(kind="language model", normalize=normalize)
