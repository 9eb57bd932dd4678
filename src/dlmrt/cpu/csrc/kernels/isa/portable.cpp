// Plain C++.
#define DLMRT_ISA portable
#include "vec_portable.hpp"
#include "table.hpp"
