// x86-64-v4 with VNNI and the bf16 dot product.
#define DLMRT_ISA avx512bf16
#define DLMRT_AVX512BF16
#include "vec_avx512.hpp"
#include "table.hpp"
