// The host of observe: what is refused, sizes, and the two launches. The kernels are in observe.cuh.
#include "cuda/cache/observe.cuh"

#include <algorithm>

#include "common/decode_call.h"
#include "cuda/host.h"

namespace kvlathe::cuda {
namespace {

// Blocks of a lane and a sequence that share its tokens while one row is observed.
constexpr int kDecodeBlocks = 16;

void check(const kvlathe_observe_args& a) {
  check_version(a.abi_version);
  require(a.call && a.parts, KVLATHE_BAD_ARGUMENT, "observe has no call or no parts");
  require(a.batch >= 0 && a.tokens >= 0 && a.most_rows >= 0 && a.tokens == a.call->batch,
          KVLATHE_BAD_ARGUMENT, "a size is negative, or the call has other rows");
  require(a.call->part_count <= KVLATHE_MAX_SLOTS, KVLATHE_UNSUPPORTED,
          "tokens of more than " + std::to_string(KVLATHE_MAX_SLOTS) + " parts are observed");
  require(!is_scored(*a.call), KVLATHE_UNSUPPORTED,
          "scores are bounded or have sink logits: tokens are not ranked by them on a GPU");
  check_element(a.call->element);
  require(a.call->group_size <= kMaxGroup, KVLATHE_UNSUPPORTED,
          "group_size " + std::to_string(a.call->group_size) + " is above " +
              std::to_string(kMaxGroup));
  for (int i = 0; i < a.call->part_count; ++i) {
    if (any_quantized(a.call->parts[i])) check_codes(*a.call);
  }
}

// Of one row in all lanes.
int64_t bytes_of_row(const kvlathe_observe_args& a, int64_t heads) {
  return int64_t{sizeof(float2)} * a.call->group_size * heads;
}

void check_memory(const kvlathe_observe_args& a, int64_t heads) {
  require(a.cu_seqlens_q && a.rows && a.row_starts && a.states, KVLATHE_BAD_ARGUMENT,
          "cu_seqlens_q, rows, row_starts or states is null");
  check_aligned(a.states, sizeof(float2), "the states");
  const int64_t bytes = a.tokens * bytes_of_row(a, heads);
  require(a.states_bytes >= bytes, KVLATHE_TOO_SMALL,
          "the states have " + std::to_string(a.states_bytes) + " bytes and " +
              std::to_string(bytes) + " are needed");
  for (int i = 0; i < a.call->part_count; ++i) {
    const kvlathe_observe_part& part = a.parts[i];
    require(part.page_table && part.lengths, KVLATHE_BAD_ARGUMENT,
            "an observed part has no page table or no lengths");
    require(!part.positions || (part.scores && a.token_positions), KVLATHE_BAD_ARGUMENT,
            "a part keeps positions without scores, or without those of the tokens");
  }
}

// An offset of a lane's scores, or positions; -1 where there are none.
int32_t field_of(const int32_t* offsets, int64_t lane, const kvlathe_attend_decode_args& call,
                 const kvlathe_part& part) {
  if (!offsets) return -1;
  const int64_t at = offsets[lane];
  require(at >= 0 && at % 4 == 0 && at + 4 * call.page_tokens <= part.page_stride,
          KVLATHE_BAD_ARGUMENT, "a lane's scores lie outside its page");
  return int32_t(at);
}

ObserveLane lane_of(const kvlathe_observe_args& a, int i, const LaneRow& row) {
  const kvlathe_part& part = a.call->parts[i];
  const int64_t lane = &row - lanes_of(part);
  const Format format = format_k(part);
  const int groups = groups_of(format, row.rank_k, a.call->page_tokens);
  require(!format.quantized() ||
              row.groups_k == groups * (format.by_channel() ? row.rank_k : a.call->page_tokens),
          KVLATHE_BAD_ARGUMENT,
          "the lane of head " + std::to_string(row.head) +
              " has other group counts than its part's groups give");
  return {row.k, row.k_meta, field_of(a.parts[i].scores, lane, *a.call, part),
          field_of(a.parts[i].positions, lane, *a.call, part), groups};
}

ObserveParams params_of(const kvlathe_observe_args& a, const std::vector<Head>& heads) {
  const kvlathe_attend_decode_args& call = *a.call;
  ObserveParams p{};
  p.pool = const_cast<char*>(static_cast<const char*>(call.pool));
  p.q = static_cast<const uint16_t*>(call.q), p.q_stride = call.q_stride;
  p.cu_seqlens_q = a.cu_seqlens_q, p.rows = a.rows, p.row_starts = a.row_starts;
  p.positions = a.token_positions, p.states = static_cast<float2*>(a.states);
  p.scale_log2 = call.scale * 1.4426950408889634f;
  p.heads = int32_t(heads.size()), p.group_size = call.group_size;
  p.page_tokens = call.page_tokens, p.parts = call.part_count, p.tokens = a.tokens;
  for (int i = 0; i < call.part_count; ++i) {
    const kvlathe_observe_part& part = a.parts[i];
    p.part[i] = {
        part.page_table,        part.lengths, call.parts[i].page_stride,       part.lengths_stride,
        part.page_table_stride, part.fresh,   side_of(format_k(call.parts[i]))};
  }
  for (size_t h = 0; h < heads.size(); ++h) {
    check_cuda_lane(heads[h].rank_k, heads[h].rank_v);
    p.head[h].q_offset = int32_t(heads[h].q_offset), p.head[h].rank = heads[h].rank_k;
    // Rows 16 bytes apart in the banks: the words of a product's factor lie in different ones.
    p.pitch = std::max(p.pitch, 2 * heads[h].rank_k + 16);
    for (int i = 0; i < call.part_count; ++i) {
      if (heads[h].lane[i]) p.head[h].lane[i] = lane_of(a, i, *heads[h].lane[i]);
    }
  }
  return p;
}

// Shared memory for the codes of 64 tokens in any lane.
int codes_bytes(const ObserveParams& p) {
  int most = 0;
  for (int h = 0; h < p.heads; ++h) {
    for (int i = 0; i < p.parts; ++i) {
      const FormSide& side = p.part[i].side;
      const int groups = p.head[h].lane[i].groups, rank = p.head[h].rank;
      if (is_half(side.bits) || !groups) continue;
      most = std::max(most, int(slab_bytes(rank, kObserveTokens, side.bits)) +
                                side.meta_size(groups, rank, kObserveTokens));
    }
  }
  return most;
}

// As many as the states have room for. More than a row of each state would be of no use.
int spare_rows(const kvlathe_observe_args& a, const ObserveParams& p) {
  const int64_t rows = a.states_bytes / bytes_of_row(a, p.heads) - a.tokens;
  return int(std::min<int64_t>(rows / a.batch, kMostSplits * kStateBlocks));
}

// Of one sequence with any number of observed rows: one for each of its columns, or those that
// share them.
int blocks_of(const kvlathe_observe_args& a, const ObserveParams& p) {
  const int columns = (a.most_rows * p.group_size + kObserveColumns - 1) / kObserveColumns;
  if (!columns) return 0;
  return std::max(columns, std::min(kMostSplits * columns, kStateBlocks / p.heads));
}

template <class Kernel>
void launch(Kernel kernel, ObserveParams& p, int blocks, int batch, int shared, void* stream) {
  if (!blocks) return;
  check_shared(shared, "64 tokens of ranks this large, which are observed");
  reserve_shared(kernel, shared);
  void* arguments[] = {&p};
  check_cuda(cudaLaunchKernel(kernel, dim3(blocks, p.heads, batch), dim3(kObserveThreads),
                              arguments, size_t(shared), static_cast<cudaStream_t>(stream)),
             "launching observe");
}

void observe(const kvlathe_observe_args& a) {
  check(a);
  const std::vector<Head> heads = checked_heads(*a.call);
  if (!a.batch || !a.tokens) return;
  check_memory(a, int64_t(heads.size()));
  ObserveParams p = params_of(a, heads);
  const int shared = observe_room(p.pitch, codes_bytes(p));
  int tiles = 0;
  for (int i = 0; i < p.parts; ++i) {
    if (a.parts[i].scores)
      tiles = std::max(
          tiles, (p.part[i].table_stride * p.page_tokens + kObserveTokens - 1) / kObserveTokens);
  }
  if (!tiles) return;
  if (a.most_rows <= 1) tiles = std::min(tiles, kDecodeBlocks);
  p.spare = spare_rows(a, p);
  const int blocks = blocks_of(a, p);
  const auto with = [&](auto kind) {
    using P = decltype(kind);
    const bool half = a.call->element == KVLATHE_F16;
    launch(half ? observe_states<Half, P> : observe_states<Bfloat, P>, p, blocks, a.batch, shared,
           a.call->stream);
    launch(half ? observe_tokens<Half, P> : observe_tokens<Bfloat, P>, p, tiles, a.batch, shared,
           a.call->stream);
  };
  if (is_wide(*a.call)) return with(ObserveWide{});
  any_float8(*a.call) ? with(ObserveFloat8{}) : with(ObserveParams{});
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_observe(const kvlathe_observe_args* args, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    kvlathe::cuda::observe(*args);
  });
}
