"""Weight formats in numpy, bit-exact: what the bytes of a quantised matrix mean, and how values become those bytes.

Every function is over plain arrays; fp8 and packed fp4 are uint8 bits, since numpy has no such types. Dequantised
values are float32. The conventions are those of the two libraries that write such files, so that both open ours:

    NVFP4   value = e2m1 code * e4m3 scale of 16 neighbours in a row * one float32 scale of the matrix. Two codes a
            byte, the even column in the low half. Only this float32 scale differs between dialects: a multiplier here.
    FP8     e4m3 value * float32 scale of the row, of a 128 x 128 block, or of the matrix.
    INT8    int8 value * float32 scale of the row.
    INT4    (code - zero point) * float32 scale of a group in a row; eight codes an int32, low bits first, stored + 8.

Rounding is to nearest, ties to the even code, and saturates.

Legend: O rows (outputs), I columns (inputs), G groups in a row, T rows of activations.

Source: nvidia-modelopt 0.47.0 NVFP4QTensor, compressed-tensors 0.20.0 compressors (compared in tests).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt8 = npt.NDArray[np.uint8]
Int8 = npt.NDArray[np.int8]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

FP4_GROUP = 16
FP8_BLOCK = 128
INT4_PER_WORD = 8

_E2M1_MAX, _E4M3_MAX = np.float32(6.0), np.float32(448.0)
_E4M3_MIN = np.float32(2.0**-9)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
_E2M1_PAIRS = np.stack((np.tile(_E2M1, 16), np.repeat(_E2M1, 16)), axis=1)  # [256, 2]: low half first
_E2M1_MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)


def _e4m3_values() -> Float32:
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where(bits & 128, -magnitude, magnitude)
    values[[127, 255]] = np.nan
    return values.astype(np.float32)


_E4M3 = _e4m3_values()


def e4m3_to_float32(bits: UInt8) -> Float32:
    """Values of e4m3 bits (the variant without infinities); exact."""
    values: Float32 = _E4M3[bits]
    return values


def float32_to_e4m3(values: Float32) -> UInt8:
    """Bits of the nearest e4m3 values, saturated at 448."""
    magnitude = np.minimum(np.abs(values).astype(np.float32), _E4M3_MAX)
    _, exponent = np.frexp(magnitude)
    # Three bits behind the leading one; below 2^-6 the steps no longer shrink.
    step = np.ldexp(np.float32(1), np.maximum(exponent - 4, -9))
    rounded = np.rint(magnitude / step) * step
    bits: UInt8 = np.searchsorted(_E4M3[:127], rounded).astype(np.uint8)
    bits |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return bits


def round_e2m1(values: Float32) -> UInt8:
    """Codes 0..15 of the nearest e2m1 values, saturated at 6."""
    magnitude = np.abs(values)
    code = np.zeros(values.shape, dtype=np.uint8)
    for lower, middle in enumerate(_E2M1_MIDDLES):
        code += magnitude >= middle if lower % 2 else magnitude > middle
    code |= np.signbit(values).astype(np.uint8) << np.uint8(3)
    return code


def unpack_e2m1(packed: UInt8) -> Float32:
    """Values [..., I] of packed codes [..., I / 2]."""
    return _E2M1_PAIRS[packed].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_e2m1(codes: UInt8) -> UInt8:
    """Packed [..., I / 2] of codes [..., I]."""
    packed: UInt8 = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return packed


def dequantize_nvfp4(packed: UInt8, scale_bits: UInt8, shared: np.float32, *, is_divisor: bool = False) -> Float32:
    """Values [O, I] of packed codes [O, I / 2], e4m3 scales [O, I / 16] and the matrix's scale.

    `is_divisor`: `shared` is the reciprocal, as compressed-tensors stores it; dividing gives that library's last bit.
    """
    block = e4m3_to_float32(scale_bits)
    scale = block / shared if is_divisor else block * shared
    values = unpack_e2m1(packed)
    return (values.reshape(*scale.shape, FP4_GROUP) * scale[..., None]).reshape(values.shape)


def quantize_nvfp4(values: Float32, multiplier: np.float32 | None = None) -> tuple[UInt8, UInt8, np.float32]:
    """Packed codes, e4m3 scales and the matrix's scale of values [O, I].

    Args:
        multiplier: scale that several matrices share; None: of this matrix alone.
    """
    shared = nvfp4_multiplier(np.abs(values).max()) if multiplier is None else np.float32(multiplier)
    return *_quantize_nvfp4(values, shared), shared


def _quantize_nvfp4(values: Float32, shared: np.float32) -> tuple[UInt8, UInt8]:
    groups: Float32 = values.reshape(*values.shape[:-1], -1, FP4_GROUP)
    largest = np.abs(groups).max(axis=-1)
    wanted: Float32 = np.where(largest > 0, largest / (_E2M1_MAX * shared), np.float32(1)).astype(np.float32)
    scale_bits = float32_to_e4m3(np.clip(wanted, _E4M3_MIN, _E4M3_MAX))
    scale = e4m3_to_float32(scale_bits) * shared
    codes = round_e2m1((groups / scale[..., None]).reshape(values.shape))
    return pack_e2m1(codes), scale_bits


def nvfp4_multiplier(largest: float | np.floating) -> np.float32:
    """Scale of a matrix (or of activations) whose largest magnitude is `largest`."""
    return np.float32(largest) / np.float32(_E2M1_MAX * _E4M3_MAX) if largest > 0 else np.float32(1)


def rescale_nvfp4(scale_bits: UInt8, multiplier: np.float32, wanted: np.float32) -> UInt8:
    """Block scales for the matrix scale `wanted` instead of `multiplier`, so that matrices can share one."""
    factor = np.float32(multiplier) / np.float32(wanted)
    return float32_to_e4m3(np.clip(e4m3_to_float32(scale_bits) * factor, _E4M3_MIN, _E4M3_MAX))


def quantize_nvfp4_input(x: Float32, divisor: np.float32) -> Float32:
    """Activations [T, I] as the W4A4 product sees them, given the static scale of their layer as its reciprocal."""
    groups = x.reshape(*x.shape[:-1], -1, FP4_GROUP)
    largest = np.abs(groups).max(axis=-1)
    scale = e4m3_to_float32(float32_to_e4m3(np.minimum(divisor * (largest / _E2M1_MAX), _E4M3_MAX))) / divisor
    safe = np.where(scale > 0, scale, np.float32(1))[..., None].astype(np.float32)
    values: Float32 = (_E2M1[round_e2m1(groups / safe)] * scale[..., None]).reshape(x.shape)
    return values


def swizzle_scales(scale_bits: UInt8) -> UInt8:
    """Block scales [O, G] in the order of Blackwell's matrix kernels: tiles of 128 x 4, padded with zeros."""
    rows, groups = scale_bits.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-groups // 4) * 4), dtype=np.uint8)
    padded[:rows, :groups] = scale_bits
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(padded.shape)


def dequantize_fp8(bits: UInt8, scale: Float32) -> Float32:
    """Values [O, I]; `scale` is one number, [O, 1], or [O / 128, I / 128] rounded up."""
    values = e4m3_to_float32(bits)
    if scale.size == 1 or scale.shape == (bits.shape[0], 1):
        return values * (scale if scale.size > 1 else scale.reshape(()))
    whole = scale.repeat(FP8_BLOCK, axis=0).repeat(FP8_BLOCK, axis=1)
    return values * whole[: bits.shape[0], : bits.shape[1]]


def quantize_fp8(values: Float32, scale: Float32 | None = None) -> tuple[UInt8, Float32]:
    """e4m3 bits and their scale, by default one a row [O, 1]."""
    scale = _row_scale(values, _E4M3_MAX) if scale is None else scale
    return float32_to_e4m3(values / scale), scale


def quantize_fp8_input(x: Float32) -> Float32:
    """Activations [T, I] rounded to fp8 with a scale of each row."""
    bits, scale = quantize_fp8(x)
    return e4m3_to_float32(bits) * scale


def quantize_int8(values: Float32, scale: Float32 | None = None) -> tuple[Int8, Float32]:
    """int8 values and their scale, by default one a row [O, 1]."""
    scale = _row_scale(values, np.float32(127.5)) if scale is None else scale
    return np.clip(np.rint(values / scale), -128, 127).astype(np.int8), scale


def dequantize_int8(values: Int8, scale: Float32) -> Float32:
    """Values [O, I] of int8 and the scales of their rows [O, 1] or of the matrix."""
    return values.astype(np.float32) * (scale if scale.size > 1 else scale.reshape(()))


def quantize_int8_input(x: Float32) -> Float32:
    """Activations [T, I] rounded to int8 with a scale of each row."""
    return dequantize_int8(*quantize_int8(x))


def quantize_int4(values: Float32, group: int) -> tuple[Int32, Float32]:
    """Packed codes [O, I / 8] and scales [O, I / group], symmetric."""
    groups = values.reshape(values.shape[0], -1, group)
    scale = _row_scale(groups, np.float32(7.5))
    codes = np.clip(np.rint(groups / scale), -8, 7).astype(np.int32).reshape(values.shape)
    return pack_int4(codes), scale[..., 0]


def dequantize_int4(packed: Int32, scale: Float32, columns: int, zero_point: Int32 | None = None) -> Float32:
    """Values [O, columns] of packed codes, scales [O, G] and zero points packed along the rows."""
    codes = unpack_int4(packed, columns).astype(np.float32)
    group = -(-columns // scale.shape[1])
    if zero_point is not None:
        zeros = unpack_int4(np.ascontiguousarray(zero_point.T), scale.shape[0]).T.astype(np.float32)
        codes -= zeros.repeat(group, axis=1)[:, :columns]
    return codes * scale.repeat(group, axis=1)[:, :columns]


def pack_int4(codes: Int32) -> Int32:
    """Words [O, I / 8] of codes -8..7 [O, I]; a last word that is not full ends in zero bits."""
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // INT4_PER_WORD) * INT4_PER_WORD), dtype=np.uint32)
    padded[:, :columns] = codes + 8
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words = padded.reshape(rows, -1, INT4_PER_WORD) << shifts
    packed: Int32 = np.bitwise_or.reduce(words, axis=-1).view(np.int32)
    return packed


def unpack_int4(packed: Int32, columns: int) -> Int32:
    """Codes -8..7 [O, columns] of words [O, I / 8]."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    codes: Int32 = (packed.view(np.uint32)[..., None] >> shifts & np.uint32(15)).astype(np.int32) - 8
    return codes.reshape(packed.shape[0], -1)[:, :columns]


def _row_scale(values: Float32, top: np.float32) -> Float32:
    """Scale of each row, 1 where a row is zero."""
    largest = np.abs(values).max(axis=-1, keepdims=True).astype(np.float32)
    scale: Float32 = np.where(largest > 0, largest / top, np.float32(1))
    return scale
