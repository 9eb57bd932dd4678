// 64-bit ARM with the int8 dot product.
#define DLMRT_ISA neondot
#define DLMRT_NEONDOT
#include "vec_neon.hpp"
#include "dot_bf16.hpp"
#include "table.hpp"
