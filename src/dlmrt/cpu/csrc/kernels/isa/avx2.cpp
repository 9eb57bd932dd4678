// AVX2 and FMA.
#define DLMRT_ISA avx2
#include "vec_avx2.hpp"
#include "dot_bf16.hpp"
#include "table.hpp"
