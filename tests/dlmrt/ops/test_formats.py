"""Weight formats against the libraries that write them: stored matrices of each, and rounding everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.ops import formats

FINITE = st.floats(-448, 448, width=32)


@pytest.fixture(scope="module")
def stored(data):
    tensors = read_tensors(data / "quant_formats" / "expected.safetensors")
    return {name: np.array(tensor.raw()) for name, tensor in tensors.items()}


def relative(values, wanted):
    return np.linalg.norm(values - wanted) / np.linalg.norm(wanted)


def test_e4m3_values_are_torchs():
    bits = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(formats.e4m3_to_float32(bits), wanted)


@given(hnp.arrays(np.float32, st.integers(1, 20), elements=FINITE))
@settings(max_examples=60, deadline=None)
def test_e4m3_rounds_as_torch(values):
    wanted = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(formats.float32_to_e4m3(values), wanted)


def test_e4m3_ties_and_saturation():
    codes = np.arange(126, dtype=np.uint8)
    middles = (formats.e4m3_to_float32(codes) + formats.e4m3_to_float32(codes + 1)) / 2
    wanted = torch.from_numpy(middles).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(formats.float32_to_e4m3(middles), wanted)
    assert formats.float32_to_e4m3(np.array([1e9, -1e9], np.float32)).tolist() == [0x7E, 0xFE]


def test_e2m1_ties(stored):
    np.testing.assert_array_equal(formats.round_e2m1(stored["e2m1_ties.input"]), stored["e2m1_ties.code"])


@given(hnp.arrays(np.uint8, (3, 16), elements=st.integers(0, 15)))
@settings(max_examples=30, deadline=None)
def test_e2m1_packs_and_unpacks(codes):
    """Every value survives but -0, which is 0 with a sign."""
    values = formats.unpack_e2m1(formats.pack_e2m1(codes))
    np.testing.assert_array_equal(formats.round_e2m1(values), codes)


def test_nvfp4_equals_both_libraries(stored):
    """K04: a multiplier and its reciprocal give each library's own values to the last bit."""
    modelopt = [stored[f"nvfp4_modelopt.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")]
    np.testing.assert_array_equal(formats.dequantize_nvfp4(*modelopt), stored["nvfp4.dequant"])
    ct = [stored[f"nvfp4_ct.{part}"] for part in ("weight_packed", "weight_scale", "weight_global_scale")]
    np.testing.assert_array_equal(formats.dequantize_nvfp4(*ct, is_divisor=True), stored["nvfp4_ct.dequant"])
    for ours, theirs in zip(formats.quantize_nvfp4(stored["w"]), modelopt, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_products_of_quantised_numbers(stored):
    x, weight = stored["x"], stored["nvfp4.dequant"]
    rounded = formats.quantize_nvfp4_input(x, stored["nvfp4_act.input_global_scale"])
    np.testing.assert_array_equal(rounded, stored["nvfp4_act.x_dequant"])
    assert relative(rounded @ weight.T, stored["nvfp4_w4a4.y"]) < 1e-5
    assert relative(x @ weight.T, stored["nvfp4_w4a16.y"]) < 1e-5


@pytest.mark.parametrize("number", range(4))
def test_swizzle(stored, number):
    np.testing.assert_array_equal(formats.swizzle_scales(stored[f"swizzle{number}.in"]), stored[f"swizzle{number}.out"])


def test_fp8(stored):
    bits, scale = formats.quantize_fp8(stored["w"])
    np.testing.assert_array_equal(bits, stored["fp8_channel.weight"])
    np.testing.assert_array_equal(scale, stored["fp8_channel.weight_scale"])
    block = formats.dequantize_fp8(stored["fp8_block.weight"], stored["fp8_block.weight_scale"])
    np.testing.assert_array_equal(block, stored["fp8_block.dequant"])
    whole = formats.dequantize_fp8(stored["fp8_tensor.weight"], stored["fp8_tensor.weight_scale"])
    assert relative(whole, stored["w"]) < 0.03
    token = formats.e4m3_to_float32(formats.quantize_fp8(stored["x"], stored["fp8_token.x_scale"])[0])
    np.testing.assert_array_equal(token * stored["fp8_token.x_scale"], stored["fp8_token.x_dequant"])
    product = stored["fp8_token.x_dequant"] @ formats.dequantize_fp8(bits, scale).T
    assert relative(product, stored["fp8_dynamic.y"]) < 1e-5


def test_int8(stored):
    values, scale = formats.quantize_int8(stored["w"])
    np.testing.assert_array_equal(values, stored["int8_channel.weight"])
    np.testing.assert_array_equal(scale, stored["int8_channel.weight_scale"])
    token, token_scale = formats.quantize_int8(stored["x"], stored["int8_token.x_scale"])
    np.testing.assert_array_equal(token, stored["int8_token.x_q"])
    product = token * token_scale @ formats.dequantize_int8(values, scale).T
    assert relative(product, stored["int8_w8a8.y"]) < 1e-5


def test_int4(stored):
    words, scale = formats.quantize_int4(stored["w"], 128)
    np.testing.assert_array_equal(words, stored["int4_sym.weight_packed"])
    np.testing.assert_array_equal(scale, stored["int4_sym.weight_scale"])
    np.testing.assert_array_equal(formats.dequantize_int4(words, scale, 256), stored["int4_sym.dequant"])
    asymmetric = [stored[f"int4_asym.{part}"] for part in ("weight_packed", "weight_scale")]
    values = formats.dequantize_int4(*asymmetric, 256, stored["int4_asym.weight_zero_point"])
    np.testing.assert_array_equal(values, stored["int4_asym.dequant"])


@given(hnp.arrays(np.int32, st.tuples(st.integers(1, 4), st.integers(1, 21)), elements=st.integers(-8, 7)))
@settings(max_examples=30, deadline=None)
def test_int4_packs_and_unpacks(codes):
    np.testing.assert_array_equal(formats.unpack_int4(formats.pack_int4(codes), codes.shape[1]), codes)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_and_blocks_of_zeros_stay_zero(rows):
    """A zero row, and a zero block beside a full one; nothing divides by zero."""
    values = np.random.default_rng(0).normal(size=(6, 128)).astype(np.float32)
    values[:rows] = 0
    values[:, :16] = 0
    with np.errstate(all="raise"):
        packed, scale, shared = formats.quantize_nvfp4(values)
        restored = [
            formats.dequantize_nvfp4(packed, scale, shared),
            formats.dequantize_fp8(*formats.quantize_fp8(values)),
            formats.dequantize_int8(*formats.quantize_int8(values)),
            formats.dequantize_int4(*formats.quantize_int4(values, 128), 128),
            formats.quantize_nvfp4_input(values, np.float32(1 / shared)),
            formats.quantize_fp8_input(values),
            formats.quantize_int8_input(values),
        ]
    for result in restored:
        assert (result[values == 0] == 0).all() and relative(result, values) < 0.2


def test_error_of_gaussian_weights():
    """Each format's relative error on noise, as measured with the libraries."""
    values = np.random.default_rng(1).normal(0, 0.02, (64, 256)).astype(np.float32)
    packed, scale, shared = formats.quantize_nvfp4(values)
    assert 0.08 < relative(formats.dequantize_nvfp4(packed, scale, shared), values) < 0.12
    assert relative(formats.dequantize_fp8(*formats.quantize_fp8(values)), values) < 0.03
    assert relative(formats.dequantize_int8(*formats.quantize_int8(values)), values) < 0.01
    assert relative(formats.dequantize_int4(*formats.quantize_int4(values, 128), 256), values) < 0.13


def test_matrices_of_one_scale_keep_their_precision():
    """K10: gate and up with largest values .08 and .4; re-scaled blocks cost little, one scale for both is nonsense."""
    rng = np.random.default_rng(0)
    gate, up = (rng.normal(0, s, (64, 64)).astype(np.float32) for s in (0.02, 0.1))
    packed, scale, shared = formats.quantize_nvfp4(gate)
    own = relative(formats.dequantize_nvfp4(packed, scale, shared), gate)
    wanted = formats.quantize_nvfp4(up)[2]
    rescaled = formats.rescale_nvfp4(scale, shared, wanted)
    assert relative(formats.dequantize_nvfp4(packed, rescaled, wanted), gate) <= 1.1 * own
    together = formats.quantize_nvfp4(gate, wanted)
    assert relative(formats.dequantize_nvfp4(*together), gate) <= 1.1 * own
    assert relative(formats.dequantize_nvfp4(packed, scale, wanted), gate) > 0.5
