"""Generators: the paper's sizes, any supported image shape, and the registry."""

import pytest
import torch
from torch import nn

from dp_sinkhorn.errors import UserError
from dp_sinkhorn.generators import DCGAN, Generator, GeneratorSpec, build_generator, register_generator

PAPER = GeneratorSpec("dcgan", (1, 28, 28), 10, 12, {"width": 64, "class_embedding": 4})


def test_dcgan_has_the_layers_of_the_appendix() -> None:
    generator = build_generator(PAPER, 0)
    assert generator.project.weight.shape == (256 * 7 * 7, 12 + 4)
    convolutions = [layer for layer in generator.layers if isinstance(layer, nn.ConvTranspose2d)]
    assert [layer.out_channels for layer in convolutions] == [128, 64, 1]
    assert [layer.kernel_size[0] for layer in convolutions] == [4, 4, 3]
    assert [layer.stride[0] for layer in convolutions] == [2, 2, 1]
    assert [layer.padding[0] for layer in convolutions] == [1, 1, 1]
    assert generator.embedding.weight.shape == (10, 4)
    assert sum(isinstance(layer, nn.ReLU) for layer in generator.layers) == 3
    assert isinstance(generator.layers[-1], nn.Tanh)


def test_the_first_layer_is_the_transposed_convolution_it_stands_for() -> None:
    generator = build_generator(PAPER, 0)
    inputs = torch.rand(3, 16)
    weight = generator.project.weight.view(7, 7, 256, 16).permute(3, 2, 0, 1)
    expected = nn.functional.conv_transpose2d(inputs[:, :, None, None], weight)
    actual = generator.project(inputs).view(3, 7, 7, 256).permute(0, 3, 1, 2)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    bound = (256 * 49) ** -0.5
    assert 0.99 * bound < generator.project.weight.abs().max() <= bound


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (28, 28), (32, 32), (64, 64), (13, 30), (9, 64)])
def test_any_supported_shape(channels: int, height: int, width: int) -> None:
    generator = build_generator(GeneratorSpec("dcgan", (channels, height, width), 4, 5, {"width": 2}), 0)
    images = generator(torch.rand(3, 5), torch.tensor([0, 1, 3]))
    assert images.shape == (3, channels, height, width)
    assert images.abs().max() <= 1
    images.sum().backward()
    assert all(parameter.grad is not None for parameter in generator.parameters())


def test_seed_fixes_the_initial_weights_and_leaves_the_global_state_alone() -> None:
    state = torch.get_rng_state()
    first, second, other = (build_generator(PAPER, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.project.weight, second.project.weight)
    assert not torch.equal(first.project.weight, other.project.weight)


def test_labels_and_latents_matter() -> None:
    generator = build_generator(PAPER, 0).eval()
    latents = torch.rand(1, 12)
    images = [generator(latents, torch.tensor([label])) for label in (0, 1)]
    assert not torch.equal(*images)
    assert not torch.equal(images[0], generator(1 - latents, torch.tensor([0])))


def test_another_architecture_is_one_decorated_class() -> None:
    @register_generator("test-linear")
    class Linear(Generator):
        sizes = {"depth": 1}  # noqa: RUF012

        def __init__(self, image_shape, classes, latent, depth=1):
            super().__init__(image_shape, classes, latent)
            self.map = nn.Linear(latent, 64 * depth)

        def forward(self, latents, labels):
            return self.map(latents).tanh().view(-1, *self.image_shape)

    assert isinstance(build_generator(GeneratorSpec("test-linear", (1, 8, 8), 2, 3, {"depth": 1})), Linear)
    from dp_sinkhorn.training import train
    from tests.toy import records, small_settings

    release = train(records(), small_settings(generator="test-linear", mechanism="nonprivate", steps=2))
    assert release.sample(3)[0].shape == (3, 8, 8)


def test_unknown_names_are_explained() -> None:
    with pytest.raises(UserError, match="unknown generator 'gan'; choose one of dcgan"):
        build_generator(GeneratorSpec("gan", (1, 8, 8), 2, 3, {}))
    with pytest.raises(UserError, match="generator 'dcgan' has no argument 'depth'"):
        build_generator(GeneratorSpec("dcgan", (1, 8, 8), 2, 3, {"depth": 3}))
    assert DCGAN.sizes == {"width": 64, "class_embedding": 4}
