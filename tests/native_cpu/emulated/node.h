// The node of ONNX Runtime and TensorRT on a CPU. What its append would write is
// written by a function that the test gives.
#pragma once

#include <cstring>
#include <vector>

#include "adapters/node/attend_node.cc"
#include "adapters/node/node_parts.cc"
#include "common/layer_table.cc"

namespace kvlathe {

using Append = void (*)(const kvlathe_append_args *);
inline Append append_of_test = nullptr;

void device_clear(void *data, size_t bytes, void *) {
  std::memset(data, 0, bytes);
}

} // namespace kvlathe

extern "C" int32_t kvlathe_cuda_append(const kvlathe_layer *,
                                       const kvlathe_append_args *args,
                                       kvlathe_status *) {
  return kvlathe::append_of_test(args), KVLATHE_OK;
}

extern "C" int64_t kvlathe_cuda_prompt_list_bytes(int32_t, int32_t, int32_t) {
  return 4096;
}

// As ONNX Runtime's operator runs it, in dirty memory. Bytes past the workspace
// stay as they were.
extern "C" int32_t node_run(const int32_t *table, int64_t count, float scale,
                            const kvlathe::NodeInput *inputs, int64_t input_count,
                            void *o, void *rows, kvlathe::Append append,
                            kvlathe_status *status) {
  return kvlathe::run(status, [&] {
    kvlathe::append_of_test = append;
    const kvlathe::Node node({table, table + count}, scale);
    const std::vector<kvlathe::NodeInput> in(inputs, inputs + input_count);
    node.check(in);
    const size_t size = node.workspace_bytes(in);
    std::vector<unsigned char> room(size + 512, 255);
    auto at = reinterpret_cast<uintptr_t>(room.data());
    auto *first = room.data() + (-at & 255);
    node.run(in, o, rows, first, size, nullptr);
    for (unsigned char *past = first + size; past < &room.back(); ++past)
      kvlathe::require(*past == 255, KVLATHE_TOO_SMALL,
                       "written past the workspace");
    kvlathe::require(node.workspace_anywhere(in) >= size, KVLATHE_TOO_SMALL,
                     "an engine would hold less workspace");
  });
}
