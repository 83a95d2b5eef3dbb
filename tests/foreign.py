"""Small models of transformers with random weights and tokenizers of their own, and small runs of ours."""

import json

import torch
import transformers
from models import build
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from regard.config.toml import validate
from regard.data.batching import Batch
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.formats.gguf import BLOCK, ENDS
from regard.inference.load import load
from regard.training.checkpoint import create_run, get_weights, save_weights

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TEXTS = [
    "The animal didn't cross the street because it was too tired.",
    "안녕하세요, 오늘은 날씨가 좋네요!",
    "a",
    "Über 3.14 naïve cafés — or <eos> and so on?\nA second line",
    "구름 한 점 없는 하늘 아래 the dog runs",
]
LINES = TEXTS + ["one two three four five six", "하늘 아래 구름", "the street was tired of the animal"] * 3


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(LINES[2:4], trainers.WordPieceTrainer(
        vocab_size=90, special_tokens=special, show_progress=False))  # fmt: skip
    frame = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=frame
    )
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=7)
    return tokenizer


def bytes_bpe(*special, add_bos=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))  # fmt: skip
    tokenizer.add_special_tokens(list(special))  # they come last, as GPT-2's does
    if add_bos:
        first = special[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
    return tokenizer


def unigram():
    """As Marian's: </s> <unk> first, <pad> last."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(LINES[2:], trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["</s>", "<unk>"], unk_token="<unk>", show_progress=False))  # fmt: skip
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    return tokenizer


def saved(folder, model, tokenizer, shards="1GB"):
    """A model with random weights, also where its makers begin with zeros and ones."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2 * parameter.requires_grad)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
        model.tie_weights()
    model.eval().save_pretrained(folder, max_shard_size=shards)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def bert(folder):
    tokenizer = wordpiece()
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size() + 3, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=44, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return saved(folder, transformers.BertModel(config), tokenizer), tokenizer


def gpt2(folder):
    tokenizer = bytes_bpe("<|endoftext|>")
    last = tokenizer.get_vocab_size() - 1
    config = transformers.GPT2Config(
        vocab_size=last + 1, n_embd=24, n_layer=3, n_head=4, n_positions=128, bos_token_id=last, eos_token_id=last
    )
    return saved(folder, transformers.GPT2LMHeadModel(config), tokenizer), tokenizer


def neox(folder):
    tokenizer = bytes_bpe("<|endoftext|>")
    config = transformers.GPTNeoXConfig(
        vocab_size=tokenizer.get_vocab_size() + 5, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=40, max_position_embeddings=128, use_parallel_residual=False, eos_token_id=7,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    )  # fmt: skip
    return saved(folder, transformers.GPTNeoXForCausalLM(config), tokenizer), tokenizer


def llama_config(tokenizer, **changes):
    settings = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "intermediate_size": 44, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "bos_token_id": tokenizer.token_to_id("<s>"), "eos_token_id": [tokenizer.token_to_id("</s>"), 9],
    }  # fmt: skip
    return settings | changes


def llama(folder):
    tokenizer = bytes_bpe("<s>", "</s>", "<unk>", add_bos=True)
    config = transformers.LlamaConfig(**llama_config(tokenizer))
    return saved(folder, transformers.LlamaForCausalLM(config), tokenizer, "20KB"), tokenizer


def llama_biased(folder):
    tokenizer = bytes_bpe("<s>", "</s>")
    config = transformers.LlamaConfig(**llama_config(tokenizer, attention_bias=True, tie_word_embeddings=True))
    return saved(folder, transformers.LlamaForCausalLM(config), tokenizer), tokenizer


def qwen2(folder):
    tokenizer = bytes_bpe("<s>", "</s>")
    config = transformers.Qwen2Config(**llama_config(tokenizer))
    return saved(folder, transformers.Qwen2ForCausalLM(config), tokenizer), tokenizer


def marian(folder):
    tokenizer = unigram()
    config = transformers.MarianConfig(
        vocab_size=tokenizer.get_vocab_size(), d_model=24, encoder_layers=2, decoder_layers=3, encoder_ffn_dim=44,
        decoder_ffn_dim=44, encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=128,
        activation_function="swish", scale_embedding=True, eos_token_id=0, forced_eos_token_id=0,
        pad_token_id=tokenizer.token_to_id("<pad>"), decoder_start_token_id=tokenizer.token_to_id("<pad>"),
    )  # fmt: skip
    return saved(folder, transformers.MarianMTModel(config), tokenizer), tokenizer


DECODERS = [gpt2, neox, llama, llama_biased, qwen2]


def theirs_of(predictor, made, tokenizer, text):
    """Both sides' ids of a text: ours, and theirs with whatever they frame it with."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return predictor.encode([text])[0].ids, tokenizer.encode(text).ids


def gguf_of(folder, path, change=lambda writer: None, quantized=False, pre="gpt-2"):
    """llama's tiny model as llama.cpp's converter writes it."""
    import gguf

    made, tokenizer = llama(folder)
    config = made.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(1000.0)
    writer.add_rope_dimension_count(4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    change(writer)
    tree = json.loads(tokenizer.to_str())
    vocab = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    special = {token["content"] for token in tree["added_tokens"]}
    writer.add_token_types([3 if token in special else 1 for token in vocab])
    writer.add_token_merges([" ".join(merge) for merge in tree["model"]["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id[0])
    writer.add_add_bos_token(True)
    names = {theirs: ours for ours, theirs in (BLOCK | ENDS).items()}
    for name, tensor in made.state_dict().items():
        part, leaf = name.rsplit(".", 1)
        inside = part.removeprefix("model.layers.")
        number, _, rest = inside.partition(".")
        new = f"{names[part]}.{leaf}" if part in names else f"blk.{number}.{names[rest]}.{leaf}"
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        array = tensor.numpy()
        small = quantized and array.ndim == 2 and array.shape[1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if small else gguf.GGMLQuantizationType.F32
        writer.add_tensor(new, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made, tokenizer


# --- ours ---------------------------------------------------------------------------------------------------------


def ours(folder, kind="language model", seed=3, add_bos=True, text=62, **model):
    """A run with random weights."""
    vocabulary = Vocabulary.learn(LINES, checked_text().source)
    tree = {
        "data": {"kind": "text" if kind != "transformer" else "tsv", "train": ()},
        "text": {"max_length": text},
        "model": {"kind": kind, "size": 24, "heads": 4, "feedforward": 44, "dropout": 0.0, **model},
    }
    if kind == "language model":
        tree["model"]["add_bos"] = add_bos
    config = validate(tree, "test")
    made = build(config, vocabulary)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    create_run(folder, config, Vocabularies(vocabulary, vocabulary), {})
    save_weights(folder / "model.safetensors", get_weights(made), 0)
    return load(folder)


def checked_text():
    return validate({"data": {"kind": "reverse"}, "model": {"kind": "rnn"}, "text": {"source": {"size": 300}}}, "").text


def logits_of_language(predictor, text):
    ids = torch.tensor([predictor.encode([text])[0].ids])
    with torch.no_grad():
        return predictor.model.logits(Batch(ids[:, :0], torch.zeros(1), ids, ids))


def layers(stack, embedded, **options):
    """The embeddings and what every block makes of them."""
    x = stack.prepare(embedded)
    found = [x]
    for block in stack.blocks:
        x, _ = block(x, *options.values())
        found.append(x)
    return found
