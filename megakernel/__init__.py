"""Tensors in, tensors out: the decoder of a codec language model, its state and its sampling.

Torch alone; no word of speech.
"""

from megakernel.decoder import CacheFullError, Decoder
from megakernel.sampling import DrawParams
from megakernel.spec import DecoderSpec, StackSpec
from megakernel.weights import DecoderWeights, pack_decoder

__all__ = [
    "CacheFullError",
    "Decoder",
    "DecoderSpec",
    "DecoderWeights",
    "DrawParams",
    "StackSpec",
    "pack_decoder",
]
