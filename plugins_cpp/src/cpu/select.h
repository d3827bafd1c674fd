// The choice among the compiled kernels: those that run on this machine.
#pragma once

#include "cpu/kernels.h"

namespace kvlathe {

// For a kvlathe_isa; AUTO is the best there is. Refuses one that this machine or this build lacks.
const Kernels& kernels_for(int32_t isa);

}  // namespace kvlathe
