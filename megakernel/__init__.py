"""Tensors in, tensors out: the decoder of a codec language model, its state and its sampling.

Torch alone; no word of speech.
"""

from megakernel.decoder import Decoder
from megakernel.engine import ENGINES, choose_engine, make_decoder
from megakernel.errors import CacheFullError, KernelFaultError
from megakernel.sampling import DrawParams
from megakernel.spec import DecoderSpec, StackSpec
from megakernel.weights import DecoderWeights, pack_decoder

__all__ = [
    "ENGINES",
    "CacheFullError",
    "Decoder",
    "DecoderSpec",
    "DecoderWeights",
    "DrawParams",
    "KernelFaultError",
    "StackSpec",
    "choose_engine",
    "make_decoder",
    "pack_decoder",
]
