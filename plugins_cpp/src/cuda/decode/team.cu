// attend_team, compiled.
#include "cuda/decode/attend_team.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {

const void* team_kernel(bool half) {
  return half ? reinterpret_cast<const void*>(attend_team<Half, BundledTeam>)
              : reinterpret_cast<const void*>(attend_team<Bfloat, BundledTeam>);
}

}  // namespace kvlathe::cuda
