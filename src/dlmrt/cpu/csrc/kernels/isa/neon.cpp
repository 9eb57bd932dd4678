// 64-bit ARM baseline.
#define DLMRT_ISA neon
#include "vec_neon.hpp"
#include "dot_bf16.hpp"
#include "table.hpp"
