"""Which family reads a model: a built-in one, by its config.json's model_type, or one of the user's
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagedjax.options.config import one_of
from pagedjax.options.own_values import own_value
from pagedjax.weights.architectures import FAMILIES, Family
from pagedjax.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from pagedjax.device.models.decoder import DecoderConfig
    from pagedjax.device.models.param_table import ParamSource


def own_family(name: Any) -> Family | None:
    """The family that "module:NAME" or "folder/file.py:NAME" names; None for None.

    Raises:
        ValueError: there is no such module, file or value.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise ValueError(
            f"model_family is {name!r:.80}; it must be a text, module:NAME or folder/file.py:NAME "
            "of a Family, or None"
        )
    return own_value("model_family", name, Family, (), shared=True)


def built_in(model_type: str) -> Family:
    """The built-in family of a `model_type`.

    Raises:
        ValueError: there is none.
    """
    one_of("model_type", model_type, tuple(FAMILIES))
    return FAMILIES[model_type]


def family_of(checkpoint: Checkpoint) -> Family:
    """The family that reads a checkpoint."""
    return checkpoint.family or built_in(checkpoint.config["model_type"])


def config_of(family: Family, config: Mapping[str, Any], source: str) -> DecoderConfig:
    """The decoder's shape, by the family's `from_hf`. `source`: where the config is from, for
    errors.

    Raises:
        ValueError: `from_hf` misses a key, or returns something else.
    """
    from pagedjax.device.models.decoder import DecoderConfig

    try:
        shape = family.from_hf(dict(config))
    except KeyError as error:
        raise ValueError(
            f"{source}: from_hf of the family {family.model_type!r} reads {error}, which the "
            "config does not have; add it to the config, or its default to "
            "Architecture(defaults=...)"
        ) from error
    if not isinstance(shape, DecoderConfig):
        raise ValueError(
            f"{source}: from_hf of the family {family.model_type!r} returns "
            f"{type(shape).__name__}; it must return a DecoderConfig"
        )
    return shape


def check_parameters(family: Family, config: DecoderConfig, table: Sequence[ParamSource]) -> None:
    """Compare the parameters of a family's table with those of its decoder.

    Raises:
        ValueError: lists all parameters that one of them lacks, and those of other shapes.
    """
    from flax import nnx

    from pagedjax.device.models.decoder import Decoder
    from pagedjax.weights.tree import named

    shapes = {
        name: tuple(x.shape)
        for name, x in named(nnx.eval_shape(lambda: Decoder(config, "float32"))).items()
    }
    entries = {".".join(map(str, entry.path)): entry for entry in table}
    problems = [f"missing: {name} {shape}" for name, shape in shapes.items() if name not in entries]
    for name, entry in entries.items():
        if name not in shapes:
            if not entry.optional:
                problems.append(f"not in the decoder: {name} {entry.shape}")
        elif tuple(entry.shape) != shapes[name]:
            problems.append(
                f"shape of {name}: {tuple(entry.shape)} in the table, {shapes[name]} in the decoder"
            )
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(
            f"param_table of the family {family.model_type!r} does not fit the decoder of its "
            f"from_hf; differences: {len(problems)}\n  {lines}"
        )
