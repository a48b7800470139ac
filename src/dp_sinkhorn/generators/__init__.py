"""Generators, and the one way to add another: subclass `Generator` and decorate it with `@register_generator`."""

from dp_sinkhorn.generators.base import Generator, GeneratorSpec, build_generator, generator_class, register_generator
from dp_sinkhorn.generators.dcgan import DCGAN

__all__ = ["DCGAN", "Generator", "GeneratorSpec", "build_generator", "generator_class", "register_generator"]
