// x86-64-v4 with VNNI; bf16 products widened to fp32.
#define DLMRT_ISA avx512
#include "vec_avx512.hpp"
#include "dot_bf16.hpp"
#include "table.hpp"
