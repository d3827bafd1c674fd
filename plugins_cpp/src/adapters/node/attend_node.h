// One node kvlathe::Attend in one step on a GPU: the TensorRT plugin and the ONNX Runtime operator
// both run this.
//
// It appends the step's k' and v' to the pool in place and attends: spread, append, attend_decode
// (cache.h, abi.h), asynchronous on a stream, in a workspace that the caller lends. What it must
// know of the layer is the table that the node carries.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "adapters/node/node_parts.h"
#include "common/layer_table.h"
#include "kvlathe/cache.h"

namespace kvlathe {

// Where the op's inputs are (docs/attend.md); -1: the plan has no such input.
struct Places {
  explicit Places(const TableHeader& table);
  int32_t q, k, v, cos, sin, cu_seqlens_q, query_offsets, lengths, page_tables, pool_f16, pool_u8,
      proj_q, proj_k, centre_k, tables;
};

// An input: device memory and its sizes.
struct NodeInput {
  const void* data;
  int32_t rank;
  const int64_t* dims;
};

// Bytes of each piece of the workspace.
struct Pieces {
  size_t queries, sequences, visible, row_lengths, hidden, tables, attend, list;
  size_t bytes() const {
    return queries + sequences + visible + row_lengths + hidden + tables + attend + list;
  }
};

class Node {
 public:
  // `table`: layer_table of kvlathe/plan/layer_table.py. Throws Refusal for a form that the CUDA
  // kernels do not run.
  Node(std::vector<int32_t> table, float scale);

  // Throws Refusal where inputs, the last of them `layout`, contradict the table.
  void check(const std::vector<NodeInput>& in) const;

  // Bytes of workspace that inputs of these sizes need: on the current device, or on any.
  size_t workspace_bytes(const std::vector<NodeInput>& in) const;
  size_t workspace_anywhere(const std::vector<NodeInput>& in) const;

  // o [T, o_width] and rows [T, rows_width] in half precision, after check(). `workspace`: of
  // `lent` bytes, holding anything.
  void run(const std::vector<NodeInput>& in, void* o, void* rows, void* workspace, size_t lent,
           void* stream) const;

  const kvlathe_layer layer;
  const Places places;
  const std::vector<NodePart> parts;
  const std::vector<int32_t> attended;  // those that have lanes
  const float scale;
  const bool tiled;  // where a GPU has the kernel for prompts

 private:
  Pieces pieces(const std::vector<NodeInput>& in, int64_t attend) const;
  int64_t attend_bytes() const;
};

// Queues zeros (clear.cu). Throws Refusal.
void device_clear(void* data, size_t bytes, void* stream);

}  // namespace kvlathe
