// AVX2, FMA and the 256-bit int8 dot product.
#define DLMRT_ISA avxvnni
#define DLMRT_AVXVNNI
#include "vec_avx2.hpp"
#include "dot_bf16.hpp"
#include "table.hpp"
