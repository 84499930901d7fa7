"""Weights in the kernel's layout: every tensor in its place, once in memory, and the twin the same on them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megakernel import Decoder, DecoderSpec, DecoderWeights, pack_decoder
from megakernel.linear import WEIGHT_FORMATS, Linear, RowsLinear, matrix_bytes
from megakernel.packed import Matrix, PackedDecoder, PackedStack
from megakernel.q8 import dequantize, quantize
from megakernel.spec import StackSpec
from tests.megakernel.naive_decoder import NaiveDecoder
from tests.megakernel.random_decoder import (
    ALL_SPECS,
    KINDS,
    Script,
    decoder_spec,
    random_tensors,
    random_weights,
    stack_spec,
)

CASES = [(name, weight_format) for name, weight_format, layout in KINDS if layout == "kernel"]
PROJECTED = [case for case in CASES if "projected" in case[0]]
CLOSE = {"float32": 2e-5, "bfloat16": 0.1, "q8_0": 0.1}  # logits of a few units


def tensors_of(packed: PackedDecoder) -> list[Tensor]:
    """Every tensor once."""
    found: dict[int, Tensor] = {}

    def walk(part: object) -> None:
        if isinstance(part, Tensor):
            found.setdefault(part.data_ptr(), part)
        elif isinstance(part, tuple):
            for one in part:
                walk(one)

    walk(packed)
    return list(found.values())


def values(matrix: Matrix) -> Tensor:
    """Of all its matrices, as they are multiplied."""
    return dequantize(*matrix) if matrix.rows.dtype == torch.int8 else matrix.rows


def rounded(weight: Tensor, weight_format: str) -> Tensor:
    return dequantize(*quantize(weight)) if weight_format == "q8_0" else weight.to(WEIGHT_FORMATS[weight_format])


def assert_holds(matrix: Matrix, weights: list[Tensor], weight_format: str, what: str) -> None:
    expected = rounded(torch.stack(weights), weight_format)
    held = values(matrix)
    assert held.shape == expected.shape and held.dtype == expected.dtype, what
    assert torch.equal(held, expected), f"{what} first differs at {(held != expected).nonzero()[0].tolist()}"
    assert matrix.rows.is_contiguous() and matrix.scales.is_contiguous(), what
    if weight_format == "q8_0":
        assert matrix.rows.dtype == torch.int8 and matrix.scales.dtype == torch.float16, what
    else:
        assert matrix.scales is matrix.rows, what


def assert_stack_holds(stack: PackedStack, tensors: dict[str, Tensor], prefix: str, spec: StackSpec, of: str) -> None:
    def each(*names: str) -> list[Tensor]:
        return [torch.cat([tensors[f"{prefix}.layers.{i}.{name}"] for name in names]) for i in range(spec.layers)]

    assert_holds(stack.qkv, each("q", "k", "v"), of, f"{prefix} qkv")
    assert_holds(stack.o, each("o"), of, f"{prefix} o")
    assert_holds(stack.gate_up, each("gate", "up"), of, f"{prefix} gate and up")
    assert_holds(stack.down, each("down"), of, f"{prefix} down")
    norms = {
        "input_norm": torch.stack(each("input_norm")),
        "qk_norm": torch.stack(each("q_norm", "k_norm")).view(spec.layers, 2, spec.head_dim),
        "post_norm": torch.stack(each("post_norm")),
        "norm": tensors[f"{prefix}.norm"],
    }
    for name, expected in norms.items():
        norm = getattr(stack, name)
        assert norm.dtype == torch.float32 and norm.is_contiguous() and torch.equal(norm, expected), f"{prefix} {name}"


def packed_weights(name: str, weight_format: str) -> tuple[DecoderWeights, PackedDecoder]:
    weights = random_weights(ALL_SPECS[name], weight_format, "kernel")
    assert weights.packed is not None
    return weights, weights.packed


@pytest.mark.parametrize(("name", "weight_format"), CASES)
def test_every_tensor_is_in_its_place(name, weight_format) -> None:
    spec = ALL_SPECS[name]
    tensors, (_, packed) = random_tensors(spec), packed_weights(name, weight_format)
    dtype, later = WEIGHT_FORMATS[weight_format], range(spec.groups - 1)
    assert_stack_holds(packed.talker, tensors, "talker", spec.talker, weight_format)
    assert_stack_holds(packed.predictor, tensors, "predictor", spec.predictor, weight_format)
    head, bias = tensors["talker.head"], torch.zeros(1)
    if spec.projects:
        head = torch.cat([head, tensors["predictor.projection.weight"]])
        bias = tensors["predictor.projection.bias"].to(dtype).float()
    assert_holds(packed.head, [head], weight_format, "head")
    assert packed.head_bias.dtype == torch.float32 and torch.equal(packed.head_bias, bias)
    heads = [tensors[f"predictor.heads.{g}"] for g in later]
    assert_holds(packed.predictor_heads, heads, weight_format, "predictor heads")
    tables = torch.stack([tensors[f"predictor.embeddings.{g}"] for g in later])
    for mine, expected in (
        (packed.embedding, tensors["talker.embedding"].to(dtype)),
        (packed.predictor_embedding, tables.to(dtype)),
    ):
        assert mine.dtype == dtype and mine.is_contiguous() and torch.equal(mine, expected)


@pytest.mark.parametrize(("name", "weight_format"), PROJECTED)
def test_inputs_of_the_predictor_are_the_embeddings_projected(name, weight_format, monkeypatch) -> None:
    monkeypatch.setattr("megakernel.packed._PROJECTED_ROWS", 16)  # so that tables are taken in several pieces
    spec = ALL_SPECS[name]
    weights, packed = packed_weights(name, weight_format)
    for embedded, projected in (
        (packed.embedding, packed.first_input),
        (packed.predictor_embedding, packed.later_inputs),
    ):
        assert projected.shape == (*embedded.shape[:-1], spec.predictor.hidden)
        assert projected.dtype == weights.dtype and projected.is_contiguous()
        weight = rounded(random_tensors(spec)["predictor.projection.weight"], weight_format).double()
        expected = embedded.double() @ weight.T + packed.head_bias.double()
        step = 1e-6 if weight_format == "float32" else 2.0**-8
        torch.testing.assert_close(projected.double(), expected, atol=1e-5, rtol=step)
    assert weights.projection is not None
    row = weights.projection(packed.embedding[None, 3:4])[0, 0]
    torch.testing.assert_close(packed.first_input[3], row, atol=1e-6, rtol=0 if weight_format == "float32" else 2.0**-7)


@pytest.mark.parametrize(("name", "weight_format"), [case for case in CASES if case not in PROJECTED])
def test_without_a_projection_its_inputs_are_the_embeddings_themselves(name, weight_format) -> None:
    _, packed = packed_weights(name, weight_format)
    assert packed.first_input is packed.embedding and packed.later_inputs is packed.predictor_embedding


@pytest.mark.parametrize(("name", "weight_format"), CASES)
def test_the_twin_reads_the_memory_of_the_kernel(name, weight_format) -> None:
    weights, packed = packed_weights(name, weight_format)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(packed)}

    def shared(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in storages

    linears: list[Linear | None] = [weights.head, *weights.predictor_heads, weights.projection]
    for stack in (weights.talker, weights.predictor):
        assert shared(stack.norm)
        for layer in stack.layers:
            linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
            assert shared(layer.input_norm) and shared(layer.post_norm)
    for linear in linears:
        if linear is not None:
            assert isinstance(linear, RowsLinear) and shared(linear.rows)
            assert linear.scales is None or shared(linear.scales)
            assert (linear.scales is None) == (weight_format != "q8_0")
    assert weights.embedding is packed.embedding and weights.predictor_embedding is packed.predictor_embedding
    assert weights.device == packed.embedding.device and weights.dtype == WEIGHT_FORMATS[weight_format]


def teacher_forced(weights: DecoderWeights, script: Script, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The talker's and the predictor's logits of every frame."""
    decoder = Decoder(weights, lanes=1, positions=24)
    decoder.begin(0, script.seed)
    decoder.prefill(0, script.prompt)
    talker, predictor = [], []
    for text, forced in zip(script.text, codes, strict=True):
        talker.append(decoder.state.logits[0].clone())
        decoder.step([0], text[None], forced[None])
        predictor.append(decoder.state.predictor_logits[0].clone())
    return torch.stack(talker), torch.stack(predictor)


def script_and_codes(spec: DecoderSpec) -> tuple[Script, Tensor]:
    codes = torch.randint(0, 29, (6, spec.groups), generator=torch.Generator().manual_seed(0))
    return Script(spec.talker.hidden, 7), codes


@pytest.mark.parametrize(("name", "weight_format"), CASES)
def test_the_twin_is_the_same_on_either_layout(name, weight_format) -> None:
    spec = ALL_SPECS[name]
    script, codes = script_and_codes(spec)
    kernel, twin = (
        teacher_forced(random_weights(spec, weight_format, layout), script, codes) for layout in ("kernel", "twin")
    )
    for what, mine, expected in zip(("talker", "predictor"), kernel, twin, strict=True):
        far = (mine - expected).abs().amax(-1).flatten().argmax().item()
        torch.testing.assert_close(
            mine, expected, atol=CLOSE[weight_format], rtol=0, msg=lambda m, w=what, f=far: f"{w}, worst at {f}: {m}"
        )


@pytest.mark.parametrize("layout", ["twin", "kernel"])
@pytest.mark.parametrize("name", [name for name, weight_format in CASES if weight_format == "q8_0"])
def test_a_q8_0_decoder_is_that_of_its_values(name, layout) -> None:
    """Against float64, on tensors that lose so much in 8 bits that the decoder of the original is another."""
    spec = ALL_SPECS[name]
    original = {n: coarse(n, t) for n, t in random_tensors(spec).items()}
    held = {n: rounded(t, "q8_0") if is_quantised(n) else t for n, t in original.items()}
    held = {n: t.bfloat16().float() if "embedding" in n or n.endswith("bias") else t for n, t in held.items()}
    script, codes = script_and_codes(spec)
    mine = teacher_forced(pack_decoder(original.__getitem__, spec, "q8_0", layout=layout), script, codes)
    near, far = (naive_logits(spec, tensors, script, codes) for tensors in (held, original))
    for what, logits, expected, other in zip(("talker", "predictor"), mine, near, far, strict=True):
        assert distance(logits, expected) < 0.02, f"{what}: {distance(logits, expected)}"
        assert distance(logits, other) > 0.05, f"{what}: the original is as near, which proves little"


def is_quantised(name: str) -> bool:
    return not (name.endswith(("norm", "bias")) or "embedding" in name)


def coarse(name: str, tensor: Tensor) -> Tensor:
    """In every block that a norm feeds one weight is large, and meets a zero: it does nothing but set the scale."""
    part = name.rsplit(".", 1)[-1]
    if part in ("input_norm", "post_norm", "norm"):
        tensor[::32] = 0.0
    elif part in ("q", "k", "v", "gate", "up", "head") or "heads" in name:
        tensor[:, ::32] *= 40
    return tensor


def naive_logits(spec: DecoderSpec, tensors: dict[str, Tensor], script: Script, codes: Tensor) -> tuple[Tensor, Tensor]:
    frames = NaiveDecoder(spec, tensors, script.penalty).frames(
        script.prompt.double().numpy(), script.text.double().numpy(), codes.numpy()
    )
    talker, predictor = zip(*[(torch.from_numpy(t), torch.from_numpy(p)) for _, t, p in frames], strict=True)
    return torch.stack(talker), torch.stack(predictor)


def distance(mine: Tensor, expected: Tensor) -> float:
    return ((mine.double() - expected).norm() / expected.norm()).item()


# Memory.

LARGE = {
    "one width": decoder_spec(
        stack_spec(512, 1024, 515, head_dim=32), stack_spec(512, 1024, 509, heads=4, head_dim=32)
    ),
    "projected": decoder_spec(
        stack_spec(512, 1024, 515, head_dim=32), stack_spec(256, 1024, 509, heads=4, head_dim=32)
    ),
}


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that tensors took at a time, above what was there before."""
    gc.collect()  # or what earlier tests have left is let go in the middle
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    assert kept is not None and total > 0
    return most


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("name", LARGE)
def test_packing_needs_little_more_than_the_result(name, weight_format, monkeypatch) -> None:
    monkeypatch.setattr("megakernel.q8._AT_A_TIME", 1 << 14)
    monkeypatch.setattr("megakernel.packed._PROJECTED_ROWS", 64)
    spec = LARGE[name]
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(spec).items()}
    kept: list[DecoderWeights] = []

    def pack() -> DecoderWeights:
        kept.append(pack_decoder(lambda name: tensors[name].clone(), spec, weight_format, layout="kernel"))
        return kept[0]

    peak = peak_bytes(pack)
    assert kept[0].packed is not None
    result = sum(tensor.nbytes for tensor in tensors_of(kept[0].packed))
    largest = max(tensor.nbytes for tensor in tensors.values())
    projection = 4 * spec.predictor.hidden * spec.talker.hidden if spec.projects else 0  # widened while it is used
    bound = result + largest + projection + (1 << 20)
    assert result <= peak < bound, f"{peak / 1e6:.1f} MB for {result / 1e6:.1f} MB, bound {bound / 1e6:.1f} MB"
    assert bound < 1.5 * result, "the bound proves little"


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_matrices_take_the_bytes_of_their_format(weight_format) -> None:
    _, packed = packed_weights("projected blocks", weight_format)
    for matrix in (packed.head, packed.predictor_heads, packed.talker.qkv, packed.predictor.down):
        taken = matrix.rows.nbytes + (matrix.scales.nbytes if weight_format == "q8_0" else 0)
        assert taken == matrix_bytes(matrix.rows.numel(), weight_format)


# Tensors of another shape. Copied as they are, some of them would be spread over the rows.


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("talker.layers.1.o", (96, 1), "talker.layers.1.o of shape"),
        ("talker.layers.0.q", (1, 96), r"talker.layers.0.q, .* have 17 rows of 48"),
        ("predictor.layers.0.up", (97, 32), "predictor.layers.0.up of shape"),
        ("predictor.layers.1.k_norm", (1,), "predictor.layers.1.k_norm of shape"),
        ("talker.embedding", (1, 96), "talker.embedding have 1 rows of 43"),
        ("predictor.heads.2", (30, 32), "predictor.heads.2 of shape"),
        ("predictor.projection.weight", (31, 96), "talker.head, predictor.projection.weight have 74 rows of 75"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(weight_format, name, shape, message) -> None:
    spec = ALL_SPECS["projected blocks"]
    tensors = random_tensors(spec) | {name: torch.ones(shape)}
    with pytest.raises(ValueError, match=message):
        pack_decoder(tensors.__getitem__, spec, weight_format, layout="kernel")
