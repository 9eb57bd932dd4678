// See pack.hpp.
#include "pack.hpp"

#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>

namespace dlmrt::cpu {
namespace {

float from_bf16(uint16_t v) {
  const uint32_t u = uint32_t{v} << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
uint16_t to_bf16(float f) {  // nearest even; NaN becomes a quiet NaN
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if (f != f) return static_cast<uint16_t>(u >> 16 | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

struct Column {  // one row of a source, an output column of the weight
  const Source* source = nullptr;
  int64_t row = 0;

  float value(int64_t k) const {
    const int64_t at = row * source->ld + k;
    return source->dtype == DType::kF32 ? static_cast<const float*>(source->data)[at]
                                        : from_bf16(static_cast<const uint16_t*>(source->data)[at]);
  }
  int code(int64_t k) const { return static_cast<const int8_t*>(source->data)[row * source->ld + k]; }
  int nibble(int64_t k) const {
    return static_cast<const uint8_t*>(source->data)[(row * source->ld + k) / 2] >> (4 * (k & 1)) & 15;
  }
};
Column find(const Source* sources, int count, int64_t n) {
  for (int i = 0; i < count; n -= sources[i++].rows)
    if (n < sources[i].rows) return {&sources[i], n};
  assert(false && "sources hold fewer rows than the weight");
  return {};
}

// codes[begin..end) = rint(w / s), s = max|w| / top; returns s
float quantize(const Column& c, int64_t begin, int64_t end, int top, int8_t* codes) {
  float largest = 0;
  bool finite = true;
  for (int64_t k = begin; k < end; k++) {
    const float v = std::fabs(c.value(k));
    finite &= std::isfinite(v);
    largest = v > largest ? v : largest;
  }
  const float s = largest / static_cast<float>(top);
  for (int64_t k = begin; k < end; k++)
    codes[k] = finite && s > 0 ? static_cast<int8_t>(std::nearbyint(c.value(k) / s)) : int8_t{0};
  return finite ? s : std::numeric_limits<float>::quiet_NaN();
}

uint8_t* panel_of(const Weight& w, int64_t panel) {
  return static_cast<uint8_t*>(w.panels) + panel * panel_bytes(w.dtype, w.group, w.k);
}

void pack_float(const Weight& w, const Column& c, int64_t n) {
  uint8_t* panel = panel_of(w, n / kPanel);
  for (int64_t k = 0; k < w.k; k++) {
    if (w.dtype == DType::kF32) reinterpret_cast<float*>(panel)[k * kPanel + n % kPanel] = c.value(k);
    else reinterpret_cast<uint16_t*>(panel)[(k / 2 * kPanel + n % kPanel) * 2 + k % 2] = to_bf16(c.value(k));
  }
}

void pack_int8(const Weight& w, const Column& c, int64_t n, int8_t* codes) {
  if (c.source->dtype == DType::kInt8) {
    for (int64_t k = 0; k < w.k; k++) codes[k] = static_cast<int8_t>(c.code(k));
    w.column_scale[n] = c.source->scales[c.row];
  } else {
    w.column_scale[n] = quantize(c, 0, w.k, 127, codes);
  }
  int32_t sum = 0;
  int8_t* panel = reinterpret_cast<int8_t*>(panel_of(w, n / kPanel));
  for (int64_t k = 0; k < w.k; k++) {
    panel[(k / 4 * kPanel + n % kPanel) * 4 + k % 4] = codes[k];
    sum += codes[k];
  }
  w.column_sum[n] = 128 * sum;
}

// nibble of (column n, k) inside its block: 8 k share a 64-byte vector
void put_nibble(uint8_t* block, int64_t n, int64_t k_in_block, int nibble) {
  const int64_t step = k_in_block / 4;
  block[step / 2 * kStepBytes + n % kPanel * 4 + k_in_block % 4] |=
      static_cast<uint8_t>((nibble & 15) << (4 * (step & 1)));
}

void pack_nvfp4(const Weight& w, const Column& c, int64_t n) {
  for (int64_t k = 0; k < w.k; k++) {
    uint8_t* block = panel_of(w, n / kPanel) + k / 16 * block_bytes(w.dtype, 16);
    put_nibble(block, n, k % 16, c.nibble(k));
    block[16 * kPanel / 2 + n % kPanel] = c.source->block_scales[c.row * ceil_div(w.k, 16) + k / 16];
  }
  w.column_scale[n] = c.source->global_scale;
}

void pack_int4(const Weight& w, const Column& c, int64_t n, int8_t* codes) {
  const int64_t groups = ceil_div(w.k, w.group);
  for (int64_t g = 0; g < groups; g++) {
    const int64_t begin = g * w.group, end = begin + w.group < w.k ? begin + w.group : w.k;
    float scale;
    if (c.source->dtype == DType::kInt8) {
      for (int64_t k = begin; k < end; k++) codes[k] = static_cast<int8_t>(c.code(k));
      scale = c.source->scales[c.row * groups + g];
    } else {
      scale = quantize(c, begin, end, 7, codes);
    }
    uint8_t* block = panel_of(w, n / kPanel) + g * block_bytes(w.dtype, w.group);
    for (int64_t k = begin; k < end; k++) put_nibble(block, n, k - begin, codes[k]);
    std::memcpy(block + w.group * kPanel / 2 + n % kPanel * sizeof(float), &scale, sizeof(float));
  }
  w.column_scale[n] = 1.f;
}

}  // namespace

void pack(const Source* sources, int count, const Weight& into, Range panels, int8_t* codes) {
  assert(into.dtype != DType::kInt8 || into.k <= kMaxInt8Width);
  for (int64_t p = panels.begin; p < panels.end; p++) {
    std::memset(panel_of(into, p), 0, static_cast<size_t>(panel_bytes(into.dtype, into.group, into.k)));
    for (int64_t n = p * kPanel; n < (p + 1) * kPanel; n++) {
      if (into.column_scale) into.column_scale[n] = 0;
      if (into.column_sum) into.column_sum[n] = 0;
      if (n >= into.n) continue;
      const Column c = find(sources, count, n);
      switch (into.dtype) {
        case DType::kF32:
        case DType::kBF16: pack_float(into, c, n); break;
        case DType::kInt8: pack_int8(into, c, n, codes); break;
        case DType::kNVFP4: pack_nvfp4(into, c, n); break;
        case DType::kInt4: pack_int4(into, c, n, codes); break;
      }
    }
  }
}

}  // namespace dlmrt::cpu
