// Which kernel tables this machine can run, and the choice of one.
//
// Source: ours.
#pragma once
#include <string>
#include <vector>

#include "args.hpp"

namespace dlmrt::cpu {

// Tables that run here, best first; the last one is "portable".
const std::vector<const KernelTable*>& runnable_kernels();

// The table called `name`, or the best one for an empty name.
// Throws std::invalid_argument for a name that is unknown or cannot run here; the message lists the possible ones.
const KernelTable& select_kernels(const std::string& name);

}  // namespace dlmrt::cpu
