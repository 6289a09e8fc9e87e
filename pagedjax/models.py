"""Models without an engine, under their public name: the decoder, and log-probabilities of whole sequences."""

from pagedjax.device.models import Model
from pagedjax.device.models.decoder import Decoder, DecoderConfig
from pagedjax.device.score import score

__all__ = ["Decoder", "DecoderConfig", "Model", "score"]
